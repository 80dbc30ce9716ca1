"""Curves of the infos: means per step, sums per episode, limits and resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.types import Step
from embodied_ppo.core.types import Mean
from embodied_ppo.rollout.episode_statistics import InfoCurves

NAN = float("nan")


def steps(*infos: dict[str, Tensor] | None) -> list[Step]:
    none = torch.zeros(2)
    return [Step(none, none, none, none, none, info=info) for info in infos]


def flags(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=bool)


def test_means_and_sums_across_rollouts() -> None:
    """Environment 0 has episodes of 3 steps, environment 1 a masked row and none that ends."""
    infos = [{"a": torch.tensor(x)} for x in ([1.0, 10.0], [2.0, NAN], [4.0, 30.0], [8.0, 40.0])]
    counted = flags([1, 1], [1, 1], [1, 1], [1, 0])
    ended = flags([0, 0], [0, 0], [1, 0], [0, 0])
    curves = InfoCurves(2)
    for _ in range(2):
        metrics = curves.add(steps(*infos), counted, ended, ended)
        # (1 + 2 + 4 + 8 + 10 + 30) / 6
        assert metrics["env/a"] == Mean(55.0, 6.0)
        resumed = InfoCurves(2)
        resumed.load_state(curves.state())
        curves, first = resumed, metrics
    # The second episode of environment 0 began with the 8 of the first rollout.
    assert first["env/a/episode_sum"] == Mean(8.0 + 1 + 2 + 4, 1.0)


def test_single_numbers_and_chunks() -> None:
    """A single number is a mean over environments; a chunk has numbers of its C actions."""
    infos: Any = [
        {"log": torch.tensor([3.0]), "c": torch.tensor([[1.0, 2.0], [5.0, NAN]])},
        None,
        {"log": torch.tensor([5.0])},
    ]
    ended = flags([0, 0], [1, 1], [0, 0])
    assert InfoCurves(2).add(steps(*infos), flags(*[[1, 1]] * 3), ended, ended) == {
        "env/log": Mean(8.0, 2.0),
        "env/log/episode_sum": Mean(0.0, 0.0),
        "env/c": Mean(8.0, 3.0),
        "env/c/episode_sum": Mean(8.0, 2.0),
    }
