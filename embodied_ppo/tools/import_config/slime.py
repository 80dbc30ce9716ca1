"""slime: rules for arguments whose values depend on others; the table is slime.yaml."""

from __future__ import annotations

from typing import Any

from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.table import Answer, Framework, Reason, Source, load

GROUPED = ("grpo", "gspo", "cispo")
KL = "kl-loss-type"


def kind(source: Source) -> str:
    return source.get("advantage-estimator", "grpo")


def estimator(value: Any, source: Source) -> Answer:
    """Map the estimator; gspo and cispo are GRPO's advantages with another loss."""
    answer: dict[str, Any] = {"algorithm.adv_type": "gae" if value == "ppo" else value}
    if value in GROUPED:
        # Without the division by the deviation GRPO is another estimator.
        divides = not source.get("disable-grpo-std-normalization")
        mean = "reinforce_plus_plus_baseline"
        answer = {"algorithm.adv_type": "grpo" if divides else mean}
    loss = {"gspo": {"algorithm.ratio_level": "sequence"}}
    loss["cispo"] = {"algorithm.policy_loss": "cispo"}
    return answer | loss.get(value, {})


def normalize(value: Any, source: Source) -> Answer:
    return {"algorithm.normalize_advantages": bool(value)}


def prompts(value: Any, source: Source) -> Any:
    """Map the responses of an optimiser step to prompts."""
    return rules.whole_prompts(value, source.get("n-samples-per-prompt", 1))


def steps(value: Any, source: Source) -> Any:
    """Map the optimiser steps of an update."""
    return rules.whole_prompts(source.get("rollout-batch-size", 0), value)


def clip(value: Any, source: Source) -> Answer:
    sides = ("low",) if source.get("eps-clip-high") is not None else ("low", "high")
    return {f"algorithm.clip_ratio_{side}": value for side in sides}


def kl_in_reward(value: Any, source: Source) -> Answer:
    if kind(source) in GROUPED:
        return Reason(f"not read there either: {kind(source)}'s advantages have no KL term")
    penalty = {"algorithm.kl_ctrl.kl_coef": value, "algorithm.kl_penalty": kl_name(source)}
    return {"algorithm.use_kl_in_reward": True, **penalty}


def kl_name(source: Source) -> str:
    name = str(source.get(KL, "k1"))
    return "k3" if name == "low_var_kl" else name


def kl_type(value: Any, source: Source) -> Answer:
    """Map the estimator of KL, which reward and loss share."""
    if source.get("use-kl-loss"):
        return {"algorithm.kl_loss_type": kl_name(source)}
    return Reason("the estimator of kl-coef")


def group_filter(value: Any, source: Source) -> Answer:
    if "nonzero_std" in str(value):
        return {"algorithm.group_filter": "success"}
    return Reason("a filter of their code; algorithm.group_filter is the only one here")


def rollout_function(value: Any, source: Source) -> Answer:
    if "async" in str(value):
        return Reason("write placement=disaggregated cluster.max_lag=1: rollouts run ahead")
    return Reason("names a part of their code")


def lr_end(value: Any, source: Source) -> float:
    """Map the lowest learning rate to a fraction."""
    return value / source.get("lr", 1e-6)


def evaluation_samples(value: Any, source: Source) -> Answer:
    """Map the responses to each held-out prompt; their default temperature is the rollout's."""
    temperature = source.get("eval-temperature", source.get("rollout-temperature", 1.0))
    return {"evaluation.n": value} | rules.evaluation_temperature(temperature, source)


def evaluation_files(value: Any, source: Source) -> list[str]:
    """Map names and files of data sets in turn; one value is a file."""
    return [value] if isinstance(value, str) else value[1::2] or value


SLIME: Framework = load(
    "slime",
    {**rules.SHARED, **globals(), "adam_betas": rules.adam_betas("adam-beta")},
)
