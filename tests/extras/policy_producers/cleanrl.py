"""An agent with the layout of CleanRL's ppo_continuous_action.py, after a few optimiser steps.

CleanRL is a collection of scripts and no package; its file is torch.save of the agent's state_dict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import recording
import torch
from torch import nn


class Agent(nn.Module):
    """The networks, named as in CleanRL."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()

        def network(outputs: int) -> nn.Sequential:
            hidden = [nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
            return nn.Sequential(*hidden, nn.Linear(64, outputs))

        self.critic = network(1)
        self.actor_mean = network(actions)
        self.actor_logstd = nn.Parameter(torch.zeros(1, actions))


def produce(task: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """See ``recording.record``."""
    torch.manual_seed(0)
    env = gym.wrappers.NormalizeObservation(gym.wrappers.ClipAction(gym.make(task)))
    env.action_space.seed(0)
    space = env.unwrapped.action_space
    assert isinstance(space, gym.spaces.Box) and env.observation_space.shape is not None
    agent = Agent(env.observation_space.shape[0], space.shape[0])
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    obs, _ = env.reset(seed=0)
    for _ in range(500):
        x = torch.as_tensor(obs, dtype=torch.float32).clip(-10, 10)
        obs, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        loss = (agent.critic(x) - float(reward)).square().mean()
        loss = loss + (agent.actor_mean(x) - float(reward)).square().mean()
        loss = loss + agent.actor_logstd.square().sum() - agent.actor_logstd.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if terminated or truncated:
            obs, _ = env.reset()
    rms = env.obs_rms
    torch.save(agent.state_dict(), folder / f"{task}.cleanrl_model")
    np.savez(folder / f"{task}_rms.npz", mean=rms.mean, var=rms.var, count=rms.count)

    def act(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        normal = np.clip((obs - rms.mean) / np.sqrt(rms.var + 1e-8), -10, 10)
        x = torch.as_tensor(normal, dtype=torch.float32)
        with torch.no_grad():
            actions, values = agent.actor_mean(x).numpy(), agent.critic(x).numpy()
        return np.clip(actions, space.low, space.high), values

    files = {"file": folder / f"{task}.cleanrl_model", "normalizer": folder / f"{task}_rms.npz"}
    return files, act


recording.record(f"layout of 1.0, torch {torch.__version__}", produce)
