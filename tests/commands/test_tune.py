"""Tests of `embodied-ppo tune` with real timing, placements over Ray, and training."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
import yaml

from embodied_ppo.commands import main
from embodied_ppo.options.schema import ClusterConfig
from embodied_ppo.tools import placement_search

pytestmark = pytest.mark.usefixtures("few_problems", "eight_slots")

SMALL = [
    "experiment=cartpole",
    "env.num_envs=8",
    "algorithm.horizon=8",
    "algorithm.global_batch_size=32",
    "algorithm.update_epoch=1",
    "updates=2",
    "evaluation.episodes=1",
    "evaluation.num_envs=1",
    "evaluation.video_episodes=0",
    "device=cpu",
]


def measure_only(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Measure the first valid placements only."""

    def first(*arguments: Any) -> Any:
        valid, refused = candidates(*arguments)
        return valid[:count], refused

    monkeypatch.setattr(placement_search, "candidates", first)


candidates = placement_search.candidates


@pytest.fixture(autouse=True)
def short_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder with short measurements of three placements."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement_search, "MEASURE_S", 0.1)
    measure_only(monkeypatch, 3)


@pytest.fixture
def measure_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure only the placement in one process."""
    measure_only(monkeypatch, 1)


def tune(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return run_helpers.run_command(capsys, "tune", "--quiet", *SMALL, *arguments)


def measured(summary: dict[str, Any]) -> dict[str, float]:
    """Return placement -> measured seconds."""
    return {row["placement"]: row["measured_s"] for row in summary["placements"]}


def reasons(summary: dict[str, Any]) -> dict[str, str]:
    """Return placement -> why it was not measured."""
    return {row["placement"]: row["reason"] for row in summary["refused"]}


@pytest.mark.slow
def test_printed_command_trains_in_the_best_placement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tune(capsys, "cluster.num_nodes=1", "cluster.devices_per_node=2", "+seed=3")
    tried = measured(summary)
    assert {"local", "fused"} < set(tried) and len(tried) == 3
    assert all(row["measured_s"] > 0 and row["memory_gb"] > 0 for row in summary["placements"])
    assert list(tried.values()) == sorted(tried.values())
    assert summary["best"] == min(tried, key=lambda name: tried[name])
    command = shlex.split(summary["command"])
    assert command[: len(SMALL) + 3] == ["embodied-ppo", "train", *SMALL, "+seed=3"]
    assert command[len(SMALL) + 3].startswith("placement=")
    assert command[-1].startswith("cluster.devices_per_node=")
    train_printed_command(capsys, summary)


LANGUAGE = [
    "experiment=arithmetic",
    "algorithm.use_kl_in_reward=true",
    "algorithm.rollout_batch_size=16",
    "algorithm.global_batch_size=8",
    "warm_start.steps=3",
    "evaluation.episodes=4",
    "updates=2",
    "device=cpu",
    "threads=1",
]


@pytest.mark.slow
def test_placements_of_four_language_models(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", *LANGUAGE, "cluster.devices_per_node=1", "--json"]
    assert main.main(arguments) == 0, capsys.readouterr().err
    summary = json.loads(capsys.readouterr().out)
    tried, refused = measured(summary), reasons(summary)
    assert {"local", "fused", "colocated"} == set(tried)
    assert "needs 2 devices" in refused["disaggregated"]
    assert summary["best"] == min(tried, key=lambda name: tried[name])
    train_printed_command(capsys, summary)


def train_printed_command(
    capsys: pytest.CaptureFixture[str], summary: dict[str, Any]
) -> dict[str, Any]:
    """Run the printed command and return the run's options, which contain those it names."""
    command = [*shlex.split(summary["command"])[1:], "--quiet", "--json"]
    assert main.main(command) == 0, capsys.readouterr().err
    run = json.loads(capsys.readouterr().out)
    assert run["updates"] == 2 and run.get("env_steps", 128) == 128
    options = yaml.safe_load((Path(run["run_dir"]) / "config.yaml").read_text())
    assert f"placement={options['placement']}" in command
    return options


@pytest.mark.slow
def test_run_with_lag_is_placed_in_several_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tune(
        capsys, "cluster.max_lag=1", "cluster.devices_per_node=2", "cluster.step_timeout_s=900"
    )
    assert reasons(summary)["local"].endswith("one process cannot run ahead of itself")
    assert measured(summary).keys() == {"disaggregated"}
    cluster = train_printed_command(capsys, summary)["cluster"]
    names = ("max_lag", "step_timeout_s", "devices_per_node")
    assert [cluster[name] for name in names] == [1, 900, 2]


def test_placement_beyond_the_memory_is_refused() -> None:
    cpu = torch.device("cpu")
    config = replace(run_helpers.tiny_config(), cluster=ClusterConfig(devices_per_node=2))
    valid, refused = candidates(config, cpu)
    memory = {candidate.name: candidate.memory for candidate in valid}
    local, colocated = memory["local"], memory["colocated"]
    assert not any("node 0 needs" in reason for reason in refused.values()) and local < colocated
    cluster = replace(config.cluster, device_memory_gb=(local + colocated) / 2 / 0.92 / 1e9)
    valid, refused = candidates(replace(config, cluster=cluster), cpu)
    assert "local" in {candidate.name for candidate in valid}
    reason = refused["colocated"]
    assert reason.startswith("placement: node 0 needs 2 x ")
    assert "one process of actor: weights" in reason


@pytest.mark.slow
def test_failing_placement_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A time limit of 1 ms ends every worker; one process has no workers."""
    options = ["cluster.devices_per_node=2", "cluster.step_timeout_s=0.001"]
    summary = tune(capsys, *options)
    assert summary["best"] == "local" and measured(summary).keys() == {"local"}
    failed = [text for text in reasons(summary).values() if "(cluster.step_timeout_s)" in text]
    assert len(failed) == 2
    assert main.main(["tune", *SMALL, *options, "cluster.max_lag=1"]) == 3
    assert "placements failed; " in capsys.readouterr().err
    assert run_helpers.free_ray_cpus() == 8.0


def test_simulators_apart_are_tried_with_one_and_two_stages() -> None:
    config = run_helpers.tiny_config()
    named = placement_search.placements(config, devices=2, cores=4)
    assert list(named)[:3] == ["local", "fused", "colocated"]
    assert {"hybrid", "hybrid, 2 stages", "4 processes of simulators, 2 stages"} <= named.keys()
    named = placement_search.placements(replace(config, mode="reasoning"), devices=2, cores=4)
    assert not any("stages" in name or "simulators" in name for name in named)
