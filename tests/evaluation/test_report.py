"""Tests of the report: numbers in report.json, and the page in a browser."""

from __future__ import annotations

import hashlib
import html
import json
import math
import re
import subprocess
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import headless_browser
import numpy as np
import pytest

from embodied_ppo.data.prompts import Prompt
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation import report, video
from embodied_ppo.evaluation.episodes import EVAL_SEED_BASE, Episode, EvaluationResult
from embodied_ppo.evaluation.prompts import Answer, PromptEvaluationResult
from embodied_ppo.rewards.graders import Grade
from embodied_ppo.rollout.generation.sampling import Sampling
from tests.evaluation.test_video import Lean, make_cartpole

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
def test_json_against_hand_computed_numbers(tmp_path: Path) -> None:
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


def test_training_seed_is_not_disjoint(tmp_path: Path) -> None:
    one = result("A-v1", [1.0])
    one = replace(one, episodes=(replace(one.episodes[0], seed=5),))
    written = report.write(tmp_path, [one], **PROVENANCE)
    assert written.content["seeds"]["disjoint_from_training"] is False
    assert "not disjoint from training" in text_of(written.html)


def test_equal_evaluations_give_equal_bytes(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        measured = evaluation.evaluate(Lean(), make_cartpole, episodes=6, num_envs=4, seed=0)
        rows = curve(3 if name == "a" else 30)
        paths.append(report.write(tmp_path / name, [measured], **PROVENANCE, curves=rows))
        time.sleep(0.01)
    assert paths[0].json.read_bytes() == paths[1].json.read_bytes()
    assert not re.search(r"20\d\d-\d\d-\d\d", paths[0].json.read_text()), "a date"


def test_infinite_option_is_written_as_text(tmp_path: Path) -> None:
    options = {"env": {"kwargs": {"clip": math.inf, "low": [-math.inf, 1.0], "none": None}}}
    written = report.write(tmp_path, [result("A-v1", [1.0])], **PROVENANCE | {"config": options})
    config = json.loads(written.json.read_text())["config"]
    assert config == {"env": {"kwargs": {"clip": "inf", "low": ["-inf", 1.0], "none": None}}}


def test_report_without_episodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        report.write(tmp_path, [], **PROVENANCE)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0, "0"),
        (500, "500"),
        (12345.678, "12,346"),
        (123.456, "123.5"),
        (-0.0123456, "-0.01235"),
        (3e-9, "3.000e-09"),
    ],
)
def test_number_has_four_significant_digits(x: float, text: str) -> None:
    assert report.number(x) == text


def test_number_with_the_decimals_of_another() -> None:
    assert (report.number(233.71, 4367.2), report.number(0.5, 123.4)) == ("234", "0.5")


def test_ticks_are_round_and_span_the_range() -> None:
    assert report.ticks(0, 100) == [0, 50, 100]
    assert report.ticks(-3, 7) == [-5, 0, 5, 10]
    assert report.ticks(0.1, 0.32) == [0.1, 0.2, 0.3, 0.4]
    assert report.ticks(5, 5)[0] < 5 < report.ticks(5, 5)[-1]
    assert report.ticks(0, 0)[0] < 0 < report.ticks(0, 0)[-1]
    assert report.ticks(3e-16, 2e-15) == [0, 5e-16, 1e-15, 1.5e-15, 2e-15]


def test_histogram_counts_every_episode_once() -> None:
    values = [float(x) for x in np.random.default_rng(0).normal(100, 30, 237)] + [-50.0, 250.0]
    bars = report.histogram(values).bars
    assert sum(int(bar.label.split()[0]) for bar in bars) == len(values)
    assert len(report.histogram([500.0] * 20).bars) == 1
    assert len(report.histogram([0.0]).bars) == 1


def test_damaged_lines_are_skipped_in_bounded_memory(tmp_path: Path) -> None:
    assert list(report.rows(tmp_path)) == []
    text = (
        b'{"update": 1, "env_steps": 9, "eval/return": 2}\n{"torn\n[1]\n'
        + b"[" * 100_000
        + b'\n\xff\n{"update": 2}\n'
    )
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.write(text)
        file.truncate(1 << 27)  # a sparse line
    tracemalloc.start()
    assert [row["update"] for row in report.rows(tmp_path)] == [1, 2]
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
    invalid = [{"env_steps": 1, "eval/return": 10**400}, {"env_steps": [], "eval/return": 3.0}]
    assert report.learning_curves(invalid) == []


def test_curves_leave_out_absent_tags_and_nan() -> None:
    charts = report.learning_curves(curve())
    assert [c.title for c in charts] == ["Return", "Policy entropy"]
    assert [line.label for line in charts[0].lines] == ["rollout/return", "eval/return"]
    assert charts[0].lines[0].path.count("L") == 38  # 39 points: one of 40 is NaN
    assert charts[0].x_label == "environment steps"
    assert report.learning_curves([]) == []
    assert report.learning_curves([{"rollout/return": 1.0}]) == []
    assert report.learning_curves(curve(1000))[0].lines[0].path.count("L") < 300


def test_explained_variance_is_cut_at_minus_one() -> None:
    rows = [{"update": u, "value/explained_variance": v} for u, v in enumerate([-1e6, 0.5, 1.0])]
    (chart,) = report.learning_curves(rows)
    assert [label for _, label in chart.y_ticks] == ["-1", "-0.5", "0", "0.5", "1"]


# ----------------------------------------------------------------------------------------- the page
class _Text(HTMLParser):
    """Visible text, tags and addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or ""
            for name, value in attrs
            if name in ("src", "href", "poster", "srcset", "action")
        ]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] != ["style"]:
            self.text.append(data)


def parse(page: Path) -> _Text:
    parser = _Text()
    parser.feed(page.read_text())
    return parser


def text_of(page: Path) -> str:
    return " ".join(" ".join(parse(page).text).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page with success, curves and a video."""
    folder = tmp_path_factory.mktemp("page")
    make_env = partial(make_cartpole, render=True)
    mp4 = video.record_video(Lean(), make_env, path=folder / "video.mp4", seed=0, steps=20)
    assert mp4.path, mp4.reason
    returns, success = [float(50 + 7 * (i % 9)) for i in range(40)], [i % 4 > 0 for i in range(40)]
    results = [result("CartPole-v1", returns, success)]
    return report.write(folder, results, **PROVENANCE, curves=curve(), video=mp4).html


@pytest.mark.slow
def test_page_shows_the_numbers_of_the_json(page: Path) -> None:
    text = text_of(page)
    content = json.loads((page.parent / "report.json").read_text())
    low, high = content["tasks"]["CartPole-v1"]["return"]["ci95"]
    assert "Success rate 75.0%" in text and "95% CI 59.8% to 85.8%, 30 of 40" in text
    assert f"95% CI {report.number(low)} to {report.number(high)}" in text
    assert "1073741824 to 1073741863" in text
    assert "disjoint from training, whose seeds are below 1073741824" in text
    assert "39 distinct first observations in 40 episodes" in text
    assert "9f2c41aa03be" in text and "torch 2.13.0" in text and "update 20, 40,960 steps" in text
    assert "rollout/return" in text and "Policy entropy" in text
    assert "Explained variance" not in text


def test_page_is_self_contained_and_escaped(page: Path) -> None:
    parsed = parse(page)
    assert "script" not in parsed.tags and "link" not in parsed.tags and "video" in parsed.tags
    assert parsed.addresses and all(address.startswith("data:") for address in parsed.addresses)
    assert "i" not in parsed.tags and "<i>demo</i> & co" in text_of(page)
    assert "url(" not in page.read_text() and "@import" not in page.read_text()


def test_page_leaves_out_absent_sections(tmp_path: Path) -> None:
    none = video.Video(None, reason="<no> libEGL")
    text = text_of(report.write(tmp_path, [result("A-v1", [1.0])], **PROVENANCE, video=none).html)
    assert "No video: <no> libEGL" in text and "one episode has no interval" in text
    assert "Training" not in text
    two = [result("A-v1", [1.0, 2.0], [True, False]), result("B-v1", [5.0], [True])]
    text = text_of(report.write(tmp_path, two, **PROVENANCE).html)
    assert "A-v1, B-v1" in text and "2 of 3" in text and "No video" not in text


def test_long_table_of_episodes_is_cut(tmp_path: Path) -> None:
    results = [result("A-v1", [float(i % 7) for i in range(255)] * 2)]
    written = report.write(tmp_path, results, **PROVENANCE)
    assert "The first 500 of 510; report.json has all." in text_of(written.html)


PROBE = """<!doctype html><iframe id=f width=360 height=3000 srcdoc="{page}"></iframe><script>
const until = Date.now() + 10000;
const timer = setInterval(() => {{
  const d = document.getElementById("f").contentDocument, v = d && d.querySelector("video");
  if (!v || (v.readyState < 2 && !v.error && Date.now() < until)) return;
  clearInterval(timer);
  document.title = JSON.stringify({{
    overflow: d.documentElement.scrollWidth - d.documentElement.clientWidth,
    video: [v.videoWidth, v.videoHeight], duration: v.duration, error: v.error && v.error.message,
    bars: [...d.querySelectorAll("rect.bar")].map(e => e.getBoundingClientRect().height > 0),
    line: d.querySelector("path.line").getTotalLength(),
    background: getComputedStyle(d.body).backgroundColor,
  }});
}}, 50);
</script>"""


def _browse(folder: Path, *arguments: str) -> str:
    """Run the headless browser and return its output."""
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [headless_browser.chromium_path(), *headless_browser.FLAGS, profile, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_in_a_browser_of_a_phone(page: Path, tmp_path: Path, scheme: str) -> None:
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(page=html.escape(page.read_text())))
    setting = f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"
    dom = _browse(tmp_path, setting, "--virtual-time-budget=15000", "--dump-dom", probe.as_uri())
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title, "the page or its video did not load"
    measured = json.loads(html.unescape(title[1]))
    assert measured["overflow"] == 0, "the page is wider than a phone"
    assert (
        measured["error"] is None
        and measured["video"] == [240, 320][::-1]
        and measured["duration"] > 0.5
    )
    assert len(measured["bars"]) > 3 and all(measured["bars"]) and measured["line"] > 100
    assert measured["background"] == (
        "rgb(250, 250, 248)" if scheme == "light" else "rgb(20, 24, 28)"
    )


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
            answers.append(Answer(i, text, 40 + 10 * j, j != 3, grade))
    return PromptEvaluationResult(
        prompts, answers, 4, Sampling(70, temperature=temperature), seed=3
    )


def tokens_curve() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {
            "update": u,
            "tokens": 50_000 * u,
            "rollout/return": u / 30,
            "rollout/truncated": 1 / (u + 1),
        }
        | {"rollout/success": u / 35, "kl/to_reference": 0.001 * u, "speed/tokens_per_s": 900.0}
        for u in range(30)
    ]
    for u in (0, 10, 20, 29):
        rows[u]["eval/accuracy"] = u / 40
    return rows


def write_prompt_report(folder: Path, **options: Any) -> report.Report:
    result = prompt_result(**options)
    extra = {"pass@4": 2 / 3, "maj@4": 0.5, "accuracy_error": float("nan")}
    return report.write(
        folder,
        result.results(),
        **PROVENANCE,
        unit="tokens",
        samples=result.samples(8),
        extra=extra,
        curves=tokens_curve(),
    )


def test_json_of_a_language_model(tmp_path: Path) -> None:
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


def test_page_of_a_language_model(tmp_path: Path) -> None:
    page = write_prompt_report(tmp_path).html
    text = text_of(page)
    assert "24 responses of" in text and "40,960 tokens of training), sampled" in text
    assert "Accuracy 50.0%" in text and "Prompts 6 distinct, in 24 responses" in text
    assert "pass@4 0.6667" in text
    assert "accuracy_error –" in text and "3, for samples that training does not draw" in text
    assert "cut at the limit" in text and "by itself" in text and "KL to the reference" in text
    robot_terms = "episode|step|video|time limit|initial state|simulator|environment|return "
    matches = re.findall(robot_terms, text.lower())
    assert set(matches) <= {"step"}, matches  # the checkpoint's name
    assert "<script>document.title = 'owned'</script> <b>72</b> & co" in text and " … " in text
    assert LONG not in page.read_text() and "#### 12" in text, (
        "the end, which has the answer, is kept"
    )
    parsed = parse(page)
    assert "script" not in parsed.tags and "b" not in parsed.tags and "video" not in parsed.tags
    assert parsed.addresses == []
    assert "not used for greedy responses" in text_of(
        write_prompt_report(tmp_path / "greedy", temperature=0.0).html
    )
    one = report.write(tmp_path / "one", prompt_result().results()[:1], **PROVENANCE, unit="tokens")
    text = text_of(one.html)
    assert "Mean score" in text and "Stopped by itself 9 of 12 3 cut at the limit" in text
    assert "Response length 55 tokens, from 40 to 70" in text and "Samples" not in text
    assert not {"samples", "numbers"} & one.content.keys()


def test_curves_of_a_language_model() -> None:
    charts = report.learning_curves(tokens_curve(), unit="tokens")
    titles = ["Score", "Accuracy", "Responses cut at the limit", "KL to the reference"]
    assert [c.title for c in charts] == titles
    assert [line.label for line in charts[1].lines] == ["rollout/success", "eval/accuracy"]
    assert {c.x_label for c in charts} == {"tokens"}


def test_long_text_is_cut_in_the_middle() -> None:
    assert report.cut("x" * 600) == "x" * 600
    short = report.cut("a" * 500 + "b" * 500)
    assert len(short) == 600 and re.fullmatch("a{400} … b{197}", short)


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 1200])
def test_samples_in_a_browser(tmp_path: Path, width: int) -> None:
    probe = tmp_path / "probe.html"
    page = html.escape(write_prompt_report(tmp_path).html.read_text())
    probe.write_text(
        f"""<!doctype html><iframe id=f width={width} height=3000 srcdoc="{page}"></iframe>
<script>
onload = () => {{
  const d = document.getElementById("f").contentDocument, wide = e => e.scrollWidth - e.clientWidth;
  document.title = JSON.stringify({{
    title: d.title, overflow: wide(d.documentElement),
    table: wide(d.querySelector(".samples").parentElement),
    wrong: d.querySelectorAll(".samples tr.wrong").length,
    texts: [...d.querySelectorAll(".text")].map(
      e => [e.innerText, e.getBoundingClientRect().width]),
  }});
}};
</script>"""
    )
    flags = ("--window-size=1300,900", "--virtual-time-budget=5000", "--dump-dom")
    dom = _browse(tmp_path, *flags, probe.as_uri())
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title
    measured = json.loads(html.unescape(title[1]))
    assert measured["title"] == "math, openai/gsm8k – evaluation", "a response's script has run"
    assert measured["overflow"] == 0 and measured["table"] == 0 and measured["wrong"] == 4
    assert EVIL in [text for text, _ in measured["texts"]], "white space is kept"
    assert min(w for _, w in measured["texts"]) > 90
