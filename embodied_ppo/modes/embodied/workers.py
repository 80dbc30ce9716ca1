"""Construct the roles of one process of a robot policy's run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config.batch_sizes import steps_per_update
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import VectorEnv
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.imitation.distillation import DistillationLearner
from embodied_ppo.modes.base import OFFLOADING_OBSTACLE, ReportFiles, RunRequest, compile_schedule
from embodied_ppo.modes.embodied import components, distillation
from embodied_ppo.modes.workers import shard_notice
from embodied_ppo.placement.channels import Exchange, Server
from embodied_ppo.placement.remote_envs import (
    ConcatenatedEnvs,
    EnvDescription,
    EnvService,
    RemoteEnv,
    describe_env,
)
from embodied_ppo.placement.worker import Worker, WorkerSpec, broadcast_weights
from embodied_ppo.rollout.simulation import Staged
from embodied_ppo.training import checkpoint


def build_worker(
    request: RunRequest, spec: WorkerSpec, exchange: Exchange | None, stack: ExitStack
) -> tuple[Worker, Mapping[str, Any]]:
    """Build the roles of one process; see ``Mode.build_worker``.

    Args:
        exchange: Receives the requests of rollouts where the simulators are here and the rollouts
            are not.
    """
    config, roles, learners = request.config, spec.roles, spec.learners
    server = None
    if exchange is not None:
        server = Server(EnvService(partial(_local_simulators, request)), exchange)
    if roles == ("env",):
        return Worker(spec, server=server), {}
    rank, world = spec.ranks.get("rollout", (0, 1))
    envs, stages = list[VectorEnv](), world * spec.stages
    distilled = distillation.prepare(request)
    if "rollout" in roles:
        seeds = env_seeds(config.seed, 0, config.env.num_envs, config.algorithm.group_size)
        n = config.env.num_envs // stages
        for stage in range(rank * spec.stages, (rank + 1) * spec.stages):
            own_seeds = seeds[stage * n : stage * n + n]
            if distilled is not None:
                env = distilled.make_env(request, own_seeds)
            else:
                env = _simulators(request, spec, "train", own_seeds)
            envs.append(env)
            stack.callback(env.close)
    if len(envs) > 1 and not hasattr(envs[0], "send"):
        request.notice(
            f"cluster.stages={spec.stages}: no overlap, {config.env.id} simulates in the thread of"
            " the policy"
        )
    if envs:
        spaces = describe_env(envs[0])
    else:
        spaces = spec.env_description or _describe_simulators(request)
    # A sharded model need not fit on the device as a whole, so it is built in host memory.
    on_host = learners.sharded and not config.cloning.steps
    device = torch.device("cpu") if on_host else request.device
    described = EnvDescription(spaces, device)
    if distilled is not None:  # in one process, which simulates
        described = distilled.student_env(envs[0])
    policy = components.make_policy(config, described)
    guided = None
    if distilled is not None:
        guided = distilled.guided_policy(request, envs[0], policy)
    compiled_since, reason = None, OFFLOADING_OBSTACLE
    if not spec.tensors_move:
        compiled_since, reason = components.compile_from(
            config, request.device, request.notice, parts=stages
        )
    # Compiled minibatches do not exchange gradients.
    schedule = compile_schedule(request, compiled_since if learners.world == 1 else None)
    if envs and not rank:
        components.check_evaluation(config, request.device)
        acting_schedule = components.acting_schedule(request, compiled_since)
        schedules = {"minibatches": schedule, "acting": acting_schedule}
        components.log_settings(request, envs[0], policy, schedules, reason)
    facts: Mapping[str, Any] = {}
    learner: Learner | DistillationLearner | None = None
    if "actor" in roles:
        if not learners.rank:
            components.load_initial_policy(request, policy)
            facts = components.clone(request, policy)
        broadcast_weights(policy, learners)  # the clone exists in the first learner only
        if compiled_since is not None and learners.world > 1:
            request.notice(
                f"compile: minibatches are not compiled, {learners.world} processes learn together"
            )
        if guided is not None:
            learner = distillation.make_learner(request, guided, schedule)
        else:
            learner = components.make_learner(request, policy, schedule, learners)
        if learners.sharded and not learners.rank:
            request.notice(shard_notice(policy, learners))
    acting = guided or policy
    if config.pipeline:  # the learner changes the weights of the other copy at the same time
        acting = copy.deepcopy(policy)
    rollouts = [
        components.make_rollout(
            config,
            env,
            acting,
            components.acting_schedule(request, compiled_since),
            stage=rank * spec.stages + i,
            stages=stages,
            keep_inputs=learner is not None and len(envs) == 1 and not spec.tensors_move,
        )
        for i, env in enumerate(envs)
    ]
    worker = Worker(
        spec,
        policy=policy,
        rollout=rollouts[0] if len(rollouts) == 1 else Staged(rollouts) if rollouts else None,
        learner=learner,
        server=server,
        count=lambda experience: (
            steps_per_update(config) // learners.world
            if experience.collected is None
            else int(experience.collected.sum())
        ),
        measure=partial(
            components.measure,
            config.evaluation,
            policy,
            partial(_simulators, request, spec, "evaluate"),
        ),
        write_report=partial(
            _write_report,
            request,
            # No process has all weights of a sharded policy: those of the checkpoint are loaded.
            EnvDescription(spaces, torch.device("cpu")) if learners.sharded else policy,
        ),
        env_description=spaces,
    )
    return worker, facts


def _write_report(
    request: RunRequest,
    policy: components.AnyPolicy | EnvDescription,
    result: EvaluationResult,
    source: checkpoint.Checkpoint,
    out: Path,
) -> ReportFiles:
    """Write the report of an evaluation.

    Args:
        policy: Acts in the video; a description of the simulators: load it from ``source``.
    """
    config, e = request.config, request.config.evaluation
    if isinstance(policy, EnvDescription):
        policy = components.make_policy(config, policy)
        checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)
    return components.write_report(
        replace(config, env=components.evaluation_env(config)),
        result,
        policy=policy,
        source=source,
        run_dir=request.run_dir,
        out=out,
        options=e,
        task=request.task,
        video_episodes=e.video_episodes,
        video_steps=e.video_steps,
        video_size=e.video_size,
        notice=request.notice,
    )


def _local_simulators(request: RunRequest, kind: str, seeds: list[int]) -> VectorEnv:
    """Return simulators in this process, to "train" or to "evaluate"."""
    select = components.training_env if kind == "train" else components.evaluation_env
    config, model = select(request.config), request.config.model
    if request.task is not None:
        request.task.activate(request.notice)
    return components.make_env(seeds, config=config, device=request.device, model=model)


def _describe_simulators(request: RunRequest) -> dict[str, Any]:
    """Return the spaces of the simulators, from one that is created and closed."""
    env = _local_simulators(request, "train", env_seeds(0, 0, 1))
    try:
        return describe_env(env)
    finally:
        env.close()


def _simulators(request: RunRequest, spec: WorkerSpec, kind: str, seeds: list[int]) -> VectorEnv:
    """Return simulators of this process, or of others.

    All other processes simulate to "train", the first one to "evaluate".
    """
    clients = spec.clients.get("env", ())
    if not clients:
        return _local_simulators(request, kind, seeds)
    clients = clients if kind == "train" else clients[:1]
    n = len(seeds) // len(clients)
    envs = [
        RemoteEnv(client, seeds[i * n : i * n + n], kind=kind, device=request.device)
        for i, client in enumerate(clients)
    ]
    return envs[0] if len(envs) == 1 else ConcatenatedEnvs(envs)
