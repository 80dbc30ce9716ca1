"""Options of TRL's PPOConfig (July 2026), mapped to ours."""

from __future__ import annotations

import math
from typing import Any

from embodied_ppo.core.errors import show
from embodied_ppo.interop.rules import (
    DATASET,
    EPOCHS,
    LOADER,
    LOGGING,
    REMOTE,
    RESUME,
    SEEDS,
    SHARDED,
    Answer,
    Framework,
    Rule,
    Source,
    dtype_option,
    no_option,
    only_values,
    option,
    option_if_set,
    reasoning,
)


def _batch(source: Source) -> int:
    """Return the prompts of an update, each with one response."""
    if (total := source.get("batch_size")) is not None:
        return int(total)
    each = int(source.get("per_device_train_batch_size", 8)) * int(
        source.get("gradient_accumulation_steps", 1)
    )
    return each * int(source.get("world_size", 1))


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
    return EPOCHS if updates is None else {"updates": updates}


def _kl(value: Any, source: Source) -> Answer:
    return {"algorithm.use_kl_in_reward": bool(value), "algorithm.kl_ctrl.kl_coef": value}


def _whitening(value: Any, source: Source) -> Answer:
    """Map whitening; theirs follows the KL penalty and keeps the mean."""
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
            "passes, also across "
            "minibatches; for that write "
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


def _strategy(path: str) -> Rule:
    return lambda value, source: {path: 0} if value == "no" else f"{path} counts updates"


BOTH = ("algorithm", "critic")
TABLE: dict[str, Rule] = {
    "num_ppo_epochs": option("algorithm.update_epoch"),
    "num_mini_batches": _batches,
    "per_device_train_batch_size": _micro,
    "gradient_accumulation_steps": _batches,
    "world_size": _batches,
    "batch_size": _batches,
    "*mini_batch_size": no_option("set by their program from num_mini_batches"),
    "local_batch_size": no_option("set by their program"),
    "micro_batch_size": no_option("set by their program"),
    "total_episodes": _length,
    "num_total_batches": _length,
    "num_train_epochs": lambda value, source: (
        "total_episodes takes precedence there, too" if _updates(source) is not None else EPOCHS
    ),
    "max_steps": no_option("not read by their PPO; total_episodes sets the length"),
    "learning_rate": option(*(f"{s}.lr" for s in BOTH)),
    "lr_scheduler_type": option(*(f"{s}.lr_schedule" for s in BOTH)),
    "warmup_steps": option(*(f"{s}.lr_warmup" for s in BOTH)),
    "warmup_ratio": lambda value, source: (
        {f"{s}.lr_warmup": math.ceil(value * (_updates(source) or 0)) for s in BOTH}
        if not value or _updates(source) is not None
        else f"a fraction of all updates; write algorithm.lr_warmup = {show(value)} x updates"
    ),
    "weight_decay": option(*(f"{s}.weight_decay" for s in BOTH)),
    "max_grad_norm": _grad_norm,
    "adam_beta1": option("algorithm.adam_beta1"),
    "adam_beta2": option("algorithm.adam_beta2"),
    "adam_epsilon": option("algorithm.adam_eps"),
    "optim*": no_option("AdamW is the only optimiser here"),
    "kl_coef": _kl,
    "kl_estimator": option("algorithm.kl_penalty"),
    "cliprange": option("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "cliprange_value": option("algorithm.value_clip"),
    "vf_coef": no_option(
        "the critic has its own optimiser, whose steps do not depend on the weight of its loss; "
        "critic.lr sets its step size"
    ),
    "gamma": option("algorithm.gamma"),
    "lam": option("algorithm.gae_lambda"),
    "whiten_rewards": _whitening,
    "response_length": option("algorithm.response_length"),
    "temperature": option("rollout.temperature"),
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
    "local_rollout_forward_batch_size": option("rollout.slots"),
    "sft_model_path": option("actor.model.path"),
    "model_name_or_path": lambda value, source: (
        {"actor.tokenizer": value} if source.get("sft_model_path") else {"actor.model.path": value}
    ),
    "reward_model_path": option("reward.model.path"),
    "bf16": lambda value, source: {"actor.model.dtype": "bfloat16" if value else "float32"},
    "dtype": dtype_option("actor.model.dtype"),
    "torch_dtype": dtype_option("actor.model.dtype"),
    "fp16": only_values(False, same="off, as here", other="float32 or bfloat16: actor.model.dtype"),
    "tf32": no_option("matmul_precision=high"),
    "gradient_checkpointing": option("actor.model.gradient_checkpointing"),
    "gradient_checkpointing_kwargs*": no_option(
        "only actor.model.gradient_checkpointing exists here"
    ),
    "seed": option("seed"),
    "data_seed": no_option(SEEDS),
    "eval_steps": _steps("eval_every"),
    "eval_strategy": _strategy("eval_every"),
    "save_steps": _steps("save_every"),
    "save_strategy": _strategy("save_every"),
    "save_total_limit": option_if_set(
        "keep_last", "null: all; here the last keep_last checkpoints and the best"
    ),
    "run_name": option_if_set("name", "null: the file's name"),
    "resume_from_checkpoint": no_option(RESUME),
    "output_dir": no_option(LOGGING),
    "log*": no_option(LOGGING),
    "report_to*": no_option(LOGGING),
    "num_sample_generations": no_option("the report shows 20 answers of every evaluation"),
    "push_to_hub": no_option("embodied-ppo export writes a directory for transformers"),
    "hub_*": no_option("embodied-ppo export writes a directory for transformers"),
    "dataset_num_proc": no_option(LOADER),
    "dataset_*": no_option(DATASET),
    "dataloader_*": no_option(LOADER),
    "per_device_eval_batch_size": no_option("changes no number here"),
    "use_peft": only_values(
        False, same="no adapters, as here", other="adapters of language models are not supported"
    ),
    "*_adapter_name": no_option("adapters of language models are not supported"),
    "lora_*": no_option("adapters of language models are not supported"),
    "load_in_*": no_option("trained weights are float32"),
    "attn_implementation": no_option("there is one forward pass here"),
    "model_revision": no_option("a model is a directory: actor.model.path"),
    "trust_remote_code": no_option(REMOTE),
    "exp_name": option("name"),
    "ds3_gather_for_generation": no_option(SHARDED),
    "deepspeed*": no_option(SHARDED),
    "fsdp*": no_option(SHARDED),
    "ddp_*": no_option(SHARDED),
    "torch_compile*": no_option("compile=always, auto or never"),
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
