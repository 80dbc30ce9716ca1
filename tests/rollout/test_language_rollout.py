"""Collection of a language model's trajectories."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_envs.base.errors import TrainingError
from embodied_ppo.core.errors import RunRefused
from embodied_ppo.core.types import Mean
from embodied_ppo.data.prompts import Prompt, Sampler
from embodied_ppo.options import loader
from embodied_ppo.options.reward_groups import reward_groups
from embodied_ppo.options.schema import AlgorithmConfig
from embodied_ppo.policies import causal_lm
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.ppo.critic import LocalCritic
from embodied_ppo.ppo.language_actor import language_ppo
from embodied_ppo.rollout.generation.engine import Engine, Generation
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.language_rollout import ReasoningRollout, Truncation
from embodied_ppo.rollout.rewards.graders import FAILED, Grade
from embodied_ppo.training.logging import numbers
from tests.policies.test_causal_lm import TINY, make

END = 2


def decode(ids: list[int]) -> str:
    return "".join(chr(60 + i) for i in ids if i > 2)


class ScriptedGenerator:
    """Generator that returns given tokens."""

    version = 0

    def __init__(self, answers: list[list[int]], max_tokens: int) -> None:
        self.answers, self.t = answers, max_tokens
        self.calls: list[Any] = []

    def generate(
        self, prompts: Any, sampling: Sampling, *, seed: int, samples: Tensor | None = None
    ) -> Generation:
        self.calls.append((prompts, seed, samples))
        rows = [self.answers[i % len(self.answers)] for i in range(len(prompts))]
        token = torch.tensor([[*r, *[0] * (self.t - len(r))] for r in rows])
        length = torch.tensor([len(r) for r in rows])
        log_prob = torch.where(torch.arange(self.t) < length.unsqueeze(1), -0.5, 0.0)
        return Generation(token, length, torch.tensor([r[-1] == END for r in rows]), log_prob)

    def update_weights(self, version: int) -> None: ...

    def sleep(self) -> None: ...


class FixedGraders:
    """Graders that return given grades, in the order of generation."""

    failures, last_failure = 0, ""

    def __init__(self, grades: Sequence[Grade] = ()) -> None:
        self.grades = list(grades)

    def grade(self, samples: Any, prompts: Any) -> list[Grade]:
        assert len(samples) == len(prompts) <= len(self.grades)
        own, self.grades = self.grades[: len(samples)], self.grades[len(samples) :]
        return own

    def close(self) -> None: ...


class LengthGraders(FixedGraders):
    """Scores a response by the length of its text. The second sample of a batch fails."""

    def grade(self, samples: Any, prompts: Any) -> list[Grade]:
        assert [(p.data_source, p.ground_truth) for p in prompts] == [(s[0], s[2]) for s in samples]
        grades = [
            Grade(float(len(text)), answer=text, correct=len(text) == 2)
            for _, text, _, _ in samples
        ]
        grades[1] = FAILED
        self.failures, self.last_failure = self.failures + 1, "ValueError: no"
        return grades


PROMPTS = [
    Prompt(tuple(range(5, 5 + n)), "p" * n, "", f"source {n % 2}", {}, n) for n in (2, 4, 1, 3)
]
ANSWERS = [[10, 11, END], [12, 13, 14, 15], [END], [16, 17, 18, END]]


def rollout(**options: Any) -> ReasoningRollout:
    arguments: dict[str, Any] = {
        "batch": 4,
        "sampling": Sampling(4, stop_ids=(END,)),
        "pad_id": 0,
        "seed": 3,
    } | options
    generator = arguments.pop("generator", None) or ScriptedGenerator(ANSWERS, 4)
    graders = arguments.pop("graders", None) or LengthGraders()
    return ReasoningRollout(PROMPTS, generator, graders, decode, **arguments)


# ------------------------------------------------------------------------------------------ collect
def test_fields_of_a_trajectory() -> None:
    notices: list[str] = []
    t, metrics = rollout(notice=notices.append).collect(4, update=0, version=7)
    order = Sampler(4, 4, 3).next()
    assert isinstance(t.obs, dict)
    assert t.obs["row"].shape == (4 + 4 - 1, 4) and t.action.shape == (4, 4)
    for i, (p, answer) in enumerate(zip([PROMPTS[j] for j in order], ANSWERS, strict=True)):
        tokens = [*p.ids, *answer]
        n = len(answer)
        # There is no gap, and the last token is not an input.
        assert t.obs["row"][: len(tokens) - 1, i].tolist() == tokens[:-1]
        for k in range(n):
            assert tokens[int(t.obs["place"][k, i]) + 1] == int(t.action[k, i]) == answer[k]
        # The second failed: it has no score and is not trained on.
        assert t.mask[:, i].tolist() == [k < n and i != 1 for k in range(4)]
        assert t.terminated[:, i].tolist() == [k == n - 1 for k in range(4)]
        scores = [2.0, 0.0, 0.0, 3.0]
        assert t.reward[:, i].tolist() == [scores[i] * (k == n - 1) for k in range(4)]
    assert not t.truncated.any() and int(t.version.min()) == int(t.version.max()) == 7
    assert numbers(metrics) == {
        "rollout/return": 5 / 3,
        "rollout/length": 3,
        "rollout/truncated": 1 / 4,
        "rollout/success": 1 / 3,
        "rollout/grader_failures": 1,
        "rollout/prompt_length": 2.5,
        "rollout/epoch": 1,
    }
    assert notices == ["reward: a response could not be graded: ValueError: no"]


def test_numbers_of_the_grader_are_rewards_of_groups() -> None:
    """The grader returns a term "even" besides the score; the rest has the penalty of length 4."""
    first, *others = [Grade(x, extra={"even": float(x % 2 == 0)}) for x in (2.0, 0.0, 3.0)]
    groups = {"even": {"terms": ["even"]}, "length": {}}
    config = loader.load(AlgorithmConfig, {"reward_groups": groups})
    t, _ = rollout(
        graders=FixedGraders([first, FAILED, *others]),
        reward_groups=reward_groups(config),
        truncation=Truncation(overlong_buffer=1),
    ).collect(4, update=0, version=0)
    assert t.value.shape == (4, 4) and t.reward.shape == (4, 4, 2)
    # Scores 2, failed, 0 and 3; the last response has 4 tokens.
    assert t.reward.sum(0).tolist() == [[1, 1], [0, 0], [1, -1], [0, 2]]
    assert t.reward[2, 0].tolist() == [1, 1] and t.reward[3, 3].tolist() == [0, 2]


def test_group_members_are_adjacent_and_seeds_depend_on_the_update() -> None:
    generator, other_generator = ScriptedGenerator(ANSWERS, 4), ScriptedGenerator(ANSWERS, 4)
    x = rollout(group_size=2, batch=2, generator=generator)
    t, _ = x.collect(4, update=0, version=0)
    x.collect(4, update=1, version=0)
    assert t.action.shape == (4, 4)
    (first, seed, _), (_, other, _) = generator.calls
    assert first[0] == first[1] and first[2] == first[3] and first[0] != first[2] and seed != other
    rollout(group_size=2, batch=2, generator=other_generator).collect(4, update=0, version=0)
    assert other_generator.calls[0][1] == seed


def test_penalties_and_mask_of_truncated_responses() -> None:
    plain = rollout().collect(4, update=0, version=0)[0].reward.sum(0)
    (missing_eos,) = (
        Truncation(missing_eos=0.5)
        .penalties(torch.tensor([4, 4]), torch.tensor([True, False]), 4)
        .values()
    )
    assert missing_eos.tolist() == [0, 0.5]
    # A buffer of 2 before 4: the lengths 2, 3, 4 exceed its start by 0, 1, 2 tokens.
    truncation = Truncation(overlong_buffer=2)
    lengths = torch.tensor([1, 2, 3, 4])
    penalties = truncation.penalties(lengths, torch.ones(4, dtype=torch.bool), 4)
    assert penalties["overlong_penalty"].tolist() == [0, 0, 0.5, 1.0]
    t, metrics = rollout(truncation=truncation).collect(4, update=0, version=0)
    # The lengths are 3, 4, 1, 4, the second one failed.
    assert (plain - t.reward.sum(0)).tolist() == [0.5, 0, 0, 1.0]
    values = numbers(metrics)
    assert values["reward/score"] == 5 / 3 and values["reward/overlong_penalty"] == 0.5
    assert values["rollout/return"] == pytest.approx(5 / 3 - 0.5)
    t, metrics = rollout(truncation=Truncation("drop")).collect(4, update=0, version=0)
    assert t.mask.any(0).tolist() == [True, False, True, True]
    assert numbers(metrics)["rollout/truncated"] == 1 / 4


def test_other_numbers_of_a_grader_are_metrics() -> None:
    notices: list[str] = []
    grade = Grade(1.0, format_ok=False, extra={"steps": 3.0, "a b": 1.0})
    x = rollout(graders=FixedGraders([grade] * 8), notice=notices.append)
    for update in range(2):
        metrics = numbers(x.collect(4, update=update, version=0)[1])
    assert (metrics["reward/steps"], metrics["reward/a_b"]) == (3, 1)
    assert "reward/score" not in metrics, "it is the return"
    (equal,) = notices  # once
    assert "scored 1; equal scores" in equal


def test_an_update_without_the_grades_that_it_needs_is_refused() -> None:
    x = rollout(graders=FixedGraders([FAILED] * 4))
    with pytest.raises(TrainingError, match="4 of 4"):
        x.collect(4, update=0, version=0)
    # Grades without correctness, which a failure does not hide.
    grades = [Grade(2.0), FAILED, Grade(0.0), Grade(3.0)]
    for options in ({"filter_rounds": 2}, {"shuffle": "success"}):
        x = rollout(graders=FixedGraders(grades), batch=2, group_size=2, **options)
        with pytest.raises(RunRefused, match="returns no correctness"):
            x.collect(4, update=0, version=0)


@pytest.mark.parametrize("adv_type", ["gae", "grpo"])
def test_a_failed_response_is_not_trained_on(adv_type: Any) -> None:
    """Its tokens change neither the weights nor the advantages of its group."""
    results = []
    for answer in ([12, 13, END], [14, 12, 12, 13]):
        torch.manual_seed(0)
        sizes = {"vocab_size": 24, "num_hidden_layers": 1}
        policy = LanguagePolicy(
            causal_lm.load(None, {"model_type": "qwen2", **TINY, **sizes}, section="actor.model")
        )
        c = AlgorithmConfig(adv_type=adv_type, group_size=2, gamma=1.0, gae_lambda=1.0, lr=1e-2)
        shared: dict[str, Any] = {"length": 4, "columns": 4, "updates": 1, "seed": 0}
        critic = (
            LocalCritic(LanguageCritic(copy.deepcopy(policy.model)), c, **shared)
            if adv_type == "gae"
            else None
        )
        learner = language_ppo(policy, critic, c, num_sequences=4, **shared)
        answers = [[10, 11, END], answer, [END], [16, 17, 18, END]]
        x = rollout(batch=2, group_size=2, generator=ScriptedGenerator(answers, 4))
        learner.update(x.collect(4, update=0, version=0)[0], update=0)
        weights = [p.detach().clone() for p in policy.parameters()]
        results.append(weights + ([] if critic is None else [*critic.module.parameters()]))
        learner.close()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert bool(a.isfinite().all())


def test_unfinished_responses_go_on_with_newer_weights() -> None:
    """Each token has the log-probability of the policy whose version it has."""
    policy, sampling = make(), Sampling(12, stop_ids=(2, *range(30, 40)))
    options: dict[str, Any] = {"sampling": sampling, "batch": 2, "oversampling": 0.5}
    options["group_size"] = 2

    def make_rollout(**changed: Any) -> ReasoningRollout:
        graders = FixedGraders([Grade(0.0)] * 24)
        generator = Engine(policy, slots=8, pad_id=0)
        return rollout(generator=generator, graders=graders, **options | changed)

    x, y = make_rollout(), make_rollout()
    weights, lags, begun = [], list[int](), 0
    for version in range(6):
        weights.append(copy.deepcopy(policy))
        state = x.state()
        t, _ = x.collect(12, update=version, version=version)
        y.load_state(state)
        again, _ = y.collect(12, update=version, version=version)
        assert all(map(torch.equal, tree.leaves(t), tree.leaves(again))), "equal after a resume"
        assert isinstance(t.obs, dict)
        assert torch.equal(t.obs["place"][0, ::2], t.obs["place"][0, 1::2]), "adjacent groups"
        for i in range(4):
            n = int(t.terminated[:, i].nonzero()) + 1
            places, tokens = t.obs["place"][:n, i], t.action[:n, i]
            for k, lag in enumerate((version - t.version[:n, i]).tolist()):
                actor = weights[version - lag]
                hidden = actor.hidden(t.obs["row"][None, :, i], places[None])
                expected = actor.view(hidden, tokens[None]).log_prob[0, k]
                torch.testing.assert_close(t.log_prob[k, i], expected, rtol=0, atol=1e-5)
                lags.append(lag)
            begun += len(set(t.version[:n, i].tolist())) > 1
        tokens = int(t.mask.sum())  # without the padding behind a response
        assert t.lag(version) == Mean(sum(lags[-tokens:]), tokens)
        with torch.no_grad():
            for w in policy.parameters():
                w += 0.1 * torch.randn_like(w)
    assert max(lags) > 0 and begun, "some responses have tokens of two policies"
    for name, value in (("group_size", 1), ("oversampling", 0.0)):  # a filter may follow the latter
        notices: list[str] = []
        other = make_rollout(**{name: value})
        other.load_state(x.state(), notices.append)
        assert other.partial.unfinished is None and f"{name} changed" in notices[0]
