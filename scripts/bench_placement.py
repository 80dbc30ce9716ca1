"""Measure the cost of placements.

    python scripts/bench_placement.py [--json FILE] [--rounds 3] [--processes 2 4 8 16]

* Round trip: an action is sent to simulators in another process, which return a step with 256 x 64
  floats or 256 images of 64 x 64 over local TCP; minimum and median of 1,000.
* Stages: a simulator and a policy that take 20 ms each (10 ms for half of the environments);
  milliseconds per step with one stage and with two.
* Fused: `experiment=bench_wide`, 60 updates, in one process and fused over Ray in turn; medians of
  the time of an update.
* Processes: CartPole with 4 environments per process, `placement=fused` and `disaggregated`, on CPU
  slots independent of the number of cores; resources after 5 updates, and the driver's CPU time and
  TCP bytes (both directions) over 20 further updates.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import benchmark
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
PHASES = ("collect", "update", "publish")


class ConstantEnv:
    """Simulators that return the same step each time, after ``seconds``."""

    def __init__(self, n: int, shape: tuple[int, ...], dtype: torch.dtype, seconds: float) -> None:
        self.id, self.num_envs, self.device, self.max_episode_steps = "constant", n, CPU, None
        self.obs_spec, self.action_spec = ArraySpec(shape, dtype), Box((-1.0,) * 8, (1.0,) * 8)
        self.seconds = seconds
        self.obs = torch.zeros(n, *shape, dtype=dtype)
        false = torch.zeros(n, dtype=torch.bool)
        self.result = Step(self.obs, torch.zeros(n), false, false, ~false)

    def reset(self) -> Tensor:
        return self.obs

    def step(self, action: Tensor) -> Step:
        time.sleep(self.seconds)
        return self.result

    def state(self) -> None:
        return None

    def restart(self, seeds: list[int]) -> None: ...

    def close(self) -> None: ...


class SlowPolicy(torch.nn.Module):
    """A policy that acts after ``seconds``."""

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
    "floats": lambda n: ConstantEnv(n, (64,), torch.float32, 0.0),
    "images": lambda n: ConstantEnv(n, (64, 64, 3), torch.uint8, 0.0),
    "one stage": lambda n: ConstantEnv(n, (64,), torch.float32, SLOW_S),
    "two stages": lambda n: ConstantEnv(n, (64,), torch.float32, SLOW_S / 2),
}


def serve(pipe: Any) -> None:
    """Serve simulators to one client."""
    torch.set_num_threads(1)
    exchange = Exchange("127.0.0.1", "secret", 60.0)
    pipe.send(exchange.address)
    Server(EnvService(lambda kind, seeds: KINDS[kind](len(seeds))), exchange).serve(1)


def measure() -> dict[str, float]:
    """Return round trips and stages."""
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(sender,))
    process.start()
    client = Client(connect(receiver.recv(), "secret", "bench", peer="simulators", timeout_s=60.0))
    figures: dict[str, float] = {}
    for kind in ("floats", "images"):
        env: Any = RemoteEnv(client, list(range(256)), kind=kind, device=CPU)
        action, times = torch.zeros(256, 8), list[float]()
        for _ in range(1000):
            start = time.perf_counter()
            env.step(action)
            times.append((time.perf_counter() - start) * 1e3)
        figures[f"round trip of {kind}, ms (median)"] = statistics.median(times)
        figures[f"round trip of {kind}, ms (minimum)"] = min(times)
    for stages in (1, 2):
        kind = "one stage" if stages == 1 else "two stages"
        policy: Any = SlowPolicy(SLOW_S / stages)
        n = 64 // stages
        rollouts = []
        for i in range(stages):
            env = RemoteEnv(client, list(range(n)), kind=kind, device=CPU)
            rollouts.append(Rollout(env, policy, seed=0, stage=i, stages=stages))
        staged = Staged(rollouts)
        staged.collect(5, update=0, version=0)
        start = time.perf_counter()
        staged.collect(50, update=1, version=0)
        name = f"20 ms + 20 ms, {stages} stage{'s' * (stages > 1)}, ms per step"
        figures[name] = (time.perf_counter() - start) * 20
    client.finish()
    process.join()
    return figures


def fused(rounds: int) -> dict[str, float]:
    """Return the median time of an update in one process and fused over Ray, and their ratio."""
    seconds: dict[str, list[float]] = {"local": [], "fused": []}
    fixed = ["experiment=bench_wide", "updates=60", "env_steps=null", "save_every=0"]
    fixed += ["evaluation.episodes=2", "evaluation.video_episodes=0"]
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            for name, times in seconds.items():
                run_dir = Path(folder) / f"{name}{i}"
                placement = [f"placement={name}", f"run_dir={run_dir}"]
                placement += ["cluster.devices_per_node=1"] * (name == "fused")
                benchmark.run_command("train", *fixed, *placement)
                # The first updates include compilation and warm-up.
                for row in benchmark.read_metrics(run_dir)[11:]:
                    if "time/update_s" in row:
                        times.append(sum(row[f"time/{p}_s"] for p in PHASES))
    local, over_ray = (statistics.median(times) for times in seconds.values())
    return {
        "bench_wide, local, ms per update": local * 1e3,
        "bench_wide, fused over Ray, ms per update": over_ray * 1e3,
        "fused / local": over_ray / local,
    }


# ---------------------------------------------------------------------------------------- resources
UPDATES = 20
HORIZON = 512
"""The experience of 4 environments has 150 kB, more than Ray sends with a result."""
ESTABLISHED = 1


def open_files(pid: int) -> dict[int, str]:
    """Return the open file descriptors of a process and their targets."""
    folder = Path(f"/proc/{pid}/fd")
    return {
        int(name): os.readlink(folder / name)
        for name in os.listdir(folder)
        if os.path.lexists(folder / name)
    }


def connections(pid: int) -> int:
    """Return the number of established TCP connections of a process."""
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    sockets = {f"socket:[{row[9]}]" for row in rows if int(row[3], 16) == ESTABLISHED}
    return sum(target in sockets for target in open_files(pid).values())


def tcp_bytes() -> int:
    """Return the bytes of this process's TCP connections in both directions (tcp_info)."""
    total = 0
    for number, target in open_files(os.getpid()).items():
        if target.startswith("socket:"):
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
    """Return the bytes of /dev/shm that the Ray of this process has used so far."""
    children = [
        int(pid)
        for x in Path("/proc/self/task").glob("*/children")
        for pid in x.read_text().split()
    ]
    names = [
        f"/proc/{pid}/fd/{n}"
        for pid in children
        for n, target in open_files(pid).items()
        if target.startswith("/dev/shm/")
    ]
    return sum(os.stat(name).st_blocks * 512 for name in names)


def resources(placement: str, processes: int) -> dict[str, float]:
    """Return the resources of a placement by name; call it in a new process."""
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
            cpu_s, sent = 0.0, 0
            for update in range(5 + UPDATES):
                if update == 5:
                    cpu_s, sent = time.process_time(), tcp_bytes()
                system.update(system.collect(HORIZON, update=update)[0], update=update)
                system.publish(update + 1)
            cpu_s, sent = time.process_time() - cpu_s, tcp_bytes() - sent
            status = {
                word: int(x.split()[0])
                for word, _, x in (
                    x.partition(":") for x in Path("/proc/self/status").read_text().splitlines()
                )
                if word in ("VmRSS", "Threads")
            }
            counts = [
                connections(handle.pid) for group in system.processes.values() for handle in group
            ]
            return {
                "driver, MB of memory": status["VmRSS"] / 1024,
                "driver, threads": status["Threads"],
                "driver, file descriptors": len(open_files(os.getpid())),
                "driver, CPU ms per update": cpu_s * 1e3 / UPDATES,
                "driver, kB over TCP per update": sent / 1e3 / UPDATES,
                "TCP connections of a process (median)": statistics.median(counts),
                "TCP connections of the first learner": max(counts),
                "/dev/shm, MB": shared_memory() / 1e6,
            }
        finally:
            system.close()


def resources_by_processes(placement: str, counts: list[int]) -> dict[str, float]:
    """Print a table of ``resources`` for each number of processes, and return it."""
    figures: dict[int, dict[str, float]] = {}
    for processes in counts:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            figures[processes] = pool.submit(resources, placement, processes).result()
    print()
    benchmark.print_header([f"{placement}, processes", *map(str, counts)])
    for name in figures[counts[0]]:
        benchmark.print_row([name, *(f"{figures[count][name]:.3g}" for count in counts)])
    return {
        f"{placement} x {count}: {name}": value
        for count in counts
        for name, value in figures[count].items()
    }


def main() -> None:
    parser = benchmark.argument_parser(__doc__, rounds=3, json=None)
    parser.add_argument(
        "--processes", type=int, nargs="*", default=[2, 4, 8, 16], help="empty: skip this part"
    )
    parser.add_argument(
        "--placements", nargs="+", default=["fused", "disaggregated"], help="of the last part"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure() | (fused(args.rounds) if args.rounds else {})
    for name, value in figures.items():
        benchmark.print_row([name, f"{value:.3g}"])
    for placement in args.placements if args.processes else ():
        figures |= resources_by_processes(placement, args.processes)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
