"""DAgger: a student imitates a teacher in the states that the student itself visits.

In update u the simulator executes the teacher's action with probability beta_u, else the student's
(``GuidedPolicy``). The teacher labels every observation of the rollout with its own action, and the
student is trained on them (``DistillationLearner``). beta_u falls to 0, so that the student learns
in the states of its own policy, including those that the teacher never visits.

Each update trains on its own rollout only, as the student changes little from one to the next.

Source: Ross, Gordon, Bagnell 2011, "A Reduction of Imitation Learning and Structured Prediction to
No-Regret Online Learning", algorithm 3.1.

B samples, T steps, N environments, A action dimensions (of all actions of a chunk).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn

from embodied_envs.adapters.actions import policy_bounds
from embodied_envs.base import tree
from embodied_envs.base.observation_names import SINGLE
from embodied_envs.base.tree import apply_in_parts
from embodied_envs.types import ArraySpec, Box, Obs, ObsSpec
from embodied_ppo.core import compile, types
from embodied_ppo.core.history import ObservationHistory, named
from embodied_ppo.core.recurrent_state import MEMORY, START
from embodied_ppo.options.rules.base import refuse_any
from embodied_ppo.options.schema import Config, DistillationConfig
from embodied_ppo.policies import distributions as dist
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.ppo import losses
from embodied_ppo.ppo.minibatches import MinibatchLoss, SampleCutter, Statistics
from embodied_ppo.ppo.optimizer import MinibatchOptimizer

LARGEST_TANH = 1.0 - 1e-6  # bound of an action whose inverse tanh is computed


# --------------------------------------------------------------------------------- pure functions
def teacher_share(config: DistillationConfig, update: int) -> float:
    """Return beta of an update, counted from 0.

    beta = max(0, 1 - update / teacher_share_updates), and 0 where teacher_share_updates is 0.
    """
    if update >= config.teacher_share_updates:
        return 0.0
    return 1.0 - update / config.teacher_share_updates


@dataclass(frozen=True)
class Selection:
    """What a policy reads of the simulators' observations.

    Attributes:
        spec: Observations that the policy was built for.
        history: Stacks observations for another policy, of which this one reads the newest only.
    """

    spec: ObsSpec
    history: ObservationHistory | None = None

    def __call__(self, obs: Obs) -> Obs:
        """Return the part of observations [N, ..]; the state of a memory is kept."""
        named_obs = named(obs)
        chosen = obs if self.history is None else self.history.newest(named_obs)
        if isinstance(self.spec, ArraySpec):
            chosen = named(chosen)[SINGLE]
        else:
            assert isinstance(chosen, dict)
            chosen = {name: chosen[name] for name in self.spec}
        if self.history is not None or MEMORY not in named_obs:
            return chosen
        return {**named(chosen), MEMORY: named_obs[MEMORY], START: named_obs[START]}


def executed_bounds(action_mapping: str, spec: Any) -> tuple[Tensor, Tensor]:
    """Return the bounds [A] to which ``env.action_mapping`` clamps a policy's action.

    Actions beyond the bounds have the effect of those at the bounds. Without bounds they are
    infinite.
    """
    if not isinstance(spec, Box) or action_mapping == "none":
        return torch.tensor([-math.inf]), torch.tensor([math.inf])
    return policy_bounds(spec, action_mapping)


def mode_of(kind: str, parameters: Tensor, second: Tensor) -> Tensor:
    """Return the action without noise of a distribution: numbers [B, A], or choices int64 [B].

    Args:
        kind: ``ActorCritic.kind``.
        parameters: First result of ``ActorCritic.distribution``.
        second: Second result.
    """
    if kind == "categorical":
        return parameters.argmax(-1)
    mode = dist.NUMBERS[kind].mode(parameters, second)
    return mode.tanh() if kind == "squashed_gaussian" else mode


def distillation_loss(
    loss: str, kind: str, parameters: Tensor, log_std: Tensor, target: Tensor
) -> Tensor:
    """Return the loss of each sample, [B]; all arguments may be [T, B, ..] instead of [B, ..].

    mse  (a - a_T)^2, mean over action dimensions; a: mode of the student
    nll  -log pi(a_T), sum over action dimensions
    kl   KL(pi_T || pi), sum over action dimensions (of the Gaussians before the tanh)

    Args:
        loss: "mse", "nll" or "kl".
        kind: ``ActorCritic.kind`` of the student, and with kl also of the teacher.
        parameters: Mean of the student's Gaussian [B, A], alpha of beta, or logits [B, K].
        log_std: Logarithm of its standard deviation, [A] or [B, A], beta; not read for logits.
        target: mse, nll: the teacher's action, float32 [B, A] or int64 [B]. kl: both parameters of
            the teacher [B, 2A], or its logits [B, K].
    """
    if loss == "mse":
        return (mode_of(kind, parameters, log_std) - target).square().mean(-1)
    if kind == "categorical":
        if loss == "nll":
            return -dist.categorical_log_prob(target, parameters)
        return dist.categorical_kl(target, parameters)
    if loss == "kl":
        teacher_mean, teacher_log_std = target.chunk(2, dim=-1)
        return dist.NUMBERS[kind].kl(teacher_mean, teacher_log_std, parameters, log_std).sum(-1)
    if kind == "squashed_gaussian":
        u = target.clamp(-LARGEST_TANH, LARGEST_TANH).atanh()
        return -dist.squashed_log_prob(u, parameters, log_std).sum(-1)
    return -dist.NUMBERS[kind].log_prob(target, parameters, log_std).sum(-1)


def resolve_loss(config: DistillationConfig, student: ActorCritic, teacher: ActorCritic) -> str:
    """Return "mse", "nll" or "kl" for the option ``distillation.loss``.

    Raises:
        ConfigError: The loss is not defined for the distributions of student and teacher.
    """
    discrete, loss = student.kind == "categorical", config.loss
    if loss == "auto":
        loss = "kl" if discrete else "mse"
    refusals = {
        "distill a task whose action is one Box or one Discrete: distillation does not support"
        " several choices at once": student.composite is not None,
        "distillation.loss = mse: the task's actions are discrete; write distillation.loss=kl, nll"
        " or auto": loss == "mse" and discrete,
        f"distillation.loss = kl: the teacher's distribution is {teacher.kind}, the student's"
        f" {student.kind}; write model.distribution={teacher.kind}, or"
        " distillation.loss=mse": config.loss == "kl" and student.kind != teacher.kind,
    }
    refuse_any(refusals)
    return loss


# -------------------------------------------------------------------------------------- the rollout
class GuidedPolicy(nn.Module):
    """Policy of the rollout: acts as teacher or student, and labels every observation.

    ``Decision.replay`` has "target", the labels for ``distillation_loss``, and "error" [N], the
    mean absolute difference of the executed modes of student and teacher (discrete: whether they
    differ). Log-probabilities and values are 0, because nothing reads them.
    """

    def __init__(
        self,
        student: ActorCritic,
        teacher: ActorCritic,
        config: DistillationConfig,
        *,
        read_student: Selection,
        read_teacher: Selection,
        bounds: tuple[Tensor, Tensor],
    ) -> None:
        """Create the policy.

        Args:
            student: Policy that is trained.
            teacher: Policy that labels; its parameters become constants.
            config: Options of the section ``distillation``.
            read_student: What the student's networks read.
            read_teacher: What the teacher reads.
            bounds: Result of ``executed_bounds``.

        Raises:
            ConfigError: The loss is not defined for the two distributions.
        """
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)
        self.config, self.loss = config, resolve_loss(config, student, teacher)
        self.read_student, self.read_teacher = read_student, read_teacher
        self.memory_size = student.memory_size
        # Buffers, because compiled code reads their current values.
        device = student.policy_head.weight.device
        self.share = nn.Buffer(torch.zeros((), device=device), persistent=False)
        self.low, self.high = (nn.Buffer(x.to(device), persistent=False) for x in bounds)
        self.set_update(0)

    def set_update(self, update: int) -> None:
        """Set the probability of the teacher's actions for an update."""
        self.share.fill_(teacher_share(self.config, update))

    def encode(self, obs: Obs) -> dict[str, Any]:
        """Return the inputs of both policies."""
        return {
            "student": self.student.encode(self.read_student(obs)),
            "teacher": self.teacher.encode(self.read_teacher(obs)),
        }

    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """Return the student's noise and a uniform number, which selects who acts, [rows, A+1]."""
        noise = self.student.noise(rows, generator)
        uniform = torch.rand(rows, 1, generator=generator, device=noise.device)
        return torch.cat([noise, uniform], dim=1)

    @torch.no_grad()
    def act(self, inputs: dict[str, Any], *, noise: Tensor | None = None) -> types.Decision:
        """Choose an action and label the observation; see the class."""
        assert noise is not None
        student, teacher = self.student, self.teacher
        own = student.act(inputs["student"])
        target, teacher_log_std = teacher.distribution(inputs["teacher"])
        mode, label = own.action, mode_of(teacher.kind, target, teacher_log_std)
        if student.kind == "categorical":
            error = (mode != label).float()
        else:
            label = label.clamp(self.low, self.high)
            error = (mode.clamp(self.low, self.high) - label).abs().mean(-1)
        action = mode
        if self.config.sample_actions:
            action = student.act(inputs["student"], noise=noise[:, :-1]).action
        is_guided = noise[:, -1] < self.share
        action = torch.where(is_guided if action.ndim == 1 else is_guided[:, None], label, action)
        if self.loss != "kl":
            target = label
        elif teacher.kind != "categorical":
            target = torch.cat([target, teacher_log_std.expand_as(target)], dim=-1)
        zeros, replay = torch.zeros_like(error), {"target": target, "error": error}
        return types.Decision(action, zeros, zeros, replay, own.memory)

    def value(self, inputs: dict[str, Any]) -> Tensor:
        """Return 0 [B]."""
        x = next(tree.leaves(inputs))
        return torch.zeros(len(x), device=x.device)

    def evaluate(
        self, inputs: dict[str, Any], action: Tensor, replay: dict[str, Tensor]
    ) -> types.Evaluation:
        """Return the student's evaluation of actions."""
        return self.student.evaluate(inputs["student"], action, replay)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Return the student's groups of parameters."""
        return self.student.parameter_groups()

    def units(self) -> list[nn.Module]:
        """Return the student's large modules."""
        return self.student.units()

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """Merge observations into the student's normalisers; the teacher's are constants."""
        self.student.observe(self.read_student(obs), mask)


# -------------------------------------------------------------------------------------- the learner
@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationBatch(types.Samples):
    """What the loss of a student reads.

    Attributes:
        inputs: Encoded observations of the student.
        target: The teacher's labels, see ``distillation_loss``.
    """

    inputs: Any
    target: Tensor


class DistillationLoss(MinibatchLoss):
    """Mean of ``distillation_loss`` over a minibatch."""

    def __init__(self, student: ActorCritic, config: Any, kind: str) -> None:
        """Create the loss.

        Args:
            student: Policy that is trained.
            config: Options of the optimiser, an ``AlgorithmConfig``.
            kind: "mse", "nll" or "kl".
        """
        super().__init__(student, config, names=("policy_loss",))
        self.kind = kind

    def forward(self, b: DistillationBatch) -> tuple[Tensor, Statistics]:
        """See ``MinibatchLoss``."""
        model = self.model
        distribution = model.distribution_of_columns if model.memory_size else model.distribution
        parameters, log_std = distribution(b.inputs, mean_only=self.kind == "mse")
        elements = distillation_loss(self.kind, model.kind, parameters, log_std, b.target)
        loss = losses.aggregate(elements, b.mask, rows=b.rows)
        return loss, {"policy_loss": loss.detach()}


class DistillationLearner:
    """Trains the student on the labels of each rollout; see ``core.types.Learner``."""

    def __init__(
        self,
        policy: GuidedPolicy,
        config: Config,
        *,
        updates: int,
        compile_schedule: compile.CompileSchedule | None = None,
    ) -> None:
        """Create the learner.

        Args:
            policy: Student and teacher.
            config: Options of the run, with those of distillation in section algorithm
                (``options.batch_sizes.optimization_config``).
            updates: Updates of the complete run.
            compile_schedule: As for ``MinibatchOptimizer``.
        """
        self.policy, self.config = policy, config
        self.rows = config.algorithm.logprob_forward_micro_batch_size
        self.cpu_s = {"update": 0.0}
        student = policy.student
        # A parameter without gradient cannot be part of compiled code: mse reads no deviation.
        unread = student.log_std if policy.loss == "mse" else None
        actor = [p for p in student.parameter_groups()["actor"] if p is not unread]
        self.optimizer = MinibatchOptimizer(
            DistillationLoss(student, config.algorithm, policy.loss),
            {"actor": actor, "critic": []},
            config.algorithm,
            SampleCutter(config.algorithm),
            updates=updates,
            seed=config.seed,
            compile_schedule=compile_schedule,
            section="distillation",
        )

    def update(self, trajectory: types.Trajectory, *, update: int) -> types.Metrics:
        """Train the student on a rollout [T, N, ..]; ``update`` counts from 0.

        Raises:
            TrainingError: A loss or gradient is not finite.
        """
        start = time.process_time()
        policy, obs = self.policy, tree.flatten_time(trajectory.obs)
        mask, error = trajectory.mask, trajectory.replay["error"]  # [T, N]
        inputs = apply_in_parts(policy.student.encode, self.rows, policy.read_student(obs))
        inputs = tree.map(lambda x: x.unflatten(0, mask.shape), inputs)
        batch = DistillationBatch(inputs=inputs, target=trajectory.replay["target"], mask=mask)
        if self.config.algorithm.minibatch_unit == "step":
            batch = tree.flatten_time(batch)
        stats = self.optimizer.optimize(batch, update)
        share = float(policy.share)
        policy.observe(obs, mask.flatten())
        policy.set_update(update + 1)
        self.cpu_s["update"] += time.process_time() - start
        steps = stats.sums["steps"]
        return {
            "distill/loss": types.Mean(stats.sums["policy_loss"], steps),
            "distill/action_error": types.Mean(float((error * mask).sum()), float(mask.sum())),
            "distill/teacher_share": share,
            "policy/grad_norm": types.Mean(stats.sums["actor_norm"], steps),
            "policy/lr": self.optimizer.learning_rates[0],
        }

    def state(self) -> dict[str, Any]:
        """Return everything besides the weights that the next update depends on."""
        return {**self.optimizer.state(), "teacher_share": float(self.policy.share)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``."""
        self.optimizer.load_state(state)
        self.policy.share.fill_(state["teacher_share"])

    def set_observer(self, observer: types.UpdateObserver) -> None:
        """Call ``observer`` with the batch and the minibatches of each update."""
        self.optimizer.observer = observer

    def close(self) -> None:
        """Stop a compilation in progress."""
        self.optimizer.close()
