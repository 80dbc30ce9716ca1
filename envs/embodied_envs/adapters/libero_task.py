"""One environment of LIBERO, in the process that simulates it, which does not load torch."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied_envs.adapters import simulator_processes
from embodied_envs.base.errors import EnvError

CAMERAS = ("agentview", "robot0_eye_in_hand")
# Number of fixed initial states of every task.
STATES = 50
# BDDL file of a task, and its initial states [STATES, n].
Scene: TypeAlias = "tuple[str, np.ndarray]"
_STILL = np.array([0.0, 0, 0, 0, 0, 0, -1])  # no motion, gripper open
_config_folder: Any = None  # temporary folder of config.yaml, deleted when the process ends


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
        scenes: Mapping[int, Scene] | None = None,
    ) -> None:
        self.suite, self.task, self.assets, self.scenes = suite, task, assets, scenes
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
            task = self.drawn[drawn_task(seed, len(self.drawn))]
            if task != self.task:
                self.close()
            self.task = task
        sim = self._sim = self._sim or self._build()
        fixtures, state = (int(x) for x in self.np_random.integers((2**31, STATES)))
        before = np.random.get_state()
        np.random.seed(fixtures)  # LIBERO draws from numpy's global generator
        sim.reset()
        np.random.set_state(before)
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
        assets = Path(self.assets)
        if self.scenes is None:
            self.scenes = read_scenes(self.suite, [self.task], assets)
        file, self._states = self.scenes[self.task]
        import_package(f"libero/{self.suite}", assets)
        with simulator_processes.discard_output(stderr=True):
            sim = importlib.import_module("robosuite.utils.binding_utils").MjSim
            size = max(self.image_size)
            sim.from_xml_string = staticmethod(lambda xml: sim(_compile(xml, size)))
            env = importlib.import_module("libero.libero.envs").OffScreenRenderEnv(
                bddl_file_name=file,
                camera_names=list(self.cameras),
                camera_heights=self.image_size[0],
                camera_widths=self.image_size[1],
                # 0.2 s instead of 5 s; bitwise equal once the gripper's command is cleared
                hard_reset=False,
                ignore_done=True,
            )
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # return the freed memory of MuJoCo and the renderer
        return env

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
        out = {"state": np.concatenate((position, orientation, gripper)).astype(np.float32)}
        for name in self.cameras:
            # robosuite's images are upside down.
            image = obs[f"{name}_image"][::-1, :: -1 if self.mirror else 1]
            out[name] = np.ascontiguousarray(image.transpose(2, 0, 1))
        return out


def _compile(xml: str, image_size: int) -> Any:
    """Compile a model that takes a quarter of the memory of robosuite's and has equal images.

    MuJoCo keeps the assets of the last XML string and of all files, and the renderer a shadow map
    (64 MB) for lights that cast no shadows. Images of 256 (480) pixels read a quarter (half) of the
    resolution of the objects' textures at most. They are reduced to it as Mesa reduces them.
    """
    mujoco: Any = importlib.import_module("mujoco")
    open_image = importlib.import_module("PIL.Image").open
    spec = mujoco.MjSpec.from_string(xml)
    _delete_unused(spec, mujoco.mjtTexture.mjTEXTURE_SKYBOX)
    for texture in spec.textures if image_size <= 480 else ():
        if texture.type == mujoco.mjtTexture.mjTEXTURE_2D and texture.file.endswith(".png"):
            with open_image(texture.file) as image:
                # The renderer averages the colours of files with this entry in another space.
                if image.size != (2048, 2048) or "srgb" in image.info:
                    continue
                x = np.asarray(image.convert("RGB"))
            for _ in range(2 if image_size <= 256 else 1):
                x = (x[:, ::2].astype(np.uint16) + x[:, 1::2] + 1) >> 1
                x = (x[::2] + x[1::2] + 1) >> 1
            texture.file, texture.colorspace = "", mujoco.mjtColorSpace.mjCOLORSPACE_LINEAR
            texture.height, texture.width, texture.nchannel = x.shape
            texture.data = x.astype(np.uint8).tobytes()
    model = spec.compile()
    mujoco.mj_clearCache(mujoco.mj_getCache())
    if not model.light_castshadow.any():
        model.vis.quality.shadowsize = 0
    return model


def _delete_unused(spec: Any, skybox: Any) -> None:
    """Delete what nothing shows: in most scenes two cubes of a table's textures (103 to 256 MB)."""
    shown = {x.material for x in (*spec.geoms, *spec.sites, *spec.tendons, *spec.skins)}
    # Textures that several materials read from one file become one.
    first = {(x.type, x.file): x.name for x in reversed(list(spec.textures)) if x.file}
    same = {x.name: first.get((x.type, x.file), x.name) for x in spec.textures}
    for x in spec.materials:
        x.textures = [same.get(name, "") if x.name in shown else "" for name in x.textures]
    used = {x.meshname for x in spec.geoms}.union(*(x.textures for x in spec.materials))
    for x in (*spec.textures, *spec.meshes):
        if x.name not in used and getattr(x, "type", None) != skybox:
            spec.delete(x)


def make_tasks(
    num_envs: int,
    *,
    tasks: Sequence[int],
    max_episode_steps: int,
    processes: bool | None = None,
    scenes: Mapping[int, Scene] | None = None,
    **kwargs: Any,
) -> gymnasium.vector.VectorEnv:
    """Return one environment for each of ``tasks``; Gymnasium's vector_entry_point."""
    makers = []
    for task in tasks:
        own = scenes and {i: scenes[i] for i in kwargs.get("drawn") or (task,)}
        makers.append(partial(LiberoTask, task=task, scenes=own, **kwargs))
    return simulator_processes.make_vector(makers, max_episode_steps, processes)


# ------------------------------------------------------------------------------------- installation
def package_folder(id: str) -> Path:
    """Return the folder of LIBERO's package; raise EnvError if it is not installed."""
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        hint = simulator_processes.installation_hint("libero", "3.8")
        raise EnvError(f"env.id={id}: hf-libero is not installed. {hint}")
    return Path(spec.submodule_search_locations[0]) / "libero"


def import_package(id: str, assets: Path) -> None:
    """Import libero.libero without its prompts on stdin and without downloads."""
    global _config_folder
    package = package_folder(id)
    if "libero.libero" not in sys.modules:
        simulator_processes.use_egl_without_display()
        # Without a config.yaml the import prompts on stdin. ~/.libero may belong to another
        # installation, so it is not used.
        _config_folder = tempfile.TemporaryDirectory(prefix="embodied_ppo_libero_")
        paths = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "../datasets"}
        config = {"benchmark_root": str(package), "assets": str(assets)}
        config |= {name: str(package / folder) for name, folder in paths.items()}
        # JSON is YAML, too; PyYAML is no dependency of embodied-envs.
        Path(_config_folder.name, "config.yaml").write_text(json.dumps(config))
        os.environ["LIBERO_CONFIG_PATH"] = _config_folder.name
    with simulator_processes.discard_output(stderr=True):
        root: Any = importlib.import_module("libero.libero")
    root._assets_path_cache = str(assets)  # otherwise the next import starts a download


def import_benchmark(id: str, assets: Path) -> Any:
    """Import libero.libero.benchmark, which loads torch."""
    import_package(id, assets)
    with simulator_processes.discard_output(stderr=True):
        return importlib.import_module("libero.libero.benchmark")


def read_scenes(suite: str, tasks: Sequence[int], assets: Path) -> dict[int, Scene]:
    """Return the scenes of tasks of a suite; torch reads their initial states."""
    benchmark = import_benchmark(f"libero/{suite}", assets)
    with simulator_processes.discard_output(stderr=True):
        known = benchmark.get_benchmark_dict()[suite]()
        files = {task: known.get_task_bddl_file_path(task) for task in tasks}
        return {x: (file, np.asarray(known.get_task_init_states(x))) for x, file in files.items()}


def drawn_task(seed: int, count: int) -> int:
    """Return the task of an episode, of ``count``; its initial state is seed mod STATES."""
    return seed // STATES % count
