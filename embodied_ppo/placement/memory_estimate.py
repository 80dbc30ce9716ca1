"""Bytes that a run will need, before it runs: tensors without contents go through acting and learning.

What is counted are the tensors that operations really make (a dispatch mode sees each, and when it is let go), so no
formula has to know the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from embodied_ppo.algorithms import losses
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import tree
from embodied_ppo.core.types import Batch, Decision, ObsSpec, Policy, Trajectory
from embodied_ppo.models.causal_lm import LanguageCritic, LanguagePolicy

TOKEN = 64
"""Bytes that experience holds of a response token: what a ``Trajectory`` has, and what the learner makes of it."""


class Living(TorchDispatchMode):
    """Bytes of the tensors that operations make, as long as anything holds them. ``peak``: the most at once."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        """``known``: what there was before."""
        super().__init__()
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet(x.untyped_storage() for x in known)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree.leaves(out):
            if isinstance(x, Tensor):
                self._count(x)
        return out

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size


def nbytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree.leaves(tensors))


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of an update.

    weights, gradients, optimiser
    experience    trajectory, what the policy's ``encode`` makes of it (prefixes), and a minibatch's copy of that
    activations   of a micro-batch: the most that lives, within its forward and backward pass
    """

    weights: int
    gradients: int
    optimiser: int
    experience: int
    activations: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def in_parts(model: Any, ranks: int, *, acts: bool = False) -> dict[str, int]:
    """Bytes of weights, gradients and optimiser of one of ``ranks`` learners that hold a part of every parameter each.

    Beside the parts there are, whole: what belongs to no unit and two of the units (the next one is fetched already);
    if the process ``acts``, at other times all weights. ``model`` has ``units``.
    """

    def whole(parameters: Iterable[nn.Parameter]) -> tuple[int, int]:
        """Bytes of weights, and of gradients."""
        known = list(parameters)
        return nbytes(known), nbytes([p for p in known if p.requires_grad])

    units = [whole(unit.parameters()) for unit in model.units()]
    weights, gradients = whole(model.parameters())
    beside = [
        min(total, total - sum(unit[i] for unit in units) + 2 * max((unit[i] for unit in units), default=0))
        for i, total in enumerate((weights, gradients))
    ]
    return {
        "weights": nbytes(list(model.buffers())) + weights // ranks + (weights if acts else beside[0]),
        "gradients": gradients // ranks + beside[1],
        "optimiser": 2 * gradients // ranks,
    }


@contextmanager
def imagined(policy: nn.Module) -> Iterator[list[Tensor]]:
    """Within it tensors have no contents; ``policy`` is given as what it is made of, without contents."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield [mode.from_tensor(x) for x in (*policy.parameters(), *policy.buffers())]


def micro_batch(policy: Policy, device: torch.device, t: Trajectory, rows: int, c: AlgorithmConfig) -> Batch:
    """Of the shapes of ``rows`` decisions of ``t``, arbitrary contents."""
    few = tree.map(lambda x: x.new_empty(rows, *x.shape[2:]), t)
    float_ = torch.empty(few.value.shape, device=device)
    batch = Batch(
        inputs=policy.encode(few.obs),
        action=few.action,
        replay=few.replay,
        log_prob=losses.reduce_log_prob(few.log_prob, c.logprob_type, batch_dims=1),
        value=float_,
        advantage=float_,
        returns=float_,
        mask=torch.ones(few.value.shape, dtype=torch.bool, device=device),
    )
    if c.minibatch_unit == "column":
        return tree.map(lambda x: x.unflatten(0, (t.mask.shape[0], -1)), batch)
    return batch


@torch.no_grad()
def acting(policy: Policy, obs_spec: ObsSpec, device: torch.device, rows: int) -> tuple[int, Any, Any]:
    """Bytes at the peak of deciding for ``rows`` observations; the observation and the decision, without contents."""
    assert isinstance(policy, nn.Module)
    specs = obs_spec if isinstance(obs_spec, dict) else {"obs": obs_spec}
    with imagined(policy) as known:
        found = {name: torch.empty(rows, *spec.shape, dtype=spec.dtype, device=device) for name, spec in specs.items()}
        obs = found if isinstance(obs_spec, dict) else found["obs"]
        noise = policy.noise(rows)
        with Living([*known, *found.values()]) as living:
            decision = policy.act(policy.encode(obs), noise=noise)
    return living.peak, obs, decision


def experience(obs: Any, decision: Decision, horizon: int) -> Trajectory:
    """A trajectory of ``horizon`` such steps, without contents."""

    def times(x: Tensor) -> Tensor:
        return x.new_empty(horizon, *x.shape)

    flag = times(torch.empty_like(decision.value, dtype=torch.bool))
    value = times(decision.value)
    return Trajectory(
        obs=tree.map(times, obs),
        action=times(decision.action),
        log_prob=times(decision.log_prob),
        value=value,
        replay=tree.map(times, decision.replay),
        next_value=value,
        reward=value,
        terminated=flag,
        truncated=flag,
        mask=flag,
        version=times(decision.value.new_empty(len(decision.value), dtype=torch.int64)),
    )


def cache(policy: LanguagePolicy, slots: int, width: int) -> int:
    """Bytes of keys and values of ``slots`` rows of ``width`` tokens."""
    decoder, weight = policy.decoder.module, policy.model.lm_head.weight
    dtype = policy.compute if weight.dtype == torch.float32 else weight.dtype
    return 2 * slots * width * sum(decoder.groups) * decoder.head_dim * dtype.itemsize


def language_step(model: LanguagePolicy | LanguageCritic, rows: int, width: int, length: int) -> int:
    """Bytes at the peak of forward and backward of ``rows`` rows of ``width`` tokens, ``length`` of them responses."""
    told = set[Tensor]()

    def forget(p: Tensor) -> None:
        told.add(p)
        p.grad = None

    hooks = [p.register_post_accumulate_grad_hook(forget) for p in model.parameters() if p.requires_grad]
    with imagined(model) as known:
        ids = torch.zeros(rows, width, dtype=torch.int64)
        place, action = ids[:, -length:], ids[:, -length:]
        with Living([*known, ids]) as living:
            if isinstance(model, LanguageCritic):
                loss = model.value(ids, place).sum()
            else:
                view = model.view(model.hidden(ids, place), action)
                loss = (view.log_prob + view.entropy).sum()
            loss.backward()
            del loss
    for hook in hooks:
        hook.remove()
    return living.peak


def predicted(policy: Policy, learner: Learner, device: torch.device, t: Trajectory) -> Memory:
    """Of updates from the second optimiser step on; ``t``: this process's part. Gradients there are are dropped."""
    assert isinstance(policy, nn.Module)
    policy.zero_grad(set_to_none=True)
    c, told = learner.config, set[Tensor]()

    def forget(p: Tensor) -> None:
        told.add(p)
        p.grad = None

    trained = [p for p in policy.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(forget) for p in trained]
    share = c.global_batch_size // learner.ranks.world
    size = min(c.micro_batch_size or share, share)
    with imagined(policy) as known:
        part = micro_batch(policy, device, t, size, c)
        each = nbytes(part.inputs) / size
        whole = losses.denominator(part.mask)
        with Living([*known, *tree.leaves(part)]) as living:
            loss, _ = learner.optimizer.loss(part, whole, whole, entropy_coef=0.0)
            loss.backward()
            del loss
        activations = living.peak
    for hook in hooks:
        hook.remove()
    gradients = nbytes(list(told))
    rows = t.version.numel()
    held = nbytes(t) + (rows + share) * each
    weights = nbytes([*policy.parameters(), *policy.buffers()])
    return Memory(weights, gradients, 2 * gradients, round(held), activations)
