"""Example of a robot: ros2_control with rclpy. Not tested on a robot by this project.

Written for ROS 2 Jazzy (ros2_controllers 4). It needs a joint_state_broadcaster, an
imu_sensor_broadcaster and a forward_command_controller for positions whose joints are in the order
of the actuators in policy.json. kp and kd are parameters of your hardware interface: set them to
those of policy.json.

    python run_policy.py --loop robot_ros2.py --command 0.3 0 0
"""

# pyright: reportMissingImports=false
import threading

import rclpy
from controller_manager_msgs.srv import SwitchController
from rclpy.qos import qos_profile_sensor_data
from rclpy.signals import SignalHandlerOptions
from robot_loop import Robot
from sensor_msgs.msg import Imu, JointState
from std_msgs.msg import Float64MultiArray

CONTROLLER, IMU = "forward_position_controller", "/imu_sensor_broadcaster/imu"


class Ros2Robot(Robot):
    def __init__(self, info):
        super().__init__(info)
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)  # Ctrl-C ends the loop
        self.node, self.joints, self.imu = rclpy.create_node("embodied_ppo_policy"), None, None
        qos = qos_profile_sensor_data
        self.node.create_subscription(JointState, "/joint_states", self._on_joints, qos)
        self.node.create_subscription(Imu, IMU, self._on_imu, qos)
        topic = f"/{CONTROLLER}/commands"
        self.publisher = self.node.create_publisher(Float64MultiArray, topic, 1)
        service = "/controller_manager/switch_controller"
        self.switch = self.node.create_client(SwitchController, service)
        threading.Thread(target=rclpy.spin, args=(self.node,), daemon=True).start()

    def read(self):
        if self.joints is None or self.imu is None:
            return None
        (joints_s, joints), (imu_s, imu) = self.joints, self.imu
        index = [joints.name.index(name) for name in self.info["robot"]["joints"]]
        q, w = imu.orientation, imu.angular_velocity
        return {
            "time_s": min(joints_s, imu_s),  # the older one
            "joint_positions": [joints.position[i] for i in index],
            "joint_velocities": [joints.velocity[i] for i in index],
            "quaternion": [q.w, q.x, q.y, q.z],
            "angular_velocity": [w.x, w.y, w.z],
            # "velocity": your estimate, if info["robot"]["not_measured"] names it
        }

    def write(self, target, kp, kd):
        self.publisher.publish(Float64MultiArray(data=[float(x) for x in target]))

    def stop(self):
        # The hardware interface must damp the joints where no controller commands them.
        request = SwitchController.Request()
        request.deactivate_controllers = [CONTROLLER]
        request.strictness = SwitchController.Request.BEST_EFFORT
        future, end = self.switch.call_async(request), self.now() + 0.5
        while not future.done() and self.now() < end:  # the program may end then
            self.sleep(0.01)

    def _on_joints(self, message):
        self.joints = (self.now(), message)

    def _on_imu(self, message):
        self.imu = (self.now(), message)
