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
__all__ += ["SELF_EXPLANATORY", "RolloutMismatch", "RunRefused", "TrainingError", "UsageError"]


class RunRefused(ConfigError):
    """Options that only a rollout shows to be wrong: the same command cannot succeed.

    They are refused although the run has begun.
    """


class RolloutMismatch(RunRefused):
    """The learner computes other numbers than the policy that acted, see ``ppo.agreement``.

    It refuses the network or engine.
    """


class PlacementError(ValueError):
    """A placement cannot be used; the message names role, devices, limit and hint."""


class UsageError(Exception):
    """A command line that no command accepts; one line with the hint."""


# Errors of options, files and simulators, whose message states the fix.
SELF_EXPLANATORY = (ConfigError, EnvError, PlacementError, CheckpointError)
