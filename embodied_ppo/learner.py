"""Learn from a trajectory: advantages once, then epochs x minibatches of the joint actor-critic loss."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_ppo import advantages, compiled, kl, losses, tree
from embodied_ppo.config import AlgorithmConfig
from embodied_ppo.descent import Descended, Descent, TokenDescent, cut_columns
from embodied_ppo.models.language import LanguageCritic, LanguagePolicy
from embodied_ppo.moments import Moments, RunningMoments, expand_mask, explained_variance, masked_moments, masked_sum
from embodied_ppo.objective import Objective, TokenObjective, kl_distance
from embodied_ppo.ranks import Ranks
from embodied_ppo.types import Batch, ConfigError, Evaluation, Mean, Metrics, Policy, Trajectory


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
    """Rewards [T, N] clipped and normalised; ``returns`` sees them first, should its deviation be asked for."""
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
    return advantages.whiten_rewards(reward, mask) if c.whiten_rewards else reward


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
    """Advantages as the loss wants them, and returns, [T, N]."""
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


def summary(actor: Descended, critic: Descended, c: AlgorithmConfig, *, lr: Sequence[float]) -> Metrics:
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


# ----------------------------------------------------------------------------------------------------------- one model
class JointLearner(Descent):
    """PPO on one module with policy and value head: one loss, one backward, one AdamW with two learning rates."""

    def __init__(
        self,
        policy: Policy,
        config: AlgorithmConfig,
        *,
        num_envs: int,
        updates: int,
        seed: int,
        later: compiled.Later | None = None,
        dump_dir: Path | None = None,
        notice: Callable[[str], None] = lambda text: None,
        beside: Callable[[torch.Generator], Tensor] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """``policy`` is an ``nn.Module``; ``num_envs``: of all ranks; ``beside``: the loss of behaviour cloning that
        every minibatch adds, see ``cloning.Beside``; the rest as for ``Descent``."""
        super().__init__(
            Objective(policy, config),
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
        self.reference = None
        if config.use_kl_loss or config.use_kl_in_reward:
            if config.use_kl_loss:
                kl.check_loss_type(config.kl_loss_type)
            self.reference = copy.deepcopy(policy)
        losses.check_levels(
            logprob_type=config.logprob_type, entropy_type=config.entropy_type, reward_type=config.reward_type
        )

    # --------------------------------------------------------------------------------------------- one update
    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Train on one trajectory (this rank's columns), then merge its observations into the policy's normaliser."""
        c = self.config
        warming = update < c.critic_warmup
        start = time.process_time()
        batch, metrics = self._prepare(trajectory)
        prepared = time.process_time()
        done = self.descend(batch, update, warming=warming, entropy_coef=self.entropy.coef)
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
        obs, mask = tree.flatten_time(t.obs), t.mask.flatten()
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

        What is one number a decision is computed for the columns of all ranks, so that nobody's part is normalised or
        measured by itself.
        """
        c, t, ranks = self.config, trajectory, self.ranks
        mask = t.mask
        inputs = self.policy.encode(tree.flatten_time(t.obs))  # [T*N, ..]
        metrics: Metrics = {}
        scalars = ("reward", "value", "next_value", "terminated", "truncated", "mask", "steps")
        whole = replace(t, **ranks.columns({name: getattr(t, name) for name in scalars}))  # obs, action: this rank's
        done, steps = whole.terminated | whole.truncated, 1 if whole.steps is None else whole.steps
        reward = shaped(whole.reward, done, whole.mask, c, returns=self.returns, steps=steps)
        weight, behaviour = None, t.log_prob
        if c.off_policy_correction is not None:
            behaviour = self._view(self.policy, inputs, t).log_prob
            old, acted = (losses.reduce_log_prob(x, c.logprob_type, batch_dims=2) for x in (behaviour, t.log_prob))
            weight, metrics = off_policy(old, acted, mask, c)
        reference = None
        if self.reference is not None:  # it sees raw observations through its own, frozen normaliser
            reference = self._view(self.reference, self.reference.encode(tree.flatten_time(t.obs)), t)
        if reference is not None and c.use_kl_in_reward:
            logits = self._view(self.policy, inputs, t).logits if c.kl_penalty == "full" else None
            distance = kl_distance(behaviour, reference.log_prob, c.kl_penalty, logits, reference.logits, dims=2)
            reward, told = penalized(reward, ranks.columns(distance), whole.mask, self.kl.coef)
            metrics |= told
        advantage, returns, told = estimated(replace(whole, reward=reward), c, steps=steps, notice=self.notice)
        metrics |= told
        batch = Batch(
            inputs=tree.map(lambda x: x.unflatten(0, mask.shape), inputs),
            action=t.action,
            replay=t.replay,
            log_prob=losses.reduce_log_prob(behaviour, c.logprob_type, batch_dims=2),
            value=t.value,
            advantage=ranks.own(advantage),
            returns=ranks.own(returns),
            mask=mask,
            weight=weight,
            ref_log_prob=reference.log_prob if reference is not None and c.use_kl_loss else None,
            ref_logits=reference.logits if reference is not None and c.use_kl_loss else None,
        )
        return (batch if c.minibatch_unit == "column" else tree.flatten_time(batch)), metrics

    @torch.no_grad()
    def _view(self, policy: Policy, inputs: Any, t: Trajectory) -> Evaluation:
        """What ``policy`` thinks of the trajectory's actions, [T, N, ..], in micro-batches."""
        action, replay = tree.flatten_time(t.action), tree.flatten_time(t.replay)
        size = self.config.micro_batch_size or self.config.global_batch_size
        parts = []
        for i in range(0, action.shape[0], size):
            cut = slice(i, i + size)
            parts.append(policy.evaluate(tree.index(inputs, cut), action[cut], tree.index(replay, cut)))
        joined = tree.map(lambda *xs: torch.cat(xs), parts[0], *parts[1:])
        return tree.map(lambda x: x.unflatten(0, t.mask.shape), joined)

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
            self.reference.load_state_dict(state["reference"])


# ---------------------------------------------------------------------------------------------------------- two models
NOTHING = Descended({}, 0.0, 0)
"""What a model tells that has learnt nothing."""


class SplitLearner:
    """PPO on a language model and a separate critic: the same advantages, two losses, two optimisers.

    A trajectory's obs are "row" int64 [L, N], prompt and response without a gap, and "place" int64 [T, N], see
    ``TokenObjective``; its values are the critic's business: what it holds of them is not read.
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        critic: LanguageCritic | None,
        config: AlgorithmConfig,
        *,
        critic_config: AlgorithmConfig | None = None,
        length: int,
        columns: int,
        critic_columns: int | None = None,
        tokens: int | None = None,
        recompute: bool = False,
        num_sequences: int,
        updates: int,
        seed: int,
        later: Sequence[compiled.Later] = (),
        concurrent: bool = False,
        dump_dir: Path | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``critic``: None for estimators that read no value. ``critic_config``: of its optimiser and epochs; None: as
        ``config``. ``length``: response_length (T). ``columns``, ``critic_columns``: sequences of an optimiser step.
        ``tokens``: at most in a forward pass; None: no limit
        (config.micro_batch_size: sequences in it). ``recompute``: the behaviour's log-probabilities are
        computed anew before the first epoch; False: the rollout's are taken. ``num_sequences``: N. ``later``: compiled
        minibatches of actor and critic. ``concurrent``: the critic learns in a thread of its own. The rest as for
        ``JointLearner``. Raises ConfigError."""
        self.policy, self.config, self.tokens, self.recompute = policy, config, tokens, recompute
        self.notice = notice
        self.cpu_s = {"advantages": 0.0, "update": 0.0}
        self.reference: LanguagePolicy | None = None
        if config.use_kl_loss or config.use_kl_in_reward:
            if config.use_kl_loss:
                kl.check_loss_type(config.kl_loss_type)
            self.reference = copy.deepcopy(policy).requires_grad_(False)
        rest: dict[str, Any] = {"updates": updates, "seed": seed, "dump_dir": dump_dir, "notice": notice}
        whole = replace(config, minibatch_unit="column")
        self.actor = TokenDescent(
            TokenObjective(policy, whole, length=length, reference=self.reference),
            whole,
            columns=columns,
            tokens=tokens,
            later=later[0] if later else None,
            **rest,
        )
        self.critic: TokenDescent | None = None
        if critic is not None:
            own = replace(critic_config or config, minibatch_unit="column", target_kl_stop=None)
            self.critic = TokenDescent(
                TokenObjective(critic, own, length=length),
                own,
                columns=critic_columns or columns,
                tokens=tokens,
                critic=True,
                later=later[1] if later else None,
                **rest,
            )
        elif config.adv_type == "gae":
            raise ConfigError("algorithm.adv_type = gae: needs a critic; write critic.use_critic_model=true")
        self.pool: ThreadPoolExecutor | None = None
        if concurrent and critic is not None:
            threads = torch.get_num_threads()  # a thread has its own number
            self.pool = ThreadPoolExecutor(1, "critic", initializer=torch.set_num_threads, initargs=(threads,))
        self.returns = advantages.ReturnScaler(num_sequences).to(next(policy.parameters()).device)
        self.kl = kl.controller(**vars(config.kl_ctrl))
        self.entropy = losses.EntropyController(config.entropy_bonus, config.entropy_target)

    # --------------------------------------------------------------------------------------------- one update
    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Critic and actor from the same advantages, one after the other or at once; ``critic_warmup`` leaves the actor
        out."""
        c = self.config
        start = time.process_time()
        batch, metrics = self._prepare(trajectory)
        prepared = time.process_time()
        job = partial(self._learn_values, batch, update)
        waiting = None if self.pool is None else self.pool.submit(job)
        critic, actor = job() if waiting is None else NOTHING, NOTHING
        try:
            if update >= c.critic_warmup:
                actor = self.actor.descend(batch, update, warming=False, entropy_coef=self.entropy.coef)
        finally:
            if waiting is not None:
                critic = waiting.result()
        self.cpu_s["advantages"] += prepared - start
        self.cpu_s["update"] += time.process_time() - prepared
        rates = [self.actor.optimizer.param_groups[0]["lr"]]
        rates.append(self.critic.optimizer.param_groups[1]["lr"] if self.critic is not None else 0.0)
        metrics |= summary(actor, critic, c, lr=rates)
        if self.critic is None:
            metrics = {tag: x for tag, x in metrics.items() if not tag.startswith("value/")}
        if c.entropy_target is not None:
            metrics["policy/entropy_coef"] = self.entropy.coef
        if actor is not NOTHING and actor.sums["steps"]:
            self._steer(metrics, actor.sums)
        return metrics

    def _learn_values(self, batch: Batch, update: int) -> Descended:
        """The critic's epochs."""
        if self.critic is None:
            return NOTHING
        plain = replace(batch, log_prob=batch.value, weight=None, ref_log_prob=None, ref_logits=None)
        return self.critic.descend(plain, update, warming=False, entropy_coef=0.0)

    def _steer(self, metrics: Metrics, sums: Mapping[str, float]) -> None:
        self.entropy.update(sums["entropy"] / sums["steps"])
        distance = metrics.get("kl/to_reference")
        if self.config.use_kl_in_reward and isinstance(distance, Mean):
            self.kl.update(distance.value, int(distance.count))
        self.actor.adapt(sums)

    def _prepare(self, t: Trajectory) -> tuple[Batch, Metrics]:
        """Values, log-probabilities, rewards and advantages, [T, N]."""
        c, mask = self.config, t.mask
        metrics: Metrics = {}
        behaviour, weight = t.log_prob, None
        full_loss = c.use_kl_loss and c.kl_loss_type == "full"
        full = full_loss or (c.use_kl_in_reward and c.kl_penalty == "full")
        if self.recompute or c.off_policy_correction is not None:
            behaviour = self._view(self.policy, t)["log_prob"]
            if c.off_policy_correction is not None:
                weight, metrics = off_policy(behaviour, t.log_prob, mask, c)
        other = self._view(self.reference, t, hidden=full) if self.reference is not None else {}
        # A score belongs to the sequence: it is normalised as such and lies on the last token, where the episode ends.
        done = t.terminated | t.truncated
        some = mask.any(0, keepdim=True)  # [1, N]
        score = torch.where(mask, t.reward, 0.0).sum(0, keepdim=True)
        plain = replace(c, whiten_rewards=False)
        score = shaped(score, some, some, plain, returns=self.returns)
        reward = torch.where(done & mask, score, 0.0)
        if c.whiten_rewards:
            reward = advantages.whiten_rewards(reward, mask)
        if c.use_kl_in_reward:
            distance = self._distance(t, behaviour, other)
            reward, told = penalized(reward, distance, mask, self.kl.coef)
            metrics |= told
        value = self._values(t) if self.critic is not None else torch.zeros_like(t.value)
        following = torch.cat([value[1:], torch.zeros_like(value[:1])])  # never read where the response ends
        t = replace(t, value=value, next_value=following, reward=reward)
        advantage, returns, told = estimated(t, c, notice=self.notice)
        batch = Batch(
            inputs=t.obs,
            action=t.action,
            replay={},
            log_prob=behaviour,
            value=value,
            advantage=advantage,
            returns=returns,
            mask=mask,
            weight=weight,
            ref_log_prob=other.get("log_prob") if c.use_kl_loss else None,
            ref_logits=other.get("hidden") if full_loss else None,
        )
        return batch, metrics | told

    # --------------------------------------------------------------------------------------------- views
    def _parts(self, t: Trajectory) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
        """Columns in parts of like length: (index [b], ids [b, l], place [b, r], r)."""
        assert isinstance(t.obs, dict)
        for part, width, rows in cut_columns(t.mask, t.obs["place"], self.tokens, self.config.micro_batch_size):
            place = torch.where(t.mask, t.obs["place"], 0)[:rows, part]
            yield part, t.obs["row"][:width, part].T, place.T, rows

    @torch.no_grad()
    def _view(self, policy: LanguagePolicy, t: Trajectory, *, hidden: bool = False) -> dict[str, Tensor]:
        """ "log_prob" [T, N] of the taken tokens and, if asked for, "hidden" states [T, N, D]."""
        zero = torch.zeros_like(t.log_prob)
        out = {"log_prob": zero}
        if hidden:
            out["hidden"] = zero.new_zeros(*zero.shape, policy.decoder.module.hidden_size)
        for part, ids, place, rows in self._parts(t):
            states = policy.hidden(ids, place)
            out["log_prob"][:rows, part] = policy.view_where(
                t.mask[:rows, part], states, t.action[:rows, part]
            ).log_prob
            if hidden:
                out["hidden"][:rows, part] = states.transpose(0, 1).to(zero.dtype)
        return out

    @torch.no_grad()
    def _values(self, t: Trajectory) -> Tensor:
        assert self.critic is not None
        critic: Any = self.critic.module
        value = torch.zeros_like(t.value)
        for part, ids, place, rows in self._parts(t):
            value[:rows, part] = torch.where(t.mask[:rows, part], critic.value(ids, place).T, 0.0)
        return value

    @torch.no_grad()
    def _distance(self, t: Trajectory, behaviour: Tensor, other: Mapping[str, Tensor]) -> Tensor:
        """KL from the reference, [T, N], by the estimator kl_penalty."""
        if self.config.kl_penalty != "full":
            return kl.estimate(behaviour, other["log_prob"], self.config.kl_penalty)
        distance = torch.zeros_like(behaviour)
        for part, ids, place, rows in self._parts(t):
            view = self.policy.view_where(
                t.mask[:rows, part],
                self.policy.hidden(ids, place),
                t.action[:rows, part],
                reference=self.reference,
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
            "critic": None if self.critic is None else self.critic.state(),
            "critic_weights": None if self.critic is None else self.critic.module.state_dict(),
            "reference": None if self.reference is None else self.reference.state_dict(),
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
            self.critic.load_state(state["critic"])
            self.critic.module.load_state_dict(state["critic_weights"])
        if self.reference is not None:
            self.reference.load_state_dict(state["reference"])
        if self.config.reward_norm == "running":
            self.returns.load_state_dict(state["returns"])
        if self.config.kl_ctrl.type == "adaptive":
            self.kl.load_state_dict(state["kl"])
        if self.config.entropy_target is not None:
            self.entropy.load_state_dict(state["entropy"])

    def close(self) -> None:
        """Give up compilations under way."""
        if self.pool is not None:
            self.pool.shutdown()
        self.actor.close()
        if self.critic is not None:
            self.critic.close()
