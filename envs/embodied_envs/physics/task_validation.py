"""Task validation: call each function of a task once, report mistakes with its name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from embodied_envs.adapters.user_code import wrap_errors
from embodied_envs.base.errors import EnvError, nearest
from embodied_envs.physics.engine import INITIAL_FIELDS, Physics
from embodied_envs.tasks.task import Task

# Names of a task's ``observe`` [N, D], where it has a name, and of its ``privileged``.
STATE, PRIVILEGED = "state", "privileged"
# Name of an observation -> function of the state that returns [N, ..].
Groups: TypeAlias = "Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]]"


class TaskValidator:
    """Call a task's functions on its first state and check what they return.

    Types, shapes and dtypes are checked, and that no function modifies the state. Every method
    raises EnvError with the name of the function, if it is known, and the mistake.
    """

    def __init__(self, id: str, task: Task, physics: Physics, num_envs: int) -> None:
        """Validate ``task`` on ``num_envs`` worlds of ``physics``, which has the task's fields."""
        self.task, self.physics, self.n = task, physics, num_envs
        self.prefix = f"env.id={id}: {type(task).__name__}"
        self.state_names = set(physics.fields)

    @contextlib.contextmanager
    def _calling(self, function: str) -> Iterator[None]:
        """Add the function's name to every exception of user code."""
        with wrap_errors(f"{self.prefix}.{function}: "):
            try:
                yield
            except KeyError as error:
                name = error.args[0] if error.args else "?"
                attribute = "privileged_fields" if function == PRIVILEGED else "fields"
                if function == "reset":  # has no state
                    raise
                message = (
                    f"reads s[{name!r}], which does not exist; if {name} is a MuJoCo field, add it"
                    f" to the attribute `{attribute}`; if it is a variable of the task, return it"
                    " from reset()"
                )
                if function == "reward" and name in self.state_names:
                    message = (
                        f"reads before[{name!r}], which does not exist; add it to the attribute"
                        " `before`"
                    )
                raise self._error(f".{function} {message}") from error

    def _error(self, message: str) -> EnvError:
        return EnvError(f"{self.prefix}{message}")

    def _tensor(self, label: str, x: Any, shape: tuple[int, ...], kind: Any = "float") -> None:
        """Raise EnvError unless ``x`` is a tensor of ``shape``.

        Its dtype must be ``kind``, or any floating-point type; None: any type.
        """
        if not isinstance(x, Tensor):
            raise self._error(f".{label} is {type(x).__name__}; it must be a tensor {list(shape)}")
        if tuple(x.shape) != shape:
            raise self._error(f".{label} has shape {list(x.shape)}; it must be {list(shape)}")
        valid = x.is_floating_point() if kind == "float" else kind in (None, x.dtype)
        if not valid:
            raise self._error(f".{label} is {x.dtype}; it must be {kind}")

    def start(self, reset: Callable[[], Any]) -> dict[str, Tensor]:
        """Return the validated result of ``reset``."""
        with self._calling("reset"):
            start = reset()
        if not isinstance(start, Mapping):
            raise self._error(
                f".reset() is {type(start).__name__}; make it a dictionary of tensors"
            )
        fields = self.physics.fields
        for name, x in start.items():
            label = f"reset()[{name!r}]"
            if name in INITIAL_FIELDS:  # in the dtype that bind() gets
                self._tensor(label, x, tuple(fields[name].shape), self.physics.dtype)
                continue
            if name in fields:
                raise self._error(f": rename its variable {name!r}, the name of a MuJoCo field")
            if similar := nearest(name, INITIAL_FIELDS, cutoff=0.8):
                raise self._error(
                    f".{label} is not a MuJoCo field; did you mean {similar!r}? If it is a"
                    " variable of your task, choose a less similar name"
                )
            self._tensor(label, x, (self.n, *getattr(x, "shape", (0,))[1:]), None)
        for name, attribute in (("kind", "names"), ("instruction", "instructions")):
            entries: tuple[str, ...] = getattr(self.task, attribute)
            if (name in start) != bool(entries):
                raise self._error(
                    f": reset()[{name!r}] and the attribute {attribute} go together; one is missing"
                )
            if entries:
                self._tensor(f"reset()[{name!r}]", x := start[name], (self.n,), torch.int64)
                if int(x.min()) < 0 or int(x.max()) >= len(entries):
                    raise self._error(
                        f".reset()[{name!r}] runs from {int(x.min())} to {int(x.max())};"
                        f" {attribute} has {len(entries)} entries, 0 to {len(entries) - 1}"
                    )
        return dict(start)

    def before(self, s: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the state entries that ``reward`` reads from before the step."""
        if unknown := [k for k in self.task.before if k not in s]:
            raise self._error(
                f".before names {unknown[0]!r}, which is neither in the attribute `fields` nor a"
                " variable of the task; add it to `fields`, or return it from reset()"
            )
        return {k: s[k].clone() for k in self.task.before}

    def groups(self, s: Mapping[str, Tensor], names: Iterable[str]) -> Groups:
        """Return ``Task.privileged``, if there is one, and ``Task.groups()``.

        Those of ``names`` are validated on the first state ``s``.
        """
        with self._calling("groups"):
            groups: dict[str, Any] = dict(self.task.groups())
        if taken := {STATE, PRIVILEGED} & set(groups):
            raise self._error(f".groups()[{taken.pop()!r}] is another observation; rename it")
        if self.task.has_privileged():
            groups = {PRIVILEGED: self.task.privileged} | groups
        for name in set(names) & set(groups):
            label = PRIVILEGED if name == PRIVILEGED else f"groups()[{name!r}]"
            with self._calling(label):
                x = groups[name](s)
                shape = tuple(getattr(x, "shape", (0, 0)))
                self._tensor(f"{label}()", x, (self.n, *(shape[1:] or (0,))))
        return groups

    def carry_over(self, s: Mapping[str, Tensor], start: Mapping[str, Tensor], u: Tensor) -> bool:
        """Validate ``Task.carry_over`` on the first state ``s`` and the result of ``reset``.

        Return whether there is anything that it carries over.
        """
        with self._calling("carry_over"):
            self._variables("carry_over", values := self.task.carry_over(s, start, u), start)
        return bool(values)

    def _variables(
        self, function: str, values: Mapping[str, Any], start: Mapping[str, Tensor]
    ) -> None:
        """Check that entries are like those that ``reset`` returns."""
        for name, x in values.items():
            label = f"{function}()[{name!r}]"
            if name not in start:
                raise self._error(f".{label}: reset() returns no such variable; return it there")
            kind: Any = start[name].dtype
            is_cut = not kind.is_floating_point and isinstance(x, Tensor) and x.is_floating_point()
            # The results of ``advance`` are copied into the variables, which drops fractions only.
            kind = None if function == "advance" and not is_cut else kind
            self._tensor(label, x, tuple(start[name].shape), kind)

    def step(
        self,
        before: Mapping[str, Tensor],
        s: dict[str, Tensor],
        start: Mapping[str, Tensor],
        action: Tensor,
    ) -> None:
        """Validate all other functions on the first state ``s``, with the result of ``reset``."""
        task, n, nu = self.task, self.n, self.physics.model.nu
        self.state_names |= set(s)
        if not nu:
            raise self._error(": its model has no actuators; there is nothing to learn")
        action = action.to(self.physics.dtype)
        original = {k: x.clone() for k, x in s.items()}
        calls: list[tuple[str, tuple[Any, ...], tuple[int, ...], Any]] = [
            ("control", (s, action), (n, nu), "float"),
            ("reward", (before, s, action), (n,), "float"),
            ("terminated", (s,), (n,), torch.bool),
            ("success", (s,), (n,), torch.bool),
        ]
        for name, arguments, shape, kind in calls:
            with self._calling(name):
                x = getattr(task, name)(*arguments)
                if name != "success" or x is not None or type(task).success is not Task.success:
                    self._tensor(f"{name}()", x, shape, kind)
        with self._calling("reward_terms"):
            for name, x in task.reward_terms(before, s, action).items():
                self._tensor(f"reward_terms()[{name!r}]", x, (n,))
        with self._calling("advance"):
            values = task.advance(s, action, action.new_zeros(n, task.step_noise))
            variables = {k: x for k, x in start.items() if k not in INITIAL_FIELDS}
            self._variables("advance", values, variables)
        with self._calling("observe"):
            obs = task.observe(s)
            for name, x in (obs if isinstance(obs, dict) else {"": obs}).items():
                label, shape = f"observe(){f'[{name!r}]' if name else ''}", getattr(x, "shape", ())
                if name == "instruction":  # index into the task's sentences
                    self._tensor(label, x, (n,), torch.int64)
                elif len(shape) < 2:
                    raise self._error(f".{label} has shape {list(shape)}; it must be [{n}, D]")
                else:
                    self._tensor(label, x, (n, *shape[1:]), None)
        for name, x in original.items():
            if not torch.equal(x.nan_to_num(), s[name].nan_to_num()):
                raise self._error(f": a function writes into s[{name!r}]; compute a new tensor")
