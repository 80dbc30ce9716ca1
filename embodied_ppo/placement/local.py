"""LocalSystem: experience, policy and learner in this one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from torch import nn

from embodied_ppo import checkpoint
from embodied_ppo.log import numbers
from embodied_ppo.types import CheckpointError, Learner, Metrics, Policy, Trajectory


class Result(Protocol):
    """What an evaluation answers."""

    def metrics(self) -> Metrics: ...


class Collector(Protocol):
    """What makes experience: ``rollout.Rollout`` or ``reasoning.ReasoningRollout``."""

    @property
    def cpu_s(self) -> Mapping[str, float]: ...

    def collect(self, horizon: int, *, update: int, version: int) -> tuple[Trajectory, Metrics]: ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any], *, notice: Callable[[str], None]) -> None: ...

    def close(self) -> None: ...


R = TypeVar("R", bound=Result)


class LocalSystem(Generic[R]):
    """``types.System`` without copies: acting and learning share one set of weights."""

    def __init__(
        self,
        *,
        unit: Literal["env_steps", "tokens"],
        policy: Policy | nn.Module,
        rollout: Collector,
        learner: Learner,
        count: Callable[[Trajectory], int],
        measure: Callable[[], R],
        score: str,
        checkpoints: Path,
        keep_last: int,
        config_text: str,
        info: Mapping[str, Any],
        publish: Callable[[int], None] = lambda version: None,
    ) -> None:
        """``count``: how much experience a trajectory is, in ``unit``. ``measure`` evaluates; ``score`` is the tag of
        its metrics that says which checkpoint is best. ``publish`` hears every new version. ``config_text`` and
        ``info`` (versions, hash ..) go into every checkpoint."""
        assert isinstance(policy, nn.Module)
        self.unit: Literal["env_steps", "tokens"] = unit
        self.module, self.rollout, self.learner = policy, rollout, learner
        self.count, self.measure, self.score, self._publish = count, measure, score, publish
        self.checkpoints, self.keep_last = checkpoints, keep_last
        self.config_text, self.info = config_text, info
        self.version = self.steps = 0
        self.result: R | None = None
        """The newest evaluation."""
        self.saved: Path | None = None
        """The newest checkpoint, after ``saved_update`` updates."""
        self.saved_update = -1
        self.measured: Callable[[R], None] = lambda result: None
        """Hears every evaluation."""

    def collect(self, horizon: int, *, update: int) -> tuple[Trajectory, Metrics]:
        return self.rollout.collect(horizon, update=update, version=self.version)

    def update(self, experience: Trajectory, *, update: int) -> Metrics:
        lag = self.version - experience.version.double().mean().item()
        metrics = self.learner.update(experience, update=update) | {"rollout/version_lag": lag}
        self.steps += self.count(experience)
        return metrics

    def publish(self, version: int) -> None:
        self.version = version
        self._publish(version)

    def evaluate(self, update: int) -> Metrics:
        self.result = self.measure()
        metrics = self.result.metrics()
        if self.saved is not None and self.saved_update == update:
            checkpoint.set_score(self.saved, numbers(metrics)[self.score])
        self.measured(self.result)
        return metrics

    def save(self, update: int) -> Path:
        self.saved = checkpoint.save(
            self.checkpoints,
            update=update,
            policy=self.module.state_dict(),
            training={"learner": self.learner.state(), "rollout": self.rollout.state()},
            config_text=self.config_text,
            info={**self.info, self.unit: self.steps},
            keep_last=self.keep_last,
        )
        self.saved_update = update
        return self.saved

    def load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        """Continue where ``source`` was saved, bit for bit. Raises CheckpointError where it does not fit."""
        checkpoint.load_weights(self.module, source.policy(), source.path / checkpoint.POLICY)
        training = source.training()
        try:
            self.learner.load_state(training["learner"])
            self.rollout.load_state(training["rollout"], notice=notice)
            self.steps = int(source.manifest[self.unit])
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"{source.path / checkpoint.TRAINING}: does not fit this run ({str(error).splitlines()[0]}); "
                "resume with the options it was trained with"
            ) from error
        self.publish(source.update)
        if source.path.parent == self.checkpoints.resolve():  # of another run: its scores are not ours to write
            self.saved, self.saved_update = source.path, source.update

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by phase: simulate and act, or generate and grade; advantages, update. "process": of processes
        besides this one."""
        return {"process": 0.0, **self.rollout.cpu_s, **self.learner.cpu_s}

    def close(self) -> None:
        self.rollout.close()
        self.learner.close()
