"""PPO for robot policies in vectorised simulators, and for language models that reason.

The Python API is ``train``, ``distill``, ``evaluate``, ``load`` and ``config`` of ``api``,
``compare``, ``fork``, ``replay``, ``bisect`` and ``verify`` of ``tools``, and the exceptions of
``core.errors``. They are imported on first use, because the command line must start at once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_ppo.core.version import __version__ as __version__

if TYPE_CHECKING:
    from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError, TrainingError
    from embodied_ppo.api import Run, config, distill, evaluate, load, train
    from embodied_ppo.core.errors import PlacementError
    from embodied_ppo.tools.bisection import bisect
    from embodied_ppo.tools.policy_comparison import compare
    from embodied_ppo.tools.run_fork import fork
    from embodied_ppo.tools.update_replay import replay
    from embodied_ppo.tools.verification import verify

__all__ = ["Run", "bisect", "compare", "config", "distill", "evaluate", "fork", "load", "replay"]
__all__ += ["train", "verify"]
# Function -> the module that contains it.
TOOLS = {
    "bisect": "tools.bisection",
    "compare": "tools.policy_comparison",
    "fork": "tools.run_fork",
    "replay": "tools.update_replay",
    "verify": "tools.verification",
}
__all__ += ["CheckpointError", "ConfigError", "EnvError", "PlacementError", "TrainingError"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "core.errors" if name.endswith("Error") else TOOLS.get(name, "api")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


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
