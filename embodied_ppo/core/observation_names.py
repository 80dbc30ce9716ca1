"""Which observations a name in an option means. This module loads no torch."""

from __future__ import annotations


def names_observation(key: str, name: str) -> bool:
    """Return whether ``key`` of a list of observations names ``name``: "a" names a, a/b and a/c."""
    return name == key or name.startswith(f"{key}/")
