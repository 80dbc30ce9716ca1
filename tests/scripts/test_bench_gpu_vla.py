"""The GPU benchmark of vision-language-action models, small and on the CPU: what it runs, counts
and predicts.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import bench_gpu_vla as bench
import benchmark
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from embodied_ppo.algorithms import losses
from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import tree
from embodied_ppo.core.types import ArraySpec, Batch, Box, Decision, Trajectory
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.placement.memory_estimate import AllocationCounter, estimate_update, fake_tensors

pytest.importorskip("transformers")
PARTS = ("oft", "pi0_frozen", "pi0_trained")
ROWS = 8
CONFIG = AlgorithmConfig(
    logprob_type="token_level", global_batch_size=2 * ROWS, micro_batch_size=ROWS
)


class Spaces:
    """What a policy asks of an environment."""

    device = torch.device("cpu")
    instructions = ("push the red block to the left", "reach for it")

    def __init__(self, side: int, chunk: int) -> None:
        self.obs_spec = {
            "state": ArraySpec((12,)),
            "instruction": ArraySpec((), torch.int64),
            "front": ArraySpec((3, side, side), torch.uint8),
        }
        self.action_spec = Box((-1.0,) * 4 * chunk, (1.0,) * 4 * chunk)


@cache
def policy_and_env(part: str) -> tuple[Any, Any]:
    work = bench.TINY[part]
    env = Spaces(work.side, work.chunk)
    return bench.make_policy(part, env, work, tiny=True), env


def observations(env: Any, rows: int) -> dict[str, Tensor]:
    return {name: torch.zeros(rows, *s.shape, dtype=s.dtype) for name, s in env.obs_spec.items()}


def trajectory(policy: Any, env: Any) -> Trajectory:
    """Two steps of ROWS environments."""
    obs = observations(env, 2 * ROWS)
    d = policy.act(policy.encode(obs), noise=policy.noise(2 * ROWS))
    obs, d = (tree.map(lambda x: x.unflatten(0, (2, ROWS)), x) for x in (obs, d))
    assert isinstance(d, Decision)
    zero, no = torch.zeros(2, ROWS), torch.zeros(2, ROWS, dtype=torch.bool)
    arrays: dict[str, Any] = {
        "next_value": zero,
        "reward": zero,
        "terminated": no,
        "truncated": no,
        "mask": ~no,
    }
    arrays["version"] = torch.zeros(2, ROWS, dtype=torch.int64)
    return Trajectory(
        obs=obs, action=d.action, log_prob=d.log_prob, value=d.value, replay=d.replay, **arrays
    )


def batch(policy: Any, t: Trajectory) -> Batch:
    """The first step."""
    flat, some = tree.index(t, 0), torch.zeros(ROWS)
    return Batch(
        inputs=policy.encode(flat.obs),
        action=flat.action,
        replay=flat.replay,
        log_prob=losses.reduce_log_prob(flat.log_prob, CONFIG.logprob_type, batch_dims=1),
        value=some,
        advantage=some,
        returns=some,
        mask=torch.ones(ROWS, dtype=torch.bool),
    )


# ------------------------------------------------------------------------------------------- memory
@pytest.mark.parametrize("fake", [False, True])
def test_allocation_counter_by_hand(fake: bool) -> None:
    """Count the bytes of x [4, 8] @ W [8, 16], relu, @ V [16, 2], sum in float32.

    Allocated are 4·16·4 = 256 B and relu's 256 B, of which the first is released after relu; then
    4·2·4 = 32 B and a sum of 4 B.
    """
    layers = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 2, bias=False))
    with fake_tensors(layers) if fake else nullcontext(list(layers.parameters())) as known:
        x = torch.zeros(4, 8)
        with AllocationCounter([*known, x]) as living:
            h = layers[0](x)
            assert (living.now, living.peak) == (256, 256)
            h = layers[1](h)
            assert (living.now, living.peak) == (256, 512)
            y = layers[2](h)
            total = y.sum()
            assert (living.now, living.peak) == (256 + 32 + 4, 512)
            del y
            assert living.now == 256 + 4
            total.backward()
            del h, total
    assert living.now == 8 * 16 * 4 + 16 * 2 * 4  # gradients


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_predicted_memory_equals_that_of_a_micro_batch(part: str) -> None:
    """Fake tensors predict the bytes of the same run with real tensors exactly."""
    policy, env = policy_and_env(part)
    learner = actor_critic_learner(policy, CONFIG, num_envs=ROWS, updates=2, seed=0)
    t = trajectory(policy, env)
    memory = estimate_update(policy, learner, env.device, t)
    assert all(p.grad is None for p in policy.parameters()), "the prediction leaves no gradients"
    gradient_bytes: list[int] = []

    def forget(p: Tensor) -> None:
        gradient_bytes.append(p.numel() * p.element_size())
        p.grad = None

    hooks = [
        p.register_post_accumulate_grad_hook(forget) for p in policy.parameters() if p.requires_grad
    ]
    b = batch(policy, t)
    total = losses.denominator(b.mask)
    with AllocationCounter([*policy.parameters(), *policy.buffers(), *tree.leaves(b)]) as living:
        loss, _ = learner.optimizer.loss(b, total, total, entropy_coef=0.0)
        loss.backward()
        del loss
    for hook in hooks:
        hook.remove()
    assert memory.activations == living.peak > 1e5
    assert memory.gradients == sum(gradient_bytes)
    assert memory.weights == sum(
        x.numel() * x.element_size() for x in (*policy.parameters(), *policy.buffers())
    )
    learner.update(t, update=0)
    moments = [
        x
        for state in learner.optimizer.adamw.state.values()
        for key, x in state.items()
        if key != "step"
    ]
    assert memory.optimiser == sum(x.numel() * x.element_size() for x in moments)
    prepared, _ = learner._prepare(t)
    observed = {x.untyped_storage()._cdata for x in tree.leaves(t.obs)}
    inputs = tree.leaves(prepared.inputs)
    encoded = [x for x in inputs if x.untyped_storage()._cdata not in observed]
    minibatch = tree.index(prepared, slice(0, CONFIG.global_batch_size))
    parts = (t, encoded, minibatch)
    assert memory.experience == sum(x.nbytes for x in tree.leaves(parts))
    assert memory.total == sum(vars(memory).values())


# --------------------------------------------------------------------------------------- operations
@pytest.mark.parametrize("part", PARTS)
def test_operations_are_those_that_torch_counts(part: str) -> None:
    """Attention written out, so that torch counts it. Of learning within 8 %: nobody asks for the
    gradient of what goes into the first layers, which is much of so small a model (of the published
    sizes 0.4 % and less).
    """
    policy, env = policy_and_env(part)
    t = trajectory(policy, env)
    ops = bench.operations(policy)
    obs = tree.index(t, 0).obs

    def counted(call: Any) -> float:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            call()
        return counter.get_total_flops() / ROWS

    assert counted(
        lambda: policy.act(policy.encode(obs), noise=policy.noise(ROWS))
    ) == pytest.approx(ops.act, rel=0.03)
    b = batch(policy, t)
    total = losses.denominator(b.mask)
    objective = actor_critic_learner(
        policy, CONFIG, num_envs=ROWS, updates=2, seed=0
    ).optimizer.loss
    learn = lambda: objective(b, total, total, entropy_coef=0.0)[0].backward()
    assert counted(learn) == pytest.approx(ops.learn, rel=0.08)
    policy.zero_grad()
    if not isinstance(policy, PI0) or policy.frozen:
        assert counted(lambda: policy.encode(obs)) == pytest.approx(ops.once, rel=0.03)
    else:
        assert ops.once == 0


# ------------------------------------------------------------------------------------------- copies
def test_offload_and_load_restore_tensors() -> None:
    """Copy through 10 numbers of host memory: parts of 10, 10, 3 | 7 + 0-dimensional 1 | .."""
    tensors = [
        torch.arange(23.0),
        torch.full((7,), -1.0),
        torch.tensor(5.0),
        torch.arange(12.0).view(3, 4),
    ]
    before = [x.clone() for x in tensors]
    sizes = [[len(part) for part in group] for group in bench.pieces(tensors, 10)]
    assert sizes == [[10], [10], [3, 7], [1], [10], [2]]
    offload_s, load_s = bench.offload_s(tensors, torch.device("cpu"), room=10)
    assert offload_s > 0 and load_s > 0
    for x, y in zip(tensors, before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


# --------------------------------------------------------------------------------------- the script
def run(part: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures and failures of a small part."""
    lines: list[dict[str, Any]] = []
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bench.run(benchmark.Report(lines.append), part, device, tiny=True)
    figures = {line["figure"]: line["value"] for line in lines if "figure" in line}
    return figures, {line["failure"]: line["message"] for line in lines if "failure" in line}


@pytest.mark.slow
@pytest.mark.parametrize("part", ["oft", "pi0_frozen"])
def test_small_part_has_all_figures(part: str) -> None:
    """Rendered Tabletop, our rollout and learner; without a GPU no memory is measured."""
    figures, failures = run(part)
    assert failures == {}
    prefixes = ("",) if part == "oft" else ("prefixes_kept/", "prefixes_computed/")
    for prefix in prefixes:
        assert figures[f"{prefix}decisions"] == 8
        for name in ("simulate_s", "act_s", "train_s", "train_tflop_per_s"):
            assert figures[f"{prefix}{name}"] > 0
        assert 0 <= figures[f"{prefix}log_prob_difference"] < 0.1
        assert figures[f"{prefix}predicted_gb"]["total"] > 1e-4
        assert (f"{prefix}peak_gb" in figures) == torch.cuda.is_available()
    for name in ("offload_to_host_s", "offload_to_device_s", "copy_to_second_weights_s"):
        assert figures[name] > 0


def test_failed_figure_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(bench, "estimate_update", broken)
    monkeypatch.setattr(bench, "offload_s", broken)
    monkeypatch.setattr(bench, "TINY", {"oft": replace(bench.TINY["oft"], horizon=1)})
    figures, failures = run("oft")
    message = "OutOfMemoryError: no room"
    assert failures == {"predicted_gb": message, "offload": message}
    assert figures["train_s"] > 0 and figures["copy_to_second_weights_s"] > 0
