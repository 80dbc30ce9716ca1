"""Tests of `embodied-ppo tune` with real timing, placements over Ray, and training."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import run_helpers
import torch
import yaml
from ray.util.placement_group import placement_group, remove_placement_group

from embodied_ppo.commands import main
from embodied_ppo.config.schema import ClusterConfig
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.modes import placement_search, profile
from embodied_ppo.placement import cost_model

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


@pytest.fixture(autouse=True)
def short_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder with short measurements."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement_search, "MEASURE_S", 0.1)
    monkeypatch.setattr(profile, "MIN_REPEAT_S", 0.02)


@pytest.fixture
def measure_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure only the best prediction, and one process."""
    monkeypatch.setattr(placement_search, "MAX_MEASURED", 1)


def tune(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return run_helpers.run_command(capsys, "tune", "--quiet", *SMALL, *arguments)


def measured(summary: dict[str, Any]) -> dict[str, float]:
    """Return placement -> measured seconds."""
    rows = summary["placements"]
    return {row["placement"]: row["measured_s"] for row in rows if row["measured_s"] is not None}


@pytest.mark.slow
def test_printed_command_trains_in_the_best_placement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tune(capsys, "num_nodes=1", "cluster.devices_per_node=2", "+seed=3")
    rows = {row["placement"]: row for row in summary["placements"]}
    assert {"local", "fused", "hybrid, 2 stages", "env: 0-1 | rollout,actor: 0"} <= set(rows)
    assert all(row["whole_s"] > 0 and row["memory_gb"] > 0 for row in rows.values())
    assert [row["whole_s"] for row in summary["placements"]] == pytest.approx(
        sorted(row["whole_s"] for row in summary["placements"]), rel=0.1
    )
    tried = measured(summary)
    assert {row["placement"] for row in summary["placements"][:2]} <= set(tried) and len(tried) <= 3
    assert summary["best"] == min(tried, key=lambda name: tried[name])
    assert summary["file"] == "my_configs/placement/tuned_cartpole.yaml"
    flags = [*SMALL, "+seed=3", "placement=tuned_cartpole"]
    expected = ["embodied-ppo", "train", "--config-dir", "my_configs", *flags]
    assert shlex.split(summary["command"]) == expected
    train_printed_command(capsys, summary)


LANGUAGE = [
    "experiment=rlhf_tiny",
    "algorithm.rollout_batch_size=16",
    "algorithm.global_batch_size=8",
    "warm_start.steps=3",
    "warm_start.batch_size=8",
    "reward.model.pairs=64",
    "reward.model.steps=2",
    "reward.model.batch_size=8",
    "evaluation.episodes=4",
    "updates=2",
    "device=cpu",
    "threads=1",
]


@pytest.mark.slow
@pytest.mark.usefixtures("measure_one")
def test_placements_of_four_language_models(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", *LANGUAGE, "cluster.devices_per_node=1", "--json"]
    assert main.main(arguments) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    rows = {row["placement"]: row for row in summary["placements"]}
    separate = "rollout,actor,reference,reward: 0 | critic: 0"
    assert {"local", "fused", "colocated", separate} <= set(rows)
    assert rows[separate]["processes"] == 2
    assert all(
        row["collect_s"] > 0 and row["update_s"] > 0 and row["memory_gb"] > 0
        for row in rows.values()
    )
    assert any(
        r["placement"] == "disaggregated" and "needs 2 devices" in r["reason"]
        for r in summary["refused"]
    )
    costs = summary["measured"]
    assert costs["responses"] == 16 and costs["steps"] == costs["critic_steps"] == 4
    for role in ("generate", "grade", "view", "values", "learn", "teach"):
        assert costs[role]["wall"]["fixed"] + costs[role]["wall"]["each"] > 0, role
    tried = measured(summary)
    assert "local" in tried and len(tried) <= 2
    assert summary["best"] == min(tried, key=lambda name: tried[name])
    assert "measured: of 16 responses generating " in captured.err
    assert ", the critic's " in captured.err
    train_printed_command(capsys, summary)


@pytest.mark.slow
def test_placements_of_a_language_model_with_lag(capsys: pytest.CaptureFixture[str]) -> None:
    """Without critic and reward model, only the grader scores responses."""
    options = [
        "experiment=arithmetic",
        *LANGUAGE[1:5],
        *LANGUAGE[8:],
        "algorithm.adv_type=grpo",
        "algorithm.group_size=2",
    ]
    options += ["cluster.max_lag=1", "cluster.devices_per_node=2", "critic.use_critic_model=false"]
    assert main.main(["tune", "--quiet", "--json", *options]) == 0, capsys.readouterr().err
    summary = json.loads(capsys.readouterr().out)
    assert {row["placement"] for row in summary["placements"]} == {"disaggregated"}
    costs = summary["measured"]
    assert costs["view"] is costs["values"] is None and costs["responses"] == 32


def train_printed_command(
    capsys: pytest.CaptureFixture[str], summary: dict[str, Any]
) -> dict[str, Any]:
    """Run the printed command and return the run's options, which contain those of the file."""
    command = [*shlex.split(summary["command"])[1:], "--quiet", "--json"]
    assert main.main(command) == 0, capsys.readouterr().err
    run = json.loads(capsys.readouterr().out)
    assert run["updates"] == 2 and run.get("env_steps", 128) == 128
    options = yaml.safe_load((Path(run["run_dir"]) / "config.yaml").read_text())
    settings = yaml.safe_load(Path(summary["file"]).read_text())
    assert options["placement"] == settings["placement"]
    for name, value in settings.get("cluster", {}).items():
        assert options["cluster"][name] == value
    return options


@pytest.mark.slow
def test_run_with_lag_is_placed_in_several_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = tune(
        capsys, "cluster.max_lag=1", "cluster.devices_per_node=2", "cluster.check_weights=true"
    )
    assert {
        "placement": "local",
        "reason": "cluster.max_lag = 1: one process cannot run ahead of itself",
    } in summary["refused"]
    assert all(
        "actor: " in row["placement"] or row["placement"] == "disaggregated"
        for row in summary["placements"]
    )
    cluster = train_printed_command(capsys, summary)["cluster"]
    names = ("max_lag", "check_weights", "devices_per_node")
    assert [cluster[name] for name in names] == [1, True, 2]


def write_experiment(folder: Path, text: str) -> None:
    """Write the experiment ``own``: cartpole with further options."""
    (folder / "experiment").mkdir(parents=True)
    content = f"# @package _global_\ndefaults: [cartpole]\n{text}\n"
    (folder / "experiment" / "own.yaml").write_text(content)


@pytest.mark.slow
@pytest.mark.usefixtures("measure_one")
def test_placement_is_written_to_the_config_dir(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The file is named after the run; other characters than letters become dashes."""
    folder = tmp_path / "my own"
    write_experiment(folder, "name: first try\ncluster: {devices_per_node: 2}")
    summary = tune(capsys, "experiment=own", "--config-dir", str(folder), "placement=local")
    assert summary["file"] == str(folder / "placement" / "tuned_first-try.yaml")
    assert not (tmp_path / "my_configs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("measure_one")
def test_table_of_placements(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["tune", *SMALL, "cluster.devices_per_node=1"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    header = "predicted s collect update publish measured s GB placement"
    assert " ".join(lines[0].split()) == header
    assert any(line.endswith("  local") and len(line.split()) == 7 for line in lines)
    refused = [line for line in lines if line.startswith("refused  hybrid  ")]
    assert any("needs 2 devices" in line for line in refused), captured.out
    command = "embodied-ppo train --config-dir my_configs experiment=cartpole env.num_envs=8 "
    assert lines[-1].startswith(command)
    assert lines[-1].endswith(" placement=tuned_cartpole")
    assert "measured: a step of 8 environments " in captured.err
    assert "trying local, " in captured.err
    written = ["my_configs", "placement", "tuned_cartpole.yaml"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == written
    assert ray.is_initialized()


def test_placement_beyond_the_memory_is_refused() -> None:
    cpu = torch.device("cpu")
    config = replace(run_helpers.tiny_config(), cluster=ClusterConfig(devices_per_node=2))
    candidates, refused = placement_search.candidates(config, cpu)
    memory = {candidate.choice.name: candidate.memory for candidate in candidates}
    local, colocated = memory["local"], memory["colocated"]
    assert not any("node 0 needs" in reason for _, reason in refused) and local < colocated
    cluster = replace(config.cluster, device_memory_gb=(local + colocated) / 2 / 0.92 / 1e9)
    candidates, refused = placement_search.candidates(replace(config, cluster=cluster), cpu)
    assert "local" in {candidate.choice.name for candidate in candidates}
    reason = next(reason for choice, reason in refused if choice.name == "colocated")
    assert reason.startswith("placement: node 0 needs 2 x ")
    assert "one process of actor: weights" in reason


@pytest.mark.slow
def test_occupied_devices_are_reported_before_measuring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    occupied = placement_group([{"CPU": 1.0}] * 7)
    assert occupied.wait(20)
    try:
        options = ["cluster.devices_per_node=2", "cluster.start_timeout_s=2"]
        assert main.main(["tune", *SMALL, *options]) == 2
    finally:
        remove_placement_group(occupied)
    err = capsys.readouterr().err
    assert "error: placement: needs 2 CPUs, 8 registered, 1 free after 2 s; add nodes" in err
    assert "measured" not in err and not Path("my_configs").exists()


@pytest.mark.slow
def test_failing_placement_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """A time limit of 1 ms ends every worker; one process has no workers."""
    options = ["cluster.devices_per_node=2", "cluster.step_timeout_s=0.001"]
    summary = tune(capsys, *options)
    assert summary["best"] == "local" and measured(summary).keys() == {"local"}
    failed = [row for row in summary["refused"] if "(cluster.step_timeout_s)" in row["reason"]]
    assert len(failed) == 3
    assert main.main(["tune", *SMALL, *options, "cluster.max_lag=1"]) == 3
    assert "placements failed; " in capsys.readouterr().err
    assert run_helpers.free_ray_cpus() == 8.0


def test_placement_in_one_process_is_always_measured() -> None:
    config = replace(run_helpers.tiny_config(), cluster=ClusterConfig(devices_per_node=2))
    candidates, _ = placement_search.candidates(config, torch.device("cpu"))
    by_name = {candidate.choice.name: candidate for candidate in candidates}
    expected = {"fused": 1.0, "hybrid": 2.0, "colocated": 3.0, "local": 4.0}
    ranked = [
        (by_name[name], cost_model.Prediction(s / 2, s / 2, 0.0, s)) for name, s in expected.items()
    ]

    def following(tried: dict[str, float], failed: tuple[str, ...] = ()) -> str | None:
        pair = placement_search._next_candidate(ranked, tried, dict.fromkeys(failed, ""))
        return None if pair is None else pair[0].choice.name

    assert following({}) == "fused" and following({"fused": 1.0}) == "hybrid"
    assert following({"fused": 3.9, "hybrid": 5.0}) == "local"
    assert following({"fused": 3.9, "hybrid": 5.0, "local": 6.0}) is None
    assert following({}, ("fused",)) == "hybrid"
    assert following({"hybrid": 3.0}, ("fused",)) == "colocated"
    assert following({"local": 4.0}, ("fused", "hybrid", "colocated")) is None


def test_parallel_cores_are_counted_with_one_torch_thread_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new thread starts with torch's default number of threads, so it must be set in each."""
    counts, multiply, before = set[int](), torch.mm, torch.get_num_threads()
    monkeypatch.setattr(
        profile.torch, "mm", lambda a, b: (counts.add(torch.get_num_threads()), multiply(a, b))
    )
    torch.set_num_threads(2)
    try:
        assert 1 <= profile.parallel_cores() <= (os.cpu_count() or 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert counts == {1}


def test_unwritable_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my_configs").write_text("")
    assert main.main(["tune", *SMALL]) == 2
    assert "my_configs/placement/tuned_cartpole.yaml: cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("measure_one")
@pytest.mark.parametrize("best", ["local", "fused"])
def test_conflicting_placement_of_another_file_is_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    best: str,
) -> None:
    """An option that is deleted for tune would be set again for train."""
    candidates = placement_search.candidates

    def only_best(*arguments: Any) -> Any:
        valid, refused = candidates(*arguments)
        return [candidate for candidate in valid if candidate.choice.name == best], refused

    monkeypatch.setattr(placement_search, "candidates", only_best)
    roles = "cluster: {component_placement: {env: 0, 'rollout,actor': 0}}"
    write_experiment(tmp_path / "mine", roles)
    options = ["experiment=own", "~cluster.component_placement", "cluster.devices_per_node=1"]
    assert main.main(["tune", "--quiet", "--config-dir", "mine", *SMALL, *options]) == 2
    file = Path("mine/placement/tuned_own.yaml")
    assert file.exists()
    problem = f"{file}: is written, but another file sets cluster, too, and both together are "
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_machine_with_too_little_memory_is_refused() -> None:
    config = replace(
        run_helpers.tiny_config(), cluster=ClusterConfig(devices_per_node=1, device_memory_gb=1e-6)
    )
    with pytest.raises(
        PlacementError, match="tune: no placement is left; local: placement: node 0 needs"
    ):
        placement_search.candidates(config, torch.device("cpu"))
