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

from embodied_ppo.core.cuda_graph import record_graph
from embodied_ppo.policies.causal_lm import LanguagePolicy, precision
from embodied_ppo.policies.decoder import Attention
from embodied_ppo.rollout.generation.decode_model import DecodeModel
from embodied_ppo.rollout.generation.sampling import Sampling, choose

ROUND_STEPS = 8  # steps between checks for finished responses; tokens after their end are dropped
KEY_MULTIPLE = 128  # the number of keys of a bucket is a multiple of it
MIN_SLOTS = 8  # slots of the smallest bucket


class StaticDecode:
    """Decode steps of all slots. The engine writes ``last``, ``cached`` and ``u``."""

    def __init__(
        self, policy: LanguagePolicy, cache: list[Tensor], model: DecodeModel | None = None
    ) -> None:
        """Create the buffers.

        Args:
            policy: The language model.
            cache: Cached keys and values of every layer, [S, 2·groups, width, d].
            model: Copy of the weights and its forward pass; None: the policy's own.
        """
        self.policy, self.cache, self.model = policy, cache, model
        self.slots, _, self.width, _ = cache[0].shape
        device = cache[0].device
        self._addresses = self._weight_addresses()
        self._slot = torch.arange(self.slots, device=device)
        self._places = torch.arange(self.width, device=device)
        self._rotations = None if model is None else model.rotations(self.width)
        self._mask_values = torch.tensor([0.0, float("-inf")], device=device).to(cache[0].dtype)
        # Newest token of each slot, not in the cache yet.
        self.last = torch.zeros(self.slots, dtype=torch.int64, device=device)
        # Number of tokens of each slot in the cache.
        self.cached = torch.zeros(self.slots, dtype=torch.int64, device=device)
        # Uniform random numbers for ``choose`` in each step of a round.
        self.u = torch.zeros(self.slots, ROUND_STEPS, dtype=torch.float64, device=device)
        self._step_index = torch.zeros(1, dtype=torch.int64, device=device)  # in the round
        self._token = torch.zeros(self.slots, ROUND_STEPS, dtype=torch.int64, device=device)
        self._log_prob = torch.zeros(self.slots, ROUND_STEPS, device=device)
        self.graphs: dict[tuple[int, int, Sampling], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def _weight_addresses(self) -> list[int]:
        """Return the address of each parameter."""
        return [p.data_ptr() for p in self.policy.parameters()]

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
        # Slots between ``active`` and the bucket's size decode padding.
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
        cached = self.cached[:n]
        # Everything below is recorded once and replayed for each token.
        logits = self._logits(n, width)
        index = self._step_index.expand(n, 1)
        token, log_prob = choose(logits, sampling, self.u[:n].gather(1, index).squeeze(1))
        self._token[:n].scatter_(1, index, token.unsqueeze(1))
        self._log_prob[:n].scatter_(1, index, log_prob.unsqueeze(1))
        self.last[:n] = token
        # In place, because the graph reads these tensors at their addresses.
        cached += 1
        self._step_index += 1

    def _logits(self, n: int, width: int) -> Tensor:
        """Return logits [n, V] of one step; write keys and values of its tokens to the cache."""
        ids, cached, masks = self.last[:n], self.cached[:n], self._masks(n, width)
        # With a copy of the weights, else with the policy's own modules under autocast.
        if self.model is not None:
            assert self._rotations is not None
            attend = partial(self._attend_copy, width, masks)
            rotations = self._rotations.index_select(0, cached)
            return self.model.logits(self.model.hidden(ids, rotations, attend))
        attend = partial(self._attend, width, masks)
        with precision(self.policy.model.lm_head.weight, self.policy.compute, cache_weights=False):
            decoder = self.policy.decoder.module
            hidden = decoder(ids.unsqueeze(1), cached.unsqueeze(1), attend=attend)
            return self.policy.logits(hidden[:, 0])

    def _masks(self, n: int, width: int) -> list[Tensor]:
        """Return the mask [n, 1, 1, width] of each layer's attention.

        It is 0 or -inf, and True or False for logits with a softcap. torch converts boolean masks
        in every layer.
        """
        decoder, query = self.policy.decoder.module, self.cached[:n].unsqueeze(1)
        zero, infinity = self._mask_values
        masks: dict[Attention, Tensor] = {}
        for attention in dict.fromkeys(decoder.attention):
            visible = attention.visible_keys(query, self._places[:width]).unsqueeze(1)
            is_plain = attention.softcap is None
            masks[attention] = torch.where(visible, zero, infinity) if is_plain else visible
        return [masks[attention] for attention in decoder.attention]

    def _attend(
        self, width: int, masks: list[Tensor], i: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Compute attention of layer ``i``, see ``decoder.Attend``."""
        for cache, x in zip(self.cache[i].chunk(2, dim=1), (k, v), strict=True):
            cache[self._slot[: len(x)], :, self.cached[: len(x)]] = x[:, :, 0].to(cache.dtype)
        q = q.squeeze(2).unflatten(1, (k.shape[1], -1))  # [n, groups, heads / groups, d]
        return self._grouped(width, masks[i], i, q).flatten(1, 2).unsqueeze(2)

    def _attend_copy(
        self, width: int, masks: list[Tensor], i: int, q: Tensor, kv: Tensor
    ) -> Tensor:
        """Compute attention of layer ``i``, see ``decode_model.HeadAttention``."""
        self.cache[i][self._slot[: len(kv)], :, self.cached[: len(kv)]] = kv
        q = q.unflatten(1, (-1, kv.shape[1] // 2)).transpose(1, 2)  # [n, groups, heads / groups, d]
        return self._grouped(width, masks[i], i, q).transpose(1, 2).flatten(1, 2)

    def _grouped(self, width: int, mask: Tensor, i: int, q: Tensor) -> Tensor:
        """Return attention of queries [n, groups, heads / groups, d], of the same shape.

        The query heads of a group are the queries of one head, so that keys and values are not
        copied for each of them.
        """
        # Keys beyond the bucket are not read.
        keys, values = self.cache[i][: len(q), :, :width].chunk(2, dim=1)
        return self.policy.decoder.module.attention[i](q, keys, values, mask)

    def _graph(self, n: int, width: int, sampling: Sampling) -> Callable[[], None]:
        """Return the launch of the step's CUDA graph.

        The graphs share one memory pool, because every result is copied to a buffer of this object.
        """
        # One graph for each bucket and each set of sampling parameters.
        key = (n, width, sampling)
        if key not in self.graphs:
            state = [self.last, self.cached, self._step_index]
            # Recording runs the step once; its effect on the state is undone.
            before = [x.clone() for x in state]

            def warm_up() -> None:
                # The keys and values that it writes are overwritten by the first replay.
                self.step(n, width, sampling)
                for x, old in zip(state, before, strict=True):
                    x.copy_(old)

            step, device = partial(self.step, n, width, sampling), self.last.device
            self.graphs[key], _ = record_graph(step, device, warm_up=warm_up, pool=self._pool)
        return self.graphs[key].replay
