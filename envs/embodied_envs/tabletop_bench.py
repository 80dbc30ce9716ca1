"""tabletop-bench: a fixed protocol to measure policies that read images and instructions.

A policy reads a 64 x 64 image, the gripper's state and a sentence. Six families of Tabletop are
measured in six conditions, ``CONDITIONS``. No training sentence names the colour UNSEEN_COLOUR. The
episodes have fixed seeds, which training never uses. ``evaluate`` measures a policy, ``rates``
returns its success rates and score::

    from embodied_envs import tabletop_bench as bench

    measured = bench.evaluate(lambda obs: my_policy(obs["image"], obs["state"], obs["instruction"]))
    print(bench.rates(measured)["score"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor

import embodied_envs
from embodied_envs.base.errors import EnvError, check_choice
from embodied_envs.base.intervals import wilson_interval
from embodied_envs.base.random import TRAINING_SEEDS
from embodied_envs.engines import neutral_ranges
from embodied_envs.tasks.tabletop import Tabletop
from embodied_envs.types import VectorEnv

NAME = "tabletop-bench"
FAMILIES = ("reach", "touch", "lift", "push", "put", "stack")
# Families whose sentences name two objects; the others have no unseen combination.
PAIRS = ("push", "put", "stack")
UNSEEN_COLOUR = "yellow"
CAMERA, IMAGE_SIZE = "front", 64
# Episodes of each measurement.
EPISODES = 256
# Environments that are simulated together.
NUM_ENVS = 64
# Simulator seed of the first episode. Seeds of training are smaller than TRAINING_SEEDS. The same
# episodes are those of ``embodied-ppo evaluate`` with seed 16128.
FIRST_SEED = TRAINING_SEEDS + 0x3F000000
# Distance between the first seeds of two measurements.
SEEDS_PER_MEASUREMENT = 1 << 16


@dataclass(frozen=True)
class Condition:
    """Differences between the episodes of a condition and the training episodes.

    Attributes:
        meaning: One-line description for tables.
        split: Split of the sentences, see ``tabletop_language.episodes``.
        families: Families whose episodes are mixed.
        ranges: Name in ``domain_randomization.RANGES`` -> range from which each episode draws a
            value; None: no randomization.
    """

    meaning: str
    split: str = "train"
    families: tuple[str, ...] = FAMILIES
    ranges: Mapping[str, tuple[float, float]] | None = None


# Name -> condition. Each condition is one measurement over its families, except "train", in which
# each family is a separate measurement; see ``MEASUREMENTS``.
CONDITIONS: dict[str, Condition] = {
    "train": Condition("sentences of the training"),
    "unseen_wording": Condition("other words for the same tasks", "unseen_wording"),
    "unseen_combination": Condition(
        "pairs of objects that no training sentence names together", "unseen_combination", PAIRS
    ),
    "unseen_colour": Condition(
        f"sentences that name {UNSEEN_COLOUR}, which no training sentence does", "unseen_colour"
    ),
    "camera": Condition(
        "the camera is moved by up to 3 cm along each axis and turned by up to 0.03 rad about each",
        ranges={"camera_position": (-0.03, 0.03), "camera_angle": (-0.03, 0.03)},
    ),
    "light": Condition(
        "light scaled by 0.5 to 1.5, red, green and blue of all objects shifted by up to 0.1",
        ranges={"light": (0.5, 1.5), "colour": (-0.1, 0.1)},
    ),
}

# Name of a measurement -> condition of its episodes.
MEASUREMENTS: dict[str, Condition] = {
    **{f"train/{name}": Condition(f"{name}, training", families=(name,)) for name in FAMILIES},
    **{name: c for name, c in CONDITIONS.items() if name != "train"},
}

# Observation of N environments: "image" uint8 [N, 3, 64, 64]; "state" float32 [N, 12] (positions of
# the tool and the fingers and their targets in m, velocity of the tool in m/s); "instruction", a
# list of N sentences.
Observation: TypeAlias = "dict[str, Any]"
# Function that maps an observation to actions in [-1, 1]: [N, 4], or [N, C, 4] with chunks.
BenchPolicy: TypeAlias = Callable[[Observation], Any]


# ---------------------------------------------------------------------------------------- simulator
def task_kwargs(measurement: str = "train", obs: str = "language") -> dict[str, Any]:
    """Return the arguments of Tabletop for "train" or for one of MEASUREMENTS."""
    c = CONDITIONS["train"] if measurement == "train" else MEASUREMENTS[measurement]
    families, split = list(c.families), c.split
    return {"families": families, "split": split, "obs": obs, "unseen_colour": UNSEEN_COLOUR}


def make_env(
    measurement: str, seeds: list[int], *, action_chunk: int = 1, num_threads: int = 1
) -> VectorEnv:
    """Return the environments of a measurement, one per seed, with images, state and sentences."""
    ranges = MEASUREMENTS[measurement].ranges
    return embodied_envs.make(
        Tabletop.id,
        num_envs=len(seeds),
        seeds=seeds,
        simulator="mujoco",
        num_threads=num_threads,
        action_chunk=action_chunk,
        cameras=(CAMERA,),
        image_size=(IMAGE_SIZE, IMAGE_SIZE),
        randomize=bool(ranges),
        ranges={**neutral_ranges(list(Tabletop.ranges)), **ranges} if ranges else None,
        kwargs=task_kwargs(measurement),
    )


def seeds(measurement: str, episodes: int = EPISODES) -> list[int]:
    """Return the simulator seeds of a measurement; no two measurements share a seed."""
    first = FIRST_SEED + list(MEASUREMENTS).index(measurement) * SEEDS_PER_MEASUREMENT
    return list(range(first, first + episodes))


def observation(env: VectorEnv, obs: Any) -> Observation:
    """Convert the observation of a simulator to that of a ``BenchPolicy``."""
    return {
        "image": obs[CAMERA],
        "state": obs["state"],
        "instruction": [env.instructions[i] for i in obs["instruction"].tolist()],
    }


# -------------------------------------------------------------------------------------- measurement
@torch.no_grad()
def evaluate(
    policy: BenchPolicy,
    *,
    action_chunk: int = 1,
    episodes: int = EPISODES,
    measurements: Iterable[str] = tuple(MEASUREMENTS),
    num_threads: int = 1,
) -> dict[str, dict[str, Any]]:
    """Measure a policy; return measurement -> episodes, successes, rate and interval.

    An episode succeeds if the task reports success within its 100 steps. Seeds are fixed, so a
    deterministic policy has the same result in every call.

    Args:
        policy: See ``BenchPolicy``. It must not depend on earlier observations, because it is not
            informed when an episode starts or ends.
        action_chunk: Number of actions C that the policy returns per call; they are executed one
            after the other.
        episodes: Episodes of each measurement; published scores have EPISODES.
        measurements: Names of MEASUREMENTS.
        num_threads: Threads of the simulator.

    Raises:
        EnvError: A measurement is unknown, or the actions have another shape.
    """
    measured: dict[str, dict[str, Any]] = {}
    for name in measurements:
        check_choice(f"{NAME}: measurement", name, MEASUREMENTS)
        all_seeds, successes = seeds(name, episodes), 0
        for first in range(0, episodes, NUM_ENVS):
            block = all_seeds[first : first + NUM_ENVS]
            env = make_env(name, block, action_chunk=action_chunk, num_threads=num_threads)
            try:
                successes += int(_run_block(env, policy, action_chunk).sum())
            finally:
                env.close()
        measured[name] = {
            "episodes": episodes,
            "successes": successes,
            "rate": successes / episodes,
            "ci95": list(wilson_interval(successes, episodes)),
        }
    return measured


def _run_block(env: VectorEnv, policy: BenchPolicy, action_chunk: int) -> Tensor:
    """Return whether the first episode of each world succeeds, bool [N]."""
    obs = env.reset()
    shape = (env.num_envs, *([action_chunk] if action_chunk > 1 else []), 4)
    success = torch.zeros(env.num_envs, dtype=torch.bool)
    running = ~success
    while bool(running.any()):
        action = torch.as_tensor(policy(observation(env, obs)), dtype=torch.float32)
        if tuple(action.shape) != shape:
            raise EnvError(
                f"{NAME}: the policy returned actions of shape {list(action.shape)}, expected"
                f" {list(shape)}"
            )
        step = env.step(action)
        assert step.success is not None
        success |= step.success & running
        running &= ~(step.terminated | step.truncated)
        obs = step.obs
    return success


def rates(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the success rates of all measurements, their mean "train", and the "score".

    "train" is the mean over the families, and the score is the mean over the six conditions.

    Args:
        measured: Result of ``evaluate`` with all measurements.
    """
    success = {name: float(measured[name]["rate"]) for name in MEASUREMENTS}
    success["train"] = fmean(success[f"train/{name}"] for name in FAMILIES)
    return {**success, "score": fmean(success[name] for name in CONDITIONS)}
