"""TRL's GRPOConfig: rules for options that depend on others; the table is trl_grpo.yaml."""

from __future__ import annotations

import math
from typing import Any

from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.table import REASONS, Answer, Reason, Source, load, read_table
from embodied_ppo.tools.import_config.trl_batches import (
    size_product,
    step_responses,
    training_rules,
)

TRAINERS = read_table("trl_trainers")
LOSSES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "cispo": "token-mean",
}
OTHER_LOSSES = ("sapo", "luspo", "vespo")


def generated_responses(source: Source) -> int:
    """Return the responses that are generated together."""
    if (total := source.get("generation_batch_size")) is not None:
        return int(total)
    steps = source.get("steps_per_generation", source.get("gradient_accumulation_steps", 1))
    return int(steps) * size_product(source, "per_device_train_batch_size", "world_size")


def steps_per_update(source: Source) -> float:
    """Return the optimiser steps of an update."""
    generations = generated_responses(source) / step_responses(source)
    return generations * int(source.get("num_iterations", 1))


def updates(source: Source) -> int | None:
    """Return the number of updates, None if the file does not set it."""
    steps = source.get("max_steps", -1)
    return math.ceil(steps / steps_per_update(source)) if steps > 0 else None


def batches(value: Any, source: Source) -> Answer:
    """Map the sizes of batches, which count responses there and prompts here."""
    group = int(source.get("num_generations", 8))
    step, generated = step_responses(source), generated_responses(source)
    if step % group or generated % step:
        return Reason(
            "write algorithm.rollout_batch_size and algorithm.global_batch_size, in prompts: an"
            f" optimiser step of {step} and a batch of {generated} responses hold no whole number"
            f" of groups of {group}, or steps"
        )
    return {
        "algorithm.group_size": group,
        "algorithm.rollout_batch_size": generated // group,
        "algorithm.global_batch_size": step // group,
    }


def scale_rewards(value: Any, source: Source) -> Any:
    """Map the division of advantages by a deviation; without it GRPO is another estimator."""
    if value in (True, "group"):
        return "grpo"
    if value not in (False, "none"):
        return Reason(
            "algorithm.adv_type=grpo divides by that of the group, theirs by that of the batch"
        )
    divides = source.get("loss_type", "dapo") == "grpo"  # by the length of each response
    return "reinforce_plus_plus_baseline" if divides else "dr_grpo"


def loss_type(value: Any, source: Source) -> Answer:
    """Map the loss. cispo clips the ratio at epsilon_high itself, from above only."""
    if value not in LOSSES:
        return REASONS["OTHER_LOSS"]
    answer = {"algorithm.loss_agg_func": LOSSES[value]}
    if value != "cispo":
        return answer
    high = source.get("epsilon_high", source.get("epsilon", 0.2))
    bounds = {"algorithm.clip_ratio_low": 1.0, "algorithm.clip_ratio_high": high - 1}
    return answer | bounds | {"algorithm.policy_loss": "cispo"}


def epsilon_high(value: Any, source: Source) -> Any:
    """Map the upper clip range; cispo's is mapped with the loss."""
    if value is None:
        return Reason("null: epsilon")
    return Reason("mapped with loss_type=cispo") if source.get("loss_type") == "cispo" else value


def epsilon(value: Any, source: Source) -> Answer:
    """Map the clip range to the sides that have none of their own."""
    if isinstance(value := epsilon_high(value, source), Reason):
        return value
    sides = ("low", "high") if source.get("epsilon_high") is None else ("low",)
    return {f"algorithm.clip_ratio_{side}": value for side in sides}


def beta(value: Any, source: Source) -> Answer:
    if not value:
        return {"algorithm.use_kl_loss": False}
    coefficient = {"algorithm.kl_loss_coef": value, "algorithm.kl_loss_type": "k3"}
    return {"algorithm.use_kl_loss": True, **coefficient}


def correction(value: Any, source: Source) -> Answer:
    """Map the correction of the probabilities of vLLM, whichever of its options is given."""
    mode = str(source.get("vllm_importance_sampling_mode", "sequence_mask"))
    level, _, kind = mode.partition("_")
    if not source.get("vllm_importance_sampling_correction", True):
        return Reason("off, as here")
    if kind != "truncate" or level not in ("token", "sequence"):
        level = "token" if level == "token" else "sequence"
        return Reason(f"write algorithm.off_policy_correction={level}: their mode rejects samples")
    cap = source.get("vllm_importance_sampling_clip_max", 3.0)
    cap = source.get("vllm_importance_sampling_cap", cap)
    return {"algorithm.off_policy_correction": level, "algorithm.off_policy_cap": cap}


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    differences: dict[str, str] = {}
    loss, step = source.get("loss_type", "dapo"), step_responses(source)
    parts = generated_responses(source) // step
    accumulated = step // size_product(source, "per_device_train_batch_size")
    if loss == "bnpo" and accumulated > 1:
        differences["loss_type"] = (
            "their mean is over the tokens of a micro-batch, and the means of the"
            f" {accumulated} micro-batches of a step count equally; ours is over all its tokens"
        )
    if loss in ("dapo", "cispo") and parts > 1:
        differences["loss_type"] = (
            f"they divide by the tokens of the generated batch / {parts}, ours by those of the"
            " optimiser step"
        )
    if source.get("beta", 0.0) and source.get("use_bias_correction_kl", True):
        differences["beta"] = (
            "they multiply the KL term by the probability ratio (use_bias_correction_kl=true); ours"
            " is the k3 estimator alone"
        )
    certain = [*TRAINERS["names"], "loss_type"]
    if not any(source.get(name) for name in certain) and not (
        set(TRAINERS["grpo"].split()) & source.values.keys()
    ):
        rloo = TRAINERS["grpo_or_rloo"].split()
        differences[next(name for name in source.values if name in rloo)] = (
            "write _target_: trl.GRPOConfig into the file if it is GRPO's: RLOOConfig has it, too,"
            " and is another algorithm"
        )
    reason = correction(None, source)
    if source.get("use_vllm") and isinstance(reason, Reason) and "rejects" in reason:
        differences["use_vllm"] = reason
    if source.get("num_iterations", 1) > 1 or parts > 1:
        differences["num_iterations"] = (
            "they shuffle responses between the optimiser steps of a generation, ours shuffles"
            " prompts with all their responses"
        )
    return differences


GRPO = load(
    "trl_grpo",
    {
        **training_rules(updates, steps_per_update, batches, REASONS["ELSEWHERE"]),
        **rules.by_name(scale_rewards, loss_type, epsilon, epsilon_high, beta, correction),
    },
    differences=differences_of,
)
