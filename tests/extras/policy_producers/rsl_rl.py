"""Train rsl_rl's PPO for a few steps with normalised observations, and save the runner."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this file has the name of the library

import gymnasium as gym
import numpy as np
import recording
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict


class GymnasiumEnv(VecEnv):
    """Vector environment of Gymnasium as rsl_rl's."""

    def __init__(self, task: str, num_envs: int) -> None:
        self.env = gym.make_vec(task, num_envs=num_envs)
        self.num_envs, self.device, self.cfg = num_envs, "cpu", {}
        space = self.env.single_action_space
        assert isinstance(space, gym.spaces.Box)
        self.num_actions = space.shape[0]
        self.max_episode_length = 1000
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.obs, _ = self.env.reset(seed=0)

    def get_observations(self) -> TensorDict:
        obs = torch.as_tensor(self.obs, dtype=torch.float32)
        return TensorDict({"policy": obs}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> Any:
        self.obs, reward, terminated, truncated, _ = self.env.step(actions.numpy())
        done = torch.as_tensor(terminated | truncated)
        time_outs = {"time_outs": torch.as_tensor(truncated)}
        return self.get_observations(), torch.as_tensor(reward).float(), done.long(), time_outs


def produce(task: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """See ``recording.record``."""
    model = {"class_name": "MLPModel", "hidden_dims": [64, 32], "activation": "elu"}
    model |= {"obs_normalization": True}
    std_type = "log" if task.startswith("Hopper") else "scalar"
    distribution = {"class_name": "GaussianDistribution", "std_type": std_type}
    runner = OnPolicyRunner(
        GymnasiumEnv(task, 4),
        {
            "num_steps_per_env": 32,
            "save_interval": 100,
            "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
            "actor": model | {"distribution_cfg": distribution},
            "critic": dict(model, hidden_dims=[48]),
            "algorithm": {"class_name": "PPO"},
        },
    )
    runner.learn(4)
    runner.save(str(folder / f"{task}.pt"))
    policy = runner.get_inference_policy()

    def act(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inputs = TensorDict({"policy": torch.from_numpy(obs)}, batch_size=[len(obs)])
        with torch.no_grad():
            runner.alg.critic.eval()
            return policy(inputs).numpy(), runner.alg.critic(inputs).numpy()

    return {"file": folder / f"{task}.pt"}, act


recording.record(version("rsl-rl-lib"), produce)
