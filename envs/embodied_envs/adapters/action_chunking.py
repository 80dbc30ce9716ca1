"""Action chunks: one decision is up to C primitive steps of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters.realistic_env import RealisticEnv
from embodied_envs.adapters.spaces import action_shape_error
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_ppo.core import tree
from embodied_ppo.core.types import Box, EnvError, Obs, Step, VectorEnv


class ChunkedActions:
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
            raise EnvError(
                f"env.id={env.id}: env.action_chunk={chunk}: its actions are discrete; use"
                " action_chunk=1"
            )
        self.env, self.chunk = env, chunk
        self.id, self.num_envs, self.device = env.id, env.num_envs, env.device
        self.obs_spec = env.obs_spec
        self.action_spec = Box(env.action_spec.low * chunk, env.action_spec.high * chunk)
        self.task_names: tuple[str, ...] = getattr(env, "task_names", ())
        self.instructions: tuple[str, ...] = getattr(env, "instructions", ())
        self.gripper_closes: float | None = getattr(env, "gripper_closes", None)
        step_s = getattr(env, "step_s", None)
        self.step_s: float | None = step_s and chunk * step_s
        limit = env.max_episode_steps
        self.max_episode_steps = None if limit is None else -(-limit // chunk)
        self._truncation_mask: Tensor | None = None

    def to_simulator(self, action: Tensor) -> Tensor:
        """Map the policy's actions [N, C·A] to the simulator's, [N, C, ..]."""
        inner: Any = self.env
        primitive = inner.to_simulator(action.reshape(len(action) * self.chunk, -1))
        return primitive.unflatten(0, (len(action), self.chunk))

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
        if action.numel() != self.num_envs * self.action_spec.size or len(action) != self.num_envs:
            size = self.action_spec.size // self.chunk
            expected = torch.Size([self.num_envs, self.chunk, size])
            raise action_shape_error(self.id, action, expected)
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
            final_obs = _where(ended, successor(step), final_obs)
        # Reset the episodes that ended, except those that the simulator has just reset itself.
        is_reset = ~active
        if last.final_obs is not None:
            is_reset = ~active & ~active_before[-1]
        truncated = any_executed([s.truncated for s in steps])
        if self._truncation_mask is not None:
            cut = self._truncation_mask & active
            final_obs = _where(cut, last.obs, final_obs)
            is_reset, truncated = is_reset | cut, truncated | cut
            self._truncation_mask = None
        obs = last.obs
        # On a GPU the check would synchronise, so reset_where() runs in any case.
        if active.device.type != "cpu" or bool(is_reset.any()):
            first_obs = self.env.reset_where(is_reset)
            if first_obs is None:
                raise EnvError(
                    f"env.id={self.id}: env.action_chunk={self.chunk}: it cannot reset single"
                    " environments"
                )
            obs = _where(is_reset, first_obs, obs)
        success = None
        if last.success is not None:
            missing = torch.zeros_like(active)
            success = any_executed([missing if s.success is None else s.success for s in steps])
        return replace(
            last,
            obs=obs,
            reward=torch.stack([s.reward for s in steps], 1) * executed,
            terminated=any_executed([s.terminated for s in steps]),
            truncated=truncated,
            mask=torch.ones_like(active),
            final_obs=final_obs,
            success=success,
            executed=executed,
            task=steps[0].task,
        )

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        return self.env.reset_where(where)

    @property
    def truncate_next(self) -> Callable[[Tensor], None] | None:
        """See ``VectorEnv``."""
        # A simulator with this function can reset single environments, as ``step`` does it here.
        inner = getattr(self.env, "truncate_next", None)
        return None if inner is None else self._truncate_next

    def _truncate_next(self, where: Tensor) -> None:
        self._truncation_mask = where

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``."""
        return getattr(self.env, "unstable", None)

    @property
    def terrain_level(self) -> Tensor | None:
        """See ``VectorEnv``."""
        return getattr(self.env, "terrain_level", None)

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        self.env.restart(seeds)

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``."""
        return self.env.state()

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``."""
        return self.env.load_state(state)

    def render(self) -> Tensor:
        """See ``VectorEnv``."""
        return self.env.render()

    def close(self) -> None:
        """See ``VectorEnv``."""
        self.env.close()

    def _enable_cameras(self, enabled: bool) -> None:
        env, every_step = self.env, False
        if isinstance(env, RealisticEnv):
            env, every_step = env.env, env.reads_every_image
        if isinstance(env, MujocoEnv):
            env.cameras_enabled = enabled or every_step


def _where(condition: Tensor, yes: Obs, no: Obs) -> Obs:
    """Select the rows of ``yes`` where ``condition`` [N] is True, else those of ``no``."""
    return tree.map(
        lambda a, b: torch.where(condition.view(-1, *[1] * (a.ndim - 1)), a, b), yes, no
    )
