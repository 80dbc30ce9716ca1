"""Ranges of actuators, compared with MuJoCo on models with changed parameters."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch
from toy_robots import QUADRUPED

from embodied_envs.base.errors import EnvError
from embodied_envs.physics.domain_randomization import Randomization

ARM = """<mujoco>
  <worldbody><body>
    <joint name="shoulder" axis="0 1 0"/><geom type="capsule" size=".05" fromto="0 0 0 0 0 -.5"/>
    <body pos="0 0 -.5"><joint name="elbow" axis="0 1 0" {limit}/>
      <geom type="capsule" size=".05" fromto="0 0 0 0 0 -.5"/>
      <body pos="0 0 -.5"><joint name="tip" axis="0 1 0"/><geom size=".05"/></body></body>
  </body></worldbody>
  <actuator>
    <position joint="shoulder" kp="40" kv="2" forcerange="-5 5"/>
    <motor joint="elbow" gear="30"/>
    <velocity joint="tip" kv="3" gear="2"/>
    {more}
  </actuator>
</mujoco>"""

MUSCLE = '<muscle joint="elbow" lengthrange="-2 2" force="9"/>'


def arm(limit: str = "", more: str = "") -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(ARM.format(limit=limit, more=more))


def joint_torques(model: mujoco.MjModel, ctrl: list[float]) -> np.ndarray:
    """Return qfrc_actuator [nv] at a fixed state, N m."""
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:], data.ctrl[: len(ctrl)] = [0.1, -0.2, 0.3], [0.4, 0.5, -0.6], ctrl
    mujoco.mj_forward(model, data)
    return np.array(data.qfrc_actuator)


def changed(model: mujoco.MjModel, u: list[float], **ranges: tuple[float, float]) -> mujoco.MjModel:
    """Return the model that these random numbers draw."""
    sampled = Randomization(model, ranges).sample(torch.tensor([u], dtype=torch.float64))
    other = mujoco.MjModel.from_xml_string(ARM.format(limit="", more=""))
    other.jnt_actfrclimited[:] = model.jnt_actfrclimited
    for name, value in sampled.items():
        getattr(other, name)[...] = value[0].numpy()
    return other


def test_stiffness_and_damping_of_servos_and_joints() -> None:
    # u = 0, 1/2, 1 of [0.5, 1.5]: the factors are 0.5, 1 and 1.5.
    model, u = arm(), [0.0, 0.5, 1.0]
    kp, kd = (changed(model, u, **{name: (0.5, 1.5)}) for name in ("kp", "kd"))
    ctrl = [0.12, 0.1, 0.7]
    # 20 (0.12 - 0.1) - 2 · 0.4; 30 · 0.1; the gain and not the damping of a velocity servo:
    # 2 (4.5 · 0.7 - 3 · 2 · -0.6)
    assert joint_torques(kp, ctrl) == pytest.approx([-0.4, 3.0, 13.5])
    # 40 · 0.02 - 1 · 0.4; 2 (3 · 0.7 - 4.5 · 2 · -0.6)
    assert joint_torques(kd, ctrl) == pytest.approx([0.4, 3.0, 15.0])
    model.dof_armature[:], model.dof_frictionloss[:] = 0.1, 0.2
    for name, field in (("armature", "dof_armature"), ("friction_loss", "dof_frictionloss")):
        drawn = Randomization(model, {name: (0.5, 1.5)}).sample(torch.tensor([u]).double())
        assert drawn[field][0].tolist() == pytest.approx(
            getattr(model, field)[0] * (np.array(u) + 0.5)
        )
    offset = {"joint_offset": (0.1, 0.1), "kp": (2.0, 2.0)}
    both = changed(model, [0.0] * 6, **offset)
    assert both.actuator_biasprm[0, :2].tolist() == pytest.approx([-8, -80]), "80 · 0.1"


def test_payload_and_centre_of_mass_of_a_base() -> None:
    model = mujoco.MjModel.from_xml_string(QUADRUPED)
    random = Randomization(model, {"payload": (-1.0, 2.0), "com": (-0.05, 0.05)})
    drawn = random.sample(torch.tensor([[0.5, 0.0, 0.5, 1.0]], dtype=torch.float64))
    trunk = model.body("trunk").id
    mass, centre = model.body_mass.copy(), model.body_ipos.copy()
    mass[trunk] += 0.5
    centre[trunk] += [-0.05, 0, 0.05]
    assert drawn["body_mass"][0].tolist() == pytest.approx(mass.tolist())
    assert drawn["body_ipos"][0].numpy() == pytest.approx(centre)
    with pytest.raises(EnvError, match="no floating base"):
        Randomization(arm(), {"payload": (0.0, 1.0)})
    with pytest.raises(EnvError, match="the base has"):
        Randomization(model, {"payload": (-100.0, 1.0)})
    with pytest.raises(EnvError, match="all that it scales is 0"):
        Randomization(model, {"friction_loss": (0.5, 2.0)})
    # The visible colour of a geom with a material is shifted.
    red = '<asset><material name="red" rgba="1 0 0 1"/></asset>'
    geom = '<worldbody><geom size="1" material="red"/></worldbody>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco>{red}{geom}</mujoco>")
    sampled = Randomization(model, {"colour": (-0.1, -0.1)}).sample(torch.zeros(1, 6))
    assert sampled["geom_rgba"][0, 0].tolist() == pytest.approx([0.9, 0, 0, 1])
    # The friction of a contact pair is scaled by the larger factor of its geoms: 2 · 1.5.
    geoms = '<worldbody><geom name="a" size="1"/><geom name="b" size="1"/></worldbody>'
    pair = '<contact><pair geom1="a" geom2="b" friction="2 2 .1"/></contact>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco>{geoms}{pair}</mujoco>")
    drawn = Randomization(model, {"friction": (0.5, 1.5)}).sample(torch.tensor([[0.0, 1.0]]))
    assert drawn["pair_friction"][0, 0, :3].tolist() == pytest.approx([3, 3, 0.1])


@pytest.mark.parametrize("target", [0.15, 3.0])  # within the servo's limit of 5 N m, and beyond
@pytest.mark.parametrize("limit", ["", 'actuatorfrcrange="-6 6"'])
def test_motor_strength_scales_every_torque(target: float, limit: str) -> None:
    # u = (0, 1/2, 1) of [0.5, 1.5]: the factors are 0.5, 1 and 1.5.
    model, ctrl = arm(limit), [target, 0.25, 0.7]
    strong = changed(model, [0.0, 0.5, 1.0], motor_strength=(0.5, 1.5))
    before, after = joint_torques(model, ctrl), joint_torques(strong, ctrl)
    # 40 (0.15 - 0.1) - 2 · 0.4 = 1.2 N m, or the limit; 30 · 0.25 = 7.5, or the joint's limit of 6;
    # 2 · 3 (0.7 - 2 · -0.6) = 11.4 N m.
    expected = [1.2 if target < 1 else 5.0, 6.0 if limit else 7.5, 11.4]
    np.testing.assert_allclose(before, expected, rtol=1e-12)
    np.testing.assert_allclose(after, before * [0.5, 1.0, 1.5], rtol=1e-12)


def test_motor_strength_of_a_joint_scales_its_limit_with_its_actuator() -> None:
    weak = changed(arm('actuatorfrcrange="-6 6"'), [0.5, 0.0, 0.5], motor_strength=(0.5, 1.5))
    assert joint_torques(weak, [0.0, 0.25, 0.0])[1] == pytest.approx(3.0, rel=1e-12)  # of 7.5


def test_gains_and_motor_strength_multiply_the_stiffness_of_a_servo() -> None:
    text = ARM.format(limit="", more="").replace('<motor joint="elbow" gear="30"/>', "")
    model = mujoco.MjModel.from_xml_string(text)
    sampled = Randomization(model, {"gains": (2, 2), "motor_strength": (0.75, 0.75)}).sample(
        torch.zeros(1, 4, dtype=torch.float64)
    )
    assert sampled["actuator_gainprm"][0, 0, 0] == 40 * 2 * 0.75
    assert sampled["actuator_forcerange"][0, 0].tolist() == [-3.75, 3.75]


@pytest.mark.parametrize(
    ("model", "ranges", "message"),
    [
        (
            {"more": '<motor joint="elbow"/>', "limit": 'actuatorfrcrange="-6 6"'},
            {"motor_strength": (1, 2)},
            "actuatorfrcrange.*elbow",
        ),
        ({}, {"motor_strength": (-1, 2)}, "-1"),
        *(({"more": MUSCLE}, {name: (1, 2)}, "as a muscle") for name in ("gains", "kp", "kd")),
    ],
)
def test_refusals_are_one_line(
    model: dict[str, str], ranges: dict[str, tuple[float, float]], message: str
) -> None:
    with pytest.raises(EnvError, match=message) as error:
        Randomization(arm(**model), ranges)
    assert "\n" not in str(error.value) and f"env.ranges.{next(iter(ranges))}=" in str(error.value)
