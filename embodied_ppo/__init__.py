"""PPO for robot policies in vectorised simulators, and for language models that reason.

The Python API is ``train``, ``evaluate`` and ``load``. They are imported on first use, because they
need torch and the command line must start without it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from embodied_ppo.config.loader import load
    from embodied_ppo.run import evaluate, train

__version__ = "0.1.0"
__all__ = ["evaluate", "load", "train"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from embodied_ppo.config import loader as module
    elif name in __all__:
        from embodied_ppo import run as module
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)


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
