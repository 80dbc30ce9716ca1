"""Actor-critic policy of simulated robots without language, with a shared trunk or one each."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import (
    ActionSpec,
    ConfigError,
    Decision,
    Discrete,
    Evaluation,
    Obs,
    ObsSpec,
)
from embodied_ppo.models import distributions as dist
from embodied_ppo.models.backbone import Encoder, Trunk, linear, split_parameters


class ActorCritic(nn.Module):
    """Policy head and value head on a shared trunk, or on separate trunks.

    Continuous actions are [B, C·A] with log-probabilities [B, C, A]; discrete ones [B] with [B].
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        *,
        chunk: int = 1,
        values: int = 1,
    ) -> None:
        """Build the networks.

        Args:
            obs_spec: Observations of one environment.
            action_spec: Actions of one environment; of C actions of A dimensions each, where they
                come in chunks.
            config: Options of the section ``model``.
            chunk: Actions of a chunk, C.
            values: Outputs of the value head: 1, V is [B]; C, V is [B, C].

        Raises:
            ConfigError: The distribution does not fit the action space.
        """
        super().__init__()
        self.chunk, self.values = chunk, values
        self.kind = _distribution(config, action_spec)
        self.state_dependent_std = config.state_dependent_std
        self.log_std_range = (config.min_log_std, config.max_log_std)
        self.encoder = Encoder(obs_spec, config)
        self.trunk = Trunk(self.encoder, config)
        self.value_trunk = None if config.shared_backbone else Trunk(self.encoder, config)
        discrete = isinstance(action_spec, Discrete)
        self.actions = size = action_spec.n if discrete else action_spec.size
        outputs = 2 * size if self.kind != "categorical" and self.state_dependent_std else size
        self.policy_head = linear(
            self.trunk.features, outputs, config.policy_gain, config.orthogonal_init
        )
        self.value_head = linear(
            self.trunk.features, values, config.value_gain, config.orthogonal_init
        )
        self.log_std = None
        if self.kind != "categorical":
            if self.state_dependent_std:  # the bias sets the initial scale of all states
                with torch.no_grad():
                    self.policy_head.bias[size:] += config.init_log_std
            else:
                self.log_std = nn.Parameter(torch.full((size,), float(config.init_log_std)))

    # ---------------------------------------------------------------------------------------- heads
    def _policy(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return (mean, log_std) [B, A], or (logits [B, K], unused)."""
        out = self.policy_head(features)
        if self.kind == "categorical":
            return out, out
        if self.log_std is None:
            mean, log_std = out.chunk(2, dim=-1)
        else:
            mean, log_std = out, self.log_std
        return mean, log_std.clamp(*self.log_std_range)

    def _value(self, inputs: dict[str, Tensor], features: Tensor | None) -> Tensor:
        """Return V; ``features`` of the shared trunk are reused if given."""
        if self.value_trunk is not None:
            features = self.value_trunk(inputs)
        elif features is None:
            features = self.trunk(inputs)
        value = self.value_head(features)
        return value.squeeze(-1) if self.values == 1 else value

    def _by_action(self, x: Tensor) -> Tensor:
        """Reshape [B, C·A] to [B, C, A]."""
        return x.unflatten(-1, (self.chunk, -1))

    # ------------------------------------------------------------------------------------- protocol
    def encode(self, obs: Obs) -> dict[str, Tensor]:
        """See ``Policy.encode``."""
        return self.encoder(obs)

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """See ``Policy.observe``."""
        self.encoder.observe(obs, mask)

    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """See ``Policy.noise``."""
        draw = dist.categorical_noise if self.kind == "categorical" else dist.gaussian_noise
        return draw((rows, self.actions), generator, self.policy_head.weight.device)

    @torch.no_grad()
    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        """See ``Policy.act``."""
        features = self.trunk(inputs)
        value = self._value(inputs, features)
        params, log_std = self._policy(features)
        if self.kind == "categorical":
            action = params.argmax(-1) if noise is None else dist.categorical_sample(params, noise)
            return Decision(action, dist.categorical_log_prob(action, params), value)
        x = params if noise is None else dist.gaussian_sample(params, log_std, noise)
        if self.kind == "gaussian":
            return Decision(x, self._by_action(dist.gaussian_log_prob(x, params, log_std)), value)
        log_prob = self._by_action(dist.squashed_log_prob(x, params, log_std))
        return Decision(x.tanh(), log_prob, value, {"pre_squash": x})

    def evaluate(
        self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]
    ) -> Evaluation:
        """See ``Policy.evaluate``."""
        features = self.trunk(inputs)
        value = self._value(inputs, features)
        params, log_std = self._policy(features)
        if self.kind == "categorical":
            log_prob = dist.categorical_log_prob(action, params)
            return Evaluation(log_prob, dist.categorical_entropy(params), value, params)
        if self.kind == "gaussian":
            log_prob = dist.gaussian_log_prob(action, params, log_std)
            entropy = dist.gaussian_entropy(params, log_std)
        else:
            u = replay["pre_squash"]
            log_prob = dist.squashed_log_prob(u, params, log_std)
            entropy = dist.squashed_entropy(u, params, log_std)
        return Evaluation(self._by_action(log_prob), self._by_action(entropy), value)

    @torch.no_grad()
    def value(self, inputs: dict[str, Tensor]) -> Tensor:
        """See ``Policy.value``."""
        return self._value(inputs, None)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """See ``Policy.parameter_groups``."""
        trunks = [] if self.value_trunk is None else [self.value_trunk]
        return split_parameters(self, self.value_head, *trunks)

    def units(self) -> list[nn.Module]:
        """See ``Policy.units``."""
        return []


def _distribution(config: ModelConfig, spec: ActionSpec) -> str:
    """Return the name of the distribution, chosen by the action space for "auto"."""
    discrete = isinstance(spec, Discrete)
    kind = config.distribution
    if kind == "auto":
        return "categorical" if discrete else "gaussian"
    if discrete != (kind == "categorical"):
        fact = "discrete; use categorical"
        if not discrete:
            fact = "continuous; use gaussian or squashed_gaussian"
        raise ConfigError(f"model.distribution={kind}: the task's actions are {fact}, or auto")
    return kind
