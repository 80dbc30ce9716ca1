"""Convert options of other trainers to ours (``embodied-ppo import-config``).

The table of a framework (see ``table``) has our options for one of theirs, or the reason why there
are none. An option that is not in the table is reported as unknown. A file is parsed as plain
YAML, or as dotted overrides or flags of a command; nothing in it is run or imported.
docs/migration.md lists equal names with different meanings.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from embodied_envs.base.errors import ConfigError, choose, one_line, shorten, show
from embodied_ppo.core import guarded_files
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options import config_folders, loader, readers, validation
from embodied_ppo.options.removed import REMOVED
from embodied_ppo.options.rules.select import REQUIRED_OPTIONS
from embodied_ppo.options.schema import Config
from embodied_ppo.tools.import_config import defaults, overrides
from embodied_ppo.tools.import_config.openrlhf import OPENRLHF
from embodied_ppo.tools.import_config.rlinf import RLINF
from embodied_ppo.tools.import_config.roll import ROLL
from embodied_ppo.tools.import_config.slime import SLIME
from embodied_ppo.tools.import_config.table import Answer, Framework, Reason, Source
from embodied_ppo.tools.import_config.trl import TRL
from embodied_ppo.tools.import_config.verl import VERL

# Value in the written file of an option that the user must set.
MISSING = "???"
# Errors that a rule raises for a value of the wrong type.
INVALID_VALUE = (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
REFERENCE = re.compile(r"\$\{([^${}]*)\}")


Rows: TypeAlias = "list[dict[str, Any]]"


@dataclass
class Migration:
    """The result of a conversion.

    Attributes:
        options: The experiment, path -> value.
        mapped: {theirs, value, ours: {path: value}, default: not in the file, the source's default}
        meaningless: {theirs, value, why}
        refused: {theirs, value, why}: our option exists and does not accept this value.
        unknown: {theirs, value, why}
        differences: {theirs, value, why}: options that train differently here.
        to_write: Our options that a run needs and the file does not set -> what to write.
        conflict: The error of our validation about the options together.
    """

    peer: str
    mode: str
    options: dict[str, Any] = field(default_factory=dict)
    mapped: Rows = field(default_factory=list)
    meaningless: Rows = field(default_factory=list)
    refused: Rows = field(default_factory=list)
    unknown: Rows = field(default_factory=list)
    differences: Rows = field(default_factory=list)
    to_write: dict[str, str] = field(default_factory=dict)
    conflict: str | None = None

    def text(self, file: str) -> str:
        """Return the experiment as YAML."""
        estimator = self.options.get("algorithm.adv_type", "gae")
        algorithm = "PPO" if estimator == "gae" else estimator.upper()
        name = FRAMEWORKS[self.peer].name
        tree: dict[str, Any] = {"description": f"{algorithm} as in {name}'s {file}"}
        if self.mode == "reasoning":
            tree["defaults"] = [{"override /mode": "reasoning"}, {"override /model": None}]
        for path, value in {**dict.fromkeys(self.to_write, MISSING), **self.options}.items():
            *parents, leaf = path.split(".")
            reduce(lambda node, part: node.setdefault(part, {}), parents, tree)[leaf] = value
        body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
        return (
            f"# @package _global_\n# Written by embodied-ppo import-config {self.peer}; set the"
            f" options with {MISSING} by hand.\n{body}"
        )


FRAMEWORKS: dict[str, Framework] = {"rlinf": RLINF, "verl": VERL, "roll": ROLL, "trl": TRL}
FRAMEWORKS |= {"openrlhf": OPENRLHF, "slime": SLIME}


# ------------------------------------------------------------------------------------------ reading
def read(file: str, peer: str) -> Source:
    """Read the options of a YAML file, or of a text with dotted overrides.

    Raises:
        ConfigError: There is no such file, or it holds no options.
    """
    path, label = Path(file), shorten(file, 90)
    hint = f"name a YAML file with {FRAMEWORKS[peer].name}'s options: {label}"
    if not path.is_file():
        raise ConfigError(f"{hint} does not exist")
    try:
        content = _content(guarded_files.read_text(path, defaults.LARGEST_FILE))
    except (yaml.YAMLError, ValueError, OSError) as e:
        reason = shorten(one_line(e), 120)
        raise ConfigError(f"correct {label}: it is not plain YAML ({reason})") from e
    if not isinstance(content, Mapping) or not content:
        kind = {str: "text", list: "a list"}.get(type(content), "a value") if content else "nothing"
        raise ConfigError(f"{hint} holds {kind}")
    content = defaults.with_members(content, path.parent)
    if defaults.exceeds_limit(content):
        raise ConfigError(
            f"correct {label}: it has a section that contains itself, or more than"
            f" {defaults.LIMIT:,} values"
        )
    return _resolved(dict(_flat(content, "", FRAMEWORKS[peer].mappings)))


def _content(text: str) -> Any:
    """Parse a YAML document, overrides or flags. Raises YAMLError if the text is neither."""
    options = overrides.parse(text) or overrides.parse_flags(text)
    try:
        content = loader.plain_yaml(text, aliases=True)
    except yaml.YAMLError:
        if options:
            return options
        raise
    return content if isinstance(content, Mapping) else options or content


def _flat(node: Any, path: str, mappings: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Yield dotted path and value of every option; a path in ``mappings`` is one option."""
    if isinstance(node, Mapping) and node and path not in mappings:
        for key, child in node.items():
            yield from _flat(child, f"{path}.{key}" if path else str(key), mappings)
    elif isinstance(node, str) and NUMBER.fullmatch(node):  # quoted, or 1e-6 in YAML 1.1
        yield path, int(node) if node.lstrip("+-").isdecimal() else float(node)
    else:
        yield path, node


class _Unresolved(Exception):
    """The file does not define the value of a ``${..}``."""


def _resolved(values: Mapping[str, Any]) -> Source:
    """Resolve ``${a.b}``, ``${.b}``, ``${..b}``, oc.select and RLinf's arithmetic resolvers."""
    resolved, unresolved = dict(values), set[str]()
    for path, value in values.items():
        try:
            resolved[path] = _resolve(value, path, values, 0)
        except _Unresolved:
            unresolved.add(path)
    return Source(resolved, frozenset(unresolved))


def _resolve(value: Any, path: str, values: Mapping[str, Any], depth: int) -> Any:
    """Return the value of the option ``path`` without references. Raises _Unresolved."""
    if isinstance(value, list):
        return [_resolve(item, path, values, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {key: _resolve(item, path, values, depth + 1) for key, item in value.items()}
    while isinstance(value, str) and "${" in value:
        match = REFERENCE.search(value)
        if match is None or depth > 20:
            raise _Unresolved
        inner = _resolve(_evaluate(match[1], path, values), path, values, depth + 1)
        if len(show(inner)) > defaults.LIMIT:
            raise _Unresolved
        value = inner if match[0] == value else value.replace(match[0], show(inner), 1)
        depth += 1
    return value


def _evaluate(text: str, path: str, values: Mapping[str, Any]) -> Any:
    """Evaluate the text between the braces. Raises _Unresolved."""
    name, colon, parameters = text.partition(":")
    if not colon:
        return _look_up(text.strip(), path, values)
    try:
        arguments = [loader.plain_yaml(part) for part in parameters.split(",")]
    except (yaml.YAMLError, ValueError):
        raise _Unresolved from None
    if name == "oc.select":
        with contextlib.suppress(_Unresolved):
            return _look_up(parameters.split(",")[0].strip(), path, values)
        return arguments[1] if len(arguments) == 2 else None
    if name == "not" and len(arguments) == 1:
        return not arguments[0]
    if len(arguments) == 2 and all(type(a) in (int, float) and abs(a) < 1e15 for a in arguments):
        a, b = arguments
        if name in ("subtract", "multiply") or (name == "int_div" and b):
            return a - b if name == "subtract" else a * b if name == "multiply" else a // b
    raise _Unresolved


def _look_up(reference: str, path: str, values: Mapping[str, Any]) -> Any:
    """Return the value of a reference; leading dots are relative to the section of ``path``."""
    name = reference.lstrip(".")
    dots, parts = len(reference) - len(name), path.split(".")
    base = parts[: max(0, len(parts) - dots)] if dots else []
    target = ".".join([*base, name])
    if target not in values:
        raise _Unresolved
    return values[target]


# --------------------------------------------------------------------------------------- converting
def _unwrapped(source: Source) -> Source:
    """Return the options inside a single section with the name of a class, ``GRPOConfig: {..}``."""
    name = next(iter(source.values), "").partition(".")[0]
    prefix = f"{name}."
    if not (name.endswith("Config") and all(path.startswith(prefix) for path in source.values)):
        return source
    values = {path.removeprefix(prefix): value for path, value in source.values.items()}
    unresolved = frozenset(path.removeprefix(prefix) for path in source.unresolved)
    return Source({**values, "_target_": name}, unresolved)


def convert(peer: str, file: str) -> Migration:
    """Map or explain every option of a file.

    Raises:
        ConfigError: The file is unusable, or of another framework.
    """
    framework = FRAMEWORKS[peer]
    source = framework.current(_unwrapped(read(file, peer)))
    _recognise(source, peer, file)
    if framework.variant is not None:
        framework = framework.variant(source, file)
    migration = Migration(peer, framework.mode(source))
    for path, value in source.values.items():
        _apply(migration, framework, path, value, source)
    for path, value in framework.defaults.items():
        if path not in source.values:
            _apply(migration, framework, path, value, source, default=True)
    for path, value in framework.constants.items():
        migration.options.setdefault(path, value)
    with contextlib.suppress(*INVALID_VALUE):  # such a value is among the refused already
        migration.differences = [
            _row(path, source.get(path, framework.defaults.get(path)), difference)
            for path, difference in framework.differences(source).items()
        ]
    different = {row["theirs"] for row in migration.differences if framework.one_row}
    migration.meaningless = [x for x in migration.meaningless if x["theirs"] not in different]
    required = {**REQUIRED_OPTIONS[migration.mode], **framework.to_write(source)}
    migration.to_write = {
        path: advice for path, advice in required.items() if path not in migration.options
    }
    _drop_removed(migration)
    _drop_unread(migration, file)
    try:
        loaded = _composed(migration, file)
        validation.check(loaded.config, explicit=loaded.deliberate())
    except (ConfigError, PlacementError) as e:
        migration.conflict = str(e)
    return migration


def _row(path: str, value: Any, reason: str) -> dict[str, Any]:
    """Return the row of an option without an exact counterpart."""
    return {"theirs": path, "value": value, "why": reason}


def _recognise(source: Source, peer: str, file: str) -> None:
    """Raise ConfigError if the file is of another framework, or of none."""
    known = {
        name: sum(framework.entry(path) is not None for path in source.values)
        for name, framework in FRAMEWORKS.items()
    }
    likely = max(known, key=lambda name: known[name])
    name, total, label = FRAMEWORKS[peer].name, len(source.values), shorten(file, 90)
    if known[peer] * 2 < known[likely] and known[likely] * 2 > total:
        raise ConfigError(
            f"write import-config {likely}: {label} looks like {FRAMEWORKS[likely].name}'s"
            f" ({known[likely]} of its {total} options, {known[peer]} are {name}'s)"
        )
    if not known[peer]:
        first = shorten(", ".join(list(source.values)[:3]), 100)
        raise ConfigError(
            f"name a YAML file with {name}'s options: {label} holds none of them; it has {first}"
        )


def _apply(
    migration: Migration,
    framework: Framework,
    path: str,
    value: Any,
    source: Source,
    *,
    default: bool = False,
) -> None:
    """Add the result for one option of the other framework to ``migration``."""

    def refuse(reason: str) -> None:
        migration.refused.append(_row(path, value, reason))

    entry = framework.entry(path)
    if entry is None:
        reason = f"not a known option of {framework.name}"
        return migration.unknown.append(_row(path, value, reason))
    unresolved = path in source.unresolved
    answer: Answer = {}
    try:
        answer = framework.answer(entry, None if unresolved else value, source)
    except INVALID_VALUE as e:
        if not unresolved:
            return refuse(f"{show(value)} is not a valid value ({one_line(e)})")
    if isinstance(answer, Reason):
        return None if default else migration.meaningless.append(_row(path, value, answer))
    if unresolved:
        reason = "the file does not define ${..}; import the composed file, or write the value"
        return migration.unknown.append(_row(path, value, reason))
    accepted: dict[str, Any] = {}
    for target, setting in answer.items():
        plain = setting
        if target not in REMOVED:  # see ``_drop_removed``
            try:
                loaded = loader.read(Config, [("", {target: setting})])
            except (ConfigError, PlacementError) as e:
                return refuse(str(e))
            plain = attrgetter(target)(loaded.config)
        plain = list(plain) if isinstance(plain, tuple) else plain
        earlier = migration.options.get(target, plain)
        if earlier == plain:
            accepted[target] = plain
        elif not default:
            return refuse(f"another option of the file sets {target} = {show(earlier)}")
    migration.options |= accepted
    if accepted:
        row = {"theirs": path, "value": value, "ours": accepted, "default": default}
        migration.mapped.append(row)
    return None


def _mode_layer(migration: Migration) -> tuple[str, Any]:
    """Return the options of the mode, on which those of the file are set."""
    file = config_folders.shipped() / "mode" / f"{migration.mode}.yaml"
    return "configs/mode", yaml.safe_load(file.read_text(encoding="utf-8"))


def _composed(migration: Migration, file: str) -> loader.Loaded[Config]:
    """Load what ``train experiment=..`` would, with a placeholder for every ???."""
    placeholders = {"data.train": ["-"], "data.eval": ["-"], "updates": 1}
    placeholders["algorithm.response_length"] = 1
    options = {path: placeholders.get(path, "-") for path in migration.to_write}
    options |= migration.options
    return loader.read(Config, [_mode_layer(migration), (file, options)])


def _drop_removed(migration: Migration) -> None:
    """Drop options that this version has no more, or refuse their values."""
    defaults = loader.flat(loader.dump(loader.read(Config, [_mode_layer(migration)]).config))
    for path in sorted(migration.options.keys() & REMOVED.keys()):
        accepted = REMOVED[path].accepts(migration.options[path], defaults | migration.options)
        rows = migration.meaningless if accepted else migration.refused
        _drop(migration, path, REMOVED[path].hint, rows)


def _drop(migration: Migration, path: str, reason: str, rows: list[dict[str, Any]]) -> None:
    """Drop an option of ours, and add those of the file that became it to ``rows``.

    A default of theirs that is refused, such as one of the critic's optimiser, is a difference.
    """
    del migration.options[path]
    has_critic = migration.options.get("algorithm.adv_type", "gae") == "gae"
    for row in [row for row in migration.mapped if path in row["ours"]]:
        del row["ours"][path]
        if not row["default"]:
            rows.append(_row(row["theirs"], row["value"], reason))
        elif rows is migration.refused and has_critic:
            migration.differences.append(_row(row["theirs"], row["value"], reason))
    migration.mapped = [row for row in migration.mapped if row["ours"]]


def _drop_unread(migration: Migration, file: str) -> None:
    """Move options that the converted config would not read to those without a meaning here.

    Validation refuses an option that is set and not read.
    """
    config = _composed(migration, file).config
    unread = dict(readers.unread(config, config.mode))
    for path in list(migration.options):
        other = readers.mode_of(path) not in (None, migration.mode)
        unset = migration.options[path] in (None, False)  # a value that means "not this"
        if (not other and path not in unread) or unset:
            continue
        condition = f"mode={readers.mode_of(path)}" if other else unread[path]
        reason = f"{path} = {show(migration.options[path])} is not read here; it needs {condition}"
        _drop(migration, path, reason, migration.meaningless)


def migrate(peer: str, file: str, out: str | None) -> dict[str, Any]:
    """Convert a file and write the experiment.

    Args:
        peer: Name of the framework, a key of ``FRAMEWORKS``.
        file: A YAML file, or a text with dotted overrides.
        out: File to write, which must not exist; None writes nothing.

    Returns:
        The fields of ``Migration``, and the experiment's text as ``yaml``.

    Raises:
        ConfigError: For an unknown framework, an unusable file, or an ``out`` that exists.
    """
    if peer not in FRAMEWORKS:
        raise ConfigError(
            f"import-config {shorten(peer, 60)}: no such framework;"
            f" {choose(peer.lower(), list(FRAMEWORKS), 'there are: ')}"
        )
    if out is not None and Path(out).exists():
        raise ConfigError(f"name a new file, or remove it: --out {shorten(out, 90)} exists")
    migration = convert(peer, file)
    text = migration.text(Path(file).name)
    if out is not None:
        try:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            with open(out, "x", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as e:
            raise ConfigError(
                f"name another file: --out {shorten(out, 90)} cannot be written"
                f" ({e.strerror or one_line(e)})"
            ) from e
    return {"peer": peer, "file": file, "out": out, **asdict(migration), "yaml": text}
