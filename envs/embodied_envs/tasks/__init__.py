"""Our own tasks, one file per robot.

Belongs here: what a task's model, observation, reward and episodes are, in tensor functions, and
the scripted expert of Tabletop.

Does not belong here: stepping and rendering (``physics``).

To add a task, write a subclass of ``Task`` in a module of this folder, and add it to
``registration.OWN``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Mapping
from typing import Any

from embodied_envs.adapters.user_code import import_user_module, wrap_errors
from embodied_envs.base.errors import EnvError, check_keys, check_range, show
from embodied_envs.registration import OWN
from embodied_envs.tasks.task import State, Task

__all__ = ["OWN", "State", "Task", "find", "make"]


def find(id: str) -> type[Task] | None:
    """Return the class of a task, or None if ``id`` names none.

    Args:
        id: A key of ``OWN``, or "package.module:Class" for a task of the user.

    Raises:
        EnvError: The module cannot be imported, or the class is no subclass of ``Task``.
    """
    if id in OWN:
        module, _, name = OWN[id][0].partition(":")
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
        raise EnvError(f"inherit from embodied_envs.tasks.Task: env.id={id} is like a task")
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
    members = vars(sys.modules[module]).items()
    classes = [k for k, x in members if isinstance(x, type) and issubclass(x, Task) and x != Task]
    known = ", ".join(classes) or "no subclass of embodied_envs.tasks.Task"
    return f"; {module} has no {name!r}, it has {known}"


def make(
    id: str,
    task_class: type[Task],
    kwargs: Mapping[str, Any],
    commands: Mapping[str, Any] | None = None,
    rewards: Mapping[str, Any] | None = None,
) -> Task:
    """Create the task with the user's options: arguments, ranges of commands, terms of the reward.

    Raises:
        EnvError: The class lacks a function, does not take an option, or fails.
    """
    parameters = inspect.signature(task_class).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        check_keys(f"env.id={id}: env.kwargs", kwargs, parameters)
    for name in kwargs.keys() & parameters.keys():
        if isinstance(parameters[name].default, bool) and not isinstance(kwargs[name], bool):
            value = f"env.kwargs.{name}={show(kwargs[name])}"
            raise EnvError(f"write true or false: env.id={id}: {value}")  # "no" would be true
    with wrap_errors(f"env.id={id}: env.kwargs={kwargs}: "):
        task = task_class(**kwargs)
    if commands:
        check_keys(f"env.id={id}: env.commands", commands, task.commands)
        for name, bounds in commands.items():
            check_range(f"env.id={id}: env.commands.{name}", bounds)
        task.commands = {**task.commands, **{k: (x[0], x[1]) for k, x in commands.items()}}
    if rewards:
        task.rewards = _changed_rewards(id, task, rewards)
    return task


def _changed_rewards(
    id: str, task: Task, changes: Mapping[str, Any]
) -> dict[str, dict[str, float]]:
    """Return ``task.rewards`` with changed weights and parameters; EnvError if one is invalid."""
    rewards, terms = {name: dict(x) for name, x in task.rewards.items()}, task.available_terms()
    check_keys(f"env.id={id}: env.rewards", changes, terms)
    for name, values in changes.items():
        option = f"env.rewards.{name}"
        if not isinstance(values, Mapping):
            number = values if isinstance(values, (int, float)) else 1
            raise EnvError(f"write {option}.weight={number}: env.id={id}: {option}={show(values)}")
        parameters = inspect.signature(terms[name]).parameters.values()
        numbers = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
        check_keys(f"env.id={id}: {option}", values, ["weight", *numbers])
        for key, x in values.items():
            if isinstance(x, bool) or not isinstance(x, (int, float)) or not math.isfinite(x):
                raise EnvError(f"write a finite number: env.id={id}: {option}.{key}={show(x)}")
        rewards[name] = rewards.get(name, {}) | dict(values)
        if "weight" not in rewards[name]:
            raise EnvError(f"write {option}.weight: env.id={id}: the term has no weight")
    return rewards
