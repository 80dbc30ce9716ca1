"""Register our own tasks with Gymnasium: ``gym.make_vec("embodied/Tabletop-v0", num_envs=64)``."""

from __future__ import annotations

import gymnasium

NAMESPACE = "embodied/"

LOCOMOTION = ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")
# env.id -> "module:Class" in ``tasks``, and ``max_episode_steps``. This module loads no task, and
# no torch.
OWN: dict[str, tuple[str, int]] = {
    **{name: (f"locomotion:{name}", 1000) for name in LOCOMOTION},
    "PandaPickCube": ("panda:PandaPickCube", 150),
    "Go1Joystick": ("go1:Go1Joystick", 500),
    "Go1Rough": ("go1_rough:Go1Rough", 500),
    "Tabletop": ("tabletop:Tabletop", 100),
}


def gymnasium_id(name: str) -> str:
    """Return the id of one of our tasks at Gymnasium."""
    return f"{NAMESPACE}{name}-v0"


def own_name(id: str) -> str | None:
    """Return the task of ours that ``id`` names at Gymnasium, else None."""
    return next((name for name in OWN if gymnasium_id(name) == id), None)


def register() -> None:
    """Register every task of ours; a second call has no effect."""
    for name, (_, max_episode_steps) in OWN.items():
        if gymnasium_id(name) not in gymnasium.registry:
            gymnasium.register(
                gymnasium_id(name),
                entry_point="embodied_envs.gymnasium_api:TaskEnv",
                vector_entry_point="embodied_envs.gymnasium_api:TaskVectorEnv",
                max_episode_steps=max_episode_steps,
                kwargs={"task": name},
            )
