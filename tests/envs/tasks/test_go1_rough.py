"""Go1Rough: starts, heights above the ground, curriculum, and whole runs."""

from __future__ import annotations

from typing import Any

import pytest
import run_helpers
import torch
from torch import Tensor
from toy_envs import make_world

from embodied_envs.checks import check_env
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.robots import rough_terrain
from embodied_envs.tasks.go1_rough import Go1Rough
from tests.integration.test_resume import check_resume

ALL = ["state", "height_scan", "privileged"]


def make(n: int = 4, **options: Any) -> MujocoEnv:
    return make_world("Go1Rough", n, **{"kwargs": {"levels": 2}, **options})


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
    obs = make(obs_keys=ALL).reset()
    assert isinstance(obs, dict)
    assert [obs[name].shape[1] for name in ALL] == [48, 117, 87]
    # All stand on a platform, home: 0.318 m above the ground, which is flat 0.4 m around it.
    scan = obs["height_scan"].view(4, 13, 9)
    assert scan[:, 4:9, 2:7].flatten().tolist() == pytest.approx([-0.318] * 4 * 25, abs=1e-6)
    assert obs["privileged"][:, 33].tolist() == pytest.approx([0.318] * 4, abs=1e-6)
    assert obs["privileged"][:, 42].tolist() == pytest.approx([0.6] * 4)  # friction


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


# --------------------------------------------------------------------------------------- whole runs


@pytest.mark.slow
def test_resumed_run_with_a_curriculum_equals_an_uninterrupted_one(tmp_path, monkeypatch) -> None:
    """Every episode, of 6 steps, moves its robot one level up."""
    monkeypatch.setattr(rough_terrain, "next_level", lambda level, *_: (level + 1) % 20)
    options = run_helpers.options("""env.id=Go1Rough env.max_episode_steps=6 env.action_chunk=2
        env.realism.obs_delay=1 model.actor_obs=[state]
        model.critic_obs=[state,height_scan,privileged] evaluation.episodes=1
        evaluation.num_envs=1 evaluation.video_episodes=0 compile=never updates=4 save_every=2""")
    options["env.kwargs"] = {"levels": 20, "terrain": ["slopes"]}
    full = tmp_path / "full"
    run_helpers.train(full, options)
    check_resume(full, tmp_path / "half", at=2, updates=4)
    rows = run_helpers.metric_rows(full)
    levels = [x["rollout/terrain_level"] for x in rows if "rollout/terrain_level" in x]
    assert len(set(levels)) == 4 and min(levels) > 0
