"""Training with ``algorithm.type=reppo`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run_helpers
import torch

from embodied_ppo.commands import main

OPTIONS = (
    "experiment=humanoid_reppo",
    "env.id=Pendulum-v1",
    "env.num_envs=4",
    "env.max_episode_steps=20",
    "algorithm.horizon=16",
    "algorithm.global_batch_size=32",
    "algorithm.kept_rollouts=3",
    "algorithm.rollouts_per_update=2",
    "algorithm.lr_schedule=constant",  # a run of three updates would end with another rate
    "evaluation.episodes=2",
    "model.hidden=[16]",
    "eval_every=0",
    "device=cpu",
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of six updates."""
    path = tmp_path_factory.mktemp("reppo") / "run"
    assert main.main(["train", *OPTIONS, "updates=6", f"run_dir={path}", "--quiet"]) == 0
    return path


@pytest.mark.slow
def test_interrupted_run_continues_bit_for_bit(run_dir: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    assert main.main(["train", *OPTIONS, "updates=3", f"run_dir={first}", "--quiet"]) == 0
    arguments = [f"resume={first}", "updates=6", f"run_dir={tmp_path / 'second'}", "--quiet"]
    assert main.main(["train", *arguments]) == 0
    weights = [
        torch.load(folder / "checkpoints" / "step_000006" / "policy.pt")
        for folder in (run_dir, tmp_path / "second")
    ]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_metrics(run_dir: Path) -> None:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "policy/kl" in row]
    assert len(updates) == 6
    for tag in ("policy/kl", "policy/kl_coef", "policy/entropy_coef", "policy/off_policy_weight"):
        assert len({row[tag] for row in updates}) == 6, tag
    assert updates[0]["policy/off_policy_weight"] == pytest.approx(1.0, abs=1e-5)
    assert all(row["policy/off_policy_weight"] < 1.0 for row in updates[1:])
    assert not any("policy/clip_fraction" in row or "advantage/std" in row for row in updates)


@pytest.mark.slow
def test_other_commands(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verified = run_helpers.run_command(capsys, "verify", run_dir, "--updates", "2")
    assert verified["verdict"] == "verified"
    run_helpers.run_command(capsys, "export", f"checkpoint={run_dir}", f"out={tmp_path / 'bundle'}")
    assert main.main(["replay", str(run_dir), "update=2", f"out={tmp_path / 'replay'}"]) == 2
    message = "algorithm.type = reppo: replay and bisect show the minibatches of PPO only"
    assert message in capsys.readouterr().err
    found = run_helpers.run_command(capsys, "bisect", run_dir, "policy/kl > 0")
    assert found["update"] == 1 and found["minibatch"] is None
    assert any(message in note for note in found["notes"])
    for command in ("plan", "tune"):
        assert main.main([command, *OPTIONS]) == 2
        assert "algorithm.type = reppo: runs in one process" in capsys.readouterr().err
