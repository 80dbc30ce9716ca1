"""VelocityTask and its options: terms of the reward, commands, curriculum, terrain."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mujoco
import pytest
import torch
from torch import Tensor
from toy_envs import make_world
from toy_robots import QUADRUPED

import embodied_envs
from embodied_envs.base.errors import EnvError
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.robots.preparation import Preparation
from embodied_envs.robots.robot_model import RobotModel
from embodied_envs.robots.rough_terrain import RoughTerrain
from embodied_envs.robots.velocity import VelocityTask
from embodied_envs.tasks import State
from embodied_envs.tasks.panda import asset_file
from embodied_ppo.tools.task_templates import velocity_rewards


class Walk(VelocityTask):
    """The quadruped follows commands; ``robot`` sets the file."""

    id, decimation = "Walk", 5
    preparation = Preparation(contacts={"knees": ("FL_foot", "FR_foot")})

    def knees(self, before: State, s: State, action: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * self.touches(s, "knees")


class WalkRough(RoughTerrain, Walk):
    id = "WalkRough"


@pytest.fixture(autouse=True)
def robot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "robot.xml"
    path.write_text(QUADRUPED)
    use(path, monkeypatch)


def use(mjcf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``Walk`` be a task of this robot, with the terms that new-task lists."""
    monkeypatch.setattr(Walk, "mjcf", mjcf, raising=False)
    rewards = velocity_rewards(RobotModel(mujoco.MjModel.from_xml_path(str(mjcf))))
    monkeypatch.setattr(Walk, "rewards", rewards)


def make(task: str = "Walk", n: int = 2, **options: Any) -> MujocoEnv:
    own = ":" not in task and not task.startswith("Go1")
    return make_world(f"{__name__}:{task}" if own else task, n, **options)


def rewards(env: MujocoEnv, steps: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
    """Return reward and numbers of the last of some steps of equal actions."""
    env.reset()
    for _ in range(steps):
        step = env.step(torch.full((env.num_envs, 8), 0.1))
    assert step.info is not None
    return step.reward, step.info


def test_reward_is_the_sum_of_weight_times_term(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make()
    _, terms = rewards(env)
    task, s = env.task, env.s
    assert isinstance(task, VelocityTask)
    assert {k for k in terms if not k.startswith(("error_", "command_"))} == set(Walk.rewards)
    velocity, command = task.base_velocity(s), s["command"]
    error = velocity[:, :2] - command[:, :2]
    expected = torch.exp(-error.square().sum(1) / 0.25)
    assert terms["tracking_lin_vel"].tolist() == pytest.approx(expected.tolist())
    assert terms["error_lin_vel_y"].tolist() == pytest.approx(error[:, 1].abs().tolist(), abs=1e-6)
    yaw = s["qvel"][:, task.base_dof + 5] - command[:, 2]
    assert terms["error_ang_vel_yaw"].tolist() == pytest.approx(yaw.abs().tolist(), abs=1e-6)
    # 4.7 kg · 9.81 m/s² · 0.3 m at home; the weight is that of Go1Joystick in this unit.
    robot = task.robot
    unit = robot.weight * float(robot.home[robot.base_qpos + 2])
    torques = -0.22 / unit**2 * s["actuator_force"].square().sum(1)
    assert terms["torques"].tolist() == pytest.approx(torques.tolist(), rel=0.05)
    env.close()
    # Other weights and parameters of the same step: two terms, one of them the task's own.
    monkeypatch.setattr(Walk, "rewards", {})
    changes = {"tracking_lin_vel": {"weight": 2, "sigma": 0.5}, "action_rate": {"weight": 0}}
    env = make(rewards=changes | {"knees": {"weight": -3, "scale": 2}, "pose": {"weight": -0.5}})
    new_total, new_terms = rewards(env)
    names = {k for k in new_terms if not k.startswith(("error_", "command_"))}
    assert names == {"tracking_lin_vel", "knees", "pose"}, (
        "a term of weight 0, and one that is not listed, is not computed"
    )
    tracking = 2 * torch.exp(-error.square().sum(1) / 0.5)
    assert new_terms["tracking_lin_vel"].tolist() == pytest.approx(tracking.tolist())
    pose = 5 * terms["pose"]  # -0.5 instead of -0.1
    expected = (tracking + pose).clamp(min=0)
    assert new_total.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    env.close()


def test_entries_of_a_class_are_changed_one_by_one() -> None:
    env = make("Go1Joystick", rewards={"pose": {"weight": 0}, "feet_slip": {"weight": -0.1}})
    task = env.task
    assert isinstance(task, embodied_envs.tasks.find("Go1Joystick") or ())
    assert len(list(task.rewards)) == 11 and task.rewards["feet_air_time"]["threshold_s"] == 0.2
    env.reset()
    info = env.step(torch.zeros(2, 12)).info
    assert info is not None and "pose" not in info and "tracking_lin_vel" in info
    env.close()


def test_commands_are_those_of_the_option() -> None:
    ranges = {"lin_vel_x": [0.8, 0.8], "ang_vel_yaw": (0.0, 0.0)}
    env = make(n=64, commands=ranges, kwargs={"resample_s": 0.1, "standing": 0.5})
    env.reset()
    seen = []
    for _ in range(20):
        env.step(torch.zeros(64, 8))
        seen.append(env.s["command"].clone())
    command = torch.cat(seen)
    assert bool((command[:, 0] == 0.8).all()), "a range without 0 is kept while others stand still"
    assert bool((command[:, 2] == 0).all())
    share = (command[:, 1] == 0).double().mean().item()
    assert 0.4 < share < 0.6 and float(command[:, 1].abs().max()) <= 0.5
    names = env.task.observation_names(env.physics.model)
    assert names[-3:] == [
        ("command lin_vel_x", "m/s"),
        ("command lin_vel_y", "m/s"),
        ("command ang_vel_yaw", "rad/s"),
    ]
    obs = env.step(torch.zeros(64, 8)).obs
    assert isinstance(obs, Tensor) and torch.equal(obs[:, -3:], env.s["command"].float())
    env.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"commands": {"lin_vel_z": [0, 1]}}, "did you mean lin_vel_y"),
        ({"commands": {"lin_vel_x": [1, 0]}}, r"low <= high.*lin_vel_x=\[1, 0\]"),
        ({"commands": {"lin_vel_x": [0, math.nan]}}, "finite"),
        ({"rewards": {"tracking_linvel": {"weight": 1}}}, "did you mean tracking_lin_vel"),
        ({"rewards": {"pose": {"wieght": 1}}}, "did you mean weight"),
        ({"rewards": {"pose": {"weight": "big"}}}, "finite number.*pose.weight=big"),
        ({"rewards": {"pose": 3}}, r"write env.rewards.pose.weight"),
        ({"rewards": {"tracking_lin_vel": {"sigma": 1}}}, "write env.rewards.tracking_lin_vel.w"),
        ({"rewards": {"pose": {"weight": 0}}}, "no term"),
        ({"rewards": {"feet_phase": {"weight": 1}}}, "feet_phase is unknown"),
        ({"kwargs": {"standing": 2}}, "share from 0 to 1"),
        ({"kwargs": {"resample_s": 0}}, "seconds above 0"),
        ({"task": "HalfCheetah", "commands": {"x": [0, 1]}}, "env.commands.x is unknown; remove"),
        (
            {"task": "HalfCheetah", "rewards": {"x": {"weight": 1}}},
            "env.rewards.x is unknown; remove",
        ),
    ],
)
def test_invalid_options_are_refused(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = options.pop("task", f"{__name__}:Walk")
    monkeypatch.setattr(Walk, "rewards", {})
    with pytest.raises(EnvError, match=message):
        embodied_envs.make(task, num_envs=1, seeds=[0], **options)


def test_contacts_of_feet_and_other_parts(tmp_path: Path) -> None:
    env = make()
    env.reset()
    for _ in range(20):
        env.step(torch.zeros(2, 8))
    task, s = env.task, env.s
    assert isinstance(task, Walk)
    assert bool(task.down(s).all()) and task.foot_heights(s).abs().max() < 0.01
    assert task.undesired_contacts(s, s, s["last_action"]).tolist() == [0, 0]
    qpos = s["qpos"].clone()
    qpos[:, task.base_qpos + 3 : task.base_qpos + 7] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    qpos[:, task.base_qpos + 2] = 0.049  # on its back, the box's half height is 5 cm
    env.physics.reset(torch.ones(2, dtype=torch.bool), {"qpos": qpos}, torch.empty(2, 0))
    assert not bool(task.down(s).any()) and bool(task.terminated(s).all())
    assert bool((task.undesired_contacts(s, s, s["last_action"]) >= 4).all())
    env.close()
    # Contacts of an arm, which has no feet.
    link = '<body pos="0 0 .1"><joint name="j" axis="0 1 0"/><geom name="link" size=".2"/></body>'
    floor = '<geom name="floor" type="plane" size="1 1 .1"/>'
    motor = '<actuator><motor joint="j"/></actuator>'
    (tmp_path / "arm.xml").write_text(
        f"<mujoco><worldbody>{floor}{link}</worldbody>{motor}</mujoco>"
    )
    model = Preparation(contacts={"hit": ("link", "floor")}).prepare(tmp_path / "arm.xml").compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    assert data.sensor("hit").data[0] == 1


def test_contacts_are_those_of_the_state_after_each_step() -> None:
    """Feet that land or lift off in the last physics step are no undesired contacts."""
    env = make()
    env.reset()
    task, model, random = env.task, env.physics.model, torch.Generator().manual_seed(0)
    assert isinstance(task, VelocityTask)
    data, feet = mujoco.MjData(model), [foot.body for foot in task.robot.feet]
    landed = 0
    for _ in range(40):
        env.step(2 * torch.rand(env.num_envs, 8, generator=random) - 1)
        down, undesired = task.down(env.s), task.undesired_contacts(env.s, env.s, env.s["ctrl"])
        for i in range(env.num_envs):
            data.qpos[:] = env.s["qpos"][i].numpy()
            mujoco.mj_forward(model, data)
            touching = model.geom_bodyid[data.contact.geom[: data.ncon]]
            bodies = touching[(touching == 0).any(1)].max(1)
            bodies = bodies[model.body_rootid[bodies] == task.robot.base]
            touching = model.body_weldid[bodies]
            assert int(undesired[i]) == sum(body not in feet for body in touching)
            assert down[i].tolist() == [foot in touching for foot in feet]
            landed += int(down[i].sum())
    assert 0 < landed < 40 * 4 * env.num_envs
    env.close()


def test_curriculum_of_commands_follows_the_errors() -> None:
    env = make(n=3, kwargs={"command_curriculum": True})
    task = env.task
    assert isinstance(task, VelocityTask)
    env.reset()
    s = {k: x.clone() for k, x in env.s.items()}
    s["steps"] += 500
    s["error"][:] = torch.tensor([[90.0, 100], [150, 100], [250, 100]])  # tolerance: 100 and 150
    s["command_share"][:] = torch.tensor([0.5, 0.5, 0.25])
    start = {"command": torch.ones(3, 3, dtype=torch.float64)}
    carried = task.carry_over(s, start, torch.zeros(3, 50, dtype=torch.float64))
    assert carried["command_share"].tolist() == pytest.approx([0.6, 0.5, 0.2])
    assert carried["command"][:, 0].tolist() == pytest.approx([0.6, 0.5, 0.2])
    # The rest of an action chunk in which an episode has ended is an episode of a few steps.
    s["steps"][:] = 4
    carried = task.carry_over(s, start, torch.zeros(3, 50, dtype=torch.float64))
    assert carried["command_share"].tolist() == pytest.approx([0.5, 0.5, 0.25])
    assert bool((env.s["command_share"] == 1).all()), "the first episode uses the whole range"
    env.close()


def test_terrain_of_any_task() -> None:
    env = make("WalkRough", n=32, obs_keys=["state", "height_scan"], kwargs={"level": "uniform"})
    env.reset()
    for _ in range(10):
        step = env.step(torch.zeros(32, 8))
    task, s = env.task, env.s
    assert isinstance(task, WalkRough) and isinstance(step.obs, dict)
    assert step.obs["height_scan"].shape == (32, 117) and step.task is not None
    assert step.task.unique().tolist() == [0, 1, 2, 3]
    assert not bool(task.terminated(s).any()), "heights are those above the ground"
    assert s["qpos"][:, task.base_qpos].std() > 5, "robots are on different tiles"
    assert task.foot_heights(s).abs().max() < 0.05
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unitree_go1", "unitree_g1", "unitree_h1"])
def test_terms_of_menagerie_robots_are_finite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(asset_file(f"mujoco_menagerie/{name}/scene.xml"), monkeypatch)
    monkeypatch.setattr(Walk, "preparation", Preparation(step_s=0.005))
    monkeypatch.setattr(Walk, "decimation", 4)
    biped = name != "unitree_go1"
    monkeypatch.setattr(Walk, "gait_hz", 1.5 if biped else None)
    env = make(n=4)
    env.reset()
    for _ in range(50):
        step = env.step(0.3 * torch.randn(4, env.action_spec.size))
        assert step.info is not None and bool(step.reward.isfinite().all())
        assert {k for k, x in Walk.rewards.items() if x["weight"]} <= set(step.info)
        assert all(bool(x.isfinite().all()) for x in step.info.values())
    assert int(env.unstable) == 0
    env.close()


def test_success_is_decided_at_another_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walk, "tolerance", (math.inf, math.inf))
    env = make(max_episode_steps=3)
    env.reset()
    success = [env.step(torch.zeros(2, 8)).success for _ in range(3)]
    assert [bool(x.any()) for x in success if x is not None] == [False, False, True]
    env.close()
