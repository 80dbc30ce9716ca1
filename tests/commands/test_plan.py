"""Tests of `embodied-ppo plan --devices N --device-gb GB`: machines that are not here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tiny_smolvla_checkpoint import write_checkpoint

from embodied_ppo.commands import main

SMALL = [
    "experiment=smolvla_libero",
    "env.image_size=16",
    "env.num_envs=16",
    "env.action_chunk=2",
    "model.flow_steps=2",
    "algorithm.horizon=8",
    "algorithm.global_batch_size=64",
    "algorithm.micro_batch_size=16",
]


@pytest.fixture
def sizes(tmp_path: Path) -> str:
    """The override that names a directory of config.json alone."""
    pytest.importorskip("transformers")
    folder = write_checkpoint(tmp_path / "tiny")
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    return f"model.checkpoint={folder}"


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    code = main.main(["plan", "--json", *arguments])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


@pytest.mark.slow
def test_devices_and_command(capsys: pytest.CaptureFixture[str], sizes: str) -> None:
    one = plan(capsys, *SMALL, sizes, "--devices", "1", "--device-gb", "80")
    two = plan(capsys, *SMALL, sizes, "--devices", "2", "--device-gb", "80")
    assert (one["placement"], two["placement"]) == ("local", "fused")
    command = shlex.split(two["command"])
    assert {"placement=fused", "cluster.devices_per_node=2", sizes} <= {*command}
    # Too little for the micro-batches of the recipe: smaller ones, or activations computed again.
    small = plan(capsys, *SMALL, sizes, "--devices", "1", "--device-gb", "0.549")
    assert small["changes"] and "--device" not in small["command"]
    assert main.main(["plan", *SMALL, sizes, "--devices", "1", "--device-gb", "30"]) == 0
    out = capsys.readouterr().out
    assert "cuda 0" in out and "experience" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--devices", "2"], "write --devices and --device-gb together"),
        (["--devices", "0", "--device-gb", "24"], "--devices"),
        (["--devices", "1", "--device-gb", "-3"], "--device-gb"),
        (["--devices", "1", "--device-gb", "1e300"], "--device-gb"),
        (["--devices", "٣", "--device-gb", "80"], "--devices"),
        (["--devices", "1", "--device-gb", "24", "model.checkpoint=published/pi1"], "mean pi0"),
        (["--devices", "1", "--device-gb", "0.5"], "GB"),
    ],
)
def test_invalid_input_is_refused(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", "--quiet", "experiment=pi0_libero", *arguments]) == 2
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1
