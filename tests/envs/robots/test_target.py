"""TargetTask: an arm of EnvPool and a drone, their terms and targets."""

from __future__ import annotations

import math

import pytest
import torch
from toy_envs import make_world
from toy_robots import DRONE

from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.robots.target import TargetTask
from embodied_envs.tasks.panda import asset_file


class Hover(TargetTask):
    id, decimation, tip = "Hover", 5, "drone"
    commands = {"x": (-1.0, 1.0), "y": (-1.0, 1.0), "z": (0.5, 1.5)}  # noqa: RUF012
    rewards = {  # noqa: RUF012
        "target": {"weight": 2.0, "scale_m": 0.8},
        "base_lin_vel": {"weight": -0.1},
    }


class Reach(TargetTask):
    id, decimation, tip = "Reach", 10, "link7"
    commands = {"x": (0.4, 0.7), "y": (-0.2, 0.2), "z": (0.5, 0.9)}  # noqa: RUF012
    rewards = {  # noqa: RUF012
        "distance": {"weight": -1.0},
        "joint_vel": {"weight": -0.01},
    }


def make(task: str, **options: object) -> MujocoEnv:
    env = make_world(f"{__name__}:{task}", 3, **options)
    env.reset()
    return env


def test_drone_reads_the_vector_to_the_target_in_its_own_frame(tmp_path, monkeypatch) -> None:
    (tmp_path / "drone.xml").write_text(DRONE)
    monkeypatch.setattr(Hover, "mjcf", tmp_path / "drone.xml", raising=False)
    env = make("Hover", commands={"x": [1.0, 1.0], "y": [0.0, 0.0], "z": [0.5, 0.5]})
    for _ in range(50):
        step = env.step(torch.zeros(3, 4))
    assert not bool(step.terminated.any()), "action 0 hovers"
    task, s = env.task, {k: x.clone() for k, x in env.s.items()}
    assert isinstance(task, Hover) and env.s["command"][0].tolist() == [1, 0, 0.5]
    s["qpos"][:, :3] = s["xpos"][:, task.tip_id] = torch.tensor([0.0, 0.0, 0.5]).double()
    half = 0.5**0.5  # turned to the left by 90 degrees: the target is on its right
    s["qpos"][:, 3:7] = torch.tensor([half, 0, 0, half]).double()
    s["qvel"][:, :3] = torch.tensor([0.0, 0.5, 0.0]).double()
    assert task.observe(s)[0, -6:].tolist() == pytest.approx([0, -1, 0, 0.5, 0, 0], abs=1e-6)
    names = [name for name, _ in task.observation_names(env.physics.model)]
    assert len(names) == env.obs_spec.shape[0] and names[-6] == "to target x"
    terms = task.reward_terms(s, s, torch.zeros(3, 4).double())
    assert terms["target"][0].item() == pytest.approx(2 * (1 - math.tanh(1 / 0.8)))
    assert terms["base_lin_vel"][0].item() == pytest.approx(-0.1 * 0.25)
    assert terms["error_x"][0].item() == pytest.approx(1)
    numbers = {f"{kind}_{axis}" for kind in ("error", "command") for axis in "xyz"}
    assert set(terms) == {"target", "base_lin_vel", *numbers}
    s["command"][1] = torch.tensor([0.0, 0.02, 0.52]).double()
    s["command"][2] = torch.tensor([3.1, 0.0, 0.5]).double()
    s["steps"] += task.max_episode_steps
    assert task.success(s).tolist() == [False, True, False]
    assert task.terminated(s).tolist() == [False, False, True]
    env.close()


def test_arm_of_envpool_is_near_the_target_that_it_reaches(monkeypatch) -> None:
    scene = asset_file("mujoco_menagerie/franka_emika_panda/scene.xml")
    monkeypatch.setattr(Reach, "mjcf", scene, raising=False)
    env = make("Reach")
    task, s = env.task, env.s
    assert isinstance(task, Reach)
    for i, (low, high) in enumerate(task.commands.values()):
        assert bool(((s["command"][:, i] >= low) & (s["command"][:, i] <= high)).all())
    for _ in range(20):
        step = env.step(torch.zeros(3, 8))
    assert step.info is not None and bool(step.reward.isfinite().all())
    distance = (s["xpos"][:, task.tip_id] - s["command"]).norm(dim=1)
    assert (-step.info["distance"]).tolist() == pytest.approx(distance.tolist(), abs=1e-6)
    env.s["command"].copy_(s["xpos"][:, task.tip_id])  # as a viewer moves it
    step = env.step(torch.zeros(3, 8))
    assert step.info is not None and float(step.info["distance"].min()) > -0.005
    env.close()
