"""Train rl_games' PPO for a few steps with normalised observations and values, and save it."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this file has the name of the library

import gymnasium as gym
import numpy as np
import recording
import torch
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner


class GymnasiumEnv(IVecEnv):
    """Vector environment of Gymnasium as rl_games'."""

    def __init__(self, config_name: str, num_actors: int, **kwargs: Any) -> None:
        self.env = gym.make_vec(kwargs["task"], num_envs=num_actors)

    def reset(self) -> np.ndarray:
        return self.env.reset(seed=0)[0].astype(np.float32)

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, _ = self.env.step(np.asarray(actions))
        infos = {"time_outs": truncated}
        return obs.astype(np.float32), reward.astype(np.float32), terminated | truncated, infos

    def get_env_info(self) -> dict[str, Any]:
        spaces = self.env.single_observation_space, self.env.single_action_space
        return {"observation_space": spaces[0], "action_space": spaces[1], "agents": 1}


vecenv.register("GYMNASIUM", lambda name, actors, **kwargs: GymnasiumEnv(name, actors, **kwargs))


def parameters(task: str, folder: Path) -> dict[str, Any]:
    """Return the configuration of a run; the networks differ by task."""
    separate, fixed_sigma = task.startswith("Hopper"), not task.startswith("Ant")
    initial = {"name": "const_initializer", "val": 0}
    sigma = initial if fixed_sigma else {"name": "default"}
    return {
        "seed": 1,
        "algo": {"name": "a2c_continuous"},
        "model": {"name": "continuous_a2c_logstd"},
        "network": {
            "name": "actor_critic",
            "separate": separate,
            "space": {
                "continuous": {
                    "mu_activation": "None",
                    "sigma_activation": "None",
                    "mu_init": {"name": "default"},
                    "sigma_init": sigma,
                    "fixed_sigma": fixed_sigma,
                }
            },
            "mlp": {"units": [64, 32], "activation": "elu", "initializer": {"name": "default"}},
        },
        "config": {
            "name": task,
            "full_experiment_name": task,
            "train_dir": str(folder / "rl_games"),
            "env_name": task,
            "reward_shaper": {"scale_value": 1.0},
            "normalize_advantage": True,
            "gamma": 0.99,
            "tau": 0.95,
            "learning_rate": 3e-4,
            "lr_schedule": None,
            "score_to_win": 1e9,
            "max_epochs": 4,
            "save_best_after": 100,
            "save_frequency": 4,
            "grad_norm": 1.0,
            "entropy_coef": 0.0,
            "truncate_grads": True,
            "e_clip": 0.2,
            "horizon_length": 32,
            "num_actors": 4,
            "minibatch_size": 64,
            "mini_epochs": 2,
            "critic_coef": 2,
            "clip_value": True,
            "normalize_input": True,
            "normalize_value": True,
            "bounds_loss_coef": 0.0,
            "device": "cpu",
            "device_name": "cpu",
            "player": {"use_vecenv": True},
        },
    }


def produce(task: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """See ``recording.record``."""
    env_configurations.register(
        task, {"vecenv_type": "GYMNASIUM", "env_creator": lambda **kwargs: gym.make(task)}
    )
    params = parameters(task, folder)
    params["config"]["env_config"] = {"task": task}
    runner = Runner()
    runner.load({"params": params})
    runner.run({"train": True})
    files = (folder / "rl_games" / task / "nn").glob("*.pth")
    file = max(files, key=os.path.getmtime)
    player = runner.create_player()
    player.restore(str(file))

    def act(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        player.has_batch_dimension = True
        x = torch.from_numpy(obs)
        inputs = {"is_train": False, "prev_actions": None, "obs": x.clone(), "rnn_states": None}
        with torch.no_grad():
            values = player.model(inputs)["values"].numpy()
        return player.get_action(x, is_deterministic=True).numpy(), values

    with torch.no_grad():
        scale = torch.sqrt(player.model.value_mean_std.running_var.float() + 1e-5)
    options = ["model.activation=elu"]
    return {"file": file, "options": options, "value_unit": float(scale)}, act


recording.record(version("rl-games"), produce)
