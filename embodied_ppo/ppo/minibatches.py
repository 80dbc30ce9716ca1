"""The interface of a loss, and how batches are cut into minibatches and micro-batches.

``SampleCutter`` cuts batches of samples or whole columns, ``TokenBudgetCutter`` those of language
models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from embodied_envs.base import tree
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Batch, Samples
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.ppo.roles import Rows

B = TypeVar("B", bound=Samples)
# Name -> scalar without gradient, summed over micro-batches; of names in "_max" the maximum.
Statistics: TypeAlias = "dict[str, Tensor]"


class MinibatchLoss(nn.Module, ABC):
    """A loss of a minibatch: ``loss(batch) -> (scalar, statistics)``.

    It is a module, so that the parameters can be passed as tensors.

    Attributes:
        model: The model that is trained.
        config: Options that the loss and the step of AdamW read.
        names: Names of the statistics that the loss returns.
        compares: Whether the loss returns the statistic "value_difference", see ``agreement``.
        separate: Whether policy and value function share no weight.
        coefficients: Numbers that change between updates, which compiled code receives as tensors.
    """

    def __init__(
        self, model: nn.Module, config: AlgorithmConfig, *, names: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.config, self.names = config, names
        self.coefficients: dict[str, Any] = {}
        self.compares, self.separate = False, False

    @abstractmethod
    def forward(self, b: Any) -> tuple[Tensor, Statistics]:
        """Return the loss and the statistics of a minibatch, or of a part of it.

        The losses of the parts add up to that of the minibatch: divide sums by ``Samples.rows`` or
        ``Samples.columns`` instead of the rows of the part.
        """


class MirrorTerms(NamedTuple):
    """What the loss reads of the policy on mirrored samples, with gradients.

    Attributes:
        log_prob, value: As in ``PolicyTerms``.
        difference: Mean square of μ(M s) - M μ(s) over the numbers of an action, as the mask.
    """

    log_prob: Tensor
    value: Tensor
    difference: Tensor


class PolicyTerms(NamedTuple):
    """What the loss reads of the policy, with gradients.

    Attributes:
        log_prob: Log-probability of the taken actions under the current policy, [..] or finer.
        entropy: Entropy of the policy, [..] or finer.
        kl: Elementwise KL to the reference, [..] or finer. None without a reference.
        value: Output of the value head, [..]. None if the critic is a separate model.
        mirror: The same of the mirrored samples; None without them.
    """

    log_prob: Tensor
    entropy: Tensor
    kl: Tensor | None = None
    value: Tensor | None = None
    mirror: MirrorTerms | None = None


class PolicyLoss(MinibatchLoss):
    """What ``ppo.PPOLoss`` needs besides its formula; ``evaluate`` depends on the kind of model."""

    def __init__(
        self, policy: nn.Module, config: AlgorithmConfig, *, length: int, has_value_head: bool
    ) -> None:
        """Create the loss.

        Args:
            policy: The model.
            config: Coefficients and aggregation.
            length: Divisor of seq-mean-token-sum-norm unless config.loss_scale_factor is set.
            has_value_head: Whether L_V is a part of it.
        """
        # Their order is that of the columns of statistics, in eager and in compiled steps.
        names = ("policy_loss", "clip_fraction", "dual_clip_fraction", "approx_kl", "ratio_max")
        names += ("count", "entropy")
        names += ("value_loss", "value_clipped", "value_difference") if has_value_head else ()
        names += ("kl",) if config.use_kl_loss else ()
        names += ("positive_nll",) if config.positive_nll_weight else ()
        super().__init__(policy, config, names=names)
        self.length = float(config.loss_scale_factor or length)
        # Number of leading dimensions of a minibatch: 1 for [B], 2 for [T, B].
        self.batch_dims = 2 if config.minibatch_unit == "column" else 1
        self.coefficients = {"entropy": 0.0}

    @abstractmethod
    def evaluate(self, b: Batch) -> PolicyTerms:
        """Evaluate the model on a micro-batch."""


def merge_statistics(total: Mapping[str, Tensor], part: Statistics) -> Statistics:
    """Return the statistics of all micro-batches so far: sums and maxima."""
    return {
        name: torch.maximum(total[name], x) if name.endswith("_max") else total[name] + x
        for name, x in part.items()
    }


def take(batch: B, index: Tensor, unit: str) -> B:
    """Return the rows (``unit`` step) or columns (``unit`` column) ``index`` of a batch."""
    return tree.map(lambda x: x.index_select(1 if unit == "column" else 0, index), batch)


@dataclass(frozen=True)
class SampleCutter:
    """Cut by number of samples: rows [B], or columns [T, B] where ``minibatch_unit=column``."""

    config: AlgorithmConfig

    def minibatch_size(self, batch: Samples, world: int) -> int:
        """Return this rank's samples (or columns) of a minibatch; ``world``: number of ranks."""
        # global_batch_size counts samples, and a column contains T of them.
        share = self.config.global_batch_size // world
        return share // (batch.mask.shape[0] if self.config.minibatch_unit == "column" else 1)

    def micro_batches(self, minibatch: B, ranks: Ranks) -> Iterator[B]:
        """Yield parts of at most micro_batch_size samples."""
        size = self.config.micro_batch_size
        columns = self.config.minibatch_unit == "column"
        total = minibatch.mask.shape[1 if columns else 0]
        size = total if size is None else size // (minibatch.mask.shape[0] if columns else 1)
        # A minibatch in one part is not sliced.
        if size >= total:
            yield minibatch
            return
        for i in range(0, total, size):
            part = slice(i, i + size)
            yield tree.index(minibatch, (slice(None), part) if columns else part)


@dataclass(frozen=True)
class TokenBudgetCutter:
    """Cut columns of tokens: rows of similar length together, without their padding.

    On a CPU this is faster than packing rows into one. The result does not depend on the budget.

    Attributes:
        columns: Sequences of a minibatch, of all ranks together.
        tokens: Limit of tokens in a micro-batch, padding included; it has at least one row. None:
            no limit.
        max_columns: Limit of sequences in a micro-batch. None: no limit.
    """

    columns: int
    tokens: int | None
    max_columns: int | None

    def minibatch_size(self, batch: Samples, world: int) -> int:
        """Return this rank's columns of a minibatch; ``world``: number of ranks."""
        return self.columns // world

    def micro_batches(self, minibatch: Any, ranks: Ranks) -> Iterator[Any]:
        """Yield columns sorted by length and trimmed, within both limits."""
        cuts = list(
            cut_columns(minibatch.mask, minibatch.inputs["place"], self.tokens, self.max_columns)
        )
        masked = replace(minibatch, mask=torch.zeros_like(minibatch.mask))
        # Sharded models need the same number of passes on every rank; masked ones fill it up.
        for _ in range(ranks.max_passes(len(cuts)) - len(cuts)):
            yield self._part(masked, minibatch.mask.new_zeros(1, dtype=torch.int64), 1, 1)
        for index, width, rows in cuts:
            yield self._part(minibatch, index, width, rows)

    @staticmethod
    def _part(minibatch: Any, index: Tensor, width: int, rows: int) -> Any:
        """Return columns, trimmed to ``width`` tokens of a row and ``rows`` response tokens."""
        part = take(minibatch, index, "column")
        # Places of masked tokens may lie beyond ``width``.
        place = torch.where(part.mask, part.inputs["place"], 0)[:rows]
        # Inputs are cut in another way: a row has L tokens, everything else T.
        trimmed = tree.map(lambda x: x[:rows], replace(part, inputs={}))
        return replace(trimmed, inputs={"row": part.inputs["row"][:width], "place": place})


def cut_columns(
    mask: Tensor, place: Tensor, tokens: int | None, columns: int | None = None
) -> Iterator[tuple[Tensor, int, int]]:
    """Cut the columns of mask and place [T, N] into parts of similar length, longest first.

    Args:
        mask: bool [T, N].
        place: int64 [T, N], see ``roles.Rows``.
        tokens: Limit of tokens in a part, padding included; it has at least one column. None: no
            limit.
        columns: Limit of columns in a part. None: no limit.

    Yields:
        The indices of the columns, int64 [b], the tokens of a row and the response tokens that the
        part needs. Fully masked columns are left out.
    """
    last = torch.where(mask, place, -1).amax(0) + 1  # [N] tokens that the loss depends on
    # A stable order gives the same parts, and so the same rounding, in every execution.
    order = last.argsort(descending=True, stable=True)
    numbers = torch.arange(1, len(mask) + 1, device=mask.device).unsqueeze(1)  # [T, 1]
    rows = (mask * numbers).amax(0)
    # One transfer to the host for both.
    lengths, rows = torch.stack([last, rows])[:, order].tolist()
    # Fully masked columns have length 0 and come last.
    count = sum(x > 0 for x in lengths)
    start = 0
    while start < count:
        # The first column of a part is its longest, to which the others are padded.
        size = min(count if tokens is None else max(1, tokens // lengths[start]), columns or count)
        part = slice(start, min(count, start + size))
        yield order[part], lengths[start], max(rows[part])
        start = part.stop


def column_parts(
    obs: Rows, mask: Tensor, tokens: int | None, columns: int | None, ranks: Ranks
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Yield columns in parts of similar length: (index [b], ids [b, l], place [b, r], r).

    See ``cut_columns``.

    Sharded models need the same number of passes on every rank. Ranks with fewer parts first yield
    a part of one token; its result is overwritten by that of the part that holds the token.
    """
    cuts = list(cut_columns(mask, obs["place"], tokens, columns))
    first = mask.new_zeros(1, dtype=torch.int64)
    for _ in range(ranks.max_passes(len(cuts)) - len(cuts)):
        yield first, obs["row"][:1, first].T, first.unsqueeze(0), 1
    for part, width, rows in cuts:
        # Places of masked tokens may lie beyond ``width``.
        place = torch.where(mask, obs["place"], 0)[:rows, part]
        yield part, obs["row"][:width, part].T, place.T, rows
