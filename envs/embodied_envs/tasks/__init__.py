"""Tasks of our own, one file per robot; an engine steps them (``mujoco_batch`` on a CPU,
``mujoco_warp`` on a GPU).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from typing import Any

from embodied_envs.adapters.user_code import import_user_module, wrap_errors
from embodied_envs.tasks.task import State, Task
from embodied_ppo.core.errors import choose
from embodied_ppo.core.types import EnvError

__all__ = ["OWN", "State", "Task", "find", "make"]

OWN: dict[str, str] = {
    "HalfCheetah": "locomotion:HalfCheetah",
    "Hopper": "locomotion:Hopper",
    "Walker2d": "locomotion:Walker2d",
    "Ant": "locomotion:Ant",
    "Humanoid": "locomotion:Humanoid",
    "PandaPickCube": "panda:PandaPickCube",
    "Go1Joystick": "go1:Go1Joystick",
    "Tabletop": "tabletop:Tabletop",
}
"""env.id -> where its class lies, in this package."""


def find(id: str) -> type[Task] | None:
    """The class of a task: one of ours, or the user's own as "package.module:Class"; None if it is
    neither.

    Raises EnvError if that module cannot be imported.
    """
    if id in OWN:
        module, _, name = OWN[id].partition(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    module, _, name = id.rpartition(":")
    if not module:
        return None
    value = getattr(import_user_module(id, module), name, None)
    if not isinstance(value, type):
        return None
    if issubclass(value, Task):
        return value
    if hasattr(value, "observe") and hasattr(value, "spec"):
        raise EnvError(
            f"env.id={id}: {name} is written like a task but is no subclass of"
            " embodied_envs.tasks.Task"
        )
    return None


def hint(id: str) -> str:
    """Return how the id of a task of the user's is written; "" where its module has been imported
    already.

    Nothing is imported here: ``find`` has imported the module of package.module:Class.
    """
    module, _, name = id.rpartition(":")
    if not module:
        if name.isidentifier() and importlib.util.find_spec(name) is not None:
            return f"; a task of yours is named {name}:Class"
        return f"; if a module of yours registers it with Gymnasium, write env.id=module:{name}"
    if module not in sys.modules:
        return ""
    members = vars(sys.modules[module])
    there = [
        k
        for k, x in members.items()
        if isinstance(x, type) and issubclass(x, Task) and x is not Task
    ]
    return (
        f"; {module} has no {name!r}, it has"
        f" {', '.join(there) or 'no subclass of embodied_envs.tasks.Task'}"
    )


def make(id: str, kind: type[Task], kwargs: dict[str, Any]) -> Task:
    """The task with the user's options; raises EnvError for one that it does not take, and for a
    task that lacks a function."""
    for name, function in inspect.getmembers(kind):
        if getattr(function, "__isabstractmethod__", False):
            raise EnvError(
                f"env.id={id}: {kind.__name__} has no {name}(); write one (every task has it)"
            )
    parameters = inspect.signature(kind).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := [name for name in kwargs if name not in parameters]):
        said = (
            choose(unknown[0], list(parameters), "there are ")
            if parameters
            else "the task takes none"
        )
        raise EnvError(f"env.id={id}: env.kwargs.{unknown[0]} is unknown; {said}")
    with wrap_errors(f"env.id={id}: env.kwargs={kwargs}: "):
        return kind(**kwargs)
