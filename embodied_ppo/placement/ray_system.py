"""ClusterSystem: the roles of a run in processes of a Ray cluster. The loop does not know."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from embodied_ppo.config.placement import ASKS, Group, Plan
from embodied_ppo.config.schema import ClusterConfig
from embodied_ppo.core.types import Mean, Metrics, PlacementError
from embodied_ppo.placement.offload import Residency
from embodied_ppo.placement.ray_worker import LOOPBACK, Actor, Call, Handle, Make, Wiring, end, wait
from embodied_ppo.placement.worker import Seat
from embodied_ppo.rollout.simulation import added
from embodied_ppo.training import checkpoint
from embodied_ppo.training.loop import TRAINING
from embodied_ppo.training.system import Records, RunSystem

SHARE = 1 / 64
"""Of a device's bundle, for one process: as many as that may be on one."""
PATIENCE_S = 3.0
"""For processes to close what they hold."""
LISTENS_S = 10.0
"""Longest wait for a Ray that is named to take a connection."""
CURE = "add nodes, free them, or lower cluster.num_nodes and cluster.devices_per_node"


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """SIGTERM goes on to be ours: Ray takes it when it connects, and gives it to nobody when it leaves."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError):  # not in the main thread, where Ray takes none
            signal.signal(signal.SIGTERM, handler)


class Reservation:
    """Ray, and one bundle for every device of a plan."""

    def __init__(self, plan: Plan, options: ClusterConfig, notice: Callable[[str], None]) -> None:
        """Connects, or starts Ray here. Raises PlacementError where the devices cannot be had in time."""
        self.plan = plan
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # the first error is raised, the others follow it
        self.started = not ray.is_initialized()
        if self.started:
            with _own_sigterm():
                self._connect(options)
        self.group: PlacementGroup | None = None
        try:
            self.group = self._reserve("GPU" if plan.hardware.kind == "cuda" else "CPU", options, notice)
        except BaseException:
            self.close()
            raise

    def _connect(self, options: ClusterConfig) -> None:
        h = self.plan.hardware
        address = options.address or os.environ.get("RAY_ADDRESS")
        rest: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        try:
            if address:
                host, _, port = address.rpartition(":")
                if port.isdecimal() and "/" not in host:  # Ray itself tries for minutes and says nothing
                    socket.create_connection((host, int(port)), LISTENS_S).close()
                ray.init(address=address, **rest)
            elif len(h.per_node) > 1:
                raise PlacementError(
                    f"cluster.num_nodes = {len(h.per_node)}: no Ray cluster is named; start one (ray start --head "
                    "here, ray start --address=HOST:6379 on the others) and write cluster.address=auto"
                )
            else:
                cores = {"num_cpus": max(h.total, os.cpu_count() or 1)}
                ray.init(address="local", **cores, **rest)
        except (OSError, ValueError, RuntimeError, OverflowError) as error:
            if isinstance(error, PlacementError):
                raise
            named = "cluster.address =" if options.address else "cluster.address is null, RAY_ADDRESS ="
            raise PlacementError(
                f"{named} {address}: Ray cannot be reached ({str(error).splitlines()[0]}); "
                "check ray status there; if it asks for a token, RAY_AUTH_MODE=token is needed here, too"
            ) from error

    def _reserve(self, unit: str, options: ClusterConfig, notice: Callable[[str], None]) -> PlacementGroup:
        h = self.plan.hardware
        nodes = self._nodes(unit)
        one: dict[str, float] = {"CPU": 1.0} if unit == "CPU" else {"GPU": 1.0, "CPU": 1.0}
        bundles = [dict(one) for _ in range(h.total)]
        selectors = [{"ray.io/node-id": nodes[h.node(device)]} for device in range(h.total)]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        start = told = time.monotonic()
        while not group.wait(1):
            now = time.monotonic()
            if now - start > options.start_timeout_s:
                remove_placement_group(group)
                raise PlacementError(f"{self._shortage(unit)} after {options.start_timeout_s:g} s; {CURE}")
            if now - told > 10:
                told = now
                notice(self._shortage(unit))
        return group

    def _shortage(self, unit: str) -> str:
        there, free = ray.cluster_resources().get(unit, 0), ray.available_resources().get(unit, 0)
        need = self.plan.hardware.total
        return f"placement: needs {need} {unit}s, {there:g} registered, {free:g} free"

    def _nodes(self, unit: str) -> list[str]:
        """Ray's ids of the plan's nodes, in order."""
        h = self.plan.hardware
        alive = [n for n in ray.nodes() if n["Alive"]]
        alive.sort(key=lambda n: (sorted((n.get("Labels") or {}).items()), n["NodeID"]))
        free, found = list(alive), list[str]()
        for number, count in enumerate(h.per_node):
            label = next((name for name, nodes in h.labels.items() if number in nodes), None)
            fits = [
                n
                for n in free
                if n["Resources"].get(unit, 0) >= count
                and (label is None or (n.get("Labels") or {}).get("node-group") in (label, None))
            ]
            fits.sort(key=lambda n: (n.get("Labels") or {}).get("node-group") != label)
            if not fits:
                have = ", ".join(f"{n['Resources'].get(unit, 0):g} {unit}s" for n in alive)
                raise PlacementError(
                    f"placement: needs {len(h.per_node)} nodes with {', '.join(map(str, h.per_node))} {unit}s, and the "
                    f"Ray cluster has {len(alive)} ({have}); {CURE}"
                )
            found.append(fits[0]["NodeID"])
            free.remove(fits[0])
        return found

    def strategy(self, device: int) -> PlacementGroupSchedulingStrategy:
        """For a process on a device."""
        assert self.group is not None
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=device)

    def close(self) -> None:
        if self.group is not None:
            remove_placement_group(self.group)
        if self.started:
            with _own_sigterm():
                ray.shutdown()
        self.group, self.started = None, False


class ClusterSystem(RunSystem):
    """Over processes. Raises the first error of any of them; ``close`` leaves nothing running."""

    def __init__(
        self,
        records: Records,
        plan: Plan,
        make: Make,
        *,
        options: ClusterConfig,
        threads: int,
        notice: Callable[[str], None],
    ) -> None:
        """``make`` builds what a process holds (it is sent there). ``threads``: of its tensor operations, 0: torch's
        choice. ``notice`` hears what processes say.

        Raises PlacementError where the devices are not there; ConfigError, EnvError of what is built.
        """
        super().__init__(records)
        self.plan, self.options, self.threads, self.notice = plan, options, threads, notice
        self.facts: dict[str, Any] = {}
        """Of what came before training, for the summary."""
        self.moved_bytes = 0
        """By each publish, to all rollout processes together."""
        self.training_cpu_s = self.swap_s = self.wall_s = 0.0
        self.busy_s = [0.0] * plan.hardware.total
        """Of each device, since the last update; as ``wall_s``, of the phases of training."""
        self.residency = Residency(plan)
        self.peak_mb: dict[str, float] = {}
        """Tag -> the largest process's; of the host's memory and of the GPU's."""
        self._collecting: list[Call] = []
        self._later: list[Call] = []
        self._watching: list[Call] = []
        """Calls that end only where a simulator exceeds its time limit."""
        self.processes: dict[Group, list[Handle]] = {}
        self.reservation = Reservation(plan, options, notice)
        try:
            self._start()
            self._check_files()
            self._build(make)
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------------------------------------------- beginnings
    def _start(self) -> None:
        """Processes, and where they can be reached."""
        r, o, gpu = self.reservation, self.options, self.plan.hardware.kind == "cuda"
        self.secret = secrets.token_hex(16)
        opened = list[tuple[Group, Handle, Call]]()
        single = len(self.plan.hardware.per_node) == 1
        for group in self.plan.groups:
            for rank, devices in enumerate(group.ranks):
                name = f"{group.name} rank {rank}"
                actor = Actor.options(
                    num_cpus=0 if gpu else SHARE,
                    num_gpus=SHARE if gpu else 0,
                    scheduling_strategy=r.strategy(devices[0]),
                    max_restarts=0,
                ).remote(name, self.threads)
                handle = Handle(actor, name)
                ref = actor.open.remote(
                    LOOPBACK if single else None,
                    self.secret,
                    o.step_timeout_s,
                    serves=any(role in group.roles for asker in ASKS for role in self.plan.apart(asker)),
                    meets="actor" in group.roles and rank == 0,
                )
                opened.append((group, handle, Call(ref, handle)))
        answers = wait([call for *_, call in opened], "start", o.start_timeout_s)
        self.addresses: dict[str, Any] = {}
        self.devices: dict[str, tuple[int, ...]] = {}
        for (group, handle, _), told in zip(opened, answers, strict=True):
            full = Handle(handle.actor, handle.name, told["pid"], told["node"])
            self.devices[full.name] = group.ranks[len(self.processes.setdefault(group, []))]
            self.processes[group].append(full)
            if "exchange" in told:
                self.addresses[handle.name] = told["exchange"]
            if "store" in told:
                self.store = told["store"]

    def _check_files(self) -> None:
        """Whether processes on other machines that write or read the run's files see this one's. Raises PlacementError.

        A file is written beside the run directory, looked for there and taken away again.
        """
        here = ray.get_runtime_context().get_node_id()
        able = [role for role in ("rollout", "actor", "critic") if self.plan.has(role)]
        away = {h: None for role in able for h in self.processes[self.plan.group(role)] if h.node != here}
        if not away:
            return
        run_dir = folder = self.records.checkpoints.parent.absolute()
        while not folder.exists():
            folder = folder.parent
        try:
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".embodied_ppo-") as mark:
                seen = wait(
                    [Call(h.actor.sees.remote(mark.name), h) for h in away], "start", self.options.start_timeout_s
                )
        except OSError as error:
            raise PlacementError(f"run_dir={run_dir}: cannot be written ({error.strerror}); name another") from error
        for handle in (h for h, found in zip(away, seen, strict=True) if not found):
            raise PlacementError(
                f"run_dir={run_dir}: {handle} does not see this machine's {folder}; name a folder that all machines "
                "share under one path"
            )

    def _servers(self, asker: str, rank: int) -> dict[str, list[Handle]]:
        """Role -> the processes of it that process ``rank`` of ``asker`` asks; without what is in its own."""
        found, count = dict[str, list[Handle]](), self.plan.processes(asker)
        for role in self.plan.apart(asker):
            handles, n = self.processes[self.plan.group(role)], self.plan.processes(role)
            first = rank * n // count
            found[role] = handles[first : max(first + 1, (rank + 1) * n // count)]
        return found

    def _serve(self, askers: Sequence[Handle], *roles: str, during: str = "") -> list[Call]:
        """Have processes of these roles answer ``askers`` until those are done; ``during``: for their messages."""
        callers: dict[Handle, set[Handle]] = {}
        for asker in ASKS:
            for rank, handle in enumerate(self.processes[self.plan.group(asker)]):
                if handle in askers:
                    for role, servers in self._servers(asker, rank).items():
                        for server in servers if role in roles else ():
                            callers.setdefault(server, set()).add(handle)
        return [Call(h.actor.call.remote("serve", len(who), during), h) for h, who in callers.items()]

    def _wiring(self, group: Group, rank: int, about: Mapping[str, Any] | None) -> Wiring:
        ranks = dict.fromkeys(group.roles, (rank, group.processes))
        desks: dict[str, list[str]] = {}
        for asker in ASKS.keys() & group.roles:
            for role, handles in self._servers(asker, rank).items():
                for h in handles:
                    desks.setdefault(h.name, []).append(role)
        teams = {"learners": "actor", "critics": "critic"}
        gathers = self.options.shard and {"rollout", "actor"} <= {*group.roles}
        return Wiring(
            Seat(group.roles, ranks, self.plan.stages, about=about, turns=self.residency.turns(group) or gathers),
            desks=[(self.addresses[name], name, tuple(roles)) for name, roles in desks.items()],
            teams={team: ranks[role] for team, role in teams.items() if role in ranks},
            store=self.store,
            secret=self.secret,
            patience_s=self.options.step_timeout_s,
            shard=self.plan.hardware.kind if self.options.shard else None,
        )

    def _build(self, make: Make) -> None:
        """Simulators first, then who asks for them, then who only learns."""
        deadline = max(self.options.start_timeout_s, self.options.step_timeout_s)
        first = [self.plan.group(role) for role in ("env", "rollout", "actor") if self.plan.has(role)]
        rollout, actor = first[-2:]
        about: Mapping[str, Any] | None = None
        for group in dict.fromkeys((*first, *self.plan.groups)):
            calls = [
                Call(h.actor.build.remote(make, self._wiring(group, rank, about)), h)
                for rank, h in enumerate(self.processes[group])
            ]
            serving = self._serve(self.processes[group], "env") if group is rollout else []
            for reply in wait([*calls, *serving], "build", deadline)[: len(calls)]:
                facts, told = reply.result
                self.facts |= facts
                about = about or told
                for line in reply.said:
                    self.notice(line)
        self.learners, self.actors = self.processes[actor], self.processes[rollout]
        simulating = self.processes[first[0]] if self.plan.has("env") else []
        self._watching = [Call(h.actor.watch_simulator.remote(), h) for h in simulating]
        self._agree(everything=True)
        self.publish(0)
        self._agree(everything=False)
        if self.plan.apart("actor"):
            self._turn("save")  # everything is where it can be written
            calls = [Call(h.actor.call.remote("settle"), h) for h in self.learners]
            self._wait([*calls, *self._serve(self.learners, *ASKS["actor"])], "settle")

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Counts the wall time within."""
        start = time.monotonic()
        yield
        self.wall_s += time.monotonic() - start

    def _idle(self) -> Metrics:
        """Share of the time since the last update in which nobody worked on a device: of all, and of the idlest."""
        shares = [max(0.0, 1.0 - busy / max(self.wall_s, 1e-9)) for busy in self.busy_s]
        self.busy_s, self.wall_s = [0.0] * len(shares), 0.0
        return {"device/idle": sum(shares) / len(shares), "device/idle_max": max(shares)}

    def _turn(self, phase: str) -> None:
        """Who shares a device with the phase and has no part in it moves to the host; then who has wakes up."""
        start = time.monotonic()
        for group, level in self.residency.before(phase):
            self._ask(self.processes[group], "reside", level)
        self.swap_s += time.monotonic() - start

    # -------------------------------------------------------------------------------------------------------- weights
    def _agree(self, *, everything: bool) -> None:
        """Who sends what to whom from now on. Raises PlacementError where models differ."""
        self.paths = [self.plan.weights_path(rank) for rank in range(len(self.actors))]
        takers = [h for h, path in zip(self.actors, self.paths, strict=True) if path != "share"]
        self.moved_bytes = 0
        if not takers:
            return
        o = self.options
        first = self.learners[0]
        layout = self._ask([first], "layout", everything=everything)[0]
        sizes = self._ask([*self.learners, *takers], "agree", layout, takers[0].name, everything=everything)
        self.moved_bytes = sizes[0] * len(takers)
        by_broadcast = [h for h, path in zip(self.actors, self.paths, strict=True) if path == "broadcast"]
        if by_broadcast and everything:
            members = [first, *by_broadcast]
            wait(
                [
                    Call(h.actor.join.remote("weights", self.store, i, len(members), o.step_timeout_s), h)
                    for i, h in enumerate(members)
                ],
                "start",
                o.start_timeout_s,
            )

    def publish(self, version: int) -> None:
        with self._training():
            self._publish(version)

    def _publish(self, version: int) -> None:
        self.version = version
        self._turn("publish")
        calls, by_path = list[Call](), dict[str, list[int]]()
        for rank, path in enumerate(self.paths):
            by_path.setdefault(path, []).append(rank)
        sharing = [*self.learners, *(self.actors[r] for r in by_path.get("share", ()))]
        calls += [Call(h.actor.call.remote("shared", version), h) for h in dict.fromkeys(sharing)]
        first = self.learners[0]
        if ranks := by_path.get("broadcast"):
            members = [first, *(self.actors[r] for r in ranks)]
            calls += [Call(h.actor.broadcast.remote(version), h) for h in members]
            calls += self._assist([first])
        if ranks := by_path.get("store"):
            data = first.actor.packed.remote()
            calls += self._assist([first])
            calls += [Call(self.actors[r].actor.call.remote("unpacked", version, data), self.actors[r]) for r in ranks]
        if ranks := by_path.get("ipc"):
            near = {r: self.learners[i] for r in ranks if (i := self.plan.near(r)) is not None}
            senders = list(dict.fromkeys(near.values()))
            calls += self._assist(senders)
            shelves = dict(zip(senders, self._ask(senders, "shelved"), strict=True))
            calls += [
                Call(self.actors[r].actor.call.remote("unshelved", version, shelves[near[r]]), self.actors[r])
                for r in ranks
            ]
        if self.plan.max_lag:  # rollouts are busy with the experience after next
            self._later += calls
        else:
            self._wait(calls, "publish")
        if self.options.check_weights:
            self._check_weights()

    def _assist(self, senders: list[Handle]) -> list[Call]:
        """What the other learners do while these send, where each holds a part of what is sent."""
        others = [h for h in self.learners if h not in senders] if self.options.shard else []
        return [Call(h.actor.call.remote("assist"), h) for h in others]

    def _check_weights(self) -> None:
        everyone = list(dict.fromkeys([*self.learners, *self.actors]))
        sums = self._ask(everyone, "checksum")
        for handle, found in zip(everyone, sums, strict=True):
            if found != sums[0]:
                raise PlacementError(
                    f"weights: {handle} holds {found[1]} at version {found[0]}, {everyone[0]} holds {sums[0][1]} at "
                    f"version {sums[0][0]} (cluster.check_weights); report this with the command"
                )

    def _ask(self, handles: list[Handle], method: str, *args: Any, **rest: Any) -> list[Any]:
        calls = [Call(h.actor.call.remote(method, *args, **rest), h) for h in handles]
        return [reply.result for reply in self._wait(calls, method)]

    def _wait(self, calls: list[Call], phase: str) -> list[Any]:
        """Replies; what was said goes to the log, seconds and memory are noted."""
        replies = wait(
            calls, phase, self.options.step_timeout_s, beside=[*self._collecting, *self._later, *self._watching]
        )
        for call, reply in zip(calls, replies, strict=True):
            for line in reply.said:
                self.notice(line)
            roles = call.handle.name.partition(" ")[0].replace(",", "+")
            if phase in TRAINING:
                self.training_cpu_s += reply.cpu_s
                for device in self.devices[call.handle.name]:
                    self.busy_s[device] += reply.busy_s
            told = {f"memory/{roles}_peak_gb": reply.rss_mb}
            if self.plan.hardware.kind == "cuda":
                told[f"memory/{roles}_gpu_peak_gb"] = reply.gpu_mb
            for tag, mb in told.items():
                self.peak_mb[tag] = max(self.peak_mb.get(tag, 0.0), mb)
        return replies

    # ---------------------------------------------------------------------------------------------------------- phases
    def collect(self, horizon: int, *, update: int) -> tuple[Any, Metrics]:
        """A handle on the experience. With lag its metrics come with ``update``, which waits for it."""
        with self._training():
            return self._collect(horizon, update)

    def _collect(self, horizon: int, update: int) -> tuple[Any, Metrics]:
        self._turn("collect")
        serving = self._serve(self.actors, *ASKS["rollout"], during=f"update {update}")
        refs = [h.actor.collect.options(num_returns=2).remote(horizon, update) for h in self.actors]
        calls = [Call(told, h) for (_, told), h in zip(refs, self.actors, strict=True)]
        experience = [data for data, _ in refs]
        if self.plan.max_lag:
            self._collecting += [*calls, *serving]
            return (experience, calls, serving), {}
        replies = self._wait([*calls, *serving], "collect")[: len(calls)]
        return (experience, [], []), added([reply.result for reply in replies])

    def update(self, experience: Any, *, update: int) -> Metrics:
        with self._training():
            metrics = self._update(experience, update)
        return metrics | self._idle()

    def _update(self, experience: Any, update: int) -> Metrics:
        data, waiting, serving = experience
        metrics: Metrics = {}
        if waiting:
            metrics = added([reply.result for reply in self._wait([*waiting, *serving], "collect")[: len(waiting)]])
            done = {call.ref for call in (*waiting, *serving)}
            self._collecting = [call for call in self._collecting if call.ref not in done]
        self._turn("update")
        calls = list[Call]()
        r, a = len(data), len(self.learners)
        fused = self.plan.fused("rollout", "actor")
        for i, h in enumerate(self.learners):
            mine = [] if fused else [data[i * r // a]] if a >= r else data[i * r // a : (i + 1) * r // a]
            piece = (i % (a // r), a // r) if a > r else (0, 1)
            calls.append(Call(h.actor.update.remote(update, piece, *mine), h))
        replies = self._wait([*calls, *self._serve(self.learners, *ASKS["actor"])], "update")[: len(calls)]
        self.steps += sum(reply.result[1] for reply in replies)
        for tag, value in replies[0].result[0].items():
            parts = [reply.result[0][tag] for reply in replies]
            metrics[tag] = sum(parts[1:], value) if isinstance(value, Mean) else value
        metrics["weights/moved_mb"] = self.moved_bytes / 1e6
        metrics["time/swap_s"], self.swap_s = self.swap_s, 0.0
        metrics |= {tag: mb / 1024 for tag, mb in self.peak_mb.items()}
        if self._later:
            ready, _ = ray.wait([call.ref for call in self._later], num_returns=len(self._later), timeout=0)
            done = [call for call in self._later if call.ref in ready]
            self._wait(done, "publish")
            self._later = [call for call in self._later if call.ref not in ready]
        return metrics

    def _measure(self) -> Any:
        self._turn("evaluate")
        first = self.actors[0]
        calls = [
            Call(first.actor.call.remote("evaluate"), first),
            *self._serve([first], *ASKS["rollout"], during="evaluation"),
        ]
        return self._wait(calls, "evaluate")[0].result

    def write(self, result: Any, source: checkpoint.Checkpoint, out: Path) -> dict[str, str | None]:
        """The report, by the first rollout process."""
        return self._ask([self.actors[0]], "write", result, str(source.path.absolute()), str(out.absolute()))[0]

    def _save(self, update: int, rest: Mapping[str, Any]) -> Path:
        self._turn("save")
        first, *others = self.learners
        serving = self._serve(self.actors, "env")
        states = [h.actor.state.remote() for h in self.actors]
        serving += self._serve([first], *ASKS["actor"])  # after: who has a critic and a rollout tells of that first
        folder = str(self.records.checkpoints.absolute())
        calls = [Call(first.actor.save.remote(folder, update, rest, *states), first)]
        if self.options.shard:
            calls += [Call(h.actor.save.remote(folder, update, rest), h) for h in others]
        return Path(self._wait([*calls, *serving], "save")[0].result)

    def _load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        self._turn("save")
        everyone = list(dict.fromkeys([*self.actors, *self.learners]))
        calls = [Call(h.actor.load.remote(str(source.path.absolute())), h) for h in everyone]
        self._wait([*calls, *self._serve(self.actors, "env"), *self._serve(self.learners, *ASKS["actor"])], "load")

    def cpu_s(self) -> dict[str, float]:
        found = {"process": self.training_cpu_s}
        handles = [h for group in self.processes.values() for h in group]
        for told in self._ask(handles, "cpu_s"):
            for phase, seconds in told.items():
                found[phase] = found.get(phase, 0.0) + seconds
        return found

    def close(self) -> None:
        """End every process."""
        end([h for group in self.processes.values() for h in group], PATIENCE_S)
        self.processes = {}
        self.reservation.close()
