"""Time the roles of a robot policy's run on this machine, with several batch sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from embodied_ppo.config import placement
from embodied_ppo.config.schema import AlgorithmConfig
from embodied_ppo.core import compile, tree
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import VectorEnv
from embodied_ppo.modes.base import RunRequest, compile_schedule
from embodied_ppo.modes.embodied import components
from embodied_ppo.modes.embodied.components import share_of
from embodied_ppo.modes.profile import (
    Timing,
    fastest,
    fit_cost,
    parallel_cores,
    select_sizes,
    time_copy,
    time_messages,
    timed,
    trainable_bytes,
)
from embodied_ppo.placement import cost_model, memory_estimate
from embodied_ppo.placement.remote_envs import FIELDS
from embodied_ppo.placement.weight_sync import weight_tensors

Timings = dict[tuple[str, bool], list[Timing]]
"""(part of the work, whether compiled) -> timings by number of environments."""


def profile(
    request: RunRequest, update: int, plans: Sequence[placement.Plan | None]
) -> cost_model.Measured:
    """Measure everything that predicting these placements needs.

    Args:
        update: Update of the run that is timed.
        plans: Placements to predict; None: one process.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
    """
    a, total = request.config.algorithm, request.config.env.num_envs
    compiled_since, _ = components.compile_from(request.config, request.device, request.notice)
    compiled = compiled_since is not None and compiled_since <= update
    codes = [cost_model.code(plan, compiled) for plan in plans]
    divisors = select_sizes(sorted({divisor for plan in plans for divisor in _divisors(plan)}))
    timings: Timings = {}
    facts: dict[str, float] = {}
    policy: Any = None
    for i, divisor in enumerate(divisors):
        request.advance("measuring", i, len(divisors))
        with ExitStack() as stack:
            probe = _Probe(request, divisor, update, compiled_since, policy, timings, stack)
            policy = probe.policy
            for on in sorted({acts for acts, _ in codes}):
                probe.time_collect(on)
            for on in sorted({learns for _, learns in codes}):
                # The minibatches of several learners are never compiled.
                if _divides(a, divisor) and not (on and divisor > 1):
                    probe.time_update(on)
            facts = facts or probe.sizes() | time_messages(*probe.messages())
    request.advance("measuring", len(divisors), len(divisors))

    def costs(role: str) -> dict[bool, cost_model.Cost]:
        return {on: fit_cost(points) for (name, on), points in timings.items() if name == role}

    return cost_model.Measured(
        num_envs=total,
        horizon=a.horizon,
        steps=a.update_epoch * (a.horizon * total // a.global_batch_size),
        compiled=compiled,
        simulate=costs("simulate")[False],
        act=costs("act"),
        learn=costs("learn"),
        copy_byte_s=time_copy(request.device),
        cores=parallel_cores(),
        **facts,
    )


def _divisors(plan: placement.Plan | None) -> set[int]:
    """Return the numbers of shares of the environments in a placement, over all roles."""
    if plan is None:
        return {1}
    e, r, a = (plan.processes(role) for role in ("env", "rollout", "actor"))
    return {max(e, r) * plan.stages, r * plan.stages, a}


def _divides(a: AlgorithmConfig, divisor: int) -> bool:
    """Return whether minibatches can be divided into ``divisor`` equal shares."""
    unit = a.horizon if a.minibatch_unit == "column" else 1
    return not a.global_batch_size % (divisor * unit)


class _Probe:
    """A share of a run's environments with its policy; its measurements go to ``timings``."""

    def __init__(
        self,
        request: RunRequest,
        divisor: int,
        update: int,
        compiled_since: int | None,
        policy: Any,
        timings: Timings,
        stack: ExitStack,
    ) -> None:
        config, self.n = request.config, request.config.env.num_envs // divisor
        env_share = replace(config.env, num_envs=self.n)
        share = replace(config, env=env_share, algorithm=share_of(config.algorithm, divisor))
        self.request = replace(request, config=share)
        self.divisor, self.update, self.compiled_since = divisor, update, compiled_since
        self.timings, self.stack = timings, stack
        seeds = env_seeds(config.seed, 0, config.env.num_envs, config.algorithm.group_size)[
            : self.n
        ]
        self.env: VectorEnv = components.make_env(
            seeds,
            config=components.training_env(config),
            device=request.device,
            model=config.model,
        )
        stack.callback(self.env.close)
        self.policy = policy or components.make_policy(config, self.env)
        self.trajectory: Any = None

    def _compile_schedule(self, on: bool) -> compile.CompileSchedule:
        schedule = compile_schedule(self.request, self.compiled_since if on else None)
        self.stack.callback(schedule.close)
        return schedule

    def _add(self, role: str, on: bool, wall: float, cpu: float) -> None:
        self.timings.setdefault((role, on), []).append((self.n, max(wall, 1e-9), max(cpu, 1e-9)))

    def time_collect(self, on: bool) -> None:
        """Time the steps of a rollout: of the simulators, and of everything else."""
        config, horizon = self.request.config, self.request.config.algorithm.horizon
        rollout = components.make_rollout(
            config, self.env, self.policy, self._compile_schedule(on), stages=self.divisor
        )
        rollout.restart(0)

        def clocks() -> tuple[float, float, float, float]:
            simulate_cpu = rollout.cpu_s["simulate"]
            return rollout.simulate_s, simulate_cpu, time.perf_counter(), time.process_time()

        def collect() -> tuple[float, ...]:
            before = clocks()
            self.trajectory, _ = rollout.collect(horizon, update=self.update, version=0)
            simulate, simulate_cpu, wall, cpu = (
                x - y for x, y in zip(clocks(), before, strict=True)
            )
            return (
                simulate / horizon,
                simulate_cpu / horizon,
                (wall - simulate) / horizon,
                (cpu - simulate_cpu) / horizon,
            )

        simulate, simulate_cpu, act, act_cpu = fastest(collect)
        self._add("simulate", False, simulate, simulate_cpu)
        self._add("act", on, act, act_cpu)

    def time_update(self, on: bool) -> None:
        """Time updates from the trajectory that was collected last."""
        learner = components.make_learner(self.request, self.policy, self._compile_schedule(on))
        update = partial(learner.update, self.trajectory, update=self.update)
        wall, cpu = fastest(lambda: timed(update)[1])
        self._add("learn", on, wall, cpu)

    def messages(self) -> tuple[Tensor, dict[str, Any]]:
        """Return the action of all environments, and the step that answers it."""
        action = self.trajectory.action[-1]
        step = self.env.step(action)
        answer = {name: x for name in FIELDS if (x := getattr(step, name)) is not None}
        return action.cpu(), tree.map(Tensor.cpu, answer)

    def sizes(self) -> dict[str, float]:
        """Return sizes in bytes, by the field of ``cost_model.Measured``."""
        policy = self.policy
        return {
            "step_bytes": memory_estimate.nbytes([*self.messages()]) / self.n,
            "experience_bytes": memory_estimate.nbytes(self.trajectory) * self.divisor,
            "weights_bytes": memory_estimate.nbytes(weight_tensors(policy)),
            "gradient_bytes": trainable_bytes(policy),
        }
