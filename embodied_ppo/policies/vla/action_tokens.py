"""Action head with tokens: every dimension of every action of a chunk is one of K bins.

B rows, C actions of a chunk, A dimensions of each, K bins of a dimension, D width.

``Tokens`` implements sampling, log-probabilities and cloning for any model that predicts the
tokens. ``TokenVLA`` is the small model; ``pretrained`` has those of published checkpoints.

Source: RT-2 (Brohan et al. 2023), OpenVLA (Kim et al. 2024), OpenVLA-OFT (Kim et al. 2025).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from embodied_ppo.core.types import Decision, Evaluation
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import distributions as dist
from embodied_ppo.policies.vla.trunk import DecoderMemory, Grounding
from embodied_ppo.policies.vla.vla_policy import VLA, VLAPolicy

Context = TypeVar("Context")


class Tokens(VLAPolicy, Generic[Context]):
    """Policy over action tokens, decoded in parallel or one after another.

    The value is computed from the hidden state that predicts the first token. Log-probabilities are
    float32 [B, C, A]. Subclasses implement the methods under "model"; ``Context`` is what they
    compute once per observation.
    """

    # Bins of a dimension, K.
    bins: int
    autoregressive: bool

    # ---------------------------------------------------------------------------------------- model
    @abstractmethod
    def hidden(self, context: Context, bins: Tensor | None) -> Tensor:
        """Return the hidden states [B, C·A, D] that predict the action tokens, with gradient.

        ``bins`` int64 [B, C·A]: teacher forcing, each token depends on those before it. None:
        parallel decoding.
        """

    @abstractmethod
    def start(self, context: Context) -> tuple[Tensor, Any]:
        """Start decoding one token after another, without gradient.

        Returns:
            Hidden states [B, D] that predict the first token, and the state of ``next``.
        """

    @abstractmethod
    def next(self, bins: Tensor, state: Any) -> Tensor:
        """Return hidden states [B, D] that predict the token after ``bins``, int64 [B].

        ``state`` changes in place. No gradient.
        """

    def first_hidden(self, context: Context) -> Tensor:
        """Return hidden states [B, D] that predict the first token in either mode."""
        return self.start(context)[0] if self.autoregressive else self.hidden(context, None)[:, 0]

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits at temperature 1, float32 [.., K]."""

    def grounding(self, context: Context, first_hidden: Tensor) -> Grounding | None:
        """Return the input of cloning's auxiliary loss; ``first_hidden`` [B, D] predicts the
        first token.
        """
        return Grounding(first_hidden)

    @property
    def intervals(self) -> int:
        """Number of bins in use, which is odd so that the centre of one bin is 0.

        Without a bin at 0 a policy that should stand still would drift.
        """
        return self.bins - (self.bins + 1) % 2

    def actions_of(self, bins: Tensor) -> Tensor:
        """Return the actions of bins int64 [B, C, A]: their centres, in [-1, 1].

        The last of an even number of bins has the centre of the bin before it (OpenVLA's 256 tokens
        are 255 intervals).
        """
        return (2 * bins.float().clamp_max(self.intervals - 1) + 1) / self.intervals - 1

    def bins_of(self, action: Tensor) -> Tensor:
        """Return the bin that contains each action, int64."""
        return ((action + 1) * (0.5 * self.intervals)).long().clamp(0, self.intervals - 1)

    # ------------------------------------------------------------------------------------- protocol
    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """See ``Policy.noise``."""
        shape = (rows, self.chunk * self.size, self.bins)
        return dist.categorical_noise(shape, generator, self.device)

    @torch.no_grad()
    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        """See ``Policy.act``."""

        def choose(logits: Tensor, noise: Tensor | None) -> Tensor:
            return logits.argmax(-1) if noise is None else dist.categorical_sample(logits, noise)

        context = self.encode_context(inputs)
        if not self.autoregressive:
            hidden = self.hidden(context, None)
            logits = self._scaled_logits(hidden)
            bins, first_hidden = choose(logits, noise), hidden[:, 0]
        else:
            first_hidden, state = self.start(context)
            rows, chosen = [self._scaled_logits(first_hidden)], []
            for i in range(self.chunk * self.size):
                if i:
                    rows.append(self._scaled_logits(self.next(chosen[-1], state)))
                chosen.append(choose(rows[-1], None if noise is None else noise[:, i]))
            bins, logits = torch.stack(chosen, 1), torch.stack(rows, 1)
        log_prob = dist.categorical_log_prob(bins, logits)
        bins = bins.view(len(bins), self.chunk, self.size)
        action, value = self.actions_of(bins).flatten(1), self.value_head(first_hidden)
        return Decision(action, log_prob.view(bins.shape), value, {"bins": bins.short()})

    def evaluate(
        self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]
    ) -> Evaluation:
        """See ``Policy.evaluate``."""
        bins = replay["bins"].flatten(1).long()
        hidden = self.hidden(self.encode_context(inputs), bins if self.autoregressive else None)
        logits = self._scaled_logits(hidden)
        shape = (len(bins), self.chunk, self.size)
        log_prob = dist.categorical_log_prob(bins, logits).view(shape)
        entropy = dist.categorical_entropy(logits).view(shape)
        return Evaluation(log_prob, entropy, self.value_head(hidden[:, 0]))

    def value_of(self, context: Context) -> Tensor:
        """See ``VLAPolicy.value_of``."""
        return self.value_head(self.first_hidden(context))

    def action_loss(
        self, context: Context, action: Tensor, generator: Generator | None
    ) -> tuple[Tensor, Grounding | None]:
        """Return the cross-entropy of the tokens; see ``VLAPolicy.action_loss``."""
        bins = self.bins_of(action).flatten(1)
        hidden = self.hidden(context, bins if self.autoregressive else None)
        loss = F.cross_entropy(self.logits(hidden).flatten(0, 1), bins.flatten(), reduction="none")
        return loss.view(action.shape), self.grounding(context, hidden[:, 0])

    def _scaled_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that actions are sampled from, float32 [.., K]."""
        return self.logits(hidden) / self.temperature


@dataclass
class _DecodingState:
    """State of decoding one token after another.

    Attributes:
        memory: What the tokens attend to.
        memory_kv: Keys and values of the memory, by block.
        past: Keys and values of earlier tokens, by block.
        count: Tokens so far.
    """

    memory: DecoderMemory
    memory_kv: list[tuple[Tensor, Tensor]]
    past: list[list[Tensor]]
    count: int = 0


class TokenVLA(VLA, Tokens[DecoderMemory]):
    """Small model: one learned query per token, and a decoder that attends to the memory."""

    def num_queries(self) -> int:
        """See ``VLA.num_queries``."""
        return self.chunk * self.size

    def build_head(self, config: ModelConfig) -> None:
        """See ``VLA.build_head``."""
        self.bins = config.bins
        self.autoregressive = config.decode == "autoregressive"
        # Embedding of the previous token: its bin, or K for the first token.
        self.before = nn.Embedding(config.bins + 1, config.width) if self.autoregressive else None
        self.head = nn.Linear(config.width, config.bins)

    def hidden(self, context: DecoderMemory, bins: Tensor | None) -> Tensor:
        """See ``Tokens.hidden``."""
        x = self.query + context.summary.unsqueeze(1)
        if bins is None:
            return self.decoder(x, context)
        assert self.before is not None
        previous = F.pad(bins[:, :-1], (1, 0), value=self.bins)
        return self.decoder(x + self.before(previous), context, causal=True)

    def start(self, context: DecoderMemory) -> tuple[Tensor, _DecodingState]:
        """See ``Tokens.start``."""
        past: list[list[Tensor]] = [[] for _ in self.decoder.blocks]
        state = _DecodingState(context, self.decoder.project_memory(context), past)
        first = torch.full((len(context.summary),), self.bins, device=self.device)
        return self.next(first, state), state

    def next(self, bins: Tensor, state: _DecodingState) -> Tensor:
        """See ``Tokens.next``."""
        assert self.before is not None
        x = (self.query[state.count] + state.memory.summary + self.before(bins)).unsqueeze(1)
        state.count += 1
        return self.decoder(x, state.memory, state.memory_kv, past=state.past)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Tokens.logits``."""
        return self.head(hidden).float()

    def grounding(self, context: DecoderMemory, first_hidden: Tensor) -> Grounding | None:
        """See ``Tokens.grounding``."""
        return context.grounding
