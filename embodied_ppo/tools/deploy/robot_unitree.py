"""Example of a robot: a Unitree Go2 or B2 at low level. Not tested on the robot by this project.

Written for unitree_sdk2py 1.0.1 (github.com/unitreerobotics/unitree_sdk2_python, 37116c5). Let the
robot lie down or hang, since its own controller is switched off; change INTERFACE.

    python run_policy.py --loop robot_unitree.py --command 0.3 0 0
"""

# pyright: reportMissingImports=false
import time

from robot_loop import Robot
from unitree_sdk2py.comm.motion_switcher.motion_switcher_client import MotionSwitcherClient
from unitree_sdk2py.core.channel import (
    ChannelFactoryInitialize,
    ChannelPublisher,
    ChannelSubscriber,
)
from unitree_sdk2py.idl.default import unitree_go_msg_dds__LowCmd_
from unitree_sdk2py.idl.unitree_go.msg.dds_ import LowCmd_, LowState_
from unitree_sdk2py.utils.crc import CRC
from unitree_sdk2py.utils.thread import RecurrentThread

INTERFACE = "eth0"
LEGS, JOINTS = ("FR", "FL", "RR", "RL"), ("hip", "thigh", "calf")
MOTORS = {f"{leg}_{j}_joint": 3 * i + k for i, leg in enumerate(LEGS) for k, j in enumerate(JOINTS)}


class UnitreeRobot(Robot):
    def __init__(self, info):
        super().__init__(info)
        self.read_motors = [MOTORS[name] for name in info["robot"]["joints"]]
        self.write_motors = [MOTORS[actuator["joint"]] for actuator in info["actuators"]]
        ChannelFactoryInitialize(0, INTERFACE)
        switcher = MotionSwitcherClient()
        switcher.SetTimeout(5.0)
        switcher.Init()
        while (switcher.CheckMode()[1] or {"name": "unknown"})["name"]:
            switcher.ReleaseMode()  # two senders of low commands shake the robot
            time.sleep(1)
        self.state, self.state_s, self.crc, self.sent = None, 0.0, CRC(), True
        self.cmd = unitree_go_msg_dds__LowCmd_()
        self.cmd.head[0], self.cmd.head[1], self.cmd.level_flag = 0xFE, 0xEF, 0xFF
        self._set(range(20), [0] * 20, [0] * 20, [0] * 20)
        self.publisher = ChannelPublisher("rt/lowcmd", LowCmd_)
        self.publisher.Init()
        self.subscriber = ChannelSubscriber("rt/lowstate", LowState_)
        self.subscriber.Init(self._receive, 10)
        self.thread = RecurrentThread(interval=0.002, target=self._send, name="lowcmd")
        self.thread.Start()  # the motors expect commands at 500 Hz

    def read(self):
        state, motors = self.state, self.read_motors
        if state is None:
            return None
        return {
            "time_s": self.state_s,
            "joint_positions": [state.motor_state[i].q for i in motors],
            "joint_velocities": [state.motor_state[i].dq for i in motors],
            "quaternion": state.imu_state.quaternion,  # w x y z
            "angular_velocity": state.imu_state.gyroscope,
            # "velocity": your estimate, if info["robot"]["not_measured"] names it
        }

    def write(self, target, kp, kd):
        self._set(self.write_motors, target, kp, kd)
        return self.sent

    def stop(self):
        motors = self.write_motors
        self._set(motors, [0] * len(motors), [0] * len(motors), [3] * len(motors))  # damping
        self._send()  # at once, because the program may end now

    def _receive(self, message):
        self.state, self.state_s = message, self.now()

    def _set(self, motors, target, kp, kd):
        for i, q, p, d in zip(motors, target, kp, kd):
            motor = self.cmd.motor_cmd[i]
            motor.mode, motor.q, motor.dq, motor.tau = 0x01, float(q), 0.0, 0.0
            motor.kp, motor.kd = float(p), float(d)

    def _send(self):
        self.cmd.crc = self.crc.Crc(self.cmd)
        self.sent = self.publisher.Write(self.cmd)
