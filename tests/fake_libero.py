"""The interface of LIBERO's package and of robosuite that the adapter calls, without physics.

It records how hf-libero 0.1 and robosuite 1.4 are called: a benchmark of tasks with 50 initial
states each, and an environment whose success depends on the actions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from embodied_envs.adapters import libero_env

BENCHMARK = """
from types import SimpleNamespace
import numpy as np
COUNTS = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10}

class Suite:
    def __init__(self, name): self.name, self.n_tasks = name, COUNTS.get(name, 90)
    def get_task(self, i): return SimpleNamespace(name=f"task_{i}", language=f"do task {i}")
    def get_task_bddl_file_path(self, i): return str(i)
    def get_task_init_states(self, i): return np.arange(50.0) + 100 * i

def get_benchmark_dict():
    return {n: (lambda n=n: Suite(n)) for n in (*COUNTS, "libero_90")}
"""
ENVS = '''
from types import SimpleNamespace
import numpy as np
BUILT = []

class OffScreenRenderEnv:
    """Task and state are in the state observation; success: the sum of action 0 exceeds .3."""
    def __init__(self, bddl_file_name, camera_names, camera_heights, camera_widths, **options):
        BUILT.append(int(bddl_file_name))
        self.cameras, self.size = camera_names, (camera_heights, camera_widths, 3)
        self.robots = [SimpleNamespace(gripper=SimpleNamespace(dof=2, current_action=None))]
        self.env, self.start, self.sum = self, 0.0, 0.0
    def reset(self): self.sum = 0.0
    def set_init_state(self, state): self.start, self.sum = float(state), 0.0
    def modify_observable(self, **options): pass
    def _get_observations(self, force_update=False):
        image = np.full(self.size, int(self.start) % 256, np.uint8)
        return {"robot0_eef_pos": np.array([self.start, self.sum, 0.0]), "robot0_eef_quat":
            np.array([0.0, 0, 0, 1]), "robot0_gripper_qpos": np.zeros(2),
            **{f"{name}_image": image for name in self.cameras}}
    def step(self, action):
        assert np.shape(action) == (7,)
        self.sum += float(action[0])
        success = self.sum > 0.3
        return self._get_observations(), float(success), success, {}
    def close(self): pass
'''
QUATERNIONS = """
import numpy as np
def quat2axisangle(q): return np.zeros(3)
"""
MODULES = {
    "libero/libero/benchmark/__init__.py": BENCHMARK,
    "libero/libero/envs/__init__.py": ENVS,
    "robosuite/utils/binding_utils.py": "class MjSim: ...\n",
    "robosuite/utils/transform_utils.py": QUATERNIONS,
}


def install_packages(folder: Path, files: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    """Write packages into a folder and put it first on the path of this process."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        for parent in Path(name).parents[:-1]:
            (folder / parent / "__init__.py").touch()
    patch.syspath_prepend(str(folder))
    for file in folder.rglob("*.py"):
        name = ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        # After the test, ``patch`` restores the module, or removes the one that the test imported.
        patch.setitem(sys.modules, name, sys)
        del sys.modules[name]


def install(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Install LIBERO and robosuite."""
    install_packages(folder, MODULES, patch)
    for name in libero_env._ASSETS:
        (folder / "libero/libero/assets" / name).mkdir(parents=True)
