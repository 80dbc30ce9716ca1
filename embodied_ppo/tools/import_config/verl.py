"""verl: rules for options whose values depend on other options; the table is verl.yaml."""

from __future__ import annotations

from typing import Any

from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.simplevla import is_simplevla, simplevla
from embodied_ppo.tools.import_config.table import REASONS, Answer, Framework, Reason, Source, load

ACTOR = "actor_rollout_ref.actor"
AGGREGATION = f"{ACTOR}.loss_agg_mode"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"


def count_gpus(source: Source) -> int:
    return int(source.get("trainer.nnodes", 1)) * int(source.get("trainer.n_gpus_per_node", 1))


def updates(source: Source) -> int | None:
    """Return the number of updates, None if the file does not set it."""
    total = source.get("trainer.total_training_steps")
    return total if isinstance(total, int) and total > 0 else None


def devices(value: Any, source: Source) -> Answer:
    if count_gpus(source) == 1:
        return Reason("one device needs one process: placement=local, the default")
    return {
        "placement": "fused",
        "cluster.num_nodes": source.get("trainer.nnodes", 1),
        "cluster.devices_per_node": source.get("trainer.n_gpus_per_node", 1),
    }


# ------------------------------------------------------------------------------------ the algorithm
def estimator(value: Any, source: Source) -> Answer:
    """Map the advantage estimator; without the division by the deviation GRPO is another one."""
    name = verl_name = str(value).removesuffix("_vectorized")
    if name == "grpo" and source.get("algorithm.norm_adv_by_std_in_grpo") is False:
        # In verl, too, loss_agg_mode then decides whether the loss is divided by the length.
        divides = source.get(AGGREGATION) == "seq-mean-token-mean"
        name = "reinforce_plus_plus_baseline" if divides else "dr_grpo"
    return {
        "algorithm.adv_type": name,
        "algorithm.normalize_advantages": verl_name not in ("grpo", "rloo"),
    }


def aggregation(value: Any, source: Source) -> Answer:
    """Map the aggregation of the loss; the critic has the actor's unless the file sets another."""
    if source.get(LOSS_MODE) == "gspo":
        return Reason(
            "not read by verl, either: policy_loss.loss_mode=gspo uses seq-mean-token-mean"
        )
    both = value != "token-mean" and source.get("critic.loss_agg_mode") is None
    both = both and source.get("algorithm.adv_estimator", "gae") == "gae"
    return {"algorithm.loss_agg_func": value} | ({"critic.loss_agg_func": value} if both else {})


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    if source.get(AGGREGATION) != "seq-mean-token-sum-norm":
        return {}
    difference = (
        "their loss is the sum over the sequences of a micro-batch, ours the mean over all: their"
        " loss is ppo_micro_batch_size_per_gpu times ours, so grad_clip takes effect earlier"
    )
    return {AGGREGATION: difference}


def loss_mode(value: Any, source: Source) -> Answer:
    """Map the kind of the policy loss; verl ignores loss_agg_mode for gspo."""
    if value == "vanilla":
        return Reason("PPO's clipped surrogate, as here")
    if value == "gspo":
        mean = "seq-mean-token-mean"
        return {"algorithm.ratio_level": "sequence", "algorithm.loss_agg_func": mean}
    return {"algorithm.policy_loss": "cispo"} if value == "cispo" else REASONS["OTHER_LOSS"]


def group_filter(value: Any, source: Source) -> Answer:
    """Map the filter of groups. verl's compares a metric, ours compares success."""
    metric = source.get("algorithm.filter_groups.metric", "acc")
    if metric != "acc":
        return Reason(
            f"their filter compares {metric}, ours success; write algorithm.group_filter=success if"
            " the grader returns acc"
        )
    return {"algorithm.group_filter": "success"}


# ------------------------------------------------------------------------------------ batches, data
def micro_batch_of_all(value: Any, source: Source) -> int:
    """Map the deprecated micro-batch size, which counts all devices together."""
    return max(1, value // count_gpus(source))


def token_limit(value: Any, source: Source) -> Any:
    """Map micro-batches of a number of tokens; their default is 16384."""
    return source.get(f"{ACTOR}.ppo_max_token_len_per_gpu", 16384)


def max_response(value: Any, source: Source) -> Answer:
    if value == source.get("data.max_response_length", 512):
        return Reason("the same as data.max_response_length, as here")
    return Reason("the penalty ends at algorithm.response_length here")


def grader(value: Any, source: Source) -> Any:
    """Map a file with a grader; verl's null selects graders by data source, as here."""
    if value is None:
        return Reason("null: graders by data source, as here")
    return f"{value}:{source.get('custom_reward_function.name', 'compute_score')}"


def variant(source: Source, file: str) -> Framework:
    """Return VERL, or SimpleVLA-RL's options for its scripts. Raises ConfigError."""
    return simplevla(source, file, VERL.rules) if is_simplevla(source) else VERL


VERL = load(
    "verl",
    {
        **rules.SHARED,
        **rules.by_name(devices, estimator, aggregation, loss_mode, group_filter),
        **rules.by_name(micro_batch_of_all, token_limit, max_response, grader),
        "clip_ratio": rules.clip_ratio(ACTOR),
        "warmup_steps": rules.warmup_steps(),
        "warmup_fraction": rules.warmup_fraction(updates),
    },
    differences=differences_of,
    variant=variant,
)
