"""A critic that is a model of its own, with its loss and its optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import ValueBatch
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.ppo import losses
from embodied_ppo.ppo.minibatches import MinibatchLoss, Statistics, TokenBudgetCutter, column_parts
from embodied_ppo.ppo.optimizer import MinibatchOptimizer
from embodied_ppo.ppo.roles import NO_STATS, OptimizationStats, Rows

CRITIC_METHODS = ("value",)  # methods of a critic that read weights


class CriticLoss(MinibatchLoss):
    """L_V = max(h(R − V), h(R − V_c)), see ``losses.value_loss``."""

    def __init__(self, critic: LanguageCritic, config: AlgorithmConfig, *, length: int) -> None:
        """Create the loss.

        Args:
            critic: The critic.
            config: Options of its optimiser.
            length: response_length.
        """
        super().__init__(critic, config, names=("value_loss", "value_clipped", "value_difference"))
        self.length = float(config.loss_scale_factor or length)

    def forward(self, b: ValueBatch) -> tuple[Tensor, Statistics]:
        """See ``MinibatchLoss``; inputs are ``Rows``, everything else is [T, B]."""
        c = self.config
        # The model takes batch-first tensors, [B, L] and [B, T]; the loss is time first.
        value = self.model.value(b.inputs["row"].T, b.inputs["place"].T).T
        errors, clipped = losses.value_loss(
            value, b.value, b.returns, value_clip=c.value_clip, huber_delta=c.huber_delta
        )
        loss = losses.aggregate(
            errors,
            b.mask,
            aggregation=c.loss_agg_func,
            rows=b.rows,
            columns=b.columns,
            length=self.length,
        )
        return loss, {
            "value_loss": loss.detach(),
            "value_clipped": (clipped & b.mask).sum(),
            "value_difference": losses.value_difference(value, b.value, b.mask),
        }


class LocalCritic:
    """A critic in this process and its optimiser; see ``roles.Critic``."""

    def __init__(
        self,
        critic: LanguageCritic,
        config: AlgorithmConfig,
        *,
        length: int,
        columns: int,
        tokens: int | None = None,
        ranks: Ranks | None = None,
        **options: Any,
    ) -> None:
        """Create the critic's optimiser.

        Args:
            critic: The model.
            config: Options of its optimiser and epochs.
            length: response_length (T).
            columns: Sequences of an optimiser step.
            tokens: Limit of tokens in a forward pass.
            ranks: As for ``MinibatchOptimizer``.
            options: Further arguments of ``MinibatchOptimizer``.
        """
        # A forward pass reads whole sequences, so minibatches consist of columns.
        config = replace(config, minibatch_unit="column")
        # Shard before the optimiser is created: its moments are shards, too.
        (ranks or Ranks()).shard(critic, CRITIC_METHODS)
        self.module, self.config, self.tokens = critic, config, tokens
        self.optimizer = MinibatchOptimizer(
            CriticLoss(critic, config, length=length),
            # The optimiser has a group each for actor and critic; here the first one is empty.
            {"actor": [], "critic": [p for p in critic.parameters() if p.requires_grad]},
            config,
            TokenBudgetCutter(columns, tokens, config.micro_batch_size),
            buffers=[name for name, _ in critic.named_buffers()],
            ranks=ranks,
            **options,
        )
        self._stats = NO_STATS

    @property
    def learning_rate(self) -> float:
        return self.optimizer.learning_rates[1]

    def initialize(self, actor: LanguagePolicy) -> None:
        """Do nothing: the critic has its weights already."""

    @torch.no_grad()
    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        # Parts of similar length, of which padding is cut; masked tokens have the value 0.
        value = torch.zeros(mask.shape, device=mask.device)
        # Without gradients more sequences fit into memory, so this limit has an option of its own.
        limit = self.config.rollout_micro_batch_size or self.config.micro_batch_size
        for part, ids, place, rows in column_parts(
            obs, mask, self.tokens, limit, self.optimizer.ranks
        ):
            value[:rows, part] = torch.where(
                mask[:rows, part], self.module.value(ids, place).T, 0.0
            )
        return value

    def begin(self, batch: ValueBatch, update: int) -> None:
        """See ``roles.Critic``; it optimises at once."""
        # Keep what the loss reads only, so that minibatches copy nothing else.
        batch = ValueBatch(
            inputs=dict(batch.inputs), value=batch.value, returns=batch.returns, mask=batch.mask
        )
        self._stats = self.optimizer.optimize(batch, update)

    def end(self) -> OptimizationStats:
        # Return statistics once, so that an update without ``begin`` has none.
        stats, self._stats = self._stats, NO_STATS
        return stats

    def state(self) -> dict[str, Any]:
        return {"critic": self.optimizer.state(), "critic_weights": self.module.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state(state["critic"])
        self.module.load_state_dict(
            self.optimizer.ranks.shard_state(self.module, state["critic_weights"])
        )

    def state_tensors(self) -> Any:
        # The gradients of the last minibatch stay allocated until the next one.
        parameters = [*self.module.parameters()]
        return [self.state(), parameters, [p.grad for p in parameters if p.grad is not None]]

    def close(self) -> None:
        self.optimizer.close()
