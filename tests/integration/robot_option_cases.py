"""Pairs of values for every option of the algorithm, the model and the environment."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import run_helpers
import tiny_openvla_checkpoint
import tiny_pi0_checkpoint

from embodied_ppo.options import loader
from tests.integration import option_cases

POINT = {"env.id": "toy_envs:toy_envs/Point-v0", "env.num_threads": 0}
FEW = {"env.num_envs": 2, "algorithm.horizon": 4, "algorithm.global_batch_size": 8}
PICTURES = {"env.id": "Pong-v5", **FEW}
# A task that ends within a rollout.
FALLING = {"env.id": "CartPole-v1", "algorithm.horizon": 32}
# A task of our own with a camera and with ranges for its model.
BALANCE = {"env.id": "toy_envs:Balance", "env.num_threads": 1}
# A robot that can be pushed, with control steps of 1 s.
DRIFTER = {"env.id": "toy_envs:Drifter", "env.num_threads": 1, "env.kwargs": {"decimation": 100}}
# A robot with a left and a right side.
WALKING = {"env.id": "Go1Joystick", "env.num_threads": 1}
CAMERA = {**BALANCE, "env.cameras": ["eye"], "env.image_size": 40}
TOKENS = CAMERA | run_helpers.options(
    "env.action_chunk=2 model.policy=token model.width=16 model.bins=8"
)
GAUSSIAN = {**{k: x for k, x in TOKENS.items() if k != "model.bins"}, "model.policy": "gaussian"}
FLOW = {**GAUSSIAN, "model.policy": "flow"}
ROOT = Path(os.environ.get("EMBODIED_PPO_CACHE", tempfile.gettempdir())) / "published"
ONE = {**FEW, "updates": 1}
OPENVLA = {
    **CAMERA,
    **ONE,
    "model.policy": "token",
    "model.checkpoint": str(ROOT / "openvla"),
    "model.bins": 16,
    "model.unnorm_key": "slow",
}
OPENPI = {**CAMERA, **ONE, "model.policy": "flow", "model.checkpoint": str(ROOT / "openpi")}
PI0 = {**CAMERA, **ONE, "model.policy": "flow", "model.checkpoint": str(ROOT / "pi0")}
GROUPS = run_helpers.options("""env.id=AcrobotSwingup-v1 model.actor_obs=[velocity]
    model.critic_obs=[velocity] model.shared_backbone=false""")
NETWORK = f"{Path(__file__).resolve().parents[2] / 'scripts/examples/own_network.py'}:Residual"
COLUMNS = {"algorithm.minibatch_unit": "column"}
RECURRENT = {**COLUMNS, "model.recurrent": "gru", "model.recurrent_size": 4}
CHUNKS = {"env.action_chunk": 2}
# Groups whose members may succeed or fail.
SUCCESSES = POINT | run_helpers.options(
    "env.restart_each_rollout=true algorithm.adv_type=grpo algorithm.group_size=2"
)

CURIOUS = {"algorithm.curiosity.weight": 1.0}

CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    **option_cases.SHARED_CHANGES,
    **option_cases.without_needs("""
        env.id=Swimmer-v4 algorithm.popart=0.1 env.num_envs=8 env.max_episode_steps=5
        env.action_chunk=2 env.realism.action_delay=2 env.realism.joint_delay=[0,2]
        env.realism.obs_delay=[1,3] env.realism.obs_noise=0.5 env.realism.obs_bias=0.5
        env.realism.obs_dropout=0.5 env.realism.action_rate_limit=0.05
        env.restart_each_rollout=true model.history=2 algorithm.curiosity.weight=0.5
        model.hidden=[8] model.activation=relu model.base_inputs=2
        model.shared_backbone=false model.distribution=squashed_gaussian
        model.state_dependent_std=true model.init_log_std=-1.0 model.normalize_obs=false
        model.obs_clip=0.5 model.obs_eps=0.5 algorithm.horizon=16 algorithm.update_epoch=2
        algorithm.global_batch_size=32 algorithm.minibatch_unit=column algorithm.rpo_alpha=0.5
        algorithm.logprob_type=token_level algorithm.value_loss_coef=0.1 algorithm.lr=0.0001
        algorithm.value_lr=0.0001"""),
    "algorithm.noise_correlation": (0.9, {"env.id": "CartpoleSwingupSparse-v1"}),
    "env.task_weights": ([3, 1], {"env.id": ["Swimmer-v4", "Reacher-v4"]}),
    "env.tasks": (["Swimmer-v4", "Reacher-v4"], {"env.id": "Swimmer-v4"}),
    "env.simulator": ("gymnasium", {"env.id": "CartPole-v1", "env.num_threads": 0}),
    "env.obs_keys": (["orientations"], {"env.id": "AcrobotSwingup-v1"}),
    "model.actor_obs": (["orientations"], GROUPS),
    "model.critic_obs": (["orientations", "velocity"], GROUPS),
    "env.cameras": (["eye"], BALANCE),
    "env.image_size": (48, {**BALANCE, "env.cameras": ["eye"]}),
    "env.randomize": (True, {**BALANCE, "env.ranges": {}}),
    "env.ranges": ({"mass": [0.2, 0.4]}, {**BALANCE, "env.randomize": True}),
    "env.commands": ({"lin_vel_x": [1.0, 1.0]}, {"env.id": "Go1Joystick", "env.num_threads": 1}),
    "env.rewards": (
        {"tracking_lin_vel": {"weight": 3.0}},
        {"env.id": "Go1Joystick", "env.num_threads": 1},
    ),
    "env.realism.push_velocity": (1.0, DRIFTER),
    "env.action_mapping": ("clip", {"env.id": "InvertedPendulum-v4"}),
    "env.restart_every": (8, {"env.max_episode_steps": 4}),
    "env.kwargs": ({"far": 3.0}, POINT),
    "model.policy": ("token", CAMERA),
    "model.width": (32, {k: x for k, x in TOKENS.items() if k != "model.width"}),
    "model.depth": (1, TOKENS),
    "model.bins": (16, {k: x for k, x in TOKENS.items() if k != "model.bins"}),
    "model.decode": ("autoregressive", TOKENS),
    "model.temperature": (0.5, TOKENS),
    "model.detach_value": (False, TOKENS),
    "model.freeze_trunk": (True, TOKENS),
    "model.checkpoint": (
        str(ROOT / "pi0"),
        {k: x for k, x in PI0.items() if k != "model.checkpoint"},
    ),
    "model.unnorm_key": ("fast", OPENVLA),
    "model.center_crop": (True, OPENVLA),
    "model.delta_actions": ([0], PI0),
    "model.config_name": ("pi05_droid", {**OPENPI, "model.config_name": "pi05_libero"}),
    "model.discrete_state_input": (True, {**OPENPI, "model.config_name": "pi05_libero"}),
    "model.omit_stop_token": (True, OPENVLA),
    "model.lora_rank": (2, OPENVLA),
    "model.lora_alpha": (4.0, {**OPENVLA, "model.lora_rank": 2}),
    "model.dtype": ("bfloat16", OPENVLA),
    "model.flow_steps": (3, FLOW),
    "model.flow_noise": ("learned", {**FLOW, "model.flow_chain": "sum"}),
    "model.flow_eta": (0.3, FLOW),
    "model.flow_chain": ("sum", FLOW),
    "model.recurrent": ("gru", COLUMNS),
    "model.recurrent_size": (8, RECURRENT),
    "model.network": (NETWORK, {}),
    "algorithm.curiosity.decay": (2, CURIOUS),
    "algorithm.reward_groups": ({"run": {"terms": ["reward_run"], "gamma": 0.5}, "other": {}}, {}),
    "model.network_options": ({"width": 8}, {"model.network": NETWORK}),
    "model.pooling": ("spatial_softmax", PICTURES),
    "model.min_log_std": (-1.0, {"model.init_log_std": -1.0}),
    "model.max_log_std": (-1.0, {"model.init_log_std": -1.0}),
    "model.critic_hidden": ([8], {"model.shared_backbone": False}),
    "algorithm.rollout_epoch": (2, {"env.restart_each_rollout": True}),
    "algorithm.bootstrap_type": ("always", FALLING),
    "algorithm.ratio_level": ("chunk", {"algorithm.logprob_type": "token_level"}),
    "algorithm.group_filter": ("success", SUCCESSES),
    "algorithm.group_filter_rounds": (1, {**SUCCESSES, "algorithm.group_filter": "success"}),
    "algorithm.loss_agg_func": ("seq-mean-token-sum", COLUMNS),
    "algorithm.loss_scale_factor": (
        3.0,
        {**COLUMNS, "algorithm.loss_agg_func": "seq-mean-token-sum-norm"},
    ),
    "algorithm.symmetry": ("augment", WALKING),
    "algorithm.symmetry_coef": (0.1, {**WALKING, "algorithm.symmetry": "loss"}),
    "algorithm.entropy_type": ("token_level", {"algorithm.entropy_bonus": 0.1}),
    "algorithm.reward_type": ("action_level", CHUNKS),
}
# Options for experience that an older policy made -> rollouts between acting and learning.
LAG = {"algorithm.off_policy_correction": 1}

UNCHANGED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "env.num_threads": (2, {}, "speed only: environments are independent"),
    "env.image_layout": ("hwc", {}, "it only decides shapes that leave it open"),
    "env.step_timeout_s": (60.0, {}, "it only ends a run whose simulator hangs"),
    "algorithm.micro_batch_size": (4, {}, "memory only"),
    "algorithm.rollout_micro_batch_size": (2, {}, "memory only"),
    "algorithm.logprob_forward_micro_batch_size": (3, option_cases.IN_LOSS, "memory only"),
    "model.gradient_checkpointing": (True, OPENVLA, "memory only"),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "algorithm.loss_type": ("actor", "write algorithm.loss_type=actor_critic")
}


def write_models() -> None:
    """Write the checkpoints that model.checkpoint names."""
    tiny_pi0_checkpoint.write_checkpoint(ROOT / "pi0")
    tiny_pi0_checkpoint.write_checkpoint(ROOT / "openpi", kind="pi05", asset="own")
    stats = {n: {"action": {"q01": [-x], "q99": [x]}} for n, x in (("slow", 0.1), ("fast", 1.0))}
    folder = tiny_openvla_checkpoint.write_checkpoint(ROOT / "openvla")
    (folder / "dataset_statistics.json").write_text(json.dumps(stats))


def _run(options: dict[str, Any], lag: int) -> option_cases.Rows:
    """Return the metrics of each update of a small run."""
    return run_helpers.tiny_training(run_helpers.tiny_config(options), max_lag=lag)


train = option_cases.cached(_run)
GROUPED = {"algorithm.group_size": 2, "env.restart_each_rollout": True}
GROUPED["env.max_episode_steps"] = 6
OTHER_VALUES: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    # values with other branches than those above
    "algorithm.adv_type": [  # reinforce is reinforce_plus_plus, both with normalize_advantages
        (kind, GROUPED | ({"algorithm.normalize_advantages": False} if kind == "dr_grpo" else {}))
        for kind in ("gae", "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_plus_plus_baseline")
    ],
    "algorithm.reward_norm": [
        (kind, {"algorithm.group_size": 2, "env.restart_each_rollout": True})
        for kind in (None, "batch", "group", "running")
    ],
    "algorithm.loss_agg_func": [
        (kind, {**COLUMNS, **FALLING, "algorithm.global_batch_size": 64})
        for kind in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ]
    + [
        (kind, {**FALLING, "env.restart_each_rollout": True, "algorithm.global_batch_size": 64})
        for kind in ("token-mean", "trajectory-mean")
    ],
    "algorithm.bootstrap_type": [
        (kind, {**FALLING, "env.max_episode_steps": 12}) for kind in ("standard", "always", "never")
    ],
    "algorithm.kl_loss_type": [
        (kind, option_cases.IN_LOSS) for kind in ("abs", "k2", "k3", "k1+", "abs+")
    ],
    "algorithm.kl_penalty": [(kind, option_cases.IN_REWARD) for kind in ("k1", "abs", "k2", "k3")],
    "algorithm.lr_schedule": [
        (kind, {"algorithm.lr": 3e-2, "algorithm.lr_warmup": 1})
        for kind in ("constant", "linear", "cosine", "adaptive")
    ],
    "algorithm.off_policy_correction": [(kind, COLUMNS) for kind in ("token", "sequence")],
    "model.policy": [(kind, CAMERA) for kind in ("actor_critic", "token", "flow", "gaussian")],
    "model.flow_chain": [(kind, FLOW) for kind in ("one", "sum", "mean")],
    "model.distribution": [("auto", {}), ("squashed_gaussian", {}), ("beta", {})],
    "model.activation": [(kind, {}) for kind in ("tanh", "relu", "elu", "silu", "gelu")],
    "algorithm.logprob_type": [
        (kind, CHUNKS) for kind in ("token_level", "action_level", "chunk_level")
    ],
    "algorithm.ratio_level": [
        (kind, {**COLUMNS, **CHUNKS, "env.restart_each_rollout": True})
        for kind in ("token", "chunk", "sequence")
    ],
    "env.action_mapping": [
        (kind, {**POINT, "model.init_log_std": 1.0}) for kind in ("rescale", "clip", "none")
    ],
}


CASES = option_cases.OptionCases(
    mode="embodied",
    base=loader.flat(run_helpers.BASE),
    sections=("algorithm.", "model.", "env."),
    changes=CHANGES,
    reported={},
    unchanged=UNCHANGED,
    refused=REFUSED,
    other_values=OTHER_VALUES,
    lag=LAG,
    config=run_helpers.tiny_config,
    train=train,
    repeat=lambda: _run({}, 0),
    learned=lambda rows: option_cases.final_weights(rows, "weights"),
    outcome=lambda rows: tuple(sorted(rows[-1].items())),
)
