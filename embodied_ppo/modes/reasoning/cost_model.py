"""As ``tune``, of language models: who generates, grades, has an opinion and learns, instead of who simulates and acts.

collect = generating + grading
update  = the reference's log-probabilities, the critic's values, then both learn: at once where they are apart
publish = weights on their way
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from embodied_ppo.config.placement import Hardware, Need, Plan
from embodied_ppo.placement import cost_model
from embodied_ppo.placement.cost_model import Choice, Cost, Machine, Prediction, loads, prediction, sums

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
"""Ways to put five roles into processes."""
PRESETS = ("fused", "colocated", "disaggregated")


def choices(hardware: Hardware, without: Sequence[str]) -> list[Choice]:
    """As ``tune.choices``, for runs that lack the roles ``without``."""
    partitions = dict[tuple[str, ...], None]()
    for groups in PARTITIONS:
        homes = [",".join(role for role in group.split(",") if role not in without) for group in groups]
        partitions[tuple(home for home in homes if home)] = None
    return [choice for choice in cost_model.choices(hardware, 0, list(partitions), PRESETS) if choice.stages == 1]


@dataclass(frozen=True, kw_only=True)
class Measured(Machine):
    """A run on this machine; costs are of so many responses.

    responses            of an update
    steps, critic_steps  of the optimisers in it
    generate, grade      responses
    view, values         the reference's log-probabilities and the critic's values; None: the run has no such role
    learn, teach         an update of the actor alone, and of the critic
    concurrent           whether the critic learns in a thread beside the actor's
    gradient_bytes, critic_gradient_bytes    what learners add up
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

    def told(self) -> str:
        """See ``Machine``."""
        named = {"generating": self.generate, "grading": self.grade, "the reference": self.view, "values": self.values}
        named |= {"the actor's update": self.learn, "the critic's": self.teach}
        each = [f"{name} {cost.wall(self.responses):.3g} s" for name, cost in named.items() if cost is not None]
        return f"of {self.responses} responses {', '.join(each)}; {super().told()}"


def predicted(p: Plan | None, m: Measured, needs: Mapping[str, Need]) -> Prediction:
    """As ``tune.predicted``."""
    n, count = m.responses, (lambda role: 1) if p is None else p.processes
    opinions, teach, taught = 0.0, 0.0, 0.0
    updating = {"actor": m.learn.cpu(n / count("actor"))}
    if m.view is not None:
        opinions += m.view.wall(n / count("reference"))
        updating["reference"] = m.view.cpu(n / count("reference"))
    if m.values is not None and m.teach is not None:
        each = n / count("critic")
        opinions, teach = opinions + m.values.wall(each), m.teach.wall(each)
        taught = m.teach.cpu(each)
        updating["critic"] = m.values.cpu(each) + taught
    learn = m.learn.wall(n / count("actor"))
    at_once = m.concurrent or (p is not None and p.has("critic") and not p.fused("actor", "critic"))
    update = opinions + (max(learn, teach) if at_once else learn + teach)
    collect = m.generate.wall(n / count("rollout")) + m.grade.wall(n / count("reward"))
    if p is None:
        update = max(update, opinions + (updating["actor"] + taught) / m.cores) if at_once else update
        return Prediction(collect, update, 0.0, collect + update)
    asked = p.apart("rollout"), p.apart("actor")
    rows = m.experience_bytes / count("actor") * m.byte_s
    return prediction(
        p,
        m,
        needs,
        collect=collect + 2 * len(asked[0]) * m.message_s,
        collecting=loads(
            p, {"rollout": m.generate.cpu(n / count("rollout")), "reward": m.grade.cpu(n / count("reward"))}
        ),
        update=update + len(asked[1]) * (2 * m.message_s + rows),
        updating=loads(p, updating),
        sums=sums(count("actor"), m, m.steps, m.gradient_bytes)
        + sums(count("actor"), m, m.critic_steps, m.critic_gradient_bytes),
    )
