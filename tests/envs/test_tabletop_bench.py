"""tabletop-bench: the episodes of its conditions, the measurement, and the check of results."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied_envs import tabletop_bench as bench
from embodied_envs.tasks.tabletop import Tabletop
from embodied_ppo.core.random import TRAINING_SEEDS
from embodied_ppo.core.types import EnvError


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
    assert bench.evaluation_seed("train/touch") == bench.evaluation_seed("train/reach") + 1


def test_camera_and_light_change_the_image_only() -> None:
    images, states = {}, {}
    for name in ("train/reach", "camera", "light"):
        env = bench.make_env(name, [TRAINING_SEEDS, TRAINING_SEEDS])
        obs = bench.observation(env, env.reset())
        env.close()
        assert torch.equal(obs["image"][0], obs["image"][1])  # equal seeds
        images[name], states[name] = obs["image"][0].float(), obs["state"][0]
        assert obs["image"].shape == (2, 3, 64, 64) and isinstance(obs["instruction"][0], str)
    for name in ("camera", "light"):
        assert torch.allclose(states[name], states["train/reach"])
        assert (images[name] - images["train/reach"]).abs().mean() > 2


@pytest.mark.slow
def test_a_controller_is_measured_equally_twice() -> None:
    """The policy lowers the tool, whatever the sentence is."""
    sentences: set[str] = set()

    def down(obs: bench.Observation) -> torch.Tensor:
        sentences.update(obs["instruction"])
        action = torch.zeros(len(obs["instruction"]), 4, 4)
        action[:, :, 2] = -1.0
        return action

    names = ["train/touch", "unseen_colour"]
    calls: list[str] = []
    first, second = (
        bench.evaluate(
            down,
            action_chunk=4,
            episodes=12,
            measurements=names,
            on_measured=lambda name, successes, episodes: calls.append(name),
        )
        for _ in range(2)
    )
    assert first == second and list(first) == names and calls == 2 * names
    assert first["train/touch"]["episodes"] == 12 and any("yellow" in x for x in sentences)
    low, high = first["train/touch"]["ci95"]
    assert low <= first["train/touch"]["rate"] <= high


def test_wrong_actions_and_measurements_are_refused() -> None:
    def flat(obs: bench.Observation) -> torch.Tensor:
        return torch.zeros(len(obs["instruction"]), 4)

    with pytest.raises(EnvError, match=r"shape \[1, 4\], expected \[1, 2, 4\]"):
        bench.evaluate(flat, action_chunk=2, episodes=1, measurements=["camera"])
    with pytest.raises(EnvError, match="'camra' is unknown; did you mean camera"):
        bench.evaluate(flat, episodes=1, measurements=["camra"])


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
        ([], "is no result of tabletop-bench"),
        (complete(benchmark="other"), "is no result of tabletop-bench"),
        (complete(protocol=0), "measured with protocol 0, this is protocol 1"),
        (without("seed"), "has no field 'seed'"),
        (complete(seed="0"), "seed='0' must be of type int"),
        (complete(cpu_s="1"), "must be of type int or float or null"),
        (complete(env_steps=True), "env_steps=True must be of type int"),
        (complete(measurements={}), "measurements has no 'train/reach'"),
        (with_counts(episodes=255), "light has 255 episodes; the protocol needs at least 256"),
        (with_counts(successes=257), "light has 257 successes of 256"),
        (with_counts(successes=None), "measurements has no 'light'"),
        (with_counts(successes=True), "measurements has no 'light'"),
        (complete(method=" "), "method=' ' must be one line"),
        (complete(method="a\nb"), "must be one line"),
        (complete(seed=-1), "seed=-1 must be a number from 0"),
        (complete(cpu_s=float("nan")), "cpu_s=nan must be a number from 0"),
        (complete(cpu_s=10**400), "must be a number from 0"),
        (complete(curve=[1, 2]), "curve has 1, which must be"),
        (complete(curve=[["a", "b"]]), r"curve has \['a', 'b'\], which must be"),
        (complete(curve=[[1, float("inf")]]), "curve has"),
    ],
)
def test_results_that_cannot_be_compared_are_refused(content: Any, message: str) -> None:
    with pytest.raises(EnvError, match=f"^mine.json: .*{message}"):
        bench.check_result(json.loads(json.dumps(content)), "mine.json")
