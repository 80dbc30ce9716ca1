"""Train a language model in every placement over real Ray: equal results, resuming, refusals."""

from __future__ import annotations

import collections
import itertools
import json
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.cluster.worker import WorkerSpec
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.options import loader, validation
from embodied_ppo.options.schema import Config
from embodied_ppo.ppo.critic import LocalCritic
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.programs import language, runs
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Messages
from tests.integration.test_placements import CachedRuns, assert_close, equal_tensors, rows
from tests.integration.test_resume import assert_same

pytestmark = pytest.mark.usefixtures("few_problems", "eight_slots")

SMALL: dict[str, Any] = run_helpers.tables(__file__)["small"]
KL: dict[str, Any] = {"algorithm.use_kl_loss": True, "algorithm.use_kl_in_reward": True}


def config(options: dict[str, Any]) -> Config:
    """Return checked options: ``SMALL`` as a file, ``options`` as on the command line."""
    loaded = loader.read(
        Config,
        [("configs/small", run_helpers.nested(SMALL)), ("test", run_helpers.nested(options))],
    )
    validation.check(loaded.config, explicit=loaded.deliberate({"test"}))
    return loaded.config


def train(run_dir: Path, command: Any = runs.train, **options: Any) -> list[dict[str, Any]]:
    """Train with ``SMALL``; ``__`` in the name of an option stands for a dot."""
    overrides = {name.replace("__", "."): value for name, value in options.items()}
    if {"placement", "cluster.component_placement"} & overrides.keys():
        overrides["cluster.step_timeout_s"] = 100.0  # a run that hangs fails with its stacks
    command(config({"run_dir": str(run_dir), **overrides}), quiet=True)
    return rows(run_dir)


def weights(run_dir: Path, update: int = 3) -> dict[str, torch.Tensor]:
    """Return the tensors of actor and critic of a checkpoint."""
    source = run_helpers.stored(run_dir, update)
    critic = source.training()["learner"]["critic_weights"] or {}
    return source.policy() | {f"critic {name}": x for name, x in critic.items()}


@pytest.fixture(scope="module")
def cached_run(tmp_path_factory) -> CachedRuns:
    return CachedRuns(train, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def local(cached_run: CachedRuns) -> Path:
    return cached_run(**KL)


EQUAL_TO_LOCAL: dict[str, dict[str, Any]] = {
    "fused": {"placement": "fused", "cluster__devices_per_node": 1},
    "colocated": {"placement": "colocated", "cluster__devices_per_node": 1},
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
def test_compile_option_applies_to_worker_processes(tmp_path) -> None:
    c = config({"compile": "always", "placement": "fused", "cluster.devices_per_node": 1})
    spec = RunSpec(c, torch.device("cpu"), tmp_path, 3)
    for compile, since in (("always", 0), ("auto", None)):
        worker, _ = language.build(
            replace(spec, config=replace(c, compile=compile)),
            WorkerSpec(("rollout", "actor", "critic", "reward"), {"rollout": (0, 1)}),
            None,
            Messages(print),
            ExitStack(),
        )
        assert isinstance(worker.learner, PPO) and isinstance(worker.learner.critic, LocalCritic)
        for optimizer in (worker.learner.optimizer, worker.learner.critic.optimizer):
            compiled = optimizer.compiled
            assert (compiled and compiled.schedule.first_compiled_update) == since
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
    for tag in run_helpers.words("""rollout/return advantage/std value/explained_variance
            rollout/epoch rollout/truncated"""):
        assert metrics[1][tag] == pytest.approx(expected[1][tag], rel=1e-5), tag


@pytest.mark.slow
def test_run_resumes_bit_for_bit_in_other_placements(
    local: Path, cached_run: CachedRuns, tmp_path
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


@pytest.mark.slow
def test_unfinished_responses_are_in_checkpoints(cached_run: CachedRuns, tmp_path) -> None:
    """Those of each process; another number of processes drops them with a line."""
    options = {"rollout__oversampling": 0.5, "algorithm__off_policy_correction": "token"}
    one, two = cached_run(**options), cached_run(**options, **TWO_LEARNERS["fused"])
    assert rows(cached_run(**options, **EQUAL_TO_LOCAL["disaggregated"])) == rows(one)
    assert 0 < rows(one)[-1]["rollout/version_lag"] < 1
    for run, placed in ((one, {}), (two, TWO_LEARNERS["fused"])):
        first = str(run / "checkpoints" / "step_000001")
        resumed = train(tmp_path / f"{len(placed)}", **options, **placed, resume=first)
        assert resumed[-1] == rows(run)[-1]
    assert "dropped" not in (tmp_path / "0" / "log.txt").read_text()
    train(tmp_path / "other", **options, resume=str(two / "checkpoints" / "step_000002"))
    line = "resume: rollout processes changed; unfinished responses are dropped"
    assert line in (tmp_path / "other" / "log.txt").read_text()


SHARDED: dict[str, dict[str, Any]] = {
    "fused": TWO_LEARNERS["fused"],
    "disaggregated": {"placement": "disaggregated", "cluster__devices_per_node": 4},
}


@pytest.mark.slow
def test_sharded_learners_equal_unsharded_ones(cached_run: CachedRuns, tmp_path) -> None:
    unsharded = cached_run(**KL, **TWO_LEARNERS["fused"])
    few_tokens = {"algorithm__micro_batch_tokens": 40}
    for name, options in SHARDED.items():
        run_dir = tmp_path / name
        metrics = train(run_dir, **KL, **few_tokens, **options, cluster__shard=True)
        assert_close(metrics, rows(unsharded))
        run_helpers.assert_states_close(weights(run_dir), weights(unsharded))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Any]:
    """Options of two files with weights 2 and 0.5, and of prompts that are right if even."""
    folder = tmp_path_factory.mktemp("files")
    synthetic_tasks.tokenizer().save_pretrained(folder / "tokenizer")
    for name, first in (("a", 10), ("b", 50)):
        answers = [{"prompt": f"{i}+0=", "answer": str(i)} for i in range(first, first + 10)]
        (folder / name).with_suffix(".jsonl").write_text("\n".join(map(json.dumps, answers)))
    grader = folder / "grade.py"
    grader.write_text(
        "def compute_score(solution_str, ground_truth, **_):\n"
        "    right = int(ground_truth) % 2 == 0\n"
        "    return {'score': len(solution_str) * right, 'acc': right}\n"
    )
    a, b = (str(folder / f"{name}.jsonl") for name in "ab")
    return {
        "data__task": None,
        "data__train": {a: 2.0, b: 0.5},
        "data__eval": [b],
        "actor__tokenizer": str(folder / "tokenizer"),
        "reward__grader": f"{grader}:compute_score",
        "rollout__dump": "all",
        "warm_start__steps": 0,
    }


def prompts(run_dir: Path, update: int) -> list[int]:
    """Return the index of the prompt of each response of an update."""
    parts = (run_dir / "generations").glob(f"train_{update:06d}*")
    lines = [line for part in sorted(parts) for line in part.read_text().splitlines()]
    return [json.loads(line)["prompt_index"] for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, "success"])
def test_prompts_of_several_rollouts_are_those_of_one(
    shuffle: bool | str, files: dict[str, Any], tmp_path
) -> None:
    """An epoch has about 25 rows, so that six updates of 16 reach the fourth one."""
    options = {**KL, **files, "data__shuffle": shuffle, "updates": 6, "keep_last": 6}
    runs: dict[str, dict[str, Any]] = {"one": {}, **TWO_LEARNERS}
    half = str(tmp_path / "fused" / "checkpoints" / "step_000003")
    runs["apart"] = {**runs["apart"], "resume": half}
    for name, placed in runs.items():
        train(tmp_path / name, **options, **placed)
    order = [prompts(tmp_path / "one", update) for update in range(1, 7)]
    assert [prompts(tmp_path / "fused", update) for update in range(1, 7)] == order
    assert [prompts(tmp_path / "apart", update) for update in range(4, 7)] == order[3:]
    states = [checkpoint.open_checkpoint(tmp_path / name).training()["rollout"] for name in runs]
    samplers = [x["sampler"] for state in states for x in state.get("processes", [state])]
    assert len(samplers) == 5
    for sampler in samplers[1:]:
        assert_same(sampler, samplers[0])
    # The first epoch has each row of the first file twice, and half of those of the second file.
    first = list(itertools.chain(*order))[: 2 * 10 + 3]
    assert max(collections.Counter(first).values()) == 2


@pytest.mark.slow
def test_clone_has_no_critic_in_any_placement(files: dict[str, Any], tmp_path) -> None:
    cloning = {"cloning__steps": 3, "cloning__batch_size": 4, "cloning__lr": 1e-2}
    options = {**KL, **files, **cloning, "rollout__dump": None}
    for name, placed in {"one": {}, "apart": TWO_LEARNERS["apart"]}.items():
        train(tmp_path / name, command=runs.clone, **options, **placed)
        state = checkpoint.open_checkpoint(tmp_path / name).training()["learner"]
        assert state["critic_weights"] is None and state["reference"] is None
        assert "critic" not in (tmp_path / name / "log.txt").read_text().replace(str(tmp_path), "")
    assert equal_tensors(weights(tmp_path / "apart", 0), weights(tmp_path / "one", 0))
    train(
        tmp_path / "ppo", **files, **TWO_LEARNERS["fused"], initial_policy=str(tmp_path / "apart")
    )
    assert any("critic" in name for name in weights(tmp_path / "ppo"))


@pytest.mark.slow
def test_grpo_with_graders_in_a_process_of_their_own(tmp_path) -> None:
    options: dict[str, Any] = {"algorithm__adv_type": "grpo", "algorithm__group_size": 2}
    expected = train(tmp_path / "local", **options)
    roles = {"rollout": 0, "reward": 1, "actor": 2}
    cluster = {"cluster__component_placement": roles, "cluster__devices_per_node": 3}
    assert train(tmp_path / "run", **options, **cluster) == expected
    assert equal_tensors(weights(tmp_path / "run"), weights(tmp_path / "local"))


@pytest.mark.slow
def test_groups_of_several_rollouts_are_those_of_one(files: dict[str, Any], tmp_path) -> None:
    """The first batch has the same mixed groups, in another order."""
    grader = tmp_path / "grade.py"
    grader.write_text(
        "def compute_score(solution_str, ground_truth, **_):\n"
        "    right = len(solution_str) % 2\n"
        "    return {'score': right, 'acc': right}\n"
    )
    options = {**files, "reward__grader": f"{grader}:compute_score", "updates": 2}
    options |= {"algorithm__adv_type": "grpo", "algorithm__group_size": 2}
    options |= {"algorithm__group_filter": "success", "algorithm__group_filter_rounds": 3}
    expected = train(tmp_path / "one", **options)
    metrics = train(tmp_path / "fused", **options, **TWO_LEARNERS["fused"])
    assert sorted(prompts(tmp_path / "fused", 1)) == sorted(prompts(tmp_path / "one", 1))
    assert expected[1]["rollout/groups_dropped"] > 0
    for tag in ("filter_rounds", "groups_dropped", "groups_missing", "epoch", "length"):
        name = f"rollout/{tag}"
        assert metrics[1][name] == pytest.approx(expected[1][name], rel=1e-6), tag


@pytest.mark.slow
@pytest.mark.parametrize("oversampling", [0.0, 0.5])
def test_max_lag_lets_rollouts_run_ahead(
    oversampling: float, files: dict[str, Any], tmp_path
) -> None:
    """A resumed run collects again what was not trained on: the next prompts are the same."""
    options = {"placement": "disaggregated", "cluster__devices_per_node": 4, "cluster__max_lag": 1}
    options |= {**files, "data__shuffle": "success", "algorithm__off_policy_correction": "token"}
    options |= {"rollout__oversampling": oversampling}
    metrics = train(tmp_path / "run", **options)
    first = tmp_path / "run" / "checkpoints" / "step_000001"
    train(tmp_path / "resumed", **options, resume=str(first))
    for update in (2, 3):
        assert prompts(tmp_path / "resumed", update) == prompts(tmp_path / "run", update)
    lags = [row["rollout/version_lag"] for row in metrics if "rollout/version_lag" in row]
    assert [math.floor(lag) for lag in lags] == [0, 1, 1] and (lags[-1] > 1) == (oversampling > 0)


def test_refused_options_leave_no_files(tmp_path) -> None:
    roles = {"rollout": 1, "reward,critic": 0, "actor": 2}
    shared = {"cluster__component_placement": roles, "cluster__devices_per_node": 3}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("rollout_batch_size", {"placement": "fused", "cluster__devices_per_node": 3}),
        ("reward and critic share device 0", {**shared, "cluster__max_lag": 1}),
    ]
    for message, options in cases:
        with pytest.raises((PlacementError, ConfigError), match=message):
            train(tmp_path / "run", **options)
        assert not (tmp_path / "run").exists()
