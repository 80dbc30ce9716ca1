"""Names of reward terms and commands of a task, read from its source without an import of torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path

import embodied_envs
from embodied_envs.base.errors import EnvError, choose
from embodied_ppo.options.schema import EnvConfig

# Statements of a class whose names are known without executing it.
PLAIN = (ast.FunctionDef, ast.Assign, ast.AnnAssign, ast.Expr, ast.Pass)


def check(env: EnvConfig, copies: Collection[Path] = ()) -> None:
    """Refuse names in ``env.rewards`` and ``env.commands`` that the task's source lacks.

    The task checks them, too, when it is created. Here sources that do not show all names, such as
    classes with computed members, are accepted.

    Args:
        env: Options.
        copies: Copies of the task's source that a run keeps; they count unless they differ.

    Raises:
        EnvError: A name is unknown; the message names those that exist.
    """
    if not (env.rewards or env.commands) or not isinstance(env.id, str):
        return
    try:
        family = _family(env.id, copies)
    except (OSError, SyntaxError, ValueError, ImportError):  # reported when it is imported
        return
    if not any(c.name == "TermTask" for c in family):
        return
    terms: dict[str, set[str]] = {}
    members: set[str] = set()
    for node in (node for c in family for node in c.body):
        if isinstance(node, ast.FunctionDef):
            if [x.arg for x in node.args.args[1:4]] == ["before", "s", "action"]:
                numbers = {x.arg for x in node.args.kwonlyargs}
                terms[node.name] = terms.get(node.name, {"weight"}) | numbers
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            members |= {x.id for x in targets if isinstance(x, ast.Name)}
    terms = {k: x for k, x in terms.items() if k not in ("reward", "reward_terms")}
    for name, values in env.rewards.items():
        if name in members:  # a term may be assigned in the class
            continue
        _check_known(env.id, f"env.rewards.{name}", name, terms)
        for key in values if isinstance(values, Mapping) else ():
            _check_known(env.id, f"env.rewards.{name}.{key}", key, terms[name])
    commands = _commands(family)
    for name in env.commands if commands else ():
        _check_known(env.id, f"env.commands.{name}", name, commands)


def _check_known(id: str, option: str, name: str, names: Collection[str]) -> None:
    """Raise EnvError unless an option's last part is one of ``names``."""
    if name not in names:
        known = choose(name, sorted(names), "there are ")
        raise EnvError(f"{known}: env.id={id}: {option} is unknown")


@functools.cache
def _own_classes() -> dict[str, ast.ClassDef]:
    """Return the classes of this package's tasks by name."""
    folder = Path(embodied_envs.__file__).parent
    files = (*sorted(folder.glob("robots/*.py")), *sorted(folder.glob("tasks/*.py")))
    nodes = [node for file in files for node in ast.parse(file.read_bytes()).body]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _family(id: str, copies: Collection[Path]) -> list[ast.ClassDef]:
    """Return the class of a task and its base classes; [] if one of them is not found."""
    module, _, name = id.rpartition(":")
    own, classes = set(_own_classes()), dict(_own_classes())
    if module:
        if "." in module:
            return []
        sources = {file.read_bytes() for file in copies if file.stem == module}
        if not copies and (spec := importlib.util.find_spec(module)) and spec.origin:
            sources = {Path(spec.origin).read_bytes()}
        if len(sources) != 1:
            return []
        for node in ast.parse(sources.pop()).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
                own.discard(node.name)
            if isinstance(node, ast.ImportFrom):
                inside = str(node.module).startswith("embodied_envs.")
                for alias in node.names:
                    classes.pop(alias.asname or alias.name, None)
                    if inside and alias.name in own:
                        classes[alias.asname or alias.name] = _own_classes()[alias.name]
    family: list[ast.ClassDef] = []
    waiting = [name]
    while waiting:
        node = classes.get(waiting.pop())
        if node in family:
            continue
        if node is None or node.decorator_list or node.keywords:
            return []
        members = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
        if not all(isinstance(x, PLAIN) for x in node.body):
            return []
        if node.name not in own and "available_terms" in members:
            return []
        family.append(node)
        bases = [ast.unparse(x).rpartition(".")[2] for x in node.bases]
        waiting += [base for base in bases if base != "ABC"]
    return family


def _commands(family: list[ast.ClassDef]) -> set[str]:
    """Return the keys of the classes' literal ``commands``; none where one is computed."""
    names: set[str] = set()
    for node in (node for c in family for node in ast.walk(c)):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if not any(ast.unparse(x).rpartition(".")[2] == "commands" for x in targets):
                continue
            keys = node.value.keys if isinstance(node.value, ast.Dict) else [None]
            if not all(isinstance(key, ast.Constant) for key in keys):
                return set()
            names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return names
