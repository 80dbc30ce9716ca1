"""What one process of a placement holds, and what the driver asks of it. Knows neither Ray nor the mode."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.config.placement import ALL, ASKS, WEIGHTS
from embodied_ppo.core import tree, watchdog
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Learner, Metrics, Trajectory
from embodied_ppo.placement.channels import Desk, Server
from embodied_ppo.placement.offload import Luggage
from embodied_ppo.placement.weight_sync import Layout, Parcel, Shelf, moving, open_shelf
from embodied_ppo.training import checkpoint
from embodied_ppo.training.system import Collector, resume


@dataclass(frozen=True)
class Seat:
    """Where a process sits.

    roles   it has                       ranks    role -> (which, of how many) processes of that role
    stages  of one rollout process       desks    role -> connections to the processes of it that this one asks
    about   what simulators are like     learners who learns together; critics: the same of the critic
            (``simulators.described``), for who has none
    turns   whether its tensors leave the device, for others or to be parts, so that nothing may remember where they lie
    """

    roles: tuple[str, ...]
    ranks: Mapping[str, tuple[int, int]]
    stages: int = 1
    desks: Mapping[str, Sequence[Desk]] = field(default_factory=dict)
    learners: Ranks = Ranks()  # noqa: RUF009  (has no state)
    critics: Ranks = Ranks()  # noqa: RUF009
    about: Mapping[str, Any] | None = None
    turns: bool = False


class Part:
    """Some roles of a system. What is None another process has."""

    def __init__(
        self,
        seat: Seat,
        *,
        policy: nn.Module | None = None,
        rollout: Collector | None = None,
        learner: Learner | None = None,
        server: Server | None = None,
        count: Callable[[Trajectory], int] = lambda experience: 0,
        measure: Callable[[], Any] | None = None,
        write: Callable[[Any, checkpoint.Checkpoint, Path], dict[str, str | None]] | None = None,
        about: Mapping[str, Any] | None = None,
        settle: Callable[[], None] = lambda: None,
        arrived: Callable[[int], None] = lambda version: None,
        asleep: Callable[[], None] = lambda: None,
        held: Callable[[], Any] | None = None,
    ) -> None:
        """``settle``: once, when all are built. ``arrived`` hears every version of the weights. ``asleep``: forget what
        can be made anew, for others need the device. ``held``: tensors beside the policy's, in nested containers; None:
        the learner's state."""
        self.seat, self.policy, self.rollout, self.learner, self.server = seat, policy, rollout, learner, server
        self.count, self.measure, self._write, self.about = count, measure, write, about
        self._settle, self._arrived, self._asleep = settle, arrived, asleep
        self._held = held or (lambda: {} if self.learner is None else self.learner.state())
        self.version = 0
        self.kept: dict[int, Trajectory] = {}
        """Experience of an update that the learner of this process will ask for."""
        self.parcel: Parcel | None = None
        self.shelf: Shelf | None = None
        self.opened: Tensor | None = None
        self.luggage: Luggage | None = None

    # ------------------------------------------------------------------------------------------------------- phases
    def settle(self) -> None:
        """All processes are built: give others what they begin with."""
        self._settle()
        self.hang_up(*ASKS["actor"])

    def collect(self, horizon: int, update: int) -> tuple[Any, Metrics]:
        """Experience and its metrics; None where it stays here."""
        assert self.rollout is not None
        trajectory, metrics = self.rollout.collect(horizon, update=update, version=self.version)
        self.hang_up(*ASKS["rollout"])
        if "actor" in self.seat.roles:
            self.kept[update] = trajectory
            return None, metrics
        return tree.map(lambda x: x.cpu().numpy(), trajectory), metrics

    def update(self, update: int, experience: Sequence[Any], piece: tuple[int, int]) -> tuple[Metrics, int]:
        """Learn from experience, or of this process's own; ``piece`` (i, n): the i-th of n equal parts of its columns.

        Metrics, and how much was learned from.
        """
        assert self.learner is not None
        if update in self.kept:
            trajectory = self.kept.pop(update)
        else:
            where = next(self._parameters()).device
            parts = [tree.map(lambda x: torch.from_numpy(x).to(where, copy=True), e) for e in experience]
            trajectory = tree.map(lambda *xs: torch.cat(xs, dim=1), parts[0], *parts[1:]) if parts[1:] else parts[0]
            i, n = piece
            if n > 1:
                trajectory = tree.map(lambda x: x.chunk(n, dim=1)[i].contiguous(), trajectory)
        lag = self.version - trajectory.version.double().mean().item()
        metrics = self.learner.update(trajectory, update=update) | {"rollout/version_lag": lag}
        self.hang_up(*ASKS["actor"])
        return metrics, self.count(trajectory)

    def serve(self, callers: int, during: str) -> None:
        """Answer others until so many are done; ``during``: for messages about the simulator."""
        assert self.server is not None
        watchdog.describe(during=during)
        self.server.serve(callers)

    def evaluate(self) -> Any:
        """Measure the policy."""
        assert self.measure is not None
        try:
            return self.measure()
        finally:
            self.hang_up(*ASKS["rollout"])

    def write(self, result: Any, saved: str, out: str) -> dict[str, str | None]:
        """The report of an evaluation."""
        assert self._write is not None
        return self._write(result, checkpoint.open_checkpoint(saved), Path(out))

    def hang_up(self, *roles: str) -> None:
        """Nothing more is asked of processes that have these roles for now."""
        for desk in dict.fromkeys(desk for role in roles for desk in self.seat.desks.get(role, ())):
            desk.done()

    def _parameters(self) -> Any:
        assert self.policy is not None
        return self.policy.parameters()

    # ------------------------------------------------------------------------------------------------------ weights
    def layout(self, *, everything: bool) -> Layout:
        """Of what travels."""
        assert self.policy is not None
        return Layout.of(moving(self.policy, everything=everything))

    def agree(self, layout: Layout, who: str, *, everything: bool) -> int:
        """Send (or receive) tensors of this layout from now on; bytes. Raises PlacementError where mine differ."""
        assert self.policy is not None
        tensors = moving(self.policy, everything=everything)
        Layout.of(tensors).check(layout, who)
        self.parcel, self.shelf, self.opened = Parcel(tensors, layout, self.seat.learners), None, None
        return layout.total

    def shared(self, version: int) -> None:
        """The learner is in this process: only the version moves."""
        self._gather()
        self._now(version)

    def _now(self, version: int) -> None:
        self.version = version
        self._arrived(version)

    def _gather(self) -> None:
        """Have all weights here for who acts with them, where learners hold a part each."""
        if self.policy is not None and "rollout" in self.seat.roles:
            self.seat.learners.unshard(self.policy)

    def assist(self) -> None:
        """Another learner sends tensors of which I hold a part."""
        assert self.parcel is not None
        self.parcel.assist()

    def packed(self) -> Any:
        """The tensors' bytes, as an object for others."""
        assert self.parcel is not None
        return self.parcel.pack(torch.zeros(self.parcel.layout.total, dtype=torch.uint8)).numpy()

    def unpacked(self, version: int, data: Any) -> None:
        """What ``packed`` gave."""
        assert self.parcel is not None
        self.parcel.unpack(torch.from_numpy(data.copy()))
        self._now(version)

    def shelved(self) -> Any:
        """Put the tensors where others on this device can read them: what they open it with."""
        assert self.parcel is not None
        if self.shelf is None:
            self.shelf = Shelf(self.parcel.layout.total, next(self._parameters()).device)
        self.parcel.pack(self.shelf.flat)
        return self.shelf.handle()

    def unshelved(self, version: int, handle: Any) -> None:
        """Read what ``shelved`` put there."""
        assert self.parcel is not None
        if self.opened is None:
            self.opened = open_shelf(handle, next(self._parameters()).device)
        self.parcel.unpack(self.opened)
        self._now(version)

    def broadcast(self, version: int, group: Any) -> None:
        """Send to, or receive from, the first rank of a process group."""
        assert self.parcel is not None
        for bucket in self.parcel.buckets():
            flat = bucket.pack()
            group.broadcast(flat, 0).wait()
            if group.rank():
                bucket.unpack(flat)
        self._now(version)

    def checksum(self) -> tuple[int, str]:
        """The version here, and a sum over what travelled."""
        assert self.policy is not None
        return self.version, Parcel(moving(self.policy, everything=True), ranks=self.seat.learners).checksum()

    # -------------------------------------------------------------------------------------------------- taking turns
    def reside(self, level: int) -> int:
        """Have on the device what ``level`` of ``residency`` needs; bytes moved. Simulators stay where they are."""
        if self.policy is None:
            return 0
        if level < ALL:
            self._asleep()
        if self.luggage is None:
            self.luggage = Luggage(self._tensors)
        return self.luggage.move(level)

    def _tensors(self, level: int) -> list[Tensor]:
        """The policy's, or all others that the learner holds between updates."""
        assert self.policy is not None
        weights = [self.seat.learners.local(x) for x in (*self.policy.parameters(), *self.policy.buffers())]
        if level == WEIGHTS:
            return weights
        mine = {x.untyped_storage().data_ptr() for x in weights}
        rest = _tensors_in(self._held())
        rest += [p.grad for p in self.policy.parameters() if p.grad is not None]
        rest = map(self.seat.learners.local, rest)
        return [x for x in rest if x.ndim and x.untyped_storage().data_ptr() not in mine]

    # --------------------------------------------------------------------------------------------------- checkpoint
    def state(self) -> bytes:
        """Where the rollout stands, as torch.save writes it."""
        assert self.rollout is not None
        buffer = io.BytesIO()
        torch.save(self.rollout.state(), buffer)
        self.hang_up("env")
        return buffer.getvalue()

    def save(self, folder: str, update: int, rollouts: Sequence[bytes], **rest: Any) -> str:
        """Write a checkpoint; ``rollouts``: everyone's ``state``. Of learners that hold parts all are asked, and the
        first one writes."""
        assert self.policy is not None and self.learner is not None
        ranks = self.seat.learners
        learner, policy = ranks.whole_state(self.learner.state()), ranks.whole_state(self.policy.state_dict())
        self._gather()
        if ranks.rank:
            return ""
        states = [torch.load(io.BytesIO(data), weights_only=True) for data in rollouts]
        rollout = states[0] if len(states) == 1 else {"processes": states}
        training = {"learner": learner, "rollout": rollout}
        self.hang_up(*ASKS["actor"])
        return str(checkpoint.save(Path(folder), update=update, policy=policy, training=training, **rest))

    def load(self, path: str, notice: Callable[[str], None]) -> None:
        """Continue where a checkpoint was saved. Raises CheckpointError where it does not fit."""
        assert self.policy is not None
        source = checkpoint.open_checkpoint(path)
        rank, world = self.seat.ranks.get("rollout", (0, 1))
        resume(
            source,
            notice,
            policy=self.policy,
            rollout=self.rollout,
            learner=self.learner,
            rank=rank,
            world=world,
            learners=self.seat.learners,
        )
        self.version = source.update
        self.hang_up("env", *ASKS["actor"])

    # --------------------------------------------------------------------------------------------------------- rest
    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by phase."""
        rollout = {} if self.rollout is None else self.rollout.cpu_s
        learner = {} if self.learner is None else self.learner.cpu_s
        served = {} if self.server is None else self.server.cpu_s
        phases = dict.fromkeys([*rollout, *learner, *served], 0.0)
        return {phase: sum(told.get(phase, 0.0) for told in (rollout, learner, served)) for phase in phases}

    def waited_s(self) -> float:
        """Wall time in which this process waited for others, so far."""
        desks = dict.fromkeys(desk for several in self.seat.desks.values() for desk in several)
        return sum(desk.line.waited_s for desk in desks) + (
            0.0 if self.server is None else self.server.exchange.waited_s
        )

    def close(self) -> None:
        for part in (self.rollout, self.learner, self.server):
            if part is not None:
                part.close()


def alike(module: nn.Module, ranks: Ranks) -> None:
    """All that learn together take the first one's weights."""
    if ranks.world > 1:
        with torch.no_grad():
            for x in moving(module, everything=True).values():
                x.copy_(ranks.gather(x)[0])


def _tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in nested dictionaries and lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [x for inner in value.values() for x in _tensors_in(inner)]
    return [x for inner in value for x in _tensors_in(inner)] if isinstance(value, (list, tuple)) else []
