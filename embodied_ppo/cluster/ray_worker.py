"""One process of a placement as a Ray actor, and typed calls of it by the driver.

The driver names methods by reference: ``handle.call(Worker.move_to, level)`` runs
``Worker.move_to(level)`` in the process of ``handle``, and its types are checked. Only
``WorkerHandle`` contains names of remote methods as strings.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar

import ray
import torch
import torch.distributed as dist
from ray import exceptions
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from embodied_envs.base import watchdog
from embodied_envs.base.errors import ProcessLost, TrainingError, one_line
from embodied_envs.types import EnvInfo
from embodied_ppo.cluster.channels import Client, Exchange, connect, interface
from embodied_ppo.cluster.worker import Worker, WorkerSpec
from embodied_ppo.core.collectives import RankGroup, Ranks
from embodied_ppo.core.errors import SELF_EXPLANATORY
from embodied_ppo.training.logging import peak_rss_mb

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
T_co = TypeVar("T_co", covariant=True)

# (spec, exchange of requests, log) -> worker, and facts for the summary. It is pickled.
BuildWorker: TypeAlias = Callable[
    [WorkerSpec, Exchange | None, Callable[[str], None]], tuple[Worker, Mapping[str, Any]]
]
# Reference to an object in Ray's store. As an argument of a call it is replaced by the object.
StoreRef: TypeAlias = Any
# Host and port.
Address: TypeAlias = tuple[str, int]
LOOPBACK = "127.0.0.1"  # address that processes listen on where all of them are on one machine
OWN_GPU = 0  # index of the GPU of a process, which is the only one that Ray makes visible to it
# Interval between checks that processes that are waited for are alive, seconds.
CHECK_EVERY_S = 10.0
STORE_FULL = (
    "Ray's shared memory on its machine is full, and so is the disk that it moves objects to"
    " (/tmp/ray); free that disk, start Ray with more memory (--object-store-memory=BYTES), lower"
    " algorithm.horizon or env.num_envs, or let one process act and learn ('rollout,actor': its"
    " experience stays where it is)"
)
NODE_LOST = (
    "Ray's own process on its machine (raylet) is gone, or the machine is: killed, out of memory,"
    " or /dev/shm was filled by others; see /tmp/ray/session_latest/logs/raylet.out there, free"
    " memory, start Ray again"
)


@dataclass(frozen=True)
class Reply(Generic[T_co]):
    """The result of a call with the resources that it used.

    Attributes:
        result: What the method returned.
        log_lines: Lines that the process wrote to the log since the last reply.
        cpu_s: CPU seconds of the call.
        busy_s: Wall time of the call without waiting for requests and replies of other processes.
        gpu_mb: Peak GPU memory of the process so far, reserved by torch, MiB.
        rss_mb: Peak resident memory of the process so far, MiB.
    """

    result: T_co
    log_lines: list[str]
    cpu_s: float
    busy_s: float
    gpu_mb: float
    rss_mb: float


@dataclass(frozen=True)
class Endpoints:
    """Identity and addresses of a process.

    Attributes:
        pid: Process id.
        node: Ray's id of the node.
        exchange: Address for requests; None: the process serves none.
        store: Address of the store at which process groups meet; None: it is in another process.
    """

    pid: int
    node: str
    exchange: Address | None = None
    store: Address | None = None


@dataclass(frozen=True)
class WorkerConnections:
    """The spec of a worker, and the addresses of the processes that it works with.

    Attributes:
        spec: Spec without connections and process groups, which ``RayWorker.build`` adds.
        servers: (address, name, roles) of the processes that this one sends requests to.
        process_groups: "learners", "critics", "rollouts" -> (rank, world size) among them.
        store: Address of the store at which process groups meet.
        secret: Secret of all exchanges.
        timeout_s: Time limit of a request and of forming a process group.
        shard: Kind of device that parameters are sharded on; None: each learner holds all
            parameters.
    """

    spec: WorkerSpec
    servers: Sequence[tuple[Address, str, tuple[str, ...]]]
    process_groups: Mapping[str, tuple[int, int]]
    store: Address
    secret: str
    timeout_s: float
    shard: str | None = None


def _concurrency_group(name: str) -> Callable[[F], F]:
    """``ray.method`` that keeps the method's type; calls of different groups run concurrently."""
    decorator: Any = ray.method(concurrency_group=name)
    return decorator


class RayWorker:
    """Ray actor that holds a ``Worker``.

    Calls run one after another, but ``stacks`` and ``watch_simulator`` run beside them.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Start a process.

        Args:
            name: Name for messages.
            threads: CPU threads of tensor operations; 0: torch's default.
        """
        self.name, self.log_lines = name, list[str]()
        # Set this before the first tensor operation. By default each process uses all cores.
        if threads:
            torch.set_num_threads(threads)
        self.exchange: Exchange | None = None
        self.worker: Worker | None = None
        self.store: Any = None
        self.groups: dict[str, Any] = {}  # name -> torch.distributed process group

    def open(
        self, host: str | None, secret: str, timeout_s: float, *, serves: bool, hosts_store: bool
    ) -> Endpoints:
        """Open the listening sockets of this process.

        Args:
            host: Address to listen on; None: the address of this node.
            secret: Secret of the exchange.
            timeout_s: Time limit of waiting for a request.
            serves: Open an exchange for requests of other processes.
            hosts_store: Open the store at which process groups meet.
        """
        address = host or ray.util.get_node_ip_address()
        # By default gloo uses the address that the host name resolves to, 127.0.1.1 on Debian.
        if name := interface(address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        # By default gloo connects each pair of ranks at once, which takes a socket per pair.
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        endpoints = Endpoints(os.getpid(), ray.get_runtime_context().get_node_id())
        if serves:
            self.exchange = Exchange(address, secret, timeout_s)
            endpoints = replace(endpoints, exchange=self.exchange.address)
        if hosts_store:
            # TCPStore listens on all interfaces unless it is given a listening socket.
            listening = socket.create_server((address, 0))
            port, fd = listening.getsockname()[1], listening.detach()
            self.store = TCPStore(
                address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd
            )
            endpoints = replace(endpoints, store=(address, port))
        return endpoints

    def file_exists(self, path: str) -> bool:
        """Return whether this process finds a file."""
        return os.path.exists(path)

    def build(
        self, build_worker: BuildWorker, connections: WorkerConnections
    ) -> Reply[tuple[Mapping[str, Any], EnvInfo | None]]:
        """Connect to other processes and build the worker.

        Args:
            build_worker: Builds it.
            connections: Its spec and the addresses of other processes.

        Returns:
            Facts for the run's summary, and the description of the simulators (None: this process
            has none).
        """
        c = connections
        # One connection per process, listed under each of the process's roles.
        clients: dict[str, list[Client]] = {}
        for address, peer, roles in c.servers:
            client = Client(connect(address, c.secret, self.name, peer=peer, timeout_s=c.timeout_s))
            for role in roles:
                clients.setdefault(role, []).append(client)
        # A process that trains alone needs no collective operations.
        ranks: dict[str, Ranks] = {}
        for name, (rank, world) in c.process_groups.items():
            if world > 1:
                self.join(name, c.store, rank, world, c.timeout_s)
                ranks[name] = RankGroup(self.groups[name])
        if c.shard and "learners" in ranks:  # the critics are then the same processes
            from embodied_ppo.cluster.fsdp import Sharded  # importing FSDP2 takes half a second

            sharded = Sharded(self.groups["learners"], c.shard)
            ranks |= dict.fromkeys({"learners", "critics"} & ranks.keys(), sharded)
        # Log lines are returned to the driver with the next reply.
        notice = self.log_lines.append
        spec = replace(c.spec, clients=clients, groups=self.groups, notice=notice, **ranks)
        start = self._clocks()
        worker, facts = build_worker(spec, self.exchange, notice)
        self.worker = worker
        # Building may create simulators in other processes, which serve until this message.
        worker.finish_requests("env")
        return self._reply((facts, worker.env_info), start)

    def join(self, name: str, address: Address, rank: int, world: int, timeout_s: float) -> None:
        """Form the process group ``name`` with other processes.

        Args:
            address: Address of the store at which the processes meet.

        Raises:
            ProcessLost: The others do not join in time.
        """
        timeout = timedelta(seconds=timeout_s)
        try:
            # The process that hosts the store has it already, and a process connects to it only
            # once.
            if self.store is None or (self.store.host, self.store.port) != tuple(address):
                self.store = TCPStore(*address, is_master=False, timeout=timeout)
            # The prefix separates the keys of process groups that share the store.
            store = PrefixStore(name, self.store)
            if name == "learners":  # fully_shard requires the default process group
                backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
                dist.init_process_group(
                    backend, store=store, rank=rank, world_size=world, timeout=timeout
                )
                self.groups[name] = dist.group.WORLD
            elif torch.cuda.is_available() and name != "rollouts":  # these exchange host memory
                # Further groups are created directly, because torch has one default group per
                # process.
                nccl = dist.ProcessGroupNCCL.Options()
                nccl._timeout = timeout
                self.groups[name] = dist.ProcessGroupNCCL(store, rank, world, nccl)
            else:
                self.groups[name] = dist.ProcessGroupGloo(store, rank, world, timeout)
        except RuntimeError as error:  # torch's DistError, or an error of gloo
            raise ProcessLost(
                f"{name} rank {rank} of {world}: the others were not met at"
                f" {address[0]}:{address[1]} within {timeout_s:g} s (cluster.step_timeout_s):"
                f" {one_line(error, kind=True)}"
            ) from error

    # ---------------------------------------------------------------------- calls, see WorkerHandle
    def call(
        self, method: Callable[Concatenate[Worker, P], T], *args: P.args, **options: P.kwargs
    ) -> Reply[T]:
        """Call a method of the worker."""
        start = self._clocks()
        assert self.worker is not None
        return self._reply(method(self.worker, *args, **options), start)

    def call_split(self, method: Any, *args: Any, **options: Any) -> tuple[Any, Reply[Any]]:
        """Call a method that returns (data, result); they become two objects in Ray's store."""
        reply = self.call(method, *args, **options)
        data, result = reply.result
        return data, replace(reply, result=result)

    def _clocks(self) -> tuple[float, float]:
        """Return CPU seconds, and wall-clock seconds without waiting for other processes."""
        # Waiting is subtracted, so that the difference of two clocks is the busy time.
        waited_s = 0.0 if self.worker is None else self.worker.waited_s()
        return time.process_time(), time.monotonic() - waited_s

    def _reply(self, result: T, start: tuple[float, float]) -> Reply[T]:
        """Return the reply to a call that began at ``_clocks() == start``."""
        # Clear the list in place, because ``notice`` is bound to this list.
        log_lines, self.log_lines[:] = list(self.log_lines), []
        cpu_s, busy_s = (end - begin for begin, end in zip(start, self._clocks(), strict=True))
        gpu_mb = 0.0
        if torch.cuda.is_available():
            gpu_mb = torch.cuda.max_memory_reserved(OWN_GPU) / 2**20
        return Reply(result, log_lines, cpu_s, busy_s, gpu_mb, peak_rss_mb())

    @_concurrency_group("watch")
    def watch_simulator(self) -> None:
        """Raise ProcessLost when a simulator's call exceeds env.step_timeout_s; never return."""
        watchdog.wait_for_timeout()

    @_concurrency_group("control")
    def stacks(self) -> str:
        """Return the stacks of all threads, which may be blocked in a library."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read()


# Each concurrency group has a thread, so both groups answer while the worker is busy.
# ``RayWorker`` as a class of Ray actors; ``WorkerHandle`` is its typed interface.
RayWorkerActor: Any = vars(ray)["remote"](concurrency_groups={"control": 1, "watch": 1})(RayWorker)


# ------------------------------------------------------------------------------------------- driver
@dataclass(frozen=True)
class WorkerHandle:
    """The driver's reference to a ``RayWorker``.

    All calls return at once; ``wait`` returns their results.
    """

    actor: Any
    name: str
    pid: int = 0
    node: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, node {self.node[:8]})"

    def start(
        self, method: Callable[Concatenate[RayWorker, P], T], *args: P.args, **options: P.kwargs
    ) -> Pending[T]:
        """Start a method of the ``RayWorker``, given as ``RayWorker.NAME``."""
        # Ray needs the method's name; its reference lets a type checker verify the arguments.
        return Pending(getattr(self.actor, method.__name__).remote(*args, **options), self)

    def call(
        self, method: Callable[Concatenate[Worker, P], T], *args: P.args, **options: P.kwargs
    ) -> Pending[Reply[T]]:
        """Start a method of the ``Worker``, given as ``Worker.NAME``.

        A ``StoreRef`` may stand for an argument.
        """
        return Pending(self.actor.call.remote(method, *args, **options), self)

    def call_split(
        self,
        method: Callable[Concatenate[Worker, P], tuple[Any, T]],
        *args: P.args,
        **options: P.kwargs,
    ) -> tuple[StoreRef, Pending[Reply[T]]]:
        """Start a method that returns (data, result); the data stay in Ray's store."""
        # With two objects, experience stays in the store until a learner reads it, and only the
        # small reply is sent to the driver.
        data, reply = self.actor.call_split.options(num_returns=2).remote(method, *args, **options)
        return data, Pending(reply, self)


@dataclass(frozen=True)
class Pending(Generic[T_co]):
    """A call that has been started.

    Attributes:
        ref: Ray's reference to the result.
        handle: The process that runs it.
    """

    ref: Any
    handle: WorkerHandle


def wait(
    calls: Sequence[Pending[T]],
    phase: str,
    timeout_s: float,
    *,
    background: Sequence[Pending[Any]] = (),
) -> list[T]:
    """Return the results of calls, in order.

    Args:
        calls: The calls to wait for.
        phase: Phase of training, for messages.
        timeout_s: Time limit of all calls together.
        background: Further calls that run meanwhile. They are not waited for, but their errors are
            raised.

    Raises:
        Exception: The first error of any call, with role, rank, node and phase.
        ProcessLost: ``timeout_s`` has passed; with the stacks of the processes that have not
            replied.
    """
    handles = {call.ref: call.handle for call in (*background, *calls)}
    # ``wanted``: the results to return. Background calls are only observed for errors.
    wanted, results = {call.ref for call in calls}, dict[Any, Any]()
    pending, start = list(handles), time.monotonic()
    while wanted - results.keys():
        remaining_s = timeout_s - (time.monotonic() - start)
        # Wait for one call at a time, so that an error is raised while other calls still run.
        limit_s = max(0.0, min(CHECK_EVERY_S, remaining_s))
        ready, pending = ray.wait(pending, num_returns=1, timeout=limit_s)
        for ref in ready:
            try:
                results[ref] = ray.get(ref)
            except exceptions.RayError as error:
                raise _root_cause(error, handles[ref], pending, handles, phase) from None
        # A result that arrives at the deadline still counts.
        if remaining_s <= 0 and not ready:
            raise _timed_out([handles[ref] for ref in pending if ref in wanted], phase, timeout_s)
    return [results[call.ref] for call in calls]


def _root_cause(
    error: exceptions.RayError,
    handle: WorkerHandle,
    pending: Sequence[Any],
    handles: Mapping[Any, WorkerHandle],
    phase: str,
) -> Exception:
    """Return the error to raise for the run.

    When a process ends, its peers also fail, often before Ray reports the end. Such an error is a
    consequence, so other calls get a moment to report the cause.
    """
    # Ray may need seconds to report that a process has ended.
    deadline = time.monotonic() + 5.0
    errors = [(error, handle)]
    pending = list(pending)
    while pending and _is_consequence(errors[-1][0]) and time.monotonic() < deadline:
        ready, pending = ray.wait(pending, num_returns=1, timeout=0.2)
        for ref in ready:
            try:
                ray.get(ref)
            except exceptions.RayError as other:
                errors.append((other, handles[ref]))
    # Prefer the first error that is a cause. If all are consequences, report the oldest one.
    error, handle = next((pair for pair in errors if not _is_consequence(pair[0])), errors[0])
    return _translated(error, handle, phase)


def _is_consequence(error: exceptions.RayError) -> bool:
    """Return whether an error only reports that a peer has ended or is late.

    These are messages of channels and gloo, and errors of torch's store, over which groups of
    processes find each other.
    """
    # Only an error raised by a task can be a consequence; the end of an actor counts as a cause.
    text = str(error)
    gone = "the process is gone" in text or "gloo/transport" in text
    return isinstance(error, exceptions.RayTaskError) and (
        gone or isinstance(error.cause, dist.DistStoreError)
    )


def _translated(error: exceptions.RayError, handle: WorkerHandle, phase: str) -> Exception:
    """Return an error of Ray as one of this package, with process and phase."""
    if isinstance(error, exceptions.RayTaskError):
        cause: Any = error.cause
        if isinstance(cause, (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError)):
            return TrainingError(f"{handle}, {phase}: {STORE_FULL}")
        # The message is complete; other errors are reported with their traceback.
        if isinstance(cause, (TrainingError, *SELF_EXPLANATORY)):
            text = str(cause)
            # An error in the user's options is the same in each process, so the process is not
            # named.
            user_error = phase == "build" and not isinstance(cause, ProcessLost)
            return type(cause)(text if user_error else f"{handle}, {phase}: {text}")
        if _is_consequence(error):  # and no other process reported a cause
            return ProcessLost(
                f"process lost: {handle}, {phase}: the processes it works with did not answer in"
                " time (cluster.step_timeout_s), or the network between them is gone:"
                f" {one_line(cause, kind=True)}"
            )
        # Any other error is a defect, so the end of its traceback is reported.
        lines = [line for line in str(error).splitlines() if line.strip()]
        header = f"{handle}, {phase}: {one_line(cause, kind=True)}"
        return TrainingError("\n".join([header, *lines[-15:]]))
    # The process or its node has ended.
    if isinstance(error, exceptions.RayActorError):
        return ProcessLost(f"process lost: {handle}, {phase}: {_reason(error)}")
    # Other errors of Ray, such as an object that was lost with its node.
    return ProcessLost(f"{handle}, {phase}: {one_line(error, kind=True)[:400]}")


def _reason(error: exceptions.RayActorError) -> str:
    """Return the lines of Ray's message that contain the reason."""
    text = str(error)
    node_lost = "node has died" in text or "node has crashed" in text
    if isinstance(error, exceptions.ActorUnavailableError) or node_lost:
        return NODE_LOST
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # Ray's message is long; keep the sentences about the end of the process.
    keywords = ("cause", "exit", "killed", "died", "terminated")
    reasons = [line for line in lines if any(word in line.lower() for word in keywords)]
    return one_line(Exception(" ".join(dict.fromkeys(reasons[-2:] or lines[-1:]))))[:400]


def _timed_out(handles: Sequence[WorkerHandle], phase: str, timeout_s: float) -> ProcessLost:
    """Return the error of processes that have not replied in time, with their stacks."""
    names = ", ".join(map(str, handles))
    # The time limit of the start is not an option, so no option is named.
    limit = "" if phase == "start" else " (cluster.step_timeout_s)"
    lines = [
        f"no answer for {timeout_s:g} s{limit}: {names}, {phase}; the limit is on the phase as a"
        " whole: where it is only slow, raise the limit"
    ]
    # Request all stacks before the first one is read, so that the waits overlap.
    calls = [handle.start(RayWorker.stacks) for handle in handles]
    for call in calls:
        try:
            lines.append(f"--- {call.handle}\n{ray.get(call.ref, timeout=5.0)}")
        except (exceptions.GetTimeoutError, exceptions.RayError):
            lines.append(
                f"--- {call.handle}: no stacks either (the process is stopped, or the machine is"
                " overloaded)"
            )
    return ProcessLost("\n".join(lines))


def end(handles: Sequence[WorkerHandle], timeout_s: float) -> None:
    """End processes: close their components, and kill them after at most ``timeout_s``."""
    if not handles:
        return
    # Close the components first, so that simulators and graders end their own processes.
    calls = [handle.call(Worker.close) for handle in handles]
    ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=timeout_s)
    driver_node = ray.get_runtime_context().get_node_id()
    for handle in handles:
        ray.kill(handle.actor)
        # ray.kill sends a request to the process, which a stopped (SIGSTOP) one does not handle.
        if handle.node == driver_node and handle.pid:
            with suppress(ProcessLookupError):
                os.kill(handle.pid, signal.SIGKILL)
