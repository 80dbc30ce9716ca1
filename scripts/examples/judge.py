"""A judge as a term of the reward: a model behind an OpenAI-compatible server rates each response.

    OPENAI_BASE_URL=http://localhost:8000/v1 JUDGE_MODEL=NAME embodied-ppo train
    experiment=arithmetic updates=5 'reward.terms={correct: {grader: auto}, judge: {grader:
    scripts/examples/judge.py:rate, weight: 0.2, timeout_s: 60, concurrency: 16}}'

OPENAI_API_KEY is sent if it is set. The function is async, so that many responses are rated at the
same time; a request that fails is repeated (``retries``), and a response without a rating is
counted and not trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.request import Request, urlopen

QUESTION = """Rate the answer to the task from 0 (useless) to 10 (correct and clear).
Task: {prompt}
Correct answer: {truth}
Answer: {response}
Reply with the number alone."""
THREADS = ThreadPoolExecutor(64)  # as many as the concurrency of a term by default


def _ask(question: str) -> str:
    """Return the reply of the server to one message."""
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    message = {"role": "user", "content": question}
    body = {"model": os.environ.get("JUDGE_MODEL", ""), "messages": [message], "temperature": 0}
    request = Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


async def rate(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any, prompt: Any
) -> float:
    """Return the rating from 0 to 1; ``prompt`` is a text or messages."""
    task = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    question = QUESTION.format(prompt=task, truth=ground_truth, response=solution_str)
    reply = await asyncio.get_running_loop().run_in_executor(THREADS, _ask, question)
    rating = re.search(r"\b(10|\d)\b", reply)
    if rating is None:
        raise ValueError(f"the judge replied {reply[:60]!r} instead of a number from 0 to 10")
    return int(rating[0]) / 10
