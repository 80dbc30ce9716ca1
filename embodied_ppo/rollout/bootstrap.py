"""Values of the true successors of a rollout's rows, from which returns are bootstrapped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.types import Obs, Step
from embodied_ppo.core.recurrent_state import with_memory


def split_by_action(
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    executed: Tensor,
) -> dict[str, Tensor]:
    """Return the fields of a trajectory with one entry for each action of a chunk, [T, N, C].

    The next value of an action is the value of the next action of the chunk. The last executed
    action has the decision's next value and flags.

    Args:
        value: [T, N, C], V of each action, given the observation of the chunk's decision.
        next_value: [T, N], V of the decision's true successor.
        terminated: [T, N].
        truncated: [T, N].
        mask: [T, N].
        executed: [T, N, C], the actions before the end of the episode.
    """
    # An action is the last of its chunk if the next one was not executed.
    following = torch.cat([executed[..., 1:], torch.zeros_like(executed[..., :1])], dim=-1)
    last = executed & ~following
    shifted = value.roll(-1, dims=-1)  # ``where`` never selects the last column
    return {
        "next_value": torch.where(last, next_value.unsqueeze(-1), shifted),
        "terminated": terminated.unsqueeze(-1) & last,
        "truncated": truncated.unsqueeze(-1) & last,
        "mask": mask.unsqueeze(-1) & executed,
    }


def next_values(
    value: Tensor,
    steps: list[Step],
    ended: Tensor,
    last: Obs,
    memory: Tensor | None,
    value_of: Callable[[Obs], Tensor],
) -> Tensor:
    """Return V of every row's true successor, [T, N].

    The successor is the observation of row t+1, or ``final_obs`` where row t+1 holds the next
    episode. Pass p of the policy computes V of the p-th ``final_obs`` of every environment, so
    there are as many passes as ends of episodes in one environment, at most. A row stays in the
    column of its environment: the last bits of a matrix product depend on the number of rows
    and on the column.

    Args:
        value: V of every row, [T, N].
        steps: T steps.
        ended: Whether an episode ended in a row, bool [T, N].
        last: Observations after the last step, with the state of a policy with memory.
        memory: State of a policy with memory after every row, [T, N, S].
        value_of: Returns V [N] of observations [N, ..].
    """
    # Where no episode ends, the successor of row t is the observation of row t + 1.
    next_value = torch.cat([value[1:], value_of(last).unsqueeze(0)])
    # Simulators that reset on the next step show the true successor in row t + 1 itself.
    ended = ended.cpu()
    if not_given := [t for t, step in enumerate(steps) if step.final_obs is None]:
        ended = ended.clone()
        ended[not_given] = False
    if not bool(ended.any()):
        return next_value
    t, i = ended.nonzero().unbind(1)  # [K] each, ordered by t
    # Number of earlier ends of the same environment, without a temporary tensor of [T, N].
    order = i.argsort(stable=True)
    p = torch.empty_like(i)
    p[order] = torch.arange(len(i)) - torch.searchsorted(i[order], i[order])
    # One transfer to the device for all three index tensors.
    passes, counts = int(p.max()) + 1, ended.sum(1).tolist()
    t, i, p = torch.stack([t, i, p]).to(value.device).unbind()
    final: list[Obs] = []
    for row, (step, environments) in enumerate(zip(steps, i.split(counts), strict=True)):
        if step.final_obs is not None:
            obs = step.final_obs
            if memory is not None:
                obs = with_memory(obs, memory[row], torch.zeros_like(step.mask))
            final.append(tree.index(obs, environments))

    def pack(current: Tensor, *parts: Tensor) -> Tensor:
        """Return [passes, N, ..], with ``current`` where an environment has no p-th end."""
        packed = current.repeat(passes, *[1] * current.ndim)
        packed[p, i] = torch.cat(parts)
        return packed

    # V(final_obs) of every ended episode, one pass over all N environments at a time.
    packed = tree.map(pack, last, *final)
    values = torch.stack([value_of(tree.index(packed, k)) for k in range(passes)])
    next_value[t, i] = values[p, i]
    return next_value
