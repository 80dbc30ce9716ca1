"""Everything about a GPU in one command: the tests that need one, then training speed on it and on
the CPU, as a table.

    python scripts/bench_gpu.py

The first table's simulators are EnvPool's, on the CPU, so it shows acting and learning: wall-clock
ms of an update, by phase. The second is simulation on the GPU: control steps of all worlds per
second, of bare physics and of the task. The third is a language model of Qwen2.5-0.5B's shape with
random weights; the others are vision-language-action models (``bench_gpu_vla.py``). The last is one
experiment with its roles in one process, and in three that take turns on the same device.
``--tiny`` runs these alone, small, anywhere.
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


def train(name: str, words: list[str], device: str, compile_: str) -> dict[str, float]:
    """Mean wall seconds of a phase over the second half of 40 updates."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"experiment={name.split(',')[0]}",
            *words,
            f"device={device}",
            f"compile={compile_}",
            "updates=40",
        ]
        options += [f"run_dir={folder}/run", "evaluation.episodes=1", "evaluation.video_episodes=0"]
        command = [sys.executable, "-m", "embodied_ppo.commands.main", "train", "--quiet", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(options)}\n{done.stderr[-2000:]}")
        with open(f"{folder}/run/metrics.jsonl") as f:
            rows = [json.loads(line) for line in f][-20:]
    return {
        phase: sum(row[f"time/{phase}_s"] for row in rows) / len(rows)
        for phase in ("collect", "update")
    }


PLACES = {
    "one process": [],
    "fused, over Ray": ["placement=fused", "cluster.devices_per_node=1"],
    "three processes taking turns": ["placement=colocated", "cluster.devices_per_node=1"],
}


def place(device: str, words: Sequence[str]) -> None:
    """Prints the table of one experiment in several placements; means of the second half of 10
    updates.
    """
    print(
        "\n| placement | update s | swap s | idle share of the device | peak memory of a process,"
        " GiB |"
    )
    print("|---|---|---|---|---|")
    for name, where in PLACES.items():
        with tempfile.TemporaryDirectory() as folder:
            options = [
                *words,
                *where,
                f"device={device}",
                "updates=10",
                f"run_dir={folder}/run",
                "cloning.steps=0",
            ]
            options += ["evaluation.episodes=1", "evaluation.video_episodes=0"]
            command = [
                sys.executable,
                "-m",
                "embodied_ppo.commands.main",
                "train",
                "--quiet",
                *options,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(options)}\n{done.stderr[-2000:]}")
            with open(f"{folder}/run/metrics.jsonl") as f:
                rows = [json.loads(line) for line in f][-5:]
        mean = {tag: sum(row.get(tag, 0.0) for row in rows) / len(rows) for tag in rows[-1]}
        whole = sum(mean[f"time/{phase}_s"] for phase in ("collect", "update", "publish"))
        kind = "_gpu_peak_gb" if device == "cuda" else "_peak_gb"
        peaks = {tag: mean[tag] for tag in mean if tag.startswith("memory/") and tag.endswith(kind)}
        memory = ", ".join(f"{tag[7 : -len(kind)] or 'all'} {x:.2f}" for tag, x in peaks.items())
        idle = f"{mean['device/idle']:.2f}" if where else "-"
        print(
            f"| {name} | {whole:.3f} | {mean.get('time/swap_s', 0.0):.3f} | {idle} |"
            f" {memory or '-'} |",
            flush=True,
        )


def rate(call: Callable[[], Any], calls: int = 100) -> float:
    """Calls per second, after as many to warm up."""
    for measured in (False, True):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        if measured:
            return calls / (time.perf_counter() - begin)
    raise AssertionError


def simulate(id: str, num_envs: int, **options: Any) -> tuple[float, float]:
    """World steps per second of physics alone, and of the whole environment with random actions."""
    env: Any = embodied_envs.make(
        id, num_envs=num_envs, seeds=list(range(num_envs)), device="cuda", **options
    )
    env.reset()
    action = torch.rand(num_envs, env.action_spec.size, device="cuda") * 2 - 1
    whole = rate(lambda: env.step(action))
    env.physics.records_kernels = True  # its kernels in a graph of their own
    ctrl = env.physics.fields["ctrl"].clone()
    bare = rate(lambda: env.physics.step(ctrl, env.task.decimation))
    env.close()
    return bare * num_envs, whole * num_envs


# ----------------------------------------------------------------------------------- language model
@dataclass(frozen=True)
class Shape:
    """Of a model (Qwen2, tied) and what it does: prompts of ``prompt`` tokens, ``new`` more of
    each.
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
        """Of a forward and backward pass over rows of ``lengths`` [N] tokens, whose last
        ``responses`` [N] are scored: 6 · weights · tokens, and of each layer's attention 6 ·
        length² · hidden; nothing is counted twice.
        """
        weights = sum(p.numel() for p in decoder.layers.parameters())
        head = self.vocabulary * self.hidden
        attention = self.layers * float((lengths.double() ** 2).sum()) * self.hidden
        return 6.0 * (weights * float(lengths.sum()) + head * float(responses.sum()) + attention)


TINY = Shape(64, 2, 4, 2, 128, 512, prompts=6, prompt=5, new=12, micro_tokens=64)
PEAK = 989e12
"""Dense bfloat16 products of an H100 or H200, operations per second (its data sheet)."""


def seconds(call: Callable[[], Any]) -> float:
    """Wall time of one call, the device's work included."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def decode_ms(
    policy: LanguagePolicy, shape: Shape, prompts: Sequence[Sequence[int]], static: bool
) -> float:
    """Of one decode step of all prompts, reading them left out; graphs are recorded before."""
    engine = Engine(policy, slots=shape.prompts, pad_id=0, static=static)
    few = max(2, shape.new // 16)
    whole, part = (  # the longest first: one cache for both
        min(seconds(lambda n=new: engine.generate(prompts, Sampling(n), seed=0)) for _ in range(3))
        for new in (shape.new, few)
    )
    return (whole - part) / (shape.new - few) * 1e3


def train_s(policy: LanguagePolicy, ids: Tensor, place: Tensor) -> float:
    """Of log-probabilities of the tokens after ``place`` and their gradient, the second time."""

    def step() -> None:
        view = policy.view(policy.hidden(ids, place), ids.gather(1, place + 1))
        view.log_prob.sum().backward()
        policy.zero_grad()

    return [seconds(step) for _ in range(2)][1]


class Even:
    """Scores a response by whether it has an even number of tokens."""

    failures, last_failure = 0, ""

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        return [Grade(float(len(text) % 2 == 0)) for _, text, _, _ in samples]

    def close(self) -> None: ...


def ppo_s(
    policy: LanguagePolicy, shape: Shape, prompts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Of the parts of one PPO step, the second one: as many optimiser steps as four minibatches and
    an epoch give.
    """
    where = policy.model.lm_head.weight.device
    critic = LanguageCritic(shape.model(str(where)))
    c = AlgorithmConfig(adv_type="gae", gamma=1.0, gae_lambda=1.0, update_epoch=1, lr=1e-6)
    same: dict[str, Any] = {
        "length": shape.new,
        "columns": -(-shape.prompts // 4),
        "tokens": shape.micro_tokens,
        "updates": 2,
        "seed": 0,
    }
    values = LocalCritic(critic, c, **same)
    learner = separate_critic_learner(
        policy, values, c, recompute=True, num_sequences=shape.prompts, **same
    )
    engine = Engine(policy, slots=shape.prompts, pad_id=0)
    tasks = [Prompt(tuple(p), "", "", "bench", {}, i) for i, p in enumerate(prompts)]
    text = lambda ids: "x" * len(ids)
    sampling = Sampling(
        shape.new, stop_ids=tuple(range(0, shape.vocabulary, shape.new))
    )  # half as long on average
    rollout = ReasoningRollout(
        tasks, engine, Even(), text, batch=shape.prompts, sampling=sampling, pad_id=0, seed=0
    )
    found: dict[str, float] = {}
    for update in range(2):
        made: list[Any] = []
        collect = lambda u=update, m=made: m.append(
            rollout.collect(shape.new, update=u, version=u)[0]
        )
        prepare = lambda m=made: m.append(learner._prepare(m[0])[0])
        found["generate"] = seconds(collect)
        found["values, log-probabilities, advantages"] = seconds(prepare)
        for name, optimizer in (("critic", values.optimizer), ("actor", learner.optimizer)):
            optimize = lambda d=optimizer, m=made, u=update: d.optimize(
                m[1], u, critic_only=False, entropy_coef=0.0
            )
            found[name] = seconds(optimize)
    return found


def speak(shape: Shape, device: str) -> None:
    """Prints the table of the language model."""
    torch.manual_seed(0)
    cuda = device == "cuda"
    policy = LanguagePolicy(shape.model(device))
    prompts = torch.randint(0, shape.vocabulary, (shape.prompts, shape.prompt)).tolist()
    print("\n| language model | |\n|---|---|")
    for static in (True, False):
        how = (
            "fixed shapes" + (", CUDA graphs" if cuda else "")
            if static
            else "as many rows and keys as there are"
        )
        print(
            f"| decode step, {shape.prompts} responses, {how} |"
            f" {decode_ms(policy, shape, prompts, static):.2f} ms |"
        )
    rows = min(shape.prompts, max(1, shape.micro_tokens // (shape.prompt + shape.new)))
    lengths = torch.linspace(
        shape.prompt + shape.new // 4, shape.prompt + shape.new - 1, rows
    ).long()
    responses = lengths - shape.prompt + 1
    ids = torch.randint(0, shape.vocabulary, (rows, shape.prompt + shape.new), device=device)
    place = torch.arange(shape.new) + shape.prompt - 1
    place = torch.where(place < lengths.unsqueeze(1), place, shape.prompt - 1).to(device)
    took = train_s(policy, ids, place)
    flops = shape.flops(policy.decoder.module, lengths, responses)
    share = flops / took / PEAK
    print(
        f"| forward and backward, {int(lengths.sum())} tokens | {took * 1e3:.1f} ms, {share:.1%} of"
        " peak |"
    )
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for name, s in ppo_s(policy, shape, prompts).items():
        print(f"| PPO step: {name} | {s:.3f} s |", flush=True)
    if cuda:
        print(f"| PPO step: peak memory | {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB |")


def see(*options: str) -> int:
    """Vision-language-action models; 0 where all was measured."""
    return subprocess.run(
        [sys.executable, Path(__file__).with_name("bench_gpu_vla.py"), *options]
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tiny", action="store_true", help="the models' parts alone, small; needs no GPU"
    )
    if parser.parse_args().tiny:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        speak(TINY, device)
        place(
            device,
            [
                "experiment=bench_wide",
                "compile=never",
                "env.num_envs=64",
                "algorithm.global_batch_size=512",
            ],
        )
        sys.exit(see("--tiny"))
    if not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device: nothing to measure (docs/gpu.md says what has not been run)"
        )
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rs"])
    print(
        f"tests that need a GPU: {'passed' if tests.returncode == 0 else 'FAILED'};"
        f" {torch.cuda.get_device_name()}"
    )
    print("| experiment | device | compiled | collect ms | update ms |\n|---|---|---|---|---|")
    for name, words in SETTINGS.items():
        for device, compile_ in (("cpu", "always"), ("cuda", "never"), ("cuda", "always")):
            t = train(name, words, device, compile_)
            cells = [
                name,
                device,
                compile_,
                f"{t['collect'] * 1e3:.1f}",
                f"{t['update'] * 1e3:.1f}",
            ]
            print("| " + " | ".join(cells) + " |", flush=True)
    seen = see()  # while this process holds no memory of the GPU
    print("\n| task | worlds | physics, steps/s | environment, steps/s |\n|---|---|---|---|")
    for id, num_envs, options in WORLDS:
        bare, whole = simulate(id, num_envs, **options)
        print(f"| {id} {options or ''} | {num_envs} | {bare:,.0f} | {whole:,.0f} |", flush=True)
    speak(Shape(), "cuda")
    place("cuda", ["experiment=tabletop_token", "compile=never"])
    sys.exit(tests.returncode or seen)


if __name__ == "__main__":
    main()
