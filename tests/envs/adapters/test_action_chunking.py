"""Action chunks against a plain loop over the same simulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy_envs
from torch import Tensor

import embodied_envs
from embodied_envs.adapters.action_chunking import ChunkedActions
from embodied_ppo.algorithms import advantages
from embodied_ppo.core.types import EnvError
from embodied_ppo.rollout.simulation import Rollout


def chunked(
    lengths: list[int], clock: list[bool], chunk: int, *, same_step: bool
) -> ChunkedActions:
    return ChunkedActions(toy_envs.ScriptedEnv(lengths, clock, same_step=same_step), chunk)


@pytest.mark.parametrize("same_step", [True, False], ids=["same_step", "next_step"])
def test_an_end_inside_a_chunk_leaves_the_rest_unexecuted(same_step: bool) -> None:
    """Lengths 2 (terminates), 3 (clock), 7 and 3 = the chunk itself (terminates at its last
    step).
    """
    env = chunked([2, 4, 7, 3], [False, True, False, False], 3, same_step=same_step)
    assert env.action_spec.size == 3 and env.reset().shape == (
        4,
        3,
    )  # pyright: ignore[reportAttributeAccessIssue]
    step = env.step(torch.zeros(4, 3, 1))
    # rewards are 100 i + 10 episode + step
    assert step.reward.tolist() == [[1, 2, 0], [101, 102, 103], [201, 202, 203], [301, 302, 303]]
    assert step.executed is not None and step.executed.sum(1).tolist() == [2, 3, 3, 3]
    assert (
        step.terminated.tolist() == [True, False, False, True]
        and not step.truncated.any()
        and step.mask.all()
    )
    assert step.final_obs is not None
    assert step.final_obs[0].tolist() == [0, 0, 2] and step.final_obs[3].tolist() == [3, 0, 3]
    fresh = step.obs[:, 1:].tolist()
    assert fresh[1:3] == [[0, 3], [0, 3]], "these go on"
    assert [at[1] for at in (fresh[0], fresh[3])] == [0, 0], "these begin their next episode"
    step = env.step(torch.zeros(4, 3))
    assert step.reward[1].tolist() == [104, 0, 0] and step.truncated.tolist() == [
        False,
        True,
        False,
        False,
    ]
    assert step.executed is not None and step.executed[1].tolist() == [True, False, False]
    assert step.final_obs is not None and step.final_obs[1].tolist() == [1, 0, 4]


def test_success_inside_a_chunk_counts() -> None:
    env = chunked([2, 9], [False, False], 4, same_step=False)
    env.reset()
    flags = [env.step(torch.zeros(2, 4)).success for _ in range(2)]
    won = [f.tolist() for f in flags if f is not None]
    # odd episodes succeed; what the simulator does unseen after the end of episode 0 is not one of
    # ours
    assert won[0] == [False, False]


def test_a_rollout_discounts_inside_and_between() -> None:
    """Σ γ^i r_i is the reward of a decision that lasted k steps, and the next value counts γ^k."""
    env = chunked([2, 5], [False, True], 3, same_step=True)

    class Policy(toy_envs.CountingPolicy):
        def noise(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
            return torch.randn(rows, 3, generator=generator)

    policy: Any = Policy()
    rollout = Rollout(env, policy, seed=0, gamma=0.5)
    t, metrics = rollout.collect(2, update=0, version=0)
    assert t.steps is not None and t.steps.tolist() == [[2, 3], [2, 2]]
    assert t.reward[:, 1].tolist() == [101 + 0.5 * 102 + 0.25 * 103, 104 + 0.5 * 105]
    assert t.truncated[:, 1].tolist() == [False, True] and t.terminated[:, 0].tolist() == [
        True,
        True,
    ]
    assert t.next_value[1, 1].item() == 1005.5, "V of the final observation, episode 0 step 5"
    adv, _ = advantages.gae(
        t.reward,
        t.value,
        t.next_value,
        t.terminated,
        t.truncated,
        t.mask,
        gamma=0.5,
        gae_lambda=1.0,
        steps=t.steps,
    )
    # environment 1: r0 + γ r1 + γ² r2 + γ³ r3 + γ⁴ r4 + γ⁵ V - V(s0), by hand
    expected = sum(0.5**i * (101 + i) for i in range(5)) + 0.5**5 * 1005.5 - 1000.5
    assert adv[0, 1].item() == pytest.approx(expected, rel=1e-6)
    returns = [e[0] for e in rollout.finished]
    assert returns[0] == 1 + 2 and returns[-1] == 101 + 102 + 103 + 104 + 105, "undiscounted"
    assert [e[1] for e in rollout.finished][-1] == 5 and metrics["rollout/episodes"] == 3


def test_a_chunk_is_the_same_steps_of_the_simulator() -> None:
    """Against EnvPool step by step, up to the first end."""
    options: dict[str, Any] = {"num_envs": 2, "seeds": [3, 4], "num_threads": 1}
    plain = embodied_envs.make("HalfCheetah-v4", **options)
    env = embodied_envs.make("HalfCheetah-v4", **options, action_chunk=4)
    assert env.max_episode_steps == 250
    assert torch.equal(plain.reset(), env.reset())
    actions = torch.rand(3, 2, 4, 6, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for chunk in actions:
        rewards = [plain.step(a) for a in chunk.unbind(1)]
        step = env.step(chunk)
        assert torch.equal(step.reward, torch.stack([s.reward for s in rewards], 1))
        assert torch.equal(step.obs, rewards[-1].obs)


@pytest.mark.parametrize("id", ["HalfCheetah-v4", "CartPole-v1", "toy_envs:Balance"])
def test_every_simulator_begins_single_episodes(id: str) -> None:
    """Ends everywhere, and none leaks into the next episode: lengths add up to the clock."""
    simulator = {"CartPole-v1": "gymnasium"}.get(id, "auto")
    options: dict[str, Any] = {
        "num_envs": 3,
        "seeds": [1, 2, 3],
        "max_episode_steps": 7,
        "simulator": simulator,
    }
    if id == "CartPole-v1":
        with pytest.raises(EnvError, match="its actions are discrete; use action_chunk=1"):
            embodied_envs.make(id, **options, action_chunk=3)
        return
    env = embodied_envs.make(id, **options, action_chunk=3)
    env.reset()
    lengths = torch.zeros(3, dtype=torch.int64)
    for _ in range(12):
        step = env.step(torch.zeros(3, env.action_spec.size))  # pyright: ignore[reportAttributeAccessIssue]
        assert step.executed is not None
        lengths += step.executed.sum(1)
        ended = step.terminated | step.truncated
        assert (lengths[ended] == 7).all() and (lengths <= 7).all()
        lengths[ended] = 0


def test_gymnasium_environments_begin_single_episodes() -> None:
    options: dict[str, Any] = {
        "num_envs": 3,
        "seeds": [1, 2, 3],
        "max_episode_steps": 6,
        "simulator": "gymnasium",
    }
    env = embodied_envs.make("Pendulum-v1", **options, action_chunk=3)
    env.reset()
    for k in range(8):
        step = env.step(torch.zeros(3, 3))
        assert step.executed is not None and step.executed.all(), (
            "6 = 2 x 3: a dummy row would show here"
        )
        assert step.truncated.tolist() == [k % 2 == 1] * 3


def test_one_picture_for_a_chunk() -> None:
    """And it is the right one, also of the episode that begins in the middle."""
    options: dict[str, Any] = {
        "num_envs": 2,
        "seeds": [1, 2],
        "max_episode_steps": 5,
        "cameras": ("eye",),
    }
    env = embodied_envs.make("toy_envs:Balance", **options, action_chunk=3)
    plain: Any = embodied_envs.make("toy_envs:Balance", **options)
    assert isinstance(env, ChunkedActions)
    inner: Any = env.env
    taken: list[int] = []
    images = inner.physics.cameras.images
    inner.physics.cameras.images = lambda worlds, where: (
        taken.append(int(where.sum())),
        images(worlds, where),
    )[1]
    env.reset(), plain.reset()
    step = env.step(torch.zeros(2, 3))
    assert sum(taken) == 2, "one for each world"
    for _ in range(3):
        reference = plain.step(torch.zeros(2, 1))
    assert torch.equal(step.obs["eye"], reference.obs["eye"])
    taken.clear()
    step = env.step(torch.zeros(2, 3))  # ends at the second of three
    for _ in range(2):
        reference = plain.step(torch.zeros(2, 1))
    assert step.final_obs is not None and torch.equal(
        step.final_obs["eye"], reference.final_obs["eye"]
    )
    assert not torch.equal(step.obs["eye"], step.final_obs["eye"])
    assert torch.equal(
        inner.render() if inner.physics.cameras.picture_size else step.obs["eye"], step.obs["eye"]
    )


def test_wrong_shapes() -> None:
    env = embodied_envs.make("toy_envs:Balance", num_envs=2, seeds=[1, 2], action_chunk=3)
    env.reset()
    with pytest.raises(EnvError, match=r"actions of shape \[2, 4\]; it takes \[2, 3, 1\]"):
        env.step(torch.zeros(2, 4))
