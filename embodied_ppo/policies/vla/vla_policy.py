"""Base classes and parts that all vision-language-action policies share, published ones included.

B rows, C actions of a chunk, A dimensions of each, D width, Q tokens of the decoder.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ActionSpec, Box, Obs, ObsSpec
from embodied_ppo.core.devices import device_memory_gb
from embodied_ppo.core.types import Decision, Evaluation
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.backbone import split_parameters
from embodied_ppo.policies.vla.trunk import ActionDecoder, DecoderMemory, Grounding, Trunk


class ValueHead(nn.Module):
    """V of a hidden state, float32 [B], or [B, C] with a value for each action of a chunk.

    The last layer is zero at the start, so that V is 0 everywhere.
    """

    def __init__(
        self, width: int, detach: bool | None, hidden: int | None = None, *, values: int = 1
    ) -> None:
        """Build the head.

        Args:
            width: Size of the hidden state.
            detach: Stop the gradient to the hidden state. None: as True.
            hidden: Units of the hidden layer, None: 4 * width.
            values: Number of outputs, 1 or C.
        """
        super().__init__()
        self.detach, hidden, self.values = detach is not False, hidden or 4 * width, values
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, values))
        for p in self.layers[-1].parameters():
            nn.init.zeros_(p)

    def forward(self, hidden: Tensor) -> Tensor:
        value = self.layers(hidden.detach() if self.detach else hidden).float()
        return value.squeeze(-1) if self.values == 1 else value


def action_size(spec: ActionSpec, chunk: int, config: ModelConfig) -> int:
    """Return the dimensions of one action (A) of an action space that holds chunks.

    Raises:
        ConfigError: The actions are discrete.
    """
    if not isinstance(spec, Box):
        raise ConfigError(
            f"model.policy={config.policy}: the task's actions are discrete; use"
            " model.policy=actor_critic"
        )
    return spec.size // chunk


def check_units(spec: ActionSpec, config: ModelConfig, mapping: str) -> None:
    """Check a checkpoint whose actions are in the units of its dataset.

    Args:
        spec: Action space of the task.
        config: Options of the section ``model``.
        mapping: Value of env.action_mapping.

    Raises:
        ConfigError: The mapping would rescale actions that are already in physical units.
    """
    unit = isinstance(spec, Box) and set(spec.low) == {-1.0} and set(spec.high) == {1.0}
    if mapping == "rescale" and not unit:
        raise ConfigError(
            f"env.action_mapping=rescale: model.checkpoint={config.checkpoint} gives actions in its"
            " dataset's units, and the task's bounds are not -1 and 1; write"
            " env.action_mapping=clip"
        )


def encode_in_parts(
    function: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    inputs: dict[str, Tensor],
    rows: int,
    limit: float = math.inf,
) -> dict[str, Tensor] | None:
    """Return ``function(inputs)``, computed for ``rows`` rows at a time.

    None: the results would take more than ``limit`` bytes.
    """
    total = len(next(iter(inputs.values())))
    results: dict[str, Tensor] = {}
    for i in range(0, total, rows):
        part = function({name: x[i : i + rows] for name, x in inputs.items()})
        if not results:
            if sum(x.nbytes for x in part.values()) * total > limit * min(rows, total):
                return None
            results = {name: x.new_empty(total, *x.shape[1:]) for name, x in part.items()}
        for name, x in part.items():
            results[name][i : i + rows] = x
    return results


class VLAPolicy(nn.Module):
    """Members that all vision-language-action policies share."""

    # An ``ObservationEncoder``.
    trunk: Any
    value_head: ValueHead
    # Actions of a chunk, C.
    chunk: int
    # Dimensions of an action, A.
    size: int
    # Size of ``Grounding.focus``.
    width: int
    temperature: float
    # Sentences that the instruction observation indexes.
    sentences: tuple[str, ...] = ()
    # Whether model.freeze_trunk excludes the trunk from training.
    frozen = False
    # Memory in GB of the device that a run is planned for; None: the policy's device.
    planned_memory_gb: float | None = None

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.value_head.parameters()).device

    def device_memory_gb(self) -> float:
        """Return the memory of the device, or the one that a run is planned for, in GB."""
        if self.planned_memory_gb is not None:
            return self.planned_memory_gb
        return device_memory_gb(self.device)

    def keeps_features(self, rows: int) -> bool:
        """Return whether ``encode`` returns features of a trunk that is not trained.

        Otherwise it returns observations, and each minibatch computes the features.

        Args:
            rows: Observations of an update in this process.
        """
        return False

    @abstractmethod
    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        """See ``Policy.act``."""

    @abstractmethod
    def evaluate(
        self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]
    ) -> Evaluation:
        """See ``Policy.evaluate``."""

    @abstractmethod
    def encode_context(self, inputs: dict[str, Tensor]) -> Any:
        """Return what actions and value are computed from, given the result of ``encode``."""

    @abstractmethod
    def value_of(self, context: Any) -> Tensor:
        """Return V, float32 [B] or [B, C] (``ValueHead``)."""

    @abstractmethod
    def action_loss(
        self, context: Any, action: Tensor, generator: Generator | None
    ) -> tuple[Tensor, Grounding | None]:
        """Return the loss [B, C, A] of ``bc_loss`` and the input of the auxiliary loss."""

    def scaled_actions(self, action: Tensor, obs: Obs) -> Tensor:
        """Return actions [B, A] in the unit in which most demonstrated ones are in [-1, 1].

        ``obs`` are the vector observations, [B, ..] by name.
        """
        return action

    @torch.no_grad()
    def value(self, inputs: dict[str, Tensor]) -> Tensor:
        """See ``Policy.value``."""
        return self.value_of(self.encode_context(inputs))

    def bc_loss(
        self,
        inputs: dict[str, Tensor],
        action: Tensor,
        executed: Tensor,
        generator: Generator | None = None,
    ) -> tuple[Tensor, Grounding | None]:
        """Return the behaviour cloning loss, and the input of the auxiliary loss.

        Args:
            inputs: Result of ``encode``.
            action: Demonstrated actions [B, C, A].
            executed: bool [B, C], actions that the mean is taken over.
            generator: Source of the noise, in heads that draw any.
        """
        loss, grounding = self.action_loss(self.encode_context(inputs), action, generator)
        return (loss.mean(-1) * executed).sum() / executed.sum().clamp_min(1), grounding

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """See ``Policy.observe``."""
        self.trunk.observe(obs, mask)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """See ``Policy.parameter_groups``."""
        return split_parameters(self, self.value_head)


class VLA(VLAPolicy):
    """Trunk, decoder and value head of the small policies; subclasses add the action head.

    A frozen trunk runs once per observation, in ``encode``. The epochs of an update then start from
    its memory.
    """

    # Observations that a frozen trunk processes at a time.
    FROZEN_ROWS = 256
    # Fields of a frozen trunk's memory that ``encode`` returns.
    MEMORY_FIELDS = ("tokens", "padding", "summary")

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
        """Build the policy.

        Args:
            obs_spec: Observations of one environment.
            action_spec: Actions of one environment: C actions of A dimensions.
            config: Options of the section ``model``.
            chunk: C.
            sentences: The simulator's instructions.
            values: Outputs of the value head, 1 or C.

        Raises:
            ConfigError: The observation or action space is not supported.
        """
        super().__init__()
        self.chunk, self.size = chunk, action_size(action_spec, chunk, config)
        self.trunk, self.decoder = Trunk(obs_spec, sentences, config), ActionDecoder(config)
        self.query = nn.Parameter(torch.randn(self.num_queries(), config.width))
        self.value_head = ValueHead(config.width, config.detach_value, values=values)
        self.temperature, self.width = config.temperature, config.width
        self.sentences = tuple(sentences)
        self.build_head(config)

    def num_queries(self) -> int:
        """Return the number of decoder tokens, Q."""
        return self.chunk

    def build_head(self, config: ModelConfig) -> None:
        """Build the action head, the last step of the constructor; a subclass must implement it."""
        raise NotImplementedError

    def freeze(self, frozen: bool) -> None:
        """Exclude the trunk from training, or include it."""
        self.frozen = frozen
        self.trunk.requires_grad_(not frozen)

    def encode(self, obs: Obs) -> dict[str, Tensor]:
        """See ``Policy.encode``."""
        inputs = self.trunk.encode(obs)
        if not self.frozen:
            return inputs

        def memory(part: dict[str, Tensor]) -> dict[str, Tensor]:
            result = self.trunk(part)
            return {f"/{name}": getattr(result, name) for name in self.MEMORY_FIELDS}

        with torch.no_grad():
            return encode_in_parts(memory, inputs, self.FROZEN_ROWS) or {}

    def encode_context(self, inputs: dict[str, Tensor]) -> DecoderMemory:
        """Return the memory for the result of ``encode``."""
        if not self.frozen:
            return self.trunk(inputs)
        tokens, padding, summary = (inputs[f"/{name}"] for name in self.MEMORY_FIELDS)
        return DecoderMemory(tokens, padding, summary)

    def set_sentences(self, sentences: Sequence[str]) -> None:
        """Set the sentences that the instruction observation indexes."""
        self.sentences = tuple(sentences)
        self.trunk.set_sentences(self.sentences)

    def units(self) -> list[nn.Module]:
        """See ``Policy.units``."""
        return [*self.decoder.blocks]
