"""What a run's system does wherever its parts are: score checkpoints, save them, and continue from one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import CheckpointError, Learner, Metrics, PendingRow, Trajectory
from embodied_ppo.training import checkpoint
from embodied_ppo.training.logging import finite, numbers


class Result(Protocol):
    """What an evaluation answers."""

    def metrics(self) -> Metrics: ...


class Collector(Protocol):
    """What makes experience: ``rollout.Rollout``, ``rollout.Staged`` or ``reasoning.ReasoningRollout``."""

    @property
    def one_state(self) -> bool:
        """Whether it is in the same state in every process."""
        ...

    @property
    def cpu_s(self) -> Mapping[str, float]: ...

    def collect(self, horizon: int, *, update: int, version: int) -> tuple[Trajectory, Metrics]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any], *, notice: Callable[[str], None]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Records:
    """What is written about a run.

    unit         that experience is counted in     score      tag of an evaluation that says which checkpoint is best
    checkpoints  their folder                      keep_last  of them besides the best
    config_text  config.yaml                       info       versions, hash .. for every checkpoint
    """

    unit: Literal["env_steps", "tokens"]
    score: str
    checkpoints: Path
    keep_last: int
    config_text: str
    info: Mapping[str, Any]


class RunSystem(ABC):
    """``types.System`` as a run needs it."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.version = self.steps = 0
        self.result: Any = None
        """The newest evaluation's ``Result``."""
        self.saved: Path | None = None
        """The newest checkpoint of this run, after ``saved_update`` updates."""
        self.saved_update = -1
        self.pending_row: PendingRow | None = None
        """Of the checkpoint of this run that was loaded: its row, which may not have been logged."""
        self.measured: Callable[[Any], None] = lambda result: None
        """Hears every evaluation."""

    @property
    def unit(self) -> Literal["env_steps", "tokens"]:
        return self.records.unit

    @abstractmethod
    def collect(self, horizon: int, *, update: int) -> tuple[Any, Metrics]: ...

    @abstractmethod
    def update(self, experience: Any, *, update: int) -> Metrics: ...

    @abstractmethod
    def publish(self, version: int) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of training by phase; "process": of all processes besides this one."""

    @abstractmethod
    def _measure(self) -> Result:
        """Evaluate the policy."""

    @abstractmethod
    def _save(self, update: int, rest: Mapping[str, Any]) -> Path:
        """``checkpoint.save`` of all parts; ``rest``: its arguments that are no state."""

    @abstractmethod
    def _load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        """Have all parts continue from there (``resume``)."""

    def evaluate(self, update: int) -> Metrics:
        self.result = self._measure()
        metrics: Metrics = self.result.metrics()
        if self.saved is not None and self.saved_update == update:
            checkpoint.set_score(self.saved, numbers(metrics)[self.records.score])
        self.measured(self.result)
        return metrics

    def save(self, update: int, row: PendingRow | None = None) -> Path:
        r = self.records
        info = {**r.info, r.unit: self.steps}
        if row is not None:
            info[checkpoint.ROW] = vars(row) | {"metrics": finite(numbers(row.metrics))}
        self.saved = self._save(update, {"config_text": r.config_text, "info": info, "keep_last": r.keep_last})
        self.saved_update = update
        return self.saved

    def load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        """Continue where ``source`` was saved, bit for bit. Raises CheckpointError where it does not fit."""
        try:
            self.steps = int(source.manifest[self.unit])
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{source.path / checkpoint.MANIFEST}: does not tell {self.unit}; use another checkpoint"
            ) from error
        self._load(source, notice)
        self.publish(source.update)
        if source.path.parent == self.records.checkpoints.resolve():  # of another run: its scores are not ours to write
            self.saved, self.saved_update = source.path, source.update
            self.pending_row = source.pending_row()


def resume(
    source: checkpoint.Checkpoint,
    notice: Callable[[str], None],
    *,
    policy: nn.Module,
    rollout: Collector | None,
    learner: Learner | None,
    rank: int = 0,
    world: int = 1,
    learners: Ranks | None = None,
) -> None:
    """Have the parts of one process continue from a checkpoint; ``rank`` of ``world`` rollout processes; ``learners``:
    who learns with it.

    Where another number of processes simulated, episodes begin anew and ``notice`` hears it. Raises CheckpointError.
    """
    weights = (learners or Ranks()).parts(policy, source.policy())
    checkpoint.load_weights(policy, weights, source.path / checkpoint.POLICY)
    training = source.training()
    try:
        if learner is not None:
            learner.load_state(training["learner"])
        if rollout is not None:
            states = training["rollout"].get("processes", [training["rollout"]])
            if len(states) == world or rollout.one_state:
                rollout.load_state(states[0 if rollout.one_state else rank], notice=notice)
            else:
                count = f"{len(states)} process{'es' * (len(states) > 1)} simulated before, now {world}"
                notice(f"resume: {count} {'do' if world > 1 else 'does'}; episodes begin anew")
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{source.path / checkpoint.TRAINING}: does not fit this run ({str(error).splitlines()[0]}); "
            "resume with the options and the placement it was trained with"
        ) from error
