"""Action chunks: one decision is up to C primitive steps of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters.realistic_env import RealisticEnv
from embodied_envs.adapters.spaces import check_action
from embodied_envs.adapters.wrapper import EnvWrapper
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_envs.types import Box, Obs, Step, VectorEnv


class ChunkedActions(EnvWrapper):
    """A ``VectorEnv`` whose action is ``chunk`` actions of another one, [N, C, A] or [N, C·A].

    An episode that ends inside a chunk ignores the remaining actions; the next decision starts the
    next episode, and ``final_obs`` holds the true successor. Until then the simulator continues
    with the chunk, and the results are discarded. Cameras render only in the last step of a chunk.

    Raises:
        EnvError: The actions are discrete. ``step`` raises it if an episode ends inside a chunk and
            the simulator cannot reset single environments.
    """

    def __init__(self, env: VectorEnv, chunk: int) -> None:
        if not isinstance(env.action_spec, Box):
            raise EnvError(f"remove env.action_chunk={chunk}: env.id={env.id} has discrete actions")
        super().__init__(env)
        self.chunk = chunk
        self.size = env.action_spec.size
        low, high = env.action_spec.low * chunk, env.action_spec.high * chunk
        self.action_spec = Box(low, high)
        self.to_simulator = self._chunk_to_simulator
        self.step_s = env.step_s and chunk * env.step_s
        limit = env.max_episode_steps
        self.max_episode_steps = None if limit is None else -(-limit // chunk)
        self._truncation_mask: Tensor | None = None

    def _chunk_to_simulator(self, action: Tensor) -> Any:
        """Map the policy's actions [N, C·A] to the simulator's, [N, C, ..]."""
        primitive = self.env.to_simulator(action.reshape(len(action) * self.chunk, -1))
        return tree.map(lambda x: x.unflatten(0, (len(action), self.chunk)), primitive)

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        self._truncation_mask = None
        return self.env.reset()

    def step(self, action: Tensor) -> Step:
        """Execute up to C primitive steps.

        Args:
            action: float32 [N, C, A] or [N, C·A].

        Returns:
            A step whose ``reward`` and ``executed`` are [N, C].
        """
        flat = action.flatten(1) if action.ndim > 1 else action
        check_action(self.id, flat, torch.Size([self.num_envs, self.chunk * self.size]))
        steps: list[Step] = []
        active = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        active_before: list[Tensor] = []  # bool [N] of each step
        for i, primitive in enumerate(action.view(self.num_envs, self.chunk, -1).unbind(1)):
            self._enable_cameras(i == self.chunk - 1)
            step = self.env.step(primitive)
            active_before.append(active)
            steps.append(step)
            active = active & ~(step.terminated | step.truncated)
        last = steps[-1]
        executed = torch.stack(active_before, 1)  # [N, C]

        def any_executed(flags: list[Tensor]) -> Tensor:
            return (torch.stack(flags, 1) & executed).any(1)

        def successor(step: Step) -> Obs:
            return step.obs if step.final_obs is None else step.final_obs

        final_obs = successor(last)
        for step, was_active in zip(steps[-2::-1], active_before[-2::-1], strict=True):
            ended = was_active & (step.terminated | step.truncated)
            final_obs = tree.where(ended, successor(step), final_obs)
        # Reset the episodes that ended, except those that the simulator has just reset itself.
        is_reset = ~active
        if last.final_obs is not None:
            is_reset = ~active & ~active_before[-1]
        truncated = any_executed([s.truncated for s in steps])
        if self._truncation_mask is not None:
            cut = self._truncation_mask & active
            final_obs = tree.where(cut, last.obs, final_obs)
            is_reset, truncated = is_reset | cut, truncated | cut
            self._truncation_mask = None
        obs = last.obs
        # On a GPU the check would synchronise, so reset_where() runs in any case.
        if active.device.type != "cpu" or bool(is_reset.any()):
            first_obs = self.env.reset_where(is_reset)
            if first_obs is None:
                name = f"env.action_chunk={self.chunk}"
                raise EnvError(f"remove {name}: env.id={self.id} cannot reset single environments")
            obs = tree.where(is_reset, first_obs, obs)
        success = at_end = None
        if last.success is not None:
            each = [torch.zeros_like(active) if s.success is None else s.success for s in steps]
            success = any_executed(each)
            last_executed = executed.sum(1, keepdim=True) - 1
            at_end = success & torch.stack(each, 1).gather(1, last_executed)[:, 0]
        return replace(
            last,
            obs=obs,
            reward=torch.where(executed, torch.stack([s.reward for s in steps], 1), 0.0),
            terminated=any_executed([s.terminated for s in steps]),
            truncated=truncated,
            mask=torch.ones_like(active),
            final_obs=final_obs,
            success=success,
            executed=executed,
            task=steps[0].task,
            info=self._info(steps, executed),
            success_at_end=at_end,
        )

    def _info(self, steps: list[Step], executed: Tensor) -> dict[str, Tensor] | None:
        """Return the numbers of all primitive steps, [N, C], NaN where one was not executed."""
        info: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for s in steps for name in s.info or ()):
            rows = [(s.info or {}).get(name) for s in steps]
            each = [x for x in rows if x is not None]
            if all(len(x) == self.num_envs for x in each):
                gap = torch.full_like(each[0], torch.nan, dtype=torch.float32)
                stacked = torch.stack([gap if x is None else x.float() for x in rows], 1)
                info[name] = stacked.where(executed, torch.nan)
            else:
                info[name] = torch.cat([x for x in each if len(x) != self.num_envs])
        return info or None

    def truncate_next(self, where: Tensor) -> None:
        """See ``VectorEnv``."""
        # A simulator that can truncate can reset single environments, as ``step`` does it here.
        self._truncation_mask = where

    def _enable_cameras(self, enabled: bool) -> None:
        env = self.env
        every_step = isinstance(env, RealisticEnv) and env.reads_every_image
        env.simulator.cameras_enabled = enabled or every_step
