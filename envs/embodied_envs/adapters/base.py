"""Base class of the adapters: options, specs, checks of calls, images and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_envs.types import Obs, VectorEnv, choices_of

# Entries of a simulator's info that mean success.
SUCCESS_KEYS = ("success", "is_success")


@dataclass(frozen=True, kw_only=True)
class AdapterOptions:
    """Options that every adapter takes. ``embodied_envs.make`` documents them."""

    num_envs: int
    seeds: Sequence[int]
    num_threads: int | None = None
    max_episode_steps: int | None = None
    action_mapping: str = "rescale"
    obs_keys: Sequence[str] | None = None
    cameras: Sequence[str] = ()
    image_size: tuple[int, int] = (64, 64)
    image_layout: str | None = None
    randomize: bool = False
    ranges: Mapping[str, Sequence[float]] | None = None
    commands: Mapping[str, Sequence[float]] | None = None
    rewards: Mapping[str, Mapping[str, float]] | None = None
    render: bool = False
    render_size: tuple[int, int] = (240, 320)
    kwargs: Mapping[str, Any] | None = None
    device: torch.device | str = "cpu"
    rebuild: bool = True


def check_kwargs(id: str, kwargs: Iterable[str], reserved: Iterable[str]) -> None:
    """Raise EnvError if ``env.kwargs`` has an argument that the adapter sets itself."""
    if names := sorted(set(kwargs) & set(reserved)):
        raise EnvError(
            f"env.id={id}: kwargs {', '.join(names)} are set by the adapter; use their own option"
        )


def factory_arguments(options: AdapterOptions) -> dict[str, Any]:
    """Return the arguments with which a function that creates environments is called."""
    seed, device = options.seeds[0], str(options.device)
    arguments: dict[str, Any] = {"num_envs": options.num_envs, "seed": seed, "device": device}
    if options.max_episode_steps is not None:
        arguments["max_episode_steps"] = options.max_episode_steps
    if options.render:
        arguments["render_mode"] = "rgb_array"
    return arguments


class Adapter(VectorEnv):
    """Base class of the adapters: implements the parts of ``VectorEnv`` that need no simulator.

    A subclass calls ``_set_spaces`` and sets ``max_episode_steps`` and ``_env``, which needs a
    method ``close``, in its constructor. It implements ``reset``, which clears ``_seeds_are_new``,
    ``step``, ``reset_where`` and ``render``.
    """

    # Conversion of each array that the policy reads, see ``spaces.observations``.
    leaves: dict[str, spaces.Leaf]
    # Whether large numbers of float64 reach the normaliser as they are, see
    # ``spaces.observations``.
    keeps_float64 = False
    # Whether the simulator never changes an array that it has returned.
    returns_new_arrays = False
    _env: Any  # the simulator

    def __init__(self, id: str, options: AdapterOptions) -> None:
        self.id = id
        self.num_envs = options.num_envs
        self.device = torch.device(options.device)
        self._seeds = list(options.seeds)
        self._seeds_are_new = True  # until the reset() that uses them
        self._success_key: str | None = None  # the one of SUCCESS_KEYS that the info has
        self._render_size = options.render_size if options.render else None
        self._closed = False

    def restart(self, seeds: list[int]) -> None:
        """Store new seeds, one per environment. The ``reset`` that must follow applies them."""
        self._check_open()
        spaces.check_seeds(self.id, seeds, self.num_envs)
        self._seeds = list(seeds)
        self._seeds_are_new, self._success_key = True, None

    def _zeros(self) -> Obs:
        """Return an observation of zeros: the result of ``reset_where`` without an environment."""
        zeros = {
            name: torch.zeros(self.num_envs, *spec.shape, dtype=spec.dtype, device=self.device)
            for name, spec in tree.named(self.obs_spec).items()
        }
        return zeros if isinstance(self.obs_spec, dict) else zeros[""]

    def close(self) -> None:
        """Close the simulator. A second call has no effect."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _set_spaces(
        self, observation_space: Any, action_space: Any, options: AdapterOptions
    ) -> None:
        """Set the specs and ``leaves`` from Gymnasium's spaces."""
        converter = spaces.ActionConverter(
            action_space, id=self.id, mapping=options.action_mapping, device=self.device
        )
        self.action_spec, self.to_simulator = converter.spec, converter.function()
        self.action_space, self.observation_space = action_space, observation_space
        self.obs_spec, self.leaves = spaces.observations(
            observation_space,
            id=self.id,
            device=self.device,
            keys=options.obs_keys,
            choices=choices_of(self.action_spec),
            new_arrays=self.returns_new_arrays,
            image_layout=options.image_layout,
            keep_float64=self.keeps_float64,
        )
        if options.cameras and isinstance(self.obs_spec, dict):
            # Gymnasium sorts names; a policy reads images in the order of env.cameras.
            order = {x: i for i, x in enumerate(options.cameras, start=1)}
            names = sorted(
                self.obs_spec, key=lambda x: max(order.get(part, 0) for part in x.split("/"))
            )
            self.obs_spec = {name: self.obs_spec[name] for name in names}
            self.leaves = {name: self.leaves[name] for name in names}
        self._action_shape = spaces.action_shape(self.action_spec, self.num_envs)

    def _check_num_envs(self, env: Any, num_envs: int) -> None:
        """Close ``env`` and raise EnvError unless it has as many environments as requested."""
        if num_envs != self.num_envs:
            env.close()
            raise self.error(
                f"num_envs={self.num_envs}, but its vector has {num_envs} environments; write"
                f" env.num_envs={num_envs} (or evaluation.num_envs and episodes)"
            )

    def _check_rows(self, x: Any, size: int) -> None:
        """Raise EnvError unless rewards or flags have one element for each environment."""
        if size != self.num_envs:
            raise self.error(
                f"return reward, terminated and truncated of shape [{self.num_envs}]; one of them"
                f" is {list(x.shape)}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise self.error("it was closed; make a new one")

    def _check_step(self, action: Tensor) -> None:
        """Raise EnvError unless ``step(action)`` is possible now."""
        self._check_open()
        if self._seeds_are_new:
            raise self.error("step() before reset(); call reset() first")
        spaces.check_action(self.id, action, self._action_shape)

    def _check_render(self) -> tuple[int, int]:
        """Return (height, width) of images; raise EnvError if the options disable rendering."""
        self._check_open()
        if self._render_size is None:
            raise self.error("rendering is disabled; make it with render=True")
        return self._render_size

    def _to_image(self, frame: Any) -> Tensor:
        """Convert a result of ``render`` (of one or of all environments) to uint8 [H, W, 3]."""
        if isinstance(frame, list | tuple):
            frame = frame[0] if frame else None
        if frame is None or len(frame) == 0:
            raise self.error("its render() returns no image with render_mode='rgb_array'")
        frame = np.asarray(frame.cpu() if isinstance(frame, Tensor) else frame)
        frame = frame[0] if frame.ndim == 4 else frame
        if (kind := f"{frame.dtype} {list(frame.shape)}") != f"uint8 {[*frame.shape[:2], 3]}":
            raise self.error(f"return uint8 [H, W, 3] from its render(): it is {kind}")
        return _resize_image(frame, self._check_render())

    def _success(self, numbers: Mapping[str, Tensor]) -> Tensor | None:
        """Return success, bool [N], from the numbers of a step's info; None: there is none.

        Args:
            numbers: See ``infos.read_numbers``.
        """
        if self._success_key is None:
            self._success_key = next((key for key in SUCCESS_KEYS if key in numbers), None)
        if self._success_key is None:
            return None
        success = numbers.get(self._success_key)
        if success is None:  # an info of this episode had the entry, that of this step does not
            return torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        if len(success) != self.num_envs:
            return None  # one number of all environments, such as a rate
        return success.nan_to_num() != 0  # NaN: an environment without the entry


def _resize_image(frame: np.ndarray, size: tuple[int, int]) -> Tensor:
    """Resize uint8 [h, w, 3] to uint8 [H, W, 3] of ``size`` = (H, W) by averaging over areas.

    The aspect ratio is kept: the rest of the image is black. The result is new memory, because a
    renderer may reuse its image.
    """
    image = torch.from_numpy(np.array(frame, order="C"))
    if tuple(image.shape[:2]) == tuple(size):
        return image
    scale = min(size[0] / image.shape[0], size[1] / image.shape[1])
    height, width = (max(1, round(scale * n)) for n in image.shape[:2])
    chw = image.permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(chw, size=(height, width), mode="area")[0]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    margins = (left, size[1] - width - left, top, size[0] - height - top)
    return torch.nn.functional.pad(resized.round(), margins).permute(1, 2, 0).contiguous().byte()
