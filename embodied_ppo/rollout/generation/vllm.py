"""Adapter of vLLM to ``Generator``, in the learner's process and on its GPU.

vLLM has other kernels than the learner, so that log-probabilities differ by rounding;
algorithm.off_policy_correction corrects for that. Each response has its own random generator,
seeded by (seed, sample). Its tokens still depend on the other responses of the batch through the
last bits of the logits.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
"""Random stream of ``noise`` for the seeds of responses."""


def sampling_arguments(sampling: Sampling, seed: int) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams.

    Every sampling parameter is set, so that no default of vLLM or of a model applies.
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
        "ignore_eos": True,  # stop_ids determine which tokens end a response
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(sampling.stop),
        "logprobs": 0,  # of the sampled token only
        "seed": seed,
    }


def response_seeds(seed: int, samples: Tensor) -> list[int]:
    """Return a seed of 53 bits for each of samples int64 [N], a function of (seed, sample)."""
    samples = samples.cpu()
    u = noise.uniform(torch.full_like(samples, seed), _STREAM, samples, 1).squeeze(1)
    return [int(x * 2**53) for x in u.tolist()]


class VllmEngine:
    """``Generator`` with a copy of the policy's weights, which ``update_weights`` refreshes.

    If ``sampling`` is not plain, log-probabilities are those of the filtered distribution.
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
        gpu_memory_utilization: float,
        **options: Any,
    ) -> None:
        """Start vLLM.

        Args:
            policy: The language model.
            path: Directory that the policy was loaded from.
            pad_id: Token id of padding.
            slots: Responses decoded together.
            width: Largest number of tokens of a prompt and its response; None: the model's limit.
            texts: Whether stop texts will be used; the directory must then contain a tokenizer.
            gpu_memory_utilization: Share of the GPU memory that vLLM allocates.
            options: Further options of ``vllm.LLM``.

        Raises:
            ConfigError: vLLM is not installed.
        """
        # Without a process of its own, vLLM can receive weights as tensors.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        try:
            from vllm import LLM, SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError as error:
            raise ConfigError(
                f"rollout.engine=vllm needs vLLM ({error}): pip install vllm (CUDA only), or use"
                " rollout.engine=builtin"
            ) from error
        self.policy, self.pad_id, self.texts, self.version = policy, pad_id, texts, 0
        self._params: Any = SamplingParams
        self._device = policy.model.lm_head.weight.device
        self._is_sleeping = self._is_stale = False
        dtype = policy.compute if policy.model.dtype == torch.float32 else policy.model.dtype
        defaults: dict[str, Any] = {
            "model": path,
            "dtype": str(dtype).removeprefix("torch."),
            "skip_tokenizer_init": not texts,
            "enable_sleep_mode": self._device.type == "cuda",
            "logprobs_mode": "processed_logprobs",
            "enable_prefix_caching": True,
            "gpu_memory_utilization": gpu_memory_utilization,
            "generation_config": "vllm",  # ignore the generation settings stored with the model
            "max_model_len": width,
            "max_num_seqs": slots,
            "seed": 0,
        }
        with _preserved_random_state():
            self.llm: Any = LLM(**(defaults | options))
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
        assert not self._is_sleeping
        if sampling.stop and not self.texts:
            raise ConfigError(
                "rollout.stop: stop texts need vLLM's tokenizer; VllmEngine(texts=True) loads it"
            )
        n, t = len(prompts), sampling.max_tokens
        seeds = response_seeds(seed, torch.arange(n) if samples is None else samples)
        requests = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts],
            [self._params(**sampling_arguments(sampling, s)) for s in seeds],
            use_tqdm=False,
        )
        token = torch.full((n, t), self.pad_id, dtype=torch.int64)
        log_prob, length = torch.zeros(n, t), torch.zeros(n, dtype=torch.int64)
        stopped = torch.zeros(n, dtype=torch.bool)
        for i, request in enumerate(requests):
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
        """Copy the policy's weights, during sleep not before ``wake``."""
        self.version = version
        self._is_stale = True
        if not self._is_sleeping:
            self._push()

    def sleep(self) -> None:
        """On a GPU, move the weights to host memory and discard the cache."""
        if self._device.type == "cuda" and not self._is_sleeping:
            self.llm.sleep(level=1)
            self._is_sleeping = True

    def wake(self) -> None:
        """Move the weights back, and copy the policy's if they changed during sleep."""
        if self._is_sleeping:
            self.llm.wake_up()
            self._is_sleeping = False
            if self._is_stale:
                self._push()

    @torch.no_grad()
    def _push(self) -> None:
        """Copy the policy's weights to vLLM and discard what it computed from older ones."""
        weights = [(name, x.detach()) for name, x in self.policy.model.state_dict().items()]
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if self.llm.reset_prefix_cache() is False:  # None where an engine does not report it
            raise RuntimeError("vLLM cannot discard its prefix cache while a request is running")
        self._is_stale = False


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch, which vLLM seeds."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
