"""Train Tabletop with Stable-Baselines3: a Gymnasium vector environment as its ``VecEnv``.

    pip install stable-baselines3 ./envs
    python scripts/examples/train_with_sb3.py 100000

``SB3VecEnv`` works for every ``embodied/NAME-v0``, for observations that are one array
("MlpPolicy") and for dictionaries with images and instructions ("MultiInputPolicy").
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.vec_env import (  # pyright: ignore[reportMissingImports]
    VecEnv,
    VecMonitor,
    VecNormalize,
)

import embodied_envs  # noqa: F401  registers embodied/NAME-v0


class SB3VecEnv(VecEnv):
    """A Gymnasium vector environment with ``AutoresetMode.SAME_STEP`` as Stable-Baselines3's.

    Both reset an ended episode in the same step. They differ in the infos: Stable-Baselines3 has
    one dictionary for each environment, with the names terminal_observation, TimeLimit.truncated
    and is_success.
    """

    def __init__(self, env: gym.vector.VectorEnv) -> None:
        assert env.metadata["autoreset_mode"] == gym.vector.AutoresetMode.SAME_STEP
        self.env: Any = env
        super().__init__(env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self) -> Any:
        """Start new episodes, with the seeds of ``seed(..)`` if it was called."""
        seeds = list(self._seeds)
        self._reset_seeds()
        return self.env.reset(seed=None if seeds[0] is None else seeds)[0]

    def step_async(self, actions: np.ndarray) -> None:
        """Store the actions of ``step_wait``."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Execute the actions."""
        obs, reward, terminated, truncated, info = self.env.step(self._actions)
        ended = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(ended):
            infos[i]["terminal_observation"] = info["final_obs"][i]
            infos[i]["TimeLimit.truncated"] = bool(truncated[i])
            if "success" in info:
                infos[i]["is_success"] = bool(info["success"][i])
        return obs, reward, ended, infos

    def close(self) -> None:
        """Free the simulation."""
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute, which all environments share."""
        return [getattr(self.env, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the vector environment."""
        setattr(self.env, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any:
        """Call a method of the vector environment."""
        return [getattr(self.env, method_name)(*args, **kwargs)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        """Return False: Gymnasium's wrappers of single environments do not apply."""
        return [False] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[np.ndarray]:
        """Return one image for each environment; make it with ``render_mode="rgb_array"``."""
        return self.env.render()


def main(steps: int, *, num_envs: int = 64, seed: int = 0) -> float:
    """Train on the family reach; return the share of the last 100 episodes that succeeded."""
    env = gym.make_vec("embodied/Tabletop-v0", num_envs=num_envs, families=["reach"])
    vector = VecNormalize(VecMonitor(SB3VecEnv(env)), norm_reward=False, gamma=0.98)
    model = PPO(
        "MlpPolicy",
        vector,
        n_steps=32,
        batch_size=256,
        n_epochs=8,
        gamma=0.98,
        learning_rate=1e-3,
        seed=seed,
        device="cpu",
    )
    model.learn(steps)
    episodes = list(model.ep_success_buffer)
    vector.close()
    return float(np.mean(episodes)) if episodes else 0.0


if __name__ == "__main__":
    print(f"success {main(int(sys.argv[1])):.2f}")
