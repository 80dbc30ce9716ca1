"""Evaluation of a language model on held-out prompts: accuracy, pass@k, majority vote."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from embodied_ppo.core.types import ConfigError, Metrics
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.evaluation.episodes import Episode, EvaluationResult
from embodied_ppo.rewards.graders import Grade, Graders
from embodied_ppo.rollout.generation.engine import Generator
from embodied_ppo.rollout.generation.sampling import Sampling

EVALUATION_SAMPLES = 1 << 40
"""First sample number of evaluations; those of training are smaller."""


@dataclass(frozen=True)
class Answer:
    """A graded response to one prompt."""

    prompt: int
    """Index of the prompt in the evaluation's prompts."""
    text: str
    length: int
    """Tokens."""
    stopped: bool
    """Whether the response ended before the limit of tokens."""
    grade: Grade

    @property
    def right(self) -> bool:
        """Return the grader's verdict, or whether the score is at least 1 if it has none."""
        return self.grade.score >= 1.0 if self.grade.correct is None else self.grade.correct


@dataclass(frozen=True)
class PromptEvaluationResult:
    """``n`` graded responses to each prompt; ``answers`` are ordered by prompt."""

    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    n: int
    sampling: Sampling
    seed: int

    @property
    def deterministic(self) -> bool:
        """Return whether decoding is greedy, so that the seed has no effect."""
        return self.sampling.temperature == 0

    def metrics(self) -> Metrics:
        """Return eval/* over all prompts, and eval/accuracy/SOURCE for several data sources.

        The metrics are accuracy (mean@n) with its standard error over prompts, return (the score),
        length, truncated, grader_failures, format, and for n > 1 unbiased pass@k with k = 2, 4, ..,
        n, and maj@n.
        """
        statistics = self._statistics(range(len(self.prompts)))
        metrics: Metrics = {f"eval/{name}": x for name, x in statistics.items()}
        sources = self._sources()
        if len(sources) > 1:
            metrics |= {
                f"eval/accuracy/{source}": self._statistics(rows)["accuracy"]
                for source, rows in sources.items()
            }
        return metrics

    def results(self) -> list[EvaluationResult]:
        """Return one result per data source for ``report.write``; each answer is an episode.

        The episode's seed is the evaluation's, its initial state the sha256 of the prompt's text,
        its return the score and its length the number of tokens. It is truncated if the response
        did not stop before the limit.
        """
        results = []
        for source, rows in self._sources().items():
            answers = [a for i in rows for a in self.answers[i * self.n : (i + 1) * self.n]]
            episodes = tuple(self._episode(index, a) for index, a in enumerate(answers))
            results.append(EvaluationResult(source, self.seed, self.deterministic, episodes))
        return results

    def samples(self, count: int = 20) -> list[dict[str, Any]]:
        """Return ``count`` answers to display, in order and evenly spaced.

        Half are right and half wrong if there are enough. Keys: prompt, response and ground_truth
        (texts), answer (extracted from the response, or None), score, right, length (tokens),
        stopped, data_source.
        """
        right = [i for i, a in enumerate(self.answers) if a.right]
        wrong = [i for i, a in enumerate(self.answers) if not a.right]
        share = min(len(right), max(count // 2, count - len(wrong)))
        indices = sorted(_evenly_spaced(right, share) + _evenly_spaced(wrong, count - share))
        return [self._sample(self.answers[i]) for i in indices]

    def _sources(self) -> dict[str, list[int]]:
        """Return data_source -> indices of its prompts, sorted by name."""
        names = [p.data_source for p in self.prompts]
        return {
            source: [i for i, name in enumerate(names) if name == source]
            for source in sorted(set(names))
        }

    def _episode(self, index: int, answer: Answer) -> Episode:
        """Return an answer as an episode of the report."""
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
        """Return an answer with its prompt, for the report."""
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

    def _statistics(self, rows: Sequence[int]) -> dict[str, float]:
        """Return the metrics over the prompts with these indices."""
        groups = [self.answers[i * self.n : (i + 1) * self.n] for i in rows]
        flat = [a for group in groups for a in group]
        shares = [sum(a.right for a in group) / self.n for group in groups]
        statistics = {
            "accuracy": fmean(shares),
            "accuracy_error": standard_error(shares),
            "return": fmean([a.grade.score for a in flat]),
            "length": fmean([float(a.length) for a in flat]),
            "truncated": fmean([float(not a.stopped) for a in flat]),
            "grader_failures": float(sum(a.grade.failed for a in flat)),
        }
        formats = [float(a.grade.format_ok) for a in flat if a.grade.format_ok is not None]
        if formats:
            statistics["format"] = fmean(formats)
        if self.n > 1:
            counts = [sum(a.right for a in group) for group in groups]
            ks = {2**i for i in range(1, self.n.bit_length()) if 2**i <= self.n} | {self.n}
            statistics |= {
                f"pass@{k}": fmean([pass_at_k(self.n, c, k) for c in counts]) for k in sorted(ks)
            }
            # A grader without extracted answers allows no majority vote.
            if all(a.grade.answer is not None or not a.right for a in flat):
                votes = [
                    majority([a.grade.answer for a in g], [a.right for a in g]) for g in groups
                ]
                statistics[f"maj@{self.n}"] = fmean([float(x) for x in votes])
        return statistics


def _evenly_spaced(rows: Sequence[int], count: int) -> list[int]:
    """Return ``count`` of the rows at equal distances, or all if there are fewer."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def evaluate_prompts(
    prompts: Sequence[Prompt],
    generator: Generator,
    graders: Graders,
    text: Callable[[list[int]], str],
    sampling: Sampling,
    *,
    n: int = 1,
    seed: int = 0,
) -> PromptEvaluationResult:
    """Generate and grade ``n`` responses to each prompt.

    Args:
        prompts: Held-out prompts.
        generator: Decoding engine with the policy's weights.
        graders: Graders by data source.
        text: Function from a response's tokens to its text.
        sampling: Sampling parameters; temperature 0 is greedy decoding.
        n: Responses per prompt.
        seed: Seed of sampling.
    """
    repeated = [p for p in prompts for _ in range(n)]
    samples = EVALUATION_SAMPLES + torch.arange(len(repeated))
    generation = generator.generate([p.ids for p in repeated], sampling, seed=seed, samples=samples)
    lengths = generation.length.tolist()
    texts = [text(row[:k]) for row, k in zip(generation.token.tolist(), lengths, strict=True)]
    responses = [
        (p.data_source, t, p.ground_truth, p.extra) for p, t in zip(repeated, texts, strict=True)
    ]
    grades = graders.grade(responses, repeated)
    stopped = generation.stopped.tolist()
    answers = [
        Answer(i // n, texts[i], lengths[i], stopped[i], grade) for i, grade in enumerate(grades)
    ]
    return PromptEvaluationResult(prompts, answers, n, sampling, seed)


# --------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n samples, c of them right.

    Equation 1 of Chen et al. (2021):

        1 - C(n-c, k) / C(n, k)  =  1 - prod over i = n-c+1 .. n of (1 - k/i)

    The product does not overflow.

    Raises:
        ConfigError: Not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not 1 <= k <= n:
        raise ConfigError(
            f"pass@k: k = {k} must be >= 1 and <= n = {n} samples; draw more, or choose a smaller k"
        )
    if not 0 <= c <= n:
        raise ConfigError(f"pass@k: c = {c} right ones must be >= 0 and <= n = {n}")
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Return whether the most frequent answer is right (maj@k); of a tie, the first answer.

    Args:
        answers: Extracted answers; None (no answer) wins only if all are None.
        correct: Whether each answer is right.

    Raises:
        ConfigError: The lengths differ or are 0.
    """
    if not answers or len(answers) != len(correct):
        raise ConfigError(
            f"maj@k: {len(answers)} answers and {len(correct)} verdicts must be as many, and >= 1"
        )
    votes = Counter(answer for answer in answers if answer is not None)
    winner = votes.most_common(1)[0][0] if votes else None  # ties in order of first occurrence
    return bool(correct[answers.index(winner)])


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; NaN for fewer than two.

    sqrt(Σ(x - mean)² / n²), which is sqrt(p(1-p)/n) for values 0 and 1.
    """
    n = len(values)
    if n < 2:
        return math.nan
    mean = fmean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values)) / n
