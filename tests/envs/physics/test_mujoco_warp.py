"""The MuJoCo Warp engine on device "cpu": equality with the CPU engine, and failures.

The first run compiles kernels for about two minutes; they are stored in ~/.cache/warp
($WARP_CACHE_PATH).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
import pytest
import run_helpers
import torch
import toy_envs
import warp as wp
from mujoco_warp import DeterminismType
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from toy_robots import MODELS

import embodied_envs
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_envs.physics import mujoco_env, mujoco_warp, warp_order
from embodied_envs.physics.make import compile_model
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.physics.mujoco_warp import WarpPhysics
from embodied_envs.physics.warp_model import default_capacities
from embodied_envs.tasks import State, Task
from embodied_envs.types import Box

SWING = (MODELS / "swing.xml").read_text()


class Swing(Task):
    """A rod that a motor turns and a ball that falls on the floor.

    The episode ends when the rod has turned by more than 2 rad.
    """

    id = "Swing"
    decimation, max_episode_steps, reset_noise, step_noise = 2, 12, 4, 1
    fields = ("xpos", "xmat", "site_xpos", "site_xmat")
    fields += ("sensordata", "cvel", "cfrc_ext", "body_mass")

    def __init__(self, stage: Any = "velocity") -> None:
        self.stage = stage

    def spec(self) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_string(SWING)

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        self.qpos0 = torch.tensor(model.qpos0, device=device, dtype=dtype)
        self.goal = torch.tensor([[[0.0, 0.5, 0.2]]], device=device, dtype=dtype)

    def observe(self, s: State) -> Tensor:
        parts = (
            s["qpos"],
            s["qvel"],
            s["sensordata"],
            s["site_xpos"].flatten(1),
            0.01 * s["cfrc_ext"].flatten(1),
        )
        return torch.cat([*parts, s["gust"][:, None], s["cvel"].flatten(1)], 1)

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return s["site_xpos"][:, 0, 2] - 0.1 * action.square().sum(1)

    def terminated(self, s: State) -> Tensor:
        return s["qpos"][:, 0].abs() > 2

    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        return {"gust": u[:, 0]}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        qpos = self.qpos0.expand(len(u), -1).clone()
        qpos[:, :4] += 0.2 * (u - 0.5)
        goal = self.goal + 0.1 * u[:, None, :3]
        return {"qpos": qpos, "qvel": u.new_zeros(len(u), 7), "mocap_pos": goal, "gust": u[:, 0]}


def make(
    id: str = f"{__name__}:Swing", n: int = 4, *, simulator: str = "warp", **options: Any
) -> Any:
    with warnings.catch_warnings(action="ignore"):  # deprecated MJCF attributes, PGS
        return toy_envs.make_world(id, n, simulator=simulator, **options)


def random_actions(env: MujocoEnv, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    assert isinstance(env.action_spec, Box)
    shape = env.num_envs, env.action_spec.size
    return [(torch.rand(shape, generator=generator) * 2 - 1).to(env.device) for _ in range(steps)]


def final(step: Any) -> Any:
    """What the step led to."""
    return step.obs if step.final_obs is None else step.final_obs


def compare(one: MujocoEnv, other: MujocoEnv, steps: int, tolerance: float) -> int:
    """Compare both engines from the same states within ``tolerance`` of 1 + |x|.

    Each world is compared until its first episode ends. Return the number of compared steps.
    """
    torch.testing.assert_close(one.reset(), other.reset(), rtol=tolerance, atol=1e-5)
    running, compared = torch.ones(one.num_envs, dtype=torch.bool), 0
    for action in random_actions(one, steps):
        a, b = one.step(action), other.step(action)
        torch.testing.assert_close(
            final(b)[running], final(a)[running], rtol=tolerance, atol=tolerance
        )
        torch.testing.assert_close(
            b.reward[running], a.reward[running], rtol=tolerance, atol=tolerance
        )
        assert torch.equal(a.terminated[running], b.terminated[running])
        compared += int(running.sum())
        running &= ~(a.terminated | a.truncated)
    return compared


# --------------------------------------------------------------------------- the same as on the CPU
@pytest.mark.parametrize("stage", ["velocity", "none", "forces"])
def test_equal_to_the_cpu_engine(stage: str) -> None:
    """12 control steps of free fall, impact and rolling: within 2e-4."""
    kwargs = {"stage": stage}
    assert compare(make(simulator="mujoco", kwargs=kwargs), make(kwargs=kwargs), 12, 2e-4) == 48


@pytest.mark.parametrize(
    ("name", "steps", "tolerance"),
    [
        ("HalfCheetah", 5, 2e-3),
        pytest.param("Hopper", 30, 1e-3, marks=pytest.mark.slow),
        pytest.param("Walker2d", 30, 1e-3, marks=pytest.mark.slow),
        pytest.param("Humanoid", 10, 1e-3, marks=pytest.mark.slow),
        # If a capsule stands steeply on a plane, mujoco_warp rotates the tangents of the contact
        # differently from MuJoCo, and a friction pyramid is not round. The first step has no
        # contact yet.
        pytest.param("Ant", 1, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_locomotion_equals_the_cpu_engine(name: str, steps: int, tolerance: float) -> None:
    compared = compare(make(name, 8, simulator="mujoco"), make(name, 8), steps, tolerance)
    assert compared >= 8 * min(steps, 10)


def test_initial_states_equal_the_cpu_engines() -> None:
    """This holds in later episodes too, and with randomised models."""
    ranges = dict.fromkeys(("mass", "friction", "damping", "gains", "gravity"), (0.5, 1.5))
    ranges |= {"camera_position": (-0.1, 0.1), "light": (0.5, 1.0), "colour": (-0.2, 0.2)}
    options: dict[str, Any] = {"randomize": True, "ranges": ranges}
    a, b = make(simulator="mujoco", **options), make(**options)
    a.reset()
    b.reset()
    mask = torch.tensor([True, False, True, False])
    for _ in range(3):
        a.reset_where(mask)
        b.reset_where(mask)
    kept = {k: x.clone() for k, x in b.s.items()}
    assert isinstance(b.physics, WarpPhysics) and len(b.physics.varied) > 7
    kept |= {k: x.clone() for k, x in b.physics.varied.items()}
    a.reset_where(mask)
    b.reset_where(mask)
    for name, x in {**a.s, **{k: torch.from_numpy(v) for k, v in a.physics.varied.items()}}.items():
        actual = b.s[name] if name in b.s else b.physics.varied[name]
        assert actual.shape == x.shape, name
        torch.testing.assert_close(actual, x.to(actual.dtype), rtol=1e-4, atol=1e-5, msg=name)
        assert torch.equal(actual[~mask], kept[name][~mask]), name
    weights = b.physics._warp_model.body_invweight0.numpy()  # derived from masses
    expected = np.stack([a.physics.worlds.expand("body_invweight0")]).reshape(weights.shape)
    np.testing.assert_allclose(weights, expected, rtol=1e-4)
    assert abs(weights[0, 1] / weights[1, 1] - 1).max() > 0.01
    assert compare(make(simulator="mujoco", **options), make(**options), 12, 1e-3) == 48


# ------------------------------------------------------------------------------------- the contract
@pytest.mark.slow
@pytest.mark.parametrize("random", [False, True])
def test_contract(random: bool) -> None:
    """Among others, a state continues bit for bit and a reset does not affect other worlds."""
    options: dict[str, Any] = {"max_episode_steps": 7, "kwargs": {"stage": "forces"}}
    if random:
        options |= {"randomize": True, "ranges": {"mass": (0.5, 1.5), "camera_angle": (-0.2, 0.2)}}
        options |= {"cameras": ("front",), "image_size": (8, 12)}
    report = embodied_envs.check_env(
        lambda seeds: make(n=len(seeds), seeds=seeds, **options), steps=40
    )
    assert report.seeded and report.longest == 7 and report.episodes >= 20 and not report.notes


def test_unstable_world_is_reset_without_effect_on_others() -> None:
    """A world is not finite in one step, another is out of bounds in a later one."""
    plain, env = make(), make()
    plain.reset()
    env.reset()
    for t, action in enumerate(random_actions(env, 6)):
        last = env.state()["obs"]
        if t == 2:
            env.physics.fields["qvel"][1, 0] = torch.nan
        if t == 4:
            env.physics.fields["qpos"][3, 1] = 1e20
        bad = torch.tensor([False, t == 2, False, t == 4])
        a, b = plain.step(action), env.step(action)
        assert torch.equal(b.truncated, bad) and not b.terminated.any() and not b.reward[bad].any()
        assert torch.equal(final(b)[bad], last[bad]) and torch.isfinite(b.obs).all()
        calm = torch.tensor([True, t < 2, True, t < 4])
        assert torch.equal(a.obs[calm], b.obs[calm])
    assert int(env.unstable) == 2
    assert all(torch.isfinite(x).all() for x in env.physics.fields.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*runs without torch.compile")
@pytest.mark.parametrize("name", ["Go1Joystick", "Tabletop"])
def test_fused_functions_equal_the_tasks_own(name: str, monkeypatch) -> None:
    """torch.compile traces start, result and observation of a step, but generates no code."""
    eager = make(name, 3, max_episode_steps=4)
    run_helpers.trace_only(monkeypatch)
    monkeypatch.setattr(mujoco_warp, "FUSED_DEVICES", ("cpu",))
    fast = make(name, 3, max_episode_steps=4)
    for function in ("_initial_state", "_evaluate", "_observe_state"):
        assert inspect.ismethod(getattr(eager, function))
        assert not inspect.ismethod(getattr(fast, function))
    for env in (eager, fast):
        env.physics.host_readable = False
        env.reset()
    for t, action in enumerate(random_actions(eager, 7)):
        for env in (eager, fast):
            env.truncate_next(torch.tensor([t == 1, False, t == 2]))
        a, b = eager.step(action), fast.step(action)
        assert all(map(torch.equal, tree.leaves(a), tree.leaves(b)))
    assert all(map(torch.equal, tree.leaves(eager.state()), tree.leaves(fast.state())))


class Recordable(TorchDispatchMode):
    """Raise for what a CUDA graph cannot hold: values read and tensors created on the host."""

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__()
        self.known = {
            id(x) for x in (*vars(env.task).values(), *env.s.values(), *env._before.values())
        }
        self.kept: list[Tensor] = []  # keeps them alive, so that no other object gets the id of one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select"), name
        assert name not in ("lift_fresh", "lift_fresh_copy"), name
        if name in ("index", "index_put", "index_put_"):
            for x in args[1]:
                known = x is None or (x.dtype != torch.bool and id(x) in self.known)
                assert known, "indexed by a mask or a list"
        out = func(*args, **(kwargs or {}))
        for x in tree.leaves(out):
            if isinstance(x, Tensor):
                self.known.add(id(x))
                self.kept.append(x)
        return out


def held(env: MujocoEnv) -> dict[str, int]:
    """Return every tensor of the environment by its address, which a graph continues to write."""
    owners = {"env": vars(env), "task": vars(env.task), "physics": vars(env.physics), "s": env.s}
    owners |= {"before": env._before, "last": dict(enumerate(tree.leaves(env._last_obs)))}
    return {
        f"{o}.{k}": x.data_ptr()
        for o, xs in owners.items()
        for k, x in xs.items()
        if isinstance(x, Tensor)
    }


@pytest.mark.parametrize(
    "id", [f"{__name__}:Swing", pytest.param("Go1Rough", marks=pytest.mark.slow)]
)
def test_control_step_reads_no_value_on_the_host(id: str) -> None:
    """The code path of CUDA graphs gives the same results on a CPU without host access."""
    options: dict[str, Any] = {
        "max_episode_steps": 5,
        "randomize": True,
        "ranges": {"gravity": (0.9, 1.1)},
    }
    plain, env = make(id, 3, **options), make(id, 3, **options)
    env.physics.host_readable = False
    plain.reset()
    env.reset()
    places = held(env)
    for action in random_actions(plain, 8):
        a = plain.step(action)
        with Recordable(env):
            b = env.step(action)
        assert held(env) == places
        assert b.final_obs is not None
        b = replace(b, final_obs=a.final_obs)
        assert all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))
    mask = torch.tensor([False, True, False])
    first = plain.reset_where(mask)
    with Recordable(env):
        other = env.reset_where(mask)
    assert held(env) == places
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(first), tree.leaves(other)))


class Servo(toy_envs.Drifter):
    """A robot with a free base and a position servo."""

    reads_joints_from_state = True

    def spec(self) -> mujoco.MjSpec:
        text = toy_envs.DRIFTER.replace('<motor joint="arm"/>', '<position joint="arm" kp="1"/>')
        return mujoco.MjSpec.from_string(text)

    def observe(self, s: State) -> Tensor:
        return torch.cat([s["qpos"], s["qvel"], s["ctrl"]], 1)


# Pushes, encoder errors and motor strengths.
ROBOT: dict[str, Any] = {
    "id": f"{__name__}:Servo",
    "realism": {"push_velocity": [0.5, 1]},
    "randomize": True,
    "ranges": {"joint_offset": [-0.1, 0.1], "motor_strength": [0.5, 1.5]},
    "max_episode_steps": 8,
    "action_mapping": "none",
}


def test_pushes_and_encoder_errors_equal_the_cpu_engines(monkeypatch) -> None:
    monkeypatch.setattr(mujoco_env, "PUSH_INTERVAL_S", (0.04, 0.1))
    cpu, gpu = make(**ROBOT, simulator="mujoco"), make(**ROBOT)
    assert compare(cpu, gpu, 7, 1e-4) == 28
    assert float(cpu.s["qvel"][:, 6:8].norm(dim=1).min()) > 0.1
    # Constants of the model follow from the armature.
    env = make("HalfCheetah", 1, randomize=True, ranges={"armature": (3, 3)})
    env.reset()
    model = compile_model(env.task, "HalfCheetah")
    model.dof_armature *= 3
    mujoco.mj_setConst(model, mujoco.MjData(model))
    constants = env.physics._warp_model.dof_invweight0.numpy()[0]
    np.testing.assert_allclose(constants, model.dof_invweight0, rtol=1e-4)


# ------------------------------------------------------------------------------------------- images
def test_images_equal_opengls() -> None:
    """The mean absolute difference is below 2 of 255 (measured: 0.3), also with random models."""
    options: dict[str, Any] = {"cameras": ("front",), "image_size": (48, 64), "randomize": True}
    options["ranges"] = {"camera_position": (-0.2, 0.2), "light": (0.5, 1.0), "colour": (-0.2, 0.2)}
    a, b = make(simulator="mujoco", **options), make(**options)
    x, y = a.reset(), b.reset()
    for action in [*random_actions(a, 2), None]:
        assert isinstance(x, dict) and isinstance(y, dict)
        difference = (x["front"].float() - y["front"].float()).abs()
        assert y["front"].shape == (4, 3, 48, 64) and float(difference.mean()) < 2
        assert (
            float(x["front"].float().std()) > 30
            and len({float(v) for v in x["front"].float().mean((1, 2, 3))}) == 4
        )
        if action is not None:
            x, y = a.step(action).obs, b.step(action).obs

    two: dict[str, Any] = {"cameras": ["wrist", "front"], "id": "PandaPickCube", "n": 1}
    for simulator in ("mujoco", "warp"):
        env = make(simulator=simulator, **two)
        assert list(env.obs_spec) == ["state", "wrist", "front"]
        env.close()


# ----------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"nconmax": 1}, "nconmax.*1"), ({"njmax": 7}, "njmax.*7")],
    ids=["contacts", "rows"],
)
def test_exceeded_capacity_is_an_error(kwargs: dict[str, int], message: str) -> None:
    """A box on the floor: 4 contacts of 4 rows."""
    with pytest.raises(EnvError, match=rf"env\.kwargs\.{message}"):
        env = make(f"{__name__}:Boxed", 2, kwargs=kwargs)
        env.reset()
        for action in random_actions(env, 20):
            env.step(action)
    geoms = '<worldbody><geom name="a" size="1"/><geom name="b" size="1" condim="1"/></worldbody>'
    pair = '<contact><pair geom1="a" geom2="b" condim="6"/></contact>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco>{geoms}{pair}</mujoco>")
    model.geom_contype[:] = model.geom_conaffinity[:] = 0
    assert default_capacities(model) == (16, 16 * 2 * (6 - 1))


class Boxed(Swing):
    """The ball is a box."""

    def spec(self) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_string(
            SWING.replace('type="sphere" size="0.15"', 'type="box" size="0.1 0.1 0.1"')
        )


# ------------------------------------------------------------------------------------ equal bits
class SparseBoxed(Boxed):
    """The Jacobian of constraints is sparse."""

    def spec(self) -> mujoco.MjSpec:
        spec = super().spec()
        spec.option.jacobian = mujoco.mjtJacobian.mjJAC_SPARSE
        return spec


@pytest.fixture
def deterministic_torch() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["Boxed", "SparseBoxed"])
def test_order_of_contacts_and_rows_has_no_effect(name: str, deterministic_torch: None) -> None:
    """Contacts, and rows of constraints, are placed at random, as by threads of a GPU."""
    env = make(f"{__name__}:{name}", 8, max_episode_steps=99)
    env.reset()
    for action in random_actions(env, 30):
        env.step(action)
    m, d = env.physics._warp_model, env.physics.data
    state = {k: wp.to_torch(getattr(d, k)).clone() for k in ("qpos", "qvel", "qacc_warmstart")}
    order = torch.randperm(int(d.nacon.numpy()[0]), generator=torch.Generator().manual_seed(0))

    def move(m: Any, d: Any, at: Tensor = order) -> None:
        for x in warp_order._tensors(d.contact).values():
            x[: len(at)] = x[at]

    def move_back(m: Any, d: Any) -> None:
        """Only the rows stay where they are; the list of their blocks is reversed."""
        move(m, d, order.argsort())
        for world, n in enumerate(d.efc.jtdaj_nblock.numpy() if m.is_sparse else ()):
            for x in (wp.to_torch(d.efc.jtdaj_adr), wp.to_torch(d.efc.jtdaj_nrow)):
                x[world, :n] = x[world, :n].flip(0)
        index, kind = wp.to_torch(d.efc.id), wp.to_torch(d.efc.type)
        is_row = torch.arange(index.shape[1]) < wp.to_torch(d.nefc)[:, None]
        rows = is_row & (kind >= int(mujoco.mjtConstraint.mjCNSTR_CONTACT_FRICTIONLESS))
        index[rows] = order[index[rows].long()].int()

    def results(contacts: list[Any], rows: list[Any]) -> list[Tensor]:
        """Return accelerations, places of the contacts' rows, and blocks of rows."""
        for k, x in state.items():
            wp.to_torch(getattr(d, k)).copy_(x)
        m.callback.contactfilter = lambda m, d: [f(m, d) for f in contacts]
        m.callback.control = lambda m, d: [f(m, d) for f in rows]
        with wp.ScopedDevice("cpu"):
            mujoco_warp.mjw.forward(m, d)
        arrays = [d.qacc, d.contact.efc_address, d.efc.jtdaj_adr, d.efc.jtdaj_nrow]
        qacc, address, *blocks = (wp.to_torch(x).clone() for x in arrays)
        count = wp.to_torch(d.efc.jtdaj_nblock)[:, None]
        return [qacc, address[: len(order)], *(x[torch.arange(x.shape[1]) < count] for x in blocks)]

    by_contact, by_row = warp_order.sort_contacts, warp_order.sort_rows
    expected = results([by_contact], [by_row])

    def equal(contacts: list[Any], rows: list[Any]) -> bool:
        return all(map(torch.equal, results(contacts, rows), expected))

    assert len(order) > 8 and not equal([move], [])
    assert equal([move, by_contact], [by_row])
    assert equal([by_contact, move], [move_back, by_row])


def test_deterministic_engine_equals_the_other(deterministic_torch: None) -> None:
    """The sums of the kernels have another order, which a GPU keeps."""
    ordered = make(f"{__name__}:Boxed")
    torch.use_deterministic_algorithms(False)
    assert compare(make(f"{__name__}:Boxed"), ordered, 12, 1e-3) == 48
    assert ordered.physics._warp_model.opt.deterministic == DeterminismType.ALL


# -------------------------------------------------------------------------------------------- a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["velocity", "none", "forces"])
def test_gpu_equals_the_cpu_engine(stage: str) -> None:
    """The third control step is recorded; later ones are replays."""
    one = make(kwargs={"stage": stage}, simulator="mujoco")
    other = make(kwargs={"stage": stage}, device="cuda")
    x, y = one.reset(), other.reset()
    for action in random_actions(one, 30):
        a, b = one.step(action), other.step(action.cuda())
        torch.testing.assert_close(tree.map(Tensor.cpu, b.obs), a.obs, rtol=1e-3, atol=1e-3)
        ended = a.terminated | a.truncated
        assert torch.equal(b.truncated.cpu(), a.truncated) and b.final_obs is not None
        torch.testing.assert_close(b.final_obs.cpu()[ended], final(a)[ended], rtol=1e-3, atol=1e-3)
    assert other._programs[True].graph is not None
    assert int(other.unstable) == 0 and x.shape == y.shape


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["HalfCheetah", "Ant"])
def test_captured_step_equals_the_eager_step(name: str) -> None:
    options: dict[str, Any] = {
        "max_episode_steps": 9,
        "randomize": True,
        "ranges": {"mass": (0.8, 1.2)},
    }
    eager, fast = (make(name, 64, device="cuda", **options) for _ in range(2))
    eager._programs, eager._reset_program = {True: eager._step}, eager._reset_where
    eager.reset()
    fast.reset()
    *actions, last = random_actions(fast, 9)
    for action in actions:  # 5 are replays; later steps are chaotic
        a, b = eager.step(action), fast.step(action)
        close = (a.obs - b.obs).abs().amax(1) < 1e-2
        assert float(close.float().mean()) > 0.9
    a, b = eager.step(last), fast.step(last)
    new = a.truncated & b.truncated  # in all worlds but those that terminated before
    assert float(new.float().mean()) > 0.9 and torch.allclose(a.obs[new], b.obs[new], atol=1e-4)
    mask = torch.arange(64, device="cuda") % 3 == 0
    for _ in range(4):  # the last two are replays
        a, b = eager.reset_where(mask), fast.reset_where(mask)
        assert torch.allclose(a[new], b[new], atol=1e-4)
    program: Any = fast._reset_program
    assert program.graph is not None
    assert not bool(fast._episode[~mask].eq(fast._episode[0]).any())


@pytest.mark.gpu
def test_control_step_does_not_synchronise() -> None:
    env = make("Ant", 64, device="cuda")
    env.reset()
    actions, mask = random_actions(env, 20), torch.arange(64, device="cuda") % 3 == 0
    for action in actions[:4]:
        env.step(action)
        env.reset_where(mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for action in actions[4:]:
            env.step(action)
            env.reset_where(mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
