"""Code of the GPU path on a fake accelerator, and budgets of what a GPU would have to do.

``test_fake_accelerator.py`` runs this file in a process of its own, because torch cannot forget a
device. Results are compared with those of the CPU.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_accelerator import NAME, DeviceError, DeviceTensor, FakeAccelerator, to_device, to_host
from torch import Tensor

from embodied_envs.adapters import realistic_env
from embodied_envs.base import tree
from embodied_envs.physics import mujoco_warp
from embodied_envs.physics.mujoco_warp import WarpPhysics
from embodied_ppo.core import compile
from embodied_ppo.core.devices import upload
from embodied_ppo.core.types import Batch
from embodied_ppo.options.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.causal_lm import LanguageCritic
from embodied_ppo.ppo import losses
from embodied_ppo.ppo.critic import LocalCritic
from embodied_ppo.ppo.language_actor import language_ppo
from embodied_ppo.ppo.robot_actor import RobotLoss, robot_ppo
from embodied_ppo.rollout.generation.cuda_graphs import StaticDecode
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.history_env import HistoryEnv
from embodied_ppo.rollout.simulation import Rollout
from tests.envs.physics import test_mujoco_warp as warp
from tests.policies import test_actor_critic as actor_critic
from tests.policies import test_causal_lm as causal_lm
from tests.policies.vla import test_pi0 as pi0
from tests.policies.vla import test_pretrained as pretrained
from tests.policies.vla import test_trunk as small_vla
from tests.ppo import test_language_actor as language
from tests.ppo import test_robot_actor as robot

# Upper bounds. Lower a bound when the code needs less; raise it only for a stated reason.
BUDGETS = {
    # Operations with a kernel in one decode step of 3 layers, by sampler, without fusion.
    # ``test_decode_model`` has the bounds of fused kernels in a model of 24 layers.
    "decode step, plain": 139,
    "decode step, filters": 165,
    "decode step, greedy": 134,
    "decode step of a copy, plain": 65,
    "decode step of a copy, filters": 91,
    "decode step of a copy, greedy": 60,
    # Times that the host waits for the GPU.
    "decode round of 8 steps": 1,
    "copies from the host in a generation": 2,
    "control step of a rollout": 0,
    "end of a rollout": 8,
    "update of an actor-critic, before and after its minibatches": 7,
    "micro-batch": 0,
    "minibatch of a language model, cut by length": 1,
    "update of a language model, before and after its minibatches": 3,
}
# Where two runs on one GPU may differ, and operation -> why they do not with deterministic=true.
UNORDERED = {
    "elsewhere convolution_backward": "cuDNN selects algorithms without atomic additions",
    **dict.fromkeys(
        (
            "embodied_ppo/policies/decoder.py:Attention.__call__ attention",
            "embodied_ppo/policies/vla/pi0.py:PI0Trunk.embed attention",
            "embodied_ppo/policies/vla/prefix.py:block attention",
            "embodied_ppo/policies/vla/trunk.py:Block.forward attention",
        ),
        "flash attention adds in order, another kernel does not split keys, cuDNN's is not used",
    ),
}
found = set[str]()  # of ``UNORDERED``


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with FakeAccelerator() as accelerator:
        yield accelerator
    found.update(accelerator.unordered)
    assert not {*accelerator.unordered} - UNORDERED.keys()
    assert not accelerator.refused


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Check tensors on the device against the CPU's."""
    for x, y in zip(tree.leaves(actual), tree.leaves(expected), strict=True):
        assert x.device.type == NAME
        torch.testing.assert_close(to_host(x), y, rtol=tolerance, atol=tolerance)


def within(budget: str, count: int) -> bool:
    """Return whether a count is within its budget."""
    print(f"{budget}: {count} of {BUDGETS[budget]}")
    return count <= BUDGETS[budget]


# --------------------------------------------------------------------------------- the accelerator
def test_mixed_devices_are_refused_and_host_access_is_counted(accelerator: FakeAccelerator) -> None:
    x = torch.arange(6.0).to(NAME)
    assert sum(accelerator.uploads.values()) == 1 and x.device.type == NAME
    with pytest.raises(DeviceError, match="add: a tensor on the CPU"):
        _ = x + torch.ones(6)
    with pytest.raises(DeviceError, match="a generator on cpu for random numbers on npu"):
        torch.rand(3, generator=torch.Generator(), device=NAME)
    with pytest.raises(DeviceError, match="numpy"):
        x.numpy()
    reads: list[Callable[[], Any]] = [
        *(lambda: float(x.sum()), lambda: bool(x.any()), x.tolist, x.cpu, x.nonzero),
        *(lambda: x[x > 1], lambda: torch.zeros(6).copy_(x), lambda: torch.equal(x, x)),
    ]
    for i, read in enumerate(reads, start=1):
        read()
        assert sum(accelerator.host_reads.values()) == i
    uploads: list[Callable[[], Any]] = [
        *(lambda: torch.tensor([1.0], device=NAME), lambda: x.copy_(torch.ones(6))),
        lambda: x[torch.tensor([1, 2])],
    ]
    with accelerator.no_host_access():
        y = x * 2.0 + torch.tensor(1.0)  # a number of the host is an argument of the kernel
        for access in reads + uploads:
            with pytest.raises(DeviceError):
                access()
        z = y + upload([1.0, 2.0] * 3, accelerator.device)  # from pinned memory
    assert to_host(z).tolist() == [2, 5, 6, 9, 10, 13]
    assert sum(accelerator.uploads.values()) == 1


def test_operations_whose_order_matters_are_found(accelerator: FakeAccelerator) -> None:
    """An index is allowed to name each place once, and ``cumsum`` to have several rows."""
    torch.set_deterministic_debug_mode("default")
    x = torch.arange(6.0).view(2, 3).to(NAME).requires_grad_()
    for index in ([0, 1], [1, 1]):
        i = torch.tensor(index).to(NAME)
        for write in (x.index_add, x.index_copy):
            write(0, i, x)
        x.scatter_add(1, i.expand(2, 2), x)
        x.gather(1, i.expand(2, 2)).sum().backward()
        x.detach().clone()[i] = x.detach()
        x[i].sum().backward()  # adds in sorted order
        (x if index[0] == 0 else x[:1]).cumsum(1)
        assert accelerator.unordered.total() == 6 * index[0]
    accelerator.unordered.clear()


def test_operations_without_an_order_are_refused(accelerator: FakeAccelerator) -> None:
    x = torch.arange(12.0).view(1, 1, 3, 4).to(NAME).requires_grad_()
    pooled, padded = F.adaptive_avg_pool2d(x, 2), F.pad(x, (1, 1, 1, 1), mode="reflect")
    y = x.detach()
    calls: list[Callable[[], Any]] = [
        *(y.histc, lambda: y.cumsum(3), lambda: y.median(3), lambda: y.long().cumsum(3)),
        *(pooled.sum().backward, padded.sum().backward),
    ]
    for call in calls:
        call()
    backward = "_adaptive_avg_pool2d_backward", "reflection_pad2d_backward"
    names = ("histc", "cumsum", "median", *backward)
    assert accelerator.refused == {f"elsewhere {name}": 1 for name in names}
    accelerator.refused.clear()


# ----------------------------------------------------------------------------------------- policies
def run_policy(policy: Any, obs: Any, noise: Tensor) -> list[Any]:
    """Return the results of acting and of one minibatch, its gradients and the weights after it."""
    config = AlgorithmConfig(entropy_bonus=0.01)
    inputs = policy.encode(obs)
    with torch.no_grad():
        decision = policy.act(inputs, noise=noise)
        value = policy.value(inputs)
    batch = Batch(
        inputs=inputs,
        action=decision.action,
        replay=decision.replay,
        log_prob=losses.reduce_log_prob(decision.log_prob, config.logprob_type, batch_dims=1),
        value=value,
        advantage=torch.linspace(-1, 1, len(value), device=value.device),
        returns=value + 0.5,
        mask=torch.ones_like(value, dtype=torch.bool),
    )
    objective = RobotLoss(policy, config)
    objective.coefficients["entropy"] = 0.01
    loss, statistics = objective(batch)
    loss.backward()
    parameters = [p for p in policy.parameters() if p.grad is not None]
    gradients = [p.grad for p in parameters]
    # With a large epsilon, a step is proportional to the gradient.
    torch.optim.AdamW(parameters, lr=0.1, eps=1.0, fused=True).step()
    return [decision, value, statistics, gradients, parameters]


def check_policy(policy: Any, obs: Any, accelerator: FakeAccelerator) -> None:
    """Check that the device gives the CPU's numbers, after the first call without host access."""
    rows = len(next(tree.leaves(obs)))
    noise = policy.noise(rows, torch.Generator().manual_seed(1))
    on_device = to_device(copy.deepcopy(policy))
    obs_on_device = to_device(obs)
    expected = run_policy(policy, obs, noise)
    on_device.act(on_device.encode(obs_on_device))  # tables may move to the device at first use
    with accelerator.no_host_access():
        drawn = on_device.noise(rows, torch.Generator(device=NAME).manual_seed(1))
        actual = run_policy(on_device, obs_on_device, drawn)
    assert_close(actual, expected)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [*((kind, "vector") for kind in actor_critic.KINDS), (actor_critic.KINDS[0], "dict")],
)
def test_actor_critic(kind: Any, spec: str, accelerator: FakeAccelerator) -> None:
    actions, distribution = kind
    policy = actor_critic.make(spec, actions, distribution=distribution)
    check_policy(policy, actor_critic.observe(spec, 7), accelerator)


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"decode": "autoregressive"}, {"policy": "gaussian"}, {"freeze_trunk": True}),
        {"policy": "flow", "flow_chain": "sum", "flow_noise": "learned", "flow_steps": 2},
    ],
    ids=str,
)
def test_small_vla(options: dict[str, Any], accelerator: FakeAccelerator) -> None:
    check_policy(small_vla.make(**options), small_vla.observations(), accelerator)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.mark.parametrize("trunk", pi0.TRUNKS)
def test_pi0(folder: Path, trunk: str, accelerator: FakeAccelerator) -> None:
    path = folder / "pi0"
    if not path.exists():
        pi0.write_checkpoint(path)
    check_policy(pi0.make(path, flow_steps=2, **pi0.TRUNKS[trunk]), pi0.observations(), accelerator)


@pytest.mark.parametrize("decode", ["parallel", "autoregressive"])
def test_checkpoint_vla(folder: Path, decode: str, accelerator: FakeAccelerator) -> None:
    """OpenVLA with adapters; decoding all actions at once (parallel) is OpenVLA-OFT's."""
    path = folder / "openvla"
    if not path.exists():
        pretrained.write_checkpoint(path)
    policy = pretrained.policy_of(path, decode=decode, lora_rank=4)
    check_policy(policy, pretrained.observations(), accelerator)


# ------------------------------------------------------------------------------------------ updates
class Recorded(compile.CompileSchedule):
    """Runs programs eagerly under the rules of a CUDA graph's recording: without host access."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        super().__init__(0)
        self.accelerator, self.captures, self.calls = accelerator, True, 0
        self._program: Any = None

    def get(self, update: int, make_example: Any) -> Any:
        if self._program is None:
            self._program = make_example().program

        def function(tensors: list[Tensor]) -> list[Tensor]:
            self.calls += 1
            with self.accelerator.no_host_access():
                out = self._program(*tensors)
            return [out] if isinstance(out, Tensor) else list(out)

        return [function]


EPOCHS, MINIBATCHES = 2, 8
OPTIMIZER = "embodied_ppo/ppo/optimizer.py:MinibatchOptimizer"
each_schedule = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])


def check_update(device: Any, cpu: Any, t: Any, accelerator: FakeAccelerator) -> Counter[str]:
    """Check one update against the CPU's; return the host reads by place."""
    on_device = to_device(t)
    accelerator.reset()
    metrics = robot.numbers(device.update(on_device, update=0))
    reads = accelerator.host_reads.copy()
    expected = robot.numbers(cpu.update(t, update=0))
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert_close(list(device.policy.parameters()), list(cpu.policy.parameters()), 1e-5)
    return reads


@each_schedule
def test_update_of_actor_critic(graphs: bool, accelerator: FakeAccelerator) -> None:
    schedule = Recorded(accelerator) if graphs else None
    options = {"micro_batch_size": None if graphs else 8}
    cpu, device = robot.make(options), robot.make(options, device=NAME, compile_schedule=schedule)
    reads = check_update(device, cpu, robot.experience(cpu), accelerator)
    if schedule is not None:
        assert schedule.calls == MINIBATCHES
    else:
        # Each minibatch is checked for finite gradients before it changes a weight, and each epoch
        # reads which minibatches are masked.
        eager = f"{OPTIMIZER}.step", f"{OPTIMIZER}.minibatches"
        assert [reads.pop(place) for place in eager] == [MINIBATCHES, EPOCHS]
        statistics = reads.pop("embodied_ppo/ppo/minibatches.py:merge_statistics", 0)
        assert within("micro-batch", statistics // MINIBATCHES)
    assert within("update of an actor-critic, before and after its minibatches", reads.total()), (
        reads
    )


def language_learner(device: str) -> Any:
    """Return a learner with a critic and a reference on ``device``."""
    config = replace(language.BASE, use_kl_loss=True)
    policy = causal_lm.make().to(device)
    critic = LanguageCritic(copy.deepcopy(policy.model)).to(device)
    options: dict[str, Any] = {"length": language.T, "columns": 4, "updates": 10, "seed": 0}
    return language_ppo(
        policy, LocalCritic(critic, config, **options), config, num_sequences=language.N, **options
    )


def test_update_of_language_model(accelerator: FakeAccelerator) -> None:
    """Rows are cut by their lengths, which the host reads for each minibatch."""
    cpu, device = language_learner("cpu"), language_learner(NAME)
    reads = check_update(device, cpu, language.experience(cpu.policy), accelerator)
    minibatches = 2 * 2 * 2  # models x epochs x minibatches of an epoch
    passes = minibatches + 2  # one of the critic's values and one of the reference, too
    cuts = reads.pop("embodied_ppo/ppo/minibatches.py:cut_columns")
    assert within("minibatch of a language model, cut by length", cuts // passes)
    assert not cuts % passes
    assert reads.pop(f"{OPTIMIZER}.step") == minibatches
    assert reads.pop(f"{OPTIMIZER}.minibatches") == 2 * EPOCHS
    assert within("update of a language model, before and after its minibatches", reads.total()), (
        reads
    )


# --------------------------------------------------------------------------------------- generation
SAMPLERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filters": {"top_k": 5, "top_p": 0.9},
    "greedy": {"temperature": 0.0},
}
PROMPTS = [[5, 6, 7], [*range(8, 15)], [15], [5, 6, 7], [20, 21, 22, 23], [24, 25]]


@pytest.fixture
def decode_steps(accelerator: FakeAccelerator, monkeypatch) -> list[int]:
    """Forbid host access in decode steps; return a list of the operations of each."""
    step, counts = StaticDecode.step, list[int]()

    def recorded(*args: Any) -> None:
        if args[0].last.device.type != NAME:
            return step(*args)
        before = accelerator.operations.total()
        with accelerator.no_host_access():
            step(*args)
        counts.append(accelerator.operations.total() - before)

    monkeypatch.setattr(StaticDecode, "step", recorded)
    return counts


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("copied", [False, True])
def test_generation(
    sampler: str, copied: bool, accelerator: FakeAccelerator, decode_steps: list[int]
) -> None:
    """Slots are freed and filled again; with and without a copy of the weights."""
    sampling = Sampling(10, stop_ids=(2, *range(30, 40)), **SAMPLERS[sampler])
    cpu, device = causal_lm.make(), to_device(causal_lm.make())
    options: dict[str, Any] = {"slots": 4, "pad_id": 0, "static": True, "copy_weights": copied}
    expected = Engine(cpu, **options).generate(PROMPTS, sampling, seed=0)
    assert len(set(expected.length.tolist())) > 2
    actual = Engine(device, **options).generate(PROMPTS, sampling, seed=0)
    assert torch.equal(to_host(actual.token), expected.token)
    assert_close(actual.log_prob, expected.log_prob)
    name = f"decode step of a copy, {sampler}" if copied else f"decode step, {sampler}"
    assert within(name, max(decode_steps))


# --------------------------------------------------------------------------------------- simulation
class Reaching(warp.Swing):
    """A task with success."""

    id = "Reaching"

    def success(self, s: Any) -> Tensor:
        return s["qpos"][:, 0] > 0.2


def use_device_for_warp(accelerator: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the torch part of the Warp engine run on the fake accelerator, the kernels on a CPU.

    Control steps run under the rules of a CUDA graph's recording.
    """
    wp = mujoco_warp.wp
    to_torch, from_torch = wp.to_torch, wp.from_torch
    devices = torch.device(NAME, 0), wp.get_device("cpu")
    monkeypatch.setattr(mujoco_warp, "resolve_devices", lambda device: devices)
    monkeypatch.setattr(wp, "to_torch", lambda array: DeviceTensor(to_torch(array)))
    monkeypatch.setattr(wp, "from_torch", lambda x: from_torch(getattr(x, "host", x)))
    monkeypatch.setattr(WarpPhysics, "scope", lambda self: wp.ScopedDevice("cpu"))

    def capture(self: WarpPhysics, step: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def run(action: Tensor) -> Any:
            with accelerator.no_host_access():
                result = step(action)
                self.poll_overflow()
            return result

        return run

    monkeypatch.setattr(WarpPhysics, "capture", capture)


def make_rollout(env: Any, schedule: Recorded | None = None) -> Rollout:
    torch.manual_seed(0)
    config = ModelConfig(hidden=(8,), history=3, recurrent="gru", recurrent_size=4)
    policy = ActorCritic(env.obs_spec, env.action_spec, config)
    return Rollout(env, policy.to(env.device), seed=0, stagger=True, schedule=schedule)


def realistic(env: Any) -> HistoryEnv:
    """Return ``env`` with delays and errors of its sensors, and a history of 3 steps."""
    options = {"action_delay": [0, 1.5], "obs_delay": [0, 2], "obs_noise": 0.01, "obs_bias": 0.01}
    options |= {"obs_dropout": 0.1, "action_rate_limit": 0.5}
    seeds = list(range(env.num_envs))
    checked = realistic_env.read(options, env)
    delayed = realistic_env.RealisticEnv(env, checked, seeds=seeds, action_mapping="rescale")
    return HistoryEnv(delayed, 3)


def test_rollout(accelerator: FakeAccelerator, monkeypatch) -> None:
    """Control steps, masked resets, staggered first episodes, delays, memory, acting and values
    equal those on a CPU.
    """
    options: dict[str, Any] = {"max_episode_steps": 5, "randomize": True}
    options |= {"ranges": {"gravity": (0.9, 1.1)}, "id": f"{__name__}:Reaching"}
    columns = AlgorithmConfig(minibatch_unit="column", global_batch_size=2 * 12)
    cpu = make_rollout(realistic(warp.make(**options)))
    use_device_for_warp(accelerator, monkeypatch)
    device = make_rollout(realistic(warp.make(device=NAME, **options)), Recorded(accelerator))
    reads = []
    horizons = (5, 6, 12)  # all first episodes end in the first rollout
    for update, horizon in enumerate(horizons):
        accelerator.reset()
        t, metrics = device.collect(horizon, update=update, version=0)
        reads.append(accelerator.host_reads.copy())
        expected, numbers = cpu.collect(horizon, update=update, version=0)
        assert all(
            torch.equal(to_host(x), y) for x, y in zip(tree.leaves(t), tree.leaves(expected))
        )
        assert robot.numbers(metrics) == robot.numbers(numbers)
        if horizon == horizons[-1]:  # an update of a policy with memory
            for rollout, experience in ((device, t), (cpu, expected)):
                robot_ppo(rollout.policy, columns, num_envs=4, updates=1, seed=0).update(
                    experience, update=0
                )
            assert_close([*device.policy.parameters()], [*cpu.policy.parameters()])
    steps = horizons[2] - horizons[1]
    in_each_step = (reads[2].total() - reads[1].total()) // steps
    assert within("control step of a rollout", in_each_step), reads[2]
    assert within("end of a rollout", reads[2].total() - horizons[2] * in_each_step), reads[2]


def test_each_listed_operation_occurs() -> None:
    """Runs last: the fixture ``accelerator`` collects what the tests above call."""
    assert found == UNORDERED.keys()
