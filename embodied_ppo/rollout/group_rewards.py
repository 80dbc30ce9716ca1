"""Rewards of the groups of ``algorithm.reward_groups``, from the terms of simulators or graders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from embodied_envs.base.errors import TrainingError, choose, join_names
from embodied_ppo.core.errors import RunRefused
from embodied_ppo.core.running_stats import expand
from embodied_ppo.options.reward_groups import RewardGroup

# Largest difference of a reward from the sum of its terms, relative to their magnitude.
TOLERANCE = 1e-4


class GroupRewards:
    """Splits rewards into those of G groups, whose sum is the reward up to rounding."""

    def __init__(self, groups: Sequence[RewardGroup], source: str) -> None:
        """Create the function; ``source`` names what returns the terms, for messages."""
        self.groups, self.source = groups, source
        self.names = tuple(term for group in groups for term in group.terms or ())
        self.has_rest = any(group.terms is None for group in groups)
        self.checked = False

    def __call__(
        self, rows: Sequence[Mapping[str, Tensor] | None], reward: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the rewards [.., G] of groups; one group has no dimension of its own, [..].

        Args:
            rows: T times term -> [N], or [N, C] for the actions of a chunk. A term that a row
                lacks, or that is NaN, counts as 0.
            reward: [..] = [T, N] or [T, N, C].
            mask: bool [T, N].

        Raises:
            RunRefused: The first step lacks a term, or the terms of all groups are not the reward.
            TrainingError: A term is infinite.
        """
        if not self.names:
            return reward
        if not self.checked and bool(mask.any()):  # responses that were not graded have no terms
            self._check_names(rows[0] or {}, reward[0])
            self.checked = True
        zero = torch.zeros_like(reward[0])
        unmasked = expand(mask, reward)
        terms: dict[str, Tensor] = {}
        for name in self.names:
            x = torch.stack([(row or {}).get(name, zero) for row in rows]).double()
            terms[name] = torch.where(unmasked & ~x.isnan(), x, 0.0)
        total = sum(terms.values(), torch.zeros_like(reward, dtype=torch.float64))
        self._check_numbers(terms, total, torch.where(unmasked, reward, 0.0))
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
                raise RunRefused(
                    f"correct {name} in algorithm.reward_groups: the first step of {self.source}"
                    f" has no such reward term; {there}"
                )

    def _check_numbers(self, terms: Mapping[str, Tensor], total: Tensor, reward: Tensor) -> None:
        """Refuse terms [.., N] that are infinite, or without a rest not the whole reward."""
        magnitude = 1 + sum((x.abs() for x in terms.values()), torch.zeros_like(total))
        wrong = ((total - reward).abs() > TOLERANCE * magnitude) & (not self.has_rest)
        if not bool((wrong | ~magnitude.isfinite()).any()):
            return
        for name, x in terms.items():
            if bool(x.isinf().any()):
                raise TrainingError(
                    f"return finite numbers: the reward term {name} of {self.source} is infinite"
                )
        a, b = float(total[wrong][0]), float(reward[wrong][0])
        raise RunRefused(
            "write terms: rest in one group of algorithm.reward_groups, or add what is missing:"
            f" {join_names(self.names)} add up to {a:g} where the reward of {self.source} is {b:g}"
        )
