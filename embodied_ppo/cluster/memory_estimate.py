"""Estimate of a run's memory before it starts, by running acting and learning on fake tensors.

A dispatch mode counts the tensors that operations allocate and free, so that no formula per model
is needed.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from embodied_envs.base import tree
from embodied_envs.types import ObsSpec
from embodied_ppo.core.recurrent_state import EpisodeMemory
from embodied_ppo.core.types import Batch, Decision, Policy, Trajectory
from embodied_ppo.options.placement import Plan
from embodied_ppo.options.schema import AlgorithmConfig, Config
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.policies.vla.vla_policy import VLAPolicy
from embodied_ppo.ppo import losses
from embodied_ppo.ppo.ppo import PPO

# Bytes per response token of experience: a ``Trajectory``, and what the learner adds to it.
EXPERIENCE_BYTES_PER_TOKEN = 64


class AllocationCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations allocate, until they are freed.

    Attributes:
        now: Bytes that are allocated.
        peak: Maximum of ``now``.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Start at 0 bytes; storages of ``known`` tensors are not counted."""
        super().__init__()
        self.now = self.peak = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet(x.untyped_storage() for x in known)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import ``torch._dynamo``

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Every new storage is counted when an operation returns it.
        for x in tree.leaves(out):
            if isinstance(x, Tensor):
                self._count(x)
        return out

    def _count(self, x: Tensor) -> None:
        """Count the storage of a new tensor once; views share it."""
        storage = x.untyped_storage()
        if storage in self._storages:
            return
        self._storages.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        # The bytes are subtracted when the last tensor of the storage is gone.
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def nbytes(tensors: Any) -> int:
    """Return the bytes of all tensors in a tree."""
    return sum(x.numel() * x.element_size() for x in tree.leaves(tensors))


def model_bytes(model: nn.Module, counted: set[int] | None = None) -> dict[str, int]:
    """Return the bytes of a trained model: weights (with buffers), gradients and optimiser.

    Args:
        model: The model.
        counted: Identities of tensors that are counted already; those of the model are added.
    """
    # AdamW keeps two moments per trained parameter.
    gradients = nbytes([p for p in model.parameters() if p.requires_grad])
    counted = set() if counted is None else counted
    tensors = [x for x in (*model.parameters(), *model.buffers()) if id(x) not in counted]
    counted.update(map(id, tensors))
    return {"weights": nbytes(tensors), "gradients": gradients, "optimiser": 2 * gradients}


def sharded_bytes(model: Any, ranks: int, *, acts: bool = False) -> dict[str, int]:
    """Return ``model_bytes`` of one learner with sharded parameters.

    Besides its shards a learner holds the gathered parameters that belong to no unit, and two
    gathered units, because FSDP2 prefetches the next one.

    Args:
        model: Model with ``units`` (see ``types.Policy``).
        ranks: Number of learners.
        acts: Whether the process also acts, and then gathers all weights.
    """

    def sizes(trained: bool) -> tuple[int, int]:
        """Return the bytes of all parameters, and of those that are gathered at the same time."""

        def size(module: nn.Module) -> int:
            return nbytes([p for p in module.parameters() if p.requires_grad or not trained])

        total, units = size(model), [size(unit) for unit in model.units()]
        return total, min(total, total - sum(units) + 2 * max(units, default=0))

    (weights, gathered), (gradients, gathered_gradients) = sizes(False), sizes(True)
    buffers, whole = nbytes(list(model.buffers())), weights if acts else gathered
    return {
        "weights": buffers + weights // ranks + whole,
        "gradients": gradients // ranks + gathered_gradients,
        "optimiser": 2 * gradients // ranks,
    }


@contextmanager
def fake_tensors(policy: nn.Module, *, enabled: bool = True) -> Iterator[list[Tensor]]:
    """Context in which operations create fake tensors (shapes without memory) if ``enabled``.

    Yields:
        The policy's parameters and buffers as such tensors. Some may be fake already, see
        ``policies.vla.published``.
    """
    tensors = [*policy.parameters(), *policy.buffers()]
    if not enabled:
        yield tensors
        return
    # Tensors of one computation must share one mode.
    modes = [x.fake_mode for x in tensors if isinstance(x, FakeTensor)]
    with modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield [x if isinstance(x, FakeTensor) else mode.from_tensor(x) for x in tensors]


def _zeros(x: Any, rows: int, device: torch.device, *, batch_dims: int = 1) -> Any:
    """Return zeros [rows, ..] for a tree of tensors with ``batch_dims`` dimensions in front."""
    zeros = lambda t: torch.zeros(rows, *t.shape[batch_dims:], dtype=t.dtype, device=device)
    return tree.map(zeros, x)


def _encode(policy: Policy, obs: Any, rows: int) -> Any:
    """Return ``encode`` of a few observations, as it is for ``rows`` of them.

    A trunk that is not trained returns features only where those of all observations fit.
    """
    if not isinstance(policy, VLAPolicy) or policy.keeps_features(rows):
        return policy.encode(obs)
    # With no memory left, the policy keeps images instead of features.
    planned, policy.planned_memory_gb = policy.planned_memory_gb, 0.0
    inputs = policy.encode(obs)
    policy.planned_memory_gb = planned
    return inputs


@contextmanager
def freed_gradients(model: nn.Module) -> Iterator[set[Tensor]]:
    """Free each gradient as soon as it is complete; yield the parameters that got one."""
    with_gradient = set[Tensor]()

    def free(p: Tensor) -> None:
        with_gradient.add(p)
        p.grad = None

    # Gradients are counted apart from activations, so they are freed at once.
    trained = [p for p in model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(free) for p in trained]
    try:
        yield with_gradient
    finally:
        for hook in hooks:
            hook.remove()


def micro_batch(
    inputs: Any, device: torch.device, t: Trajectory, rows: int, c: AlgorithmConfig
) -> Batch:
    """Return a batch of zeros with the shapes of ``rows`` decisions of a trajectory.

    Args:
        inputs: ``Policy.encode`` of ``rows`` observations.
        device: Device of the batch.
        t: Trajectory, [T, N, ..], possibly without memory.
        rows: Number of decisions.
        c: Options of the algorithm.
    """
    # Shapes and types of the trajectory, values of zero.
    sample = _zeros(t, rows, device, batch_dims=2)
    values = torch.zeros(sample.value.shape, device=device)
    batch = Batch(
        inputs=inputs,
        action=sample.action,
        replay=sample.replay,
        log_prob=losses.reduce_log_prob(sample.log_prob, c.logprob_type, batch_dims=1),
        value=values,
        advantage=torch.zeros(sample.mask.shape, device=device),
        returns=values,
        mask=torch.ones_like(sample.mask),
    )
    if c.minibatch_unit == "column":
        return tree.map(lambda x: x.unflatten(0, (t.mask.shape[0], -1)), batch)
    return batch


@torch.no_grad()
def estimate_acting(
    policy: Policy, obs_spec: ObsSpec, rows: int, *, bound: bool = False
) -> tuple[int, Any, Any]:
    """Estimate the memory of acting.

    Args:
        policy: The policy.
        obs_spec: Spec of one environment's observation.
        rows: Number of environments.
        bound: Return an upper bound, in a fraction of the time: the peak of one row with memory,
            times ``rows``. The size of a tensor is a + b rows, at most rows (a + b).

    Returns:
        Peak in bytes; the observations and the decision as tensors [rows, ..] without memory.
    """
    assert isinstance(policy, nn.Module)
    device, n = next(policy.parameters()).device, 1 if bound else rows
    specs = obs_spec if isinstance(obs_spec, dict) else {"obs": obs_spec}
    with fake_tensors(policy, enabled=not bound) as known:
        # Observations exist before acting; only what acting allocates is counted.
        named = {
            name: torch.zeros(n, *spec.shape, dtype=spec.dtype, device=device)
            for name, spec in specs.items()
        }
        obs = named if isinstance(obs_spec, dict) else named["obs"]
        obs = EpisodeMemory(policy, n, device).attach(obs)
        # Real numbers must leave the state of torch's own generator as it is.
        noise = policy.noise(n, torch.Generator() if bound else None)
        with AllocationCounter([*known, *named.values()]) as counter:
            decision = policy.act(policy.encode(obs), noise=noise)
    return counter.peak * rows // n, *_zeros((obs, decision), rows, torch.device("meta"))


def empty_trajectory(
    obs: Any, decision: Decision, horizon: int, *, passes: int = 1, groups: int
) -> Trajectory:
    """Return a trajectory of ``horizon`` steps with the shapes and devices of one step.

    Args:
        obs: Observations of one step, [N, ..].
        decision: Decision of one step.
        horizon: T.
        passes: Passes of the rollout, each of which adds N columns.
        groups: Number of reward groups.
    """

    def repeat(x: Tensor) -> Tensor:
        return x.new_empty(horizon, passes * len(x), *x.shape[1:])

    # Tensors of equal shape share one storage here; the trajectory's own do not.
    flagged = decision.value[:, 0] if groups > 1 else decision.value
    # Not empty_like: without memory it imports SymPy.
    flag = repeat(flagged.new_empty(flagged.shape, dtype=torch.bool))
    value = repeat(decision.value)
    return Trajectory(
        obs=tree.map(repeat, obs),
        action=repeat(decision.action),
        log_prob=repeat(decision.log_prob),
        value=value,
        replay=tree.map(repeat, decision.replay),
        next_value=value,
        reward=value,
        terminated=flag,
        truncated=flag,
        mask=flag,
        version=repeat(decision.value.new_empty(len(decision.value), dtype=torch.int64)),
    )


def kv_cache_bytes(policy: LanguagePolicy, slots: int, width: int) -> int:
    """Return the bytes of a KV cache for ``slots`` rows of ``width`` tokens."""
    # Keys and values of every layer, in the type of the products.
    decoder, weight = policy.decoder.module, policy.model.lm_head.weight
    dtype = policy.compute if weight.dtype == torch.float32 else weight.dtype
    return 2 * slots * width * sum(decoder.groups) * decoder.head_dim * dtype.itemsize


def language_step(
    model: LanguagePolicy | LanguageCritic,
    rows: int,
    width: int,
    length: int,
    *,
    entropy: bool = True,
) -> int:
    """Estimate the memory of the forward and backward pass of a micro-batch.

    Args:
        model: Policy or critic.
        rows: Number of sequences.
        width: Tokens of a sequence.
        length: Number of response tokens at the end of a sequence.
        entropy: Whether the loss of a policy reads the entropy.

    Returns:
        Peak in bytes, without weights and gradients.
    """

    with freed_gradients(model), fake_tensors(model) as known:
        # The rows share no prefix. The places are those of the responses.
        ids = torch.arange(rows).unsqueeze(1).repeat(1, width)
        place, action = torch.arange(width - length, width).repeat(rows, 1), ids[:, -length:]
        with AllocationCounter([*known, ids, place]) as counter:
            if isinstance(model, LanguageCritic):
                loss = model.value(ids, place).sum()
            else:
                # Log-probabilities and entropy, as the policy loss reads them.
                view = model.view(model.hidden(ids, place), action)
                assert view.entropy is not None
                loss = (view.log_prob + view.entropy if entropy else view.log_prob).sum()
            loss.backward()
            del loss
    return counter.peak


def estimate_update(
    policy: Policy, learner: PPO, t: Trajectory, *, surplus: float = 0.0, bound: bool = False
) -> dict[str, int]:
    """Estimate the memory of an update after its first step; existing gradients are freed.

    Args:
        policy: The policy.
        learner: PPO of the policy.
        t: Trajectory of this process, [T, N, ..], possibly fake.
        surplus: Further trajectories that the rollout holds, in multiples of ``t``.
        bound: As for ``estimate_acting``; computes with one sample, or one column.

    Returns:
        Purpose -> peak bytes: "weights" (with buffers), "gradients", "optimiser" (of AdamW),
        "experience" (the trajectory, its encoding by the policy where it is no view of the
        observations, and a minibatch's copy) and "activations" (forward and backward pass of one
        micro-batch).
    """
    assert isinstance(policy, nn.Module)
    policy.zero_grad(set_to_none=True)
    device = next(policy.parameters()).device
    # Inputs that acting has kept are those of the batch, which are counted.
    c, t = learner.config, replace(t, kept=None)
    # Rows of one micro-batch on this process.
    share = c.global_batch_size // learner.ranks.world
    size = min(c.micro_batch_size or share, share)
    smallest = len(t.version) if c.minibatch_unit == "column" else 1
    n = smallest if bound else size
    rows = t.version.numel()
    parts = (c.logprob_forward_micro_batch_size or rows) < rows
    # The peak of forward and backward pass; gradients and weights are counted below.
    with freed_gradients(policy) as with_gradient, fake_tensors(policy, enabled=not bound) as known:
        sample = _zeros(t.obs, n, device, batch_dims=2)
        inputs = _encode(policy, sample, rows)
        # One micro-batch as the learner builds it.
        batch = micro_batch(inputs, device, t, n, c)
        # Inputs that are observations themselves take no memory, unless they are encoded in parts.
        shared = set() if parts else {x.untyped_storage()._cdata for x in tree.leaves(sample)}
        new = [x for x in tree.leaves(inputs) if x.untyped_storage()._cdata not in shared]
        encoded, copied = nbytes(new) / n, nbytes(batch) / n
        with AllocationCounter([*known, *tree.leaves(batch)]) as counter:
            loss, _ = learner.optimizer.loss(batch)
            loss.backward()
            del loss
    gradients = nbytes(list(with_gradient))
    experience_bytes = nbytes(t) * (1 + surplus) + rows * encoded + share * copied
    return model_bytes(policy) | {
        "gradients": gradients,
        "optimiser": 2 * gradients,
        "experience": round(experience_bytes),
        "activations": counter.peak * size // n,
    }


# Group of a plan -> purpose of memory (for example "weights") -> peak bytes of a process.
MemoryNeeds = dict[str, dict[str, int]]


class MemoryEstimator(ABC):
    """Predicts the memory of worker processes for any placement of a run, without starting it.

    Attributes:
        config: Options of the run.
        longest: Tokens of the longest sequence, which ``algorithm.micro_batch_tokens`` counts.
    """

    config: Config
    longest = 1

    @abstractmethod
    def estimate_memory(self, placed: Plan, micro_batch_size: int | None = None) -> MemoryNeeds:
        """Return the peak memory of one process of each group.

        Simulators, graders and reward models are not counted.

        Args:
            placed: The plan.
            micro_batch_size: Samples (responses) of one forward and backward pass.
                None: as the options say.
        """

    @property
    def micro_batch_size(self) -> int | None:
        """Maximum samples (responses) of one forward and backward pass; None: no limit."""
        a = self.config.algorithm
        # The worst case: all sequences of a micro-batch are as long as the longest one.
        by_tokens = a.micro_batch_tokens and max(1, a.micro_batch_tokens // self.longest)
        return min((x for x in (a.micro_batch_size, by_tokens) if x is not None), default=None)

    def with_micro_batch_size(self, size: int) -> AlgorithmConfig:
        """Return the options with the limit ``size``, written in the unit that the recipe uses."""
        a = self.config.algorithm
        if a.micro_batch_tokens is not None:
            return replace(a, micro_batch_tokens=size * self.longest)
        return replace(a, micro_batch_size=size)
