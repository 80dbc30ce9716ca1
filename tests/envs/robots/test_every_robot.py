"""Action 0 holds the home posture of every robot that EnvPool ships, and its picture shows it."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from toy_envs import make_world

from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.robots.robot_task import RobotTask
from embodied_envs.tasks import State
from embodied_envs.tasks.panda import asset_folders

# Ends of the paths of robots that are tested in every run.
QUICK = (
    "menagerie/unitree_go1/scene.xml",
    "vb/scene.xml",
    "menagerie/franka_emika_panda/scene.xml",
)
SECONDS = 2.0
# Least return of action 0 as a share of that of the home control.
SHARE = 0.9


def scenes() -> list[Path]:
    return sorted(file for folder in asset_folders() for file in folder.rglob("*scene*.xml"))


def parameters() -> list[object]:
    marks = [() if str(p).endswith(QUICK) else (pytest.mark.slow,) for p in scenes()]
    names = ["-".join(p.parts[p.parts.index("assets") + 2 :]) for p in scenes()]
    return [pytest.param(p, id=n, marks=m) for p, n, m in zip(scenes(), names, marks)]


class Stay(RobotTask):
    """The generated task: stay at home."""

    id, max_episode_steps = "Stay", 1000

    def reward_terms(
        self, before: State, s: State, action: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        home = 1 / (1 + 10 * self.distance_from_home(s))
        return {"home": home, "effort": -0.01 * self.effort(s)}

    def terminated(self, s: State) -> torch.Tensor:
        return self.out_of_range(s) | self.fallen(s)


class HomeControl(Stay):
    """The same with the actuators of the file, at the keyframe's control, whatever the action."""

    def spec(self) -> mujoco.MjSpec:
        spec, original = super().spec(), mujoco.MjSpec.from_file(str(self.mjcf))
        for ours, theirs in zip(spec.actuators, original.actuators, strict=True):
            for name in ("gainprm", "biasprm", "gaintype", "biastype", "gear", "ctrlrange"):
                setattr(ours, name, getattr(theirs, name))
            for name in ("forcerange", "ctrllimited", "forcelimited"):
                setattr(ours, name, getattr(theirs, name))
        for name in ("integrator", "iterations", "disableflags"):
            setattr(spec.option, name, getattr(original.option, name))
        return spec

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        super().bind(model, device, dtype)
        key, limited = self.robot.key, model.actuator_ctrllimited.astype(bool)
        if key is not None and model.key_ctrl[key].any():
            control = model.key_ctrl[key].copy()
            control[limited] = np.clip(control[limited], *model.actuator_ctrlrange[limited].T)
            self.home_control = torch.tensor(control, dtype=dtype, device=device)

    def control(self, s: State, action: torch.Tensor) -> torch.Tensor:
        return self.home_control.expand(len(action), -1)


def make(
    task: type[Stay], scene: Path, monkeypatch: pytest.MonkeyPatch, **options: object
) -> MujocoEnv:
    timestep = mujoco.MjSpec.from_file(str(scene)).option.timestep
    values = {"mjcf": scene, "decimation": max(1, round(0.02 / timestep))}
    module = types.ModuleType("shipped_robot")
    module.__dict__["Robot"] = type("Robot", (task,), values | {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return make_world(f"{module.__name__}:Robot", 4, **options)


def first_return(env: MujocoEnv) -> float:
    """Return the mean return of the first SECONDS of action 0, or until an episode ends."""
    total, zero = torch.zeros(4), torch.zeros(4, env.physics.model.nu)
    running = torch.ones(4)
    for _ in range(round(SECONDS / env.task.decimation / env.physics.model.opt.timestep)):
        step = env.step(zero)
        total += running * step.reward
        running *= ~(step.terminated | step.truncated)
    assert int(env.unstable) == 0
    return float(total.mean())


def hidden_share(env: MujocoEnv) -> float:
    """Return the share of the robot's geoms whose centres are outside of the picture.

    The camera of the last picture is read from OpenGL's scene.
    """
    canvas = env.physics.cameras._canvases[(240, 320)]
    left, right = canvas.scene.camera
    position = (np.array(left.pos) + right.pos) / 2
    forward, up = np.array(left.forward), np.array(left.up)
    model, data = env.physics.model, env.task.robot.data
    robot = np.isin(model.body_rootid[model.geom_bodyid], list(env.task.robot.roots))
    ray = data.geom_xpos[robot] - position
    depth = ray @ forward
    high = left.frustum_top / left.frustum_near
    x, y = ray @ np.cross(forward, up) / depth, ray @ up / depth
    inside = (depth > 0) & (np.abs(y) < high) & (np.abs(x) < high * 320 / 240)
    return 1 - float(inside.mean())


@pytest.mark.parametrize("scene", parameters())
def test_action_0_holds_home(scene: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(Stay, scene, monkeypatch, render=True, render_size=(240, 320))
    env.reset()
    assert float(env.render().float().std()) > 3, "the picture is not of one colour"
    assert hidden_share(env) == 0, "the picture does not show the whole robot"
    held = first_return(env)
    env.close()
    env = make(HomeControl, scene, monkeypatch)
    env.reset()
    reference = first_return(env)
    env.close()
    assert held >= SHARE * reference, (held, reference)
