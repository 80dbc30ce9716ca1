"""TermTask: the base class of tasks whose reward is a weighted sum of terms with names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial

import mujoco
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.tasks.task import State, Task, Term


class TermTask(Task):
    """A task with reward = sum of weight · term in each control step, at least ``least_reward``.

    A term is a method with the arguments ``before``, ``s`` and ``action``, which returns [N]; its
    keyword-only arguments are numbers. ``rewards`` lists terms with their weights and numbers. A
    term that it does not list, or whose weight is 0, is not computed. The weighted terms become the
    curves ``env/<name>``, the errors of the commands ``env/error_<command>``, and the commands
    ``env/command_<command>``, so that an evaluation reports the error in ranges of the command.
    """

    # Index of the position of a floating base in qpos.
    base_qpos: int
    # Index of its velocity in qvel.
    base_dof: int
    # Smallest sum; None: there is none.
    least_reward: float | None = None

    def available_terms(self) -> Mapping[str, Term]:
        """Return all methods that are terms."""
        methods = inspect.getmembers(type(self), inspect.isfunction)
        takes = {name: list(inspect.signature(method).parameters) for name, method in methods}
        names = [name for name, x in takes.items() if x[1:4] == ["before", "s", "action"]]
        return {k: getattr(self, k) for k in names if k not in ("reward", "reward_terms")}

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Forget the terms of another model, and store the ranges of commands."""
        self._terms: dict[str, tuple[float, Term]] | None = None
        bounds = [*self.commands.values()] or [(0.0, 0.0)]
        self.least, high = torch.tensor(bounds, device=device, dtype=dtype).unbind(1)
        self.extent = high - self.least

    def action_bounds(self, model: mujoco.MjModel) -> tuple[list[float], list[float]]:
        """Return -1 and 1 for every actuator."""
        return [-1.0] * model.nu, [1.0] * model.nu

    def weighted_terms(self) -> dict[str, tuple[float, Term]]:
        """Return name -> weight and function of the terms that are computed."""
        if self._terms is None:
            available, self._terms = self.available_terms(), {}
            for name, numbers in self.rewards.items():
                if name not in available or "weight" not in numbers:
                    raise EnvError(f"{type(self).__name__}.rewards: no term, or no weight: {name}")
                numbers = dict(numbers)
                if weight := numbers.pop("weight"):
                    self._terms[name] = weight, partial(available[name], **numbers)
            if not self._terms:
                raise EnvError(f"write env.rewards: {type(self).__name__} has no term of a weight")
        return self._terms

    def command_errors(self, s: State) -> Tensor:
        """Return what is achieved minus the command, [N, C], in the units of ``commands``."""
        return torch.zeros_like(s["command"])

    def shared(self, s: State) -> Mapping[str, Tensor]:
        """Return what several terms read, by names that are in none of the state."""
        return {}

    def reward_terms(self, before: State, s: State, action: Tensor) -> dict[str, Tensor]:
        s = {**s, **self.shared(s)}
        terms = {k: w * term(before, s, action) for k, (w, term) in self.weighted_terms().items()}
        if self.commands:
            values = {"error": self.command_errors(s).abs(), "command": s["command"]}
            for kind, x in values.items():
                names = (f"{kind}_{name}" for name in self.commands)
                terms |= dict(zip(names, x.unbind(1), strict=True))
        return terms

    def total(self, terms: dict[str, Tensor]) -> Tensor | None:
        # A subclass may define its own reward; the terms are curves only then.
        return self._sum(terms) if type(self).reward is TermTask.reward else None

    def _sum(self, terms: dict[str, Tensor]) -> Tensor:
        if self._terms is None and self.rewards:
            own = f"(env.rewards): {type(self).__name__}.reward_terms computes none of them"
            raise EnvError(f"remove {', '.join(self.rewards)} from rewards {own}")
        names = self._terms or terms  # a task may define ``reward_terms`` itself
        reward = torch.stack([terms[name] for name in names]).sum(0)
        return reward if self.least_reward is None else reward.clamp(min=self.least_reward)

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return self._sum(self.reward_terms(before, s, action))

    def action_rate(self, before: State, s: State, action: Tensor) -> Tensor:
        """Change of the action, squared."""
        return (action - s["last_action"]).square().sum(1)

    def termination(self, before: State, s: State, action: Tensor) -> Tensor:
        """1 in the step that ends the episode."""
        return self.terminated(s).to(s["qpos"])

    # ---------------------------------------------------------------------------- the floating base
    def base_velocity(self, s: State) -> Tensor:
        """Return the velocity of the floating base in its own frame, m/s, [N, 3]."""
        q, v = self.base_qpos + 3, self.base_dof
        return to_body_frame(s["qpos"][:, q : q + 4], s["qvel"][:, v : v + 3])

    def base_angular_velocity(self, s: State) -> Tensor:
        """Return the angular velocity of the floating base in its own frame, rad/s, [N, 3]."""
        return s["qvel"][:, self.base_dof + 3 : self.base_dof + 6]

    def base_gravity(self, s: State) -> Tensor:
        """Return the direction of gravity in the frame of the floating base, [N, 3]."""
        return gravity(s["qpos"][:, self.base_qpos + 3 : self.base_qpos + 7])

    def height(self, s: State) -> Tensor:
        """Return the height of the floating base, m, [N]."""
        return s["qpos"][:, self.base_qpos + 2]


def gravity(quaternion: Tensor) -> Tensor:
    """Return the direction of gravity in the frame of bodies with quaternions [N, 4], [N, 3].

    It is minus the third row of the rotation matrix from body to world.
    """
    w, x, y, z = quaternion.unbind(1)
    return torch.stack([2 * (w * y - x * z), -2 * (y * z + w * x), 2 * (x * x + y * y) - 1], 1)


def to_body_frame(quaternion: Tensor, vector: Tensor) -> Tensor:
    """Rotate vectors [N, 3] of the world into the frame of bodies with quaternions [N, 4].

    A vector v becomes v + 2 (w (v × r) + (v × r) × r), with the quaternion (w, r).
    """
    w, r = quaternion[:, :1], quaternion[:, 1:]
    cross = torch.linalg.cross(vector, r)
    return vector + 2 * (w * cross + torch.linalg.cross(cross, r))
