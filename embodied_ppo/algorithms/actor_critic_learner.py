"""Learner of a robot policy: one model with policy and value head, one loss, one AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from embodied_ppo.algorithms import losses
from embodied_ppo.algorithms.learner import Learner, ValueHead
from embodied_ppo.algorithms.optimizer import MinibatchOptimizer, SampleCutter
from embodied_ppo.algorithms.ppo_loss import ActorCriticLoss, kl_distance
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile, tree
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.recurrent_state import memory_size
from embodied_ppo.core.running_stats import Moments, RunningMoments
from embodied_ppo.core.tree import apply_in_parts
from embodied_ppo.core.types import Evaluation, Policy, Trajectory

METHODS = ("encode", "act", "evaluate", "evaluate_columns", "value", "bc_loss")
"""Methods of policies that read the weights."""


def actor_critic_learner(
    policy: Policy,
    config: AlgorithmConfig,
    *,
    num_envs: int,
    updates: int,
    seed: int,
    compile_schedule: compile.CompileSchedule | None = None,
    threads: int = 1,
    dump_dir: Path | None = None,
    notice: Callable[[str], None] = lambda text: None,
    auxiliary_loss: Callable[[torch.Generator], Tensor] | None = None,
    ranks: Ranks | None = None,
) -> Learner:
    """Return the learner of a policy with a value head.

    Args:
        policy: A policy that is an ``nn.Module``.
        config: Options of the algorithm.
        num_envs: Environments of all ranks.
        updates, seed, compile_schedule, threads, dump_dir, ranks: As for ``MinibatchOptimizer``.
        notice: Called with messages for the user.
        auxiliary_loss: Behaviour cloning loss, see ``behavior_cloning.AuxiliaryCloningLoss``.

    Raises:
        ConfigError: The granularities or the KL estimator are not possible.
    """
    losses.check_levels(
        logprob_type=config.logprob_type,
        entropy_type=config.entropy_type,
        reward_type=config.reward_type,
    )
    actor = PolicyActor(policy, config, ranks or Ranks())
    optimizer = MinibatchOptimizer(
        ActorCriticLoss(policy, config),
        policy.parameter_groups(),
        config,
        SampleCutter(config),
        updates=updates,
        seed=seed,
        auxiliary_loss=auxiliary_loss,
        compile_schedule=compile_schedule,
        threads=threads,
        dump_dir=dump_dir,
        ranks=ranks,
    )
    actor.optimizer = optimizer
    device = optimizer.critic[0].device
    return Learner(actor, ValueHead(), optimizer, columns=num_envs, device=device, notice=notice)


class PolicyActor:
    """A robot policy and its frozen reference; see ``learner.Actor``."""

    recompute, scores_sequences = False, False

    def __init__(self, policy: Policy, config: AlgorithmConfig, ranks: Ranks) -> None:
        """Copy the policy as its reference if the options need one; shard the parameters."""
        self.policy, self.config, self._ranks = policy, config, ranks
        self.reference = (
            copy.deepcopy(policy) if config.use_kl_loss or config.use_kl_in_reward else None
        )
        self.optimizer: MinibatchOptimizer | None = None
        for model in self._models():
            ranks.shard(model, [name for name in METHODS if hasattr(model, name)])

    @property
    def ranks(self) -> Ranks:
        return self._ranks if self.optimizer is None else self.optimizer.ranks

    def _models(self) -> list[nn.Module]:
        """Return the policy and, if there is one, its reference."""
        return [model for model in (self.policy, self.reference) if isinstance(model, nn.Module)]

    def reshard(self) -> None:
        for model in self._models():
            self.ranks.reshard(model)

    # ---------------------------------------------------------------------------- log-probabilities
    def encode(self, t: Trajectory) -> Any:
        """Return the observations as inputs of the policy, [T, N, ..]; a frozen trunk runs here."""
        return self._encoded(self.policy, t)

    def _encoded(self, policy: Policy, t: Trajectory) -> Any:
        obs = tree.flatten_time(t.obs)
        if t.kept and policy is self.policy:
            # Only policies whose ``encode`` has this argument keep inputs.
            inputs = cast(Any, policy).encode(obs, tree.flatten_time(t.kept))
        else:
            inputs = apply_in_parts(
                policy.encode, self.config.logprob_forward_micro_batch_size, obs
            )
        return tree.map(lambda x: x.unflatten(0, t.mask.shape[:2]), inputs)

    @torch.no_grad()
    def view(self, policy: Policy, inputs: Any, t: Trajectory) -> Evaluation:
        """Evaluate the trajectory's actions under a policy; inputs and results are [T, N, ..]."""
        c, flat = self.config, tree.flatten_time
        size = c.logprob_forward_micro_batch_size or c.micro_batch_size or c.global_batch_size
        if memory_size(policy):
            columns = max(1, size // len(t.mask))
            parts = [
                cast(Any, policy).evaluate_columns(*part)
                for part in _split_columns((inputs, t.action, t.replay), columns)
            ]
            return tree.map(lambda *xs: torch.cat(xs, dim=1), parts[0], *parts[1:])
        view = apply_in_parts(policy.evaluate, size, flat(inputs), flat(t.action), flat(t.replay))
        return tree.map(lambda x: x.unflatten(0, t.mask.shape[:2]), view)

    def log_prob(self, inputs: Any, t: Trajectory) -> Tensor:
        return self.view(self.policy, inputs, t).log_prob

    def reference_view(self, t: Trajectory) -> Evaluation | None:
        """See ``Actor``. The reference has its own, frozen normaliser of observations."""
        if self.reference is None:
            return None
        return self.view(self.reference, self._encoded(self.reference, t), t)

    def kl_to_reference(
        self, inputs: Any, t: Trajectory, behaviour: Tensor, reference: Evaluation
    ) -> Tensor:
        c = self.config
        logits = self.view(self.policy, inputs, t).logits if c.kl_penalty == "full" else None
        return kl_distance(
            behaviour,
            reference.log_prob,
            c.kl_penalty,
            logits,
            reference.logits,
            mask=t.mask,
            dims=2,
        )

    # ----------------------------------------------------------------------------------- normaliser
    def observe(self, t: Trajectory) -> None:
        """Merge the observations of all ranks into the policy's normalisers, in order of rank."""
        decided = t.mask if t.mask.ndim == 2 else t.mask.any(-1)  # [T, N]
        obs, mask = tree.flatten_time(t.obs), decided.flatten()
        if self.ranks.world == 1:
            return self.policy.observe(obs, mask)
        assert isinstance(self.policy, nn.Module)
        running = [m for m in self.policy.modules() if isinstance(m, RunningMoments)]
        before = [Moments(*(x.clone() for x in (m.mean, m.var, m.count))) for m in running]
        for m in running:
            m.count.zero_()
        self.policy.observe(obs, mask)
        for m, previous in zip(running, before, strict=True):
            parts = zip(
                *(self.ranks.all_gather(x.clone()) for x in (m.mean, m.var, m.count)), strict=True
            )
            for x, old in zip((m.mean, m.var, m.count), previous, strict=True):
                x.copy_(old)
            for part in parts:
                m.merge(*part)

    # ------------------------------------------------------------------------------------ reference
    def initialize(self) -> None:
        """Do nothing: the reference is a copy of the policy."""

    def reference_state(self) -> Any:
        return None if self.reference is None else self.reference.state_dict()

    def load_reference(self, state: Any) -> None:
        assert isinstance(self.reference, nn.Module)
        self.reference.load_state_dict(self.ranks.shard_state(self.reference, state))

    def state_tensors(self) -> list[Any]:
        return [] if self.reference is None else [list(self.reference.state_dict().values())]


def _split_columns(trajectory: Any, size: int) -> Iterator[Any]:
    """Yield parts of at most ``size`` columns of tensors [T, N, ..]."""
    columns = next(tree.leaves(trajectory)).shape[1]
    for first in range(0, columns, size):
        yield tree.index(trajectory, (slice(None), slice(first, first + size)))
