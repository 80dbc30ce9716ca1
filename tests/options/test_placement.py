"""Plans of placements: grammar, text of each refusal, presets on 1 to 16 devices."""

from __future__ import annotations

import re
from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.errors import LONGEST_LINE, ConfigError
from embodied_ppo.cluster import run_plan
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.placement import (
    PRESETS,
    ROLES,
    Hardware,
    Plan,
    check_numbers,
    check_sequences,
    lines,
    plan,
    ranges,
)
from embodied_ppo.options.placement_memory import check_memory

EIGHT = Hardware((8,), "cuda")
TWO_NODES = Hardware((4, 4), "cuda", {"sim": (0,), "train": (1,)})
C = "cluster.component_placement"


def shape(p: Plan) -> dict[str, list[tuple[int, ...]]]:
    return {g.name: list(g.ranks) for g in p.groups}


def one_each(*devices: int) -> list[tuple[int, ...]]:
    return [(d,) for d in devices]


GOOD: list[tuple[Any, Hardware, dict[str, list[tuple[int, ...]]]]] = [
    ({"env,rollout,actor": "0-3"}, EIGHT, {"env,rollout,actor": one_each(0, 1, 2, 3)}),
    ({"env,rollout,actor": "all"}, EIGHT, {"env,rollout,actor": one_each(*range(8))}),
    (
        {"env, rollout": 2, "actor": [5, "0-1"]},
        EIGHT,
        {"env,rollout": one_each(2), "actor": one_each(0, 1, 5)},
    ),
    (
        {"env": "first half", "rollout,actor": "second half"},
        EIGHT,
        {"env": one_each(0, 1, 2, 3), "rollout,actor": one_each(4, 5, 6, 7)},
    ),
    (
        {"env": {"devices": 0, "processes": 3}, "rollout,actor": 1},
        EIGHT,
        {"env": [(0,), (0,), (0,)], "rollout,actor": one_each(1)},
    ),
    (
        {"env": {"devices": "0-1", "processes": 4}, "rollout,actor": "2-3"},
        EIGHT,
        {"env": [(0,), (0,), (1,), (1,)], "rollout,actor": one_each(2, 3)},
    ),
    (
        {"env": {"devices": "0-3", "processes": 2}, "rollout,actor": "4-5"},
        EIGHT,
        {"env": [(0, 1), (2, 3)], "rollout,actor": one_each(4, 5)},
    ),
    (
        {"env": {"node": "sim"}, "rollout,actor": {"devices": "0-1", "node": "train"}},
        TWO_NODES,
        {"env": one_each(0, 1, 2, 3), "rollout,actor": one_each(4, 5)},
    ),
]


@pytest.mark.parametrize(("placement", "hardware", "expected"), GOOD)
def test_plan_of_a_placement(placement: Any, hardware: Hardware, expected: Any) -> None:
    assert shape(plan(placement, hardware)) == expected


ONE = "env,rollout,actor"
BAD: list[tuple[Any, Hardware, str]] = [
    ({"env,rolout,actor": 0}, EIGHT, "rolout is no role of this run; did you mean rollout?"),
    ({"env,,actor": 0}, EIGHT, "'' is no role of this run; roles: env, rollout, actor"),
    ({"env,rollout": 0}, EIGHT, "no device for actor; name actor in one entry"),
    ({ONE: 0, "actor": 1}, EIGHT, "actor is placed twice; name actor in one entry"),
    ({ONE: "0-9"}, EIGHT, "0-9 is no device, and there are 8 (0-7); write all"),
    ({ONE: "0-1"}, Hardware(), "0-1 is no device, and there is 1 (0-0)"),
    ({ONE: ["0-3", 2]}, EIGHT, "lists a device twice; list it once"),
    *(
        ({ONE: x}, EIGHT, "is no device, and there are 8")
        for x in ([], "0-1,4-5", "3-0", "0:3", 90.5, True, "-1", "0-3-5", 10**20)
    ),
    ({ONE: {"devices": "0-3", "proceses": 2}}, EIGHT, "did you mean processes?"),
    *(
        ({ONE: {"devices": "0-2", "processes": x}}, EIGHT, "must divide the 3 .. processes: 3")
        for x in (2, 0, True, 3 * 10**20)
    ),
    ({ONE: {"node": ["sim"]}}, TWO_NODES, "no node bears the label ['sim']; labels: sim, train"),
    ({ONE: {"processes": 1}}, TWO_NODES, "6, 7] of two nodes; write processes: 8"),
    ({"env": "first half", "rollout,actor": "second half"}, Hardware(), "there is 1 (0-0)"),
    ("hybrid", Hardware(), "placement = hybrid: needs 2 devices .. use fused or colocated"),
]


@pytest.mark.parametrize(("placement", "hardware", "text"), BAD)
def test_refusals_name_path_value_limit_and_hint(
    placement: Any, hardware: Hardware, text: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        plan(placement, hardware)
    for part in (*text.split(" .. "), C if isinstance(placement, dict) else ""):
        assert part in str(caught.value)


def test_label_of_an_absent_node_is_refused() -> None:
    groups = {"sim": 0, "train": 1}
    c = run_helpers.tiny_config({"placement": "fused", "cluster.node_groups": groups})
    with pytest.raises(PlacementError, match=r"^cluster.node_groups = \{train: 1\}: 1 is no node"):
        run_plan.plan_run(c, torch.device("cpu"))


@pytest.mark.parametrize("mode", ROLES)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("devices", [2, 16])
def test_presets_use_all_devices_or_are_refused(name: str, devices: int, mode: str) -> None:
    hardware = Hardware((devices,) if devices <= 8 else (8, devices - 8), "cuda")
    if mode == "reasoning" and name in ("hybrid", "pipelined"):
        message = "a language model has none; use fused, colocated or disaggregated"
        with pytest.raises(PlacementError, match=message):
            plan(name, hardware, roles=ROLES[mode])
        return
    p = plan(name, hardware, roles=ROLES[mode])
    assert sorted(role for g in p.groups for role in g.roles) == sorted(ROLES[mode])
    assert {d for g in p.groups for d in g.devices} == set(range(devices))
    sharing = {g.name: {other.name for other in p.sharing(g)} for g in p.groups}
    paths = {p.weights_path(rank) for rank in range(p.processes("rollout"))}
    if name == "fused":
        assert len(p.groups) == 1 and p.processes("actor") == devices and paths == {"share"}
    if name == "colocated":
        assert all(len(others) == len(p.groups) - 1 for others in sharing.values())
        assert paths == {"ipc"}
    if name in ("disaggregated", "hybrid"):
        assert not any(sharing.values()) and p.processes("rollout") == devices // 2
    if name == "pipelined":
        assert sharing == {"env": {"actor"}, "rollout": {"actor"}, "actor": {"env", "rollout"}}
        assert paths == {"ipc"}


def test_weight_transport() -> None:
    two = Hardware((2, 2), "cuda")
    placement = {"env,rollout": "0-1", "actor": "2-3"}
    assert plan(placement, two).weights_path(0) == "broadcast"
    assert plan(placement, EIGHT, max_lag=1).weights_path(0) == "store"
    shared = plan({"env,rollout": "1-2", "actor": "0-1"}, two)
    assert [shared.weights_path(rank) for rank in range(2)] == ["ipc", "broadcast"]
    assert [shared.actor_beside(rank) for rank in range(2)] == [1, None]


def test_presets_omit_unused_roles() -> None:
    p = plan("colocated", EIGHT, roles=("rollout", "actor", "reward"))
    assert [g.name for g in p.groups] == ["rollout,reward", "actor"]


@pytest.mark.parametrize(
    ("name", "shared"),
    [("fused", "env and actor share device 0"), ("hybrid", "rollout and actor share device 4")],
)
def test_max_lag_needs_separate_devices(name: str, shared: str) -> None:
    assert plan("disaggregated", EIGHT, max_lag=2).max_lag == 2
    with pytest.raises(PlacementError, match=shared):
        plan(name, EIGHT, max_lag=1)


NUMBERS: list[tuple[Any, dict[str, int], str]] = [
    ({"env": "0-2", "rollout,actor": "3-4"}, {}, "write processes: 2 for env"),
    ({"env,rollout": "0-3", "actor": "4-6"}, {}, "write processes: 3 for rollout"),
    ("fused", {"num_envs": 20}, "write env.num_envs=16"),
    ("fused", {"num_envs": 8, "group_size": 4}, "group_size = 4; write env.num_envs=32"),
    ("fused", {"global_batch_size": 100}, "write algorithm.global_batch_size=96"),
]


@pytest.mark.parametrize(("placement", "numbers", "text"), NUMBERS)
def test_environments_and_samples_divide_evenly(
    placement: Any, numbers: dict[str, int], text: str
) -> None:
    sizes = {"num_envs": 64, "group_size": 1, "global_batch_size": 1024, **numbers}
    with pytest.raises(PlacementError, match=re.escape(text)):
        check_numbers(plan(placement, EIGHT), **sizes)


def test_rows_of_a_plan() -> None:
    p = plan(
        {"env": {"node": "sim", "devices": "0-1"}, "rollout": "4-5", "actor": "4-7"}, TWO_NODES
    )
    assert lines(p.rows()) == [
        "device  node  env     rollout  actor",
        "cuda 0  0     rank 0  -        -",
        "cuda 1  0     rank 1  -        -",
        "cuda 2  0     -       -        -",
        "cuda 3  0     -       -        -",
        "cuda 4  1     -       rank 0   rank 0",
        "cuda 5  1     -       rank 1   rank 1",
        "cuda 6  1     -       -        rank 2",
        "cuda 7  1     -       -        rank 3",
    ]


def test_responses_divide_evenly() -> None:
    """Four prompts of six responses can be divided over eight actors, but three cannot."""
    sizes = {"prompts": 8, "group_size": 6, "batches": {"critic.global_batch_size": 4}}
    check_sequences(plan("fused", EIGHT, roles=ROLES["reasoning"]), **sizes)
    sizes["batches"] = {"critic.global_batch_size": 3}
    with pytest.raises(PlacementError, match=r"write critic\.global_batch_size=4"):
        check_sequences(plan("fused", EIGHT, roles=ROLES["reasoning"]), **sizes)


def test_ranges_index_available_devices() -> None:
    assert ranges(["1-2", 0], (10, 20, 30), "here") == (10, 20, 30)
    assert ranges(" 0 - 1 ", (4, 5, 6), "here") == (4, 5)


# ------------------------------------------------------------------------------------------- memory
NEEDS = {
    "env": dict.fromkeys(("weights", "activations"), 0),
    "rollout": {"weights": 2_000_000_000, "activations": 500_000_000},
    "actor": {"weights": 2_000_000_000, "activations": 9_000_000_000},
}


def test_memory_refusal_contains_the_sum() -> None:
    def of(memory: int, kind: str = "cuda") -> Plan:
        return plan("colocated", Hardware((2,), kind, memory=memory))

    # 11 GB for the actor while the others are offloaded, and three contexts
    check_memory(of(14_000_000_000), NEEDS)
    check_memory(plan("colocated", Hardware((2,), "cuda")), NEEDS)  # unknown memory is not checked
    with pytest.raises(PlacementError) as caught:
        check_memory(of(13_000_000_000), NEEDS)
    assert (
        str(caught.value)
        == "placement: cuda 0 needs 1 x 0.5 GB (env) + 1 x 0.5 GB (rollout) + 1 x 11.5 GB (actor)"
        " ="
        " 12.5 GB to update, more than 92% of its 13 GB; each actor: activations 9 GB, weights 2"
        " GB, CUDA 0.5 GB; lower algorithm.micro_batch_size"
    )
    disaggregated = plan("disaggregated", Hardware((2,), "cuda", memory=13_000_000_000))
    check_memory(disaggregated, {"env,rollout": NEEDS["rollout"], "actor": NEEDS["actor"]})
    with pytest.raises(
        PlacementError,
        match=r"node 0 needs 2 x 0 MB \(env\) \+ 2 x 2\.5 GB \(rollout\) \+ 2 x 11 GB",
    ):
        check_memory(of(15_000_000_000, "cpu"), NEEDS)  # all share it
    # A line of the largest usual length is complete; one learner cannot be sharded.
    purposes = ("weights", "gradients", "optimiser", "experience", "cache", "activations")
    for count, end in ((1, "adapters (lora_rank)"), (2, "(lora_rank), or cluster.shard=true")):
        hardware = Hardware((count,), "cuda", memory=24_000_000_000)
        with pytest.raises(PlacementError, match=re.escape(end) + "$") as caught:
            placed = plan("colocated", hardware, roles=ROLES["reasoning"])
            need = {**dict.fromkeys(purposes, 12_300_000_000), "optimiser": 24_600_000_000}
            check_memory(placed, {group.name: need for group in placed.groups})
        assert len(f"error: {caught.value}") <= LONGEST_LINE


@pytest.mark.slow
def test_sharding_reduces_the_memory_of_each_learner() -> None:
    wide = {"model.hidden": [512, 512]}
    full, parts = (
        sum(needs["env,rollout,actor"].values())
        for shard in (False, True)
        for c in [run_helpers.tiny_config({"placement": "fused", "cluster.shard": shard, **wide})]
        for needs in [run_plan.memory_estimator(c).estimate_memory(plan("fused", Hardware((4,))))]
    )
    assert parts < 0.9 * full


@pytest.mark.parametrize(
    ("devices", "version", "reason"),
    [
        (1, torch.__version__, "sharding needs at least two actor processes, this plan has one"),
        (2, "2.9.1+cpu", "needs torch 2.13, this is 2.9.1+cpu; or write cluster.shard=false"),
    ],
)
def test_shard_needs_several_learners_and_a_recent_torch(
    devices: int, version: str, reason: str, monkeypatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    c = run_helpers.tiny_config(
        {"placement": "fused", "cluster.shard": True, "cluster.devices_per_node": devices}
    )
    with pytest.raises(PlacementError, match=f"cluster.shard = true: {re.escape(reason)}"):
        run_plan.plan_run(c, torch.device("cpu"))


def test_compile_is_refused_for_groups_that_time_share_a_gpu() -> None:
    """A CUDA graph contains the addresses of its tensors, which change with each offload."""
    one, two = Hardware((1,), "cuda"), Hardware((2,), "cuda")
    language: dict[str, Any] = {"roles": ROLES["reasoning"]}
    separate_critic = {"rollout,actor,reward": 0, "critic": 1, "reference": 1}
    compiled = run_helpers.tiny_config({"compile": "always"})
    for sharing in (plan("colocated", one), plan(separate_critic, two, **language)):
        with pytest.raises(ConfigError, match="compile=always: processes that time-share a GPU"):
            run_plan.check_compile(compiled, sharing)
    for apart in (plan("fused", one), plan(separate_critic, Hardware((2,)), **language)):
        run_plan.check_compile(compiled, apart)
