"""The only mapping from the value of the option ``mode`` to its implementation."""

from __future__ import annotations

from collections.abc import Mapping

from embodied_ppo.config.schema import Config
from embodied_ppo.modes.base import Mode
from embodied_ppo.modes.embodied.mode import EmbodiedMode
from embodied_ppo.modes.reasoning.mode import ReasoningMode

MODES: Mapping[str, Mode] = {mode.name: mode for mode in (EmbodiedMode(), ReasoningMode())}


def mode(config: Config) -> Mode:
    """Return the implementation of ``config.mode``."""
    return MODES[config.mode]
