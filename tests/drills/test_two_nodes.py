"""A Ray cluster of two nodes: node labels, equal results, and the loss of a node."""

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

from embodied_envs.base.errors import ProcessLost
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.programs import runs
from tests.integration.test_placements import SMALL, rows

TWO: dict[str, Any] = {**SMALL, "cluster.num_nodes": 2, "cluster.devices_per_node": 2}


@pytest.fixture
def nodes(monkeypatch) -> Iterator[tuple[Cluster, Any]]:
    """Start a head node and a node with label "sim", two CPUs each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    second = cluster.add_node(num_cpus=2, labels={"node-group": "sim"})
    cluster.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_two_nodes_equal_one_process_and_a_lost_node_is_named(
    nodes: tuple[Cluster, Any], tmp_path
) -> None:
    placement = {
        "cluster.node_groups": {"sim": 1},
        "cluster.component_placement": {"env": {"node": "sim", "devices": 0}, "rollout,actor": 0},
    }
    two_nodes, local = tmp_path / "two_nodes", tmp_path / "local"
    runs.train(run_helpers.tiny_config({**TWO, **placement, "run_dir": str(two_nodes)}), quiet=True)
    runs.train(run_helpers.tiny_config({**SMALL, "run_dir": str(local)}), quiet=True)
    assert rows(two_nodes) == rows(local)
    log = (two_nodes / "log.txt").read_text()
    assert "cpu 2   1     rank 0  -" in log and "cpu 0   0     -       rank 0" in log
    with pytest.raises(
        PlacementError, match="needs 3 nodes with 2, 2, 2 CPUs, and the Ray cluster has 2"
    ):
        three = {"cluster.num_nodes": 3, "env.num_envs": 12, "algorithm.global_batch_size": 48}
        runs.train(run_helpers.tiny_config({**TWO, **three, "placement": "fused"}), quiet=True)
    c = run_helpers.tiny_config({**TWO, **placement, "cluster.step_timeout_s": 30.0})
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, pytest.fail)
        stack.callback(signal.signal, signal.SIGTERM, before)
        stack.callback(lambda: restored.append(handler_is_restored()))
        system = run_helpers.build_cluster_system(c, tmp_path, stack)
        restored = [handler_is_restored()]
        nodes_of = {h.name: h.node for h in system.processes.handles}
        assert len(set(nodes_of.values())) == 2
        system.collect(16, update=0)
        nodes[0].remove_node(nodes[1], allow_graceful=False)
        # Ray detects the loss after some seconds; until then the node's processes continue.
        until = time.monotonic() + 60
        with pytest.raises(ProcessLost, match=r"process lost: env rank 0 .* or the machine is"):
            while time.monotonic() < until:
                system.collect(16, update=1)
    assert restored == [True, True]  # after ray.init, and after ray.shutdown


def handler_is_restored() -> bool:
    """Return whether our SIGTERM handler is installed, in Python and in the kernel."""
    caught = int(Path("/proc/self/status").read_text().partition("SigCgt:")[2].split()[0], 16)
    return signal.getsignal(signal.SIGTERM) is pytest.fail and bool(
        caught >> (signal.SIGTERM - 1) & 1
    )
