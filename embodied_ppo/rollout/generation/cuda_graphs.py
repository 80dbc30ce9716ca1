"""Decoding with fixed shapes, in fixed memory: on a GPU a step is one launch of a CUDA graph, and
the host waits for nothing between looks.

A step computes a bucket: slots rounded up to a power of two, keys to a multiple of ``WIDTH``. Slots
of the bucket that hold no response compute something, too, in places of the cache that nobody else
reads. A graph reads the weights where they lie; the learner changes them in place, so that a graph
knows every update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from embodied_ppo.models.causal_lm import LanguagePolicy, precision
from embodied_ppo.rollout.generation.sampling import Sampling, choose

ROUND = 8
"""Steps between two looks at who is over; rows that are go on until then, and what they add is
dropped.
"""
WIDTH = 128
"""Buckets of keys are multiples of it."""
SLOTS = 8
"""Smallest bucket of slots."""


class StaticDecode:
    """Some steps of all slots at once. The engine writes ``last``, ``held``, ``u`` and
    ``occurred``, and reads what ``run`` answers."""

    def __init__(self, policy: LanguagePolicy, keys: list[Tensor], values: list[Tensor]) -> None:
        """``keys`` and ``values``: the cache of every layer, [S, groups, width, d]."""
        self.policy, self.keys, self.values = policy, keys, values
        self.slots, _, self.width, _ = keys[0].shape
        where = keys[0].device
        self.weights = [p.data_ptr() for p in policy.parameters()]
        """Where they were: graphs are of no use elsewhere."""
        self.last = torch.zeros(self.slots, dtype=torch.int64, device=where)
        """Newest token of each slot, not in the cache yet."""
        self.held = torch.zeros(self.slots, dtype=torch.int64, device=where)
        """Tokens of each slot that the cache holds."""
        self.u = torch.zeros(self.slots, ROUND, dtype=torch.float64, device=where)
        """What ``choose`` draws with in each step of a round."""
        self.occurred: Tensor | None = None
        self._at = torch.zeros(1, dtype=torch.int64, device=where)  # the round's step
        self._token = torch.zeros(self.slots, ROUND, dtype=torch.int64, device=where)
        self._log_prob = torch.zeros(self.slots, ROUND, device=where)
        self.graphs: dict[tuple[int, int, Sampling], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if where.type == "cuda" else None

    def remember(self) -> Tensor:
        """bool [S, V], which tokens occurred in a slot: from now on every step adds to it."""
        if self.occurred is None:
            vocabulary = self.policy.model.lm_head.weight.shape[0]
            self.occurred = torch.zeros(
                self.slots, vocabulary, dtype=torch.bool, device=self.last.device
            )
        return self.occurred

    def usable(self) -> bool:
        """Whether the weights are where graphs read them."""
        return self.weights == [p.data_ptr() for p in self.policy.parameters()]

    def bucket(self, active: int, widest: int) -> tuple[int, int]:
        """(slots, keys) of the smallest bucket for so many slots in use and keys."""
        return (
            min(self.slots, max(SLOTS, 1 << (active - 1).bit_length())),
            min(self.width, -(-widest // WIDTH) * WIDTH),
        )

    def run(
        self, active: int, widest: int, steps: int, sampling: Sampling
    ) -> tuple[Tensor, Tensor]:
        """``steps`` more tokens of slots 0 .. active-1, of which the widest holds ``widest``: token
        and log π [active, steps], until the next call."""
        n, width = self.bucket(active, widest + steps)
        self.held[active:n] = 0
        self._at.zero_()
        rules = replace(sampling, max_tokens=1, stop_ids=(), stop=())
        step = (
            self._graph(n, width, rules)
            if self._pool is not None
            else lambda: self.step(n, width, rules)
        )
        for _ in range(steps):
            step()
        return self._token[:active, :steps], self._log_prob[:active, :steps]

    def step(self, n: int, width: int, sampling: Sampling) -> None:
        """One token of slots 0 .. n-1, seeing ``width`` places at most. No shape depends on a
        value, and no value goes to the host."""
        decoder, held = self.policy.decoder.module, self.held[:n]
        slot = torch.arange(n, device=held.device)
        places = torch.arange(width, device=held.device)
        seen = {
            a: a.visible_keys(held.unsqueeze(1), places).unsqueeze(1)
            for a in dict.fromkeys(decoder.attention)
        }

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[i][slot, :, held] = k[:, :, 0].to(self.keys[i].dtype)
            self.values[i][slot, :, held] = v[:, :, 0].to(self.keys[i].dtype)
            how, groups = decoder.attention[i], k.shape[1]
            # Query heads of a group look at the same keys, as queries of one head: nothing is
            # copied for each.
            q = q.squeeze(2).unflatten(1, (groups, -1))  # [n, groups, heads / groups, d]
            out = how(q, self.keys[i][:n, :, :width], self.values[i][:n, :, :width], seen[how])
            return out.flatten(1, 2).unsqueeze(2)

        with precision(self.policy.model.lm_head.weight, self.policy.compute, cache_weights=False):
            hidden = decoder(self.last[:n].unsqueeze(1), held.unsqueeze(1), attend=attend)
            logits = self.policy.logits(hidden[:, 0])
        at = self._at.expand(n, 1)
        occurred = None if sampling.repetition_penalty == 1.0 else self.remember()[:n]
        token, log_prob = choose(logits, sampling, self.u[:n].gather(1, at).squeeze(1), occurred)
        if occurred is not None:
            occurred.scatter_(1, token.unsqueeze(1), True)
        self._token[:n].scatter_(1, at, token.unsqueeze(1))
        self._log_prob[:n].scatter_(1, at, log_prob.unsqueeze(1))
        self.last[:n] = token
        held += 1
        self._at += 1

    def _graph(self, n: int, width: int, sampling: Sampling) -> Callable[[], None]:
        """The step as a CUDA graph.

        All that outlives it lies in our own tensors, so graphs may share one pool.
        """
        key = (n, width, sampling)
        if key not in self.graphs:
            if sampling.repetition_penalty != 1.0:
                self.remember()
            fixed = [
                self.last,
                self.held,
                self._at,
                *(() if self.occurred is None else (self.occurred,)),
            ]
            before = [x.clone() for x in fixed]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.step(
                    n, width, sampling
                )  # to warm up; what it leaves in the cache is written again
                for x, old in zip(fixed, before, strict=True):
                    x.copy_(old)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self.step(n, width, sampling)
            self.graphs[key] = graph
        return self.graphs[key].replay
