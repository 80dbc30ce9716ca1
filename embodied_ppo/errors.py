"""What can be refused or fail: each message names path, value, limit and cure in one line. Imports nothing."""

from __future__ import annotations


class ConfigError(ValueError):
    """A refused option."""


class PlacementError(ValueError):
    """A refused placement: names role, devices, limit and cure."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: names the file, what is wrong with it and the cure."""


class EnvError(ValueError):
    """A simulator that is missing or breaks its contract: names id, limit and cure."""


class TrainingError(RuntimeError):
    """Training stopped by itself (non-finite loss, dead simulator): names cause and dump."""
