"""Messages between processes, and simulators in another process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.base.errors import EnvError, TrainingError
from embodied_envs.base.random import env_seeds
from embodied_envs.types import VectorEnv
from embodied_ppo.cluster.channels import (
    PREFIX,
    Client,
    Connection,
    Exchange,
    Message,
    Server,
    connect,
    pack,
    unpack,
)
from embodied_ppo.cluster.remote_envs import EnvService, RemoteEnv
from embodied_ppo.policies import robot_policy
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.interleaved_rollouts import InterleavedRollouts
from embodied_ppo.rollout.simulation import Rollout

CPU = torch.device("cpu")


@contextmanager
def serving(make: Any, count: int = 1) -> Iterator[list[Client]]:
    """Yield clients of a server that runs in a thread."""
    exchange = Exchange("127.0.0.1", "secret", 20.0)
    server = Server(EnvService(make), exchange)
    thread = threading.Thread(target=server.serve, args=(count,))
    thread.start()
    clients = [
        Client(connect(exchange.address, "secret", f"rollout {i}", peer="env 0", timeout_s=20.0))
        for i in range(count)
    ]
    try:
        yield clients
    finally:
        for client in clients:
            client.finish()
        thread.join(20)
        server.close()


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return socket.create_connection(listening.getsockname()), listening.accept()[0]


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
def test_message_survives_pack_send_and_unpack(value: Any) -> None:
    m = Message("step", 3, {"seeds": [1, 2], "kind": "train", "none": None}, value)
    data = b"".join(pack(m))
    length, size = PREFIX.unpack(data[: PREFIX.size])
    assert len(data) == PREFIX.size + length + size
    payload = torch.frombuffer(bytearray(data[PREFIX.size + length :] or b"\0"), dtype=torch.uint8)
    back = unpack(data[PREFIX.size : PREFIX.size + length], payload)
    assert (back.method, back.target, back.data) == (m.method, m.target, m.data)
    assert equal(back.value, value)
    left, right = connected_sockets()
    a, b = Connection(left, "b", 5.0), Connection(right, "a", 5.0)
    sender = threading.Thread(target=lambda: [a.send(m), a.send(m)])
    sender.start()
    assert all(equal(b.receive().value, value) for _ in range(2))
    sender.join()


def test_lost_or_silent_peer_is_named() -> None:
    left, right = connected_sockets()
    connection = Connection(left, "env rank 2", 0.2)
    with pytest.raises(
        TrainingError, match=r"env rank 2: no answer for 0\.2 s \(cluster\.step_timeout_s\)"
    ):
        connection.receive()
    right.sendall(PREFIX.pack(10, 0)[:5])
    right.close()
    with pytest.raises(TrainingError, match="env rank 2: the process is gone"):
        connection.receive()
    with pytest.raises(TrainingError, match="env rank 2: the process is gone"):
        for _ in range(3):
            connection.send(Message("step"))
    with pytest.raises(TrainingError, match=r"env rank 1 at 127\.0\.0\.1:1: cannot be reached"):
        connect(("127.0.0.1", 1), "secret", "me", peer="env rank 1", timeout_s=1.0)


def test_callers_without_the_secret_are_disconnected() -> None:
    exchange = Exchange("127.0.0.1", "secret", 5.0)
    assert exchange.address[0] == "127.0.0.1"
    wrong = connect(exchange.address, "guess", "me", peer="env", timeout_s=5.0)
    noise = socket.create_connection(exchange.address)
    noise.sendall(PREFIX.pack(1 << 60, 1 << 60) + b"\xff" * 200)
    http = socket.create_connection(exchange.address)
    http.sendall(b"GET / HTTP/1.1\r\n")
    http.shutdown(socket.SHUT_WR)
    right = connect(exchange.address, "secret", "rollout rank 0", peer="env", timeout_s=5.0)
    right.send(Message("reset", 7))
    connection, m = exchange.receive()
    assert connection.peer == "rollout rank 0" and (m.method, m.target) == ("reset", 7)
    with pytest.raises(TrainingError, match="gone"):
        wrong.receive()
    assert http.recv(1) == b""
    with pytest.raises(ConnectionResetError):  # its data are not read
        noise.recv(1)
    exchange.close()


# --------------------------------------------------------------------------------------- simulators
TASKS: list[dict[str, Any]] = [
    {"env.id": "HalfCheetah-v4", "env.num_envs": 4, "env.max_episode_steps": 20},
    {"env.id": "toy_envs:Leveled", "env.num_envs": 4, "env.max_episode_steps": 5},
    {"env.id": "toy_envs:Point", "env.num_threads": 0, "env.kwargs": {"late": True}},
]


def rollouts(options: dict[str, Any], envs: list[VectorEnv], seed: int = 0) -> list[Rollout]:
    c = run_helpers.tiny_config(options)
    policy = robot_policy.make_policy(c, envs[0])
    options_of_all: Any = {"seed": seed, "stages": len(envs), "stagger": True, "restart_every": 16}
    return [Rollout(env, policy, stage=i, **options_of_all) for i, env in enumerate(envs)]


@pytest.mark.parametrize("options", TASKS, ids=lambda o: o["env.id"])
@pytest.mark.parametrize("servers", [1, 2])
def test_rollout_with_remote_simulators_equals_local_rollout(
    options: dict[str, Any], servers: int
) -> None:
    c = run_helpers.tiny_config(options)
    seeds = env_seeds(0, 0, 4)

    def make(kind: str, seeds: list[int]) -> VectorEnv:
        assert kind == "train"
        return environments.make_env(seeds, config=c.env, device=CPU)

    (local,) = rollouts(options, [make("train", seeds)])
    expected = [local.collect(12, update=u, version=u) for u in range(3)]
    state = local.state()
    last = tree.leaves(local.collect(12, update=3, version=3)[0])
    local.close()
    with serving(make) as (one,), serving(make) as (two,):
        env: Any = RemoteEnv([one, two][:servers], seeds, device=CPU)
        (remote,) = rollouts(options, [env])
        for u, (trajectory, metrics) in enumerate(expected):
            remote_trajectory, remote_metrics = remote.collect(12, update=u, version=u)
            assert all(map(torch.equal, tree.leaves(remote_trajectory), tree.leaves(trajectory)))
            assert remote_metrics == metrics
        with pytest.raises(EnvError, match="render no images for this one"):
            env.render()
        if servers == 1:  # a remote rollout continues from a local one's state
            remote.load_state(state)
            resumed, _ = remote.collect(12, update=3, version=3)
            assert all(map(torch.equal, tree.leaves(resumed), last))
        else:
            remote.load_state(remote.state())
            with pytest.raises(ValueError, match="longer"):  # of another number of processes
                RemoteEnv([one], seeds, device=CPU).load_state({"parts": [{}, {}]})
        remote.close()


def test_stages_overlap_and_do_not_change_experience() -> None:
    """Local and remote stages give the same experience; one simulates while the other acts."""
    options = {"env.id": "CartPole-v1", "env.num_envs": 4}
    c = run_helpers.tiny_config(options)
    seeds = env_seeds(0, 0, 4)
    order: list[str] = []

    def make(kind: str, seeds: list[int]) -> VectorEnv:
        return environments.make_env(seeds, config=c.env, device=CPU)

    envs = [make("train", x) for x in (seeds[:2], seeds[2:])]
    local = InterleavedRollouts(rollouts(options, envs))
    expected = [local.collect(8, update=u, version=u) for u in range(2)]
    local.close()

    class RecordingEnv(RemoteEnv):
        def send(self, action: Tensor) -> None:
            order.append(f"send {self.services[0][1]}")
            super().send(action)

        def receive(self) -> Any:
            order.append(f"receive {self.services[0][1]}")
            return super().receive()

    with serving(make) as (client,):
        envs = [RecordingEnv([client], x, device=CPU) for x in (seeds[:2], seeds[2:])]
        remote = InterleavedRollouts(rollouts(options, [*envs]))
        for u, (trajectory, metrics) in enumerate(expected):
            remote_trajectory, remote_metrics = remote.collect(8, update=u, version=u)
            assert remote_trajectory.reward.shape == (8, 4)
            assert all(map(torch.equal, tree.leaves(remote_trajectory), tree.leaves(trajectory)))
            assert remote_metrics == metrics
        remote.load_state(remote.state())
        remote.close()
    assert order[:6] == ["send 0", "send 1", "receive 0", "send 0", "receive 1", "send 1"]
