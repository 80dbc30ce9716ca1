"""OpenRLHF: rules for options whose values depend on other options; the table is openrlhf.yaml."""

from __future__ import annotations

from typing import Any

from embodied_ppo.tools.import_config import rules, table
from embodied_ppo.tools.import_config.table import REASONS, Answer, Framework, Reason, Source, load

IS = "algo.advantage.is_correction"
ESTIMATORS: dict[str, str] = table.read_table("openrlhf")["estimators"]
WITH_KL: dict[str, dict[str, str]] = table.read_table("openrlhf")["estimators_with_kl"]
# Estimators whose advantages are standardised over the batch.
WHITENED = ("gae", "reinforce", "reinforce_baseline")
SIDES, TARGET = ("low", "high"), "algorithm.kl_ctrl.target_kl"
GSPO = {"algorithm.ratio_level": "sequence", "algorithm.loss_agg_func": "seq-mean-token-mean"}


def max_length(value: Any, source: Source) -> Answer:
    """Map the tokens of prompt and response together."""
    response = source.get("rollout.max_new_tokens")
    if response is None or response >= value:
        return REASONS["LENGTHS"]
    return {"algorithm.prompt_length": value - response}


def kl(value: Any, source: Source) -> dict[str, Any]:
    """Map the KL term, which is in the loss or in the reward, whichever of its options is given."""
    coefficient = source.get("algo.kl.init_coef", 0.01)
    estimator, used = source.get("algo.kl.estimator", "k1"), coefficient > 0
    if source.get("algo.kl.use_loss"):
        options = {"algorithm.kl_loss_coef": coefficient, "algorithm.kl_loss_type": estimator}
        return {"algorithm.use_kl_loss": used} | (options if used else {})
    options = {"algorithm.kl_ctrl.kl_coef": coefficient, "algorithm.kl_penalty": estimator}
    return {"algorithm.use_kl_in_reward": used} | (options if used else {})


def estimator(value: Any, source: Source) -> dict[str, Any]:
    """Map the estimator. With the KL in the reward it is the return-to-go of compared scores."""
    whitened, with_kl = value in WHITENED, kl(None, source).get("algorithm.use_kl_in_reward")
    answer = {"algorithm.adv_type": ESTIMATORS[value], "algorithm.normalize_advantages": whitened}
    return answer | WITH_KL.get(value, {}) if with_kl else answer


def correction(value: Any, source: Source) -> Answer:
    """Map the weights for the probabilities of vLLM, whichever of their options is given."""
    if source.get(f"{IS}_type", "tis") != "tis":
        return REASONS["REJECTION"]
    cap = source.get(f"{IS}_threshold", [0.5, 5.0])[1]
    return {"algorithm.off_policy_correction": "token", "algorithm.off_policy_cap": cap}


def group_filter(value: Any, source: Source) -> Answer:
    """Map the filter of groups by their mean score, which lies strictly within the range."""
    if list(source.get("algo.dynamic_filtering_range", [0, 1])) != [0, 1]:
        return Reason("keeps other groups than those with right and wrong responses")
    return {"algorithm.group_filter": "success"}


def reward_clip(value: Any, source: Source) -> Answer:
    low, high = value
    if source.get("algo.advantage.estimator", "gae") not in ("gae", "reinforce"):
        return Reason("clips the score after the mean of the group is subtracted; none here")
    if -low != high:
        return Reason("algorithm.reward_clip is one bound for both directions")
    return {"algorithm.reward_clip": high}


def files(value: Any, source: Source) -> Any:
    """Map names of data sets, of which those of the hub must be downloaded."""
    names = str(value).split(",")
    suffixes = (".json", ".jsonl", ".parquet")
    if not all(name.startswith(("/", ".", "~")) or name.endswith(suffixes) for name in names):
        return Reason("a data set of the hub; download it, and write {to}=[FILE.parquet]")
    return names


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    ratio, has_critic = source.get("actor.lr_warmup_ratio", 0.03), "critic.model_name_or_path"
    leaves_one_out = source.get("algo.advantage.estimator") == "rloo"
    conditions = {
        "warmup": ratio > 0,
        "rloo": leaves_one_out and kl(None, source).get("algorithm.use_kl_in_reward"),
        "critic": source.get("reward.model_name_or_path") and not source.get(has_critic),
        "bound": source.get(f"{IS}_enable") and source.get(f"{IS}_type", "tis") == "tis",
    }
    return rules.differences("openrlhf", conditions, ratio=ratio)


# Rules of one expression.
SIMPLE = {
    "prompts": rules.prompts("rollout.n_samples_per_prompt"),
    "token_limit": lambda value, source: source.get("train.max_tokens_per_gpu", 16192),
    "clip_range": lambda value, source: {
        f"algorithm.clip_ratio_{x}": y for x, y in zip(SIDES, value)
    },
    "loss_type": lambda value, source: REASONS["SURROGATE"] if value == "ppo" else GSPO,
    "engines": lambda value, source: "vllm" if value else "builtin",
    "adaptive": lambda value, source: {"algorithm.kl_ctrl.type": "adaptive", TARGET: value},
    "warmup_fraction": rules.warmup_fraction(lambda source: None),
}
OPENRLHF: Framework = load(
    "openrlhf",
    {**rules.SHARED, **globals(), **SIMPLE},
    differences=differences_of,
    to_write=lambda source: {"algorithm.response_length": "tokens; data.max_len minus the prompt"},
    one_row=True,
)
