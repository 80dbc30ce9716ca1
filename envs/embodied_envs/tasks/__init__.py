"""Our own tasks, one file per robot.

Belongs here: what a task's model, observation, reward and episodes are, in tensor functions, and
the scripted expert of Tabletop.

Does not belong here: stepping and rendering (``physics``).

To add a task, write a subclass of ``Task`` in a module of this folder, add it to ``OWN``, and add
its time limit to ``registration.MAX_EPISODE_STEPS``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from typing import Any

from embodied_envs.adapters.user_code import import_user_module, wrap_errors
from embodied_envs.base.errors import EnvError, choose
from embodied_envs.tasks.task import State, Task

__all__ = ["OWN", "State", "Task", "find", "make"]

OWN: dict[str, str] = {
    "HalfCheetah": "locomotion:HalfCheetah",
    "Hopper": "locomotion:Hopper",
    "Walker2d": "locomotion:Walker2d",
    "Ant": "locomotion:Ant",
    "Humanoid": "locomotion:Humanoid",
    "PandaPickCube": "panda:PandaPickCube",
    "Go1Joystick": "go1:Go1Joystick",
    "Go1Rough": "go1_rough:Go1Rough",
    "Tabletop": "tabletop:Tabletop",
}
"""env.id -> "module:Class" in this package."""


def find(id: str) -> type[Task] | None:
    """Return the class of a task, or None if ``id`` names none.

    Args:
        id: A key of ``OWN``, or "package.module:Class" for a task of the user.

    Raises:
        EnvError: The module cannot be imported, or the class is no subclass of ``Task``.
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
    """Return the end of the message about an unknown id: how the id of a user's task is written.

    No module is imported here, because ``find`` has imported that of "package.module:Class".
    """
    module, _, name = id.rpartition(":")
    if not module:
        if name.isidentifier() and importlib.util.find_spec(name) is not None:
            return f"; a task of yours is named {name}:Class"
        return f"; if a module of yours registers it with Gymnasium, write env.id=module:{name}"
    if module not in sys.modules:
        return ""
    classes = [
        member
        for member, x in vars(sys.modules[module]).items()
        if isinstance(x, type) and issubclass(x, Task) and x is not Task
    ]
    return (
        f"; {module} has no {name!r}, it has"
        f" {', '.join(classes) or 'no subclass of embodied_envs.tasks.Task'}"
    )


def make(id: str, task_class: type[Task], kwargs: dict[str, Any]) -> Task:
    """Create the task with the user's options.

    Raises:
        EnvError: The class lacks a function, does not take an option, or fails.
    """
    parameters = inspect.signature(task_class).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_any and (unknown := [name for name in kwargs if name not in parameters]):
        choices = "the task takes none"
        if parameters:
            choices = choose(unknown[0], list(parameters), "there are ")
        raise EnvError(f"env.id={id}: env.kwargs.{unknown[0]} is unknown; {choices}")
    with wrap_errors(f"env.id={id}: env.kwargs={kwargs}: "):
        return task_class(**kwargs)
