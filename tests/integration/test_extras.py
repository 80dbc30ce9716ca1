"""Tests of the extras mjlab and LIBERO without their packages.

`make test-mjlab` and `make test-libero` test them with their packages.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

from embodied_envs.adapters import libero_env, mjlab_env
from embodied_envs.adapters.base import AdapterOptions
from embodied_envs.base.errors import EnvError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("make", "id", "message"),
    [
        (mjlab_env.MjlabEnv, "Mjlab-Cartpole-Balance", r"'\.\[mjlab\]'"),
        (libero_env.LiberoEnv, "libero/libero_goal", r"'\.\[libero\]'"),
    ],
)
def test_missing_package_is_named_with_its_installation(make: type, id: str, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        make(id, AdapterOptions(num_envs=1, seeds=[0]))


def test_spaces_of_libero_are_known_before_the_scene_is_built() -> None:
    """Otherwise the first process would build a scene only to read its spaces."""
    vector = libero_env.make_tasks(
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
def test_constraints_of_extras_agree_with_the_main_ones(extra: str, pins: dict[str, str]) -> None:
    """The extras have other versions of mujoco and its dependents, and the same torch."""
    main, own = (
        dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "scripts" / name).read_text(), re.MULTILINE))
        for name in ("constraints.txt", f"constraints-{extra}.txt")
    )
    assert all(own[name].startswith(version) for name, version in pins.items())
    for name in ("torch", "gymnasium", "numpy", "envpool", "ray", "pytest"):
        assert own[name] == main[name], name


def test_tested_versions_support_the_lowest_python() -> None:
    """Debian 12 has Python 3.11.2. Only packages in the tested version are checked."""
    project = (ROOT / "pyproject.toml").read_text()
    constraints = (ROOT / "scripts" / "constraints.txt").read_text()
    (lowest,) = re.findall(r'^requires-python = ">=([\d.]+),', project, re.MULTILINE)
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints, re.MULTILINE))
    requirements = {
        package.name: package.metadata["Requires-Python"]
        for package in distributions()
        if pins.get(package.name.lower().replace("_", "-")) == package.version
    }
    assert len(requirements) > 50
    for name, required in requirements.items():
        assert not required or f"{lowest}.0" in SpecifierSet(required), name
