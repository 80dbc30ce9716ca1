"""Modules of π0.5 that π0 lacks: layer norms that depend on the time of the flow.

The names of the weights are those of lerobot's files. Source: Physical Intelligence 2025, arXiv
2504.16054; adaptive norms as in Peebles and Xie 2022, arXiv 2212.09748.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AdaptiveNorm(nn.Module):
    """Root mean square norm whose scale, shift and gate are linear functions of a condition."""

    def __init__(self, width: int, epsilon: float) -> None:
        """Build the norm.

        Args:
            width: D, numbers of a token and of the condition.
            epsilon: Added to the mean square.
        """
        super().__init__()
        self.epsilon = epsilon
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise.

        Args:
            x: [B, Q, D].
            condition: [B, D].

        Returns:
            x / rms(x) (1 + scale) + shift, [B, Q, D], and the gate [B, 1, D]; both of x's dtype.
        """
        # [B, 1, D] each
        scale, shift, gate = self.dense(condition).unsqueeze(1).float().chunk(3, dim=-1)
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.epsilon)
        return (h * (1 + scale) + shift).to(x.dtype), gate.to(x.dtype)


class TimeConditioned(nn.Module):
    """Embeds noisy actions, and computes the condition of the norms from the time of the flow."""

    def __init__(self, actions: int, width: int, encode_time: nn.Module) -> None:
        """Build the layers.

        Args:
            actions: N, numbers of a padded action.
            width: D of the action expert.
            encode_time: Maps times [B] to [B, D].
        """
        super().__init__()
        self.sinusoid_embeds = encode_time
        self.action_in_proj = nn.Linear(actions, width)
        self.time_mlp_in = nn.Linear(width, width)
        self.time_mlp_out = nn.Linear(width, width)

    def forward(self, x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [B, H, D] of latents x [B, H, N], and the condition [B, D]."""
        time = self.sinusoid_embeds(tau).to(self.time_mlp_in.weight.dtype)
        time = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(time))))
        return self.action_in_proj(x.to(self.action_in_proj.weight.dtype)), time


def model_class() -> Any:
    """Return transformers' PI0ForConditionalGeneration with the modules of π0.5.

    Its forward pass does not run; see ``pi0.PI0``. transformers is imported by the call.
    """
    from transformers import PI0ForConditionalGeneration

    class PI05ForConditionalGeneration(PI0ForConditionalGeneration):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            expert = config.dit_config
            width, epsilon = expert.hidden_size, expert.rms_norm_eps
            self.embed_action_time: Any = TimeConditioned(
                config.max_action_dim, width, self.embed_action_time.sinusoid_embeds
            )
            body: Any = self.model.dit
            for layer in body.layers:
                layer.input_layernorm = AdaptiveNorm(width, epsilon)
                layer.post_attention_layernorm = AdaptiveNorm(width, epsilon)
            body.norm = AdaptiveNorm(width, epsilon)

        @classmethod
        def is_custom_code(cls) -> bool:
            """Return False, so that transformers renames lerobot's keys as those of π0."""
            return False

    return PI05ForConditionalGeneration
