"""Several tasks as one ``VectorEnv``, so that one policy can learn all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters.spaces import check_seeds
from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError
from embodied_envs.base.observation_names import ACTION_MASK, INSTRUCTION, SINGLE, TASK
from embodied_envs.types import ArraySpec, Box, EnvInfo, Obs, Step, VectorEnv


def task_of_rows(weights: Sequence[int], num_envs: int) -> list[int]:
    """Return the index of the task of each environment.

    The tasks repeat with period Σ weights, so that equal parts of all environments, in other
    processes for instance, have the same tasks as the whole: weights 2, 1 give 0 0 1 0 0 1 ..
    """
    period = [task for task, weight in enumerate(weights) for _ in range(weight)]
    return list(itertools.islice(itertools.cycle(period), num_envs))


class MultiTaskEnv(VectorEnv):
    """Environments of several tasks that step together, each task with its own simulator.

    Observations are joined by name: equal names share their numbers, a shorter array ends with
    zeros, and a name that a task lacks is zero. A single array has the name "obs". TASK is the
    one-hot index of the task; policies that read a sentence get INSTRUCTION instead, that of the
    task or the words of its name. A task that reports no success fails.
    """

    def __init__(
        self,
        ids: Sequence[str],
        make: Callable[[str, list[int]], VectorEnv],
        seeds: list[int],
        *,
        weights: Sequence[int] | None = None,
        tasks: Sequence[str] | None = None,
        sentences: bool = False,
    ) -> None:
        """Create the environments.

        Args:
            ids: Tasks to simulate.
            make: Returns environments of a task, one for each seed.
            seeds: One seed per environment.
            weights: See ``task_of_rows``; None: one environment of each task in a period.
            tasks: Tasks whose observations and indices the policy reads; None: ``ids``. TASK is 0
                for a task that is not among them.
            sentences: Whether the policy reads sentences.

        Raises:
            EnvError: The tasks cannot be combined.
        """
        self.id, self.num_envs, tasks = f"[{','.join(ids)}]", len(seeds), tasks or ids
        if own := [name for name in (*ids, *tasks) if ":" in name]:
            raise self.error(f"remove {own[0]}: a task of your own file is trained alone")
        if len(weights := weights or (1,) * len(ids)) != len(ids):
            raise self.error(f"env.task_weights has {len(weights)} numbers for {len(ids)} tasks")
        assigned = torch.tensor(task_of_rows(weights, self.num_envs))  # [N]
        described: dict[str, EnvInfo] = {}
        # Environments of each task that has some, and their rows in the batch, int64 [n].
        self.parts: list[tuple[VectorEnv, Tensor]] = []
        try:
            for name in dict.fromkeys((*ids, *tasks)):
                rows = torch.arange(0)
                if name in ids:
                    rows = (assigned == ids.index(name)).nonzero().flatten()
                # Without rows, the batch is small or the task not simulated: only describe it.
                env = make(name, [seeds[i] for i in rows.tolist()] or seeds[:1])
                described[name] = env.info
                if len(rows):
                    self.parts.append((env, rows.to(env.device)))
                else:
                    env.close()
            infos = [described[name] for name in ids]
            self._set_spaces([described[name] for name in tasks], infos, sentences)
        except EnvError:
            self.close()
            raise
        kinds = [[f"{i.id}/{kind}" for kind in i.task_names] or [i.id] for i in infos]
        self.task_names = tuple(itertools.chain(*kinds))
        # [N] first of the names of an environment's task, and its one-hot index, [N, tasks].
        first = torch.tensor(list(itertools.accumulate(map(len, kinds[:-1]), initial=0)))
        self._first_name = first[assigned].to(self.device)
        index = [[float(name == task) for task in tasks] for name in ids]
        self._task = torch.tensor(index)[assigned].to(self.device)

    def _set_spaces(self, tasks: list[EnvInfo], ids: list[EnvInfo], sentences: bool) -> None:
        """Set the description; raise EnvError if tasks cannot be combined."""
        infos, first, env = (*tasks, *ids), tasks[0], self.parts[0][0]
        spec: dict[str, ArraySpec] = {}
        for number, info in enumerate(infos):
            if info.action_spec != first.action_spec:
                actions = (_show_actions(i) for i in (info, first))
                raise self.error(f"one policy needs equal actions, but {' and '.join(actions)}")
            for name, array in tree.named(info.obs_spec, SINGLE).items():
                if name == INSTRUCTION:
                    continue
                is_new = name not in spec
                spec.setdefault(name, array)
                known = spec[name]
                shape = tuple(map(max, zip(known.shape, array.shape, strict=False)))
                label = f"its {name!r} has shape {list(array.shape)}"
                fits = len(known.shape) == len(array.shape) and known.layout == array.layout
                if not fits or (array.layout is not None and known != array) or name == TASK:
                    raise self.error(
                        f"remove {info.id}: only vectors of different lengths can be joined, but"
                        f" {label} and that of another task {list(known.shape)}"
                    )
                if number >= len(tasks) and (is_new or shape != known.shape):
                    readers = ", ".join(i.id for i in tasks)
                    raise self.error(f"remove {info.id}: {label}, which {readers} cannot read")
                dtype = torch.promote_types(known.dtype, array.dtype)
                spec[name] = ArraySpec(shape, dtype, known.image)
        if sentences or any(info.instructions for info in infos):
            self.instructions = tuple(dict.fromkeys(x for i in infos for x in _sentences(i)))
            spec[INSTRUCTION] = ArraySpec((), torch.int64)
            # Of each part, the numbers of its sentences among those of all tasks.
            own = [_sentences(part.info) for part, _ in self.parts]
            self._numbers = [torch.tensor(list(map(self.instructions.index, x))) for x in own]
        if not sentences:
            spec[TASK] = ArraySpec((len(tasks),))
        self.obs_spec, self._specs = spec, spec
        self.action_spec, self.device = first.action_spec, env.device
        self.action_space, self.to_simulator = env.simulator.action_space, env.to_simulator
        limits = [info.max_episode_steps or 0 for info in ids]
        self.max_episode_steps = max(limits) if all(limits) else None
        # The control period and the gripper's sign are those that all tasks have.
        self.step_s = first.step_s if len({i.step_s for i in infos}) == 1 else None
        if len({info.gripper_closes for info in infos}) == 1:
            self.gripper_closes = first.gripper_closes
        self.is_asynchronous = all(part.is_asynchronous for part, _ in self.parts)
        self.can_truncate = all(part.can_truncate for part, _ in self.parts)

    def _join(self, parts: Sequence[Tensor | None], fill: float = 0.0) -> Tensor:
        """Return the rows of all parts, [N, ..]; ``fill`` in parts that have none."""
        given = next(x for x in parts if x is not None)
        dtype = given.dtype if fill == 0.0 else torch.float32
        out = torch.full((self.num_envs, *given.shape[1:]), fill, dtype=dtype, device=self.device)
        for (_, rows), x in zip(self.parts, parts, strict=True):
            if x is not None:
                out[rows] = x.to(dtype)
        return out

    def _join_obs(self, parts: Sequence[Obs]) -> dict[str, Tensor]:
        """Return the observations of all parts, [N, ..] by name."""
        joined: dict[str, Tensor] = {}
        for name, spec in self._specs.items():
            # A task without a mask of choices allows all of them.
            fill = float(name == ACTION_MASK)
            shape = (self.num_envs, *spec.shape)
            joined[name] = torch.full(shape, fill, dtype=spec.dtype, device=self.device)
        if TASK in joined:
            joined[TASK].copy_(self._task)
        for k, ((_, rows), obs) in enumerate(zip(self.parts, parts, strict=True)):
            if INSTRUCTION in joined:
                own = obs.get(INSTRUCTION) if isinstance(obs, dict) else None
                chosen = torch.zeros_like(rows) if own is None else own.long()
                joined[INSTRUCTION][rows] = self._numbers[k].to(self.device)[chosen]
            for name, x in tree.named(obs, SINGLE).items():
                if name != INSTRUCTION:
                    columns = (slice(size) for size in x.shape[1:])
                    joined[name][(rows, *columns)] = x.to(joined[name].dtype)
        return joined

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        return self._join_obs([env.reset() for env, _ in self.parts])

    def step(self, action: Tensor) -> Step:
        """See ``VectorEnv``."""
        self.send(action)
        return self.receive()

    def send(self, action: Tensor) -> None:
        """Start the step of the simulators that can run meanwhile."""
        self._action = action
        for env, rows in self.parts:
            if env.is_asynchronous:
                env.send(action[rows])

    def receive(self) -> Step:
        """Return the result of the step that ``send`` started."""
        steps = [
            env.receive() if env.is_asynchronous else env.step(self._action[rows])
            for env, rows in self.parts
        ]
        joined: dict[str, Any] = {}
        names = ("reward", "terminated", "truncated", "mask", "success", "executed")
        for name in (*names, "success_at_end"):
            parts = [getattr(step, name) for step in steps]
            joined[name] = None if all(x is None for x in parts) else self._join(parts)
        if any(step.final_obs is not None for step in steps):
            # Where a simulator resets on the next step, ``obs`` is the true successor.
            final = [step.obs if step.final_obs is None else step.final_obs for step in steps]
            joined["final_obs"] = self._join_obs(final)
        info: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for step in steps for name in step.info or ()):
            values = [(step.info or {}).get(name) for step in steps]
            pairs = zip(values, self.parts, strict=True)
            if all(x is None or len(x) == len(rows) for x, (_, rows) in pairs):
                info[name] = self._join(values, torch.nan)
            else:  # numbers of all environments together
                info[name] = torch.cat([x.flatten() for x in values if x is not None])
        kinds = [step.task for step in steps]
        task = self._first_name.clone()
        if any(kind is not None for kind in kinds):
            task += self._join(kinds)
        return Step(self._join_obs([s.obs for s in steps]), task=task, info=info or None, **joined)

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``: the sum over the tasks that count."""
        counts = [x for env, _ in self.parts if (x := env.unstable) is not None]
        return torch.stack(counts).sum() if counts else None

    def truncate_next(self, where: Tensor) -> None:
        """See ``VectorEnv``."""
        for env, rows in self.parts:
            env.truncate_next(where[rows])

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``; None if one of the simulators cannot reset single environments."""
        # Ask with an empty selection first: no simulator is reset if another one cannot.
        for selected in (torch.zeros_like(where), where):
            parts = [env.reset_where(selected[rows]) for env, rows in self.parts]
            if any(obs is None for obs in parts):
                return None
        return self._join_obs([obs for obs in parts if obs is not None])

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        check_seeds(self.id, seeds, self.num_envs)
        for env, rows in self.parts:
            env.restart([seeds[i] for i in rows.tolist()])

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``; None if one of the simulators cannot save its state."""
        states = [env.state() for env, _ in self.parts]
        return None if any(state is None for state in states) else {"tasks": states}

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``."""
        pairs = zip(self.parts, state["tasks"], strict=True)
        return self._join_obs([env.load_state(part) for (env, _), part in pairs])

    def render(self) -> Tensor:
        """See ``VectorEnv``."""
        return self.parts[0][0].render()

    def close(self) -> None:
        """See ``VectorEnv``."""
        for env, _ in self.parts:
            env.close()


def _sentences(info: EnvInfo) -> Sequence[str]:
    """Return the sentences of a task; if it has none, the words of its name."""
    name = info.id.rpartition("/")[2].rpartition("-v")[0] or info.id
    spaced = "".join(f" {c.lower()}" if c.isupper() else c for c in name)
    return info.instructions or (" ".join(spaced.replace("-", " ").replace("_", " ").split()),)


def _show_actions(info: EnvInfo) -> str:
    """Return a task and its actions in words."""
    spec = info.action_spec
    if not isinstance(spec, Box):
        return f"those of {info.id} are {spec}"
    low, high = min(spec.low), max(spec.high)
    return f"those of {info.id} are {spec.size} numbers from {low:g} to {high:g}"
