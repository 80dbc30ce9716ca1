"""Action chunks: one decision is up to C primitive steps of the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_ppo.core import tree
from embodied_ppo.core.types import Box, EnvError, Obs, Step, VectorEnv


class ChunkedActions:
    """A ``VectorEnv`` whose action is ``chunk`` actions of another one, [N, C, A] or [N, C·A].

    An episode that ends inside a chunk leaves the rest of it unexecuted; the next decision begins
    the next episode, and ``final_obs`` holds the true successor. Meanwhile its simulator goes on
    with the chunk, and nobody looks. Cameras take the one picture that the policy sees. Raises
    EnvError for discrete actions, or where one episode cannot be begun alone.
    """

    def __init__(self, env: VectorEnv, chunk: int) -> None:
        if not isinstance(env.action_spec, Box):
            raise EnvError(
                f"env.id={env.id}: env.action_chunk={chunk}: its actions are discrete; use"
                " action_chunk=1"
            )
        self.env, self.chunk = env, chunk
        self.id, self.num_envs, self.device, self.obs_spec = (
            env.id,
            env.num_envs,
            env.device,
            env.obs_spec,
        )
        self.action_spec = Box(env.action_spec.low * chunk, env.action_spec.high * chunk)
        self.task_names: tuple[str, ...] = getattr(env, "task_names", ())
        self.instructions: tuple[str, ...] = getattr(env, "instructions", ())
        self.gripper_closes: float | None = getattr(env, "gripper_closes", None)
        step_s = getattr(env, "step_s", None)
        self.step_s: float | None = step_s and chunk * step_s
        clock = env.max_episode_steps
        self.max_episode_steps = None if clock is None else -(-clock // chunk)

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        return self.env.reset()

    def step(self, action: Tensor) -> Step:
        """Up to C steps: ``reward`` and ``executed`` are [N, C]."""
        if action.numel() != self.num_envs * self.action_spec.size or len(action) != self.num_envs:
            size = self.action_spec.size // self.chunk
            raise EnvError(
                f"env.id={self.id}: actions of shape {list(action.shape)}; it takes"
                f" {[self.num_envs, self.chunk, size]}"
            )
        steps: list[Step] = []
        alive = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        executed: list[Tensor] = []
        for i, one in enumerate(action.view(self.num_envs, self.chunk, -1).unbind(1)):
            self._enable_cameras(i == self.chunk - 1)
            step = self.env.step(one)
            executed.append(alive)
            steps.append(step)
            alive = alive & ~(step.terminated | step.truncated)
        last = steps[-1]
        ran = torch.stack(executed, 1)  # [N, C]

        def any_of(flags: list[Tensor]) -> Tensor:
            return (torch.stack(flags, 1) & ran).any(1)

        final = last.obs if last.final_obs is None else last.final_obs
        for step, on in zip(reversed(steps[:-1]), reversed(executed[:-1]), strict=True):
            ended = on & (step.terminated | step.truncated)
            final = _where(ended, step.obs if step.final_obs is None else step.final_obs, final)
        # Fresh already: where the simulator has just reset by itself. The others that ended begin
        # anew now.
        fresh = executed[-1] & ~alive if last.final_obs is not None else torch.zeros_like(alive)
        obs = last.obs
        if alive.device.type != "cpu" or bool((~alive & ~fresh).any()):
            begun = self.env.reset_where(~alive & ~fresh)
            if begun is None:
                raise EnvError(
                    f"env.id={self.id}: env.action_chunk={self.chunk}: it cannot begin one episode"
                    " alone"
                )
            obs = _where(~alive & ~fresh, begun, obs)
        return replace(
            last,
            obs=obs,
            reward=torch.stack([s.reward for s in steps], 1) * ran,
            terminated=any_of([s.terminated for s in steps]),
            truncated=any_of([s.truncated for s in steps]),
            mask=torch.ones_like(alive),
            final_obs=final,
            success=(
                None if last.success is None else any_of([_flag(s.success, ran) for s in steps])
            ),
            executed=ran,
            task=steps[0].task,
        )

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        return self.env.reset_where(where)

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``."""
        return getattr(self.env, "unstable", None)

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
        if isinstance(self.env, MujocoEnv):
            self.env.cameras_enabled = enabled


def _where(where: Tensor, yes: Obs, no: Obs) -> Obs:
    return tree.map(lambda a, b: torch.where(where.view(-1, *[1] * (a.ndim - 1)), a, b), yes, no)


def _flag(success: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like[:, 0]) if success is None else success
