"""Examine a language model: responses to held-out prompts -> accuracy with standard errors, per source of data."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from embodied_ppo.core.types import ConfigError, Metrics
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.evaluation.episodes import Episode, EvaluationResult
from embodied_ppo.rewards.graders import Grade, Graders
from embodied_ppo.rollout.generation.engine import Generator
from embodied_ppo.rollout.generation.sampling import Sampling

EXAM_SAMPLES = 1 << 40
"""Numbers of an exam's samples begin here: none is one of training's."""


@dataclass(frozen=True)
class Answer:
    """One response to one prompt."""

    prompt: int
    """Row of the exam's prompts."""
    text: str
    length: int
    """Tokens."""
    stopped: bool
    grade: Grade

    @property
    def right(self) -> bool:
        """As the grader says, else a score of at least 1."""
        return self.grade.score >= 1.0 if self.grade.correct is None else self.grade.correct


@dataclass(frozen=True)
class ExamResult:
    """n responses to each of some prompts, prompt by prompt."""

    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    n: int
    sampling: Sampling
    seed: int

    @property
    def deterministic(self) -> bool:
        """Greedy: the likeliest token each time, whatever the seed."""
        return self.sampling.temperature == 0

    def metrics(self) -> Metrics:
        """eval/* over all prompts, and eval/accuracy/SOURCE where there are several sources of data.

        accuracy (mean@n), its standard error over prompts; with n > 1 pass@k for k = 2, 4, .., n, unbiased, and maj@n;
        score, length, truncated, format.
        """
        found = self._of(range(len(self.prompts)))
        metrics: Metrics = {f"eval/{name}": x for name, x in found.items()}
        sources = self._sources()
        if len(sources) > 1:
            metrics |= {f"eval/accuracy/{source}": self._of(rows)["accuracy"] for source, rows in sources.items()}
        return metrics

    def results(self) -> list[EvaluationResult]:
        """What report.write takes: one result for each source of data, by name; each answer is an episode.

        Its seed is the exam's, its initial state the sha256 of its prompt's text, its return the score, its length in
        tokens; truncated where it did not stop by itself.
        """
        found = []
        for source, rows in self._sources().items():
            answers = [a for i in rows for a in self.answers[i * self.n : (i + 1) * self.n]]
            episodes = tuple(self._episode(index, a) for index, a in enumerate(answers))
            found.append(EvaluationResult(source, self.seed, self.deterministic, episodes))
        return found

    def samples(self, count: int = 20) -> list[dict[str, Any]]:
        """``count`` answers to read, in order: half of them right, half wrong where there are so many, evenly chosen.

        The keys: prompt, response, ground_truth (texts), answer (as read from the response, or None), score, right,
        length (tokens), stopped, data_source.
        """
        right = [i for i, a in enumerate(self.answers) if a.right]
        wrong = [i for i, a in enumerate(self.answers) if not a.right]
        share = min(len(right), max(count // 2, count - len(wrong)))
        chosen = sorted(_evenly(right, share) + _evenly(wrong, count - share))
        return [self._sample(self.answers[i]) for i in chosen]

    def _sources(self) -> dict[str, list[int]]:
        """data_source -> rows of its prompts, by name."""
        names = [p.data_source for p in self.prompts]
        return {source: [i for i, name in enumerate(names) if name == source] for source in sorted(set(names))}

    def _episode(self, index: int, answer: Answer) -> Episode:
        return Episode(
            index=index,
            seed=self.seed,
            initial_state=hashlib.sha256(self.prompts[answer.prompt].text.encode()).hexdigest(),
            return_=answer.grade.score,
            length=answer.length,
            success=answer.right,
            ended="terminated" if answer.stopped else "truncated",
        )

    def _sample(self, answer: Answer) -> dict[str, Any]:
        prompt = self.prompts[answer.prompt]
        return {
            "prompt": prompt.text,
            "response": answer.text,
            "ground_truth": prompt.ground_truth,
            "answer": answer.grade.answer,
            "score": answer.grade.score,
            "right": answer.right,
            "length": answer.length,
            "stopped": answer.stopped,
            "data_source": prompt.data_source,
        }

    def _of(self, rows: Sequence[int]) -> dict[str, float]:
        groups = [self.answers[i * self.n : (i + 1) * self.n] for i in rows]
        flat = [a for group in groups for a in group]
        shares = [sum(a.right for a in group) / self.n for group in groups]
        found = {
            "accuracy": _mean(shares),
            "accuracy_error": standard_error(shares),
            "return": _mean([a.grade.score for a in flat]),
            "length": _mean([float(a.length) for a in flat]),
            "truncated": _mean([float(not a.stopped) for a in flat]),
            "grader_failures": float(sum(a.grade.failed for a in flat)),
        }
        formats = [float(a.grade.format_ok) for a in flat if a.grade.format_ok is not None]
        if formats:
            found["format"] = _mean(formats)
        if self.n > 1:
            counts = [sum(a.right for a in group) for group in groups]
            ks = {2**i for i in range(1, self.n.bit_length()) if 2**i <= self.n} | {self.n}
            found |= {f"pass@{k}": _mean([pass_at_k(self.n, c, k) for c in counts]) for k in sorted(ks)}
            if all(a.grade.answer is not None or not a.right for a in flat):
                votes = [majority([a.grade.answer for a in g], [a.right for a in g]) for g in groups]
                found[f"maj@{self.n}"] = _mean([float(x) for x in votes])
        return found


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _evenly(rows: Sequence[int], count: int) -> list[int]:
    """``count`` of the rows, or all there are, at equal distances."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def examine(
    prompts: Sequence[Prompt],
    generator: Generator,
    graders: Graders,
    text: Callable[[list[int]], str],
    sampling: Sampling,
    *,
    n: int = 1,
    seed: int = 0,
) -> ExamResult:
    """``n`` responses to each prompt; greedy where sampling.temperature is 0. ``text``: tokens to a response's text."""
    each = [p for p in prompts for _ in range(n)]
    samples = EXAM_SAMPLES + torch.arange(len(each))
    made = generator.generate([p.ids for p in each], sampling, seed=seed, samples=samples)
    lengths = made.length.tolist()
    texts = [text(row[:k]) for row, k in zip(made.token.tolist(), lengths, strict=True)]
    responses = [(p.data_source, t, p.ground_truth, p.extra) for p, t in zip(each, texts, strict=True)]
    grades = graders.grade(responses, each)
    stopped = made.stopped.tolist()
    answers = [Answer(i // n, texts[i], lengths[i], stopped[i], grade) for i, grade in enumerate(grades)]
    return ExamResult(prompts, answers, n, sampling, seed)


# ----------------------------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    As 1 - prod over i = n-c+1 .. n of (1 - k/i), which neither overflows nor is biased. Raises ConfigError.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"pass@k: k = {k} must be >= 1 and <= n = {n} samples; draw more, or ask for a smaller k")
    if not 0 <= c <= n:
        raise ConfigError(f"pass@k: c = {c} right ones must be >= 0 and <= n = {n}")
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer is right (maj@k); of equally frequent ones the first seen.

    None (no answer) wins only where there is nothing else. Raises ConfigError.
    """
    if not answers or len(answers) != len(correct):
        raise ConfigError(f"maj@k: {len(answers)} answers and {len(correct)} verdicts must be as many, and >= 1")
    votes = Counter(answer for answer in answers if answer is not None)
    winner = votes.most_common(1)[0][0] if votes else None  # first seen first
    return bool(correct[answers.index(winner)])


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of independent values: sqrt(Σ(x - mean)² / n²), sqrt(p(1-p)/n) for 0s and 1s; NaN below 2 values."""
    n = len(values)
    if n < 2:
        return math.nan
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values)) / n
