"""``System`` in one process: rollout, policy and learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from embodied_ppo.core.types import Learner, Metrics, Policy, Trajectory, UpdateObserver
from embodied_ppo.training import checkpoint
from embodied_ppo.training.run_system import Collector, Records, Result, RunSystem, resume

# Key of a checkpoint's training state for the rollouts that were not trained on yet.
PENDING = "pending"


class LocalSystem(RunSystem):
    """Rollout and learner in this process; they share one set of weights."""

    def __init__(
        self,
        records: Records,
        *,
        policy: Policy | nn.Module,
        rollout: Collector,
        learner: Learner,
        count: Callable[[Trajectory], int],
        measure: Callable[[], Result],
        publish: Callable[[int], None] = lambda version: None,
    ) -> None:
        """Create a system.

        Args:
            records: Content of checkpoints.
            policy: The policy, a module.
            rollout: Collects experience with the policy.
            learner: Updates the policy.
            count: Returns the amount of experience of a trajectory, in ``records.unit``.
            measure: Evaluates the policy.
            publish: Called with every new version of the weights.
        """
        super().__init__(records)
        assert isinstance(policy, nn.Module)
        self.module, self.rollout, self.learner = policy, rollout, learner
        self.count, self.measure, self._publish = count, measure, publish
        self._observer: UpdateObserver | None = None

    def set_observer(self, observer: UpdateObserver) -> None:
        """Call ``observer`` with the experience and the minibatches of each update."""
        self._observer = observer
        # The learner reports the minibatches; this system reports experience and metrics.
        self.learner.set_observer(observer)

    def collect(self, horizon: int, *, update: int) -> tuple[Any, Metrics]:
        # Each row records the version of the weights that acted.
        return self.rollout.collect(horizon, update=update, version=self.version)

    def update(self, experience: Any, *, update: int) -> Metrics:
        lag = {"rollout/version_lag": experience.lag(self.version)}
        if self._observer is not None:
            self._observer.on_experience(experience, update=update)
        metrics = self.learner.update(experience, update=update) | lag
        if self._observer is not None:
            self._observer.on_update(metrics)
        # Steps are counted when they are trained on, not when they are collected.
        self.steps += self.count(experience)
        return metrics

    def publish(self, version: int) -> None:
        self.version = version
        # Rollout and learner share the weights, so nothing has to be copied here.
        self._publish(version)

    def _measure(self) -> Result:
        return self.measure()

    def _save(self, update: int, arguments: Mapping[str, Any]) -> Path:
        # A pipelined system waits here until its running rollout is complete.
        training, policy = self._training_state(), self.module.state_dict()
        return checkpoint.save(
            self.records.checkpoints, update=update, policy=policy, training=training, **arguments
        )

    def _training_state(self) -> dict[str, Any]:
        """Return everything besides the policy that the next update depends on."""
        return {"learner": self.learner.state(), "rollout": self.rollout.state()}

    def _load(self, source: checkpoint.Checkpoint, notice: Callable[[str], None]) -> None:
        training = resume(
            source, notice, policy=self.module, rollout=self.rollout, learner=self.learner
        )
        # Only a pipelined run stores rollouts that were not trained on.
        self._load_pending(training.get(PENDING, {}), notice)

    def _load_pending(self, pending: Mapping[int, Any], notice: Callable[[str], None]) -> None:
        """Restore the rollouts that were not trained on; this system trains on none of them."""
        for update in pending:
            notice(f"resume: rollout {update + 1} is not trained on, because pipeline=false")

    def cpu_s(self) -> dict[str, float]:
        # There are no other processes.
        return {"process": 0.0, **self.rollout.cpu_s, **self.learner.cpu_s}

    def close(self) -> None:
        self.rollout.close()
        self.learner.close()
