"""RLinf: rules for options whose values depend on other options; the table is rlinf.yaml."""

from __future__ import annotations

import math
from typing import Any

from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.table import REASONS, Answer, Reason, Source, load

POLICIES = {"openvla": "token", "openvla_oft": "token", "openpi": "flow", "openpi_rlinf": "flow"}
"""Their types of models -> ``model.policy``."""


def trains_robot(source: Source) -> bool:
    """Return whether an RLinf file trains a robot policy."""
    if (task := source.get("runner.task_type")) is not None:
        return task == "embodied"
    return source.get("algorithm.loss_type") != "actor" and not source.has("data.")


def mode_of(source: Source) -> str:
    """Return the mode of a file."""
    return "embodied" if trains_robot(source) else "reasoning"


def chunk_size(source: Source) -> int:
    """Return the number of actions of a decision."""
    return int(source.get("actor.model.num_action_chunks", 1))


def updates(source: Source) -> int | None:
    """Return the number of updates, None if the file does not set it."""
    steps, epochs = source.get("runner.max_steps", -1), source.get("runner.max_epochs")
    if not trains_robot(source):
        return steps if steps > 0 else None
    return min(epochs, steps) if epochs and steps > 0 else epochs or (steps if steps > 0 else None)


# ------------------------------------------------------------------------------------ the algorithm
def kl_beta(value: Any, source: Source) -> Answer:
    """Map the KL penalty; their code adds it to the loss (their documentation: to the reward)."""
    return {"algorithm.use_kl_loss": bool(value), "algorithm.kl_loss_coef": value or 0.0}


def reinpp_kl_beta(value: Any, source: Source) -> Answer:
    coefficient = {"algorithm.kl_ctrl.kl_coef": value} if value else {}
    return {"algorithm.use_kl_in_reward": bool(value), **coefficient}


def filter_rewards(value: Any, source: Source) -> Answer:
    """Map RLinf's filter of groups, which does not replace the groups that it drops: one round."""
    return {"algorithm.group_filter": "success", "algorithm.group_filter_rounds": 1}


def per_step(value: Any, source: Source) -> Any:
    """Map a discount per decision to one per primitive step if rewards are given per chunk."""
    of_chunk = source.get("algorithm.reward_type") == "chunk_level" and trains_robot(source)
    if of_chunk and chunk_size(source) > 1 and isinstance(value, (int, float)):
        return round(float(value) ** (1 / chunk_size(source)), 8)
    return value


def reward_type(value: Any, source: Source) -> Answer:
    """Map the reward type; their chunk_level sums the rewards of a chunk without a discount."""
    if value == "chunk_level" and trains_robot(source) and chunk_size(source) > 1:
        value = "chunk_sum"
    return {"algorithm.reward_type": value}


def critic_warmup(value: Any, source: Source) -> Answer:
    """Map a number of optimiser steps to updates."""
    steps = 1.0
    if trains_robot(source) and value:
        sizes, batch = rollout(None, source), source.get("actor.global_batch_size")
        sizes = {} if isinstance(sizes, Reason) else sizes
        samples = sizes.get("env.num_envs", 0) * sizes.get("algorithm.horizon", 0)
        if not samples or not batch:
            return Reason("optimiser steps; write algorithm.critic_warmup, which counts updates")
        steps = source.get("algorithm.update_epoch", 1) * samples / batch
    return {"algorithm.critic_warmup": math.ceil((value or 0) / steps)}


def minibatches(value: Any, source: Source) -> Answer:
    prompts = source.get("data.rollout_batch_size")
    if not prompts or not value or prompts % value:
        return Reason(f"write algorithm.global_batch_size = prompts of an update / {value}")
    return {"algorithm.global_batch_size": prompts // value}


def length(value: Any, source: Source) -> Answer:
    total = updates(source)
    if total is None:
        return REASONS["ELSEWHERE" if trains_robot(source) else "EPOCHS"]
    return {"updates": total}


# ------------------------------------------------------------------------------------ environments
def rollout(value: Any, source: Source) -> Answer:
    """Map environments and steps of a rollout.

    Without auto_reset every pass starts new episodes, so passes multiply the environments here.
    """
    envs = source.get("env.train.total_num_envs")
    steps = source.get("env.train.max_steps_per_rollout_epoch")
    passes = source.get("env.train.rollout_epoch", 1)
    resets = source.get("env.train.auto_reset", False)
    answer: dict[str, Any] = {"env.restart_each_rollout": not resets}
    if envs is not None:
        answer["env.num_envs"] = envs * (1 if resets else passes)
    if steps is not None:
        chunk = chunk_size(source)
        if steps % chunk:
            return Reason(f"not a multiple of actor.model.num_action_chunks = {chunk}")
        answer["algorithm.horizon"] = steps // chunk * (passes if resets else 1)
    return answer


def evaluation(value: Any, source: Source) -> Answer:
    """Map the episodes of an evaluation: passes x environments, the first episode of each."""
    envs = source.get("env.eval.total_num_envs", 1)
    episodes = envs * source.get("env.eval.rollout_epoch", 1)
    return {"evaluation.num_envs": envs, "evaluation.episodes": episodes}


def env_type(value: Any, source: Source) -> Answer:
    """Map the simulator and its suite of tasks."""
    simulator = source.values.get("env.train.env_type", "libero")
    if simulator == "libero":
        suite = source.get("env.train.task_suite_name", "libero_10")
        return {"env.simulator": "libero", "env.id": f"libero/{suite}"}
    return Reason(
        "write env.simulator=torch and env.id=package.module:function, a function that wraps"
        f" {simulator} (docs/tasks.md), or another id"
    )


# ------------------------------------------------------------------------------------------- models
def model_type(value: Any, source: Source) -> Answer:
    """Map the type of the model.

    Their mlp_policy has a separate value network, unnormalised observations and an initial
    standard deviation of e^-0.5.
    """
    if not trains_robot(source):
        return Reason("read from the model directory")
    if value == "mlp_policy":
        return {
            "model.policy": "actor_critic",
            "model.shared_backbone": False,
            "model.normalize_obs": False,
            "model.init_log_std": -0.5,
        }
    if value not in POLICIES:
        return Reason(
            f"{value} does not exist here; the models are model.policy=actor_critic, token, flow"
            " and gaussian (docs/vla.md)"
        )
    answer: dict[str, Any] = {"model.policy": POLICIES[value]}
    if value == "openvla":
        answer["model.decode"] = "autoregressive"
    if value == "openvla_oft" and source.get("actor.model.implement_version") is None:
        answer["model.omit_stop_token"] = True  # their only implementation before this option
    return answer


# ------------------------------------------------------------------------------------------ devices
def component_placement(value: Any, source: Source) -> Answer:
    """Map components to devices; the component inference is the actor here."""
    placement: dict[str, Any] = {}
    for entry, ranks in value.items():
        roles = [word.strip() for word in str(entry).split(",")]
        if isinstance(ranks, dict):
            devices = {"devices": parse_ranks(ranks.get("placement", "all"))}
            if ranks.get("node_group") is not None:
                devices["node"] = ranks["node_group"]
        else:
            devices = parse_ranks(ranks)
        if kept := [role for role in roles if role != "inference"]:
            placement[",".join(kept)] = devices
    return {"cluster.component_placement": placement}


def parse_ranks(text: Any) -> Any:
    """Convert ``0-3,5`` to ["0-3", 5]."""
    parts = [part.strip() for part in str(text).split(",")]
    ranks = [int(part) if part.isdecimal() else part for part in parts]
    return ranks[0] if len(ranks) == 1 else ranks


RLINF = load(
    "rlinf",
    {
        **rules.SHARED,
        **rules.by_name(kl_beta, reinpp_kl_beta, filter_rewards, per_step),
        **rules.by_name(reward_type, critic_warmup, minibatches, length, rollout, evaluation),
        **rules.by_name(env_type, model_type, component_placement),
        "clip_ratio": rules.clip_ratio("algorithm"),
        "adam_betas": rules.adam_betas("actor.optim."),
        "warmup_steps": rules.warmup_steps(),
        "warmup_fraction": rules.warmup_fraction(updates),
        "task_type": lambda value, source: mode_of(source),
        "three_layers": lambda value, source: [value] * 3,
        "node_groups": lambda value, source: {g["label"]: g["node_ranks"] for g in value},
    },
    mode=mode_of,
)
