"""Videos (mp4) of evaluation episodes, rendered in a separate process."""

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

from embodied_ppo.core.recurrent_state import EpisodeMemory
from embodied_ppo.core.types import Obs, Policy, VectorEnv
from embodied_ppo.data.video_encoder import encoder
from embodied_ppo.evaluation import episodes as evaluate

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Video:
    """A video, or the reason why there is none.

    Attributes:
        path: The mp4 file, or None.
        poster: PNG of the first frame.
        frames: Number of frames.
        fps: Frames per second.
        stride: Steps from one frame to the next.
        episodes: Number of recorded episodes.
        step_s: Seconds of simulation per step; None if unknown.
        reason: Reason why ``path`` is None, else "".
    """

    path: Path | None
    poster: bytes = b""
    frames: int = 0
    fps: float = 0.0
    stride: int = 0
    episodes: int = 0
    step_s: float | None = None
    reason: str = ""


def record_video(
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
) -> Video:
    """Record the beginnings of the first evaluation episodes as an mp4 (H.264, yuv420p).

    Recorded episode i is evaluated episode i: same seed, same actions. MuJoCo's shadows take 60 ms
    per frame without a GPU. Therefore the first frames are timed, and the stride is the smallest
    one that keeps to 30 frames per second of video and to about ``budget_s``. The video plays at
    the simulation's speed if the simulator has ``step_s``, else at 30 steps per second.

    A renderer without working OpenGL aborts its process. Therefore a separate process renders; if
    it fails or exceeds the deadline, the reason goes to ``Video.reason`` and to ``notice``, and no
    exception is raised.

    Args:
        policy: The evaluated policy.
        make_env: Creates environments *with rendering* from seeds; a module's function or a partial
            of one, because it is pickled.
        path: The mp4 file to write.
        seed: Seed of the evaluation.
        deterministic: As in the evaluation.
        temperature: As in the evaluation.
        episodes: Number of episodes.
        steps: Largest number of steps per episode.
        stride: Steps from one frame to the next; None: as above.
        budget_s: CPU seconds for rendering (the start of the simulator takes 3 to 4 more).
        deadline_s: Seconds after which the process is ended.
        notice: Called with the reason if there is no video; None: log a warning.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".video") as folder:
        acting = (seed, deterministic, temperature)
        request = _Request(policy, make_env, folder, *acting, episodes, steps, stride, budget_s)
        if not (reason := _render_in_process(request, deadline_s)):
            facts = json.loads(Path(folder, "video.json").read_text())
            poster = Path(folder, "poster.png").read_bytes()
            Path(folder, "video.mp4").replace(path)  # atomic: same file system
            return Video(path=path, poster=poster, episodes=episodes, **facts)
    (notice or _log.warning)(f"no video: {reason}")
    return Video(path=None, reason=reason)


@dataclass(frozen=True, slots=True)
class _Request:
    """Arguments of the rendering process."""

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


def _render_in_process(request: _Request, deadline_s: float) -> str:
    """Run ``_render`` in a new interpreter; return "" or the reason why there is no video."""
    policy = request.policy
    if isinstance(policy, nn.Module) and evaluate.policy_device(policy).type != "cpu":
        request = dataclasses.replace(request, policy=copy.deepcopy(policy).cpu())
    try:
        message = pickle.dumps(request)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        # torch modules raise RuntimeError.
        return f"policy or make_env cannot go to another process: {error}"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)}
    # Mesa's software renderer takes a third less CPU time with one thread, and the same wall time.
    environment.setdefault("LP_NUM_THREADS", "1")
    environment.setdefault("OMP_NUM_THREADS", "1")
    errors = Path(request.folder, "stderr")
    with errors.open("wb") as stderr:
        child = subprocess.Popen(
            [sys.executable, "-c", f"import {__name__} as video; video._render_stdin()"],
            stdin=subprocess.PIPE,
            stdout=stderr,
            stderr=stderr,
            env=environment,
            start_new_session=True,  # killpg then also ends the encoder
        )
        try:
            child.communicate(message, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return f"not finished after {deadline_s:g} s; record fewer or shorter episodes"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if child.returncode == 0:
        return ""
    if (reason_file := Path(request.folder, "reason")).exists():
        return " ".join(reason_file.read_text().split())
    lines = errors.read_text(errors="replace").strip().splitlines()
    message = lines[-1].strip() if lines else "the renderer ended without a message"
    return f"{message} (exit status {child.returncode})"


def _render_stdin() -> None:
    """Entry point of the rendering process, which reads the pickled request from stdin."""
    torch.set_num_threads(1)
    request: _Request = pickle.load(sys.stdin.buffer)
    try:
        _render(request)
    except Exception as error:  # a file, because a renderer may write to stderr after the traceback
        Path(request.folder, "reason").write_text(f"{type(error).__name__}: {error}")
        raise


@torch.inference_mode()
def _render(request: _Request) -> None:
    """Write video.mp4, poster.png and video.json into the request's folder."""
    folder, working_directory = Path(request.folder), Path.cwd()
    os.chdir(folder)  # MuJoCo writes its error log into the working directory
    writer: Any = None
    frames, stride, step_s, rate = 0, request.stride, None, 30.0  # rate: steps per second of video
    with evaluate.evaluation_mode(request.policy, request.temperature):
        for index, env_seed in enumerate(evaluate.evaluation_seeds(request.seed, request.episodes)):
            with contextlib.chdir(working_directory):  # a task may use relative paths of its files
                env = request.make_env([env_seed])
                evaluate.set_instructions(request.policy, getattr(env, "instructions", ()))
            try:
                obs = env.reset()
                if (step_s := getattr(env, "step_s", None)) is not None:
                    rate = 1.0 / step_s
                if stride is None:
                    steps = min(request.steps, env.max_episode_steps or request.steps)
                    max_frames = max(10, math.floor(request.budget_s / _frame_s(env)))
                    stride = max(
                        math.ceil(rate / 30 - 1e-9),
                        math.ceil(request.episodes * steps / max_frames),
                    )
                for frame in _frames(env, obs, request, index, stride):
                    if writer is None:
                        imageio.imwrite(folder / "poster.png", frame)
                        writer = encoder(folder / "video.mp4", frame.shape[:2], rate / stride)
                    writer.send(frame)
                    frames += 1
            finally:
                env.close()  # an open OpenGL context would block the next environment
    writer.close()
    fps = round(rate / stride, 2) if stride else 0.0
    facts = {"frames": frames, "fps": fps, "stride": stride, "step_s": step_s}
    (folder / "video.json").write_text(json.dumps(facts))


def _frame_s(env: VectorEnv) -> float:
    """Return the CPU seconds of one frame."""
    env.render()  # creates the OpenGL context, so it is not timed
    start = time.process_time()
    for _ in range(3):
        env.render()
    return max(1e-6, (time.process_time() - start) / 3)


def _frames(
    env: VectorEnv, obs: Obs, request: _Request, index: int, stride: int
) -> Iterator[np.ndarray]:
    """Yield a frame, uint8 [H, W, 3], every ``stride`` steps; H and W are even for yuv420p."""
    memory = EpisodeMemory(request.policy, 1, evaluate.policy_device(request.policy))
    for t in range(request.steps):
        if t % stride == 0:
            image = env.render().cpu().numpy()
            height, width, _ = image.shape
            padding = ((0, height % 2), (0, width % 2), (0, 0))
            yield np.ascontiguousarray(np.pad(image, padding, mode="edge"))
        action, state = evaluate.act(
            request.policy,
            obs,
            memory,
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
        memory.store(state)
