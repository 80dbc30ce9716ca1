"""Serve the policy of a run to robots and simulators over websockets: `embodied-ppo serve`.

The protocol is that of openpi, so that its client package works unchanged
(github.com/Physical-Intelligence/openpi, docs/remote_inference.md and packages/openpi-client). Each
message is a msgpack map, see ``embodied_envs.env_server``:

    server -> client  once: the metadata, see ``Served.metadata``
    client -> server  observations by the names of the metadata, and "prompt"; "reset": true where
                      an episode starts
    server -> client  {"actions": [C, A], "policy_timing": .., "server_timing": ..} in milliseconds

A refused request is answered with one line as a text message, which openpi's client raises as
RuntimeError. The connection stays open.
"""

from __future__ import annotations

import copy
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from embodied_envs.base import tree
from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError, choose, one_line
from embodied_envs.base.observation_names import INSTRUCTION
from embodied_envs.env_server import listen, pack, unpack
from embodied_envs.types import Box, Discrete, Say
from embodied_ppo.core.version import __version__
from embodied_ppo.evaluation.episodes import policy_device, set_instructions
from embodied_ppo.evaluation.trained_policy import TrainedPolicy

VERSION = 1  # version of the metadata; it changes when an entry changes its meaning
PREFIX, PROMPT, RESET = "observation/", "prompt", "reset"
LONGEST_PROMPT = 1000  # largest length of a prompt, characters
REFUSED = (EnvError, CheckpointError, ConfigError, ValueError)


class Input(NamedTuple):
    """An array of an observation.

    Attributes:
        entry: Name in the policy's observations; "" if they are one array.
        shape, dtype: What the client sends: the channels of an image are last.
        channels_first: Whether the policy reads an image with the channels in front.
    """

    entry: str
    shape: tuple[int, ...]
    dtype: np.dtype
    channels_first: bool

    def read(self, name: str, value: Any) -> np.ndarray:
        """Return a client's array as the policy reads it. Raises EnvError for another one."""
        x = np.asarray(value) if isinstance(value, np.ndarray | np.generic | float | int) else None
        fits = x is not None and x.shape == self.shape and x.dtype.kind in "biuf"
        if x is None or not fits or (self.dtype == np.uint8 and x.dtype != np.uint8):
            actual = type(value).__name__ if x is None else f"{x.dtype} {list(x.shape)}"
            raise EnvError(f"send {self.dtype} {list(self.shape)} as {name}: it is {actual}")
        x = np.moveaxis(x, -1, 0) if self.channels_first else x
        return np.array(x, dtype=self.dtype, order="C")  # a number keeps its shape ()


class Served:
    """A policy of a run as a server needs it.

    Attributes:
        inputs: Name for the client -> array.
        has_prompt: Whether the policy reads a sentence.
        metadata: Sent to each client: the observations and actions with shape, dtype and bounds.
    """

    def __init__(self, policy: TrainedPolicy, names: Mapping[str, str]) -> None:
        """Describe the policy.

        Args:
            policy: The policy.
            names: The client's name -> name of an observation, where it is not ``PREFIX`` and that.

        Raises:
            ConfigError: ``names`` has an observation that the policy does not read.
        """
        self.policy, self.chunk = policy, policy.config.env.action_chunk
        specs = dict(tree.named(policy.obs_spec))
        # Other policies read the index of the sentence, a number like others.
        reads_sentences = hasattr(policy.network, "set_sentences")
        self.has_prompt = reads_sentences and specs.pop(INSTRUCTION, None) is not None
        own = {entry: PREFIX + (entry or "state") for entry in specs}
        given = {entry.removeprefix(PREFIX): name for name, entry in names.items()}
        if set(specs) == {""} and "state" in given:
            given[""] = given.pop("state")
        if unknown := [entry for entry in given if entry not in own]:
            known = [name.removeprefix(PREFIX) for name in own.values()]
            hint = choose(unknown[0], known, "choose one of ")
            raise ConfigError(f"--map NAME={unknown[0]}: the policy has no such input; {hint}")
        own |= given
        if len({*own.values(), RESET, PROMPT}) < len(own) + 2:
            raise ConfigError(
                f"give each input a name of its own, other than {RESET} and {PROMPT}:"
                f" --map names them {', '.join(own.values())}"
            )
        self.inputs = {}
        for entry, spec in specs.items():
            shape, first = tuple(spec.shape), spec.layout is not None and spec.layout.order == "CHW"
            shape = (*shape[1:], shape[0]) if first else shape
            dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
            self.inputs[own[entry]] = Input(entry, shape, dtype, first)
        described: dict[str, Any] = {
            name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in self.inputs.items()
        }
        if self.has_prompt:
            described[PROMPT] = {"dtype": "str"}
        spec, device = policy.action_spec, policy_device(policy.network)
        zero = torch.zeros(1, *(() if isinstance(spec, Discrete) else (spec.size,)), device=device)
        arrays: Any = policy.to_simulator(zero.long() if isinstance(spec, Discrete) else zero)
        arrays = tree.index(arrays, 0) if self.chunk > 1 else arrays
        actions = tree.map(lambda x: {"shape": [*x.shape], "dtype": str(x.dtype)[6:]}, arrays)
        if isinstance(spec, Box) and isinstance(arrays, torch.Tensor):
            size = spec.size // self.chunk  # the bounds of a chunk repeat those of one action
            actions |= {"low": list(spec.low[:size]), "high": list(spec.high[:size])}
        self.metadata = {
            "version": VERSION,
            "server": f"embodied-ppo {__version__}",
            "task": policy.config.env.title,
            "observations": described,
            "actions": actions,
            "step_s": None if policy.step_s is None else policy.step_s / self.chunk,
            "has_memory": policy.has_memory,
        }

    def session(self) -> TrainedPolicy:
        """Return the policy with a memory of its own; the network is shared."""
        policy = copy.copy(self.policy)
        policy.reset()
        return policy

    def read(self, message: Mapping[str, Any]) -> tuple[Any, str | None]:
        """Return the observation of a request and its prompt. Raises EnvError."""
        needed = [*self.inputs, *([PROMPT] if self.has_prompt else [])]
        if missing := [name for name in needed if name not in message]:
            spec = self.metadata["observations"][missing[0]]
            raise EnvError(
                f"send {missing[0]} ({spec['dtype']} {spec.get('shape', '')}): the request has"
                f" {', '.join(str(name)[:40] for name in list(message)[:8]) or 'nothing'}"
            )
        if not isinstance(message.get(RESET, False), bool | np.bool_):
            raise EnvError(f"send a boolean as {RESET}, or leave it out")
        prompt = message.get(PROMPT) if self.has_prompt else None
        if self.has_prompt and not (isinstance(prompt, str) and 0 < len(prompt) <= LONGEST_PROMPT):
            raise EnvError(f"send a text of 1 to {LONGEST_PROMPT} characters as {PROMPT}")
        arrays = {x.entry: x.read(name, message[name]) for name, x in self.inputs.items()}
        return (arrays[""] if set(arrays) == {""} else arrays), prompt

    def act(self, session: TrainedPolicy, obs: Any, prompt: str | None) -> Any:
        """Return actions [C, A], or choices [C]."""
        obs = tree.map(torch.as_tensor, obs)
        if prompt is not None:
            set_instructions(session.network, (prompt,))
            obs = {**obs, INSTRUCTION: torch.tensor(0)}
        return tree.map(lambda x: np.asarray(x if self.chunk > 1 else x[None]), session.act(obs))


# ------------------------------------------------------------------------------------------ server
def serve(policy: Served, *, host: str, port: int, say: Say) -> AbstractContextManager[Any]:
    """Return the server of a policy, which answers until the block ends.

    Several clients are answered one after the other; each has its own memory.
    """
    one_at_a_time = threading.Lock()

    def handler(connection: Any) -> None:
        session, previous_s = policy.session(), 0.0
        client = connection.remote_address[0]
        say(f"{client} connected")
        connection.send(pack(policy.metadata))
        for data in connection:
            start = time.perf_counter()
            try:
                if isinstance(data, str):
                    raise EnvError("send a msgpack map as bytes, not text")
                message = unpack(data)
                obs, prompt = policy.read(message)
                if message.get(RESET):
                    session.reset()
                with one_at_a_time:
                    began = time.perf_counter()
                    actions = policy.act(session, obs, prompt)
                    infer_ms = 1000 * (time.perf_counter() - began)
                timing = {"infer_ms": infer_ms}
                if previous_s:
                    timing["prev_total_ms"] = 1000 * previous_s
                answer = {"actions": actions, "policy_timing": {"infer_ms": infer_ms}}
                connection.send(pack({**answer, "server_timing": timing}))
            except REFUSED as error:
                connection.send(one_line(error))
            except RuntimeError as error:  # of torch, memory for instance
                traceback.print_exception(error)
                connection.send(one_line(error, kind=True))
            previous_s = time.perf_counter() - start
        say(f"{client} left")

    return listen(handler, host, port)
