"""Learn as a language model: an actor, a critic that is another model, a reference that does not change.

Critic and reference may be in other processes (``placement.services``): the learner asks them through ``Critic`` and
``Reference``. T response tokens, N sequences, L tokens of a row, D size of a hidden state.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied_ppo.algorithms import advantages, kl, losses
from embodied_ppo.algorithms.actor_critic_learner import (
    estimated,
    off_policy,
    penalized,
    shaped,
    shaped_after_kl,
    summary,
    whitened,
)
from embodied_ppo.algorithms.optimizer import OptimizationStats, TokenBudgetOptimizer, cut_columns
from embodied_ppo.algorithms.ppo_loss import TokenLoss
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.types import Batch, ConfigError, Mean, Metrics, Trajectory
from embodied_ppo.models.causal_lm import LanguageCritic, LanguagePolicy

NOTHING = OptimizationStats({}, 0.0, 0)
"""What a model tells that has learnt nothing."""

Rows = Mapping[str, Tensor]
"""A trajectory's obs: "row" int64 [L, N], prompt and response without a gap, "place" int64 [T, N], where in its row the
token before each response token is."""


# --------------------------------------------------------------------------------------------------- who has an opinion
class Critic(Protocol):
    """Values, and what learns them."""

    @property
    def rate(self) -> float:
        """Learning rate of the newest update."""
        ...

    def settle(self, actor: LanguagePolicy) -> None:
        """Once, before anything is asked: begin as ``actor``, unless it has a model of its own."""
        ...

    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        """float32 [T, N], 0 where masked."""
        ...

    def begin(self, obs: Rows, mask: Tensor, value: Tensor, returns: Tensor, update: int) -> None:
        """Learn ``returns``, all [T, N]; ``value``: what ``values`` said of the same rows. ``end`` waits for it."""
        ...

    def end(self) -> OptimizationStats: ...

    def state(self) -> dict[str, Any]:
        """ "critic_weights", and "critic": everything else that the next update depends on."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def held(self) -> Any:
        """Tensors, in nested containers, that are in this process between updates."""
        ...

    def close(self) -> None: ...


class Reference(Protocol):
    """The policy as it was before training."""

    def settle(self, actor: LanguagePolicy) -> None:
        """Once, before anything is asked: be as ``actor``."""
        ...

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        """As ``views``."""
        ...

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def held(self) -> Any:
        """As of ``Critic``."""
        ...


ACTS, VALUES = ("hidden", "view_where"), ("value",)
"""Methods of actor (and reference) and of critic that read weights."""


def value_rows(c: AlgorithmConfig) -> int | None:
    """Sequences of one forward pass that computes values, at most; None: no limit."""
    return c.rollout_micro_batch_size or c.micro_batch_size


def log_prob_rows(c: AlgorithmConfig) -> int | None:
    """Sequences of one forward pass that computes log-probabilities again, at most; None: no limit."""
    return c.logprob_forward_micro_batch_size or c.micro_batch_size


def full_kl(c: AlgorithmConfig) -> bool:
    """Whether loss or reward compares whole distributions with the reference's."""
    return (c.use_kl_loss and c.kl_loss_type == "full") or (c.use_kl_in_reward and c.kl_penalty == "full")


def parts(
    obs: Rows, mask: Tensor, tokens: int | None, columns: int | None, ranks: Ranks
) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Columns in parts of like length: (index [b], ids [b, l], place [b, r], r). See ``cut_columns``.

    Where ranks wait for each other, those with fewer parts begin with one token, again and again: what is made of it,
    the part that holds it overwrites.
    """
    cuts = list(cut_columns(mask, obs["place"], tokens, columns))
    first = mask.new_zeros(1, dtype=torch.int64)
    for _ in range(ranks.passes(len(cuts)) - len(cuts)):
        yield first, obs["row"][:1, first].T, first.unsqueeze(0), 1
    for part, width, rows in cuts:
        place = torch.where(mask, obs["place"], 0)[:rows, part]
        yield part, obs["row"][:width, part].T, place.T, rows


@torch.no_grad()
def views(
    policy: LanguagePolicy,
    obs: Rows,
    mask: Tensor,
    action: Tensor,
    *,
    tokens: int | None,
    columns: int | None,
    ranks: Ranks,
    hidden: bool = False,
) -> dict[str, Tensor]:
    """ "log_prob" [T, N] of the taken tokens and, if asked for, "hidden" states [T, N, D]; arbitrary where masked."""
    zero = torch.zeros(mask.shape, device=mask.device)
    out = {"log_prob": zero}
    if hidden:
        out["hidden"] = zero.new_zeros(*zero.shape, policy.decoder.module.hidden_size)
    for part, ids, place, rows in parts(obs, mask, tokens, columns, ranks):
        states = policy.hidden(ids, place)
        out["log_prob"][:rows, part] = policy.view_where(mask[:rows, part], states, action[:rows, part]).log_prob
        if hidden:
            out["hidden"][:rows, part] = states.transpose(0, 1).to(zero.dtype)
    return out


class FrozenReference:
    """A reference in this process."""

    def __init__(
        self, policy: LanguagePolicy, *, tokens: int | None, columns: int | None, ranks: Ranks | None = None
    ) -> None:
        """``policy`` becomes the reference. ``tokens``, ``columns``: of a forward pass, at most. ``ranks``: who asks
        references of theirs."""
        self.policy, self.ranks = policy.requires_grad_(False), ranks or Ranks()
        self.ranks.shard(policy, ACTS)
        self.limits: dict[str, Any] = {"tokens": tokens, "columns": columns, "ranks": self.ranks}

    def settle(self, actor: LanguagePolicy) -> None:
        """It is a copy already."""

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        found = views(self.policy, obs, mask, action, hidden=hidden, **self.limits)
        self.ranks.reshard(self.policy)
        return found

    def state(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(self.ranks.parts(self.policy, state))

    def held(self) -> Any:
        return list(self.policy.state_dict().values())


class ValueLearner(TokenBudgetOptimizer):
    """A critic in this process."""

    def __init__(
        self,
        critic: LanguageCritic,
        config: AlgorithmConfig,
        *,
        length: int,
        columns: int,
        tokens: int | None = None,
        concurrent: bool = False,
        ranks: Ranks | None = None,
        **rest: Any,
    ) -> None:
        """``config``: of its optimiser and epochs. ``length``: response_length (T). ``columns``: sequences of an
        optimiser step, of all ranks together. ``tokens``: at most in a forward pass (``value_rows``: sequences).
        ``concurrent``: it learns in a thread of its own. ``ranks`` and ``rest`` as for ``MinibatchOptimizer``.
        """
        own = replace(config, minibatch_unit="column", target_kl_stop=None)
        (ranks or Ranks()).shard(critic, VALUES)
        objective = TokenLoss(critic, own, length=length)
        super().__init__(objective, own, columns=columns, tokens=tokens, critic=True, ranks=ranks, **rest)
        self.pool: ThreadPoolExecutor | None = None
        if concurrent:
            threads = torch.get_num_threads()  # a thread has its own number
            self.pool = ThreadPoolExecutor(1, "critic", initializer=torch.set_num_threads, initargs=(threads,))
        self._learning: Future[OptimizationStats] | OptimizationStats = NOTHING

    @property
    def rate(self) -> float:
        return self.optimizer.param_groups[1]["lr"]

    def settle(self, actor: LanguagePolicy) -> None:
        """It is a copy already."""

    @torch.no_grad()
    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        critic: Any = self.module
        value = torch.zeros(mask.shape, device=mask.device)
        for part, ids, place, rows in parts(obs, mask, self.tokens, value_rows(self.config), self.ranks):
            value[:rows, part] = torch.where(mask[:rows, part], critic.value(ids, place).T, 0.0)
        return value

    def begin(self, obs: Rows, mask: Tensor, value: Tensor, returns: Tensor, update: int) -> None:
        """At once, unless it has a thread of its own."""
        batch = Batch(
            inputs=dict(obs),
            action=obs["place"],  # neither this nor the next two are read
            replay={},
            log_prob=value,
            value=value,
            advantage=value,
            returns=returns,
            mask=mask,
        )

        def learn() -> OptimizationStats:
            return self.optimize(batch, update, warming=False, entropy_coef=0.0)

        self._learning = learn() if self.pool is None else self.pool.submit(learn)

    def end(self) -> OptimizationStats:
        told, self._learning = self._learning, NOTHING
        return told.result() if isinstance(told, Future) else told

    def state(self) -> dict[str, Any]:
        return {"critic": super().state(), "critic_weights": self.module.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state["critic"])
        self.module.load_state_dict(self.ranks.parts(self.module, state["critic_weights"]))

    def held(self) -> Any:
        return [self.state(), [p.grad for p in self.module.parameters() if p.grad is not None]]

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        super().close()


# -------------------------------------------------------------------------------------------------------------- learner
class SplitLearner:
    """PPO on a language model and a separate critic: the same advantages, two losses, two optimisers.

    A trajectory's obs are ``Rows``; its values are the critic's business: what it holds of them is not read.
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        critic: Critic | None,
        config: AlgorithmConfig,
        *,
        length: int,
        columns: int,
        tokens: int | None = None,
        recompute: bool = False,
        num_sequences: int,
        updates: int,
        seed: int,
        later: compile.CompileSchedule | None = None,
        dump_dir: Path | None = None,
        notice: Callable[[str], None] = lambda text: None,
        ranks: Ranks | None = None,
        reference: Reference | None = None,
    ) -> None:
        """``critic``: None for estimators that read no value. ``length``: response_length (T). ``columns``: sequences
        of an optimiser step, of all ranks together. ``tokens``: at most in a forward pass; None: no limit
        (config.micro_batch_size: sequences in it). ``recompute``: the behaviour's log-probabilities are
        computed anew before the first epoch; False: the rollout's are taken. ``num_sequences``: N of all ranks.
        ``reference``: None, a copy of ``policy`` where the config asks for one. The rest as for ``JointLearner``.
        Raises ConfigError."""
        self.policy, self.config, self.tokens, self.recompute = policy, config, tokens, recompute
        self.notice, self.ranks, self.critic = notice, ranks or Ranks(), critic
        self.cpu_s = {"advantages": 0.0, "update": 0.0}
        self.reference: Reference | None = None
        if config.use_kl_loss or config.use_kl_in_reward:
            if config.use_kl_loss:
                kl.check_loss_type(config.kl_loss_type)
            self.reference = reference or FrozenReference(
                copy.deepcopy(policy), tokens=tokens, columns=log_prob_rows(config), ranks=ranks
            )
        if critic is None and config.adv_type == "gae":
            raise ConfigError("algorithm.adv_type = gae: needs a critic; write critic.use_critic_model=true")
        self.ranks.shard(policy, ACTS)
        whole = replace(config, minibatch_unit="column")
        self.actor = TokenBudgetOptimizer(
            TokenLoss(policy, whole, length=length, reference=self._beside()),
            whole,
            columns=columns,
            tokens=tokens,
            updates=updates,
            seed=seed,
            later=later,
            dump_dir=dump_dir,
            notice=notice,
            ranks=ranks,
        )
        self.returns = advantages.ReturnScaler(num_sequences).to(next(policy.parameters()).device)
        self.kl = kl.controller(**vars(config.kl_ctrl))
        self.entropy = losses.EntropyController(config.entropy_bonus, config.entropy_target)

    def _beside(self) -> LanguagePolicy | None:
        """The reference's model, if it is in this process."""
        return self.reference.policy if isinstance(self.reference, FrozenReference) else None

    def settle(self) -> None:
        """Once, before the first update: critic and reference elsewhere begin as the actor."""
        for other in (self.critic, self.reference):
            if other is not None:
                other.settle(self.policy)

    # --------------------------------------------------------------------------------------------- one update
    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Critic and actor from the same advantages, one after the other or at once; ``critic_warmup`` leaves the actor
        out."""
        c = self.config
        start = time.process_time()
        self.ranks.reshard(self.policy)
        batch, metrics = self._prepare(trajectory)
        prepared = time.process_time()
        if self.critic is not None:
            self.critic.begin(batch.inputs, batch.mask, batch.value, batch.returns, update)
        actor = critic = NOTHING
        try:
            if update >= c.critic_warmup:
                actor = self.actor.optimize(batch, update, warming=False, entropy_coef=self.entropy.coef)
        finally:
            if self.critic is not None:
                critic = self.critic.end()
        self.cpu_s["advantages"] += prepared - start
        self.cpu_s["update"] += time.process_time() - prepared
        rates = [self.actor.optimizer.param_groups[0]["lr"], self.critic.rate if self.critic is not None else 0.0]
        metrics |= summary(actor, critic, c, lr=rates)
        if self.critic is None:
            metrics = {tag: x for tag, x in metrics.items() if not tag.startswith("value/")}
        if c.entropy_target is not None:
            metrics["policy/entropy_coef"] = self.entropy.coef
        if actor is not NOTHING and actor.sums["steps"]:
            self._steer(metrics, actor.sums)
        return metrics

    def _steer(self, metrics: Metrics, sums: Mapping[str, float]) -> None:
        self.entropy.update(sums["entropy"] / sums["steps"])
        distance = metrics.get("kl/to_reference")
        if self.config.use_kl_in_reward and isinstance(distance, Mean):
            self.kl.update(distance.value, int(distance.count))
        self.actor.adapt(sums)

    def _prepare(self, t: Trajectory) -> tuple[Batch, Metrics]:
        """Values, log-probabilities, rewards and advantages, [T, N]; what is normalised is so over all ranks."""
        c, mask, ranks, obs = self.config, t.mask, self.ranks, t.obs
        assert isinstance(obs, dict)
        metrics: Metrics = {}
        behaviour, weight = t.log_prob, None
        full = full_kl(c)
        if self.recompute or c.off_policy_correction is not None:
            limits: dict[str, Any] = {"tokens": self.tokens, "columns": log_prob_rows(c), "ranks": ranks}
            behaviour = views(self.policy, obs, mask, t.action, **limits)["log_prob"]
            if c.off_policy_correction is not None:
                weight, metrics = off_policy(behaviour, t.log_prob, mask, c)
        other = {} if self.reference is None else self.reference.view(obs, mask, t.action, hidden=full)
        value = torch.zeros_like(t.value) if self.critic is None else self.critic.values(obs, mask)
        scalars = {"reward": t.reward, "terminated": t.terminated, "truncated": t.truncated, "mask": mask}
        t = replace(t, **ranks.columns({**scalars, "value": value}))  # of all ranks; obs, action: this rank's
        # A score belongs to the sequence: it is normalised as such and lies on the last token, where the episode ends.
        done = t.terminated | t.truncated
        some = t.mask.any(0, keepdim=True)  # [1, N]
        score = torch.where(t.mask, t.reward, 0.0).sum(0, keepdim=True)
        plain = replace(c, whiten_rewards=False)
        score = shaped(score, some, some, plain, returns=self.returns)
        reward = torch.where(done & t.mask, score, 0.0)
        if not c.whiten_after_kl:
            reward = whitened(reward, t.mask, c)
        if c.use_kl_in_reward:
            distance = ranks.columns(self._distance(obs, mask, t.action, behaviour, other))
            reward, told = penalized(reward, distance, t.mask, self.kl.coef)
            metrics |= told
        reward = shaped_after_kl(reward, t.mask, c)
        following = torch.cat([t.value[1:], torch.zeros_like(t.value[:1])])  # never read where the response ends
        t = replace(t, next_value=following, reward=reward)
        advantage, returns, told = estimated(t, c, notice=self.notice)
        batch = Batch(
            inputs=obs,
            action=t.action,
            replay={},
            log_prob=behaviour,
            value=value,
            advantage=ranks.own(advantage),
            returns=ranks.own(returns),
            mask=mask,
            weight=weight,
            ref_log_prob=other.get("log_prob") if c.use_kl_loss else None,
            ref_logits=other.get("hidden") if c.use_kl_loss and c.kl_loss_type == "full" else None,
        )
        return batch, metrics | told

    @torch.no_grad()
    def _distance(
        self, obs: Rows, mask: Tensor, action: Tensor, behaviour: Tensor, other: Mapping[str, Tensor]
    ) -> Tensor:
        """KL from the reference, [T, N], by the estimator kl_penalty."""
        if self.config.kl_penalty != "full":
            return kl.estimate(behaviour, other["log_prob"], self.config.kl_penalty)
        distance = torch.zeros_like(behaviour)
        for part, ids, place, rows in parts(obs, mask, self.tokens, log_prob_rows(self.config), self.ranks):
            view = self.policy.view_where(
                mask[:rows, part],
                self.policy.hidden(ids, place),
                action[:rows, part],
                reference=self._beside(),
                ref=other["hidden"][:rows, part],
            )
            assert view.distance is not None
            distance[:rows, part] = view.distance
        return distance

    # --------------------------------------------------------------------------------------------- checkpoint
    def state(self) -> dict[str, Any]:
        """Everything beyond the policy's weights that the next update depends on."""
        return {
            "actor": self.actor.state(),
            **({"critic": None, "critic_weights": None} if self.critic is None else self.critic.state()),
            "reference": None if self.reference is None else self.reference.state(),
            "returns": self.returns.state_dict(),
            "kl": self.kl.state_dict(),
            "entropy": self.entropy.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``. Raises ConfigError where it has no critic or reference to continue with."""
        for name, here in (("critic", self.critic), ("reference", self.reference)):
            if here is not None and state[name] is None:
                raise ConfigError(f"the checkpoint holds no {name} to continue with; start a new run")
        self.actor.load_state(state["actor"])
        if self.critic is not None:
            self.critic.load_state(state)
        if self.reference is not None:
            self.reference.load_state(state["reference"])
        if self.config.reward_norm == "running":
            self.returns.load_state_dict(state["returns"])
        if self.config.kl_ctrl.type == "adaptive":
            self.kl.load_state_dict(state["kl"])
        if self.config.entropy_target is not None:
            self.entropy.load_state_dict(state["entropy"])

    def held(self) -> Any:
        """As of ``Critic``, without the policy."""
        others = [x.held() for x in (self.critic, self.reference) if x is not None]
        return [self.actor.state(), self.returns.state_dict(), *others]

    def close(self) -> None:
        """Give up compilations under way."""
        self.actor.close()
        if self.critic is not None:
            self.critic.close()
