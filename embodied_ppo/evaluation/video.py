"""An mp4 of evaluation episodes, drawn in a process of its own."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import torch
from torch import nn

from embodied_ppo.core.types import Obs, Policy, VectorEnv
from embodied_ppo.data.video_encoder import encoder
from embodied_ppo.evaluation import episodes as evaluate

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Film:
    """A film, or the reason why there is none.

    path       the mp4, None without one               poster  PNG of its first frame
    frames     pictures in it                           fps     pictures per second
    stride     steps from one picture to the next       step_s  seconds of simulation per step, None if unknown
    reason     why ``path`` is None, else ""
    """

    path: Path | None
    poster: bytes = b""
    frames: int = 0
    fps: float = 0.0
    stride: int = 0
    episodes: int = 0
    step_s: float | None = None
    reason: str = ""


def film(
    policy: Policy,
    make_env: Callable[[list[int]], VectorEnv],
    *,
    path: Path | str,
    seed: int,
    deterministic: bool = True,
    temperature: float | None = None,
    episodes: int = 2,
    steps: int = 300,
    stride: int | None = None,
    budget_s: float = 10.0,
    deadline_s: float = 300.0,
    notice: Callable[[str], None] | None = None,
) -> Film:
    """Film the first ``steps`` steps of the first ``episodes`` evaluation episodes into an mp4 (H.264, yuv420p).

    Filmed episode i is evaluated episode i: same seed, same actions. MuJoCo's shadows cost 60 ms a picture without a
    GPU, so the first pictures are timed and every stride-th step is drawn: the smallest stride that keeps to 30
    pictures per second of film and to about ``budget_s``. The film runs at the simulation's speed where that says how
    long a step is (``step_s``), else at 30 steps per second.

    A renderer without working OpenGL ends its whole process, so a process of its own does this, and its end or the
    deadline become ``Film.reason`` and a line for ``notice``, never an exception.

    make_env   makes environments *with pictures*; it goes to another process: a module's function or a partial of one
    stride     steps from one picture to the next; None: as above
    budget_s   CPU seconds for drawing (starting the simulator takes 3 to 4 more)
    deadline_s seconds after which filming is given up
    notice     hears why there is no film; None: a warning is logged
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".film") as folder:
        reason = _film_elsewhere(
            _Request(policy, make_env, folder, seed, deterministic, temperature, episodes, steps, stride, budget_s),
            deadline_s,
        )
        if not reason:
            facts = json.loads(Path(folder, "film.json").read_text())
            poster = Path(folder, "poster.png").read_bytes()
            Path(folder, "film.mp4").replace(path)
            return Film(path=path, poster=poster, episodes=episodes, **facts)
    (notice or _log.warning)(f"no video: {reason}")
    return Film(path=None, reason=reason)


@dataclass(frozen=True, slots=True)
class _Request:
    policy: Policy
    make_env: Callable[[list[int]], VectorEnv]
    folder: str
    seed: int
    deterministic: bool
    temperature: float | None
    episodes: int
    steps: int
    stride: int | None
    budget_s: float


def _film_elsewhere(request: _Request, deadline_s: float) -> str:
    """Run ``_shoot`` in a new interpreter; "" or the reason why there is no film."""
    if isinstance(request.policy, nn.Module) and evaluate.policy_device(request.policy).type != "cpu":
        request = dataclasses.replace(request, policy=copy.deepcopy(request.policy).cpu())
    try:
        message = pickle.dumps(request)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:  # torch's modules: the last
        return f"policy or make_env cannot go to another process: {error}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}
    environment.setdefault("LP_NUM_THREADS", "1")  # Mesa's software renderer: a third less CPU time, as fast
    environment.setdefault("OMP_NUM_THREADS", "1")
    errors = Path(request.folder, "stderr")
    with errors.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as film; film._shoot_stdin()"],
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
            env=environment,
            start_new_session=True,  # so that the encoder ends with it
        )
        try:
            child.communicate(message, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return f"not finished after {deadline_s:g} s; film fewer or shorter episodes"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if child.returncode == 0:
        return ""
    if (told := Path(request.folder, "reason")).exists():
        return " ".join(told.read_text().split())
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1] if lines else 'the renderer ended without a word'} (exit status {child.returncode})"


def _shoot_stdin() -> None:
    """Entry of the filming process: our parent's request comes in on stdin."""
    torch.set_num_threads(1)
    request: _Request = pickle.load(sys.stdin.buffer)
    try:
        _shoot(request)
    except Exception as error:  # any: the parent gets the reason even if a renderer has the last word; raised on
        Path(request.folder, "reason").write_text(f"{type(error).__name__}: {error}")
        raise


@torch.inference_mode()
def _shoot(request: _Request) -> None:
    """Write film.mp4, poster.png and film.json into the request's folder."""
    folder, here = Path(request.folder), Path.cwd()
    os.chdir(folder)  # MuJoCo leaves a log where it fails
    writer: Any = None
    frames, stride, step_s, rate = 0, request.stride, None, 30.0  # steps per second of film
    with evaluate.evaluation_mode(request.policy, request.temperature):
        for index, env_seed in enumerate(evaluate.evaluation_seeds(request.seed, request.episodes)):
            with contextlib.chdir(here):  # a task may name its files from there
                env = request.make_env([env_seed])
                evaluate.tell(request.policy, getattr(env, "instructions", ()))
            try:
                obs = env.reset()
                if (step_s := getattr(env, "step_s", None)) is not None:
                    rate = 1.0 / step_s
                if stride is None:
                    steps = min(request.steps, env.max_episode_steps or request.steps)
                    affordable = max(10, math.floor(request.budget_s / _picture_s(env)))
                    stride = max(math.ceil(rate / 30 - 1e-9), math.ceil(request.episodes * steps / affordable))
                for picture in _pictures(env, obs, request, index, stride):
                    if writer is None:
                        imageio.imwrite(folder / "poster.png", picture)
                        writer = encoder(folder / "film.mp4", picture.shape[:2], rate / stride)
                    writer.send(picture)
                    frames += 1
            finally:
                env.close()  # before the next one is made: an abandoned OpenGL context freezes its successor
    writer.close()
    facts = {"frames": frames, "fps": round(rate / stride, 2) if stride else 0.0, "stride": stride, "step_s": step_s}
    (folder / "film.json").write_text(json.dumps(facts))


def _picture_s(env: VectorEnv) -> float:
    """CPU seconds of one picture; the first one, which also makes the OpenGL context, is not counted."""
    env.render()
    start = time.process_time()
    for _ in range(3):
        env.render()
    return max(1e-6, (time.process_time() - start) / 3)


def _pictures(env: VectorEnv, obs: Obs, request: _Request, index: int, stride: int) -> Iterator[np.ndarray]:
    """uint8 [H, W, 3], sides even, at the start and after every ``stride`` steps of one episode."""
    for t in range(request.steps):
        if t % stride == 0:
            picture = env.render().cpu().numpy()
            height, width, _ = picture.shape
            yield np.ascontiguousarray(np.pad(picture, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge"))
        action = evaluate.act(
            request.policy,
            obs,
            first=index,
            t=t,
            seed=request.seed,
            deterministic=request.deterministic,
            device=env.device,
        )
        step = env.step(action)
        if bool((step.terminated | step.truncated)[0]):
            return
        obs = step.obs
