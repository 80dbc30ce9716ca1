"""Any environment of Gymnasium's registry, the user's own included, as a ``VectorEnv``."""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_envs.adapters.user_code import blamed, imported
from embodied_ppo.core.types import EnvError, Obs, Step

_AUTORESET = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
_VECTORIZATION = ("sync", "async", "vector_entry_point")


def ids() -> list[str]:
    """Every task registered with Gymnasium in this process."""
    return list(gymnasium.registry)


def knows(id: str) -> bool:
    """Whether Gymnasium has this task; "package.module:Name-v0" imports the module first.

    Raises EnvError if that module cannot be imported.
    """
    return _name(id) in gymnasium.registry


def _name(id: str) -> str:
    """The part of ``id`` that Gymnasium's registry knows, after importing the module before the colon."""
    module, _, name = id.rpartition(":")
    if module:
        imported(id, module)
    return name


class GymnasiumEnv:
    """``num_envs`` copies of a Gymnasium task in one vector environment. See ``VectorEnv`` for the contract.

    kwargs taken here, the others go to the environment:
      vectorization_mode  "sync" (default where there is an entry point), "async", or "vector_entry_point" (the
                          environment's own vector implementation)
      autoreset_mode      "next_step" (default): a dummy row with mask False follows the row that ends an episode
                          "same_step": the row that ends an episode carries ``final_obs``, and there are no dummy rows
      vector_kwargs       for Gymnasium's SyncVectorEnv or AsyncVectorEnv

    Where an environment says terminated and truncated at once, terminated counts. ``success`` is None until the first
    info that has the key (Gymnasium does not announce infos), unless ``success_key`` names it.
    A vector implementation of the environment's own that takes one seed only gets the first of ``seeds``.
    """

    def __init__(
        self,
        id: str,
        *,
        num_envs: int,
        seeds: list[int],
        num_threads: int | None = None,
        max_episode_steps: int | None = None,
        action_mapping: str = "rescale",
        success_key: str | None = None,
        obs_keys: Sequence[str] | None = None,
        render: bool = False,
        render_size: tuple[int, int] = (240, 320),
        kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_threads is not None:
            raise EnvError(
                f"env.id={id}: num_threads={num_threads} is EnvPool's; Gymnasium steps in this process "
                "(or one process per environment with kwargs vectorization_mode=async)"
            )
        self.id = id
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._name = _name(id)
        self._seeds = list(seeds)
        self._seeds_are_new = True
        self._closed = False
        self._render_size = render_size if render else None
        self._success_option = self._success_key = success_key
        self._done: np.ndarray | None = None

        spec = gymnasium.spec(self._name)
        self._of_mujoco = str(spec.entry_point).startswith("gymnasium.envs.mujoco")
        self.max_episode_steps: int | None = max_episode_steps or spec.max_episode_steps
        self._arguments = self._make_arguments(spec, dict(kwargs or {}), max_episode_steps)
        self._env = self._make()
        rate = self._env.metadata.get("render_fps")
        self.step_s: float | None = 1.0 / rate if rate else None
        self._same_step = self._autoreset_mode() == AutoresetMode.SAME_STEP
        self.obs_spec, leaves = spaces.observations(
            self._env.single_observation_space, id=id, device=self.device, keys=obs_keys
        )
        self._obs = spaces.reader(leaves)
        self.action_spec, self._action = spaces.actions(
            self._env.single_action_space, id=id, mapping=action_mapping, device=self.device
        )
        self._action_shape = spaces.action_shape(self.action_spec, num_envs)

    def reset(self) -> Obs:
        """Start every environment anew, [N, ..]."""
        self._check_open()
        if self._seeds_are_new:
            if self._done is not None:  # Stepped before: only new environments are as if newly made.
                self._env.close()
                self._env = self._make()
            self._success_key = self._success_option
            obs = self._seeded_reset()
            self._seeds_are_new = False
        else:
            obs, _ = self._env.reset()
        self._done = np.zeros(self.num_envs, dtype=bool)
        return self._obs(self._own(obs))

    def step(self, action: Tensor) -> Step:
        """Act in every environment: float32 [N, A] or int64 [N]."""
        self._check_open()
        if self._done is None or self._seeds_are_new:
            raise EnvError(f"env.id={self.id}: step() before reset(); call reset() first")
        if action.shape != self._action_shape:
            raise spaces.wrong_actions(self.id, action, self._action_shape)
        obs, reward, terminated, truncated, info = self._env.step(self._action(action))
        obs = self._own(obs)
        acted = np.ones(self.num_envs, dtype=bool) if self._same_step else ~self._done
        terminated = np.asarray(terminated, dtype=bool) & acted
        truncated = np.asarray(truncated, dtype=bool) & acted & ~terminated
        self._done = terminated | truncated
        success = self._success(info, acted)
        final_obs = self._final_obs(obs, info) if self._same_step and self._done.any() else None
        return Step(
            obs=self._obs(obs),
            reward=torch.from_numpy(np.asarray(reward, dtype=np.float32) * acted).to(self.device),
            terminated=torch.from_numpy(terminated).to(self.device),
            truncated=torch.from_numpy(truncated).to(self.device),
            mask=torch.from_numpy(acted).to(self.device),
            final_obs=final_obs,
            success=None if success is None else torch.from_numpy(success).to(self.device),
        )

    def reset_where(self, where: Tensor) -> Obs | None:
        """Begin a new episode where bool [N]; None where the environment brings a vector implementation of its own."""
        if self._borrows:
            return None
        mask = where.cpu().numpy()
        obs, _ = self._env.reset(options={"reset_mask": mask})
        if self._done is not None:
            self._done = self._done & ~mask
        return self._obs(self._own(obs))

    def restart(self, seeds: list[int]) -> None:
        """Begin again as if newly made with these seeds; ``reset`` must follow (and makes the environments again)."""
        self._check_open()
        spaces.check_seeds(self.id, seeds, self.num_envs)
        self._seeds = list(seeds)
        self._seeds_are_new = True

    def state(self) -> None:
        """None: Gymnasium cannot save an environment's state."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Always raises EnvError, see ``state``."""
        raise EnvError(f"env.id={self.id}: Gymnasium cannot load an environment's state; use restart(seeds) instead")

    def render(self) -> Tensor:
        """uint8 [H, W, 3] picture of environment 0, at ``render_size``."""
        self._check_open()
        if self._render_size is None:
            raise EnvError(f"env.id={self.id}: made without pictures; make it with render=True")
        env: Any = self._env.unwrapped
        try:
            frame = env.envs[0].render() if isinstance(env, gymnasium.vector.SyncVectorEnv) else env.render()
        except (gymnasium.error.Error, ImportError) as error:
            raise EnvError(f"env.id={self.id}: no picture of it: {error}") from error
        if isinstance(frame, tuple | list):
            frame = frame[0]
        if frame is None:
            raise EnvError(f"env.id={self.id}: its render() answers nothing with render_mode='rgb_array'")
        return spaces.picture(np.asarray(frame), self._render_size)

    def close(self) -> None:
        """Close every environment; may be called twice."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EnvError(f"env.id={self.id}: it was closed; make a new one")

    def _make_arguments(self, spec: Any, kwargs: dict[str, Any], max_episode_steps: int | None) -> dict[str, Any]:
        """The user's kwargs as arguments of ``gymnasium.make_vec``; raises EnvError for what it cannot take."""
        mode = kwargs.pop("vectorization_mode", "sync" if spec.entry_point is not None else "vector_entry_point")
        if mode not in _VECTORIZATION:
            raise EnvError(
                f"env.id={self.id}: vectorization_mode={mode!r} is unknown; choose one of {', '.join(_VECTORIZATION)}"
            )
        autoreset = kwargs.pop("autoreset_mode", None)
        if autoreset is not None and autoreset not in _AUTORESET:
            raise EnvError(
                f"env.id={self.id}: autoreset_mode={autoreset!r} is unknown; choose one of {', '.join(_AUTORESET)}"
            )
        vector_kwargs = dict(kwargs.pop("vector_kwargs", None) or {})
        self._borrows = mode == "vector_entry_point"
        if mode == "vector_entry_point":
            if autoreset is not None:
                raise EnvError(
                    f"env.id={self.id}: autoreset_mode={autoreset!r} has no effect on the environment's own vector "
                    "implementation; leave it out, or choose vectorization_mode=sync"
                )
        else:
            vector_kwargs |= {"copy": True, "autoreset_mode": _AUTORESET[autoreset or "next_step"]}
        if max_episode_steps is not None:
            kwargs["max_episode_steps"] = max_episode_steps
        if self._render_size is not None:
            kwargs["render_mode"] = "rgb_array"
            if sys.platform == "linux" and not os.environ.get("DISPLAY"):
                os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's own default needs a screen.
        return {"vectorization_mode": mode, "vector_kwargs": vector_kwargs, **kwargs}

    def _make(self) -> Any:
        quiet = _without_settotalmass() if self._of_mujoco else contextlib.nullcontext()
        with blamed(f"env.id={self.id}: Gymnasium cannot make it with {self._arguments}: "), quiet:
            env = gymnasium.make_vec(self._name, num_envs=self.num_envs, **self._arguments)
        if env.num_envs != self.num_envs:
            env.close()
            raise EnvError(f"env.id={self.id}: asked for {self.num_envs} environments, its vector has {env.num_envs}")
        if self._render_size is not None:
            modes = env.metadata.get("render_modes") or []
            if "rgb_array" not in modes:
                env.close()
                raise EnvError(f"env.id={self.id}: render=True needs render mode rgb_array, it has {modes or 'none'}")
            _cheap_pictures(env)
        return env

    def _autoreset_mode(self) -> AutoresetMode:
        mode = self._env.metadata.get("autoreset_mode")
        if mode not in _AUTORESET.values():
            self.close()
            raise EnvError(
                f"env.id={self.id}: its vector implementation says autoreset_mode={mode}; it must reset ended episodes "
                'by itself and say how: metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP} '
                "(or SAME_STEP)"
            )
        return mode

    def _seeded_reset(self) -> Any:
        try:
            return self._env.reset(seed=list(self._seeds))[0]
        except (TypeError, gymnasium.error.Error):
            if not self._borrows:
                raise
        return self._env.reset(seed=self._seeds[0])[0]

    def _own(self, obs: Any) -> Any:
        """Observations that nobody writes to later; Gymnasium's own vectors copy, others may not."""
        return copy.deepcopy(obs) if self._borrows else obs

    def _success(self, info: Mapping[str, Any], acted: np.ndarray) -> np.ndarray | None:
        """bool [N] from the info of the step itself (not of the reset that followed it), or None."""
        final = info.get("final_info", {}) if self._same_step else {}
        if self._success_key is None:
            self._success_key = next((k for k in ("success", "is_success") if k in info or k in final), None)
            if self._success_key is None:
                return None
        ended = self._done if self._done is not None and self._done.any() else None
        if ended is not None and self._success_option not in {None, *info, *final}:
            known = ", ".join(sorted(k for k in {*info, *final} if not k.startswith(("_", "final_")))) or "nothing"
            raise EnvError(
                f"env.id={self.id}: success_key={self._success_option!r} is not in the info of a step that ends an "
                f"episode; it has {known}"
            )
        success = _flag(info, self._success_key, self.num_envs)
        if self._same_step and ended is not None:
            success = np.where(ended, _flag(final, self._success_key, self.num_envs), success)
        return success & acted

    def _final_obs(self, obs: Any, info: Mapping[str, Any]) -> Obs:
        """The true successors: ``obs`` with the rows that ended replaced by info["final_obs"]."""
        final = info.get("final_obs")
        if final is None:
            raise EnvError(
                f"env.id={self.id}: it resets in the same step and gives no info['final_obs']; put the last "
                "observation of the episode there"
            )
        assert self._done is not None
        if isinstance(final, np.ndarray) and final.dtype == object:
            merged = copy.deepcopy(obs)
            for i in np.flatnonzero(self._done):
                _put(merged, int(i), final[i])
            return self._obs(merged)
        return self._obs(copy.deepcopy(final))  # A batch already, as some vector implementations give it.


def _put(batch: Any, i: int, value: Any) -> None:
    """``batch[i] = value`` for every array of a dictionary."""
    if isinstance(batch, Mapping):
        for name, leaf in batch.items():
            _put(leaf, i, value[name])
    else:
        batch[i] = value


def _flag(info: Mapping[str, Any], key: str, num_envs: int) -> np.ndarray:
    """Entry ``key`` as bool [N], False where an environment did not say it."""
    if key not in info:
        return np.zeros(num_envs, dtype=bool)
    said = np.asarray(info.get(f"_{key}", True), dtype=bool)
    return np.array([bool(x) for x in info[key]], dtype=bool) & said


def _cheap_pictures(env: Any) -> None:
    """Shadows and multisampling off in environment 0's MuJoCo model: on a CPU they cost ten times the rest."""
    envs = getattr(env.unwrapped, "envs", None)
    model = getattr(envs[0].unwrapped, "model", None) if envs else None
    if model is not None and hasattr(model, "light_castshadow") and hasattr(model, "vis"):
        model.light_castshadow[:] = 0
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0


@contextlib.contextmanager
def _without_settotalmass() -> Iterator[None]:
    """Leave out the warning about ``settotalmass`` in Gymnasium's own model files, which MuJoCo's C code writes to
    stderr and MUJOCO_LOG.TXT once per environment; its other warnings become Python's.
    """
    mujoco: Any = importlib.import_module("mujoco")
    mujoco.set_mju_user_warning(
        lambda text: None if "settotalmass" in text else warnings.warn(f"MuJoCo: {text}", stacklevel=2)
    )
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(None)
