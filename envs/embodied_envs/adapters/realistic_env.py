"""Properties of a real robot: delays, errors of its sensors, lost observations, slow actuators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters.actions import policy_bounds
from embodied_envs.adapters.spaces import PRIVILEGED
from embodied_envs.adapters.wrapper import EnvWrapper
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError, check_keys, choose, show
from embodied_envs.base.observation_names import names_observation
from embodied_envs.base.random import normal, sampling_key, uniform
from embodied_envs.types import ArraySpec, Box, Composite, Obs, Step, VectorEnv, has_action_mask

# Name of an observation that is one array.
STATE = "state"
OWN_TASKS_ONLY = "only the tasks of this package (simulator=mujoco or warp) have it"
# Largest number of an option.
LARGEST = 1e9
DISTURBANCES = ("obs_delay", "obs_noise", "obs_bias", "obs_dropout")


@dataclass(frozen=True)
class Disturbance:
    """One number, or one range of numbers, of the observations ``names``.

    Attributes:
        names: Observations; the draws of a step or of an episode are shared by all of them.
        low: Lower bound of a delay in steps; otherwise equal to ``high``.
        high: Upper bound of a delay; otherwise the standard deviation, half-width or probability.
        stream: Stream of random numbers, see ``base.random``.
    """

    names: tuple[str, ...]
    low: float
    high: float
    stream: int


@dataclass(frozen=True)
class Realism:
    """Options of section env.realism, checked against the spaces of one simulator.

    Attributes:
        action_delay: (low, high) in units of 1 / ``parts`` control steps.
        joint_delay: The same of what each element of the action has besides.
        parts: 1; the physics steps of a control step where one of both has fractions.
        obs_delay: Delays of observations in control steps.
        obs_noise: Standard deviations, drawn per step and element.
        obs_bias: Half-widths of uniform distributions, drawn per episode and element.
        obs_dropout: Probabilities that an observation repeats the one before.
        action_rate_limit: Largest change of an action in one control step; None: no limit.
        push_velocity: (low, high), size of the pushes that the simulator itself executes, m/s;
            None: no pushes.
    """

    action_delay: tuple[int, int] = (0, 0)
    joint_delay: tuple[int, int] = (0, 0)
    obs_delay: tuple[Disturbance, ...] = ()
    obs_noise: tuple[Disturbance, ...] = ()
    obs_bias: tuple[Disturbance, ...] = ()
    obs_dropout: tuple[Disturbance, ...] = ()
    action_rate_limit: float | None = None
    parts: int = 1
    push_velocity: tuple[float, float] | None = field(default=None, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the observations that differ from those of the simulator."""
        kinds = (getattr(self, kind) for kind in DISTURBANCES)
        return tuple(dict.fromkeys(name for kind in kinds for d in kind for name in d.names))

    @property
    def is_off(self) -> bool:
        """Whether ``RealisticEnv`` would change nothing; the simulator executes pushes itself."""
        return self == Realism()


def read(options: Mapping[str, Any], env: VectorEnv) -> Realism:
    """Check the options of section env.realism against a simulator.

    Args:
        options: Values by name, see ``options.schema.RealismConfig``; missing ones are off.
        env: The simulator without them.

    Raises:
        EnvError: A name is unknown, a value is out of bounds, or the spaces do not allow it.
    """
    return _Reader(env, options).realism()


class _Reader:
    """Reads the options for one simulator; ``realism`` returns the result."""

    def __init__(self, env: VectorEnv, options: Mapping[str, Any]) -> None:
        self.env, self.options = env, dict(options)
        self.specs = tree.named(env.obs_spec, STATE)
        known = ["obs_keys", *(f.name for f in fields(Realism) if f.name != "parts")]
        check_keys("env.realism", self.options, known)
        keys = self.options.get("obs_keys")
        # A mask of choices is never disturbed.
        public = [n for n, x in self.specs.items() if not PRIVILEGED.search(n)]
        self.disturbed = tuple(n for n in public if self.specs[n].dtype != torch.bool)
        if keys is not None:
            self.disturbed = self._select("obs_keys", keys, tuple(self.specs))

    def realism(self) -> Realism:
        """Return the checked options."""
        (action_delay, joint_delay), parts = self._action_delays()
        push_velocity = self._range("push_velocity", self.options.get("push_velocity") or 0)
        if push_velocity[1] and self.env.physics_steps is None:
            raise self._refused("push_velocity", f"{OWN_TASKS_ONLY}, such as Go1Joystick")
        limit = self.options.get("action_rate_limit")
        if limit is not None:
            if not isinstance(self.env.action_spec, Box):
                raise self._refused("action_rate_limit", "its actions are discrete; remove it")
            limit = self._range("action_rate_limit", limit, positive=True)[1]
        return Realism(
            action_delay=action_delay,
            joint_delay=joint_delay,
            parts=parts,
            action_rate_limit=limit,
            push_velocity=push_velocity if push_velocity[1] else None,
            **{name: self._disturbances(name) for name in DISTURBANCES},
        )

    def _action_delays(self) -> tuple[list[tuple[int, int]], int]:
        """Return the bounds of both delays of actions, and their unit: parts of a control step."""
        ranges: dict[str, tuple[float, float]] = {}
        for path in ("action_delay", "joint_delay"):
            ranges[path] = self._range(path, self.options.get(path, 0))
            high = ranges[path][1]
            if high and has_action_mask(self.env.obs_spec):
                reason = "a delayed choice could be one that its mask excludes; remove it"
                raise self._refused(path, reason)
            if high and path == "joint_delay" and not isinstance(self.env.action_spec, Box):
                raise self._refused(path, "its actions are discrete; remove it")
            self._check_time_limit(path, high)
        partial = [path for path, bounds in ranges.items() if not all(x == int(x) for x in bounds)]
        parts = self.env.physics_steps if partial else 1
        for path in partial:
            if parts is None or parts == 1:
                raise self._refused(
                    path,
                    "write a whole number of control steps; only tasks of this package with"
                    " several physics steps per control step have fractions",
                )
            if round(ranges[path][1] * parts) == 0:
                reason = f"it is less than half a physics step; write at least {1 / parts:g}"
                raise self._refused(path, reason)
        assert parts is not None
        return [(round(low * parts), round(high * parts)) for low, high in ranges.values()], parts

    def _disturbances(self, option: str) -> tuple[Disturbance, ...]:
        """Return the disturbances of an option: one for all names, or one per key of a section."""
        value, adds = self.options.get(option, 0), option in ("obs_noise", "obs_bias")
        floats = tuple(n for n in self.disturbed if self.specs[n].dtype.is_floating_point)
        # Images and integers have no noise.
        sections = [("", floats if adds else self.disturbed, value)]
        if isinstance(value, Mapping):
            sections = [(k, self._select(option, [k], self.disturbed), x) for k, x in value.items()]
        result: list[Disturbance] = []
        taken: set[str] = set()
        for key, names, part in sections:
            path = f"{option}.{key}" if key else option
            most = 1.0 if option == "obs_dropout" else LARGEST
            low, high = self._range(path, part, whole=option == "obs_delay", at_most=most)
            if option == "obs_delay":
                self._check_time_limit(path, high)
            elif low != high:
                raise self._refused(path, "it must be one number, no range", part)
            if high == 0:
                continue
            if adds and (not names or set(names) - set(floats)):
                raise self._refused(path, "name arrays of floats only, no image or integers", part)
            if again := sorted(taken & set(names)):
                raise self._refused(path, f"{again[0]} is named twice; name it once", part)
            taken |= set(names)
            result.append(Disturbance(names, low, high, sampling_key("realism", option, key)))
        return tuple(result)

    def _select(self, option: str, keys: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
        """Return those of ``names`` that ``keys`` name ("a" names a, a/b and a/c)."""
        for key in keys:
            if not any(names_observation(key, name) for name in names):
                raise EnvError(
                    f"env.id={self.env.id}: env.realism.{option}: {key!r} is not among the"
                    f" observations that can be disturbed; {choose(key, list(names), 'they are ')}"
                )
        return tuple(n for n in names if any(names_observation(key, n) for key in keys))

    def _range(
        self,
        path: str,
        value: Any,
        *,
        whole: bool = False,
        positive: bool = False,
        at_most: float = LARGEST,
    ) -> tuple[float, float]:
        """Return (low, high) of a number or a range, each >= 0 (> 0 if ``positive``)."""
        bounds = list(value) if isinstance(value, list | tuple) else [value, value]
        valid = len(bounds) == 2 and all(
            isinstance(x, int if whole else int | float)
            and not isinstance(x, bool)
            and (0 < x <= at_most or (x == 0 and not positive))
            for x in bounds
        )
        if not valid or bounds[0] > bounds[1]:
            kind = "a whole number of control steps" if whole else "a number"
            upper = "" if at_most == LARGEST else f" and <= {at_most:g}"
            sign = ">" if positive else ">="
            raise self._refused(path, f"it must be {kind} {sign} 0{upper}, or [low, high]", value)
        return float(bounds[0]), float(bounds[1])

    def _check_time_limit(self, path: str, delay: float) -> None:
        limit = self.env.max_episode_steps
        if limit is not None and delay >= limit:
            raise self._refused(path, f"it must be below the time limit of {limit} steps", delay)

    def _refused(self, path: str, reason: str, value: Any = None) -> EnvError:
        value = self.options.get(path) if value is None else value
        return EnvError(f"env.id={self.env.id}: env.realism.{path} = {show(value)}: {reason}")


class RealisticEnv(EnvWrapper):
    """A ``VectorEnv`` with the delays, sensors and actuators of a real robot.

    Step t of an episode of environment i, with raw observation o_t and the policy's action a_t:

    sensor       y_t = o_t + bias + noise_t
    delay        z_t = y_(t - d), y_0 for t < d
    dropout      the policy reads z_t, or with a probability what it read at step t - 1 (t > 0)
    delay        c_t = a_(t - k), the neutral action for t < k; a fraction of a step besides is
                 executed by the simulator, which goes on with the control of u_(t-1) for so long.
                 With joint_delay each element of the action has its own k
    rate limit   u_t = c_t clamped to u_(t-1) ± limit, u_(-1) neutral; the simulator executes u_t

    The neutral action is 0, moved into the bounds of the policy's actions; of discrete actions it
    is action 0. ``final_obs`` is what the policy would have read. d, k and bias
    are drawn at the start of an episode. Each draw is a function of the environment's seed, the
    number of its episode and the step, so that it depends neither on the other environments nor on
    a resume.
    Rewards, ends and success are those of the simulator.
    """

    def __init__(
        self, env: VectorEnv, realism: Realism, *, seeds: Sequence[int], action_mapping: str
    ) -> None:
        """Wrap a simulator that was created with ``seeds``, one per environment.

        Args:
            env: The simulator, before its first ``reset``.
            realism: Checked options, see ``read``.
            seeds: Seeds of its environments.
            action_mapping: See ``actions.mapper``; it defines the unit of actions.
        """
        super().__init__(env)
        self.realism = realism
        self._seeds = torch.tensor(list(seeds), dtype=torch.int64, device=self.device)
        self._rows = torch.arange(self.num_envs, device=self.device)
        self._all = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self._episode = torch.full_like(self._seeds, -1)
        self._elapsed = torch.zeros_like(self._seeds)
        self._specs = tree.named(env.obs_spec, STATE)
        self._set_actions(action_mapping)
        self._set_observations()
        self._draw()

    def _set_actions(self, mapping: str) -> None:
        """Create the buffer of actions, the neutral action and the bounds of the rate limit."""
        bounds, parts = (self.realism.action_delay, self.realism.joint_delay), self.realism.parts
        low_parts, high_parts = (sum(x) for x in zip(*bounds, strict=True))
        spec, steps = self.action_spec, high_parts // parts
        # int64 [N, 1] or [N, A], which the simulator reads: physics steps of the delay besides
        # whole steps. None without fractions.
        self.late_substeps: Tensor | None = None
        if parts > 1:
            simulator: Any = self.env
            late = {x % parts for x in range(low_parts, high_parts + 1)}
            width = spec.size if isinstance(spec, Box) and self.realism.joint_delay[1] else 1
            self.late_substeps = simulator.use_late_control(sorted(late), width)
        box = spec.box if isinstance(spec, Composite) else spec
        if isinstance(box, Box):
            low, high = (x.to(self.device) for x in policy_bounds(box, mapping))
            neutral = torch.zeros_like(low).clamp(low, high)
            if mapping == "none":
                high = torch.full_like(low, torch.inf)
                low = -high
            self._low, self._high = low, high
            if isinstance(spec, Composite):
                neutral = torch.cat([neutral.new_zeros(len(spec.choices)), neutral])
        else:
            neutral = torch.zeros((), dtype=torch.int64, device=self.device)
        # [N, A] or [N], what the simulator executes until the first action arrives.
        self.neutral_action = neutral.expand(self.num_envs, *neutral.shape)
        self._actions = self.neutral_action.expand(steps, *self.neutral_action.shape).clone()
        self._command = self.neutral_action.clone()

    def _set_observations(self) -> None:
        """Create the buffers of observations: [D, N, ..] of earlier ones and the last one."""
        self._names = self.realism.names
        self._delay_of = {name: d for d in self.realism.obs_delay for name in d.names}

        def buffer(spec: ArraySpec, *sizes: int) -> Tensor:
            return torch.zeros(*sizes, *spec.shape, dtype=spec.dtype, device=self.device)

        self._past = {
            name: buffer(self._specs[name], int(d.high), self.num_envs)
            for name, d in self._delay_of.items()
        }
        self._read = {name: buffer(self._specs[name], self.num_envs) for name in self._names}

    # ------------------------------------------------------------------------------------- protocol
    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        obs = self.env.reset()
        return self._replaced(obs, self._begin(self._all, obs))

    def step(self, action: Tensor) -> Step:
        """See ``VectorEnv``."""
        step = self.env.step(self._delayed_action(action))
        ended = step.terminated | step.truncated
        # Rows whose ``obs`` is the first one of an episode.
        first = ~step.mask if step.final_obs is None else ended | ~step.mask
        successor = step.obs
        if step.final_obs is not None:
            successor = tree.where(ended, step.final_obs, step.obs)
        self._elapsed += 1
        values = self._observe(successor)
        final_obs = None if step.final_obs is None else self._replaced(step.final_obs, values)
        # On a GPU the check would synchronise.
        if first.device.type != "cpu" or bool(first.any()):
            values = self._begin(first, step.obs)
        return replace(step, obs=self._replaced(step.obs, values), final_obs=final_obs)

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        obs = self.env.reset_where(where)
        return None if obs is None else self._replaced(obs, self._begin(where, obs))

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        self.env.restart(seeds)
        self._seeds.copy_(torch.tensor(seeds))
        self._episode.fill_(-1)

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``."""
        state = self.env.state()
        if state is None:
            return None
        return {"env": state, "realism": tree.map(Tensor.clone, self._buffers())}

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``.

        Raises ValueError where the state was saved with other options of section env.realism.
        """
        own, buffers = state.get("realism"), self._buffers()
        if tree.map(Tensor.size, own) != tree.map(Tensor.size, buffers):
            raise ValueError("the simulator's state was saved with other options of env.realism")
        obs = self.env.load_state(state["env"])
        tree.map(Tensor.copy_, buffers, own)
        self._draw()
        return self._replaced(obs, tree.map(Tensor.clone, self._read))

    def joint_state(self) -> dict[str, Tensor]:
        """See ``VectorEnv``; "action_delay" [N, 1] or [N, A] is that of actions, control steps."""
        late = 0 if self.late_substeps is None else self.late_substeps / self.realism.parts
        return self.env.joint_state() | {"action_delay": self.action_delays + late}

    @property
    def reads_every_image(self) -> bool:
        """Whether an image is delayed or repeated, so that every step must render it."""
        return any(len(self._specs[name].shape) == 3 for name in self._names)

    # -------------------------------------------------------------------------------------- actions
    def _delayed_action(self, action: Tensor) -> Tensor:
        """Return the actions that the simulator executes now, and store ``action``."""
        command = action
        if len(self._actions):
            latest = torch.cat([action.unsqueeze(0), self._actions])  # [D + 1, N, ..]
            self._actions = latest[:-1]
            if self.realism.joint_delay[1]:
                command = latest.gather(0, self.action_delays.unsqueeze(0))[0]
            else:
                command = latest[self.action_delays[:, 0], self._rows]
        limit = self.realism.action_rate_limit
        if limit is None:
            return command
        target = torch.clamp(command, self._low, self._high)
        self._command = torch.clamp(target, self._command - limit, self._command + limit)
        return self._command.clone()

    # --------------------------------------------------------------------------------- observations
    def _replaced(self, obs: Obs, values: Mapping[str, Tensor]) -> Obs:
        """Return ``obs`` with the disturbed observations replaced."""
        return {**obs, **values} if isinstance(obs, dict) else values.get(STATE, obs)

    def _draw(self) -> None:
        """Draw delays and biases of the current episodes, functions of seed and episode."""

        def delays(low: float, high: float, stream: int, size: int = 1) -> Tensor:
            u = uniform(self._seeds, stream, self._episode, size)
            return int(low) + (u * int(high - low + 1)).long()

        stream = sampling_key("realism", "action_delay", "")
        delay = delays(*self.realism.action_delay, stream)
        if self.realism.joint_delay[1]:
            stream, size = sampling_key("realism", "joint_delay", ""), self.neutral_action.shape[1]
            delay = delay + delays(*self.realism.joint_delay, stream, size)
        if self.late_substeps is not None:
            self.late_substeps.copy_(delay % self.realism.parts)
            delay = delay // self.realism.parts
        # int64 [N, 1] or [N, A], delay of the actions of the current episodes, whole steps.
        self.action_delays = delay
        # Observation -> int64 [N], its delay in the current episodes, control steps.
        self.obs_delays: dict[str, Tensor] = {}
        for d in self.realism.obs_delay:
            self.obs_delays |= dict.fromkeys(d.names, delays(d.low, d.high, d.stream)[:, 0])
        self._bias = {
            name: d.high * (2 * self._uniform(d.stream, name, self._episode) - 1)
            for d in self.realism.obs_bias
            for name in d.names
        }

    def _uniform(self, stream: int, name: str, count: Tensor) -> Tensor:
        """Return uniform numbers, one for each element of an observation, float32 [N, ..]."""
        spec = self._specs[name]
        stream = sampling_key(stream, name)
        size = torch.Size(spec.shape).numel()
        return uniform(self._seeds, stream, count, size, torch.float32).view(-1, *spec.shape)

    def _measure(self, obs: Obs) -> dict[str, Tensor]:
        """Return what the sensors measure in the current step: the state with bias and noise."""
        named = tree.named(obs, STATE)
        values = {name: named[name] for name in self._names}
        count = (self._episode << 32) + self._elapsed
        for name, bias in self._bias.items():
            values[name] = values[name] + bias
        for d in self.realism.obs_noise:
            for name in d.names:
                values[name] = values[name] + d.high * normal(self._uniform(d.stream, name, count))
        return values

    def _observe(self, obs: Obs) -> dict[str, Tensor]:
        """Return what the policies read in a step after the first one of their episodes."""
        values = self._measure(obs)
        for name, past in self._past.items():
            latest = torch.cat([values[name].unsqueeze(0), past])  # [D + 1, N, ..]
            self._past[name] = latest[:-1]
            values[name] = latest[self.obs_delays[name], self._rows]
        count = (self._episode << 32) + self._elapsed
        for d in self.realism.obs_dropout:
            lost = uniform(self._seeds, d.stream, count, 1)[:, 0] < d.high
            for name in d.names:
                values[name] = tree.where(lost, self._read[name], values[name])
        self._read = tree.map(Tensor.clone, values)
        return values

    def _begin(self, where: Tensor, obs: Obs) -> dict[str, Tensor]:
        """Start an episode where bool [N], with the first observations ``obs`` in these rows.

        Returns what the policies read in all rows.
        """
        self._episode += where
        self._elapsed.masked_fill_(where, 0)
        self._draw()
        self._actions = tree.where(where, self.neutral_action, self._actions)
        self._command = tree.where(where, self.neutral_action, self._command)
        values = self._measure(obs)
        self._past = {n: tree.where(where, values[n], x) for n, x in self._past.items()}
        self._read = tree.where(where, values, self._read)
        return tree.map(Tensor.clone, self._read)

    def _buffers(self) -> dict[str, Tensor]:
        """Return the tensors that the next step depends on, by name."""
        buffers = {
            "seeds": self._seeds,
            "episode": self._episode,
            "elapsed": self._elapsed,
            "actions": self._actions,
            "command": self._command,
        }
        buffers |= {f"past/{name}": x for name, x in self._past.items()}
        return buffers | {f"read/{name}": x for name, x in self._read.items()}
