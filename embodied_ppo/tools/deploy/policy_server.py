"""Serve a policy to robots and simulators over websockets: `embodied-ppo serve`.

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
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from embodied_envs.base import tree
from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError, choose, one_line
from embodied_envs.base.images import ImageLayout, decide
from embodied_envs.base.observation_names import INSTRUCTION
from embodied_envs.env_server import listen, pack, unpack
from embodied_envs.types import ArraySpec, Box
from embodied_ppo.core.version import __version__
from embodied_ppo.evaluation.episodes import set_instructions
from embodied_ppo.evaluation.trained_policy import TrainedPolicy, load_policy
from embodied_ppo.tools.deploy import run_policy

VERSION = 1
"""Version of the metadata; it changes when an entry changes its meaning."""
PREFIX, PROMPT, RESET = "observation/", "prompt", "reset"
LONGEST_PROMPT = 1000
"""Largest length of a prompt, characters."""
REFUSED = (EnvError, CheckpointError, ConfigError, run_policy.BundleError, ValueError)


@dataclass(frozen=True)
class Input:
    """An array of an observation.

    Attributes:
        entry: Name in the policy's observations; "" if they are one array.
        shape, dtype: What the client sends: the channels of an image are last.
        layout: How the policy reads it as an image; None: it is a vector.
    """

    entry: str
    shape: tuple[int, ...]
    dtype: np.dtype
    layout: ImageLayout | None

    @classmethod
    def of(cls, entry: str, spec: ArraySpec) -> Input:
        """Return the array that a client sends for an entry of the policy's observations."""
        dtype = torch.empty(0, dtype=spec.dtype).numpy().dtype
        shape, layout = tuple(spec.shape), spec.layout
        if layout is not None and layout.order == "CHW":
            shape = (*shape[1:], shape[0])
        return cls(entry, shape, dtype, layout)

    def read(self, name: str, value: Any) -> np.ndarray:
        """Return a client's array as the policy reads it. Raises EnvError for another one."""
        expected = f"{self.dtype} {list(self.shape)}"
        x = np.asarray(value) if isinstance(value, np.ndarray | np.generic | float | int) else None
        fits = x is not None and x.shape == self.shape and x.dtype.kind in "biuf"
        if x is None or not fits or (self.dtype == np.uint8 and x.dtype != np.uint8):
            actual = type(value).__name__ if x is None else f"{x.dtype} {list(x.shape)}"
            raise EnvError(f"send {expected} as {name}: it is {actual}")
        if self.layout is not None and self.layout.order == "CHW":
            x = np.moveaxis(x, -1, 0)
        return np.ascontiguousarray(x, dtype=self.dtype)


class Served:
    """A policy of a run or of a bundle, as a server needs it.

    Attributes:
        inputs: Name for the client -> array.
        has_prompt: Whether the policy reads a sentence.
        metadata: Sent to each client: the observations and actions with shape, dtype and bounds.
    """

    def __init__(
        self,
        specs: Mapping[str, ArraySpec],
        *,
        task: str,
        actions: Mapping[str, Any],
        step_s: float | None,
        has_memory: bool,
        names: Mapping[str, str],
        session: Callable[[], Any],
    ) -> None:
        """Describe the policy.

        Args:
            specs: Its observations; one array has the name "".
            task: Task of the training.
            actions: Entry "actions" of the metadata.
            step_s: Control period, seconds.
            has_memory: Whether actions depend on earlier steps of the episode.
            names: The client's name -> name of an observation, where it is not ``PREFIX`` and that.
            session: Returns a policy with a memory of its own, with ``act`` and ``reset``.

        Raises:
            ConfigError: ``names`` has an observation that the policy does not read.
        """
        specs = dict(specs)
        self.has_prompt = specs.pop(INSTRUCTION, None) is not None
        own = {entry: PREFIX + (entry or "state") for entry in specs}
        given = {entry.removeprefix(PREFIX): name for name, entry in names.items()}
        if set(specs) == {""} and "state" in given:
            given[""] = given.pop("state")
        for entry in given:
            if entry not in own:
                known = [name.removeprefix(PREFIX) for name in own.values()]
                hint = choose(entry, known, "choose one of ")
                raise ConfigError(f"--map NAME={entry}: the policy has no such input; {hint}")
        own |= given
        if len({*own.values(), RESET, PROMPT}) < len(own) + 2:
            raise ConfigError(
                f"give each input a name of its own, other than {RESET} and {PROMPT}:"
                f" --map names them {', '.join(own.values())}"
            )
        self.inputs = {own[entry]: Input.of(entry, spec) for entry, spec in specs.items()}
        self.session = session
        described: dict[str, Any] = {
            name: {"shape": list(x.shape), "dtype": str(x.dtype)} for name, x in self.inputs.items()
        }
        if self.has_prompt:
            described[PROMPT] = {"dtype": "str"}
        self.metadata = {
            "version": VERSION,
            "server": f"embodied-ppo {__version__}",
            "task": task,
            "observations": described,
            "actions": dict(actions),
            "step_s": step_s,
            "has_memory": has_memory,
        }

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


# ---------------------------------------------------------------------------------------- policies
def open_policy(path: str, names: Mapping[str, str], device: str = "cpu") -> Served:
    """Return the policy of a run, a checkpoint or a bundle.

    Args:
        path: Its directory.
        names: See ``Served``.
        device: Device of a run's policy.

    Raises:
        CheckpointError, ConfigError, EnvError: It cannot be used.
    """
    if (Path(path) / "policy.json").is_file():
        return _of_bundle(path, names)
    policy = load_policy(path, device=device)
    chunk, spec = policy.config.env.action_chunk, policy.action_spec
    actions: dict[str, Any] = {"shape": [chunk], "dtype": "int64"}
    if isinstance(spec, Box):
        size = spec.size // chunk  # the bounds of a chunk repeat those of one action
        actions = {"shape": [chunk, size], "dtype": "float32"}
        actions |= {"low": list(spec.low[:size]), "high": list(spec.high[:size])}
    return Served(
        tree.named(policy.obs_spec),
        task=policy.config.env.title,
        actions=actions,
        step_s=None if policy.step_s is None else policy.step_s / chunk,
        has_memory=policy.has_memory,
        names=names,
        session=lambda: RunSession(policy, chunk),
    )


class RunSession:
    """The policy of a run with a memory of its own."""

    def __init__(self, policy: TrainedPolicy, chunk: int) -> None:
        self.policy, self.chunk = copy.copy(policy), chunk  # the network is shared
        self.reset()

    def reset(self) -> None:
        self.policy.reset()

    def act(self, obs: Any, prompt: str | None) -> Any:
        """Return actions [C, A], or choices [C]."""
        obs = tree.map(torch.as_tensor, obs)
        if prompt is not None:
            set_instructions(self.policy.network, (prompt,))
            obs = {**obs, INSTRUCTION: torch.tensor(0)}
        action = self.policy.act(obs)
        return tree.map(lambda x: np.asarray(x if self.chunk > 1 else x[None]), action)


def _of_bundle(path: str, names: Mapping[str, str]) -> Served:
    """Return the policy of a bundle; its trace is replayed first."""
    try:
        policy = run_policy.Policy(path)
    except run_policy.BundleError as error:
        raise CheckpointError(str(error)) from error
    specs: dict[str, ArraySpec] = {}
    for name, x in policy.inputs.items():
        shape, dtype = tuple(x["shape"]), getattr(torch, x["dtype"])
        image = decide(shape, dtype) if dtype == torch.uint8 else None
        specs["" if len(policy.inputs) == 1 else name] = ArraySpec(shape, dtype, image)
    outputs = [x for x in policy.info["outputs"] if x["role"] == "action"]
    actions = {k: outputs[0].get(k) for k in ("dtype", "low", "high", "names")}
    chunked = len(outputs[0]["shape"]) > 1
    shape = outputs[0]["shape"] if chunked else [1, *outputs[0]["shape"]]

    class BundleSession:
        def __init__(self) -> None:
            self.policy = copy.copy(policy)
            self.reset()

        def reset(self) -> None:
            self.policy.reset()

        def act(self, obs: Any, prompt: str | None) -> Any:
            action = self.policy.act(obs)
            return tree.map(lambda x: np.asarray(x) if chunked else np.asarray(x)[None], action)

    return Served(
        specs,
        task=policy.info["task"],
        actions={"shape": shape, **actions},
        step_s=policy.info["control"]["step_s"],
        has_memory=bool(policy.memory),
        names=names,
        session=BundleSession,
    )


# ------------------------------------------------------------------------------------------ server
def serve(
    policy: Served, *, host: str, port: int, say: Callable[[str], None]
) -> AbstractContextManager[Any]:
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
                    actions = session.act(obs, prompt)
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
