"""Weight synchronisation: buffers of bytes, four transports, and their common contract."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor, nn

from embodied_envs.types import ArraySpec, Box
from embodied_ppo.cluster import weight_sync
from embodied_ppo.cluster.weight_sync import (
    SharedWeightBuffer,
    WeightBuffer,
    WeightLayout,
    open_shared_buffer,
    weight_tensors,
)
from embodied_ppo.cluster.worker import Worker, WorkerSpec
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.placement import Plan
from embodied_ppo.policies import robot_policy
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.rollout import environments
from tests.integration.test_placements import SMALL

CPU = torch.device("cpu")


def named() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 5, generator=g),
        "b": torch.randn(7, generator=g, dtype=torch.float64),
        "c": torch.tensor(4),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "nan": torch.tensor([float("nan"), -0.0]),
    }


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


# ------------------------------------------------------------------------------------------ buffers
def test_pack_and_unpack_copy_tensors_bit_for_bit() -> None:
    sent, received = named(), {name: torch.zeros_like(x) for name, x in named().items()}
    flat = WeightBuffer(sent).pack()
    assert flat.dtype == torch.uint8 and len(flat) == WeightLayout.of(sent).total
    WeightBuffer(received).unpack(flat)
    assert all(bits(received[name]) == bits(x) for name, x in sent.items())


def test_buckets_contain_all_bytes_in_order(monkeypatch) -> None:
    sent, received = WeightBuffer(named()), named()
    for size, count in ((1, 6), (64, 3), (1 << 20, 1)):
        monkeypatch.setattr(weight_sync, "BUCKET", size)
        parts = list(sent.buckets())
        assert len(parts) == count
        assert all(len(p.tensors) == 1 or p.layout.total <= size for p in parts)
        assert torch.equal(torch.cat([p.pack() for p in parts]), sent.pack())
        for x in received.values():
            x.zero_()
        for p, bucket in zip(parts, WeightBuffer(received).buckets(), strict=True):
            bucket.unpack(p.pack())
        assert all(bits(received[name]) == bits(x) for name, x in named().items())
    assert not list(WeightBuffer({}).buckets())


def test_pack_casts_to_the_receivers_dtypes() -> None:
    master = {"w": torch.randn(4, 4)}
    acting = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    layout = WeightLayout.of(acting)
    WeightLayout.of(master).check(layout, "rollout rank 0")
    flat = WeightBuffer(master, layout).pack()
    assert len(flat) == 32
    WeightBuffer(acting).unpack(flat)
    assert torch.equal(acting["w"], master["w"].bfloat16())


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"a": torch.zeros(3, 4)}, r"a \[3, 5\].*a \[3, 4\].*rollout rank 1"),
        ({**named(), "more": torch.zeros(1)}, "more.*rollout rank 1"),
    ],
)
def test_layout_check_names_the_first_difference(other: dict[str, Tensor], text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        WeightLayout.of(named()).check(WeightLayout.of(other), "rollout rank 1")


def test_frozen_parameters_are_not_sent() -> None:
    policy = ActorCritic(ArraySpec((5,)), Box((-1.0,), (1.0,)), run_helpers.tiny_config().model)
    assert isinstance(policy, nn.Module)
    everything = weight_tensors(policy, frozen=True)
    for name, p in policy.named_parameters():
        p.requires_grad_("actor" in name or "policy" in name)
    part = weight_tensors(policy)
    assert set(part) < set(everything) and {name for name, _ in policy.named_buffers()} <= set(part)
    assert WeightLayout.of(part).total < WeightLayout.of(everything).total


READ = """
import sys, torch
sys.path[:0] = sys.argv[4:]
from embodied_ppo.cluster.weight_sync import open_shared_buffer
handle = tuple(map(int, sys.argv[1:4]))
flat = open_shared_buffer(handle, torch.device("cpu"))
print(int(flat.sum())); sys.stdout.flush(); sys.stdin.readline()
print(int(flat.sum()))
"""


@pytest.mark.slow
def test_shared_buffer_is_mapped_by_another_process_and_freed() -> None:
    before = set(os.listdir("/dev/shm"))
    buffer = SharedWeightBuffer(1000, CPU)
    buffer.flat.fill_(3)
    command = [sys.executable, "-c", READ, *map(str, buffer.handle()), *sys.path]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None and reader.stdout is not None
    assert reader.stdout.readline() == "3000\n"
    buffer.flat.fill_(5)  # the same memory
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "5000\n"
    reader.communicate()
    assert int(open_shared_buffer(buffer.handle(), CPU)[0]) == 5
    assert set(os.listdir("/dev/shm")) == before


def test_receiver_has_read_the_buffer_before_the_sender_writes_again(monkeypatch) -> None:
    """On CUDA, copies are in progress when ``unpack`` returns."""
    sender, receiver = (Worker(WorkerSpec((), {}), policy=nn.Linear(3, 2)) for _ in range(2))
    for worker in (sender, receiver):
        worker.prepare_weight_sync(sender.weight_layout(frozen=False), "actor", frozen=False)
    handle, waited = sender.export_ipc(), list[Any]()
    monkeypatch.setattr(
        "embodied_ppo.cluster.weight_sync.open_shared_buffer",
        lambda handle, device: open_shared_buffer(handle, CPU),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(Worker, "device", torch.device("cuda", 0))
    receiver.import_ipc(1, handle)
    assert waited == [torch.device("cuda", 0)]


# --------------------------------------------------------------------------------------- transports
# Transports of the weights -> the placement that they are tested in.
PLACEMENTS: dict[tuple[str, ...], dict[str, Any]] = {
    ("share",): {"env,rollout,actor": "0-1"},
    ("ipc",): {"env,rollout": "0-1", "actor": "0-1"},
    ("broadcast", "store"): {"env,rollout": "0-1", "actor": "2-3"},
}


@pytest.mark.slow
@pytest.mark.usefixtures("eight_slots")
@pytest.mark.parametrize("transports", PLACEMENTS, ids=",".join)
def test_publish_gives_every_process_the_learners_tensors(
    transports: tuple[str, ...], tmp_path, monkeypatch
) -> None:
    placement = {"cluster.component_placement": PLACEMENTS[transports]}
    c = run_helpers.tiny_config({**SMALL, **placement, "cluster.devices_per_node": 4})
    policy = robot_policy.make_policy(c, environments.make_env([0], config=c.env, device=CPU))
    assert isinstance(policy, nn.Module)
    size = WeightLayout.of(weight_tensors(policy)).total

    def version_and_bits(worker: Worker) -> tuple[int, bytes]:
        tensors = weight_tensors(worker.module, frozen=True)
        packed = WeightBuffer(tensors, ranks=worker.spec.learners).pack()
        return worker.version, packed.numpy().tobytes()

    with ExitStack() as stack:
        system = run_helpers.build_cluster_system(c, tmp_path, stack)
        handles = list(dict.fromkeys([*system.learners, *system.actors]))
        first = system._call(handles, version_and_bits)
        assert {version for version, _ in first} == {0}
        distinct = {first[0][1]}
        update = 0
        for transport in transports:
            if transport != transports[0]:  # the same processes with another transport
                monkeypatch.setattr(Plan, "weights_path", lambda plan, rank: "store")
                system._prepare_weight_sync(frozen=False)
            assert system.paths == [transport] * 2
            assert system.moved_bytes == (0 if transport == "share" else 2 * size)
            for _ in range(2):
                experience, _ = system.collect(16, update=update)
                system.update(experience, update=update)
                if transport != "share":  # rollouts still have the previous weights
                    weights = system._call(handles, version_and_bits)
                    assert weights[0] != weights[-1] and weights[-1][0] == update
                update += 1
                system.publish(update)
                weights = system._call(handles, version_and_bits)
                assert set(weights) == {(update, weights[0][1])}
                distinct.add(weights[0][1])
        assert len(distinct) == update + 1  # each update changed the weights
