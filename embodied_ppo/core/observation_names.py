"""Names of observations, and what a name in an option means. This module loads no torch."""

from __future__ import annotations

INSTRUCTION = "instruction"
"""Name of the observation that is an index into the simulator's sentences."""


def names_observation(key: str, name: str) -> bool:
    """Return whether ``key`` of a list of observations names ``name``: "a" names a, a/b and a/c."""
    return name == key or name.startswith(f"{key}/")
