"""Check of the masks of possible choices that a simulator returns."""

from __future__ import annotations

import torch

from embodied_envs.base.errors import EnvError
from embodied_envs.base.observation_names import ACTION_MASK
from embodied_envs.types import ActionSpec, Obs, Step, choices_of


def check_action_mask(
    id: str, action_spec: ActionSpec, obs: Obs, before: Step | None = None
) -> None:
    """Raise EnvError where no value of a choice is possible.

    Args:
        id: ``env.id``, for the message.
        action_spec: The simulator's actions.
        obs: Observations to act on, [N, ..].
        before: The step that returned them; None: a reset. Where the simulator resets on the next
            step, any mask is valid after the end of an episode.
    """
    if not isinstance(obs, dict) or ACTION_MASK not in obs or obs[ACTION_MASK].dtype != torch.bool:
        return
    parts = obs[ACTION_MASK].split(choices_of(action_spec), dim=-1)
    empty = ~torch.stack([part.any(-1) for part in parts])  # [D, N]
    if before is not None and before.final_obs is None:
        empty = empty & ~(before.terminated | before.truncated)
    if bool(empty.any()):
        choice, i = empty.nonzero()[0].tolist()
        of_choice = f" for choice {choice}" if len(parts) > 1 else ""
        raise EnvError(
            f"env.id={id}: return an action_mask that allows at least one value{of_choice}; that of"
            f" environment {i} allows none"
        )
