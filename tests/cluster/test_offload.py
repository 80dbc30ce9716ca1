"""Offloading: which groups move in each phase, and tensors restored bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodied_ppo.cluster import offload
from embodied_ppo.cluster.offload import ALL, OFFLOADED, WEIGHTS, Residency, TensorOffloader
from embodied_ppo.cluster.ray_system import ClusterSystem
from embodied_ppo.cluster.worker import Worker
from embodied_ppo.options.placement import Hardware, plan
from tests.integration.test_placements import assert_close, rows, train


def steps(r: Residency, phase: str) -> list[tuple[str, int]]:
    return [(g.name, level) for g, level in r.moves_before(phase)]


def test_groups_are_offloaded_before_others_are_loaded() -> None:
    r = Residency(plan("colocated", Hardware((2,), "cuda")))
    assert steps(r, "publish") == [("env", OFFLOADED), ("rollout", WEIGHTS), ("actor", WEIGHTS)]
    assert steps(r, "collect") == [("actor", OFFLOADED), ("env", ALL), ("rollout", ALL)]
    assert steps(r, "collect") == []  # idempotent
    assert steps(r, "update") == [("env", OFFLOADED), ("rollout", OFFLOADED), ("actor", ALL)]
    assert steps(r, "publish") == [("actor", WEIGHTS), ("rollout", WEIGHTS)]
    assert steps(r, "evaluate") == [("actor", OFFLOADED), ("env", ALL), ("rollout", ALL)]
    assert steps(r, "save") == [("rollout", WEIGHTS), ("actor", ALL)]


def test_only_groups_that_share_a_device_move() -> None:
    for name in ("fused", "disaggregated", "hybrid"):
        r = Residency(plan(name, Hardware((4,), "cuda")))
        assert not any(steps(r, phase) for phase in offload.PHASES)
    r = Residency(plan({"env": 0, "rollout,actor": "0-1"}, Hardware((2,), "cuda")))
    assert steps(r, "update") == [("env", OFFLOADED)]
    # On CPU, device and host memory are the same.
    assert not steps(Residency(plan("colocated", Hardware((2,), "cpu"))), "collect")


def test_offloaded_tensors_are_restored_in_place() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(net.parameters())
    twin = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    twin.load_state_dict(net.state_dict())
    other = torch.optim.AdamW(twin.parameters())
    first = net[0].weight
    assert isinstance(first, Tensor)
    view = first.detach()[2:4]

    def tensors(level: int) -> list[Tensor]:
        if level == WEIGHTS:
            return [*net.parameters(), *net.buffers()]
        return [x for s in optimizer.state.values() for x in s.values() if x.ndim]

    offloader = TensorOffloader(tensors)
    for i in range(6):
        x = torch.randn(8, 5)
        for model, opt in ((net, optimizer), (twin, other)):
            opt.zero_grad()
            model(x).square().sum().backward()
            opt.step()
        moved = offloader.move_to((OFFLOADED, WEIGHTS, ALL)[i % 3])
        if i % 3 == 0:
            assert first.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
            total = moved
            assert moved == sum(
                x.numel() * x.element_size() for x in [*net.parameters(), *net.buffers()]
            ) + sum(x.numel() * 4 for s in optimizer.state.values() for x in s.values() if x.ndim)
            assert offloader.move_to(OFFLOADED) == 0
        if i % 3 == 1:
            exp_avg = optimizer.state[net[0].weight]["exp_avg"]
            assert first.untyped_storage().nbytes() > 0 and exp_avg.untyped_storage().nbytes() == 0
        offloader.move_to(ALL)
        # Host buffers are reused.
        assert sum(len(host) for host in offloader.host_buffers.values()) == total
        for a, b in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(view, twin[0].weight[2:4])  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.usefixtures("eight_slots")
def test_offloading_works_with_sharded_parameters(tmp_path, monkeypatch) -> None:
    options: dict[str, Any] = {"placement": "colocated", "cluster__devices_per_node": 2}
    options["updates"] = 3
    options["algorithm__use_kl_loss"] = True
    # The placement fused gives the same results.
    expected = train(tmp_path / "unsharded", **options | {"placement": "fused"})
    monkeypatch.setattr(offload, "OFFLOADED_DEVICES", {"cpu"})
    assert_close(train(tmp_path / "sharded", **options, cluster__shard=True), expected)
    assert '"time/swap_s": 0.0,' not in (tmp_path / "sharded" / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("eight_slots")
def test_offloading_does_not_change_training(tmp_path, monkeypatch) -> None:
    """Tensors are offloaded and loaded in every phase, as on a GPU."""
    options: dict[str, Any] = {"placement": "colocated", "cluster__devices_per_node": 1}
    expected = train(tmp_path / "local")  # one process gives the same results
    monkeypatch.setattr(offload, "OFFLOADED_DEVICES", {"cpu"})
    call, moved_bytes = ClusterSystem._call, dict[str, int]()

    def counting(self: Any, handles: Any, method: Any, *args: Any, **options: Any) -> Any:
        results = call(self, handles, method, *args, **options)
        if method is Worker.move_to:
            moved_bytes[handles[0].name] = moved_bytes.get(handles[0].name, 0) + sum(results)
        return results

    monkeypatch.setattr(ClusterSystem, "_call", counting)
    assert train(tmp_path / "offloading", **options) == expected
    assert (
        moved_bytes["env rank 0"] == 0 < moved_bytes["rollout rank 0"] < moved_bytes["actor rank 0"]
    )
    metrics = (tmp_path / "offloading" / "metrics.jsonl").read_text()
    assert '"time/swap_s": 0.0,' not in metrics and "time/swap_s" in metrics
    train(tmp_path / "offloading", **options, updates=6, resume=str(tmp_path / "offloading"))
    assert len(rows(tmp_path / "offloading")) == 7
