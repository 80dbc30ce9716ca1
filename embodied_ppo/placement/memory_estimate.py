"""Estimate of a run's memory before it starts, by running acting and learning on fake tensors.

A dispatch mode counts the tensors that operations allocate and free, so that no formula per model
is needed. A small model computes two small batches instead (``_peak``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from embodied_ppo.algorithms import losses
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import running_stats, tree
from embodied_ppo.core.recurrent_state import EpisodeMemory
from embodied_ppo.core.types import Batch, Decision, ObsSpec, Policy, Trajectory
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.models.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.models.vla.trunk import VLAPolicy

EXPERIENCE_BYTES_PER_TOKEN = 64
"""Bytes per response token of experience: a ``Trajectory``, and what the learner adds to it."""
MAX_COMPUTED_BYTES = 32 * 2**20
"""Bytes of weights below which batches of ``SMALL_BATCHES`` are computed instead of traced."""
SMALL_BATCHES = 2, 3
"""Rows of these batches. With one row, some copies would be views."""


class _Counter(TorchDispatchMode):
    """A dispatch mode whose operations do not make torch import its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. With True, torch imports its compiler to exclude this class from it."""
        return False


class OperationCounter(_Counter):
    """Counts the floating-point operations of matrix products, convolutions and attention.

    torch's ``FlopCounterMode`` counts them for each module, which takes longer.

    Attributes:
        total: Number of operations; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        """Start at 0."""
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func.overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


class AllocationCounter(_Counter):
    """Counts the bytes of the tensors that operations allocate, until they are freed.

    Attributes:
        now: Bytes that are allocated.
        totals: ``now`` after each allocation.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """Start at 0 bytes; storages of ``known`` tensors are not counted."""
        super().__init__()
        self.now, self.totals = 0, list[int]()
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet(x.untyped_storage() for x in known)

    @property
    def peak(self) -> int:
        """Maximum of ``now``."""
        return max(self.totals, default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
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
        self.totals.append(self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


def nbytes(tensors: Any) -> int:
    """Return the bytes of all tensors in a tree."""
    return sum(x.numel() * x.element_size() for x in tree.leaves(tensors))


@dataclass(frozen=True)
class Memory:
    """Peak memory of an update, bytes.

    Attributes:
        weights: Parameters and buffers.
        gradients: Gradients of trained parameters.
        optimiser: State of AdamW.
        experience: Trajectory, its encoding by the policy where it is no view of the observations,
            a minibatch's copy, and what normalising the observations needs beyond activations.
        activations: Peak of the forward and backward pass of one micro-batch.
    """

    weights: int
    gradients: int
    optimiser: int
    experience: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all fields."""
        return sum(vars(self).values())


def sharded_bytes(model: Any, ranks: int, *, acts: bool = False) -> dict[str, int]:
    """Return the memory of one learner with sharded parameters.

    Besides its shards a learner holds the gathered parameters that belong to no unit, and two
    gathered units, because FSDP2 prefetches the next one.

    Args:
        model: Model with ``units`` (see ``types.Policy``).
        ranks: Number of learners.
        acts: Whether the process also acts, and then gathers all weights.

    Returns:
        "weights", "gradients" and "optimiser" -> bytes.
    """

    def weight_and_gradient_bytes(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
        """Return the bytes of weights, and of gradients."""
        parameters = list(parameters)
        return nbytes(parameters), nbytes([p for p in parameters if p.requires_grad])

    units = [weight_and_gradient_bytes(unit.parameters()) for unit in model.units()]
    weights, gradients = weight_and_gradient_bytes(model.parameters())
    gathered = [
        min(
            total,
            total
            - sum(unit[i] for unit in units)
            + 2 * max((unit[i] for unit in units), default=0),
        )
        for i, total in enumerate((weights, gradients))
    ]
    return {
        "weights": nbytes(list(model.buffers()))
        + weights // ranks
        + (weights if acts else gathered[0]),
        "gradients": gradients // ranks + gathered[1],
        "optimiser": 2 * gradients // ranks,
    }


@contextmanager
def fake_tensors(policy: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which operations create fake tensors (shapes without memory).

    Yields:
        The policy's parameters and buffers as fake tensors. Some may be fake already, see
        ``models.vla.published``.
    """
    tensors = [*policy.parameters(), *policy.buffers()]
    modes = [x.fake_mode for x in tensors if isinstance(x, FakeTensor)]
    with modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield [x if isinstance(x, FakeTensor) else mode.from_tensor(x) for x in tensors]


def _peak(
    model: nn.Module, rows: int, run: Callable[[int, list[Tensor]], AllocationCounter]
) -> int:
    """Return the peak bytes of an operation with a batch of ``rows`` rows.

    Importing torch's compiler for fake tensors and tracing take 2 s of CPU time. A small model on
    the CPU therefore computes two small batches. Allocations grow linearly with the rows, so that
    all totals are known for any number of rows; where a model cuts a large batch into parts, the
    result is too large. Where the batches differ in the number of allocations, and for large
    models, the operation is traced.

    Args:
        model: The model.
        rows: Rows of the batch.
        run: Performs the operation, given rows, and the parameters and buffers.
    """
    known = [*model.parameters(), *model.buffers()]
    computes = all(x.device.type == "cpu" and not isinstance(x, FakeTensor) for x in known)
    if computes and nbytes(known) < MAX_COMPUTED_BYTES:
        with torch.random.fork_rng(devices=[]):
            first, second = (run(n, known).totals for n in SMALL_BATCHES)
        if len(first) == len(second):
            n, larger = SMALL_BATCHES
            steps = (rows - n) / (larger - n)
            return max(round(x + steps * (y - x)) for x, y in zip(first, second, strict=True))
    with fake_tensors(model) as fake:
        return run(rows, fake).peak


def _zeros(x: Any, rows: int, device: torch.device, *, batch_dims: int = 1) -> Any:
    """Return zeros [rows, ..] for a tree of tensors with ``batch_dims`` dimensions in front."""
    return tree.map(
        lambda t: torch.zeros(rows, *t.shape[batch_dims:], dtype=t.dtype, device=device), x
    )


@contextmanager
def encoding_of(policy: Policy, rows: int) -> Iterator[None]:
    """Context in which ``encode`` of a few observations returns what it does for ``rows`` of them.

    A trunk that is not trained returns features only where those of all observations fit.
    """
    if not isinstance(policy, VLAPolicy) or policy.keeps_features(rows):
        yield
        return
    names = [name for name in ("planned_memory_gb", "memory_gb") if hasattr(policy, name)]
    before = {name: getattr(policy, name) for name in names}
    for name in names:
        setattr(policy, name, 0.0)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(policy, name, value)


@contextmanager
def _freed_gradients(model: nn.Module) -> Iterator[set[Tensor]]:
    """Free each gradient as soon as it is complete; yield the parameters that got one."""
    with_gradient = set[Tensor]()

    def free(p: Tensor) -> None:
        with_gradient.add(p)
        p.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(free) for p in model.parameters() if p.requires_grad
    ]
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
    sample = _zeros(t, rows, device, batch_dims=2)
    scalars = torch.zeros(sample.value.shape, device=device)
    batch = Batch(
        inputs=inputs,
        action=sample.action,
        replay=sample.replay,
        log_prob=losses.reduce_log_prob(sample.log_prob, c.logprob_type, batch_dims=1),
        value=scalars,
        advantage=scalars,
        returns=scalars,
        mask=torch.ones(sample.value.shape, dtype=torch.bool, device=device),
    )
    if c.minibatch_unit == "column":
        return tree.map(lambda x: x.unflatten(0, (t.mask.shape[0], -1)), batch)
    return batch


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one decision; a multiplication and an addition are two.

    Attributes:
        act: Encoding and acting.
        encode: Encoding once per update; 0 where acting keeps the features, or minibatches
            compute them.
        learn: Forward and backward pass, recomputation included.
    """

    act: float
    encode: float
    learn: float


def count_operations(
    policy: Policy,
    learner: Learner,
    obs: Any,
    decision: Decision,
    rows: int,
    *,
    kept: bool = False,
) -> Operations:
    """Count the operations of matrix products, convolutions and attention.

    Args:
        policy: The policy.
        learner: Learner of the policy.
        obs: Observations of one step, see ``acting``.
        decision: Decision of one step.
        rows: Observations of an update in this process.
        kept: Whether the features of acting are kept for the update.
    """
    assert isinstance(policy, nn.Module)
    has_features = isinstance(policy, VLAPolicy) and policy.keeps_features(rows)
    config, device = learner.config, next(policy.parameters()).device
    with fake_tensors(policy):
        count = min(2, len(decision.value))
        obs, decision = _zeros((obs, decision), count, device)
        trajectory = empty_trajectory(obs, decision, 1)
    # The other kernels of attention are not counted on a CPU.
    with _freed_gradients(policy), sdpa_kernel(SDPBackend.MATH), fake_tensors(policy):
        with torch.no_grad(), OperationCounter() as encode:
            inputs = policy.encode(obs)
        with torch.no_grad(), OperationCounter() as act:
            policy.act(inputs, noise=policy.noise(count))
        if not has_features:
            with encoding_of(policy, rows):
                inputs = policy.encode(obs)
        batch = micro_batch(inputs, device, trajectory, count, config)
        denominator = losses.denominator(batch.mask)
        with OperationCounter() as learn:
            loss, _ = learner.optimizer.loss(batch, denominator, denominator, entropy_coef=0.0)
            loss.backward()
            del loss
    return Operations(
        act=(encode.total + act.total) / count,
        encode=encode.total / count if has_features and not kept else 0.0,
        learn=learn.total / count,
    )


@torch.no_grad()
def estimate_acting(
    policy: Policy, obs_spec: ObsSpec, device: torch.device, rows: int
) -> tuple[int, Any, Any]:
    """Estimate the memory of acting.

    Args:
        policy: The policy.
        obs_spec: Spec of one environment's observation.
        device: Device of the observations.
        rows: Number of environments.

    Returns:
        Peak in bytes; the observations and the decision as tensors [rows, ..] without memory.
    """
    assert isinstance(policy, nn.Module)
    specs = obs_spec if isinstance(obs_spec, dict) else {"obs": obs_spec}
    shapes: Any = None

    def act(rows: int, known: list[Tensor]) -> AllocationCounter:
        nonlocal shapes
        named = {
            name: torch.zeros(rows, *spec.shape, dtype=spec.dtype, device=device)
            for name, spec in specs.items()
        }
        obs = named if isinstance(obs_spec, dict) else named["obs"]
        obs = EpisodeMemory(policy, rows, device).attach(obs)
        noise = policy.noise(rows)
        with AllocationCounter([*known, *named.values()]) as counter:
            decision = policy.act(policy.encode(obs), noise=noise)
        shapes = obs, decision
        return counter

    peak = _peak(policy, rows, act)
    return peak, *_zeros(shapes, rows, torch.device("meta"))


def empty_trajectory(obs: Any, decision: Decision, horizon: int) -> Trajectory:
    """Return a trajectory of ``horizon`` steps with the shapes and devices of one step.

    Args:
        obs: Observations of one step, [N, ..].
        decision: Decision of one step.
        horizon: T.
    """

    def repeat(x: Tensor) -> Tensor:
        return x.new_empty(horizon, *x.shape)

    flag = repeat(torch.empty_like(decision.value, dtype=torch.bool))
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
    decoder, weight = policy.decoder.module, policy.model.lm_head.weight
    dtype = policy.compute if weight.dtype == torch.float32 else weight.dtype
    return 2 * slots * width * sum(decoder.groups) * decoder.head_dim * dtype.itemsize


def language_step(
    model: LanguagePolicy | LanguageCritic, rows: int, width: int, length: int
) -> int:
    """Estimate the memory of the forward and backward pass of a micro-batch.

    Args:
        model: Policy or critic.
        rows: Number of sequences.
        width: Tokens of a sequence.
        length: Number of response tokens at the end of a sequence.

    Returns:
        Peak in bytes, without weights and gradients.
    """

    def step(rows: int, known: list[Tensor]) -> AllocationCounter:
        # The rows share no prefix. The places are those of the responses.
        ids = torch.arange(rows).unsqueeze(1).repeat(1, width)
        place, action = torch.arange(width - length, width).repeat(rows, 1), ids[:, -length:]
        with AllocationCounter([*known, ids, place]) as counter:
            if isinstance(model, LanguageCritic):
                loss = model.value(ids, place).sum()
            else:
                view = model.view(model.hidden(ids, place), action)
                assert view.entropy is not None
                loss = (view.log_prob + view.entropy).sum()
            loss.backward()
            del loss
        return counter

    with _freed_gradients(model):
        return _peak(model, rows, step)


def _normalisation(numbers: int) -> int:
    """Return the temporary bytes of normalising the observations of a rollout, or of their moments.

    To normalise them, they are joined and shifted. For the moments, they are joined, and a block is
    selected by the mask, copied as float64 and squared.

    Args:
        numbers: Float32 numbers of all observations.
    """
    block = min(numbers, running_stats.BLOCK)
    return max(2 * 4 * numbers, 4 * numbers + (4 + 8 + 8) * block)


def estimate_update(
    policy: Policy, learner: Learner, device: torch.device, t: Trajectory, *, surplus: float = 0.0
) -> Memory:
    """Estimate the memory of an update after its first step; existing gradients are freed.

    Args:
        policy: The policy.
        learner: Learner of the policy.
        device: Device of the learner.
        t: Trajectory of this process, [T, N, ..], possibly fake.
        surplus: Further trajectories that the rollout holds, in multiples of ``t``.
    """
    assert isinstance(policy, nn.Module)
    policy.zero_grad(set_to_none=True)
    # Inputs that acting has kept are those of the batch, which are counted.
    c, t = learner.config, replace(t, kept=None)
    share = c.global_batch_size // learner.ranks.world
    size = min(c.micro_batch_size or share, share)
    rows = t.version.numel()
    # A column of a minibatch holds all its steps.
    steps = t.mask.shape[0] if c.minibatch_unit == "column" else 1
    parts = (c.logprob_forward_micro_batch_size or rows) < rows
    encoded = copied = 0.0

    def learn(units: int, known: list[Tensor]) -> AllocationCounter:
        nonlocal encoded, copied
        size = units * steps
        sample = _zeros(t.obs, size, device, batch_dims=2)
        with encoding_of(policy, rows):
            inputs = policy.encode(sample)
        batch = micro_batch(inputs, device, t, size, c)
        # Inputs that are observations themselves take no memory, unless they are encoded in parts.
        shared = set() if parts else {x.untyped_storage()._cdata for x in tree.leaves(sample)}
        new = [x for x in tree.leaves(inputs) if x.untyped_storage()._cdata not in shared]
        encoded, copied = nbytes(new) / size, nbytes(batch) / size
        denominator = losses.denominator(batch.mask)
        with AllocationCounter([*known, *tree.leaves(batch)]) as counter:
            loss, _ = learner.optimizer.loss(batch, denominator, denominator, entropy_coef=0.0)
            loss.backward()
            del loss
        return counter

    with _freed_gradients(policy) as with_gradient:
        activations = _peak(policy, size // steps, learn)
    gradients = nbytes(list(with_gradient))
    experience_bytes = nbytes(t) * (1 + surplus) + rows * encoded + share * copied
    if isinstance(policy, ActorCritic) and policy.encoder.moments is not None:
        # There are no activations at that time.
        normalisation = _normalisation(rows * policy.encoder.vector_size)
        experience_bytes += max(0, normalisation - activations)
    weights = nbytes([*policy.parameters(), *policy.buffers()])
    return Memory(weights, gradients, 2 * gradients, round(experience_bytes), activations)
