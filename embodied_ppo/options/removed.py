"""Options of earlier versions that run directories contain: what replaces them, and which values of
a stored run have the effect that is now the only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embodied_envs.base.errors import ConfigError, show


@dataclass(frozen=True)
class Removed:
    """An option that no longer exists.

    Attributes:
        hint: What to write instead, or why nothing has to be written.
        accepted: Values of a stored run that need no replacement; None: all.
        same_as: Option whose value is accepted, too.
    """

    hint: str
    accepted: tuple[Any, ...] | None = None
    same_as: str | None = None

    def accepts(self, value: Any, options: Mapping[str, Any]) -> bool:
        """Return whether a stored run with this value and these other options can continue."""
        if self.same_as is not None and value == options.get(self.same_as):
            return True
        return self.accepted is None or value in self.accepted


_EVALUATE = "write it to embodied-ppo evaluate"
_SAMPLING = "write evaluation.temperature, or top_k or top_p to embodied-ppo evaluate"
_CRITIC = "the critic's optimiser and type are those of the actor, except lr; write algorithm.{}"
_ACTOR_MODEL = "the critic computes as the actor; write actor.model.{}"
_GRADER = "write reward.grader=FILE.py:FUNCTION"
_REWARD_MODEL = "train a reward model beforehand and write reward.model.path=DIR"
_BETAS = "write algorithm.adam_betas=[0.9,0.999]"
_CAPTIONS = "remove it, cloning learns from demonstrations without captions"

REMOVED: dict[str, Removed] = {
    "tracker_project": Removed("set WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME in the environment"),
    "tracker_run_name": Removed("set WANDB_NAME in the environment"),
    "learner_threads": Removed("remove it, one thread computes a minibatch", (1,)),
    "env.stagger": Removed("remove it, first episodes are cut at different steps", (True,)),
    "env.success_key": Removed("return the flag as success in the simulator's info", (None,)),
    "env.on_nan": Removed("remove it, up to 1 % of the steps are masked", ("reset",)),
    "env.realism.obs_keys": Removed("write obs_delay={NAME: VALUE}, obs_noise={..}", (None,)),
    "env.realism.push_interval_s": Removed("remove it, a push follows each 5 to 10 s", ([5, 10],)),
    "model.backbone": Removed("remove it, images are read by convolutions", ("auto", "mlp", "cnn")),
    "model.hidden_gain": Removed("remove it, the gain is sqrt(2)", (1.4142135623730951,)),
    "model.value_gain": Removed("remove it, the gain is 1", (1.0,)),
    # The initialisation is that of a new policy only: all stored runs can continue.
    "model.orthogonal_init": Removed("remove it, new weights are orthogonal"),
    "model.policy_gain": Removed("remove it, the gain is 0.01"),
    "model.heads": Removed("remove it, a small model has 4 heads", (4,)),
    "model.word_buckets": Removed("remove it, there are 1024 buckets of words", (1024,)),
    "algorithm.whiten_subtract_mean": Removed("remove it, rewards keep their mean", (False,)),
    "algorithm.whiten_after_kl": Removed("remove it, whitening precedes the penalty", (False,)),
    # Values of stored runs of these are merged into other options, see ``without_removed``.
    "model.std_function": Removed("write model.state_dependent_std=softplus, or true for exp"),
    "model.obs_std_eps": Removed("write model.obs_eps=[1e-8,VALUE]"),
    "algorithm.adam_beta1": Removed(_BETAS),
    "algorithm.adam_beta2": Removed(_BETAS),
    "algorithm.chunk_reward": Removed("write algorithm.reward_type=chunk_sum for the plain sum"),
    "algorithm.bptt_length": Removed(
        "remove it, gradients pass through algorithm.horizon", (None,), same_as="algorithm.horizon"
    ),
    "evaluation.seed": Removed("measure with other seeds: embodied-ppo evaluate seed=N", (0,)),
    "evaluation.response_length": Removed(_EVALUATE, (None,), same_as="algorithm.response_length"),
    "evaluation.top_k": Removed(_EVALUATE, (0,)),
    "evaluation.top_p": Removed(_EVALUATE, (1,)),
    "evaluation.min_p": Removed(_SAMPLING, (0,)),
    "evaluation.repetition_penalty": Removed(_SAMPLING, (1,)),
    "evaluation.video_steps": Removed("remove it, a video shows at most 300 steps"),
    "evaluation.video_size": Removed("remove it, a video is 640 pixels wide"),
    "critic.use_critic_model": Removed("remove it, algorithm.adv_type=gae has a critic"),
    "critic.concurrent": Removed("remove it, the critic learns before the actor"),
    "critic.model.architecture": Removed("the critic is a copy of the actor; remove it", ({},)),
    "critic.model.dtype": Removed(_ACTOR_MODEL.format("dtype"), (), same_as="actor.model.dtype"),
    "critic.model.gradient_checkpointing": Removed(_ACTOR_MODEL.format("gradient_checkpointing")),
    **{
        f"critic.{name}": Removed(_CRITIC.format(name), (None,), same_as=f"algorithm.{name}")
        for name in ("lr_schedule", "lr_end", "lr_warmup", "max_grad_norm", "weight_decay")
    },
    "rollout.slots": Removed("write algorithm.rollout_micro_batch_size", (256,)),
    "rollout.stop_token_ids": Removed(
        "write rollout.stop=[TEXT], or eos_token_id of the model", ([],)
    ),
    "rollout.overlong_penalty": Removed("remove it, the largest penalty is 1", (1,)),
    "data.suffix": Removed("write it at the end of each prompt", (None,)),
    "data.system": Removed("write it as the first of each prompt's messages", (None,)),
    "reward.path": Removed(_GRADER),
    "reward.name": Removed(_GRADER),
    "reward.format": Removed("write reward.grader=FILE.py:FUNCTION that grades it", (None,)),
    "reward.format_weight": Removed("write reward.grader=FILE.py:FUNCTION that grades it"),
    **{f"reward.model.{name}": Removed(_REWARD_MODEL) for name in ("lr", "steps", "batch_size")},
    "reward.model.pairs": Removed(_REWARD_MODEL, (0,)),
    "warm_start.batch_size": Removed("remove it, a step has 128 demonstrations", (128,)),
    "warm_start.lr": Removed("remove it, the learning rate is 1e-3", (1e-3,)),
    "warm_start.forget": Removed("remove it, data.task sets it", (None, 0.575)),
    # Captions trained the policy before its first checkpoint only: all stored runs can continue.
    "cloning.captions": Removed(_CAPTIONS),
    "cloning.caption_coef": Removed(_CAPTIONS),
    "cloning.coef": Removed(
        "write algorithm.use_kl_loss=true, which stays close to the clone", (0,)
    ),
    "distillation.update_epoch": Removed("remove it, there are 4 passes over a rollout", (4,)),
    "distillation.global_batch_size": Removed(
        "remove it, a minibatch has up to 256 samples", (256,)
    ),
    "distillation.teacher_share": Removed("write distillation.teacher_share_updates", (1.0,)),
    "cluster.start_timeout_s": Removed("remove it, a start waits 300 s"),
    "cluster.weights": Removed("remove it, the placement decides"),
    "cluster.check_weights": Removed("remove it, each process receives the learner's weights"),
    "matmul_precision": Removed("remove it, float32 products are computed in float32"),
    "cluster.address": Removed("set RAY_ADDRESS to auto or HOST:6379 in the environment"),
}
"""Options that were removed after runs were written with them, by path."""


def without_removed(options: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return stored options, path -> value, without those of earlier versions.

    Args:
        options: All options of a layer.
        label: The layer, for messages.

    Raises:
        ConfigError: A removed option has a value with another effect.
    """
    current = {path: value for path, value in options.items() if path not in REMOVED}
    for path in options.keys() & REMOVED.keys():
        if not REMOVED[path].accepts(options[path], options):
            raise ConfigError(
                f"use the version that trained the run: {path} = {show(options[path])} ({label})"
                f" was removed; in new runs {REMOVED[path].hint}"
            )
    return current | _merged(options)


def _merged(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that replace two of earlier versions."""
    merged: dict[str, Any] = {}
    if (file := options.get("reward.path")) is not None:
        merged["reward.grader"] = f"{file}:{options.get('reward.name', 'compute_score')}"
    if options.get("model.std_function") == "softplus" and options["model.state_dependent_std"]:
        merged["model.state_dependent_std"] = "softplus"
    if std_eps := options.get("model.obs_std_eps"):
        merged["model.obs_eps"] = [options["model.obs_eps"], std_eps]
    if "algorithm.adam_beta1" in options:
        betas = (options[f"algorithm.adam_beta{i}"] for i in (1, 2))
        merged["algorithm.adam_betas"] = [*betas]
    if options.get("algorithm.chunk_reward") == "sum":
        merged["algorithm.reward_type"] = "chunk_sum"
    return merged
