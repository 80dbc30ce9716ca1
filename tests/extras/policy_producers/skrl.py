"""Train skrl's PPO for a few steps with normalised observations and values, and save the agent."""

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
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, GaussianMixin, Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.model_instantiators.torch import (
    deterministic_model,
    gaussian_model,
    shared_model,
)
from torch import nn

SPACES = ("observation_space", "state_space", "action_space")


class Policy(GaussianMixin, Model):
    """A model as the documentation of skrl writes it."""

    def __init__(self, **kwargs: Any) -> None:
        Model.__init__(self, **kwargs)
        GaussianMixin.__init__(self)
        self.net = nn.Sequential(nn.Linear(self.num_observations, 64), nn.ELU())
        self.mean_layer = nn.Linear(64, self.num_actions)
        self.log_std_parameter = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
        mean = self.mean_layer(self.net(inputs["observations"]))
        return mean, {"log_std": self.log_std_parameter}


class Value(DeterministicMixin, Model):
    """The same of the value."""

    def __init__(self, **kwargs: Any) -> None:
        Model.__init__(self, **kwargs)
        DeterministicMixin.__init__(self)
        self.net = nn.Sequential(nn.Linear(self.num_observations, 32), nn.ELU(), nn.Linear(32, 1))

    def compute(self, inputs: dict[str, Any], role: str = "") -> Any:
        return self.net(inputs["observations"]), {}


def models(task: str, env: Any) -> dict[str, Any]:
    """Return policy and value: of the user's classes, of the instantiators, or shared."""
    common = {name: getattr(env, name) for name in SPACES} | {"device": "cpu"}
    if task.startswith("Ant"):
        return {"policy": Policy(**common), "value": Value(**common)}
    network = [{"name": "net", "input": "OBSERVATIONS", "layers": [64, 32], "activations": "elu"}]
    gaussian: dict[str, Any] = {"network": network, "output": "ACTIONS"}
    if task.startswith("Hopper"):
        shared = shared_model(
            **common,
            structure=["GaussianMixin", "DeterministicMixin"],
            roles=["policy", "value"],
            parameters=[gaussian, {"network": network, "output": "ONE"}],
        )
        return {"policy": shared, "value": shared}
    return {
        "policy": gaussian_model(**common, **gaussian),
        "value": deterministic_model(**common, network=network, output="ONE"),
    }


def produce(task: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """See ``recording.record``."""
    torch.manual_seed(0)
    env = wrap_env(gym.make_vec(task, num_envs=4))
    cfg = PPO_CFG()
    cfg.rollouts, cfg.learning_epochs, cfg.mini_batches = 32, 2, 2
    cfg.observation_preprocessor = RunningStandardScaler
    cfg.observation_preprocessor_kwargs = {"size": env.observation_space}
    cfg.value_preprocessor, cfg.value_preprocessor_kwargs = RunningStandardScaler, {"size": 1}
    cfg.experiment.write_interval = cfg.experiment.checkpoint_interval = 0
    agent = PPO(
        models=models(task, env),
        memory=RandomMemory(memory_size=32, num_envs=4, device="cpu"),
        cfg=cfg,
        observation_space=env.observation_space,
        state_space=env.state_space,
        action_space=env.action_space,
        device="cpu",
    )
    trainer = SequentialTrainer(
        env=env, agents=agent, cfg={"timesteps": 128, "headless": True, "disable_progressbar": True}
    )
    trainer.train()
    agent.save(str(folder / f"{task}.pt"))
    agent.enable_training_mode(False)

    def act(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = agent._observation_preprocessor(torch.from_numpy(obs))
        with torch.no_grad():
            _, outputs = agent.policy.act({"observations": x}, role="policy")
            values, _ = agent.value.act({"observations": x}, role="value")
            values = agent._value_preprocessor(values, inverse=True)
        return outputs["mean_actions"].numpy(), values.numpy()

    scale = float(agent._value_preprocessor.running_variance.sqrt())
    options = ["model.activation=elu"]
    return {"file": folder / f"{task}.pt", "options": options, "value_unit": scale}, act


recording.record(version("skrl"), produce)
