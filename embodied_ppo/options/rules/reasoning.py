"""Rules of mode=reasoning: prompts and responses, a language model and its critic."""

from __future__ import annotations

import math

from embodied_envs.base.errors import ConfigError
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.rules.base import (
    LARGEST_ROLLOUT,
    check_controller,
    divisors,
    nearest_multiples,
    nearest_values,
    refuse,
)
from embodied_ppo.options.schema import Config


def check(config: Config) -> None:
    """Refuse options that exclude each other or lack what they need.

    Raises ConfigError, PlacementError.
    """
    a, d, e, r = config.algorithm, config.data, config.evaluation, config.rollout
    model, stages = config.actor.model, config.cluster.stages
    refuse(
        a.loss_type != "actor",
        f"algorithm.loss_type = {a.loss_type} is the loss of a model with a value head, but"
        " mode=reasoning trains a policy without one; write algorithm.loss_type=actor",
    )
    refuse(
        stages > 1,
        f"cluster.stages = {stages}: is for simulators, and mode=reasoning has none; write"
        " cluster.stages=1",
        PlacementError,
    )
    refuse(
        config.updates is None,
        "updates = null: the length of training is not set; write updates=100",
    )
    refuse(
        d.task is None and not d.train,
        "data.train = [] and data.task = null: there are no prompts; write data.train=[FILE.jsonl]"
        " or data.task=arithmetic",
    )
    refuse(
        d.task is None and not d.eval,
        "data.eval = []: there is nothing to evaluate on; write data.eval=[FILE.jsonl] with"
        " held-out prompts",
    )
    refuse(
        model.path is None and not model.architecture,
        "actor.model.path = null: there is no model; name a directory that transformers wrote, or"
        " give actor.model.architecture (experiment=arithmetic has one)",
    )
    refuse(
        d.task is None and model.path is None and config.actor.tokenizer is None,
        "actor.tokenizer = null: a new model for files of prompts needs one; write"
        " actor.tokenizer=DIRECTORY",
    )
    refuse(
        a.ratio_level == "chunk",
        "algorithm.ratio_level = chunk is a mean over the actions of a robot's decision; write"
        " algorithm.ratio_level=sequence (a response) or token",
    )
    refuse(
        r.overlong_buffer >= a.response_length,
        f"rollout.overlong_buffer = {r.overlong_buffer} must be < algorithm.response_length ="
        f" {a.response_length}; lower it",
    )
    refuse(
        e.n > 1 and e.deterministic,
        f"evaluation.n = {e.n}, but evaluation.deterministic = true: all {e.n} responses would be"
        " the same; write evaluation.deterministic=false",
    )
    refuse(
        config.compile == "always" and (a.micro_batch_tokens or a.micro_batch_size),
        "compile = always: compiled minibatches have one shape; leave algorithm.micro_batch_tokens"
        " and algorithm.micro_batch_size null, or write compile=never",
    )
    refuse(
        (r.engine == "vllm" or model.path is not None) and config.warm_start.steps > 0,
        f"warm_start.steps = {config.warm_start.steps} is for a new model (actor.model.path=null)"
        " and rollout.engine=builtin; write warm_start.steps=0",
    )
    refuse(
        r.engine == "vllm" and model.path is None,
        "rollout.engine = vllm needs a directory; write actor.model.path=DIRECTORY, or"
        " rollout.engine=builtin",
    )
    _check_sizes(config)


def _check_sizes(config: Config) -> None:
    """Check that minibatches divide the rollout. Raises ConfigError."""
    a = config.algorithm
    total, responses = a.rollout_batch_size, a.rollout_batch_size * a.group_size
    refuse(
        responses * a.response_length > LARGEST_ROLLOUT,
        f"algorithm.rollout_batch_size x group_size x response_length = {total} x {a.group_size} x"
        f" {a.response_length} tokens must be <= {LARGEST_ROLLOUT:,}; lower one of them",
    )
    batches = {
        "algorithm.global_batch_size": a.global_batch_size,
        "critic.global_batch_size": config.critic.global_batch_size or a.global_batch_size,
    }
    unit = math.lcm(*batches.values())
    for path, batch in batches.items():
        if total % batch:
            raise ConfigError(
                f"algorithm.rollout_batch_size = {total} is not a multiple of {path} = {batch}"
                f" (prompts); nearest: {nearest_values(divisors(total), batch)}; or nearest"
                f" algorithm.rollout_batch_size: {nearest_multiples(unit, total)}"
            )
    largest = a.global_batch_size * a.group_size
    refuse(
        a.micro_batch_size is not None and a.micro_batch_size > largest,
        f"algorithm.micro_batch_size = {a.micro_batch_size} (responses) must be <="
        f" algorithm.global_batch_size x group_size = {largest}; leave it null",
    )
    check_controller(config, responses, "algorithm.rollout_batch_size x group_size")
