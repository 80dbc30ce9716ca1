"""film: real films of real simulators, decoded back; the one encoder."""

from __future__ import annotations

import json
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
from torch import nn

import embodied_envs
from embodied_ppo.commands import main
from embodied_ppo.core.types import Decision
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation import video


class Lean(nn.Module):
    """CartPole: push towards the side the pole leans to. InvertedPendulum: do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def encode(self, obs: Any) -> Any:
        return obs

    def act(self, inputs: Any, *, noise: Any = None) -> Decision:
        rows = len(inputs)
        return Decision(
            (inputs[:, 2] * self.scale > 0).long(), torch.zeros(rows), torch.zeros(rows)
        )

    def noise(self, rows: int, generator: Any = None) -> Any: ...
    def evaluate(self, inputs: Any, action: Any, replay: Any) -> Any: ...
    def value(self, inputs: Any) -> Any: ...
    def parameter_groups(self) -> Any: ...
    def units(self) -> Any: ...
    def observe(self, obs: Any, mask: Any) -> None: ...


class Idle(Lean):
    def act(self, inputs: Any, *, noise: Any = None) -> Decision:
        rows = len(inputs)
        return Decision(torch.full((rows, 1), 0.3), torch.zeros(rows), torch.zeros(rows))


def make_cartpole(seeds: list[int], **options: Any) -> Any:
    return embodied_envs.make(
        "CartPole-v1", num_envs=len(seeds), seeds=seeds, num_threads=1, **options
    )


def make_pendulum(seeds: list[int], **options: Any) -> Any:
    return embodied_envs.make(
        "InvertedPendulum-v4", num_envs=len(seeds), seeds=seeds, num_threads=1, **options
    )


def with_clock(seeds: list[int], make: Any, step_s: float) -> Any:
    env = make(seeds)
    env.step_s = step_s
    return env


def make_nothing(seeds: list[int], how: str) -> Any:
    if how == "killed":
        print("ERROR: the driver is angry", file=sys.stderr, flush=True)
        os._exit(1)
    if how == "slow":
        time.sleep(60)
    if how == "raises":
        raise RuntimeError("no\nscreen")
    # EnvPool loaded without a global libEGL: MuJoCo ends the process at the first picture.
    import envpool

    env = envpool.make_gymnasium("InvertedPendulum-v4", num_envs=1, render_mode="rgb_array")
    env.reset()
    return env.render()


def decode(path: Path) -> tuple[dict[str, Any], np.ndarray]:
    """The film's facts and its frames, uint8 [F, H, W, 3]."""
    reader = imageio_ffmpeg.read_frames(str(path))
    facts: dict[str, Any] = next(reader)
    width, height = facts["size"]
    return facts, np.stack([np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in reader])


def test_a_film_of_the_evaluated_episodes(tmp_path: Path) -> None:
    measured = evaluation.evaluate(Idle(), make_pendulum, episodes=2, num_envs=2, seed=4)
    make = partial(
        with_clock, make=partial(make_pendulum, render=True, render_size=(64, 65)), step_s=0.04
    )
    made = video.record_video(Idle(), make, path=tmp_path / "a" / "film.mp4", seed=4, stride=1)
    assert made.path == tmp_path / "a" / "film.mp4", made.reason
    facts, frames = decode(made.path)
    assert facts["codec"] == "h264" and facts["pix_fmt"].startswith("yuv420p")
    assert facts["size"] == (66, 64), "odd sides are padded: yuv420p halves them"
    assert facts["fps"] == made.fps == 25.0  # one picture per 0.04 s
    assert len(frames) == made.frames == sum(e.length for e in measured.episodes), (
        "exactly the evaluated episodes"
    )
    moved = np.abs(frames[1:].astype(int) - frames[:-1]).max((1, 2, 3))
    assert (moved > 20).mean() > 0.5 and frames.std() > 5, "the pole falls"
    assert made.poster.startswith(b"\x89PNG")
    assert [p.name for p in made.path.parent.iterdir()] == ["film.mp4"], "nothing is left behind"


def shoot(folder: Path, step_s: float | None = None, **options: Any) -> dict[str, Any]:
    """What the filming process does, in this one: CartPole is drawn without OpenGL."""
    folder.mkdir()
    make = partial(make_cartpole, render=True, render_size=(64, 64))
    if step_s is not None:
        make = partial(with_clock, make=make, step_s=step_s)
    defaults: dict[str, Any] = {"episodes": 1, "steps": 30, "stride": None, "budget_s": 10.0}
    video._render(
        video._Request(
            Lean(),
            make,
            str(folder),
            seed=0,
            deterministic=True,
            temperature=None,
            **(defaults | options),
        )
    )
    return json.loads((folder / "video.json").read_text())


def test_the_stride_keeps_to_30_pictures_per_second_and_to_the_budget(tmp_path: Path) -> None:
    assert shoot(tmp_path / "a") == {"frames": 30, "fps": 30.0, "stride": 1, "step_s": None}
    assert shoot(tmp_path / "b", step_s=0.05) == {
        "frames": 30,
        "fps": 20.0,
        "stride": 1,
        "step_s": 0.05,
    }
    assert shoot(tmp_path / "c", step_s=0.008) == {
        "frames": 6,
        "fps": 25.0,
        "stride": 5,
        "step_s": 0.008,
    }
    # Without a budget 10 pictures remain: 2 episodes of at most 25 steps, one every 5.
    assert shoot(tmp_path / "d", episodes=2, steps=25, budget_s=0.0) == {
        "frames": 10,
        "fps": 6.0,
        "stride": 5,
        "step_s": None,
    }


@pytest.mark.parametrize(
    ("id", "options", "seconds"),
    [
        ("Tabletop", {"kwargs": {"families": ["push"]}, "action_chunk": 4}, 0.2),
        ("Go1Joystick", {}, 0.02),
        ("InvertedPendulum-v5", {"simulator": "gymnasium"}, 0.04),
        ("CartPole-v1", {"simulator": "gymnasium"}, 0.02),
        ("CartPole-v1", {"simulator": "envpool"}, None),
    ],
)
def test_simulators_say_how_long_a_step_is(
    id: str, options: dict[str, Any], seconds: float | None
) -> None:
    env = embodied_envs.make(id, num_envs=1, seeds=[0], **options)
    told = getattr(env, "step_s", None)
    env.close()
    assert told == (seconds if seconds is None else pytest.approx(seconds, rel=1e-5))


def test_equal_films_are_equal_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shoot(tmp_path / name)
        time.sleep(1.1)  # a date in the file would differ
    assert (tmp_path / "a" / "video.mp4").read_bytes() == (
        tmp_path / "b" / "video.mp4"
    ).read_bytes()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("killed", r"ERROR: the driver is angry \(exit status 1\)"),
        ("raises", r"RuntimeError: no screen"),
        ("slow", r"not finished after 1 s; record fewer or shorter episodes"),
        ("opengl", r"ERROR: an OpenGL platform library has not been loaded .* \(exit status 1\)"),
    ],
)
def test_no_film_is_a_warning_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, reason: str
) -> None:
    make: Callable[[list[int]], Any] = partial(make_nothing, how=how)
    with caplog.at_level(logging.WARNING):
        made = video.record_video(
            Lean(), make, path=tmp_path / "f.mp4", seed=0, deadline_s=1 if how == "slow" else 60
        )
    assert made.path is None and re.fullmatch(reason, made.reason)
    assert [r.getMessage() for r in caplog.records] == [f"no video: {made.reason}"]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_go_to_another_process_says_so(tmp_path: Path) -> None:
    made = video.record_video(
        Lean(), lambda seeds: make_cartpole(seeds, render=True), path=tmp_path / "f.mp4", seed=0
    )
    assert made.path is None and made.reason.startswith(
        "policy or make_env cannot go to another process: "
    )


# ---------------------------------------------------------------------------------------- real runs
def train(folder: str, *words: str) -> dict[str, Any]:
    """A run of one update in ``folder``; its summary."""
    small = [
        "updates=1",
        "eval_every=0",
        "env.num_envs=4",
        "algorithm.horizon=2",
        "algorithm.global_batch_size=8",
    ]
    small += ["evaluation.episodes=2", "evaluation.num_envs=2", "compile=never"]
    assert main.main(["train", *small, *words, f"run_dir={folder}"]) == 0
    return json.loads(Path(folder, "summary.json").read_text())


def test_tabletops_token_policy_is_filmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    small = [f"cloning.{x}" for x in ("steps=2", "foresight_steps=2", "episodes=6", "batch_size=4")]
    summary = train(
        "run", "experiment=tabletop_token", "model.width=16", "evaluation.video_size=64", *small
    )
    assert summary["video"] == "run/videos/step_000001.mp4"
    facts, frames = decode(Path(summary["video"]))
    # Each of 4 episodes: at most 100 steps, 4 to an action; untrained, few end early.
    assert facts["size"] == (64, 64) and 50 < len(frames) <= 4 * 25
    for channel in range(3):  # red, green and blue blocks and plates on a grey table
        others = np.delete(frames[0].astype(int), channel, axis=-1).max(-1)
        assert 10 < (frames[0, ..., channel] > others + 60).sum() < 1000
    assert (np.abs(frames[1:].astype(int) - frames[:-1]).max((1, 2, 3)) > 20).mean() > 0.5, (
        "the gripper moves"
    )


def test_a_run_without_a_film_says_why_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    point = ("env.id=toy_envs:toy_envs/Point-v0", "env.num_threads=0")
    assert train("run", *point, "evaluation.video_episodes=1")["video"] is None
    assert re.search(
        r" no video: EnvError: .* render=True needs render mode rgb_array",
        Path("run/log.txt").read_text(),
    )
    assert train("other", *point, "evaluation.video_episodes=0")["video"] is None
    assert " no video: evaluation.video_episodes=0\n" in Path("other/log.txt").read_text()
