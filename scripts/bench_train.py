"""Measure the CPU time per environment step of training, by phase.

    python scripts/bench_train.py [EXPERIMENT ...] [any.option=value ...]

The default is the four bench_* experiments. Training is `embodied-ppo train experiment=NAME`, whose
summary.json has the same figures. Two lower bounds are measured before and after it: the simulator
alone and the matrix products alone; their medians are printed, because the machines are shared. CPU
time and ratios within a run are reproducible; the wall-clock speed is printed for information.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import benchmark
import torch

import embodied_envs
from embodied_ppo.core.types import Box, Discrete

EXPERIMENTS = ("bench_fast", "bench_classic", "bench_wide", "bench_ant")
PHASES = ("simulate", "act", "advantages", "update", "other")


def simulator_alone(config: dict[str, Any], steps: int = 600) -> tuple[float, int, int]:
    """Return CPU microseconds per environment step with random actions, and two sizes.

    The sizes are those of an observation and of an action.
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
    """Return CPU microseconds per environment step of the matrix products alone.

    These are the products of acting, and of forward and backward pass in every epoch.
    """
    a, model, n = config["algorithm"], config["model"], config["env"]["num_envs"]
    hidden = list(model["hidden"])
    trunk = list(zip([obs, *hidden], hidden, strict=False))
    layers = trunk * (1 if model["shared_backbone"] else 2) + [
        (hidden[-1], actions),
        (hidden[-1], 1),
    ]
    # The first layer of a trunk needs no gradient of its input, the observation.
    first = {0} if model["shared_backbone"] else {0, len(trunk)}

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


def bench(experiment: str, options: list[str]) -> dict[str, Any]:
    """Return the figures of one experiment, in CPU microseconds per environment step."""
    config: dict[str, Any] = {"env": {}, "model": {}, "algorithm": {}}
    shown = benchmark.run_command("config", f"experiment={experiment}", *options)
    for path, option in shown.items():
        section, _, name = path.rpartition(".")
        config.setdefault(section, {})[name] = option["value"]
    bounds = [simulator_alone(config) for _ in range(3)]
    products = [matrix_work(config, *bounds[0][1:]) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"experiment={experiment}", f"run_dir={folder}/run", "evaluation.video_episodes=0"]
        summary = benchmark.run_command("train", *fixed, *options)
    bounds += [simulator_alone(config) for _ in range(3)]
    products += [matrix_work(config, *bounds[0][1:]) for _ in range(3)]
    return {
        "total": summary["cpu_us_per_step"],
        **summary["cpu_us_per_step_by_phase"],
        "simulator": statistics.median(bound[0] for bound in bounds),
        "matrix": statistics.median(products),
        **{name: summary[name] for name in ("steps_per_s", "peak_rss_mb", "startup_s")},
    }


def main() -> None:
    torch.set_num_threads(1)
    parser = benchmark.argument_parser(__doc__)
    parser.add_argument("words", nargs="*", help="EXPERIMENT or any.option=value")
    words = parser.parse_args().words
    experiments = [word for word in words if "=" not in word] or list(EXPERIMENTS)
    options = [word for word in words if "=" in word]
    changes = " ".join(options) or "as shipped"
    print(f"CPU us per environment step; {changes}; torch {torch.__version__}")
    columns = ("total", *PHASES, "simulator", "matrix")
    ratios = ("total / simulator", "total / both bounds", "steps/s", "MB", "start-up s")
    benchmark.print_header(["experiment", *columns, *ratios])
    for name in experiments:
        f = bench(name, options)
        cells = [f"{f[column]:.1f}" for column in columns]
        cells += [f"{f['total'] / f['simulator']:.2f}"]
        cells += [f"{f['total'] / (f['simulator'] + f['matrix']):.2f}"]
        cells += [f"{f['steps_per_s']:,.0f}", f"{f['peak_rss_mb']:.0f}", f"{f['startup_s']:.1f}"]
        benchmark.print_row([name, *cells])


if __name__ == "__main__":
    main()
