"""Action values Q(s, a), networks whose output is a distribution over a grid of values.

The loss is the cross-entropy to a Gaussian around the target, discretised on the grid (HL-Gauss,
Farebrother et al. 2024, "Stop Regressing"), instead of a squared error.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.models.backbone import Encoder, linear, make_trunk

NUM_BINS = 101
"""Number of values of the grid."""
MAX_VALUE = 10.0
"""Largest value of the grid; the smallest is its negative."""
BIN_WIDTH = 2 * MAX_VALUE / (NUM_BINS - 1)
"""Distance of two values of the grid."""
SIGMA_IN_BINS = 0.75
"""Standard deviation of the target's Gaussian, in multiples of BIN_WIDTH."""


class ActionValue(nn.Module):
    """Maps encoded observations and actions to logits over the grid of values.

    Several networks with different initial weights learn from the same targets, and the smallest of
    their values counts: the largest error of a single network would attract the policy (Fujimoto et
    al. 2018, "Addressing Function Approximation Error in Actor-Critic Methods").
    """

    def __init__(
        self, encoder: Encoder, actions: int, config: ModelConfig, *, networks: int = 1
    ) -> None:
        """Build the networks with the hidden layers of the critic.

        Args:
            encoder: Its output is the input, beside the action.
            actions: Number of action dimensions, A (of a chunk: of all its actions).
            config: Options of the section ``model``.
            networks: Number of networks, C.

        Raises:
            ConfigError: The trunk cannot read the observations.
        """
        super().__init__()
        hidden = config.critic_hidden or config.hidden
        critic_config = replace(config, hidden=hidden)
        trunks = [make_trunk(encoder, critic_config, features=actions) for _ in range(networks)]
        gain, orthogonal = config.value_gain, config.orthogonal_init
        self.trunks = nn.ModuleList(trunks)
        self.heads = nn.ModuleList(linear(t.features, NUM_BINS, gain, orthogonal) for t in trunks)

    def logits(self, inputs: dict[str, Tensor], action: Tensor) -> Tensor:
        """Return the logits over the grid, [C, B, NUM_BINS].

        Args:
            inputs: Result of the encoder, [B, D].
            action: float32 [B, A].
        """
        networks = zip(self.trunks, self.heads, strict=True)
        return torch.stack([head(trunk(inputs, action)) for trunk, head in networks])

    def forward(self, inputs: dict[str, Tensor], action: Tensor) -> Tensor:
        """Return Q(s, a), [B]."""
        return min_value(self.logits(inputs, action))


def min_value(logits: Tensor) -> Tensor:
    """Return the smallest mean of C distributions over the grid, [C, B, NUM_BINS] -> [B]."""
    return mean(logits).amin(0)


def mean(logits: Tensor) -> Tensor:
    """Return the expected value of a distribution over the grid, [.., NUM_BINS] -> [..]."""
    return logits.softmax(-1) @ torch.linspace(
        -MAX_VALUE, MAX_VALUE, NUM_BINS, device=logits.device
    )


def target_distribution(value: Tensor) -> Tensor:
    """Return the distribution over the grid for values [B], [B, NUM_BINS].

    It is N(value, (SIGMA_IN_BINS · BIN_WIDTH)²), integrated over the cells and normalised. Values
    beyond the grid are clamped to it.

    Source: Farebrother et al. 2024, eq. 3.2.
    """
    limit = MAX_VALUE + BIN_WIDTH / 2
    edges = torch.linspace(-limit, limit, NUM_BINS + 1, device=value.device)
    centre = value.clamp(-MAX_VALUE, MAX_VALUE).unsqueeze(-1)
    cumulative = torch.special.erf((edges - centre) / (SIGMA_IN_BINS * BIN_WIDTH * math.sqrt(2.0)))
    mass = cumulative[:, 1:] - cumulative[:, :-1]
    return mass / (cumulative[:, -1:] - cumulative[:, :1])


def cross_entropy(logits: Tensor, value: Tensor) -> Tensor:
    """Return -Σ p log q, [.., B], of values [B] and logits [.., B, NUM_BINS]."""
    return -(target_distribution(value) * logits.log_softmax(-1)).sum(-1)
