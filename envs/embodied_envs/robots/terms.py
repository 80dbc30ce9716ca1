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
    curves ``env/<name>``, the errors of the commands ``env/error_<command>``.
    """

    least_reward: float | None = None
    """Smallest sum; None: there is none."""

    def available_terms(self) -> Mapping[str, Term]:
        """Return all methods that are terms."""
        kind, terms = type(self), {}
        for name in dir(kind):
            method = getattr(kind, name)
            if inspect.isfunction(method) and name not in ("reward", "reward_terms"):
                names = list(inspect.signature(method).parameters)
                if names[1:4] == ["before", "s", "action"]:
                    terms[name] = getattr(self, name)
        return terms

    def default_rewards(self) -> Mapping[str, Mapping[str, float]]:
        """Return the terms of a task whose ``rewards`` are empty; ``bind`` has been called."""
        return {}

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Forget the terms of another model."""
        self._terms: dict[str, tuple[float, Term]] | None = None

    def weighted_terms(self) -> dict[str, tuple[float, Term]]:
        """Return name -> weight and function of the terms that are computed."""
        if self._terms is None:
            available, self._terms = self.available_terms(), {}
            for name, numbers in (self.rewards or self.default_rewards()).items():
                if name not in available:
                    raise EnvError(f"{type(self).__name__}.rewards: there is no term {name}")
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
            errors = self.command_errors(s).abs().unbind(1)
            names = (f"error_{name}" for name in self.commands)
            terms |= dict(zip(names, errors, strict=True))
        return terms

    def total(self, terms: dict[str, Tensor]) -> Tensor:
        names = self._terms or terms  # a task may define ``reward_terms`` itself
        reward = torch.stack([terms[name] for name in names]).sum(0)
        return reward if self.least_reward is None else reward.clamp(min=self.least_reward)

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return self.total(self.reward_terms(before, s, action))
