"""Serve environments to trainers in other processes or on other machines: ``env.simulator=remote``.

    python env_server.py Ant-v5                     a task that is registered with Gymnasium
    python env_server.py my_module:make --port 8002 a function that returns one environment, or,
                                                    if it has a parameter num_envs, a vector of them

    embodied-ppo train env.simulator=remote env.id=Ant-v5 env.num_envs=8

This file needs numpy, gymnasium, msgpack and websockets. It imports nothing of its package, so that
a copy of it runs where the simulator is installed.

A message is one msgpack map. Arrays are maps, too, as openpi's client writes them
(github.com/Physical-Intelligence/openpi, packages/openpi-client): ``__ndarray__``, ``data``,
``dtype``, ``shape``. Nothing is unpickled. The server greets with ``protocol``, ``version`` and
``id``. Each request has ``version`` and ``type``:

    make    num_envs, kwargs  -> spaces and the other entries of ``describe``
    reset   seed, options     -> obs, info
    step    action            -> obs, reward, terminated, truncated, info
    render                    -> image

An answer with ``error``, one line, replaces that of a request that fails; the server goes on. A
connection has environments of its own, in a thread of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import socket
import sys
import threading
import time
from typing import Any

import gymnasium
import msgpack
import numpy as np
from gymnasium import spaces
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

# Name and version of the messages; the version changes with their meaning.
PROTOCOL, VERSION = "embodied-envs", 1
LOCAL = ("127.0.0.1", "localhost", "::1")
# Time that clients have to close a connection, seconds.
CLOSE_S = 2.0
# Largest size of a message, bytes.
MAX_MESSAGE = 1 << 28
# What decoding raises for bytes that are no message.
MALFORMED = (ValueError, TypeError, KeyError, OverflowError, SyntaxError)
# Kinds of numpy dtypes that are sent.
NUMBERS = "biuf"


# ---------------------------------------------------------------------------------------- messages
def pack(message: Any) -> bytes:
    """Return nested dictionaries and lists of arrays, numbers and texts as bytes."""
    data: Any = msgpack.packb(message, default=_encode)
    return data


def unpack(data: Any) -> dict:
    """Return the map of a message; arrays have memory of their own.

    Raises:
        ValueError: The bytes are no such message.
    """
    try:
        message = msgpack.unpackb(data, object_hook=_decode)
    except (*MALFORMED, msgpack.UnpackException) as error:
        raise ValueError(f"the message is no msgpack map of arrays ({error})") from error
    if not isinstance(message, dict):
        raise ValueError("the message is no msgpack map")
    return message


def _encode(x: Any) -> Any:
    """Return an array or a number of numpy as a map."""
    if not isinstance(x, (np.ndarray, np.generic)) or x.dtype.kind not in NUMBERS:
        raise TypeError(f"{type(x).__name__} cannot be sent")
    if isinstance(x, np.generic):
        return {b"__npgeneric__": True, b"data": x.item(), b"dtype": x.dtype.str}
    entries = {b"data": x.tobytes(), b"dtype": x.dtype.str, b"shape": x.shape}
    return {b"__ndarray__": True, **entries}


def _decode(x: dict) -> Any:
    """Return the array or the number of numpy that a map stands for, other maps as they are."""
    if b"__ndarray__" not in x and b"__npgeneric__" not in x:
        return x
    dtype = np.dtype(x[b"dtype"])
    if dtype.kind not in NUMBERS:
        raise ValueError(f"arrays of {dtype} are not read")
    if b"__npgeneric__" in x:
        return dtype.type(x[b"data"])
    return np.frombuffer(x[b"data"], dtype).reshape(x[b"shape"]).copy()


def encode_space(space: Any) -> dict:
    """Return a space of Gymnasium as a message. Raises TypeError for other ones."""
    kind = type(space).__name__
    if isinstance(space, spaces.Dict):
        return {"kind": kind, "spaces": [[k, encode_space(x)] for k, x in space.spaces.items()]}
    names = {"Box": ["low", "high"], "Discrete": ["n", "start"], "MultiBinary": ["n"]}
    names["MultiDiscrete"] = ["nvec", "start"]
    if kind not in names:
        raise TypeError(f"spaces of type {kind} cannot be sent; use Box, Discrete or Dict")
    values = {name: np.asarray(getattr(space, name)) for name in names[kind]}
    return {"kind": kind, "dtype": np.dtype(space.dtype).str, **values}


def decode_space(message: dict) -> spaces.Space:
    """Return the space of Gymnasium that ``encode_space`` has encoded."""
    kind = message["kind"]
    if kind == "Dict":
        return spaces.Dict({name: decode_space(x) for name, x in message["spaces"]})
    values = {k: x for k, x in message.items() if k not in ("kind", "dtype")}
    if kind == "Box":
        dtype: Any = np.dtype(message["dtype"]).type
        return spaces.Box(dtype=dtype, **values)
    return getattr(spaces, kind)(**{k: x if x.ndim else int(x) for k, x in values.items()})


# ------------------------------------------------------------------------------------------ server
@contextlib.contextmanager
def listen(handler: Any, host: str, port: int) -> Any:
    """Serve ``handler(connection)`` in a thread of each connection until the block ends.

    Web pages are refused, and /healthz is answered. Yields the server of ``websockets``.
    """
    connections: dict[Any, threading.Thread] = {}

    def handle(connection: Any) -> None:
        connections[connection] = threading.current_thread()
        with contextlib.suppress(ConnectionClosed):
            handler(connection)
        connections.pop(connection)

    if host not in LOCAL:
        print(
            f"warning: everybody who reaches {host}:{port} can use the server, which asks for no"
            " password; safer is --host 127.0.0.1 and ssh -L",
            file=sys.stderr,
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with serve(
        handle,
        sock=socket.create_server((host, port), family=family),
        process_request=lambda c, r: c.respond(200, "OK\n") if r.path == "/healthz" else None,
        origins=[None],  # a browser names the page that connects
        compression=None,
        max_size=MAX_MESSAGE,
        close_timeout=1,  # a client that does not answer
    ) as server:
        try:
            yield server
        finally:
            server.shutdown()
            _close(connections)


def _close(connections: dict[Any, threading.Thread]) -> None:
    """End connections and their threads within seconds, or leave the threads behind."""
    end, open_now = time.monotonic() + CLOSE_S, dict(connections)
    closers = [threading.Thread(target=c.close, args=(1001,), daemon=True) for c in open_now]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(max(0.0, end - time.monotonic()))
    # A message to a client that reads nothing is still being sent, and ``close`` waits for it.
    for connection, thread in open_now.items():
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)
        thread.join(max(0.1, end - time.monotonic()))


def serve_until_interrupt(server: Any) -> None:
    """Serve until Ctrl-C. The process does not wait for the threads of connections."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)  # and so are its threads
    with contextlib.suppress(KeyboardInterrupt):
        thread.start()
        thread.join()


def resolve(target: str) -> tuple[str, Any]:
    """Return the name in the command line and its function; None: a task of Gymnasium.

    Raises ImportError or gymnasium.error.Error where there is neither.
    """
    module, _, name = target.rpartition(":")
    found = getattr(importlib.import_module(module), name, None) if module else None
    if found is None:
        gymnasium.spec(name)
    elif not callable(found):
        raise ImportError(f"{name} in {module} is no function")
    return name, found


def make_vector(target: str, num_envs: int, kwargs: dict) -> Any:
    """Return ``num_envs`` environments of what the command line names."""
    name, found = resolve(target)
    vector = None if found is not None else gymnasium.spec(name).vector_entry_point
    if vector is not None and not str(vector).startswith("gymnasium."):
        return gymnasium.make_vec(name, num_envs, "vector_entry_point", **kwargs)
    if found is not None and "num_envs" in inspect.signature(found).parameters:
        return found(num_envs=num_envs, **kwargs)

    def make() -> Any:
        return gymnasium.make(name, **kwargs) if found is None else found(**kwargs)

    return gymnasium.vector.SyncVectorEnv([make] * num_envs)


def describe(env: Any) -> dict:
    """Return what a client must know about a vector environment."""
    first = env.envs[0] if hasattr(env, "envs") else env
    return {
        "observation_space": encode_space(env.single_observation_space),
        "action_space": encode_space(env.single_action_space),
        "autoreset_mode": env.metadata["autoreset_mode"].name,
        "render_fps": env.metadata.get("render_fps"),
        "render_modes": list(env.metadata.get("render_modes") or ()),
        "partial_reset": isinstance(env, gymnasium.vector.SyncVectorEnv),
        "max_episode_steps": getattr(first.spec, "max_episode_steps", None),
        "instructions": list(vars(env.unwrapped).get("instructions", ())),
    }


def numbers_of(info: dict) -> dict:
    """Return the arrays of numbers of an info, and the last observations of episodes."""
    final = info.get("final_obs")
    if isinstance(final, np.ndarray) and final.dtype == object:
        return {**numbers_of({**info, "final_obs": None}), "final_obs": final.tolist()}
    nested = {k: numbers_of(x) for k, x in info.items() if isinstance(x, dict)}
    arrays = {k: x for k, x in info.items() if isinstance(x, np.ndarray)}
    return {**nested, **{k: x for k, x in arrays.items() if x.dtype.kind in NUMBERS}}


def answer(env: Any, request: dict) -> dict:
    """Return the answer to a request other than make."""
    kind = request.get("type")
    if env is None:
        raise ValueError(f"{kind} before make")
    if kind == "step":
        obs, reward, terminated, truncated, info = env.step(request["action"])
        values = {"reward": reward, "terminated": terminated, "truncated": truncated}
        return {"obs": obs, **values, "info": numbers_of(info)}
    if kind == "reset":
        seed, options = request["seed"], request["options"]
        try:
            obs, info = env.reset(seed=seed, options=options)
        except (TypeError, gymnasium.error.Error):  # a vector that takes one seed
            obs, info = env.reset(seed=seed[0], options=options)
        return {"obs": obs, "info": numbers_of(info)}
    if kind == "render":
        image = env.render()
        return {"image": image if image is None else np.asarray(image)}
    raise ValueError(f"type {kind!r} is unknown")


def main(arguments: Any = None) -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Serve environments to env.simulator=remote.")
    parser.add_argument("target", help="a task of Gymnasium, or module:function")
    parser.add_argument("--host", default=LOCAL[0], help="address (default %(default)s)")
    parser.add_argument("--port", type=int, default=8001, help="port (default %(default)s)")
    args = parser.parse_args(arguments)
    sys.path.append("")  # the user's module
    try:
        name, _ = resolve(args.target)
    except Exception as error:  # of the user's module
        line = " ".join(f"{type(error).__name__}: {error}".split())
        parser.error(f"name a task of Gymnasium, or module:function: {args.target}: {line}")

    def handler(connection: Any) -> None:
        env = None
        connection.send(pack({"protocol": PROTOCOL, "version": VERSION, "id": name}))
        try:
            for data in connection:
                try:
                    request = unpack(data)
                    if request.get("version") != VERSION:
                        raise ValueError(f"version {request.get('version')}; send {VERSION}")
                    if request.get("type") == "make":
                        env = make_vector(args.target, request["num_envs"], request["kwargs"])
                        reply = pack(describe(env))
                    else:
                        reply = pack(answer(env, request))
                except Exception as error:  # any class of the user's simulator
                    reply = pack({"error": " ".join(f"{type(error).__name__}: {error}".split())})
                connection.send(reply)
        finally:
            if env is not None:
                env.close()

    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(listen(handler, args.host, args.port))
        except (OSError, OverflowError) as error:  # in use, unknown, or no port
            parser.error(f"choose another --host or --port than {args.host}:{args.port}: {error}")
        print(f"{name} at {args.host}:{server.socket.getsockname()[1]}; Ctrl-C ends it", flush=True)
        serve_until_interrupt(server)


if __name__ == "__main__":
    main()
