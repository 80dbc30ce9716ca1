"""The parts ``oft``, ``pi0_frozen`` and ``pi0_trained`` of bench_gpu.py: VLA models.

Our rollout and learner run PPO updates on Tabletop with 32 simulators (images of 224 x 224; MuJoCo
and OpenGL on the host) and random weights:

    oft           OpenVLA-OFT's shape, 7.5 G, chunks of 8 actions in parallel, adapters of rank 32
    pi0_frozen    π0's shape, 3.2 G, its expert trained; prefixes cached over the epochs, and
                  recomputed
    pi0_trained   π0, all weights trained

Speed and memory do not depend on the values of the weights. Success is not measured.

Memory is predicted from shapes before the first update: parameters, their gradients and AdamW's
moments, trajectory and prefixes, and the peak of a micro-batch, found by a forward and backward
pass on tensors without storage. Operations are those of the model's mathematics, 2 for each weight
and token; recomputation does not count.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import benchmark
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
from embodied_ppo.placement.memory_estimate import Memory, estimate_update, nbytes
from embodied_ppo.rollout.simulation import Rollout

PARTS = ("oft", "pi0_frozen", "pi0_trained")
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
    "pi0_frozen": Work(horizon=16, epochs=4, minibatch=256, micro=256, chunk=8),
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
        once: The part whose outputs are cached: a frozen trunk, towers beside adapters.
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
    learn = 2 * (base + head) + 3 * (adapters + attention + value)
    return Operations(act, learn, vision_ops)


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
class TimedEnv:
    """``VectorEnv`` that times its steps, without earlier work of the GPU."""

    def __init__(self, env: VectorEnv) -> None:
        self.env, self.spent = env, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: Tensor) -> Step:
        results: list[Step] = []
        self.spent += benchmark.seconds(
            lambda: results.append(self.env.step(action)), self.env.device
        )
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

        to_host += benchmark.seconds(lambda g=group, h=host: move(h, g), device)
        for x in group:
            x.zero_()
        to_device += benchmark.seconds(lambda g=group, h=host: move(g, h), device)
    return to_host, to_device


def copy_s(policy: nn.Module, device: torch.device) -> float:
    """Return the time of the second update of a bfloat16 copy of the trained weights."""
    trained = [p.detach() for p in policy.parameters() if p.requires_grad]
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in trained]
    copy: Any = vars(torch)["_foreach_copy_"]
    times = [benchmark.seconds(lambda: copy(copies, trained), device) for _ in range(2)]
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(copies, trained, strict=True))
    return times[1]


@torch.no_grad()
def difference(policy: Policy, learner: Learner, t: Trajectory) -> float:
    """Return the largest difference of log-probabilities between acting and learning."""
    log_prob = learner.actor.log_prob(learner.actor.encode(t), t)
    return float((log_prob - t.log_prob).abs().max())


def peak_memory(device: torch.device) -> int:
    """Return the largest number of allocated bytes since the last call, 0 without a GPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def measure(
    report: benchmark.Report,
    work: Work,
    env: VectorEnv,
    policy: CheckpointVLA | PI0,
    learner: Learner,
    prefix: str,
) -> None:
    """Run two updates and report the second; ``prefix`` begins the names of the figures."""
    device = env.device
    timed: Any = TimedEnv(env)
    kept = policy.kept_inputs(work.horizon, work.num_envs) if isinstance(policy, PI0) else ()
    rollout = Rollout(timed, policy, seed=0, gamma=learner.config.gamma, kept_inputs=kept)
    peak = 0
    collect_s = train_s = 0.0
    memory: Memory | None = None
    trajectories: list[Trajectory] = []
    for update in range(2):
        trajectories.clear()
        timed.spent = 0.0
        collect_s = benchmark.seconds(
            lambda u=update, ts=trajectories: ts.append(
                rollout.collect(work.horizon, update=u, version=u)[0]
            ),
            device,
        )
        (t,) = trajectories
        if update == 0:
            memory = report.attempt(
                f"{prefix}predicted_gb", lambda t=t: estimate_update(policy, learner, device, t)
            )
        else:
            report(f"{prefix}decisions", t.mask.numel())
            report(f"{prefix}simulate_s", timed.spent)
            report(f"{prefix}act_s", collect_s - timed.spent)
        name = f"{prefix}log_prob_difference"
        gap = report.attempt(name, lambda t=t: difference(policy, learner, t))
        if update == 1 and gap is not None:
            report(name, gap)
        peak_memory(device)
        train_s = benchmark.seconds(lambda u=update, t=t: learner.update(t, update=u), device)
        peak = max(peak, peak_memory(device))
    rows, ops = trajectories[0].mask.numel(), operations(policy)
    is_cached = not isinstance(policy, PI0) or rows <= policy.max_kept_rows()
    encoded = 0 if kept else 1 if is_cached else work.epochs
    total = rows * (work.epochs * ops.learn + ops.once * encoded)
    report(f"{prefix}train_s", train_s)
    report(f"{prefix}train_tflop_per_s", total / train_s / 1e12)
    if (peak_rate := benchmark.peak_flops(device)) is not None:
        report(f"{prefix}train_mfu", total / train_s / peak_rate)
    if peak:
        report(f"{prefix}peak_gb", peak / 1e9)
    if memory is not None:
        sizes = {"total": memory.total, **vars(memory)}
        report(f"{prefix}predicted_gb", {name: size / 1e9 for name, size in sizes.items()})


def run(report: benchmark.Report, part: str, device: torch.device, *, tiny: bool) -> None:
    """Report the figures of a part."""
    work = (TINY if tiny else WORK)[part]
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 100e9:
        work = replace(work, micro=work.micro // 2)
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
    report("work", asdict(work))
    policies: list[CheckpointVLA | PI0] = []
    make = lambda: policies.append(make_policy(part, env, work, tiny=tiny))
    report("weights_made_s", benchmark.seconds(make, device))
    (policy,) = policies
    report("parameters", sum(p.numel() for p in policy.parameters()))
    report("trained_parameters", sum(p.numel() for p in policy.parameters() if p.requires_grad))
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
    prefixes: dict[str, float | None] = {"": None}
    if part == "pi0_frozen":
        prefixes = {"prefixes_kept/": None, "prefixes_computed/": 0.0}
    for prefix, memory_gb in prefixes.items():
        if isinstance(policy, PI0):
            policy.memory_gb = memory_gb
        report.attempt(
            f"{prefix}update",
            lambda prefix=prefix: measure(report, work, env, policy, learner, prefix),
        )
    env.close()
    state = learner.optimizer.adamw.state
    moments = [x for values in state.values() for key, x in values.items() if key != "step"]
    masters_and_moments = [*state, *moments]
    seconds = report.attempt("copy_to_second_weights_s", lambda: copy_s(policy, device))
    if seconds is not None:
        report("copy_to_second_weights_s", seconds)
    if (
        times := report.attempt("offload", lambda: offload_s(masters_and_moments, device))
    ) is not None:
        report("masters_and_moments_gb", nbytes(masters_and_moments) / 1e9)
        report("offload_to_host_s", times[0])
        report("offload_to_device_s", times[1])
