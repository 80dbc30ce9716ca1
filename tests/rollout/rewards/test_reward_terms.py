"""Rewards of several terms: sums, failures, signatures, async functions, a judge on a server."""

from __future__ import annotations

import json
import math
import runpy
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from embodied_ppo.data.prompts import Prompt
from embodied_ppo.rollout.rewards.graders import Grade, Limits, Sample
from embodied_ppo.rollout.rewards.reward_terms import RewardTerm, RewardTerms
from embodied_ppo.rollout.rewards.worker_pool import GraderPool

JUDGE = Path(__file__).resolve().parents[3] / "scripts/examples/judge.py"
FUNCTIONS = """
import asyncio, os

calls = {}

def columns(prompts, completions, answer, level, **more):
    assert sorted(more) == ["data_source", "ground_truth", "solution"]
    return [None if x == "none" else len(p) + len(c) + level[i] + (x == a)
            for i, (p, c, x, a) in enumerate(zip(prompts, completions, completions, answer))]

def messages(completions, prompts):
    return [float(c[0]["content"] == p[0]["content"]) for c, p in zip(completions, prompts)]

def short(completions, **columns):
    return [1.0]

async def together(completions, **columns):
    await asyncio.sleep(0.01)
    return [{"score": len(completions), "pid": os.getpid()} for _ in completions]

async def flaky(data_source, solution_str, ground_truth, extra_info):
    calls[solution_str] = calls.get(solution_str, 0) + 1
    if calls[solution_str] <= int(solution_str):
        raise ConnectionError("try again")
    return calls[solution_str]

async def never(data_source, solution_str, ground_truth, extra_info):
    await asyncio.Event().wait()

def fails(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(solution_str) if solution_str != "bad" else None, "size": 1}
"""


@pytest.fixture
def pool(tmp_path) -> Iterator[Callable[..., GraderPool]]:
    """Return a function that makes a pool of a function above, or of another specification."""
    file, pools = tmp_path / "functions.py", list[GraderPool]()
    file.write_text(FUNCTIONS)

    def make(name: str, workers: int = 0, timeout_s: float = 5.0, retries: int = 0) -> GraderPool:
        spec = name if name == "exact" or ":" in name else f"{file}:{name}"
        pools.append(GraderPool(spec, workers=workers, limits=Limits(timeout_s, retries)))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def batch(*responses: str, truth: str = "ab", chat: bool = False) -> tuple[list[Sample], list[Any]]:
    samples: list[Sample] = [("mine", x, truth, {"level": 10 * i}) for i, x in enumerate(responses)]
    messages = [{"role": "user", "content": "ask"}]
    prompt = Prompt((), "ask", truth, "mine", {}, 0, messages, templated=chat)
    return samples, [prompt] * len(responses)


def scores(graders: Any, *responses: str, **options: Any) -> list[float]:
    return [g.score for g in graders.grade(*batch(*responses, **options))]


# --------------------------------------------------------------------------------------- signatures
@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_of_trl_gets_a_batch_with_its_columns(pool: Any, workers: int) -> None:
    # len("ask") + len(response) + level + (response == answer)
    made = pool("columns", workers)
    assert scores(made, "ab", "c", "") == [3 + 2 + 0 + 1, 3 + 1 + 10, 3 + 0 + 20]
    assert made.grade([], []) == [] and made.failures == 0
    not_applicable = made.grade(*batch("none"))[0]
    assert math.isnan(not_applicable.score) and not not_applicable.failed
    assert scores(pool("messages", workers), "ask", "b", chat=True) == [1.0, 0.0]
    made = pool("short", workers)
    assert [g.failed for g in made.grade(*batch("a", "b"))] == [True, True]
    assert "1 scores of 2 responses" in str(made.last_failure)
    grades = pool("together", workers).grade(*batch(*"abc"))
    assert [g.score for g in grades] == [3, 3, 3] and len({g.extra["pid"] for g in grades}) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_async_calls_are_repeated_until_the_deadline(pool: Any, workers: int) -> None:
    made = pool("flaky", workers, retries=2)
    grades = made.grade(*batch("0", "2", "3"))
    assert [(g.score, g.failed) for g in grades[:2]] == [(1, False), (3, False)]
    assert grades[2].failed and "ConnectionError: try again" in str(made.last_failure)
    made = pool("flaky", workers, timeout_s=0.3, retries=9)
    assert made.grade(*batch("9"))[0].failed
    assert "took longer than timeout_s = 0.3" in str(made.last_failure)
    made = pool("never", workers, timeout_s=0.2)
    assert all(g.failed for g in made.grade(*batch(*"abcd"))) and made.failures == 4
    terms = [RewardTerm(x, pool(x, workers=1, timeout_s=300)) for x in ("never", "short")]
    # A process that a shell started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):  # which does not wait for a judge
            RewardTerms(terms).grade(*batch("a"))
    finally:
        signal.signal(signal.SIGINT, before)


# -------------------------------------------------------------------------------------------- terms
def test_terms_are_added_and_failures_mask(pool: Any) -> None:
    correct, length, other = pool("exact"), pool("fails", 1), pool("columns")
    terms = ("correct", correct, 1.0), ("length", length, -0.5), ("seen", other, 0.0)
    reward = RewardTerms([RewardTerm(*term) for term in terms])
    right, wrong, failed, partial = reward.grade(*batch("ab", "cdef", "bad", "none"))
    numbers = {"correct": 1.0, "length": -0.5 * 2, "length/size": 1.0, "seen": 3 + 2 + 1}
    assert right == Grade(1 - 0.5 * 2, "ab", correct=True, extra=numbers)
    assert wrong.score == -0.5 * 4 and wrong.correct is False and wrong.extra["seen"] == 17
    assert failed.failed and math.isnan(failed.score) and not failed.extra
    # None does not apply: the term is neither added nor counted.
    assert partial.score == -0.5 * 4 and "seen" not in partial.extra
    assert reward.failures == 1 and str(reward.last_failure).startswith("length: sample 2 of 4")
    # Nor does a first term that does not apply call the response wrong.
    assert RewardTerms(reward.terms[::-1][:2]).grade(*batch("none"))[0].correct is None
    only = RewardTerms([RewardTerm("", other)])
    assert only.grade(*batch("none"))[0].failed
    assert "all of them returned None" in str(only.last_failure)


def test_a_single_grader_keeps_its_grade_and_a_rule_of_weight_0_only_judges(pool: Any) -> None:
    rule, model = pool("exact"), pool("fails")
    samples, prompts = batch("ab", "bad", "x")
    assert RewardTerms([RewardTerm("", rule)]).grade(samples, prompts) == rule.grade(samples)
    judged = RewardTerms([RewardTerm("", rule, 0.0), RewardTerm("", model)]).grade(samples, prompts)
    expected = [(2, "ab", True), (1, "x", False)]
    assert [(g.score, g.answer, g.correct) for g in judged[::2]] == expected
    assert judged[1].failed
    # Where only the rule fails, the score is valid and nothing is known about correctness.
    reward = RewardTerms([RewardTerm("", model, 0.0), RewardTerm("", rule)])
    grade = reward.grade(samples, prompts)[1]
    assert not grade.failed and (grade.score, grade.answer, grade.correct) == (0.0, None, None)
    assert str(reward.last_failure).startswith("only the rule failed, the score is valid")


# -------------------------------------------------------------------------------------------- judge
class Server(BaseHTTPRequestHandler):
    """An OpenAI-compatible server: the rating is the length of the answer, "busy" waits once."""

    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"].split("Answer: ")[1].splitlines()[0]
        first = body not in self.requests
        self.requests.append(
            body | {"key": self.headers["Authorization"]} if text == "key" else body
        )
        content = "no idea" if text == "odd" else f"My rating: {len(text)}"
        reply = {"choices": [{"message": {"role": "assistant", "content": content}}]}
        self.send_response(503 if text == "busy" and first else 200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_judge_of_the_examples(pool: Any, monkeypatch) -> None:
    Server.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    for name, value in {"BASE_URL": url, "API_KEY": "secret"}.items():
        monkeypatch.setenv(f"OPENAI_{name}", value)
    monkeypatch.setenv("JUDGE_MODEL", "m")
    reward = RewardTerms(
        [
            RewardTerm("correct", pool("exact")),
            RewardTerm("judge", pool(f"{JUDGE}:rate", 1, retries=1), 10.0),
        ]
    )
    grades = reward.grade(*batch("ab", "abcd", "busy", "odd", "key", chat=True))
    server.shutdown()
    server.server_close()
    thread.join()
    assert [g.score for g in grades if not g.failed] == [1 + 2, 4, 4, 3]
    assert grades[3].failed and "'no idea' instead of a number" in str(reward.last_failure)
    assert Server.requests[0]["model"] == "m" and "Task: ask" in str(Server.requests[0])
    assert [r["key"] for r in Server.requests if "key" in r] == ["Bearer secret"]
    # The server is gone: each response fails and is counted, and nothing is raised.
    assert all(g.failed for g in reward.grade(*batch("ab", "c")))
    assert reward.failures == 3 and "Connection refused" in str(reward.last_failure)
    assert runpy.run_path(str(JUDGE))["rate"].__name__ == "rate"
