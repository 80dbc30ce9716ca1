"""The table of a framework, and how it is applied.

A table is a YAML file beside this module. Each block of its ``options`` has the options of one or
more sections of theirs (``section``, separated by blanks), what they become (``mapped``), and those
that have no counterpart by reason (``ignored``: reason -> names, separated by blanks; a name stands
for the section of this name, too). ``*`` in a name matches anything, the longest match applies, and
a later block replaces an earlier one. ``@`` in a path of ours is the entry of ``ours`` for the
section. A reason in capitals is one of shared.yaml.

What an option becomes is the path of our option that takes the value unchanged, a list of paths, or
a mapping with

* ``to``: the path, or a list of paths; ``if_set``: the same, and null leaves our default;
* ``values``: their value -> ours, or a name of ``values`` in shared.yaml; others stay;
* ``by``: a function of the framework. With ``to`` it returns our value, without our options;
* ``why``: the reason why there is no counterpart, instead of all of the above;
* ``only``: the values that equal what happens here; ``hint`` is the reason for all others;
* ``neutral``: values that switch off what does not exist here; ``except``: value -> reason;
* ``read_if``: a path that must be set for their code to read the option, or path -> values;
* ``unless``: a path, or a list of paths, that takes precedence if it is set;
* ``embodied`` and ``reasoning``: what the option becomes in each mode.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from embodied_envs.base.errors import show

FOLDER = Path(__file__).parent


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a YAML file of this folder."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


class Reason(str):
    """Why an option has no counterpart; ``{to}`` in it becomes the path of ours."""


SHARED = read_table("shared")
# Reasons that several frameworks share.
REASONS = {name: Reason(text) for name, text in SHARED["reasons"].items()}
# Our options, path -> value, or the reason why there are none.
Answer = dict[str, Any] | Reason
# (their value, all options of the file) -> an ``Answer``, or with ``to`` our value or a reason.
Rule = Callable[[Any, "Source"], Any]
Entry = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """The options of a file.

    Attributes:
        values: Dotted path -> value; ``${..}`` is resolved if the file defines its value.
        unresolved: Paths whose ``${..}`` the file does not define.
    """

    values: Mapping[str, Any]
    unresolved: frozenset[str] = frozenset()

    def get(self, path: str, default: Any = None) -> Any:
        """Return the value of an option, ``default`` if it is absent, null or unresolved."""
        value = default if path in self.unresolved else self.values.get(path, default)
        return default if value is None else value

    def has(self, prefix: str) -> bool:
        """Return whether the file has an option whose path starts with ``prefix``."""
        return any(path.startswith(prefix) for path in self.values)


@dataclass(frozen=True)
class Framework:
    """Another framework: its name and the table of its options.

    Attributes:
        name: Name in messages.
        table: Path -> entry, see the module's docstring.
        rules: Name -> function, for ``by``.
        defaults: Their options whose default differs from that of the experiment here.
        constants: Our options for behaviour that is fixed there.
        mappings: Paths whose value is a mapping and not a section of options.
        mode: Returns the mode of a file.
        differences: Mapped options that still train differently here: their option -> difference.
        variant: Returns the trainer of a file where the framework has several; raises ConfigError
            for one that cannot be imported.
        to_write: Returns our options that this file cannot set -> what to write.
        one_row: Whether a difference replaces the reason why its option has no counterpart.
        renamed: Names of earlier versions -> names in the table, separated by blanks.
    """

    name: str
    table: Mapping[str, Entry]
    rules: Mapping[str, Rule]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    mappings: frozenset[str] = frozenset()
    mode: Callable[[Source], str] = lambda source: "reasoning"
    differences: Callable[[Source], Mapping[str, str]] = lambda source: {}
    variant: Callable[[Source, str], Framework] | None = None
    to_write: Callable[[Source], Mapping[str, str]] = lambda source: {}
    one_row: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    def current(self, source: Source) -> Source:
        """Return the options with the names of the table."""

        def names(path: str) -> list[str]:
            return self.renamed.get(path, path).split()

        values = {name: value for path, value in source.values.items() for name in names(path)}
        return Source(values, frozenset(x for path in source.unresolved for x in names(path)))

    def entry(self, path: str) -> Entry | None:
        """Return the entry of the longest matching path, None if no path matches."""
        if path in self.table:
            return self.table[path]
        matches = [name for name in self.table if "*" in name and fnmatchcase(path, name)]
        return self.table[max(matches, key=len)] if matches else None

    def answer(self, entry: Entry, value: Any, source: Source) -> Answer:
        """Return what an option with this entry becomes.

        Raises:
            TypeError, ValueError, ..: The value has another type than the rule expects.
        """
        if "embodied" in entry:
            return self.answer(entry[self.mode(source)], value, source)
        if (reason := _not_read(entry, source)) is not None:
            return reason
        if "only" in entry:
            hint = entry.get("hint") or f"only {show(entry['only'][0])} is supported"
            return Reason("the same as here") if value in entry["only"] else _reason(hint)
        if "why" in entry:
            return _reason(entry["why"])
        if value in entry.get("neutral", ()):
            return Reason("off, as here")
        if _has(entry.get("except", {}), value):
            return _reason(entry["except"][value])
        if value is None and "if_set" in entry:
            return Reason("null: not set")
        paths = _as_list(entry.get("to") or entry.get("if_set"))
        if "by" in entry:
            answer = self.rules[entry["by"]](value, source)
            if isinstance(answer, Reason):
                return Reason(answer.replace("{to}", str(paths[0])))
            if paths == [None]:
                return answer
            value = answer
        names = entry.get("values", {})
        names = SHARED["values"][names] if isinstance(names, str) else names
        return dict.fromkeys(paths, names[value] if _has(names, value) else value)


def _not_read(entry: Entry, source: Source) -> Reason | None:
    """Return why their code does not read the option; None if it does."""
    condition = entry.get("read_if", {})
    conditions = {condition: None} if isinstance(condition, str) else condition
    for path, accepted in conditions.items():
        value = source.get(path)
        if not (value if accepted is None else value in _as_list(accepted)):
            return Reason(f"not read there either: {path} = {show(value)}")
    for path in _as_list(entry.get("unless", [])):
        other = source.get(path)
        if not (other is None or (isinstance(other, int) and other < 0)):
            return Reason(f"{path} takes precedence there, too")
    return None


def _has(names: Mapping[Any, Any], value: Any) -> bool:
    return isinstance(value, Hashable) and value in names


def _reason(text: str) -> Reason:
    return REASONS.get(text) or Reason(text)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ------------------------------------------------------------------------------------------ loading
def load(name: str, rules: Mapping[str, Rule], **functions: Any) -> Framework:
    """Return the framework of a table.

    Args:
        name: Name of the file, without its suffix.
        rules: Functions that its entries name.
        functions: ``mode``, ``differences``, ``variant``, ``to_write`` and ``one_row``.
    """
    content = read_table(name)
    blocks = content["options"]
    if "include" in content:
        blocks = [*read_table(content["include"])["options"], *blocks]
    return Framework(
        content["name"],
        {path: entry for block in blocks for path, entry in _entries(block)},
        rules,
        content.get("defaults", {}),
        content.get("constants", {}),
        frozenset(content.get("mappings", ())),
        renamed=content.get("renamed", {}),
        **functions,
    )


def _entries(block: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    """Yield path and entry of every option of a block."""
    sections, ours = (block.get(key, "").split() for key in ("section", "ours"))
    for section, our_section in zip_longest(sections or [""], ours, fillvalue=""):
        prefix = f"{section}." if section else ""
        for name, entry in block.get("mapped", {}).items():
            yield prefix + name, _with_section(entry, our_section)
        for reason, names in block.get("ignored", {}).items():
            for name in names.split():
                for path in [name] if name.endswith("*") else [name, f"{name}.*"]:
                    yield prefix + path, {"why": reason}


def _with_section(entry: Any, section: str) -> Entry:
    """Return an entry as a mapping whose ``@`` is our ``section``."""
    if not isinstance(entry, dict):
        entry = {"to": entry}
    if "embodied" in entry:
        return {mode: _with_section(other, section) for mode, other in entry.items()}
    return {
        name: x.replace("@", section, 1) if name in ("to", "if_set") and isinstance(x, str) else x
        for name, x in entry.items()
    }
