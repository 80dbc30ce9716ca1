"""tabletop-bench: a fixed protocol to measure policies that read images and instructions.

A policy reads a 64 x 64 image, the gripper's state and a sentence. Six families of Tabletop are
measured in six conditions, ``CONDITIONS``. No training sentence names the colour UNSEEN_COLOUR. The
episodes have fixed seeds, which training never uses. ``evaluate`` measures a policy, ``result``
returns the content of a result file, and ``read_result`` reads and checks a file of any trainer::

    from embodied_envs import tabletop_bench as bench

    measured = bench.evaluate(lambda obs: my_policy(obs["image"], obs["state"], obs["instruction"]))
    bench.write_result("mine.json", bench.result("my method", measured, seed=0, env_steps=250_000))
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
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

PROTOCOL = 1
"""Version of the protocol; results of different versions cannot be compared."""
NAME = "tabletop-bench"
FAMILIES = ("reach", "touch", "lift", "push", "put", "stack")
PAIRS = ("push", "put", "stack")
"""Families whose sentences name two objects; the others have no unseen combination."""
UNSEEN_COLOUR = "yellow"
CAMERA, IMAGE_SIZE = "front", 64
EPISODES = 256
"""Episodes of each measurement."""
NUM_ENVS = 64
"""Environments that are simulated together."""
FIRST_SEED = TRAINING_SEEDS + 0x3F000000
"""Simulator seed of the first episode. Seeds of training are smaller than TRAINING_SEEDS. The same
episodes are those of ``embodied-ppo evaluate`` with seed 16128."""
SEEDS_PER_MEASUREMENT = 1 << 16
"""Distance between the first seeds of two measurements."""
LARGEST = 1e18
"""Largest seed, number of steps or of seconds in a result."""


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
"""Name -> condition. Each condition is one measurement over its families, except "train", in which
each family is a separate measurement; see ``MEASUREMENTS``."""

MEASUREMENTS: dict[str, Condition] = {
    **{f"train/{name}": Condition(f"{name}, training", families=(name,)) for name in FAMILIES},
    **{name: c for name, c in CONDITIONS.items() if name != "train"},
}
"""Name of a measurement -> condition of its episodes."""

Observation: TypeAlias = "dict[str, Any]"
"""Observation of N environments: "image" uint8 [N, 3, 64, 64]; "state" float32 [N, 12] (positions
of the tool and the fingers and their targets in m, velocity of the tool in m/s); "instruction", a
list of N sentences."""
BenchPolicy: TypeAlias = Callable[[Observation], Any]
"""Function that maps an observation to actions in [-1, 1]: [N, 4], or [N, C, 4] with chunks."""


# ---------------------------------------------------------------------------------------- simulator
def task_kwargs(measurement: str = "train", obs: str = "language") -> dict[str, Any]:
    """Return the arguments of Tabletop for "train" or for one of MEASUREMENTS."""
    c = CONDITIONS["train"] if measurement == "train" else MEASUREMENTS[measurement]
    return {
        "families": list(c.families),
        "split": c.split,
        "obs": obs,
        "unseen_colour": UNSEEN_COLOUR,
    }


def make_env(
    measurement: str,
    seeds: list[int],
    *,
    action_chunk: int = 1,
    num_threads: int = 1,
) -> VectorEnv:
    """Return the environments of a measurement, one per seed, with images, state and sentences."""
    ranges = MEASUREMENTS[measurement].ranges
    neutral = neutral_ranges(list(Tabletop.ranges))
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
        ranges={**neutral, **ranges} if ranges else None,
        kwargs=task_kwargs(measurement),
    )


def seeds(measurement: str, episodes: int = EPISODES) -> list[int]:
    """Return the simulator seeds of a measurement; no two measurements share a seed."""
    first = FIRST_SEED + list(MEASUREMENTS).index(measurement) * SEEDS_PER_MEASUREMENT
    return list(range(first, first + episodes))


def observation(env: VectorEnv, obs: Any) -> Observation:
    """Convert the observation of a simulator to that of a ``BenchPolicy``."""
    sentences: tuple[str, ...] = env.instructions
    return {
        "image": obs[CAMERA],
        "state": obs["state"],
        "instruction": [sentences[i] for i in obs["instruction"].tolist()],
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
    on_measured: Callable[[str, int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Measure a policy; return measurement -> episodes, successes, rate and interval.

    An episode succeeds if the task reports success within its 100 steps. Seeds are fixed, so a
    deterministic policy has the same result in every call.

    Args:
        policy: See ``BenchPolicy``. It must not depend on earlier observations, because it is not
            informed when an episode starts or ends.
        action_chunk: Number of actions C that the policy returns per call; they are executed one
            after the other.
        episodes: Episodes of each measurement; ``check_result`` refuses fewer than EPISODES.
        measurements: Names of MEASUREMENTS.
        num_threads: Threads of the simulator.
        on_measured: Callback (measurement, successes, episodes).

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
        measured[name] = _rate(successes, episodes)
        if on_measured is not None:
            on_measured(name, successes, episodes)
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


def _rate(successes: int, episodes: int) -> dict[str, Any]:
    """Return the entry of a measurement in a result."""
    return {
        "episodes": episodes,
        "successes": successes,
        "rate": successes / episodes,
        "ci95": list(wilson_interval(successes, episodes)),
    }


# ------------------------------------------------------------------------------------------ results
def _is_number(x: Any) -> bool:
    """Return whether ``x`` is a number from 0 to LARGEST; NaN is not."""
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= LARGEST


def _is_count(x: Any) -> bool:
    """Return whether ``x`` is a whole number from 0 to LARGEST."""
    return _is_number(x) and isinstance(x, int)


def _is_curve(x: Any) -> bool:
    """Return whether ``x`` is a list of [env_steps, success rate]."""
    return isinstance(x, list) and all(
        isinstance(point, list) and len(point) == 2 and all(map(_is_number, point)) for point in x
    )


FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "benchmark": (lambda x: x == NAME, f"{NAME}, which tabletop_bench.result writes"),
    "protocol": (lambda x: x == PROTOCOL, f"{PROTOCOL}; measure the policy again"),
    # Name in the table.
    "method": (
        lambda x: isinstance(x, str) and bool(x.strip()) and x.isprintable(),
        "one line that is not empty",
    ),
    "seed": (_is_count, "a whole number from 0 to 1e18"),  # of the training
    # Steps of the simulator in training, after the demonstrations.
    "env_steps": (_is_count, "a whole number from 0 to 1e18"),
    # Name -> {"episodes", "successes", "rate", "ci95"}.
    "measurements": (lambda x: isinstance(x, dict), "an object"),
    "versions": (lambda x: isinstance(x, dict), "an object"),  # package -> version
    # CPU seconds of training and evaluation; null: not measured.
    "cpu_s": (lambda x: x is None or _is_number(x), "a number from 0 to 1e18, or null"),
    # Of evaluations in training; may be empty.
    "curve": (_is_curve, "a list of [env_steps, success rate]"),
    # Additional information, for example {"demonstrations": 3000}.
    "notes": (lambda x: isinstance(x, dict), "an object"),
}
"""Field of a result -> its check, and what it must be. Other fields are accepted and ignored."""


def result(
    method: str,
    measured: Mapping[str, Mapping[str, Any]],
    *,
    seed: int,
    env_steps: int,
    cpu_s: float | None = None,
    curve: Iterable[tuple[int, float]] = (),
    notes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of a result file, see FIELDS.

    Args:
        method: Name in the table.
        measured: Result of ``evaluate``.
        seed: Seed of the training.
        env_steps: Steps of the simulator in training, after the demonstrations.
        cpu_s: CPU seconds; None: not measured.
        curve: (env_steps, success rate) of evaluations during training.
        notes: Additional information, written as a JSON object.
    """
    versions = {"python": platform.python_version()}
    for name in ("torch", "mujoco", "numpy", "embodied-ppo"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "benchmark": NAME,
        "protocol": PROTOCOL,
        "method": method,
        "seed": seed,
        "env_steps": env_steps,
        "measurements": {name: dict(m) for name, m in measured.items()},
        "versions": versions,
        "cpu_s": cpu_s,
        "curve": [list(point) for point in curve],
        "notes": dict(notes or {}),
    }


def write_result(path: Path | str, content: Mapping[str, Any]) -> None:
    """Write a result file under a temporary name and rename it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    temporary.replace(path)


def read_result(path: Path | str, *, episodes: int = EPISODES) -> dict[str, Any]:
    """Read a result file and check it with ``check_result``.

    Raises:
        EnvError: The file cannot be read, or the result is invalid.
    """
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "no JSON"
        raise EnvError(f"{path}: cannot be read ({reason}); name a result of {NAME}") from error
    check_result(content, str(path), episodes=episodes)
    return content


def check_result(content: Any, label: str = "result", *, episodes: int = EPISODES) -> None:
    """Check that a result can be compared with other results.

    Args:
        content: Content of a result file.
        label: Name of the result in messages.
        episodes: Required episodes of each measurement.

    Raises:
        EnvError: A field or a measurement is missing or invalid, or has too few episodes.
    """
    result = content if isinstance(content, dict) else dict[str, Any]()
    for name, (is_valid, expected) in FIELDS.items():
        if name not in result or not is_valid(result[name]):
            shown = str(result.get(name))[:40]
            raise EnvError(f"{label}: {name}={shown} must be {expected}")
    for name in MEASUREMENTS:
        row = result["measurements"].get(name)
        counts: dict[str, Any] = row if isinstance(row, dict) else {}
        done, successes = (counts.get(k, -1) for k in ("episodes", "successes"))
        if not (_is_count(done) and _is_count(successes) and episodes <= done >= successes):
            raise EnvError(
                f"{label}: {name} has {successes} successes in {done} episodes; the protocol needs"
                f" at least {episodes} episodes, and no more successes"
            )


def rates(content: Mapping[str, Any]) -> dict[str, float]:
    """Return the success rates of all measurements, their mean "train", and the "score".

    "train" is the mean over the families, and the score is the mean over the six conditions.
    """
    counts = content["measurements"]
    success = {name: counts[name]["successes"] / counts[name]["episodes"] for name in MEASUREMENTS}
    success["train"] = fmean(success[f"train/{name}"] for name in FAMILIES)
    return {**success, "score": fmean(success[name] for name in CONDITIONS)}
