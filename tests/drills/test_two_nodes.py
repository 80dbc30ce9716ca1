"""Two machines: a Ray cluster of two nodes, one that goes away, and labels that say which machine
is meant.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import ray
import run_helpers
from ray.cluster_utils import Cluster

from embodied_ppo import run
from embodied_ppo.core.types import PlacementError, ProcessLost
from tests.integration.test_placements import SMALL, rows

TWO: dict[str, Any] = {
    **SMALL,
    "cluster.num_nodes": 2,
    "cluster.devices_per_node": 2,
    "cluster.address": "auto",
}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Cluster, Any]]:
    """A head with two slots, and a node "sim" with two."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    started = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    second = started.add_node(num_cpus=2, labels={"node-group": "sim"})
    started.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", started.address)
    yield started, second
    ray.shutdown()
    started.shutdown()


def test_two_machines_train_as_one_and_the_loss_of_one_is_said(
    nodes: tuple[Cluster, Any], tmp_path: Path
) -> None:
    apart = {
        "cluster.node_groups": {"sim": 1},
        "cluster.component_placement": {"env": {"node": "sim", "devices": 0}, "rollout,actor": 0},
    }
    there, here = tmp_path / "there", tmp_path / "here"
    run.train(run_helpers.tiny_config({**TWO, **apart, "run_dir": str(there)}), quiet=True)
    run.train(run_helpers.tiny_config({**SMALL, "run_dir": str(here)}), quiet=True)
    assert rows(there) == rows(here)
    log = (there / "log.txt").read_text()
    assert "cpu 2   1     rank 0  -" in log and "cpu 0   0     -       rank 0" in log
    with pytest.raises(
        PlacementError, match="needs 3 nodes with 2, 2, 2 CPUs, and the Ray cluster has 2"
    ):
        three = {"cluster.num_nodes": 3, "env.num_envs": 12, "algorithm.global_batch_size": 48}
        run.train(run_helpers.tiny_config({**TWO, **three, "placement": "fused"}), quiet=True)
    c = run_helpers.tiny_config({**TWO, **apart, "cluster.step_timeout_s": 30.0})
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, pytest.fail)
        stack.callback(signal.signal, signal.SIGTERM, before)
        stack.callback(lambda: ours.append(sigterm_is_ours()))
        made = run_helpers.build_cluster_system(c, tmp_path, stack)
        ours = [sigterm_is_ours()]
        homes = {h.name: h.node for group in made.processes.values() for h in group}
        assert len(set(homes.values())) == 2
        made.collect(16, update=0)
        nodes[0].remove_node(nodes[1], allow_graceful=False)
        until = (
            time.monotonic() + 60
        )  # Ray needs some seconds to see it; until then its processes go on
        with pytest.raises(ProcessLost, match=r"process lost: env rank 0 .* or the machine is"):
            while time.monotonic() < until:
                made.collect(16, update=1)
    assert ours == [True, True]  # with Ray, which takes it, and after Ray, which gives it to nobody


def sigterm_is_ours() -> bool:
    caught = int(Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return signal.getsignal(signal.SIGTERM) is pytest.fail and bool(
        caught >> (signal.SIGTERM - 1) & 1
    )
