"""Gymnasium's registered environments, including the user's, as a ``VectorEnv``."""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_envs.adapters.base import Adapter, AdapterOptions, use_egl_without_display
from embodied_envs.adapters.user_code import import_user_module, wrap_errors
from embodied_envs.registration import NAMESPACE
from embodied_ppo.core.types import EnvError, Obs, Step

_AUTORESET = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
_VECTORIZATION = ("sync", "async", "vector_entry_point")


def ids() -> list[str]:
    """Return the ids of all tasks registered with Gymnasium in this process, except our own."""
    return [id for id in gymnasium.registry if not id.startswith(NAMESPACE)]


def has_task(id: str) -> bool:
    """Return whether Gymnasium has this task; "package.module:Name-v0" imports the module first.

    Raises:
        EnvError: That module cannot be imported.
    """
    return _registered_name(id) in gymnasium.registry


def _registered_name(id: str) -> str:
    """Return the part of ``id`` after the colon, after importing the module before it."""
    module, _, name = id.rpartition(":")
    if module:
        import_user_module(id, module)
    return name


class GymnasiumEnv(Adapter):
    """``num_envs`` copies of a Gymnasium task in one vector environment. Implements ``VectorEnv``.

    Entries of ``kwargs`` that the adapter reads; the others are passed to the environment:

    vectorization_mode  "sync" (default if there is an entry point), "async", or
                        "vector_entry_point" (the environment's own vector implementation)
    autoreset_mode      "next_step" (default): a dummy row with mask False follows the row that ends
                        an episode. "same_step": the row that ends an episode carries ``final_obs``,
                        and there are no dummy rows.
    vector_kwargs       arguments of Gymnasium's SyncVectorEnv or AsyncVectorEnv

    A step that is both terminated and truncated counts as terminated. ``success`` is None until the
    first info that has the key (Gymnasium does not declare infos), unless ``success_key`` names it.
    A vector implementation that accepts only one seed gets the first of ``seeds``.
    """

    def __init__(self, id: str, options: AdapterOptions) -> None:
        if options.num_threads is not None:
            raise EnvError(
                f"env.id={id}: num_threads={options.num_threads} is an option of EnvPool; Gymnasium"
                " steps in this process (or one process per environment with kwargs"
                " vectorization_mode=async)"
            )
        super().__init__(id, options)
        self._name = _registered_name(id)
        self._done: np.ndarray | None = None  # bool [N]; None before the first reset

        spec = gymnasium.spec(self._name)
        self._is_gymnasium_mujoco = str(spec.entry_point).startswith("gymnasium.envs.mujoco")
        self.max_episode_steps = options.max_episode_steps or spec.max_episode_steps
        self._arguments = self._make_arguments(
            spec, dict(options.kwargs or {}), options.max_episode_steps
        )
        self._env = self._make()
        rate = self._env.metadata.get("render_fps")
        self.step_s: float | None = 1.0 / rate if rate else None
        self._same_step = self._autoreset_mode() == AutoresetMode.SAME_STEP
        leaves = self._set_spaces(
            self._env.single_observation_space, self._env.single_action_space, options
        )
        self._read_obs = spaces.reader(leaves)

    def reset(self) -> Obs:
        """Start new episodes in all environments."""
        self._check_open()
        if self._seeds_are_new:
            if self._done is not None:
                # Environments keep state between episodes, so new seeds need new environments.
                self._env.close()
                self._env = self._make()
            self._success_key = self._success_option
            obs = self._seeded_reset()
            self._seeds_are_new = False
        else:
            obs, _ = self._env.reset()
        self._done = np.zeros(self.num_envs, dtype=bool)
        return self._read_obs(self._copy_if_borrowed(obs))

    def step(self, action: Tensor) -> Step:
        """Advance all environments by one step; ``action`` is float32 [N, A] or int64 [N]."""
        self._check_step(action)
        assert self._done is not None
        actions = self.to_simulator(action).detach().cpu().numpy()
        obs, reward, terminated, truncated, info = self._env.step(actions)
        obs = self._copy_if_borrowed(obs)
        # With next-step resets, the row after an end is the dummy row that resets.
        acted = np.ones(self.num_envs, dtype=bool) if self._same_step else ~self._done
        terminated = np.asarray(terminated, dtype=bool) & acted
        truncated = np.asarray(truncated, dtype=bool) & acted & ~terminated
        self._done = terminated | truncated
        success = self._success(info, acted)
        final_obs = self._final_obs(obs, info) if self._same_step and self._done.any() else None

        def to_tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x).to(self.device)

        return Step(
            obs=self._read_obs(obs),
            reward=to_tensor(np.asarray(reward, dtype=np.float32) * acted),
            terminated=to_tensor(terminated),
            truncated=to_tensor(truncated),
            mask=to_tensor(acted),
            final_obs=final_obs,
            success=None if success is None else to_tensor(success),
        )

    def reset_where(self, where: Tensor) -> Obs | None:
        """Start new episodes where bool [N] is True; None with the environment's own vector."""
        if self._has_own_vector:
            return None
        mask = where.cpu().numpy()
        if not mask.any():  # Gymnasium refuses this mask
            return self._zeros()
        obs, _ = self._env.reset(options={"reset_mask": mask})
        if self._done is not None:
            self._done = self._done & ~mask
        return self._read_obs(self._copy_if_borrowed(obs))

    def render(self) -> Tensor:
        """Return an image of environment 0, uint8 [H, W, 3] of ``render_size``."""
        self._check_render()
        env: Any = self._env.unwrapped
        env = env.envs[0] if isinstance(env, gymnasium.vector.SyncVectorEnv) else env
        try:
            return self._to_image(env.render())
        except (gymnasium.error.Error, ImportError) as error:
            raise self._error(f"it cannot be rendered: {error}") from error

    def _make_arguments(
        self, spec: Any, kwargs: dict[str, Any], max_episode_steps: int | None
    ) -> dict[str, Any]:
        """Return the arguments of ``gymnasium.make_vec``; raise EnvError for invalid kwargs."""
        default = "sync" if spec.entry_point is not None else "vector_entry_point"
        mode = kwargs.pop("vectorization_mode", default)
        autoreset = kwargs.pop("autoreset_mode", None)
        for name, value, choices in (
            ("vectorization_mode", mode, _VECTORIZATION),
            ("autoreset_mode", "next_step" if autoreset is None else autoreset, _AUTORESET),
        ):
            if value not in choices:
                raise self._error(
                    f"{name}={value!r} is unknown; choose one of {', '.join(choices)}"
                )
        vector_kwargs = dict(kwargs.pop("vector_kwargs", None) or {})
        self._has_own_vector = mode == "vector_entry_point"
        if self._has_own_vector:
            if autoreset is not None:
                raise self._error(
                    f"autoreset_mode={autoreset!r} has no effect on the environment's own vector"
                    " implementation; leave it out, or choose vectorization_mode=sync"
                )
        else:
            vector_kwargs |= {"copy": True, "autoreset_mode": _AUTORESET[autoreset or "next_step"]}
        if max_episode_steps is not None:
            kwargs["max_episode_steps"] = max_episode_steps
        if self._render_size is not None:
            kwargs["render_mode"] = "rgb_array"
            use_egl_without_display()
        return {"vectorization_mode": mode, "vector_kwargs": vector_kwargs, **kwargs}

    def _make(self) -> Any:
        """Build the vector environment; raise EnvError if it fails."""
        filter_warnings = contextlib.nullcontext()
        if self._is_gymnasium_mujoco:
            filter_warnings = _without_settotalmass_warning()
        context = f"env.id={self.id}: Gymnasium cannot make it with {self._arguments}: "
        with wrap_errors(context), filter_warnings:
            env = gymnasium.make_vec(self._name, num_envs=self.num_envs, **self._arguments)
        self._check_num_envs(env, env.num_envs)
        if self._render_size is not None:
            modes = env.metadata.get("render_modes") or []
            if "rgb_array" not in modes:
                env.close()
                raise self._error(
                    f"render=True needs render mode rgb_array, it has {modes or 'none'}"
                )
            _disable_shadows(env)
        return env

    def _autoreset_mode(self) -> AutoresetMode:
        """Return the mode of the vector's resets; raise EnvError if it does not reset itself."""
        mode = self._env.metadata.get("autoreset_mode")
        if mode not in _AUTORESET.values():
            self.close()
            raise self._error(
                f"its vector implementation has autoreset_mode={mode}; it must"
                ' reset ended episodes itself and declare how: metadata = {"autoreset_mode":'
                " gymnasium.vector.AutoresetMode.NEXT_STEP} (or SAME_STEP)"
            )
        return mode

    def _seeded_reset(self) -> Any:
        """Reset with all seeds, or with the first one if the user's vector accepts only one."""
        try:
            return self._env.reset(seed=list(self._seeds))[0]
        except (TypeError, gymnasium.error.Error):
            if not self._has_own_vector:
                raise
        return self._env.reset(seed=self._seeds[0])[0]

    def _copy_if_borrowed(self, obs: Any) -> Any:
        """Copy observations that a user's vector may overwrite; Gymnasium's return copies."""
        return copy.deepcopy(obs) if self._has_own_vector else obs

    def _success(self, info: Mapping[str, Any], acted: np.ndarray) -> np.ndarray | None:
        """Return success [N] of the step, not of the reset that followed it, or None."""
        final = info.get("final_info", {}) if self._same_step else {}
        key = self._find_success_key(info, final)
        if key is None:
            return None
        assert self._done is not None
        if self._done.any() and self._success_option not in {None, *info, *final}:
            raise spaces.success_key_error(self.id, key, {*info, *final})
        success = _flag(info, key, self.num_envs)
        if self._same_step:
            success = np.where(self._done, _flag(final, key, self.num_envs), success)
        return success & acted

    def _final_obs(self, obs: Any, info: Mapping[str, Any]) -> Obs:
        """Return ``obs`` with the rows that ended replaced by info["final_obs"]."""
        final = info.get("final_obs")
        if final is None:
            raise self._error(
                "it resets in the same step, and its info has no 'final_obs';"
                " put the last observation of the episode there"
            )
        assert self._done is not None
        if isinstance(final, np.ndarray) and final.dtype == object:
            merged = copy.deepcopy(obs)
            for i in np.flatnonzero(self._done):
                _put(merged, int(i), final[i])
            return self._read_obs(merged)
        return self._read_obs(copy.deepcopy(final))  # some vector implementations return a batch


def _put(batch: Any, i: int, value: Any) -> None:
    """Set ``batch[i] = value`` in every array of a dictionary."""
    if isinstance(batch, Mapping):
        for name, leaf in batch.items():
            _put(leaf, i, value[name])
    else:
        batch[i] = value


def _flag(info: Mapping[str, Any], key: str, num_envs: int) -> np.ndarray:
    """Return entry ``key`` as bool [N], False for environments whose info lacks it."""
    if key not in info:
        return np.zeros(num_envs, dtype=bool)
    is_set = np.asarray(info.get(f"_{key}", True), dtype=bool)
    return np.array([bool(x) for x in info[key]], dtype=bool) & is_set


def _disable_shadows(env: Any) -> None:
    """Disable shadows and multisampling in environment 0's MuJoCo model.

    On a CPU they take 90 % of the rendering time. Gymnasium's renderer reads these fields at its
    first image, when it creates its context.
    """
    envs = getattr(env.unwrapped, "envs", None)
    model = getattr(envs[0].unwrapped, "model", None) if envs else None
    if model is not None and hasattr(model, "light_castshadow") and hasattr(model, "vis"):
        model.light_castshadow[:] = 0
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0


@contextlib.contextmanager
def _without_settotalmass_warning() -> Iterator[None]:
    """Suppress MuJoCo's warning about ``settotalmass`` in Gymnasium's model files.

    MuJoCo's C code writes warnings to stderr and MUJOCO_LOG.TXT once per environment. Its other
    warnings become Python warnings here.
    """
    mujoco: Any = importlib.import_module("mujoco")
    mujoco.set_mju_user_warning(
        lambda text: (
            None if "settotalmass" in text else warnings.warn(f"MuJoCo: {text}", stacklevel=2)
        )
    )
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(None)
