"""verl's options of PPO (ppo_trainer.yaml, FSDP and Megatron, as of January 2026) -> ours."""

from __future__ import annotations

from typing import Any

from embodied_ppo.interop.rules import (
    ENGINE,
    EPOCHS,
    FOREIGN,
    FRESH,
    HYDRA,
    KL,
    LANGUAGE_LORA,
    LOADER,
    LOGGING,
    MEMORY,
    PROFILE,
    REMOTE,
    RESUME,
    SEEDS,
    SHARDED,
    TOOLS,
    WHOLE_LOSS,
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
    reasoning,
    sampled,
    several,
    under,
    warmup_share,
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
        return "clip_ratio_low and clip_ratio_high win there, too"
    sides = [side for side, other in zip(("low", "high"), taken, strict=True) if other is None]
    return {f"algorithm.clip_ratio_{side}": value for side in sides}


def _estimator(value: Any, source: Source) -> Answer:
    name = str(value).removesuffix("_vectorized")
    answer = {"algorithm.adv_type": name, "algorithm.normalize_advantages": name not in ("grpo", "rloo")}
    return answer | ({} if name == "gae" else {"critic.use_critic_model": False})


def _aggregation(value: Any, source: Source) -> Answer:
    """The critic's is the actor's unless the file gives it one of its own."""
    both = value != "token-mean" and source.get("critic.loss_agg_mode") is None
    both = both and source.get("algorithm.adv_estimator", "gae") == "gae"
    return {"algorithm.loss_agg_func": value} | ({"critic.loss_agg_func": value} if both else {})


def _differences(source: Source) -> dict[str, str]:
    """What no option of ours says."""
    path = "actor_rollout_ref.actor.loss_agg_mode"
    if source.get(path) != "seq-mean-token-sum-norm":
        return {}
    return {
        path: "theirs sums over the sequences of a micro-batch where ours takes the mean of all: their loss is "
        "ppo_micro_batch_size_per_gpu times ours, and meets grad_clip earlier"
    }


def _micro(value: Any, source: Source) -> Answer:
    """Deprecated: of all devices together."""
    if value is None:
        return "null: theirs leaves it out"
    if source.get("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu") is not None:
        return "ppo_micro_batch_size_per_gpu wins there, too"
    return {"algorithm.micro_batch_size": max(1, value // _gpus(source))}


def _devices(value: Any, source: Source) -> Answer:
    if _gpus(source) == 1:
        return "one device is one process: placement=local, the default"
    return {
        "placement": "fused",
        "cluster.num_nodes": source.get("trainer.nnodes", 1),
        "cluster.devices_per_node": source.get("trainer.n_gpus_per_node", 1),
    }


def _sampled_validation(value: Any, source: Source) -> Answer:
    return "greedy: do_sample=false" if value == 0 else {"evaluation.temperature": value}


def _optim(ours_of: str, grad_clip: str) -> dict[str, Rule]:
    betas: Rule = lambda value, source: (  # noqa: E731
        {"algorithm.adam_beta1": value[0], "algorithm.adam_beta2": value[1]}
        if ours_of == "algorithm" and isinstance(value, list) and len(value) == 2
        else "one pair for actor and critic here: algorithm.adam_beta1, adam_beta2"
    )
    clip: Rule = lambda value, source: (  # noqa: E731
        f"{grad_clip} wins there, too" if source.get(grad_clip) is not None else {f"{ours_of}.max_grad_norm": value}
    )
    schedule = ours(f"{ours_of}.lr_schedule")
    return {
        "lr": ours(f"{ours_of}.lr"),
        "lr_warmup_steps": warmup_steps(ours_of),
        "lr_warmup_steps_ratio": _warmup_ratio(ours_of, grad_clip.replace("grad_clip", "optim.lr_warmup_steps")),
        "lr_scheduler_type": schedule,
        "lr_decay_style": schedule,
        "warmup_style": given(f"{ours_of}.lr_schedule", "null: lr_scheduler_type says it"),
        "min_lr_ratio": lambda value, source: {f"{ours_of}.lr_end": value or 0.0},
        "num_cycles": only(0.5, same="half a wave, as lr_schedule=cosine here", other="cosine is half a wave here"),
        "weight_decay": ours(f"{ours_of}.weight_decay"),
        "betas": betas,
        "clip_grad": clip,
        "optimizer": only("AdamW", "adam", same="AdamW, as here", other="AdamW is the only optimiser here"),
        "total_training_steps": none("their program's own; updates says it"),
        **several(
            "optimizer_impl override_optimizer_config lr_warmup_init lr_decay_steps lr_wsd_decay_style "
            "lr_wsd_decay_steps min_lr weight_decay_incr_style use_checkpoint_opt_param_scheduler",
            "the learning rate warms up from 0, is constant, linear or cosine; AdamW is as torch has it",
        ),
    }


def _warmup_ratio(ours_of: str, steps: str) -> Rule:
    rule = warmup_share(ours_of, _updates)
    return lambda value, source: (
        "lr_warmup_steps wins there, too" if source.get(steps, -1) >= 0 else rule(value, source)
    )


def _model(section: str) -> dict[str, Rule]:
    return {
        "path": ours(f"{section}.model.path"),
        "enable_gradient_checkpointing": ours(f"{section}.model.gradient_checkpointing"),
        "fsdp_config.dtype": dtype(f"{section}.model.dtype"),
        "trust_remote_code": none(REMOTE),
        "lora_rank": LANGUAGE_LORA,
        "lora.rank": LANGUAGE_LORA,
        "lora*": none("adapters of language models are not there"),
        "target_modules": none("adapters of language models are not there"),
        "exclude_modules": none("adapters of language models are not there"),
        "external_lib*": none(FOREIGN),
        "custom_chat_template": none("the tokenizer's template: data.chat_template"),
        "fsdp_config.*": none(SHARDED),
        **several(
            "enable_activation_offload fused_kernel_options hf_config_path mtp override_config tiled_mlp "
            "tokenizer_path use_fused_kernels use_liger use_remove_padding use_shm",
            "how their code runs the model: kernels, padding, attention; ours has one forward pass",
        ),
    }


_ACTOR: dict[str, Rule] = {
    "ppo_mini_batch_size": ours("algorithm.global_batch_size"),
    "ppo_micro_batch_size": _micro,
    "ppo_micro_batch_size_per_gpu": given("algorithm.micro_batch_size", "null: theirs leaves it out"),
    "use_dynamic_bsz": none("algorithm.micro_batch_tokens, where given, is that"),
    "ppo_max_token_len_per_gpu": needs("actor_rollout_ref.actor.use_dynamic_bsz", ours("algorithm.micro_batch_tokens")),
    "clip_ratio": _clip,
    "clip_ratio_low": given("algorithm.clip_ratio_low", "null: clip_ratio"),
    "clip_ratio_high": given("algorithm.clip_ratio_high", "null: clip_ratio"),
    "clip_ratio_c": ours("algorithm.clip_ratio_c"),
    "loss_agg_mode": _aggregation,
    "loss_scale_factor": given("algorithm.loss_scale_factor", "null: response_length, as here"),
    "entropy_coeff": ours("algorithm.entropy_bonus"),
    "calculate_entropy": none("the entropy is always told here: policy/entropy"),
    "use_kl_loss": ours("algorithm.use_kl_loss"),
    "kl_loss_coef": ours("algorithm.kl_loss_coef"),
    "kl_loss_type": ours("algorithm.kl_loss_type", words=KL),
    "ppo_epochs": ours("algorithm.update_epoch"),
    "grad_clip": ours("algorithm.max_grad_norm"),
    "shuffle": none(FRESH),
    "data_loader_seed": none(SEEDS),
    "policy_loss.loss_mode": only("vanilla", same="PPO's clipped surrogate, as here", other=WHOLE_LOSS),
    "policy_loss.*": none(WHOLE_LOSS),
    "tau_*": none(WHOLE_LOSS),
    "rollout_correction.rollout_is": given("algorithm.off_policy_correction", "null: off, as here"),
    "rollout_correction.rollout_is_threshold": ours("algorithm.off_policy_cap"),
    "rollout_correction.*": none("rejected samples are not there; algorithm.off_policy_correction weighs them"),
    **under("optim.", _optim("algorithm", "actor_rollout_ref.actor.grad_clip")),
    "fsdp_config.dtype": dtype("actor.model.dtype"),
    "fsdp_config.mixed_precision.param_dtype": dtype("actor.model.dtype"),
    "fsdp_config.*": none(SHARDED),
    "megatron.*": none(SHARDED),
    "checkpoint.*": none("a checkpoint holds everything that an exact resume needs"),
    "rollout_n": none("rollout.n says it"),
    "strategy": none(SHARDED),
    "load_weight": none(SHARDED),
    "use_torch_compile": none("compile=always, auto or never; auto compiles nothing in this mode"),
    "profiler.*": none(PROFILE),
    **several("calculate_sum_pi_squared sum_pi_squared_checkpointing entropy_checkpointing use_fused_kernels "
              "entropy_from_logits_with_chunking freeze_vision_tower router_replay ulysses_sequence_parallel_size "
              "use_prefix_grouper use_remove_padding", "how their code runs the loss: kernels, padding, chunks, "
              "parallel sequences, replay of routers"),
}  # fmt: skip
_ROLLOUT: dict[str, Rule] = {
    "name": engine,
    "n": ours("algorithm.group_size"),
    "temperature": ours("rollout.temperature"),
    "top_k": sampled("top_k", -1, 0),
    "top_p": sampled("top_p", 1, 1.0),
    "repetition_penalty": sampled("repetition_penalty", 1, 1.0),
    "do_sample": only(True, same="training samples, as here", other="training always samples here"),
    "prompt_length": none("data.max_prompt_length says it"),
    "response_length": none("data.max_response_length says it"),
    "ignore_eos": only(False, same="a response ends at an end token, as here", other="a response ends at an end token"),
    "calculate_log_probs": none("the rollout's log-probabilities are always kept here"),
    "val_kwargs.n": ours("evaluation.n"),
    "val_kwargs.do_sample": lambda value, source: {"evaluation.deterministic": not value},
    "val_kwargs.temperature": _sampled_validation,
    "val_kwargs.top_k": lambda value, source: {"evaluation.top_k": max(0, value or 0)},
    "val_kwargs.top_p": ours("evaluation.top_p"),
    "multi_turn.*": none(TOOLS),
    "agent.*": none(TOOLS),
    "log_prob_*": none(MEMORY),
    **several(
        "checkpoint_engine cudagraph_capture_sizes data_parallel_size disable_log_stats dtype load_format trace mode "
        "enable_chunked_prefill enable_prefix_caching enable_rollout_routing_replay enforce_eager engine_kwargs "
        "expert_parallel_size free_cache_engine gpu_memory_utilization layer_name_map layered_summon mtp "
        "logprobs_mode max_model_len max_num_batched_tokens max_num_seqs multi_stage_wake_up over_sample_rate "
        "pipeline_model_parallel_size tensor_model_parallel_size profiler prometheus quantization "
        "quantization_config_file scheduling_policy skip_dump_dir skip_rollout skip_tokenizer_init",
        ENGINE,
    ),
}
_CRITIC: dict[str, Rule] = {
    "enable": given("critic.use_critic_model", "null: by the estimator, as here"),
    "ppo_mini_batch_size": ours("critic.global_batch_size"),
    "ppo_epochs": ours("critic.update_epoch"),
    "cliprange_value": ours("algorithm.value_clip"),
    "grad_clip": ours("critic.max_grad_norm"),
    "loss_agg_mode": ours("critic.loss_agg_func"),
    **under("optim.", _optim("critic", "critic.grad_clip")),
    **under("model.", _model("critic")),
    "ppo_micro_batch_size*": none(MEMORY),
    "forward_*": none(MEMORY),
    "ppo_max_token_len_per_gpu": none(MEMORY),
    "use_dynamic_bsz": none(MEMORY),
    "shuffle": none(FRESH),
    "data_loader_seed": none(SEEDS),
    "checkpoint.*": none("a checkpoint holds everything that an exact resume needs"),
    "profiler.*": none(PROFILE),
    "rollout_n": none("rollout.n says it"),
    **several("load_weight megatron nccl_timeout strategy ulysses_sequence_parallel_size", SHARDED),
}
TABLE: dict[str, Rule] = {
    **under("actor_rollout_ref.actor.", _ACTOR),
    **under("actor_rollout_ref.rollout.", _ROLLOUT),
    **under("actor_rollout_ref.model.", {"tokenizer_path": given("actor.tokenizer", "null: the model's, as here"),
                                         **_model("actor")}),
    "actor_rollout_ref.ref.*": none("the reference is the actor as training began; it needs no options"),
    "actor_rollout_ref.hybrid_engine": only(True, same="placement says who shares a process", other="placement says "
                                            "who shares a process"),
    "actor_rollout_ref.nccl_timeout": none("cluster.step_timeout_s is the longest wait"),
    **under("critic.", _CRITIC),
    "data.train_files": listed("data.train"),
    "data.val_files": listed("data.eval"),
    "data.tokenizer": given("actor.tokenizer", "null: the model's, as here"),
    "data.prompt_key": ours("data.prompt_key"),
    "data.max_prompt_length": ours("algorithm.prompt_length"),
    "data.max_response_length": ours("algorithm.response_length"),
    "data.train_batch_size": ours("algorithm.rollout_batch_size"),
    "data.shuffle": ours("data.shuffle"),
    "data.seed": none(SEEDS),
    "data.*_max_samples": only(-1, None, same="all, as here", other="cut the file; evaluation.episodes counts held-out "
                               "prompts"),
    "data.filter_overlong_prompts*": none("longer prompts are always left out, and counted"),
    "data.truncation": none("longer prompts are left out, and counted"),
    "data.val_batch_size": none("changes no number here"),
    "data.validation_shuffle": none("held-out prompts keep the file's order"),
    "data.trust_remote_code": none(REMOTE),
    "data.custom_cls.*": none(FOREIGN),
    "data.sampler.*": none(FOREIGN),
    "data.datagen.*": none(FOREIGN),
    "data.image_*": none(TOOLS),
    "data.video_key": none(TOOLS),
    "data.tool_config_path": none(TOOLS),
    "data.return_*": none("what their loader hands on"),
    "data.reward_fn_key": only("data_source", same="data_source, as here", other="rows name their grader in "
                               "data_source here"),
    "data.apply_chat_template_kwargs*": none("data.chat_template and data.system are what there is"),
    "data.dataloader_num_workers": none(LOADER),
    "data.use_shm": none(LOADER),
    "algorithm.gamma": ours("algorithm.gamma"),
    "algorithm.gemma": ours("algorithm.gamma"),  # so the page on PPO spells it
    "algorithm.lam": ours("algorithm.gae_lambda"),
    "algorithm.adv_estimator": _estimator,
    "algorithm.norm_adv_by_std_in_grpo": only(True, same="GRPO divides by the deviation, as here", other="GRPO always "
                                              "divides by the group's deviation here"),
    "algorithm.use_kl_in_reward": ours("algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": ours("algorithm.kl_penalty", words=KL),
    **{f"algorithm.kl_ctrl.{name}": ours(f"algorithm.kl_ctrl.{name}") for name in ("type", "kl_coef", "horizon",
                                                                                   "target_kl")},
    "algorithm.rollout_correction": none("null: algorithm.off_policy_correction is off, too"),
    "algorithm.rollout_correction.rollout_is": given("algorithm.off_policy_correction", "null: off, as here"),
    "algorithm.rollout_correction.rollout_is_threshold": ours("algorithm.off_policy_cap"),
    "algorithm.rollout_correction.*": none("rejected samples are not there; algorithm.off_policy_correction weighs"),
    "algorithm.use_pf_ppo": only(False, same="off, as here", other="samples are not weighed by their score"),
    "algorithm.pf_ppo.*": none("samples are not weighed by their score"),
    "reward_model.enable": none("reward.model.path, where given, is that"),
    "reward_model.model.path": needs("reward_model.enable", ours("reward.model.path")),
    "reward_model.num_workers": ours("reward.workers"),
    "reward_model.*": none("reward.model.path is a directory of a sequence-classification model; it needs no more"),
    "reward_manager*": none("reward.grader grades by data source, in processes of its own"),
    "custom_reward_function.path": given("reward.path", "null: graders by data source, as here"),
    "custom_reward_function.name": needs("custom_reward_function.path", ours("reward.name")),
    "custom_reward_function.*": none("a grader has four arguments; write a function of your own around it"),
    "trainer.total_epochs": lambda value, source: (
        "trainer.total_training_steps wins there, too" if _updates(source) else EPOCHS
    ),
    "trainer.total_training_steps": given("updates", "null: total_epochs says it"),
    "trainer.experiment_name": ours("name"),
    "trainer.nnodes": _devices,
    "trainer.n_gpus_per_node": _devices,
    "trainer.save_freq": every("save_every"),
    "trainer.test_freq": every("eval_every"),
    "trainer.critic_warmup": ours("algorithm.critic_warmup"),
    "trainer.max_actor_ckpt_to_keep": given("keep_last", "null: all; here the last keep_last=3 and the best"),
    "trainer.max_critic_ckpt_to_keep": none("one checkpoint holds actor and critic: keep_last"),
    "trainer.device": only("cuda", same="device=auto finds it", other="devices here are CPUs and CUDA's: device="),
    "trainer.val_before_train": none("there is always an evaluation before training, and one after it"),
    "trainer.val_only": none("embodied-ppo evaluate checkpoint=.. does that"),
    "trainer.resume_*": none(RESUME),
    "trainer.ray_wait_register_center_timeout": ours("cluster.start_timeout_s"),
    "trainer.*_dir": none(LOGGING),
    "trainer.project_name": none(LOGGING),
    "trainer.log*": none(LOGGING),
    **under("trainer.", several("balance_batch del_local_ckpt_after_load esi_redundant_time use_legacy_worker_impl "
                                "remove_previous_ckpt_in_save", "how their trainer runs")),
    "global_profiler.*": none(PROFILE),
    "transfer_queue.*": none("tensors travel between processes by themselves"),
    "ray_kwargs.*": none("cluster.address joins a Ray cluster; else one is started for the run"),
    "ray_init.*": none("cluster.address joins a Ray cluster; else one is started for the run"),
    "hydra*": none(HYDRA),
    "defaults": none(HYDRA),
    "*_target_": none(FOREIGN),
}  # fmt: skip

VERL = Peer(
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
