"""Batched environments of tensors (ManiSkill, Isaac Lab, the user's) as a ``VectorEnv``.

``env.id`` names a function that creates one, as "package.module:function". It is called with
num_envs, seed (an integer), device ("cuda:0") and the entries of ``env.kwargs``; with
max_episode_steps if ``env.max_episode_steps`` is set, and with render_mode="rgb_array" if images
are rendered. For ManiSkill:

    def make_env(num_envs, seed, device, task="PickCube-v1", **kwargs):
        import gymnasium, mani_skill.envs
        from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv
        env = gymnasium.make(task, num_envs=num_envs, sim_backend=device, **kwargs)
        return ManiSkillVectorEnv(env)

and for Isaac Lab (whose AppLauncher must run first):

    def make_env(num_envs, seed, device, task="Isaac-Ant-v0"):
        import gymnasium, isaaclab_tasks
        from isaaclab_tasks.utils import parse_env_cfg
        cfg = parse_env_cfg(task, device=device, num_envs=num_envs)
        cfg.seed, cfg.compute_final_obs = seed, True
        return gymnasium.make(task, cfg=cfg)

The environment has num_envs, single_observation_space and single_action_space, and

    reset(seed=, options=) -> observation, info
    step(action [N, A])    -> observation, reward [N], terminated [N], truncated [N], info

where an observation is a tensor [N, ..] or nested dictionaries of tensors, and the step that ends
an episode also starts the next one. Then info["final_obs"] (Gymnasium 1, Isaac Lab with
compute_final_obs) or info["final_observation"] (ManiSkill) holds the last observation of the
episode, [N, ..], arbitrary in rows whose episode goes on.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch.nn.functional import one_hot

from embodied_envs.adapters import spaces
from embodied_envs.adapters.base import Adapter, AdapterOptions
from embodied_envs.adapters.user_code import import_user_module, wrap_errors
from embodied_ppo.core import tree
from embodied_ppo.core.types import EnvError, Obs, Step

Factory = Callable[..., Any]
_ACTOR_GROUPS = ("policy", "actor")
"""Names of the policy's observations in Isaac Lab and mjlab; the critic's are another group."""


def factory(id: str) -> Factory | None:
    """Return the function that "package.module:function" names; None if there is no such function.

    Raises:
        EnvError: The module cannot be imported.
    """
    module, colon, name = id.rpartition(":")
    if not colon or not name.isidentifier():
        return None
    function = getattr(import_user_module(id, module), name, None)
    return function if callable(function) else None


class TorchVectorEnv(Adapter):
    """A batched environment whose tensors stay on their device. Implements ``VectorEnv``.

    Entries of ``kwargs`` that the adapter reads; the others are passed to the factory:

    observe            older form of ``obs_keys``, kept for runs that have it: name or names of the
                       observation's entries to use. A single name gives its array without a name.
                       Without both, the group "policy" (Isaac Lab) or "actor" (mjlab) is used if
                       there is one, else all; but a privileged group is an EnvError.
    final_observation  "info" (default): an end without its last observation in the info is an
                       EnvError. "previous": use the observation before it, as in rsl_rl. The value
                       that bootstraps a truncated episode is then V(s_t) instead of V(s_t+1), and a
                       warning reports it. Nothing changes if no episode is truncated.
    partial_reset      whether reset(options={"env_idx": int64 indices}) starts new episodes of
                       these environments only. None: true for ManiSkill.

    A step that is both terminated and truncated counts as terminated. If the environment's ``cfg``
    has is_finite_horizon (Isaac Lab, mjlab), the time limit terminates. ``success`` is
    info[success_key] [N], in the last step of an episode info["final_info"][success_key]; "a/b"
    reads info["a"]["b"]. It is None until the first info has it.

    ``restart`` does not create a new environment: it resets with new seeds, all of them if the
    environment accepts a list, else the first. State that outlives an episode (a curriculum, domain
    randomisation at the start) is kept. torch's global generators, from which most of these
    environments draw, are saved and restored around each call, so that each environment has its own
    random numbers. ``step`` synchronises with the device only until the first info with a last
    observation.
    """

    def __init__(self, id: str, options: AdapterOptions, *, make: Factory | None = None) -> None:
        """Create the environment with ``make``, or with the function that ``id`` names."""
        if options.num_threads is not None:
            raise EnvError(
                f"env.id={id}: num_threads={options.num_threads} is an option of EnvPool and of our"
                " engine; leave it out (its factory may take an option of its own through"
                " env.kwargs)"
            )
        super().__init__(id, options)
        self._accepts_seed_list = True  # until a reset with one seed per environment has failed
        kwargs = dict(options.kwargs or {})
        observe = kwargs.pop("observe", None)
        final = kwargs.pop("final_observation", "info")
        partial_reset = kwargs.pop("partial_reset", None)
        if observe is not None and options.obs_keys is not None:
            raise EnvError(
                f"env.id={id}: env.obs_keys and env.kwargs.observe both select observations; leave"
                " one out"
            )
        if final not in ("info", "previous"):
            raise EnvError(
                f"env.id={id}: final_observation={final!r} is unknown; choose one of info, previous"
            )

        # States of torch's generators after the environment's last call.
        self._generator_states: list[Tensor] = []
        with self._own_generators(self._seeds[0]):
            self._env = self._make(make or factory(id), kwargs, options.max_episode_steps)
        self._check_env()
        self._env_device = torch.device(_attribute(self._env, "device") or self.device)
        self._partial_reset = (
            _is_maniskill(self._env) if partial_reset is None else bool(partial_reset)
        )
        self._finite_horizon = bool(
            getattr(_attribute(self._env, "cfg"), "is_finite_horizon", False)
        )
        limit = (
            options.max_episode_steps
            or getattr(_attribute(self._env, "spec"), "max_episode_steps", None)
            or _attribute(self._env, "max_episode_steps")
        )
        self.max_episode_steps = None if limit is None else int(limit)

        space, self._obs_group = self._observed_space(observe, options.obs_keys)
        is_dict = isinstance(space, Mapping | gymnasium.spaces.Dict)
        if observe is not None and is_dict:
            options = replace(options, obs_keys=list(space))  # ``observe`` has selected them
        leaves = self._set_spaces(space, _attribute(self._env, "single_action_space"), options)
        self._leaf_spaces = spaces.flatten(space) if is_dict else {"": space}
        self._read_tensors = spaces.reader({x: partial(self._to_tensor, x) for x in leaves})
        self._use_previous_obs = final == "previous"
        # The last observation, kept for ``final_observation=previous``.
        self._previous_obs: Obs | None = None
        self._info_has_final_obs = False
        if self._use_previous_obs:
            warnings.warn(
                f"env.id={id}: final_observation=previous: if the time limit ends an episode"
                " without its last observation, the value of the observation before it is used,"
                " which is biased by one step",
                stacklevel=2,
            )

    def reset(self) -> Obs:
        """Start new episodes in all environments."""
        self._check_open()
        with self._own_generators(self._seeds[0] if self._seeds_are_new else None):
            obs = self._seeded_reset() if self._seeds_are_new else self._env.reset()[0]
            obs = self._read_reset(obs)
        if self._seeds_are_new:
            self._success_key = self._success_option
        self._seeds_are_new = False
        return obs

    def step(self, action: Tensor) -> Step:
        """Advance all environments by one step; ``action`` is float32 [N, A] or int64 [N]."""
        self._check_step(action)
        action = _copy_if_shared(self.to_simulator(action), action, self._env_device)
        with self._own_generators():
            obs, reward, terminated, truncated, info = self._env.step(action)
        terminated, truncated = (self._copy(x, torch.bool) for x in (terminated, truncated))
        if self._finite_horizon:
            terminated = terminated | truncated
        truncated = truncated & ~terminated
        ended = terminated | truncated
        obs = self._read(obs)
        final_obs = self._final_obs(obs, info, ended)
        return Step(
            obs=obs,
            reward=self._copy(reward, torch.float32),
            terminated=terminated,
            truncated=truncated,
            mask=torch.ones_like(terminated),
            final_obs=final_obs,
            success=self._success(info, ended, may_have_ended=final_obs is not None),
        )

    def reset_where(self, where: Tensor) -> Obs | None:
        """Start new episodes where bool [N] is True; None unless ``partial_reset``."""
        if not self._partial_reset:
            return None
        index = where.nonzero().flatten().to(self._env_device)
        if not len(index):
            return self._zeros()
        with self._own_generators():
            obs, _ = self._env.reset(options={"env_idx": index})
        return self._read_reset(obs)

    def render(self) -> Tensor:
        """Return an image of environment 0, uint8 [H, W, 3] of ``render_size``."""
        self._check_render()
        return self._to_image(self._env.render())

    # --------------------------------------------------------------------------------- construction
    def _make(
        self, make: Factory | None, options: dict[str, Any], max_episode_steps: int | None
    ) -> Any:
        """Call the factory; raise EnvError if it fails or does not exist."""
        if make is None:
            raise self._error(
                "names no function; simulator=torch needs"
                ' "package.module:function", which is called with num_envs, seed, device and'
                " env.kwargs and returns the environment"
            )
        arguments: dict[str, Any] = {
            "num_envs": self.num_envs,
            "seed": self._seeds[0],
            "device": str(self.device),
        }
        if max_episode_steps is not None:
            arguments["max_episode_steps"] = max_episode_steps
        if self._render_size is not None:
            arguments["render_mode"] = "rgb_array"
        self._check_kwargs(options, arguments)
        with wrap_errors(f"env.id={self.id}: its function fails with {arguments | options}: "):
            return make(**arguments, **options)

    @contextlib.contextmanager
    def _own_generators(self, seed: int | None = None) -> Iterator[None]:
        """Give the environment its own state of torch's global generators, seeded if requested.

        Without this, an evaluation, which seeds the generators, would make training repeat its
        random numbers.
        """
        before = _generator_states(self.device)
        if seed is None:
            _set_generators(self._generator_states, self.device)
        else:
            torch.manual_seed(seed)
        try:
            yield
        finally:
            self._generator_states = _generator_states(self.device)
            _set_generators(before, self.device)

    def _check_env(self) -> None:
        """Raise EnvError unless the environment has everything that the adapter needs."""
        needed = "num_envs single_observation_space single_action_space reset step close"
        if missing := [name for name in needed.split() if _attribute(self._env, name) is None]:
            raise self._error(f"its {type(self._env).__name__} lacks {', '.join(missing)}")
        self._check_num_envs(self._env, _attribute(self._env, "num_envs"))
        metadata = getattr(self._env, "metadata", None) or {}
        mode = metadata.get("autoreset_mode", AutoresetMode.SAME_STEP)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP.value):
            self.close()
            raise self._error(
                f"its metadata has autoreset_mode={mode}; only AutoresetMode.SAME_STEP is"
                " supported: the step that ends an episode starts the next one"
            )

    def _observed_space(
        self, observe: str | list[str] | None, obs_keys: Sequence[str] | None
    ) -> tuple[Any, str | None]:
        """Return the used part of the observation space, and its name if it is a single entry."""
        space = _attribute(self._env, "single_observation_space")
        if obs_keys is not None:  # ``spaces.observations`` selects the entries
            return space, None
        names = list(space) if isinstance(space, Mapping | gymnasium.spaces.Dict) else []
        selected = [observe] if isinstance(observe, str) else observe
        if selected is None:
            if names:  # raises if one of them is privileged
                spaces.select_observations(list(spaces.flatten(space)), None, id=self.id)
            selected = [name for name in names if name in _ACTOR_GROUPS][:1]
            observe = selected[0] if selected else None
        if not selected:
            return space, None
        if unknown := [name for name in selected if name not in names]:
            raise self._error(
                f"observe={unknown[0]!r} is not in its observation; "
                f"it has {', '.join(names) or 'no entries'}"
            )
        if isinstance(observe, str):
            return space[observe], observe
        return {name: space[name] for name in selected}, None

    # --------------------------------------------------------------------------------- observations
    def _seeded_reset(self) -> Any:
        """Reset with all seeds, or with the first one if the environment accepts only one."""
        if self._accepts_seed_list:
            try:
                return self._env.reset(seed=list(self._seeds))[0]
            except (TypeError, ValueError, gymnasium.error.Error):
                self._accepts_seed_list = False
        return self._env.reset(seed=self._seeds[0])[0]

    def _read_reset(self, obs: Any) -> Obs:
        """Convert the observation of a reset, check it and keep it for the next step."""
        converted = self._read(obs)
        named = converted if isinstance(converted, dict) else {"": converted}
        specs = self.obs_spec if isinstance(self.obs_spec, dict) else {"": self.obs_spec}
        for name, spec in specs.items():
            if tuple(named[name].shape) != (self.num_envs, *spec.shape):
                raise self._error(
                    f"observation {name!r} has shape {list(named[name].shape)},"
                    f" its single_observation_space has {list(spec.shape)} for each of"
                    f" {self.num_envs} environments"
                )
        self._keep_previous(converted)
        return converted

    def _keep_previous(self, obs: Obs) -> None:
        """Store a copy of ``obs`` for ``final_observation=previous``."""
        if self._use_previous_obs:
            self._previous_obs = tree.map(torch.clone, obs)

    def _read(self, obs: Any) -> Obs:
        """Convert observations [N, ..] to the spec, on ``device``, in separate memory."""
        return self._read_tensors(obs if self._obs_group is None else obs[self._obs_group])

    def _to_tensor(self, name: str, x: Any) -> Tensor:
        """Convert one entry of an observation; raise EnvError unless it is a tensor."""
        if not isinstance(x, Tensor):
            raise self._error(
                f"observation {name!r} is a {type(x).__name__}, not a"
                " torch.Tensor; use simulator=gymnasium for environments of numpy arrays"
            )
        spec = self.obs_spec[name] if isinstance(self.obs_spec, dict) else self.obs_spec
        space = self._leaf_spaces[name]
        if isinstance(space, gymnasium.spaces.Discrete):
            index = x.reshape(-1).long() - int(space.start)
            return one_hot(index, int(space.n)).to(self.device, spec.dtype)
        y = x.unsqueeze(-1) if x.dim() == 1 and spec.shape == (1,) else x
        return _copy_if_shared(y.to(spec.dtype), x, self.device)

    def _copy(self, x: Any, dtype: torch.dtype) -> Tensor:
        """Copy [N] to ``device``, because the environment may overwrite its tensor later."""
        return torch.as_tensor(x).reshape(self.num_envs).to(self.device, dtype, copy=True)

    def _final_obs(self, obs: Obs, info: Mapping[str, Any], ended: Tensor) -> Obs | None:
        """Return the true successors where ``ended`` [N]; raise EnvError if they are missing."""
        previous = self._previous_obs
        self._keep_previous(obs)
        for key in ("final_obs", "final_observation"):
            if info.get(key) is not None:
                self._info_has_final_obs = True
                return self._read(info[key])
        if self._info_has_final_obs:
            return None
        if self._use_previous_obs:
            return previous
        if bool(ended.any()):  # synchronises with the device
            raise self._error(
                "an episode ended, and its last observation is not in"
                " info['final_obs'] (nor 'final_observation'), so the value of the next state is"
                " unknown if the time limit ended it. Put it there, before the reset (Isaac Lab:"
                " cfg.compute_final_obs=True); or set env.kwargs.final_observation=previous to use"
                " the observation before it instead, biased by one step where episodes are"
                " truncated"
            )
        return None

    def _success(
        self, info: Mapping[str, Any], ended: Tensor, *, may_have_ended: bool
    ) -> Tensor | None:
        """Return success [N] of the step, not of the reset that followed it, or None.

        If an episode may have ended, a missing key is an EnvError.
        """
        final = info.get("final_info") or {}
        key = self._find_success_key(info, final)
        if key is None:
            return None
        now, last = _entry(info, key), _entry(final, key)
        if now is None and last is None:
            if may_have_ended and self._success_option is not None:
                raise spaces.success_key_error(self.id, key, {*info, *final})
            return torch.zeros_like(ended)
        if now is None or last is None:
            return self._copy(last if now is None else now, torch.bool)
        return torch.where(ended, self._copy(last, torch.bool), self._copy(now, torch.bool))


def _attribute(env: Any, name: str) -> Any:
    """Return an attribute of the environment or, as wrappers hide it, of the wrapped one."""
    value = getattr(env, name, None)
    return getattr(getattr(env, "unwrapped", None), name, None) if value is None else value


def _generator_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's global generators without a device synchronisation."""
    cuda_states = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *cuda_states]


def _set_generators(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _is_maniskill(env: Any) -> bool:
    return any(
        type(x).__module__.startswith("mani_skill.") for x in (env, getattr(env, "unwrapped", None))
    )


def _entry(info: Any, key: str) -> Any:
    """Return ``info["a"]["b"]`` for "a/b", or None."""
    for part in key.split("/"):
        if not isinstance(info, Mapping) or part not in info:
            return None
        info = info[part]
    return info


def _copy_if_shared(y: Tensor, x: Tensor, device: torch.device) -> Tensor:
    """Return ``y`` on ``device``, in other memory than ``x``."""
    y = y.to(device)
    return y.clone() if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else y
