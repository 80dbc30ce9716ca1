"""Run CleanRL's PPO and print greedy evaluations, for ``bench_time_to_return.py``.

    PYTHON scripts/time_to_return_cleanrl.py FILE TASK SEED

FILE is cleanrl/ppo_continuous_action.py of a checkout of CleanRL, run with its own settings (one
environment, one million steps). PYTHON needs torch, tensorboard, tyro and
gymnasium[mujoco]==0.29.1, because the file calls wrappers that later versions changed. Each line is
[environment steps, seconds of training, return].
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from torch.utils import tensorboard

UPDATES, EPISODES = 10, 10
"""Updates of 2,048 steps between two evaluations, and episodes of each."""


class Evaluator(tensorboard.SummaryWriter):  # pyright: ignore[reportPrivateImportUsage]
    """A ``SummaryWriter`` that evaluates the agent at the last scalar of an update.

    The time of evaluations does not count.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.start, self.updates = time.perf_counter(), 0

    def add_scalar(self, tag: str, *args: Any, **options: Any) -> None:
        super().add_scalar(tag, *args, **options)
        if tag != "charts/SPS":
            return
        self.updates += 1
        if self.updates % UPDATES == 0:
            now = time.perf_counter()
            score = evaluate(sys._getframe(1).f_locals)
            line = [args[1], round(now - self.start, 2), round(score, 1)]
            print(line, file=sys.__stdout__, flush=True)
            self.start += time.perf_counter() - now


def evaluate(training: Mapping[str, Any]) -> float:
    """Return the mean return of the mean action.

    Args:
        training: The file's variables; ``agent``, ``args`` and ``envs`` are read.
    """
    agent, normalizer = training["agent"], training["envs"].envs[0]
    while not isinstance(normalizer, gym.wrappers.NormalizeObservation):
        normalizer = normalizer.env
    mean, deviation = normalizer.obs_rms.mean, (normalizer.obs_rms.var + normalizer.epsilon) ** 0.5
    env: Any = gym.make(training["args"].env_id)
    total = 0.0
    for seed in range(EPISODES):
        obs, _ = env.reset(seed=10_000 + seed)
        ended = False
        while not ended:
            normal = torch.as_tensor((obs - mean) / deviation, dtype=torch.float32).clamp(-10, 10)
            with torch.no_grad():
                action = agent.actor_mean(normal).numpy()
            action = action.clip(env.action_space.low, env.action_space.high)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
    env.close()
    return total / EPISODES


def main() -> None:
    file, task, seed = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3]
    tensorboard.SummaryWriter = Evaluator  # pyright: ignore[reportPrivateImportUsage]
    sys.argv = [str(file), "--env-id", task, "--seed", seed, "--no-cuda"]
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        runpy.run_path(str(file), run_name="__main__")


if __name__ == "__main__":
    main()
