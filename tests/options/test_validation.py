"""Comparison of options: combinations that are refused, and options that are not read."""

from __future__ import annotations

from typing import Any

import pytest
from run_helpers import assert_refused, nested, tables

from embodied_envs import tasks
from embodied_envs.base.errors import ConfigError, EnvError, show
from embodied_ppo.options import loader, term_names, validation
from embodied_ppo.options.schema import Config, EnvConfig
from tests.options.test_loader import refused

TABLES = tables(__file__)
CONFLICTS: list[tuple[dict[str, Any], str]] = TABLES["conflicts"]


@pytest.mark.parametrize(("flat", "line"), CONFLICTS)
def test_conflicting_options_are_refused(flat: dict[str, Any], line: str) -> None:
    message = refused(Config, flat)
    for part in line.split(" .. "):
        assert part in message


@pytest.mark.parametrize("flat", TABLES["accepted"])
def test_compatible_options_are_accepted(flat: dict[str, Any]) -> None:
    loader.load(Config, nested(flat))


# Option -> a value, options with which it is not read, options with which it is read.
UNREAD: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = TABLES["unread"]


@pytest.mark.parametrize("path", UNREAD)
def test_option_that_is_not_read_is_refused(path: str) -> None:
    value, unread, read = UNREAD[path]
    line = refused(Config, {**unread, path: value})
    for part in (path, show(value), f"remove {path}"):
        assert part in line
    loader.load(Config, nested({**read, path: value}))


def test_check_refuses_unread_defaults_only_if_explicit() -> None:
    validation.check(Config())
    with pytest.raises(ConfigError, match=r"desired_kl = 0\.01"):
        validation.check(Config(), explicit={"algorithm.desired_kl"})
    validation.check(Config(), explicit={"algorithm.whiten_rewards"})  # false switches it off


MINE = """
from embodied_envs.robots.rough_terrain import RoughTerrain
from embodied_envs.tasks.go1 import Go1Joystick as Base

class Mine(RoughTerrain, Base):
    def fast(self, before, s, action, *, limit=1.0):
        return s["qvel"].square().sum(1)

class Other(Mine):
    assigned = Mine.fast

class Computed(Mine):
    if True:
        def hidden(self, before, s, action): ...
"""


@pytest.mark.parametrize(
    "id", ["Go1Rough", "PandaPickCube", "named_terms:Mine", "named_terms:Other"]
)
def test_names_of_terms_in_the_source_are_those_of_the_task(id: str, tmp_path, monkeypatch) -> None:
    (tmp_path / "named_terms.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    task_class = tasks.find(id)
    assert task_class is not None
    task = tasks.make(id, task_class, {})
    terms = {name: {"weight": 1.0} for name in task.available_terms()}
    term_names.check(EnvConfig(id=id, rewards=terms, commands=dict(task.commands)))
    for wrong in ({"rewards": {"none": {}}}, {"commands": {"none": (0, 1)}}):
        with pytest.raises(EnvError, match=r"\.none is unknown"):
            term_names.check(EnvConfig(id=id, **wrong))
    # Names that the source does not show are accepted here.
    term_names.check(EnvConfig(id="named_terms:Computed", rewards={"hidden": {"weight": 1.0}}))


@pytest.mark.parametrize("place", [".", "checkpoints/step_000002"])
def test_evaluate_refuses_names_that_the_runs_copy_of_the_task_lacks(
    place: str, tmp_path, monkeypatch, capsys
) -> None:
    """The file on the path has changed since the training."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "changed_terms.py").write_text(MINE.replace("fast", "slow"))
    copy, run = tmp_path / "run/task/1f/files/changed_terms.py", tmp_path / "run" / place
    copy.parent.mkdir(parents=True)
    run.mkdir(parents=True, exist_ok=True)
    copy.write_text(MINE)
    (run / "config.yaml").write_text("env: {id: 'changed_terms:Mine'}")
    evaluate = ["evaluate", f"checkpoint={run}"]
    for option, name in (
        ("env.rewards.slow.weight=1", "fast"),
        ("env.commands.x=[0,1]", "lin_vel_x"),
    ):
        path = option.split("=")[0].removesuffix(".weight")
        assert_refused(capsys, [*evaluate, option], f"{path} .. {name}")
    for option in (
        "env.rewards.fast.weight=1",
        "env.rewards.slow.weight=1 allow_changed_task=true",
    ):
        line = assert_refused(capsys, [*evaluate, *option.split()])
        assert "unknown" not in line, "the folder holds no checkpoint"


def test_shipped_options_may_remain_unread() -> None:
    def deliberate(label: str, flat: dict[str, Any]) -> frozenset[str]:
        return loader.read(
            Config, [(label, nested(flat)), ("flag", nested(TABLES["no_value"]))]
        ).deliberate({"flag"})

    file = {"critic.lr": 0.1, "env.id": "Hopper-v4"}
    assert "critic.lr" in deliberate("my.yaml", file)
    assert "critic.lr" not in deliberate("configs/experiment/x.yaml", file)
    assert "critic.lr" not in deliberate(f"{loader.STORED}, run/config.yaml", file)
    assert "env.id" in deliberate("configs/experiment/x.yaml", file)  # the other mode's
