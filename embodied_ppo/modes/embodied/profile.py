"""What a run's roles take on this machine: the experiment's own code, timed in this process a few sizes long."""

from __future__ import annotations

import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.config import placement
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile, tree
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import VectorEnv
from embodied_ppo.modes.base import Setup
from embodied_ppo.modes.embodied import components
from embodied_ppo.modes.embodied.workers import share_of
from embodied_ppo.placement import cost_model, memory_estimate
from embodied_ppo.placement.channels import Exchange, Message, dial
from embodied_ppo.placement.remote_envs import FIELDS
from embodied_ppo.placement.weight_sync import moving

SIZES = 3
"""Numbers of environments, at most, that lines are drawn through."""
LONG_S = 1.0
"""Something is timed again and again for so long and three times at least, but not for ten times as long."""
PARCEL = 1 << 22
"""Bytes that are sent and copied to see how fast that goes."""


Taken = dict[tuple[str, bool], list[tuple[float, float, float]]]
"""(role, whether compiled) -> what it took: environments, seconds by the clock, CPU seconds."""


def measured(s: Setup, update: int, placements: Sequence[placement.Plan | None]) -> cost_model.Measured:
    """All that predicting these placements asks for; None: one process. ``update``: which of the run is measured.
    ``s.advance`` hears how far it is. Raises ConfigError, EnvError."""
    a, total = s.config.algorithm, s.config.env.num_envs
    since, _ = components.compile_from(s.config, s.device, s.notice)
    fast = since is not None and since <= update
    codes = [cost_model.code(p, fast) for p in placements]
    parts = few(sorted({part for p in placements for part in _parts(p)}))
    taken: Taken = {}
    facts: dict[str, float] = {}
    policy: Any = None
    for i, part in enumerate(parts):
        s.advance("measuring", i, len(parts))
        with ExitStack() as stack:
            probe = _Probe(s, part, update, since, policy, taken, stack)
            policy = probe.policy
            for on in sorted({acts for acts, _ in codes}):
                probe.collect(on)
            for on in sorted({learns for _, learns in codes}):
                if _learns(a, part) and not (on and part > 1):  # several are never compiled
                    probe.learn(on)
            facts = facts or probe.sizes() | message_s(*probe.spoken())
    s.advance("measuring", len(parts), len(parts))

    def costs(role: str) -> dict[bool, cost_model.Cost]:
        return {on: cost(points) for (name, on), points in taken.items() if name == role}

    return cost_model.Measured(
        num_envs=total,
        horizon=a.horizon,
        steps=a.update_epoch * (a.horizon * total // a.global_batch_size),
        compiled=fast,
        simulate=costs("simulate")[False],
        act=costs("act"),
        learn=costs("learn"),
        copy_byte_s=copy_byte_s(s.device),
        cores=cores(),
        **facts,
    )


def cost(points: Sequence[tuple[float, float, float]]) -> cost_model.Cost:
    wall, cpu = ([(point[0], point[i]) for point in points] for i in (1, 2))
    return cost_model.Cost(cost_model.fitted(wall), cost_model.fitted(cpu))


def _parts(p: placement.Plan | None) -> set[int]:
    """Into how many parts a placement cuts the environments: to simulate, to act, to learn."""
    if p is None:
        return {1}
    e, r, a = (p.processes(role) for role in ("env", "rollout", "actor"))
    return {max(e, r) * p.stages, r * p.stages, a}


def _learns(a: AlgorithmConfig, part: int) -> bool:
    """Whether a minibatch can be cut into so many parts."""
    unit = a.horizon if a.minibatch_unit == "column" else 1
    return not a.global_batch_size % (part * unit)


def few(sizes: Sequence[int]) -> list[int]:
    """The first, the last and those between them, SIZES at most."""
    last = len(sizes) - 1
    return [sizes[i] for i in sorted({round(k * last / (SIZES - 1)) for k in range(SIZES)})]


class _Probe:
    """One ``part``-th of a run, in this process; what it takes goes to ``taken``."""

    def __init__(
        self, s: Setup, part: int, update: int, since: int | None, policy: Any, taken: Taken, stack: ExitStack
    ) -> None:
        config, self.n = s.config, s.config.env.num_envs // part
        mine = replace(config.env, num_envs=self.n)
        self.setup = replace(s, config=replace(config, env=mine, algorithm=share_of(config.algorithm, part)))
        self.part, self.update, self.since, self.taken, self.stack = part, update, since, taken, stack
        seeds = env_seeds(config.seed, 0, config.env.num_envs, config.algorithm.group_size)[: self.n]
        self.env: VectorEnv = components.make_env(seeds, config=config.env, device=s.device)
        stack.callback(self.env.close)
        self.policy = policy or components.make_policy(config, self.env)
        self.trajectory: Any = None

    def _later(self, on: bool) -> compile.CompileSchedule:
        required = self.setup.config.compile == "always"
        later = compile.CompileSchedule(self.since if on else None, required=required, notice=self.setup.notice)
        self.stack.callback(later.close)
        return later

    def _note(self, role: str, on: bool, wall: float, cpu: float) -> None:
        self.taken.setdefault((role, on), []).append((self.n, max(wall, 1e-9), max(cpu, 1e-9)))

    def collect(self, on: bool) -> None:
        """Steps of simulating, and of all else."""
        config, horizon = self.setup.config, self.setup.config.algorithm.horizon
        rollout = components.make_rollout(config, self.env, self.policy, self._later(on), stages=self.part)
        rollout.restart(0)

        def once() -> tuple[float, ...]:
            before = rollout.simulate_s, rollout.cpu_s["simulate"], time.perf_counter(), time.process_time()
            self.trajectory, _ = rollout.collect(horizon, update=self.update, version=0)
            after = rollout.simulate_s, rollout.cpu_s["simulate"], time.perf_counter(), time.process_time()
            simulate, simulate_cpu, wall, cpu = (x - y for x, y in zip(after, before, strict=True))
            return (
                simulate / horizon,
                simulate_cpu / horizon,
                (wall - simulate) / horizon,
                (cpu - simulate_cpu) / horizon,
            )

        took = again(once)
        self._note("simulate", False, *took[:2])
        self._note("act", on, *took[2:])

    def learn(self, on: bool) -> None:
        """Updates, from what was collected."""
        learner = components.make_learner(self.setup, self.policy, self._later(on))

        def once() -> tuple[float, ...]:
            wall, cpu = time.perf_counter(), time.process_time()
            learner.update(self.trajectory, update=self.update)
            return time.perf_counter() - wall, time.process_time() - cpu

        self._note("learn", on, *again(once))

    def spoken(self) -> tuple[Tensor, dict[str, Any]]:
        """An action for all environments, and the step that answers it."""
        action = self.trajectory.action[-1]
        step = self.env.step(action)
        answer = {name: x for name in FIELDS if (x := getattr(step, name)) is not None}
        return action.cpu(), tree.map(Tensor.cpu, answer)

    def sizes(self) -> dict[str, float]:
        """Bytes, as ``tune.Measured`` has them."""
        policy = self.policy
        return {
            "step_bytes": memory_estimate.nbytes([*self.spoken()]) / self.n,
            "experience_bytes": memory_estimate.nbytes(self.trajectory) * self.part,
            "weights_bytes": memory_estimate.nbytes(moving(policy)),
            "gradient_bytes": sum(4 * p.numel() for p in policy.parameters() if p.requires_grad),
        }


def again(once: Callable[[], tuple[float, ...]]) -> list[float]:
    """The least that it takes: what is more is other work on this machine. The first time warms up."""
    took, begun = list[tuple[float, ...]](), 0.0
    once()
    begun = time.perf_counter()
    while len(took) < 3 or time.perf_counter() - begun < LONG_S:
        took.append(once())
        if time.perf_counter() - begun > 10 * LONG_S:
            break
    return [min(x) for x in zip(*took, strict=True)]


# ------------------------------------------------------------------------------------------------------------- machine
def message_s(action: Tensor, answer: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a message between processes, and of a byte in it."""
    secret = secrets.token_hex(16)
    exchange = Exchange("127.0.0.1", secret, 60.0)
    small, large = {**answer}, {**answer, "more": torch.zeros(PARCEL, dtype=torch.uint8)}
    times = 200

    def serve() -> None:
        for i in range(2 * times):
            line, m = exchange.receive()
            line.send(Message("step", m.to, {}, small if i < times else large))

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    line = dial(exchange.address, secret, "tune", peer="the probe", patience_s=60.0)
    points = list[tuple[float, float]]()
    for value in (small, large):
        took = list[float]()
        for _ in range(times):
            start = time.perf_counter()
            line.send(Message("step", 0, {}, action))
            line.receive()
            took.append(time.perf_counter() - start)
        points.append((memory_estimate.nbytes([action, value]), statistics.median(took)))
    server.join()
    line.close()
    exchange.close()
    there_and_back = cost_model.fitted(points)
    return {"message_s": there_and_back.fixed / 2, "byte_s": there_and_back.each}


def copy_byte_s(device: torch.device) -> float:
    """Seconds to bring a byte of the host's memory to the device (on a CPU: elsewhere in it)."""
    x = torch.zeros(PARCEL, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def once() -> tuple[float]:
        start = time.perf_counter()
        x.to(device, copy=True)[-1].item()
        return (time.perf_counter() - start,)

    return again(once)[0] / PARCEL


def cores() -> float:
    """How many times as much all cores do in a while as one does, with products of matrices."""
    count = os.cpu_count() or 1
    x = torch.randn(256, 256)
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(1)  # of this thread: each has its own number
        for _ in range(100):
            torch.mm(x, x)

    def seconds(workers: int) -> Callable[[], tuple[float]]:
        def once() -> tuple[float]:
            crowd = [threading.Thread(target=work) for _ in range(workers)]
            start = time.perf_counter()
            for thread in crowd:
                thread.start()
            for thread in crowd:
                thread.join()
            return (time.perf_counter() - start,)

        return once

    try:
        return min(count, max(1.0, count * again(seconds(1))[0] / again(seconds(count))[0]))
    finally:
        torch.set_num_threads(threads)
