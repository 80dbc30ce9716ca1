"""The first minibatch of an update must have the log-probabilities and values of its rollout.

Before the first optimiser step the learner evaluates the actions with the weights that chose them,
so that only rounding may differ. A larger difference is an error that no other metric shows:
dropout, statistics of a batch, a wrong recurrent state, or different weights. ``find_cause`` names
the module, from further forward passes that a run without a difference does not need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from embodied_envs.base import tree
from embodied_ppo.core.recurrent_state import START, memory_size
from embodied_ppo.options.schema import Config
from embodied_ppo.policies.recurrent import RecurrentLayer

# Tolerance of float32. Runs measure up to 1e-7, and 2e-4 with standard deviations of exp(-5).
ROUNDING = 5e-3
# Tolerance of bfloat16, and of an engine with other kernels (log-probabilities: 0.02 to 0.1).
LOW_PRECISION = 0.3
# Samples, or columns, with which ``find_cause`` evaluates the model.
SAMPLES = {"step": 64, "column": 8}
# Hint where no module is found.
UNKNOWN = "compare weights, normaliser and precision of the process that acts with the learner's"


class Tolerances(NamedTuple):
    """Largest root mean squares of the differences; see ``differences``."""

    log_prob: float
    value: float


def tolerances(config: Config) -> Tolerances:
    """Return the tolerances of a run; infinite where a difference is intended."""
    language = config.mode == "reasoning"
    dtype = config.actor.model.dtype if language else config.model.dtype
    value = ROUNDING if dtype == "float32" else LOW_PRECISION
    other_engine = language and config.rollout.engine != "builtin"
    log_prob = LOW_PRECISION if other_engine else value
    if config.algorithm.rpo_alpha is not None:  # shifts the means
        log_prob = math.inf
    return Tolerances(log_prob, value)


def differences(stats: Mapping[str, float]) -> Tolerances:
    """Return the root mean squares of the differences in a minibatch.

        log-probabilities  sqrt(mean (log π − log π_old)²) = sqrt(2·KL) for small differences
        values             sqrt(mean (V − V_old)² / (1 + V_old²))

    The k3 estimate of KL, (r − 1) − log r, is ½·(log r)² + O((log r)³).

    Args:
        stats: Sums over the minibatch, see ``PPOLoss`` and ``CriticLoss``.
    """
    # Rounding can make the sum of a KL that is 0 negative.
    kl = max(0.0, stats.get("approx_kl", 0.0)) / max(1.0, stats.get("count", 0.0))
    value = stats.get("value_difference", 0.0) / max(1.0, stats["rows"])
    return Tolerances(math.sqrt(2 * kl), math.sqrt(value))


def describe(measured: Tolerances, limits: Tolerances) -> str:
    """Return a clause that names the differences above their limits."""
    named = zip(("log-probabilities", "values"), measured, limits, strict=True)
    text = " and ".join(f"in {name} by {x:.2g} (limit {n:g})" for name, x, n in named if x > n)
    return f"the first minibatch differs from the rollout, as root mean square {text}"


# ---------------------------------------------------------------------------- search of the cause
class Call(NamedTuple):
    """Tensors that a call of a module received and returned."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]


def find_cause(loss: Any, batch: Any, changed: Sequence[str]) -> str:
    """Return a hint that names the module, or other cause, of a difference from the rollout.

    Args:
        loss: A ``MinibatchLoss``.
        batch: Micro-batch of a few samples, or columns.
        changed: Buffers of the model that were written between the last update and this one.
    """
    model = loss.model
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    calls, repeated = _calls(loss, batch), _calls(loss, batch)
    if (name := _differing(calls, repeated)) is not None:
        return (
            f"remove {name} ({kinds[name]}): called again it returns other numbers, as dropout,"
            " noise or a normaliser that it updates do"
        )
    columns = batch.mask.ndim == 2
    half = slice(0, max(1, batch.mask.shape[columns] // 2))
    part = tree.index(batch, (slice(None), half) if columns else half)
    if (name := _differing(calls, _calls(loss, part))) is not None:
        return (
            f"remove {name} ({kinds[name]}): its results depend on the other samples of a batch,"
            " as those of batch normalisation do"
        )
    if _starts_agree(loss, batch):
        names = [name for name, x in model.named_modules() if isinstance(x, RecurrentLayer)]
        return (
            f"check the stored state of {' and '.join(names)}: only first steps of episodes, which"
            " need none, agree"
        )
    if changed:
        names = ", ".join([*changed[:3], *(["others"] if changed[3:] else [])])
        return f"find what writes {names} between acting and learning"
    return UNKNOWN


@torch.no_grad()
def _calls(loss: Any, batch: Any) -> list[Call]:
    """Evaluate the loss and return the calls of all modules, in order of their end."""
    calls: list[Call] = []
    received: list[list[Tensor]] = []
    names = {module: name for name, module in loss.model.named_modules()}

    def copies(values: Any) -> list[Tensor]:
        # Copies, because modules may work in place.
        return [x.clone() for x in tree.leaves(values) if isinstance(x, Tensor)]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        received.append(copies([args, kwargs]))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(Call(names[module], received.pop(), copies(output)))

    handles = []
    for module in names:
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _differing(first: list[Call], second: list[Call]) -> str | None:
    """Return the first module that returned other numbers for equal inputs.

    An inner module ends before the module that calls it, so the innermost one is returned.
    """
    for a, b in zip(first, second, strict=False):
        if a.name == b.name and _equal(a.inputs, b.inputs) and not _equal(a.outputs, b.outputs):
            return a.name
    return None


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Return whether the leading rows of ``first`` are those of ``second``, except for rounding."""
    pairs = [(x[: len(y)] if y.ndim else x, y) for x, y in zip(first, second, strict=True)]
    return all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), 1e-3, 1e-5, equal_nan=True)
        for x, y in pairs
    )


@torch.no_grad()
def _starts_agree(loss: Any, batch: Any) -> bool:
    """Return whether values differ only where an episode has a state to continue."""
    if not (memory_size(loss.model) and isinstance(batch.inputs, dict) and batch.mask.ndim == 2):
        return False
    terms, start = loss.evaluate(batch), batch.inputs[START] & batch.mask  # [T, B]
    error = (terms.value - batch.value).abs()
    return bool(start.any() and error[start].max() < 0.1 * error[batch.mask & ~start].max())
