"""The CPU engine: equality with Gymnasium, the environment's contract, and failures."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
import run_helpers
import torch
import toy_envs
from torch import Tensor

import embodied_envs
from embodied_envs import tasks
from embodied_envs.physics import mujoco_cpu
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_ppo import run as build
from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core import tree
from embodied_ppo.core.types import EnvError, Mean
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.training import checkpoint

LOCOMOTION = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")


def make(id: str = "toy_envs:Balance", n: int = 3, **options: Any) -> MujocoEnv:
    env = embodied_envs.make(
        id, num_envs=n, seeds=options.pop("seeds", list(range(n))), simulator="mujoco", **options
    )
    assert isinstance(env, MujocoEnv)
    return env


def push(env: MujocoEnv, x: float = 0.0) -> Tensor:
    return torch.full((env.num_envs, env.action_spec.size), x)  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------------------- equality with Gymnasium
@pytest.mark.parametrize("name", LOCOMOTION)
@pytest.mark.parametrize("batch", [True, False], ids=["batch", "threads"])
def test_steps_equal_gymnasiums(name: str, batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Observations are equal as float32 over 100 steps; rewards differ by at most 1e-6.

    When a world falls, Gymnasium's is set to the initial state of our next episode.
    """
    if not batch:
        monkeypatch.setattr(mujoco_cpu, "Batch", None)  # MuJoCo before 3.17
    env = make(name, 4, num_threads=2, action_mapping="none")
    first = env.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference: list[Any] = [gymnasium.make(f"{name}-v5").unwrapped for _ in range(4)]

    def begin(i: int, obs: Tensor) -> None:
        reference[i].reset(seed=0)
        reference[i].set_state(env.s["qpos"][i].numpy().copy(), env.s["qvel"][i].numpy().copy())
        assert np.array_equal(reference[i]._get_obs().astype(np.float32), obs[i].numpy())

    for i in range(4):
        begin(i, first)
    rng = np.random.default_rng(0)
    low, high = np.array(env.action_spec.low), np.array(env.action_spec.high)
    compared = 0
    for _ in range(100):
        # Small enough that Hopper, Walker2d and Humanoid do not fall in the first steps.
        action = (0.3 * rng.uniform(low, high, (4, len(low)))).astype(np.float32)
        step = env.step(torch.from_numpy(action))
        obs = step.obs if step.final_obs is None else step.final_obs
        for i, g in enumerate(reference):
            o, reward, terminated, _, _ = g.step(action[i].astype(np.float64))
            assert np.array_equal(o.astype(np.float32), obs[i].numpy())
            assert float(step.reward[i]) == pytest.approx(reward, abs=1e-6)
            assert terminated == bool(step.terminated[i])
            compared += 1
            if terminated:
                begin(i, step.obs)
    assert compared == 400
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCOMOTION)
def test_initial_states_are_distributed_as_gymnasiums(name: str) -> None:
    """Mean and deviation of each position and velocity agree over 500 episodes."""
    env = make(name, 500)
    env.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        g: Any = gymnasium.make(f"{name}-v5").unwrapped
    states = []
    for i in range(500):
        g.reset(seed=i)
        states.append(np.concatenate([g.data.qpos, g.data.qvel]))
    initial = torch.cat([env.s["qpos"], env.s["qvel"]], 1).numpy()
    reference = np.stack(states)
    scale = reference.std(0) + 1e-12
    assert (abs(initial.mean(0) - reference.mean(0)) < 5 * scale * np.sqrt(2 / 500)).all()
    assert (abs(initial.std(0) / scale - 1) < 0.2).all()


# ------------------------------------------------------------------------------------- the protocol
@pytest.mark.slow
@pytest.mark.parametrize("id", ["toy_envs:Balance", *LOCOMOTION])
@pytest.mark.parametrize(
    "options", [{}, {"randomize": True, "ranges": {"mass": [0.8, 1.2]}}], ids=["plain", "random"]
)
def test_contract(id: str, options: dict[str, Any]) -> None:
    report = embodied_envs.check_env(
        lambda seeds: make(id, len(seeds), seeds=seeds, max_episode_steps=17, **options)
    )
    assert report.seeded and report.longest == 17 and report.episodes > 10 and not report.notes


@pytest.mark.slow
def test_contract_with_cameras() -> None:
    report = embodied_envs.check_env(
        lambda seeds: make(
            seeds=seeds, n=len(seeds), cameras=("eye",), image_size=(12, 16), max_episode_steps=9
        ),
        steps=40,
    )
    assert report.episodes > 10


def test_episodes_are_a_function_of_the_seed() -> None:
    """They do not depend on the threads, the other worlds or the implementation."""
    single, many = make(n=1, seeds=[7], num_threads=1), make(n=3, seeds=[5, 7, 9], num_threads=2)
    a, b = single.reset(), many.reset()
    for t in range(60):
        assert torch.equal(a[0], b[1])
        x, y = single.step(push(single, 0.9)), many.step(push(many, 0.9))
        a, b = x.obs, y.obs
        assert bool(x.terminated[0]) == bool(y.terminated[1])
        if t == 30:
            a, b = (
                single.reset_where(torch.tensor([True])),
                many.reset_where(torch.tensor([False, True, False])),
            )
    assert not torch.equal(b[0], b[1])


def test_threads_and_batch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {
        "randomize": True,
        "ranges": {"gravity": [0.5, 2.0], "friction": [0.5, 2.0]},
        "num_threads": 2,
    }
    batch = make(**options)
    assert isinstance(batch.physics.worlds, mujoco_cpu._Batch)
    monkeypatch.setattr(mujoco_cpu, "Batch", None)
    threads = make(**options)
    assert isinstance(threads.physics.worlds, mujoco_cpu._Threads)
    assert torch.equal(batch.reset(), threads.reset())
    for _ in range(60):
        a, b = batch.step(push(batch, 0.5)), threads.step(push(threads, 0.5))
        assert torch.equal(a.obs, b.obs) and torch.equal(a.terminated, b.terminated)
    state = threads.state()
    after = threads.step(push(threads, 0.5)).obs
    threads.load_state(state)
    assert torch.equal(after, threads.step(push(threads, 0.5)).obs)


def test_final_obs_and_first_obs_at_the_end_of_an_episode() -> None:
    """obs is the first of the next episode, final_obs the last of the old one."""
    env = make(max_episode_steps=5)
    env.reset()
    for t in range(5):
        step = env.step(push(env))
        assert bool(step.truncated.all()) == (t == 4) and not step.terminated.any()
    assert step.final_obs is not None and bool((env._elapsed == 0).all())
    assert not torch.equal(step.final_obs, step.obs)
    assert bool((step.obs[:, 2:] == 0).all()), "an episode begins at rest"
    assert bool((step.final_obs[:, 2:] != 0).any()), "and this one did not end there"
    assert torch.equal(env.s["qpos"].float(), step.obs[:, :2])


def test_variables_of_the_task() -> None:
    env = make(max_episode_steps=25)
    env.reset()
    assert env.s["pushes"].tolist() == [0, 0, 0]
    gusts = []
    for _ in range(22):
        step = env.step(push(env))
        gusts.append(env.s["gust"].clone())
    assert env.s["pushes"].tolist() == [22] * 3 and bool(step.success.all())
    drawn = torch.stack(gusts)
    assert (
        drawn.unique().numel() == drawn.numel()
        and float(drawn.min()) >= 0
        and float(drawn.max()) < 1
    )
    for _ in range(3):
        env.step(push(env))
    assert env.s["pushes"].tolist() == [0] * 3, "they begin anew with the episode"


def test_variables_carried_over_to_the_next_episode() -> None:
    """The first episode starts as ``reset`` says; the others depend on the episode before."""
    report = embodied_envs.check_env(
        lambda seeds: make("toy_envs:Leveled", len(seeds), seeds=seeds, max_episode_steps=3),
        steps=20,
    )
    assert not report.notes
    env, plain = (make(f"toy_envs:{name}", max_episode_steps=3) for name in ("Leveled", "Balance"))
    env.reset()
    plain.reset()
    first = env.s["terrain_level"].clone()
    assert torch.equal(env.s["qpos"], plain.s["qpos"]) and len(first.unique()) > 1
    for k in range(1, 4):
        saved = env.state()
        for _ in range(3):
            env.step(push(env))
            plain.step(push(plain))
        assert env.s["terrain_level"].tolist() == (first + k).tolist()
        shift = 0.01 * (first + k).double().unsqueeze(1).expand(3, 2)
        torch.testing.assert_close(env.s["qpos"] - plain.s["qpos"], shift)
    env.load_state(saved)
    assert torch.equal(env.s["terrain_level"], first + 2)
    env.restart([0, 1, 2])
    assert torch.equal(env.s["terrain_level"], first)


def test_groups_are_computed_where_an_option_names_them() -> None:
    plain, env = make("toy_envs:Leveled"), make("toy_envs:Leveled", obs_keys=["level", "state"])
    state, obs = plain.reset(), env.reset()
    assert isinstance(state, Tensor) and isinstance(obs, dict)
    assert list(obs) == ["state", "level"] and torch.equal(obs["state"], state)
    assert torch.equal(obs["level"][:, 0], env.s["terrain_level"].float())
    assert list(make("toy_envs:Leveled", obs_keys=["level"]).reset()) == ["level"]
    with pytest.raises(EnvError, match=r"'levels' is not in its observation; .*state, level"):
        make("toy_envs:Leveled", obs_keys=["levels"])


@pytest.mark.parametrize("id", ["toy_envs:Balance", "Ant", "Humanoid"])
def test_a_saved_state_continues_bit_for_bit(id: str) -> None:
    options = {"randomize": True, "ranges": {"mass": [0.5, 2.0]}, "max_episode_steps": 20}
    env, other = make(id, **options), make(id, **options, seeds=[8, 9, 10])
    env.reset()
    other.reset()
    for _ in range(13):
        env.step(push(env, 0.4))
    kept = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, env.state())
    assert torch.equal(other.load_state(kept), env._last_obs)
    for _ in range(30):
        a, b = env.step(push(env, 0.2)), other.step(push(other, 0.2))
        assert (
            torch.equal(a.obs, b.obs)
            and torch.equal(a.reward, b.reward)
            and torch.equal(a.truncated, b.truncated)
        )


# ----------------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("batch", [True, False], ids=["batch", "threads"])
def test_unstable_world_is_reset_and_counted(batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not batch:
        monkeypatch.setattr(mujoco_cpu, "Batch", None)
    env, calm = make(action_mapping="none"), make(action_mapping="none")
    last = env.reset()
    calm.reset()
    for t in range(6):
        action = push(env)
        if t == 3:
            action[1] = 5.0  # above toy_envs.Balance's blow_up
        step, quiet = env.step(action), calm.step(push(calm))
        assert all(bool(x.isfinite().all()) for x in tree.leaves(step) if x.is_floating_point())
        if t == 3:
            assert step.truncated.tolist() == [False, True, False] and not step.terminated.any()
            assert step.reward.tolist() == [1, 0, 1] and int(env.unstable) == 1
            assert step.final_obs is not None and torch.equal(step.final_obs[1], last[1])
            assert env.s["pushes"].tolist() == [4, 0, 4]
        for i in (0, 2):
            assert torch.equal(step.obs[i], quiet.obs[i]), "other worlds are not affected"
        last = step.obs
    assert int(env.unstable) == 1


BAD_MODELS = [
    ("<mujoco><worldbody><geom/></worldbody></mujoco>", "MuJoCo refuses its model: .*size"),
    ("<mujoco><worldbody>", "MuJoCo refuses its model: .*XML"),
    (
        toy_envs.BALANCE.replace('joint="slide" gear', 'joint="glide" gear'),
        "MuJoCo refuses its model: .*glide",
    ),
]


@pytest.mark.parametrize(("mjcf", "message"), BAD_MODELS, ids=range(len(BAD_MODELS)))
def test_invalid_model_is_refused(mjcf: str, message: str) -> None:
    with pytest.raises(EnvError, match=f"env.id=toy_envs:Balance: {message}"):
        make(kwargs={"mjcf": mjcf})


def test_missing_name_in_the_model_is_refused() -> None:
    with pytest.raises(EnvError, match=r"env.id=toy_envs:Balance: .*'angel'.*angle"):
        make(kwargs={"sensor": "angel"})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kwargs": {"sensr": "angle"}}, "env.kwargs.sensr is unknown; did you mean sensor"),
    ({"cameras": ("eyes",)}, "env.cameras: the model has no camera 'eyes'; it has eye, side"),
    (
        {"randomize": True, "ranges": {"mas": [1, 2]}},
        "env.ranges: 'mas' is unknown; did you mean mass",
    ),
    (
        {"randomize": True, "ranges": {"mass": [2, 1]}},
        r"env.ranges.mass=\[2, 1\]: it takes two finite numbers \[low, high\]",
    ),
    ({"randomize": True, "ranges": {"mass": [-1, 1]}}, "factors 0 <= low <= high"),
    (
        {"randomize": True, "ranges": {"mass": 1.2}},
        r"env.ranges.mass=1.2: it takes two finite numbers",
    ),
    ({"randomize": True, "ranges": {"mass": [1, float("inf")]}}, "it takes two finite numbers"),
    ({"kwargs": {"njmax": 3}}, "env.kwargs.njmax is read by simulator=warp only"),
    ({"cameras": ("eye", "eye")}, "names a camera twice"),
    ({"ranges": {"mass": [1, 2]}}, "no effect without randomize=true"),
    ({"success_key": "won"}, "success_key='won' is for EnvPool and Gymnasium"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(**options)


def test_invalid_calls_are_refused() -> None:
    env = make()
    with pytest.raises(EnvError, match="before reset"):
        env.step(push(env))
    env.reset()
    with pytest.raises(EnvError, match=r"actions of shape \[3, 2\]; it takes \[3, 1\]"):
        env.step(torch.zeros(3, 2))
    with pytest.raises(EnvError, match="made without pictures"):
        env.render()
    env.close()
    env.close()
    with pytest.raises(EnvError, match="it was closed"):
        env.reset()


class Confused(toy_envs.Balance):
    """A variable with the name of a field."""

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        return super().reset(u) | {"sensordata": u}


class Looking(toy_envs.Balance):
    """A field that MuJoCo does not have."""

    fields = ("sensordata", "xposition")


@pytest.mark.parametrize(
    ("name", "message"), [("Confused", "'sensordata' has the name"), ("Looking", "'xposition'")]
)
def test_unusable_tasks_are_refused(name: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(f"{__name__}:{name}")


@pytest.mark.slow
def test_find_tasks() -> None:
    assert tasks.find("toy_envs:Balance") is toy_envs.Balance
    assert tasks.find("toy_envs:ScriptedEnv") is None and tasks.find("HalfCheetah-v4") is None
    with pytest.raises(EnvError, match="cannot import 'no_such_module'"):
        tasks.find("no_such_module:Task")
    code = (
        "import embodied_envs, sys; embodied_envs.tasks.find('HalfCheetah-v4'); assert 'mujoco' not"
        " in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("id", "message"),
    [
        ("toy_envs:Ballance", "toy_envs has no 'Ballance', it has Balance"),
        ("toy_envs", "a task of yours is named toy_envs:Class"),
        (
            "tests.envs.physics.test_mujoco_env:Unrelated",
            "Unrelated is written like a task but is no subclass of embodied_envs.tasks.Task",
        ),
    ],
)
def test_unknown_id_gets_a_hint(id: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        embodied_envs.make(id, num_envs=1, seeds=[0])


class Unrelated:
    def spec(self) -> None: ...

    def observe(self, s: Any) -> None: ...


def test_randomisation_without_ranges_is_refused() -> None:
    with pytest.raises(
        EnvError, match=r"no ranges of its own; name some: env.ranges.mass=\[0.8,1.2\]"
    ):
        make("HalfCheetah", randomize=True)


# ------------------------------------------------------------------------------------------- images
@pytest.mark.parametrize(("id", "camera"), [("Go1Joystick", "track"), ("PandaPickCube", "wrist")])
def test_first_image_of_a_context_equals_later_ones(id: str, camera: str) -> None:
    env = make(id, 2, cameras=(camera,))
    first: Any = env.reset()
    for _ in range(3):
        env.step(torch.zeros(2, env.action_spec.size))
    env.restart([0, 1])
    again: Any = env.reset()
    env.close()
    assert torch.equal(first[camera], again[camera])


def test_unstable_world_inside_a_chunk_keeps_its_last_image() -> None:
    env = embodied_envs.make(
        "toy_envs:Balance",
        num_envs=2,
        seeds=[0, 1],
        simulator="mujoco",
        cameras=("eye",),
        action_chunk=4,
        action_mapping="none",
    )
    first: Any = env.reset()
    action = torch.zeros(2, 4, 1)
    action[0, 2] = 5.0  # above toy_envs.Balance's blow_up
    final: Any = env.step(action).final_obs
    assert torch.equal(final["eye"][0], first["eye"][0]) and int(first["eye"].sum()) > 0
    env.close()


# ----------------------------------------------------------------------------- mistakes in the task
def _reset(**more: Any) -> Any:
    reset = toy_envs.Balance.reset
    return lambda self, u: reset(self, u) | {k: f(u) for k, f in more.items()}


MISTAKES: list[tuple[str, Any, str]] = [
    # Attribute of toy_envs.Balance, its replacement, the message.
    ("decimation", 0, "Balance.decimation=0 must be a whole number, at least 1"),
    ("decimation", 2.5, "Balance.decimation=2.5 must be a whole number"),
    (
        "stage",
        "acceleration",
        "Balance.stage='acceleration' is unknown; there are velocity, none, forces",
    ),
    ("fields", "sensordata", "Balance.fields='sensordata' must be a tuple of names"),
    ("fields", ("blah",), "env.id=toy_envs:Balance: MuJoCo has no field 'blah'"),
    ("fields", (), r"Balance.terminated reads s\['sensordata'\], .* to the attribute `fields`"),
    (
        "before",
        ("xpos",),
        "Balance.before names 'xpos', which is neither in the attribute `fields` nor a variable",
    ),
    ("names", ("one", "two"), r"reset\(\)\['kind'\] and the attribute names go together"),
    ("spec", lambda self: None, r"Balance.spec\(\) is NoneType; it must be a mujoco.MjSpec"),
    (
        "spec",
        lambda self: mujoco.MjSpec.from_file("no.xml"),
        "MuJoCo refuses its model: .*no.xml.*looked for from /",
    ),
    ("bind", lambda self, *a: 1 / 0, "Balance.bind: ZeroDivisionError"),
    ("reset", lambda self, u: None, r"Balance.reset\(\) is NoneType; it must be a dictionary"),
    (
        "reset",
        _reset(qpos=lambda u: u[:, :1]),
        r"reset\(\)\['qpos'\] has shape \[2, 1\]; it must be \[2, 2\]",
    ),
    (
        "reset",
        _reset(qpos=lambda u: u.numpy()),
        r"reset\(\)\['qpos'\] is ndarray; it must be a tensor",
    ),
    (
        "reset",
        _reset(qpos=lambda u: u.long()),
        r"reset\(\)\['qpos'\] is torch.int64; it must be a floating-point tensor",
    ),
    ("reset", _reset(qps=lambda u: u), r"reset\(\)\['qps'\] is not a .* did you mean 'qpos'\?"),
    (
        "reset",
        _reset(goal=lambda u: u[:1]),
        r"reset\(\)\['goal'\] has shape \[1, 2\]; it must be \[2, 2\]",
    ),
    ("reset", _reset(xpos=lambda u: u), "its variable 'xpos' has the name of a MuJoCo field"),
    (
        "reset",
        _reset(kind=lambda u: u[:, 0].long()),
        "'kind'.* and the attribute names go together",
    ),
    (
        "control",
        lambda self, s, a: a.repeat(1, 2),
        r"Balance.control\(\) has shape \[2, 2\]; it must be \[2, 1\]",
    ),
    (
        "observe",
        lambda self, s: s["qpos"][:, 0],
        r"Balance.observe\(\) has shape \[2\]; it must be \[2, D\]",
    ),
    ("observe", toy_envs.Task.observe, r"Balance has no observe\(\); write one"),
    (
        "reward",
        lambda self, b, s, a: 1.0,
        r"Balance.reward\(\) is float; it must be a tensor \[2\]",
    ),
    ("reward", lambda self, b, s, a: a, r"Balance.reward\(\) has shape \[2, 1\]; it must be \[2\]"),
    (
        "reward",
        lambda self, b, s, a: b["qpos"][:, 0],
        r"Balance.reward reads before\['qpos'\], .* to the attribute `before`",
    ),
    (
        "terminated",
        lambda self, s: s["qpos"][:, 0],
        r"Balance.terminated\(\) is torch.float64; it must be bool",
    ),
    ("success", lambda self, s: None, r"Balance.success\(\) is NoneType; it must be a tensor"),
    (
        "carry_over",
        lambda self, s, start, u: {"level": u[:, 0]},
        r"carry_over\(\)\['level'\]: reset\(\) returns no such entry; return it from reset",
    ),
    (
        "carry_over",
        lambda self, s, start, u: {"pushes": u[:, 0]},
        r"carry_over\(\)\['pushes'\] is torch.float64; it must be torch.int64, as from reset",
    ),
    (
        "carry_over",
        lambda self, s, start, u: {"gust": u},
        r"carry_over\(\)\['gust'\] has shape \[2, 2\]; it must be \[2\]",
    ),
    (
        "groups",
        lambda self: {"state": lambda s: s["qpos"]},
        r"groups\(\)\['state'\]: the name is that of another observation",
    ),
    ("observe", lambda self, s: s["qpos"].mul_(0.5), r"a function writes into s\['qpos'\]"),
    (
        "reset",
        _reset(qpos=lambda u: u.float()),
        r"reset\(\)\['qpos'\] is torch.float32; it must be torch.float64",
    ),
    (
        "success",
        lambda self, s: s["qpos"] > 0,
        r"Balance.success\(\) has shape \[2, 2\]; it must be \[2\]",
    ),
    (
        "advance",
        lambda self, s, a, u: {"speed": u},
        r"advance\(\)\['speed'\]: reset\(\) returns no such variable",
    ),
]


@pytest.mark.parametrize(("name", "value", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistake_in_a_task_is_reported_by_name(
    name: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_envs.Balance, name, value)
    if "'xpos' has the name" in message:
        monkeypatch.setattr(toy_envs.Balance, "fields", ("sensordata", "xpos"))
    with pytest.raises(EnvError, match=message):
        make(n=2)


def test_kind_without_a_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_envs.Balance, "names", ("one",))
    monkeypatch.setattr(toy_envs.Balance, "reset", _reset(kind=lambda u: u[:, 0].long() + 1))
    with pytest.raises(
        EnvError, match=r"reset\(\)\['kind'\] runs from 1 to 1; names has 1 entries"
    ):
        make(n=2)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e28])
def test_controls_that_are_not_finite_are_counted(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MuJoCo itself would replace them with zeros without a message."""
    monkeypatch.setattr(
        toy_envs.Balance, "control", lambda self, s, a: torch.where(a > 0.5, number, a)
    )
    env = make(n=3)
    env.reset()
    step = env.step(torch.tensor([[0.0], [1.0], [0.0]]))
    assert step.truncated.tolist() == [False, True, False] and int(env.unstable) == 1
    assert torch.isfinite(step.obs).all()
    assert env.step(torch.zeros(3, 1)).truncated.tolist() == [False] * 3


# ----------------------------------------------------------------------------- domain randomisation
def test_randomised_masses_are_in_range_seeded_and_effective() -> None:
    options = {"randomize": True, "ranges": {"mass": [0.5, 1.5]}}
    env, again, plain = make(n=200, **options), make(n=200, **options), make(n=200)
    masses = env.physics.varied["body_mass"]  # [N, 3]: world, cart, pole
    factor = masses[:, 1:] / np.array([1.0, 0.2])
    assert 0.5 <= factor.min() < 0.55 and 1.45 < factor.max() <= 1.5
    assert abs(np.corrcoef(factor.T)[0, 1]) < 0.3, "each body has its own"
    inertia = env.physics.varied["body_inertia"][:, 1]
    assert np.allclose(inertia / inertia[0], (factor[:, :1] / factor[0, 0]))
    assert np.array_equal(masses, again.physics.varied["body_mass"])
    env.reset(), again.reset(), plain.reset()
    a, b, c = (e.step(push(e, 1.0)).obs for e in (env, again, plain))
    assert torch.equal(a, b) and not torch.allclose(a[:, 2:], c[:, 2:])
    first = masses.copy()
    env.reset()
    assert (masses[:, 1:] != first[:, 1:]).all(), "another model with every episode"


def test_randomised_gravity_and_damping_are_effective() -> None:
    heavy = make(n=2, randomize=True, ranges={"gravity": [2.0, 2.0]})
    assert heavy.physics.varied["opt.gravity"].tolist() == [[0, 0, -19.62]] * 2
    free = make(
        n=2, randomize=True, ranges={"mass": [1, 1], "damping": [0.0, 0.0], "gains": [3.0, 3.0]}
    )
    plain = make(n=2)
    assert (free.physics.varied["dof_damping"] == 0).all()
    free.reset(), plain.reset()
    a, b = free.step(push(free, 1.0)).obs, plain.step(push(plain, 1.0)).obs
    assert torch.allclose(a[:, 2] / b[:, 2], torch.full((2,), 3.0), rtol=0.05), (
        "three times the force"
    )


def test_reset_of_other_worlds_does_not_change_a_model() -> None:
    env = make(n=3, randomize=True)
    masses = env.physics.varied["body_mass"]
    env.reset()
    before = masses.copy()
    env.reset_where(torch.tensor([False, True, False]))
    assert (masses[[0, 2]] == before[[0, 2]]).all() and (masses[1, 1:] != before[1, 1:]).all()


# ------------------------------------------------------------------------------------------- images
def test_images_show_the_current_state_of_each_world() -> None:
    env = make(
        cameras=("eye", "side"),
        image_size=(40, 60),
        max_episode_steps=4,
        render=True,
        render_size=(40, 60),
    )
    obs = env.reset()
    assert isinstance(obs, dict) and list(obs) == ["state", "eye", "side"]
    assert obs["eye"].shape == (3, 3, 40, 60) and obs["eye"].dtype == torch.uint8
    assert not torch.equal(obs["eye"], obs["side"])
    for t in range(4):
        step = env.step(push(env, 1.0))
        assert isinstance(step.obs, dict)
        assert torch.equal(step.obs["eye"][0].permute(1, 2, 0), env.render()), (
            "the video shows the image of the policy"
        )
        if t == 3:
            assert isinstance(step.final_obs, dict)
            assert not torch.equal(step.final_obs["eye"][0], step.obs["eye"][0])
    # The same state rendered by MuJoCo's own renderer.
    model = env.physics.model
    data = mujoco.MjData(model)
    data.qpos[:] = env.s["qpos"][1].numpy()
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 40, 60) as renderer:
        renderer.update_scene(data, camera="eye")
        reference = torch.from_numpy(renderer.render().copy())
    difference = (reference.float() - step.obs["eye"][1].permute(1, 2, 0).float()).abs()
    assert float(difference.mean()) < 3.0, "equal except for multisampling"
    env.close()


def test_two_renderers_do_not_affect_each_other() -> None:
    one, two = (make(cameras=("eye",), image_size=(24, 24)) for _ in range(2))
    images = []
    one.reset(), two.reset()
    for _ in range(3):
        images.append(one.step(push(one, 1.0)).obs["eye"])
        two.step(push(two, -1.0))
    two.close()
    images.append(one.step(push(one, 1.0)).obs["eye"])
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(images))


def test_randomised_cameras_lights_and_colours() -> None:
    ranges = {
        "camera_position": [-0.2, 0.2],
        "camera_angle": [-0.1, 0.1],
        "light": [0.3, 1.0],
        "colour": [-0.3, 0.3],
    }
    env = make(cameras=("eye",), randomize=True, ranges={"mass": [1, 1], **ranges})
    obs = env.reset()
    assert isinstance(obs, dict)
    assert not torch.equal(obs["eye"][0], obs["eye"][1])
    quat = env.physics.varied["cam_quat"]
    assert np.allclose((quat**2).sum(-1), 1)
    angle = 2 * np.arccos(np.clip(abs((quat * env.physics.model.cam_quat).sum(-1)), 0, 1))
    assert angle.min() > 0 and angle.max() < 0.1 * np.sqrt(3) + 1e-6
    rgba = env.physics.varied["geom_rgba"]
    assert rgba.min() >= 0 and rgba.max() <= 1 and (rgba[..., 3] == 1).all()


# ---------------------------------------------------------------------------------------- full runs
def test_training_counts_unstable_worlds(tmp_path: Path) -> None:
    """Training continues with a task that is unstable at times, and a metric counts it."""
    options = {
        "env.id": "toy_envs:Balance",
        "env.kwargs": {"blow_up": 0.9},
        "updates": 3,
        "run_dir": str(tmp_path / "run"),
    }
    build.train(run_helpers.tiny_config(options), quiet=True)
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    counts = [row["rollout/unstable"] for row in rows if "rollout/unstable" in row]
    assert 0 < counts[0] <= counts[-1] and all(
        np.isfinite(row["policy/loss"]) for row in rows if "policy/loss" in row
    )


class TwoKinds(toy_envs.Balance):
    """An episode that begins to the right is long, and succeeds."""

    names = ("short", "long")

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        return super().reset(u) | {"kind": (u[:, 0] > 0.5).long()}

    def success(self, s: Any) -> Tensor:
        return (s["kind"] == 1) & (s["pushes"] >= 3)


def test_evaluation_reports_each_kind_of_episode() -> None:
    def env(seeds: list[int]) -> MujocoEnv:
        return make(f"{__name__}:TwoKinds", len(seeds), seeds=seeds, max_episode_steps=5)

    first_env = env([0])
    policy = ActorCritic(first_env.obs_spec, first_env.action_spec, ModelConfig())
    result = evaluation.evaluate(policy, env, episodes=40, num_envs=8, seed=0)
    assert {e.kind for e in result.episodes} == {"short", "long"}
    short, long = result.by_kind()[1], result.by_kind()[0]
    assert long.task.endswith("TwoKinds/long") and len(short.episodes) + len(long.episodes) == 40
    assert long.successes == [True] * len(long.episodes) and not any(short.successes or [True])
    metrics = {tag: m.value for tag, m in result.metrics().items() if isinstance(m, Mean)}
    assert (
        metrics["eval/success/long"] == 1
        and metrics["eval/success/short"] == 0 < metrics["eval/success"] < 1
    )


@pytest.mark.slow
def test_resume_is_exact(tmp_path: Path) -> None:
    """Four updates equal two, a resume and two, bit for bit, without replaying the simulator."""
    options = {"env.id": "toy_envs:Balance", "env.randomize": True, "save_every": 2}
    uninterrupted = build.train(
        run_helpers.tiny_config({**options, "updates": 4, "run_dir": str(tmp_path / "whole")}),
        quiet=True,
    )
    build.train(
        run_helpers.tiny_config({**options, "updates": 2, "run_dir": str(tmp_path / "half")}),
        quiet=True,
    )
    resumed = {
        **options,
        "updates": 4,
        "run_dir": str(tmp_path / "half"),
        "resume": str(tmp_path / "half"),
    }
    resumed_run = build.train(run_helpers.tiny_config(resumed), quiet=True)
    assert uninterrupted["final_return"] == resumed_run["final_return"]
    weights = [
        checkpoint.open_checkpoint(tmp_path / run / "checkpoints" / "latest").policy()
        for run in ("whole", "half")
    ]
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert "replaying" not in (tmp_path / "half" / "log.txt").read_text()
