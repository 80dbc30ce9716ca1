"""Examine a language model: responses to held-out prompts -> accuracy with standard errors, per source of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from embodied_ppo.data import Prompt
from embodied_ppo.generation.engine import Generator
from embodied_ppo.generation.sampling import Sampling
from embodied_ppo.grading import Grade, majority, pass_at_k, standard_error
from embodied_ppo.reasoning import Graders
from embodied_ppo.types import Metrics

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

    def metrics(self) -> Metrics:
        """eval/* over all prompts, and eval/accuracy/SOURCE where there are several sources of data.

        accuracy (mean@n), its standard error over prompts; with n > 1 pass@k for k = 2, 4, .., n, unbiased, and maj@n;
        score, length, truncated, format.
        """
        found = self._of(range(len(self.prompts)))
        metrics: Metrics = {f"eval/{name}": x for name, x in found.items()}
        sources = sorted({p.data_source for p in self.prompts})
        if len(sources) > 1:
            for source in sources:
                rows = [i for i, p in enumerate(self.prompts) if p.data_source == source]
                metrics[f"eval/accuracy/{source}"] = self._of(rows)["accuracy"]
        return metrics

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
    grades = graders.grade([(p.data_source, t, p.ground_truth, p.extra) for p, t in zip(each, texts, strict=True)])
    stopped = made.stopped.tolist()
    answers = [Answer(i // n, texts[i], lengths[i], stopped[i], grade) for i, grade in enumerate(grades)]
    return ExamResult(prompts, answers, n)
