"""PPO update: compute advantages, optimise for several epochs, adapt the coefficients.

``Learner`` is the same for robot policies and language models. The critic is the policy's value
head, a separate model, or absent. The learner calls the policy through the interface ``Actor``,
which ``actor_critic_learner.PolicyActor`` implements for robot policies and
``separate_critic_learner.LanguageActor`` for language models.

T steps (or response tokens), N environments (or sequences), C actions of a chunk.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied_ppo.algorithms import advantages, kl, losses
from embodied_ppo.algorithms.optimizer import MinibatchOptimizer, OptimizationStats
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import tree
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.running_stats import (
    expand_mask,
    explained_variance,
    masked_moments,
    masked_sum,
    read_numbers,
)
from embodied_ppo.core.types import (
    Batch,
    ConfigError,
    Evaluation,
    Mean,
    Metrics,
    Trajectory,
    UpdateObserver,
)

NO_STATS = OptimizationStats({}, 0.0, 0)
"""Statistics of a model that was not optimised."""


# --------------------------------------------------------------------------------- actor and critic
class Actor(Protocol):
    """Interface of the policy and the reference policy to the learner."""

    @property
    def policy(self) -> Any:
        """The policy."""
        ...

    @property
    def recompute(self) -> bool:
        """Whether the learner always recomputes the behaviour's log-probabilities."""
        ...

    @property
    def scores_sequences(self) -> bool:
        """Whether a column has one reward, the score of the whole sequence."""
        ...

    def reshard(self) -> None:
        """Free the gathered parameters of policy and reference."""
        ...

    def encode(self, t: Trajectory) -> Any:
        """Return the observations as inputs of the policy, [T, N, ..]."""
        ...

    def log_prob(self, inputs: Any, t: Trajectory) -> Tensor:
        """Return log-probabilities of the trajectory's actions under the policy, [T, N, ..]."""
        ...

    def reference_view(self, t: Trajectory) -> Evaluation | None:
        """Return log-probabilities and logits (or hidden states) under the reference, if any."""
        ...

    def kl_to_reference(
        self, inputs: Any, t: Trajectory, behaviour: Tensor, reference: Evaluation
    ) -> Tensor:
        """Return the KL divergence by the estimator kl_penalty, shaped as the mask."""
        ...

    def observe(self, t: Trajectory) -> None:
        """Merge the observations into the policy's normaliser."""
        ...

    def initialize(self) -> None:
        """Copy the policy's weights to a reference in another process."""
        ...

    def reference_state(self) -> Any:
        """Return the reference's weights; None without a reference."""
        ...

    def load_reference(self, state: Any) -> None:
        """Restore the result of ``reference_state``."""
        ...

    def state_tensors(self) -> list[Any]:
        """Return the reference's tensors that are in this process, in nested containers."""
        ...


class ValueHead:
    """Marks a critic that is a part of the policy, and its loss a part of the policy's loss."""


class Critic(Protocol):
    """A separate model that computes values, and its optimiser; in this process or another one."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the newest update."""
        ...

    def initialize(self, actor: Any) -> None:
        """Initialise from ``actor``, once and before any other call.

        A critic with its own weights ignores it.
        """
        ...

    def values(self, obs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Return float32 [T, N], 0 where masked."""
        ...

    def begin(
        self, obs: Mapping[str, Tensor], mask: Tensor, value: Tensor, returns: Tensor, update: int
    ) -> None:
        """Start to learn ``returns`` [T, N]; ``value`` is the result of ``values`` before."""
        ...

    def end(self) -> OptimizationStats:
        """Wait for the optimisation that ``begin`` has started."""
        ...

    def state(self) -> dict[str, Any]:
        """Return "critic_weights", and as "critic" all other state of the next update."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``."""
        ...

    def state_tensors(self) -> Any:
        """Return the tensors, in nested containers, that are in this process between updates."""
        ...

    def close(self) -> None:
        """Release processes and memory."""


# ------------------------------------------------------------------------------------------ learner
class Learner:
    """PPO update of an actor and its critic (Schulman et al. 2017, alg. 1)."""

    def __init__(
        self,
        actor: Actor,
        critic: Critic | ValueHead | None,
        optimizer: MinibatchOptimizer,
        *,
        columns: int,
        device: torch.device,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create a learner.

        Args:
            critic: None for advantage estimators that read no value.
            optimizer: of the policy's parameters, a value head included.
            columns: N of all ranks together.
            device: where rewards are shaped.
            notice: callback for messages to the user.
        """
        config = optimizer.config
        self.actor, self.critic, self.optimizer = actor, critic, optimizer
        self.config, self.notice = config, notice
        self.cpu_s = {"advantages": 0.0, "update": 0.0}  # CPU seconds since the start
        self.cpu_clock = time.process_time  # measures them
        self.returns = advantages.ReturnScaler(columns).to(device)
        self.kl = kl.controller(**vars(config.kl_ctrl))
        self.entropy = losses.EntropyController(config.entropy_bonus, config.entropy_target)
        if config.use_kl_loss:
            kl.check_loss_type(config.kl_loss_type)

    @property
    def policy(self) -> Any:
        return self.actor.policy

    @property
    def ranks(self) -> Ranks:
        """The ranks that learn together."""
        return self.optimizer.ranks

    @property
    def _critic_model(self) -> Critic | None:
        return None if isinstance(self.critic, ValueHead) else self.critic

    # ----------------------------------------------------------------------------------- one update
    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Update the policy and the critic from one trajectory.

        Until ``critic_warmup`` only the critic learns.

        Args:
            trajectory: This rank's columns.
            update: Number of the update, from 0.

        Raises:
            TrainingError: A loss or gradient is not finite.
        """
        c, model = self.config, self._critic_model
        warmup, value_head = update < c.critic_warmup, isinstance(self.critic, ValueHead)
        start = self.cpu_clock()
        self.actor.reshard()
        batch, metrics = self._prepare(trajectory)
        if trajectory.kept:  # freed with the batch; the caller may hold the trajectory for longer
            trajectory.kept.clear()
        prepared = self.cpu_clock()
        actor = critic = NO_STATS
        if model is not None:  # it may learn at the same time as the actor
            model.begin(batch.inputs, batch.mask, batch.value, batch.returns, update)
        try:
            if value_head or not warmup:
                actor = self.optimizer.optimize(
                    batch, update, critic_only=warmup, entropy_coef=self.entropy.coef
                )
        finally:
            if model is not None:
                critic = model.end()
        self.cpu_s["advantages"] += prepared - start
        self.cpu_s["update"] += self.cpu_clock() - prepared
        metrics |= self._summary(actor, critic)
        if not warmup and actor.sums["steps"]:
            self._adapt(metrics, actor.sums)
        self.actor.observe(trajectory)
        if self.critic is None:
            metrics = {tag: x for tag, x in metrics.items() if not tag.startswith("value/")}
        return metrics

    def _prepare(self, t: Trajectory) -> tuple[Batch, Metrics]:
        """Return the batch, [T*N, ..] (samples) or [T, N, ..] (columns), and metrics.

        Rewards and advantages are computed for the columns of all ranks, so that their statistics
        do not depend on the number of ranks.
        """
        c, ranks, actor, mask = self.config, self.ranks, self.actor, t.mask
        inputs = actor.encode(t)
        metrics: Metrics = {}
        # 1. Log-probabilities: of the behaviour, and of the reference.
        behaviour, weight = t.log_prob, None
        if actor.recompute or c.off_policy_correction is not None:
            behaviour = actor.log_prob(inputs, t)
        if c.off_policy_correction is not None:
            old, acted = (
                losses.reduce_log_prob(x, c.logprob_type, batch_dims=2)
                for x in (behaviour, t.log_prob)
            )
            weight, metrics = off_policy_weights(old, acted, mask, c)
        reference = actor.reference_view(t)
        # 2. Values, and the columns of all ranks.
        t = self._with_values(t)
        scalars = ("reward", "value", "next_value", "terminated", "truncated", "mask", "steps")
        columns = tree.map(
            flatten_chunks, ranks.all_gather_columns({name: getattr(t, name) for name in scalars})
        )
        rollout = replace(t, **columns)  # of all ranks, except obs and action
        # 3. Rewards, with the KL penalty.
        shape = shape_sequence_rewards if actor.scores_sequences else shape_step_rewards
        reward = shape(rollout, c, self.returns)
        if reference is not None and c.use_kl_in_reward:
            distance = ranks.all_gather_columns(
                actor.kl_to_reference(inputs, t, behaviour, reference)
            )
            reward, more = subtract_kl_penalty(
                reward, flatten_chunks(distance), rollout.mask, self.kl.coef
            )
            metrics |= more
        reward = shape_after_kl(reward, rollout.mask, c)
        # 4. Advantages and returns.
        steps = 1 if rollout.steps is None else rollout.steps
        advantage, returns, more = estimate_advantages(
            replace(rollout, reward=reward), c, steps=steps, notice=self.notice
        )
        metrics |= more
        full = c.kl_loss_type == "full"
        batch = Batch(
            inputs=inputs,
            action=t.action,
            replay=t.replay,
            log_prob=losses.reduce_log_prob(behaviour, c.logprob_type, batch_dims=2),
            value=t.value,
            advantage=ranks.local_columns(unflatten_chunks(advantage, t.value)),
            returns=ranks.local_columns(unflatten_chunks(returns, t.value)),
            mask=mask,
            weight=weight,
            ref_log_prob=reference.log_prob if reference is not None and c.use_kl_loss else None,
            ref_logits=(
                reference.logits if reference is not None and c.use_kl_loss and full else None
            ),
        )
        return (batch if c.minibatch_unit == "column" else tree.flatten_time(batch)), metrics

    def _with_values(self, t: Trajectory) -> Trajectory:
        """Return the trajectory with the values of a separate critic.

        The values of a value head are part of the rollout.
        """
        if isinstance(self.critic, ValueHead):
            return t
        assert isinstance(t.obs, dict)
        value = (
            torch.zeros_like(t.value) if self.critic is None else self.critic.values(t.obs, t.mask)
        )
        # The last row has no successor: the response ends there, and its next value is never read.
        return replace(
            t, value=value, next_value=torch.cat([value[1:], torch.zeros_like(value[:1])])
        )

    def _summary(self, actor: OptimizationStats, critic: OptimizationStats) -> Metrics:
        """Return the metrics of the epochs, with the coefficients that they used."""
        rates, model = self.optimizer.learning_rates, self._critic_model
        if isinstance(self.critic, ValueHead):
            critic = actor
        else:
            rates = rates[0], 0.0 if model is None else model.learning_rate
        metrics = optimization_metrics(actor, critic, self.config, lr=rates)
        if self.config.entropy_target is not None:
            metrics["policy/entropy_coef"] = self.entropy.coef
        if self.optimizer.auxiliary_loss is not None:
            metrics["policy/cloning_loss"] = Mean.of(self.optimizer.auxiliary_losses)
        return metrics

    def _adapt(self, metrics: Metrics, sums: Mapping[str, float]) -> None:
        """Adapt entropy bonus, KL coefficient and learning rate to the update's statistics."""
        self.entropy.update(float(sums["entropy"]) / float(sums["steps"]))
        distance = metrics.get("kl/to_reference")
        if self.config.use_kl_in_reward and isinstance(distance, Mean):
            self.kl.update(distance.value, int(distance.count))
        self.optimizer.adapt(sums)

    # --------------------------------------------------------------------- processes and checkpoint
    def initialize(self) -> None:
        """Initialise critic and reference in other processes, before the first update."""
        if (model := self._critic_model) is not None:
            model.initialize(self.policy)
        self.actor.initialize()

    def state_tensors(self) -> Any:
        """Return the tensors in this process between updates, except those of the policy."""
        model = self._critic_model
        others = [*([] if model is None else [model.state_tensors()]), *self.actor.state_tensors()]
        return [self.optimizer.state(), self.returns.state_dict(), *others]

    def state(self) -> dict[str, Any]:
        """Return everything beyond the policy's weights that the next update depends on.

        Keys: returns, kl, entropy, reference; with a value head "optimizer" and "adaptive_factor",
        otherwise these two under "actor", and "critic" and "critic_weights".
        """
        optimizer = self.optimizer.state()
        if not isinstance(self.critic, ValueHead):
            empty = {"critic": None, "critic_weights": None}
            optimizer = {
                "actor": optimizer,
                **(empty if self.critic is None else self.critic.state()),
            }
        return optimizer | {
            "returns": self.returns.state_dict(),
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
            "reference": self.actor.reference_state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``.

        Raises:
            ConfigError: It has no critic or no reference, which the options need.
        """
        value_head, model = isinstance(self.critic, ValueHead), self._critic_model
        if model is not None and state["critic"] is None:
            raise ConfigError("the checkpoint holds no critic to continue with; start a new run")
        c = self.config
        has_reference = c.use_kl_loss or c.use_kl_in_reward
        if has_reference and state["reference"] is None:
            raise ConfigError(
                "algorithm.use_kl_loss/use_kl_in_reward: the checkpoint holds no reference policy"
                " to continue with; start a new run, or resume without the KL options"
            )
        self.optimizer.load_state(state if value_head else state["actor"])
        if model is not None:
            model.load_state(state)
        if has_reference:
            self.actor.load_reference(state["reference"])
        # The number of sequences may change on resume, that of environments may not.
        if value_head or c.reward_norm == "running":
            self.returns.load_state_dict(state["returns"])
        if c.kl_ctrl.type == "adaptive":
            self.kl.load_state_dict(state["kl"])
        if c.entropy_target is not None:
            self.entropy.load_state_dict(state["entropy"])

    def set_observer(self, observer: UpdateObserver) -> None:
        """Call ``observer`` with the batch and the minibatches of each update."""
        self.optimizer.observer = observer

    def close(self) -> None:
        """Stop compilations in progress."""
        self.optimizer.close()
        if (model := self._critic_model) is not None:
            model.close()


# ------------------------------------------------------------------------------------------ rewards
def shape_step_rewards(
    t: Trajectory, c: AlgorithmConfig, returns: advantages.ReturnScaler
) -> Tensor:
    """Return the shaped rewards [T, N] of a robot's steps before the KL penalty."""
    steps = 1 if t.steps is None else t.steps
    return shape_before_kl(
        t.reward, t.terminated | t.truncated, t.mask, c, returns=returns, steps=steps
    )


def shape_sequence_rewards(
    t: Trajectory, c: AlgorithmConfig, returns: advantages.ReturnScaler
) -> Tensor:
    """Return the shaped rewards [T, N] of sequences before the KL penalty.

    A sequence has one score. It is normalised as one number, whatever the sequence's length, and is
    the reward of the last token, where the episode ends.
    """
    unmasked = t.mask.any(0, keepdim=True)  # [1, N]
    score = torch.where(t.mask, t.reward, 0.0).sum(0, keepdim=True)
    score = shape_before_kl(
        score, unmasked, unmasked, replace(c, whiten_rewards=False), returns=returns
    )
    reward = torch.where((t.terminated | t.truncated) & t.mask, score, 0.0)
    return reward if c.whiten_after_kl else whiten(reward, t.mask, c)


def shape_before_kl(
    reward: Tensor,
    done: Tensor,
    mask: Tensor,
    c: AlgorithmConfig,
    *,
    returns: advantages.ReturnScaler,
    steps: int | Tensor = 1,
) -> Tensor:
    """Return the rewards [T, N] before the KL penalty: clipped, normalised and whitened as
    configured.

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
    return reward if c.whiten_after_kl else whiten(reward, mask, c)


def whiten(reward: Tensor, mask: Tensor, c: AlgorithmConfig) -> Tensor:
    """Return the rewards [T, N], whitened over all unmasked entries if whiten_rewards is set."""
    if not c.whiten_rewards:
        return reward
    return advantages.whiten_rewards(reward, mask, keep_mean=not c.whiten_subtract_mean)


def shape_after_kl(reward: Tensor, mask: Tensor, c: AlgorithmConfig) -> Tensor:
    """Clamp and whiten rewards [T, N] after the KL penalty, as ROLL and TRL do."""
    if c.reward_clip_order == "after_norm":
        reward = torch.where(mask.bool(), advantages.clip(reward, c.reward_clip), reward)
    return whiten(reward, mask, c) if c.whiten_after_kl else reward


def off_policy_weights(
    old: Tensor, acted: Tensor, mask: Tensor, c: AlgorithmConfig
) -> tuple[Tensor, Metrics]:
    """Return importance weights of the learner against the acting policy, [T, N, ..]."""
    assert c.off_policy_correction is not None
    weight = losses.off_policy_weight(
        old, acted, mask, kind=c.off_policy_correction, cap=c.off_policy_cap
    )
    total, count = read_numbers(masked_sum(weight, mask), expand_mask(mask, weight).sum())
    return weight, {"policy/off_policy_weight": Mean(total, count)}


def subtract_kl_penalty(
    reward: Tensor, distance: Tensor, mask: Tensor, coef: float
) -> tuple[Tensor, Metrics]:
    """Return rewards [T, N] minus coef times the KL to the reference, and the KL as a metric."""
    kind = "seq-mean-token-mean"
    columns, per_column = read_numbers(
        losses.denominator(mask, aggregation=kind),
        losses.aggregate(distance, mask, aggregation=kind),
    )
    metrics: Metrics = {"kl/to_reference": Mean(per_column * columns, columns), "kl/coef": coef}
    return kl.penalize(reward, distance, mask, coef=coef), metrics


def estimate_advantages(
    t: Trajectory, c: AlgorithmConfig, *, steps: int | Tensor = 1, notice: Callable[[str], None]
) -> tuple[Tensor, Tensor, Metrics]:
    """Return normalised advantages, returns [T, N], and metrics.

    T counts actions where each action of a chunk has a value.
    """
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
    )
    raw = masked_moments(advantage, t.mask)
    explained, mean, std, zeros, count = read_numbers(
        explained_variance(t.value, returns, t.mask),
        raw.mean,
        raw.var.sqrt(),
        ((advantage == 0) & t.mask).sum(),
        raw.count,
    )
    metrics: Metrics = {
        "value/explained_variance": explained,
        "advantage/mean": mean,
        "advantage/std": std,
        "advantage/zero_fraction": Mean(zeros, count),
    }
    if c.normalize_advantages:
        advantage, _ = advantages.normalize(advantage, t.mask)
        if count < 2:
            notice("algorithm.normalize_advantages: skipped, fewer than 2 samples in the rollout")
    return advantages.clip(advantage, c.advantage_clip), returns, metrics


def optimization_metrics(
    actor: OptimizationStats, critic: OptimizationStats, c: AlgorithmConfig, *, lr: Sequence[float]
) -> Metrics:
    """Return the metrics of the epochs; a loss of both has equal ``actor`` and ``critic``."""
    # Without a minibatch all sums are 0. An unknown name among existing sums is an error.
    a, v = (stats.sums or defaultdict(float) for stats in (actor, critic))
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
    if c.clip_ratio_c is not None and c.policy_loss == "clip":
        metrics["policy/dual_clip_fraction"] = Mean(a["dual_clip_fraction"], a["count"])
    if c.value_clip is not None:
        metrics["value/clip_fraction"] = Mean(v["value_clipped"], v["rows"])
    if c.use_kl_loss and not c.use_kl_in_reward:
        metrics["kl/to_reference"] = Mean(a["kl"], a["rows"])
    return metrics


def flatten_chunks(x: Tensor) -> Tensor:
    """Reshape [T, N, C] to [T·C, N], actions in execution order; return [T, N] unchanged."""
    return x if x.ndim == 2 else x.transpose(1, 2).flatten(0, 1)


def unflatten_chunks(x: Tensor, like: Tensor) -> Tensor:
    """Invert ``flatten_chunks``, for a tensor ``like`` [T, N, C] or [T, N]."""
    return x if like.ndim == 2 else x.unflatten(0, (-1, like.shape[2])).transpose(1, 2)
