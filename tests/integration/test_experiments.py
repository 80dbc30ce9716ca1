"""Every shipped experiment is parsed, built and trained for one small update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_helpers
import yaml

from embodied_ppo.commands import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXPERIMENTS = sorted(p.stem for p in (CONFIGS / "experiment").glob("*.yaml"))
# compile=never: bench_* would wait for the compiler, which core/test_compile.py tests.
SMALL = run_helpers.words("""env.num_envs=2 env.max_episode_steps=5 algorithm.horizon=4
    algorithm.global_batch_size=8 algorithm.update_epoch=1 evaluation.episodes=1
    evaluation.num_envs=1 evaluation.video_episodes=0 updates=1 compile=never""")
SMALL_LANGUAGE = run_helpers.words("""actor.model.architecture.hidden_size=16
    actor.model.architecture.intermediate_size=16 warm_start.steps=2 algorithm.update_epoch=1
    algorithm.rollout_batch_size=8 algorithm.global_batch_size=8 evaluation.episodes=4 updates=1""")
SMALL_CLONING = [
    f"cloning.{x}" for x in ("steps=2", "foresight_steps=2", "episodes=8", "batch_size=4")
]
NEEDS_FILES = {"gsm8k_qwen2_5_0_5b", "openvla_7b", "openvla_oft", "pi0_tabletop", "pi0_libero"}
# Experiments without shipped weights and data; other tests use small ones.
NEEDS_FILES |= {"pi05_libero", "smolvla_libero", "libero_vla"}
# Experiments of policies with instructions, which clone first.
INSTRUCTED = {f"tabletop_{x}" for x in ("token", "flow", "gaussian")}
SUCCESS = INSTRUCTED | {"metaworld", "mt10", "go1_joystick", "go1_rough", "go1_privileged"}
# Experiments whose task reports success.
SUCCESS |= {"panda_pick_cube", "tabletop_pixels", "tabletop_push", "tabletop_reach"}
# Experiments that differ from the one they extend only in sizes, for thousands of worlds.
GPU = ("ant_gpu", "go1_gpu", "panda_gpu", "tabletop_gpu")
# Experiments that differ from the one they extend in numbers or in the task's options only.
NUMBERS = {
    *("bench_ant", "bench_classic", "bench_wide", "go1_blind", "go1_friction", "scratchpad"),
    *("tabletop_bench", "tabletop_privileged", "tabletop_token_push", "tabletop_token_put"),
    "walker2d_positions",
}


def mode(name: str) -> str:
    """Return the mode of an experiment, which may be that of the experiment it extends."""
    content = yaml.safe_load((CONFIGS / "experiment" / f"{name}.yaml").read_text())
    defaults = content.get("defaults", [])
    for entry in defaults:
        if isinstance(entry, dict) and "override /mode" in entry:
            return entry["override /mode"]
    base = [entry for entry in defaults if isinstance(entry, str) and entry != "_self_"]
    return mode(base[0]) if base else "embodied"


def experiments_of(mode_name: str) -> list[str]:
    untrained = NEEDS_FILES | NUMBERS | {*GPU}
    trained = [name for name in EXPERIMENTS if name not in untrained]
    return [name for name in trained if mode(name) == mode_name]


@pytest.mark.slow
def test_experiments_that_extend_another_are_valid(capsys) -> None:
    for name in sorted(NUMBERS & set(EXPERIMENTS)):
        assert main.main(["config", f"experiment={name}"]) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", experiments_of("embodied"))
def test_experiment_trains_and_evaluates(name: str, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = SMALL + (SMALL_CLONING if name in INSTRUCTED else [])
    if name == "mt10":  # one environment of each task
        small += ["env.num_envs=10", "algorithm.global_batch_size=40"]
    code = main.main(["train", "--quiet", "--json", f"experiment={name}", *small])
    assert code == 0, capsys.readouterr().err
    summary = json.loads(capsys.readouterr().out)
    steps = {"mt10": 40, **dict.fromkeys(INSTRUCTED, 32)}.get(name, 8)
    assert summary["updates"] == 1 and summary["env_steps"] == steps
    assert summary["final_return"] is not None and summary["cpu_us_per_step"] > 10
    assert (summary["final_success"] is not None) == (name in SUCCESS)
    assert Path(summary["checkpoint"]).is_dir() and Path(summary["report"]).is_file()


@pytest.mark.parametrize("name", GPU)
def test_gpu_experiment_has_few_large_minibatches(name: str, capsys) -> None:
    """At least 4,096 worlds, at most 20 minibatches, and memory that fits on a GPU of 80 GB."""
    options = ["placement=fused", "cluster.devices_per_node=1", "cluster.device_memory_gb=80"]
    assert main.main(["plan", "--json", f"experiment={name}", *options]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["facts"]["environments per rollout process"] >= 4096
    assert plan["facts"]["optimiser steps per update"] <= 20
    assert plan["facts"]["samples per optimiser step and actor process"] >= 32768
    assert plan["memory"][-1][0] == "total"


@pytest.mark.slow
@pytest.mark.parametrize("name", experiments_of("reasoning"))
def test_language_experiment_trains_and_evaluates(name: str, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = main.main(["train", "--quiet", "--json", f"experiment={name}", *SMALL_LANGUAGE])
    assert code == 0, capsys.readouterr().err
    summary = json.loads(capsys.readouterr().out)
    assert summary["updates"] == 1 and summary["tokens"] >= 8
    assert summary["final_return"] is not None and summary["final_success"] is not None
    assert Path(summary["checkpoint"]).is_dir() and Path(summary["report"]).is_file()


@pytest.mark.slow
def test_missing_files_of_an_experiment_are_named(capsys) -> None:
    for name in NEEDS_FILES:
        run_helpers.assert_refused(capsys, f"train experiment={name}")


def test_experiments_have_descriptions_and_use_every_group_file() -> None:
    texts = ""
    for file in (CONFIGS / "experiment").glob("*.yaml"):
        texts += file.read_text()
        assert len(yaml.safe_load(file.read_text())["description"]) > 10, file
    for group in ("algorithm", "model", "env"):
        for file in (CONFIGS / group).glob("*.yaml"):
            assert f"override /{group}: {file.stem}" in texts, f"{group}/{file.stem} is not used"
