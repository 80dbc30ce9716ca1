"""Run an exported policy in MuJoCo alone: numpy, mujoco and onnxruntime.

`embodied-ppo export` copies this file beside run_policy.py, whose option --mujoco calls it.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from robot_loop import Robot, RobotError, RobotLoop, robot_section

# Time that a robot has to reach a command, and largest difference of its mean error from those of
# the trainer's episodes, m/s, rad/s or rad.
SETTLE_S, TRACKING_TOLERANCE = 1.0, 0.1
# What ``tracking_error`` reads.
STATE = ("joint_positions", "base_velocity", "base_angular_velocity")


class MujocoRobot(Robot):
    """A robot in MuJoCo with the gains, torque limits and delays of the training.

    The servos of MuJoCo are the PD loop, one torque in every physics step. An episode starts in the
    home posture; physics steps, solver and contacts are those of the scene.
    """

    realtime = False

    def __init__(self, info, model):
        """Prepare a model, which is changed: its servos get the gains of the training.

        Raises:
            RobotError: The model lacks a joint or actuator, or has another physics step.
        """
        import mujoco

        super().__init__(info)
        self.mujoco, self.model, self.section = mujoco, model, robot_section(info)
        self.data, self.step_s = mujoco.MjData(model), info["control"]["step_s"]
        model.opt.disableflags |= int(getattr(mujoco.mjtDisableBit, "mjDSBL_AUTORESET", 0))
        steps = self.step_s / model.opt.timestep
        if abs(steps - round(steps)) > 1e-6:
            suitable_s = self.step_s / max(1, round(steps))
            raise RobotError(
                f'write <option timestep="{suitable_s:g}"/> in the scene: a control step of'
                f" {self.step_s:g} s is no multiple of {model.opt.timestep:g} s"
            )
        names = [model.joint(j).name or f"joint{j}" for j in range(model.njnt)]
        free = [n for n, kind in zip(names, model.jnt_type) if kind == 0]
        self.joints = {}
        for joint in info["joints"]:
            name = joint["name"]
            if joint["type"] == "free" and name not in names and len(free) == 1:
                (name,) = free
            if name in names:
                self.joints[joint["name"]] = names.index(name)
        used = [*self.section["joints"], *(a["joint"] for a in info["actuators"] if a["joint"])]
        missing = [name for name in dict.fromkeys(used) if name not in self.joints]
        if missing:
            raise RobotError(f"scene: has no joint {', '.join(missing)}; it has {', '.join(names)}")
        self.actuators = [self._actuator(a) for a in info["actuators"]]
        self.read_joints = [self.joints[name] for name in self.section["joints"]]
        self.frames = []
        names = [model.body(i).name for i in range(model.nbody)]
        for prefix, frame in (("", self.section["frame"]), ("base_", self.section["base"])):
            if frame is None:
                continue
            if frame["body"] not in names:
                raise RobotError(f"scene: has no body {frame['body']}; it has {', '.join(names)}")
            rotation, index = np.zeros(9), names.index(frame["body"])
            mujoco.mju_quat2Mat(rotation, np.array(frame["quat"]))
            self.frames.append((prefix, index, frame, rotation.reshape(3, 3)))
        delay_s = np.array(self.section["action_delay_s"])
        self.delay = np.round(delay_s / model.opt.timestep).astype(int)
        self.reset()

    def _actuator(self, described):
        """Return the index of an actuator, after it has got gains and limits of the training."""
        model, mujoco, name = self.model, self.mujoco, described["name"]
        names = [model.actuator(i).name for i in range(model.nu)]
        moved = [int(j) for j in model.actuator_trnid[:, 0]]
        on_joint = model.actuator_trntype == int(mujoco.mjtTrn.mjTRN_JOINT)
        joint = self.joints.get(described["joint"])
        index = names.index(name) if name in names else None
        if joint is not None and (index is None or moved[index] != joint):
            index = next((i for i in range(model.nu) if on_joint[i] and moved[i] == joint), None)
        if index is None:
            of = f'joint="{described["joint"]}"'
            raise RobotError(f'add <motor name="{name}" {of}/> to the scene: no actuator moves it')
        if described["kind"] != "other" and joint is not None:
            model.actuator_dyntype[index] = int(mujoco.mjtDyn.mjDYN_NONE)
            model.actuator_gaintype[index] = int(mujoco.mjtGain.mjGAIN_FIXED)
            model.actuator_gear[index, 0] = described["gear"]
            model.actuator_ctrllimited[index] = described["range"] is not None
            model.actuator_ctrlrange[index] = described["range"] or (0, 0)
            model.actuator_forcelimited[index] = described["force"] is not None
            force = described["force"] or 0.0
            model.actuator_forcerange[index] = (-force, force)
            if described["kp"] is None:
                model.actuator_gainprm[index, 0] = 1.0
                model.actuator_biastype[index] = int(mujoco.mjtBias.mjBIAS_NONE)
            else:
                model.actuator_biastype[index] = int(mujoco.mjtBias.mjBIAS_AFFINE)
                model.actuator_biasprm[index, 0] = 0.0
                # Scenes with stiffer servos have more damping in the joint, which is part of kd.
                dof = model.jnt_dofadr[joint]
                model.dof_damping[dof] = min(model.dof_damping[dof], described["kd"])
        return index

    def reset(self, qpos=None, qvel=None):
        """Start an episode in the home posture, or with these qpos and qvel of the model."""
        model, data, info = self.model, self.data, self.info
        self.mujoco.mj_resetData(model, data)
        for joint in info["joints"]:
            if joint["name"] in self.joints:
                first = model.jnt_qposadr[self.joints[joint["name"]]]
                data.qpos[first : first + len(joint["home"])] = joint["home"]
        data.qpos[:] = data.qpos if qpos is None else qpos
        data.qvel[:] = 0 if qvel is None else qvel
        self.queue, self.count, self.stopped = deque(maxlen=int(self.delay.max()) + 1), 0, False
        kp, kd = (np.array([a[k] or 0.0 for a in info["actuators"]]) for k in ("kp", "kd"))
        self._set(np.array(self.section["home_target"]), kp, kd)
        self.mujoco.mj_forward(model, data)
        delay, first = self.section["obs_delay"], self.measure()
        times = [-(delay - i) * self.step_s for i in range(delay + 1)]
        self.history = deque([dict(first, time_s=t) for t in times], delay + 1)

    def read(self):
        """Return the state, as late as the observations of the training."""
        return self.history[0]

    def write(self, target, kp, kd):
        """Queue targets, each of which acts after the delay of its joint."""
        self.queue.append((self.count, np.array(target), kp, kd))

    def stop(self):
        """Switch to damping."""
        self.stopped = True
        self.queue.clear()
        self._set(np.zeros(len(self.actuators)), np.zeros(len(self.actuators)), self.kd)

    def now(self):
        """Return the simulated time, s."""
        return self.data.time

    def sleep(self, seconds):
        """Simulate."""
        for _ in range(round(seconds / self.model.opt.timestep)):
            for written, target, kp, kd in self.queue:
                self._set(target, kp, kd, np.flatnonzero(written + self.delay == self.count))
            self.mujoco.mj_step(self.model, self.data)
            self.count += 1
        self.mujoco.mj_step1(self.model, self.data)  # derived fields of the new state
        self.history.append(dict(self.measure(), time_s=self.data.time))

    def _set(self, target, kp, kd, numbers=None):
        """Set targets and gains of all actuators, or of some numbers.

        The damping of a joint in the scene counts as a part of kd.
        """
        self.kd = kd
        for n in range(len(target)) if numbers is None else numbers:
            i, described = self.actuators[n], self.info["actuators"][n]
            self.data.ctrl[i] = target[n]
            if described["kp"] is not None:
                dof = self.model.jnt_dofadr[self.joints[described["joint"]]]
                damping = max(0.0, kd[n] - self.model.dof_damping[dof])
                self.model.actuator_gainprm[i, 0] = kp[n]
                self.model.actuator_biasprm[i, 1:3] = -kp[n], -damping

    def measure(self):
        """Return what ``Robot.read`` returns, for the current state."""
        model, data, mujoco = self.model, self.data, self.mujoco
        state = {
            "joint_positions": data.qpos[model.jnt_qposadr[self.read_joints]],
            "joint_velocities": data.qvel[model.jnt_dofadr[self.read_joints]],
        }
        for prefix, body, frame, rotation in self.frames:
            quaternion, velocity = np.zeros(4), np.zeros(6)
            mujoco.mju_mulQuat(quaternion, data.xquat[body], np.array(frame["quat"]))
            # In the frame of the body: angular, linear.
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body, velocity, 1)
            linear = velocity[3:] + np.cross(velocity[:3], frame["pos"])
            state[prefix + "quaternion"] = quaternion
            state[prefix + "angular_velocity"] = velocity[:3] @ rotation
            state[prefix + "velocity"] = linear @ rotation
        names = {model.sensor(k).name or f"sensor {k}": k for k in range(model.nsensor)}
        ids = [names.get(name) for name in self.section["sensors"]]
        if None not in ids:
            parts = [data.sensordata[model.sensor_adr[k] :][: model.sensor_dim[k]] for k in ids]
            state["sensors"] = np.concatenate([np.zeros(0), *parts])
        return state


def load_scene(scene):
    """Return the model of a scene."""
    try:
        import mujoco
    except ImportError as error:
        raise RobotError(f"pip install mujoco: it cannot be imported ({error})") from error
    try:
        return mujoco.MjModel.from_xml_path(str(scene))
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise RobotError(f"--mujoco {scene}: MuJoCo refuses it: {reason}") from error


def tracking_error(section, command, state, step_s):
    """Return the mean absolute error of each number that follows a command, after SETTLE_S.

    Without such a command: the mean distance of the joints from the home posture, [1].

    Args:
        section: Section "robot" of policy.json.
        command: [C].
        state: Arrays [T, ..] of ``MujocoRobot.measure``.
        step_s: Control step.
    """
    settle = round(SETTLE_S / step_s)
    settle = settle if settle < len(state["joint_positions"]) else 0
    if not section["tracks"]:
        return [float(np.abs(state["joint_positions"][settle:] - section["home"]).mean())]
    errors = []
    for name, value in zip(section["tracks"], command):
        key, _, axis = name.rpartition(" ")
        errors.append(float(np.abs(state[key][settle:, "xyz".index(axis)] - value).mean()))
    return errors


def simulate(policy, observe, scene, *, command=None, seconds=None, log=None):
    """Run the policy in MuJoCo with each command of the trainer's evaluation, or with one.

    Returns:
        One line for each command whose tracking error differs from that of the trainer.
    """
    info, section = policy.info, robot_section(policy.info)
    model = load_scene(scene)
    rows, names = section["tracking"], section["tracks"] or ["distance from home"]
    if command is not None:  # the trainer has not measured it
        unknown, length = [np.nan] * len(names), 10.0 if seconds is None else seconds
        rows = [{"command": command, "errors": [unknown], "seconds": [length]}]
    if log and len(rows) > 1:
        raise RobotError(f"add --command to --log: {len(rows)} commands would overwrite the file")
    print(f"command: mean error of {', '.join(names)} (trainer; nan: not measured), seconds")
    findings = []
    for row in rows:
        delay_s = row.get("action_delay_s", section["action_delay_s"])  # of the trainer's episode
        policy.info = {**info, "robot": {**section, "action_delay_s": delay_s}}
        robot = MujocoRobot(policy.info, model)
        trained_s = min(row["seconds"])
        duration = max(row["seconds"]) if seconds is None else seconds
        options = {"ramp_s": 0.0, "protect": False, "seconds": duration, "log": log}
        loop = RobotLoop(policy, robot, observe, command=row["command"], **options)
        reason = loop.run()
        if not loop.rows or not reason.startswith(("finished", "tilt")):
            raise RobotError(reason)
        keys = [k for k in STATE if f"state/{k}" in loop.rows[0]]
        state = {k: np.stack([x[f"state/{k}"] for x in loop.rows]) for k in keys}
        error = tracking_error(section, row["command"], state, loop.step_s)
        alive, text = loop.steps * loop.step_s, " ".join(f"{x:g}" for x in row["command"])
        trained = np.array(row["errors"])  # [episodes, errors]
        pairs = [f"{x:.3f} ({y:.3f})" for x, y in zip(error, trained.mean(0))]
        end = "" if reason.startswith("finished") else f"; {reason}"
        print(f"{text or '-'}: {', '.join(pairs)}, {alive:g} s ({trained_s:g}){end}")
        low, high = trained.min(0) - TRACKING_TOLERANCE, trained.max(0) + TRACKING_TOLERANCE
        for name, x, a, b in zip(names, error, low, high):
            if x < a or x > b:  # False for NaN
                wrong = f"error of {name} {x:.3f} is not in {a:.3f}..{b:.3f}"
                findings.append(f"command {text}: {wrong}")
        if alive < 0.9 * min(duration, trained_s):
            findings.append(f"command {text}: ends after {alive:g} s, trainer {trained_s:g} s")
    return findings
