"""What ``embodied_envs.make`` refuses: the message names the option, its value and a hint."""

from __future__ import annotations

from typing import Any

import pytest
import toy_envs

import embodied_envs
from embodied_ppo.core.types import EnvError

GYMNASIUM = {"simulator": "gymnasium"}
TORCH = {"simulator": "torch"}


def randomize(**ranges: Any) -> dict[str, Any]:
    return {"randomize": True, "ranges": ranges}


def realism(**options: Any) -> dict[str, Any]:
    return {"realism": options}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Every simulator
    ("HalfCheeta-v4", {}, "HalfCheetah.*gymnasium"),
    ("Track-v0", {}, "module:Track-v0"),
    ("no_such_module_at_all:X-v0", {}, "no_such_module_at_all"),
    ("CartPole-v1", {"simulator": "isaac"}, "isaac.*mujoco, warp, envpool, gymnasium"),
    ("CartPole-v1", {"seeds": [1]}, "1 seeds.*2"),
    ("CartPole-v1", {"num_threads": 0}, "num_threads.*0.*1"),
    ("CartPole-v1", {**GYMNASIUM, "num_threads": 2}, "num_threads.*2.*EnvPool"),
    ("HalfCheetah-v4", {"action_mapping": "tanh"}, "tanh.*rescale, clip, none"),
    ("HalfCheetah-v4", {"kwargs": {"frame_skips": 3}}, "frame_skips.*frame_skip"),
    ("CliffWalking-v0", {"max_episode_steps": 9}, "max_episode_steps.*9"),
    ("Go9x9-v1", {}, "player.*2"),
    ("PandaPickCube-v1", {"num_envs": 20_000, "seeds": list(range(20_000))}, "num_envs.*20000.*GB"),
    ("Go1JoystickFlatTerrain-v1", {}, r"privileged_state.*actor_obs=\[state\]"),
    ("Go1JoystickFlatTerrain-v1", {"obs_keys": ["stat"]}, "stat.*state"),
    # Batched simulators of torch
    ("torch_tasks:student", {}, r"critic.*critic_obs=\[student,critic\]"),
    ("torch_tasks:missing", TORCH, "torch_tasks:missing.*simulator=torch"),
    ("torch_tasks:cart", {**TORCH, "kwargs": {"far": 3}}, "'far': 3.*TypeError"),
    ("torch_tasks:Config", TORCH, "observation_space, action_space, reset"),
    ("torch_tasks:next_step", TORCH, "NEXT_STEP.*SAME_STEP"),
    # Interfaces of other packages
    ("foreign_interfaces:several", {}, "list.*several"),
    ("foreign_interfaces:INSTANCE", {}, "foreign_interfaces:Modern"),
    ("foreign_interfaces:Sb3Vec", {}, "Stable-Baselines3"),
    ("foreign_interfaces:DeepMind", {}, "shimmy"),
    ("foreign_interfaces:Brax", {}, "GymWrapper"),
    ("foreign_interfaces:Numbers", {"max_episode_steps": 3}, r"env\.max_episode_steps.*3"),
    ("foreign_interfaces:Team", {}, "PettingZoo.*agents"),
    # Tasks of this package
    ("toy_envs:Balance", {"kwargs": {"sensr": "angle"}}, r"env\.kwargs\.sensr.*sensor"),
    ("toy_envs:Balance", {"kwargs": {"sensor": "angel"}}, "angel.*angle"),
    ("toy_envs:Balance", {"kwargs": {"mjcf": "<mujoco><worldbody>"}}, "XML"),
    (
        "toy_envs:Balance",
        {"kwargs": {"mjcf": toy_envs.BALANCE.replace('joint="slide" g', 'joint="glide" g')}},
        "glide",
    ),
    ("toy_envs:Balance", {"cameras": ("eyes",)}, r"env\.cameras.*eyes.*eye, side"),
    ("toy_envs:Balance", {"ranges": {"mass": [1, 2]}}, "ranges.*randomize"),
    ("toy_envs:Balance", randomize(mas=[1, 2]), r"env\.ranges.*mas.*mass"),
    ("HalfCheetah", randomize(joint_offset=[0, 0.1]), "joint_offset.*reads_joints_from_state"),
    ("Go1Joystick", randomize(joint_offset=[0.1, 0]), r"env\.ranges\.joint_offset.*\[0\.1, 0\]"),
    ("toy_envs:Balance", realism(action_delay=-1), "action_delay.*-1"),
    ("toy_envs:Balance", realism(joint_delay=[2, 1]), r"joint_delay.*\[2, 1\]"),
    ("toy_envs:Balance", realism(obs_noise={"stat": 0.1}), "stat.*state"),
    ("toy_envs:Balance", realism(obs_dropout=2), "obs_dropout.*2"),
    ("toy_envs:Balance", realism(noise=1), r"env\.realism\.noise.*obs_noise"),
    (
        "toy_envs:Balance",
        {**realism(obs_noise={"eye": 0.1}), "cameras": ("eye",)},
        r"obs_noise\.eye",
    ),
    ("Hopper", realism(push_velocity=1), r"env\.realism\.push.*Hopper|Hopper.*push"),
    ("toy_envs:Drifter", realism(push_velocity=[2, 1]), r"push_velocity.*\[2, 1\]"),
    ("toy_envs:Drifter", realism(push_velocity=1), r"push_velocity.*max_episode_steps.*0\.8 s.*5"),
    ("Go1Rough", {"kwargs": {"level": 6}}, r"env\.kwargs\.level.*6.*curriculum, uniform.*0 to 5"),
    ("Tabletop", {"kwargs": {"families": ["reach", "stak"]}}, "stak.*stack"),
    ("Tabletop", {"kwargs": {"split": "test"}}, "split.*test.*unseen_combination"),
]
"""Environment, options of ``make``, and what the message must name in this order."""


@pytest.mark.parametrize(
    ("id", "options", "named"), REFUSED, ids=[f"{row[0]}-{i}" for i, row in enumerate(REFUSED)]
)
def test_message_names_the_option_in_one_line(id: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(EnvError, match=named) as error:
        embodied_envs.make(id, **{"num_envs": 2, "seeds": [0, 1], **options})
    assert "\n" not in str(error.value) or "mjcf" in options["kwargs"], "a message of MuJoCo"
