"""Proximal policy optimisation (Schulman et al. 2017, algorithm 1). Read this file first.

``PPO.update`` is one update: ``prepare`` turns a rollout into a batch with advantages, then follow
epochs over its minibatches, and the coefficients adapt. ``PPOLoss.forward`` is the loss of one
minibatch. A formula stands above each block. The functions that are called contain the special
cases, so that a block can be read without them:

    rewards.py        clipping, normalisation and whitening of rewards
    advantages.py     GAE and group-relative estimators
    group_advantages  the same of several reward groups
    losses.py, kl.py  each term of the loss
    schedules.py      learning rate and coefficients from one update to the next
    optimizer.py      a step of AdamW on micro-batches and ranks
    robot_actor.py    how a robot policy is evaluated, and the constructor of its PPO
    language_actor.py the same for a language model, whose critic (critic.py) is a separate model

T steps of a rollout (tokens of a response), N environments (sequences), B samples of a minibatch.
[..] is [B], or [T, B] where minibatches are whole columns; with algorithm.reward_type=action_level
masks, values and advantages have the actions of a chunk as a last dimension, [.., C]; values and
returns of several reward groups have [.., G].
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_ppo.core.running_stats import masked_sum
from embodied_ppo.core.types import Batch, Metrics, Trajectory
from embodied_ppo.ppo import advantages, group_advantages, losses, metrics, preparation, rewards
from embodied_ppo.ppo.learner_state import LearnerState
from embodied_ppo.ppo.minibatches import PolicyLoss, Statistics
from embodied_ppo.ppo.roles import NO_STATS, SharedCritic, with_values
from embodied_ppo.ppo.schedules import DECAY, average, entropy_factor

# Share of its last layer that a policy loses in an update without any reward.
HEAD_DECAY = 0.01
FEW_SAMPLES = "algorithm.normalize_advantages: skipped, fewer than 2 samples in the rollout"


class PPO(LearnerState):
    """Updates an actor and its critic from rollouts."""

    # Whether a policy that finds no reward returns to actions around 0: not one trained before.
    decays_head = True

    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Update the policy and the critic from one trajectory.

        Until ``critic_warmup``, or until the values explain enough, only the critic learns.

        Args:
            trajectory: This rank's columns.
            update: Number of the update, from 0.

        Raises:
            TrainingError: A loss or gradient is not finite.
            RolloutMismatch: The first minibatch differs from the rollout, see ``agreement``.
        """
        c, optimizer = self.config, self.optimizer
        warmup = update < c.critic_warmup and not self.warmup_ended
        start = self.cpu_clock()
        if self.curiosity is not None:
            self.groups = self.curiosity.groups_at(self.groups, update)
        current = (trajectory.version == update).all()
        lags = c.off_policy_correction is not None and not current
        batch, results = self.prepare(trajectory, lags=lags)
        if warmup and c.critic_warmup_variance is not None:
            self.check_warmup(results, update)
        if c.entropy_schedule == "relative":
            # The loss reads these advantages; normalised ones have the deviation 1.
            std = 1.0 if c.normalize_advantages else results["advantage/std"]
            assert isinstance(std, float)
            # A run that gets this schedule on resume has no average yet, which begins at ``std``.
            before = self.mean_std or std * (1.0 - DECAY**update)
            self.mean_std = average(before, std)
        if self.record is not None:
            self.record(trajectory, batch, update)
        prepared = self.cpu_clock()

        # A separate critic minimises its own loss: here, before the policy (LocalCritic), or in
        # another process while the policy learns (cluster/remote_models.py).
        separate_critic = self.separate_critic
        if separate_critic is not None:
            separate_critic.begin(batch, update)
        stats = critic_stats = NO_STATS
        try:
            if not warmup or isinstance(self.critic, SharedCritic):
                # Epochs x minibatches: each epoch is a new permutation of the samples, each
                # minibatch one step of AdamW on ``PPOLoss``.
                entropy_coef = self.entropy_coef
                if c.entropy_schedule != "constant":
                    entropy_coef *= entropy_factor(
                        c.entropy_schedule, update, optimizer.updates, self.mean_std
                    )
                optimizer.loss.coefficients["entropy"] = entropy_coef
                # Only a rollout of these weights must agree with them.
                optimizer.begin(batch, update, critic_only=warmup, current=current)
                for epoch in range(c.update_epoch):
                    indices = optimizer.minibatches(epoch)
                    optimizer.step(*indices)
                    if self.curiosity is not None:
                        for index in indices:
                            self.curiosity.step(batch, index)
                    # Stop early where the policy has moved too far from the one that acted.
                    if c.target_kl_stop is not None and optimizer.epoch_kl() > c.target_kl_stop:
                        break
                stats = optimizer.end()
        finally:
            if separate_critic is not None:
                critic_stats = separate_critic.end()
        results = metrics.with_optimization(results, self, stats, critic_stats)

        # Adapt entropy bonus, KL coefficient and learning rate to what the update has measured.
        if not warmup and stats.sums.get("steps"):
            self.adapt_coefficients(stats.sums, results)
        # A policy that finds no reward returns slowly to the actions that it began with, around 0.
        if c.noise_correlation and self.decays_head and not results["advantage/std"]:
            for name, p in self.policy.named_parameters():
                if name.startswith("policy_head."):
                    p.data.mul_(1 - HEAD_DECAY)
        # Normalise observations with this rollout's statistics from the next one on.
        seen = trajectory if self.symmetry is None else self.symmetry.with_images(trajectory)
        self.actor.observe(seen)
        optimizer.record_versions()
        self.cpu_s["advantages"] += prepared - start
        self.cpu_s["update"] += self.cpu_clock() - prepared
        return results

    def prepare(self, trajectory: Trajectory, *, lags: bool = False) -> tuple[Batch, Metrics]:
        """Return the batch, samples [T*N, ..] or columns [T, N, ..], and metrics.

        ``lags``: whether older weights acted.
        """
        c, actor, ranks = self.config, self.actor, self.optimizer.ranks
        if ranks.sharded:
            actor.reshard()
        inputs = actor.encode(trajectory)

        results: Metrics = {}
        # The last reward group is the novelty of observations, if the options have it.
        if self.curiosity is not None:
            trajectory, results = self.curiosity.with_reward(trajectory, inputs)

        # Log-probabilities of the actions, log π_old(a|s), and under the policy before training,
        # log π_ref(a|s). Acting has computed the former, so they are rarely computed again.
        old_log_prob, weight = trajectory.log_prob, None
        if actor.recompute or c.off_policy_correction is not None:
            old_log_prob, weight, trajectory, measured = preparation.recompute_behaviour(
                actor, inputs, trajectory, c, ranks, lags=lags
            )
            results |= measured
        has_kl = c.use_kl_loss or c.use_kl_in_reward
        reference = actor.reference_view(trajectory) if has_kl else None

        # Values V(s_t), and V(s_{t+1}) of the true successor. A value head computed them in acting,
        # the last one and those at time limits by rollout/bootstrap.py.
        if not isinstance(self.critic, SharedCritic):
            trajectory = with_values(trajectory, self.critic)

        # Rewards, shaped, minus the penalty for leaving the reference: r_t ← r_t − β·KL_t.
        # Rewards and advantages are computed for the columns of all ranks, so that their statistics
        # do not depend on the number of ranks, and for each action of a chunk that has a value.
        is_reshaped = ranks.world > 1 or trajectory.mask.ndim == 3
        rollout = preparation.gather_columns(trajectory, ranks) if is_reshaped else trajectory
        reward = group_advantages.shape_rewards(
            rollout, self.groups, self.returns, actor.scores_sequences
        )
        if reference is not None and c.use_kl_in_reward:  # with one reward group only
            distance = actor.kl_to_reference(inputs, trajectory, old_log_prob, reference)
            distance = preparation.flatten_chunks(ranks.all_gather_columns(distance))
            reward, penalty = rewards.subtract_kl_penalty(
                reward, distance, rollout.mask, self.kl_coef
            )
            results |= penalty
            # ``shape_rewards`` has clamped before the penalty, which can exceed the bound again.
            if c.reward_clip is not None and c.reward_clip_order == "after_norm":
                reward = rewards.clip_rewards(reward, rollout.mask, c.reward_clip)

        # Advantages:  δ_t = r_t + γ·V(s_{t+1})·(1 − terminated_t) − V(s_t)
        #              A_t = Σ_l (γλ)^l·δ_{t+l} until the episode ends;  R_t = A_t + V(s_t)
        # The A of R may have another λ, and that of the policy may depend on the length.
        # Several reward groups have a V and an A each:  A ← Σ_k w_k·A_k
        advantage, returns, shares = group_advantages.estimate(
            replace(rollout, reward=reward), self.groups
        )
        # Without any reward, A is the error of V alone. Steps along it, which Adam makes large, end
        # where exploration finds no reward.
        if c.noise_correlation and not rollout.reward.any():
            advantage = torch.zeros_like(advantage)
        measured, samples = metrics.of_advantages(advantage, returns, rollout, shares)
        results |= measured
        # PopArt: the loss reads (V − μ)/σ and (R − μ)/σ with statistics of the task's returns.
        value, popart = trajectory.value, getattr(self.actor.policy, "popart", None)
        tasks: Tensor | None = None
        if popart is not None:
            task = preparation.task_of_samples(inputs, trajectory.mask)
            tasks = ranks.all_gather_columns(task) if is_reshaped else task
            popart.update(self.policy.value_head, returns, tasks, rollout.mask)
            value, returns = popart.normalize(value, task), popart.normalize(returns, tasks)
        # A ← (A − mean(A)) / std(A) over the complete rollout, or of each task in it.
        if c.normalize_advantages and tasks is not None:
            advantage = advantages.normalize_tasks(advantage, rollout.mask, tasks)
        elif c.normalize_advantages:
            advantage, _ = advantages.normalize(advantage, rollout.mask)
            if samples < 2:
                self.notice(FEW_SAMPLES)
        if c.advantage_clip is not None:
            advantage = advantage.clamp(-c.advantage_clip, c.advantage_clip)

        # What the loss of a minibatch reads, of this rank's columns.
        if is_reshaped:
            advantage, returns = preparation.local_columns(trajectory, ranks, advantage, returns)
        target, mirror = reference if c.use_kl_loss else None, None
        equal = c.loss_agg_func == "trajectory-mean"
        if self.symmetry is not None:
            mirror = self.symmetry.samples(actor, trajectory, c, ranks)
        batch = Batch(
            inputs=inputs,
            action=trajectory.action,
            replay=trajectory.replay,
            log_prob=losses.reduce_log_prob(old_log_prob, c.logprob_type, batch_dims=2),
            value=value,
            advantage=advantage,
            returns=returns,
            mask=trajectory.mask,
            weight=weight,
            share=losses.column_shares(trajectory.mask) if equal else None,
            ref_log_prob=None if target is None else target.log_prob,
            ref_logits=target.logits if target and c.kl_loss_type == "full" else None,
            mirror=mirror,
            positive=rewards.positive_columns(trajectory) if c.positive_nll_weight else None,
        )
        if trajectory.kept:  # freed with the batch; the caller may hold the trajectory for longer
            trajectory.kept.clear()
        return (batch if c.minibatch_unit == "column" else tree.flatten_time(batch)), results


class PPOLoss(PolicyLoss):
    """L = L_π + c_V·L_V − c_H·H + c_KL·KL (Schulman et al. 2017, eq. 9)."""

    def forward(self, b: Batch, part: str = "both") -> tuple[Tensor, Statistics]:
        """Return the loss and the statistics of a micro-batch, see ``MinibatchLoss``.

        Args:
            b: The micro-batch.
            part: "critic": c_V·L_V alone; "actor": L without it.
        """
        c, policy = self.config, self.evaluate(b)
        images = policy.mirror if c.symmetry in ("augment", "both") else None

        # Ratio of the probabilities of the action:  r = π(a|s) / π_old(a|s)
        # Clipped surrogate:  L_π = max(−A·r, −A·clip(r, 1 − ε_low, 1 + ε_high))          (eq. 7)
        ratio_of = partial(
            losses.probability_ratio, mask=b.mask, level=c.ratio_level, batch_dims=self.batch_dims
        )
        surrogate_of = partial(
            losses.clipped_surrogate,
            advantage=b.advantage,
            mask=b.mask,
            low=c.clip_ratio_low,
            high=c.clip_ratio_high,
            dual=c.clip_ratio_c,
            kind=c.policy_loss,
            weight=b.weight,
        )
        ratio, log_ratio = ratio_of(policy.log_prob, b.log_prob)
        elements, clipped, dual_clipped = surrogate_of(ratio, policy.log_prob)
        # Mirrored samples:  L ← (L(s, a) + w·L(M s, M a)) / 2  with the weight w of
        # ``symmetry``; below, the mean of both value losses. Statistics are those of originals.
        if images is not None and b.mirror is not None:
            image_ratio, _ = ratio_of(images.log_prob, b.mirror.log_prob)
            image, *_ = surrogate_of(image_ratio, images.log_prob, weight=b.mirror.weight)
            elements = 0.5 * (elements + image)
        mean = partial(  # over the complete minibatch, as configured
            losses.aggregate,
            mask=b.mask,
            aggregation=c.loss_agg_func,
            rows=b.rows,
            columns=b.columns,
            length=self.length,
            share=b.share,
        )
        surrogate = mean(elements)
        # Entropy bonus:  H = −E[log π]. Without a bonus it is a statistic only, because its
        # gradient would cost passes over all logits. The coefficient is a tensor in compiled code.
        entropy_coef = self.coefficients["entropy"]
        has_bonus = isinstance(entropy_coef, Tensor) or entropy_coef != 0.0
        entropy = mean(policy.entropy if has_bonus else policy.entropy.detach())
        loss = surrogate - entropy_coef * entropy
        stats = losses.ratio_statistics(ratio, log_ratio, b.mask) | {
            "policy_loss": surrogate.detach(),
            "entropy": entropy.detach(),
            "clip_fraction": clipped.sum().float(),
            "dual_clip_fraction": dual_clipped.sum().float(),
        }
        # Distance to the policy before training:  KL(π || π_ref)
        if policy.kl is not None:
            loss = loss + c.kl_loss_coef * mean(policy.kl)
            stats["kl"] = masked_sum(policy.kl.detach(), b.mask)
        # Imitation of responses with a positive score (Yue et al. 2025, VAPO):
        # μ·L_NLL,  L_NLL = −Σ log π(a|s) / their tokens in the minibatch
        if b.positive is not None:
            positive = b.positive & b.mask  # padding of the micro-batches is masked
            nll = losses.aggregate(-policy.log_prob, positive, rows=b.positive_rows)
            loss = loss + c.positive_nll_weight * nll
            stats["positive_nll"] = nll.detach()
        # Symmetry loss:  c_S·|μ(M s) − M μ(s)|²
        if policy.mirror is not None:
            difference = losses.aggregate(policy.mirror.difference, b.mask, rows=b.rows)
            loss = loss + c.symmetry_coef * difference if c.symmetry != "augment" else loss
            stats["symmetry_error"] = difference.detach()
        # Clipped Huber loss h of the value:  V_c = V_old + clip(V − V_old, ±ε_V)
        #                                     L_V = max(h(R − V), h(R − V_c))
        # The mean over samples, or over trajectories; a separate critic has loss_agg_func
        # (``CriticLoss``).
        if policy.value is not None:
            errors_of = partial(
                losses.value_loss,
                returns=b.returns,
                value_clip=c.value_clip,
                huber_delta=c.huber_delta,
            )
            errors, value_clipped = errors_of(policy.value, b.value)
            if images is not None and b.mirror is not None:
                errors = 0.5 * (errors + errors_of(images.value, b.mirror.value)[0])
            if errors.ndim > b.mask.ndim:  # the sum over reward groups
                errors, value_clipped = errors.sum(-1), value_clipped.any(-1)
            value_loss = losses.aggregate(errors, b.mask, rows=b.rows, share=b.share)
            scaled = c.value_loss_coef * value_loss
            loss = {"both": scaled + loss, "critic": scaled + 0.0, "actor": loss}[part]
            stats["value_loss"] = value_loss.detach()
            stats["value_clipped"] = (value_clipped & b.mask).sum()
            stats["value_difference"] = (
                losses.value_difference(policy.value, b.value, b.mask)
                if self.compares
                else torch.zeros_like(value_loss)
            )
        return loss, stats
