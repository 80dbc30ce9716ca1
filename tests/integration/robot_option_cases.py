"""Pairs of values for every option of the algorithm, the model and the environment."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import run_helpers
import tiny_vlm_checkpoints

from embodied_ppo.config import loader
from tests.integration.option_cases import OptionCases

POINT = {"env.id": "toy_envs/Point-v0", "env.num_threads": 0}
PICTURES = {
    "env.id": "Pong-v5",
    "env.num_envs": 2,
    "algorithm.horizon": 4,
    "algorithm.global_batch_size": 8,
}
FALLING = {"env.id": "CartPole-v1", "algorithm.horizon": 32}
"""A task that ends within a rollout."""
EYE = {"env.id": "toy_envs:Balance", "env.num_threads": 1}
"""A task of our own with a camera and with ranges for its model."""
SEES = {**EYE, "env.cameras": ["eye"], "env.image_size": 40}
TOKENS = {
    **SEES,
    "env.action_chunk": 2,
    "model.policy": "token",
    "model.width": 16,
    "model.bins": 8,
}
GAUSSIAN = {**{k: x for k, x in TOKENS.items() if k != "model.bins"}, "model.policy": "gaussian"}
FLOW = {**GAUSSIAN, "model.policy": "flow"}
ROOT = Path(os.environ.get("EMBODIED_PPO_CACHE", tempfile.gettempdir())) / "published"
FEW = {"env.num_envs": 2, "algorithm.horizon": 4, "algorithm.global_batch_size": 8, "updates": 1}
VLM = {
    **SEES,
    **FEW,
    "model.policy": "token",
    "model.checkpoint": str(ROOT / "smolvlm"),
    "model.bins": 16,
}
OPENVLA = {**VLM, "model.checkpoint": str(ROOT / "openvla"), "model.unnorm_key": "slow"}
COLUMNS = {"algorithm.minibatch_unit": "column"}
CHUNKS = {"env.action_chunk": 2}
IN_REWARD = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 1.0}
ADAPTIVE_KL = {**IN_REWARD, "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_penalty": "k2"}
IN_LOSS = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 1.0}

CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "env.id": ("Swimmer-v4", {}),
    "env.simulator": ("gymnasium", {"env.id": "CartPole-v1", "env.num_threads": 0}),
    "env.num_envs": (8, {}),
    "env.max_episode_steps": (5, {}),
    "env.action_chunk": (2, {}),
    "env.obs_keys": (["orientations"], {"env.id": "AcrobotSwingup-v1"}),
    "env.cameras": (["eye"], EYE),
    "env.image_size": (48, {**EYE, "env.cameras": ["eye"]}),
    "env.randomize": (True, {**EYE, "env.ranges": {}}),
    "env.ranges": ({"mass": [0.2, 0.4]}, {**EYE, "env.randomize": True}),
    "env.action_mapping": ("clip", {"env.id": "InvertedPendulum-v4"}),
    "env.restart_each_rollout": (True, {}),
    "env.restart_every": (8, {}),
    "env.stagger": (False, {"env.max_episode_steps": 8}),
    "env.kwargs": ({"far": 3.0}, POINT),
    "model.policy": ("token", SEES),
    "model.width": (32, {k: x for k, x in TOKENS.items() if k != "model.width"}),
    "model.depth": (1, TOKENS),
    "model.heads": (2, TOKENS),
    "model.bins": (16, {k: x for k, x in TOKENS.items() if k != "model.bins"}),
    "model.decode": ("autoregressive", TOKENS),
    "model.temperature": (0.5, TOKENS),
    "model.detach_value": (False, TOKENS),
    "model.word_buckets": (64, TOKENS),
    "model.freeze_trunk": (True, TOKENS),
    "model.checkpoint": (
        str(ROOT / "smolvlm"),
        {k: x for k, x in VLM.items() if k != "model.checkpoint"},
    ),
    "model.unnorm_key": ("fast", OPENVLA),
    "model.lora_rank": (2, VLM),
    "model.lora_alpha": (4.0, {**VLM, "model.lora_rank": 2}),
    "model.dtype": ("bfloat16", VLM),
    "model.flow_steps": (3, FLOW),
    "model.flow_noise": ("learned", {**FLOW, "model.flow_chain": "sum"}),
    "model.flow_eta": (0.3, FLOW),
    "model.flow_chain": ("sum", FLOW),
    "model.backbone": ("mlp", PICTURES),
    "model.hidden": ([8], {}),
    "model.activation": ("relu", {}),
    "model.layer_norm": (True, {}),
    "model.shared_backbone": (False, {}),
    "model.distribution": ("squashed_gaussian", {}),
    "model.state_dependent_std": (True, {}),
    "model.init_log_std": (-1.0, {}),
    "model.min_log_std": (-1.0, {"model.init_log_std": -1.0}),
    "model.max_log_std": (-1.0, {"model.init_log_std": -1.0}),
    "model.orthogonal_init": (False, {}),
    "model.hidden_gain": (0.5, {}),
    "model.policy_gain": (1.0, {}),
    "model.value_gain": (0.0, {}),
    "model.normalize_obs": (False, {}),
    "model.obs_clip": (0.5, {}),
    "algorithm.horizon": (16, {}),
    "algorithm.update_epoch": (2, {}),
    "algorithm.global_batch_size": (32, {}),
    "algorithm.minibatch_unit": ("column", {}),
    "algorithm.adv_type": ("reinforce_plus_plus", {}),
    "algorithm.gamma": (0.5, {}),
    "algorithm.gae_lambda": (0.5, {}),
    "algorithm.normalize_advantages": (False, {}),
    "algorithm.advantage_clip": (0.5, {}),
    "algorithm.reward_clip": (0.1, {}),
    "algorithm.reward_clip_order": (
        "after_norm",
        {"algorithm.reward_clip": 0.5, "algorithm.reward_norm": "batch"},
    ),
    "algorithm.reward_norm": ("batch", {}),
    "algorithm.reward_shift": (True, {"algorithm.reward_norm": "batch"}),
    "algorithm.reward_scale": (True, {"algorithm.reward_norm": "batch"}),
    "algorithm.whiten_rewards": (True, {}),
    "algorithm.whiten_subtract_mean": (True, {"algorithm.whiten_rewards": True}),
    "algorithm.whiten_after_kl": (True, {"algorithm.whiten_rewards": True, **IN_REWARD}),
    "algorithm.group_size": (2, {}),
    "algorithm.bootstrap_type": ("always", FALLING),
    "algorithm.clip_ratio_low": (0.01, {}),
    "algorithm.clip_ratio_high": (0.01, {}),
    "algorithm.clip_ratio_c": (1.01, {}),
    "algorithm.entropy_bonus": (0.1, {}),
    "algorithm.entropy_target": (0.0, {"algorithm.entropy_bonus": 0.01}),
    "algorithm.loss_agg_func": ("seq-mean-token-sum", COLUMNS),
    "algorithm.loss_scale_factor": (
        3.0,
        {**COLUMNS, "algorithm.loss_agg_func": "seq-mean-token-sum-norm"},
    ),
    "algorithm.logprob_type": ("token_level", {}),
    "algorithm.entropy_type": ("token_level", {"algorithm.entropy_bonus": 0.1}),
    "algorithm.target_kl_stop": (1e-6, {}),
    "algorithm.use_kl_loss": (True, {}),
    "algorithm.kl_loss_coef": (0.1, IN_LOSS),
    "algorithm.kl_loss_type": ("k2", IN_LOSS),
    "algorithm.use_kl_in_reward": (True, {}),
    "algorithm.kl_penalty": ("abs", IN_REWARD),
    "algorithm.kl_ctrl.type": ("adaptive", IN_REWARD),
    "algorithm.kl_ctrl.kl_coef": (0.1, IN_REWARD),
    "algorithm.kl_ctrl.horizon": (20, ADAPTIVE_KL),
    "algorithm.kl_ctrl.target_kl": (1e-9, ADAPTIVE_KL),
    "algorithm.off_policy_correction": ("token", {}),  # with one rollout of lag, see LAG
    "algorithm.off_policy_cap": (0.5, {"algorithm.off_policy_correction": "token"}),
    "algorithm.reward_type": ("action_level", CHUNKS),
    "algorithm.chunk_reward": ("sum", CHUNKS),
    "algorithm.value_clip": (0.01, {}),
    "algorithm.huber_delta": (0.01, {}),
    "algorithm.value_loss_coef": (0.1, {}),
    "algorithm.critic_warmup": (1, {}),
    "algorithm.lr": (1e-4, {}),
    "algorithm.value_lr": (1e-4, {}),
    "algorithm.lr_schedule": ("linear", {}),
    "algorithm.lr_end": (0.5, {"algorithm.lr_schedule": "cosine"}),
    "algorithm.lr_warmup": (2, {}),
    "algorithm.desired_kl": (1e-6, {"algorithm.lr_schedule": "adaptive"}),
    "algorithm.max_grad_norm": (0.01, {}),
    "algorithm.adam_beta1": (0.5, {}),
    "algorithm.adam_beta2": (0.9, {}),
    "algorithm.adam_eps": (0.1, {}),
    "algorithm.weight_decay": (0.1, {}),
}
LAG = {"algorithm.off_policy_correction": 1}
"""Options for experience that an older policy made -> rollouts between acting and learning."""

REPORTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "env.success_key": (
        "near",
        {**POINT, "env.kwargs": {"far": 0.8}, "algorithm.horizon": 16},
        "rollout/success",
    ),
}

UNCHANGED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "env.num_threads": (2, {}, "speed only: environments are independent"),
    "env.step_timeout_s": (60.0, {}, "it only ends a run whose simulator hangs"),
    "algorithm.micro_batch_size": (4, {}, "memory only"),
    "algorithm.rollout_micro_batch_size": (3, {}, "memory only"),
    "algorithm.logprob_forward_micro_batch_size": (3, IN_LOSS, "memory only"),
    "model.gradient_checkpointing": (True, VLM, "memory only"),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "algorithm.loss_type": ("actor", "is the loss of a policy without a value head"),
}


def write_models() -> None:
    """Write the checkpoints that model.checkpoint names."""
    tiny_vlm_checkpoints.write_checkpoint("smolvlm", ROOT / "smolvlm")
    stats = {
        name: {"action": {"q01": [-x], "q99": [x]}} for name, x in (("slow", 0.1), ("fast", 1.0))
    }
    (
        tiny_vlm_checkpoints.write_checkpoint("openvla", ROOT / "openvla")
        / "dataset_statistics.json"
    ).write_text(json.dumps(stats))


@functools.cache
def _train(options: str, lag: int = 0) -> list[dict[str, float]]:
    return run_helpers.tiny_training(run_helpers.tiny_config(json.loads(options)), max_lag=lag)


def train(options: dict[str, Any], lag: int = 0) -> list[dict[str, float]]:
    """Return the metrics of each update of a small run, which is cached."""
    return _train(json.dumps(options, sort_keys=True), lag)


def _learned(rows: list[dict[str, float]]) -> tuple[float]:
    assert all(math.isfinite(row["weights"]) for row in rows)
    return (rows[-1]["weights"],)


OTHER_VALUES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    # values with other branches than those above
    "algorithm.adv_type": [  # reinforce is reinforce_plus_plus, both with normalize_advantages
        (
            kind,
            {
                "algorithm.group_size": 2,
                "env.restart_each_rollout": True,
                "env.max_episode_steps": 6,
            },
        )
        for kind in ("gae", "grpo", "rloo", "reinforce", "reinforce_plus_plus_baseline")
    ],
    "algorithm.reward_norm": [
        (kind, {"algorithm.group_size": 2, "env.restart_each_rollout": True})
        for kind in (None, "batch", "group", "running")
    ],
    "algorithm.loss_agg_func": [
        (kind, {**COLUMNS, **FALLING, "algorithm.global_batch_size": 64})
        for kind in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ],
    "algorithm.kl_loss_type": [(kind, IN_LOSS) for kind in ("abs", "k2", "k3", "k1+", "abs+")],
    "algorithm.kl_penalty": [(kind, IN_REWARD) for kind in ("k1", "abs", "k2", "k3")],
    "algorithm.lr_schedule": [(kind, {}) for kind in ("constant", "linear", "cosine", "adaptive")],
    "algorithm.off_policy_correction": [(kind, COLUMNS) for kind in ("token", "sequence")],
    "model.policy": [(kind, SEES) for kind in ("actor_critic", "token", "flow", "gaussian")],
    "model.flow_chain": [(kind, FLOW) for kind in ("one", "sum", "mean")],
    "model.distribution": [("auto", {}), ("squashed_gaussian", {})],
    "model.activation": [(kind, {}) for kind in ("tanh", "relu", "elu", "silu", "gelu")],
    "algorithm.logprob_type": [
        (kind, CHUNKS) for kind in ("token_level", "action_level", "chunk_level")
    ],
    "env.action_mapping": [
        (kind, {**POINT, "model.init_log_std": 1.0}) for kind in ("rescale", "clip", "none")
    ],
}


CASES = OptionCases(
    mode="embodied",
    base=loader.flat(run_helpers.BASE),
    sections=("algorithm.", "model.", "env."),
    changes=CHANGES,
    reported=REPORTED,
    unchanged=UNCHANGED,
    refused=REFUSED,
    other_values=OTHER_VALUES,
    lag=LAG,
    config=run_helpers.tiny_config,
    train=train,
    repeat=lambda: run_helpers.tiny_training(run_helpers.tiny_config({})),
    learned=_learned,
    outcome=lambda rows: tuple(sorted(rows[-1].items())),
)
