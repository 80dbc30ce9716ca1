"""Pairs of values for the tests of options: those of both modes, and the tables of one mode."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import run_helpers

from embodied_ppo.options.schema import Config, Mode

# Metrics of each update of a training run.
Rows = list[dict[str, float]]
# Options under which an option is read, set in both runs of a comparison.
Needs = dict[str, Any]

IN_REWARD = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 1.0}
ADAPTIVE_KL = {**IN_REWARD, "algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_penalty": "k2"}
IN_LOSS = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": 1.0}


def without_needs(text: str) -> dict[str, tuple[Any, Needs]]:
    """Return entries of ``OptionCases.changes`` that need no other option, see ``options``."""
    return {path: (value, {}) for path, value in run_helpers.options(text).items()}


# Entries of ``OptionCases.changes`` that are the same in both modes.
SHARED_CHANGES: dict[str, tuple[Any, Needs]] = {
    **without_needs("""algorithm.adv_type=reinforce_plus_plus algorithm.gamma=0.5
        algorithm.gae_lambda=0.5
        algorithm.gae_lambda_value=0.5 algorithm.normalize_advantages=false
        algorithm.advantage_clip=0.5 algorithm.reward_clip=0.1 algorithm.reward_norm=batch
        algorithm.whiten_rewards=true algorithm.group_size=2 algorithm.policy_loss=cispo
        algorithm.clip_ratio_low=0.01 algorithm.clip_ratio_high=0.01 algorithm.clip_ratio_c=1.01
        algorithm.entropy_bonus=0.1 algorithm.target_kl_stop=1.0e-06 algorithm.use_kl_loss=true
        algorithm.use_kl_in_reward=true algorithm.value_clip=0.01 algorithm.huber_delta=0.01
        algorithm.critic_warmup=1 algorithm.lr_schedule=linear algorithm.lr_warmup=2
        algorithm.max_grad_norm=0.01 algorithm.adam_betas=[0.5,0.9] algorithm.adam_eps=0.1
        algorithm.weight_decay=0.1"""),
    "algorithm.reward_clip_order": (
        "after_norm",
        {"algorithm.reward_clip": 0.5, "algorithm.reward_norm": "batch"},
    ),
    "algorithm.reward_norm_by": ("mean", {"algorithm.reward_norm": "batch"}),
    "algorithm.entropy_schedule": ("linear", {"algorithm.entropy_bonus": 0.1}),
    "algorithm.entropy_target": (0.0, {"algorithm.entropy_bonus": 0.01}),
    "algorithm.kl_loss_coef": (0.1, IN_LOSS),
    "algorithm.kl_loss_type": ("k2", IN_LOSS),
    "algorithm.kl_penalty": ("abs", IN_REWARD),
    "algorithm.kl_ctrl.type": ("adaptive", IN_REWARD),
    "algorithm.kl_ctrl.kl_coef": (0.1, IN_REWARD),
    "algorithm.kl_ctrl.horizon": (20, ADAPTIVE_KL),
    "algorithm.kl_ctrl.target_kl": (1e-9, ADAPTIVE_KL),
    "algorithm.off_policy_correction": ("token", {}),  # with one rollout of lag, see LAG
    "algorithm.off_policy_cap": (0.5, {"algorithm.off_policy_correction": "token"}),
    "algorithm.critic_warmup_variance": (
        1e-6,
        run_helpers.options("""updates=5 algorithm.critic_warmup=5 algorithm.gae_lambda_value=1.0
            algorithm.update_epoch=20 algorithm.value_clip=null"""),
    ),
    "algorithm.lr_end": (0.5, {"algorithm.lr_schedule": "cosine"}),
    "algorithm.desired_kl": (1e-6, {"algorithm.lr_schedule": "adaptive"}),
}


@dataclass(frozen=True)
class OptionCases:
    """The options that one mode reads, each in exactly one of the first four tables.

    Attributes:
        mode: The mode.
        base: Options of every run, dotted paths.
        sections: Prefixes of the options that need a case.
        changes: Option -> (changed value, needs); the trained weights must differ.
        reported: Option -> (changed value, needs, metric that must differ); the weights are equal.
        unchanged: Option -> (changed value, needs, reason why no number differs).
        refused: Option -> (refused value, pattern of the message).
        other_values: Option -> further (value, needs); all of them must have different outcomes.
        same_values: Option -> pairs of ``other_values`` that are equal by definition.
        lag: Option that needs off-policy experience -> rollouts between acting and learning.
        critic_options: Prefixes of the options that change the critic and not the actor.
        config: Return the checked config of some options.
        train: Return the metrics of a run with some options and a lag; runs are cached.
        repeat: As ``train`` without options, not cached.
        learned: Return sums over the weights after training: of the actor, then of the critic.
        outcome: Return what ``other_values`` compares.
    """

    mode: Mode
    base: Mapping[str, Any]
    sections: tuple[str, ...]
    changes: Mapping[str, tuple[Any, Needs]]
    reported: Mapping[str, tuple[Any, Needs, str]]
    unchanged: Mapping[str, tuple[Any, Needs, str]]
    refused: Mapping[str, tuple[Any, str]]
    other_values: Mapping[str, list[tuple[Any, Needs]]]
    config: Callable[[dict[str, Any]], Config]
    train: Callable[[dict[str, Any], int], Rows]
    repeat: Callable[[], Rows]
    learned: Callable[[Rows], tuple[float, ...]]
    outcome: Callable[[Rows], tuple[Any, ...]]
    same_values: Mapping[str, list[tuple[str, str]]] = field(default_factory=dict)
    lag: Mapping[str, int] = field(default_factory=dict)
    critic_options: tuple[str, ...] = ()


def cached(run: Callable[[dict[str, Any], int], Rows]) -> Callable[..., Rows]:
    """Return ``run`` with a cache of its results; the lag is optional."""

    @functools.cache
    def run_text(options: str, lag: int) -> Rows:
        return run(json.loads(options), lag)

    def train(options: dict[str, Any], lag: int = 0) -> Rows:
        return run_text(json.dumps(options, sort_keys=True), lag)

    return train


def final_weights(rows: Rows, *tags: str) -> tuple[float, ...]:
    """Return the sums over the weights after training; those of every update must be finite."""
    assert all(math.isfinite(row[tag]) for row in rows for tag in tags)
    return tuple(rows[-1][tag] for tag in tags)
