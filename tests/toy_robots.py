"""A quadruped, with servos on two legs and torque motors on the others, and a cube; a drone."""

from __future__ import annotations


def leg(name: str, x: float, y: float) -> str:
    return f"""
      <body name="{name}_hip" pos="{x} {y} 0">
        <joint name="{name}_roll" axis="1 0 0" range="-.5 .5"/>
        <geom size=".03" mass=".2" contype="0" conaffinity="0"/>
        <body name="{name}_shank">
          <joint name="{name}_pitch" axis="0 1 0" range="-1 1" actuatorfrcrange="-20 20"/>
          <geom type="capsule" fromto="0 0 0 0 0 -.2" size=".02" mass=".2"/>
          <geom name="{name}_foot" pos="0 0 -.2" size=".03" mass=".1"/>
        </body>
      </body>"""


LEGS = {"FL": (0.2, 0.15), "FR": (0.2, -0.15), "RL": (-0.2, 0.15), "RR": (-0.2, -0.15)}

QUADRUPED = f"""<mujoco model="quadruped">
  <compiler angle="radian"/><option timestep="0.004"/>
  <default><joint damping=".5" armature=".01"/><position kp="40" kv="1"/></default>
  <worldbody>
    <geom name="floor" type="plane" size="5 5 .1"/>
    <body name="cube" pos="1 0 .05"><freejoint/><geom type="box" size=".05 .05 .05"/></body>
    <body name="trunk" pos="0 0 .4">
      <freejoint/>
      <camera name="head" pos=".2 0 0" xyaxes="0 -1 0 0 0 1"/>
      <site name="imu" pos="0 0 .05" euler="0 0 1.5707963"/>
      <geom type="box" size=".2 .1 .05" mass="4"/>
      {"".join(leg(name, *place) for name, place in LEGS.items())}
    </body>
  </worldbody>
  <actuator>
    {"".join(f'<position name="{n}_roll" joint="{n}_roll" forcerange="-10 10"/>' for n in LEGS)}
    {"".join(f'<position joint="{n}_pitch"/>' for n in ("FL", "FR"))}
    {"".join(f'<motor joint="{n}_pitch" gear="4"/>' for n in ("RL", "RR"))}
  </actuator>
  <keyframe>
    <key name="other"/>
    <key name="home" qpos="1 0 .05 1 0 0 0  0 0 .3 1 0 0 0  .1 0 -.1 0 .1 0 -.1 0"
      ctrl=".1 -.1 .1 -.1 0 0 0 0"/>
  </keyframe>
</mujoco>"""

DRONE = """<mujoco model="drone"><option timestep="0.004"/>
  <worldbody><geom name="floor" type="plane" size="5 5 .1"/>
    <body name="drone" pos="0 0 .5"><freejoint/><geom type="box" size=".1 .1 .03" mass="1"/>
      <site name="imu"/>
      <site name="m1" pos=".1 .1 0"/><site name="m2" pos=".1 -.1 0"/>
      <site name="m3" pos="-.1 -.1 0"/><site name="m4" pos="-.1 .1 0"/></body></worldbody>
  <actuator>
    <motor name="t1" site="m1" gear="0 0 1 0 0 -.02" ctrlrange="0 10"/>
    <motor name="t2" site="m2" gear="0 0 1 0 0 .02" ctrlrange="0 10"/>
    <motor name="t3" site="m3" gear="0 0 1 0 0 -.02" ctrlrange="0 10"/>
    <motor name="t4" site="m4" gear="0 0 1 0 0 .02" ctrlrange="0 10"/>
  </actuator>
  <keyframe>
    <key name="hover" qpos="0 0 .5 1 0 0 0" ctrl="2.4525 2.4525 2.4525 2.4525"/>
  </keyframe></mujoco>"""
"""Four motors hold 1 kg."""
