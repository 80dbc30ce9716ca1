"""What ``embodied_envs.make`` refuses: the message names the option, its value and a hint."""

from __future__ import annotations

from typing import Any

import pytest
import toy_envs
from run_helpers import tables

import embodied_envs
from embodied_ppo.core.types import EnvError

# Environment, options of ``make``, and what the message must name in this order.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *tables(__file__)["refused"],
    ("PandaPickCube-v1", {"num_envs": 20_000, "seeds": list(range(20_000))}, "num_envs.*20000.*GB"),
    (
        "toy_envs:Balance",
        {"kwargs": {"mjcf": toy_envs.BALANCE.replace('joint="slide" g', 'joint="glide" g')}},
        "glide",
    ),
]


@pytest.mark.parametrize(
    ("id", "options", "named"), REFUSED, ids=[f"{row[0]}-{i}" for i, row in enumerate(REFUSED)]
)
def test_message_names_the_option_in_one_line(id: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvError, match=named) as error:
        embodied_envs.make(id, **{"num_envs": 2, "seeds": [0, 1], **options})
    assert "\n" not in str(error.value) or "mjcf" in options["kwargs"], "a message of MuJoCo"
