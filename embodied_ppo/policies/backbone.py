"""Observation encoder, and trunks: MLP, CNN, or the user's network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError, choose
from embodied_envs.base.observation_names import names_observation
from embodied_envs.types import ArraySpec, Obs, ObsSpec
from embodied_ppo.core.running_stats import RunningMoments
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import own_network
from embodied_ppo.policies.initialization import orthogonal_

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU, "gelu": nn.GELU}
# Input that joins all observations except images, flattened. No image's name has a slash.
VECTOR = "/vector"


OWN_MEMORY = "memory"  # name of the recurrent layer's output among the inputs of the user's network


class InferenceModule(nn.Module):
    """Module that always stays in evaluation mode.

    Dropout would make log-probabilities and values random.
    """

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)


def channels_first_shape(spec: ArraySpec) -> tuple[int, int, int]:
    """Return the shape of an image as (channels, height, width)."""
    assert spec.layout is not None
    return spec.layout.shape(spec.shape)


def split_parameters(policy: nn.Module, *critic: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters of a policy as groups, see ``Policy.parameter_groups``.

    Args:
        policy: The policy.
        critic: Its modules that are trained by the value loss only.
    """
    values = [p for module in critic for p in module.parameters()]
    ids = {id(p) for p in values}
    actor = [p for p in policy.parameters() if p.requires_grad and id(p) not in ids]
    return {"actor": actor, "critic": values}


def select_specs(spec: ObsSpec, keys: Sequence[str], option: str) -> dict[str, ArraySpec]:
    """Return the observations that ``keys`` names, in the simulator's order.

    Args:
        spec: Observations of one environment.
        keys: Value of the option ``option``.
        option: Path of an option, for messages.

    Raises:
        ConfigError: A key names none.
    """
    named = spec if isinstance(spec, dict) else {}
    for key in keys:
        if not any(names_observation(key, name) for name in named):
            offered = choose(key, list(named), "it has ") if named else "it is one array"
            raise ConfigError(f"{option}: {key!r} is not in the observation; {offered}")
    return {n: s for n, s in named.items() if any(names_observation(key, n) for key in keys)}


class Encoder(nn.Module):
    """Maps raw observations to {VECTOR: float32 [B, D], image name: [B, C, H, W] of 0 to 255}.

    Vectors are normalised by running moments, which only ``observe`` changes, so that every
    encoding within an update is equal. Images pass unchanged; the trunk divides them by 255.
    """

    def __init__(self, spec: ObsSpec, config: ModelConfig) -> None:
        super().__init__()
        named = spec if isinstance(spec, dict) else {"obs": spec}
        self.names = frozenset(named)
        self.images = {name: s for name, s in named.items() if s.layout is not None}
        self.layouts = {name: s.layout for name, s in self.images.items() if s.layout is not None}
        self.vectors = {name: s for name, s in named.items() if s.layout is None}
        self.vector_size = sum(math.prod(s.shape) for s in self.vectors.values())
        self.clip = config.obs_clip
        self.moments = None
        if config.normalize_obs and self.vectors:
            eps = config.obs_eps if isinstance(config.obs_eps, tuple) else (config.obs_eps, 0.0)
            self.moments = RunningMoments((self.vector_size,), *eps, scale_constants=False)

    def constant_inputs(self) -> list[str]:
        """Return the names of the numbers that had the same value in all of the training."""
        if self.moments is None or not float(self.moments.count):
            return []
        names = [
            f"{name}[{i}]" for name, s in self.vectors.items() for i in range(math.prod(s.shape))
        ]
        return [names[i] for i in self.moments.is_constant().nonzero().flatten().tolist()]

    def join(self, obs: Obs) -> Tensor:
        """Concatenate all vectors, [B, D], in their own units."""
        if isinstance(obs, Tensor):
            return obs.flatten(1) if obs.dim() != 2 else obs
        # A number per environment, such as the index of a sentence, is [B]. An exported graph needs
        # flatten: with reshape, the number of rows would be a constant.
        parts = [obs[name] for name in self.vectors]
        wide = any(s.dtype == torch.float64 for s in self.vectors.values())
        dtype = torch.float64 if wide else torch.float32
        return torch.cat(
            [(x.unsqueeze(1) if x.dim() == 1 else x.flatten(1)).to(dtype) for x in parts], dim=1
        )

    @torch.no_grad()
    def forward(self, obs: Obs) -> dict[str, Tensor]:
        """Return the model inputs of raw observations."""
        inputs: dict[str, Tensor] = {}
        if self.vectors:
            x = self.join(obs)  # [B, D]
            if self.moments is not None:
                m = self.moments
                normalize = m.normalize_large if x.dtype == torch.float64 else m.normalize
                x = normalize(x, self.clip)
            inputs[VECTOR] = x.float()
        for name, layout in self.layouts.items():
            x = obs if isinstance(obs, Tensor) else obs[name]
            inputs[name] = layout.to_bytes(layout.channels_first(x))
        return inputs

    @torch.no_grad()
    def observe(self, obs: Obs, mask: Tensor) -> None:
        """Merge raw observations [M, ..] where ``mask`` [M] is True into the moments."""
        if self.moments is not None:
            self.moments.update(self.join(obs), mask)


def linear(size_in: int, size_out: int, gain: float) -> nn.Linear:
    """Return a linear layer whose weight is ``gain`` times an orthogonal matrix, and its bias 0."""
    return _init(nn.Linear(size_in, size_out), gain)


def _init(layer: Layer, gain: float) -> Layer:
    """Initialise a layer, see ``linear``."""
    orthogonal_(layer.weight, gain)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


# Gain of the orthogonal initialisation of hidden layers.
HIDDEN_GAIN = math.sqrt(2.0)


def _convolution(into: int, out: int, kernel: int, stride: int) -> nn.Conv2d:
    """Return a convolution of a hidden layer."""
    return _init(nn.Conv2d(into, out, kernel, stride), HIDDEN_GAIN)


class Pixels(nn.Module):
    """The pixels of an image that is too small for convolutions: uint8 [B, ..] -> float32 [B, n].

    They are divided by 255.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.features = math.prod(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).float() * (1.0 / 255.0)


class NatureCNN(nn.Module):
    """Convolutions of Mnih et al. 2015: uint8 [B, C, H, W] -> float32 [B, features]."""

    # Smallest height and width of an image, pixels.
    SMALLEST = 36

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = shape
        sizes = (channels, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)
        layers = [layer for size in sizes for layer in (_convolution(*size), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Flatten())
        with torch.no_grad():
            self.features = self.layers(torch.zeros(1, channels, height, width)).shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.float() * (1.0 / 255.0))


class SpatialSoftmaxCNN(nn.Module):
    """Convolutions and a spatial softmax: uint8 [B, C, H, W] -> float32 [B, 64].

    The softmax of each of 32 maps is a distribution over the cells of the image; its mean position
    (x, y) in [-1, 1] is the result. A map that responds to an object returns where the object is.

    Source: Levine et al. 2016, "End-to-End Training of Deep Visuomotor Policies", section 5.1; with
    the first layer of Mnih et al. 2015.
    """

    MAPS = 32
    # Smallest height and width of an image, pixels.
    SMALLEST = 16

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        maps, conv = self.MAPS, _convolution
        layers = conv(shape[0], maps, 8, 4), conv(maps, maps, 3, 1), conv(maps, maps, 1, 1)
        self.layers = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        self.features = 2 * maps

    def forward(self, x: Tensor) -> Tensor:
        maps = self.layers(x.float() * (2.0 / 255.0) - 1.0)
        height, width = maps.shape[-2:]
        p = maps.flatten(2).softmax(-1).unflatten(2, (height, width))
        columns = torch.linspace(-1, 1, width, device=x.device)
        rows = torch.linspace(-1, 1, height, device=x.device)
        return torch.cat([p.sum(2) @ columns, p.sum(3) @ rows], dim=1)


class DefaultTrunk(nn.Module):
    """Maps encoded inputs to features [B, hidden[-1]].

    A CNN encodes each image; the hidden layers process all inputs together, with the output of a
    recurrent layer that reads the same inputs, if there is one.
    """

    def __init__(
        self, encoder: Encoder, config: ModelConfig, *, features: int = 0, recurrent: int = 0
    ) -> None:
        """Build the layers.

        Args:
            encoder: Its outputs are the inputs.
            config: Options of the section ``model``.
            features: Features of another trunk that ``join`` gets besides.
            recurrent: Units of the recurrent layer.

        Raises:
            ConfigError: There are no observations.
        """
        super().__init__()
        self.names = list(encoder.images)
        self.cnns = nn.ModuleList()  # one per image in the order of ``names``
        size = encoder.vector_size + features
        cnn_class = NatureCNN if config.pooling == "flatten" else SpatialSoftmaxCNN
        for spec in encoder.images.values():
            shape = channels_first_shape(spec)
            cnn = Pixels(shape) if min(shape[1:]) < cnn_class.SMALLEST else cnn_class(shape)
            self.cnns.append(cnn)
            size += cnn.features
        if size == 0:
            raise ConfigError("env: the observation is empty; nothing to act on")
        self.inputs = size  # size of what the hidden layers and the recurrent layer read
        # x ← x·w/n and W ← W·√(n/w) with w = base_inputs: the first outputs have the variance of w
        # inputs, and changes of all weights by ±lr move them by at most lr·w·|x|, not lr·n·|x|
        # (Yang & Hu 2021, μP, for Adam).
        base, wide = config.base_inputs, encoder.vector_size
        self.wide = wide
        self.scale = 1.0 if base is None else min(1.0, base / max(wide, 1))
        layers: list[nn.Module] = []
        for size_in, size_out in pairwise((size + recurrent, *config.hidden)):
            layer = linear(size_in, size_out, HIDDEN_GAIN)
            if not layers:
                with torch.no_grad():
                    layer.weight[:, features : features + wide] *= self.scale**-0.5
            layers.append(layer)
            layers.append(ACTIVATIONS[config.activation]())
        self.layers = nn.Sequential(*layers)
        self.features = config.hidden[-1] if config.hidden else size + recurrent

    def join(self, inputs: dict[str, Tensor], features: Tensor | None = None) -> Tensor:
        """Return all inputs as one vector each, [B, ``inputs``]."""
        parts = [] if features is None else [features]
        if VECTOR in inputs:
            x = inputs[VECTOR]
            parts.append(x if self.scale == 1.0 else x * self.scale)
        parts += [cnn(inputs[name]) for name, cnn in zip(self.names, self.cnns, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def combine(self, inputs: dict[str, Tensor], joined: Tensor, recurrent: Tensor) -> Tensor:
        """Return features of joined inputs [B, ``inputs``] and the recurrent layer's [B, H]."""
        return self.layers(torch.cat([joined, recurrent], dim=1))

    def forward(self, inputs: dict[str, Tensor], features: Tensor | None = None) -> Tensor:
        return self.layers(self.join(inputs, features))


class OwnTrunk(InferenceModule):
    """The user's network (``model.network``): maps encoded inputs to features [B, D].

    It always is in evaluation mode: dropout is off, and batch normalisation keeps its statistics.
    """

    scale, wide = 1.0, 0  # model.base_inputs is not read

    def __init__(
        self, encoder: Encoder, config: ModelConfig, *, features: int = 0, recurrent: int = 0
    ) -> None:
        """Build the network; arguments as those of ``DefaultTrunk``.

        Raises:
            ConfigError: See ``own_network``; or ``features`` of another trunk would be an input; or
                the recurrent layer has no vector to read, or the name of an observation.
        """
        super().__init__()
        spec = config.network
        assert spec is not None
        if features:
            raise ConfigError(
                f"model.network = {spec}: cannot read the features of the actor's network, as the"
                " critic with model.critic_obs does; write model.shared_backbone=false"
            )
        if recurrent and not encoder.vectors:
            raise ConfigError(
                f"model.recurrent = {config.recurrent}: with model.network it reads the vectors of"
                " the observation, and there are only images; leave one of the two out"
            )
        if recurrent and OWN_MEMORY in encoder.names:
            raise ConfigError(f"rename the observation {OWN_MEMORY}: model.recurrent has this name")
        self.spec, self.inputs = spec, encoder.vector_size
        self.vectors = {name: tuple(s.shape) for name, s in encoder.vectors.items()}
        images = {name: channels_first_shape(s) for name, s in encoder.images.items()}
        self.images = tuple(images)
        memory = {OWN_MEMORY: (recurrent,)} if recurrent else {}
        shapes = {**self.vectors, **images, **memory}
        self.network = own_network.build(spec, shapes, config.network_options)
        zeros = {name: torch.zeros(2, *s, dtype=torch.uint8) for name, s in images.items()}
        if self.vectors:
            zeros[VECTOR] = torch.zeros(2, encoder.vector_size)
        self.train(False)
        named = self._split(zeros) | {name: torch.zeros(2, *s) for name, s in memory.items()}
        self.features = own_network.count_features(spec, self.network, named)

    def __reduce__(self) -> tuple[Any, ...]:
        """Import the user's file before the state is unpickled (in a compiler or video process)."""
        return _new_own_trunk, (self.spec,), self.__dict__

    def _split(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return {name: float32 [B, ..] of a vector, or uint8 [B, C, H, W] of an image}."""
        named = {name: inputs[name] for name in self.images}
        if self.vectors:
            sizes = [math.prod(shape) for shape in self.vectors.values()]
            parts = inputs[VECTOR].split(sizes, dim=1)
            for (name, shape), part in zip(self.vectors.items(), parts, strict=True):
                named[name] = part.reshape(-1, *shape)
        return named

    def join(self, inputs: dict[str, Tensor], features: Tensor | None = None) -> Tensor:
        """Return what the recurrent layer reads: all vectors, [B, ``inputs``]."""
        return inputs[VECTOR]

    def combine(self, inputs: dict[str, Tensor], joined: Tensor, recurrent: Tensor) -> Tensor:
        """Return features; the recurrent layer's output [B, H] is the input ``OWN_MEMORY``."""
        return self.network({**self._split(inputs), OWN_MEMORY: recurrent})

    def forward(self, inputs: dict[str, Tensor], features: Tensor | None = None) -> Tensor:
        return self.network(self._split(inputs))


def _new_own_trunk(spec: str) -> OwnTrunk:
    """Return an object without state, see ``OwnTrunk.__reduce__``."""
    own_network.import_file(spec)
    return OwnTrunk.__new__(OwnTrunk)


def make_trunk(
    encoder: Encoder, config: ModelConfig, *, features: int = 0, recurrent: int = 0
) -> DefaultTrunk | OwnTrunk:
    """Return the user's network if there is one, else ``DefaultTrunk``, with its arguments."""
    cls = DefaultTrunk if config.network is None else OwnTrunk
    return cls(encoder, config, features=features, recurrent=recurrent)
