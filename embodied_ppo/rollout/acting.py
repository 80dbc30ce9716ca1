"""Acting: the policy's ``encode`` and ``act``, eagerly or as one compiled program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from embodied_envs.base import tree
from embodied_envs.base.tree import apply_in_parts
from embodied_envs.types import Obs
from embodied_ppo.core import compile
from embodied_ppo.core.cuda_graph import Example
from embodied_ppo.core.types import Decision, Policy


class _Act(nn.Module):
    """``policy.act`` as a forward method, which ``functional_call`` needs."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        assert isinstance(policy, nn.Module)
        self.policy = policy

    def forward(self, obs: Obs, noise: Tensor) -> Decision:
        return self.policy.act(self.policy.encode(obs), noise=noise)


class ActProgram:
    """``policy.act`` as a function of tensors.

    Inputs are the weights, the noise and the observation's leaves; outputs are the leaves of the
    decision.
    """

    def __init__(self, policy: Policy, obs: Obs) -> None:
        """Create the program for observations with the structure of ``obs``."""
        self.module = _Act(policy)
        # Only the structure of the observation is kept.
        self.obs = tree.map(lambda x: x.new_empty(0), obs)
        self.names = list(self._weights())

    def _weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def weights(self) -> list[Tensor]:
        """Return parameters and buffers. The optimizer changes them in place."""
        return [x.detach() for x in self._weights().values()]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # The arguments are flat: all weights, then the noise, then the leaves of the observation.
        noise, *obs_leaves = tensors[len(self.names) :]
        leaves = iter(obs_leaves)
        obs = tree.map(lambda _: next(leaves), self.obs)
        weights = dict(zip(self.names, tensors, strict=False))
        return tuple(tree.leaves(torch.func.functional_call(self.module, weights, (obs, noise))))


@dataclass(eq=False)
class Acting:
    """The policy's ``encode`` and ``act``, as eager code first and later as compiled code."""

    policy: Policy
    schedule: compile.CompileSchedule
    # Largest number of observations in one forward pass of eager code; None: all.
    rows: int | None = None
    kept_inputs: Sequence[str] = ()
    # Inputs ``kept_inputs`` of the last call, which was eager.
    kept: dict[str, Tensor] = field(default_factory=dict, init=False)
    weights: list[Tensor] = field(default_factory=list, init=False)
    # Decision of the traced program: the layout of what compiled code returns.
    structure: Any = field(default=None, init=False)

    def __call__(self, obs: Obs, noise: Tensor, update: int) -> Decision:
        """Return the decision of the policy for N observations in update ``update``."""
        compiled = self.schedule.get(update, lambda: self._program(obs, noise))
        if compiled is None:
            decision, self.kept = apply_in_parts(self._act, self.rows, obs, noise)
            return decision
        # Compiled code takes and returns a flat list; the layout is that of the traced decision.
        leaves = (x.contiguous() for x in tree.leaves(obs))
        outputs = iter(compiled[0]([*self.weights, noise, *leaves]))
        return tree.map(lambda _: next(outputs), self.structure)

    def _act(self, obs: Obs, noise: Tensor) -> tuple[Decision, dict[str, Tensor]]:
        """Run the policy eagerly; return the decision, and the inputs to keep."""
        inputs = self.policy.encode(obs)
        kept = {name: inputs[name] for name in self.kept_inputs}
        return self.policy.act(inputs, noise=noise), kept

    def _program(self, obs: Obs, noise: Tensor) -> Example:
        """Return the program to compile with example inputs."""
        program = ActProgram(self.policy, obs)
        self.weights = program.weights()
        # An eager call gives the structure of the decision.
        self.structure, _ = self._act(obs, noise)
        return Example(program, self.weights, [noise, *(x.contiguous() for x in tree.leaves(obs))])
