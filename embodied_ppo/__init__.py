"""PPO for robot policies in vectorised simulators, and for language models that reason.

The Python API is ``train``, ``evaluate`` and ``load``. They are imported on first use, because they
need torch and the command line must start without it.
"""

from __future__ import annotations

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
