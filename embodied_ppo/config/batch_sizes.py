"""What an update and a run consist of: samples, minibatches, optimiser steps, environment steps; sums, and as text."""

from __future__ import annotations

from dataclasses import dataclass

from embodied_ppo.config.schema import Config


@dataclass(frozen=True)
class Passes:
    """epochs over a rollout, in ``minibatches`` of ``size`` (samples; reasoning: prompts) each."""

    epochs: int
    minibatches: int
    size: int

    @property
    def steps(self) -> int:
        """Of the optimiser, an update."""
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class Batches:
    """samples of an update (reasoning: responses), and how actor and critic (None: learns with the actor, or there is
    none) go over them."""

    samples: int
    actor: Passes
    critic: Passes | None = None


def batches(config: Config) -> Batches:
    """Of checked options: everything divides."""
    a, c = config.algorithm, config.critic
    robot = config.mode == "embodied"
    rollout = a.horizon * config.env.num_envs if robot else a.rollout_batch_size
    actor = Passes(a.update_epoch, rollout // a.global_batch_size, a.global_batch_size)
    if robot:
        return Batches(rollout, actor)
    size = c.global_batch_size or a.global_batch_size
    critic = Passes(c.update_epoch or a.update_epoch, rollout // size, size)
    return Batches(rollout * a.group_size, actor, critic if a.adv_type == "gae" else None)


def lines(config: Config) -> list[str]:
    """The same for people."""
    a, b, updates = config.algorithm, batches(config), total_updates(config)
    if config.mode == "embodied":
        unit = ""
        what = "steps" if config.env.action_chunk == 1 else "decisions"
        rollout = f"{config.env.num_envs:,} environments x {a.horizon:,} {what} = {b.samples:,} samples an update"
        steps = steps_per_update(config)
        most = "" if config.env.action_chunk == 1 else "at most "
        run = f"{updates:,} updates x {steps:,} = {most}{updates * steps:,} environment steps"
    else:
        unit = " prompts"
        prompts = f"{a.rollout_batch_size:,} prompts x {a.group_size:,} responses"
        rollout = f"{prompts} = {b.samples:,} responses an update"
        run = f"{updates:,} updates = {updates * b.samples:,} responses of at most {a.response_length:,} tokens"
    limits = []
    if a.micro_batch_size is not None:
        limits.append(f"{a.micro_batch_size:,} {'samples' if config.mode == 'embodied' else 'responses'}")
    if config.mode == "reasoning" and a.micro_batch_tokens is not None:
        limits.append(f"{a.micro_batch_tokens:,} tokens")
    at_once = f" (at most {' and '.join(limits)} at once)" if limits else ""
    learned = f"{_told(b.actor, unit)}{at_once}"
    if b.critic is not None and b.critic != b.actor:
        learned += f", the critic's {_told(b.critic, unit)}"
    return [rollout, learned, run]


def _told(p: Passes, unit: str) -> str:
    epochs, minibatches = ("epoch" if p.epochs == 1 else "epochs"), "minibatch" if p.minibatches == 1 else "minibatches"
    return f"{p.epochs:,} {epochs} x {p.minibatches:,} {minibatches} of {p.size:,}{unit} = {p.steps:,} optimiser steps"


def steps_per_update(config: Config) -> int:
    """Environment steps of one rollout; with chunks of actions the most there can be."""
    return config.algorithm.horizon * config.env.num_envs * config.env.action_chunk


def total_updates(config: Config) -> int:
    """``updates``, or as many whole updates as ``env_steps`` holds (at least one)."""
    if config.updates is not None:
        return config.updates
    assert config.env_steps is not None
    return max(1, config.env_steps // steps_per_update(config))
