"""ROLL's options of PPO (RLVR pipeline, as of August 2026) -> ours."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from embodied_ppo.core.errors import show
from embodied_ppo.interop.rules import (
    DATASET,
    ENGINE,
    FOREIGN,
    HYDRA,
    KL,
    LANGUAGE_LORA,
    LOADER,
    LOGGING,
    MEMORY,
    OFFLOAD,
    PROFILE,
    RESUME,
    SEEDS,
    SHARDED,
    WHOLE_LOSS,
    Answer,
    Peer,
    Rule,
    Source,
    dtype,
    engine,
    given,
    listed,
    needs,
    none,
    only,
    ours,
    reasoning,
    sampled,
    several,
    under,
    warmup_share,
    warmup_steps,
)

MOST = 100_000
"""Devices in a range that is read."""
DEVICES = re.compile(r"list\(range\((\d+),(\d+)(?:,(\d+))?\)\)|(?:list\()?\[(\d+(?:,\d+)*)\]\)?")


def _devices(value: Any) -> list[int] | None:
    """``list(range(0,8))``, ``[0, 1]`` and sums of these, read by pattern."""
    if isinstance(value, list) and all(type(d) is int for d in value):
        return sorted(value)
    found: list[int] = []
    for part in "".join(str(value).split()).split("+"):
        if not (match := DEVICES.fullmatch(part)):
            return None
        low, high, step, single = match.groups()
        if not single and int(high) - int(low) > MOST:
            return None
        found += [int(d) for d in single.split(",")] if single else range(int(low), int(high), int(step or 1) or 1)
    return sorted(set(found))


def _compact(devices: Sequence[int]) -> Any:
    """[0, 1, 2, 5] -> [0-2, 5]."""
    runs: list[list[int]] = []
    for d in devices:
        if runs and runs[-1][1] == d - 1:
            runs[-1][1] = d
        else:
            runs.append([d, d])
    plain = [low if low == high else f"{low}-{high}" for low, high in runs]
    return plain[0] if len(plain) == 1 else plain


_ROLES = {"actor_train": "actor", "actor_infer": "rollout", "reference": "reference", "critic": "critic"}


def _placement(value: Any, source: Source) -> Answer:
    """All roles at once; rewards without devices are graded where responses are made."""
    used = dict(_ROLES)
    if source.get("adv_estimator", "gae") != "gae":
        used.pop("critic")
    if not (source.get("use_kl_loss", False) or source.get("add_token_level_kl", False)):
        used.pop("reference")
    found: dict[str, Any] = {}
    for theirs, role in used.items():
        where = source.get(f"{theirs}.device_mapping")
        if where is None:
            return f"{theirs}.device_mapping is not in the file; write cluster.component_placement, or placement=fused"
        devices = _devices(where)
        if not devices:
            return f"{theirs}.device_mapping = {show(where)} is not read; write cluster.component_placement"
        found["rollout,reward" if role == "rollout" else role] = _compact(devices)
    if set(map(str, found.values())) == {"0"}:
        return "one device is one process: placement=local, the default"
    last = max(d for theirs in used for d in _devices(source.get(f"{theirs}.device_mapping")) or [0])
    each = int(source.get("num_gpus_per_node", 8))
    return {
        "cluster.component_placement": found,
        "cluster.num_nodes": last // each + 1,
        "cluster.devices_per_node": each,
    }


def _role_devices(role: str) -> Rule:
    def rule(value: Any, source: Source) -> Answer:
        if role == "critic" and source.get("adv_estimator", "gae") != "gae":
            return "this estimator has no critic"
        if role == "reference" and not (source.get("use_kl_loss", False) or source.get("add_token_level_kl", False)):
            return "without KL there is no reference"
        return _placement(value, source)

    return rule


def _batch(role: str, path: str) -> Rule:
    """Responses of one optimiser step, over all devices -> prompts."""

    def rule(value: Any, source: Source) -> Answer:
        responses, group = _step(role, source), int(source.get("num_return_sequences_in_group", 1))
        if responses is None or responses % group:
            return f"write {path}: prompts of an optimiser step (theirs: responses of one device, here {show(value)})"
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
    return each * int(source.get(f"{arguments}gradient_accumulation_steps", 1)) * max(1, len(devices) // split)


def _steps_per_update(role: str) -> Callable[[Source], float | None]:
    def steps(source: Source) -> float | None:
        step, group = _step(role, source), int(source.get("num_return_sequences_in_group", 1))
        prompts = source.get("rollout_batch_size", 128)
        epochs = source.get("ppo_epochs", 1) if role == "actor_train" else 1  # their critic takes one epoch
        return epochs * max(1.0, prompts * group / step) if step else None

    return steps


def _epochs(value: Any, source: Source) -> Answer:
    """Their critic takes one pass over the rollout, whatever ppo_epochs is (CriticWorker.train_step)."""
    return {"algorithm.update_epoch": value} | ({"critic.update_epoch": 1} if _has_critic(source) else {})


def _has_critic(source: Source) -> bool:
    return source.get("adv_estimator", "gae") == "gae"


def _has_penalty(source: Source) -> bool:
    return bool(source.get("add_token_level_kl", False))


def _normalizes(source: Source) -> bool:
    """Whether scores are normalised before anything else."""
    answers = _norm(None, source), _old_norm(source.get("reward_norm"), source)
    mapped = any(isinstance(answer, dict) and answer["algorithm.reward_norm"] for answer in answers)
    return mapped or source.get("adv_estimator") == "grpo"


def _whitening(value: Any, source: Source) -> Answer:
    """Theirs subtracts the mean, and comes after the KL penalty (compute_advantage)."""
    if not value:
        return {"algorithm.whiten_rewards": False}
    order = {"algorithm.whiten_after_kl": True} if _has_penalty(source) else {}
    return {"algorithm.whiten_rewards": True, "algorithm.whiten_subtract_mean": True} | order


def _reward_clip(value: Any, source: Source) -> Answer:
    """Theirs comes after normalisation, and again after the KL penalty; 0 is off."""
    if not value:
        return {"algorithm.reward_clip": None}
    later = _has_penalty(source) or _normalizes(source)
    return {"algorithm.reward_clip": value} | ({"algorithm.reward_clip_order": "after_norm"} if later else {})


SUM_NORM = "seq-mean-token-sum-norm"


def _aggregation(value: Any, source: Source) -> Answer:
    factor = _sum_norm_factor(source) if value == SUM_NORM else None
    return {"algorithm.loss_agg_func": value} | ({"algorithm.loss_scale_factor": factor} if factor else {})


def _sum_norm_factor(source: Source) -> float | None:
    """Their sum over all sequences of a step / (sequence_length - 1), as a factor of our mean over the sequences."""
    length, responses = source.get("sequence_length"), _step("actor_train", source)
    if length is None and source.get("response_length") is not None:
        length = source.get("response_length") + source.get("prompt_length", 1024)
    if length is None or responses is None or source.get("actor_train.use_dynamic_batching_in_train"):
        return None
    return (length - 1) / responses


OLD_NORM = "of ROLL before 25 September 2025; later versions read norm_mean_type and norm_std_type instead"


def _old_norm(value: Any, source: Source) -> Answer:
    if value in (None, "None"):
        return "null: norm_mean_type and norm_std_type say it"
    if source.has("norm_mean_type") or source.has("norm_std_type"):
        return OLD_NORM
    if source.get("adv_estimator") == "grpo":
        return "adv_estimator=grpo normalises over the group there, too"
    if value == "running":
        return RUNNING
    return {"algorithm.reward_norm": value, "algorithm.reward_shift": bool(source.get("reward_shift", False))}


RUNNING = (
    "theirs keeps a running mean and deviation of the scores; reward_norm=running here divides by the running "
    "deviation of the discounted return. Write algorithm.reward_norm=batch, or leave scores as they are"
)


def _norm(value: Any, source: Source) -> Answer:
    if source.get("adv_estimator") == "grpo":
        return "adv_estimator=grpo sets both to group there, too"
    mean, std = source.get("norm_mean_type"), source.get("norm_std_type")
    if "running" in (mean, std):
        return RUNNING
    if None not in (mean, std) and mean != std:
        return "mean and deviation are both of the batch, or both of the group, here: algorithm.reward_norm"
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
        return {f"algorithm.clip_ratio_{s}": value for s in (("low", "high") if side == "both" else (side,))}

    return rule


def _estimator(value: Any, source: Source) -> Answer:
    """Their grpo is the return-to-go of scores normalised over the group: ours where nothing else enters the sum."""
    if value == "gae":  # their value loss averages over sequences, whatever loss_agg_mode is
        return {"algorithm.adv_type": "gae", "critic.loss_agg_func": "seq-mean-token-mean"}
    answer = {"algorithm.adv_type": value, "critic.use_critic_model": False}
    others = source.get("reward_clip"), source.get("whiten_rewards"), source.get("gamma", 1) != 1
    if value == "grpo" and (_has_penalty(source) or any(others)):
        return answer | {"algorithm.adv_type": "reinforce", "algorithm.reward_norm": "group"}
    return answer


def _differences(source: Source) -> dict[str, str]:
    """What no option of ours says."""
    differences: dict[str, str] = {}
    if source.get("reward_norm") in ("batch", "group") and isinstance(
        _old_norm(source.get("reward_norm"), source), dict
    ):
        differences["reward_norm"] = (
            f"an option {OLD_NORM}, so such a version trains without it; it is mapped as before"
        )
    if source.get("loss_agg_mode") == SUM_NORM and _sum_norm_factor(source) is None:
        differences["loss_agg_mode"] = (
            "theirs is the sum over all sequences of a step / (sequence_length - 1), ours their mean / "
            "response_length; write algorithm.loss_scale_factor = (sequence_length - 1) / responses of a step"
        )
    if _has_critic(source) and (source.get("lambd", 0.95) != 1 or source.get("gamma", 1) != 1):
        differences["lambd"] = (
            "their trace begins at the end of the padding, with what the critic says there; ours at the last token"
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
        return "null: the other one says it"
    return {"algorithm.response_length": value - source.get("prompt_length", 1024)}


def _training(role: str, section: str) -> dict[str, Rule]:
    path = f"{section}.global_batch_size"
    adam = ours if section == "algorithm" else lambda *paths: none("the actor's, algorithm.adam_*")
    return {
        "learning_rate": ours(f"{section}.lr"),
        "weight_decay": ours(f"{section}.weight_decay"),
        "lr_scheduler_type": ours(f"{section}.lr_schedule"),
        "warmup_steps": warmup_steps(section, _steps_per_update(role)),
        "warmup_ratio": warmup_share(section, lambda s: s.get("max_steps")),
        "per_device_train_batch_size": _batch(role, path)
        if section == "critic"
        else lambda value, source: {"algorithm.micro_batch_size": value},
        "gradient_accumulation_steps": _batch(role, path),
        "adam_beta1": adam("algorithm.adam_beta1"),
        "adam_beta2": adam("algorithm.adam_beta2"),
        "num_train_epochs": none("max_steps says it"),
        "seed": none(SEEDS),
        "data_seed": none(SEEDS),
        "dataloader_num_workers": none(LOADER),
        **several("fp16 bf16 max_steps output_dir", "how their trainer runs; weights that learn are float32"),
    }


def _model(section: str) -> dict[str, Rule]:
    return {
        "model_name_or_path": given(f"{section}.model.path", "null: pretrain says it"),
        "dtype": dtype(f"{section}.model.dtype"),
        "disable_gradient_checkpointing": lambda value, source: {f"{section}.model.gradient_checkpointing": not value},
        "lora_rank": LANGUAGE_LORA,
        **several(
            "additional_target autocast_adapter_dtype lora_alpha lora_dropout lora_target adapter_name_or_path "
            "device_map attn_implementation moe_aux_loss_coef gradient_checkpointing_use_reentrant model_type "
            "num_labels model_config_kwargs freeze_module_prefix ulysses_size",
            "how their code runs the model: kernels, attention, adapters, parts that stay frozen",
        ),
    }


_WORKER: dict[str, Rule] = {
    "infer_batch_size": none(MEMORY),
    "use_dynamic_batching_*": none("algorithm.micro_batch_tokens, where given, is that"),
    "max_tokens_per_microbatch_in_infer": none(MEMORY),
    "sequence_length_round_*": none(MEMORY),
    "strategy_args.*": none(SHARDED),
    "worker_cls": none(FOREIGN),
    "system_envs*": none("environment variables are the shell's"),
    "offload_nccl": none(OFFLOAD),
    "data_args.*": none("data.train, data.eval and the keys of a row: docs/language.md"),
    **several(
        "name pg_variant world_size num_gpus_per_worker model_update_frequency backend_timeout max_concurrency "
        "use_sequence_packing sequence_packing_args router_replay apply_loss_scale mtp_training_mode tag_included",
        "how their workers run",
    ),
}
TABLE: dict[str, Rule] = {
    **under("actor_train.", _WORKER),
    **under("actor_infer.", _WORKER),
    **under("critic.", _WORKER),
    "rollout_batch_size": ours("algorithm.rollout_batch_size"),
    "prompt_length": ours("algorithm.prompt_length"),
    "response_length": given("algorithm.response_length", "null: sequence_length says it"),
    "sequence_length": _response,
    "adv_estimator": _estimator,
    "num_return_sequences_in_group": ours("algorithm.group_size"),
    "ppo_epochs": _epochs,
    "use_kl_loss": lambda value, source: {"algorithm.use_kl_loss": value, "algorithm.kl_loss_type": "k3"},
    "kl_loss_coef": ours("algorithm.kl_loss_coef"),
    "loss_agg_mode": _aggregation,
    "entropy_loss_coef": ours("algorithm.entropy_bonus"),
    "whiten_advantages": ours("algorithm.normalize_advantages"),
    "whiten_rewards": _whitening,
    "advantage_clip": ours("algorithm.advantage_clip"),
    "reward_clip": _reward_clip,
    "dual_clip_loss": _dual,
    "lambd": ours("algorithm.gae_lambda"),
    "gamma": ours("algorithm.gamma"),
    "pg_clip": _clip("both"),
    "use_pg_clip_range": none("pg_clip_low and pg_clip_high, where read, are that"),
    "pg_clip_low": _clip("low"),
    "pg_clip_high": _clip("high"),
    "value_clip": ours("algorithm.value_clip"),
    "kl_penalty": ours("algorithm.kl_penalty", words=KL),
    "target_kl": _target,
    "init_kl_coef": ours("algorithm.kl_ctrl.kl_coef"),
    "kl_horizon": ours("algorithm.kl_ctrl.horizon"),
    "add_token_level_kl": ours("algorithm.use_kl_in_reward"),
    "norm_mean_type": _norm,
    "norm_std_type": _norm,
    "reward_norm": _old_norm,
    "reward_shift": none("in algorithm.reward_shift, where reward_norm is read"),
    "reward_scale": none("read with reward_norm=running only, and that has no counterpart"),
    "use_reward_scaling": only(False, same="off, as here", other="algorithm.reward_norm says it"),
    "use_reward_norm": only(False, same="off, as here", other="algorithm.reward_norm says it"),
    "add_len_reward": only(False, same="off, as here", other="a grader may count length"),
    "max_grad_norm": ours("algorithm.max_grad_norm"),
    "l2": only(0, 0.0, same="off, as here", other="weight_decay is AdamW's, decoupled: algorithm.weight_decay"),
    "critic_warmup": ours("algorithm.critic_warmup"),
    "async_generation_ratio": lambda value, source: (
        {"cluster.max_lag": math.ceil(value)} if value else "0: rollouts wait for updates, as here"
    ),
    "max_len_mask": lambda value, source: {"rollout.truncation": "drop" if value else "terminal"},
    "importance_sampling": only("token", same="a ratio for each token, as here", other="ratios of whole sequences are "
                                "not there"),
    "use_policy_loss_type": only("PPO", same="PPO, as here", other=WHOLE_LOSS),
    "rl_loss_coef": only(1, 1.0, same="1, as here", other=WHOLE_LOSS),
    "difficulty_*": none("responses are not masked or weighed by how hard a prompt is"),
    "length_loss_weight": none("responses are not weighed by length; algorithm.loss_agg_func says how tokens count"),
    "error_max_len_*": none("rollout.truncation=drop leaves cut responses out"),
    "*topr*": none(WHOLE_LOSS),
    "postive_loss_coef": none(WHOLE_LOSS),
    "enable_reference": none("there is a reference where KL needs one"),
    "*old_logprobs_recompute": none("algorithm.recompute_log_probs=true computes them anew"),
    "train_infer_correction.is_weight.enabled": none("algorithm.off_policy_correction, where given, is that"),
    "train_infer_correction.is_weight.weight_type": needs("train_infer_correction.is_weight.enabled",
                                                          ours("algorithm.off_policy_correction")),
    "train_infer_correction.is_weight.upper_bound": needs("train_infer_correction.is_weight.enabled",
                                                          ours("algorithm.off_policy_cap")),
    "train_infer_correction.*": none("rejected samples are not there"),
    "pretrain": ours("actor.model.path"),
    "reward_pretrain": none("theirs begins the critic from it; here critic.model.path=null copies the actor, and "
                            "reward.model.path is a model that scores"),
    "max_steps": ours("updates"),
    "save_steps": ours("save_every"),
    "eval_steps": ours("eval_every"),
    "max_ckpt_to_keep": lambda value, source: {"keep_last": value} if value else "0: all; here keep_last and the best",
    "seed": ours("seed"),
    "exp_name": ours("name"),
    "resume_from_checkpoint": none(RESUME),
    **under("actor_train.training_args.", _training("actor_train", "algorithm")),
    **under("actor_train.model_args.", _model("actor")),
    "actor_train.device_mapping": _role_devices("actor"),
    "actor_train.use_dynamic_batching_in_train": none("algorithm.micro_batch_tokens, where given, is that"),
    "actor_train.max_tokens_per_microbatch_in_train": needs("actor_train.use_dynamic_batching_in_train",
                                                            ours("algorithm.micro_batch_tokens")),
    "actor_train.data_args.file_name": listed("data.train"),
    "actor_train.data_args.prompt": given("data.prompt_key", "null: prompt, as here"),
    "actor_infer.generating_args.temperature": ours("rollout.temperature"),
    "actor_infer.generating_args.top_p": sampled("top_p", 1, 1.0),
    "actor_infer.generating_args.top_k": sampled("top_k", 0, -1),
    "actor_infer.generating_args.repetition_penalty": sampled("repetition_penalty", 1, 1.0),
    "actor_infer.generating_args.stop_strings": given("rollout.stop", "null: end tokens, as here"),
    "actor_infer.generating_args.num_beams": only(1, same="sampling, as here", other="training samples; beams are not "
                                                  "there"),
    "actor_infer.generating_args.do_sample": only(True, same="training samples, as here", other="training always "
                                                  "samples here"),
    **under("actor_infer.generating_args.", several("max_new_tokens max_length num_return_sequences length_penalty "
                                                    "logprobs include_stop_str_in_output", "response_length and "
                                                    "num_return_sequences_in_group say it")),
    "actor_infer.strategy_args.strategy_name": engine,
    "actor_infer.strategy_args.*": none(ENGINE),
    "actor_infer.device_mapping": _role_devices("rollout"),
    "actor_infer.model_args.*": none("the actor's: one set of weights"),
    "reference.device_mapping": _role_devices("reference"),
    "reference.*": none("the reference is the actor as training began; it needs no options"),
    **under("critic.training_args.", _training("critic", "critic")),
    **under("critic.model_args.", _model("critic")),
    "critic.device_mapping": _role_devices("critic"),
    "validation.data_args.file_name": listed("data.eval"),
    "validation.generating_args.num_return_sequences": ours("evaluation.n"),
    "validation.generating_args.max_new_tokens": ours("evaluation.response_length"),
    "validation.generating_args.temperature": lambda value, source: (
        {"evaluation.deterministic": False, "evaluation.temperature": value} if value
        else {"evaluation.deterministic": True}
    ),
    "validation.generating_args.top_p": ours("evaluation.top_p"),
    "validation.generating_args.top_k": lambda value, source: {"evaluation.top_k": max(0, value or 0)},
    **under("validation.", several("data_args generating_args.num_beams generating_args.do_sample worker_cls "
                                   "model_args strategy_args name world_size", "evaluation is greedy or "
                                   "samples, on data.eval: section evaluation")),
    "val_greedy": lambda value, source: {"evaluation.deterministic": value},
    "val_n_sample": ours("evaluation.n"),
    "val_*": none("changes no number here; evaluation.response_length is the longest answer"),
    "rewards.*": none("write reward.grader (math_verify, gsm8k_numeric, FILE.py:function) or reward.model.path"),
    "reward_model.*": none("reward.model.path is a directory of a sequence-classification model"),
    "reward.*": none("write reward.grader or reward.model.path"),
    "num_gpus_per_node": none("in cluster.devices_per_node, where roles have devices"),
    "num_nodes": none("in cluster.num_nodes, where roles have devices"),
    "is_offload*": none(OFFLOAD),
    "generate_opt_level": none(ENGINE),
    "is_num_return_sequences_expand": none(ENGINE),
    "max_running_requests": none(ENGINE),
    "is_use_additional_prompts": none("prompts are drawn once; none are added for those left out"),
    "max_additional_running_prompts": none("prompts are drawn once; none are added for those left out"),
    "router_args*": none(ENGINE),
    "model_update_buffer_size_mb": none("cluster.weights says how weights travel"),
    "model_download_type": none(DATASET),
    "checkpoint_config.*": none(LOGGING),
    "track*": none(LOGGING),
    "logging_*": none(LOGGING),
    "*_dir": none(LOGGING),
    "profiler_*": none(PROFILE),
    "report_length_and_rewards": none(PROFILE),
    "system_envs*": none("environment variables are the shell's"),
    "rpc_timeout": ours("cluster.step_timeout_s"),
    "global_template": none("data.chat_template and data.system are what there is"),
    "tag_to_template*": none("data.chat_template and data.system are what there is"),
    "hydra*": none(HYDRA),
    "defaults": none(HYDRA),
}  # fmt: skip

ROLL = Peer(
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
