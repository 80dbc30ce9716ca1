"""Vectorised environment of our own tasks: a ``Task`` on N MuJoCo worlds, on either engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters import actions, spaces
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_envs.physics import mechanism
from embodied_envs.physics.domain_randomization import Randomization
from embodied_envs.physics.engine import INITIAL_FIELDS, Physics
from embodied_envs.physics.joint_offsets import JointOffsets
from embodied_envs.physics.pushes import Pushes
from embodied_envs.physics.task_validation import STATE, TaskValidator
from embodied_envs.tasks.task import Task
from embodied_envs.types import ArraySpec, Box, Obs, Step, VectorEnv

# A world is unstable if a position, velocity or control reaches this value (MuJoCo's limit).
HUGE = 1e10

# Bounds of the time before the first push of an episode and between two, at least one step.
PUSH_INTERVAL_S = (5.0, 10.0)

# Streams of random numbers, see ``base.random``; that of pushes is 2.
_RESET, _STEP = 0, 1


class MujocoEnv(VectorEnv):
    """``num_envs`` worlds of one task. Implements ``VectorEnv``.

    A world that ends is reset in the same step: ``obs`` is the first of the next episode and
    ``final_obs`` the last of the old one. The episode of an unstable world (values not finite, or
    beyond HUGE) is truncated with reward 0 and the observation before it as the final one, and it
    counts in ``unstable``; the other worlds are not affected.

    The k-th episode of an environment is a function of its seed and k, independent of the engine
    and of the number of threads; with ``Task.carry_over`` also of the environment's episodes
    before.
    """

    can_truncate = True

    def __init__(self, id: str, task: Task, physics: Physics, options: AdapterOptions) -> None:
        """Validate the task and start the first episodes.

        Args:
            id: ``env.id``, for messages.
            task: The task, already bound to the model of ``physics``.
            physics: Engine with N worlds that exposes the task's fields.
            options: The options that describe no model; ``embodied_envs.make`` documents them.
        """
        obs_keys, seeds = options.obs_keys, list(options.seeds)
        self.id, self.task, self.physics = id, task, physics
        self._names_groups = obs_keys is not None
        self.num_envs, self.device = len(seeds), torch.device(options.device)
        self._time_limit = options.max_episode_steps or task.max_episode_steps
        self.max_episode_steps = self._time_limit
        self.task_names, self.instructions = task.names, task.instructions
        self.physics_steps = task.decimation
        self.step_s = task.decimation * float(physics.model.opt.timestep)
        low, high = task.action_bounds(physics.model)
        box = Box(tuple(low), tuple(high))
        self.action_spec = box
        self.to_simulator = actions.mapper(options.action_mapping, box, physics.device, id=id)
        self.action_shape = spaces.action_shape(box, self.num_envs)
        self._held: dict[str, Tensor] = {}
        self._pushes: Pushes | None = None
        self._joint_offsets: JointOffsets | None = None
        self._late_substeps: Tensor | None = None
        # First physics step and number of physics steps between changes of ctrl.
        self._segments: list[tuple[int, int]] = [(0, task.decimation)]
        # Whether a step resets the worlds that end in it. If not, their state stays the last one of
        # the episode until the caller resets them; set it before the first step.
        self.autoreset = True
        zeros = torch.zeros(self.num_envs, dtype=torch.int64, device=physics.device)
        self._unstable = zeros.sum()
        self._seeds = torch.tensor(seeds, device=physics.device)
        self._episode, self._elapsed = zeros - 1, zeros.clone()
        # Whether reset() was called since construction or restart(); whether close() was called.
        self._is_reset = self._closed = False
        self._all_worlds = torch.ones_like(zeros, dtype=torch.bool)
        # Worlds whose episode the next step truncates, bool [N].
        self._truncation_mask = torch.zeros_like(self._all_worlds)
        validator = TaskValidator(id, task, physics, self.num_envs)
        start = validator.start(lambda: task.reset(self._start_numbers()[0]))
        # The state that the task's functions read; the engine updates its tensors in place.
        self.s: dict[str, Tensor] = dict(physics.fields) | {
            k: x.clone() for k, x in start.items() if k not in INITIAL_FIELDS
        }
        self._variables = [k for k in start if k not in INITIAL_FIELDS]
        self._before = validator.before(self.s)
        # Whether an episode depends on the one before.
        self.carries_over = validator.carry_over(self.s, start, self._start_numbers()[0])
        self._begin(self._all_worlds)
        zero = torch.zeros(self.action_shape, device=physics.device)
        validator.step(self._before, self.s, start, self.to_simulator(zero))
        groups = validator.groups(self.s, obs_keys or ())
        self._groups = {k: f for k, f in groups.items() if k in (obs_keys or ())}
        self._selected: list[str] | None = None
        obs = self._observe(self._all_worlds)
        offered = dict.fromkeys(obs if isinstance(obs, dict) else ())
        offered |= dict.fromkeys(groups if self._names_groups else ())
        names = spaces.select_observations(list(offered), obs_keys, id=id)
        if isinstance(obs, dict) and len(names) < len(obs):
            self._selected = names
            obs = {name: obs[name] for name in names}
        self._last_obs = tree.map(Tensor.clone, obs)
        # Errors of the task have been reported above; here the functions are known to work.
        self._initial_state = physics.fuse(self._initial_state)
        self._evaluate = physics.fuse(self._evaluate)
        self._observe_state = physics.fuse(self._observe_state)
        # A CUDA graph has no branches: one program with cameras and one without.
        self._programs = {enabled: physics.capture(self._step) for enabled in (True, False)}
        self._reset_program: Callable[[Tensor], Obs] | None = physics.capture(self._reset_where)
        spec: Any = tree.map(lambda x: ArraySpec(tuple(x.shape[1:]), x.dtype), self._last_obs)
        self.obs_spec = spec

    def use_pushes(self, velocity: tuple[float, float]) -> None:
        """Push the robot's base at random times; call it before ``reset``.

        Args:
            velocity: Bounds of the size of a push, m/s.

        Raises:
            EnvError: There is no base to push, or an episode is shorter than every interval.
        """
        step_s = self.task.decimation * float(self.physics.model.opt.timestep)
        low, high = (max(1, round(x / step_s)) for x in PUSH_INTERVAL_S)
        if low >= self._time_limit:
            raise EnvError(
                f"remove env.realism.push_velocity or raise env.max_episode_steps: env.id={self.id}"
                f" ends after {self._time_limit * step_s:g} s, before {PUSH_INTERVAL_S[0]:g} s"
            )
        self._pushes = Pushes(self.physics, id=self.id, velocity=velocity, interval=(low, high))
        self._pushes.begin(self._all_worlds, self._seeds, self._episode)

    def use_joint_offsets(self, randomization: Randomization) -> None:
        """Shift what the robot measures of its joints, see ``JointOffsets``; call it before
        ``reset``.

        Args:
            randomization: The random model of ``physics``, with the range joint_offset.

        Raises:
            EnvError: The model has no hinge joint with an actuator.
        """
        self._joint_offsets = JointOffsets(self.physics, randomization)
        self._episode.fill_(-1)
        self._begin(self._all_worlds)  # the initial ctrl depends on the offsets
        self._store_obs(self._observe(self._all_worlds))

    def use_late_control(self, substeps: Sequence[int], width: int = 1) -> Tensor:
        """Let the control of an action begin within the control step; call it before ``reset``.

        Args:
            substeps: The numbers that the returned tensor can have, below ``task.decimation``.
            width: 1; nu: each actuator has its own number.

        Returns:
            int64 [N, width], which the caller sets before a step: physics steps of the control step
            in which the ctrl of the step before stays.

        Raises:
            EnvError: The action does not have an element for each actuator.
        """
        nu = self.s["ctrl"].shape[1]
        if width not in (1, nu):
            raise EnvError(
                f"write env.realism.joint_delay in whole control steps: the action of {self.id} has"
                f" {width} elements for {nu} actuators"
            )
        self._late_substeps = self._elapsed.new_zeros(len(self._elapsed), width)
        bounds = [*sorted({0, *substeps}), self.task.decimation]
        self._segments = [(a, b - a) for a, b in itertools.pairwise(bounds)]
        return self._late_substeps

    # ------------------------------------------------------------------------------------- protocol
    def reset(self) -> Obs:
        """Start new episodes in all environments."""
        self._check_open()
        self._truncation_mask.zero_()
        if self._is_reset:  # otherwise the constructor or ``restart`` has started them
            self._begin(self._all_worlds)
            self._store_obs(self._observe(self._all_worlds))
        self._is_reset = True
        return self._current_obs()

    def step(self, action: Tensor) -> Step:
        """Advance all environments by one step; ``action`` is float32 [N, A]."""
        self._check_open()
        if not self._is_reset:
            raise EnvError(f"env.id={self.id}: step() before reset(); call reset() first")
        spaces.check_action(self.id, action, self.action_shape)
        program = self._programs[self.cameras_enabled]
        return self._to_device(program(action.to(self.physics.device)))

    def truncate_next(self, where: Tensor) -> None:
        """See ``VectorEnv``."""
        self._check_open()
        self._truncation_mask.copy_(where)

    def reset_where(self, where: Tensor) -> Obs:
        """Start new episodes where bool [N] is True."""
        self._check_open()
        assert self._reset_program is not None
        if self.physics.host_readable and not bool(where.any()):
            return self._current_obs()
        return self._to_device(self._reset_program(where.to(self.physics.device)))

    def restart(self, seeds: list[int]) -> None:
        """Return to the state after construction with these seeds; ``reset`` must follow."""
        self._check_open()
        spaces.check_seeds(self.id, seeds, self.num_envs)
        self._seeds.copy_(torch.tensor(seeds))
        self._episode.fill_(-1)
        self._begin(self._all_worlds)
        self._store_obs(self._observe(self._all_worlds))
        self._is_reset = False

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        state = tree.map(Tensor.clone, {"obs": self._last_obs, **self._buffers()})
        return {"physics": self.physics.state(), **state}

    def _buffers(self) -> dict[str, Any]:
        """Return the tensors besides those of the engine that the next step depends on."""
        buffers: dict[str, Any] = {
            "variables": {k: self.s[k] for k in self._variables},
            "before": self._before,
            "seeds": self._seeds,
            "episode": self._episode,
            "elapsed": self._elapsed,
            "unstable": self._unstable,
        }
        if self._pushes is not None:
            buffers["next_push"] = self._pushes.next
        if self._joint_offsets is not None:
            buffers["joint_offset"] = self._joint_offsets.offset
        return buffers

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """Continue from ``state()`` and return the observation to act on next.

        Raises ValueError where the state was saved with other options of env.realism or env.ranges.
        """
        self._check_open()
        self._truncation_mask.zero_()
        buffers = self._buffers()
        for name, section in (("next_push", "realism"), ("joint_offset", "ranges")):
            if (name in state) != (name in buffers):
                raise ValueError(f"the simulator's state has other options of env.{section}")
        self.physics.load_state(state["physics"])
        tree.map(Tensor.copy_, buffers, state)
        if self._joint_offsets is not None:
            self._joint_offsets.load(state["joint_offset"])
        self._store_obs(state["obs"])
        self._is_reset = True
        return self._current_obs()

    def render(self) -> Tensor:
        """Return an image of environment 0, uint8 [H, W, 3] of ``render_size``."""
        self._check_open()
        return self.physics.render()

    def close(self) -> None:
        """Free the simulation. A second call has no effect."""
        if not self._closed:
            self._closed = True
            self._programs.clear()  # a CUDA graph holds this object and its memory
            self._reset_program = None
            del self._initial_state, self._evaluate, self._observe_state  # they refer to it, too
            self.physics.close()

    def mechanism(self) -> dict[str, Any]:
        """Return what ``mechanism.describe`` returns for the task."""
        box = self.action_spec
        assert isinstance(box, Box)
        return mechanism.describe(self.task, self.physics.model, self.s, (box.low, box.high))

    def hold_variables(self, values: Mapping[str, Tensor]) -> None:
        """Keep variables of the task, such as the command, at ``values`` [N, ..] from now on.

        On a GPU, call it before the first step, which is captured as a program.
        """
        self._held = {name: x.to(self.s[name]) for name, x in values.items()}
        self._hold()
        self._store_obs(self._observe(self._all_worlds))

    def _hold(self) -> None:
        """Set the held variables."""
        for name, value in self._held.items():
            self.s[name].copy_(value)

    def joint_state(self) -> dict[str, Tensor]:
        """See ``VectorEnv``."""
        return {name: self.s[name].float() for name in ("qpos", "qvel")}

    @property
    def unstable(self) -> Tensor:
        """See ``VectorEnv``."""
        return self._unstable

    @property
    def terrain_level(self) -> Tensor | None:
        """See ``VectorEnv``: the variable of this name, [N]; None without one."""
        return self.s.get("terrain_level")

    # --------------------------------------------------------------------------------------- a step
    def _step(self, action: Tensor) -> Step:
        """Advance by one control step.

        No value is read on the host where ``physics.host_readable`` is False.
        """
        task, physics = self.task, self.physics
        action = self.to_simulator(action).to(physics.dtype)
        ctrl = self.control(action)
        if self._pushes is not None:
            self._pushes.apply(self._seeds, self._episode, self._elapsed)
        self._advance_physics(ctrl)
        self._elapsed += 1
        # One stream per environment: the counter holds episode and step.
        steps = self._elapsed + (self._episode << 32)
        u = physics.uniform(self._seeds, _STEP, steps, task.step_noise)
        result, unstable = self._evaluate(action, u)
        ended = result["terminated"] | result["truncated"]
        if self.cameras_enabled:
            obs = self._observe(self._all_worlds)
        else:
            obs = self._with_first_obs(self._last_obs, ended)
        if unstable is not None:
            obs = tree.where(unstable, self._last_obs, obs)
        final_obs = None
        if self.autoreset and (not physics.host_readable or bool(ended.any())):
            final_obs = obs
            self._begin(ended)
            obs = self._with_first_obs(obs, ended)
        else:
            self._store_before()
        self._store_obs(obs)
        return Step(obs=obs, mask=torch.ones_like(ended), final_obs=final_obs, **result)

    def _evaluate(self, action: Tensor, u: Tensor) -> tuple[dict[str, Any], Tensor | None]:
        """Return reward and flags of the simulated step, and advance the task's variables.

        A task may return its variables, which ``advance`` and the next episode change in place:
        the results are copies.

        Args:
            action: [N, A], within its bounds.
            u: [N, step_noise], random numbers in [0, 1).

        Returns:
            Those fields of ``Step``, and the unstable worlds, bool [N]; None if there are none.
        """
        task, s = self.task, self.s
        terms = task.reward_terms(self._before, s, action)
        reward = task.total(terms) if terms else None
        reward = task.reward(self._before, s, action) if reward is None else reward
        reward = reward.to(torch.float32, copy=True)
        numbers = torch.stack([*terms.values()]).float().unbind() if terms else ()
        info = dict(zip(terms, numbers, strict=True)) or None
        terminated, success = task.terminated(s).clone(), tree.map(Tensor.clone, task.success(s))
        for name, value in tree.map(Tensor.clone, task.advance(s, action, u)).items():
            s[name].copy_(value)
        self._hold()
        truncated = (self._elapsed >= self._time_limit) | self._truncation_mask
        truncated = truncated & ~terminated
        self._truncation_mask.zero_()
        kind = s["kind"].clone() if "kind" in s else None
        # NaN compares as False.
        unstable = ~(torch.cat([s["qpos"], s["qvel"], s["ctrl"]], 1).abs() < HUGE).all(1)
        if self.physics.host_readable and not bool(unstable.any()):
            unstable = None
        else:
            reward = reward.masked_fill(unstable, 0.0)
            terminated, truncated = terminated & ~unstable, truncated | unstable
            success = None if success is None else success & ~unstable
            self._unstable.add_(unstable.sum())
        flags = {"terminated": terminated, "truncated": truncated, "success": success}
        return {"reward": reward, **flags, "task": kind, "info": info}, unstable

    def _reset_where(self, mask: Tensor) -> Obs:
        """Start new episodes where ``mask`` bool [N] is True; return the current observation.

        No value is read on the host.
        """
        self._begin(mask)
        self._store_obs(self._with_first_obs(self._last_obs, mask))
        return tree.map(Tensor.clone, self._last_obs)

    def control(self, action: Tensor) -> Tensor:
        """Return the ctrl [N, nu] to simulate for an action [N, A] within its bounds."""
        offsets = self._joint_offsets
        return self.task.control(self.s if offsets is None else offsets.measured(self.s), action)

    def _advance_physics(self, ctrl: Tensor) -> None:
        """Simulate one control step with ctrl [N, nu], which begins late where that is set."""
        late = self._late_substeps
        if late is None:
            self.physics.step(ctrl, self.task.decimation)
            return
        before = self.s["ctrl"].clone()
        for first, substeps in self._segments:
            current = torch.where(late > first, before, ctrl)
            self.physics.step(current, substeps)

    def _to_device(self, result: Any) -> Any:
        """Move a result to the caller's device."""
        if self.physics.device == self.device:
            return result
        return tree.map(lambda x: x.to(self.device), result)

    def _store_obs(self, obs: Obs) -> None:
        """Store the last observation in place, because CUDA graphs hold its address."""
        tree.map(Tensor.copy_, self._last_obs, obs)

    def _current_obs(self) -> Obs:
        """Return a copy of the last observation on the caller's device."""
        return self._to_device(tree.map(Tensor.clone, self._last_obs))

    def _start_numbers(self) -> tuple[Tensor, Tensor]:
        """Return the random numbers of the current episodes' starts, [N, ..].

        The first are the task's, the second the randomised model's.
        """
        task_size, size = self.task.reset_noise, self.physics.random_size + self.task.reset_noise
        u = self.physics.uniform(self._seeds, _RESET, self._episode, size)
        return u[:, :task_size].contiguous(), u[:, task_size:]

    def _begin(self, mask: Tensor) -> None:
        """Start the next episode where bool [N]: set simulator, variables and elapsed steps."""
        self._episode += mask
        self._elapsed.masked_fill_(mask, 0)
        task_numbers, model_numbers = self._start_numbers()
        start = self._initial_state(task_numbers)
        initial = {k: x for k, x in start.items() if k in INITIAL_FIELDS}
        if self._joint_offsets is not None:
            self._joint_offsets.begin(mask, model_numbers)
            initial["ctrl"] = self._joint_offsets.command(initial.get("ctrl"))
        self.physics.reset(mask, initial, model_numbers)
        for name in self._variables:
            old = self.s[name]
            torch.where(mask.view(-1, *[1] * (old.ndim - 1)), start[name], old, out=old)
        self._hold()
        if self._pushes is not None:
            self._pushes.begin(mask, self._seeds, self._episode)
        self._store_before()

    def _initial_state(self, u: Tensor) -> dict[str, Tensor]:
        """Return initial fields and variables of new episodes from random numbers [N, ..]."""
        start = self.task.reset(u)
        if not self.carries_over:
            return start
        carried, is_later = self.task.carry_over(self.s, start, u), self._episode > 0
        return start | {k: tree.where(is_later, x, start[k]) for k, x in carried.items()}

    def _store_before(self) -> None:
        """Store the state that the next ``reward`` reads as ``before``."""
        for k, x in self._before.items():
            x.copy_(self.s[k])

    def _observe(self, mask: Tensor) -> Obs:
        """Return the observation of the current state, with images where bool [N]."""
        obs, images = self._observe_state(), self.physics.images(mask)
        if images:
            obs = (obs if isinstance(obs, dict) else {STATE: obs}) | images
        if self._selected is not None and isinstance(obs, dict):
            obs = {name: obs[name] for name in self._selected}
        return obs

    def _observe_state(self) -> Obs:
        """Return the observation of the current state without images, in new tensors."""
        offsets = self._joint_offsets
        obs = self.task.observe(self.s if offsets is None else offsets.measured(self.s))
        if self._names_groups and isinstance(obs, Tensor):
            obs = {STATE: obs}
        if self._groups and isinstance(obs, dict):
            obs = obs | {name: f(self.s) for name, f in self._groups.items()}
        return tree.map(
            lambda x: x.to(torch.float32 if x.is_floating_point() else x.dtype, copy=True), obs
        )

    def _with_first_obs(self, obs: Obs, mask: Tensor) -> Obs:
        """Return the current observation, with images of ``obs`` except where bool [N]."""
        new = self._observe(mask)
        if isinstance(new, Tensor) or isinstance(obs, Tensor):
            return new
        return {
            k: tree.where(mask, x, obs[k]) if x.dtype == torch.uint8 else x for k, x in new.items()
        }

    def _check_open(self) -> None:
        if self._closed:
            raise EnvError(f"env.id={self.id}: it was closed; make a new one")
