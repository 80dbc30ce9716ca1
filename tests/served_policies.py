"""Runs of tiny policies that `embodied-ppo serve` serves, and a client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import run_helpers
from tiny_pi0_checkpoint import write_checkpoint

from embodied_ppo import api
from embodied_ppo.programs import runs


def write_mlp(folder: Path, id: str = "HalfCheetah", **kwargs: object) -> Path:
    """Train an MLP of a task for one update; return its run."""
    options = {"env.id": id, "updates": 1, "evaluation.episodes": 0, "compile": "never"}
    options |= {"env.kwargs": kwargs, "run_dir": str(folder)}
    runs.train(run_helpers.tiny_config(options), quiet=True)
    return folder


def write_pi0(folder: Path) -> Path:
    """Train a tiny π0 that reads the camera, the state and a sentence for one update."""
    write_checkpoint(folder.with_name("pi0_checkpoint"), max_state_dim=12)
    config = run_helpers.options("""env.id=Tabletop env.cameras=[front] env.image_size=32
        env.num_envs=2 env.num_threads=1 env.action_chunk=2 model.policy=flow
        model.shared_backbone=true algorithm.horizon=4 algorithm.global_batch_size=8
        algorithm.update_epoch=1 updates=1 evaluation.episodes=0 compile=never""")
    config |= {
        "env.kwargs": {"obs": "language", "families": ["reach"]},
        "model.checkpoint": str(folder.with_name("pi0_checkpoint")),
        "run_dir": str(folder),
    }
    options = {name.replace(".", "__"): x for name, x in config.items()}
    api.train(progress=False, **options)
    return folder


@contextmanager
def started(*command: str) -> Iterator[str]:
    """Run a server in a process of its own; yield the first line that it prints."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=60)
