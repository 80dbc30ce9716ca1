"""Tests of the report: numbers in report.json, and the page in a browser."""

from __future__ import annotations

import hashlib
import html
import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from embodied_ppo.data.prompts import Prompt
from embodied_ppo.evaluation import charts, report, video
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation.episodes import EVAL_SEED_BASE, Episode, EvaluationResult
from embodied_ppo.evaluation.prompt_evaluation import Answer, PromptEvaluationResult
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.rewards.graders import Grade
from tests.evaluation.test_episodes import cartpole, make_cartpole

PROVENANCE: dict[str, Any] = {
    "checkpoint": "runs/demo/checkpoints/step_000020",
    "update": 20,
    "steps": 40_960,
    "config": {"env": {"id": "CartPole-v1"}, "name": "<i>demo</i> & co"},
    "config_hash": "9f2c41aa03be",
    "versions": {"torch": "2.13.0", "envpool": "1.2.5"},
}


def result(task: str, returns: list[float], success: list[bool] | None = None) -> EvaluationResult:
    """Return episodes with these returns; episodes 0 and 1 have the same initial state."""
    return EvaluationResult(
        task=task,
        seed=0,
        deterministic=True,
        episodes=tuple(
            Episode(
                index=i,
                seed=EVAL_SEED_BASE + i,
                initial_state=hashlib.sha256(str(max(1, i)).encode()).hexdigest(),
                return_=value,
                length=10 * (i + 1),
                success=None if success is None else success[i],
                ended="truncated" if i == 0 else "terminated",
            )
            for i, value in enumerate(returns)
        ),
    )


def curve(updates: int = 40) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "update": u,
            "env_steps": 2048 * u,
            "rollout/return": 5.0 * u,
            "policy/entropy": 3 - 0.01 * u,
            "time/wall": 1.0,
        }
        for u in range(updates)
    ]
    rows[0]["rollout/return"] = float("nan")  # no episode has ended yet
    rows[-1]["eval/return"] = 190.0
    return rows


# -------------------------------------------------------------------------------------- the numbers
def test_json_against_hand_computed_numbers(tmp_path) -> None:
    results = [result("A-v1", [1.0, 2.0, 3.0, 4.0]), result("B-v1", [0.0, 10.0], [False, True])]
    written = report.write(tmp_path / "new" / "folder", results, **PROVENANCE)
    content = json.loads(written.json.read_text())
    a, b = content["tasks"]["A-v1"], content["tasks"]["B-v1"]
    # The interval is computed by hand in test_episodes.
    assert a["return"]["ci95"] == pytest.approx([0.445739, 4.554261], abs=1e-6)
    assert [a["return"][k] for k in ("mean", "median", "min", "max")] == [2.5, 2.5, 1, 4]
    assert a["length"]["mean"] == 25.0 and a["success"] is None
    assert (a["truncated"], a["terminated"]) == (1, 3)
    assert (a["episodes"], a["distinct_initial_states"]) == (4, 3)
    # 1 of 2: centre 0.5; half = 1.959964 √(0.25/2 + 3.841459/16) / (1 + 3.841459/2) =
    # 1.184265/2.920729 = 0.405469
    assert b["success"]["ci95"] == pytest.approx([0.094531, 0.905469], abs=2e-6)
    assert content["overall"]["success"] is None and content["overall"]["episodes"] == 6
    # States of different tasks are different states.
    assert content["overall"]["distinct_initial_states"] == 4
    assert [e["return"] for e in content["episodes"]] == [1, 2, 3, 4, 0, 10]
    assert content["seeds"] == {
        "first": 1 << 30,
        "last": (1 << 30) + 3,
        "training_below": 1 << 30,
        "disjoint_from_training": True,
    }
    assert content["config"] == PROVENANCE["config"]
    assert content["versions"] == PROVENANCE["versions"]


def test_equal_evaluations_give_equal_bytes(tmp_path) -> None:
    paths = []
    for name in ("a", "b"):
        measured = evaluation.evaluate(cartpole(), make_cartpole, episodes=6, num_envs=4, seed=0)
        rows = curve(3 if name == "a" else 30)
        paths.append(report.write(tmp_path / name, [measured], **PROVENANCE, curves=rows))
        time.sleep(0.01)
    assert paths[0].json.read_bytes() == paths[1].json.read_bytes()
    assert not re.search(r"20\d\d-\d\d-\d\d", paths[0].json.read_text()), "a date"


# ----------------------------------------------------------------------------------------- the page
def tags_of(page: Path) -> set[str]:
    return set(re.findall("<([a-z0-9]+)", page.read_text()))


def addresses_of(page: Path) -> list[str]:
    return re.findall('(?:src|href|poster|srcset|action)="([^"]*)"', page.read_text())


def test_errors_of_a_command_in_ranges_of_its_value(tmp_path) -> None:
    """Ranges of -1 to 1 are .25 wide; episode 0 has (.1 · 30 + .4 · 10) / 40 = .175 in the last."""
    rows = [[(-1.0, 0.5, 20), (0.8, 0.1, 30), (1.0, 0.4, 10)], [(0.9, 0.225, 5)], [(0.1, 0.3, 9)]]
    whole = result("Walk", [1.0, 2.0, 3.0])
    tracked = zip(whole.episodes, rows, strict=True)
    episodes = tuple(replace(e, tracking={"yaw": row, "x": [(1.0, 2.0, 3)]}) for e, row in tracked)
    written = report.write(tmp_path, [replace(whole, episodes=episodes)], **PROVENANCE)
    tracking = written.content["tasks"]["Walk"]["tracking"]
    yaw, (x,) = tracking["yaw"], tracking["x"]
    assert [part["range"] for part in yaw] == [[-1, -0.75], [0, 0.25], [0.75, 1]]
    assert [part["mean"] for part in yaw] == pytest.approx([0.5, 0.3, 0.2])
    assert [part["episodes"] for part in yaw] == [1, 1, 2] and yaw[0]["ci95"] is None
    low, high = yaw[2]["ci95"]  # Student's t of two values, 12.706 · .025
    assert [low, high] == pytest.approx([0.2 - 0.3177, 0.2 + 0.3177], abs=1e-3)
    assert x["range"] == [1, 1] and x["mean"] == 2 and x["episodes"] == 3
    (chart,) = report.tracking_charts(written.content["tasks"])
    (line,) = chart.lines  # no line of one range
    assert line.label == "yaw" and [x for x, _ in line.dots] == sorted(x for x, _ in line.dots)
    assert min(x for x, _ in (*line.dots, *chart.x_ticks)) >= 48, "within the axes"
    assert "Error of each command by its value" in text_of(written.html)


def text_of(page: Path) -> str:
    """Return the visible text of a page."""
    text = re.sub("(?s)<style.*?</style>|<[^>]+>", " ", page.read_text())
    return " ".join(html.unescape(text).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Return a page with success, curves and a video."""
    folder = tmp_path_factory.mktemp("page")
    make_env = partial(make_cartpole, render=True)
    mp4 = video.record_video(cartpole(), make_env, path=folder / "video.mp4", seed=0, steps=20)
    assert mp4.path, mp4.reason
    returns, success = [float(50 + 7 * (i % 9)) for i in range(40)], [i % 4 > 0 for i in range(40)]
    whole = result("CartPole-v1", returns, success)
    sentences = ("lift <i>it</i>", "put it down") * 20
    episodes = [replace(e, sentence=x) for e, x in zip(whole.episodes, sentences, strict=True)]
    results = [replace(whole, episodes=tuple(episodes))]
    return report.write(folder, results, **PROVENANCE, curves=curve(), video=mp4).html


@pytest.mark.slow
def test_page_shows_the_numbers_of_the_json(page: Path) -> None:
    text = text_of(page)
    content = json.loads((page.parent / "report.json").read_text())
    low, high = content["tasks"]["CartPole-v1"]["return"]["ci95"]
    assert "Success rate 75.0%" in text and "95% CI 59.8% to 85.8%, 30 of 40" in text
    assert f"95% CI {charts.number(low)} to {charts.number(high)}" in text
    assert "1073741824 to 1073741863" in text
    assert "disjoint from training, whose seeds are below 1073741824" in text
    assert "39 distinct first observations in 40 episodes" in text
    assert "9f2c41aa03be" in text and "torch 2.13.0" in text and "update 20, 40,960 steps" in text
    assert "rollout/return" in text and "policy/entropy" in text
    assert "explained_variance" not in text
    assert "lift <i>it</i> 20 50.0% put it down 20 100.0%" in text


def test_page_is_self_contained_and_escaped(page: Path) -> None:
    tags, addresses = tags_of(page), addresses_of(page)
    assert not {"script", "link", "i"} & tags and "video" in tags
    assert addresses and all(address.startswith("data:") for address in addresses)
    assert "<i>demo</i> & co" in text_of(page)
    assert "url(" not in page.read_text() and "@import" not in page.read_text()


# ----------------------------------------------------------------------------------- language model
EVIL = "<script>document.title = 'owned'</script> <b>72</b> & co\n\n    indented\n#### 72"
LONG = "The shelf holds 48 jars. " * 60 + "So:\n" + "9" * 400 + "\n#### 12"


def prompt_result(temperature: float = 1.0) -> PromptEvaluationResult:
    """Return 4 responses to each of 6 prompts of 2 sources; 4, 2, 0, 4, 2 and 0 are right."""
    question = (
        "<|im_start|>system\nYou are a helpful"
        " assistant.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
    )
    texts = [
        question.format("Ida packs 12 crates a day for 6 days. How many? " * (1 + 10 * (i == 2)))
        for i in range(6)
    ]
    sources = ["math", "openai/gsm8k"]
    prompts = [
        Prompt((1,), f"{t}{i}", str(70 + i), sources[i % 2], {}, i) for i, t in enumerate(texts)
    ]
    answers = []
    for i in range(6):
        for j in range(4):
            right = j < (4, 2, 0)[i % 3]
            text = EVIL if j == 0 else LONG if j == 3 else f"12*6 = {70 + i + j}\n#### {70 + i + j}"
            grade = Grade(
                float(right), answer=str(70 + i) if right else None, correct=right, format_ok=True
            )
            answers.append(Answer(i, text, [1] * (40 + 10 * j), (), j != 3, grade))
    return PromptEvaluationResult(
        prompts, answers, 4, Sampling(70, temperature=temperature), seed=3
    )


def write_prompt_report(folder: Path, **options: Any) -> report.Report:
    result = prompt_result(**options)
    return report.write(
        folder,
        result.results(),
        **PROVENANCE,
        unit="tokens",
        samples=result.samples(8),
        extra={"pass@4": 2 / 3, "maj@4": 0.5, "accuracy_error": float("nan")},
        curves=[{"tokens": 50_000 * u, "kl/to_reference": 0.001 * u} for u in range(30)],
    )


def test_json_of_a_language_model(tmp_path) -> None:
    written = write_prompt_report(tmp_path / "a")
    content = json.loads(written.json.read_text())
    assert content["tokens"] == 40_960 and content["seed"] == 3
    assert not {"env_steps", "seeds"} & content.keys()
    assert not content["deterministic"] and list(content["tasks"]) == ["math", "openai/gsm8k"]
    assert content["numbers"] == {"pass@4": 2 / 3, "maj@4": 0.5, "accuracy_error": None}
    assert len(content["samples"]) == 8 and any(s["response"] == LONG for s in content["samples"])
    assert content["overall"]["episodes"] == 24
    assert content["overall"]["distinct_initial_states"] == 6
    task = content["tasks"]["math"]  # prompts 0, 2, 4: 4, 0 and 2 of 4 right
    assert task["truncated"] == 3 and task["terminated"] == 9 and task["success"]["count"] == 6
    # Of prompts: mean 1/2, s = 1/2; t(0.975, 2) = 4.302653: 4.302653 · 0.5 / √3 = 1.242069
    assert task["return"]["ci95"] == pytest.approx([0.5 - 1.242069, 0.5 + 1.242069], abs=1e-5)
    # V = (2² + 2² + 0²) / 12² = 1/18, p(1-p)/12 = 1/48: effect 8/3, that is 4.5 responses:
    # centre 0.5; half = 1.959964 √(0.25/4.5 + 3.841459/81) / (1 + 3.841459/4.5) = 0.628966/1.853658
    # = 0.339311
    assert task["success"]["ci95"] == pytest.approx([0.160689, 0.839311], abs=2e-6)
    assert write_prompt_report(tmp_path / "b").json.read_bytes() == written.json.read_bytes()


def test_intervals_are_over_prompts() -> None:
    """Four right responses to two prompts have the interval of two right episodes."""
    base = result("A", [1.0, 0.0, 1.0, 1.0], [True, False, True, True])
    distinct = tuple(replace(e, initial_state=str(e.index)) for e in base.episodes)
    base = replace(base, episodes=distinct)
    assert report.statistics(base, "tokens") == report.statistics(base)
    paired = tuple(replace(e, initial_state=str(e.index % 2), success=True) for e in distinct)
    success = report.statistics(replace(base, episodes=paired), "tokens")["success"]
    assert success["ci95"] == pytest.approx(evaluation.wilson_interval(2, 2))
    assert success["count"] == 4


def test_page_of_a_language_model(tmp_path) -> None:
    page = write_prompt_report(tmp_path).html
    text = text_of(page)
    assert "24 responses of" in text and "40,960 tokens of training), sampled" in text
    assert "Accuracy 50.0%" in text and "Prompts 6 distinct, in 24 responses" in text
    assert "pass@4 0.6667" in text
    assert "accuracy_error –" in text and "3, for samples that training does not draw" in text
    assert "cut at the limit" in text and "by itself" in text and "kl/to_reference" in text
    robot_terms = "episode|step|video|time limit|initial state|simulator|environment|return "
    matches = re.findall(robot_terms, text.lower())
    assert set(matches) <= {"step", "return "}, matches  # the checkpoint's name, and a tag
    assert "<script>document.title = 'owned'</script> <b>72</b> & co" in text and " … " in text
    assert LONG not in page.read_text() and "#### 12" in text, (
        "the end, which has the answer, is kept"
    )
    assert not {"script", "b", "video"} & tags_of(page) and not addresses_of(page)
    assert "not used for greedy responses" in text_of(
        write_prompt_report(tmp_path / "greedy", temperature=0.0).html
    )
    one = report.write(tmp_path / "one", prompt_result().results()[:1], **PROVENANCE, unit="tokens")
    text = text_of(one.html)
    assert "Mean score" in text and "Stopped by itself 9 of 12 3 cut at the limit" in text
    assert "Response length 55 tokens, from 40 to 70" in text and "Samples" not in text
    assert not {"samples", "numbers"} & one.content.keys()
