"""Environments of an ``env_server`` in another process or on another machine."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import connect

from embodied_envs import env_server
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.gymnasium_env import GymnasiumEnv
from embodied_envs.base import watchdog
from embodied_envs.base.errors import EnvError, ProcessLost
from embodied_envs.base.observation_names import INSTRUCTION

# Address of the server, where env.kwargs.address names no other.
ADDRESS = "127.0.0.1:8001"
# Time limit of the connection and the greeting, seconds.
GREETING_S = 10.0


class RemoteVector(gymnasium.vector.VectorEnv):
    """Vector environment of Gymnasium whose steps are requests to an ``env_server``."""

    def __init__(self, id: str, address: str, num_envs: int, **kwargs: Any) -> None:
        """Connect and create the environments.

        Args:
            id: What the server must serve.
            address: HOST:PORT of the server.
            num_envs: Number of environments, N.
            kwargs: Arguments of the environments.

        Raises:
            EnvError: There is no such server, or it cannot create the environments.
            ProcessLost: The creation exceeds env.step_timeout_s.
        """
        self.prefix, self.num_envs = f"env.id={id}: {address}", num_envs
        hint = f"start python -m {env_server.__name__} {id}, or set env.kwargs.address=HOST:PORT"
        try:
            url = f"ws://{address}"
            self.connection = connect(
                url, open_timeout=GREETING_S, compression=None, max_size=None, proxy=None
            )
            hello = env_server.unpack(self.connection.recv(timeout=GREETING_S))
        except (OSError, EOFError, ValueError, WebSocketException) as error:
            raise EnvError(
                f"{hint}: env.id={id} finds no server of environments at {address}"
                f" ({type(error).__name__}: {error})"
            ) from error
        known = (env_server.PROTOCOL, env_server.VERSION, id)
        served = tuple(hello.get(name) for name in ("protocol", "version", "id"))
        if served != known:
            self.connection.close()
            if served[0] != env_server.PROTOCOL:
                raise EnvError(f"{hint}: {address} is no server of environments (of a policy?)")
            raise EnvError(
                f"{self.prefix} serves {' '.join(map(str, served))}; needed is"
                f" {' '.join(map(str, known))}"
            )
        made = self.ask("make", num_envs=num_envs, kwargs=kwargs)
        self.single_observation_space = env_server.decode_space(made["observation_space"])
        self.single_action_space = env_server.decode_space(made["action_space"])
        self.metadata = {
            "autoreset_mode": gymnasium.vector.AutoresetMode[made["autoreset_mode"]],
            "render_fps": made["render_fps"],
            "render_modes": made["render_modes"],
        }
        self.max_episode_steps: int | None = made["max_episode_steps"]
        self.partial_reset: bool = made["partial_reset"]
        self.instructions: tuple[str, ...] = tuple(made["instructions"])

    def ask(self, type: str, **data: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            EnvError: The simulator fails.
            ProcessLost: The server is gone, or does not answer in env.step_timeout_s.
        """
        limit = watchdog.numbers[watchdog.LIMIT]
        try:
            message = {"version": env_server.VERSION, "type": type, **data}
            self.connection.send(env_server.pack(message))
            timeout = limit if math.isfinite(limit) else None
            answer = env_server.unpack(self.connection.recv(timeout=timeout))
        except (TimeoutError, ConnectionClosed) as error:
            reason = f"does not answer in {limit:g} s (env.step_timeout_s)"
            if isinstance(error, ConnectionClosed):
                reason = f"closed the connection ({error})"
            raise ProcessLost(
                f"{self.prefix} {reason} at {type}; restart the server, then resume continues from"
                " the last checkpoint"
            ) from error
        if "error" in answer:
            raise EnvError(f"{self.prefix}: {type} fails: {answer['error']}")
        return answer

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in all environments."""
        answer = self.ask("reset", seed=seed, options=options)
        return answer["obs"], answer["info"]

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Execute an action in every environment."""
        answer = self.ask("step", action=actions)
        final = answer["info"].get("final_obs")
        if isinstance(final, list):
            answer["info"]["final_obs"] = np.fromiter(final, dtype=object, count=len(final))
        return tuple(answer[k] for k in ("obs", "reward", "terminated", "truncated", "info"))

    def render(self) -> Any:
        """Return the image, or the images of all environments."""
        return self.ask("render")["image"]

    def close(self, **kwargs: Any) -> None:
        """End the connection, with which the server closes the environments."""
        self.connection.close()


class ServerEnv(GymnasiumEnv):
    """``GymnasiumEnv`` of the environments of an ``env_server`` at env.kwargs.address."""

    def __init__(self, id: str, options: AdapterOptions) -> None:
        kwargs = dict(options.kwargs or {})
        make = functools.partial(RemoteVector, id, kwargs.pop("address", ADDRESS))
        spec = EnvSpec("Remote-v0", vector_entry_point=make)
        super().__init__(id, replace(options, kwargs=kwargs), spec=spec)
        vector: RemoteVector = self._env.unwrapped
        self._has_own_vector = not vector.partial_reset
        self.max_episode_steps = options.max_episode_steps or vector.max_episode_steps
        if vector.instructions and INSTRUCTION in self.leaves:
            self._observe_sentences(vector.instructions, lambda obs: obs[INSTRUCTION])
