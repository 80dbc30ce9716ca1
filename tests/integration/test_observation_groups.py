"""Groups of observations: a critic that reads more than the actor, in whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.random import env_seeds
from embodied_ppo.core import compile
from embodied_ppo.core.types import Trajectory
from embodied_ppo.policies import robot_policy
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.programs import robot
from embodied_ppo.rollout import environments
from tests.integration.test_resume import check_resume

GROUPED: dict[str, Any] = run_helpers.options(
    "env.id=toy_envs:Grouped env.randomize=true env.action_chunk=2 env.max_episode_steps=8"
    " env.realism.action_delay=1 env.realism.obs_delay=[0,2] env.realism.obs_noise=0.01"
    " env.realism.obs_dropout=0.1 model.actor_obs=[state] model.critic_obs=[state,privileged]"
    " algorithm.reward_type=action_level evaluation.episodes=2 evaluation.video_episodes=0"
    " compile=never updates=4 save_every=2"
)
HIDDEN: dict[str, Any] = run_helpers.options(
    "env.id=torch_tasks:hidden env.simulator=torch env.num_threads=0 env.num_envs=64"
    " model.hidden=[32] algorithm.horizon=16 algorithm.global_batch_size=256"
    " algorithm.update_epoch=4 algorithm.lr=0.005 algorithm.value_clip=null updates=20"
)
SYMMETRIC = {"model.actor_obs": ["policy"], "model.critic_obs": ["policy"]}
ASYMMETRIC = {"model.actor_obs": ["policy"], "model.critic_obs": ["policy", "critic"]}


# ------------------------------------------------------------------------------------ what it gives
@pytest.mark.slow
def test_critic_explains_returns_that_a_hidden_variable_determines() -> None:
    """The return is the hidden number times the remaining steps."""
    explained = [
        run_helpers.tiny_training(
            run_helpers.tiny_config({**HIDDEN, **groups, "model.shared_backbone": False})
        )[-1]["value/explained_variance"]
        for groups in (ASYMMETRIC, SYMMETRIC)
    ]
    assert explained[0] > 0.9 and explained[1] < 0.5


def _collect_twice(offset: float) -> list[Trajectory]:
    """Return the trajectories before and after an update, with an offset of the critic's group."""
    options = {**HIDDEN, **ASYMMETRIC, "env.kwargs": {"offset": offset}}
    c = run_helpers.tiny_config(options)
    env = environments.make_env(
        env_seeds(c.seed, 0, c.env.num_envs, 1),
        config=environments.training_env(c),
        device=torch.device("cpu"),
    )
    policy = robot_policy.make_policy(c, env)
    rollout = robot.make_rollout(c, env, policy, compile.CompileSchedule(None))
    learner = robot_ppo(policy, c.algorithm, num_envs=64, updates=20, seed=0)
    first, _ = rollout.collect(16, update=0, version=0)
    learner.update(first, update=0)
    return [first, rollout.collect(16, update=1, version=1)[0]]


def test_actor_does_not_depend_on_the_critics_group_before_the_first_update() -> None:
    (first, second), (other, later) = _collect_twice(0.0), _collect_twice(0.5)
    assert torch.equal(first.action, other.action) and torch.equal(first.log_prob, other.log_prob)
    assert not torch.equal(first.value, other.value)
    assert not torch.equal(second.action, later.action)


# --------------------------------------------------------------------------------------- whole runs
@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of 4 updates with chunks of actions, each with a value."""
    run_dir = tmp_path_factory.mktemp("groups") / "run"
    run_helpers.train(run_dir, GROUPED)
    return run_dir


def test_resumed_run_equals_an_uninterrupted_run(trained: Path, tmp_path) -> None:
    check_resume(trained, tmp_path / "run", at=2, updates=4)


@pytest.mark.parametrize("task", ["toy_envs:Grouped", "toy_envs:Balance"])
def test_evaluation_needs_the_observations_of_the_actor_only(
    task: str, trained: Path, tmp_path, capsys
) -> None:
    """``Balance`` offers no privileged group, and is otherwise the same task."""
    arguments = [f"checkpoint={trained}", "episodes=3", f"env.id={task}", f"out={tmp_path}"]
    changed = "env.realism.obs_noise.state=0.5"
    report = run_helpers.run_command(capsys, "evaluate", *arguments, "video=false", changed)
    assert report["eval/length"] > 0
    realism = json.loads((tmp_path / "report.json").read_text())["config"]["env"]["realism"]
    assert realism["obs_noise"] == {"state": 0.5}, "the override"
    assert realism["obs_delay"] == [0, 2] and realism["obs_keys"] == ["state"], "the training's"
    page = (tmp_path / "report.html").read_text()
    assert "Realism</th><td>action_delay=1, obs_delay=[0, 2], obs_noise=" in page


# ----------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "model.critic_obs=[policy,critic]"),
        ({**ASYMMETRIC, "env.obs_keys": ["policy"]}, "env.obs_keys = [policy]"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    options: dict[str, Any], message: str, tmp_path, capsys
) -> None:
    given = {**HIDDEN, **options, "run_dir": str(tmp_path / "run")}
    arguments = [f"{path}={json.dumps(x)}" for path, x in given.items()]
    run_helpers.assert_refused(capsys, ["train", *arguments], message)
    assert not (tmp_path / "run").exists()
