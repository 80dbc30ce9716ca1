"""Delays, sensor errors, lost observations and rate limits, compared with the simulator alone."""

from __future__ import annotations

from typing import Any

import mujoco
import pytest
import run_helpers
import torch
import toy_envs
from torch import Tensor

import embodied_envs
from embodied_envs.adapters import realistic_env
from embodied_envs.adapters.realistic_env import RealisticEnv
from embodied_envs.types import Obs, VectorEnv
from embodied_ppo.rollout.simulation import Rollout


def realistic(env: VectorEnv, seeds: list[int] | None = None, **options: Any) -> RealisticEnv:
    """Return ``env`` with options of section env.realism."""
    checked = realistic_env.read(options, env)
    seeds = seeds or list(range(env.num_envs))
    return RealisticEnv(env, checked, seeds=seeds, action_mapping="rescale")


def scripted(lengths: list[int], *, same_step: bool = True, **options: Any) -> RealisticEnv:
    """Return scripted episodes of these lengths, observations (i, episode, step)."""
    env = toy_envs.ScriptedEnv(lengths, [False] * len(lengths), same_step=same_step)
    return realistic(env, **options)


def balance(seeds: list[int], **options: Any) -> VectorEnv:
    """Return a task of our own, whose episodes last 12 steps."""
    return embodied_envs.make(
        "toy_envs:Balance",
        num_envs=len(seeds),
        seeds=seeds,
        num_threads=1,
        max_episode_steps=12,
        **options,
    )


def random_actions(steps: int, n: int) -> Tensor:
    return 2 * torch.rand(steps, n, 1, generator=torch.Generator().manual_seed(0)) - 1


def tensor(obs: Obs | None) -> Tensor:
    assert isinstance(obs, Tensor)
    return obs


@pytest.mark.parametrize("same_step", [True, False], ids=["same_step", "next_step"])
def test_observations_are_those_of_k_steps_before_within_the_episode(same_step: bool) -> None:
    env = scripted([5], same_step=same_step, obs_delay=2)
    seen = [tensor(env.reset())[0].tolist()]
    final = []
    for _ in range(8):
        step = env.step(torch.zeros(1, 1))
        if step.final_obs is not None and bool(step.terminated[0]):
            final.append(tensor(step.final_obs)[0].tolist())
        seen.append(tensor(step.obs)[0].tolist())
    # Step t of episode e is read as (0, e, max(t - 2, 0)); the last observation (step 5) as step 3.
    first_episode = [[0, 0, x] for x in (0, 0, 0, 1, 2)]
    second_episode = [[0, 1, x] for x in (0, 0, 0, 1)]
    if same_step:
        assert seen == [*first_episode, *second_episode] and final == [[0, 0, 3]]
    else:
        assert seen == [*first_episode, [0, 0, 3], *second_episode[:3]] and final == []


def test_actions_reach_the_simulator_k_steps_later_in_every_episode() -> None:
    env = scripted([4, 9], action_delay=3)
    env.reset()
    actions = random_actions(8, 2)
    for action in actions:
        env.step(action)
    executed = torch.stack(env.env.actions)  # pyright: ignore[reportAttributeAccessIssue]
    zeros = torch.zeros(3, 1)
    # Environment 0 starts an episode at step 4, environment 1 continues until step 9.
    assert torch.equal(executed[:, 0], torch.cat([zeros, actions[:1, 0], zeros, actions[4:5, 0]]))
    assert torch.equal(executed[:, 1], torch.cat([zeros, actions[:5, 1]]))


def test_delays_on_physics_equal_shifted_actions_and_observations_bit_for_bit() -> None:
    seeds, actions = [3, 4], random_actions(10, 2)
    env = balance(seeds, realism={"action_delay": 2, "obs_delay": 1})
    plain = balance(seeds)
    env.reset()
    recorded = [tensor(plain.reset())]
    for t, action in enumerate(actions):
        executed = actions[t - 2] if t >= 2 else torch.zeros_like(action)
        recorded.append(tensor(plain.step(executed).obs))
        assert torch.equal(tensor(env.step(action).obs), recorded[t])


def test_range_of_delays_is_drawn_per_environment_and_episode() -> None:
    env = scripted([3] * 400, obs_delay=[1, 3], action_delay=[0, 1])
    env.reset()
    before = env.obs_delays["state"].clone()
    counts = torch.bincount(before, minlength=4)
    assert counts[0] == 0 and bool((counts[1:] > 90).all())  # 133 of 400 expected
    assert 150 < int(env.action_delays.sum()) < 250
    for _ in range(2):
        env.step(torch.zeros(400, 1))
        assert torch.equal(env.obs_delays["state"], before)
    env.step(torch.zeros(400, 1))
    assert not torch.equal(env.obs_delays["state"], before)


def test_noise_has_the_standard_deviation_and_changes_every_step() -> None:
    env = scripted([10**6] * 50, obs_noise={"state": 0.1})
    raw = scripted([10**6] * 50)
    errors = [tensor(env.reset()) - tensor(raw.reset())]
    for _ in range(200):
        action = torch.zeros(50, 1)
        errors.append(tensor(env.step(action).obs) - tensor(raw.step(action).obs))
    e = torch.stack(errors)
    assert abs(float(e.std()) - 0.1) < 0.002 and abs(float(e.mean())) < 0.002
    assert abs(float((e[1:] * e[:-1]).mean() / e.var())) < 0.02, "steps are independent"
    assert abs(float((e[:, 1:] * e[:, :-1]).mean() / e.var())) < 0.02, "environments, too"
    with pytest.raises(ValueError, match="it must be a number"):
        scripted([1], obs_noise={"state": None})


def test_bias_is_constant_in_an_episode_and_differs_between_episodes() -> None:
    env, raw = scripted([3] * 100, obs_bias=0.5), scripted([3] * 100)
    errors = [tensor(env.reset()) - tensor(raw.reset())]
    for _ in range(5):
        step, raw_step = env.step(torch.zeros(100, 1)), raw.step(torch.zeros(100, 1))
        errors.append(tensor(step.obs) - tensor(raw_step.obs))
    e = torch.stack(errors)  # steps 0 to 2 are of the first episode, 3 to 5 of the second
    assert torch.allclose(e[:3], e[:1].expand(3, -1, -1), atol=2e-5)
    assert torch.allclose(e[3:], e[3:4].expand(3, -1, -1), atol=2e-5)
    assert bool(((e[3] - e[0]).abs() > 1e-3).any(-1).all())
    assert 0.45 < float(e.abs().max()) <= 0.5 + 1e-5
    assert abs(float(e[0].std()) - 0.5 / 3**0.5) < 0.03


def test_dropout_repeats_the_observation_before() -> None:
    env = scripted([10**6] * 20, obs_dropout=0.3)
    seen = [tensor(env.reset())[:, 2]]
    seen += [tensor(env.step(torch.zeros(20, 1)).obs)[:, 2] for _ in range(200)]
    x = torch.stack(seen)
    lost = x != torch.arange(201.0).unsqueeze(1).expand(-1, 20)
    assert not lost[0].any() and abs(float(lost[1:].float().mean()) - 0.3) < 0.02
    assert torch.equal(x[1:][lost[1:]], x[:-1][lost[1:]])


def test_rate_limit_bounds_each_change_and_reaches_the_action() -> None:
    env = scripted([6], action_rate_limit=0.25)
    env.reset()
    for a in (0.9, 0.9, 0.9, 7.0, -1.0, 0.25, 1.0):
        env.step(torch.full((1, 1), a))
    executed = [float(a) for a in env.env.actions]  # pyright: ignore[reportAttributeAccessIssue]
    # 7 is first clamped to 1, the bound of the action. The last step begins the next episode at 0.
    assert executed == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25])


ALL = run_helpers.options("""action_delay=[0,2] joint_delay=[0,1] obs_delay=[0,3]
    obs_noise=0.1 obs_bias=0.1 obs_dropout=0.2 action_rate_limit=0.5""")


@pytest.mark.parametrize("saves", [True, False], ids=["state", "replay"])
def test_rollout_continues_bit_for_bit_after_resume(saves: bool) -> None:
    def make() -> Rollout:
        env = toy_envs.ScriptedEnv([4, 7], [True, False], same_step=saves, saves=saves)
        return Rollout(realistic(env, **ALL), toy_envs.CountingPolicy(), seed=0)

    def values(rollout: Rollout, update: int) -> Tensor:
        trajectory, _ = rollout.collect(6, update=update, version=0)
        return torch.cat([tensor(trajectory.obs), trajectory.next_value.unsqueeze(-1)], -1)

    first, resumed = make(), make()
    first.restart(0)
    values(first, 0)
    resumed.load_state(first.state())
    assert torch.equal(values(first, 1), values(resumed, 1))


@pytest.mark.parametrize(
    ("kind", "id", "delay"),
    [
        ("mujoco", "toy_envs:Balance", [0, 2]),
        ("gymnasium", "toy_envs/Point-v0", [0, 2]),
        ("mujoco", "toy_envs:Drifter", [0.2, 1.4]),
    ],
)
def test_check_env_accepts_it(kind: str, id: str, delay: list[float]) -> None:
    options: dict[str, Any] = {
        "max_episode_steps": 12,
        "realism": {"action_delay": delay, "obs_delay": [0, 3]},
    }
    embodied_envs.check_env(
        lambda seeds: embodied_envs.make(
            id, simulator=kind, num_envs=len(seeds), seeds=seeds, **options
        ),
        steps=40,
    )


# -------------------------------------------------------------------- fractions of a control step
def drifter(seeds: list[int], delay: Any, *, decimation: int = 4, **options: Any) -> VectorEnv:
    return embodied_envs.make(
        "toy_envs:Drifter",
        num_envs=len(seeds),
        seeds=seeds,
        num_threads=1,
        action_mapping="none",
        realism={"action_delay": delay},
        kwargs={"decimation": decimation, **options},
    )


@pytest.mark.parametrize("delay", [[0, 2], [0.2, 1.9]])
def test_each_joint_executes_its_actions_with_its_own_delay(delay: list[float]) -> None:
    """The ctrl of each physics step of Ant: that of the element's action as late as drawn."""
    make = {"num_envs": 3, "seeds": [1, 2, 3], "num_threads": 1}
    realism = {"action_delay": 1, "joint_delay": delay}
    env: Any = embodied_envs.make("Ant", **make, action_mapping="none", realism=realism)
    env.reset()
    simulator, parts = env.env, env.realism.parts
    steps, executed = simulator.task.decimation, []
    step = simulator.physics.step

    def record(ctrl: Tensor, substeps: int) -> None:
        executed.extend([ctrl.clone()] * substeps)
        step(ctrl, substeps)

    simulator.physics.step = record
    late = env.action_delays * steps
    if env.late_substeps is not None:
        late = late + env.late_substeps
    assert late.shape == (3, 8) and late.unique().numel() > 2 and int(late.min()) >= steps
    assert int(late.max()) <= (1 + delay[1]) * steps + 0.5 and parts == (1 if delay[1] == 2 else 5)
    actions = [a.repeat(1, 8) * torch.linspace(0.1, 0.8, 8) for a in random_actions(6, 3)]
    for action in actions:
        env.step(action)
    for k, ctrl in enumerate(executed):
        for i in range(3):
            for j in range(8):
                t = (k - int(late[i, j])) // steps
                expected = float(actions[t][i, j]) if t >= 0 else 0.0
                assert float(ctrl[i, j]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("stage", ["velocity", "forces"])  # two engines
@pytest.mark.parametrize(("delay", "late"), [(0.5, 2), (0.3, 1), (1.75, 7)])
def test_control_changes_within_the_control_step(stage: str, delay: float, late: int) -> None:
    """The physics steps of 5 control steps, with the actions ``late`` physics steps later."""
    env: Any = drifter([1], delay, stage=stage)
    env.reset()
    actions = random_actions(5, 1)
    data = mujoco.MjData(env.env.physics.model)
    for t, action in enumerate(actions):
        env.step(action)
        for k in range(4):
            arrived = (4 * t + k - late) // 4
            data.ctrl[0] = float(actions[arrived, 0, 0]) if arrived >= 0 else 0.0
            mujoco.mj_step(env.env.physics.model, data)
        assert env.env.s["qvel"][0].numpy() == pytest.approx(data.qvel, rel=1e-9, abs=1e-12)
