"""RLinf's files that lack only paths train two updates, with tiny models and a tiny LIBERO.

One file of each family and algorithm; RLINF_ALL=1 pytest .. trains all 26.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import fake_libero
import pytest
import run_helpers
import tiny_openvla_checkpoint
import tiny_pi0_checkpoint

from embodied_ppo.commands import main
from embodied_ppo.tools.import_config import convert
from tests.tools.import_config.test_rlinf_files import FILES, READY

REPRESENTATIVES = (
    "libero_spatial_ppo_openpi",
    "libero_10_grpo_openpi_pi05",
    "libero_spatial_async_ppo_openpi_pi05",
    "libero_goal_grpo_openvlaoft",
    "libero_spatial_0_grpo_mlp",
)


def write_model(folder: Path, name: str, unnorm_key: str | None) -> Path:
    """Write a tiny checkpoint of the family of a file, for LIBERO's 8 states and 7 actions."""
    if unnorm_key is None:
        kind = "pi05" if "pi05" in name else "pi0"
        return tiny_pi0_checkpoint.write_checkpoint(folder, kind=kind, chunk_size=10)
    tiny_openvla_checkpoint.write_checkpoint(folder)
    action = {"q01": [-1.0] * 7, "q99": [1.0] * 7, "mask": [True] * 6 + [False]}
    (folder / "dataset_statistics.json").write_text(json.dumps({unnorm_key: {"action": action}}))
    return folder


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libero") is not None, reason="LIBERO is installed")
@pytest.mark.parametrize(
    "name", READY if os.environ.get("RLINF_ALL") else [*map(str, REPRESENTATIVES)]
)
def test_file_trains_two_updates(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_libero.install(tmp_path / "packages", monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("file.yaml").write_text(json.dumps(run_helpers.nested(FILES[name])))
    assert main.main(["import-config", "rlinf", "file.yaml", "--out", "experiment/x.yaml"]) == 0
    options = convert.convert("rlinf", "file.yaml").options
    chunk, group = options["env.action_chunk"], options["algorithm.group_size"]
    envs = max(2, group)
    small = {
        "env.num_envs": envs,
        "env.max_episode_steps": 2 * chunk,
        "env.image_size": 32,
        "env.kwargs.processes": "false",
        "algorithm.horizon": 2,
        "algorithm.rollout_epoch": 3,
        "algorithm.global_batch_size": 2 * envs,  # 3 optimiser steps of an epoch
        "algorithm.micro_batch_size": envs,
        "evaluation.episodes": 2,
        "evaluation.num_envs": 2,
        "evaluation.video_episodes": 0,
        "updates": 2,
        "run_dir": "run",
    }
    if "model.checkpoint" in options:
        key = options.get("model.unnorm_key")
        small["model.checkpoint"] = write_model(tmp_path / "model", name, key)
        small |= {} if key is None else {"model.bins": 16}
    arguments = ["train", "--config-dir", ".", "experiment=x", "~cluster.component_placement"]
    arguments += [f"{path}={value}" for path, value in small.items()]
    assert main.main([*arguments, "device=cpu"]) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "policy/loss" in row]
    assert len(trained) == 2
    for row in trained:
        assert row["rollout/episodes"] == 3 * envs
        if group > 1:  # the successes of a group differ, and its groups are not whitened again
            assert 0 <= row["rollout/groups_dropped"] <= 3 * envs // group
