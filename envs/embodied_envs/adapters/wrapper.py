"""Base class of the wrappers: it forwards everything but ``reset`` and ``step``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from embodied_envs.types import Obs, VectorEnv


class EnvWrapper(VectorEnv):
    """A ``VectorEnv`` that behaves as another one, ``env``."""

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.num_envs = env.num_envs
        self.physics_steps, self.can_truncate = env.physics_steps, env.can_truncate
        self.to_simulator = env.to_simulator
        self.copy_info(env.info)

    @property
    def simulator(self) -> VectorEnv:
        """See ``VectorEnv``: the one inside all wrappers."""
        return self.env.simulator

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``."""
        return self.env.unstable

    @property
    def terrain_level(self) -> Tensor | None:
        """See ``VectorEnv``."""
        return self.env.terrain_level

    def truncate_next(self, where: Tensor) -> None:
        """See ``VectorEnv``."""
        self.env.truncate_next(where)

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        return self.env.reset_where(where)

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        self.env.restart(seeds)

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``."""
        return self.env.state()

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``."""
        return self.env.load_state(state)

    def joint_state(self) -> dict[str, Tensor]:
        """See ``VectorEnv``."""
        return self.env.joint_state()

    def render(self) -> Tensor:
        """See ``VectorEnv``."""
        return self.env.render()

    def close(self) -> None:
        """See ``VectorEnv``."""
        self.env.close()
