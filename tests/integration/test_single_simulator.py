"""Tests of simulators that can exist once in a process, and of runs without evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import single_simulators
import torch

import embodied_ppo as ep
from embodied_envs.base.errors import ConfigError, TrainingError
from embodied_ppo.tools.deploy import policy_export
from embodied_ppo.training.local_system import LocalSystem

IDS = ["single_simulators:single/Once-v0", "single_simulators:cart"]
OPTIONS: dict[str, Any] = run_helpers.options(
    "env.num_envs=4 env.max_episode_steps=null algorithm.horizon=16 algorithm.global_batch_size=32"
    " algorithm.update_epoch=2 updates=5 eval_every=2 save_every=1 keep_last=9"
    " evaluation.env=training evaluation.episodes=6 compile=never device=cpu trackers=[]"
)


@pytest.fixture(autouse=True)
def new_process(monkeypatch) -> None:
    """Let the test count from the first simulator of a process."""
    monkeypatch.setattr(single_simulators.Once, "built", [])


def train(run_dir: Path, id: str, **options: Any) -> ep.Run:
    single_simulators.Once.built.clear()
    values = {**OPTIONS, "env.id": id, "run_dir": run_dir}
    values |= {name.replace("__", "."): value for name, value in options.items()}
    given = {name.replace(".", "__"): x for name, x in values.items() if x is not None}
    return ep.train(progress=False, **given)


def weights(run: ep.Run, update: int) -> dict[str, torch.Tensor]:
    return torch.load(run.run_dir / f"checkpoints/step_{update:06d}/policy.pt", weights_only=True)


@pytest.mark.parametrize("id", IDS)
def test_the_training_builds_one_simulator_and_closes_it(id: str, tmp_path) -> None:
    run = train(tmp_path / "run", id)
    assert single_simulators.Once.built == ["closed"]
    assert [row["update"] for row in run.metrics if "eval/return" in row] == [0, 2, 4, 5]
    report = json.loads((run.run_dir / "reports/step_000005/report.json").read_text())
    assert report and run.summary["final_return"] == run.metrics[-1]["eval/return"]
    # ``evaluate`` measures the same episodes, in one simulator again and with other block sizes.
    for num_envs in (2, 5):
        single_simulators.Once.built.clear()
        again = run.evaluate(episodes=6, num_envs=num_envs, progress=False)
        assert single_simulators.Once.built == ["closed"]
        if id == IDS[0]:  # the carts take one seed for all environments
            assert again["eval/return"] == run.summary["final_return"]


def test_a_robot_is_evaluated_and_exported_with_one_environment(tmp_path) -> None:
    """A class of one environment: more episodes than environments build no second one."""
    run = train(tmp_path / "run", "single_simulators:Robot", env__num_envs=1, algorithm__horizon=32)
    assert run.metrics[-1]["eval/return"] == run.summary["final_return"]
    for use in (
        lambda: run.evaluate(episodes=6, progress=False)["eval/return"],
        lambda: (
            policy_export.export(str(run.run_dir), str(tmp_path / "bundle"))
            and run.summary["final_return"]
        ),
    ):
        single_simulators.Once.built.clear()
        assert use() == run.summary["final_return"]
        assert single_simulators.Once.built == ["closed"]


@pytest.mark.parametrize("id", IDS)
def test_without_evaluations_there_is_one_simulator_and_no_report(id: str, tmp_path) -> None:
    options = {"evaluation__episodes": 0, "evaluation__env": None, "eval_every": None}
    run = train(tmp_path / "run", id, **options)
    assert single_simulators.Once.built == ["closed"]
    assert not any("eval" in name for row in run.metrics for name in row)
    assert not {"final_return", "initial_return", "report", "video"} & set(run.summary)
    names = {path.name for path in (run.run_dir / "checkpoints").iterdir()}
    assert {"latest", "step_000005"} <= names and "best" not in names
    assert not (run.run_dir / "reports").exists()
    single_simulators.Once.built.clear()
    assert ep.verify(run.run_dir, updates=1, progress=False)["verdict"] == "verified"
    single_simulators.Once.built.clear()
    longer = ep.train(resume=run.run_dir, updates=6, progress=False)
    assert longer.summary["updates"] == 6 and single_simulators.Once.built == ["closed"]
    assert (longer.metrics[5]["update"], longer.metrics[4]) == (6, run.metrics[4])


def test_the_refusal_of_a_second_simulator_names_the_option(tmp_path) -> None:
    with pytest.raises(TrainingError, match=r"write evaluation\.env=training .* one simulation"):
        train(tmp_path / "run", IDS[1], evaluation__env="own")
    assert single_simulators.Once.built == ["closed"]


@pytest.mark.parametrize(
    ("id", "options"),
    [
        (IDS[0], {"env__restart_every": 16, "model__history": 2}),
        (IDS[1], {"env__realism__action_delay": [0, 2]}),
        ("toy_envs:Balance", {"env__max_episode_steps": 12, "env__num_threads": 1}),
    ],
)
def test_a_resumed_run_starts_the_same_episodes_after_an_evaluation(
    id: str, options: dict[str, Any], tmp_path, monkeypatch
) -> None:
    run = train(tmp_path / "run", id, **options)
    for update in (1, 2, 3):
        resumed = train(
            tmp_path / f"from{update}",
            id,
            resume=run.run_dir / f"checkpoints/step_{update:06d}",
            **options,
        )
        expected, actual = weights(run, 5), weights(resumed, 5)
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
        assert resumed.metrics[-1]["eval/return"] == run.metrics[-1]["eval/return"]
    # An evaluation that was cut is completed, and has no effect if it is not due any more.
    run, evaluate = train(tmp_path / "0", id, eval_every=0, **options), LocalSystem.evaluate
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(LocalSystem, "evaluate", lambda s, u: evaluate(s, u) if u < 3 else 1 / 0)
        train(tmp_path / "cut", id, eval_every=3, **options)
    resumed = train(tmp_path / "cut", id, resume=tmp_path / "cut", eval_every=0, **options)
    assert "eval/return" in resumed.metrics[3]
    expected, actual = weights(run, 5), weights(resumed, 5)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize(
    "options",
    [
        {"placement": "fused"},
        {"evaluation__env_kwargs": {"a": 1}},
        {"evaluation__episodes": 0, "evaluation__env": None},
    ],
)
def test_options_that_one_simulator_cannot_have_are_refused(
    options: dict[str, Any], tmp_path
) -> None:
    with pytest.raises(ConfigError) as error:
        train(tmp_path / "run", options.pop("env__id", IDS[1]), **options)
    assert "evaluation" in str(error.value) and len(str(error.value)) <= 300
    assert not single_simulators.Once.built and not (tmp_path / "run").exists()
