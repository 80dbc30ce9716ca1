"""Writes the responses of each update with their rewards and advantages (``rollout.dump``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embodied_ppo.core.types import Batch, Trajectory
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.rollout.rewards.graders import Grade
from embodied_ppo.training import generations


def grade_columns(
    prompts: Sequence[Prompt], grades: Sequence[Grade], terms: Sequence[str]
) -> Tensor:
    """Return ``Trajectory.grades``, float64 [1, N, 3 + K]: index of the prompt, score, verdict and
    the K terms of the reward. NaN: there is none.
    """
    nan = float("nan")
    rows = [
        [
            float(prompt.index),
            grade.score,
            nan if grade.failed else float(grade.is_right),
            *(grade.extra.get(name, nan) for name in terms),
        ]
        for prompt, grade in zip(prompts, grades, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).unsqueeze(0)


@dataclass(frozen=True)
class ResponseRecorder:
    """Writes the responses of a learner's columns.

    Attributes:
        run_dir: Directory of the run.
        dump: "all" or "sample".
        prompts: Training prompts.
        text: Tokens of a response -> its text.
        terms: Names of the terms of the reward.
        part: Rank of the learner; None: there is one.
    """

    run_dir: Path
    dump: str
    prompts: Sequence[Prompt]
    text: Callable[[list[int]], str]
    terms: Sequence[str]
    part: int | None = None

    def __call__(self, t: Trajectory, batch: Batch, update: int) -> None:
        """Write the file of an update, counted from 0. Raises OSError."""
        if t.grades is None:  # collected before a resume that has set rollout.dump
            return
        known = {prompt.index: prompt for prompt in self.prompts}
        grades = t.grades[0].tolist()
        chosen = generations.selected([int(row[0]) for row in grades], self.dump)
        lengths = (t.terminated.int().argmax(0) + 1).tolist()
        # [N, T]; a masked token, or one of a response that is not trained on, has no advantage.
        advantage = torch.where(batch.mask, batch.advantage, torch.nan).T.cpu()
        # One transfer from the device for all responses.
        action, log_prob = t.action.T.cpu(), t.log_prob.T.cpu()  # [N, T]
        lines = []
        for i in chosen:
            index, score, right, *terms = grades[i]
            part = slice(0, lengths[i])
            tokens = action[i, part].tolist()
            numbers = {
                "score": score,
                "terms": dict(zip(self.terms, terms, strict=True)),
                "advantage": advantage[i, part].tolist(),
                "log_prob": log_prob[i, part].tolist(),
            }
            prompt = known[int(index)]
            right = None if math.isnan(right) else bool(right)
            text = self.text(tokens)
            line = generations.entry(prompt, numbers, right=right, response=text, tokens=tokens)
            lines.append(line)
        generations.write(generations.file_of(self.run_dir, "train", update + 1, self.part), lines)
