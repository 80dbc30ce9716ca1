"""PPO options of verl (ppo_trainer.yaml, FSDP and Megatron, January 2026), mapped to ours."""

from __future__ import annotations

from typing import Any

from embodied_ppo.interop import reasons
from embodied_ppo.interop.rules import (
    ADAMW,
    KL,
    LANGUAGE_LORA,
    TRAINING_SAMPLES,
    Answer,
    Entry,
    Framework,
    Rule,
    Source,
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
    reasoning,
    same_names,
    sampling_option,
    warmup_fraction,
    warmup_steps,
)

ACTOR = "actor_rollout_ref.actor"


def _gpus(source: Source) -> int:
    return int(source.get("trainer.nnodes", 1)) * int(source.get("trainer.n_gpus_per_node", 1))


def _updates(source: Source) -> int | None:
    total = source.get("trainer.total_training_steps")
    return total if isinstance(total, int) and total > 0 else None


def _estimator(value: Any, source: Source) -> Answer:
    """Map the advantage estimator; without the division by the deviation GRPO is another one."""
    name = verl_name = str(value).removesuffix("_vectorized")
    if name == "grpo" and source.get("algorithm.norm_adv_by_std_in_grpo") is False:
        # In verl, too, loss_agg_mode then decides whether the loss is divided by the length.
        divides = source.get(f"{ACTOR}.loss_agg_mode") == "seq-mean-token-mean"
        name = "reinforce_plus_plus_baseline" if divides else "dr_grpo"
    answer = {
        "algorithm.adv_type": name,
        "algorithm.normalize_advantages": verl_name not in ("grpo", "rloo"),
    }
    return answer | ({} if name == "gae" else {"critic.use_critic_model": False})


def _aggregation(value: Any, source: Source) -> Answer:
    """Map the aggregation of the loss; the critic has the actor's unless the file sets another."""
    if source.get(f"{ACTOR}.policy_loss.loss_mode") == "gspo":
        return "not read by verl, either: policy_loss.loss_mode=gspo uses seq-mean-token-mean"
    both = value != "token-mean" and source.get("critic.loss_agg_mode") is None
    both = both and source.get("algorithm.adv_estimator", "gae") == "gae"
    return {"algorithm.loss_agg_func": value} | ({"critic.loss_agg_func": value} if both else {})


def _differences(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    path = f"{ACTOR}.loss_agg_mode"
    if source.get(path) != "seq-mean-token-sum-norm":
        return {}
    return {
        path: (
            "their loss is the sum over the sequences of a micro-batch, ours the mean over all: "
            "their loss is ppo_micro_batch_size_per_gpu times ours, so grad_clip takes effect"
            " earlier"
        )
    }


def _filter(value: Any, source: Source) -> Answer:
    """Map the filter of groups. verl's compares a metric, ours compares success."""
    if not value:
        return "off, as here"
    metric = source.get("algorithm.filter_groups.metric", "acc")
    if metric != "acc":
        return (
            f"their filter compares {metric}, ours success; write algorithm.group_filter=success if"
            " the grader returns acc"
        )
    return {"algorithm.group_filter": "success"}


def _filter_rounds(value: Any, source: Source) -> Answer:
    """Map the maximum number of rounds of the filter."""
    if isinstance(_filter(True, source), str):
        return "read with filter_groups.metric=acc only"
    if not value or value < 1:
        return "no limit there; here algorithm.group_filter_rounds=8"
    return {"algorithm.group_filter_rounds": value}


def _loss_mode(value: Any, source: Source) -> Answer:
    """Map the kind of the policy loss."""
    if value == "vanilla":
        return "PPO's clipped surrogate, as here"
    if value == "gspo":  # verl then ignores the file's loss_agg_mode and uses this one
        return {
            "algorithm.ratio_level": "sequence",
            "algorithm.loss_agg_func": "seq-mean-token-mean",
        }
    if value == "cispo":
        return {"algorithm.policy_loss": "cispo"}
    return reasons.OTHER_LOSS


def _micro(value: Any, source: Source) -> Answer:
    """Map the deprecated micro-batch size, which counts all devices together."""
    if value is None:
        return "null: not set there"
    if source.get(f"{ACTOR}.ppo_micro_batch_size_per_gpu") is not None:
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


def _betas(section: str) -> Rule:
    """Map Adam's pair of decay rates, which actor and critic share here."""
    return lambda value, source: (
        {"algorithm.adam_beta1": value[0], "algorithm.adam_beta2": value[1]}
        if section == "algorithm" and isinstance(value, list) and len(value) == 2
        else "actor and critic share one pair here: algorithm.adam_beta1, adam_beta2"
    )


def _clip_grad(section: str, grad_clip: str) -> Rule:
    return lambda value, source: (
        f"{grad_clip} takes precedence there, too"
        if source.get(grad_clip) is not None
        else {f"{section}.max_grad_norm": value}
    )


def _warmup_ratio(section: str, steps: str) -> Rule:
    rule = warmup_fraction(section, _updates)
    return lambda value, source: (
        "lr_warmup_steps takes precedence there, too"
        if source.get(steps, -1) >= 0
        else rule(value, source)
    )


def _optim(section: str, role: str) -> dict[str, Entry]:
    """Return the entries of the optimiser of ``role``, for our ``section``."""
    return {
        **same_names(f"{section}.", "lr weight_decay"),
        "lr_warmup_steps": warmup_steps(section),
        "lr_warmup_steps_ratio": _warmup_ratio(section, f"{role}.optim.lr_warmup_steps"),
        "lr_scheduler_type": f"{section}.lr_schedule",
        "lr_decay_style": f"{section}.lr_schedule",
        "warmup_style": option_if_set(f"{section}.lr_schedule", "null: set by lr_scheduler_type"),
        "min_lr_ratio": lambda value, source: {f"{section}.lr_end": value or 0.0},
        "num_cycles": only_values(
            0.5, same="half a wave, as lr_schedule=cosine here", other="cosine is half a wave here"
        ),
        "betas": _betas(section),
        "clip_grad": _clip_grad(section, f"{role}.grad_clip"),
        "optimizer": ADAMW,
        "total_training_steps": no_option("set by their program; here updates sets the length"),
        **no_sections(
            "optimizer_impl override_optimizer_config lr_warmup_init lr_decay_steps "
            "lr_wsd_decay_style lr_wsd_decay_steps min_lr weight_decay_incr_style "
            "use_checkpoint_opt_param_scheduler",
            "the learning rate warms up from 0 and is constant, linear or cosine; AdamW is torch's",
        ),
    }


def _model(section: str) -> dict[str, Entry]:
    """Return the entries of the model of the actor or the critic, our ``section``."""
    return {
        "path": f"{section}.model.path",
        "enable_gradient_checkpointing": f"{section}.model.gradient_checkpointing",
        "fsdp_config.dtype": dtype_option(f"{section}.model.dtype"),
        "lora_rank": LANGUAGE_LORA,
        "lora.rank": LANGUAGE_LORA,
        "tokenizer_path": (
            option_if_set("actor.tokenizer", reasons.MODEL_TOKENIZER)
            if section == "actor"
            else no_option(
                "the critic reads the actor's tokens; actor.tokenizer sets the tokenizer"
            )
        ),
        **no_options(
            {
                reasons.REMOTE: "trust_remote_code",
                reasons.NO_ADAPTERS: "lora* target_modules exclude_modules",
                reasons.THEIR_CODE: "external_lib*",
                "the tokenizer's template: data.chat_template": "custom_chat_template",
                reasons.SHARDED: "fsdp_config.*",
            }
        ),
        **no_sections(
            "enable_activation_offload fused_kernel_options hf_config_path mtp override_config "
            "tiled_mlp use_fused_kernels use_liger use_remove_padding use_shm",
            "how their code runs the model (kernels, padding, attention); there is one forward pass"
            " here",
        ),
    }


_CHECKPOINT = "a checkpoint always holds everything that an exact resume needs"
_SAMPLE_WEIGHTS = "samples are not weighted by their score"
_RAY = "cluster.address joins a Ray cluster; without it one is started for the run"
_CORRECTION: dict[str, Entry] = {
    "rollout_is": option_if_set("algorithm.off_policy_correction", "null: off, as here"),
    "rollout_is_threshold": "algorithm.off_policy_cap",
    "*": no_option(
        "rejection of samples is not supported; algorithm.off_policy_correction weights samples"
    ),
}
_WORKER = no_options(
    {
        reasons.SHUFFLE: "shuffle",
        reasons.SEEDS: "data_loader_seed",
        _CHECKPOINT: "checkpoint.*",
        reasons.PROFILE: "profiler.*",
        "set by rollout.n": "rollout_n",
    }
)

_ACTOR: dict[str, Entry] = {
    "ppo_mini_batch_size": "algorithm.global_batch_size",
    "ppo_micro_batch_size": _micro,
    "ppo_micro_batch_size_per_gpu": option_if_set(
        "algorithm.micro_batch_size", "null: not set there"
    ),
    "ppo_max_token_len_per_gpu": read_if(
        f"{ACTOR}.use_dynamic_bsz", "algorithm.micro_batch_tokens"
    ),
    "clip_ratio": clip_ratio(ACTOR),
    "clip_ratio_low": option_if_set("algorithm.clip_ratio_low", "null: clip_ratio"),
    "clip_ratio_high": option_if_set("algorithm.clip_ratio_high", "null: clip_ratio"),
    "clip_ratio_c": lambda value, source: (
        "not read there either: policy_loss.loss_mode = cispo"
        if source.get(f"{ACTOR}.policy_loss.loss_mode") == "cispo"
        else {"algorithm.clip_ratio_c": value}
    ),
    **same_names("algorithm.", "use_kl_loss kl_loss_coef"),
    "kl_loss_type": option("algorithm.kl_loss_type", values=KL),
    "loss_agg_mode": _aggregation,
    "loss_scale_factor": option_if_set(
        "algorithm.loss_scale_factor", "null: response_length, as here"
    ),
    "entropy_coeff": "algorithm.entropy_bonus",
    "ppo_epochs": "algorithm.update_epoch",
    "grad_clip": "algorithm.max_grad_norm",
    "policy_loss.loss_mode": _loss_mode,
    **prefixed("rollout_correction.", _CORRECTION),
    **prefixed("optim.", _optim("algorithm", ACTOR)),
    "fsdp_config.dtype": dtype_option("actor.model.dtype"),
    "fsdp_config.mixed_precision.param_dtype": dtype_option("actor.model.dtype"),
    **_WORKER,
    **no_options(
        {
            reasons.MICRO_BATCH_TOKENS: "use_dynamic_bsz",
            "the entropy is always logged here: policy/entropy": "calculate_entropy",
            reasons.OTHER_LOSS: "policy_loss.* tau_*",
            reasons.SHARDED: "fsdp_config.* megatron.* strategy load_weight",
            "compile=always, auto or never; auto compiles nothing in this mode": (
                "use_torch_compile"
            ),
        }
    ),
    **no_sections(
        "calculate_sum_pi_squared sum_pi_squared_checkpointing entropy_checkpointing "
        "use_fused_kernels entropy_from_logits_with_chunking freeze_vision_tower router_replay "
        "ulysses_sequence_parallel_size use_prefix_grouper use_remove_padding",
        "how their code runs the loss (kernels, padding, chunks, sequence parallelism, router"
        " replay)",
    ),
}
_ROLLOUT: dict[str, Entry] = {
    "name": engine,
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "n": "algorithm.group_size",
    "temperature": "rollout.temperature",
    "top_k": sampling_option("top_k", -1, 0),
    "top_p": sampling_option("top_p", 1, 1.0),
    "repetition_penalty": sampling_option("repetition_penalty", 1, 1.0),
    "do_sample": TRAINING_SAMPLES,
    "ignore_eos": only_values(
        False,
        same="a response ends at an end token, as here",
        other="a response ends at an end token",
    ),
    "val_kwargs.n": "evaluation.n",
    "val_kwargs.do_sample": lambda value, source: {"evaluation.deterministic": not value},
    "val_kwargs.temperature": _sampled_validation,
    "val_kwargs.top_k": lambda value, source: {"evaluation.top_k": max(0, value or 0)},
    "val_kwargs.top_p": "evaluation.top_p",
    **no_options(
        {
            "set by data.max_prompt_length": "prompt_length",
            "set by data.max_response_length": "response_length",
            "the rollout's log-probabilities are always kept here": "calculate_log_probs",
            reasons.TOOLS: "multi_turn.* agent.*",
            reasons.MEMORY: "log_prob_*",
        }
    ),
    **no_sections(
        "checkpoint_engine cudagraph_capture_sizes data_parallel_size disable_log_stats dtype "
        "load_format trace mode enable_chunked_prefill enable_prefix_caching "
        "enable_rollout_routing_replay enforce_eager engine_kwargs expert_parallel_size "
        "free_cache_engine layer_name_map layered_summon mtp "
        "logprobs_mode max_model_len max_num_batched_tokens max_num_seqs multi_stage_wake_up "
        "over_sample_rate pipeline_model_parallel_size tensor_model_parallel_size profiler "
        "prometheus quantization quantization_config_file scheduling_policy skip_dump_dir "
        "skip_rollout skip_tokenizer_init",
        reasons.ENGINE,
    ),
}
_CRITIC: dict[str, Entry] = {
    "enable": option_if_set("critic.use_critic_model", "null: set by the estimator, as here"),
    "ppo_mini_batch_size": "critic.global_batch_size",
    "ppo_epochs": "critic.update_epoch",
    "cliprange_value": "algorithm.value_clip",
    "grad_clip": "critic.max_grad_norm",
    "loss_agg_mode": "critic.loss_agg_func",
    **prefixed("optim.", _optim("critic", "critic")),
    **prefixed("model.", _model("critic")),
    **_WORKER,
    **no_options(
        {
            reasons.MEMORY: (
                "ppo_micro_batch_size* forward_* ppo_max_token_len_per_gpu use_dynamic_bsz"
            )
        }
    ),
    **no_sections(
        "load_weight megatron nccl_timeout strategy ulysses_sequence_parallel_size",
        reasons.SHARDED,
    ),
}
_DATA: dict[str, Entry] = {
    "train_files": list_option("data.train"),
    "val_files": list_option("data.eval"),
    "tokenizer": option_if_set("actor.tokenizer", reasons.MODEL_TOKENIZER),
    **same_names("data.", "prompt_key shuffle"),
    "max_prompt_length": "algorithm.prompt_length",
    "max_response_length": "algorithm.response_length",
    "train_batch_size": "algorithm.rollout_batch_size",
    "*_max_samples": only_values(
        -1,
        None,
        same="all, as here",
        other="shorten the file; evaluation.episodes counts held-out prompts",
    ),
    "reward_fn_key": only_values(
        "data_source",
        same="data_source, as here",
        other="rows name their grader in data_source here",
    ),
    **no_options(
        {
            reasons.SEEDS: "seed",
            reasons.LONG_PROMPTS: "filter_overlong_prompts*",
            "longer prompts are dropped, and counted": "truncation",
            "changes no number here": "val_batch_size",
            "held-out prompts keep the file's order": "validation_shuffle",
            "a filtered round draws as many prompts as the batch lacks": "gen_batch_size",
            reasons.REMOTE: "trust_remote_code",
            reasons.THEIR_CODE: "custom_cls.* sampler.* datagen.*",
            reasons.TOOLS: "image_* video_key tool_config_path",
            "what their data loader returns": "return_*",
            reasons.CHAT_TEMPLATE: "apply_chat_template_kwargs*",
            reasons.LOADER: "dataloader_num_workers use_shm",
        }
    ),
}
_ALGORITHM: dict[str, Entry] = {
    **same_names(
        "algorithm.",
        "gamma use_kl_in_reward kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl",
    ),
    "gemma": "algorithm.gamma",  # the spelling of their documentation
    "lam": "algorithm.gae_lambda",
    "adv_estimator": _estimator,
    "norm_adv_by_std_in_grpo": only_values(
        True,
        same="GRPO divides by the deviation, as here",
        other="false: algorithm.adv_type is written as an estimator without the division",
    ),
    "kl_penalty": option("algorithm.kl_penalty", values=KL),
    "rollout_correction": no_option("null: algorithm.off_policy_correction is off, too"),
    **prefixed("rollout_correction.", _CORRECTION),
    "filter_groups.enable": _filter,
    "filter_groups.metric": no_option("groups are filtered by success: acc"),
    "filter_groups.max_num_gen_batches": read_if("algorithm.filter_groups.enable", _filter_rounds),
    "use_pf_ppo": only_off(_SAMPLE_WEIGHTS),
    "pf_ppo.*": no_option(_SAMPLE_WEIGHTS),
}
_TRAINER: dict[str, Entry] = {
    "total_epochs": lambda value, source: (
        "trainer.total_training_steps takes precedence there, too"
        if _updates(source)
        else reasons.EPOCHS
    ),
    "total_training_steps": option_if_set("updates", "null: set by total_epochs"),
    "experiment_name": "name",
    "nnodes": _devices,
    "n_gpus_per_node": _devices,
    "save_freq": interval_option("save_every"),
    "test_freq": interval_option("eval_every"),
    "critic_warmup": "algorithm.critic_warmup",
    "max_actor_ckpt_to_keep": option_if_set(
        "keep_last", "null: all; here the last keep_last=3 checkpoints and the best"
    ),
    "device": only_values(
        "cuda",
        same="device=auto selects it",
        other="the devices here are CPUs and CUDA GPUs: device=",
    ),
    "ray_wait_register_center_timeout": "cluster.start_timeout_s",
    **no_options(
        {
            "one checkpoint holds actor and critic: keep_last": "max_critic_ckpt_to_keep",
            "there is always an evaluation before and after training": "val_before_train",
            "embodied-ppo evaluate checkpoint=.. does that": "val_only",
            reasons.RESUME: "resume_*",
            reasons.LOGGING: "*_dir project_name log*",
        }
    ),
    **no_sections(
        "balance_batch del_local_ckpt_after_load esi_redundant_time use_legacy_worker_impl "
        "remove_previous_ckpt_in_save",
        "how their trainer runs",
    ),
}
TABLE: dict[str, Entry] = {
    **prefixed(f"{ACTOR}.", _ACTOR),
    **prefixed("actor_rollout_ref.rollout.", _ROLLOUT),
    **prefixed("actor_rollout_ref.model.", _model("actor")),
    **prefixed("critic.", _CRITIC),
    **prefixed("data.", _DATA),
    **prefixed("algorithm.", _ALGORITHM),
    "reward_model.model.path": read_if("reward_model.enable", "reward.model.path"),
    "reward_model.num_workers": "reward.workers",
    "custom_reward_function.path": option_if_set(
        "reward.path", "null: graders by data source, as here"
    ),
    "custom_reward_function.name": read_if("custom_reward_function.path", "reward.name"),
    **prefixed("trainer.", _TRAINER),
    **no_options(
        {
            reasons.NO_REFERENCE_OPTIONS: "actor_rollout_ref.ref.*",
            "placement sets which roles share a process": "actor_rollout_ref.hybrid_engine",
            "cluster.step_timeout_s limits every wait": "actor_rollout_ref.nccl_timeout",
            "reward.model.path, if set, has this effect": "reward_model.enable",
            "reward.model.path, a directory of a sequence-classification model, is the only"
            " option": "reward_model.*",
            "reward.grader grades by data source, in separate processes": "reward_manager*",
            "a grader has four arguments; write your own function that wraps theirs": (
                "custom_reward_function.*"
            ),
            reasons.PROFILE: "global_profiler.*",
            "tensors are transferred between processes automatically": "transfer_queue.*",
            _RAY: "ray_kwargs.* ray_init.*",
            reasons.HYDRA: "hydra* defaults",
            reasons.THEIR_CODE: "*_target_",
        }
    ),
}

VERL = Framework(
    "verl",
    TABLE,
    reasoning,
    {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.optim.weight_decay": 0.01,
        "critic.optim.weight_decay": 0.01,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    },
    differences=_differences,
)
