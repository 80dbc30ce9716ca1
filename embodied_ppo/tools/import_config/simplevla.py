"""SimpleVLA-RL: rules of its launch scripts, which are verl's with options of robots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from embodied_envs.base.errors import ConfigError, shorten
from embodied_ppo.tools.import_config.rlinf_robot import CAMERAS, SUITES, filters_mixed_groups
from embodied_ppo.tools.import_config.table import Answer, Framework, Reason, Rule, Source, load

MODEL = "actor_rollout_ref.model"
LONGEST = 512
"""Steps of an episode of every suite of LIBERO there."""
ROUNDS = 100
"""Rounds of the filter here; theirs continues until the batch is full."""


def chunk_size(source: Source) -> int:
    return int(source.get(f"{MODEL}.action_chunks_len", 8))


def chunk(value: Any, source: Source) -> Answer:
    """Map the actions of a decision, and the length of an episode in decisions."""
    horizon = -(-LONGEST // chunk_size(source))
    answer: dict[str, Any] = {"env.action_chunk": value, "algorithm.horizon": horizon}
    return answer | {"env.max_episode_steps": LONGEST, "algorithm.micro_batch_size": horizon}


def suite(value: Any, source: Source) -> Answer:
    name = source.get("data.task_suite_name", "libero_10")
    kwargs = {"settle_steps": source.get("actor_rollout_ref.rollout.num_steps_wait", 10)}
    return {
        "env.simulator": "libero",
        "env.id": f"libero/{name}",
        "env.kwargs": kwargs | {"draw_tasks": True},
    }


def episodes(value: Any, source: Source) -> Answer:
    """Map the prompts of an update: as many simulators, each for all members of a group."""
    passes = int(source.get("data.n_samples", 8))
    return {"env.num_envs": value, "algorithm.rollout_epoch": passes, "evaluation.num_envs": value}


def accuracy_filter(value: Any, source: Source) -> Answer:
    """Map the filter of groups by the mean of their success; dropped groups are replaced."""
    bounds = (source.get(f"data.accuracy_{x}_bound") for x in ("lower", "upper"))
    if not filters_mixed_groups(*bounds, size=int(source.get("data.n_samples", 8))):
        return Reason("keeps other groups than those of unequal success")
    return {"algorithm.group_filter": "success", "algorithm.group_filter_rounds": ROUNDS}


def trajectories(value: Any, source: Source) -> Answer:
    """Map the trajectories of an optimiser step to decisions."""
    return {"algorithm.global_batch_size": value * -(-LONGEST // chunk_size(source))}


def images(value: Any, source: Source) -> Answer:
    return {"env.cameras": CAMERAS[: 1 + (value > 1)]}


def unnorm_key(value: Any, source: Source) -> Answer:
    """Map the name of the statistics; their code adds the suffix of LIBERO's data sets."""
    suffix = "" if str(value).endswith("_no_noops") else "_no_noops"
    return {"model.unnorm_key": f"{value}{suffix}"}


def is_simplevla(source: Source) -> bool:
    return source.get(f"{MODEL}.vla") is not None


def simplevla(source: Source, file: str, rules: Mapping[str, Rule]) -> Framework:
    """Return the framework of a script. Raises ConfigError for a simulator without adapter."""
    name = source.get("data.task_suite_name", "libero_10")
    if name not in SUITES:
        raise ConfigError(
            f"name a script for LIBERO: {shorten(file, 90)} trains on {name}, which does not exist"
            " here"
        )
    own = (chunk, suite, episodes, accuracy_filter, trajectories, images, unnorm_key)
    hint = "epochs x 50 states x tasks / data.train_batch_size"
    return load(
        "simplevla",
        {**rules, **{function.__name__: function for function in own}},
        mode=lambda source: "embodied",
        to_write=lambda source: {"updates": hint},
    )
