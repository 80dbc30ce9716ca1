"""A network of your own: a residual MLP in place of the trunk of actor and critic.

    embodied-ppo train experiment=halfcheetah
    model.network=scripts/examples/own_network.py:Residual model.network_options.width=128

The class replaces the trunk between the normalised observation and the heads; docs/networks.md has
the contract. The run keeps a copy of this file, which `evaluate`, `resume` and `load` execute.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Residual MLP: x <- x + W2 silu(W1 norm(x)), for observations of any names and shapes."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], *, width: int = 64, blocks: int = 2
    ) -> None:
        """Build the layers.

        Args:
            shapes: Name -> shape of one observation; a simulator with one array calls it "obs".
            width: Features D.
            blocks: Number of residual blocks.
        """
        super().__init__()
        size = sum(torch.Size(shape).numel() for shape in shapes.values())
        self.first = nn.Linear(size, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
            )
            for _ in range(blocks)
        )

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return features [B, D] of observations {name: [B, ..]}."""
        x = self.first(torch.cat([x.flatten(1).float() for x in inputs.values()], dim=1))
        for block in self.blocks:
            x = x + block(x)
        return x
