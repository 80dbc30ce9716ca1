"""Requests of openpi's client to `embodied-ppo serve`, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from served_policies import started, write_mlp, write_pi0

PYTHON = os.environ.get("OPENPI_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="OPENPI_PYTHON names no Python with openpi-client: make test-openpi"
)
CLIENT = """
import json, sys, time
import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy
client = WebsocketClientPolicy(sys.argv[1])
obs = {}
for name, spec in client.get_server_metadata()["observations"].items():
    value = np.zeros(spec.get("shape", ()), None if spec["dtype"] == "str" else spec["dtype"])
    obs[name] = "reach the red block" if spec["dtype"] == "str" else value
try:
    client.infer({})
    refusal = None
except RuntimeError as error:
    refusal = str(error)
shape, total, inference = client.infer(obs)["actions"].shape, [], []
for _ in range(200):
    start = time.perf_counter()
    answer = client.infer(obs)
    total.append(1e3 * (time.perf_counter() - start))
    inference.append(answer["server_timing"]["infer_ms"])
added = float(np.median(np.subtract(total, inference)))
print(json.dumps([shape, refusal, 1e3 / float(np.mean(total)), added]))
"""


@pytest.mark.parametrize(("write", "shape"), [(write_mlp, [1, 6]), (write_pi0, [2, 4])])
def test_the_client_gets_chunks_of_actions(
    write: Callable[[Path], Path], shape: list[int], tmp_path
) -> None:
    run = write(tmp_path / "run")
    with started("embodied_ppo.commands.main", "serve", str(run), "--port", "0") as address:
        process = subprocess.run(
            [Path(PYTHON).absolute(), "-c", CLIENT, address], capture_output=True, text=True
        )
    assert process.returncode == 0, process.stderr
    actual, refusal, rate, added = json.loads(process.stdout.splitlines()[-1])
    print(f"{rate:.0f} requests per second, {added:.2f} ms more than the inference (median)")
    assert actual == shape and "send observation/" in refusal
