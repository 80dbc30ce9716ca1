"""The parts ``ant``, ``go1``, ``panda`` and ``tabletop`` of bench_gpu.py: simulation and training.

Each trains the experiment of that name for a GPU (``ant_gpu``, ..) in this process. One rollout is
recorded and repeated: by the environment without the policy, and by the physics alone, with the
policy's controls and the resets of the episodes that ended. All three therefore have the same
contacts. Steps are control steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import benchmark
import torch
from torch import Tensor

from embodied_envs.adapters.action_chunking import ChunkedActions
from embodied_envs.physics.engine import INITIAL_FIELDS
from embodied_ppo.commands.main import parse_arguments
from embodied_ppo.config.compose import prepare
from embodied_ppo.config.schema import Config, EnvConfig
from embodied_ppo.core.devices import matmul_precision
from embodied_ppo.core.types import Step
from embodied_ppo.modes.base import RunRequest
from embodied_ppo.modes.embodied.components import make_env
from embodied_ppo.modes.registry import mode
from embodied_ppo.training.local_system import LocalSystem

EXPERIMENTS = {name: [f"experiment={name}_gpu"] for name in ("ant", "go1", "panda", "tabletop")}
"""Part -> options of the experiment, which is the one that users train."""
PICTURES = {"tabletop": ["experiment=tabletop_token", "env.num_envs=1024"]}
"""Part -> options of an experiment whose pictures are measured, too."""
TINY = [
    *("env.simulator=mujoco", "env.num_envs=4", "algorithm.horizon=8", "compile=never"),
    *("algorithm.global_batch_size=16", "env.max_episode_steps=5"),
]
"""Options that make an experiment small; an episode ends within each rollout."""
WARM_UP, UPDATES = 3, 5
"""Updates before the measured ones (kernels are compiled, graphs recorded), and measured ones."""


def read_config(options: Sequence[str]) -> Config:
    """Return the config of ``embodied-ppo train`` with these options."""
    args = parse_arguments(["train", *options])
    return prepare(args, args.overrides).config


def build(config: Config, device: torch.device, run_dir: Path, stack: ExitStack) -> LocalSystem:
    """Return the system of a run in this process; ``stack`` closes it."""
    ignore = lambda line: None
    updates = WARM_UP + UPDATES + 1
    request = RunRequest(config, device, run_dir, updates, "", {}, ignore, ignore, [])
    system = mode(config).build_local(request, stack).system
    assert isinstance(system, LocalSystem)
    return system


class Recorder:
    """``VectorEnv`` that records what the physics needs to repeat its steps.

    Attributes:
        start: State before the first step.
        controls: Control of each step, [N, nu].
        ended: Worlds that were reset after each step, bool [N].
        starts: Initial fields after each step, [N, ..]; of worlds that were reset, their values
            start the next episode.
    """

    def __init__(self, env: Any) -> None:
        self.env, self.start = env, env.state()
        self.controls: list[Tensor] = []
        self.ended: list[Tensor] = []
        self.starts: list[dict[str, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: Tensor) -> Step:
        env, physics = self.env, self.env.physics
        mapped = env.to_simulator(action.to(physics.device)).to(physics.dtype)
        self.controls.append(env.task.control(env.s, mapped).clone())
        step = env.step(action)
        self.ended.append((step.terminated | step.truncated).to(physics.device))
        self.starts.append(self._fields())
        return step

    def _fields(self) -> dict[str, Tensor]:
        fields = self.env.physics.fields
        return {k: fields[k].clone() for k in INITIAL_FIELDS if k in fields}


class PhysicsReplay:
    """Repeats the physics steps and resets of a recorded rollout, as one graph per control step."""

    def __init__(self, record: Recorder) -> None:
        """Prepare the repetition.

        Raises:
            ValueError: The worlds have randomised models, which are not recorded.
        """
        physics = record.env.physics
        if physics.random_size:
            raise ValueError("the physics of randomised models cannot be repeated")
        self.record, self.physics = record, physics
        self.mask = record.ended[0].clone()
        self.values = {k: x.clone() for k, x in record.starts[0].items()}
        self.u = torch.zeros(record.env.num_envs, 0, device=physics.device, dtype=physics.dtype)
        self.program = physics.capture(self._step)

    def _step(self, ctrl: Tensor) -> Tensor:
        """Advance by one control step, then reset where ``mask``."""
        self.physics.step(ctrl, self.record.env.task.decimation)
        self.physics.reset(self.mask, self.values, self.u)
        return self.mask

    def run(self) -> None:
        """Repeat the rollout."""
        record = self.record
        for ctrl, ended, values in zip(record.controls, record.ended, record.starts, strict=True):
            self.mask.copy_(ended)
            for name, x in self.values.items():
                x.copy_(values[name])
            self.program(ctrl)


def record_rollout(system: LocalSystem, horizon: int, update: int) -> tuple[Recorder, Tensor]:
    """Collect a rollout; return the record of its simulator and the actions, [T, N, A]."""
    rollout: Any = system.rollout
    rollout.env = record = Recorder(rollout.env)
    try:
        return record, system.collect(horizon, update=update)[0].action
    finally:
        rollout.env = record.env


def train(
    system: LocalSystem, horizon: int, updates: int, device: torch.device
) -> tuple[float, float]:
    """Run updates; return the mean seconds to collect and to update after ``WARM_UP`` of them."""
    times: list[tuple[float, float]] = []
    for update in range(updates):
        experience: list[Any] = []
        times.append(
            (
                benchmark.seconds(
                    lambda u=update, e=experience: e.append(system.collect(horizon, update=u)[0]),
                    device,
                ),
                benchmark.seconds(
                    lambda u=update, e=experience: system.update(e[0], update=u), device
                ),
            )
        )
        system.publish(update + 1)
    collect_s, update_s = zip(*times[WARM_UP:], strict=True)
    return statistics.mean(collect_s), statistics.mean(update_s)


def least_seconds(call: Callable[[], float]) -> float:
    """Return the least of the durations that ``call`` returns, without its warm-up.

    The first calls compile kernels and record graphs.
    """
    return min(call() for _ in range(4))


def measure(report: benchmark.Report, config: Config, device: torch.device, run_dir: Path) -> None:
    """Train, and report control steps per second of training, environment and physics."""
    with ExitStack() as stack:
        stack.enter_context(matmul_precision(config.matmul_precision))
        start = time.perf_counter()
        system = build(config, device, run_dir, stack)
        report("start_s", time.perf_counter() - start)
        horizon, outer = config.algorithm.horizon, system.rollout.env  # pyright: ignore
        worlds = outer.num_envs
        report("worlds", worlds)
        steps = horizon * worlds
        collect_s, update_s = train(system, horizon, WARM_UP + UPDATES, device)
        report("collect_ms", collect_s * 1e3)
        report("update_ms", update_s * 1e3)
        report("training_steps_per_s", steps / (collect_s + update_s))
        record, actions = record_rollout(system, horizon, WARM_UP + UPDATES)
        report("episodes_ended_per_step", float(sum(x.sum() for x in record.ended)) / steps)
        replay = PhysicsReplay(record)
        physics = record.env.physics

        def environment_s() -> float:
            outer.load_state(record.start)
            return benchmark.seconds(lambda: [outer.step(action) for action in actions], device)

        def physics_s() -> float:
            physics.load_state(record.start["physics"])
            return benchmark.seconds(replay.run, device)

        calls = {
            "environment_steps_per_s": environment_s,
            "physics_steps_per_s": physics_s,
        }
        for name, call in calls.items():
            duration_s = report.attempt(name, lambda c=call: least_seconds(c))
            if duration_s is None:
                continue
            report(name, steps / duration_s)
            if name == "physics_steps_per_s":
                report("training_over_physics", duration_s / (collect_s + update_s))
                report("collect_over_physics", duration_s / collect_s)


def measure_pictures(report: benchmark.Report, config: EnvConfig, device: torch.device) -> None:
    """Report pictures per second of the cameras of all worlds."""
    env = make_env(list(range(config.num_envs)), config=config, device=device)
    with closing(env):
        env.reset()
        inner = env.env if isinstance(env, ChunkedActions) else env
        physics = inner.physics  # pyright: ignore[reportAttributeAccessIssue]
        everywhere = torch.ones(env.num_envs, dtype=torch.bool, device=physics.device)
        duration_s = least_seconds(
            lambda: benchmark.seconds(lambda: physics.images(everywhere), device)
        )
        report("pictures_per_s", env.num_envs * len(config.cameras) / duration_s)
