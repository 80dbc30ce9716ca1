"""Verify that a simulator adapter satisfies the contract of ``VectorEnv``."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from embodied_envs.adapters.realistic_env import STATE, RealisticEnv
from embodied_envs.adapters.user_code import wrap_errors
from embodied_ppo.core import tree
from embodied_ppo.core.types import (
    ArraySpec,
    Box,
    Discrete,
    EnvError,
    Obs,
    Step,
    VectorEnv,
)

Factory = Callable[[list[int]], VectorEnv]


@dataclass(frozen=True)
class Report:
    """Measurements of an environment that satisfies the contract.

    Attributes:
        id: Task id.
        num_envs: Number of environments, N.
        steps: Vector steps of the main run.
        rows: Rows of these steps that count (mask True), over all environments.
        episodes: Episodes that ended.
        longest: Steps of the longest of these episodes; 0 without any.
        seeded: Whether other seeds changed the results.
        notes: Properties that could not be checked, one sentence each.
    """

    id: str
    num_envs: int
    steps: int
    rows: int
    episodes: int
    longest: int
    seeded: bool
    notes: tuple[str, ...]


def check_env(env_or_factory: VectorEnv | Factory, *, steps: int = 200) -> Report:
    """Step an environment with random actions and verify the contract of ``VectorEnv``.

    With env.realism the delays are compared with recorded actions and observations. A factory
    allows two more checks: two new environments are compared with each other, and
    ``close`` is checked.

    Args:
        env_or_factory: An environment, or a function that creates one from a list of seeds, one per
            environment. The function is called with [0, 1, 2, 3]. It may create fewer environments,
            which then have the first of these seeds. An environment is restarted with other seeds
            and left open; call ``reset`` before using it again.
        steps: Vector steps of the main run. Several episodes should end in them: create the
            environment with a small ``max_episode_steps``.

    Raises:
        EnvError: The contract is violated. The message states the first violation and its cure.
    """
    factory: Factory | None = None
    candidate: Any = env_or_factory
    if callable(env_or_factory) and _missing(env_or_factory):
        factory = env_or_factory
        candidate = factory([0, 1, 2, 3])
    if missing := _missing(candidate):
        raise EnvError(
            f"check_env: a {type(candidate).__name__} is not a VectorEnv: it lacks"
            f" {', '.join(missing)}"
        )
    env: VectorEnv = candidate
    _check_declarations(env)

    seeds = list(range(env.num_envs))
    actions = _random_actions(env, steps)
    if factory is None:
        env.restart(seeds)
    first = _run(env, actions, steps)
    first.check_boundaries()
    notes = first.notes()

    _check_reset(env, actions)
    env.restart(seeds)
    first.compare(
        _run(env, actions, steps),
        "with the same seeds and actions after restart(seeds)",
        "draw all random numbers from the seeds, and clear all state in restart",
    )
    env.restart(seeds)
    first.compare_scrambled(_run(env, actions, steps, scramble=True))
    if factory is not None:
        other = factory([0, 1, 2, 3])
        first.compare(
            _run(other, actions, min(steps, 50)),
            "with the same seeds and actions in a second new environment",
            "draw all random numbers from the seeds, and share no state between environments",
        )
        other.close()
    env.restart([seed + 1000 for seed in seeds])
    is_seeded = first.difference(_run(env, actions, min(steps, 50))) is not None

    if isinstance(env, RealisticEnv):
        env.restart(seeds)
        _check_delays(env, actions)
        env.restart(seeds)
        _check_late_control(env, actions)
    if not _check_reset_where(env, actions, seeds):
        notes.append("reset_where() is None: episodes cannot be staggered")
    env.restart(seeds)
    if not _check_state(env, actions):
        notes.append("state() is None: a resumed run replays the actions since the last restart")
    if factory is not None:
        _check_close(env, actions[0])
    else:
        env.restart(seeds)
    return Report(
        id=env.id,
        num_envs=env.num_envs,
        steps=steps,
        rows=first.rows,
        episodes=len(first.lengths),
        longest=max(first.lengths, default=0),
        seeded=is_seeded,
        notes=tuple(notes),
    )


# ------------------------------------------------------------------------------------- declarations
_MEMBERS = (
    "id num_envs obs_spec action_spec max_episode_steps device reset step reset_where restart"
)
_MEMBERS += " state load_state render close"


def _missing(candidate: Any) -> list[str]:
    """Return the members of VectorEnv that a candidate lacks; a class lacks all of them."""
    is_class = inspect.isclass(candidate)
    return [name for name in _MEMBERS.split() if is_class or not hasattr(candidate, name)]


def _check_declarations(env: VectorEnv) -> None:
    """Check types and values of the attributes."""
    valid = isinstance(env.num_envs, int) and env.num_envs >= 1
    _require(env, valid, f"num_envs is {env.num_envs!r}", "it must be an integer, at least 1")
    valid = isinstance(env.device, torch.device)
    cure = "it must be a torch.device: torch.device('cpu')"
    _require(env, valid, f"device is {env.device!r}", cure)
    limit = env.max_episode_steps
    valid = limit is None or (isinstance(limit, int) and limit >= 1)
    cure = "it must be an integer, or None without a time limit"
    _require(env, valid, f"max_episode_steps is {limit!r}", cure)
    for name, spec in _named(env.obs_spec).items():
        cure = "it must be an ArraySpec, or a flat dictionary of them"
        _require(env, isinstance(spec, ArraySpec), f"obs_spec{name} is {spec!r}", cure)
    action = env.action_spec
    if isinstance(action, Discrete):
        cure = "it must have at least 1"
        _require(env, action.n >= 1, f"action_spec has {action.n} choices", cure)
    elif isinstance(action, Box):
        low, high = action.low, action.high
        violation = f"action_spec has {len(low)} low and {len(high)} high bounds"
        cure = "each dimension must have one of each"
        _require(env, len(low) == len(high) > 0, violation, cure)
        valid = all(x < y for x, y in zip(low, high, strict=True))
        violation = f"action_spec bounds {low} .. {high} are not in order"
        _require(env, valid, violation, "low must be below high")
    else:
        _fail(env, f"action_spec is {action!r}", "it must be a Box or a Discrete")


def _random_actions(env: VectorEnv, steps: int) -> list[Tensor]:
    """Return ``steps`` reproducible actions: float32 [N, A] in [-1, 1], or int64 [N]."""
    generator = torch.Generator().manual_seed(0)
    spec, n = env.action_spec, env.num_envs
    if isinstance(spec, Discrete):
        actions = [torch.randint(spec.n, (n,), generator=generator) for _ in range(steps)]
    else:
        actions = [torch.rand(n, spec.size, generator=generator) * 2 - 1 for _ in range(steps)]
    return [action.to(env.device) for action in actions]


# ------------------------------------------------------------------------------------------ one run
class _Run:
    """Copies of the results of one run, and statistics of its episodes."""

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.results: list[Any] = []  # the first observation, then one Step per step
        self.lengths: list[int] = []
        self.rows = 0
        self.boundaries: list[_Boundary] = []

    def difference(self, other: _Run) -> tuple[str, int] | None:
        """Return name and step of the first difference in the common steps; reset is step -1."""
        for t, (a, b) in enumerate(zip(self.results, other.results, strict=False)):
            if (name := _first_difference(a, b)) is not None:
                return name, t - 1
        return None

    def compare(self, other: _Run, circumstances: str, cure: str) -> None:
        """Raise EnvError at the first difference from a run that should be equal."""
        if difference := self.difference(other):
            name, t = difference
            place = f"at step {t}" if t >= 0 else "in reset()"
            _fail(self.env, f"{circumstances}, {name} differs {place}", cure)

    def compare_scrambled(self, other: _Run) -> None:
        """Raise EnvError at the first difference from a scrambled run, see ``_run``."""
        if (difference := self.difference(other)) is None:
            return
        name, t = difference
        nearby = self.results[max(t, 0) : t + 2]
        if any(isinstance(result, Step) and not bool(result.mask.all()) for result in nearby):
            violation = f"another action on a masked row changes {name} at step {t}"
            _fail(self.env, violation, "the row that only resets must ignore its action")
        violation = f"overwriting earlier results changes {name} at step {t}"
        _fail(self.env, violation, "return copies of arrays that the simulator continues to use")

    def check_boundaries(self) -> None:
        """Raise EnvError if the observations around episode ends contradict each other."""
        boundaries = [boundary for boundary in self.boundaries if boundary.moved]
        if len(boundaries) < 2 or not all(boundary.repeats for boundary in boundaries):
            return
        if boundaries[0].same_step:
            _fail(
                self.env,
                "final_obs is equal to the next episode's first observation at every episode end",
                "final_obs must be the true successor, taken before the reset",
            )
        _fail(
            self.env,
            "the observation of an episode's last row is equal to the next episode's first one"
            " (off by one)",
            "if final_obs is None, the last row must carry the true successor, and the masked row"
            " after it the first observation of the next episode",
        )

    def notes(self) -> list[str]:
        """Return the properties that this run could not check."""
        if not self.lengths:
            steps = len(self.results) - 1
            return [f"no episode ended in {steps} steps: episode ends were not checked"]
        if not any(boundary.moved for boundary in self.boundaries):
            return [
                "observations never changed within an episode: last and first observations cannot"
                " be distinguished"
            ]
        return []


@dataclass(frozen=True)
class _Boundary:
    """The end of one episode.

    ``same_step``: the step also reset. ``repeats``: the last observation of the episode equals the
    first one of the next. ``moved``: another observation of the episode changed.
    """

    same_step: bool
    repeats: bool
    moved: bool


def _run(env: VectorEnv, actions: list[Tensor], steps: int, *, scramble: bool = False) -> _Run:
    """Reset, step ``steps`` times, and check each result alone and against the previous one.

    ``scramble``: use other actions on masked rows and overwrite earlier results. Neither may change
    the results.
    """
    run = _Run(env)
    n = env.num_envs
    previous: Any = env.reset()
    _check_obs(env, previous, "reset()")
    run.results.append(_copy(previous))
    lengths = torch.zeros(n, dtype=torch.int64)
    moved = torch.zeros(n, dtype=torch.bool)
    # Environments whose episode ended without final_obs: their next row must be masked.
    awaiting = torch.zeros(n, dtype=torch.bool)
    for t in range(steps):
        action = actions[t].clone()
        if scramble:
            rows = awaiting.to(action.device)
            action[rows] = _other_action(env, action)[rows]
        original = action.clone()
        step = env.step(action)
        unchanged = torch.equal(action, original)
        _require(env, unchanged, f"step() modified its argument at step {t}", "work on a copy")
        _check_step(env, step, t)
        _check_aliases(env, previous, run.results[-1], step, t)

        mask, ended = step.mask.cpu(), (step.terminated | step.truncated).cpu()
        _check_mask(env, mask, awaiting, t)
        lengths += mask
        run.rows += int(mask.sum())
        before = run.results[-1]
        unmoved = _rows_equal(step.obs, before.obs if isinstance(before, Step) else before)
        if step.final_obs is not None:
            repeats = _rows_equal(step.final_obs, step.obs)
            run.boundaries += [
                _Boundary(True, bool(repeats[i]), bool(moved[i])) for i in _indices(ended)
            ]
        run.boundaries += [
            _Boundary(False, bool(unmoved[i]), bool(moved[i])) for i in _indices(awaiting)
        ]
        if step.final_obs is not None:  # The next episode has started.
            moved &= ~ended
        moved = torch.where(ended, moved, (moved | ~unmoved) & ~awaiting)
        _check_time_limit(env, lengths, step, t)
        run.lengths += [int(lengths[i]) for i in _indices(ended)]
        lengths[ended] = 0
        awaiting = ended if step.final_obs is None else torch.zeros_like(ended)

        if scramble:
            tree.map(lambda x: x.zero_(), previous)
        run.results.append(_copy(step))
        previous = step
    return run


def _check_step(env: VectorEnv, step: Any, t: int) -> None:
    """Check types, shapes, values and flags of one result."""
    at = f"step {t}"
    violation = f"step() returned a {type(step).__name__}"
    cure = "it must return an embodied_ppo.core.types.Step"
    _require(env, isinstance(step, Step), violation, cure)
    _check_obs(env, step.obs, at)
    n = (env.num_envs,)
    _check_array(env, step.reward, n, torch.float32, f"reward of {at}")
    for name in ("terminated", "truncated", "mask", "success"):
        if name != "success" or step.success is not None:
            _check_array(env, getattr(step, name), n, torch.bool, f"{name} of {at}")
    ended = step.terminated | step.truncated
    if step.final_obs is not None:
        _check_obs(env, step.final_obs, f"{at} (final_obs)", rows=ended)
    both = bool((step.terminated & step.truncated).any())
    cure = "terminated takes precedence; then truncated must be False"
    _require(env, not both, f"terminated and truncated are both True at {at}", cure)
    masked = ~step.mask
    has_reward = bool((step.reward[masked] != 0).any())
    cure = "reward must be 0 where mask is False"
    _require(env, not has_reward, f"a masked row has a reward at {at}", cure)
    cure = "flags must be False where mask is False"
    _require(env, not bool(ended[masked].any()), f"a masked row ends an episode at {at}", cure)
    succeeds = step.success is not None and bool(step.success[masked].any())
    cure = "success must be False where mask is False"
    _require(env, not succeeds, f"a masked row is a success at {at}", cure)


def _check_obs(env: VectorEnv, obs: Any, at: str, rows: Tensor | None = None) -> None:
    """Check names, shapes, types, device and finiteness (of ``rows`` only, if given)."""
    spec = env.obs_spec
    kind = f"a dictionary of {sorted(spec)}" if isinstance(spec, dict) else "one tensor"
    valid = isinstance(spec, dict) == isinstance(obs, dict)
    violation = f"observation of {at} is a {type(obs).__name__}"
    _require(env, valid, violation, f"obs_spec declares {kind}")
    specs, arrays = _named(spec), _named(obs)
    violation = f"observation of {at} has {sorted(arrays)}"
    _require(env, set(specs) == set(arrays), violation, f"obs_spec declares {sorted(specs)}")
    for name, leaf in specs.items():
        shape = (env.num_envs, *leaf.shape)
        _check_array(env, arrays[name], shape, leaf.dtype, f"observation{name} of {at}", rows)


def _check_array(
    env: VectorEnv,
    x: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    name: str,
    rows: Tensor | None = None,
) -> None:
    """Check type, shape, device and finiteness (of ``rows`` only, if given) of one tensor."""
    valid = isinstance(x, Tensor)
    _require(env, valid, f"{name} is a {type(x).__name__}", "it must be a torch.Tensor")
    violation = f"{name} has shape {list(x.shape)}"
    cure = f"it must be {list(shape)}: environments first, then the spec"
    _require(env, tuple(x.shape) == shape, violation, cure)
    _require(env, x.dtype == dtype, f"{name} is {x.dtype}", f"it must be {dtype}")
    valid = x.device.type == env.device.type and env.device.index in (None, x.device.index)
    cure = f"it must be on env.device, {env.device}"
    _require(env, valid, f"{name} is on {x.device}", cure)
    if dtype.is_floating_point:
        is_finite = bool(torch.isfinite(x if rows is None else x[rows]).all())
        violation = f"{name} is not finite (NaN or infinity)"
        _require(env, is_finite, violation, "find the quantity of the simulator that diverges")


def _check_mask(env: VectorEnv, mask: Tensor, awaiting: Tensor, t: int) -> None:
    """Check that a row is masked exactly if the previous one ended an episode without final_obs."""
    _require(
        env,
        not bool((awaiting & mask).any()),
        f"an episode ended at step {t - 1} with final_obs None, and step {t} is not masked there",
        "return the true last observation as final_obs if the step that ends an episode also"
        " resets, or return one masked row (mask False) that carries the reset",
    )
    _require(
        env,
        not bool((~awaiting & ~mask).any()),
        f"step {t} is masked, but no episode ended in the previous step",
        "mask may be False only on the row right after an end whose final_obs was None",
    )


def _check_time_limit(env: VectorEnv, lengths: Tensor, step: Step, t: int) -> None:
    """Check that truncated episodes last ``max_episode_steps``, and that none lasts longer."""
    limit = env.max_episode_steps
    if limit is None:
        return
    _require(
        env,
        not bool((lengths > limit).any()),
        f"an episode continues after {limit} steps (step {t}), and max_episode_steps is {limit}",
        "set truncated on the last step within the time limit; the row that only resets does not"
        " count",
    )
    for length in lengths[step.truncated.cpu()].tolist():
        violation = f"truncated after {length} steps at step {t}, and max_episode_steps is {limit}"
        cure = "count from the first action after a reset; set terminated for any other end"
        _require(env, length == limit, violation, cure)


def _check_aliases(env: VectorEnv, previous: Any, previous_copy: Any, step: Step, t: int) -> None:
    """Check that the previous result is unchanged and shares no memory with the new one."""
    name = _first_difference(previous, previous_copy)
    violation = f"step {t} overwrote {name} of the previous result"
    _require(env, name is None, violation, "return a copy of a buffer that is reused")
    addresses = {x.data_ptr(): name for name, x in _leaves(previous).items() if x.numel()}
    for name, x in _leaves(step).items():
        shared = addresses.get(x.data_ptr()) if x.numel() else None
        violation = f"{name} of step {t} shares memory with {shared} of the previous result"
        _require(env, shared is None, violation, "return a copy")


# ------------------------------------------------------------------------------ reset, state, close
def _check_reset(env: VectorEnv, actions: list[Tensor]) -> None:
    """Check that ``reset`` within episodes starts new ones: no masked row, time limit from 0."""
    env.reset()
    # Stop at an episode end, where an adapter that does not clear its flags has some set.
    for action in actions:
        step = env.step(action)
        if bool((step.terminated | step.truncated).any()):
            break
    obs = env.reset()
    _check_obs(env, obs, "a second reset()")
    limit = env.max_episode_steps
    for t, action in enumerate(actions[:2]):
        step = env.step(action)
        _check_step(env, step, t)
        valid = t > 0 or bool(step.mask.all())
        cure = "reset() itself must start every episode"
        _require(env, valid, "the first step after reset() is masked", cure)
        valid = limit is None or t + 1 >= limit or not bool(step.truncated.any())
        violation = f"truncated {t + 1} steps after reset(), and max_episode_steps is {limit}"
        _require(env, valid, violation, "reset the step counters, too")
        if bool((step.terminated | step.truncated).any()):
            return


def _check_reset_where(env: VectorEnv, actions: list[Tensor], seeds: list[int]) -> bool:
    """Check that ``reset_where`` resets environment 0 only, or none; return False if it is None."""
    mask = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
    mask[0] = True

    def start() -> bool:
        """Restart and step once; return whether environment 0 is still in its first episode."""
        env.restart(seeds)
        env.reset()
        step = env.step(actions[0])
        return not bool((step.terminated | step.truncated)[0])

    if len(actions) < 2 or not start():
        return True
    obs = env.reset_where(mask)
    if obs is None:
        return False
    _check_obs(env, obs, "reset_where()", rows=mask)
    after_reset = _copy(env.step(actions[1]))
    start()
    reference = _leaves(_copy(env.step(actions[1])))
    cure = "reset_where() itself must start the episode"
    valid = bool(after_reset.mask[0])
    _require(env, valid, "the first step after reset_where() is masked", cure)
    for name, x in _leaves(after_reset).items():
        valid = name.startswith("final_obs") or torch.equal(x[1:], reference[name][1:])
        violation = f"reset_where() of environment 0 changes {name} of another environment"
        _require(env, valid, violation, "leave the other environments unchanged")
    start()
    env.reset_where(torch.zeros_like(mask))
    for name, x in _leaves(env.step(actions[1])).items():
        violation = f"reset_where() of no environment changes {name}"
        _require(env, torch.equal(x, reference[name]), violation, "leave them unchanged")
    return True


class _Recorder:
    """A simulator that keeps the actions and the result of its last ``step``."""

    def __init__(self, env: VectorEnv) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self) -> Obs:
        """Reset and keep the observations."""
        obs = self.env.reset()
        self.obs = _copy(obs)
        return obs

    def step(self, action: Tensor) -> Step:
        """Step and keep actions and result."""
        self.action = action.clone()
        step = self.env.step(action)
        self.result: Step = _copy(step)
        return step


def _check_delays(env: RealisticEnv, actions: list[Tensor]) -> None:
    """Compare the delays of env.realism with lists of all actions and observations of an episode.

    Not compared are observations with noise, bias or dropout, and actions with a rate limit.
    """
    options = env.realism
    other = (*options.obs_noise, *options.obs_bias, *options.obs_dropout)
    names = set(env.obs_delays) - {name for d in other for name in d.names}
    simulator, recorder = env.env, _Recorder(env.env)
    env.env = recorder  # pyright: ignore[reportAttributeAccessIssue]
    try:
        env.reset()
        first = _dictionary(recorder.obs)
        sent: list[list[Tensor]] = [[] for _ in range(env.num_envs)]
        measured = {name: [[x] for x in first[name]] for name in names}
        for t, action in enumerate(actions):
            action_delays = env.action_delays.tolist()
            obs_delays = {name: env.obs_delays[name].tolist() for name in names}
            step = _copy(env.step(action))
            raw = recorder.result
            for i in _indices(raw.mask):
                sent[i].append(action[i])
                k = action_delays[i]
                late = k >= len(sent[i])
                expected = env.neutral_action[i] if late else sent[i][-1 - k]
                valid = options.action_rate_limit is not None
                valid = valid or torch.equal(recorder.action[i], expected)
                violation = f"the action executed at step {t} is not that of {k} steps before"
                _require(env, valid, violation, "RealisticEnv must delay actions by action_delays")
            ended = (raw.terminated | raw.truncated).tolist()
            for i in range(env.num_envs):
                same_step = ended[i] and raw.final_obs is not None
                new = same_step or not bool(raw.mask[i])
                sent[i] = [] if new else sent[i]
                for name in names:
                    history, d = measured[name][i], obs_delays[name][i]
                    now, seen = _dictionary(raw.obs)[name][i], _dictionary(step.obs)[name][i]
                    valid = True
                    if bool(raw.mask[i]):
                        true, read = now, seen
                        if same_step:
                            true = _dictionary(raw.final_obs)[name][i]
                            read = _dictionary(step.final_obs)[name][i]
                        history.append(true)
                        valid = torch.equal(read, history[max(len(history) - 1 - d, 0)])
                    if new:
                        measured[name][i] = [now]
                        valid = valid and torch.equal(seen, now)
                    violation = f"observation {name} of step {t} is not that of {d} steps before"
                    _require(env, valid, violation, "RealisticEnv must delay it by obs_delays")
    finally:
        env.env = simulator


def _check_late_control(env: RealisticEnv, actions: list[Tensor]) -> None:
    """Compare the control of every physics step with a fractional delay of actions.

    Our own tasks have such delays. On a GPU nothing is checked, because a control step is one CUDA
    graph there.
    """
    simulator: Any = env.env
    parts, substeps_late = env.realism.parts, env.late_substeps
    if substeps_late is None or not simulator.physics.host_readable:
        return
    physics, new = simulator.physics, torch.empty(0)
    executed: list[Tensor] = []  # ctrl [N, nu] of each physics step
    control, step = simulator.control, physics.step

    def record_control(action: Tensor) -> Tensor:
        nonlocal new
        new = control(action).clone()
        return new.clone()

    def record_step(ctrl: Tensor, substeps: int) -> None:
        executed.extend([ctrl.clone()] * substeps)
        step(ctrl, substeps)

    simulator.control, physics.step = record_control, record_step
    try:
        env.reset()
        for t, action in enumerate(actions):
            late, old = substeps_late.clone().cpu(), simulator.s["ctrl"].clone()
            delay = parts * env.action_delays.cpu() + late
            low, high = env.realism.action_delay
            valid = bool(((delay >= low) & (delay <= high)).all())
            violation = f"the delays of actions at step {t} are {delay.tolist()} physics steps"
            _require(env, valid, violation, f"they must be {low} to {high}")
            executed.clear()
            env.step(action)
            violation = f"step {t} has {len(executed)} physics steps"
            _require(env, len(executed) == parts, violation, f"it must have {parts}")
            for i, ctrl in enumerate(executed):
                expected = torch.where((late > i)[:, None], old, new)
                violation = f"the control of physics step {i} of step {t} does not begin after"
                violation += f" {late.tolist()} physics steps"
                cure = "the simulator must keep that of the step before until then"
                _require(env, torch.equal(ctrl, expected), violation, cure)
    finally:
        simulator.control, physics.step = control, step


def _dictionary(obs: Any) -> dict[str, Tensor]:
    """Return an observation by names, as options of env.realism name them."""
    return obs if isinstance(obs, dict) else {STATE: obs}


def _check_state(env: VectorEnv, actions: list[Tensor]) -> bool:
    """Check that ``load_state(state())`` continues bit for bit; return False if it is None."""
    half = max(1, len(actions) // 2)
    obs = env.reset()
    for action in actions[:half]:
        obs = env.step(action).obs
    state = env.state()
    if state is None:
        return False
    state, expected_obs = copy.deepcopy(state), _copy(obs)
    expected_steps = [_copy(env.step(action)) for action in actions[half:]]
    name = _first_difference(_copy(env.load_state(state)), expected_obs)
    violation = f"load_state() returned another {name} than the one at state()"
    _require(env, name is None, violation, "return the observation to act on")
    for t, (action, expected) in enumerate(zip(actions[half:], expected_steps, strict=True)):
        name = _first_difference(_copy(env.step(action)), expected)
        violation = f"{t + 1} steps after load_state(), {name} differs from the original run"
        cure = "save everything (step counters, random generators, pending resets), or return None"
        _require(env, name is None, violation, f"{cure} from state()")
    return True


def _check_close(env: VectorEnv, action: Tensor) -> None:
    """Check that a second ``close`` has no effect and that ``step`` then raises EnvError."""
    env.close()
    try:
        with wrap_errors(""):
            env.close()
    except EnvError as error:
        raise EnvError(
            f"env.id={env.id}: a second close() raises {error}; it must have no effect"
        ) from error
    with wrap_errors(f"env.id={env.id}: step() after close() raises ", "; raise EnvError instead"):
        try:
            env.step(action)
        except EnvError:
            return
    _fail(env, "step() works after close()", "raise EnvError, because the call is a mistake")


# ------------------------------------------------------------------------------------------ helpers
def _require(env: VectorEnv, condition: bool, violation: str, cure: str) -> None:
    """Raise EnvError unless the condition holds."""
    if not condition:
        _fail(env, violation, cure)


def _fail(env: VectorEnv, violation: str, cure: str) -> NoReturn:
    raise EnvError(f"env.id={env.id}: {violation}; {cure}")


def _named(value: Any) -> dict[str, Any]:
    """Return {"['name']": leaf} of a dictionary, {"": leaf} of a leaf: suffixes for messages."""
    if not isinstance(value, dict):
        return {"": value}
    return {f"[{name!r}]": leaf for name, leaf in value.items()}


def _leaves(result: Any) -> dict[str, Tensor]:
    """Return the compared tensors of a Step or an observation by their names in messages."""
    values = {"observation": result}
    if isinstance(result, Step):
        fields = ("reward", "terminated", "truncated", "mask", "final_obs", "success")
        values = {"observation": result.obs} | {name: getattr(result, name) for name in fields}
    return {
        f"{label}{name}": x
        for label, value in values.items()
        if value is not None
        for name, x in _named(value).items()
    }


def _copy(result: Any) -> Any:
    return tree.map(lambda x: x.clone(), result)


def _first_difference(a: Any, b: Any) -> str | None:
    """Return the first tensor that differs, or None; final_obs counts in ended rows only."""
    x, y = _leaves(a), _leaves(b)
    if set(x) != set(y):
        return sorted(set(x) ^ set(y))[0]
    ended = (a.terminated | a.truncated) if isinstance(a, Step) else None
    for name in x:
        rows = ended if name.startswith("final_obs") else slice(None)
        if not torch.equal(x[name][rows], y[name][rows]):
            return name
    return None


def _rows_equal(a: Obs, b: Obs) -> Tensor:
    """Return bool [N] on the CPU: whether the observations of each environment are equal."""
    rows = [(x == y).flatten(1).all(1) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]
    return torch.stack(rows).all(0).cpu()


def _indices(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _other_action(env: VectorEnv, action: Tensor) -> Tensor:
    """Return another valid action."""
    if isinstance(env.action_spec, Discrete):
        return (action + 1) % env.action_spec.n
    return -action
