"""LiberoEnv: instructions and initial states of the wheel; scenes of LIBERO_ASSETS or of boxes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from embodied_envs.adapters import libero_env
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.adapters.libero_env import TIME_LIMITS, LiberoEnv
from embodied_envs.adapters.libero_task import STATES, LiberoTask, read_scenes
from embodied_envs.base.errors import EnvError
from embodied_envs.checks import check_env
from embodied_envs.types import ArraySpec, Box

ASSETS = os.environ.get("LIBERO_ASSETS", "")
scenes = pytest.mark.skipif(not ASSETS, reason="LIBERO_ASSETS names no folder with LIBERO's meshes")
# Stand-ins for the files of libero_object's first task. LIBERO replaces the files gray.png.
ROOM = """<mujoco><asset>
  <texture name="texplane" type="2d" file="../textures/gray.png"/>
  <texture name="tex-wall" type="2d" file="../textures/gray.png"/>
  <texture name="unused-1" type="cube" file="../textures/light-gray-plaster.png"/>
  <mesh name="unused-2" vertex="0 0 0 1 0 0 0 1 0 0 0 1"/>
  <material name="floorplane" texture="texplane"/><material name="wall" texture="tex-wall"/>
</asset><worldbody>
  <body name="floor"><geom name="floor" type="plane" size="3 3 .1" material="floorplane"/></body>
  <geom name="wall" group="1" type="box" pos="-2 0 1" size=".1 2 1" material="wall"/>
  <light pos="1 1 4" castshadow="false"/>
  <camera name="frontview" pos="1 0 1.45" quat=".56 .43 .43 .56"/>
  <camera name="agentview" pos=".5 0 1.35" quat=".653 .271 .271 .653"/>
</worldbody></mujoco>"""
BOX = """<mujoco><worldbody><body><body name="object">
  <geom type="box" size=".02 .03 .02" group="0"/>
  <geom type="box" size=".02 .03 .02" group="1" contype="0" conaffinity="0" rgba=".8 .2 .1 1"/>
  <site name="contain_region" type="box" pos="0 0 0" quat="1 0 0 0" size=".1 .1 .1"/></body>
  <site name="bottom_site" pos="0 0 -.02"/><site name="top_site" pos="0 0 .02"/>
  <site name="horizontal_radius_site" pos=".02 .03 0"/></body></worldbody></mujoco>"""
BOXES = ("alphabet_soup", "salad_dressing", "cream_cheese", "milk", "tomato_sauce", "butter")


@pytest.fixture
def empty(tmp_path: Path) -> str:
    """The folders of the meshes, without files."""
    for name in libero_env._ASSETS:
        (tmp_path / name).mkdir()
    return str(tmp_path)


@pytest.fixture
def boxes(empty: str) -> str:
    """The published files, or boxes in an empty room."""
    if ASSETS:
        return ASSETS
    folder = Path(empty)
    (folder / "scenes/libero_floor_base_style.xml").write_text(ROOM)
    for name in ("light-gray-floor-tile", "light-gray-plaster"):
        Image.new("RGB", (8, 8), "gray").save(folder / f"textures/{name}.png")
    for name in ("stable_scanned_objects/basket", *(f"stable_hope_objects/{x}" for x in BOXES)):
        (folder / name).mkdir()
        (folder / name / f"{Path(name).name}.xml").write_text(BOX)
    return empty


def make(suite: str, assets: str, n: int = 1, **options: Any) -> LiberoEnv:
    kwargs = {"assets": assets, **options.pop("kwargs", {})}
    options = {"image_size": (128, 128), "seeds": list(range(n))} | options
    return LiberoEnv(f"libero/{suite}", AdapterOptions(num_envs=n, kwargs=kwargs, **options))


@pytest.mark.parametrize(
    ("suite", "count", "task", "instruction"),
    [
        ("libero_spatial", 10, 0, libero_env.SENTENCE),
        ("libero_object", 10, 9, "pick up the orange juice and place it in the basket"),
        ("libero_goal", 10, 7, "turn on the stove"),
        ("libero_10", 10, 0, "put both the alphabet soup and the tomato sauce in the basket"),
        ("libero_90", 90, 0, "close the top drawer of the cabinet"),
    ],
)
def test_tasks_and_their_instructions(
    suite: str, count: int, task: int, instruction: str, empty: str
) -> None:
    env = make(suite, empty, kwargs={"processes": False})
    assert len(env.task_names) == len(env.instructions) == count
    assert env.instructions[task] == instruction
    assert env.max_episode_steps == TIME_LIMITS[suite]
    assert env.action_spec == Box((-1.0,) * 7, (1.0,) * 7)
    image = ArraySpec((3, 128, 128), torch.uint8)
    assert env.obs_spec == {
        "state": ArraySpec((8,)),
        "agentview": image,
        "robot0_eye_in_hand": image,
        "instruction": ArraySpec((), torch.int64),
    }
    _, states = read_scenes(suite, [task], Path(empty))[task]
    assert len(states) == STATES


def test_tasks_are_assigned_in_blocks(empty: str) -> None:
    """Adjacent environments, which form a group, have the same task."""
    env = make(
        "libero_goal",
        empty,
        6,
        kwargs={"tasks": [3, 7, 1], "processes": False},
        image_size=(32, 48),
        cameras=("robot0_eye_in_hand", "agentview"),
    )
    # A policy reads images in the order of env.cameras.
    assert [*env.obs_spec][1:3] == ["robot0_eye_in_hand", "agentview"]
    assert env.task.tolist() == [0, 0, 1, 1, 2, 2] and env.instructions[1] == "turn on the stove"
    assert [e.unwrapped.task for e in env._env.envs] == [3, 3, 7, 7, 1, 1]
    assert env.obs_spec["agentview"] == ArraySpec((3, 32, 48), torch.uint8)
    with pytest.raises(EnvError, match=r"tasks=\[10\] must be indices from 0 to 9"):
        make("libero_goal", empty, kwargs={"tasks": [10]})


def test_each_environment_has_the_instruction_of_its_task(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without the index of its sentence, a policy would read the first one in every environment.
    observed = {"state": np.zeros(8, np.float32), "agentview": np.zeros((3, 16, 16), np.uint8)}
    monkeypatch.setattr(LiberoTask, "reset", lambda self, **_: (observed, {"success": False}))
    monkeypatch.setattr(
        LiberoTask, "step", lambda self, action: (observed, 0.0, False, False, {"success": False})
    )
    options: dict[str, Any] = {"cameras": ("agentview",), "image_size": (16, 16)}
    kwargs = {"tasks": [3, 7], "processes": False}
    env = make("libero_goal", empty, 4, kwargs=kwargs, **options)
    expected = [0, 0, 1, 1]
    obs = env.reset()
    assert isinstance(obs, dict) and obs["instruction"].tolist() == expected
    step = env.step(torch.zeros(4, 7))
    assert isinstance(step.obs, dict) and step.obs["instruction"].tolist() == expected
    obs = env.reset_where(torch.tensor([True, False, False, True]))
    assert obs is None or (isinstance(obs, dict) and obs["instruction"].tolist() == expected)
    one = make("libero_goal", empty, 2, kwargs={"tasks": [3], "processes": False}, **options)
    assert isinstance(one.obs_spec, dict) and "instruction" not in one.obs_spec
    assert "instruction" not in dict(one.reset())  # pyright: ignore


# ---------------------------------------------------------------------------------- with scenes
def test_scene_satisfies_the_contract(boxes: str) -> None:
    env = make(
        "libero_object", boxes, kwargs={"tasks": 0}, max_episode_steps=5, image_size=(64, 64)
    )
    report = check_env(env, steps=8)
    assert (report.episodes, report.longest, report.rows) == (1, 5, 7)
    model = env._env.envs[0].unwrapped._sim.sim.model
    assert "unused-2" not in model.mesh_names and model.ntex == 2  # two grey files of the room
    env.close()


def test_mirror_flips_images(boxes: str) -> None:
    images = []
    for mirror in (False, True):
        env = make(
            "libero_object",
            boxes,
            kwargs={"tasks": 0, "mirror": mirror},
            image_size=(64, 64),
            render=True,
        )
        obs: Any = env.reset()
        images.append(obs["agentview"][0].float())
        env.close()
    assert torch.equal(images[0], images[1].flip(-1))


@scenes
def test_two_processes_and_success() -> None:
    """Setting the angle of the stove's knob fulfils the task."""
    env = make(
        "libero_goal", ASSETS, 2, kwargs={"tasks": [7, 3]}, max_episode_steps=4, image_size=(32, 32)
    )
    env.reset()
    steps = [env.step(torch.zeros(2, 7)) for _ in range(5)]
    assert steps[3].truncated.all() and not steps[4].mask.any() and steps[0].task.tolist() == [0, 1]
    env.close()
    task = LiberoTask("libero_goal", 7, assets=ASSETS, image_size=(32, 32))
    task.reset(seed=3)
    sim = task._sim.sim
    (knob,) = [name for name in sim.model.joint_names if "stove" in name]
    for value in (1.0, -1.0, 2.0, -2.0):
        sim.data.set_joint_qpos(knob, value)
        _, reward, terminated, _, info = task.step(np.zeros(7))
        if terminated:
            assert reward == 1.0 and info["success"]
            break
    else:
        raise AssertionError("the task is not fulfilled")
    task.close()
