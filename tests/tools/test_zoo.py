"""The robots of docs/zoo.md: one command writes the experiment whose results the page states."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import run_helpers
import yaml

from embodied_envs.robots.robot_model import RobotModel
from embodied_ppo.commands import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
# Template and robot of each experiment that was not trained.
PREPARED = [
    (template, robot)
    for template, cell in re.findall(
        r"^\| (velocity|reach)\b.* \| (`.*`) \|$", PAGE.read_text(), re.M
    )
    for robot in re.findall("`(.*?)`", cell)
]


def rows() -> list[list[str]]:
    """Return the cells of the page's rows of robots: they start with a name."""
    lines = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line[:3] == "| `"]
    return [cells for line in lines if len(cells := [cell.strip(" `") for cell in line]) > 2]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_the_command_writes_what_the_page_states(
    row: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot, kp, scale = row[:3]
    name = f"zoo_{robot.split('_')[0]}"
    monkeypatch.chdir(tmp_path)
    assert main.main(["new-task", name, "--template", "velocity", "--robot", robot]) == 0
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


@pytest.mark.slow
@pytest.mark.parametrize(("template", "robot"), PREPARED)
def test_prepared_robots_hold_home_and_train(
    template: str,
    robot: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, configs = f"prepared_{robot}", str(tmp_path / "task" / "configs")
    monkeypatch.chdir(tmp_path)
    command = ["new-task", name, "--robot", robot, "--template", template, "--out", "task"]
    assert main.main(command) == 0
    assert "diverges" not in capsys.readouterr().out
    monkeypatch.syspath_prepend(tmp_path / "task")
    small = run_helpers.words("""env.num_envs=4 algorithm.horizon=16 updates=2 run_dir=run
        algorithm.global_batch_size=32 evaluation.episodes=1 evaluation.num_envs=1
        evaluation.video_episodes=0 env.max_episode_steps=20 compile=never""")
    train = ["train", "--quiet", "--config-dir", configs, f"experiment={name}_gpu"]
    assert main.main([*train, *small]) == 0
    assert json.loads(Path("run/summary.json").read_text())["updates"] == 2
