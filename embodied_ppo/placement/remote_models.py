"""Judges, critics and references in another process: what answers there, and who asks for them here.

``Learner`` and ``ReasoningRollout`` do not know: what asks is a ``Critic``, a ``Reference``, ``Graders``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied_ppo.algorithms.optimizer import OptimizationStats
from embodied_ppo.algorithms.separate_critic_learner import FrozenReference, LocalCritic, Rows
from embodied_ppo.core import tree
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.models.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.placement.channels import Desk, Message, as_tensor, frozen, thawed
from embodied_ppo.rewards.graders import Grade, Graders, Sample


# --------------------------------------------------------------------------------------------------------------- there
class Services:
    """Those of the three that this process has."""

    PHASES: ClassVar[dict[str, str]] = {"grade": "grade", "values": "advantages", "view": "advantages"}

    def __init__(
        self,
        *,
        device: torch.device,
        judge: Graders | None = None,
        prompts: Sequence[Prompt] = (),
        critic: LocalCritic | None = None,
        reference: FrozenReference | None = None,
    ) -> None:
        """``prompts``: as whoever asks the judge has them, in the same order."""
        self.device, self.judge, self.prompts, self.critic, self.reference = device, judge, prompts, critic, reference
        self._looked: tuple[Rows, Tensor, Tensor] | None = None
        """Rows and mask that the critic was asked about, and what it said."""

    def phase(self, word: str) -> str:
        return self.PHASES.get(word, "update")

    def answer(self, who: str, m: Message) -> Message:
        """See ``lines.Answering``."""
        facts: dict[str, Any] = {}
        value: Any = None
        match m.word:
            case "grade":
                facts = self._grade(m.facts["prompts"], m.facts["texts"])
            case "values":
                rows = self._here(m)
                mask = rows.pop("mask")
                assert self.critic is not None
                value = self.critic.values(rows, mask)
                self._looked = rows, mask, value
            case "learn":
                facts = self._learn(self._here(m)["returns"], m.facts["update"])
            case "view":
                rows = self._here(m)
                mask, action = rows.pop("mask"), rows.pop("action")
                assert self.reference is not None
                value = self.reference.view(rows, mask, action, hidden=False)["log_prob"]
            case "settle":
                self._settle(m.facts["role"], thawed(m.value))
            case "state":
                value = frozen(self._model(m.facts["role"]).state())
            case "load_state":
                self._model(m.facts["role"]).load_state(thawed(m.value))
            case word:
                raise AssertionError(word)
        return Message(m.word, m.to, facts, value)

    def _here(self, m: Message) -> dict[str, Tensor]:
        assert isinstance(m.value, dict)
        return tree.map(lambda x: x.to(self.device), m.value)

    def _model(self, role: str) -> LocalCritic | FrozenReference:
        found = self.critic if role == "critic" else self.reference
        assert found is not None
        return found

    def _grade(self, numbers: Sequence[int], texts: Sequence[str]) -> dict[str, Any]:
        assert self.judge is not None
        prompts = [self.prompts[i] for i in numbers]
        samples = [(p.data_source, text, p.ground_truth, p.extra) for p, text in zip(prompts, texts, strict=True)]
        before = self.judge.failures
        grades = [astuple(grade) for grade in self.judge.grade(samples, prompts)]
        failed = self.judge.failures - before
        return {"grades": grades, "failed": failed, "why": self.judge.last_failure if failed else None}

    def _learn(self, returns: Tensor, update: int) -> dict[str, Any]:
        assert self.critic is not None and self._looked is not None
        rows, mask, value = self._looked
        self._looked = None
        self.critic.begin(rows, mask, value, returns, update)
        told = self.critic.end()
        return {"sums": dict(told.sums), "epochs": told.epochs, "rate": self.critic.rate}

    def _settle(self, role: str, weights: Mapping[str, Tensor]) -> None:
        if role == "reference":
            assert self.reference is not None
            self.reference.load_state(weights)
        else:
            assert self.critic is not None and isinstance(self.critic.module, LanguageCritic)
            self.critic.module.begin_as(weights)

    def close(self) -> None:
        for part in (self.judge, self.critic):
            if part is not None:
                part.close()


# ---------------------------------------------------------------------------------------------------------------- here
class RemoteGraders:
    """``Graders`` of another process, which has the same prompts."""

    def __init__(self, desk: Desk, prompts: Sequence[Prompt]) -> None:
        self.desk, self.to = desk, desk.number()
        self.numbers = {id(prompt): i for i, prompt in enumerate(prompts)}
        self.failures = 0
        self.last_failure: str | None = None

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        """See ``Graders``; of samples the texts travel, the rest is the prompts'."""
        numbers, texts = [self.numbers[id(p)] for p in prompts], [text for _, text, *_ in samples]
        told = self.desk.ask("grade", self.to, prompts=numbers, texts=texts).facts
        self.failures += told["failed"]
        self.last_failure = told["why"] or self.last_failure
        return [Grade(*grade) for grade in told["grades"]]

    def close(self) -> None:
        """It is its own process's to close."""


class _Model:
    """A critic or a reference of another process."""

    role: str

    def __init__(self, desk: Desk, device: torch.device) -> None:
        self.desk, self.to, self.device = desk, desk.number(), device

    def settle(self, actor: LanguagePolicy) -> None:
        """Send it the actor's weights to begin with."""
        self.desk.ask("settle", self.to, frozen(actor.state_dict()), role=self.role)

    def state(self) -> dict[str, Any]:
        return thawed(self.desk.ask("state", self.to, role=self.role).value)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.desk.ask("load_state", self.to, frozen(state), role=self.role)

    def held(self) -> Any:
        """Nothing is here."""
        return []


class RemoteCritic(_Model):
    """See ``split_learner.Critic``. It learns while the actor does."""

    role = "critic"

    def __init__(self, desk: Desk, device: torch.device, *, own: bool) -> None:
        """``own``: it has a model of its own, and does not begin as the actor."""
        super().__init__(desk, device)
        self.own, self.rate = own, 0.0

    def settle(self, actor: LanguagePolicy) -> None:
        if not self.own:
            super().settle(actor)

    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        value = self.desk.ask("values", self.to, {**obs, "mask": mask}).value
        return as_tensor(value).to(self.device)

    def begin(self, obs: Rows, mask: Tensor, value: Tensor, returns: Tensor, update: int) -> None:
        """Of the rows that ``values`` was asked about."""
        self.desk.send("learn", self.to, {"returns": returns}, update=update)

    def end(self) -> OptimizationStats:
        told = self.desk.receive(self.to).facts
        self.rate = told["rate"]
        return OptimizationStats(told["sums"], math.nan, told["epochs"])

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state({name: state[name] for name in ("critic", "critic_weights")})

    def close(self) -> None:
        """It is its own process's to close."""


class RemoteReference(_Model):
    """See ``split_learner.Reference``; without hidden states."""

    role = "reference"

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        assert not hidden, "rules refuse the full KL with a reference elsewhere"
        value = self.desk.ask("view", self.to, {**obs, "mask": mask, "action": action}).value
        return {"log_prob": as_tensor(value).to(self.device)}
