"""Demonstrations of Tabletop by its scripted expert, as a policy with the camera and the sentence
would have seen them.

Shape letters: N environments, L frames of an episode, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import embodied_envs
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks.tabletop import Tabletop
from embodied_envs.tasks.tabletop_expert import Expert
from embodied_ppo.core.types import EnvError

STATE = (
    *("tool_x", "tool_y", "tool_z", "finger_left", "finger_right"),
    *("target_x", "target_y", "target_z", "target_finger"),
    *("velocity_x", "velocity_y", "velocity_z"),
)
"""The 12 numbers of obs=language (m, m/s)."""
ACTION = ("x", "y", "z", "finger")
"""Each in [-1, 1], see ``Tabletop``."""
FPS = 20
"""Actions per second: 3 physics steps of 1/60 s."""


@dataclass(frozen=True)
class Episode:
    """One success. Frame t holds what was seen before action t.

    images       camera -> uint8 [L, H, W, 3]
    state        float32 [L, 12], see STATE
    action       float32 [L, 4], the expert's for that state, also where another was executed
    instruction  the sentence
    family       the kind of episode
    attempt      its number among all episodes, failures counted: the (attempt // N)-th of
    environment attempt % N
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    instruction: str
    family: str
    attempt: int


def seeds(seed: int, num_envs: int, start: int = 0) -> list[int]:
    """Of the environments of ``record``; another ``start`` gives others."""
    return (np.random.SeedSequence([seed, start]).generate_state(num_envs) % 2**31).tolist()


def record(
    task_kwargs: Mapping[str, Any],
    *,
    episodes: int,
    seed: int,
    num_envs: int,
    image_size: tuple[int, int],
    cameras: Sequence[str] = ("front",),
    on_episode: Callable[[str, bool], None] | None = None,
    noise: float = 0.05,
    start: int = 0,
    randomize: bool = False,
    num_threads: int | None = None,
) -> Iterator[Episode]:
    """The first ``episodes`` successes of the scripted expert, failures left out.

    task_kwargs  Tabletop's: families, split; obs is "language"
    seed         episodes are a function of seed, start and num_envs (and of the machine's floating
    point)
    image_size   (H, W) of what the cameras show
    on_episode   told the family and whether it succeeded, of every episode that ends, failures
    included
    noise        probability with which a step executes, instead of the expert's action, one drawn
    uniformly from
                 [-1, 1]. What is recorded for that state is always the expert's, so a clone learns
                 to come back from where it did not mean to go (as in DART, Laskey et al. 2017, with
                 other noise). 0: executed as recorded, and then the actions, replayed from
                 ``seeds``, repeat the episode. The expert succeeds in
                 99.9 % of episodes at 0, 98.5 % at 0.05, 94 % at 0.1 and 83 % at 0.2, where it is
                 the long families, gather and sort, that run out of time and become rare
    start        another number gives other episodes: how many there are already, where a recording
    is continued
    randomize    domain randomisation, by the task's ranges

    Episodes come in the order in which they began, not that in which they ended: else the short
    ones would be overrepresented. Raises EnvError for an option that is refused, and where the
    expert hardly ever succeeds.
    """
    if not 0 <= noise < 1:
        raise EnvError(f"noise={noise} must be a probability, at least 0 and less than 1")
    if task_kwargs.get("obs", "language") != "language":
        raise EnvError(
            f"env.kwargs.obs={task_kwargs['obs']!r}: demonstrations are of obs=language; leave"
            " it out"
        )
    env = embodied_envs.make(
        Tabletop.id,
        num_envs=num_envs,
        seeds=seeds(seed, num_envs, start),
        simulator="mujoco",
        num_threads=num_threads,
        cameras=cameras,
        image_size=image_size,
        randomize=randomize,
        kwargs={**task_kwargs, "obs": "language"},
    )
    assert isinstance(env, MujocoEnv)
    try:
        generator = torch.Generator().manual_seed(seeds(seed, 1, start)[0])
        done = 0
        found = _attempts(env, tuple(cameras), noise, generator, on_episode)
        for attempts, episode in enumerate(_in_order(found), start=1):
            if episode is not None:
                yield episode
                done += 1
                if done == episodes:
                    return
            elif attempts >= 100 and done < 0.1 * attempts:
                raise EnvError(
                    f"env.id={Tabletop.id}: the expert succeeded in {done} of {attempts} episodes;"
                    f" lower noise={noise}"
                )
    finally:
        env.close()


def _in_order(found: Iterator[tuple[int, Episode | None]]) -> Iterator[Episode | None]:
    """By attempt; None for a failure."""
    waiting: dict[int, Episode | None] = {}
    turn = 0
    for attempt, episode in found:
        waiting[attempt] = episode
        while turn in waiting:
            yield waiting.pop(turn)
            turn += 1


def _attempts(
    env: MujocoEnv,
    cameras: Sequence[str],
    noise: float,
    generator: torch.Generator,
    on_episode: Callable[[str, bool], None] | None,
) -> Iterator[tuple[int, Episode | None]]:
    """Every episode as it ends: its number, and what was seen and done if it succeeded."""
    task = env.task
    assert isinstance(task, Tabletop)
    expert, n = Expert(task, env.device), env.num_envs
    obs = env.reset()
    frames: list[list[tuple[dict[str, Tensor], Tensor]]] = [
        [] for _ in range(n)
    ]  # of running episodes
    count = [0] * n
    while True:
        assert isinstance(obs, dict)
        action = expert(env.s).float()
        instruction, kind = (
            env.s["instruction"].tolist(),
            env.s["kind"].tolist(),
        )  # an end begins the next episode
        for i in range(n):
            frames[i].append(({name: obs[name][i] for name in ("state", *cameras)}, action[i]))
        elsewhere = torch.rand(n, 1, generator=generator) < noise
        step = env.step(
            torch.where(elsewhere, 2 * torch.rand(n, 4, generator=generator) - 1, action)
        )
        assert step.success is not None
        for i in (step.terminated | step.truncated).nonzero().flatten().tolist():
            success, attempt = bool(step.success[i]), count[i] * n + i
            if on_episode is not None:
                on_episode(task.names[kind[i]], success)
            seen, frames[i] = frames[i], []
            sentence, family = task.instructions[instruction[i]], task.names[kind[i]]
            yield attempt, _episode(seen, cameras, sentence, family, attempt) if success else None
            count[i] += 1
        obs = step.obs


def _episode(
    frames: Sequence[tuple[dict[str, Tensor], Tensor]],
    cameras: Sequence[str],
    instruction: str,
    family: str,
    attempt: int,
) -> Episode:
    """Pictures [3, H, W] become [H, W, 3]."""
    images = {
        name: np.ascontiguousarray(
            torch.stack([obs[name] for obs, _ in frames]).permute(0, 2, 3, 1).numpy()
        )
        for name in cameras
    }
    return Episode(
        images=images,
        state=torch.stack([obs["state"] for obs, _ in frames]).numpy(),
        action=torch.stack([action for _, action in frames]).numpy(),
        instruction=instruction,
        family=family,
        attempt=attempt,
    )
