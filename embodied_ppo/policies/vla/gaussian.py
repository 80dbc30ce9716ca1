"""Action head with a Gaussian over the actions of a chunk.

B rows, C actions of a chunk, A dimensions of each.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Generic, TypeVar

import torch
from torch import Generator, Tensor, nn

from embodied_envs.types import Obs
from embodied_ppo.core.types import Decision, Evaluation
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import distributions as dist
from embodied_ppo.policies.vla.trunk import DecoderMemory, Grounding
from embodied_ppo.policies.vla.vla_policy import VLA, VLAPolicy

Context = TypeVar("Context")


class Gaussian(VLAPolicy, Generic[Context]):
    """Gaussian policy: a mean [B, C, A], and one learned scale for each of the C·A numbers.

    Log-probabilities are float32 [B, C, A]. Subclasses implement ``read``; ``Context`` is what they
    compute once per observation.
    """

    def build_scale(self, config: ModelConfig) -> None:
        """Create the standard deviations."""
        self.log_std = nn.Parameter(torch.full((self.chunk, self.size), config.init_log_std))
        self.bounds = config.min_log_std, config.max_log_std

    @abstractmethod
    def read(self, context: Context) -> tuple[Tensor, Tensor]:
        """Return the mean float32 [B, C, A], and the input of the value head [B, D]."""

    def _read(self, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean and log_std float32 [B, C, A], and the input of the value head [B, D]."""
        mean, hidden = self.read(context)
        log_std = self.log_std.clamp(*self.bounds) + math.log(self.temperature)
        return mean, log_std.expand_as(mean), hidden

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """See ``ActorCritic.observe``."""
        super().observe(obs, mask)
        with torch.no_grad():
            self.log_std.clamp_(*self.bounds)

    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """See ``Policy.noise``."""
        return dist.gaussian_noise((rows, self.chunk, self.size), generator, self.device)

    @torch.no_grad()
    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        """See ``Policy.act``."""
        mean, log_std, first_hidden = self._read(self.encode_context(inputs))
        action = mean if noise is None else dist.gaussian_sample(mean, log_std, noise)
        log_prob = dist.gaussian_log_prob(action, mean, log_std)
        return Decision(action.flatten(1), log_prob, self.value_head(first_hidden))

    def evaluate(
        self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]
    ) -> Evaluation:
        """See ``Policy.evaluate``."""
        mean, log_std, first_hidden = self._read(self.encode_context(inputs))
        log_prob = dist.gaussian_log_prob(action.view_as(mean), mean, log_std)
        entropy = dist.gaussian_entropy(mean, log_std)
        return Evaluation(log_prob, entropy, self.value_head(first_hidden))

    def value_of(self, context: Context) -> Tensor:
        """See ``VLAPolicy.value_of``."""
        return self.value_head(self.read(context)[1])


class GaussianVLA(VLA, Gaussian[DecoderMemory]):
    """Small model: one decoder token for each action; the value is computed from the first."""

    def build_head(self, config: ModelConfig) -> None:
        """See ``VLA.build_head``."""
        self.mean = nn.Linear(config.width, self.size)
        self.build_scale(config)

    def read(self, context: DecoderMemory) -> tuple[Tensor, Tensor]:
        """See ``Gaussian.read``."""
        hidden = self.decoder(self.query + context.summary.unsqueeze(1), context)
        return self.mean(hidden).float(), hidden[:, 0]

    def action_loss(
        self, context: DecoderMemory, action: Tensor, generator: Generator | None
    ) -> tuple[Tensor, Grounding | None]:
        """Return -log p; see ``VLAPolicy.action_loss``."""
        mean, log_std, _ = self._read(context)
        return -dist.gaussian_log_prob(action, mean, log_std), context.grounding
