"""Run the tests that need a GPU, and measure training on the GPU and on the CPU.

    python scripts/bench_gpu.py

The first table has wall-clock milliseconds of an update by phase. Its simulators are EnvPool's, on
the CPU, so that it measures acting and learning. The second table has simulation on the GPU:
control steps of all worlds per second, of physics alone and of the task. The third table is a
language model of Qwen2.5-0.5B's shape with random weights. The following ones are
vision-language-action models (``bench_gpu_vla.py``). The last table is one experiment with its
roles in one process, and in three processes that time-share the device. ``--tiny`` measures the
models and the placements only, with small sizes, and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import embodied_envs
from embodied_ppo.algorithms.separate_critic_learner import LocalCritic, separate_critic_learner
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import Decoder, LanguageCritic, LanguagePolicy
from embodied_ppo.rewards.graders import Grade, Sample
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.language import ReasoningRollout

SETTINGS = {
    "bench_fast": [],
    "bench_classic": [],
    "bench_wide": [],
    "bench_wide, 1024 environments": [
        "env.num_envs=1024",
        "algorithm.global_batch_size=16384",
        "env.num_threads=0",
    ],
}

WORLDS: list[tuple[str, int, dict[str, Any]]] = [
    ("Ant", 4096, {}),
    ("Ant", 4096, {"randomize": True, "ranges": {"mass": (0.8, 1.2)}}),
    ("HalfCheetah", 4096, {}),
    ("PandaPickCube", 4096, {}),
    ("PandaPickCube", 1024, {"cameras": ("front",)}),
]
"""Task, worlds, options of ``embodied_envs.make``; a step is a control step."""


def run_training(options: Sequence[str], rows: int) -> list[dict[str, Any]]:
    """Train once and return the last ``rows`` rows of metrics.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run_dir={folder}/run", "evaluation.episodes=1", "evaluation.video_episodes=0"]
        command = [sys.executable, "-m", "embodied_ppo.commands.main", "train", "--quiet"]
        process = subprocess.run([*command, *options, *fixed], capture_output=True, text=True)
        if process.returncode:
            raise SystemExit(f"{' '.join([*options, *fixed])}\n{process.stderr[-2000:]}")
        with open(f"{folder}/run/metrics.jsonl") as f:
            return [json.loads(line) for line in f][-rows:]


def train(name: str, changes: list[str], device: str, compile_: str) -> dict[str, float]:
    """Return the mean wall seconds of each phase over the second half of 40 updates."""
    options = [f"experiment={name.split(',')[0]}", *changes, f"device={device}"]
    rows = run_training([*options, f"compile={compile_}", "updates=40"], 20)
    return {
        phase: sum(row[f"time/{phase}_s"] for row in rows) / len(rows)
        for phase in ("collect", "update")
    }


PLACEMENTS = {
    "one process": [],
    "fused, over Ray": ["placement=fused", "cluster.devices_per_node=1"],
    "three processes, time-shared": ["placement=colocated", "cluster.devices_per_node=1"],
}


def compare_placements(device: str, experiment: Sequence[str]) -> None:
    """Print the table of the placements: means over the second half of 10 updates."""
    columns = "placement | update s | swap s | idle share of the device"
    print(f"\n| {columns} | peak memory of a process, GiB |")
    print("|---|---|---|---|---|")
    for name, placement in PLACEMENTS.items():
        options = [*experiment, *placement, f"device={device}", "updates=10", "cloning.steps=0"]
        rows = run_training(options, 5)
        mean = {tag: sum(row.get(tag, 0.0) for row in rows) / len(rows) for tag in rows[-1]}
        update_s = sum(mean[f"time/{phase}_s"] for phase in ("collect", "update", "publish"))
        suffix = "_gpu_peak_gb" if device == "cuda" else "_peak_gb"
        peaks = {tag: x for tag, x in mean.items() if tag.startswith("memory/")}
        memory = ", ".join(
            f"{tag[7 : -len(suffix)] or 'all'} {x:.2f}"
            for tag, x in peaks.items()
            if tag.endswith(suffix)
        )
        idle = f"{mean['device/idle']:.2f}" if placement else "-"
        cells = [name, f"{update_s:.3f}", f"{mean.get('time/swap_s', 0.0):.3f}", idle]
        print("| " + " | ".join([*cells, memory or "-"]) + " |", flush=True)


def rate(call: Callable[[], Any], calls: int = 100) -> float:
    """Return calls per second, after as many calls for warm-up."""

    def repeat() -> None:
        for _ in range(calls):
            call()

    return calls / [seconds(repeat) for _ in range(2)][1]


def simulate(id: str, num_envs: int, **options: Any) -> tuple[float, float]:
    """Return world steps per second of physics alone, and of the task with random actions."""
    env: Any = embodied_envs.make(
        id, num_envs=num_envs, seeds=list(range(num_envs)), device="cuda", **options
    )
    env.reset()
    action = torch.rand(num_envs, env.action_spec.size, device="cuda") * 2 - 1
    task = rate(lambda: env.step(action))
    env.physics.records_kernels = True  # a separate graph of its kernels
    ctrl = env.physics.fields["ctrl"].clone()
    physics = rate(lambda: env.physics.step(ctrl, env.task.decimation))
    env.close()
    return physics * num_envs, task * num_envs


# ----------------------------------------------------------------------------------- language model
@dataclass(frozen=True)
class Shape:
    """Shape of a model (Qwen2 with tied embeddings) and of its batches.

    There are ``prompts`` prompts of ``prompt`` tokens, and responses of ``new`` tokens.
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

    def model(self, device: str) -> Any:
        """Return a model with random weights."""
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
        return causal_lm.load(None, fields, section="bench", dtype=torch.bfloat16, device=device)

    def flops(self, decoder: Decoder, lengths: Tensor, responses: Tensor) -> float:
        """Return the operations of a forward and backward pass, without recomputation.

        They are 6 · weights · tokens, and for the attention of each layer 6 · length² · hidden.

        Args:
            decoder: The decoder.
            lengths: [N], tokens of each row.
            responses: [N], tokens at the end of each row whose logits are computed.
        """
        weights = sum(p.numel() for p in decoder.layers.parameters())
        head = self.vocabulary * self.hidden
        attention = self.layers * float((lengths.double() ** 2).sum()) * self.hidden
        return 6.0 * (weights * float(lengths.sum()) + head * float(responses.sum()) + attention)


TINY = Shape(64, 2, 4, 2, 128, 512, prompts=6, prompt=5, new=12, micro_tokens=64)
GPU = torch.device("cuda", 0)
"""The GPU that is measured."""
PEAK = 989e12
"""Dense bfloat16 products of an H100 or H200, operations per second (its data sheet)."""


def _wait() -> None:
    """Wait for the work of the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize(GPU)


def seconds(call: Callable[[], Any]) -> float:
    """Return the wall time of one call, including the work of the device."""
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def decode_ms(
    policy: LanguagePolicy, shape: Shape, prompts: Sequence[Sequence[int]], static: bool
) -> float:
    """Return the time of one decode step of all prompts, without prefill and graph capture."""
    engine = Engine(policy, slots=shape.prompts, pad_id=0, static=static)
    few = max(2, shape.new // 16)
    long, short = (  # the longest first, so that both use one cache
        min(seconds(lambda n=new: engine.generate(prompts, Sampling(n), seed=0)) for _ in range(3))
        for new in (shape.new, few)
    )
    return (long - short) / (shape.new - few) * 1e3


def train_s(policy: LanguagePolicy, ids: Tensor, place: Tensor) -> float:
    """Return the time of the second forward and backward pass of log-probabilities.

    ``place`` holds the positions before the scored tokens.
    """

    def step() -> None:
        view = policy.view(policy.hidden(ids, place), ids.gather(1, place + 1))
        view.log_prob.sum().backward()
        policy.zero_grad()

    return [seconds(step) for _ in range(2)][1]


class EvenLength:
    """Graders that score 1 if a response has an even number of tokens."""

    failures, last_failure = 0, ""

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        return [Grade(float(len(text) % 2 == 0)) for _, text, _, _ in samples]

    def close(self) -> None: ...


def ppo_s(
    policy: LanguagePolicy, shape: Shape, prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Return the seconds of each part of the second PPO step, with 4 minibatches and an epoch."""
    device = policy.model.lm_head.weight.device
    critic = LanguageCritic(shape.model(str(device)))
    c = AlgorithmConfig(adv_type="gae", gamma=1.0, gae_lambda=1.0, update_epoch=1, lr=1e-6)
    shared: dict[str, Any] = {
        "length": shape.new,
        "columns": -(-shape.prompts // 4),
        "tokens": shape.micro_tokens,
        "updates": 2,
        "seed": 0,
    }
    values = LocalCritic(critic, c, **shared)
    learner = separate_critic_learner(
        policy, values, c, recompute=True, num_sequences=shape.prompts, **shared
    )
    engine = Engine(policy, slots=shape.prompts, pad_id=0)
    tasks = [Prompt(tuple(p), "", "", "bench", {}, i) for i, p in enumerate(prompts)]
    text = lambda ids: "x" * len(ids)
    # A share of 1 / new of all tokens ends a response, so the mean length is below new.
    sampling = Sampling(shape.new, stop_ids=tuple(range(0, shape.vocabulary, shape.new)))
    rollout = ReasoningRollout(
        tasks, engine, EvenLength(), text, batch=shape.prompts, sampling=sampling, pad_id=0, seed=0
    )
    timings: dict[str, float] = {}
    for update in range(2):
        results: list[Any] = []
        collect = lambda u=update, r=results: r.append(
            rollout.collect(shape.new, update=u, version=u)[0]
        )
        prepare = lambda r=results: r.append(learner._prepare(r[0])[0])
        timings["generate"] = seconds(collect)
        timings["values, log-probabilities, advantages"] = seconds(prepare)
        for name, optimizer in (("critic", values.optimizer), ("actor", learner.optimizer)):
            optimize = lambda o=optimizer, r=results, u=update: o.optimize(
                r[1], u, critic_only=False, entropy_coef=0.0
            )
            timings[name] = seconds(optimize)
    return timings


def measure_language_model(shape: Shape, device: str) -> None:
    """Print the table of the language model."""
    torch.manual_seed(0)
    cuda = device == "cuda"
    policy = LanguagePolicy(shape.model(device))
    prompts = torch.randint(0, shape.vocabulary, (shape.prompts, shape.prompt)).tolist()
    print("\n| language model | |\n|---|---|")
    for static in (True, False):
        shapes = "dynamic shapes"
        if static:
            shapes = "fixed shapes, CUDA graphs" if cuda else "fixed shapes"
        step_ms = decode_ms(policy, shape, prompts, static)
        print(f"| decode step, {shape.prompts} responses, {shapes} | {step_ms:.2f} ms |")
    rows = min(shape.prompts, max(1, shape.micro_tokens // (shape.prompt + shape.new)))
    lengths = torch.linspace(
        shape.prompt + shape.new // 4, shape.prompt + shape.new - 1, rows
    ).long()
    responses = lengths - shape.prompt + 1
    ids = torch.randint(0, shape.vocabulary, (rows, shape.prompt + shape.new), device=device)
    place = torch.arange(shape.new) + shape.prompt - 1
    place = torch.where(place < lengths.unsqueeze(1), place, shape.prompt - 1).to(device)
    step_s = train_s(policy, ids, place)
    share = shape.flops(policy.decoder.module, lengths, responses) / step_s / PEAK
    text = f"{step_s * 1e3:.1f} ms, {share:.1%} of peak"
    print(f"| forward and backward, {int(lengths.sum())} tokens | {text} |")
    if cuda:
        torch.cuda.reset_peak_memory_stats(GPU)
    for name, s in ppo_s(policy, shape, prompts).items():
        print(f"| PPO step: {name} | {s:.3f} s |", flush=True)
    if cuda:
        peak_gib = torch.cuda.max_memory_allocated(GPU) / 2**30
        print(f"| PPO step: peak memory | {peak_gib:.1f} GiB |")


def measure_vla(*options: str) -> int:
    """Measure vision-language-action models; return the exit code."""
    script = Path(__file__).with_name("bench_gpu_vla.py")
    return subprocess.run([sys.executable, script, *options]).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help_text = "only models and placements, with small sizes; needs no GPU"
    parser.add_argument("--tiny", action="store_true", help=help_text)
    if parser.parse_args().tiny:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        measure_language_model(TINY, device)
        small = ["env.num_envs=64", "algorithm.global_batch_size=512"]
        compare_placements(device, ["experiment=bench_wide", "compile=never", *small])
        sys.exit(measure_vla("--tiny"))
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to measure (docs/gpu.md lists what was not run)")
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rs"])
    outcome = "passed" if tests.returncode == 0 else "FAILED"
    print(f"tests that need a GPU: {outcome}; {torch.cuda.get_device_name(GPU)}")
    print("| experiment | device | compiled | collect ms | update ms |\n|---|---|---|---|---|")
    for name, changes in SETTINGS.items():
        for device, compile_ in (("cpu", "always"), ("cuda", "never"), ("cuda", "always")):
            phases = train(name, changes, device, compile_)
            cells = [name, device, compile_, *(f"{s * 1e3:.1f}" for s in phases.values())]
            print("| " + " | ".join(cells) + " |", flush=True)
    vla_code = measure_vla()  # while this process holds no memory of the GPU
    print("\n| task | worlds | physics, steps/s | environment, steps/s |\n|---|---|---|---|")
    for id, num_envs, options in WORLDS:
        physics, task = simulate(id, num_envs, **options)
        print(f"| {id} {options or ''} | {num_envs} | {physics:,.0f} | {task:,.0f} |", flush=True)
    measure_language_model(Shape(), "cuda")
    compare_placements("cuda", ["experiment=tabletop_token", "compile=never"])
    sys.exit(tests.returncode or vla_code)


if __name__ == "__main__":
    main()
