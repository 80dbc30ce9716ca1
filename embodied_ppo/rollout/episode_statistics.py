"""Return, length and success of the episodes of one rollout, and the curves of their infos."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.types import Step, VectorEnv
from embodied_ppo.core.types import Mean, Metrics

WINDOW = 100  # least number of episodes over which return, length and success are averaged
# Beginnings of the tags of these statistics.
EPISODE_METRICS = ("rollout/episodes", "rollout/return", "rollout/length", "rollout/success")
PATIENCE = 10  # number of rollouts without a finished episode after which this is reported once


LARGEST_NUMBER_OF_CURVES = 100  # largest number of names; later ones have no curve


class EpisodeStatistics:
    """Counts the episodes of N environments, also those that last longer than one rollout."""

    def __init__(self, env: VectorEnv, notice: Callable[[str], None], one_episode: bool) -> None:
        """Start without episodes.

        Args:
            env: N environments.
            notice: Receives lines for the log.
            one_episode: Whether each rollout starts new episodes, for the advice in these lines.
        """
        self.env, self.notice, self.one_episode = env, notice, one_episode
        # Return, length and success of the current episodes.
        self.running = torch.zeros(3, env.num_envs)
        # Return, length and success so far after every row, [T, 3, N]. Kept between calls, because
        # the allocation of pinned memory is slow.
        self.totals = torch.empty(0)
        # Return, length, success and success in the last step; NaN: unknown.
        self.finished: deque[tuple[float, float, float, float]] = deque(maxlen=WINDOW)
        # Those that ended in the newest rollout.
        self.newest: list[tuple[float, float, float, float]] = []
        # The same of each task, by its index.
        self.by_task: dict[int, deque[tuple[float, ...]]] = {}
        self.curves = InfoCurves(env.num_envs)
        self.has_success = False
        # bool [N], whether an episode has ended since the last restart.
        self.has_ended = np.zeros(env.num_envs, dtype=bool)
        self.rollouts_without_end = 0  # until the first episode has ended

    def reset(self) -> None:
        """Forget the current episodes, because new ones begin in all environments."""
        self.running.zero_()
        self.curves.reset()

    def add(
        self,
        steps: list[Step],
        reward: Tensor,
        length: Tensor,
        ended: Tensor,
        damaged: Mapping[int, Tensor],
        *,
        continues: bool = False,
    ) -> Metrics:
        """Count the episodes that ended; return their number, and means of the newest episodes.

        These are all that ended in this rollout, and at least the newest WINDOW.

        Args:
            steps: T steps.
            reward: Undiscounted, [T, N].
            length: Simulator steps of each row, [T, N].
            ended: Whether an episode ended, bool [T, N].
            damaged: Row -> bool [N], ends of episodes that have no return: they diverged, or were
                truncated for staggering.
            continues: Whether this is a further pass of the newest rollout.
        """
        # Copy everything to the host at once: [T, 3, N] of return, length and success.
        self.has_success |= any(step.success is not None for step in steps)
        none = torch.zeros_like(ended[0])
        succeeded = torch.stack([none if step.success is None else step.success for step in steps])
        last = [s.success if s.success_at_end is None else s.success_at_end for s in steps]
        at_end = torch.stack([none if x is None else x for x in last]).cpu().numpy()
        rows = torch.stack([reward.float(), length.float(), succeeded.float()], 1)
        ended_rows = ended.cpu().numpy()
        # Damaged episodes end, but are not counted.
        counted = ended_rows.copy()
        if damaged:
            counted[list(damaged)] &= ~torch.stack(list(damaged.values())).cpu().numpy()
        if self.totals.shape != rows.shape:
            self.totals = torch.empty(rows.shape, pin_memory=rows.is_cuda)
        self.totals.copy_(rows)
        # Running sums over each episode. A call of NumPy takes less time than one of torch.
        totals, running = self.totals.numpy(), self.running.numpy()
        for row, ends in zip(totals, ended_rows, strict=True):
            row[:2] += running[:2]
            np.maximum(row[2], running[2], out=row[2])
            np.copyto(running, row)
            running[:, np.flatnonzero(ends)] = 0.0
        # Every counted end of an episode: (return, length, success, success at the end).
        ends = totals.transpose(0, 2, 1)[counted].tolist()
        new = [(*e, float(flag)) for e, flag in zip(ends, at_end[counted].tolist(), strict=True)]
        self.finished.extend(new)
        if self.env.id.startswith("["):  # several tasks
            tasks = torch.stack([step.task for step in steps if step.task is not None])
            for task, episode in zip(tasks.cpu().numpy()[counted].tolist(), new, strict=True):
                self.by_task.setdefault(task, deque(maxlen=WINDOW)).append(episode)
        self.has_ended |= counted.any(0)
        if not self.finished:
            self._report_missing_ends(len(steps))
        # In the order of ending, failures that last until the time limit come last: a part of a
        # rollout would contain mostly these.
        self.newest = new = [*(self.newest if continues else ()), *new]
        window = new if len(new) > WINDOW else self.finished
        metrics: Metrics = {"rollout/episodes": float(len(new))}
        if window:
            metrics["rollout/return"] = Mean.of(e[0] for e in window)
            metrics["rollout/length"] = Mean.of(e[1] for e in window)
            if self.has_success:
                metrics["rollout/success"] = Mean.of(e[2] for e in window)
                metrics["rollout/success_once"] = metrics["rollout/success"]
                known = (e[3] for e in window if not math.isnan(e[3]))
                metrics["rollout/success_at_end"] = Mean.of(known)
        for task, episodes in sorted(self.by_task.items()):
            name = self.env.task_names[task]
            metrics[f"rollout/return/{name}"] = Mean.of(e[0] for e in episodes)
            if self.has_success:
                metrics[f"rollout/success/{name}"] = Mean.of(e[2] for e in episodes)
        executed = length.cpu().numpy() > 0
        return metrics | self.curves.add(steps, executed, ended_rows, counted)

    def _report_missing_ends(self, horizon: int) -> None:
        """Report once that no episode has ended in the first PATIENCE rollouts.

        A time limit of a few times as many steps is usual, and the report then waits for it.
        """
        self.rollouts_without_end += 1
        limit, rollouts = self.env.max_episode_steps, PATIENCE
        if limit is not None and limit < 5 * PATIENCE * horizon:
            rollouts = max(PATIENCE, -(-limit // horizon) + 1)
        if self.rollouts_without_end != rollouts:
            return
        advice = f"write algorithm.horizon={limit or 4 * horizon}"
        if not self.one_episode:
            advice = f"shorten env.max_episode_steps (now {limit or 'unknown'})"
        self.notice(
            f"no episode of env.id={self.env.id} has ended in {rollouts} rollouts of {horizon}"
            f" steps (algorithm.horizon), so there is no return; {advice}"
        )

    def state(self) -> dict[str, Any]:
        """Return the current and the newest episodes, for checkpoints."""
        return {
            "running": self.running.clone(),
            "finished": list(self.finished),
            "has_success": self.has_success,
            "info": self.curves.state(),
            "has_ended": self.has_ended.tolist(),
            "by_task": {task: list(episodes) for task, episodes in self.by_task.items()},
        }

    def load_finished(self, state: Mapping[str, Any]) -> None:
        """Continue with the finished episodes of ``state``; the current ones begin anew."""
        # Older checkpoints have no success in the last step.
        finished: Any = ((*e, math.nan)[:4] for e in state["finished"])
        self.finished = deque(finished, maxlen=WINDOW)
        self.has_success = state["has_success"]
        for task, episodes in state.get("by_task", {}).items():
            self.by_task[task] = deque(episodes, maxlen=WINDOW)

    def load_running(self, state: Mapping[str, Any]) -> None:
        """Continue with the current episodes of ``state``."""
        self.running = state["running"].clone()
        # Older checkpoints lack the following two.
        self.curves.load_state(state.get("info"))
        self.has_ended[:] = state.get("has_ended", False)


class InfoCurves:
    """Mean per step and sum per episode of each number, over the environments of one rollout.

    Values that are not finite, and rows that only reset, do not count. An episode has a sum if one
    of its steps had the number.
    """

    def __init__(self, num_envs: int) -> None:
        """Create empty curves."""
        self.num_envs = num_envs
        self.names: list[str] = []
        self.running = np.zeros((2, 0, num_envs))  # [sum and count, names, N] of running episodes

    def reset(self) -> None:
        """Forget the running episodes."""
        self.running[:] = 0

    def add(
        self, steps: Sequence[Step], counted: np.ndarray, ended: np.ndarray, whole: np.ndarray
    ) -> Metrics:
        """Add the steps of a rollout and return its metrics.

        Args:
            steps: T steps.
            counted: bool [T, N], rows whose action was executed.
            ended: bool [T, N], rows that end an episode.
            whole: bool [T, N], those of them whose episode counts.
        """
        N = self.num_envs
        # Names may appear at any step; a name keeps its place for the rest of the run.
        infos = [step.info or {} for step in steps]
        for name in (name for info in infos for name in info):
            if name not in self.names and len(self.names) < LARGEST_NUMBER_OF_CURVES:
                self.names.append(name)
        if not self.names:
            return {}
        # Sums of names that are new start at 0.
        missing = len(self.names) - self.running.shape[1]
        self.running = np.pad(self.running, ((0, 0), (0, missing), (0, 0)))
        metrics: Metrics = {}
        values = np.zeros((2, *counted.shape[:1], len(self.names), self.num_envs))
        for k, name in enumerate(self.names):
            rows: list[Any] = [info.get(name) for info in infos]
            # torch needs longer to return a shape than Python to compare two.
            shapes = [None if x is None else x.shape for x in rows]
            # Simulators that log per update return single numbers instead of one per environment.
            single = [x for x, shape in zip(rows, shapes, strict=True) if shape and shape[0] != N]
            total = np.zeros(2)
            if (shape := next((x for x in shapes if x and x[0] == N), None)) is not None:
                if any(other != shape for other in shapes):
                    gap = torch.full_like(rows[shapes.index(shape)], torch.nan, dtype=torch.float32)
                    rows = [x if s == shape else gap for x, s in zip(rows, shapes, strict=True)]
                array = torch.stack(rows).float().double().cpu().numpy()
                array = array.reshape(*counted.shape, -1)  # [T, N, C]
                # Rows that only reset do not count.
                valid = np.isfinite(array) & counted[..., None]
                values[0, :, k] = np.where(valid, array, 0.0).sum(-1)
                values[1, :, k] = valid.sum(-1)
                total += values[:, :, k].sum((1, 2))
            if single:
                numbers = torch.cat([x.flatten() for x in single]).double().cpu().numpy()
                numbers = numbers[np.isfinite(numbers)]
                total += numbers.sum(), len(numbers)
            metrics[f"env/{name}"] = Mean(float(total[0]), float(total[1]))
        # Sums per episode: add the rows up to each end, then start at 0 in the environments that
        # ended.
        sums = np.zeros((2, len(self.names)))
        start = 0
        for t in np.flatnonzero(ended.any(1)):
            self.running += values[:, start : t + 1].sum(1)
            has_sum = whole[t] & (self.running[1] > 0)
            sums += np.where(has_sum, self.running[0], 0.0).sum(1), has_sum.sum(1)
            self.running[:, :, ended[t]] = 0
            start = t + 1
        self.running += values[:, start:].sum(1)
        for name, total, count in zip(self.names, *sums.tolist(), strict=True):
            metrics[f"env/{name}/episode_sum"] = Mean(total, count)
        return metrics

    def state(self) -> dict[str, Any] | None:
        """Return the names and the running episodes; None without names."""
        if not self.names:
            return None
        return {"names": list(self.names), "running": torch.from_numpy(self.running.copy())}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Continue from ``state``; None: of a run without curves."""
        if state is not None:
            self.names, self.running = list(state["names"]), state["running"].numpy().copy()
