"""Metrics of an update, see docs/metrics.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

from embodied_ppo.core.running_stats import explained_variance, masked_moments, read_numbers
from embodied_ppo.core.types import Mean, Metrics, Trajectory
from embodied_ppo.ppo.learner_state import LearnerState
from embodied_ppo.ppo.roles import OptimizationStats, SharedCritic


def of_advantages(
    advantage: Tensor, returns: Tensor, t: Trajectory, shares: Mapping[str, Tensor]
) -> tuple[Metrics, float]:
    """Return metrics of advantages before normalisation and of returns, and their number.

    Args:
        advantage: [T, N].
        returns: [T, N], or [T, N, G] of reward groups.
        t: Experience; its values are shaped as the returns.
        shares: Reward group -> its share of the advantage; empty: there is one group.
    """
    raw = masked_moments(advantage, t.mask)
    value, variances = t.value, []
    if shares and value.ndim == returns.ndim:
        variances = [
            explained_variance(value[..., k], returns[..., k], t.mask) for k in range(len(shares))
        ]
        value, returns = value.sum(-1), returns.sum(-1)
    elif shares:  # there is no critic
        returns = value
    # One transfer for all of them: on a GPU the host would wait for each.
    explained, mean, std, zeros, count, *others = read_numbers(
        explained_variance(value, returns, t.mask),
        raw.mean,
        raw.var.sqrt(),
        ((advantage == 0) & t.mask).sum(),
        raw.count,
        *shares.values(),
        *variances,
    )
    metrics: Metrics = {
        "value/explained_variance": explained,
        "advantage/mean": mean,
        "advantage/std": std,
        "advantage/zero_fraction": Mean(zeros, count),
    }
    tags = [f"advantage/share/{name}" for name in shares]
    tags += [f"value/explained_variance/{name}" for name in shares]
    return metrics | dict(zip(tags, others, strict=False)), count


def with_optimization(
    results: Metrics, learner: LearnerState, actor: OptimizationStats, critic: OptimizationStats
) -> Metrics:
    """Return metrics with those of the epochs and the coefficients that they used."""
    c, lr, model = learner.config, learner.optimizer.learning_rates, learner.separate_critic
    # One optimiser trains both, so that its statistics are those of the critic, too.
    if isinstance(learner.critic, SharedCritic):
        critic = actor
    else:
        lr = lr[0], 0.0 if model is None else model.learning_rate
    # Without a minibatch all sums are 0. An unknown name among existing sums is an error.
    a, v = (stats.sums or defaultdict(float) for stats in (actor, critic))
    # Losses are means over a minibatch already, so they are divided by the number of steps.
    results = results | {
        "policy/loss": Mean(a["policy_loss"], a["steps"]),
        "policy/approx_kl": Mean(a["approx_kl"], a["count"]),
        "policy/clip_fraction": Mean(a["clip_fraction"], a["count"]),
        "policy/ratio_max": a["ratio_max"],
        "policy/entropy": Mean(a["entropy"], a["steps"]),
        "policy/grad_norm": Mean(a["actor_norm"], a["steps"]),
        "policy/lr": lr[0],
        "policy/epochs": float(actor.epochs),
        "value/loss": Mean(v["value_loss"], v["steps"]),
        "value/grad_norm": Mean(v["critic_norm"], v["steps"]),
        "value/lr": lr[1],
    }
    # Metrics of optional terms exist only where the options use these terms.
    if c.clip_ratio_c is not None and c.policy_loss == "clip":
        results["policy/dual_clip_fraction"] = Mean(a["dual_clip_fraction"], a["count"])
    if c.value_clip is not None:
        results["value/clip_fraction"] = Mean(v["value_clipped"], v["rows"])
    # With a KL penalty in the reward, ``rewards`` has measured this metric on the rollout.
    if c.use_kl_loss and not c.use_kl_in_reward:
        results["kl/to_reference"] = Mean(a["kl"], a["rows"])
    if c.positive_nll_weight:
        results["policy/positive_nll"] = Mean(a["positive_nll"], a["steps"])
    if learner.symmetry is not None:
        results["policy/symmetry_error"] = Mean(a["symmetry_error"], a["steps"])
    if learner.curiosity is not None:
        results |= learner.curiosity.metrics()
    if c.entropy_target is not None or c.entropy_schedule != "constant":
        results["policy/entropy_coef"] = learner.optimizer.loss.coefficients["entropy"]
    # Without a critic all values are 0, and metrics of them would mean nothing.
    if learner.critic is None:
        return {tag: x for tag, x in results.items() if not tag.startswith("value/")}
    return results
