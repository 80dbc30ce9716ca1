"""Dictionaries -> frozen dataclasses, strictly.

Each refusal is one line with the path, the value, the limit and the cure. ``read`` merges layers
(file, file, command line) into a typed config and records which layer set each option; ``load``
does that for one mapping and compares the options (``validation``); ``dump`` is the inverse;
``describe`` returns the documentation of the options.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import math
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from embodied_ppo.config.aliases import ALIASES, CURES, REFUSED, REMOVED, VALUE_ALIASES
from embodied_ppo.config.readers import mode_of
from embodied_ppo.config.schema import (
    BenchmarkConfig,
    Config,
    DemosConfig,
    EvaluateConfig,
    ExportConfig,
)
from embodied_ppo.config.validation import check
from embodied_ppo.core.errors import ConfigError, PlacementError, join_names, nearest, show

C = TypeVar("C")
Path = tuple[str, ...]
SHIPPED, STORED = "configs/", "the run's config.yaml"
"""Prefixes of the labels of layers that the user did not write."""
DUAL_CLIP = "algorithm.dual_clip_loss"
"""Option of ROLL: true sets clip_ratio_c = 1 + 2 x clip_ratio_high, false sets it to null."""


NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class _DualClip:
    """Placeholder for 1 + 2 x clip_ratio_high until all layers are merged."""

    def __repr__(self) -> str:
        return "1 + 2 x clip_ratio_high"


_DUAL_CLIP = _DualClip()


@dataclass(frozen=True)
class Option:
    """Documentation of one option."""

    path: str
    meaning: str
    type: str
    limit: str
    default: Any
    hint: Any
    """The resolved annotation of the field."""

    @property
    def allowed(self) -> str:
        return f"{self.type} {self.limit}".strip()


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A config and the origin of its options."""

    config: C
    origin: dict[str, str]
    """Canonical path of every option that was set -> label of the layer that set it."""
    aliases: tuple[tuple[str, str], ...]
    """Pairs (name as written, canonical name), each once."""
    missing: frozenset[str] = frozenset()
    """Options that are still ``???``; the config has their defaults."""

    def deliberate(self, always: Collection[str] = ()) -> frozenset[str]:
        """Return the options that must be read, because the user set them on purpose.

        These are options that differ from their default, and all options of the layers in
        ``always``. An option of a shipped file or a stored run counts only where it belongs to the
        other mode: with adv_type=grpo on the command line an experiment's critic.lr may remain
        unread.

        Args:
            always: Labels of layers whose options count in any case.
        """
        options = describe(type(self.config))
        mode = getattr(self.config, "mode", None)

        def counts(path: str, label: str) -> bool:
            if label in always:
                return True
            shipped = label.startswith((SHIPPED, STORED)) and mode_of(path) in (None, mode)
            return not shipped and attrgetter(path)(self.config) != options[path].default

        return frozenset(path for path, label in self.origin.items() if counts(path, label))


class _Values(yaml.SafeLoader):
    """Loader that refuses values which cannot be printed."""

    def construct_yaml_int(self, node: Any) -> int:
        value = super().construct_yaml_int(node)
        str(value)  # ValueError for 0xff.. of thousands of digits: no message could show it
        return value


_Values.add_constructor("tag:yaml.org,2002:int", _Values.construct_yaml_int)


class _Plain(_Values):
    """Loader that refuses aliases (``*name``), which can expand to any number of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias, which is not read{self.peek_event().start_mark}")
        return super().compose_node(parent, index)


def plain_yaml(text: str, *, aliases: bool = False) -> Any:
    """Return the plain values of a YAML text.

    Raises YAMLError, and no other exception, for any fault.
    """
    try:
        return yaml.load(text, _Values if aliases else _Plain)
    # PyYAML raises these for 2000-99-99, !!bool x, a deeply nested list and the like.
    except (
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RecursionError,
    ) as e:
        raise yaml.YAMLError(f"{type(e).__name__}: {e}") from e


# ------------------------------------------------------------------------------------------ reading
def load(cls: type[C], mapping: Mapping[str, Any], *, source: str | None = None) -> C:
    """Return a checked config from one mapping.

    Args:
        cls: Dataclass of the config.
        mapping: Nested options; missing ones keep their defaults.
        source: Label of the mapping in messages.

    Raises:
        ConfigError: An option is unknown, out of bounds, not read, or conflicts with others.
        PlacementError: The same, of a placement.
    """
    loaded = read(cls, [(source or "", mapping)])
    if isinstance(loaded.config, (Config, EvaluateConfig, ExportConfig, BenchmarkConfig)):
        check(loaded.config, explicit=loaded.deliberate())
    return loaded.config


def read(
    cls: type[C], layers: Sequence[tuple[str, Mapping[str, Any]]], *, partial: bool = False
) -> Loaded[C]:
    """Merge layers, the last wins. Types and bounds are checked, the options are not yet compared.

    Args:
        cls: Dataclass of the config.
        layers: Pairs (label, mapping), from weak to strong.
        partial: Accept options that are ``???``, whose value the user has yet to give.

    Raises:
        ConfigError: An option is unknown or out of bounds.
        PlacementError: The same, of a placement.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for label, mapping in layers:
        for target, value in _layer(cls, mapping, label, aliases).items():
            values[target] = _merged(values.get(target), value)
            origin[target] = label
    if values.get("algorithm.clip_ratio_c") is _DUAL_CLIP:
        values["algorithm.clip_ratio_c"] = _dual_clip(values, origin)
    missing = frozenset(path for path, value in values.items() if partial and value == "???")
    for path in missing:
        del values[path]
    config = _build(cls, (), values, origin)
    if isinstance(config, EvaluateConfig):
        config = replace(config, env=_read_env(config.env, origin.get("env", ""), aliases))
    return Loaded(config, origin, tuple(aliases.items()), missing)


def _layer(
    cls: type, mapping: Mapping[str, Any], label: str, aliases: dict[str, str]
) -> dict[str, Any]:
    """Return canonical path -> value of one layer; add the aliases in it to ``aliases``."""
    written: dict[str, tuple[str, Any]] = {}  # canonical path -> (path as written, value)
    for raw, plain in _leaves(cls, mapping, label):
        if raw in REMOVED and label.startswith(STORED):
            if plain == REMOVED[raw]:
                continue
            raise ConfigError(
                f"{raw} = {show(plain)}{_at(label)}: this version has no such option; use the"
                " version that trained the run"
            )
        targets, value = _canonical(cls, raw, plain, label, aliases)
        for target in targets:
            other_name, other = written.get(target, (raw, value))
            if other_name != raw and not _same(other, value):
                raise ConfigError(
                    f"{other_name} = {show(other)} and {raw} = {show(value)}{_at(label)} are the"
                    f" same option ({target}) with different values; keep one of them"
                )
            written[target] = (raw, value)
    return {target: value for target, (_, value) in written.items()}


def _leaves(cls: type, mapping: Any, label: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every option in a mapping."""

    def walk(node: Any, path: Path) -> Iterator[tuple[str, Any]]:
        dotted = ".".join(path)
        if dotted in describe(cls) or dotted in alias_paths(cls):
            yield dotted, node
        elif isinstance(node, Mapping) and (node or not path):
            for key, child in node.items():
                yield from walk(child, (*path, str(key)))
        elif dotted in sections(cls) and (node is None or node == {}):
            return  # a heading without options under it
        elif not path or dotted in sections(cls):
            raise ConfigError(
                f"{dotted or 'the configuration'} = {show(node)}{_at(label)} is a section, not a"
                f" value; write options under it: {join_names(_members(cls, dotted))}"
            )
        else:
            yield dotted, node

    yield from walk(mapping, ())


def _canonical(
    cls: type, raw: str, value: Any, label: str, aliases: dict[str, str]
) -> tuple[tuple[str, ...], Any]:
    """Return the canonical paths of ``raw`` and the canonical value; add to ``aliases``.

    Refuses unknown names.
    """
    if raw in describe(cls):
        targets: tuple[str, ...] = (raw,)
    elif raw in alias_paths(cls):
        targets = alias_paths(cls)[raw]
        aliases[raw] = ", ".join(targets)
        if raw == DUAL_CLIP:
            if not isinstance(value, bool):
                raise ConfigError(
                    f"{raw} = {show(value)}{_at(label)} must be true or false; or set"
                    f" {targets[0]}=3.0"
                )
            value = _DUAL_CLIP if value else None
    elif reason := next(
        (r for path, r in REFUSED.items() if f"{raw}.".startswith(f"{path}.")), None
    ):
        raise ConfigError(f"{raw} = {show(value)}{_at(label)} is refused: {reason}")
    else:
        raise ConfigError(
            f"{raw} = {show(value)}{_at(label)}: no such option; {_suggest(cls, raw)}"
        )
    names = VALUE_ALIASES.get(targets[0], {})
    if isinstance(value, str) and value in names:
        aliases[f"{raw}={value}"] = f"{targets[0]}={names[value]}"
        value = names[value]
    return targets, value


def _dual_clip(values: dict[str, Any], origin: dict[str, str]) -> float:
    """Return 1 + 2 x clip_ratio_high of the merged values."""
    path = "algorithm.clip_ratio_high"
    option = describe(Config)[path]
    high = _coerce(option.hint, values.get(path, option.default), path, origin.get(path, ""))
    return 1.0 + 2.0 * high


def _build(cls: type[C], prefix: Path, values: Mapping[str, Any], origin: Mapping[str, str]) -> C:
    """Return the dataclass from canonical values; missing options keep their defaults."""
    arguments: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        path = ".".join((*prefix, name))
        if is_dataclass(hint) and isinstance(hint, type):
            arguments[name] = _build(hint, (*prefix, name), values, origin)
        elif path in values:
            arguments[name] = _coerce(hint, values[path], path, origin[path])
    return cls(**arguments)


def _read_env(mapping: Mapping[str, Any], label: str, aliases: dict[str, str]) -> dict[str, Any]:
    """Return the options of section env that ``evaluate`` changes, typed."""
    part = read(Config, [(label, {"env": mapping})])
    if "env.num_envs" in part.origin:
        raise ConfigError(
            f"env.num_envs = {show(part.config.env.num_envs)}{_at(label)} is not read here; set"
            " num_envs"
        )
    aliases.update(part.aliases)
    return {
        path.removeprefix("env."): _plain(attrgetter(path)(part.config)) for path in part.origin
    }


# -------------------------------------------------------------------------------------------- types
def _coerce(hint: Any, value: Any, path: str, label: str) -> Any:
    """Return ``value`` converted to the type ``hint``. Raises ConfigError where it does not fit."""
    if isinstance(value, str) and value == "???":
        raise _wrong(hint, value, path, label, "has no value yet")
    if get_origin(hint) is Annotated:
        base, *limits = get_args(hint)
        converted = _coerce_plain(base, value, path, label, hint)
        if not all(limit.allows(converted) for limit in limits):
            raise _wrong(hint, value, path, label)
        return converted
    return _coerce_plain(hint, value, path, label, hint)


def _coerce_plain(hint: Any, value: Any, path: str, label: str, shown: Any) -> Any:
    """As ``_coerce``, without bounds; the message of a refusal states the type ``shown``."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        for alternative in arguments:
            if alternative is not types.NoneType:
                with suppress(ConfigError):
                    return _coerce(alternative, value, path, label)
    elif kind is Literal:
        if any(value == a and type(value) is type(a) for a in arguments):
            return value
    elif kind is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(
                _coerce(arguments[0], v, f"{path}[{i}]", label) for i, v in enumerate(value)
            )
    elif kind is dict:
        # The grammar of the command line has no keys with commas: such a section is quoted.
        if isinstance(value, str) and value.lstrip().startswith("{"):
            with suppress(yaml.YAMLError):
                value = plain_yaml(value)
        if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
            return _plain(value)
    elif hint is float:
        if (number := _number(value)) is not None:
            return number
    elif hint is int and isinstance(value, float) and value.is_integer():  # env_steps=1e6
        return int(value)
    elif isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise _wrong(shown, value, path, label)


def _number(value: Any) -> float | None:
    """Return a finite float from a number, or from text such as 3e-4, which YAML 1.1 keeps."""
    if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _wrong(
    hint: Any, value: Any, path: str, label: str, fault: str = ""
) -> ConfigError | PlacementError:
    """Return the error about a value; ``fault`` replaces "must be" and the allowed values."""
    allowed = _allowed(hint)
    line = f"{path} = {show(value)}{_at(label)} {fault or 'must be ' + allowed}"
    if path == "placement":
        return PlacementError(
            f"{line}; {f'give it {allowed}' if fault else _cure(hint, value, path)}"
        )
    if fault:  # "???" marks an option whose value the user of a recipe must give
        return ConfigError(f"{line}; give it {allowed}: {path}=..")
    return ConfigError(f"{line}; {_cure(hint, value, path)}")


def _cure(hint: Any, value: Any, path: str) -> str:
    """Return what to write instead."""
    plain = _not_none(hint)
    choices = list(map(str, get_args(plain))) if get_origin(plain) is Literal else []
    if near := nearest(str(value), choices):
        return f"did you mean {path}={near}?"
    base, text = _base(plain), str(value).lower()
    if base is bool and text in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return f"write {path}={'true' if text in ('true', 'yes', 'on', '1') else 'false'}"
    if path == "resume" and isinstance(value, bool):  # as rsl_rl has it
        return "name a run, resume=runs/.., or write resume=auto for what run_dir holds"
    if base is str and isinstance(value, (int, float, bool)):
        return f"quote it: {path}=\"'{show(value)}'\" (in YAML: '{show(value)}')"
    if get_origin(plain) is tuple and isinstance(value, (int, str)) and not isinstance(value, bool):
        return f"write {path}=[{value}]"
    # Commands may have different defaults of an option.
    tables = map(describe, (Config, EvaluateConfig, DemosConfig))
    defaults = [options[path].default for options in tables if path in options]
    if not defaults or value in defaults or any(d != defaults[0] for d in defaults):
        return f"give {path} such a value"
    return f"the default is {path}={show(defaults[0])}"


def _not_none(hint: Any) -> Any:
    """Return the type of ``X | None``, which is X; another type is returned unchanged."""
    if get_origin(hint) in (Union, types.UnionType):
        alternatives = [a for a in get_args(hint) if a is not types.NoneType]
        return alternatives[0] if len(alternatives) == 1 else hint
    return hint


def _base(hint: Any) -> Any:
    """Return a type without its bounds."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _allowed(hint: Any) -> str:
    """Return the allowed values as text: ``a number >= 0 and <= 1, or null``."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return ", or ".join(_alternatives(arguments))
    if kind is Annotated:
        return f"{_allowed(arguments[0])} {' and '.join(str(a) for a in arguments[1:])}"
    if kind is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if kind is tuple:
        return f"a list, each {_allowed(arguments[0])}"
    if kind is dict:
        return "a section of names and values"
    names = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
    return names.get(hint, str(hint))


def _alternatives(hints: Sequence[Any]) -> list[str]:
    """Return the allowed values of each type of a union, without repetitions.

    Whole numbers are omitted where finite numbers of the same bounds are allowed. A list of numbers
    that are themselves allowed is "a list of such numbers".
    """
    texts = ["null" if a is types.NoneType else _allowed(a) for a in hints]
    integer, finite = "a whole number", "a finite number"
    redundant = {t for t in texts if integer in t and t.replace(integer, finite) in texts}
    texts = [t for t in texts if t not in redundant]
    shorter = {f"a list, each {t}": "a list of such numbers" for t in texts if "number" in t}
    return [shorter.get(t, t) for t in texts]


# --------------------------------------------------------------------------------------- suggestion
def _suggest(cls: type, raw: str) -> str:
    """Return a valid name and its allowed values: that of another section, else a similar one."""
    options = describe(cls)
    known = {**{p: (p,) for p in options}, **alias_paths(cls)}
    section, _, leaf = raw.rpartition(".")
    if cls is Config and leaf in CURES:
        return CURES[leaf]
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
            return f"did you mean {path}{_meaning_of(path, known)}?" + _values_of(
                options, known[path]
            )
    home = section if section in sections(cls) else ""
    return f"{home or 'the top level'} has: {join_names(_members(cls, home))}"


def _meaning_of(path: str, known: Mapping[str, tuple[str, ...]]) -> str:
    """Return the canonical names of an alias, in parentheses."""
    return "" if known[path] == (path,) else f" (= {', '.join(known[path])})"


def _values_of(options: Mapping[str, Option], targets: Sequence[str]) -> str:
    """Return allowed values and default, in parentheses."""
    option = options[targets[0]]
    return f" ({option.allowed}; default {show(option.default)})"


def _members(cls: type, section: str) -> list[str]:
    """Return the names directly under a section."""
    prefix = f"{section}." if section else ""
    names = (p.removeprefix(prefix) for p in describe(cls) if p.startswith(prefix))
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


# ------------------------------------------------------------------------------------------- schema
@cache
def _hints(cls: type) -> dict[str, Any]:
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
        hint, path = _hints(cls)[f.name], prefix + f.name
        if is_dataclass(hint) and isinstance(hint, type):
            result |= describe(hint, f"{path}.")
            continue
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        plain = _not_none(hint)
        limits = get_args(plain)[1:] if get_origin(plain) is Annotated else ()
        limit = " and ".join(map(str, limits))
        if hint is not plain:
            limit = f"{limit} or null".strip()
        kind = _allowed(_base(plain))
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


def relevant(config: Config) -> dict[str, Any]:
    """Return ``dump`` without the options that only the other mode reads."""

    def walk(node: dict[str, Any], prefix: str) -> dict[str, Any]:
        return {
            name: walk(value, f"{prefix}{name}.") if prefix + name in sections(Config) else value
            for name, value in node.items()
            if mode_of(prefix + name) in (None, config.mode)
        }

    return walk(dump(config), "")


def dump(config: Any) -> dict[str, Any]:
    """Return the config as dictionaries, lists, numbers and text; ``load`` is the inverse."""
    return _plain(asdict(config))


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options as one dictionary of dotted paths."""
    options: dict[str, Any] = {}
    for name, value in plain.items():
        nested = isinstance(value, Mapping) and value
        options |= flat(value, f"{prefix}{name}.") if nested else {prefix + name: value}
    return options


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else copy.deepcopy(value)


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{k: _merged(old.get(k), v) for k, v in new.items()}}
    return new


def _same(a: Any, b: Any) -> bool:
    numbers = _number(a), _number(b)
    return a == b if None in numbers else numbers[0] == numbers[1]


def _at(label: str) -> str:
    return f" ({label})" if label else ""
