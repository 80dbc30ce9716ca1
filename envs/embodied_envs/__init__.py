"""Vectorised simulators behind one protocol, ``types.VectorEnv``.

``make`` creates environments by the name of their task, ``check_env`` tests a simulator. Both are
imported on first use, because they load torch. Importing this package registers our own tasks with
Gymnasium: ``gym.make_vec("embodied/Tabletop-v0", num_envs=64)``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from embodied_envs.base.errors import EnvError
from embodied_envs.registration import register

if TYPE_CHECKING:
    from embodied_envs.adapters.spaces import ActionConverter
    from embodied_envs.checks import check_env
    from embodied_envs.factory import SIMULATORS, make, nearest
    from embodied_envs.observation_reader import ObservationReader
    from embodied_envs.types import Step, VectorEnv

__version__ = "0.1.0"
__all__ = ["SIMULATORS", "ActionConverter", "EnvError", "ObservationReader", "Step"]
__all__ += ["VectorEnv", "check_env", "make", "nearest"]

# Module -> names of this package that it defines.
_HOMES = {
    "factory": ("SIMULATORS", "make", "nearest"),
    "checks": ("check_env",),
    "types": ("Step", "VectorEnv"),
    "adapters.spaces": ("ActionConverter",),
    "observation_reader": ("ObservationReader",),
}

register()


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
