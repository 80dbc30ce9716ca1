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
def test_devices_time_and_command(capsys: pytest.CaptureFixture[str], sizes: str) -> None:
    one = plan(capsys, *SMALL, sizes, "--devices", "1", "--device-gb", "80")
    two = plan(capsys, *SMALL, sizes, "--devices", "2", "--device-gb", "80")
    assert (one["placement"], two["placement"]) == ("local", "fused")
    assert one["device"] == two["device"] == "H100 SXM"
    # 128 decisions of 2 steps, 16 cores of 10 steps/s
    assert one["seconds"]["simulate"] == 2 * two["seconds"]["simulate"] == 1.6
    assert two["seconds"]["exchange"] > one["seconds"]["exchange"] == 0
    assert one["operations"] == two["operations"] > 1e9
    assert one["seconds"]["low"] < one["seconds"]["total"] < one["seconds"]["high"]
    changes = {"placement": "fused", "cluster.devices_per_node": 2}
    assert two["changes"] == changes and not one["changes"]
    command = shlex.split(two["command"])
    assert command[-2:] == ["placement=fused", "cluster.devices_per_node=2"]
    assert sizes in command
    assert main.main(["plan", *SMALL, sizes, "--devices", "1", "--device-gb", "30"]) == 0
    out = capsys.readouterr().out
    assert "cuda 0" in out and "experience" in out and "0.5 GB of each process for CUDA" in out
    assert "not predicted" in out, "no data sheet of such a device"


@pytest.mark.slow
def test_small_devices_get_smaller_micro_batches(
    capsys: pytest.CaptureFixture[str], sizes: str
) -> None:
    large = plan(capsys, *SMALL, sizes, "--devices", "1", "--device-gb", "80")
    need = large["needs"]["env,rollout,actor"]
    total = sum(need.values()) - need["activations"] * 0.4 + 5e8
    small = plan(capsys, *SMALL, sizes, "--devices", "1", "--device-gb", str(total / 0.92 / 1e9))
    assert small["micro_batch"] == small["changes"]["algorithm.micro_batch_size"] == 8


@pytest.mark.slow
def test_refusal_names_the_smallest_change(capsys: pytest.CaptureFixture[str], sizes: str) -> None:
    """Experience grows with env.num_envs, and alone exceeds this device."""
    options = [*SMALL, sizes, "algorithm.horizon=64", "--devices", "1", "--device-gb"]
    need = plan(capsys, *options, "80")["needs"]["env,rollout,actor"]
    fixed = sum(need[name] for name in ("weights", "gradients", "optimiser", "experience"))
    assert main.main(["plan", *options, str((fixed + 5e8) / 0.92 / 1e9 - 1e-4)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "the smallest change that fits: env.num_envs=8, which makes an update of 512" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "2"], "--devices: needs --device-gb, too; add --device-gb 80"),
        (["--device-gb", "24"], "--device-gb: needs --devices, too; add --devices 1"),
        (["--devices", "0", "--device-gb", "24"], "0 is not an integer from 1 to 1024"),
        (["--devices", "1", "--device-gb", "-3"], "-3 is not a number of GB from 0.1 to"),
        (["--devices", "1", "--device-gb", "1e300"], "1e300 is not a number of GB from 0.1 to"),
        (["--devices", "1", "--device-gb", "1e-9"], "1e-9 is not a number of GB from 0.1 to"),
        (["--devices", "٣", "--device-gb", "80"], "is not an integer from 1 to 1024"),
        (
            ["--devices", "1", "--device-gb", "24", "model.checkpoint=published/pi1"],
            "model.checkpoint=published/pi1: did you mean pi0",
        ),
        (
            ["--devices", "1", "--device-gb", "24", "experiment=arithmetic"],
            "plans robot policies, and mode=reasoning",
        ),
    ],
)
def test_invalid_input_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = [] if "experiment=arithmetic" in arguments else ["experiment=pi0_libero"]
    assert main.main(["plan", *recipe, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_environments_that_cannot_be_divided_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message proposes a number of environments, and no device with more memory."""
    assert main.main(["plan", "experiment=quickstart", "--devices", "3", "--device-gb", "24"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: env.num_envs = 64: cannot be divided evenly over 3 processes")
    assert error.endswith("; write env.num_envs=63\n")
