"""A language model through every placement, over real Ray: equal bit for bit, resumed exactly,
refused with reasons.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_ppo import run as build
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.algorithms.separate_critic_learner import LocalCritic
from embodied_ppo.config import loader, validation
from embodied_ppo.config.schema import Config
from embodied_ppo.core.types import ConfigError, PlacementError
from embodied_ppo.modes.base import RunRequest
from embodied_ppo.modes.reasoning import workers as reasoning_workers
from embodied_ppo.placement.worker import WorkerSpec
from embodied_ppo.training import checkpoint
from tests.integration.test_placements import Once, assert_close, rows

pytestmark = pytest.mark.usefixtures("eight_slots")

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
    "warm_start.steps": 3,
    "warm_start.batch_size": 8,
    "evaluation.episodes": 8,
    "updates": 3,
    "save_every": 1,
    "threads": 1,
}
KL: dict[str, Any] = {"algorithm.use_kl_loss": True, "algorithm.use_kl_in_reward": True}


def config(options: dict[str, Any]) -> Config:
    """``SMALL`` as a file that ships, ``options`` as flags, checked as the command checks."""
    loaded = loader.read(
        Config,
        [("configs/small", run_helpers.nested(SMALL)), ("test", run_helpers.nested(options))],
    )
    validation.check(loaded.config, explicit=loaded.deliberate({"test"}))
    return loaded.config


def train(run_dir: Path, **options: Any) -> list[dict[str, Any]]:
    given = {name.replace("__", "."): value for name, value in options.items()}
    if {"placement", "cluster.component_placement"} & given.keys():
        given["cluster.step_timeout_s"] = 100.0  # should it hang, it says so
    build.train(config({"run_dir": str(run_dir), **given}), quiet=True)
    return rows(run_dir)


def weights(run_dir: Path, update: int = 3) -> dict[str, torch.Tensor]:
    source = checkpoint.open_checkpoint(run_dir / "checkpoints" / f"step_{update:06d}")
    critic = source.training()["learner"]["critic_weights"] or {}
    return source.policy() | {f"critic {name}": x for name, x in critic.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(x, other[name]) for name, x in one.items()
    )


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    return Once(train, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def local(once: Once) -> Path:
    return once(**KL)


ALIKE: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("name", ALIKE)
def test_a_process_for_each_role_trains_as_one_process_does(
    name: str, local: Path, once: Once
) -> None:
    placed = once(**KL, **ALIKE[name])
    assert rows(placed) == rows(local)
    assert same(weights(placed), weights(local))
    assert rows(local)[-1]["value/loss"] > 0 and rows(local)[-1]["kl/to_reference"] > 0


def test_what_is_to_be_compiled_is_so_in_processes_too(tmp_path: Path) -> None:
    asked = config({"compile": "always", "placement": "fused", "cluster.devices_per_node": 1})
    request = RunRequest(asked, torch.device("cpu"), tmp_path, 3, "", {}, print, print, [])
    for compile, since in (("always", 0), ("auto", None)):
        s = replace(request, config=replace(asked, compile=compile))
        made, _ = reasoning_workers.build_worker(
            s,
            WorkerSpec(("rollout", "actor", "critic", "reward"), {"rollout": (0, 1)}),
            None,
            ExitStack(),
        )
        assert isinstance(made.learner, Learner) and isinstance(made.learner.critic, LocalCritic)
        schedules = [x.optimizer.compile_schedule for x in (made.learner, made.learner.critic)]
        assert [x.since for x in schedules] == [since] * 2
        made.close()


TWICE: dict[str, dict[str, Any]] = {
    "fused": {"placement": "fused", "cluster__devices_per_node": 2},
    "apart": {
        "cluster__component_placement": {
            "rollout": "0-1",
            "reward": 0,
            "reference": 1,
            "actor": "2-3",
            "critic": "4-5",
        },
        "cluster__devices_per_node": 6,
    },
}


def test_two_processes_for_each_role_train_alike_wherever_they_are(local: Path, once: Once) -> None:
    runs = {name: once(**KL, **options) for name, options in TWICE.items()}
    found = {name: rows(run) for name, run in runs.items()}
    for name, told in found.items():
        assert told == found["fused"], name
        assert same(weights(runs[name]), weights(runs["fused"]))
    alone = rows(local)
    assert [row["tokens"] for row in found["fused"]][:2] == [row["tokens"] for row in alone][
        :2
    ]  # the same noise
    for tag in (
        "rollout/return",
        "advantage/std",
        "value/explained_variance",
        "rollout/epoch",
        "rollout/truncated",
    ):
        assert found["fused"][1][tag] == pytest.approx(alone[1][tag], rel=1e-5), tag


def test_a_run_resumes_bit_for_bit_also_in_another_placement(
    local: Path, once: Once, tmp_path: Path
) -> None:
    half = once(**KL, **ALIKE["colocated"]) / "checkpoints" / "step_000002"
    train(tmp_path / "one", **KL, **ALIKE["disaggregated"], resume=str(half))
    assert same(weights(tmp_path / "one"), weights(local))
    first = once(**KL, **TWICE["apart"]) / "checkpoints" / "step_000001"
    resumed = train(tmp_path / "two", **KL, **TWICE["fused"], resume=str(first))
    assert resumed[-1] == rows(once(**KL, **TWICE["fused"]))[-1]
    train(
        tmp_path / "two", **KL, resume=str(tmp_path / "two"), updates=4
    )  # in one process: the data go on
    assert "episodes begin anew" not in (tmp_path / "two" / "log.txt").read_text()


IN_PARTS: dict[str, dict[str, Any]] = {
    "fused": TWICE["fused"],
    "disaggregated": {
        "placement": "disaggregated",
        "cluster__devices_per_node": 4,
        "cluster__check_weights": True,
    },
}


def test_learners_that_hold_parts_learn_what_whole_ones_do(once: Once, tmp_path: Path) -> None:
    whole, few = once(**KL, **TWICE["fused"]), {"algorithm__micro_batch_tokens": 40}
    for name, options in IN_PARTS.items():
        assert_close(
            train(tmp_path / name, **KL, **few, **options, cluster__shard=True), rows(whole)
        )
        run_helpers.assert_states_close(weights(tmp_path / name), weights(whole))
        assert (
            "cluster.shard: 2 processes of actor hold" in (tmp_path / name / "log.txt").read_text()
        )


def test_without_a_critic_and_with_a_reward_model_that_begins_as_the_actor(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "algorithm__adv_type": "grpo",
        "algorithm__group_size": 2,
        "critic__use_critic_model": False,
        "reward__model__pairs": 20,
        "reward__model__steps": 2,
        "reward__model__batch_size": 4,
    }
    told = train(tmp_path / "local", **options)
    where = {"rollout": 0, "reward": 1, "actor": 2}
    there = {"cluster__component_placement": where, "cluster__devices_per_node": 3}
    assert train(tmp_path / "run", **options, **there) == told
    assert same(weights(tmp_path / "run"), weights(tmp_path / "local"))


def test_rollouts_run_ahead_where_they_may(tmp_path: Path) -> None:
    options = {"placement": "disaggregated", "cluster__devices_per_node": 2, "cluster__max_lag": 1}
    told = train(tmp_path / "run", **options, algorithm__off_policy_correction="token")
    assert [row["rollout/version_lag"] for row in told if "rollout/version_lag" in row] == [
        0.0,
        1.0,
        1.0,
    ]


def placed(devices: int, where: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"cluster__component_placement": where, "cluster__devices_per_node": devices, **more}


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
        {**TWICE["fused"], "cluster__shard": True, "critic__concurrent": True},
    ),
    (
        "cluster.shard = true: the full KL divergence reads policy and reference at once; use k3",
        {
            **TWICE["fused"],
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


@pytest.mark.parametrize("words", [words for words, _ in REFUSED])
def test_what_is_refused_leaves_nothing_behind(words: str, tmp_path: Path) -> None:
    with pytest.raises((PlacementError, ConfigError)) as told:
        train(tmp_path / "run", **dict(REFUSED)[words])
    assert words in str(told.value)
    assert not (tmp_path / "run").exists()
