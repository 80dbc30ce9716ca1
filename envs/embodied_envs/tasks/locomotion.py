"""HalfCheetah, Hopper, Walker2d, Ant and Humanoid with the semantics of Gymnasium's v5
environments.

Models, formulas and constants are those of gymnasium.envs.mujoco.*_v5 (Towers et al. 2024);
tests/envs/physics/test_mujoco_env.py compares both step by step. As in Gymnasium, derived fields
(for example xpos) are those of the state one physics step ago (``stage``).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import gymnasium
import mujoco
import torch
from torch import Tensor

from embodied_envs.base.random import normal
from embodied_envs.robots.observation_parts import Part, describe
from embodied_envs.tasks.task import State, Task


class Locomotion(Task):
    """A body that runs along x.

    Reward = healthy + weight · x velocity - effort · |a|² (- contact cost).
    """

    # Model file in Gymnasium's assets.
    file: ClassVar[str]
    # Scale of the noise on the initial positions and velocities.
    scale: ClassVar[float]
    # Whether the noise on velocities is normal; all other noise is uniform in [-1, 1].
    normal_velocity: ClassVar[bool] = False
    # Factor of |a|² in the reward.
    effort: ClassVar[float]
    before = ("qpos",)
    stage = "none"

    def spec(self) -> mujoco.MjSpec:
        """Read Gymnasium's model file."""
        assets = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
        return mujoco.MjSpec.from_file(str(assets / self.file))

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Store sizes, the duration of a control step and the default pose."""
        self.nq, self.reset_noise = model.nq, model.nq + model.nv
        self.dt_s = float(model.opt.timestep) * self.decimation
        self.qpos0 = torch.tensor(model.qpos0, device=device, dtype=dtype)

    def speed(self, before: State, s: State) -> Tensor:
        """Return the mean x velocity during the control step, m/s, [N]."""
        return (s["qpos"][:, 0] - before["qpos"][:, 0]) / self.dt_s

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        """Return the default pose at rest plus noise."""
        positions, velocities = u[:, : self.nq], u[:, self.nq :]
        noise = normal(velocities) if self.normal_velocity else 2 * velocities - 1
        return {"qpos": self.qpos0 + self.scale * (2 * positions - 1), "qvel": self.scale * noise}


# --------------------------------------------------------------------------------- in the x-z plane
class Planar(Locomotion):
    """A body in the x-z plane. Observation: qpos without x, and qvel within ±``velocity_limit``.

    Privileged observation: qvel within ±``velocity_limit``, m/s and rad/s.
    """

    velocity_limit: ClassVar[float] = math.inf

    def __init__(self, velocities: bool = True) -> None:
        """Create the task.

        Args:
            velocities: Whether observations contain qvel. Without it a policy needs memory
                (``model.history``, ``model.recurrent``).
        """
        self.velocities = velocities

    def observe(self, s: State) -> Tensor:
        positions = s["qpos"][:, 1:]
        return torch.cat([positions, self.privileged(s)], 1) if self.velocities else positions

    def observation_names(self, model: mujoco.MjModel) -> list[tuple[str, str | None]]:
        joints = tuple(model.joint(i).name for i in range(model.njnt))
        velocities = [Part("joint_velocities", joints)] if self.velocities else []
        return describe([Part("joint_positions", joints[1:]), *velocities], model)

    def privileged(self, s: State) -> Tensor:
        return s["qvel"].clamp(-self.velocity_limit, self.velocity_limit)


class HalfCheetah(Planar):
    """Observation [N, 17]: qpos without x, qvel. Reward: x velocity - 0.1·|a|². It never falls."""

    id, file, decimation = "HalfCheetah", "half_cheetah.xml", 5
    scale, normal_velocity, effort = 0.1, True, 0.1

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return self.speed(before, s) - self.effort * action.square().sum(1)


class Hopper(Planar):
    """Observation [N, 11]: qpos without x, qvel within ±10.

    Reward: 1 while upright + x velocity - 0.001·|a|².
    """

    id, file, decimation = "Hopper", "hopper.xml", 4
    scale, effort = 5e-3, 1e-3
    velocity_limit = 10.0

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return self.speed(before, s) - self.effort * action.square().sum(1) + ~self.terminated(s)

    def terminated(self, s: State) -> Tensor:
        z, angle = s["qpos"][:, 1], s["qpos"][:, 2]
        in_range = (s["qpos"][:, 2:].abs() < 100).all(1) & (s["qvel"].abs() < 100).all(1)
        return ~(in_range & (z > 0.7) & (angle.abs() < 0.2))


class Walker2d(Hopper):
    """Observation [N, 17]: as Hopper's. Reward: as Hopper's."""

    id, file = "Walker2d", "walker2d_v5.xml"

    def terminated(self, s: State) -> Tensor:
        z, angle = s["qpos"][:, 1], s["qpos"][:, 2]
        return ~((z > 0.8) & (z < 2.0) & (angle.abs() < 1.0))


# ----------------------------------------------------------------------------------------- in space
class Ant(Locomotion):
    """Observation [N, 105]: qpos without x and y, qvel, contact forces within ±1.

    The contact forces are those of every body except the world.

    Reward: 1 while upright + x velocity of the torso - 0.5·|a|² - 5e-4·|contact forces within ±1|².
    """

    id, file, decimation = "Ant", "ant.xml", 5
    scale, normal_velocity, effort = 0.1, True, 0.5
    fields, before, stage = ("xpos", "cfrc_ext"), ("xpos",), "forces"

    def observe(self, s: State) -> Tensor:
        contact_forces = s["cfrc_ext"][:, 1:].clamp(-1, 1).flatten(1)
        return torch.cat([s["qpos"][:, 2:], s["qvel"], contact_forces], 1)

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        forward = (s["xpos"][:, 1, 0] - before["xpos"][:, 1, 0]) / self.dt_s
        contact = s["cfrc_ext"].clamp(-1, 1).square().sum((1, 2))
        return forward - self.effort * action.square().sum(1) - 5e-4 * contact + ~self.terminated(s)

    def terminated(self, s: State) -> Tensor:
        # Gymnasium also ends an episode that is not finite; MujocoEnv truncates it.
        z = s["qpos"][:, 2]
        return ~((z >= 0.2) & (z <= 1.0))


class Humanoid(Locomotion):
    """Observation [N, 348]: qpos without x and y, qvel, cinert, cvel, actuator and contact forces.

    Reward: 5 while upright + 1.25·x velocity of the centre of mass - 0.1·|a|² - min(5e-7·|contact
    forces|², 10).
    """

    id, file, decimation = "Humanoid", "humanoid.xml", 5
    scale, effort = 1e-2, 0.1
    fields = ("xipos", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")
    before, stage = ("xipos",), "forces"

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        """Store also the share of each body in the mass."""
        super().bind(model, device, dtype)
        mass_share = model.body_mass / model.body_mass.sum()
        self.mass_share = torch.tensor(mass_share, device=device, dtype=dtype)

    def observe(self, s: State) -> Tensor:
        bodies = [s[name][:, 1:].flatten(1) for name in ("cinert", "cvel")]
        forces = [s["qfrc_actuator"][:, 6:], s["cfrc_ext"][:, 1:].flatten(1)]
        return torch.cat([s["qpos"][:, 2:], s["qvel"], *bodies, *forces], 1)

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        forward = (s["xipos"][:, :, 0] - before["xipos"][:, :, 0]) @ self.mass_share / self.dt_s
        contact = (5e-7 * s["cfrc_ext"].square().sum((1, 2))).clamp(max=10.0)
        cost = self.effort * action.square().sum(1) + contact
        return 1.25 * forward - cost + 5.0 * ~self.terminated(s)

    def terminated(self, s: State) -> Tensor:
        z = s["qpos"][:, 2]
        return ~((z > 1.0) & (z < 2.0))
