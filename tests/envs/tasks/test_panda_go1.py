"""PandaPickCube and Go1Joystick: models, observations, rewards by hand, resets and commands."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor
from toy_envs import make_world as make

from embodied_envs.base.random import uniform
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks import Task
from embodied_envs.tasks.go1 import Go1Joystick
from embodied_envs.tasks.panda import PandaPickCube
from embodied_envs.types import Box

CPU = torch.device("cpu")


def actions(env: MujocoEnv, fill: float | None = None) -> Tensor:
    """Return random actions, or actions that are all ``fill``."""
    assert isinstance(env.action_spec, Box)
    shape = (env.num_envs, env.action_spec.size)
    return (
        torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        if fill is None
        else torch.full(shape, fill)
    )


def bound(task: Task, dtype: torch.dtype = torch.float64) -> mujoco.MjModel:
    model = task.spec().compile()
    task.bind(model, CPU, dtype)
    return model


def draws(n: int, size: int, seed: int = 0) -> Tensor:
    return uniform(torch.arange(n) + seed * n, 0, torch.zeros(n, dtype=torch.int64), size)


# --------------------------------------------------------------------------------------- both tasks
# Task -> size of the group "privileged".
PRIVILEGED = {"Go1Joystick": 87, "Go1Rough": 87, "PandaPickCube": 56, "Tabletop": 149}
# Task -> the masses in its group "privileged".
MASSES = {
    **dict.fromkeys(("Go1Joystick", "Go1Rough"), slice(43, 56)),
    "PandaPickCube": slice(22, 33),
    "Tabletop": slice(107, 111),
}


@pytest.mark.parametrize("id", ["Go1Rough", "Tabletop"])
def test_privileged_group_shows_each_world_and_changes_none(id: str) -> None:
    keys = ["state", "privileged"]
    env, plain = make(id, randomize=True, obs_keys=keys), make(id, randomize=True)
    obs, state = env.reset(), plain.reset()
    assert isinstance(obs, dict) and torch.equal(obs["state"], torch.as_tensor(state))
    assert obs["privileged"].shape == (2, PRIVILEGED[id])
    body_mass = env.physics.fields["body_mass"]
    masses = obs["privileged"][:, MASSES[id]]
    for row, mass in zip(masses, body_mass, strict=True):  # each is one of this world's
        assert bool((row.double() - mass[:, None]).abs().amin(0).max() < 1e-6)
    assert not torch.equal(masses[0], masses[1])
    assert "body_mass" not in plain.physics.fields  # nothing is computed where nothing reads it
    action = actions(env)
    for _ in range(3):
        step, other = env.step(action), plain.step(action)
        assert isinstance(step.obs, dict)
        assert torch.equal(step.obs["state"], torch.as_tensor(other.obs))
        assert torch.equal(step.reward, other.reward)
    saved, later = env.state(), env.step(action).obs
    env.load_state(saved)
    repeated = env.step(action).obs
    assert isinstance(later, dict) and isinstance(repeated, dict)
    assert all(torch.equal(later[key], repeated[key]) for key in keys)


# ---------------------------------------------------------------------------------------- the Panda
def pick(
    cube: list[float], gripper: list[float], target: list[float], finger: float = 0.04
) -> dict[str, Tensor]:
    """Return a state of one world; positions in m, the hand's axes are x, -y, -z of the world."""
    qpos = torch.zeros(1, 16, dtype=torch.float64)
    qpos[0, 7], qpos[0, 9:12], qpos[0, 12] = finger, torch.tensor(cube), 1.0
    axes = torch.tensor([[1.0, 0, 0], [0, -1, 0], [0, 0, -1]], dtype=torch.float64)
    return {
        "qpos": qpos,
        "qvel": torch.zeros(1, 15, dtype=torch.float64),
        "ctrl": torch.zeros(1, 8, dtype=torch.float64),
        "site_xpos": torch.tensor([[gripper]], dtype=torch.float64),
        "site_xmat": axes.view(1, 1, 9),
        "command": torch.tensor([target], dtype=torch.float64),
    }


def picking() -> PandaPickCube:
    task = PandaPickCube()
    bound(task)
    return task


def test_panda_progress_by_hand() -> None:
    task, target = picking(), [0.6, 0.0, 0.33]

    def mean(s: dict[str, Tensor]) -> float:
        x = {k: float(v) for k, v in task.stages(s).items()}
        return (x["reach"] + x["grasp"] + x["lift"] + 2 * x["carry"]) / 5

    def progress(*args: object) -> float:
        return mean(pick(*args))  # pyright: ignore[reportArgumentType]

    # 20 cm above the cube: reach = 1 - tanh(1) = 0.238, the rest 0; none from below
    assert progress([0.6, 0.0, 0.03], [0.6, 0.0, 0.23], target) == pytest.approx(
        (1 - math.tanh(1)) / 5
    )
    upwards = pick([0.6, 0.0, 0.03], [0.6, 0.0, 0.03], target)
    upwards["site_xmat"] = -upwards["site_xmat"]
    assert mean(upwards) == 0.0
    # around the cube: open, then closed to its width of 4 cm (2 cm each)
    assert progress([0.6, 0.0, 0.03], [0.6, 0.0, 0.03], target) == pytest.approx(0.2)
    assert progress([0.6, 0.0, 0.03], [0.6, 0.0, 0.03], target, 0.02) == pytest.approx(0.4)
    # closed at a distance of 3 cm: no grasp
    assert progress([0.6, 0.0, 0.03], [0.6, 0.03, 0.03], target, 0.02) == pytest.approx(
        (1 - math.tanh(0.15)) / 5
    )
    # held 5 cm up and 25 cm below the target: lift = 1/2, carry = 1/2 · (1 - tanh 0.75)
    lifted = (2.5 + 2 * 0.5 * (1 - math.tanh(0.75))) / 5
    assert progress([0.6, 0.0, 0.08], [0.6, 0.0, 0.08], target, 0.02) == pytest.approx(lifted)
    assert progress(target, target, target, 0.02) == pytest.approx(1.0)


def test_panda_reward_is_progress_minus_floor_penalty() -> None:
    task, target = picking(), [0.6, 0.0, 0.33]
    open_, closed = (pick([0.6, 0.0, 0.03], [0.6, 0.0, 0.03], target, x) for x in (0.04, 0.02))
    nothing = torch.zeros(1, 8, dtype=torch.float64)
    assert float(task.reward(open_, closed, nothing)) == pytest.approx(10 * 0.2)
    assert float(task.reward(closed, open_, nothing)) == pytest.approx(-10 * 0.2)
    task.rewards = {"progress": {"weight": 1.0, "grasp": 3.0}}  # the share of grasp is 3 / 7
    task._terms = None
    assert float(task.reward(open_, closed, nothing)) == pytest.approx(3 / 7)
    task = picking()
    low = pick([0.6, 0.3, 0.03], [0.6, 0.0, 0.01], target)
    assert float(task.reward(low, low, nothing)) == pytest.approx(-0.1)


def test_panda_observation() -> None:
    task = picking()
    s = pick([0.6, 0.1, 0.05], [0.5, 0.0, 0.25], [0.6, 0.0, 0.35], 0.03)
    s["qpos"][0, :7], s["qvel"][0, :7] = torch.arange(7.0), 10 + torch.arange(7.0)
    s["ctrl"] = s["qpos"][:, :8] + 0.5
    # a quarter turn about z
    s["qpos"][0, 12:] = torch.tensor([math.cos(math.pi / 4), 0, 0, math.sin(math.pi / 4)])
    obs = task.observe(s)[0]
    assert obs.shape == (39,)
    assert obs[:8].tolist() == [*range(7), 0.03] and obs[8:15].tolist() == [*range(10, 17)]
    expected = [0.1, -0.1, 0.2]  # from gripper (0.1, 0.1, -0.2), y and z the other way round
    expected += [0.0, 0.1, -0.3]  # to target (0, -0.1, 0.3)
    expected += [0.0, 0.0, -1.0]  # up
    # The cube's x axis is the world's y, its z axis the world's.
    expected += [0.0, -1.0, 0.0, 0.0, 0.0, -1.0]
    expected += [0.05, *[0.5] * 8]
    assert obs[15:].tolist() == pytest.approx(expected, abs=1e-7)


# ------------------------------------------------------------------------------------------ the Go1
def walk(command: list[float], dog: Go1Joystick) -> dict[str, Tensor]:
    """Return a state of one world: the home pose at rest, feet on the ground."""
    s = {k: x[:1] for k, x in dog.reset(torch.full((1, 49), 0.5, dtype=torch.float64)).items()}
    s["qvel"] = torch.zeros(1, 18, dtype=torch.float64)
    s["command"] = torch.tensor([command], dtype=torch.float64)
    s["site_xpos"] = torch.zeros(1, 6, 3, dtype=torch.float64)
    s["actuator_force"] = torch.zeros(1, 12, dtype=torch.float64)
    return s


def walking() -> Go1Joystick:
    dog = Go1Joystick()
    bound(dog)
    return dog


def test_go1_frames_equal_mujocos() -> None:
    dog = Go1Joystick()
    rng = np.random.default_rng(0)
    quat, v = rng.normal(size=(5, 4)), rng.normal(size=(5, 18))
    quat /= np.linalg.norm(quat, axis=1, keepdims=True)
    qpos = torch.zeros(5, 19, dtype=torch.float64)
    qpos[:, 3:7] = torch.from_numpy(quat)
    s = {"qpos": qpos, "qvel": torch.from_numpy(v)}
    for i in range(5):
        flat = np.zeros(9)
        mujoco.mju_quat2Mat(flat, quat[i])
        turn = flat.reshape(3, 3)
        assert dog.base_velocity(s)[i].numpy() == pytest.approx(turn.T @ v[i, :3])
        assert dog.base_gravity(s)[i].numpy() == pytest.approx(turn.T @ [0, 0, -1])


def test_go1_observation() -> None:
    dog = walking()
    s = walk([0.5, -0.2, 0.7], dog)
    s["qvel"] = torch.arange(18.0, dtype=torch.float64)[None]
    s["qpos"][0, 7:] = dog.home + 0.25
    s["last_action"] = torch.full((1, 12), -0.5, dtype=torch.float64)
    obs = dog.observe(s)[0].tolist()
    expected = [*range(6), 0, 0, -1]  # velocities, gravity
    expected += [0.5, -0.2, 0.7]  # the command
    expected += [*[0.25] * 12, *range(6, 18), *[-0.5] * 12]
    assert obs == pytest.approx(expected)


def test_go1_reward_by_hand() -> None:
    dog = walking()
    nothing = torch.zeros(1, 12, dtype=torch.float64)

    def terms(
        before: dict[str, Tensor], s: dict[str, Tensor], action: Tensor = nothing
    ) -> dict[str, float]:
        values = {k: float(x) for k, x in dog.reward_terms(before, s, action).items()}
        return {k: x for k, x in values.items() if x and not k.startswith(("error_", "command_"))}

    still = walk([0.0, 0.0, 0.0], dog)
    # the command is to stand
    assert terms(still, still) == {"tracking_lin_vel": 1.0, "tracking_ang_vel": 0.5}
    assert float(dog.reward(still, still, nothing)) == 1.5
    s = walk([0.3, 0.4, 1.0], dog)  # 0.5 m/s and 1 rad/s missing: exp(-4 · 0.25), exp(-4 · 1) / 2
    assert terms(s, s) == pytest.approx(
        {
            "tracking_lin_vel": math.exp(-1),
            "tracking_ang_vel": 0.5 * math.exp(-4),
            "all_feet_down": -0.3,
        }
    )
    s["qvel"][0, :6] = torch.tensor([0.3, 0.4, 2.0, 1.0, 2.0, 1.0])
    s["actuator_force"][0, :2] = 10.0
    s["qpos"][0, 7] += 0.5
    s["last_action"] = nothing + 0.5
    costs = {"lin_vel_z": -0.5 * 4, "ang_vel_xy": -0.01 * 5, "pose": -0.1 * 0.25}
    costs |= {"torques": -2e-4 * 200, "action_rate": -0.01 * 3}
    assert terms(s, s) == pytest.approx(
        {"tracking_lin_vel": 1.0, "tracking_ang_vel": 0.5, "all_feet_down": -0.3} | costs
    )
    s["qpos"][0, 3:7] = torch.tensor([math.cos(0.3), math.sin(0.3), 0, 0])  # rolls by 0.6 rad
    assert terms(s, s)["orientation"] == pytest.approx(-(math.sin(0.6) ** 2))
    s["qvel"][0, 2] = 30.0
    assert float(dog.reward(s, s, nothing)) == 0.0  # the minimum


def test_go1_rewards_air_time_and_penalises_slip() -> None:
    dog = walking()
    before, s = walk([1.0, 0.0, 0.0], dog), walk([1.0, 0.0, 0.0], dog)
    nothing = torch.zeros(1, 12, dtype=torch.float64)
    s["air"][0] = torch.tensor([0.3, 0.1, 0.3, 0.0])
    s["site_xpos"][0, dog.feet[2], 2] = 0.05  # still in the air
    s["site_xpos"][0, dog.feet[3], 0] = 0.02  # 2 cm in 20 ms
    s["site_xpos"][0, dog.feet[2], 0] = 0.02  # no penalty: it is in the air
    terms = dog.reward_terms(before, s, nothing)
    assert float(terms["feet_air_time"]) == pytest.approx((0.3 - 0.2) + (0.1 - 0.2), abs=1e-7)
    assert float(terms["feet_slip"]) == pytest.approx(-0.05)
    assert dog.down(s).tolist() == [[True, True, False, True]]
    assert dog.advance(s, nothing, draws(1, 38))["air"][0].tolist() == pytest.approx(
        [0, 0, 0.32, 0]
    )
    s["command"] *= 0
    assert float(dog.reward_terms(before, s, nothing)["feet_air_time"]) == 0.0


def test_go1_commands_change_within_their_ranges() -> None:
    dog = walking()
    commands = dog.new_command(draws(4000, 38))
    still = (commands == 0).all(1)
    assert 0.08 < float(still.double().mean()) < 0.12
    for x, (low, high) in zip(commands[~still].T, dog.commands.values(), strict=True):
        assert low <= float(x.min()) < low + 0.02 and high - 0.02 < float(x.max()) <= high
    s = {k: x.repeat(4000, *[1] * (x.ndim - 1)) for k, x in walk([9.0, 9.0, 9.0], dog).items()}
    after = dog.advance(s, torch.zeros(4000, 12, dtype=torch.float64), draws(4000, 38, seed=1))[
        "command"
    ]
    changed = (after != 9).any(1)
    assert 0.002 < float(changed.double().mean()) < 0.006  # 0.02 s / 5 s
    assert (after[changed].abs() <= 1).all()
