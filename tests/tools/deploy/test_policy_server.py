"""`embodied-ppo serve`: openpi's protocol as documented bytes, refused requests, equal actions."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from run_helpers import assert_refused
from served_policies import started, write_mlp, write_pi0
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

from embodied_envs import env_server
from embodied_envs.base.errors import ConfigError
from embodied_ppo.evaluation.trained_policy import load_policy
from embodied_ppo.tools.deploy import policy_server


def request(**entries: Any) -> bytes:
    """Return a request as openpi's client writes it: arrays are maps with keys of bytes."""

    def write(x: np.ndarray) -> dict[bytes, Any]:
        values = {b"data": x.tobytes(), b"dtype": x.dtype.str, b"shape": x.shape}
        return {b"__ndarray__": True, **values}

    arrays = {k: write(x) if isinstance(x, np.ndarray) else x for k, x in entries.items()}
    data: Any = msgpack.packb({k.replace("__", "/"): x for k, x in arrays.items()})
    return data


def ask(client: ClientConnection, data: bytes | str) -> Any:
    """Return the answer to a request; a text is a refusal."""
    client.send(data)
    answer = client.recv(timeout=60)
    return answer if isinstance(answer, str) else env_server.unpack(answer)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory) -> Path:
    return write_mlp(tmp_path_factory.mktemp("served") / "mlp")


@pytest.fixture(scope="module")
def server(mlp: Path) -> Iterator[str]:
    """Address of the server of the MLP, in a process of its own; IPv6 if this machine has it."""
    host = "127.0.0.1"
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        host = "::1"
    arguments = ("serve", str(mlp), "--port", "0", "--host", host)
    with started("embodied_ppo.commands.main", *arguments) as address:
        yield address


@pytest.mark.slow
def test_actions_are_those_of_the_policy_and_wrong_requests_get_one_line(
    server: str, mlp: Path
) -> None:
    http = server.replace("ws", "http", 1)
    assert urllib.request.urlopen(f"{http}/healthz").read() == b"OK\n"
    with pytest.raises(InvalidStatus):  # a web page of another origin
        connect(server, origin="http://example.com")  # pyright: ignore[reportArgumentType]
    policy = load_policy(str(mlp))
    obs = np.random.default_rng(0).normal(size=17)
    with connect(server) as client, connect(server) as other:
        metadata: Any = env_server.unpack(client.recv())
        other.recv()
        assert metadata["version"] == policy_server.VERSION and not metadata["has_memory"]
        assert metadata["observations"] == {
            "observation/state": {"shape": [17], "dtype": "float32"}
        }
        assert metadata["actions"]["shape"] == [1, 6] and metadata["actions"]["low"] == [-1.0] * 6
        answer = ask(client, request(observation__state=obs, extra="ignored"))
        np.testing.assert_array_equal(answer["actions"], policy.act(obs)[None])
        assert answer["policy_timing"]["infer_ms"] > 0
        wrong: dict[str, bytes | str] = {
            "observation/state": request(other=obs),
            "float64 [3]": request(observation__state=obs[:3]),
            "finite": request(observation__state=obs * np.nan),
            "msgpack": b"\xc1",
            "bytes, not text": "hello",
            "a boolean": request(observation__state=obs, reset=np.array([1, 0])),
            "no msgpack map": request(observation__state=b"").replace(
                b"\xc4\x00",
                msgpack.packb({b"__ndarray__": True}),  # pyright: ignore
            ),
            "not read": request(observation__state=b"").replace(
                b"\xc4\x00",
                msgpack.packb(  # pyright: ignore
                    {b"__ndarray__": True, b"data": b"x", b"dtype": "|O", b"shape": [1]}
                ),
            ),
        }
        for text, data in wrong.items():
            line = ask(client, data)
            assert isinstance(line, str) and text in line and "\n" not in line
        again = ask(client, request(observation__state=obs))
        np.testing.assert_array_equal(again["actions"], answer["actions"])
        assert "prev_total_ms" in again["server_timing"]
        assert ask(other, request(observation__state=obs))["actions"].shape == (1, 6)


@pytest.mark.slow
def test_sentences_and_images_reach_a_vision_language_action_policy(tmp_path) -> None:
    run = write_pi0(tmp_path / "pi0")
    served = policy_server.Served(load_policy(str(run)), {"observation/image": "front"})
    names = {"observation/image", "observation/state", "prompt"}
    assert set(served.metadata["observations"]) == names
    generator = np.random.default_rng(0)
    image = generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    state = generator.normal(size=12).astype(np.float32)
    policy = load_policy(str(run))
    sentences = list(policy.network.sentences)  # pyright: ignore[reportAttributeAccessIssue]
    with policy_server.serve(served, host="127.0.0.1", port=0, say=print) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with connect(f"ws://127.0.0.1:{server.socket.getsockname()[1]}") as client:
            client.recv()
            rest: dict[str, Any] = {"observation__state": state, "observation__image": image}
            for sentence in (sentences[0], sentences[5], "a sentence of no training"):
                answer = ask(client, request(prompt=sentence, **rest))
                if sentence in sentences:
                    index = np.int64(sentences.index(sentence))
                    obs = {"front": np.moveaxis(image, -1, 0), "state": state, "instruction": index}
                    np.testing.assert_allclose(answer["actions"], policy.act(obs), atol=1e-5)
                assert answer["actions"].shape == (2, 4)
            first = rest | {"observation__image": np.moveaxis(image, -1, 0).copy()}
            for wrong in (rest, {**rest, "prompt": 3}, {**first, "prompt": "x"}):
                assert isinstance(ask(client, request(**wrong)), str)
    with pytest.raises(ConfigError, match="did you mean front"):
        policy_server.Served(policy, {"image": "fron"})
    for name in ("observation/state", "reset", "prompt"):
        with pytest.raises(ConfigError, match="a name of its own"):
            policy_server.Served(policy, {name: "front"})


def test_policies_that_read_no_sentences_get_their_index(tmp_path) -> None:
    run = write_mlp(tmp_path / "run", "Tabletop", obs="language", families=["reach"])
    policy = load_policy(str(run))
    served, state = policy_server.Served(policy, {}), np.ones(12, dtype=np.float32)
    entries = {"observation/state": state, "observation/instruction": 5}
    actions = served.act(served.session(), *served.read(entries))
    expected = policy.act({"state": state, "instruction": np.int64(5)})
    np.testing.assert_array_equal(actions, expected[None])


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["nowhere"], "does not exist"),
        ([".", "--port", "99999"], "whole number"),
        ([".", "--map", "front"], "NAME=INPUT"),
        ([".", "--map", "a=front", "--map", "b=front"], "each INPUT once"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], hint: str, capsys) -> None:
    assert_refused(capsys, ["serve", *arguments], hint)
