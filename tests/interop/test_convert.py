"""Conversion of another framework's PPO options: complete, correct values, a reason for the rest.

The documented blocks of each framework convert without an unknown or refused option.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import yaml

from embodied_ppo.commands import main
from embodied_ppo.config import loader, readers
from embodied_ppo.config.rules.select import RULES
from embodied_ppo.config.schema import Config
from embodied_ppo.interop import convert as migrate


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test runs in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def convert(peer: str, flat: dict[str, Any]) -> migrate.Migration:
    Path("source.yaml").write_text(yaml.safe_dump(run_helpers.nested(flat), sort_keys=False))
    return migrate.convert(peer, "source.yaml")


def reasons_of(migration: migrate.Migration) -> dict[str, str]:
    """Return their option -> the reason why it has no counterpart."""
    rows = (*migration.meaningless, *migration.refused, *migration.unknown)
    return {row["theirs"]: row["why"] for row in rows}


# -------------------------------------------------------------------------------- documented blocks
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
RLINF_ROBOT = {  # the page on PPO, embodied tasks
    "algorithm.normalize_advantages": True,
    "algorithm.group_size": 1,
    "algorithm.adv_type": "gae",
    "algorithm.loss_type": "actor_critic",
    "algorithm.loss_agg_func": "token-mean",
    "algorithm.rollout_micro_batch_size": 256,
    "algorithm.logprob_forward_micro_batch_size": 16,
    "algorithm.entropy_bonus": 0,
    "algorithm.clip_ratio_low": 0.2,
    "algorithm.clip_ratio_high": 0.2,
    "algorithm.value_clip": 0.2,
    "algorithm.gamma": 0.99,
    "algorithm.gae_lambda": 0.95,
    "algorithm.huber_delta": 10.0,
}
RLINF_ROBOT_MORE = {  # the pages on configuration: section algorithm, and what goes with it
    **{k: v for k, v in RLINF_ROBOT.items() if "micro" not in k},
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_beta": 0.0,
    "algorithm.reward_type": "chunk_level",
    "algorithm.logprob_type": "token_level",
    "algorithm.entropy_type": "token_level",
    "algorithm.bootstrap_type": "always",
    "algorithm.clip_ratio_high": 0.28,
    "algorithm.clip_ratio_c": 3.0,
    "algorithm.update_epoch": 2,
    "runner.task_type": "embodied",
    "runner.max_epochs": 1000,
    "runner.max_steps": -1,
    "env.train.env_type": "libero",
    "env.train.task_suite_name": "libero_10",
    "env.train.total_num_envs": 128,
    "env.train.rollout_epoch": 1,
    "env.train.auto_reset": True,
    "env.train.ignore_terminations": False,
    "env.train.max_episode_steps": 80,
    "env.train.max_steps_per_rollout_epoch": 160,
    "env.eval.total_num_envs": 16,
    "actor.micro_batch_size": 40,
    "actor.global_batch_size": 640,
    "actor.seed": 1234,
    "actor.enable_offload": True,
    "actor.model.model_type": "openvla_oft",
    "actor.model.model_path": "models/oft",
    "actor.model.implement_version": "rlinf",
    "actor.model.center_crop": True,
    "actor.model.num_action_chunks": 8,
    "actor.model.precision": "bf16",
    "actor.model.is_lora": True,
    "actor.model.lora_rank": 32,
    "actor.optim.lr": 1e-4,
    "actor.optim.value_lr": 3e-3,
    "actor.optim.clip_grad": 10.0,
    "rollout.pipeline_stage_num": 1,
    "cluster.num_nodes": 1,
    "cluster.component_placement": {"actor": "0-7", "env": "0-3", "rollout": "4-7"},
}
RLINF_LANGUAGE = {
    "algorithm.group_size": 1,
    "algorithm.adv_type": "gae",
    "algorithm.gamma": 1,
    "algorithm.gae_lambda": 1,
    "algorithm.normalize_advantages": True,
    "algorithm.loss_type": "actor",
    "algorithm.loss_agg_func": "token-mean",
    "algorithm.clip_ratio_c": 3.0,
    "algorithm.clip_ratio_low": 0.2,
    "algorithm.clip_ratio_high": 0.2,
    "algorithm.value_clip": 0.2,
    "cluster.num_nodes": 1,
    "cluster.component_placement": {"actor,critic,rollout,reward": "all"},
    "actor.group_name": "ActorGroup",
    "actor.training_backend": "megatron",
    "critic.use_critic_model": True,
    "critic.group_name": "CriticGroup",
    "critic.training_backend": "megatron",
}
VERL = {  # the page on PPO
    "data.train_batch_size": 256,
    f"{ACTOR}ppo_mini_batch_size": 64,
    "critic.ppo_mini_batch_size": 128,
    f"{ACTOR}clip_ratio": 0.3,
    f"{ACTOR}ppo_epochs": 2,
    "critic.ppo_epochs": 3,
    "algorithm.gamma": 0.99,
    "algorithm.lam": 0.9,
    "algorithm.adv_estimator": "gae",
    f"{ACTOR}use_kl_loss": True,
    f"{ACTOR}kl_loss_coef": 0.002,
    f"{ACTOR}kl_loss_type": "low_var_kl",
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.kl_coef": 0.005,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.2,
    f"{ACTOR}clip_ratio_c": 3.0,
    # the example on the same page
    "trainer.n_gpus_per_node": 1,
    f"{ROLLOUT}tensor_model_parallel_size": 1,
    "trainer.logger": "console",
    "critic.model.path": "Qwen2.5-0.5B-Instruct",
    "actor_rollout_ref.model.path": "Qwen2.5-0.5B-Instruct",
    f"{ACTOR}ppo_micro_batch_size": 2,
    "critic.ppo_micro_batch_size": 2,
}
ROLL = {  # the page on PPO
    "rollout_batch_size": 512,
    "prompt_length": 2048,
    "response_length": 4096,
    "adv_estimator": "gae",
    "num_return_sequences_in_group": 1,
    "ppo_epochs": 1,
    "use_kl_loss": True,
    "kl_loss_coef": 0.001,
    "loss_agg_mode": "seq-mean-token-mean",
    "whiten_advantages": True,
    "advantage_clip": 2.0,
    "reward_clip": None,
    "dual_clip_loss": True,
    "lambd": 0.95,
    "gamma": 1,
    "pg_clip": 0.2,
    "value_clip": None,
    "kl_penalty": "kl",
    "target_kl": None,
    "init_kl_coef": 0.2,
    "kl_horizon": 10000,
    "add_token_level_kl": False,
    "norm_mean_type": None,
    "norm_std_type": None,
}
TRL = {  # what PPOConfig documents
    "learning_rate": 3e-6,
    "dataset_num_proc": None,
    "num_mini_batches": 2,
    "total_episodes": 10000,
    "local_rollout_forward_batch_size": 64,
    "num_sample_generations": 10,
    "response_length": 53,
    "stop_token": "eos",
    "temperature": 0.7,
    "missing_eos_penalty": 1.0,
    "sft_model_path": "pythia-1b",
    "reward_model_path": "pythia-rm",
    "push_to_hub": False,
    "num_ppo_epochs": 4,
    "whiten_rewards": False,
    "kl_coef": 0.05,
    "kl_estimator": "k3",
    "cliprange": 0.2,
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "gamma": 1.0,
    "lam": 0.95,
    "ds3_gather_for_generation": True,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "model_adapter_name": None,
    "ref_adapter_name": None,
}
FILL = {"env.id": "HalfCheetah-v4", "updates": "5", "actor.model.path": "model"}
FILL |= {"data.train": "[a.jsonl]", "data.eval": "[b.jsonl]"}
DOCUMENTED = {
    "rlinf-robot": ("rlinf", RLINF_ROBOT),
    "rlinf-robot-more": ("rlinf", RLINF_ROBOT_MORE),
    "rlinf-language": ("rlinf", RLINF_LANGUAGE),
    "verl": ("verl", VERL),
    "roll": ("roll", ROLL),
    "trl": ("trl", TRL),
}


@pytest.mark.parametrize(("peer", "block"), DOCUMENTED.values(), ids=list(DOCUMENTED))
def test_documented_block_converts_without_loss(
    peer: str, block: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    migration = convert(peer, block)
    assert not migration.unknown and not migration.refused and migration.conflict is None
    mapped = {row["theirs"] for row in migration.mapped if not row["default"]}
    assert mapped | set(reasons_of(migration)) == set(block), (
        "every option is mapped or has a reason"
    )

    out = "configs/experiment/imported.yaml"  # neither folder exists
    assert main.main(["import-config", peer, "source.yaml", "--out", out]) == 0
    capsys.readouterr()
    fill = [f"{path}={FILL[path]}" for path in migration.to_write]
    assert (
        main.main(["config", "--json", "--config-dir", "configs", "experiment=imported", *fill])
        == 0
    )
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert "read as" not in captured.err, "the file has canonical names"
    for path, value in migration.options.items():
        assert rows[path]["value"] == value and rows[path]["source"].endswith("imported.yaml"), path


def test_missing_required_options_are_reported(
    capsys: pytest.CaptureFixture[str],
):
    Path("configs/experiment").mkdir(parents=True)
    migration = convert("verl", VERL)
    assert set(migration.to_write) == {"data.train", "data.eval", "updates"}
    Path("configs/experiment/x.yaml").write_text(migration.text("source.yaml"))
    assert main.main(["train", "--config-dir", "configs", "experiment=x"]) == 2
    assert "= ??? " in capsys.readouterr().err
    assert main.main(["config", "--config-dir", "configs", "experiment=x"]) == 0
    assert (
        "without a value, so nothing is checked: data.eval, data.train, updates"
        in capsys.readouterr().err
    )


# ------------------------------------------------------------------------------------------- values
OFT = {"actor.model.model_type": "openvla_oft", "actor.model.model_path": "models/oft"}
ROBOT = {"runner.task_type": "embodied", "actor.model.num_action_chunks": 8}
WORKERS = {"rollout_batch_size": 64, "num_return_sequences_in_group": 8, "num_gpus_per_node": 8}
VALUES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # RLinf's OpenVLA-OFT: one of two implementations, of which theirs crops no image
    (
        "rlinf",
        ROBOT | OFT | {"actor.model.center_crop": True},
        {"model.policy": "token", "model.omit_stop_token": True, "model.center_crop": "absent"},
    ),
    (
        "rlinf",
        ROBOT | OFT | {"actor.model.implement_version": "rlinf", "actor.model.center_crop": True},
        {"model.omit_stop_token": True, "model.center_crop": "absent"},
    ),
    (
        "rlinf",
        ROBOT
        | OFT
        | {"actor.model.implement_version": "official", "actor.model.center_crop": True},
        {"model.omit_stop_token": False, "model.center_crop": True},
    ),
    (
        "rlinf",
        ROBOT | OFT | {"actor.model.model_type": "openvla", "actor.model.center_crop": True},
        {"model.decode": "autoregressive", "model.omit_stop_token": "absent"},
    ),
    # verl: prompts before n; one clip range or two; names of KL estimators; warm-up in updates
    (
        "verl",
        {f"{ACTOR}ppo_mini_batch_size": 64, f"{ROLLOUT}n": 8},
        {"algorithm.global_batch_size": 64, "algorithm.group_size": 8},
    ),
    (
        "verl",
        {f"{ACTOR}clip_ratio": 0.3},
        {"algorithm.clip_ratio_low": 0.3, "algorithm.clip_ratio_high": 0.3},
    ),
    (
        "verl",
        {f"{ACTOR}clip_ratio": 0.3, f"{ACTOR}clip_ratio_low": 0.1, f"{ACTOR}clip_ratio_high": 0.4},
        {"algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": 0.4},
    ),
    (
        "verl",
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "mse"},
        {"algorithm.kl_penalty": "k2"},
    ),
    # Dr. GRPO, and its advantage with a loss that divides by the length
    (
        "verl",
        {
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": False,
            f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
            f"{ROLLOUT}n": 4,
        },
        {"algorithm.adv_type": "dr_grpo", "algorithm.normalize_advantages": False},
    ),
    (
        "verl",
        {
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": False,
            f"{ACTOR}loss_agg_mode": "seq-mean-token-mean",
            f"{ROLLOUT}n": 4,
        },
        {
            "algorithm.adv_type": "reinforce_plus_plus_baseline",
            "algorithm.normalize_advantages": False,
        },
    ),
    # GSPO
    (
        "verl",
        {f"{ACTOR}policy_loss.loss_mode": "gspo", f"{ACTOR}loss_agg_mode": "token-mean"},
        {
            "algorithm.ratio_level": "sequence",
            "algorithm.loss_agg_func": "seq-mean-token-mean",
        },
    ),
    (
        "verl",
        {f"{ACTOR}policy_loss.loss_mode": "cispo", f"{ACTOR}clip_ratio_c": 3.0},
        {"algorithm.policy_loss": "cispo", "algorithm.clip_ratio_c": "absent"},
    ),
    ("roll", {"importance_sampling": "seq"}, {"algorithm.ratio_level": "sequence"}),
    # groups filtered by success
    (
        "verl",
        {
            "algorithm.adv_estimator": "grpo",
            f"{ROLLOUT}n": 4,
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.metric": "acc",
            "algorithm.filter_groups.max_num_gen_batches": 10,
        },
        {"algorithm.group_filter": "success", "algorithm.group_filter_rounds": 10},
    ),
    (
        "verl",
        {
            "algorithm.adv_estimator": "grpo",
            f"{ROLLOUT}n": 4,
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.max_num_gen_batches": 0,
        },
        {"algorithm.group_filter": "success", "algorithm.group_filter_rounds": "absent"},
    ),
    (
        "verl",
        {"algorithm.filter_groups.enable": False, "algorithm.filter_groups.metric": "acc"},
        {"algorithm.group_filter": "absent"},
    ),
    (
        "rlinf",
        {
            "algorithm.adv_type": "grpo",
            "algorithm.group_size": 4,
            "algorithm.filter_rewards": True,
            "algorithm.rewards_lower_bound": 0.1,
        },
        {"algorithm.group_filter": "success", "algorithm.group_filter_rounds": 1},
    ),
    (
        "verl",
        {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": "low_var_kl+"},
        {"algorithm.kl_loss_type": "k3+"},
    ),
    (
        "verl",
        {f"{ACTOR}optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 200},
        {"algorithm.lr_warmup": 20, "updates": 200},
    ),
    (
        "verl",
        {
            f"{ACTOR}optim.lr_warmup_steps_ratio": 0.1,
            f"{ACTOR}optim.lr_warmup_steps": 7,
            "trainer.total_training_steps": 200,
        },
        {"algorithm.lr_warmup": 7},
    ),
    (
        "verl",
        {f"{ACTOR}optim.lr": "1e-6", "critic.optim.lr": "1e-5"},
        {"algorithm.lr": 1e-6, "critic.lr": 1e-5},
    ),
    (
        "verl",
        {
            "actor_rollout_ref.model.tokenizer_path": "tokenizer",
            "critic.model.tokenizer_path": "other",
        },
        {"actor.tokenizer": "tokenizer"},
    ),
    (
        "verl",
        {f"{ROLLOUT}name": "vllm", f"{ROLLOUT}gpu_memory_utilization": 0.6},
        {"rollout.engine": "vllm", "rollout.gpu_memory_utilization": 0.6},
    ),
    (
        "verl",
        {f"{ROLLOUT}name": "vllm"},
        {"rollout.gpu_memory_utilization": 0.5},
    ),
    (
        "verl",
        {f"{ROLLOUT}n": 2},
        {"rollout.gpu_memory_utilization": "absent"},
    ),
    (
        "verl",
        {f"{ACTOR}optim.betas": [0.8, 0.95]},
        {"algorithm.adam_beta1": 0.8, "algorithm.adam_beta2": 0.95},
    ),
    (
        "verl",
        {f"{ACTOR}optim.lr_scheduler_type": "cosine", f"{ACTOR}optim.min_lr_ratio": 0.1},
        {"algorithm.lr_schedule": "cosine", "algorithm.lr_end": 0.1},
    ),
    (
        "verl",
        {"critic.cliprange_value": 0.7, "critic.grad_clip": 2.0},
        {"algorithm.value_clip": 0.7, "critic.max_grad_norm": 2.0},
    ),
    (
        "verl",
        {"algorithm.adv_estimator": "rloo", f"{ROLLOUT}n": 4},
        {
            "algorithm.adv_type": "rloo",
            "algorithm.normalize_advantages": False,
            "critic.use_critic_model": False,
        },
    ),
    (
        "verl",
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": 3.0,
        },
        {"algorithm.off_policy_correction": "token", "algorithm.off_policy_cap": 3.0},
    ),
    (
        "verl",
        {f"{ACTOR}use_dynamic_bsz": True, f"{ACTOR}ppo_max_token_len_per_gpu": 9000},
        {"algorithm.micro_batch_tokens": 9000},
    ),
    (
        "verl",
        {f"{ACTOR}ppo_micro_batch_size": 32, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 8},
        {
            "algorithm.micro_batch_size": 2,
            "placement": "fused",
            "cluster.num_nodes": 2,
            "cluster.devices_per_node": 8,
        },
    ),
    (
        "verl",
        {
            f"{ROLLOUT}val_kwargs.n": 4,
            f"{ROLLOUT}val_kwargs.do_sample": True,
            f"{ROLLOUT}val_kwargs.temperature": 0.6,
            f"{ROLLOUT}val_kwargs.top_k": -1,
        },
        {
            "evaluation.n": 4,
            "evaluation.deterministic": False,
            "evaluation.temperature": 0.6,
            "evaluation.top_k": 0,
        },
    ),
    (
        "verl",
        {"data.train_files": "a.parquet", "data.val_files": ["b.parquet"]},
        {"data.train": ["a.parquet"], "data.eval": ["b.parquet"]},
    ),
    ("verl", {"trainer.test_freq": 5, "trainer.save_freq": -1}, {"eval_every": 5, "save_every": 0}),
    (
        "verl",
        {"reward_model.enable": True, "reward_model.model.path": "rm"},
        {"reward.model.path": "rm"},
    ),
    # verl: defaults of options that the file does not set
    (
        "verl",
        {"algorithm.adv_estimator": "gae"},
        {
            "algorithm.rollout_batch_size": 1024,
            "algorithm.response_length": 512,
            "algorithm.global_batch_size": 256,
            "algorithm.weight_decay": 0.01,
            "critic.weight_decay": 0.01,
        },
    ),
    # RLinf: discount of a chunk, 0.99 = 0.9987445^8; the reward of a chunk is a plain sum; steps
    # per decision; passes; a warm-up of 30 steps at 10 steps per update; two micro-batch sizes
    (
        "rlinf",
        {**ROBOT, "algorithm.reward_type": "chunk_level", "algorithm.gamma": 0.99},
        {"algorithm.gamma": 0.9987445, "env.action_chunk": 8, "algorithm.chunk_reward": "sum"},
    ),
    (
        "rlinf",
        {**ROBOT, "algorithm.reward_type": "action_level", "algorithm.gamma": 0.99},
        {
            "algorithm.gamma": 0.99,
            "algorithm.reward_type": "action_level",
            "algorithm.chunk_reward": "absent",
        },
    ),
    (
        "rlinf",
        RLINF_ROBOT,
        {
            "algorithm.rollout_micro_batch_size": 256,
            "algorithm.micro_batch_size": "absent",
            "algorithm.logprob_forward_micro_batch_size": 16,
        },
    ),
    (
        "rlinf",
        {
            **ROBOT,
            "env.train.total_num_envs": 64,
            "env.train.max_steps_per_rollout_epoch": 160,
            "env.train.auto_reset": True,
            "env.train.rollout_epoch": 2,
        },
        {"env.num_envs": 64, "algorithm.horizon": 40, "env.restart_each_rollout": False},
    ),
    (
        "rlinf",
        {
            **ROBOT,
            "env.train.total_num_envs": 64,
            "env.train.max_steps_per_rollout_epoch": 160,
            "env.train.auto_reset": False,
            "env.train.rollout_epoch": 2,
        },
        {"env.num_envs": 128, "algorithm.horizon": 20, "env.restart_each_rollout": True},
    ),
    (
        "rlinf",
        {
            **ROBOT,
            "env.train.total_num_envs": 64,
            "env.train.max_steps_per_rollout_epoch": 160,
            "env.train.auto_reset": True,
            "actor.global_batch_size": 256,
            "algorithm.update_epoch": 2,
            "actor.optim.critic_warmup_steps": 30,
        },
        {"algorithm.critic_warmup": 3},
    ),
    (
        "rlinf",
        {"runner.task_type": "embodied", "algorithm.kl_beta": 0.01},
        {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.01},
    ),
    (
        "rlinf",
        {"runner.task_type": "embodied", "algorithm.gamma": 0.99},
        {"algorithm.update_epoch": 1, "algorithm.clip_ratio_c": None},
    ),
    (
        "rlinf",
        {"runner.task_type": "embodied", "runner.max_epochs": 50, "runner.max_steps": 20},
        {"updates": 20},
    ),
    ("rlinf", {"runner.task_type": "embodied", "runner.val_check_interval": -1}, {"eval_every": 0}),
    (
        "rlinf",
        {
            "runner.task_type": "embodied",
            "env.train.env_type": "libero",
            "env.train.task_suite_name": "libero_goal",
        },
        {"env.id": "libero/libero_goal"},
    ),
    (
        "rlinf",
        {
            "runner.task_type": "embodied",
            "cluster.component_placement": {"actor, inference": "0-3,5", "env,rollout": "6-7"},
        },
        {"cluster.component_placement": {"actor": ["0-3", 5], "env,rollout": "6-7"}},
    ),
    (
        "rlinf",
        {
            "runner.task_type": "embodied",
            "actor.model.model_type": "openpi",
            "actor.model.model_path": "pi0",
            "actor.model.num_steps": 5,
            "actor.model.openpi.noise_method": "flow_noise",
            "actor.model.openpi.joint_logprob": True,
        },
        {
            "model.policy": "flow",
            "model.checkpoint": "pi0",
            "model.flow_steps": 5,
            "model.flow_noise": "learned",
            "model.flow_chain": "mean",
        },
    ),
    (
        "rlinf",
        {
            "runner.task_type": "embodied",
            "actor.model.model_type": "mlp_policy",
            "actor.model.hidden_dim": 128,
        },
        {
            "model.hidden": [128, 128, 128],
            "model.normalize_obs": False,
            "model.shared_backbone": False,
        },
    ),
    (
        "rlinf",
        {
            "algorithm.loss_type": "actor",
            "algorithm.ratio_clip_eps": 0.3,
            "algorithm.clip_ratio_low": None,
            "data.rollout_batch_size": 512,
            "algorithm.n_minibatches": 4,
        },
        {
            "algorithm.clip_ratio_low": 0.3,
            "algorithm.clip_ratio_high": 0.3,
            "algorithm.global_batch_size": 128,
        },
    ),
    # ROLL: dual clip's constant; controllers; normalisation by two options; responses of a device
    # -> prompts of a step
    ("roll", {"pg_clip": 0.3, "dual_clip_loss": True}, {"algorithm.clip_ratio_c": 1.6}),
    ("roll", {"pg_clip": 0.3, "dual_clip_loss": False}, {"algorithm.clip_ratio_c": None}),
    (
        "roll",
        {"pg_clip": 0.3, "use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.25},
        {"algorithm.clip_ratio_low": 0.1, "algorithm.clip_ratio_high": 0.25},
    ),
    (
        "roll",
        {"add_token_level_kl": True, "init_kl_coef": 0.2, "target_kl": 0.05, "kl_horizon": 9000},
        {
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.2,
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.target_kl": 0.05,
            "algorithm.kl_ctrl.horizon": 9000.0,
        },
    ),
    (
        "roll",
        {"norm_mean_type": "group", "norm_std_type": "group", "num_return_sequences_in_group": 4},
        {
            "algorithm.reward_norm": "group",
            "algorithm.reward_shift": False,
            "algorithm.reward_scale": False,
        },
    ),
    (
        "roll",
        {"norm_mean_type": "batch", "norm_std_type": None},
        {"algorithm.reward_norm": "batch", "algorithm.reward_shift": True},
    ),
    ("roll", {"use_kl_loss": True}, {"algorithm.kl_loss_type": "k3"}),
    ("roll", {"prompt_length": 1000, "sequence_length": 3000}, {"algorithm.response_length": 2000}),
    (
        "roll",
        {
            **WORKERS,
            "actor_train.device_mapping": "list(range(0,8))",
            "max_steps": 100,
            "ppo_epochs": 2,
            "actor_train.training_args.per_device_train_batch_size": 2,
            "actor_train.training_args.gradient_accumulation_steps": 16,
            # 2 x 16 x 8 = 256 responses = 32 prompts: 4 steps
            "actor_train.training_args.warmup_steps": 20,
        },
        {
            "algorithm.global_batch_size": 32,
            "algorithm.micro_batch_size": 2,
            "algorithm.lr_warmup": 5,
        },
    ),
    (
        "roll",
        {
            **WORKERS,
            "adv_estimator": "gae",
            "actor_train.device_mapping": "list(range(0,8))",
            "actor_infer.device_mapping": "list(range(8, 12)) + list(range(14,16))",
            "critic.device_mapping": [0, 1, 2, 5],
        },
        {
            "cluster.component_placement": {
                "actor": "0-7",
                "rollout,reward": ["8-11", "14-15"],
                "critic": ["0-2", 5],
            },
            "cluster.num_nodes": 2,
            "cluster.devices_per_node": 8,
        },
    ),
    (
        "roll",
        {"gamma": 1},
        {
            "algorithm.normalize_advantages": False,
            "algorithm.value_clip": None,
            "algorithm.loss_agg_func": "seq-mean-token-mean",
            "algorithm.lr_schedule": "linear",
        },
    ),
    # ROLL: whitening subtracts the mean, after the penalty; clipping follows normalisation;
    # defaults; one critic epoch
    (
        "roll",
        {"whiten_rewards": True, "add_token_level_kl": True},
        {
            "algorithm.whiten_rewards": True,
            "algorithm.whiten_subtract_mean": True,
            "algorithm.whiten_after_kl": True,
            "algorithm.kl_ctrl.kl_coef": 0.2,
        },
    ),
    (
        "roll",
        {"whiten_rewards": True},
        {"algorithm.whiten_subtract_mean": True, "algorithm.whiten_after_kl": "absent"},
    ),
    (
        "roll",
        {"whiten_rewards": False},
        {"algorithm.whiten_rewards": False, "algorithm.whiten_subtract_mean": "absent"},
    ),
    (
        "roll",
        {"reward_clip": 5, "norm_mean_type": "batch", "norm_std_type": "batch"},
        {"algorithm.reward_clip": 5.0, "algorithm.reward_clip_order": "after_norm"},
    ),
    (
        "roll",
        {"reward_clip": 5, "add_token_level_kl": True},
        {"algorithm.reward_clip_order": "after_norm"},
    ),
    (
        "roll",
        {"reward_clip": 5},
        {"algorithm.reward_clip": 5.0, "algorithm.reward_clip_order": "absent"},
    ),
    ("roll", {"use_kl_loss": True}, {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 0.0}),
    (
        "roll",
        {"ppo_epochs": 4},
        {
            "algorithm.update_epoch": 4,
            "critic.update_epoch": 1,
            "critic.loss_agg_func": "seq-mean-token-mean",
        },
    ),
    (
        "roll",
        {"adv_estimator": "reinforce", "ppo_epochs": 4},
        {
            "algorithm.adv_type": "reinforce",
            "algorithm.normalize_advantages": False,
            "critic.use_critic_model": False,
            "critic.update_epoch": "absent",
            "critic.loss_agg_func": "absent",
        },
    ),
    (
        "roll",
        {"adv_estimator": "grpo", "num_return_sequences_in_group": 4},
        {"algorithm.adv_type": "grpo", "algorithm.reward_norm": "absent"},
    ),
    (
        "roll",
        {"adv_estimator": "grpo", "num_return_sequences_in_group": 4, "add_token_level_kl": True},
        # scores are normalised before the penalty
        {"algorithm.adv_type": "reinforce", "algorithm.reward_norm": "group"},
    ),
    (
        "roll",
        {
            **WORKERS,
            "actor_train.device_mapping": "[0,1]",
            "loss_agg_mode": "seq-mean-token-sum-norm",
            "actor_train.training_args.per_device_train_batch_size": 2,
            "prompt_length": 101,
            "response_length": 300,
            # 64 responses in rows of 400
            "actor_train.training_args.gradient_accumulation_steps": 16,
        },
        {"algorithm.loss_agg_func": "seq-mean-token-sum-norm", "algorithm.loss_scale_factor": 6.25},
    ),
    (
        "roll",
        {"reward_norm": "batch", "reward_shift": True},
        {"algorithm.reward_norm": "batch", "algorithm.reward_shift": True},
    ),
    # verl: the critic has the aggregation of the actor unless the file sets another
    (
        "verl",
        {f"{ACTOR}loss_agg_mode": "seq-mean-token-mean"},
        {
            "algorithm.loss_agg_func": "seq-mean-token-mean",
            "critic.loss_agg_func": "seq-mean-token-mean",
        },
    ),
    (
        "verl",
        {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum", "critic.loss_agg_mode": "token-mean"},
        {"algorithm.loss_agg_func": "seq-mean-token-sum", "critic.loss_agg_func": "token-mean"},
    ),
    (
        "verl",
        {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor": 1000},
        {"algorithm.loss_scale_factor": 1000.0},
    ),
    # TRL: batches; one learning rate for both; KL always in the reward
    (
        "trl",
        TRL,
        {
            "algorithm.rollout_batch_size": 64,
            "algorithm.global_batch_size": 32,
            "algorithm.micro_batch_size": 16,
            "updates": 157,
            "algorithm.lr": 3e-6,
            "critic.lr": 3e-6,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": 0.05,
            "algorithm.kl_penalty": "k3",
            "algorithm.clip_ratio_c": None,
            "algorithm.value_clip": 0.2,
            "algorithm.missing_eos_penalty": 1.0,
            "rollout.temperature": 0.7,
        },
    ),
    (
        "trl",
        {"num_ppo_epochs": 2},
        {
            "algorithm.gae_lambda": 0.95,
            "algorithm.use_kl_in_reward": True,
            "algorithm.response_length": 53,
            "actor.model.dtype": "bfloat16",
        },
    ),
    (
        "trl",
        {"whiten_rewards": True},
        {
            "algorithm.whiten_rewards": True,
            "algorithm.whiten_after_kl": True,
            "algorithm.max_grad_norm": None,
        },
    ),
    (
        "trl",
        {"whiten_rewards": True, "kl_coef": 0.0},
        {"algorithm.whiten_rewards": True, "algorithm.whiten_after_kl": "absent"},
    ),
    ("trl", {"max_grad_norm": 0.3, "deepspeed": "zero2.json"}, {"algorithm.max_grad_norm": 0.3}),
    (
        "trl",
        {"num_ppo_epochs": 2, "kl_coef": 0.0, "stop_token_id": 7},
        {"algorithm.use_kl_in_reward": False, "rollout.stop_token_ids": [7]},
    ),
]


@pytest.mark.parametrize(("peer", "options", "expected"), VALUES)
def test_values_are_mapped(peer: str, options: dict[str, Any], expected: dict[str, Any]):
    migration = convert(peer, options)
    assert {path: migration.options.get(path, "absent") for path in expected} == expected
    assert not migration.refused and not migration.unknown


REASONS = [
    ("verl", {"trainer.total_epochs": 15}, "trainer.total_epochs", "epochs x prompts"),
    (
        "verl",
        {f"{ACTOR}fsdp_config.param_offload": True, f"{ACTOR}ppo_epochs": 1},
        f"{ACTOR}fsdp_config.param_offload",
        "or sharded with cluster.shard=true",
    ),
    (
        "verl",
        {"critic.model.tokenizer_path": "other"},
        "critic.model.tokenizer_path",
        "the critic reads the actor's tokens",
    ),
    (
        "verl",
        {f"{ROLLOUT}gpu_memory_utilization": 0.6},  # the built-in engine does not read it
        f"{ROLLOUT}gpu_memory_utilization",
        "rollout.gpu_memory_utilization = 0.6 is not read here; it needs rollout.engine=vllm",
    ),
    (
        "verl",
        {f"{ROLLOUT}max_num_seqs": 64},
        f"{ROLLOUT}max_num_seqs",
        "inference engine",
    ),
    (
        "verl",
        {"algorithm.kl_ctrl.kl_coef": 0.005},
        "algorithm.kl_ctrl.kl_coef",
        "it needs algorithm.use_kl_in_rew",
    ),
    (
        "verl",
        {f"{ACTOR}policy_loss.loss_mode": "gpg"},
        f"{ACTOR}policy_loss.loss_mode",
        "a loss other than PPO's",
    ),
    (
        "verl",
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "score"},
        "algorithm.filter_groups.enable",
        "their filter compares score, ours success",
    ),
    (
        "verl",
        {"critic._target_": "os.system", "algorithm.gamma": 1.0},
        "critic._target_",
        "nothing in the file is",
    ),
    (
        "rlinf",
        {"rollout.enable_offload": True},
        "rollout.enable_offload",
        "offloaded to host memory",
    ),
    ("rlinf", {"env.train.env_type": "maniskill"}, "env.train.env_type", "env.simulator=torch"),
    (
        "roll",
        {"norm_mean_type": "group", "norm_std_type": "batch"},
        "norm_std_type",
        "both of the group",
    ),
    (
        "roll",
        {"norm_mean_type": "running", "norm_std_type": "running"},
        "norm_mean_type",
        "mean and deviation of",
    ),
    ("roll", {"reward_norm": "running"}, "reward_norm", "running mean and deviation of the scores"),
    (
        "roll",
        {"reward_norm": "batch", "norm_mean_type": None},
        "reward_norm",
        "before 25 September 2025",
    ),
    (
        "roll",
        {"adv_estimator": "grpo", "norm_mean_type": "batch"},
        "norm_mean_type",
        "sets both to group",
    ),
    ("trl", {"vf_coef": 0.1}, "vf_coef", "its own optimiser"),
    ("trl", {"num_train_epochs": 3, "lam": 1.0}, "num_train_epochs", "epochs x prompts"),
    # refused by the loader
    (
        "verl",
        {f"{ROLLOUT}top_p": 0.9},
        f"{ROLLOUT}top_p",
        "rollout.top_p = 0.9 is refused: training on filtered",
    ),
    ("verl", {f"{ACTOR}clip_ratio_c": 0.5}, f"{ACTOR}clip_ratio_c", "must be a finite number > 1"),
    (
        "verl",
        {"algorithm.adv_estimator": "remax"},
        "algorithm.adv_estimator",
        "algorithm.adv_type = remax must be",
    ),
    (
        "verl",
        {"trainer.n_gpus_per_node": 2, f"{ACTOR}ppo_micro_batch_size": "many"},
        f"{ACTOR}ppo_micro_batch_size",
        "many is not a valid value",
    ),
    (
        "rlinf",
        {"runner.experiment_name": "a", "runner.logger.experiment_name": "b"},
        "runner.logger.experiment_name",
        "another option of the file sets name = a",
    ),
    # unknown
    (
        "verl",
        {f"{ACTOR}ppo_epochz": 3, f"{ACTOR}ppo_epochs": 3},
        f"{ACTOR}ppo_epochz",
        "not a known option of verl",
    ),
    ("verl", {"my.own": 3, f"{ACTOR}ppo_epochs": 3}, "my.own", "not a known option of verl"),
    (
        "rlinf",
        {"algorithm.gama": 3, "algorithm.gamma": 1},
        "algorithm.gama",
        "not a known option of RLinf",
    ),
    ("roll", {"pg_clp": 3, "pg_clip": 0.2}, "pg_clp", "not a known option of ROLL"),
    ("trl", {"cliprnge": 3, "cliprange": 0.2}, "cliprnge", "not a known option of TRL"),
    ("verl", {"algorithm.gamma": "${oc.env:GAMMA}"}, "algorithm.gamma", "the file does not define"),
    (
        "roll",
        {"actor_train.device_mapping": "__import__('os').mkdir('pwned')", "pg_clip": 0.2},
        "actor_train.device_mapping",
        "is not understood",
    ),
]


@pytest.mark.parametrize(("peer", "options", "path", "reason"), REASONS)
def test_option_without_counterpart_has_a_reason(
    peer: str, options: dict[str, Any], path: str, reason: str
):
    migration = convert(peer, options)
    assert reason in reasons_of(migration)[path]
    assert path not in {row["theirs"] for row in migration.mapped}
    assert not Path("pwned").exists()


DIFFERENCES = [
    ("roll", {"reward_norm": "batch", "lambd": 1}, "reward_norm", "a later version ignores it"),
    (
        "roll",
        {"loss_agg_mode": "seq-mean-token-sum-norm", "lambd": 1},
        "loss_agg_mode",
        "write algorithm.loss_scale",
    ),
    ("roll", {"gamma": 1}, "lambd", "their GAE starts at the end of the padding"),
    ("roll", {"lambd": 1, "gamma": 1}, None, ""),
    ("roll", {"adv_estimator": "reinforce"}, None, ""),
    (
        "verl",
        {f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm"},
        f"{ACTOR}loss_agg_mode",
        "times ours",
    ),
    ("trl", {"max_grad_norm": 1.0}, "max_grad_norm", "with DeepSpeed only"),
    ("trl", {"whiten_rewards": True}, "whiten_rewards", "in each process"),
    ("trl", TRL, "num_mini_batches", "write algorithm.global_batch_size=64"),
    ("trl", {"gamma": 1.0}, None, ""),
    ("trl", {"num_mini_batches": "many", "gamma": 1.0}, None, ""),
]


@pytest.mark.parametrize(("peer", "options", "path", "reason"), DIFFERENCES)
def test_differences_of_mapped_options_are_printed(
    peer: str,
    options: dict[str, Any],
    path: str | None,
    reason: str,
    capsys: pytest.CaptureFixture[str],
):
    differences = {row["theirs"]: row["why"] for row in convert(peer, options).differences}
    assert list(differences) == ([] if path is None else [path])
    if path is not None:
        assert reason in differences[path]
        assert main.main(["import-config", peer, "source.yaml", "--out", "new.yaml"]) == 0
        out = capsys.readouterr().out
        assert reason in out[out.index("mapped, with differences") :]


SCRIPT = r"""#!/bin/bash
# it's a comment with an apostrophe and an option.of=x \
set -x
export VLLM_USE_V1=1
home=/data
train="['$home/a.parquet', '${home}/b.parquet']"
CUDA_VISIBLE_DEVICES=0,1 python3 -m verl.trainer.main_ppo \
    --config-name='ppo_trainer.yaml' \
    algorithm.adv_estimator=gae \
    # algorithm.gamma=0.5 \
    actor_rollout_ref.actor.clip_ratio=0.2 \
    +actor_rollout_ref.actor.clip_ratio_high=0.28   \
    ++critic.optim.lr=1e-5 \
    data.train_files="$train" data.val_files=$HOME/test.parquet \
    data.prompt_key='a#b' trainer.experiment_name="run"\ 1 \
    trainer.logger='["console","wandb"]' \
    trainer.total_training_steps=3\
    data.seed='${algorithm.nothing}' data.max_prompt_length=$(wc -l x) \
    actor=megatron ~algorithm.lam trainer.my_own= $@ # trailing=comment
"""


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_command_line_overrides_import_like_a_file(ending: str, capsys: pytest.CaptureFixture[str]):
    Path("run.sh").write_bytes(SCRIPT.replace("\n", ending).encode())
    migration = migrate.convert("verl", "run.sh")
    expected = {
        "algorithm.clip_ratio_low": 0.2,
        "algorithm.clip_ratio_high": 0.28,
        "critic.lr": 1e-5,
        "data.train": ["/data/a.parquet", "/data/b.parquet"],
        "data.prompt_key": "a#b",
        "name": "run 1",
        "updates": 3,
    }
    assert {path: migration.options.get(path, "absent") for path in expected} == expected
    unknown = {row["theirs"]: row["value"] for row in migration.unknown}
    assert unknown == {
        "data.val_files": "${HOME}/test.parquet",
        "data.max_prompt_length": "${shell}wc",
        "actor": "megatron",
        "trainer.my_own": "",
    }
    assert "--cfg job" in reasons_of(migration)[
        "hydra.config-name"
    ] and "algorithm.gamma" not in reasons_of(migration)

    lines = [f"{path}={json.dumps(value)}" for path, value in VERL.items()]
    Path("lines.txt").write_text("\n".join(lines).replace('"', "'"))  # one override per line
    assert migrate.convert("verl", "lines.txt").options == convert("verl", VERL).options
    assert main.main(["import-config", "verl", "lines.txt", "--quiet"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["algorithm"]["clip_ratio_low"] == 0.3


def test_conflicting_options_are_reported():
    migration = convert(
        "verl",
        {f"{ACTOR}use_kl_loss": True, f"{ACTOR}kl_loss_type": "kl", "data.train_batch_size": 256},
    )
    assert migration.conflict is not None and "k2, k3 or k1+" in migration.conflict
    migration = convert("verl", {"data.train_batch_size": 100, f"{ACTOR}ppo_mini_batch_size": 64})
    assert (
        migration.conflict is not None
        and "algorithm.rollout_batch_size = 100 is not a multiple" in migration.conflict
    )


def test_references_inside_the_file_are_resolved():
    migration = convert(
        "rlinf",
        {
            "algorithm.loss_type": "actor",
            "runner.seq_length": 12288,
            "data.max_prompt_length": 512,
            "algorithm.sampling_params.max_new_tokens": (
                "${subtract:${runner.seq_length}, ${data.max_prompt_length}}"
            ),
            "actor.model.precision": "bf16",
            "critic.model.precision": "${actor.model.precision}",
            "algorithm.recompute_logprobs": "${not:${rollout.return_logprobs}}",
            "rollout.return_logprobs": False,
            "runner.experiment_name": "ppo-${actor.model.precision}",
            "actor.micro_batch_size": "${.global_batch_size}",
            "actor.global_batch_size": 7,
            "algorithm.value_clip": "${oc.select:algorithm.nowhere,0.3}",
            "algorithm.gamma": "${algorithm.gae_lambda}",
            "algorithm.gae_lambda": "${algorithm.gamma}",
        },
    )
    expected = {
        "algorithm.response_length": 11776,
        "critic.model.dtype": "bfloat16",
        "algorithm.recompute_log_probs": True,
        "name": "ppo-bf16",
        "algorithm.micro_batch_size": 7,
        "algorithm.value_clip": 0.3,
    }
    assert {path: migration.options.get(path) for path in expected} == expected
    assert {row["theirs"] for row in migration.unknown} == {
        "algorithm.gamma",
        "algorithm.gae_lambda",
    }, "each other"


# ------------------------------------------------------------------------------------------ command
def test_experiment_goes_to_stdout_and_table_to_stderr(capsys: pytest.CaptureFixture[str]):
    convert("roll", ROLL)
    assert main.main(["import-config", "roll", "source.yaml"]) == 0
    out, err = capsys.readouterr()
    experiment = yaml.safe_load(out)
    assert (
        out.startswith("# @package _global_\n") and experiment["algorithm"]["clip_ratio_c"] == 1.4
    )
    assert (
        "lambd = 0.95" in err and "algorithm.gae_lambda = 0.95" in err and "no counterpart" in err
    )
    assert "whiten_advantages = true" in err and " (default of roll)" in err
    assert "to be set by hand" in err
    assert main.main(["import-config", "roll", "source.yaml", "--quiet"]) == 0
    assert capsys.readouterr() == (out, "")


def test_json_contains_all_rows(capsys: pytest.CaptureFixture[str]):
    convert("verl", VERL | {"my.own": 1, f"{ROLLOUT}top_k": 50})
    assert main.main(["import-config", "verl", "source.yaml", "--json", "--out", "new.yaml"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert Path("new.yaml").read_text() == report["yaml"]
    assert [row["theirs"] for row in report["unknown"]] == ["my.own"]
    assert [row["theirs"] for row in report["refused"]] == [f"{ROLLOUT}top_k"]
    assert {
        "theirs": "algorithm.lam",
        "value": 0.9,
        "ours": {"algorithm.gae_lambda": 0.9},
        "default": False,
    } in report["mapped"]


FILES = {
    "verl.yaml": yaml.safe_dump(run_helpers.nested(VERL)),
    "roll.yaml": yaml.safe_dump(ROLL),
    "broken.yaml": "algorithm: {gamma: [}\n",
    "empty.yaml": "",
    "list.yaml": "- 1\n",
    "text.yaml": "gamma\n",
    "foreign.yaml": "services: {web: {image: nginx}}\n",
    "code.yaml": "algorithm: !!python/object/apply:os.mkdir [pwned]\n",
    "self.yaml": "algorithm: &a {b: *a}\n",
    "list_self.yaml": "algorithm: {gamma: &a [*a]}\n",
    "bomb.yaml": (
        "a: &a {x: 1, y: 1}\n"
        + "".join(
            f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
            for a, b in zip("abcdefghi", "bcdefghij", strict=True)
        )
    ),
    "hexadecimal.yaml": f"algorithm: {{gamma: 0x{'f' * 6000}}}\n",
}
REFUSALS = [
    ("verl missing.yaml", "missing.yaml: no such file; name a YAML file with verl's options"),
    ("verl broken.yaml", "broken.yaml is not plain YAML"),
    ("verl empty.yaml", "empty.yaml holds no options"),
    ("verl list.yaml", "list.yaml holds no options"),
    ("verl text.yaml", "text.yaml holds no options but text; name a YAML file with verl's"),
    ("verl self.yaml", "self.yaml has a section that contains itself"),
    ("verl list_self.yaml", "list_self.yaml has a section that contains itself"),
    ("verl bomb.yaml", "or more than 10,000 values"),
    ("verl hexadecimal.yaml", "hexadecimal.yaml is not plain YAML"),
    ("verl code.yaml", "code.yaml is not plain YAML"),
    ("verl foreign.yaml", "foreign.yaml holds no option of verl's (it has services.web.image)"),
    ("verl roll.yaml", "roll.yaml looks like ROLL's (24 of its 24 options"),
    ("trl verl.yaml", "looks like verl's .. write import-config verl verl.yaml"),
    (
        "vrl verl.yaml",
        "vrl: no such framework; did you mean verl? there are: rlinf, verl, roll, trl",
    ),
    ("verl verl.yaml --out verl.yaml", "--out verl.yaml: exists; name a new file"),
    ("verl verl.yaml --out verl.yaml/new.yaml", "--out verl.yaml/new.yaml: cannot be written"),
    ("verl", "import-config needs a framework and a file"),
    ("verl verl.yaml more.yaml", "import-config needs a framework and a file"),
]


@pytest.mark.parametrize(("line", "message"), REFUSALS)
def test_refusals_are_one_line_and_write_nothing(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
):
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert main.main(["import-config", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    position = 0
    for part in message.split(" .. "):
        position = err.index(part, position)
    assert {p.name for p in Path.cwd().iterdir()} == set(FILES)
    assert Path("verl.yaml").read_text() == FILES["verl.yaml"]


@pytest.mark.parametrize(
    ("peer", "options"),
    [
        ("verl", {"data.seed": "${multiply:[,2}"}),
        ("verl", {"data.seed": "${subtract:2000-99-99,2}"}),
        ("verl", {"data.seed": f"${{multiply:{'9' * 4000},{'9' * 4000}}}"}),
        (
            "verl",
            {f"data.{a}": [f"${{data.{b}}}"] * 30 for a, b in zip("abcdef", "bcdefg", strict=True)}
            | {"data.g": 1},
        ),
        ("verl", {"trainer.nnodes": math.inf}),
        ("trl", {"total_episodes": math.inf}),
        ("roll", {"actor_train.device_mapping": "list(range(0,1000000000000))"}),
    ],
)
def test_absurd_values_are_reported(peer: str, options: dict[str, Any]):
    known = {"verl": {"algorithm.gamma": 0.5}, "trl": {"gamma": 0.5}, "roll": {"gamma": 0.5}}[peer]
    migration = convert(peer, known | options)
    report = {
        row["theirs"]
        for rows in (migration.unknown, migration.refused, migration.meaningless)
        for row in rows
    }
    assert report & options.keys() and migration.options["algorithm.gamma"] == 0.5


def test_table_has_every_default_of_its_framework():
    for peer in migrate.FRAMEWORKS.values():
        for path in peer.defaults:
            assert migrate.rule_of(peer.table, path) is not None, path
        for path in peer.constants:
            assert path in loader.describe(Config)
    for mode, rules in RULES.items():
        assert all(readers.mode_of(path) in (None, mode) for path in rules.required_options)
