"""Group filtering: keep the groups in which some members succeed and others do not.

Where all members of a group succeed, or none does, their success rewards are equal and the
group-relative advantages are 0. Such a group costs a forward and backward pass and has no gradient.
A filtered rollout drops it and collects further groups until the batch is full.

Source: Yu et al. 2025, DAPO, section 3.2 (dynamic sampling). The filter reads success and not the
reward: a shaped reward differs between members that all fail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.types import Step
from embodied_ppo.core.errors import RunRefused
from embodied_ppo.core.types import Mean, Metrics, Trajectory, add_metrics
from embodied_ppo.rollout.episode_statistics import EPISODE_METRICS


def mixed_groups(success: Tensor, counted: Tensor, group_size: int) -> Tensor:
    """Return the groups with a member that succeeds and a member that does not, bool [G].

    Args:
        success: bool [N], whether the episode or response of a column succeeds.
        counted: bool [N], columns with an unmasked row; others are ignored.
        group_size: Columns of a group, neighbours; N = G * group_size.
    """
    success, counted = (x.reshape(-1, group_size) for x in (success, counted))
    return (success & counted).any(1) & (~success & counted).any(1)


def simulated_success(env_id: str, steps: Sequence[Step], mask: Tensor, *, known: bool) -> Tensor:
    """Return whether the first episode of each environment succeeded, bool [N].

    Raises:
        RunRefused: No step reports success, and none has before (``known``).
    """
    if not known and all(step.success is None for step in steps):
        raise RunRefused(
            f"algorithm.group_filter = success: env.id={env_id} reports no success; write"
            " algorithm.group_filter=null, or return its flag as success in the info"
        )
    # An episode succeeds if one of its unmasked steps reports success.
    flags = [s.success if s.success is None else s.success.bool() for s in steps]
    succeeded = [torch.zeros_like(mask[0]) if x is None else x for x in flags]
    return (torch.stack(succeeded) & mask).any(0)


def mask_groups(
    trajectory: Trajectory, success: Tensor, group_size: int
) -> tuple[Trajectory, Metrics]:
    """Mask the groups that are not mixed, where they are: the filter of one round.

    Args:
        trajectory: [T, N, ..].
        success: bool [N].
        group_size: Columns of a group.

    Returns:
        The trajectory with another mask, and the metrics of ``GroupFilter.take``.
    """
    mask = trajectory.mask
    counted = mask.flatten(2).any(-1) if mask.ndim == 3 else mask  # [T, N]
    mixed = mixed_groups(success.to(mask.device), counted.any(0), group_size)
    kept = mixed.repeat_interleave(group_size)  # [N]
    dropped = float((~mixed).sum())
    metrics: Metrics = {
        "rollout/filter_rounds": Mean(1.0, 1.0),
        "rollout/groups_dropped": dropped,
        "rollout/groups_missing": dropped,
    }
    return replace(trajectory, mask=mask & (kept[:, None] if mask.ndim == 3 else kept)), metrics


def join_passes(
    passes: Sequence[tuple[Trajectory, Metrics]], group_size: int
) -> tuple[Trajectory, Metrics]:
    """Place the columns of several passes side by side, one trajectory [T, passes * N, ..].

    Groups of the same environments are neighbours: a process or stage with a part of the
    environments then has a part of the columns, in the same order. Statistics of episodes are those
    of all passes in the last one.
    """

    def join(*parts: Tensor) -> Tensor:
        groups = [x.unflatten(1, (-1, group_size)) for x in parts]  # [T, G, g, ..]
        return torch.stack(groups, 2).flatten(1, 3)

    if len(passes) == 1:
        return passes[0]
    trajectories, metrics = zip(*passes, strict=True)
    of_episodes = {k: x for k, x in metrics[-1].items() if k.startswith(EPISODE_METRICS)}
    return tree.map(join, *trajectories), add_metrics(metrics) | of_episodes


def select_groups(trajectory: Trajectory, groups: Tensor, group_size: int) -> Trajectory:
    """Return the columns of some groups, in their order; ``groups``: int64 [K]."""
    members = torch.arange(group_size, device=groups.device)
    columns = (groups.unsqueeze(1) * group_size + members).flatten()
    return tree.map(lambda x: x.index_select(1, columns.to(x.device)), trajectory)


def peak_copies(groups: int, rounds: int) -> tuple[float, float]:
    """Return the largest memory of a filtered rollout, in multiples of one batch.

    G groups of a batch. Before its last round G - 1 groups are kept at most. ``take`` then holds
    the round (G), the kept groups (2 G - 1), their concatenation (2 G - 1) and the batch (G). One
    round alone keeps G groups and leaves none for the next batch.

    Args:
        groups: G.
        rounds: Largest number of rounds of a batch.

    Returns:
        The peak while collecting, the batch included, and what is held for the next batch while
        this one is trained on.
    """
    if rounds == 1:
        return 4.0, 0.0
    return (6 * groups - 2) / groups, (groups - 1) / groups


class GroupFilter:
    """Mixed groups of one batch, collected in rounds.

    Groups that do not fit into the batch begin the next one. Their version of the weights is older
    by one; ``rollout/version_lag`` includes them.
    """

    def __init__(self, groups: int, group_size: int, rounds: int) -> None:
        """Create an empty filter.

        Args:
            groups: Groups of a batch.
            group_size: Columns of a group.
            rounds: Largest number of rounds of a batch.
        """
        self.groups, self.group_size, self.rounds = groups, group_size, rounds
        self.parts: list[Trajectory] = []
        self.count = 0  # groups in ``parts``
        self.round = self.dropped = self.cost = 0

    @property
    def missing(self) -> int:
        """Number of groups that the batch lacks; 0 if it is full or no round is left."""
        return 0 if self.round >= self.rounds else max(0, self.groups - self.count)

    def add(self, trajectory: Trajectory, success: Tensor, cost: int) -> None:
        """Add the mixed groups of one round.

        Args:
            trajectory: [T, n * group_size, ..], of n groups.
            success: bool [n * group_size].
            cost: Environment steps or tokens of the round.
        """
        # Keep the groups in which some members succeed and others do not.
        mask = trajectory.mask if trajectory.mask.ndim == 2 else trajectory.mask.any(-1)  # [T, N]
        mixed = mixed_groups(success.to(mask.device), mask.any(0), self.group_size)
        kept = mixed.nonzero().flatten()
        self.parts.append(select_groups(trajectory, kept, self.group_size))
        self.round, self.cost = self.round + 1, self.cost + cost
        self.dropped += len(mixed) - len(kept)
        self.count += len(kept)
        if self.count < self.groups and self.round >= self.rounds:
            # The batch has a fixed size, so that masked groups of the last round fill it up.
            filler = torch.arange(self.groups - self.count, device=mixed.device) % len(mixed)
            padding = select_groups(trajectory, filler, self.group_size)
            self.parts.append(replace(padding, mask=torch.zeros_like(padding.mask)))

    def take(self) -> tuple[Trajectory, Metrics]:
        """Return a batch of ``groups`` groups and the metrics of its rounds.

        Groups that do not fit into it begin the next batch.
        """
        trajectory = tree.concatenate(self.parts, 1)
        count = trajectory.mask.shape[1] // self.group_size
        order = torch.arange(count, device=trajectory.mask.device)
        batch = select_groups(trajectory, order[: self.groups], self.group_size)
        # The cost of all rounds, also of dropped groups, is stored in one entry and summed later.
        collected = torch.zeros(batch.mask.shape[:2], dtype=torch.int64, device=batch.mask.device)
        collected[0, 0] = self.cost
        metrics: Metrics = {
            "rollout/filter_rounds": Mean(float(self.round), 1.0),
            "rollout/groups_dropped": float(self.dropped),
            "rollout/groups_missing": float(max(0, self.groups - self.count)),
        }
        surplus = order[self.groups :]
        self.parts = []
        if len(surplus):
            self.parts.append(select_groups(trajectory, surplus, self.group_size))
        self.count, self.round, self.dropped, self.cost = len(surplus), 0, 0, 0
        return replace(batch, collected=collected), metrics

    def state(self) -> dict[str, Any] | None:
        """Return the groups that are kept for the next batch, as nested tensors."""
        if not self.parts:
            return None
        (part,) = self.parts
        return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}

    def load_state(self, state: Mapping[str, Any] | None, device: torch.device) -> None:
        """Continue from ``state()``."""
        self.parts, self.count = [], 0
        if state is not None:
            part = Trajectory(**tree.map(lambda x: x.to(device), dict(state)))
            self.parts, self.count = [part], part.mask.shape[1] // self.group_size
