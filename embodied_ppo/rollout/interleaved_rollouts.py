"""Several rollouts at once: the policy acts for one while the simulator of another runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from embodied_envs.base import tree
from embodied_envs.types import Say
from embodied_ppo.core.types import add_metrics
from embodied_ppo.rollout.simulation import Experience, Rollout, collect_passes


class InterleavedRollouts:
    """Several interleaved rollouts: the policy acts for one while the simulator of another runs."""

    # Whether all processes share one rollout state.
    one_state = False

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        """Combine rollouts.

        Args:
            rollouts: One rollout per stage, in the order of their environments, with the same
                policy.
        """
        self.rollouts = list(rollouts)
        self.policy = self.rollouts[0].policy

    @property
    def cpu_clock(self) -> Callable[[], float]:
        """Clock of ``cpu_s``."""
        return self.rollouts[0].cpu_clock

    @cpu_clock.setter
    def cpu_clock(self, clock: Callable[[], float]) -> None:
        for rollout in self.rollouts:
            rollout.cpu_clock = clock

    @property
    def cpu_s(self) -> dict[str, float]:
        """CPU seconds since the start, by phase."""
        phases = self.rollouts[0].cpu_s
        return {phase: sum(r.cpu_s[phase] for r in self.rollouts) for phase in phases}

    def collect(self, horizon: int, *, update: int, version: int) -> Experience:
        """Collect as ``Rollout.collect`` does; the environments of the stages are concatenated."""
        parts = collect_passes(self.rollouts, horizon, update=update, version=version)
        trajectories, metrics = zip(*parts, strict=True)
        return tree.concatenate(trajectories, 1), add_metrics(metrics)

    def state(self) -> dict[str, Any]:
        """Return the state of every stage."""
        return {"stages": [r.state() for r in self.rollouts]}

    def load_state(self, state: Mapping[str, Any], *, notice: Say = lambda text: None) -> None:
        """Continue from ``state`` of as many stages."""
        for r, s in zip(self.rollouts, state["stages"], strict=True):
            r.load_state(s, notice=notice)

    def stop(self) -> None:
        """Stop every stage, see ``Rollout.stop``."""
        for r in self.rollouts:
            r.stop()

    def close(self) -> None:
        """Close every stage."""
        for r in self.rollouts:
            r.close()
