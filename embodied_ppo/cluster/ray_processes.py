"""``ClusterProcesses``: the processes of a plan in a Ray cluster, and their connections."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from embodied_envs.types import EnvInfo, Say
from embodied_ppo.cluster import ray_worker
from embodied_ppo.cluster.ray_reservation import START_TIMEOUT_S, Reservation
from embodied_ppo.cluster.worker import Worker, WorkerSpec
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.placement import REQUESTS, Group, Plan
from embodied_ppo.options.schema import ClusterConfig

# Share of a device's bundle that a process reserves; up to 64 processes fit on a device.
SHARE = 1 / 64
CLOSE_TIMEOUT_S = 3.0  # time limit for processes to close what they hold, seconds


class ClusterProcesses:
    """Starts and ends the processes of a plan; computes which of them serve requests of others."""

    def __init__(self, plan: Plan, options: ClusterConfig, threads: int, notice: Say) -> None:
        """Reserve the devices and start the processes, which build no worker yet.

        Args:
            plan: Groups of processes on devices.
            options: Time limits and sharding.
            threads: CPU threads of tensor operations in each process; 0: torch's default.
            notice: Called with lines for the log.

        Raises:
            PlacementError: The devices are not available.
        """
        self.plan, self.options = plan, options
        self.by_group: dict[Group, list[ray_worker.WorkerHandle]] = {}
        self.reservation = Reservation(plan, notice)
        try:
            self._start(threads)
        except BaseException:
            self.close()
            raise

    @property
    def handles(self) -> list[ray_worker.WorkerHandle]:
        """Return all processes."""
        return [h for handles in self.by_group.values() for h in handles]

    def _start(self, threads: int) -> None:
        """Start the processes, and collect their addresses."""
        options, gpu = self.options, self.plan.hardware.kind == "cuda"
        self.secret = secrets.token_hex(16)
        opened = list[tuple[Group, ray_worker.Pending[Any]]]()
        served = {role for caller in REQUESTS for role in self.plan.remote_roles(caller)}
        single_node = len(self.plan.hardware.per_node) == 1
        for group in self.plan.groups:
            for rank, devices in enumerate(group.ranks):
                name = f"{group.name} rank {rank}"
                actor = ray_worker.RayWorkerActor.options(
                    num_cpus=0 if gpu else SHARE,
                    num_gpus=SHARE if gpu else 0,
                    scheduling_strategy=self.reservation.strategy(devices[0]),
                    max_restarts=0,
                ).remote(name, threads)
                # Each process opens its sockets and reports their addresses.
                call = ray_worker.WorkerHandle(actor, name).start(
                    ray_worker.RayWorker.open,
                    ray_worker.LOOPBACK if single_node else None,
                    self.secret,
                    options.step_timeout_s,
                    serves=not served.isdisjoint(group.roles),
                    hosts_store="actor" in group.roles and rank == 0,
                )
                opened.append((group, call))
        replies = ray_worker.wait([call for _, call in opened], "start", START_TIMEOUT_S)
        self.addresses: dict[str, ray_worker.Address] = {}
        self.devices: dict[str, tuple[int, ...]] = {}
        for (group, call), endpoints in zip(opened, replies, strict=True):
            handle = ray_worker.WorkerHandle(
                call.handle.actor, call.handle.name, endpoints.pid, endpoints.node
            )
            self.devices[handle.name] = group.ranks[len(self.by_group.setdefault(group, []))]
            self.by_group[group].append(handle)
            if endpoints.exchange is not None:
                self.addresses[handle.name] = endpoints.exchange
            if endpoints.store is not None:
                self.store: ray_worker.Address = endpoints.store

    def check_files(self, run_dir: Path) -> None:
        """Check that processes on other nodes can read the run directory. Raises PlacementError.

        A temporary file is written beside the run directory, and the other processes that read or
        write the run's files look for it.
        """
        driver_node = ray.get_runtime_context().get_node_id()
        roles = [role for role in ("rollout", "actor", "critic") if self.plan.has(role)]
        groups = dict.fromkeys(self.plan.group(role) for role in roles)
        handles = [h for g in groups for h in self.by_group[g] if h.node != driver_node]
        if not handles:
            return
        folder = run_dir
        while not folder.exists():
            folder = folder.parent
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".embodied_ppo-") as file:
                calls = [h.start(ray_worker.RayWorker.file_exists, file.name) for h in handles]
                visible = ray_worker.wait(calls, "start", START_TIMEOUT_S)
        except OSError as error:
            raise PlacementError(
                f"run_dir={run_dir}: cannot be written ({error.strerror}); name another"
            ) from error
        for handle, is_visible in zip(handles, visible, strict=True):
            if not is_visible:
                raise PlacementError(
                    f"run_dir={run_dir}: {handle} cannot read this machine's folder; use a shared"
                    " file system (same path on all machines)"
                )

    def _servers(self, caller: str, rank: int) -> dict[str, list[ray_worker.WorkerHandle]]:
        """Role -> other processes with it that rank ``rank`` of ``caller`` sends requests to."""
        servers, count = dict[str, list[ray_worker.WorkerHandle]](), self.plan.processes(caller)
        for role in self.plan.remote_roles(caller):
            handles, n = self.by_group[self.plan.group(role)], self.plan.processes(role)
            first = rank * n // count
            servers[role] = handles[first : max(first + 1, (rank + 1) * n // count)]
        return servers

    def serve(
        self, callers: Sequence[ray_worker.WorkerHandle], *roles: str, during: str = ""
    ) -> list[ray_worker.Pending[ray_worker.Reply[None]]]:
        """Have processes of these roles serve ``callers`` until those have finished.

        A worker runs one call at a time. It therefore cannot serve requests unless this call is
        started, and a process that sends requests must not be one of its own servers.
        """
        callers_of: dict[ray_worker.WorkerHandle, set[ray_worker.WorkerHandle]] = {}
        for caller in REQUESTS:
            for rank, handle in enumerate(self.by_group[self.plan.group(caller)]):
                if handle in callers:
                    for role, servers in self._servers(caller, rank).items():
                        for server in servers if role in roles else ():
                            callers_of.setdefault(server, set()).add(handle)
        numbers = {server: len(handles) for server, handles in callers_of.items()}
        return [server.call(Worker.serve, n, during) for server, n in numbers.items()]

    def connections(
        self, group: Group, rank: int, env_info: EnvInfo | None, offloads: bool
    ) -> ray_worker.WorkerConnections:
        """Return the spec of one process, and the addresses of processes that it works with.

        Args:
            group: Group of the process.
            rank: Rank of the process in it.
            env_info: Description of the simulator, once known.
            offloads: Whether the process is offloaded in others' phases.
        """
        ranks = dict.fromkeys(group.roles, (rank, group.processes))
        roles_of: dict[str, list[str]] = {}
        for caller in REQUESTS.keys() & group.roles:
            for role, handles in self._servers(caller, rank).items():
                for handle in handles:
                    roles_of.setdefault(handle.name, []).append(role)
        process_groups = {"learners": "actor", "critics": "critic"}
        if not self.plan.has("env"):
            process_groups["rollouts"] = "rollout"
        gathers_to_act = self.options.shard and {"rollout", "actor"} <= {*group.roles}
        return ray_worker.WorkerConnections(
            WorkerSpec(
                group.roles,
                ranks,
                self.plan.stages,
                env_info=env_info,
                tensors_move=offloads or gathers_to_act,
            ),
            servers=[(self.addresses[name], name, tuple(x)) for name, x in roles_of.items()],
            process_groups={k: ranks[role] for k, role in process_groups.items() if role in ranks},
            store=self.store,
            secret=self.secret,
            timeout_s=self.options.step_timeout_s,
            shard=self.plan.hardware.kind if self.options.shard else None,
        )

    def close(self) -> None:
        """End all processes, and free the devices."""
        ray_worker.end(self.handles, CLOSE_TIMEOUT_S)
        self.by_group = {}
        self.reservation.close()
