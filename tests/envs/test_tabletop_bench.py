"""tabletop-bench: the episodes of its conditions, and the measurement."""

from __future__ import annotations

import pytest

from embodied_envs import tabletop_bench as bench
from embodied_envs.base.random import TRAINING_SEEDS
from embodied_envs.tasks.tabletop import Tabletop


def task(measurement: str) -> Tabletop:
    return Tabletop(**bench.task_kwargs(measurement))


def test_training_names_neither_the_unseen_colour_nor_the_measured_sentences() -> None:
    trained = set(Tabletop(**bench.task_kwargs()).instructions)
    assert not any(bench.UNSEEN_COLOUR in sentence for sentence in trained)
    for name in ("unseen_wording", "unseen_combination", "unseen_colour"):
        assert not trained & set(task(name).instructions), name
    for name in ("camera", "light", *(f"train/{family}" for family in bench.FAMILIES)):
        assert set(task(name).instructions) <= trained, name
    assert all(bench.UNSEEN_COLOUR in x for x in task("unseen_colour").instructions)


def test_measurements_share_no_episode_with_each_other_or_with_training() -> None:
    seeds = [seed for name in bench.MEASUREMENTS for seed in bench.seeds(name)]
    assert len(set(seeds)) == len(seeds) == 256 * 11
    assert min(seeds) >= TRAINING_SEEDS and max(seeds) < 2**31


def test_score_is_the_mean_of_six_conditions() -> None:
    measured = {name: {"episodes": 256, "rate": 0.5} for name in bench.MEASUREMENTS}
    for family in bench.FAMILIES[:3]:  # train = 3/6 · 1 + 3/6 · 0.5 = 0.75
        measured[f"train/{family}"]["rate"] = 1.0
    rates = bench.rates(measured)
    assert rates["train"] == 0.75 and rates["train/reach"] == 1.0
    assert rates["score"] == pytest.approx((0.75 + 5 * 0.5) / 6)
