"""Names of options in other trainers: accepted as aliases, or refused with a cure."""

from __future__ import annotations

# section -> alias -> canonical names. An alias is accepted wherever its canonical name is.
ALIASES: dict[str, dict[str, tuple[str, ...]]] = {
    "": {
        "rollout.n": ("algorithm.group_size",),
        "component_placement": ("cluster.component_placement",),
        "num_nodes": ("cluster.num_nodes",),
        "rollout.pipeline_stage_num": ("cluster.stages",),
        "custom_reward_function.path": ("reward.path",),
        "custom_reward_function.name": ("reward.name",),
        "total_timesteps": ("env_steps",),
        "max_iterations": ("updates",),
        "save_interval": ("save_every",),
        "exp_name": ("name",),
        "experiment_name": ("name",),
        "wandb_project": ("tracker_project",),
        "wandb_project_name": ("tracker_project",),
    },
    "env": {"num_workers": ("num_threads",), "env_id": ("id",)},
    "model": {
        "hidden_sizes": ("hidden",),
        "hidden_dims": ("hidden",),
        "class": ("network",),
        "class_options": ("network_options",),
    },
    "algorithm": {
        "adv_estimator": ("adv_type",),
        "lam": ("gae_lambda",),
        "lambd": ("gae_lambda",),
        "whiten_advantages": ("normalize_advantages",),
        "num_return_sequences_in_group": ("group_size",),
        "rollout.n": ("group_size",),
        "clip_higher": ("clip_ratio_high",),
        "epsilon_low": ("clip_ratio_low",),
        "epsilon_high": ("clip_ratio_high",),
        "pg_clip_low": ("clip_ratio_low",),
        "pg_clip_high": ("clip_ratio_high",),
        "clip_ratio": ("clip_ratio_low", "clip_ratio_high"),
        "pg_clip": ("clip_ratio_low", "clip_ratio_high"),
        "cliprange": ("clip_ratio_low", "clip_ratio_high"),
        "clip_coef": ("clip_ratio_low", "clip_ratio_high"),
        "clip_param": ("clip_ratio_low", "clip_ratio_high"),
        "entropy_coeff": ("entropy_bonus",),
        "entropy_coef": ("entropy_bonus",),
        "ent_coef": ("entropy_bonus",),
        "entropy_loss_coef": ("entropy_bonus",),
        "loss_agg_mode": ("loss_agg_func",),
        "target_kl": ("target_kl_stop",),
        "add_token_level_kl": ("use_kl_in_reward",),
        "init_kl_coef": ("kl_ctrl.kl_coef",),
        "kl_horizon": ("kl_ctrl.horizon",),
        "rollout_is": ("off_policy_correction",),
        "importance_sampling_fix": ("off_policy_correction",),
        "value_cliprange": ("value_clip",),
        "cliprange_value": ("value_clip",),
        "vf_coef": ("value_loss_coef",),
        "c1": ("value_loss_coef",),
        "critic_warmup_steps": ("critic_warmup",),
        "ppo_epochs": ("update_epoch",),
        "num_ppo_epochs": ("update_epoch",),
        "update_epochs": ("update_epoch",),
        "num_learning_epochs": ("update_epoch",),
        "ppo_mini_batch_size": ("global_batch_size",),
        "minibatch_size": ("global_batch_size",),
        "ppo_micro_batch_size": ("micro_batch_size",),
        "log_prob_micro_batch_size": ("logprob_forward_micro_batch_size",),
        "train_batch_size": ("rollout_batch_size",),
        "max_prompt_length": ("prompt_length",),
        "max_response_length": ("response_length",),
        "learning_rate": ("lr",),
        "num_steps": ("horizon",),
        "num_steps_per_env": ("horizon",),
    },
    "critic": {
        "ppo_epochs": ("update_epoch",),
        "num_ppo_epochs": ("update_epoch",),
        "ppo_mini_batch_size": ("global_batch_size",),
        "learning_rate": ("lr",),
    },
    "data": {"train_files": ("train",), "val_files": ("eval",)},
    "algorithm.kl_ctrl": {"init_kl_coef": ("kl_coef",), "kl_horizon": ("horizon",)},
}
VALUE_ALIASES: dict[str, dict[str, str]] = {
    "algorithm.kl_loss_type": {
        "kl": "k1",
        "mse": "k2",
        "low_var_kl": "k3",
        "kl+": "k1+",
        "mse+": "k2+",
        "low_var_kl+": "k3+",
    },
    "algorithm.kl_penalty": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
}
# Options of other trainers that have no meaning here: path -> reason and cure.
REFUSED: dict[str, str] = {
    f"rollout.{name}": (
        "training on filtered samples would learn from another distribution than the one sampled;"
        f" for evaluation there is evaluation.{name}"
    )
    for name in ("top_k", "top_p", "min_p", "repetition_penalty")
}
REMOVED: dict[str, object] = {
    "algorithm.type": "ppo",
    "algorithm.kept_rollouts": 64,
    "algorithm.rollouts_per_update": 8,
    "algorithm.max_kl": 0.1,
    "algorithm.critics": 1,
}
"""Options of earlier versions -> the value that a stored run may have.

With this value the option had no effect, or the effect that is now the only one.
"""
_MINIBATCHES = (
    "it counts minibatches, and here their size is given: write algorithm.global_batch_size ="
    " algorithm.horizon x env.num_envs / that number"
)
_VALUE_CLIP = (
    "the clip range of the value is a separate number: write algorithm.value_clip=0.2, or null for"
    " none"
)
_OBSERVATIONS = (
    "write model.normalize_obs=true or false; what is normalised is clipped at model.obs_clip"
)
_HIDDEN = (
    "write model.hidden=[256,256] model.shared_backbone=false, and model.critic_hidden=[512] where"
    " the widths of the value function differ"
)
# Names of CleanRL and rsl_rl, in any section, that do not correspond to one option here: name ->
# what to write.
CURES: dict[str, str] = {
    "num_minibatches": _MINIBATCHES,
    "num_mini_batches": _MINIBATCHES,
    "clip_vloss": _VALUE_CLIP,
    "use_clipped_value_loss": _VALUE_CLIP,
    "anneal_lr": "true is algorithm.lr_schedule=linear here, false algorithm.lr_schedule=constant",
    "schedule": (
        "fixed is algorithm.lr_schedule=constant here; adaptive is algorithm.lr_schedule=adaptive,"
        " which changes the rate once an update, not with every minibatch"
    ),
    "norm_adv": (
        "advantages are standardised once over the whole rollout, not in each minibatch: "
        "algorithm.normalize_advantages=true, or false"
    ),
    "normalize_advantage_per_mini_batch": (
        "advantages are standardised once over the whole rollout (their false), "
        "never in each minibatch; leave it out"
    ),
    "empirical_normalization": _OBSERVATIONS,
    "obs_normalization": _OBSERVATIONS,
    "actor_hidden_dims": _HIDDEN,
    "critic_hidden_dims": _HIDDEN,
    "init_noise_std": "write its natural logarithm: model.init_log_std=0 for 1",
    "cuda": "true is device=cuda here, false device=cpu",
    "track": "true is trackers=[wandb] here, false trackers=[]",
    "logger": "write trackers=[wandb] or trackers=[mlflow]; TensorBoard files are always written",
    "report_to": "write trackers=[wandb] or trackers=[mlflow]; TensorBoard files always exist",
    "wandb_entity": "set the environment variable WANDB_ENTITY",
    "capture_video": (
        "videos are recorded during evaluations: write evaluation.video_episodes=2, or 0 for none"
    ),
}
