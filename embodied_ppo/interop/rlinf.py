"""PPO options of RLinf (August 2026), for robot policies and language models, mapped to ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from embodied_ppo.core.errors import show
from embodied_ppo.interop.rules import (
    ENGINE,
    EPOCHS,
    HYDRA,
    KL,
    LOADER,
    LOGGING,
    MEMORY,
    OFFLOAD,
    REMOTE,
    RESUME,
    SEEDS,
    SHARDED,
    SHUFFLE,
    Answer,
    Framework,
    Rule,
    Source,
    dtype_option,
    engine,
    interval_option,
    list_option,
    no_option,
    no_options,
    only_values,
    option,
    option_if_set,
    prefixed,
    read_if,
    sampling_option,
    warmup_fraction,
    warmup_steps,
)


def _robot(source: Source) -> bool:
    """Return whether an RLinf file trains a robot policy."""
    if (task := source.get("runner.task_type")) is not None:
        return task == "embodied"
    return source.get("algorithm.loss_type") != "actor" and not source.has("data.")


def _chunk(source: Source) -> int:
    return int(source.get("actor.model.num_action_chunks", 1))


def _per_step(path: str) -> Rule:
    """Map a discount per decision to one per primitive step if rewards are given per chunk."""

    def rule(value: Any, source: Source) -> Answer:
        per_chunk = (
            _robot(source)
            and source.get("algorithm.reward_type") == "chunk_level"
            and _chunk(source) > 1
        )
        if not per_chunk or not isinstance(value, (int, float)):
            return {path: value}
        return {path: round(float(value) ** (1 / _chunk(source)), 8)}

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
        return EPOCHS if not _robot(source) else "-1: set by runner.max_epochs"
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
    words = {"openvla": "token", "openvla_oft": "token", "openpi": "flow", "openpi_rlinf": "flow"}
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
    if value not in words:
        return (
            f"{value} does not exist here; the models are model.policy=actor_critic, token, flow "
            "and "
            "gaussian (docs/vla.md)"
        )
    return {"model.policy": words[value]}


def _checkpoint(value: Any, source: Source) -> Answer:
    if not _robot(source):
        return "set by rollout.model.model_path"
    return {"model.checkpoint": value} if value else "empty: a new model, as here"


def _clip(value: Any, source: Source) -> Answer:
    sides = [s for s in ("low", "high") if source.get(f"algorithm.clip_ratio_{s}") is None]
    return {
        f"algorithm.clip_ratio_{s}": value for s in sides
    } or "clip_ratio_low and clip_ratio_high take precedence there, too"


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


def _optim(section: str) -> dict[str, Rule]:
    per_actor = section == "algorithm"
    adam = {
        f"adam_{name}": (
            option(f"algorithm.adam_{name}")
            if per_actor
            else no_option("set for the actor: algorithm.adam_*")
        )
        for name in ("beta1", "beta2", "eps")
    }
    schedule = {
        "lr_scheduler": option(f"{section}.lr_schedule"),
        "lr_warmup_steps": warmup_steps(section),
        "lr_warmup_steps_ratio": warmup_fraction(section, _updates),
    }
    return {
        "lr": option(f"{section}.lr"),
        "value_lr": lambda value, source: (
            {"algorithm.value_lr": value}
            if _robot(source)
            else "the critic's learning rate is critic.optim.lr"
        ),
        "weight_decay": option(f"{section}.weight_decay"),
        "clip_grad": option(f"{section}.max_grad_norm"),
        "critic_warmup_steps": _critic_warmup,
        "min_lr_rate": option(f"{section}.lr_end"),
        "min_lr": no_option("the final learning rate is a fraction here: lr_end"),
        "total_training_steps": no_option("a schedule covers the whole run: updates"),
        "optimizer": only_values(
            "adam", "adamw", same="AdamW, as here", other="AdamW is the only optimiser here"
        ),
        **adam,
        **schedule,
        **no_options(
            "bf16 fp16 loss_scale optimizer_enable_pin overlap_grad_reduce overlap_param_gather "
            "overlap_param_gather_with_optimizer_step use_distributed_optimizer num_cycles",
            SHARDED,
        ),
    }


def _schedule(section: str) -> dict[str, Rule]:
    return {
        "lr_decay_style": option(f"{section}.lr_schedule"),
        "lr_warmup_iters": warmup_steps(section),
        "lr_warmup_fraction": warmup_fraction(section, _updates),
        **no_options(
            "max_lr min_lr lr_warmup_init lr_decay_iters start_weight_decay end_weight_decay",
            "the learning rate is optim.lr and warms up from 0; a schedule covers the whole run",
        ),
    }


_LEVELS = {
    f"algorithm.{name}_type": option(f"algorithm.{name}_type") for name in ("logprob", "entropy")
}
_SAMPLING: dict[str, Rule] = {
    "do_sample": only_values(
        True, same="training samples, as here", other="training always samples here"
    ),
    "top_k": lambda value, source: (
        "off, as here" if not value or value < 0 or value >= 1_000_000 else {"rollout.top_k": value}
    ),
    "top_p": sampling_option("top_p", 1, 1.0),
    "repetition_penalty": sampling_option("repetition_penalty", 1, 1.0),
    "temperature": option("rollout.temperature"),
    "temperature_train": lambda value, source: {
        "model.temperature" if _robot(source) else "rollout.temperature": value
    },
    "temperature_eval": lambda value, source: (
        {"evaluation.deterministic": False, "evaluation.temperature": value}
        if isinstance(value, (int, float)) and value > 0
        else {"evaluation.deterministic": True}
    ),
    "max_new_tokens": lambda value, source: (
        {"algorithm.response_length": value}
        if not _robot(source)
        else "set by the model and env.action_chunk"
    ),
    "min_new_tokens": only_values(
        0,
        1,
        same="a response has at least its end token, as here",
        other="there is no lower limit here",
    ),
    "stop": list_option("rollout.stop"),
}
TABLE: dict[str, Rule] = {
    "algorithm.normalize_advantages": option("algorithm.normalize_advantages"),
    "algorithm.group_size": option("algorithm.group_size"),
    "algorithm.adv_type": option(
        "algorithm.adv_type",
        values={"reinpp": "reinforce_plus_plus", "reinpp_baseline": "reinforce_plus_plus_baseline"},
    ),
    "algorithm.loss_type": option("algorithm.loss_type"),
    "algorithm.loss_agg_func": option("algorithm.loss_agg_func"),
    "algorithm.update_epoch": option("algorithm.update_epoch"),
    "algorithm.entropy_bonus": option("algorithm.entropy_bonus"),
    "algorithm.calculate_entropy": no_option("the entropy is always logged here: policy/entropy"),
    "algorithm.clip_ratio_low": option_if_set("algorithm.clip_ratio_low", "null: ratio_clip_eps"),
    "algorithm.clip_ratio_high": option_if_set("algorithm.clip_ratio_high", "null: ratio_clip_eps"),
    "algorithm.ratio_clip_eps": _clip,
    "algorithm.clip_ratio_c": option("algorithm.clip_ratio_c"),
    "algorithm.value_clip": option("algorithm.value_clip"),
    "algorithm.value_cliprange": option("algorithm.value_clip"),
    "algorithm.huber_delta": option("algorithm.huber_delta"),
    "algorithm.gamma": _per_step("algorithm.gamma"),
    "algorithm.gae_lambda": _per_step("algorithm.gae_lambda"),
    "algorithm.bootstrap_type": option("algorithm.bootstrap_type"),
    **_LEVELS,
    "algorithm.reward_type": _reward_type,
    "algorithm.kl_beta": _kl,
    "algorithm.kl_penalty": lambda value, source: (
        "not read there for robot policies; algorithm.kl_loss_type is k3"
        if _robot(source)
        else {"algorithm.kl_penalty": KL.get(value, value)}
    ),
    "algorithm.kl_penalty_type": option("algorithm.kl_loss_type", values=KL),
    "algorithm.reinpp_kl_beta": lambda value, source: (
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value}
        if value
        else {"algorithm.use_kl_in_reward": False}
    ),
    "algorithm.critic_warmup_steps": _critic_warmup,
    "algorithm.rollout_micro_batch_size": option("algorithm.rollout_micro_batch_size"),
    "algorithm.logprob_forward_micro_batch_size": option(
        "algorithm.logprob_forward_micro_batch_size"
    ),
    "algorithm.val_rollout_batch_size_per_gpu": no_option(MEMORY),
    "algorithm.rollout_batch_size_per_gpu": no_option(MEMORY),
    "algorithm.training_batch_size_per_gpu": option("algorithm.micro_batch_size"),
    "algorithm.n_minibatches": _minibatches,
    "algorithm.recompute_logprobs": option("algorithm.recompute_log_probs"),
    "algorithm.importance_sampling_fix": only_values(
        False,
        None,
        same="off, as here",
        other="write algorithm.off_policy_correction=token and off_policy_cap",
    ),
    "algorithm.shuffle_rollout": no_option(SHUFFLE),
    "algorithm.early_stop_imp_ratio": no_option(
        "their code skips minibatches with large ratios; here algorithm.target_kl_stop "
        "ends an update at a limit of the KL"
    ),
    "algorithm.use_valid_token_scale": only_values(
        False, same="off, as here", other="algorithm.loss_agg_func sets how tokens are averaged"
    ),
    **prefixed("algorithm.sampling_params.", _SAMPLING),
    "algorithm.length_params.*": no_option(
        "the model and env.action_chunk set the number of tokens"
    ),
    "algorithm.reward_coef": only_values(
        1,
        1.0,
        same="1: rewards are not scaled, as here",
        other=(
            "rewards are not scaled here; scale them in the task, or write"
            " algorithm.reward_norm=running"
        ),
    ),
    "algorithm.filter_rewards": only_values(
        False, same="off, as here", other="groups are not filtered by their reward"
    ),
    "algorithm.rewards_*_bound": read_if(
        "algorithm.filter_rewards", no_option("groups are not filtered by their reward")
    ),
    "algorithm.staleness_threshold": no_option("cluster.max_lag sets how far rollouts run ahead"),
    "algorithm.behave_weight_threshold": option_if_set("algorithm.off_policy_cap", "null: none"),
    "actor.global_batch_size": lambda value, source: (
        {"algorithm.global_batch_size": value}
        if _robot(source)
        else "set by their program from n_minibatches"
    ),
    "actor.micro_batch_size": option("algorithm.micro_batch_size"),
    "actor.seed": option("seed"),
    **prefixed("actor.optim.", _optim("algorithm")),
    **prefixed("actor.lr_sched.", _schedule("algorithm")),
    "actor.model.model_type": _model,
    "actor.model.model_path": _checkpoint,
    "actor.model.num_action_chunks": option("env.action_chunk"),
    "actor.model.unnorm_key": option("model.unnorm_key"),
    "actor.model.is_lora": no_option("model.lora_rank, if set, has this effect"),
    "actor.model.lora_rank": read_if("actor.model.is_lora", option("model.lora_rank")),
    "actor.model.lora_path": read_if(
        "actor.model.is_lora",
        no_option("adapters start at zero here; merge theirs into the checkpoint first"),
    ),
    "actor.model.precision": lambda value, source: dtype_option(
        "model.dtype" if _robot(source) else "actor.model.dtype"
    )(value, source),
    "actor.model.hidden_dim": lambda value, source: {"model.hidden": [value, value, value]},
    "actor.model.num_steps": option("model.flow_steps"),
    "actor.model.openpi.num_steps": option("model.flow_steps"),
    "actor.model.openpi.noise_level": option("model.flow_eta"),
    "actor.model.openpi.noise_method": option(
        "model.flow_noise", values={"flow_sde": "sde", "flow_noise": "learned"}
    ),
    "actor.model.openpi.joint_logprob": lambda value, source: {
        "model.flow_chain": "mean" if value else "one"
    },
    "actor.model.openpi.train_expert_only": option("model.freeze_trunk"),
    "actor.model.openpi.detach_critic_input": option_if_set(
        "model.detach_value", "null: chosen by their code"
    ),
    "actor.model.add_value_head": only_values(
        True,
        same="there is always a value head",
        other="algorithm.loss_type=actor_critic has a value head",
    ),
    "actor.model.value_type": no_option(
        "algorithm.reward_type=action_level gives each action of a chunk a value"
    ),
    "actor.model.trust_remote_code": no_option(REMOTE),
    "actor.model.*": no_option(
        "read from the checkpoint, the task or the transformers config here"
    ),
    "actor.fsdp_config.gradient_checkpointing": lambda value, source: {
        (
            "model.gradient_checkpointing"
            if _robot(source)
            else "actor.model.gradient_checkpointing"
        ): value
    },
    "actor.tokenizer.tokenizer_model": option_if_set(
        "actor.tokenizer", "null: the model's, as here"
    ),
    "actor.tokenizer.*": no_option("read from the tokenizer's directory"),
    "actor.*offload*": no_option(OFFLOAD),
    "actor.group_name": no_option("the names of roles are fixed here"),
    **prefixed(
        "actor.",
        no_options(
            "calculate_flops enable_dp_load_balance fsdp_config mcore_gpt megatron spec_name "
            "training_backend sync_precision",
            SHARDED,
        ),
    ),
    "critic.use_critic_model": lambda value, source: (
        "a robot policy has a value head, as there"
        if _robot(source)
        else {"critic.use_critic_model": value}
    ),
    **prefixed("critic.optim.", _optim("critic")),
    **prefixed("critic.lr_sched.", _schedule("critic")),
    "critic.model.precision": dtype_option("critic.model.dtype"),
    "critic.model.model_path": option_if_set(
        "critic.model.path", "null: a copy of the actor, as here"
    ),
    "critic.*offload*": no_option(OFFLOAD),
    "critic.group_name": no_option("the names of roles are fixed here"),
    "critic.seed": no_option(SEEDS),
    **prefixed(
        "critic.",
        no_options(
            "calculate_flops enable_dp_load_balance fsdp_config mcore_gpt megatron model spec_name "
            "tokenizer training_backend",
            SHARDED,
        ),
    ),
    "env.train.env_type": _env,
    "env.train.task_suite_name": lambda value, source: _env(
        source.get("env.train.env_type", "libero"), source
    ),
    "env.train.total_num_envs": _rollout,
    "env.train.rollout_epoch": _rollout,
    "env.train.auto_reset": _rollout,
    "env.train.max_steps_per_rollout_epoch": _rollout,
    "env.train.max_episode_steps": option("env.max_episode_steps"),
    "env.train.ignore_terminations": only_values(
        False,
        same="an episode ends when the task terminates, as here",
        other="an episode ends when the task terminates; write a task that does not terminate",
    ),
    "env.train.group_size": no_option("set by algorithm.group_size"),
    "env.train.seed": no_option(SEEDS),
    "env.train.reward_coef": only_values(
        1,
        1.0,
        same="1: rewards are not scaled, as here",
        other=(
            "rewards are not scaled here; scale them in the task, or write"
            " algorithm.reward_norm=running"
        ),
    ),
    "env.train.use_*reset_state_ids": no_option(
        "initial states are derived from seed; a group shares one"
    ),
    "env.train.video_cfg.*": no_option(
        "videos are recorded in evaluations: evaluation.video_episodes=2"
    ),
    "env.train.init_params.camera_heights": option("env.image_size"),
    "env.train.init_params.camera_widths": option("env.image_size"),
    "env.train.init_params.*": no_option(
        "read by the simulator's constructor; write its arguments into env.kwargs"
    ),
    "env.train.*": no_option(
        "read by the simulator; write what its adapter reads into env.kwargs (docs/tasks.md)"
    ),
    "env.eval.total_num_envs": _evaluation,
    "env.eval.rollout_epoch": _evaluation,
    "env.eval.video_cfg.save_video": lambda value, source: {
        "evaluation.video_episodes": 2 if value else 0
    },
    "env.eval.*": no_option(
        "evaluation uses the training environment; evaluation.env_kwargs changes its arguments"
    ),
    "env.*offload*": no_option(OFFLOAD),
    "env.group_name": no_option("the names of roles are fixed here"),
    **prefixed("rollout.sampling_params.", _SAMPLING),
    "rollout.pipeline_stage_num": option("cluster.stages"),
    "rollout.recompute_logprobs": lambda value, source: (
        "the log-probabilities of acting are used; they are equal"
        if _robot(source)
        else {"algorithm.recompute_log_probs": value}
    ),
    "rollout.model.model_path": lambda value, source: (
        "the rollout uses the actor's weights" if _robot(source) else {"actor.model.path": value}
    ),
    "rollout.model.*": no_option("the rollout uses the actor's weights"),
    "rollout.unnorm_key": option("model.unnorm_key"),
    "rollout.rollout_backend": _backend,
    "rollout.*backend": no_option(ENGINE),
    "rollout.*offload*": no_option(OFFLOAD),
    "rollout.group_name": no_option("the names of roles are fixed here"),
    **prefixed(
        "rollout.",
        no_options(
            "cuda_graph_max_bs detokenize disable_log_stats enable_cuda_graph enable_torch_compile "
            "enforce_eager eos gpu_memory_utilization max_running_requests padding sglang vllm "
            "pipeline_parallel_size print_outputs return_logprobs tensor_parallel_size "
            "rollout_queue_size validate_save_dir validate_weight validate_weight_first_sync",
            ENGINE,
        ),
    ),
    "data.train_data_paths": list_option("data.train"),
    "data.val_data_paths": list_option("data.eval"),
    "data.max_prompt_length": option("algorithm.prompt_length"),
    "data.rollout_batch_size": lambda value, source: (
        "counts prompts; the rollout of a robot policy is env.num_envs x algorithm.horizon"
        if _robot(source)
        else {"algorithm.rollout_batch_size": value}
    ),
    "data.prompt_key": option("data.prompt_key"),
    "data.answer_key": option("data.answer_key"),
    "data.shuffle": option("data.shuffle"),
    "data.apply_chat_template": lambda value, source: {
        "data.chat_template": "always" if value else "never"
    },
    "data.filter_prompt_by_length": no_option("longer prompts are always dropped, and counted"),
    "data.seed": no_option(SEEDS),
    **prefixed(
        "data.",
        no_options(
            "dataset_name num_workers type val_rollout_batch_size validation_shuffle", LOADER
        ),
    ),
    "reward.use_reward_model": only_values(
        False, same="a function grades, as here", other="write reward.model.path=DIR"
    ),
    "reward.reward_type": no_option(
        "write reward.grader: math_verify, gsm8k_numeric, exact, or FILE.py:function"
    ),
    "reward.reward_scale": no_option(
        "a grader here returns 1 for a correct and 0 for a wrong answer, theirs +- this value"
    ),
    "reward.*": no_option(
        "write reward.grader or reward.model.path; the reward of a simulator comes from its task"
    ),
    "runner.task_type": lambda value, source: {
        "mode": "embodied" if _robot(source) else "reasoning"
    },
    "runner.max_epochs": _length,
    "runner.max_steps": _length,
    "runner.val_check_interval": interval_option("eval_every"),
    "runner.save_interval": interval_option("save_every"),
    "runner.experiment_name": option("name"),
    "runner.logger.experiment_name": option("name"),
    "runner.seq_length": no_option(
        "prompt and response have separate limits: algorithm.prompt_length, response_length"
    ),
    "runner.enable_dynamic_batch_size": no_option(
        "algorithm.micro_batch_tokens, if set, has this effect"
    ),
    "runner.max_tokens_per_mbs": read_if(
        "runner.enable_dynamic_batch_size", option("algorithm.micro_batch_tokens")
    ),
    "runner.only_eval": no_option("embodied-ppo evaluate checkpoint=.. does that"),
    "runner.resume_dir": no_option(RESUME),
    "runner.ckpt_path": no_option("embodied-ppo evaluate checkpoint=.., or train resume=.."),
    "runner.*eval_policy_path": no_option("embodied-ppo evaluate checkpoint=.. does that"),
    "runner.max_prompt_length": no_option("a property of the model"),
    "runner.logger.*": no_option(LOGGING),
    "runner.output_dir": no_option(LOGGING),
    "runner.per_worker_log*": no_option(LOGGING),
    "runner.weight_sync_interval": only_values(
        1,
        same="after every update, as here",
        other="weights are sent to the rollouts after every update",
    ),
    "runner.enable_decoupled_mode": no_option("each rollout process has its own environments"),
    "runner.overlap_env_bootstrap": no_option("environments reset automatically"),
    "cluster.num_nodes": option("cluster.num_nodes"),
    "cluster.component_placement": _placement,
    "cluster.node_groups": _nodes,
    "weight_syncer*": no_option("cluster.weights sets how weights are transferred"),
    "inference.*": no_option("the actor computes log-probabilities here"),
    "hydra*": no_option(HYDRA),
    "defaults": no_option(HYDRA),
}

RLINF = Framework(
    "RLinf",
    TABLE,
    lambda source: "embodied" if _robot(source) else "reasoning",
    {"algorithm.update_epoch": 1, "algorithm.clip_ratio_c": None},
    mappings=frozenset({"cluster.component_placement"}),
)
