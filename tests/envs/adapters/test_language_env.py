"""Simulators of other projects, with the recorded interfaces of their packages."""

from __future__ import annotations

from typing import Any

import fake_libero
import pytest
import torch

import embodied_envs
from embodied_envs.adapters.language_task import TASKS
from embodied_envs.base.errors import EnvError
from embodied_envs.types import VectorEnv

SIMPLER = """
import numpy as np
class Env:
    def __init__(self, task): self.task = task
    def reset(self, seed=None, options=None):
        self.x, self.episode = 0.0, -1
        if options is not None: self.episode = options["obj_init_options"]["episode_id"]
        return self.obs(), {}
    def obs(self):
        image = np.zeros((6, 8, 4), np.uint8); image[:3] = 200; image[..., 3] = 9
        image[0, 0, 0] = self.episode + 1
        return {"image": {"3rd_view_camera": {"rgb": image}}, "agent": {"qpos": np.zeros(8)}}
    def step(self, action):
        assert action.shape == (7,)
        self.x += action[0]
        return self.obs(), 0.0, self.x > 0.25, False, {}
    def is_final_subtask(self): return "place_in" not in self.task
    def get_language_instruction(self): return "put carrot on plate"
def make(task): return Env(task)
"""
ROBOCASA = """
import numpy as np
class Env:
    def __init__(self, **options): self.options = options
    def reset(self): self.x, self.kind = 0.0, int(self.rng.integers(2)); return self.obs()
    def obs(self):
        o = self.options
        image = np.zeros((o["camera_heights"], o["camera_widths"], 3), np.uint8); image[-1] = 200
        sizes = {"base_pos": 3, "base_quat": 4, "base_to_eef_pos": 3, "base_to_eef_quat": 4}
        state = {f"robot0_{n}": np.full(k, 0.5) for n, k in {**sizes, "gripper_qpos": 2}.items()}
        return {**state, **{f"{n}_image": image for n in o["camera_names"]}}
    def step(self, action):
        assert action.shape == (12,)
        self.x += action[0]
        return self.obs(), 0.0, False, {}
    def get_ep_meta(self): return {"lang": ["pick the apple", "pick the can"][self.kind]}
    def _check_success(self): return self.x > 0.25
    def close(self): pass
def create_env(**options): return Env(**options)
"""
ROBOTWIN = """
import numpy as np
class UnStableError(Exception): pass
class lift_pot:
    def setup_demo(self, now_ep_num, seed, is_test, **options):
        assert is_test and options == {"data_type": {"rgb": True}}
        if seed % 2: raise UnStableError("objects move")
        self.seed, self.x, self.eval_success = seed, 0.0, False
    def set_instruction(self, instruction): self.text = instruction
    def get_instruction(self): return self.text
    def close_env(self): pass
    def get_obs(self):
        image = np.zeros((6, 8, 3), np.uint8); image[:3] = 200
        names = ("head_camera", "left_camera", "right_camera")
        return {"observation": {n: {"rgb": image} for n in names},
            "joint_action": {"vector": np.full(14, self.seed)}}
    def take_action(self, action, action_type):
        assert action.shape == (14,) and action_type == "qpos"
        self.x += action[0]
        self.eval_success = self.x > 0.25
"""
CALVIN = {
    "calvin_agent/evaluation/multistep_sequences.py": """
def get_sequences(count):
    return [({"led": i}, ("open_drawer", "push_block")) for i in range(count)]
""",
    "calvin_agent/evaluation/utils.py": """
def get_env_state_for_initial_condition(state): return state["led"], 0
""",
    "calvin_env/envs/play_table_env.py": """
import numpy as np
class Env:
    def reset(self, robot_obs, scene_obs): self.led, self.x = robot_obs, 0.0; return self.obs()
    def obs(self):
        image = np.zeros((6, 8, 3), np.uint8); image[:3] = 200
        return {"rgb_obs": {"rgb_static": image, "rgb_gripper": image},
            "robot_obs": np.full(15, self.led)}
    def get_info(self): return self.x
    def step(self, action):
        assert action.shape == (7,) and action[-1] in (-1, 1)
        self.x += action[0]
        return self.obs(), 0, False, self.x
    def close(self): pass
def get_env(folder, show_gui): assert folder.name == "validation"; return Env()
""",
    "hydra/__init__.py": "from hydra import utils",
    "hydra/utils.py": """
class Oracle:
    def get_task_info_for_set(self, start, info, tasks): return tasks if info - start > 0.15 else {}
def instantiate(config): return Oracle()
""",
    "omegaconf/__init__.py": """
class OmegaConf:
    def load(path): return {"open_drawer": ["pull the handle"], "push_block": ["push the block"]}
""",
}
MANISKILL = {
    "mani_skill/envs/__init__.py": """
import gymnasium
from types import SimpleNamespace
class Env(gymnasium.Env):
    def __init__(self, **options): self.options = options
gymnasium.register("PickCube-v1", Env, disable_env_checker=True, order_enforce=False)
""",
    "mani_skill/vector/wrappers/gymnasium.py": """
import numpy as np, torch
from gymnasium.spaces import Box, Dict
class ManiSkillVectorEnv:
    device = torch.device("cpu")
    max_episode_steps = 50
    def __init__(self, env):
        self.options = env.unwrapped.options
        self.num_envs, size = self.options["num_envs"], self.options["sensor_configs"]
        assert self.options["obs_mode"] == "rgb" and self.options["sim_backend"] == "physx_cpu"
        image = Box(0, 255, (size["height"], size["width"], 3), np.uint8)
        cameras = Dict({"base_camera": Dict({"rgb": image}), "hand": Dict({"rgb": image})})
        agent = Dict({"qpos": Box(-9, 9, (9,)), "qvel": Box(-9, 9, (9,))})
        self.single_observation_space = Dict({"agent": agent, "sensor_data": cameras})
        self.single_action_space = Box(-1, 1, (8,))
        self.x, self.image = torch.zeros(self.num_envs), image
    def obs(self):
        image = torch.zeros(self.num_envs, *self.image.shape, dtype=torch.uint8)
        image[:, 0] = 200
        qpos = self.x[:, None].repeat(1, 9)
        return {"agent": {"qpos": qpos, "qvel": qpos},
            "sensor_data": {"base_camera": {"rgb": image}, "hand": {"rgb": image}}}
    def reset(self, seed=None, options=None):
        self.x[(options or {}).get("env_idx", slice(None))] = 0
        return self.obs(), {}
    def step(self, action):
        self.x = self.x + action[:, 0]
        success, obs = self.x > 0.25, self.obs()
        info = {"success": success}
        if success.any():
            final = {"final_observation": obs, "final_info": info}
            obs, info = self.reset(options={"env_idx": success.nonzero().flatten()})
            info = {**final, "success": torch.zeros_like(success)}
        return obs, success.float(), success, torch.zeros_like(success), info
    def close(self): pass
""",
}
FILES = {
    "maniskill": MANISKILL,
    "simpler": {"simpler_env/__init__.py": SIMPLER},
    "robocasa": {
        "robocasa/environments/kitchen/kitchen.py": (
            "REGISTERED_KITCHEN_ENVS = {'PickPlaceCounterToSink': object}"
        ),
        "robocasa/utils/env_utils.py": ROBOCASA,
    },
    "robotwin": {"envs/_base_task.py": "", "envs/lift_pot.py": ROBOTWIN},
    "calvin": CALVIN,
}


@pytest.fixture
def install(tmp_path, monkeypatch) -> Any:
    """Return a function that installs a package of FILES."""
    return lambda name: fake_libero.install_packages(tmp_path, FILES[name], monkeypatch)


def make(id: str, simulator: str, n: int = 2, **options: Any) -> VectorEnv:
    kwargs = options.pop("kwargs", {})
    kwargs = kwargs if simulator == "maniskill" else {"processes": False, **kwargs}
    options |= {"seeds": list(range(n)), "simulator": simulator, "image_size": (4, 6)}
    return embodied_envs.make(id, num_envs=n, kwargs=kwargs, **options)


SINK = "PickPlaceCounterToSink"
PICK, LIFT = ("pick the apple", "pick the can"), ("lift the pot", "raise it")
# Simulator -> id, kwargs, sentences, size of actions, time limit.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], int, int]] = {
    "simpler": ("widowx_carrot_on_plate", {}, ("put carrot on plate",), 7, 60),
    "robocasa": (
        "PickPlaceCounterToSink",
        {"sentences": [*PICK], "split": "target"},
        PICK,
        12,
        500,
    ),
    "robotwin": ("lift_pot", {"sentences": [*LIFT], "data_type": {"rgb": True}}, LIFT, 14, 400),
    "calvin": ("CALVIN", {"dataset": "D"}, ("pull the handle", "push the block"), 7, 1800),
}


@pytest.mark.parametrize("name", CASES)
def test_named_simulator_has_images_sentences_and_success(
    name: str, install: Any, tmp_path, monkeypatch
) -> None:
    install(name)
    (tmp_path / "D" / "validation").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    id, kwargs, sentences, size, limit = CASES[name]
    env = make(id, name, kwargs=kwargs)
    assert env.instructions == sentences and env.max_episode_steps == limit
    assert env.action_spec.size == size
    obs = env.reset()
    assert isinstance(obs, dict) and isinstance(env.obs_spec, dict)
    assert obs.keys() == env.obs_spec.keys() and ("state" in obs) == (name != "simpler")
    cameras = [name for name, x in obs.items() if x.dtype == torch.uint8]
    assert name == "simpler" or cameras == list(TASKS[name].cameras)  # openpi's order
    images = [obs[camera] for camera in cameras]
    assert images and all(x.shape == (2, 3, 4, 6) for x in images)
    # Upright: the bright part is above.
    assert all(x[:, :, 0].float().mean() > x[:, :, -1].float().mean() for x in images)
    sentence = obs["instruction"].tolist() if len(sentences) > 1 else [0, 0]
    if name == "robotwin":  # the seed selects it; the seed 1 is not stable
        assert sentence == [0, 1] and obs["state"][:, 0].tolist() == [0, 2]
    action = torch.zeros(2, size)
    action[0, 0] = 0.1 if env.action_spec.low[0] == -1 else 0.1 / torch.pi
    steps = [env.step(action) for _ in range(4 if name == "calvin" else 3)]
    # CALVIN's chain has two subtasks of two steps here; the sentence is that of the second one.
    sentences_at = [x.obs["instruction"].tolist() for x in steps if "instruction" in x.obs]
    assert name != "calvin" or sentences_at[2] == [1, 0]
    ends = [(x.success, x.terminated, x.reward) for x in steps if x.success is not None]
    ends = [[x.tolist() for x in end] for end in ends]
    assert ends[:-1] == [[[False] * 2, [False] * 2, [0, 0]]] * (len(steps) - 1)
    assert ends[-1] == [[True, False], [True, False], [1, 0]]
    env.close()


def test_maniskill_has_cameras_and_success(install: Any) -> None:
    install("maniskill")
    env = make("PickCube-v1", "maniskill", kwargs={}, cameras=("base_camera",))
    assert env.instructions == ("pick cube",) and env.max_episode_steps == 50
    obs = env.reset()
    assert isinstance(obs, dict)
    assert obs.keys() == {"agent/qpos", "sensor_data/base_camera/rgb"}
    assert obs["sensor_data/base_camera/rgb"].shape == (2, 4, 6, 3)
    action = torch.zeros(2, 8)
    action[0, 0] = 0.1
    steps = [env.step(action) for _ in range(3)]
    assert [x.success is not None and x.success.tolist() for x in steps] == [
        *[[False, False]] * 2,
        [True, False],
    ]
    assert steps[2].terminated.tolist() == [True, False]
    final = steps[2].final_obs
    assert isinstance(final, dict) and float(final["agent/qpos"][0, 0]) == pytest.approx(0.3)
    env.close()


def test_errors_name_package_sentences_and_subtasks(install: Any) -> None:
    with pytest.raises(EnvError, match=r"install simpler: .* simpler_env"):
        make("widowx_stack_cube", "simpler")
    with pytest.raises(EnvError, match=r"install maniskill: .* mani_skill"):
        make("PickCube-v1", "maniskill")
    for name in ("simpler", "robocasa", "calvin"):
        install(name)
    with pytest.raises(
        EnvError, match=r"^write env\.kwargs\.dataset=FOLDER.*: env\.kwargs\.dataset=no"
    ):
        make("CALVIN", "calvin", kwargs={"dataset": "no"})
    for sentences in (3, "pick the apple", ["pick", 3]):
        with pytest.raises(EnvError, match=r"^write a list of texts: env\.kwargs\.sentences="):
            make(SINK, "robocasa", kwargs={"sentences": sentences})
    with pytest.raises(EnvError, match=r"env\.kwargs"):
        make("widowx_stack_cube", "simpler", kwargs={"foo": 1})
    with pytest.raises(EnvError, match=r"write env\.kwargs\.sentences"):
        make(SINK, "robocasa")
    with pytest.raises(EnvError, match="did you mean PickPlaceCounterToSink"):
        make("PickPlaceCounterToSin", "robocasa", kwargs={"sentences": ["pick the pear"]})
    env = make("google_robot_open_drawer", "simpler")
    assert env.instructions == ("open top drawer", "open middle drawer", "open bottom drawer")
    env.close()
    env = make(SINK, "robocasa", kwargs={"sentences": ["pick the pear"]})
    with pytest.raises(EnvError, match=r"add 'pick the (apple|can)' to env.kwargs.sentences"):
        env.reset()
    env.close()
