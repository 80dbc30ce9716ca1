"""PickTask: grippers of EnvPool's arms hold a cube between their tips, and what is refused."""

from __future__ import annotations

import mujoco
import pytest
import torch
from toy_robots import QUADRUPED

import embodied_envs
from embodied_envs.base.errors import EnvError
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.robots.pick import PickTask, find_gripper
from embodied_envs.robots.preparation import Preparation, add_floor
from embodied_envs.robots.robot_model import RobotModel
from embodied_envs.tasks.panda import asset_file

# Fingers of two hinges each, closed loops; the file has no floor and no keyframe.
ROBOTIQ = (
    "mujoco_playground/_src/manipulation/franka_emika_panda_robotiq/xmls"
    "/panda_updated_robotiq_2f85.xml"
)
# File -> opening of the gripper and height of what is below it, m.
ARMS = {
    "mujoco_menagerie/franka_emika_panda/scene.xml": (0.08, 0.0),
    "mujoco_menagerie/aloha/scene.xml": (0.057, -0.0009),
    ROBOTIQ: (0.086, 0.0),
}


class Pick(PickTask):
    id, decimation = "Pick", 4
    cube_x_m = cube_y_m = (0.1, 0.2)
    commands = dict.fromkeys("xyz", (0.3, 0.4))
    rewards = {"progress": {"weight": 10.0}, "ground_contact": {"weight": -0.1}}  # noqa: RUF012


@pytest.mark.parametrize("file", ARMS)
def test_a_closed_gripper_holds_the_cube_and_an_open_one_drops_it(file: str, monkeypatch) -> None:
    monkeypatch.setattr(Pick, "mjcf", asset_file(file), raising=False)
    monkeypatch.setattr(Pick, "preparation", Preparation(floor=file == ROBOTIQ, step_s=0.005))
    env = embodied_envs.make(f"{__name__}:Pick", num_envs=2, seeds=[0, 1], num_threads=1)
    assert isinstance(env, MujocoEnv)
    obs, task, s = env.reset(), env.task, env.s
    assert isinstance(task, Pick) and isinstance(obs, torch.Tensor)
    model, gripper = env.physics.model, task.gripper
    assert len(task.observation_names(model)) == obs.shape[1]
    assert gripper.opening_m == pytest.approx(ARMS[file][0], abs=0.002)
    assert gripper.ground_m == pytest.approx(ARMS[file][1], abs=1e-6)
    assert 0.1 <= float(task.cube(s)[:, :2].min()) <= float(task.cube(s)[:, :2].max()) <= 0.2
    assert task.cube(s)[:, 2].tolist() == pytest.approx([task.rest_m] * 2, abs=1e-4)
    # A cube is kept between the fingers; world 0 closes them, world 1 does not.
    action, i = torch.zeros(2, model.nu), task.cube_qpos
    for a, control in gripper.actuators.items():
        action[0, a] = -1.0 if control > float(task.low[a]) + 1e-6 else 1.0
    step = env.step(action)
    for _ in range(30):
        saved = env.state()
        saved["physics"]["qpos"][:, i : i + 7] = torch.cat([task.grip(s), s["qpos"][:, -4:]], 1)
        saved["physics"]["qvel"][:, -6:] = 0.0
        env.load_state(saved)
        env.step(action)
    assert step.info is not None and {"lift", "error_z"} <= set(step.info)
    assert task.stages(s)["grasp"].tolist() == pytest.approx([1, 0], abs=0.15)
    assert task.closing(s).tolist() == pytest.approx([1, 0], abs=0.15)
    for _ in range(15):
        env.step(action)
    height = task.cube(s)[:, 2] - task.grip(s)[:, 2]
    assert height[0] > -0.01 and height[1] < -0.1, "held, fallen"
    env.close()


def test_robots_without_arm_gripper_or_ground_are_refused(tmp_path) -> None:
    dog = mujoco.MjModel.from_xml_string(QUADRUPED)
    hand = mujoco.MjModel.from_xml_path(
        str(asset_file("mujoco_menagerie/leap_hand/right_hand.xml"))
    )
    for model in (dog, hand):
        with pytest.raises(EnvError, match="--template"):
            find_gripper(RobotModel(model))
    spec = mujoco.MjSpec.from_file(str(asset_file(ROBOTIQ)))
    with pytest.raises(EnvError, match="--floor"):
        find_gripper(RobotModel(spec.compile()))
    add_floor(spec)
    assert find_gripper(RobotModel(spec.compile())).ground_m == 0
