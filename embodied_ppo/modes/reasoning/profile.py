"""What the roles of a language model's run take on this machine: as ``probes`` does it for robot policies."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.algorithms.learner import NOTHING
from embodied_ppo.algorithms.optimizer import OptimizationStats
from embodied_ppo.algorithms.separate_critic_learner import FrozenReference, Rows, full_kl, log_prob_rows
from embodied_ppo.config import placement
from embodied_ppo.config.schema import Config
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.modes.base import Setup
from embodied_ppo.modes.embodied.profile import again, copy_byte_s, cores, cost, few, message_s
from embodied_ppo.modes.reasoning import components
from embodied_ppo.modes.reasoning.cost_model import Measured
from embodied_ppo.placement import memory_estimate
from embodied_ppo.placement.weight_sync import moving


def measured(s: Setup, update: int, placements: Sequence[placement.Plan | None]) -> Measured:
    """As of ``probes``. Raises ConfigError."""
    config, a = s.config, s.config.algorithm
    responses = a.rollout_batch_size * a.group_size
    cuts = {k for p in placements for k in _parts(p) if not a.rollout_batch_size % k}
    parts = few(sorted(cuts))
    taken: dict[str, list[tuple[float, float, float]]] = {}
    with ExitStack() as stack:
        probe = _Probe(s, stack)
        for i, part in enumerate(parts):
            s.advance("measuring", i, len(parts))
            for role, (wall, cpu) in probe.times(part, update).items():
                taken.setdefault(role, []).append((responses / part, max(wall, 1e-9), max(cpu, 1e-9)))
        s.advance("measuring", len(parts), len(parts))
        policy, critic = probe.m.policy, probe.critic
        own = components.critic_config(a, config.critic)
        costs = {role: cost(points) for role, points in taken.items()}
        return Measured(
            compiled=False,
            responses=responses,
            steps=a.update_epoch * (a.rollout_batch_size // a.global_batch_size),
            critic_steps=0 if critic is None else own.update_epoch * (a.rollout_batch_size // own.global_batch_size),
            generate=costs["generate"],
            grade=costs["grade"],
            view=costs.get("view"),
            values=costs.get("values"),
            learn=costs["learn"],
            teach=costs.get("teach"),
            concurrent=config.critic.concurrent,
            gradient_bytes=_gradients(policy),
            critic_gradient_bytes=0 if critic is None else _gradients(critic),
            weights_bytes=memory_estimate.nbytes(moving(policy)),
            experience_bytes=probe.experience_bytes,
            copy_byte_s=copy_byte_s(s.device),
            cores=cores(),
            **message_s(torch.zeros(1), {"more": torch.zeros(1)}),
        )


def _gradients(model: torch.nn.Module) -> int:
    return sum(4 * p.numel() for p in model.parameters() if p.requires_grad)


def _parts(p: placement.Plan | None) -> set[int]:
    """Into how many parts a placement cuts the responses."""
    if p is None:
        return {1}
    return {p.processes(role) for role in placement.ROLES["reasoning"] if p.has(role)}


class _Probe:
    """A run's models and graders in this process."""

    def __init__(self, s: Setup, stack: ExitStack) -> None:
        self.setup, config = s, s.config
        self.m = components.read(s)
        rule = components.make_graders(config, self.m.prompts, stack)
        components.demonstrate(s, self.m.policy, self.m.tokenizer)
        self.judge = components.make_judge(s, self.m, rule)
        self.critic = components.make_critic(config, self.m.policy, s.device)
        self.engine = components.make_engine(self.m)
        a = config.algorithm
        self.reference: FrozenReference | None = None
        if a.use_kl_loss or a.use_kl_in_reward:
            frozen = copy.deepcopy(self.m.policy)
            self.reference = FrozenReference(frozen, tokens=a.micro_batch_tokens, columns=log_prob_rows(a))
        self.trajectory: Any = None
        self.experience_bytes = 0

    def times(self, part: int, update: int) -> dict[str, list[float]]:
        """Role -> seconds by the clock and of CPUs that one of ``part`` processes takes for its share."""
        s = replace(self.setup, config=_share(self.setup.config, part))
        rollout = components.make_rollout(self.setup, self.m, self.engine, self.judge, 0, part)
        horizon = s.config.algorithm.response_length

        def collect() -> tuple[float, ...]:
            before = rollout.grade_s, rollout.cpu_s["grade"]
            self.trajectory, (wall, cpu) = _timed(lambda: rollout.collect(horizon, update=update, version=0)[0])
            graded, graded_cpu = rollout.grade_s - before[0], rollout.cpu_s["grade"] - before[1]
            return wall - graded, cpu - graded_cpu, graded, graded_cpu

        found = again(collect)
        t = self.trajectory
        self.experience_bytes = memory_estimate.nbytes(t) * part
        times = {"generate": found[:2], "grade": found[2:]}
        obs, mask = t.obs, t.mask
        full = full_kl(s.config.algorithm)
        if self.reference is not None and not full:  # else the actor reads it, and is never apart from it
            view = self.reference.view
            times["view"] = again(lambda: _timed(lambda: view(obs, mask, t.action, hidden=False))[1])
        if self.critic is not None:
            values = components.make_values(s, self.critic)
            value = values.values(obs, mask)

            def teach() -> OptimizationStats:
                values.begin(obs, mask, value, value + 1.0, update)
                return values.end()

            times["values"] = again(lambda: _timed(lambda: values.values(obs, mask))[1])
            times["teach"] = again(lambda: _timed(teach)[1])
            values.close()
        here = _Here(t.log_prob)
        critic, reference = None if self.critic is None else here, self.reference if full else here
        learner = components.make_learner(s, self.m.policy, critic, reference=reference)
        times["learn"] = again(lambda: _timed(lambda: learner.update(t, update=update))[1])
        learner.close()
        return times


def _share(config: Config, part: int) -> Config:
    """What one of ``part`` processes does of every optimiser step."""
    a, c = config.algorithm, config.critic
    batch = max(1, a.global_batch_size // part)
    own = None if c.global_batch_size is None else max(1, c.global_batch_size // part)
    share = replace(a, rollout_batch_size=a.rollout_batch_size // part, global_batch_size=batch)
    return replace(config, algorithm=share, critic=replace(c, global_batch_size=own))


def _timed(call: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


class _Here:
    """A critic and a reference that take no time: what is left is the actor's. Sees what the policy did as no worse and
    no better than the reference would."""

    rate = 0.0

    def __init__(self, log_prob: Tensor) -> None:
        self.log_prob = log_prob

    def settle(self, actor: LanguagePolicy) -> None: ...

    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        return torch.zeros_like(self.log_prob)

    def begin(self, obs: Rows, mask: Tensor, value: Tensor, returns: Tensor, update: int) -> None: ...

    def end(self) -> OptimizationStats:
        return NOTHING

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        return {"log_prob": self.log_prob}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def held(self) -> Any:
        return []

    def close(self) -> None: ...
