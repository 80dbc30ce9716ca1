"""Cost model of a language model's run: rollout, reward, critic, reference and actor roles.

Seconds of an update, as in ``placement.cost_model``:

    collect = generation + grading
    update  = reference's log-probabilities + critic's values + updates of actor and critic
    publish = transfer of the weights

The updates of actor and critic run concurrently where they are in different processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embodied_ppo.config.placement import Hardware, Need, Plan
from embodied_ppo.placement import cost_model
from embodied_ppo.placement.cost_model import (
    Choice,
    Cost,
    Machine,
    Prediction,
    loads,
    prediction,
    sums,
)

PARTITIONS = (
    ("rollout,actor,critic,reference,reward",),
    ("rollout,actor,reference,reward", "critic"),
    ("rollout,actor,critic,reward", "reference"),
    ("rollout,actor,reward", "critic,reference"),
    ("rollout,actor,critic,reference", "reward"),
    ("rollout,reward", "actor,critic,reference"),
    ("rollout,reward", "actor,reference", "critic"),
    ("rollout,reward", "actor", "critic,reference"),
    ("rollout,critic,reference,reward", "actor"),
)
"""Ways to divide the five roles among processes."""
PRESETS = ("fused", "colocated", "disaggregated")


def choices(hardware: Hardware, without: Sequence[str]) -> list[Choice]:
    """Return the placements to compare, see ``placement.cost_model.choices``.

    Args:
        hardware: The devices.
        without: Roles that the run lacks.
    """
    partitions = dict[tuple[str, ...], None]()
    for groups in PARTITIONS:
        present = [
            ",".join(role for role in group.split(",") if role not in without) for group in groups
        ]
        partitions[tuple(group for group in present if group)] = None
    candidates = cost_model.choices(hardware, 0, list(partitions), PRESETS)
    return [choice for choice in candidates if choice.stages == 1]


@dataclass(frozen=True, kw_only=True)
class Measured(Machine):
    """Measurements of a run on this machine. Costs are functions of the number of responses.

    Attributes:
        responses: Responses of an update.
        steps: Optimiser steps of the actor in an update.
        critic_steps: Optimiser steps of the critic in an update.
        generate: Cost of generating responses.
        grade: Cost of grading responses.
        view: Cost of the reference's log-probabilities; None: the run has no reference.
        values: Cost of the critic's values; None: the run has no critic.
        learn: Cost of an update of the actor.
        teach: Cost of an update of the critic; None: the run has no critic.
        concurrent: Whether the critic learns in a thread, concurrently with the actor.
        gradient_bytes: Gradients of the actor that learners sum.
        critic_gradient_bytes: Gradients of the critic that learners sum.
    """

    responses: int
    steps: int
    critic_steps: int
    generate: Cost
    grade: Cost
    view: Cost | None
    values: Cost | None
    learn: Cost
    teach: Cost | None
    concurrent: bool
    gradient_bytes: float
    critic_gradient_bytes: float

    def summary(self) -> str:
        """See ``Machine``."""
        named = {
            "generating": self.generate,
            "grading": self.grade,
            "the reference": self.view,
            "values": self.values,
        }
        named |= {"the actor's update": self.learn, "the critic's": self.teach}
        each = [
            f"{name} {cost.wall(self.responses):.3g} s"
            for name, cost in named.items()
            if cost is not None
        ]
        return f"of {self.responses} responses {', '.join(each)}; {super().summary()}"

    def predict(self, p: Plan | None, needs: Mapping[str, Need]) -> Prediction:
        """See ``Machine``."""
        n, count = self.responses, (lambda role: 1) if p is None else p.processes
        inference, teach, teach_cpu = 0.0, 0.0, 0.0
        updating = {"actor": self.learn.cpu(n / count("actor"))}
        if self.view is not None:
            inference += self.view.wall(n / count("reference"))
            updating["reference"] = self.view.cpu(n / count("reference"))
        if self.values is not None and self.teach is not None:
            each = n / count("critic")
            inference, teach = inference + self.values.wall(each), self.teach.wall(each)
            teach_cpu = self.teach.cpu(each)
            updating["critic"] = self.values.cpu(each) + teach_cpu
        learn = self.learn.wall(n / count("actor"))
        concurrent = self.concurrent or (
            p is not None and p.has("critic") and not p.fused("actor", "critic")
        )
        update = inference + (max(learn, teach) if concurrent else learn + teach)
        collect = self.generate.wall(n / count("rollout")) + self.grade.wall(n / count("reward"))
        if p is None:
            if concurrent:
                cpu_s = (updating["actor"] + teach_cpu) / self.cores
                update = max(update, inference + cpu_s)
            return Prediction(collect, update, 0.0, collect + update)
        rollout_requests, actor_requests = p.remote_roles("rollout"), p.remote_roles("actor")
        rows = self.experience_bytes / count("actor") * self.byte_s
        return prediction(
            p,
            self,
            needs,
            collect=collect + 2 * len(rollout_requests) * self.message_s,
            collecting=loads(
                p,
                {
                    "rollout": self.generate.cpu(n / count("rollout")),
                    "reward": self.grade.cpu(n / count("reward")),
                },
            ),
            update=update + len(actor_requests) * (2 * self.message_s + rows),
            updating=loads(p, updating),
            sums=sums(count("actor"), self, self.steps, self.gradient_bytes)
            + sums(count("actor"), self, self.critic_steps, self.critic_gradient_bytes),
        )
