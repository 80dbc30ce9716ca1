"""Tests of videos: videos of real simulators are recorded and decoded."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import pytest
import torch

import embodied_envs
from embodied_envs.base import tree
from embodied_ppo.core.types import Decision
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation import video
from tests.evaluation.test_episodes import Linear, cartpole, make_pendulum


class Constant(Linear):
    """Policy with a constant action."""

    def __init__(self, *action: float) -> None:
        super().__init__(torch.zeros(1, 1), discrete=False)
        self.action = torch.tensor(action)

    def act(self, inputs: Any, *, noise: Any = None) -> Decision:
        rows = len(next(tree.leaves(inputs)))
        return Decision(self.action.expand(rows, -1), torch.zeros(rows), torch.zeros(rows))


def with_step_s(seeds: list[int], make: Any, step_s: float | None) -> Any:
    env = make(seeds)
    env.step_s = step_s
    return env


def make_failing_env(seeds: list[int], failure: str) -> Any:
    if failure == "killed":
        print("ERROR: the driver has failed", file=sys.stderr, flush=True)
        os._exit(1)
    if failure == "slow":
        time.sleep(60)
    if failure == "raises":
        raise RuntimeError("no\nscreen")
    # EnvPool loaded without a global libEGL: MuJoCo ends the process at the first frame.
    import envpool

    env = envpool.make_gymnasium("InvertedPendulum-v4", num_envs=1, render_mode="rgb_array")
    env.reset()
    return env.render()


def decode(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """Return the video's metadata and its frames, uint8 [F, H, W, 3]."""
    reader = imageio_ffmpeg.read_frames(str(path))
    facts: dict[str, Any] = next(reader)
    width, height = facts["size"]
    return facts, np.stack([np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in reader])


@pytest.mark.slow
def test_video_shows_the_evaluated_episodes(tmp_path) -> None:
    measured = evaluation.evaluate(Constant(0.3), make_pendulum, episodes=2, num_envs=2, seed=4)
    make_rendering = partial(make_pendulum, render=True, render_size=(64, 65))
    make = partial(with_step_s, make=make_rendering, step_s=0.04)
    recorded = video.record_video(
        Constant(0.3), make, path=tmp_path / "a" / "video.mp4", seed=4, steps=100
    )
    assert recorded.path == tmp_path / "a" / "video.mp4", recorded.reason
    facts, frames = decode(recorded.path)
    assert facts["codec"] == "h264" and facts["pix_fmt"].startswith("yuv420p")
    assert facts["size"] == (66, 64), "odd sides are padded: yuv420p halves them"
    assert facts["fps"] == recorded.fps == 25.0  # one frame per 0.04 s
    assert len(frames) == recorded.frames == sum(e.length for e in measured.episodes)
    changes = np.abs(frames[1:].astype(int) - frames[:-1]).max((1, 2, 3))
    assert (changes > 20).mean() > 0.5 and frames.std() > 5, "the pole falls"
    assert recorded.poster.startswith(b"\x89PNG")
    assert [p.name for p in recorded.path.parent.iterdir()] == ["video.mp4"], (
        "no temporary file is left"
    )


def make_tabletop(seeds: list[int], **options: Any) -> Any:
    options = {"kwargs": {"obs": "language"}, "max_episode_steps": 4, **options}
    return embodied_envs.make("Tabletop", num_envs=len(seeds), seeds=seeds, **options)


@pytest.mark.slow
def test_video_of_a_language_task_shows_sentence_and_outcome(tmp_path) -> None:
    still = Constant(0.0, 0.0, 0.0, 0.0)
    measured = evaluation.evaluate(still, make_tabletop, episodes=3, num_envs=3, seed=0)
    sentences = [e.sentence for e in measured.episodes]
    assert len(set(sentences)) == 3 and all(x and " " in x for x in sentences)
    make = partial(make_tabletop, render=True, render_size=(120, 160))
    recorded = video.record_video(
        still, make, path=tmp_path / "video.mp4", seed=0, episodes=1, steps=50
    )
    assert recorded.path is not None, recorded.reason
    _, frames = decode(recorded.path)
    outcome = round(recorded.fps / 2)
    assert len(frames) == recorded.frames == 4 + outcome
    # White letters on a black strip; the outcome adds some.
    strip = frames[:, -12:].astype(int).mean(-1)
    assert (strip < 60).mean() > 0.5 and (strip > 180).mean() > 0.01
    assert np.abs(strip[3] - strip[4]).max() > 100 > np.abs(strip[0] - strip[3]).max()


@pytest.mark.parametrize(
    ("id", "options", "seconds"),
    [
        ("Tabletop", {"kwargs": {"families": ["push"]}, "action_chunk": 4}, 0.2),
        ("Go1Joystick", {}, 0.02),
        ("InvertedPendulum-v5", {"simulator": "gymnasium"}, 0.04),
        ("CartPole-v1", {"simulator": "gymnasium"}, 0.02),
        ("CartPole-v1", {"simulator": "envpool"}, 0.02),
    ],
)
def test_simulators_have_the_duration_of_a_step(
    id: str, options: dict[str, Any], seconds: float | None
) -> None:
    env = embodied_envs.make(id, num_envs=1, seeds=[0], **options)
    step_s = getattr(env, "step_s", None)
    env.close()
    assert step_s == (seconds if seconds is None else pytest.approx(seconds, rel=1e-5))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("killed", r".*exit status 1.*"),
        ("raises", r"screen \(exit status 1\)"),
        ("slow", r".*1 s.*"),
    ],
)
def test_failure_is_a_warning_with_its_reason(tmp_path, caplog, failure: str, reason: str) -> None:
    make: Callable[[list[int]], Any] = partial(make_failing_env, failure=failure)
    deadline_s = 1 if failure == "slow" else 60
    with caplog.at_level(logging.WARNING):
        recorded = video.record_video(
            cartpole(), make, path=tmp_path / "f.mp4", seed=0, deadline_s=deadline_s
        )
    assert recorded.path is None and re.fullmatch(reason, recorded.reason)
    assert [r.getMessage() for r in caplog.records] == [f"no video: {recorded.reason}"]
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------- real runs
