"""TRL's PPOConfig (as of July 2026) -> ours."""

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
    Peer,
    Rule,
    Source,
    dtype,
    given,
    none,
    only,
    ours,
    reasoning,
)


def _batch(source: Source) -> int:
    """Prompts of an update, each with one response."""
    if (whole := source.get("batch_size")) is not None:
        return int(whole)
    each = int(source.get("per_device_train_batch_size", 8)) * int(source.get("gradient_accumulation_steps", 1))
    return each * int(source.get("world_size", 1))


def _updates(source: Source) -> int | None:
    if (total := source.get("num_total_batches")) is not None:
        return int(total)
    episodes = source.get("total_episodes")
    return None if episodes is None else math.ceil(episodes / _batch(source))


def _batches(value: Any, source: Source) -> Answer:
    batch, parts = _batch(source), int(source.get("num_mini_batches", 1))
    if parts < 1 or batch % parts:
        return f"num_mini_batches = {parts} does not divide the batch of {batch}, which theirs refuses, too"
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
    """After the KL penalty; the mean is kept."""
    order = {"algorithm.whiten_after_kl": True} if value and source.get("kl_coef", 0.05) else {}
    return {"algorithm.whiten_rewards": bool(value), **order}


def _grad_norm(value: Any, source: Source) -> Answer:
    """Their loop does not clip gradients; DeepSpeed's engine does."""
    return {f"{section}.max_grad_norm": value if source.has("deepspeed") else None for section in BOTH}


def _differences(source: Source) -> dict[str, str]:
    """What no option of ours says."""
    differences: dict[str, str] = {}
    if source.get("max_grad_norm") and not source.has("deepspeed"):
        differences["max_grad_norm"] = (
            "their PPO reads it with DeepSpeed only and clips no gradient otherwise, nor does the import"
        )
    if source.get("whiten_rewards"):
        differences["whiten_rewards"] = (
            "theirs whitens in each process for itself, over one place more than the tokens: the score has its own"
        )
    accumulated, parts = (int(source.get(name, 1)) for name in ("gradient_accumulation_steps", "num_mini_batches"))
    if accumulated > 1 and parts > 1:
        differences["num_mini_batches"] = (
            f"their optimiser steps once in gradient_accumulation_steps = {accumulated} backward passes, also across "
            f"minibatches; for that write algorithm.global_batch_size={_batch(source) // max(1, parts // accumulated)}"
        )
    return differences


def _steps(path: str) -> Rule:
    """Updates; below 1 a share of all of them."""

    def rule(value: Any, source: Source) -> Answer:
        if not isinstance(value, (int, float)) or value >= 1:
            return {path: int(value) if isinstance(value, float) else value}
        updates = _updates(source)
        return f"a share of all updates; write {path}" if updates is None else {path: math.ceil(updates * value)}

    return rule


def _strategy(path: str) -> Rule:
    return lambda value, source: {path: 0} if value == "no" else f"{path} counts updates"


BOTH = ("algorithm", "critic")
TABLE: dict[str, Rule] = {
    "num_ppo_epochs": ours("algorithm.update_epoch"),
    "num_mini_batches": _batches,
    "per_device_train_batch_size": _micro,
    "gradient_accumulation_steps": _batches,
    "world_size": _batches,
    "batch_size": _batches,
    "*mini_batch_size": none("their program's own: num_mini_batches says it"),
    "local_batch_size": none("their program's own"),
    "micro_batch_size": none("their program's own"),
    "total_episodes": _length,
    "num_total_batches": _length,
    "num_train_epochs": lambda value, source: (
        "total_episodes wins there, too" if _updates(source) is not None else EPOCHS
    ),
    "max_steps": none("not read by their PPO: total_episodes says it"),
    "learning_rate": ours(*(f"{s}.lr" for s in BOTH)),
    "lr_scheduler_type": ours(*(f"{s}.lr_schedule" for s in BOTH)),
    "warmup_steps": ours(*(f"{s}.lr_warmup" for s in BOTH)),
    "warmup_ratio": lambda value, source: (
        {f"{s}.lr_warmup": math.ceil(value * (_updates(source) or 0)) for s in BOTH}
        if not value or _updates(source) is not None
        else f"a share of all updates; write algorithm.lr_warmup = {show(value)} x updates"
    ),
    "weight_decay": ours(*(f"{s}.weight_decay" for s in BOTH)),
    "max_grad_norm": _grad_norm,
    "adam_beta1": ours("algorithm.adam_beta1"),
    "adam_beta2": ours("algorithm.adam_beta2"),
    "adam_epsilon": ours("algorithm.adam_eps"),
    "optim*": none("AdamW is the only optimiser here"),
    "kl_coef": _kl,
    "kl_estimator": ours("algorithm.kl_penalty"),
    "cliprange": ours("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "cliprange_value": ours("algorithm.value_clip"),
    "vf_coef": none("the critic has an optimiser of its own, whose steps do not depend on the weight of its loss; "
                    "critic.lr is how fast it learns"),
    "gamma": ours("algorithm.gamma"),
    "lam": ours("algorithm.gae_lambda"),
    "whiten_rewards": _whitening,
    "response_length": ours("algorithm.response_length"),
    "temperature": ours("rollout.temperature"),
    "missing_eos_penalty": lambda value, source: {"algorithm.missing_eos_penalty": value or 0.0},
    "stop_token": only("eos", None, same="a response ends at its end token, as here", other="write "
                       "rollout.stop_token_ids"),
    "stop_token_id": lambda value, source: (
        "null: end tokens of model and tokenizer" if value is None else {"rollout.stop_token_ids": [value]}
    ),
    "local_rollout_forward_batch_size": ours("rollout.slots"),
    "sft_model_path": ours("actor.model.path"),
    "model_name_or_path": lambda value, source: (
        {"actor.tokenizer": value} if source.get("sft_model_path") else {"actor.model.path": value}
    ),
    "reward_model_path": ours("reward.model.path"),
    "bf16": lambda value, source: {"actor.model.dtype": "bfloat16" if value else "float32"},
    "dtype": dtype("actor.model.dtype"),
    "torch_dtype": dtype("actor.model.dtype"),
    "fp16": only(False, same="off, as here", other="float32 or bfloat16: actor.model.dtype"),
    "tf32": none("matmul_precision=high"),
    "gradient_checkpointing": ours("actor.model.gradient_checkpointing"),
    "gradient_checkpointing_kwargs*": none("actor.model.gradient_checkpointing is all"),
    "seed": ours("seed"),
    "data_seed": none(SEEDS),
    "eval_steps": _steps("eval_every"),
    "eval_strategy": _strategy("eval_every"),
    "save_steps": _steps("save_every"),
    "save_strategy": _strategy("save_every"),
    "save_total_limit": given("keep_last", "null: all; here keep_last and the best"),
    "run_name": given("name", "null: the file's name"),
    "resume_from_checkpoint": none(RESUME),
    "output_dir": none(LOGGING),
    "log*": none(LOGGING),
    "report_to*": none(LOGGING),
    "num_sample_generations": none("the report shows 20 answers of every evaluation"),
    "push_to_hub": none("embodied-ppo export writes a directory for transformers"),
    "hub_*": none("embodied-ppo export writes a directory for transformers"),
    "dataset_num_proc": none(LOADER),
    "dataset_*": none(DATASET),
    "dataloader_*": none(LOADER),
    "per_device_eval_batch_size": none("changes no number here"),
    "use_peft": only(False, same="no adapters, as here", other="adapters of language models are not there"),
    "*_adapter_name": none("adapters of language models are not there"),
    "lora_*": none("adapters of language models are not there"),
    "load_in_*": none("weights that learn are float32"),
    "attn_implementation": none("ours has one forward pass"),
    "model_revision": none("a model is a directory: actor.model.path"),
    "trust_remote_code": none(REMOTE),
    "exp_name": ours("name"),
    "ds3_gather_for_generation": none(SHARDED),
    "deepspeed*": none(SHARDED),
    "fsdp*": none(SHARDED),
    "ddp_*": none(SHARDED),
    "torch_compile*": none("compile=always, auto or never"),
}  # fmt: skip

TRL = Peer(
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
