"""Networks of linear layers in the state_dict of another library."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_ppo.tools.import_policy.untrusted_files import shown


class Linear(NamedTuple):
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
            known = shown(", ".join([*self.tensors][:4]))
            raise ConfigError(
                "name a checkpoint of PPO with a network of linear layers:"
                f" {self.label} has no {name!r}; it has {len(self.tensors):,} tensors, {known}"
            )
        return x

    def linear(self, prefix: str) -> Linear:
        """Return and remove the layer PREFIX.weight, PREFIX.bias. Raises ConfigError."""
        weight, bias = self.need(f"{prefix}.weight"), self.need(f"{prefix}.bias")
        if weight.ndim != 2 or bias.shape != weight.shape[:1] or not weight.numel():
            raise ConfigError(
                "name a checkpoint with linear layers, a matrix and a bias vector each: the layer"
                f" {shown(prefix)} of {self.label} has weights {list(weight.shape)} and biases"
                f" {list(bias.shape)}"
            )
        return Linear(weight, bias)

    def mlp(self, prefix: str) -> list[Linear]:
        """Return and remove all layers PREFIX.<number>, in this order. Raises ConfigError."""
        pattern = re.compile(re.escape(prefix) + r"\.(\d{1,6})\.weight")
        numbers = sorted(int(m[1]) for name in self.tensors if (m := pattern.fullmatch(name)))
        return [self.linear(f"{prefix}.{i}") for i in numbers]

    def finish(self) -> None:
        """Raise ConfigError if a tensor remains, which no network of ours contains."""
        if layers := [*dict.fromkeys(name.rpartition(".")[0] or name for name in self.tensors)]:
            total = f" ({len(layers):,} in all)" if len(layers) > 3 else ""
            names = shown(", ".join(layers[:3])) + total
            problem = f"has layers that no network of ours contains: {names}"
            raise ConfigError(f"name a policy of linear layers: {self.label} {problem}")


def check_chain(network: list[Linear], what: str, label: str) -> None:
    """Raise ConfigError where a layer does not fit the one before it."""
    for before, after in pairwise(network):
        if after.inputs != before.outputs:
            raise ConfigError(
                f"name a policy that is a chain of linear layers: a layer of the {what} of {label}"
                f" has {before.outputs:,} outputs, and the next one reads {after.inputs:,}"
            )
