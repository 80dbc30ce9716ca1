"""Build the system of a run, in this process or in workers, with the program of its mode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from embodied_ppo.cluster import run_plan
from embodied_ppo.cluster.channels import Exchange
from embodied_ppo.cluster.worker import Worker, WorkerSpec
from embodied_ppo.core import devices
from embodied_ppo.evaluation.run_report import ReportWriter
from embodied_ppo.options import placement, validation
from embodied_ppo.options.placement import Plan
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.programs import language, robot
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.rollout.interleaved_rollouts import InterleavedRollouts
from embodied_ppo.rollout.language_inputs import check_files
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.pipelined_system import PipelinedSystem
from embodied_ppo.training.progress import Messages
from embodied_ppo.training.run_system import RunSystem


@dataclass(frozen=True)
class BuiltSystem:
    """A system that is ready to train.

    Attributes:
        system: Collects, updates, evaluates and saves.
        title: Name of what is trained, for the first line of the log.
        write_report: Writes the report of an evaluation.
        facts: Results of the steps before PPO (cloning), for the summary.
    """

    system: RunSystem
    title: str
    write_report: ReportWriter
    facts: Mapping[str, Any]


def build(
    spec: RunSpec,
    process: WorkerSpec,
    exchange: Exchange | None,
    messages: Messages,
    stack: ExitStack,
) -> tuple[Worker, Mapping[str, Any]]:
    """Construct the roles of one process with the program of the run's mode.

    Arguments, result and exceptions: as of ``robot.build``.
    """
    if spec.config.mode == "reasoning":
        return language.build(spec, process, exchange, messages, stack)
    return robot.build(spec, process, exchange, messages, stack)


def build_system(spec: RunSpec, messages: Messages, stack: ExitStack) -> BuiltSystem:
    """Build the system in this process, or in the workers of the plan.

    Args:
        spec: The run.
        messages: Lines for the log.
        stack: Closes what is opened here.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
        PlacementError: The memory does not suffice, or the cluster lacks the devices.
    """
    # A plan assigns roles to processes; without one this process has all of them.
    if spec.plan is not None:
        return _build_workers(spec, spec.plan, messages)
    config = spec.config
    # Refuse what exceeds the memory before models are loaded.
    if run_plan.can_estimate(config, in_process=True):
        run_plan.check_memory(config, run_plan.plan_on_one_device(config, spec.device))
    roles = tuple(validation.roles(config))
    process = WorkerSpec(roles, {"rollout": (0, 1)}, stages=config.cluster.stages)
    worker, facts = build(spec, process, None, messages, stack)
    policy, rollout, learner = worker.policy, worker.rollout, worker.learner
    assert policy is not None and rollout is not None and learner is not None
    assert worker.measure is not None and worker.write_report is not None
    make_system = LocalSystem
    if config.pipeline:
        assert isinstance(rollout, Rollout | InterleavedRollouts) and isinstance(learner, PPO)
        assert isinstance(rollout.policy, nn.Module)
        # The clock of the process would count the time of both threads.
        rollout.cpu_clock = learner.cpu_clock = time.thread_time
        make_system = partial(PipelinedSystem, acting=rollout.policy, stop_rollout=rollout.stop)
    system = make_system(
        spec.records,
        policy=policy,
        rollout=rollout,
        learner=learner,
        count=worker.count,
        measure=worker.measure,
        publish=worker.on_weights_updated,
    )
    # The policy is in this process, so the title can name its size.
    size = sum(p.numel() for p in policy.parameters())
    return BuiltSystem(system, _title(spec, size), worker.write_report, facts)


def _title(spec: RunSpec, size: int | None = None) -> str:
    """Return the name of what is trained; ``size``: number of the policy's parameters."""
    config = spec.config
    if config.mode != "reasoning":
        return config.env.title
    name = config.data.task or Path(config.actor.model.path or "a new model").name
    return name if size is None else f"{name}, {size / 1e6:.1f} M parameters"


# ------------------------------------------------------------------------------------------ workers
def _build_workers(spec: RunSpec, plan: Plan, messages: Messages) -> BuiltSystem:
    """Build the system in the processes of a Ray cluster."""
    config = spec.config
    # Refuse missing files before the processes of the cluster start.
    if config.mode == "reasoning":
        check_files(config)
    if run_plan.can_estimate(config):
        run_plan.check_memory(config, plan)
    from embodied_ppo.cluster.ray_system import ClusterSystem  # importing Ray takes a second

    system = ClusterSystem(
        spec.records,
        plan,
        WorkerBuilder.of(spec),
        options=config.cluster,
        threads=config.threads,
        notice=messages.notice,
    )
    for line in placement.lines(plan.rows()):
        messages.add(line)
    return BuiltSystem(system, _title(spec), system.write_report, system.facts)


@dataclass(frozen=True)
class WorkerBuilder:
    """Builds the roles of a worker process, in that process. It is pickled and sent there.

    Attributes:
        spec: The run.
    """

    spec: RunSpec

    @classmethod
    def of(cls, spec: RunSpec) -> WorkerBuilder:
        """Return the builder of a run, with a device and a directory that hold in any process."""
        # Ray gives a process its own GPUs, numbered from 0.
        device, run_dir = torch.device(spec.device.type), spec.run_dir.absolute()
        # A process of the cluster can have another working directory.
        return cls(replace(spec, device=device, run_dir=run_dir))

    def __call__(
        self, process: WorkerSpec, exchange: Exchange | None, say: Callable[[str], None]
    ) -> tuple[Worker, Mapping[str, Any]]:
        """Build the roles of this process; ``say`` sends a line to the driver's log."""
        messages = Messages(say)
        # Send each line at once: the driver keeps lines until its log is open.
        messages.open(say)
        if self.spec.config.deterministic:
            devices.use_deterministic_algorithms(self.spec.device)
        device = devices.activate(self.spec.device)
        devices.select_egl_device(device, messages.notice)
        # Nothing closes this stack: the process is ended after ``Worker.close``.
        return build(replace(self.spec, device=device), process, exchange, messages, ExitStack())
