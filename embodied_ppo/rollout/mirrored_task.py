"""The mirror image of a robot's task: derived, proven and measured before training.

M maps a state to its mirror image in the plane y = 0 of the robot's base. ``StateMirror`` derives M
of the physical state from the model. ``MirrorSearch`` derives M of the task's variables and
observations from pairs of states and their images, in which each number is plus or minus one number
of the other state. It then measures how much a control step from M x differs from the image of the
step from x.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied_envs import tasks
from embodied_envs.base.errors import EnvError
from embodied_envs.base.observation_names import SINGLE
from embodied_envs.physics.cameras import Cameras
from embodied_envs.physics.domain_randomization import Randomization
from embodied_envs.physics.engine import INITIAL_FIELDS
from embodied_envs.physics.make import compile_model
from embodied_envs.physics.mujoco_cpu import BatchPhysics
from embodied_envs.physics.task_validation import PRIVILEGED, STATE
from embodied_envs.robots.robot_model import Array
from embodied_envs.tasks.task import Task
from embodied_ppo.core.mirror import Mirror, SignedPermutation
from embodied_ppo.rollout.mirrored_model import POINT, QUATERNION, StateMirror

# Relative difference of left and right above which a line names it, and a task is refused.
WARN, REFUSE = 0.02, 0.2
# Amplitude of each of three waves along x and along y of the ground, where it is not level.
RELIEF_M = 0.001
KEPT = 0.95  # share of the states, those that differ least, in which a step is compared
STATES = 64  # random states, with their mirror images
EXACT = 1e-6  # relative difference of numbers that are equal up to rounding


def derive_mirror(
    id: str,
    kwargs: Mapping[str, Any],
    names: Sequence[str],
    *,
    commands: Mapping[str, Any] | None = None,
    rewards: Mapping[str, Any] | None = None,
) -> Mirror:
    """Return the mirror image of one of our own tasks, derived from its model and functions.

    Args:
        id: ``env.id``.
        kwargs: ``env.kwargs``.
        names: The observations; SINGLE: the task's only one.
        commands: ``env.commands``.
        rewards: ``env.rewards``; their terms must have mirror images, too.

    Raises:
        EnvError: The task or its model has no mirror image, or differs from it by more than REFUSE;
            the message names joint, variable, observation or term.
    """
    task_class = tasks.find(id)
    if task_class is None:
        raise EnvError(
            "or choose a task of this package (HalfCheetah, without -v5), or your own subclass of"
            f" embodied_envs.tasks.Task: env.id={id} is neither, so it has no mirror image"
        )
    task = tasks.make(id, task_class, kwargs, commands, rewards)
    return MirrorSearch(id, task, compile_model(task, id)).result(names)


class _Worlds:
    """STATES worlds of one model, and a copy of the task that is bound to ``relief``."""

    def __init__(self, task: Task, model: mujoco.MjModel, relief: mujoco.MjModel) -> None:
        self.task, fields = copy.deepcopy(task), (*task.fields, *task.privileged_fields)
        parts = {"cameras": Cameras(model), "randomization": Randomization(model, {})}
        self.physics = BatchPhysics(model, STATES, 1, fields=fields, stage=task.stage, **parts)
        self.task.bind(relief, self.physics.device, self.physics.dtype)
        self.s: dict[str, Tensor] = dict(self.physics.fields)

    def set(self, state: Mapping[str, Array]) -> None:
        """Set qpos, qvel, ctrl and act, [K, ..] each, and compute all derived fields."""
        values = {name: torch.tensor(x) for name, x in state.items()}
        self.physics.reset(torch.ones(STATES, dtype=torch.bool), values, torch.empty(STATES, 0))

    def state(self) -> dict[str, Array]:
        """Return qpos, qvel, ctrl and act."""
        return {name: self.s[name].numpy().copy() for name in ("qpos", "qvel", "ctrl", "act")}

    def step(self, action: Tensor, u: Tensor) -> tuple[dict[str, Array], dict[str, Tensor]]:
        """Take a control step; return ctrl, the terms of the reward, and the new variables."""
        task, s = self.task, self.s
        before = {name: s[name].clone() for name in task.before}
        ctrl = task.control(s, action)
        self.physics.step(ctrl, task.decimation)
        commands = {f"command_{name}" for name in task.commands}  # whose images differ
        terms = task.reward_terms(before, s, action)
        terms = {f"term {k}": x for k, x in terms.items() if k not in commands}
        terms["reward"] = task.reward(before, s, action)
        numbers = {name: x[:, None].numpy() for name, x in terms.items()}
        ended = task.terminated(s).double()[:, None].numpy()
        variables = {name: x.clone() for name, x in task.advance(s, action, u).items()}
        return {"ctrl": ctrl.numpy().copy(), **numbers, "terminated": ended}, variables

    def observe(self) -> dict[str, Any]:
        """Return each observation -> function of the state."""
        groups: dict[str, Any] = dict(self.task.groups())
        if self.task.has_privileged():
            groups[PRIVILEGED] = self.task.privileged
        obs = self.task.observe(self.s)
        named = obs if isinstance(obs, dict) else {STATE: obs, SINGLE: obs}
        return {name: lambda s, x=x: x for name, x in named.items()} | groups


class MirrorSearch:
    """Finds the mirror image of a task. The steps of ``result`` are in its order."""

    def __init__(self, id: str, task: Task, model: mujoco.MjModel) -> None:
        """Derive the image of the physical state; raise EnvError if there is none."""
        self.id, self.model, self.random = id, model, np.random.default_rng(0)
        # Numbers of the model that differ between left and right by more than WARN.
        self.unequal: list[str] = []
        relief = _with_relief(model, self.random)
        try:
            self.state = StateMirror(model)
        except EnvError as error:
            raise self._error(str(error)) from None
        low, _ = task.action_bounds(model)
        if len(low) != model.nu:
            raise self._error(f"it has {len(low)} actions and {model.nu} actuators")
        self.action = self.state.ctrl
        self.original = _Worlds(task, model, relief)
        self.image = _Worlds(task, _mirrored_scenery(model), _mirrored_scenery(relief))
        # Variable -> its image; None: noise, which is 0 here.
        self.variables: dict[str, Callable[[Tensor], Any] | None] = {}
        # What is compared -> its relative difference, and what differs most.
        self.measured: dict[str, tuple[float, str]] = {}
        # Numbers whose image is unknown, because they were the same in all states.
        self.constant: list[str] = []

    def result(self, names: Sequence[str]) -> Mirror:
        """Return the mirror image with the observations ``names``; raise EnvError."""
        fields = sorted(self.state.fields(), reverse=True)
        self.unequal = [text for error, text in fields if error > WARN]
        states, measured = self._start(), self.measured
        measured["accelerations"] = self.state.acceleration(states)
        self._check()
        self._find_variables()
        observations = self._find_observations(names)
        measured.update(self._compare_step(observations))
        self._check()
        causes = {name: cause.removeprefix("observation ") for name, (_, cause) in measured.items()}
        parts = [f"{x:.2g} in {name} ({causes[name]})" for name, (x, _) in measured.items()]
        line = (
            f"symmetry: {len(self.state.robot.pairs)} pairs of joints; two mirrorings are the"
            f" identity; a mirrored step differs by {', '.join(parts)}"
        )
        unequal = self.unequal
        warnings = [f"symmetry: left and right differ: {_first(unequal)}"] if unequal else []
        if self.constant:
            names = _first(self.constant)
            warnings.append(f"symmetry: taken as their own images, as they never changed: {names}")
        warnings += [
            f"symmetry: {name} of mirrored states differ by {x:.2g} ({cause})"
            for name, (x, cause) in measured.items()
            if x > WARN and name in ("accelerations", "controls")
        ]
        return Mirror(self.action, observations, line, tuple(warnings))

    def _error(self, reason: str) -> EnvError:
        fields = f"; left and right differ: {_first(self.unequal)}" if self.unequal else ""
        return EnvError(f"env.id={self.id} has no mirror image: {reason}{fields}")

    def _check(self) -> None:
        """Raise EnvError if a difference is above REFUSE."""
        for name, (x, cause) in self.measured.items():
            if not x <= REFUSE:
                raise self._error(
                    f"{name} of mirrored states differ by {x:.2g} > {REFUSE}: {cause}"
                )

    # -------------------------------------------------------------------------------------- states
    def _uniform(self, *shape: int) -> Tensor:
        return torch.tensor(self.random.random(shape))

    def _start(self) -> dict[str, Array]:
        """Set both worlds to postures near the start of an episode, and return them."""
        model, base, task = self.model, self.state.robot.base_dof, self.original.task
        start = task.reset(self._uniform(STATES, task.reset_noise))
        self.original.set({k: x.numpy().copy() for k, x in start.items() if k in INITIAL_FIELDS})
        states = self.original.state()
        # Some feet touch the ground, others do not: the base is near its height at home. Offsets
        # are in rad (joints and base) and m.
        place = self.state.robot.base_qpos + 2
        states["qpos"][:, place] = self.state.robot.home[place]
        offset = self.random.uniform(-0.1, 0.1, (STATES, model.nv))
        offset[:, base : base + 3] = 0.0
        offset[:, base + 2] = self.random.uniform(-0.02, 0.04, STATES)
        for qpos, change in zip(states["qpos"], offset, strict=True):
            mujoco.mj_integratePos(model, qpos, change, 1.0)
        states["qvel"] = self.random.uniform(-0.5, 0.5, (STATES, model.nv))
        variables = {k: x.clone() for k, x in start.items() if k not in INITIAL_FIELDS}
        self.original.s |= variables
        self.image.s |= {k: x.clone() for k, x in variables.items()}
        self._set(states)
        return states

    def _set(self, states: Mapping[str, Array]) -> None:
        """Set the worlds to states and their images."""
        self.original.set(states)
        self.image.set({k: getattr(self.state, k).array(x) for k, x in states.items()})

    def _set_variables(self) -> None:
        """Set the variables of the image from those of the original; noise is 0."""
        for name, mirror in self.variables.items():
            x = self.original.s[name]
            if mirror is None:
                self.original.s[name] = x = torch.zeros_like(x)
            self.image.s[name] = x if mirror is None else mirror(x)

    def _step(self) -> tuple[Any, Any, Tensor, Tensor]:
        """Take a step with a random action, and with its image.

        Return the results of both, the action and the random numbers.
        """
        u = self._uniform(STATES, self.original.task.step_noise)
        low, high = (np.clip(x, -1, 1) for x in self.original.task.action_bounds(self.model))
        action = torch.tensor(self.random.uniform(low, high, (STATES, len(low))))
        results = self.original.step(action, u), self.image.step(self.action(action), u)
        return *results, action, u

    # ---------------------------------------------------------------------------------- derivation
    def _find_variables(self) -> None:
        """Derive the images of variables from a step that starts with equal ones."""
        task, s = self.original.task, self.original.s
        start = {k: x for k, x in s.items() if k not in self.original.physics.fields}
        action = torch.zeros(STATES, self.model.nu, dtype=torch.float64)
        draws = [task.advance(s, action, self._uniform(STATES, task.step_noise)) for _ in range(2)]
        for name, x in start.items():
            if (image := task.mirrored(name, x)) is not None:
                self.variables[name] = partial(task.mirrored, name)
                twice = task.mirrored(name, image)
                if twice is None or not torch.allclose(twice, x):
                    raise self._error(f"variable {name} is not restored by two mirrorings")
            elif name in draws[0] and bool((draws[0][name] != draws[1][name]).all()):
                self.variables[name] = None
        self._set_variables()
        (_, after), (_, after_image), *_ = self._step()
        for name, x in start.items():
            if name in self.variables:
                continue
            rows, values = x.reshape(STATES, -1), after.get(name, x)
            if bool((rows != rows[:, :1]).any()):
                raise self._error(
                    f"the image of variable {name} is unknown; state it in the method mirrored"
                )
            images = after_image.get(name, x)
            image = self._match(values, images, lambda i, n=name: f"variable {n}[{i}]")
            self.variables[name] = lambda x, f=image: f(x.reshape(STATES, -1)).reshape(x.shape)
        self.original.s |= after
        self._set_variables()

    def _find_observations(self, names: Sequence[str]) -> dict[str, SignedPermutation]:
        """Derive the images of observations from states and their images."""
        for name in (*self.original.task.fields, *self.original.task.privileged_fields):
            if hasattr(self.model, name) and not hasattr(mujoco.MjData, name):
                x = self.original.s[name]
                self.original.s[name] = x = x * (0.8 + 0.4 * self._uniform(*x.shape))
                self.image.s[name] = x[:, self.state.elements(name)]
        self._set(self.original.state())
        pair = [worlds.observe() for worlds in (self.original, self.image)]
        result = {}
        for name in names:
            if name not in pair[0]:
                raise self._error(f"observation {name} is not one of vectors")
            x, y = pair[0][name](self.original.s), pair[1][name](self.image.s)
            if x.ndim != 2:
                raise self._error(f"observation {name} is no vector")
            result[name] = self._match(x, y, self._labels(name))
        return result

    def _labels(self, name: str) -> Any:
        """Return the function that names number i of an observation."""
        known = self.original.task.observation_names(self.model) if name in (STATE, SINGLE) else []
        return lambda i: f"observation {known[i][0] if i < len(known) else f'{name}[{i}]'}"

    def _match(self, original: Tensor, image: Tensor, label: Any) -> SignedPermutation:
        """Return the signed permutation of numbers [K, ..] whose result is ``image``.

        Raises EnvError if a number has none within REFUSE, or two mirrorings change one.
        """
        x, y = (v.reshape(STATES, -1).double().numpy() for v in (original, image))
        scale = _spread(y)
        index, sign = [-1] * y.shape[1], [1] * y.shape[1]
        for i in range(y.shape[1]):
            if index[i] >= 0:
                continue
            # Of both signs and each number: [2, D].
            error = np.abs(np.stack([x, -x]) - y[:, i : i + 1]).mean(1) / scale[i]
            best = error.min()
            if not best <= REFUSE:
                raise self._error(f"{label(i)} has no image; the nearest differs by {best:.2g}")
            # Of equal numbers, that itself, else the first without a partner.
            places = zip(*np.nonzero(error <= best + 1e-4), strict=True)
            fits = [(k != 0, j != i, index[j] >= 0, j) for k, j in places]
            flipped, _, _, j = min(fits)
            if len(fits) > 1 and np.ptp(y[:, i]) <= EXACT * np.abs(y[:, i]).max():
                self.constant.append(label(i))
            index[i], sign[i] = int(j), -1 if flipped else 1
            if index[j] < 0:
                index[j], sign[j] = i, sign[i]
        result = SignedPermutation(tuple(index), tuple(sign))
        if (i := result.moved()) is not None:
            raise self._error(f"{label(i)} is not restored by two mirrorings")
        return result

    # ----------------------------------------------------------------------------------- the proof
    def _compare_step(
        self, observations: Mapping[str, SignedPermutation]
    ) -> dict[str, tuple[float, str]]:
        """Return the largest differences of a step from the images, each with its cause."""
        (numbers, variables), (images, variable_images), action, u = self._step()
        actuators = [self.state.name("actuator", i) for i in range(self.model.nu)]
        control = _largest(self.action.array(numbers.pop("ctrl")), images.pop("ctrl"), actuators)
        rewards = [_largest(x, images[name], [name]) for name, x in numbers.items()]
        rewards = [next((x for x in rewards if x[0] > REFUSE), max(rewards))]
        states: list[tuple[float, str]] = [(0.0, "none")]
        again = self.original.task.advance(self.original.s, action, u.flip(0))
        for name, mirror in self.variables.items():
            if mirror is not None and name in variables:
                # Rows that the random numbers change, such as those of a new command, are left out.
                x, y = mirror(variables[name]), variable_images[name]
                fixed = (variables[name] == again[name]).reshape(STATES, -1).all(1)
                x, y = (v[:, None][fixed].flatten(1).double().numpy() for v in (x, y))
                if len(x):
                    label = [f"variable {name}[{i}]" for i in range(x.shape[1])]
                    states.append(_largest(x, y, label))
        self.original.s |= variables
        self._set_variables()
        pair = [worlds.observe() for worlds in (self.original, self.image)]
        for name, mirror in observations.items():
            x, y = pair[0][name](self.original.s), pair[1][name](self.image.s)
            label = [self._labels(name)(i) for i in range(x.shape[1])]
            states.append(_largest(mirror(x).numpy(), y.numpy(), label))
        return {"controls": control, "observations": max(states), "rewards": max(rewards)}


def _spread(x: Array) -> Array:
    """Return the mean absolute deviation of numbers [K, D]; rounding of constants is none."""
    return np.maximum(np.abs(x - x.mean(0)).mean(0), 1e-3 * np.abs(x).max(0) + 1e-9)


def _largest(expected: Array, measured: Array, labels: Sequence[str]) -> tuple[float, str]:
    """Return the largest difference of numbers [K, D] as a share of their spread, and its label."""
    # A stiff contact that only one of two states has is left out.
    error = np.sort(np.abs(measured - expected), axis=0)
    error = error[: math.ceil(KEPT * len(error))].mean(0)
    error /= _spread(expected)
    return float(error.max()), labels[int(error.argmax())]


def _first(texts: Sequence[str]) -> str:
    """Return the first three texts, and the number of the others."""
    more = f", and {len(texts) - 3} others" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def _with_relief(model: mujoco.MjModel, random: np.random.Generator) -> mujoco.MjModel:
    """Replace height fields by planes, in place; return a copy in which they are f(x) + g(y).

    Contacts with the triangles of MuJoCo's height fields have no mirror image. What a task reads of
    the ground has to differ from place to place; the cells of f(x) + g(y) are plane quadrangles.
    """
    relief = copy.copy(model)
    for k in range(model.nhfield):
        sizes = int(model.hfield_nrow[k]), int(model.hfield_ncol[k])
        waves = random.uniform(0.2, 0.7, (2, 3)), random.uniform(0, 6, (2, 3))  # per cell; phase
        g, f = (
            np.sin(np.arange(n)[:, None] * w + phase).sum(1) + 3
            for n, w, phase in zip(sizes, *waves, strict=True)
        )
        first, height = model.hfield_adr[k], RELIEF_M / model.hfield_size[k, 2]
        relief.hfield_data[first : first + f.size * g.size] = height * (f + g[:, None]).ravel()
    fields = model.geom_type == int(mujoco.mjtGeom.mjGEOM_HFIELD)
    model.geom_type[fields], model.geom_rbound[fields] = int(mujoco.mjtGeom.mjGEOM_PLANE), 0.0
    model.geom_size[fields] = 0.0
    model.geom_pos[fields, 2] += 6 * RELIEF_M
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_MIDPHASE)
    return relief


def _mirrored_scenery(model: mujoco.MjModel) -> mujoco.MjModel:
    """Return a copy of a model in which what is fixed in the world is mirrored."""
    model = copy.copy(model)
    for k in range(model.nhfield):
        rows, columns = int(model.hfield_nrow[k]), int(model.hfield_ncol[k])
        first = model.hfield_adr[k]
        data = model.hfield_data[first : first + rows * columns]
        data[:] = data.reshape(rows, columns)[::-1].ravel().copy()
    for kind, body in (("body", np.arange(model.nbody)), ("geom", model.geom_bodyid)):
        fixed = model.body_weldid[body] == 0
        getattr(model, f"{kind}_pos")[fixed] *= POINT
        getattr(model, f"{kind}_quat")[fixed] *= QUATERNION
    return model
