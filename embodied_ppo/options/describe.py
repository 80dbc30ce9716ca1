"""What the schema says about options: type, limit, default, meaning; the nearest name of one that
does not exist.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from embodied_envs.base.errors import join_names, nearest, show
from embodied_ppo.options.aliases import ALIASES, SIMILAR
from embodied_ppo.options.readers import mode_of
from embodied_ppo.options.schema import Config

# Option of ROLL: true sets clip_ratio_c = 1 + 2 x clip_ratio_high, false sets it to null.
DUAL_CLIP = "algorithm.dual_clip_loss"


@dataclass(frozen=True)
class Option:
    """Documentation of one option."""

    path: str
    meaning: str
    type: str
    limit: str
    default: Any
    # The resolved annotation of the field.
    hint: Any

    @property
    def allowed(self) -> str:
        return f"{self.type} {self.limit}".strip()


def not_none(hint: Any) -> Any:
    """Return the type of ``X | None``, which is X; another type is returned unchanged."""
    if get_origin(hint) in (Union, types.UnionType):
        alternatives = [a for a in get_args(hint) if a is not types.NoneType]
        return alternatives[0] if len(alternatives) == 1 else hint
    return hint


def base_of(hint: Any) -> Any:
    """Return a type without its bounds."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def allowed_values(hint: Any) -> str:
    """Return the allowed values as text: ``a number >= 0 and <= 1, or null``."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        texts = ["null" if a is types.NoneType else allowed_values(a) for a in arguments]
        return ", or ".join(dict.fromkeys(texts))
    if kind is Annotated:
        return f"{allowed_values(arguments[0])} {' and '.join(str(a) for a in arguments[1:])}"
    if kind is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if kind is tuple:
        return f"a list, each {allowed_values(arguments[0])}"
    if kind is dict:
        limit = f", each {allowed_values(x)}" if get_origin(x := arguments[1]) is Annotated else ""
        return f"a section of names and values{limit}"
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    return names.get(hint, str(hint))


# --------------------------------------------------------------------------------------- suggestion
def suggest(cls: type, raw: str) -> str:
    """Return a valid name and its allowed values: that of another section, else a similar one."""
    options = describe(cls)
    known = {**{p: (p,) for p in options}, **alias_paths(cls)}
    section, _, leaf = raw.rpartition(".")
    if cls is Config and (path := SIMILAR.get(leaf)):
        return f"did you mean {path}{_meaning_of(path, known)}?" + _values_of(options, known[path])
    same_name = [p for p in known if p.rpartition(".")[2] == leaf]
    if same_name:
        paths = " or ".join(f"{p}{_meaning_of(p, known)}" for p in same_name[:2])
        return f"{leaf} belongs to {paths}" + _values_of(options, known[same_name[0]])
    siblings = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == section}
    all_names = {p.rpartition(".")[2]: p for p in reversed(known)}  # the first path of a name
    # A long section that is right makes every short name in it similar. Without a section, paths
    # with a short one are the most similar.
    candidates = {} if section in sections(cls) else known
    wider = [(candidates, raw, 0.75), (all_names, leaf, 0.75)]
    for names, text, cutoff in ((siblings, leaf, None), *(wider if section else wider[::-1])):
        if near := nearest(text, names, cutoff=cutoff):
            path = near if names is candidates else str(names[near])
            question = f"did you mean {path}{_meaning_of(path, known)}?"
            return question + _values_of(options, known[path])
    home = section if section in sections(cls) else ""
    return f"{home or 'the top level'} has: {join_names(members(cls, home))}"


def _meaning_of(path: str, known: Mapping[str, tuple[str, ...]]) -> str:
    """Return the canonical names of an alias, in parentheses."""
    return "" if known[path] == (path,) else f" (= {', '.join(known[path])})"


def _values_of(options: Mapping[str, Option], targets: Sequence[str]) -> str:
    """Return allowed values and default, in parentheses."""
    option, mode = options[targets[0]], mode_of(targets[0])
    reader = f"; only mode={mode} reads it" if mode else ""
    return f" ({option.allowed}; default {show(option.default)}{reader})"


def members(cls: type, section: str) -> list[str]:
    """Return the names directly under a section."""
    prefix = f"{section}." if section else ""
    names = (p.removeprefix(prefix) for p in describe(cls) if p.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


# ------------------------------------------------------------------------------------------- schema
@cache
def field_types(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def describe(cls: type, prefix: str = "") -> dict[str, Option]:
    """Return path -> Option in the order of the source.

    The meaning of an option is the string under its field.
    """
    meanings = _meanings(inspect.getfile(cls))[cls.__name__]
    result: dict[str, Option] = {}
    for f in fields(cls):
        hint, path = field_types(cls)[f.name], prefix + f.name
        if is_dataclass(hint) and isinstance(hint, type):
            result |= describe(hint, f"{path}.")
            continue
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        plain = not_none(hint)
        limits = get_args(plain)[1:] if get_origin(plain) is Annotated else ()
        limit = " and ".join(map(str, limits))
        if hint is not plain:
            limit = f"{limit} or null".strip()
        kind = allowed_values(base_of(plain))
        result[path] = Option(path, meanings.get(f.name, ""), kind, limit, default, hint)
    return result


@cache
def _meanings(path: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> the string under the field, which exists in the source only.

    The file is parsed once. ``inspect.getsource`` would parse it again for each class.
    """
    with open(path, "rb") as file:
        nodes = ast.walk(ast.parse(file.read()))
    return {node.name: _strings(node) for node in nodes if isinstance(node, ast.ClassDef)}


def _strings(body: ast.ClassDef) -> dict[str, str]:
    """Return field -> the string under it."""
    meanings: dict[str, str] = {}
    for node, following in itertools.pairwise(body.body):
        match node, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(meaning))),
            ):
                meanings[name] = meaning
    return meanings


@cache
def sections(cls: type) -> frozenset[str]:
    """Return the paths that contain options: env, algorithm, algorithm.kl_ctrl, ..."""
    parents = (p.split(".")[:-1] for p in describe(cls))
    return frozenset(".".join(parts[: i + 1]) for parts in parents for i in range(len(parts)))


@cache
def alias_paths(cls: type) -> dict[str, tuple[str, ...]]:
    """Return every alias of ``cls`` as a full path -> the canonical paths that it sets."""
    options = describe(cls)
    paths: dict[str, tuple[str, ...]] = {}
    for section, table in ALIASES.items():
        dot = f"{section}." if section else ""
        for alias, names in table.items():
            if all(dot + name in options for name in names):
                paths[dot + alias] = tuple(dot + name for name in names)
    if cls is Config:
        paths[DUAL_CLIP] = ("algorithm.clip_ratio_c",)
    return paths
