"""Task validation: call each function of a task once, report mistakes with its name."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from embodied_envs.adapters.user_code import wrap_errors
from embodied_envs.physics.engine import INITIAL_FIELDS, Physics
from embodied_envs.tasks.task import Task
from embodied_ppo.core.types import EnvError


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
                attribute = "privileged_fields" if function == "privileged" else "fields"
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
                raise EnvError(f"{self.prefix}.{function} {message}") from error

    def _tensor(self, label: str, x: Any, shape: tuple[int, ...], kind: str = "real") -> None:
        """Raise EnvError unless ``x`` is a tensor of ``shape``.

        Its dtype must be of ``kind``: real, bool, int64 or any.
        """
        if not isinstance(x, Tensor):
            raise EnvError(
                f"{self.prefix}.{label} is {type(x).__name__}; it must be a tensor {list(shape)}"
            )
        if tuple(x.shape) != shape:
            raise EnvError(
                f"{self.prefix}.{label} has shape {list(x.shape)}; it must be {list(shape)}"
            )
        types = {
            "real": x.is_floating_point(),
            "bool": x.dtype == torch.bool,
            "int64": x.dtype == torch.int64,
        }
        if not types.get(kind, True):
            required = "a floating-point tensor" if kind == "real" else kind
            raise EnvError(f"{self.prefix}.{label} is {x.dtype}; it must be {required}")

    def start(self, reset: Callable[[], Any]) -> dict[str, Tensor]:
        """Return the validated result of ``reset``."""
        with self._calling("reset"):
            start = reset()
        if not isinstance(start, Mapping):
            raise EnvError(
                f"{self.prefix}.reset() is {type(start).__name__}; it must be a dictionary of"
                " tensors"
            )
        fields = self.physics.fields
        for name, x in start.items():
            label = f"reset()[{name!r}]"
            if name in INITIAL_FIELDS:
                self._tensor(label, x, tuple(fields[name].shape))
                if x.dtype != self.physics.dtype:
                    raise EnvError(
                        f"{self.prefix}.{label} is {x.dtype}; it must be {self.physics.dtype}, the"
                        " dtype that bind() gets"
                    )
                continue
            if name in fields:
                raise EnvError(
                    f"{self.prefix}: its variable {name!r} has the name of a MuJoCo field; rename"
                    " it"
                )
            if similar := difflib.get_close_matches(name, INITIAL_FIELDS, n=1, cutoff=0.8):
                raise EnvError(
                    f"{self.prefix}.{label} is not a MuJoCo field; did you mean {similar[0]!r}? If"
                    " it is a variable of your task, choose a less similar name"
                )
            self._tensor(label, x, (self.n, *getattr(x, "shape", (0,))[1:]), "any")
        for name, attribute in (("kind", "names"), ("instruction", "instructions")):
            entries: tuple[str, ...] = getattr(self.task, attribute)
            if (name in start) != bool(entries):
                raise EnvError(
                    f"{self.prefix}: reset()[{name!r}] and the attribute {attribute} go together;"
                    " one is missing"
                )
            if entries:
                self._tensor(f"reset()[{name!r}]", x := start[name], (self.n,), "int64")
                if int(x.min()) < 0 or int(x.max()) >= len(entries):
                    raise EnvError(
                        f"{self.prefix}.reset()[{name!r}] runs from {int(x.min())} to"
                        f" {int(x.max())}; {attribute} has {len(entries)} entries, 0 to"
                        f" {len(entries) - 1}"
                    )
        return dict(start)

    def before(self, s: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the state entries that ``reward`` reads from before the step."""
        if unknown := [k for k in self.task.before if k not in s]:
            raise EnvError(
                f"{self.prefix}.before names {unknown[0]!r}, which is neither in the attribute"
                " `fields` nor a variable of the task; add it to `fields`, or return it from"
                " reset()"
            )
        return {k: s[k].clone() for k in self.task.before}

    def privileged(self, s: Mapping[str, Tensor]) -> None:
        """Validate ``Task.privileged`` on the first state ``s``."""
        with self._calling("privileged"):
            x = self.task.privileged(s)
            self._tensor("privileged()", x, (self.n, *getattr(x, "shape", (0, 0))[1:2]))

    def groups(
        self, s: Mapping[str, Tensor], names: Iterable[str]
    ) -> Mapping[str, Callable[[Mapping[str, Tensor]], Tensor]]:
        """Return ``Task.groups()`` after validating those of ``names`` on the first state ``s``."""
        with self._calling("groups"):
            groups = self.task.groups()
        if taken := {"state", "privileged"} & set(groups):
            raise EnvError(
                f"{self.prefix}.groups()[{taken.pop()!r}]: the name is that of another observation;"
                " choose a different one"
            )
        for name in set(names) & set(groups):
            with self._calling(f"groups()[{name!r}]"):
                x = groups[name](s)
                shape = tuple(getattr(x, "shape", (0, 0)))
                self._tensor(f"groups()[{name!r}]", x, (self.n, *(shape[1:] or (0,))))
        return groups

    def carry_over(self, s: Mapping[str, Tensor], start: Mapping[str, Tensor], u: Tensor) -> None:
        """Validate ``Task.carry_over`` on the first state ``s`` and the result of ``reset``."""
        with self._calling("carry_over"):
            carried = self.task.carry_over(s, start, u)
            for name, x in carried.items():
                if name not in start:
                    raise EnvError(
                        f"{self.prefix}.carry_over()[{name!r}]: reset() returns no such entry;"
                        " return it from reset()"
                    )
                self._tensor(f"carry_over()[{name!r}]", x, tuple(start[name].shape), "any")
                if x.dtype != start[name].dtype:
                    raise EnvError(
                        f"{self.prefix}.carry_over()[{name!r}] is {x.dtype}; it must be"
                        f" {start[name].dtype}, as from reset()"
                    )

    def step(self, before: Mapping[str, Tensor], s: dict[str, Tensor], action: Tensor) -> None:
        """Validate all other functions on the first state ``s``."""
        task, n = self.task, self.n
        self.state_names |= set(s)
        if not self.physics.model.nu:
            raise EnvError(f"{self.prefix}: its model has no actuators; there is nothing to learn")
        action = action.to(self.physics.dtype)
        original = {k: x.clone() for k, x in s.items()}
        with self._calling("control"):
            self._tensor("control()", task.control(s, action), (n, self.physics.model.nu))
        with self._calling("reward"):
            self._tensor("reward()", task.reward(before, s, action), (n,))
        with self._calling("terminated"):
            self._tensor("terminated()", task.terminated(s), (n,), "bool")
        with self._calling("success"):
            success = task.success(s)
            if success is not None or type(task).success is not Task.success:
                self._tensor("success()", success, (n,), "bool")
        with self._calling("advance"):
            for name, x in task.advance(s, action, action.new_zeros(n, task.step_noise)).items():
                if name not in s or name in self.physics.fields:
                    raise EnvError(
                        f"{self.prefix}.advance()[{name!r}]: reset() returns no such variable;"
                        " return it from reset()"
                    )
                self._tensor(f"advance()[{name!r}]", x, tuple(s[name].shape), "any")
        with self._calling("observe"):
            obs = task.observe(s)
            parts: dict[str, Any] = dict(obs) if isinstance(obs, dict) else {"": obs}
            for name, x in parts.items():
                label = f"observe(){f'[{name!r}]' if name else ''}"
                shape: tuple[int, ...] = tuple(getattr(x, "shape", ()))
                if name == "instruction":  # index into the task's sentences
                    self._tensor(label, x, (n,), "int64")
                elif len(shape) < 2:
                    raise EnvError(
                        f"{self.prefix}.{label} has shape {list(shape)}; it must be [{n}, D]"
                    )
                else:
                    self._tensor(label, x, (n, *shape[1:]), "any")
        for name, x in original.items():
            if not torch.equal(x.nan_to_num(), s[name].nan_to_num()):
                raise EnvError(
                    f"{self.prefix}: a function writes into s[{name!r}]; let it compute a new"
                    " tensor"
                )
