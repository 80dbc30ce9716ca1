"""What placements cost: an environment's round trip, stages that overlap, and a run fused over Ray against local.

    python scripts/bench_placement.py [--json FILE] [--rounds 3]

Round trip: an action goes to simulators in another process and their step comes back, 256 x 64 floats and 256 pictures
of 64 x 64, over one machine's TCP; least and median of 1,000. Stages: a simulator and a policy that take 20 ms each (a
slice half of it); milliseconds a step with one stage and with two. Fused: `experiment=bench_wide`, 60 updates, runs
taking turns; medians of the seconds of an update.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from embodied_ppo.placement.lines import Desk, Exchange, Server, dial
from embodied_ppo.placement.simulators import RemoteEnv, Simulators
from embodied_ppo.rollout import Rollout, Staged
from embodied_ppo.types import ArraySpec, Box, Decision, Step

CPU = torch.device("cpu")
SLOW_S = 0.020


class Still:
    """Simulators that answer the same for ever, after ``seconds``."""

    def __init__(self, n: int, shape: tuple[int, ...], dtype: torch.dtype, seconds: float) -> None:
        self.id, self.num_envs, self.device, self.max_episode_steps = "still", n, CPU, None
        self.obs_spec, self.action_spec = ArraySpec(shape, dtype), Box((-1.0,) * 8, (1.0,) * 8)
        self.seconds = seconds
        self.obs = torch.zeros(n, *shape, dtype=dtype)
        never = torch.zeros(n, dtype=torch.bool)
        self.answer = Step(self.obs, torch.zeros(n), never, never, ~never)

    def reset(self) -> Tensor:
        return self.obs

    def step(self, action: Tensor) -> Step:
        time.sleep(self.seconds)
        return self.answer

    def state(self) -> None:
        return None

    def restart(self, seeds: list[int]) -> None: ...

    def close(self) -> None: ...


class Slow(torch.nn.Module):
    """A policy that takes its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def encode(self, obs: Any) -> Any:
        return obs

    def noise(self, rows: int, generator: Any = None) -> Tensor:
        return torch.zeros(rows, 8)

    def act(self, inputs: Tensor, *, noise: Tensor | None = None) -> Decision:
        time.sleep(self.seconds)
        rows = len(inputs)
        return Decision(torch.zeros(rows, 8), torch.zeros(rows), torch.zeros(rows))

    def value(self, inputs: Tensor) -> Tensor:
        return torch.zeros(len(inputs))


KINDS: dict[str, Any] = {
    "floats": lambda n: Still(n, (64,), torch.float32, 0.0),
    "pictures": lambda n: Still(n, (64, 64, 3), torch.uint8, 0.0),
    "whole": lambda n: Still(n, (64,), torch.float32, SLOW_S),
    "half": lambda n: Still(n, (64,), torch.float32, SLOW_S / 2),
}


def serve(pipe: Any) -> None:
    torch.set_num_threads(1)
    exchange = Exchange("127.0.0.1", "secret", 60.0)
    pipe.send(exchange.address)
    Server(Simulators(lambda kind, seeds: KINDS[kind](len(seeds))), exchange).serve(1)


def measure() -> dict[str, float]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    desk = Desk(dial(here.recv(), "secret", "bench", peer="simulators", patience_s=60.0))
    found: dict[str, float] = {}
    for kind in ("floats", "pictures"):
        env: Any = RemoteEnv(desk, list(range(256)), kind=kind, device=CPU)
        action, took = torch.zeros(256, 8), list[float]()
        for _ in range(1000):
            start = time.perf_counter()
            env.step(action)
            took.append((time.perf_counter() - start) * 1e3)
        found[f"round trip of {kind}, ms (median)"] = statistics.median(took)
        found[f"round trip of {kind}, ms (least)"] = min(took)
    for stages in (1, 2):
        kind = "whole" if stages == 1 else "half"
        policy: Any = Slow(SLOW_S / stages)
        n = 64 // stages
        rollouts = []
        for i in range(stages):
            env = RemoteEnv(desk, list(range(n)), kind=kind, device=CPU)
            rollouts.append(Rollout(env, policy, seed=0, stage=i, stages=stages))
        staged = Staged(rollouts)
        staged.collect(5, update=0, version=0)
        start = time.perf_counter()
        staged.collect(50, update=1, version=0)
        found[f"20 ms + 20 ms, {stages} stage{'s' * (stages > 1)}, ms a step"] = (time.perf_counter() - start) * 20
    desk.done()
    process.join()
    return found


def fused(rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"local": [], "fused": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            for name, took in seconds.items():
                run = Path(folder) / f"{name}{i}"
                words = ["train", "--quiet", "--json", "experiment=bench_wide", "updates=60", "env_steps=null"]
                words += ["save_every=0", "evaluation.episodes=2", "evaluation.video_episodes=0", f"run_dir={run}"]
                words += [f"placement={name}"] + ["cluster.devices_per_node=1"] * (name == "fused")
                subprocess.run(
                    [sys.executable, "-m", "embodied_ppo.cli", *words], check=True, stdout=subprocess.DEVNULL
                )
                rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
                phases = ("collect", "update", "publish")
                took += [sum(r[f"time/{p}_s"] for p in phases) for r in rows[11:] if "time/update_s" in r]
    local, over_ray = (statistics.median(x) for x in seconds.values())
    return {
        "bench_wide, local, ms an update": local * 1e3,
        "bench_wide, fused over Ray, ms an update": over_ray * 1e3,
        "fused / local": over_ray / local,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each placement; 0: leave them out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure() | (fused(args.rounds) if args.rounds else {})
    for name, value in found.items():
        print(f"| {name} | {value:.3g} |")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
