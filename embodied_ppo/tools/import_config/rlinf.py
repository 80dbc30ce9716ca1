"""RLinf: rules of options; the table is rlinf.yaml, and rlinf_robot has the rules for robots."""

from __future__ import annotations

import math
from typing import Any

from embodied_ppo.tools.import_config import rlinf_robot as robot
from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.table import (
    REASONS,
    Answer,
    Framework,
    Reason,
    Source,
    load,
)


def trains_robot(source: Source) -> bool:
    """Return whether an RLinf file trains a robot policy."""
    if (task := source.get("runner.task_type")) is not None:
        return task in ("embodied", "offline")
    return source.get("algorithm.loss_type") != "actor" and not source.has("data.")


def mode_of(source: Source) -> str:
    """Return the mode of a file."""
    return "embodied" if trains_robot(source) else "reasoning"


def updates(source: Source) -> int | None:
    """Return the number of updates, None if the file does not set it."""
    steps, epochs = source.get("runner.max_steps", -1), source.get("runner.max_epochs")
    if not trains_robot(source):
        return steps if steps > 0 else None
    return min(epochs, steps) if epochs and steps > 0 else epochs or (steps if steps > 0 else None)


# ------------------------------------------------------------------------------------ the algorithm
def kl_beta(value: Any, source: Source) -> Answer:
    return {"algorithm.use_kl_loss": bool(value), "algorithm.kl_loss_coef": value or 0.0}


def reinpp_kl_beta(value: Any, source: Source) -> Answer:
    coefficient = {"algorithm.kl_ctrl.kl_coef": value} if value else {}
    return {"algorithm.use_kl_in_reward": bool(value), **coefficient}


def critic_warmup(value: Any, source: Source) -> Answer:
    """Map a number of optimiser steps to updates."""
    steps = 1.0
    if trains_robot(source) and value:
        samples, batch = robot.samples(source), source.get("actor.global_batch_size")
        if not samples or not batch:
            return Reason("optimiser steps; write algorithm.critic_warmup, which counts updates")
        steps = source.get("algorithm.update_epoch", 1) * samples / batch
    return {"algorithm.critic_warmup": math.ceil((value or 0) / steps)}


def minibatches(value: Any, source: Source) -> Answer:
    prompts = source.get("data.rollout_batch_size")
    if not prompts or not value or prompts % value:
        return Reason(f"write algorithm.global_batch_size = prompts of an update / {value}")
    return {"algorithm.global_batch_size": prompts // value}


def length(value: Any, source: Source) -> Answer:
    total = updates(source)
    if total is None:
        return REASONS["ELSEWHERE" if trains_robot(source) else "EPOCHS"]
    return {"updates": total}


# ------------------------------------------------------------------------------------------ devices
def component_placement(value: Any, source: Source) -> Answer:
    """Map components to devices; the component inference is the actor here.

    The reward model of a robot has no role here, which ``rlinf_robot.differences`` reports.
    """
    dropped = ("inference", "reward", "reward_server") if trains_robot(source) else ("inference",)
    placement: dict[str, Any] = {}
    for entry, ranks in value.items():
        roles = [word.strip() for word in str(entry).split(",")]
        if isinstance(ranks, dict):
            devices = {"devices": parse_ranks(ranks.get("placement", "all"))}
            if ranks.get("node_group") is not None:
                devices["node"] = ranks["node_group"]
        else:
            devices = parse_ranks(ranks)
        if kept := [role for role in roles if role not in dropped]:
            placement[",".join(kept)] = devices
    return {"cluster.component_placement": placement}


def parse_ranks(text: Any) -> Any:
    """Convert ``0-3,5`` to ["0-3", 5]."""
    parts = [part.strip() for part in str(text).split(",")]
    ranks = [int(part) if part.isdecimal() else part for part in parts]
    return ranks[0] if len(ranks) == 1 else ranks


def variant(source: Source, file: str) -> Framework:
    """Return RLINF. Raises ConfigError for a program that does not exist here."""
    if trains_robot(source):
        robot.refuse_unsupported(source, file)
    return RLINF


RLINF = load(
    "rlinf",
    {
        **rules.SHARED,
        **rules.by_name(kl_beta, reinpp_kl_beta, critic_warmup, minibatches, length),
        **rules.by_name(component_placement),
        **rules.by_name(robot.adv_type, robot.loss_type, robot.normalize_advantages),
        **rules.by_name(robot.filter_rewards, robot.entropy_bonus),
        **rules.by_name(robot.entropy_type, robot.per_step, robot.reward_type),
        **rules.by_name(robot.bootstrap_type, robot.rollout, robot.evaluation, robot.env_type),
        **rules.by_name(robot.model, robot.config_name, robot.precision),
        "clip_ratio": rules.clip_ratio("algorithm"),
        "adam_betas": rules.adam_betas("actor.optim."),
        "warmup_steps": rules.warmup_steps(),
        "warmup_fraction": rules.warmup_fraction(updates),
        "task_type": lambda value, source: mode_of(source),
        "three_layers": lambda value, source: [value] * 3,
        "node_groups": lambda value, source: {g["label"]: g["node_ranks"] for g in value},
    },
    mode=mode_of,
    variant=variant,
    differences=lambda source: robot.differences(source) if trains_robot(source) else {},
    one_row=True,
    to_write=lambda source: robot.missing_options(source) if trains_robot(source) else {},
)
