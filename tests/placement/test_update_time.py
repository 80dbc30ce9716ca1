"""Predicted seconds of an update: by hand, and what each size changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embodied_ppo.config import placement
from embodied_ppo.placement import update_time
from embodied_ppo.placement.memory_estimate import Operations
from embodied_ppo.placement.update_time import Device, Work

GPU = Device("example", 80, tflops=100, memory_gbs=1000, link_gbs=100)
WORK = Work(
    decisions=1000,
    horizon=100,
    chunk=5,
    epochs=2,
    steps=10,
    micro_batches=40,
    operations=Operations(act=2e12, encode=1e12, learn=3e12),
    weight_bytes=7_000_000_000,
    trained=100_000_000,
)


def plan(devices: int) -> placement.Plan:
    hardware = placement.Hardware((devices,), "cuda")
    return placement.plan({"env,rollout,actor": "all"}, hardware)


def test_one_device_by_hand() -> None:
    """100 TFLOP/s at 40 % is 40e12/s, at 45 % 45e12/s; memory moves 0.7 · 1000 = 700 GB/s.

    simulate  1000 · 5 steps / (16 cores · 10 /s) = 31.25
    act       1000 · 2e12 / 40e12 = 50; reading 7 GB 100 times would take 1
    learn     1000 · (1e12 + 2 · 3e12) / 45e12 = 155.56; AdamW 10 · 0.1e9 · 28 / 700e9 = 0.04
    """
    s = update_time.predict(plan(1), WORK, GPU, "libero")
    assert (s.simulate, s.act, s.exchange) == (31.25, 50.0, 0.0)
    assert s.learn == pytest.approx(7000 / 45 + 0.04)
    assert s.total == pytest.approx(31.25 + 50 + 7000 / 45 + 0.04)
    # 25 % and 5 steps/s; 55 %, 60 % and 40 steps/s
    assert s.high == pytest.approx(62.5 + 80 + 7000 / 25 + 0.04)
    assert s.low == pytest.approx(31.25 / 4 + 2000 / 55 + 7000 / 60 + 0.04)


def test_several_devices_by_hand() -> None:
    """An all-reduce over 4 sends 2 · 3/4 · 0.4 GB at 100 GB/s in 6 hops of 20 us, ten times.

    With shards, 40 micro-batches gather twice 3/4 · 7 GB, and each has a quarter of the moments.
    """
    one, s = (update_time.predict(plan(n), WORK, GPU, "libero") for n in (1, 4))
    assert one.simulate is not None and s.simulate == one.simulate / 4
    assert s.act == one.act / 4
    assert s.exchange == pytest.approx(10 * (0.006 + 6 * 20e-6))
    shards = replace(WORK, sharded_bytes=WORK.weight_bytes)
    sharded = update_time.predict(plan(4), shards, GPU, "libero")
    assert sharded.exchange - s.exchange == pytest.approx(80 * (0.0525 + 6 * 20e-6))
    assert s.learn - sharded.learn == pytest.approx(0.04 * 3 / 4)


def test_small_batches_read_the_weights() -> None:
    few = replace(WORK, decisions=100, operations=replace(WORK.operations, act=1e9))
    assert update_time.predict(plan(1), few, GPU, "libero").act == pytest.approx(1.0)


def test_unknown_simulators_and_devices() -> None:
    s = update_time.predict(plan(1), WORK, GPU, "tabletop")
    assert s.simulate is None and s.total == s.act + s.learn
    assert [d.name for d in map(update_time.device_with, (24, 80.5, 141)) if d] == [
        "RTX 4090",
        "H100 SXM",
        "H200 SXM",
    ]
    assert update_time.device_with(30) is None
