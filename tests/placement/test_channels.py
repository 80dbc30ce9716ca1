"""Messages between processes, and simulators at the other end of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor

from embodied_ppo.core import tree
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import EnvError, ProcessLost, TrainingError, VectorEnv
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.placement import channels
from embodied_ppo.placement.channels import (
    PREFIX,
    Client,
    Connection,
    Exchange,
    Message,
    Server,
    connect,
    interface,
    pack,
    unpack,
)
from embodied_ppo.placement.remote_envs import ConcatenatedEnvs, EnvService, RemoteEnv
from embodied_ppo.rollout.simulation import Rollout, Staged

CPU = torch.device("cpu")


@contextmanager
def serving(make: Any, desks: int = 1) -> Iterator[list[Client]]:
    """Lines to a server in a thread."""
    exchange = Exchange("127.0.0.1", "secret", 20.0)
    server = Server(EnvService(make), exchange)
    thread = threading.Thread(target=server.serve, args=(desks,))
    thread.start()
    found = [
        Client(connect(exchange.address, "secret", f"rollout {i}", peer="env 0", timeout_s=20.0))
        for i in range(desks)
    ]
    try:
        yield found
    finally:
        for desk in found:
            desk.finish()
        thread.join(20)
        server.close()


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


VALUES: list[Any] = [
    None,
    torch.arange(6, dtype=torch.float32).reshape(2, 3),
    torch.zeros(0, 4),
    torch.tensor(3.5, dtype=torch.float64),
    {
        "a": torch.tensor([True, False, True]),
        "b": {"c": torch.arange(5, dtype=torch.uint8), "none": None},
    },
    {
        "image": torch.randint(0, 255, (64, 64, 64, 3), dtype=torch.uint8),
        "half": torch.randn(7).bfloat16(),
    },
    {f"a long name {i}": torch.full((i,), i) for i in range(400)},
]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(x, b[name]) for name, x in a.items())
    return a is None and b is None


@pytest.mark.parametrize("value", VALUES)
def test_a_message_arrives_as_it_was_sent(value: Any) -> None:
    m = Message("step", 3, {"seeds": [1, 2], "kind": "train", "none": None}, value)
    data = b"".join(pack(m))
    length, size = PREFIX.unpack(data[: PREFIX.size])
    assert len(data) == PREFIX.size + length + size
    payload = torch.frombuffer(bytearray(data[PREFIX.size + length :] or b"\0"), dtype=torch.uint8)
    back = unpack(data[PREFIX.size : PREFIX.size + length], payload)
    assert (back.method, back.target, back.data) == (m.method, m.target, m.data) and equal(
        back.value, value
    )
    left, right = pair()
    a, b = Connection(left, "b", 5.0), Connection(right, "a", 5.0)
    sender = threading.Thread(target=lambda: [a.send(m), a.send(m)])
    sender.start()
    assert all(equal(b.receive().value, value) for _ in range(2))
    sender.join()


def test_a_peer_that_is_gone_or_silent_is_named() -> None:
    left, right = pair()
    line = Connection(left, "env rank 2", 0.2)
    with pytest.raises(
        TrainingError, match=r"env rank 2: no answer for 0\.2 s \(cluster\.step_timeout_s\)"
    ):
        line.receive()
    right.sendall(PREFIX.pack(10, 0)[:5])
    right.close()
    with pytest.raises(TrainingError, match="env rank 2: the process is gone"):
        line.receive()
    with pytest.raises(TrainingError, match="env rank 2: the process is gone"):
        for _ in range(3):
            line.send(Message("step"))
    with pytest.raises(TrainingError, match=r"env rank 1 at 127\.0\.0\.1:1: cannot be reached"):
        connect(("127.0.0.1", 1), "secret", "me", peer="env rank 1", timeout_s=1.0)


def test_an_address_is_found_on_its_interface() -> None:
    assert interface("127.0.0.1") == "lo" and interface("203.0.113.7") is None


def test_strangers_are_hung_up_on() -> None:
    exchange = Exchange("127.0.0.1", "secret", 5.0)
    assert exchange.address[0] == "127.0.0.1"
    wrong = connect(exchange.address, "guess", "me", peer="env", timeout_s=5.0)
    noise = socket.create_connection(exchange.address)
    noise.sendall(PREFIX.pack(1 << 60, 1 << 60) + b"\xff" * 200)
    words = socket.create_connection(exchange.address)
    words.sendall(b"GET / HTTP/1.1\r\n")
    words.shutdown(socket.SHUT_WR)
    right = connect(exchange.address, "secret", "rollout rank 0", peer="env", timeout_s=5.0)
    right.send(Message("reset", 7))
    line, m = exchange.receive()
    assert line.peer == "rollout rank 0" and (m.method, m.target) == ("reset", 7)
    with pytest.raises(TrainingError, match="gone"):
        wrong.receive()
    assert words.recv(1) == b""
    with pytest.raises(ConnectionResetError):  # what it sent was not even read
        noise.recv(1)
    exchange.close()


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(1 << 40, 0),
        PREFIX.pack(0, (1 << 64) - 1),
        PREFIX.pack(3, 0) + b"\xff\xff\xff",
        PREFIX.pack(2, 0) + b"[]",
        *(
            PREFIX.pack(len(words), 0) + words
            for words in (
                b'["step",0,{},0,[["load",[]]]]',
                b'["step",0,{},0,[["float32",[9]]]]',
                b"[" * 50_000,
            )
        ),
    ],
)
def test_what_is_no_message_is_told(data: bytes) -> None:
    left, right = pair()
    right.sendall(data)
    with pytest.raises(ProcessLost, match=r"env rank 2: (sent an invalid message|announces)"):
        Connection(left, "env rank 2", 1.0).receive()


def test_strangers_delay_and_displace_no_caller_with_the_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callers without the secret send one byte at a time, as many at once as may be, and more."""
    monkeypatch.setattr(channels, "GREETING_S", 0.3)
    monkeypatch.setattr(channels, "UNGREETED", 4)
    exchange = Exchange("127.0.0.1", "secret", 1.0)
    strangers = [socket.create_connection(exchange.address) for _ in range(6)]
    end = threading.Event()

    def trickle() -> None:
        while not end.wait(0.05):
            for stranger in strangers:
                with suppress(OSError):
                    stranger.send(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    friend = connect(exchange.address, "secret", "rollout rank 0", peer="env", timeout_s=5.0)
    start = time.monotonic()
    for number in range(3):
        friend.send(Message("step", number))
        assert exchange.receive()[1].target == number
        assert len(exchange.greetings) <= 4
    assert time.monotonic() - start < 0.3
    strangers += [socket.create_connection(exchange.address)]
    start = time.monotonic()
    with pytest.raises(ProcessLost, match=r"no request for 1 s \(cluster\.step_timeout_s\)"):
        exchange.receive()  # whatever strangers send, the limit is on the requests
    assert 0.9 < time.monotonic() - start < 2.0 and not exchange.greetings
    end.set()
    sender.join()
    friend.send(Message("step", 3))
    assert exchange.receive()[1].target == 3
    exchange.close()


def test_a_greeting_that_arrived_while_another_caller_was_answered_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline is on the caller; the time in which this process answers others is not the
    caller's.
    """
    exchange = Exchange("127.0.0.1", "secret", 5.0)
    first = connect(exchange.address, "secret", "rollout rank 0", peer="env", timeout_s=5.0)
    first.send(Message("make", 0))
    assert exchange.receive()[1].method == "make"
    connection = socket.create_connection(
        exchange.address
    )  # accepted with the next message of the first
    first.send(Message("make", 1))
    monkeypatch.setattr(channels, "GREETING_S", 0.05)
    while not exchange.greetings:
        exchange.receive()
        first.send(Message("make", 2))
    second = channels.Connection(connection, "env", 5.0)
    second.send_greeting("secret", "rollout rank 1")
    time.sleep(0.1)  # a request of the first is answered
    second.send(Message("step", 7))
    assert {exchange.receive()[0].peer for _ in range(2)} == {"rollout rank 0", "rollout rank 1"}
    exchange.close()


def test_a_further_caller_displaces_no_greeting_that_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "UNGREETED", 1)
    exchange = Exchange("127.0.0.1", "secret", 5.0)
    friend = socket.create_connection(exchange.address)
    exchange._accept()
    line = channels.Connection(friend, "env", 5.0)
    line.send_greeting("secret", "rollout rank 0")
    stranger = socket.create_connection(exchange.address)
    exchange._accept()
    line.send(Message("step", 7))
    assert exchange.receive()[1].target == 7
    stranger.close()
    exchange.close()


def test_a_name_cut_within_a_letter_is_heard() -> None:
    exchange = Exchange("127.0.0.1", "secret", 5.0)
    connect(exchange.address, "secret", "é" * 47 + "a" + "é", peer="env", timeout_s=5.0).send(
        Message("ping")
    )
    assert exchange.receive()[1].method == "ping"
    exchange.close()


# --------------------------------------------------------------------------------------- simulators
TASKS = [
    {"env.id": "CartPole-v1", "env.num_envs": 4},
    {
        "env.id": "HalfCheetah-v4",
        "env.num_envs": 4,
        "env.max_episode_steps": 20,
        "env.stagger": True,
    },
    {
        "env.id": "Pendulum-v1",
        "env.simulator": "gymnasium",
        "env.num_envs": 4,
        "env.num_threads": 0,
    },
    {"env.id": "Tabletop", "env.num_envs": 4},
]


def rollouts(options: dict[str, Any], envs: list[VectorEnv], seed: int = 0) -> list[Rollout]:
    c = run_helpers.tiny_config(options)
    policy = embodied.make_policy(c, envs[0])
    rest: Any = {"seed": seed, "stages": len(envs), "stagger": c.env.stagger, "restart_every": 16}
    return [Rollout(env, policy, stage=i, **rest) for i, env in enumerate(envs)]


@pytest.mark.parametrize("options", TASKS, ids=lambda o: o["env.id"])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_rollout_over_lines_is_the_rollout(options: dict[str, Any], servers: int) -> None:
    c = run_helpers.tiny_config(options)
    seeds = env_seeds(0, 0, 4)

    def make(kind: str, seeds: list[int]) -> VectorEnv:
        assert kind == "train"
        return embodied.make_env(seeds, config=c.env, device=CPU)

    (here,) = rollouts(options, [make("train", seeds)])
    expected = [here.collect(12, update=u, version=u) for u in range(3)]
    state = here.state()
    last = here.collect(12, update=3, version=3)
    here.close()
    with serving(make) as (one,), serving(make) as (two,):
        desks = [one, two][:servers]
        n = 4 // servers
        parts = [RemoteEnv(d, seeds[i * n : i * n + n], device=CPU) for i, d in enumerate(desks)]
        env: Any = parts[0] if servers == 1 else ConcatenatedEnvs(parts)
        (there,) = rollouts(options, [env])
        for u, (trajectory, metrics) in enumerate(expected):
            found, told = there.collect(12, update=u, version=u)
            assert all(map(torch.equal, tree.leaves(found), tree.leaves(trajectory)))
            assert told == metrics
        with pytest.raises(EnvError, match="render no images for this one"):
            env.render()
        if servers == 1:  # and from its state
            there.load_state(state)
            found, _ = there.collect(12, update=3, version=3)
            assert all(map(torch.equal, tree.leaves(found), tree.leaves(last[0])))
        else:
            there.load_state(there.state())
        there.close()


def test_stages_take_turns() -> None:
    """Two stages of one process, and of two servers: the same experience, and the second simulates
    while the first acts."""
    options = {"env.id": "CartPole-v1", "env.num_envs": 4}
    c = run_helpers.tiny_config(options)
    seeds = env_seeds(0, 0, 4)
    order: list[str] = []

    def make(kind: str, seeds: list[int]) -> VectorEnv:
        return embodied.make_env(seeds, config=c.env, device=CPU)

    here = Staged(rollouts(options, [make("train", seeds[:2]), make("train", seeds[2:])]))
    expected = [here.collect(8, update=u, version=u) for u in range(2)]
    here.close()

    class Told(RemoteEnv):
        def send(self, action: Tensor) -> None:
            order.append(f"send {self.target}")
            super().send(action)

        def receive(self) -> Any:
            order.append(f"receive {self.target}")
            return super().receive()

    with serving(make) as (desk,):
        there = Staged(
            rollouts(
                options, [Told(desk, seeds[:2], device=CPU), Told(desk, seeds[2:], device=CPU)]
            )
        )
        for u, (trajectory, metrics) in enumerate(expected):
            found, told = there.collect(8, update=u, version=u)
            assert found.reward.shape == (8, 4)
            assert all(map(torch.equal, tree.leaves(found), tree.leaves(trajectory)))
            assert told == metrics
        there.load_state(there.state())
        there.close()
    assert order[:6] == ["send 0", "send 1", "receive 0", "send 0", "receive 1", "send 1"]
