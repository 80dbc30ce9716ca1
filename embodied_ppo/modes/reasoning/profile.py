"""Time the roles of a language model's run on this machine, with several batch sizes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.algorithms.learner import NO_STATS
from embodied_ppo.algorithms.optimizer import OptimizationStats
from embodied_ppo.algorithms.separate_critic_learner import (
    FrozenReference,
    Rows,
    full_kl,
    log_prob_batch_size,
)
from embodied_ppo.config import placement
from embodied_ppo.config.schema import Config
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.modes.base import RunRequest
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
from embodied_ppo.modes.reasoning import components
from embodied_ppo.modes.reasoning.cost_model import Measured
from embodied_ppo.placement import memory_estimate
from embodied_ppo.placement.weight_sync import weight_tensors


def profile(request: RunRequest, update: int, plans: Sequence[placement.Plan | None]) -> Measured:
    """Measure everything that predicting these placements needs.

    Args:
        update: Update of the run that is timed.
        plans: Placements to predict; None: one process.

    Raises:
        ConfigError: An option is refused by what it configures.
    """
    config, a = request.config, request.config.algorithm
    responses = a.rollout_batch_size * a.group_size
    divisors = {k for plan in plans for k in _divisors(plan) if not a.rollout_batch_size % k}
    selected = select_sizes(sorted(divisors))
    timings: dict[str, list[Timing]] = {}
    with ExitStack() as stack:
        probe = _Probe(request, stack)
        for i, divisor in enumerate(selected):
            request.advance("measuring", i, len(selected))
            for role, (wall, cpu) in probe.times(divisor, update).items():
                timing = (responses / divisor, max(wall, 1e-9), max(cpu, 1e-9))
                timings.setdefault(role, []).append(timing)
        request.advance("measuring", len(selected), len(selected))
        policy, critic = probe.m.policy, probe.critic
        critic_options = components.critic_config(a, config.critic)
        critic_minibatches = a.rollout_batch_size // critic_options.global_batch_size
        costs = {role: fit_cost(points) for role, points in timings.items()}
        return Measured(
            compiled=False,
            responses=responses,
            steps=a.update_epoch * (a.rollout_batch_size // a.global_batch_size),
            critic_steps=0 if critic is None else critic_options.update_epoch * critic_minibatches,
            generate=costs["generate"],
            grade=costs["grade"],
            view=costs.get("view"),
            values=costs.get("values"),
            learn=costs["learn"],
            teach=costs.get("teach"),
            concurrent=config.critic.concurrent,
            gradient_bytes=trainable_bytes(policy),
            critic_gradient_bytes=0 if critic is None else trainable_bytes(critic),
            weights_bytes=memory_estimate.nbytes(weight_tensors(policy)),
            experience_bytes=probe.experience_bytes,
            copy_byte_s=time_copy(request.device),
            cores=parallel_cores(),
            **time_messages(torch.zeros(1), {"more": torch.zeros(1)}),
        )


def _divisors(plan: placement.Plan | None) -> set[int]:
    """Return the numbers of shares of the responses in a placement, over all roles."""
    if plan is None:
        return {1}
    return {plan.processes(role) for role in placement.ROLES["reasoning"] if plan.has(role)}


class _Probe:
    """A run's models and graders in this process."""

    def __init__(self, request: RunRequest, stack: ExitStack) -> None:
        self.request, config = request, request.config
        self.m = components.read_inputs(request)
        rule = components.make_graders(config, self.m.prompts, stack)
        components.warm_start_actor(request, self.m.policy, self.m.tokenizer)
        self.graders = components.make_reward(
            config, rule, self.m.policy, request.device, request.progress
        )
        self.critic = components.make_critic(config, self.m.policy, request.device)
        self.engine = components.make_engine(self.m)
        a = config.algorithm
        self.reference: FrozenReference | None = None
        if a.use_kl_loss or a.use_kl_in_reward:
            frozen = copy.deepcopy(self.m.policy)
            self.reference = FrozenReference(
                frozen, tokens=a.micro_batch_tokens, columns=log_prob_batch_size(a)
            )
        self.trajectory: Any = None
        self.experience_bytes = 0

    def times(self, divisor: int, update: int) -> dict[str, list[float]]:
        """Return role -> wall-clock and CPU seconds of one of ``divisor`` processes."""
        request = replace(self.request, config=_share(self.request.config, divisor))
        rollout = components.make_rollout(
            self.request, self.m, self.engine, self.graders, 0, divisor
        )
        horizon = request.config.algorithm.response_length

        def collect() -> tuple[float, ...]:
            before = rollout.grade_s, rollout.cpu_s["grade"]
            self.trajectory, (wall, cpu) = timed(
                lambda: rollout.collect(horizon, update=update, version=0)[0]
            )
            graded, graded_cpu = rollout.grade_s - before[0], rollout.cpu_s["grade"] - before[1]
            return wall - graded, cpu - graded_cpu, graded, graded_cpu

        generate, generate_cpu, grade, grade_cpu = fastest(collect)
        t = self.trajectory
        self.experience_bytes = memory_estimate.nbytes(t) * divisor
        times = {"generate": [generate, generate_cpu], "grade": [grade, grade_cpu]}
        obs, mask = t.obs, t.mask
        full = full_kl(request.config.algorithm)
        # The actor's process computes the full KL divergence.
        if self.reference is not None and not full:
            view = self.reference.view
            times["view"] = fastest(
                lambda: timed(lambda: view(obs, mask, t.action, hidden=False))[1]
            )
        if self.critic is not None:
            values = components.make_critic_learner(request, self.critic)
            value = values.values(obs, mask)

            def teach() -> OptimizationStats:
                values.begin(obs, mask, value, value + 1.0, update)
                return values.end()

            times["values"] = fastest(lambda: timed(lambda: values.values(obs, mask))[1])
            times["teach"] = fastest(lambda: timed(teach)[1])
            values.close()
        free = _FreeModels(t.log_prob)
        critic, reference = None if self.critic is None else free, self.reference if full else free
        learner = components.make_learner(request, self.m.policy, critic, reference=reference)
        times["learn"] = fastest(lambda: timed(lambda: learner.update(t, update=update))[1])
        learner.close()
        return times


def _share(config: Config, divisor: int) -> Config:
    """Return the options of one of ``divisor`` processes: its share of all prompts."""
    a, c = config.algorithm, config.critic
    batch = max(1, a.global_batch_size // divisor)
    critic_batch = None if c.global_batch_size is None else max(1, c.global_batch_size // divisor)
    share = replace(a, rollout_batch_size=a.rollout_batch_size // divisor, global_batch_size=batch)
    return replace(config, algorithm=share, critic=replace(c, global_batch_size=critic_batch))


class _FreeModels:
    """A critic and a reference that take no time, so that an update's duration is the actor's.

    The reference returns the log-probabilities of the policy, so that the KL divergence is 0.
    """

    learning_rate = 0.0

    def __init__(self, log_prob: Tensor) -> None:
        self.log_prob = log_prob

    def initialize(self, actor: LanguagePolicy) -> None: ...

    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        return torch.zeros_like(self.log_prob)

    def begin(
        self, obs: Rows, mask: Tensor, value: Tensor, returns: Tensor, update: int
    ) -> None: ...

    def end(self) -> OptimizationStats:
        return NO_STATS

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        return {"log_prob": self.log_prob}

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None: ...

    def state_tensors(self) -> Any:
        return []

    def close(self) -> None: ...
