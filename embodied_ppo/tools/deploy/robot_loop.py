"""Run an exported policy on a robot, or on one that MuJoCo simulates: numpy only.

`embodied-ppo export` copies this file beside run_policy.py, which calls it:

    python run_policy.py --mujoco                      the scene of the training, MuJoCo alone
    python run_policy.py --mujoco other/scene.xml      another scene with the same joints
    python run_policy.py --loop my_robot.py            a robot: class MyRobot with five functions

A control step: read, observe, act, clamp, write, sleep. Every end of the loop, also an exception
and Ctrl-C, calls ``Robot.stop`` and writes the log.
"""

from __future__ import annotations

import select
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

START_S, LOG_S = 5.0, 60.0  # longest times until the first measurement, and to write the log
# Time in which the robot moves to its home posture, and largest tilt of the IMU.
RAMP_S, MAX_TILT_DEG = 3.0, 60.0
# Late control steps in a row that end the loop; fewer, as on a busy computer, are logged.
LATE_STEPS = 3
# Largest share of the rows of a log in which a number is outside of its range in the trace.
RANGE_SHARE = 0.05
RAMP, POLICY = 0, 1  # phases in the log


class RobotError(ValueError):
    """The loop cannot start; the message contains a hint."""


class Robot:
    """What the loop needs of a robot. Override the five functions; each must return at once.

    ``info`` is the content of policy.json: ``info["robot"]["joints"]`` has the order of positions,
    and ``info["actuators"]`` that of targets.
    """

    # Whether a watchdog thread calls ``stop`` where another function does not return.
    realtime = True

    def __init__(self, info):
        """Connect to the robot, without a movement."""
        self.info = info

    def read(self):
        """Return the newest measurement as a dictionary of arrays; None: there is none yet.

        time_s            when it was measured, on the clock of ``now``
        joint_positions   [J], rad or m
        joint_velocities  [J], rad/s or m/s
        quaternion        [4], w x y z, orientation of the IMU's frame (info["robot"]["frame"])
        angular_velocity  [3], rad/s, in this frame
        velocity          [3], m/s, in this frame; only where the policy observes it. No robot
                          measures it, so it comes from an estimator of your own.
        sensors           numbers of the sensors that the policy observes, in their order
        command           optional, replaces --command
        target            optional, the target that the motors have; lost ones are then noticed
        """
        raise NotImplementedError("read")

    def write(self, target, kp, kd):
        """Send the targets [A] of the actuators with gains [A]; return False if it failed."""
        raise NotImplementedError("write")

    def stop(self):
        """Bring the robot into its safe state, for example kp = 0 and kd > 0 in all motors.

        It is called at every end, perhaps twice, and from another thread if ``read`` hangs.
        """
        raise NotImplementedError("stop")

    def now(self):
        """Return the time, s."""
        return time.monotonic()

    def sleep(self, seconds):
        """Wait until the next control step."""
        time.sleep(seconds)


class RobotLoop:
    """Reads, acts and writes once in every control step, until something ends it."""

    def __init__(
        self,
        policy,
        robot,
        observe,
        *,
        command=None,
        seconds=None,
        ramp_s=None,
        watchdog_s=None,
        late_steps=None,
        protect=True,
        log=None,
    ):
        """Check what the loop needs.

        Args:
            policy: ``run_policy.Policy``.
            robot: A ``Robot``.
            observe: Function of the state that returns the observation, see observation.py.
            command: The command [C]; None: zeros.
            seconds: Duration after the ramp; None: until it is stopped.
            ramp_s: Duration of the movement to the home posture; None: RAMP_S.
            watchdog_s: The loop ends before a measurement is older than this, or targets are lost
                for so long; None: 0.1 s, and at least 5 control steps more than the delays of
                the training.
            late_steps: Control steps in a row that must be late (start more than 0.8 watchdog_s
                after the one before, or find only old measurements or targets) to end the loop.
                A function that does not return ends it after late_steps * 0.8 * watchdog_s.
                None: LATE_STEPS.
            protect: Whether targets are limited to the joints' ranges and torque limits, and the
                velocities of joints are limited.
            log: npz file to write at the end; None: no file.

        Raises:
            RobotError: The policy is none for position targets, or an argument is invalid.
        """
        self.policy, self.robot, self.observe, self.log = policy, robot, observe, log
        info, section = policy.info, robot_section(policy.info)
        self.section, self.step_s = section, info["control"]["step_s"]
        delay_steps = (np.array(section["action_delay_s"]) / self.step_s + 1e-6).astype(int)
        ramp_s = RAMP_S if ramp_s is None else ramp_s
        if not (0 <= ramp_s < np.inf and (seconds is None or 0 < seconds < np.inf)):
            raise RobotError(f"write --ramp from 0, --seconds above 0: {ramp_s}, {seconds}")
        self.max_steps = None if seconds is None else round(seconds / self.step_s)
        self.ramp_s = ramp_s
        least = (section["obs_delay"] + delay_steps.max() + 3) * self.step_s
        self.watchdog_s = max(0.1, least + 2 * self.step_s) if watchdog_s is None else watchdog_s
        if not least <= self.watchdog_s < np.inf:
            raise RobotError(f"--watchdog {self.watchdog_s:g}: write at least {least:g} s")
        self.late_steps = LATE_STEPS if late_steps is None else late_steps
        if self.late_steps < 1:
            raise RobotError(f"--late-steps {self.late_steps}: write at least 1")
        self.late = self.stale = self.unsent = 0  # steps in a row
        names = section["command_names"]
        self.command = np.zeros(len(names)) if command is None else np.asarray(command, float)
        if self.command.shape != (len(names),) or not np.isfinite(self.command).all():
            raise RobotError(f"--command: write {len(names)} finite numbers: {', '.join(names)}")
        # Action -> target: offset + scale · action, within the range of the control.
        (self.action,) = policy.actions.values()
        self.low, self.high = action_bounds(self.action)
        control = info["ctrl_of_action"]
        self.offset, self.scale = np.array(control["offset"]), np.array(control["scale"])
        actuators = info["actuators"]
        bounds = [a["range"] or (-np.inf, np.inf) for a in actuators]
        self.kp, self.kd = (np.array([a[k] or 0.0 for a in actuators]) for k in ("kp", "kd"))
        self.force = np.array([a["force"] or np.inf for a in actuators])
        self.servo = self.kp > 0
        if protect:
            if not self.servo.all():
                others = [a["name"] for a, x in zip(actuators, self.servo) if not x]
                raise RobotError(
                    f"train with position servos on joints: {', '.join(others)} have no kp, so the"
                    " loop cannot move to the home posture or limit torques"
                )
            ranges = {joint["name"]: joint["range"] for joint in info["joints"]}
            limits = [ranges[a["joint"]] or (-np.inf, np.inf) for a in actuators]
            bounds = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, limits)]
        self.least, self.most = np.array(bounds, float).T
        self.protect = protect
        # [A, J], 1 where an actuator moves a joint: numbers of joints -> those of actuators.
        moves = [[a["joint"] == name for name in section["joints"]] for a in actuators]
        self.moves = np.array(moves, float)
        self.rate_limit = section["action_rate_limit"]
        # Steps between an element of an action and its place in the observation as "last action".
        self.action_late = 1 + delay_steps + section["obs_delay"]
        late = int(self.action_late.max())
        self.neutral = np.clip(np.zeros(len(self.low)), self.low, self.high)
        self.home_target = np.clip(section["home_target"], self.least, self.most)
        self.actions = deque([self.neutral] * late, late)
        self.commands = deque(maxlen=section["obs_delay"] + 1)
        self.targets = deque(maxlen=max(1, round(self.watchdog_s / self.step_s) - 1))
        self.rows, self.reason, self.steps = [], "", 0
        self.state, self.measured_s, self.start, self.ramp_from = {}, -np.inf, 0.0, None
        self.written_s = self.arrived_s = 0.0
        self._lock, self._done, self._signal = threading.RLock(), threading.Event(), None
        self._beat = time.monotonic()

    # ------------------------------------------------------------------------------- start and end
    def run(self):
        """Run until the end; return the reason."""
        self.policy.reset()
        empty = {k: np.zeros(x["shape"], x["dtype"]) for k, x in self.policy.inputs.items()}
        self.policy.act(empty)  # the first call of the session is slow
        self.policy.reset()
        signals, main = {}, threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if main else ():
            signals[number] = signal.signal(number, self._on_signal)
        self._beat = time.monotonic()
        watch = self._watch if self.robot.realtime else None
        (watchdog := threading.Thread(target=watch, daemon=True)).start()
        try:
            reason = self._run()
        except BaseException as error:  # also SystemExit of a driver
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._done.set()
            for number, handler in signals.items():
                signal.signal(number, handler)
        if self.reason:  # the watchdog has stopped the robot, perhaps during a write
            self._stop()
        self._finish(reason)
        watchdog.join(LOG_S)  # it may still write the log
        return self.reason

    def _finish(self, reason):
        """Stop the robot, then write the log; only the first reason counts."""
        taken = self._lock.acquire(timeout=self.step_s)  # ``write`` may hang with it
        try:
            if not self.reason:
                self.reason = reason
                self._stop()
                if self.log is not None:
                    self.write_log(self.log)
        finally:
            if taken:
                self._lock.release()

    def _stop(self):
        failure = ""
        for _ in range(3):
            try:
                self.robot.stop()
                return
            except BaseException as error:
                failure = f"stop() failed: {type(error).__name__}: {error}"
        self.reason = f"{self.reason}; {failure}"

    def _watch(self):
        """Stop the robot if a control step does not end."""
        while not self._done.wait(self.watchdog_s / 10):
            if time.monotonic() - self._beat > self.late_steps * 0.8 * self.watchdog_s:
                late_s = time.monotonic() - self._beat
                self._finish(f"watchdog: read, write and the policy take {late_s:.3g} s or more")
                return

    def _on_signal(self, number, frame):
        self._signal = signal.Signals(number).name

    def write_log(self, path):
        """Write the rows and the reason as an npz file that --compare reads."""
        keys = set.intersection(*map(set, self.rows)) if self.rows else ()
        arrays: dict[str, Any] = {key: np.stack([row[key] for row in self.rows]) for key in keys}
        with open(path, "wb") as file:
            np.savez_compressed(file, reason=np.array(self.reason), **arrays)

    # -------------------------------------------------------------------------------- control steps
    def _run(self):
        """Run control steps; return the reason of the end."""
        robot, tick = self.robot, self.robot.now()
        self.start = before = tick
        while True:
            self._beat, now = time.monotonic(), robot.now()
            self.late = self.late + 1 if now - before > 0.8 * self.watchdog_s else 0
            if self.late:
                print(f"late: the last control step took {now - before:.3g} s", file=sys.stderr)
            if self.late >= self.late_steps:
                return f"watchdog: {self.late} control steps in a row were late"
            before = now
            reason = self._step(now) or self.reason
            if reason:
                return reason
            if self.max_steps is not None and self.steps >= self.max_steps:
                return f"finished after {self.steps * self.step_s:g} s"
            tick = max(tick + self.step_s, robot.now())
            robot.sleep(max(0.0, tick - robot.now()))

    def _step(self, now):
        """Execute one control step; return why the loop must end, else ""."""
        if self._signal:
            return f"signal {self._signal}"
        if self.robot.realtime and sys.stdin is not None and sys.stdin.isatty():
            if select.select([sys.stdin], [], [], 0)[0]:
                return "key"
        before_s, measured = self.arrived_s, self.robot.read()
        fresh = measured is not None and measured["time_s"] > self.measured_s
        if fresh:
            problem = self._take(measured, now)
            if problem:
                return problem
        if not self.state:
            return "" if now - self.start < START_S else f"no measurement in {START_S:g} s"
        # The next step is one step later, so the loop ends now if that would be too late.
        limit = self.watchdog_s - self.step_s
        old = now - self.measured_s > limit
        self.stale = 0 if fresh and not old else self.stale + 1
        if old and self.stale >= self.late_steps:
            return f"watchdog: the newest measurement is {now - self.measured_s:.3g} s old"
        problem = self._emergency()
        if problem:
            return problem
        position = self.moves @ self.state["joint_positions"]
        velocity = self.moves @ self.state["joint_velocities"]
        if self.ramp_from is None:
            self.ramp_from, self.start = position, now
            self.written_s = self.arrived_s = now
        share = (now - self.start) / self.ramp_s if self.ramp_s else 1.0
        if share < 1 - 1e-9:
            target = self.ramp_from + share * (self.home_target - self.ramp_from)
            action, observation = self.neutral, None
        else:
            action, observation = self._act(fresh)
            target = np.clip(self.offset + self.scale * action, self.least, self.most)
        if self.protect:
            # |kp (target - position) - kd velocity| <= force
            middle, reach = position + self.kd / self.kp * velocity, self.force / self.kp
            target = np.clip(target, middle - reach, middle + reach)
        with self._lock:
            if self.reason:  # the watchdog has stopped the robot
                return self.reason
            written = self.robot.write(target, self.kp, self.kd) is not False
        if written:
            self.written_s = now
        if "target" not in self.state:
            self.arrived_s = self.measured_s
        self.targets.append((now, target))
        self._record(now, fresh, action, observation, target, written, position, velocity)
        lost = max(now - self.written_s, self.measured_s - self.arrived_s)
        self.unsent = 0 if written and self.arrived_s > before_s else self.unsent + 1
        if lost > limit and self.unsent >= self.late_steps:
            return f"watchdog: targets are lost for {lost:.3g} s"
        return ""

    def _take(self, measured, now):
        """Store a measurement as the state that ``observe`` reads; return what is wrong with it."""
        state = {k: np.asarray(x, float) for k, x in measured.items() if k != "time_s"}
        sizes = {"joint_positions": len(self.section["joints"]), "quaternion": 4}
        sizes.update(joint_velocities=sizes["joint_positions"], angular_velocity=3, velocity=3)
        sizes.update(command=len(self.command), target=len(self.offset))
        if missing := [key for key in self.section["reads"] if key not in state]:
            hint = "; estimate it, no robot measures it" if missing[0] == "velocity" else ""
            return f"read() returns no {missing[0]!r}, which the policy observes{hint}"
        for key, x in state.items():
            if key in sizes and x.shape != (sizes[key],):
                return f"read(): {key} has shape {x.shape}, not ({sizes[key]},)"
            if not np.isfinite(x).all():
                return f"read(): {key}[{int(np.flatnonzero(~np.isfinite(x))[0])}] is not finite"
        if measured["time_s"] > now + self.step_s:
            return f"read(): time_s is {measured['time_s'] - now:.3g} s later than now()"
        if "quaternion" in state:
            if abs(np.square(state["quaternion"]).sum() - 1) > 0.1:
                return "read(): the quaternion has not the length 1"
            state["gravity"] = gravity(state["quaternion"])
        for sent_s, target in self.targets if "target" in state else ():
            if np.abs(target - state["target"]).max() < 1e-5:
                self.arrived_s = max(self.arrived_s, sent_s)
        self.state, self.measured_s = state, measured["time_s"]
        return ""

    def _emergency(self):
        """Return why the robot must stop, else ""."""
        gravity = self.state.get("gravity")
        if gravity is not None and gravity[2] > -np.cos(np.deg2rad(MAX_TILT_DEG)):
            return f"tilt: {np.rad2deg(np.arccos(np.clip(-gravity[2], -1, 1))):.0f} degrees"
        speed = np.abs(self.state["joint_velocities"]) / self.section["velocity_limit"]
        i = int(speed.argmax())
        if self.protect and speed[i] > 1:
            value = self.state["joint_velocities"][i]
            return f"joint velocity: {self.section['joints'][i]} {value:.3g} rad/s"
        return ""

    def _act(self, fresh):
        """Return the clamped action and the observation.

        A lost measurement is replaced by the one before, as ``env.realism.obs_dropout`` does.
        Command and last action in the observation are as late as they were in the training.
        """
        is_new = fresh or not self.commands  # the state has the delayed command of the last step
        newest = self.state.get("command", self.command) if is_new else self.commands[-1]
        self.commands.append(newest)
        self.state["command"] = self.commands[0]
        executed = [self.actions[-late][i] for i, late in enumerate(self.action_late)]
        self.state["last_action"] = np.array(executed)
        if self.section["phase_hz"] is not None:
            late_s = max(0, self.steps - self.section["obs_delay"]) * self.step_s
            angle = 2 * np.pi * self.section["phase_hz"] * late_s
            self.state["phase"] = np.array([np.cos(angle), np.sin(angle)])
        observation = self.observe(self.state)
        action = np.asarray(self.policy.act(observation), float)
        action = np.clip(action, self.low, self.high)
        if self.rate_limit is not None:
            before, limit = self.actions[-1], np.array(self.rate_limit)
            action = np.clip(action, before - limit, before + limit)
        self.actions.append(action)
        self.steps += 1
        return action, observation

    def _record(self, now, fresh, action, observation, target, written, position, velocity):
        """Append a row of the log."""
        row = {"time_s": now, "measured_s": self.measured_s, "action": action, "target": target}
        row.update(fresh=fresh, late=self.late > 0, written=written)
        row["phase"] = RAMP if observation is None else POLICY
        row["torque"] = self.kp * (target - position) - self.kd * velocity
        initial = {"command": self.command, "last_action": self.neutral, "phase": [0, 0]}
        row.update({f"state/{k}": x for k, x in {**initial, **self.state}.items()})
        ((name, spec),) = self.policy.inputs.items()
        empty = np.zeros(spec["shape"], spec["dtype"])
        row[f"observation/{name}"] = empty if observation is None else observation
        self.rows.append({key: np.asarray(x) for key, x in row.items()})


def robot_section(info):
    """Return the section "robot" of policy.json. Raises RobotError where there is none."""
    if not info.get("robot"):
        raise RobotError(
            f"policy.json of {info['task']} describes no robot: --mujoco and --loop"
            " need a task of embodied_ppo whose control is offset + scale · action, with one array"
            " of observations and one action in a step, exported in format 2"
        )
    return info["robot"]


def action_bounds(action):
    """Return the lowest and highest numbers of an output of policy.json, [A] each."""
    bounds = (("low", -np.inf), ("high", np.inf))
    return [np.array([free if x is None else x for x in action[k]]) for k, free in bounds]


def gravity(quaternion):
    """Return the direction of gravity, [3], in a frame with this orientation in the world."""
    w, x, y, z = quaternion  # minus the third row of the rotation matrix
    return np.array([2 * (w * y - x * z), -2 * (y * z + w * x), 2 * (x * x + y * y) - 1])


def run(policy, args):
    """Run --mujoco or --loop of run_policy.py; return the findings.

    Raises:
        RobotError, NotImplementedError: The bundle, a file or an option is not suitable.
    """
    load, section = sys.modules[type(policy).__module__].load_file, robot_section(policy.info)
    observe = load(policy.folder / "observation.py").observe
    if not policy.info["observation_parts"]:  # a stub refuses at once
        observe({k: np.zeros(max(4, len(section["joints"]))) for k in section["reads"]})
    if args.log:
        Path(args.log).touch()  # a wrong path is refused before the robot moves
    common = {"command": args.command, "seconds": args.seconds, "log": args.log}
    if args.mujoco is not None:
        scene = args.mujoco or policy.folder / "scene" / "scene.xml"
        return load(policy.folder / "mujoco_robot.py").simulate(policy, observe, scene, **common)
    module = load(Path(args.loop))
    classes = [x for x in vars(module).values() if isinstance(x, type) and issubclass(x, Robot)]
    own = [x for x in classes if x.__module__ == module.__name__]
    if len(own) != 1:
        raise RobotError(f"--loop {args.loop}: write one subclass of Robot; it has {len(own)}")
    common.update(ramp_s=args.ramp, watchdog_s=args.watchdog, late_steps=args.late_steps)
    reason = RobotLoop(policy, own[0](policy.info), observe, **common).run()
    if not reason.startswith(("finished", "signal", "key")):
        return [f"stopped: {reason}"]
    print(reason)
    return []


def compare_log(policy, log, tolerance):
    """Return what differs in a log from what its own measurements imply, for --compare.

    Observations are computed again from the measurements by observation.py, and actions from the
    observations. Besides, the numbers of the observations must be in their ranges in the trace,
    widened by their extent.
    """
    run_policy, section = sys.modules[type(policy).__module__], robot_section(policy.info)
    rows, limits, used = run_policy.rows, run_policy.limits, log["phase"] == POLICY
    if used.sum() < 2:
        raise RobotError("recording: the log has no two steps of the policy")
    log = {k: x[used] for k, x in log.items() if x.ndim}
    findings = policy._check_times(log["time_s"])
    ((name, spec),), ((output, action),) = policy.inputs.items(), policy.actions.items()
    key, episode = f"observation/{name}", np.zeros(used.sum(), int)
    state = {k[6:]: x for k, x in log.items() if k.startswith("state/")}
    observe = run_policy.load_file(policy.folder / "observation.py").observe
    implied = rows([observe({k: x[t] for k, x in state.items()}) for t in range(len(episode))])
    arrays = {name: log[key].astype(spec["dtype"])}
    bounds = action_bounds(action)
    expected = np.clip(rows(policy.outputs_of_trace(arrays, episode)[output]), *bounds)
    actual = rows(log["action"])
    if section["action_rate_limit"] is not None:
        before = np.concatenate([np.clip(0 * actual[:1], *bounds), actual[:-1]])
        limit = np.array(section["action_rate_limit"])
        expected = np.clip(expected, before - limit, before + limit)
    pairs = [(key, spec, implied, rows(log[key])), ("action", action, expected, actual)]
    for source, described, expected, actual in pairs:
        limit = np.maximum(limits(expected, tolerance), 1e-5)
        names = run_policy.dimension_names(described)
        findings += run_policy.describe_differences(source, names, expected, actual, limit, episode)
    trace, actual = rows(policy.golden[key]), rows(log[key])
    low, high, names = trace.min(0), trace.max(0), run_policy.dimension_names(spec)
    extent = np.maximum(high - low, 1e-3)
    outside = ((actual < low - extent) | (actual > high + extent)).mean(0)
    return findings + [
        f"{key}: {names[i]} is outside of its range in the trace in {outside[i]:.0%} of the rows:"
        f" {actual[:, i].min():.3g} to {actual[:, i].max():.3g}; there it is {low[i]:.3g} to"
        f" {high[i]:.3g}"
        for i in np.flatnonzero(outside > RANGE_SHARE)
    ]
