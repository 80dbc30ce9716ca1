"""Minimises a loss over epochs x minibatches x micro-batches with one AdamW.

Read ``MinibatchOptimizer.step`` first. The loss is any ``minibatches.MinibatchLoss``: that of PPO
(``ppo``), of a separate critic (``critic``), or of distillation (``imitation.distillation``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from embodied_envs.base.errors import TrainingError
from embodied_envs.base.random import sampling_key
from embodied_ppo.core import compile
from embodied_ppo.core.adamw import AdamW
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.errors import RolloutMismatch
from embodied_ppo.core.types import MEAN_SHIFT, Samples, UpdateObserver
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.ppo import agreement, losses, minibatches, schedules
from embodied_ppo.ppo.compiled_step import STEP_STATISTICS, CompiledStep
from embodied_ppo.ppo.roles import OptimizationStats


class MinibatchOptimizer:
    """Minimises one loss with one AdamW, which has a learning rate each for actor and critic.

    An update calls ``begin``, then for each epoch ``minibatches`` and for each of them ``step``,
    and at last ``end``; ``optimize`` makes these calls.
    """

    def __init__(
        self,
        loss: minibatches.MinibatchLoss,
        groups: Mapping[str, list[nn.Parameter]],
        config: AlgorithmConfig,
        cutter: minibatches.SampleCutter | minibatches.TokenBudgetCutter,
        *,
        updates: int,
        seed: int,
        buffers: Sequence[str] = (),
        compile_schedule: compile.CompileSchedule | None = None,
        ranks: Ranks | None = None,
        section: str = "algorithm",
        tolerances: agreement.Tolerances | None = None,
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
            compile_schedule: When minibatches run as compiled code. None: never.
            ranks: Ranks that learn together, each from its own columns. A minibatch consists of
                equal shares of all ranks.
            section: Section of options that sets the learning rate, for messages.
            tolerances: How far the first minibatch of an update may differ from its rollout. None:
                any difference is accepted.
        """
        self.loss, self.config, self.cutter, self.buffers = loss, config, cutter, list(buffers)
        self.model: nn.Module = loss.model
        self.updates, self.seed, self.section = updates, seed, section
        self.ranks = ranks or Ranks()
        # Part of the seeds; rank 0 draws like a single process.
        self._rank_key = [self.ranks.rank] if self.ranks.rank else []
        self.actor, self.critic = groups["actor"], groups["critic"]
        value_lr = config.lr if config.value_lr is None else config.value_lr
        # Each group has its own learning rate; the norm of both together clips the gradients.
        self.adamw = AdamW(
            [{"params": self.actor, "lr": config.lr}, {"params": self.critic, "lr": value_lr}],
            betas=(config.adam_betas[0], config.adam_betas[1]),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        # Learning rates of actor and critic in the newest update.
        self.learning_rates = config.lr, value_lr
        # See ``schedules.adapted_factor``; 1 unless the schedule is adaptive.
        self.adaptive_factor = 1.0
        # Names of the columns of a minibatch's statistics.
        self.statistics = (*loss.names, *STEP_STATISTICS)
        self.compiled: CompiledStep | None = None
        if compile_schedule is not None and compile_schedule.first_compiled_update is not None:
            self.compiled = CompiledStep(compile_schedule)
        self.tolerances = tolerances
        self._named_buffers = dict(self.model.named_buffers())
        self._versions: list[int] = []  # none before the first update
        self.observer: UpdateObserver | None = None  # called with each batch and its minibatches

    # ----------------------------------------------------------------------------------- one update
    def optimize(self, batch: Samples, update: int) -> OptimizationStats:
        """Make ``update_epoch`` passes over a batch; arguments and errors as ``begin``."""
        self.begin(batch, update)
        for epoch in range(self.config.update_epoch):
            self.step(*self.minibatches(epoch))
        return self.end()

    def begin(
        self,
        batch: Samples,
        update: int,
        *,
        critic_only: bool = False,
        current: Tensor | None = None,
    ) -> None:
        """Prepare the minibatches of an update.

        Args:
            batch: Samples [B, ..] or columns [T, B, ..] of this rank.
            update: Number of the update, from 0.
            critic_only: Whether the actor does not change. The loss then has an argument ``part``.
            current: bool, whether these weights made the batch, so that the first minibatch must
                agree with it, see ``tolerances``. None: they did.

        Raises:
            TrainingError: The compilation failed and is required.
        """
        c = self.config
        if c.rpo_alpha is not None:  # in the batch, because compiled code keeps its arguments
            policy_batch: Any = batch
            shift = {MEAN_SHIFT: torch.zeros_like(policy_batch.action)}
            batch = replace(policy_batch, replay=policy_batch.replay | shift)
        self._batch, self._update, self._critic_only = batch, update, critic_only
        self._rows: list[Tensor] = []  # statistics of each minibatch, on the device until ``end``
        self._epochs = self._epoch_start = 0
        self._current = current
        # Learning rates of this update.
        factor = schedules.learning_rate_factor(c, update, self.updates) * self.adaptive_factor
        self.learning_rates = c.lr * factor, (c.lr if c.value_lr is None else c.value_lr) * factor
        for group, lr in zip(self.adamw.param_groups, self.learning_rates, strict=True):
            group["lr"] = lr
        self._size = self.cutter.minibatch_size(batch, self.ranks.world)
        samples = batch.mask.shape[1 if c.minibatch_unit == "column" else 0]
        self._runs_compiled = self.compiled is not None and self.compiled.begin(
            self.loss,
            self.adamw,
            batch,
            update=update,
            size=self._size,
            count=c.update_epoch * (samples // self._size),
            buffers=self.buffers,
            critic_only=critic_only,
        )
        # Whether steps are CUDA graphs; to read a result would make them wait.
        self._captures = self.compiled is not None and self.compiled.schedule.captures
        if self.observer is not None:
            self.observer.on_batch(batch, loss=self.loss)

    def minibatches(self, epoch: int) -> Sequence[Tensor]:
        """Return the indices of each minibatch of a new permutation of the samples (or columns).

        The size divides the number of samples (options/rules). Fully masked minibatches are left
        out, because AdamW's momentum would change the weights.
        """
        # Statistics of this epoch start here, see ``epoch_kl``.
        self._epochs, self._epoch_start = epoch + 1, len(self._rows)
        mask = self._batch.mask
        mask = mask.any(0) if self.config.minibatch_unit == "column" else mask
        if self.config.rpo_alpha is not None:
            self._draw_mean_shift(self.config.rpo_alpha, epoch)
        generator = torch.Generator(mask.device).manual_seed(
            sampling_key(self.seed, self._update, "shuffle", epoch, *self._rank_key)
        )
        order = torch.randperm(mask.shape[0], generator=generator, device=mask.device)
        # A CUDA graph leaves masked minibatches out itself. Reading the mask would make it wait.
        if self._captures or (mask.is_cpu and self.ranks.world == 1 and mask.all()):
            return order.split(self._size)
        unmasked = torch.stack([part.sum() for part in mask[order].split(self._size)])
        if self.ranks.world > 1:
            unmasked = self.ranks.all_reduce_sum(unmasked)
        counts = unmasked.tolist()
        return [i for i, count in zip(order.split(self._size), counts, strict=True) if count]

    def _draw_mean_shift(self, alpha: float, epoch: int) -> None:
        """Draw z ~ U(-alpha, alpha) for each sample, in the memory that compiled code reads."""
        batch: Any = self._batch
        shift = batch.replay[MEAN_SHIFT]
        key = sampling_key(self.seed, self._update, "mean_shift", epoch, *self._rank_key)
        shift.uniform_(-alpha, alpha, generator=torch.Generator(shift.device).manual_seed(key))

    def step(self, *indices: Tensor) -> None:
        """Take a step of AdamW for each of ``indices``, the samples (or columns) of a minibatch.

        Raises:
            TrainingError: A loss or gradient is not finite. No weight has changed.
            RolloutMismatch: The first minibatch differs from the rollout.
        """
        if self._runs_compiled:
            return self._compiled_steps(indices)
        for index in indices:
            if self.observer is not None:
                self.observer.before_minibatch(index, epoch=self._epochs - 1)
            # Accumulate the gradients of the micro-batches, clip them, take the step.
            minibatch = minibatches.take(self._batch, index, self.config.minibatch_unit)
            ranks, trained = self.ranks, [*self.actor, *self.critic]
            self.adamw.zero_grad(set_to_none=True)
            # Divide by the counts of the minibatch of all ranks: the gradient then depends neither
            # on the micro-batch size nor on the number of ranks.
            local_rows = minibatch.mask.sum()
            c = self.config
            rows, columns = losses.minibatch_counts(
                minibatch.mask, c.minibatch_unit, c.loss_agg_func
            )
            if ranks.world > 1:
                rows = ranks.all_reduce_sum(rows)
                columns = None if columns is None else ranks.all_reduce_sum(columns)
            counts = {"rows": rows, "columns": columns}
            if (positive := getattr(minibatch, "positive", None)) is not None:
                counts["positive_rows"] = ranks.all_reduce_sum(positive.sum().double())
            loss = partial(self.loss, part="critic") if self._critic_only else self.loss
            self.loss.compares = not self._rows
            total: Mapping[str, Tensor] = {}
            for micro in self.cutter.micro_batches(minibatch, ranks):
                value, stats = loss(replace(micro, **counts))
                value.backward()  # adds to the gradients of the micro-batches before
                stats = stats | {"loss": value.detach()}
                total = minibatches.merge_statistics(total, stats) if total else stats
            if not total:  # every column of this rank is masked
                zero = torch.zeros((), dtype=torch.float64, device=rows.device)
                total = dict.fromkeys((*self.loss.names, "loss"), zero)
            if self._critic_only:
                trained = self.critic
                for p in self.actor:  # AdamW leaves parameters without a gradient unchanged
                    p.grad = None
            # Norms of actor and critic are metrics; the clipping uses that of both together.
            value = total["loss"]
            if ranks.world > 1:
                value = ranks.all_reduce_gradients(trained, value)
            gradients = (
                [p.grad for p in x if p.grad is not None] for x in (self.actor, self.critic)
            )
            actor, critic = (
                torch.nn.utils.get_total_norm(x, foreach=True).to(local_rows.device)
                for x in gradients
            )
            if ranks.sharded:
                actor, critic = ranks.full_tensor(actor), ranks.full_tensor(critic)
            norm = torch.hypot(actor, critic)
            total = {**total, "rows": local_rows, "actor_norm": actor, "critic_norm": critic}
            total["finite"] = norm + value
            if not math.isfinite(float(total["finite"])):
                raise self._not_finite(total)
            row = torch.stack([total[name].float() for name in self.statistics])
            # Other ranks have other rows, so that ``end`` compares them.
            if self.tolerances is not None and not self._rows and ranks.world == 1:
                self._compare(*self._read(row))
            # g ← g · min(1, max_grad_norm / (|g| + 1e-6))
            if (max_norm := self.config.max_grad_norm) is not None:
                torch.nn.utils.clip_grads_with_norm_(trained, max_norm, norm, foreach=True)
            self.adamw.step()
            self._rows.append(row)
            if self.observer is not None:
                self._report_minibatch(self.observer)

    def _compiled_steps(self, indices: Sequence[Tensor]) -> None:
        """Take steps as compiled code, all at once unless an observer looks at each."""
        assert self.compiled is not None
        for part in [indices] if self.observer is None else [[index] for index in indices]:
            if self.observer is not None:
                self.observer.before_minibatch(part[0], epoch=self._epochs - 1)
            rows = self.compiled(part)
            self._rows += rows
            # Reading the value would make a CUDA graph wait; ``end`` checks it after the epochs.
            if rows and not self._captures and not math.isfinite(rows[-1][-1].item()):
                raise self._not_finite(dict(zip(self.statistics, rows[-1].tolist(), strict=True)))
            if self.observer is not None:
                self._report_minibatch(self.observer)

    def _report_minibatch(self, observer: UpdateObserver) -> None:
        """Call the observer with the statistics of the newest minibatch."""
        observer.after_minibatch(dict(zip(self.statistics, self._rows[-1].tolist(), strict=True)))

    def _read(self, statistics: Tensor) -> tuple[Tensor, bool]:
        """Return the tensor on the CPU, and whether these weights made the batch."""
        if self._current is None:
            return statistics.cpu(), True
        # One copy, because a GPU has to finish its work for each.
        numbers = torch.cat([statistics.flatten(), self._current.to(statistics).view(1)]).cpu()
        return numbers[:-1].view_as(statistics), bool(numbers[-1])

    def _compare(self, row: Tensor, current: bool) -> None:
        """Raise RolloutMismatch if ``row`` [K] of the first minibatch differs from the rollout."""
        if not current or self.tolerances is None:
            return
        measured = agreement.differences(dict(zip(self.statistics, row.tolist(), strict=True)))
        limits = self.tolerances
        if measured.log_prob <= limits.log_prob and measured.value <= limits.value:
            return
        # A few samples show which module differs. Other ranks do not evaluate a sharded one.
        unit, cause = self.config.minibatch_unit, agreement.UNKNOWN
        samples = self._batch.mask.shape[1 if unit == "column" else 0]
        index = torch.arange(min(samples, agreement.SAMPLES[unit]), device=self._batch.mask.device)
        parts = self.cutter.micro_batches(minibatches.take(self._batch, index, unit), self.ranks)
        if not self.ranks.sharded and (part := next(iter(parts), None)) is not None:
            states = zip(self._named_buffers.items(), self._versions, strict=False)
            changed = [name for (name, x), version in states if x._version != version]
            cause = agreement.find_cause(self.loss, part, changed)
        difference = agreement.describe(measured, limits)
        raise RolloutMismatch(f"{cause}; update {self._update}: {difference}")

    def record_versions(self) -> None:
        """Record how often torch has written each buffer, such as the moments of a normaliser.

        While the policy acts, nothing may write them.
        """
        self._versions = [x._version for x in self._named_buffers.values()]

    def epoch_kl(self) -> float:
        """Return approx_kl of this epoch, the mean over its minibatches and over ranks."""
        if self._epoch_start == len(self._rows):
            return 0.0
        table = torch.stack(self._rows[self._epoch_start :])  # [minibatches, statistics]
        # An index of Python numbers would be copied to the device.
        columns = [table[:, self.statistics.index(name)] for name in ("approx_kl", "count")]
        sums = torch.stack(columns, dim=1).double().sum(0)
        if self.ranks.world > 1:
            sums = self.ranks.all_reduce_sum(sums)
        total, elements = sums.tolist()
        return total / max(1.0, elements)

    def end(self) -> OptimizationStats:
        """Return the statistics of all minibatches, and free the batch.

        Raises:
            TrainingError: A minibatch was not finite. Its step changed no weight; in a CUDA graph
                later ones did.
        """
        rows, epochs = self._rows, self._epochs
        sums: dict[str, float] = {} if rows else defaultdict(float)
        if rows:
            table = torch.stack(rows).double()  # [minibatches, statistics]
            if self.ranks.world > 1:
                table = self._over_ranks(table)
            table, current = self._read(table)
            column = {name: table[:, i] for i, name in enumerate(self.statistics)}
            # A CUDA graph leaves the weights unchanged and cannot raise; its error is raised here.
            bad = (~column["finite"].isfinite()).nonzero().flatten().tolist()
            if bad:
                stats = dict(zip(self.statistics, table[bad[0]].tolist(), strict=True))
                raise self._not_finite(stats, f"minibatch {bad[0]}")
            # Compiled steps, and those of several ranks, have not been compared yet.
            self._compare(table[0], current)
            for name, x in column.items():
                sums[name] = float(x.max() if name.endswith("_max") else x.sum())
            # Masked minibatches took no step, see ``MinibatchStep``.
            sums["steps"] = float((column["rows"] > 0).sum())
        del self._batch, self._rows
        if self._runs_compiled:
            assert self.compiled is not None
            self.compiled.end(sums["steps"])
        return OptimizationStats(sums, epochs)

    def _over_ranks(self, table: Tensor) -> Tensor:
        """Return statistics [minibatches, K] of all ranks together."""
        merged = self.ranks.all_reduce_sum(table.clone())
        for i, name in enumerate(self.statistics):
            if name in ("actor_norm", "critic_norm"):  # of the summed gradient: equal on all ranks
                merged[:, i] = table[:, i]
            elif name.endswith("_max"):
                merged[:, i] = self.ranks.all_reduce_max(table[:, i].clone())
        return merged

    def _not_finite(self, stats: Mapping[str, Any], location: str = "") -> TrainingError:
        """Return the error of a loss or gradient; ``location`` empty: the newest epoch."""
        norm = math.hypot(float(stats["actor_norm"]), float(stats["critic_norm"]))
        location = location or f"epoch {self._epochs - 1}"
        return TrainingError(
            f"update {self._update}, {location}: loss {float(stats['loss']):g}, gradient norm"
            f" {norm:g} (not finite), not trained on; lower {self.section}.lr or look for"
            " non-finite rewards and observations"
        )

    # ----------------------------------------------------------------------------------- checkpoint
    def state(self) -> dict[str, Any]:
        """Return everything beyond the weights that the next update depends on."""
        return {"optimizer": self.adamw.state_dict(), "adaptive_factor": self.adaptive_factor}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``; the options of AdamW remain those of the config."""
        # A resumed run may change lr or weight_decay, which the state also contains.
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.adamw.param_groups]
        parameters, saved = [*self.actor, *self.critic], state["optimizer"]
        # A checkpoint contains full tensors, of which this rank keeps its shards.
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
        if self.compiled is not None:
            self.compiled.schedule.close()
