"""Rules of mode=reasoning: prompts and responses, a language model and its critic."""

from __future__ import annotations

import math
import re
from typing import ClassVar

from embodied_ppo.config.rules.base import (
    LARGEST_ROLLOUT,
    Batches,
    ModeRules,
    Passes,
    check_controller,
    divisors,
    nearest_multiples,
    nearest_values,
)
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import ConfigError, PlacementError, show


class ReasoningRules(ModeRules):
    """A language model, and with GAE a second model as critic."""

    mode = "reasoning"
    policy_name = "language model"
    loss_type = "actor"
    loss_type_mismatch = (
        "is the loss of a model with a value head, but mode=reasoning trains a policy without one"
    )
    group_members = "responses"
    batch_unit = " prompts"
    default_experiment = "arithmetic"
    experiment_sections = ("actor.", "data.")
    required_options: ClassVar = {
        "actor.model.path": "a directory that transformers wrote",
        "data.train": "[FILE.jsonl] with prompts and answers",
        "data.eval": "[FILE.jsonl] with held-out prompts",
        "updates": "how long to train",
    }
    group_overrides: ClassVar = {"mode": "reasoning", "model": None}

    def check(self, config: Config) -> None:
        _check_options(config)
        _check_sizes(config)

    def check_placement(self, config: Config) -> None:
        stages = config.cluster.stages
        if stages > 1:
            raise PlacementError(
                f"cluster.stages = {stages}: is for simulators, and mode=reasoning has none; write"
                " cluster.stages=1"
            )

    def check_tuning(self, config: Config) -> None:
        if config.compile == "always":
            raise ConfigError(
                "compile = always: tune times language models without the compiler; leave it out,"
                " and write it to train with the placement that tune recommends"
            )
        if config.rollout.engine != "builtin":
            raise ConfigError(
                f"rollout.engine = {config.rollout.engine}: tune times the built-in engine, not"
                " this one; leave it out"
            )

    def unused_roles(self, config: Config) -> list[str]:
        a, unused = config.algorithm, list[str]()
        if a.adv_type != "gae":  # the other estimators use no values
            unused.append("critic")
        if not (a.use_kl_loss or a.use_kl_in_reward):
            unused.append("reference")
        return unused

    def batches(self, config: Config) -> Batches:
        a, c, prompts = config.algorithm, config.critic, config.algorithm.rollout_batch_size
        actor = Passes(a.update_epoch, prompts // a.global_batch_size, a.global_batch_size)
        size = c.global_batch_size or a.global_batch_size
        critic = Passes(c.update_epoch or a.update_epoch, prompts // size, size)
        return Batches(prompts * a.group_size, actor, critic if a.adv_type == "gae" else None)

    def _micro_batches(self, config: Config) -> list[str]:
        a, limits = config.algorithm, list[str]()
        if a.micro_batch_size is not None:
            limits.append(f"{a.micro_batch_size:,} responses")
        if a.micro_batch_tokens is not None:
            limits.append(f"{a.micro_batch_tokens:,} tokens")
        return limits

    def _rollout_line(self, config: Config, b: Batches) -> str:
        a = config.algorithm
        prompts = f"{a.rollout_batch_size:,} prompts x {a.group_size:,} responses"
        return f"{prompts} = {b.samples:,} responses per update"

    def _run_line(self, config: Config, b: Batches, updates: int) -> str:
        tokens = config.algorithm.response_length
        return (
            f"{updates:,} updates = {updates * b.samples:,} responses of at most {tokens:,} tokens"
        )


def _check_options(config: Config) -> None:
    """Refuse options that exclude each other or lack what they need. Raises ConfigError."""
    a, d, e, r = config.algorithm, config.data, config.evaluation, config.rollout
    _check_format(config.reward.format)
    if config.updates is None:
        raise ConfigError("updates = null: the length of training is not set; write updates=100")
    if d.task is None and not d.train:
        raise ConfigError(
            "data.train = [] and data.task = null: there are no prompts; write"
            " data.train=[FILE.jsonl] or data.task=arithmetic"
        )
    if d.task is None and not d.eval:
        raise ConfigError(
            "data.eval = []: there is nothing to evaluate on; write data.eval=[FILE.jsonl] with"
            " held-out prompts"
        )
    if config.actor.model.path is None and not config.actor.model.architecture:
        raise ConfigError(
            "actor.model.path = null: there is no model; name a directory that transformers"
            " wrote, or give actor.model.architecture (experiment=arithmetic has one)"
        )
    if d.task is None and config.actor.model.path is None and config.actor.tokenizer is None:
        raise ConfigError(
            "actor.tokenizer = null: a new model for files of prompts needs one; write"
            " actor.tokenizer=DIRECTORY"
        )
    if a.ratio_level == "chunk":
        raise ConfigError(
            "algorithm.ratio_level = chunk is a mean over the actions of a robot's decision; write"
            " algorithm.ratio_level=sequence (a response) or token"
        )
    if a.adv_type == "gae" and not config.critic.use_critic_model:
        raise ConfigError(
            "critic.use_critic_model = false, but algorithm.adv_type = gae needs a critic;"
            " write critic.use_critic_model=true, or algorithm.adv_type=grpo with"
            " algorithm.group_size=8"
        )
    if r.overlong_buffer >= a.response_length:
        raise ConfigError(
            f"rollout.overlong_buffer = {r.overlong_buffer} must be < algorithm.response_length"
            f" = {a.response_length}; lower it"
        )
    if e.n > 1 and e.deterministic:
        raise ConfigError(
            f"evaluation.n = {e.n}, but evaluation.deterministic = true: all {e.n} responses"
            " would be the same; write evaluation.deterministic=false"
        )
    if config.compile == "always" and (
        a.micro_batch_tokens is not None or a.micro_batch_size is not None
    ):
        raise ConfigError(
            "compile = always: compiled minibatches have one shape; leave"
            " algorithm.micro_batch_tokens and algorithm.micro_batch_size null, or write"
            " compile=never"
        )
    if config.critic.model.path is not None and bool(config.critic.model.architecture):
        raise ConfigError(
            "critic.model.path and critic.model.architecture exclude each other; keep one of them"
        )
    if (r.engine == "vllm" or config.actor.model.path is not None) and config.warm_start.steps > 0:
        raise ConfigError(
            f"warm_start.steps = {config.warm_start.steps} is for a new model"
            " (actor.model.path=null) and rollout.engine=builtin; write warm_start.steps=0"
        )
    if r.engine == "vllm" and config.actor.model.path is None:
        raise ConfigError(
            "rollout.engine = vllm needs a directory; write actor.model.path=DIRECTORY, or"
            " rollout.engine=builtin"
        )


def _check_sizes(config: Config) -> None:
    """Check that minibatches divide the rollout. Raises ConfigError."""
    a = config.algorithm
    total, responses = a.rollout_batch_size, a.rollout_batch_size * a.group_size
    if responses * a.response_length > LARGEST_ROLLOUT:
        raise ConfigError(
            f"algorithm.rollout_batch_size x group_size x response_length = {total} x"
            f" {a.group_size} x {a.response_length} tokens must be <= {LARGEST_ROLLOUT:,}; lower"
            " one of them"
        )
    batches = {
        "algorithm.global_batch_size": a.global_batch_size,
        "critic.global_batch_size": config.critic.global_batch_size or a.global_batch_size,
    }
    unit = math.lcm(*batches.values())
    for path, batch in batches.items():
        if total % batch:
            near = nearest_multiples(unit, total)
            raise ConfigError(
                f"algorithm.rollout_batch_size = {total} is not a multiple of {path} = {batch}"
                f" (prompts); nearest: {nearest_values(divisors(total), batch)}; or nearest"
                f" algorithm.rollout_batch_size: {near}"
            )
    if a.micro_batch_size is not None and a.micro_batch_size > a.global_batch_size * a.group_size:
        raise ConfigError(
            f"algorithm.micro_batch_size = {a.micro_batch_size} (responses) must be <="
            f" algorithm.global_batch_size x group_size = {a.global_batch_size * a.group_size};"
            " leave it null"
        )
    check_controller(config, responses, "algorithm.rollout_batch_size x group_size")


def _check_format(pattern: str | None) -> None:
    """Check that reward.format is a regular expression. Raises ConfigError."""
    try:
        re.compile(pattern or "", re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"reward.format = {show(pattern)} is no regular expression ({error}); correct it, or"
            " write reward.format=null"
        ) from error
