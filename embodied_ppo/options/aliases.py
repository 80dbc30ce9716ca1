"""Names of options in other trainers: accepted as aliases, or refused with a hint.

Aliases are the names in the documented PPO options of RLinf, verl and ROLL. ``import-config``
translates whole files.
"""

from __future__ import annotations

# section -> alias -> canonical names. An alias is accepted wherever its canonical name is.
ALIASES: dict[str, dict[str, tuple[str, ...]]] = {
    "": {
        "rollout.n": ("algorithm.group_size",),
        "component_placement": ("cluster.component_placement",),
    },
    "algorithm": {
        "adv_estimator": ("adv_type",),
        "lam": ("gae_lambda",),
        "lambd": ("gae_lambda",),
        "gae_lambda_policy": ("gae_lambda",),
        "whiten_advantages": ("normalize_advantages",),
        "num_return_sequences_in_group": ("group_size",),
        "rollout.n": ("group_size",),
        "clip_ratio": ("clip_ratio_low", "clip_ratio_high"),
        "pg_clip": ("clip_ratio_low", "clip_ratio_high"),
        "cliprange": ("clip_ratio_low", "clip_ratio_high"),
        "entropy_coeff": ("entropy_bonus",),
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
        "positive_example_nll_weight": ("positive_nll_weight",),
        "ppo_epochs": ("update_epoch",),
        "num_ppo_epochs": ("update_epoch",),
        "ppo_mini_batch_size": ("global_batch_size",),
        "ppo_micro_batch_size": ("micro_batch_size",),
        "log_prob_micro_batch_size": ("logprob_forward_micro_batch_size",),
        "train_batch_size": ("rollout_batch_size",),
    },
    "model": {"class": ("network",)},
    "critic": {
        "ppo_epochs": ("update_epoch",),
        "num_ppo_epochs": ("update_epoch",),
        "ppo_mini_batch_size": ("global_batch_size",),
    },
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
    "algorithm.lr_schedule": {"constant_with_warmup": "constant"},
    "model.distribution": {"normal": "gaussian", "tanh_normal": "squashed_gaussian"},  # Brax
}
# Options of other trainers that have no meaning here: path -> reason and hint.
REFUSED: dict[str, str] = dict.fromkeys(
    (f"rollout.{name}" for name in ("top_k", "top_p", "min_p", "repetition_penalty")),
    "training on filtered samples would learn from another distribution than the one sampled; for"
    " evaluation, embodied-ppo evaluate has top_k and top_p",
)
SIMILAR: dict[str, str] = {
    "total_timesteps": "env_steps",
    "max_iterations": "updates",
    "save_interval": "save_every",
    "clip_coef": "algorithm.clip_ratio",
    "clip_param": "algorithm.clip_ratio",
    "entropy_coef": "algorithm.entropy_bonus",
    "ent_coef": "algorithm.entropy_bonus",
    "update_epochs": "algorithm.update_epoch",
    "num_learning_epochs": "algorithm.update_epoch",
    "minibatch_size": "algorithm.global_batch_size",
    "learning_rate": "algorithm.lr",
    "num_steps": "algorithm.horizon",
    "num_steps_per_env": "algorithm.horizon",
}
"""Names of CleanRL, rsl_rl and TRL, in any section -> the option that messages name."""
