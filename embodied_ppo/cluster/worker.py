"""The components of one process of a placement, and the methods that the driver calls.

Independent of Ray and of the mode.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_envs.base import tree, watchdog
from embodied_envs.types import EnvInfo
from embodied_ppo.cluster import weight_sync
from embodied_ppo.cluster.channels import Client, Server
from embodied_ppo.cluster.offload import TensorOffloader
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Learner, Metrics, Trajectory
from embodied_ppo.options.placement import ALL, REQUESTS, WEIGHTS
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_system import Collector, resume


@dataclass(frozen=True)
class WorkerSpec:
    """Roles, ranks and connections of one process.

    Attributes:
        roles: Roles of this process.
        ranks: Role -> (rank, world size) among the processes of that role.
        stages: Pipeline stages of one rollout process.
        clients: Role -> connections to the processes of that role that this process sends requests
            to.
        learners: Processes that train the actor together.
        critics: Processes that train the critic together.
        rollouts: Processes that generate the responses of an update; of robots, each is alone.
        groups: Name -> torch.distributed process group of this process.
        env_info: Description of the simulators, for processes without them; None: unknown.
        tensors_move: Whether the policy's tensors are offloaded or sharded, so that their addresses
            change. Compiled code and CUDA graphs, which contain addresses, are then not used.
        notice: Called with lines for the log.
    """

    roles: tuple[str, ...]
    ranks: Mapping[str, tuple[int, int]]
    stages: int = 1
    clients: Mapping[str, Sequence[Client]] = field(default_factory=dict)
    learners: Ranks = Ranks()
    critics: Ranks = Ranks()
    rollouts: Ranks = Ranks()
    groups: Mapping[str, Any] = field(default_factory=dict)
    env_info: EnvInfo | None = None
    tensors_move: bool = False
    notice: Callable[[str], None] | None = None


@dataclass(kw_only=True, eq=False)
class Worker:
    """The roles of one process. A component that is None is in another process.

    The driver calls its public methods, see ``ray_worker.WorkerHandle.call``.

    Attributes:
        spec: Roles, ranks and connections.
        policy: Model that acts or is trained here.
        rollout: Collects experience.
        learner: Trains the policy.
        server: Replies to the requests of other processes.
        count: Trajectory -> environment steps or tokens that are logged for it.
        measure: Evaluates the policy.
        write_report: (result of ``measure``, checkpoint, folder) -> paths of the report's files.
        env_info: Description of the simulators.
        initialize_models: Called once when all processes are built.
        on_weights_updated: Called with each new version of the weights.
        release_cache: Frees memory of the device that can be rebuilt (caches), before offloading.
        state_tensors: Returns tensors besides the policy's in nested containers; None: the
            learner's state.
        version: Version of the weights: number of updates that they contain.
        experience: Update -> experience that was collected here and not yet trained on here.
    """

    spec: WorkerSpec = field(kw_only=False)
    policy: nn.Module | None = None
    rollout: Collector | None = None
    learner: Learner | None = None
    server: Server | None = None
    count: Callable[[Trajectory], int] = lambda experience: 0
    measure: Callable[[], Any] | None = None
    write_report: Callable[[Any, checkpoint.Checkpoint, Path], dict[str, str | None]] | None = None
    env_info: EnvInfo | None = None
    initialize_models: Callable[[], None] = lambda: None
    on_weights_updated: Callable[[int], None] = lambda version: None
    release_cache: Callable[[], None] = lambda: None
    state_tensors: Callable[[], Any] | None = None
    version: int = field(default=0, init=False)
    experience: dict[int, Trajectory] = field(default_factory=dict, init=False)
    # Update -> state of the rollout before it was collected; filled where ``one_state``.
    _positions: dict[int, Mapping[str, Any]] = field(default_factory=dict, init=False)
    _buffer: weight_sync.WeightBuffer | None = field(default=None, init=False)
    _exported_buffer: weight_sync.SharedWeightBuffer | None = field(default=None, init=False)
    _imported_buffer: tuple[Any, Tensor] | None = field(default=None, init=False)
    _offloader: TensorOffloader | None = field(default=None, init=False)

    @property
    def module(self) -> nn.Module:
        """Return the policy of a process that has one."""
        assert self.policy is not None
        return self.policy

    @property
    def device(self) -> torch.device:
        """Return the device of the policy."""
        return next(self.module.parameters()).device

    @property
    def weight_buffer(self) -> weight_sync.WeightBuffer:
        """Return the buffer that ``prepare_weight_sync`` has created."""
        assert self._buffer is not None
        return self._buffer

    # --------------------------------------------------------------------------------------- phases
    def initialize(self) -> None:
        """Send the initial weights to remote models; called once when all processes are built."""
        self.initialize_models()
        # Each phase ends with this message: servers reply to requests until all callers have sent
        # it.
        self.finish_requests(*REQUESTS["actor"])

    def collect(self, horizon: int, update: int) -> tuple[Trajectory | None, Metrics]:
        """Collect experience.

        Args:
            horizon: Steps per environment, or maximum length of a response.
            update: Index of the update that the experience is for.

        Returns:
            The trajectory as NumPy arrays, [T, N, ..], and metrics. None instead of the trajectory
            where this process trains on it: it then stays here.
        """
        assert self.rollout is not None
        if self.rollout.one_state:
            untrained = {k: x for k, x in self._positions.items() if k >= self.version}
            self._positions = untrained | {update: self.rollout.state()}
        trajectory, metrics = self.rollout.collect(horizon, update=update, version=self.version)
        self.finish_requests(*REQUESTS["rollout"])
        # A process that also learns keeps its experience, so that nothing is copied.
        if "actor" in self.spec.roles:
            self.experience[update] = trajectory
            return None, metrics
        # Ray's object store shares NumPy arrays between processes without copies; it pickles
        # tensors.
        return tree.map(lambda x: x.cpu().numpy(), trajectory), metrics

    def update(self, update: int, shard: tuple[int, int], *experience: Any) -> tuple[Metrics, int]:
        """Train on experience.

        Args:
            update: Index of the update.
            shard: (i, n): train on the i-th of n equal parts of the columns.
            experience: Trajectories of rollout processes as NumPy arrays; none: the experience
                collected here.

        Returns:
            Metrics, and the environment steps or tokens that were trained on.
        """
        assert self.learner is not None
        if update in self.experience:
            trajectory = self.experience.pop(update)
        else:
            # Arrays in Ray's object store are read-only and shared, so they are copied.
            chunks = [
                tree.map(lambda x: torch.from_numpy(x).to(self.device, copy=True), arrays)
                for arrays in experience
            ]
            # Join the columns of several rollout processes along dimension 1.
            trajectory = chunks[0] if len(chunks) == 1 else tree.concatenate(chunks, 1)
            # Learners divide the columns and not the steps, so that no episode or response is cut.
            i, n = shard
            if n > 1:
                trajectory = tree.map(lambda x: x.chunk(n, dim=1)[i].contiguous(), trajectory)
        lag = {"rollout/version_lag": trajectory.lag(self.version)}
        metrics = self.learner.update(trajectory, update=update) | lag
        self.finish_requests(*REQUESTS["actor"])
        return metrics, self.count(trajectory)

    def serve(self, callers: int, during: str) -> None:
        """Reply to requests until ``callers`` processes have finished theirs.

        Args:
            callers: Number of processes that send requests in this phase.
            during: Phase, for messages about simulators ("update 3").
        """
        assert self.server is not None
        # If a simulator hangs, the message names this phase.
        watchdog.describe(during=during)
        self.server.serve(callers)

    def evaluate(self) -> Any:
        """Evaluate the policy; return the mode's result."""
        assert self.measure is not None
        try:
            return self.measure()
        finally:
            # The servers wait for this message even where the evaluation fails.
            self.finish_requests(*REQUESTS["rollout"])

    def report(self, result: Any, checkpoint_path: str, out: str) -> dict[str, str | None]:
        """Write the report of an evaluation.

        Args:
            result: What ``evaluate`` returned.
            checkpoint_path: The checkpoint that was evaluated.
            out: Folder of the report.

        Returns:
            Kind of file -> path.
        """
        assert self.write_report is not None
        return self.write_report(result, checkpoint.open_checkpoint(checkpoint_path), Path(out))

    def finish_requests(self, *roles: str) -> None:
        """Notify the servers of these roles that no request follows in this phase."""
        # A server may have several of the roles, but must be notified once: it counts callers.
        clients = (client for role in roles for client in self.spec.clients.get(role, ()))
        for client in dict.fromkeys(clients):
            client.finish()

    # -------------------------------------------------------------------------------------- weights
    def weight_layout(self, *, frozen: bool) -> weight_sync.WeightLayout:
        """Return the layout of the tensors to synchronise, with or without frozen parameters."""
        return weight_sync.WeightLayout.of(weight_sync.weight_tensors(self.module, frozen=frozen))

    def prepare_weight_sync(
        self, layout: weight_sync.WeightLayout, process: str, *, frozen: bool
    ) -> int:
        """Send or receive tensors of this layout from now on.

        Args:
            layout: Layout of the buffer, which is the same in all processes.
            process: Name of the process that the layout is of, for the message.
            frozen: Include parameters that are not trained.

        Returns:
            Size of the buffer, bytes.

        Raises:
            PlacementError: The tensors of this process have other names or shapes.
        """
        tensors = weight_sync.weight_tensors(self.module, frozen=frozen)
        # The buffer has the sender's layout. Names and shapes must agree; dtypes are converted.
        weight_sync.WeightLayout.of(tensors).check(layout, process)
        self._buffer = weight_sync.WeightBuffer(tensors, layout, self.spec.learners)
        # Buffers of an earlier layout may have another size.
        self._exported_buffer = self._imported_buffer = None
        return layout.total

    def share_weights(self, version: int) -> None:
        """Set the version of the weights, which the learner of this process has updated."""
        # Learner and rollout share the weights, so at most shards have to be gathered.
        self._gather_to_act()
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        """Record the new version and notify the components."""
        self.version = version
        self.on_weights_updated(version)

    def _gather_to_act(self) -> None:
        """All-gather sharded parameters where this process acts: inference needs no collectives."""
        if self.policy is not None and "rollout" in self.spec.roles:
            self.spec.learners.unshard(self.policy)

    def join_gather(self) -> None:
        """Take part in the all-gathers of another learner that sends sharded tensors."""
        self.weight_buffer.join_gather()

    def pack(self) -> tuple[Any, None]:
        """Return the bytes of the weights as a NumPy array, uint8 [bytes], and no result."""
        size = self.weight_buffer.layout.total
        return self.weight_buffer.pack(torch.zeros(size, dtype=torch.uint8)).numpy(), None

    def unpack(self, version: int, data: Any) -> None:
        """Load the bytes that ``pack`` returned in another process."""
        self.weight_buffer.unpack(torch.from_numpy(data.copy()))
        self._set_version(version)

    def export_ipc(self) -> Any:
        """Write the weights to memory that processes on this device can map; return its handle."""
        if self._exported_buffer is None:
            size = self.weight_buffer.layout.total
            self._exported_buffer = weight_sync.SharedWeightBuffer(size, self.device)
        self.weight_buffer.pack(self._exported_buffer.flat)
        return self._exported_buffer.handle()

    def import_ipc(self, version: int, handle: Any) -> None:
        """Load the weights from the memory that ``export_ipc`` of another process has written."""
        # The sender reuses its buffer, so one mapping serves all versions with an equal handle.
        if self._imported_buffer is None or self._imported_buffer[0] != handle:
            self._imported_buffer = handle, weight_sync.open_shared_buffer(handle, self.device)
        self.weight_buffer.unpack(self._imported_buffer[1])
        # The sender may overwrite the buffer when this method has returned.
        weight_sync.finish_work(self.device)
        self._set_version(version)

    def broadcast(self, version: int) -> None:
        """Send the weights to the process group "weights" (rank 0), or receive them."""
        group = self.spec.groups["weights"]
        # Buckets bound the additional memory of the transfer, see ``weight_sync.BUCKET``.
        for bucket in self.weight_buffer.buckets():
            buffer = bucket.pack()
            group.broadcast(buffer, 0).wait()
            if group.rank():  # rank 0 has the weights already
                bucket.unpack(buffer)
        self._set_version(version)

    # ----------------------------------------------------------------------------------- offloading
    def move_to(self, level: int) -> int:
        """Move tensors so that the device holds those of a residency level; simulators stay.

        Args:
            level: OFFLOADED, WEIGHTS or ALL.

        Returns:
            Number of bytes that were moved.
        """
        # A process of simulators or graders has no tensors of a model.
        if self.policy is None:
            return 0
        # Caches are freed instead of moved, because they can be rebuilt.
        if level < ALL:
            self.release_cache()
        if self._offloader is None:
            self._offloader = TensorOffloader(self._tensors)
        return self._offloader.move_to(level)

    def _tensors(self, level: int) -> list[Tensor]:
        """Return the policy's tensors (WEIGHTS), or gradients and other state (ALL)."""
        learners, policy = self.spec.learners, self.module
        weights = [learners.local_tensor(x) for x in (*policy.parameters(), *policy.buffers())]
        if level == WEIGHTS:
            return weights
        # The learner's state may contain the policy's own tensors; a storage must belong to one
        # level only.
        weight_storages = {x.untyped_storage().data_ptr() for x in weights}
        if self.state_tensors is not None:
            state = self.state_tensors()
        else:
            state = {} if self.learner is None else self.learner.state()
        others = [x for x in tree.leaves(state) if isinstance(x, Tensor)]
        others += [p.grad for p in policy.parameters() if p.grad is not None]
        others = map(learners.local_tensor, others)
        # Tensors without dimensions, such as step counters, are too small to be worth moving.
        return [
            x for x in others if x.ndim and x.untyped_storage().data_ptr() not in weight_storages
        ]

    # ----------------------------------------------------------------------------------- checkpoint
    def state(self) -> tuple[bytes, None]:
        """Return the state of the rollout in the format of torch.save, and no result."""
        assert self.rollout is not None
        # With max_lag, a resumed run collects again what has not been trained on.
        data = checkpoint.to_bytes(self._positions.get(self.version) or self.rollout.state())
        self.finish_requests("env")
        return data, None

    def save(self, folder: str, update: int, options: Mapping[str, Any], *rollouts: bytes) -> str:
        """Write a checkpoint. All learners that hold shards call this method, and rank 0 writes.

        Args:
            folder: Folder of the run's checkpoints.
            update: Number of updates so far.
            options: Further arguments of ``checkpoint.save``.
            rollouts: ``state`` of each rollout process; read by rank 0 only.

        Returns:
            Path of the checkpoint; "" on other ranks.
        """
        assert self.learner is not None
        ranks = self.spec.learners
        # Collective operations: all ranks take part before the ranks other than 0 return.
        learner = ranks.full_state(self.learner.state())
        policy = ranks.full_state(self.module.state_dict())
        self._gather_to_act()
        if ranks.rank:
            return ""
        states = [torch.load(io.BytesIO(data), weights_only=True) for data in rollouts]
        # Several states of simulators fit the same number of processes only, see ``resume``.
        rollout = states[0] if len(states) == 1 else {"processes": states}
        training = {"learner": learner, "rollout": rollout}
        self.finish_requests(*REQUESTS["actor"])
        contents = {"update": update, "policy": policy, "training": training}
        return str(checkpoint.save(Path(folder), **contents, **options))

    def load(self, path: str) -> None:
        """Continue from a checkpoint.

        Raises:
            CheckpointError: The checkpoint does not fit this run.
        """
        assert self.spec.notice is not None
        source = checkpoint.open_checkpoint(path)
        rank, world = self.spec.ranks.get("rollout", (0, 1))
        resume(
            source,
            self.spec.notice,
            policy=self.module,
            rollout=self.rollout,
            learner=self.learner,
            rank=rank,
            world=world,
            learners=self.spec.learners,
        )
        self.version = source.update
        self.finish_requests("env", *REQUESTS["actor"])

    # ----------------------------------------------------------------------------------- statistics
    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of this process so far, by phase of training."""
        components = [x.cpu_s for x in (self.rollout, self.learner, self.server) if x is not None]
        phases = dict.fromkeys([phase for seconds in components for phase in seconds], 0.0)
        return {phase: sum(seconds.get(phase, 0.0) for seconds in components) for phase in phases}

    def waited_s(self) -> float:
        """Return the wall time, in seconds so far, in which this process waited for others."""
        # A connection may have several roles and must be counted once.
        clients = dict.fromkeys(x for clients in self.spec.clients.values() for x in clients)
        waited_s = sum(client.connection.waited_s for client in clients)
        return waited_s + (0.0 if self.server is None else self.server.exchange.waited_s)

    def close(self) -> None:
        """Close all components."""
        for component in (self.rollout, self.learner, self.server):
            if component is not None:
                component.close()


def broadcast_weights(module: nn.Module, ranks: Ranks) -> None:
    """Copy the weights of rank 0, frozen ones included, to all ranks."""
    if ranks.world > 1:
        with torch.no_grad():
            for x in weight_sync.weight_tensors(module, frozen=True).values():
                x.copy_(ranks.all_gather(x)[0])
