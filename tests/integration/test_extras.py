"""mjlab and LIBERO are not in this environment (make test-mjlab, make test-libero): what is said
then.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

from embodied_envs.adapters import libero_env, mjlab_env
from embodied_envs.adapters.base import AdapterOptions
from embodied_ppo.core.types import EnvError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("make", "id", "message"),
    [
        (
            mjlab_env.MjlabEnv,
            "Mjlab-Cartpole-Balance",
            r"mjlab cannot be imported.*constraints-mjlab.txt -e '.\[mjlab\]'",
        ),
        (
            libero_env.LiberoEnv,
            "libero/libero_goal",
            r"hf-libero is not installed.*constraints-libero.txt -e '.\[libero\]'",
        ),
        (
            libero_env.LiberoEnv,
            "libero/libero_long",
            r"is not a suite of LIBERO; choose one of libero/libero_spatial, libero",
        ),
    ],
)
def test_what_is_missing_is_named_with_the_command_that_installs_it(
    make: type, id: str, message: str
) -> None:
    with pytest.raises(EnvError, match=message):
        make(id, AdapterOptions(num_envs=1, seeds=[0]))


def test_ids_are_told_by_their_names_alone() -> None:
    assert mjlab_env.has_task("Mjlab-Velocity-Flat-Unitree-Go1") and not mjlab_env.has_task(
        "Ant-v5"
    )
    assert libero_env.has_task("libero/libero_90") and not libero_env.has_task("libero_90")
    assert mjlab_env.ids() == []
    code = "import sys, embodied_envs.adapters.mjlab_env, embodied_envs.adapters.libero_env\n"
    code += "print('mujoco' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_task_of_libero_has_its_spaces_before_its_scene() -> None:
    """Else the first process would build a scene only to be asked what it looks like."""
    vector = libero_env.make_vector(
        2,
        tasks=[0, 3],
        max_episode_steps=5,
        processes=False,
        suite="libero_goal",
        assets="",
        image_size=(32, 48),
    )
    space = vector.single_observation_space
    assert isinstance(space, gymnasium.spaces.Dict)
    assert {name: (x.shape, x.dtype) for name, x in space.items()} == {
        "state": ((8,), np.float32),
        "agentview": ((3, 32, 48), np.uint8),
        "robot0_eye_in_hand": ((3, 32, 48), np.uint8),
    }
    vector.close()


@pytest.mark.parametrize(
    ("extra", "pins"),
    [
        ("mjlab", {"mujoco": "3.11.", "mujoco-warp": "3.11."}),
        ("libero", {"mujoco": "3.8.", "robosuite": "1.4.0"}),
    ],
)
def test_the_tested_sets_agree_with_each_other(extra: str, pins: dict[str, str]) -> None:
    """Another mujoco and what comes with it, the same torch."""
    main, own = (
        dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "scripts" / name).read_text(), re.MULTILINE))
        for name in ("constraints.txt", f"constraints-{extra}.txt")
    )
    assert {name: own[name].startswith(start) for name, start in pins.items()} == dict.fromkeys(
        pins, True
    )
    for name in ("torch", "gymnasium", "numpy", "envpool", "ray", "pytest"):
        assert own[name] == main[name], name


def test_the_tested_set_is_for_every_python_that_we_support() -> None:
    """Debian 12 has 3.11.2, too old for some.

    What is installed in another version than the tested is not judged.
    """
    (lowest,) = re.findall(
        r'^requires-python = ">=([\d.]+),', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    pins = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)$", (ROOT / "scripts" / "constraints.txt").read_text(), re.MULTILINE
        )
    )
    tested = [
        found
        for found in distributions()
        if pins.get(found.name.lower().replace("_", "-")) == found.version
    ]
    assert len(tested) > 50
    wants = {found.name: found.metadata["Requires-Python"] for found in tested}
    assert {
        name: want
        for name, want in wants.items()
        if want and f"{lowest}.0" not in SpecifierSet(want)
    } == {}
