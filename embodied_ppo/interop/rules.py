"""Rules that map the value of another framework's option to our options, or to a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodied_ppo.config.aliases import VALUE_ALIASES
from embodied_ppo.core.errors import show
from embodied_ppo.interop import reasons

Answer = dict[str, Any] | str
"""Our options, path -> value, or the reason why there are none."""
Rule = Callable[[Any, "Source"], Answer]
Entry = Rule | str
"""A rule, or the path of our option that takes the value unchanged."""
Table = Mapping[str, Entry]


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
    """Another framework: its name and the rules for its options."""

    name: str
    table: Table
    mode: Callable[[Source], str]
    defaults: Mapping[str, Any]
    """Their options whose default differs from that of the experiment here."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Our options for behaviour that is fixed there."""
    mappings: frozenset[str] = frozenset()
    """Paths whose value is a mapping and not a section of options."""
    differences: Callable[[Source], Mapping[str, str]] = lambda source: {}
    """Mapped options that still train differently here: their option -> the difference."""


def reasoning(source: Source) -> str:
    """Return the mode of a framework that trains language models only."""
    return "reasoning"


# -------------------------------------------------------------------------------------------- rules
def as_rule(entry: Entry) -> Rule:
    """Return the rule of a table's entry."""
    return option(entry) if isinstance(entry, str) else entry


def option(*paths: str, values: Mapping[Any, Any] | None = None) -> Rule:
    """Map the value to our options ``paths``, after translation by ``values``."""

    def rule(value: Any, source: Source) -> Answer:
        hashable = isinstance(value, (str, int, bool))
        translated = values[value] if values and hashable and value in values else value
        return dict.fromkeys(paths, translated)

    return rule


def no_option(reason: str) -> Rule:
    """Map any value to no option of ours."""
    return lambda value, source: reason


def option_if_set(path: str, reason: str) -> Rule:
    """Map the value to our option ``path``; null has no counterpart, for ``reason``."""
    return lambda value, source: reason if value is None else {path: value}


def only_values(*accepted: Any, same: str, other: str) -> Rule:
    """Accept the values that describe what always happens here; others have no counterpart."""
    return lambda value, source: same if value in accepted else other


def only_off(other: str) -> Rule:
    """Accept false, for a feature that does not exist here."""
    return only_values(False, same="off, as here", other=other)


def list_option(path: str) -> Rule:
    """Map one name or a list of names to a list."""
    return lambda value, source: {path: [value] if isinstance(value, str) else value}


def interval_option(path: str) -> Rule:
    """Map an interval in updates; their -1 means never."""
    return lambda value, source: {path: max(0, value) if isinstance(value, int) else value}


def dtype_option(path: str) -> Rule:
    """Map the name of a floating-point type."""
    rule = option(path, values=DTYPES)
    return lambda value, source: (
        "null: chosen by their code" if value is None else rule(value, source)
    )


def read_if(path: str, entry: Entry, *values: Any) -> Rule:
    """Apply ``entry`` if their option ``path`` has one of ``values`` (default: True).

    Otherwise their code does not read the option.
    """
    rule, accepted = as_rule(entry), values or (True,)

    def conditional(value: Any, source: Source) -> Answer:
        if source.get(path) in accepted:
            return rule(value, source)
        return f"not read there either: {path} = {show(source.get(path))}"

    return conditional


def sampling_option(name: str, *neutral: Any) -> Rule:
    """Map a sampling filter such as top_k, which our loader refuses unless it is off."""
    return lambda value, source: (
        "off, as here" if value is None or value in neutral else {f"rollout.{name}": value}
    )


def clip_ratio(section: str) -> Rule:
    """Map a clip range to the sides for which ``section`` has no range of its own."""

    def rule(value: Any, source: Source) -> Answer:
        names = [f"clip_ratio_{side}" for side in ("low", "high")]
        unset = [name for name in names if source.get(f"{section}.{name}") is None]
        if not unset:
            return "clip_ratio_low and clip_ratio_high take precedence there, too"
        return {f"algorithm.{name}": value for name in unset}

    return rule


def warmup_steps(
    section: str, per_update: Callable[[Source], float | None] = lambda source: 1.0
) -> Rule:
    """Map a learning-rate warm-up in steps to updates; an update has ``per_update`` steps."""
    path = f"{section}.lr_warmup"

    def rule(value: Any, source: Source) -> Answer:
        if value is None or value < 0:
            return "negative: the ratio counts"
        steps = per_update(source)
        if not steps:
            return f"optimiser steps; write {path}, which counts updates"
        return {path: math.ceil(value / steps)}

    return rule


def warmup_fraction(section: str, updates: Callable[[Source], int | None]) -> Rule:
    """Map a learning-rate warm-up given as a fraction of all updates."""
    path = f"{section}.lr_warmup"

    def rule(value: Any, source: Source) -> Answer:
        total = updates(source)
        if value and total is None:
            return (
                f"a fraction of all updates, whose number the file does not set; write {path} ="
                f" {value:g} x updates"
            )
        return {path: int((value or 0) * (total or 0))}

    return rule


def engine(value: Any, source: Source) -> Answer:
    """Map the name of the generation engine."""
    names = {"vllm": "vllm", "hf": "builtin"}
    if value in names:
        return {"rollout.engine": names[value]}
    return "the engines here are builtin (the default) and vllm; write rollout.engine=vllm for vllm"


# ------------------------------------------------------------------------------------------- tables
def prefixed(prefix: str, *tables: Table) -> dict[str, Entry]:
    """Return the tables as one, with ``prefix`` in front of every path."""
    return {prefix + path: entry for table in tables for path, entry in table.items()}


def same_names(section: str, names: str) -> dict[str, Entry]:
    """Return entries for options that have the same name in our ``section``.

    Args:
        section: The section, with a dot at its end.
        names: Their names, separated by blanks.
    """
    return {name: section + name for name in names.split()}


def no_options(names_of_reason: Mapping[str, str]) -> dict[str, Entry]:
    """Return entries for options without a counterpart.

    Args:
        names_of_reason: Reason -> names, separated by blanks; the longest match decides, so the
            order does not matter.
    """
    return {
        name: no_option(reason)
        for reason, names in names_of_reason.items()
        for name in names.split()
    }


def no_sections(names: str, reason: str) -> dict[str, Entry]:
    """Return entries for options, and sections of options, without a counterpart.

    Args:
        names: Their names, separated by blanks. Options that are not named stay unknown.
        reason: The reason.
    """
    return no_options({reason: " ".join(f"{name} {name}.*" for name in names.split())})


# ------------------------------------------------------------------------------- common entries
KL = VALUE_ALIASES["algorithm.kl_loss_type"]
LANGUAGE_LORA = only_values(0, None, same="no adapters, as here", other=reasons.NO_ADAPTERS)
TRAINING_SAMPLES = only_values(
    True, same="training samples, as here", other="training always samples here"
)
ADAMW = only_values(
    "adam", "adamw", "AdamW", same="AdamW, as here", other="AdamW is the only optimiser here"
)
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp32", "32", 32, "float32"), "float32"),
}
