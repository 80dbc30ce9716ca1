"""Train a language model in every placement over real Ray: equal results, resuming, refusals."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_ppo import run
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.algorithms.separate_critic_learner import LocalCritic
from embodied_ppo.config import loader, validation
from embodied_ppo.config.schema import Config
from embodied_ppo.core.types import ConfigError, PlacementError
from embodied_ppo.modes.base import RunRequest
from embodied_ppo.modes.reasoning import workers as reasoning_workers
from embodied_ppo.placement.worker import WorkerSpec
from embodied_ppo.training import checkpoint
from tests.integration.test_placements import CachedRuns, assert_close, equal_tensors, rows

pytestmark = pytest.mark.usefixtures("few_problems", "eight_slots")

SMALL: dict[str, Any] = {
    "mode": "reasoning",
    "data.task": "arithmetic",
    "actor.model.architecture": {
        "model_type": "qwen2",
        "vocab_size": 24,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
    },
    "algorithm.loss_type": "actor",
    "algorithm.huber_delta": None,
    "algorithm.response_length": 4,
    "algorithm.rollout_batch_size": 16,
    "algorithm.global_batch_size": 8,
    "algorithm.missing_eos_penalty": 0.5,  # something to learn from the start
    "algorithm.lr": 1e-3,
    "algorithm.update_epoch": 2,
    "warm_start.steps": 3,
    "warm_start.batch_size": 8,
    "evaluation.episodes": 8,
    "updates": 3,
    "save_every": 1,
    "threads": 1,
}
KL: dict[str, Any] = {"algorithm.use_kl_loss": True, "algorithm.use_kl_in_reward": True}


def config(options: dict[str, Any]) -> Config:
    """Return checked options: ``SMALL`` as a file, ``options`` as on the command line."""
    loaded = loader.read(
        Config,
        [("configs/small", run_helpers.nested(SMALL)), ("test", run_helpers.nested(options))],
    )
    validation.check(loaded.config, explicit=loaded.deliberate({"test"}))
    return loaded.config


def train(run_dir: Path, **options: Any) -> list[dict[str, Any]]:
    """Train with ``SMALL``; ``__`` in the name of an option stands for a dot."""
    overrides = {name.replace("__", "."): value for name, value in options.items()}
    if {"placement", "cluster.component_placement"} & overrides.keys():
        overrides["cluster.step_timeout_s"] = 100.0  # a run that hangs fails with its stacks
    run.train(config({"run_dir": str(run_dir), **overrides}), quiet=True)
    return rows(run_dir)


def weights(run_dir: Path, update: int = 3) -> dict[str, torch.Tensor]:
    """Return the tensors of actor and critic of a checkpoint."""
    source = checkpoint.open_checkpoint(run_dir / "checkpoints" / f"step_{update:06d}")
    critic = source.training()["learner"]["critic_weights"] or {}
    return source.policy() | {f"critic {name}": x for name, x in critic.items()}


@pytest.fixture(scope="module")
def cached_run(tmp_path_factory: pytest.TempPathFactory) -> CachedRuns:
    return CachedRuns(train, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def local(cached_run: CachedRuns) -> Path:
    return cached_run(**KL)


EQUAL_TO_LOCAL: dict[str, dict[str, Any]] = {
    "fused": {"placement": "fused", "cluster__devices_per_node": 1},
    "colocated": {
        "placement": "colocated",
        "cluster__devices_per_node": 1,
        "cluster__check_weights": True,
    },
    "disaggregated": {"placement": "disaggregated", "cluster__devices_per_node": 2},
    "crossed": {
        "cluster__component_placement": {"rollout,critic": 0, "actor,reward": 1, "reference": 0},
        "cluster__devices_per_node": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL_TO_LOCAL)
def test_placements_with_one_learner_equal_one_process(
    name: str, local: Path, cached_run: CachedRuns
) -> None:
    placed = cached_run(**KL, **EQUAL_TO_LOCAL[name])
    assert rows(placed) == rows(local)
    assert equal_tensors(weights(placed), weights(local))
    assert rows(local)[-1]["value/loss"] > 0 and rows(local)[-1]["kl/to_reference"] > 0


@pytest.mark.slow
def test_compile_option_applies_to_worker_processes(tmp_path: Path) -> None:
    c = config({"compile": "always", "placement": "fused", "cluster.devices_per_node": 1})
    request = RunRequest(c, torch.device("cpu"), tmp_path, 3, "", {}, print, print, [])
    for compile, since in (("always", 0), ("auto", None)):
        worker_request = replace(request, config=replace(c, compile=compile))
        worker, _ = reasoning_workers.build_worker(
            worker_request,
            WorkerSpec(("rollout", "actor", "critic", "reward"), {"rollout": (0, 1)}),
            None,
            ExitStack(),
        )
        assert isinstance(worker.learner, Learner) and isinstance(
            worker.learner.critic, LocalCritic
        )
        schedules = [x.optimizer.compile_schedule for x in (worker.learner, worker.learner.critic)]
        assert [x.first_compiled_update for x in schedules] == [since] * 2
        worker.close()


TWO_LEARNERS: dict[str, dict[str, Any]] = {
    "fused": {"placement": "fused", "cluster__devices_per_node": 2},
    # Five processes: two critics beside the rollouts, one grader for two rollouts, and one
    # reference for two actors.
    "apart": {
        "cluster__component_placement": {
            "rollout,critic": "0-1",
            "reward,reference": 0,
            "actor": "2-3",
        },
        "cluster__devices_per_node": 4,
    },
}


@pytest.mark.slow
def test_placements_with_two_learners_equal_each_other(local: Path, cached_run: CachedRuns) -> None:
    fused, separate = (cached_run(**KL, **TWO_LEARNERS[name]) for name in ("fused", "apart"))
    metrics, expected = rows(fused), rows(local)
    assert rows(separate) == metrics
    assert equal_tensors(weights(separate), weights(fused))
    # Noise does not depend on the process that draws it.
    assert [row["tokens"] for row in metrics[:2]] == [row["tokens"] for row in expected[:2]]
    for tag in (
        "rollout/return",
        "advantage/std",
        "value/explained_variance",
        "rollout/epoch",
        "rollout/truncated",
    ):
        assert metrics[1][tag] == pytest.approx(expected[1][tag], rel=1e-5), tag


@pytest.mark.slow
def test_run_resumes_bit_for_bit_in_other_placements(
    local: Path, cached_run: CachedRuns, tmp_path: Path
) -> None:
    half = cached_run(**KL, **EQUAL_TO_LOCAL["colocated"]) / "checkpoints" / "step_000002"
    train(tmp_path / "one", **KL, **EQUAL_TO_LOCAL["disaggregated"], resume=str(half))
    assert equal_tensors(weights(tmp_path / "one"), weights(local))
    first = cached_run(**KL, **TWO_LEARNERS["apart"]) / "checkpoints" / "step_000001"
    resumed = train(tmp_path / "two", **KL, **TWO_LEARNERS["fused"], resume=str(first))
    assert resumed[-1] == rows(cached_run(**KL, **TWO_LEARNERS["fused"]))[-1]
    # In one process the order of the data continues.
    train(tmp_path / "two", **KL, resume=str(tmp_path / "two"), updates=4)
    assert "episodes start again" not in (tmp_path / "two" / "log.txt").read_text()


SHARDED: dict[str, dict[str, Any]] = {
    "fused": TWO_LEARNERS["fused"],
    "disaggregated": {
        "placement": "disaggregated",
        "cluster__devices_per_node": 4,
        "cluster__check_weights": True,
    },
}


@pytest.mark.slow
def test_sharded_learners_equal_unsharded_ones(cached_run: CachedRuns, tmp_path: Path) -> None:
    unsharded = cached_run(**KL, **TWO_LEARNERS["fused"])
    few_tokens = {"algorithm__micro_batch_tokens": 40}
    for name, options in SHARDED.items():
        run_dir = tmp_path / name
        metrics = train(run_dir, **KL, **few_tokens, **options, cluster__shard=True)
        assert_close(metrics, rows(unsharded))
        run_helpers.assert_states_close(weights(run_dir), weights(unsharded))
        assert "cluster.shard: 2 processes of actor hold" in (run_dir / "log.txt").read_text()


@pytest.mark.slow
def test_grpo_with_reward_model_initialized_from_the_actor(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "algorithm__adv_type": "grpo",
        "algorithm__group_size": 2,
        "critic__use_critic_model": False,
        "reward__model__pairs": 20,
        "reward__model__steps": 2,
        "reward__model__batch_size": 4,
    }
    expected = train(tmp_path / "local", **options)
    roles = {"rollout": 0, "reward": 1, "actor": 2}
    cluster = {"cluster__component_placement": roles, "cluster__devices_per_node": 3}
    assert train(tmp_path / "run", **options, **cluster) == expected
    assert equal_tensors(weights(tmp_path / "run"), weights(tmp_path / "local"))


@pytest.mark.slow
def test_max_lag_lets_rollouts_run_ahead(tmp_path: Path) -> None:
    options = {"placement": "disaggregated", "cluster__devices_per_node": 2, "cluster__max_lag": 1}
    metrics = train(tmp_path / "run", **options, algorithm__off_policy_correction="token")
    lags = [row["rollout/version_lag"] for row in metrics if "rollout/version_lag" in row]
    assert lags == [0.0, 1.0, 1.0]


def placed(devices: int, roles: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"cluster__component_placement": roles, "cluster__devices_per_node": devices, **options}


FUSED = {"placement": "fused"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("sets the simulators apart", {"placement": "hybrid"}),
    ("cluster.stages = 2: is for simulators", {**FUSED, "cluster__stages": 2}),
    (
        "this run has no reference; leave it out",
        placed(1, {"rollout,actor,critic,reward,reference": 0}),
    ),
    (
        (
            "3 processes of rollout and 2 of actor: one must divide the other; write processes: 2"
            " for rollout"
        ),
        placed(5, {"rollout,reward": "0-2", "actor,critic": "3-4"}),
    ),
    (
        (
            "1 processes of critic and 2 of actor: each actor has its own critic; write processes:"
            " 2 for critic"
        ),
        placed(4, {"rollout,reward": 0, "actor": "1-2", "critic": 3}),
    ),
    (
        (
            "2 processes of reward cannot be divided evenly over 1 of rollout; write processes: 1"
            " for reward"
        ),
        placed(4, {"rollout": 0, "reward": "1-2", "actor,critic": 3}),
    ),
    (
        "rollout_batch_size = 16: cannot be divided evenly over 3 processes of rollout",
        {**FUSED, "cluster__devices_per_node": 3},
    ),
    (
        (
            "global_batch_size = 2: 2 responses cannot be divided evenly over 4 processes of"
            " actor; write algorithm.global_batch_size=4"
        ),
        {**FUSED, "cluster__devices_per_node": 4, "algorithm__global_batch_size": 2},
    ),
    (
        "cluster.shard = true: critic is in processes of its own; join them, as 'actor,critic'",
        {"placement": "colocated", "cluster__devices_per_node": 2, "cluster__shard": True},
    ),
    (
        (
            "cluster.shard = true: actor and critic gather their layers one after another; write"
            " critic.concurrent=false"
        ),
        {**TWO_LEARNERS["fused"], "cluster__shard": True, "critic__concurrent": True},
    ),
    (
        "cluster.shard = true: the full KL divergence reads policy and reference at once; use k3",
        {
            **TWO_LEARNERS["fused"],
            "cluster__shard": True,
            "algorithm__use_kl_loss": True,
            "algorithm__kl_loss_type": "full",
        },
    ),
    (
        "reward and critic share device 0",
        placed(3, {"rollout": 1, "reward,critic": 0, "actor": 2}, cluster__max_lag=1),
    ),
    (
        "the full KL divergence needs the reference's logits",
        placed(
            3,
            {"rollout,reward": 0, "reference": 1, "actor,critic": 2},
            algorithm__use_kl_loss=True,
            algorithm__kl_loss_type="full",
        ),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("message", [message for message, _ in REFUSED])
def test_refused_options_leave_no_files(message: str, tmp_path: Path) -> None:
    with pytest.raises((PlacementError, ConfigError)) as error:
        train(tmp_path / "run", **dict(REFUSED)[message])
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()
