"""The reward of a response as the weighted sum of terms: graders and reward models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from embodied_ppo.data.prompts import Prompt
from embodied_ppo.rollout.rewards.graders import FAILED, Grade, Graders, Sample
from embodied_ppo.rollout.rewards.worker_pool import GraderPool


@dataclass(frozen=True)
class RewardTerm:
    """A term of the reward.

    Attributes:
        name: Name in metrics. Empty: its score is no number of its own.
        graders: Graders or a reward model.
        weight: Factor of its score. 0: it is measured only.
    """

    name: str
    graders: Graders
    weight: float = 1.0


class RewardTerms:
    """``Graders`` that add up terms. The first term states which answers are correct."""

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        self.terms = terms
        self.failures = 0  # number of grades of all terms so far that failed
        self.last_failure: str | None = None  # term, sample and cause of the most recent failure

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        """Return one grade per sample, in their order; prompts[i] belongs to samples[i].

        The score is the sum of weight x score, without the terms that do not apply to a response.
        The grade fails if a term fails whose weight is not 0, or if no term applies. Its other
        numbers are weight x score of each named term (with weight 0: the score), and the numbers of
        the graders as TERM/NAME.
        """
        before = [term.graders.failures for term in self.terms]
        columns = self._grade(samples, prompts)
        for term, count in zip(self.terms, before, strict=True):
            if failed := term.graders.failures - count:
                self.failures += failed
                name = f"{term.name}: " if term.name else ""
                note = "" if term.weight else "only the rule failed, the score is valid: "
                self.last_failure = f"{name}{note}{term.graders.last_failure}"
        return [self._add(grades) for grades in zip(*columns, strict=True)]

    def _grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[list[Grade]]:
        """Return the grades of each term."""
        # Worker processes and servers of several terms work at the same time. A model computes in
        # this thread, whose number of threads of torch is set.
        if len(self.terms) == 1:
            return [self.terms[0].graders.grade(samples, prompts)]
        # No ``with``: an interrupt does not wait for a grader, whose processes ``close`` ends.
        threads = ThreadPoolExecutor(len(self.terms))
        futures = [
            threads.submit(term.graders.grade, samples, prompts)
            if isinstance(term.graders, GraderPool)
            else None
            for term in self.terms
        ]
        return [
            term.graders.grade(samples, prompts) if future is None else future.result()
            for term, future in zip(self.terms, futures, strict=True)
        ]

    def _add(self, grades: Sequence[Grade]) -> Grade:
        """Return the grade of one response from those of the terms."""
        pairs = list(zip(self.terms, grades, strict=True))
        scored = [(t, g) for t, g in pairs if not math.isnan(g.score)]
        if not scored or any(g.failed and t.weight for t, g in pairs):
            if not any(g.failed for g in grades):
                self.failures += 1
                self.last_failure = "no term of the reward applies: all of them returned None"
            return FAILED
        if len(pairs) == 1 and not pairs[0][0].name:
            return grades[0]
        extra: dict[str, float] = {}
        for term, grade in scored:
            prefix = f"{term.name}/" if term.name else ""
            if term.name:
                extra[term.name] = (term.weight or 1.0) * grade.score
            extra |= {prefix + name: x for name, x in grade.extra.items()}
        score = sum(term.weight * grade.score for term, grade in scored)
        verdict = replace(grades[0], score=score, failed=False, extra=extra)
        # A first term that failed or does not apply states nothing.
        unknown = math.isnan(grades[0].score)
        return replace(verdict, correct=None if unknown else grades[0].is_right)

    def close(self) -> None:
        """Release the processes of all terms. May be called repeatedly."""
        for term in self.terms:
            term.graders.close()
