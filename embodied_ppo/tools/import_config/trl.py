"""TRL's PPOConfig and GRPOConfig: rules for options that depend on others, and which of both it is.

The tables are trl_ppo.yaml and trl_grpo.yaml. A file of TrlParser does not name its trainer: it is
recognised by the options that only one of them has, or by an entry such as
``_target_: trl.GRPOConfig``. Files of other trainers are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from embodied_envs.base.errors import ConfigError, shorten, show
from embodied_ppo.tools.import_config import rules, table
from embodied_ppo.tools.import_config.table import REASONS, Answer, Framework, Reason, Rule, Source

TRAINERS = table.read_table("trl_trainers")
LOSSES: dict[str, str] = table.read_table("trl_grpo")["losses"]
OTHER_LOSSES = ("sapo", "luspo", "vespo")


# --------------------------------------------------------------------------------- batches, lengths
def size_product(source: Source, *names: str) -> int:
    """Return the product of sizes of a batch."""
    defaults = {"per_device_train_batch_size": 8}
    return math.prod(int(source.get(name, defaults.get(name, 1))) for name in names)


def step_responses(source: Source) -> int:
    """Return the responses of an optimiser step."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
    return size_product(source, *names)


def training_rules(
    updates: Callable[[Source], int | None],
    steps: Callable[[Source], float],
    batches: Rule,
    no_length: Reason,
) -> dict[str, Rule]:
    """Return the rules that trl_training.yaml names, and those of batches and lengths.

    Args:
        updates: Returns the number of updates; None: the file does not set it.
        steps: Returns the number of optimiser steps in one update.
        batches: Maps the sizes of batches.
        no_length: Why an option of the length has no counterpart if the file sets no number.
    """

    def interval(value: Any, source: Source) -> Any:
        """Map a number of steps to updates; a value below 1 is a fraction of the run."""
        total = (value or 0) / steps(source)
        if value and value < 1:
            if (run_length := updates(source)) is None:
                return Reason(f"a fraction of all updates; write {{to}} = {show(value)} x updates")
            total = value * run_length
        return math.ceil(total)

    def warmup_ratio(value: Any, source: Source) -> Any:
        if source.get("warmup_steps"):
            return Reason("warmup_steps takes precedence there, too")
        return interval(value, source)

    def strategy(value: Any, source: Source) -> Any:
        return 0 if value == "no" else Reason("{to} counts updates")

    def micro_batch(value: Any, source: Source) -> Answer:
        """Map the size of a micro-batch, which is a factor of the other sizes."""
        answer = batches(value, source)
        is_reason = isinstance(answer, Reason)
        return answer if is_reason else {**answer, "algorithm.micro_batch_size": value}

    def length(value: Any, source: Source) -> Answer:
        total = updates(source)
        return no_length if total is None else {"updates": total}

    functions = {"batches": batches, "interval": interval, "warmup_ratio": warmup_ratio}
    functions |= {"strategy": strategy, "micro_batch": micro_batch, "length": length}
    return {**rules.SHARED, "adam_betas": rules.adam_betas(), **functions}


# --------------------------------------------------------------------------------------------- GRPO
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


def grpo_updates(source: Source) -> int | None:
    """Return the number of grpo_updates, None if the file does not set it."""
    steps = source.get("max_steps", -1)
    return math.ceil(steps / steps_per_update(source)) if steps > 0 else None


def grpo_batches(value: Any, source: Source) -> Answer:
    """Map the sizes of grpo_batches, which count responses there and prompts here."""
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
        return REASONS["BATCH_NORM"]
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


def grpo_differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    loss, step = source.get("loss_type", "dapo"), step_responses(source)
    parts = generated_responses(source) // step
    accumulated = step // size_product(source, "per_device_train_batch_size")
    conditions = {
        "micro_batches": loss == "bnpo" and accumulated > 1,
        "generation": loss in ("dapo", "cispo") and parts > 1,
        "kl": source.get("beta", 0.0) and source.get("use_bias_correction_kl", True),
        "shuffle": source.get("num_iterations", 1) > 1 or parts > 1,
    }
    found = rules.differences("trl_grpo", conditions, accumulated=accumulated, parts=parts)
    certain = [*TRAINERS["names"], "loss_type"]
    if not any(source.get(name) for name in certain) and not (
        set(TRAINERS["grpo"].split()) & source.values.keys()
    ):
        rloo = TRAINERS["grpo_or_rloo"].split()
        found[next(name for name in source.values if name in rloo)] = TRAINERS["uncertain"]
    reason = correction(None, source)
    if source.get("use_vllm") and isinstance(reason, Reason) and "rejects" in reason:
        found["use_vllm"] = reason
    return found


# ---------------------------------------------------------------------------------------------- PPO
def batch_size(source: Source) -> int:
    """Return the prompts of an update, each with one response."""
    return int(source.get("batch_size", step_responses(source)))


def updates(source: Source) -> int | None:
    """Return the number of updates, None if the file does not set it."""
    if (total := source.get("num_total_batches")) is not None:
        return int(total)
    episodes = source.get("total_episodes")
    return None if episodes is None else math.ceil(episodes / batch_size(source))


def batches(value: Any, source: Source) -> Answer:
    batch, parts = batch_size(source), int(source.get("num_mini_batches", 1))
    if parts < 1 or batch % parts:
        return Reason(f"num_mini_batches = {parts} does not divide the batch of {batch}")
    return {"algorithm.rollout_batch_size": batch, "algorithm.global_batch_size": batch // parts}


def kl_coef(value: Any, source: Source) -> Answer:
    return {"algorithm.use_kl_in_reward": bool(value), "algorithm.kl_ctrl.kl_coef": value}


def grad_norm(value: Any, source: Source) -> Any:
    """Map the gradient norm; their loop does not clip gradients, DeepSpeed's engine does."""
    return value if source.has("deepspeed") else None


def model_name(value: Any, source: Source) -> Answer:
    """Map the model, which gives the tokenizer only where sft_model_path is set."""
    return {"actor.tokenizer" if source.get("sft_model_path") else "actor.model.path": value}


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    accumulated = int(source.get("gradient_accumulation_steps", 1))
    parts = int(source.get("num_mini_batches", 1))
    conditions = {
        "clipping": source.get("max_grad_norm") and not source.has("deepspeed"),
        "whitening": source.get("whiten_rewards"),
        "steps": accumulated > 1 and parts > 1,
    }
    size = batch_size(source) // max(1, parts // max(1, accumulated))
    return rules.differences("trl_ppo", conditions, size=size, accumulated=accumulated)


# ----------------------------------------------------------------------------------------- trainers
def trainer_of(source: Source, file: str) -> Framework:
    """Return the trainer of a file. Raises ConfigError for one of another trainer, or of none."""
    named = next((str(source.get(name)) for name in TRAINERS["names"] if source.get(name)), "")
    kind = named.rpartition(".")[2].removesuffix("Config").removesuffix("Trainer").upper()
    if kind in ("PPO", "GRPO"):
        return {"PPO": PPO, "GRPO": GRPO}[kind]
    loss = source.get("loss_type")
    has_grpo_loss = loss in (*LOSSES, *OTHER_LOSSES)
    evidence = [(f"{kind}Config", named)] if kind else []
    if loss is not None and not has_grpo_loss:
        evidence.append(("DPOConfig, SFTConfig or KTOConfig", "loss_type"))
    evidence += [
        (trainer, name)
        for trainer, options in TRAINERS["others"].items()
        for name in options.split()
        if name in source.values
    ]
    if evidence:
        trainer, option = (shorten(text, 60) for text in evidence[0])
        raise ConfigError(
            f"name a file of PPOConfig or GRPOConfig: {shorten(file, 80)} has {option}, of"
            f" {trainer}, which cannot be imported"
        )
    ppo = sum(name in PPO.table and name not in GRPO.table for name in source.values)
    grpo_options = f"{TRAINERS['grpo']} {TRAINERS['grpo_or_rloo']}".split()
    grpo = has_grpo_loss + sum(name in grpo_options for name in source.values)
    if not ppo + grpo:
        raise ConfigError(
            f"write _target_: trl.PPOConfig or trl.GRPOConfig into {shorten(file, 80)}: it has no"
            " option that only one of them has, such as cliprange or num_generations"
        )
    return PPO if ppo > grpo else GRPO


GRPO = table.load(
    "trl_grpo",
    globals() | training_rules(grpo_updates, steps_per_update, grpo_batches, REASONS["ELSEWHERE"]),
    differences=grpo_differences_of,
)
PPO = table.load(
    "trl_ppo",
    globals() | training_rules(updates, lambda source: 1.0, batches, REASONS["EPOCHS"]),
    differences=differences_of,
)
# The options of both trainers, by which a file of TRL is recognised; ``variant`` selects one.
TRL = replace(
    PPO,
    name="TRL",
    table={**GRPO.table, **PPO.table},
    rules={**GRPO.rules, **PPO.rules},
    variant=trainer_of,
)
