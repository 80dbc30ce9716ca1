"""What the adapters of all simulators share: their options, checks of calls, and seeds."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_ppo.core.types import ActionSpec, EnvError, Obs, ObsSpec

SUCCESS_KEYS = ("success", "is_success")
"""Entries of a simulator's info that mean success, where ``env.success_key`` names none."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options that every adapter takes. ``embodied_envs.make`` documents them."""

    num_envs: int
    seeds: Sequence[int]
    num_threads: int | None = None
    max_episode_steps: int | None = None
    action_mapping: str = "rescale"
    success_key: str | None = None
    obs_keys: Sequence[str] | None = None
    render: bool = False
    render_size: tuple[int, int] = (240, 320)
    kwargs: Mapping[str, Any] | None = None
    device: torch.device | str = "cpu"


class Adapter:
    """Base class of the adapters: implements the parts of ``VectorEnv`` that need no simulator.

    A subclass sets the specs, ``max_episode_steps`` and ``_action_shape`` in its constructor, and
    clears ``_seeds_are_new`` in ``reset``.
    """

    obs_spec: ObsSpec
    action_spec: ActionSpec
    max_episode_steps: int | None
    _action_shape: torch.Size

    def __init__(self, id: str, options: AdapterOptions) -> None:
        self.id = id
        self.num_envs = options.num_envs
        self.device = torch.device(options.device)
        self._seeds = list(options.seeds)
        self._seeds_are_new = True  # until the reset() that uses them
        self._render_size = options.render_size if options.render else None
        self._closed = False

    def restart(self, seeds: list[int]) -> None:
        """Store new seeds, one per environment. The ``reset`` that must follow applies them."""
        self._check_open()
        spaces.check_seeds(self.id, seeds, self.num_envs)
        self._seeds = list(seeds)
        self._seeds_are_new = True

    def state(self) -> dict[str, Any] | None:
        """Return None: these simulators have no common way to save their state."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Raise EnvError, because ``state`` returns None."""
        raise EnvError(f"env.id={self.id}: its state cannot be loaded; use restart(seeds) instead")

    def _check_open(self) -> None:
        if self._closed:
            raise EnvError(f"env.id={self.id}: it was closed; make a new one")

    def _check_step(self, action: Tensor) -> None:
        """Raise EnvError unless ``step(action)`` is possible now."""
        self._check_open()
        if self._seeds_are_new:
            raise EnvError(f"env.id={self.id}: step() before reset(); call reset() first")
        if action.shape != self._action_shape:
            raise spaces.action_shape_error(self.id, action, self._action_shape)

    def _check_render(self) -> tuple[int, int]:
        """Return (height, width) of images.

        Raise EnvError if the simulator was made without rendering.
        """
        self._check_open()
        if self._render_size is None:
            raise EnvError(f"env.id={self.id}: made without pictures; make it with render=True")
        return self._render_size


def use_egl_without_display() -> None:
    """Select MuJoCo's EGL renderer on a machine without a display; its default needs a screen."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
