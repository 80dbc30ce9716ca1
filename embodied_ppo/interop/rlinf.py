"""RLinf's options of PPO, for robots and for language models (as of August 2026) -> ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from embodied_ppo.core.errors import show
from embodied_ppo.interop.rules import (
    ENGINE,
    EPOCHS,
    FRESH,
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
    Answer,
    Peer,
    Rule,
    Source,
    dtype,
    engine,
    every,
    given,
    listed,
    needs,
    none,
    only,
    ours,
    sampled,
    several,
    under,
    warmup_share,
    warmup_steps,
)


def _robot(source: Source) -> bool:
    """Whether an RLinf file is of the embodied kind."""
    if (task := source.get("runner.task_type")) is not None:
        return task == "embodied"
    return source.get("algorithm.loss_type") != "actor" and not source.has("data.")


def _chunk(source: Source) -> int:
    return int(source.get("actor.model.num_action_chunks", 1))


def _per_step(path: str) -> Rule:
    """A discount per decision -> per primitive step, where rewards are those of whole chunks."""

    def rule(value: Any, source: Source) -> Answer:
        per_chunk = _robot(source) and source.get("algorithm.reward_type") == "chunk_level" and _chunk(source) > 1
        if not per_chunk or not isinstance(value, (int, float)):
            return {path: value}
        return {path: round(float(value) ** (1 / _chunk(source)), 8)}

    return rule


def _rollout(value: Any, source: Source) -> Answer:
    """Environments and steps of a rollout. Without auto_reset each pass begins anew: as many environments more."""
    train = "env.train."
    passes, resets = source.get(f"{train}rollout_epoch", 1), source.get(f"{train}auto_reset", False)
    envs, steps = source.get(f"{train}total_num_envs"), source.get(f"{train}max_steps_per_rollout_epoch")
    answer: dict[str, Any] = {"env.restart_each_rollout": not resets}
    if envs is not None:
        answer["env.num_envs"] = envs * (1 if resets else passes)
    if steps is not None:
        if steps % _chunk(source):
            return f"not a multiple of actor.model.num_action_chunks = {_chunk(source)}"
        answer["algorithm.horizon"] = steps // _chunk(source) * (passes if resets else 1)
    return answer


def _evaluation(value: Any, source: Source) -> Answer:
    """Episodes of an evaluation: passes x environments, the first episode of each."""
    envs = source.get("env.eval.total_num_envs", 1)
    return {"evaluation.num_envs": envs, "evaluation.episodes": envs * source.get("env.eval.rollout_epoch", 1)}


def _updates(source: Source) -> int | None:
    steps, epochs = source.get("runner.max_steps", -1), source.get("runner.max_epochs")
    if not _robot(source):
        return steps if steps > 0 else None
    return min(epochs, steps) if epochs and steps > 0 else epochs or (steps if steps > 0 else None)


def _length(value: Any, source: Source) -> Answer:
    updates = _updates(source)
    if updates is None:
        return EPOCHS if not _robot(source) else "-1: runner.max_epochs says it"
    return {"updates": updates}


def _steps_per_update(source: Source) -> float | None:
    """Optimiser steps in one update of a robot's policy."""
    rollout = _rollout(None, source)
    if isinstance(rollout, str) or not {"env.num_envs", "algorithm.horizon"} <= set(rollout):
        return None
    total, batch = rollout["env.num_envs"] * rollout["algorithm.horizon"], source.get("actor.global_batch_size")
    return source.get("algorithm.update_epoch", 1) * total / batch if batch else None


def _critic_warmup(value: Any, source: Source) -> Answer:
    each = _steps_per_update(source) if _robot(source) else 1.0
    if value and each is None:
        return "optimiser steps; write algorithm.critic_warmup, which counts updates"
    return {"algorithm.critic_warmup": math.ceil((value or 0) / (each or 1))}


def _env(value: Any, source: Source) -> Answer:
    if value == "libero":
        return {"env.simulator": "libero", "env.id": f"libero/{source.get('env.train.task_suite_name', 'libero_10')}"}
    return f"write env.id=package.module:function and env.simulator=torch around {value} (docs/tasks.md), or another id"


def _model(value: Any, source: Source) -> Answer:
    """Their networks of vectors: value on a trunk of its own, observations as they are, a deviation of e^-0.5."""
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
        return "read from the model's own directory"
    if value not in words:
        return (
            f"no such model here; models: model.policy=actor_critic, token, flow or gaussian (docs/vla.md), not {value}"
        )
    return {"model.policy": words[value]}


def _checkpoint(value: Any, source: Source) -> Answer:
    if not _robot(source):
        return "rollout.model.model_path says it"
    return {"model.checkpoint": value} if value else "empty: a new model, as here"


def _clip(value: Any, source: Source) -> Answer:
    sides = [s for s in ("low", "high") if source.get(f"algorithm.clip_ratio_{s}") is None]
    return {f"algorithm.clip_ratio_{s}": value for s in sides} or "clip_ratio_low and clip_ratio_high win there, too"


def _kl(value: Any, source: Source) -> Answer:
    """Their code adds it to the loss (their page says to the reward)."""
    return {"algorithm.use_kl_loss": bool(value), "algorithm.kl_loss_coef": value or 0.0}


def _reward_type(value: Any, source: Source) -> Answer:
    """Their chunk_level adds up the rewards of a chunk without a discount."""
    answer: dict[str, Any] = {"algorithm.reward_type": value}
    if value == "chunk_level" and _robot(source) and _chunk(source) > 1:
        answer["algorithm.chunk_reward"] = "sum"
    return answer


def _placement(value: Any, source: Source) -> Answer:
    if not isinstance(value, Mapping):
        return f"{show(value)} is no mapping of components to devices"
    found: dict[str, Any] = {}
    for entry, where in value.items():
        roles = [word.strip() for word in str(entry).split(",")]
        kept = [role for role in roles if role != "inference"]  # the actor computes log-probabilities here
        if isinstance(where, Mapping):
            devices: Any = {"devices": _ranks(where.get("placement", "all"))}
            if where.get("node_group") is not None:
                devices["node"] = where["node_group"]
        else:
            devices = _ranks(where)
        if kept:
            found[",".join(kept)] = devices
    return {"cluster.component_placement": found}


def _ranks(where: Any) -> Any:
    """``0-3,5`` -> [0-3, 5]."""
    parts = [part.strip() for part in str(where).split(",")]
    plain = [int(part) if part.isdecimal() else part for part in parts]
    return plain[0] if len(plain) == 1 else plain


def _nodes(value: Any, source: Source) -> Answer:
    groups = value if isinstance(value, list) else []
    if not groups or not all(isinstance(g, Mapping) and {"label", "node_ranks"} <= set(g) for g in groups):
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
    rest = {
        f"adam_{name}": ours(f"algorithm.adam_{name}") if per_actor else none("the actor's, algorithm.adam_*")
        for name in ("beta1", "beta2", "eps")
    }
    schedule = {
        "lr_scheduler": ours(f"{section}.lr_schedule"),
        "lr_warmup_steps": warmup_steps(section),
        "lr_warmup_steps_ratio": warmup_share(section, _updates),
    }
    return {
        "lr": ours(f"{section}.lr"),
        "value_lr": lambda value, source: (
            {"algorithm.value_lr": value} if _robot(source) else "critic.optim.lr is the critic's"
        ),
        "weight_decay": ours(f"{section}.weight_decay"),
        "clip_grad": ours(f"{section}.max_grad_norm"),
        "critic_warmup_steps": _critic_warmup,
        "min_lr_rate": ours(f"{section}.lr_end"),
        "min_lr": none("the end of a schedule is a fraction here: lr_end"),
        "total_training_steps": none("schedules span the run: updates"),
        "optimizer": only("adam", "adamw", same="AdamW, as here", other="AdamW is the only optimiser here"),
        **rest,
        **schedule,
        **several(
            "bf16 fp16 loss_scale optimizer_enable_pin overlap_grad_reduce overlap_param_gather "
            "overlap_param_gather_with_optimizer_step use_distributed_optimizer num_cycles",
            SHARDED,
        ),
    }


def _schedule(section: str) -> dict[str, Rule]:
    return {
        "lr_decay_style": ours(f"{section}.lr_schedule"),
        "lr_warmup_iters": warmup_steps(section),
        "lr_warmup_fraction": warmup_share(section, _updates),
        **several(
            "max_lr min_lr lr_warmup_init lr_decay_iters start_weight_decay end_weight_decay",
            "the learning rate is that of optim.lr, from 0 where it warms up; schedules span the run",
        ),
    }


_LEVELS = {f"algorithm.{name}_type": ours(f"algorithm.{name}_type") for name in ("logprob", "entropy")}
_SAMPLING: dict[str, Rule] = {
    "do_sample": only(True, same="training samples, as here", other="training always samples here"),
    "top_k": lambda value, source: (
        "off, as here" if not value or value < 0 or value >= 1_000_000 else {"rollout.top_k": value}
    ),
    "top_p": sampled("top_p", 1, 1.0),
    "repetition_penalty": sampled("repetition_penalty", 1, 1.0),
    "temperature": ours("rollout.temperature"),
    "temperature_train": lambda value, source: {
        "model.temperature" if _robot(source) else "rollout.temperature": value
    },
    "temperature_eval": lambda value, source: (
        {"evaluation.deterministic": False, "evaluation.temperature": value}
        if isinstance(value, (int, float)) and value > 0
        else {"evaluation.deterministic": True}
    ),
    "max_new_tokens": lambda value, source: (
        {"algorithm.response_length": value} if not _robot(source) else "the model and env.action_chunk say it"
    ),
    "min_new_tokens": only(0, 1, same="a response has at least its end token, as here", other="no lower limit here"),
    "stop": listed("rollout.stop"),
}
TABLE: dict[str, Rule] = {
    "algorithm.normalize_advantages": ours("algorithm.normalize_advantages"),
    "algorithm.group_size": ours("algorithm.group_size"),
    "algorithm.adv_type": ours("algorithm.adv_type", words={"reinpp": "reinforce_plus_plus",
                                                            "reinpp_baseline": "reinforce_plus_plus_baseline"}),
    "algorithm.loss_type": ours("algorithm.loss_type"),
    "algorithm.loss_agg_func": ours("algorithm.loss_agg_func"),
    "algorithm.update_epoch": ours("algorithm.update_epoch"),
    "algorithm.entropy_bonus": ours("algorithm.entropy_bonus"),
    "algorithm.calculate_entropy": none("the entropy is always told here: policy/entropy"),
    "algorithm.clip_ratio_low": given("algorithm.clip_ratio_low", "null: ratio_clip_eps"),
    "algorithm.clip_ratio_high": given("algorithm.clip_ratio_high", "null: ratio_clip_eps"),
    "algorithm.ratio_clip_eps": _clip,
    "algorithm.clip_ratio_c": ours("algorithm.clip_ratio_c"),
    "algorithm.value_clip": ours("algorithm.value_clip"),
    "algorithm.value_cliprange": ours("algorithm.value_clip"),
    "algorithm.huber_delta": ours("algorithm.huber_delta"),
    "algorithm.gamma": _per_step("algorithm.gamma"),
    "algorithm.gae_lambda": _per_step("algorithm.gae_lambda"),
    "algorithm.bootstrap_type": ours("algorithm.bootstrap_type"),
    **_LEVELS,
    "algorithm.reward_type": _reward_type,
    "algorithm.kl_beta": _kl,
    "algorithm.kl_penalty": lambda value, source: (
        "not read there for robots; algorithm.kl_loss_type is k3" if _robot(source)
        else {"algorithm.kl_penalty": KL.get(value, value)}
    ),
    "algorithm.kl_penalty_type": ours("algorithm.kl_loss_type", words=KL),
    "algorithm.reinpp_kl_beta": lambda value, source: (
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value} if value
        else {"algorithm.use_kl_in_reward": False}
    ),
    "algorithm.critic_warmup_steps": _critic_warmup,
    "algorithm.rollout_micro_batch_size": ours("algorithm.rollout_micro_batch_size"),
    "algorithm.logprob_forward_micro_batch_size": ours("algorithm.logprob_forward_micro_batch_size"),
    "algorithm.val_rollout_batch_size_per_gpu": none(MEMORY),
    "algorithm.rollout_batch_size_per_gpu": none(MEMORY),
    "algorithm.training_batch_size_per_gpu": ours("algorithm.micro_batch_size"),
    "algorithm.n_minibatches": _minibatches,
    "algorithm.recompute_logprobs": ours("algorithm.recompute_log_probs"),
    "algorithm.importance_sampling_fix": only(False, None, same="off, as here", other="write "
                                              "algorithm.off_policy_correction=token and off_policy_cap"),
    "algorithm.shuffle_rollout": none(FRESH),
    "algorithm.early_stop_imp_ratio": none("theirs skips a minibatch by its ratios; here algorithm.target_kl_stop ends "
                                           "an update by its KL"),
    "algorithm.use_valid_token_scale": only(False, same="off, as here", other="algorithm.loss_agg_func says how tokens "
                                            "count"),
    **under("algorithm.sampling_params.", _SAMPLING),
    "algorithm.length_params.*": none("the model and env.action_chunk say how long an answer is"),
    "algorithm.reward_coef": only(1, 1.0, same="1: rewards as they are, as here", other="rewards are as the simulator "
                                  "gives them; scale them in the task, or write algorithm.reward_norm=running"),
    "algorithm.filter_rewards": only(False, same="off, as here", other="groups are not left out by their reward"),
    "algorithm.rewards_*_bound": needs("algorithm.filter_rewards", none("groups are not left out by their reward")),
    "algorithm.staleness_threshold": none("cluster.max_lag says how far rollouts run ahead"),
    "algorithm.behave_weight_threshold": given("algorithm.off_policy_cap", "null: none"),
    "actor.global_batch_size": lambda value, source: (
        {"algorithm.global_batch_size": value} if _robot(source) else "their program's own: n_minibatches says it"
    ),
    "actor.micro_batch_size": ours("algorithm.micro_batch_size"),
    "actor.seed": ours("seed"),
    **under("actor.optim.", _optim("algorithm")),
    **under("actor.lr_sched.", _schedule("algorithm")),
    "actor.model.model_type": _model,
    "actor.model.model_path": _checkpoint,
    "actor.model.num_action_chunks": ours("env.action_chunk"),
    "actor.model.unnorm_key": ours("model.unnorm_key"),
    "actor.model.is_lora": none("model.lora_rank, where given, is that"),
    "actor.model.lora_rank": needs("actor.model.is_lora", ours("model.lora_rank")),
    "actor.model.lora_path": needs("actor.model.is_lora", none("adapters begin at zero here: merge them into the "
                                                               "checkpoint first")),
    "actor.model.precision": lambda value, source: dtype(
        "model.dtype" if _robot(source) else "actor.model.dtype"
    )(value, source),
    "actor.model.hidden_dim": lambda value, source: {"model.hidden": [value, value, value]},
    "actor.model.num_steps": ours("model.flow_steps"),
    "actor.model.openpi.num_steps": ours("model.flow_steps"),
    "actor.model.openpi.noise_level": ours("model.flow_eta"),
    "actor.model.openpi.noise_method": ours("model.flow_noise", words={"flow_sde": "sde", "flow_noise": "learned"}),
    "actor.model.openpi.joint_logprob": lambda value, source: {"model.flow_chain": "mean" if value else "one"},
    "actor.model.openpi.train_expert_only": ours("model.freeze_trunk"),
    "actor.model.openpi.detach_critic_input": given("model.detach_value", "null: theirs decides"),
    "actor.model.add_value_head": only(True, same="there is always a value head", other="algorithm.loss_type="
                                       "actor_critic has a value head"),
    "actor.model.value_type": none("algorithm.reward_type=action_level gives each action of a chunk a value"),
    "actor.model.trust_remote_code": none(REMOTE),
    "actor.model.*": none("read from the checkpoint, the task or transformers' own configuration here"),
    "actor.fsdp_config.gradient_checkpointing": lambda value, source: {
        "model.gradient_checkpointing" if _robot(source) else "actor.model.gradient_checkpointing": value
    },
    "actor.tokenizer.tokenizer_model": given("actor.tokenizer", "null: the model's, as here"),
    "actor.tokenizer.*": none("read from the tokenizer's own directory"),
    "actor.*offload*": none(OFFLOAD),
    "actor.group_name": none("roles have one name here"),
    **under("actor.", several("calculate_flops enable_dp_load_balance fsdp_config mcore_gpt megatron spec_name "
                              "training_backend sync_precision", SHARDED)),
    "critic.use_critic_model": lambda value, source: (
        "a robot's policy has a value head, as there" if _robot(source) else {"critic.use_critic_model": value}
    ),
    **under("critic.optim.", _optim("critic")),
    **under("critic.lr_sched.", _schedule("critic")),
    "critic.model.precision": dtype("critic.model.dtype"),
    "critic.model.model_path": given("critic.model.path", "null: a copy of the actor, as here"),
    "critic.*offload*": none(OFFLOAD),
    "critic.group_name": none("roles have one name here"),
    "critic.seed": none(SEEDS),
    **under("critic.", several("calculate_flops enable_dp_load_balance fsdp_config mcore_gpt megatron model spec_name "
                               "tokenizer training_backend", SHARDED)),
    "env.train.env_type": _env,
    "env.train.task_suite_name": lambda value, source: _env(source.get("env.train.env_type", "libero"), source),
    "env.train.total_num_envs": _rollout,
    "env.train.rollout_epoch": _rollout,
    "env.train.auto_reset": _rollout,
    "env.train.max_steps_per_rollout_epoch": _rollout,
    "env.train.max_episode_steps": ours("env.max_episode_steps"),
    "env.train.ignore_terminations": only(False, same="an episode ends where the task ends, as here", other="an "
                                          "episode ends where the task ends; let the task not end"),
    "env.train.group_size": none("algorithm.group_size says it"),
    "env.train.seed": none(SEEDS),
    "env.train.reward_coef": only(1, 1.0, same="1: rewards as they are, as here", other="rewards are as the simulator "
                                  "gives them; scale them in the task, or write algorithm.reward_norm=running"),
    "env.train.use_*reset_state_ids": none("initial states follow from seed; groups share theirs"),
    "env.train.video_cfg.*": none("films are of evaluations: evaluation.video_episodes=2"),
    "env.train.init_params.camera_heights": ours("env.image_size"),
    "env.train.init_params.camera_widths": ours("env.image_size"),
    "env.train.init_params.*": none("the simulator's own constructor; write what it needs into env.kwargs"),
    "env.train.*": none("the simulator's own; write what its adapter reads into env.kwargs (docs/tasks.md)"),
    "env.eval.total_num_envs": _evaluation,
    "env.eval.rollout_epoch": _evaluation,
    "env.eval.video_cfg.save_video": lambda value, source: {"evaluation.video_episodes": 2 if value else 0},
    "env.eval.*": none("evaluation is in the training environment; evaluation.env_kwargs changes its arguments"),
    "env.*offload*": none(OFFLOAD),
    "env.group_name": none("roles have one name here"),
    **under("rollout.sampling_params.", _SAMPLING),
    "rollout.pipeline_stage_num": ours("cluster.stages"),
    "rollout.recompute_logprobs": lambda value, source: (
        "a robot's log-probabilities are those of acting; they are equal" if _robot(source)
        else {"algorithm.recompute_log_probs": value}
    ),
    "rollout.model.model_path": lambda value, source: (
        "the actor's: one set of weights" if _robot(source) else {"actor.model.path": value}
    ),
    "rollout.model.*": none("the actor's: one set of weights"),
    "rollout.unnorm_key": ours("model.unnorm_key"),
    "rollout.rollout_backend": _backend,
    "rollout.*backend": none(ENGINE),
    "rollout.*offload*": none(OFFLOAD),
    "rollout.group_name": none("roles have one name here"),
    **under("rollout.", several("cuda_graph_max_bs detokenize disable_log_stats enable_cuda_graph enable_torch_compile "
                                "enforce_eager eos gpu_memory_utilization max_running_requests padding sglang vllm "
                                "pipeline_parallel_size print_outputs return_logprobs tensor_parallel_size "
                                "rollout_queue_size validate_save_dir validate_weight validate_weight_first_sync",
                                ENGINE)),
    "data.train_data_paths": listed("data.train"),
    "data.val_data_paths": listed("data.eval"),
    "data.max_prompt_length": ours("algorithm.prompt_length"),
    "data.rollout_batch_size": lambda value, source: (
        "counts prompts; a robot's rollout is env.num_envs x algorithm.horizon" if _robot(source)
        else {"algorithm.rollout_batch_size": value}
    ),
    "data.prompt_key": ours("data.prompt_key"),
    "data.answer_key": ours("data.answer_key"),
    "data.shuffle": ours("data.shuffle"),
    "data.apply_chat_template": lambda value, source: {"data.chat_template": "always" if value else "never"},
    "data.filter_prompt_by_length": none("longer prompts are always left out, and counted"),
    "data.seed": none(SEEDS),
    **under("data.", several("dataset_name num_workers type val_rollout_batch_size validation_shuffle", LOADER)),
    "reward.use_reward_model": only(False, same="a function grades", other="write reward.model.path=DIR"),
    "reward.reward_type": none("write reward.grader: math_verify, gsm8k_numeric, exact, or FILE.py:function"),
    "reward.reward_scale": none("a grader here gives 1 for right and 0 for wrong; theirs +- this"),
    "reward.*": none("write reward.grader or reward.model.path; a simulator's reward is the task's own"),
    "runner.task_type": lambda value, source: {"mode": "embodied" if _robot(source) else "reasoning"},
    "runner.max_epochs": _length,
    "runner.max_steps": _length,
    "runner.val_check_interval": every("eval_every"),
    "runner.save_interval": every("save_every"),
    "runner.experiment_name": ours("name"),
    "runner.logger.experiment_name": ours("name"),
    "runner.seq_length": none("prompt and response have limits of their own: algorithm.prompt_length, response_length"),
    "runner.enable_dynamic_batch_size": none("algorithm.micro_batch_tokens, where given, is that"),
    "runner.max_tokens_per_mbs": needs("runner.enable_dynamic_batch_size", ours("algorithm.micro_batch_tokens")),
    "runner.only_eval": none("embodied-ppo evaluate checkpoint=.. does that"),
    "runner.resume_dir": none(RESUME),
    "runner.ckpt_path": none("embodied-ppo evaluate checkpoint=.., or train resume=.."),
    "runner.*eval_policy_path": none("embodied-ppo evaluate checkpoint=.. does that"),
    "runner.max_prompt_length": none("the model's own"),
    "runner.logger.*": none(LOGGING),
    "runner.output_dir": none(LOGGING),
    "runner.per_worker_log*": none(LOGGING),
    "runner.weight_sync_interval": only(1, same="after every update, as here", other="weights go to rollouts after "
                                        "every update"),
    "runner.enable_decoupled_mode": none("a rollout process serves its own environments"),
    "runner.overlap_env_bootstrap": none("environments restart by themselves"),
    "cluster.num_nodes": ours("cluster.num_nodes"),
    "cluster.component_placement": _placement,
    "cluster.node_groups": _nodes,
    "weight_syncer*": none("cluster.weights says how weights travel"),
    "inference.*": none("the actor computes log-probabilities here"),
    "hydra*": none(HYDRA),
    "defaults": none(HYDRA),
}  # fmt: skip

RLINF = Peer(
    "RLinf",
    TABLE,
    lambda source: "embodied" if _robot(source) else "reasoning",
    {"algorithm.update_epoch": 1, "algorithm.clip_ratio_c": None},
    whole=frozenset({"cluster.component_placement"}),
)
