"""RobotTask and Preparation: action 0, observations, terms of the reward, servos and sensors."""

from __future__ import annotations

from pathlib import Path

import mujoco
import pytest
import torch
from toy_envs import make_world
from toy_robots import QUADRUPED

from embodied_envs.base.errors import EnvError
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.robots.preparation import Preparation
from embodied_envs.robots.robot_model import RobotModel
from embodied_envs.robots.robot_task import RobotTask
from embodied_envs.tasks import State

FOLDER = Path(__file__).parent


class Stay(RobotTask):
    """Stay at home; ``write`` sets the file."""

    id, decimation, max_episode_steps = "Stay", 5, 200

    def reward_terms(
        self, before: State, s: State, action: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"home": 1 - self.distance_from_home(s), "effort": -0.1 * self.effort(s)}

    def terminated(self, s: State) -> torch.Tensor:
        return self.out_of_range(s) | self.fallen(s)


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "robot.xml"
    path.write_text(QUADRUPED)
    monkeypatch.setattr(Stay, "mjcf", path, raising=False)
    return path


def make(**options: object) -> MujocoEnv:
    return make_world(f"{__name__}:Stay", **options)


def test_action_0_holds_home_from_the_reset_on(file: Path) -> None:
    env = make()
    task = env.task
    assert isinstance(task, RobotTask)
    env.reset()
    assert torch.equal(env.s["ctrl"], task.home_control.expand(2, -1)), "delays start from home"
    for _ in range(100):
        step = env.step(torch.zeros(2, 8))
        assert not bool(step.terminated.any())
    assert float(step.reward.min()) > 0.9
    assert torch.equal(env.s["ctrl"], task.home_control.expand(2, -1))
    # FL_roll: 0.1 + 0.25 · action, within ±0.5 rad.
    ctrl = task.control(env.s, torch.ones(2, 8, dtype=torch.float64))
    assert ctrl[0, 0].item() == pytest.approx(0.35) and bool((ctrl <= task.high).all())
    env.close()


def test_a_reward_of_the_subclass_replaces_the_sum(file: Path, monkeypatch) -> None:
    monkeypatch.setattr(Stay, "reward", lambda self, *state: 9 + RobotTask.reward(self, *state))
    env = make()
    env.reset()
    step = env.step(torch.zeros(2, 8))
    assert step.info and torch.allclose(step.reward, 9 + step.info["home"] + step.info["effort"])
    env.close()


def test_rewards_that_have_no_effect_are_refused(file: Path, monkeypatch) -> None:
    with pytest.raises(EnvError, match=r"remove action_rate from rewards .*Stay\.reward_terms"):
        make(rewards={"action_rate": {"weight": -1.0}})
    monkeypatch.setattr(Stay, "reward_terms", RobotTask.reward_terms)
    monkeypatch.setattr(Stay, "rewards", {"action_rate": {}})
    with pytest.raises(EnvError, match="no weight: action_rate"):
        make()


def test_motors_become_servos_with_the_same_force_limit(file: Path) -> None:
    model = Stay().spec().compile()
    robot = RobotModel(model)
    rear = robot.actuators[6]
    assert (rear.name, rear.kind, rear.force) == ("RL_pitch", "position", 20)
    assert (rear.low, rear.high, rear.home) == (-1, 1, pytest.approx(0))
    assert model.opt.integrator == int(mujoco.mjtIntegrator.mjINT_IMPLICITFAST)
    # Servos of the file keep their gains, unless a pattern or "inertia" replaces them.
    assert [a.kp for a in robot.actuators[:6]] == [40] * 6
    gains = {"*_pitch": (30.0, 2.0), "FL_pitch": (50.0, 1.0)}
    changed = RobotModel(Preparation(gains=gains).prepare(file).compile())
    assert [(a.kp, a.kd) for a in changed.actuators[3:6]] == [(40, 1), (50, 1), (30, 2)]
    soft = RobotModel(Preparation(gains="inertia").prepare(file).compile())
    assert all(a.kp not in (0, 40) for a in soft.actuators)
    with pytest.raises(EnvError, match=r"^name joints .*FL_roll, .*: gains: 'knee' matches none"):
        Preparation(gains={"knee": (1.0, 1.0)}).prepare(file)


def test_observation_is_what_the_robot_measures(file: Path) -> None:
    """The IMU is turned by 90 degrees about z: its x axis is the trunk's y axis."""
    env = make()
    task, s = env.task, {k: x.clone() for k, x in env.s.items()}
    assert isinstance(task, RobotTask)
    names = task.observation_names(env.physics.model)
    assert len(names) == env.obs_spec.shape[0] == 6 + 8 + 8 + 8
    assert names[0] == ("gravity x", None) and names[6] == ("FL_roll position minus home", "rad")
    assert names[14] == ("FL_roll velocity", "rad/s") and names[-1] == (
        "RR_pitch last action",
        None,
    )
    data = mujoco.MjData(env.physics.model)
    data.qpos[:] = task.robot.home
    half = 0.5**0.5
    data.qpos[10:14] = half, half, 0, 0  # rolled by 90 degrees: the trunk's y axis points up
    data.qvel[task.base_dof + 3 : task.base_dof + 6] = 1, 2, 3
    data.qvel[task.base_dof : task.base_dof + 3] = 0, 0, 2  # upwards: along the trunk's y
    mujoco.mj_forward(env.physics.model, data)
    for name in ("qpos", "qvel", "sensordata", "site_xmat"):
        s[name] = torch.tensor(getattr(data, name)).expand(2, *getattr(data, name).shape)
    assert task.observe(s)[0, :6].tolist() == pytest.approx([-1, 0, 0, 2, -1, 3], abs=1e-6)
    assert task.base_velocity(s)[0].tolist() == pytest.approx([0, 2, 0], abs=1e-9)
    # 1 - cos²(45 degrees)
    assert task.distance_from_home(s)[0].item() == pytest.approx(0.5)
    env.close()


def test_privileged_observation_has_contacts_and_objects(file: Path) -> None:
    env = make(obs_keys=["state", "privileged"])
    env.reset()
    for _ in range(50):
        env.step(torch.zeros(2, 8))
    task = env.task
    assert isinstance(task, RobotTask)
    forces = task.foot_forces(env.s)
    assert forces.sum(1).tolist() == pytest.approx([1, 1], abs=0.05), "the robot's weight"
    # 8 forces; velocity, height and 4 feet; the cube.
    assert env.obs_spec["privileged"].shape == (8 + 3 + 1 + 4 + 7 + 6,)
    # The force of RL_pitch, 20 N m at most, against that limit, in the mean of 8.
    s = env.s | {"actuator_force": torch.zeros_like(env.s["actuator_force"])}
    s["actuator_force"][:, 6] = 20
    assert task.effort(s).tolist() == [1 / 8, 1 / 8]
    env.close()


def test_ends_are_a_tenth_beyond_the_range_and_half_the_height(file: Path) -> None:
    env = make()
    task, s = env.task, {k: x.clone() for k, x in env.s.items()}
    assert isinstance(task, RobotTask)
    s["qpos"][:] = task.home
    assert not bool(task.terminated(s).any())
    s["qpos"][0, int(task.qpos[0])] = 0.61  # 0.5 + 0.1 · 1
    s["qpos"][1, task.base_qpos + 2] = 0.49 * task.home_height
    assert task.out_of_range(s).tolist() == [True, False]
    assert task.fallen(s).tolist() == [False, True]
    env.close()


def test_floor_and_scale_of_the_action(file: Path, monkeypatch) -> None:
    floor = '<geom name="floor" type="plane" size="5 5 .1"/>'
    file.write_text(QUADRUPED.replace(floor, ""))
    assert RobotModel(Preparation().prepare(file).compile()).ground is None
    assert RobotModel(Preparation(floor=True).prepare(file).compile()).ground == 0
    monkeypatch.setattr(Stay, "action_scale", {"*_roll": 0.3})
    monkeypatch.setattr(Stay, "preparation", Preparation(floor=True))
    env = make()
    assert isinstance(env.task, RobotTask)
    assert env.task.scale[:4].tolist() == [0.3] * 4 and float(env.task.scale[4]) == 0.5
    env.close()
    # Two actuators without names on one joint have their own scales.
    both = '<velocity joint="FL_pitch" kv="1" ctrlrange="-7 7"/><position joint="FL_pitch"/>'
    file.write_text(QUADRUPED.replace('<position joint="FL_pitch"/>', both).replace(floor, ""))
    env = make()
    assert isinstance(env.task, RobotTask)
    assert env.task.scale[4:6].tolist() == [7, 0.5]
    env.close()
    monkeypatch.setattr(Stay, "action_scale", {"*_knee": 0.3})
    with pytest.raises(EnvError, match=r"name actuators \(FL_roll, .*'\*_knee' matches none"):
        make()


def test_states_of_filters_start_at_home(file: Path) -> None:
    servo = '<position joint="FL_pitch"/>'
    text = QUADRUPED.replace(servo, '<position joint="FL_pitch" timeconst=".1"/>')
    keyframe = 'qpos="1 0 .05 1 0 0 0  0 0 .3 1 0 0 0  .1 0 -.1 0'
    assert keyframe in text
    text = text.replace(keyframe, keyframe.replace(".1 0 -.1 0", ".1 .2 -.1 0"))
    # A motor with a state becomes a servo without one.
    slow = '<general joint="FR_pitch" biastype="none" dyntype="filter" actrange="-1 1"/>'
    text = text.replace('<position joint="FR_pitch"/>', slow)
    file.write_text(text.replace('<key name="home"', '<key name="home" act="0 .5"'))
    env = make()
    env.reset()
    assert env.s["act"].tolist() == [[pytest.approx(0.2)]] * 2
    env.close()


@pytest.mark.slow
def test_warp_steps_like_the_cpu(file: Path) -> None:
    pytest.importorskip("mujoco_warp")
    observations = []
    for simulator in ("mujoco", "warp"):
        threads = 1 if simulator == "mujoco" else None
        env = make(simulator=simulator, num_threads=threads, obs_keys=["state", "privileged"])
        env.reset()
        observations.append(env.step(torch.zeros(2, 8)).obs)
        env.close()
    for name, tolerance in (("state", 2e-2), ("privileged", 0.2)):
        torch.testing.assert_close(
            observations[0][name], observations[1][name], atol=tolerance, rtol=tolerance
        )
