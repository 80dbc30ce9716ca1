"""Train Stable-Baselines3's PPO for a few steps with VecNormalize, and save both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import recording
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize


def produce(task: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """See ``recording.record``."""
    vector = VecNormalize(DummyVecEnv([lambda: gym.make(task)] * 2))
    kwargs = {"ortho_init": False}  # larger actions
    if not task.startswith("Hopper"):
        kwargs |= {"activation_fn": torch.nn.ReLU, "net_arch": {"pi": [64, 32], "vf": [48]}}
    model = PPO(
        "MlpPolicy", vector, n_steps=256, n_epochs=2, seed=0, device="cpu", policy_kwargs=kwargs
    )
    model.learn(1024)
    model.save(folder / f"{task}.zip")
    vector.save(str(folder / f"{task}.pkl"))

    def act(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        normal = vector.normalize_obs(obs)
        with torch.no_grad():
            values = model.policy.predict_values(torch.as_tensor(normal))
        return model.predict(normal, deterministic=True)[0], values.numpy()

    return {"file": folder / f"{task}.zip", "normalizer": folder / f"{task}.pkl"}, act


recording.record(stable_baselines3.__version__, produce)
