"""Actor-critic policy of simulated robots without language, with a shared trunk or one each.

Actor and critic read the same observations, or those of ``model.actor_obs`` and
``model.critic_obs``, each through a normaliser of its own. With a shared trunk, the critic's own
layers read its features and what the actor does not read. A critic that reads more than the actor
(friction, masses, forces) values states better, and acting needs none of it (Pinto et al. 2018,
"Asymmetric Actor Critic for Image-Based Robot Learning").
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from embodied_envs.base import tree
from embodied_envs.base.errors import ConfigError
from embodied_envs.base.observation_names import ACTION_MASK, TASK
from embodied_envs.types import ActionSpec, ArraySpec, Box, Composite, Discrete, Obs, ObsSpec
from embodied_ppo.core.history import PREVIOUS_ACTIONS
from embodied_ppo.core.recurrent_state import MEMORY, START
from embodied_ppo.core.types import MEAN_SHIFT, Decision, Evaluation, choices_of, has_action_mask
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import backbone
from embodied_ppo.policies import distributions as dist
from embodied_ppo.policies.backbone import DefaultTrunk, OwnTrunk, make_trunk, split_parameters
from embodied_ppo.policies.composite_actions import CompositeActions
from embodied_ppo.policies.popart import TASK_INPUT, PopArt
from embodied_ppo.policies.recurrent import RecurrentLayer

# Name of the model inputs that only the critic reads, a dictionary like that of the actor's.
CRITIC = "/critic"
# Gain of a new policy head: actions hardly depend on observations (Andrychowicz et al. 2020).
POLICY_GAIN = 0.01


class ActorCritic(nn.Module):
    """Policy head and value head on a shared trunk, or on separate trunks.

    Continuous actions are [B, C·A] with log-probabilities [B, C, A]; discrete ones [B] with [B];
    those of a ``Composite`` [B, D + A] with [B, 1, D + A]. Where the simulator returns an
    ``ACTION_MASK``, choices that it excludes have probability 0.

    A policy for a simulator that does not return ``model.critic_obs`` has no critic: it acts, and
    its values are NaN. ``unused_weights`` are then the prefixes of the weights that it does not
    load.

    With ``model.recurrent``, the hidden layers of each trunk read the output of a recurrent layer
    besides the observation, which that layer reads, too. ``memory_size`` is the size of the state
    of all recurrent layers, first the actor's.
    """

    unused_weights: tuple[str, ...] = ()

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        *,
        chunk: int = 1,
        values: int = 1,
        popart: PopArt | None = None,
    ) -> None:
        """Build the networks.

        Args:
            obs_spec: Observations of one environment.
            action_spec: Actions of one environment; of C actions of A dimensions each, where they
                come in chunks.
            config: Options of the section ``model``.
            chunk: Actions of a chunk, C.
            values: Outputs of the value head: 1, V is [B]; C, V is [B, C].
            popart: Statistics that normalise the value, which then is one; None: it is not.

        Raises:
            ConfigError: The distribution does not fit the action space, or an observation that the
                actor reads does not exist.
        """
        super().__init__()
        self.chunk, self.values = chunk, values
        self.kind = _distribution(config, action_spec)
        self.is_beta = config.distribution == "beta"
        # Distribution of the numbers of an action.
        self.family = dist.NUMBERS.get(config.distribution, dist.NUMBERS["auto"])
        self.state_dependent_std = bool(config.state_dependent_std)
        self.uses_softplus = config.state_dependent_std == "softplus"
        self.log_std_range = (config.min_log_std, config.max_log_std)
        actor_spec, critic_spec = _split_observations(obs_spec, config)
        has_critic = critic_spec is not None
        self.encoder = backbone.Encoder(actor_spec, config)
        units = 0 if config.recurrent is None else config.recurrent_size
        self.trunk = make_trunk(self.encoder, config, recurrent=units)
        # Inputs of ``value_trunk``; None: use those of the actor.
        self.critic_encoder = backbone.Encoder(critic_spec, config) if critic_spec else None
        self.recurrent = _make_recurrent(config, self.trunk)
        features = self.trunk.features
        own_trunk = has_critic and (self.critic_encoder is not None or not config.shared_backbone)
        encoder = self.critic_encoder or self.encoder
        # A tail behind the shared trunk reads its features, and needs no memory of its own.
        self.has_tail = own_trunk and config.shared_backbone
        # Whether actor and critic share no weight; a user's network may share what it likes.
        self.separate = own_trunk and not config.shared_backbone and config.network is None
        self.value_trunk = self.value_recurrent = None
        if self.has_tail:
            self.value_trunk = make_trunk(encoder, config, features=features)
        elif own_trunk:
            hidden = config.hidden if config.critic_hidden is None else config.critic_hidden
            self.value_trunk = make_trunk(encoder, replace(config, hidden=hidden), recurrent=units)
            self.value_recurrent = _make_recurrent(config, self.value_trunk)
        layers = (self.recurrent, self.value_recurrent)
        self.memory_size = sum(layer.state_size for layer in layers if layer is not None)
        choices = choices_of(action_spec)
        box = action_spec.box if isinstance(action_spec, Composite) else action_spec
        self.numbers = box.size if isinstance(box, Box) else 0  # continuous dimensions of an action
        self.actions = size = sum(choices) + self.numbers
        self.composite = None
        if isinstance(action_spec, Composite):
            self.composite = CompositeActions(choices, self.numbers, self.family)
        self.has_mask = has_action_mask(obs_spec)
        # One output for each logit, and one or two for each number.
        outputs = size + self.numbers if self.state_dependent_std or self.is_beta else size
        self.policy_head = backbone.linear(features, outputs, POLICY_GAIN)
        self.value_head = None
        if has_critic:
            features = (self.value_trunk or self.trunk).features
            values = values if popart is None else popart.tasks
            self.value_head = backbone.linear(features, values, 1.0)
        else:
            critic = ("critic_encoder.", "value_trunk.", "value_recurrent.", "value_head.")
            self.unused_weights = (*critic, "popart.")
        self.popart = popart if has_critic else None
        self.log_std = None
        if self.numbers and not self.is_beta:
            if self.state_dependent_std:  # the bias sets the initial scale of all states
                with torch.no_grad():
                    self.policy_head.bias[size:] += self._initial_std_output(config.init_log_std)
            else:
                self.log_std = nn.Parameter(torch.full((self.numbers,), float(config.init_log_std)))

    # ---------------------------------------------------------------------------------------- heads
    def _initial_std_output(self, log_std: float) -> float:
        """Return the network's output for a standard deviation of exp(``log_std``)."""
        if not self.uses_softplus:
            return log_std
        above = math.exp(log_std) - math.exp(self.log_std_range[0])  # softplus of the output
        return math.log(math.expm1(max(above, 1e-6)))

    def features(self, inputs: dict[str, Any], steps: int = 1) -> tuple[Tensor, Tensor | None]:
        """Return the actor's features [B, F] and the state of its memory after the last step.

        Args:
            inputs: Model inputs [B, ..]; with memory they are ``steps`` steps of B / steps
                sequences, in order of time.
            steps: Steps of a sequence.
        """
        if self.recurrent is None:
            return self.trunk(inputs), None
        joined = self.trunk.join(inputs)
        hidden, state = _advance(self.recurrent, joined, inputs, 0, steps)
        return self.trunk.combine(inputs, joined, hidden), state

    def _policy(
        self, features: Tensor, inputs: dict[str, Any], *, mean_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the two parameters of the distribution, see ``distribution``, or of a composite.

        The first one of a composite has the logits of its choices before its means.
        """
        out = self.policy_head(features)
        if self.has_mask:
            out = dist.mask_logits(out, inputs[ACTION_MASK])
        if not self.numbers or (mean_only and self.log_std is not None):
            return out, out
        if self.is_beta:
            # Above 1, so that the density has one maximum, inside the bounds.
            logits, x = out.split([self.actions - self.numbers, 2 * self.numbers], dim=-1)
            alpha, beta = (1 + functional.softplus(x)).chunk(2, dim=-1)
            return torch.cat([logits, alpha], dim=-1), beta
        if self.log_std is None:
            mean, log_std = out.split([self.actions, self.numbers], dim=-1)
            if self.uses_softplus:
                log_std = (functional.softplus(log_std) + math.exp(self.log_std_range[0])).log()
        else:
            mean, log_std = out, self.log_std
        return mean, log_std.clamp(*self.log_std_range)

    def _value(
        self,
        inputs: dict[str, Any],
        features: Tensor | None,
        steps: int = 1,
        *,
        normalized: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return V and the state of the critic's own memory; ``features`` are reused if given.

        ``normalized``: return the value that the loss reads, see ``PopArt``.

        V is NaN where the critic, or an observation that it reads, is missing; the state is then
        the one before.
        """
        own = inputs if self.critic_encoder is None else inputs.get(CRITIC)
        offset = self.recurrent.state_size if self.recurrent is not None else 0
        if self.value_head is None or own is None:
            x = next(tree.leaves(inputs))
            shape = (len(x),) if self.values == 1 else (len(x), self.values)
            state = None if self.value_recurrent is None else inputs[MEMORY][:, offset:]
            return torch.full(shape, torch.nan, device=x.device), state
        shared, state = features, None
        if shared is None and (self.value_trunk is None or self.has_tail):
            shared, _ = self.features(inputs, steps)
        if self.value_trunk is None:
            x = shared
        elif self.value_recurrent is None:
            x = self.value_trunk(own, shared if self.has_tail else None)
        else:
            joined = self.value_trunk.join(own)
            hidden, state = _advance(self.value_recurrent, joined, inputs, offset, steps)
            x = self.value_trunk.combine(own, joined, hidden)
        value = self.value_head(x)
        if self.popart is not None:
            return self.popart(value, inputs.get(TASK_INPUT), normalized=normalized), state
        return (value.squeeze(-1) if self.values == 1 else value), state

    def _by_action(self, x: Tensor) -> Tensor:
        """Reshape [B, C·A] to [B, C, A]."""
        return x.unflatten(-1, (self.chunk, -1))

    # ------------------------------------------------------------------------------------- protocol
    def encode(self, obs: Obs) -> dict[str, Any]:
        """See ``Policy.encode``. Observations that only the critic reads may be missing."""
        inputs: dict[str, Any] = self.encoder(obs)
        critic, named = self.critic_encoder, obs if isinstance(obs, dict) else {}
        if critic is not None and critic.names <= named.keys():
            inputs[CRITIC] = critic(obs)
        if self.memory_size:
            inputs |= {name: named[name] for name in (MEMORY, START)}
        if self.has_mask:
            inputs[ACTION_MASK] = named[ACTION_MASK]
        if self.popart is not None and self.popart.tasks > 1:
            inputs[TASK_INPUT] = named[TASK]
        return inputs

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """See ``Policy.observe``."""
        if self.log_std is not None:
            # A clamped parameter has no gradient beyond its bounds, and would stay there for ever.
            with torch.no_grad():
                self.log_std.clamp_(*self.log_std_range)
        self.encoder.observe(obs, mask)
        if self.critic_encoder is not None:
            self.critic_encoder.observe(obs, mask)

    def noise(self, rows: int, generator: Generator | None = None) -> Tensor:
        """See ``Policy.noise``."""
        device = self.policy_head.weight.device
        if self.composite is not None:
            return self.composite.noise(rows, generator, device)
        draw = dist.categorical_noise if self.kind == "categorical" else self.family.noise
        return draw((rows, self.actions), generator, device)

    @torch.no_grad()
    def act(self, inputs: dict[str, Any], *, noise: Tensor | None = None) -> Decision:
        """See ``Policy.act``."""
        features, state = self.features(inputs)
        value, own_state = self._value(inputs, features)
        states = [x for x in (state, own_state) if x is not None]
        memory = torch.cat(states, dim=-1) if states else None
        params, log_std = self._policy(features, inputs)
        if self.composite is not None:
            action = self.composite.sample(params, log_std, noise)
            log_prob = self._by_action(self.composite.log_prob(action, params, log_std))
            return Decision(action, log_prob, value, memory=memory)
        if self.kind == "categorical":
            action = params.argmax(-1) if noise is None else dist.categorical_sample(params, noise)
            log_prob = dist.categorical_log_prob(action, params)
            return Decision(action, log_prob, value, memory=memory)
        family = self.family
        x = family.mode(params, log_std) if noise is None else family.sample(params, log_std, noise)
        if self.kind != "squashed_gaussian":
            log_prob = self._by_action(family.log_prob(x, params, log_std))
            return Decision(x, log_prob, value, memory=memory)
        log_prob = self._by_action(dist.squashed_log_prob(x, params, log_std))
        return Decision(x.tanh(), log_prob, value, {"pre_squash": x}, memory)

    def choose(self, features: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the mode of actions with choices, and their logits [B, K] before the mask."""
        logits = self.policy_head(features)[..., : self.actions - self.numbers]
        params, second = self._policy(features, inputs, mean_only=True)
        params = params[..., : self.actions]
        if self.composite is None:
            return params.argmax(-1), logits
        return self.composite.sample(params, second, None), logits

    def evaluate_columns(
        self, inputs: dict[str, Any], action: Tensor, replay: dict[str, Tensor]
    ) -> Evaluation:
        """Evaluate sequences with gradients through time (truncated at their first steps).

        Args:
            inputs: As for ``evaluate``, but [T, B, ..].
            action: [T, B, ..].
            replay: [T, B, ..].

        Returns:
            As ``evaluate``, [T, B, ..].
        """
        size, flat = action.shape[:2], tree.flatten_time
        evaluation = self.evaluate(flat(inputs), flat(action), flat(replay), size[0])
        return tree.map(lambda x: x.unflatten(0, size), evaluation)

    def evaluate(
        self, inputs: dict[str, Any], action: Tensor, replay: dict[str, Tensor], steps: int = 1
    ) -> Evaluation:
        """See ``Policy.evaluate``; with ``PopArt`` the value is normalised.

        Rows are ``steps`` steps of B / steps sequences, in order of time. A memory starts from the
        recorded state of each sequence's first row.
        """
        features, _ = self.features(inputs, steps)
        value, _ = self._value(inputs, features, steps, normalized=True)
        params, log_std = self._policy(features, inputs)
        shifted = params  # RPO: the mean in the log-probability
        if MEAN_SHIFT in replay:
            z = replay[MEAN_SHIFT][..., -self.numbers :]
            shifted = params + functional.pad(z, (self.actions - self.numbers, 0))
        if self.composite is not None:
            log_prob = self._by_action(self.composite.log_prob(action, shifted, log_std))
            entropy = self._by_action(self.composite.entropy(params, log_std))
            logits = None if self.numbers else self.composite.logits(params)
            return Evaluation(log_prob, entropy, value, logits)
        if self.kind == "categorical":
            log_prob = dist.categorical_log_prob(action, params)
            return Evaluation(log_prob, dist.categorical_entropy(params), value, params)
        if self.kind == "squashed_gaussian":
            u = replay["pre_squash"]
            log_prob = dist.squashed_log_prob(u, shifted, log_std)
            entropy = dist.squashed_entropy(u, params, log_std)
        else:
            log_prob = self.family.log_prob(action, shifted, log_std)
            entropy = self.family.entropy(params, log_std)
        mean = dist.beta_mean(params, log_std) if self.is_beta else params
        return Evaluation(self._by_action(log_prob), self._by_action(entropy), value, mean=mean)

    @torch.no_grad()
    def memory_after(self, inputs: dict[str, Any]) -> Tensor:
        """Return the state [B, S] after sequences, whose inputs are as for ``evaluate_columns``."""
        steps, rows = inputs[START].shape[0], tree.flatten_time(inputs)
        features, state = self.features(rows, steps)
        _, own_state = self._value(rows, features, steps)
        return torch.cat([x for x in (state, own_state) if x is not None], dim=-1)

    def actor_only(self) -> ActorCritic:
        """Return a copy without the critic: values are NaN, and the memory is the actor's."""
        actor = copy.deepcopy(self)
        actor.value_head = actor.value_trunk = actor.value_recurrent = actor.critic_encoder = None
        actor.popart = None
        actor.memory_size = 0 if actor.recurrent is None else actor.recurrent.state_size
        return actor

    @torch.no_grad()
    def value(self, inputs: dict[str, Any]) -> Tensor:
        """See ``Policy.value``."""
        return self._value(inputs, None)[0]

    def distribution(
        self, inputs: dict[str, Any], *, mean_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return (mean, log_std) or (alpha, beta) [B, A], or (logits [B, K], unused).

        ``kind`` names the distribution; the mean of squashed_gaussian is that before the tanh. The
        logarithm of a standard deviation that is equal in all states is [A]. With ``mean_only`` it
        is not read: compiled code must not read a parameter that is not one of its arguments. The
        results have gradients.
        """
        return self._policy(self.features(inputs)[0], inputs, mean_only=mean_only)

    def distribution_of_columns(
        self, inputs: dict[str, Any], *, mean_only: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return ``distribution`` of sequences, [T, B, ..], with gradients through time.

        Args:
            inputs: As for ``distribution``, but [T, B, ..].
            mean_only: As for ``distribution``.
        """
        size, rows = next(tree.leaves(inputs)).shape[:2], tree.flatten_time(inputs)
        features, _ = self.features(rows, size[0])
        params, log_std = self._policy(features, rows, mean_only=mean_only)
        joined = params.unflatten(0, size)
        return joined, log_std if log_std.ndim == 1 else log_std.unflatten(0, size)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """See ``Policy.parameter_groups``."""
        modules = (self.value_head, self.value_trunk, self.value_recurrent)
        return split_parameters(self, *(module for module in modules if module is not None))

    def units(self) -> list[nn.Module]:
        """See ``Policy.units``."""
        return []


def _make_recurrent(config: ModelConfig, trunk: DefaultTrunk | OwnTrunk) -> RecurrentLayer | None:
    """Return the recurrent layer that reads what a trunk joins, if there is one."""
    if config.recurrent is None:
        return None
    layer = RecurrentLayer(config.recurrent, trunk.inputs, config.recurrent_size)
    with torch.no_grad():  # as those of the first hidden layer, see ``DefaultTrunk``
        layer.input_weight[:, : trunk.wide] *= trunk.scale**-0.5
    return layer


def _advance(
    layer: RecurrentLayer, joined: Tensor, inputs: dict[str, Any], offset: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Return the layer's output [B, H] and its state after the last step.

    Args:
        layer: The layer.
        joined: Its input [B, D], rows as in ``ActorCritic.features``.
        inputs: Contain the state before each row and the marks of first steps.
        offset: First number of the layer in the state.
        steps: Steps of a sequence.
    """
    memory = inputs[MEMORY][:, offset : offset + layer.state_size]
    if steps == 1:  # without a number of rows that an exported program would keep
        out, state = layer(joined.unsqueeze(0), memory, inputs[START].unsqueeze(0))
        return out.squeeze(0), state
    x, start = joined.unflatten(0, (steps, -1)), inputs[START].unflatten(0, (steps, -1))
    out, state = layer(x, memory[: x.shape[1]], start)
    return out.flatten(0, 1), state


def _split_observations(
    spec: ObsSpec, config: ModelConfig
) -> tuple[ObsSpec, dict[str, ArraySpec] | None]:
    """Return what the actor reads, and what an encoder of the critic's own reads.

    The second is empty if the critic reads the actor's inputs only, and None if the simulator does
    not return what the critic reads.
    """
    if isinstance(spec, dict) and has_action_mask(spec):
        spec = {name: s for name, s in spec.items() if name != ACTION_MASK}
    if config.actor_obs is None or config.critic_obs is None:
        return spec, {}
    actions = (PREVIOUS_ACTIONS,) if config.history > 1 else ()
    actor = backbone.select_specs(spec, (*config.actor_obs, *actions), "model.actor_obs")
    try:
        critic = backbone.select_specs(spec, (*config.critic_obs, *actions), "model.critic_obs")
    except ConfigError:
        return actor, None
    if config.shared_backbone:
        critic = {name: s for name, s in critic.items() if name not in actor}
    return actor, critic


def _distribution(config: ModelConfig, spec: ActionSpec) -> str:
    """Return the name of the distribution, chosen by the action space for "auto"."""
    discrete = isinstance(spec, Discrete)
    kind = config.distribution
    if isinstance(spec, Composite):
        allowed = ("gaussian", "beta") if spec.box.size else ("categorical",)
        if kind not in ("auto", *allowed):
            raise ConfigError(
                f"model.distribution={kind}: the task's actions have {len(spec.choices)} choices"
                f" and {spec.box.size} numbers; use auto"
            )
        return "composite"
    if kind == "auto":
        return "categorical" if discrete else "gaussian"
    if discrete != (kind == "categorical"):
        fact = "discrete; use categorical"
        if not discrete:
            fact = "continuous; use gaussian, squashed_gaussian, beta"
        raise ConfigError(f"model.distribution={kind}: the task's actions are {fact}, or auto")
    return kind
