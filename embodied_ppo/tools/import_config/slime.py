"""slime: rules for arguments whose values depend on others; the table is slime.yaml."""

from __future__ import annotations

from typing import Any

from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.table import Answer, Framework, Reason, Source, load

GROUPED = ("grpo", "gspo", "cispo")


def kind(source: Source) -> str:
    return source.get("advantage-estimator", "grpo")


def estimator(value: Any, source: Source) -> Answer:
    """Map the estimator; gspo and cispo are GRPO's advantages with another loss."""
    answer: dict[str, Any] = {"algorithm.adv_type": "gae" if value == "ppo" else value}
    if value in GROUPED:
        # Without the division by the deviation GRPO is another estimator.
        divides = not source.get("disable-grpo-std-normalization")
        answer = {"algorithm.adv_type": "grpo" if divides else "reinforce_plus_plus_baseline"}
    loss = {"gspo": {"algorithm.ratio_level": "sequence"}}
    loss["cispo"] = {"algorithm.policy_loss": "cispo"}
    return answer | loss.get(value, {})


def clip(value: Any, source: Source) -> Answer:
    sides = ("low",) if source.get("eps-clip-high") is not None else ("low", "high")
    return {f"algorithm.clip_ratio_{side}": value for side in sides}


def kl_in_reward(value: Any, source: Source) -> Answer:
    if kind(source) in GROUPED:
        return Reason(f"not read there either: {kind(source)}'s advantages have no KL term")
    name = source.get("kl-loss-type", "k1")
    estimator_of_kl = "k3" if name == "low_var_kl" else name
    penalty = {"algorithm.kl_ctrl.kl_coef": value, "algorithm.kl_penalty": estimator_of_kl}
    return {"algorithm.use_kl_in_reward": True, **penalty}


def evaluation_samples(value: Any, source: Source) -> Answer:
    """Map the responses to each held-out prompt; their default temperature is the rollout's."""
    temperature = source.get("eval-temperature", source.get("rollout-temperature", 1.0))
    return {"evaluation.n": value} | rules.evaluation_temperature(temperature, source)


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    of_token = kind(source) == "reinforce_plus_plus_baseline" and source.get("kl-coef", 0) != 0
    return rules.differences("slime", {"kl": of_token})


# Rules of one expression.
SIMPLE = {
    "prompts": rules.prompts("n-samples-per-prompt"),
    "steps": lambda value, source: rules.whole_prompts(source.get("rollout-batch-size", 0), value),
    # Names and files in turn; one value is a file.
    "evaluation_files": lambda value, source: [value] if isinstance(value, str) else value[1::2],
    "lr_end": lambda value, source: value / source.get("lr", 1e-6),
    "adam_betas": rules.adam_betas("adam-beta"),
}
RULES = {**rules.SHARED, **globals(), **SIMPLE}
SLIME: Framework = load("slime", RULES, differences=differences_of)
