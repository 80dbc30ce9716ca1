"""π0.5: π0 whose prompt contains the state, and whose expert reads the time in its layer norms.

The normalised state is written into the prompt as integers::

    Task: pick up the cup, State: 127 3 255;
    Action:

Some models, such as openpi's pi05_libero, were trained with the prompt of π0 instead and read no
state (``Published.discrete_state``).

Names of sizes are those of ``pi0``; those of weights are lerobot's. Source: Physical Intelligence
2025, arXiv 2504.16054; openpi and lerobot for the prompt; adaptive norms as in Peebles and Xie
2022, arXiv 2212.09748.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import Obs
from embodied_ppo.policies.backbone import VECTOR
from embodied_ppo.policies.vla import pi0_files
from embodied_ppo.policies.vla.pi0 import PAD, PI0, PI0Trunk
from embodied_ppo.policies.vla.pi0_files import PromptTokenizer, Published
from embodied_ppo.policies.vla.prefix import PrefixCache
from embodied_ppo.policies.vla.trunk import WORDS, pad_rows

BINS = 256  # intervals of [-1, 1] that a number of the state is rounded down to
END = ";\nAction: "  # text after the state


# ------------------------------------------------------------------------------------------ modules
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


def use_adaptive_norms(model: Any) -> Any:
    """Replace the modules of transformers' PI0ForConditionalGeneration in which π0.5 differs."""
    expert, body = model.config.dit_config, model.model.dit
    width, epsilon = expert.hidden_size, expert.rms_norm_eps
    encode_time = model.embed_action_time.sinusoid_embeds
    model.embed_action_time = TimeConditioned(model.config.max_action_dim, width, encode_time)
    for layer in body.layers:
        layer.input_layernorm = AdaptiveNorm(width, epsilon)
        layer.post_attention_layernorm = AdaptiveNorm(width, epsilon)
    body.norm = AdaptiveNorm(width, epsilon)
    return model


def build_model(raw: Mapping[str, Any], folder: str | Path) -> Any:
    """Return the model of a config.json with new weights, see ``pi0_files.build_model``."""
    return use_adaptive_norms(pi0_files.build_model(raw, folder))


def read(folder: str | Path) -> Published:
    """Read a checkpoint directory, see ``pi0_files.read``."""
    return pi0_files.read(folder, build_model, "QUANTILES")


# ------------------------------------------------------------------------------------------- policy
class PromptTrunk(PI0Trunk):
    """Trunk whose words contain the state.

    The ids of a number do not depend on its neighbours, because PaliGemma's tokenizer separates
    spaces and digits. They are therefore looked up in a table on the model's device.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See ``PI0Trunk``.

        Raises:
            ConfigError: The tokenizer combines numbers with their neighbours.
        """
        super().__init__(*args, **kwargs)
        assert isinstance(self.tokenize, PromptTokenizer)
        self.prompt_tokenizer = self.tokenize
        numbers = [self.prompt_tokenizer.ids(f" {n}") for n in range(-1, BINS)]
        self._check_tokenizer(numbers)
        self.state_numbers = self.encoder.vector_size
        edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64)[:-1]
        # Lower limits of the intervals, float64 [256].
        self.edges = nn.Buffer(edges, persistent=False)
        # Ids of " -1", " 0", .. " 255", int64 [257, n], padded with PAD.
        self.numbers = nn.Buffer(pad_rows(numbers, PAD), persistent=False)
        # Ids of END, int64 [1, n].
        end = pad_rows([self.prompt_tokenizer.ids(END)], PAD)
        self.end = nn.Buffer(end, persistent=False)

    def _check_tokenizer(self, numbers: Sequence[Sequence[int]]) -> None:
        """Compare the ids of a complete prompt with those of its parts."""
        values = (-1, 0, 7, 10, 99, 127, 255)
        text = f"Task: go, State: {' '.join(map(str, values))}{END}"
        prompt_ids = self.prompt_tokenizer.ids(text)
        parts = [*self.prompt_tokenizer.ids("Task: go, State:")]
        for n in values:
            parts += numbers[n + 1]
        if prompt_ids != [*parts, *self.prompt_tokenizer.ids(END)]:
            raise ConfigError(
                "model.checkpoint: its tokenizer combines numbers of the state with the characters"
                " beside them; copy tokenizer.json of google/paligemma-3b-pt-224 into the directory"
            )

    def word_ids(self) -> tuple[Tensor, ...]:
        """See ``PI0Trunk.word_ids``."""
        return self.table, self.numbers, self.end

    def sentence_table(self, sentences: Sequence[str]) -> Tensor:
        """See ``PI0Trunk.sentence_table``: the words before the state."""
        prompt = self.prompt_tokenizer.prompt
        return pad_rows([prompt(sentence) for sentence in sentences or ("",)], PAD)

    def encode(self, obs: Obs) -> dict[str, Tensor]:
        """See ``PI0Trunk.encode``. Padding may be between words; it has no position."""
        inputs = super().encode(obs)
        state = inputs[VECTOR][:, : self.state_numbers].double()
        # Row n + 1 of ``numbers`` holds the number n, which is -1 below the first interval and
        # numpy.digitize(state, edges) - 1 in openpi.
        bins = torch.bucketize(state.contiguous(), self.edges, right=True)
        rows = len(state)
        numbers = self.numbers[bins].flatten(1)
        inputs[WORDS] = torch.cat((inputs[WORDS], numbers, self.end.expand(rows, -1)), dim=1)
        return inputs


class PI05(PI0):
    """Flow policy on π0.5; see ``PI0``."""

    kind = "pi05"
    state_tokens = 0
    build_model = staticmethod(build_model)
    read = staticmethod(read)

    def set_prompt(self, discrete_state: bool) -> None:
        """See ``PI0.set_prompt``."""
        self.trunk_class = PromptTrunk if discrete_state else PI0Trunk
        self.state_in_prefix = discrete_state

    def prompt_tokens(self) -> int:
        """See ``PI0.prompt_tokens``."""
        trunk = self.trunk
        if not isinstance(trunk, PromptTrunk):
            return super().prompt_tokens()
        numbers = trunk.state_numbers * trunk.numbers.shape[1]
        return super().prompt_tokens() + numbers + trunk.end.shape[1]

    def embed_actions(self, context: PrefixCache, x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PI0.embed_actions``."""
        return self.embed(x, tau)
