"""The rollout and the minibatches of an update, recreated from the nearest checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from embodied_ppo.api import Run, path_text, whole_number
from embodied_ppo.core.guarded_files import replace_file
from embodied_ppo.core.types import Metrics, Samples, Trajectory
from embodied_ppo.ppo.minibatches import PolicyLoss, take
from embodied_ppo.tools import reexecution
from embodied_ppo.training.checkpoint import to_bytes
from embodied_ppo.training.logging import numbers
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.run_directory import check_writable, report_write_errors


@dataclass(frozen=True)
class Minibatch:
    """One step of the optimiser. B samples; with minibatch_unit=column, B columns of T samples.

    Attributes:
        epoch: Number of the epoch, from 0.
        index: int64 [B], samples t·N + n of the rollout, or columns n.
        statistics: Statistics of the loss, sums over the minibatch: see
            ``PPOLoss.forward``, and the norms of the gradients.
        log_ratio: [B, ..] or [T, B, ..], log of the probability ratio of each sample before the
            step. None where the loss has no ratio.
        value: [B, ..] or [T, B, ..], output of the value head before the step. None where the
            critic is a separate model.
    """

    epoch: int
    index: Tensor
    statistics: Mapping[str, float]
    log_ratio: Tensor | None
    value: Tensor | None


@dataclass
class Replay:
    """An update that was executed again.

    Attributes:
        run: Directory of the run.
        update: The update, from 1.
        rollout: Name -> tensor [T, N, ..] for T steps of N environments (tokens of N sequences):
            obs (or obs.NAME), action, log_prob, value, next_value, reward, terminated, truncated,
            mask, version and replay.NAME of ``core.types.Trajectory``, advantage and returns as the
            loss reads them, shaped and normalised, and where the loss has them weight
            (off-policy correction) and ref_log_prob (log-probability under the reference policy).
        minibatches: The steps of the optimiser in order.
        minibatch_unit: "step" or "column", what ``Minibatch.index`` counts.
        metrics: Metrics of the update.
        differences: Metrics in which the update differs from the run, as "update N: NAME"; empty
            where it was repeated bit for bit.
        notes: Lines on why numbers may differ: versions, threads, devices.
    """

    run: Path
    update: int
    rollout: dict[str, Tensor] = field(default_factory=dict)
    minibatches: list[Minibatch] = field(default_factory=list)
    minibatch_unit: Literal["step", "column"] = "step"
    metrics: Mapping[str, float] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def num_envs(self) -> int:
        """Number of environments (sequences), N."""
        return self.rollout["reward"].shape[1]

    def position(self, sample: int) -> tuple[int, int]:
        """Return (step of the rollout, environment) of an entry of ``Minibatch.index``."""
        return divmod(int(sample), self.num_envs)

    def save(self, out: Path) -> Path:
        """Write update_XXXXXX.pt and return its path.

        ``torch.load(path, weights_only=True)`` returns a dictionary with the attributes.

        Raises:
            ConfigError: The folder cannot be written.
        """
        path = out / f"update_{self.update:06d}.pt"
        content = {part.name: getattr(self, part.name) for part in fields(self)}
        content |= {"run": str(self.run), "minibatches": [asdict(m) for m in self.minibatches]}
        with report_write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
            # On a full disk torch, writing the file itself, would raise RuntimeError.
            replace_file(path, to_bytes(content))
        return path


def replay(
    run: str | Path | Run, *, update: int, out: str | Path | None = None, progress: bool = True
) -> Replay:
    """Recreate the rollout and the minibatches of an update, for a notebook.

    Args:
        run: Directory of a run in one process, or a ``Run``; it is only read.
        update: The update, from 1: row ``update`` of metrics.jsonl.
        out: Directory for ``Replay.save``; None: nothing is written.
        progress: Show messages on stderr.

    Raises:
        ConfigError, CheckpointError, EnvError: The update cannot be executed again.
        TrainingError: The update failed.
    """
    bar, update = Progress(not progress), whole_number("update", update)
    source_run = reexecution.run_directory(path_text(run))
    out = None if out is None else Path(path_text(out, "out"))
    reexecution.check_completed(source_run, update, least=1)
    if out is not None:
        check_writable(out)
    start, _ = reexecution.nearest_start(source_run, update - 1, bar.say)
    result = Replay(source_run.resolve(), update)
    with tempfile.TemporaryDirectory(prefix="embodied-ppo-replay-") as folder:
        repeated, recorder = Path(folder) / "run", _Recorder(result)
        result.differences, result.notes = reexecution.repeat(
            source_run, repeated, start=start, stop=update, say=bar.say, observe=recorder
        )
    if out is not None:
        result.save(out)
    return result


class _Recorder:
    """Adds experience and minibatches to the replay; ``core.types.UpdateObserver``."""

    def __init__(self, result: Replay) -> None:
        self.result, self.active = result, False

    def on_experience(self, experience: Trajectory, *, update: int) -> None:
        self.active = update == self.result.update - 1  # counted from 0
        if not self.active:
            return
        for part in fields(experience):
            if part.name != "kept":
                self.result.rollout |= _named(part.name, getattr(experience, part.name))

    def on_batch(self, batch: Samples, *, loss: Any) -> None:
        if not self.active:
            return
        self._batch, self._loss = batch, loss
        unit = self.result.minibatch_unit = loss.config.minibatch_unit
        shape = self.result.rollout["mask"].shape[:2]
        for name in ("value", "advantage", "returns", "weight", "ref_log_prob"):
            x = getattr(batch, name, None)  # each loss has its own fields
            if x is not None:
                x = x if unit == "column" else x.unflatten(0, shape)
                self.result.rollout[name] = x.detach().cpu().clone()

    def before_minibatch(self, index: Tensor, *, epoch: int) -> None:
        if self.active:
            self._minibatch_before_step = (epoch, index.cpu(), *self._evaluate(index))

    def after_minibatch(self, statistics: Mapping[str, float]) -> None:
        if self.active:
            epoch, index, log_ratio, value = self._minibatch_before_step
            minibatch = Minibatch(epoch, index, dict(statistics), log_ratio, value)
            self.result.minibatches.append(minibatch)

    def on_update(self, metrics: Metrics) -> None:
        if self.active:
            self.result.metrics = numbers(metrics)

    @torch.no_grad()
    def _evaluate(self, index: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return log-ratios and values of a minibatch, in parts of micro_batch_size samples."""
        if not isinstance(self._loss, PolicyLoss):
            return None, None
        unit = self.result.minibatch_unit
        dim, rows = (1, self._batch.mask.shape[0]) if unit == "column" else (0, 1)
        limit = self._loss.config.micro_batch_size or len(index) * rows
        ratios: list[Tensor] = []
        values: list[Tensor | None] = []
        for part in index.split(max(1, limit // rows)):
            minibatch: Any = take(self._batch, part, unit)
            terms = self._loss.evaluate(minibatch)
            ratios.append((terms.log_prob - minibatch.log_prob).cpu())
            values.append(None if terms.value is None else terms.value.cpu())
        value = [x for x in values if x is not None]
        return torch.cat(ratios, dim=dim), torch.cat(value, dim=dim) if value else None


def _named(name: str, value: Any) -> dict[str, Tensor]:
    """Return the tensors of a field of a trajectory, copied; nested ones get names with dots."""
    if isinstance(value, Mapping):
        parts = [_named(f"{name}.{key}", entry) for key, entry in value.items()]
        return {key: x for part in parts for key, x in part.items()}
    return {name: value.detach().cpu().clone()} if isinstance(value, Tensor) else {}
