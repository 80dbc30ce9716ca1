"""Environments of other projects whose episodes have a sentence, one per process, without torch.

A class has the conventions of one project: images, sentence, success and units of actions. They
follow SimplerEnv and ManiSkill2_real2sim, RoboCasa, RoboTwin 2, and CALVIN with calvin_env, as of
November 2026. Their packages are not installed by embodied-envs.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied_envs.adapters.simulator_processes import make_vector, use_egl_without_display
from embodied_envs.base.errors import EnvError, check_names


class LanguageTask(gymnasium.Env):
    """One environment. Subclasses set the attributes and implement ``_begin`` and ``_advance``.

    observation   "state" [state_size] if there is one; camera name: uint8 [3, H, W]; "instruction"
                  int64 [1], index into ``sentences``
    success       ends the episode, with reward 1
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    # What has to be installed.
    package: ClassVar[str]
    # Names of the cameras in the project; all of them are read by default.
    cameras: ClassVar[tuple[str, ...]]
    state_size: ClassVar[int] = 0
    # Largest absolute value of an action, and its size.
    action_range: ClassVar[tuple[float, int]] = (1.0, 7)
    # Names of options; None: the project checks them.
    known_options: ClassVar[tuple[str, ...] | None] = None
    # Control steps of an episode in the project's evaluation, where all tasks have as many.
    steps: ClassVar[int]
    # Seconds of a control step; None if they differ.
    control_s: ClassVar[float | None] = None

    def __init__(
        self,
        task: str,
        *,
        sentences: Sequence[str],
        cameras: Sequence[str],
        image_size: tuple[int, int],
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.task, self.sentences, self.selected = task, list(sentences), tuple(cameras)
        self.image_size, self.render_mode, self.options = image_size, render_mode, options
        shapes: dict[str, Any] = {
            name: spaces.Box(0, 255, (3, *image_size), np.uint8) for name in cameras
        }
        if self.state_size:
            shapes["state"] = spaces.Box(-np.inf, np.inf, (self.state_size,), np.float32)
        shapes["instruction"] = spaces.Box(0, len(self.sentences), (1,), np.int64)
        self.observation_space = spaces.Dict(shapes)
        bound, size = self.action_range
        self.action_space = spaces.Box(-bound, bound, (size,), np.float32)
        self.sim: Any = None
        self.image: np.ndarray | None = None

    @classmethod
    def time_limit(cls, task: str) -> int:
        """Return the control steps of an episode in the project's evaluation."""
        return cls.steps

    @classmethod
    def step_s(cls, task: str) -> float | None:
        """Return the seconds of a control step, None if they differ."""
        return cls.control_s

    @classmethod
    def prepare(cls, task: str, options: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, Any]]:
        """Return the known sentences and further options, read once in the main process."""
        return (), {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode that is a function of ``seed``, or of the random numbers after it."""
        super().reset(seed=seed)
        self._begin(int(self.np_random.integers(2**31)) if seed is None else seed)
        return self._observe(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance by one control step."""
        success, failed = self._advance(np.asarray(action, np.float64))
        return self._observe(), float(success), success or failed, False, {"success": success}

    def render(self) -> np.ndarray:
        """Return the last image of the first camera."""
        assert self.image is not None
        return self.image

    def _observe(self) -> dict[str, np.ndarray]:
        sentence, state, images = self._read()
        if sentence not in self.sentences:
            raise EnvError(f"add {sentence!r} to env.kwargs.sentences: an episode of it has begun")
        out = {"instruction": np.array([self.sentences.index(sentence)])}
        self.image = np.ascontiguousarray(images[self.selected[0]][..., :3])
        for name in self.selected:
            out[name] = _resize(images[name][..., :3], self.image_size).transpose(2, 0, 1)
        return out if state is None else {**out, "state": np.asarray(state, np.float32)}

    def _begin(self, seed: int) -> None:
        """Start the episode of a seed."""
        raise NotImplementedError

    def _advance(self, action: np.ndarray) -> tuple[bool, bool]:
        """Execute an action [A]; return success and other ends."""
        raise NotImplementedError

    def _read(self) -> tuple[str, Any, Mapping[str, np.ndarray]]:
        """Return sentence, state [n] or None, and camera -> upright image uint8 [h, w, 3]."""
        raise NotImplementedError


def _resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize uint8 [h, w, 3] to (H, W), which may change the proportions, as these projects do."""
    if image.shape[:2] == size:
        return np.ascontiguousarray(image)
    image_module = importlib.import_module("PIL.Image")  # the projects need it, too
    resized = image_module.fromarray(np.ascontiguousarray(image)).resize((size[1], size[0]), 2)
    return np.asarray(resized)


class SimplerTask(LanguageTask):
    """SimplerEnv: images of the robot's camera, no state; actions are changes in m and rad.

    With the robot WidowX, 24 consecutive seeds are the 24 placements of the evaluation.
    """

    package, known_options = "simpler_env", ()
    cameras = ("overhead_camera", "3rd_view_camera")
    sentences_of: ClassVar[dict[str, str]] = {
        "widowx_spoon_on_towel": "put the spoon on the towel",
        "widowx_carrot_on_plate": "put carrot on plate",
        "widowx_stack_cube": "stack the green block on the yellow block",
        "widowx_put_eggplant_in_basket": "put eggplant into yellow basket",
    }

    @classmethod
    def time_limit(cls, task: str) -> int:
        limits = {"eggplant": 120, "widowx": 60, "place_in": 200, "drawer": 113}
        return next((limit for part, limit in limits.items() if part in task), 80)

    @classmethod
    def step_s(cls, task: str) -> float:
        return 1 / 5 if task.startswith("widowx") else 1 / 3

    @classmethod
    def prepare(cls, task: str, options: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, Any]]:
        known = getattr(importlib.import_module(cls.package), "ENVIRONMENTS", None)
        check_names("env.id", [task], known or [task])
        if task in cls.sentences_of:
            return (cls.sentences_of[task],), {}
        verb = next((verb for verb in ("open", "close") if f"robot_{verb}_" in task), None)
        sides = [side for side in ("top", "middle", "bottom") if f"_{side}_" in task]
        if verb is not None:
            return [f"{verb} {x} drawer" for x in sides or ("top", "middle", "bottom")], {}
        return (["pick coke can"] if task.endswith("coke_can") else []), {}

    def _begin(self, seed: int) -> None:
        if self.sim is None:
            self.sim = importlib.import_module("simpler_env").make(self.task)
        options = {"obj_init_options": {"episode_id": seed % 24}}
        is_widowx = self.task.startswith("widowx")
        self.obs, _ = self.sim.reset(seed=seed, options=options if is_widowx else None)
        if not self.sim.is_final_subtask():
            raise EnvError(f"env.id={self.task}: has subtasks, which a policy has to end itself")

    def _advance(self, action: np.ndarray) -> tuple[bool, bool]:
        self.obs, _, success, _, _ = self.sim.step(action)
        return bool(success), False

    def _read(self) -> tuple[str, Any, Mapping[str, np.ndarray]]:
        images = {name: camera["rgb"] for name, camera in self.obs["image"].items()}
        return self.sim.get_language_instruction(), None, images


class RoboCasaTask(LanguageTask):
    """RoboCasa with the robot PandaOmron: [12] arm, gripper, base, torso and mode in [-1, 1].

    ``options`` are those of ``create_env``, such as split.
    """

    package = "robocasa"
    cameras = ("robot0_agentview_left", "robot0_agentview_right", "robot0_eye_in_hand")
    names = ("base_pos", "base_quat", "base_to_eef_pos", "base_to_eef_quat", "gripper_qpos")
    state_size = 3 + 4 + 3 + 4 + 2
    action_range, steps, control_s = (1.0, 12), 500, 1 / 20

    @classmethod
    def prepare(cls, task: str, options: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, Any]]:
        importlib.import_module(cls.package)  # registers the tasks
        kitchen = importlib.import_module("robocasa.environments.kitchen.kitchen")
        check_names("env.id", [task], list(kitchen.REGISTERED_KITCHEN_ENVS))
        return (), {}

    def _begin(self, seed: int) -> None:
        if self.sim is None:
            use_egl_without_display()
            self.sim = importlib.import_module("robocasa.utils.env_utils").create_env(
                env_name=self.task,
                camera_names=list(self.selected),
                camera_heights=self.image_size[0],
                camera_widths=self.image_size[1],
                **self.options,
            )
        self.sim.rng = np.random.default_rng(seed)
        self.obs = self.sim.reset()

    def _advance(self, action: np.ndarray) -> tuple[bool, bool]:
        self.obs = self.sim.step(action)[0]
        return bool(self.sim._check_success()), False

    def _read(self) -> tuple[str, Any, Mapping[str, np.ndarray]]:
        # robosuite's images are upside down.
        images = {name: self.obs[f"{name}_image"][::-1] for name in self.selected}
        state = np.concatenate([self.obs[f"robot0_{name}"] for name in self.names])
        return self.sim.get_ep_meta()["lang"], state, images


class RoboTwinTask(LanguageTask):
    """RoboTwin 2 in its own folder: joint positions of both arms and grippers, [14].

    ``options`` are the arguments of ``setup_demo`` (those of a file in env_cfg/task_config). Of the
    sentences, an episode has one that its seed selects.
    """

    package = "envs._base_task"
    cameras = ("head_camera", "left_camera", "right_camera")
    state_size, action_range, steps = 14, (np.pi, 14), 400

    def _begin(self, seed: int) -> None:
        if self.sim is not None:
            self.sim.close_env()
        self.sim = getattr(importlib.import_module(f"envs.{self.task}"), self.task)()
        for trial in range(seed, seed + 50):
            try:
                self.sim.setup_demo(now_ep_num=0, seed=trial, is_test=True, **self.options)
                break
            except Exception as error:
                # The objects of this seed do not come to rest; the evaluation skips it, too.
                if type(error).__name__ != "UnStableError":
                    raise
                self.sim.close_env()
        self.sim.set_instruction(instruction=self.sentences[seed % len(self.sentences)])

    def _advance(self, action: np.ndarray) -> tuple[bool, bool]:
        self.sim.take_action(action, action_type="qpos")
        return bool(self.sim.eval_success), False

    def _read(self) -> tuple[str, Any, Mapping[str, np.ndarray]]:
        obs = self.sim.get_obs()
        images = {name: obs["observation"][name]["rgb"] for name in self.selected}
        return self.sim.get_instruction(), obs["joint_action"]["vector"], images


class CalvinTask(LanguageTask):
    """CALVIN's chains of five subtasks, of which seed mod 1000 selects one.

    actions   relative position and orientation, gripper (the sign: 1 opens)
    success   all five subtasks, each within 360 steps; the sentence is that of the present one

    ``options``: dataset (a folder with validation/).
    """

    package, known_options = "calvin_agent", ("dataset",)
    cameras = ("rgb_static", "rgb_gripper")
    state_size, subtask_steps, steps, control_s = 15, 360, 5 * 360, 1 / 30

    @classmethod
    def prepare(cls, task: str, options: Mapping[str, Any]) -> tuple[Sequence[str], dict[str, Any]]:
        if not Path(options.get("dataset", "-"), "validation").is_dir():
            raise EnvError(
                "write env.kwargs.dataset=FOLDER, which contains CALVIN's validation/:"
                f" env.kwargs.dataset={options.get('dataset')}"
            )
        evaluation = importlib.import_module("calvin_agent.evaluation.multistep_sequences")
        conf = Path(str(importlib.import_module("calvin_agent").__file__)).parents[1] / "conf"
        load = importlib.import_module("omegaconf").OmegaConf.load
        known = load(conf / "annotations/new_playtable_validation.yaml")
        sentences = {name: str(known[name][0]) for name in known}
        chains = [(state, list(names)) for state, names in evaluation.get_sequences(1000)]
        extra = {"chains": chains, "conf": str(conf), "sentence_of": sentences}
        return list(dict.fromkeys(sentences.values())), extra

    def _begin(self, seed: int) -> None:
        if self.sim is None:
            table = importlib.import_module("calvin_env.envs.play_table_env")
            self.sim = table.get_env(Path(self.options["dataset"], "validation"), show_gui=False)
            file = Path(self.options["conf"], "callbacks/rollout/tasks/new_playtable_tasks.yaml")
            tasks = importlib.import_module("omegaconf").OmegaConf.load(file)
            self.oracle = importlib.import_module("hydra").utils.instantiate(tasks)
        initial, names = self.options["chains"][seed % len(self.options["chains"])]
        utils = importlib.import_module("calvin_agent.evaluation.utils")
        robot, scene = utils.get_env_state_for_initial_condition(initial)
        self.obs = self.sim.reset(robot_obs=robot, scene_obs=scene)
        self.subtasks = itertools.chain(names)
        self._next_subtask()

    def _next_subtask(self) -> bool:
        """Begin the next subtask; return whether there was none."""
        following = next(self.subtasks, None)
        self.subtask, self.elapsed = following or self.subtask, 0
        self.start = self.sim.get_info()
        return following is None

    def _advance(self, action: np.ndarray) -> tuple[bool, bool]:
        action[-1] = 1 if action[-1] > 0 else -1
        self.obs, _, _, info = self.sim.step(action)
        self.elapsed += 1
        if self.oracle.get_task_info_for_set(self.start, info, {self.subtask}):
            return self._next_subtask(), False
        return False, self.elapsed == self.subtask_steps

    def _read(self) -> tuple[str, Any, Mapping[str, np.ndarray]]:
        return self.options["sentence_of"][self.subtask], self.obs["robot_obs"], self.obs["rgb_obs"]


# Value of env.simulator -> class of its tasks.
TASKS: dict[str, type[LanguageTask]] = {
    **{"simpler": SimplerTask, "robocasa": RoboCasaTask, "robotwin": RoboTwinTask},
    "calvin": CalvinTask,
}


def make_tasks(
    num_envs: int, *, kind: str, max_episode_steps: int, processes: Any = None, **kwargs: Any
) -> gymnasium.vector.VectorEnv:
    """Return ``num_envs`` environments; Gymnasium's vector_entry_point."""
    return make_vector([partial(TASKS[kind], **kwargs)] * num_envs, max_episode_steps, processes)
