"""Rollouts: row alignment with identifiable numbers, ends of episodes, metrics, seeds, state."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import run_helpers
import torch
import toy_envs

from embodied_envs.base import tree
from embodied_envs.base.random import env_seeds, sampling_key
from embodied_ppo.core.types import Mean, Trajectory
from embodied_ppo.policies import robot_policy
from embodied_ppo.rollout import environments, exploration_noise
from embodied_ppo.rollout.simulation import Rollout


def rollout(
    lengths: list[int],
    clock: list[bool],
    *,
    seed: int = 0,
    group_size: int = 1,
    one_episode=False,
    noise_correlation: float = 0.0,
    **options,
):
    env = toy_envs.ScriptedEnv(lengths, clock, **options)
    policy = toy_envs.CountingPolicy()
    settings = {"group_size": group_size, "noise_correlation": noise_correlation}
    return env, Rollout(env, policy, seed=seed, one_episode=one_episode, **settings)


def number(metric: Mean | float) -> float:
    return metric.value if isinstance(metric, Mean) else metric


def column(t: Trajectory, i: int) -> list[tuple[Any, ...]]:
    """Return (episode, step, reward, next_value, terminated, truncated, mask) of each row."""
    rows = []
    for r in range(t.reward.shape[0]):
        _, episode, step = (int(x) for x in t.obs[r, i])
        flags = [bool(x[r, i]) for x in (t.terminated, t.truncated, t.mask)]
        rows.append((episode, step, t.reward[r, i].item(), t.next_value[r, i].item(), *flags))
    return rows


# ---------------------------------------------------------------------------------------- alignment
@pytest.mark.parametrize("same_step", [False, True])
def test_rows_of_a_simulator_that_resets_on_the_next_or_in_the_same_step(same_step):
    env, r = rollout([2, 3], [False, True], same_step=same_step)
    t, _ = r.collect(4 if same_step else 5, update=0, version=7)
    # Environment 0 terminates after 2 steps: the last row has the final observation's value; a
    # dummy row follows if the simulator resets on the next step.
    first = [
        (0, 0, 1.0, 1.5, False, False, True),
        (0, 1, 2.0, 2.5, True, False, True),  # V(episode 0, step 2), not used: terminated
        (0, 2, 0.0, 100.5, False, False, False),  # the dummy: acts on the final observation, resets
        (1, 0, 11.0, 101.5, False, False, True),
        (1, 1, 12.0, 102.5, True, False, True),
    ]
    # Environment 1 is truncated after 3 steps: next_value is V of the final observation, not of
    # the next episode, also where the next row has (1, 0).
    second = [
        (0, 0, 101.0, 1001.5, False, False, True),
        (0, 1, 102.0, 1002.5, False, False, True),
        (0, 2, 103.0, 1003.5, False, True, True),
        (0, 3, 0.0, 1100.5, False, False, False),
        (1, 0, 111.0, 1101.5, False, False, True),  # V of the observation after the rollout
    ]
    for i, rows in enumerate((first, second)):
        assert column(t, i) == [row for row in rows if row[-1] or not same_step]
    check_decisions(t, env)


def check_decisions(t: Trajectory, env: toy_envs.ScriptedEnv) -> None:
    """Check that row t holds the action that the simulator received at t, and its attributes."""
    assert isinstance(t.obs, torch.Tensor)
    assert torch.equal(t.action, torch.stack(env.actions))
    assert torch.equal(t.log_prob, -t.action.unsqueeze(2))
    assert torch.equal(t.value, toy_envs.value_of(t.obs))
    assert torch.equal(t.replay["seen"], t.obs)
    assert (t.version == 7).all() and t.version.dtype == torch.int64
    rows, n = t.reward.shape
    assert all(leaf.shape[:2] == (rows, n) for leaf in tree.leaves(t))
    assert all(x.dtype == torch.float32 for x in (t.log_prob, t.value, t.next_value, t.reward))
    assert all(x.dtype == torch.bool for x in (t.terminated, t.truncated, t.mask))


def test_a_rollout_continues_the_episodes_of_the_previous_one():
    full = rollout([3, 4], [False, True])[1].collect(6, update=0, version=0)[0]
    _, r = rollout([3, 4], [False, True])
    first, _ = r.collect(4, update=0, version=0)
    second, _ = r.collect(2, update=1, version=0)
    assert column(first, 0) + column(second, 0) == column(full, 0)
    assert column(first, 1)[:3] + column(second, 1) == column(full, 1)[:3] + column(full, 1)[4:]
    assert torch.equal(torch.cat([first.next_value, second.next_value]), full.next_value)


def test_truncation_bootstraps_the_final_observation_in_a_real_simulator():
    """EnvPool's InvertedPendulum with a time limit of 3 steps.

    ``next_value`` of the truncated row is V of the dummy row after it, which acts on the final
    observation.
    """
    c = run_helpers.tiny_config({"env.id": "InvertedPendulum-v4", "env.max_episode_steps": 3})
    env = environments.make_env(env_seeds(0, 0, 4), config=c.env, device=torch.device("cpu"))
    policy = robot_policy.make_policy(c, env)
    t, metrics = Rollout(env, policy, seed=0).collect(10, update=0, version=0)
    env.close()
    assert isinstance(t.obs, torch.Tensor)
    assert t.truncated.any() and not t.terminated.any()
    cut = t.truncated[:-1]
    assert torch.equal(t.next_value[:-1][cut], t.value[1:][cut])
    assert not t.mask[1:][cut].any()
    assert t.mask.float().mean() == pytest.approx(0.8)  # rows 3 and 7 of 10 are dummies
    assert (t.reward[1:][cut] == 0).all()
    first_obs = t.obs[2:][cut[:-1]]  # an episode starts near the upright position
    assert first_obs.abs().max() <= 0.01 + 1e-6 < t.obs[1:][cut].abs().max()
    assert number(metrics["rollout/length"]) == 3.0


# ------------------------------------------------------------------------------------------ metrics
def test_episode_metrics():
    _, r = rollout([2, 3], [False, True])
    _, metrics = r.collect(1, update=0, version=0)
    assert metrics == {"rollout/episodes": 0.0}  # without a finished episode there is no mean
    _, metrics = r.collect(4, update=1, version=0)
    # Environment 0: 1 + 2 and 11 + 12 (episode 1 succeeds); environment 1: 101 + 102 + 103.
    assert number(metrics["rollout/episodes"]) == 3
    assert number(metrics["rollout/return"]) == pytest.approx((3 + 23 + 306) / 3)
    assert number(metrics["rollout/length"]) == pytest.approx((2 + 2 + 3) / 3)
    assert number(metrics["rollout/success"]) == pytest.approx(1 / 3)
    assert isinstance(metrics["rollout/return"], Mean)


def test_one_episode_of_each_environment():
    env, r = rollout([2, 3, 9], [False, True, False], same_step=True, one_episode=True)
    for update in (4, 5):
        t, metrics = r.collect(6, update=update, version=0)
        assert t.mask.T.tolist() == [[True] * 2 + [False] * 4, [True] * 3 + [False] * 3, [True] * 6]
        assert [row[:2] for row in column(t, 0)][:2] == [(0, 0), (0, 1)]  # new in each collect
        assert env.seeds[-1] == env_seeds(0, update, 3)
        # Episodes that started inside the rollout do not count.
        assert number(metrics["rollout/episodes"]) == 2
        assert number(metrics["rollout/return"]) == pytest.approx((3 + 306) / 2)
        assert number(metrics["rollout/length"]) == pytest.approx((2 + 3) / 2)
    _, r = rollout([2, 3], [False, True], one_episode=True)
    t, _ = r.collect(6, update=0, version=0)
    assert t.mask.sum(0).tolist() == [2, 3]


# -------------------------------------------------------------------------------------------- seeds


def test_group_members_share_the_first_observation_but_not_the_action():
    c = run_helpers.tiny_config({"algorithm.group_size": 2, "env.restart_each_rollout": True})
    env = environments.make_env(env_seeds(0, 0, 4, 2), config=c.env, device=torch.device("cpu"))
    r = Rollout(env, robot_policy.make_policy(c, env), seed=0, group_size=2, one_episode=True)
    t, _ = r.collect(3, update=0, version=0)
    env.close()
    assert isinstance(t.obs, torch.Tensor)
    assert torch.equal(t.obs[0, 0], t.obs[0, 1]) and torch.equal(t.obs[0, 2], t.obs[0, 3])
    assert not torch.equal(t.obs[0, 0], t.obs[0, 2])
    assert not torch.equal(t.action[0, 0], t.action[0, 1])
    assert not torch.equal(t.obs[1, 0], t.obs[1, 1])


@pytest.mark.slow
def test_noise_is_equal_in_every_process_and_correlated_without_rewards():
    parts = [(0, 0, 0, 0), (1, 2, "shuffle", 3), (7, "env", 0, 5)]
    code = (
        f"from embodied_envs.base.random import sampling_key\nfor p in {parts!r}:"
        " print(sampling_key(*p))"
    )
    keys = [sampling_key(*p) for p in parts]
    out = run_helpers.run_process(sys.executable, "-c", code, env={"PYTHONHASHSEED": "12345"})
    assert [int(line) for line in out.split()] == keys
    # The same in every version, because checkpoints depend on it.
    assert sampling_key(0, 0, 0, 0) == 3798811674703423765
    grid = {sampling_key(s, u, 0, t) for s in range(5) for u in range(20) for t in range(40)}
    assert len(grid) == 5 * 20 * 40 and all(0 <= k < 2**63 for k in grid)
    # Of 8 environments the odd ones may have correlated noise; 5 and 7 have rewards.
    policy: Any = toy_envs.CountingPolicy()
    keys = [sampling_key(0, 0, 0, t) for t in range(2000)]
    independent, noise = (
        exploration_noise.ExplorationNoise(policy, c, 8, slice(0, 8), torch.device("cpu"))
        for c in (0.0, 0.9)
    )
    n = torch.stack(independent.draw(keys))  # [T, 8, 1]
    assert torch.equal(torch.stack(noise.draw(keys)), n), "before the first rollout"
    reward = torch.tensor([0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]).expand(3, 8).clone()
    reward[1, 5] = 0.5
    noise.observe(reward, 0)
    assert noise.unrewarded.tolist() == [1, 1, 1, 1, 1, 0, 1, 0]
    e = torch.stack(noise.draw(keys))
    assert torch.equal(e[:, [0, 2, 4, 5, 6, 7]], n[:, [0, 2, 4, 5, 6, 7]])
    torch.testing.assert_close(e[7, 1], 0.9 * e[6, 1] + 0.19**0.5 * n[7, 1])
    x = e[:, 1, 0]
    assert abs(float(x.std()) - 1) < 0.15 and 0.85 < float((x[1:] * x[:-1]).mean() / x.var()) < 0.95
    # The mean of the first rollouts, then a moving average.
    for update in range(1, 8):
        noise.observe(torch.zeros(3, 8), update)
    assert float(noise.unrewarded[5]) == pytest.approx(1 - 0.2 * 0.8**3)


# -------------------------------------------------------------------------------------- determinism
@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v4"])
def test_equal_seeds_give_equal_trajectories(env_id):
    def collect(seed: int, updates=(0, 1)) -> Trajectory:
        c = run_helpers.tiny_config({"env.id": env_id})
        env = environments.make_env(env_seeds(seed, 0, 4), config=c.env, device=torch.device("cpu"))
        r = Rollout(env, robot_policy.make_policy(c, env), seed=seed)
        parts = [r.collect(12, update=u, version=u)[0] for u in updates]
        env.close()
        return tree.map(lambda *xs: torch.cat(xs), parts[0], *parts[1:])

    first, again, other = collect(0), collect(0), collect(1)
    assert all(
        torch.equal(a, b) for a, b in zip(tree.leaves(first), tree.leaves(again), strict=True)
    )
    assert not torch.equal(first.action, other.action)
    assert not torch.equal(first.action[:12], first.action[12:])  # updates have different keys
    later = collect(0, updates=(3, 4))
    assert torch.equal(later.obs[0], first.obs[0])
    assert not torch.equal(later.action[0], first.action[0])


# -------------------------------------------------------------------------------------------- state
@pytest.mark.parametrize("saves", [True, False])
def test_load_state_continues_bit_for_bit(saves):
    """The simulator's state is loaded, or its actions are replayed if it cannot save its state."""
    options: dict[str, Any] = {"lengths": [4, 7], "clock": [False, True], "saves": saves}
    options["noise_correlation"] = 0.9
    _, r = rollout(**options)
    r.collect(4, update=0, version=0)
    r.collect(2, update=1, version=0)
    state, notices = r.state(), []
    assert (state["env"] is None) == (not saves) and (state["actions"] is None) == saves
    env, resumed = rollout(**options)
    resumed.load_state(state, notice=notices.append)
    assert notices == ([] if saves else ["resume: replaying 6 steps of the simulator"])
    assert env.seeds == ([] if saves else [env_seeds(0, 0, 2)])
    for update in (2, 3):
        (a, a_metrics), (b, b_metrics) = (
            each.collect(3, update=update, version=1) for each in (r, resumed)
        )
        assert all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))
        assert a_metrics == b_metrics
        again = [each.state() for each in (r, resumed)]
        assert saves or torch.equal(again[0]["actions"], again[1]["actions"])
    # Episodes that were interrupted count in full: 1 + .. + 4, 11 + .. + 14 and 101 + .. + 107.
    assert number(a_metrics["rollout/return"]) == pytest.approx((10 + 50 + 728) / 3)


def test_a_failed_replay_starts_new_episodes():
    _, r = rollout([4, 7], [False, True])
    r.restart(5)
    r.collect(6, update=5, version=0)
    notices: list[str] = []
    env, resumed = rollout([5, 7], [False, True])  # another simulation
    resumed.load_state(r.state(), notice=notices.append)
    assert len(notices) == 2 and "new episodes" in notices[1]
    assert env.seeds == [env_seeds(0, 5, 2)] * 2
    t, metrics = resumed.collect(5, update=6, version=0)
    assert column(t, 0)[0][:2] == (0, 0)
    # 10 from before, 1 + .. + 5 from the new episode
    assert number(metrics["rollout/return"]) == pytest.approx((10 + 15) / 2)


@pytest.mark.parametrize("same_step", [False, True])
@pytest.mark.parametrize("saves", [True, False])
def test_stagger(same_step: bool, saves: bool):
    """The first episode of environment i is truncated after i/N of the limit and not counted."""

    def staggered() -> tuple[toy_envs.ScriptedEnv, Rollout]:
        env = toy_envs.ScriptedEnv([8, 8, 8, 3], [True] * 4, same_step=same_step, saves=saves)
        env.max_episode_steps = 8
        return env, Rollout(env, toy_envs.CountingPolicy(), seed=0, stagger=True)

    env, r = staggered()
    t, metrics = r.collect(7, update=0, version=0)
    assert r.staggering.cuts == {2, 4, 6}
    assert column(t, 0)[-1] == (0, 6, 7.0, 7.5, False, False, True)  # not truncated
    expected = [(0, 1, 102.0, 1002.5, False, True, True), (1, 0, 111.0, 1101.5, False, False, True)]
    assert column(t, 1)[1:3] == expected
    wanted = [(0, 3, 204.0, 2004.5, False, True, True), (1, 0, 211.0, 2101.5, False, False, True)]
    assert column(t, 2)[3:5] == wanted
    # Environment 3 ends after 3 steps; its truncation after 6 is at the end of the second episode,
    # or within it.
    assert t.truncated[:, 3].nonzero().flatten().tolist() == [2, 5]
    assert number(metrics["rollout/episodes"]) == (2 if same_step else 1)
    assert number(metrics["rollout/length"]) == 3
    resumed_env, resumed = staggered()
    resumed.load_state(r.state())
    for update in (1, 2):
        one, other = (x.collect(7, update=update, version=0) for x in (r, resumed))
        assert all(map(torch.equal, tree.leaves(one[0]), tree.leaves(other[0])))
        assert one[1] == other[1]
    assert resumed_env.at == env.at


@pytest.mark.parametrize("saves", [True, False])
def test_restart_every(saves):
    """If resuming replays actions, episodes restart before their number exceeds the limit."""
    env, r = rollout([9, 9], [False, True], saves=saves)
    r.restart_every = 12
    first_rows = []
    for update in range(6):
        t, _ = r.collect(5, update=update, version=0)
        first_rows.append(column(t, 0)[0][:2])
    if saves:
        assert not env.seeds and first_rows.count((0, 0)) == 1
    else:
        assert env.seeds == [env_seeds(0, 2, 2), env_seeds(0, 4, 2)]
        assert first_rows == [(0, 0), (0, 5)] * 3
        assert r.state()["actions"].shape == (10, 2, 1)


@pytest.mark.parametrize(("limit", "stagger"), [(None, False), (30, True)])
def test_episodes_longer_than_restart_every_end(limit: int | None, stagger: bool) -> None:
    """Episodes of 20 and 30 steps end although restarts are due every 8 steps, after a resume."""
    lines: list[str] = []

    def make() -> Rollout:
        env, _ = rollout([20, 30], [False, True])
        env.max_episode_steps = limit
        options: Any = {"restart_every": 8, "stagger": stagger, "notice": lines.append}
        return Rollout(env, toy_envs.CountingPolicy(), seed=0, **options)

    r = make()
    whole, rounds = [], set()
    for update in range(16):
        r.collect(5, update=update, version=0)
        whole += [e[1] for e in r.episodes.finished]
        rounds.add(r.round)
        state = r.state()
        r = make()
        r.load_state(state)
        r.episodes.finished.clear()
    assert {20.0, 30.0} <= set(whole)
    assert rounds == ({0, 12} if stagger else {0, 6, 12})  # of 5 steps each
    assert len({line for line in lines if "env.restart_every=0" in line}) == 1
    assert any("waits for the end" in line for line in lines)
    assert all(len(line) <= 300 for line in lines)


@pytest.mark.parametrize(
    ("limit", "hint", "rollouts"),
    [
        (None, "env.max_episode_steps", 10),
        (30, "30", 16),  # the first return is due in the 15th rollout
    ],
)
def test_missing_ends_are_reported(limit: int | None, hint: str, rollouts: int) -> None:
    lines: list[str] = []
    env, _ = rollout([999, 999], [False, True])
    env.max_episode_steps = limit
    r = Rollout(env, toy_envs.CountingPolicy(), seed=0, notice=lines.append)
    for update in range(25):
        r.collect(2, update=update, version=0)
        assert len(lines) == (update + 1 >= rollouts)
    assert hint in lines[0]
