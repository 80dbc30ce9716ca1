"""``ClusterSystem``: the training loop's ``System`` over processes of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from embodied_envs.types import EnvInfo
from embodied_ppo.cluster import ray_worker
from embodied_ppo.cluster.offload import Residency
from embodied_ppo.cluster.ray_processes import ClusterProcesses
from embodied_ppo.cluster.ray_reservation import START_TIMEOUT_S
from embodied_ppo.cluster.ray_worker import Pending, RayWorker, Reply, StoreRef, WorkerHandle, wait
from embodied_ppo.cluster.worker import Worker
from embodied_ppo.core.types import Mean, Metrics, add_metrics
from embodied_ppo.options.placement import REQUESTS, Plan
from embodied_ppo.options.schema import ClusterConfig
from embodied_ppo.training import checkpoint
from embodied_ppo.training.loop import TRAINING_PHASES
from embodied_ppo.training.run_system import Records, RunSystem

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class RemoteExperience:
    """Experience that rollout processes hold or collect.

    Attributes:
        data: Trajectory of each rollout process, in Ray's store; None in place of a trajectory that
            stays there.
        collecting: Calls of ``Worker.collect`` that have not been waited for.
        serving: Calls of ``Worker.serve`` that belong to them.
    """

    data: Sequence[StoreRef]
    collecting: Sequence[Pending[Reply[Metrics]]] = ()
    serving: Sequence[Pending[Reply[None]]] = ()


class ClusterSystem(RunSystem):
    """``System`` whose roles are in several processes.

    Methods raise the first error of any process.
    """

    def __init__(
        self,
        records: Records,
        plan: Plan,
        build_worker: ray_worker.BuildWorker,
        *,
        options: ClusterConfig,
        threads: int,
        notice: Callable[[str], None],
    ) -> None:
        """Start and connect the processes of a plan.

        Args:
            records: What is written about the run.
            plan: Groups of processes on devices.
            build_worker: Builds the worker of a process; it is pickled and called there.
            options: Time limits, restarts and sharding.
            threads: CPU threads of tensor operations in each process; 0: torch's default.
            notice: Called with lines for the log, also those of the processes.

        Raises:
            PlacementError: The devices are not available.
            ConfigError, EnvError: Raised by ``build_worker``.
        """
        super().__init__(records)
        self.plan, self.options, self.notice = plan, options, notice
        self.facts: dict[str, Any] = {}  # facts for the run's summary
        # Bytes that each ``publish`` transfers to all rollout processes together.
        self.moved_bytes = 0
        self.training_cpu_s = 0.0  # CPU seconds of the processes' training calls since the start
        self.swap_s = 0.0  # seconds of offloading and loading since the last update
        self.wall_s = 0.0  # wall time of training since the last update, seconds
        # Busy seconds of each device since the last update.
        self.busy_s = [0.0] * plan.hardware.total
        self.residency = Residency(plan)
        # Tag -> peak memory of the largest process, of the host or of the GPU, MiB.
        self.peak_mb: dict[str, float] = {}
        # Calls that run while the driver waits for others; ``_wait`` raises their errors, too.
        self._collecting: list[Pending[Any]] = []
        self._publishing: list[Pending[Any]] = []
        # Calls that end only where a simulator exceeds its time limit.
        self._watching: list[Pending[None]] = []
        self.processes = ClusterProcesses(plan, options, threads, notice)
        try:
            self.processes.check_files(records.checkpoints.parent.absolute())
            self._build(build_worker)
        except BaseException:
            self.close()
            raise

    def _build(self, build_worker: ray_worker.BuildWorker) -> None:
        """Build the workers: simulators, then rollouts, which connect to them, then others."""
        timeout_s = max(START_TIMEOUT_S, self.options.step_timeout_s)
        handles_of = self.processes.by_group
        rollout, actor = self.plan.group("rollout"), self.plan.group("actor")
        simulating = [self.plan.group("env")] if self.plan.has("env") else []
        env_info: EnvInfo | None = None
        for group in dict.fromkeys((*simulating, rollout, actor, *self.plan.groups)):
            offloads, connect = self.residency.offloads(group), self.processes.connections
            calls = [
                h.start(RayWorker.build, build_worker, connect(group, rank, env_info, offloads))
                for rank, h in enumerate(handles_of[group])
            ]
            # A rollout process creates its simulators, and reads their spaces, while it is built.
            serving = self.processes.serve(handles_of[group], "env") if group is rollout else []
            pending: list[Pending[Reply[Any]]] = [*calls, *serving]
            for reply in wait(pending, "build", timeout_s)[: len(calls)]:
                facts, description = reply.result
                self.facts |= facts
                env_info = env_info or description
                for line in reply.log_lines:
                    self.notice(line)
        self.learners, self.actors = handles_of[actor], handles_of[rollout]
        self._watching = [
            h.start(RayWorker.watch_simulator) for group in simulating for h in handles_of[group]
        ]
        # The first transfer includes frozen parameters, so that all processes start from the same
        # model. Later ones do not.
        self._prepare_weight_sync(frozen=True)
        self.publish(0)
        self._prepare_weight_sync(frozen=False)
        if self.plan.remote_roles("actor"):
            self._move_to_phase("save")  # in this phase all roles of a learner have their tensors
            calls = [h.call(Worker.initialize) for h in self.learners]
            self._wait(calls, "initialize", self.processes.serve(self.learners, *REQUESTS["actor"]))

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Add the wall time within the context to ``wall_s``."""
        start = time.monotonic()
        yield
        # Evaluations and checkpoints do not count as training.
        self.wall_s += time.monotonic() - start

    def _idle(self) -> Metrics:
        """Idle share of the time since the last update: mean and maximum over devices."""
        shares = [max(0.0, 1.0 - busy / max(self.wall_s, 1e-9)) for busy in self.busy_s]
        self.busy_s, self.wall_s = [0.0] * len(shares), 0.0
        return {"device/idle": sum(shares) / len(shares), "device/idle_max": max(shares)}

    def _move_to_phase(self, phase: str) -> None:
        """Offload the processes that a phase does not use, then load those that it uses."""
        start = time.monotonic()
        for group, level in self.residency.moves_before(phase):
            self._call(self.processes.by_group[group], Worker.move_to, level)
        self.swap_s += time.monotonic() - start

    # -------------------------------------------------------------------------------------- weights
    def _prepare_weight_sync(self, *, frozen: bool) -> None:
        """Determine the tensors and transports of ``publish``.

        Args:
            frozen: Include parameters that are not trained.

        Raises:
            PlacementError: The models of two processes differ.
        """
        self.paths = [self.plan.weights_path(rank) for rank in range(len(self.actors))]
        receivers = [h for h, path in zip(self.actors, self.paths, strict=True) if path != "share"]
        self.moved_bytes = 0
        if not receivers:
            return
        first = self.learners[0]
        layout = self._call([first], Worker.weight_layout, frozen=frozen)[0]
        prepare, handles = Worker.prepare_weight_sync, [*self.learners, *receivers]
        sizes = self._call(handles, prepare, layout, receivers[0].name, frozen=frozen)
        self.moved_bytes = sizes[0] * len(receivers)
        actors = zip(self.actors, self.paths, strict=True)
        members = [first, *(h for h, path in actors if path == "broadcast")]
        if len(members) > 1 and frozen:  # the first call
            world, timeout_s = len(members), self.options.step_timeout_s
            calls = [
                h.start(RayWorker.join, "weights", self.processes.store, rank, world, timeout_s)
                for rank, h in enumerate(members)
            ]
            wait(calls, "start", START_TIMEOUT_S)

    def publish(self, version: int) -> None:
        """Send the learner's weights to all rollout processes, as ``version``."""
        with self._training():
            self.version = version
            self._move_to_phase("publish")
            # Transport -> rollout processes that receive by it.
            calls, ranks_of = list[Pending[Reply[None]]](), dict[str, list[int]]()
            for rank, path in enumerate(self.paths):
                ranks_of.setdefault(path, []).append(rank)
            # share: the process trains and acts with the same tensors; only the version changes.
            sharing = [*self.learners, *(self.actors[r] for r in ranks_of.get("share", ()))]
            calls += [h.call(Worker.share_weights, version) for h in dict.fromkeys(sharing)]
            first = self.learners[0]
            # A collective deadlocks unless all ranks start it: each pack or broadcast below is
            # followed by the join_gather of the other learners before anything is waited for.
            if ranks := ranks_of.get("broadcast"):
                members = [first, *(self.actors[r] for r in ranks)]
                calls += [h.call(Worker.broadcast, version) for h in members]
                calls += self._join_gather([first])
            if ranks := ranks_of.get("store"):
                data, packing = first.call_split(Worker.pack)
                calls += [packing, *self._join_gather([first])]
                calls += [self.actors[r].call(Worker.unpack, version, data) for r in ranks]
            # ipc: receivers on the device of a learner map its memory.
            if ranks := ranks_of.get("ipc"):
                beside = {r: self.plan.actor_beside(r) for r in ranks}
                sender_of = {r: self.learners[i] for r, i in beside.items() if i is not None}
                senders = list(dict.fromkeys(sender_of.values()))
                calls += self._join_gather(senders)
                buffers = dict(zip(senders, self._call(senders, Worker.export_ipc), strict=True))
                received = {r: buffers[sender_of[r]] for r in ranks}
                load = Worker.import_ipc
                calls += [self.actors[r].call(load, version, x) for r, x in received.items()]
            if self.plan.max_lag:
                # Rollout processes are collecting for a later update; waiting for them would end
                # the overlap.
                self._publishing += calls
            else:
                self._wait(calls, "publish")

    def _join_gather(self, senders: list[WorkerHandle]) -> list[Pending[Reply[None]]]:
        """Start the other learners' part of the senders' all-gathers of sharded parameters."""
        others = [h for h in self.learners if h not in senders] if self.options.shard else []
        return [h.call(Worker.join_gather) for h in others]

    # ---------------------------------------------------------------------------------------- calls
    def _call(
        self,
        handles: list[WorkerHandle],
        method: Callable[Concatenate[Worker, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> list[T]:
        """Call a method of several workers at once, and return their results."""
        calls = [h.call(method, *args, **options) for h in handles]
        return [reply.result for reply in self._wait(calls, method.__name__)]

    def _wait(
        self,
        calls: Sequence[Pending[Reply[Any]]],
        phase: str,
        serving: Sequence[Pending[Reply[None]]] = (),
    ) -> list[Reply[Any]]:
        """Wait for calls and for the servers of their requests; return the replies of the calls.

        The lines of the processes are logged, and their seconds and memory recorded.
        """
        pending = [*calls, *serving]
        # An error of any process ends the wait, also of calls that are not waited for now.
        background = [*self._collecting, *self._publishing, *self._watching]
        replies = wait(pending, phase, self.options.step_timeout_s, background=background)
        for call, reply in zip(pending, replies, strict=True):
            for line in reply.log_lines:
                self.notice(line)
            # Add the times of training calls, and keep the largest memory of each role.
            roles = call.handle.name.partition(" ")[0].replace(",", "+")
            if phase in TRAINING_PHASES:
                self.training_cpu_s += reply.cpu_s
                for device in self.processes.devices[call.handle.name]:
                    self.busy_s[device] += reply.busy_s
            peaks = {f"memory/{roles}_peak_gb": reply.rss_mb}
            if self.plan.hardware.kind == "cuda":
                peaks[f"memory/{roles}_gpu_peak_gb"] = reply.gpu_mb
            for tag, mb in peaks.items():
                self.peak_mb[tag] = max(self.peak_mb.get(tag, 0.0), mb)
        return replies[: len(calls)]

    # --------------------------------------------------------------------------------------- phases
    def collect(self, horizon: int, *, update: int) -> tuple[RemoteExperience, Metrics]:
        """Collect experience; with max_lag > 0 only start it.

        Returns:
            The experience, which stays in the processes, and its metrics. With max_lag > 0 this
            method does not wait, and the metrics are returned by ``update``.
        """
        with self._training():
            self._move_to_phase("collect")
            # Simulators and graders in other processes answer while the rollout runs.
            during = f"update {update}"
            serving = self.processes.serve(self.actors, *REQUESTS["rollout"], during=during)
            started = [h.call_split(Worker.collect, horizon, update) for h in self.actors]
            data, calls = [data for data, _ in started], [call for _, call in started]
            if self.plan.max_lag:
                self._collecting += [*calls, *serving]
                return RemoteExperience(data, calls, serving), {}
            replies = self._wait(calls, "collect", serving)
            return RemoteExperience(data), add_metrics([reply.result for reply in replies])

    def update(self, experience: RemoteExperience, *, update: int) -> Metrics:
        """Train on experience, and return the metrics of all processes together."""
        with self._training():
            metrics: Metrics = {}
            if experience.collecting:
                # Collected in the background: wait for it now.
                replies = self._wait(experience.collecting, "collect", experience.serving)
                metrics = add_metrics([reply.result for reply in replies])
                finished = {call.ref for call in (*experience.collecting, *experience.serving)}
                self._collecting = [call for call in self._collecting if call.ref not in finished]
            self._move_to_phase("update")
            shares = [self._share_of(i, experience.data) for i in range(len(self.learners))]
            pairs = zip(self.learners, shares, strict=True)
            calls = [h.call(Worker.update, update, *share) for h, share in pairs]
            serving = self.processes.serve(self.learners, *REQUESTS["actor"])
            replies = self._wait(calls, "update", serving)
            self.steps += sum(reply.result[1] for reply in replies)
            # Means are summed over the learners; other metrics are equal in all of them.
            for tag, value in replies[0].result[0].items():
                values = [reply.result[0][tag] for reply in replies]
                metrics[tag] = sum(values[1:], value) if isinstance(value, Mean) else value
            metrics["weights/moved_mb"] = self.moved_bytes / 1e6
            metrics["time/swap_s"], self.swap_s = self.swap_s, 0.0
            metrics |= {tag: mb / 1024 for tag, mb in self.peak_mb.items()}
            if self._publishing:
                # Transfers that have ended in the meantime raise their errors here.
                refs = [call.ref for call in self._publishing]
                ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
                self._wait([call for call in self._publishing if call.ref in ready], "publish")
                self._publishing = [call for call in self._publishing if call.ref not in ready]
        return metrics | self._idle()

    def _share_of(self, learner: int, data: Sequence[StoreRef]) -> tuple[Any, ...]:
        """Return (shard, *trajectories) of one learner, the arguments of ``Worker.update``.

        With R trajectories and A learners, a learner gets R / A of them, or one of A / R equal
        parts of one.
        """
        # R / A trajectories for each learner, or A / R learners for each trajectory.
        r, a = len(data), len(self.learners)
        if a > r:
            shard, trajectories = (learner % (a // r), a // r), [data[learner * r // a]]
        else:
            shard, trajectories = (0, 1), data[learner * r // a : (learner + 1) * r // a]
        if self.plan.fused("rollout", "actor"):  # each process trains on what it has collected
            trajectories = []
        return (shard, *trajectories)

    def _measure(self) -> Any:
        self._move_to_phase("evaluate")
        first = self.actors[0]
        evaluating = first.call(Worker.evaluate)
        serving = self.processes.serve([first], *REQUESTS["rollout"], during="evaluation")
        return self._wait([evaluating], "evaluate", serving)[0].result

    def write_report(
        self, result: Any, source: checkpoint.Checkpoint, out: Path
    ) -> dict[str, str | None]:
        """Write an evaluation's report in the first rollout process; return its files' paths."""
        paths = str(source.path.absolute()), str(out.absolute())
        return self._call([self.actors[0]], Worker.report, result, *paths)[0]

    def _save(self, update: int, arguments: Mapping[str, Any]) -> Path:
        self._move_to_phase("save")
        first, *others = self.learners
        serving = self.processes.serve(self.actors, "env")
        states = [h.call_split(Worker.state) for h in self.actors]
        # Workers run calls in order: one with a rollout and a critic must return its rollout's
        # state, which the first learner waits for, before it serves that learner's requests.
        serving += self.processes.serve([first], *REQUESTS["actor"])
        folder = str(self.records.checkpoints.absolute())
        calls = [first.call(Worker.save, folder, update, arguments, *(data for data, _ in states))]
        if self.options.shard:  # gathering the shards is a collective operation
            calls += [h.call(Worker.save, folder, update, arguments) for h in others]
        serving += [call for _, call in states]
        return Path(self._wait(calls, "save", serving)[0].result)

    def _load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        self._move_to_phase("save")
        handles = list(dict.fromkeys([*self.actors, *self.learners]))
        calls = [h.call(Worker.load, str(source.path.absolute())) for h in handles]
        serving = self.processes.serve(self.actors, "env")
        serving += self.processes.serve(self.learners, *REQUESTS["actor"])
        self._wait(calls, "load", serving)

    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds by phase; "process": sum over all processes except the driver."""
        # Phases of all processes are added.
        total = {"process": self.training_cpu_s}
        for seconds_of in self._call(self.processes.handles, Worker.cpu_s):
            for phase, seconds in seconds_of.items():
                total[phase] = total.get(phase, 0.0) + seconds
        return total

    def close(self) -> None:
        """End all processes, and free the devices."""
        self.processes.close()
