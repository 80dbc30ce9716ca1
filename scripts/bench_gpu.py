"""Measure training on a GPU, part by part.

    python scripts/bench_gpu.py [--part NAME ..] [--json FILE] [--tiny]

    language       a PPO step of a language model with its critic (bench_gpu_language.py)
    oft            OpenVLA-OFT with adapters (bench_gpu_vla.py)
    pi0_frozen     π0, its expert trained
    pi0_trained    π0, all weights trained
    ant, go1, panda, tabletop
                   training, environment, physics and pictures (bench_gpu_simulation.py)
    placements     a robot policy in one process, fused over Ray, and time-shared processes
    placements_language
                   the same with a language model and its critic
    mlp            experiments with EnvPool's simulators on the CPU, policy on CPU and GPU
    tests          the tests that need a GPU

Without --part all parts run in this order, which is that of their value. Each part is a process of
its own with at most --limit seconds, and is ended with its children. A part that fails does not
stop the others, and neither does a figure within a part. Figures are printed, and stored in the
JSON file as soon as they are measured, with date, device, versions and commit. An entry replaces
that of the same part, device, commit and size.

``--tiny`` runs all parts with small sizes; it needs no GPU and stores nothing unless --json is
given. docs/gpu.md describes the figures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import benchmark

LIMIT_S = 290.0
"""Time limit of a part, seconds."""
PACKAGES = ("torch", "triton", "transformers", "mujoco", "mujoco-warp", "warp-lang", "ray")
VLA = ("oft", "pi0_frozen", "pi0_trained")
SIMULATIONS = ("ant", "go1", "panda", "tabletop")
PARTS = ("language", *VLA, *SIMULATIONS, "placements", "placements_language", "mlp", "tests")

NO_VIDEO = ["evaluation.video_episodes=0"]
SETTINGS = {
    "bench_fast": ["experiment=bench_fast", *NO_VIDEO],
    "bench_wide": ["experiment=bench_wide", *NO_VIDEO],
    "bench_wide_1024": [
        *("experiment=bench_wide", "env.num_envs=1024", "env.num_threads=0"),
        *("algorithm.global_batch_size=16384", *NO_VIDEO),
    ],
}
"""Name -> options of the part ``mlp``."""
TINY_TRAINING = [
    *("env.id=Hopper", "env.simulator=mujoco", "env.num_envs=4", "algorithm.horizon=8"),
    *("algorithm.global_batch_size=32", "model.hidden=[8]", "compile=never"),
    *NO_VIDEO,
]
SHAPE = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
SHAPE |= {"num_key_value_heads": 2, "intermediate_size": 4864, "max_position_embeddings": 128}
EXPERIMENTS = {
    "placements": ["experiment=tabletop_token", "compile=never", "cloning.steps=0", *NO_VIDEO],
    "placements_language": [
        *("experiment=arithmetic", "mode=reasoning", "warm_start.steps=0", "eval_every=0"),
        *("algorithm.response_length=64", "compile=never", "actor.model.dtype=bfloat16"),
        *(f"actor.model.architecture.{name}={value}" for name, value in SHAPE.items()),
    ],
}
"""Part -> options of the experiment; the language model has Qwen2.5-0.5B's layers."""
TINY_EXPERIMENTS = {
    "placements": TINY_TRAINING,
    "placements_language": [
        *("experiment=arithmetic", "mode=reasoning", "warm_start.steps=0", "eval_every=0"),
        *("algorithm.rollout_batch_size=4", "algorithm.global_batch_size=4", "compile=never"),
    ],
}
PLACEMENTS = {
    "one_process": [],
    "fused": ["placement=fused", "cluster.devices_per_node=1"],
    "time_shared": ["placement=colocated", "cluster.devices_per_node=1"],
}


# ------------------------------------------------------------------------------------------- parts
def run_training(options: Sequence[str], updates: int) -> dict[str, float]:
    """Train, and return the means of the metrics over the second half of the updates.

    Raises:
        RuntimeError: The run failed; the message holds the end of its stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"run_dir={folder}/run", f"updates={updates}", "evaluation.episodes=1"]
        command = [sys.executable, "-m", "embodied_ppo.commands.main", "train", "--quiet"]
        process = subprocess.run([*command, *options, *fixed], capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(process.stderr[-400:])
        rows = benchmark.read_metrics(Path(folder, "run"))[-(updates // 2) :]
    means = {tag: [row[tag] for row in rows if row.get(tag) is not None] for tag in rows[-1]}
    return {tag: sum(values) / len(values) for tag, values in means.items() if values}


def measure_placements(
    report: benchmark.Report, experiment: Sequence[str], device: str, updates: int
) -> None:
    """Report times, idle share and memory of each placement, and the memory that plan predicts."""
    for name, placement in PLACEMENTS.items():
        options = [*experiment, *placement, f"device={device}"]
        plan = report.attempt(f"{name}/predicted", partial(benchmark.run_command, "plan", *options))
        if plan is not None:
            header, *rows = plan["memory"]
            together = dict(zip(header, rows[-1], strict=True))
            report(f"{name}/predicted", {group: together[group] for group in header[1:]})
        means = report.attempt(name, partial(run_training, options, updates))
        if means is None:
            continue
        phases = [means[f"time/{phase}_s"] for phase in ("collect", "update", "publish")]
        report(f"{name}/update_s", sum(phases))
        report(f"{name}/swap_s", means.get("time/swap_s", 0.0))
        if "device/idle" in means:
            report(f"{name}/idle_share", means["device/idle"])
        suffix = "_gpu_peak_gb" if device == "cuda" else "_peak_gb"
        peaks = {tag: x for tag, x in means.items() if tag.startswith("memory/")}
        peaks = {tag[7 : -len(suffix)]: x for tag, x in peaks.items() if tag.endswith(suffix)}
        if peaks:
            report(f"{name}/peak_gib", peaks)


def measure_mlp(report: benchmark.Report, device: str, *, tiny: bool) -> None:
    """Report the times of acting and learning on CPU and GPU."""
    kinds = [("cpu", "always"), ("cuda", "never"), ("cuda", "always")]
    for name, options in {"tiny": TINY_TRAINING}.items() if tiny else SETTINGS.items():
        for kind, compile_ in [("cpu", "never")] if device == "cpu" else kinds:
            label = f"{name}/{kind}/compile_{compile_}"
            run = [*options, f"device={kind}", f"compile={compile_}"]
            means = report.attempt(label, partial(run_training, run, 4 if tiny else 40))
            if means is None:
                continue
            for phase in ("collect", "update"):
                report(f"{label}/{phase}_ms", means[f"time/{phase}_s"] * 1e3)


def run_tests(report: benchmark.Report, *, tiny: bool) -> None:
    """Run the tests that need a GPU; without one they are skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-m", "gpu", "-p", "no:cacheprovider"]
    tests = ["tests/core"] if tiny else ["tests"]
    process = subprocess.run([*command, *tests], cwd=benchmark.ROOT, capture_output=True, text=True)
    lines = process.stdout.splitlines()
    report("summary", lines[-1] if lines else process.stderr[-400:])
    for outcome in ("FAILED", "ERROR", "SKIPPED"):
        if matching := [line for line in lines if line.startswith(outcome)]:
            report(outcome.lower(), matching)
    if process.returncode:
        raise SystemExit(f"pytest: exit status {process.returncode}")


def measure(part: str, *, tiny: bool) -> None:
    """Measure one part in this process and print its figures as lines of JSON."""
    import torch

    report = benchmark.Report()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if part == "language":
        import bench_gpu_language as language

        language.measure(report, language.TINY if tiny else language.Shape(), device)
    elif part in VLA:
        import bench_gpu_vla

        bench_gpu_vla.run(report, part, device, tiny=tiny)
    elif part in SIMULATIONS:
        import bench_gpu_simulation as simulation

        common = [*(simulation.TINY if tiny else ()), f"device={device.type}"]
        config = simulation.read_config([*simulation.EXPERIMENTS[part], *common])
        with tempfile.TemporaryDirectory() as folder:
            report.attempt(
                "training", lambda: simulation.measure(report, config, device, Path(folder))
            )
        if part in simulation.PICTURES:
            config = simulation.read_config([*simulation.PICTURES[part], *common])
            report.attempt(
                "pictures_per_s", lambda: simulation.measure_pictures(report, config.env, device)
            )
    elif part in EXPERIMENTS:
        experiment = TINY_EXPERIMENTS[part] if tiny else EXPERIMENTS[part]
        measure_placements(report, experiment, device.type, updates=4 if tiny else 10)
    elif part == "mlp":
        measure_mlp(report, device.type, tiny=tiny)
    else:
        run_tests(report, tiny=tiny)


# --------------------------------------------------------------------------------------- the script
def device_name() -> str:
    """Return the name of the GPU, or "cpu".

    A separate process reads it, so that this process does not allocate memory on the GPU.
    """
    code = (
        "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'cpu')"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return process.stdout.strip() or "unknown"


def formatted(value: Any) -> str:
    """Return a figure for the table."""
    return f"{value:,.4g}" if isinstance(value, float) else json.dumps(value)


def run_part(
    part: str, common: dict[str, Any], results: benchmark.Results, limit_s: float
) -> dict[str, Any]:
    """Run a part in a process of its own; print and store each figure as it comes."""
    entry: dict[str, Any] = {
        "part": part,
        "status": "running",
        **common,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "figures": {},
        "failures": {},
    }

    def store(line: str) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            return  # a library printed it
        if isinstance(message, dict) and "figure" in message:
            entry["figures"][message["figure"]] = message["value"]
            benchmark.print_row([part, message["figure"], formatted(message["value"])])
        elif isinstance(message, dict) and "failure" in message:
            entry["failures"][message["failure"]] = message["message"]
            benchmark.print_row([part, message["failure"], f"not measured: {message['message']}"])
        results.save(entry)

    results.save(entry)
    command = [sys.executable, __file__, "--child", "--part", part]
    command += ["--tiny"] if common["tiny"] else []
    if reason := benchmark.run_part(command, limit_s, store):
        store(json.dumps({"failure": part, "message": reason}))
    entry["status"] = "failed" if entry["failures"] else "ok"
    results.save(entry)
    return entry


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="only these")
    parser.add_argument("--json", type=Path, help="file of the results; docs/results/gpu.json")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a part")
    parser.add_argument("--commit", default=benchmark.commit(), help="recorded with the results")
    parser.add_argument("--tiny", action="store_true", help="small sizes; needs no GPU")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        measure(args.part[0], tiny=args.tiny)
        return 0
    device = device_name()
    if device == "cpu" and not args.tiny:
        raise SystemExit("no CUDA device: nothing to measure (--tiny runs the same code small)")
    common = {
        "tiny": args.tiny,
        "device": device,
        "commit": args.commit,
        "versions": benchmark.versions(*PACKAGES),
    }
    with tempfile.TemporaryDirectory() as folder:
        default = Path(folder, "gpu.json") if args.tiny else benchmark.RESULTS / "gpu.json"
        results = benchmark.Results(
            (args.json or default).absolute(),
            ("part", "device", "commit", "tiny"),
            lambda entry: (entry["device"], entry["commit"], PARTS.index(entry["part"])),
        )
        print(f"{device}, commit {args.commit}, {common['versions']}")
        benchmark.print_header(["part", "figure", "value"])
        entries = [run_part(part, common, results, args.limit) for part in args.part]
    failed = [entry["part"] for entry in entries if entry["failures"]]
    print(f"{len(entries) - len(failed)} of {len(entries)} parts complete")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
