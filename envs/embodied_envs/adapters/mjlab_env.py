"""mjlab's tasks (MuJoCo Warp, thousands of worlds on a GPU; slow on a CPU) as a ``VectorEnv``. Extra: ``mjlab``."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from embodied_envs.adapters.torch_env import TorchVectorEnv
from embodied_envs.adapters.user_code import blamed, imported
from embodied_ppo.core import tree
from embodied_ppo.core.types import EnvError


def knows(id: str) -> bool:
    """Whether the id is one of mjlab's, by its name alone: importing mjlab takes seconds."""
    return id.startswith("Mjlab-")


def ids() -> list[str]:
    """Every task of mjlab; none where it is not installed."""
    try:
        return _registry("").list_tasks()
    except EnvError:
        return []


class MjlabEnv(TorchVectorEnv):
    """``num_envs`` worlds of a task registered with mjlab, which "package.module:Name" imports first.

    kwargs taken here, besides ``observe`` (None: the group "actor"), see ``TorchVectorEnv``:
      play    the task's configuration for playing: usually no clock and no noise
      config  {"sim.njmax": 300, ..}: fields of the task's configuration to set

    Episodes end with their true last observation: mjlab leaves resets to this adapter (its auto_reset is off).
    success_key names one of the task's termination terms; None: the term "success" if there is one, or that a command
    (lifting, say) is fulfilled. Random numbers are the process's global ones, seeded by ``restart`` with the first of
    the seeds.
    """

    def __init__(
        self, id: str, *, num_envs: int, seeds: list[int], kwargs: Mapping[str, Any] | None = None, **rest: Any
    ):
        options = {"partial_reset": True, **(kwargs or {})}
        super().__init__(id, num_envs=num_envs, seeds=seeds, kwargs=options, make=functools.partial(_Tasks, id), **rest)


def _registry(id: str) -> Any:
    """mjlab's registry, filled; raises EnvError where mjlab is not installed or the module before the colon fails."""
    cure = (
        "It needs mujoco 3.11 and an environment of its own: pip install -c scripts/constraints-mjlab.txt -e "
        "'.[mjlab]', then pip uninstall torchvision, whose wheel does not match torch (make test-mjlab does both in "
        ".venv-mjlab)"
    )
    with blamed(f"env.id={id}: mjlab cannot be imported (", f"). {cure}"):
        importlib.import_module("mjlab.tasks")
        importlib.import_module("warp").config.log_level = 30  # Warnings; else a line for every kernel that is loaded.
        registry = importlib.import_module("mjlab.tasks.registry")
    module = id.rpartition(":")[0]
    if module:
        imported(id, module)
    return registry


class _Tasks:
    """A task of mjlab in the shape that ``TorchVectorEnv`` takes: Gymnasium's spaces, final_obs, env_idx, success."""

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
            raise EnvError(f"env.id={id} is unknown to mjlab; it has {', '.join(registry.list_tasks())}")
        cfg = registry.load_env_cfg(name, play=play)
        cfg.scene.num_envs, cfg.seed, cfg.auto_reset = num_envs, seed, False
        for path, value in (config or {}).items():
            _set(id, cfg, path, value)
        if max_episode_steps is not None:
            # The number of steps is rounded up: half a step less is safe from rounding errors.
            cfg.episode_length_s = (max_episode_steps - 0.5) * cfg.sim.mujoco.timestep * cfg.decimation
        with _without_prints():
            env = importlib.import_module("mjlab.envs").ManagerBasedRlEnv(cfg, device=device, render_mode=render_mode)
        self.env, self.cfg = env, cfg
        self.num_envs: int = env.num_envs
        self.device = torch.device(env.device)
        clock = any(term.time_out for term in cfg.terminations.values() if term is not None)
        self.max_episode_steps = env.max_episode_length if clock and env.max_episode_length < 10**8 else None
        self.single_observation_space = _space(env.single_observation_space)
        self.single_action_space = _space(env.single_action_space)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin everywhere, or for options["env_idx"] alone."""
        if isinstance(seed, list):
            raise TypeError("mjlab takes one seed")
        with _without_prints():
            obs, _ = self.env.reset(seed=seed, env_ids=(options or {}).get("env_idx"))
        return obs, {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One control step; where it ends an episode, a reset and info["final_obs"]."""
        obs, reward, terminated, truncated, _ = self.env.step(action)
        info = self._success()
        ended = terminated | truncated
        index = ended.nonzero().flatten()  # Waits for the device, as mjlab itself does.
        if len(index) == 0:
            return obs, reward, terminated, truncated, info
        info = {name: x.clone() for name, x in info.items()}
        flags = terminated.clone(), truncated.clone()
        last = tree.map(torch.clone, obs)
        fresh, _ = self.env.reset(env_ids=index)

        def choose(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(ended.view(-1, *[1] * (old.dim() - 1)), new, old)

        return tree.map(choose, fresh, last), reward, *flags, info | {"final_obs": last}

    def _success(self) -> dict[str, Tensor]:
        """bool [N] by name: the termination terms, and "success" if the task says it in a term or a command."""
        terms = self.env.termination_manager
        info = {name: terms.get_term(name) for name in terms.active_terms}
        commands = self.env.command_manager
        for name in commands.active_terms if "success" not in info else ():
            told = getattr(commands.get_term(name), "compute_success", None)
            if told is not None:
                info["success"] = told()
        return info

    def render(self) -> np.ndarray | None:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def _set(id: str, cfg: Any, path: str, value: Any) -> None:
    """``cfg.a.b = value`` for "a.b", or ``cfg.a["b"]``; raises EnvError for a name that is not there."""
    *parents, last = path.split(".")
    node = cfg
    for name in [*parents, last]:
        there = name in node if isinstance(node, dict) else hasattr(node, name)
        if not there:
            raise EnvError(f"env.id={id}: kwargs config {path!r}: there is no {name!r}")
        if name is last:
            break
        node = node[name] if isinstance(node, dict) else getattr(node, name)
    if isinstance(node, dict):
        node[last] = value
    else:
        setattr(node, last, value)


def _space(space: Any) -> spaces.Space:
    """mjlab's own Box and Dict as Gymnasium's."""
    if hasattr(space, "spaces"):
        return spaces.Dict({name: _space(x) for name, x in space.spaces.items()})
    low, high = (np.broadcast_to(np.asarray(x, np.float32), space.shape) for x in (space.low, space.high))
    return spaces.Box(low, high, dtype=np.dtype(space.dtype).type)


@contextlib.contextmanager
def _without_prints() -> Iterator[None]:
    """mjlab prints a table of every manager."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
