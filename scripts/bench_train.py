"""CPU time per environment step of training, by phase, next to two floors: the simulator and the
matrix work alone.

    python scripts/bench_train.py [EXPERIMENT ...] [any.option=value ...]        (default: the four
    bench_* experiments)

Training is the user's own command, `embodied-ppo train experiment=NAME`; its summary.json holds the
same figures. The floors are measured before and after it, and their median counts: such machines
are shared. Steady: CPU time and ratios within one run; wall-clock speed is only printed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

import embodied_envs
from embodied_ppo.core.types import Box, Discrete

EXPERIMENTS = ("bench_fast", "bench_classic", "bench_wide", "bench_ant")
PHASES = ("simulate", "act", "advantages", "update", "other")


def simulator_alone(config: dict[str, Any], steps: int = 600) -> tuple[float, int, int]:
    """CPU microseconds per environment step with random actions; sizes of an observation and an
    action.
    """
    options, n = config["env"], config["env"]["num_envs"]
    env = embodied_envs.make(
        options["id"],
        num_envs=n,
        seeds=list(range(n)),
        simulator=options["simulator"],
        num_threads=options["num_threads"] or None,
        kwargs=options["kwargs"],
    )
    env.reset()
    spec = env.action_spec
    if isinstance(spec, Discrete):
        actions, size = torch.randint(spec.n, (steps + 20, n)), spec.n
    else:
        assert isinstance(spec, Box)
        actions, size = torch.rand(steps + 20, n, spec.size) * 2 - 1, spec.size
    for t in range(20):
        env.step(actions[t])
    start = time.process_time()
    for t in range(steps):
        env.step(actions[20 + t])
    used = time.process_time() - start
    assert not isinstance(env.obs_spec, dict)
    obs = env.obs_spec.shape[0]
    env.close()
    return used / (steps * n) * 1e6, obs, size


def matrix_work(config: dict[str, Any], obs: int, actions: int, repeats: int = 5) -> float:
    """CPU microseconds per environment step of the bare products: acting, and forward and backward
    of every epoch.
    """
    a, model, n = config["algorithm"], config["model"], config["env"]["num_envs"]
    hidden = list(model["hidden"])
    trunk = list(zip([obs, *hidden], hidden, strict=False))
    layers = trunk * (1 if model["shared_backbone"] else 2) + [
        (hidden[-1], actions),
        (hidden[-1], 1),
    ]
    first = (
        {0} if model["shared_backbone"] else {0, len(trunk)}
    )  # nobody wants the gradient of an observation

    def products(
        rows: int, backward: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        work = []
        for i, (size_in, size_out) in enumerate(layers):
            x, w, y = (
                torch.randn(rows, size_in),
                torch.randn(size_out, size_in),
                torch.randn(rows, size_out),
            )
            work.append((x, w.T, torch.empty(rows, size_out)))
            if backward:
                work.append((y.T, x, torch.empty(size_out, size_in)))
                if i not in first:
                    work.append((y, w, torch.empty(rows, size_in)))
        return work

    def seconds(work: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], times: int) -> float:
        for x, y, out in work * 3:
            torch.mm(x, y, out=out)
        start = time.process_time()
        for _ in range(times):
            for x, y, out in work:
                torch.mm(x, y, out=out)
        return time.process_time() - start

    samples, size = a["horizon"] * n, a["global_batch_size"]
    minibatches = a["update_epoch"] * samples // size
    act, learn = products(n, False), products(size, True)
    used = seconds(act, a["horizon"] * repeats) + seconds(learn, minibatches * repeats)
    return used / repeats / samples * 1e6


def bench(experiment: str, words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "embodied_ppo.commands.main"]
    with tempfile.TemporaryDirectory() as folder:
        shown = subprocess.run(
            [*command, "config", f"experiment={experiment}", *words, "--json"], capture_output=True
        )
        if shown.returncode:
            raise SystemExit(shown.stderr.decode())
        config: dict[str, Any] = {"env": {}, "model": {}, "algorithm": {}}
        for path, option in json.loads(shown.stdout).items():
            section, _, name = path.rpartition(".")
            config.setdefault(section, {})[name] = option["value"]
        floors = [simulator_alone(config) for _ in range(3)]
        products = [matrix_work(config, *floors[0][1:]) for _ in range(3)]
        options = [
            f"experiment={experiment}",
            *words,
            f"run_dir={folder}/run",
            "evaluation.video_episodes=0",
        ]
        done = subprocess.run(
            [*command, "train", "--quiet", "--json", *options], capture_output=True
        )
        if done.returncode:
            raise SystemExit(done.stderr.decode())
        floors += [simulator_alone(config) for _ in range(3)]
        products += [matrix_work(config, *floors[0][1:]) for _ in range(3)]
    summary = json.loads(done.stdout)
    figures = {
        "experiment": experiment,
        "total": summary["cpu_us_per_step"],
        **summary["cpu_us_per_step_by_phase"],
    }
    figures |= {
        "simulator": statistics.median(f[0] for f in floors),
        "matrix": statistics.median(products),
    }
    return figures | {
        k: summary[k] for k in ("steps_per_s", "peak_rss_mb", "startup_s", "final_return")
    }


def main() -> None:
    torch.set_num_threads(1)
    experiments = [word for word in sys.argv[1:] if "=" not in word] or list(EXPERIMENTS)
    words = [word for word in sys.argv[1:] if "=" in word]
    print(
        f"CPU us per environment step; {' '.join(words) or 'as shipped'}; torch {torch.__version__}"
    )
    columns = ("total", *PHASES, "simulator", "matrix")
    print(
        "| experiment | "
        + " | ".join(columns)
        + " | total / simulator | total / floors | steps/s | MB | start-up s |"
    )
    print("|---" * (len(columns) + 6) + "|")
    for name in experiments:
        f = bench(name, words)
        cells = [f"{f[c]:.1f}" for c in columns]
        cells += [
            f"{f['total'] / f['simulator']:.2f}",
            f"{f['total'] / (f['simulator'] + f['matrix']):.2f}",
        ]
        cells += [f"{f['steps_per_s']:,.0f}", f"{f['peak_rss_mb']:.0f}", f"{f['startup_s']:.1f}"]
        print("| " + " | ".join([name, *cells]) + " |", flush=True)


if __name__ == "__main__":
    main()
