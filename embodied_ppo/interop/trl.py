"""Options of TRL's PPOConfig (July 2026), mapped to ours."""

from __future__ import annotations

import math
from typing import Any

from embodied_ppo.core.errors import show
from embodied_ppo.interop import reasons
from embodied_ppo.interop.rules import (
    Answer,
    Entry,
    Framework,
    Rule,
    Source,
    dtype_option,
    no_options,
    only_off,
    only_values,
    option,
    option_if_set,
    reasoning,
    same_names,
)


def _batch(source: Source) -> int:
    """Return the prompts of an update, each with one response."""
    if (total := source.get("batch_size")) is not None:
        return int(total)
    factors = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "world_size": 1}
    return math.prod(int(source.get(name, default)) for name, default in factors.items())


def _updates(source: Source) -> int | None:
    if (total := source.get("num_total_batches")) is not None:
        return int(total)
    episodes = source.get("total_episodes")
    return None if episodes is None else math.ceil(episodes / _batch(source))


def _batches(value: Any, source: Source) -> Answer:
    batch, parts = _batch(source), int(source.get("num_mini_batches", 1))
    if parts < 1 or batch % parts:
        return (
            f"num_mini_batches = {parts} does not divide the batch of {batch}, which their code"
            " refuses, too"
        )
    return {"algorithm.rollout_batch_size": batch, "algorithm.global_batch_size": batch // parts}


def _micro(value: Any, source: Source) -> Answer:
    answer = _batches(value, source)
    return answer if isinstance(answer, str) else {**answer, "algorithm.micro_batch_size": value}


def _length(value: Any, source: Source) -> Answer:
    updates = _updates(source)
    return reasons.EPOCHS if updates is None else {"updates": updates}


def _kl(value: Any, source: Source) -> Answer:
    return {"algorithm.use_kl_in_reward": bool(value), "algorithm.kl_ctrl.kl_coef": value}


def _whitening(value: Any, source: Source) -> Answer:
    """Map whitening, which follows the KL penalty and keeps the mean."""
    order = {"algorithm.whiten_after_kl": True} if value and source.get("kl_coef", 0.05) else {}
    return {"algorithm.whiten_rewards": bool(value), **order}


def _grad_norm(value: Any, source: Source) -> Answer:
    """Map the gradient norm; their loop does not clip gradients, DeepSpeed's engine does."""
    return {
        f"{section}.max_grad_norm": value if source.has("deepspeed") else None for section in BOTH
    }


def _differences(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    differences: dict[str, str] = {}
    if source.get("max_grad_norm") and not source.has("deepspeed"):
        differences["max_grad_norm"] = (
            "their PPO reads it with DeepSpeed only and does not clip gradients otherwise; the "
            "imported config does not clip either"
        )
    if source.get("whiten_rewards"):
        differences["whiten_rewards"] = (
            "their whitening is separate in each process and includes one position more than the "
            "tokens, that of the score"
        )
    accumulated, parts = (
        int(source.get(name, 1)) for name in ("gradient_accumulation_steps", "num_mini_batches")
    )
    if accumulated > 1 and parts > 1:
        differences["num_mini_batches"] = (
            f"their optimiser steps once in gradient_accumulation_steps = {accumulated} backward "
            "passes, also across minibatches; for that write "
            f"algorithm.global_batch_size={_batch(source) // max(1, parts // accumulated)}"
        )
    return differences


def _steps(path: str) -> Rule:
    """Map a number of updates; a value below 1 is a fraction of all updates."""

    def rule(value: Any, source: Source) -> Answer:
        if not isinstance(value, (int, float)) or value >= 1:
            return {path: int(value) if isinstance(value, float) else value}
        updates = _updates(source)
        return (
            f"a fraction of all updates; write {path}"
            if updates is None
            else {path: math.ceil(updates * value)}
        )

    return rule


def _warmup_ratio(value: Any, source: Source) -> Answer:
    updates = _updates(source)
    if value and updates is None:
        return f"a fraction of all updates; write algorithm.lr_warmup = {show(value)} x updates"
    return {f"{section}.lr_warmup": math.ceil(value * (updates or 0)) for section in BOTH}


def _both(name: str) -> Rule:
    """Map to the option ``name`` of the actor and of the critic."""
    return option(*(f"{section}.{name}" for section in BOTH))


def _strategy(path: str) -> Rule:
    return lambda value, source: {path: 0} if value == "no" else f"{path} counts updates"


BOTH = ("algorithm", "critic")
TABLE: dict[str, Entry] = {
    "num_ppo_epochs": "algorithm.update_epoch",
    "num_mini_batches": _batches,
    "per_device_train_batch_size": _micro,
    "gradient_accumulation_steps": _batches,
    "world_size": _batches,
    "batch_size": _batches,
    "total_episodes": _length,
    "num_total_batches": _length,
    "num_train_epochs": lambda value, source: (
        reasons.EPOCHS if _updates(source) is None else "total_episodes takes precedence there, too"
    ),
    "learning_rate": _both("lr"),
    "lr_scheduler_type": _both("lr_schedule"),
    "warmup_steps": _both("lr_warmup"),
    "warmup_ratio": _warmup_ratio,
    "weight_decay": _both("weight_decay"),
    "max_grad_norm": _grad_norm,
    **same_names("algorithm.", "adam_beta1 adam_beta2 gamma response_length"),
    "adam_epsilon": "algorithm.adam_eps",
    "kl_coef": _kl,
    "kl_estimator": "algorithm.kl_penalty",
    "cliprange": option("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "cliprange_value": "algorithm.value_clip",
    "lam": "algorithm.gae_lambda",
    "whiten_rewards": _whitening,
    "temperature": "rollout.temperature",
    "missing_eos_penalty": lambda value, source: {"algorithm.missing_eos_penalty": value or 0.0},
    "stop_token": only_values(
        "eos",
        None,
        same="a response ends at its end token, as here",
        other="write rollout.stop_token_ids",
    ),
    "stop_token_id": lambda value, source: (
        "null: the end tokens of model and tokenizer"
        if value is None
        else {"rollout.stop_token_ids": [value]}
    ),
    "local_rollout_forward_batch_size": "rollout.slots",
    "sft_model_path": "actor.model.path",
    "model_name_or_path": lambda value, source: (
        {"actor.tokenizer": value} if source.get("sft_model_path") else {"actor.model.path": value}
    ),
    "reward_model_path": "reward.model.path",
    "bf16": lambda value, source: {"actor.model.dtype": "bfloat16" if value else "float32"},
    "dtype": dtype_option("actor.model.dtype"),
    "torch_dtype": dtype_option("actor.model.dtype"),
    "fp16": only_off("float32 or bfloat16: actor.model.dtype"),
    "gradient_checkpointing": "actor.model.gradient_checkpointing",
    "seed": "seed",
    "eval_steps": _steps("eval_every"),
    "eval_strategy": _strategy("eval_every"),
    "save_steps": _steps("save_every"),
    "save_strategy": _strategy("save_every"),
    "save_total_limit": option_if_set(
        "keep_last", "null: all; here the last keep_last checkpoints and the best"
    ),
    "run_name": option_if_set("name", "null: the file's name"),
    "exp_name": "name",
    "use_peft": only_values(False, same="no adapters, as here", other=reasons.NO_ADAPTERS),
    **no_options(
        {
            "set by their program from num_mini_batches": "*mini_batch_size",
            "set by their program": "local_batch_size micro_batch_size",
            "not read by their PPO; total_episodes sets the length": "max_steps",
            "AdamW is the only optimiser here": "optim*",
            "the critic has its own optimiser, whose steps do not depend on the weight of its loss;"
            " critic.lr sets its step size": "vf_coef",
            "matmul_precision=high": "tf32",
            "only actor.model.gradient_checkpointing exists here": "gradient_checkpointing_kwargs*",
            reasons.SEEDS: "data_seed",
            reasons.RESUME: "resume_from_checkpoint",
            reasons.LOGGING: "output_dir log* report_to*",
            "the report shows 20 answers of every evaluation": "num_sample_generations",
            "embodied-ppo export writes a directory for transformers": "push_to_hub hub_*",
            reasons.LOADER: "dataset_num_proc dataloader_*",
            reasons.DATASET: "dataset_*",
            "changes no number here": "per_device_eval_batch_size",
            reasons.NO_ADAPTERS: "*_adapter_name lora_*",
            "trained weights are float32": "load_in_*",
            "there is one forward pass here": "attn_implementation",
            "a model is a directory: actor.model.path": "model_revision",
            reasons.REMOTE: "trust_remote_code",
            reasons.SHARDED: "ds3_gather_for_generation deepspeed* fsdp* ddp_*",
            "compile=always, auto or never": "torch_compile*",
        }
    ),
}

TRL = Framework(
    "TRL",
    TABLE,
    reasoning,
    {
        "num_ppo_epochs": 4,
        "num_mini_batches": 1,
        "learning_rate": 3e-6,
        "lr_scheduler_type": "linear",
        "kl_coef": 0.05,
        "cliprange_value": 0.2,
        "lam": 0.95,
        "temperature": 0.7,
        "response_length": 53,
        "max_grad_norm": 1.0,
        "bf16": True,
    },
    {"algorithm.clip_ratio_c": None},
    differences=_differences,
)
