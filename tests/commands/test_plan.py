"""Tests of `embodied-ppo plan --devices N --device-gb GB`: machines that are not here."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
import run_helpers
from tiny_smolvla_checkpoint import write_checkpoint

from embodied_ppo.commands import main
from embodied_ppo.options import compose, placement, validation
from embodied_ppo.options.placement import Hardware

SMALL = run_helpers.words("""experiment=smolvla_libero env.image_size=16 env.num_envs=16
    env.action_chunk=2 model.flow_steps=2 algorithm.horizon=8 algorithm.global_batch_size=64
    algorithm.micro_batch_size=16""")


@pytest.fixture
def sizes(tmp_path) -> str:
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
def test_devices_and_command(capsys, sizes: str) -> None:
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
    # The command has the planned machine, not that of the arguments.
    other = ["experiment=cartpole", "device=cpu", "placement=fused", "cluster.num_nodes=2"]
    command = plan(capsys, *other, "--devices", "2", "--device-gb", "80")["command"]
    assert shlex.split(command)[-4:-1] == ["device=cuda", "placement=fused", "cluster.num_nodes=1"]


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
def test_invalid_input_is_refused(arguments: list[str], named: str, capsys) -> None:
    command = ["plan", "--quiet", "experiment=pi0_libero", *arguments]
    run_helpers.assert_refused(capsys, command, named)


VLA_EXPERIMENTS = ["pi0_libero", "pi05_libero", "smolvla_libero", "openvla_7b", "openvla_oft"]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", VLA_EXPERIMENTS)
@pytest.mark.parametrize(("devices", "gb"), [("1", "40"), ("8", "80")])
def test_train_accepts_the_printed_command(experiment: str, devices: str, gb: str, capsys) -> None:
    """All options of the command are composed and compared, as ``train`` does before it loads."""
    pytest.importorskip("transformers")
    machine = ["--devices", devices, "--device-gb", gb]
    line = shlex.split(plan(capsys, "--quiet", f"experiment={experiment}", *machine)["command"])
    assert line[:2] == ["embodied-ppo", "train"] and "model.checkpoint=DIR" in line
    args = main.parse_arguments(line[1:])
    config: Any = compose.prepare(args, args.overrides).config
    assert config.model.checkpoint == "DIR"
    if config.placement != "local":
        hardware = Hardware((int(devices),), "cuda", memory=int(float(gb) * 1e9))
        placement.plan(config.placement, hardware, roles=validation.roles(config))
