"""Batched environments that take and give tensors (ManiSkill, Isaac Lab, your own on a GPU) as a ``VectorEnv``.

``env.id`` names a function that makes one, as "package.module:function". It is called with num_envs, seed (a whole
number), device ("cuda:0") and the entries of ``env.kwargs``; with max_episode_steps where ``env.max_episode_steps`` is
set, and with render_mode="rgb_array" where pictures are wanted. For ManiSkill:

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

What it answers has num_envs, single_observation_space and single_action_space, and

    reset(seed=, options=) -> observation, info
    step(action [N, A])    -> observation, reward [N], terminated [N], truncated [N], info

where an observation is a tensor [N, ..] or nested dictionaries of them, and the step that ends an episode also begins
the next one. Then info["final_obs"] (Gymnasium 1, Isaac Lab with compute_final_obs) or info["final_observation"]
(ManiSkill) holds the last observation of the episode, [N, ..], arbitrary where none ended.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch.nn.functional import one_hot

from embodied_envs.adapters import spaces
from embodied_envs.adapters.actions import mapper
from embodied_envs.adapters.user_code import blamed, imported
from embodied_ppo.core import tree
from embodied_ppo.core.types import Discrete, EnvError, Obs, Step

Factory = Callable[..., Any]
_ACTOR_GROUPS = ("policy", "actor")
"""What Isaac Lab and mjlab call the observations that the policy may see; "critic" and others are beside it."""


def factory(id: str) -> Factory | None:
    """The function that "package.module:function" names; None if it names none.

    Raises EnvError if the module cannot be imported.
    """
    module, colon, name = id.rpartition(":")
    if not colon or not name.isidentifier():
        return None
    found = getattr(imported(id, module), name, None)
    return found if callable(found) else None


class TorchVectorEnv:
    """One batched environment whose tensors stay where they are. See ``VectorEnv`` for the contract.

    kwargs taken here, the others go to the factory:
      observe            name or names of the observation's entries to use; None: as ``obs_keys`` says, which is all,
                         but where there is a group "policy" (Isaac Lab) or "actor" (mjlab), that one alone
      final_observation  "info" (default): an end without its last observation in the info is an EnvError
                         "previous": the observation before it stands in, as in rsl_rl. The value that bootstraps a
                         truncated episode is then V(s_t) instead of V(s_t+1), and a warning says so; nothing changes
                         where no episode is truncated
      partial_reset      whether reset(options={"env_idx": int64 indices}) begins new episodes of these environments
                         alone; None: if it is ManiSkill's

    Where a step says terminated and truncated at once, terminated counts; where the environment's ``cfg`` has
    is_finite_horizon (Isaac Lab, mjlab), the clock terminates. ``success`` is info[success_key] [N], in the last step
    of an episode info["final_info"][success_key]; "a/b" looks into info["a"]. None until the first info has it.

    ``restart`` does not make the environment anew: it resets with new seeds, all of them if the environment takes a
    list, else the first. What an environment keeps beyond an episode (a curriculum, domain randomisation at its
    start) goes on. torch's global generators, from which most of them draw, are this environment's own while it runs.
    ``step`` waits for the device only until it has seen the first last observation.
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
        make: Factory | None = None,
    ) -> None:
        """``make``: the factory, if ``id`` does not name it."""
        if num_threads is not None:
            raise EnvError(
                f"env.id={id}: num_threads={num_threads} is EnvPool's and our engine's; leave it out (its factory may "
                "take an option of its own through env.kwargs)"
            )
        self.id = id
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._seeds = list(seeds)
        self._seeds_are_new = True
        self._takes_seeds = True  # one each, until it has refused them
        self._started = self._closed = False
        self._render_size = render_size if render else None
        self._success_option = self._success_key = success_key
        options = dict(kwargs or {})
        observe = options.pop("observe", None)
        final = options.pop("final_observation", "info")
        partial = options.pop("partial_reset", None)
        if observe is not None and obs_keys is not None:
            raise EnvError(f"env.id={id}: env.obs_keys and env.kwargs.observe both select observations; leave one out")
        if final not in ("info", "previous"):
            raise EnvError(f"env.id={id}: final_observation={final!r} is unknown; choose one of info, previous")

        self._random: list[Tensor] = []  # torch's generators, as the environment left them
        with self._own_random(seeds[0]):
            self._env = self._make(make or factory(id), options, max_episode_steps)
        self._check_env()
        self._env_device = torch.device(_attribute(self._env, "device") or self.device)
        self._partial = _is_maniskill(self._env) if partial is None else bool(partial)
        self._finite_horizon = bool(getattr(_attribute(self._env, "cfg"), "is_finite_horizon", False))
        spec = _attribute(self._env, "spec")
        limit = (
            max_episode_steps or getattr(spec, "max_episode_steps", None) or _attribute(self._env, "max_episode_steps")
        )
        self.max_episode_steps: int | None = None if limit is None else int(limit)

        space, self._root = self._observed(observe, obs_keys)
        if observe is not None and isinstance(space, Mapping | gymnasium.spaces.Dict):
            obs_keys = list(space)  # selected by name already
        self.obs_spec, leaves = spaces.observations(space, id=id, device=self.device, keys=obs_keys)
        self._leaves = {name: _leaf_space(space, name) for name in leaves}
        action_space = _attribute(self._env, "single_action_space")
        self.action_spec, _ = spaces.actions(action_space, id=id, mapping=action_mapping, device=self.device)
        self._action_shape = spaces.action_shape(self.action_spec, num_envs)
        self._action = _actions(self.action_spec, action_space, action_mapping, self.device)
        self._stand_in = final == "previous"
        self._previous: Obs | None = None  # what the last step answered, where it stands in
        self._gives_final = False
        if self._stand_in:
            warnings.warn(
                f"env.id={id}: final_observation=previous: where the clock ends an episode without its last "
                "observation, the value of the one before it stands in, which is biased by one step",
                stacklevel=2,
            )

    def reset(self) -> Obs:
        """Start every environment anew, [N, ..]."""
        self._check_open()
        with self._own_random(self._seeds[0] if self._seeds_are_new else None):
            obs = self._seeded_reset() if self._seeds_are_new else self._env.reset()[0]
            obs = self._first(obs)
        if self._seeds_are_new:
            self._success_key = self._success_option
        self._seeds_are_new, self._started = False, True
        return obs

    def step(self, action: Tensor) -> Step:
        """Act in every environment: float32 [N, A] or int64 [N]."""
        self._check_open()
        if not self._started or self._seeds_are_new:
            raise EnvError(f"env.id={self.id}: step() before reset(); call reset() first")
        if action.shape != self._action_shape:
            raise spaces.wrong_actions(self.id, action, self._action_shape)
        action = _own(self._action(action), action, self._env_device)
        with self._own_random():
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
            success=self._success(info, ended, tells=final_obs is not None),
        )

    def reset_where(self, where: Tensor) -> Obs | None:
        """Begin a new episode where bool [N]; None unless ``partial_reset``."""
        if not self._partial:
            return None
        index = where.nonzero().flatten().to(self._env_device)
        with self._own_random():
            obs, _ = self._env.reset(options={"env_idx": index})
        return self._first(obs)

    def restart(self, seeds: list[int]) -> None:
        """Begin again with these seeds; ``reset`` must follow. The environment is not made anew, see the class."""
        self._check_open()
        spaces.check_seeds(self.id, seeds, self.num_envs)
        self._seeds = list(seeds)
        self._seeds_are_new = True

    def state(self) -> None:
        """None: there is no common way to save such an environment and its random numbers."""
        return None

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Always raises EnvError, see ``state``."""
        raise EnvError(f"env.id={self.id}: its state cannot be loaded; use restart(seeds) instead")

    def render(self) -> Tensor:
        """uint8 [H, W, 3] picture of environment 0, at ``render_size``."""
        self._check_open()
        if self._render_size is None:
            raise EnvError(f"env.id={self.id}: made without pictures; make it with render=True")
        frame = self._env.render()
        if frame is None or len(frame) == 0:
            raise EnvError(f"env.id={self.id}: its render() answers nothing with render_mode='rgb_array'")
        frame = frame[0] if isinstance(frame, list | tuple) else frame
        frame = np.asarray(frame.cpu() if isinstance(frame, Tensor) else frame)
        return spaces.picture(frame[0] if frame.ndim == 4 else frame, self._render_size)  # one each, or one

    def close(self) -> None:
        """Close it; may be called twice."""
        if not self._closed:
            self._closed = True
            self._env.close()

    # ---------------------------------------------------------------------------------------------------------- making
    def _make(self, make: Factory | None, options: dict[str, Any], max_episode_steps: int | None) -> Any:
        """Call the factory; raises EnvError for what it raises, and where there is none."""
        if make is None:
            raise EnvError(
                f'env.id={self.id}: names no function; simulator=torch wants "package.module:function", which is '
                "called with num_envs, seed, device and env.kwargs and returns the environment"
            )
        arguments: dict[str, Any] = {"num_envs": self.num_envs, "seed": self._seeds[0], "device": str(self.device)}
        if max_episode_steps is not None:
            arguments["max_episode_steps"] = max_episode_steps
        if self._render_size is not None:
            arguments["render_mode"] = "rgb_array"
        if taken := sorted(set(arguments) & set(options)):
            raise EnvError(f"env.id={self.id}: kwargs {', '.join(taken)} are set by the adapter; leave them out")
        with blamed(f"env.id={self.id}: its function fails with {arguments | options}: "):
            return make(**arguments, **options)

    @contextlib.contextmanager
    def _own_random(self, seed: int | None = None) -> Iterator[None]:
        """torch's global generators are the environment's own here, and as before afterwards; ``seed``: begin anew.

        Else an evaluation, which seeds them, would give the training the same random numbers again and again.
        """
        before = _generators(self.device)
        if seed is not None:
            torch.manual_seed(seed)
        else:
            _set_generators(self._random, self.device)
        try:
            yield
        finally:
            self._random = _generators(self.device)
            _set_generators(before, self.device)

    def _check_env(self) -> None:
        """Raise EnvError unless the factory's answer has what the adapter needs."""
        needed = ("num_envs", "single_observation_space", "single_action_space", "reset", "step", "close")
        if missing := [name for name in needed if _attribute(self._env, name) is None]:
            raise EnvError(f"env.id={self.id}: its {type(self._env).__name__} lacks {', '.join(missing)}")
        if (n := _attribute(self._env, "num_envs")) != self.num_envs:
            self.close()
            raise EnvError(f"env.id={self.id}: asked for {self.num_envs} environments, its vector has {n}")
        mode = (getattr(self._env, "metadata", None) or {}).get("autoreset_mode", AutoresetMode.SAME_STEP)
        if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP.value):
            self.close()
            raise EnvError(
                f"env.id={self.id}: its metadata says autoreset_mode={mode}; only AutoresetMode.SAME_STEP is "
                "supported: the step that ends an episode begins the next one"
            )

    def _observed(self, observe: str | list[str] | None, obs_keys: Sequence[str] | None) -> tuple[Any, str | None]:
        """The part of the observation space that is used, and the one entry that it is (None: a dictionary's part)."""
        space = _attribute(self._env, "single_observation_space")
        if obs_keys is not None:  # ``spaces.observations`` selects
            return space, None
        names = list(space) if isinstance(space, Mapping | gymnasium.spaces.Dict) else []
        wanted = [observe] if isinstance(observe, str) else observe
        if wanted is None:
            wanted = [name for name in names if name in _ACTOR_GROUPS][:1]
            observe = wanted[0] if wanted else None
        if not wanted:
            return space, None
        if unknown := [name for name in wanted if name not in names]:
            raise EnvError(
                f"env.id={self.id}: observe={unknown[0]!r} is not in its observation; "
                f"it has {', '.join(names) or 'no entries'}"
            )
        if isinstance(observe, str):
            return space[observe], observe
        return {name: space[name] for name in wanted}, None

    # --------------------------------------------------------------------------------------------------------- reading
    def _check_open(self) -> None:
        if self._closed:
            raise EnvError(f"env.id={self.id}: it was closed; make a new one")

    def _seeded_reset(self) -> Any:
        if self._takes_seeds:
            try:
                return self._env.reset(seed=list(self._seeds))[0]
            except (TypeError, ValueError, gymnasium.error.Error):
                self._takes_seeds = False
        return self._env.reset(seed=self._seeds[0])[0]

    def _first(self, obs: Any) -> Obs:
        """What a reset answers, as tensors of our own, checked against the spec and kept for the next step."""
        read = self._read(obs)
        named = read if isinstance(read, dict) else {"": read}
        specs = self.obs_spec if isinstance(self.obs_spec, dict) else {"": self.obs_spec}
        for name, spec in specs.items():
            if tuple(named[name].shape) != (self.num_envs, *spec.shape):
                raise EnvError(
                    f"env.id={self.id}: observation {name!r} has shape {list(named[name].shape)}, its "
                    f"single_observation_space says {list(spec.shape)} for each of {self.num_envs} environments"
                )
        self._keep(read)
        return read

    def _keep(self, obs: Obs) -> None:
        if self._stand_in:
            self._previous = tree.map(torch.clone, obs)

    def _read(self, obs: Any) -> Obs:
        """Observations [N, ..] in the spec's names, types and shapes, on ``device``, in memory of their own."""
        if self._root is not None:
            obs = obs[self._root]
        if not isinstance(self.obs_spec, dict):
            return self._tensor("", obs, obs)
        read: dict[str, Tensor] = {}
        for name in self._leaves:
            x = obs
            for part in name.split("/"):
                x = x[part]
            read[name] = self._tensor(name, x, obs)
        return read

    def _tensor(self, name: str, x: Any, obs: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise EnvError(
                f"env.id={self.id}: observation {name!r} is a {type(x).__name__}, no torch.Tensor; "
                "use simulator=gymnasium for environments of numpy arrays"
            )
        spec = self.obs_spec[name] if isinstance(self.obs_spec, dict) else self.obs_spec
        space = self._leaves[name]
        if isinstance(space, gymnasium.spaces.Discrete):
            return one_hot(x.reshape(-1).long() - int(space.start), int(space.n)).to(self.device, spec.dtype)
        y = x.unsqueeze(-1) if x.dim() == 1 and spec.shape == (1,) else x
        return _own(y.to(spec.dtype), x, self.device)

    def _copy(self, x: Any, dtype: torch.dtype) -> Tensor:
        """[N] on ``device``; the environment may write to its own later."""
        return torch.as_tensor(x).reshape(self.num_envs).to(self.device, dtype, copy=True)

    def _final_obs(self, obs: Obs, info: Mapping[str, Any], ended: Tensor) -> Obs | None:
        """The true successors where bool [N] ``ended``; raises EnvError where one is missing."""
        previous = self._previous
        self._keep(obs)
        for key in ("final_obs", "final_observation"):
            if info.get(key) is not None:
                self._gives_final = True
                return self._read(info[key])
        if self._gives_final:
            return None
        if self._stand_in:
            return previous
        if bool(ended.any()):  # Waits for the device.
            raise EnvError(
                f"env.id={self.id}: an episode ended, and its last observation is not in info['final_obs'] (nor "
                "'final_observation'), so that the value of what follows is unknown where the clock ended it. Give it "
                "there, before the reset (Isaac Lab: cfg.compute_final_obs=True); or set env.kwargs.final_observation="
                "previous to take the observation before it instead, biased by one step where episodes are truncated"
            )
        return None

    def _success(self, info: Mapping[str, Any], ended: Tensor, *, tells: bool) -> Tensor | None:
        """bool [N] of this step (not of the reset that followed it), or None.

        ``tells``: an episode may have ended, so that the key must be there.
        """
        final = info.get("final_info")
        if self._success_key is None:
            known = [
                key
                for key in ("success", "is_success")
                if _find(info, key) is not None or _find(final, key) is not None
            ]
            self._success_key = known[0] if known else None
            if not known:
                return None
        assert self._success_key is not None
        now, last = _find(info, self._success_key), _find(final, self._success_key)
        if now is None and last is None:
            if tells and self._success_option is not None:
                names = ", ".join(sorted(k for k in {*info, *(final or {})} if not k.startswith(("_", "final_"))))
                raise EnvError(
                    f"env.id={self.id}: success_key={self._success_option!r} is not in the info of a step that ends an "
                    f"episode; it has {names or 'nothing'}"
                )
            return torch.zeros_like(ended)
        if now is None or last is None:
            return self._copy(last if now is None else now, torch.bool)
        return torch.where(ended, self._copy(last, torch.bool), self._copy(now, torch.bool))


def _attribute(env: Any, name: str) -> Any:
    """Of the environment or of what it wraps (Gymnasium's wrappers do not hand attributes on); None without it."""
    found = getattr(env, name, None)
    return getattr(getattr(env, "unwrapped", None), name, None) if found is None else found


def _generators(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators: the CPU's, and that of a CUDA device; this waits for nothing."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_generators(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


def _is_maniskill(env: Any) -> bool:
    return any(type(x).__module__.startswith("mani_skill.") for x in (env, getattr(env, "unwrapped", None)))


def _leaf_space(space: Any, name: str) -> Any:
    """The space of "a/b"; "" is the space itself."""
    for part in filter(None, name.split("/")):
        space = space[part]
    return space


def _find(info: Any, key: str) -> Any:
    """``info["a"]["b"]`` for "a/b"; None if it is not there."""
    for part in key.split("/"):
        if not isinstance(info, Mapping) or part not in info:
            return None
        info = info[part]
    return info


def _own(y: Tensor, x: Tensor, device: torch.device) -> Tensor:
    """``y`` on ``device``, in other memory than ``x``."""
    y = y.to(device)
    return y.clone() if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() else y


def _actions(spec: Any, space: Any, mapping: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """From the policy's batch to the simulator's: int64 [N], or float32 [N, *shape]."""
    if isinstance(spec, Discrete):
        return lambda action: action + int(space.start)
    apply, shape = mapper(mapping, spec, device), tuple(space.shape)
    return lambda action: apply(action).reshape(-1, *shape)
