"""Rewards of the groups of ``algorithm.reward_groups``, from the terms of simulators or graders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError, choose, join_names
from embodied_ppo.core.running_stats import expand
from embodied_ppo.options.reward_groups import RewardGroup

TOLERANCE = 1e-4
"""Largest difference of a reward from the sum of its terms, relative to their magnitude."""


class GroupRewards:
    """Splits rewards into those of G groups, whose sum is the reward up to rounding."""

    def __init__(self, groups: Sequence[RewardGroup], source: str) -> None:
        """Create the function; ``source`` names what returns the terms, for messages."""
        self.groups, self.source = groups, source
        named = [term for group in groups for term in group.terms or ()]
        self.names = tuple(named)
        self.checked = not named

    def __call__(
        self, rows: Sequence[Mapping[str, Tensor] | None], reward: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the rewards [.., G] of groups; one group has no dimension of its own, [..].

        Args:
            rows: T times term -> [N], or [N, C] for the actions of a chunk; NaN counts as 0.
            reward: [..] = [T, N] or [T, N, C].
            mask: bool [T, N].

        Raises:
            ConfigError: A term does not exist, or the terms of all groups are not the reward.
        """
        if not self.names:
            return reward
        if not self.checked:
            self._check_names(rows[0] or {}, reward[0])
        zero = torch.zeros_like(reward[0])
        terms = {
            name: torch.stack([(row or {}).get(name, zero) for row in rows]).double().nan_to_num()
            for name in self.names
        }
        total = sum(terms.values(), torch.zeros_like(reward, dtype=torch.float64))
        if not self.checked and all(group.terms is not None for group in self.groups):
            self._check_sum(terms, total, reward, mask)
        self.checked = True
        parts = [
            reward.double() - total
            if group.terms is None
            else sum((terms[name] for name in group.terms), torch.zeros_like(total))
            for group in self.groups
        ]
        return torch.stack(parts, -1).float() if len(parts) > 1 else parts[0].float()

    def _check_names(self, info: Mapping[str, Tensor], reward: Tensor) -> None:
        """Refuse terms that the first step does not have for each environment."""
        offered = sorted(name for name, x in info.items() if x.shape == reward.shape)
        for name in self.names:
            if name not in offered:
                there = choose(name, offered, "it returns ") if offered else "it returns none"
                raise ConfigError(
                    f"algorithm.reward_groups: {self.source} has no reward term {name}; {there}"
                )

    def _check_sum(
        self, terms: Mapping[str, Tensor], total: Tensor, reward: Tensor, mask: Tensor
    ) -> None:
        """Refuse terms that are not the whole reward."""
        magnitude = 1 + sum((x.abs() for x in terms.values()), torch.zeros_like(total))
        wrong = ((total - reward).abs() > TOLERANCE * magnitude) & expand(mask, reward)
        if bool(wrong.any()):
            a, b = float(total[wrong][0]), float(reward[wrong][0])
            raise ConfigError(
                "write terms: rest in one group of algorithm.reward_groups, or add what is missing:"
                f" {join_names(self.names)} add up to {a:g} where the reward of"
                f" {self.source} is {b:g}"
            )
