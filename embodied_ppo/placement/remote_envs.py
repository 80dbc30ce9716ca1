"""Simulators in another process: the service that runs them, and its ``VectorEnv`` clients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from embodied_ppo.core import tree, watchdog
from embodied_ppo.core.types import (
    ActionSpec,
    ArraySpec,
    Box,
    Discrete,
    EnvError,
    Obs,
    ObsSpec,
    Step,
    VectorEnv,
)
from embodied_ppo.placement.channels import (
    Client,
    Message,
    as_tensor,
    deserialize_state,
    serialize_state,
)

FIELDS = (
    "obs",
    "reward",
    "terminated",
    "truncated",
    "mask",
    "final_obs",
    "success",
    "executed",
    "task",
)
"""Fields of a ``Step`` that are sent."""
TEXTS = ("task_names", "instructions")
"""Optional attributes of a simulator that are sequences of strings."""
NUMBERS = ("gripper_closes", "step_s")
"""Optional attributes of a simulator that are numbers."""


# ----------------------------------------------------------------------- in the simulators' process
class EnvService:
    """``RequestHandler`` that creates simulators and steps them."""

    def __init__(self, make: Callable[[str, list[int]], VectorEnv]) -> None:
        """Serve simulators.

        Args:
            make: (kind, seeds) -> simulators; kind is "train" or "evaluate".
        """
        self.make = make
        self.envs: dict[tuple[str, int], VectorEnv] = {}
        """(name of the caller, its target number) -> simulators."""

    def phase(self, method: str) -> str:
        """See ``RequestHandler``."""
        return "simulate"

    def handle(self, caller: str, request: Message) -> Message:
        """See ``RequestHandler``."""
        key = (caller, request.target)
        if request.method == "make":
            if key in self.envs:
                self.envs.pop(key).close()
            env = self.envs[key] = self.make(request.data["kind"], request.data["seeds"])
            return Message("make", request.target, describe_env(env))
        env = self.envs[key]
        with watchdog.stepping if request.method == "step" else watchdog.resetting:
            return self._call(env, key, request)

    def _call(self, env: VectorEnv, key: tuple[str, int], request: Message) -> Message:
        """Call one method of the simulators, and return its result."""
        data: dict[str, Any] = {}
        value: Any = None
        match request.method:
            case "step":
                step = env.step(as_tensor(request.value).to(env.device))
                value = {name: x for name in FIELDS if (x := getattr(step, name)) is not None}
            case "reset":
                value = {"obs": env.reset()}
            case "reset_where":
                value = {"obs": env.reset_where(as_tensor(request.value).to(env.device))}
            case "restart":
                env.restart(request.data["seeds"])
            case "state":
                value = serialize_state(env.state())
            case "load_state":
                value = {"obs": env.load_state(deserialize_state(request.value))}
            case "unstable":
                data["unstable"] = float(getattr(env, "unstable", 0))
            case "terrain_level":
                value = {"level": getattr(env, "terrain_level", None)}
            case "close":
                self.envs.pop(key).close()
            case method:
                raise AssertionError(method)
        return Message(request.method, request.target, data, value)

    def close(self) -> None:
        """Close all simulators."""
        for env in self.envs.values():
            env.close()
        self.envs.clear()


def describe_env(env: VectorEnv | EnvDescription) -> dict[str, Any]:
    """Return the spaces and optional attributes of simulators as plain JSON."""

    def array(spec: ArraySpec) -> list[Any]:
        return [list(spec.shape), str(spec.dtype).removeprefix("torch.")]

    obs, actions = env.obs_spec, env.action_spec
    optional = {name: getattr(env, name, None) for name in (*TEXTS, *NUMBERS)}
    return {
        "id": env.id,
        "max_episode_steps": env.max_episode_steps,
        "obs": array(obs) if isinstance(obs, ArraySpec) else {n: array(s) for n, s in obs.items()},
        "actions": (
            actions.n if isinstance(actions, Discrete) else [list(actions.low), list(actions.high)]
        ),
        **{
            name: list(value) if name in TEXTS else value
            for name, value in optional.items()
            if value is not None
        },
        "unstable": getattr(env, "unstable", None) is not None,
        "terrain_level": getattr(env, "terrain_level", None) is not None,
    }


# ------------------------------------------------------------------------- in the rollout's process
class EnvDescription:
    """The properties of simulators that a policy is built for, read from ``describe_env``."""

    def __init__(self, description: Mapping[str, Any], device: torch.device) -> None:
        """Parse a description.

        Args:
            description: What ``describe_env`` returned.
            device: Device of observations and actions in this process.
        """
        self.id: str = description["id"]
        self.device = device
        self.max_episode_steps: int | None = description["max_episode_steps"]

        def array(x: Any) -> ArraySpec:
            return ArraySpec(tuple(x[0]), getattr(torch, x[1]))

        obs, actions = description["obs"], description["actions"]
        self.obs_spec: ObsSpec = (
            {n: array(x) for n, x in obs.items()} if isinstance(obs, dict) else array(obs)
        )
        discrete = isinstance(actions, int)
        self.action_spec: ActionSpec = (
            Discrete(actions) if discrete else Box(*(tuple(bound) for bound in actions))
        )
        for name in description.keys() & {*TEXTS, *NUMBERS}:
            value = description[name]
            setattr(self, name, tuple(value) if name in TEXTS else value)


class _AsyncEnv(EnvDescription, ABC):
    """Simulators in other processes: a step in two halves, and no images for video."""

    @abstractmethod
    def send(self, action: Tensor) -> None:
        """Start a step without waiting for it."""

    @abstractmethod
    def receive(self) -> Step:
        """Return the result of the step that ``send`` started."""

    def step(self, action: Tensor) -> Step:
        """See ``VectorEnv``."""
        self.send(action)
        return self.receive()

    def render(self) -> Tensor:
        """Raise EnvError: the process that writes the report renders with its own simulators."""
        raise EnvError(
            f"env.id={self.id}: simulators in another process render no images for this one"
        )


class RemoteEnv(_AsyncEnv):
    """``VectorEnv`` whose simulators run in an ``EnvService`` of another process."""

    def __init__(
        self, client: Client, seeds: list[int], *, kind: str = "train", device: torch.device
    ) -> None:
        """Create the simulators in the other process.

        Args:
            client: Connection to the service.
            seeds: One seed per environment.
            kind: "train" or "evaluate".
            device: Device of observations in this process.

        Raises:
            ProcessLost: The other process has ended, or does not answer in time.
        """
        self.client, self.target, self.num_envs = client, client.new_target(), len(seeds)
        description = client.request("make", self.target, kind=kind, seeds=seeds).data
        super().__init__(description, device)
        self.counts_unstable: bool = description["unstable"]
        self.has_levels: bool = description["terrain_level"]

    def _obs(self, reply: Message) -> Any:
        """The observations of a reply, on this process's device."""
        assert isinstance(reply.value, dict)
        return tree.map(lambda x: x.to(self.device), reply.value["obs"])

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``; None where the simulator does not count."""
        if not self.counts_unstable:
            return None
        return torch.tensor(self.client.request("unstable", self.target).data["unstable"])

    @property
    def terrain_level(self) -> Tensor | None:
        """See ``VectorEnv``."""
        if not self.has_levels:
            return None
        reply = self.client.request("terrain_level", self.target).value
        assert isinstance(reply, dict)
        return reply["level"]

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        return self._obs(self.client.request("reset", self.target))

    def send(self, action: Tensor) -> None:
        """Start a step without waiting for it."""
        self.client.send("step", self.target, action)

    def receive(self) -> Step:
        """Return the result of the step that ``send`` started."""
        value = self.client.receive(self.target).value
        return Step(**tree.map(lambda x: x.to(self.device), value))  # pyright: ignore[reportCallIssue]

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        return self._obs(self.client.request("reset_where", self.target, where))

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        self.client.request("restart", self.target, seeds=seeds)

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``."""
        state = self.client.request("state", self.target).value
        return None if state is None else deserialize_state(state)

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``."""
        return self._obs(self.client.request("load_state", self.target, serialize_state(state)))

    def close(self) -> None:
        """Close the simulators in the other process."""
        self.client.request("close", self.target)


class ConcatenatedEnvs(_AsyncEnv):
    """Several ``RemoteEnv`` with equal spaces as one ``VectorEnv``; they step at the same time."""

    def __init__(self, envs: Sequence[RemoteEnv]) -> None:
        super().__init__(describe_env(envs[0]), envs[0].device)
        self.envs = list(envs)
        self.num_envs = sum(env.num_envs for env in self.envs)

    def _split(self, x: Any) -> tuple[Any, ...]:
        """Cut dimension 0 by simulators."""
        return x.split([env.num_envs for env in self.envs])

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``; None where the simulator does not count."""
        counts = [x for env in self.envs if (x := env.unstable) is not None]
        return torch.stack(counts).sum() if counts else None

    @property
    def terrain_level(self) -> Tensor | None:
        """See ``VectorEnv``."""
        levels = [x for env in self.envs if (x := env.terrain_level) is not None]
        return torch.cat(levels) if levels else None

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        return _concatenate([env.reset() for env in self.envs])

    def send(self, action: Tensor) -> None:
        """Start a step of all simulators without waiting for it."""
        for env, actions in zip(self.envs, self._split(action), strict=True):
            env.send(actions)

    def receive(self) -> Step:
        """Return the result of the step that ``send`` started."""
        steps = [env.receive() for env in self.envs]
        if any(step.final_obs is not None for step in steps):
            # A simulator may return final observations only where one of its episodes ended.
            steps = [
                replace(step, final_obs=step.obs) if step.final_obs is None else step
                for step in steps
            ]
        return _concatenate(steps)

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        obs = [
            env.reset_where(mask) for env, mask in zip(self.envs, self._split(where), strict=True)
        ]
        return None if obs[0] is None else _concatenate(obs)

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        for env in self.envs:
            env_seeds, seeds = seeds[: env.num_envs], seeds[env.num_envs :]
            env.restart(env_seeds)

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``."""
        states = [env.state() for env in self.envs]
        return None if states[0] is None else {"parts": states}

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``.

        Raises ValueError where the state is of another number of processes.
        """
        pairs = zip(self.envs, state["parts"], strict=True)
        return _concatenate([env.load_state(env_state) for env, env_state in pairs])

    def close(self) -> None:
        """Close all simulators."""
        for env in self.envs:
            env.close()


def _concatenate(values: Sequence[Any]) -> Any:
    """Concatenate the leaves along dimension 0."""
    return tree.map(lambda *xs: torch.cat(xs), values[0], *values[1:])
