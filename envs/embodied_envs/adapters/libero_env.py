"""LIBERO's language-conditioned manipulation tasks (Liu et al. 2023) as a ``VectorEnv``. Extra: ``libero``.

Slow: about 10 steps per CPU second, nearly all of it drawing. Every environment runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
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
import yaml
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from torch import Tensor

from embodied_envs.adapters.gymnasium_env import GymnasiumEnv
from embodied_envs.adapters.user_code import blamed
from embodied_ppo.core.types import EnvError, Step

CLOCKS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Suite -> control steps (1/20 s) of an episode, as OpenVLA (run_libero_eval.py) and openpi (examples/libero/main.py)
evaluate; the longest demonstrations have 193, 254, 270, 505 and 373."""
CAMERAS = ("agentview", "robot0_eye_in_hand")
STATES = 50
"""Fixed initial states of every task."""
_ASSETS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "textures")
_STILL = np.array([0.0, 0, 0, 0, 0, 0, -1])  # no motion, gripper open
_DOWNLOAD = "hf download lerobot/libero-assets --repo-type dataset --local-dir ~/.cache/libero/assets"
_folder: Any = None  # holds config.yaml while the process runs


def knows(id: str) -> bool:
    """Whether the id is "libero/<suite>"."""
    return id.removeprefix("libero/") in CLOCKS and id.startswith("libero/")


class LiberoEnv(GymnasiumEnv):
    """``num_envs`` environments of a suite, "libero/libero_spatial" say; each keeps to one task.

    observation   state [8] end effector position (m), orientation (axis times angle, rad), two finger positions (m);
                  camera name -> uint8 [3, H, W]
    action        [7] in [-1, 1]: change of position and orientation, gripper (1 closes)
    reward        1 when the task is done, which ends the episode; success says so too

    cameras       LIBERO's names; ()  is agentview and robot0_eye_in_hand
    image_size    (H, W)

    kwargs taken here:
      tasks         index or indices into the suite (None: all); environment i has tasks[i * len(tasks) // num_envs]
      settle_steps  steps without motion before an episode, while objects fall into place
      mirror        True: pictures as in the published demonstrations, which checkpoints were trained with: upright, but
                    with left and right exchanged (turned by 180 degrees from robosuite's upside-down ones). False: as
                    the camera sees
      assets        folder of the downloaded meshes; None: where LIBERO looks, then ~/.cache/libero/assets
      processes     one per environment; None: if there are several

    The first episode after seeding begins with initial state number seed mod 50, the following ones with states drawn
    at random: 50 consecutive seeds cover the benchmark's 50. ``task_names`` and ``instructions`` hold one entry per
    chosen task, ``task`` int64 [N] and ``Step.task`` which of them an environment has.
    """

    gripper_closes = 1.0
    """The last action that closes the gripper; its negative opens it."""

    def __init__(
        self,
        id: str,
        *,
        num_envs: int,
        seeds: list[int],
        cameras: Sequence[str] = (),
        image_size: tuple[int, int] = (128, 128),
        obs_keys: Sequence[str] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        """``rest``: as of ``GymnasiumEnv``."""
        if not knows(id):
            raise EnvError(
                f"env.id={id} is no suite of LIBERO; choose one of {', '.join(f'libero/{s}' for s in CLOCKS)}"
            )
        suite, options = id.removeprefix("libero/"), dict(kwargs or {})
        assets = _find_assets(id, options.pop("assets", None))
        names, instructions = _tasks(id, assets)
        chosen = _chosen(id, options.pop("tasks", None), len(names))
        task = [i * len(chosen) // num_envs for i in range(num_envs)]
        _register(suite)
        super().__init__(
            id,
            num_envs=num_envs,
            seeds=seeds,
            obs_keys=None if obs_keys is None else (*obs_keys, *(tuple(cameras) or CAMERAS)),
            kwargs={
                "suite": suite,
                "tasks": tuple(chosen[i] for i in task),
                "assets": str(assets),
                "cameras": tuple(cameras) or CAMERAS,
                "image_size": tuple(image_size),
                **options,
            },
            **rest,
        )
        self._borrows = False  # Gymnasium's own vector: it copies, takes a seed each and resets some alone.
        self.task_names = tuple(names[i] for i in chosen)
        self.instructions = tuple(instructions[i] for i in chosen)
        self.task = torch.tensor(task, device=self.device)

    def step(self, action: Tensor) -> Step:
        """Act in every environment, float32 [N, 7]."""
        return replace(super().step(action), task=self.task.clone())

    def restart(self, seeds: list[int]) -> None:
        """Begin again with these seeds; ``reset`` must follow. An episode depends on nothing before its seed."""
        super().restart(seeds)
        self._done = None  # The processes stay: building a scene takes 5 to 20 s.


class LiberoTask(gymnasium.Env):
    """One task of a suite for Gymnasium; the scene is built by the first ``reset``, in the process that draws it."""

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
        mirror: bool = True,
        render_mode: str | None = None,
    ) -> None:
        self.suite, self.task, self.assets, self.cameras, self.image_size = suite, task, assets, cameras, image_size
        self.settle_steps, self.mirror, self.render_mode = settle_steps, mirror, render_mode
        pictures = {name: spaces.Box(0, 255, (3, *image_size), np.uint8) for name in cameras}
        self.observation_space = spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (8,), np.float32), **pictures})
        self.action_space = spaces.Box(-1, 1, (7,), np.float32)
        self._sim: Any = None
        self._states: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Objects where one of the fixed initial states has them; fixtures where LIBERO draws them."""
        super().reset(seed=seed)
        sim = self._sim = self._sim or self._build()
        fixtures, state = (int(x) for x in self.np_random.integers((2**31, STATES)))
        with _numpy_seed(fixtures):
            sim.reset()
        for robot in sim.robots:
            robot.gripper.current_action = np.zeros(robot.gripper.dof)  # robosuite keeps the last episode's
        sim.set_init_state(self._states[state if seed is None else seed % STATES])
        self._draw(False)
        for _ in range(self.settle_steps):
            sim.step(_STILL)
        self._draw(True)
        return self._observe(sim.env._get_observations(force_update=True)), {"success": False}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        obs, reward, success, _ = self._sim.step(action)
        return self._observe(obs), float(reward), bool(success), False, {"success": bool(success)}

    def render(self) -> np.ndarray:
        """uint8 [256, 256, 3], as the camera sees."""
        return self._sim.sim.render(camera_name="agentview", width=256, height=256)[::-1]

    def close(self) -> None:
        if self._sim is not None:
            self._sim.close()
            self._sim = None

    def _build(self) -> Any:
        benchmark = _benchmark(f"libero/{self.suite}", Path(self.assets))
        with _quiet():
            suite = benchmark.get_benchmark_dict()[self.suite]()
            self._states = suite.get_task_init_states(self.task)
            return importlib.import_module("libero.libero.envs").OffScreenRenderEnv(
                bddl_file_name=suite.get_task_bddl_file_path(self.task),
                camera_names=list(self.cameras),
                camera_heights=self.image_size[0],
                camera_widths=self.image_size[1],
                hard_reset=False,  # 0.2 s instead of 5 s; the same bits with the gripper's command cleared
                ignore_done=True,
            )

    def _draw(self, on: bool) -> None:
        """Whether steps take pictures."""
        for name in self.cameras:
            self._sim.env.modify_observable(observable_name=f"{name}_image", attribute="enabled", modifier=on)

    def _observe(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        rotation = importlib.import_module("robosuite.utils.transform_utils").quat2axisangle
        parts = (obs["robot0_eef_pos"], rotation(obs["robot0_eef_quat"].copy()), obs["robot0_gripper_qpos"])
        out = {"state": np.concatenate(parts).astype(np.float32)}
        for name in self.cameras:
            picture = obs[f"{name}_image"][::-1, :: -1 if self.mirror else 1]  # robosuite's are upside down
            out[name] = np.ascontiguousarray(picture.transpose(2, 0, 1))
        return out


def make_vector(
    num_envs: int,
    *,
    tasks: Sequence[int],
    max_episode_steps: int,
    processes: bool | None = None,
    **kwargs: Any,
) -> gymnasium.vector.VectorEnv:
    """One environment for each of ``tasks``; Gymnasium's vector_entry_point of "libero/<suite>"."""
    makers = [partial(_limited, max_episode_steps=max_episode_steps, task=task, **kwargs) for task in tasks]
    if processes or (processes is None and num_envs > 1):
        # Fresh processes: OpenGL and threads of torch do not survive a fork.
        return AsyncVectorEnv(makers, context="spawn", autoreset_mode=AutoresetMode.NEXT_STEP)
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)


def _limited(*, max_episode_steps: int, **kwargs: Any) -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(LiberoTask(**kwargs), max_episode_steps)


def _register(suite: str) -> None:
    if f"libero/{suite}" not in gymnasium.registry:
        gymnasium.register(
            f"libero/{suite}",
            vector_entry_point="embodied_envs.adapters.libero_env:make_vector",
            max_episode_steps=CLOCKS[suite],
        )


# ----------------------------------------------------------------------------------------------------- the installation
def _package(id: str) -> Path:
    """The folder of LIBERO's package; raises EnvError where it is not installed."""
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise EnvError(
            f"env.id={id}: hf-libero is not installed. It needs mujoco 3.8 and an environment of its own: "
            "pip install -c scripts/constraints-libero.txt -e '.[libero]', then pip uninstall torchvision, whose wheel "
            "does not match torch (make test-libero does both in .venv-libero)"
        )
    return Path(spec.submodule_search_locations[0]) / "libero"


def _find_assets(id: str, named: str | None) -> Path:
    """The folder with LIBERO's meshes and textures; raises EnvError where none has them all."""
    folders = [_package(id) / "assets", Path("~/.cache/libero/assets").expanduser()]
    folders = folders if named is None else [Path(named).expanduser()]
    for folder in folders:
        if all((folder / name).is_dir() for name in _ASSETS):
            return folder
    raise EnvError(
        f"env.id={id}: LIBERO's meshes and textures (206 MB) are not in {' nor '.join(map(str, folders))}. Download "
        f"them with: {_DOWNLOAD} (or elsewhere, and say env.kwargs.assets=FOLDER)"
    )


def _benchmark(id: str, assets: Path) -> Any:
    """The module libero.libero.benchmark, without the questions it asks on stdin and without downloads."""
    global _folder
    package = _package(id)
    if "libero.libero" not in sys.modules:
        if sys.platform == "linux" and not os.environ.get("DISPLAY"):
            os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's own default needs a screen.
        # Imported without a config.yaml it asks for one. An own one: ~/.libero may be of another installation.
        _folder = tempfile.TemporaryDirectory(prefix="embodied_ppo_libero_")
        paths = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "../datasets"}
        config = {"benchmark_root": str(package), "assets": str(assets)}
        config |= {name: str(package / folder) for name, folder in paths.items()}
        Path(_folder.name, "config.yaml").write_text(yaml.safe_dump(config))
        os.environ["LIBERO_CONFIG_PATH"] = _folder.name
    cure = "install it with scripts/constraints-libero.txt, and uninstall torchvision"
    with blamed(f"env.id={id}: hf-libero cannot be imported (", f"); {cure}"), _quiet():
        root: Any = importlib.import_module("libero.libero")
        root._assets_path_cache = str(assets)  # else it begins a download
        return importlib.import_module("libero.libero.benchmark")


def _tasks(id: str, assets: Path) -> tuple[list[str], list[str]]:
    """Names and instructions of a suite's tasks, in the benchmark's order."""
    benchmark = _benchmark(id, assets)
    with _quiet():
        suite = benchmark.get_benchmark_dict()[id.removeprefix("libero/")]()
    tasks = [suite.get_task(i) for i in range(suite.n_tasks)]
    return [task.name for task in tasks], [task.language for task in tasks]


def _chosen(id: str, tasks: int | Sequence[int] | None, count: int) -> list[int]:
    chosen = list(range(count)) if tasks is None else [tasks] if isinstance(tasks, int) else list(tasks)
    if not chosen or any(not 0 <= i < count for i in chosen):
        raise EnvError(f"env.id={id}: tasks={tasks} must be indices from 0 to {count - 1}")
    return chosen


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """robosuite and LIBERO print hints that do not concern whoever uses them from here."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


@contextlib.contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """LIBERO draws from numpy's global generator."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
