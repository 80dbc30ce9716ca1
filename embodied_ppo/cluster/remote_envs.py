"""Simulators in other processes: the service that runs them, and its ``VectorEnv`` client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree, watchdog
from embodied_envs.base.errors import EnvError
from embodied_envs.base.images import ImageLayout
from embodied_envs.types import ArraySpec, Box, Composite, Discrete, EnvInfo, Obs, Step, VectorEnv
from embodied_ppo.cluster import channels
from embodied_ppo.cluster.channels import Client, Message, as_tensor, serialize_state

# Fields of a ``Step``, which are sent.
FIELDS = tuple(field.name for field in fields(Step))
# Classes of the description of simulators that is sent.
SPACE_TYPES: list[Any] = [EnvInfo, ArraySpec, ImageLayout, Box, Composite, Discrete]


# ----------------------------------------------------------------------- in the simulators' process
class EnvService:
    """``RequestHandler`` that creates simulators and steps them."""

    def __init__(self, make: Callable[[str, list[int]], VectorEnv]) -> None:
        """Serve simulators.

        Args:
            make: (kind, seeds) -> simulators; kind is "train" or "evaluate".
        """
        self.make = make
        # (name of the caller, its target number) -> simulators.
        self.envs: dict[tuple[str, int], VectorEnv] = {}

    def phase(self, method: str) -> str:
        """See ``RequestHandler``."""
        return "simulate"

    def handle(self, caller: str, request: Message) -> Message:
        """See ``RequestHandler``."""
        key = (caller, request.target)
        if request.method == "make":
            # A second "make" of one target replaces the simulators, after an evaluation for
            # instance.
            if key in self.envs:
                self.envs.pop(key).close()
            env = self.envs[key] = self.make(request.data["kind"], request.data["seeds"])
            return Message("make", request.target, value=serialize_state({"info": env.info}))
        # All other methods require simulators that this caller has made.
        env = self.envs[key]
        value: Any = None
        # If the call hangs, the message of the time limit names step() or reset().
        with watchdog.stepping if request.method == "step" else watchdog.resetting:
            match request.method:
                case "step":
                    step = env.step(as_tensor(request.value).to(env.device))
                    # Fields that are None are not sent; ``Step`` has None as their default.
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
                    value = {"obs": env.load_state(channels.deserialize_state(request.value))}
                case "unstable":
                    value = env.unstable
                case "terrain_level":
                    value = env.terrain_level
                case "close":
                    self.envs.pop(key).close()
                case method:
                    raise AssertionError(method)
        return Message(request.method, request.target, value=value)

    def close(self) -> None:
        """Close all simulators."""
        for env in self.envs.values():
            env.close()
        self.envs.clear()


# ------------------------------------------------------------------------- in the rollout's process
class RemoteEnv(VectorEnv):
    """``VectorEnv`` whose simulators run in the ``EnvService`` of other processes, in equal parts.

    A step has two halves: all processes receive their actions before a result is awaited, so that
    they simulate at the same time.
    """

    is_asynchronous = True

    def __init__(
        self,
        clients: Sequence[Client],
        seeds: list[int],
        *,
        kind: str = "train",
        device: torch.device,
    ) -> None:
        """Create the simulators in the other processes.

        Args:
            clients: Connections to the services.
            seeds: One seed per environment; in their order each process has an equal part.
            kind: "train" or "evaluate".
            device: Device of observations in this process.

        Raises:
            ProcessLost: Another process has ended, or does not answer in time.
        """
        # The target number distinguishes the simulators that share one connection.
        self.services = [(client, client.new_target()) for client in clients]
        self.num_envs, self.part = len(seeds), len(seeds) // len(clients)
        parts = [{"kind": kind, "seeds": part} for part in self._split(seeds)]
        # The description replaces attributes of the simulators, which run the same task.
        described = self._request("make", parts)[0]
        with torch.serialization.safe_globals(SPACE_TYPES):
            info = replace(channels.deserialize_state(described)["info"], device=device)
        self.copy_info(info)
        # With these flags, no request is sent for numbers that the simulator does not have.
        self.counts_unstable, self.has_levels = info.counts_unstable, info.has_levels

    def _split(self, x: Any) -> list[Any]:
        """Return the parts of all processes of a value for each environment."""
        return [x[i : i + self.part] for i in range(0, self.num_envs, self.part)]

    def _send(self, method: str, parts: Sequence[dict[str, Any]] = ()) -> None:
        """Send a request to all processes, to each with its arguments of ``Client.send``."""
        for i, (client, target) in enumerate(self.services):
            client.send(method, target, **(parts[i] if parts else {}))

    def _receive(self) -> list[Any]:
        """Wait for the replies of all processes and return their values, on the CPU."""
        return [client.receive(target).value for client, target in self.services]

    def _request(self, method: str, parts: Sequence[dict[str, Any]] = ()) -> list[Any]:
        """Send a request to all processes, and return their replies."""
        self._send(method, parts)
        return self._receive()

    def _join(self, values: Sequence[Any]) -> Any:
        """Concatenate the parts of all processes, on this process's device."""
        join = lambda *xs: (xs[0] if len(xs) == 1 else torch.cat(xs)).to(self.device)
        return tree.map(join, *values)

    def _joined_obs(self, replies: Sequence[Any]) -> Any:
        """Return the observations of all processes; None where they cannot reset single rows."""
        return self._join([reply["obs"] for reply in replies])

    @property
    def unstable(self) -> Tensor | None:
        """See ``VectorEnv``; None where the simulator does not count."""
        return torch.stack(self._request("unstable")).sum() if self.counts_unstable else None

    @property
    def terrain_level(self) -> Tensor | None:
        """See ``VectorEnv``."""
        return torch.cat(self._request("terrain_level")) if self.has_levels else None

    def reset(self) -> Obs:
        """See ``VectorEnv``."""
        return self._joined_obs(self._request("reset"))

    def step(self, action: Tensor) -> Step:
        """See ``VectorEnv``."""
        # A pipelined rollout calls the two halves itself and computes in between.
        self.send(action)
        return self.receive()

    def send(self, action: Tensor) -> None:
        """Start a step of all simulators without waiting for it."""
        self._send("step", [{"value": part} for part in self._split(action)])

    def receive(self) -> Step:
        """Return the result of the step that ``send`` started."""
        values = self._receive()
        # Infos may have other names in each process, so they are joined by name.
        infos = [value.pop("info", {}) for value in values]
        # A process may lack final observations (no episode ended) and success (no info had it yet).
        no, keys = torch.zeros(self.part, dtype=torch.bool), {k for x in values for k in x}
        values = [{k: x.get(k, x["obs"] if k == "final_obs" else no) for k in keys} for x in values]
        info = infos[0] if len(infos) == 1 else _join_infos(infos, self.part)
        return Step(**self._join(values), info=self._join([info]) or None)

    def reset_where(self, where: Tensor) -> Obs | None:
        """See ``VectorEnv``."""
        parts = [{"value": part} for part in self._split(where)]
        return self._joined_obs(self._request("reset_where", parts))

    def restart(self, seeds: list[int]) -> None:
        """See ``VectorEnv``."""
        self._request("restart", [{"seeds": part} for part in self._split(seeds)])

    def state(self) -> dict[str, Any] | None:
        """See ``VectorEnv``; the state of several processes is a list."""
        states = self._request("state")
        if any(state is None for state in states):
            return None
        states = [channels.deserialize_state(state) for state in states]
        return states[0] if len(states) == 1 else {"parts": states}

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        """See ``VectorEnv``.

        Raises ValueError where the state is of another number of processes.
        """
        pairs = zip(self.services, state.get("parts", [state]), strict=True)
        parts = [{"value": serialize_state(part)} for _, part in pairs]
        return self._joined_obs(self._request("load_state", parts))

    def render(self) -> Tensor:
        """Raise EnvError: the process that writes the report renders with its own simulators."""
        raise EnvError(
            f"env.id={self.id}: simulators in another process render no images for this one"
        )

    def close(self) -> None:
        """Close the simulators in the other processes."""
        self._request("close")


def _join_infos(infos: Sequence[Mapping[str, Tensor]], rows: int) -> dict[str, Tensor]:
    """Concatenate the infos of processes with ``rows`` environments each."""
    joined: dict[str, Tensor] = {}
    # Keep the order in which names first appear.
    for name in dict.fromkeys(name for info in infos for name in info):
        parts = [info.get(name) for info in infos]
        given = [x.float() for x in parts if x is not None]  # NaN needs floats
        # One value per environment in one process: fill up the others with NaN.
        if any(len(x) == rows for x in given):
            empty = torch.full((rows, *given[0].shape[1:]), torch.nan)
            given = [empty if x is None or len(x) != rows else x.float() for x in parts]
        joined[name] = torch.cat(given)
    return joined
