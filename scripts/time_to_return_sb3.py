"""Train Stable-Baselines3's PPO and print greedy evaluations, for ``bench_time_to_return.py``.

    .venv-sb3/bin/python scripts/time_to_return_sb3.py TASK SEED

Each line is [environment steps, seconds of training, return]. The settings are those of
rl-baselines3-zoo, hyperparams/ppo.yml at commit 208b6fd.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.callbacks import (  # pyright: ignore[reportMissingImports]
    BaseCallback,
)
from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
    DummyVecEnv,
    VecNormalize,
)

WIDE = {
    "log_std_init": -2.0,
    "ortho_init": False,
    "activation_fn": torch.nn.ReLU,
    "net_arch": {"pi": [256, 256], "vf": [256, 256]},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "HalfCheetah-v4": {
        "batch_size": 64,
        "n_steps": 512,
        "gamma": 0.98,
        "learning_rate": 2.0633e-5,
        "ent_coef": 0.000401762,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.92,
        "max_grad_norm": 0.8,
        "vf_coef": 0.58096,
        "policy_kwargs": WIDE,
    },
    "Hopper-v4": {
        "batch_size": 32,
        "n_steps": 512,
        "gamma": 0.999,
        "learning_rate": 9.80828e-5,
        "ent_coef": 0.00229519,
        "clip_range": 0.2,
        "n_epochs": 5,
        "gae_lambda": 0.99,
        "max_grad_norm": 0.7,
        "vf_coef": 0.835671,
        "policy_kwargs": WIDE,
    },
    "Walker2d-v4": {
        "batch_size": 32,
        "n_steps": 512,
        "gamma": 0.99,
        "learning_rate": 5.05041e-5,
        "ent_coef": 0.000585045,
        "clip_range": 0.1,
        "n_epochs": 20,
        "gae_lambda": 0.95,
        "max_grad_norm": 1.0,
        "vf_coef": 0.871923,
    },
    "Ant-v4": {},
}
"""Task -> arguments of PPO; one environment, observations and rewards normalised."""
STEPS, EVERY, EPISODES = 1_000_000, 20_480, 10


class Evaluate(BaseCallback):
    """Evaluate the mean action every ``EVERY`` steps; the time of evaluations does not count."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.env = gym.make(task)
        self.start, self.next = time.perf_counter(), EVERY

    def _on_step(self) -> bool:
        if self.num_timesteps >= self.next:
            self.next += EVERY
            now = time.perf_counter()
            score = sum(self._episode(seed) for seed in range(EPISODES)) / EPISODES
            print([self.num_timesteps, round(now - self.start, 2), round(score, 1)], flush=True)
            self.start += time.perf_counter() - now
        return True

    def _episode(self, seed: int) -> float:
        """Return the return of one episode."""
        normalizer: Any = self.model.get_vec_normalize_env()
        obs, _ = self.env.reset(seed=10_000 + seed)
        total, ended = 0.0, False
        while not ended:
            action, _ = self.model.predict(normalizer.normalize_obs(obs), deterministic=True)
            obs, reward, terminated, truncated, _ = self.env.step(action)
            total += float(reward)
            ended = terminated or truncated
        return total


def main() -> None:
    task, seed = sys.argv[1], int(sys.argv[2])
    settings = SETTINGS[task]
    env = VecNormalize(DummyVecEnv([lambda: gym.make(task)]), gamma=settings.get("gamma", 0.99))
    model = PPO("MlpPolicy", env, seed=seed, device="cpu", **settings)
    model.learn(STEPS, callback=Evaluate(task))


if __name__ == "__main__":
    main()
