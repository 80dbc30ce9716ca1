"""The same run through every placement, over real Ray: equal losses bit for bit, weights where they
belong, resume.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import run_helpers
import torch
from ray.util.placement_group import placement_group, remove_placement_group

from embodied_ppo import run
from embodied_ppo.config.placement import Hardware, plan
from embodied_ppo.config.schema import ClusterConfig
from embodied_ppo.core.types import ConfigError, EnvError, PlacementError, ProcessLost
from embodied_ppo.placement.ray_system import Reservation
from embodied_ppo.placement.ray_worker import LOOPBACK, RayWorker, RayWorkerActor
from embodied_ppo.training import checkpoint

pytestmark = pytest.mark.usefixtures("eight_slots")

SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "env.num_envs": 8,
    "algorithm.horizon": 16,
    "algorithm.global_batch_size": 32,
    "algorithm.update_epoch": 2,
    "evaluation.episodes": 4,
    "evaluation.video_episodes": 0,
    "updates": 4,
    "save_every": 2,
    "compile": "never",
    "threads": 1,
}
MEASURED = ("time/", "speed/", "memory/", "weights/", "device/")


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """What a run measured of learning."""
    told = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{tag: x for tag, x in row.items() if not tag.startswith(MEASURED)} for row in told]


def train(run_dir: Path, **options: Any) -> list[dict[str, Any]]:
    given = {name.replace("__", "."): value for name, value in options.items()}
    run.train(run_helpers.tiny_config({**SMALL, "run_dir": str(run_dir), **given}), quiet=True)
    return rows(run_dir)


class Once:
    """Trainings that several tests look at: options -> run directory."""

    def __init__(self, train: Callable[..., Any], folder: Path) -> None:
        self.train, self.folder, self.made = train, folder, list[dict[str, Any]]()

    def __call__(self, **options: Any) -> Path:
        if options not in self.made:
            self.train(self.folder / str(len(self.made)), **options)
            self.made.append(options)
        return self.folder / str(self.made.index(options))


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    return Once(train, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def local(once: Once) -> Path:
    return once()


ALIKE: dict[str, dict[str, Any]] = {
    "fused": {"placement": "fused", "cluster__devices_per_node": 1},
    "colocated": {
        "placement": "colocated",
        "cluster__devices_per_node": 1,
        "cluster__check_weights": True,
    },
    "disaggregated": {
        "placement": "disaggregated",
        "cluster__devices_per_node": 2,
        "cluster__weights": "store",
        "cluster__check_weights": True,
    },
    "hybrid": {"placement": "hybrid", "cluster__devices_per_node": 2},
    "apart": {
        "cluster__component_placement": {"env": "0-1", "rollout": 2, "actor": 3},
        "cluster__devices_per_node": 4,
    },
    "crossed": {
        "cluster__component_placement": {"env,actor": 0, "rollout": 1},
        "cluster__devices_per_node": 2,
    },
}


ROLES = {
    "fused": ("env+rollout+actor",),
    "colocated": ("env", "rollout", "actor"),
    "hybrid": ("env", "rollout+actor"),
    "apart": ("env", "rollout", "actor"),
    "crossed": ("env+actor", "rollout"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_process_for_each_role_trains_as_one_process_does(
    name: str, local: Path, tmp_path: Path
) -> None:
    found, expected = train(tmp_path / "run", **ALIKE[name]), rows(local)
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    own = {tag for tag in last if tag.startswith("memory/")}
    assert own == {
        "memory/peak_gb",
        *(f"memory/{roles}_peak_gb" for roles in ROLES.get(name, ("env+rollout", "actor"))),
    }
    assert last["time/swap_s"] < 0.01
    assert 0 <= last["device/idle"] <= last["device/idle_max"] < 1
    one, other = (
        checkpoint.open_checkpoint(d / "checkpoints" / "step_000004")
        for d in (local, tmp_path / "run")
    )
    assert all(torch.equal(x, other.policy()[name]) for name, x in one.policy().items())


TWICE: dict[str, dict[str, Any]] = {
    "fused": {"placement": "fused", "cluster__devices_per_node": 2},
    "disaggregated": {"placement": "disaggregated", "cluster__devices_per_node": 4},
    "hybrid": {"placement": "hybrid", "cluster__devices_per_node": 4},
}


def test_two_processes_for_each_role_train_alike_wherever_they_are(local: Path, once: Once) -> None:
    found = {name: rows(once(**options)) for name, options in TWICE.items()}
    for name, told in found.items():
        assert told == found["fused"], name
    alone = rows(local)
    assert (
        found["fused"][1]["rollout/return"] == alone[1]["rollout/return"]
    )  # the same noise, whoever acts
    for tag in ("value/explained_variance", "advantage/std", "rollout/episodes"):
        assert found["fused"][1][tag] == pytest.approx(alone[1][tag], rel=1e-5), tag
    assert found["fused"][1]["value/loss"] != alone[1]["value/loss"]  # other minibatches


IN_PARTS: dict[str, dict[str, Any]] = {
    "fused": TWICE["fused"],
    "disaggregated": {
        **TWICE["disaggregated"],
        "cluster__weights": "store",
        "cluster__check_weights": True,
    },
}


@pytest.fixture(scope="module")
def reference(once: Once) -> Path:
    return once(**TWICE["fused"], algorithm__use_kl_loss=True)


def assert_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for tag, value in theirs.items():
            assert ours[tag] == (
                pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
            ), tag


@pytest.mark.parametrize("name", IN_PARTS)
def test_learners_that_hold_parts_learn_what_whole_ones_do(
    name: str, reference: Path, tmp_path: Path
) -> None:
    options = {**IN_PARTS[name], "algorithm__use_kl_loss": True, "cluster__shard": True}
    assert_close(train(tmp_path / "run", **options), rows(reference))
    assert "cluster.shard: 2 processes of actor hold" in (tmp_path / "run" / "log.txt").read_text()
    one, other = (
        checkpoint.open_checkpoint(d / "checkpoints" / "step_000004")
        for d in (reference, tmp_path / "run")
    )
    run_helpers.assert_states_close(other.policy(), one.policy())
    run_helpers.assert_states_close(other.training()["learner"], one.training()["learner"])


def test_a_run_with_parts_resumes_one_with_whole_models_and_the_other_way_round(
    reference: Path, tmp_path: Path
) -> None:
    options = {**TWICE["fused"], "algorithm__use_kl_loss": True}
    half = str(reference / "checkpoints" / "step_000002")
    resumed = train(tmp_path / "parts", **options, cluster__shard=True, resume=half)
    assert_close(resumed, rows(reference)[-2:])
    train(
        tmp_path / "alone", algorithm__use_kl_loss=True, updates=5, resume=str(tmp_path / "parts")
    )
    assert len(rows(tmp_path / "alone")) == 1


PIXELS: dict[str, Any] = {
    "env.id": "Tabletop",
    "env.num_envs": 4,
    "env.action_chunk": 4,
    "env.max_episode_steps": 16,
    "env.cameras": ["front"],
    "env.image_size": 32,
    "env.kwargs": {"families": ["reach"], "obs": "language"},
    "model.policy": "token",
    "model.width": 32,
    "algorithm.horizon": 4,
    "algorithm.global_batch_size": 8,
    "evaluation.episodes": 2,
    "evaluation.num_envs": 2,
    "updates": 3,
}


def test_a_policy_that_sees_learns_in_parts_what_it_learns_whole(tmp_path: Path) -> None:
    given = {name.replace(".", "__"): x for name, x in PIXELS.items()}
    expected = train(tmp_path / "whole", **given, **TWICE["fused"])
    film = {"evaluation__video_episodes": 1, "evaluation__video_steps": 4}
    assert_close(
        train(tmp_path / "fused", **given, **TWICE["fused"], **film, cluster__shard=True), expected
    )
    assert list((tmp_path / "fused" / "videos").glob("*.mp4"))


def test_a_run_resumes_bit_for_bit_and_in_another_placement(once: Once, tmp_path: Path) -> None:
    whole = once(**TWICE["hybrid"])
    resumed = train(
        tmp_path / "half", **TWICE["hybrid"], resume=str(whole / "checkpoints" / "step_000002")
    )
    assert resumed == rows(whole)[-2:]
    train(
        tmp_path / "half",
        placement="fused",
        cluster__devices_per_node=1,
        updates=5,
        resume=str(tmp_path / "half"),
    )
    log = (tmp_path / "half" / "log.txt").read_text()
    assert "resume: 2 processes simulated before, now 1 does; episodes begin anew" in log
    train(tmp_path / "alone", updates=5, resume=str(whole))
    assert "resume: 2 processes simulated before" in (tmp_path / "alone" / "log.txt").read_text()


def test_rollouts_run_ahead_where_they_may(tmp_path: Path) -> None:
    told = train(
        tmp_path / "run", placement="disaggregated", cluster__devices_per_node=2, cluster__max_lag=1
    )
    assert [row["rollout/version_lag"] for row in told if "rollout/version_lag" in row] == [
        0.0,
        1.0,
        1.0,
        1.0,
    ]


def test_devices_that_wait_most_of_the_time_are_told_of(tmp_path: Path) -> None:
    apart = {
        "cluster__component_placement": {"env": 0, "rollout": 1, "actor": 2},
        "cluster__devices_per_node": 3,
    }
    train(tmp_path / "run", **apart, updates=21)
    told = [
        line
        for line in (tmp_path / "run" / "log.txt").read_text().splitlines()
        if "warning, update" in line
    ]
    (line,) = (line for line in told if "device/idle is 0." in line)
    assert line.endswith("above 0.5: devices wait more than they work: try another placement")


def test_what_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (
            PlacementError,
            "needs device 3",
            {"cluster__component_placement": {"env,rollout,actor": "0-3"}},
        ),
        (EnvError, "CartPole-v7", {"placement": "fused", "env__id": "CartPole-v7"}),
        (
            PlacementError,
            "cannot be divided",
            {
                "placement": "fused",
                "env__num_envs": 6,
                "algorithm__global_batch_size": 32,
                "cluster__stages": 4,
            },
        ),
        (ConfigError, "action_chunk", {"placement": "hybrid", "env__action_chunk": 3}),
        (
            ConfigError,
            "compile=always: 2 processes learn together",
            {"placement": "fused", "compile": "always"},
        ),
        (
            PlacementError,
            "cluster.shard = true: one process learns",
            {"placement": "disaggregated", "cluster__shard": True},
        ),
        (
            PlacementError,
            "only cluster.weights=store",
            {"placement": "disaggregated", "cluster__max_lag": 1, "cluster__weights": "ipc"},
        ),
    ]
    for kind, words, options in cases:
        with pytest.raises((kind, EnvError), match=words):
            train(tmp_path / "run", cluster__devices_per_node=2, **options)
        assert not (tmp_path / "run").exists()
    assert run_helpers.free_ray_cpus() == 8.0


def test_devices_that_are_not_there_are_said_within_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(
        PlacementError, match=r"needs 1 nodes with 64 CPUs, and the Ray cluster has 1 \(8 CPUs\)"
    ):
        train(tmp_path / "run", placement="fused", cluster__devices_per_node=64, env__num_envs=64,
              algorithm__global_batch_size=64)  # fmt: skip


def test_devices_that_others_have_are_waited_for_as_long_as_it_says(tmp_path: Path) -> None:
    taken = placement_group([{"CPU": 1.0}] * 7)
    assert taken.wait(20)
    try:
        with pytest.raises(
            PlacementError,
            match=r"placement: needs 2 CPUs, 8 registered, 1 free after 2 s; add nodes",
        ):
            train(
                tmp_path / "run",
                placement="hybrid",
                cluster__devices_per_node=2,
                cluster__start_timeout_s=2,
            )
    finally:
        remove_placement_group(taken)


def test_a_ray_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = object.__new__(Reservation)
    asked.plan = plan("fused", Hardware())
    with pytest.raises(
        PlacementError, match=rf"^cluster.address = {LOOPBACK}:1: Ray cannot be reached .*refused"
    ):
        asked._connect(ClusterConfig(address=f"{LOOPBACK}:1"))
    monkeypatch.setenv("RAY_ADDRESS", f"{LOOPBACK}:99999")
    with pytest.raises(
        PlacementError,
        match=rf"^cluster.address is null, RAY_ADDRESS = {LOOPBACK}:99999: Ray cannot",
    ):
        asked._connect(ClusterConfig())


def test_a_system_may_be_closed_twice(tmp_path: Path) -> None:
    c = run_helpers.tiny_config({**SMALL, "placement": "fused", "cluster.devices_per_node": 1})
    with ExitStack() as stack:
        run_helpers.build_cluster_system(c, tmp_path, stack).close()


def listening(pid: int) -> set[str]:
    """Addresses that a process listens at, as the kernel writes them: hexadecimal, address:port."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    at = {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
    held = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            held.add(os.readlink(fd))
    return {address for socket, address in at.items() if socket in held}


def test_on_one_machine_what_we_open_is_heard_there_alone() -> None:
    """Exchange, store and process group: all at 127.0.0.1.

    What Ray itself opens is there before (docs/security.md).
    """
    ones = [RayWorkerActor.options(num_cpus=1).remote(f"rank {i}", 1) for i in range(2)]
    opened = [
        one.open.remote(LOOPBACK, "secret", 20.0, serves=False, hosts_store=False) for one in ones
    ]
    pids = [told.pid for told in ray.get(opened)]
    before = set.union(*map(listening, pids))
    told = ray.get(ones[0].open.remote(LOOPBACK, "secret", 20.0, serves=True, hosts_store=True))
    ray.get([one.join.remote("weights", told.store, i, 2, 20.0) for i, one in enumerate(ones)])
    ours = set.union(*map(listening, pids)) - before
    assert len(ours) >= 4  # exchange, store, and one of the group in each
    assert {address.partition(":")[0] for address in ours} == {"0100007F"}
    for one in ones:
        ray.kill(one)


def test_a_learner_that_reaches_nobody_says_where_and_how_long_it_tried() -> None:
    nobody = socket.create_server((LOOPBACK, 0))
    address = nobody.getsockname()
    nobody.close()
    with pytest.raises(
        ProcessLost,
        match=rf"team rank 0 of 2: .* at {LOOPBACK}:{address[1]} within 0.2 s \(cluster",
    ):
        RayWorker("actor rank 0", 0).join("team", address, 0, 2, 0.2)
