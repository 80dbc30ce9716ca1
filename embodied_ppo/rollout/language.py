"""Collect experience of a language model: prompts, responses, grades, as the trajectory that robots have, too."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from embodied_ppo.core.random import sampling_key
from embodied_ppo.core.types import ConfigError, Mean, Metrics, TrainingError, Trajectory
from embodied_ppo.data.prompts import Prompt, Sampler
from embodied_ppo.rewards.graders import Grade, Graders
from embodied_ppo.rollout.generation.engine import Generation, Generator
from embodied_ppo.rollout.generation.sampling import Sampling


def reader(decode: Callable[[list[int]], str], stop: Sequence[str]) -> Callable[[list[int]], str]:
    """Tokens of a response to its text as people read it, up to what stopped it."""

    def text(tokens: list[int]) -> str:
        whole = decode(tokens)
        ends = [at for one in stop if (at := whole.find(one)) >= 0]
        return whole[: min(ends)] if ends else whole

    return text


@dataclass(frozen=True)
class Truncation:
    """What becomes of a response that max_tokens cut.

    how               terminal: it is graded as it is; drop: it is graded for the metrics, and no part of the loss
    missing_eos       taken off its score
    overlong_buffer   tokens before max_tokens over which a penalty rises linearly from 0 to ``overlong_penalty``, cut
                      or not (Yu et al. 2025, DAPO, eq. 13); 0: none
    """

    how: Literal["terminal", "drop"] = "terminal"
    missing_eos: float = 0.0
    overlong_buffer: int = 0
    overlong_penalty: float = 1.0

    def penalty(self, length: Tensor, stopped: Tensor, max_tokens: int) -> Tensor:
        """What is taken off the scores, float32 [N]; length int64 [N], stopped bool [N]."""
        cost = self.missing_eos * (~stopped).float()
        if self.overlong_buffer:
            beyond = (length - (max_tokens - self.overlong_buffer)).clamp(min=0)
            cost = cost + self.overlong_penalty * beyond / self.overlong_buffer
        return cost


class ReasoningRollout:
    """``batch`` prompts an update, ``group_size`` responses to each."""

    one_state = True

    def __init__(
        self,
        prompts: Sequence[Prompt],
        generator: Generator,
        graders: Graders,
        decode: Callable[[list[int]], str],
        *,
        batch: int,
        sampling: Sampling,
        pad_id: int,
        seed: int,
        group_size: int = 1,
        shuffle: bool = True,
        truncation: Truncation | None = None,
        rank: int = 0,
        world: int = 1,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``decode``: token ids to text, without special tokens. ``rank`` of ``world`` processes, which share ``batch``
        evenly. Raises ConfigError for sampling that PPO cannot learn from."""
        if not sampling.plain:
            raise ConfigError(
                "rollout: top_k, top_p, min_p, repetition_penalty and temperature=0 sample from another distribution "
                "than the one whose probabilities are trained; leave them for evaluation"
            )
        self.prompts, self.generator, self.graders = prompts, generator, graders
        self.text = reader(decode, sampling.stop)
        self.sampling, self.pad_id, self.seed, self.group_size = sampling, pad_id, seed, group_size
        self.truncation, self.notice = truncation or Truncation(), notice
        self.rank, self.world = rank, world
        self.sampler = Sampler(len(prompts), batch, seed, shuffle)
        self.width = max(len(p.ids) for p in prompts) + sampling.max_tokens - 1
        self.cpu_s = {"generate": 0.0, "grade": 0.0}
        self.grade_s = 0.0
        """Wall time of reading and grading responses, of which ``cpu_s`` is this process's."""
        self._told = self._equal = False

    def collect(self, horizon: int, *, update: int, version: int) -> tuple[Trajectory, Metrics]:
        """``horizon`` is max_tokens (T). N = batch / world · group_size columns; groups are neighbours.

        Values are left 0: the critic fills them in. The score lies on the last token, where the episode ends.
        """
        assert horizon == self.sampling.max_tokens
        rows = self.sampler.next()
        mine = rows[self.rank * len(rows) // self.world : (self.rank + 1) * len(rows) // self.world]
        chosen = [self.prompts[i] for i in mine for _ in range(self.group_size)]
        start = time.process_time()
        key, first = sampling_key(self.seed, update, "generate"), self.rank * len(chosen)
        samples = torch.arange(first, first + len(chosen))  # the same noise, whoever generates
        made = self.generator.generate([p.ids for p in chosen], self.sampling, seed=key, samples=samples)
        generated, wall = time.process_time(), time.perf_counter()
        texts = [
            self.text(row[:n]) for row, n in zip(made.token.tolist(), made.length.tolist(), strict=True)
        ]  # without what ended them
        failures = self.graders.failures
        samples = [(p.data_source, text, p.ground_truth, p.extra) for p, text in zip(chosen, texts, strict=True)]
        grades = self.graders.grade(samples, chosen)
        self.cpu_s["generate"] += generated - start
        self.cpu_s["grade"] += time.process_time() - generated
        self.grade_s += time.perf_counter() - wall
        if self.graders.failures > failures and not self._told:  # once: rollout/grader_failures counts them
            self._told = True
            self.notice(f"reward: a response could not be graded: {self.graders.last_failure}")
        if all(g.failed for g in grades):
            raise TrainingError(f"reward: none of {len(grades)} responses could be graded: {self.graders.last_failure}")
        scores = torch.tensor([g.score for g in grades], device=made.token.device)
        if bool((scores == scores[0]).all()) and not self._equal:
            self._equal = True
            self.notice(f"reward: all {len(grades)} responses of an update scored {scores[0]:g}; that teaches nothing")
        return self._trajectory(chosen, made, scores, version), self._metrics(chosen, made, grades, scores)

    def _trajectory(self, chosen: Sequence[Prompt], made: Generation, scores: Tensor, version: int) -> Trajectory:
        where, t = made.token.device, self.sampling.max_tokens
        n = len(chosen)
        starts = torch.tensor([len(p.ids) for p in chosen], device=where)
        # Prompt and response without a gap; the last token is never an input.
        row = torch.full((n, self.width + 1), self.pad_id, dtype=torch.int64, device=where)
        for i, prompt in enumerate(chosen):
            row[i, : len(prompt.ids)] = torch.tensor(prompt.ids, device=where)
        steps = torch.arange(t, device=where)
        row.scatter_(1, starts.unsqueeze(1) + steps, made.token)
        last = steps == made.length.unsqueeze(1) - 1
        mask = steps < made.length.unsqueeze(1)
        if self.truncation.how == "drop":
            mask = mask & made.stopped.unsqueeze(1)
        score = scores - self.truncation.penalty(made.length, made.stopped, t)
        zero = torch.zeros(t, n, device=where)
        return Trajectory(
            obs={"row": row[:, : self.width].T.contiguous(), "place": (starts.unsqueeze(1) - 1 + steps).T.contiguous()},
            action=made.token.T.contiguous(),
            log_prob=made.log_prob.T.contiguous(),
            value=zero,
            replay={},
            next_value=zero,
            reward=torch.where(last, score.unsqueeze(1), 0.0).T.contiguous(),
            terminated=last.T.contiguous(),
            truncated=torch.zeros_like(last.T),
            mask=mask.T.contiguous(),
            version=torch.full((t, n), version, device=where),
        )

    def _metrics(self, chosen: Sequence[Prompt], made: Generation, grades: Sequence[Grade], scores: Tensor) -> Metrics:
        n = float(len(chosen))
        metrics: Metrics = {
            "rollout/return": Mean(float(scores.sum()), n),
            "rollout/length": Mean(float(made.length.sum()), n),
            "rollout/truncated": Mean(float((~made.stopped).sum()), n),
            "rollout/prompt_length": Mean.of(len(p.ids) for p in chosen),
            "rollout/grader_failures": float(sum(g.failed for g in grades)),
            "rollout/epoch": Mean(self.sampler.epoch, 1.0),  # the same in all processes
        }
        for tag, values in (
            ("rollout/success", [g.correct for g in grades if g.correct is not None]),
            ("rollout/format", [g.format_ok for g in grades if g.format_ok is not None]),
        ):
            if values:
                metrics[tag] = Mean.of(float(x) for x in values)
        return metrics

    def state(self) -> dict[str, Any]:
        """Where in the data it stands; everything else follows from seed and update."""
        return {"sampler": self.sampler.state()}

    def load_state(self, state: Mapping[str, Any], notice: Callable[[str], None] = lambda text: None) -> None:
        """Continue from ``state()``. Raises ConfigError for other data."""
        self.sampler.load_state(state["sampler"])

    def close(self) -> None:
        """End the graders."""
        self.graders.close()
