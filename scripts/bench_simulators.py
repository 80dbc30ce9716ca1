"""Environment steps per CPU-second of our engine, of a plain ``mj_step`` loop and of EnvPool, one thread each.

    python scripts/bench_simulators.py [--tasks Ant Tabletop ..] [--envs 256] [--seconds 3] [--json FILE]

Every row is a process of its own that steps random actions for --seconds of CPU time, three times, best of three; so
other load on the machine costs little. The plain loop is what MuJoCo itself needs: Python calls mj_step with nstep =
decimation on one MjData after the other, and looks at nothing. Memory is what making the environments added.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ENVPOOL = {
    **{name: f"{name}-v5" for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")},
    "PandaPickCube": "PandaPickCube-v1",
    "Go1Joystick": "Go1JoystickFlatTerrain-v1",
}
"""Task of ours -> EnvPool's of the same robot."""
AT_MOST = {"PandaPickCube": 64, "Go1Joystick": 64}
"""Environments of EnvPool, which holds a copy of the meshes for each; its memory is scaled up from that."""


def rate(step: Callable[[], None], per_call: int, seconds: float) -> float:
    """Steps per CPU-second, best of three."""
    best = 0.0
    for _ in range(3):
        step()
        start, calls = time.process_time(), 0
        while (spent := time.process_time() - start) < seconds / 3:
            step()
            calls += 1
        best = max(best, calls * per_call / spent)
    return best


def measure(task: str, how: str, envs: int, seconds: float) -> dict[str, float]:
    """In this process: {"rate": steps per CPU-second, "mb": memory that the environments took}."""
    import torch

    import embodied_envs

    torch.set_num_threads(1)
    if how == "loop":
        import mujoco

        from embodied_envs import mujoco_make, tasks

        kind = tasks.find(task)
        assert kind is not None
        made = kind()
        model = mujoco_make.compiled(made, task)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        datas = [mujoco.MjData(model) for _ in range(envs)]
        start = embodied_envs.make(task, num_envs=envs, seeds=list(range(envs)), simulator="mujoco", num_threads=1)
        start.reset()
        for i, data in enumerate(datas):
            data.qpos[:] = start.s["qpos"][i].numpy()  # pyright: ignore[reportAttributeAccessIssue]
            data.ctrl[:] = start.s["ctrl"][i].numpy()  # pyright: ignore[reportAttributeAccessIssue]

        def step() -> None:
            for data in datas:
                mujoco.mj_step(model, data, nstep=made.decimation)
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cameras = ("front",) if how == "camera" else ()
        id, simulator = (ENVPOOL[task], "envpool") if how == "envpool" else (task, "mujoco")
        env = embodied_envs.make(
            id, num_envs=envs, seeds=list(range(envs)), simulator=simulator, num_threads=1, cameras=cameras
        )
        env.reset()
        actions = torch.rand(50, envs, env.action_spec.size) * 2 - 1  # pyright: ignore[reportAttributeAccessIssue]
        turn = iter(range(10**9))

        def step() -> None:
            env.step(actions[next(turn) % 50])

    found = rate(step, envs, seconds)
    return {"rate": found, "mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=[*ENVPOOL, "Tabletop"])
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.tasks[0], args.one, args.envs, args.seconds)))
        return
    rows: dict[str, dict[str, dict[str, float]]] = {}
    heads = ("ours /cpu-s", "mj_step loop", "EnvPool", "/ EnvPool", "MB ours", "EnvPool")
    print(
        f"{'task':<15}" + "".join(f"{head:>{width}}" for head, width in zip(heads, (14, 14, 14, 11, 9, 9), strict=True))
    )
    for task in args.tasks:
        kinds = ["ours", "loop", *(["envpool"] if task in ENVPOOL else []), *(["camera"] if task == "Tabletop" else [])]
        rows[task] = {}
        for how in kinds:
            envs = min(args.envs, AT_MOST.get(task, args.envs)) if how == "envpool" else args.envs
            command = [sys.executable, __file__, "--tasks", task, "--envs", str(envs), "--one", how]
            command += ["--seconds", str(args.seconds)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows[task][how] = json.loads(out.splitlines()[-1])
            rows[task][how]["mb"] *= args.envs / envs
        r = rows[task]
        line = f"{task:<15}{r['ours']['rate']:>14,.0f}{r['loop']['rate']:>14,.0f}"
        if "envpool" in r:
            line += f"{r['envpool']['rate']:>14,.0f}{r['ours']['rate'] / r['envpool']['rate']:>11.2f}"
            line += f"{r['ours']['mb']:>9.0f}{r['envpool']['mb']:>9.0f}"
        print(line, flush=True)
        if "camera" in r:
            print(f"{'  with 64x64':<15}{r['camera']['rate']:>14,.0f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
