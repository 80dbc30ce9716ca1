"""The world of ``embodied-ppo play`` without a browser: acting, commands, pushes, time, replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from run_helpers import scale_policy

import embodied_envs
from embodied_envs.base.errors import EnvError
from embodied_envs.types import VectorEnv
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.options.schema import Config, EnvConfig
from embodied_ppo.policies import robot_policy
from embodied_ppo.rollout.environments import make_env
from embodied_ppo.tools.player import HISTORY_S, Player, Pull

STEPS = 50


def factory(id: str = "Go1Joystick", **options: Any) -> Callable[[list[int]], VectorEnv]:
    """Return the function that creates the environments of a task with episodes of 50 steps."""
    config = EnvConfig(id=id, max_episode_steps=STEPS, **options)
    return partial(make_env, config=config, device=torch.device("cpu"), rebuild=False)


@pytest.fixture
def make() -> Iterator[Callable[..., Player]]:
    """Create players, which are closed at the end."""
    players: list[Player] = []

    def create(id: str = "Go1Joystick", policy: Any = None, **options: Any) -> Player:
        env = factory(id, **options.pop("env", {}))([7])
        players.append(Player(env, policy, **options))
        return players[-1]

    yield create
    for player in players:
        player.env.close()


def make_policy(id: str = "Go1Joystick") -> Any:
    """Return a policy that acts on its observations, in evaluation mode."""
    env = factory(id)([7])
    torch.manual_seed(0)
    policy: Any = robot_policy.make_policy(Config(), env)
    env.close()
    return scale_policy(policy, 1.0).eval()


def qpos(player: Player) -> np.ndarray:
    return player.frames[-1].pose["qpos"]


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("env", [{}, {"realism": {"obs_delay": 1, "obs_noise": 0.1}}])
def test_playing_equals_the_evaluation(make: Any, deterministic: bool, env: dict[str, Any]) -> None:
    options: Any = {"realism": Config().env.realism.__class__(**env["realism"])} if env else {}
    policy = make_policy()
    measured = evaluation.evaluate(
        policy, factory(**options), episodes=20, num_envs=5, seed=3, deterministic=deterministic
    )
    player = make(policy=policy, seed=3, deterministic=deterministic, env=options)
    for number in (0, 17):  # the second is in another group of rows
        expected = measured.episodes[number]
        replayed = player.replay(number)
        assert replayed.initial_state == expected.initial_state
        assert (replayed.steps, replayed.return_) == (expected.length, expected.return_)
    # A live episode has the states of the replay, whatever was played before.
    recorded = [frame.pose["qpos"] for frame in player.frames]
    player.push([1.0, 0.0, 0.0])
    player.reset(17)
    for expected_qpos in recorded[1:]:
        player.advance()
        np.testing.assert_array_equal(qpos(player), expected_qpos)


def test_replay_shows_its_frames_and_ends_with_a_pause(make: Any) -> None:
    player = make(policy=make_policy())
    player.held, player.agent = [1.0, 0.0, 0.0], "zero"  # without effect in a replay
    steps = player.replay(1).steps
    assert [player.shown, len(player.frames)] == [0, steps]
    for _ in range(steps + 3):
        player.advance()
    assert player.shown == steps - 1
    assert player.paused
    assert (player.held, player.agent) == ([1.0, 0.0, 0.0], "zero")
    player.reset(0)
    assert player.cursor is None
    assert len(player.frames) == 1


def test_held_command_reaches_observation_and_next_episodes(make: Any) -> None:
    player = make()
    task_command = player.frames[-1].command
    player.held = [0.5, -0.2, 0.7]
    player.advance()
    np.testing.assert_allclose(player._obs[0, 9:12], [0.5, -0.2, 0.7], rtol=1e-6)
    assert not np.allclose(task_command, player.frames[-1].command)
    player.reset()
    np.testing.assert_allclose(player.frames[-1].command, [0.5, -0.2, 0.7])
    player.held = None
    player.reset(0)
    np.testing.assert_array_equal(player.frames[-1].command, task_command)


def test_zero_agent_is_action_zero_and_random_is_not(make: Any) -> None:
    player = make(episode=2)
    env = embodied_envs.make("Go1Joystick", num_envs=1, seeds=evaluation.evaluation_seeds(0, 3)[2:])
    env.reset()
    for _ in range(10):
        env.step(torch.zeros(1, 12))
        player.advance()
    expected = env.joint_state()["qpos"][0]
    np.testing.assert_allclose(qpos(player), expected, rtol=1e-6)
    env.close()
    player.reset(2)
    player.agent = "random"
    for _ in range(10):
        player.advance()
    assert np.abs(qpos(player) - expected.numpy()).max() > 0.01


def test_push_changes_the_velocity_by_the_given_amount(make: Any) -> None:
    player = make()
    before = player._frame(0.0, {}).velocity
    player.push([0.6, -0.3, 0.1])
    change = player._frame(0.0, {}).velocity - before
    np.testing.assert_allclose(change, [0.6, -0.3, 0.1, 0, 0, 0], atol=1e-12)
    position = qpos(player)[0]
    player.advance()
    # The trunk moves by about the velocity times the step of 20 ms.
    assert qpos(player)[0] - position == pytest.approx((before[0] + 0.6) * 0.02, rel=0.3)


@pytest.mark.parametrize("body", ["trunk", "FR_calf"])
def test_pull_lifts_a_body_towards_the_target(make: Any, body: str) -> None:
    player = make()
    index = mujoco.mj_name2id(player.model, mujoco.mjtObj.mjOBJ_BODY, body)
    start = player.positions(player.frames[-1]).xpos[index].copy()
    target = start + [0.0, 0.0, 0.9]  # from 0.5 m on the force exceeds the weight
    player.pull = Pull(index, np.zeros(3), target)
    distances = []
    for _ in range(40):
        player.advance()
        position = player.positions(player.frames[-1]).xpos[index]
        distances.append(float(np.linalg.norm(position - target)))
    assert min(distances) < 0.7
    assert np.abs(player._fields["qvel"]).max() < 60  # a light link does not diverge


def test_slow_motion_changes_only_the_number_of_steps(make: Any) -> None:
    states, counts = [], []
    for speed in (1.0, 0.25):
        player = make()
        player.speed = speed
        player.due(100.0)
        counts.append(0)
        now = 100.0
        while len(player.frames) < 11:
            now += 0.01
            steps = player.due(now)
            counts[-1] += 1
            for _ in range(steps):
                player.advance()
        states.append(np.array([frame.pose["qpos"] for frame in player.frames]))
    np.testing.assert_array_equal(*states)
    assert counts[1] == pytest.approx(4 * counts[0], abs=4)
    player.paused = True
    assert player.due(now + 5) == 0
    player.paused = False
    # A late machine does not catch up for ever.
    assert player.due(now + 1000) <= 10


def test_episodes_follow_each_other_and_history_is_bounded(make: Any) -> None:
    player = make()
    for _ in range(STEPS + 1):
        player.advance()
    assert player.episode >= 1
    assert player.ended.startswith("episode 0: ")
    assert player.frames.maxlen == HISTORY_S / player.step_s
    assert len(player.frames) == STEPS + 2


def test_a_policy_with_wrong_weights_is_named(make: Any) -> None:
    policy = make_policy()
    player = make(policy=policy)
    with torch.no_grad():
        next(policy.parameters()).fill_(torch.nan)
    with pytest.raises(embodied_envs.base.errors.CheckpointError, match="earlier checkpoint"):
        player.advance()
    player.agent = "zero"
    player.advance()  # another agent goes on


@pytest.mark.parametrize("tasks", [None, ("Hopper-v5",)])  # those of a policy of several tasks
def test_gymnasium_task_is_driven_and_pushed(make: Any, tasks: tuple[str, ...] | None) -> None:
    player = make("Hopper-v5", env={"simulator": "gymnasium", "tasks": tasks})
    assert not player.commands
    before = player._fields["qvel"].copy()
    player.push([0.5, 0.0, 0.0])
    change = player._fields["qvel"] - before
    np.testing.assert_allclose(change[:3], [0.5, 0.0, 0.0], atol=1e-12)
    player.advance()
    assert any("reward" in name for name in player.mean_terms(1.0))
    player.reset()
    player.advance()


@pytest.mark.parametrize(
    ("id", "hint"), [("Hopper-v4", "env.simulator=gymnasium"), ("CartPole-v1", "MuJoCo")]
)
def test_simulators_without_a_state_are_refused(make: Any, id: str, hint: str) -> None:
    with pytest.raises(EnvError, match=hint):
        make(id, env={"simulator": "envpool"})
