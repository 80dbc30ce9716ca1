"""The last observations and actions of an episode as one observation (``model.history``).

With K steps of history, an observation o_t becomes o_t and the K - 1 changes before it,

    o_(t-K+2) - o_(t-K+1), .., o_t - o_(t-1), o_t

which determine the last K observations. Changes are what a stack of similar values hides: each is
normalised by its own deviation, which may be a hundredth of that of the values. The K - 1 actions
between the observations are an observation of their own. Changes and actions before the start of
the episode are 0. Images [C, H, W] are joined along their channels, [K·C, H, W], and integers are
stacked; both are 0 before the start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.base.observation_names import SINGLE
from embodied_envs.types import ActionSpec, ArraySpec, Box, Composite, Obs, ObsSpec, choices_of
from embodied_ppo.core.finite import zero_rows

# Observation with the actions, float32 [N, K - 1, A]; a choice among n is one-hot.
PREVIOUS_ACTIONS = "previous_actions"
# Name of the entry of a history that marks its steps since the start of the episode with 1.
IN_EPISODE = "in_episode"


def named(obs: Obs) -> dict[str, Tensor]:
    """Return observations as a dictionary; one array has the name ``SINGLE``."""
    return obs if isinstance(obs, dict) else {SINGLE: obs}


class ObservationHistory:
    """The last K - 1 observations and actions of N environments, from which histories are built.

    Shapes do not depend on the value of N, so that the functions can be exported.

    ``previous`` is a dictionary of tensors [N, K - 1, ..], oldest first: one entry for each stacked
    observation, ``PREVIOUS_ACTIONS`` and ``IN_EPISODE``.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        steps: int,
        names: Sequence[str] | None = None,
    ) -> None:
        """Describe the history.

        Args:
            obs_spec: Observations of one environment.
            action_spec: Actions of the policy.
            steps: Observations that are read together, K >= 2.
            names: Observations to stack; None: all. The others pass unchanged.
        """
        self.steps, self.action_spec, self.raw_spec = steps, action_spec, obs_spec
        self.specs = obs_spec if isinstance(obs_spec, dict) else {SINGLE: obs_spec}
        if used := {PREVIOUS_ACTIONS, IN_EPISODE} & set(self.specs):
            raise EnvError(f"rename the observation {min(used)}: model.history has this name")
        # A mask of choices is about the next action only.
        offered = [name for name, spec in self.specs.items() if spec.dtype != torch.bool]
        self.names = tuple(name for name in offered if names is None or name in names)
        self.choices = choices_of(action_spec)
        columns = action_spec.size if isinstance(action_spec, Box | Composite) else 1
        self.action_size = sum(self.choices) + columns - len(self.choices)

    @property
    def obs_spec(self) -> dict[str, ArraySpec]:
        """What the policy reads of one environment."""
        specs: dict[str, ArraySpec] = {}
        for name, spec in self.specs.items():
            if name in self.names and spec.layout is not None:
                channels, height, width = self._frame(spec)
                image = replace(spec.layout, order="CHW")
                specs[name] = ArraySpec((self.steps * channels, height, width), spec.dtype, image)
            elif name in self.names:
                specs[name] = ArraySpec((self.steps, *spec.shape), spec.dtype)
            else:
                specs[name] = spec
        return {**specs, PREVIOUS_ACTIONS: ArraySpec((self.steps - 1, self.action_size))}

    def _frame(self, spec: ArraySpec) -> tuple[int, ...]:
        """Return the shape of one stored observation: images as [C, H, W]."""
        return spec.layout.shape(spec.shape) if spec.layout is not None else spec.shape or (1,)

    def empty(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Return the history at the start of N episodes: zeros."""

        def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(rows, self.steps - 1, *shape, dtype=dtype, device=device)

        specs = {name: self.specs[name] for name in self.names}
        previous = {name: zeros(self._frame(spec), spec.dtype) for name, spec in specs.items()}
        return {**previous, PREVIOUS_ACTIONS: zeros((self.action_size,)), IN_EPISODE: zeros(())}

    def stack(self, previous: Mapping[str, Tensor], obs: Obs) -> dict[str, Tensor]:
        """Return what the policy reads: the history with the newest observation."""
        result = dict(named(obs))
        for name in self.names:
            spec, newest = self.specs[name], self._stored(name, result[name])
            frames = torch.cat([previous[name], newest], dim=1)  # [N, K, ..]
            if spec.layout is not None:
                result[name] = frames.flatten(1, 2)
                continue
            if spec.dtype.is_floating_point:
                marks = previous[IN_EPISODE].reshape(-1, self.steps - 1, *[1] * (frames.ndim - 2))
                changes = (frames[:, 1:] - frames[:, :-1]) * marks
                frames = torch.cat([changes, newest], dim=1)
            result[name] = frames.reshape(-1, self.steps, *spec.shape)
        return {**result, PREVIOUS_ACTIONS: previous[PREVIOUS_ACTIONS].clone()}

    def newest(self, obs: Mapping[str, Tensor]) -> Obs:
        """Return the newest observations [N, ..] that a result of ``stack`` contains."""
        newest: dict[str, Tensor] = {}
        for name, spec in self.specs.items():
            x = obs[name]
            if name in self.names and spec.layout is not None:
                x = spec.layout.restore(x[:, -self._frame(spec)[0] :], spec.shape)
            elif name in self.names:
                x = x[:, -1]
            newest[name] = x
        return newest if isinstance(self.raw_spec, dict) else newest[SINGLE]

    def push(self, previous: Mapping[str, Tensor], obs: Obs, action: Tensor) -> dict[str, Tensor]:
        """Return the history after an action.

        Args:
            previous: The history before ``obs``.
            obs: Observations [N, ..] that were acted on.
            action: The policy's actions, float32 [N, A] (or [N, C, A / C]) or int64 [N].
        """
        values = named(obs)
        latest = {name: self._stored(name, values[name]) for name in self.names}
        if self.choices:
            columns = action if action.ndim > 1 else action.unsqueeze(-1)
            values = [torch.arange(n, device=action.device) for n in self.choices]
            parts = [(columns[:, d : d + 1] == x).float() for d, x in enumerate(values)]
            action = torch.cat([*parts, columns[:, len(parts) :].float()], dim=-1)
        latest[PREVIOUS_ACTIONS] = action.reshape(-1, 1, self.action_size)
        latest[IN_EPISODE] = torch.ones_like(previous[IN_EPISODE][:, :1])
        pairs = {name: (past[:, 1:], latest[name].to(past)) for name, past in previous.items()}
        return {name: torch.cat(pair, dim=1) for name, pair in pairs.items()}

    def restart(self, previous: Mapping[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """Return the history with zeros in the environments where bool [N] holds."""
        return zero_rows(dict(previous), where)

    def _stored(self, name: str, x: Tensor) -> Tensor:
        """Return observations [N, ..] as one frame, [N, 1, ..]."""
        spec = self.specs[name]
        if spec.layout is not None:
            x = spec.layout.channels_first(x)
        return x.reshape(-1, 1, *self._frame(spec))
