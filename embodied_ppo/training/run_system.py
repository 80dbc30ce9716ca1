"""Base class of the systems of all placements: evaluation and checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from embodied_envs.base.errors import CheckpointError
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Learner, Metrics, PendingRow, System, Trajectory
from embodied_ppo.training import checkpoint
from embodied_ppo.training.logging import finite, numbers


class Result(Protocol):
    """Result of an evaluation."""

    def metrics(self) -> Metrics:
        """Return the metrics of the evaluation."""
        ...


class Collector(Protocol):
    """Collects trajectories with a policy: the rollouts in ``rollout``."""

    @property
    def one_state(self) -> bool:
        """Whether all processes have the same state."""
        ...

    @property
    def cpu_s(self) -> Mapping[str, float]:
        """CPU seconds of this process so far, by phase."""
        ...

    def collect(self, horizon: int, *, update: int, version: int) -> tuple[Trajectory, Metrics]:
        """Collect ``horizon`` steps of each environment; ``version`` is that of the policy."""
        ...

    def state(self) -> dict[str, Any]:
        """Return everything that the next rollout depends on."""
        ...

    def load_state(self, state: Mapping[str, Any], *, notice: Callable[[str], None]) -> None:
        """Restore the result of ``state``; report if new episodes start."""

    def close(self) -> None:
        """Release processes and memory."""


@dataclass(frozen=True)
class Records:
    """Common content of the checkpoints of a run, and their place.

    Attributes:
        unit: Unit of experience.
        score: Metric of an evaluation that selects the best checkpoint.
        checkpoints: Folder of the checkpoints.
        keep_last: Number of checkpoints to keep besides the best.
        config_text: Content of config.yaml.
        info: Entries of every manifest, such as versions and hashes.
    """

    unit: Literal["env_steps", "tokens"]
    score: str
    checkpoints: Path
    keep_last: int
    config_text: str
    info: Mapping[str, Any]


class RunSystem(System, ABC):
    """A system with evaluation results and checkpoints."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self.unit = records.unit
        # Updates that the weights contain, and the experience trained on, in ``unit``.
        self.version = self.steps = 0
        self.result: Any = None  # ``Result`` of the last evaluation
        # The last checkpoint of this run, saved after ``saved_update`` updates.
        self.saved: Path | None = None
        self.saved_update = -1
        # Row of metrics of the loaded checkpoint of this run, which may not have been logged.
        self.pending_row: PendingRow | None = None
        # Called with the result of every evaluation.
        self.on_evaluation: Callable[[Any], None] = lambda result: None
        # Returns entries of the manifest that change while the run trains.
        self.session: Callable[[], Mapping[str, Any]] = dict

    @abstractmethod
    def cpu_s(self) -> dict[str, float]:
        """Return CPU seconds of training by phase; "process" sums all other processes."""

    @abstractmethod
    def _measure(self) -> Result:
        """Evaluate the policy."""

    @abstractmethod
    def _save(self, update: int, arguments: Mapping[str, Any]) -> Path:
        """Call ``checkpoint.save`` with the state of all components and ``arguments``."""

    @abstractmethod
    def _load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        """Load the state of all components with ``resume``."""

    def evaluate(self, update: int) -> Metrics:
        """Evaluate the policy; write the score to the checkpoint of this update if there is one."""
        self.result = self._measure()
        metrics: Metrics = self.result.metrics()
        # The checkpoint was written before the evaluation, so it gets the score afterwards.
        if self.saved is not None and self.saved_update == update:
            checkpoint.set_score(self.saved, numbers(metrics)[self.records.score])
        self.on_evaluation(self.result)
        return metrics

    def save(self, update: int, row: PendingRow | None = None) -> Path:
        """Save a checkpoint and return its folder; ``row``: metrics that are not logged yet."""
        r = self.records
        # These entries change while the run trains, so they are read at each checkpoint.
        info = {**r.info, **self.session(), r.unit: self.steps}
        # A run that is killed before this row is logged can log it when it resumes.
        if row is not None:
            info[checkpoint.ROW] = vars(row) | {"metrics": finite(numbers(row.metrics))}
        self.saved = self._save(
            update, {"config_text": r.config_text, "info": info, "keep_last": r.keep_last}
        )
        self.saved_update = update
        return self.saved

    def load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        """Continue bit for bit from where ``source`` was saved.

        Raises:
            CheckpointError: ``source`` does not fit this run.
        """
        try:
            # The manifest of a run of the other mode has another unit.
            self.steps = int(source.manifest[self.unit])
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{source.path / checkpoint.MANIFEST}: has no {self.unit}; use another checkpoint"
            ) from error
        # Components first: they may refuse the checkpoint, and nothing is published then.
        self._load(source, notice)
        # All processes act with the loaded weights, under their version number.
        self.publish(source.update)
        # The checkpoint of another run is not modified: its scores belong to that run.
        if source.path.parent == self.records.checkpoints.resolve():
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
) -> Mapping[str, Any]:
    """Load a checkpoint into the components of one process; return the content of training.pt.

    Args:
        source: The checkpoint.
        notice: Called if new episodes start, because another number of processes simulated before.
        policy: Module that gets the weights, or this process's shards of them.
        rollout: Rollout of this process, if it has one.
        learner: Learner of this process, if it has one.
        rank: Index among the rollout processes.
        world: Number of rollout processes.
        learners: Processes that train together with this one.

    Raises:
        CheckpointError: The checkpoint does not fit this run.
    """
    # Each learner keeps its shards; without sharding, this is the complete state.
    weights = (learners or Ranks()).shard_state(policy, source.policy())
    checkpoint.load_weights(policy, weights, source.path / checkpoint.POLICY)
    training = source.training()
    try:
        if learner is not None:
            learner.load_state(training["learner"])
        if rollout is not None:
            # Several rollout processes store a list, one process its state alone.
            states = training["rollout"].get("processes", [training["rollout"]])
            # A state of simulators belongs to one process. Those of language models fit any process
            # but for the responses that this process has begun.
            if len(states) == world or rollout.one_state:
                own = states[rank if len(states) == world else 0]
                rollout.load_state(own, notice=notice)
            else:
                change = f"number of processes that simulate was {len(states)}, is {world}"
                notice(f"resume: {change}; all episodes start again")
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{source.path / checkpoint.TRAINING}: does not fit this run"
            f" ({str(error).splitlines()[0]}); resume with the options and the placement it was"
            " trained with"
        ) from error
    return training
