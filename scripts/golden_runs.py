"""Record short training runs, or compare new ones with a record, bit for bit.

A refactoring must not change results. Before it, ``record FILE`` trains the runs below and writes
their metrics and the SHA-256 of every tensor of their last checkpoint. After it, ``compare FILE``
trains them again and reports each difference:

    python scripts/golden_runs.py record golden.json
    python scripts/golden_runs.py compare golden.json [--only NAME ..]

Exit code 1 if anything differs. Both commands must run on the same machine with the same library
versions: other vector instructions or another torch round differently. All runs together take about
five minutes on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

COMMAND = Path(sys.executable).with_name("embodied-ppo")
TESTS = Path(__file__).resolve().parent.parent / "tests"
# Metrics that depend on the machine and its load.
MEASURED = ("time/", "speed/", "memory/", "weights/", "device/")

COMMON = ["evaluation.video_episodes=0", "threads=1", "device=cpu"]
ROBOT = [
    *COMMON,
    "env.num_envs=8",
    "algorithm.horizon=16",
    "algorithm.global_batch_size=32",
    "algorithm.update_epoch=2",
    "evaluation.episodes=4",
    "updates=4",
    "compile=never",
]
CHEETAH = ["experiment=halfcheetah", *ROBOT]
CARTPOLE = ["env.id=CartPole-v1", *ROBOT]
VLA = [
    *ROBOT,
    "algorithm.horizon=4",
    "algorithm.global_batch_size=16",
    "updates=3",
    "algorithm.critic_warmup=1",
    "env.max_episode_steps=20",
    "evaluation.episodes=2",
    "cloning.steps=3",
    "cloning.foresight_steps=2",
    "cloning.episodes=8",
    "cloning.batch_size=4",
]
LANGUAGE = [
    *COMMON,
    "experiment=arithmetic",
    *(f"actor.model.architecture.{name}=32" for name in ("hidden_size", "intermediate_size")),
    "warm_start.steps=5",
    "algorithm.rollout_batch_size=16",
    "algorithm.global_batch_size=8",
    "evaluation.episodes=8",
    "updates=3",
]
PI0 = [
    *VLA[: -len([option for option in VLA if option.startswith("cloning.")])],
    "experiment=pi0_tabletop",
    "model.checkpoint={pi0}",
    "model.dtype=float32",
    "env.image_size=16",
    "env.num_envs=2",
    "algorithm.micro_batch_size=4",
    "algorithm.global_batch_size=8",
    "algorithm.critic_warmup=0",
]

# Name -> options of ``embodied-ppo train``; ``{pi0}`` stands for a directory with a small pi0 of
# random weights.
RUNS: dict[str, list[str]] = {
    "halfcheetah_eager": CHEETAH,
    "halfcheetah_compiled": [*CHEETAH, "compile=always"],
    "halfcheetah_chunks": [*CHEETAH, "env.action_chunk=4", "model.shared_backbone=true"],
    "cartpole_dual_clip_kl": [
        *CARTPOLE,
        "algorithm.clip_ratio_c=3",
        "algorithm.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.entropy_bonus=0.01",
        "algorithm.reward_norm=running",
        "algorithm.lr_schedule=adaptive",
    ],
    "tabletop_token": ["experiment=tabletop_token", *VLA],
    "tabletop_flow": ["experiment=tabletop_flow", *VLA],
    "tabletop_gaussian": ["experiment=tabletop_gaussian", *VLA],
    "pi0_tabletop": PI0,
    "arithmetic_critic": LANGUAGE,
    "arithmetic_grpo": [
        *LANGUAGE,
        "algorithm.adv_type=grpo",
        "algorithm.group_size=4",
        "algorithm.use_kl_loss=true",
        "algorithm.micro_batch_tokens=64",
    ],
    "arithmetic_kl": [*LANGUAGE, "algorithm.use_kl_in_reward=true"],
    "fused": [*CARTPOLE, "placement=fused", "cluster.devices_per_node=2"],
    "disaggregated": [*CARTPOLE, "placement=disaggregated", "cluster.devices_per_node=2"],
    "hybrid": [*CARTPOLE, "placement=hybrid", "cluster.devices_per_node=2"],
    "pipelined": [
        *CARTPOLE,
        "placement=pipelined",
        "cluster.devices_per_node=2",
        "cluster.stages=2",
    ],
    "arithmetic_disaggregated": [
        *LANGUAGE,
        "placement=disaggregated",
        "cluster.devices_per_node=2",
    ],
    "halfcheetah_resumed": [*CHEETAH, "save_every=2", "updates=2"],
}
# Runs that are started a second time, with these options added.
CONTINUED = {"halfcheetah_resumed": ["updates=4", "resume=auto"]}


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of nested containers with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key in value:
            yield from tensors(value[key], f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from tensors(item, f"{path}/{i}")


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's type, shape and bytes."""
    dense = tensor.detach().cpu().contiguous()
    head = f"{dense.dtype} {tuple(dense.shape)} ".encode()
    return hashlib.sha256(head + dense.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def result(run_dir: Path) -> dict[str, Any]:
    """Metrics of every update and hashes of the last checkpoint's tensors."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = (run_dir / "checkpoints" / "latest").resolve()
    hashes = {}
    for name in ("policy.pt", "training.pt"):
        state = torch.load(last / name, map_location="cpu", weights_only=True)
        hashes |= {f"{name}{path}": digest(tensor) for path, tensor in tensors(state)}
    kept = [{tag: x for tag, x in row.items() if not tag.startswith(MEASURED)} for row in rows]
    return {"metrics": kept, "tensors": hashes}


def train(name: str, folder: Path) -> dict[str, Any]:
    """Train one run in ``folder`` as a user would.

    Raises RuntimeError with the command's output if it fails.
    """
    if any("{pi0}" in option for option in RUNS[name]) and not (folder / "pi0").exists():
        sys.path.insert(0, str(TESTS))
        importlib.import_module("tiny_pi0_checkpoint").write_checkpoint(
            folder / "pi0", max_state_dim=16
        )
    options = [option.replace("{pi0}", str(folder / "pi0")) for option in RUNS[name]]
    run_dir = folder / name
    for extra in ([], *([CONTINUED[name]] if name in CONTINUED else [])):
        command = [str(COMMAND), "train", "--quiet", *options, f"run_dir={run_dir}", *extra]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        if done.returncode:
            raise RuntimeError(f"{name}: {' '.join(command)}\n{done.stderr[-3000:]}")
    return result(run_dir)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each metric or tensor that differs."""
    lines = []
    if len(before["metrics"]) != len(after["metrics"]):
        lines.append(f"{len(before['metrics'])} rows of metrics, now {len(after['metrics'])}")
    for old, new in zip(before["metrics"], after["metrics"], strict=False):
        at = f"update {old.get('update')}"
        for tag in sorted(old.keys() | new.keys()):
            if old.get(tag) != new.get(tag):
                lines.append(f"{at}: {tag} {old.get(tag)!r}, now {new.get(tag)!r}")
    for path in sorted(before["tensors"].keys() | after["tensors"].keys()):
        if before["tensors"].get(path) != after["tensors"].get(path):
            lines.append(f"tensor {path} differs")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS), metavar="NAME")
    arguments = parser.parse_args()
    recorded = json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only:
            outcome = train(name, Path(folder))
            if arguments.action == "record":
                recorded[name] = outcome
                arguments.file.write_text(json.dumps(recorded, indent=1) + "\n")
                print(
                    f"{name}: {len(outcome['metrics'])} rows, {len(outcome['tensors'])} tensors",
                    flush=True,
                )
                continue
            lines = (
                differences(recorded[name], outcome) if name in recorded else ["is not recorded"]
            )
            failed |= bool(lines)
            print(f"{name}: {'equal' if not lines else f'{len(lines)} differences'}", flush=True)
            for line in lines[:10]:
                print(f"  {line}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
