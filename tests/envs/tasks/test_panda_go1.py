"""PandaPickCube and Go1Joystick: models, observations, rewards by hand, resets and commands."""

from __future__ import annotations

import math
import subprocess
import sys

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

import embodied_envs
from embodied_envs.checks import check_env
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks import Task, panda
from embodied_envs.tasks.go1 import Go1Joystick, gravity, velocity
from embodied_envs.tasks.locomotion import HalfCheetah, Walker2d
from embodied_envs.tasks.panda import PandaPickCube
from embodied_ppo.core.random import uniform
from embodied_ppo.core.types import ArraySpec, Box, EnvError

CPU = torch.device("cpu")


def make(id: str, n: int = 2, **options: object) -> MujocoEnv:
    env = embodied_envs.make(
        id, num_envs=n, **{"seeds": list(range(n)), "num_threads": 1, **options}
    )
    assert isinstance(env, MujocoEnv)
    return env


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
PRIVILEGED = {"Go1Joystick": 87, "Go1Rough": 87, "PandaPickCube": 56, "Tabletop": 149}
"""Task -> size of the group "privileged"."""
MASSES = {
    **dict.fromkeys(("Go1Joystick", "Go1Rough"), slice(43, 56)),
    "PandaPickCube": slice(22, 33),
    "Tabletop": slice(107, 111),
}
"""Task -> the masses in its group "privileged"."""


@pytest.mark.parametrize("id", PRIVILEGED)
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


def test_privileged_contact_forces_and_friction_of_go1() -> None:
    """The ground carries the weight, and each floor has a friction of its own."""
    env = make(
        "Go1Joystick", randomize=True, ranges={"friction": [0.3, 2.0]}, obs_keys=["privileged"]
    )
    env.reset()
    steps = [env.step(actions(env, 0.0)).obs for _ in range(60)]
    x = torch.stack([obs["privileged"] for obs in steps if isinstance(obs, dict)])[30:].mean(0)
    weight = 9.81 * x[:, MASSES["Go1Joystick"]].sum(1)
    torch.testing.assert_close(x[:, 70], weight, rtol=0.05, atol=0)
    floor = env.physics.fields["geom_friction"][:, env.physics.model.geom("floor").id, 0]
    torch.testing.assert_close(x[:, 42], floor.float())
    assert bool(((floor > 0.18) & (floor < 1.2)).all()) and floor[0] != floor[1]


@pytest.mark.slow
@pytest.mark.parametrize(("id", "obs", "size"), [("PandaPickCube", 39, 8), ("Go1Joystick", 48, 12)])
def test_contract(id: str, obs: int, size: int) -> None:
    report = check_env(
        lambda seeds: make(id, len(seeds), seeds=seeds, max_episode_steps=15), steps=60
    )
    assert report.longest == 15 and report.episodes >= 16 and report.seeded
    env = make(id)
    assert (
        isinstance(env.obs_spec, ArraySpec)
        and env.obs_spec.shape == (obs,)
        and actions(env).shape == (2, size)
    )
    assert env.physics.model.opt.timestep * env.task.decimation == pytest.approx(0.02)
    assert env.physics.model.nmeshvert < 3000  # the shipped models have 400 and 100 thousand


@pytest.mark.parametrize("id", ["PandaPickCube", "Go1Joystick"])
def test_float32_gives_the_same_as_float64(id: str) -> None:
    env = make(id, 4)
    env.reset()
    for _ in range(5):
        env.step(actions(env))
    double, single = env.task, type(env.task)()
    bound(single, torch.float32)
    s = {k: x.to(torch.float32) if x.is_floating_point() else x for k, x in env.s.items()}
    action = actions(env, 0.5)
    for a, b in (
        (double.observe(env.s), single.observe(s)),
        (double.reward(env.s, env.s, action.double()), single.reward(s, s, action)),
        (double.control(env.s, action.double()), single.control(s, action)),
    ):
        assert isinstance(a, Tensor) and isinstance(b, Tensor)
        assert b.dtype == torch.float32 and torch.allclose(a.float(), b, atol=1e-5)
    u, v = draws(4, single.reset_noise).float(), draws(4, single.step_noise).float()
    assert all(
        x.dtype == torch.float32 for x in (single.reset(u) | single.advance(s, action, v)).values()
    )


@pytest.mark.parametrize("id", ["PandaPickCube", "Go1Joystick"])
def test_missing_robot_package_is_named(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panda, "PACKAGE", "robots_that_are_not_there")
    with pytest.raises(EnvError, match="pip install --force-reinstall robots_that_are_not_there"):
        make(id)
    monkeypatch.setattr(panda, "PACKAGE", "json")  # a package without robots
    with pytest.raises(EnvError, match=r"json/mujoco.*is not there"):
        make(id)


@pytest.mark.slow
def test_256_pandas_take_less_than_a_gigabyte() -> None:
    code = """
import re, torch, embodied_envs
env = embodied_envs.make("PandaPickCube", num_envs=256, seeds=list(range(256)), num_threads=2)
env.reset()
for _ in range(3):
    env.step(torch.zeros(256, 8))
# ru_maxrss would include the peak of the parent process.
print(int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1e6)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 0.6  # GB, of which torch is 0.2; EnvPool's take 10.8


@pytest.mark.parametrize("id", ["PandaPickCube", "Go1Joystick"])
def test_pictures(id: str) -> None:
    env = make(id, render=True, render_size=(60, 80))
    env.reset()
    picture = env.render().float()
    assert picture.shape == (60, 80, 3) and picture.std() > 10
    env.close()


def test_panda_cameras_front_and_wrist() -> None:
    env = make("PandaPickCube", cameras=("front", "wrist"), image_size=(64, 64))
    obs = env.reset()
    assert isinstance(obs, dict)
    for name in ("front", "wrist"):
        red, green, blue = obs[name].int().unbind(1)  # the cube is green
        assert ((green > red + 60) & (green > blue + 60)).flatten(1).any(1).all()
    env.close()


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
        "mocap_pos": torch.tensor([[target]], dtype=torch.float64),
    }


def picking() -> PandaPickCube:
    task = PandaPickCube()
    bound(task)
    return task


def test_panda_progress_by_hand() -> None:
    task, target = picking(), [0.6, 0.0, 0.33]

    def progress(*args: object) -> float:
        return float(task.progress(pick(*args)))  # pyright: ignore[reportArgumentType]

    # 20 cm above the cube: reach = 1 - tanh(1) = 0.238, the rest 0; none from below
    assert progress([0.6, 0.0, 0.03], [0.6, 0.0, 0.23], target) == pytest.approx(
        (1 - math.tanh(1)) / 5
    )
    upwards = pick([0.6, 0.0, 0.03], [0.6, 0.0, 0.03], target)
    upwards["site_xmat"] = -upwards["site_xmat"]
    assert float(task.progress(upwards)) == 0.0
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
    assert float(task.reward(open_, closed, nothing)) == pytest.approx(task.gain * 0.2)
    assert float(task.reward(closed, open_, nothing)) == pytest.approx(-task.gain * 0.2)
    low = pick([0.6, 0.3, 0.03], [0.6, 0.0, 0.01], target)
    assert float(task.reward(low, low, nothing)) == pytest.approx(-0.1)


def test_panda_success_is_a_cube_at_rest_at_its_target() -> None:
    task, target = picking(), [0.6, 0.0, 0.33]
    assert bool(task.success(pick([0.6, 0.04, 0.33], target, target)))
    assert not bool(task.success(pick([0.6, 0.06, 0.33], target, target)))
    assert not bool(task.success(pick([0.6, 0.0, 0.03], target, target)))  # on the floor
    thrown = pick(target, target, target)
    thrown["qvel"][0, 9] = 0.3
    assert not bool(task.success(thrown))
    # even below the lowest target a cube on the floor is too far away
    assert task.target_z_m[0] - 0.03 > task.tolerance_m + 0.1


def test_panda_ends_if_the_cube_is_out_of_reach() -> None:
    task, target = picking(), [0.6, 0.0, 0.33]
    assert not bool(task.terminated(pick([0.9, 0.0, 0.03], target, target)))
    assert bool(task.terminated(pick([0.9, 0.6, 0.03], target, target)))


def test_panda_observation() -> None:
    task = picking()
    s = pick([0.6, 0.1, 0.05], [0.5, 0.0, 0.25], [0.6, 0.0, 0.35], 0.03)
    s["qpos"][0, :7], s["qvel"][0, :7] = torch.arange(7.0), 10 + torch.arange(7.0)
    s["ctrl"] = s["qpos"][:, :8] + 0.5
    s["qpos"][0, 12:] = torch.tensor(
        [math.cos(math.pi / 4), 0, 0, math.sin(math.pi / 4)]
    )  # a quarter turn about z
    obs = task.observe(s)[0]
    assert obs.shape == (39,)
    assert obs[:8].tolist() == [*range(7), 0.03] and obs[8:15].tolist() == [*range(10, 17)]
    expected = [0.1, -0.1, 0.2]  # from gripper (0.1, 0.1, -0.2), y and z the other way round
    expected += [0.0, 0.1, -0.3]  # to target (0, -0.1, 0.3)
    expected += [0.0, 0.0, -1.0]  # up
    expected += [
        0.0,
        -1.0,
        0.0,
        0.0,
        0.0,
        -1.0,
    ]  # the cube's x axis is the world's y, its z axis the world's
    expected += [0.05, *[0.5] * 8]
    assert obs[15:].tolist() == pytest.approx(expected, abs=1e-7)


def test_panda_actions_move_the_position_targets() -> None:
    task = picking()
    s = {"ctrl": task.ctrl0.repeat(1, 1)}
    action = torch.tensor([[1.0, -0.5, 0, 0, 0, 0, 0, -1]], dtype=torch.float64)
    moved = task.control(s, action) - s["ctrl"]
    assert moved[0].tolist() == pytest.approx([0.04, -0.02, 0, 0, 0, 0, 0, -0.02])
    s["ctrl"][0, 0] = 2.89
    assert float(task.control(s, action)[0, 0]) == pytest.approx(2.8973)  # the joint's limit


def test_panda_initial_states_are_in_range_and_differ() -> None:
    env, other = (
        make("PandaPickCube", 200),
        make("PandaPickCube", 200, seeds=list(range(1000, 1200))),
    )
    env.reset()
    cube, target = env.s["qpos"][:, 9:12], env.s["mocap_pos"][:, 0]
    for x, (low, high) in (
        (cube[:, 0], (0.45, 0.75)),
        (cube[:, 1], (-0.2, 0.2)),
        (target[:, 0], (0.45, 0.75)),
        (target[:, 1], (-0.2, 0.2)),
        (target[:, 2], (0.2, 0.4)),
    ):
        assert (
            low <= float(x.min()) < low + 0.05 * (high - low)
            and high - 0.05 * (high - low) < float(x.max()) <= high
        )
    other.reset()
    assert not torch.isclose(env.s["qpos"], other.s["qpos"]).all(1).any()
    first = cube.clone()
    env.reset()
    assert not torch.isclose(first, env.s["qpos"][:, 9:12]).all(1).any()  # the next episode


def test_panda_cannot_reach_through_the_floor() -> None:
    env = make("PandaPickCube", 1)
    env.reset()
    down = torch.tensor([[0.0, 1, 0, 0, 0, 0, 0, 0]])  # bend forward at the shoulder
    for _ in range(100):
        env.step(down)
    assert float(env.s["site_xpos"][0, :, 2].min()) > -0.01


def test_panda_is_still_without_actions() -> None:
    env = make("PandaPickCube")
    env.reset()
    start = env.s["qpos"].clone()
    for _ in range(25):
        step = env.step(torch.zeros(2, 8))
        assert step.reward.abs().max() < 0.02 and not step.success.any()  # pyright: ignore[reportOptionalMemberAccess]
    assert torch.allclose(env.s["qpos"][:, 9:12], start[:, 9:12], atol=2e-3)  # the cube stands
    assert (env.s["qpos"] - start)[:, :7].abs().max() < 0.05


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
        assert velocity(s)[i].numpy() == pytest.approx(turn.T @ v[i, :3])
        assert gravity(s)[i].numpy() == pytest.approx(turn.T @ [0, 0, -1])


def test_go1_observation() -> None:
    dog = walking()
    s = walk([0.5, -0.2, 0.7], dog)
    s["qvel"] = torch.arange(18.0, dtype=torch.float64)[None]
    s["qpos"][0, 7:] = dog.home + 0.25
    s["last_action"] = torch.full((1, 12), -0.5, dtype=torch.float64)
    obs = dog.observe(s)[0].tolist()
    expected = [
        0,
        1,
        2,
        3,
        4,
        5,
        0,
        0,
        -1,
        0.5,
        -0.2,
        0.7,
        *[0.25] * 12,
        *range(6, 18),
        *[-0.5] * 12,
    ]
    assert obs == pytest.approx(expected)
    s["noise"] = torch.arange(1.0, 34.0, dtype=torch.float64)[None]
    off = dog.observe(s)[0] - torch.tensor(expected, dtype=torch.float64)
    assert off.tolist() == pytest.approx([*range(1, 10), 0, 0, 0, *range(10, 34), *[0] * 12])
    drawn = dog.advance(
        {k: x.repeat(500, *[1] * (x.ndim - 1)) for k, x in s.items()},
        s["last_action"],
        draws(500, 38),
    )
    assert (
        drawn["noise"].abs().amax(0) / torch.tensor(dog.sensor_noise)
    ).tolist() == pytest.approx([0.99] * 33, abs=0.01)


def test_go1_reward_by_hand() -> None:
    dog = walking()
    nothing = torch.zeros(1, 12, dtype=torch.float64)

    def terms(
        before: dict[str, Tensor], s: dict[str, Tensor], action: Tensor = nothing
    ) -> dict[str, float]:
        return {k: float(x) for k, x in dog.terms(before, s, action).items() if float(x)}

    still = walk([0.0, 0.0, 0.0], dog)
    assert terms(still, still) == {"track": 1.0, "turn": 0.5}  # the command is to stand
    assert float(dog.reward(still, still, nothing)) == 1.5
    s = walk([0.3, 0.4, 1.0], dog)  # 0.5 m/s and 1 rad/s missing: exp(-4 · 0.25), exp(-4 · 1) / 2
    assert terms(s, s) == pytest.approx(
        {"track": math.exp(-1), "turn": 0.5 * math.exp(-4), "stuck": -0.3}
    )
    s["qvel"][0, :6] = torch.tensor([0.3, 0.4, 2.0, 1.0, 2.0, 1.0])
    s["actuator_force"][0, :2] = 10.0
    s["qpos"][0, 7] += 0.5
    s["last_action"] = nothing + 0.5
    costs = {
        "bounce": -0.5 * 4,
        "sway": -0.01 * 5,
        "pose": -0.1 * 0.25,
        "effort": -2e-4 * 200,
        "change": -0.01 * 3,
    }
    assert terms(s, s) == pytest.approx({"track": 1.0, "turn": 0.5, "stuck": -0.3} | costs)
    s["qpos"][0, 3:7] = torch.tensor([math.cos(0.3), math.sin(0.3), 0, 0])  # rolls by 0.6 rad
    assert terms(s, s)["tilt"] == pytest.approx(-(math.sin(0.6) ** 2))
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
    terms = dog.terms(before, s, nothing)
    assert float(terms["air"]) == pytest.approx((0.3 - 0.2) + (0.1 - 0.2), abs=1e-7)
    assert float(terms["slip"]) == pytest.approx(-0.05)
    assert dog.down(s).tolist() == [[True, True, False, True]]
    assert dog.advance(s, nothing, draws(1, 38))["air"][0].tolist() == pytest.approx(
        [0, 0, 0.32, 0]
    )
    s["command"] *= 0
    assert float(dog.terms(before, s, nothing)["air"]) == 0.0


def test_go1_commands_change_within_their_ranges() -> None:
    dog = walking()
    commands = dog.command(draws(4000, 38))
    still = (commands == 0).all(1)
    assert 0.08 < float(still.double().mean()) < 0.12
    for x, (low, high) in zip(
        commands[~still].T, (dog.forward_m_s, dog.sideways_m_s, dog.yaw_rad_s), strict=True
    ):
        assert low <= float(x.min()) < low + 0.02 and high - 0.02 < float(x.max()) <= high
    s = {k: x.repeat(4000, *[1] * (x.ndim - 1)) for k, x in walk([9.0, 9.0, 9.0], dog).items()}
    after = dog.advance(s, torch.zeros(4000, 12, dtype=torch.float64), draws(4000, 38, seed=1))[
        "command"
    ]
    changed = (after != 9).any(1)
    assert 0.002 < float(changed.double().mean()) < 0.006  # dog.change = 0.004
    assert (after[changed].abs() <= 1).all()
    env = make("Go1Joystick", 64)
    env.reset()
    first, resampled = env.s["command"].clone(), torch.zeros(64, dtype=torch.bool)
    assert len(first.unique(dim=0)) > 50
    for _ in range(40):
        step = env.step(torch.zeros(64, 12))
        assert not step.terminated.any()  # it does not fall
        resampled |= (env.s["command"] != first).any(1)
    assert 2 <= int(resampled.sum()) <= 25  # of 64 · 40 · 0.004 = 10


def test_go1_success_is_small_mean_errors_over_an_episode() -> None:
    dog = walking()
    s = walk([0.0, 0.0, 0.0], dog)
    for steps, error, good in (
        (499, (0.19, 0.29), True),
        (499, (0.21, 0.1), False),
        (499, (0.1, 0.31), False),
    ):
        s["steps"] = torch.tensor([float(steps)])
        s["error"] = steps * torch.tensor([error])
        assert bool(dog.success(s)) == good
        s["steps"] -= 1
        assert not bool(dog.success(s))
    s = walk([0.6, 0.8, -0.5], dog)
    after = dog.advance(s, torch.zeros(1, 12, dtype=torch.float64), draws(1, 38))
    assert after["error"][0].tolist() == pytest.approx([1.0, 0.5]) and float(after["steps"]) == 1


def test_go1_ends_after_a_fall() -> None:
    dog = walking()
    s = walk([0.0, 0.0, 0.0], dog)
    assert not bool(dog.terminated(s))
    for angle, fallen in ((1.0, False), (1.1, True), (3.0, True)):  # 60 degrees are 1.047 rad
        s["qpos"][0, 3:7] = torch.tensor([math.cos(angle / 2), 0, math.sin(angle / 2), 0])
        assert bool(dog.terminated(s)) == fallen
    s = walk([0.0, 0.0, 0.0], dog)
    s["qpos"][0, 2] = 0.14
    assert bool(dog.terminated(s))


@pytest.mark.slow
def test_go1_without_actions_stands_for_an_episode() -> None:
    env = make("Go1Joystick", 4)
    env.reset()
    for k in range(500):
        step = env.step(torch.zeros(4, 12))
        assert not step.terminated.any() and step.truncated.all() == (k == 499)
    assert int(env.unstable) == 0


@pytest.mark.parametrize(
    ("task", "size", "examples"),
    [
        (
            Go1Joystick,
            48,
            {12: ("FR_hip position minus home", "rad"), 47: ("RL_calf last action", None)},
        ),
        (PandaPickCube, 39, {0: ("joint1 position", "rad"), 30: ("cube height", "m")}),
        (HalfCheetah, 17, {0: ("rootz position", "m"), 8: ("rootx velocity", "m/s")}),
        (Walker2d, 17, {2: ("thigh_joint position", "rad"), 10: ("rooty velocity", "rad/s")}),
    ],
)
def test_every_number_of_an_observation_has_a_name(
    task: type[Task], size: int, examples: dict[int, tuple[str, str | None]]
) -> None:
    names = task().observation_names(task().spec().compile())
    assert len(names) == len({name for name, _ in names}) == size
    for i, example in examples.items():
        assert names[i] == example
