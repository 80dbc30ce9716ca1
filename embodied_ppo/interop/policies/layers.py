"""Networks of linear layers in the state_dict of another library."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from embodied_ppo.core.errors import ConfigError

RECURRENT = re.compile(r"(weight|bias)_(ih|hh)_l\d+|(^|\.)(lstm|gru|rnn|memory_a|memory_c)\w*\.")
"""Names of the weights of recurrent layers."""


@dataclass(frozen=True)
class Linear:
    """One linear layer.

    Attributes:
        weight: float32 [out, in].
        bias: float32 [out].
    """

    weight: Tensor
    bias: Tensor

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]


class StateDict:
    """A state_dict whose tensors are taken one after another; what remains is unknown."""

    def __init__(self, tensors: dict[str, Tensor], label: str) -> None:
        """Store the tensors; ``label`` is the name of the file in messages."""
        self.tensors, self.label = dict(tensors), label

    def take(self, name: str) -> Tensor | None:
        """Return and remove a tensor; None: there is none of this name."""
        return self.tensors.pop(name, None)

    def need(self, name: str) -> Tensor:
        """Return and remove a tensor. Raises ConfigError if there is none."""
        x = self.take(name)
        if x is None:
            known = ", ".join([*self.tensors][:4])
            raise ConfigError(
                f"{self.label}: has no {name!r} (it has {known}, ..); name a checkpoint of PPO with"
                " a network of linear layers"
            )
        return x

    def linear(self, prefix: str) -> Linear:
        """Return and remove the layer PREFIX.weight, PREFIX.bias. Raises ConfigError."""
        weight, bias = self.need(f"{prefix}.weight"), self.need(f"{prefix}.bias")
        if weight.ndim != 2 or bias.shape != weight.shape[:1]:
            raise ConfigError(
                f"{self.label}: the layer {prefix!r} has weights {list(weight.shape)} and biases"
                f" {list(bias.shape)}; expected a matrix and a bias vector"
            )
        return Linear(weight, bias)

    def mlp(self, prefix: str) -> list[Linear]:
        """Return and remove all layers PREFIX.<number>, in this order. Raises ConfigError."""
        pattern = re.compile(re.escape(prefix) + r"\.(\d+)\.weight")
        numbers = sorted(int(m[1]) for name in self.tensors if (m := pattern.fullmatch(name)))
        return [self.linear(f"{prefix}.{i}") for i in numbers]

    def finish(self) -> None:
        """Raise ConfigError if a tensor remains, which no network of ours contains."""
        if self.tensors:
            raise unknown_layers(self.tensors, self.label)


def unknown_layers(names: Iterable[str], label: str) -> ConfigError:
    """Return the refusal of weights that have no counterpart."""
    layers = [*dict.fromkeys(name.rpartition(".")[0] or name for name in names)]
    listed = ", ".join(layers[:3]) + (", .." if len(layers) > 3 else "")
    recurrent = any(RECURRENT.search(name) for name in names)
    kind = "recurrent layers" if recurrent else "layers"
    return ConfigError(
        f"{label}: has {kind} that no network of ours contains: {listed}; policies of linear layers"
        " can be imported"
    )


def check_chain(network: list[Linear], what: str, label: str) -> None:
    """Raise ConfigError where a layer does not fit the one before it."""
    for before, after in pairwise(network):
        if after.inputs != before.outputs:
            raise ConfigError(
                f"{label}: a layer of the {what} has {before.outputs} outputs, and the next one"
                f" reads {after.inputs}; the file is damaged or is not a chain of linear layers"
            )
