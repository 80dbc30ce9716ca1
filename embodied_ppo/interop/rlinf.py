"""PPO options of RLinf (August 2026), for robot policies and language models, mapped to ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from embodied_ppo.core.errors import show
from embodied_ppo.interop import reasons
from embodied_ppo.interop.rules import (
    ADAMW,
    KL,
    TRAINING_SAMPLES,
    Answer,
    Entry,
    Framework,
    Rule,
    Source,
    as_rule,
    clip_ratio,
    dtype_option,
    engine,
    interval_option,
    list_option,
    no_option,
    no_options,
    no_sections,
    only_off,
    only_values,
    option,
    option_if_set,
    prefixed,
    read_if,
    same_names,
    sampling_option,
    warmup_fraction,
    warmup_steps,
)


def _robot(source: Source) -> bool:
    """Return whether an RLinf file trains a robot policy."""
    if (task := source.get("runner.task_type")) is not None:
        return task == "embodied"
    return source.get("algorithm.loss_type") != "actor" and not source.has("data.")


def _mode(source: Source) -> str:
    return "embodied" if _robot(source) else "reasoning"


def _chunk(source: Source) -> int:
    """Return the number of actions of a decision."""
    return int(source.get("actor.model.num_action_chunks", 1))


def _per_step(path: str) -> Rule:
    """Map a discount per decision to one per primitive step if rewards are given per chunk."""

    def rule(value: Any, source: Source) -> Answer:
        steps = _chunk(source)
        of_chunk = source.get("algorithm.reward_type") == "chunk_level" and _robot(source)
        if of_chunk and steps > 1 and isinstance(value, (int, float)):
            return {path: round(float(value) ** (1 / steps), 8)}
        return {path: value}

    return rule


def _rollout(value: Any, source: Source) -> Answer:
    """Map environments and steps of a rollout.

    Without auto_reset every pass starts new episodes, so passes multiply the environments here.
    """
    train = "env.train."
    passes, resets = source.get(f"{train}rollout_epoch", 1), source.get(f"{train}auto_reset", False)
    envs, steps = (
        source.get(f"{train}total_num_envs"),
        source.get(f"{train}max_steps_per_rollout_epoch"),
    )
    answer: dict[str, Any] = {"env.restart_each_rollout": not resets}
    if envs is not None:
        answer["env.num_envs"] = envs * (1 if resets else passes)
    if steps is not None:
        if steps % _chunk(source):
            return f"not a multiple of actor.model.num_action_chunks = {_chunk(source)}"
        answer["algorithm.horizon"] = steps // _chunk(source) * (passes if resets else 1)
    return answer


def _evaluation(value: Any, source: Source) -> Answer:
    """Map the episodes of an evaluation: passes x environments, the first episode of each."""
    envs = source.get("env.eval.total_num_envs", 1)
    return {
        "evaluation.num_envs": envs,
        "evaluation.episodes": envs * source.get("env.eval.rollout_epoch", 1),
    }


def _updates(source: Source) -> int | None:
    steps, epochs = source.get("runner.max_steps", -1), source.get("runner.max_epochs")
    if not _robot(source):
        return steps if steps > 0 else None
    return min(epochs, steps) if epochs and steps > 0 else epochs or (steps if steps > 0 else None)


def _length(value: Any, source: Source) -> Answer:
    updates = _updates(source)
    if updates is None:
        return reasons.EPOCHS if not _robot(source) else "-1: set by runner.max_epochs"
    return {"updates": updates}


def _steps_per_update(source: Source) -> float | None:
    """Return the optimiser steps in one update of a robot policy."""
    rollout = _rollout(None, source)
    if isinstance(rollout, str) or not {"env.num_envs", "algorithm.horizon"} <= set(rollout):
        return None
    total, batch = (
        rollout["env.num_envs"] * rollout["algorithm.horizon"],
        source.get("actor.global_batch_size"),
    )
    return source.get("algorithm.update_epoch", 1) * total / batch if batch else None


def _critic_warmup(value: Any, source: Source) -> Answer:
    each = _steps_per_update(source) if _robot(source) else 1.0
    if value and each is None:
        return "optimiser steps; write algorithm.critic_warmup, which counts updates"
    return {"algorithm.critic_warmup": math.ceil((value or 0) / (each or 1))}


def _env(value: Any, source: Source) -> Answer:
    if value == "libero":
        return {
            "env.simulator": "libero",
            "env.id": f"libero/{source.get('env.train.task_suite_name', 'libero_10')}",
        }
    return (
        "write env.simulator=torch and env.id=package.module:function, a function that wraps"
        f" {value} (docs/tasks.md), or another id"
    )


def _model(value: Any, source: Source) -> Answer:
    """Map the type of the model.

    Their mlp_policy has a separate value network, unnormalised observations and an initial
    standard deviation of e^-0.5.
    """
    policies = {
        "openvla": "token",
        "openvla_oft": "token",
        "openpi": "flow",
        "openpi_rlinf": "flow",
    }
    if _robot(source) and value == "mlp_policy":
        return {
            "model.policy": "actor_critic",
            "model.backbone": "mlp",
            "model.shared_backbone": False,
            "model.normalize_obs": False,
            "model.init_log_std": -0.5,
        }
    if not _robot(source):
        return "read from the model directory"
    if value not in policies:
        return (
            f"{value} does not exist here; the models are model.policy=actor_critic, token, flow "
            "and "
            "gaussian (docs/vla.md)"
        )
    answer: dict[str, Any] = {"model.policy": policies[value]}
    if value == "openvla":
        answer["model.decode"] = "autoregressive"
    if value == "openvla_oft" and source.get("actor.model.implement_version") is None:
        answer["model.omit_stop_token"] = True  # their only implementation before this option
    return answer


def _center_crop(value: Any, source: Source) -> Answer:
    """Map the crop of OpenVLA-OFT's published evaluation; their own models ignore the option."""
    if source.get("actor.model.implement_version") == "official":
        return {"model.center_crop": bool(value)}
    return "not read there either: their models see whole images, as here"


def _checkpoint(value: Any, source: Source) -> Answer:
    if not _robot(source):
        return "set by rollout.model.model_path"
    return {"model.checkpoint": value} if value else "empty: a new model, as here"


def _kl(value: Any, source: Source) -> Answer:
    """Map the KL penalty; their code adds it to the loss (their documentation: to the reward)."""
    return {"algorithm.use_kl_loss": bool(value), "algorithm.kl_loss_coef": value or 0.0}


def _reward_type(value: Any, source: Source) -> Answer:
    """Map the reward type; their chunk_level sums the rewards of a chunk without a discount."""
    answer: dict[str, Any] = {"algorithm.reward_type": value}
    if value == "chunk_level" and _robot(source) and _chunk(source) > 1:
        answer["algorithm.chunk_reward"] = "sum"
    return answer


def _placement(value: Any, source: Source) -> Answer:
    if not isinstance(value, Mapping):
        return f"{show(value)} is not a mapping of components to devices"
    placement: dict[str, Any] = {}
    for entry, ranks in value.items():
        roles = [word.strip() for word in str(entry).split(",")]
        kept = [
            role for role in roles if role != "inference"
        ]  # the actor computes log-probabilities here
        if isinstance(ranks, Mapping):
            devices: Any = {"devices": _ranks(ranks.get("placement", "all"))}
            if ranks.get("node_group") is not None:
                devices["node"] = ranks["node_group"]
        else:
            devices = _ranks(ranks)
        if kept:
            placement[",".join(kept)] = devices
    return {"cluster.component_placement": placement}


def _ranks(text: Any) -> Any:
    """Convert ``0-3,5`` to ["0-3", 5]."""
    parts = [part.strip() for part in str(text).split(",")]
    plain = [int(part) if part.isdecimal() else part for part in parts]
    return plain[0] if len(plain) == 1 else plain


def _nodes(value: Any, source: Source) -> Answer:
    groups = value if isinstance(value, list) else []
    if not groups or not all(
        isinstance(g, Mapping) and {"label", "node_ranks"} <= set(g) for g in groups
    ):
        return "write cluster.node_groups={label: machines}"
    return {"cluster.node_groups": {g["label"]: g["node_ranks"] for g in groups}}


def _backend(value: Any, source: Source) -> Answer:
    return engine("hf" if value == "huggingface" else value, source)


def _minibatches(value: Any, source: Source) -> Answer:
    prompts = source.get("data.rollout_batch_size")
    if not prompts or not value or prompts % value:
        return f"write algorithm.global_batch_size = prompts of an update / {value}"
    return {"algorithm.global_batch_size": prompts // value}


def _by_mode(robot: Entry, language: Entry) -> Rule:
    """Apply ``robot`` to a file for a robot policy, else ``language``."""
    rules = as_rule(robot), as_rule(language)
    return lambda value, source: rules[0 if _robot(source) else 1](value, source)


def _language_only(path: str, reason: str) -> Rule:
    """Map to our option ``path``, which a robot policy does not have for ``reason``."""
    return _by_mode(no_option(reason), path)


def _training_top_k(value: Any, source: Source) -> Answer:
    off = not value or value < 0 or value >= 1_000_000
    return "off, as here" if off else {"rollout.top_k": value}


def _evaluation_temperature(value: Any, source: Source) -> Answer:
    if isinstance(value, (int, float)) and value > 0:
        return {"evaluation.deterministic": False, "evaluation.temperature": value}
    return {"evaluation.deterministic": True}


def _penalty_in_reward(value: Any, source: Source) -> Answer:
    coefficient = {"algorithm.kl_ctrl.kl_coef": value} if value else {}
    return {"algorithm.use_kl_in_reward": bool(value), **coefficient}


def _optim(section: str) -> dict[str, Entry]:
    adam = (
        same_names("algorithm.", "adam_beta1 adam_beta2 adam_eps")
        if section == "algorithm"
        else no_options({"set for the actor: algorithm.adam_*": "adam_beta1 adam_beta2 adam_eps"})
    )
    return {
        **same_names(f"{section}.", "lr weight_decay"),
        "value_lr": _by_mode(
            "algorithm.value_lr", no_option("the critic's learning rate is critic.optim.lr")
        ),
        "clip_grad": f"{section}.max_grad_norm",
        "critic_warmup_steps": _critic_warmup,
        "lr_scheduler": f"{section}.lr_schedule",
        "lr_warmup_steps": warmup_steps(section),
        "lr_warmup_steps_ratio": warmup_fraction(section, _updates),
        "min_lr_rate": f"{section}.lr_end",
        "min_lr": no_option("the final learning rate is a fraction here: lr_end"),
        "total_training_steps": no_option("a schedule covers the whole run: updates"),
        "optimizer": ADAMW,
        **adam,
        **no_sections(
            "bf16 fp16 loss_scale optimizer_enable_pin overlap_grad_reduce overlap_param_gather "
            "overlap_param_gather_with_optimizer_step use_distributed_optimizer num_cycles",
            reasons.SHARDED,
        ),
    }


def _schedule(section: str) -> dict[str, Entry]:
    return {
        "lr_decay_style": f"{section}.lr_schedule",
        "lr_warmup_iters": warmup_steps(section),
        "lr_warmup_fraction": warmup_fraction(section, _updates),
        **no_sections(
            "max_lr min_lr lr_warmup_init lr_decay_iters start_weight_decay end_weight_decay",
            "the learning rate is optim.lr and warms up from 0; a schedule covers the whole run",
        ),
    }


def _filter(value: Any, source: Source) -> Answer:
    """Map RLinf's filter of groups, which does not replace the groups that it drops: one round."""
    if not value:
        return "off, as here"
    return {"algorithm.group_filter": "success", "algorithm.group_filter_rounds": 1}


_REWARD_SCALE = only_values(
    1,
    1.0,
    same="1: rewards are not scaled, as here",
    other=(
        "rewards are not scaled here; scale them in the task, or write"
        " algorithm.reward_norm=running"
    ),
)
_ROLE_NAMES = {"group_name": no_option("the names of roles are fixed here")}
_BACKEND_SECTIONS = (
    "calculate_flops enable_dp_load_balance fsdp_config mcore_gpt megatron spec_name "
    "training_backend"
)
_EVALUATE = "embodied-ppo evaluate checkpoint=.. does that"

_SAMPLING: dict[str, Entry] = {
    "do_sample": TRAINING_SAMPLES,
    "top_k": _training_top_k,
    "top_p": sampling_option("top_p", 1, 1.0),
    "repetition_penalty": sampling_option("repetition_penalty", 1, 1.0),
    "temperature": "rollout.temperature",
    "temperature_train": _by_mode("model.temperature", "rollout.temperature"),
    "temperature_eval": _evaluation_temperature,
    "max_new_tokens": _language_only(
        "algorithm.response_length", "set by the model and env.action_chunk"
    ),
    "min_new_tokens": only_values(
        0,
        1,
        same="a response has at least its end token, as here",
        other="there is no lower limit here",
    ),
    "stop": list_option("rollout.stop"),
}
_ALGORITHM: dict[str, Entry] = {
    **same_names(
        "algorithm.",
        "normalize_advantages group_size loss_type loss_agg_func update_epoch entropy_bonus "
        "clip_ratio_c value_clip huber_delta bootstrap_type logprob_type entropy_type "
        "rollout_micro_batch_size logprob_forward_micro_batch_size",
    ),
    "adv_type": option(
        "algorithm.adv_type",
        values={"reinpp": "reinforce_plus_plus", "reinpp_baseline": "reinforce_plus_plus_baseline"},
    ),
    "clip_ratio_low": option_if_set("algorithm.clip_ratio_low", "null: ratio_clip_eps"),
    "clip_ratio_high": option_if_set("algorithm.clip_ratio_high", "null: ratio_clip_eps"),
    "ratio_clip_eps": clip_ratio("algorithm"),
    "value_cliprange": "algorithm.value_clip",
    "gamma": _per_step("algorithm.gamma"),
    "gae_lambda": _per_step("algorithm.gae_lambda"),
    "reward_type": _reward_type,
    "kl_beta": _kl,
    "kl_penalty": _by_mode(
        no_option("not read there for robot policies; algorithm.kl_loss_type is k3"),
        option("algorithm.kl_penalty", values=KL),
    ),
    "kl_penalty_type": option("algorithm.kl_loss_type", values=KL),
    "reinpp_kl_beta": _penalty_in_reward,
    "critic_warmup_steps": _critic_warmup,
    "training_batch_size_per_gpu": "algorithm.micro_batch_size",
    "n_minibatches": _minibatches,
    "recompute_logprobs": "algorithm.recompute_log_probs",
    "importance_sampling_fix": only_values(
        False,
        None,
        same="off, as here",
        other="write algorithm.off_policy_correction=token and off_policy_cap",
    ),
    "use_valid_token_scale": only_off("algorithm.loss_agg_func sets how tokens are averaged"),
    **prefixed("sampling_params.", _SAMPLING),
    "reward_coef": _REWARD_SCALE,
    "filter_rewards": _filter,
    "rewards_*_bound": read_if(
        "algorithm.filter_rewards",
        no_option("groups are filtered by success: those that all succeed or all fail"),
    ),
    "behave_weight_threshold": option_if_set("algorithm.off_policy_cap", "null: none"),
    **no_options(
        {
            "the entropy is always logged here: policy/entropy": "calculate_entropy",
            reasons.MEMORY: "val_rollout_batch_size_per_gpu rollout_batch_size_per_gpu",
            reasons.SHUFFLE: "shuffle_rollout",
            "their code skips minibatches with large ratios; here algorithm.target_kl_stop ends an"
            " update at a limit of the KL": "early_stop_imp_ratio",
            "the model and env.action_chunk set the number of tokens": "length_params.*",
            "cluster.max_lag sets how far rollouts run ahead": "staleness_threshold",
        }
    ),
}
_ACTOR: dict[str, Entry] = {
    "global_batch_size": _by_mode(
        "algorithm.global_batch_size", no_option("set by their program from n_minibatches")
    ),
    "micro_batch_size": "algorithm.micro_batch_size",
    "seed": "seed",
    **prefixed("optim.", _optim("algorithm")),
    **prefixed("lr_sched.", _schedule("algorithm")),
    "model.model_type": _model,
    "model.model_path": _checkpoint,
    "model.num_action_chunks": "env.action_chunk",
    "model.unnorm_key": "model.unnorm_key",
    "model.implement_version": read_if(
        "actor.model.model_type",
        option("model.omit_stop_token", values={"rlinf": True, "official": False}),
        "openvla_oft",
    ),
    "model.center_crop": _center_crop,
    "model.lora_rank": read_if("actor.model.is_lora", "model.lora_rank"),
    "model.lora_path": read_if(
        "actor.model.is_lora",
        no_option("adapters start at zero here; merge theirs into the checkpoint first"),
    ),
    "model.precision": _by_mode(dtype_option("model.dtype"), dtype_option("actor.model.dtype")),
    "model.hidden_dim": lambda value, source: {"model.hidden": [value, value, value]},
    "model.num_steps": "model.flow_steps",
    "model.openpi.num_steps": "model.flow_steps",
    "model.openpi.noise_level": "model.flow_eta",
    "model.openpi.noise_method": option(
        "model.flow_noise", values={"flow_sde": "sde", "flow_noise": "learned"}
    ),
    "model.openpi.joint_logprob": lambda value, source: {
        "model.flow_chain": "mean" if value else "one"
    },
    "model.openpi.train_expert_only": "model.freeze_trunk",
    "model.openpi.detach_critic_input": option_if_set(
        "model.detach_value", "null: chosen by their code"
    ),
    "model.add_value_head": only_values(
        True,
        same="there is always a value head",
        other="algorithm.loss_type=actor_critic has a value head",
    ),
    "fsdp_config.gradient_checkpointing": _by_mode(
        "model.gradient_checkpointing", "actor.model.gradient_checkpointing"
    ),
    "tokenizer.tokenizer_model": option_if_set("actor.tokenizer", reasons.MODEL_TOKENIZER),
    **no_options(
        {
            "model.lora_rank, if set, has this effect": "model.is_lora",
            "algorithm.reward_type=action_level gives each action of a chunk a value": (
                "model.value_type"
            ),
            reasons.REMOTE: "model.trust_remote_code",
            "read from the checkpoint, the task or the transformers config here": "model.*",
            "read from the tokenizer's directory": "tokenizer.*",
            reasons.OFFLOAD: "*offload*",
        }
    ),
    **_ROLE_NAMES,
    **no_sections(f"{_BACKEND_SECTIONS} sync_precision", reasons.SHARDED),
}
_CRITIC: dict[str, Entry] = {
    "use_critic_model": _language_only(
        "critic.use_critic_model", "a robot policy has a value head, as there"
    ),
    **prefixed("optim.", _optim("critic")),
    **prefixed("lr_sched.", _schedule("critic")),
    "model.precision": dtype_option("critic.model.dtype"),
    "model.model_path": option_if_set("critic.model.path", "null: a copy of the actor, as here"),
    **no_options({reasons.OFFLOAD: "*offload*", reasons.SEEDS: "seed"}),
    **_ROLE_NAMES,
    **no_sections(f"{_BACKEND_SECTIONS} model tokenizer", reasons.SHARDED),
}
_ENV: dict[str, Entry] = {
    "train.env_type": _env,
    "train.task_suite_name": lambda value, source: _env(
        source.get("env.train.env_type", "libero"), source
    ),
    "train.total_num_envs": _rollout,
    "train.rollout_epoch": _rollout,
    "train.auto_reset": _rollout,
    "train.max_steps_per_rollout_epoch": _rollout,
    "train.max_episode_steps": "env.max_episode_steps",
    "train.ignore_terminations": only_values(
        False,
        same="an episode ends when the task terminates, as here",
        other="an episode ends when the task terminates; write a task that does not terminate",
    ),
    "train.reward_coef": _REWARD_SCALE,
    "train.init_params.camera_heights": "env.image_size",
    "train.init_params.camera_widths": "env.image_size",
    "eval.total_num_envs": _evaluation,
    "eval.rollout_epoch": _evaluation,
    "eval.video_cfg.save_video": lambda value, source: {
        "evaluation.video_episodes": 2 if value else 0
    },
    **no_options(
        {
            "set by algorithm.group_size": "train.group_size",
            reasons.SEEDS: "train.seed",
            "initial states are derived from seed; a group shares one": (
                "train.use_*reset_state_ids"
            ),
            "videos are recorded in evaluations: evaluation.video_episodes=2": "train.video_cfg.*",
            "read by the simulator's constructor; write its arguments into env.kwargs": (
                "train.init_params.*"
            ),
            "read by the simulator; write what its adapter reads into env.kwargs (docs/tasks.md)": (
                "train.*"
            ),
            "evaluation uses the training environment; evaluation.env_kwargs changes its"
            " arguments": "eval.*",
            reasons.OFFLOAD: "*offload*",
        }
    ),
    **_ROLE_NAMES,
}
_ROLLOUT: dict[str, Entry] = {
    **prefixed("sampling_params.", _SAMPLING),
    "pipeline_stage_num": "cluster.stages",
    "recompute_logprobs": _language_only(
        "algorithm.recompute_log_probs", "the log-probabilities of acting are used; they are equal"
    ),
    "model.model_path": _language_only("actor.model.path", reasons.ACTOR_WEIGHTS),
    "unnorm_key": "model.unnorm_key",
    "rollout_backend": _backend,
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    **no_options(
        {reasons.ACTOR_WEIGHTS: "model.*", reasons.ENGINE: "*backend", reasons.OFFLOAD: "*offload*"}
    ),
    **_ROLE_NAMES,
    **no_sections(
        "cuda_graph_max_bs detokenize disable_log_stats enable_cuda_graph enable_torch_compile "
        "enforce_eager eos max_running_requests padding sglang vllm "
        "pipeline_parallel_size print_outputs return_logprobs tensor_parallel_size "
        "rollout_queue_size validate_save_dir validate_weight validate_weight_first_sync",
        reasons.ENGINE,
    ),
}
_DATA: dict[str, Entry] = {
    "train_data_paths": list_option("data.train"),
    "val_data_paths": list_option("data.eval"),
    "max_prompt_length": "algorithm.prompt_length",
    "rollout_batch_size": _language_only(
        "algorithm.rollout_batch_size",
        "counts prompts; the rollout of a robot policy is env.num_envs x algorithm.horizon",
    ),
    **same_names("data.", "prompt_key answer_key shuffle"),
    "apply_chat_template": lambda value, source: {
        "data.chat_template": "always" if value else "never"
    },
    **no_options({reasons.LONG_PROMPTS: "filter_prompt_by_length", reasons.SEEDS: "seed"}),
    **no_sections(
        "dataset_name num_workers type val_rollout_batch_size validation_shuffle", reasons.LOADER
    ),
}
_RUNNER: dict[str, Entry] = {
    "task_type": lambda value, source: {"mode": _mode(source)},
    "max_epochs": _length,
    "max_steps": _length,
    "val_check_interval": interval_option("eval_every"),
    "save_interval": interval_option("save_every"),
    "experiment_name": "name",
    "logger.experiment_name": "name",
    "max_tokens_per_mbs": read_if(
        "runner.enable_dynamic_batch_size", "algorithm.micro_batch_tokens"
    ),
    "weight_sync_interval": only_values(
        1,
        same="after every update, as here",
        other="weights are sent to the rollouts after every update",
    ),
    **no_options(
        {
            "prompt and response have separate limits: algorithm.prompt_length, response_length": (
                "seq_length"
            ),
            reasons.MICRO_BATCH_TOKENS: "enable_dynamic_batch_size",
            _EVALUATE: "only_eval *eval_policy_path",
            reasons.RESUME: "resume_dir",
            "embodied-ppo evaluate checkpoint=.., or train resume=..": "ckpt_path",
            "a property of the model": "max_prompt_length",
            reasons.LOGGING: "logger.* output_dir per_worker_log*",
            "each rollout process has its own environments": "enable_decoupled_mode",
            "environments reset automatically": "overlap_env_bootstrap",
        }
    ),
}
TABLE: dict[str, Entry] = {
    **prefixed("algorithm.", _ALGORITHM),
    **prefixed("actor.", _ACTOR),
    **prefixed("critic.", _CRITIC),
    **prefixed("env.", _ENV),
    **prefixed("rollout.", _ROLLOUT),
    **prefixed("data.", _DATA),
    "reward.use_reward_model": only_values(
        False, same="a function grades, as here", other="write reward.model.path=DIR"
    ),
    **prefixed("runner.", _RUNNER),
    "cluster.num_nodes": "cluster.num_nodes",
    "cluster.component_placement": _placement,
    "cluster.node_groups": _nodes,
    **no_options(
        {
            "write reward.grader: math_verify, gsm8k_numeric, exact, or FILE.py:function": (
                "reward.reward_type"
            ),
            "a grader here returns 1 or 0 for a correct or wrong answer, theirs +- this value": (
                "reward.reward_scale"
            ),
            "write reward.grader or reward.model.path; the reward of a simulator comes from its"
            " task": "reward.*",
            reasons.WEIGHT_TRANSFER: "weight_syncer*",
            "the actor computes log-probabilities here": "inference.*",
            reasons.HYDRA: "hydra* defaults",
        }
    ),
}

RLINF = Framework(
    "RLinf",
    TABLE,
    _mode,
    {"algorithm.update_epoch": 1, "algorithm.clip_ratio_c": None},
    mappings=frozenset({"cluster.component_placement"}),
)
