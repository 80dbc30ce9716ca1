"""Gymnasium environments of the tasks of this package, for trainers of other packages.

``gym.make_vec("embodied/Tabletop-v0", num_envs=64)`` returns a ``TaskVectorEnv``, and
``gym.make("embodied/Tabletop-v0")`` a ``TaskEnv``. Both take and return numpy arrays.
``adapters.gymnasium_env`` does the opposite: it adapts Gymnasium environments to ``VectorEnv``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

import embodied_envs
from embodied_envs import tasks
from embodied_envs.adapters.actions import policy_bounds
from embodied_envs.adapters.gymnasium_env import AUTORESET
from embodied_envs.adapters.spaces import check_seeds
from embodied_envs.adapters.user_code import copy_arrays
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError, check_choice, check_names
from embodied_envs.base.observation_names import INSTRUCTION
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.types import NO_LIMIT, ArraySpec, Step

SIMULATORS = ("auto", "mujoco", "warp")
RENDER_MODES = ("rgb_array",)


# Options of ``embodied_envs.make`` that are options here, too; all others are the task's.
MAKE_OPTIONS = inspect.signature(embodied_envs.make).parameters.keys() - {
    *("id", "num_envs", "seeds", "kwargs", "render", "rebuild", "image_layout")
}


def _check_options(task: str, options: Mapping[str, Any]) -> None:
    """Raise EnvError if an option is unknown to ``embodied_envs.make`` and to the task."""
    task_class = tasks.find(task)
    if task_class is None:
        raise EnvError(
            f"task={task!r} is none of ours; choose one of {', '.join(tasks.OWN)}, or"
            " package.module:Class"
        )
    for name, choices in (("render_mode", (None, *RENDER_MODES)), ("simulator", SIMULATORS)):
        check_choice(f"{task}: {name}", options.get(name, choices[0]), choices)
    parameters = inspect.signature(task_class).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        names = ["render_mode", *sorted(MAKE_OPTIONS), *parameters, "nconmax", "njmax"]
        check_names(f"{task}: option", list(options), names)


class _TaskSimulator:
    """A ``VectorEnv`` of a task of this package, with numpy arrays and Gymnasium's spaces."""

    def _make(
        self, task: str, num_envs: int, render_mode: str | None, options: dict[str, Any]
    ) -> tuple[spaces.Space, spaces.Box]:
        """Create the simulator; return the spaces of one environment.

        ``embodied_envs.make`` documents the options.
        """
        _check_options(task, {"render_mode": render_mode} | options)
        if isinstance(size := options.get("image_size"), int):
            options = options | {"image_size": (size, size)}
        if not isinstance(num_envs, int | np.integer):
            raise EnvError(f"{task}: num_envs={num_envs!r} must be a whole number")
        self.simulator: Any = embodied_envs.make(
            task,
            num_envs=num_envs,
            seeds=_random_seeds(num_envs),
            render=render_mode is not None,
            kwargs={name: x for name, x in options.items() if name not in MAKE_OPTIONS},
            **{name: x for name, x in options.items() if name in MAKE_OPTIONS},
        )
        self.worlds = self.simulator.simulator
        assert isinstance(self.worlds, MujocoEnv)
        self.render_mode = render_mode
        self.metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES)}
        if self.simulator.step_s:
            self.metadata["render_fps"] = max(1, round(1 / self.simulator.step_s))
        self.instructions, self.task_names = self.simulator.instructions, self.simulator.task_names
        self._sentences = np.array([*self.instructions, None], dtype=object)[:-1]
        self._names = np.array([*self.task_names, None], dtype=object)[:-1]
        mapping = options.get("action_mapping", "rescale")
        low, high = (x.numpy() for x in policy_bounds(self.simulator.action_spec, mapping))
        space = _observation_space(self.simulator.obs_spec, len(self.instructions))
        return space, spaces.Box(low, high)

    def _step(self, action: Any) -> Step:
        """Execute ``action`` [N, A]. Raises EnvError if a number of it is not finite."""
        array = np.asarray(action, dtype=np.float32)
        if not np.isfinite(array).all():
            place = np.argwhere(~np.isfinite(array))[0].tolist()
            raise self._error(
                f"step(): action {place} is {array[tuple(place)]}; actions must be finite numbers"
            )
        return self.simulator.step(torch.tensor(array, device=self.simulator.device))

    def _obs_info(self, obs: Any) -> dict[str, np.ndarray]:
        """Return the info [N] that belongs to observations: the sentence of ``instruction``."""
        if isinstance(obs, dict) and INSTRUCTION in obs and self.instructions:
            return {INSTRUCTION: self._sentences[obs[INSTRUCTION]]}
        return {}

    def _step_info(self, step: Step) -> dict[str, np.ndarray]:
        """Return the info [N] that belongs to the executed action."""
        info = {} if step.success is None else {"success": _to_numpy(step.success)}
        if step.task is not None:
            info["task"] = self._names[_to_numpy(step.task)]
        if step.executed is not None:
            info["executed"] = _to_numpy(step.executed.sum(1))
        return info

    def _error(self, message: str) -> EnvError:
        return EnvError(f"{self.simulator.id}: {message}")


def _random_seeds(num_envs: int) -> list[int]:
    """Return seeds from the operating system's entropy, for resets without a seed."""
    return np.random.default_rng().integers(0, 2**31, max(0, num_envs)).tolist()


def _observation_space(spec: ArraySpec | dict[str, ArraySpec], instructions: int) -> spaces.Space:
    """Return the space of one observation."""
    if isinstance(spec, dict):
        entries = {name: _observation_space(leaf, 0) for name, leaf in spec.items()}
        if instructions and INSTRUCTION in spec and not spec[INSTRUCTION].shape:
            entries[INSTRUCTION] = spaces.Discrete(instructions)
        return spaces.Dict(entries)
    # The space of an array has its dtype, with the dtype's bounds.
    dtype: Any = torch.empty(0, dtype=spec.dtype).numpy().dtype
    if dtype == np.bool_:
        return spaces.MultiBinary(spec.shape)
    low, high = -np.inf, np.inf
    if dtype.kind in "iu":
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return spaces.Box(low, high, spec.shape, dtype)


def _to_numpy(x: Any) -> Any:
    """Convert a tensor or a dictionary of tensors."""
    return tree.map(lambda leaf: leaf.detach().cpu().numpy(), x)


def _row(batch: Any, i: int) -> Any:
    """Return a copy of row ``i`` of an array or of a dictionary of arrays."""
    return tree.map(lambda leaf: leaf[i].copy(), batch)


class TaskVectorEnv(_TaskSimulator, gymnasium.vector.VectorEnv):
    """N environments of one task: ``gym.make_vec("embodied/Tabletop-v0", num_envs=N)``.

    With ``autoreset_mode="same_step"``, the default, an environment whose episode ends is reset in
    the same step: ``obs`` is the first observation of the next episode, and info has "final_obs"
    (an object array with the last observation of the episode in the rows that ended), "final_info"
    and their masks "_final_obs" and "_final_info". With "next_step", which Gymnasium's vector
    wrappers for observations require, ``obs`` is the last observation of the episode. The next step
    then ignores the action for this environment, resets it and returns reward 0. The episodes are
    the same in both modes. An episode is never both terminated and truncated in one step.

    Entries of info; each has a mask whose name starts with "_", such as "_success":

    success      bool [N], whether the task succeeded in this step; for tasks that define success
    task         str [N], kind of the episode of this step; for tasks with several kinds
    executed     int64 [N], number of executed actions of the chunk; with ``action_chunk``
    instruction  str [N], sentence that belongs to the returned observation (in final_info: to the
                 episode that ended); only if observations have the key "instruction", which is the
                 index of the sentence in ``instructions``

    Attributes:
        instructions: All sentences that can occur.
        task_names: All kinds of episodes.
        simulator: The ``VectorEnv`` of ``embodied_envs.make``, which exchanges tensors.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012  as Gymnasium declares it
        "render_modes": list(RENDER_MODES),
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(
        self,
        task: str,
        num_envs: int = 1,
        *,
        render_mode: str | None = None,
        autoreset_mode: str | AutoresetMode = "same_step",
        **options: Any,
    ) -> None:
        """Create the environments.

        Args:
            task: A task of ``tasks.OWN``, or "package.module:Class" for a task of your own.
            num_envs: Number of environments, N.
            render_mode: "rgb_array"; with None, ``render`` is not available.
            autoreset_mode: "same_step" or "next_step". The latter is not available with
                ``action_chunk`` or ``realism``, and for tasks whose episodes depend on the previous
                episode (``Task.carry_over``).
            options: Options of ``embodied_envs.make`` (for example ``cameras``) and of
                the task (of Tabletop ``families``, ``split``, ``obs``, ``reward``). An integer
                ``image_size`` is both height and width. The action space is [-1, 1] with the
                default ``action_mapping="rescale"``, otherwise the bounds of the task. A chunk of C
                actions is a vector of C·A numbers; its reward is the sum over the actions.

        Raises:
            EnvError: The task or an option is unknown or invalid.
        """
        check_choice(f"{task}: autoreset_mode", autoreset_mode, [*AUTORESET, *AUTORESET.values()])
        mode = AUTORESET.get(str(autoreset_mode), autoreset_mode)
        single = self._make(task, num_envs, render_mode, options)
        self.single_observation_space, self.single_action_space = single
        self.observation_space, self.action_space = (batch_space(x, num_envs) for x in single)
        self._next_step = mode == AutoresetMode.NEXT_STEP
        if self._next_step:
            if self.worlds.carries_over or self.simulator is not self.worlds:
                self.simulator.close()
                raise EnvError(
                    f"{task}: autoreset_mode=next_step is not available with action_chunk or"
                    " realism, and for tasks with carry_over; use same_step"
                )
            self.worlds.autoreset = False
        # bool [N], environments that the next step resets; used with next_step.
        self._ended = np.zeros(num_envs, dtype=bool)
        self.num_envs, self.metadata = num_envs, self.metadata | {"autoreset_mode": mode}
        self._last_obs_info: dict[str, np.ndarray] | None = None  # None before the first reset

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes.

        Args:
            seed: An integer s gives environment i the seed s + i. A list has one seed for each
                environment; an entry None means a random seed. Equal seeds give equal sequences of
                episodes. Without a seed, each environment continues with the next episode of its
                current sequence.
            options: Must be empty.

        Returns:
            Observations [N, ..] and info.

        Raises:
            EnvError: A seed is invalid.
        """
        if options:
            raise self._error(f"reset(options={options}): there are none")
        if seed is not None:
            self.simulator.restart(self._seeds(seed))
        obs = _to_numpy(self.simulator.reset())
        self._ended[:] = False
        self._last_obs_info = self._obs_info(obs)
        return obs, self._with_masks(copy_arrays(self._last_obs_info))

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Execute ``actions`` [N, A].

        Returns:
            Observations [N, ..], reward float32 [N], terminated bool [N], truncated bool [N] and
            info, see the class.
        """
        step = self._step(actions)
        # The reward of a chunk is the sum over its actions.
        reward = step.reward.sum(1) if step.reward.ndim == 2 else step.reward
        obs, reward = _to_numpy(step.obs), _to_numpy(reward)
        terminated, truncated = _to_numpy(step.terminated), _to_numpy(step.truncated)
        acted = ~self._ended
        if self._ended.any():
            obs = _to_numpy(self.simulator.reset_where(torch.from_numpy(self._ended)))
            reward, terminated, truncated = reward * acted, terminated & acted, truncated & acted
        obs_info, step_info = self._obs_info(obs), self._step_info(step)
        infos = self._with_masks(obs_info) | self._with_masks(step_info, acted)
        ended = terminated | truncated
        if self._next_step:
            self._ended = ended
        elif ended.any():
            final_batch = obs if step.final_obs is None else _to_numpy(step.final_obs)
            final_obs = np.full(self.num_envs, None, dtype=object)
            for i in np.flatnonzero(ended):
                final_obs[i] = _row(final_batch, int(i))
            final_info = (self._last_obs_info or {}) | copy_arrays(step_info)
            final_info = self._with_masks(final_info, ended)
            infos |= self._with_masks({"final_obs": final_obs, "final_info": final_info}, ended)
        self._last_obs_info = copy_arrays(obs_info)
        return obs, reward, terminated, truncated, infos

    def render(self) -> tuple[np.ndarray, ...]:
        """Return an image uint8 [H, W, 3] of each environment."""
        if self.render_mode is None:
            raise self._error('render() needs render_mode="rgb_array"')
        return tuple(_to_numpy(self.worlds.physics.render(i)) for i in range(self.num_envs))

    def close_extras(self, **kwargs: Any) -> None:
        """Free the simulation."""
        self.simulator.close()

    def _with_masks(
        self, info: Mapping[str, Any], mask: np.ndarray | None = None
    ) -> dict[str, Any]:
        """Add a mask "_name" for each entry, as Gymnasium's vector environments do."""
        rows = np.ones(self.num_envs, dtype=bool) if mask is None else mask
        return {**info, **{f"_{name}": rows.copy() for name in info}}

    def _seeds(self, seed: int | Sequence[int | None]) -> list[int]:
        """Return one seed for each environment."""
        is_list = isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str)
        values: Any = seed if is_list else [seed]
        given = list(values)
        for each in given:
            whole = isinstance(each, int | np.integer) and not isinstance(each, bool)
            if each is not None and not whole:
                raise self._error(f"seed={each!r} must be a whole number, None, or a list of these")
        if not is_list:
            given = [int(given[0]) + i for i in range(self.num_envs)]
        random = _random_seeds(len(given))
        seeds = [r if s is None else int(s) for r, s in zip(random, given, strict=True)]
        check_seeds(self.simulator.id, seeds, self.num_envs)
        self._np_random, self._np_random_seed = seeding.np_random(seeds[0])
        return seeds


class TaskEnv(_TaskSimulator, gymnasium.Env):
    """One environment of a task: ``gym.make("embodied/Tabletop-v0")``.

    Observations, actions and info are those of ``TaskVectorEnv`` without the dimension N. For
    training, ``gym.make_vec`` is faster: it steps all environments in one call.

    The class itself has no time limit, like the environments of Gymnasium: ``gym.make`` adds the
    wrapper TimeLimit with ``max_episode_steps``, which counts calls of ``step``.
    """

    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES)}  # noqa: RUF012

    def __init__(self, task: str, *, render_mode: str | None = None, **options: Any) -> None:
        """Create the environment.

        Args:
            task: As in ``TaskVectorEnv``.
            render_mode: "rgb_array"; with None, ``render`` is not available.
            options: As in ``TaskVectorEnv``, without ``action_chunk`` and ``realism``.

        Raises:
            EnvError: The task or an option is unknown or invalid.
        """
        for name in ("num_envs", "action_chunk", "realism"):
            if name in options:
                raise EnvError(f"use gym.make_vec: {task}: gym.make has no option {name}")
        options = {"max_episode_steps": NO_LIMIT} | options
        self.observation_space, self.action_space = self._make(task, 1, render_mode, options)
        # After the end of an episode, the simulator keeps its last state until reset(), so that
        # render() can show it.
        self.worlds.autoreset = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start a new episode, the first one of ``seed`` if given; ``options`` must be empty."""
        super().reset(seed=seed)
        if options:
            raise self._error(f"reset(options={options}): there are none")
        if seed is not None:
            self.simulator.restart([int(seed)])
        obs = _to_numpy(self.simulator.reset())
        return _row(obs, 0), self._first(self._obs_info(obs))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Execute ``action`` [A] and return observation, reward, terminated, truncated, info."""
        step = self._step(np.asarray(action)[None])
        obs, info = _to_numpy(step.obs), self._step_info(step)
        info = self._first(self._obs_info(obs) | info)
        ends = bool(step.terminated[0]), bool(step.truncated[0])
        return _row(obs, 0), float(step.reward[0]), *ends, info

    def render(self) -> np.ndarray | None:
        """Return an image, uint8 [H, W, 3]; None if ``render_mode`` is None."""
        return None if self.render_mode is None else _to_numpy(self.simulator.render())

    def close(self) -> None:
        """Free the simulation. A second call has no effect."""
        self.simulator.close()

    @staticmethod
    def _first(info: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the info of environment 0 with values of types bool, int and str."""
        return {name: x.tolist()[0] for name, x in info.items()}
