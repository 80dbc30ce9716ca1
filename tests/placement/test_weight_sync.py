"""What travels when a policy has learnt: the bytes, the four ways, and one contract for all of
them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor, nn

from embodied_ppo.core.types import ArraySpec, Box, PlacementError
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.modes.embodied import components as embodied
from embodied_ppo.placement import weight_sync
from embodied_ppo.placement.weight_sync import (
    SharedWeightBuffer,
    WeightBuffer,
    WeightLayout,
    open_shared_buffer,
    weight_tensors,
)
from embodied_ppo.placement.worker import Worker
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


# ---------------------------------------------------------------------------------------- the bytes
def test_tensors_arrive_bit_for_bit() -> None:
    sent, got = named(), {name: torch.zeros_like(x) for name, x in named().items()}
    flat = WeightBuffer(sent).pack()
    assert flat.dtype == torch.uint8 and len(flat) == WeightLayout.of(sent).total
    WeightBuffer(got).unpack(flat)
    assert all(bits(got[name]) == bits(x) for name, x in sent.items())
    assert WeightBuffer(got).checksum() == WeightBuffer(sent).checksum()
    got["b"][3] += 1e-9
    assert WeightBuffer(got).checksum() != WeightBuffer(sent).checksum()


def test_buckets_hold_all_bytes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, got = WeightBuffer(named()), named()
    for size, count in ((1, 6), (64, 3), (1 << 20, 1)):
        monkeypatch.setattr(weight_sync, "BUCKET", size)
        parts = list(sent.buckets())
        assert len(parts) == count and all(
            len(p.tensors) == 1 or p.layout.total <= size for p in parts
        )
        assert torch.equal(torch.cat([p.pack() for p in parts]), sent.pack())
        for x in got.values():
            x.zero_()
        for p, into in zip(parts, WeightBuffer(got).buckets(), strict=True):
            into.unpack(p.pack())
        assert all(bits(got[name]) == bits(x) for name, x in named().items())
        assert sent.checksum() == WeightBuffer(got).checksum()
    assert not list(WeightBuffer({}).buckets())


def test_the_receivers_types_are_sent() -> None:
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
        (
            {"a": torch.zeros(3, 4)},
            r"weights: a \[3, 5\] of the actor is a \[3, 4\] in rollout rank 1; all processes must",
        ),
        (
            {"a": torch.zeros(3, 5), "x": torch.zeros(7)},
            r"weights: b \[7\] of the actor is x \[7\] in rollout rank 1;",
        ),
        (
            {"a": torch.zeros(3, 5)},
            "weights: b is only in the actor; all processes must build the same model",
        ),
        (
            {**named(), "more": torch.zeros(1)},
            "weights: more is only in rollout rank 1; all processes must build the",
        ),
    ],
)
def test_the_first_tensor_that_differs_is_named(other: dict[str, Tensor], text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        WeightLayout.of(named()).check(WeightLayout.of(other), "rollout rank 1")


def test_only_what_an_update_changes_travels() -> None:
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
from embodied_ppo.placement.weight_sync import open_shared_buffer
flat = open_shared_buffer((int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])), torch.device("cpu"))
print(int(flat.sum())); sys.stdout.flush(); sys.stdin.readline()
print(int(flat.sum()))
"""


def test_a_shelf_is_read_by_another_process_and_leaves_nothing() -> None:
    before = set(os.listdir("/dev/shm"))
    shelf = SharedWeightBuffer(1000, CPU)
    shelf.flat.fill_(3)
    pid, number, size = shelf.handle()
    words = [sys.executable, "-c", READ, *map(str, (pid, number, size)), *sys.path]
    reader = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None and reader.stdout is not None
    assert reader.stdout.readline() == "3000\n"
    shelf.flat.fill_(5)  # the same memory: seen at once
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "5000\n"
    reader.communicate()
    assert int(open_shared_buffer(shelf.handle(), CPU)[0]) == 5
    assert set(os.listdir("/dev/shm")) == before


# ------------------------------------------------------------------------------------- the contract
WAYS: dict[str, dict[str, Any]] = {
    "share": {"cluster.component_placement": {"env,rollout,actor": "0-1"}},
    "ipc": {
        "cluster.component_placement": {"env,rollout": "0-1", "actor": "2-3"},
        "cluster.weights": "ipc",
    },
    "broadcast": {"cluster.component_placement": {"env,rollout": "0-1", "actor": "2-3"}},
    "store": {
        "cluster.component_placement": {"env,rollout": "0-1", "actor": "2-3"},
        "cluster.weights": "store",
    },
}


@pytest.mark.usefixtures("eight_slots")
@pytest.mark.parametrize("way", WAYS)
def test_after_publish_every_process_holds_the_learners_tensors(way: str, tmp_path: Path) -> None:
    c = run_helpers.tiny_config({**SMALL, **WAYS[way], "cluster.devices_per_node": 4})
    with ExitStack() as stack:
        made = run_helpers.build_cluster_system(c, tmp_path, stack)
        assert made.paths == [way] * 2
        everyone = list(dict.fromkeys([*made.learners, *made.actors]))
        assert {version for version, _ in made._call(everyone, Worker.checksum)} == {0}
        seen = {made._call(everyone, Worker.checksum)[0][1]}
        for update in range(2):
            experience, _ = made.collect(16, update=update)
            made.update(experience, update=update)
            if way != "share":  # not before it is published
                told = made._call(everyone, Worker.checksum)
                assert told[0] != told[-1] and told[-1][0] == update
            made.publish(update + 1)
            told = made._call(everyone, Worker.checksum)
            assert set(told) == {(update + 1, told[0][1])}
            seen.add(told[0][1])
        assert len(seen) == 3  # each update changed them
        policy = embodied.make_policy(c, embodied.make_env([0], config=c.env, device=CPU))
        assert isinstance(policy, nn.Module)
        total = WeightLayout.of(weight_tensors(policy)).total
        assert made.moved_bytes == (0 if way == "share" else 2 * total)
        if way == "store":  # weights that did not arrive are noticed, if one asks for it
            made.options = replace(made.options, check_weights=True)
            made.update(made.collect(16, update=2)[0], update=2)
            made.paths = ["share", "store"]
            with pytest.raises(
                PlacementError,
                match=r"weights: env,rollout rank 0 .* holds \w+ at version 3, actor",
            ):
                made.publish(3)
