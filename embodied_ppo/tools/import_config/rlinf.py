"""RLinf: rules of options; the table is rlinf.yaml.

Source: RLinf at a3816b5 (August 2026), read and not run.
"""

from __future__ import annotations

import math
from typing import Any

from embodied_envs.base.errors import ConfigError, shorten, show
from embodied_ppo.options import openpi_configs
from embodied_ppo.tools.import_config import rules, table
from embodied_ppo.tools.import_config.table import REASONS, Answer, Framework, Reason, Source, load

# Their losses that have a counterpart here.
LOSSES = ("actor_critic", "actor", "decoupled_actor_critic")
# Their types of models -> options of ours.
MODELS: dict[str, dict[str, Any]] = table.read_table("rlinf")["models"]
OPENVLA = ("openvla", "openvla_oft")
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
# Suites and cameras of LIBERO's adapter, whose module needs torch.
CAMERAS = ["agentview", "robot0_eye_in_hand"]
# Initial states of a task, which their reset ids count task by task.
LIBERO_STATES = 50


def trains_robot(source: Source) -> bool:
    """Return whether an RLinf file trains a robot policy."""
    if (task := source.get("runner.task_type")) is not None:
        return task in ("embodied", "offline")
    return source.get("algorithm.loss_type") != "actor" and not source.has("data.")


def mode_of(source: Source) -> str:
    """Return the mode of a file."""
    return "embodied" if trains_robot(source) else "reasoning"


def updates(source: Source) -> int | None:
    """Return the number of updates, None if the file does not set it."""
    steps, epochs = source.get("runner.max_steps", -1), source.get("runner.max_epochs")
    if not trains_robot(source):
        return steps if steps > 0 else None
    return min(epochs, steps) if epochs and steps > 0 else epochs or (steps if steps > 0 else None)


# ------------------------------------------------------------------------------------ the algorithm
def kl_beta(value: Any, source: Source) -> Answer:
    return {"algorithm.use_kl_loss": bool(value), "algorithm.kl_loss_coef": value or 0.0}


def reinpp_kl_beta(value: Any, source: Source) -> Answer:
    coefficient = {"algorithm.kl_ctrl.kl_coef": value} if value else {}
    return {"algorithm.use_kl_in_reward": bool(value), **coefficient}


def critic_warmup(value: Any, source: Source) -> Answer:
    """Map a number of optimiser steps to updates."""
    steps = 1.0
    if trains_robot(source) and value:
        decisions, batch = samples(source), source.get("actor.global_batch_size")
        if not decisions or not batch:
            return Reason("optimiser steps; write algorithm.critic_warmup, which counts updates")
        steps = source.get("algorithm.update_epoch", 1) * decisions / batch
    return {"algorithm.critic_warmup": math.ceil((value or 0) / steps)}


def minibatches(value: Any, source: Source) -> Answer:
    prompts = source.get("data.rollout_batch_size")
    if not prompts or not value or prompts % value:
        return Reason(f"write algorithm.global_batch_size = prompts of an update / {value}")
    return {"algorithm.global_batch_size": prompts // value}


def length(value: Any, source: Source) -> Answer:
    total = updates(source)
    if total is None:
        return REASONS["ELSEWHERE" if trains_robot(source) else "EPOCHS"]
    return {"updates": total}


# ------------------------------------------------------------------------------------------ devices
def component_placement(value: Any, source: Source) -> Answer:
    """Map components to devices; the component inference is the actor here.

    The reward model of a robot has no role here, which ``differences`` reports.
    """
    dropped = ("inference", "reward", "reward_server") if trains_robot(source) else ("inference",)
    placement: dict[str, Any] = {}
    for entry, ranks in value.items():
        roles = [word.strip() for word in str(entry).split(",")]
        if isinstance(ranks, dict):
            devices = {"devices": parse_ranks(ranks.get("placement", "all"))}
            if ranks.get("node_group") is not None:
                devices["node"] = ranks["node_group"]
        else:
            devices = parse_ranks(ranks)
        if kept := [role for role in roles if role not in dropped]:
            placement[",".join(kept)] = devices
    return {"cluster.component_placement": placement}


def parse_ranks(text: Any) -> Any:
    """Convert ``0-3,5`` to ["0-3", 5]."""
    parts = [part.strip() for part in str(text).split(",")]
    ranks = [int(part) if part.isdecimal() else part for part in parts]
    return ranks[0] if len(ranks) == 1 else ranks


# ------------------------------------------------------------------------------------------- robots
def model_type(source: Source) -> str | None:
    """Return their type of the model, None if the file has none."""
    return source.get("actor.model.model_type")


def chunk_size(source: Source) -> int:
    """Return the number of actions of a decision."""
    return int(source.get("actor.model.num_action_chunks", 1))


def resets(source: Source) -> bool:
    """Return whether environments begin new episodes within a rollout."""
    return bool(source.get("env.train.auto_reset", False))


def is_grpo(source: Source) -> bool:
    return source.get("algorithm.adv_type") == "grpo"


# ---------------------------------------------------------------------------------- what is missing
def simulator(source: Source) -> str | None:
    """Return the name of a simulator that has no adapter here; None if there is one."""
    name = source.values.get("env.train.env_type", "libero")
    if name != "libero":
        task = source.get("env.train.init_params.id", source.get("env.train.task_suite_name"))
        return f"{name} ({task})" if task else str(name)
    if source.get("env.train.perturbation_suffix") is not None:
        return "LIBERO-plus"
    suite = source.get("env.train.task_suite_name", "libero_10")
    return None if suite in SUITES else str(suite)


def variant(source: Source, file: str) -> Framework:
    """Return RLINF. Raises ConfigError where a robot's algorithm or model does not exist here."""
    if not trains_robot(source):
        return RLINF
    label = shorten(file, 90)
    loss = source.get("algorithm.loss_type", source.get("algorithm.adv_type"))
    for option, does in (
        ("runner.only_eval", "evaluates"),
        ("runner.num_data_episodes", "records demonstrations"),
    ):
        if source.get(option, False):
            raise ConfigError(f"name a file that trains: {label} {does} ({option})")
    if loss is not None and loss not in (*LOSSES, "gae", "grpo"):
        raise ConfigError(
            f"name a file that trains by PPO or GRPO: {label} has {show(loss)}, which does not"
            " exist here"
        )
    model = model_type(source)
    missing = model if model not in (None, *MODELS) else None
    if model == "openvla_oft" and source.get("actor.model.use_proprio", False):
        official = source.get("actor.model.implement_version") == "official"
        missing = "openvla_oft with proprioception (use_proprio)" if official else None
    if missing is not None:
        also = simulator(source)
        raise ConfigError(
            f"name a file with openpi, openvla, openvla_oft or mlp_policy: {label} trains"
            f" {missing}, which does not exist here"
            + (f", and neither does the simulator {also}" if also else "")
        )
    return RLINF


def missing_options(source: Source) -> dict[str, str]:
    """Return options to be set by hand because their simulator has no adapter here."""
    name = simulator(source)
    if name is None:
        return {}
    return {"env.id": f"a function that wraps {name}, with env.simulator=torch (docs/tasks.md)"}


# ------------------------------------------------------------------------------------ the algorithm
def adv_type(value: Any, source: Source) -> Answer:
    """Map the estimator. GRPO has no value loss and no second standardisation there."""
    names = {"reinpp": "reinforce_plus_plus", "reinpp_baseline": "reinforce_plus_plus_baseline"}
    answer: dict[str, Any] = {"algorithm.adv_type": names.get(value, value)}
    if value == "grpo":
        answer |= {"algorithm.normalize_advantages": False, "algorithm.value_loss_coef": 0.0}
    return answer


def loss_type(value: Any, source: Source) -> Answer:
    """Map the loss: robots have one model here, whose value loss may have the coefficient 0."""
    answer: dict[str, Any] = {"algorithm.loss_type": "actor_critic"}
    if value == "actor":
        answer["algorithm.value_loss_coef"] = 0.0
    if value == "decoupled_actor_critic":
        answer["algorithm.off_policy_correction"] = "token"
    return answer


def normalize_advantages(value: Any, source: Source) -> Answer:
    """Map the standardisation, which their synchronous program decides by the estimator."""
    return {"algorithm.normalize_advantages": not is_grpo(source)}


def filter_rewards(value: Any, source: Source) -> Answer:
    """Map the filter of groups by their mean reward; dropped groups are not replaced."""
    lower, upper = (source.get(f"algorithm.rewards_{x}_bound") for x in ("lower", "upper"))
    size, scale = source.get("algorithm.group_size", 1), reward_scale(source)
    if not filters_mixed_groups(lower, upper, size=size, scale=scale):
        return Reason(
            f"keeps groups of {size} with a mean reward from {show(lower)} to {show(upper)} there,"
            " which no option here does; group_filter=success keeps all mixed ones"
        )
    return {"algorithm.group_filter": "success", "algorithm.group_filter_rounds": 1}


def filters_mixed_groups(lower: Any, upper: Any, *, size: int, scale: float = 1.0) -> bool:
    """Return whether bounds of a group's mean reward keep the groups of unequal success."""
    if not isinstance(lower, (int, float)) or not isinstance(upper, (int, float)):
        return True
    kept = [k for k in range(size + 1) if lower <= scale * k / size <= upper]
    return kept == list(range(1, size))


def reward_scale(source: Source) -> float:
    """Return their reward of a success."""
    return float(source.get("env.train.reward_coef", 1.0))


def entropy_bonus(value: Any, source: Source) -> Answer:
    """Map the coefficient; openpi's entropy is the mean over the K + 1 terms of the chain."""
    steps = source.get("actor.model.openpi.num_steps", source.get("actor.model.num_steps"))
    if model_type(source) == "openpi" and value:
        if source.get("actor.model.openpi.noise_method") != "flow_noise":
            return Reason("the entropy of flow_sde is 0 there")
        return {"algorithm.entropy_bonus": round(value / (int(steps) + 1), 10)}
    return {"algorithm.entropy_bonus": value}


def entropy_type(value: Any, source: Source) -> Answer:
    """Map the level of the entropy; that of openpi is one number, a mean over all actions."""
    return {"algorithm.entropy_type": "token_level" if model_type(source) == "openpi" else value}


def per_step(value: Any, source: Source) -> Any:
    """Map a discount per decision to one per primitive step if rewards are given per chunk."""
    of_chunk = source.get("algorithm.reward_type") == "chunk_level"
    if of_chunk and chunk_size(source) > 1 and isinstance(value, (int, float)):
        return round(float(value) ** (1 / chunk_size(source)), 8)
    return value


def reward_type(value: Any, source: Source) -> Answer:
    """Map the reward type; their chunk_level sums the rewards of a chunk without a discount."""
    if value == "chunk_level" and chunk_size(source) > 1:
        value = "chunk_sum"
    return {"algorithm.reward_type": value}


def bootstrap_type(value: Any, source: Source) -> Answer:
    if source.get("env.train.total_num_envs") is not None and not resets(source):
        return Reason("read there with auto_reset only: the value is never added at an end")
    return {"algorithm.bootstrap_type": value}


# ------------------------------------------------------------------------------------- environments
def rollout(value: Any, source: Source) -> Answer:
    """Map environments, steps and passes of a rollout, and what follows from auto_reset.

    Without auto_reset every pass starts new episodes, time limits have no bootstrap and the loss
    weighs trajectories equally. With auto_reset episodes continue, so that passes lengthen the
    rollout.
    """
    envs = source.get("env.train.total_num_envs")
    steps = source.get("env.train.max_steps_per_rollout_epoch")
    passes, continues = source.get("env.train.rollout_epoch", 1), resets(source)
    answer: dict[str, Any] = {"env.restart_each_rollout": not continues}
    if not continues:
        answer |= {
            "algorithm.rollout_epoch": passes,
            "algorithm.loss_agg_func": "trajectory-mean",
            "algorithm.bootstrap_type": "never",
        }
    if envs is not None:
        answer["env.num_envs"] = envs
    if steps is not None:
        chunk = chunk_size(source)
        if steps % chunk:
            return Reason(f"not a multiple of actor.model.num_action_chunks = {chunk}")
        answer["algorithm.horizon"] = steps // chunk * (passes if continues else 1)
    return answer


def samples(source: Source) -> int:
    """Return the decisions of an update, 0 if the file does not set them."""
    sizes = rollout(None, source)
    if isinstance(sizes, Reason):
        return 0
    passes = sizes.get("algorithm.rollout_epoch", 1)
    return sizes.get("env.num_envs", 0) * sizes.get("algorithm.horizon", 0) * passes


def evaluation(value: Any, source: Source) -> Answer:
    """Map the episodes of an evaluation: passes x environments, the first episode of each.

    The number of simulators changes no result, so that those of the training suffice.
    """
    envs = source.get("env.eval.total_num_envs", 1)
    episodes = envs * source.get("env.eval.rollout_epoch", 1)
    simulators = min(envs, source.get("env.train.total_num_envs", envs))
    return {"evaluation.num_envs": simulators, "evaluation.episodes": episodes}


def env_type(value: Any, source: Source) -> Answer:
    """Map the simulator, its suite of tasks, and the images that the model reads."""
    if simulator(source) is not None:
        return Reason(f"no adapter: {missing_options(source)['env.id']}")
    suite = source.get("env.train.task_suite_name", "libero_10")
    answer: dict[str, Any] = {"env.simulator": "libero", "env.id": f"libero/{suite}"}
    kwargs: dict[str, Any] = {"settle_steps": 15, "draw_tasks": True}
    if (state := source.get("env.train.specific_reset_id")) is not None:
        kwargs["tasks"] = [int(state) // LIBERO_STATES]
    elif (tasks := source.get("env.train.task_id_filter")) is not None:
        kwargs["tasks"] = tasks
    answer["env.kwargs"] = kwargs
    if model_type(source) in (*OPENVLA, "openpi"):
        images = int(source.get("actor.model.num_images_in_input", 1))
        answer["env.cameras"] = CAMERAS[: 1 + (model_type(source) == "openpi" or images > 1)]
    return answer


# ------------------------------------------------------------------------------------------- models
def model(value: Any, source: Source) -> Answer:
    """Map the type of the model.

    Their mlp_policy reads the state, has a separate value network, unnormalised observations and an
    initial standard deviation of e^-0.5. The value loss of OpenVLA trains its language model.
    """
    answer = dict(MODELS[value])
    if value == "mlp_policy" and source.has("env.train.") and simulator(source) is None:
        answer |= {"model.actor_obs": ["state"], "model.critic_obs": ["state"]}
    if value == "openvla_oft" and source.get("actor.model.implement_version") is None:
        answer["model.omit_stop_token"] = True  # their only implementation before this option
    return answer


def config_name(value: Any, source: Source) -> Answer:
    """Map the name of openpi's configuration, if it is known and computed here."""
    if value in openpi_configs.CONFIGS and not openpi_configs.CONFIGS[value].adapts:
        return {"model.config_name": value}
    return REASONS["OPENPI_NAME"]


def precision(value: Any, source: Source) -> Answer:
    """Map the type of the weights; null of openpi is its checkpoint's, mostly bfloat16."""
    if value is None:
        bf16 = {"model.dtype": "bfloat16"}
        return bf16 if model_type(source) == "openpi" else Reason("null: not set")
    names = {"bf16": "bfloat16", "fp32": "float32", "32": "float32", 32: "float32"}
    return {"model.dtype": names.get(value, value)}


# -------------------------------------------------------------------------------------- differences
def differences(source: Source) -> dict[str, str]:
    """Return the differences that no option removes: their option -> what differs.

    The table has them by the names of these conditions. The others apply where the option is true.
    """
    continues, chunk = resets(source), chunk_size(source)
    has_env = source.get("env.train.total_num_envs") is not None
    kind = model_type(source)
    has_advantages = not is_grpo(source)
    has_value_head = has_advantages and kind == "openpi"
    of_prefix = bool(source.get("actor.model.openpi.value_after_vlm", False))
    top_k = source.get("rollout.sampling_params.top_k", 0)
    lora = source.get("actor.model.is_lora", False) and source.get("actor.model.lora_path")
    schedule = source.get("actor.optim.total_training_steps")
    cosine = source.get("actor.optim.lr_scheduler") == "cosine" and schedule is not None
    by_action = source.get("algorithm.reward_type") == "action_level"
    conditions = {
        "continued_chunks": has_env and continues and chunk > 1,
        "continued_passes": has_env and continues and source.get("env.train.rollout_epoch", 1) > 1,
        "weights_of_steps": has_env and not continues and chunk > 1 and not by_action,
        "asynchronous": source.get("algorithm.loss_type") == "decoupled_actor_critic",
        "advantages": has_advantages,
        "value_of_prefix": has_value_head and of_prefix,
        "value_of_expert": has_value_head and not of_prefix,
        "reward_scale": has_advantages and reward_scale(source) != 1,
        "top_k": kind in OPENVLA and 0 < top_k < 256,
        "lora_path": lora,
        "reset_id": source.get("env.train.specific_reset_id") is not None,
        "schedule": cosine and schedule != source.get("runner.max_epochs"),
    }
    return {
        path: text.format(chunk=chunk, top_k=top_k)
        for name, texts in table.read_table("rlinf")["differences"].items()
        for path, text in texts.items()
        if path in source.values and conditions.get(name, source.get(path, False))
    }


RLINF = load(
    "rlinf",
    {
        **rules.SHARED,
        **globals(),
        "clip_ratio": rules.clip_ratio("algorithm"),
        "adam_betas": rules.adam_betas("actor.optim.adam_beta"),
        "warmup_steps": rules.warmup_steps(),
        "warmup_fraction": rules.warmup_fraction(updates),
        "task_type": lambda value, source: mode_of(source),
        "three_layers": lambda value, source: [value] * 3,
        "node_groups": lambda value, source: {g["label"]: g["node_ranks"] for g in value},
    },
    mode=mode_of,
    variant=variant,
    differences=lambda source: differences(source) if trains_robot(source) else {},
    one_row=True,
    to_write=lambda source: missing_options(source) if trains_robot(source) else {},
)
