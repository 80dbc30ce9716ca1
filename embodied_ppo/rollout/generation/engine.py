"""Generate responses: a decode loop with a key-value cache, in which finished rows make room for waiting prompts.

S slots are decoded together; every slot holds one response. Rows that end leave at once: waiting prompts take their
place, and when none waits the rest moves together, so no step computes what nobody reads. (With lengths as they are in
practice this gives 2.5 times the tokens of a loop that waits for its longest row.) On a GPU tokens come in rounds of
``graphs.ROUND`` steps, each a CUDA graph, with a look at who is over in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from embodied_ppo.core import random
from embodied_ppo.models.causal_lm import Decoder, LanguagePolicy, precision
from embodied_ppo.rollout.generation import cuda_graphs
from embodied_ppo.rollout.generation.cuda_graphs import StaticDecode
from embodied_ppo.rollout.generation.sampling import Sampling, choose

REFILL = 0.25
"""Share of the slots that is free before prompts are taken in: they are read together, which is cheaper."""
READ_TOKENS = defaultdict(lambda: 1 << 15, cpu=1024)
"""Tokens of prompts in one pass, by kind of device: on a CPU as many as its cache holds (a quarter faster than all of
256 prompts at once), elsewhere as many as memory for one pass allows."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Responses to N prompts, in their order.

    token     int64 [N, T]    padded with ``Engine.pad_id`` on the right
    length    int64 [N]       tokens, the one that ended it included
    stopped   bool [N]        ended by a stop token or text; else cut at max_tokens
    log_prob  float32 [N, T]  of each token, at the sampling temperature; 0 where padded
    """

    token: Tensor
    length: Tensor
    stopped: Tensor
    log_prob: Tensor


class Generator(Protocol):
    """What answers prompts; the built-in ``Engine``, or another behind the same words."""

    version: int
    """Of the policy's weights."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int, samples: Tensor | None = None
    ) -> Generation:
        """One response for each of N prompts. ``samples`` int64 [N] (None: 0, 1, ..): row n's randomness is a function
        of (seed, samples[n]), whatever the other rows are."""
        ...

    def update_weights(self, version: int) -> None:
        """The policy's weights are now those of ``version``; what was kept of older ones is forgotten."""
        ...

    def sleep(self) -> None:
        """Give back memory until ``wake``."""
        ...

    def wake(self) -> None: ...


class _Cache:
    """Keys and values of every layer, [S, groups, width, d]; row b's tokens lie at 0 .. length[b]-1."""

    def __init__(self, policy: LanguagePolicy, slots: int, width: int) -> None:
        self.slots, self.width = slots, width
        decoder, weight = policy.decoder.module, policy.model.lm_head.weight
        self.dtype = policy.compute if weight.dtype == torch.float32 else weight.dtype
        shapes = [(slots, groups, width, decoder.head_dim) for groups in decoder.groups]
        self.keys = [torch.zeros(shape, dtype=self.dtype, device=weight.device) for shape in shapes]
        self.values = [torch.zeros_like(k) for k in self.keys]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Rows ``source`` to rows ``target``, both int64 [M]; the source stays."""
        for x in (*self.keys, *self.values):
            x[target] = x[source]


class Engine:
    """See ``Generator``. Shares the policy's weights."""

    def __init__(
        self,
        policy: LanguagePolicy,
        *,
        slots: int,
        pad_id: int,
        decode: Callable[[list[int]], str] | None = None,
        static: bool | None = None,
        tell: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """``slots``: rows decoded together (S). ``decode``: token ids to text, for stop texts. ``static``: whether
        steps have fixed shapes, which CUDA graphs need; None: on a GPU. The tokens are the same. ``tell`` hears after
        each step how many responses are done, and of how many."""
        self.policy, self.slots, self.pad_id, self.decode = policy, slots, pad_id, decode
        self.static, self.tell = static, tell
        self.version = 0
        self._cache: _Cache | None = None
        self._rounds: StaticDecode | None = None

    # ------------------------------------------------------------------------------------------------------- protocol
    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int, samples: Tensor | None = None
    ) -> Generation:
        """See ``Generator``. Equal prompts that follow each other are read once."""
        assert prompts and all(len(p) > 0 for p in prompts)
        where = self.policy.model.lm_head.weight.device
        n, longest = len(prompts), max(map(len, prompts))
        samples = torch.arange(n) if samples is None else samples
        seeds = torch.full((n,), seed, dtype=torch.int64)
        u = random.uniform(seeds, 0, samples.cpu(), sampling.max_tokens).to(where)  # [N, T]
        slots = min(self.slots, n)
        cache = self._room(slots, longest + sampling.max_tokens)
        state = _State(n, slots, sampling, self.pad_id, u, self.policy.model.lm_head.weight.shape[0], self._rounds)
        with precision(self.policy.model.lm_head.weight, self.policy.compute):
            self._fill(cache, state, prompts)
        t = sampling.max_tokens
        return Generation(state.token[:, :t], state.length, state.stopped, state.log_prob[:, :t])

    def update_weights(self, version: int) -> None:
        """Nothing to copy: the weights are the learner's own, changed in place; graphs read them there."""
        self.version = version

    def sleep(self) -> None:
        """Forget the cache, and the graphs that write there."""
        self._cache = self._rounds = None

    def wake(self) -> None:
        """The next ``generate`` makes a new cache."""

    # ---------------------------------------------------------------------------------------------------------- passes
    def _fill(self, cache: _Cache, state: _State, prompts: Sequence[Sequence[int]]) -> None:
        """Every response from its first token to its last."""
        slots, waiting = len(state.row), list(range(len(prompts) - 1, -1, -1))
        while waiting or state.active:
            free = slots - state.active
            if waiting and (free >= max(1, int(REFILL * slots)) or not state.active or free >= len(waiting)):
                rows = [waiting.pop() for _ in range(min(free, len(waiting)))]
                logits = self._read(cache, state, [prompts[r] for r in rows])
                state.begin(rows, [prompts[r] for r in rows])
                first = slice(state.active - len(rows), state.active)
                state.take(first, logits, self.decode)
            elif self._rounds is not None:
                self._round(self._rounds, state)
            else:
                everyone = slice(0, state.active)
                state.take(everyone, self._step(cache, state), self.decode)
            state.leave(cache)
            self.tell(len(prompts) - len(waiting) - state.active, len(prompts))

    def _room(self, slots: int, width: int) -> _Cache:
        """A cache of ``slots`` rows and ``width`` tokens at least; the last one if it is."""
        static = self._is_static()
        if static:
            width = -(-(width + cuda_graphs.ROUND) // cuda_graphs.WIDTH) * cuda_graphs.WIDTH
        kept = self._cache
        if kept is None or kept.width < width or kept.slots < slots:
            self._cache = self._rounds = kept = None  # before the new ones are there
            self._cache = kept = _Cache(self.policy, slots, width)
        if not static:
            self._rounds = None
        elif self._rounds is None or not self._rounds.usable():
            self._rounds = StaticDecode(self.policy, kept.keys, kept.values)
        return kept

    def _is_static(self) -> bool:
        if self.static is not None:
            return self.static
        kinds = getattr(self._decoder.base.rotary_emb, "rope_type", None)
        moving = {"dynamic", "longrope"}  # transformers looks at the positions: no graph can hold that
        return self.policy.model.lm_head.weight.is_cuda and not moving & set(
            kinds.values() if isinstance(kinds, dict) else [kinds]
        )

    @property
    def _decoder(self) -> Decoder:
        return self.policy.decoder.module

    def _read(self, cache: _Cache, state: _State, prompts: list[Sequence[int]]) -> Tensor:
        """Prompts into the slots after the active ones; logits [M, V] of what follows each."""
        several = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        each = max(1, READ_TOKENS[state.token.device.type] // max(len(prompt) for prompt in prompts))
        slot, logits = state.active, []
        for part in (several[i : i + each] for i in range(0, len(several), each)):
            copies = [count for _, count in part]
            rows = slice(slot, slot + sum(copies))
            logits.append(self._read_part(cache, rows, [prompt for prompt, _ in part], copies))
            slot = rows.stop
        return torch.cat(logits)

    def _read_part(self, cache: _Cache, rows: slice, prompts: list[Sequence[int]], copies: list[int]) -> Tensor:
        """Prompts, each ``copies`` times, into the slots ``rows``; logits [M, V]."""
        where = cache.keys[0].device
        lengths = torch.tensor([len(p) for p in prompts], device=where)
        width = int(lengths.max())
        ids = torch.tensor([[*p, *[self.pad_id] * (width - len(p))] for p in prompts], device=where)
        place = (lengths - 1).unsqueeze(1)
        of = torch.arange(len(prompts), device=where).repeat_interleave(torch.tensor(copies, device=where))
        causal = self._decoder.causal(width, place, where)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[i][rows, :, :width] = k[of].to(cache.dtype)
            cache.values[i][rows, :, :width] = v[of].to(cache.dtype)
            return causal(i, q, k, v)

        return self.policy.logits(self._decoder(ids, attend=attend, place=place)[:, 0])[of]

    def _step(self, cache: _Cache, state: _State) -> Tensor:
        """One more token for every active slot; logits [A, V]."""
        n = state.active
        held = state.held[:n]  # tokens in the cache
        width = state.widest + 1
        even = int(held.min()) == state.widest
        slot = slice(0, n) if even else torch.arange(n, device=held.device)
        new = state.widest if even else held
        keys = torch.arange(width, device=held.device)
        seen = {a: a.sees(held.unsqueeze(1), keys).unsqueeze(1) for a in dict.fromkeys(self._decoder.attention)}

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[i][slot, :, new] = k[:, :, 0].to(cache.dtype)
            cache.values[i][slot, :, new] = v[:, :, 0].to(cache.dtype)
            how = self._decoder.attention[i]
            return how(q, cache.keys[i][:n, :, :width], cache.values[i][:n, :, :width], seen[how])

        hidden = self._decoder(state.last[:n].unsqueeze(1), held.unsqueeze(1), attend=attend)
        state.held[:n] += 1
        state.widest += 1
        return self.policy.logits(hidden[:, 0])

    def _round(self, rounds: StaticDecode, state: _State) -> None:
        """Up to ROUND more tokens for every active slot."""
        n = state.active
        row = state.row[:n]
        t = state.length[row]
        steps = min(cuda_graphs.ROUND, state.sampling.max_tokens - int(t.min()))
        after = t.unsqueeze(1) + torch.arange(steps, device=t.device)  # beyond its end a row takes anything
        rounds.u[:n, :steps] = state.u[row.unsqueeze(1), after.clamp(max=state.sampling.max_tokens - 1)]
        token, log_prob = rounds.run(n, state.widest, steps, state.sampling)
        state.extend(slice(0, n), token, log_prob, self.decode)
        state.widest += steps


class _State:
    """Where every response stands. Slots 0 .. active-1 are in use, in any order of rows."""

    def __init__(
        self,
        n: int,
        slots: int,
        sampling: Sampling,
        pad_id: int,
        u: Tensor,
        vocabulary: int,
        rounds: StaticDecode | None,
    ) -> None:
        """``rounds``: whose tensors hold what steps read and write; None: tensors of its own."""
        self.sampling, self.pad_id, self.u = sampling, pad_id, u
        where, spare = u.device, 0 if rounds is None else cuda_graphs.ROUND  # what a round computes after the end
        self.token = torch.full((n, sampling.max_tokens + spare), pad_id, dtype=torch.int64, device=where)
        self.log_prob = torch.zeros(n, sampling.max_tokens + spare, device=where)
        self.length = torch.zeros(n, dtype=torch.int64, device=where)
        self.stopped = torch.zeros(n, dtype=torch.bool, device=where)
        self.stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=where)
        self.active = self.widest = 0
        self.row = torch.zeros(slots, dtype=torch.int64, device=where)
        self.last = torch.zeros(slots, dtype=torch.int64, device=where) if rounds is None else rounds.last
        """Newest token of each slot, not in the cache yet."""
        self.held = torch.zeros(slots, dtype=torch.int64, device=where) if rounds is None else rounds.held
        """Tokens of each slot that the cache holds."""
        self.over = torch.zeros(slots, dtype=torch.bool, device=where)
        self.occurred: Tensor | None = None
        if sampling.repetition_penalty != 1.0:
            own = torch.zeros(slots, vocabulary, dtype=torch.bool, device=where) if rounds is None else None
            self.occurred = own if rounds is None else rounds.remember()

    def begin(self, rows: list[int], prompts: list[Sequence[int]]) -> None:
        """Rows into the slots after the active ones; the cache holds their prompts."""
        where = slice(self.active, self.active + len(rows))
        self.row[where] = torch.tensor(rows, device=self.row.device)
        lengths = [len(p) for p in prompts]
        self.held[where] = torch.tensor(lengths, device=self.row.device)
        self.widest = max(self.widest, *lengths)
        if self.occurred is not None:
            self.occurred[where] = False
            for slot, prompt in enumerate(prompts, start=self.active):
                self.occurred[slot, torch.tensor(prompt, device=self.row.device)] = True
        self.active += len(rows)

    def take(self, slots: slice, logits: Tensor, decode: Callable[[list[int]], str] | None) -> None:
        """The next token of some slots, logits [M, V]; says whose response is over."""
        row = self.row[slots]
        t = self.length[row]
        occurred = None if self.occurred is None else self.occurred[slots]
        token, log_prob = choose(logits, self.sampling, self.u[row, t], occurred)
        self.token[row, t], self.log_prob[row, t] = token, log_prob
        self.length[row] = t + 1
        self.last[slots] = token
        if occurred is not None:
            occurred[torch.arange(len(row), device=row.device), token] = True
        stopped = torch.isin(token, self.stop_ids)
        if self.sampling.stop and decode is not None:
            says = [self._says_stop(r, n, decode) for r, n in zip(row.tolist(), (t + 1).tolist(), strict=True)]
            stopped |= torch.tensor(says, device=row.device)
        self.stopped[row] = stopped
        self.over[slots] = stopped | (t + 1 == self.sampling.max_tokens)

    def extend(self, slots: slice, token: Tensor, log_prob: Tensor, decode: Callable[[list[int]], str] | None) -> None:
        """As ``take`` of K tokens [M, K] that are chosen already; what comes after a response's end is dropped."""
        row = self.row[slots].unsqueeze(1)
        t = self.length[row]  # [M, 1]
        place = t + torch.arange(token.shape[1], device=row.device)
        self.token[row, place] = token
        stops = torch.isin(token, self.stop_ids)
        if self.sampling.stop and decode is not None:
            rows, ends = row.flatten().tolist(), (place + 1).tolist()
            says = [[self._says_stop(r, n, decode) for n in ns] for r, ns in zip(rows, ends, strict=True)]
            stops |= torch.tensor(says, device=row.device)
        last = stops | (place + 1 >= self.sampling.max_tokens)
        belongs = last.cumsum(1) - last.long() == 0
        self.token[row, place] = token.where(belongs, self.pad_id)
        self.log_prob[row, place] = log_prob.where(belongs, 0.0)
        row = row.squeeze(1)
        self.length[row] += belongs.sum(1)
        self.stopped[row] = (stops & belongs).any(1)
        self.over[slots] = last.any(1)

    def _says_stop(self, row: int, length: int, decode: Callable[[list[int]], str]) -> bool:
        """Whether the last of ``length`` tokens completes a stop text; looks at as many as that can take."""
        reach = max(len(stop.encode()) for stop in self.sampling.stop) + 8
        text = decode(self.token[row, max(0, length - reach) : length].tolist())
        return any(stop in text for stop in self.sampling.stop)

    def leave(self, cache: _Cache) -> None:
        """Slots of responses that are over are given up; the last ones in use move into their places."""
        over = self.over[: self.active]
        count = int(over.sum())
        if not count:
            return
        left = self.active - count
        holes = over[:left].nonzero().flatten()
        movers = left + (~over[left:]).nonzero().flatten()
        if len(movers):
            cache.move(movers, holes)
            for x in (self.row, self.last, self.held, *(() if self.occurred is None else (self.occurred,))):
                x[holes] = x[movers]
        self.over[: self.active] = False
        self.active = left
        self.widest = int(self.held[:left].max()) if left else 0
