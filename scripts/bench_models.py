"""The parts of bench.py that build models in this process, with new weights.

Speed and memory do not depend on the values of the weights; success is not measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bench
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import embodied_envs
from embodied_envs.base.random import env_seeds
from embodied_envs.types import ArraySpec, Box, ObsSpec
from embodied_ppo.cluster.memory_estimate import estimate_update
from embodied_ppo.core.types import Trajectory
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.options.schema import AlgorithmConfig, ModelConfig
from embodied_ppo.policies import causal_lm
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.policies.vla import openvla, pi0_files
from embodied_ppo.policies.vla.action_tokens import TokenVLA
from embodied_ppo.policies.vla.flow_matching import FlowVLA
from embodied_ppo.policies.vla.openvla import DINO, SIGLIP, OpenVLA, OpenVLABody, OpenVLAConfig
from embodied_ppo.policies.vla.openvla_files import ActionTokens
from embodied_ppo.policies.vla.pi0 import PI0
from embodied_ppo.policies.vla.pretrained import CheckpointVLA
from embodied_ppo.policies.vla.trunk import word_ids
from embodied_ppo.ppo.critic import LocalCritic
from embodied_ppo.ppo.language_actor import language_ppo
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.language_rollout import ReasoningRollout
from embodied_ppo.rollout.rewards.graders import Grade, Sample
from embodied_ppo.rollout.simulation import Rollout

CPU = torch.device("cpu")
# Type of the matrix products of the large models; the weights of qwen are float32.
COMPUTE = torch.bfloat16


# ---------------------------------------------------------------------------------- language models
@dataclass(frozen=True)
class Shape:
    """Shape of a model (Qwen2 with tied embeddings) and of its batches: ``prompts`` prompts of
    ``prompt`` tokens, and responses of ``new`` tokens.
    """

    hidden: int = 896
    layers: int = 24
    heads: int = 14
    groups: int = 2
    mlp: int = 4864
    vocabulary: int = 151936
    prompts: int = 256
    prompt: int = 100
    new: int = 512
    micro_tokens: int = 32768

    def model(self, device: torch.device = CPU) -> Any:
        """Return a model with random float32 weights, made on the device."""
        fields: dict[str, Any] = {
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
        with device:
            return causal_lm.load(None, fields, section="bench", device=device)


TINY_SHAPE = Shape(64, 2, 4, 2, 128, 512, prompts=6, prompt=5, new=12, micro_tokens=64)
SMALL_SHAPE = Shape(256, 4, 4, 2, 1024, 64, prompts=256, prompt=16, new=64)
# 4 of 64 tokens end a response of the small model: responses have about 16 tokens.
STOP_IDS = (2, 3, 4, 5)


def measure_generation(part: bench.Part, *, rounds: int) -> None:
    """Report response tokens per CPU second of our engine and of transformers' ``generate``."""
    torch.manual_seed(0)
    shape = replace(SMALL_SHAPE, prompts=8) if part.tiny else SMALL_SHAPE
    policy = LanguagePolicy(shape.model())
    engine = Engine(policy, slots=shape.prompts, pad_id=0)
    sampling = Sampling(max_tokens=shape.new, stop_ids=STOP_IDS)
    prompts = torch.randint(6, shape.vocabulary, (shape.prompts, shape.prompt))
    tokens = {"ours": 0, "transformers": 0}

    def ours() -> None:
        output = engine.generate(prompts.tolist(), sampling, seed=tokens["ours"])
        tokens["ours"] = int(output.length.sum())

    def reference() -> None:
        out = policy.model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=shape.new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=list(STOP_IDS),
            pad_token_id=0,
        )[:, prompts.shape[1] :]
        ended = torch.isin(out, torch.tensor(STOP_IDS))
        length = torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1])
        tokens["transformers"] = int(length.sum())

    for name, used in bench.cpu_s({"ours": ours, "transformers": reference}, rounds).items():
        part.report(f"generation/{name}_tokens_per_cpu_s", tokens[name] / used)


class EvenLength:
    """Graders that score 1 if a response has an even number of tokens."""

    failures, last_failure = 0, ""

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        return [Grade(float(len(text) % 2 == 0)) for _, text, _, _ in samples]

    def close(self) -> None: ...


def measure_qwen(part: bench.Part, name: str, device: torch.device) -> None:
    """Report a PPO step, a decode step, and a forward and backward pass."""
    shape = TINY_SHAPE if part.tiny else Shape()
    torch.manual_seed(0)
    policy = LanguagePolicy(shape.model(device), compute=COMPUTE)
    part.report("parameters", sum(p.numel() for p in policy.parameters()))
    prompts = torch.randint(0, shape.vocabulary, (shape.prompts, shape.prompt)).tolist()
    peak_memory(device)
    for phase, used in (
        part.attempt("ppo_step", lambda: ppo_step(policy, shape, prompts)) or {}
    ).items():
        part.report(phase, used)
    part.report("ppo_step_peak_gb", peak_memory(device) / 1e9)
    for figure, static in (("decode_step_graph_ms", True), ("decode_step_eager_ms", False)):
        step_ms = part.attempt(figure, lambda s=static: decode_ms(policy, shape, prompts, s))
        if step_ms is not None:
            part.report(figure, step_ms)
    part.attempt("forward_backward", lambda: forward_backward(part, policy, shape))


def ppo_step(policy: LanguagePolicy, shape: Shape, prompts: list[list[int]]) -> dict[str, float]:
    """Return the seconds of generation and training of the second PPO step, with 4 minibatches and
    one epoch. Every response has its full length.
    """
    device = policy.model.lm_head.weight.device
    critic = LanguageCritic(shape.model(device), compute=COMPUTE)
    config = AlgorithmConfig(adv_type="gae", gamma=1.0, gae_lambda=1.0, update_epoch=1, lr=1e-6)
    shared: dict[str, Any] = {"length": shape.new, "columns": -(-shape.prompts // 4), "seed": 0}
    shared |= {"tokens": shape.micro_tokens, "updates": 2}
    values = LocalCritic(critic, config, **shared)
    learner = language_ppo(
        policy, values, config, recompute=True, num_sequences=shape.prompts, **shared
    )
    rollout = ReasoningRollout(
        [Prompt(tuple(p), "", "", "bench", {}, i) for i, p in enumerate(prompts)],
        Engine(policy, slots=shape.prompts, pad_id=0),
        EvenLength(),
        lambda ids: "x" * len(ids),
        batch=shape.prompts,
        sampling=Sampling(shape.new),
        pad_id=0,
        seed=0,
    )
    times: dict[str, float] = {}
    for update in range(2):
        results: list[Trajectory] = []
        collect = lambda u=update, r=results: r.append(
            rollout.collect(shape.new, update=u, version=u)[0]
        )
        times["generate_s"] = bench.seconds(collect, device)
        assert int(results[0].mask.sum()) == shape.prompts * shape.new
        learn = lambda u=update, r=results: learner.update(r[0], update=u)
        times["train_s"] = bench.seconds(learn, device)
    return times | {"ppo_step_s": sum(times.values())}


def decode_ms(
    policy: LanguagePolicy, shape: Shape, prompts: list[list[int]], static: bool
) -> float:
    """Return the time of one decode step of all prompts, without prefill and graph capture."""
    device = policy.model.lm_head.weight.device
    engine = Engine(policy, slots=shape.prompts, pad_id=0, static=static)
    few = max(2, shape.new // 16)
    long, short = (  # the longest first, so that both use one cache
        min(
            bench.seconds(lambda n=new: engine.generate(prompts, Sampling(n), seed=0), device)
            for _ in range(2)
        )
        for new in (shape.new, few)
    )
    return (long - short) / (shape.new - few) * 1e3


def forward_backward(part: bench.Part, policy: LanguagePolicy, shape: Shape) -> None:
    """Report a forward and backward pass of the log-probabilities of a micro-batch."""
    device = policy.model.lm_head.weight.device
    length = shape.prompt + shape.new
    rows = min(shape.prompts, max(1, shape.micro_tokens // length))
    ids = torch.randint(0, shape.vocabulary, (rows, length), device=device)
    # [rows, new], positions before the scored tokens
    place = (torch.arange(shape.new, device=device) + shape.prompt - 1).expand(rows, -1)

    def step() -> None:
        view = policy.view(policy.hidden(ids, place), ids.gather(1, place + 1))
        view.log_prob.sum().backward()
        policy.zero_grad()

    step_s = [bench.seconds(step, device) for _ in range(2)][1]
    part.report("forward_backward_tokens", rows * length)
    part.report("forward_backward_ms", step_s * 1e3)
    with FlopCounterMode(display=False) as counter:
        step()
    report_rate(part, "forward_backward", counter.get_total_flops(), step_s, device)


def report_rate(part: bench.Part, name: str, flops: float, used: float, device: Any) -> None:
    """Report operations per second, and their share of the data sheet's."""
    part.report(f"{name}_tflop_per_s", flops / used / 1e12)
    if (peak := bench.peak_flops(device)) is not None:
        part.report(f"{name}_mfu", flops / used / peak)


def peak_memory(device: torch.device) -> int:
    """Return the largest number of allocated bytes since the last call, 0 without a GPU."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


# --------------------------------------------------------------------------------- small VLA models
BATCH, SIDE, CHUNK, SIZE = 64, 64, 4, 2
SENTENCE = "push the small red block to the left"
SPEC: ObsSpec = {
    "state": ArraySpec((5,)),
    "front": ArraySpec((3, SIDE, SIDE), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
BOX = Box((-1.0,) * (CHUNK * SIZE), (1.0,) * (CHUNK * SIZE))


def measure_small_vla(part: bench.Part, *, rounds: int) -> None:
    """Report images per CPU second of acting and learning, of our models (width 64, 2 blocks, an
    image of 64 x 64 in 64 tokens) and of transformers' π0 with as many tokens of that width.
    """
    torch.manual_seed(0)
    batch = 4 if part.tiny else BATCH
    calls: dict[str, Callable[[], Any]] = {}
    sizes: dict[str, Any] = {"width": 64, "depth": 2, "bins": 32}
    small: dict[str, Any] = {"chunk": CHUNK, "sentences": (SENTENCE,)}
    flow = ModelConfig(policy="flow", flow_steps=4, **sizes)
    policies: dict[str, Any] = {"flow": FlowVLA(SPEC, BOX, flow, **small)}
    for decode in ("parallel", "autoregressive"):
        config = ModelConfig(policy="token", decode=decode, **sizes)
        policies[f"token_{decode}"] = TokenVLA(SPEC, BOX, config, **small)
    obs = {
        "state": torch.randn(batch, 5),
        "front": torch.randint(0, 256, (batch, 3, SIDE, SIDE), dtype=torch.uint8),
        "instruction": torch.zeros(batch, dtype=torch.int64),
    }
    for name, policy in policies.items():
        noise, inputs = policy.noise(batch), policy.encode(obs)
        decision = policy.act(inputs, noise=noise)
        calls[f"{name}/act"] = lambda p=policy, e=noise: p.act(p.encode(obs), noise=e)

        def learn(p: Any = policy, inputs: Any = inputs, d: Any = decision) -> None:
            p.zero_grad(set_to_none=True)
            out = p.evaluate(inputs, d.action, d.replay)
            (out.log_prob.sum((1, 2)).exp().mean() + out.value.square().mean()).backward()

        calls[f"{name}/learn"] = learn
    calls |= transformers_pi0(batch)
    for name, used in bench.cpu_s(calls, rounds).items():
        part.report(f"{name}_images_per_cpu_s", batch / used)


def transformers_pi0(batch: int) -> dict[str, Callable[[], Any]]:
    """Return acting and learning of transformers' π0 with hidden size 64 and 2 layers."""
    from transformers import PI0Config, PI0ForConditionalGeneration

    common = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64}
    common["intermediate_size"] = 256
    gemma = {"model_type": "gemma", "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 512}
    vision = {"model_type": "siglip_vision_model", "patch_size": 8, "image_size": SIDE}
    vlm = {"model_type": "paligemma", "projection_dim": 64, "image_token_id": 511}
    model: Any = PI0ForConditionalGeneration(
        PI0Config(
            vlm_config=vlm
            | {"text_config": gemma | common}
            | {"vision_config": vision | common | {"vision_use_head": False}},
            dit_config=gemma | common,
            chunk_size=CHUNK,
            max_state_dim=8,
            max_action_dim=8,
        )
    )
    words = torch.randint(3, 500, (batch, len(SENTENCE.split())))
    ids = torch.cat((torch.full((batch, (SIDE // 8) ** 2), 511), words), dim=1)
    inputs: dict[str, Any] = {
        "pixel_values": torch.randn(batch, 1, 3, SIDE, SIDE),
        "pixel_attention_mask": torch.ones(batch, 1, dtype=torch.bool),
        "state": torch.randn(batch, 8),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }

    def learn() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs, actions=torch.randn(batch, CHUNK, 8)).loss.mean().backward()

    act = lambda: model.sample_actions(**inputs, num_steps=4)
    return {"transformers_pi0/act": act, "transformers_pi0/learn": learn}


# --------------------------------------------------------------------------------- large VLA models
@dataclass(frozen=True, kw_only=True)
class Work:
    """Sizes of an update on Tabletop; the names are those of AlgorithmConfig.

    Attributes:
        horizon: Decisions of each environment.
        chunk: Actions of a decision.
        side: Side of an image, in pixels.
    """

    horizon: int
    update_epoch: int = 1
    global_batch_size: int = 128
    micro_batch_size: int = 32
    chunk: int = 8
    side: int = 224
    num_envs: int = 32


WORK = {
    "oft": Work(horizon=8),
    "pi0_frozen": Work(horizon=16, update_epoch=4, global_batch_size=256, micro_batch_size=256),
    "pi0_trained": Work(horizon=8),
}
TINY_WORK = {
    name: Work(horizon=2, global_batch_size=4, micro_batch_size=2, chunk=2, side=side, num_envs=4)
    for name, side in (("oft", 28), ("pi0_frozen", 16), ("pi0_trained", 16))
}


def openvla_config(actions: int, *, tiny: bool) -> OpenVLAConfig:
    """Return the configuration for ``actions`` action dimensions."""
    stats = {"q01": [-1.0] * actions, "q99": [1.0] * actions}
    norms: dict[str, Any] = {"norm_stats": {"bench": {"action": stats}}}
    text: dict[str, Any] = {"vocab_size": 32064, "pad_token_id": 32000}
    text["max_position_embeddings"] = 2048
    if not tiny:
        return OpenVLAConfig(text=text, **norms)
    text |= {"hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4}
    dino = DINO | {
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "mlp_ratio": 4,
        "patch_size": 7,
    }
    siglip = SIGLIP | {
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "patch_size": 7,
    }
    return OpenVLAConfig(text=text, dino=dino, siglip=siglip, image_size=28, **norms)


def pi0_config(*, tiny: bool) -> Any:
    """Return transformers' PI0Config."""
    from transformers import PI0Config

    if not tiny:
        return PI0Config()
    common = {"num_hidden_layers": 2, "intermediate_size": 64, "hidden_size": 32}
    gemma = {"model_type": "gemma", "num_attention_heads": 4, "num_key_value_heads": 1}
    gemma |= {"head_dim": 8, "vocab_size": 300, **common}
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **common}
    vision |= {"num_attention_heads": 2, "projection_dim": 64}
    vision |= {"patch_size": 8, "image_size": 16}
    vlm = {"model_type": "paligemma", "projection_dim": 64, "image_token_id": 300}
    text = gemma | {"hidden_size": 64, "intermediate_size": 128}
    return PI0Config(
        vlm_config=vlm | {"vision_config": vision, "text_config": text},
        dit_config=gemma,
        chunk_size=6,
        max_state_dim=32,
        max_action_dim=8,
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
        with torch.device(device):
            body = OpenVLABody(sizes, dtype=self.dtype)
        return OpenVLA(body, tokenize, actions=self.chunk * self.size)


def make_policy(name: str, env: Any, work: Work, *, tiny: bool) -> CheckpointVLA | PI0:
    """Return the policy of a part on the environment's device."""
    torch.manual_seed(0)
    box: Box = env.action_spec
    spaces: dict[str, Any] = {"chunk": work.chunk, "sentences": tuple(env.instructions)}
    if name != "oft":
        from transformers import PI0ForConditionalGeneration

        with torch.device(env.device):
            model = PI0ForConditionalGeneration(pi0_config(tiny=tiny))
        config = ModelConfig(policy="flow", freeze_trunk=name == "pi0_frozen", dtype="bfloat16")
        published = pi0_files.Published(model, tokenize)
        return PI0(env.obs_spec, box, config, published, **spaces).to(env.device)
    sizes = openvla_config(box.size // work.chunk, tiny=tiny)
    with tempfile.TemporaryDirectory() as folder:  # adapters need a directory
        (Path(folder) / "config.json").write_text("{}")
        rank: dict[str, Any] = {"lora_rank": 4 if tiny else 32, "dtype": "bfloat16"}
        config = ModelConfig(policy="token", checkpoint=folder, **rank)
        policy = NewOpenVLA(sizes, env.device, env.obs_spec, box, config, **spaces)
    return policy.to(env.device)


def measure_large_vla(part: bench.Part, name: str, device: torch.device) -> None:
    """Report updates of a VLA model of published size."""
    work = (TINY_WORK if part.tiny else WORK)[name]
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory < 100e9:
        work = replace(work, micro_batch_size=work.micro_batch_size // 2)
    env: Any = embodied_envs.make(
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
    part.report("work", asdict(work))
    policy = make_policy(name, env, work, tiny=part.tiny)
    parameters = list(policy.parameters())
    part.report("parameters", sum(p.numel() for p in parameters))
    part.report("trained_parameters", sum(p.numel() for p in parameters if p.requires_grad))
    config = AlgorithmConfig(
        horizon=work.horizon,
        update_epoch=work.update_epoch,
        global_batch_size=work.global_batch_size,
        micro_batch_size=work.micro_batch_size,
        lr=5e-6,
        logprob_type="token_level",
        gamma=0.998,
    )
    learner = robot_ppo(policy, config, num_envs=work.num_envs, updates=8, seed=0)
    # π0 keeps the prefixes of acting for the update, unless they do not fit into memory.
    for prefix, memory_gb in (("kept/", None), ("computed/", 0.0)):
        if isinstance(policy, PI0):
            policy.planned_memory_gb = memory_gb
        if name == "pi0_frozen" or memory_gb is None:
            prefix = prefix if name == "pi0_frozen" else ""
            update = lambda p=prefix: measure_update(part, work, env, policy, learner, p)
            part.attempt(f"{prefix}update", update)
    env.close()


def measure_update(
    part: bench.Part, work: Work, env: Any, policy: Any, learner: Any, prefix: str
) -> None:
    """Run three updates, and report the second; the third counts its operations."""
    device = env.device
    kept = policy.kept_inputs(work.horizon, work.num_envs) if isinstance(policy, PI0) else ()
    rollout = Rollout(env, policy, seed=0, gamma=learner.config.gamma, kept_inputs=kept)
    trajectories: list[Trajectory] = []

    def collect(update: int) -> float:
        trajectories.clear()
        return bench.seconds(
            lambda: trajectories.append(rollout.collect(work.horizon, update=update, version=0)[0]),
            device,
        )

    def learn(update: int) -> float:
        return bench.seconds(lambda: learner.update(trajectories[0], update=update), device)

    collect(0)
    predict = lambda: estimate_update(policy, learner, trajectories[0])
    memory = part.attempt(f"{prefix}predicted_gb", predict)
    if memory is not None:
        part.report(f"{prefix}predicted_gb", sum(memory.values()) / 1e9)
    learn(0)
    part.report(f"{prefix}collect_s", collect(1))
    gap = part.attempt(
        f"{prefix}log_prob_difference", lambda: log_prob_difference(learner, trajectories[0])
    )
    if gap is not None:
        part.report(f"{prefix}log_prob_difference", gap)
    peak_memory(device)
    train_s = learn(1)
    part.report(f"{prefix}train_s", train_s)
    part.report(f"{prefix}peak_gb", peak_memory(device) / 1e9)
    collect(2)
    with FlopCounterMode(display=False) as counter:
        learn(2)
    report_rate(part, f"{prefix}train", counter.get_total_flops(), train_s, device)


@torch.no_grad()
def log_prob_difference(learner: Any, t: Trajectory) -> float:
    """Return the largest difference of log-probabilities between acting and learning."""
    log_prob: Tensor = learner.actor.log_prob(learner.actor.encode(t), t)
    return float((log_prob - t.log_prob).abs().max())
