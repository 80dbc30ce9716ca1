"""PPO options of ROLL (RLVR pipeline, August 2026), mapped to ours."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from embodied_ppo.core.errors import show
from embodied_ppo.interop import reasons
from embodied_ppo.interop.rules import (
    KL,
    LANGUAGE_LORA,
    TRAINING_SAMPLES,
    Answer,
    Entry,
    Framework,
    Rule,
    Source,
    dtype_option,
    engine,
    list_option,
    no_options,
    no_sections,
    only_off,
    only_values,
    option,
    option_if_set,
    prefixed,
    read_if,
    reasoning,
    same_names,
    sampling_option,
    warmup_fraction,
    warmup_steps,
)

MAX_DEVICES = 100_000
"""Largest number of devices in a range."""
DEVICES = re.compile(r"list\(range\((\d+),(\d+)(?:,(\d+))?\)\)|(?:list\()?\[(\d+(?:,\d+)*)\]\)?")


def _devices(value: Any) -> list[int] | None:
    """Parse ``list(range(0,8))``, ``[0, 1]`` and sums of these; None for other text."""
    if isinstance(value, list) and all(type(d) is int for d in value):
        return sorted(value)
    devices: list[int] = []
    for part in "".join(str(value).split()).split("+"):
        if not (match := DEVICES.fullmatch(part)):
            return None
        low, high, step, single = match.groups()
        if not single and int(high) - int(low) > MAX_DEVICES:
            return None
        devices += (
            [int(d) for d in single.split(",")]
            if single
            else range(int(low), int(high), int(step or 1) or 1)
        )
    return sorted(set(devices))


def _compact(devices: Sequence[int]) -> Any:
    """Convert [0, 1, 2, 5] to ["0-2", 5]."""
    runs: list[list[int]] = []
    for d in devices:
        if runs and runs[-1][1] == d - 1:
            runs[-1][1] = d
        else:
            runs.append([d, d])
    plain = [low if low == high else f"{low}-{high}" for low, high in runs]
    return plain[0] if len(plain) == 1 else plain


_ROLES = {
    "actor_train": "actor",
    "actor_infer": "rollout",
    "reference": "reference",
    "critic": "critic",
}


def _placement(value: Any, source: Source) -> Answer:
    """Map the devices of all roles; rewards are graded in the rollout processes."""
    roles = dict(_ROLES)
    if not _has_critic(source):
        roles.pop("critic")
    if not _has_reference(source):
        roles.pop("reference")
    placement: dict[str, Any] = {}
    last = 0
    for name, role in roles.items():
        mapping = source.get(f"{name}.device_mapping")
        if mapping is None:
            return (
                f"{name}.device_mapping is missing in the file; write"
                " cluster.component_placement, or placement=fused"
            )
        devices = _devices(mapping)
        if not devices:
            return (
                f"{name}.device_mapping = {show(mapping)} is not understood; write"
                " cluster.component_placement"
            )
        placement["rollout,reward" if role == "rollout" else role] = _compact(devices)
        last = max(last, *devices)
    if set(map(str, placement.values())) == {"0"}:
        return "one device needs one process: placement=local, the default"
    devices_per_node = int(source.get("num_gpus_per_node", 8))
    return {
        "cluster.component_placement": placement,
        "cluster.num_nodes": last // devices_per_node + 1,
        "cluster.devices_per_node": devices_per_node,
    }


def _critic_devices(value: Any, source: Source) -> Answer:
    return _placement(value, source) if _has_critic(source) else "this estimator has no critic"


def _reference_devices(value: Any, source: Source) -> Answer:
    if _has_reference(source):
        return _placement(value, source)
    return "without a KL term there is no reference"


def _batch(role: str, path: str) -> Rule:
    """Map the responses of an optimiser step, over all devices, to prompts."""

    def rule(value: Any, source: Source) -> Answer:
        responses, group = _responses(role, source), _group_size(source)
        if responses is None or responses % group:
            return (
                f"write {path}: prompts of an optimiser step (theirs: responses of one device, here"
                f" {show(value)})"
            )
        return {path: responses // group}

    return rule


def _group_size(source: Source) -> int:
    return int(source.get("num_return_sequences_in_group", 1))


def _responses(role: str, source: Source) -> int | None:
    """Return the responses of an optimiser step, None if the file does not define them.

    They are per_device_train_batch_size x gradient_accumulation_steps x copies of the model.
    """
    devices = _devices(source.get(f"{role}.device_mapping"))
    if not devices:
        return None

    def product(section: str, defaults: dict[str, int]) -> int:
        values = (source.get(f"{role}.{section}.{k}", default) for k, default in defaults.items())
        return math.prod(map(int, values))

    split = product(
        "strategy_args.strategy_config",
        {
            f"{kind}_size": 1
            for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
        },
    )
    per_copy = product(
        "training_args", {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    )
    return per_copy * max(1, len(devices) // split)


def _steps_per_update(role: str) -> Callable[[Source], float | None]:
    def steps(source: Source) -> float | None:
        responses = _responses(role, source)
        prompts = source.get("rollout_batch_size", 128)
        # Their critic takes one epoch.
        epochs = source.get("ppo_epochs", 1) if role == "actor_train" else 1
        if not responses:
            return None
        return epochs * max(1.0, prompts * _group_size(source) / responses)

    return steps


def _epochs(value: Any, source: Source) -> Answer:
    """Map the epochs; their critic always takes one (CriticWorker.train_step)."""
    critic = {"critic.update_epoch": 1} if _has_critic(source) else {}
    return {"algorithm.update_epoch": value, **critic}


def _has_critic(source: Source) -> bool:
    return source.get("adv_estimator", "gae") == "gae"


def _has_penalty(source: Source) -> bool:
    return bool(source.get("add_token_level_kl", False))


def _has_reference(source: Source) -> bool:
    return bool(source.get("use_kl_loss", False)) or _has_penalty(source)


def _normalizes(source: Source) -> bool:
    """Return whether scores are normalised first."""
    answers = _norm(None, source), _old_norm(source.get("reward_norm"), source)
    mapped = any(isinstance(answer, dict) and answer["algorithm.reward_norm"] for answer in answers)
    return mapped or source.get("adv_estimator") == "grpo"


def _whitening(value: Any, source: Source) -> Answer:
    """Map whitening, which subtracts the mean and follows the KL penalty (compute_advantage)."""
    if not value:
        return {"algorithm.whiten_rewards": False}
    order = {"algorithm.whiten_after_kl": True} if _has_penalty(source) else {}
    return {"algorithm.whiten_rewards": True, "algorithm.whiten_subtract_mean": True} | order


def _reward_clip(value: Any, source: Source) -> Answer:
    """Map clipping, which follows normalisation and again the KL penalty; 0 is off."""
    if not value:
        return {"algorithm.reward_clip": None}
    after = _has_penalty(source) or _normalizes(source)
    order = {"algorithm.reward_clip_order": "after_norm"} if after else {}
    return {"algorithm.reward_clip": value, **order}


SUM_NORM = "seq-mean-token-sum-norm"


def _aggregation(value: Any, source: Source) -> Answer:
    factor = _sum_norm_factor(source) if value == SUM_NORM else None
    scale = {"algorithm.loss_scale_factor": factor} if factor else {}
    return {"algorithm.loss_agg_func": value, **scale}


def _sum_norm_factor(source: Source) -> float | None:
    """Return loss_scale_factor for their loss, None if the file does not define it.

    Their loss is the sum over all sequences of a step / (sequence_length - 1), ours the mean over
    the sequences / loss_scale_factor.
    """
    length, responses = source.get("sequence_length"), _responses("actor_train", source)
    if length is None and source.get("response_length") is not None:
        length = source.get("response_length") + source.get("prompt_length", 1024)
    dynamic = source.get("actor_train.use_dynamic_batching_in_train")
    return None if length is None or responses is None or dynamic else (length - 1) / responses


OLD_NORM = (
    "of ROLL before 25 September 2025; later versions read norm_mean_type and norm_std_type instead"
)


def _old_norm(value: Any, source: Source) -> Answer:
    if value in (None, "None"):
        return "null: set by norm_mean_type and norm_std_type"
    if source.has("norm_mean_type") or source.has("norm_std_type"):
        return OLD_NORM
    if source.get("adv_estimator") == "grpo":
        return "adv_estimator=grpo normalises over the group there, too"
    if value == "running":
        return RUNNING
    return {
        "algorithm.reward_norm": value,
        "algorithm.reward_shift": bool(source.get("reward_shift", False)),
    }


RUNNING = (
    "their code keeps a running mean and deviation of the scores; reward_norm=running here "
    "divides by the running deviation of the discounted return; write "
    "algorithm.reward_norm=batch, or leave scores unnormalised"
)


def _norm(value: Any, source: Source) -> Answer:
    if source.get("adv_estimator") == "grpo":
        return "adv_estimator=grpo sets both to group there, too"
    mean, std = source.get("norm_mean_type"), source.get("norm_std_type")
    if "running" in (mean, std):
        return RUNNING
    if None not in (mean, std) and mean != std:
        return (
            "here mean and deviation are both of the batch, or both of the group:"
            " algorithm.reward_norm"
        )
    kind = mean or std
    return {
        "algorithm.reward_norm": kind,
        "algorithm.reward_shift": kind is not None and std is None,
        "algorithm.reward_scale": kind is not None and mean is None,
    }


def _clip(*sides: str) -> Rule:
    """Map a clip range of one side, or of both, which their code does not read together."""

    def rule(value: Any, source: Source) -> Answer:
        one_sided = bool(source.get("use_pg_clip_range", False))
        if one_sided != (len(sides) == 1):
            return f"not read there either: use_pg_clip_range = {show(one_sided)}"
        return {f"algorithm.clip_ratio_{side}": value for side in sides}

    return rule


def _estimator(value: Any, source: Source) -> Answer:
    """Map the estimator.

    Their grpo is the return-to-go of scores normalised over the group. That equals ours unless
    another reward enters the sum.
    """
    if value == "gae":  # their value loss averages over sequences, whatever loss_agg_mode is
        return {"algorithm.adv_type": "gae", "critic.loss_agg_func": "seq-mean-token-mean"}
    answer = {"algorithm.adv_type": value, "critic.use_critic_model": False}
    others = source.get("reward_clip"), source.get("whiten_rewards"), source.get("gamma", 1) != 1
    if value == "grpo" and (_has_penalty(source) or any(others)):
        return answer | {"algorithm.adv_type": "reinforce", "algorithm.reward_norm": "group"}
    return answer


def _differences(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    differences: dict[str, str] = {}
    if source.get("reward_norm") in ("batch", "group") and isinstance(
        _old_norm(source.get("reward_norm"), source), dict
    ):
        differences["reward_norm"] = (
            f"an option {OLD_NORM}; a later version ignores it; it is mapped as in the old version"
        )
    if source.get("loss_agg_mode") == SUM_NORM and _sum_norm_factor(source) is None:
        differences["loss_agg_mode"] = (
            "their loss is the sum over all sequences of a step / (sequence_length - 1), ours "
            "their mean / response_length; write algorithm.loss_scale_factor = (sequence_length - "
            "1) / responses of a step"
        )
    if _has_critic(source) and (source.get("lambd", 0.95) != 1 or source.get("gamma", 1) != 1):
        differences["lambd"] = (
            "their GAE starts at the end of the padding with the critic's value there, ours at the"
            " last token"
        )
    return differences


def _dual(value: Any, source: Source) -> Answer:
    return {"algorithm.clip_ratio_c": 1 + 2 * source.get("pg_clip", 0.2) if value else None}


def _target(value: Any, source: Source) -> Answer:
    if value is None:
        return {"algorithm.kl_ctrl.type": "fixed"}
    return {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": value}


def _response(value: Any, source: Source) -> Answer:
    if value is None:
        return "null: set by the other one"
    return {"algorithm.response_length": value - source.get("prompt_length", 1024)}


def _training(role: str, section: str) -> dict[str, Entry]:
    path = f"{section}.global_batch_size"
    if section == "algorithm":
        by_role: dict[str, Entry] = {
            "per_device_train_batch_size": "algorithm.micro_batch_size",
            **same_names("algorithm.", "adam_beta1 adam_beta2"),
        }
    else:
        by_role = {
            "per_device_train_batch_size": _batch(role, path),
            **no_options({"set for the actor: algorithm.adam_*": "adam_beta1 adam_beta2"}),
        }
    return {
        "learning_rate": f"{section}.lr",
        "weight_decay": f"{section}.weight_decay",
        "lr_scheduler_type": f"{section}.lr_schedule",
        "warmup_steps": warmup_steps(section, _steps_per_update(role)),
        "warmup_ratio": warmup_fraction(section, lambda source: source.get("max_steps")),
        "gradient_accumulation_steps": _batch(role, path),
        **by_role,
        **no_options(
            {
                "set by max_steps": "num_train_epochs",
                reasons.SEEDS: "seed data_seed",
                reasons.LOADER: "dataloader_num_workers",
            }
        ),
        **no_sections(
            "fp16 bf16 max_steps output_dir", "how their trainer runs; trained weights are float32"
        ),
    }


def _model(section: str) -> dict[str, Entry]:
    return {
        "model_name_or_path": option_if_set(f"{section}.model.path", "null: set by pretrain"),
        "dtype": dtype_option(f"{section}.model.dtype"),
        "disable_gradient_checkpointing": lambda value, source: {
            f"{section}.model.gradient_checkpointing": not value
        },
        "lora_rank": LANGUAGE_LORA,
        **no_sections(
            "additional_target autocast_adapter_dtype lora_alpha lora_dropout lora_target "
            "adapter_name_or_path device_map attn_implementation moe_aux_loss_coef "
            "gradient_checkpointing_use_reentrant model_type num_labels model_config_kwargs "
            "freeze_module_prefix ulysses_size",
            "how their code runs the model (kernels, attention, adapters, frozen modules)",
        ),
    }


_ENVIRONMENT = "set environment variables in the shell"
_REPLACED_PROMPTS = (
    "algorithm.group_filter=success replaces prompts whose responses are all right or all wrong"
)
_WORKER: dict[str, Entry] = {
    **no_options(
        {
            reasons.MEMORY: (
                "infer_batch_size max_tokens_per_microbatch_in_infer sequence_length_round_*"
            ),
            reasons.MICRO_BATCH_TOKENS: "use_dynamic_batching_*",
            reasons.SHARDED: "strategy_args.*",
            reasons.THEIR_CODE: "worker_cls",
            _ENVIRONMENT: "system_envs*",
            reasons.OFFLOAD: "offload_nccl",
            "data.train, data.eval and the keys of a row: docs/language.md": "data_args.*",
        }
    ),
    **no_sections(
        "name pg_variant world_size num_gpus_per_worker model_update_frequency backend_timeout "
        "max_concurrency use_sequence_packing sequence_packing_args router_replay "
        "apply_loss_scale mtp_training_mode tag_included",
        "how their workers run",
    ),
}
_ALGORITHM: dict[str, Entry] = {
    **same_names(
        "algorithm.",
        "rollout_batch_size prompt_length kl_loss_coef advantage_clip gamma value_clip "
        "max_grad_norm critic_warmup",
    ),
    "response_length": option_if_set("algorithm.response_length", "null: set by sequence_length"),
    "sequence_length": _response,
    "adv_estimator": _estimator,
    "num_return_sequences_in_group": "algorithm.group_size",
    "ppo_epochs": _epochs,
    "use_kl_loss": lambda value, source: {
        "algorithm.use_kl_loss": value,
        "algorithm.kl_loss_type": "k3",
    },
    "loss_agg_mode": _aggregation,
    "entropy_loss_coef": "algorithm.entropy_bonus",
    "whiten_advantages": "algorithm.normalize_advantages",
    "whiten_rewards": _whitening,
    "reward_clip": _reward_clip,
    "dual_clip_loss": _dual,
    "lambd": "algorithm.gae_lambda",
    "pg_clip": _clip("low", "high"),
    "pg_clip_low": _clip("low"),
    "pg_clip_high": _clip("high"),
    "kl_penalty": option("algorithm.kl_penalty", values=KL),
    "target_kl": _target,
    "init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "kl_horizon": "algorithm.kl_ctrl.horizon",
    "add_token_level_kl": "algorithm.use_kl_in_reward",
    "norm_mean_type": _norm,
    "norm_std_type": _norm,
    "reward_norm": _old_norm,
    "use_reward_scaling": only_off("set by algorithm.reward_norm"),
    "use_reward_norm": only_off("set by algorithm.reward_norm"),
    "add_len_reward": only_off("write a grader that includes the length"),
    "l2": only_values(
        0,
        0.0,
        same="off, as here",
        other="weight decay is decoupled, as in AdamW: algorithm.weight_decay",
    ),
    "async_generation_ratio": lambda value, source: (
        {"cluster.max_lag": math.ceil(value)} if value else "0: rollouts wait for updates, as here"
    ),
    "max_len_mask": lambda value, source: {"rollout.truncation": "drop" if value else "terminal"},
    "importance_sampling": option("algorithm.ratio_level", values={"seq": "sequence"}),
    "use_policy_loss_type": only_values("PPO", same="PPO, as here", other=reasons.OTHER_LOSS),
    "rl_loss_coef": only_values(1, 1.0, same="1, as here", other=reasons.OTHER_LOSS),
    "train_infer_correction.is_weight.weight_type": read_if(
        "train_infer_correction.is_weight.enabled", "algorithm.off_policy_correction"
    ),
    "train_infer_correction.is_weight.upper_bound": read_if(
        "train_infer_correction.is_weight.enabled", "algorithm.off_policy_cap"
    ),
    **no_options(
        {
            "pg_clip_low and pg_clip_high, if read, have this effect": "use_pg_clip_range",
            "part of algorithm.reward_shift, if reward_norm is read": "reward_shift",
            "read with reward_norm=running only, which has no counterpart": "reward_scale",
            "responses are not masked or weighted by the difficulty of a prompt": "difficulty_*",
            "responses are not weighted by length; algorithm.loss_agg_func sets how tokens are"
            " averaged": "length_loss_weight",
            "rollout.truncation=drop leaves truncated responses out": "error_max_len_*",
            reasons.OTHER_LOSS: "*topr* postive_loss_coef",
            "a reference exists if a KL term needs it": "enable_reference",
            "algorithm.recompute_log_probs=true recomputes them": "*old_logprobs_recompute",
            "algorithm.off_policy_correction, if set, has this effect": (
                "train_infer_correction.is_weight.enabled"
            ),
            "rejection of samples is not supported": "train_infer_correction.*",
        }
    ),
}
_GENERATION: dict[str, Entry] = {
    "temperature": "rollout.temperature",
    "top_p": sampling_option("top_p", 1, 1.0),
    "top_k": sampling_option("top_k", 0, -1),
    "repetition_penalty": sampling_option("repetition_penalty", 1, 1.0),
    "stop_strings": option_if_set("rollout.stop", "null: end tokens, as here"),
    "num_beams": only_values(
        1, same="sampling, as here", other="training samples; beam search is not supported"
    ),
    "do_sample": TRAINING_SAMPLES,
    **no_sections(
        "max_new_tokens max_length num_return_sequences length_penalty logprobs"
        " include_stop_str_in_output",
        "set by response_length and num_return_sequences_in_group",
    ),
}
_VALIDATION: dict[str, Entry] = {
    "data_args.file_name": list_option("data.eval"),
    "generating_args.num_return_sequences": "evaluation.n",
    "generating_args.max_new_tokens": "evaluation.response_length",
    "generating_args.temperature": lambda value, source: (
        {"evaluation.deterministic": False, "evaluation.temperature": value}
        if value
        else {"evaluation.deterministic": True}
    ),
    "generating_args.top_p": "evaluation.top_p",
    "generating_args.top_k": lambda value, source: {"evaluation.top_k": max(0, value or 0)},
    **no_sections(
        "data_args generating_args.num_beams generating_args.do_sample worker_cls "
        "model_args strategy_args name world_size",
        "evaluation is greedy or samples, on data.eval: section evaluation",
    ),
}
TABLE: dict[str, Entry] = {
    **_ALGORITHM,
    **prefixed("actor_train.", _WORKER),
    **prefixed("actor_infer.", _WORKER),
    **prefixed("critic.", _WORKER),
    "pretrain": "actor.model.path",
    "max_steps": "updates",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "max_ckpt_to_keep": lambda value, source: (
        {"keep_last": value}
        if value
        else "0: all; here the last keep_last checkpoints and the best"
    ),
    "seed": "seed",
    "exp_name": "name",
    **prefixed("actor_train.training_args.", _training("actor_train", "algorithm")),
    **prefixed("actor_train.model_args.", _model("actor")),
    "actor_train.device_mapping": _placement,
    "actor_train.max_tokens_per_microbatch_in_train": read_if(
        "actor_train.use_dynamic_batching_in_train", "algorithm.micro_batch_tokens"
    ),
    "actor_train.data_args.file_name": list_option("data.train"),
    "actor_train.data_args.prompt": option_if_set("data.prompt_key", "null: prompt, as here"),
    **prefixed("actor_infer.generating_args.", _GENERATION),
    "actor_infer.strategy_args.strategy_name": engine,
    "actor_infer.strategy_args.strategy_config.gpu_memory_utilization": (
        "rollout.gpu_memory_utilization"
    ),
    "actor_infer.device_mapping": _placement,
    "reference.device_mapping": _reference_devices,
    **prefixed("critic.training_args.", _training("critic", "critic")),
    **prefixed("critic.model_args.", _model("critic")),
    "critic.device_mapping": _critic_devices,
    **prefixed("validation.", _VALIDATION),
    "val_greedy": "evaluation.deterministic",
    "val_n_sample": "evaluation.n",
    "rpc_timeout": "cluster.step_timeout_s",
    **no_options(
        {
            "their critic starts from it; here critic.model.path=null copies the actor, and"
            " reward.model.path is a reward model": "reward_pretrain",
            reasons.RESUME: "resume_from_checkpoint",
            reasons.ENGINE: (
                "actor_infer.strategy_args.* generate_opt_level is_num_return_sequences_expand"
                " max_running_requests router_args*"
            ),
            reasons.ACTOR_WEIGHTS: "actor_infer.model_args.*",
            reasons.NO_REFERENCE_OPTIONS: "reference.*",
            "changes no number here; evaluation.response_length is the longest answer": "val_*",
            "write reward.grader (math_verify, gsm8k_numeric, FILE.py:function) or"
            " reward.model.path": "rewards.*",
            "reward.model.path is a directory of a sequence-classification model": "reward_model.*",
            "write reward.grader or reward.model.path": "reward.*",
            "written to cluster.devices_per_node if roles have devices": "num_gpus_per_node",
            "written to cluster.num_nodes if roles have devices": "num_nodes",
            reasons.OFFLOAD: "is_offload*",
            _REPLACED_PROMPTS: "is_use_additional_prompts max_additional_running_prompts",
            reasons.WEIGHT_TRANSFER: "model_update_buffer_size_mb",
            reasons.DATASET: "model_download_type",
            reasons.LOGGING: "checkpoint_config.* track* logging_* *_dir",
            reasons.PROFILE: "profiler_* report_length_and_rewards",
            _ENVIRONMENT: "system_envs*",
            reasons.CHAT_TEMPLATE: "global_template tag_to_template*",
            reasons.HYDRA: "hydra* defaults",
        }
    ),
}

ROLL = Framework(
    "ROLL",
    TABLE,
    reasoning,
    {
        "rollout_batch_size": 128,
        "adv_estimator": "gae",
        "ppo_epochs": 1,
        "init_kl_coef": 0.2,
        "kl_loss_coef": 0,
        "lambd": 0.95,
        "loss_agg_mode": "seq-mean-token-mean",
        "whiten_advantages": False,
        "dual_clip_loss": False,
        "value_clip": None,
        "actor_train.training_args.learning_rate": 5e-5,
        "actor_train.training_args.lr_scheduler_type": "linear",
        "critic.training_args.learning_rate": 5e-5,
        "max_steps": 500,
    },
    differences=_differences,
)
