"""Language models in several processes: as ``spread`` does it for robot policies."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from embodied_ppo.algorithms.learner import Critic
from embodied_ppo.algorithms.separate_critic_learner import (
    FrozenReference,
    LocalCritic,
    Reference,
    full_kl,
    log_prob_rows,
)
from embodied_ppo.config import placement, validation
from embodied_ppo.config.batch_sizes import batches
from embodied_ppo.config.schema import Config
from embodied_ppo.core.types import PlacementError
from embodied_ppo.evaluation.prompts import ExamResult
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.modes.base import Assembly, Setup, hardware_of
from embodied_ppo.modes.embodied import workers as embodied_workers
from embodied_ppo.modes.embodied.workers import check_compile, started
from embodied_ppo.modes.reasoning import components
from embodied_ppo.placement import memory_estimate
from embodied_ppo.placement.channels import Exchange, Server
from embodied_ppo.placement.remote_models import RemoteCritic, RemoteGraders, RemoteReference, Services
from embodied_ppo.placement.worker import Part, Seat, alike
from embodied_ppo.rewards.graders import Graders


# -------------------------------------------------------------------------------------------------------------- driver
def planned(config: Config, device: torch.device) -> placement.Plan | None:
    """Where the roles run; None: all in this process. Raises ConfigError, PlacementError."""
    a, c = config.algorithm, config.cluster
    if config.placement == "local" and not c.component_placement:
        return None
    without = validation.unused_roles(config)
    asked = c.component_placement or config.placement
    hardware = hardware_of(config, device)
    made = placement.plan(asked, hardware, mode="reasoning", without=without, max_lag=c.max_lag, weights=c.weights)
    own = components.critic_config(a, config.critic).global_batch_size
    batches = {"algorithm.global_batch_size": a.global_batch_size, "critic.global_batch_size": own}
    if not made.has("critic"):
        batches.pop("critic.global_batch_size")
    placement.check_sequences(
        made,
        prompts=a.rollout_batch_size,
        group_size=a.group_size,
        batches={option: batch * a.group_size for option, batch in batches.items()},
    )
    if full_kl(a) and made.has("reference") and not made.fused("actor", "reference"):
        raise PlacementError(
            "cluster.component_placement: the full KL divergence needs the reference's logits, which do not travel; "
            "join them, as 'actor,reference', or write algorithm.kl_loss_type=k3 and algorithm.kl_penalty=k1"
        )
    if config.rollout.engine == "vllm" and made.group("rollout").processes > made.hardware.total:
        raise PlacementError("rollout.engine = vllm: one process on a device; leave out processes")
    if c.shard and (why := unsharded(config, made)):
        raise PlacementError(f"cluster.shard = true: {why}")
    check_compile(config, made)
    return made


def unsharded(config: Config, placed: placement.Plan) -> str:
    """As ``spread.unsharded``."""
    if why := embodied_workers.unsharded(placed):
        return why
    for role in ("critic", "reference"):
        if placed.has(role) and not placed.fused("actor", role):
            return f"{role} is in processes of its own; join them, as 'actor,{role}', or write cluster.shard=false"
    if config.critic.concurrent:
        return "actor and critic gather their layers one after another; write critic.concurrent=false"
    if full_kl(config.algorithm):
        return "the full KL divergence reads policy and reference at once; use k3 (algorithm.kl_loss_type, kl_penalty)"
    if config.rollout.engine == "vllm" and placed.fused("rollout", "actor"):
        return "vLLM has weights of its own; give rollout its own processes (placement=disaggregated)"
    return ""


class Foresight:
    """As of ``spread``. Graders and reward models are not counted."""

    def __init__(self, config: Config) -> None:
        """Builds the models in this process on the CPU. Raises ConfigError."""
        self.config = config
        tokenizer, cpu = components.make_tokenizer(config), torch.device("cpu")
        train, held_out = components.read_prompts(config, tokenizer, lambda line: None)
        self.policy = components.make_policy(config, tokenizer, cpu)
        self.longest = components.check_length(self.policy, [*train, *held_out], config.algorithm.response_length)
        uses_critic = "critic" not in validation.unused_roles(config)
        self.critic = components.make_critic(config, self.policy, cpu) if uses_critic else None
        self._steps: dict[tuple[str, int], int] = {}

    def needs(
        self, placed: placement.Plan, micro: int | None = None, *, shard: bool | None = None
    ) -> dict[str, dict[str, int]]:
        """As of ``spread``; ``micro``: responses at once instead of micro_batch_size and micro_batch_tokens."""
        config, a, policy, longest = self.config, self.config.algorithm, self.policy, self.longest
        sequences = a.rollout_batch_size * a.group_size
        acts, learns = placed.processes("rollout"), placed.processes("actor")
        shard = config.cluster.shard if shard is None else shard
        whole = memory_estimate.nbytes([*policy.parameters(), *policy.buffers()])
        found: dict[str, dict[str, int]] = {}
        for group in placed.groups:
            need: dict[str, int] = dict.fromkeys(
                ("weights", "gradients", "optimiser", "experience", "cache", "activations"), 0
            )
            if ("rollout" in group.roles or "actor" in group.roles) and not (shard and "actor" in group.roles):
                need["weights"] += whole
            if "rollout" in group.roles:
                slots = min(components.slots(config), sequences // acts)
                need["cache"] = memory_estimate.cache(policy, slots, longest)
            models: dict[str, LanguagePolicy | Any] = {"actor": policy, "critic": self.critic}
            for role, model in models.items():
                if role not in group.roles:
                    continue
                if shard:
                    held = memory_estimate.in_parts(model, learns, acts=role == "actor" and "rollout" in group.roles)
                else:
                    size = memory_estimate.nbytes([p for p in model.parameters() if p.requires_grad])
                    held = {"gradients": size, "optimiser": 2 * size}
                    if role == "critic":
                        held["weights"] = memory_estimate.nbytes([*model.parameters(), *model.buffers()])
                for what, size in held.items():
                    need[what] += size
                batch = (a if role == "actor" else components.critic_config(a, config.critic)).global_batch_size
                rows = min(batch * a.group_size // learns, micro or self.at_once or sequences)
                if (role, rows) not in self._steps:
                    self._steps[role, rows] = memory_estimate.language_step(model, rows, longest, a.response_length)
                need["activations"] = max(need["activations"], self._steps[role, rows])
            if "reference" in group.roles:
                need["weights"] += memory_estimate.in_parts(policy, learns)["weights"] if shard else whole
            if "actor" in group.roles or "rollout" in group.roles:
                need["experience"] = (
                    sequences // min(acts, learns) * (8 * longest + memory_estimate.TOKEN * a.response_length)
                )
            found[group.name] = need
        return found

    @property
    def at_once(self) -> int | None:
        """Responses of the longest kind that the options allow in one forward and backward; None: no limit."""
        a = self.config.algorithm
        by_tokens = None if a.micro_batch_tokens is None else max(1, a.micro_batch_tokens // self.longest)
        return min((rows for rows in (a.micro_batch_size, by_tokens) if rows is not None), default=None)


def foreseeable(config: Config, *, alone: bool = False) -> bool:
    """As of ``spread``: predicting would load the actor."""
    return config.actor.model.path is None


def check_memory(config: Config, placed: placement.Plan) -> dict[str, dict[str, int]]:
    """As ``spread.check_memory``."""
    return embodied_workers.check_memory(config, placed, Foresight(config), unsharded(config, placed))


def facts(config: Config, placed: placement.Plan) -> dict[str, int]:
    """As of ``spread``."""
    a, b = config.algorithm, batches(config)
    return {
        "prompts of a rollout process": a.rollout_batch_size // placed.processes("rollout"),
        "responses an update": b.samples,
        "optimiser steps an update": b.actor.steps,
        "responses of an actor process in a step": b.actor.size * a.group_size // placed.processes("actor"),
    }


def assemble(s: Setup, placed: placement.Plan) -> Assembly:
    """The system in processes of a Ray cluster. Raises ConfigError, PlacementError."""
    config = s.config
    components.check_files(config)
    if foreseeable(config):
        check_memory(config, placed)
    system = started(s, placed, components.records(s), part)
    name, horizon = components.title(config), config.algorithm.response_length
    return Assembly(
        system, name, horizon, system.write, ExamResult.samples, success="eval/accuracy", facts=system.facts
    )


# ---------------------------------------------------------------------------------------------------- in the processes
def part(s: Setup, seat: Seat, exchange: Exchange | None) -> tuple[Part, Mapping[str, Any]]:
    """What one process of a placement holds, and facts for the summary. Raises ConfigError.

    ``exchange``: where others ask for what is here and not with them.
    """
    config, roles = s.config, seat.roles
    stack = ExitStack()
    # what need never be whole on a device is built beside it
    host = seat.learners.sharded and "rollout" not in roles and not config.warm_start.steps
    where = torch.device("cpu") if host else s.device
    m = components.read(replace(s, device=where))
    judge: Graders | None = None
    if "reward" in roles:
        rule = components.make_graders(config, m.prompts, stack)
        if config.reward.model.pairs or ("actor" in roles and not seat.learners.rank):
            components.demonstrate(s, m.policy, m.tokenizer)
        judge = components.make_judge(s, m, rule)
    elif "actor" in roles and not seat.learners.rank:
        components.demonstrate(s, m.policy, m.tokenizer)
    if "actor" in roles:
        alike(m.policy, seat.learners)
    critic, values = _critic(replace(s, device=where), seat, m)
    reference: FrozenReference | None = None
    if "reference" in roles and "actor" not in roles:
        a = config.algorithm
        frozen = m.policy if "rollout" not in roles else components.make_policy(config, m.tokenizer, s.device)
        reference = FrozenReference(frozen, tokens=a.micro_batch_tokens, columns=log_prob_rows(a))
    server = None
    if exchange is not None:
        services = Services(device=s.device, judge=judge, prompts=m.prompts, critic=values, reference=reference)
        server = Server(services, exchange)
    rollout = engine = learner = None
    if "rollout" in roles:
        engine = components.make_engine(m)
        asked = seat.desks.get("reward", ())
        grades = judge if judge is not None else RemoteGraders(asked[0], m.prompts)
        rollout = components.make_rollout(s, m, engine, grades, *seat.ranks["rollout"])
    if "actor" in roles:
        since, reference_there = components.compile_from(config), _reference(s, seat)
        learner = components.make_learner(s, m.policy, critic, since, ranks=seat.learners, reference=reference_there)
        if seat.learners.sharded and not seat.learners.rank:
            s.notice(embodied_workers.told_of_parts(m.policy, seat.learners))
    mine: list[nn.Module] = [] if values is None else [values.module]
    mine += [] if reference is None else [reference.policy]
    made = Part(
        seat,
        policy=m.policy if rollout is not None or learner is not None else nn.ModuleList(mine),
        rollout=rollout,
        learner=learner,
        server=server,
        count=components.response_tokens,
        measure=None if rollout is None else components.measuring(m, rollout),
        write=components.writer(s),
        settle=(lambda: None) if learner is None else learner.settle,
        arrived=(lambda version: None) if engine is None else engine.update_weights,
        asleep=(lambda: None) if engine is None else engine.sleep,
        held=lambda: [x.held() for x in (learner or values, reference) if x is not None],
    )
    return made, {}


def _critic(s: Setup, seat: Seat, m: components.Material) -> tuple[Critic | None, LocalCritic | None]:
    """Whom the actor of this process asks for values, and the critic that is here."""
    model = s.config.critic.model
    if "critic" in seat.roles:
        critic = components.make_critic(s.config, m.policy, s.device)
        assert critic is not None
        values = components.make_values(s, critic, components.compile_from(s.config), ranks=seat.critics)
        return values, values
    asked = seat.desks.get("critic", ())
    own = model.path is not None or bool(model.architecture)
    return (RemoteCritic(asked[0], s.device, own=own) if asked else None), None


def _reference(s: Setup, seat: Seat) -> Reference | None:
    """Whom the actor of this process asks; None: a copy of it."""
    asked = seat.desks.get("reference", ())
    return RemoteReference(asked[0], s.device) if asked else None
