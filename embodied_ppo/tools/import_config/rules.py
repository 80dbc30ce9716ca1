"""Rules that several frameworks share: functions that a table names in ``by``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.tools.import_config.table import REASONS, Answer, Reason, Rule, Source, read_table


def engine(value: Any, source: Source) -> Answer:
    """Map the name of the generation engine."""
    names = {"vllm": "vllm", "hf": "builtin", "huggingface": "builtin"}
    if value in names:
        return {"rollout.engine": names[value]}
    return REASONS["ENGINES"]


def evaluation_temperature(value: Any, source: Source) -> dict[str, Any]:
    """Map the temperature of an evaluation; 0 and below is greedy."""
    if not value or value < 0:
        return {"evaluation.deterministic": True}
    return {"evaluation.deterministic": False, "evaluation.temperature": value}


SHARED: dict[str, Rule] = {
    "engine": engine,
    "evaluation_temperature": evaluation_temperature,
    "as_bool": lambda value, source: bool(value),
    "as_negation": lambda value, source: not value,
    "as_list": lambda value, source: [value] if isinstance(value, str) else value,
    "at_least_zero": lambda value, source: max(0, value or 0),
    "rounded_up": lambda value, source: math.ceil(value),
}


def differences(name: str, conditions: Mapping[str, Any], **numbers: Any) -> dict[str, str]:
    """Return their option -> what no option of ours changes, from a table.

    Args:
        name: Name of the file, without its suffix. Its ``differences`` has such pairs by condition.
        conditions: Condition -> whether it holds.
        numbers: Values of the names in braces of the texts.
    """
    return {
        path: text.format(**numbers)
        for condition, texts in read_table(name)["differences"].items()
        if conditions[condition]
        for path, text in texts.items()
    }


def whole_prompts(responses: int, group: int) -> Any:
    """Return the prompts of a number of responses, ``group`` to each."""
    if not group or responses % group:
        return Reason(f"write {{to}}, in prompts: {responses} is no multiple of {group}")
    return responses // group


def prompts(group_size: str) -> Rule:
    """Map a number of responses, of which the option ``group_size`` belong to each prompt."""
    return lambda value, source: whole_prompts(value, source.get(group_size, 1))


def adam_betas(prefix: str = "adam_beta") -> Rule:
    """Map the two decays of AdamW, PREFIX1 and PREFIX2, of which one may be unset."""

    def rule(value: Any, source: Source) -> Answer:
        betas = (source.get(f"{prefix}{i}") for i in (1, 2))
        pairs = zip(betas, AlgorithmConfig.adam_betas, strict=True)
        return {"algorithm.adam_betas": [own if x is None else x for x, own in pairs]}

    return rule


def clip_ratio(section: str, default: float | None = None) -> Rule:
    """Map a clip range to the sides for which ``section`` has no range and no ``default``."""

    def rule(value: Any, source: Source) -> Answer:
        names = [f"clip_ratio_{side}" for side in ("low", "high")]
        unset = [name for name in names if source.values.get(f"{section}.{name}", default) is None]
        if not unset:
            return Reason("clip_ratio_low and clip_ratio_high take precedence there, too")
        return {f"algorithm.{name}": value for name in unset}

    return rule


def warmup_steps(steps_per_update: Callable[[Source], float | None] = lambda source: 1.0) -> Rule:
    """Map a learning-rate warm-up in optimiser steps to updates."""

    def rule(value: Any, source: Source) -> Any:
        if value is None or value < 0:
            return Reason("negative: the ratio counts")
        steps = steps_per_update(source)
        if not steps:
            return Reason("optimiser steps; write {to}, which counts updates")
        return math.ceil(value / steps)

    return rule


def warmup_fraction(updates: Callable[[Source], int | None]) -> Rule:
    """Map a learning-rate warm-up given as a fraction of all updates."""

    def rule(value: Any, source: Source) -> Any:
        total = updates(source)
        if value and total is None:
            return Reason(f"a fraction of all updates; write {{to}} = {value:g} x updates")
        return int((value or 0) * (total or 0))

    return rule
