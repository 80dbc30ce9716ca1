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
from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch.nn.functional import one_hot

from embodied_envs.adapters import spaces
from embodied_envs.adapters.base import Adapter, AdapterOptions
from embodied_envs.adapters.infos import merge_final, read_numbers
from embodied_envs.base import tree
from embodied_envs.base.errors import check_choice
from embodied_envs.types import Obs, Step

# Names of the policy's observations in Isaac Lab and mjlab; the critic's are another group.
_ACTOR_GROUPS = ("policy", "actor")


class TorchVectorEnv(Adapter):
    """A batched environment whose tensors stay on their device. Implements ``VectorEnv``.

    Without ``obs_keys``, the group "policy" (Isaac Lab) or "actor" (mjlab) is observed if there is
    one, else all groups; but a privileged group is an EnvError.

    Entries of ``kwargs`` that the adapter reads; the others are passed to ``make``:

    final_observation  "info" (default): an end without its last observation in the info is an
                       EnvError. "previous": use the observation before it, as in rsl_rl. The value
                       that bootstraps a truncated episode is then V(s_t) instead of V(s_t+1), and a
                       warning reports it. Nothing changes if no episode is truncated.
    partial_reset      whether reset(options={"env_idx": int64 indices}) starts new episodes of
                       these environments only. None: true for ManiSkill.

    A step that is both terminated and truncated counts as terminated. If the environment's ``cfg``
    has is_finite_horizon (Isaac Lab, mjlab), the time limit terminates. ``success`` is
    info["success"] or info["is_success"] [N], in the last step of an episode that of
    info["final_info"]. It is None until the first info has it.

    ``restart`` does not create a new environment: it resets with new seeds, all of them if the
    environment accepts a list, else the first. State that outlives an episode (a curriculum, domain
    randomisation at the start) is kept. torch's global generators, from which most of these
    environments draw, are saved and restored around each call, so that each environment has its own
    random numbers. ``step`` synchronises with the device only until the first info with a last
    observation.
    """

    def __init__(self, id: str, options: AdapterOptions, *, make: Callable[..., Any]) -> None:
        """Create the environment with ``make``."""
        super().__init__(id, options)
        self._accepts_seed_list = True  # until a reset with one seed per environment has failed
        kwargs = dict(options.kwargs or {})
        final = kwargs.pop("final_observation", "info")
        partial_reset = kwargs.pop("partial_reset", None)
        check_choice(f"env.id={id}: final_observation", final, ("info", "previous"))

        # States of torch's generators after the environment's last call.
        self._generator_states: list[Tensor] = []
        with self._own_generators(self._seeds[0]):
            self._env = make(**kwargs)
        self._check_env()
        self._env_device = torch.device(_attribute(self._env, "device") or self.device)
        is_partial = _is_maniskill(self._env) if partial_reset is None else partial_reset
        self._partial_reset, cfg = bool(is_partial), _attribute(self._env, "cfg")
        self._finite_horizon = bool(getattr(cfg, "is_finite_horizon", False))
        limit = (
            options.max_episode_steps
            or getattr(_attribute(self._env, "spec"), "max_episode_steps", None)
            or _attribute(self._env, "max_episode_steps")
        )
        self.max_episode_steps = None if limit is None else int(limit)

        space, self._obs_group = self._observed_space(options.obs_keys)
        self._set_spaces(space, _attribute(self._env, "single_action_space"), options)
        self._leaf_spaces = spaces.flatten(space)
        self._read_tensors = spaces.reader({x: partial(self._to_tensor, x) for x in self.leaves})
        self._use_previous_obs = final == "previous"
        # The last observation, kept for ``final_observation=previous``.
        self._previous_obs: Obs | None = None
        self._info_has_final_obs = False
        if self._use_previous_obs:
            warnings.warn(
                f"env.id={id}: final_observation=previous: the value at time limits is that of the"
                " observation before the last one, biased by one step",
                stacklevel=2,
            )

    def reset(self) -> Obs:
        """Start new episodes in all environments."""
        self._check_open()
        with self._own_generators(self._seeds[0] if self._seeds_are_new else None):
            obs = self._seeded_reset() if self._seeds_are_new else self._env.reset()[0]
            obs = self._read_reset(obs)
        self._seeds_are_new = False
        return obs

    def step(self, action: Tensor) -> Step:
        """Advance all environments by one step; ``action`` is float32 [N, A] or int64 [N]."""
        self._check_step(action)
        with self._own_generators():
            obs, reward, terminated, truncated, info = self._env.step(
                tree.map(lambda x: x.to(self._env_device), self.to_simulator(action))
            )
        terminated, truncated = (self._copy(x, torch.bool) for x in (terminated, truncated))
        if self._finite_horizon:
            terminated = terminated | truncated
        truncated = truncated & ~terminated
        ended = terminated | truncated
        obs = self._read(obs)
        final_obs = self._final_obs(obs, info, ended)
        numbers, last = (read_numbers(x, self.num_envs) for x in (info, info.get("final_info")))
        numbers = merge_final(numbers, last, ended)  # not those of the reset that followed
        numbers = {name: x.to(self.device) for name, x in numbers.items()}
        return Step(
            obs=obs,
            reward=self._copy(reward, torch.float32),
            terminated=terminated,
            truncated=truncated,
            mask=torch.ones_like(terminated),
            final_obs=final_obs,
            success=self._success(numbers),
            info=numbers or None,
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
    @contextlib.contextmanager
    def _own_generators(self, seed: int | None = None) -> Iterator[None]:
        """Give the environment its own state of torch's global generators, seeded if requested.

        Without this, an evaluation, which seeds the generators, would make training repeat its
        random numbers.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            if seed is None:
                torch.set_rng_state(self._generator_states[0])
                for device, state in zip(devices, self._generator_states[1:]):
                    torch.cuda.set_rng_state(state, device)
            else:
                torch.manual_seed(seed)
            try:
                yield
            finally:
                cuda_states = [torch.cuda.get_rng_state(device) for device in devices]
                self._generator_states = [torch.get_rng_state(), *cuda_states]

    def _check_env(self) -> None:
        """Raise EnvError unless the environment has everything that the adapter needs."""
        needed = "num_envs single_observation_space single_action_space reset step close"
        if missing := [name for name in needed.split() if _attribute(self._env, name) is None]:
            raise self.error(f"its {type(self._env).__name__} lacks {', '.join(missing)}")
        self._check_num_envs(self._env, _attribute(self._env, "num_envs"))
        metadata = getattr(self._env, "metadata", None) or {}
        mode = metadata.get("autoreset_mode", AutoresetMode.SAME_STEP)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP.value):
            self.close()
            raise self.error(
                f"reset in the step that ends an episode: its autoreset_mode is {mode}, and only"
                " AutoresetMode.SAME_STEP is supported"
            )

    def _observed_space(self, obs_keys: Sequence[str] | None) -> tuple[Any, str | None]:
        """Return the used part of the observation space, and its name if it is a single entry."""
        space = _attribute(self._env, "single_observation_space")
        if obs_keys is None and isinstance(space, Mapping | gymnasium.spaces.Dict):
            # Raises if one of the entries is privileged.
            spaces.select_observations(list(spaces.flatten(space)), None, id=self.id)
            if group := next((name for name in space if name in _ACTOR_GROUPS), None):
                return space[group], group
        return space, None  # ``spaces.observations`` selects the entries of ``obs_keys``

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
        named = tree.named(converted)
        for name, spec in tree.named(self.obs_spec).items():
            shape, expected = list(named[name].shape), [self.num_envs, *spec.shape]
            if shape != expected:
                raise self.error(f"observation {name!r} has shape {shape}, its space {expected}")
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
            kind = type(x).__name__
            raise self.error(f"use simulator=gymnasium: observation {name!r} is a {kind}")
        spec, space = tree.named(self.obs_spec)[name], self._leaf_spaces[name]
        if spec.dtype == torch.bool:  # a mask of choices
            x = x.flatten(1)
        if isinstance(space, gymnasium.spaces.Discrete):
            index = x.reshape(-1).long() - int(space.start)
            return one_hot(index, int(space.n)).to(self.device, spec.dtype)
        y = x.unsqueeze(-1) if x.dim() == 1 and spec.shape == (1,) else x
        y = y.to(self.device, spec.dtype)
        is_shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        return y.clone() if is_shared else y

    def _copy(self, x: Any, dtype: torch.dtype) -> Tensor:
        """Copy [N] to ``device``, because the environment may overwrite its tensor later."""
        x = torch.as_tensor(x)
        self._check_rows(x, x.numel())
        return x.reshape(-1).to(self.device, dtype, copy=True)

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
            raise self.error(
                "put the last observation of an episode into info['final_obs'] before the reset"
                " (Isaac Lab: cfg.compute_final_obs=True), or set"
                " env.kwargs.final_observation=previous to use the one before it, which biases"
                " values at time limits by one step"
            )
        return None


def _attribute(env: Any, name: str) -> Any:
    """Return an attribute of the environment or, as wrappers hide it, of the wrapped one."""
    value = getattr(env, name, None)
    return getattr(getattr(env, "unwrapped", None), name, None) if value is None else value


def _is_maniskill(env: Any) -> bool:
    return any(
        type(x).__module__.startswith("mani_skill.") for x in (env, getattr(env, "unwrapped", None))
    )
