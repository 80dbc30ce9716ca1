"""PPO options of ROLL (RLVR pipeline, August 2026), mapped to ours."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from embodied_ppo.core.errors import show
from embodied_ppo.interop.rules import (
    DATASET,
    ENGINE,
    HYDRA,
    KL,
    LANGUAGE_LORA,
    LOADER,
    LOGGING,
    MEMORY,
    OFFLOAD,
    OTHER_LOSS,
    PROFILE,
    RESUME,
    SEEDS,
    SHARDED,
    THEIR_CODE,
    Answer,
    Framework,
    Rule,
    Source,
    dtype_option,
    engine,
    list_option,
    no_option,
    no_options,
    only_values,
    option,
    option_if_set,
    prefixed,
    read_if,
    reasoning,
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
    used = dict(_ROLES)
    if source.get("adv_estimator", "gae") != "gae":
        used.pop("critic")
    if not (source.get("use_kl_loss", False) or source.get("add_token_level_kl", False)):
        used.pop("reference")
    placement: dict[str, Any] = {}
    for theirs, role in used.items():
        mapping = source.get(f"{theirs}.device_mapping")
        if mapping is None:
            return (
                f"{theirs}.device_mapping is missing in the file; write"
                " cluster.component_placement, or placement=fused"
            )
        devices = _devices(mapping)
        if not devices:
            return (
                f"{theirs}.device_mapping = {show(mapping)} is not understood; write"
                " cluster.component_placement"
            )
        placement["rollout,reward" if role == "rollout" else role] = _compact(devices)
    if set(map(str, placement.values())) == {"0"}:
        return "one device needs one process: placement=local, the default"
    last = max(
        d for theirs in used for d in _devices(source.get(f"{theirs}.device_mapping")) or [0]
    )
    each = int(source.get("num_gpus_per_node", 8))
    return {
        "cluster.component_placement": placement,
        "cluster.num_nodes": last // each + 1,
        "cluster.devices_per_node": each,
    }


def _role_devices(role: str) -> Rule:
    def rule(value: Any, source: Source) -> Answer:
        if role == "critic" and source.get("adv_estimator", "gae") != "gae":
            return "this estimator has no critic"
        if role == "reference" and not (
            source.get("use_kl_loss", False) or source.get("add_token_level_kl", False)
        ):
            return "without a KL term there is no reference"
        return _placement(value, source)

    return rule


def _batch(role: str, path: str) -> Rule:
    """Map the responses of an optimiser step, over all devices, to prompts."""

    def rule(value: Any, source: Source) -> Answer:
        responses, group = _step(role, source), int(source.get("num_return_sequences_in_group", 1))
        if responses is None or responses % group:
            return (
                f"write {path}: prompts of an optimiser step (theirs: responses of one device, here"
                f" {show(value)})"
            )
        return {path: responses // group}

    return rule


def _step(role: str, source: Source) -> int | None:
    """per_device_train_batch_size x gradient_accumulation_steps x copies of the model."""
    devices = _devices(source.get(f"{role}.device_mapping"))
    arguments, strategy = f"{role}.training_args.", f"{role}.strategy_args.strategy_config."
    if not devices:
        return None
    split = math.prod(
        int(source.get(f"{strategy}{kind}_size", 1))
        for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    each = int(source.get(f"{arguments}per_device_train_batch_size", 8))
    return (
        each
        * int(source.get(f"{arguments}gradient_accumulation_steps", 1))
        * max(1, len(devices) // split)
    )


def _steps_per_update(role: str) -> Callable[[Source], float | None]:
    def steps(source: Source) -> float | None:
        step, group = _step(role, source), int(source.get("num_return_sequences_in_group", 1))
        prompts = source.get("rollout_batch_size", 128)
        epochs = (
            source.get("ppo_epochs", 1) if role == "actor_train" else 1
        )  # their critic takes one epoch
        return epochs * max(1.0, prompts * group / step) if step else None

    return steps


def _epochs(value: Any, source: Source) -> Answer:
    """Map the epochs; their critic always takes one (CriticWorker.train_step)."""
    return {"algorithm.update_epoch": value} | (
        {"critic.update_epoch": 1} if _has_critic(source) else {}
    )


def _has_critic(source: Source) -> bool:
    return source.get("adv_estimator", "gae") == "gae"


def _has_penalty(source: Source) -> bool:
    return bool(source.get("add_token_level_kl", False))


def _normalizes(source: Source) -> bool:
    """Return whether scores are normalised first."""
    answers = _norm(None, source), _old_norm(source.get("reward_norm"), source)
    mapped = any(isinstance(answer, dict) and answer["algorithm.reward_norm"] for answer in answers)
    return mapped or source.get("adv_estimator") == "grpo"


def _whitening(value: Any, source: Source) -> Answer:
    """Map whitening; theirs subtracts the mean and follows the KL penalty (compute_advantage)."""
    if not value:
        return {"algorithm.whiten_rewards": False}
    order = {"algorithm.whiten_after_kl": True} if _has_penalty(source) else {}
    return {"algorithm.whiten_rewards": True, "algorithm.whiten_subtract_mean": True} | order


def _reward_clip(value: Any, source: Source) -> Answer:
    """Map clipping; theirs follows normalisation and again the KL penalty; 0 is off."""
    if not value:
        return {"algorithm.reward_clip": None}
    later = _has_penalty(source) or _normalizes(source)
    return {"algorithm.reward_clip": value} | (
        {"algorithm.reward_clip_order": "after_norm"} if later else {}
    )


SUM_NORM = "seq-mean-token-sum-norm"


def _aggregation(value: Any, source: Source) -> Answer:
    factor = _sum_norm_factor(source) if value == SUM_NORM else None
    return {"algorithm.loss_agg_func": value} | (
        {"algorithm.loss_scale_factor": factor} if factor else {}
    )


def _sum_norm_factor(source: Source) -> float | None:
    """Return loss_scale_factor for their loss, None if the file does not define it.

    Their loss is the sum over all sequences of a step / (sequence_length - 1), ours the mean over
    the sequences / loss_scale_factor.
    """
    length, responses = source.get("sequence_length"), _step("actor_train", source)
    if length is None and source.get("response_length") is not None:
        length = source.get("response_length") + source.get("prompt_length", 1024)
    if (
        length is None
        or responses is None
        or source.get("actor_train.use_dynamic_batching_in_train")
    ):
        return None
    return (length - 1) / responses


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


def _clip(side: str) -> Rule:
    def rule(value: Any, source: Source) -> Answer:
        ranged = bool(source.get("use_pg_clip_range", False))
        if ranged != (side != "both"):
            return f"not read there either: use_pg_clip_range = {show(ranged)}"
        return {
            f"algorithm.clip_ratio_{s}": value
            for s in (("low", "high") if side == "both" else (side,))
        }

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


def _training(role: str, section: str) -> dict[str, Rule]:
    path = f"{section}.global_batch_size"
    adam = (
        option
        if section == "algorithm"
        else lambda *paths: no_option("set for the actor: algorithm.adam_*")
    )
    return {
        "learning_rate": option(f"{section}.lr"),
        "weight_decay": option(f"{section}.weight_decay"),
        "lr_scheduler_type": option(f"{section}.lr_schedule"),
        "warmup_steps": warmup_steps(section, _steps_per_update(role)),
        "warmup_ratio": warmup_fraction(section, lambda s: s.get("max_steps")),
        "per_device_train_batch_size": (
            _batch(role, path)
            if section == "critic"
            else lambda value, source: {"algorithm.micro_batch_size": value}
        ),
        "gradient_accumulation_steps": _batch(role, path),
        "adam_beta1": adam("algorithm.adam_beta1"),
        "adam_beta2": adam("algorithm.adam_beta2"),
        "num_train_epochs": no_option("set by max_steps"),
        "seed": no_option(SEEDS),
        "data_seed": no_option(SEEDS),
        "dataloader_num_workers": no_option(LOADER),
        **no_options(
            "fp16 bf16 max_steps output_dir", "how their trainer runs; trained weights are float32"
        ),
    }


def _model(section: str) -> dict[str, Rule]:
    return {
        "model_name_or_path": option_if_set(f"{section}.model.path", "null: set by pretrain"),
        "dtype": dtype_option(f"{section}.model.dtype"),
        "disable_gradient_checkpointing": lambda value, source: {
            f"{section}.model.gradient_checkpointing": not value
        },
        "lora_rank": LANGUAGE_LORA,
        **no_options(
            "additional_target autocast_adapter_dtype lora_alpha lora_dropout lora_target "
            "adapter_name_or_path "
            "device_map attn_implementation moe_aux_loss_coef "
            "gradient_checkpointing_use_reentrant model_type "
            "num_labels model_config_kwargs freeze_module_prefix ulysses_size",
            "how their code runs the model (kernels, attention, adapters, frozen modules)",
        ),
    }


_WORKER: dict[str, Rule] = {
    "infer_batch_size": no_option(MEMORY),
    "use_dynamic_batching_*": no_option("algorithm.micro_batch_tokens, if set, has this effect"),
    "max_tokens_per_microbatch_in_infer": no_option(MEMORY),
    "sequence_length_round_*": no_option(MEMORY),
    "strategy_args.*": no_option(SHARDED),
    "worker_cls": no_option(THEIR_CODE),
    "system_envs*": no_option("set environment variables in the shell"),
    "offload_nccl": no_option(OFFLOAD),
    "data_args.*": no_option("data.train, data.eval and the keys of a row: docs/language.md"),
    **no_options(
        "name pg_variant world_size num_gpus_per_worker model_update_frequency backend_timeout "
        "max_concurrency "
        "use_sequence_packing sequence_packing_args router_replay apply_loss_scale "
        "mtp_training_mode tag_included",
        "how their workers run",
    ),
}
TABLE: dict[str, Rule] = {
    **prefixed("actor_train.", _WORKER),
    **prefixed("actor_infer.", _WORKER),
    **prefixed("critic.", _WORKER),
    "rollout_batch_size": option("algorithm.rollout_batch_size"),
    "prompt_length": option("algorithm.prompt_length"),
    "response_length": option_if_set("algorithm.response_length", "null: set by sequence_length"),
    "sequence_length": _response,
    "adv_estimator": _estimator,
    "num_return_sequences_in_group": option("algorithm.group_size"),
    "ppo_epochs": _epochs,
    "use_kl_loss": lambda value, source: {
        "algorithm.use_kl_loss": value,
        "algorithm.kl_loss_type": "k3",
    },
    "kl_loss_coef": option("algorithm.kl_loss_coef"),
    "loss_agg_mode": _aggregation,
    "entropy_loss_coef": option("algorithm.entropy_bonus"),
    "whiten_advantages": option("algorithm.normalize_advantages"),
    "whiten_rewards": _whitening,
    "advantage_clip": option("algorithm.advantage_clip"),
    "reward_clip": _reward_clip,
    "dual_clip_loss": _dual,
    "lambd": option("algorithm.gae_lambda"),
    "gamma": option("algorithm.gamma"),
    "pg_clip": _clip("both"),
    "use_pg_clip_range": no_option("pg_clip_low and pg_clip_high, if read, have this effect"),
    "pg_clip_low": _clip("low"),
    "pg_clip_high": _clip("high"),
    "value_clip": option("algorithm.value_clip"),
    "kl_penalty": option("algorithm.kl_penalty", values=KL),
    "target_kl": _target,
    "init_kl_coef": option("algorithm.kl_ctrl.kl_coef"),
    "kl_horizon": option("algorithm.kl_ctrl.horizon"),
    "add_token_level_kl": option("algorithm.use_kl_in_reward"),
    "norm_mean_type": _norm,
    "norm_std_type": _norm,
    "reward_norm": _old_norm,
    "reward_shift": no_option("part of algorithm.reward_shift, if reward_norm is read"),
    "reward_scale": no_option("read with reward_norm=running only, which has no counterpart"),
    "use_reward_scaling": only_values(
        False, same="off, as here", other="set by algorithm.reward_norm"
    ),
    "use_reward_norm": only_values(
        False, same="off, as here", other="set by algorithm.reward_norm"
    ),
    "add_len_reward": only_values(
        False, same="off, as here", other="write a grader that includes the length"
    ),
    "max_grad_norm": option("algorithm.max_grad_norm"),
    "l2": only_values(
        0,
        0.0,
        same="off, as here",
        other="weight decay is decoupled, as in AdamW: algorithm.weight_decay",
    ),
    "critic_warmup": option("algorithm.critic_warmup"),
    "async_generation_ratio": lambda value, source: (
        {"cluster.max_lag": math.ceil(value)} if value else "0: rollouts wait for updates, as here"
    ),
    "max_len_mask": lambda value, source: {"rollout.truncation": "drop" if value else "terminal"},
    "importance_sampling": only_values(
        "token",
        same="a ratio for each token, as here",
        other="ratios of sequences are not supported",
    ),
    "use_policy_loss_type": only_values("PPO", same="PPO, as here", other=OTHER_LOSS),
    "rl_loss_coef": only_values(1, 1.0, same="1, as here", other=OTHER_LOSS),
    "difficulty_*": no_option("responses are not masked or weighted by the difficulty of a prompt"),
    "length_loss_weight": no_option(
        "responses are not weighted by length; algorithm.loss_agg_func sets how tokens are averaged"
    ),
    "error_max_len_*": no_option("rollout.truncation=drop leaves truncated responses out"),
    "*topr*": no_option(OTHER_LOSS),
    "postive_loss_coef": no_option(OTHER_LOSS),
    "enable_reference": no_option("a reference exists if a KL term needs it"),
    "*old_logprobs_recompute": no_option("algorithm.recompute_log_probs=true recomputes them"),
    "train_infer_correction.is_weight.enabled": no_option(
        "algorithm.off_policy_correction, if set, has this effect"
    ),
    "train_infer_correction.is_weight.weight_type": read_if(
        "train_infer_correction.is_weight.enabled", option("algorithm.off_policy_correction")
    ),
    "train_infer_correction.is_weight.upper_bound": read_if(
        "train_infer_correction.is_weight.enabled", option("algorithm.off_policy_cap")
    ),
    "train_infer_correction.*": no_option("rejection of samples is not supported"),
    "pretrain": option("actor.model.path"),
    "reward_pretrain": no_option(
        "their critic starts from it; here critic.model.path=null copies the actor, and "
        "reward.model.path is a reward model"
    ),
    "max_steps": option("updates"),
    "save_steps": option("save_every"),
    "eval_steps": option("eval_every"),
    "max_ckpt_to_keep": lambda value, source: (
        {"keep_last": value}
        if value
        else "0: all; here the last keep_last checkpoints and the best"
    ),
    "seed": option("seed"),
    "exp_name": option("name"),
    "resume_from_checkpoint": no_option(RESUME),
    **prefixed("actor_train.training_args.", _training("actor_train", "algorithm")),
    **prefixed("actor_train.model_args.", _model("actor")),
    "actor_train.device_mapping": _role_devices("actor"),
    "actor_train.use_dynamic_batching_in_train": no_option(
        "algorithm.micro_batch_tokens, if set, has this effect"
    ),
    "actor_train.max_tokens_per_microbatch_in_train": read_if(
        "actor_train.use_dynamic_batching_in_train", option("algorithm.micro_batch_tokens")
    ),
    "actor_train.data_args.file_name": list_option("data.train"),
    "actor_train.data_args.prompt": option_if_set("data.prompt_key", "null: prompt, as here"),
    "actor_infer.generating_args.temperature": option("rollout.temperature"),
    "actor_infer.generating_args.top_p": sampling_option("top_p", 1, 1.0),
    "actor_infer.generating_args.top_k": sampling_option("top_k", 0, -1),
    "actor_infer.generating_args.repetition_penalty": sampling_option("repetition_penalty", 1, 1.0),
    "actor_infer.generating_args.stop_strings": option_if_set(
        "rollout.stop", "null: end tokens, as here"
    ),
    "actor_infer.generating_args.num_beams": only_values(
        1, same="sampling, as here", other="training samples; beam search is not supported"
    ),
    "actor_infer.generating_args.do_sample": only_values(
        True, same="training samples, as here", other="training always samples here"
    ),
    **prefixed(
        "actor_infer.generating_args.",
        no_options(
            "max_new_tokens max_length num_return_sequences length_penalty logprobs"
            " include_stop_str_in_output",
            "set by response_length and num_return_sequences_in_group",
        ),
    ),
    "actor_infer.strategy_args.strategy_name": engine,
    "actor_infer.strategy_args.*": no_option(ENGINE),
    "actor_infer.device_mapping": _role_devices("rollout"),
    "actor_infer.model_args.*": no_option("the rollout uses the actor's weights"),
    "reference.device_mapping": _role_devices("reference"),
    "reference.*": no_option(
        "the reference is the actor at the start of training; it needs no options"
    ),
    **prefixed("critic.training_args.", _training("critic", "critic")),
    **prefixed("critic.model_args.", _model("critic")),
    "critic.device_mapping": _role_devices("critic"),
    "validation.data_args.file_name": list_option("data.eval"),
    "validation.generating_args.num_return_sequences": option("evaluation.n"),
    "validation.generating_args.max_new_tokens": option("evaluation.response_length"),
    "validation.generating_args.temperature": lambda value, source: (
        {"evaluation.deterministic": False, "evaluation.temperature": value}
        if value
        else {"evaluation.deterministic": True}
    ),
    "validation.generating_args.top_p": option("evaluation.top_p"),
    "validation.generating_args.top_k": lambda value, source: {
        "evaluation.top_k": max(0, value or 0)
    },
    **prefixed(
        "validation.",
        no_options(
            "data_args generating_args.num_beams generating_args.do_sample worker_cls "
            "model_args strategy_args name world_size",
            "evaluation is greedy or samples, on data.eval: section evaluation",
        ),
    ),
    "val_greedy": lambda value, source: {"evaluation.deterministic": value},
    "val_n_sample": option("evaluation.n"),
    "val_*": no_option("changes no number here; evaluation.response_length is the longest answer"),
    "rewards.*": no_option(
        "write reward.grader (math_verify, gsm8k_numeric, FILE.py:function) or reward.model.path"
    ),
    "reward_model.*": no_option(
        "reward.model.path is a directory of a sequence-classification model"
    ),
    "reward.*": no_option("write reward.grader or reward.model.path"),
    "num_gpus_per_node": no_option("written to cluster.devices_per_node if roles have devices"),
    "num_nodes": no_option("written to cluster.num_nodes if roles have devices"),
    "is_offload*": no_option(OFFLOAD),
    "generate_opt_level": no_option(ENGINE),
    "is_num_return_sequences_expand": no_option(ENGINE),
    "max_running_requests": no_option(ENGINE),
    "is_use_additional_prompts": no_option(
        "prompts are drawn once; filtered prompts are not replaced"
    ),
    "max_additional_running_prompts": no_option(
        "prompts are drawn once; filtered prompts are not replaced"
    ),
    "router_args*": no_option(ENGINE),
    "model_update_buffer_size_mb": no_option("cluster.weights sets how weights are transferred"),
    "model_download_type": no_option(DATASET),
    "checkpoint_config.*": no_option(LOGGING),
    "track*": no_option(LOGGING),
    "logging_*": no_option(LOGGING),
    "*_dir": no_option(LOGGING),
    "profiler_*": no_option(PROFILE),
    "report_length_and_rewards": no_option(PROFILE),
    "system_envs*": no_option("set environment variables in the shell"),
    "rpc_timeout": option("cluster.step_timeout_s"),
    "global_template": no_option("only data.chat_template and data.system exist here"),
    "tag_to_template*": no_option("only data.chat_template and data.system exist here"),
    "hydra*": no_option(HYDRA),
    "defaults": no_option(HYDRA),
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
