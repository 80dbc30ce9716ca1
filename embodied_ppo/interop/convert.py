"""A peer's PPO options become ours: ``embodied-ppo import-config`` with a table for each of RLinf, verl, ROLL and TRL.

A table maps a peer's dotted path (``*`` stands for anything) to a rule: (value, the whole file) -> our options, or the
reason why it has none. The longest path that fits counts. What no path fits is reported as unknown. A file is parsed
as plain YAML, or as dotted command-line overrides; nothing in it is run or imported. docs/migration.md says where words
are alike and meanings differ.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from embodied_ppo.config import compose, loader, readers, validation
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import ConfigError, PlacementError, choose, one_line, shortened, show
from embodied_ppo.interop import overrides
from embodied_ppo.interop.rlinf import RLINF
from embodied_ppo.interop.roll import ROLL
from embodied_ppo.interop.rules import Peer, Rule, Source, Table
from embodied_ppo.interop.trl import TRL
from embodied_ppo.interop.verl import VERL

MISSING = "???"
"""What the written file has where the peer's does not say what we need."""
UNFIT = (TypeError, ValueError, AttributeError, KeyError, IndexError, ArithmeticError)
"""What a rule raises over a value of another kind than the option has."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
MANY = 10_000
"""Values of a file, characters of what a ``${..}`` stands for: few lines of aliases and references can say more than
memory holds."""
REFERENCE = re.compile(r"\$\{([^${}]*)\}")


@dataclass
class Migration:
    """What became of a file; ``options`` is the experiment, path -> value."""

    peer: str
    mode: str
    options: dict[str, Any] = field(default_factory=dict)
    mapped: list[dict[str, Any]] = field(default_factory=list)
    """{theirs, value, ours: {path: value}, default: the peer's default rather than the file's}"""
    meaningless: list[dict[str, Any]] = field(default_factory=list)
    """{theirs, value, why}"""
    refused: list[dict[str, Any]] = field(default_factory=list)
    """{theirs, value, why}: ours exists and does not take this value."""
    unknown: list[dict[str, Any]] = field(default_factory=list)
    """{theirs, value, why}"""
    differences: list[dict[str, Any]] = field(default_factory=list)
    """{theirs, value, why}: options that are mapped and still do not train exactly as theirs."""
    to_write: dict[str, str] = field(default_factory=dict)
    """Our options that the peer's file does not say and a run needs -> what to write; ??? in the file."""
    conflict: str | None = None
    """What our rules say of the options together."""

    def text(self, file: str) -> str:
        """The experiment, as YAML."""
        tree: dict[str, Any] = {"description": f"PPO as {PEERS[self.peer].name} had it in {file}"}
        if self.mode == "reasoning":
            tree["defaults"] = [{"override /mode": "reasoning"}, {"override /model": None}]
        for path, value in {**dict.fromkeys(self.to_write, MISSING), **self.options}.items():
            *parents, leaf = path.split(".")
            node = tree
            for name in parents:
                node = node.setdefault(name, {})
            node[leaf] = value
        body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
        return f"# @package _global_\n# By embodied-ppo import-config {self.peer}; {MISSING} is yours to write\n{body}"


# --------------------------------------------------------------------------------------------------------------- peers


PEERS: dict[str, Peer] = {"rlinf": RLINF, "verl": VERL, "roll": ROLL, "trl": TRL}
NEEDED = {
    "embodied": {"env.id": "the task: docs/tasks.md"},
    "reasoning": {
        "actor.model.path": "a directory that transformers wrote",
        "data.train": "[FILE.jsonl] with prompts and answers",
        "data.eval": "[FILE.jsonl] with held-out prompts",
        "updates": "how long to train",
    },
}
"""Mode -> options without which nothing can be run -> what to write."""


# ------------------------------------------------------------------------------------------------------------- reading
def read(file: str, peer: str) -> Source:
    """The options of a YAML file, or of a file of dotted overrides.

    Raises ConfigError where there is no such file, or it holds no options.
    """
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{file}: no such file; name a YAML file with {PEERS[peer].name}'s options")
    try:
        content = _content(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file} is not plain YAML ({one_line(e)}); mend it") from e
    if not isinstance(content, Mapping) or not content:
        kind = {str: "text", list: "a list"}.get(type(content), "a value") if content else "nothing"
        raise ConfigError(f"{file} holds no options but {kind}; name a YAML file with {PEERS[peer].name}'s options")
    left = [content]
    for _ in range(MANY):
        if not left:
            break
        node = left.pop()
        left.extend(node.values() if isinstance(node, Mapping) else node if isinstance(node, (list, tuple)) else ())
    else:
        raise ConfigError(f"{file} holds a section that contains itself, or more than {MANY:,} values; mend it")
    return _resolved(dict(_flat(content, "", PEERS[peer].whole)))


def _content(text: str) -> Any:
    """A YAML document, or the dotted overrides of a command line. Raises YAMLError where it is neither."""
    try:
        content = loader.plain_yaml(text, aliases=True)
    except yaml.YAMLError:
        if options := overrides.parse(text):
            return options
        raise
    return content if isinstance(content, Mapping) else overrides.parse(text) or content


def _flat(node: Any, path: str, whole: frozenset[str]) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping) and node and path not in whole:
        for key, child in node.items():
            yield from _flat(child, f"{path}.{key}" if path else str(key), whole)
    else:  # 1e-6 is text to YAML 1.1
        yield path, float(node) if isinstance(node, str) and NUMBER.fullmatch(node) else node


class _Unresolved(Exception):
    """A ``${..}`` that the file alone does not say."""


def _resolved(values: Mapping[str, Any]) -> Source:
    """``${a.b}``, ``${.b}``, ``${..b}``, oc.select, and RLinf's subtract, multiply, int_div and not."""
    done, left = dict(values), set[str]()
    for path, value in values.items():
        try:
            done[path] = _resolve(value, path, values, 0)
        except _Unresolved:
            left.add(path)
    return Source(done, frozenset(left))


def _resolve(value: Any, path: str, values: Mapping[str, Any], depth: int) -> Any:
    if isinstance(value, list):
        return [_resolve(item, path, values, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return {key: _resolve(item, path, values, depth + 1) for key, item in value.items()}
    while isinstance(value, str) and "${" in value:
        match = REFERENCE.search(value)
        if match is None or depth > 20:
            raise _Unresolved
        inner = _resolve(_evaluated(match[1], path, values), path, values, depth + 1)
        if len(show(inner)) > MANY:
            raise _Unresolved
        value = inner if match[0] == value else value.replace(match[0], show(inner), 1)
        depth += 1
    return value


def _evaluated(text: str, path: str, values: Mapping[str, Any]) -> Any:
    """What stands between the braces. Raises _Unresolved."""
    name, colon, rest = text.partition(":")
    try:
        arguments = [loader.plain_yaml(part) for part in rest.split(",")] if colon and "\\" not in rest else []
    except yaml.YAMLError:
        raise _Unresolved from None
    if not colon:
        return _looked_up(text.strip(), path, values)
    if name == "oc.select" and arguments:
        try:
            return _looked_up(rest.split(",")[0].strip(), path, values)
        except _Unresolved:
            return arguments[1] if len(arguments) == 2 else None
    if name == "not" and len(arguments) == 1:
        return not arguments[0]
    if len(arguments) == 2 and all(type(a) in (int, float) and abs(a) < 1e15 for a in arguments):
        a, b = arguments
        if name in ("subtract", "multiply") or (name == "int_div" and b):
            return a - b if name == "subtract" else a * b if name == "multiply" else a // b
    raise _Unresolved


def _looked_up(reference: str, path: str, values: Mapping[str, Any]) -> Any:
    dots = len(reference) - len(reference.lstrip("."))
    parts = path.split(".")
    base = parts[: max(0, len(parts) - dots)] if dots else []
    target = ".".join([*base, reference.lstrip(".")])
    if target not in values:
        raise _Unresolved
    return values[target]


# ---------------------------------------------------------------------------------------------------------- converting
def convert(peer: str, file: str) -> Migration:
    """Every option of the file, mapped or explained. Raises ConfigError for a file that cannot be this peer's."""
    source, its = read(file, peer), PEERS[peer]
    _recognise(source, peer, file)
    found = Migration(peer, its.mode(source))
    for path, value in source.values.items():
        rule = rule_of(its.table, path)
        if rule is None:
            found.unknown.append({"theirs": path, "value": value, "why": f"no option of {its.name}'s that we know"})
        elif path in source.unresolved:
            _unresolved(found, path, value, rule, source)
        else:
            _apply(found, path, value, rule, source)
    for path, value in its.defaults.items():
        if path not in source.values and (rule := rule_of(its.table, path)):
            _apply(found, path, value, rule, source, default=True)
    for path, value in its.always.items():
        found.options.setdefault(path, value)
    with contextlib.suppress(*UNFIT):  # such a value is among the refused already
        found.differences = [
            {"theirs": path, "value": source.get(path, its.defaults.get(path)), "why": why}
            for path, why in its.differences(source).items()
        ]
    found.to_write = {path: what for path, what in NEEDED[found.mode].items() if path not in found.options}
    _drop_unread(found, file)
    try:
        loaded = _composed(found, file)
        validation.check(loaded.config, explicit=loaded.deliberate())
    except (ConfigError, PlacementError) as e:
        found.conflict = str(e)
    return found


def rule_of(table: Table, path: str) -> Rule | None:
    if path in table:
        return table[path]
    fits = [pattern for pattern in table if "*" in pattern and fnmatchcase(path, pattern)]
    return table[max(fits, key=len)] if fits else None


def _recognise(source: Source, peer: str, file: str) -> None:
    """Raises ConfigError for the file of another framework, or of none."""
    known = {name: sum(rule_of(p.table, path) is not None for path in source.values) for name, p in PEERS.items()}
    likely, its, total = max(known, key=lambda name: known[name]), PEERS[peer].name, len(source.values)
    if known[peer] * 2 < known[likely] and known[likely] * 2 > total:
        raise ConfigError(
            f"{file} looks like {PEERS[likely].name}'s ({known[likely]} of its {total} options, {known[peer]} are "
            f"{its}'s); write import-config {likely} {file}"
        )
    if not known[peer]:
        first = shortened(", ".join(list(source.values)[:3]), 100)
        raise ConfigError(f"{file} holds no option of {its}'s (it has {first}); name a YAML file with {its}'s options")


def _unresolved(found: Migration, path: str, value: Any, rule: Rule, source: Source) -> None:
    """A value that only their program knows: explained where its option has no meaning here in any case."""
    try:
        answer = rule(None, source)
    except UNFIT:  # the rule wants a value
        answer = {}
    if isinstance(answer, str):
        found.meaningless.append({"theirs": path, "value": value, "why": answer})
    else:
        why = "the file does not say what ${..} is; import the composed file, or write the value"
        found.unknown.append({"theirs": path, "value": value, "why": why})


def _apply(found: Migration, path: str, value: Any, rule: Rule, source: Source, *, default: bool = False) -> None:
    said = {"theirs": path, "value": value}
    try:
        answer = rule(value, source)
    except UNFIT as e:
        found.refused.append({**said, "why": f"{show(value)} is no such value ({one_line(e)})"})
        return
    if isinstance(answer, str):
        if not default:
            found.meaningless.append({**said, "why": answer})
        return
    taken: dict[str, Any] = {}
    for target, wanted in answer.items():
        try:
            plain = attrgetter(target)(loader.read(Config, [("", {target: wanted})]).config)
        except (ConfigError, PlacementError) as e:
            found.refused.append({**said, "why": str(e)})
            return
        plain = list(plain) if isinstance(plain, tuple) else plain
        before = found.options.get(target, plain)
        if before == plain:
            taken[target] = plain
        elif not default:
            found.refused.append({**said, "why": f"another option of the file says {target} = {show(before)}"})
            return
    found.options |= taken
    if taken:
        found.mapped.append({**said, "ours": taken, "default": default})


def _composed(found: Migration, file: str) -> loader.Loaded[Config]:
    """What ``train experiment=..`` would read, with something in the place of every ???."""
    base = yaml.safe_load((compose.shipped() / "mode" / f"{found.mode}.yaml").read_text(encoding="utf-8"))
    written = {path: {"data.train": ["-"], "data.eval": ["-"], "updates": 1}.get(path, "-") for path in found.to_write}
    return loader.read(Config, [("configs/mode", base), (file, {**written, **found.options})])


def _drop_unread(found: Migration, file: str) -> None:
    """Options that nothing would read beside the others are explained instead: ours refuse what is set and not read."""
    config = _composed(found, file).config
    unread = dict(readers.unread(config, config.mode))
    for path in list(found.options):
        other = readers.mode_of(path) not in (None, found.mode)
        if (not other and path not in unread) or found.options[path] in (None, False):  # so one says "not this"
            continue
        value = found.options.pop(path)
        where = f"mode={readers.mode_of(path)}" if other else unread[path]
        for row in [row for row in found.mapped if path in row["ours"]]:
            del row["ours"][path]
            if not row["default"]:
                why = f"{path} = {show(value)} is not read here; it needs {where}"
                found.meaningless.append({"theirs": row["theirs"], "value": row["value"], "why": why})
    found.mapped = [row for row in found.mapped if row["ours"]]


def migrate(peer: str, file: str, out: str | None) -> dict[str, Any]:
    """What ``import-config`` tells: the table, and the experiment as text; written to ``out`` where one is named.

    Raises ConfigError for a peer, file or ``out`` that will not do. Nothing is overwritten.
    """
    if peer not in PEERS:
        raise ConfigError(f"{peer}: no such framework; {choose(peer.lower(), list(PEERS), 'there are: ')}")
    if out is not None and Path(out).exists():
        raise ConfigError(f"--out {out}: exists; name a new file, or remove it")
    found = convert(peer, file)
    text = found.text(Path(file).name)
    if out is not None:
        try:
            Path(out).parent.mkdir(parents=True, exist_ok=True)
            with open(out, "x", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as e:
            raise ConfigError(f"--out {out}: cannot be written ({one_line(e)}); name another file") from e
    return {"peer": peer, "file": file, "out": out, **asdict(found), "yaml": text}
