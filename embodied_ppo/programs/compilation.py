"""When minibatches and acting switch to compiled code."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.cluster.run_plan import OFFLOADING_OBSTACLE
from embodied_ppo.cluster.worker import WorkerSpec
from embodied_ppo.core import compile
from embodied_ppo.options.batch_sizes import batches, total_updates
from embodied_ppo.options.schema import Config
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.training.progress import Messages

# Optimiser steps until compile=auto switches minibatches to compiled code, about the time of its
# compilation. That of acting comes next, not at the same time, and switches after twice as many.
COMPILE_AFTER = 4096
# It does not wait longer than for so many samples: few, large minibatches are slow, too.
COMPILE_AFTER_SAMPLES = 1 << 18


def compile_from(
    config: Config, device: torch.device, notice: Callable[[str], None], *, parts: int = 1
) -> tuple[int | None, str]:
    """Return the first update with compiled minibatches (None: never, and the reason).

    It follows from options alone, so that a repeated run switches at the same update.

    Args:
        notice: Called with the reason where compile=auto cannot be used.
        parts: Rollouts that the environments are divided among.

    Raises:
        ConfigError: compile=always is impossible with these options.
    """
    a = config.algorithm
    if config.compile == "never":
        return None, "compile=never"
    # On a GPU the kernels of a small network are compiled in this process, and a graph is captured.
    immediately = config.compile == "always" or device.type == "cuda"
    sizes = batches(config)
    ends = -(-COMPILE_AFTER // sizes.actor.steps), -(-COMPILE_AFTER_SAMPLES // sizes.samples)
    since = 0 if immediately else min(ends)
    # Code that is never used is not compiled.
    if since >= total_updates(config):
        start = f"{COMPILE_AFTER} optimiser steps or {COMPILE_AFTER_SAMPLES} samples"
        return None, (
            f"compile=auto starts after {start}, in update {since + 1}, and the run has"
            f" {total_updates(config)}"
        )
    # Options and machines without compiled code. Compiled code has fixed shapes and reads whole
    # minibatches and whole observations, and tracing would fix a branch that depends on values.
    micro, rows = a.micro_batch_size, a.rollout_micro_batch_size or config.env.num_envs
    obstacles = {
        "model.network is compiled with compile=always only": (
            config.model.network is not None and config.compile == "auto"
        ),
        "a model of model.checkpoint is not compiled; leave it null": config.model.checkpoint,
        "algorithm.rollout_micro_batch_size cuts the observations that are acted on; leave it"
        " null": rows < config.env.num_envs // parts,
        "algorithm.micro_batch_size cuts minibatches; leave it null": (
            micro is not None and micro < a.global_batch_size
        ),
    }
    compile_obstacle = next((text for text, holds in obstacles.items() if holds), "")
    if not compile_obstacle and device.type == "cpu":
        compile_obstacle = compile.unavailable_reason()
    if not compile_obstacle:
        return since, ""
    # An explicit request that is impossible is refused; otherwise a line of the log is enough.
    if config.compile == "always":
        raise ConfigError(f"compile=always: {compile_obstacle}; or use compile=auto")
    notice(f"compile: not used, {compile_obstacle}")
    return None, compile_obstacle


def schedule_at(
    spec: RunSpec, messages: Messages, since: int | None, *, start: int = 0
) -> compile.CompileSchedule:
    """Return the schedule that switches to compiled code at an update.

    Args:
        spec: The run.
        messages: Receives lines for the log.
        since: First update with compiled code; None: never. Nothing is compiled where this
            execution of the run ends before.
        start: Update at which the compilation starts.
    """
    if since is not None and since >= spec.last_update:
        since = None
    c = spec.config
    # The simulators' threads rest while the learner trains, except in a pipeline.
    is_alone = c.placement == "local" and not c.pipeline
    cores = min(c.env.num_threads or 2, len(os.sched_getaffinity(0))) if is_alone else 1
    return compile.CompileSchedule(
        since,
        start_update=start,
        required=c.compile == "always",
        notice=messages.notice,
        threads=min(2, cores),
    )


@dataclass(frozen=True)
class CompileSchedules:
    """When a robot's run switches to compiled code.

    Attributes:
        minibatches: Schedule of the learner.
        acting: Returns a schedule of a rollout; each rollout has its own.
        reason: Why nothing is compiled; "" if something is.
    """

    minibatches: compile.CompileSchedule
    acting: Callable[[], compile.CompileSchedule]
    reason: str


def compile_schedules(
    spec: RunSpec, process: WorkerSpec, messages: Messages, *, parts: int
) -> CompileSchedules:
    """Return the schedules of a process, see ``compile_from``."""
    # Compiled code contains addresses of tensors, and its minibatches do not exchange gradients.
    since, reason, learners = None, OFFLOADING_OBSTACLE, process.learners
    if not process.tensors_move:
        since, reason = compile_from(spec.config, spec.device, messages.notice, parts=parts)
    if since is not None and learners.world > 1 and "actor" in process.roles:
        messages.notice(
            f"compile: minibatches are not compiled, {learners.world} processes learn together"
        )
    minibatches = schedule_at(spec, messages, since if learners.world == 1 else None)
    # Compiling both at the same time would delay the first, so acting follows later.
    acting_since = None if since is None else 2 * since
    acting = partial(schedule_at, spec, messages, acting_since, start=since or 0)
    return CompileSchedules(minibatches, acting, reason)
