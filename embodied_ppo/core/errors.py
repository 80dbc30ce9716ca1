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
__all__ += ["RolloutMismatch", "TrainingError", "UsageError"]


class RolloutMismatch(ConfigError):
    """The learner computes other numbers than the policy that acted, see ``ppo.agreement``.

    It refuses the network or engine, although the run has begun.
    """


class PlacementError(ValueError):
    """A placement cannot be used; the message names role, devices, limit and hint."""


class UsageError(Exception):
    """A command line that no command accepts; one line with the hint."""
