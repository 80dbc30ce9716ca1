"""Start the worker processes of a plan, independent of the mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from embodied_ppo.config import placement
from embodied_ppo.core import devices
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.modes.base import Mode, RunComponents, RunRequest
from embodied_ppo.placement import memory_estimate
from embodied_ppo.placement.channels import Exchange
from embodied_ppo.placement.worker import Worker, WorkerSpec


def build_workers(mode: Mode, request: RunRequest, plan: placement.Plan) -> RunComponents:
    """Build the system in the processes of a Ray cluster.

    Raises:
        ConfigError, EnvError: An option is refused, here or in a worker process.
        PlacementError: The estimated memory does not fit, or the cluster lacks the devices.
    """
    config = request.config
    mode.check_files(config)
    if mode.can_estimate(config):
        mode.check_memory(config, plan)
    from embodied_ppo.placement.ray_system import ClusterSystem  # importing Ray takes a second

    system = ClusterSystem(
        mode.records(request),
        plan,
        WorkerFactory.of(mode, request),
        options=config.cluster,
        threads=config.threads,
        notice=request.notice,
    )
    request.early_log_lines.extend(placement.lines(plan.rows()))
    return RunComponents(system, mode.title(config), system.write_report, system.facts)


@dataclass(frozen=True)
class WorkerFactory:
    """Builds the roles of a worker process, in that process. It is pickled and sent there.

    Attributes:
        mode: Builds the worker.
        request: The run's request. Its callbacks cannot be pickled; ``__call__`` replaces them.
    """

    mode: Mode
    request: RunRequest

    @classmethod
    def of(cls, mode: Mode, request: RunRequest) -> WorkerFactory:
        """Return the factory for a request, without what only the driver can use."""
        sent = replace(
            request,
            # Ray gives a process its own GPUs, numbered from 0.
            device=torch.device(request.device.type),
            run_dir=request.run_dir.absolute(),
            notice=_ignore_line,
            progress=_ignore_line,
            early_log_lines=[],
            advance=_ignore_progress,
        )
        return cls(mode, sent)

    def __call__(
        self, spec: WorkerSpec, exchange: Exchange | None, say: Callable[[str], None]
    ) -> tuple[Worker, Mapping[str, Any]]:
        """Build the roles of this process; ``say`` sends a line to the driver's log."""
        reported: set[str] = set()

        def notice(line: str) -> None:
            if line not in reported:
                reported.add(line)
                say(line)

        torch.set_float32_matmul_precision(self.request.config.matmul_precision)
        device = devices.activate(self.request.device)
        devices.select_egl_device(device, notice)
        request = replace(
            self.request, device=device, notice=notice, progress=say, early_log_lines=[]
        )
        # Nothing closes this stack: the process is ended after ``Worker.close``.
        worker, facts = self.mode.build_worker(request, spec, exchange, ExitStack())
        for line in request.early_log_lines:
            say(line)
        return worker, facts


def _ignore_line(line: str) -> None:
    """Stand in for a callback of the driver."""


def _ignore_progress(task: str, completed: int, total: int) -> None:
    """Stand in for the progress callback of the driver."""


def shard_notice(model: nn.Module, ranks: Ranks) -> str:
    """Return the line of the log about the memory that cluster.shard saves."""
    full, local = (
        memory_estimate.nbytes(list(tensors))
        for tensors in (model.parameters(), map(ranks.local_tensor, model.parameters()))
    )
    return (
        f"cluster.shard: {ranks.world} processes of actor hold the model's "
        f"{placement.amount(full)} together, this one {placement.amount(local)}"
    )
