"""The robots of docs/zoo.md: one command writes the experiment whose results the page states."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import yaml

from embodied_envs.robots.robot_model import RobotModel
from embodied_envs.tasks.panda import asset_file
from embodied_ppo.commands import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"


def rows() -> list[list[str]]:
    """Return the cells of the page's rows of robots: they start with a file."""
    lines = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    return [[cell.strip(" `") for cell in line] for line in lines]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_command_writes_what_the_page_states(
    row: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, kp, scale = row[:3]
    name = f"zoo_{file.split('_')[0]}"
    monkeypatch.chdir(tmp_path)
    mjcf = str(asset_file(f"mujoco_menagerie/{file}"))
    command = ["new-task", name, "--template", "velocity", "--mjcf", mjcf]
    assert main.main(command) == 0
    config = yaml.safe_load(Path(name, f"configs/experiment/{name}.yaml").read_text())
    assert f"{config['env_steps'] / 1e6:g} million steps" in PAGE.read_text()
    monkeypatch.syspath_prepend(name)
    module = importlib.import_module(name)
    task = getattr(module, config["env"]["id"].split(":")[1])()
    actuators = RobotModel(task.spec().compile()).actuators
    assert span([f"{a.kp:.0f}" for a in actuators]) == kp
    assert span([f"{a.scale:.2f}" for a in actuators]) == scale


def span(values: list[str]) -> str:
    """Return the least and the largest number, or the only one."""
    numbers = sorted(set(values), key=float)
    return numbers[0] if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
