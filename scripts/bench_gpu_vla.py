"""Measure vision-language-action models of published size on one GPU.

    python scripts/bench_gpu_vla.py [--tiny] [--part NAME]

Our rollout and learner run PPO updates on Tabletop with 32 simulators (images of 224 x 224; MuJoCo
and OpenGL on the host) and random weights:

    oft           OpenVLA-OFT's shape, 7.5 G, chunks of 8 actions in parallel, adapters of rank 32
    pi0_frozen    π0's shape, 3.2 G, its expert trained; prefixes cached over the epochs, and
                  recomputed
    pi0_trained   π0, all weights trained

Each part runs in its own process and prints a table and one line of JSON. Both name every value
that could not be measured; the other values are measured nevertheless. Speed and memory do not
depend on the values of the weights. Success is not measured. ``--tiny`` uses small models and needs
no GPU.

Memory is predicted from shapes before the first update: parameters, their gradients and AdamW's
moments, trajectory and prefixes, and the peak of a micro-batch, found by a forward and backward
pass on tensors without storage. Operations are those of the model's mathematics, 2 for each weight
and token; recomputation does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn

import embodied_envs
from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import Box, Policy, Step, Trajectory, VectorEnv
from embodied_ppo.models.vla import openvla, pi0_files
from embodied_ppo.models.vla.openvla import OpenVLABody, OpenVLAConfig, TowerConfig
from embodied_ppo.models.vla.openvla_files import ActionTokens, write_config
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pretrained import CheckpointVLA, OpenVLA
from embodied_ppo.models.vla.trunk import word_ids
from embodied_ppo.placement.memory_estimate import Memory, nbytes, predicted
from embodied_ppo.rollout.simulation import Rollout

T = TypeVar("T")
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Part of a device's name -> dense bfloat16 products, operations per second (data sheets)."""
MEASURED = {"H200": 788e12}
"""Measured with a product of random 8192 x 8192 matrices (2026-10), operations per second."""
PARTS = ("oft", "pi0_frozen", "pi0_trained")
DEADLINE_S = 155
"""Time limit of a part."""
STAGE = 1 << 28
"""Size of the host buffer for offloading: float32 numbers of 1 GiB."""


# ------------------------------------------------------------------------------------------- shapes
@dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of an update.

    Attributes:
        horizon: Decisions of each environment.
        epochs: See ``AlgorithmConfig.update_epoch``.
        minibatch: See ``AlgorithmConfig.global_batch_size``.
        micro: See ``AlgorithmConfig.micro_batch_size``.
        chunk: Actions of a decision.
        side: Side of an image, in pixels.
        num_envs: Number of environments.
        recompute: Whether activations are recomputed in the backward pass.
    """

    horizon: int
    epochs: int
    minibatch: int
    micro: int
    chunk: int
    side: int = 224
    num_envs: int = 32
    recompute: bool = False


WORK = {
    "oft": Work(horizon=8, epochs=1, minibatch=128, micro=32, chunk=8),
    "pi0_frozen": Work(horizon=16, epochs=4, minibatch=256, micro=128, chunk=8),
    "pi0_trained": Work(horizon=8, epochs=1, minibatch=128, micro=32, chunk=8),
}
TINY = {
    "oft": Work(horizon=2, epochs=1, minibatch=4, micro=2, chunk=2, side=28, num_envs=4),
    "pi0_frozen": Work(horizon=2, epochs=2, minibatch=4, micro=2, chunk=2, side=16, num_envs=4),
    "pi0_trained": Work(horizon=2, epochs=1, minibatch=4, micro=2, chunk=2, side=16, num_envs=4),
}


def openvla_config(actions: int, *, tiny: bool) -> OpenVLAConfig:
    """Return the configuration for ``actions`` action dimensions."""
    stats = {"q01": [-1.0] * actions, "q99": [1.0] * actions}
    norms: dict[str, Any] = {"norm_stats": {"bench": {"action": stats}}}
    text: dict[str, Any] = {
        "vocab_size": 32064,
        "pad_token_id": 32000,
        "max_position_embeddings": 2048,
    }
    if not tiny:
        return OpenVLAConfig(text=text, **norms)
    text |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    dino = TowerConfig(hidden_size=16, layers=3, heads=2, intermediate_size=64, patch_size=7)
    siglip = TowerConfig(hidden_size=24, layers=4, heads=3, intermediate_size=40, patch_size=7)
    return OpenVLAConfig(text=text, dino=dino, siglip=siglip, image_size=28, **norms)


def pi0_config(*, tiny: bool) -> Any:
    """Return transformers' PI0Config."""
    from transformers import PI0Config

    if not tiny:
        return PI0Config(**pi0_files.lerobot_fields({}))
    gemma = {
        "model_type": "gemma",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    }
    gemma |= {"head_dim": 8, "vocab_size": 300}
    vision = pi0_files.SIGLIP | {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8}
    vision |= {
        "image_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "projection_dim": 64,
    }
    vlm = {
        "model_type": "paligemma",
        "projection_dim": 64,
        "image_token_id": 300,
        "vision_config": vision,
    }
    vlm["text_config"] = gemma | {"hidden_size": 64, "intermediate_size": 128}
    expert = gemma | {"hidden_size": 32, "intermediate_size": 64}
    return PI0Config(
        vlm_config=vlm, dit_config=expert, chunk_size=6, max_state_dim=32, max_action_dim=8
    )


def tokenize(sentence: str) -> list[int]:
    """Return the begin token and one token per word, all below 258, as every vocabulary needs."""
    return [openvla.BOS, *(2 + i for i in word_ids(sentence, 256))]


class NewOpenVLA(CheckpointVLA):
    """OpenVLA with new weights, created on the device, instead of weights of a directory."""

    def __init__(
        self, body: OpenVLAConfig, device: torch.device, *args: Any, **options: Any
    ) -> None:
        self._new = (body, device)
        super().__init__(*args, **options)

    def _open(self, config: ModelConfig) -> Any:
        sizes, device = self._new
        self.actions = ActionTokens.from_config(sizes)
        body = OpenVLABody(sizes, dtype=self.dtype, device=device)
        body.recompute = config.gradient_checkpointing
        return OpenVLA(body, tokenize, actions=self.chunk * self.size)


def make_policy(part: str, env: VectorEnv, work: Work, *, tiny: bool) -> CheckpointVLA | PI0:
    """Return the policy of a part on the environment's device."""
    torch.manual_seed(0)
    box = env.action_spec
    assert isinstance(box, Box)
    sentences: tuple[str, ...] = getattr(env, "instructions", ())
    common: dict[str, Any] = {"dtype": "bfloat16", "gradient_checkpointing": work.recompute}
    if part != "oft":
        from transformers import PI0ForConditionalGeneration

        with torch.device(env.device):
            model = PI0ForConditionalGeneration(pi0_config(tiny=tiny))
        config = ModelConfig(policy="flow", freeze_trunk=part == "pi0_frozen", **common)
        published = pi0_files.Published(model, tokenize)
        policy = PI0(env.obs_spec, box, config, published, chunk=work.chunk, sentences=sentences)
        return policy.to(env.device)
    sizes = openvla_config(box.size // work.chunk, tiny=tiny)
    with tempfile.TemporaryDirectory() as folder:  # adapters need a directory
        (Path(folder) / "config.json").write_text(json.dumps(write_config(sizes)))
        config = ModelConfig(
            policy="token", checkpoint=folder, lora_rank=4 if tiny else 32, **common
        )
        policy = NewOpenVLA(
            sizes, env.device, env.obs_spec, box, config, chunk=work.chunk, sentences=sentences
        )
    return policy.to(env.device)


# --------------------------------------------------------------------------------------- operations
def linear(modules: Iterable[nn.Module], *, adapters: bool = False) -> int:
    """Return the number of weights of linear layers: of adapters, or of all others."""
    return sum(
        layer.weight.numel()
        for module in modules
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and ("lora_" in name) == adapters
    )


@dataclass(frozen=True)
class Operations:
    """Operations per decision.

    Attributes:
        act: Acting.
        learn: One training pass.
        once: The frozen trunk, if its outputs are cached.
    """

    act: float
    learn: float
    once: float = 0.0


def openvla_operations(policy: CheckpointVLA) -> Operations:
    """Return the operations for rows of S tokens, Q of which predict.

    Forward: 2 weights S + 4 S² D in each layer; the last layer has Q queries. Backward: the same
    for the gradients of activations, and again for those of the trained weights, the adapters.
    """
    body: OpenVLABody = policy.body.body
    config, llama = body.config, body.language_model.model
    visual, q = config.grid**2 * len(policy.trunk.encoder.images), policy.chunk * policy.size
    s = visual + policy.trunk.table.ids.shape[1] + q + 1
    cameras = len(policy.trunk.encoder.images)
    vision_ops = 0.0
    for layers, sizes, patches, extra in (
        (body.dino.encoder.layer[:-1], config.dino, body.dino.embeddings, 1 + config.registers),
        (body.siglip.encoder.layers[:-1], config.siglip, body.siglip.embeddings, 0),
    ):
        n = config.grid**2 + extra
        linear_ops = 2 * linear([patches]) * config.grid**2 + 2 * linear(layers) * n
        vision_ops += cameras * (linear_ops + 4 * n * n * sizes.hidden_size * len(layers))
    vision_ops += 2 * linear([body.projector]) * visual
    last = llama.layers[-1]
    keys, width = [last.self_attn.k_proj, last.self_attn.v_proj], policy.body.hidden_size

    def rows(adapters: bool) -> float:
        key_weights = linear(keys, adapters=adapters)
        first = linear(llama.layers[:-1], adapters=adapters) + key_weights
        return 2.0 * (first * s + (linear([last], adapters=adapters) - key_weights) * q)

    attention = 4.0 * width * ((len(llama.layers) - 1) * s * s + q * s)
    head = 2.0 * policy.bins * width * q
    value = 2.0 * linear([policy.value_head])
    base, adapters = rows(False), rows(True)
    act = vision_ops + base + adapters + attention + head + value
    learn = vision_ops + 2 * (base + head) + 3 * (adapters + attention + value)
    return Operations(act, learn)


def pi0_operations(policy: PI0) -> Operations:
    """Return the operations for P tokens of the prefix and H + 1 of the expert.

    The expert's tokens attend to all tokens. Training runs one step of the expert.
    """
    vlm: Any = policy.trunk.vlm
    expert: Any = policy.expert
    text, vision = vlm.config.text_config, vlm.config.vision_config
    cameras = len(policy.trunk.encoder.images)
    patches = (policy.trunk.side // vision.patch_size) ** 2
    tower = vlm.vision_tower
    vision_ops = 2 * linear([tower, vlm.multi_modal_projector]) * patches * cameras
    vision_ops += 4 * patches**2 * vision.hidden_size * vision.num_hidden_layers * cameras
    p = patches * cameras + policy.trunk.table.shape[1]
    layers, width = vlm.language_model.layers, text.num_attention_heads * text.head_dim
    text_ops = 2 * linear(layers) * p + 4 * p * p * width * len(layers)
    # The outputs of the prefix serve the value, whose gradient does not reach the features: in the
    # last layer only keys and values are trained.
    a = layers[-1].self_attn
    idle = 2 * (linear([layers[-1]]) - linear([a.k_proj, a.v_proj])) * p + 4 * p * p * width
    h = policy.horizon
    embed: Any = policy.embed
    step = 2 * (
        linear(expert.layers) * (h + 1) + linear([embed]) * h + linear([policy.velocity]) * h
    )
    step -= 2 * linear([embed.state_proj]) * (h - 1)
    step += 4 * (h + 1) * (p + h + 1) * width * len(layers)
    value = 2.0 * linear([policy.value_head])
    prefix = float(vision_ops + text_ops)
    act = prefix + policy.steps * step + value
    if not policy.frozen:
        return Operations(act, 3 * (prefix + step + value) - 2 * idle)
    return Operations(act, 3.0 * (step + value), prefix)


def operations(policy: CheckpointVLA | PI0) -> Operations:
    """Return the operations of a policy."""
    return pi0_operations(policy) if isinstance(policy, PI0) else openvla_operations(policy)


# ------------------------------------------------------------------------------------------ measure
def wait(device: torch.device) -> None:
    """Wait for the work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the wall time of a call, including the work of the device."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


class TimedEnv:
    """``VectorEnv`` that times its steps, without earlier work of the GPU."""

    def __init__(self, env: VectorEnv) -> None:
        self.env, self.spent = env, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: Tensor) -> Step:
        results: list[Step] = []
        self.spent += seconds(lambda: results.append(self.env.step(action)), self.env.device)
        return results[0]


def pieces(tensors: Iterable[Tensor], room: int) -> Iterator[list[Tensor]]:
    """Yield flat parts of contiguous tensors, in groups of at most ``room`` numbers."""
    group: list[Tensor] = []
    for x in tensors:
        for part in x.detach().view(-1).split(room):
            if group and sum(y.numel() for y in group) + part.numel() > room:
                yield group
                group = []
            group.append(part)
    if group:
        yield group


def offload_s(
    tensors: Sequence[Tensor], device: torch.device, room: int = STAGE
) -> tuple[float, float]:
    """Return the seconds to copy float32 tensors to pinned host memory, and back.

    The tensors go through a buffer of ``room`` numbers, so that the host need not hold all of them.
    They are set to zero between the two copies.
    """
    stage = torch.empty(
        min(room, sum(x.numel() for x in tensors)), pin_memory=device.type == "cuda"
    )
    to_host = to_device = 0.0
    for group in pieces(tensors, room):
        host = stage[: sum(x.numel() for x in group)].split([x.numel() for x in group])

        def move(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
            for a, b in zip(to, source, strict=True):
                a.copy_(b, non_blocking=True)

        to_host += seconds(lambda g=group, h=host: move(h, g), device)
        for x in group:
            x.zero_()
        to_device += seconds(lambda g=group, h=host: move(g, h), device)
    return to_host, to_device


def copy_s(policy: nn.Module, device: torch.device) -> float:
    """Return the time of the second update of a bfloat16 copy of the trained weights."""
    trained = [p.detach() for p in policy.parameters() if p.requires_grad]
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in trained]
    copy: Any = vars(torch)["_foreach_copy_"]
    times = [seconds(lambda: copy(copies, trained), device) for _ in range(2)]
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(copies, trained, strict=True))
    return times[1]


@torch.no_grad()
def difference(policy: Policy, learner: Learner, t: Trajectory) -> float:
    """Return the largest difference of log-probabilities between acting and learning."""
    log_prob = learner.actor.log_prob(learner.actor.encode(t), t)
    return float((log_prob - t.log_prob).abs().max())


def attempt(call: Callable[[], T], failures: dict[str, str], what: str) -> T | None:
    """Return the result of a call; if it fails, add the cause to ``failures`` and return None."""
    try:
        return call()
    except Exception as error:  # one failure must not end a measurement of ten minutes
        failures[what] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return None


GPU = torch.device("cuda", 0)
"""The GPU that is measured."""


def named(table: dict[str, float]) -> float | None:
    """Return the table's entry for this GPU, None if it has none."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(GPU)
    return next((x for key, x in table.items() if key in name), None)


@dataclass(frozen=True)
class Measured:
    """Measurements of the second update.

    Attributes:
        decisions: Number of decisions.
        simulate: Seconds of simulation and rendering.
        act: Seconds of the policy.
        train: Seconds of the learner.
        tflops: Operations of training per second, 1e12.
        difference: See ``difference``.
        predicted: Predicted memory.
        peak: Largest number of bytes during an update, None without a GPU.
    """

    decisions: int
    simulate: float
    act: float
    train: float
    tflops: float
    difference: float | None
    predicted: Memory | None
    peak: int | None


def measure(
    work: Work,
    env: VectorEnv,
    policy: CheckpointVLA | PI0,
    learner: Learner,
    failures: dict[str, str],
) -> Measured:
    """Run two updates."""
    device = env.device
    timed: Any = TimedEnv(env)
    rollout = Rollout(timed, policy, seed=0, gamma=learner.config.gamma)
    trajectories: list[Trajectory] = []
    peak = 0
    collect = train = 0.0
    memory: Memory | None = None
    gap: float | None = None
    for update in range(2):
        trajectories.clear()
        timed.spent = 0.0
        collect = seconds(
            lambda u=update: trajectories.append(
                rollout.collect(work.horizon, update=u, version=u)[0]
            ),
            device,
        )
        if update == 0:
            memory = attempt(
                lambda: predicted(policy, learner, env.device, trajectories[0]),
                failures,
                "predicted",
            )
        gap = attempt(lambda: difference(policy, learner, trajectories[0]), failures, "difference")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        train = seconds(lambda u=update: learner.update(trajectories[0], update=u), device)
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated(device))
    rows, ops = trajectories[0].mask.numel(), operations(policy)
    is_cached = isinstance(policy, PI0) and policy.frozen and rows <= policy.max_kept_rows()
    ops_done = rows * (work.epochs * ops.learn + ops.once * (1 if is_cached else work.epochs))
    return Measured(
        rows,
        timed.spent,
        collect - timed.spent,
        train,
        ops_done / train / 1e12,
        gap,
        memory,
        peak or None,
    )


def run(part: str, *, tiny: bool) -> dict[str, Any]:
    """Measure a part, print its table and return the values of its line of JSON."""
    device = GPU if torch.cuda.is_available() else torch.device("cpu")
    work = (TINY if tiny else WORK)[part]
    env = embodied_envs.make(
        "Tabletop",
        num_envs=work.num_envs,
        seeds=env_seeds(0, 0, work.num_envs),
        simulator="mujoco",
        cameras=("front",),
        image_size=(work.side, work.side),
        action_chunk=work.chunk,
        kwargs={"obs": "language"},
        device=device,
    )
    policies: list[CheckpointVLA | PI0] = []
    build = seconds(lambda: policies.append(make_policy(part, env, work, tiny=tiny)), device)
    policy = policies[0]
    config = AlgorithmConfig(
        horizon=work.horizon,
        update_epoch=work.epochs,
        global_batch_size=work.minibatch,
        micro_batch_size=work.micro,
        lr=5e-6,
        value_lr=1e-4,
        max_grad_norm=1.0,
        logprob_type="token_level",
        gamma=0.998,
    )
    learner = actor_critic_learner(policy, config, num_envs=work.num_envs, updates=8, seed=0)
    result: dict[str, Any] = {
        "part": part,
        "tiny": tiny,
        "torch": torch.__version__,
        "build_s": build,
    }
    result |= {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "work": asdict(work),
    }
    result["parameters"] = sum(p.numel() for p in policy.parameters())
    result["trained"] = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    failures: dict[str, str] = {}
    limits: dict[str, float | None] = {"": None}
    if part == "pi0_frozen":
        limits = {"prefixes kept": None, "prefixes computed anew": 0.0}
    result["modes"] = {}
    for mode, memory_gb in limits.items():
        if isinstance(policy, PI0):
            policy.memory_gb = memory_gb
        x = measure(work, env, policy, learner, failures)
        result["modes"][mode] = entry = asdict(x)
        if x.predicted is not None:
            entry["predicted_total"] = x.predicted.total
        print_table(part, mode, result, x)
    env.close()
    parameters = [p for group in learner.optimizer.adamw.param_groups for p in group["params"]]
    moved = [p for p in parameters if p in learner.optimizer.adamw.state]
    moved += [
        x
        for p in list(moved)
        for key, x in learner.optimizer.adamw.state[p].items()
        if key != "step"
    ]
    result["bytes"] = {"second set": 2 * result["parameters"], "masters and moments": nbytes(moved)}
    result["second_set_s"] = attempt(lambda: copy_s(policy, device), failures, "second set")
    result["offload_s"] = attempt(lambda: offload_s(moved, device), failures, "offload")
    print_copies(result)
    for what, why in failures.items():
        print(f"{what}: not measured, {why}")
    return result | {"failures": failures}


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Print a table; the first row is its header."""
    (a, b), *entries = rows
    print(f"\n| {a} | {b} |\n|---|---|")
    print("\n".join(f"| {name} | {value} |" for name, value in entries), flush=True)


def print_table(part: str, mode: str, result: dict[str, Any], x: Measured) -> None:
    """Print the table of one mode of a part."""
    gb, peak, below = 1e-9, named(PEAKS), named(MEASURED)
    title = f"{part}{f', {mode}' if mode else ''}: {result['parameters'] / 1e9:.3g} G parameters"
    rows = [(title, f"{result['trained'] / 1e9:.3g} G trained; {result['device']}")]
    rows.append(("weights made on the device", f"{result['build_s']:.1f} s"))
    for name, s in (("simulate and render", x.simulate), ("act", x.act), ("train", x.train)):
        rows.append((f"{name}, {x.decisions} decisions", f"{s:.3f} s"))
    text = f"{x.tflops:.3g} TFLOP/s"
    if peak is not None:
        text += (
            f", {x.tflops * 1e12 / peak:.1%} of the data sheet's {peak / 1e12:.0f} (target: 45 %)"
        )
        text += (
            f", {x.tflops * 1e12 / below:.1%} of {below / 1e12:.0f} measured"
            if below is not None
            else ""
        )
    rows.append(("train, the model's operations", text))
    if x.difference is not None:
        rows.append(
            ("largest difference of log-probabilities, acting and learning", f"{x.difference:.3g}")
        )
    if x.peak is not None:
        rows.append(("peak memory of an update", f"{x.peak * gb:.1f} GB"))
        if x.predicted is not None:
            parts = ", ".join(f"{name} {size * gb:.1f}" for name, size in vars(x.predicted).items())
            off = x.predicted.total / x.peak - 1
            rows.append(
                (
                    "predicted",
                    f"{x.predicted.total * gb:.1f} GB, {off:+.1%} (target: within 10 %): {parts}",
                )
            )
    print_rows(rows)


def print_copies(result: dict[str, Any]) -> None:
    """Print the cost of a second set of weights and of offloading."""
    size = {name: f"{x / 1e9:.3g} GB" for name, x in result["bytes"].items()}
    rows = [("weights of acting and learning", "to bring up to date"), ("one set", "0 s")]
    if result["second_set_s"] is not None:
        more = f"{result['second_set_s']:.4f} s, {size['second set']} more"
        rows.append(("two sets: what is trained, copied in bfloat16", more))
    if result["offload_s"] is not None:
        to_host, to_device = result["offload_s"]
        name = f"masters and moments, {size['masters and moments']}, to the host and back"
        rows.append((name, f"{to_host:.3f} s, {to_device:.3f} s"))
    print_rows(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small models; needs no GPU")
    parser.add_argument("--part", choices=PARTS, help="measure only this part, in this process")
    args = parser.parse_args(arguments)
    if not args.tiny and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to measure (--tiny runs the same code small)")
    if args.part:
        result = run(args.part, tiny=args.tiny)
        print(json.dumps(result), flush=True)
        return
    failed = []
    for part in PARTS:
        command = [sys.executable, __file__, "--part", part, *(["--tiny"] if args.tiny else [])]
        try:
            if subprocess.run(command, timeout=DEADLINE_S).returncode:
                failed.append(part)
        except subprocess.TimeoutExpired:
            print(f"{part}: not done after {DEADLINE_S} s", flush=True)
            failed.append(part)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
