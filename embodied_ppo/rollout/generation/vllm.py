"""vLLM behind the words of ``Generator``, in the learner's own process, on its GPU.

Its kernels are not the learner's: log-probabilities differ by rounding
(algorithm.off_policy_correction weighs that). Each response has a generator of its own, a function
of (seed, sample); which token it chooses still depends on logits, whose last bits vary with what
else is in the batch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_ppo.core import random as noise
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation.engine import Generation
from embodied_ppo.rollout.generation.sampling import Sampling

_STREAM = 1
"""Of ``noise``: where the seeds of responses come from."""


def sampling_arguments(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Of vLLM's SamplingParams.

    Every rule is named, so that no default of vLLM or a model decides anything.
    """
    return {
        "n": 1,
        "max_tokens": sampling.max_tokens,
        "min_tokens": 0,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_ids),
        "stop": list(sampling.stop),
        "ignore_eos": True,  # stop_ids say what ends a response
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop),
        "logprobs": 0,  # of the chosen token only
        "seed": seed,
    }


def response_seeds(seed: int, samples: Tensor) -> list[int]:
    """A seed for each of samples int64 [N], 53 bits; a function of (seed, sample)."""
    samples = samples.cpu()
    u = noise.uniform(torch.full_like(samples, seed), _STREAM, samples, 1).squeeze(1)
    return [int(x * 2**53) for x in u.tolist()]


class VllmEngine:
    """See ``Generator``. Holds a copy of the policy's weights, which ``update_weights`` renews.

    Where ``sampling`` is not plain, log-probabilities are those of the filtered distribution.
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        path: str,
        *,
        pad_id: int,
        slots: int = 256,
        width: int | None = None,
        texts: bool = False,
        memory: float = 0.4,
        **options: Any,
    ) -> None:
        """``path``: the directory that the policy was loaded from. ``slots``: responses decoded
        together; ``width``: tokens of the longest prompt and response together; None: what the
        model can. ``texts``: whether there will be stop texts; the directory must hold a tokenizer
        then. ``memory``: share of the GPU's that vLLM takes. ``options``: more of vLLM's own.
        Raises ConfigError where vLLM is missing."""
        os.environ.setdefault(
            "VLLM_ENABLE_V1_MULTIPROCESSING", "0"
        )  # weights are handed over in this process
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        try:
            from vllm import (
                LLM,
                SamplingParams,
            )  # pyright: ignore[reportAttributeAccessIssue]  (not this file)
        except ImportError as error:
            raise ConfigError(
                f"rollout.engine=vllm needs vLLM ({error}): pip install vllm (CUDA only), or use"
                " rollout.engine=builtin"
            ) from error
        self.policy, self.pad_id, self.texts, self.version = policy, pad_id, texts, 0
        self._params: Any = SamplingParams
        self._device = policy.model.lm_head.weight.device
        self._asleep = self._stale = False
        dtype = policy.compute if policy.model.dtype == torch.float32 else policy.model.dtype
        known: dict[str, Any] = {
            "model": path,
            "dtype": str(dtype).removeprefix("torch."),
            "skip_tokenizer_init": not texts,
            "enable_sleep_mode": self._device.type == "cuda",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "gpu_memory_utilization": memory,
            "generation_config": "vllm",  # a model's own settings do not leak in
            "max_model_len": width,
            "max_num_seqs": slots,
            "seed": 0,
        }
        with _kept_randomness():  # it seeds the whole process
            self.llm: Any = LLM(**(known | options))
        self._push()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        seed: int,
        samples: Tensor | None = None,
    ) -> Generation:
        """See ``Generator``. Raises ConfigError for stop texts without ``texts``."""
        assert not self._asleep
        if sampling.stop and not self.texts:
            raise ConfigError(
                "rollout.stop: stop texts need vLLM's tokenizer; VllmEngine(texts=True) loads it"
            )
        n, t = len(prompts), sampling.max_tokens
        seeds = response_seeds(seed, torch.arange(n) if samples is None else samples)
        found = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts],
            [self._params(**sampling_arguments(sampling, s)) for s in seeds],
            use_tqdm=False,
        )
        token = torch.full((n, t), self.pad_id, dtype=torch.int64)
        log_prob, length = torch.zeros(n, t), torch.zeros(n, dtype=torch.int64)
        stopped = torch.zeros(n, dtype=torch.bool)
        for i, request in enumerate(found):
            out = request.outputs[0]
            ids = list(out.token_ids)
            length[i] = len(ids)
            token[i, : len(ids)] = torch.tensor(ids)
            log_prob[i, : len(ids)] = torch.tensor(
                [at[k].logprob for k, at in zip(ids, out.logprobs, strict=True)]
            )
            stopped[i] = out.finish_reason == "stop"
        return Generation(*(x.to(self._device) for x in (token, length, stopped, log_prob)))

    def update_weights(self, version: int) -> None:
        """Copies the policy's weights; asleep, that waits for ``wake``."""
        self.version = version
        if self._asleep:
            self._stale = True
        else:
            self._push()

    def sleep(self) -> None:
        """The weights go to the host's memory and the cache is forgotten, on a GPU."""
        if self._device.type == "cuda" and not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self.llm.wake_up()
            self._asleep = False
            if self._stale:
                self._push()

    @torch.no_grad()
    def _push(self) -> None:
        weights = [(name, x.detach()) for name, x in self.policy.model.state_dict().items()]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps its prefix cache: a request is running")
        self._stale = False


class _kept_randomness:
    """Python's, numpy's and torch's global generators are afterwards as before."""

    def __enter__(self) -> None:
        self.fork = torch.random.fork_rng()
        self.fork.__enter__()
        self.state = random.getstate(), np.random.get_state()

    def __exit__(self, *error: Any) -> None:
        random.setstate(self.state[0])
        np.random.set_state(self.state[1])
        self.fork.__exit__(*error)
