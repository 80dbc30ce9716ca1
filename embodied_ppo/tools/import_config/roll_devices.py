"""ROLL: devices and batch sizes, which count responses of one device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from embodied_envs.base.errors import show
from embodied_ppo.tools.import_config.table import Answer, Reason, Rule, Source

MAX_DEVICES = 100_000
"""Largest number of devices in a range."""
DEVICES = re.compile(r"list\(range\((\d+),(\d+)(?:,(\d+))?\)\)|(?:list\()?\[(\d+(?:,\d+)*)\]\)?")
PARALLEL_KINDS = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
ROLES = {
    "actor_train": "actor",
    "actor_infer": "rollout,reward",  # rewards are graded in the rollout processes
    "reference": "reference",
    "critic": "critic",
}


def has_critic(source: Source) -> bool:
    return source.get("adv_estimator", "gae") == "gae"


def has_penalty(source: Source) -> bool:
    return bool(source.get("add_token_level_kl", False))


def has_reference(source: Source) -> bool:
    return bool(source.get("use_kl_loss", False)) or has_penalty(source)


def parse_devices(value: Any) -> list[int] | None:
    """Parse ``list(range(0,8))``, ``[0, 1]`` and sums of these; None for other text."""
    if isinstance(value, list) and all(type(d) is int for d in value):
        return sorted(value)
    devices: list[int] = []
    for part in "".join(str(value).split()).split("+"):
        match = DEVICES.fullmatch(part)
        if not match or (match[2] and int(match[2]) - int(match[1]) > MAX_DEVICES):
            return None
        devices += (
            [int(d) for d in match[4].split(",")]
            if match[4]
            else range(int(match[1]), int(match[2]), int(match[3] or 1) or 1)
        )
    return sorted(set(devices))


def compact_ranges(devices: Sequence[int]) -> Any:
    """Convert [0, 1, 2, 5] to ["0-2", 5]."""
    starts = [d for d in devices if d - 1 not in devices]
    ends = [d for d in devices if d + 1 not in devices]
    ranges = [a if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ranges[0] if len(ranges) == 1 else ranges


def placement(value: Any, source: Source) -> Answer:
    """Map the devices of all roles."""
    unused = {} if has_critic(source) else {"critic"}
    unused = {*unused, *(() if has_reference(source) else ("reference",))}
    devices_of_roles: dict[str, Any] = {}
    last = 0
    for name in (name for name in ROLES if name not in unused):
        mapping = source.get(f"{name}.device_mapping")
        if not (devices := parse_devices(mapping)):
            problem = "is missing" if mapping is None else f"= {show(mapping)} is not understood"
            return Reason(f"{name}.device_mapping {problem}; write cluster.component_placement")
        devices_of_roles[ROLES[name]] = compact_ranges(devices)
        last = max(last, *devices)
    if set(map(str, devices_of_roles.values())) == {"0"}:
        return Reason("one device needs one process: placement=local, the default")
    devices_per_node = int(source.get("num_gpus_per_node", 8))
    return {
        "cluster.component_placement": devices_of_roles,
        "cluster.num_nodes": last // devices_per_node + 1,
        "cluster.devices_per_node": devices_per_node,
    }


def reference_devices(value: Any, source: Source) -> Answer:
    if has_reference(source):
        return placement(value, source)
    return Reason("without a KL term there is no reference")


def group_size(source: Source) -> int:
    return int(source.get("num_return_sequences_in_group", 1))


def count_responses(role: str, source: Source) -> int | None:
    """Return the responses of an optimiser step, None if the file does not define them.

    They are per_device_train_batch_size x gradient_accumulation_steps x copies of the model.
    """
    if not (devices := parse_devices(source.get(f"{role}.device_mapping"))):
        return None
    config = f"{role}.strategy_args.strategy_config"
    split = math.prod(int(source.get(f"{config}.{kind}_size", 1)) for kind in PARALLEL_KINDS)
    batch = int(source.get(f"{role}.training_args.per_device_train_batch_size", 8))
    steps = int(source.get(f"{role}.training_args.gradient_accumulation_steps", 1))
    return batch * steps * max(1, len(devices) // split)


def batch(role: str) -> Rule:
    """Map the responses of an optimiser step, over all devices, to prompts."""

    def rule(value: Any, source: Source) -> Any:
        responses, group = count_responses(role, source), group_size(source)
        if responses is None or responses % group:
            return Reason("responses of one device; write {to}, in prompts of an optimiser step")
        return responses // group

    return rule


def steps_per_update(role: str) -> Callable[[Source], float | None]:
    def steps(source: Source) -> float | None:
        responses = count_responses(role, source)
        samples = source.get("rollout_batch_size", 128) * group_size(source)
        # Their critic takes one epoch.
        epochs = source.get("ppo_epochs", 1) if role == "actor_train" else 1
        return epochs * max(1.0, samples / responses) if responses else None

    return steps
