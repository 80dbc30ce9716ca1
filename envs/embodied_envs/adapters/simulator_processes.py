"""Processes of simulators. No torch is loaded here; it would take 200 MB in each of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker

SHARED = ("numpy", "scipy.spatial.transform", "cv2", "numba", "embodied_envs.adapters.libero_task")
# Modules that the fork server loads, if they are installed. None of them loads torch or OpenGL,
# whose threads and contexts do not survive a fork.
SHARED += ("robosuite.utils.binding_utils",)


def run_worker(*arguments: Any) -> None:
    """Run Gymnasium's worker outside the process group of the run.

    A terminal and batch systems send a signal to the whole group. The run then ends its update and
    saves it, which needs its simulators.
    """
    os.setpgid(0, 0)
    # A forked process has the handlers of the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _async_worker(*arguments)


def make_vector(
    makers: Sequence[Callable[[], gymnasium.Env]], max_episode_steps: int, processes: bool | None
) -> gymnasium.vector.VectorEnv:
    """Return environments with a time limit, of functions in modules that do not load torch.

    With ``processes`` (None: if there are several) each has its own process. The processes are
    forks of one server and share the memory of SHARED.
    """
    limited, mode = [partial(_limited, x, max_episode_steps) for x in makers], AutoresetMode
    if not (len(makers) > 1 if processes is None else processes):
        return SyncVectorEnv(limited, autoreset_mode=mode.NEXT_STEP)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["embodied_envs.adapters.fork_server"])
    options: dict[str, Any] = {"autoreset_mode": mode.NEXT_STEP, "worker": run_worker}
    return AsyncVectorEnv(limited, context="forkserver", **options)


def _limited(make: Callable[[], gymnasium.Env], max_episode_steps: int) -> gymnasium.Env:
    return gymnasium.wrappers.TimeLimit(make(), max_episode_steps)


def use_egl_without_display() -> None:
    """Select MuJoCo's EGL renderer on a machine without a display; its default needs a screen."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def installation_hint(extra: str, mujoco: str) -> str:
    """Return how to install an extra that needs another version of MuJoCo."""
    return (
        f"It needs mujoco {mujoco} and an environment of its own: pip install -c"
        f" scripts/constraints-{extra}.txt -e '.[{extra}]', then pip uninstall torchvision, whose"
        f" wheel does not match torch (make test-{extra} does both in .venv-{extra})"
    )


@contextlib.contextmanager
def discard_output(*, stderr: bool) -> Iterator[None]:
    """Discard what the block prints to stdout, and to stderr if requested."""
    with contextlib.ExitStack() as stack:
        devnull = stack.enter_context(open(os.devnull, "w"))
        stack.enter_context(contextlib.redirect_stdout(devnull))
        if stderr:
            stack.enter_context(contextlib.redirect_stderr(devnull))
        yield
