"""Base class of the adapters: options, specs, checks of calls, images and seeds."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_ppo.core.types import ActionSpec, ArraySpec, EnvError, Obs, ObsSpec

SUCCESS_KEYS = ("success", "is_success")
"""Entries of a simulator's info that mean success if ``env.success_key`` is None."""


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

    A subclass calls ``_set_spaces`` and sets ``max_episode_steps`` and ``_env``, which needs a
    method ``close``, in its constructor. It implements ``reset``, which clears ``_seeds_are_new``,
    ``step``, ``reset_where`` and ``render``.
    """

    obs_spec: ObsSpec
    action_spec: ActionSpec
    max_episode_steps: int | None
    observation_space: Any
    """Gymnasium's space of one observation, or a dictionary of spaces."""
    leaves: dict[str, spaces.Leaf]
    """Conversion of each array that the policy reads, see ``spaces.observations``."""
    to_simulator: Callable[[Tensor], Tensor]
    """Maps the policy's actions to the simulator's, see ``spaces.actions``."""
    _env: Any  # the simulator

    def __init__(self, id: str, options: AdapterOptions) -> None:
        self.id = id
        self.num_envs = options.num_envs
        self.device = torch.device(options.device)
        self._seeds = list(options.seeds)
        self._seeds_are_new = True  # until the reset() that uses them
        self._success_option = self._success_key = options.success_key
        self._render_size = options.render_size if options.render else None
        self._closed = False

    def restart(self, seeds: list[int]) -> None:
        """Store new seeds, one per environment. The ``reset`` that must follow applies them."""
        self._check_open()
        spaces.check_seeds(self.id, seeds, self.num_envs)
        self._seeds = list(seeds)
        self._seeds_are_new = True

    def _zeros(self) -> Obs:
        """Return an observation of zeros: the result of ``reset_where`` without an environment."""

        def zeros(spec: ArraySpec) -> Tensor:
            return torch.zeros(self.num_envs, *spec.shape, dtype=spec.dtype, device=self.device)

        if isinstance(self.obs_spec, dict):
            return {name: zeros(spec) for name, spec in self.obs_spec.items()}
        return zeros(self.obs_spec)

    def state(self) -> dict[str, Any] | None:
        """Return None: these simulators have no common way to save their state."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Raise EnvError, because ``state`` returns None."""
        raise self._error("its state cannot be loaded; use restart(seeds) instead")

    def close(self) -> None:
        """Close the simulator. A second call has no effect."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _set_spaces(
        self, observation_space: Any, action_space: Any, options: AdapterOptions
    ) -> dict[str, spaces.Leaf]:
        """Set the specs from Gymnasium's spaces; return a conversion for each observation."""
        self.observation_space = observation_space
        self.obs_spec, self.leaves = spaces.observations(
            observation_space, id=self.id, device=self.device, keys=options.obs_keys
        )
        self.action_spec, self.to_simulator = spaces.actions(
            action_space, id=self.id, mapping=options.action_mapping, device=self.device
        )
        self._action_shape = spaces.action_shape(self.action_spec, self.num_envs)
        return self.leaves

    def _check_kwargs(self, kwargs: Mapping[str, Any], reserved: Iterable[str]) -> None:
        """Raise EnvError if ``env.kwargs`` has an argument that the adapter sets itself."""
        if names := sorted(set(kwargs) & set(reserved)):
            raise self._error(
                f"kwargs {', '.join(names)} are set by the adapter; use their own option"
            )

    def _check_num_envs(self, env: Any, num_envs: int) -> None:
        """Close ``env`` and raise EnvError unless it has as many environments as requested."""
        if num_envs != self.num_envs:
            env.close()
            raise self._error(
                f"num_envs={self.num_envs}, but its vector has {num_envs} environments"
            )

    def _error(self, message: str) -> EnvError:
        return EnvError(f"env.id={self.id}: {message}")

    def _check_open(self) -> None:
        if self._closed:
            raise self._error("it was closed; make a new one")

    def _check_step(self, action: Tensor) -> None:
        """Raise EnvError unless ``step(action)`` is possible now."""
        self._check_open()
        if self._seeds_are_new:
            raise self._error("step() before reset(); call reset() first")
        if action.shape != self._action_shape:
            raise spaces.action_shape_error(self.id, action, self._action_shape)

    def _check_render(self) -> tuple[int, int]:
        """Return (height, width) of images; raise EnvError if the options disable rendering."""
        self._check_open()
        if self._render_size is None:
            raise self._error("rendering is disabled; make it with render=True")
        return self._render_size

    def _to_image(self, frame: Any) -> Tensor:
        """Convert a result of ``render`` (of one or of all environments) to uint8 [H, W, 3]."""
        if isinstance(frame, list | tuple):
            frame = frame[0] if frame else None
        if frame is None or len(frame) == 0:
            raise self._error("its render() returns no image with render_mode='rgb_array'")
        frame = np.asarray(frame.cpu() if isinstance(frame, Tensor) else frame)
        frame = frame[0] if frame.ndim == 4 else frame
        return spaces.resize_image(frame, self._check_render())

    def _find_success_key(self, *infos: Iterable[str]) -> str | None:
        """Return the success key; without an option, search the infos for a default key."""
        if self._success_key is None:
            keys = (key for key in SUCCESS_KEYS if any(key in info for info in infos))
            self._success_key = next(keys, None)
        return self._success_key


def use_egl_without_display() -> None:
    """Select MuJoCo's EGL renderer on a machine without a display; its default needs a screen."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


@contextlib.contextmanager
def discard_output(*, stderr: bool) -> Iterator[None]:
    """Discard what the block prints to stdout, and to stderr if requested."""
    with contextlib.ExitStack() as stack:
        devnull = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(devnull))
        if stderr:
            stack.enter_context(contextlib.redirect_stderr(devnull))
        yield
