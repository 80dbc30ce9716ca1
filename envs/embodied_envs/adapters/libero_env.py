"""LIBERO's language-conditioned manipulation tasks (Liu et al. 2023) as a ``VectorEnv``.

Needs the extra ``libero``. A CPU core simulates about 10 steps per second; rendering takes nearly
all of the time. Every environment runs in its own process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor

from embodied_envs.adapters.base import AdapterOptions, discard_output, use_egl_without_display
from embodied_envs.adapters.gymnasium_env import GymnasiumEnv
from embodied_envs.adapters.user_code import wrap_errors
from embodied_envs.base.errors import EnvError
from embodied_envs.base.observation_names import INSTRUCTION
from embodied_envs.types import ArraySpec, Box, EnvInfo, ObsSpec, Step

TIME_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Suite -> control steps (1/20 s) of an episode.

The values are those of OpenVLA (run_libero_eval.py) and openpi (examples/libero/main.py). The
longest demonstrations have 193, 254, 270, 505 and 373 steps.
"""
CAMERAS = ("agentview", "robot0_eye_in_hand")
SENTENCE = "pick up the black bowl between the plate and the ramekin and place it on the plate"
"""Stand-in for the sentences of a suite where LIBERO's package is missing."""
STATES = 50
"""Number of fixed initial states of every task."""
_ASSETS = (
    "articulated_objects",
    "scenes",
    "stable_hope_objects",
    "stable_scanned_objects",
    "textures",
)
_STILL = np.array([0.0, 0, 0, 0, 0, 0, -1])  # no motion, gripper open
_DOWNLOAD = (
    "hf download lerobot/libero-assets --repo-type dataset --local-dir ~/.cache/libero/assets"
)
_config_folder: Any = None  # temporary folder of config.yaml, deleted when the process ends


def has_task(id: str) -> bool:
    """Return whether the id is "libero/<suite>"."""
    return id.removeprefix("libero/") in TIME_LIMITS and id.startswith("libero/")


def describe(
    id: str,
    *,
    obs_keys: Sequence[str] | None,
    cameras: Sequence[str],
    image_size: tuple[int, int],
    action_chunk: int,
    max_episode_steps: int | None,
) -> EnvInfo:
    """Return the spaces of ``LiberoEnv`` without LIBERO's package.

    Its sentences are not known then. ``SENTENCE`` is as long as the longest of libero_spatial.

    Args:
        id: "libero/<suite>".
        obs_keys: Vector observations to return; None: all.
        cameras: See ``LiberoEnv``.
        image_size: (H, W) in pixels.
        action_chunk: Actions of a decision.
        max_episode_steps: Control steps of an episode; None: those of the suite.
    """
    limit = max_episode_steps or TIME_LIMITS[id.removeprefix("libero/")]
    images = {name: ArraySpec((3, *image_size), torch.uint8) for name in tuple(cameras) or CAMERAS}
    has_state = obs_keys is None or "state" in obs_keys
    return EnvInfo(
        id=id,
        obs_spec={**({"state": ArraySpec((8,))} if has_state else {}), **images},
        action_spec=Box((-1.0,) * 7 * action_chunk, (1.0,) * 7 * action_chunk),
        max_episode_steps=-(-limit // action_chunk),
        device=torch.device("cpu"),
        instructions=(SENTENCE,),
        gripper_closes=LiberoEnv.gripper_closes,
    )


class LiberoEnv(GymnasiumEnv):
    """``num_envs`` environments of a suite, for example "libero/libero_spatial".

    Each environment has one fixed task, or draws one for every episode.

    observation   "state" [8]: end effector position (m), orientation (axis times angle, rad), two
                  finger positions (m); camera name: uint8 [3, H, W]; with several tasks
                  "instruction" int64 [], the environment's index in ``instructions``
    action        [7] in [-1, 1]: change of position and orientation, gripper (1 closes)
    reward        1 when the task succeeds, which ends the episode and sets ``success``

    cameras       LIBERO's names; () means agentview and robot0_eye_in_hand
    image_size    (H, W)

    Entries of ``kwargs``:

    tasks         index or indices into the suite (None: all); of G groups of neighbours with equal
                  seeds, group g has tasks[g * len(tasks) // G]
    draw_tasks    True: an episode with a seed has tasks[seed // 50 mod len(tasks)], as RLinf draws
                  tasks for every episode; a change of the task builds its scene (5 to 20 s)
    settle_steps  steps without motion before an episode, while objects come to rest
    mirror        True: images as in the published demonstrations, on which checkpoints were
                  trained: robosuite's upside-down images turned by 180 degrees, so that left and
                  right are exchanged. False: upright and not mirrored.
    assets        folder of the downloaded meshes; None: LIBERO's default, then
                  ~/.cache/libero/assets
    processes     whether each environment has its own process; None: if there are several

    The first episode after seeding starts in initial state number seed mod 50, the following ones
    in states drawn at random: 50 consecutive seeds cover the benchmark's 50. ``task_names`` and
    ``instructions`` have one entry per selected task; ``task`` int64 [N] and ``Step.task`` are each
    environment's index into them.
    """

    gripper_closes = 1.0
    """The last action that closes the gripper; its negative opens it."""

    def __init__(self, id: str, options: AdapterOptions) -> None:
        if not has_task(id):
            suites = ", ".join(f"libero/{suite}" for suite in TIME_LIMITS)
            raise EnvError(f"env.id={id} is not a suite of LIBERO; choose one of {suites}")
        suite, kwargs = id.removeprefix("libero/"), dict(options.kwargs or {})
        obs_keys = options.obs_keys
        cameras = tuple(options.cameras) or CAMERAS
        assets = _find_assets(id, kwargs.pop("assets", None))
        names, instructions = _tasks(id, assets)
        selected = _select_tasks(id, kwargs.pop("tasks", None), len(names))
        self._drawn = len(selected) if kwargs.pop("draw_tasks", False) else 0
        task = _assign_tasks(options.seeds, len(selected), drawn=bool(self._drawn))
        if self._drawn:
            kwargs["drawn"] = tuple(selected)
        options = replace(
            options,
            obs_keys=None if obs_keys is None else (*obs_keys, *cameras),
            kwargs={
                "suite": suite,
                "tasks": tuple(selected[i] for i in task),
                "assets": str(assets),
                "cameras": cameras,
                "image_size": tuple(options.image_size),
                **kwargs,
            },
        )
        limit = TIME_LIMITS[suite]
        spec = EnvSpec(id, vector_entry_point=make_vector, max_episode_steps=limit)
        super().__init__(id, options, spec=spec)
        # ``make_vector`` returns Gymnasium's vector, which copies observations, takes one seed per
        # environment and can reset single environments.
        self._has_own_vector = False
        self.task_names = tuple(names[i] for i in selected)
        self.instructions = tuple(instructions[i] for i in selected)
        self.task = torch.tensor(task, device=self.device)
        if len(selected) > 1:
            named = self.obs_spec
            assert isinstance(named, dict)
            self.obs_spec: ObsSpec = {**named, INSTRUCTION: ArraySpec((), torch.int64)}
            read: Any = self.read_obs
            self.read_obs = lambda obs: {**read(obs), INSTRUCTION: self.task.clone()}

    def step(self, action: Tensor) -> Step:
        """Advance all environments by one step; ``action`` is float32 [N, 7]."""
        return replace(super().step(action), task=self.task.clone())

    def restart(self, seeds: list[int]) -> None:
        """Store new seeds. The ``reset`` that must follow applies them."""
        super().restart(seeds)
        if self._drawn:
            task = _assign_tasks(seeds, self._drawn, drawn=True)
            self.task = torch.tensor(task, device=self.device)
        # ``reset`` then keeps the environments. Building a scene takes 5 to 20 s, and an episode
        # depends on its seed only.
        self._done = None


class LiberoTask(gymnasium.Env):
    """One task of a suite for Gymnasium.

    The first ``reset`` builds the scene, because it must be built in the process that renders it.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012

    def __init__(
        self,
        suite: str,
        task: int,
        *,
        assets: str,
        cameras: tuple[str, ...] = CAMERAS,
        image_size: tuple[int, int] = (128, 128),
        settle_steps: int = 10,
        drawn: tuple[int, ...] = (),
        mirror: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.suite, self.task, self.assets = suite, task, assets
        self.cameras, self.image_size, self.drawn = cameras, image_size, drawn
        self.settle_steps, self.mirror, self.render_mode = settle_steps, mirror, render_mode
        images = {name: spaces.Box(0, 255, (3, *image_size), np.uint8) for name in cameras}
        self.observation_space = spaces.Dict(
            {"state": spaces.Box(-np.inf, np.inf, (8,), np.float32), **images}
        )
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)
        self._sim: Any = None
        self._states: Any = None

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Set objects to a fixed initial state; LIBERO draws the positions of fixtures."""
        super().reset(seed=seed)
        if self.drawn and seed is not None:
            task = self.drawn[_drawn_task(seed, len(self.drawn))]
            if task != self.task:
                self.close()
            self.task = task
        sim = self._sim = self._sim or self._build()
        fixtures, state = (int(x) for x in self.np_random.integers((2**31, STATES)))
        with _numpy_seed(fixtures):
            sim.reset()
        for robot in sim.robots:
            # robosuite does not clear the gripper's command of the last episode.
            robot.gripper.current_action = np.zeros(robot.gripper.dof)
        sim.set_init_state(self._states[state if seed is None else seed % STATES])
        self._enable_cameras(False)
        for _ in range(self.settle_steps):
            sim.step(_STILL)
        self._enable_cameras(True)
        return self._observe(sim.env._get_observations(force_update=True)), {"success": False}

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Advance by one control step; success ends the episode."""
        obs, reward, success, _ = self._sim.step(action)
        return self._observe(obs), float(reward), bool(success), False, {"success": bool(success)}

    def render(self) -> np.ndarray:
        """Return an upright image, uint8 [256, 256, 3]."""
        return self._sim.sim.render(camera_name="agentview", width=256, height=256)[::-1]

    def close(self) -> None:
        """Free the scene."""
        if self._sim is not None:
            self._sim.close()
            self._sim = None

    def _build(self) -> Any:
        """Build the scene and load its initial states."""
        benchmark = _benchmark(f"libero/{self.suite}", Path(self.assets))
        with discard_output(stderr=True):
            suite = benchmark.get_benchmark_dict()[self.suite]()
            self._states = suite.get_task_init_states(self.task)
            return importlib.import_module("libero.libero.envs").OffScreenRenderEnv(
                bddl_file_name=suite.get_task_bddl_file_path(self.task),
                camera_names=list(self.cameras),
                camera_heights=self.image_size[0],
                camera_widths=self.image_size[1],
                # 0.2 s instead of 5 s; bitwise equal once the gripper's command is cleared
                hard_reset=False,
                ignore_done=True,
            )

    def _enable_cameras(self, enabled: bool) -> None:
        """Set whether steps render images."""
        for name in self.cameras:
            self._sim.env.modify_observable(
                observable_name=f"{name}_image", attribute="enabled", modifier=enabled
            )

    def _observe(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Select state and images from robosuite's observation."""
        rotation = importlib.import_module("robosuite.utils.transform_utils").quat2axisangle
        position, gripper = obs["robot0_eef_pos"], obs["robot0_gripper_qpos"]
        orientation = rotation(obs["robot0_eef_quat"].copy())
        state = np.concatenate((position, orientation, gripper))
        out = {"state": state.astype(np.float32)}
        for name in self.cameras:
            # robosuite's images are upside down.
            image = obs[f"{name}_image"][::-1, :: -1 if self.mirror else 1]
            out[name] = np.ascontiguousarray(image.transpose(2, 0, 1))
        return out


def make_vector(
    num_envs: int,
    *,
    tasks: Sequence[int],
    max_episode_steps: int,
    processes: bool | None = None,
    **kwargs: Any,
) -> gymnasium.vector.VectorEnv:
    """Return one environment for each of ``tasks``; Gymnasium's vector_entry_point."""
    makers = [
        partial(_limited, max_episode_steps=max_episode_steps, task=task, **kwargs)
        for task in tasks
    ]
    if processes or (processes is None and num_envs > 1):
        # OpenGL and torch's threads do not survive a fork.
        return AsyncVectorEnv(makers, context="spawn", autoreset_mode=AutoresetMode.NEXT_STEP)
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)


def _limited(*, max_episode_steps: int, **kwargs: Any) -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(LiberoTask(**kwargs), max_episode_steps)


# ------------------------------------------------------------------------------------- installation
def _package(id: str) -> Path:
    """Return the folder of LIBERO's package; raise EnvError if it is not installed."""
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise EnvError(
            f"env.id={id}: hf-libero is not installed. It needs mujoco 3.8 and an environment of"
            " its own: pip install -c scripts/constraints-libero.txt -e '.[libero]', then pip"
            " uninstall torchvision, whose wheel does not match torch (make test-libero does both"
            " in .venv-libero)"
        )
    return Path(spec.submodule_search_locations[0]) / "libero"


def _find_assets(id: str, assets: str | None) -> Path:
    """Return the folder with LIBERO's meshes and textures; raise EnvError if they are missing."""
    folders = [_package(id) / "assets", Path("~/.cache/libero/assets").expanduser()]
    if assets is not None:
        folders = [Path(assets).expanduser()]
    for folder in folders:
        if all((folder / name).is_dir() for name in _ASSETS):
            return folder
    raise EnvError(
        f"env.id={id}: LIBERO's meshes and textures (206 MB) are not in"
        f" {' nor '.join(map(str, folders))}. Download them with: {_DOWNLOAD} (or elsewhere, and"
        " set env.kwargs.assets=FOLDER)"
    )


def _benchmark(id: str, assets: Path) -> Any:
    """Import libero.libero.benchmark without its prompts on stdin and without downloads."""
    global _config_folder
    package = _package(id)
    if "libero.libero" not in sys.modules:
        use_egl_without_display()
        # Without a config.yaml the import prompts on stdin. ~/.libero may belong to another
        # installation, so it is not used.
        _config_folder = tempfile.TemporaryDirectory(prefix="embodied_ppo_libero_")
        paths = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "../datasets"}
        config = {"benchmark_root": str(package), "assets": str(assets)}
        config |= {name: str(package / folder) for name, folder in paths.items()}
        # JSON is YAML, too; PyYAML is no dependency of embodied-envs.
        Path(_config_folder.name, "config.yaml").write_text(json.dumps(config))
        os.environ["LIBERO_CONFIG_PATH"] = _config_folder.name
    hint = "install it with scripts/constraints-libero.txt, and uninstall torchvision"
    prefix = f"env.id={id}: hf-libero cannot be imported ("
    with wrap_errors(prefix, f"); {hint}"), discard_output(stderr=True):
        root: Any = importlib.import_module("libero.libero")
        root._assets_path_cache = str(assets)  # otherwise the import starts a download
        return importlib.import_module("libero.libero.benchmark")


def _tasks(id: str, assets: Path) -> tuple[list[str], list[str]]:
    """Return names and instructions of a suite's tasks, in the benchmark's order."""
    benchmark = _benchmark(id, assets)
    with discard_output(stderr=True):
        suite = benchmark.get_benchmark_dict()[id.removeprefix("libero/")]()
    tasks = [suite.get_task(i) for i in range(suite.n_tasks)]
    return [task.name for task in tasks], [task.language for task in tasks]


def _drawn_task(seed: int, count: int) -> int:
    """Return the task of an episode, of ``count``; its initial state is seed mod STATES."""
    return seed // STATES % count


def _assign_tasks(seeds: Sequence[int], count: int, *, drawn: bool) -> list[int]:
    """Return the task of each environment, of ``count``; a group with one seed has one task."""
    if drawn:
        return [_drawn_task(seed, count) for seed in seeds]
    group = [0]
    for before, seed in itertools.pairwise(seeds):
        group.append(group[-1] + (seed != before))
    return [g * count // (group[-1] + 1) for g in group]


def _select_tasks(id: str, tasks: int | Sequence[int] | None, count: int) -> list[int]:
    """Return the task indices of ``kwargs.tasks``; raise EnvError if one is out of range."""
    selected = [tasks] if isinstance(tasks, int) else list(range(count) if tasks is None else tasks)
    if not selected or any(not 0 <= i < count for i in selected):
        raise EnvError(f"env.id={id}: tasks={tasks} must be indices from 0 to {count - 1}")
    return selected


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, from which LIBERO draws, and restore it afterwards."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
