"""Unregistered environments of the user's: classes and functions, adapted by their interface.

``env.id`` names a class or a function, as "package.module:Name". It is called with ``env.kwargs``
and with those of num_envs, seed, device, max_episode_steps and render_mode that it takes. What it
returns is recognised by its attributes:

gymnasium.Env, or the API of Gym       one environment, of which ``num_envs`` are built. Gym's reset
(reset without seed, 4 values of step)    returns the observation only; info["TimeLimit.truncated"]
                                          marks a time limit.
gymnasium.vector.VectorEnv             ``num_envs`` environments of arrays, or of tensors.
batched environment of tensors         see ``torch_env``.
legged_gym, rsl_rl's VecEnv            the same, by ``_RslRl``.

Others are refused by a line that names them and what to write instead.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from torch import Tensor

from embodied_envs.adapters.base import AdapterOptions, check_kwargs, factory_arguments
from embodied_envs.adapters.gymnasium_env import GymnasiumEnv
from embodied_envs.adapters.torch_env import TorchVectorEnv
from embodied_envs.adapters.user_code import wrap_errors
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError

_OF_ADAPTERS = ("final_observation", "partial_reset", "vectorization_mode", "autoreset_mode")
# Entries of env.kwargs that the adapters read.
_OF_ADAPTERS += ("vector_kwargs",)


def make(
    id: str, target: Any, options: AdapterOptions, *, tensors: bool
) -> GymnasiumEnv | TorchVectorEnv:
    """Create the environments of a class or a function.

    Args:
        id: ``env.id``.
        target: What it names.
        options: Options of the adapter.
        tensors: Whether ``env.simulator=torch`` requests a batched environment of tensors.

    Raises:
        EnvError: It fails, or its interface is not supported.
    """
    if not callable(target):
        module, name = id.rpartition(":")[0], type(target).__name__
        raise EnvError(
            f"write the class, or a function that returns a new environment, for example"
            f" env.id={module}:{name}: env.id={id} names an object of {name}"
        )
    is_class = inspect.isclass(target)
    is_vector = is_class and issubclass(target, gymnasium.vector.VectorEnv)
    if is_class and issubclass(target, gymnasium.Env) and not is_vector and takes_seed(target):
        return GymnasiumEnv(id, options, spec=_spec(id, entry_point=target))
    arguments = _arguments(id, target, options)

    def build(seed: int = options.seeds[0]) -> Any:
        """Call the class or the function; the random numbers of the training stay as they are."""
        given = arguments | ({"seed": seed} if "seed" in arguments else {})
        error = wrap_errors(f"env.id={id}: its function fails with {given}: ")
        with error, torch.random.fork_rng(devices=[]):
            torch.manual_seed(given.get("seed", 0))
            return target(**given)

    ready = [build()]
    first = ready[0]
    try:
        _check_interface(id, first)
        limit = options.max_episode_steps
        if hasattr(first, "num_envs"):
            if limit is not None and "max_episode_steps" not in arguments:
                raise EnvError(
                    f"leave env.max_episode_steps={limit} out, or add the parameter"
                    f" max_episode_steps to env.id={id}, which sets its own time limit"
                )
            return _adapt_batch(id, first, options, tensors=tensors)
        kwargs = options.kwargs or {}
        if kwargs.get("vectorization_mode") == "async":  # the other processes build their own
            _close(ready.pop())

        def single(render_mode: str | None = None, *, seed: int, **_: Any) -> gymnasium.Env:
            env = ready.pop() if ready else build(seed)
            if isinstance(env, gymnasium.Env) and takes_seed(env):
                return env
            return _Single(id, env, render_mode)

        # Gymnasium passes ``env.kwargs`` again, which ``build`` has.
        return GymnasiumEnv(id, options, spec=_spec(id, entry_point=single))
    except BaseException:
        _close(first)
        raise


def _arguments(id: str, target: Any, options: AdapterOptions) -> dict[str, Any]:
    """Return kwargs and those of ``factory_arguments`` that the class or the function takes."""
    parameters = inspect.signature(target).parameters
    takes_any = not inspect.isclass(target) and any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
    own = {x: v for x, v in factory_arguments(options).items() if takes_any or x in parameters}
    kwargs = {x: v for x, v in (options.kwargs or {}).items() if x not in _OF_ADAPTERS}
    check_kwargs(id, kwargs, own)
    return own | kwargs


def _adapt_batch(
    id: str, env: Any, options: AdapterOptions, *, tensors: bool
) -> GymnasiumEnv | TorchVectorEnv:
    """Return the adapter of an environment that is ``num_envs`` ones."""
    kwargs = dict(options.kwargs or {})
    if hasattr(env, "get_observations") and hasattr(env, "num_actions"):
        kwargs.setdefault("final_observation", "previous")
        env, tensors = _RslRl(id, env), True
    if tensors or _returns_tensors(env, options):
        return TorchVectorEnv(id, replace(options, kwargs=kwargs), make=lambda **_: env)
    return GymnasiumEnv(id, options, spec=_spec(id, vector=lambda num_envs, **_: env))


def _spec(id: str, *, entry_point: Any = None, vector: Any = None) -> EnvSpec:
    """Return a specification that is not registered."""
    name = id.rpartition(":")[2]
    return EnvSpec(f"{name}-v0", entry_point=entry_point, vector_entry_point=vector)


def _close(env: Any) -> None:
    if callable(getattr(env, "close", None)):
        env.close()


# ------------------------------------------------------------------------------------- recognition
def _has(env: Any, names: str) -> bool:
    """Return whether the environment, or the one that it wraps, has these attributes."""
    inner = getattr(env, "unwrapped", env)
    return all(hasattr(env, name) or hasattr(inner, name) for name in names.split())


def _check_interface(id: str, env: Any) -> None:
    """Raise EnvError for an object that no adapter takes; it names what to write instead."""
    one = "write a function that returns one environment (gymnasium.Env)"
    is_sb3 = _has(env, "step_async step_wait env_method")
    is_sb3 = is_sb3 and not isinstance(env, gymnasium.vector.VectorEnv)
    is_dm_env, reset = _has(env, "observation_spec action_spec"), getattr(env, "reset", None)
    is_jax = _takes(reset, "key") or (_takes(reset, "rng") and not is_dm_env)
    shimmy = "return shimmy.DmControlCompatibilityV0(env)"
    jax = "return the GymWrapper of its package, or a gymnasium.Env around it"
    needed = "observation_space action_space reset step"
    if hasattr(env, "num_envs"):
        needed = "single_observation_space single_action_space reset step"
        needed = "reset step" if _has(env, "get_observations num_actions") else needed
    missing = [name for name in needed.split() if not _has(env, name)]
    refusals = (
        (isinstance(env, Sequence), "with several environments", f"{one}, called num_envs times"),
        (_has(env, "possible_agents"), "of PettingZoo, which has several agents", one),
        (is_sb3, "in the VecEnv API of Stable-Baselines3", one),
        (_has(env, "recv send async_reset"), "of EnvPool", "write env.simulator=envpool"),
        (is_dm_env and not is_jax, "in the API of dm_env", f"pip install shimmy and {shimmy}"),
        (is_dm_env or is_jax, "with pure functions of JAX, as Brax and Jumanji", jax),
        (missing, f"without {', '.join(missing)}", "return a gymnasium.Env or a VectorEnv of it"),
    )
    for applies, kind, hint in refusals:
        if applies:
            raise EnvError(f"{hint}: env.id={id} is a {type(env).__name__} {kind}")


def _parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function; None where Python does not know them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def _takes(function: Any, name: str) -> bool:
    """Return whether a function has a parameter."""
    return name in (_parameters(function) or ())


def takes_seed(env: Any) -> bool:
    """Return whether ``reset`` of an environment or of its class takes a seed (not in old Gym)."""
    known = _parameters(env.reset)
    return known is None or any(x == "seed" or p.kind is p.VAR_KEYWORD for x, p in known.items())


def _returns_tensors(env: Any, options: AdapterOptions) -> bool:
    """Return whether the observations of a batched environment are tensors."""
    if not isinstance(env, gymnasium.vector.VectorEnv) or _has(env, "device"):
        return True
    obs = env.reset(seed=options.seeds[0])[0]
    while isinstance(obs, Mapping):
        obs = next(iter(obs.values()))
    return isinstance(obs, Tensor)


# -------------------------------------------------------------------------------- one environment
class _Single(gymnasium.Env):
    """An environment in the API of Gym before 0.26, or with a mixture of both APIs."""

    def __init__(self, id: str, env: Any, render_mode: str | None) -> None:
        self.id, self.env, self.render_mode = id, env, render_mode
        self.observation_space = to_gymnasium(env.observation_space)
        self.action_space = to_gymnasium(env.action_space)
        metadata = dict(getattr(env, "metadata", None) or {})
        modes = metadata.get("render_modes", metadata.get("render.modes", []))
        self.metadata = {**metadata, "render_modes": list(modes)}
        if not takes_seed(env) and not callable(getattr(env, "seed", None)):
            warnings.warn(
                f"env.id={id}: its reset() takes no seed and it has no seed(); episodes cannot be"
                " repeated",
                stacklevel=2,
            )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; ``seed`` goes to ``seed()`` where reset does not take it."""
        if takes_seed(self.env):
            result = self.env.reset(seed=seed)
        else:
            if seed is not None and callable(getattr(self.env, "seed", None)):
                self.env.seed(seed)
            result = self.env.reset()
        is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        obs, info = result if is_pair else (result, {})
        return self._of_space(obs), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance by one step; ``done`` without info["TimeLimit.truncated"] is terminated."""
        result = self.env.step(action)
        if len(result) == 4:
            obs, reward, done, info = result
            truncated = bool(done) and bool(info.get("TimeLimit.truncated", False))
            result = obs, reward, bool(done) and not truncated, truncated, info
        if len(result) != 5:
            raise EnvError(
                f"return obs, reward, terminated, truncated, info: step of env.id={self.id} returns"
                f" {len(result)} values"
            )
        obs, reward, terminated, truncated, info = result
        return self._of_space(obs), reward, bool(terminated), bool(truncated), dict(info)

    def _of_space(self, obs: Any) -> Any:
        """Return the observation in the type of its space, as Gymnasium requires."""
        space = self.observation_space
        return np.asarray(obs, space.dtype) if isinstance(space, spaces.Box) else obs

    def render(self) -> Any:
        """Return an image."""
        if _takes(self.env.render, "mode"):
            return self.env.render(mode=self.render_mode)
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        _close(self.env)


def to_gymnasium(space: Any) -> Any:
    """Return a space of Gym or mjlab as one of Gymnasium; other objects unchanged."""

    def bound(x: Any) -> np.ndarray:
        return np.broadcast_to(np.asarray(x, space.dtype), space.shape)

    converted = {
        "Box": lambda: spaces.Box(
            bound(space.low), bound(space.high), dtype=np.dtype(space.dtype).type
        ),
        "Discrete": lambda: spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0))),
        "MultiDiscrete": lambda: spaces.MultiDiscrete(space.nvec),
        "MultiBinary": lambda: spaces.MultiBinary(space.n),
        "Dict": lambda: spaces.Dict({k: to_gymnasium(x) for k, x in space.spaces.items()}),
        "Tuple": lambda: spaces.Tuple([to_gymnasium(x) for x in space.spaces]),
    }
    convert = None if isinstance(space, spaces.Space) else converted.get(type(space).__name__)
    return space if convert is None else convert()


# ---------------------------------------------------------------------------- legged_gym and rsl_rl
class _RslRl:
    """legged_gym's environments and rsl_rl's VecEnv, as ``TorchVectorEnv`` expects them.

    legged_gym    step -> obs, privileged_obs or None, reward, dones, infos
    rsl_rl 2      step -> obs, reward, dones, extras, with extras["observations"]["critic"]
    rsl_rl 3      step -> TensorDict of groups, reward, dones, extras

    Where infos["time_outs"] is set, the time limit has ended the episode. The observation of that
    step belongs to the next episode already, and the last one of the episode does not exist, so
    that ``TorchVectorEnv`` takes final_observation=previous.
    """

    def __init__(self, id: str, env: Any) -> None:
        self.id, self.env = id, env
        self.num_envs, self.device = int(env.num_envs), getattr(env, "device", "cpu")
        limit = getattr(env, "max_episode_length", None)
        self.max_episode_steps = None if limit is None else int(limit)
        shapes = tree.map(lambda x: _unbounded(x.shape[1:]), self._observe())
        self.single_observation_space: Any = (
            spaces.Dict(shapes) if isinstance(shapes, dict) else shapes
        )
        self.single_action_space = _unbounded((int(env.num_actions),))

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes; random numbers come from torch's generators."""
        if isinstance(seed, list):
            raise TypeError("rsl_rl's VecEnv takes one seed")
        if seed is not None and callable(getattr(self.env, "seed", None)):
            self.env.seed(seed)
        self.env.reset()
        return self._observe(), {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Advance by one step; the environment resets itself."""
        obs, *privileged, reward, dones, extras = self.env.step(action)
        extras = dict(extras)
        dones, time_outs = dones.bool(), extras.get("time_outs")
        truncated = torch.zeros_like(dones) if time_outs is None else dones & time_outs.bool()
        groups = _groups(obs, extras, privileged[0] if privileged else None)
        for name in ("observations", "time_outs"):  # the others become curves
            extras.pop(name, None)
        return groups, reward, dones & ~truncated, truncated, extras

    def _observe(self) -> Any:
        """Return the current observations."""
        obs, extras = self.env.get_observations(), {}
        if isinstance(obs, tuple):
            obs, extras = obs
        privileged: Any = getattr(self.env, "get_privileged_observations", None)
        return _groups(obs, extras, privileged() if callable(privileged) else None)

    def render(self) -> Any:
        """Return an image."""
        return self.env.render()

    def close(self) -> None:
        """Close the simulator."""
        _close(self.env)


def _groups(obs: Any, extras: Mapping[str, Any], privileged: Any) -> Any:
    """Return the observations of actor and critic by the names of Isaac Lab; one array alone."""
    if hasattr(obs, "items"):  # a TensorDict
        groups = dict(obs.items())
    else:
        if privileged is None:
            privileged = (extras.get("observations") or {}).get("critic")
        groups = {"policy": obs} | ({} if privileged is None else {"critic": privileged})
    return groups if len(groups) > 1 else next(iter(groups.values()))


def _unbounded(shape: Sequence[int]) -> spaces.Box:
    return spaces.Box(-math.inf, math.inf, tuple(shape), np.float32)
