"""``simulator=remote``: equal steps of a server in another process, and its failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from served_policies import started
from websockets.sync.client import connect

import embodied_envs
from embodied_envs import env_server
from embodied_envs.base import watchdog
from embodied_envs.base.errors import EnvError, ProcessLost
from embodied_envs.types import VectorEnv
from tests.rollout.test_action_spaces import SPACES

TASKS = """
import time, gymnasium, numpy as np
class Hanging(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))
    def __init__(self, hangs=True): self.hangs = hangs
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}
    def render(self): return None
    def step(self, action):
        if self.hangs: time.sleep(600)
        raise RuntimeError("a motor is missing")
class Large(Hanging):
    observation_space = gymnasium.spaces.Box(-1, 1, (2**21,))
    def reset(self, *, seed=None, options=None): return np.zeros(2**21, np.float32), {}
"""


@pytest.fixture
def address(request, tmp_path, monkeypatch) -> Iterator[str]:
    """Address of a server of the task that the test names."""
    (tmp_path / "hanging_tasks.py").write_text(TASKS)
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    with started("embodied_envs.env_server", request.param, "--port", "0") as line:
        yield line.split()[2].rstrip(";")


def make(id: str, simulator: str = "auto", **options: Any) -> VectorEnv:
    return embodied_envs.make(id, num_envs=3, seeds=[1, 2, 3], simulator=simulator, **options)


def check_equal(a: VectorEnv, b: VectorEnv, steps: int) -> None:
    """Step both with the same random actions."""
    assert a.info.max_episode_steps == b.info.max_episode_steps and a.action_spec == b.action_spec
    torch.testing.assert_close(a.reset(), b.reset(), rtol=0, atol=0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        action = torch.rand(3, 4, generator=generator) * 2 - 1
        if isinstance(a.action_spec, embodied_envs.types.Discrete):
            action = (action[:, 0] > 0).long()
        x, y = a.step(action), b.step(action)
        ended = x.terminated | x.truncated
        for field in ("obs", "reward", "terminated", "truncated", "mask", "success"):
            torch.testing.assert_close(getattr(x, field), getattr(y, field), rtol=0, atol=0)
        if isinstance(x.final_obs, dict) and isinstance(y.final_obs, dict) and bool(ended.any()):
            for name, value in x.final_obs.items():
                torch.testing.assert_close(value[ended], y.final_obs[name][ended])
    a.close()
    b.close()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["CartPole-v1"], indirect=True)
def test_steps_equal_those_in_this_process(address: str) -> None:
    remote = make("CartPole-v1", "remote", kwargs={"address": address})
    check_equal(make("CartPole-v1", "gymnasium"), remote, 60)
    with pytest.raises(EnvError, match="serves embodied-envs 1 CartPole-v1"):
        make("Acrobot-v1", "remote", kwargs={"address": address})
    with pytest.raises(EnvError, match="make fails"):
        make("CartPole-v1", "remote", kwargs={"address": address, "gravity": 3})
    with connect(f"ws://{address}") as client:
        client.recv()
        for message in ({"version": 0, "type": "step"}, {"version": 1, "type": "step"}):
            client.send(env_server.pack(message))
            assert "error" in env_server.unpack(client.recv())


@pytest.mark.slow
@pytest.mark.parametrize("address", ["embodied/Tabletop-v0"], indirect=True)
def test_images_sentences_and_last_observations_cross(address: str) -> None:
    kwargs = {"obs": "language", "families": ["reach"], "max_episode_steps": 4}
    own = make(
        "Tabletop",
        cameras=["front"],
        image_size=(16, 16),
        max_episode_steps=4,
        kwargs={k: x for k, x in kwargs.items() if k != "max_episode_steps"},
    )
    kwargs |= {"cameras": ["front"], "image_size": 16, "address": address}
    remote = make("embodied/Tabletop-v0", "remote", max_episode_steps=4, kwargs=kwargs)
    assert remote.instructions == own.instructions and remote.obs_spec == own.obs_spec
    check_equal(own, remote, 6)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["hanging_tasks:Hanging"], indirect=True)
def test_a_failing_or_hanging_simulator_is_one_line(address: str) -> None:
    env = make("Hanging", "remote", kwargs={"address": address, "hangs": False})
    env.reset()
    with pytest.raises(EnvError, match="render fails: TypeError: ndarray cannot be sent"):
        env.simulator._env.unwrapped.render()  # pyright: ignore
    with pytest.raises(EnvError, match="a motor is missing"):
        env.step(torch.zeros(3, 1))
    env = make("Hanging", "remote", kwargs={"address": address})
    env.reset()
    watchdog.set_limit(0.3)
    try:
        with pytest.raises(ProcessLost, match=r"step_timeout_s.*step"):
            env.step(torch.zeros(3, 1))
    finally:
        watchdog.set_limit(None)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "request_type"), [("Large", "reset"), ("Hanging", "step")])
def test_interrupt_ends_the_server_of_a_frozen_client(
    task: str, request_type: str, tmp_path
) -> None:
    """The client reads no answer, or the simulator does not return."""
    (tmp_path / "hanging_tasks.py").write_text(TASKS)
    command = [sys.executable, "-m", "embodied_envs.env_server", f"hanging_tasks:{task}"]
    server = subprocess.Popen(
        [*command, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
    )
    assert server.stdout is not None
    address = server.stdout.readline().split()[2].rstrip(";")
    client = connect(f"ws://{address}", max_queue=1, max_size=None, close_timeout=0.1)
    data: dict[str, Any] = {"make": {"num_envs": 1, "kwargs": {}}}
    data |= {"reset": {"seed": [0], "options": None}, "step": {"action": np.zeros((1, 1))}}
    for name in ("make", *[request_type] * 8):
        client.send(env_server.pack({"version": 1, "type": name, **data[name]}))
    time.sleep(2)
    server.send_signal(signal.SIGINT)
    assert server.wait(timeout=60) == 0
    client.close()


@pytest.mark.parametrize("kind", ["multi", "binary", "dict", "integers"])
def test_spaces_cross_unchanged(kind: str) -> None:
    message = env_server.unpack(env_server.pack(env_server.encode_space(SPACES[kind])))
    assert env_server.decode_space(message) == SPACES[kind]


def test_a_vector_that_takes_one_seed_gets_the_first() -> None:
    class OneSeed(gymnasium.vector.VectorEnv):
        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return np.zeros((2, 1)), {}

    env = OneSeed()
    env_server.answer(env, {"type": "reset", "seed": [3, 4], "options": None})
    assert env.np_random_seed == 3


def test_missing_server_is_named_with_its_command(capsys) -> None:
    start = r"embodied_envs\.env_server CartPole-v1"
    with pytest.raises(EnvError, match=start):
        make("CartPole-v1", "remote", kwargs={"address": "127.0.0.1:9"})
    greet = lambda connection: connection.send(env_server.pack({"actions": {"shape": [1]}}))
    with env_server.listen(greet, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EnvError, match=start):
            address = f"127.0.0.1:{server.socket.getsockname()[1]}"
            make("CartPole-v1", "remote", kwargs={"address": address})
    for target in ("CartPol-v1", "no_such_module:make", "math:pi"):
        with pytest.raises(SystemExit):
            env_server.main([target, "--port", "0"])
        assert f"module:function: {target}" in capsys.readouterr().err
