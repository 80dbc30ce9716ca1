"""TRL: sizes of batches and lengths of a run, for PPOConfig and GRPOConfig."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from embodied_envs.base.errors import show
from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.table import Answer, Reason, Rule, Source


def size_product(source: Source, *names: str) -> int:
    """Return the product of sizes of a batch."""
    defaults = {"per_device_train_batch_size": 8}
    return math.prod(int(source.get(name, defaults.get(name, 1))) for name in names)


def step_responses(source: Source) -> int:
    """Return the responses of an optimiser step."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    return size_product(source, *names)


def training_rules(
    updates: Callable[[Source], int | None],
    steps: Callable[[Source], float],
    batches: Rule,
    no_length: Reason,
) -> dict[str, Rule]:
    """Return the rules that trl_training.yaml names, and those of batches and lengths.

    Args:
        updates: Returns the number of updates; None: the file does not set it.
        steps: Returns the number of optimiser steps in one update.
        batches: Maps the sizes of batches.
        no_length: Why an option of the length has no counterpart if the file sets no number.
    """

    def interval(value: Any, source: Source) -> Any:
        """Map a number of steps to updates; a value below 1 is a fraction of the run."""
        total = (value or 0) / steps(source)
        if value and value < 1:
            if (run_length := updates(source)) is None:
                return Reason(f"a fraction of all updates; write {{to}} = {show(value)} x updates")
            total = value * run_length
        return math.ceil(total)

    def warmup_ratio(value: Any, source: Source) -> Any:
        if source.get("warmup_steps"):
            return Reason("warmup_steps takes precedence there, too")
        return interval(value, source)

    def strategy(value: Any, source: Source) -> Any:
        return 0 if value == "no" else Reason("{to} counts updates")

    def micro_batch(value: Any, source: Source) -> Answer:
        """Map the size of a micro-batch, which is a factor of the other sizes."""
        answer = batches(value, source)
        is_reason = isinstance(answer, Reason)
        return answer if is_reason else {**answer, "algorithm.micro_batch_size": value}

    def length(value: Any, source: Source) -> Answer:
        total = updates(source)
        return no_length if total is None else {"updates": total}

    return {
        **rules.SHARED,
        "adam_betas": rules.adam_betas(),
        **rules.by_name(batches, interval, warmup_ratio, strategy, micro_batch, length),
    }
