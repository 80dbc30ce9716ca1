"""``System`` in one process that collects the next rollout while the learner trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from embodied_ppo.core.types import Mean, Metrics, Trajectory
from embodied_ppo.training.local_system import PENDING, LocalSystem
from embodied_ppo.training.run_system import Result

Experience: TypeAlias = "Future[tuple[Trajectory, Metrics]]"


class PipelinedSystem(LocalSystem):
    """Collects in a second thread, with a copy of the policy, while the learner trains.

    Rollout k acts with the weights that exist when ``collect`` is called for it. With
    ``Schedule.max_lag`` 1 these are the weights after k - 1 updates, while training on rollout k
    begins after k updates. Compiled code, torch's operations and the simulators of EnvPool do not
    hold Python's interpreter lock, so that both threads run at the same time.
    """

    def __init__(
        self, *args: Any, acting: nn.Module, stop_rollout: Callable[[], None], **options: Any
    ) -> None:
        """Create a system.

        Args:
            args: As for ``LocalSystem``.
            acting: The copy of the policy that ``rollout`` acts with.
            stop_rollout: Lets ``rollout.collect`` end at its next step.
            options: As for ``LocalSystem``.
        """
        super().__init__(*args, **options)
        self.acting, self._stop_rollout = acting, stop_rollout
        # One thread keeps the rollouts in order. torch's number of threads is set per thread.
        self._thread = ThreadPoolExecutor(
            1, "rollout", initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        # Update -> its rollout, from ``collect`` (or a checkpoint) until ``update``.
        self._pending: dict[int, Experience] = {}

    def collect(self, horizon: int, *, update: int) -> tuple[Experience, Metrics]:
        """Start to collect. ``update`` waits for the rollout and returns its metrics, too."""
        if update not in self._pending:  # a checkpoint contains rollouts that were collected
            # Copy before this call returns, because the next update changes the weights in place.
            weights = [x.detach().clone() for x in _tensors(self.module)]
            self._pending[update] = self._thread.submit(
                self._collect, weights, horizon, update, self.version
            )
        return self._pending[update], {}

    @torch.no_grad()
    def _collect(
        self, weights: list[Tensor], horizon: int, update: int, version: int
    ) -> tuple[Trajectory, Metrics]:
        """Collect with these weights; runs in the second thread."""
        # Load them in the second thread, which may have acted with the older ones until now.
        for x, new in zip(_tensors(self.acting), weights, strict=True):
            x.copy_(new)
        return self.rollout.collect(horizon, update=update, version=version)

    def update(self, experience: Experience, *, update: int) -> Metrics:
        # An error of the rollout is raised here. Waiting shows that acting is slower than learning.
        started = time.perf_counter()
        trajectory, metrics = experience.result()
        waited = time.perf_counter() - started
        # From here on, a checkpoint does not contain this rollout.
        del self._pending[update]
        trained = super().update(trajectory, update=update)
        return metrics | trained | {"time/wait_for_rollout_s": waited}

    def _finished(self) -> dict[int, tuple[Trajectory, Metrics]]:
        """Wait for the rollouts that were not trained on, and return them."""
        return {update: experience.result() for update, experience in self._pending.items()}

    def _measure(self) -> Result:
        self._finished()  # ``embodied_envs.base.watchdog`` records the calls of one thread only
        return super()._measure()

    def _training_state(self) -> dict[str, Any]:
        # Checkpoints are read with weights_only=True, so they contain no classes of this package.
        pending = {
            update: {
                "trajectory": {f.name: getattr(trajectory, f.name) for f in fields(Trajectory)},
                "metrics": {
                    tag: [x.sum, x.count] if isinstance(x, Mean) else x
                    for tag, x in metrics.items()
                },
            }
            for update, (trajectory, metrics) in self._finished().items()
        }
        return super()._training_state() | {PENDING: pending}

    def _load_pending(self, pending: Mapping[int, Any], notice: Callable[[str], None]) -> None:
        for update, stored in pending.items():
            metrics: Metrics = {
                tag: Mean(*x) if isinstance(x, list) else x for tag, x in stored["metrics"].items()
            }
            # With a completed future, ``collect`` does not start this rollout again.
            self._pending[update] = experience = Future()
            experience.set_result((Trajectory(**stored["trajectory"]), metrics))

    def close(self) -> None:
        # The rollout must end before the simulators, which it uses, are closed.
        self._stop_rollout()
        self._thread.shutdown(cancel_futures=True)
        super().close()


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]
