"""mjlab's tasks (MuJoCo Warp, thousands of worlds on a GPU; slow on a CPU) as a ``VectorEnv``.

Needs the extra ``mjlab``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.adapters.base import AdapterOptions, check_kwargs, factory_arguments
from embodied_envs.adapters.interfaces import to_gymnasium
from embodied_envs.adapters.simulator_processes import discard_output, installation_hint
from embodied_envs.adapters.torch_env import TorchVectorEnv
from embodied_envs.adapters.user_code import copy_arrays, import_user_module, wrap_errors
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError


def has_task(id: str) -> bool:
    """Return whether the id has mjlab's prefix; a look-up would import mjlab, which is slow."""
    return id.startswith("Mjlab-")


class MjlabEnv(TorchVectorEnv):
    """``num_envs`` worlds of a task of mjlab's registry.

    An id "package.module:Name" imports the module first. Entries of ``kwargs`` besides those of
    ``TorchVectorEnv``:

    play    use the task's configuration for playing: usually no time limit and no noise
    config  fields of the task's configuration to set: {"sim.njmax": 300, ..}

    Episodes end with their true last observation, because this adapter does the resets (mjlab's
    auto_reset is off). Success is the termination term "success" if there is one, else the success
    of a command (for example lifting). Random numbers come from the process's global generators,
    which ``restart`` seeds with the first of the seeds.
    """

    def __init__(self, id: str, options: AdapterOptions) -> None:
        arguments, kwargs = factory_arguments(options), dict(options.kwargs or {})
        check_kwargs(id, kwargs, arguments)

        def make(**kwargs: Any) -> _MjlabTask:
            with wrap_errors(f"env.id={id}: mjlab fails with {arguments | kwargs}: "):
                return _MjlabTask(id, **arguments, **kwargs)

        super().__init__(id, replace(options, kwargs={"partial_reset": True} | kwargs), make=make)


def _registry(id: str) -> Any:
    """Return mjlab's registry; raise EnvError if an import fails."""
    hint = installation_hint("mjlab", "3.11")
    with wrap_errors(f"env.id={id}: mjlab cannot be imported (", f"). {hint}"):
        importlib.import_module("mjlab.tasks")
        # Warnings only: Warp prints a line for every kernel that it loads.
        importlib.import_module("warp").config.log_level = 30
        registry = importlib.import_module("mjlab.tasks.registry")
    if module := id.rpartition(":")[0]:
        import_user_module(id, module)
    return registry


class _MjlabTask:
    """A task of mjlab as ``TorchVectorEnv`` expects it.

    It has Gymnasium's spaces, and adds final_obs, env_idx and success.
    """

    def __init__(
        self,
        id: str,
        *,
        num_envs: int,
        seed: int,
        device: str,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        play: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        registry = _registry(id)
        name = id.rpartition(":")[2]
        if name not in registry.list_tasks():
            raise EnvError(
                f"env.id={id} is unknown to mjlab; it has {', '.join(registry.list_tasks())}"
            )
        cfg = registry.load_env_cfg(name, play=play)
        cfg.scene.num_envs, cfg.seed, cfg.auto_reset = num_envs, seed, False
        for path, value in (config or {}).items():
            _set(id, cfg, path, value)
        if max_episode_steps is not None:
            # mjlab rounds the number of steps up; half a step less avoids rounding errors.
            steps = max_episode_steps - 0.5
            cfg.episode_length_s = steps * cfg.sim.mujoco.timestep * cfg.decimation
        with discard_output(stderr=False):  # mjlab prints a table of every manager
            env = importlib.import_module("mjlab.envs").ManagerBasedRlEnv(
                cfg, device=device, render_mode=render_mode
            )
        self.env, self.cfg = env, cfg
        self.num_envs: int = env.num_envs
        self.device = torch.device(env.device)
        has_limit = any(term.time_out for term in cfg.terminations.values() if term is not None)
        limit = env.max_episode_length
        self.max_episode_steps = limit if has_limit and limit < 10**8 else None
        self.single_observation_space = to_gymnasium(env.single_observation_space)
        self.single_action_space = to_gymnasium(env.single_action_space)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in all environments, or in those of options["env_idx"] only."""
        if isinstance(seed, list):
            raise TypeError("mjlab takes one seed")
        with discard_output(stderr=False):
            obs, _ = self.env.reset(seed=seed, env_ids=(options or {}).get("env_idx"))
        return obs, {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Advance by one control step; reset ended episodes and return their info["final_obs"]."""
        obs, reward, terminated, truncated, extras = self.env.step(action)
        info: dict[str, Any] = self._success() | {"log": dict(extras.get("log") or {})}
        ended = terminated | truncated
        index = ended.nonzero().flatten()  # synchronises with the device, as mjlab itself does
        if len(index) == 0:
            return obs, reward, terminated, truncated, info
        info = copy_arrays(info)
        flags = terminated.clone(), truncated.clone()  # the reset clears mjlab's flags
        reward, last = reward.clone(), tree.map(torch.clone, obs)
        first, extras = self.env.reset(env_ids=index)
        info["log"] |= extras.get("log") or {}  # sums of the rewards of the ended episodes
        return tree.where(ended, first, last), reward, *flags, info | {"final_obs": last}

    def _success(self) -> dict[str, Tensor]:
        """Return bool [N] of each termination term, and "success" if a command defines it."""
        terms = self.env.termination_manager
        info = {name: terms.get_term(name) for name in terms.active_terms}
        commands = self.env.command_manager
        for name in commands.active_terms if "success" not in info else ():
            compute_success = getattr(commands.get_term(name), "compute_success", None)
            if compute_success is not None:
                info["success"] = compute_success()
        return info

    def render(self) -> np.ndarray | None:
        """Return an image of environment 0."""
        return self.env.render()

    def close(self) -> None:
        """Free the simulation."""
        self.env.close()


def _set(id: str, cfg: Any, path: str, value: Any) -> None:
    """Set ``cfg.a.b`` or ``cfg.a["b"]`` for path "a.b"; raise EnvError for an unknown name."""
    *parents, last = path.split(".")
    for name in parents:
        cfg = cfg.get(name) if isinstance(cfg, dict) else getattr(cfg, name, None)
    fields = cfg if isinstance(cfg, dict) else vars(cfg)
    if last not in fields:
        raise EnvError(f"env.id={id}: kwargs config: there is no {path!r}")
    fields[last] = value
