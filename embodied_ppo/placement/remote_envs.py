"""Simulators in another process: what serves them there, and the ``VectorEnv`` that asks for them here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.core import tree, watchdog
from embodied_ppo.core.types import ActionSpec, ArraySpec, Box, Discrete, EnvError, Obs, ObsSpec, Step, VectorEnv
from embodied_ppo.placement.channels import Desk, Message, as_tensor, frozen, thawed

FIELDS = ("obs", "reward", "terminated", "truncated", "mask", "final_obs", "success", "executed", "task")
"""Of a ``Step``."""
WORDS = ("task_names", "instructions")
NUMBERS = ("gripper_closes", "step_s")
"""What a simulator may tell besides the protocol."""


# --------------------------------------------------------------------------------------------------------------- there
class Simulators:
    """Makes simulators and steps them."""

    def __init__(self, make: Callable[[str, list[int]], VectorEnv]) -> None:
        """``make``: what kind ("train", "evaluate") and the seeds -> simulators."""
        self.make = make
        self.envs: dict[tuple[str, int], VectorEnv] = {}
        """By who asked for them and the number they gave them."""

    def phase(self, word: str) -> str:
        return "simulate"

    def answer(self, who: str, m: Message) -> Message:
        """See ``Answering``."""
        key = (who, m.to)
        if m.word == "make":
            if key in self.envs:
                self.envs.pop(key).close()
            env = self.envs[key] = self.make(m.facts["kind"], m.facts["seeds"])
            return Message("made", m.to, described(env))
        env = self.envs[key]
        with watchdog.stepping if m.word == "step" else watchdog.resetting:
            return self._call(env, key, m)

    def _call(self, env: VectorEnv, key: tuple[str, int], m: Message) -> Message:
        facts: dict[str, Any] = {}
        value: Any = None
        match m.word:
            case "step":
                step = env.step(as_tensor(m.value).to(env.device))
                value = {name: x for name in FIELDS if (x := getattr(step, name)) is not None}
            case "reset":
                value = {"obs": env.reset()}
            case "reset_where":
                value = {"obs": env.reset_where(as_tensor(m.value).to(env.device))}
            case "restart":
                env.restart(m.facts["seeds"])
            case "state":
                value = frozen(env.state())
            case "load_state":
                value = {"obs": env.load_state(thawed(m.value))}
            case "unstable":
                facts["unstable"] = float(getattr(env, "unstable", 0))
            case "close":
                self.envs.pop(key).close()
            case word:
                raise AssertionError(word)
        return Message(m.word, m.to, facts, value)

    def close(self) -> None:
        for env in self.envs.values():
            env.close()
        self.envs.clear()


def described(env: VectorEnv | Described) -> dict[str, Any]:
    """Its spaces and what else it tells, as plain JSON."""

    def array(spec: ArraySpec) -> list[Any]:
        return [list(spec.shape), str(spec.dtype).removeprefix("torch.")]

    obs, actions = env.obs_spec, env.action_spec
    told: dict[str, Any] = {"id": env.id, "max_episode_steps": env.max_episode_steps}
    told["obs"] = array(obs) if isinstance(obs, ArraySpec) else {name: array(s) for name, s in obs.items()}
    told["actions"] = actions.n if isinstance(actions, Discrete) else [list(actions.low), list(actions.high)]
    told |= {name: list(found) for name in WORDS if (found := getattr(env, name, None)) is not None}
    told |= {name: found for name in NUMBERS if (found := getattr(env, name, None)) is not None}
    return told | {"unstable": getattr(env, "unstable", None) is not None}


# ---------------------------------------------------------------------------------------------------------------- here
class Described:
    """What ``described`` told of simulators: all that a policy is made for."""

    def __init__(self, told: Mapping[str, Any], device: torch.device) -> None:
        self.id: str = told["id"]
        self.device = device
        self.max_episode_steps: int | None = told["max_episode_steps"]

        def array(x: Any) -> ArraySpec:
            return ArraySpec(tuple(x[0]), getattr(torch, x[1]))

        obs, actions = told["obs"], told["actions"]
        self.obs_spec: ObsSpec = {n: array(x) for n, x in obs.items()} if isinstance(obs, dict) else array(obs)
        discrete = isinstance(actions, int)
        self.action_spec: ActionSpec = Discrete(actions) if discrete else Box(*(tuple(bound) for bound in actions))
        for name in WORDS:
            if name in told:
                setattr(self, name, tuple(told[name]))
        for name in NUMBERS:
            if name in told:
                setattr(self, name, told[name])


class _Elsewhere(Described, ABC):
    """What simulators in other processes have in common: a step in two halves, and no pictures."""

    @abstractmethod
    def send(self, action: Tensor) -> None:
        """Begin a step."""

    @abstractmethod
    def receive(self) -> Step:
        """End it."""

    def step(self, action: Tensor) -> Step:
        """See ``VectorEnv``."""
        self.send(action)
        return self.receive()

    def render(self) -> Tensor:
        """Raises EnvError: a film is made in the process that writes the report, by simulators of its own."""
        raise EnvError(f"env.id={self.id}: simulators in another process draw no pictures for this one")


class RemoteEnv(_Elsewhere):
    """Simulators of a ``Server``, as a ``VectorEnv``; ``send`` and ``receive`` are ``step`` in two halves."""

    def __init__(self, desk: Desk, seeds: list[int], *, kind: str = "train", device: torch.device) -> None:
        """One environment per seed. Raises TrainingError where the other process is gone."""
        self.desk, self.to, self.num_envs = desk, desk.number(), len(seeds)
        told = desk.ask("make", self.to, kind=kind, seeds=seeds).facts
        super().__init__(told, device)
        self.counts_unstable: bool = told["unstable"]

    def _obs(self, m: Message) -> Any:
        assert isinstance(m.value, dict)
        return tree.map(lambda x: x.to(self.device), m.value["obs"])

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``; None where the simulator does not count."""
        if not self.counts_unstable:
            return None
        return torch.tensor(self.desk.ask("unstable", self.to).facts["unstable"])

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        return self._obs(self.desk.ask("reset", self.to))

    def send(self, action: Tensor) -> None:
        """Begin a step."""
        self.desk.send("step", self.to, action)

    def receive(self) -> Step:
        """End it."""
        value = self.desk.receive(self.to).value
        return Step(**tree.map(lambda x: x.to(self.device), value))  # pyright: ignore[reportCallIssue]

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        return self._obs(self.desk.ask("reset_where", self.to, where))

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        self.desk.ask("restart", self.to, seeds=seeds)

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``."""
        found = self.desk.ask("state", self.to).value
        return None if found is None else thawed(found)

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``."""
        return self._obs(self.desk.ask("load_state", self.to, frozen(state)))

    def close(self) -> None:
        self.desk.ask("close", self.to)


class Joined(_Elsewhere):
    """Equal simulators side by side as one ``VectorEnv``; they work at the same time."""

    def __init__(self, envs: Sequence[RemoteEnv]) -> None:
        super().__init__(described(envs[0]), envs[0].device)
        self.envs = list(envs)
        self.num_envs = sum(env.num_envs for env in self.envs)

    def _split(self, x: Any) -> tuple[Any, ...]:
        return x.split([env.num_envs for env in self.envs])

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``; None where the simulator does not count."""
        counts = [x for env in self.envs if (x := env.unstable) is not None]
        return torch.stack(counts).sum() if counts else None

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        return _beside([env.reset() for env in self.envs])

    def send(self, action: Tensor) -> None:
        """Begin a step."""
        for env, part in zip(self.envs, self._split(action), strict=True):
            env.send(part)

    def receive(self) -> Step:
        """End it."""
        return _beside([env.receive() for env in self.envs])

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        parts = [env.reset_where(part) for env, part in zip(self.envs, self._split(where), strict=True)]
        return None if parts[0] is None else _beside(parts)

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        for env in self.envs:
            mine, seeds = seeds[: env.num_envs], seeds[env.num_envs :]
            env.restart(mine)

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``."""
        parts = [env.state() for env in self.envs]
        return None if parts[0] is None else {"parts": parts}

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``. Raises ValueError where it is of another number of processes."""
        return _beside([env.load_state(part) for env, part in zip(self.envs, state["parts"], strict=True)])

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _beside(parts: Sequence[Any]) -> Any:
    return tree.map(lambda *xs: torch.cat(xs), parts[0], *parts[1:])
