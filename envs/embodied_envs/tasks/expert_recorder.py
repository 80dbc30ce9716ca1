"""Record demonstrations of Tabletop's scripted expert with the observations of obs=language.

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
from embodied_envs.base.errors import EnvError
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks.tabletop import Tabletop
from embodied_envs.tasks.tabletop_expert import Expert

# Actions per second: 3 physics steps of 1/60 s.
FPS = 20
# Names of the 12 numbers of obs=language (m, m/s).
STATE = (
    *("tool_x", "tool_y", "tool_z", "finger_left", "finger_right"),
    *("target_x", "target_y", "target_z", "target_finger"),
    *("velocity_x", "velocity_y", "velocity_z"),
)
# Names of an action's dimensions, each in [-1, 1]; see ``Tabletop``.
ACTION = ("x", "y", "z", "finger")


@dataclass(frozen=True)
class Episode:
    """One successful episode. Frame t is the observation before action t.

    Attributes:
        images: Camera -> uint8 [L, H, W, 3].
        state: float32 [L, 12], see STATE.
        action: float32 [L, 4], the expert's action, also where another one was executed.
        instruction: The sentence.
        family: Name of the kind of episode.
        attempt: Number among all episodes, failures included: episode attempt // N of environment
            attempt % N.
    """

    images: dict[str, np.ndarray]
    state: np.ndarray
    action: np.ndarray
    instruction: str
    family: str
    attempt: int


def seeds(seed: int, num_envs: int, start: int = 0) -> list[int]:
    """Return the seeds of the environments of ``record``, which depend on ``start``."""
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
    """Yield the first ``episodes`` successes of the scripted expert.

    Episodes are yielded in the order in which they started. In the order in which they ended, short
    ones would be overrepresented.

    Args:
        task_kwargs: Tabletop's families and split; obs is "language".
        episodes: Number of successes.
        seed: The episodes are a function of seed, start and num_envs, and of the floating-point
            arithmetic of the machine.
        num_envs: Number of environments, N.
        image_size: (H, W) of the cameras' images.
        cameras: Cameras to record.
        on_episode: Callback (family, success) for every episode that ends, failures included.
        noise: Probability that a step executes an action drawn uniformly from [-1, 1] instead of
            the expert's. The recorded action is always the expert's, so that a clone learns to
            recover (as in DART, Laskey et al. 2017, with other noise). With 0, the actions replayed
            from ``seeds`` repeat the episode. The expert succeeds in 99.9 % of episodes at 0,
            98.5 % at 0.05, 94 % at 0.1 and 83 % at 0.2, where the long families, gather and sort,
            exceed the time limit and become rare.
        start: Selects other episodes; a continued recording passes the number it has.
        randomize: Whether to randomise the domain within the task's ranges.
        num_threads: Threads of the simulator; None: the cores this process may use.

    Raises:
        EnvError: An option is invalid, or the expert succeeds in fewer than 10 % of the episodes.
    """
    if (obs := task_kwargs.get("obs", "language")) != "language":
        raise EnvError(f"leave env.kwargs.obs={obs!r} out: demonstrations are of obs=language")
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
        ended = _run_episodes(env, tuple(cameras), noise, generator, on_episode)
        for attempts, episode in enumerate(_in_order(ended), start=1):
            if episode is not None:
                yield episode
                done += 1
                if done == episodes:
                    return
            elif attempts >= 100 and done < 0.1 * attempts:
                count = f"{done} of {attempts} episodes"
                raise EnvError(f"lower noise={noise}: the expert succeeded in {count}")
    finally:
        env.close()


def _in_order(ended: Iterator[tuple[int, Episode | None]]) -> Iterator[Episode | None]:
    """Yield the episodes in the order of their attempts; None is a failure."""
    waiting: dict[int, Episode | None] = {}
    next_attempt = 0
    for attempt, episode in ended:
        waiting[attempt] = episode
        while next_attempt in waiting:
            yield waiting.pop(next_attempt)
            next_attempt += 1


def _run_episodes(
    env: MujocoEnv,
    cameras: Sequence[str],
    noise: float,
    generator: torch.Generator,
    on_episode: Callable[[str, bool], None] | None,
) -> Iterator[tuple[int, Episode | None]]:
    """Yield (attempt, episode) for every episode that ends; the episode of a failure is None."""
    task = env.task
    assert isinstance(task, Tabletop)
    expert, n = Expert(task, env.device), env.num_envs
    obs = env.reset()
    # Of the running episodes: observation and action.
    frames: list[list[tuple[Any, Tensor]]] = [[] for _ in range(n)]
    count = [0] * n
    while True:
        assert isinstance(obs, dict)
        action = expert(env.s).float()
        # Read before the step: a world that ends starts the next episode in the same step.
        instruction, kind = env.s["instruction"].tolist(), env.s["kind"].tolist()
        for i in range(n):
            frames[i].append(({name: obs[name][i] for name in ("state", *cameras)}, action[i]))
        is_noisy = torch.rand(n, 1, generator=generator) < noise
        noisy_action = 2 * torch.rand(n, 4, generator=generator) - 1
        step = env.step(torch.where(is_noisy, noisy_action, action))
        assert step.success is not None
        for i in (step.terminated | step.truncated).nonzero().flatten().tolist():
            success, attempt, family = bool(step.success[i]), count[i] * n + i, task.names[kind[i]]
            if on_episode is not None:
                on_episode(family, success)
            episode = None
            if success:
                observations, actions = zip(*frames[i], strict=True)
                episode = Episode(
                    images={name: _images(observations, name) for name in cameras},
                    state=torch.stack([x["state"] for x in observations]).numpy(),
                    action=torch.stack(actions).numpy(),
                    instruction=task.instructions[instruction[i]],
                    family=family,
                    attempt=attempt,
                )
            frames[i] = []
            yield attempt, episode
            count[i] += 1
        obs = step.obs


def _images(observations: Sequence[dict[str, Tensor]], camera: str) -> np.ndarray:
    """Return the images [L, H, W, 3] of a camera from observations with images [3, H, W]."""
    images = torch.stack([obs[camera] for obs in observations])
    return np.ascontiguousarray(images.permute(0, 2, 3, 1).numpy())
