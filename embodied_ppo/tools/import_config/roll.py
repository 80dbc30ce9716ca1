"""ROLL: rules for options whose values depend on other options; the table is roll.yaml."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from embodied_envs.base.errors import show
from embodied_ppo.tools.import_config import rules, table
from embodied_ppo.tools.import_config.table import REASONS, Answer, Reason, Rule, Source, load

SUM_NORM = "seq-mean-token-sum-norm"
OLD_NORM = (
    "of ROLL before 25 September 2025; later versions read norm_mean_type and norm_std_type instead"
)
GROUP_NORM = Reason("adv_estimator=grpo sets both to group there, too")
# Largest number of devices in a range.
MAX_DEVICES = 100_000
DEVICES = re.compile(r"list\(range\((\d+),(\d+)(?:,(\d+))?\)\)|(?:list\()?\[(\d+(?:,\d+)*)\]\)?")
PARALLEL_KINDS = ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
ROLES: dict[str, str] = table.read_table("roll")["roles"]


# --------------------------------------------------------------------------------- devices, batches
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


# ------------------------------------------------------------------------------------ the algorithm
def estimator(value: Any, source: Source) -> Answer:
    """Map the estimator.

    Their grpo is the return-to-go of scores normalised over the group. That equals ours unless
    another reward enters the sum.
    """
    if value == "gae":  # their value loss averages over sequences, whatever loss_agg_mode is
        return {"algorithm.adv_type": "gae", "critic.loss_agg_func": "seq-mean-token-mean"}
    others = source.get("reward_clip"), source.get("whiten_rewards"), source.get("gamma", 1) != 1
    if value == "grpo" and (has_penalty(source) or any(others)):
        return {"algorithm.adv_type": "reinforce", "algorithm.reward_norm": "group"}
    return {"algorithm.adv_type": value}


def epochs(value: Any, source: Source) -> Answer:
    """Map the epochs; their critic always takes one (CriticWorker.train_step)."""
    critic = {"critic.update_epoch": 1} if has_critic(source) else {}
    return {"algorithm.update_epoch": value, **critic}


def reward_clip(value: Any, source: Source) -> Answer:
    """Map clipping, which follows normalisation and again the KL penalty; 0 is off."""
    if not value:
        return {"algorithm.reward_clip": None}
    norms = norm(None, source), old_norm(source.get("reward_norm"), source)
    normalizes = source.get("adv_estimator") == "grpo" or any(
        isinstance(answer, dict) and answer["algorithm.reward_norm"] for answer in norms
    )
    after = has_penalty(source) or normalizes
    order = {"algorithm.reward_clip_order": "after_norm"} if after else {}
    return {"algorithm.reward_clip": value, **order}


def old_norm(value: Any, source: Source) -> Answer:
    if value in (None, "None"):
        return Reason("null: set by norm_mean_type and norm_std_type")
    if source.has("norm_mean_type") or source.has("norm_std_type"):
        return Reason(OLD_NORM)
    if source.get("adv_estimator") == "grpo":
        return GROUP_NORM
    if value == "running":
        return REASONS["RUNNING"]
    by = "mean" if source.get("reward_shift", False) else "mean_std"
    return {"algorithm.reward_norm": value, "algorithm.reward_norm_by": by}


def norm(value: Any, source: Source) -> Answer:
    mean, std = source.get("norm_mean_type"), source.get("norm_std_type")
    if source.get("adv_estimator") == "grpo":
        return GROUP_NORM
    if "running" in (mean, std):
        return REASONS["RUNNING"]
    if None not in (mean, std) and mean != std:
        return Reason("mean and deviation are both of the batch, or both of the group, here")
    return {
        "algorithm.reward_norm": mean or std,
        "algorithm.reward_norm_by": "mean_std" if mean == std else "mean" if mean else "std",
    }


def aggregation(value: Any, source: Source) -> Answer:
    factor = sum_norm_factor(source) if value == SUM_NORM else None
    scale = {"algorithm.loss_scale_factor": factor} if factor else {}
    return {"algorithm.loss_agg_func": value, **scale}


def sum_norm_factor(source: Source) -> float | None:
    """Return loss_scale_factor for their loss, None if the file does not define it.

    Their loss is the sum over all sequences of a step / (sequence_length - 1), ours the mean over
    the sequences / loss_scale_factor.
    """
    length, responses = source.get("sequence_length"), count_responses("actor_train", source)
    if length is None and source.get("response_length") is not None:
        length = source.get("response_length") + source.get("prompt_length", 1024)
    dynamic = source.get("actor_train.use_dynamic_batching_in_train")
    return None if length is None or responses is None or dynamic else (length - 1) / responses


def target_kl(value: Any, source: Source) -> Answer:
    if value is None:
        return {"algorithm.kl_ctrl.type": "fixed"}
    return {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": value}


def sequence_length(value: Any, source: Source) -> Any:
    return REASONS["ELSEWHERE"] if value is None else value - source.get("prompt_length", 1024)


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    kind, sums = source.get("reward_norm"), source.get("loss_agg_mode") == SUM_NORM
    conditions = {
        "norm": kind in ("batch", "group") and isinstance(old_norm(kind, source), dict),
        "sum": sums and sum_norm_factor(source) is None,
        "end": has_critic(source) and (source.get("lambd", 0.95), source.get("gamma", 1)) != (1, 1),
        **{x: f"actor_infer.generating_args.{x}" not in source.values for x in ("top_k", "top_p")},
    }
    return rules.differences("roll", conditions, old=OLD_NORM)


ROLL = load(
    "roll",
    {
        **rules.SHARED,
        **globals(),
        "adam_betas": rules.adam_betas("actor_train.training_args.adam_beta"),
        "kl_loss": lambda value, source: {
            "algorithm.use_kl_loss": value,
            "algorithm.kl_loss_type": "k3",
        },
        "warmup_fraction": rules.warmup_fraction(lambda source: source.get("max_steps")),
        "actor_warmup_steps": rules.warmup_steps(steps_per_update("actor_train")),
        "critic_warmup_steps": rules.warmup_steps(steps_per_update("critic")),
        "dual_clip": lambda value, source: 1 + 2 * source.get("pg_clip", 0.2) if value else None,
        "actor_batch": batch("actor_train"),
        "critic_batch": batch("critic"),
    },
    differences=differences_of,
)
