"""tabletop-bench: the episodes of its conditions, the measurement, and the check of results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from embodied_envs import tabletop_bench as bench
from embodied_envs.base.errors import EnvError
from embodied_envs.base.random import TRAINING_SEEDS
from embodied_envs.tasks.tabletop import Tabletop


def task(measurement: str) -> Tabletop:
    return Tabletop(**bench.task_kwargs(measurement))


def complete(**changes: Any) -> dict[str, Any]:
    """Return a result with 128 successes in every measurement."""
    measured = {
        name: {"episodes": 256, "successes": 128, "rate": 0.5, "ci95": [0.44, 0.56]}
        for name in bench.MEASUREMENTS
    }
    return bench.result("mine", measured, seed=0, env_steps=1000) | changes


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
    content = complete()
    for family in bench.FAMILIES[:3]:  # train = 3/6 · 1 + 3/6 · 0.5 = 0.75
        content["measurements"][f"train/{family}"]["successes"] = 256
    rates = bench.rates(content)
    assert rates["train"] == 0.75 and rates["train/reach"] == 1.0
    assert rates["score"] == pytest.approx((0.75 + 5 * 0.5) / 6)


def test_results_are_written_and_read(tmp_path: Path) -> None:
    content = complete(cpu_s=1.5, curve=[[0, 0.5], [1000, 0.6]])
    bench.write_result(tmp_path / "a" / "mine.json", content)
    assert bench.read_result(tmp_path / "a" / "mine.json") == content
    assert content["protocol"] == bench.PROTOCOL and "torch" in content["versions"]
    (tmp_path / "torn.json").write_text('{"a": ')
    with pytest.raises(EnvError, match=r"torn.json: cannot be read \(no JSON\)"):
        bench.read_result(tmp_path / "torn.json")
    with pytest.raises(EnvError, match=r"cannot be read \(No such file"):
        bench.read_result(tmp_path / "none.json")


def without(name: str) -> dict[str, Any]:
    content = complete()
    del content[name]
    return content


def with_counts(**counts: Any) -> dict[str, Any]:
    content = copy.deepcopy(complete())
    content["measurements"]["light"] |= counts
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "tabletop-bench"),
        (complete(protocol=0), "protocol.*0.*1"),
        (without("seed"), "seed"),
        (complete(seed="0"), "seed.*0.*whole"),
        (with_counts(episodes=255), "light.*255.*256"),
        (with_counts(successes=257), "light.*257.*256"),
        (complete(cpu_s=float("nan")), "cpu_s.*nan"),
        (complete(curve=[["a", "b"]]), "curve"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(content: Any, message: str) -> None:
    with pytest.raises(EnvError, match=f"^mine.json: .*{message}"):
        bench.check_result(json.loads(json.dumps(content)), "mine.json")
