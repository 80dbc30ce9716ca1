"""Train one run in every placement over real Ray: equal metrics and weights, resuming, refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ray
import run_helpers
import torch
from ray.util.placement_group import placement_group, remove_placement_group

from embodied_envs.base.errors import ConfigError, EnvError
from embodied_ppo.cluster import ray_reservation
from embodied_ppo.cluster.ray_reservation import Reservation
from embodied_ppo.cluster.ray_worker import LOOPBACK, RayWorkerActor
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.placement import Hardware, plan
from tests.integration.test_resume import rows

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("eight_slots")

SMALL = run_helpers.options("""env.id=CartPole-v1 env.num_envs=8 algorithm.horizon=16
    algorithm.global_batch_size=32 algorithm.update_epoch=2 evaluation.episodes=4
    evaluation.video_episodes=0 updates=4 save_every=2 compile=never threads=1""")


def weights(run_dir: Path, update: int = 4) -> dict[str, torch.Tensor]:
    """Return the policy of a checkpoint."""
    return run_helpers.stored(run_dir, update).policy()


def equal_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[k]) for k, x in one.items())


def train(run_dir: Path, **options: Any) -> list[dict[str, Any]]:
    """Train with ``SMALL``; ``__`` in the name of an option stands for a dot."""
    overrides = {name.replace("__", "."): value for name, value in options.items()}
    run_helpers.train(run_dir, {**SMALL, **overrides})
    return rows(run_dir)


class CachedRuns:
    """Runs that several tests read: options -> run directory."""

    def __init__(self, train: Callable[..., Any], folder: Path) -> None:
        self.train, self.folder, self.options = train, folder, list[dict[str, Any]]()

    def __call__(self, **options: Any) -> Path:
        if options not in self.options:
            self.train(self.folder / str(len(self.options)), **options)
            self.options.append(options)
        return self.folder / str(self.options.index(options))


@pytest.fixture(scope="module")
def cached_run(tmp_path_factory) -> CachedRuns:
    return CachedRuns(train, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def local(cached_run: CachedRuns) -> Path:
    return cached_run()


GROUPS = run_helpers.options("""env__id=Go1Joystick env__randomize=true env__num_threads=1
    env__max_episode_steps=12 model__actor_obs=[state] model__critic_obs=[state,privileged]""")
EQUAL_TO_LOCAL: dict[str, dict[str, Any]] = {
    "fused": {"placement": "fused", "cluster__devices_per_node": 1},
    "colocated": run_helpers.options("""placement=colocated cluster__devices_per_node=1
        model__history=2 model__recurrent=gru model__recurrent_size=4
        algorithm__minibatch_unit=column"""),
    "disaggregated": {"placement": "disaggregated", "cluster__devices_per_node": 2},
    "hybrid": {"placement": "hybrid", "cluster__devices_per_node": 2},
    "apart": {
        "cluster__component_placement": {"env": "0-1", "rollout": 2, "actor": 3},
        "cluster__devices_per_node": 4,
        "algorithm__rpo_alpha": 0.2,
        "algorithm__symmetry": "both",
        **GROUPS,
    },
    "rollouts": run_helpers.options("""cluster__devices_per_node=3 env__id=Tabletop
        env__max_episode_steps=16 env__restart_each_rollout=true algorithm__rollout_epoch=2
        algorithm__adv_type=grpo algorithm__group_size=2 algorithm__group_filter=success
        algorithm__group_filter_rounds=1 algorithm__loss_agg_func=trajectory-mean""")
    | {
        "cluster__component_placement": {"env,rollout": "0-1", "actor": 2},
        "env__kwargs": {"families": ["reach"], "reward": "success"},
    },
    "crossed": {
        "cluster__component_placement": {"env,actor": 0, "rollout": 1},
        "cluster__devices_per_node": 2,
        "model__network": f"{ROOT / 'scripts/examples/own_network.py'}:Residual",
        "model__network_options": {"width": 8},
    },
}


ROLES = {
    "fused": ("env+rollout+actor",),
    "colocated": ("env", "rollout", "actor"),
    "hybrid": ("env", "rollout+actor"),
    "apart": ("env", "rollout", "actor"),
    "crossed": ("env+actor", "rollout"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL_TO_LOCAL)
def test_placements_with_one_learner_equal_one_process(
    name: str, cached_run: CachedRuns, tmp_path
) -> None:
    """In "apart" samples are mirrored and the critic reads a group of observations of its own;
    "crossed" has a user's network; in "colocated" the policy has memory; "rollouts" has two passes
    and filters groups.
    """
    run_dir, options = tmp_path / "run", EQUAL_TO_LOCAL[name]
    sections = ("env__", "model__", "algorithm__")
    local = cached_run(**{p: x for p, x in options.items() if p.startswith(sections)})
    metrics, expected = train(run_dir, **options), rows(local)
    assert len(metrics) == len(expected) == 5
    for row, expected_row in zip(metrics, expected, strict=True):
        assert row == expected_row
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    memory_tags = {tag for tag in last if tag.startswith("memory/")}
    assert memory_tags == {
        "memory/peak_gb",
        *(f"memory/{roles}_peak_gb" for roles in ROLES.get(name, ("env+rollout", "actor"))),
    }
    assert last["time/swap_s"] < 0.01
    assert 0 <= last["device/idle"] <= last["device/idle_max"] < 1
    assert equal_tensors(weights(run_dir), weights(local))


@pytest.mark.slow
def test_each_rollout_process_refills_its_share_of_a_batch(tmp_path) -> None:
    """2 processes with 4 environments and 2 passes each lack groups until the last round."""
    options = EQUAL_TO_LOCAL["rollouts"] | {"algorithm__group_filter_rounds": 2, "updates": 2}
    for row in train(tmp_path / "run", **options)[1:]:
        assert row["rollout/filter_rounds"] > 2  # of at most 2 x 2 passes, mean of both
        assert 0 <= row["rollout/groups_missing"] <= 8
    with pytest.raises(ConfigError, match=r"group_filter_rounds > 1 needs .* one stage"):
        train(tmp_path / "refused", **options, cluster__stages=2)


TWO_LEARNERS: dict[str, dict[str, Any]] = {
    "fused": {"placement": "fused", "cluster__devices_per_node": 2},
    "disaggregated": {"placement": "disaggregated", "cluster__devices_per_node": 4},
    "hybrid": {"placement": "hybrid", "cluster__devices_per_node": 4},
}


@pytest.mark.slow
def test_placements_with_two_learners_equal_each_other(local: Path, cached_run: CachedRuns) -> None:
    metrics = {name: rows(cached_run(**options)) for name, options in TWO_LEARNERS.items()}
    for name, run_metrics in metrics.items():
        assert run_metrics == metrics["fused"], name
    first, expected = metrics["fused"][1], rows(local)[1]
    # Noise does not depend on the process that draws it; the minibatches do.
    assert first["rollout/return"] == expected["rollout/return"]
    for tag in ("value/explained_variance", "advantage/std", "rollout/episodes"):
        assert first[tag] == pytest.approx(expected[tag], rel=1e-5), tag
    assert first["value/loss"] != expected["value/loss"]


SHARDED: dict[str, dict[str, Any]] = {
    "fused": TWO_LEARNERS["fused"],
    "disaggregated": TWO_LEARNERS["disaggregated"],
}


@pytest.fixture(scope="module")
def unsharded(cached_run: CachedRuns) -> Path:
    return cached_run(**TWO_LEARNERS["fused"], algorithm__use_kl_loss=True)


def assert_close(metrics: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(metrics) == len(expected)
    for row, expected_row in zip(metrics, expected, strict=True):
        assert row.keys() == expected_row.keys()
        for tag, value in expected_row.items():
            assert row[tag] == (
                pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
            ), tag


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_sharded_learners_equal_unsharded_ones(name: str, unsharded: Path, tmp_path) -> None:
    options = {**SHARDED[name], "algorithm__use_kl_loss": True, "cluster__shard": True}
    run_dir = tmp_path / "run"
    assert_close(train(run_dir, **options), rows(unsharded))
    expected, sharded = (run_helpers.stored(folder, 4) for folder in (unsharded, run_dir))
    run_helpers.assert_states_close(sharded.policy(), expected.policy())
    run_helpers.assert_states_close(sharded.training()["learner"], expected.training()["learner"])


@pytest.mark.slow
def test_sharded_and_unsharded_runs_resume_each_other(unsharded: Path, tmp_path) -> None:
    options = {**TWO_LEARNERS["fused"], "algorithm__use_kl_loss": True}
    half = str(unsharded / "checkpoints" / "step_000002")
    resumed = train(tmp_path / "sharded", **options, cluster__shard=True, resume=half)
    assert_close(resumed, rows(unsharded)[-2:])
    train(
        tmp_path / "local", algorithm__use_kl_loss=True, updates=5, resume=str(tmp_path / "sharded")
    )
    assert len(rows(tmp_path / "local")) == 1


# Minibatches of all columns are the same in every placement.
RECURRENT: dict[str, Any] = run_helpers.options("""model__history=2 model__recurrent=gru
    model__recurrent_size=4 algorithm__minibatch_unit=column algorithm__global_batch_size=128
    updates=3""")


MIRRORED = RECURRENT | run_helpers.options("""env__id=Go1Joystick env__num_threads=1
    env__max_episode_steps=12 algorithm__symmetry=both""")


@pytest.mark.slow
@pytest.mark.parametrize("options", [RECURRENT, MIRRORED], ids=["plain", "symmetry"])
def test_recurrent_policy_with_two_learners_equals_one_process(
    options: dict[str, Any], cached_run: CachedRuns, tmp_path
) -> None:
    """Each learner has half of the columns of a minibatch, with their states and images."""
    metrics = train(tmp_path / "run", **TWO_LEARNERS["hybrid"], cluster__shard=True, **options)
    local = cached_run(**options)
    assert_close(metrics, rows(local))
    run_helpers.assert_states_close(weights(tmp_path / "run", 3), weights(local, 3))


@pytest.mark.slow
def test_run_resumes_bit_for_bit_and_in_other_placements(cached_run: CachedRuns, tmp_path) -> None:
    run_dir, hybrid = cached_run(**TWO_LEARNERS["hybrid"]), TWO_LEARNERS["hybrid"]
    half = str(run_dir / "checkpoints" / "step_000002")
    assert train(tmp_path / "half", **hybrid, resume=half) == rows(run_dir)[-2:]
    train(
        tmp_path / "half",
        placement="fused",
        cluster__devices_per_node=1,
        updates=5,
        resume=str(tmp_path / "half"),
    )
    assert "all episodes start again" in (tmp_path / "half" / "log.txt").read_text()
    train(tmp_path / "local", updates=5, resume=str(run_dir))


@pytest.mark.slow
def test_max_lag_lets_rollouts_run_ahead(tmp_path) -> None:
    metrics = train(
        tmp_path / "run", placement="disaggregated", cluster__devices_per_node=2, cluster__max_lag=1
    )
    lags = [row["rollout/version_lag"] for row in metrics if "rollout/version_lag" in row]
    assert lags == [0.0, 1.0, 1.0, 1.0]


def test_refused_options_leave_no_files_and_no_processes(tmp_path) -> None:
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (
            PlacementError,
            "0-3 is no device",
            {"cluster__component_placement": {"env,rollout,actor": "0-3"}},
        ),
        (EnvError, "CartPole-v7", {"placement": "fused", "env__id": "CartPole-v7"}),
        (ConfigError, "action_chunk", {"placement": "hybrid", "env__action_chunk": 3}),
        (PlacementError, "shard", {"placement": "disaggregated", "cluster__shard": True}),
    ]
    for error, message, options in cases:
        with pytest.raises((error, EnvError), match=message):
            train(tmp_path / "run", cluster__devices_per_node=2, **options)
        assert not (tmp_path / "run").exists()
    assert run_helpers.free_ray_cpus() == 8.0


@pytest.mark.slow
def test_waiting_for_occupied_devices_ends_after_start_timeout(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ray_reservation, "START_TIMEOUT_S", 2.0)
    occupied = placement_group([{"CPU": 1.0}] * 7)
    assert occupied.wait(20)
    options = {"placement": "hybrid", "cluster__devices_per_node": 2}
    try:
        with pytest.raises(PlacementError, match=r"2 CPUs.*2 s"):
            train(tmp_path / "run", **options)
    finally:
        remove_placement_group(occupied)


def test_ray_that_cannot_be_used_is_named(monkeypatch) -> None:
    reservation = object.__new__(Reservation)
    reservation.plan = plan("fused", Hardware())
    for port in (1, 99999):
        monkeypatch.setenv("RAY_ADDRESS", f"{LOOPBACK}:{port}")
        with pytest.raises(PlacementError, match=rf"RAY_ADDRESS.*{LOOPBACK}:{port}"):
            reservation._connect()
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(ray, "init", mock.Mock(side_effect=Exception("node timed out")))
    with pytest.raises(PlacementError, match=r"Ray could not be started \(node timed out\)"):
        reservation._connect()


def listening_addresses(pid: int) -> set[str]:
    """Return the addresses that a process listens on, hexadecimal as in /proc/net: address:port."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    addresses = {f"socket:[{row[9]}]": row[1] for row in rows if row[3] == "0A"}
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            sockets.add(os.readlink(fd))
    return {address for socket, address in addresses.items() if socket in sockets}


@pytest.mark.slow
def test_processes_of_one_machine_listen_on_loopback_only() -> None:
    """Exchange, store and process group listen on 127.0.0.1.

    Sockets that Ray opens are excluded (docs/security.md).
    """
    actors = [RayWorkerActor.options(num_cpus=1).remote(f"rank {i}", 1) for i in range(2)]
    address = (LOOPBACK, "secret", 20.0)
    calls = [actor.open.remote(*address, serves=False, hosts_store=False) for actor in actors]
    pids = [endpoints.pid for endpoints in ray.get(calls)]
    before = set.union(*map(listening_addresses, pids))
    endpoints = ray.get(actors[0].open.remote(*address, serves=True, hosts_store=True))
    ray.get([x.join.remote("weights", endpoints.store, i, 2, 20.0) for i, x in enumerate(actors)])
    opened = set.union(*map(listening_addresses, pids)) - before
    assert len(opened) >= 4  # exchange, store, and one of the group in each process
    assert {address.partition(":")[0] for address in opened} == {"0100007F"}
    for actor in actors:
        ray.kill(actor)
