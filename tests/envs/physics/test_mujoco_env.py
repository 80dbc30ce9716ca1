"""The CPU engine: equality with Gymnasium, the environment's contract, and failures."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest
import torch
import toy_envs
from torch import Tensor

import embodied_envs
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_envs.physics import mujoco_cpu
from embodied_envs.physics.mujoco_env import MujocoEnv

LOCOMOTION = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")


def make(id: str = "toy_envs:Balance", n: int = 3, **options: Any) -> MujocoEnv:
    return toy_envs.make_world(id, n, **options)


def push(env: MujocoEnv, x: float = 0.0) -> Tensor:
    return torch.full((env.num_envs, env.action_spec.size), x)  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------------------- equality with Gymnasium
@pytest.mark.parametrize("name", LOCOMOTION)
def test_steps_equal_gymnasiums(name: str) -> None:
    """Observations are equal as float32 over 100 steps; rewards differ by at most 1e-6.

    When a world falls, Gymnasium's is set to the initial state of our next episode.
    """
    env = make(name, 4, num_threads=2, action_mapping="none")
    first = env.reset()
    with warnings.catch_warnings(action="ignore"):
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
@pytest.mark.parametrize("name", ["Hopper", "Ant"])
def test_initial_states_are_distributed_as_gymnasiums(name: str) -> None:
    """Mean and deviation of each position and velocity agree over 500 episodes."""
    env = make(name, 500)
    env.reset()
    with warnings.catch_warnings(action="ignore"):
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
@pytest.mark.parametrize("id", ["toy_envs:Balance", "Humanoid"])
@pytest.mark.parametrize(
    "options", [{}, {"randomize": True, "ranges": {"mass": [0.8, 1.2]}}], ids=["plain", "random"]
)
def test_contract(id: str, options: dict[str, Any]) -> None:
    report = embodied_envs.check_env(
        lambda seeds: make(id, len(seeds), seeds=seeds, max_episode_steps=17, **options)
    )
    assert report.seeded and report.longest == 17 and report.episodes > 10 and not report.notes


def test_threads_and_batch_agree(monkeypatch) -> None:
    options = {
        "randomize": True,
        "ranges": {"gravity": [0.5, 2.0], "friction": [0.5, 2.0]},
        "num_threads": 2,
    }
    batch = make(**options)
    assert isinstance(batch.physics.worlds, mujoco_cpu.Batch)
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


@pytest.mark.parametrize("id", ["toy_envs:Balance", "Humanoid"])
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
def test_unstable_world_is_reset_and_counted(batch: bool, monkeypatch) -> None:
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


# ----------------------------------------------------------------------------- mistakes in the task
def _reset(**more: Any) -> Any:
    reset = toy_envs.Balance.reset
    return lambda self, u: reset(self, u) | {k: f(u) for k, f in more.items()}


MISTAKES: list[tuple[str, Any, str]] = [
    # Attribute of toy_envs.Balance, its replacement, what the message must name.
    ("decimation", 2.5, r"decimation.*2\.5"),
    ("stage", "acceleration", "stage.*acceleration.*velocity"),
    ("fields", ("blah",), "blah"),
    ("fields", (), r"terminated.*sensordata.*fields"),
    ("instructions", "lift it", r"instructions='lift it' must be a tuple: \('lift it',\)"),
    ("spec", lambda self: None, r"spec.*NoneType"),
    ("bind", lambda self, *a: 1 / 0, "bind.*ZeroDivisionError"),
    ("reset", _reset(qpos=lambda u: u[:, :1]), r"reset.*qpos.*\[2, 1\].*\[2, 2\]"),
    ("reset", _reset(qps=lambda u: u), "reset.*qps.*qpos"),
    ("reset", _reset(xpos=lambda u: u), "xpos"),
    ("observe", lambda self, s: s["qpos"][:, 0], r"observe.*\[2\].*\[2, D\]"),
    ("observe", lambda self, s: s["qpos"].mul_(0.5), "qpos"),
    ("reward", lambda self, b, s, a: 1.0, "reward.*float"),
    ("terminated", lambda self, s: s["qpos"][:, 0], "terminated.*bool"),
    ("carry_over", lambda self, s, start, u: {"level": u[:, 0]}, "carry_over.*level"),
    ("advance", lambda self, s, a, u: {"speed": u}, "advance.*speed"),
    ("advance", lambda self, s, a, u: {"pushes": s["pushes"] + 0.5}, "pushes.*float.*int64"),
]


@pytest.mark.parametrize(("name", "value", "message"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistake_in_a_task_is_reported_by_name(
    name: str, value: Any, message: str, monkeypatch
) -> None:
    monkeypatch.setattr(toy_envs.Balance, name, value)
    if message == "xpos":
        monkeypatch.setattr(toy_envs.Balance, "fields", ("sensordata", "xpos"))
    with pytest.raises(EnvError, match=message):
        make(n=2)


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


# ---------------------------------------------------------------------------------------- full runs
