"""Reservation of the devices of a plan in a Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.placement import Plan

# Time limit for connecting to a Ray cluster that is given by address, seconds.
CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 300.0  # time limit of waiting for devices and processes at the start, seconds
HINT = "add nodes, free them, or lower cluster.num_nodes and cluster.devices_per_node"


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Restore our SIGTERM handler, which ``ray.init`` and ``ray.shutdown`` replace."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(ValueError):  # not the main thread, where Ray replaces none
            signal.signal(signal.SIGTERM, handler)


class Reservation:
    """A connection to Ray, and one bundle of resources for each device of a plan."""

    def __init__(self, plan: Plan, notice: Callable[[str], None]) -> None:
        """Connect to Ray, or start it on this machine, and reserve the devices.

        Args:
            plan: The plan.
            notice: Called with lines for the log.

        Raises:
            PlacementError: The devices are not free in time.
        """
        self.plan = plan
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # The first error is raised by ``wait``. Ray would print those that follow from it.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        # A program that uses Ray itself keeps its connection.
        self.started = not ray.is_initialized()
        if self.started:
            with _own_sigterm():
                self._connect()
        self.group: PlacementGroup | None = None
        try:
            self.group = self._reserve("GPU" if plan.hardware.kind == "cuda" else "CPU", notice)
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Connect to the cluster of RAY_ADDRESS, or start Ray on this machine."""
        hardware = self.plan.hardware
        address = os.environ.get("RAY_ADDRESS")
        ray_options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
        ray_options["logging_level"] = "ERROR"
        try:
            if address:
                host, _, port = address.rpartition(":")
                # Test the address first: ray.init retries for minutes without a message.
                if port.isdecimal() and "/" not in host:
                    socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
                ray.init(address=address, **ray_options)
            elif len(hardware.per_node) > 1:
                raise PlacementError(
                    f"cluster.num_nodes = {len(hardware.per_node)}: no Ray cluster is named; start"
                    " one (ray start --head here, ray start --address=HOST:6379 on the others) and"
                    " set RAY_ADDRESS=auto"
                )
            else:
                # Devices are CPU bundles without a GPU: there must be as many as the plan has.
                cores = {"num_cpus": max(hardware.total, os.cpu_count() or 1)}
                ray.init(address="local", **cores, **ray_options)
        except Exception as error:  # itself raised by ray.init where a node is late
            if isinstance(error, PlacementError):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            hint = "free memory or disk space of /tmp, or set RAY_ADDRESS: Ray could not be started"
            if address:
                hint = (
                    "check ray status there; if it requires a token, RAY_AUTH_MODE=token is needed"
                    f" here, too: RAY_ADDRESS = {address}: Ray cannot be reached"
                )
            raise PlacementError(f"{hint} ({reason[:150]})") from error

    def _reserve(self, unit: str, notice: Callable[[str], None]) -> PlacementGroup:
        """Reserve one bundle per device, and wait until all are free."""
        hardware = self.plan.hardware
        # One bundle per device, bound to the node that the plan names.
        nodes = self._nodes(unit)
        bundles = [{"CPU": 1.0, unit: 1.0} for _ in range(hardware.total)]
        selectors = [
            {"ray.io/node-id": nodes[hardware.node(device)]} for device in range(hardware.total)
        ]
        group = placement_group(bundles, strategy="PACK", bundle_label_selector=selectors)
        start = noticed = time.monotonic()
        while not group.wait(1):
            now = time.monotonic()
            if now - start > START_TIMEOUT_S:
                remove_placement_group(group)
                raise PlacementError(f"{self._shortage(unit)} after {START_TIMEOUT_S:g} s; {HINT}")
            if now - noticed > 10:
                noticed = now
                notice(self._shortage(unit))
        return group

    def _shortage(self, unit: str) -> str:
        """Return a line that compares needed, registered and free devices."""
        needed, registered = self.plan.hardware.total, ray.cluster_resources().get(unit, 0)
        free = ray.available_resources().get(unit, 0)
        return f"placement: needs {needed} {unit}s, {registered:g} registered, {free:g} free"

    def _nodes(self, unit: str) -> list[str]:
        """Return the Ray ids of the plan's nodes, in order. Raises PlacementError."""
        hardware = self.plan.hardware
        alive = [n for n in ray.nodes() if n["Alive"]]
        # A fixed order, so that all runs number the nodes alike.
        alive.sort(key=lambda n: (sorted((n.get("Labels") or {}).items()), n["NodeID"]))
        label_of = {n["NodeID"]: (n.get("Labels") or {}).get("node-group") for n in alive}
        # Take the first free node that is large enough, one with the right label first.
        free, ids = list(alive), list[str]()
        for number, count in enumerate(hardware.per_node):
            label = next((name for name, nodes in hardware.labels.items() if number in nodes), None)
            large_enough = [n for n in free if n["Resources"].get(unit, 0) >= count]
            candidates = [
                n for n in large_enough if label is None or label_of[n["NodeID"]] in (label, None)
            ]
            candidates.sort(key=lambda n: label_of[n["NodeID"]] != label)
            if not candidates and large_enough:
                others = ", ".join(sorted({str(label_of[n["NodeID"]]) for n in large_enough})[:3])
                raise PlacementError(
                    f"cluster.node_groups: node {number} needs {count} {unit}s and the label"
                    f" node-group={label}; the remaining nodes of this size have node-group="
                    f"{others}; start Ray there with --labels=node-group={label}"
                )
            if not candidates:
                have = ", ".join(f"{n['Resources'].get(unit, 0):g} {unit}s" for n in alive)
                raise PlacementError(
                    f"placement: needs {len(hardware.per_node)} nodes with "
                    f"{', '.join(map(str, hardware.per_node))} {unit}s, and the "
                    f"Ray cluster has {len(alive)} ({have}); {HINT}"
                )
            ids.append(candidates[0]["NodeID"])
            free.remove(candidates[0])
        return ids

    def strategy(self, device: int) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy of a process on a device."""
        assert self.group is not None
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=device)

    def close(self) -> None:
        """Free the devices, and disconnect from Ray, which stops a cluster started here."""
        if self.group is not None:
            remove_placement_group(self.group)
        if self.started:
            with _own_sigterm():
                ray.shutdown()
        self.group, self.started = None, False
