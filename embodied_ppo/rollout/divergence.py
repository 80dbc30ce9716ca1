"""Environments whose observations or rewards are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embodied_envs.base import tree, watchdog
from embodied_envs.base.errors import TrainingError
from embodied_envs.types import Obs, Step, VectorEnv, starts
from embodied_ppo.core.finite import finite_rows, is_finite, wrong_number, zero_rows

# Largest share of an update's steps that may diverge; one step, or one per group, always may.
LIMIT = 0.01


@dataclass(frozen=True, slots=True)
class Divergence:
    """What diverged in one step.

    Attributes:
        diverged: bool [N], environments that returned a number which is not finite.
        lost: bool [N], rows that are masked for this reason.
    """

    diverged: Tensor
    lost: Tensor


def stack_divergences(divergences: Mapping[int, Divergence], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``diverged`` and ``lost`` of all steps of a rollout, bool [T, N] as ``mask``.

    Args:
        divergences: Number of a row -> what diverged in it.
        mask: bool [T, N].
    """
    diverged, lost = torch.zeros_like(mask), torch.zeros_like(mask)
    for t, divergence in divergences.items():
        diverged[t], lost[t] = divergence.diverged, divergence.lost
    return diverged, lost


def describe(reward: Tensor, obs: Obs, final_obs: Obs | None, row: int) -> str:
    """Return name and value of the first number of environment ``row`` that is not finite."""
    named = {"reward": reward, "observation": obs, "last observation": final_obs}
    return next(filter(None, (wrong_number(x, name, row) for name, x in named.items())), "")


class DivergenceGuard:
    """Keeps numbers that are not finite from the policy and from the learner.

    An environment diverges in a step whose reward, or whose next observation, is not finite. If it
    is the first observation of the next episode, the row stays as it is. Otherwise the row
    becomes a masked one without flags, and the environment is reset, unless the simulator has
    reset it or will do so in the next step. Where a simulator cannot reset single environments, all
    rows until it ends the episode are masked, and their observations are 0. An accelerator does not
    wait for a check in each step: there it is the state until the end of the rollout.

    All of it depends on the simulator's results only. Therefore replayed actions lead to the same
    resets.
    """

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.on_host = env.device.type == "cpu"
        # bool [N], environments with a damaged episode or no observation, until the next one.
        self.hidden = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        self.any_hidden = False
        self.can_reset = True  # until ``reset_where`` has returned None
        # bool [N], hidden environments that count in their next step: their first observation was
        # not finite, or they are hidden since an earlier rollout.
        self.unreported = self.hidden
        self.example = ""  # name and value of a number that was not finite, for messages

    def begin(self, obs: Obs) -> Obs:
        """Return the observations of a reset of all environments, without what is not finite."""
        self.hidden = torch.zeros_like(self.hidden)
        if not is_finite(obs):
            self.hidden = ~finite_rows(obs)
            self.example = wrong_number(obs, "observation", int(self.hidden.nonzero()[0]))
        self.unreported = self.hidden
        return self._hide(obs)

    def load(self, hidden: Tensor, obs: Obs) -> Obs:
        """Continue from a saved ``hidden``; return its observations [N, ..]."""
        self.hidden = hidden.to(self.hidden.device)
        return self._hide(obs)

    def check(self, step: Step, *, resets: bool = True) -> tuple[Step, Divergence | None]:
        """Return a step with finite numbers, and what diverged; None: nothing.

        Args:
            step: What the simulator returned.
            resets: Whether to reset environments.
        """
        if not self.any_hidden and is_finite((step.reward, step.obs, step.final_obs)):
            return step, None
        # Masked rows, and actions that were not executed, may hold any reward.
        ended = step.terminated | step.truncated
        rewarded = step.mask if step.executed is None else step.mask.unsqueeze(1) & step.executed
        reward = torch.where(rewarded, step.reward, 0.0)
        finite_obs, begins = finite_rows(step.obs), starts(step)
        # The row is damaged if its reward or its true successor is not finite. A first observation
        # of the next episode damages that episode only.
        damaged = ~finite_rows(reward) | ~(finite_obs | begins)
        if step.final_obs is not None:
            damaged |= ended & ~finite_rows(step.final_obs)
        # Environments that are hidden already are not counted a second time.
        diverged = (damaged | ~finite_obs) & ~self.hidden
        if not self.any_hidden and not bool(diverged.any()):  # masked numbers are not finite
            return replace(step, reward=reward), None
        for i in diverged.nonzero()[:1].flatten().tolist():
            self.example = describe(reward, step.obs, step.final_obs, i)
        # Nothing of a damaged episode is trained on.
        lost = (damaged | self.hidden) & step.mask
        diverged |= self.unreported & step.mask
        self.unreported = torch.zeros_like(lost)
        # A new episode hides nothing but its own observation. One that has ended begins in the
        # next step where the simulator gives no ``final_obs``.
        self.hidden = torch.where(begins, ~finite_obs, self.hidden | damaged)
        ends_itself = ended if step.final_obs is None else torch.zeros_like(ended)
        # The policy sees zeros in place of what is not finite.
        obs = self._hide(step.obs)
        if resets:
            obs = self._reset(obs, self.hidden & ~ends_itself)
            if self.can_reset:  # what is hidden still is not finite after its reset
                diverged |= self.hidden & ~ends_itself
        # A lost row is masked and has no flags, so that no advantage flows through it.
        keep = ~lost
        step = replace(
            step,
            obs=obs,
            reward=zero_rows(reward, lost),
            terminated=step.terminated & keep,
            truncated=step.truncated & keep,
            mask=step.mask & keep,
            success=None if step.success is None else step.success & keep,
        )
        return step, Divergence(diverged, lost)

    def safe(self, obs: Obs) -> Obs:
        """Return observations to act on before ``check_all``: 0 where they are not finite."""
        return tree.map(lambda x: x.nan_to_num(0.0, 0.0, 0.0) if x.is_floating_point() else x, obs)

    def check_all(self, steps: Sequence[Step]) -> tuple[list[Step], dict[int, Divergence]]:
        """Return steps with finite numbers, and what diverged by the number of the row.

        The environments are reset after the last step, where the device waits once.

        Args:
            steps: What the simulator returned, T steps.
        """
        checked = list(steps)
        divergences: dict[int, Divergence] = {}
        # One check of the whole rollout, so that the device is waited for once.
        numbers = tree.stack([(step.reward, step.obs) for step in steps])
        final = [step.final_obs for step in steps if step.final_obs is not None]
        if not self.any_hidden and is_finite((numbers, tree.stack(final) if final else None)):
            return checked, divergences
        # Something diverged: check row by row, and reset after the last one.
        for t, step in enumerate(steps):
            checked[t], divergence = self.check(step, resets=t == len(steps) - 1)
            if divergence is not None:
                divergences[t] = divergence
        return checked, divergences

    def _hide(self, obs: Obs) -> Obs:
        """Return observations with zeros in the rows of ``hidden``."""
        self.any_hidden = bool(self.hidden.any())
        return zero_rows(obs, self.hidden) if self.any_hidden else obs

    def _reset(self, obs: Obs, where: Tensor) -> Obs:
        """Reset environments where bool [N] holds; return observations without hidden ones.

        Environments that cannot be reset, or whose first observation is not finite, stay hidden.
        """
        if not self.can_reset or not bool(where.any()):
            return obs
        # Reset the environments that diverged; None: the simulator resets all or none.
        with watchdog.resetting:
            fresh = self.env.reset_where(where)
        self.can_reset = fresh is not None
        if fresh is None:
            return obs
        obs = tree.where(where, fresh, obs)
        self.hidden = torch.where(where, ~finite_rows(obs), self.hidden)
        return self._hide(obs)


@dataclass(slots=True)
class DivergenceLog:
    """Counts the divergences of a rollout, reports them and ends the run where they are many.

    Attributes:
        guard: Its ``example`` is reported.
        env_offset: Number of the first environment in the run.
        stages: Number of rollouts of an update, in all processes.
        group_size: Environments that start alike, so that all of them may diverge at once.
        total: Divergences of the run.
        newest: Divergences of its newest rollout.
        next_line: Number of divergences with which the next line is printed.
    """

    guard: DivergenceGuard
    env_offset: int
    stages: int
    group_size: int = 1
    total: int = 0
    newest: int = 0
    next_line: int = 0

    def count(self, diverged: Tensor, actions: Tensor, update: int) -> str | None:
        """Count the divergences of a rollout; return a line to print, or None.

        Args:
            diverged: bool [T, N], steps that count.
            actions: [T, N, ..], what the policy chose.
            update: Index of the update.

        Raises:
            TrainingError: There are more than LIMIT, or an action is not finite.
        """
        env, n = self.guard.env, int(diverged.sum())
        self.newest = n
        if not n:
            return None
        # Name the first environment, for the message.
        t, i = diverged.nonzero()[0].tolist()
        where = f"environment {self.env_offset + i} (update {update + 1}, step {t})"
        what = self.guard.example or "an observation or reward is not finite"
        # A policy that has diverged drives every simulator to NaN; the cause is not the simulator.
        if not is_finite(actions):
            raise TrainingError(
                f"lower algorithm.lr, and resume the last checkpoint: the policy's action is not"
                f" finite in update {update + 1}, so env.id={env.id} returns no finite numbers"
            )
        steps = self.stages * diverged.numel()  # of the update
        # Too many divergences bias the data: end the run.
        if n > max(self.group_size, LIMIT * steps):
            raise TrainingError(
                f"fix env.id={env.id} (a shorter time step, bounded actions): {what} in {where};"
                f" {n} of {steps} steps diverged, none of which was trained on; up to {LIMIT:.0%}"
                " are masked"
            )
        self.total += n
        # Print a line after 1, 10, 100 times as many divergences.
        if self.total < self.next_line:
            return None
        self.next_line = 10 * self.total
        done = "it was reset" if self.guard.can_reset else "it is masked until its episode ends"
        return (
            f"env.id={env.id}: {what} in {where}; {done}, and the step is not trained on"
            f"; so far {self.total}, see rollout/diverged"
        )
