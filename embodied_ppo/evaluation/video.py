"""Videos (mp4) of evaluation episodes, rendered in a separate process."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn

from embodied_envs.types import VectorEnv
from embodied_ppo.core.finite import is_finite
from embodied_ppo.core.recurrent_state import EpisodeMemory
from embodied_ppo.core.types import Policy
from embodied_ppo.data.video_encoder import encoder
from embodied_ppo.evaluation import episodes as evaluate

_log = logging.getLogger(__name__)

MAX_FRAMES = 300  # Largest number of frames of a video. A frame takes 10 to 30 ms of CPU time.


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
    deadline_s: float = 300.0,
    notice: Callable[[str], None] | None = None,
) -> Video:
    """Record the beginnings of the first evaluation episodes as an mp4 (H.264, yuv420p).

    Recorded episode i is evaluated episode i: same seed, same actions. The stride is the smallest
    one that keeps to 30 frames per second of video and to MAX_FRAMES. The video plays at the
    simulation's speed if the simulator has ``step_s``, else at 30 steps per second.

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
        deadline_s: Seconds after which the process is ended.
        notice: Called with the reason if there is no video; None: log a warning.
    """
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(policy, nn.Module) and evaluate.policy_device(policy).type != "cpu":
        policy = copy.deepcopy(policy).cpu()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".video") as folder:
        acting = seed, deterministic, temperature
        render = functools.partial(
            _render, policy, make_env, Path(folder), *acting, episodes=episodes, steps=steps
        )
        if not (reason := _run_in_process(render, Path(folder), deadline_s)):
            facts = json.loads(Path(folder, "video.json").read_text())
            poster = Path(folder, "poster.png").read_bytes()
            Path(folder, "video.mp4").replace(path)  # atomic: same file system
            return Video(path=path, poster=poster, episodes=episodes, **facts)
    (notice or _log.warning)(f"no video: {reason}")
    return Video(path=None, reason=reason)


class RenderProcess:
    """A call that runs in a new interpreter, because a renderer may abort its process."""

    def __init__(self, render: Callable[[], None], folder: Path) -> None:
        """Start ``render()``.

        Args:
            render: A module's function or a partial of one, because it is pickled.
            folder: Existing folder for the call and its messages.

        Raises:
            ValueError: ``render`` cannot be pickled; the message has the reason.
        """
        try:
            (folder / "call.pickle").write_bytes(pickle.dumps(render))
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            # torch modules raise RuntimeError.
            raise ValueError(f"policy or make_env cannot go to another process: {error}") from error
        path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
        environment = os.environ | {"PYTHONPATH": path}
        # Mesa's software renderer takes a third less CPU time with one thread, in the same time.
        environment.setdefault("LP_NUM_THREADS", "1")
        environment.setdefault("OMP_NUM_THREADS", "1")
        self._errors = folder / "stderr"
        with (folder / "call.pickle").open("rb") as call, self._errors.open("wb") as stderr:
            self._child = subprocess.Popen(
                [sys.executable, "-c", f"import {__name__} as video; video._render_stdin()"],
                stdin=call,
                stdout=stderr,
                stderr=stderr,
                env=environment,
                start_new_session=True,  # killpg then also ends the encoder
            )

    def wait(self, timeout_s: float) -> str | None:
        """Return "" or the reason why the call failed; None: it has not ended in ``timeout_s``."""
        try:
            code = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        if code == 0:
            return ""
        # The last line of the traceback, or of what the renderer wrote before it aborted.
        text = self._errors.read_text(errors="replace") if self._errors.exists() else ""
        lines = text.strip().splitlines()
        message = lines[-1].strip() if lines else "the renderer ended without a message"
        return f"{message} (exit status {code})"

    def stop(self) -> None:
        """End the process if it runs."""
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()


def _run_in_process(render: Callable[[], None], folder: Path, deadline_s: float) -> str:
    """Call ``render`` in a new interpreter; return "" or the reason why there is no video."""
    try:
        process = RenderProcess(render, folder)
    except ValueError as error:
        return str(error)
    try:
        reason = process.wait(deadline_s)
    finally:
        process.stop()
    if reason is None:
        return f"not finished after {deadline_s:g} s; record fewer or shorter episodes"
    return reason


def _render_stdin() -> None:
    """Entry point of the rendering process, which reads the pickled call from stdin."""
    torch.set_num_threads(1)
    pickle.load(sys.stdin.buffer)()


@torch.inference_mode()
def _render(
    policy: Policy,
    make_env: Callable[[list[int]], VectorEnv],
    folder: Path,
    seed: int,
    deterministic: bool,
    temperature: float | None,
    *,
    episodes: int,
    steps: int,
) -> None:
    """Write video.mp4, poster.png and video.json into ``folder``; see ``record_video``."""
    working_directory = Path.cwd()
    os.chdir(folder)  # MuJoCo writes its error log into the working directory
    writer: Any = None
    frames, stride, step_s, rate = 0, 1, None, 30.0  # rate: steps per second of video
    with evaluate.evaluation_mode(policy, temperature):
        for index, env_seed in enumerate(evaluate.evaluation_seeds(seed, episodes)):
            with contextlib.chdir(working_directory):  # a task may use relative paths of its files
                env = make_env([env_seed])
                evaluate.set_instructions(policy, env.instructions)
            obs, memory = env.reset(), EpisodeMemory(policy, 1, evaluate.policy_device(policy))
            if (step_s := env.step_s) is not None:
                rate = 1.0 / step_s
            limit = min(steps, env.max_episode_steps or steps)
            stride = max(math.ceil(rate / 30 - 1e-9), math.ceil(episodes * limit / MAX_FRAMES))
            frame, succeeded, sentences = np.zeros(0), False, evaluate.sentences_of(env, obs)
            acting = {"first_episode": index, "seed": seed, "deterministic": deterministic}
            for t in range(steps):
                if t % stride == 0:
                    frame = _frame(env)
                    if sentences:
                        frame = _captioned(frame, sentences[0])
                    if writer is None:
                        imageio.imwrite(folder / "poster.png", frame)
                        writer = encoder(folder / "video.mp4", frame.shape[:2], rate / stride)
                    writer.send(frame)
                    frames += 1
                action, state = evaluate.act(policy, obs, memory, t=t, **acting)
                step = env.step(action.to(env.device))
                succeeded |= step.success is not None and bool(step.success[0])
                if bool((step.terminated | step.truncated)[0]) or not is_finite(step.obs):
                    break
                obs = step.obs
                sentences = evaluate.sentences_of(env, obs)
                memory.store(state)
            if sentences:  # half a second with the outcome
                last = _captioned(frame, f"{sentences[0]}: {'success' if succeeded else 'failure'}")
                count = max(1, round(rate / stride / 2))
                frames += count
                for _ in range(count):
                    writer.send(last)
            env.close()  # an open OpenGL context would block the next environment
    writer.close()
    facts = {"frames": frames, "fps": round(rate / stride, 2), "stride": stride, "step_s": step_s}
    (folder / "video.json").write_text(json.dumps(facts))


def _frame(env: VectorEnv) -> np.ndarray:
    """Return a picture of environment 0, uint8 [H, W, 3]; H and W are even for yuv420p."""
    image = env.render().cpu().numpy()
    height, width, _ = image.shape
    padding = ((0, height % 2), (0, width % 2), (0, 0))
    return np.ascontiguousarray(np.pad(image, padding, mode="edge"))


def _captioned(frame: np.ndarray, text: str) -> np.ndarray:
    """Return a picture uint8 [H, W, 3] with lines of text on its lower edge."""
    image = Image.fromarray(frame)
    lines = textwrap.wrap(text, max(8, image.width // 7))
    top, draw = image.height - 12 * len(lines) - 4, ImageDraw.Draw(image)
    draw.rectangle((0, top, image.width, image.height), fill="black")
    draw.text((4, top + 1), "\n".join(lines), fill="white", spacing=1)
    return np.array(image)


def render_poses(
    make_cameras: Callable[[], Any],
    poses: Sequence[Mapping[str, np.ndarray]],
    fps: float,
    folder: str,
) -> None:
    """Write video.mp4 of recorded poses.

    Args:
        make_cameras: Creates ``physics.cameras.Cameras``; training does not import MuJoCo for it.
        poses: POSE_FIELDS of MjData for each picture.
        fps: Pictures per second.
        folder: Existing folder.
    """
    cameras = make_cameras()
    writer = encoder(Path(folder, "video.mp4"), cameras.render_size, fps)
    for pose in poses:
        writer.send(cameras.render({k: x[None] for k, x in pose.items()}).numpy())
    writer.close()
    cameras.close()
