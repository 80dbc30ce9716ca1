"""Optimisation of one loss over epochs x minibatches x micro-batches with one AdamW.

``SampleCutter`` cuts batches of samples or whole columns, ``TokenBudgetCutter`` those of language
models. Minibatches run eagerly or as compiled code.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embodied_ppo.algorithms import losses
from embodied_ppo.algorithms.ppo_loss import (
    SETTINGS,
    GradientPart,
    GradientSum,
    Loss,
    MinibatchStep,
    adamw_settings,
    statistic_names,
    take,
)
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile, tree
from embodied_ppo.core.adamw import AdamW
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.random import sampling_key
from embodied_ppo.core.types import Batch, TrainingError, UpdateObserver


def learning_rate_factor(config: AlgorithmConfig, update: int, updates: int) -> float:
    """Return the factor of the learning rates in ``update`` (from 0) of ``updates``.

    Warm-up rises linearly over its updates. linear: from 1 to lr_end. cosine: half a cosine from 1
    to lr_end (Loshchilov & Hutter 2017, eq. 5 without restarts). After the last update the factor
    stays constant. With adaptive_linear this is the largest factor; the adapted one may be smaller.
    """
    warmup = min(1.0, (update + 1) / (config.lr_warmup + 1))
    progress = min(1.0, update / max(1, updates))
    if config.lr_schedule in ("linear", "adaptive_linear"):
        return warmup * (1.0 + (config.lr_end - 1.0) * progress)
    if config.lr_schedule == "cosine":
        return warmup * (
            config.lr_end + (1.0 - config.lr_end) * 0.5 * (1.0 + math.cos(math.pi * progress))
        )
    return warmup


@dataclass(frozen=True, slots=True)
class OptimizationStats:
    """Statistics of the minibatches of an update.

    Attributes:
        sums: Statistic -> its sum over all minibatches. "steps" counts those that took an optimiser
            step.
        ratio_max: The largest probability ratio.
        epochs: Epochs that have started; fewer than ``update_epoch`` after an early stop.
    """

    sums: Mapping[str, float]
    ratio_max: float
    epochs: int


# ------------------------------------------------------------------------------ cutting minibatches
class MinibatchCutter(Protocol):
    """Cuts a batch into minibatches, and a minibatch into micro-batches."""

    def minibatch_size(self, batch: Batch, world: int) -> int:
        """Return this rank's samples (or columns) of a minibatch; ``world``: number of ranks."""
        ...

    def micro_batches(self, minibatch: Batch, ranks: Ranks) -> Iterator[Batch]:
        """Yield the parts of a minibatch, each for one forward and backward pass."""
        ...


@dataclass(frozen=True)
class SampleCutter:
    """Cut by number of samples: rows [B], or columns [T, B] where ``minibatch_unit=column``."""

    config: AlgorithmConfig

    def minibatch_size(self, batch: Batch, world: int) -> int:
        share = self.config.global_batch_size // world
        return share // (batch.mask.shape[0] if self.config.minibatch_unit == "column" else 1)

    def micro_batches(self, minibatch: Batch, ranks: Ranks) -> Iterator[Batch]:
        """Yield parts of at most micro_batch_size samples."""
        size = self.config.micro_batch_size
        columns = self.config.minibatch_unit == "column"
        total = minibatch.mask.shape[1 if columns else 0]
        size = total if size is None else size // (minibatch.mask.shape[0] if columns else 1)
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

    def minibatch_size(self, batch: Batch, world: int) -> int:
        return self.columns // world

    def micro_batches(self, minibatch: Batch, ranks: Ranks) -> Iterator[Batch]:
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
    def _part(minibatch: Batch, index: Tensor, width: int, rows: int) -> Batch:
        """Return columns, trimmed to ``width`` tokens of a row and ``rows`` response tokens."""
        part = take(minibatch, index, "column")
        # Places of masked tokens may lie beyond ``width``.
        place = torch.where(part.mask, part.inputs["place"], 0)[:rows]
        trimmed = tree.map(lambda x: x[:rows], replace(part, inputs={}))
        return replace(trimmed, inputs={"row": part.inputs["row"][:width], "place": place})


def cut_columns(
    mask: Tensor, place: Tensor, tokens: int | None, columns: int | None = None
) -> Iterator[tuple[Tensor, int, int]]:
    """Cut the columns of mask and place [T, N] into parts of similar length, longest first.

    Args:
        mask: bool [T, N].
        place: int64 [T, N], see ``separate_critic_learner.Rows``.
        tokens: Limit of tokens in a part, padding included; it has at least one column. None: no
            limit.
        columns: Limit of columns in a part. None: no limit.

    Yields:
        The indices of the columns, int64 [b], the tokens of a row and the response tokens that the
        part needs. Fully masked columns are left out.
    """
    last = torch.where(mask, place, -1).amax(0) + 1  # [N] tokens that the loss depends on
    order = last.argsort(descending=True, stable=True)
    numbers = torch.arange(1, len(mask) + 1, device=mask.device).unsqueeze(1)  # [T, 1]
    rows = (mask * numbers).amax(0)
    lengths, rows = torch.stack([last, rows])[:, order].tolist()
    count = sum(x > 0 for x in lengths)
    start = 0
    while start < count:
        size = min(count if tokens is None else max(1, tokens // lengths[start]), columns or count)
        part = slice(start, min(count, start + size))
        yield order[part], lengths[start], max(rows[part])
        start = part.stop


# ---------------------------------------------------------------------------------------- optimiser
class MinibatchOptimizer:
    """Optimises one loss with one AdamW, which has a learning rate each for actor and critic."""

    def __init__(
        self,
        loss: Loss,
        groups: Mapping[str, list[nn.Parameter]],
        config: AlgorithmConfig,
        cutter: MinibatchCutter,
        *,
        updates: int,
        seed: int,
        buffers: Sequence[str] = (),
        auxiliary_loss: Callable[[torch.Generator], Tensor] | None = None,
        compile_schedule: compile.CompileSchedule | None = None,
        threads: int = 1,
        dump_dir: Path | None = None,
        ranks: Ranks | None = None,
        section: str = "algorithm",
    ) -> None:
        """Create the optimiser.

        Args:
            loss: The loss.
            groups: "actor" and "critic" -> parameters of ``loss.model``; one of them may be empty.
            config: Options of the algorithm.
            cutter: Cuts batches.
            updates: Updates of the complete run, for the schedule of the learning rate.
            seed: Seed of the permutations.
            buffers: Names of the buffers of ``loss.model`` that the loss reads.
            auxiliary_loss: Loss of samples that it draws, added to each eager minibatch of the
                actor.
            compile_schedule: When minibatches run as compiled code. None: never.
            threads: Number of threads that compute the gradients of a compiled minibatch, each of
                an equal part of its rows.
            dump_dir: Folder for the batch of a non-finite loss or gradient. None: it is not
                written.
            ranks: Ranks that learn together, each from its own columns. A minibatch consists of
                equal shares of all ranks.
            section: Section of options that sets the learning rate, for messages.
        """
        self.section = section
        self.loss, self.config, self.cutter, self.buffers = loss, config, cutter, list(buffers)
        self.model: nn.Module = loss.model  # pyright: ignore[reportAttributeAccessIssue]
        self.compile_schedule = schedule = compile_schedule or compile.CompileSchedule(None)
        self.threads = threads
        self._gradient_schedule = compile.CompileSchedule(
            schedule.first_compiled_update, required=schedule.required, notice=schedule.notice
        )
        """Schedule of ``GradientPart``, with several threads."""
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "learner")
        self.ranks = ranks or Ranks()
        self.updates, self.seed, self.dump_dir = updates, seed, dump_dir
        self.actor, self.critic = groups["actor"], groups["critic"]
        name = {id(p): n for n, p in self.model.named_parameters()}
        self.names = {role: [name[id(p)] for p in group] for role, group in groups.items()}
        value_lr = config.lr if config.value_lr is None else config.value_lr
        self.lr = {"actor": config.lr, "critic": value_lr}
        self.adamw = AdamW(
            [{"params": groups[role], "lr": lr} for role, lr in self.lr.items()],
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.adaptive_factor = 1.0
        """Factor of the learning rates that keeps approx_kl near desired_kl; 1 unless the schedule
        is adaptive."""
        self.statistics: tuple[str, ...] = ()
        """Names of the columns of a minibatch's statistics."""
        self.auxiliary_loss = auxiliary_loss
        self.auxiliary_losses: list[float] = []
        """Values of ``auxiliary_loss`` in the newest update."""
        self._auxiliary_generator = torch.Generator()
        self.observer: UpdateObserver | None = None
        """Called with each batch and its minibatches."""

    @property
    def learning_rates(self) -> tuple[float, float]:
        """Learning rates of actor and critic in the newest update."""
        actor, critic = (group["lr"] for group in self.adamw.param_groups)
        return actor, critic

    def optimize(
        self, batch: Batch, update: int, *, critic_only: bool, entropy_coef: float
    ) -> OptimizationStats:
        """Make ``update_epoch`` passes over a batch.

        Args:
            batch: Samples [B, ..] or columns [T, B, ..] of this rank.
            update: Number of the update, from 0.
            critic_only: Whether the actor does not change.
            entropy_coef: Coefficient of the entropy bonus.

        Raises:
            TrainingError: A loss or gradient is not finite.
        """
        c, ranks = self.config, self.ranks
        self._set_learning_rates(update)
        # "beside" is a part of the seed: another word would change the results of existing
        # configurations.
        self._auxiliary_generator.manual_seed(self._key(update, "beside"))
        self.auxiliary_losses.clear()
        functions = self._compiled(batch, update, critic_only=critic_only)
        compiled_step = (
            None if functions is None else self._compiled_step(functions, batch, entropy_coef)
        )
        statistics: list[Tensor] = []  # of each minibatch; on the device until the last one is done
        observer, epochs = self.observer, 0
        if observer is not None:
            observer.on_batch(batch, loss=self.loss)
        for epoch in range(c.update_epoch):
            location, first = f"update {update}, epoch {epoch}", len(statistics)
            for index in self._minibatches(batch, update, epoch):
                if observer is not None:
                    observer.before_minibatch(index, epoch=epoch)
                if compiled_step is not None:
                    statistics.append(compiled_step(index, location))
                    self._report(statistics[-1])
                    continue
                minibatch = take(batch, index, c.minibatch_unit)
                self.adamw.zero_grad(set_to_none=True)
                # Divide by the counts of the minibatch of all ranks: the gradient then depends
                # neither on the micro-batch size nor on the number of ranks.
                rows = losses.denominator(minibatch.mask)
                denominator = losses.denominator(minibatch.mask, aggregation=c.loss_agg_func)
                if ranks.world > 1:
                    rows, denominator = ranks.all_reduce_sum(
                        torch.stack([rows, denominator])
                    ).unbind()
                total: dict[str, Tensor] = {}
                for micro in self.cutter.micro_batches(minibatch, ranks):
                    loss, stats = self.loss(
                        micro, denominator, rows, entropy_coef=entropy_coef, critic_only=critic_only
                    )
                    loss.backward()
                    total = _add_statistics(total, stats)
                statistics.append(
                    self._apply_gradients(
                        minibatch, total, critic_only=critic_only, location=location
                    )
                )
                self._report(statistics[-1])
            epochs = epoch + 1
            if c.target_kl_stop is not None and len(statistics) > first:
                kl_sum, count = self._totals(statistics[first:], "approx_kl", "count")
                if kl_sum / max(1.0, count) > c.target_kl_stop:
                    break
        sums, ratio_max = self._sums(statistics, f"update {update}")
        if functions is not None:
            for count in adam_state(self.adamw).steps:
                count += sums["steps"]
        return OptimizationStats(sums, ratio_max, epochs)

    def _report(self, statistics: Tensor) -> None:
        """Call the observer with the statistics [K] of a minibatch."""
        if self.observer is not None:
            named = dict(zip(self.statistics, statistics.tolist(), strict=True))
            self.observer.after_minibatch(named)

    def _key(self, update: int, stream: str, *parts: int) -> int:
        """Return the seed of this rank's random numbers; rank 0 draws like a single process."""
        rank = [self.ranks.rank] if self.ranks.rank else []
        return sampling_key(self.seed, update, stream, *parts, *rank)

    def _apply_gradients(
        self, minibatch: Batch, total: dict[str, Tensor], *, critic_only: bool, location: str
    ) -> Tensor:
        """Clip the accumulated gradients and take one step of AdamW; return statistics [K].

        Raises TrainingError, before any weight changes, if the loss or the gradient norm is not
        finite.
        """
        device = minibatch.mask.device
        if not total:  # every column of this rank is masked
            zero = torch.zeros((), dtype=torch.float64, device=device)
            total = dict.fromkeys(statistic_names(minibatch), zero)
        if critic_only:
            for p in self.actor:
                p.grad = None
        elif self.auxiliary_loss is not None:
            auxiliary = self.auxiliary_loss(self._auxiliary_generator)
            (auxiliary / self.ranks.world).backward()
            self.auxiliary_losses.append(float(auxiliary.detach()))
        parameters = [*self.actor, *self.critic]
        loss = self.ranks.all_reduce_gradients(
            self.critic if critic_only else parameters, total["loss"]
        )
        actor, critic = (
            self.ranks.full_tensor(_gradient_norm(group, device))
            for group in (self.actor, self.critic)
        )
        norm = torch.hypot(actor, critic)
        total = total | {"actor_norm": actor, "critic_norm": critic, "finite": norm + loss}
        if not math.isfinite(float(total["finite"])):
            raise self._not_finite(total, location, minibatch)
        max_norm = self.config.max_grad_norm
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
        self.adamw.step()
        return torch.stack([total[name].float() for name in self.statistics])

    # ----------------------------------------------------------------------------------- statistics
    def _totals(self, rows: list[Tensor], *names: str) -> list[float]:
        """Return sums of some statistics over minibatches and ranks."""
        table = torch.stack(rows)  # [minibatches, statistics]
        # An index of Python numbers would be copied to the device.
        columns = torch.stack([table[:, self.statistics.index(name)] for name in names], dim=1)
        return self.ranks.all_reduce_sum(columns.double().sum(0)).tolist()

    def _sums(self, rows: list[Tensor], location: str) -> tuple[dict[str, float], float]:
        """Return the sums of the statistics over all minibatches and the largest ratio.

        Raises TrainingError for a minibatch that was not finite and that no step reported. It
        changed no weight.
        """
        if not rows:
            return defaultdict(float), 0.0
        table = self._over_ranks(torch.stack(rows).double()).cpu()  # [minibatches, statistics]
        column = {name: table[:, i] for i, name in enumerate(self.statistics)}
        bad = (~column["finite"].isfinite()).nonzero().flatten().tolist()
        if bad:
            stats = dict(zip(self.statistics, table[bad[0]].tolist(), strict=True))
            raise self._not_finite(stats, f"{location}, minibatch {bad[0]}")
        sums = {name: float(x.sum()) for name, x in column.items()}
        sums["steps"] = float((column["rows"] > 0).sum())
        return sums, float(column["ratio_max"].max())

    def _over_ranks(self, table: Tensor) -> Tensor:
        """Return statistics [minibatches, K] of all ranks together."""
        if self.ranks.world == 1:
            return table
        norms = [self.statistics.index(name) for name in ("actor_norm", "critic_norm")]
        ratio_max = self.statistics.index("ratio_max")
        merged = self.ranks.all_reduce_sum(table.clone())
        merged[:, norms] = table[:, norms]  # of the summed gradient: equal on all ranks
        merged[:, ratio_max] = self.ranks.all_reduce_max(table[:, ratio_max].clone())
        return merged

    # ---------------------------------------------------------------------------------- minibatches
    def _minibatches(self, batch: Batch, update: int, epoch: int) -> Sequence[Tensor]:
        """Return the indices of each minibatch of a new permutation of the samples (or columns).

        Fully masked minibatches are left out, because AdamW's momentum would change the weights.
        """
        mask = batch.mask.any(0) if self.config.minibatch_unit == "column" else batch.mask
        size = self.cutter.minibatch_size(batch, self.ranks.world)
        generator = torch.Generator(mask.device).manual_seed(self._key(update, "shuffle", epoch))
        order = torch.randperm(mask.shape[0], generator=generator, device=mask.device)
        # A CUDA graph leaves masked minibatches out itself. Reading the mask would make it wait.
        if self.compile_schedule.captures:
            return order.split(size)
        unmasked = torch.stack([part.sum() for part in mask[order].split(size)])
        counts = self.ranks.all_reduce_sum(unmasked).tolist()
        return [index for index, count in zip(order.split(size), counts, strict=True) if count]

    # ------------------------------------------------------------------------------------- one step
    def _compiled(
        self, batch: Batch, update: int, *, critic_only: bool
    ) -> list[compile.Function] | None:
        """Return the compiled functions of a minibatch, None before they are due.

        Also set the names of statistics. The functions are ``MinibatchStep``; with several threads
        ``GradientSum`` and ``GradientPart``.
        """
        arguments = self.loss, self.names["actor"], self.names["critic"], batch, self.buffers
        self.statistics = MinibatchStep(*arguments).statistics()
        device, size = batch.mask.device, self.cutter.minibatch_size(batch, self.ranks.world)

        def settings() -> Tensor:
            return torch.zeros(len(SETTINGS), device=device)

        def index(length: int) -> Tensor:
            return torch.arange(length, device=device)

        # ``adam_state`` allocates all moments, but an eager step only those of its parameters. The
        # functions therefore call it when a compilation starts.
        def step() -> compile.Example:
            return compile.Example(
                MinibatchStep(*arguments),
                adam_state(self.adamw).tensors,
                [settings(), index(size), *self._constants(batch)],
            )

        def gradient() -> compile.Example:
            indices = index(size), index(size // self.threads)
            return compile.Example(
                GradientPart(*arguments),
                adam_state(self.adamw).parameters,
                [settings(), *indices, *self._constants(batch)],
            )

        def gradient_sum() -> compile.Example:
            state = adam_state(self.adamw)
            row = torch.zeros(len(statistic_names(batch)), device=device)
            parts = [*(torch.zeros_like(x) for x in state.parameters), row]
            return compile.Example(
                GradientSum(*arguments), state.tensors, [settings(), *parts * self.threads]
            )

        if self.threads == 1:
            functions = [self.compile_schedule.get(update, step)]
        else:
            functions = [
                self.compile_schedule.get(update, gradient_sum),
                self._gradient_schedule.get(update, gradient),
            ]
        compiled = [function for function in functions if function is not None]
        return None if critic_only or len(compiled) < len(functions) else compiled

    def _constants(self, batch: Batch) -> list[Tensor]:
        """Return the arguments that are the same in all minibatches of an update."""
        return [
            *(self.model.get_buffer(name) for name in self.buffers),
            *(x.contiguous() for x in tree.leaves(batch)),
        ]

    def _compiled_step(
        self, functions: Sequence[compile.Function], batch: Batch, entropy_coef: float
    ) -> Callable[[Tensor, str], Tensor]:
        """Return the step of one minibatch as compiled code: (indices, location) -> statistics."""
        c, state = self.config, adam_state(self.adamw)
        size = self.cutter.minibatch_size(batch, self.ranks.world)
        settings = adamw_settings(
            c,
            c.update_epoch * (batch.mask.shape[1 if c.minibatch_unit == "column" else 0] // size),
            lr=self.learning_rates,
            steps=[
                int(self.adamw.state[group[0]]["step"]) if group else 0
                for group in (self.actor, self.critic)
            ],
            entropy_coef=entropy_coef,
        )
        rows, constants = iter(settings.to(batch.mask.device).unbind()), self._constants(batch)
        tensors = state.tensors

        def part(settings: Tensor, index: Tensor, rows: Tensor) -> list[Tensor]:
            return functions[1]([*state.parameters, settings, index, rows, *constants])

        def step(index: Tensor, location: str) -> Tensor:
            settings = next(rows)
            if self.threads == 1:
                (stats,) = functions[0]([*tensors, settings, index, *constants])
            else:
                own, *others = index.chunk(self.threads)
                running = [self._pool.submit(part, settings, index, other) for other in others]
                results = [part(settings, index, own), *(future.result() for future in running)]
                (stats,) = functions[0]([*tensors, settings, *itertools.chain(*results)])
            # Reading the value would make a CUDA graph wait; ``_sums`` checks it after the epochs.
            if not self.compile_schedule.captures and not math.isfinite(stats[-1].item()):
                named = dict(zip(self.statistics, stats.tolist(), strict=True))
                raise self._not_finite(named, location, take(batch, index, c.minibatch_unit))
            return stats

        return step

    def _not_finite(
        self, stats: Mapping[str, Any], location: str, minibatch: Batch | None = None
    ) -> TrainingError:
        """Return the error to raise; write the batch, if given, together with the policy."""
        norm = math.hypot(float(stats["actor_norm"]), float(stats["critic_norm"]))
        text = (
            f"{location}: loss {float(stats['loss']):g}, gradient norm {norm:g} (not finite), not"
            " trained on"
        )
        if minibatch is not None and self.dump_dir is not None:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            rank = f"_{self.ranks.rank}" if self.ranks.rank else ""
            path = self.dump_dir / f"bad_batch{rank}.pt"
            fields = {name: getattr(minibatch, name) for name in minibatch.__slots__}
            content = {
                "batch": {name: value for name, value in fields.items() if value is not None},
                "policy": self.ranks.full_state(self.model.state_dict()),
                "where": location,
            }
            torch.save(content, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            text += f"; the batch is in {path}"
        return TrainingError(
            f"{text}; lower {self.section}.lr or look for non-finite rewards and observations"
        )

    # -------------------------------------------------------------------------------- learning rate
    def adapt(self, sums: Mapping[str, float]) -> None:
        """Adapt the learning rates so that approx_kl stays near desired_kl."""
        if not self.config.lr_schedule.startswith("adaptive"):
            return
        approx_kl = float(sums["approx_kl"]) / max(1.0, float(sums["count"]))
        if approx_kl > 2.0 * self.config.desired_kl:
            self.adaptive_factor = max(self.adaptive_factor / 1.5, 1e-3)
        elif approx_kl < 0.5 * self.config.desired_kl:
            self.adaptive_factor = min(self.adaptive_factor * 1.5, 30.0)

    def _set_learning_rates(self, update: int) -> None:
        """Set the learning rates of an update."""
        factor = learning_rate_factor(self.config, update, self.updates)
        if self.config.lr_schedule == "adaptive_linear":
            factor = self.adaptive_factor = min(self.adaptive_factor, factor)
        else:
            factor *= self.adaptive_factor
        for group, role in zip(self.adamw.param_groups, ("actor", "critic"), strict=True):
            group["lr"] = self.lr[role] * factor

    # ----------------------------------------------------------------------------------- checkpoint
    def state(self) -> dict[str, Any]:
        """Return everything beyond the weights that the next update depends on."""
        return {"optimizer": self.adamw.state_dict(), "adaptive_factor": self.adaptive_factor}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``; the options of AdamW remain those of the config."""
        options = [
            {k: v for k, v in group.items() if k != "params"} for group in self.adamw.param_groups
        ]
        parameters, saved = [*self.actor, *self.critic], state["optimizer"]
        moments = {
            i: {key: self.ranks.shard_tensor(x, parameters[i]) for key, x in entry.items()}
            for i, entry in saved["state"].items()
        }
        self.adamw.load_state_dict({**saved, "state": moments})
        for group, option in zip(self.adamw.param_groups, options, strict=True):
            group.update(option)
        if self.config.lr_schedule.startswith("adaptive"):  # otherwise the factor is 1
            self.adaptive_factor = state["adaptive_factor"]

    def close(self) -> None:
        """Stop a compilation in progress."""
        self.compile_schedule.close()
        self._gradient_schedule.close()
        self._pool.shutdown()


@dataclass(frozen=True)
class _AdamState:
    """All parameters, those of the actor first, with their moments and their numbers of steps."""

    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters, first moments, second moments."""
        return [*self.parameters, *self.first, *self.second]


def adam_state(optimizer: torch.optim.Optimizer) -> _AdamState:
    """Return the optimiser's state; create it before the first step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for p in parameters:
        if not optimizer.state[p]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    state = [optimizer.state[p] for p in parameters]
    lists = ([s[key] for s in state] for key in ("exp_avg", "exp_avg_sq", "step"))
    return _AdamState([p.detach() for p in parameters], *lists)


def _add_statistics(total: dict[str, Tensor], stats: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the statistics of all micro-batches so far: sums, and the maximum of ratio_max."""
    if not total:
        return dict(stats)
    ratio_max = torch.maximum(total["ratio_max"], stats["ratio_max"])
    return {name: total[name] + value for name, value in stats.items()} | {"ratio_max": ratio_max}


def _gradient_norm(parameters: list[nn.Parameter], device: torch.device) -> Tensor:
    """Return the L2 norm of the gradients, a scalar; 0 without any."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(grads, foreach=True)
