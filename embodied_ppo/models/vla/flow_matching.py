"""Actions of a chunk by flow matching, sampled along a chain whose steps have probabilities (π0; Flow-GRPO; ReinFlow).

B rows, C actions of a chunk, A dimensions of each, K steps of a chain, S of them stochastic, D width; H, P actions and
dimensions that the chain is made of, of which the first C and A are executed (the small model's are C and A).

Time τ runs from 1, noise, to 0, the action: x_τ = τ ε + (1 - τ) a, and the model says v = dx/dτ = ε - a.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import ActionSpec, Decision, Evaluation, ObsSpec
from embodied_ppo.models import distributions as dist
from embodied_ppo.models.vla.trunk import VLA, Found, Memory, mean_executed

PERIODS = (4e-3, 4.0)
"""Shortest and longest of the waves that τ is told in, as in π0."""
LEARNED_STD = (0.08, 0.16)
"""Range of the learned scale of a step, as in ReinFlow's robot tasks."""
Field: TypeAlias = "Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]"
"""x [B, H, P] and τ [B] -> velocity and, where it is learned, log-deviation of a step, float32 [B, H, P]."""


class Flow(nn.Module):
    """A chain of K steps from noise to a chunk of actions: what all policies that flow have in common.

    model.flow_noise   sde: a step's mean and deviation are those of ``distributions.flow_step``;
                       learned: the mean is the flow's own, the deviation a head of the model says
    model.flow_chain   one: a single step of each chain, drawn anew, is stochastic, the others follow the flow;
                       sum: all are, log-probabilities are added; mean: their mean with that of the initial noise
    Log-probabilities are [B, C, A]. What is given to ``evaluate`` again are the latents before and after each
    stochastic step. Without noise the chain follows the flow from ``start``. The value is read from what is seen.

    A body says what is seen (``see``), the velocity in its light (``field``) and its value (``value_of``). Where H > C
    or P > A the rest of a latent gets noise, too, and is in no log-probability: it is not executed (as in RLinf).
    """

    chunk: int
    """C."""
    size: int
    """A."""
    temperature: float
    steps: int
    """K."""

    def flow_by(self, config: ModelConfig, *, horizon: int, padded: int) -> None:
        """Take the options of the chain; ``horizon`` is H, ``padded`` P."""
        self.steps, self.eta, self.chain = config.flow_steps, config.flow_eta, config.flow_chain
        self.temperature = config.temperature
        self.stochastic = 1 if self.chain == "one" else self.steps
        self.horizon, self.padded = horizon, padded

    # ------------------------------------------------------------------------------------------------------------ body
    @abstractmethod
    def see(self, inputs: dict[str, Tensor]) -> Any:
        """Of what ``encode`` gave; has a ``found`` for cloning to foresee from."""

    @abstractmethod
    def field(self, seen: Any) -> Field:
        """The flow in the light of what is seen."""

    @abstractmethod
    def value_of(self, seen: Any) -> Tensor:
        """float32 [B], or [B, C] (``ValueHead``)."""

    def start(self, rows: int) -> Tensor:
        """x_1 [B, H, P] without noise."""
        return torch.zeros(rows, self.horizon, self.padded, device=self.device)

    def emit(self, x: Tensor) -> Tensor:
        """Latent actions [B, C, A] as the simulator gets them."""
        return x

    def aim(self, action: Tensor) -> Tensor:
        """The inverse of ``emit``."""
        return action

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    # ----------------------------------------------------------------------------------------------------------- chain
    def _executed(self, x: Tensor) -> Tensor:
        """[.., H, P] -> [.., C, A]."""
        if (self.horizon, self.padded) == (self.chunk, self.size):
            return x
        return x[..., : self.chunk, : self.size]

    def _step(self, field: Field, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where the flow leads in step k, int64 [B], from x, and the stochastic step's mean and log-deviation;
        [B, H, P]."""
        delta = 1 / self.steps
        tau = 1 - k * delta
        v, log_std = field(x, tau)
        ahead = x - delta * v
        if log_std is not None:
            return ahead, ahead, log_std + math.log(self.temperature)
        mean, std = dist.flow_step(x, v, tau.view(-1, 1, 1), delta, self.eta * self.temperature)
        return ahead, mean, std.log().expand_as(mean)

    def _step_log_prob(self, y: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """[B, C, A]."""
        return dist.gaussian_log_prob(*map(self._executed, (y, mean, log_std)))

    def _log_prob(self, latents: Tensor, parts: list[Tensor]) -> Tensor:
        """Of a chain [B, S + 1, H, P], from those of its stochastic steps; with flow_chain=mean also that of x_1."""
        total = torch.stack(parts).sum(0)
        if self.chain != "mean":
            return total
        return (total + _normal(self._executed(latents[:, 0]))) / (len(parts) + 1)

    # -------------------------------------------------------------------------------------------------------- protocol
    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """N(0, 1) [rows, S + 2, H, P]: x_1, the stochastic steps' and, its first number, which step is stochastic."""
        shape = (rows, self.stochastic + 2, self.horizon, self.padded)
        return dist.gaussian_noise(shape, generator, self.device)

    @torch.no_grad()
    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        seen = self.see(inputs)
        field, value, one = self.field(seen), self.value_of(seen), self.chain == "one"
        rows, device = len(value), value.device
        step = torch.zeros(rows, dtype=torch.int64, device=device)  # the first that is stochastic
        if noise is None:
            x = self.start(rows)
        else:
            x = noise[:, 0]
            if one:
                u = torch.special.ndtr(noise[:, -1].flatten(1)[:, 0])  # uniform
                step = (u * self.steps).long().clamp(max=self.steps - 1)
        xs, ys, log_probs = [], [], []
        for k in range(self.steps):
            ahead, mean, log_std = self._step(field, x, torch.full_like(step, k))
            y = ahead if noise is None else dist.gaussian_sample(mean, log_std, noise[:, 1 if one else 1 + k])
            xs.append(x)
            ys.append(y)
            log_probs.append(self._step_log_prob(y, mean, log_std))
            x = torch.where((step == k).view(-1, 1, 1), y, ahead) if one else y
        if one:
            xs, ys, log_probs = ([_at(parts, step)] for parts in (xs, ys, log_probs))
        latents = torch.stack([*xs, ys[-1]], dim=1)
        action = self.emit(self._executed(x)).flatten(1)
        return Decision(action, self._log_prob(latents, log_probs), value, {"latents": latents, "step": step})

    def evaluate(self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]) -> Evaluation:
        seen, latents = self.see(inputs), replay["latents"]
        field = self.field(seen)
        log_probs, entropies = [], []
        for j in range(self.stochastic):
            _, mean, log_std = self._step(field, latents[:, j], replay["step"] + j)
            log_probs.append(self._step_log_prob(latents[:, j + 1], mean, log_std))
            entropies.append(dist.gaussian_entropy(self._executed(mean), self._executed(log_std)))
        return Evaluation(self._log_prob(latents, log_probs), torch.stack(entropies).sum(0), self.value_of(seen))

    @torch.no_grad()
    def value(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.value_of(self.see(inputs))

    def bc_loss(
        self, inputs: dict[str, Tensor], action: Tensor, executed: Tensor, generator: Generator | None = None
    ) -> tuple[Tensor, Found | None]:
        """Squared error of the velocity at a random time, more of them near the noise (Beta(1.5, 1), as π0);
        see ``TokenVLA.bc_loss``."""
        seen = self.see(inputs)
        u = torch.rand(len(action), 1, 1, generator=generator, device=action.device)
        rest = (0, self.padded - self.size, 0, self.horizon - self.chunk)
        a = F.pad(self.aim(action), rest)  # what is not executed is aimed at 0, as π0's padding
        e = dist.gaussian_noise(a.shape, generator, action.device)
        tau = 0.001 + 0.999 * u.pow(1 / 1.5)
        v, _ = self.field(seen)(tau * e + (1 - tau) * a, tau.flatten())
        return mean_executed(self._executed((v - (e - a)).square()), executed), seen.found


class FlowVLA(VLA, Flow):
    """The small one."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        *,
        chunk: int,
        sentences: Sequence[str],
        values: int = 1,
    ) -> None:
        """As ``VLA``."""
        super().__init__(
            obs_spec,
            action_spec,
            config,
            chunk=chunk,
            sentences=sentences,
            queries=lambda C, A: C,
            values=values,
        )
        width = config.width
        self.flow_by(config, horizon=self.chunk, padded=self.size)
        self.latent = nn.Linear(self.size, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.velocity = nn.Linear(width, self.size)
        self.scale = nn.Linear(width, self.size) if config.flow_noise == "learned" else None

    @property
    def device(self) -> torch.device:
        return self.query.device

    def field(self, seen: Memory) -> Field:
        return partial(self._flow, seen, self.decoder.remember(seen))

    def _flow(
        self, memory: Memory, kept: list[tuple[Tensor, Tensor]], x: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See ``Field``; float32 [B, C, A]."""
        h = self.query + (memory.context + self.time(waves(tau, self.query.shape[1]))).unsqueeze(1) + self.latent(x)
        h = self.decoder(h, memory, kept)
        return self.velocity(h).float(), None if self.scale is None else learned_log_std(self.scale(h))

    def value_of(self, seen: Memory) -> Tensor:
        return self.value_head(F.layer_norm(seen.context, seen.context.shape[-1:]))


def learned_log_std(x: Tensor) -> Tensor:
    """Anything to a logarithm within LEARNED_STD, float32."""
    low, high = (math.log(s) for s in LEARNED_STD)
    return low + (high - low) * (0.5 + 0.5 * x.float().tanh())


def waves(tau: Tensor, width: int) -> Tensor:
    """sin and cos of 2 pi τ / period, periods in geometric series: [B] -> [B, width]."""
    low, high = PERIODS
    period = low * (high / low) ** torch.linspace(0, 1, width // 2, device=tau.device)
    angle = tau.unsqueeze(1) * (2 * math.pi / period)
    return torch.cat((angle.sin(), angle.cos()), dim=1)


def _normal(x: Tensor) -> Tensor:
    return dist.gaussian_log_prob(x, torch.zeros_like(x), torch.zeros_like(x))


def _at(parts: list[Tensor], step: Tensor) -> Tensor:
    """Of K tensors [B, C, A] row b of the one that ``step`` [B] names."""
    return torch.stack(parts)[step, torch.arange(len(step), device=step.device)]
