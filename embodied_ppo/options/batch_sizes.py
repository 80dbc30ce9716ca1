"""Batch sizes of an update and length of a run: samples, minibatches, optimiser steps, environment
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from embodied_ppo.options.schema import Config

DISTILLATION_EPOCHS = 4  # number of passes of ``distill`` over one rollout
# Largest number of samples of one optimiser step of ``distill``, unless a column is longer.
DISTILLATION_BATCH = 256


@dataclass(frozen=True)
class MinibatchSchedule:
    """Optimiser steps of an update: passes over a rollout, and their minibatches.

    Attributes:
        epochs: Number of passes.
        minibatches: Number of minibatches of each pass.
        size: Samples of a minibatch (in reasoning: prompts).
    """

    epochs: int
    minibatches: int
    size: int

    @property
    def steps(self) -> int:
        """Number of optimiser steps of an update."""
        return self.epochs * self.minibatches

    def describe(self, unit: str) -> str:
        """Return the passes as text; ``unit`` follows the size of a minibatch."""
        epochs = f"{self.epochs:,} epoch{'s' * (self.epochs != 1)}"
        minibatches = f"{self.minibatches:,} minibatch{'es' * (self.minibatches != 1)}"
        steps = f"{self.steps:,} optimiser step{'s' * (self.steps != 1)}"
        return f"{epochs} x {minibatches} of {self.size:,}{unit} = {steps}"


@dataclass(frozen=True)
class Batches:
    """Batch sizes of an update.

    Attributes:
        samples: Samples of a rollout (in reasoning: responses).
        actor: Optimiser steps of the actor.
        critic: Optimiser steps of the critic; None: it is trained with the actor, or there is none.
    """

    samples: int
    actor: MinibatchSchedule
    critic: MinibatchSchedule | None = None


def optimization_config(config: Config) -> Config:
    """Return the options with those of distillation in place of PPO's where a teacher is set.

    The optimiser, minibatches and the schedule of compiled code read section algorithm.
    """
    if config.teacher is None:
        return config
    d, a = config.distillation, config.algorithm
    # Gradients of a recurrent policy pass through whole columns.
    columns = config.model.recurrent is not None
    unit = a.horizon if columns else 1
    units = a.horizon * episodes(config) // unit
    largest = min(max(1, DISTILLATION_BATCH // unit), units)
    batch = unit * next(n for n in range(largest, 0, -1) if units % n == 0)
    algorithm = replace(
        a,
        update_epoch=DISTILLATION_EPOCHS,
        global_batch_size=batch,
        micro_batch_size=None if a.micro_batch_size is None else min(a.micro_batch_size, batch),
        minibatch_unit="column" if columns else "step",
        loss_agg_func="token-mean",
        target_kl_stop=None,
        rpo_alpha=None,
        lr=d.lr,
        lr_schedule=d.lr_schedule,
        lr_end=0.0,
        lr_warmup=0,
    )
    return replace(config, algorithm=algorithm)


def episodes(config: Config) -> int:
    """Return the columns of a robot's rollout: environments x passes."""
    return config.env.num_envs * config.algorithm.rollout_epoch


def batches(config: Config) -> Batches:
    """Return the batch sizes. The options are checked, so every division is exact."""
    a, c = optimization_config(config).algorithm, config.critic

    def schedule(total: int, epochs: int, size: int) -> MinibatchSchedule:
        return MinibatchSchedule(epochs, total // size, size)

    if config.mode == "embodied":
        samples = a.horizon * episodes(config)
        return Batches(samples, schedule(samples, a.update_epoch, a.global_batch_size))
    prompts = a.rollout_batch_size
    actor = schedule(prompts, a.update_epoch, a.global_batch_size)
    critic = None
    if a.adv_type == "gae":
        epochs, size = c.update_epoch or a.update_epoch, c.global_batch_size or a.global_batch_size
        critic = schedule(prompts, epochs, size)
    return Batches(prompts * a.group_size, actor, critic)


def lines(config: Config) -> list[str]:
    """Return rollout, minibatches and run as one line of text each."""
    a, b, chunk = config.algorithm, batches(config), config.env.action_chunk
    updates = total_updates(config)
    if config.mode == "embodied":
        unit, samples = "", "samples"
        steps = "steps" if chunk == 1 else "decisions"
        passes = f" x {a.rollout_epoch:,} passes" if a.rollout_epoch > 1 else ""
        product = f"{config.env.num_envs:,} environments{passes} x {a.horizon:,} {steps}"
        # The end of an episode cuts a chunk short.
        limit = "" if chunk == 1 else "at most "
        total = f"{limit}{updates * b.samples * chunk:,} environment steps"
        run = f"{updates:,} updates x {b.samples * chunk:,} = {total}"
    else:
        unit, samples = " prompts", "responses"
        product = f"{a.rollout_batch_size:,} prompts x {a.group_size:,} responses"
        total = f"{updates * b.samples:,} responses of at most {a.response_length:,} tokens"
        run = f"{updates:,} updates = {total}"
    learning = b.actor.describe(unit)
    limits = [(a.micro_batch_size, samples), (a.micro_batch_tokens, "tokens")]
    if text := " and ".join(f"{size:,} {name}" for size, name in limits if size is not None):
        learning += f" (micro-batches of at most {text})"
    if b.critic is not None and b.critic != b.actor:
        learning = f"actor: {learning}; critic: {b.critic.describe(unit)}"
    return [f"{product} = {b.samples:,} {samples} per update", learning, run]


def steps_per_update(config: Config) -> int:
    """Return the environment steps of one rollout; with action chunks this is an upper bound."""
    a, env = config.algorithm, config.env
    return a.horizon * env.num_envs * a.rollout_epoch * env.action_chunk


def total_updates(config: Config) -> int:
    """Return ``updates``, or as many complete updates as ``env_steps`` allows (at least one)."""
    if config.updates is not None:
        return config.updates
    assert config.env_steps is not None
    return max(1, config.env_steps // steps_per_update(config))


def unit(config: Config) -> Literal["env_steps", "tokens"]:
    """Return the unit in which experience is counted."""
    return "tokens" if config.mode == "reasoning" else "env_steps"


def horizon(config: Config) -> int:
    """Return the steps (tokens) of one rollout."""
    a = config.algorithm
    return a.response_length if config.mode == "reasoning" else a.horizon
