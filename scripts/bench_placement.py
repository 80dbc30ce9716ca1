"""What placements cost: an environment's round trip, stages that overlap, a run fused over Ray
against local, and what the driver and each process hold as processes become more.

    python scripts/bench_placement.py [--json FILE] [--rounds 3] [--processes 2 4 8 16]

Round trip: an action goes to simulators in another process and their step comes back, 256 x 64
floats and 256 pictures of 64 x 64, over one machine's TCP; least and median of 1,000. Stages: a
simulator and a policy that take 20 ms each (a slice half of it); milliseconds a step with one stage
and with two. Fused: `experiment=bench_wide`, 60 updates, runs taking turns; medians of the seconds
of an update. Processes: CartPole, 4 environments for each, `placement=fused` and `disaggregated`,
on CPU slots whatever the number of cores; after 5 updates what is held, and over 20 more the
driver's CPU time and bytes (TCP, both ways).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from torch import Tensor

from embodied_ppo.config import loader
from embodied_ppo.config.schema import Config
from embodied_ppo.core.types import ArraySpec, Box, Decision, Step
from embodied_ppo.modes.base import RunRequest
from embodied_ppo.modes.registry import mode
from embodied_ppo.modes.workers import build_workers
from embodied_ppo.placement.channels import Client, Exchange, Server, connect
from embodied_ppo.placement.remote_envs import EnvService, RemoteEnv
from embodied_ppo.rollout.simulation import Rollout, Staged

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
    Server(EnvService(lambda kind, seeds: KINDS[kind](len(seeds))), exchange).serve(1)


def measure() -> dict[str, float]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    desk = Client(connect(here.recv(), "secret", "bench", peer="simulators", timeout_s=60.0))
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
        found[f"20 ms + 20 ms, {stages} stage{'s' * (stages > 1)}, ms a step"] = (
            time.perf_counter() - start
        ) * 20
    desk.finish()
    process.join()
    return found


def fused(rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {"local": [], "fused": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            for name, took in seconds.items():
                run = Path(folder) / f"{name}{i}"
                words = [
                    "train",
                    "--quiet",
                    "--json",
                    "experiment=bench_wide",
                    "updates=60",
                    "env_steps=null",
                ]
                words += [
                    "save_every=0",
                    "evaluation.episodes=2",
                    "evaluation.video_episodes=0",
                    f"run_dir={run}",
                ]
                words += [f"placement={name}"] + ["cluster.devices_per_node=1"] * (name == "fused")
                subprocess.run(
                    [sys.executable, "-m", "embodied_ppo.commands.main", *words],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                rows = [
                    json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
                ]
                phases = ("collect", "update", "publish")
                took += [
                    sum(r[f"time/{p}_s"] for p in phases) for r in rows[11:] if "time/update_s" in r
                ]
    local, over_ray = (statistics.median(x) for x in seconds.values())
    return {
        "bench_wide, local, ms an update": local * 1e3,
        "bench_wide, fused over Ray, ms an update": over_ray * 1e3,
        "fused / local": over_ray / local,
    }


# ---------------------------------------------------------------------------------------- resources
UPDATES = 20
HORIZON = 512
"""4 environments' experience is 150 kB, which Ray does not send along with answers."""
ESTABLISHED = 1


def files(pid: int) -> dict[int, str]:
    """Open file descriptors of a process and what they are."""
    folder = Path(f"/proc/{pid}/fd")
    return {
        int(name): os.readlink(folder / name)
        for name in os.listdir(folder)
        if os.path.lexists(folder / name)
    }


def connections(pid: int) -> int:
    """Established TCP connections of a process."""
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    theirs = {f"socket:[{row[9]}]" for row in rows if int(row[3], 16) == ESTABLISHED}
    return sum(what in theirs for what in files(pid).values())


def tcp_bytes() -> int:
    """Bytes that went through this process's TCP connections, both ways (Linux's tcp_info)."""
    total = 0
    for number, what in files(os.getpid()).items():
        if what.startswith("socket:"):
            with socket.socket(fileno=os.dup(number)) as one:
                if (
                    one.family in (socket.AF_INET, socket.AF_INET6)
                    and one.type == socket.SOCK_STREAM
                ):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += (
                        sum(struct.unpack_from("QQ", info, 120)) if info[0] == ESTABLISHED else 0
                    )
    return total


def shared_memory() -> int:
    """Bytes of /dev/shm that Ray, started by this process, has used so far."""
    children = [
        int(pid)
        for x in Path("/proc/self/task").glob("*/children")
        for pid in x.read_text().split()
    ]
    names = [
        f"/proc/{pid}/fd/{n}"
        for pid in children
        for n, what in files(pid).items()
        if what.startswith("/dev/shm/")
    ]
    return sum(os.stat(name).st_blocks * 512 for name in names)


def resources(placement: str, processes: int) -> dict[str, float]:
    """What a placement of so many processes holds, by what; to be called in a process that is
    new.
    """
    torch.set_num_threads(1)
    options: dict[str, Any] = {
        "placement": placement,
        "device": "cpu",
        "compile": "never",
        "updates": 100,
    }
    options["env"] = {"id": "CartPole-v1", "num_envs": 4 * processes, "num_threads": 1}
    options["algorithm"] = {
        "horizon": HORIZON,
        "global_batch_size": 4 * HORIZON * processes,
        "update_epoch": 1,
    }
    options["cluster"] = {"devices_per_node": processes}
    config = loader.load(Config, options, source="bench")
    placed = mode(config).plan(config, CPU)
    assert placed is not None
    with tempfile.TemporaryDirectory() as folder:
        request = RunRequest(
            config, CPU, Path(folder), 100, "", {}, lambda line: None, lambda line: None, []
        )
        system: Any = build_workers(mode(config), request, placed).system
        try:
            cpu_s, moved = 0.0, 0
            for update in range(5 + UPDATES):
                if update == 5:
                    cpu_s, moved = time.process_time(), tcp_bytes()
                system.update(system.collect(HORIZON, update=update)[0], update=update)
                system.publish(update + 1)
            cpu_s, moved = time.process_time() - cpu_s, tcp_bytes() - moved
            told = {
                word: int(x.split()[0])
                for word, _, x in (
                    x.partition(":") for x in Path("/proc/self/status").read_text().splitlines()
                )
                if word in ("VmRSS", "Threads")
            }
            held = [
                connections(handle.pid) for group in system.processes.values() for handle in group
            ]
            return {
                "driver, MB of memory": told["VmRSS"] / 1024,
                "driver, threads": told["Threads"],
                "driver, file descriptors": len(files(os.getpid())),
                "driver, CPU ms an update": cpu_s * 1e3 / UPDATES,
                "driver, kB over TCP an update": moved / 1e3 / UPDATES,
                "TCP connections of a process (median)": statistics.median(held),
                "TCP connections of the first learner": max(held),
                "/dev/shm, MB": shared_memory() / 1e6,
            }
        finally:
            system.close()


def grown(placement: str, counts: list[int]) -> dict[str, float]:
    """``resources`` of each count, printed as a table."""
    found: dict[int, dict[str, float]] = {}
    for processes in counts:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as alone:
            found[processes] = alone.submit(resources, placement, processes).result()
    print(
        f"\n| {placement}, processes | {' | '.join(map(str, counts))}"
        f" |\n|---|{'---|' * len(counts)}"
    )
    for what in found[counts[0]]:
        print(f"| {what} | {' | '.join(f'{found[count][what]:.3g}' for count in counts)} |")
    return {
        f"{placement} x {count}: {what}": x for count in counts for what, x in found[count].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--rounds", type=int, default=3, help="runs of each placement; 0: leave them out"
    )
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[2, 4, 8, 16], help="none: leave them out"
    )
    parser.add_argument(
        "--placements", nargs="+", default=["fused", "disaggregated"], help="of these processes"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure() | (fused(args.rounds) if args.rounds else {})
    for name, value in found.items():
        print(f"| {name} | {value:.3g} |")
    for placement in args.placements if args.processes else ():
        found |= grown(placement, args.processes)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
