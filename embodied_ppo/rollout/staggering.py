"""Staggering: first episodes that end at different steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from embodied_envs.base import tree, watchdog
from embodied_envs.types import Step, VectorEnv


class Staggering:
    """Steps N environments, and truncates the first episode of environment i after i/N of a limit.

    Otherwise, in tasks whose episodes always last until the time limit, all N environments would
    stay in the same phase.
    """

    def __init__(self, env: VectorEnv, limit: int | None, offset: int, total: int) -> None:
        """Determine the step that ends each first episode.

        Args:
            env: The environments.
            limit: Time limit of an episode; None: no episode is truncated here.
            offset: Number of the first environment in the run.
            total: Number of all environments of the run.
        """
        self.env = env
        # [N], the step that ends each environment's first episode; 0: none
        cut_step = (offset + torch.arange(env.num_envs)) * (limit or 0) // total
        self.cut_step = cut_step.to(env.device)
        self.cuts = {t for t in cut_step.tolist() if t > 0}

    def begin_step(self, action: Tensor, index: int) -> Callable[[], tuple[Step, Tensor | None]]:
        """Pass an action to the simulator, and truncate episodes that end in this step.

        Args:
            action: Actions of all environments, [N, ..].
            index: Number of the step since the last restart, from 1.

        Returns:
            A function that waits for the step. It returns the step and the mask of truncated
            environments, bool [N], or None. With ``truncate_next`` an episode that is due and
            diverges in this step is among them.
        """
        # Which environments end their first episode in this step.
        due = self.cut_step == index if index in self.cuts else None
        if due is not None and self.env.can_truncate:
            self.env.truncate_next(due)
        # An asynchronous simulator runs in the meantime, others run in the returned function.
        if self.env.is_asynchronous:
            self.env.send(action)

        def finish() -> tuple[Step, Tensor | None]:
            if self.env.is_asynchronous:
                step = self.env.receive()
            else:
                with watchdog.stepping:
                    step = self.env.step(action)
            if due is None:
                return step, None
            if self.env.can_truncate:
                return step, due & step.mask & step.truncated
            return self._truncate(step, due)

        return finish

    def _truncate(self, step: Step, due: Tensor) -> tuple[Step, Tensor | None]:
        """Truncate episodes after a step, where bool [N], unless they ended in it.

        Return the step and the mask of truncated environments, bool [N], or None.
        """
        cut = due & step.mask & ~(step.terminated | step.truncated)
        # On a GPU the check would synchronise, which takes longer than a reset of no environment.
        needed = cut.device.type != "cpu" or bool(cut.any())
        with watchdog.resetting:
            # A cut episode ends as at a time limit: its last observation is kept as the successor,
            # and the environment shows the first observation of the next episode.
            fresh = self.env.reset_where(cut) if needed else None
        if fresh is None:
            return step, None
        final = step.obs
        if step.final_obs is not None:
            final = tree.where(cut, step.obs, step.final_obs)
        obs, truncated = tree.where(cut, fresh, step.obs), step.truncated | cut
        return replace(step, obs=obs, truncated=truncated, final_obs=final), cut
