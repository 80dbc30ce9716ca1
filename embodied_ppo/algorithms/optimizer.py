"""Epochs x minibatches of one loss with one AdamW, eager or as compiled code."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.algorithms import losses
from embodied_ppo.algorithms.ppo_loss import SETTINGS, ActorCriticLoss, MinibatchStep, TokenLoss, adamw_settings, take
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile, tree
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.random import sampling_key
from embodied_ppo.core.types import Batch, TrainingError


def learning_rate_factor(config: AlgorithmConfig, update: int, updates: int) -> float:
    """What the schedule multiplies the learning rates with in ``update`` (from 0) of ``updates``.

    warm-up rises linearly over its updates; linear: 1 -> lr_end; cosine: half a cosine from 1 to lr_end (Loshchilov &
    Hutter 2017, eq. 5 without restarts). Beyond the last update the factor stays.
    """
    warmup = min(1.0, (update + 1) / (config.lr_warmup + 1))
    progress = min(1.0, update / max(1, updates))
    if config.lr_schedule == "linear":
        return warmup * (1.0 + (config.lr_end - 1.0) * progress)
    if config.lr_schedule == "cosine":
        return warmup * (config.lr_end + (1.0 - config.lr_end) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    return warmup


@dataclass(frozen=True, slots=True)
class OptimizationStats:
    """What the minibatches of an update told.

    sums       statistic -> its sum over all minibatches; "steps" of the optimiser among them
    ratio_max  the largest probability ratio
    epochs     begun
    """

    sums: Mapping[str, float]
    ratio_max: float
    epochs: int


class MinibatchOptimizer:
    """A module, a loss of it, and the optimiser: actor and critic parameters with a learning rate each."""

    def __init__(
        self,
        objective: ActorCriticLoss | TokenLoss,
        groups: Mapping[str, list[nn.Parameter]],
        config: AlgorithmConfig,
        *,
        updates: int,
        seed: int,
        later: compile.CompileSchedule | None = None,
        dump_dir: Path | None = None,
        notice: Callable[[str], None] = lambda text: None,
        ranks: Ranks | None = None,
    ) -> None:
        """``groups``: "actor" and "critic", parameters of the objective's policy; one may be empty. ``updates`` is the
        length of the run that schedules span. ``later``: from when on minibatches run as compiled code (None: never).
        ``dump_dir`` receives the batch that made a loss or gradient non-finite. ``notice`` hears what a user should
        know once. ``ranks``: who else learns, each from its own columns; a minibatch is the sum of everyone's equal
        shares."""
        self.objective, self.config = objective, config
        self.module: nn.Module = objective.policy  # pyright: ignore[reportAttributeAccessIssue]
        self.buffers: list[str] = []
        """Buffers of the module that the loss reads."""
        self.later = later or compile.CompileSchedule(None)
        self.ranks = ranks or Ranks()
        self.updates, self.seed, self.dump_dir, self.notice = updates, seed, dump_dir, notice
        self.actor, self.critic = groups["actor"], groups["critic"]
        name = {id(p): n for n, p in self.module.named_parameters()}
        self.names = {who: [name[id(p)] for p in group] for who, group in groups.items()}
        self.lr = {"actor": config.lr, "critic": config.lr if config.value_lr is None else config.value_lr}
        self.optimizer = torch.optim.AdamW(
            [{"params": self.actor, "lr": self.lr["actor"]}, {"params": self.critic, "lr": self.lr["critic"]}],
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.adaptive_factor = 1.0
        self.statistics: tuple[str, ...] = ()
        self.beside: Callable[[torch.Generator], Tensor] | None = None
        """A loss that eager minibatches of the actor add to theirs, of samples that it draws."""
        self.drawn = torch.Generator()
        self.beside_told: list[float] = []

    def optimize(self, batch: Batch, update: int, *, warming: bool, entropy_coef: float) -> OptimizationStats:
        """``update_epoch`` passes over a batch. ``warming``: only the critic learns. Raises TrainingError."""
        c = self.config
        self._set_learning_rates(update)
        self.drawn.manual_seed(
            sampling_key(self.seed, update, "beside", *([self.ranks.rank] if self.ranks.rank else []))
        )
        self.beside_told.clear()
        run = self._compiled(batch, update, warming=warming)
        if run is None:
            step = self._eager_step(batch, warming=warming, entropy_coef=entropy_coef)
        else:
            step = self._compiled_step(run, batch, entropy_coef=entropy_coef)
        told: list[Tensor] = []  # per minibatch; on the device until the last one is done
        epochs = 0
        for epoch in range(c.update_epoch):
            before = len(told)
            for index in self._minibatches(batch, update, epoch):
                told.append(step(index, f"update {update}, epoch {epoch}"))
            epochs = epoch + 1
            if c.target_kl_stop is not None and len(told) > before:
                kl_sum, count = self._totals(told[before:], "approx_kl", "count")
                if kl_sum / max(1.0, count) > c.target_kl_stop:
                    break
        sums, ratio_max = self._sums(told, f"update {update}")
        if run is not None:
            for count in _adam_state(self.optimizer).steps:
                count += sums["steps"]
        return OptimizationStats(sums, ratio_max, epochs)

    def _totals(self, told: list[Tensor], *names: str) -> list[float]:
        columns = [self.statistics.index(name) for name in names]
        return self.ranks.add(torch.stack(told)[:, columns].double().sum(0)).tolist()

    def _sums(self, told: list[Tensor], where: str) -> tuple[dict[str, float], float]:
        """Sums of the statistics over all minibatches, ``steps`` among them, and the largest ratio.

        Raises TrainingError where a minibatch was not finite and nobody looked yet; it trained nothing.
        """
        if not told:
            return defaultdict(float), 0.0
        table = self._everyones(torch.stack(told).double()).cpu()  # [minibatches, statistics]
        column = {name: table[:, i] for i, name in enumerate(self.statistics)}
        bad = (~column["finite"].isfinite()).nonzero().flatten().tolist()
        if bad:
            stats = dict(zip(self.statistics, table[bad[0]].tolist(), strict=True))
            raise self._not_finite(stats, f"{where}, minibatch {bad[0]}")
        sums = defaultdict(float, {name: float(x.sum()) for name, x in column.items()})
        sums["steps"] = float((column["rows"] > 0).sum())
        return sums, float(column["ratio_max"].max())

    def _everyones(self, table: Tensor) -> Tensor:
        """Statistics [minibatches, K] of all ranks together."""
        if self.ranks.world == 1:
            return table
        same = [self.statistics.index(name) for name in ("actor_norm", "critic_norm")]
        top = self.statistics.index("ratio_max")
        merged = self.ranks.add(table.clone())
        merged[:, same] = table[:, same]
        merged[:, top] = self.ranks.top(table[:, top].clone())
        return merged

    # --------------------------------------------------------------------------------------------- minibatches
    def _minibatches(self, batch: Batch, update: int, epoch: int) -> Sequence[Tensor]:
        """Index tensors of a fresh permutation; every sample (or column) once, but minibatches that are all masked."""
        columns = self.config.minibatch_unit == "column"
        mask = batch.mask.any(0) if columns else batch.mask
        size = self._size(batch)
        rank = [self.ranks.rank] if self.ranks.rank else []  # the first draws as one that is alone
        generator = torch.Generator(mask.device).manual_seed(sampling_key(self.seed, update, "shuffle", epoch, *rank))
        order = torch.randperm(mask.shape[0], generator=generator, device=mask.device)
        if self.later.captures:  # the graph itself leaves them out, and nobody has to wait for the mask
            return order.split(size)
        some = torch.stack([part.sum() for part in mask[order].split(size)])  # momentum alone would move weights
        counts = self.ranks.add(some).tolist()
        return [index for index, count in zip(order.split(size), counts, strict=True) if count]

    def _size(self, batch: Batch) -> int:
        """This rank's samples (or columns) of a minibatch."""
        share = self.config.global_batch_size // self.ranks.world
        return share // (batch.mask.shape[0] if self.config.minibatch_unit == "column" else 1)

    def _micro(self, part: Batch) -> Iterator[Batch]:
        """The minibatch cut so that a forward holds at most micro_batch_size samples."""
        size = self.config.micro_batch_size
        columns = self.config.minibatch_unit == "column"
        total = part.mask.shape[1 if columns else 0]
        size = total if size is None else size // (part.mask.shape[0] if columns else 1)
        if size >= total:
            yield part
            return
        for i in range(0, total, size):
            cut = slice(i, i + size)
            yield tree.index(part, (slice(None), cut) if columns else cut)

    # --------------------------------------------------------------------------------------------- one step
    def _compiled(self, batch: Batch, update: int, *, warming: bool) -> compile.Function | None:
        """The minibatch as compiled code, None before its time. Sets the names of the statistics."""
        program = MinibatchStep(self.objective, self.names["actor"], self.names["critic"], batch, self.buffers)
        self.statistics = program.statistics()

        def example() -> compile.Example:
            size = self._size(batch)
            state, where = _adam_state(self.optimizer), batch.mask.device
            settings, index = torch.zeros(len(SETTINGS), device=where), torch.arange(size, device=where)
            state = [*state.parameters, *state.first, *state.second]
            return compile.Example(program, state, [settings, index, *self._fixed(batch)])

        run = self.later.get(update, example)
        return None if warming else run

    def _fixed(self, batch: Batch) -> list[Tensor]:
        """What is the same in every minibatch of an update."""
        return [*(self.module.get_buffer(name) for name in self.buffers), *(x.contiguous() for x in tree.leaves(batch))]

    def _compiled_step(
        self, run: compile.Function, batch: Batch, *, entropy_coef: float
    ) -> Callable[[Tensor, str], Tensor]:
        """``_step`` as one call into the library; equal to float32 rounding."""
        c, state = self.config, _adam_state(self.optimizer)
        settings = adamw_settings(
            c,
            c.update_epoch * (batch.mask.shape[1 if c.minibatch_unit == "column" else 0] // self._size(batch)),
            lr=[group["lr"] for group in self.optimizer.param_groups],
            steps=[int(self.optimizer.state[group[0]]["step"]) if group else 0 for group in (self.actor, self.critic)],
            entropy_coef=entropy_coef,
        )
        rows, leaves = iter(settings.to(batch.mask.device).unbind()), self._fixed(batch)
        tensors = [*state.parameters, *state.first, *state.second]

        def step(index: Tensor, where: str) -> Tensor:
            (stats,) = run([*tensors, next(rows), index, *leaves])
            if not self.later.captures and not math.isfinite(stats[-1].item()):  # nothing has changed
                named = dict(zip(self.statistics, stats.tolist(), strict=True))
                raise self._not_finite(named, where, take(batch, index, c.minibatch_unit))
            return stats

        return step

    def _eager_step(self, batch: Batch, *, warming: bool, entropy_coef: float) -> Callable[[Tensor, str], Tensor]:
        def step(index: Tensor, where: str) -> Tensor:
            part = take(batch, index, self.config.minibatch_unit)
            return self._step(part, warming=warming, entropy_coef=entropy_coef, where=where)

        return step

    def _step(self, part: Batch, *, warming: bool, entropy_coef: float, where: str) -> Tensor:
        """Gradient of one minibatch and one optimiser step. Raises TrainingError before training on a NaN."""
        c = self.config
        self.optimizer.zero_grad(set_to_none=True)
        rows, whole = losses.denominator(part.mask), losses.denominator(part.mask, how=c.loss_agg_func)
        if self.ranks.world > 1:
            rows, whole = self.ranks.add(torch.stack([rows, whole])).unbind()
        total: dict[str, Any] = {}
        for micro in self._micro(part):
            loss, stats = self.objective(micro, whole, rows, entropy_coef=entropy_coef, warming=warming)
            loss.backward()
            if not total:
                total = stats
            else:
                top = max(total["ratio_max"], stats["ratio_max"])
                total = {name: total[name] + value for name, value in stats.items()} | {"ratio_max": top}
        if not total:  # every column of this rank is masked
            total = dict.fromkeys(self.objective.statistics(part), rows.new_zeros(()))
        if warming:
            for p in self.actor:
                p.grad = None
        elif self.beside is not None:
            beside = self.beside(self.drawn)
            (beside / self.ranks.world).backward()
            self.beside_told.append(float(beside.detach()))
        loss = self.ranks.add_gradients(self.critic if warming else [*self.actor, *self.critic], total["loss"])
        norms = (_gradient_norm(group, part.mask.device) for group in (self.actor, self.critic))
        actor, critic = map(self.ranks.whole, norms)
        norm = torch.hypot(actor, critic)
        total |= {"actor_norm": actor, "critic_norm": critic, "finite": norm + loss}
        if not math.isfinite(float(total["finite"])):
            raise self._not_finite(total, where, part)
        if c.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_([*self.actor, *self.critic], c.max_grad_norm, norm, foreach=True)
        self.optimizer.step()
        return torch.stack([total[name].float() for name in self.statistics])

    def _not_finite(self, stats: Mapping[str, Any], where: str, part: Batch | None = None) -> TrainingError:
        """The error to raise; keeps the batch, where it is known, with the policy that it made non-finite."""
        norm = math.hypot(float(stats["actor_norm"]), float(stats["critic_norm"]))
        text = f"{where}: loss {float(stats['loss']):g}, gradient norm {norm:g} (not finite), not trained on"
        if part is not None and self.dump_dir is not None:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            path = self.dump_dir / (f"bad_batch_{rank}.pt" if (rank := self.ranks.rank) else "bad_batch.pt")
            leaves = {name: value for name in part.__slots__ if (value := getattr(part, name)) is not None}
            policy = self.ranks.whole_state(self.module.state_dict())
            torch.save({"batch": leaves, "policy": policy, "where": where}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
            text += f"; the batch is in {path}"
        return TrainingError(f"{text}; lower algorithm.lr or look for non-finite rewards and observations")

    def adapt(self, sums: Mapping[str, float]) -> None:
        """lr_schedule=adaptive: hold approx_kl near desired_kl."""
        if self.config.lr_schedule != "adaptive":
            return
        approx_kl = float(sums["approx_kl"]) / max(1.0, float(sums["count"]))
        if approx_kl > 2.0 * self.config.desired_kl:
            self.adaptive_factor = max(self.adaptive_factor / 1.5, 1e-3)
        elif approx_kl < 0.5 * self.config.desired_kl:
            self.adaptive_factor = min(self.adaptive_factor * 1.5, 30.0)

    def _set_learning_rates(self, update: int) -> None:
        factor = learning_rate_factor(self.config, update, self.updates) * self.adaptive_factor
        for group, name in zip(self.optimizer.param_groups, ("actor", "critic"), strict=True):
            group["lr"] = self.lr[name] * factor

    # --------------------------------------------------------------------------------------------- checkpoint
    def state(self) -> dict[str, Any]:
        """Everything beyond the weights that the next update depends on."""
        return {"optimizer": self.optimizer.state_dict(), "adaptive_factor": self.adaptive_factor}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        parameters, saved = [*self.actor, *self.critic], state["optimizer"]
        held = {
            i: {key: self.ranks.part(x, parameters[i]) for key, x in moments.items()}
            for i, moments in saved["state"].items()
        }
        self.optimizer.load_state_dict({**saved, "state": held})
        for group, option in zip(self.optimizer.param_groups, options, strict=True):
            group.update(option)  # the configuration's, should it have changed
        if self.config.lr_schedule == "adaptive":  # what does not adapt is the configuration's
            self.adaptive_factor = state["adaptive_factor"]

    def close(self) -> None:
        """Give up a compilation under way."""
        self.later.close()


class TokenBudgetOptimizer(MinibatchOptimizer):
    """Of a language model: micro-batches hold a budget of tokens, rows of like length together, without their padding.

    (On a CPU that is faster than packing rows into one.) The result does not depend on the budget.
    """

    def __init__(
        self,
        objective: TokenLoss,
        config: AlgorithmConfig,
        *,
        columns: int,
        tokens: int | None,
        critic: bool = False,
        **rest: Any,
    ) -> None:
        """``columns``: sequences in one optimiser step; ``tokens``: at most in a micro-batch, padding included (
        one row at least); None: all at once.
        ``critic``: whose parameters these are. ``rest`` as for ``MinibatchOptimizer``."""
        parameters = list(objective.policy.parameters())
        groups = {"actor": [] if critic else parameters, "critic": parameters if critic else []}
        super().__init__(objective, groups, config, **rest)
        self.columns, self.tokens = columns, tokens
        self.buffers = [name for name, _ in self.module.named_buffers()]

    def _size(self, batch: Batch) -> int:
        return self.columns

    def _micro(self, part: Batch) -> Iterator[Batch]:
        """Columns sorted by length, cut by the budget, trimmed."""
        most = self.config.micro_batch_size
        cuts = list(cut_columns(part.mask, part.inputs["place"], self.tokens, most))
        masked = replace(part, mask=torch.zeros_like(part.mask))
        for _ in range(self.ranks.passes(len(cuts)) - len(cuts)):
            yield self._cut(masked, part.mask.new_zeros(1, dtype=torch.int64), 1, 1)
        for index, width, rows in cuts:
            yield self._cut(part, index, width, rows)

    @staticmethod
    def _cut(part: Batch, index: Tensor, width: int, rows: int) -> Batch:
        cut = take(part, index, "column")
        place = torch.where(cut.mask, cut.inputs["place"], 0)[:rows]  # masked places would lengthen packed rows
        rest = tree.map(lambda x: x[:rows], replace(cut, inputs={}))
        return replace(rest, inputs={"row": cut.inputs["row"][:width], "place": place})


def cut_columns(
    mask: Tensor, place: Tensor, tokens: int | None, columns: int | None = None
) -> Iterator[tuple[Tensor, int, int]]:
    """Columns [N] of mask and place [T, N] in parts: (index, tokens of a row that count, response tokens that count).

    Sorted by length; a part holds at most ``tokens``, padding included, or one column, and at most ``columns``. Those
    that are all masked are left out.
    """
    last = torch.where(mask, place, -1).amax(0) + 1  # [N] what anything depends on
    order = last.argsort(descending=True, stable=True)
    lengths = last[order].tolist()
    count = sum(x > 0 for x in lengths)
    rows = (mask * torch.arange(1, len(mask) + 1, device=mask.device).unsqueeze(1)).amax(0)[order].tolist()
    start = 0
    while start < count:
        size = min(count if tokens is None else max(1, tokens // lengths[start]), columns or count)
        part = slice(start, min(count, start + size))
        yield order[part], lengths[start], max(rows[part])
        start = part.stop


@dataclass(frozen=True)
class _AdamState:
    """Every parameter, actor first, with its moments and its count of steps."""

    parameters: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


def _adam_state(optimizer: torch.optim.Optimizer) -> _AdamState:
    """The optimiser's state, made where its first step has not made it yet."""
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


def _gradient_norm(parameters: list[nn.Parameter], device: torch.device) -> Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(grads, foreach=True)
