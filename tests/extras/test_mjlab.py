"""MjlabEnv with mjlab's tasks on the CPU.

The first run compiles Warp's kernels, which takes about a minute.
"""

from __future__ import annotations

from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.mjlab_env import MjlabEnv
from embodied_envs.base.errors import EnvError
from embodied_envs.checks import check_env
from embodied_envs.types import ArraySpec

BALANCE = "Mjlab-Cartpole-Balance"


def make(id: str = BALANCE, n: int = 4, seeds: list[int] | None = None, **options: Any) -> MjlabEnv:
    options = {"obs_keys": ["actor"]} | options
    return MjlabEnv(id, AdapterOptions(num_envs=n, seeds=seeds or list(range(n)), **options))


def test_cartpole_satisfies_the_contract(capsys) -> None:
    report = check_env(lambda seeds: make(seeds=seeds, max_episode_steps=10), steps=25)
    assert (report.episodes, report.longest, report.rows, report.seeded) == (8, 10, 100, True)
    assert report.notes == (
        "state() is None: a resumed run replays the actions since the last restart",
    )
    assert "Module" not in capsys.readouterr().out


def test_observation_groups_and_time_limit() -> None:
    lines = r"model.actor_obs=\[actor\] model.critic_obs=\[actor,critic\]"
    with pytest.raises(EnvError, match=lines):
        make(obs_keys=None)
    env = make()
    assert env.obs_spec == {"actor": ArraySpec((5,))}
    assert env.max_episode_steps == 1000  # 50 s in steps of 0.05 s
    assert make(obs_keys=["actor", "critic"]).obs_spec == {
        "actor": ArraySpec((5,)),
        "critic": ArraySpec((5,)),
    }
    assert make(kwargs={"play": True}).max_episode_steps is None
    assert make(max_episode_steps=7).max_episode_steps == 7


def test_final_obs_precedes_the_reset() -> None:
    """Full force for 20 steps moves the cart far from its start, which is within 0.1 m."""
    env = make(max_episode_steps=20)
    env.reset()
    for _ in range(20):
        step = env.step(torch.ones(4, 1))
    assert isinstance(step.final_obs, dict) and isinstance(step.obs, dict)
    final, obs = step.final_obs["actor"], step.obs["actor"]
    assert step.truncated.all()
    assert bool((final[:, 0] > 0.5).all()) and bool((obs[:, 0].abs() <= 0.1).all())


def test_fulfilled_command_is_a_success() -> None:
    env = make("Mjlab-Lift-Cube-Yam")
    env.reset()
    step = env.step(torch.zeros(4, env.action_spec.size))
    assert step.success is not None and step.success.tolist() == [False] * 4
    command = env._env.env.command_manager.get_term("lift_height")
    command.cfg.success_threshold = 10.0  # m: any place is the goal
    assert env.step(torch.zeros(4, env.action_spec.size)).success.tolist() == [True] * 4


def test_ppo_learns_to_balance() -> None:
    """The reward per step is at most 0.05; random forces reach 0.015 on average over 5 s."""
    updates = 40
    algorithm = {"horizon": 25, "global_batch_size": 400, "lr": 2e-3, "gamma": 0.97}
    c = run_helpers.tiny_config(
        {f"algorithm.{k}": v for k, v in algorithm.items()}
        | {"env.num_envs": 64, "model.hidden": (32, 32), "updates": updates}
    )
    rewards = run_helpers.train_mean_rewards(c, make(n=64, max_episode_steps=100), stagger=True)
    print("mean reward:", [round(r, 4) for r in rewards[::4]])
    # Updates 4 to 7 contain every phase of an episode.
    assert sum(rewards[-4:]) / 4 > 1.3 * sum(rewards[4:8]) / 4, rewards
