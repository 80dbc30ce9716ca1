"""`embodied-ppo tune` for real: roles timed, placements tried over Ray, and the line that it prints
trains.
"""

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
from embodied_ppo.commands import tune as tuning
from embodied_ppo.config.schema import ClusterConfig
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.modes import profile
from embodied_ppo.placement import cost_model

pytestmark = pytest.mark.usefixtures("eight_slots")

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
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, and no longer than needed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tuning, "MEASURE_S", 0.1)
    monkeypatch.setattr(profile, "MIN_REPEAT_S", 0.02)


@pytest.fixture
def one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best predicted alone, and one process."""
    monkeypatch.setattr(tuning, "MAX_MEASURED", 1)


def tuned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["tune", "--quiet", "--json", *SMALL, *words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_the_line_that_is_printed_trains_in_the_best_placement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = tuned(capsys, "num_nodes=1", "cluster.devices_per_node=2", "+seed=3")
    rows = {row["placement"]: row for row in told["placements"]}
    assert {"local", "fused", "hybrid, 2 stages", "env: 0-1 | rollout,actor: 0"} <= set(rows)
    assert all(row["whole_s"] > 0 and row["memory_gb"] > 0 for row in rows.values())
    assert [row["whole_s"] for row in told["placements"]] == pytest.approx(
        sorted(row["whole_s"] for row in told["placements"]), rel=0.1
    )
    tried = {name: row["measured_s"] for name, row in rows.items() if row["measured_s"] is not None}
    assert {row["placement"] for row in told["placements"][:2]} <= set(tried) and len(tried) <= 3
    assert told["best"] == min(tried, key=lambda name: tried[name])
    assert told["file"] == "my_configs/placement/tuned_cartpole.yaml"
    flags = [*SMALL, "+seed=3", "placement=tuned_cartpole"]
    assert shlex.split(told["command"]) == [
        "embodied-ppo",
        "train",
        "--config-dir",
        "my_configs",
        *flags,
    ]
    trained(capsys, told)


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


@pytest.mark.usefixtures("one_try")
def test_a_language_models_four_models_are_placed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", *LANGUAGE, "cluster.devices_per_node=1"]
    assert main.main([*words, "--json"]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    told = json.loads(said.out)
    rows = {row["placement"]: row for row in told["placements"]}
    apart = "rollout,actor,reference,reward: 0 | critic: 0"
    assert {"local", "fused", "colocated", apart} <= set(rows) and rows[apart]["processes"] == 2
    assert all(
        row["collect_s"] > 0 and row["update_s"] > 0 and row["memory_gb"] > 0
        for row in rows.values()
    )
    assert any(
        r["placement"] == "disaggregated" and "needs 2 devices" in r["reason"]
        for r in told["refused"]
    )
    costs = told["measured"]
    assert costs["responses"] == 16 and costs["steps"] == costs["critic_steps"] == 4
    for role in ("generate", "grade", "view", "values", "learn", "teach"):
        assert costs[role]["wall"]["fixed"] + costs[role]["wall"]["each"] > 0, role
    tried = {name: row["measured_s"] for name, row in rows.items() if row["measured_s"] is not None}
    assert (
        "local" in tried
        and len(tried) <= 2
        and told["best"] == min(tried, key=lambda name: tried[name])
    )
    assert "measured: of 16 responses generating " in said.err and ", the critic's " in said.err
    trained(capsys, told)


def test_a_language_model_that_generates_ahead(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody has an opinion but the grader."""
    words = [
        "experiment=arithmetic",
        *LANGUAGE[1:5],
        *LANGUAGE[8:],
        "algorithm.adv_type=grpo",
        "algorithm.group_size=2",
    ]
    words += ["cluster.max_lag=1", "cluster.devices_per_node=2", "critic.use_critic_model=false"]
    assert main.main(["tune", "--quiet", "--json", *words]) == 0, capsys.readouterr().err
    told = json.loads(capsys.readouterr().out)
    assert {row["placement"] for row in told["placements"]} == {"disaggregated"}
    assert (
        told["measured"]["view"] is told["measured"]["values"] is None
        and told["measured"]["responses"] == 32
    )


def trained(capsys: pytest.CaptureFixture[str], told: dict[str, Any]) -> dict[str, Any]:
    """Run the printed line; the run's options, which are those of the file."""
    assert main.main([*shlex.split(told["command"])[1:], "--quiet", "--json"]) == 0, (
        capsys.readouterr().err
    )
    said = capsys.readouterr()
    assert said.out.startswith("{"), said
    summary = json.loads(said.out)
    assert summary["updates"] == 2 and summary.get("env_steps", 128) == 128
    options = yaml.safe_load((Path(summary["run_dir"]) / "config.yaml").read_text())
    settings = yaml.safe_load(Path(told["file"]).read_text())
    assert options["placement"] == settings["placement"]
    for name, value in settings.get("cluster", {}).items():
        assert options["cluster"][name] == value
    return options


def test_a_run_that_runs_ahead_does_so_where_it_is_placed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = tuned(
        capsys, "cluster.max_lag=1", "cluster.devices_per_node=2", "cluster.check_weights=true"
    )
    assert {
        "placement": "local",
        "reason": "cluster.max_lag = 1: one process cannot run ahead of itself",
    } in told["refused"]
    assert all(
        "actor: " in row["placement"] or row["placement"] == "disaggregated"
        for row in told["placements"]
    )
    cluster = trained(capsys, told)["cluster"]
    assert (cluster["max_lag"], cluster["check_weights"], cluster["devices_per_node"]) == (
        1,
        True,
        2,
    )


@pytest.mark.usefixtures("one_try")
def test_a_users_own_configs_get_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An experiment in a folder of one's own; its name says which file, however it is spelt."""
    mine = tmp_path / "my own"
    (mine / "experiment").mkdir(parents=True)
    text = (
        "# @package _global_\nname: first try\ndefaults: [cartpole]\ncluster: {devices_per_node:"
        " 2}\n"
    )
    (mine / "experiment" / "own.yaml").write_text(text)
    told = tuned(capsys, "experiment=own", "--config-dir", str(mine), "placement=local")
    assert told["file"] == str(mine / "placement" / "tuned_first-try.yaml")
    assert not (tmp_path / "my_configs").exists()


@pytest.mark.usefixtures("one_try")
def test_the_table_is_for_people(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.main(["tune", *SMALL, "cluster.devices_per_node=1"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert (
        " ".join(lines[0].split()) == "predicted s collect update publish measured s GB placement"
    )
    assert any(line.endswith("  local") and len(line.split()) == 7 for line in lines)
    assert any(
        line.startswith("refused  hybrid  ") and "needs 2 devices" in line for line in lines
    ), told.out
    assert lines[-1].startswith(
        "embodied-ppo train --config-dir my_configs experiment=cartpole env.num_envs=8 "
    )
    assert lines[-1].endswith(" placement=tuned_cartpole")
    assert "measured: a step of 8 environments " in told.err and "trying local, " in told.err
    # nothing else is left of it
    assert sorted(p.name for p in tmp_path.rglob("*")) == [
        "my_configs",
        "placement",
        "tuned_cartpole.yaml",
    ]
    assert ray.is_initialized()


def test_what_does_not_fit_is_refused_with_the_sum() -> None:
    cpu = torch.device("cpu")
    free = replace(run_helpers.tiny_config(), cluster=ClusterConfig(devices_per_node=2))
    offers, refused = tuning.candidates(free, cpu)
    alone, both = (
        next(o.memory for o in offers if o.choice.name == name) for name in ("local", "colocated")
    )
    assert not [why for _, why in refused if "node 0 needs" in why] and alone < both
    tight = replace(free.cluster, device_memory_gb=(alone + both) / 2 / 0.92 / 1e9)
    offers, refused = tuning.candidates(replace(free, cluster=tight), cpu)
    assert "local" in {o.choice.name for o in offers}
    why = next(why for choice, why in refused if choice.name == "colocated")
    assert why.startswith("placement: node 0 needs 2 x ") and "one process of actor: weights" in why


def test_devices_that_others_have_are_missed_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    taken = placement_group([{"CPU": 1.0}] * 7)
    assert taken.wait(20)
    try:
        words = ["tune", *SMALL, "cluster.devices_per_node=2", "cluster.start_timeout_s=2"]
        assert main.main(words) == 2
    finally:
        remove_placement_group(taken)
    told = capsys.readouterr()
    assert "error: placement: needs 2 CPUs, 8 registered, 1 free after 2 s; add nodes" in told.err
    assert "measured" not in told.err and not Path("my_configs").exists()


def test_a_placement_that_breaks_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody answers within a millisecond; one process waits for nobody."""
    told = tuned(capsys, "cluster.devices_per_node=2", "cluster.step_timeout_s=0.001")
    assert (
        told["best"] == "local"
        and sum(row["measured_s"] is not None for row in told["placements"]) == 1
    )
    failed = [row for row in told["refused"] if "(cluster.step_timeout_s)" in row["reason"]]
    assert len(failed) == 3
    assert (
        main.main(
            [
                "tune",
                *SMALL,
                "cluster.devices_per_node=2",
                "cluster.step_timeout_s=0.001",
                "cluster.max_lag=1",
            ]
        )
        == 3
    )
    assert "placements failed; " in capsys.readouterr().err
    assert run_helpers.free_ray_cpus() == 8.0


def test_one_process_is_always_tried() -> None:
    config = replace(run_helpers.tiny_config(), cluster=ClusterConfig(devices_per_node=2))
    offers = {
        offer.choice.name: offer for offer in tuning.candidates(config, torch.device("cpu"))[0]
    }
    expected = {"fused": 1.0, "hybrid": 2.0, "colocated": 3.0, "local": 4.0}
    ranked = [
        (offers[name], cost_model.Prediction(s / 2, s / 2, 0.0, s)) for name, s in expected.items()
    ]

    def following(tried: dict[str, float], failed: tuple[str, ...] = ()) -> str | None:
        found = tuning._next(ranked, tried, dict.fromkeys(failed, ""))
        return None if found is None else found[0].choice.name

    assert following({}) == "fused" and following({"fused": 1.0}) == "hybrid"
    assert following({"fused": 3.9, "hybrid": 5.0}) == "local"
    assert following({"fused": 3.9, "hybrid": 5.0, "local": 6.0}) is None
    assert (
        following({}, ("fused",)) == "hybrid"
        and following({"hybrid": 3.0}, ("fused",)) == "colocated"
    )
    assert following({"local": 4.0}, ("fused", "hybrid", "colocated")) is None


def test_cores_are_counted_by_threads_that_use_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with as many as the machine has, whatever others were told: two would wait
    for each other.
    """
    seen, multiply, before = set[int](), torch.mm, torch.get_num_threads()
    monkeypatch.setattr(
        profile.torch, "mm", lambda a, b: (seen.add(torch.get_num_threads()), multiply(a, b))
    )
    torch.set_num_threads(2)
    try:
        assert 1 <= profile.parallel_cores() <= (os.cpu_count() or 1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {1}


def test_a_folder_that_cannot_be_written_is_said_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("my_configs").write_text("")
    assert main.main(["tune", *SMALL]) == 2
    assert "my_configs/placement/tuned_cartpole.yaml: cannot be written" in capsys.readouterr().err


def test_another_file_that_places_the_run_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Taken away for tune it would come back to train."""
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    text = (
        "# @package _global_\ndefaults: [cartpole]\ncluster: {component_placement: {env: 0,"
        " 'rollout,actor': 0}}\n"
    )
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text(text)
    words = [
        "tune",
        "--quiet",
        "--config-dir",
        "mine",
        *SMALL,
        "experiment=own",
        "~cluster.component_placement",
    ]
    assert main.main([*words, "cluster.devices_per_node=1"]) == 2
    assert "is written, but another file sets cluster, too" in capsys.readouterr().err


def test_the_policy_on_a_machine_without_room_is_a_placement_error() -> None:
    c = replace(
        run_helpers.tiny_config(), cluster=ClusterConfig(devices_per_node=1, device_memory_gb=1e-6)
    )
    with pytest.raises(
        PlacementError, match="tune: no placement is left; local: placement: node 0 needs"
    ):
        tuning.candidates(c, torch.device("cpu"))
