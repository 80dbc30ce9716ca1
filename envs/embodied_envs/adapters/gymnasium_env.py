"""Gymnasium's registered environments, including the user's, as a ``VectorEnv``."""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from embodied_envs.adapters import spaces
from embodied_envs.adapters.base import Adapter, AdapterOptions
from embodied_envs.adapters.infos import merge_final, read_numbers, single_numbers, to_numbers
from embodied_envs.adapters.simulator_processes import run_worker, use_egl_without_display
from embodied_envs.adapters.user_code import copy_arrays, import_user_module, wrap_errors
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError, TrainingError, check_choice
from embodied_envs.base.observation_names import ACTION_MASK, INSTRUCTION
from embodied_envs.registration import NAMESPACE
from embodied_envs.types import ArraySpec, Obs, ObsSpec, Step

AUTORESET = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}
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
    first info that has it (Gymnasium does not declare infos).
    A vector implementation that accepts only one seed gets the first of ``seeds``.
    """

    def __init__(self, id: str, options: AdapterOptions, *, spec: Any = None) -> None:
        """Create the environments of ``spec``, or of the registered task ``id``."""
        super().__init__(id, options)
        self._rebuild = options.rebuild
        self._done: np.ndarray | None = None  # bool [N]; None before the first reset
        self._spec = spec = spec or gymnasium.spec(_registered_name(id))
        # Gymnasium's own tasks have float64 observations, whose numbers are small.
        self.keeps_float64 = not str(spec.entry_point).startswith("gymnasium.envs.")
        self._is_gymnasium_mujoco = str(spec.entry_point).startswith("gymnasium.envs.mujoco")
        given = options.max_episode_steps or (options.kwargs or {}).get("max_episode_steps")
        limit = given or spec.max_episode_steps
        self.max_episode_steps = None if limit == -1 else limit  # -1: Gymnasium's for no limit
        self._arguments = self._make_arguments(options)
        self._env = env = self._make()
        rate = env.metadata.get("render_fps")
        self.step_s = 1.0 / rate if rate else None
        if not self.keeps_float64:  # Pendulum shows another rate
            self.step_s = getattr(self.first_environment().unwrapped, "dt", self.step_s)
        self._same_step = self._autoreset_mode() == AutoresetMode.SAME_STEP
        try:
            self._set_spaces(env.single_observation_space, env.single_action_space, options)
        except BaseException:  # processes of asynchronous environments would outlive the message
            self.close()
            raise
        # Converts observations [N, ..].
        self.read_obs = spaces.reader(self.leaves)

    def _observe_sentences(
        self, sentences: Sequence[str], read: Callable[[Any], Any] | None
    ) -> None:
        """Set ``instructions``, and observe their index.

        Args:
            sentences: All sentences of episodes.
            read: Returns the index [N] from the simulator's observations. None: it is not observed.
        """
        self.instructions = tuple(sentences)
        self.leaves.pop(INSTRUCTION, None)
        if read is None:
            return
        named: Any = self.obs_spec
        self.obs_spec: ObsSpec = {**named, INSTRUCTION: ArraySpec((), torch.int64)}
        read_others: Any = spaces.reader(self.leaves)

        def read_obs(obs: Any) -> Obs:
            index = torch.as_tensor(read(obs), dtype=torch.int64, device=self.device)
            return {**read_others(obs), INSTRUCTION: index.clone()}

        self.read_obs = read_obs

    def reset(self) -> Obs:
        """Start new episodes in all environments."""
        self._check_open()
        if self._seeds_are_new:
            if self._done is not None and self._rebuild:
                # Environments keep state between episodes, so new seeds need new environments.
                self._env.close()
                self._env = self._make()
            obs = self._seeded_reset()[0]
            self._seeds_are_new = False
        else:
            obs = self._call(self._env.reset)[0]
        self._done = np.zeros(self.num_envs, dtype=bool)
        return self.read_obs(obs)

    def step(self, action: Tensor) -> Step:
        """Advance all environments by one step; ``action`` is float32 [N, A] or int64 [N]."""
        self._check_step(action)
        actions = tree.map(lambda x: x.detach().cpu().numpy(), self.to_simulator(action))
        obs, *results, info = self._call(self._env.step, actions)
        reward, terminated, truncated = map(self._column, results)
        assert self._done is not None
        # With next-step resets, the row after an end is the dummy row that resets.
        acted = np.ones(self.num_envs, dtype=bool) if self._same_step else ~self._done
        terminated = terminated.astype(bool) & acted
        truncated = truncated.astype(bool) & acted & ~terminated
        self._done = ended = terminated | truncated
        numbers = self._numbers(info)
        success = self._success(numbers)
        final_obs = self._final_obs(obs, info) if self._same_step and ended.any() else None

        def to_tensor(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x).to(self.device)

        return Step(
            obs=self.read_obs(obs),
            reward=to_tensor(np.where(acted, reward.astype(np.float32), np.float32(0))),
            terminated=to_tensor(terminated),
            truncated=to_tensor(truncated),
            mask=to_tensor(acted),
            final_obs=final_obs,
            success=None if success is None else success & to_tensor(acted),
            info=numbers or None,
        )

    def _column(self, x: Any) -> np.ndarray:
        """Return rewards or flags as [N]; a vector of its own may return [N, 1]."""
        x = np.asarray(x)
        self._check_rows(x, x.size)
        return x.reshape(-1)

    def _numbers(self, info: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the numbers of the info of the step, not of the reset that followed it."""
        numbers = read_numbers(info, self.num_envs)
        if self._same_step:
            last = read_numbers(info.get("final_info"), self.num_envs)
            numbers = merge_final(numbers, last, torch.from_numpy(self._done))
        return {name: x.to(self.device) for name, x in numbers.items()}

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
        return self.read_obs(obs)

    def first_environment(self) -> Any:
        """Return environment 0, or the vector environment where it is in another process."""
        env: Any = self._env.unwrapped
        return env.envs[0] if isinstance(env, gymnasium.vector.SyncVectorEnv) else env

    def render(self) -> Tensor:
        """Return an image of environment 0, uint8 [H, W, 3] of ``render_size``."""
        self._check_render()
        try:
            return self._to_image(self.first_environment().render())
        except (gymnasium.error.Error, ImportError) as error:
            raise self.error(f"it cannot be rendered: {error}") from error

    def _make_arguments(self, options: AdapterOptions) -> dict[str, Any]:
        """Return the arguments of ``gymnasium.make_vec``; raise EnvError for invalid kwargs."""
        kwargs = dict(options.kwargs or {})
        default = "sync" if self._spec.entry_point is not None else "vector_entry_point"
        mode = kwargs.pop("vectorization_mode", default)
        autoreset = kwargs.pop("autoreset_mode", None)
        prefix = f"env.id={self.id}: "
        check_choice(f"{prefix}vectorization_mode", mode, _VECTORIZATION)
        check_choice(f"{prefix}autoreset_mode", autoreset or "next_step", AUTORESET)
        vector_kwargs = dict(kwargs.pop("vector_kwargs", None) or {})
        self._has_own_vector = mode == "vector_entry_point"
        if not self._has_own_vector:
            # ``read_obs`` copies the observations.
            vector_kwargs |= {"copy": False, "autoreset_mode": AUTORESET[autoreset or "next_step"]}
        elif autoreset is not None:
            raise self.error(
                f"remove autoreset_mode={autoreset}, or choose vectorization_mode=sync: its own"
                " vector implementation resets as it does"
            )
        if options.max_episode_steps is not None:
            kwargs["max_episode_steps"] = options.max_episode_steps
        if self._render_size is not None:
            kwargs["render_mode"] = "rgb_array"
            if self._is_gymnasium_mujoco:
                height, width = self._render_size
                kwargs = {"height": height, "width": width} | kwargs
            use_egl_without_display()
        return {"vectorization_mode": mode, "vector_kwargs": vector_kwargs, **kwargs}

    def _make(self) -> Any:
        """Build the vector environment; raise EnvError if it fails."""
        quiet = _without_mujoco_warnings() if self._is_gymnasium_mujoco else nullcontext()
        context = f"env.id={self.id}: Gymnasium cannot make it with {self._arguments}: "
        with wrap_errors(context), quiet:
            env = self._make_vector(**copy_arrays(self._arguments))
        self._check_num_envs(env, env.num_envs)
        if self._render_size is not None:
            modes = env.metadata.get("render_modes") or []
            if "rgb_array" not in modes:
                env.close()
                raise self.error(f"render=True needs render mode rgb_array, it has {modes}")
            _prepare_images(env)
        return env

    def _make_vector(
        self, *, vectorization_mode: str, vector_kwargs: dict[str, Any], **kwargs: Any
    ) -> Any:
        """Return the environments as Gymnasium's ``make_vec`` does, each with its own memory."""
        if vectorization_mode == "vector_entry_point":
            kwargs["vector_kwargs"] = vector_kwargs
            return gymnasium.make_vec(self._spec, self.num_envs, vectorization_mode, **kwargs)
        point = self._spec.entry_point
        takes_seed = callable(point) and "seed" in inspect.signature(point).parameters
        seeds = [{"seed": seed} if takes_seed else {} for seed in self._seeds]
        given = [seed | self._spec.kwargs | kwargs for seed in seeds]
        makers = [functools.partial(_make_one, self._spec, own) for own in given]
        if vectorization_mode == "sync":
            return gymnasium.vector.SyncVectorEnv(makers, **vector_kwargs)
        return gymnasium.vector.AsyncVectorEnv(makers, **{"worker": run_worker, **vector_kwargs})

    def _autoreset_mode(self) -> AutoresetMode:
        """Return the mode of the vector's resets; raise EnvError if it does not reset itself."""
        mode = self._env.metadata.get("autoreset_mode")
        if mode not in AUTORESET.values():
            self.close()
            raise self.error(
                'write metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP} (or'
                f" SAME_STEP) in its vector implementation, which has {mode}"
            )
        return mode

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call a method; raise TrainingError where a process of AsyncVectorEnv has ended.

        Raise EnvError where the results have not Gymnasium's parts.
        """
        try:
            return method(*args, **options)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._closed = self._env.unwrapped.closed = True  # close() would fail in the same way
            message = f"{method.__name__}(): a process of the simulator has ended (a crash or kill)"
            raise TrainingError(f"env.id={self.id}: {message}") from error
        except ValueError as error:
            if "to unpack" not in str(error):
                raise
            parts = "(observation, info) from reset(), (.., reward, terminated, truncated, info)"
            raise self.error(f"return {parts} from step(): {error}") from error

    def _seeded_reset(self) -> Any:
        """Reset with all seeds, or with the first one if the user's vector accepts only one."""
        with wrap_errors(f"env.id={self.id}: its reset(seed=, options=) fails: "):
            try:
                return self._call(self._env.reset, seed=list(self._seeds))
            except (TypeError, gymnasium.error.Error):
                if not self._has_own_vector:
                    raise
            return self._env.reset(seed=self._seeds[0])

    def _final_obs(self, obs: Any, info: Mapping[str, Any]) -> Obs:
        """Return ``obs`` with the rows that ended replaced by info["final_obs"]."""
        final = info.get("final_obs")
        if final is None:
            raise self.error("put the last observation of an episode into info['final_obs']")
        assert self._done is not None
        if isinstance(final, np.ndarray) and final.dtype == object:
            rows, final = final, copy_arrays(obs)  # else the vector has returned a batch
            for i in np.flatnonzero(self._done):
                tree.map(lambda x, row, i=i: operator.setitem(x, i, row), final, rows[i])
        return self.read_obs(final)


class _OwnMemory(gymnasium.Wrapper):
    """An environment whose results are copies, with the numbers of its infos alone.

    Gymnasium's vectors keep the arrays of an environment until all environments have stepped, and
    those of an ended episode while it is reset. Until then the environment, or another one with the
    same buffer, may change them.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        leaves = spaces.flatten(env.observation_space)
        self.shapes = {name: getattr(leaf, "shape", None) for name, leaf in leaves.items()}
        self.warned_of_mask = False

    def _own(self, obs: Any) -> Any:
        """Return a copy of an observation; raise EnvError if it has not the shapes of its space."""
        for name, shape in self.shapes.items():
            x = spaces.entry(obs, name) if name else obs
            if shape is not None and (x is None or np.shape(x) != shape):
                actual = type(x).__name__ if x is None else list(np.shape(x))
                raise EnvError(
                    f"return observations of the shapes in observation_space: {name or 'that'} of"
                    f" {type(self.unwrapped).__name__} is {actual}, its space {list(shape)}"
                )
        return copy_arrays(obs)

    def reset(self, **kwargs: Any) -> Any:
        """Start a new episode."""
        obs, info = self.env.reset(**kwargs)
        if not isinstance(info, Mapping):  # unpacked from an observation of two entries
            raise EnvError(f"return (observation, info) from reset(): info is {info!r:.60}")
        if ACTION_MASK in info and ACTION_MASK not in self.shapes and not self.warned_of_mask:
            self.warned_of_mask = True
            warnings.warn(
                f"return it as the entry {ACTION_MASK} of a dictionary of observations to use it:"
                f" info['{ACTION_MASK}'] of {type(self.unwrapped).__name__} is not read",
                stacklevel=2,
            )
        return self._own(obs), single_numbers(info)

    def step(self, action: Any) -> Any:
        """Advance by one step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if not isinstance(reward, float):
            reward = one_number(reward)
        for flag in (terminated, truncated):  # None would be False, and a reward True
            if not isinstance(flag, bool | np.bool_):
                one_number(flag, "True or False as terminated and truncated", (0.0, 1.0))
        return self._own(obs), reward, terminated, truncated, single_numbers(info)


def one_number(x: Any, what: str = "one number as the reward", values: Any = ()) -> float:
    """Return a number of any numeric type, shape () or (1,), as a float; ``what`` describes it."""
    number = to_numbers(x, 1)
    if number is None or (values and float(number) not in values):
        kind = f"{type(x).__name__} {list(np.shape(x)) or x!r:.60}"
        raise EnvError(f"return {what} of a step: it is {kind}")
    return float(number)


def _make_one(spec: Any, kwargs: Mapping[str, Any]) -> gymnasium.Env:
    """Return one environment with arguments of its own.

    Gymnasium's own checker ends a run where an info is no dictionary; results are checked here.
    """
    options = {"disable_env_checker": True, **copy_arrays(dict(kwargs))}
    return _OwnMemory(gymnasium.make(spec, **options))


def _prepare_images(env: Any) -> None:
    """Disable shadows and multisampling in environment 0's MuJoCo model, and extend its floor.

    On a CPU they take 90 % of the rendering time. Gymnasium's renderer reads these fields at its
    first image, when it creates its context.
    """
    first = next(iter(getattr(env.unwrapped, "envs", ())), env)
    model: Any = getattr(first.unwrapped, "model", None)
    if hasattr(model, "light_castshadow") and hasattr(model, "vis"):
        model.light_castshadow[:] = 0
        model.vis.quality.shadowsize = 0
        model.vis.quality.offsamples = 0
        cameras: Any = importlib.import_module("embodied_envs.physics.cameras")  # loads MuJoCo
        if isinstance(model, cameras.mujoco.MjModel) and cameras.travelling_body(model) is not None:
            cameras.extend_floors(model)


@contextmanager
def _without_mujoco_warnings() -> Iterator[None]:
    """Suppress MuJoCo's warnings, such as that about ``settotalmass`` in Gymnasium's model files.

    MuJoCo's C code writes them to stderr and MUJOCO_LOG.TXT once per environment.
    """
    mujoco: Any = importlib.import_module("mujoco")
    mujoco.set_mju_user_warning(lambda text: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(None)
