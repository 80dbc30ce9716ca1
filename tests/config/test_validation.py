"""Comparison of options: combinations that are refused, and options that are not read."""

from __future__ import annotations

from typing import Any

import pytest
from run_helpers import nested

from embodied_ppo.config import loader, readers, validation
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import ConfigError, show
from tests.config.test_loader import CLONING, FLOW, LANGUAGE, PUBLISHED, TOKENS, refused

GROUPS = {"env.restart_each_rollout": True, "algorithm.group_size": 4}


@pytest.mark.parametrize(
    ("flat", "line"),
    [
        (
            {"algorithm.global_batch_size": 300},
            (
                "algorithm.horizon x env.num_envs = 32 x 64 = 2048 is not a multiple of"
                " algorithm.global_batch_size = 300; nearest: 256, 512; or with this batch, nearest"
                " env.num_envs: 75"
            ),
        ),
        (
            {"algorithm.global_batch_size": 4096},
            (
                "32 x 64 = 2048 is not a multiple of algorithm.global_batch_size = 4096; nearest:"
                " 2048; or with this batch, nearest env.num_envs: 128"
            ),
        ),
        (
            {"algorithm.minibatch_unit": "column", "algorithm.global_batch_size": 100},
            (
                "algorithm.global_batch_size = 100 is not a multiple of algorithm.horizon = 32"
                " (algorithm.minibatch_unit = column); nearest: 64, 128"
            ),
        ),
        (
            {"algorithm.minibatch_unit": "column", "algorithm.global_batch_size": 96},
            (
                "algorithm.horizon x env.num_envs = 32 x 64 = 2048 is not a multiple of"
                " algorithm.global_batch_size = 96; nearest: 64, 128; or with this batch, nearest"
                " env.num_envs: 63, 66"
            ),
        ),
        (
            {"algorithm.micro_batch_size": 512},
            (
                "algorithm.micro_batch_size = 512 must be <= algorithm.global_batch_size = 256;"
                " write algorithm.micro_batch_size=256"
            ),
        ),
        (
            {"algorithm.minibatch_unit": "column", "algorithm.micro_batch_size": 40},
            (
                "algorithm.micro_batch_size = 40 is not a multiple of algorithm.horizon = 32"
                " (algorithm.minibatch_unit = column); nearest: 32, 64"
            ),
        ),
        (
            {"pipeline": True, "placement": "fused"},
            (
                "pipeline = true and placement = fused: .. write placement=local, or"
                " pipeline=false and placement=disaggregated cluster.max_lag=1"
            ),
        ),
        (
            {"pipeline": True},
            "off_policy_correction = null: .. write algorithm.off_policy_correction=token",
        ),
        (
            {
                "pipeline": True,
                "algorithm.off_policy_correction": "token",
                "env.cameras": ["front"],
            },
            "pipeline = true and env.cameras = [front]: .. write pipeline=false",
        ),
        (
            {"learner_threads": 3},
            (
                "algorithm.global_batch_size = 256 is not a multiple of learner_threads = 3;"
                " and no minibatch of these 2048 samples is; learner_threads may be 2, 4"
            ),
        ),
        (
            {"learner_threads": 3, "env.num_envs": 48},
            (
                "algorithm.global_batch_size = 256 is not a multiple of learner_threads = 3;"
                " nearest: 192, 384"
            ),
        ),
        (
            {"learner_threads": 2, "compile": "never"},
            "learner_threads = 2 and compile = never: .. write learner_threads=1 or compile=auto",
        ),
        (
            {"learner_threads": 2, "placement": "fused"},
            "learner_threads = 2 and placement = fused: only a run in one process .. leave",
        ),
        (
            {"cluster.stages": 3},
            "env.num_envs = 64 is not a multiple of cluster.stages = 3; nearest: 63, 66",
        ),
        (
            {"algorithm.group_size": 5},
            "env.num_envs = 64 is not a multiple of algorithm.group_size = 5; nearest: 4, 8",
        ),
        (
            {"algorithm.adv_type": "grpo"},
            "adv_type = grpo .. algorithm.group_size = 1; .. algorithm.group_size=4",
        ),
        (
            {"algorithm.adv_type": "rloo"},
            "adv_type = rloo .. algorithm.group_size = 1; .. algorithm.group_size=4",
        ),
        (
            {"algorithm.adv_type": "reinforce_plus_plus_baseline"},
            "group_size = 1; .. algorithm.group_size=4",
        ),
        ({"algorithm.reward_norm": "group"}, "reward_norm = group .. algorithm.group_size = 1; "),
        (
            {"algorithm.adv_type": "grpo", "algorithm.group_size": 4},
            "env.restart_each_rollout = false; write env.restart_each_rollout=true",
        ),
        (
            {"algorithm.loss_agg_func": "seq-mean-token-sum"},
            (
                "loss_agg_func = seq-mean-token-sum .. minibatch_unit = step .."
                " algorithm.minibatch_unit=column"
            ),
        ),
        (
            {"algorithm.use_kl_loss": True, "algorithm.kl_loss_type": "k1"},
            "kl_loss_type = k1 .. algorithm.kl_loss_type=k2, k3 or k1+",
        ),
        ({"algorithm.loss_type": "actor"}, "loss_type = actor .. algorithm.loss_type=actor_critic"),
        (
            {"algorithm.clip_ratio_low": 1.0},
            "clip_ratio_low = 1 must be < 1 .. algorithm.clip_ratio_low=0.2",
        ),
        (
            {
                "algorithm.reward_norm": "batch",
                "algorithm.reward_shift": True,
                "algorithm.reward_scale": True,
            },
            "reward_shift = true .. reward_scale = true .. leave both false",
        ),
        (
            {"algorithm.reward_norm": "running", "algorithm.reward_shift": True},
            "reward_shift = true .. reward_norm = running .. algorithm.reward_norm=batch",
        ),
        (
            {"algorithm.logprob_type": "chunk_level", "algorithm.reward_type": "action_level"},
            (
                "reward_type = action_level is finer than algorithm.logprob_type = chunk_level;  .."
                " =chunk_level"
            ),
        ),
        (
            {"algorithm.entropy_type": "chunk_level", "algorithm.reward_type": "action_level"},
            "reward_type = action_level is finer than algorithm.entropy_type = chunk_level",
        ),
        ({"model.min_log_std": 3.0}, "model.min_log_std = 3 must be < model.max_log_std = 2"),
        ({"model.init_log_std": 3.0}, "model.init_log_std = 3 .. model.max_log_std = 2"),
        ({"model.init_log_std": -6.0}, "model.init_log_std = -6 must be >= model.min_log_std = -5"),
        (
            {"model.actor_obs": ["a"]},
            "model.actor_obs = [a]: model.critic_obs is null .. write model.critic_obs=[a,NAME]",
        ),
        (
            {"model.actor_obs": ["a"], "model.critic_obs": []},
            "model.critic_obs = []: names no observation",
        ),
        (
            {"model.actor_obs": ["a", "b/c"], "model.critic_obs": ["b", "d"]},
            "model.critic_obs lacks a, but .. write model.shared_backbone=false",
        ),
        (
            {
                "model.actor_obs": ["a"],
                "model.critic_obs": ["a"],
                "env.cameras": ["front"],
            },
            "env.cameras = [front]: no network reads front; add it to model.actor_obs",
        ),
        (
            {
                "model.actor_obs": ["a"],
                "model.critic_obs": ["a", "b"],
                "env.realism.obs_keys": ["b"],
            },
            "env.realism.obs_keys: model.actor_obs = [a] does not contain b; only what the actor",
        ),
        (
            {**TOKENS, "model.shared_backbone": False},
            "model.shared_backbone = false: model.policy=token has one trunk",
        ),
        (
            {**TOKENS, "model.width": 100, "model.heads": 4},
            "width = 100: .. 2 x model.heads = 8; write 96",
        ),
        (
            {**TOKENS, "model.width": 4, "model.heads": 4},
            "width = 4: .. 2 x model.heads = 8; write 8",
        ),
        ({"env_steps": None}, "updates = null and env_steps = null: .. updates=100"),
        (
            {"algorithm.ratio_level": "sequence"},
            "ratio_level = sequence .. algorithm.minibatch_unit=column (or",
        ),
        (
            {"algorithm.ratio_level": "sequence", "algorithm.minibatch_unit": "column"},
            "ratio_level = sequence .. write env.restart_each_rollout=true (or ratio_level=chunk)",
        ),
        (
            {
                "algorithm.ratio_level": "chunk",
                "algorithm.logprob_type": "chunk_level",
                "env.action_chunk": 2,
            },
            "ratio_level = chunk .. write algorithm.logprob_type=action_level",
        ),
        (
            {"algorithm.ratio_level": "chunk"},
            "ratio_level = chunk .. action_chunk = 1 .. write algorithm.logprob_type=token_level",
        ),
        (
            {**LANGUAGE, "algorithm.ratio_level": "chunk"},
            "ratio_level = chunk .. write algorithm.ratio_level=sequence (a response) or token",
        ),
        (
            {"algorithm.adv_type": "dr_grpo", **GROUPS},
            "adv_type = dr_grpo .. true does; write algorithm.normalize_advantages=false",
        ),
        (
            {
                "algorithm.adv_type": "dr_grpo",
                "algorithm.normalize_advantages": False,
                "algorithm.loss_agg_func": "seq-mean-token-mean",
                "algorithm.minibatch_unit": "column",
                **GROUPS,
            },
            "adv_type = dr_grpo .. write algorithm.loss_agg_func=seq-mean-token-sum-norm",
        ),
        (
            {"algorithm.group_filter": "success", **GROUPS},
            "algorithm.group_filter = success .. algorithm.adv_type = gae compares no groups .. "
            "write algorithm.adv_type=grpo, or algorithm.group_filter=null",
        ),
        (
            {"algorithm.group_filter": "success", "algorithm.adv_type": "grpo", **GROUPS},
            "updates = null: with algorithm.group_filter = success .. write updates=100",
        ),
        (
            {
                "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.type": "adaptive",
                "algorithm.kl_ctrl.horizon": 10,
            },
            (
                "kl_ctrl.horizon = 10 must be > 0.2 x env.num_envs = 12.8, .."
                " algorithm.kl_ctrl.horizon=640"
            ),
        ),
    ],
)
def test_conflicting_options_are_refused(flat: dict[str, Any], line: str) -> None:
    message = refused(Config, flat)
    for part in line.split(" .. "):
        assert part in message


@pytest.mark.parametrize(
    "flat",
    [
        {
            "algorithm.minibatch_unit": "column",
            "algorithm.global_batch_size": 64,
            "algorithm.micro_batch_size": 32,
        },
        {"algorithm.micro_batch_size": 100},
        {"algorithm.adv_type": "grpo", **GROUPS},
        {"algorithm.policy_loss": "cispo", "algorithm.clip_ratio_low": 1.0},
        {
            "algorithm.group_filter": "success",
            "algorithm.adv_type": "rloo",
            "updates": 5,
            **GROUPS,
        },
        {"algorithm.reward_norm": "group", **GROUPS},
        {"algorithm.loss_agg_func": "seq-mean-token-mean", "algorithm.minibatch_unit": "column"},
        {"algorithm.use_kl_loss": True, "algorithm.kl_loss_type": "k1+"},
        {"algorithm.entropy_target": -3.0},
        {"algorithm.reward_norm": "batch", "algorithm.reward_shift": True},
        {"algorithm.logprob_type": "token_level", "algorithm.reward_type": "action_level"},
        {"env_steps": None, "updates": 1},
        {"updates": 3, "env_steps": 5000},  # updates wins
        {"device": "cuda:3"},
    ],
)
def test_compatible_options_are_accepted(flat: dict[str, Any]) -> None:
    loader.load(Config, nested(flat))


FILES = {
    **LANGUAGE,
    "data.task": None,
    "data.train": ["a"],
    "data.eval": ["b"],
    "actor.tokenizer": "x",
}
NO_VALUE = {**LANGUAGE, "algorithm.adv_type": "grpo", "algorithm.group_size": 2}
UNREAD = {
    # option -> (a value, options under which it is read; None: it is read by default)
    "tracker_project": ("robots", {"trackers": ["wandb"]}),
    "tracker_run_name": ("one", {"trackers": ["mlflow"]}),
    "algorithm.desired_kl": (0.02, {"algorithm.lr_schedule": "adaptive"}),
    "algorithm.lr_end": (0.1, {"algorithm.lr_schedule": "cosine"}),
    "algorithm.reward_shift": (True, {"algorithm.reward_norm": "batch"}),
    "algorithm.reward_scale": (True, {"algorithm.reward_norm": "batch"}),
    "algorithm.reward_clip_order": (
        "after_norm",
        {"algorithm.reward_clip": 1.0, "algorithm.reward_norm": "batch"},
    ),
    "algorithm.whiten_subtract_mean": (True, {"algorithm.whiten_rewards": True}),
    "algorithm.whiten_after_kl": (
        True,
        {"algorithm.whiten_rewards": True, "algorithm.use_kl_in_reward": True},
    ),
    "algorithm.loss_scale_factor": (
        100.0,
        {**LANGUAGE, "algorithm.loss_agg_func": "seq-mean-token-sum-norm"},
    ),
    "evaluation.randomize": (True, {"env.randomize": True}),
    "algorithm.kl_loss_coef": (0.1, {"algorithm.use_kl_loss": True}),
    "algorithm.kl_loss_type": ("k2", {"algorithm.use_kl_loss": True}),
    "algorithm.kl_penalty": ("k2", {"algorithm.use_kl_in_reward": True}),
    "algorithm.kl_ctrl.type": ("adaptive", {"algorithm.use_kl_in_reward": True}),
    "algorithm.kl_ctrl.kl_coef": (0.1, {"algorithm.use_kl_in_reward": True}),
    "algorithm.kl_ctrl.horizon": (
        500,
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
    ),
    "algorithm.kl_ctrl.target_kl": (
        0.2,
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.type": "adaptive"},
    ),
    "algorithm.off_policy_cap": (3.0, {"algorithm.off_policy_correction": "token"}),
    "algorithm.clip_ratio_c": (3.0, None),
    "algorithm.group_filter_rounds": (
        3,
        {
            "algorithm.group_filter": "success",
            "algorithm.adv_type": "grpo",
            "updates": 5,
            **GROUPS,
        },
    ),
    "algorithm.gae_lambda": (0.9, None),  # read by default
    "initial_policy": ("runs/x", None),
    "distillation.loss": ("nll", {"teacher": "runs/x"}),
    "distillation.teacher_share": (0.5, {"teacher": "runs/x"}),
    "distillation.teacher_share_updates": (5, {"teacher": "runs/x"}),
    "distillation.sample_actions": (True, {"teacher": "runs/x"}),
    "distillation.update_epoch": (2, {"teacher": "runs/x"}),
    "distillation.global_batch_size": (128, {"teacher": "runs/x"}),
    "distillation.lr": (0.1, {"teacher": "runs/x"}),
    "distillation.lr_schedule": ("cosine", {"teacher": "runs/x"}),
    "model.pooling": ("spatial_softmax", None),
    "model.hidden_gain": (2.0, None),
    "model.network_options": ({"width": 8}, {"model.network": "x.py:Net"}),
    "model.policy_gain": (2.0, None),
    "model.value_gain": (2.0, None),
    "model.obs_clip": (5.0, None),
    "model.obs_eps": (0.1, None),
    "model.obs_std_eps": (0.1, None),
    "model.critic_hidden": ([8], {"model.shared_backbone": False}),
    "model.std_function": ("softplus", {"model.state_dependent_std": True}),
    "model.state_dependent_std": (True, None),
    "model.history": (3, None),
    "model.recurrent": ("gru", {"algorithm.minibatch_unit": "column"}),
    "model.recurrent_size": (
        8,
        {"model.recurrent": "gru", "algorithm.minibatch_unit": "column"},
    ),
    "algorithm.bptt_length": (
        1,
        {"model.recurrent": "gru", "algorithm.minibatch_unit": "column"},
    ),
    "model.actor_obs": (["a"], {"model.critic_obs": ["a"]}),
    "model.critic_obs": (["a"], {"model.actor_obs": ["a"]}),
    "env.obs_keys": (["a"], None),
    "env.realism.push_interval_s": ([1.0, 2.0], {"env.realism.push_velocity": 1.0}),
    "model.init_log_std": (-1.0, None),
    "model.min_log_std": (-4.0, None),
    "model.max_log_std": (1.0, None),
    "allow_changed_task": (True, {"resume": "runs/first"}),
    "evaluation.video_steps": (10, {"evaluation.video_episodes": 1}),
    "evaluation.video_size": (64, {"evaluation.video_episodes": 1}),
    "evaluation.temperature": (0.5, {**LANGUAGE, "evaluation.deterministic": False}),
    "evaluation.top_k": (5, {**LANGUAGE, "evaluation.deterministic": False}),
    "evaluation.top_p": (0.5, {**LANGUAGE, "evaluation.deterministic": False}),
    "evaluation.min_p": (0.5, {**LANGUAGE, "evaluation.deterministic": False}),
    "critic.model.path": ("x", LANGUAGE),
    "critic.model.architecture": ({"model_type": "llama"}, LANGUAGE),
    "critic.model.dtype": ("bfloat16", LANGUAGE),
    "critic.model.gradient_checkpointing": (True, LANGUAGE),
    "critic.concurrent": (True, LANGUAGE),
    "critic.loss_agg_func": ("seq-mean-token-mean", LANGUAGE),
    "critic.update_epoch": (2, LANGUAGE),
    "critic.global_batch_size": (64, LANGUAGE),
    "critic.lr": (0.1, LANGUAGE),
    "critic.lr_schedule": ("cosine", LANGUAGE),
    "critic.lr_end": (0.1, {**LANGUAGE, "critic.lr_schedule": "cosine"}),
    "critic.lr_warmup": (3, LANGUAGE),
    "critic.max_grad_norm": (3.0, LANGUAGE),
    "critic.weight_decay": (0.1, LANGUAGE),
    "algorithm.critic_warmup": (3, LANGUAGE),
    "algorithm.value_clip": (0.3, LANGUAGE),
    "algorithm.huber_delta": (0.3, LANGUAGE),
    "rollout.overlong_penalty": (0.5, {**LANGUAGE, "rollout.overlong_buffer": 8}),
    "rollout.gpu_memory_utilization": (
        0.6,
        {
            **{k: v for k, v in FILES.items() if k != "actor.model.architecture"},
            "actor.model.path": "x",
            "rollout.engine": "vllm",
        },
    ),
    "algorithm.missing_eos_penalty": (0.5, LANGUAGE),
    "algorithm.prompt_length": (77, FILES),
    "reward.timeout_s": (3.0, LANGUAGE),
    "data.train": (["a.jsonl"], FILES),
    "data.eval": (["a.jsonl"], FILES),
    "data.prompt_key": ("q", FILES),
    "data.answer_key": ("a", FILES),
    "data.suffix": ("!", FILES),
    "data.system": ("Think.", FILES),
    "data.chat_template": ("never", FILES),
    "actor.tokenizer": ("x", FILES),
    "actor.model.architecture": ({"model_type": "llama"}, FILES),
    "warm_start.steps": (3, LANGUAGE),
    "warm_start.batch_size": (3, {**LANGUAGE, "warm_start.steps": 3}),
    "warm_start.lr": (0.1, {**LANGUAGE, "warm_start.steps": 3}),
    "warm_start.forget": (0.5, {**LANGUAGE, "warm_start.steps": 3}),
    "reward.path": ("g.py", LANGUAGE),
    "reward.name": ("score", {**LANGUAGE, "reward.path": "g.py"}),
    "reward.format_weight": (0.5, {**LANGUAGE, "reward.format": ".*"}),
    "reward.model.pairs": (100, LANGUAGE),
    "reward.model.steps": (10, {**LANGUAGE, "reward.model.pairs": 100}),
    "reward.model.batch_size": (10, {**LANGUAGE, "reward.model.pairs": 100}),
    "reward.model.lr": (0.1, {**LANGUAGE, "reward.model.pairs": 100}),
    "model.network": ("x.py:Net", None),
    "model.backbone": ("mlp", None),
    "model.hidden": ([8], None),
    "model.activation": ("relu", None),
    "model.layer_norm": (True, None),
    "model.distribution": ("gaussian", None),
    "model.width": (32, TOKENS),
    "model.depth": (3, TOKENS),
    "model.heads": (2, TOKENS),
    "model.bins": (8, TOKENS),
    "model.decode": ("autoregressive", TOKENS),
    "model.temperature": (0.5, TOKENS),
    "model.word_buckets": (64, TOKENS),
    "model.freeze_trunk": (True, TOKENS),
    "model.checkpoint": ("x", TOKENS),
    "model.detach_value": (True, TOKENS),
    "algorithm.chunk_reward": ("sum", {"env.action_chunk": 2}),
    "model.unnorm_key": ("x", PUBLISHED),
    "model.center_crop": (True, PUBLISHED),
    "model.delta_actions": ([0], {**FLOW, "model.checkpoint": "x"}),
    "model.omit_stop_token": (True, PUBLISHED),
    "model.lora_rank": (4, PUBLISHED),
    "model.lora_alpha": (4.0, {**PUBLISHED, "model.lora_rank": 4}),
    "model.dtype": ("bfloat16", PUBLISHED),
    "model.gradient_checkpointing": (True, PUBLISHED),
    "model.flow_steps": (3, FLOW),
    "model.flow_noise": ("learned", {**FLOW, "model.flow_chain": "sum"}),
    "model.flow_chain": ("sum", FLOW),
    "model.flow_eta": (0.3, FLOW),
    "algorithm.entropy_bonus": (0.1, TOKENS),
    "algorithm.entropy_target": (0.1, {**TOKENS, "algorithm.entropy_bonus": 0.1}),
    "cloning.steps": (3, TOKENS),
    "cloning.coef": (0.5, TOKENS),
    "cloning.dataset": ("x", CLONING),
    "cloning.episodes": (3, CLONING),
    "cloning.foresight_steps": (3, CLONING),
    "cloning.captions": (3, CLONING),
    "cloning.caption_coef": (0.5, {**CLONING, "cloning.captions": 3}),
    "cloning.batch_size": (3, CLONING),
    "cloning.lr": (0.1, CLONING),
}
NOT_READ = {
    "algorithm.clip_ratio_c": {"algorithm.policy_loss": "cispo"},
    "initial_policy": {"resume": "runs/x"},
    "model.pooling": {"model.backbone": "mlp"},
    "algorithm.entropy_bonus": {"model.policy": "flow"},
    "algorithm.entropy_target": {"model.policy": "flow", "model.flow_noise": "sde"},
    **dict.fromkeys(
        (
            f"model.{x}"
            for x in ("network", "backbone", "hidden", "activation", "layer_norm", "distribution")
        ),
        TOKENS,
    ),
    "model.network_options": {"model.network": None},
    "algorithm.gae_lambda": {"algorithm.adv_type": "reinforce_plus_plus"},
    "env.obs_keys": {"model.actor_obs": ["a"], "model.critic_obs": ["a"]},
    "model.history": {"model.policy": "token"},
    "model.recurrent": {"model.policy": "token"},
    "model.recurrent_size": {"model.recurrent": None},
    "algorithm.bptt_length": {"model.recurrent": None},
    "model.actor_obs": {"model.policy": "token"},
    "model.hidden_gain": {"model.orthogonal_init": False},
    "model.policy_gain": {"model.orthogonal_init": False},
    "model.value_gain": {"model.orthogonal_init": False},
    "model.obs_clip": {"model.normalize_obs": False},
    "model.obs_eps": {"model.normalize_obs": False},
    "model.obs_std_eps": {"model.normalize_obs": False},
    "model.critic_hidden": {"model.shared_backbone": True},
    "model.std_function": {"model.state_dependent_std": False},
    "model.state_dependent_std": {"model.distribution": "categorical"},
    "model.init_log_std": {"model.distribution": "categorical"},
    "model.min_log_std": {"model.distribution": "categorical"},
    "model.max_log_std": {"model.distribution": "categorical"},
    **dict.fromkeys(
        (f"evaluation.{x}" for x in ("temperature", "top_k", "top_p", "min_p")), LANGUAGE
    ),
    **dict.fromkeys(
        (f"critic.model.{x}" for x in ("path", "architecture", "dtype", "gradient_checkpointing")),
        NO_VALUE,
    ),
    **dict.fromkeys(
        (
            f"critic.{x}"
            for x in (
                "concurrent",
                "loss_agg_func",
                "update_epoch",
                "global_batch_size",
                "lr",
                "lr_schedule",
            )
        ),
        NO_VALUE,
    ),
    **dict.fromkeys(
        (f"critic.{x}" for x in ("lr_warmup", "max_grad_norm", "weight_decay")), NO_VALUE
    ),
    **dict.fromkeys(
        (f"algorithm.{x}" for x in ("critic_warmup", "value_clip", "huber_delta")), NO_VALUE
    ),
    "critic.lr_end": LANGUAGE,
    "algorithm.prompt_length": LANGUAGE,
    "reward.timeout_s": {**LANGUAGE, "reward.workers": 0},
    "rollout.overlong_penalty": LANGUAGE,
    "rollout.gpu_memory_utilization": LANGUAGE,
    "algorithm.missing_eos_penalty": {**LANGUAGE, "rollout.truncation": "drop"},
    **dict.fromkeys((f"data.{x}" for x in ("train", "eval", "prompt_key", "answer_key")), LANGUAGE),
    **dict.fromkeys((f"data.{x}" for x in ("suffix", "system", "chat_template")), LANGUAGE),
    "actor.tokenizer": LANGUAGE,
    "actor.model.architecture": {**LANGUAGE, "actor.model.path": "x"},
    "warm_start.steps": FILES,
    **dict.fromkeys((f"warm_start.{x}" for x in ("batch_size", "lr", "forget")), LANGUAGE),
    "reward.path": {**LANGUAGE, "reward.grader": "exact"},
    "reward.name": LANGUAGE,
    "reward.format_weight": LANGUAGE,
    "reward.model.pairs": FILES,
    **dict.fromkeys((f"reward.model.{x}" for x in ("steps", "batch_size", "lr")), LANGUAGE),
}


@pytest.mark.parametrize("path", UNREAD)
def test_option_that_is_not_read_is_refused(path: str) -> None:
    value, needs = UNREAD[path]
    base = LANGUAGE if readers.mode_of(path) == "reasoning" and path not in NOT_READ else {}
    line = refused(Config, {**base, **NOT_READ.get(path, {}), path: value})
    for part in (
        path,
        show(value),
        "set but not read; it needs ",
        "; otherwise remove this option",
    ):
        assert part in line
    loader.load(Config, nested({**(needs or {}), path: value}))


def test_every_condition_has_a_case() -> None:
    conditional = {path for path, reader in readers.readers().items() if reader.conditions}
    assert conditional == {*UNREAD, "critic.use_critic_model"}


def test_check_refuses_unread_defaults_only_if_explicit() -> None:
    validation.check(Config())
    with pytest.raises(ConfigError, match=r"desired_kl = 0\.01 is set but not read"):
        validation.check(Config(), explicit={"algorithm.desired_kl"})
    validation.check(Config(), explicit={"algorithm.reward_shift"})  # false switches the option off
    config = loader.load(Config, nested(NO_VALUE))
    with pytest.raises(
        ConfigError,
        match=r"use_critic_model = true is set but not read; it needs algorithm.adv_type",
    ):
        validation.check(config, explicit={"critic.use_critic_model"})


def test_shipped_options_may_remain_unread() -> None:
    def deliberate(label: str, flat: dict[str, Any]) -> frozenset[str]:
        return loader.read(Config, [(label, nested(flat)), ("flag", nested(NO_VALUE))]).deliberate(
            {"flag"}
        )

    file = {"critic.lr": 0.1, "env.id": "Hopper-v4"}
    assert "critic.lr" in deliberate("my.yaml", file)
    assert "critic.lr" not in deliberate("configs/experiment/x.yaml", file)
    assert "critic.lr" not in deliberate(f"{loader.STORED}, run/config.yaml", file)
    assert "env.id" in deliberate("configs/experiment/x.yaml", file)  # the other mode's
