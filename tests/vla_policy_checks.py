"""Random observations for vision-language-action policies, and a check of ``evaluate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.options.schema import ModelConfig


def random_observations(
    spec: Mapping[str, ArraySpec], rows: int, seed: int = 0
) -> dict[str, Tensor]:
    """Return random images and vectors; instructions are 0, 1, 2, 0, ..

    Args:
        spec: Observation; uint8 entries are images, int64 entries instructions.
        rows: Number of observations.
        seed: Seed of the draws.
    """
    generator = torch.Generator().manual_seed(seed)
    observations: dict[str, Tensor] = {}
    for name, array in spec.items():
        shape = (rows, *array.shape)
        if array.dtype == torch.int64:
            observations[name] = torch.arange(rows) % 3
        elif array.dtype == torch.uint8:
            observations[name] = torch.randint(
                0, 256, shape, generator=generator, dtype=torch.uint8
            )
        else:
            observations[name] = torch.randn(shape, generator=generator)
    return observations


def check_evaluate_reproduces_act(
    policy: Any,
    inputs: dict[str, Tensor],
    decision: Any,
    *,
    shape: tuple[int, int, int],
    sizes: Sequence[int],
    rtol: float = 0.0,
) -> None:
    """Compare ``evaluate`` in micro-batches, and ``value``, with the results of ``act``.

    Args:
        policy: A policy with ``evaluate`` and ``value``.
        inputs: Encoded observations.
        decision: The result of ``policy.act(inputs)``.
        shape: Observations, actions per chunk and dimensions of an action.
        sizes: Sizes of the micro-batches.
        rtol: Relative tolerance of log-probabilities and values, added to the absolute 1e-5.
    """
    rows, actions, dimensions = shape
    assert decision.log_prob.shape == shape and decision.log_prob.dtype == torch.float32
    assert decision.action.shape == (rows, actions * dimensions)
    for size in sizes:
        cuts = [slice(i, i + size) for i in range(0, rows, size)]
        parts = [
            policy.evaluate(
                tree.index(inputs, cut), decision.action[cut], tree.index(decision.replay, cut)
            )
            for cut in cuts
        ]
        log_prob, value, entropy = (
            torch.cat([getattr(part, name) for part in parts])
            for name in ("log_prob", "value", "entropy")
        )
        torch.testing.assert_close(log_prob, decision.log_prob, rtol=rtol, atol=1e-5)
        torch.testing.assert_close(value, decision.value, rtol=rtol, atol=1e-5)
        assert entropy.shape == shape and bool(entropy.isfinite().all())
    torch.testing.assert_close(policy.value(inputs), decision.value, rtol=rtol, atol=1e-5)


def perturb_new_parameters(policy: torch.nn.Module) -> None:
    """Add noise to new heads and adapters, whose last layers are 0 at first."""
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if name.startswith(("value_head", "scale")) or "lora_" in name:
                p.add_(0.2 * torch.randn_like(p))


def flow_policy(
    policy_class: Any,
    folder: Path,
    spec: Mapping[str, ArraySpec],
    sentences: Sequence[str],
    *,
    chunk: int,
    size: int,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Return the policy of a flow checkpoint for ``chunk`` actions of ``size`` numbers."""
    torch.manual_seed(seed)
    config = ModelConfig(policy="flow", checkpoint=str(folder), **options)
    box = Box((-1.0,) * (chunk * size), (1.0,) * (chunk * size))
    policy = policy_class(spec, box, config, chunk=chunk, sentences=sentences)
    perturb_new_parameters(policy)
    return policy
