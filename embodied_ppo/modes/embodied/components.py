"""What mode=embodied is made of: simulators, a policy for their spaces, episodes that are measured and filmed."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config import loader
from embodied_ppo.config.batch_sizes import batches, steps_per_update, total_updates
from embodied_ppo.config.schema import Config, EnvConfig, EvaluateConfig, EvaluationConfig
from embodied_ppo.core import compile, watchdog
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.random import env_seeds, sampling_key
from embodied_ppo.core.types import Advance, ConfigError, Discrete, Policy, VectorEnv
from embodied_ppo.data.lerobot_reader import read as read_demonstrations
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation import report
from embodied_ppo.evaluation import video as film
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.imitation import behavior_cloning, expert_demos
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.models.vla import pretrained
from embodied_ppo.models.vla.action_tokens import TokenVLA
from embodied_ppo.models.vla.flow_matching import FlowVLA
from embodied_ppo.models.vla.gaussian import GaussianVLA
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pretrained import CheckpointVLA
from embodied_ppo.modes.base import Assembly, Setup
from embodied_ppo.placement.remote_envs import Described
from embodied_ppo.rollout.simulation import Rollout
from embodied_ppo.training import checkpoint
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.run_directory import versions
from embodied_ppo.training.system import Records


# ------------------------------------------------------------------------------------------------------------- pieces
def make_env(
    seeds: list[int],
    *,
    config: EnvConfig,
    device: torch.device,
    render: bool = False,
    size: int = 256,
    task: Any = None,
) -> VectorEnv:
    """Return one environment per seed.

    Args:
        task: Files that the run began with (``embodied_envs.task_files.TaskFiles``): this process executes them.

    Raises:
        EnvError: The task is unknown, refuses its options, or its files are not here.
    """
    if task is not None:
        task.activate()
    watchdog.describe(env_id=config.id)
    watchdog.limit(config.step_timeout_s)
    with task_files().working_folder(), watchdog.making:
        return _make_env(seeds, config, device, render, size)


def task_files() -> Any:
    """The module ``embodied_envs.task_files``."""
    return importlib.import_module("embodied_envs").task_files


def kept_task(source: checkpoint.Checkpoint, run_dir: Path) -> Any:
    """Files of the user's task that a checkpoint was trained with, as its run keeps them; None: it keeps none.

    Raises CheckpointError where they are damaged.
    """
    digest = str(source.manifest.get("task_hash"))
    return task_files().read(run_dir / "task" / digest) if re.fullmatch("[0-9a-f]{12}", digest) else None


def _make_env(seeds: list[int], config: EnvConfig, device: torch.device, render: bool, size: int) -> VectorEnv:
    return importlib.import_module("embodied_envs").make(
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
        kwargs=config.kwargs,
        device=device,
        render=render,
        render_size=(size, size),
    )


def evaluation_env(config: Config) -> EnvConfig:
    """The environment as it is evaluated."""
    kwargs = {**config.env.kwargs, **config.evaluation.env_kwargs}
    randomize = config.env.randomize and config.evaluation.randomize
    return replace(config.env, kwargs=kwargs, randomize=randomize, ranges=config.env.ranges if randomize else {})


FAMILIES: dict[str, type[TokenVLA] | type[FlowVLA] | type[GaussianVLA]] = {
    "token": TokenVLA,
    "flow": FlowVLA,
    "gaussian": GaussianVLA,
}


AnyPolicy: TypeAlias = "ActorCritic | behavior_cloning.Family"
Written: TypeAlias = "dict[str, str | None]"
"""Paths of a report's files."""


def make_policy(config: Config, env: VectorEnv | Described) -> AnyPolicy:
    """The policy of ``config.model`` for the spaces of ``env``, with weights from ``config.seed``."""
    a, chunk = config.algorithm, config.env.action_chunk
    values = chunk if a.reward_type == "action_level" else 1
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        if config.model.policy == "actor_critic":
            policy = ActorCritic(env.obs_spec, env.action_spec, config.model, chunk=chunk, values=values)
        elif config.model.checkpoint is not None:
            rest: dict[str, Any] = {"chunk": chunk, "mapping": config.env.action_mapping, "values": values}
            rest["sentences"] = getattr(env, "instructions", ())
            if config.model.policy == "flow":
                policy = PI0.of(env.obs_spec, env.action_spec, config.model, **rest)
            else:
                closes = getattr(env, "gripper_closes", None)
                policy = CheckpointVLA.of(env.obs_spec, env.action_spec, config.model, closes=closes, **rest)
        else:
            policy = FAMILIES[config.model.policy](
                env.obs_spec,
                env.action_spec,
                config.model,
                chunk=chunk,
                sentences=getattr(env, "instructions", ()),
                values=values,
            )
            policy.freeze(config.model.freeze_trunk)
    if not isinstance(policy, ActorCritic) or policy.kind != "categorical":
        for path, on in (("kl_loss_type", a.use_kl_loss), ("kl_penalty", a.use_kl_in_reward)):
            if on and getattr(a, path) == "full":
                raise ConfigError(f"algorithm.{path}=full: needs the logits of a categorical policy; use k3")
        if a.entropy_target is not None and a.entropy_target > 50:
            raise ConfigError(
                f"algorithm.entropy_target={a.entropy_target}: is above any reachable entropy; use < 50 nats"
            )
    return policy.to(env.device)


COMPILE_AFTER = 8192
"""Optimiser steps after which compile=auto has compiled code take over: about as long as the compiler needs."""


def compile_from(
    config: Config, device: torch.device, notice: Callable[[str], None], *, parts: int = 1
) -> tuple[int | None, str]:
    """Return the first update of compiled code, None for never, and then the reason.

    It follows from options alone, so that a repeated run switches at the same update. ``parts``: rollouts that the
    environments are divided among.
    """
    a = config.algorithm
    if config.compile == "never":
        return None, "compile=never"
    at_once = config.compile == "always" or device.type == "cuda"  # a CUDA graph is captured in a moment
    since = 0 if at_once else -(-COMPILE_AFTER // batches(config).actor.steps)
    if since >= total_updates(config):
        return None, (
            f"compile=auto starts after {COMPILE_AFTER} optimiser steps, in update {since + 1}, and the run has "
            f"{total_updates(config)}"
        )
    why = compile.obstacle() if device.type == "cpu" else ""
    if a.micro_batch_size is not None and a.micro_batch_size < a.global_batch_size:
        why = "algorithm.micro_batch_size cuts minibatches; leave it null"
    if (a.rollout_micro_batch_size or config.env.num_envs) < config.env.num_envs // parts:
        why = "algorithm.rollout_micro_batch_size cuts the observations that are acted on; leave it null"
    if config.model.checkpoint is not None:
        why = "the model of model.checkpoint runs as it is"
    if config.cloning.coef:
        why = "cloning.coef adds demonstrations to minibatches; leave it 0"
    if not why:
        return since, ""
    if config.compile == "always":
        raise ConfigError(f"compile=always: {why}; or use compile=auto")
    notice(f"compile: not used, {why}")
    return None, why


def check_evaluation(config: Config, device: torch.device) -> None:
    """What the first evaluation would refuse, before anything is written."""
    e = config.evaluation
    evaluation.evaluation_seeds(e.seed, e.episodes)
    if e.env_kwargs:
        probe = make_env(evaluation.evaluation_seeds(e.seed, 1), config=evaluation_env(config), device=device)
        try:
            probe.reset()
        finally:
            probe.close()


def _unread(config: Config, env: VectorEnv) -> Iterator[str]:
    """Options that this task gives no meaning, and settings that see little of it."""
    if isinstance(env.action_spec, Discrete):
        default = Config()
        for path in ("env.action_mapping", "model.state_dependent_std", "model.init_log_std"):
            section, name = path.split(".")
            value = getattr(getattr(config, section), name)
            if value != getattr(getattr(default, section), name):
                yield f"{path}={value}: not read, the actions of {env.id} are discrete"
    horizon, clock = config.algorithm.horizon, env.max_episode_steps
    if config.env.restart_each_rollout and clock is not None and horizon < clock:
        yield (
            f"algorithm.horizon={horizon}: with env.restart_each_rollout=true only the first {horizon} of up to "
            f"{clock} steps of an episode are ever seen; set algorithm.horizon={clock} to see all"
        )


# ----------------------------------------------------------------------------------------------------------- assembly
def make_rollout(
    config: Config, env: VectorEnv, policy: Policy, later: compile.CompileSchedule, *, stage: int = 0, stages: int = 1
) -> Rollout:
    """Of the options; ``stage``: see ``Rollout``."""
    a = config.algorithm
    return Rollout(
        env,
        policy,
        seed=config.seed,
        group_size=a.group_size,
        one_episode=config.env.restart_each_rollout,
        restart_every=config.env.restart_every,
        stagger=config.env.stagger,
        gamma=a.gamma if a.chunk_reward == "discounted" else 1.0,
        rows=a.rollout_micro_batch_size,
        later=later,
        stage=stage,
        stages=stages,
    )


def make_learner(s: Setup, policy: AnyPolicy, later: compile.CompileSchedule, ranks: Ranks | None = None) -> Learner:
    """Of the options; ``ranks``: who else learns. Raises ConfigError, EnvError."""
    config, ranks = s.config, ranks or Ranks()
    auxiliary_loss = None
    if config.cloning.coef:
        assert not isinstance(policy, ActorCritic)  # strict
        demos = read_demonstrations(
            expert_demos.demonstrations(config, s.progress, s.advance), limit=config.cloning.episodes
        )
        share = replace(config.cloning, batch_size=max(1, config.cloning.batch_size // ranks.world))
        auxiliary_loss = behavior_cloning.AuxiliaryCloningLoss(policy, demos, share)
    return actor_critic_learner(
        policy,
        config.algorithm,
        num_envs=config.env.num_envs,
        updates=s.updates,
        seed=config.seed,
        compile_schedule=later,
        dump_dir=s.run_dir,
        notice=s.notice,
        auxiliary_loss=auxiliary_loss,
        ranks=ranks,
    )


def measure(
    e: EvaluationConfig | EvaluateConfig,
    policy: AnyPolicy,
    factory: Callable[[list[int]], VectorEnv],
    on_episode: Callable[[Any], None] = lambda episode: None,
) -> EvaluationResult:
    """Episodes of a policy, as the options say."""
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


def writer(s: Setup, policy: AnyPolicy) -> Callable[[EvaluationResult, checkpoint.Checkpoint, Path], Written]:
    """Writes an evaluation's report."""
    e = s.config.evaluation

    def write(result: EvaluationResult, source: checkpoint.Checkpoint, out: Path) -> Written:
        return write_report(
            replace(s.config, env=evaluation_env(s.config)),
            result,
            policy=policy,
            source=source,
            run_dir=s.run_dir,
            out=out,
            task=s.task,
            film_episodes=e.video_episodes,
            film_steps=e.video_steps,
            film_size=e.video_size,
            notice=s.notice,
        )

    return write


def clone(s: Setup, policy: AnyPolicy) -> dict[str, float]:
    """Warm-up by cloning where it is asked for; facts for the summary."""
    if not s.config.cloning.steps or not s.fresh_start:
        return {}
    assert not isinstance(policy, ActorCritic)  # strict
    return expert_demos.clone(policy, s.config, s.progress, s.advance)


def tell(s: Setup, env: VectorEnv, policy: AnyPolicy, since: int | None, why: str) -> None:
    """What the log should say of these options before the first update; ``since``, ``why``: of ``compile_from``."""
    config = s.config
    s.early.extend(_unread(config, env))
    if isinstance(policy, PI0) and (told := policy.memory_notice(config.algorithm.horizon * env.num_envs)):
        s.early.append(told)
    simulators = config.env.num_threads or "as many as there are cores"
    s.early.append(
        f"threads: {torch.get_num_threads()} for tensors, {simulators} for simulators; compiled code: "
        + (f"never ({why})" if since is None else f"from update {since + 1} on")
    )


def records(s: Setup) -> Records:
    """What is written about a run."""
    info = {**s.info, "env_id": s.config.env.id}
    return Records("env_steps", "eval/return", s.run_dir / "checkpoints", s.config.keep_last, s.text, info)


def assemble(s: Setup, stack: ExitStack) -> Assembly:
    """A system in this process; ``stack`` closes what it opens. Raises ConfigError, EnvError."""
    config, a = s.config, s.config.algorithm
    seeds = env_seeds(config.seed, 0, config.env.num_envs, a.group_size)
    env = make_env(seeds, config=config.env, device=s.device, task=s.task)
    stack.callback(env.close)
    policy = make_policy(config, env)
    check_evaluation(config, s.device)
    facts = clone(s, policy)
    since, why = compile_from(config, s.device, s.notice)
    tell(s, env, policy, since, why)

    def later() -> compile.CompileSchedule:
        return compile.CompileSchedule(since, required=config.compile == "always", notice=s.notice)

    factory = functools.partial(make_env, config=evaluation_env(config), device=s.device, task=s.task)
    system = LocalSystem(
        records(s),
        policy=policy,
        rollout=make_rollout(config, env, policy, later()),
        learner=make_learner(s, policy, later()),
        count=lambda experience: steps_per_update(config),
        measure=functools.partial(measure, config.evaluation, policy, factory),
    )
    return Assembly(system, config.env.id, a.horizon, writer(s, policy), facts=facts)


# ----------------------------------------------------------------------------------------------------------- evaluate
def evaluate(
    config: EvaluateConfig,
    trained: Config,
    source: checkpoint.Checkpoint,
    *,
    run_dir: Path,
    device: torch.device,
    say: Callable[[str], None] = lambda line: None,
) -> Callable[[Path, Advance], tuple[EvaluationResult, Written]]:
    """What measures a checkpoint and writes the report into a folder, telling of every episode.

    Raises CheckpointError, ConfigError, EnvError.
    """
    evaluation.evaluation_seeds(config.seed, config.episodes)  # refused before anything is built
    base = loader.dump(evaluation_env(trained))
    kwargs = {**base["kwargs"], **dict(config.env.get("kwargs") or {})}
    env_config = loader.load(EnvConfig, {**base, **config.env, "kwargs": kwargs}, source="env")
    task = _evaluated_task(env_config, source, run_dir, allow=config.allow_changed_task, say=say)
    factory = functools.partial(make_env, config=env_config, device=device, task=task)
    probe = factory(env_seeds(0, 0, 1))
    try:
        policy = make_policy(replace(trained, env=env_config), probe)
    finally:
        probe.close()
    checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)

    if not config.deterministic:
        sampling_temperature(policy, config.temperature)

    def examine(out: Path, advance: Advance) -> tuple[EvaluationResult, Written]:
        done = itertools.count(1)
        advance("episodes", 0, config.episodes)
        result = measure(config, policy, factory, lambda _: advance("episodes", next(done), config.episodes))
        written = write_report(
            replace(trained, env=env_config),
            result,
            policy=policy,
            source=source,
            run_dir=run_dir,
            out=out,
            task=task,
            film_episodes=config.video_episodes if config.video else 0,
            film_steps=config.video_steps,
            film_size=config.video_size,
        )
        return result, written

    return examine


def _evaluated_task(
    env: EnvConfig, source: checkpoint.Checkpoint, run_dir: Path, *, allow: bool, say: Callable[[str], None]
) -> Any:
    """Files of the user's task that are executed to evaluate a checkpoint; None: it is an installed package's."""
    kept = kept_task(source, run_dir)
    if kept is not None and kept.id != env.id:
        return task_files().collect(env.id, env.kwargs)
    task = task_files().for_evaluation(env.id, env.kwargs, kept, allow=allow, say=say)
    return None if task is None else task.without_data(run_dir)


def sampling_temperature(policy: Policy, asked: float) -> float | None:
    """``asked`` for policies that have one. Raises ConfigError for another than 1 where there is none."""
    if hasattr(policy, "temperature"):
        return asked
    if asked != 1:
        raise ConfigError(f"temperature = {asked:g}: model.policy=actor_critic has none; leave it out")
    return None


def export(
    trained: Config, source: checkpoint.Checkpoint, out: Path, *, run_dir: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """The directory of model.checkpoint with what was learned, read back and compared.

    Raises CheckpointError, ConfigError, EnvError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out}: is not an empty directory; name a new one")
    task = _evaluated_task(trained.env, source, run_dir, allow=False, say=say)
    env = make_env(env_seeds(0, 0, 2), config=replace(trained.env, num_envs=2), device=torch.device("cpu"), task=task)
    try:
        policy = make_policy(trained, env)
        assert isinstance(policy, CheckpointVLA) and trained.model.checkpoint is not None
        checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)
        obs = env.reset()
        before = policy.act(policy.encode(obs))
        try:
            pretrained.export(policy, trained.model.checkpoint, out)
        except OSError as error:
            raise ConfigError(f"out={out}: cannot be written ({error.strerror}); name another directory") from error
        merged = replace(trained.model, checkpoint=str(out), lora_rank=0)
        again = make_policy(replace(trained, model=merged), env)
        assert isinstance(again, CheckpointVLA)
        difference = again.evaluate(again.encode(obs), before.action, before.replay).log_prob - before.log_prob
    finally:
        env.close()
    size = sum(file.stat().st_size for file in out.iterdir())
    largest = float(difference.detach().abs().max())
    return {"checkpoint": str(source.path), "out": str(out), "mb": round(size / 1e6, 1), "logit_difference": largest}


def write_report(
    config: Config,
    result: EvaluationResult,
    *,
    policy: Policy,
    source: checkpoint.Checkpoint,
    run_dir: Path,
    out: Path,
    film_episodes: int,
    film_steps: int,
    film_size: int,
    task: Any = None,
    notice: Callable[[str], None] | None = None,
) -> Written:
    """Write report.json, report.html and an mp4 of an evaluation; returns their paths.

    Args:
        task: Files of the user's task that were executed.
        notice: Called with the reason where there is no mp4.
    """
    filmed = None
    if film_episodes:
        filmed = film.film(
            policy,
            functools.partial(
                make_env, config=config.env, device=torch.device("cpu"), render=True, size=film_size, task=task
            ),
            path=run_dir / "videos" / f"{out.name}.mp4",
            seed=result.seed,
            deterministic=result.deterministic,
            temperature=result.temperature,
            episodes=film_episodes,
            steps=film_steps,
            notice=notice,
        )
    elif notice is not None:
        notice("no video: evaluation.video_episodes=0")
    plain = loader.relevant(config) | {"run_dir": None}
    written = report.write(
        out,
        result.by_kind(),
        checkpoint=source.path.name,
        update=source.update,
        steps=int(source.manifest["env_steps"]),
        config=plain,
        config_hash=str(source.manifest["config_hash"]),
        versions=versions(),
        task={
            "hash": None if task is None else task.hash,
            "hash_in_training": source.manifest.get("task_hash"),
            "files": {} if task is None else {file.name: file.digest for file in task.files},
        },
        curves=report.rows(run_dir),
        film=filmed,
    )
    video = None if filmed is None or filmed.path is None else str(run_dir / "videos" / filmed.path.name)
    return {"report": str(written.html), "report_json": str(written.json), "video": video}
