"""Learner of ``algorithm.type=reppo``: an action value, and a policy that follows its gradient.

The newest ``algorithm.kept_rollouts`` rollouts are kept. Each update trains on
``algorithm.rollouts_per_update`` of them: the newest one and random older ones. Targets of the
action value are computed once per update, for all of these rollouts, with the current policy and
the current action value; probability ratios cut the traces of actions that the current policy would
rarely take (Retrace, Munos et al. 2016). The minibatches are those of ``reppo_step``.

K rollouts of T steps in N environments are M = K·T·N samples. A action dimensions, B samples of a
minibatch, E ends of episodes in a rollout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from embodied_ppo.algorithms import advantages
from embodied_ppo.algorithms.optimizer import learning_rate_factor
from embodied_ppo.algorithms.reppo_step import (
    DUAL_LR,
    ENTROPY,
    KL,
    MIN_COEFFICIENT,
    STATISTICS,
    ReppoStep,
    Samples,
    sample_action,
)
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile, devices, tree
from embodied_ppo.core.random import sampling_key
from embodied_ppo.core.running_stats import explained_variance, read_numbers
from embodied_ppo.core.tree import apply_in_parts
from embodied_ppo.core.types import (
    ConfigError,
    Mean,
    Metrics,
    Obs,
    TrainingError,
    Trajectory,
    UpdateObserver,
)
from embodied_ppo.models import distributions as dist
from embodied_ppo.models.action_value import ActionValue
from embodied_ppo.models.actor_critic import ActorCritic

INITIAL_KL_COEF = 0.01
"""Initial β."""
ENTROPY_PER_DIMENSION = -1.0
"""Target of the entropy per action dimension, nats, where ``algorithm.entropy_target`` is null."""


@dataclass(frozen=True)
class KeptRollout:
    """What is kept of a rollout. Leaves are [T, N, ..] except where noted.

    Attributes:
        obs: Observations and those after the last step, [T + 1, N, ..].
        final_obs: Last observations of the episodes that end, [E, ..].
        ends: Indices of their rows in [T·N], int64 [E], ascending.
        action: Executed actions.
        pre_squash: The actions before the tanh.
        log_prob: Log-probability of the actions when they were taken.
        reward: Reward, unscaled.
        terminated: bool.
        truncated: bool.
        mask: bool, the rows that are samples.
        discount: Discount of the successor's value, γ to the number of steps that the action took.
    """

    obs: Obs
    final_obs: Obs
    ends: Tensor
    action: Tensor
    pre_squash: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    mask: Tensor
    discount: Tensor


class ReppoLearner:
    """Trains policy and action value; see ``core.types.Learner``."""

    def __init__(
        self,
        policy: ActorCritic,
        critic: ActionValue,
        config: AlgorithmConfig,
        *,
        num_envs: int,
        updates: int,
        seed: int,
        compile_schedule: compile.CompileSchedule | None = None,
    ) -> None:
        """Create the learner.

        Args:
            policy: A squashed Gaussian without a value head.
            critic: The action value.
            config: Options of the algorithm.
            num_envs: Environments, N.
            updates: Updates of the complete run, for the schedule of the learning rate.
            seed: Seed of all random numbers.
            compile_schedule: When minibatches run as compiled code. None: never.

        Raises:
            ConfigError: There is not enough memory for the kept rollouts.
        """
        self.policy, self.critic, self.config = policy, critic, config
        self.updates, self.seed = updates, seed
        self.compile_schedule = compile_schedule or compile.CompileSchedule(None)
        self.cpu_s = {"advantages": 0.0, "update": 0.0}
        self.device = policy.policy_head.weight.device
        _check_memory(policy, config, num_envs)
        self.return_scaler = advantages.ReturnScaler(num_envs).to(self.device)
        self.kept: list[KeptRollout] = []
        """The newest rollouts, the oldest first."""
        coefficients = [0.0, 0.0]
        coefficients[ENTROPY] = _log_coefficient(config.entropy_bonus)
        coefficients[KL] = math.log(INITIAL_KL_COEF)
        log_coefficients = torch.tensor(coefficients, device=self.device)
        self.parameters = [*_tensors(policy), *_tensors(critic), log_coefficients]
        self.first_moments = [torch.zeros_like(p) for p in self.parameters]
        self.second_moments = [torch.zeros_like(p) for p in self.parameters]
        self.steps = 0
        """Optimiser steps so far."""
        target = config.entropy_target
        self.entropy_target = ENTROPY_PER_DIMENSION * policy.actions if target is None else target

    # ----------------------------------------------------------------------------------- one update
    def update(self, trajectory: Trajectory, *, update: int) -> Metrics:
        """Train on this rollout, [T, N, ..], and kept ones; ``update`` counts from 0.

        Raises:
            TrainingError: A loss or gradient is not finite.
        """
        start = time.process_time()
        self._keep(trajectory)
        generator = torch.Generator(self.device).manual_seed(
            sampling_key(self.seed, update, "reppo")
        )
        samples, valid, metrics = self._samples(generator)
        prepared = time.process_time()
        metrics |= self._optimize(samples, valid, update, generator)
        mask = trajectory.mask.flatten()
        self.policy.observe(tree.flatten_time(trajectory.obs), mask)
        self.cpu_s["advantages"] += prepared - start
        self.cpu_s["update"] += time.process_time() - prepared
        return metrics

    def _keep(self, t: Trajectory) -> None:
        """Keep a rollout, and drop the oldest one if there are too many."""
        assert t.next_obs is not None
        c = self.config
        steps = 1 if t.steps is None else t.steps
        done = t.terminated | t.truncated
        self.return_scaler.update(t.reward, done, t.mask, c.gamma, steps)
        discount = torch.full_like(t.reward, c.gamma) ** steps
        ends = done.flatten().nonzero().flatten()
        rollout = KeptRollout(
            obs=tree.map(lambda x, y: torch.cat([x, y[-1:]]), t.obs, t.next_obs),
            final_obs=tree.map(lambda x: x.flatten(0, 1)[ends], t.next_obs),
            ends=ends,
            action=t.action,
            pre_squash=t.replay["pre_squash"],
            log_prob=t.log_prob.flatten(2).sum(-1),
            reward=t.reward,
            terminated=t.terminated,
            truncated=t.truncated,
            mask=t.mask,
            discount=discount,
        )
        self.kept = [*self.kept, rollout][-c.kept_rollouts :]

    def _chosen(self, generator: torch.Generator) -> list[KeptRollout]:
        """Return the newest rollout and random older ones, in the order of their age."""
        older = len(self.kept) - 1
        order = torch.randperm(older, generator=generator, device=self.device).tolist()
        chosen = sorted(order[: self.config.rollouts_per_update - 1])
        return [*(self.kept[i] for i in chosen), self.kept[-1]]

    @torch.no_grad()
    def _samples(self, generator: torch.Generator) -> tuple[Samples, Tensor, Metrics]:
        """Return the samples [M, ..], the indices of those that count, and metrics.

        Before ``rollouts_per_update`` rollouts exist, zeros fill the samples, so that their number
        is always the same.
        """
        chosen = self._chosen(generator)
        parts: list[Samples] = []
        value, trace = [], []
        for rollout in chosen:
            samples, q, weight = self._targets(rollout, generator)
            parts.append(samples)
            value.append(q)
            trace.append(weight)
        mask = torch.stack([x.mask for x in chosen])  # [K, T, N]
        missing = self.config.rollouts_per_update - len(parts)
        parts += [tree.map(torch.zeros_like, parts[0])] * missing
        samples: Samples = tree.map(lambda *xs: torch.cat(xs), parts[0], *parts[1:])
        valid = mask.flatten().nonzero().flatten()
        target = samples.target[: mask.numel()].view_as(mask)
        total, count, explained = read_numbers(
            (torch.stack(trace) * mask).sum(),
            mask.sum(),
            explained_variance(
                torch.stack(value).flatten(0, 1), target.flatten(0, 1), mask.flatten(0, 1)
            ),
        )
        metrics: Metrics = {
            "value/explained_variance": explained,
            "policy/off_policy_weight": Mean(total, count),
        }
        return samples, valid, metrics

    def _targets(
        self, r: KeptRollout, generator: torch.Generator
    ) -> tuple[Samples, Tensor, Tensor]:
        """Return the samples of a rollout [T·N, ..], Q of its actions, and the traces' factors.

        Q and the factors min(1, π / μ) are [T, N].
        """
        c, shape, count = self.config, r.mask.shape, r.mask.numel()
        states = tree.map(lambda x, y: torch.cat([x.flatten(0, 1), y]), r.obs, r.final_obs)
        rows = c.logprob_forward_micro_batch_size
        inputs = apply_in_parts(self.policy.encode, rows, states)  # [(T + 1)·N + E, D]
        mean, log_std = self.policy.distribution(inputs)
        log_std = log_std.expand_as(mean)
        noise = torch.randn(mean.shape, generator=generator, device=self.device)
        sample, log_prob = sample_action(mean, log_std, noise)
        state_value = self.critic(inputs, sample) - self.coefficients[ENTROPY] * log_prob
        successor = torch.arange(count, device=self.device) + shape[1]
        successor[r.ends] = torch.arange(len(mean) - len(r.ends), len(mean), device=self.device)

        inputs = {name: x[:count] for name, x in inputs.items()}
        mean, log_std = mean[:count], log_std[:count]
        current = dist.squashed_log_prob(tree.flatten_time(r.pre_squash), mean, log_std).sum(-1)
        weight = (current.view(shape) - r.log_prob).clamp(max=0.0).exp()
        action = tree.flatten_time(r.action)
        q = self.critic(inputs, action).view(shape)
        target = advantages.retrace(
            reward=r.reward / self.return_scaler.std.float(),
            value=q,
            next_value=state_value[successor].view(shape),
            terminated=r.terminated,
            truncated=r.truncated,
            mask=r.mask,
            discount=r.discount,
            trace=c.gae_lambda * weight,
        )
        samples = Samples(inputs, action, target.flatten(), mean, log_std)
        return samples, q, weight

    @property
    def coefficients(self) -> Tensor:
        """α and β, [2]."""
        return self.parameters[-1].exp()

    # --------------------------------------------------------------------------------- minibatches
    def _optimize(
        self, samples: Samples, valid: Tensor, update: int, generator: torch.Generator
    ) -> Metrics:
        """Take the optimiser steps of an update."""
        c, size = self.config, self.config.global_batch_size
        count = c.update_epoch * len(samples.target) // (c.rollouts_per_update * size)
        if not len(valid):
            return {}
        passes = -(-count * size // len(valid))
        order = torch.cat(
            [
                valid[torch.randperm(len(valid), generator=generator, device=self.device)]
                for _ in range(passes)
            ]
        )
        settings = self._settings(count, update)
        max_kl = torch.tensor(c.max_kl * self._factor(update), device=self.device)
        step = self._compiled(samples, update) or self._eager(samples)
        leaves = [x.contiguous() for x in tree.leaves(samples)]
        state = [*self.parameters, *self.first_moments, *self.second_moments]
        rows: list[Tensor] = []
        for i in range(count):
            index = order[i * size : (i + 1) * size]
            noise = torch.randn(size, self.policy.actions, generator=generator, device=self.device)
            (row,) = step([*state, settings[i], max_kl, index, noise, *leaves])
            rows.append(row)
        self.steps += count
        table = torch.stack(rows).double().cpu()
        if not bool(table.isfinite().all()):
            bad = int((~table.isfinite()).any(1).nonzero()[0])
            raise TrainingError(
                f"update {update}, minibatch {bad}: a loss or a gradient is not finite; lower"
                " algorithm.lr or look for non-finite rewards and observations"
            )
        mean = dict(zip(STATISTICS, table.mean(0).tolist(), strict=True))
        last = dict(zip(STATISTICS, table[-1].tolist(), strict=True))
        rate = c.lr * self._factor(update)
        return {
            "policy/loss": Mean(mean["policy_loss"] * count, count),
            "policy/kl": Mean(mean["kl"] * count, count),
            "policy/entropy": Mean(mean["entropy"] * count, count),
            "policy/entropy_coef": last["entropy_coef"],
            "policy/kl_coef": last["kl_coef"],
            "policy/grad_norm": Mean(mean["actor_norm"] * count, count),
            "policy/lr": rate,
            "policy/epochs": float(c.update_epoch),
            "value/loss": Mean(mean["value_loss"] * count, count),
            "value/grad_norm": Mean(mean["critic_norm"] * count, count),
            "value/mean": Mean(mean["value"] * count, count),
            "value/lr": self._value_lr,
        }

    @property
    def _value_lr(self) -> float:
        """Learning rate of Q. It is constant: with a falling rate, Q would no longer follow the
        policy at the end of a run."""
        return self.config.lr if self.config.value_lr is None else self.config.value_lr

    def _factor(self, update: int) -> float:
        """Return the factor of the policy's learning rate."""
        return learning_rate_factor(self.config, update, self.updates)

    def _settings(self, count: int, update: int) -> Tensor:
        """Return the settings [n, 3, 2] of the next n steps, see ``ReppoStep``."""
        c, factor = self.config, self._factor(update)
        rates = torch.tensor([c.lr * factor, self._value_lr, DUAL_LR], dtype=torch.float64)
        t = torch.arange(self.steps + 1, self.steps + count + 1, dtype=torch.float64).unsqueeze(1)
        step = rates / (1 - c.adam_beta1**t)
        inv = (1 - c.adam_beta2**t).rsqrt().expand_as(step)
        return torch.stack([step, inv], dim=-1).float().to(self.device)

    def _program(self, samples: Samples) -> ReppoStep:
        return ReppoStep(self.policy, self.critic, self.config, samples, self.entropy_target)

    def _eager(self, samples: Samples) -> compile.Function:
        program = self._program(samples)
        return lambda tensors: [program(*tensors)]

    def _compiled(self, samples: Samples, update: int) -> compile.Function | None:
        """Return the compiled step; None before it is due."""

        def example() -> compile.Example:
            size = self.config.global_batch_size
            state = [*self.parameters, *self.first_moments, *self.second_moments]
            arguments = [
                torch.zeros(3, 2, device=self.device),
                torch.zeros((), device=self.device),
                torch.arange(size, device=self.device),
                torch.zeros(size, self.policy.actions, device=self.device),
                *(x.contiguous() for x in tree.leaves(samples)),
            ]
            return compile.Example(self._program(samples), state, arguments)

        return self.compile_schedule.get(update, example)

    # ----------------------------------------------------------------------------------- checkpoint
    def state(self) -> dict[str, Any]:
        """Return everything beyond the policy's weights that the next update depends on."""
        return {
            "critic_weights": self.critic.state_dict(),
            "coefficients": self.parameters[-1],
            "first": self.first_moments,
            "second": self.second_moments,
            "steps": self.steps,
            "entropy_bonus": self.config.entropy_bonus,
            "returns": self.return_scaler.state_dict(),
            "kept": [{name: getattr(r, name) for name in vars(r)} for r in self.kept],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``."""
        self.critic.load_state_dict(state["critic_weights"])
        for own, stored in (
            ([self.parameters[-1]], [state["coefficients"]]),
            (self.first_moments, state["first"]),
            (self.second_moments, state["second"]),
        ):
            for x, y in zip(own, stored, strict=True):
                x.copy_(y)
        bonus = self.config.entropy_bonus
        if state.get("entropy_bonus", bonus) != bonus:  # the option was changed: start from it
            self.parameters[-1][ENTROPY] = _log_coefficient(bonus)
        self.steps = state["steps"]
        self.return_scaler.load_state_dict(state["returns"])
        to_device = lambda x: x.to(self.device)
        kept = [KeptRollout(**tree.map(to_device, r)) for r in state["kept"]]
        self.kept = kept[-self.config.kept_rollouts :]

    def set_observer(self, observer: UpdateObserver) -> None:
        """Raise an error: ``analysis.reexecution`` refuses to observe such runs."""
        raise NotImplementedError("minibatches of algorithm.type=reppo are not observed")

    def close(self) -> None:
        """Stop a compilation in progress."""
        self.compile_schedule.close()


def _check_memory(policy: ActorCritic, config: AlgorithmConfig, num_envs: int) -> None:
    """Raise ConfigError if the kept rollouts and the samples of an update exceed the memory.

    Observations after the ends of episodes are not counted.
    """
    free = devices.free_memory(policy.policy_head.weight.device)
    encoder, actions, steps = policy.encoder, 4 * policy.actions, config.horizon * num_envs
    raw = sum(
        math.prod(spec.shape) * spec.dtype.itemsize
        for spec in (*encoder.images.values(), *encoder.vectors.values())
    )
    encoded = 4 * encoder.vector_size + sum(math.prod(s.shape) for s in encoder.images.values())
    # A rollout holds observations, two actions, three numbers and three flags. A sample holds three
    # rows of actions and a number, and all samples exist twice while they are joined.
    rollout = (steps + num_envs) * raw + steps * (2 * actions + 3 * 4 + 3)
    samples = 2 * config.rollouts_per_update * steps * (encoded + 3 * actions + 4)
    needed = config.kept_rollouts * rollout + samples
    if free is not None and needed > free:
        raise ConfigError(
            f"algorithm.kept_rollouts = {config.kept_rollouts}: these rollouts need"
            f" {config.kept_rollouts * rollout / 2**30:.1f} GiB and the samples of"
            f" algorithm.rollouts_per_update = {config.rollouts_per_update} need"
            f" {samples / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; lower"
            " algorithm.kept_rollouts, algorithm.rollouts_per_update or env.num_envs"
        )


def _tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters of a module without gradient; they share its memory."""
    return [p.detach() for p in module.parameters()]


def _log_coefficient(value: float) -> float:
    """Return the logarithm of a coefficient, at least that of MIN_COEFFICIENT."""
    return math.log(max(value, MIN_COEFFICIENT))
