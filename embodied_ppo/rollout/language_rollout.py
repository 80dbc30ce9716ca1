"""Collection of trajectories of a language model: generate responses to prompts and grade them."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from embodied_envs.base.random import sampling_key
from embodied_envs.types import Say
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.devices import upload
from embodied_ppo.core.errors import RunRefused
from embodied_ppo.core.running_stats import expand, read_numbers
from embodied_ppo.core.types import Mean, Metrics, Trajectory, add_metrics
from embodied_ppo.data.prompts import Prompt, Sampler
from embodied_ppo.options.reward_groups import RewardGroup
from embodied_ppo.rollout.generation.engine import Generation, Generator
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.group_filter import GroupFilter
from embodied_ppo.rollout.group_rewards import GroupRewards
from embodied_ppo.rollout.partial_responses import PartialResponses, Responses
from embodied_ppo.rollout.recorded_responses import grade_columns
from embodied_ppo.rollout.rewards.graders import Grade, Graders, extra_sums, refuse_failures


def response_decoder(
    decode: Callable[[list[int]], str], stop: Sequence[str]
) -> Callable[[list[int]], str]:
    """Return a function from a response's tokens to its text before the first stop string."""

    def text(tokens: list[int]) -> str:
        full_text = decode(tokens)
        ends = [i for string in stop if (i := full_text.find(string)) >= 0]
        return full_text[: min(ends)] if ends else full_text

    return text


@dataclass(frozen=True)
class Truncation:
    """Treatment of responses that max_tokens truncated.

    Attributes:
        treatment: "terminal": they are graded like other responses. "drop": they are graded for
            the metrics and excluded from the loss.
        missing_eos: Penalty subtracted from their score.
        overlong_buffer: Tokens before max_tokens over which a penalty rises linearly to 1, also for
            responses that stopped (Yu et al. 2025, DAPO, eq. 13); 0: no penalty.
    """

    treatment: Literal["terminal", "drop"] = "terminal"
    missing_eos: float = 0.0
    overlong_buffer: int = 0

    def penalties(self, length: Tensor, stopped: Tensor, max_tokens: int) -> dict[str, Tensor]:
        """Return name -> penalty to subtract from the scores, float32 [N]; those that are set.

        Args:
            length: int64 [N], tokens of each response.
            stopped: bool [N], whether the response ended before ``max_tokens``.
            max_tokens: Maximum length.
        """
        penalties: dict[str, Tensor] = {}
        if self.missing_eos:
            penalties["missing_eos_penalty"] = self.missing_eos * (~stopped).float()
        if self.overlong_buffer:
            # DAPO, eq. 13: 0 up to the buffer, then linear up to 1 at max_tokens.
            excess = (length - (max_tokens - self.overlong_buffer)).clamp(min=0)
            penalties["overlong_penalty"] = excess / self.overlong_buffer
        return penalties


class ReasoningRollout:
    """Collects ``group_size`` responses to each of ``batch`` prompts per update."""

    # Whether all processes share one rollout state.
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
        filter_rounds: int = 0,
        oversampling: float = 0.0,
        shuffle: bool | Literal["success"] = True,
        truncation: Truncation | None = None,
        reward_groups: Sequence[RewardGroup] = (),
        recorded_terms: Sequence[str] | None = None,
        ranks: Ranks | None = None,
        notice: Say = lambda text: None,
    ) -> None:
        """Create a rollout.

        Args:
            prompts: Training prompts.
            generator: Decode engine with the policy's weights.
            graders: Graders by data source.
            decode: Function from token ids to text, without special tokens.
            batch: Prompts per update, over all processes.
            sampling: Sampling parameters.
            pad_id: Token id of padding.
            seed: Seed of the run.
            group_size: Responses to each prompt.
            filter_rounds: Rounds in which ``collect`` may draw prompts to fill a batch with groups
                of right and wrong responses; 0: groups are not filtered.
            oversampling: Share of a batch that is generated in addition, see ``PartialResponses``.
                Not with ``filter_rounds``.
            shuffle: Whether to shuffle the prompts in every epoch; "success": with weights by the
                success of all processes' responses, see ``Sampler``.
            truncation: Treatment of truncated responses.
            reward_groups: Groups of the score, each with a reward of its own; empty: none.
            recorded_terms: Terms of the reward in ``Trajectory.grades``; None: it has no grades.
            ranks: Rollout processes, each of which takes an equal part of ``batch``.
            notice: Function that shows a message to the user.
        """
        # Filters would sample from another distribution than the trained one.
        assert sampling.plain
        self.prompts, self.generator, self.graders = prompts, generator, graders
        self.text = response_decoder(decode, sampling.stop)
        self.sampling, self.pad_id, self.seed, self.group_size = sampling, pad_id, seed, group_size
        self.truncation, self.notice = truncation or Truncation(), notice
        self.ranks, self.recorded_terms = ranks or Ranks(), recorded_terms
        self.group_rewards = GroupRewards(reward_groups, "the grader") if reward_groups else None
        self.filter: GroupFilter | None = None
        if filter_rounds:
            self.filter = GroupFilter(batch // self.ranks.world, group_size, filter_rounds)
        groups, kind = batch // self.ranks.world, {"response_length": sampling.max_tokens}
        kind |= {"rollout rank": self.ranks.rank, "rollout processes": self.ranks.world}
        extra = math.ceil(oversampling * groups)
        self.partial = PartialResponses(groups, extra, group_size, kind)
        self.by_success = shuffle == "success"
        self.sampler = Sampler(
            *(len(prompts), batch, seed, bool(shuffle)),
            weights=[p.weight for p in prompts],
            by_success=self.by_success,
            checksum=zlib.crc32(repr([(p.ids, p.ground_truth) for p in prompts]).encode()),
        )
        self.width = max(len(p.ids) for p in prompts) + sampling.max_tokens - 1
        self.cpu_s = {"generate": 0.0, "grade": 0.0}
        self._noticed = set[str]()  # topics of ``_notice_once``
        self._failures = 0  # of graders, in the last call of ``_grade``

    def collect(self, horizon: int, *, update: int, version: int) -> tuple[Trajectory, Metrics]:
        """Generate and grade one batch of responses.

        Args:
            horizon: T, which must be ``sampling.max_tokens``.
            update: Index of the update, from which random numbers are derived.
            version: Version of the policy's weights.

        Returns:
            Trajectory [T, N] with N = batch / world * group_size (the responses of a group are
            adjacent), and metrics. Values are 0, because the critic computes them later. The score
            is the reward of the last token, which ends the episode.

        Raises:
            RunRefused: Groups are filtered or prompts weighted by success, but a grader returns no
                correctness; or reward groups do not fit its numbers.
            TrainingError: Too many responses could not be graded.
        """
        assert horizon == self.sampling.max_tokens
        if self.filter is None:
            # What the last update has not completed comes first.
            drawn, _ = self._draw([self.partial.missing] * self.ranks.world)
            rows = [*self.partial.prompts, *drawn]
            offset = self.ranks.rank * len(rows) * self.group_size
            responses = self.partial.take(self._generate(rows, offset, update, version))
            rows = responses.prompt[:: self.group_size].tolist()
            trajectory, metrics, grades = self._grade(responses)
            self._record_success(rows, grades, len(rows))
            refuse_failures(grades, self.graders.last_failure, "update")
            return trajectory, metrics
        rounds: list[Metrics] = []
        graded: list[Grade] = []
        response_offset = 0
        # Draw as many prompts as groups are missing; the random numbers go on from round to round.
        # A process whose share is full takes part in the rounds of the others without a prompt.
        while any(missing := self._gather(torch.tensor([self.filter.missing])).tolist()):
            rows, offset = self._draw(missing)
            offset += response_offset
            response_offset += sum(missing) * self.group_size
            if not rows:
                self._record_success([], [], max(missing))
                self.filter.round += 1
                continue
            responses = self._generate(rows, offset, update, version)
            trajectory, metrics, grades = self._grade(responses)
            self._record_success(rows, grades, max(missing))
            graded += grades
            refuse_failures(graded, self.graders.last_failure, "update")
            tokens = int(cast(Any, metrics["rollout/length"]).sum)
            success = self._success(rows, grades, "algorithm.group_filter=null")
            self.filter.add(trajectory, torch.tensor(success), tokens)
            rounds.append(metrics)
        trajectory, filter_metrics = self.filter.take()
        epoch = {"rollout/epoch": Mean(self.sampler.epoch, 1.0)}
        return trajectory, add_metrics(rounds) | epoch | filter_metrics

    def _gather(self, x: Tensor) -> Tensor:
        """Return x [.., n] of all processes side by side."""
        return torch.cat(self.ranks.all_gather(x), -1)

    def _draw(self, counts: Sequence[int]) -> tuple[list[int], int]:
        """Draw prompts for all processes, ``counts`` for each.

        Returns:
            The prompts of this process, and the number of responses to those before them.
        """
        rank = self.ranks.rank
        first = sum(counts[:rank])
        return self.sampler.next(sum(counts))[first:][: counts[rank]], first * self.group_size

    def _success(
        self, rows: Sequence[int], grades: Sequence[Grade], alternative: str
    ) -> list[bool]:
        """Return whether each response is right; a failed response is masked anyway.

        Args:
            rows: Indices of the prompts.
            grades: Grades of all responses.
            alternative: Option that does not need it, for the message.
        """
        unknown = [i for i, g in enumerate(grades) if g.correct is None and not g.failed]
        # A rule beside a reward model may have failed.
        if len(unknown) > max(0, self._failures - sum(grade.failed for grade in grades)):
            source = self.prompts[rows[unknown[0] // self.group_size]].data_source
            raise RunRefused(
                f'return {{"score": .., "acc": ..}}, or write {alternative}: the grader of data'
                f" source {source!r} returns no correctness"
            )
        return [bool(grade.correct) for grade in grades]

    def _record_success(self, rows: Sequence[int], grades: Sequence[Grade], most: int) -> None:
        """Record the responses of all processes, so that all draw the same prompts from then on.

        ``most``: largest number of prompts of a process. Nothing is recorded without weights by
        success.
        """
        if not self.by_success:
            return
        success = self._success(rows, grades, "data.shuffle=true")
        drawn = [row for row in rows for _ in range(self.group_size)]
        counted = [not g.failed and g.correct is not None for g in grades]
        results = torch.tensor([drawn, success, counted], dtype=torch.int64)
        results = F.pad(results, (0, most * self.group_size - len(drawn)))  # not counted
        drawn, success, counted = self._gather(results)  # [responses of all processes] each
        self.sampler.record(drawn[counted > 0].tolist(), success[counted > 0].tolist())

    def _generate(
        self, rows: Sequence[int], response_offset: int, update: int, version: int
    ) -> Responses:
        """Generate ``group_size`` responses to each of some prompts.

        Args:
            rows: Indices of the prompts, first those of unfinished responses.
            response_offset: Number of the first response in the update, over all processes.
            update, version: See ``collect``.
        """
        start = time.process_time()
        prompt = torch.tensor(rows).repeat_interleave(self.group_size)
        # Samples are numbered over all processes, so that the random numbers of a response do not
        # depend on the number of processes.
        samples = torch.arange(response_offset, response_offset + len(prompt))
        options: dict[str, Any] = {}
        if self.partial.extra:
            begun = self.partial.unfinished
            options["begun"] = None if begun is None else begun.generation
            options["enough"] = partial(self.partial.enough, len(prompt))
        ids = [self.prompts[i].ids for i in prompt.tolist()]
        key = sampling_key(self.seed, update, "generate")
        generation = self.generator.generate(
            ids, self.sampling, seed=key, samples=samples, **options
        )
        self.cpu_s["generate"] += time.process_time() - start
        return Responses(prompt, generation, self.partial.versions(generation, version))

    def _grade(self, responses: Responses) -> tuple[Trajectory, Metrics, list[Grade]]:
        """Decode and grade the texts of complete responses."""
        start, generation = time.process_time(), responses.generation
        prompts = [self.prompts[i] for i in responses.prompt.tolist()]
        tokens, lengths = generation.token.tolist(), generation.length.tolist()
        texts = [self.text(row[:n]) for row, n in zip(tokens, lengths, strict=True)]
        failures = self.graders.failures
        graded = zip(prompts, texts, strict=True)
        answers = [(p.data_source, text, p.ground_truth, p.extra) for p, text in graded]
        grades = self.graders.grade(answers, prompts)
        self._failures = self.graders.failures - failures
        self.cpu_s["grade"] += time.process_time() - start
        # Only the first failure is reported; rollout/grader_failures counts all.
        if self._failures:
            cause = self.graders.last_failure
            self._notice_once("failure", f"a response could not be graded: {cause}")
        valid = [g for g in grades if not g.failed]
        if len({g.score for g in valid}) == 1:
            self._notice_once(
                "equal scores",
                f"all {len(valid)} responses of an update scored {valid[0].score:g}; equal scores"
                " give no learning signal",
            )
        trajectory, penalties = self._trajectory(prompts, responses, grades)
        return trajectory, self._metrics(prompts, generation, grades, penalties), grades

    def _notice_once(self, topic: str, text: str) -> None:
        """Write a line about a topic to the log, unless there is one already."""
        if topic not in self._noticed:
            self._noticed.add(topic)
            self.notice(f"reward: {text}")

    def _trajectory(
        self,
        prompts: Sequence[Prompt],
        responses: Responses,
        grades: Sequence[Grade],
    ) -> tuple[Trajectory, dict[str, Tensor]]:
        """Return the graded responses as a trajectory [T, N], and penalties of the score [N].

        Responses that could not be graded are masked.
        """
        generation, t = responses.generation, self.sampling.max_tokens
        device = generation.token.device
        n = len(prompts)
        starts = upload([len(p.ids) for p in prompts], device)  # [N] prompt lengths
        # [N, width + 1], prompt and response without a gap; the last token is never an input.
        row = torch.full((n, self.width + 1), self.pad_id, dtype=torch.int64, device=device)
        width = max(len(p.ids) for p in prompts)
        padded = [[*p.ids, *[self.pad_id] * (width - len(p.ids))] for p in prompts]
        row[:, :width] = upload(padded, device)
        # Write each response directly behind its prompt.
        steps = torch.arange(t, device=device)
        row.scatter_(1, starts.unsqueeze(1) + steps, generation.token)
        # The score is the reward of the last token, which ends the episode.
        last = steps == generation.length.unsqueeze(1) - 1  # [N, T]
        mask = steps < generation.length.unsqueeze(1)  # [N, T]
        valid = upload([not g.failed for g in grades], device)  # [N]
        mask = mask & valid.unsqueeze(1)
        # Responses that max_tokens truncated are graded, and masked with "drop".
        if self.truncation.treatment == "drop":
            mask = mask & generation.stopped.unsqueeze(1)
        penalties = self.truncation.penalties(generation.length, generation.stopped, t)
        # Failed responses are masked, so that their score does not matter.
        score = upload([0.0 if g.failed else g.score for g in grades], device)
        score = torch.where(valid, score - sum(penalties.values()), 0.0)  # [N]
        if self.group_rewards is not None:
            names = dict.fromkeys(name for g in grades for name in g.extra)
            terms = {x: upload([g.extra.get(x, math.nan) for g in grades], device) for x in names}
            (score,) = self.group_rewards([terms], score.unsqueeze(0), valid.unsqueeze(0))
        # [T, N], or [T, N, G] of reward groups
        ends = expand(last.T, score.expand(t, *score.shape))
        zero = torch.zeros(t, n, device=device)
        trajectory = Trajectory(
            obs={
                "row": row[:, : self.width].T.contiguous(),
                "place": (starts.unsqueeze(1) - 1 + steps).T.contiguous(),
            },
            action=generation.token.T.contiguous(),
            log_prob=generation.log_prob.T.contiguous(),
            value=zero,
            replay={},
            next_value=zero,
            reward=torch.where(ends, score, 0.0).contiguous(),
            terminated=last.T.contiguous(),
            truncated=torch.zeros_like(last.T),
            mask=mask.T.contiguous(),
            version=responses.version.T.contiguous(),
            grades=None
            if self.recorded_terms is None
            else grade_columns(prompts, grades, self.recorded_terms).to(device),
        )
        return trajectory, {name: penalty * valid for name, penalty in penalties.items()}

    def _metrics(
        self,
        prompts: Sequence[Prompt],
        generation: Generation,
        grades: Sequence[Grade],
        penalties: Mapping[str, Tensor],
    ) -> Metrics:
        """Return rollout/* and reward/* of one batch; scores are those of valid responses."""
        # One transfer from the device for all counts.
        n = float(len(prompts))
        counts = generation.length.sum(), (~generation.stopped).sum()
        sums = (penalty.sum() for penalty in penalties.values())
        length, truncated, *penalty_sums = read_numbers(*counts, *sums)
        valid = [g for g in grades if not g.failed]
        count, score = float(len(valid)), float(torch.tensor([g.score for g in valid]).sum())
        # Parts of the reward, so that penalties can be told from the grader's score.
        parts = extra_sums(valid)
        if penalties:
            parts |= {"score": parts.get("score", (score, len(valid)))}
            parts |= {name: (x, len(valid)) for name, x in zip(penalties, penalty_sums)}
        metrics: Metrics = {
            "rollout/return": Mean(score - sum(penalty_sums), count),
            "rollout/length": Mean(length, n),
            "rollout/truncated": Mean(truncated, n),
            "rollout/prompt_length": Mean.of(len(p.ids) for p in prompts),
            "rollout/grader_failures": float(sum(g.failed for g in grades)),
            # A mean, because the value is the same in all processes and must not be added up.
            "rollout/epoch": Mean(self.sampler.epoch, 1.0),
        }
        correct, format_ok = [g.correct for g in grades], [g.format_ok for g in grades]
        for tag, flags in (("rollout/success", correct), ("rollout/format", format_ok)):
            if values := [x for x in flags if x is not None]:
                metrics[tag] = Mean.of(float(x) for x in values)
        return metrics | {f"reward/{name}": Mean(*x) for name, x in parts.items()}

    def state(self) -> dict[str, Any]:
        """Return the position in the data and the unfinished responses of this process."""
        return {"sampler": self.sampler.state(), "partial": self.partial.state()}

    def load_state(self, state: Mapping[str, Any], notice: Say = lambda text: None) -> None:
        """Continue from ``state()``; raise ConfigError if it belongs to other data."""
        self.sampler.load_state(state["sampler"])
        self.partial.load_state(state.get("partial"), notice)

    def close(self) -> None:
        """Stop the graders' processes."""
        self.graders.close()
