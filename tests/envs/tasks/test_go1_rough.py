"""Go1Rough: starts, heights above the ground, curriculum, and whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor

import embodied_envs
from embodied_envs.checks import check_env
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks import go1_rough, terrain
from embodied_envs.tasks.go1_rough import Go1Rough
from embodied_ppo import run
from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.types import EnvError
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.models.actor_critic import ActorCritic
from tests.integration.test_resume import assert_same, contents, rows

ALL = ["state", "height_scan", "privileged"]


def make(n: int = 4, **options: Any) -> MujocoEnv:
    options = {"seeds": list(range(n)), "num_threads": 1, "kwargs": {"levels": 2}} | options
    env = embodied_envs.make("Go1Rough", num_envs=n, **options)
    assert isinstance(env, MujocoEnv) and isinstance(env.task, Go1Rough)
    return env


def ground(env: MujocoEnv) -> Tensor:
    """Return the terrain's height under each trunk, m, [N]."""
    assert isinstance(env.task, Go1Rough)
    return env.task.terrain.height(env.s["qpos"][:, :2])


# ------------------------------------------------------------------------------------- observations
@pytest.mark.slow
def test_contract_of_all_groups() -> None:
    report = check_env(
        lambda seeds: make(len(seeds), seeds=seeds, max_episode_steps=12, obs_keys=ALL), steps=30
    )
    assert report.longest == 12 and report.seeded and not report.notes
    env = make(obs_keys=ALL)
    obs = env.reset()
    assert isinstance(obs, dict)
    assert [obs[name].shape[1] for name in ALL] == [48, 117, 87]
    # All stand on a platform, home: 0.318 m above the ground, which is flat 0.4 m around it.
    scan = obs["height_scan"].view(4, 13, 9)
    assert scan[:, 4:9, 2:7].flatten().tolist() == pytest.approx([-0.318] * 4 * 25, abs=1e-6)
    assert obs["privileged"][:, 33].tolist() == pytest.approx([0.318] * 4, abs=1e-6)
    assert obs["privileged"][:, 42].tolist() == pytest.approx([0.6] * 4)  # friction


def test_height_scan_is_computed_only_where_an_option_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> Tensor:
        raise AssertionError("height_scan was computed")

    monkeypatch.setattr(terrain.Terrain, "scan", fail)
    for keys in (None, ["state"], ["state", "privileged"]):
        env = make(2, obs_keys=keys)
        env.reset()
        obs = env.step(torch.zeros(2, 12)).obs
        assert list(obs) == keys if isinstance(obs, dict) else keys is None
    with pytest.raises(EnvError, match=r"'scan' is not in its observation; .*height_scan"):
        make(2, obs_keys=["scan"])


def test_robots_settle_on_stairs() -> None:
    """Robots that fall from 3 cm stand still on two steps of 2.5 cm, and count as on the ground."""
    env = make(kwargs={"terrain": ["stairs"], "levels": 6, "level": 0})
    task = env.task
    assert isinstance(task, Go1Rough)
    env.reset()
    # The trunk is above the edge at 0.7 m: the rear feet are on the first step, the front feet on
    # the second one.
    qpos = env.s["qpos"].clone()
    qpos[:, 0] = task.terrain.centers[0, 0] + 0.7
    qpos[:, 1] = torch.linspace(-0.3, 0.3, 4, dtype=torch.float64)
    qpos[:, 2] = terrain.LIFT_M + 2 * 0.025 + task.qpos0[2] + 0.03
    qpos[:, 3:7] = torch.tensor([1.0, 0, 0, 0])
    qpos[:, 7:] = task.home
    env.physics.reset(torch.ones(4, dtype=torch.bool), {"qpos": qpos}, torch.zeros(4, 0))
    for _ in range(60):
        assert not env.step(torch.zeros(4, 12)).terminated.any()
    feet = env.s["site_xpos"][:, task.feet]
    heights = task.terrain.height(feet[..., :2]) - terrain.LIFT_M
    steps = heights.sort(1).values
    torch.testing.assert_close(
        steps, torch.tensor([[0.025, 0.025, 0.05, 0.05]] * 4).double(), atol=1e-6, rtol=0
    )
    clearance = feet[..., 2] - terrain.LIFT_M - heights  # the feet's radius is 23 mm
    assert float(clearance.min()) > 0.022 and float(clearance.max()) < 0.0235
    assert bool(task.down(env.s).all()) and float(env.s["qvel"].abs().max()) < 0.1
    assert bool(((task.height(env.s) > 0.24) & (task.height(env.s) < 0.28)).all())


def test_termination_is_relative_to_the_ground_below_the_feet() -> None:
    env = make(2, kwargs={"terrain": ["slopes"], "levels": 1})
    env.reset()
    s = {k: x.clone() for k, x in env.s.items()}
    center = env.task.terrain.centers[0]  # pyright: ignore[reportAttributeAccessIssue]
    s["site_xpos"][:, :, :2] = center[:2] + 1.6  # the feet are on the top, 0.36 m high
    s["qpos"][:, 2] = center[2] + 0.36 + torch.tensor([0.14, 0.16])
    assert env.task.terminated(s).tolist() == [True, False]
    s["site_xpos"][:, :, 2] = center[2] + 0.36 + torch.tensor([[0.0259], [0.0261]])
    assert env.task.down(s)[:, env.task.feet[:1]].flatten().tolist() == [True, False]  # pyright: ignore[reportAttributeAccessIssue]


# ------------------------------------------------------------------------------------------- starts
def test_first_episodes_are_spread_evenly_over_tiles() -> None:
    env = make(600, kwargs={"levels": 3})
    assert env.task_names == terrain.KINDS
    for _ in range(2):  # two evaluations of different seeds
        kinds, levels = env.s["kind"], env.s["terrain_level"]
        tiles = (3 * kinds + levels).bincount(minlength=12)
        assert int(tiles.min()) > 25 and int(tiles.max()) < 80  # 50 each
        center = env.task.terrain.center(kinds, levels)  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.equal(env.s["qpos"][:, :2], center[:, :2])
        env.restart(list(range(1000, 1600)))
    heading = 2 * torch.atan2(env.s["qpos"][:, 6], env.s["qpos"][:, 3])
    assert heading.min() < 0.1 and heading.max() > 6.1 and abs(float(heading.mean()) - 3.14) < 0.2


@pytest.mark.parametrize("level", ["curriculum", "uniform", 1])
def test_levels_of_later_episodes(level: str | int) -> None:
    env = make(64, kwargs={"levels": 4, "level": level}, max_episode_steps=2)
    first = {k: env.s[k].clone() for k in ("kind", "terrain_level")}
    env.reset()
    env.s["walked"].fill_(9.0)  # as after a long walk
    env.s["commanded"].fill_(9.0)
    env.reset_where(torch.arange(64) % 2 == 0)  # as at the end of an episode
    kind, new = env.s["kind"], env.s["terrain_level"]
    kept, moved = new[1::2], new[::2]
    assert torch.equal(kept, first["terrain_level"][1::2])
    if level == "curriculum":
        assert torch.equal(kind, first["kind"])
        below = first["terrain_level"][::2] < 3
        assert torch.equal(moved[below], first["terrain_level"][::2][below] + 1)
        assert len(below) - int(below.sum()) > 3 and len(moved[~below].unique()) > 2
    elif level == "uniform":
        assert not torch.equal(kind[::2], first["kind"][::2]) and len(moved.unique()) == 4
    else:
        assert bool((new == 1).all()) and not torch.equal(kind[::2], first["kind"][::2])
    center = env.task.terrain.center(kind, new)  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.equal(env.s["qpos"][:, :2], center[:, :2])
    assert (env.s["qpos"][:, 2] - ground(env)).tolist() == pytest.approx([0.318] * 64)
    clearance = env.task.terrain.clearance(env.s["site_xpos"][:, env.task.feet])  # pyright: ignore[reportAttributeAccessIssue]
    assert bool((clearance[::2] > 0.015).all())  # no foot starts deep in the ground
    assert not env.s["walked"][::2].any() and not env.s["commanded"][::2].any()


def test_walked_distance_follows_the_command_and_a_fall_counts_the_missing_one() -> None:
    env = make(3, kwargs={"terrain": ["flat"], "levels": 5})
    task = env.task
    assert isinstance(task, Go1Rough)
    s = {k: x.clone() for k, x in env.s.items()}
    s["command"] = torch.tensor([[0.6, 0.8, 0], [0.6, 0.8, 0], [0, 0, 1]]).double()
    s["qpos"][:, 3:7] = torch.tensor([1.0, 0, 0, 0])
    s["qvel"] = torch.zeros(3, 18).double()
    s["qvel"][:, :2] = torch.tensor([[0.6, 0.8], [0.8, -0.6], [1, 1]]).double()
    after = task.advance(s, torch.zeros(3, 12).double(), torch.zeros(3, task.step_noise).double())
    assert after["walked"].tolist() == pytest.approx([0.02, 0, 0], abs=1e-9)  # 20 ms at 1 m/s
    assert after["commanded"].tolist() == pytest.approx([0.02, 0.02, 0], abs=1e-9)
    # At 1 m/s, all have walked 3 m of 3 m in 150 of 500 steps; the others would have been 7 m.
    s["command"] = torch.tensor([[1.0, 0, 0]] * 3).double()
    s |= {k: torch.full_like(x, 3.0) for k, x in s.items() if k in ("walked", "commanded")}
    s["steps"], s["terrain_level"] = torch.tensor([150.0] * 3).double(), torch.tensor([2, 2, 2])
    s["walked"] = torch.tensor([3.0, 3.0, 6.0]).double()
    s["qpos"][1:, 2] = 0.1  # two have fallen
    start = task.reset(u := torch.full((3, task.reset_noise), 0.5).double())
    assert task.carry_over(s, start, u)["terrain_level"].tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"level": 6},
            "env.kwargs.level=6 must be curriculum, uniform or a whole number from 0 to 5",
        ),
        ({"level": "hard"}, "env.kwargs.level='hard' must be curriculum, uniform or a whole"),
        ({"terrain": ["flat", "hills"]}, "env.id=Go1Rough: env.kwargs.terrain: 'hills' is unknown"),
        ({"level_count": 3}, "env.kwargs.level_count is unknown"),
    ],
)
def test_mistakes_name_the_option(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(1, kwargs=kwargs)


# --------------------------------------------------------------------------------------- whole runs
@pytest.mark.slow
def test_evaluation_depends_on_its_seed_only() -> None:
    def measured(num_envs: int, **kwargs: Any) -> tuple[evaluation.Episode, ...]:
        def env(seeds: list[int]) -> MujocoEnv:
            return make(len(seeds), seeds=seeds, max_episode_steps=4, kwargs=kwargs)

        with torch.random.fork_rng():
            torch.manual_seed(0)
            policy = ActorCritic(env([0]).obs_spec, env([0]).action_spec, ModelConfig())
        return evaluation.evaluate(policy, env, episodes=6, num_envs=num_envs, seed=0).episodes

    episodes = measured(2, levels=3)
    assert episodes == measured(6, levels=3) == measured(4, levels=3, level="uniform")
    assert len({e.kind for e in episodes}) > 1


@pytest.mark.slow
def test_resumed_run_with_a_curriculum_equals_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every episode, of 6 steps, moves its robot one level up."""
    monkeypatch.setattr(go1_rough, "next_level", lambda level, *_: (level + 1) % 20)
    options: dict[str, Any] = {
        "env.id": "Go1Rough",
        "env.kwargs": {"levels": 20, "terrain": ["slopes"]},
        "env.max_episode_steps": 6,
        "env.action_chunk": 2,
        "env.realism.obs_delay": 1,
        "model.actor_obs": ["state"],
        "model.critic_obs": ["state", "height_scan", "privileged"],
        "evaluation.episodes": 1,
        "evaluation.num_envs": 1,
        "evaluation.video_episodes": 0,
        "compile": "never",
        "updates": 4,
        "save_every": 2,
    }
    full, half = tmp_path / "full", tmp_path / "half"
    run.train(run_helpers.tiny_config({**options, "run_dir": str(full)}), quiet=True)
    c = run_helpers.tiny_config({**options, "run_dir": str(half)})
    run.train(replace(c, resume=str(full / "checkpoints" / "step_000002")), quiet=True)
    assert_same(contents(full, 4), contents(half, 4))
    assert rows(full)[3:] == rows(half)
    lines = [json.loads(x) for x in (full / "metrics.jsonl").read_text().splitlines()]
    levels = [x["rollout/terrain_level"] for x in lines if "rollout/terrain_level" in x]
    assert len(set(levels)) == 4 and min(levels) > 0
