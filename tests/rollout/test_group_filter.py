"""Group filtering: which groups stay, rounds, surplus, cost, state; in both modes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import run_helpers
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.base.random import env_seeds
from embodied_ppo.core import compile
from embodied_ppo.core.types import Trajectory
from embodied_ppo.data.prompts import Sampler
from embodied_ppo.policies import robot_policy
from embodied_ppo.programs import robot
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.group_filter import GroupFilter, join_passes, mask_groups, mixed_groups
from embodied_ppo.rollout.rewards.graders import Grade
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training.logging import numbers
from tests.ppo.test_robot_actor_ranks import run_ranks
from tests.rollout.test_language_rollout import ANSWERS, FixedGraders, ScriptedGenerator
from tests.rollout.test_language_rollout import rollout as language_rollout

YES, NO = True, False
POINT = run_helpers.options("""env.id=toy_envs:toy_envs/Point-v0 env.num_threads=0 env.num_envs=8
    env.restart_each_rollout=true algorithm.adv_type=grpo algorithm.group_size=2 algorithm.horizon=8
    algorithm.global_batch_size=32 algorithm.group_filter=success updates=3""")


def trajectory(first: int, columns: int, rows: int = 2) -> Trajectory:
    """Return rows [T, N] whose reward is 10 * (number of the column) + (number of the row)."""
    number = 10.0 * torch.arange(first, first + columns) + torch.arange(rows).unsqueeze(1)
    fields = dict.fromkeys(("action", "log_prob", "value", "next_value"), number)
    fields |= {"version": torch.full(number.shape, first)}
    return run_helpers.trajectory(number, obs={"x": number.unsqueeze(-1)}, **fields)


def flags(*values: bool) -> Tensor:
    return torch.tensor(values)


# --------------------------------------------------------------------------------------- the filter
def test_a_mixed_group_has_a_success_and_a_failure() -> None:
    success = flags(YES, YES, YES, NO, NO, NO, NO, YES)
    assert mixed_groups(success, torch.ones(8).bool(), 2).tolist() == [NO, YES, NO, YES]
    assert mixed_groups(success, torch.ones(8).bool(), 4).tolist() == [YES, YES]
    # A member outside the objective does not count: only the failure of the last group is left.
    counted = flags(YES, YES, YES, YES, YES, YES, YES, NO)
    assert mixed_groups(success, counted, 2).tolist() == [NO, YES, NO, NO]


def test_rounds_fill_the_batch_and_the_surplus_begins_the_next_one() -> None:
    f = GroupFilter(groups=2, group_size=2, rounds=5)
    assert f.missing == 2
    f.add(trajectory(0, 4), flags(YES, YES, YES, NO), cost=100)  # columns 2 and 3
    assert f.missing == 1
    f.add(trajectory(4, 4), flags(NO, YES, NO, YES), cost=100)  # 4 to 7; 6 and 7 are too many
    assert f.missing == 0
    batch, metrics = f.take()
    assert batch.reward.tolist() == [[20, 30, 40, 50], [21, 31, 41, 51]]
    assert batch.obs["x"].shape == (2, 4, 1) and batch.mask.all()  # pyright: ignore
    assert numbers(metrics) == {
        "rollout/filter_rounds": 2,
        "rollout/groups_dropped": 1,
        "rollout/groups_missing": 0,
    }
    assert batch.collected is not None and int(batch.collected.sum()) == 200
    # The surplus survives a checkpoint, and is a version older than the next groups.
    restored = GroupFilter(2, 2, 5)
    restored.load_state(f.state(), torch.device("cpu"))
    for x in (f, restored):
        assert x.missing == 1
        x.add(trajectory(8, 2), flags(YES, NO), cost=50)
        batch, metrics = x.take()
        assert batch.reward[0].tolist() == [60, 70, 80, 90]
        assert batch.version[0].tolist() == [4, 4, 8, 8]
        assert numbers(metrics)["rollout/filter_rounds"] == 1
        assert x.state() is None
        assert x.missing == 2
        assert batch.collected is not None and int(batch.collected.sum()) == 50


def test_after_the_last_round_masked_groups_fill_the_batch() -> None:
    f = GroupFilter(groups=3, group_size=2, rounds=2)
    f.add(trajectory(0, 4), flags(NO, NO, YES, NO), cost=1)
    f.add(trajectory(4, 4), flags(NO, NO, YES, YES), cost=1)
    assert f.missing == 0
    batch, metrics = f.take()
    assert batch.reward[0, :2].tolist() == [20, 30] and batch.reward.shape == (2, 6)
    assert batch.mask[0].tolist() == [YES, YES, NO, NO, NO, NO]
    assert metrics["rollout/groups_dropped"] == 3 and metrics["rollout/groups_missing"] == 2
    f.add(trajectory(0, 4), flags(NO, NO, NO, NO), cost=1)
    f.add(trajectory(0, 2), flags(NO, NO), cost=1)  # fewer columns than the batch lacks
    batch, metrics = f.take()
    assert batch.mask.shape == (2, 6) and not batch.mask.any()


def test_one_round_masks_groups_where_they_are() -> None:
    t, metrics = mask_groups(trajectory(0, 6), flags(YES, YES, YES, NO, NO, NO), 2)
    assert t.mask.tolist() == [[NO, NO, YES, YES, NO, NO]] * 2
    assert torch.equal(t.reward, trajectory(0, 6).reward)
    assert numbers(metrics)["rollout/groups_dropped"] == 2
    chunks = replace(t, mask=torch.ones(2, 6, 3).bool())  # each action of a chunk has a mask
    t, _ = mask_groups(chunks, flags(YES, YES, YES, NO, NO, NO), 2)
    assert t.mask[1, :, 2].tolist() == [NO, NO, YES, YES, NO, NO]


def test_passes_keep_the_groups_of_an_environment_together() -> None:
    # Columns 0 to 3 of two passes, groups of 2: both passes of environments 0 and 1 come first.
    joined, metrics = join_passes(
        [(trajectory(0, 4), {"x": 1.0}), (trajectory(4, 4), {"x": 2.0})], 2
    )
    assert metrics == {"x": 3.0}
    assert joined.reward[1].tolist() == [1, 11, 41, 51, 21, 31, 61, 71]
    assert isinstance(joined.obs, dict) and joined.obs["x"].shape == (2, 8, 1)


# ------------------------------------------------------------------------------------------- robots
def point_rollout(stack: ExitStack, **options: Any) -> Rollout:
    c = run_helpers.tiny_config({**POINT, **options})
    env = environments.make_env(env_seeds(0, 0, 8, 2), config=c.env, device=torch.device("cpu"))
    stack.callback(env.close)
    torch.manual_seed(0)
    policy = robot_policy.make_policy(c, env)
    return robot.make_rollout(c, env, policy, compile.CompileSchedule(None))


def test_robots_train_on_groups_of_unequal_success() -> None:
    with ExitStack() as stack:
        x, again = point_rollout(stack), point_rollout(stack)
        rounds = 0
        for update in range(3):
            t, metrics = x.collect(8, update=update, version=update)
            own = numbers(metrics)
            # An episode ends at success, so that a column that succeeded has a terminated row.
            success = (t.terminated & t.mask).any(0).view(4, 2)
            assert t.mask.shape == (8, 8) and own["rollout/groups_missing"] == 0
            assert (success.any(1) & ~success.all(1)).all()
            assert isinstance(t.obs, Tensor)
            starts = t.obs[0].view(4, 2, -1)
            assert torch.equal(starts[:, 0], starts[:, 1]) and len(starts[:, 0].unique(dim=0)) == 4
            assert t.collected is not None
            assert int(t.collected.sum()) == own["rollout/filter_rounds"] * 8 * 8
            assert own["rollout/groups_dropped"] > 0
            rounds += int(own["rollout/filter_rounds"])
            # A resumed rollout continues bit for bit.
            if update == 1:
                again.load_state(x.state())
            if update == 2:
                other, _ = again.collect(8, update=2, version=2)
                assert all(map(torch.equal, tree.leaves(t), tree.leaves(other)))
        assert rounds > 3
        # No info has success where nothing succeeds, which is known from an earlier rollout.
        late = {"env.kwargs": {"far": 9.0, "late": True}, "algorithm.group_filter_rounds": 1}
        x = point_rollout(stack, **late)
        x.episodes.has_success = True
        assert x.collect(8, update=0, version=0)[1]["rollout/groups_dropped"] == 4


def test_passes_are_new_episodes_and_one_round_masks_groups() -> None:
    with ExitStack() as stack:
        unfiltered, passes = {"algorithm.group_filter": None}, {"algorithm.rollout_epoch": 3}
        plain, x = point_rollout(stack, **unfiltered), point_rollout(stack, **unfiltered, **passes)
        filtered = point_rollout(stack, **passes)
        one = point_rollout(stack, **passes, **{"algorithm.group_filter_rounds": 1})
        for update in range(2):
            first, _ = plain.collect(8, update=update, version=update)
            t, metrics = x.collect(8, update=update, version=update)
            assert t.mask.shape == (8, 24)
            assert isinstance(first.obs, Tensor) and isinstance(t.obs, Tensor)
            # Group k of pass p is group 3 k + p; the first pass is that of one pass alone.
            by_pass = t.obs.unflatten(1, (4, 3, 2))
            assert torch.equal(by_pass[:, :, 0].flatten(1, 2), first.obs)
            starts = by_pass[0].flatten(0, 1)
            assert torch.equal(starts[:, 0], starts[:, 1])
            assert len(starts[:, 0].unique(dim=0)) == 12, "every group has a start of its own"
            # The metrics are those of all episodes.
            ended = int(((t.terminated | t.truncated) & t.mask).sum())
            assert numbers(metrics)["rollout/episodes"] == ended > 0
            success = (t.terminated & t.mask).any(0).float()
            # One round has the same columns and masks the groups that are not mixed.
            masked, own = one.collect(8, update=update, version=update)
            mixed = success.view(12, 2).sum(1) == 1
            assert torch.equal(masked.mask, t.mask & mixed.repeat_interleave(2))
            assert all(map(torch.equal, tree.leaves(masked.obs), tree.leaves(t.obs)))
            assert numbers(own)["rollout/groups_dropped"] == int((~mixed).sum()) > 0
            batch, own = filtered.collect(8, update=update, version=update)
            assert batch.mask.shape == (8, 24) and numbers(own)["rollout/filter_rounds"] > 3


def test_env_steps_of_a_run_include_dropped_groups(tmp_path) -> None:
    run_helpers.train(tmp_path, {**POINT, "evaluation.episodes": 2})
    steps = 0
    for row in run_helpers.metric_rows(tmp_path):
        if "rollout/filter_rounds" in row:
            steps += int(row["rollout/filter_rounds"]) * 8 * 8
            assert row["env_steps"] == steps
    assert steps > 3 * 8 * 8


# ---------------------------------------------------------------------------------- language models
def test_prompts_are_drawn_until_the_batch_is_full() -> None:
    generator = ScriptedGenerator(ANSWERS, 4)
    x = language_rollout(group_size=2, batch=2, generator=generator, filter_rounds=3)
    # Round 1: two prompts, both right; round 2: one of two mixed; round 3: the one that lacks.
    right = [YES, YES, YES, YES, NO, NO, YES, NO, NO, YES]
    x.graders = FixedGraders([Grade(1.0 + i, correct=x) for i, x in enumerate(right)])
    t, metrics = x.collect(4, update=0, version=5)
    drawn = Sampler(4, 2, 3)
    order = [*drawn.next(), *drawn.next(), *drawn.next(1)]
    kept = [x.prompts[i].ids for i in (order[3], order[4])]
    assert isinstance(t.obs, dict)
    rows = t.obs["row"].T.tolist()  # [N, L]
    assert t.mask.shape == (4, 4)
    for i, ids in enumerate((kept[0], kept[0], kept[1], kept[1])):
        assert rows[i][: len(ids)] == list(ids)
    # No two responses of an update have the same random numbers.
    numbers_of_samples = torch.cat([samples for _, _, samples in generator.calls])
    assert numbers_of_samples.tolist() == list(range(10)) and len(generator.calls) == 3
    assert len({seed for _, seed, _ in generator.calls}) == 1
    lengths = [len(ANSWERS[i % 4]) for n in (4, 4, 2) for i in range(n)]
    assert t.collected is not None and int(t.collected.sum()) == sum(lengths)
    own = numbers(metrics)
    assert own["rollout/filter_rounds"] == 3 and own["rollout/groups_dropped"] == 3
    assert own["rollout/success"] == 6 / 10 and own["rollout/epoch"] == 5 / 4


def test_several_processes_collect_the_groups_of_one() -> None:
    """Each fills its share of the batch, and has the rounds of the others without a prompt."""

    class Generator(ScriptedGenerator):
        def generate(self, prompts: Any, sampling: Any, *, samples: Any, **options: Any) -> Any:
            self.answers = [ANSWERS[int(i) * 5 % 7 % 4] for i in samples]
            return super().generate(prompts, sampling, samples=samples, **options)

    class LengthGraders(FixedGraders):
        def grade(self, samples: Any, prompts: Any) -> list[Grade]:
            texts = [text for _, text, _, _ in samples]
            right = [len(x) >= len(p.ids) for x, p in zip(texts, prompts, strict=True)]
            return [Grade(len(x), correct=y) for x, y in zip(texts, right, strict=True)]

    def work(ranks: Any) -> tuple[list[Any], list[Any], Any, int]:
        x = language_rollout(
            group_size=2,
            batch=4,
            generator=Generator(ANSWERS, 4),
            graders=LengthGraders(),
            filter_rounds=4,
            shuffle="success",
            ranks=ranks,
        )
        columns, metrics = [], []
        for update in range(3):
            t, own = x.collect(4, update=update, version=update)
            assert t.mask.shape == (4, 8 // ranks.world) and isinstance(t.obs, dict)
            kept = t.mask.any(0)
            rows = torch.cat((t.obs["row"], t.action, t.mask * t.reward), dim=0).T[kept]
            columns += [[update, *row] for row in rows.tolist()]
            tags = ("filter_rounds", "epoch")
            metrics.append([numbers(own)[f"rollout/{tag}"] for tag in tags])
        return columns, metrics, x.state(), len(x.generator.calls)

    ((columns, metrics, state, calls),) = run_ranks(1, work)
    first, second = run_ranks(2, work)
    assert sorted(first[0] + second[0]) == sorted(columns) and len(columns) > 16
    assert first[1] == second[1] == metrics
    for part in (first, second):
        torch.testing.assert_close(part[2], state, rtol=0, atol=0)
    assert first[3] != second[3] and max(first[3], second[3]) == calls
