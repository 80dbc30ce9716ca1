"""Register our own tasks with Gymnasium: ``gym.make_vec("embodied/Tabletop-v0", num_envs=64)``."""

from __future__ import annotations

import gymnasium

NAMESPACE = "embodied/"

MAX_EPISODE_STEPS = {
    "HalfCheetah": 1000,
    "Hopper": 1000,
    "Walker2d": 1000,
    "Ant": 1000,
    "Humanoid": 1000,
    "PandaPickCube": 150,
    "Go1Joystick": 500,
    "Go1Rough": 500,
    "Tabletop": 100,
}
"""Task of ``tasks.OWN`` -> its ``max_episode_steps``. This module loads no task, and no torch."""


def gymnasium_id(name: str) -> str:
    """Return the id of one of our tasks at Gymnasium."""
    return f"{NAMESPACE}{name}-v0"


def own_name(id: str) -> str | None:
    """Return the task of ours that ``id`` names at Gymnasium, else None."""
    return next((name for name in MAX_EPISODE_STEPS if gymnasium_id(name) == id), None)


def register() -> None:
    """Register every task of ours; a second call has no effect."""
    for name, max_episode_steps in MAX_EPISODE_STEPS.items():
        if gymnasium_id(name) not in gymnasium.registry:
            gymnasium.register(
                gymnasium_id(name),
                entry_point="embodied_envs.gymnasium_api:TaskEnv",
                vector_entry_point="embodied_envs.gymnasium_api:TaskVectorEnv",
                max_episode_steps=max_episode_steps,
                kwargs={"task": name},
            )
