"""Train a robot policy: construct environments, policy, learner, rollout and evaluation in order.

``build`` constructs the roles of one process. In a local run this process has all of them. On a
cluster the simulators can be in other processes (``RemoteEnv``), several processes can act or learn
(``process.ranks``), and the driver calls the ``Worker`` of each of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from embodied_envs.base.errors import EnvError
from embodied_envs.base.random import env_seeds
from embodied_envs.types import EnvInfo, VectorEnv
from embodied_ppo.cluster.channels import Exchange, Server
from embodied_ppo.cluster.remote_envs import EnvService, RemoteEnv
from embodied_ppo.cluster.worker import Worker, WorkerSpec, broadcast_weights
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.compile import CompileSchedule
from embodied_ppo.core.types import Policy, Trajectory
from embodied_ppo.evaluation import robot_evaluation as evaluation
from embodied_ppo.evaluation.episodes import EvaluationResult, lend
from embodied_ppo.evaluation.run_report import ReportFiles, ReportTarget
from embodied_ppo.imitation import expert_demos, teacher
from embodied_ppo.imitation.distillation import DistillationLearner
from embodied_ppo.options.batch_sizes import episodes, steps_per_update
from embodied_ppo.options.reward_groups import rollout_groups
from embodied_ppo.options.schema import Config
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.robot_policy import AnyPolicy, make_policy
from embodied_ppo.policies.vla.pi0 import PI0
from embodied_ppo.ppo import agreement
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.ppo.robot_actor import robot_ppo
from embodied_ppo.programs.compilation import compile_schedules
from embodied_ppo.programs.robot_checks import check_evaluation, find_mirror, log_settings
from embodied_ppo.programs.run_spec import RunSpec
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.interleaved_rollouts import InterleavedRollouts
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Messages


def build(
    spec: RunSpec,
    process: WorkerSpec,
    exchange: Exchange | None,
    messages: Messages,
    stack: ExitStack,
) -> tuple[Worker, Mapping[str, Any]]:
    """Construct the roles of one process.

    Args:
        spec: The run.
        process: Roles, ranks and connections of this process.
        exchange: Receives the requests of rollouts where the simulators are here and the rollouts
            are not.
        messages: Lines for the log.
        stack: Closes what is opened here.

    Returns:
        The worker, and facts for the summary.

    Raises:
        ConfigError, EnvError: An option is refused by what it configures.
    """
    config, roles, learners = spec.config, process.roles, process.learners
    server = None
    if exchange is not None:
        server = Server(EnvService(partial(_local_simulators, spec, messages)), exchange)
    # The service creates simulators when a rollout requests them.
    if roles == ("env",):
        return Worker(process, server=server), {}

    # Environments. Each pipeline stage of each rollout process steps an equal part of them.
    distillation = None
    if spec.teacher is not None:
        distillation = teacher.prepare(
            config, spec.teacher, spec.task, spec.device, messages.notice
        )
    rank, world = process.ranks.get("rollout", (0, 1))
    stages = world * process.stages
    make = partial(_simulators, spec, process, messages, "train")
    if distillation is not None:
        make = distillation.make_env
    envs = [make(seeds) for seeds in _stage_seeds(config, process)]
    for env in envs:
        stack.callback(env.close)
    # Stages save time only if one of them simulates while the policy acts on another.
    if len(envs) > 1 and not envs[0].is_asynchronous:
        cause = f"{config.env.title} simulates in the thread of the policy"
        messages.notice(f"cluster.stages={process.stages}: no overlap, {cause}")

    # Policy, for the spaces of the environments here or in another process.
    spaces = envs[0].info if envs else process.env_info or _describe_simulators(spec, messages)
    # A sharded model need not fit on the device as a whole, so it is built in host memory.
    on_host = learners.sharded and not config.cloning.steps
    described = replace(spaces, device=torch.device("cpu") if on_host else spec.device)
    if distillation is not None:  # in one process, which simulates
        described = distillation.student_env(envs[0])
    policy = make_policy(config, described)
    guided = None if distillation is None else distillation.guided_policy(envs[0], policy)

    schedules = compile_schedules(spec, process, messages, parts=stages)
    if envs and not rank:
        check_evaluation(config, spec.device)
        log_settings(config, messages, envs[0], policy, schedules)

    # PPO, with the weights that the run starts from.
    learner: PPO | DistillationLearner | None = None
    facts: Mapping[str, Any] = {}
    if "actor" in roles:
        # The other learners receive these weights.
        if not learners.rank:
            rate = config.env.action_chunk / spaces.step_s if spaces.step_s else None
            facts = _initialize_weights(spec, policy, messages, rate)
        broadcast_weights(policy, learners)
        if guided is not None:
            learner = DistillationLearner(
                guided, config, updates=spec.updates, compile_schedule=schedules.minibatches
            )
        else:
            learner = make_learner(spec, policy, schedules.minibatches, messages, learners)

    # Rollouts. A pipelined learner changes the weights while a copy of the policy acts.
    acting = copy.deepcopy(policy) if config.pipeline else guided or policy
    # Inputs of acting can be kept for a learner in this process that trains on one rollout.
    keep_inputs = learner is not None and len(envs) == 1 and not process.tensors_move
    collector = partial(
        make_rollout, config, stages=stages, keep_inputs=keep_inputs, notice=messages.notice
    )
    rollouts = [
        collector(env, acting, schedules.acting(), stage=rank * process.stages + i)
        for i, env in enumerate(envs)
    ]
    # No process has all weights of a sharded policy: those of the checkpoint are loaded.
    reported = replace(spaces, device=torch.device("cpu")) if learners.sharded else policy
    worker = Worker(
        process,
        policy=policy,
        rollout=InterleavedRollouts(rollouts) if len(rollouts) > 1 else next(iter(rollouts), None),
        learner=learner,
        server=server,
        count=partial(_count_steps, config, learners.world),
        measure=_evaluation(spec, process, policy, envs, messages),
        write_report=partial(_write_report, spec, reported, messages),
        env_info=spaces,
    )
    return worker, facts


def _stage_seeds(config: Config, process: WorkerSpec) -> list[list[int]]:
    """Return the seeds of the environments of each pipeline stage of this process."""
    if "rollout" not in process.roles:
        return []
    rank, world = process.ranks.get("rollout", (0, 1))
    # Seeds of all environments, which depend neither on processes nor on stages.
    seeds = env_seeds(config.seed, 0, config.env.num_envs, config.algorithm.group_size)
    n = config.env.num_envs // (world * process.stages)
    stages = range(rank * process.stages, (rank + 1) * process.stages)
    return [seeds[stage * n : stage * n + n] for stage in stages]


def _count_steps(config: Config, learners: int, experience: Trajectory) -> int:
    """Return the environment steps of the experience of one of ``learners`` processes."""
    # Without a filter all rollouts have the same number of steps.
    if experience.collected is None:
        return steps_per_update(config) // learners
    return int(experience.collected.sum())


# ----------------------------------------------------------------------------------- simulators
def _local_simulators(spec: RunSpec, messages: Messages, kind: str, seeds: list[int]) -> VectorEnv:
    """Return simulators in this process, to "train" or to "evaluate"."""
    select = environments.training_env if kind == "train" else environments.evaluation_env
    if spec.task is not None:
        spec.task.activate(messages.notice)
    return environments.make_env(
        seeds,
        config=select(spec.config),
        device=spec.device,
        model=spec.config.model,
        rebuild=not environments.builds_once(spec.config),
    )


def _describe_simulators(spec: RunSpec, messages: Messages) -> EnvInfo:
    """Return the spaces of the simulators, from one that is created and closed."""
    with closing(_local_simulators(spec, messages, "train", env_seeds(0, 0, 1))) as env:
        return env.info


def _simulators(
    spec: RunSpec, process: WorkerSpec, messages: Messages, kind: str, seeds: list[int]
) -> VectorEnv:
    """Return simulators of this process, or of others.

    All other processes simulate to "train", the first one to "evaluate".
    """
    clients = process.clients.get("env", ())
    if not clients:
        return _local_simulators(spec, messages, kind, seeds)
    clients = clients if kind == "train" else clients[:1]
    return RemoteEnv(clients, seeds, kind=kind, device=spec.device)


# ------------------------------------------------------------------------------------- learning
def _initialize_weights(
    spec: RunSpec, policy: AnyPolicy, messages: Messages, rate: float | None
) -> Mapping[str, float]:
    """Load ``initial_policy`` or clone demonstrations where a run starts; return facts.

    ``rate`` are the simulator's actions per second.

    Raises:
        CheckpointError: The initial policy cannot be read, or is of another network.
    """
    config = spec.config
    # A run that continues a checkpoint loads all weights from it later.
    if spec.checkpoint is not None:
        return {}
    if (source := spec.initial_policy) is not None:
        checkpoint.load_weights(policy, source.policy(), f"initial_policy={config.initial_policy}")
        messages.notice(f"initial_policy: weights and normalisers of {source.path}")
    if not config.cloning.steps:
        return {}
    assert not isinstance(policy, ActorCritic)  # refused by validation
    return expert_demos.clone(policy, config, messages.progress, messages.advance, rate=rate)


def make_learner(
    spec: RunSpec,
    policy: AnyPolicy,
    schedule: CompileSchedule,
    messages: Messages,
    ranks: Ranks | None = None,
) -> PPO:
    """Return the learner of PPO.

    Args:
        spec: The run.
        policy: The policy that it trains.
        schedule: When minibatches switch to compiled code.
        messages: Lines for the log.
        ranks: Processes that learn together; None: this one alone.
    """
    config = spec.config
    learner = robot_ppo(
        policy,
        config.algorithm,
        num_envs=episodes(config),
        updates=spec.updates,
        seed=config.seed,
        compile_schedule=schedule,
        notice=messages.notice,
        ranks=ranks,
        tolerances=agreement.tolerances(config),
        mirror=find_mirror(spec, policy, messages),
    )
    learner.decays_head = config.initial_policy is None
    return learner


def make_rollout(
    config: Config,
    env: VectorEnv,
    policy: Policy,
    schedule: CompileSchedule,
    *,
    stage: int = 0,
    stages: int = 1,
    keep_inputs: bool = False,
    notice: Callable[[str], None] = lambda text: None,
) -> Rollout:
    """Return the collector of experience.

    Args:
        schedule: When acting switches to compiled code.
        keep_inputs: Whether the learner can use inputs that acting has computed: it is in this
            process and trains on this trajectory alone.
        notice: Receives lines for the log.
        stage: Which of the ``stages`` parts of the environments this rollout steps.
    """
    a = config.algorithm
    # ``distill`` compares no groups. A refilled batch has groups of several rounds, but kept inputs
    # are those of one round.
    filtered = a.group_filter is not None and config.teacher is None
    refills = filtered and a.group_filter_rounds > 1
    # The policy decides whether its inputs fit into memory and have equal rounding.
    kept_inputs: Sequence[str] = ()
    if keep_inputs and not refills and isinstance(policy, PI0):
        limits = a.rollout_micro_batch_size, a.logprob_forward_micro_batch_size
        kept_inputs = policy.kept_inputs(a.horizon * a.rollout_epoch, env.num_envs, *limits)
    # Other distributions draw other random numbers.
    gaussian = isinstance(policy, ActorCritic) and policy.kind.endswith("gaussian")
    return Rollout(
        env,
        policy,
        seed=config.seed,
        group_size=a.group_size,
        filter_rounds=a.group_filter_rounds if filtered else 0,
        passes=a.rollout_epoch,
        one_episode=config.env.restart_each_rollout,
        restart_every=config.env.restart_every,
        restarts=partial(_follows_evaluation, config),
        stagger=True,
        # Discount within a chunk; between decisions the estimator of advantages discounts.
        gamma=a.gamma if a.reward_type != "chunk_sum" else 1.0,
        reward_groups=rollout_groups(a) if a.reward_groups or a.curiosity.weight else (),
        noise_correlation=a.noise_correlation if gaussian else 0.0,
        rows=a.rollout_micro_batch_size,
        kept_inputs=kept_inputs,
        schedule=schedule,
        notice=notice,
        stage=stage,
        stages=stages,
    )


def _follows_evaluation(config: Config, update: int) -> bool:
    """Return whether an evaluation uses the training's simulators before a rollout.

    It follows from the options alone, so that a resumed run starts the same episodes. Evaluations
    that follow from the length of the run are not counted: they are the last.
    """
    if config.evaluation.env != "training" or not config.evaluation.episodes:
        return False
    completed = update - (1 if config.pipeline else 0)  # a pipeline collects one update ahead
    every = config.eval_every
    # Before update 0 the initial policy is evaluated.
    return update == 0 or (completed > 0 and every > 0 and completed % every == 0)


# ------------------------------------------------------------------------------------ evaluation
def _evaluation(
    spec: RunSpec,
    process: WorkerSpec,
    policy: AnyPolicy,
    envs: Sequence[VectorEnv],
    messages: Messages,
) -> Callable[[], EvaluationResult]:
    """Return the function that evaluates the policy, in its own simulators or in ``envs``."""
    config = spec.config
    options = config.evaluation
    in_training = options.env == "training"
    num_envs = config.env.num_envs  # the training's simulators keep their number
    if not in_training:
        num_envs = environments.evaluated_envs(config.env, options.num_envs)
    options = replace(options, num_envs=num_envs)

    # An evaluation uses the training's simulators, or creates simulators of its own.
    def simulators(seeds: list[int]) -> VectorEnv:
        if in_training:
            return lend(envs[0], seeds)
        try:
            return _simulators(spec, process, messages, "evaluate", seeds)
        except EnvError as error:
            if error.__cause__ is None:  # no exception of the simulator
                raise
            hint = "if a process can have only one simulator, write evaluation.env=training"
            raise EnvError(f"{hint} (docs/tasks.md): {error}") from error

    return partial(evaluation.measure, options, policy, simulators, skip_diverged=True)


def _write_report(
    spec: RunSpec,
    policy: AnyPolicy | EnvInfo,
    messages: Messages,
    result: EvaluationResult,
    source: checkpoint.Checkpoint,
    out: Path,
) -> ReportFiles:
    """Write the report of an evaluation.

    Args:
        policy: Acts in the video; a description of the simulators: load it from ``source``.
    """
    config, e = spec.config, spec.config.evaluation
    if isinstance(policy, EnvInfo):
        policy = make_policy(config, policy)
        checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)
    evaluated = replace(config, env=environments.evaluation_env(config))
    return evaluation.write_report(
        ReportTarget(evaluated, source, spec.run_dir, out, e),
        result,
        policy=policy,
        task=spec.task,
        # A video needs simulators of its own.
        video_episodes=0 if e.env == "training" else e.video_episodes,
        notice=messages.notice,
    )
