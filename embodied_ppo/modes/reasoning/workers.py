"""Construct the roles of one process of a language model's run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from embodied_ppo.algorithms.learner import Critic
from embodied_ppo.algorithms.separate_critic_learner import (
    FrozenReference,
    LocalCritic,
    Reference,
    log_prob_batch_size,
)
from embodied_ppo.modes.base import RunRequest
from embodied_ppo.modes.reasoning import components
from embodied_ppo.modes.workers import shard_notice
from embodied_ppo.placement.channels import Exchange, Server
from embodied_ppo.placement.remote_models import (
    ModelService,
    RemoteCritic,
    RemoteGraders,
    RemoteReference,
)
from embodied_ppo.placement.worker import Worker, WorkerSpec, broadcast_weights
from embodied_ppo.rewards.graders import Graders


def build_worker(
    request: RunRequest, spec: WorkerSpec, exchange: Exchange | None, stack: ExitStack
) -> tuple[Worker, Mapping[str, Any]]:
    """Build the roles of one process; see ``Mode.build_worker``.

    Args:
        exchange: Receives the requests of processes that lack a role that is here.
    """
    config, roles = request.config, spec.roles
    # A sharded model need not fit on the device as a whole, so it is built in host memory.
    on_host = spec.learners.sharded and "rollout" not in roles and not config.warm_start.steps
    device = torch.device("cpu") if on_host else request.device
    m = components.read_inputs(replace(request, device=device))
    rule = components.make_graders(config, m.prompts, stack) if "reward" in roles else None
    first_learner = "actor" in roles and not spec.learners.rank
    if first_learner or (rule is not None and config.reward.model.pairs):
        components.warm_start_actor(request, m.policy, m.tokenizer)
    graders: Graders | None = None
    if rule is not None:
        graders = components.make_reward(config, rule, m.policy, request.device, request.progress)
    if "actor" in roles:
        broadcast_weights(m.policy, spec.learners)
    critic, values = _critic(replace(request, device=device), spec, m)
    reference: FrozenReference | None = None
    if "reference" in roles and "actor" not in roles:
        a, frozen = config.algorithm, m.policy
        if "rollout" in roles:  # the weights of m.policy will change
            frozen = components.make_policy(config, m.tokenizer, request.device)
        reference = FrozenReference(
            frozen, tokens=a.micro_batch_tokens, columns=log_prob_batch_size(a)
        )
    server = None
    if exchange is not None:
        services = ModelService(
            device=request.device,
            graders=graders,
            prompts=m.prompts,
            critic=values,
            reference=reference,
        )
        server = Server(services, exchange)
    rollout = engine = learner = measure = None
    if "rollout" in roles:
        engine = components.make_engine(m)
        clients = spec.clients.get("reward", ())
        scores = graders if graders is not None else RemoteGraders(clients[0], m.prompts)
        rollout = components.make_rollout(request, m, engine, scores, *spec.ranks["rollout"])
        measure = partial(components.measure, m, rollout)
    if "actor" in roles:
        learner = components.make_learner(
            request,
            m.policy,
            critic,
            components.compile_from(config),
            ranks=spec.learners,
            reference=_remote_reference(request, spec),
        )
        if spec.learners.sharded and not spec.learners.rank:
            request.notice(shard_notice(m.policy, spec.learners))
    other_models: list[nn.Module] = [] if values is None else [values.module]
    other_models += [] if reference is None else [reference.policy]
    acts_or_learns = rollout is not None or learner is not None
    hooks: dict[str, Any] = {}
    if learner is not None:
        hooks["initialize_models"] = learner.initialize
    if engine is not None:
        hooks |= {"on_weights_updated": engine.update_weights, "release_cache": engine.sleep}
    worker = Worker(
        spec,
        policy=m.policy if acts_or_learns else nn.ModuleList(other_models),
        rollout=rollout,
        learner=learner,
        server=server,
        count=components.response_tokens,
        measure=measure,
        write_report=lambda result, source, out: components.write_report(
            config,
            result,
            source=source,
            run_dir=request.run_dir,
            out=out,
            options=config.evaluation,
        ),
        **hooks,
        state_tensors=lambda: [
            x.state_tensors() for x in (learner or values, reference) if x is not None
        ],
    )
    return worker, {}


def _critic(
    request: RunRequest, spec: WorkerSpec, m: components.Inputs
) -> tuple[Critic | None, LocalCritic | None]:
    """Return the critic that the actor here calls, and the critic of this process."""
    config, device = request.config, request.device
    if "critic" in spec.roles:
        critic = components.make_critic(config, m.policy, device)
        assert critic is not None
        since = components.compile_from(config)
        values = components.make_critic_learner(request, critic, since, ranks=spec.critics)
        return values, values
    clients = spec.clients.get("critic", ())
    if not clients:
        return None, None
    model = config.critic.model
    pretrained = model.path is not None or bool(model.architecture)
    return RemoteCritic(clients[0], device, pretrained=pretrained), None


def _remote_reference(request: RunRequest, spec: WorkerSpec) -> Reference | None:
    """Return the reference of another process; None: the learner copies the actor."""
    clients = spec.clients.get("reference", ())
    return RemoteReference(clients[0], request.device) if clients else None
