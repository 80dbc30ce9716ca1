"""ROLL: rules for options whose values depend on other options; the table is roll.yaml."""

from __future__ import annotations

from typing import Any

from embodied_ppo.tools.import_config import roll_devices, rules
from embodied_ppo.tools.import_config.roll_devices import count_responses, has_critic, has_penalty
from embodied_ppo.tools.import_config.table import REASONS, Answer, Reason, Source, load

SUM_NORM = "seq-mean-token-sum-norm"
OLD_NORM = (
    "of ROLL before 25 September 2025; later versions read norm_mean_type and norm_std_type instead"
)
RUNNING = Reason(
    "their code keeps a running mean and deviation of the scores; reward_norm=running here divides"
    " by the running deviation of the discounted return; write algorithm.reward_norm=batch"
)
GROUP_NORM = Reason("adv_estimator=grpo sets both to group there, too")


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
        return RUNNING
    shift = bool(source.get("reward_shift", False))
    return {"algorithm.reward_norm": value, "algorithm.reward_shift": shift}


def norm(value: Any, source: Source) -> Answer:
    mean, std = source.get("norm_mean_type"), source.get("norm_std_type")
    if source.get("adv_estimator") == "grpo":
        return GROUP_NORM
    if "running" in (mean, std):
        return RUNNING
    if None not in (mean, std) and mean != std:
        return Reason("mean and deviation are both of the batch, or both of the group, here")
    kind = mean or std
    return {
        "algorithm.reward_norm": kind,
        "algorithm.reward_shift": kind is not None and std is None,
        "algorithm.reward_scale": kind is not None and mean is None,
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


def dual_clip(value: Any, source: Source) -> Any:
    return 1 + 2 * source.get("pg_clip", 0.2) if value else None


def target_kl(value: Any, source: Source) -> Answer:
    if value is None:
        return {"algorithm.kl_ctrl.type": "fixed"}
    return {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": value}


def sequence_length(value: Any, source: Source) -> Any:
    return REASONS["ELSEWHERE"] if value is None else value - source.get("prompt_length", 1024)


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    differences: dict[str, str] = {}
    kind = source.get("reward_norm")
    if kind in ("batch", "group") and isinstance(old_norm(kind, source), dict):
        differences["reward_norm"] = f"an option {OLD_NORM}; a later version ignores it"
    if source.get("loss_agg_mode") == SUM_NORM and sum_norm_factor(source) is None:
        differences["loss_agg_mode"] = (
            "write algorithm.loss_scale_factor = (sequence_length - 1) / responses of a step: their"
            " loss is the sum over all sequences of a step / (sequence_length - 1)"
        )
    if has_critic(source) and (source.get("lambd", 0.95) != 1 or source.get("gamma", 1) != 1):
        differences["lambd"] = (
            "their GAE starts at the end of the padding with the critic's value there, ours at the"
            " last token"
        )
    return differences


ROLL = load(
    "roll",
    {
        **rules.SHARED,
        **rules.by_name(estimator, epochs, reward_clip, old_norm, norm, aggregation, dual_clip),
        **rules.by_name(target_kl, sequence_length, roll_devices.placement),
        "adam_betas": rules.adam_betas("actor_train.training_args."),
        **rules.by_name(roll_devices.reference_devices),
        "kl_loss": lambda value, source: {
            "algorithm.use_kl_loss": value,
            "algorithm.kl_loss_type": "k3",
        },
        "warmup_fraction": rules.warmup_fraction(lambda source: source.get("max_steps")),
        "actor_warmup_steps": rules.warmup_steps(roll_devices.steps_per_update("actor_train")),
        "critic_warmup_steps": rules.warmup_steps(roll_devices.steps_per_update("critic")),
        "actor_batch": roll_devices.batch("actor_train"),
        "critic_batch": roll_devices.batch("critic"),
    },
    differences=differences_of,
)
