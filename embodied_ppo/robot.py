"""What mode=embodied is made of: simulators, a policy for their spaces, episodes that are measured and filmed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from embodied_ppo import checkpoint, cloning, compiled, film, imitation, report, strict, tree
from embodied_ppo import evaluate as evaluation
from embodied_ppo.assembly import Assembly, Setup, hardware_of, steps_per_update, total_updates, versions
from embodied_ppo.config import Config, EnvConfig, EvaluateConfig
from embodied_ppo.demonstrations import read as read_demonstrations
from embodied_ppo.evaluate import EvaluationResult
from embodied_ppo.learner import JointLearner
from embodied_ppo.models import vla_checkpoint
from embodied_ppo.models.actor_critic import ActorCritic
from embodied_ppo.models.pi0 import PI0
from embodied_ppo.models.vla_checkpoint import CheckpointVLA
from embodied_ppo.models.vla_flow import FlowVLA
from embodied_ppo.models.vla_gaussian import GaussianVLA
from embodied_ppo.models.vla_token import TokenVLA
from embodied_ppo.placement import memory, plan
from embodied_ppo.placement.lines import Exchange
from embodied_ppo.placement.local import LocalSystem
from embodied_ppo.placement.part import Part, Seat
from embodied_ppo.placement.simulators import Described, Joined, RemoteEnv, Server, described
from embodied_ppo.ranks import Ranks
from embodied_ppo.rollout import Rollout, Staged, env_seeds, sampling_key
from embodied_ppo.types import ConfigError, Discrete, Policy, VectorEnv


# ------------------------------------------------------------------------------------------------------------- pieces
def make_env(
    seeds: list[int], *, config: EnvConfig, device: torch.device, render: bool = False, size: int = 256
) -> VectorEnv:
    """One environment per seed. Raises EnvError."""
    return importlib.import_module("embodied_envs").make(
        config.id,
        num_envs=len(seeds),
        seeds=seeds,
        simulator=config.simulator,
        num_threads=config.num_threads or None,
        max_episode_steps=config.max_episode_steps,
        action_mapping=config.action_mapping,
        success_key=config.success_key,
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


def make_policy(config: Config, env: VectorEnv | Described) -> ActorCritic | cloning.Family:
    """The policy of ``config.model`` for the spaces of ``env``, with weights from ``config.seed``."""
    a = config.algorithm
    with torch.random.fork_rng():
        torch.manual_seed(sampling_key(config.seed, "weights"))
        if config.model.policy == "actor_critic":
            policy = ActorCritic(env.obs_spec, env.action_spec, config.model)
        elif config.model.checkpoint is not None:
            rest: dict[str, Any] = {"chunk": config.env.action_chunk, "mapping": config.env.action_mapping}
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
                chunk=config.env.action_chunk,
                sentences=getattr(env, "instructions", ()),
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


def compile_from(config: Config, device: torch.device, notice: Callable[[str], None]) -> int | None:
    """The first update of compiled code, None for never: a matter of options alone, so that a run repeats itself."""
    a = config.algorithm
    if config.compile == "never":
        return None
    steps = a.update_epoch * (a.horizon * config.env.num_envs // a.global_batch_size)  # of the optimiser, per update
    at_once = config.compile == "always" or device.type == "cuda"  # a CUDA graph is captured in a moment
    since = 0 if at_once else -(-COMPILE_AFTER // steps)
    if since >= total_updates(config):
        return None
    why = compiled.obstacle() if device.type == "cpu" else ""
    if a.micro_batch_size is not None and a.micro_batch_size < a.global_batch_size:
        why = "algorithm.micro_batch_size cuts minibatches; leave it null"
    if config.model.checkpoint is not None:
        why = "the model of model.checkpoint runs as it is"
    if config.cloning.coef:
        why = "cloning.coef adds demonstrations to minibatches; leave it 0"
    if not why:
        return since
    if config.compile == "always":
        raise ConfigError(f"compile=always: {why}; or use compile=auto")
    notice(f"compile: not used, {why}")
    return None


def _check_evaluation(config: Config, device: torch.device) -> None:
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
def _rollout(
    config: Config, env: VectorEnv, policy: Policy, later: compiled.Later, *, stage: int, stages: int
) -> Rollout:
    a = config.algorithm
    return Rollout(
        env,
        policy,
        seed=config.seed,
        group_size=a.group_size,
        one_episode=config.env.restart_each_rollout,
        restart_every=config.env.restart_every,
        stagger=config.env.stagger,
        gamma=a.gamma,
        later=later,
        stage=stage,
        stages=stages,
    )


def _learner(s: Setup, policy: ActorCritic | cloning.Family, later: compiled.Later, ranks: Ranks) -> JointLearner:
    config = s.config
    beside = None
    if config.cloning.coef:
        assert not isinstance(policy, ActorCritic)  # strict
        demos = read_demonstrations(
            imitation.demonstrations(config, s.progress, s.advance), limit=config.cloning.episodes
        )
        share = replace(config.cloning, batch_size=max(1, config.cloning.batch_size // ranks.world))
        beside = cloning.Beside(policy, demos, share)
    return JointLearner(
        policy,
        config.algorithm,
        num_envs=config.env.num_envs,
        updates=s.updates,
        seed=config.seed,
        later=later,
        dump_dir=s.run_dir,
        notice=s.notice,
        beside=beside,
        ranks=ranks,
    )


def _measure(
    config: Config, policy: ActorCritic | cloning.Family, factory: Callable[[list[int]], VectorEnv]
) -> Callable[[], EvaluationResult]:
    e = config.evaluation
    return functools.partial(
        evaluation.evaluate,
        policy,
        factory,
        episodes=e.episodes,
        num_envs=e.num_envs,
        seed=e.seed,
        deterministic=e.deterministic,
        temperature=None if e.deterministic else sampling_temperature(policy, e.temperature),
    )


def _writer(s: Setup, policy: ActorCritic | cloning.Family) -> Callable[..., dict[str, str | None]]:
    """Writes an evaluation's report."""
    e = s.config.evaluation

    def write(result: EvaluationResult, source: checkpoint.Checkpoint, out: Path) -> dict[str, str | None]:
        return write_report(
            replace(s.config, env=evaluation_env(s.config)),
            result,
            policy=policy,
            source=source,
            run_dir=s.run_dir,
            out=out,
            film_episodes=e.video_episodes,
            film_steps=e.video_steps,
            film_size=e.video_size,
            notice=s.notice,
        )

    return write


def _clone(s: Setup, policy: ActorCritic | cloning.Family) -> dict[str, float]:
    """Warm-up by cloning where it is asked for; facts for the summary."""
    if not s.config.cloning.steps or not s.fresh_start:
        return {}
    assert not isinstance(policy, ActorCritic)  # strict
    return imitation.clone(policy, s.config, s.progress, s.advance)


def _tell_threads(s: Setup, since: int | None) -> None:
    simulators = s.config.env.num_threads or "as many as there are cores"
    s.early.append(
        f"threads: {torch.get_num_threads()} for tensors, {simulators} for simulators; compiled code: "
        + ("never" if since is None else f"from update {since + 1} on")
    )


def title(config: Config) -> str:
    """What is trained, for the log's first line."""
    return f"{config.env.id}, {config.env.num_envs} environments, {steps_per_update(config)} steps an update"


def assemble(s: Setup, stack: ExitStack) -> Assembly:
    """A system of mode=embodied; ``stack`` closes what it opens. Raises ConfigError, EnvError, PlacementError."""
    placed = planned(s.config, s.device)
    if placed is not None:
        return _spread(s, placed)
    config, a = s.config, s.config.algorithm
    env = make_env(env_seeds(config.seed, 0, config.env.num_envs, a.group_size), config=config.env, device=s.device)
    stack.callback(env.close)
    policy = make_policy(config, env)
    _check_evaluation(config, s.device)
    facts = _clone(s, policy)
    s.early.extend(_unread(config, env))
    if isinstance(policy, PI0) and (told := policy.memory_notice(a.horizon * env.num_envs)):
        s.early.append(told)
    since = compile_from(config, s.device, s.notice)
    _tell_threads(s, since)

    def later() -> compiled.Later:
        return compiled.Later(since, required=config.compile == "always", notice=s.notice)

    system = LocalSystem(
        unit="env_steps",
        policy=policy,
        rollout=_rollout(config, env, policy, later(), stage=0, stages=1),
        learner=_learner(s, policy, later(), Ranks()),
        count=lambda experience: steps_per_update(config),
        measure=_measure(config, policy, functools.partial(make_env, config=evaluation_env(config), device=s.device)),
        score="eval/return",
        checkpoints=s.run_dir / "checkpoints",
        keep_last=config.keep_last,
        config_text=s.text,
        info={**s.info, "env_id": config.env.id},
    )
    return Assembly(system, title(config), a.horizon, _writer(s, policy), facts=facts)


def planned(config: Config, device: torch.device) -> plan.Plan | None:
    """Where the roles run; None: all in this process. Raises PlacementError."""
    c = config.cluster
    if config.placement == "local" and not c.component_placement:
        return None
    hardware = hardware_of(config, device)
    made = plan.plan(c.component_placement or config.placement, hardware, stages=c.stages, max_lag=c.max_lag)
    a = config.algorithm
    plan.check_numbers(
        made, num_envs=config.env.num_envs, group_size=a.group_size, global_batch_size=a.global_batch_size
    )
    return made


def foreseen(config: Config, placed: plan.Plan) -> dict[str, dict[str, int]]:
    """Group of a plan -> bytes that one of its processes will need at the peak, by what for; simulators not counted.

    Builds the policy, and one simulator for its spaces, in this process on the CPU. Raises ConfigError, EnvError.
    """
    cpu, a = torch.device("cpu"), config.algorithm
    env = make_env(env_seeds(0, 0, 1), config=config.env, device=cpu)
    try:
        about = Described(described(env), cpu)
    finally:
        env.close()
    policy = make_policy(config, about)
    assert isinstance(policy, torch.nn.Module)
    acts, learns = placed.processes("rollout"), placed.processes("actor")
    rows = config.env.num_envs // acts
    peak, obs, decision = memory.acting(policy, about.obs_spec, cpu, rows // placed.stages)
    t = memory.experience(obs, decision, a.horizon * placed.stages)
    weights, held = memory.nbytes([*policy.parameters(), *policy.buffers()]), memory.nbytes(t)
    mine = tree.map(lambda x: x.new_empty(a.horizon, config.env.num_envs // learns, *x.shape[2:]), t)
    batch = a.global_batch_size // learns
    share = replace(a, global_batch_size=batch, micro_batch_size=min(a.micro_batch_size or batch, batch))
    learner = JointLearner(policy, share, num_envs=config.env.num_envs, updates=1, seed=0)
    update = memory.predicted(policy, learner, cpu, mine)
    found: dict[str, dict[str, int]] = {}
    for group in placed.groups:
        need: dict[str, int] = dict.fromkeys(vars(update), 0)
        if "rollout" in group.roles:
            need.update(weights=weights, experience=held, activations=peak)
        if "actor" in group.roles:
            need = {what: max(need[what], size) for what, size in vars(update).items()}
        found[group.name] = need
    return found


def _spread(s: Setup, placed: plan.Plan) -> Assembly:
    """The system in processes of a Ray cluster."""
    from embodied_ppo.placement.cluster import ClusterSystem, Options  # Ray takes a second to load

    if s.config.model.checkpoint is None:  # else predicting would load it here
        plan.check_memory(placed, foreseen(s.config, placed))
    config, c = s.config, s.config.cluster
    system = ClusterSystem(
        placed,
        Maker(s.config, s.device.type, s.run_dir, s.updates, s.text, s.info, s.fresh_start),
        unit="env_steps",
        score="eval/return",
        checkpoints=s.run_dir / "checkpoints",
        keep_last=config.keep_last,
        config_text=s.text,
        info={**s.info, "env_id": config.env.id},
        options=Options(c.address, c.weights, c.start_timeout_s, c.step_timeout_s, c.check_weights, config.threads),
        notice=s.notice,
    )
    s.early.extend(plan.lines(placed.rows()))
    return Assembly(system, title(config), config.algorithm.horizon, system.write, facts=system.facts)


@dataclass(frozen=True)
class Maker:
    """Builds what a process holds, there; of ``Setup`` what can travel."""

    config: Config
    device: str
    run_dir: Path
    updates: int
    text: str
    info: Mapping[str, Any]
    fresh_start: bool

    def __call__(self, seat: Seat, exchange: Exchange | None, say: Callable[[str], None]) -> tuple[Part, Any]:
        told: set[str] = set()

        def notice(line: str) -> None:
            if line not in told:
                told.add(line)
                say(line)

        early: list[str] = []
        where = torch.device(self.device)
        torch.set_float32_matmul_precision(self.config.matmul_precision)
        rest: Any = {"notice": notice, "progress": say, "early": early, "fresh_start": self.fresh_start}
        found = part(
            Setup(self.config, where, self.run_dir, self.updates, self.text, self.info, **rest), seat, exchange
        )
        for line in early:
            say(line)
        return found


def part(s: Setup, seat: Seat, exchange: Exchange | None) -> tuple[Part, Mapping[str, Any]]:
    """What one process of a placement holds, and facts for the summary. Raises ConfigError, EnvError.

    ``exchange``: where others ask for simulators, if they are in this process and the rollouts are not.
    """
    config, a, roles = s.config, s.config.algorithm, seat.roles
    if exchange is not None:
        kinds = {"train": config.env, "evaluate": evaluation_env(config)}

        def make(kind: str, seeds: list[int]) -> VectorEnv:
            return make_env(seeds, config=kinds[kind], device=s.device)

        server = Server(make, exchange)
        if roles == ("env",):
            return Part(seat, server=server), {}
    envs = list[VectorEnv]()
    rank, world = seat.ranks.get("rollout", (0, 1))
    stages = world * seat.stages
    if "rollout" in roles:
        seeds = env_seeds(config.seed, 0, config.env.num_envs, a.group_size)
        n = config.env.num_envs // stages
        for stage in range(rank * seat.stages, (rank + 1) * seat.stages):
            envs.append(_simulators(s, seat, seeds[stage * n : stage * n + n], "train"))
    about = described(envs[0]) if envs else seat.about
    assert about is not None
    policy = make_policy(config, envs[0] if envs else Described(about, s.device))
    since, learns = compile_from(config, s.device, s.notice), seat.learners
    facts: Mapping[str, Any] = {}
    if not rank and "rollout" in roles:
        _check_evaluation(config, s.device)
        s.early.extend(_unread(config, envs[0]))
        _tell_threads(s, since)

    def later(on: bool = True) -> compiled.Later:
        return compiled.Later(since if on else None, required=config.compile == "always", notice=s.notice)

    learner = None
    if "actor" in roles:
        if not learns.rank:
            facts = _clone(s, policy)
        if since is not None and learns.world > 1:
            s.notice(f"compile: minibatches are not compiled, {learns.world} processes learn together")
        learner = _learner(s, policy, later(learns.world == 1), learns)
    rollout = None
    if envs:
        rollouts = [
            _rollout(config, env, policy, later(), stage=rank * seat.stages + i, stages=stages)
            for i, env in enumerate(envs)
        ]
        rollout = rollouts[0] if len(rollouts) == 1 else Staged(rollouts)
    made = Part(
        seat,
        policy=policy,
        rollout=rollout,
        learner=learner,
        count=lambda experience: steps_per_update(config) // learns.world,
        measure=_measure(config, policy, lambda seeds: _simulators(s, seat, seeds, "evaluate")),
        write=_writer(s, policy),
        about=about,
    )
    made.begin_alike()
    return made, facts


def _simulators(s: Setup, seat: Seat, seeds: list[int], kind: str) -> VectorEnv:
    """Here, or where the desks are: side by side if those can be dealt out evenly, else at the first."""
    if not seat.desks:
        config = s.config.env if kind == "train" else evaluation_env(s.config)
        return make_env(seeds, config=config, device=s.device)
    desks = seat.desks if kind == "train" else seat.desks[:1]
    n = len(seeds) // len(desks)
    parts = [RemoteEnv(d, seeds[i * n : i * n + n], kind=kind, device=s.device) for i, d in enumerate(desks)]
    return parts[0] if len(parts) == 1 else Joined(parts)


# ----------------------------------------------------------------------------------------------------------- evaluate
def evaluate(
    config: EvaluateConfig,
    trained: Config,
    source: checkpoint.Checkpoint,
    *,
    run_dir: Path,
    device: torch.device,
) -> Callable[[Path, Callable[[Any], None]], tuple[EvaluationResult, dict[str, str | None]]]:
    """What measures a checkpoint and writes the report into a folder, telling of every episode.

    Raises CheckpointError, ConfigError, EnvError.
    """
    base = strict.dump(evaluation_env(trained))
    kwargs = {**base["kwargs"], **dict(config.env.get("kwargs") or {})}
    env_config = strict.load(EnvConfig, {**base, **config.env, "kwargs": kwargs}, source="env")
    factory = functools.partial(make_env, config=env_config, device=device)
    probe = factory(env_seeds(0, 0, 1))
    try:
        policy = make_policy(replace(trained, env=env_config), probe)
    finally:
        probe.close()
    checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)

    temperature = None if config.deterministic else sampling_temperature(policy, config.temperature)

    def measure(out: Path, on_episode: Callable[[Any], None]) -> tuple[EvaluationResult, dict[str, str | None]]:
        result = evaluation.evaluate(
            policy,
            factory,
            episodes=config.episodes,
            num_envs=config.num_envs,
            seed=config.seed,
            deterministic=config.deterministic,
            temperature=temperature,
            on_episode=on_episode,
        )
        written = write_report(
            replace(trained, env=env_config),
            result,
            policy=policy,
            source=source,
            run_dir=run_dir,
            out=out,
            film_episodes=config.video_episodes if config.video else 0,
            film_steps=config.video_steps,
            film_size=config.video_size,
        )
        return result, written

    return measure


def sampling_temperature(policy: Policy, asked: float) -> float | None:
    """``asked`` for policies that have one. Raises ConfigError for another than 1 where there is none."""
    if hasattr(policy, "temperature"):
        return asked
    if asked != 1:
        raise ConfigError(f"temperature = {asked:g}: model.policy=actor_critic has none; leave it out")
    return None


def export(trained: Config, source: checkpoint.Checkpoint, out: Path) -> dict[str, Any]:
    """The directory of model.checkpoint with what was learned, read back and compared.

    Raises CheckpointError, ConfigError, EnvError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out={out}: is not an empty directory; name a new one")
    env = make_env(env_seeds(0, 0, 2), config=replace(trained.env, num_envs=2), device=torch.device("cpu"))
    try:
        policy = make_policy(trained, env)
        assert isinstance(policy, CheckpointVLA) and trained.model.checkpoint is not None
        checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)
        obs = env.reset()
        before = policy.act(policy.encode(obs))
        try:
            vla_checkpoint.export(policy, trained.model.checkpoint, out)
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
    notice: Callable[[str], None] | None = None,
) -> dict[str, str | None]:
    """report.json, report.html and an mp4 of an evaluation; their paths. ``notice`` hears why there is no mp4."""
    filmed = None
    if film_episodes:
        filmed = film.film(
            policy,
            functools.partial(make_env, config=config.env, device=torch.device("cpu"), render=True, size=film_size),
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
    plain = strict.relevant(config) | {"run_dir": None}
    written = report.write(
        out,
        result.by_kind(),
        checkpoint=source.path.name,
        update=source.update,
        steps=int(source.manifest["env_steps"]),
        config=plain,
        config_hash=str(source.manifest["config_hash"]),
        versions=versions(),
        curves=report.rows(run_dir),
        film=filmed,
    )
    video = None if filmed is None or filmed.path is None else str(run_dir / "videos" / filmed.path.name)
    return {"report": str(written.html), "report_json": str(written.json), "video": video}
