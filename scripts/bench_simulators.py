"""Measure environment steps per CPU second of our engine, of a ``mj_step`` loop and of EnvPool.

    python scripts/bench_simulators.py [--tasks Ant Tabletop ..] [--envs 256] [--seconds 1]
    [--rounds 5] [--json FILE]

Each uses one thread. A round measures each of them once, in a process of its own that steps random
actions for --seconds of CPU time. The speed of a shared machine changes within minutes, so ratios
are computed within a round. The script prints medians over the rounds, and the smallest and largest
ratio to EnvPool; --json stores every round. The loop is a lower bound: Python calls mj_step with
nstep = decimation on one MjData after the other and reads no results. Memory is the increase of the
process while the environments are built.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import benchmark

ENVPOOL = {
    **{name: f"{name}-v5" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")},
    "PandaPickCube": "PandaPickCube-v1",
    "Go1Joystick": "Go1JoystickFlatTerrain-v1",
}
"""Our task -> EnvPool's task with the same robot."""
AT_MOST = {"PandaPickCube": 64, "Go1Joystick": 64}
"""Largest number of EnvPool's environments. It holds the meshes once per environment; its memory
is scaled from this number."""


def rate(step: Callable[[], None], per_call: int, seconds: float) -> float:
    """Return environment steps per CPU second."""
    step()
    start, calls = time.process_time(), 0
    while (spent := time.process_time() - start) < seconds:
        step()
        calls += 1
    return calls * per_call / spent


def measure(task: str, engine: str, envs: int, seconds: float) -> dict[str, float]:
    """Return the steps per CPU second ("rate") and the memory of the environments ("mb")."""
    import torch

    import embodied_envs

    torch.set_num_threads(1)
    if engine == "loop":
        import mujoco

        from embodied_envs import tasks
        from embodied_envs.physics import make

        task_class = tasks.find(task)
        assert task_class is not None
        instance = task_class()
        model = make.compile_model(instance, task)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        datas = [mujoco.MjData(model) for _ in range(envs)]
        start = embodied_envs.make(
            task, num_envs=envs, seeds=list(range(envs)), simulator="mujoco", num_threads=1
        )
        start.reset()
        for i, data in enumerate(datas):
            data.qpos[:] = start.s["qpos"][i].numpy()  # pyright: ignore[reportAttributeAccessIssue]
            data.ctrl[:] = start.s["ctrl"][i].numpy()  # pyright: ignore[reportAttributeAccessIssue]

        def step() -> None:
            for data in datas:
                mujoco.mj_step(model, data, nstep=instance.decimation)
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cameras = ("front",) if engine == "camera" else ()
        id, simulator = (ENVPOOL[task], "envpool") if engine == "envpool" else (task, "mujoco")
        env = embodied_envs.make(
            id,
            num_envs=envs,
            seeds=list(range(envs)),
            simulator=simulator,
            num_threads=1,
            cameras=cameras,
        )
        env.reset()
        actions = torch.rand(50, envs, env.action_spec.size) * 2 - 1  # pyright: ignore[reportAttributeAccessIssue]
        turn = iter(range(10**9))

        def step() -> None:
            env.step(actions[next(turn) % 50])

    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"rate": rate(step, envs, seconds), "mb": memory / 1024}


def run(task: str, engine: str, args: argparse.Namespace) -> dict[str, float]:
    """Return ``measure`` of a new process."""
    envs = min(args.envs, AT_MOST.get(task, args.envs)) if engine == "envpool" else args.envs
    command = [sys.executable, __file__, "--tasks", task, "--envs", str(envs), "--one", engine]
    command += ["--seconds", str(args.seconds)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(process.stdout.splitlines()[-1])
    return result | {"mb": result["mb"] * args.envs / envs}


def main() -> None:
    parser = benchmark.argument_parser(__doc__, rounds=5, json=None)
    parser.add_argument("--tasks", nargs="+", default=[*ENVPOOL, "Tabletop"])
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.tasks[0], args.one, args.envs, args.seconds)))
        return
    rows: dict[str, list[dict[str, dict[str, float]]]] = {}
    widths = (12, 9, 9, 9, 16, 9, 9)
    heads = (
        "ours /cpu-s",
        "mj_step",
        "EnvPool",
        "/ EnvPool",
        "least .. most",
        "MB ours",
        "EnvPool",
    )
    print(
        f"{'task':<15}"
        + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    )
    for task in args.tasks:
        kinds = [
            "ours",
            "loop",
            *(["envpool"] if task in ENVPOOL else []),
            *(["camera"] if task == "Tabletop" else []),
        ]
        rows[task] = [
            {engine: run(task, engine, args) for engine in kinds} for _ in range(args.rounds)
        ]

        def middle(
            engine: str, quantity: str, rounds: list[dict[str, dict[str, float]]] = rows[task]
        ) -> str:
            return f"{statistics.median(r[engine][quantity] for r in rounds):,.0f}"

        cells = [middle("ours", "rate"), middle("loop", "rate")]
        if task in ENVPOOL:
            ratios = [r["ours"]["rate"] / r["envpool"]["rate"] for r in rows[task]]
            cells += [middle("envpool", "rate"), f"{statistics.median(ratios):.2f}"]
            cells += [
                f"{min(ratios):.2f} .. {max(ratios):.2f}",
                middle("ours", "mb"),
                middle("envpool", "mb"),
            ]
        print(
            f"{task:<15}" + "".join(f"{x:>{w}}" for x, w in zip(cells, widths, strict=False)),
            flush=True,
        )
        if "camera" in kinds:
            every = ", ".join(f"{r['camera']['rate']:,.0f}" for r in rows[task])
            print(f"{'  with 64x64':<15}{middle('camera', 'rate'):>12}  ({every})", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
