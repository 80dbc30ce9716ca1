"""PPO of a robot policy: one model with policy and value head, one loss, one AdamW."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from embodied_envs.base import tree
from embodied_envs.base.tree import apply_in_parts
from embodied_ppo.core import compile
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.mirror import Mirror
from embodied_ppo.core.recurrent_state import memory_size
from embodied_ppo.core.running_stats import Moments, RunningMoments
from embodied_ppo.core.types import MEAN_SHIFT, Batch, Evaluation, Policy, Trajectory
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.ppo import kl, losses
from embodied_ppo.ppo.agreement import Tolerances
from embodied_ppo.ppo.curiosity import Curiosity
from embodied_ppo.ppo.minibatches import MirrorTerms, PolicyTerms, SampleCutter
from embodied_ppo.ppo.optimizer import MinibatchOptimizer
from embodied_ppo.ppo.ppo import PPO, PPOLoss
from embodied_ppo.ppo.preparation import task_of_samples
from embodied_ppo.ppo.roles import SharedCritic
from embodied_ppo.ppo.symmetry import Symmetry

# Methods of policies that read the weights.
METHODS = ("encode", "act", "evaluate", "evaluate_columns", "memory_after", "value", "bc_loss")


def robot_ppo(
    policy: Policy,
    config: AlgorithmConfig,
    *,
    num_envs: int,
    updates: int,
    seed: int,
    compile_schedule: compile.CompileSchedule | None = None,
    notice: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
    tolerances: Tolerances | None = None,
    mirror: Mirror | None = None,
) -> PPO:
    """Return the PPO of a policy with a value head.

    Args:
        policy: A policy that is an ``nn.Module``.
        config: Options of the algorithm.
        num_envs: Environments of all ranks.
        updates, seed, compile_schedule, ranks, tolerances: As for ``MinibatchOptimizer``.
        notice: Called with messages for the user.
        mirror: Mirror image of the task, for ``algorithm.symmetry``.
    """
    # First the actor, which shards the parameters: the moments of the optimiser are shards, too.
    actor = RobotActor(policy, config, ranks or Ranks())
    symmetry = None
    if mirror is not None:
        assert isinstance(policy, ActorCritic)  # refused by validation
        symmetry = Symmetry(
            mirror,
            size=policy.actions,
            columns=num_envs,
            memory=policy.memory_size,
            device=policy.policy_head.weight.device,
        )
    optimizer = MinibatchOptimizer(
        RobotLoss(policy, config, symmetry),
        policy.parameter_groups(),
        config,
        SampleCutter(config),
        updates=updates,
        seed=seed,
        compile_schedule=compile_schedule,
        ranks=ranks,
        tolerances=tolerances,
    )
    # Every policy here has a value head, so this group has parameters.
    device = optimizer.critic[0].device
    curiosity = None
    if config.curiosity.weight:
        assert isinstance(policy, ActorCritic)  # refused by validation
        curiosity = Curiosity(policy.encoder, config, seed=seed, ranks=actor.ranks).to(device)
    return PPO(
        actor,
        SharedCritic(),
        optimizer,
        columns=num_envs,
        device=device,
        curiosity=curiosity,
        symmetry=symmetry,
        notice=notice,
    )


class RobotLoss(PPOLoss):
    """The loss of a policy with a value head."""

    def __init__(
        self, policy: Policy, config: AlgorithmConfig, symmetry: Symmetry | None = None
    ) -> None:
        assert isinstance(policy, nn.Module)
        super().__init__(policy, config, length=config.horizon, has_value_head=True)
        self.separate = getattr(policy, "separate", False)
        # Mirror image of an action; None without ``algorithm.symmetry``.
        self.mirror = None if symmetry is None else symmetry.action
        self.names += () if symmetry is None else ("symmetry_error",)

    def evaluate(self, b: Batch) -> PolicyTerms:
        """See ``PolicyLoss``; columns have gradients through time if the policy has a memory."""
        c, dims, image = self.config, self.batch_dims, None
        samples = b.inputs, b.action, b.replay
        if (m := b.mirror) is not None:  # one pass for the samples and their images
            replay = m.replay | {k: x for k, x in b.replay.items() if k == MEAN_SHIFT}
            samples = tree.concatenate([samples, (m.inputs, m.action, replay)], dims - 1)
        # Samples; columns of a policy with a memory; columns of one without.
        if dims == 1:
            out = self.model.evaluate(*samples)
        elif memory_size(self.model):
            out = self.model.evaluate_columns(*samples)
        else:  # the model reads samples; columns are flattened for it and folded back
            out = self.model.evaluate(*tree.flatten_time(samples))
            out = tree.map(lambda x: x.unflatten(0, samples[1].shape[:2]), out)
        if m is not None:
            n = b.mask.shape[dims - 1]
            out, image = (tree.map(lambda x, i=i: x.narrow(dims - 1, i, n), out) for i in (0, n))
        # Sum over dimensions and actions of a chunk, to the level at which the loss reads them.
        log_prob = losses.reduce_log_prob(out.log_prob, c.logprob_type, batch_dims=dims)
        entropy = losses.reduce_log_prob(out.entropy, c.entropy_type, batch_dims=dims)
        distance = None
        if b.ref_log_prob is not None:
            # The KL reads neither entropy nor value of the reference; they only fill the fields.
            reference = Evaluation(b.ref_log_prob, b.ref_log_prob, b.value, b.ref_logits)
            distance = kl_distance(
                out.log_prob, out.logits, reference, c.kl_loss_type, mask=b.mask, dims=dims
            )
        mirror = None if image is None else self._mirror_terms(out, image, b.mask)
        return PolicyTerms(log_prob, entropy, distance, out.value, mirror)

    def _mirror_terms(self, original: Evaluation, image: Evaluation, mask: Tensor) -> MirrorTerms:
        """Return what the loss reads of mirrored samples."""
        assert self.mirror is not None and image.mean is not None and original.mean is not None
        log_prob = losses.reduce_log_prob(
            image.log_prob, self.config.logprob_type, batch_dims=self.batch_dims
        )
        # |μ(M s) − stop[M μ(s)]|², for each action of a chunk if each has a mask
        square = (image.mean - self.mirror(original.mean.detach())).square()
        if mask.ndim > self.batch_dims:
            square = square.unflatten(-1, (mask.shape[-1], -1))
        return MirrorTerms(log_prob, image.value, square.mean(-1))


def kl_distance(
    log_prob: Tensor,
    logits: Tensor | None,
    reference: Evaluation,
    kind: str,
    *,
    mask: Tensor,
    dims: int,
) -> Tensor:
    """Return KL(policy || reference), of the shape of ``mask``.

    Args:
        log_prob: [..] or finer, of the policy.
        logits: Logits of the policy, for kind=full.
        reference: The same of the reference.
        kind: Estimator, see ``kl.estimate``.
        mask: [..] (one entry for each decision) or [.., C] (one for each action of a chunk).
        dims: Number of dimensions of [..].
    """
    # Sum log-probabilities until each entry of the mask has one.
    level = "chunk_level" if mask.ndim == dims else "action_level"
    policy, other = (
        losses.reduce_log_prob(x, level, batch_dims=dims) for x in (log_prob, reference.log_prob)
    )
    return kl.estimate(policy, other, kind, logits=logits, ref_logits=reference.logits)


class RobotActor:
    """A robot policy and its frozen reference; see ``roles.Actor``."""

    recompute, scores_sequences = False, False

    def __init__(self, policy: Policy, config: AlgorithmConfig, ranks: Ranks) -> None:
        """Copy the policy as its reference if the options need one; shard the parameters."""
        self.policy, self.config, self.ranks = policy, config, ranks
        # Copy before the parameters are sharded; the copy is sharded by itself.
        self.reference = (
            copy.deepcopy(policy) if config.use_kl_loss or config.use_kl_in_reward else None
        )
        for model in self._models():
            ranks.shard(model, [name for name in METHODS if hasattr(model, name)])

    def _models(self) -> list[nn.Module]:
        """Return the policy and, if there is one, its reference."""
        return [model for model in (self.policy, self.reference) if isinstance(model, nn.Module)]

    def reshard(self) -> None:
        for model in self._models():
            self.ranks.reshard(model)

    # ---------------------------------------------------------------------------- log-probabilities
    def encode(self, t: Trajectory, policy: Policy | None = None) -> Any:
        """Return the observations as inputs of the policy, [T, N, ..]; a frozen trunk runs here.

        ``policy``: Policy whose inputs are returned; None: the policy that is trained.
        """
        policy = policy or self.policy
        obs = tree.flatten_time(t.obs)
        # Acting has kept inputs of the trained policy. The reference computes its own.
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
        # Bound the memory: without gradients more samples fit than in a minibatch.
        size = c.logprob_forward_micro_batch_size or c.micro_batch_size or c.global_batch_size
        # A memory needs the rows of a column in order; other policies read single samples.
        if memory_size(policy):
            columns = max(1, size // len(t.mask))
            parts = [
                cast(Any, policy).evaluate_columns(*part)
                for part in _split_columns((inputs, t.action, t.replay), columns)
            ]
            return tree.concatenate(parts, 1)
        view = apply_in_parts(policy.evaluate, size, flat(inputs), flat(t.action), flat(t.replay))
        return tree.map(lambda x: x.unflatten(0, t.mask.shape[:2]), view)

    def log_prob(self, inputs: Any, t: Trajectory) -> tuple[Tensor, Tensor | None]:
        view, popart = self.view(self.policy, inputs, t), getattr(self.policy, "popart", None)
        if popart is None:
            return view.log_prob, view.value
        return view.log_prob, popart.denormalize(view.value, task_of_samples(inputs, t.mask))

    def reference_view(self, t: Trajectory) -> Evaluation:
        """See ``Actor``. The reference has its own, frozen normaliser of observations."""
        assert self.reference is not None
        return self.view(self.reference, self.encode(t, self.reference), t)

    def kl_to_reference(
        self, inputs: Any, t: Trajectory, behaviour: Tensor, reference: Evaluation
    ) -> Tensor:
        c = self.config
        # Only the exact KL needs logits, which cost another forward pass.
        logits = self.view(self.policy, inputs, t).logits if c.kl_penalty == "full" else None
        return kl_distance(behaviour, logits, reference, c.kl_penalty, mask=t.mask, dims=2)

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
        # Each rank measures its own columns alone, then all merge the parts in order of rank.
        for m in running:
            m.count.zero_()
        self.policy.observe(obs, mask)
        # The same order of merging on every rank keeps their normalisers equal bit for bit.
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
    for first in range(0, next(tree.leaves(trajectory)).shape[1], size):
        yield tree.index(trajectory, (slice(None), slice(first, first + size)))
