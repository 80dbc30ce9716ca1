"""Decode steps with fixed shapes in fixed memory, replayed as CUDA graphs.

Each step is one graph launch, and the host synchronises once per round of ``ROUND_STEPS`` steps. A
step computes a bucket: the slots are rounded up to a power of two, the keys to a multiple of
``KEY_MULTIPLE``. Slots of the bucket without a response are computed as well; they write only to
cache places that no response reads. A graph reads the weights at their addresses. The learner
updates them in place, so a recorded graph uses the weights of every later update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from embodied_ppo.core.compile import record_graph
from embodied_ppo.models.causal_lm import LanguagePolicy, precision
from embodied_ppo.rollout.generation.sampling import Sampling, choose

ROUND_STEPS = 8
"""Steps between two checks for finished responses. Tokens after the end of a response are
dropped.
"""
KEY_MULTIPLE = 128
"""The number of keys of a bucket is a multiple of it."""
MIN_SLOTS = 8
"""Slots of the smallest bucket."""


class StaticDecode:
    """Decode steps of all slots. The engine writes ``last``, ``cached``, ``u`` and ``occurred``."""

    def __init__(self, policy: LanguagePolicy, keys: list[Tensor], values: list[Tensor]) -> None:
        """Create the buffers.

        Args:
            policy: The language model.
            keys: Cached keys of every layer, [S, groups, width, d].
            values: Cached values of every layer, [S, groups, width, d].
        """
        self.policy, self.keys, self.values = policy, keys, values
        self.slots, _, self.width, _ = keys[0].shape
        device = keys[0].device
        self._addresses = self._weight_addresses()
        self.last = torch.zeros(self.slots, dtype=torch.int64, device=device)
        """Newest token of each slot, not in the cache yet."""
        self.cached = torch.zeros(self.slots, dtype=torch.int64, device=device)
        """Number of tokens of each slot in the cache."""
        self.u = torch.zeros(self.slots, ROUND_STEPS, dtype=torch.float64, device=device)
        """Uniform random numbers for ``choose`` in each step of a round."""
        self.occurred: Tensor | None = None
        self._step_index = torch.zeros(1, dtype=torch.int64, device=device)  # in the round
        self._token = torch.zeros(self.slots, ROUND_STEPS, dtype=torch.int64, device=device)
        self._log_prob = torch.zeros(self.slots, ROUND_STEPS, device=device)
        self.graphs: dict[tuple[int, int, Sampling], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def _weight_addresses(self) -> list[int]:
        """Return the address of each parameter."""
        return [p.data_ptr() for p in self.policy.parameters()]

    def track_occurred(self) -> Tensor:
        """Return bool [S, V], the tokens that occurred in each slot. Later steps update it."""
        if self.occurred is None:
            shape = self.slots, self.policy.model.lm_head.weight.shape[0]
            self.occurred = torch.zeros(shape, dtype=torch.bool, device=self.last.device)
        return self.occurred

    def is_usable(self) -> bool:
        """Return whether the weights are at the addresses that the graphs read."""
        return self._addresses == self._weight_addresses()

    def bucket(self, active: int, widest: int) -> tuple[int, int]:
        """Return (slots, keys) of the smallest bucket for ``active`` slots and ``widest`` keys."""
        slots = max(MIN_SLOTS, 1 << (active - 1).bit_length())
        return min(self.slots, slots), min(self.width, -(-widest // KEY_MULTIPLE) * KEY_MULTIPLE)

    def run(
        self, active: int, widest: int, steps: int, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        """Decode ``steps`` tokens of slots 0 .. active-1, which have at most ``widest`` tokens.

        Returns:
            Tokens and their log-probabilities, [active, steps]; the next call overwrites them.
        """
        n, width = self.bucket(active, widest + steps)
        self.cached[active:n] = 0
        self._step_index.zero_()
        # The step does not read these options, so graphs are shared by all their values.
        rules = replace(sampling, max_tokens=1, stop_ids=(), stop=())
        if self._pool is None:
            step = partial(self.step, n, width, rules)
        else:
            step = self._graph(n, width, rules)
        for _ in range(steps):
            step()
        return self._token[:active, :steps], self._log_prob[:active, :steps]

    def step(self, n: int, width: int, sampling: Sampling) -> None:
        """Decode one token of slots 0 .. n-1, which attend to ``width`` places at most.

        A CUDA graph records it: no shape depends on a value, and no value goes to the host.
        """
        decoder, cached = self.policy.decoder.module, self.cached[:n]
        slot = torch.arange(n, device=cached.device)
        places = torch.arange(width, device=cached.device)
        visible = {
            attention: attention.visible_keys(cached.unsqueeze(1), places).unsqueeze(1)
            for attention in dict.fromkeys(decoder.attention)
        }

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values, attention = self.keys[i], self.values[i], decoder.attention[i]
            keys[slot, :, cached] = k[:, :, 0].to(keys.dtype)
            values[slot, :, cached] = v[:, :, 0].to(keys.dtype)
            # The query heads of a group become the queries of one head, so that keys and values
            # are not copied for each of them.
            q = q.squeeze(2).unflatten(1, (k.shape[1], -1))  # [n, groups, heads / groups, d]
            out = attention(q, keys[:n, :, :width], values[:n, :, :width], visible[attention])
            return out.flatten(1, 2).unsqueeze(2)

        with precision(self.policy.model.lm_head.weight, self.policy.compute, cache_weights=False):
            hidden = decoder(self.last[:n].unsqueeze(1), cached.unsqueeze(1), attend=attend)
            logits = self.policy.logits(hidden[:, 0])
        index = self._step_index.expand(n, 1)
        occurred = None if sampling.repetition_penalty == 1.0 else self.track_occurred()[:n]
        token, log_prob = choose(logits, sampling, self.u[:n].gather(1, index).squeeze(1), occurred)
        if occurred is not None:
            occurred.scatter_(1, token.unsqueeze(1), True)
        self._token[:n].scatter_(1, index, token.unsqueeze(1))
        self._log_prob[:n].scatter_(1, index, log_prob.unsqueeze(1))
        self.last[:n] = token
        cached += 1
        self._step_index += 1

    def _graph(self, n: int, width: int, sampling: Sampling) -> Callable[[], None]:
        """Return the launch of the step's CUDA graph.

        The graphs share one memory pool, because every result is copied to a buffer of this object.
        """
        key = (n, width, sampling)
        if key not in self.graphs:
            if sampling.repetition_penalty != 1.0:
                self.track_occurred()
            state = [self.last, self.cached, self._step_index]
            state += [] if self.occurred is None else [self.occurred]
            before = [x.clone() for x in state]

            def warm_up() -> None:
                # The keys and values that it writes are overwritten by the first replay.
                self.step(n, width, sampling)
                for x, old in zip(state, before, strict=True):
                    x.copy_(old)

            self.graphs[key], _ = record_graph(
                partial(self.step, n, width, sampling),
                self.last.device,
                warm_up=warm_up,
                pool=self._pool,
            )
        return self.graphs[key].replay
