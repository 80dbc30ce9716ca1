"""What tables of peers' options are made of: rules, from a value and the whole file to our options or a reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodied_ppo.config.aliases import VALUE_ALIASES
from embodied_ppo.core.errors import show

Answer = dict[str, Any] | str
"""Our options, or why there are none."""
Rule = Callable[[Any, "Source"], Answer]
Table = Mapping[str, Rule]


@dataclass(frozen=True)
class Source:
    """A peer's file: dotted path -> value, ``${..}`` resolved where the file itself says to what."""

    values: Mapping[str, Any]
    unresolved: frozenset[str] = frozenset()

    def get(self, path: str, default: Any = None) -> Any:
        value = default if path in self.unresolved else self.values.get(path, default)
        return default if value is None else value

    def has(self, prefix: str) -> bool:
        return any(path.startswith(prefix) for path in self.values)


@dataclass(frozen=True)
class Peer:
    name: str
    table: Table
    mode: Callable[[Source], str]
    defaults: Mapping[str, Any]
    """Options of PPO whose default there is not what the experiment would have here."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Options of ours for what it does and has no option for."""
    whole: frozenset[str] = frozenset()
    """Paths whose value is a mapping that is read as one."""
    differences: Callable[[Source], Mapping[str, str]] = lambda source: {}
    """What trains otherwise here although its options are mapped: their option -> the difference."""


def reasoning(source: Source) -> str:
    return "reasoning"


def ours(*paths: str, words: Mapping[Any, Any] | None = None) -> Rule:
    """The value goes to these options of ours, by another word where ``words`` has one."""

    def rule(value: Any, source: Source) -> Answer:
        known = words is not None and isinstance(value, (str, int, bool)) and value in words
        return dict.fromkeys(paths, words[value] if known and words is not None else value)

    return rule


def none(why: str) -> Rule:
    """No option of ours, whatever the value."""
    return lambda value, source: why


def given(path: str, why: str) -> Rule:
    """An option of ours where a value is given; null: none, for the reason."""
    return lambda value, source: why if value is None else {path: value}


def only(*fine: Any, same: str, other: str) -> Rule:
    """Values that mean what is done here anyway; all others have no counterpart."""
    return lambda value, source: same if value in fine else other


def listed(path: str) -> Rule:
    """One name or a list of names."""
    return lambda value, source: {path: [value] if isinstance(value, str) else value}


def every(path: str) -> Rule:
    """An interval in updates; -1 is theirs for never."""
    return lambda value, source: {path: max(0, value) if isinstance(value, int) else value}


def dtype(path: str) -> Rule:
    words = dict.fromkeys(("bf16", "bfloat16"), "bfloat16") | dict.fromkeys(("fp32", "32", 32, "float32"), "float32")
    return lambda value, source: "null: theirs decides" if value is None else ours(path, words=words)(value, source)


def needs(path: str, rule: Rule, *values: Any) -> Rule:
    """``rule`` where the peer's option ``path`` has one of ``values`` (True if none are named), else it is not read."""
    wanted = values or (True,)

    def conditional(value: Any, source: Source) -> Answer:
        if source.get(path) in wanted:
            return rule(value, source)
        return f"not read there either: {path} = {show(source.get(path))}"

    return conditional


def under(prefix: str, table: Table) -> dict[str, Rule]:
    return {prefix + path: rule for path, rule in table.items()}


def several(names: str, why: str) -> dict[str, Rule]:
    """Options and sections without a counterpart, by name: what is not named stays unknown."""
    return {path: none(why) for name in names.split() for path in (name, f"{name}.*")}


def sampled(name: str, *neutral: Any) -> Rule:
    """top_k and the like of training rollouts; unless off, ours says why it is refused."""
    return lambda value, source: "off, as here" if value is None or value in neutral else {f"rollout.{name}": value}


def warmup_steps(section: str, per_update: Callable[[Source], float | None] = lambda source: 1.0) -> Rule:
    """Learning-rate warm-up in steps, of which an update has ``per_update``, -> in updates."""
    path = f"{section}.lr_warmup"

    def rule(value: Any, source: Source) -> Answer:
        if value is None or value < 0:
            return "negative: the ratio counts"
        each = per_update(source)
        return {path: math.ceil(value / each)} if each else f"optimiser steps; write {path}, which counts updates"

    return rule


def warmup_share(section: str, updates: Callable[[Source], int | None]) -> Rule:
    """Learning-rate warm-up as a share of all updates."""
    path = f"{section}.lr_warmup"

    def rule(value: Any, source: Source) -> Answer:
        total = updates(source)
        if value and total is None:
            return f"a share of all updates, whose number the file does not say; write {path} = {value:g} x updates"
        return {path: int((value or 0) * (total or 0))}

    return rule


def engine(value: Any, source: Source) -> Answer:
    """What generates."""
    words = {"vllm": "vllm", "hf": "builtin"}
    if value in words:
        return {"rollout.engine": words[value]}
    return "engines here: builtin, the default, and vllm; write rollout.engine=vllm, or nothing"


KL = VALUE_ALIASES["algorithm.kl_loss_type"]

SHARDED = "how their backend splits, casts and checkpoints a model; here whole, or in parts with cluster.shard=true"
OFFLOAD = "who waits on a shared device sleeps in host memory by itself; cluster.component_placement says who shares"
ENGINE = "inside their inference engine; here rollout.engine and rollout.slots are all"
MEMORY = "memory only; algorithm.micro_batch_size or micro_batch_tokens bound every forward pass here"
LOGGING = "a run directory holds TensorBoard, JSON lines, checkpoints and reports: runs/NAME/<date>-<seed>, or run_dir="
PROFILE = "profiling and debugging of their code"
FOREIGN = "names code of theirs; nothing in the file is imported or run"
HYDRA = "Hydra's own; a list of defaults is not followed: import the composed file, which `--cfg job` prints"
REMOTE = "code that a model's directory brings is never run here"
FRESH = "every epoch draws a fresh permutation here, from seed"
RESUME = "on the command line: resume=auto or resume=DIR"
SEEDS = "one seed here, of which all others follow"
LOADER = "prompts are read by the process that generates; there is no loader to set up"
DATASET = "nothing is downloaded: write data.train=[FILE] and data.eval=[FILE] (.jsonl, .json, .parquet)"
EPOCHS = "epochs of the data; write updates = epochs x prompts / algorithm.rollout_batch_size"
TOOLS = "tools, images and several turns in a response are not there"
LANGUAGE_LORA = only(0, None, same="no adapters, as here", other="adapters of language models are not there")
WHOLE_LOSS = "another loss than PPO's; here it is the clipped surrogate with dual clip"
