"""Evaluation of a language model on held-out prompts: accuracy, pass@k, majority vote."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from embodied_ppo.core.types import Metrics
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.evaluation.episodes import Episode, EvaluationResult
from embodied_ppo.rollout.generation.engine import Generator
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.rewards.graders import Grade, Graders, extra_sums, refuse_failures
from embodied_ppo.training import generations

EVALUATION_SAMPLES = 1 << 40  # first sample number of evaluations; those of training are smaller


@dataclass(frozen=True)
class Answer:
    """A graded response to one prompt."""

    # Index of the prompt in the evaluation's prompts.
    prompt: int
    text: str
    tokens: Sequence[int]
    # Log-probability of each token, of the sampling distribution.
    log_prob: Sequence[float]
    # Whether the response ended before the limit of tokens.
    stopped: bool
    grade: Grade

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True)
class PromptEvaluationResult:
    """``n`` graded responses to each prompt; ``answers`` are ordered by prompt."""

    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    n: int
    sampling: Sampling
    seed: int

    def metrics(self) -> Metrics:
        """Return eval/* over all prompts, and eval/accuracy/SOURCE for several data sources.

        The metrics are accuracy (mean@n) with its standard error over prompts, return (the score),
        length, truncated, grader_failures, format, the grader's other numbers (reward/NAME), and
        for n > 1 unbiased pass@k with k = 2, 4, .., n, and maj@n. Responses that could not be
        graded count in length, truncated and grader_failures only.
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

        A source without a graded answer has no result.

        The episode's seed is the evaluation's, its initial state the sha256 of the prompt's text,
        its return the score and its length the number of tokens. It is truncated if the response
        did not stop before the limit.
        """
        results = []
        for source, rows in self._sources().items():
            answers = [a for i in rows for a in self._graded(i)]
            if not answers:
                continue
            episodes = tuple(self._episode(index, a) for index, a in enumerate(answers))
            # With greedy decoding the seed has no effect.
            is_greedy = self.sampling.temperature == 0
            results.append(EvaluationResult(source, self.seed, is_greedy, episodes))
        return results

    def samples(self, count: int = 20) -> list[dict[str, Any]]:
        """Return ``count`` answers to display, in order and evenly spaced.

        Half are right and half wrong if there are enough. Keys: prompt, response and ground_truth
        (texts), answer (extracted from the response, or None), score, right, length (tokens),
        stopped, data_source, and reward/NAME of each other number of the grader (or None).
        """
        graded = [i for i, a in enumerate(self.answers) if not a.grade.failed]
        right = [i for i in graded if self.answers[i].grade.is_right]
        wrong = [i for i in graded if not self.answers[i].grade.is_right]
        share = min(len(right), max(count // 2, count - len(wrong)))
        indices = sorted(_evenly_spaced(right, share) + _evenly_spaced(wrong, count - share))
        return [self._sample(self.answers[i]) for i in indices]

    def lines(self, dump: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of ``training.generations``; ``dump``: "sample" or "all"."""
        for i in generations.selected([self.prompts[a.prompt].index for a in self.answers], dump):
            a, grade = self.answers[i], self.answers[i].grade
            numbers = {"score": grade.score, "terms": grade.extra, "log_prob": a.log_prob}
            texts = {"right": None if grade.failed else grade.is_right, "response": a.text}
            yield generations.entry(self.prompts[a.prompt], numbers, **texts, tokens=list(a.tokens))

    def _graded(self, prompt: int) -> list[Answer]:
        """Return the answers to a prompt that could be graded."""
        answers = self.answers[prompt * self.n : (prompt + 1) * self.n]
        return [a for a in answers if not a.grade.failed]

    def _sources(self) -> dict[str, list[int]]:
        """Return data_source -> indices of its prompts, sorted by name."""
        sources: dict[str, list[int]] = {}
        for i, prompt in enumerate(self.prompts):
            sources.setdefault(prompt.data_source, []).append(i)
        return dict(sorted(sources.items()))

    def _episode(self, index: int, answer: Answer) -> Episode:
        """Return an answer as an episode of the report."""
        state = hashlib.sha256(self.prompts[answer.prompt].text.encode()).hexdigest()
        grade, ended = answer.grade, "terminated" if answer.stopped else "truncated"
        return Episode(index, self.seed, state, grade.score, answer.length, grade.is_right, ended)

    def _sample(self, answer: Answer) -> dict[str, Any]:
        """Return an answer with its prompt, for the report."""
        prompt = self.prompts[answer.prompt]
        names = extra_sums([a.grade for a in self.answers])
        return {
            "prompt": prompt.text,
            "response": answer.text,
            "ground_truth": prompt.ground_truth,
            "answer": answer.grade.answer,
            "score": answer.grade.score,
            "right": answer.grade.is_right,
            "length": answer.length,
            "stopped": answer.stopped,
            "data_source": prompt.data_source,
            **{f"reward/{name}": answer.grade.extra.get(name) for name in names},
        }

    def _statistics(self, rows: Sequence[int]) -> dict[str, float]:
        """Return the metrics over the prompts with these indices."""
        flat = [a for i in rows for a in self.answers[i * self.n : (i + 1) * self.n]]
        groups = [group for i in rows if (group := self._graded(i))]
        graded = [a for group in groups for a in group]
        shares = [sum(a.grade.is_right for a in group) / len(group) for group in groups]
        statistics = {
            "accuracy": _mean(shares),
            "accuracy_error": standard_error(shares),
            "return": _mean([a.grade.score for a in graded]),
            "length": _mean([float(a.length) for a in flat]),
            "truncated": _mean([float(not a.stopped) for a in flat]),
            "grader_failures": float(len(flat) - len(graded)),
        }
        formats = [float(a.grade.format_ok) for a in graded if a.grade.format_ok is not None]
        if formats:
            statistics["format"] = fmean(formats)
        for name, (total, count) in extra_sums([a.grade for a in graded]).items():
            statistics[f"reward/{name}"] = total / count
        if self.n > 1:
            counts = [(len(group), sum(a.grade.is_right for a in group)) for group in groups]
            ks = {2**i for i in range(1, self.n.bit_length()) if 2**i <= self.n} | {self.n}
            statistics |= {
                f"pass@{k}": _mean([pass_at_k(n, c, k) for n, c in counts if n >= k])
                for k in sorted(ks)
            }
            # A grader without extracted answers allows no majority vote.
            if all(a.grade.answer is not None or not a.grade.is_right for a in graded):
                votes = [[(a.grade.answer, a.grade.is_right) for a in g] for g in groups]
                right = [float(majority(*zip(*vote, strict=True))) for vote in votes]
                statistics[f"maj@{self.n}"] = _mean(right)
        return statistics


def _mean(values: Sequence[float]) -> float:
    """Return the mean, NaN without values."""
    return fmean(values) if values else math.nan


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

    Raises:
        TrainingError: Too many responses could not be graded.
    """
    repeated = [p for p in prompts for _ in range(n)]
    samples = EVALUATION_SAMPLES + torch.arange(len(repeated))
    generation = generator.generate([p.ids for p in repeated], sampling, seed=seed, samples=samples)
    lengths = generation.length.tolist()
    tokens = generation.token.tolist()
    texts = [text(row[:k]) for row, k in zip(tokens, lengths, strict=True)]
    responses = [
        (p.data_source, t, p.ground_truth, p.extra) for p, t in zip(repeated, texts, strict=True)
    ]
    grades = graders.grade(responses, repeated)
    refuse_failures(grades, graders.last_failure, "evaluation")
    stopped, log_probs = generation.stopped.tolist(), generation.log_prob.tolist()
    answers = [
        Answer(i // n, texts[i], tokens[i][:k], log_probs[i][:k], stopped[i], grade)
        for i, (k, grade) in enumerate(zip(lengths, grades, strict=True))
    ]
    return PromptEvaluationResult(prompts, answers, n, sampling, seed)


# --------------------------------------------------------------------------------------- statistics
def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n samples, c of them right.

    Equation 1 of Chen et al. (2021):

        1 - C(n-c, k) / C(n, k)  =  1 - prod over i = n-c+1 .. n of (1 - k/i)

    The product does not overflow. Requires 1 <= k <= n and 0 <= c <= n.
    """
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> bool:
    """Return whether the most frequent answer is right (maj@k); of a tie, the first answer.

    Args:
        answers: Extracted answers; None (no answer) wins only if all are None.
        correct: Whether each answer is right, as many.
    """
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
