"""Exceptions of the trainer, together with those of the simulators."""

from __future__ import annotations

from embodied_envs.base.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    ProcessLost,
    TrainingError,
)

__all__ = ["CheckpointError", "ConfigError", "EnvError", "PlacementError", "ProcessLost"]
__all__ += ["TrainingError", "UsageError"]


class PlacementError(ValueError):
    """A placement cannot be used; the message names role, devices, limit and hint."""


class UsageError(Exception):
    """A command line that no command accepts; one line with the hint."""
