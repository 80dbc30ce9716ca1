"""Train Brax's PPO for a few steps, and save its parameters.

Its environment replays observations of the Gymnasium task, so that nothing but the policy is
compiled.
"""

from __future__ import annotations

import functools
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # this file has the name of the library

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import recording
from brax import envs
from brax.envs.base import Env, State
from brax.io import model
from brax.training.acme import running_statistics
from brax.training.agents.ppo import networks as ppo_networks
from brax.training.agents.ppo import train as ppo


class Replay(Env):
    """Returns recorded observations; the reward is highest for the action 0.3."""

    def __init__(self, obs: np.ndarray, actions: int) -> None:
        self.obs, self.actions = jnp.asarray(obs), actions

    def reset(self, rng: jax.Array) -> State:
        row = jax.random.randint(rng, (), 0, len(self.obs))
        zero = jnp.zeros(())
        return State(None, self.obs[row], zero, zero, {}, {"row": row})

    def step(self, state: State, action: jax.Array) -> State:
        row = (state.info["row"] + 1) % len(self.obs)
        info = {**state.info, "row": row}
        return state.replace(obs=self.obs[row], reward=-jnp.square(action - 0.3).mean(), info=info)

    @property
    def observation_size(self) -> int:
        return self.obs.shape[1]

    @property
    def action_size(self) -> int:
        return self.actions

    @property
    def backend(self) -> str:
        return "none"


def produce(task: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """See ``recording.record``."""
    space = gym.make(task).action_space
    assert isinstance(space, gym.spaces.Box)
    # Brax clamps no observation: of those that training has not seen, float32 has fewer digits.
    seen = np.concatenate([recording.observations(task, seed=seed) for seed in range(4)])
    env = Replay(seen, space.shape[0])
    kwargs: dict[str, Any] = {"policy_hidden_layer_sizes": (32, 32)}
    kwargs |= {"value_hidden_layer_sizes": (64, 48, 32)}
    if task.startswith("Ant"):
        kwargs["distribution_type"] = "normal"
    factory = functools.partial(ppo_networks.make_ppo_networks, **kwargs)
    _, params, _ = ppo.train(
        environment=env,
        num_timesteps=2048,
        episode_length=100,
        num_envs=8,
        batch_size=8,
        num_minibatches=4,
        unroll_length=16,
        num_updates_per_batch=2,
        learning_rate=1e-3,
        normalize_observations=True,
        network_factory=factory,
        num_evals=0,
        run_evals=False,
        wrap_env_fn=envs.training.wrap,
    )
    model.save_params(str(folder / f"{task}.params"), params)
    networks = factory(
        env.observation_size,
        env.action_size,
        preprocess_observations_fn=running_statistics.normalize,
    )
    policy = ppo_networks.make_inference_fn(networks)(params, deterministic=True)

    def act(obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        key = jax.random.PRNGKey(0)
        values = networks.value_network.apply(params[0], params[2], jnp.asarray(obs))
        return np.asarray(policy(jnp.asarray(obs), key)[0]), np.asarray(values)

    return {"file": folder / f"{task}.params"}, act


recording.record(version("brax"), produce)
