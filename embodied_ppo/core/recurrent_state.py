"""State of a policy with memory (``model.recurrent``) between the steps of its episodes.

The state is a part of what the policy reads. It is therefore stored in the dictionary of
observations, to which ``attach`` adds it. ``Decision.memory`` is the state after them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodied_envs.types import Obs

MEMORY = "/memory"  # name of the observation that is the state before it, float32 [N, S]
# Observation that marks first steps of episodes, bool [N]: the policy sets the state to zeros.
START = "/start"


def memory_size(policy: Any) -> int:
    """Return the size S of a policy's state; 0 for a policy without memory."""
    return getattr(policy, "memory_size", 0)


class EpisodeMemory:
    """State of a policy for N environments; without effect for a policy without memory."""

    def __init__(self, policy: Any, rows: int, device: torch.device) -> None:
        """Start N episodes.

        Args:
            policy: The policy.
            rows: Number of environments, N.
            device: Device of the policy.
        """
        self.size = memory_size(policy)  # numbers of the state, S; 0 without memory
        # float32 [N, S], the state before the next observation.
        self.state = torch.zeros(rows, self.size, device=device)
        # bool [N], whether the next observation is the first of an episode.
        self.start = torch.ones(rows, dtype=torch.bool, device=device)

    def attach(self, obs: Obs) -> Obs:
        """Return observations [N, ..] with the state and the marks of first steps."""
        return with_memory(obs, self.state, self.start)

    def store(self, state: Tensor, start: Tensor | None = None) -> None:
        """Replace the state by the one after a step.

        Args:
            state: ``Decision.memory`` [N, S].
            start: Whether the next observation is the first of an episode, bool [N]; None: it is
                not.
        """
        self.state = state
        self.start = torch.zeros_like(self.start) if start is None else start.to(self.start.device)

    def reset(self) -> None:
        """Start new episodes in all environments."""
        self.state = torch.zeros_like(self.state)
        self.start = torch.ones_like(self.start)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as tensors."""
        return {"state": self.state.clone(), "start": self.start.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state_dict``."""
        self.state = state["state"].to(self.state.device)
        self.start = state["start"].to(self.start.device)


def with_memory(obs: Obs, state: Tensor, start: Tensor) -> Obs:
    """Return observations [N, ..] with a state [N, S] and marks [N]; unchanged where S is 0."""
    if not state.shape[-1]:
        return obs
    named = obs if isinstance(obs, dict) else {"obs": obs}
    return {**named, MEMORY: state, START: start}
