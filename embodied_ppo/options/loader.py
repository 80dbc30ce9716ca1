"""Dictionaries -> frozen dataclasses, strictly.

Each refusal is one line with the path, the value, the limit and the hint. ``read`` merges layers
(file, file, command line) into a typed config and records which layer set each option; ``load``
does that for one mapping and compares the options (``validation``); ``dump`` is the inverse;
``describe`` returns the documentation of the options.
"""

from __future__ import annotations

import copy
import math
import pathlib
import re
import types
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from operator import attrgetter
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

import yaml

from embodied_envs.base.errors import ConfigError, choose, join_names, nearest, one_line, show
from embodied_ppo.core import guarded_files
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.aliases import REFUSED, VALUE_ALIASES
from embodied_ppo.options.describe import (
    DUAL_CLIP,
    alias_paths,
    allowed_values,
    base_of,
    describe,
    field_types,
    members,
    not_none,
    sections,
    suggest,
)
from embodied_ppo.options.readers import mode_of
from embodied_ppo.options.removed import REMOVED, without_removed
from embodied_ppo.options.schema import Config, EvaluateConfig, ExportConfig, Text
from embodied_ppo.options.validation import check

C = TypeVar("C")
Path = tuple[str, ...]
# Prefixes of the labels of layers that the user did not write.
SHIPPED, STORED = "configs/", "the run's config.yaml"
MAX_YAML_SIZE = 1 << 18  # largest size of a run's config.yaml, bytes; usual are a few thousand
DUAL_CLIP_VALUE = "1 + 2 x clip_ratio_high"  # value of clip_ratio_c until all layers are merged
# What PyYAML raises besides its own, for 2000-99-99, !!bool x, a deeply nested list and others.
YAML_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A config and the origin of its options."""

    config: C
    # Canonical path of every option that was set -> label of the layer that set it.
    origin: dict[str, str]
    # Pairs (name as written, canonical name), each once.
    aliases: tuple[tuple[str, str], ...]
    # Options that are still ``???``; the config has their defaults.
    missing: frozenset[str] = frozenset()

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
    except YAML_FAULTS as e:
        raise yaml.YAMLError(f"{type(e).__name__}: {e}") from e


def read_yaml(path: pathlib.Path, *, limit: int = MAX_YAML_SIZE, follow_links: bool = True) -> Any:
    """Return the plain values of a YAML file that may be damaged, see ``core.guarded_files``.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is larger than ``limit`` bytes, not UTF-8, or not YAML.
    """
    text = guarded_files.read_text(path, limit, follow_links=follow_links)
    try:
        return plain_yaml(text)
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({one_line(error)})") from error


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
    if isinstance(loaded.config, (Config, EvaluateConfig, ExportConfig)):
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
            values[target] = merged(values.get(target), value)
            origin[target] = label
    if values.get("algorithm.clip_ratio_c") == DUAL_CLIP_VALUE:
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
    options = leaves(cls, mapping, label)
    if label.startswith(STORED):
        options = without_removed(options, label)
    for raw, plain in options.items():
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


def leaves(cls: type, mapping: Any, label: str) -> dict[str, Any]:
    """Return dotted path -> value of every option in a mapping; its keys may have dots.

    Raises ConfigError where a value stands in place of a section.
    """
    options: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if path in describe(cls) or path in alias_paths(cls):
            options[path] = node
        elif isinstance(node, Mapping) and (node or not path):
            for key, child in node.items():
                walk(child, f"{path}.{key}" if path else str(key))
        elif path in sections(cls) and (node is None or node == {}):
            return  # a heading without options under it
        elif not path or path in sections(cls):
            raise ConfigError(
                f"{path or 'the configuration'} = {show(node)}{_at(label)} is a section, not a"
                f" value; write options under it: {join_names(members(cls, path))}"
            )
        else:
            options[path] = node

    walk(mapping, "")
    return options


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
                fact = f"{raw} = {show(value)}{_at(label)} must be true or false"
                raise ConfigError(f"{fact}; or set {targets[0]}=3.0")
            value = DUAL_CLIP_VALUE if value else None
    elif raw in REFUSED:
        raise ConfigError(f"{raw} = {show(value)}{_at(label)} is refused: {REFUSED[raw]}")
    elif raw in REMOVED:
        raise ConfigError(f"{REMOVED[raw].hint}: {raw} = {show(value)}{_at(label)} was removed")
    else:
        raise ConfigError(f"{raw} = {show(value)}{_at(label)}: no such option; {suggest(cls, raw)}")
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
    for name, hint in field_types(cls).items():
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
        number = show(part.config.env.num_envs)
        raise ConfigError(f"env.num_envs = {number}{_at(label)} is ignored here; set num_envs")
    aliases.update(part.aliases)
    return {p.removeprefix("env."): _plain(attrgetter(p)(part.config)) for p in part.origin}


# -------------------------------------------------------------------------------------------- types
def _coerce(hint: Any, value: Any, path: str, label: str) -> Any:
    """Return ``value`` converted to the type ``hint``. Raises ConfigError where it does not fit."""
    if isinstance(value, str) and value == "???":
        raise _wrong(hint, value, path, label, "has no value yet")
    base, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    converted = _coerce_plain(base, value, path, label, hint)
    if not all(limit.allows(converted) for limit in limits):
        raise _wrong(hint, value, path, label)
    return converted


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
            entries = enumerate(value)
            return tuple(_coerce(arguments[0], v, f"{path}[{i}]", label) for i, v in entries)
    elif kind is dict:
        # The grammar of the command line has no keys with commas: such a section is quoted.
        if isinstance(value, str) and value.lstrip().startswith("{"):
            with suppress(yaml.YAMLError):
                value = plain_yaml(value)
        if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
            if is_dataclass(entry := arguments[1]) and isinstance(entry, type):
                return {k: _build_entry(entry, v, f"{path}.{k}", label) for k, v in value.items()}
            if entry is not Any:
                return {k: _coerce(entry, v, f"{path}.{k}", label) for k, v in value.items()}
            return _plain(value)
    elif hint is float:
        if (number := _number(value)) is not None:
            return number
    elif hint is int and isinstance(value, float) and value.is_integer():  # env_steps=1e6
        return int(value)
    elif isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise _wrong(shown, value, path, label)


def _build_entry(cls: type[C], value: Any, path: str, label: str) -> C:
    """Return the dataclass of one entry of a section whose names the user chooses."""
    names = [*field_types(cls)]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{path} = {show(value)}{_at(label)} is a section, not a value; write options under it:"
            f" {join_names(names)}"
        )
    for name in value:
        if name not in names:
            hint = choose(str(name), names, "there are ")
            raise ConfigError(
                f"{path}.{name} = {show(value[name])}{_at(label)}: no such option; {hint}"
            )
    options = {f"{path}.{name}": x for name, x in value.items()}
    return _build(cls, (path,), options, dict.fromkeys(options, label))


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
    allowed = allowed_values(hint)
    line = f"{path} = {show(value)}{_at(label)} {fault or 'must be ' + allowed}"
    # "???" marks an option whose value the user of a recipe must give.
    correction = f"give it {allowed}: {path}=VALUE" if fault else _correction(hint, value, path)
    return (PlacementError if path == "placement" else ConfigError)(f"{line}; {correction}")


def _correction(hint: Any, value: Any, path: str) -> str:
    """Return what to write instead."""
    plain = not_none(hint)
    choices = list(map(str, get_args(plain))) if get_origin(plain) is Literal else []
    if near := nearest(str(value), choices):
        return f"did you mean {path}={near}?"
    base, text = base_of(plain), str(value).lower()
    if base is bool and text in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return f"write {path}={'true' if text in ('true', 'yes', 'on', '1') else 'false'}"
    if path == "resume" and isinstance(value, bool):  # as rsl_rl has it
        return "name a run, resume=runs/.., or write resume=auto for what run_dir holds"
    is_text = base is str or any(base_of(x) is str for x in get_args(plain))
    if is_text and get_origin(plain) is not tuple and isinstance(value, (int, float, bool)):
        return f"quote it: {path}=\"'{show(value)}'\" (in YAML: '{show(value)}')"
    texts = isinstance(value, str) and tuple[Text, ...] in get_args(plain)
    is_single = isinstance(value, (int, str)) and not isinstance(value, bool)
    if texts or (get_origin(plain) is tuple and is_single):
        return f"write {path}=[{value}]"
    option = describe(Config).get(path)
    if option is None or option.default == value:
        return f"give {path} such a value"
    return f"the default is {path}={show(option.default)}"


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
        options |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return options


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else copy.deepcopy(value)


def merged(old: Any, new: Any) -> Any:
    """Return two values of an option merged: sections name by name, otherwise the new one."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{k: merged(old.get(k), v) for k, v in new.items()}}
    return new


def _same(a: Any, b: Any) -> bool:
    numbers = _number(a), _number(b)
    return a == b if None in numbers else numbers[0] == numbers[1]


def _at(label: str) -> str:
    return f" ({label})" if label else ""
