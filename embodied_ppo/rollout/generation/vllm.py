"""Adapter of vLLM to ``Generator``, in the learner's process and on its GPU.

vLLM has other kernels than the learner, so that log-probabilities differ by rounding;
algorithm.off_policy_correction corrects for that. Each response has its own random generator,
seeded by (seed, sample). Its tokens still depend on the other responses of the batch through the
last bits of the logits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import random
from embodied_envs.base.errors import ConfigError
from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.policies.lora import merged_state
from embodied_ppo.rollout.generation.engine import Generation
from embodied_ppo.rollout.generation.sampling import Sampling

_STREAM = 1  # random stream of ``random.uniform`` for the seeds of responses


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
        slots: int,
        width: int,
        texts: bool,
        gpu_memory_utilization: float,
        **options: Any,
    ) -> None:
        """Start vLLM.

        Args:
            policy: The language model.
            path: Directory that the policy was loaded from.
            pad_id: Token id of padding.
            slots: Responses decoded together.
            width: Largest number of tokens of a prompt and its response.
            texts: Whether stop texts will be used; the directory must then contain a tokenizer.
            gpu_memory_utilization: Share of the GPU memory that vLLM allocates.
            options: Further options of ``vllm.LLM``.

        Raises:
            ConfigError: vLLM is not installed, or the model has experts.
        """
        if policy.decoder.module.has_experts:
            # vLLM reads the weights of each expert by names that transformers' model lacks.
            fact = f"vLLM cannot take the experts of {type(policy.model).__name__} in memory"
            raise ConfigError(f"write rollout.engine=builtin: {fact}")
        # Without a process of its own, vLLM can receive weights as tensors.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        try:
            from vllm import LLM, SamplingParams  # pyright: ignore[reportAttributeAccessIssue]
        except ImportError as error:
            hint = f"rollout.engine=vllm needs vLLM ({error}): pip install vllm (CUDA only)"
            raise ConfigError(f"{hint}, or use rollout.engine=builtin") from error
        self.policy, self.pad_id, self.version = policy, pad_id, 0
        self._params: Any = SamplingParams
        self._device = policy.model.lm_head.weight.device
        self._is_sleeping = False
        # vLLM computes in the type in which the learner multiplies.
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
        with torch.random.fork_rng():  # vLLM seeds the global generator
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
        begun: Generation | None = None,
        enough: Callable[[Sequence[int]], bool] | None = None,
    ) -> Generation:
        """See ``Generator``; the options of a run never ask for ``begun`` or ``enough``."""
        assert begun is None and enough is None
        if self._is_sleeping:
            self.llm.wake_up()
            self._is_sleeping = False
            self._push()
        n, t = len(prompts), sampling.max_tokens
        # One seed of 53 bits per response, a function of (seed, sample).
        samples = torch.arange(n) if samples is None else samples.cpu()
        u = random.uniform(torch.full_like(samples, seed), _STREAM, samples, 1).squeeze(1)
        options: dict[str, Any] = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_ids),
            "stop": list(sampling.stop),
            "ignore_eos": True,  # stop_ids determine which tokens end a response
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "detokenize": bool(sampling.stop),
            "logprobs": 0,  # of the sampled token only
        }
        ids = [{"prompt_token_ids": list(p)} for p in prompts]
        parameters = [self._params(**options, seed=int(x * 2**53)) for x in u.tolist()]
        requests = self.llm.generate(ids, parameters, use_tqdm=False)
        token = torch.full((n, t), self.pad_id, dtype=torch.int64)
        log_prob, length = torch.zeros(n, t), torch.zeros(n, dtype=torch.int64)
        stopped = torch.zeros(n, dtype=torch.bool)
        for i, request in enumerate(requests):
            # Copy tokens and their log-probabilities into padded tensors.
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
        """Copy the policy's weights, during sleep not before the next ``generate``."""
        self.version = version
        if not self._is_sleeping:
            self._push()

    def sleep(self) -> None:
        """On a GPU, move the weights to host memory and discard the cache."""
        if self._device.type == "cuda" and not self._is_sleeping:
            self.llm.sleep(level=1)
            self._is_sleeping = True

    @torch.no_grad()
    def _push(self) -> None:
        """Copy the policy's weights to vLLM and discard what it computed from older ones."""
        # Same process and device: tensors are passed, not files.
        weights = merged_state(self.policy.model)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self.llm.reset_prefix_cache() is False:  # None where an engine does not report it
            raise RuntimeError("vLLM cannot discard its prefix cache while a request is running")
