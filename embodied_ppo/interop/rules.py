"""Rules that map the value of another framework's option to our options, or to a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodied_ppo.config.aliases import VALUE_ALIASES
from embodied_ppo.core.errors import show

Answer = dict[str, Any] | str
"""Our options, path -> value, or the reason why there are none."""
Rule = Callable[[Any, "Source"], Answer]
Table = Mapping[str, Rule]


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


def option(*paths: str, values: Mapping[Any, Any] | None = None) -> Rule:
    """Map the value to our options ``paths``, after translation by ``values``."""

    def rule(value: Any, source: Source) -> Answer:
        hashable = isinstance(value, (str, int, bool))
        translated = values[value] if values and hashable and value in values else value
        return dict.fromkeys(paths, translated)

    return rule


def no_option(why: str) -> Rule:
    """Map to no option of ours, whatever the value is; ``why`` is the reason."""
    return lambda value, source: why


def option_if_set(path: str, why: str) -> Rule:
    """Map the value to our option ``path``; null has no counterpart, for the reason ``why``."""
    return lambda value, source: why if value is None else {path: value}


def only_values(*accepted: Any, same: str, other: str) -> Rule:
    """Accept the values that describe what always happens here; others have no counterpart."""
    return lambda value, source: same if value in accepted else other


def list_option(path: str) -> Rule:
    """Map one name or a list of names to a list."""
    return lambda value, source: {path: [value] if isinstance(value, str) else value}


def interval_option(path: str) -> Rule:
    """Map an interval in updates; their -1 means never."""
    return lambda value, source: {path: max(0, value) if isinstance(value, int) else value}


def dtype_option(path: str) -> Rule:
    """Map the name of a floating-point type."""
    words = dict.fromkeys(("bf16", "bfloat16"), "bfloat16") | dict.fromkeys(
        ("fp32", "32", 32, "float32"), "float32"
    )
    return lambda value, source: (
        "null: chosen by their code" if value is None else option(path, values=words)(value, source)
    )


def read_if(path: str, rule: Rule, *values: Any) -> Rule:
    """Apply ``rule`` if their option ``path`` has one of ``values`` (default: True).

    Otherwise their code does not read the option.
    """
    wanted = values or (True,)

    def conditional(value: Any, source: Source) -> Answer:
        if source.get(path) in wanted:
            return rule(value, source)
        return f"not read there either: {path} = {show(source.get(path))}"

    return conditional


def prefixed(prefix: str, table: Table) -> dict[str, Rule]:
    """Return the table with ``prefix`` in front of every path."""
    return {prefix + path: rule for path, rule in table.items()}


def no_options(names: str, why: str) -> dict[str, Rule]:
    """Return rules for options and sections without a counterpart.

    Args:
        names: Their names, separated by blanks. Options that are not named stay unknown.
        why: The reason.
    """
    return {path: no_option(why) for name in names.split() for path in (name, f"{name}.*")}


def sampling_option(name: str, *neutral: Any) -> Rule:
    """Map a sampling filter such as top_k; unless it is off, our loader refuses it with a
    reason.
    """
    return lambda value, source: (
        "off, as here" if value is None or value in neutral else {f"rollout.{name}": value}
    )


def warmup_steps(
    section: str, per_update: Callable[[Source], float | None] = lambda source: 1.0
) -> Rule:
    """Map a learning-rate warm-up in steps to updates; an update has ``per_update`` steps."""
    path = f"{section}.lr_warmup"

    def rule(value: Any, source: Source) -> Answer:
        if value is None or value < 0:
            return "negative: the ratio counts"
        each = per_update(source)
        return (
            {path: math.ceil(value / each)}
            if each
            else f"optimiser steps; write {path}, which counts updates"
        )

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
    words = {"vllm": "vllm", "hf": "builtin"}
    if value in words:
        return {"rollout.engine": words[value]}
    return "the engines here are builtin (the default) and vllm; write rollout.engine=vllm for vllm"


KL = VALUE_ALIASES["algorithm.kl_loss_type"]

SHARDED = (
    "how their backend shards, casts and checkpoints a model; here a model is replicated, or "
    "sharded with cluster.shard=true"
)
OFFLOAD = (
    "roles that wait on a shared device are offloaded to host memory automatically; "
    "cluster.component_placement sets which roles share one"
)
ENGINE = "a setting of their inference engine; here only rollout.engine and rollout.slots exist"
MEMORY = (
    "changes memory only; algorithm.micro_batch_size or micro_batch_tokens limit every forward pass"
    " here"
)
LOGGING = (
    "a run directory holds TensorBoard files, metrics.jsonl, checkpoints and reports: "
    "runs/NAME/<date>-<seed>, or run_dir="
)
PROFILE = "profiling and debugging of their code"
THEIR_CODE = "names a part of their code; nothing in the file is imported or run"
HYDRA = (
    "read by Hydra; a defaults list is not followed: import the composed file, which `--cfg job`"
    " prints"
)
REMOTE = "code in a model directory is never run here"
SHUFFLE = "every epoch draws a fresh permutation here, from seed"
RESUME = "on the command line: resume=auto or resume=DIR"
SEEDS = "there is one seed here; all others are derived from it"
LOADER = "the process that generates reads the prompts; there is no data loader to configure"
DATASET = (
    "nothing is downloaded; write data.train=[FILE] and data.eval=[FILE] (.jsonl, .json, .parquet)"
)
EPOCHS = "epochs of the data; write updates = epochs x prompts / algorithm.rollout_batch_size"
TOOLS = "tools, images and multi-turn responses are not supported"
LANGUAGE_LORA = only_values(
    0, None, same="no adapters, as here", other="adapters of language models are not supported"
)
OTHER_LOSS = "a loss other than PPO's; here the loss is the clipped surrogate with dual clip"
