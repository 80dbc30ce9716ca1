"""Verify that a simulator adapter satisfies the contract of ``VectorEnv``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embodied_envs import types
from embodied_envs.adapters.user_code import wrap_errors
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_envs.types import ArraySpec, Box, Composite, Discrete, Obs, Step, VectorEnv

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

    A factory allows two more checks: two new environments are compared with each other, and
    ``close`` is checked.

    Args:
        env_or_factory: An environment, or a function that creates one from a list of seeds, one per
            environment. The function is called with [0, 1, 2, 3]. It may create fewer environments,
            which then have the first of these seeds. An environment is restarted with other seeds
            and left open; call ``reset`` before using it again.
        steps: Vector steps of the main run. Several episodes should end in them: create the
            environment with a small ``max_episode_steps``.

    Raises:
        EnvError: The contract is violated. The message states the first violation and its hint.
    """
    is_factory = callable(env_or_factory) and not isinstance(env_or_factory, VectorEnv)
    factory: Any = env_or_factory if is_factory else None
    env: Any = factory([0, 1, 2, 3]) if is_factory else env_or_factory
    kind = type(env).__name__
    if not isinstance(env, VectorEnv):
        raise EnvError(f"check_env: inherit from embodied_envs.VectorEnv: a {kind} is none")
    if missing := [name for name in _ATTRIBUTES if not hasattr(env, name)]:
        raise EnvError(f"check_env: set {', '.join(missing)} in the constructor of {kind}")
    checker = _Checker(env)
    checker.check_declarations()

    seeds = list(range(env.num_envs))
    actions = _random_actions(env, steps)
    if factory is None:
        env.restart(seeds)
    first = checker.run(env, actions)
    notes = checker.check_boundaries(first)

    checker.check_reset(actions)
    same, draws = "with the same seeds and actions", "draw all random numbers from the seeds, and"
    env.restart(seeds)
    hint = f"{draws} clear all state in restart"
    checker.compare(first, checker.run(env, actions), f"{same} after restart(seeds)", hint)
    env.restart(seeds)
    hint = "ignore actions in rows that only reset, and return copies of arrays that change later"
    violation = "with other actions on masked rows, and earlier results overwritten"
    checker.compare(first, checker.run(env, actions, scramble=True), violation, hint)
    if factory is not None:
        other = factory([0, 1, 2, 3])
        second, hint = checker.run(other, actions[:50]), f"{draws} share no state"
        checker.compare(first, second, f"{same} in a second new environment", hint)
        other.close()
    env.restart([seed + 1000 for seed in seeds])
    is_seeded = first.difference(checker.run(env, actions[:50])) is not None

    if not checker.check_reset_where(actions, seeds):
        notes.append("reset_where() is None: episodes cannot be staggered")
    env.restart(seeds)
    if not checker.check_state(actions):
        notes.append("state() is None: a resumed run replays the actions since the last restart")
    if factory is not None:
        checker.check_close(actions[0])
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


# Attributes of ``VectorEnv`` without a default.
_ATTRIBUTES = ("id", "num_envs", "obs_spec", "action_spec", "max_episode_steps", "device")


def _random_actions(env: VectorEnv, steps: int) -> list[Tensor]:
    """Return ``steps`` reproducible actions; numbers are in [-1, 1]."""
    choices = torch.tensor(types.choices_of(env.action_spec), dtype=torch.float32)
    size = 1 if isinstance(env.action_spec, Discrete) else env.action_spec.size
    u = torch.rand(steps, env.num_envs, size, generator=torch.Generator().manual_seed(0))
    chosen, numbers = (u[..., : len(choices)] * choices).floor(), 2 * u[..., len(choices) :] - 1
    actions = torch.cat([chosen, numbers], -1).to(env.device)
    return list(actions[..., 0].long() if isinstance(env.action_spec, Discrete) else actions)


@dataclass
class _Run:
    """Copies of the results of one run, and statistics of its episodes.

    Attributes:
        results: The first observation, then one ``Step`` per step.
        lengths: Steps of the episodes that ended.
        rows: Rows with mask True.
        boundaries: For each end of an episode: whether the last observation of the episode equals
            the first one of the next, and whether another observation of the episode changed.
    """

    results: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rows: int = 0
    boundaries: list[tuple[bool, bool]] = field(default_factory=list)

    def difference(self, other: _Run) -> tuple[str, int] | None:
        """Return name and step of the first difference in the common steps; reset is step -1."""
        for t, (a, b) in enumerate(zip(self.results, other.results, strict=False)):
            if (name := _first_difference(a, b)) is not None:
                return name, t - 1
        return None


class _Checker:
    """The checks of one environment; each raises EnvError at the first violation."""

    def __init__(self, env: VectorEnv) -> None:
        self.env = env

    def require(self, condition: Any, violation: str, hint: str) -> None:
        """Raise EnvError unless the condition (a bool, or a tensor of one) holds."""
        if not bool(condition):
            raise EnvError(f"env.id={self.env.id}: {violation}; {hint}")

    def check_declarations(self) -> None:
        """Check types and values of the attributes."""
        env = self.env
        n, device, limit, action = env.num_envs, env.device, env.max_episode_steps, env.action_spec
        is_count = isinstance(n, int) and n >= 1
        is_limit = limit is None or (isinstance(limit, int) and limit >= 1)
        is_action = isinstance(action, Discrete | Box | Composite)
        for valid, violation, hint in (
            (is_count, f"num_envs is {n!r}", "it must be an integer, at least 1"),
            (isinstance(device, torch.device), f"device is {device!r}", "make it torch.device(..)"),
            (is_limit, f"max_episode_steps is {limit!r}", "it must be an integer >= 1, or None"),
            (is_action, f"action_spec is {action!r}", "make it a Box, a Discrete or a Composite"),
        ):
            self.require(valid, violation, hint)
        for name, spec in _named(env.obs_spec).items():
            hint = "it must be an ArraySpec, or a flat dictionary of them"
            self.require(isinstance(spec, ArraySpec), f"obs_spec{name} is {spec!r}", hint)
        box = Box((), ()) if isinstance(action, Discrete) else action
        box = box.box if isinstance(box, Composite) else box
        valid = len(box.low) == len(box.high) and all(x < y for x, y in zip(box.low, box.high))
        violation = f"action_spec bounds {box.low} .. {box.high} are not in order"
        self.require(valid, violation, "each dimension must have a low bound below its high bound")

    # --------------------------------------------------------------------------------------- a run
    def run(self, env: VectorEnv, actions: list[Tensor], *, scramble: bool = False) -> _Run:
        """Reset, take all actions, and check each result alone and against the previous one.

        ``scramble``: use other actions on masked rows and overwrite earlier results. Neither may
        change the results.
        """
        run = _Run()
        previous: Any = env.reset()
        self.check_obs(previous, "reset()")
        run.results.append(tree.map(Tensor.clone, previous))
        lengths = torch.zeros(env.num_envs, dtype=torch.int64)
        moved = torch.zeros(env.num_envs, dtype=torch.bool)
        # Environments whose episode ended without final_obs: their next row must be masked.
        awaiting = torch.zeros_like(moved)
        for t, original in enumerate(actions):
            action = original.clone()
            if scramble:
                rows = awaiting.to(action.device)
                action[rows] = actions[t - 1][rows]
            executed = action.clone()
            unstable = 0 if env.unstable is None else int(env.unstable)
            joints = {name: x.clone() for name, x in env.simulator.joint_state().items()}
            step = env.step(action)
            if joints:
                _check_stability(env, unstable, joints["qvel"], step, t)
            unchanged = torch.equal(action, executed)
            self.require(unchanged, f"step() modified its argument at step {t}", "work on a copy")
            self.check_step(step, t)
            changed = _first_difference(previous, run.results[-1])
            violation = f"step {t} overwrote {changed} of the previous result"
            self.require(changed is None, violation, "return a copy of a buffer that is reused")
            self.check_mask(step.mask.cpu(), awaiting, t)

            ended, same_step = (step.terminated | step.truncated).cpu(), step.final_obs is not None
            lengths += step.mask.cpu()
            run.rows += int(step.mask.sum())
            last = run.results[-1]
            unmoved = _rows_equal(step.obs, last.obs if isinstance(last, Step) else last)
            # The last observation of an episode, and the first one of the next.
            final = step.final_obs
            repeats = unmoved if final is None else _rows_equal(final, step.obs)
            at_ends = ended if same_step else awaiting
            run.boundaries += zip(repeats[at_ends].tolist(), moved[at_ends].tolist(), strict=True)
            if same_step:  # The next episode has started.
                moved &= ~ended
            moved = torch.where(ended, moved, (moved | ~unmoved) & ~awaiting)
            self.check_time_limit(lengths, step, t)
            run.lengths += lengths[ended].tolist()
            lengths[ended] = 0
            awaiting = torch.zeros_like(ended) if same_step else ended

            if scramble:
                tree.map(lambda x: x.zero_(), previous)
            run.results.append(tree.map(Tensor.clone, step))
            previous = step
        return run

    def check_step(self, step: Any, t: int) -> None:
        """Check types, shapes, values and flags of one result."""
        at, require = f"step {t}", self.require
        violation = f"step() returned a {type(step).__name__}"
        require(isinstance(step, Step), violation, "it must be an embodied_envs.types.Step")
        self.check_obs(step.obs, at)
        self.check_array(step.reward, ArraySpec(()), f"reward of {at}")
        for name in ("terminated", "truncated", "mask", "success"):
            if name != "success" or step.success is not None:
                self.check_array(getattr(step, name), ArraySpec((), torch.bool), f"{name} of {at}")
        ended, masked = step.terminated | step.truncated, ~step.mask
        if step.final_obs is not None:
            self.check_obs(step.final_obs, f"{at} (final_obs)", rows=ended)
        hint = "terminated takes precedence; then truncated must be False"
        both = (step.terminated & step.truncated).any()
        require(~both, f"terminated and truncated are both True at {at}", hint)
        success = torch.zeros_like(masked) if step.success is None else step.success
        for rows, violation, hint in (
            (step.reward != 0, "has a reward", "reward must be 0"),
            (ended, "ends an episode", "flags must be False"),
            (success, "is a success", "success must be False"),
        ):
            violation = f"a masked row {violation} at {at}"
            require(~(rows & masked).any(), violation, f"{hint} where mask is False")

    def check_obs(self, obs: Any, at: str, rows: Tensor | None = None) -> None:
        """Check names, shapes, types, device and finiteness (of ``rows`` only, if given)."""
        specs, arrays = _named(self.env.obs_spec), _named(obs)
        violation = f"observation of {at} is a {type(obs).__name__} with {sorted(arrays)}"
        self.require(set(specs) == set(arrays), violation, f"obs_spec declares {sorted(specs)}")
        for name, spec in specs.items():
            self.check_array(arrays[name], spec, f"observation{name} of {at}", rows)

    def check_array(self, x: Any, spec: ArraySpec, name: str, rows: Tensor | None = None) -> None:
        """Check type, shape, device and finiteness (of ``rows`` only, if given) of one tensor."""
        device, require, shape = self.env.device, self.require, [self.env.num_envs, *spec.shape]
        is_tensor = isinstance(x, Tensor)
        require(is_tensor, f"{name} is a {type(x).__name__}", "it must be a torch.Tensor")
        hint = f"it must be {shape}: environments first, then the spec"
        require(list(x.shape) == shape, f"{name} has shape {list(x.shape)}", hint)
        require(x.dtype == spec.dtype, f"{name} is {x.dtype}", f"it must be {spec.dtype}")
        valid = x.device.type == device.type and device.index in (None, x.device.index)
        require(valid, f"{name} is on {x.device}", f"it must be on env.device, {device}")
        if spec.dtype.is_floating_point:
            is_finite = torch.isfinite(x if rows is None else x[rows]).all()
            violation = f"{name} is not finite (NaN or infinity)"
            require(is_finite, violation, "find the quantity of the simulator that diverges")

    def check_mask(self, mask: Tensor, awaiting: Tensor, t: int) -> None:
        """Check that exactly those rows are masked whose episode ended before without final_obs."""
        masked, expected = (x.nonzero().flatten().tolist() for x in (~mask, awaiting))
        violation = f"step {t} masks the environments {masked}; those whose episode ended at step"
        violation += f" {t - 1} with final_obs None are {expected}"
        hint = "return final_obs, the last observation, in the step that ends an episode and"
        hint += " resets, or then one masked row (mask False) that resets"
        self.require(masked == expected, violation, hint)

    def check_time_limit(self, lengths: Tensor, step: Step, t: int) -> None:
        """Check that truncated episodes last ``max_episode_steps``, and that none lasts longer."""
        limit = self.env.max_episode_steps
        if limit is None:
            return
        wrong = lengths[(lengths > limit) | (step.truncated.cpu() & (lengths < limit))]
        violation = f"an episode has {wrong[:1].tolist()} steps at step {t}, is truncated too early"
        violation += f" or goes on, and max_episode_steps is {limit}"
        hint = "set truncated in the last step of the limit, and terminated for any other end"
        self.require(not len(wrong), violation, hint)

    def check_boundaries(self, run: _Run) -> list[str]:
        """Check that the observations around episode ends do not contradict each other.

        Returns:
            Notes about what the run could not check.
        """
        repeats = [repeats for repeats, moved in run.boundaries if moved]
        violation = "the last observation of every episode equals the next one's first (off by one)"
        hint = "return the true successor, taken before the reset, as final_obs or in the last row"
        self.require(len(repeats) < 2 or not all(repeats), violation, hint)
        if not run.lengths:
            steps = len(run.results) - 1
            return [f"no episode ended in {steps} steps: episode ends were not checked"]
        note = "observations never changed within an episode: its ends were not checked"
        return [] if repeats else [note]

    # ------------------------------------------------------------------------------------- two runs
    def compare(self, first: _Run, other: _Run, circumstances: str, hint: str) -> None:
        """Check that two runs are equal."""
        name, t = first.difference(other) or (None, 0)
        place = f"at step {t}" if t >= 0 else "in reset()"
        self.require(name is None, f"{circumstances}, {name} differs {place}", hint)

    # -------------------------------------------------------------------------- reset, state, close
    def check_reset(self, actions: list[Tensor]) -> None:
        """Check that ``reset`` within episodes starts new ones, and their time limits."""
        env = self.env
        env.reset()
        # Stop at an episode end, where an adapter that does not clear its flags has some set.
        for action in actions:
            step = env.step(action)
            if bool((step.terminated | step.truncated).any()):
                break
        self.check_obs(env.reset(), "a second reset()")
        step = env.step(actions[0])
        self.check_step(step, 0)
        hint = "reset() itself must start every episode"
        self.require(step.mask.all(), "the first step after reset() is masked", hint)
        self.check_time_limit(torch.ones(env.num_envs), step, 0)

    def check_reset_where(self, actions: list[Tensor], seeds: list[int]) -> bool:
        """Check that ``reset_where`` resets environment 0 only, or none; False if it is None."""
        env = self.env
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
        reference = _leaves(tree.map(Tensor.clone, env.step(actions[1])))
        for where, name in ((mask, "environment 0"), (torch.zeros_like(mask), "no environment")):
            start()
            obs = env.reset_where(where)
            if obs is None:
                return False
            self.check_obs(obs, "reset_where()", rows=where)
            step = env.step(actions[1])
            hint = "reset_where() itself must start the episode"
            self.require(step.mask[where].all(), "the step after reset_where() is masked", hint)
            for leaf, x in _leaves(step).items():
                same = torch.equal(x[~where], reference[leaf][~where])
                same |= leaf.startswith("final_obs")
                violation = f"reset_where() of {name} changes {leaf} of another environment"
                self.require(same, violation, "leave the others unchanged")
        return True

    def check_state(self, actions: list[Tensor]) -> bool:
        """Check that ``load_state(state())`` continues bit for bit; return False if it is None."""
        env, half = self.env, max(1, len(actions) // 2)
        obs = env.reset()
        for action in actions[:half]:
            obs = env.step(action).obs
        state = env.state()
        if state is None:
            return False
        state, expected_obs = copy.deepcopy(state), tree.map(Tensor.clone, obs)
        expected_steps = [tree.map(Tensor.clone, env.step(action)) for action in actions[half:]]
        name = _first_difference(tree.map(Tensor.clone, env.load_state(state)), expected_obs)
        violation = f"load_state() returned another {name} than the one at state()"
        self.require(name is None, violation, "return the observation to act on")
        for t, (action, expected) in enumerate(zip(actions[half:], expected_steps, strict=True), 1):
            name = _first_difference(tree.map(Tensor.clone, env.step(action)), expected)
            violation = f"{t} steps after load_state(), {name} differs from the original run"
            hint = "save everything (step counters, random generators, pending resets)"
            self.require(name is None, violation, f"{hint}, or return None from state()")
        return True

    def check_close(self, action: Tensor) -> None:
        """Check that a second ``close`` has no effect and that ``step`` then raises EnvError."""
        env, prefix, works = self.env, f"env.id={self.env.id}: ", True
        env.close()
        with wrap_errors(f"{prefix}a second close() raises ", "; it must have no effect"):
            env.close()
        with wrap_errors(f"{prefix}step() after close() raises ", "; raise EnvError instead"):
            try:
                env.step(action)
            except EnvError:
                works = False
        self.require(not works, "step() works after close()", "raise EnvError, as it is a mistake")


def _check_stability(env: VectorEnv, unstable: int, velocity: Tensor, step: Step, t: int) -> None:
    """Raise EnvError if worlds of one of our own tasks have diverged in ``step``, number ``t``.

    ``unstable`` and ``velocity`` [N, nv] are those before the step.
    """
    simulator: Any = env.simulator
    if (count := int(simulator.unstable) - unstable) == 0:
        return
    model, worlds = simulator.physics.model, step.truncated.nonzero().flatten().tolist()
    world, dof = divmod(int(velocity[worlds].abs().argmax()), model.nv)
    speed = float(velocity[worlds[world], dof].abs())
    name = model.joint(model.dof_jntid[dof]).name or model.dof_jntid[dof]
    raise EnvError(
        f"env.id={env.id}: shorten the timestep ({model.opt.timestep:g} s), weaken actuators or"
        f" springs, or add damping: {count} of {env.num_envs} worlds diverged at step {t} of random"
        f" actions; before it the fastest joint of world {worlds[world]} was {name}, at"
        f" {speed:.3g} (m/s or rad/s)"
    )


# ------------------------------------------------------------------------------------------ helpers
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
    present = {label: value for label, value in values.items() if value is not None}
    return {f"{label}{k}": x for label, value in present.items() for k, x in _named(value).items()}


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
