"""Graders, critics and reference models in another process: the service, and its clients.

``PPO`` and ``ReasoningRollout`` use the classes of both sides through the protocols
``Critic``, ``Reference`` and ``Graders``, so they run the same code in every placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base import tree
from embodied_ppo.cluster import channels
from embodied_ppo.cluster.channels import Message, as_tensor, deserialize_state, serialize_state
from embodied_ppo.core.types import ValueBatch
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.policies.causal_lm import LanguageCritic, LanguagePolicy
from embodied_ppo.ppo.critic import LocalCritic
from embodied_ppo.ppo.language_actor import FrozenReference
from embodied_ppo.ppo.roles import OptimizationStats, Rows
from embodied_ppo.rollout.rewards.graders import Grade, Graders, Sample


# --------------------------------------------------------------------------- in the models' process
@dataclass(eq=False, kw_only=True)
class ModelService:
    """``RequestHandler`` of the graders, critic and reference model of this process.

    Attributes:
        device: Device of the models.
        graders: Graders; None: not served, as for the other models.
        prompts: The prompts of the callers, in the same order; requests to the graders contain
            their indices.
        critic: Critic with its optimiser.
        reference: Reference model.
    """

    device: torch.device
    graders: Graders | None = None
    prompts: Sequence[Prompt] = ()
    critic: LocalCritic | None = None
    reference: FrozenReference | None = None

    def phase(self, method: str) -> str:
        """See ``RequestHandler``."""
        phases = {"grade": "grade", "values": "advantages", "view": "advantages"}
        return phases.get(method, "update")

    def handle(self, caller: str, request: Message) -> Message:
        """See ``RequestHandler``."""
        data: dict[str, Any] = {}
        value: Any = None
        match request.method:
            case "grade":
                data = self._grade(request.data["prompts"], request.data["texts"])
            case "values":
                rows = self._to_device(request)
                mask = rows.pop("mask")
                assert self.critic is not None
                value = self.critic.values(rows, mask)
            case "learn":
                data = self._learn(ValueBatch(**self._to_device(request)), request.data["update"])
            case "view":
                rows = self._to_device(request)
                mask, action = rows.pop("mask"), rows.pop("action")
                assert self.reference is not None
                value = self.reference.view(rows, mask, action, hidden=False)["log_prob"]
            case "initialize":
                self._initialize(request.data["role"], deserialize_state(request.value))
            case "state":
                value = serialize_state(self._model(request.data["role"]).state())
            case "load_state":
                self._model(request.data["role"]).load_state(deserialize_state(request.value))
            case method:
                raise AssertionError(method)
        return Message(request.method, request.target, data, value)

    def _to_device(self, request: Message) -> dict[str, Any]:
        """The tensors of a request, on the device of the models."""
        assert isinstance(request.value, dict)
        return tree.map(lambda x: x.to(self.device), request.value)

    def _model(self, role: str) -> LocalCritic | FrozenReference:
        """The critic or the reference model."""
        model = self.critic if role == "critic" else self.reference
        assert model is not None
        return model

    def _grade(self, indices: Sequence[int], texts: Sequence[str]) -> dict[str, Any]:
        """Grade responses to prompts, which are given by index."""
        assert self.graders is not None
        # Both processes read the same prompts, so that indices suffice.
        prompts = [self.prompts[i] for i in indices]
        pairs = zip(prompts, texts, strict=True)
        samples = [(p.data_source, text, p.ground_truth, p.extra) for p, text in pairs]
        # The caller counts failures, too: it decides when there are too many.
        failures_before = self.graders.failures
        grades = [astuple(grade) for grade in self.graders.grade(samples, prompts)]
        failed = self.graders.failures - failures_before
        failure = self.graders.last_failure if failed else None
        return {"grades": grades, "failed": failed, "failure": failure}

    def _learn(self, batch: ValueBatch, update: int) -> dict[str, Any]:
        """Train the critic while the caller trains its actor."""
        assert self.critic is not None
        self.critic.begin(batch, update)
        stats = self.critic.end()
        return {"sums": dict(stats.sums), "epochs": stats.epochs, "rate": self.critic.learning_rate}

    def _initialize(self, role: str, weights: Mapping[str, Tensor]) -> None:
        """Start from the actor's weights."""
        if role == "reference":
            assert self.reference is not None
            self.reference.load_state(weights)
        else:
            assert self.critic is not None and isinstance(self.critic.module, LanguageCritic)
            # A critic without a model of its own starts from the actor's body and a new head.
            self.critic.module.copy_body(weights)

    def close(self) -> None:
        """Close the graders and the critic."""
        for component in (self.graders, self.critic):
            if component is not None:
                component.close()


# --------------------------------------------------------------------------- in the calling process
class RemoteGraders:
    """``Graders`` of another process that holds the same prompts."""

    def __init__(self, client: channels.Client, prompts: Sequence[Prompt]) -> None:
        self.client, self.target = client, client.new_target()
        # Prompts are the caller's own objects, so that identity finds their index.
        self.indices = {id(prompt): i for i, prompt in enumerate(prompts)}
        self.failures = 0
        self.last_failure: str | None = None

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        """See ``Graders``. Only prompt indices and response texts are sent."""
        indices, texts = [self.indices[id(p)] for p in prompts], [text for _, text, *_ in samples]
        reply = self.client.request("grade", self.target, prompts=indices, texts=texts).data
        # Failures of the other process count here, because the run checks their share.
        self.failures += reply["failed"]
        self.last_failure = reply["failure"] or self.last_failure
        return [Grade(*grade) for grade in reply["grades"]]

    def close(self) -> None:
        """Do nothing: the process that holds the graders closes them."""


class _RemoteModel:
    """A critic or a reference model of another process."""

    role: str

    def __init__(self, client: channels.Client, device: torch.device, *, pretrained: bool) -> None:
        """Connect to the model.

        Args:
            client: Connection to its process.
            device: Device of the results.
            pretrained: Whether that process has read the weights that the model starts from;
                otherwise it starts from those of the actor.
        """
        self.client, self.target, self.device = client, client.new_target(), device
        self.pretrained = pretrained

    def initialize(self, actor: LanguagePolicy) -> None:
        """Send the actor's weights, unless the model has its own."""
        if not self.pretrained:
            weights = serialize_state(actor.state_dict())
            self.client.request("initialize", self.target, weights, role=self.role)

    def state(self) -> dict[str, Any]:
        """Return the state of the model in the other process."""
        return deserialize_state(self.client.request("state", self.target, role=self.role).value)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load a state into the model in the other process."""
        self.client.request("load_state", self.target, serialize_state(state), role=self.role)

    def state_tensors(self) -> Any:
        """Return no tensors: this process holds none of the model's."""
        return []


class RemoteCritic(_RemoteModel):
    """``Critic`` of another process; it is trained there while this process trains the actor."""

    role, learning_rate = "critic", 0.0

    def values(self, obs: Rows, mask: Tensor) -> Tensor:
        """See ``Critic``."""
        value = self.client.request("values", self.target, {**obs, "mask": mask}).value
        return as_tensor(value).to(self.device)

    def begin(self, batch: ValueBatch, update: int) -> None:
        """Start training in the other process."""
        tensors = {name: getattr(batch, name) for name in ("inputs", "mask", "value", "returns")}
        self.client.send("learn", self.target, tensors, update=update)

    def end(self) -> OptimizationStats:
        """Wait for the training that ``begin`` started, and return its statistics."""
        reply = self.client.receive(self.target).data
        # The learning rate of the last step is reported with the statistics.
        self.learning_rate = reply["rate"]
        return OptimizationStats(reply["sums"], reply["epochs"])

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Send the critic's part of the learner's state."""
        super().load_state({name: state[name] for name in ("critic", "critic_weights")})

    def close(self) -> None:
        """Do nothing: the process that holds the critic closes it."""


class RemoteReference(_RemoteModel):
    """``Reference`` of another process, without hidden states."""

    role = "reference"

    def view(self, obs: Rows, mask: Tensor, action: Tensor, *, hidden: bool) -> dict[str, Tensor]:
        """See ``Reference``."""
        assert not hidden, (
            "validation rejects the full KL with a reference model in another process"
        )
        tensors = {**obs, "mask": mask, "action": action}
        value = self.client.request("view", self.target, tensors).value
        return {"log_prob": as_tensor(value).to(self.device)}
