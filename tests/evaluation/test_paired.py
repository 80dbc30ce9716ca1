"""Evaluation in pairs: difference and interval by hand, equal episodes, the command, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from run_helpers import assert_refused
from served_policies import write_pi0

import embodied_envs
from embodied_ppo.commands import main
from embodied_ppo.evaluation import paired
from embodied_ppo.evaluation.episodes import Episode, EvaluationResult


def result(successes: list[bool]) -> EvaluationResult:
    episodes = (Episode(i, i, "", 0.0, 10, x, "truncated") for i, x in enumerate(successes))
    return EvaluationResult("task", 0, True, tuple(episodes))


def test_difference_of_pairs_by_hand() -> None:
    """40 pairs, of which 20 succeed only without and none only with the perturbation.

    Bonett and Price: p = 1/42, q = 21/42, p - q ± 1.96 √((p + q - (p - q)²) / 42).
    """
    nominal = result([True] * 30 + [False] * 10)
    changed = {"light": result([True] * 10 + [False] * 30), "camera": nominal}
    light, camera = paired.compare(nominal, changed)["rows"]
    assert light["difference"] == -0.5 and light["decided"]
    p, q = 1 / 42, 21 / 42
    half = 1.959964 * ((p + q - (p - q) ** 2) / 42) ** 0.5
    assert light["ci95"] == pytest.approx([p - q - half, p - q + half], abs=1e-5)
    assert camera["difference"] == 0 and not camera["decided"]
    content = paired.compare(nominal, changed)
    assert [line.split(":")[0] for line in paired.undecided(content)] == ["camera"]
    assert [row[0] for row in paired.rows(content)] == ["perturbation", "light", "camera"]
    numbers = replace(nominal, episodes=tuple(replace(e, success=None) for e in nominal.episodes))
    assert paired.compare(numbers, {"light": numbers})["metric"] == "return"
    (light,) = paired.compare(nominal, {"light": numbers})["rows"]  # an info with successes only
    assert (light["mean"], light["difference"]) == (0, -0.75)


@pytest.mark.slow
def test_episodes_of_a_pair_start_alike() -> None:
    """Only what the perturbation names differs in the initial states of the same seeds."""

    def start(**kwargs: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor, tuple[str, ...]]:
        options: dict[str, Any] = {"families": ["push"], "obs": "language", **kwargs}
        env = embodied_envs.make(
            "Tabletop", num_envs=4, seeds=[5, 6, 7, 8], cameras=["front"], kwargs=options
        )
        obs: Any = env.reset()
        simulator: Any = env.simulator
        qpos = simulator.s["qpos"].clone()
        sentences = tuple(env.instructions[i] for i in obs["instruction"].tolist())
        env.close()
        return obs, qpos, sentences

    obs, qpos, sentences = start()
    other, same, words = start(split="unseen_wording")
    assert torch.equal(qpos, same) and torch.equal(obs["front"], other["front"])
    for a, b in zip(sentences, words, strict=True):
        colours = [w for w in ("red", "green", "blue", "yellow") if w in a]
        assert a != b and all(colour in b for colour in colours)
    other, same, words = start(distractors=True)
    assert torch.equal(qpos, same) and sentences == words
    assert not torch.equal(obs["front"], other["front"])
    _, moved, words = start(jitter=2.0)
    offset = (moved - qpos)[:, 5:].unflatten(1, (4, 7))[:, :, :2].abs()
    assert sentences == words and 0 < float(offset.max()) <= 0.012 + 1e-6


@pytest.mark.slow
def test_evaluate_writes_table_picture_and_lines(tmp_path, capsys) -> None:
    run = write_pi0(tmp_path / "pi0")
    capsys.readouterr()
    names = list(paired.PERTURBATIONS)
    options = ["video=false", f"out={tmp_path / 'out'}", f"checkpoint={run}"]
    command = ["evaluate", *options, "episodes=3", "num_envs=3", f"paired=[{','.join(names)}]"]
    assert main.main(command) == 0
    output = capsys.readouterr().out
    assert "95 % interval" in output and "wording: 3 episodes show no difference" in output
    content = json.loads((tmp_path / "out" / "paired.json").read_text())
    assert [row["name"] for row in content["rows"]] == names and content["episodes"] == 3
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<circle") >= len(names) and "the interval contains 0" in page
    for wrong, hint in (
        (["paired=[light,light]"], "each name once"),
        (["paired=[camera]", "episodes=1"], "episodes=2"),
        (["paired=[fog]"], "paired"),
    ):
        assert_refused(capsys, ["evaluate", f"checkpoint={run}", "video=false", *wrong], hint)
