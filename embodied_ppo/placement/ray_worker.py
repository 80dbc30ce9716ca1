"""One process of a placement as a Ray actor, and how the driver waits for several: first error wins, none is silent."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias

import ray
import torch
import torch.distributed as dist
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from embodied_ppo.core import watchdog
from embodied_ppo.core.collectives import Ranks, Together
from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import CheckpointError, ConfigError, EnvError, PlacementError, ProcessLost, TrainingError
from embodied_ppo.placement.channels import Desk, Exchange, dial, interface
from embodied_ppo.placement.worker import Part, Seat
from embodied_ppo.training.logging import peak_rss_mb

Make: TypeAlias = "Callable[[Seat, Exchange | None, Callable[[str], None]], tuple[Part, Mapping[str, Any]]]"
"""Builds what a process holds, and facts for the summary; it is given someone to talk to."""
LOOPBACK = "127.0.0.1"
"""Where processes of one machine listen."""
LOOK_EVERY_S = 10.0
"""Between looks at whether processes that are waited for are alive."""
REASONS = (ConfigError, EnvError, PlacementError, CheckpointError, TrainingError)
"""Errors that say all there is to say; of others the traceback matters."""
FULL = (
    "Ray's shared memory on its machine is full, and so is the disk that it moves objects to (/tmp/ray); free that "
    "disk, start Ray with more memory (--object-store-memory=BYTES), lower algorithm.horizon or env.num_envs, or let "
    "one process act and learn ('rollout,actor': its experience stays where it is)"
)
NODE_GONE = (
    "Ray's own process on its machine (raylet) is gone, or the machine is: killed, out of memory, or /dev/shm was "
    "filled by others; see /tmp/ray/session_latest/logs/raylet.out there, free memory, start Ray again"
)


@dataclass(frozen=True)
class Reply:
    """result  of what was asked    said    lines for the log
    cpu_s   it took              rss_mb  the process's peak so far
    busy_s  wall time that it took, without waiting for other processes' answers or questions
    gpu_mb  the process's peak so far of the GPU's memory, as torch reserves it
    """

    result: Any
    said: list[str]
    cpu_s: float
    busy_s: float
    gpu_mb: float
    rss_mb: float


@dataclass(frozen=True)
class Wiring:
    """A process's seat, and how it finds those whom it needs there.

    desks    (address, name, roles) of processes that it asks
    teams    "learners", "critics": (rank, world) among those that learn together
    store    the address where teams meet
    secret   that others want to hear
    shard    kind of device that learners hold a part of each parameter on; None: each holds all
    """

    seat: Seat
    desks: Sequence[tuple[tuple[str, int], str, tuple[str, ...]]]
    teams: Mapping[str, tuple[int, int]]
    store: tuple[str, int]
    secret: str
    patience_s: float
    shard: str | None = None


class Process:
    """Holds a ``Part``. Calls are answered one after the other; ``stacks`` at any time."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.said = name, list[str]()
        if threads:
            torch.set_num_threads(threads)
        self.exchange: Exchange | None = None
        self.part: Part | None = None
        self.store: Any = None
        self.groups: dict[str, Any] = {}

    def open(self, host: str | None, secret: str, patience_s: float, *, serves: bool, meets: bool) -> dict[str, Any]:
        """Addresses of this process: where it serves simulators, and where learners meet. ``host``: None, its own."""
        own = host or ray.util.get_node_ip_address()
        if name := interface(own):  # left alone, gloo takes what the host's name stands for: 127.0.1.1 on Debian
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # else each holds a connection to each
        told: dict[str, Any] = {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}
        if serves:
            self.exchange = Exchange(own, secret, patience_s)
            told["exchange"] = self.exchange.address
        if meets:
            listening = socket.create_server((own, 0))  # torch's own would listen on every interface
            port, fd = listening.getsockname()[1], listening.detach()
            self.store = TCPStore(own, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
            told["store"] = (own, port)
        return told

    def sees(self, path: str) -> bool:
        """Whether a file is there for this process."""
        return os.path.exists(path)

    def build(self, make: Make, w: Wiring) -> Reply:
        """Connect and build: facts for the summary, and what simulators are like (None: they are elsewhere)."""
        desks: dict[str, list[Desk]] = {}
        for address, peer, roles in w.desks:
            desk = Desk(dial(address, w.secret, self.name, peer=peer, patience_s=w.patience_s))
            for role in roles:
                desks.setdefault(role, []).append(desk)
        teams: dict[str, Ranks] = {
            name: Together(self._group(name, w.store, rank, world, w.patience_s))
            for name, (rank, world) in w.teams.items()
            if world > 1
        }
        if w.shard and teams:  # both teams are the same processes
            from embodied_ppo.placement.fsdp import Sharded  # torch's FSDP2 takes half a second to load

            teams = dict.fromkeys(teams, Sharded(self.groups["learners"], w.shard))
        seat = replace(w.seat, desks=desks, **teams)

        def built() -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
            self.part, facts = make(seat, self.exchange, self.said.append)
            self.part.hang_up("env")
            return facts, self.part.about

        return self._timed(built)

    def join(self, name: str, address: tuple[str, int], rank: int, world: int, patience_s: float) -> None:
        """Meet others in a process group."""
        self._group(name, address, rank, world, patience_s)

    def _group(self, name: str, address: tuple[str, int], rank: int, world: int, patience_s: float) -> Any:
        """Meet the others of a team. Raises ProcessLost where they are not all there in time."""
        try:
            return self._met(name, address, rank, world, timedelta(seconds=patience_s))
        except RuntimeError as error:  # DistError, or gloo's own
            raise ProcessLost(
                f"{name} rank {rank} of {world}: the others were not met at {address[0]}:{address[1]} within "
                f"{patience_s:g} s (cluster.step_timeout_s): {one_line(error, kind=True)}"
            ) from error

    def _met(self, name: str, address: tuple[str, int], rank: int, world: int, wait: timedelta) -> Any:
        if self.store is None or (self.store.host, self.store.port) != tuple(address):
            self.store = TCPStore(*address, is_master=False, timeout=wait)
        store = PrefixStore(name, self.store)
        if name == "learners":  # the default group: fully_shard looks for it
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
            self.groups[name] = dist.group.WORLD
        elif torch.cuda.is_available():
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = wait
            self.groups[name] = dist.ProcessGroupNCCL(store, rank, world, nccl)
        else:
            self.groups[name] = dist.ProcessGroupGloo(store, rank, world, wait)
        return self.groups[name]

    def call(self, method: str, *args: Any, **options: Any) -> Reply:
        """A method of the part."""
        return self._timed(lambda: getattr(self.part, method)(*args, **options))

    def collect(self, horizon: int, update: int) -> tuple[Any, Reply]:
        """Experience, for whoever is handed the reference, and its metrics for the driver."""
        reply = self._timed(lambda: self._part().collect(horizon, update))
        experience, metrics = reply.result
        return experience, replace(reply, result=metrics)

    def update(self, update: int, piece: tuple[int, int], *experience: Any) -> Reply:
        """Learn from experience of other processes, or of this one's."""
        return self._timed(lambda: self._part().update(update, experience, piece))

    def packed(self) -> Any:
        """Weights, for whoever is handed the reference."""
        return self._part().packed()

    def broadcast(self, version: int) -> Reply:
        return self._timed(lambda: self._part().broadcast(version, self.groups["weights"]))

    def state(self) -> Any:
        """Where the rollout stands, for whoever is handed the reference."""
        return self._part().state()

    def save(self, folder: str, update: int, rest: Mapping[str, Any], *rollouts: bytes) -> Reply:
        return self._timed(lambda: self._part().save(folder, update, rollouts, **rest))

    def load(self, path: str) -> Reply:
        return self._timed(lambda: self._part().load(path, self.said.append))

    def _part(self) -> Part:
        assert self.part is not None
        return self.part

    def _timed(self, call: Callable[[], Any]) -> Reply:
        cpu, start = time.process_time(), time.monotonic() - self._waited_s()
        result = call()
        said, self.said[:] = list(self.said), []
        busy_s = time.monotonic() - self._waited_s() - start
        gpu_mb = torch.cuda.max_memory_reserved() / 2**20 if torch.cuda.is_available() else 0.0
        return Reply(result, said, time.process_time() - cpu, busy_s, gpu_mb, peak_rss_mb())

    def _waited_s(self) -> float:
        return 0.0 if self.part is None else self.part.waited_s()

    @ray.method(concurrency_group="watch")
    def watch_simulator(self) -> None:
        """Raise ProcessLost when a call of this process's simulator exceeds env.step_timeout_s; return never."""
        watchdog.wait_until_overdue()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """What every thread of ours is doing."""
        told = []
        names = {t.ident: t.name for t in threading.enumerate()}
        for number, frame in sys._current_frames().items():
            if number != threading.get_ident():
                stack = traceback.format_stack(frame)
                ours = [i for i, line in enumerate(stack) if "embodied" in line][-6:]
                if ours:  # where it waits may be deep in a library
                    lines = "".join(line for i, line in enumerate(stack) if i in ours or i >= len(stack) - 3)
                    told.append(f"thread {names.get(number, number)}:\n{lines}")
        return "\n".join(told)


Actor: Any = vars(ray)["remote"](concurrency_groups={"control": 1, "watch": 1})(Process)
"""``Process`` as Ray starts it."""


# -------------------------------------------------------------------------------------------------------------- driver
@dataclass(frozen=True)
class Handle:
    """A process as the driver knows it."""

    actor: Any
    name: str
    pid: int = 0
    node: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, node {self.node[:8]})"


@dataclass(frozen=True)
class Call:
    """Something that a process was asked: its answer will be behind ``ref``."""

    ref: Any
    handle: Handle


def wait(calls: Sequence[Call], phase: str, deadline_s: float, *, beside: Sequence[Call] = ()) -> list[Any]:
    """Every call's answer, in order; errors of those ``beside`` count too, though nobody waits for them to end.

    Raises the first error, with role, rank, node and phase, or ProcessLost after ``deadline_s`` with the stacks of
    those that did not answer.
    """
    owner = {call.ref: call.handle for call in (*beside, *calls)}
    wanted, found = {call.ref for call in calls}, dict[Any, Any]()
    pending, start = list(owner), time.monotonic()
    while wanted - found.keys():
        left = deadline_s - (time.monotonic() - start)
        ready, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, min(LOOK_EVERY_S, left)))
        for ref in ready:
            try:
                found[ref] = ray.get(ref)
            except RayError as error:
                raise _blame(error, owner[ref], pending, owner, phase) from None
        if left <= 0 and not ready:
            raise _late([owner[ref] for ref in pending if ref in wanted], phase, deadline_s)
    return [found[call.ref] for call in calls]


def _blame(
    error: RayError, handle: Handle, pending: Sequence[Any], owner: Mapping[Any, Handle], phase: str
) -> Exception:
    """The error to raise. A process that merely lost another is not the cause: the others are asked for a moment."""
    until = time.monotonic() + 5.0
    found = [(error, handle)]
    pending = list(pending)
    while pending and _follows(found[-1][0]) and time.monotonic() < until:
        ready, pending = ray.wait(pending, num_returns=1, timeout=0.2)
        for ref in ready:
            try:
                ray.get(ref)
            except RayError as other:
                found.append((other, owner[ref]))
    error, handle = next((pair for pair in found if not _follows(pair[0])), found[0])
    return _translated(error, handle, phase)


def _follows(error: RayError) -> bool:
    """Whether it only says that another process is gone."""
    text = str(error)
    return isinstance(error, RayTaskError) and ("the process is gone" in text or "gloo/transport" in text)


def _translated(error: RayError, handle: Handle, phase: str) -> Exception:
    if isinstance(error, RayTaskError):
        cause: Any = error.cause
        if isinstance(cause, (ObjectStoreFullError, OutOfDiskError)):
            return TrainingError(f"{handle}, {phase}: {FULL}")
        if isinstance(cause, REASONS):
            text = str(cause)
            mistake = phase == "build" and not isinstance(cause, ProcessLost)  # whoever finds it, it is the user's
            return type(cause)(text if mistake else f"{handle}, {phase}: {text}")
        if _follows(error):  # and no other process said why
            return ProcessLost(
                f"process lost: {handle}, {phase}: those it works with did not answer in time "
                f"(cluster.step_timeout_s), or the network between them is gone: {one_line(cause, kind=True)}"
            )
        lines = [line for line in str(error).splitlines() if line.strip()]
        return TrainingError(f"{handle}, {phase}: {one_line(cause, kind=True)}\n" + "\n".join(lines[-15:]))
    if isinstance(error, RayActorError):
        return ProcessLost(f"process lost: {handle}, {phase}: {_reason(error)}")
    return ProcessLost(f"{handle}, {phase}: {one_line(error, kind=True)[:400]}")


def _reason(error: RayActorError) -> str:
    """The line of Ray's message that says why."""
    text = str(error)
    if isinstance(error, ActorUnavailableError) or "node has died" in text or "node has crashed" in text:
        return NODE_GONE
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [x for x in lines if any(word in x.lower() for word in ("cause", "exit", "killed", "died", "terminated"))]
    return one_line(Exception(" ".join(dict.fromkeys(told[-2:] or lines[-1:]))))[:400]


def _late(handles: Sequence[Handle], phase: str, deadline_s: float) -> ProcessLost:
    names = ", ".join(map(str, handles))
    option = "start_timeout_s" if phase == "start" else "step_timeout_s"
    told = [
        f"no answer for {deadline_s:g} s (cluster.{option}): {names}, {phase}; the limit is on the phase as a whole: "
        "where it is only slow, raise the limit"
    ]
    asked = [(h, h.actor.stacks.remote()) for h in handles]
    for handle, ref in asked:
        try:
            told.append(f"--- {handle}\n{ray.get(ref, timeout=5.0)}")
        except (GetTimeoutError, RayError):
            told.append(f"--- {handle}: does not even tell what it is doing (stopped, or the machine is overloaded)")
    return ProcessLost("\n".join(told))


def end(handles: Sequence[Handle], patience_s: float) -> None:
    """Have processes close what they hold; kill those of them that do not within a moment, and then all."""
    if not handles:
        return
    refs = [h.actor.call.remote("close") for h in handles]
    ray.wait(refs, num_returns=len(refs), timeout=patience_s)
    here = ray.get_runtime_context().get_node_id()
    for handle in handles:
        ray.kill(handle.actor)
        if handle.node == here and handle.pid:
            with suppress(ProcessLookupError):  # Ray asks first; one that is stopped does not hear it
                os.kill(handle.pid, signal.SIGKILL)
