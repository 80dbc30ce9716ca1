"""Processes of simulators: signals, and the memory that they share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import fake_libero
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "env",
    [
        ["experiment=libero_vla", "~cloning", "env.image_size=16", "model.width=16"],
        ["env.id=Pendulum-v1", "env.simulator=gymnasium", "env.kwargs.vectorization_mode=async"],
    ],
    ids=["libero", "gymnasium"],
)
def test_a_signal_to_the_process_group_saves_a_checkpoint(
    number: signal.Signals, env: list[str], tmp_path, monkeypatch
) -> None:
    """A terminal and batch systems send signals to all processes of a command."""
    fake_libero.install(tmp_path / "packages", monkeypatch)
    arguments = [sys.executable, "-m", "embodied_ppo.commands.main", "train", *env]
    arguments += ["env.num_envs=2", "updates=100000", "algorithm.horizon=8"]
    arguments += ["eval_every=0"] if "~cloning" in env else []
    arguments += ["algorithm.global_batch_size=16", "run_dir=run", "save_every=0"]
    arguments += ["evaluation.episodes=0"]
    path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        arguments,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert process.stderr is not None
    metrics = tmp_path / "run/metrics.jsonl"
    while not metrics.exists() or not metrics.read_text():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    assert process.returncode == 130, err
    (saved,) = (tmp_path / "run/checkpoints").glob("step_*")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert int(saved.name.removeprefix("step_")) == rows[-1]["update"] > 0
