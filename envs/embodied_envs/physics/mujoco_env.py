"""Our own simulation path: a ``Task`` on N MuJoCo worlds stepped together, on either engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters import actions, spaces
from embodied_envs.physics.engine import Physics
from embodied_envs.physics.task_validation import START, Rehearsal
from embodied_envs.tasks.task import Task
from embodied_ppo.core import random, tree
from embodied_ppo.core.types import ActionSpec, ArraySpec, Box, EnvError, Obs, ObsSpec, Step

HUGE = 1e10
"""A position, velocity or control at or above it is a simulation that has blown up (MuJoCo's own limit)."""

_RESET, _STEP = 0, 1
"""Streams of random numbers."""


class MujocoEnv:
    """``num_envs`` worlds of one task. See ``VectorEnv`` for the contract.

    A world that ends is reset in the same step: ``obs`` begins the next episode and ``final_obs`` ends the old one. A
    world whose simulation blows up (not finite, or beyond HUGE) is cut there: reward 0, truncated, the observation
    before it as the final one, and it counts in ``unstable``; the others do not notice.

    The k-th episode of an environment is a function of its seed and k, whatever the engine and the number of threads.
    """

    def __init__(
        self,
        task: Task,
        physics: Physics,
        *,
        id: str,
        seeds: list[int],
        device: torch.device | str,
        max_episode_steps: int | None = None,
        action_mapping: str = "rescale",
        obs_keys: Sequence[str] | None = None,
    ) -> None:
        """``task`` is bound to ``physics`` already, and physics has the fields that it names."""
        self.id, self.task, self.physics = id, task, physics
        self.num_envs, self.device = len(seeds), torch.device(device)
        self._clock = max_episode_steps or task.max_episode_steps
        self.max_episode_steps: int | None = self._clock
        self.task_names, self.instructions = task.names, task.instructions
        self.step_s = task.decimation * float(physics.model.opt.timestep)
        low, high = task.action_bounds(physics.model)
        box = Box(tuple(low), tuple(high))
        self.action_spec: ActionSpec = box
        self._map = actions.mapper(action_mapping, box, physics.device)
        self._action_shape = spaces.action_shape(box, self.num_envs)
        self.sees = True
        """Whether cameras take pictures; without, the images of running episodes are stale."""
        zeros = torch.zeros(self.num_envs, dtype=torch.int64, device=physics.device)
        self.unstable = zeros.sum()
        """Worlds that were reset because their simulation blew up, so far."""
        self._seeds = torch.tensor(seeds, device=physics.device)
        self._episode, self._elapsed = zeros - 1, zeros.clone()
        self._begun = self._closed = False
        self._everywhere = torch.ones_like(zeros, dtype=torch.bool)
        self._rehearsal = Rehearsal(id, task, physics, self.num_envs)
        start = self._rehearsal.start(self._start)
        self.s: dict[str, Tensor] = dict(physics.fields) | {k: x.clone() for k, x in start.items() if k not in START}
        """What the task's functions see; live."""
        self._variables = [k for k in start if k not in START]
        self._before = self._rehearsal.before(self.s)
        self._begin(self._everywhere)
        self._rehearsal.step(self._before, self.s, self._map(torch.zeros(self._action_shape, device=physics.device)))
        self._selected: list[str] | None = None
        obs = self._observe(self._everywhere)
        chosen = spaces.selected(list(obs) if isinstance(obs, dict) else (), obs_keys, id=id)
        if isinstance(obs, dict) and len(chosen) < len(obs):
            self._selected = chosen
            obs = {name: obs[name] for name in chosen}
        self._last = tree.map(Tensor.clone, obs)
        self._programs = {sees: physics.captured(self._step) for sees in (True, False)}  # a graph holds one way to go
        spec: Any = tree.map(lambda x: ArraySpec(tuple(x.shape[1:]), x.dtype), self._last)
        self.obs_spec: ObsSpec = spec

    # ------------------------------------------------------------------------------------------------------- protocol
    def reset(self) -> Obs:
        """Start every environment anew, [N, ..]."""
        self._check_open()
        if self._begun:  # else: as constructed or restarted
            self._begin(self._everywhere)
            self._keep(self._observe(self._everywhere))
        self._begun = True
        return self._present()

    def step(self, action: Tensor) -> Step:
        """Act in every environment: float32 [N, A]."""
        self._check_open()
        if not self._begun:
            raise EnvError(f"env.id={self.id}: step() before reset(); call reset() first")
        if action.shape != self._action_shape:
            raise spaces.wrong_actions(self.id, action, self._action_shape)
        return self._out(self._programs[self.sees](action.to(self.physics.device)))

    def reset_where(self, where: Tensor) -> Obs:
        """Begin a new episode where bool [N]."""
        self._check_open()
        where = where.to(self.physics.device)
        self._begin(where)
        self._keep(self._renewed(self._last, where))
        return self._present()

    def restart(self, seeds: list[int]) -> None:
        """Begin again as if newly made with these seeds; ``reset`` must follow."""
        self._check_open()
        spaces.check_seeds(self.id, seeds, self.num_envs)
        self._seeds.copy_(torch.tensor(seeds))
        self._episode.fill_(-1)
        self._begin(self._everywhere)
        self._keep(self._observe(self._everywhere))
        self._begun = False

    def state(self) -> dict[str, Any]:
        """Everything the next step depends on."""
        own = {k: self.s[k].clone() for k in self._variables}
        counts = {"seeds": self._seeds.clone(), "episode": self._episode.clone(), "elapsed": self._elapsed.clone()}
        before = {k: x.clone() for k, x in self._before.items()}
        rest = {"unstable": self.unstable.clone(), "obs": tree.map(Tensor.clone, self._last)}
        return {"physics": self.physics.state(), "variables": own, "before": before, **counts, **rest}

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Continue from ``state()``; returns the observation to act on next."""
        self._check_open()
        self._seeds.copy_(state["seeds"])
        self._episode.copy_(state["episode"])
        self._elapsed.copy_(state["elapsed"])
        self.unstable.copy_(state["unstable"])
        for k in self._variables:
            self.s[k].copy_(state["variables"][k])
        self.physics.load_state(state["physics"])
        for k, x in self._before.items():
            x.copy_(state["before"][k])
        self._keep(state["obs"])
        self._begun = True
        return self._present()

    def render(self) -> Tensor:
        """uint8 [H, W, 3] picture of environment 0, at ``render_size``."""
        self._check_open()
        return self.physics.picture()

    def close(self) -> None:
        """May be called twice."""
        if not self._closed:
            self._closed = True
            self.physics.close()

    # -------------------------------------------------------------------------------------------------------- a step
    def _step(self, action: Tensor) -> Step:
        task, s, physics = self.task, self.s, self.physics
        action = self._map(action).to(physics.dtype)
        physics.step(task.control(s, action), task.decimation)
        self._elapsed += 1
        reward, terminated, success = task.reward(self._before, s, action), task.terminated(s), task.success(s)
        if task.step_noise:
            steps = self._elapsed + (self._episode << 32)
            u = random.uniform(self._seeds, _STEP, steps, task.step_noise, physics.dtype)
        else:
            u = reward.new_empty(self.num_envs, 0)
        for name, value in task.advance(s, action, u).items():
            s[name].copy_(value)
        truncated = (self._elapsed >= self._clock) & ~terminated
        kind = s["kind"].clone() if "kind" in s else None
        fine = [(s[k].abs() < HUGE).all(1) for k in ("qpos", "qvel", "ctrl")]  # NaN compares as False
        bad = ~(fine[0] & fine[1] & fine[2])
        blown_up = not physics.waits or bool(bad.any())
        if blown_up:
            reward = reward.masked_fill(bad, 0.0)
            terminated, truncated = terminated & ~bad, truncated | bad
            success = None if success is None else success & ~bad
            self.unstable += bad.sum()
        ended = terminated | truncated
        obs = self._observe(self._everywhere) if self.sees else self._renewed(self._last, ended)
        if blown_up:
            obs = _merged(bad, self._last, obs)
        final = None
        if not physics.waits or bool(ended.any()):
            final = obs
            self._begin(ended)
            obs = self._renewed(obs, ended)
        else:
            self._remember()
        self._keep(obs)
        return Step(
            obs=obs,
            reward=reward.to(torch.float32),
            terminated=terminated,
            truncated=truncated,
            mask=torch.ones_like(terminated),
            final_obs=final,
            success=success,
            task=kind,
        )

    def _out(self, answer: Any) -> Any:
        """Where the caller wants it."""
        return answer if self.physics.device == self.device else tree.map(lambda x: x.to(self.device), answer)

    def _keep(self, obs: Obs) -> None:
        tree.map(Tensor.copy_, self._last, obs)

    def _present(self) -> Obs:
        """The last observation, in memory of its own."""
        return self._out(tree.map(Tensor.clone, self._last))

    def _start(self) -> dict[str, Tensor]:
        """What the task begins its present episodes with."""
        size = self.task.reset_noise
        return self.task.reset(random.uniform(self._seeds, _RESET, self._episode, size, self.physics.dtype))

    def _begin(self, where: Tensor) -> None:
        """The next episode where bool [N]: simulator, variables and clock."""
        self._episode += where
        self._elapsed.masked_fill_(where, 0)
        start = self._start()
        size = self.task.reset_noise
        u = random.uniform(self._seeds, _RESET, self._episode, size + self.physics.draws, self.physics.dtype)[:, size:]
        self.physics.reset(where, {k: x for k, x in start.items() if k in START}, u)
        for name in self._variables:
            self.s[name].copy_(_merged(where, start[name], self.s[name]))
        self._remember()

    def _remember(self) -> None:
        for k, x in self._before.items():
            x.copy_(self.s[k])

    def _observe(self, where: Tensor) -> Obs:
        """Of every world as it stands, with images where bool [N]."""
        obs = self.task.observe(self.s)
        obs = tree.map(lambda x: x.to(torch.float32, copy=True) if x.is_floating_point() else x, obs)
        images = self.physics.images(where)
        if images:
            obs = (obs if isinstance(obs, dict) else {"state": obs}) | images
        if self._selected is not None and isinstance(obs, dict):
            obs = {name: obs[name] for name in self._selected}
        return obs

    def _renewed(self, obs: Obs, where: Tensor) -> Obs:
        """``obs`` with the first observation of a new episode where bool [N]."""
        new = self._observe(where)
        if isinstance(new, Tensor) or isinstance(obs, Tensor):
            return new
        return {k: _merged(where, x, obs[k]) if x.dtype == torch.uint8 else x for k, x in new.items()}

    def _check_open(self) -> None:
        if self._closed:
            raise EnvError(f"env.id={self.id}: it was closed; make a new one")


def _merged(where: Tensor, yes: Any, no: Any) -> Any:
    """``yes`` where bool [N], else ``no``."""
    return tree.map(lambda a, b: torch.where(where.view(-1, *[1] * (a.ndim - 1)), a, b), yes, no)
