"""PPO options of verl (ppo_trainer.yaml, FSDP and Megatron, January 2026), mapped to ours."""

from __future__ import annotations

from typing import Any

from embodied_ppo.interop.rules import (
    ENGINE,
    EPOCHS,
    HYDRA,
    KL,
    LANGUAGE_LORA,
    LOADER,
    LOGGING,
    MEMORY,
    OTHER_LOSS,
    PROFILE,
    REMOTE,
    RESUME,
    SEEDS,
    SHARDED,
    SHUFFLE,
    THEIR_CODE,
    TOOLS,
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
    reasoning,
    sampling_option,
    warmup_fraction,
    warmup_steps,
)


def _gpus(source: Source) -> int:
    return int(source.get("trainer.nnodes", 1)) * int(source.get("trainer.n_gpus_per_node", 1))


def _updates(source: Source) -> int | None:
    total = source.get("trainer.total_training_steps")
    return total if isinstance(total, int) and total > 0 else None


def _clip(value: Any, source: Source) -> Answer:
    taken = [source.get(f"actor_rollout_ref.actor.clip_ratio_{side}") for side in ("low", "high")]
    if None not in taken:
        return "clip_ratio_low and clip_ratio_high take precedence there, too"
    sides = [side for side, other in zip(("low", "high"), taken, strict=True) if other is None]
    return {f"algorithm.clip_ratio_{side}": value for side in sides}


def _estimator(value: Any, source: Source) -> Answer:
    name = str(value).removesuffix("_vectorized")
    answer = {
        "algorithm.adv_type": name,
        "algorithm.normalize_advantages": name not in ("grpo", "rloo"),
    }
    return answer | ({} if name == "gae" else {"critic.use_critic_model": False})


def _aggregation(value: Any, source: Source) -> Answer:
    """Map the aggregation of the loss; the critic has the actor's unless the file sets another."""
    both = value != "token-mean" and source.get("critic.loss_agg_mode") is None
    both = both and source.get("algorithm.adv_estimator", "gae") == "gae"
    return {"algorithm.loss_agg_func": value} | ({"critic.loss_agg_func": value} if both else {})


def _differences(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    path = "actor_rollout_ref.actor.loss_agg_mode"
    if source.get(path) != "seq-mean-token-sum-norm":
        return {}
    return {
        path: (
            "their loss is the sum over the sequences of a micro-batch, ours the mean over all: "
            "their "
            "loss is ppo_micro_batch_size_per_gpu times ours, so grad_clip takes effect earlier"
        )
    }


def _micro(value: Any, source: Source) -> Answer:
    """Map the deprecated micro-batch size, which counts all devices together."""
    if value is None:
        return "null: not set there"
    if source.get("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu") is not None:
        return "ppo_micro_batch_size_per_gpu takes precedence there, too"
    return {"algorithm.micro_batch_size": max(1, value // _gpus(source))}


def _devices(value: Any, source: Source) -> Answer:
    if _gpus(source) == 1:
        return "one device needs one process: placement=local, the default"
    return {
        "placement": "fused",
        "cluster.num_nodes": source.get("trainer.nnodes", 1),
        "cluster.devices_per_node": source.get("trainer.n_gpus_per_node", 1),
    }


def _sampled_validation(value: Any, source: Source) -> Answer:
    return "greedy: do_sample=false" if value == 0 else {"evaluation.temperature": value}


def _optim(section: str, grad_clip: str) -> dict[str, Rule]:
    betas: Rule = lambda value, source: (
        {"algorithm.adam_beta1": value[0], "algorithm.adam_beta2": value[1]}
        if section == "algorithm" and isinstance(value, list) and len(value) == 2
        else "actor and critic share one pair here: algorithm.adam_beta1, adam_beta2"
    )
    clip: Rule = lambda value, source: (
        f"{grad_clip} takes precedence there, too"
        if source.get(grad_clip) is not None
        else {f"{section}.max_grad_norm": value}
    )
    schedule = option(f"{section}.lr_schedule")
    return {
        "lr": option(f"{section}.lr"),
        "lr_warmup_steps": warmup_steps(section),
        "lr_warmup_steps_ratio": _warmup_ratio(
            section, grad_clip.replace("grad_clip", "optim.lr_warmup_steps")
        ),
        "lr_scheduler_type": schedule,
        "lr_decay_style": schedule,
        "warmup_style": option_if_set(f"{section}.lr_schedule", "null: set by lr_scheduler_type"),
        "min_lr_ratio": lambda value, source: {f"{section}.lr_end": value or 0.0},
        "num_cycles": only_values(
            0.5, same="half a wave, as lr_schedule=cosine here", other="cosine is half a wave here"
        ),
        "weight_decay": option(f"{section}.weight_decay"),
        "betas": betas,
        "clip_grad": clip,
        "optimizer": only_values(
            "AdamW", "adam", same="AdamW, as here", other="AdamW is the only optimiser here"
        ),
        "total_training_steps": no_option("set by their program; here updates sets the length"),
        **no_options(
            "optimizer_impl override_optimizer_config lr_warmup_init lr_decay_steps "
            "lr_wsd_decay_style "
            "lr_wsd_decay_steps min_lr weight_decay_incr_style use_checkpoint_opt_param_scheduler",
            "the learning rate warms up from 0 and is constant, linear or cosine; AdamW is torch's",
        ),
    }


def _warmup_ratio(section: str, steps: str) -> Rule:
    rule = warmup_fraction(section, _updates)
    return lambda value, source: (
        "lr_warmup_steps takes precedence there, too"
        if source.get(steps, -1) >= 0
        else rule(value, source)
    )


def _model(section: str) -> dict[str, Rule]:
    return {
        "path": option(f"{section}.model.path"),
        "enable_gradient_checkpointing": option(f"{section}.model.gradient_checkpointing"),
        "fsdp_config.dtype": dtype_option(f"{section}.model.dtype"),
        "trust_remote_code": no_option(REMOTE),
        "lora_rank": LANGUAGE_LORA,
        "lora.rank": LANGUAGE_LORA,
        "lora*": no_option("adapters of language models are not supported"),
        "target_modules": no_option("adapters of language models are not supported"),
        "exclude_modules": no_option("adapters of language models are not supported"),
        "external_lib*": no_option(THEIR_CODE),
        "custom_chat_template": no_option("the tokenizer's template: data.chat_template"),
        "fsdp_config.*": no_option(SHARDED),
        **no_options(
            "enable_activation_offload fused_kernel_options hf_config_path mtp override_config "
            "tiled_mlp "
            "tokenizer_path use_fused_kernels use_liger use_remove_padding use_shm",
            "how their code runs the model (kernels, padding, attention); there is one forward pass"
            " here",
        ),
    }


_ACTOR: dict[str, Rule] = {
    "ppo_mini_batch_size": option("algorithm.global_batch_size"),
    "ppo_micro_batch_size": _micro,
    "ppo_micro_batch_size_per_gpu": option_if_set(
        "algorithm.micro_batch_size", "null: not set there"
    ),
    "use_dynamic_bsz": no_option("algorithm.micro_batch_tokens, if set, has this effect"),
    "ppo_max_token_len_per_gpu": read_if(
        "actor_rollout_ref.actor.use_dynamic_bsz", option("algorithm.micro_batch_tokens")
    ),
    "clip_ratio": _clip,
    "clip_ratio_low": option_if_set("algorithm.clip_ratio_low", "null: clip_ratio"),
    "clip_ratio_high": option_if_set("algorithm.clip_ratio_high", "null: clip_ratio"),
    "clip_ratio_c": option("algorithm.clip_ratio_c"),
    "loss_agg_mode": _aggregation,
    "loss_scale_factor": option_if_set(
        "algorithm.loss_scale_factor", "null: response_length, as here"
    ),
    "entropy_coeff": option("algorithm.entropy_bonus"),
    "calculate_entropy": no_option("the entropy is always logged here: policy/entropy"),
    "use_kl_loss": option("algorithm.use_kl_loss"),
    "kl_loss_coef": option("algorithm.kl_loss_coef"),
    "kl_loss_type": option("algorithm.kl_loss_type", values=KL),
    "ppo_epochs": option("algorithm.update_epoch"),
    "grad_clip": option("algorithm.max_grad_norm"),
    "shuffle": no_option(SHUFFLE),
    "data_loader_seed": no_option(SEEDS),
    "policy_loss.loss_mode": only_values(
        "vanilla", same="PPO's clipped surrogate, as here", other=OTHER_LOSS
    ),
    "policy_loss.*": no_option(OTHER_LOSS),
    "tau_*": no_option(OTHER_LOSS),
    "rollout_correction.rollout_is": option_if_set(
        "algorithm.off_policy_correction", "null: off, as here"
    ),
    "rollout_correction.rollout_is_threshold": option("algorithm.off_policy_cap"),
    "rollout_correction.*": no_option(
        "rejection of samples is not supported; algorithm.off_policy_correction weights samples"
    ),
    **prefixed("optim.", _optim("algorithm", "actor_rollout_ref.actor.grad_clip")),
    "fsdp_config.dtype": dtype_option("actor.model.dtype"),
    "fsdp_config.mixed_precision.param_dtype": dtype_option("actor.model.dtype"),
    "fsdp_config.*": no_option(SHARDED),
    "megatron.*": no_option(SHARDED),
    "checkpoint.*": no_option("a checkpoint always holds everything that an exact resume needs"),
    "rollout_n": no_option("set by rollout.n"),
    "strategy": no_option(SHARDED),
    "load_weight": no_option(SHARDED),
    "use_torch_compile": no_option(
        "compile=always, auto or never; auto compiles nothing in this mode"
    ),
    "profiler.*": no_option(PROFILE),
    **no_options(
        "calculate_sum_pi_squared sum_pi_squared_checkpointing entropy_checkpointing "
        "use_fused_kernels "
        "entropy_from_logits_with_chunking freeze_vision_tower router_replay "
        "ulysses_sequence_parallel_size "
        "use_prefix_grouper use_remove_padding",
        "how their code runs the loss (kernels, padding, chunks, sequence parallelism, router"
        " replay)",
    ),
}
_ROLLOUT: dict[str, Rule] = {
    "name": engine,
    "n": option("algorithm.group_size"),
    "temperature": option("rollout.temperature"),
    "top_k": sampling_option("top_k", -1, 0),
    "top_p": sampling_option("top_p", 1, 1.0),
    "repetition_penalty": sampling_option("repetition_penalty", 1, 1.0),
    "do_sample": only_values(
        True, same="training samples, as here", other="training always samples here"
    ),
    "prompt_length": no_option("set by data.max_prompt_length"),
    "response_length": no_option("set by data.max_response_length"),
    "ignore_eos": only_values(
        False,
        same="a response ends at an end token, as here",
        other="a response ends at an end token",
    ),
    "calculate_log_probs": no_option("the rollout's log-probabilities are always kept here"),
    "val_kwargs.n": option("evaluation.n"),
    "val_kwargs.do_sample": lambda value, source: {"evaluation.deterministic": not value},
    "val_kwargs.temperature": _sampled_validation,
    "val_kwargs.top_k": lambda value, source: {"evaluation.top_k": max(0, value or 0)},
    "val_kwargs.top_p": option("evaluation.top_p"),
    "multi_turn.*": no_option(TOOLS),
    "agent.*": no_option(TOOLS),
    "log_prob_*": no_option(MEMORY),
    **no_options(
        "checkpoint_engine cudagraph_capture_sizes data_parallel_size disable_log_stats dtype "
        "load_format trace mode "
        "enable_chunked_prefill enable_prefix_caching enable_rollout_routing_replay enforce_eager "
        "engine_kwargs "
        "expert_parallel_size free_cache_engine gpu_memory_utilization layer_name_map "
        "layered_summon mtp "
        "logprobs_mode max_model_len max_num_batched_tokens max_num_seqs multi_stage_wake_up "
        "over_sample_rate "
        "pipeline_model_parallel_size tensor_model_parallel_size profiler prometheus quantization "
        "quantization_config_file scheduling_policy skip_dump_dir skip_rollout skip_tokenizer_init",
        ENGINE,
    ),
}
_CRITIC: dict[str, Rule] = {
    "enable": option_if_set("critic.use_critic_model", "null: set by the estimator, as here"),
    "ppo_mini_batch_size": option("critic.global_batch_size"),
    "ppo_epochs": option("critic.update_epoch"),
    "cliprange_value": option("algorithm.value_clip"),
    "grad_clip": option("critic.max_grad_norm"),
    "loss_agg_mode": option("critic.loss_agg_func"),
    **prefixed("optim.", _optim("critic", "critic.grad_clip")),
    **prefixed("model.", _model("critic")),
    "ppo_micro_batch_size*": no_option(MEMORY),
    "forward_*": no_option(MEMORY),
    "ppo_max_token_len_per_gpu": no_option(MEMORY),
    "use_dynamic_bsz": no_option(MEMORY),
    "shuffle": no_option(SHUFFLE),
    "data_loader_seed": no_option(SEEDS),
    "checkpoint.*": no_option("a checkpoint always holds everything that an exact resume needs"),
    "profiler.*": no_option(PROFILE),
    "rollout_n": no_option("set by rollout.n"),
    **no_options(
        "load_weight megatron nccl_timeout strategy ulysses_sequence_parallel_size", SHARDED
    ),
}
TABLE: dict[str, Rule] = {
    **prefixed("actor_rollout_ref.actor.", _ACTOR),
    **prefixed("actor_rollout_ref.rollout.", _ROLLOUT),
    **prefixed(
        "actor_rollout_ref.model.",
        {
            "tokenizer_path": option_if_set("actor.tokenizer", "null: the model's, as here"),
            **_model("actor"),
        },
    ),
    "actor_rollout_ref.ref.*": no_option(
        "the reference is the actor at the start of training; it needs no options"
    ),
    "actor_rollout_ref.hybrid_engine": only_values(
        True,
        same="placement sets which roles share a process",
        other="placement sets which roles share a process",
    ),
    "actor_rollout_ref.nccl_timeout": no_option("cluster.step_timeout_s limits every wait"),
    **prefixed("critic.", _CRITIC),
    "data.train_files": list_option("data.train"),
    "data.val_files": list_option("data.eval"),
    "data.tokenizer": option_if_set("actor.tokenizer", "null: the model's, as here"),
    "data.prompt_key": option("data.prompt_key"),
    "data.max_prompt_length": option("algorithm.prompt_length"),
    "data.max_response_length": option("algorithm.response_length"),
    "data.train_batch_size": option("algorithm.rollout_batch_size"),
    "data.shuffle": option("data.shuffle"),
    "data.seed": no_option(SEEDS),
    "data.*_max_samples": only_values(
        -1,
        None,
        same="all, as here",
        other="shorten the file; evaluation.episodes counts held-out prompts",
    ),
    "data.filter_overlong_prompts*": no_option("longer prompts are always dropped, and counted"),
    "data.truncation": no_option("longer prompts are dropped, and counted"),
    "data.val_batch_size": no_option("changes no number here"),
    "data.validation_shuffle": no_option("held-out prompts keep the file's order"),
    "data.trust_remote_code": no_option(REMOTE),
    "data.custom_cls.*": no_option(THEIR_CODE),
    "data.sampler.*": no_option(THEIR_CODE),
    "data.datagen.*": no_option(THEIR_CODE),
    "data.image_*": no_option(TOOLS),
    "data.video_key": no_option(TOOLS),
    "data.tool_config_path": no_option(TOOLS),
    "data.return_*": no_option("what their data loader returns"),
    "data.reward_fn_key": only_values(
        "data_source",
        same="data_source, as here",
        other="rows name their grader in data_source here",
    ),
    "data.apply_chat_template_kwargs*": no_option(
        "only data.chat_template and data.system exist here"
    ),
    "data.dataloader_num_workers": no_option(LOADER),
    "data.use_shm": no_option(LOADER),
    "algorithm.gamma": option("algorithm.gamma"),
    "algorithm.gemma": option("algorithm.gamma"),  # the spelling of their documentation
    "algorithm.lam": option("algorithm.gae_lambda"),
    "algorithm.adv_estimator": _estimator,
    "algorithm.norm_adv_by_std_in_grpo": only_values(
        True,
        same="GRPO divides by the deviation, as here",
        other="GRPO always divides by the group's deviation here",
    ),
    "algorithm.use_kl_in_reward": option("algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": option("algorithm.kl_penalty", values=KL),
    **{
        f"algorithm.kl_ctrl.{name}": option(f"algorithm.kl_ctrl.{name}")
        for name in ("type", "kl_coef", "horizon", "target_kl")
    },
    "algorithm.rollout_correction": no_option("null: algorithm.off_policy_correction is off, too"),
    "algorithm.rollout_correction.rollout_is": option_if_set(
        "algorithm.off_policy_correction", "null: off, as here"
    ),
    "algorithm.rollout_correction.rollout_is_threshold": option("algorithm.off_policy_cap"),
    "algorithm.rollout_correction.*": no_option(
        "rejection of samples is not supported; algorithm.off_policy_correction weights samples"
    ),
    "algorithm.use_pf_ppo": only_values(
        False, same="off, as here", other="samples are not weighted by their score"
    ),
    "algorithm.pf_ppo.*": no_option("samples are not weighted by their score"),
    "reward_model.enable": no_option("reward.model.path, if set, has this effect"),
    "reward_model.model.path": read_if("reward_model.enable", option("reward.model.path")),
    "reward_model.num_workers": option("reward.workers"),
    "reward_model.*": no_option(
        "reward.model.path, a directory of a sequence-classification model, is the only option"
    ),
    "reward_manager*": no_option("reward.grader grades by data source, in separate processes"),
    "custom_reward_function.path": option_if_set(
        "reward.path", "null: graders by data source, as here"
    ),
    "custom_reward_function.name": read_if("custom_reward_function.path", option("reward.name")),
    "custom_reward_function.*": no_option(
        "a grader has four arguments; write your own function that wraps theirs"
    ),
    "trainer.total_epochs": lambda value, source: (
        "trainer.total_training_steps takes precedence there, too" if _updates(source) else EPOCHS
    ),
    "trainer.total_training_steps": option_if_set("updates", "null: set by total_epochs"),
    "trainer.experiment_name": option("name"),
    "trainer.nnodes": _devices,
    "trainer.n_gpus_per_node": _devices,
    "trainer.save_freq": interval_option("save_every"),
    "trainer.test_freq": interval_option("eval_every"),
    "trainer.critic_warmup": option("algorithm.critic_warmup"),
    "trainer.max_actor_ckpt_to_keep": option_if_set(
        "keep_last", "null: all; here the last keep_last=3 checkpoints and the best"
    ),
    "trainer.max_critic_ckpt_to_keep": no_option(
        "one checkpoint holds actor and critic: keep_last"
    ),
    "trainer.device": only_values(
        "cuda",
        same="device=auto selects it",
        other="the devices here are CPUs and CUDA GPUs: device=",
    ),
    "trainer.val_before_train": no_option(
        "there is always an evaluation before and after training"
    ),
    "trainer.val_only": no_option("embodied-ppo evaluate checkpoint=.. does that"),
    "trainer.resume_*": no_option(RESUME),
    "trainer.ray_wait_register_center_timeout": option("cluster.start_timeout_s"),
    "trainer.*_dir": no_option(LOGGING),
    "trainer.project_name": no_option(LOGGING),
    "trainer.log*": no_option(LOGGING),
    **prefixed(
        "trainer.",
        no_options(
            "balance_batch del_local_ckpt_after_load esi_redundant_time use_legacy_worker_impl "
            "remove_previous_ckpt_in_save",
            "how their trainer runs",
        ),
    ),
    "global_profiler.*": no_option(PROFILE),
    "transfer_queue.*": no_option("tensors are transferred between processes automatically"),
    "ray_kwargs.*": no_option(
        "cluster.address joins a Ray cluster; without it one is started for the run"
    ),
    "ray_init.*": no_option(
        "cluster.address joins a Ray cluster; without it one is started for the run"
    ),
    "hydra*": no_option(HYDRA),
    "defaults": no_option(HYDRA),
    "*_target_": no_option(THEIR_CODE),
}

VERL = Framework(
    "verl",
    TABLE,
    reasoning,
    {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "actor_rollout_ref.actor.optim.weight_decay": 0.01,
        "critic.optim.weight_decay": 0.01,
    },
    differences=_differences,
)
