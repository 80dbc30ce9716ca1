"""Ranks that learn together: results do not depend on their number.

Ranks are threads that communicate by gloo.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest
import run_helpers
import torch
import torch.distributed as dist
from torch import Tensor, nn

from embodied_envs.base import tree
from embodied_envs.base.errors import TrainingError
from embodied_ppo.core.collectives import RankGroup, Ranks
from embodied_ppo.core.types import Mean, Metrics, Trajectory
from embodied_ppo.ppo.robot_actor import RobotActor
from tests.ppo import test_symmetry as symmetric
from tests.ppo.test_robot_actor import (
    EVERYTHING,
    N,
    T,
    disturb_reference,
    experience,
    make,
    weights,
)


def run_ranks(world: int, work: Any) -> list[Any]:
    """Run ``work(ranks)`` on every rank in threads; return the results in order."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        torch.set_num_threads(1)
        if world == 1:
            return work(Ranks())
        return work(RankGroup(dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=30))))

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def merged(metrics: list[Metrics]) -> dict[str, float]:
    """Merge metrics of ranks as the driver does: add up means; plain numbers must be equal."""
    results = {}
    for tag, first in metrics[0].items():
        values = [m[tag] for m in metrics]
        if isinstance(first, Mean):
            results[tag] = reduce(Mean.__add__, values).value  # pyright: ignore[reportArgumentType]
        else:
            assert all(v == first or math.isnan(first) for v in values), tag  # pyright: ignore[reportArgumentType]
            results[tag] = first
    return results


def learned(
    world: int,
    options: dict[str, Any],
    trajectory: Trajectory,
    make: Callable[..., Any] = make,
    **arguments: Any,
) -> tuple[list[Any], list[Any]]:
    """Return weights and metrics of every rank after two updates."""
    learners = []

    def work(ranks: Ranks) -> tuple[dict[str, Tensor], list[Metrics]]:
        learner = learners[ranks.rank]
        assert isinstance(learner.actor, RobotActor)
        learner.optimizer.ranks = learner.actor.ranks = ranks
        part = tree.map(lambda x: x.chunk(world, dim=1)[ranks.rank].contiguous(), trajectory)
        return weights(learner), [learner.update(part, update=update) for update in range(2)]

    for _ in range(world):
        learners.append(make(options, **arguments))
        if learners[-1].actor.reference is not None:
            disturb_reference(learners[-1])
    results = run_ranks(world, work)
    return [w for w, _ in results], [m for _, m in results]


FULL_BATCH: dict[str, Any] = {"global_batch_size": T * N, "update_epoch": 3, "lr": 1e-3}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": EVERYTHING,
    "column": {"minibatch_unit": "column", "loss_agg_func": "seq-mean-token-mean"},
    "groups": {"adv_type": "grpo", "group_size": 2, "normalize_advantages": False},
    "sequences": run_helpers.options("""minibatch_unit=column ratio_level=sequence
        policy_loss=cispo adv_type=dr_grpo group_size=2 normalize_advantages=false"""),
    "trajectories": {"loss_agg_func": "trajectory-mean", "bootstrap_type": "never"},
    "running": {"reward_norm": "running"},
    "whitened": {"reward_norm": "batch", "whiten_rewards": True},
    "kl in reward": {
        "use_kl_in_reward": True,
        "kl_penalty": "k2",
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.1, "horizon": 100, "target_kl": 0.01},
    },
    "adaptive": {"lr_schedule": "adaptive", "desired_kl": 1e-4, "entropy_target": 1.0},
    "corrected": {"off_policy_correction": "token", "off_policy_cap": 1.2},
    "warming": {"critic_warmup": 1},
    "micro": {"micro_batch_size": 8},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world", [2, 4])
def test_number_of_ranks_does_not_change_result(case: str, world: int) -> None:
    options = FULL_BATCH | CASES[case] | {"global_batch_size": T * N}
    assert_equal(world, options, experience(make(options), noise=0.2))


@pytest.mark.parametrize("symmetry", ["augment", "loss", "both"])
@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_ranks_mirror_their_columns(symmetry: str, recurrent: str | None) -> None:
    """The second update continues the memory of the images, which every rank has."""
    model = {} if recurrent is None else {"recurrent": recurrent, "recurrent_size": 4}
    columns = {"minibatch_unit": "column", "horizon": symmetric.T} if recurrent else {}
    size = symmetric.T * symmetric.N
    options = {**FULL_BATCH, "symmetry": symmetry, **columns, "global_batch_size": size}
    trajectory = symmetric.experience(symmetric.make(options, **model))
    assert_equal(2, options, trajectory, make=symmetric.make, **model)


def assert_equal(
    world: int, options: dict[str, Any], trajectory: Trajectory, **arguments: Any
) -> None:
    """Assert that ranks get the weights and metrics of one learner."""
    single, metrics_of_ranks = learned(1, options, trajectory, **arguments)
    weights_of_ranks, metrics = learned(world, options, trajectory, **arguments)
    for name, x in single[0].items():
        for other in weights_of_ranks:
            # the same on every rank, bit for bit
            assert torch.equal(other[name], weights_of_ranks[0][name]), name
        torch.testing.assert_close(weights_of_ranks[0][name], x, rtol=1e-5, atol=1e-6, msg=name)
    for update in range(2):
        one = merged([m[update] for m in metrics_of_ranks])
        many = merged([m[update] for m in metrics])
        assert one.keys() == many.keys()
        for tag, value in one.items():
            assert many[tag] == pytest.approx(value, rel=1e-4, abs=1e-6, nan_ok=True), tag


@pytest.mark.slow
def test_every_sample_is_used_once_per_epoch() -> None:
    options = {"global_batch_size": 16, "update_epoch": 2}
    trajectory = experience(make(options))
    _, metrics_of_ranks = learned(4, options, trajectory)
    assert merged([m[0] for m in metrics_of_ranks])["policy/epochs"] == 2.0
    counted = sum(m[0]["policy/approx_kl"].count for m in metrics_of_ranks) / len(metrics_of_ranks)  # pyright: ignore[reportAttributeAccessIssue]
    assert counted == 2 * int(trajectory.mask.sum())


def test_fully_masked_rank_takes_same_steps() -> None:
    trajectory = experience(make(FULL_BATCH))
    trajectory.mask[:, : N // 2] = False
    single, _ = learned(1, FULL_BATCH, trajectory)
    weights_of_ranks, _ = learned(2, FULL_BATCH, trajectory)
    for name, x in single[0].items():
        torch.testing.assert_close(weights_of_ranks[0][name], x, rtol=1e-5, atol=1e-6, msg=name)


def test_non_finite_reward_stops_every_rank() -> None:
    trajectory = experience(make(FULL_BATCH))
    trajectory.log_prob[0, 0] = math.nan
    trajectory.mask[0, 0] = True

    def work(ranks: Ranks) -> str:
        learner = learners[ranks.rank]
        assert isinstance(learner.actor, RobotActor)
        learner.optimizer.ranks = learner.actor.ranks = ranks
        part = tree.map(lambda x: x.chunk(2, dim=1)[ranks.rank].contiguous(), trajectory)
        with pytest.raises(TrainingError, match="not finite") as metrics_of_ranks:
            learner.update(part, update=0)
        return str(metrics_of_ranks.value)

    learners = [make(FULL_BATCH) for _ in range(2)]
    before = weights(learners[0])
    assert all("update 0" in text for text in run_ranks(2, work))
    for learner in learners:
        assert all(torch.equal(x, before[name]) for name, x in weights(learner).items())


def test_gradients_missing_on_some_ranks_are_summed() -> None:
    def work(ranks: Ranks) -> list[Tensor | None]:
        a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
        a.grad = torch.full((2,), 1.0 + ranks.rank)
        if ranks.rank == 1:
            b.grad = torch.ones(2)
        loss = ranks.all_reduce_gradients([a, b, c], torch.tensor(0.5 + ranks.rank))
        assert float(loss) == 2.0
        return [a.grad, b.grad, c.grad]

    for a, b, c in run_ranks(2, work):
        assert a.tolist() == [3.0, 3.0] and b.tolist() == [1.0, 1.0] and c is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_gathered_columns_round_trip(dtype: torch.dtype) -> None:
    all_columns = torch.arange(24).reshape(3, 4, 2).to(dtype)

    def work(ranks: Ranks) -> bool:
        local = ranks.local_columns(all_columns)
        return torch.equal(ranks.all_gather_columns(local), all_columns)

    assert run_ranks(1, work) == [True] and run_ranks(2, work) == [True, True]
