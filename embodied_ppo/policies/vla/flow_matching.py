"""Action head with flow matching, sampled along a chain whose steps have probabilities.

B rows, C actions of a chunk, A dimensions of each, K steps of a chain, S of them stochastic, D
width. H, P: actions and dimensions of a latent, of which the first C and A are executed (equal to C
and A in the small model).

Time τ runs from 1 (noise) to 0 (action): x_τ = τ ε + (1 − τ) a. The model predicts the velocity v =
dx/dτ = ε − a.

Source: π0 (Black et al. 2024), Flow-GRPO (Liu et al. 2025), ReinFlow (Zhang et al. 2025).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from embodied_ppo.core.types import Decision, Evaluation
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import distributions as dist
from embodied_ppo.policies.vla.trunk import DecoderMemory, Grounding
from embodied_ppo.policies.vla.vla_policy import VLA, VLAPolicy

PERIODS = (4e-3, 4.0)  # shortest and longest period of the sinusoidal encoding of τ, as in π0
# Range of the learned standard deviation of a step, as in ReinFlow's robot tasks.
LEARNED_STD = (0.08, 0.16)
# x [B, H, P], τ [B] -> velocity and, if learned, log-deviation of a step, float32 [B, H, P].
Field: TypeAlias = "Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]"


class Flow(VLAPolicy):
    """Chain of K steps from noise to a chunk of actions; base class of all flow policies.

    model.flow_noise:
        sde: mean and deviation of a step are those of ``distributions.flow_step``.
        learned: the mean is the flow's own step, the deviation is predicted by a head.
    model.flow_chain:
        one: a single step of each chain, drawn at random, is stochastic; the others follow the
            flow.
        sum: all steps are stochastic, and their log-probabilities are added.
        mean: all steps are stochastic; mean of their log-probabilities and that of the initial
            noise.

    Log-probabilities are [B, C, A]. ``Decision.replay`` holds the latents before and after each
    stochastic step. Without noise, the chain follows the flow from ``start``.

    A subclass implements ``encode_context``, ``field`` (velocity) and ``value_of``. Where H > C or
    P > A, the additional numbers of a latent get noise, too, but are in no log-probability because
    they are not executed (as in RLinf).
    """

    # Steps of the chain, K.
    steps: int

    def configure_chain(self, config: ModelConfig, *, horizon: int, padded: int) -> None:
        """Read the options of the chain; ``horizon`` is H, ``padded`` is P."""
        self.steps, self.eta, self.chain = config.flow_steps, config.flow_eta, config.flow_chain
        self.temperature = config.temperature
        self.stochastic = 1 if self.chain == "one" else self.steps
        self.horizon, self.padded = horizon, padded

    # ---------------------------------------------------------------------------------------- model
    @abstractmethod
    def field(self, context: Any) -> Field:
        """Return the velocity field given the context.

        The context's attribute ``grounding`` is the input of cloning's auxiliary loss.
        """

    def start(self, rows: int) -> Tensor:
        """Return the x_1 of a deterministic chain, [B, H, P]."""
        return torch.zeros(rows, self.horizon, self.padded, device=self.device)

    def denormalize_actions(self, x: Tensor, context: Any) -> Tensor:
        """Convert latent actions [B, C, A] to the units of the simulator.

        ``context`` is the result of ``encode_context`` for the same rows.
        """
        return x

    def normalize_actions(self, action: Tensor, context: Any) -> Tensor:
        """Convert actions to latent units, the inverse of ``denormalize_actions``."""
        return action

    # ---------------------------------------------------------------------------------------- chain
    def _executed(self, x: Tensor) -> Tensor:
        """Return the executed part of a latent: [.., H, P] -> [.., C, A]."""
        if (self.horizon, self.padded) == (self.chunk, self.size):
            return x
        return x[..., : self.chunk, : self.size]

    def _step(self, field: Field, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute step k, int64 [B], from x.

        Returns:
            The deterministic successor, and mean and log-deviation of the stochastic one; [B, H,
            P].
        """
        delta = 1 / self.steps
        tau = (1 - k.double() * delta).float()  # the published times: rounded only once
        v, log_std = field(x, tau)
        ahead = x - delta * v
        if log_std is not None:
            return ahead, ahead, log_std + math.log(self.temperature)
        mean, std = dist.flow_step(x, v, tau.view(-1, 1, 1), delta, self.eta * self.temperature)
        return ahead, mean, std.log().expand_as(mean)

    def _step_log_prob(self, y: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
        """Return the log-probability of a step, [B, C, A]."""
        return dist.gaussian_log_prob(*map(self._executed, (y, mean, log_std)))

    def _log_prob(self, latents: Tensor, parts: list[Tensor]) -> Tensor:
        """Return the log-probability of a chain [B, S + 1, H, P] from those of its stochastic
        steps.

        flow_chain=mean includes that of x_1.
        """
        total = torch.stack(parts).sum(0)
        if self.chain != "mean":
            return total
        first = self._executed(latents[:, 0])
        zero = torch.zeros_like(first)
        return (total + dist.gaussian_log_prob(first, zero, zero)) / (len(parts) + 1)

    # ------------------------------------------------------------------------------------- protocol
    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """Return N(0, 1) numbers [rows, S + 2, H, P].

        They are x_1, the noise of the stochastic steps, and a last block whose first number selects
        the stochastic step of flow_chain=one.
        """
        shape = (rows, self.stochastic + 2, self.horizon, self.padded)
        return dist.gaussian_noise(shape, generator, self.device)

    @torch.no_grad()
    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        """See ``Policy.act``."""
        context = self.encode_context(inputs)
        field, value, one = self.field(context), self.value_of(context), self.chain == "one"
        rows, device = len(value), value.device
        step = torch.zeros(rows, dtype=torch.int64, device=device)  # the first stochastic step
        if noise is None:
            x = self.start(rows)
        else:
            x = noise[:, 0]
            if one:
                # Φ(noise) is uniform, so that one generator provides all randomness of ``act``.
                u = torch.special.ndtr(noise[:, -1].flatten(1)[:, 0])
                step = (u * self.steps).long().clamp(max=self.steps - 1)
        # Of each stochastic step: the latent before it, the latent after it, its log-probability.
        before, after, log_probs = [], [], []
        for k in range(self.steps):
            ahead, mean, log_std = self._step(field, x, torch.full_like(step, k))
            y = ahead
            if noise is not None:
                y = dist.gaussian_sample(mean, log_std, noise[:, 1 if one else 1 + k])
            before.append(x)
            after.append(y)
            log_probs.append(self._step_log_prob(y, mean, log_std))
            x = torch.where((step == k).view(-1, 1, 1), y, ahead) if one else y
        if one:
            chains = (before, after, log_probs)
            rows = torch.arange(len(step), device=step.device)
            before, after, log_probs = ([torch.stack(parts)[step, rows]] for parts in chains)
        latents = torch.stack([*before, after[-1]], dim=1)
        action = self.denormalize_actions(self._executed(x), context).flatten(1)
        log_prob, replay = self._log_prob(latents, log_probs), {"latents": latents, "step": step}
        return Decision(action, log_prob, value, replay)

    def evaluate(
        self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]
    ) -> Evaluation:
        """See ``Policy.evaluate``."""
        context, latents = self.encode_context(inputs), replay["latents"]
        field = self.field(context)
        log_probs, entropies = [], []
        for j in range(self.stochastic):
            _, mean, log_std = self._step(field, latents[:, j], replay["step"] + j)
            log_probs.append(self._step_log_prob(latents[:, j + 1], mean, log_std))
            entropies.append(dist.gaussian_entropy(self._executed(mean), self._executed(log_std)))
        log_prob, entropy = self._log_prob(latents, log_probs), torch.stack(entropies).sum(0)
        return Evaluation(log_prob, entropy, self.value_of(context))

    def action_loss(
        self, context: Any, action: Tensor, generator: Generator | None
    ) -> tuple[Tensor, Grounding | None]:
        """Return the squared error of the velocity at a random time.

        Times near the noise are more frequent (Beta(1.5, 1), as in π0).
        """
        u = torch.rand(len(action), 1, 1, generator=generator, device=action.device)
        # The target is 0 where nothing is executed, as π0's padding.
        padding = (0, self.padded - self.size, 0, self.horizon - self.chunk)
        a = F.pad(self.normalize_actions(action, context), padding)
        e = dist.gaussian_noise(a.shape, generator, action.device)
        tau = 0.001 + 0.999 * u.pow(1 / 1.5)
        v, _ = self.field(context)(tau * e + (1 - tau) * a, tau.flatten())
        return self._executed((v - (e - a)).square()), context.grounding


class FlowVLA(VLA, Flow):
    """Small flow policy: decoder tokens are the noisy actions."""

    def build_head(self, config: ModelConfig) -> None:
        """See ``VLA.build_head``."""
        width = config.width
        self.configure_chain(config, horizon=self.chunk, padded=self.size)
        self.latent = nn.Linear(self.size, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.velocity = nn.Linear(width, self.size)
        self.scale = nn.Linear(width, self.size) if config.flow_noise == "learned" else None

    def field(self, context: DecoderMemory) -> Field:
        """See ``Flow.field``."""
        return partial(self._flow, context, self.decoder.project_memory(context))

    def _flow(
        self, memory: DecoderMemory, memory_kv: list[tuple[Tensor, Tensor]], x: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Compute velocity and log-deviation, float32 [B, C, A]; see ``Field``."""
        time = self.time(time_encoding(tau, self.width))
        h = self.query + (memory.summary + time).unsqueeze(1) + self.latent(x)
        h = self.decoder(h, memory, memory_kv)
        log_std = None if self.scale is None else learned_log_std(self.scale(h))
        return self.velocity(h).float(), log_std

    def value_of(self, context: DecoderMemory) -> Tensor:
        """See ``VLAPolicy.value_of``."""
        return self.value_head(F.layer_norm(context.summary, context.summary.shape[-1:]))


def learned_log_std(x: Tensor) -> Tensor:
    """Map any real number to a log-deviation within LEARNED_STD, float32."""
    low, high = (math.log(s) for s in LEARNED_STD)
    return low + (high - low) * (0.5 + 0.5 * x.float().tanh())


def time_encoding(tau: Tensor, width: int) -> Tensor:
    """Return sin and cos of 2 π τ / period, periods in geometric series: [B] -> [B, width]."""
    low, high = PERIODS
    period = low * (high / low) ** torch.linspace(0, 1, width // 2, device=tau.device)
    angle = tau.unsqueeze(1) * (2 * math.pi / period)
    return torch.cat((angle.sin(), angle.cos()), dim=1)
