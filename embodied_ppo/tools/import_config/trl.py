"""TRL's PPOConfig: rules for options that depend on others, and the choice of the trainer.

The table is trl_ppo.yaml. A file of TrlParser does not name its trainer: it is recognised by the
options that only one of them has, or by an entry such as ``_target_: trl.GRPOConfig``. Files of
other trainers are refused.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from embodied_envs.base.errors import ConfigError, shorten
from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.table import REASONS, Answer, Framework, Reason, Source, load
from embodied_ppo.tools.import_config.trl_batches import step_responses, training_rules
from embodied_ppo.tools.import_config.trl_grpo import GRPO, LOSSES, OTHER_LOSSES, TRAINERS


def batch_size(source: Source) -> int:
    """Return the prompts of an update, each with one response."""
    return int(source.get("batch_size", step_responses(source)))


def updates(source: Source) -> int | None:
    """Return the number of updates, None if the file does not set it."""
    if (total := source.get("num_total_batches")) is not None:
        return int(total)
    episodes = source.get("total_episodes")
    return None if episodes is None else math.ceil(episodes / batch_size(source))


def batches(value: Any, source: Source) -> Answer:
    batch, parts = batch_size(source), int(source.get("num_mini_batches", 1))
    if parts < 1 or batch % parts:
        return Reason(f"num_mini_batches = {parts} does not divide the batch of {batch}")
    return {"algorithm.rollout_batch_size": batch, "algorithm.global_batch_size": batch // parts}


def kl_coef(value: Any, source: Source) -> Answer:
    return {"algorithm.use_kl_in_reward": bool(value), "algorithm.kl_ctrl.kl_coef": value}


def grad_norm(value: Any, source: Source) -> Any:
    """Map the gradient norm; their loop does not clip gradients, DeepSpeed's engine does."""
    return value if source.has("deepspeed") else None


def model_name(value: Any, source: Source) -> Answer:
    """Map the model, which gives the tokenizer only where sft_model_path is set."""
    return {"actor.tokenizer" if source.get("sft_model_path") else "actor.model.path": value}


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    differences: dict[str, str] = {}
    if source.get("max_grad_norm") and not source.has("deepspeed"):
        differences["max_grad_norm"] = (
            "their PPO reads it with DeepSpeed only; the imported config does not clip either"
        )
    if source.get("whiten_rewards"):
        differences["whiten_rewards"] = (
            "their whitening is separate in each process and includes the position of the score"
        )
    accumulated = int(source.get("gradient_accumulation_steps", 1))
    parts = int(source.get("num_mini_batches", 1))
    if accumulated > 1 and parts > 1:
        size = batch_size(source) // max(1, parts // accumulated)
        differences["num_mini_batches"] = (
            f"write algorithm.global_batch_size={size}: their optimiser steps once in"
            f" gradient_accumulation_steps = {accumulated} backward passes, across minibatches"
        )
    return differences


def trainer_of(source: Source, file: str) -> Framework:
    """Return the trainer of a file. Raises ConfigError for one of another trainer, or of none."""
    named = next((str(source.get(name)) for name in TRAINERS["names"] if source.get(name)), "")
    kind = named.rpartition(".")[2].removesuffix("Config").removesuffix("Trainer").upper()
    if kind in ("PPO", "GRPO"):
        return {"PPO": PPO, "GRPO": GRPO}[kind]
    loss = source.get("loss_type")
    has_grpo_loss = loss in (*LOSSES, *OTHER_LOSSES)
    evidence = [(f"{kind}Config", named)] if kind else []
    if loss is not None and not has_grpo_loss:
        evidence.append(("DPOConfig, SFTConfig or KTOConfig", "loss_type"))
    evidence += [
        (trainer, name)
        for trainer, options in TRAINERS["others"].items()
        for name in options.split()
        if name in source.values
    ]
    if evidence:
        trainer, option = (shorten(text, 60) for text in evidence[0])
        raise ConfigError(
            f"name a file of PPOConfig or GRPOConfig: {shorten(file, 80)} has {option}, of"
            f" {trainer}, which cannot be imported"
        )
    ppo = sum(name in PPO.table and name not in GRPO.table for name in source.values)
    grpo_options = f"{TRAINERS['grpo']} {TRAINERS['grpo_or_rloo']}".split()
    grpo = has_grpo_loss + sum(name in grpo_options for name in source.values)
    if not ppo + grpo:
        raise ConfigError(
            f"write _target_: trl.PPOConfig or trl.GRPOConfig into {shorten(file, 80)}: it has no"
            " option that only one of them has, such as cliprange or num_generations"
        )
    return PPO if ppo > grpo else GRPO


PPO = load(
    "trl_ppo",
    {
        **training_rules(updates, lambda source: 1.0, batches, REASONS["EPOCHS"]),
        **rules.by_name(kl_coef, grad_norm, model_name),
    },
    differences=differences_of,
)
TRL = replace(
    PPO,
    name="TRL",
    table={**GRPO.table, **PPO.table},
    rules={**GRPO.rules, **PPO.rules},
    variant=trainer_of,
)
"""The options of both trainers, by which a file of TRL is recognised; ``variant`` selects one."""
