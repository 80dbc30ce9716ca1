"""Components of mode=embodied from their options.

Simulators, policy, rollout, learner, evaluation and its report.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config.batch_sizes import batches, total_updates
from embodied_ppo.config.schema import (
    AlgorithmConfig,
    Config,
    EnvConfig,
    EvaluateConfig,
    EvaluationConfig,
    ModelConfig,
    RealismConfig,
)
from embodied_ppo.core import compile, watchdog
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.observation_names import names_observation
from embodied_ppo.core.random import env_seeds, sampling_key
from embodied_ppo.core.types import (
    Box,
    ConfigError,
    Discrete,
    Obs,
    Policy,
    VectorEnv,
)
from embodied_ppo.data.lerobot_reader import read as read_demonstrations
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation import video
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.evaluation.report import RobustnessSection
from embodied_ppo.imitation import behavior_cloning, expert_demos
from embodied_ppo.models import own_network, peft_files
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.models.backbone import is_image
from embodied_ppo.models.vla import pi0_files, published
from embodied_ppo.models.vla.action_tokens import TokenVLA
from embodied_ppo.models.vla.flow_matching import FlowVLA
from embodied_ppo.models.vla.gaussian import GaussianVLA
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pi05 import PI05
from embodied_ppo.models.vla.pretrained import CheckpointVLA
from embodied_ppo.models.vla.smolvla import SmolVLA
from embodied_ppo.models.vla.xvla import XVLA
from embodied_ppo.modes import base
from embodied_ppo.modes.base import ReportFiles, RunRequest, TaskFiles, TrainedRun
from embodied_ppo.placement.remote_envs import EnvDescription, describe_env
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training import checkpoint


# ------------------------------------------------------------------------------------- environments
def make_env(
    seeds: list[int],
    *,
    config: EnvConfig,
    device: torch.device,
    render: bool = False,
    size: int = 256,
    task: TaskFiles | None = None,
    model: ModelConfig | None = None,
) -> VectorEnv:
    """Return one environment per seed.

    Args:
        render: Whether the environments can render a picture.
        size: Height and width of a rendered picture, pixels.
        task: Files of the user's task as they were when the run began; this process executes them.
        model: Options of the policy, whose history is a part of the observations. None: no history.

    Raises:
        EnvError: The task is unknown, refuses its options, or its files are missing.
    """
    if task is not None:
        task.activate()
    watchdog.describe(env_id=config.id)
    watchdog.set_limit(config.step_timeout_s)
    with task_files().working_folder(), watchdog.constructing:
        env = importlib.import_module("embodied_envs").make(
            config.id,
            num_envs=len(seeds),
            seeds=seeds,
            simulator=config.simulator,
            num_threads=config.num_threads or None,
            max_episode_steps=config.max_episode_steps,
            action_mapping=config.action_mapping,
            success_key=config.success_key,
            obs_keys=config.obs_keys,
            action_chunk=config.action_chunk,
            cameras=config.cameras,
            image_size=(config.image_size, config.image_size),
            randomize=config.randomize,
            ranges=config.ranges,
            realism=asdict(config.realism),
            kwargs=config.kwargs,
            device=device,
            render=render,
            render_size=(size, size),
        )
    if model is None or model.history == 1:
        return env
    names = None
    if model.actor_obs is not None:
        spec, keys = env.obs_spec, model.actor_obs
        names = [n for n in spec if any(names_observation(key, n) for key in keys)]
    return importlib.import_module("embodied_envs").HistoryEnv(env, model.history, names)


def describe_spaces(config: Config) -> dict[str, Any]:
    """Return spaces and sentences of the environments, see ``remote_envs.describe_env``.

    LIBERO's are known without its package; otherwise one simulator is built and closed.

    Raises:
        EnvError: The task is unknown, or refuses its options.
    """
    options = training_env(config)
    package = importlib.import_module("embodied_envs")
    spaces = package.spaces_without_simulator(
        options.id,
        simulator=options.simulator,
        obs_keys=options.obs_keys,
        cameras=options.cameras,
        image_size=(options.image_size, options.image_size),
        action_chunk=options.action_chunk,
        max_episode_steps=options.max_episode_steps,
    )
    if spaces is not None and config.model.history == 1:
        return spaces
    env = make_env(
        env_seeds(0, 0, 1), config=options, device=torch.device("cpu"), model=config.model
    )
    try:
        return describe_env(env)
    finally:
        env.close()


def task_files() -> Any:
    """Return the module ``embodied_envs.task_files``."""
    return importlib.import_module("embodied_envs").task_files


def engines() -> Any:
    """Return the module ``embodied_envs.engines``."""
    return importlib.import_module("embodied_envs").engines


def observation_reader(env: VectorEnv) -> Callable[[Any], tuple[Obs, bool]]:
    """Return ``embodied_envs.ObservationReader`` of an environment."""
    return importlib.import_module("embodied_envs").ObservationReader(env)


def is_privileged(name: str) -> bool:
    """Return whether a name marks an observation that exists in simulation only."""
    return importlib.import_module("embodied_envs").is_privileged(name)


def stored_task(source: checkpoint.Checkpoint, run_dir: Path) -> TaskFiles | None:
    """Return the files of the user's task that a checkpoint was trained with.

    None: its run stored none.

    Raises:
        CheckpointError: The stored files are damaged.
    """
    digest = str(source.manifest.get("task_hash"))
    if not re.fullmatch("[0-9a-f]{12}", digest):
        return None
    return task_files().read(run_dir / "task" / digest)


def training_env(config: Config) -> EnvConfig:
    """Return the options of the environment that returns what actor and critic read."""
    actor, critic = config.model.actor_obs, config.model.critic_obs
    if actor is None or critic is None:
        return config.env
    keys = tuple(dict.fromkeys((*actor, *critic)))
    return replace(config.env, obs_keys=keys, realism=_realism(config))


def _realism(config: Config) -> RealismConfig:
    """Return ``env.realism``, with ``model.actor_obs`` restricted to the actor's observations."""
    realism = config.env.realism
    if realism.obs_keys is not None or config.model.actor_obs is None:
        return realism
    return replace(realism, obs_keys=config.model.actor_obs)


def evaluation_env(config: Config) -> EnvConfig:
    """Return the options of the environment with those of the evaluation in their place.

    With ``model.actor_obs``, it returns what the actor reads only.
    """
    keys, cameras = config.env.obs_keys, config.env.cameras
    if config.model.actor_obs is not None:
        keys = config.model.actor_obs
        cameras = tuple(c for c in cameras if any(names_observation(k, c) for k in keys))
    kwargs = {**config.env.kwargs, **config.evaluation.env_kwargs}
    randomize = config.env.randomize and config.evaluation.randomize
    return replace(
        config.env,
        obs_keys=keys,
        cameras=cameras,
        kwargs=kwargs,
        randomize=randomize,
        ranges=config.env.ranges if randomize else {},
        realism=_realism(config),
    )


def action_mapper(config: EnvConfig, env: VectorEnv) -> Callable[[Tensor], Tensor]:
    """Return the function of ``config.action_mapping`` that ``env.step`` applies to its actions.

    The function runs on the CPU. For discrete actions it returns its argument.
    """
    spec = env.action_spec
    if isinstance(spec, Discrete):
        return lambda action: action
    size = spec.size // config.action_chunk
    return importlib.import_module("embodied_envs").mapper(
        config.action_mapping, Box(spec.low[:size], spec.high[:size])
    )


def _simulator(env: VectorEnv) -> Any:
    """Return the innermost environment below wrappers for chunks, delays and history."""
    inner: Any = env
    while not hasattr(inner, "mechanism") and hasattr(inner, "env"):
        inner = inner.env
    return inner


def mechanism(env: VectorEnv) -> dict[str, Any]:
    """Return ``MujocoEnv.mechanism()`` of our own tasks; {} for other simulators."""
    inner = _simulator(env)
    return inner.mechanism() if hasattr(inner, "mechanism") else {}


def joint_state(env: VectorEnv) -> dict[str, Tensor]:
    """Return positions and velocities [N, ..] of our own tasks; {} for other simulators."""
    inner = _simulator(env)
    if not hasattr(inner, "mechanism"):
        return {}
    return {name: inner.s[name].float() for name in ("qpos", "qvel")}


FAMILIES: dict[str, type[TokenVLA] | type[FlowVLA] | type[GaussianVLA]] = {
    "token": TokenVLA,
    "flow": FlowVLA,
    "gaussian": GaussianVLA,
}
FLOW_FAMILIES: dict[str, type[PI0]] = {"pi0": PI0, "pi05": PI05, "smolvla": SmolVLA, "xvla": XVLA}
"""Policies of published flow models by the result of ``pi0_files.kind``."""


AnyPolicy: TypeAlias = "ActorCritic | behavior_cloning.Family"


# --------------------------------------------------------------------------- policy and compilation
def make_policy(
    config: Config, env: VectorEnv | EnvDescription, *, weights: bool = True
) -> AnyPolicy:
    """Return the policy of ``config.model`` for the spaces of ``env``; the seed sets its weights.

    Args:
        config: Options of the run.
        env: Spaces of the environment.
        weights: Whether the weights of model.checkpoint are read; otherwise its config.json is
            enough, and the parameters have no values (``models.vla.published``).

    Raises:
        ConfigError: The policy family lacks what an option needs, or a directory of weights does
            not fit.
    """
    a, m, chunk = config.algorithm, config.model, config.env.action_chunk
    spaces = env.obs_spec, env.action_spec, m
    sizes: dict[str, Any] = {
        "chunk": chunk,
        "values": chunk if a.reward_type == "action_level" else 1,
    }
    sentences, mapping = getattr(env, "instructions", ()), config.env.action_mapping
    if m.checkpoint is not None and not weights and published.can_build(m.checkpoint):
        return published.policy_of_sizes(env, m, mapping=mapping, **sizes)
    if m.checkpoint is not None:
        peft_files.check_no_adapter(m.checkpoint)
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        if m.policy == "actor_critic":
            policy = ActorCritic(*spaces, **sizes)
        elif m.checkpoint is None:
            policy = FAMILIES[m.policy](*spaces, sentences=sentences, **sizes)
            policy.freeze(m.freeze_trunk)
        elif m.policy == "flow":
            policy = FLOW_FAMILIES[pi0_files.kind(m.checkpoint)](
                *spaces, mapping=mapping, sentences=sentences, **sizes
            )
        else:
            closes = getattr(env, "gripper_closes", None)
            policy = CheckpointVLA(
                *spaces, mapping=mapping, sentences=sentences, closes=closes, **sizes
            )
    if not isinstance(policy, ActorCritic) or policy.kind != "categorical":
        for path, on in (("kl_loss_type", a.use_kl_loss), ("kl_penalty", a.use_kl_in_reward)):
            if on and getattr(a, path) == "full":
                raise ConfigError(
                    f"algorithm.{path}=full: needs the logits of a categorical policy; use k3"
                )
        if a.entropy_target is not None and a.entropy_target > 50:
            raise ConfigError(
                f"algorithm.entropy_target={a.entropy_target}: is above any reachable entropy; use"
                " < 50 nats"
            )
    return policy.to(env.device)


COMPILE_AFTER = 4096
"""Optimiser steps after which compile=auto switches minibatches to compiled code.

They take about as long as the compilation of a minibatch. Acting switches after twice as many
steps: its compilation starts when that of the minibatch has ended, because on two cores both at the
same time would delay the first.
"""


def compile_from(
    config: Config, device: torch.device, notice: Callable[[str], None], *, parts: int = 1
) -> tuple[int | None, str]:
    """Return the first update with compiled minibatches (None: never, and the reason).

    It follows from options alone, so that a repeated run switches at the same update.

    Args:
        notice: Called with the reason where compile=auto cannot be used.
        parts: Rollouts that the environments are divided among.

    Raises:
        ConfigError: compile=always is impossible with these options.
    """
    a = config.algorithm
    if config.compile == "never":
        return None, "compile=never"
    # On a GPU the kernels of a small network are compiled in this process, and a graph is captured.
    immediately = config.compile == "always" or device.type == "cuda"
    since = 0 if immediately else -(-COMPILE_AFTER // batches(config).actor.steps)
    if since >= total_updates(config):
        reason = (
            f"compile=auto starts after {COMPILE_AFTER} optimiser steps, in update {since + 1},"
            f" and the run has {total_updates(config)}"
        )
        return None, reason
    compile_obstacle = compile.unavailable_reason() if device.type == "cpu" else ""
    if a.micro_batch_size is not None and a.micro_batch_size < a.global_batch_size:
        compile_obstacle = "algorithm.micro_batch_size cuts minibatches; leave it null"
    if (a.rollout_micro_batch_size or config.env.num_envs) < config.env.num_envs // parts:
        compile_obstacle = (
            "algorithm.rollout_micro_batch_size cuts the observations that are acted on; leave it"
            " null"
        )
    if config.model.checkpoint is not None:
        compile_obstacle = "a model of model.checkpoint is not compiled; leave it null"
    if config.model.network is not None and config.compile == "auto":
        # Tracing would fix a branch that depends on values.
        compile_obstacle = "model.network is compiled with compile=always only"
    if config.cloning.coef:
        compile_obstacle = "cloning.coef adds demonstrations to minibatches; leave it 0"
    if not compile_obstacle:
        return since, ""
    if config.compile == "always":
        raise ConfigError(f"compile=always: {compile_obstacle}; or use compile=auto")
    notice(f"compile: not used, {compile_obstacle}")
    return None, compile_obstacle


def acting_schedule(request: RunRequest, compiled_since: int | None) -> compile.CompileSchedule:
    """Return when acting switches to compiled code, see ``COMPILE_AFTER``.

    Args:
        request: The run.
        compiled_since: First update with compiled minibatches, from ``compile_from``.
    """
    if compiled_since is None:
        return base.compile_schedule(request, None)
    return base.compile_schedule(request, 2 * compiled_since, start=compiled_since)


def check_evaluation(config: Config, device: torch.device) -> None:
    """Raise what the first evaluation would raise, before anything is written.

    Raises:
        EnvError: The evaluation's seed or the task's ``evaluation.env_kwargs`` are refused.
    """
    e = config.evaluation
    evaluation.evaluation_seeds(e.seed, e.episodes)
    if e.env_kwargs:
        probe = make_env(
            evaluation.evaluation_seeds(e.seed, 1),
            config=evaluation_env(config),
            device=device,
            model=config.model,
        )
        try:
            probe.reset()
        finally:
            probe.close()


def _unread_options(config: Config, env: VectorEnv) -> Iterator[str]:
    """Yield lines about options without effect, and a horizon that cuts all episodes."""
    if isinstance(env.action_spec, Discrete):
        default = Config()
        for path in ("env.action_mapping", "model.state_dependent_std", "model.init_log_std"):
            section, name = path.split(".")
            value = getattr(getattr(config, section), name)
            if value != getattr(getattr(default, section), name):
                yield f"{path}={value}: not read, the actions of {env.id} are discrete"
    specs = env.obs_spec.values() if isinstance(env.obs_spec, dict) else [env.obs_spec]
    if config.model.pooling != Config().model.pooling and not any(map(is_image, specs)):
        yield f"model.pooling={config.model.pooling}: not read, {env.id} returns no image"
    horizon, limit = config.algorithm.horizon, env.max_episode_steps
    if config.env.restart_each_rollout and limit is not None and horizon < limit:
        yield (
            f"algorithm.horizon={horizon}: with env.restart_each_rollout=true only the first"
            f" {horizon} of up to {limit} steps of an episode are ever seen; set"
            f" algorithm.horizon={limit} to see all"
        )


# ------------------------------------------------------------------------------ rollout and learner
def make_rollout(
    config: Config,
    env: VectorEnv,
    policy: Policy,
    schedule: compile.CompileSchedule,
    *,
    stage: int = 0,
    stages: int = 1,
    keep_inputs: bool = False,
) -> Rollout:
    """Return the collector of experience.

    Args:
        schedule: When acting switches to compiled code.
        keep_inputs: Whether the learner can use inputs that acting has computed: it is in this
            process and trains on this trajectory alone.
        stage: Which of the ``stages`` parts of the environments this rollout steps.
    """
    a = config.algorithm
    # ``distill`` compares no groups. A filtered batch has groups of several rounds, but kept inputs
    # are those of one round.
    filtered = a.group_filter is not None and config.teacher is None
    kept_inputs: Sequence[str] = ()
    if keep_inputs and not filtered and isinstance(policy, PI0):
        limits = a.rollout_micro_batch_size, a.logprob_forward_micro_batch_size
        kept_inputs = policy.kept_inputs(a.horizon, env.num_envs, *limits)
    return Rollout(
        env,
        policy,
        seed=config.seed,
        group_size=a.group_size,
        filter_rounds=a.group_filter_rounds if filtered else 0,
        one_episode=config.env.restart_each_rollout,
        restart_every=config.env.restart_every,
        stagger=config.env.stagger,
        gamma=a.gamma if a.chunk_reward == "discounted" else 1.0,
        rows=a.rollout_micro_batch_size,
        kept_inputs=kept_inputs,
        schedule=schedule,
        stage=stage,
        stages=stages,
    )


def make_learner(
    request: RunRequest,
    policy: AnyPolicy,
    schedule: compile.CompileSchedule,
    ranks: Ranks | None = None,
) -> Learner:
    """Return the learner of a policy.

    Args:
        schedule: When minibatches switch to compiled code.
        ranks: Processes that learn together; None: this one alone.

    Raises:
        ConfigError, EnvError: The demonstrations of cloning.coef cannot be read or recorded.
    """
    config, ranks = request.config, ranks or Ranks()
    auxiliary_loss = None
    if config.cloning.coef:
        assert not isinstance(policy, ActorCritic)  # strict
        demos = read_demonstrations(
            expert_demos.demonstrations(config, request.progress, request.advance),
            limit=config.cloning.episodes,
        )
        share = replace(config.cloning, batch_size=max(1, config.cloning.batch_size // ranks.world))
        auxiliary_loss = behavior_cloning.AuxiliaryCloningLoss(policy, demos, share)
    return actor_critic_learner(
        policy,
        config.algorithm,
        num_envs=config.env.num_envs,
        updates=request.updates,
        seed=config.seed,
        compile_schedule=schedule,
        threads=config.learner_threads,
        dump_dir=request.run_dir,
        notice=request.notice,
        auxiliary_loss=auxiliary_loss,
        ranks=ranks,
    )


def share_of(a: AlgorithmConfig, world: int) -> AlgorithmConfig:
    """Return the options of one of ``world`` learners: its share of every minibatch."""
    batch = max(1, a.global_batch_size // world)
    micro = min(a.micro_batch_size or batch, batch)
    return replace(a, global_batch_size=batch, micro_batch_size=micro)


def measure(
    e: EvaluationConfig | EvaluateConfig,
    policy: AnyPolicy,
    factory: Callable[[list[int]], VectorEnv],
    on_episode: Callable[[Any], None] = lambda episode: None,
) -> EvaluationResult:
    """Evaluate a policy with the options ``e``; call ``on_episode`` with each finished episode."""
    return evaluation.evaluate(
        policy,
        factory,
        episodes=e.episodes,
        num_envs=e.num_envs,
        seed=e.seed,
        deterministic=e.deterministic,
        temperature=None if e.deterministic else sampling_temperature(policy, e.temperature),
        on_episode=on_episode,
    )


def load_initial_policy(request: RunRequest, policy: AnyPolicy) -> None:
    """Load the weights and normalisers of ``initial_policy`` into the policy of a new run.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is of another network.
    """
    path = request.config.initial_policy
    if path is None or not request.fresh_start:
        return
    source = checkpoint.open_checkpoint(path, "initial_policy")
    checkpoint.load_weights(policy, source.policy(), f"initial_policy={path}")
    request.notice(f"initial_policy: weights and normalisers of {source.path}")


def clone(request: RunRequest, policy: AnyPolicy) -> dict[str, float]:
    """Clone demonstrations if ``cloning.steps`` is set; return facts for the summary."""
    if not request.config.cloning.steps or not request.fresh_start:
        return {}
    assert not isinstance(policy, ActorCritic)  # refused by validation
    return expert_demos.clone(policy, request.config, request.progress, request.advance)


def log_settings(
    request: RunRequest,
    env: VectorEnv,
    policy: AnyPolicy,
    schedules: Mapping[str, compile.CompileSchedule],
    reason: str,
) -> None:
    """Add the lines of the log that precede the first update.

    Args:
        request: The run.
        env: The simulators.
        policy: The policy.
        schedules: Name of what is compiled -> its schedule.
        reason: Why nothing is compiled, from ``compile_from``.
    """
    config = request.config
    request.early_log_lines.extend(_unread_options(config, env))
    samples = config.algorithm.horizon * env.num_envs
    if isinstance(policy, PI0) and (line := policy.memory_notice(samples)):
        request.early_log_lines.append(line)
    simulators = config.env.num_threads or "as many as there are cores"
    compiled = ", ".join(
        f"{name} from update {schedule.first_compiled_update + 1} on"
        for name, schedule in schedules.items()
        if schedule.first_compiled_update is not None
    )
    reason = reason or "training ends before it would be used"
    compiled = compiled or f"never ({reason})"
    if config.learner_threads > 1 and schedules["minibatches"].first_compiled_update is None:
        request.early_log_lines.append(
            f"learner_threads={config.learner_threads}: not used, minibatches are not compiled"
        )
    request.early_log_lines.append(
        f"threads: {torch.get_num_threads()} for tensors, {simulators} for simulators; compiled"
        f" code: {compiled}"
    )


# ------------------------------------------------------------------------------ trained checkpoints
def evaluated_task(run: TrainedRun, env: EnvConfig, *, allow: bool) -> TaskFiles | None:
    """Return the files of the user's task that an evaluation executes.

    Args:
        env: Options of the evaluated environment.
        allow: Whether the files may differ from those of the training.

    Returns:
        The files; None: the task belongs to an installed package.
    """
    stored = stored_task(run.source, run.run_dir)
    if stored is not None and stored.id != env.id:
        return task_files().collect(env.id, env.kwargs)
    task = task_files().for_evaluation(env.id, env.kwargs, stored, allow=allow, say=run.say)
    return None if task is None else task.without_data(run.run_dir)


def trained_model(run: TrainedRun, *, allow: bool) -> ModelConfig:
    """Return the options of the model, with the file of ``model.network`` that is executed.

    Args:
        allow: Whether the file may differ from that of the training.

    Raises:
        CheckpointError, ConfigError: The file, or the run's copy of it, cannot be read.
    """
    model = run.config.model
    if model.network is None:
        return model
    stored = run.source.manifest.get("network_hash")
    network = own_network.for_evaluation(
        model.network, stored, run.run_dir, allow=allow, say=run.say
    )
    return replace(model, network=network)


def sampling_temperature(policy: Policy, temperature: float) -> float | None:
    """Return ``temperature`` for policies that have one, else None.

    Raises:
        ConfigError: The policy has none, and ``temperature`` is not 1.
    """
    if hasattr(policy, "temperature"):
        return temperature
    if temperature != 1:
        raise ConfigError(
            f"temperature = {temperature:g}: model.policy=actor_critic has none; leave it out"
        )
    return None


def write_report(
    config: Config,
    result: EvaluationResult,
    *,
    policy: Policy,
    source: checkpoint.Checkpoint,
    run_dir: Path,
    out: Path,
    options: EvaluationConfig | EvaluateConfig,
    video_episodes: int,
    video_steps: int,
    video_size: int,
    task: TaskFiles | None = None,
    notice: Callable[[str], None] | None = None,
    robustness: RobustnessSection | None = None,
) -> ReportFiles:
    """Write report.json, report.html and an mp4 of an evaluation; return their paths.

    Args:
        config: Options of the run, with the evaluated environment.
        policy: Acts in the video.
        source: Checkpoint that was evaluated.
        run_dir: Directory of the run: its metrics are drawn, its folder ``videos`` receives the
            mp4.
        out: Folder of the report.
        options: Options of the evaluation.
        video_episodes: Episodes of the video; 0: no video.
        video_steps: Largest length of one of them.
        video_size: Height and width, pixels.
        task: Files of the user's task that were executed.
        notice: Called with the reason where there is no mp4.
        robustness: Performance in changed environments.
    """
    recorded = None
    if video_episodes:
        recorded = video.record_video(
            policy,
            functools.partial(
                make_env,
                config=config.env,
                device=torch.device("cpu"),
                render=True,
                size=video_size,
                task=task,
                model=config.model,
            ),
            path=run_dir / "videos" / f"{out.name}.mp4",
            seed=result.seed,
            deterministic=result.deterministic,
            temperature=result.temperature,
            episodes=video_episodes,
            steps=video_steps,
            notice=notice,
        )
    elif notice is not None:
        notice("no video: evaluation.video_episodes=0")
    files = base.write_report(
        config,
        result.by_kind(),
        source=source,
        run_dir=run_dir,
        out=out,
        options=options,
        unit="env_steps",
        task={
            "hash": None if task is None else task.hash,
            "hash_in_training": source.manifest.get("task_hash"),
            "files": {} if task is None else {file.name: file.digest for file in task.files},
        },
        video=recorded,
        robustness=robustness,
    )
    path = None if recorded is None else recorded.path
    return {**files, "video": None if path is None else str(run_dir / "videos" / path.name)}
