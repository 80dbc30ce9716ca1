"""Whether a simulator adapter keeps the contract of ``VectorEnv``: run it on your own before you
train with it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters.user_code import wrap_errors
from embodied_ppo.core import tree
from embodied_ppo.core.types import (
    ArraySpec,
    Box,
    Discrete,
    EnvError,
    Obs,
    ObsSpec,
    Step,
    VectorEnv,
)

Factory = Callable[[list[int]], VectorEnv]


@dataclass(frozen=True)
class Report:
    """What ``check_env`` saw of an environment that passed.

    id          the task                       num_envs   N
    steps       vector steps of the main run   rows       of them, rows that count (mask True), over
    all environments
    episodes    that ended                     longest    steps of the longest of them; 0 without
    any
    seeded      whether other seeds gave another stream
    notes       what could not be checked, one sentence each
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
    """Step an environment with random actions and compare what it answers with the contract of
    ``VectorEnv``.

    Give a factory (seeds, one per environment -> a new VectorEnv) where you can: then two new
    environments are compared with each other too, and ``close`` is checked. A factory is called
    with [0, 1, 2, 3]; it may make fewer environments than that, with the first of these seeds. An
    environment that is given as it is gets ``restart``ed, and is left open and in need of
    ``reset``.

    steps   vector steps of the main run. It should see a few episodes end: make the environment
    with a small
            ``max_episode_steps``.

    Returns a Report; raises EnvError with the first thing that is wrong, where, and how to cure it.
    """
    factory: Factory | None = None
    made: Any = env_or_factory
    if callable(env_or_factory) and _missing(env_or_factory):
        factory = env_or_factory
        made = factory([0, 1, 2, 3])
    if missing := _missing(made):
        raise EnvError(
            f"check_env: a {type(made).__name__} is no VectorEnv: it lacks {', '.join(missing)}"
        )
    env: VectorEnv = made
    _check_declarations(env)

    seeds = list(range(env.num_envs))
    actions = _actions(env, steps)
    if factory is None:
        env.restart(seeds)
    first = _run(env, actions, steps)
    first.check_boundaries()
    notes = list(first.notes())

    _check_reset(env, actions)
    env.restart(seeds)
    first.compare(
        _run(env, actions, steps),
        "with the same seeds and actions after restart(seeds)",
        "all randomness must come from the seeds, and restart must begin anew",
    )
    env.restart(seeds)
    first.compare_scrambled(_run(env, actions, steps, scramble=True))
    if factory is not None:
        other = factory([0, 1, 2, 3])
        first.compare(
            _run(other, actions, min(steps, 50)),
            "with the same seeds and actions in a second new environment",
            "all randomness must come from the seeds, and two environments must share nothing",
        )
        other.close()
    env.restart([seed + 1000 for seed in seeds])
    seeded = first.difference(_run(env, actions, min(steps, 50))) is not None

    if not _check_reset_where(env, actions, seeds):
        notes.append("reset_where() is None: episodes cannot be staggered")
    env.restart(seeds)
    if not _check_state(env, actions):
        notes.append("state() is None: a resumed run begins its episodes anew")
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
        seeded=seeded,
        notes=tuple(notes),
    )


# ------------------------------------------------------------------------------------- declarations
_ATTRIBUTES = ("id", "num_envs", "obs_spec", "action_spec", "max_episode_steps", "device")
_METHODS = ("reset", "step", "reset_where", "restart", "state", "load_state", "render", "close")


def _missing(candidate: Any) -> list[str]:
    """What a candidate lacks to be a VectorEnv; a class lacks everything."""
    names = _ATTRIBUTES + _METHODS
    return (
        list(names)
        if inspect.isclass(candidate)
        else [name for name in names if not hasattr(candidate, name)]
    )


def _check_declarations(env: VectorEnv) -> None:
    """Attributes: types and values."""
    if not isinstance(env.num_envs, int) or env.num_envs < 1:
        _fail(env, f"num_envs is {env.num_envs!r}", "it must be a whole number, at least 1")
    if not isinstance(env.device, torch.device):
        _fail(env, f"device is {env.device!r}", "it must be a torch.device: torch.device('cpu')")
    limit = env.max_episode_steps
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        _fail(
            env,
            f"max_episode_steps is {limit!r}",
            "it must be a whole number of steps, or None without a clock",
        )
    for name, spec in _named(env.obs_spec).items():
        if not isinstance(spec, ArraySpec):
            _fail(
                env,
                f"obs_spec{name} is {spec!r}",
                "it must be an ArraySpec, or a flat dictionary of them",
            )
    action = env.action_spec
    if isinstance(action, Box):
        if not action.low or len(action.low) != len(action.high):
            _fail(
                env,
                f"action_spec has {len(action.low)} low and {len(action.high)} high bounds",
                "give one pair each",
            )
        if any(not low < high for low, high in zip(action.low, action.high, strict=True)):
            _fail(
                env,
                f"action_spec bounds {action.low} .. {action.high} are not in order",
                "low must be below high",
            )
    elif not isinstance(action, Discrete):
        _fail(env, f"action_spec is {action!r}", "it must be a Box or a Discrete")
    elif action.n < 1:
        _fail(env, f"action_spec has {action.n} choices", "it must have at least 1")


def _actions(env: VectorEnv, steps: int) -> list[Tensor]:
    """``steps`` random actions, the same at every call: float32 [N, A] within [-1, 1], or int64
    [N].
    """
    generator = torch.Generator().manual_seed(0)
    spec, n = env.action_spec, env.num_envs
    if isinstance(spec, Discrete):
        return [
            torch.randint(spec.n, (n,), generator=generator).to(env.device) for _ in range(steps)
        ]
    return [
        (torch.rand(n, spec.size, generator=generator) * 2 - 1).to(env.device) for _ in range(steps)
    ]


# ------------------------------------------------------------------------------------------ one run
class _Run:
    """What one run answered, copied, and what its episodes looked like."""

    def __init__(self, env: VectorEnv) -> None:
        self.env = env
        self.stream: list[Any] = []  # the first observation, then one Step a step
        self.lengths: list[int] = []
        self.rows = 0
        self.boundaries: list[_Boundary] = []

    def difference(self, other: _Run) -> tuple[str, int] | None:
        """What differs first and at which step (-1: in the answer of reset), as far as both go;
        None if nothing.
        """
        for t, (a, b) in enumerate(zip(self.stream, other.stream, strict=False)):
            if (name := _first_difference(a, b)) is not None:
                return name, t - 1
        return None

    def compare(self, other: _Run, circumstances: str, cure: str) -> None:
        """Raise EnvError where a run that should be equal first differs."""
        if found := self.difference(other):
            name, t = found
            _fail(
                self.env,
                f"{circumstances}, {name} differs {f'at step {t}' if t >= 0 else 'in reset()'}",
                cure,
            )

    def compare_scrambled(self, other: _Run) -> None:
        """Raise EnvError where a run with other actions on masked rows and overwritten old answers
        first differs.
        """
        if (found := self.difference(other)) is None:
            return
        name, t = found
        if any(
            isinstance(answer, Step) and not bool(answer.mask.all())
            for answer in self.stream[max(t, 0) : t + 2]
        ):
            _fail(
                self.env,
                f"another action on a masked row changes {name} at step {t}",
                "the row that only resets must ignore its action",
            )
        _fail(
            self.env,
            f"overwriting old answers changes {name} at step {t}",
            "hand out copies of what the simulator goes on using",
        )

    def check_boundaries(self) -> None:
        """Raise EnvError if the observations around the ends of episodes contradict each other."""
        telling = [b for b in self.boundaries if b.moved]
        if len(telling) >= 2 and all(b.repeats for b in telling):
            if telling[0].same_step:
                _fail(
                    self.env,
                    "final_obs is equal to the next episode's first observation wherever an episode"
                    " ended",
                    "final_obs must be the true successor, taken before the reset",
                )
            _fail(
                self.env,
                "the observation of an episode's last row is equal to the next episode's first one"
                " (off by one)",
                "with final_obs None the last row must carry the true successor, and the masked row"
                " after it the reset",
            )

    def notes(self) -> list[str]:
        out = []
        if not self.lengths:
            out.append(
                f"no episode ended in {len(self.stream) - 1} steps: nothing about ends was checked"
            )
        elif not any(b.moved for b in self.boundaries):
            out.append(
                "observations never changed within an episode: last and first ones cannot be told"
                " apart"
            )
        return out


@dataclass(frozen=True)
class _Boundary:
    """The end of one episode: was the last observation also the next episode's first, and did any
    other change?
    """

    same_step: bool
    repeats: bool
    moved: bool


def _run(env: VectorEnv, actions: list[Tensor], steps: int, *, scramble: bool = False) -> _Run:
    """``reset``, then ``steps`` steps, every answer checked by itself and against the one before.

    ``scramble``: another action on masked rows, and old answers overwritten, neither of which may
    change anything.
    """
    run = _Run(env)
    n = env.num_envs
    obs = env.reset()
    _check_obs(env, obs, "reset()")
    handed_out = obs
    run.stream.append(_copy(obs))
    lengths = torch.zeros(n, dtype=torch.int64)
    moved = torch.zeros(n, dtype=torch.bool)
    awaiting = torch.zeros(
        n, dtype=torch.bool
    )  # ended without final_obs: the next row must be masked
    for t in range(steps):
        action = actions[t].clone()
        if scramble:
            action[awaiting.to(action.device)] = _another(env, action)[awaiting.to(action.device)]
        given = action.clone()
        step = env.step(action)
        if not torch.equal(action, given):
            _fail(env, f"step() changed the action it was given, at step {t}", "work on a copy")
        _check_step(env, step, t)
        _check_aliases(env, handed_out, run.stream[-1], step, t)

        mask, ended = step.mask.cpu(), (step.terminated | step.truncated).cpu()
        _check_mask(env, mask, awaiting, t)
        lengths += mask
        run.rows += int(mask.sum())
        before = _obs_of(run.stream[-1])
        same_as_before = _rows_equal(step.obs, before)
        if step.final_obs is not None:
            for i in _indices(ended):
                repeats = _row_equal(step.final_obs, step.obs, i)
                run.boundaries.append(_Boundary(True, repeats, bool(moved[i])))
        for i in _indices(awaiting):
            run.boundaries.append(_Boundary(False, bool(same_as_before[i]), bool(moved[i])))
        if step.final_obs is not None:  # The next episode has begun, here or on a masked row.
            moved &= ~ended
        moved = torch.where(ended, moved, (moved | ~same_as_before) & ~awaiting)
        _check_clock(env, lengths, step, t)
        run.lengths += [int(lengths[i]) for i in _indices(ended)]
        lengths[ended] = 0
        awaiting = ended if step.final_obs is None else torch.zeros_like(ended)

        if scramble:
            tree.map(lambda x: x.zero_(), handed_out)
        run.stream.append(_copy(step))
        handed_out = step
    return run


def _check_step(env: VectorEnv, step: Any, t: int) -> None:
    """Types, shapes, values and flags of one answer."""
    where = f"step {t}"
    if not isinstance(step, Step):
        _fail(
            env,
            f"step() answered a {type(step).__name__}",
            "it must be an embodied_ppo.core.types.Step",
        )
    _check_obs(env, step.obs, where)
    n = (env.num_envs,)
    _check_array(env, step.reward, n, torch.float32, f"reward of {where}")
    for name in ("terminated", "truncated", "mask"):
        _check_array(env, getattr(step, name), n, torch.bool, f"{name} of {where}")
    if step.success is not None:
        _check_array(env, step.success, n, torch.bool, f"success of {where}")
    ended = step.terminated | step.truncated
    if step.final_obs is not None:
        _check_obs(env, step.final_obs, f"{where} (final_obs)", rows=ended)
    if bool((step.terminated & step.truncated).any()):
        _fail(
            env,
            f"terminated and truncated are both True at {where}",
            "terminated counts; then truncated is False",
        )
    masked = ~step.mask
    if bool((step.reward[masked] != 0).any()):
        _fail(env, f"a masked row has a reward at {where}", "reward must be 0 where mask is False")
    if bool(ended[masked].any()):
        _fail(
            env,
            f"a masked row ends an episode at {where}",
            "flags must be False where mask is False",
        )
    if step.success is not None and bool(step.success[masked].any()):
        _fail(
            env,
            f"a masked row is a success at {where}",
            "success must be False where mask is False",
        )


def _check_obs(env: VectorEnv, obs: Any, where: str, rows: Tensor | None = None) -> None:
    """Names, shapes, types, device and finiteness (of ``rows`` only, if given)."""
    if isinstance(env.obs_spec, dict) != isinstance(obs, dict):
        _fail(
            env,
            f"observation of {where} is a {type(obs).__name__}",
            f"obs_spec says {_kind(env.obs_spec)}",
        )
    specs, arrays = _named(env.obs_spec), _named(obs)
    if set(specs) != set(arrays):
        _fail(env, f"observation of {where} has {sorted(arrays)}", f"obs_spec says {sorted(specs)}")
    for name, spec in specs.items():
        array = arrays[name]
        _check_array(
            env,
            array,
            (env.num_envs, *spec.shape),
            spec.dtype,
            f"observation{name} of {where}",
            rows,
        )


def _check_array(
    env: VectorEnv,
    x: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    what: str,
    rows: Tensor | None = None,
) -> None:
    if not isinstance(x, Tensor):
        _fail(env, f"{what} is a {type(x).__name__}", "it must be a torch.Tensor")
    if tuple(x.shape) != shape:
        _fail(
            env,
            f"{what} has shape {list(x.shape)}",
            f"it must be {list(shape)}: environments first, then the spec",
        )
    if x.dtype != dtype:
        _fail(env, f"{what} is {x.dtype}", f"it must be {dtype}")
    if x.device.type != env.device.type or (
        env.device.index is not None and x.device.index != env.device.index
    ):
        _fail(env, f"{what} is on {x.device}", f"it must be on env.device, {env.device}")
    if dtype.is_floating_point and not bool(torch.isfinite(x if rows is None else x[rows]).all()):
        _fail(
            env,
            f"{what} is not finite (NaN or infinity)",
            "find out which quantity of the simulator diverges",
        )


def _check_mask(env: VectorEnv, mask: Tensor, awaiting: Tensor, t: int) -> None:
    """A row is masked exactly where the row before it ended an episode and gave no final_obs."""
    if bool((awaiting & mask).any()):
        _fail(
            env,
            f"an episode ended at step {t - 1} with final_obs None, and step {t} is not masked"
            " there",
            "give the true last observation as final_obs if the step that ends an episode also"
            " resets, or answer one masked row (mask False) that carries the reset",
        )
    if bool((~awaiting & ~mask).any()):
        _fail(
            env,
            f"step {t} is masked where no episode has just ended",
            "mask may be False only on the row right after an end whose final_obs was None",
        )


def _check_clock(env: VectorEnv, lengths: Tensor, step: Step, t: int) -> None:
    """Episodes that the clock ends last ``max_episode_steps``, and none lasts longer."""
    limit = env.max_episode_steps
    if limit is None:
        return
    if bool((lengths > limit).any()):
        _fail(
            env,
            f"an episode goes on after {limit} steps (step {t}), and max_episode_steps is {limit}",
            "set truncated on the last step that the clock allows; the row that only resets does"
            " not count",
        )
    for i in _indices(step.truncated.cpu()):
        if int(lengths[i]) != limit:
            _fail(
                env,
                f"truncated after {int(lengths[i])} steps at step {t}, and max_episode_steps is"
                f" {limit}",
                "count from the first action after a reset; an end for another reason is"
                " terminated",
            )


def _check_aliases(env: VectorEnv, handed_out: Any, copied: Any, step: Step, t: int) -> None:
    """What was handed out before stays as it was, and shares no memory with the new answer."""
    old, new = _leaves(handed_out), _leaves(step)
    if (name := _first_difference(handed_out, copied)) is not None:
        _fail(
            env,
            f"step {t} overwrote {name} of the answer before it",
            "hand out a copy of a buffer that is reused",
        )
    taken = {x.data_ptr(): name for name, x in old.items() if x.numel()}
    for name, x in new.items():
        if x.numel() and x.data_ptr() in taken:
            _fail(
                env,
                f"{name} of step {t} lies in the memory of {taken[x.data_ptr()]} before it",
                "hand out a copy",
            )


# ------------------------------------------------------------------------------ reset, state, close
def _check_reset(env: VectorEnv, actions: list[Tensor]) -> None:
    """``reset`` in the middle of episodes begins new ones: no row is masked, and the clocks start
    at 0.
    """
    env.reset()
    for (
        action
    ) in actions:  # Up to where an adapter that forgets to clear its flags would have some set.
        step = env.step(action)
        if bool((step.terminated | step.truncated).any()):
            break
    obs = env.reset()
    _check_obs(env, obs, "a second reset()")
    limit = env.max_episode_steps
    for t in range(min(len(actions), 2)):
        step = env.step(actions[t])
        _check_step(env, step, t)
        if t == 0 and not bool(step.mask.all()):
            _fail(
                env,
                "the first step after reset() is masked",
                "reset() itself must begin every episode",
            )
        if limit is not None and t + 1 < limit and bool(step.truncated.any()):
            _fail(
                env,
                f"truncated {t + 1} steps after reset(), and max_episode_steps is {limit}",
                "reset the clocks too",
            )
        if bool((step.terminated | step.truncated).any()):
            return


def _check_reset_where(env: VectorEnv, actions: list[Tensor], seeds: list[int]) -> bool:
    """``reset_where`` of environment 0 begins its episode and touches no other; False where it is
    None.
    """
    where = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
    where[0] = True

    def begin() -> bool:
        """One step from the start; whether environment 0 is still in its first episode."""
        env.restart(seeds)
        env.reset()
        step = env.step(actions[0])
        return not bool((step.terminated | step.truncated)[0])

    if len(actions) < 2 or not begin():
        return True
    fresh = env.reset_where(where)
    if fresh is None:
        return False
    _check_obs(env, fresh, "reset_where()", rows=where)
    cut = _copy(env.step(actions[1]))
    begin()
    plain = _leaves(_copy(env.step(actions[1])))
    if not bool(cut.mask[0]):
        _fail(
            env,
            "the first step after reset_where() is masked",
            "reset_where() itself must begin the episode",
        )
    for name, x in _leaves(cut).items():
        if not name.startswith("final_obs") and not torch.equal(x[1:], plain[name][1:]):
            _fail(
                env,
                f"reset_where() of environment 0 changes {name} of another",
                "let the others stand still",
            )
    return True


def _check_state(env: VectorEnv, actions: list[Tensor]) -> bool:
    """``load_state(state())`` continues bit for bit; False where ``state()`` is None."""
    half = max(1, len(actions) // 2)
    obs = env.reset()
    for action in actions[:half]:
        obs = env.step(action).obs
    state = env.state()
    if state is None:
        return False
    state, here = copy.deepcopy(state), _copy(obs)
    expected = [_copy(env.step(action)) for action in actions[half:]]
    if (name := _first_difference(_copy(env.load_state(state)), here)) is not None:
        _fail(
            env,
            f"load_state() answered another {name} than the one at state()",
            "return the observation to act on",
        )
    for t, (action, want) in enumerate(zip(actions[half:], expected, strict=True)):
        if (name := _first_difference(_copy(env.step(action)), want)) is not None:
            _fail(
                env,
                f"{t + 1} steps after load_state(), {name} differs from what followed state()",
                "save everything (clocks, random generators, who is about to reset), or return None"
                " from state()",
            )
    return True


def _check_close(env: VectorEnv, action: Tensor) -> None:
    env.close()
    try:
        with wrap_errors(""):
            env.close()
    except EnvError as error:
        raise EnvError(
            f"env.id={env.id}: a second close() raises {error}; closing twice must do nothing"
        ) from error
    with wrap_errors(f"env.id={env.id}: step() after close() raises ", "; raise EnvError instead"):
        try:
            env.step(action)
        except EnvError:
            return
    _fail(
        env,
        "step() works after close()",
        "raise EnvError: whoever holds it still has made a mistake",
    )


# ------------------------------------------------------------------------------------------ helpers
def _fail(env: VectorEnv, what: str, cure: str) -> Any:
    raise EnvError(f"env.id={env.id}: {what}; {cure}")


def _kind(spec: ObsSpec) -> str:
    return f"a dictionary of {sorted(spec)}" if isinstance(spec, dict) else "one tensor"


def _named(value: Any) -> dict[str, Any]:
    """{"['name']": leaf} of a dictionary, {"": leaf} of a leaf: names as they read in a message."""
    return (
        {f"[{name!r}]": leaf for name, leaf in value.items()}
        if isinstance(value, dict)
        else {"": value}
    )


def _obs_of(answer: Any) -> Obs:
    return answer.obs if isinstance(answer, Step) else answer


def _leaves(answer: Any) -> dict[str, Tensor]:
    """Every tensor of a Step or an observation, by a name for messages."""
    if not isinstance(answer, Step):
        return {f"observation{name}": x for name, x in _named(answer).items()}
    out = {f"observation{name}": x for name, x in _named(answer.obs).items()}
    out |= {name: getattr(answer, name) for name in ("reward", "terminated", "truncated", "mask")}
    if answer.final_obs is not None:
        out |= {f"final_obs{name}": x for name, x in _named(answer.final_obs).items()}
    if answer.success is not None:
        out["success"] = answer.success
    return out


def _copy(answer: Any) -> Any:
    return tree.map(lambda x: x.clone(), answer)


def _first_difference(a: Any, b: Any) -> str | None:
    """The name of the first tensor that differs (final_obs: only where an episode ended), or
    None.
    """
    x, y = _leaves(a), _leaves(b)
    if set(x) != set(y):
        return sorted(set(x) ^ set(y))[0]
    ended = (a.terminated | a.truncated) if isinstance(a, Step) else None
    for name in x:
        u, v = x[name], y[name]
        if name.startswith("final_obs"):
            u, v = u[ended], v[ended]
        if not torch.equal(u, v):
            return name
    return None


def _rows_equal(a: Obs, b: Obs) -> Tensor:
    """bool [N] on the CPU: whether observations of two times are the same."""
    rows = [(x == y).flatten(1).all(1) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]
    return torch.stack(rows).all(0).cpu()


def _row_equal(a: Obs, b: Obs, i: int) -> bool:
    return all(torch.equal(x[i], y[i]) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def _indices(mask: Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def _another(env: VectorEnv, action: Tensor) -> Tensor:
    """Other actions than ``action``, as legal."""
    if isinstance(env.action_spec, Discrete):
        return (action + 1) % env.action_spec.n
    return -action
