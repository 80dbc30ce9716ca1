"""Learn from a trajectory: advantages once, then epochs x minibatches of the joint actor-critic loss."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.algorithms import advantages, kl, losses
from embodied_ppo.algorithms.optimizer import MinibatchOptimizer, OptimizationStats
from embodied_ppo.algorithms.ppo_loss import ActorCriticLoss, kl_distance
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile, tree
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.running_stats import (
    Moments,
    RunningMoments,
    expand_mask,
    explained_variance,
    masked_moments,
    masked_sum,
)
from embodied_ppo.core.tree import in_parts
from embodied_ppo.core.types import Batch, ConfigError, Evaluation, Mean, Metrics, Policy, Trajectory


# ------------------------------------------------------------------------------------------ before and after the epochs
def shaped(
    reward: Tensor,
    done: Tensor,
    mask: Tensor,
    c: AlgorithmConfig,
    *,
    returns: advantages.ReturnScaler,
    steps: int | Tensor = 1,
) -> Tensor:
    """Rewards [T, N] before the KL penalty: clipped, normalised and whitened as far as the options say.

    ``returns`` is updated with the (clipped) rewards where reward_norm=running reads its deviation.
    """
    if c.reward_clip_order == "before_norm":
        reward = advantages.clip(reward, c.reward_clip)
    if c.reward_norm == "running":
        returns.update(reward, done, mask, c.gamma, steps)
    reward = advantages.shape_rewards(
        reward,
        mask,
        norm=c.reward_norm,
        shift=c.reward_shift,
        scale=c.reward_scale,
        group_size=c.group_size,
        running_std=returns.std,
    )
    if c.reward_clip_order == "after_norm":
        reward = torch.where(mask.bool(), advantages.clip(reward, c.reward_clip), reward)
    return reward if c.whiten_after_kl else whitened(reward, mask, c)


def whitened(reward: Tensor, mask: Tensor, c: AlgorithmConfig) -> Tensor:
    """Rewards [T, N] whitened over all unmasked entries, where the options say so."""
    if not c.whiten_rewards:
        return reward
    return advantages.whiten_rewards(reward, mask, keep_mean=not c.whiten_subtract_mean)


def shaped_after_kl(reward: Tensor, mask: Tensor, c: AlgorithmConfig) -> Tensor:
    """What ``shaped`` leaves for after the KL penalty (ROLL, TRL): the second clamp, then whitening; [T, N]."""
    if c.reward_clip_order == "after_norm":
        reward = torch.where(mask.bool(), advantages.clip(reward, c.reward_clip), reward)
    return whitened(reward, mask, c) if c.whiten_after_kl else reward


def off_policy(old: Tensor, acted: Tensor, mask: Tensor, c: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """Importance weights of the learner's log-probabilities against the acting policy's, [T, N, ..]."""
    assert c.off_policy_correction is not None
    weight = losses.off_policy_weight(old, acted, mask, kind=c.off_policy_correction, cap=c.off_policy_cap)
    count = float(expand_mask(mask, weight).sum())
    return weight, {"policy/off_policy_weight": Mean(float(masked_sum(weight, mask)), count)}


def penalized(reward: Tensor, distance: Tensor, mask: Tensor, coef: float) -> tuple[Tensor, Metrics]:
    """Rewards [T, N] minus coef times the distance to the reference, and that distance as a metric."""
    columns = float(losses.denominator(mask, how="seq-mean-token-mean"))
    per_column = float(losses.aggregate(distance, mask, how="seq-mean-token-mean"))
    told: Metrics = {"kl/to_reference": Mean(per_column * columns, columns), "kl/coef": coef}
    return kl.penalize(reward, distance, mask, coef=coef), told


def estimated(
    t: Trajectory, c: AlgorithmConfig, *, steps: int | Tensor = 1, notice: Callable[[str], None]
) -> tuple[Tensor, Tensor, Metrics]:
    """Advantages as the loss wants them, and returns, [T, N]; T counts actions where each has a value."""
    advantage, returns = advantages.estimate(
        c.adv_type,
        reward=t.reward,
        value=t.value,
        next_value=t.next_value,
        terminated=t.terminated,
        truncated=t.truncated,
        mask=t.mask,
        gamma=c.gamma,
        gae_lambda=c.gae_lambda,
        group_size=c.group_size,
        bootstrap_type=c.bootstrap_type,
        steps=steps,
        whiten=False,  # normalize_advantages says whether
    )
    told: Metrics = {
        "value/explained_variance": float(explained_variance(t.value, returns, t.mask)),
        "advantage/mean": float((raw := masked_moments(advantage, t.mask)).mean),
        "advantage/std": float(raw.var.sqrt()),
        "advantage/zero_fraction": Mean(float(((advantage == 0) & t.mask).sum()), float(t.mask.sum())),
    }
    if c.normalize_advantages:
        advantage, used = advantages.normalize(advantage, t.mask)
        if float(used.count) < 2:
            notice("algorithm.normalize_advantages: skipped, fewer than 2 samples in the rollout")
    return advantages.clip(advantage, c.advantage_clip), returns, told


def summary(actor: OptimizationStats, critic: OptimizationStats, c: AlgorithmConfig, *, lr: Sequence[float]) -> Metrics:
    """What the epochs told; ``actor`` and ``critic`` are the same where one loss has both. ``lr`` of either."""
    a, v = defaultdict(float, actor.sums), defaultdict(float, critic.sums)
    metrics: Metrics = {
        "policy/loss": Mean(a["policy_loss"], a["steps"]),
        "policy/approx_kl": Mean(a["approx_kl"], a["count"]),
        "policy/clip_fraction": Mean(a["clip_fraction"], a["count"]),
        "policy/ratio_max": actor.ratio_max,
        "policy/entropy": Mean(a["entropy"], a["steps"]),
        "policy/grad_norm": Mean(a["actor_norm"], a["steps"]),
        "policy/lr": lr[0],
        "policy/epochs": float(actor.epochs),
        "value/loss": Mean(v["value_loss"], v["steps"]),
        "value/grad_norm": Mean(v["critic_norm"], v["steps"]),
        "value/lr": lr[1],
    }
    if c.clip_ratio_c is not None:
        metrics["policy/dual_clip_fraction"] = Mean(a["dual_clip_fraction"], a["count"])
    if c.value_clip is not None:
        metrics["value/clip_fraction"] = Mean(v["value_clipped"], v["rows"])
    if c.use_kl_loss and not c.use_kl_in_reward:
        metrics["kl/to_reference"] = Mean(a["kl"], a["rows"])
    return metrics


def in_time(x: Tensor) -> Tensor:
    """[T, N, C] -> [T·C, N]: the actions of each column in the order of their execution; [T, N] as it is."""
    return x if x.ndim == 2 else x.transpose(1, 2).flatten(0, 1)


def in_chunks(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``in_time``, for a tensor ``like`` [T, N, C] or [T, N]."""
    return x if like.ndim == 2 else x.unflatten(0, (-1, like.shape[2])).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------------- one model
METHODS = ("encode", "act", "evaluate", "value", "bc_loss")
"""Of policies, those that read weights."""


class JointLearner(MinibatchOptimizer):
    """PPO on one module with policy and value head: one loss, one backward, one AdamW with two learning rates."""

    def __init__(
        self,
        policy: Policy,
        config: AlgorithmConfig,
        *,
        num_envs: int,
        updates: int,
        seed: int,
        later: compile.CompileSchedule | None = None,
        dump_dir: Path | None = None,
        notice: Callable[[str], None] = lambda text: None,
        beside: Callable[[torch.Generator], Tensor] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """``policy`` is an ``nn.Module``; ``num_envs``: of all ranks; ``beside``: the loss of behaviour cloning that
        every minibatch adds, see ``cloning.AuxiliaryCloningLoss``; the rest as for ``MinibatchOptimizer``."""
        ranks = ranks or Ranks()
        self.reference = copy.deepcopy(policy) if config.use_kl_loss or config.use_kl_in_reward else None
        for model in self._models(policy):
            ranks.shard(model, [name for name in METHODS if hasattr(model, name)])
        super().__init__(
            ActorCriticLoss(policy, config),
            policy.parameter_groups(),
            config,
            updates=updates,
            seed=seed,
            later=later,
            dump_dir=dump_dir,
            notice=notice,
            ranks=ranks,
        )
        self.policy, self.beside = policy, beside
        self.cpu_s = {"advantages": 0.0, "update": 0.0}  # CPU seconds of this process, whole run
        self.returns = advantages.ReturnScaler(num_envs).to(self.critic[0].device)
        self.kl = kl.controller(**vars(config.kl_ctrl))
        self.entropy = losses.EntropyController(config.entropy_bonus, config.entropy_target)
        if config.use_kl_loss:
            kl.check_loss_type(config.kl_loss_type)
        losses.check_levels(
            logprob_type=config.logprob_type, entropy_type=config.entropy_type, reward_type=config.reward_type
        )

    def _models(self, policy: Policy) -> list[nn.Module]:
        """The policy and, if there is one, its reference."""
        return [model for model in (policy, self.reference) if isinstance(model, nn.Module)]

    # --------------------------------------------------------------------------------------------- one update
    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Train on one trajectory (this rank's columns), then merge its observations into the policy's normaliser."""
        c = self.config
        warming = update < c.critic_warmup
        start = time.process_time()
        for model in self._models(self.policy):
            self.ranks.reshard(model)
        batch, metrics = self._prepare(trajectory)
        prepared = time.process_time()
        done = self.optimize(batch, update, warming=warming, entropy_coef=self.entropy.coef)
        self.cpu_s["advantages"] += prepared - start
        self.cpu_s["update"] += time.process_time() - prepared
        metrics |= summary(done, done, c, lr=[group["lr"] for group in self.optimizer.param_groups])
        if c.entropy_target is not None:
            metrics["policy/entropy_coef"] = self.entropy.coef
        if self.beside is not None:
            metrics["policy/cloning_loss"] = Mean.of(self.beside_told)
        self._steer(metrics, done.sums, warming=warming)
        self._observe(trajectory)
        return metrics

    def _observe(self, t: Trajectory) -> None:
        """Merge everyone's observations into the policy's normalisers, in order of rank."""
        decided = t.mask if t.mask.ndim == 2 else t.mask.any(-1)  # [T, N]
        obs, mask = tree.flatten_time(t.obs), decided.flatten()
        if self.ranks.world == 1:
            return self.policy.observe(obs, mask)
        running = [m for m in self.module.modules() if isinstance(m, RunningMoments)]
        before = [Moments(*(x.clone() for x in (m.mean, m.var, m.count))) for m in running]
        for m in running:
            m.count.zero_()
        self.policy.observe(obs, mask)
        for m, kept in zip(running, before, strict=True):
            parts = zip(*(self.ranks.gather(x.clone()) for x in (m.mean, m.var, m.count)), strict=True)
            for x, old in zip((m.mean, m.var, m.count), kept, strict=True):
                x.copy_(old)
            for part in parts:
                m.merge(*part)

    def _prepare(self, trajectory: Trajectory) -> tuple[Batch, Metrics]:
        """Rewards, advantages and everything the losses read, as [T*N, ..] (steps) or [T, N, ..] (columns).

        Rewards and advantages are computed for the columns of all ranks, so that no rank's part is normalised or
        measured by itself.
        """
        c, t, ranks = self.config, trajectory, self.ranks
        mask = t.mask
        inputs = self._encoded(self.policy, t)
        metrics: Metrics = {}
        scalars = ("reward", "value", "next_value", "terminated", "truncated", "mask", "steps")
        columns = ranks.columns({name: getattr(t, name) for name in scalars})
        whole = replace(t, **tree.map(in_time, columns))  # obs, action: this rank's
        done, steps = whole.terminated | whole.truncated, 1 if whole.steps is None else whole.steps
        reward = shaped(whole.reward, done, whole.mask, c, returns=self.returns, steps=steps)
        weight, behaviour = None, t.log_prob
        if c.off_policy_correction is not None:
            behaviour = self._view(self.policy, inputs, t).log_prob
            old, acted = (losses.reduce_log_prob(x, c.logprob_type, batch_dims=2) for x in (behaviour, t.log_prob))
            weight, metrics = off_policy(old, acted, mask, c)
        reference = None
        if self.reference is not None:  # it sees raw observations through its own, frozen normaliser
            reference = self._view(self.reference, self._encoded(self.reference, t), t)
        if reference is not None and c.use_kl_in_reward:
            logits = self._view(self.policy, inputs, t).logits if c.kl_penalty == "full" else None
            others = {"logits": logits, "ref_logits": reference.logits, "mask": mask}
            distance = kl_distance(behaviour, reference.log_prob, c.kl_penalty, **others, dims=2)
            reward, told = penalized(reward, in_time(ranks.columns(distance)), whole.mask, self.kl.coef)
            metrics |= told
        reward = shaped_after_kl(reward, whole.mask, c)
        advantage, returns, told = estimated(replace(whole, reward=reward), c, steps=steps, notice=self.notice)
        metrics |= told
        batch = Batch(
            inputs=tree.map(lambda x: x.unflatten(0, mask.shape[:2]), inputs),
            action=t.action,
            replay=t.replay,
            log_prob=losses.reduce_log_prob(behaviour, c.logprob_type, batch_dims=2),
            value=t.value,
            advantage=ranks.own(in_chunks(advantage, t.value)),
            returns=ranks.own(in_chunks(returns, t.value)),
            mask=mask,
            weight=weight,
            ref_log_prob=reference.log_prob if reference is not None and c.use_kl_loss else None,
            ref_logits=reference.logits if reference is not None and c.use_kl_loss else None,
        )
        return (batch if c.minibatch_unit == "column" else tree.flatten_time(batch)), metrics

    def _encoded(self, policy: Policy, t: Trajectory) -> Any:
        """The observations as inputs of ``policy``, [T·N, ..]; a frozen trunk runs here."""
        return in_parts(policy.encode, self.config.logprob_forward_micro_batch_size, tree.flatten_time(t.obs))

    @torch.no_grad()
    def _view(self, policy: Policy, inputs: Any, t: Trajectory) -> Evaluation:
        """The trajectory's actions as ``policy`` evaluates them, [T, N, ..]."""
        c = self.config
        size = c.logprob_forward_micro_batch_size or c.micro_batch_size or c.global_batch_size
        view = in_parts(policy.evaluate, size, inputs, tree.flatten_time(t.action), tree.flatten_time(t.replay))
        return tree.map(lambda x: x.unflatten(0, t.mask.shape[:2]), view)

    # --------------------------------------------------------------------------------------------- after the epochs
    def _steer(self, metrics: Metrics, sums: Mapping[str, Any], *, warming: bool) -> None:
        """Move what adapts: entropy bonus, KL coefficient, adaptive learning rate. Metrics hold the values before."""
        if warming or not sums["steps"]:
            return
        self.entropy.update(float(sums["entropy"]) / float(sums["steps"]))
        distance = metrics.get("kl/to_reference")
        if self.config.use_kl_in_reward and isinstance(distance, Mean):
            self.kl.update(distance.value, int(distance.count))
        self.adapt(sums)

    # --------------------------------------------------------------------------------------------- checkpoint
    def state(self) -> dict[str, Any]:
        reference = None if self.reference is None else self.reference.state_dict()
        return super().state() | {
            "returns": self.returns.state_dict(),
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "reference": reference,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.returns.load_state_dict(state["returns"])
        if self.config.kl_ctrl.type == "adaptive":
            self.kl.load_state_dict(state["kl"])
        if self.config.entropy_target is not None:
            self.entropy.load_state_dict(state["entropy"])
        if self.reference is not None:
            if state["reference"] is None:
                raise ConfigError(
                    "algorithm.use_kl_loss/use_kl_in_reward: the checkpoint holds no reference policy to continue "
                    "with; start a new run, or resume without the KL options"
                )
            assert isinstance(self.reference, nn.Module)
            self.reference.load_state_dict(self.ranks.parts(self.reference, state["reference"]))
