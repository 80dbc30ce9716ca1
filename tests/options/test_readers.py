"""Mode and conditions of options as the fields of the schema declare them, by example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embodied_ppo.options.readers import mode_of, readers, unread
from embodied_ppo.options.schema import Config, EvaluateConfig


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        ("env", "embodied"),
        ("env.id", "embodied"),  # from its section
        ("algorithm.horizon", "embodied"),
        ("algorithm.response_length", "reasoning"),
        ("critic.model.path", "reasoning"),  # from the section of its section
        ("algorithm.gamma", None),
        ("no.such.option", None),
    ],
)
def test_mode_of_an_option(path: str, mode: str | None) -> None:
    assert mode_of(path) == mode


def test_commands_declare_the_mode_separately() -> None:
    assert mode_of("allow_changed_task") is None
    assert mode_of("allow_changed_task", EvaluateConfig) == "embodied"


@pytest.mark.parametrize(
    ("path", "conditions"),
    [
        ("critic.lr", ["algorithm.adv_type=gae"]),  # of the section
        ("critic.model.path", ["algorithm.adv_type=gae"]),
        ("actor.model.architecture", ["actor.model.path=null"]),  # of this use of a shared section
        ("actor.model.path", []),
        ("critic", []),  # a section is no option
    ],
)
def test_conditions_of_an_option(path: str, conditions: list[str]) -> None:
    assert [condition.text for condition in readers()[path].conditions] == conditions


def test_conditions_of_one_mode_and_of_one_command() -> None:
    default = Config()
    grpo = replace(default, algorithm=replace(default.algorithm, adv_type="grpo"))
    assert "algorithm.value_clip" not in dict(unread(grpo, "embodied"))
    assert dict(unread(grpo, "reasoning"))["algorithm.value_clip"] == "algorithm.adv_type=gae"
    assert dict(unread(EvaluateConfig(video=False)))["video_episodes"] == "video=true"
    assert "video_episodes" not in dict(unread(EvaluateConfig()))
