"""What can be refused or fail: each message names path, value, limit and cure in one line. Imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


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


def choose(word: str, names: Sequence[str], intro: str) -> str:
    """``did you mean x?`` where one is near, and what there is."""
    near = difflib.get_close_matches(word, names, n=1)
    return (f"did you mean {near[0]}? " if near else "") + intro + (", ".join(names) or "none")
