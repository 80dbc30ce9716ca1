"""Actions of imported policies equal those of their library: make test-import."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_helpers import run_process

from embodied_ppo import api
from embodied_ppo.commands import main

ENVIRONMENTS = Path(os.environ.get("IMPORT_ENVIRONMENTS", ""))
PRODUCERS = Path(__file__).parent / "policy_producers"
TOLERANCE = 1e-6
pytestmark = pytest.mark.skipif(
    "IMPORT_ENVIRONMENTS" not in os.environ,
    reason="IMPORT_ENVIRONMENTS names no folder with an environment per library: make test-import",
)


@pytest.mark.parametrize("library", ["sb3", "rsl_rl", "cleanrl"])
def test_actions_equal_those_of_the_library(library: str, tmp_path, capsys) -> None:
    """Deterministic actions within 1e-6, on three tasks; the values, too."""
    python = ENVIRONMENTS / library / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} does not exist: make test-import")
    run_process(python.absolute(), PRODUCERS / f"{library}.py", tmp_path, timeout=None)
    recordings = sorted(tmp_path.glob("*.json"))
    assert len(recordings) == 3
    for recording in recordings:
        info = json.loads(recording.read_text())
        task, run = recording.stem, tmp_path / recording.stem
        lines = import_arguments(library, info, task, run)
        assert main.main(["import-policy", *lines]) == 0, capsys.readouterr().err
        data = np.load(recording.with_suffix(".npz"))
        policy = api.load(run)
        difference = float(np.abs(policy.act(data["obs"]) - data["actions"]).max())
        report = f"{library} {info['version']} {task}: actions {difference:.1e}"
        if "values" in data.files:
            values = value_of(policy, data["obs"])
            unit = info.get("value_unit", 1.0)
            error = np.abs(values - data["values"] / unit) / (1 + np.abs(values))
            report += f", values {float(error.max()):.1e}"
            assert error.max() < 1e-5, report
        with capsys.disabled():
            print(f"\n{report}", end="")
        assert difference < TOLERANCE, report


def import_arguments(library: str, info: dict[str, Any], task: str, run: Path) -> list[str]:
    """Return the arguments of import-policy."""
    lines = [library, info["file"], "experiment=halfcheetah", f"env.id={task}", f"run_dir={run}"]
    lines += ["env.simulator=gymnasium", "env.num_envs=2", "algorithm.global_batch_size=64"]
    lines += [f"normalizer={info['normalizer']}"] if "normalizer" in info else []
    return [*lines, *info.get("options", []), "--quiet"]


def value_of(policy: Any, obs: np.ndarray) -> np.ndarray:
    """Return the values of observations, in the units of normalised rewards."""
    import torch

    network = policy.network
    return network.value(network.encode(torch.from_numpy(obs))).numpy().astype(np.float64)
