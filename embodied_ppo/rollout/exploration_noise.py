"""Noise of actions, which is correlated in time where an environment finds no reward.

The effects of independent noise in neighbouring steps cancel: a robot trembles where it is. Noise
that is correlated moves it far enough to find a reward that few states have. Where rewards are
found, the noise is independent, because correlated noise disturbs what the policy has learned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodied_ppo.core.types import Policy

# One environment of this many has correlated noise: with the others, fine control is learned.
EXPLORING = 2
# Smallest weight of the newest rollout in the moving average ``ExplorationNoise.unrewarded``.
RATE = 0.2


class ExplorationNoise:
    """Draws the noise of N environments.

    Attributes:
        unrewarded: float32 [N], moving average over rollouts of whether an environment had one
            constant reward of 0 or less in all steps.
    """

    def __init__(
        self, policy: Policy, correlation: float, total: int, own: slice, device: torch.device
    ) -> None:
        """Begin with independent noise.

        Args:
            policy: The policy that acts.
            correlation: See ``algorithm.noise_correlation``.
            total: Environments of all processes and stages.
            own: Those of this rollout, N.
            device: Where the policy acts.
        """
        self.policy, self.correlation, self.total, self.own = policy, correlation, total, own
        self.generator = torch.Generator(device=device)
        self.unrewarded = torch.zeros(own.stop - own.start, device=device)

    def draw(self, keys: Sequence[int]) -> list[Tensor]:
        """Return the noise of T steps, [N, ..] each, from the key of each step.

        With correlation, e_t = c·e_(t-1) + √(1 - c²)·n_t of independent n_t, where c is the
        correlation times ``unrewarded``. Each e_t is N(0, 1), too, and the recorded probability of
        an action is that of independent noise.

        Source: Hollenstein, Martius and Piater 2024, "Colored Noise in PPO".
        """
        # Noise is drawn for all environments and then sliced, so that that of an environment does
        # not depend on the number of processes and stages.
        draw, generator = self.policy.noise, self.generator
        noises = [draw(self.total, generator.manual_seed(key))[self.own] for key in keys]
        if self.correlation:
            exploring = torch.arange(self.total)[self.own] % EXPLORING == 1
            c = (self.correlation * self.unrewarded * exploring.to(self.unrewarded))[:, None]
            for t in range(1, len(noises)):
                noises[t] = c * noises[t - 1] + (1 - c * c).sqrt() * noises[t]
        return noises

    def observe(self, reward: Tensor, update: int) -> None:
        """Update ``unrewarded`` by the simulator's rewards of a rollout, [T, N, ..]."""
        rows = reward.transpose(0, 1).flatten(1)
        without = (rows.amax(1) <= 0) & (rows.amax(1) == rows.amin(1))
        # The mean of the first rollouts, so that one of them suffices where all have rewards.
        rate = max(RATE, 1 / (update + 1))
        self.unrewarded = torch.lerp(self.unrewarded, without.float(), rate)
