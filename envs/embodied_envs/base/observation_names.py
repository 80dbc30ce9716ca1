"""Names of observations, and what a name in an option means. This module loads no torch."""

from __future__ import annotations

# Name of an observation that is one array.
SINGLE = "obs"
# Name of the observation that is an index into the simulator's sentences.
INSTRUCTION = "instruction"
# Name of the observation that is the one-hot index of the task, where there are several.
TASK = "task"
# Name of the observation that marks the possible values of all choices, bool [N, K]. The policy
# gives the others probability 0, and its networks do not read it.
ACTION_MASK = "action_mask"


def names_observation(key: str, name: str) -> bool:
    """Return whether ``key`` of a list of observations names ``name``: "a" names a, a/b and a/c."""
    return name == key or name.startswith(f"{key}/")
