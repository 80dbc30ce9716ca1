"""One policy for several tasks through whole runs: placements, resume, evaluation, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.evaluation import checkpoint_evaluation
from embodied_ppo.options.schema import EvaluateConfig
from tests.integration.test_resume import check_resume

TASKS = ["Reacher-v4", "Swimmer-v4"]
BASE = run_helpers.options("""env.id=[Reacher-v4,Swimmer-v4] env.num_envs=12
    env.task_weights=[2,1] env.max_episode_steps=9 algorithm.horizon=8
    algorithm.global_batch_size=32 algorithm.popart=0.3 evaluation.episodes=5
    evaluation.num_envs=3 evaluation.video_episodes=0 compile=never updates=4 save_every=2""")


def train(run_dir: Path, **options: Any) -> Path:
    run_helpers.train(run_dir, {**BASE, **options})
    return run_dir


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("several") / "run")


def weights(run_dir: Path) -> dict[str, Any]:
    return run_helpers.stored(run_dir, 4).policy()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of episodes in the rows of metrics.jsonl."""
    rows = run_helpers.metric_rows(run_dir)
    return [{k: x for k, x in row.items() if k[:5] in ("rollo", "eval/")} for row in rows]


def evaluate(run_dir: Path, out: Path, **options: Any) -> dict[str, Any]:
    options = {"video": False, "episodes": 5, "out": str(out), **options}
    summary = checkpoint_evaluation.evaluate(EvaluateConfig(str(run_dir), **options), quiet=True)
    return summary | {"report": json.loads((out / "report.json").read_text())}


@pytest.mark.slow
def test_resumed_run_equals_an_uninterrupted_one(trained: Path, tmp_path) -> None:
    check_resume(trained, tmp_path / "half", at=2, updates=4)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"env.id": TASKS[::-1]}, r"leave out env.id .* the run to resume has \[Reacher-v4"),
        ({"env.id": TASKS[0], "env.task_weights": None}, "leave out env.id"),
        ({"env.tasks": TASKS[::-1]}, "leave out env.tasks"),
        ({"env.task_weights": [1, 2]}, "leave out env.task_weights"),
        (
            {"algorithm.popart": None},
            "those of Reacher-v4 with popart, Swimmer-v4 with popart, and .* those of the reward",
        ),
        (
            {"algorithm.popart": None, "algorithm.curiosity.weight": 1},
            "need those of group reward, group curiosity",
        ),
    ],
)
def test_resume_keeps_tasks_and_values(trained: Path, options: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        train(trained, resume="auto", updates=5, **options)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_slots")
def test_divided_environments_equal_one_process(trained: Path, tmp_path) -> None:
    """Two processes simulate 6 environments each, of which 4 and 2 have each task."""
    placement = {"cluster.component_placement": {"env": "0-1", "rollout": 2, "actor": 3}}
    divided = train(tmp_path / "run", **placement, **{"cluster.devices_per_node": 4})
    assert metrics(divided) == metrics(trained)
    for name, x in weights(trained).items():
        assert torch.equal(x, weights(divided)[name]), name


@pytest.mark.slow
@pytest.mark.usefixtures("eight_slots")
def test_two_learners_have_equal_statistics(tmp_path) -> None:
    """A minibatch is the whole rollout, so that it has the same samples."""
    whole = {"algorithm.global_batch_size": 96}
    local = weights(train(tmp_path / "local", **whole))
    two = {"placement": "fused", "cluster.devices_per_node": 2}
    run_helpers.assert_states_close(weights(train(tmp_path / "two", **two, **whole)), local)


@pytest.mark.slow
def test_trained_policy_continues_in_one_of_its_tasks(trained: Path, tmp_path) -> None:
    options = {"env.id": "Reacher-v4", "env.task_weights": None, "initial_policy": str(trained)}
    with pytest.raises(ConfigError, match=r"env.tasks=\[Reacher-v4,Swimmer-v4\]"):
        train(tmp_path / "run", **options)
    options["env.tasks"] = TASKS
    with pytest.raises(ConfigError, match=r"initial_policy=.* are those of Reacher-v4 with pop"):
        train(tmp_path / "run", **{**options, "algorithm.popart": None})
    assert "eval/return/Reacher-v4" in metrics(train(tmp_path / "run", **options))[-1]


@pytest.mark.slow
def test_exported_policy_reads_the_index(trained: Path, tmp_path, capsys) -> None:
    out = tmp_path / "bundle"
    run_helpers.run_command(capsys, "export", f"checkpoint={trained}", f"out={out}")
    info = json.loads((out / "policy.json").read_text())
    assert {"task": [2], "obs": [11]}.items() <= {
        x["name"]: x["shape"] for x in info["inputs"]
    }.items()


def test_metrics_of_each_task(trained: Path) -> None:
    row = metrics(trained)[-1]
    for kind in ("rollout", "eval"):
        assert {f"{kind}/return/{task}" for task in TASKS} <= row.keys()
    # Three episodes of the first task, two of the second one.
    parts = [row[f"eval/return/{task}"] for task in TASKS]
    assert row["eval/return"] == pytest.approx((3 * parts[0] + 2 * parts[1]) / 5)


def test_evaluation_of_all_tasks_and_of_single_ones(trained: Path, tmp_path) -> None:
    """An episode depends on its number alone, and a task has the same episodes if it is alone."""
    summary = evaluate(trained, tmp_path / "a")
    assert (
        summary["report"]["episodes"]
        == evaluate(trained, tmp_path / "b", num_envs=5)["report"]["episodes"]
    )
    assert set(summary["report"]["tasks"]) == set(TASKS)
    for task in TASKS:
        assert (
            summary["ci95"][f"eval/return/{task}"]
            == summary["report"]["tasks"][task]["return"]["ci95"]
        )
    first = {e["index"]: e for e in summary["report"]["episodes"]}[0]
    alone = evaluate(trained, tmp_path / "c", env={"id": TASKS[0]})["report"]["episodes"][0]
    assert alone["return"] == pytest.approx(first["return"]) and first["task"] == TASKS[0]


def test_evaluation_of_another_task_keeps_the_indices_of_the_tasks(trained: Path, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"remove env.tasks"):
        evaluate(trained, tmp_path / "r", env={"tasks": TASKS[::-1]})
    with pytest.raises(ConfigError, match=r"env.id = \[\]: list one or more tasks"):
        evaluate(trained, tmp_path / "r", env={"id": []})
    report = evaluate(trained, tmp_path / "r", env={"id": "Reacher-v5"})["report"]
    assert list(report["tasks"]) == ["Reacher-v5"] and len(report["episodes"]) == 5
