"""Exported policies in MuJoCo alone and in the robot loop, with planted faults of a robot."""

from __future__ import annotations

import ast
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest
import run_helpers
import torch
from tools.deploy.test_bundle import CHEETAH, pytestmark
from toy_robots import QUADRUPED

from embodied_ppo.evaluation.episodes import evaluation_seeds
from embodied_ppo.options.schema import RealismConfig
from embodied_ppo.rollout import environments
from embodied_ppo.tools.deploy import policy_export, robot_section, run_policy
from embodied_ppo.tools.deploy.run_policy import Policy
from embodied_ppo.training import trained_run

__all__ = ["pytestmark"]
EXAMPLES = ("robot_unitree.py", "robot_ros2.py")
TASK = """
from pathlib import Path
from embodied_envs.robots.robot_task import RobotTask

class Stand(RobotTask):
    id, decimation, max_episode_steps = "Stand", 5, 100
    mjcf = Path(__file__).parent / "quadruped.xml"

    def reward_terms(self, before, s, action):
        return {"home": 1 - self.distance_from_home(s)}

    def terminated(self, s):
        return self.fallen(s)
"""
MESH = """<compiler meshdir="meshes"/><asset><mesh file="rock.obj"/><mesh file="moss.obj"/></asset>
    <worldbody><geom name="rock" type="mesh" mesh="rock" pos="3 3 1"/>
    <geom name="moss" type="mesh" mesh="moss" pos="3 3 1" contype="0" conaffinity="0"/>"""
ROCK = "v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\nf 1 3 2\nf 1 2 4\nf 2 3 4\nf 1 4 3\n"
OPTIONS: dict[str, Any] = run_helpers.options(
    "env.max_episode_steps=100 evaluation.episodes=1 evaluation.video_episodes=0 compile=never"
    " updates=1 model.init_log_std=-3.0"
)
DELAYS: dict[str, Any] = run_helpers.options(
    "env.realism.action_delay=[0.5,1.5] env.realism.joint_delay=[0,1.5] env.realism.obs_delay=1"
    " env.realism.action_rate_limit=0.3"
)


@pytest.fixture(scope="module", params=["Go1Joystick", "Stand"])
def robot(request, tmp_path_factory) -> Path:
    """A folder with the run ``run`` and its bundle ``out``."""
    folder, id = tmp_path_factory.mktemp("robot"), request.param
    if id == "Stand":
        (folder / "quadruped.xml").write_text(QUADRUPED.replace("<worldbody>", MESH, 1))
        (folder / "meshes").mkdir()
        for name in ("rock.obj", "moss.obj"):
            (folder / "meshes" / name).write_text(ROCK)
        (folder / "deployed_stand.py").write_text(TASK)
        sys.path.insert(0, str(folder))
        request.addfinalizer(lambda: sys.path.remove(str(folder)))
        id = "deployed_stand:Stand"
    run_helpers.train(folder / "run", {**OPTIONS, **DELAYS, "env.id": id})
    policy_export.export(str(folder / "run"), str(folder / "out"))
    return folder


@pytest.fixture(scope="module")
def policy(robot: Path) -> Policy:
    return Policy(robot / "out", expected_hz=50)


def load(policy: Policy) -> tuple[Any, Any, Any]:
    """Return the modules robot_loop and mujoco_robot of a bundle, and its function observe."""
    names = ("robot_loop.py", "mujoco_robot.py", "observation.py")
    loop, simulation, observation = (run_policy.load_file(policy.folder / name) for name in names)
    return loop, simulation, observation.observe


def scene(policy: Policy) -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_path(str(policy.folder / "scene" / "scene.xml"))


def command_of(policy: Policy) -> list[float]:
    return [0.5, 0.2, -0.3][: len(policy.info["robot"]["command_names"])]


# ---------------------------------------------------------------------------------- MuJoCo alone
def test_bundle_describes_the_robot(policy: Policy) -> None:
    robot, info = policy.info["robot"], policy.info
    assert info["format"] == 2 and info["physics"]["steps"] in (4, 5)
    count = len(info["actuators"])
    assert robot["obs_delay"] == 1
    # In the middle 1 + 0.75 steps; each tracked episode has one of 1 to 2.5 steps for each joint.
    assert robot["action_delay_s"] == pytest.approx([1.75 * 0.02] * count)
    for row in robot["tracking"]:
        delays = np.array(row["action_delay_s"])
        assert delays.shape == (count,) and len(set(delays)) > 2
        assert delays.min() > 0.019 and delays.max() < 0.055
    assert robot["action_rate_limit"] == pytest.approx([0.3] * count)
    stub = (policy.folder / "my_robot.py").read_text()
    if info["task"] == "Go1Joystick":
        assert robot["not_measured"] == ["velocity"] and "estimate it" in stub
        hip = info["actuators"][0]
        assert (hip["kp"], hip["kd"], hip["force"]) == (35, 0.5, 23.7)
        assert robot["home"][:3] == [0.1, 0.9, -1.8] == robot["home_target"][:3]
        assert robot["tracks"] == ["base_velocity x", "base_velocity y", "base_angular_velocity z"]
        assert len(robot["tracking"]) == 7
        assert (policy.folder / "observation.py").read_text().count("estimator") == 1
    else:
        # A mesh that is only seen is left out.
        assert [x.name[-8:] for x in policy.folder.glob("scene/*.obj")] == ["rock.obj"]
        assert robot["not_measured"] == [] and len(robot["tracking"]) == 1
        assert robot["joints"][0] == "FL_roll" and robot["frame"]["body"] == "trunk"
        assert robot["frame"]["pos"] == [0, 0, 0.05]


def test_mujoco_alone_gives_the_observations_and_actions_of_our_simulator(
    robot: Path, policy: Policy, monkeypatch
) -> None:
    """Same reset, command and delay of each joint, no noise: 60 steps; float32 rounding grows."""
    _, simulation, observe = load(policy)
    loop_module, command = run_policy.load_file(policy.folder / "robot_loop.py"), command_of(policy)
    run = trained_run.open_run(str(robot / "run"))
    realism = RealismConfig(joint_delay=(0.8, 2.4), obs_delay=1, action_rate_limit=0.3)
    env_config = replace(
        environments.evaluation_env(run.config), realism=realism, action_mapping="none"
    )
    env = environments.make_env(
        evaluation_seeds(0, 1),
        config=env_config,
        device=torch.device("cpu"),
        task=environments.stored_task(run.source, run.run_dir),
    )
    simulator: Any = env.simulator
    held = {"command": torch.tensor([command])} if command else {}
    held |= {"noise": torch.zeros_like(simulator.s["noise"])} if "noise" in simulator.s else {}
    simulator.hold_variables(held)
    obs, expected = env.reset(), []
    qpos, qvel = (simulator.s[k][0].clone().numpy() for k in ("qpos", "qvel"))
    delay_s = (env.joint_state()["action_delay"][0] * 0.02).tolist()
    assert len(set(delay_s)) > 2, delay_s
    section = {**policy.info["robot"], "action_delay_s": delay_s}
    monkeypatch.setattr(policy, "info", {**policy.info, "robot": section})
    for _ in range(60):
        assert isinstance(obs, torch.Tensor)
        action = policy.act(obs.numpy())
        expected.append((obs[0].numpy().copy(), action[0].copy()))
        obs = env.step(torch.from_numpy(action)).obs
    env.close()
    device = simulation.MujocoRobot(policy.info, scene(policy))
    device.reset(qpos, qvel)
    options = {"ramp_s": 0.0, "seconds": 1.2, "protect": False, "command": command}
    loop = loop_module.RobotLoop(policy, device, observe, **options)
    assert loop.run() == "finished after 1.2 s" and device.stopped
    (name,) = policy.inputs
    for t, (row, (obs_row, action_row)) in enumerate(zip(loop.rows, expected, strict=True)):
        tolerance = 2e-6 if t < 10 else 1e-3
        np.testing.assert_allclose(row[f"observation/{name}"], obs_row, atol=tolerance, err_msg=t)
        if policy.info["robot"]["action_rate_limit"] is None:
            np.testing.assert_allclose(row["action"], action_row, atol=tolerance)
    assert np.abs(np.diff([row["action"] for row in loop.rows], axis=0)).max() <= 0.3 + 1e-6


def test_command_line_in_mujoco_tracks_as_well_as_the_trainer(robot: Path, policy: Policy) -> None:
    """Neither torch nor the package is imported; the difference of every error is below 0.1."""
    code = (
        "import runpy, sys; sys.argv = ['run_policy.py', '--mujoco']\n"
        "try: runpy.run_path('run_policy.py', run_name='__main__')\n"
        "except SystemExit as error: code = error.code\n"
        "print(code, sorted({'torch', 'embodied_ppo', 'embodied_envs'} & set(sys.modules)))"
    )
    lines = run_helpers.run_process(sys.executable, "-c", code, cwd=policy.folder).splitlines()
    assert lines[-1] == "0 []", lines
    assert sum("(" in line and ", 2 s (2)" in line for line in lines) == len(
        policy.info["robot"]["tracking"]
    )


def test_other_scenes_get_the_gains_and_are_refused_by_name(policy: Policy, capsys) -> None:
    _, simulation, _ = load(policy)
    file, name = policy.folder / "scene" / "other.xml", policy.info["actuators"][0]["joint"]
    # Motors instead of servos, and another physics step.
    spec = mujoco.MjSpec.from_file(str(file.with_name("scene.xml")))
    spec.option.timestep = 0.002
    for actuator in spec.actuators:
        actuator.set_to_motor()
    for key in list(spec.keys):
        spec.delete(key)
    file.write_text(spec.to_xml())
    model = simulation.load_scene(file)
    device = simulation.MujocoRobot(policy.info, model)
    described = policy.info["actuators"][0]
    damping = model.dof_damping[model.jnt_dofadr[model.joint(name).id]]
    assert model.actuator_gainprm[0, 0] == described["kp"]
    assert damping - model.actuator_biasprm[0, 2] == pytest.approx(described["kd"])
    device.sleep(0.02)
    assert device.count == 10
    wrong, arguments = policy.folder / "scene" / "wrong.xml", ["--folder", str(policy.folder)]
    spec.option.timestep = 0.003
    for i, message in enumerate(("timestep", "timestep", "no joint", "refuses it")):
        wrong.write_text(spec.to_xml() if i < 3 else "<mujoco><nothing/></mujoco>")
        assert run_policy.main([*arguments, "--mujoco", str(wrong)]) == 2
        assert message in capsys.readouterr().err
        spec.option.timestep = 0.05
        if i == 1:
            spec.option.timestep, spec.joint(name).name = 0.002, "renamed"
            spec.actuators[0].target = "renamed"


def test_a_scene_that_cannot_be_written_is_one_line(policy: Policy, tmp_path) -> None:
    class Task:
        def spec(self) -> mujoco.MjSpec:
            return mujoco.MjSpec.from_string("<nothing/>")

    lines: list[str] = []
    robot_section.write_files(policy.info, SimpleNamespace(task=Task()), tmp_path, lines.append)
    assert len(lines) == 1 and "a scene of yours" in lines[0] and "\n" not in lines[0]
    assert (tmp_path / "robot_loop.py").exists() and not (tmp_path / "scene").exists()


def test_a_task_without_parts_gets_a_stub(tmp_path, capsys) -> None:
    run_helpers.train(tmp_path / "run", {**CHEETAH, "updates": 1})
    policy_export.export(str(tmp_path / "run"), str(tmp_path / "out"))
    assert "# 2: bthigh position, rad" in (tmp_path / "out" / "observation.py").read_text()
    arguments = ["--folder", str(tmp_path / "out"), "--mujoco"]
    assert run_policy.main(arguments) == 2
    assert "error: write observe() in observation.py" in capsys.readouterr().err
    info = json.loads((tmp_path / "out" / "policy.json").read_text())
    info |= {"format": 1, "robot": None}
    (tmp_path / "out" / "policy.json").write_text(json.dumps(info))
    assert run_policy.main(arguments[:2]) == 0 and run_policy.main(arguments) == 2
    assert "exported in format 2" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ robot loop
def run_loop(policy: Policy, device: Any, **options: Any) -> Any:
    loop_module, _, observe = load(policy)
    rng = np.random.default_rng(0)

    def noisy(state: dict[str, Any]) -> Any:  # so that no two targets are equal
        x = observe(state)
        return x + (noise * rng.uniform(-1, 1, x.shape)).astype("float32")

    noise = options.pop("noise", 0.0)
    options = {"ramp_s": 0.2, "seconds": 1.0, "command": command_of(policy), **options}
    loop = loop_module.RobotLoop(policy, device, noisy, **options)
    loop.run()
    return loop


def test_log_of_the_loop_agrees_with_the_policy_and_faults_in_it_are_named(
    policy: Policy, tmp_path
) -> None:
    _, simulation, _ = load(policy)
    if not all(actuator["kp"] for actuator in policy.info["actuators"]):
        pytest.skip("motors have no home posture")
    device = simulation.MujocoRobot(policy.info, scene(policy))
    loop = run_loop(policy, device, log=str(tmp_path / "log.npz"))
    assert loop.reason == "finished after 1 s" and device.stopped
    arguments = ["--folder", str(policy.folder), "--compare", str(tmp_path / "log.npz")]
    assert run_policy.main(arguments) == 0
    log = dict(np.load(tmp_path / "log.npz"))
    assert len(log["time_s"]) == 60 and (log["phase"] == 0).sum() == 10
    force = np.array([a["force"] or np.inf for a in policy.info["actuators"]])
    assert (np.abs(log["torque"]) <= force + 1e-9).all()
    (name,) = policy.inputs
    key, first = f"observation/{name}", policy.inputs[name]["names"].index("gravity y")
    for change, message in (
        ({key: np.where(np.arange(log[key].shape[1]) == first, -1, 1) * log[key]}, "gravity y"),
        ({"action": log["action"] * 2}, "a scale of 2"),
        ({key: 60 * log[key]}, "outside of its range"),
        ({"time_s": 2 * log["time_s"]}, "time_s is 25 Hz"),
    ):
        findings = policy.compare({**log, **change})
        assert any(message in line for line in findings), findings


# Time from which a robot has a fault.
FAULT_S = 0.5


def rows_like(key: str, value: Any) -> Any:
    """Return a change of a measurement: all numbers of ``key`` become ``value``."""
    return lambda state: {**state, key: np.broadcast_to(value, np.shape(state[key]))}


# Fault of ``Robot.read`` -> what it returns instead of a measurement.
CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "missing": lambda state: None,
    "late": lambda state: {**state, "time_s": state["time_s"] - 0.2},
    "ahead": lambda state: {**state, "time_s": state["time_s"] + 5},
    "short": lambda state: {**state, "joint_positions": state["joint_positions"][:-1]},
    "nan": rows_like("joint_positions", np.nan),
    "fast": rows_like("joint_velocities", 1e3),
    "quaternion": rows_like("quaternion", 0.0),
    "tilt": rows_like("quaternion", np.array([0.5, 0.866, 0, 0])),
    "exit": lambda state: sys.exit(1),
    "exception": lambda state: Path("/no/route/to/the/robot").read_text(),
}


def faulty(simulation: Any, policy: Policy, fault: str) -> Any:
    """Return a robot with a fault from ``FAULT_S`` on."""

    class Faulty(simulation.MujocoRobot):
        last: Any = None

        def read(self) -> Any:
            state = {**super().read(), "target": self.data.ctrl[self.actuators]}
            if self.now() < FAULT_S or self.last is None:
                self.last = state
                return state
            return self.last if fault == "repeated" else CHANGES.get(fault, lambda x: x)(state)

        def write(self, target: Any, kp: Any, kd: Any) -> Any:
            if self.now() >= FAULT_S and fault in ("refused", "lost"):
                return fault == "lost"
            return super().write(target, kp, kd)

    return Faulty(policy.info, scene(policy))


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("missing", "watchdog: the newest measurement"),
        ("repeated", "watchdog: the newest measurement"),
        ("late", "watchdog: the newest measurement"),
        ("ahead", "later than now()"),
        ("nan", "joint_positions[0] is not finite"),
        ("short", "joint_positions has shape"),
        ("quaternion", "length 1"),
        ("tilt", "tilt: 120 degrees"),
        ("fast", "joint velocity"),
        ("refused", "targets are lost"),
        ("lost", "targets are lost"),
        ("exception", "FileNotFoundError"),
        ("exit", "SystemExit"),
    ],
)
def test_every_fault_ends_in_the_safe_state_within_the_watchdog_time(
    fault: str, reason: str, policy: Policy, tmp_path
) -> None:
    _, simulation, _ = load(policy)
    device = faulty(simulation, policy, fault)
    loop = run_loop(policy, device, log=str(tmp_path / "log.npz"), watchdog_s=0.2, noise=1.0)
    assert reason in loop.reason and device.stopped
    stopped_s = device.now() - FAULT_S
    # "late" and "lost" measure from the last good measurement or target, at most 2 steps before.
    assert -0.01 <= stopped_s <= 0.2 + 1e-6, stopped_s
    log = np.load(tmp_path / "log.npz")
    assert str(log["reason"]) == loop.reason
    # One row for every control step that has written a target.
    np.testing.assert_allclose(np.diff(log["time_s"]), 0.02, atol=1e-6)
    assert FAULT_S - 0.03 <= log["time_s"][-1] <= device.now() + 1e-6


def test_single_lost_measurements_are_bridged(policy: Policy, tmp_path) -> None:
    _, simulation, _ = load(policy)

    class Lossy(simulation.MujocoRobot):
        def read(self) -> Any:
            state = {**super().read(), "command": np.array(command_of(policy)) * self.count}
            state |= {"target": self.data.ctrl[self.actuators]} if self.count < 9 else {}
            return None if self.count % 3 == 1 else state

    loop = run_loop(policy, Lossy(policy.info, scene(policy)), log=str(tmp_path / "log.npz"))
    assert loop.reason == "finished after 1 s"
    log = np.load(tmp_path / "log.npz")
    assert 0.1 < 1 - log["fresh"].mean() < 0.9
    # A lost measurement repeats the newest command, not the one that the policy has observed.
    assert (np.diff(log["state/command"][log["phase"] == 1, :1], axis=0) >= 0).all()
    assert "state/phase" in log and "state/target" not in log


@pytest.mark.parametrize("pauses", [1, 3])
def test_one_late_step_is_logged_and_three_in_a_row_stop(
    pauses: int, policy: Policy, tmp_path, capsys
) -> None:
    _, simulation, _ = load(policy)

    class Busy(simulation.MujocoRobot):
        paused = 0

        def read(self) -> Any:
            state = {**super().read(), "target": self.data.ctrl[self.actuators].copy()}
            if self.now() > 0.5 and self.paused < pauses:
                self.paused += 1
                simulation.MujocoRobot.sleep(self, 0.3)  # the measurement is old, too
            return state

    device = Busy(policy.info, scene(policy))
    loop = run_loop(policy, device, log=str(tmp_path / "log.npz"), watchdog_s=0.2, noise=1.0)
    assert capsys.readouterr().err.count("late: the last control step took 0.3") == pauses
    if pauses == 3:
        assert loop.reason == "watchdog: 3 control steps in a row were late" and device.stopped
    else:
        assert loop.reason == "finished after 1 s"
        assert np.load(tmp_path / "log.npz")["late"].sum() == 1


@pytest.mark.parametrize("function", ["read", "write"])
def test_a_robot_that_does_not_return_is_stopped_by_the_watchdog(
    function: str, policy: Policy, tmp_path, monkeypatch
) -> None:
    _, simulation, _ = load(policy)
    released, stopped, savez = threading.Event(), threading.Event(), np.savez_compressed
    # A long log takes time, in which the robot's function returns.
    slow = lambda *args, **arrays: time.sleep(0.5) or savez(*args, **arrays)
    monkeypatch.setattr(np, "savez_compressed", slow)

    class Hanging(simulation.MujocoRobot):
        realtime = True

        def hang(self) -> None:
            if self.count > 50:
                assert released.wait(30), "the watchdog has not stopped the robot"

        def read(self) -> Any:
            if function == "read":
                self.hang()
            return super().read()

        def write(self, target: Any, kp: Any, kd: Any) -> Any:
            if function == "write":
                self.hang()
            return super().write(target, kp, kd)

        def stop(self) -> None:
            stopped.set()
            super().stop()

    def release() -> None:  # long after the watchdog has stopped the robot
        if stopped.wait(30):
            time.sleep(0.2)
            released.set()

    threading.Thread(target=release, daemon=True).start()
    device = Hanging(policy.info, scene(policy))
    loop = run_loop(policy, device, log=str(tmp_path / "log.npz"), watchdog_s=2.0)
    assert loop.reason.startswith("watchdog") and device.stopped
    assert str(np.load(tmp_path / "log.npz")["reason"]) == loop.reason
    assert np.all(device.data.ctrl[device.actuators] == 0)  # no target after the stop


def test_signal_stops_a_robot_of_a_file(policy: Policy, tmp_path) -> None:
    """The command line runs the class MyRobot of a file; SIGTERM ends it with a log."""
    file, xml = tmp_path / "simulated.py", policy.folder / "scene" / "scene.xml"
    file.write_text(
        "import os, signal, mujoco\n"
        "from mujoco_robot import MujocoRobot\n"
        "class MyRobot(MujocoRobot):\n"
        "    def __init__(self, info):\n"
        f"        model = mujoco.MjModel.from_xml_path({str(xml)!r})\n"
        "        super().__init__(info, model)\n"
        "    def read(self):\n"
        "        if self.count > 100: os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return super().read()\n"
        "    def stop(self):\n"
        "        super().stop(); print('safe')\n"
    )
    command = (sys.executable, "run_policy.py", "--loop", file, "--log", tmp_path / "log")
    output = run_helpers.run_process(*command, cwd=policy.folder)
    assert output.splitlines()[1:] == ["safe", "signal SIGTERM"]
    assert str(np.load(tmp_path / "log")["reason"]) == "signal SIGTERM"


def test_stub_and_wrong_options_are_refused(policy: Policy, tmp_path, capsys) -> None:
    common, robot = ["--folder", str(policy.folder)], ["--loop", str(policy.folder / "my_robot.py")]
    for options, message in (
        ([*robot, "--watchdog", "0.01"], "--watchdog 0.01: write at least 0.1 s"),
        ([*robot, "--watchdog", "inf"], "--watchdog inf: write"),
        ([*robot, "--command", *["0"] * 5], "--command: write"),
        ([*robot, "--command", "nan", "nan", "nan"], "--command: write"),
        ([*robot, "--ramp", "-3"], "write --ramp from 0"),
        ([*robot, "--seconds", "inf"], "--seconds above 0: 3.0, inf"),
        (["--loop", str(tmp_path / "none.py")], "does not exist"),
        (["--loop", str(policy.folder / "my_robot")], "a file that ends with .py"),
        ([*robot, "--log", str(tmp_path / "none" / "log.npz")], "No such file"),
        (["--mujoco", "--ramp", "3", "--late-steps", "2"], "error: remove --ramp --late-steps, or"),
        (["--log", "x", "--seconds", "2"], "error: remove --seconds --log, or run"),
        (["--compare", ""], "does not exist"),
    ):
        assert run_policy.main([*common, *options]) == 2
        assert message in capsys.readouterr().err
    assert run_policy.main([*common, *robot]) == 1  # the loop has stopped the stub of a robot
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("NotImplementedError: my_robot.py: write read()") == 1


@pytest.mark.parametrize("name", ["run_policy.py", *robot_section.FILES, *EXAMPLES])
def test_files_of_the_bundle_are_python_3_8(name: str) -> None:
    tools = Path(run_policy.__file__).parents[1]
    file = tools / "templates" / f"{name}.j2" if name in EXAMPLES else tools / "deploy" / name
    module = ast.parse(file.read_text(), feature_version=(3, 8))
    classes = {x.name: x for x in module.body if isinstance(x, ast.ClassDef)}
    if name in EXAMPLES:
        (robot,) = classes.values()
        methods = {x.name for x in robot.body if isinstance(x, ast.FunctionDef)}
        assert {"__init__", "read", "write", "stop"} <= methods
