"""Observations of the last steps, stacked, with the actions between them (``model.history``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters.wrapper import EnvWrapper
from embodied_envs.base import tree
from embodied_envs.types import Obs, Step, VectorEnv, starts
from embodied_ppo.core.history import ObservationHistory, named


class HistoryEnv(EnvWrapper):
    """A ``VectorEnv`` whose observations contain those of the last K steps.

    Step t of an episode reads o_(t-K+1) .. o_t, as changes, and a_(t-K+1) .. a_(t-1), see
    ``core.history``. Observations are those that the simulator returns, with the delays and errors
    of ``env.realism``. Actions are those of the policy.
    """

    def __init__(self, env: VectorEnv, steps: int, names: Sequence[str] | None = None) -> None:
        """Wrap a simulator.

        Args:
            env: The simulator, before its first ``reset``.
            steps: Observations that are read together, K >= 2.
            names: Observations to stack; None: all. The others pass unchanged.
        """
        super().__init__(env)
        self.history = ObservationHistory(env.obs_spec, env.action_spec, steps, names)
        self.obs_spec = self.history.obs_spec
        self._previous = self.history.empty(self.num_envs, self.device)  # each [N, K - 1, ..]
        self.raw_obs: Obs = {}  # the newest observations, as the simulator has returned them

    def _begin(self, where: Tensor, obs: Obs) -> Obs:
        """Return stacked observations after episodes have started where bool [N]."""
        # Changes and actions before the start of an episode are 0, so these rows lose their past.
        self._previous = self.history.restart(self._previous, where)
        self.raw_obs = obs
        return self.history.stack(self._previous, obs)

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        return self._begin(everywhere, self.env.reset())

    def step(self, action: Tensor) -> Step:
        """See ``VectorEnv``."""
        step = self.env.step(action)
        # Push o_t and a_t before o_(t+1) is stacked, which then contains o_(t+1) - o_t.
        self._previous = self.history.push(self._previous, self.raw_obs, action)
        # Stack the last observation of an ended episode before ``_begin`` drops its history.
        final_obs = None
        if step.final_obs is not None:
            final_obs = self.history.stack(self._previous, step.final_obs)
        return replace(step, obs=self._begin(starts(step), step.obs), final_obs=final_obs)

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        obs = self.env.reset_where(where)
        if obs is None:
            return None
        # Environments that were not reset keep their newest observation.
        return self._begin(where, tree.where(where, named(obs), named(self.raw_obs)))

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``."""
        state = self.env.state()
        if state is None:
            return None
        return {"env": state, "history": {name: x.clone() for name, x in self._previous.items()}}

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``."""
        obs = self.env.load_state(state["env"])
        self._previous = {name: x.to(self.device) for name, x in state["history"].items()}
        # The stored history contains the current episodes, so no row starts a new one.
        return self._begin(torch.zeros(self.num_envs, dtype=torch.bool, device=self.device), obs)
