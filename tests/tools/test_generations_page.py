"""Responses of a run: files of training and evaluation, exact resume, the page in a browser."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from headless_browser import Browser
from run_helpers import metric_rows

from embodied_ppo.data.prompts import Prompt
from embodied_ppo.tools import watch_server
from embodied_ppo.training import generations
from embodied_ppo.training.logging import Log
from tests.tools.test_watch_server import get, make_run

ROOT = Path(__file__).resolve().parents[2]
GRADER = """
def size(data_source, solution_str, ground_truth, extra_info):
    if ground_truth.startswith("7"):
        raise RuntimeError("no grade")
    return len(solution_str)
"""
TINY = [
    *("experiment=arithmetic", "device=cpu", "warm_start.steps=2", "updates=6", "save_every=2"),
    *("eval_every=4", "algorithm.rollout_batch_size=16", "algorithm.global_batch_size=8"),
    *("algorithm.group_size=2", "evaluation.episodes=12", "evaluation.n=2", "rollout.dump=all"),
    "evaluation.deterministic=false",
]


def train(run_dir: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "embodied_ppo.commands.main", "train", f"run_dir={run_dir}"]
    return subprocess.Popen([*command, *options], cwd=ROOT, stderr=subprocess.DEVNULL)


def read(run_dir: Path, kind: Any, update: int) -> list[dict[str, Any]]:
    return list(generations.read([generations.file_of(run_dir, kind, update)]))


@pytest.mark.slow
def test_a_killed_run_has_every_line_once_after_its_resume(tmp_path) -> None:
    (tmp_path / "grader.py").write_text(GRADER)
    size = f"{{grader: '{tmp_path}/grader.py:size', weight: 0.5}}"
    options = [*TINY, f"reward.terms={{correct: {{grader: auto}}, size: {size}}}"]
    with train(tmp_path / "whole", *options) as process:
        assert process.wait(timeout=300) == 0
    run_dir = tmp_path / "killed"
    with train(run_dir, *options) as process:
        # Killed after update 3 or later, whose files the checkpoint of an earlier one repeats.
        while not generations.file_of(run_dir, "train", 3).exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    (run_dir / "generations/train_000006.jsonl").write_text('{"stale": 1}\n')
    (run_dir / "generations/train_000003.jsonl.new").write_text("torn")
    with train(run_dir, f"resume={run_dir}") as process:
        assert process.wait(timeout=300) == 0
    whole, resumed = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "generations").iterdir()}
        for name in ("whole", "killed")
    )
    evaluations = [f"eval_{i:06d}.jsonl" for i in (0, 4, 6)]
    assert sorted(whole) == evaluations + [f"train_{i:06d}.jsonl" for i in range(1, 7)]
    assert resumed == whole
    # The lines have what the metrics are made of.
    lines = read(tmp_path / "whole", "train", 3)
    assert len(lines) == 32 and lines[0]["prompt"] == lines[1]["prompt"]
    graded = [x for x in lines if x["score"] is not None]
    row = next(row for row in metric_rows(tmp_path / "whole") if row["update"] == 3)
    assert len(lines) - len(graded) == row["rollout/grader_failures"] > 0
    assert sum(x["score"] for x in graded) / len(graded) == pytest.approx(row["rollout/return"])
    assert sum(x["right"] for x in graded) / len(graded) == row["rollout/success"]
    for line in lines:
        assert len(line["tokens"]) == len(line["log_prob"]) == len(line["advantage"])
        assert all(x < 0 for x in line["log_prob"])
        failed = line["ground_truth"].startswith("7")
        assert {x is None for x in line["advantage"]} == {failed} == {line["right"] is None}
        terms = line["terms"]
        assert failed or terms["size"] == 0.5 * len(line["response"])
        assert failed or line["score"] == sum(terms.values())
    held_out = read(tmp_path / "whole", "eval", 4)
    assert len(held_out) == 24 and "advantage" not in held_out[0]
    assert {line["prompt_index"] for line in held_out} == {*range(12)}


def test_a_sample_has_the_same_prompts_in_each_update() -> None:
    prompts = [30, 30, 2, 2, 9, 9, *range(100, 120)]
    chosen = [prompts[i] for i in generations.selected(prompts, "sample")]
    assert chosen == [30, 30, 2, 2, 9, 9, 100, 101, 102, 103, 104]
    assert generations.selected(prompts, "all") == [*range(len(prompts))]


# --------------------------------------------------------------------------------------------- page
def line(prompt: int, response: str, right: bool | None, **numbers: Any) -> dict[str, Any]:
    p = Prompt((), f"What is {prompt} + 1?", str(prompt + 1), "sums", {}, prompt)
    numbers = {"score": None if right is None else float(right), "terms": {}} | numbers
    tokens = [*range(len(response))]
    numbers |= {"advantage": [0.25] * len(tokens), "log_prob": [-0.5] * len(tokens)}
    return generations.entry(p, numbers, right=right, response=response, tokens=tokens)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run with two updates, hostile texts and numbers, and a damaged line."""
    folder = tmp_path / "runs/words"
    make_run(folder, updates=2).close()
    first = [line(i, f"It is {i + (i % 2)}.", i % 2 == 1) for i in range(120)]
    first[3] = line(3, "<script>alert(1)</script>" + "x" * 4000, None)
    first[4] = line(4, "five \U0001f600", False, terms={"a" * 200: 1e-300, "style": 1.5e29})
    second = [line(i, f"The answer: {i + 1}", True) for i in (2, 4)]
    generations.write(generations.file_of(folder, "train", 1), first)
    generations.write(generations.file_of(folder, "train", 2), [*second, second[0]])
    with open(generations.file_of(folder, "train", 1), "a") as file:
        file.write('{"prompt_index": 5}\n{"torn')
    return folder


def serving(run: Path) -> watch_server.WatchServer:
    server = watch_server.listen([str(run)])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def test_responses_are_filtered_paged_and_compared(run: Path) -> None:
    server = serving(run)

    def page(**query: Any) -> str:
        status, headers, body = get(
            server, "/generations", {"run": str(run.absolute()), "at": "train 1"} | query
        )
        assert status == 200, body
        assert "script-src" not in headers["Content-Security-Policy"]
        return body.decode()

    assert page().count("<section>") == 50 and "next page" in page() and "<script>" not in page()
    assert page(page=3).count("<section>") == 20 and "next page" not in page(page=3)
    assert page(show="failed").count("<section>") == 1 and "alert(1)" in page(show="failed")
    assert page(q="What is 11").count("<section>") == 11, "11 and 110 to 119"
    both = page(other="train 2")
    assert both.count("<section>") == 2 and both.count("The answer: 3") == 2
    assert "No responses match" in page(at="eval 9") and page(page="x") == page(page="0")
    run_folder = run.parent / "empty"
    make_run(run_folder, updates=1).close()
    assert get(server, "/generations", {"run": "/nowhere"})[0] == 404
    server.shutdown()
    server.server_close()
    Log(run, total_updates=2, completed_updates=1, quiet=True).close()
    assert [*generations.find(run)] == [("train", 1)], "a resumed run writes the others again"


@pytest.mark.slow
def test_the_page_in_a_browser(run: Path, tmp_path) -> None:
    server = serving(run)
    browser = Browser(tmp_path)
    try:
        browser.open(server.address)
        browser.wait("document.querySelector('.facts a[href^=generations]')")
        address = browser.evaluate("document.querySelector('.facts a[href^=generations]').href")
        for width, dark in ((1400, False), (390, True)):
            browser.open(address, width=width, dark=dark)
            browser.evaluate(
                "document.getElementById('at').value = 'train 1';"
                "document.getElementById('other').value = 'train 2';"
                "setTimeout(() => document.querySelector('form').submit(), 50)"
            )
            # The new page is awaited by its address: an expression would end with the old page.
            while "other=train" not in str(browser.call("Page.getNavigationHistory")):
                time.sleep(0.05)
            browser.wait("document.querySelectorAll('.pair').length === 2")
            browser.evaluate("document.querySelectorAll('details')[1].open = true")
            wide = "document.documentElement.scrollWidth > innerWidth"
            assert not browser.evaluate(wide), f"{width} pixels: the page is too wide"
            if folder := os.environ.get("SCREENSHOTS"):
                data = browser.call("Page.captureScreenshot")["data"]
                Path(folder, f"generations_{width}.png").write_bytes(base64.b64decode(data))
        browser.open(f"{address}&at=train+1&show=failed")
        assert browser.evaluate("document.querySelectorAll('section').length") == 1
        assert not browser.evaluate(wide) and not browser.problems
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
