"""verl: rules for options whose values depend on other options; the table is verl.yaml.

The launch scripts of SimpleVLA-RL are verl's with options of robots; their table is simplevla.yaml.
"""

from __future__ import annotations

from typing import Any

from embodied_envs.base.errors import ConfigError, shorten
from embodied_ppo.tools.import_config import rules
from embodied_ppo.tools.import_config.rlinf import CAMERAS, SUITES, filters_mixed_groups
from embodied_ppo.tools.import_config.table import REASONS, Answer, Framework, Reason, Source, load

ACTOR = "actor_rollout_ref.actor"
AGGREGATION = f"{ACTOR}.loss_agg_mode"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
MODEL = "actor_rollout_ref.model"
# Steps of an episode of every suite of LIBERO there.
LONGEST = 512
# Rounds of the filter here; theirs continues until the batch is full.
ROUNDS = 100


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
        return REASONS["OF_GSPO"]
    both = value != "token-mean" and source.get("critic.loss_agg_mode") is None
    both = both and source.get("algorithm.adv_estimator", "gae") == "gae"
    return {"algorithm.loss_agg_func": value} | ({"critic.loss_agg_func": value} if both else {})


def differences_of(source: Source) -> dict[str, str]:
    """Return the differences that no option of ours removes."""
    return rules.differences("verl", {"sum": source.get(AGGREGATION) == "seq-mean-token-sum-norm"})


def loss_mode(value: Any, source: Source) -> Answer:
    """Map the kind of the policy loss; verl's gspo ignores loss_agg_mode and has no dual clip."""
    if value == "vanilla":
        return REASONS["SURROGATE"]
    if value == "gspo":
        loss = {"algorithm.loss_agg_func": "seq-mean-token-mean", "algorithm.clip_ratio_c": None}
        return {"algorithm.ratio_level": "sequence", **loss}
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


# ------------------------------------------------------------------------------------- SimpleVLA-RL
def chunk_size(source: Source) -> int:
    return int(source.get(f"{MODEL}.action_chunks_len", 8))


def chunk(value: Any, source: Source) -> Answer:
    """Map the actions of a decision, and the length of an episode in decisions."""
    horizon = -(-LONGEST // chunk_size(source))
    answer: dict[str, Any] = {"env.action_chunk": value, "algorithm.horizon": horizon}
    return answer | {"env.max_episode_steps": LONGEST, "algorithm.micro_batch_size": horizon}


def suite(value: Any, source: Source) -> Answer:
    kwargs = {"settle_steps": source.get("actor_rollout_ref.rollout.num_steps_wait", 10)}
    return {
        "env.simulator": "libero",
        "env.id": f"libero/{source.get('data.task_suite_name', 'libero_10')}",
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


def unnorm_key(value: Any, source: Source) -> Answer:
    """Map the name of the statistics; their code adds the suffix of LIBERO's data sets."""
    suffix = "" if str(value).endswith("_no_noops") else "_no_noops"
    return {"model.unnorm_key": f"{value}{suffix}"}


def variant(source: Source, file: str) -> Framework:
    """Return VERL, or SimpleVLA-RL's options for its scripts.

    Raises:
        ConfigError: The simulator of a script has no adapter.
    """
    if source.get(f"{MODEL}.vla") is None:
        return VERL
    name = source.get("data.task_suite_name", "libero_10")
    if name not in SUITES:
        raise ConfigError(
            f"name a script for LIBERO: {shorten(file, 90)} trains on {name}, which does not exist"
            " here"
        )
    return load(
        "simplevla",
        VERL.rules,
        mode=lambda source: "embodied",
        to_write=lambda source: {"updates": "epochs x 50 states x tasks / data.train_batch_size"},
    )


VERL = load(
    "verl",
    {
        **rules.SHARED,
        **globals(),
        "clip_ratio": rules.clip_ratio(ACTOR, 0.2),  # actor.yaml sets both sides to 0.2
        "warmup_steps": rules.warmup_steps(),
        "warmup_fraction": rules.warmup_fraction(updates),
        # The deprecated size counts all devices together.
        "micro_batch_of_all": lambda value, source: max(1, value // count_gpus(source)),
        "images": lambda value, source: {"env.cameras": CAMERAS[: 1 + (value > 1)]},
        # The actor learns from update N on, the first update being 1.
        "updates_before": lambda value, source: max(0, value - 1),
    },
    differences=differences_of,
    variant=variant,
)
