"""Model of Tabletop: the table, a gantry gripper, four blocks and four zones. Sizes in m."""

from __future__ import annotations

from embodied_envs.tasks.tabletop_language import COLOURS

HALF_EDGE = 0.022
"""Half the edge of a block: the height of its centre on the table."""
ZONE_RADIUS = 0.05
FINGER_OPEN = 0.037
"""Distance of each finger from the middle of the open gripper."""
COLOUR_VALUES = {
    "red": "0.9 0.1 0.1",
    "green": "0.1 0.7 0.15",
    "blue": "0.1 0.25 0.95",
    "yellow": "1 0.85 0.1",
}


DISTRACTORS = """<geom type="sphere" size="0.02" pos="0.2 -0.27 0.02" rgba="0.6 0.2 0.7 1"
        contype="0" conaffinity="0"/>
    <geom type="cylinder" size="0.018 0.03" pos="0.2 0.27 0.03" rgba="0.1 0.65 0.65 1"
        contype="0" conaffinity="0"/>
    <geom size="0.03 0.015 0.012" pos="-0.2 0.27 0.012" rgba="0.95 0.5 0.1 1"
        contype="0" conaffinity="0"/>"""
"""Objects beside the grid of cells that no sentence names and nothing touches."""


def mjcf(distractors: bool = False) -> str:
    """Return the model, with or without DISTRACTORS.

    qpos is x, y, z of the gripper, its left and right finger, then 7 numbers per block; qvel is 5,
    then 6 per block. The mocap bodies are the zones. The gripper's joints are in world coordinates,
    because the origin of its body is the point between the fingertips.
    """
    rgba = {name: f"{value} 1" for name, value in COLOUR_VALUES.items()}
    blocks = "".join(
        f"""<body name="{c} block" pos="{0.1 * i} 0 {HALF_EDGE}">
        <freejoint/><geom class="block" rgba="{rgba[c]}"/></body>"""
        for i, c in enumerate(COLOURS)
    )
    zones = "".join(
        f"""<body name="{c} zone" mocap="true" pos="{0.1 * i} 0.1 0">
        <geom class="zone" rgba="{rgba[c]}"/></body>"""
        for i, c in enumerate(COLOURS)
    )
    fingers = "".join(
        f"""<body name="{side} finger">
        <joint name="{side}" axis="0 {sign} 0" range="-0.001 {FINGER_OPEN}" limited="true"
            armature="0.5"/>
        <geom class="hand" size="0.018 0.008 0.025" pos="0 {sign * 0.008} 0.013" mass="0.1"/>
        </body>"""
        for side, sign in (("left", 1), ("right", -1))
    )
    return f"""<mujoco model="tabletop">
    <option timestep="0.0166667" integrator="implicitfast" cone="elliptic" iterations="10"
        ls_iterations="10"/>
    <visual><quality offsamples="0" shadowsize="0" numslices="20" numstacks="2" numquads="1"/>
        <map znear="0.1" zfar="10"/>
        <headlight ambient="0.45 0.45 0.45" diffuse="0.3 0.3 0.3" specular="0 0 0"/></visual>
    <default>
        <geom type="box"/>
        <joint type="slide"/>
        <position dampratio="1"/>
        <default class="block">
            <geom size="{HALF_EDGE} {HALF_EDGE} {HALF_EDGE}" mass="0.1" contype="2" conaffinity="7"
                friction="0.7 0.01 0.001"/></default>
        <default class="hand">
            <geom contype="4" conaffinity="0" condim="4" priority="1" friction="1.5 0.05 0.001"
                solimp="0.95 0.99 0.001" rgba="0.25 0.25 0.28 1"/></default>
        <default class="zone">
            <geom type="cylinder" size="{ZONE_RADIUS} 0.0005" contype="0" conaffinity="0"/>
        </default>
    </default>
    <worldbody>
        <light pos="-0.3 0.3 1.5" dir="0.2 -0.2 -1" directional="true" castshadow="false"
            diffuse="0.4 0.4 0.4"/>
        <geom name="table" type="plane" size="1 1 0.1" contype="1" conaffinity="0"
            rgba="0.7 0.67 0.63 1"/>
        <camera name="front" pos="-0.74 0 1.05" xyaxes="0 -1 0 0.8 0 0.6" fovy="27"/>
        <body name="hand" gravcomp="1">
            <joint name="x" axis="1 0 0"/><joint name="y" axis="0 1 0"/>
            <joint name="z" axis="0 0 1"/>
            <geom class="hand" size="0.012 0.054 0.006" pos="0 0 0.044" mass="1"/>
            {fingers}
        </body>
        {blocks}{zones}{DISTRACTORS if distractors else ""}
    </worldbody>
    <actuator>
        <position joint="x" kp="1200"/><position joint="y" kp="1200"/>
        <position joint="z" kp="1200"/>
        <position joint="left" kp="300"/><position joint="right" kp="300"/>
    </actuator>
    </mujoco>"""
