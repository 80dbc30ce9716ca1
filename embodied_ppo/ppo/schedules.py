"""Learning rate and coefficients of the loss from one update to the next.

All are functions of numbers; ``PPO.update`` calls those that the options use.
"""

from __future__ import annotations

import math

from embodied_envs.base.errors import TrainingError
from embodied_ppo.options.schema import AlgorithmConfig

# Range of an adapted coefficient of the entropy bonus; 0 could never grow.
ENTROPY_COEF_RANGE = 1e-5, 1.0
DECAY = 0.9  # of the moving average of the advantages' standard deviation, per update


def learning_rate_factor(config: AlgorithmConfig, update: int, updates: int) -> float:
    """Return the factor of the learning rates in ``update`` (from 0) of ``updates``.

    Warm-up rises linearly over its updates to 1. linear: then from 1 to lr_end over the rest of the
    run. cosine: half a cosine from 1 to lr_end (Loshchilov & Hutter 2017, eq. 5 without restarts).
    After the last update the factor stays constant.
    """
    # Update 0 trains with the factor 1/(warmup + 1), not 0.
    warmup = config.lr_warmup
    if update < warmup:
        return (update + 1) / (warmup + 1)
    progress = min(1.0, (update - warmup) / max(1, updates - warmup))
    if config.lr_schedule == "linear":
        return 1.0 + (config.lr_end - 1.0) * progress
    if config.lr_schedule == "cosine":
        return config.lr_end + (1.0 - config.lr_end) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0


def entropy_factor(kind: str, update: int, updates: int, mean_std: float) -> float:
    """Return the factor of the entropy bonus in ``update`` (from 0) of ``updates``.

    linear:    1 − u/U, after the last update 0
    relative:  (1 − u/U)·m_u / (1 − 0.9^(u+1)),   m_u = 0.9·m_{u−1} + 0.1·std(A_u),  m_{−1} = 0

    The divisor removes the bias of the moving average m towards its initial 0, as in Adam (Kingma
    & Ba 2015, section 3). A are the advantages that the loss reads.

    Args:
        kind: algorithm.entropy_schedule.
        update: u.
        updates: U.
        mean_std: m_u, see ``average``.
    """
    if kind == "constant":
        return 1.0
    factor = 1.0 - min(1.0, update / max(1, updates))
    if kind == "relative":
        factor *= mean_std / (1.0 - DECAY ** (update + 1))
    return factor


def average(mean: float, value: float) -> float:
    """Return the moving average 0.9·mean + 0.1·value."""
    return DECAY * mean + (1.0 - DECAY) * value


def adapted_factor(factor: float, approx_kl: float, desired_kl: float) -> float:
    """Return the factor of the learning rates that keeps approx_kl near desired_kl.

    factor ← factor / 1.5 where KL > 2·desired_kl, factor · 1.5 where KL < desired_kl / 2
    """
    # Between half and twice desired_kl the learning rate stays as it is.
    if approx_kl > 2.0 * desired_kl:
        return max(factor / 1.5, 1e-3)
    if approx_kl < 0.5 * desired_kl:
        return min(factor * 1.5, 30.0)
    return factor


def adapted_entropy_coef(coef: float, entropy: float, target: float) -> float:
    """Return the coefficient c of the entropy bonus after an update.

    c ← clip(c · exp(0.1 · clip(target − H, ±1)), 1e-5, 1)

    H is the entropy in nats as aggregated for the loss; an entropy below the target raises c. This
    is a bounded, multiplicative form of the dual ascent of Haarnoja et al. 2018, eq. 18, which also
    works for negative differential entropies.

    Args:
        coef: c.
        entropy: Mean H of the update.
        target: Target entropy, nats.

    Raises:
        TrainingError: The entropy is not finite.
    """
    if not math.isfinite(entropy):
        raise TrainingError(
            f"entropy = {entropy}: the entropy controller needs a finite one; lower lr or"
            " max_grad_norm"
        )
    # exp keeps c positive, and the clipped error limits one update to a factor of exp(±0.1).
    error = min(max(target - entropy, -1.0), 1.0)
    smallest, largest = ENTROPY_COEF_RANGE
    return min(max(coef * math.exp(0.1 * error), smallest), largest)


def adapted_kl_coef(coef: float, kl: float, n: int, *, target: float, horizon: float) -> float:
    """Return the coefficient β of the KL penalty after an update.

    e = clip(KL/target − 1, ±0.2);  β ← β·(1 + e·n/horizon) for n sequences

    Source: Ziegler et al. 2019, section 2.2. The KL is a mean per token as in verl, not a sum.

    Args:
        coef: β.
        kl: Mean over sequences of the mean KL per token, nats.
        n: Number of sequences.
        target: Target KL, nats per token.
        horizon: Number of sequences over which β adapts.

    Raises:
        TrainingError: ``kl`` is not finite.
    """
    if not math.isfinite(kl):
        raise TrainingError(
            f"KL to the reference = {kl}: the KL controller needs a finite one; lower lr or"
            " max_grad_norm"
        )
    # The clipped error limits the change of β in one update to 20 % · n/horizon.
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coef * (1.0 + error * n / horizon)
