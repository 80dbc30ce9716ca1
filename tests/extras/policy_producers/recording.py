"""What the scripts of this folder share: tasks, observations, and the recorded actions.

A script runs in the environment of its library, without our package: PYTHON SCRIPT.py FOLDER.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

TASKS = ("HalfCheetah-v5", "Hopper-v5", "Ant-v5")
# Observations that are recorded, of episodes with random actions.
ROWS = 256


def observations(task: str, rows: int = ROWS, seed: int = 1) -> np.ndarray:
    """Return observations of random actions, float32 [rows, D]."""
    env = gym.make(task)
    env.action_space.seed(seed)
    obs, _ = env.reset(seed=seed)
    found = []
    for _ in range(rows):
        found.append(obs)
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            obs, _ = env.reset()
    env.close()
    return np.asarray(found, dtype=np.float32)


def record(
    version: str, produce: Callable[[str, Path], tuple[dict[str, Any], Callable[..., Any]]]
) -> None:
    """Write FOLDER/TASK.npz and FOLDER/TASK.json for each task.

    Args:
        version: Version of the library.
        produce: Trains for a few steps and saves; ``(task, folder)`` -> the arguments of
            import-policy, and a function of observations [B, D] that returns the deterministic
            actions, in the simulator's units, and the values, or None.
    """
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for task in sys.argv[2:] or TASKS:
        arguments, act = produce(task, folder)
        obs = observations(task)
        actions, values = act(obs)
        arrays = {"obs": obs, "actions": np.asarray(actions, np.float64)}
        if values is not None:
            arrays["values"] = np.asarray(values, np.float64).reshape(-1)
        np.savez(folder / f"{task}.npz", **arrays)
        text = json.dumps({"version": version, **arguments}, default=str)
        (folder / f"{task}.json").write_text(text)
