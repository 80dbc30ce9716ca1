"""Robot policies in several processes: where the roles go, what they need there, and what each of them builds.

``spread_language`` does the same for mode=reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from embodied_ppo.algorithms.actor_critic_learner import actor_critic_learner
from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config import placement
from embodied_ppo.config.batch_sizes import batches, steps_per_update
from embodied_ppo.config.schema import AlgorithmConfig, Config
from embodied_ppo.core import compile, tree
from embodied_ppo.core.collectives import Ranks
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import ConfigError, PlacementError, Trajectory, VectorEnv
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.modes.base import Assembly, Setup, hardware_of
from embodied_ppo.modes.embodied import components
from embodied_ppo.placement import memory_estimate
from embodied_ppo.placement.channels import Exchange, Server
from embodied_ppo.placement.offload import Residency
from embodied_ppo.placement.remote_envs import Described, Joined, RemoteEnv, Simulators, described
from embodied_ppo.placement.worker import Part, Seat, alike
from embodied_ppo.rollout.simulation import Staged
from embodied_ppo.training import checkpoint
from embodied_ppo.training.system import Records

if TYPE_CHECKING:
    from embodied_ppo.placement.ray_system import ClusterSystem


# -------------------------------------------------------------------------------------------------------------- driver
def planned(config: Config, device: torch.device) -> placement.Plan | None:
    """Where the roles run; None: all in this process. Raises ConfigError, PlacementError."""
    a, c = config.algorithm, config.cluster
    if config.placement == "local" and not c.component_placement:
        return None
    hardware = hardware_of(config, device)
    made = placement.plan(
        c.component_placement or config.placement, hardware, stages=c.stages, max_lag=c.max_lag, weights=c.weights
    )
    placement.check_numbers(
        made, num_envs=config.env.num_envs, group_size=a.group_size, global_batch_size=a.global_batch_size
    )
    if c.shard and (why := unsharded(made)):
        raise PlacementError(f"cluster.shard = true: {why}")
    check_compile(config, made)
    return made


def unsharded(placed: placement.Plan) -> str:
    """Why learners cannot hold a part of a model each, and a cure; "": they can."""
    if [int(x) for x in torch.__version__.split(".")[:2]] < [2, 13]:
        return f"needs torch 2.13, this is {torch.__version__}; write cluster.shard=false"
    if placed.processes("actor") == 1:
        return (
            "one process learns, and has nobody to share a model with; give actor more devices "
            "(cluster.devices_per_node, cluster.component_placement), or write cluster.shard=false"
        )
    return ""


TURNS = "processes that take turns on a GPU move their tensors"
"""Why nothing is compiled there."""


def check_compile(config: Config, placed: placement.Plan) -> None:
    """Whether compile=always can be had. Raises ConfigError."""
    if config.compile != "always":
        return
    residency = Residency(placed)
    why = f"{placed.processes('actor')} processes learn together" if placed.processes("actor") > 1 else ""
    if any(residency.turns(placed.group(role)) for role in ("rollout", "actor", "critic") if placed.has(role)):
        why = TURNS
    if why:
        raise ConfigError(f"compile=always: {why}; use compile=auto")


class Foresight:
    """What processes will need, whatever the placement."""

    def __init__(self, config: Config) -> None:
        """Builds the policy, and one simulator for its spaces, in this process on the CPU. Raises ConfigError,
        EnvError."""
        self.config, self.cpu = config, torch.device("cpu")
        env = components.make_env(env_seeds(0, 0, 1), config=config.env, device=self.cpu)
        try:
            self.about = Described(described(env), self.cpu)
        finally:
            env.close()
        self.policy = components.make_policy(config, self.about)
        self._acts: dict[int, tuple[int, Any, Any]] = {}
        self._learns: dict[tuple[int, int | None], memory_estimate.Memory] = {}

    def needs(
        self, placed: placement.Plan, micro: int | None = None, *, shard: bool | None = None
    ) -> dict[str, dict[str, int]]:
        """Group -> bytes that one of its processes will need at the peak, by what for; simulators not counted.

        ``micro``: samples at once instead of algorithm.micro_batch_size. ``shard``: instead of cluster.shard.
        """
        peak, t = self._acting(placed.processes("rollout") * placed.stages)
        learns = placed.processes("actor")
        update = self._updating(learns, micro)
        if self.config.cluster.shard if shard is None else shard:
            held = memory_estimate.in_parts(self.policy, learns, acts=placed.fused("rollout", "actor"))
            update = replace(update, **held)
        weights = memory_estimate.nbytes([*self.policy.parameters(), *self.policy.buffers()])
        found: dict[str, dict[str, int]] = {}
        for group in placed.groups:
            need: dict[str, int] = dict.fromkeys(vars(update), 0)
            if "rollout" in group.roles:
                need.update(weights=weights, experience=memory_estimate.nbytes(t) * placed.stages, activations=peak)
            if "actor" in group.roles:
                need = {what: max(need[what], size) for what, size in vars(update).items()}
            found[group.name] = need
        return found

    def _acting(self, parts: int) -> tuple[int, Trajectory]:
        """Of deciding for one of so many parts of the environments: the peak, and the experience."""
        if parts not in self._acts:
            rows = self.config.env.num_envs // parts
            peak, obs, decision = memory_estimate.acting(self.policy, self.about.obs_spec, self.cpu, rows)
            if (limit := self.config.algorithm.rollout_micro_batch_size) is not None and limit < rows:
                peak = memory_estimate.acting(self.policy, self.about.obs_spec, self.cpu, limit)[0]
            self._acts[parts] = peak, obs, decision
        peak, obs, decision = self._acts[parts]
        return peak, memory_estimate.experience(obs, decision, self.config.algorithm.horizon)

    def _updating(self, learns: int, micro: int | None) -> memory_estimate.Memory:
        """Of one of so many learners."""
        if (learns, micro) not in self._learns:
            config, a = self.config, self.config.algorithm
            share = share_of(replace(a, micro_batch_size=micro or a.micro_batch_size), learns)
            _, t = self._acting(1)
            mine = tree.map(lambda x: x.new_empty(x.shape[0], config.env.num_envs // learns, *x.shape[2:]), t)
            learner = actor_critic_learner(self.policy, share, num_envs=config.env.num_envs, updates=1, seed=0)
            self._learns[learns, micro] = memory_estimate.predicted(self.policy, learner, self.cpu, mine)
        return self._learns[learns, micro]


def share_of(a: AlgorithmConfig, world: int) -> AlgorithmConfig:
    """What one of ``world`` learners does of every minibatch."""
    batch = max(1, a.global_batch_size // world)
    return replace(a, global_batch_size=batch, micro_batch_size=min(a.micro_batch_size or batch, batch))


class Foresees(Protocol):
    """``Foresight`` of either mode."""

    def needs(
        self, placed: placement.Plan, micro: int | None = None, *, shard: bool | None = None
    ) -> dict[str, dict[str, int]]: ...


def foreseeable(config: Config, *, alone: bool = False) -> bool:
    """Whether what is needed can be predicted in this process before the run is built, ``alone``: in the same one.

    Predicting would load a checkpoint, and some simulators can be started only once in a process (Isaac).
    """
    return config.model.checkpoint is None and not (alone and config.env.simulator in ("torch", "mjlab", "libero"))


def check_memory(
    config: Config, placed: placement.Plan, foresight: Foresees | None = None, why: str | None = None
) -> dict[str, dict[str, int]]:
    """What is foreseen. Raises PlacementError where it does not fit, and says whether it would with cluster.shard,
    unless there is a reason ``why`` it cannot be (None: as ``unsharded`` says)."""
    foresight = foresight or Foresight(config)
    needs, sharded = foresight.needs(placed), None
    if not config.cluster.shard and not (unsharded(placed) if why is None else why):
        sharded = partial(foresight.needs, placed, shard=True)
    placement.check_memory(placed, needs, sharded)
    return needs


def facts(config: Config, placed: placement.Plan) -> dict[str, int]:
    """What an update consists of, for people."""
    b = batches(config)
    return {
        "environments of a rollout process": config.env.num_envs // placed.processes("rollout"),
        "decisions an update": b.samples,
        "optimiser steps an update": b.actor.steps,
        "samples of an actor process in a step": b.actor.size // placed.processes("actor"),
    }


def assemble(s: Setup, placed: placement.Plan) -> Assembly:
    """The system in processes of a Ray cluster. Raises ConfigError, EnvError, PlacementError."""
    config = s.config
    if foreseeable(config):
        check_memory(config, placed)
    system = started(s, placed, components.records(s), part)
    return Assembly(system, config.env.id, config.algorithm.horizon, system.write, facts=system.facts)


def started(s: Setup, placed: placement.Plan, records: Records, part: PartMaker) -> ClusterSystem:
    """The processes of a plan, each with what ``part`` builds there. Raises what that raises, PlacementError."""
    from embodied_ppo.placement.ray_system import ClusterSystem  # Ray takes a second to load

    config = s.config
    system = ClusterSystem(
        records,
        placed,
        Maker(config, s.device.type, s.run_dir.absolute(), s.updates, s.text, s.info, s.fresh_start, part, s.task),
        options=config.cluster,
        threads=config.threads,
        notice=s.notice,
    )
    s.early.extend(placement.lines(placed.rows()))
    return system


# ---------------------------------------------------------------------------------------------------- in the processes
PartMaker: TypeAlias = "Callable[[Setup, Seat, Exchange | None], tuple[Part, Mapping[str, Any]]]"
"""What a process holds, and facts for the summary; a function of a module, for it is sent there."""


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
    part: PartMaker
    task: Any = None

    def __call__(self, seat: Seat, exchange: Exchange | None, say: Callable[[str], None]) -> tuple[Part, Any]:
        told: set[str] = set()

        def notice(line: str) -> None:
            if line not in told:
                told.add(line)
                say(line)

        early: list[str] = []
        torch.set_float32_matmul_precision(self.config.matmul_precision)
        setup = Setup(
            config=self.config,
            device=torch.device(self.device),
            run_dir=self.run_dir,
            updates=self.updates,
            text=self.text,
            info=self.info,
            notice=notice,
            progress=say,
            early=early,
            fresh_start=self.fresh_start,
            task=self.task,
        )
        found = self.part(setup, seat, exchange)
        for line in early:
            say(line)
        return found


def part(s: Setup, seat: Seat, exchange: Exchange | None) -> tuple[Part, Mapping[str, Any]]:
    """What one process of a placement holds, and facts for the summary. Raises ConfigError, EnvError.

    ``exchange``: where others ask for simulators, if they are in this process and the rollouts are not.
    """
    config, roles, learns = s.config, seat.roles, seat.learners
    server = None if exchange is None else Server(Simulators(lambda kind, seeds: _here(s, seeds, kind)), exchange)
    if roles == ("env",):
        return Part(seat, server=server), {}
    rank, world = seat.ranks.get("rollout", (0, 1))
    envs, stages = list[VectorEnv](), world * seat.stages
    if "rollout" in roles:
        seeds = env_seeds(config.seed, 0, config.env.num_envs, config.algorithm.group_size)
        n = config.env.num_envs // stages
        for stage in range(rank * seat.stages, (rank + 1) * seat.stages):
            envs.append(_simulators(s, seat, seeds[stage * n : stage * n + n], "train"))
    about = described(envs[0]) if envs else seat.about or _looked_at(s)
    host = learns.sharded and not config.cloning.steps  # what need never be whole on a device is built beside it
    where = torch.device("cpu") if host else s.device
    policy = components.make_policy(config, envs[0] if envs else Described(about, where))
    since, why = (None, TURNS) if seat.turns else components.compile_from(config, s.device, s.notice, parts=stages)
    if envs and not rank:
        components.check_evaluation(config, s.device)
        components.tell(s, envs[0], policy, since, why)

    def later(on: bool = True) -> compile.CompileSchedule:
        return compile.CompileSchedule(since if on else None, required=config.compile == "always", notice=s.notice)

    facts: Mapping[str, Any] = {}
    learner: Learner | None = None
    if "actor" in roles:
        if not learns.rank:
            facts = components.clone(s, policy)
        alike(policy, learns)
        if since is not None and learns.world > 1:
            s.notice(f"compile: minibatches are not compiled, {learns.world} processes learn together")
        learner = components.make_learner(s, policy, later(learns.world == 1), learns)
        if learns.sharded and not learns.rank:
            s.notice(told_of_parts(policy, learns))
    rollouts = [
        components.make_rollout(config, env, policy, later(), stage=rank * seat.stages + i, stages=stages)
        for i, env in enumerate(envs)
    ]
    return Part(
        seat,
        policy=policy,
        rollout=None if not rollouts else rollouts[0] if len(rollouts) == 1 else Staged(rollouts),
        learner=learner,
        server=server,
        count=lambda experience: steps_per_update(config) // learns.world,
        measure=lambda: components.measure(
            config.evaluation, policy, lambda seeds: _simulators(s, seat, seeds, "evaluate")
        ),
        write=_writer(s, about) if learns.sharded else components.writer(s, policy),
        about=about,
    ), facts


def told_of_parts(policy: torch.nn.Module, learns: Ranks) -> str:
    """What the log should say of cluster.shard."""
    whole, mine = (
        memory_estimate.nbytes(list(x)) for x in (policy.parameters(), map(learns.local, policy.parameters()))
    )
    return (
        f"cluster.shard: {learns.world} processes of actor hold the model's {placement.amount(whole)} together, "
        f"this one {placement.amount(mine)}"
    )


def _writer(s: Setup, about: Any) -> Callable[[EvaluationResult, checkpoint.Checkpoint, Path], components.Written]:
    """As ``robot.writer``, with the checkpoint's weights: parts of a policy cannot be filmed elsewhere."""

    def write(result: EvaluationResult, source: checkpoint.Checkpoint, out: Path) -> components.Written:
        policy = components.make_policy(s.config, Described(about, torch.device("cpu")))
        checkpoint.load_weights(policy, source.policy(), source.path / checkpoint.POLICY)
        return components.writer(s, policy)(result, source, out)

    return write


def _here(s: Setup, seeds: list[int], kind: str) -> VectorEnv:
    """Simulators in this process, to "train" or to "evaluate"."""
    config = s.config.env if kind == "train" else components.evaluation_env(s.config)
    if s.task is not None:
        s.task.activate(s.notice)
    return components.make_env(seeds, config=config, device=s.device)


def _looked_at(s: Setup) -> dict[str, Any]:
    """What simulators are like, by one that is made for it."""
    env = _here(s, env_seeds(0, 0, 1), "train")
    try:
        return described(env)
    finally:
        env.close()


def _simulators(s: Setup, seat: Seat, seeds: list[int], kind: str) -> VectorEnv:
    """Here, or where the desks are: side by side to train, at the first to evaluate."""
    desks = seat.desks.get("env", ())
    if not desks:
        return _here(s, seeds, kind)
    desks = desks if kind == "train" else desks[:1]
    n = len(seeds) // len(desks)
    parts = [RemoteEnv(d, seeds[i * n : i * n + n], kind=kind, device=s.device) for i, d in enumerate(desks)]
    return parts[0] if len(parts) == 1 else Joined(parts)
