"""PPO for robot policies in vectorised simulators, and for language models that reason.

The Python API is ``train``, ``distill``, ``evaluate``, ``compare``, ``fork``, ``replay``,
``bisect``, ``verify``, ``search``, ``load`` and ``config`` of ``api``, and the exceptions of
``core.errors``. They are imported on first use, because the command line must start at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodied_ppo.api import (
        Run,
        bisect,
        compare,
        config,
        distill,
        evaluate,
        fork,
        load,
        replay,
        search,
        train,
        verify,
    )
    from embodied_ppo.core.errors import (
        CheckpointError,
        ConfigError,
        EnvError,
        PlacementError,
        TrainingError,
    )

__version__ = "0.1.0"
__all__ = ["Run", "bisect", "compare", "config", "distill", "evaluate", "fork", "load", "replay"]
__all__ += ["search", "train", "verify"]
__all__ += ["CheckpointError", "ConfigError", "EnvError", "PlacementError", "TrainingError"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "core.errors" if name.endswith("Error") else "api"
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.api":
            raise
        raise ImportError(
            f"{__name__}.{name} belongs to the trainer, and embodied-envs installs the simulators"
            " only: pip uninstall embodied-envs, then pip install embodied-ppo"
        ) from error
    return getattr(module, name)


class _CallableModule(ModuleType):
    """Module of the options, which is also called: ``embodied_ppo.config(..)`` of the Python API.

    Importing the package ``embodied_ppo.config`` sets that attribute to the module, so the function
    of this name could not be reached.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return importlib.import_module(f"{__name__}.api").config(*args, **options)


if importlib.util.find_spec(f"{__name__}.config") is not None:  # not in embodied-envs
    importlib.import_module(f"{__name__}.config").__class__ = _CallableModule


def _add_checkout_folders(root: Path) -> None:
    """Make ``embodied_ppo.configs`` and ``embodied_envs`` importable without an installation.

    An installation maps both names to the folders of the checkout (pyproject.toml). Without one
    (``python -m embodied_ppo.commands.main`` in the checkout, or PYTHONPATH) this function does.
    """
    configs, envs = root / "configs", root / "envs"
    if not (configs / "train.yaml").is_file() or not (envs / "embodied_envs").is_dir():
        return  # this package lies in site-packages
    if importlib.util.find_spec("embodied_envs") is None:
        sys.path.append(str(envs))
    name = f"{__name__}.configs"
    if importlib.util.find_spec(name) is None:
        spec = importlib.util.spec_from_file_location(
            name, configs / "__init__.py", submodule_search_locations=[str(configs)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_add_checkout_folders(Path(__file__).resolve().parent.parent)
