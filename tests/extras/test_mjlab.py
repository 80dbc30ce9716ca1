"""MjlabEnv on mjlab's own tasks, on the CPU.

The first run compiles Warp's kernels, about a minute.
"""

from __future__ import annotations

from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.adapters import mjlab_env
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.mjlab_env import MjlabEnv
from embodied_envs.checks import check_env
from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.core.types import ArraySpec, EnvError
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.rollout.simulation import Rollout

BALANCE = "Mjlab-Cartpole-Balance"


def make(id: str = BALANCE, n: int = 4, seeds: list[int] | None = None, **options: Any) -> MjlabEnv:
    return MjlabEnv(id, AdapterOptions(num_envs=n, seeds=seeds or list(range(n)), **options))


def test_cartpole_keeps_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    report = check_env(lambda seeds: make(seeds=seeds, max_episode_steps=10), steps=25)
    assert (report.episodes, report.longest, report.rows, report.seeded) == (8, 10, 100, True)
    assert report.notes == ("state() is None: a resumed run starts new episodes",)
    assert "Module" not in capsys.readouterr().out


def test_what_the_policy_sees_and_when_the_clock_ends() -> None:
    env = make()
    assert (
        env.obs_spec == ArraySpec((5,)) and env.max_episode_steps == 1000
    )  # 50 s of 0.05 s; the group "actor"
    assert make(kwargs={"observe": ["actor", "critic"]}).obs_spec == {
        "actor": ArraySpec((5,)),
        "critic": ArraySpec((5,)),
    }
    assert make(kwargs={"play": True}).max_episode_steps is None
    assert make(max_episode_steps=7).max_episode_steps == 7


def test_the_last_observation_is_that_of_the_end() -> None:
    """Pushed with all force for 20 steps the cart is far from where it starts (within 0.1 m)."""
    env = make(max_episode_steps=20)
    env.reset()
    for _ in range(20):
        step = env.step(torch.ones(4, 1))
    final, obs = torch.as_tensor(step.final_obs), torch.as_tensor(step.obs)
    assert (
        step.truncated.all()
        and bool((final[:, 0] > 0.5).all())
        and bool((obs[:, 0].abs() <= 0.1).all())
    )


def test_a_command_that_is_fulfilled_is_a_success() -> None:
    env = make("Mjlab-Lift-Cube-Yam")
    env.reset()
    step = env.step(torch.zeros(4, env.action_spec.size))
    assert step.success is not None and step.success.tolist() == [False] * 4
    command = env._env.env.command_manager.get_term("lift_height")
    command.cfg.success_threshold = 10.0  # m: any place is the goal
    assert env.step(torch.zeros(4, env.action_spec.size)).success.tolist() == [True] * 4


def test_pictures() -> None:
    env = make(render=True, render_size=(48, 64))
    env.reset()
    picture = env.render()
    assert (
        picture.shape == (48, 64, 3) and picture.dtype == torch.uint8 and picture.float().std() > 10
    )


@pytest.mark.parametrize(
    ("id", "options", "message"),
    [
        (
            "Mjlab-Cartpole",
            {},
            "is unknown to mjlab; it has Mjlab-Cartpole-Balance, Mjlab-Cartpole-Swingup",
        ),
        (
            BALANCE,
            {"kwargs": {"config": {"sim.njmaxx": 3}}},
            "config 'sim.njmaxx': there is no 'njmaxx'",
        ),
        (BALANCE, {"kwargs": {"plays": True}}, "its function fails with .*plays"),
        (
            BALANCE,
            {"kwargs": {"observe": "policy"}},
            "observe='policy' is not in its observation; it has actor, critic",
        ),
    ],
)
def test_refusals(id: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(id, **options)


def test_fields_of_the_configuration_can_be_set() -> None:
    env = make(
        kwargs={
            "config": {"decimation": 2, "events.reset_slider.params.position_range": [0.3, 0.3]}
        }
    )
    obs = torch.as_tensor(env.reset())
    assert env._env.cfg.decimation == 2 and torch.allclose(obs[:, 0], torch.tensor(0.3))
    assert BALANCE in mjlab_env.ids()


def test_ppo_learns_to_balance() -> None:
    """A step is worth 0.05 at best; random forces lose the pole within 2 s and get 0.015, start
    included, over 5 s.
    """
    updates = 40
    algorithm = {"horizon": 25, "global_batch_size": 400, "lr": 2e-3, "gamma": 0.97}
    c = run_helpers.tiny_config(
        {f"algorithm.{k}": v for k, v in algorithm.items()}
        | {"env.num_envs": 64, "model.hidden": (32, 32), "updates": updates}
    )
    env = make(n=64, max_episode_steps=100)
    policy = embodied.make_policy(c, env)
    rollout = Rollout(env, policy, seed=1, stagger=True)
    learner = actor_critic_learner(policy, c.algorithm, num_envs=64, updates=updates, seed=1)
    rewards = []
    for update in range(updates):
        trajectory, _ = rollout.collect(25, update=update, version=update)
        rewards.append(trajectory.reward[trajectory.mask].mean().item())
        learner.update(trajectory, update=update)
    print("mean reward:", [round(r, 4) for r in rewards[::4]])
    assert sum(rewards[-4:]) / 4 > 1.3 * sum(rewards[4:8]) / 4, (
        rewards
    )  # [4:8]: every phase of an episode
