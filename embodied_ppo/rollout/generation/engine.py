"""Decode engine with a key-value cache and continuous batching.

S slots are decoded together; each holds one response. The slots of finished responses are freed and
the active slots are compacted, so that no step computes unused rows. Waiting prompts are prefilled
when enough slots are free. With typical response lengths this gives 2.5 times the throughput of a
loop that waits for its longest row. On a GPU, tokens are decoded in rounds of
``cuda_graphs.ROUND_STEPS`` steps, each a CUDA graph; finished responses are detected between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from embodied_envs.base import random
from embodied_ppo.core.devices import upload
from embodied_ppo.policies.causal_lm import LanguagePolicy, precision
from embodied_ppo.policies.decoder import Decoder
from embodied_ppo.rollout.generation import cuda_graphs, decode_model
from embodied_ppo.rollout.generation.cuda_graphs import StaticDecode
from embodied_ppo.rollout.generation.decode_model import DecodeModel
from embodied_ppo.rollout.generation.sampling import Sampling, choose

# Share of free slots from which on prompts are prefilled, because a joint prefill costs less.
REFILL = 0.25
# Prompt tokens in one prefill, by device type: a CPU's fit its caches, others limit memory.
PREFILL_TOKENS = defaultdict(lambda: 1 << 15, cpu=1024)


@dataclass(frozen=True, slots=True)
class Generation:
    """Responses to N prompts, in their order.

    Attributes:
        token: int64 [N, T], padded with ``pad_id`` on the right.
        length: int64 [N], number of tokens, including the stop token.
        stopped: bool [N], whether a stop token or stop text ended the response; the others were
            truncated at max_tokens.
        log_prob: float32 [N, T], of each token at the sampling temperature, 0 where padded.
    """

    token: Tensor
    length: Tensor
    stopped: Tensor
    log_prob: Tensor


class Generator(Protocol):
    """Interface of decode engines: the built-in ``Engine`` and vLLM."""

    # Version of the policy's weights.
    version: int

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seed: int,
        samples: Tensor | None = None,
        begun: Generation | None = None,
        enough: Callable[[Sequence[int]], bool] | None = None,
    ) -> Generation:
        """Generate one response to each of N prompts.

        Args:
            prompts: Token ids of each prompt.
            sampling: Sampling parameters.
            seed: Seed of sampling.
            samples: int64 [N], None: 0, 1, ... The random numbers of row n depend on (seed,
                samples[n]) only, not on the other rows.
            begun: Tokens that the first responses have already; complete ones stay. None: none.
            enough: Whether generation may end while the responses of these rows are incomplete;
                None: it never ends before all are complete.
        """
        ...

    def update_weights(self, version: int) -> None:
        """Use the policy's current weights, which are of ``version``, and discard older results."""
        ...

    def sleep(self) -> None:
        """Free memory, which the next ``generate`` allocates again."""
        ...


class _Cache:
    """Keys and values of every layer, [S, groups, width, d].

    ``keys_and_values`` [S, 2·groups, width, d] holds both.
    """

    def __init__(self, policy: LanguagePolicy, slots: int, width: int) -> None:
        self.slots, self.width = slots, width
        decoder, weight = policy.decoder.module, policy.model.lm_head.weight
        self.dtype = policy.compute if weight.dtype == torch.float32 else weight.dtype
        shapes = [(slots, 2 * groups, width, decoder.head_dim) for groups in decoder.groups]
        self.keys_and_values = [
            torch.zeros(shape, dtype=self.dtype, device=weight.device) for shape in shapes
        ]
        halves = [x.chunk(2, dim=1) for x in self.keys_and_values]
        self.keys, self.values = zip(*halves, strict=True)


@dataclass(eq=False)
class Engine:
    """Built-in ``Generator``. It reads the policy's weights, or a copy in the type of products.

    Attributes:
        policy: The language model.
        slots: Rows decoded together, S.
        pad_id: Token id of padding.
        decode: Function from token ids to text, for stop texts.
        static: Whether steps have fixed shapes, which CUDA graphs need; None: on a GPU. The tokens
            are the same.
        copy_weights: Whether decoding with fixed shapes reads a copy of the weights, see
            ``DecodeModel``; None: where float32 weights are multiplied in another type. Models that
            ``DecodeModel`` does not support are decoded without a copy.
        progress: Callback (completed, total) after each step, in responses.
        version: Version of the weights.
    """

    policy: LanguagePolicy
    slots: int
    pad_id: int
    decode: Callable[[list[int]], str] | None = None
    static: bool | None = None
    copy_weights: bool | None = None
    progress: Callable[[int, int], None] = lambda completed, total: None
    version: int = field(default=0, init=False)
    _model: DecodeModel | None = field(default=None, init=False)
    _cache: _Cache | None = field(default=None, init=False)
    _rounds: StaticDecode | None = field(default=None, init=False)

    # ------------------------------------------------------------------------------------- protocol
    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seed: int,
        samples: Tensor | None = None,
        begun: Generation | None = None,
        enough: Callable[[Sequence[int]], bool] | None = None,
    ) -> Generation:
        """See ``Generator``. Adjacent equal prompts are prefilled once."""
        assert prompts and all(len(p) > 0 for p in prompts)
        device = self.policy.model.lm_head.weight.device
        n, longest = len(prompts), max(map(len, prompts))
        samples = torch.arange(n) if samples is None else samples
        seeds = torch.full((n,), seed, dtype=torch.int64)
        # One random number per response and token, drawn before decoding starts.
        u = random.uniform(seeds, 0, samples.cpu(), sampling.max_tokens).to(device)  # [N, T]
        slots, weight = min(self.slots, n), self.policy.model.lm_head.weight
        cache = self._allocate(slots, longest + sampling.max_tokens)
        state = _State(slots, sampling, self.pad_id, u, self._rounds, self.decode)
        if begun is not None:
            prompts = state.resume(begun, prompts)
        with nullcontext() if self._model else precision(weight, self.policy.compute):
            self._decode_all(cache, state, prompts, enough)
        t = sampling.max_tokens
        return Generation(state.token[:, :t], state.length, state.stopped, state.log_prob[:, :t])

    def update_weights(self, version: int) -> None:
        """Store the version. The next ``generate`` copies the shared weights, or reads them."""
        self.version = version

    def sleep(self) -> None:
        """Free the cache, the copy of the weights, and the CUDA graphs that read them."""
        self._cache = self._rounds = self._model = None

    # --------------------------------------------------------------------------------------- passes
    def _decode_all(
        self,
        cache: _Cache,
        state: _State,
        prompts: Sequence[Sequence[int]],
        enough: Callable[[Sequence[int]], bool] | None,
    ) -> None:
        """Generate all responses that are incomplete, or until there are enough.

        Args:
            prompts: Token ids of each prompt and of the beginning of its response.
            enough: See ``Generator``.
        """
        slots, waiting = len(state.row), state.incomplete()[::-1]
        while (waiting or state.active) and not (enough and enough([*waiting, *state.rows])):
            # Prefill when enough slots are free, when nothing else runs, or when the last prompts
            # fit.
            free = slots - state.active
            refill = max(1, int(REFILL * slots))
            if waiting and (free >= refill or not state.active or free >= len(waiting)):
                rows = [waiting.pop() for _ in range(min(free, len(waiting)))]
                new_prompts, first = [prompts[r] for r in rows], state.active
                logits = self._prefill(cache, state, new_prompts)
                state.begin(rows, new_prompts)
                state.sample(slice(first, state.active), logits)
            elif self._rounds is not None:
                self._round(self._rounds, state)
            else:
                state.sample(slice(0, state.active), self._step(cache, state))
            # Finished responses make room for waiting prompts.
            state.release_finished(cache)
            self.progress(len(prompts) - len(waiting) - state.active, len(prompts))

    def _allocate(self, slots: int, width: int) -> _Cache:
        """Return a cache of at least ``slots`` rows and ``width`` tokens."""
        static = self._is_static()
        # Fixed shapes: room for one more round, and a multiple of the bucket of keys.
        if static:
            unit = cuda_graphs.KEY_MULTIPLE
            width = -(-(width + cuda_graphs.ROUND_STEPS) // unit) * unit
        cache = self._cache
        if cache is None or cache.width < width or cache.slots < slots:
            # Free the old cache first: both together may exceed the memory.
            self._cache = self._rounds = cache = None
            # Too small, or none yet.
            self._cache = cache = _Cache(self.policy, slots, width)
        if not static:
            self._rounds = None
            return cache
        if self._model is None and self._copies_weights():
            self._model = DecodeModel(self.policy)
        if self._model is not None:
            # The weights may have changed in ways that leave no trace, such as a CUDA graph's.
            self._model.refresh()
        if self._rounds is None or not self._rounds.is_usable():
            self._rounds = StaticDecode(self.policy, cache.keys_and_values, self._model)
        return cache

    def _copies_weights(self) -> bool:
        """Return whether decode steps read a copy of the weights."""
        wanted = decode_model.converts(self.policy)
        wanted = wanted if self.copy_weights is None else self.copy_weights
        return wanted and decode_model.is_supported(self.policy)

    def _is_static(self) -> bool:
        """Return whether decode steps have fixed shapes."""
        if self.static is not None:
            return self.static
        kinds = getattr(self._decoder.base.rotary_emb, "rope_type", None)
        kinds = set(kinds.values() if isinstance(kinds, dict) else [kinds])
        # For these types transformers branches on the positions, which a CUDA graph cannot do, and
        # products of experts may read their sizes on the host.
        branches = {"dynamic", "longrope"} & kinds or self._decoder.has_experts
        return self.policy.model.lm_head.weight.is_cuda and not branches

    @property
    def _decoder(self) -> Decoder:
        return self.policy.decoder.module

    def _prefill(self, cache: _Cache, state: _State, prompts: list[Sequence[int]]) -> Tensor:
        """Write prompts into the slots after the active ones; return logits [M, V]."""
        # Equal neighbours (the group of a prompt) share one forward pass.
        unique = [(prompt, len(list(copies))) for prompt, copies in groupby(prompts)]
        per_pass = max(1, PREFILL_TOKENS[state.token.device.type] // max(map(len, prompts)))
        slot, logits = state.active, []
        # Prefill a bounded number of tokens at a time.
        for part in (unique[i : i + per_pass] for i in range(0, len(unique), per_pass)):
            copies = [count for _, count in part]
            rows = slice(slot, slot + sum(copies))
            logits.append(self._prefill_part(cache, rows, [prompt for prompt, _ in part], copies))
            slot = rows.stop
        return torch.cat(logits)

    def _prefill_part(
        self, cache: _Cache, rows: slice, prompts: list[Sequence[int]], copies: list[int]
    ) -> Tensor:
        """Write prompts, each ``copies`` times, into the slots ``rows``; return logits [M, V]."""
        device, width = cache.keys[0].device, max(map(len, prompts))
        # Padding on the right: with a causal mask no real token attends to it.
        ids = upload([[*p, *[self.pad_id] * (width - len(p))] for p in prompts], device)
        place = upload([[len(p) - 1] for p in prompts], device)
        # [M], index of each slot's prompt
        index = upload([i for i, count in enumerate(copies) for _ in range(count)], device)
        if self._model is not None:
            return self._prefill_copy(self._model, cache, rows, ids, place.squeeze(1), index)
        # Attention also writes keys and values of each copy to the cache.
        causal = self._decoder.causal(width, place, device)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.keys[i][rows, :, :width] = k[index].to(cache.dtype)
            cache.values[i][rows, :, :width] = v[index].to(cache.dtype)
            return causal(i, q, k, v)

        # Only the hidden state of each prompt's last token is needed.
        return self.policy.logits(self._decoder.shared(ids, place, attend)[:, 0])[index]

    def _prefill_copy(
        self,
        model: DecodeModel,
        cache: _Cache,
        rows: slice,
        ids: Tensor,
        last: Tensor,
        index: Tensor,
    ) -> Tensor:
        """Write prompts ids [B, L], whose last tokens are at ``last`` [B]; return logits [M, V]."""
        b, length = ids.shape
        causal, groups = self._decoder.causal(length, None, ids.device), model.groups

        def attend(i: int, q: Tensor, kv: Tensor) -> Tensor:
            kv = kv.unflatten(0, (b, length)).transpose(1, 2)  # [B, 2·groups, L, d]
            cache.keys_and_values[i][rows, :, :length] = kv[index]
            # Reorder query heads from (head of its group, group), and the result back.
            q = q.view(b, length, -1, groups, model.head_dim).permute(0, 3, 2, 1, 4)
            out = causal(i, q.flatten(1, 2), *kv.chunk(2, dim=1))
            return out.unflatten(1, (groups, -1)).permute(0, 3, 2, 1, 4).flatten(0, 1).flatten(1, 2)

        rotations = model.rotations(length).repeat(b, 1, 1)
        hidden = model.hidden(ids.flatten(), rotations, attend).unflatten(0, (b, length))
        return model.logits(hidden[torch.arange(b, device=ids.device), last])[index]

    def _step(self, cache: _Cache, state: _State) -> Tensor:
        """Run one decode step of all active slots; return logits [A, V]."""
        n = state.active
        cached, widest = state.cached[:n], state.widest
        width = widest + 1
        # If all slots have equally many tokens, a column of the cache is written, without an index.
        is_even = min(state.cached_lengths) == widest
        slot = slice(0, n) if is_even else torch.arange(n, device=cached.device)
        new = widest if is_even else cached
        # Layers with the same attention (full, or a sliding window) share one mask.
        places = torch.arange(width, device=cached.device)
        visible = {
            attention: attention.visible_keys(cached.unsqueeze(1), places).unsqueeze(1)
            for attention in dict.fromkeys(self._decoder.attention)
        }

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values, attention = cache.keys[i], cache.values[i], self._decoder.attention[i]
            keys[slot, :, new] = k[:, :, 0].to(cache.dtype)
            values[slot, :, new] = v[:, :, 0].to(cache.dtype)
            return attention(q, keys[:n, :, :width], values[:n, :, :width], visible[attention])

        # The newest token is the input; its keys and values enter the cache during the pass.
        hidden = self._decoder(state.last[:n].unsqueeze(1), cached.unsqueeze(1), attend=attend)
        state.cached[:n] += 1
        state.cached_lengths = [length + 1 for length in state.cached_lengths]
        return self.policy.logits(hidden[:, 0])

    def _round(self, rounds: StaticDecode, state: _State) -> None:
        """Decode up to ROUND_STEPS tokens in every active slot."""
        n, longest = state.active, state.sampling.max_tokens
        row = state.row[:n]
        t = state.length[row]
        # The last round stops when the shortest active response reaches max_tokens.
        steps = min(cuda_graphs.ROUND_STEPS, longest - min(state.lengths))
        # Tokens after the end of a response are dropped, so any random numbers serve for them.
        place = t.unsqueeze(1) + torch.arange(steps, device=t.device)
        rounds.u[:n, :steps] = state.u[row.unsqueeze(1), place.clamp(max=longest - 1)]
        token, log_prob = rounds.run(n, state.widest, steps, state.sampling)
        state.append(slice(0, n), token, log_prob)
        state.cached_lengths = [length + steps for length in state.cached_lengths]


class _State:
    """State of all responses. Slots 0 .. active-1 are in use; ``row`` maps slots to responses."""

    def __init__(
        self,
        slots: int,
        sampling: Sampling,
        pad_id: int,
        u: Tensor,
        rounds: StaticDecode | None,
        decode: Callable[[list[int]], str] | None,
    ) -> None:
        """Create the state of N responses with random numbers ``u`` [N, T].

        With ``rounds``, the tensors that CUDA graphs access are those of ``rounds``. ``decode``:
        see ``Engine``.
        """
        self.sampling, self.pad_id, self.u, self.decode = sampling, pad_id, u, decode
        n, device = len(u), u.device
        # A round may append tokens after the end of a response.
        width = sampling.max_tokens + (0 if rounds is None else cuda_graphs.ROUND_STEPS)
        self.token = torch.full((n, width), pad_id, dtype=torch.int64, device=device)
        self.log_prob = torch.zeros(n, width, device=device)
        self.length = torch.zeros(n, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(n, dtype=torch.bool, device=device)
        self.stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=device)
        self.active = 0
        # Response in each active slot, and its tokens. On the host, so that it need not wait.
        self.rows = list[int]()
        self.lengths = list[int]()
        self.begun = [0] * n  # tokens that each response had before
        self.cached_lengths = list[int]()  # tokens of each active slot in the cache
        self.row = torch.zeros(slots, dtype=torch.int64, device=device)
        # Newest token of each slot, not in the cache yet.
        self.last = torch.zeros_like(self.row) if rounds is None else rounds.last
        # Number of tokens of each slot in the cache.
        self.cached = torch.zeros_like(self.row) if rounds is None else rounds.cached
        self.finished = torch.zeros(slots, dtype=torch.bool, device=device)

    @property
    def widest(self) -> int:
        """Largest number of tokens of an active slot in the cache; 0 without active slots."""
        return max(self.cached_lengths, default=0)

    def resume(self, begun: Generation, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Start from the first responses' tokens; return what precedes each next token."""
        n, steps = begun.token.shape
        self.token[:n, :steps], self.log_prob[:n, :steps] = begun.token, begun.log_prob
        self.length[:n], self.stopped[:n] = begun.length, begun.stopped
        self.begun[:n] = begun.length.tolist()
        parts = zip(prompts, self.token.tolist(), self.begun, strict=True)
        return [[*prompt, *row[:length]] for prompt, row, length in parts]

    def incomplete(self) -> list[int]:
        """Return the responses that may go on."""
        complete = (self.stopped | (self.length >= self.sampling.max_tokens)).tolist()
        return [row for row, ended in enumerate(complete) if not ended]

    def begin(self, rows: list[int], prompts: list[Sequence[int]]) -> None:
        """Assign responses to the slots after the active ones, whose prompts are in the cache."""
        slots = slice(self.active, self.active + len(rows))
        lengths = [len(p) for p in prompts]
        # One transfer for rows and lengths.
        self.row[slots], self.cached[slots] = upload([rows, lengths], self.row.device)
        self.rows += rows
        self.lengths += [self.begun[row] for row in rows]
        self.cached_lengths += lengths
        self.active += len(rows)

    def sample(self, slots: slice, logits: Tensor) -> None:
        """Sample and append the next token of some slots from logits [M, V]."""
        row = self.row[slots]
        # The random number belongs to (response, place), wherever the response is decoded.
        token, log_prob = choose(logits, self.sampling, self.u[row, self.length[row]])
        self.last[slots] = token
        self.append(slots, token.unsqueeze(1), log_prob.unsqueeze(1))

    def append(self, slots: slice, token: Tensor, log_prob: Tensor) -> None:
        """Append K tokens [M, K], except those after the end of a response; update ``finished``."""
        row = self.row[slots].unsqueeze(1)
        t = self.length[row]  # [M, 1]
        place = t + torch.arange(token.shape[1], device=row.device)
        self.token[row, place] = token
        stops = torch.isin(token, self.stop_ids)
        if self.sampling.stop and self.decode is not None:
            rows, ends = row.flatten().tolist(), (place + 1).tolist()
            matches = [
                [self._ends_with_stop(self.decode, r, n) for n in ns]
                for r, ns in zip(rows, ends, strict=True)
            ]
            stops |= upload(matches, row.device)
        last = stops | (place + 1 >= self.sampling.max_tokens)
        is_kept = last.cumsum(1) - last.long() == 0  # [M, K], up to and including the first end
        self.token[row, place] = token.where(is_kept, self.pad_id)
        self.log_prob[row, place] = log_prob.where(is_kept, 0.0)
        row = row.squeeze(1)
        self.length[row] += is_kept.sum(1)
        self.stopped[row] = (stops & is_kept).any(1)
        self.finished[slots] = last.any(1)
        for slot in range(slots.start, slots.stop):  # longer than finished responses
            self.lengths[slot] += token.shape[1]

    def _ends_with_stop(self, decode: Callable[[list[int]], str], row: int, length: int) -> bool:
        """Return whether the last of ``length`` tokens completes a stop text."""
        # A token is at least one byte; 8 more cover characters that span tokens.
        window = max(len(stop.encode()) for stop in self.sampling.stop) + 8
        text = decode(self.token[row, max(0, length - window) : length].tolist())
        return any(stop in text for stop in self.sampling.stop)

    def release_finished(self, cache: _Cache) -> None:
        """Free the slots of finished responses; the last active slots move into their places."""
        finished: list[bool] = self.finished[: self.active].tolist()
        if not any(finished):
            return
        # Move active slots from the end into the places of finished ones.
        remaining = self.active - sum(finished)
        targets = [slot for slot in range(remaining) if finished[slot]]
        sources = [slot for slot in range(remaining, self.active) if not finished[slot]]
        if sources:
            source, target = upload([sources, targets], self.row.device)
            for x in (*cache.keys_and_values, self.row, self.last, self.cached):
                x[target] = x[source]
        for values in (self.rows, self.lengths, self.cached_lengths):
            for source, target in zip(sources, targets, strict=True):
                values[target] = values[source]
            del values[remaining:]
        self.finished[: self.active] = False
        self.active = remaining
