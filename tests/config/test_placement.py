"""Plans of placements: grammar, text of each refusal, presets on 1 to 16 devices."""

from __future__ import annotations

from typing import Any

import pytest
import run_helpers
import torch

from embodied_ppo.config.placement import (
    PRESETS,
    ROLES,
    USABLE_MEMORY,
    Group,
    Hardware,
    Plan,
    check_memory,
    check_numbers,
    lines,
    memory_rows,
    plan,
    ranges,
)
from embodied_ppo.core.errors import ConfigError, PlacementError
from embodied_ppo.modes import base
from embodied_ppo.modes.embodied.mode import EmbodiedMode

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


BAD: list[tuple[Any, Hardware, str]] = [
    (
        {"env,rollout,leaner": 0},
        EIGHT,
        C + " = {env,rollout,leaner: 0}: leaner is no role of mode=embodied; roles: env, rollout,"
        " actor",
    ),
    (
        {"env,rolout,actor": 0},
        EIGHT,
        C + " = {env,rolout,actor: 0}: rolout is no role of mode=embodied; did you mean rollout? "
        "roles: env, rollout, actor",
    ),
    (
        {"env,rollout,actor,critic": 0},
        EIGHT,
        C + " = {env,rollout,actor,critic: 0}: critic is no role of mode=embodied (it is part of"
        " the actor); "
        "roles: env, rollout, actor",
    ),
    (
        {"env,,actor": 0},
        EIGHT,
        C + " = {env,,actor: 0}: '' is no role of mode=embodied; roles: env, rollout, actor",
    ),
    (
        {"env,rollout": 0},
        EIGHT,
        C + " = {env,rollout: 0}: no device for actor; join it to an entry, as "
        "'env,rollout,actor', or give it its own",
    ),
    ({}, EIGHT, C + " = {}: no device for env; join it to an entry, as 'env', or give it its own"),
    (
        {"env,rollout,actor": 0, "actor": 1},
        EIGHT,
        C + " = {env,rollout,actor: 0, actor: 1}: actor is placed twice; name it once",
    ),
    (
        {"env,env,rollout,actor": 0},
        EIGHT,
        C + " = {env,env,rollout,actor: 0}: env is placed twice; name it once",
    ),
    (
        {"env,rollout,actor": "0-9"},
        EIGHT,
        C + " = {env,rollout,actor: 0-9}: 0-9 needs device 9, but there are 8 (0-7); write 0-7, or"
        " set the available devices with cluster.num_nodes and cluster.devices_per_node",
    ),
    (
        {"env,rollout,actor": 8},
        EIGHT,
        C + " = {env,rollout,actor: 8}: 8 needs device 8, but there are 8 (0-7); write 0, or set"
        " the available devices with cluster.num_nodes and cluster.devices_per_node",
    ),
    (
        {"env,rollout,actor": "0-1"},
        Hardware(),
        C + " = {env,rollout,actor: 0-1}: 0-1 needs device 1, but there is 1 (0); write 0, or set"
        " the available devices with cluster.num_nodes and cluster.devices_per_node",
    ),
    (
        {"env,rollout,actor": "3-0"},
        EIGHT,
        C + " = {env,rollout,actor: 3-0}: 3-0 runs backwards; write 0-3",
    ),
    (
        {"env,rollout,actor": ["0-3", 2]},
        EIGHT,
        C + " = {env,rollout,actor: [0-3, 2]}: device 2 is listed twice; list it once",
    ),
    (
        {"env,rollout,actor": []},
        EIGHT,
        C + " = {env,rollout,actor: []}: names no device; write all, a number or a range as 0-3",
    ),
    (
        {"env,rollout,actor": "0-1,4-5"},
        EIGHT,
        C + " = {env,rollout,actor: 0-1,4-5}: 0-1,4-5 is more than one range; write a list, as"
        " [0-1,4-5]",
    ),
    *(
        (
            {"env,rollout,actor": value},
            EIGHT,
            f"{C} = {{env,rollout,actor: {text}}}: {text} is no device; write all, a number, a"
            f" range as 0-3, "
            "'first half', 'second half', or a list of these",
        )
        for value, text in (
            ("0:3",) * 2,
            (90.5, "90.5"),
            (True, "true"),
            ("-1",) * 2,
            ("0-3-5",) * 2,
            (None, "null"),
            ("9" * 5000,) * 2,
        )
    ),
    (
        {"env,rollout,actor": {"devices": "0-3", "proceses": 2}},
        EIGHT,
        C + " = {env,rollout,actor: {devices: 0-3, proceses: 2}}: proceses is not known; did you"
        " mean processes? "
        "devices, processes, node",
    ),
    (
        {"env,rollout,actor": {"devices": "0-2", "processes": 2}},
        EIGHT,
        C + " = {env,rollout,actor: {devices: 0-2, processes: 2}}: 2 processes do not divide evenly"
        " over 3 devices; "
        "write processes: 1",
    ),
    (
        {"env,rollout,actor": {"devices": "0-2", "processes": 0}},
        EIGHT,
        C + " = {env,rollout,actor: {devices: 0-2, processes: 0}}: processes = 0 must be a number"
        " >= 1; leave it out: 3",
    ),
    (
        {"env,rollout,actor": {"devices": "0-1", "processes": 10**20}},
        EIGHT,
        C + " = {env,rollout,actor: {devices: 0-1, processes: 100000000000000000000}}: processes ="
        " 100000000000000000000 "
        "are more than 1024 on a device; write processes: 2",
    ),
    (
        {"env,rollout,actor": {"node": ["sim"]}},
        TWO_NODES,
        C + " = {env,rollout,actor: {node: [sim]}}: no node bears the label ['sim']; labels: sim,"
        " train "
        "(cluster.node_groups)",
    ),
    (
        {"env,rollout,actor": {"node": "simm"}},
        TWO_NODES,
        C + " = {env,rollout,actor: {node: simm}}: no node bears the label simm; did you mean sim?"
        " labels: sim, train "
        "(cluster.node_groups)",
    ),
    (
        {"env,rollout,actor": {"devices": "all", "processes": 1}},
        TWO_NODES,
        C + " = {env,rollout,actor: {devices: all, processes: 1}}: a process would have devices "
        "[0, 1, 2, 3, 4, 5, 6, 7] of two nodes; write processes: 8",
    ),
    (
        {"env": "first half", "rollout,actor": "second half"},
        Hardware(),
        C + " = {env: first half}: there is 1 device, which has no halves; write all",
    ),
    (
        "hybrid",
        Hardware(),
        "placement = hybrid: needs 2 devices, and there is 1; use fused or colocated, or set the "
        "available devices with cluster.devices_per_node",
    ),
]


@pytest.mark.parametrize(("placement", "hardware", "text"), BAD)
def test_refusals_name_path_value_limit_and_cure(
    placement: Any, hardware: Hardware, text: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        plan(placement, hardware)
    assert str(caught.value) == text


def test_label_of_an_absent_node_is_refused() -> None:
    with pytest.raises(
        PlacementError,
        match=r"^cluster.node_groups = \{train: 1\}: 1 needs node 1, but there is 1 \(0\)",
    ):
        EmbodiedMode().plan(
            run_helpers.tiny_config(
                {"placement": "fused", "cluster.node_groups": {"sim": 0, "train": 1}}
            ),
            torch.device("cpu"),
        )


def test_simulator_presets_are_refused_for_language_models() -> None:
    for name in ("hybrid", "pipelined"):
        with pytest.raises(
            PlacementError, match="mode=reasoning has none; use fused, colocated or disaggregated"
        ):
            plan(name, EIGHT, mode="reasoning")


@pytest.mark.parametrize("mode", ROLES)
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_presets_on_any_number_of_devices(name: str, devices: int, mode: str) -> None:
    hardware = Hardware((devices,) if devices <= 8 else (8, devices - 8), "cuda")
    if mode == "reasoning" and name in ("hybrid", "pipelined"):
        return
    if devices == 1 and name in ("disaggregated", "hybrid", "pipelined"):
        with pytest.raises(PlacementError, match="needs 2 devices"):
            plan(name, hardware, mode=mode)
        return
    p = plan(name, hardware, mode=mode)
    assert sorted(role for g in p.groups for role in g.roles) == sorted(ROLES[mode])
    used = {d for g in p.groups for d in g.devices}
    assert used == set(range(devices))  # every device is used
    sharing = {g.name: {other.name for other in p.sharing(g)} for g in p.groups}
    if name == "fused":
        assert len(p.groups) == 1 and p.processes("actor") == devices
        assert {p.weights_path(rank) for rank in range(devices)} == {"share"}
    if name == "colocated":
        assert all(len(others) == len(p.groups) - 1 for others in sharing.values())
        assert {p.weights_path(rank) for rank in range(devices)} == {"ipc"}
    if name in ("disaggregated", "hybrid"):
        assert not any(sharing.values()) and p.processes("rollout") == devices // 2
    if name == "pipelined":
        assert sharing == {"env": {"actor"}, "rollout": {"actor"}, "actor": {"env", "rollout"}}
        assert p.weights_path(0) == "ipc"
    if mode == "embodied":
        check_numbers(p, num_envs=64, group_size=1, global_batch_size=1024)


def test_weight_transport() -> None:
    two = Hardware((2, 2), "cuda")
    placement = {"env,rollout": "0-1", "actor": "2-3"}
    across = {"env,rollout": ["0", "2"], "actor": ["1", "3"]}
    for weights, path in (("auto", "broadcast"), ("store", "store"), ("broadcast", "broadcast")):
        assert plan(placement, two, weights=weights).weights_path(0) == path
    assert plan(placement, EIGHT, max_lag=1).weights_path(0) == "store"
    assert [plan(placement, EIGHT, weights="ipc").nearest_actor(rank) for rank in range(2)] == [
        0,
        0,
    ]
    assert [plan(across, two, weights="ipc").nearest_actor(rank) for rank in range(2)] == [0, 1]
    assert plan("colocated", EIGHT).nearest_actor(5) == 5
    assert plan(placement, two).nearest_actor(1) is None
    with pytest.raises(PlacementError) as caught:
        plan(placement, two, weights="ipc")
    assert (
        str(caught.value)
        == "cluster.weights = ipc: rollout rank 0 is on node 0, which has no actor to read the"
        " memory of; leave it out (auto)"
    )


def test_presets_omit_unused_roles() -> None:
    p = plan("colocated", EIGHT, mode="reasoning", without=("critic", "reference"))
    assert [g.name for g in p.groups] == ["rollout,reward", "actor"]
    with pytest.raises(PlacementError, match="this run has no critic; leave it out"):
        plan(
            {"rollout,actor,reward,critic": "all"},
            EIGHT,
            mode="reasoning",
            without=("critic", "reference"),
        )


def test_max_lag_needs_separate_devices() -> None:
    assert plan("disaggregated", EIGHT, max_lag=2).max_lag == 2
    for name, role in (
        ("fused", "env"),
        ("colocated", "env"),
        ("hybrid", "rollout"),
        ("pipelined", "env"),
    ):
        with pytest.raises(PlacementError) as caught:
            plan(name, EIGHT, max_lag=1)
        device = 4 if name == "hybrid" else 0
        assert (
            str(caught.value)
            == f"cluster.max_lag = 1: {role} and actor share device {device}, so they cannot run"
            f" at"
            " once; write cluster.max_lag=0, or give actor its own devices"
            " (placement=disaggregated)"
        )


NUMBERS: list[tuple[Any, dict[str, int], str]] = [
    (
        {"env": "0-2", "rollout,actor": "3-4"},
        {},
        f"{C}: 3 processes of env and 2 of rollout: one must divide the "
        "other; write processes: 2 for env",
    ),
    (
        {"env,rollout": "0-3", "actor": "4-6"},
        {},
        f"{C}: 4 processes of rollout and 3 of actor: one must divide the "
        "other; write processes: 3 for rollout",
    ),
    (
        "fused",
        {"num_envs": 20},
        "env.num_envs = 20: cannot be divided evenly over 8 processes x cluster.stages = 1; "
        "write env.num_envs=16",
    ),
    (
        "fused",
        {"num_envs": 8, "group_size": 4},
        "env.num_envs = 8: cannot be divided evenly over 8 processes x "
        "cluster.stages = 1 x algorithm.group_size = 4; write env.num_envs=32",
    ),
    (
        "fused",
        {"global_batch_size": 100},
        "algorithm.global_batch_size = 100: cannot be divided evenly over 8 "
        "processes of actor; write algorithm.global_batch_size=96",
    ),
]


@pytest.mark.parametrize(("placement", "numbers", "text"), NUMBERS)
def test_environments_and_samples_divide_evenly(
    placement: Any, numbers: dict[str, int], text: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        check_numbers(
            plan(placement, EIGHT),
            **{"num_envs": 64, "group_size": 1, "global_batch_size": 1024, **numbers},
        )
    assert str(caught.value) == text


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
    assert isinstance(p.group("actor"), Group)


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

    check_memory(
        of(14_000_000_000), NEEDS
    )  # 11 GB for the actor while the others are offloaded, and three contexts
    check_memory(plan("colocated", Hardware((2,), "cuda")), NEEDS)  # unknown memory is not checked
    with pytest.raises(PlacementError) as caught:
        check_memory(of(13_000_000_000), NEEDS)
    assert (
        str(caught.value)
        == "placement: cuda 0 needs 1 x 0.5 GB (env) + 1 x 0.5 GB (rollout) + 1 x 11.5 GB (actor)"
        " ="
        " 12.5 GB to update, more than 92% of its 13 GB; one process of actor: weights 2 GB,"
        " activations 9 GB, 0.5 GB of each for CUDA itself; lower algorithm.micro_batch_size"
    )
    disaggregated = plan("disaggregated", Hardware((2,), "cuda", memory=13_000_000_000))
    check_memory(disaggregated, {"env,rollout": NEEDS["rollout"], "actor": NEEDS["actor"]})
    with pytest.raises(
        PlacementError,
        match=r"node 0 needs 2 x 0 MB \(env\) \+ 2 x 2\.5 GB \(rollout\) \+ 2 x 11 GB",
    ):
        check_memory(of(15_000_000_000, "cpu"), NEEDS)  # all share it


def test_memory_refusal_suggests_sharding_where_it_fits() -> None:
    p = plan("fused", Hardware((4,), "cuda", memory=10_000_000_000))
    full: dict[str, Any] = {
        "env,rollout,actor": {"weights": 2_000_000_000, "optimiser": 9_000_000_000}
    }
    sharded: dict[str, Any] = {
        "env,rollout,actor": {"weights": 2_500_000_000, "optimiser": 2_250_000_000}
    }
    cure = "write cluster.shard=true: 4 processes of actor then hold a part of the model each"
    with pytest.raises(
        PlacementError, match=rf"more than 92% of its 10 GB; one process .*; {cure}$"
    ):
        check_memory(p, full, lambda: sharded)
    for no_cure in (None, lambda: full):
        with pytest.raises(
            PlacementError, match=r"; train adapters \(model\.lora_rank\), or give roles devices"
        ):
            check_memory(p, full, no_cure)
    check_memory(p, sharded)


@pytest.mark.slow
def test_run_suggests_sharding_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(memory: int, **options: Any) -> str:
        hardware = Hardware((4,), "cpu", memory=memory)
        monkeypatch.setattr(base, "hardware_of", lambda config, device: hardware)
        c = run_helpers.tiny_config({"placement": "fused", **options})
        placed = EmbodiedMode().plan(c, torch.device("cpu"))
        assert placed is not None
        try:
            EmbodiedMode().check_memory(c, placed)
        except PlacementError as error:
            return str(error)
        return ""

    wide = {"model.hidden": [512, 512]}
    full, parts = (
        sum(map(int, needs.values()))
        for shard in (False, True)
        for c in [run_helpers.tiny_config({"placement": "fused", "cluster.shard": shard, **wide})]
        for needs in (
            EmbodiedMode().memory_estimator(c).needs(plan("fused", Hardware((4,)))).values()
        )
    )
    assert parts < 0.9 * full
    between = int(4 * (parts + full) / 2 / USABLE_MEMORY)
    assert refused(between, **wide).endswith(
        "write cluster.shard=true: 4 processes of actor then hold a part of the model each"
    )
    assert refused(between, **wide, **{"cluster.shard": True}) == ""
    assert "cluster.shard" not in refused(int(3.9 * parts), **wide)
    assert "cluster.shard" not in refused(int(3.9 * parts), **wide, **{"cluster.shard": True})


def test_shard_needs_several_learners(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(devices: int) -> str:
        monkeypatch.setattr(base, "hardware_of", lambda config, device: Hardware((devices,)))
        with pytest.raises((ConfigError, PlacementError)) as caught:
            EmbodiedMode().plan(
                run_helpers.tiny_config({"placement": "fused", "cluster.shard": True}),
                torch.device("cpu"),
            )
        return str(caught.value)

    assert refused(1).startswith(
        "cluster.shard = true: sharding needs at least two actor processes, this plan has one; give"
    )
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    assert (
        refused(2)
        == "cluster.shard = true: needs torch 2.13, this is 2.9.1+cpu; write cluster.shard=false"
    )


def test_memory_rows() -> None:
    p = plan("colocated", Hardware((1,), "cuda"))
    assert lines(memory_rows(p, NEEDS)) == [
        "memory per process  env   rollout  actor",
        "weights             0 MB  2 GB     2 GB",
        "activations         0 MB  0.5 GB   9 GB",
        "total               0 MB  2.5 GB   11 GB",
    ]


def test_compile_is_refused_for_groups_that_time_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A CUDA graph contains the addresses of its tensors, which change with each offload."""
    hardware = Hardware((1,), "cuda")
    monkeypatch.setattr(base, "hardware_of", lambda config, device: hardware)
    for name, reason in (("colocated", "time-share a GPU"), ("fused", "")):
        c = run_helpers.tiny_config({"compile": "always", "placement": name})
        if reason:
            with pytest.raises(ConfigError, match=f"compile=always: processes that {reason}"):
                EmbodiedMode().plan(c, torch.device("cuda"))
        else:
            assert EmbodiedMode().plan(c, torch.device("cuda")) is not None
    placement = {"rollout,actor,reward": 0, "critic": 1, "reference": 1}
    compiled = run_helpers.tiny_config({"compile": "always"})
    with pytest.raises(ConfigError, match="compile=always: processes that time-share a GPU"):
        base.check_compile(compiled, plan(placement, Hardware((2,), "cuda"), mode="reasoning"))
    base.check_compile(compiled, plan(placement, Hardware((2,)), mode="reasoning"))
