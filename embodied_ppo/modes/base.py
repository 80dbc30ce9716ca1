"""The interface of a training mode, and what its implementations share.

``registry`` maps the option ``mode`` to its implementation.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from embodied_ppo.algorithms.learner import Learner
from embodied_ppo.config import loader, placement, validation
from embodied_ppo.config.schema import (
    AlgorithmConfig,
    Config,
    EvaluateConfig,
    EvaluationConfig,
)
from embodied_ppo.core import compile, devices
from embodied_ppo.core.types import ConfigError, PlacementError, ProgressCallback
from embodied_ppo.evaluation import report
from embodied_ppo.evaluation.episodes import EvaluationResult
from embodied_ppo.placement import cost_model
from embodied_ppo.placement.channels import Exchange
from embodied_ppo.placement.offload import Residency
from embodied_ppo.placement.worker import Worker, WorkerSpec
from embodied_ppo.rollout.simulation import Rollout, Staged
from embodied_ppo.training import checkpoint
from embodied_ppo.training.local_system import LocalSystem
from embodied_ppo.training.pipelined_system import PipelinedSystem
from embodied_ppo.training.run_directory import versions
from embodied_ppo.training.system import Records, RunSystem

MemoryNeeds = dict[str, dict[str, int]]
"""Group of a plan -> purpose of memory (weights, gradients, ..) -> peak bytes of one process."""
Evaluator = Callable[[Path, ProgressCallback], dict[str, Any]]
"""Evaluates a checkpoint and writes the report into a folder.

It returns metrics and the paths of the report's files.
"""
ReportFiles = dict[str, str | None]
"""Kind of file -> path of a file of a report; None: not written."""
ReportWriter = Callable[[Any, checkpoint.Checkpoint, Path], ReportFiles]
"""``(result of an evaluation, checkpoint, folder)`` -> files of the report."""


# ------------------------------------------------------------------------------------ data of a run
class TaskFile(Protocol):
    """One source file of a user's task."""

    @property
    def name(self) -> str:
        """Path relative to the folder of the originals."""
        ...

    @property
    def digest(self) -> str:
        """SHA-256 of the contents in hex; the size of a very large file."""
        ...


class TaskFiles(Protocol):
    """Source files of a user's task; ``embodied_envs.task_files.TaskFiles`` implements it."""

    @property
    def id(self) -> str:
        """Value of ``env.id``."""
        ...

    @property
    def files(self) -> Sequence[TaskFile]:
        """The files; the module that ``id`` names is the first."""
        ...

    @property
    def hash(self) -> str:
        """12 hex digits of the SHA-256 of names and contents."""
        ...

    def save(self, run_dir: Path) -> TaskFiles:
        """Write copies and a manifest into ``run_dir`` unless they exist.

        Returns:
            The same files with the folder of their copies.
        """
        ...

    def without_data(self, run_dir: Path) -> TaskFiles:
        """Return a value for other processes, which read the copies from ``run_dir``."""
        ...

    def activate(self, say: Callable[[str], None] = ...) -> None:
        """Execute the files of the run's start: the originals if unchanged, else the copies.

        Args:
            say: Called with a line if copies are executed.

        Raises:
            EnvError: The originals differ and the copies cannot be read.
            CheckpointError: The copies are damaged.
        """
        ...


@dataclass(frozen=True)
class RunRequest:
    """Everything that a mode needs to build the system of a run.

    Attributes:
        config: Resolved options.
        device: Device of the policy and the learner.
        run_dir: Directory of the run.
        updates: Updates of the complete run.
        config_text: Content of ``config.yaml``.
        info: Versions, hashes and arithmetic settings, which every checkpoint records.
        notice: Reports a line to the user, each line once.
        progress: Reports at once that a slow step begins or ends.
        early_log_lines: Log lines from before the log is opened.
        fresh_start: False where the weights of a checkpoint will replace the initial ones.
        advance: Progress callback ``(task, completed, total)``.
        task: Files of the user's task; None for a task of an installed package.
        teacher: Teacher of a distillation; None: the run trains by PPO.
        last_update: Number of updates after which this execution ends; None: ``updates``.
    """

    config: Config
    device: torch.device
    run_dir: Path
    updates: int
    config_text: str
    info: Mapping[str, Any]
    notice: Callable[[str], None]
    progress: Callable[[str], None]
    early_log_lines: list[str]
    fresh_start: bool = True
    advance: ProgressCallback = lambda task, completed, total: None
    task: TaskFiles | None = None
    teacher: TrainedRun | None = None
    last_update: int | None = None


@dataclass(frozen=True)
class RunComponents:
    """A system that is ready to run.

    Attributes:
        system: Collects, updates, evaluates and saves.
        title: Name of what is trained, for the first line of the log.
        write_report: Writes the report of an evaluation ``(result, checkpoint, folder)``; returns
            the paths of its files.
        facts: Results of the steps before PPO (cloning), for the summary.
    """

    system: RunSystem
    title: str
    write_report: ReportWriter
    facts: Mapping[str, Any] = field(default_factory=dict)


class MemoryEstimator(Protocol):
    """Predicts the memory of worker processes for any placement of a run, without starting it."""

    def needs(
        self, placed: placement.Plan, micro: int | None = None, *, shard: bool | None = None
    ) -> MemoryNeeds:
        """Return the peak memory of one process of each group.

        Simulators, graders and reward models are not counted.

        Args:
            micro: Samples (responses) of one forward and backward pass; None: as the options say.
            shard: Replaces ``cluster.shard``; None: as the options say.
        """
        ...

    @property
    def micro_batch_size(self) -> int | None:
        """Maximum samples (responses) of one forward and backward pass; None: no limit."""
        ...

    def with_micro_batch_size(self, algorithm: AlgorithmConfig, size: int) -> AlgorithmConfig:
        """Return the options with the limit ``size``, written in the unit that the recipe uses."""
        ...


@dataclass(frozen=True)
class TrainedRun:
    """A checkpoint and the run that wrote it.

    Attributes:
        config: Options of the run.
        source: The checkpoint.
        run_dir: Directory of the run.
        say: Reports a line to the user.
    """

    config: Config
    source: checkpoint.Checkpoint
    run_dir: Path
    say: Callable[[str], None]

    def load_weights(self, policy: nn.Module) -> None:
        """Load the weights of the checkpoint into ``policy``. Raises CheckpointError."""
        checkpoint.load_weights(policy, self.source.policy(), self.source.path / checkpoint.POLICY)


# --------------------------------------------------------------------------------------------- mode
class Mode(ABC):
    """A kind of training: its roles, how they are built and measured.

    Implementations hold no state.
    """

    name: ClassVar[Literal["embodied", "reasoning"]]
    unit: ClassVar[Literal["env_steps", "tokens"]]
    """Unit in which experience is counted."""
    score_metric: ClassVar[str]
    """Tag of the evaluation metric that decides which checkpoint is the best."""
    success_metric: ClassVar[str]
    """Tag of the evaluation metric that is the share of successes."""
    budget_options: ClassVar[str]
    """Options that set the length of a run, as messages name them."""
    cloning_error: ClassVar[str | None] = None
    """Why a policy of this mode cannot be cloned from demonstrations; None: it can."""
    compiles_complete_minibatches_only: ClassVar[bool] = False
    """Whether micro-batches that cut minibatches switch compiled code off."""
    profiles_trained_policy: ClassVar[bool] = False
    """Whether profiling first runs the supervised steps, as they change an update's duration."""

    # ------------------------------------------------------------------------------------ placement
    def plan(self, config: Config, device: torch.device) -> placement.Plan | None:
        """Return where the roles run; None: all in this process.

        Raises:
            ConfigError: compile=always, pipeline or learner_threads is impossible in this
                placement.
            PlacementError: The placement is not valid for these options.
        """
        c = config.cluster
        if config.placement == "local" and not c.component_placement:
            threads = config.learner_threads
            if device.type != "cpu" and (config.pipeline or threads > 1):
                option = "pipeline = true" if config.pipeline else f"learner_threads = {threads}"
                raise ConfigError(
                    f"{option} and device = {device}: only threads of a CPU work like this; write"
                    " device=cpu, or leave the option out"
                )
            return None
        plan = placement.plan(
            c.component_placement or config.placement,
            hardware_of(config, device),
            mode=self.name,
            without=validation.unused_roles(config),
            stages=c.stages,
            max_lag=c.max_lag,
            weights=c.weights,
        )
        self.check_plan(config, plan)
        if c.shard and (reason := self.shard_obstacle(config, plan)):
            raise PlacementError(f"cluster.shard = true: {reason}")
        check_compile(config, plan)
        return plan

    def roles(self, config: Config) -> tuple[str, ...]:
        """Return the roles of a run."""
        unused = validation.unused_roles(config)
        return tuple(role for role in placement.ROLES[self.name] if role not in unused)

    def plan_on_one_device(self, config: Config, device: torch.device) -> placement.Plan:
        """Return the plan of all roles of this run together on one device."""
        one = replace(hardware_of(config, device), per_node=(1,))
        roles, unused = ",".join(self.roles(config)), validation.unused_roles(config)
        return placement.plan({roles: 0}, one, mode=self.name, without=unused)

    def resolve_plan(self, config: Config, device: torch.device) -> placement.Plan:
        """Return the plan of the roles; of a run in one process: all on one device.

        Raises ConfigError, PlacementError.
        """
        return self.plan(config, device) or self.plan_on_one_device(config, device)

    @abstractmethod
    def check_plan(self, config: Config, plan: placement.Plan) -> None:
        """Raise ConfigError or PlacementError where batches or roles do not divide as planned."""

    def shard_obstacle(self, config: Config, plan: placement.Plan) -> str:
        """Return why the model cannot be sharded, and the cure; "" where it can."""
        version = torch.__version__
        if [int(x) for x in version.split(".")[:2]] < [2, 13]:
            return f"needs torch 2.13, this is {version}; write cluster.shard=false"
        if plan.processes("actor") == 1:
            return (
                "sharding needs at least two actor processes, this plan has one; give actor more"
                " devices (cluster.devices_per_node, cluster.component_placement), or write"
                " cluster.shard=false"
            )
        return ""

    @abstractmethod
    def facts(self, config: Config, plan: placement.Plan) -> dict[str, int]:
        """Return the sizes of an update in this plan, for ``embodied-ppo plan``."""

    @abstractmethod
    def max_learners(self, config: Config) -> int:
        """Return the maximum number of learners: each needs one environment or prompt."""

    # --------------------------------------------------------------------------------------- memory
    @abstractmethod
    def can_estimate(self, config: Config, *, in_process: bool = False) -> bool:
        """Return whether memory can be estimated in this process before the run is built.

        Args:
            in_process: Whether the run will be built in this process, too.
        """

    @abstractmethod
    def memory_estimator(self, config: Config) -> MemoryEstimator:
        """Build the models of the run on the CPU to estimate memory.

        Raises ConfigError, EnvError.
        """

    def check_memory(self, config: Config, plan: placement.Plan) -> MemoryNeeds:
        """Return the estimated memory.

        Raises:
            PlacementError: It does not fit. The message proposes cluster.shard where that would
                suffice.
        """
        estimator = self.memory_estimator(config)
        needs, sharded = estimator.needs(plan), None
        if not config.cluster.shard and not self.shard_obstacle(config, plan):
            sharded = partial(estimator.needs, plan, shard=True)
        placement.check_memory(plan, needs, sharded)
        return needs

    @abstractmethod
    def minibatch_samples(self, config: Config) -> int:
        """Return the samples (responses) of the largest minibatch of all learners together."""

    def micro_batch_unit(self, config: Config) -> int:
        """Return the number of samples that a micro-batch must be a multiple of."""
        return 1

    # ---------------------------------------------------------------------------------------- build
    @abstractmethod
    def title(self, config: Config, size: int | None = None) -> str:
        """Return the name of what is trained, for the first line of the log.

        Args:
            size: Number of the policy's parameters; None: unknown to this process.
        """

    @abstractmethod
    def horizon(self, config: Config) -> int:
        """Return the steps (tokens) of one rollout."""

    def samples(self, result: Any) -> list[dict[str, Any]]:
        """Return rows of a table with samples of an evaluation, for TensorBoard."""
        return []

    def checkpoint_info(self, config: Config) -> Mapping[str, Any]:
        """Return what checkpoints record in addition to ``RunRequest.info``."""
        return {}

    def records(self, request: RunRequest) -> Records:
        """Return how a run is recorded."""
        config = request.config
        return Records(
            unit=self.unit,
            score=self.score_metric,
            checkpoints=request.run_dir / "checkpoints",
            keep_last=config.keep_last,
            config_text=request.config_text,
            info={**request.info, **self.checkpoint_info(config)},
        )

    def compiled_since(self, config: Config) -> int | None:
        """Return the first update that uses compiled code in this process; None: no update.

        Raises ConfigError.
        """
        return None

    def check_files(self, config: Config) -> None:
        """Raise ConfigError where files are missing that worker processes will read."""
        return

    def task_for_training(
        self, config: Config, source: checkpoint.Checkpoint | None, say: Callable[[str], None]
    ) -> TaskFiles | None:
        """Return the files of the user's task that the run executes; None: there are none.

        Raises ConfigError.
        """
        return None

    def build_local(self, request: RunRequest, stack: ExitStack) -> RunComponents:
        """Build the system in this process.

        Args:
            stack: Closes what is opened here.

        Raises:
            ConfigError, EnvError: An option is refused by what it configures.
        """
        stages = request.config.cluster.stages
        spec = WorkerSpec(self.roles(request.config), {"rollout": (0, 1)}, stages=stages)
        worker, facts = self.build_worker(request, spec, None, stack)
        policy, rollout, learner, measure = (
            worker.policy,
            worker.rollout,
            worker.learner,
            worker.measure,
        )
        assert policy is not None and rollout is not None
        assert learner is not None and measure is not None and worker.write_report is not None
        make_system = LocalSystem
        if request.config.pipeline:
            assert isinstance(rollout, Rollout | Staged) and isinstance(rollout.policy, nn.Module)
            assert isinstance(learner, Learner)
            # The clock of the process would count the time of both threads.
            rollout.cpu_clock = learner.cpu_clock = time.thread_time
            make_system = partial(PipelinedSystem, acting=rollout.policy, stop_rollout=rollout.stop)
        system = make_system(
            self.records(request),
            policy=policy,
            rollout=rollout,
            learner=learner,
            count=worker.count,
            measure=measure,
            publish=worker.on_weights_updated,
        )
        size = sum(p.numel() for p in policy.parameters())
        return RunComponents(system, self.title(request.config, size), worker.write_report, facts)

    @abstractmethod
    def build_worker(
        self, request: RunRequest, spec: WorkerSpec, exchange: Exchange | None, stack: ExitStack
    ) -> tuple[Worker, Mapping[str, Any]]:
        """Build the roles of one process, in that process.

        Args:
            spec: Roles, ranks and connections of this process.
            exchange: Receives requests of other processes; None where no other process sends
                requests.
            stack: Closes what is opened here.

        Returns:
            The worker, and facts for the summary.

        Raises:
            ConfigError, EnvError: An option is refused by what it configures.
        """

    # ---------------------------------------------------------------------------------- checkpoints
    @abstractmethod
    def evaluator(
        self, run: TrainedRun, options: EvaluateConfig, device: torch.device
    ) -> Evaluator:
        """Load a checkpoint for its evaluation.

        Raises:
            CheckpointError, ConfigError, EnvError: Before anything is written.
        """

    def load_policy(
        self, run: TrainedRun, device: torch.device, *, seed: int, allow_changed_task: bool
    ) -> Any:
        """Load a checkpoint as a policy that acts outside of training (``TrainedPolicy``).

        Args:
            run: The checkpoint and its run.
            device: Device of the policy.
            seed: Seed of sampled actions.
            allow_changed_task: Whether the task's files may differ from those of the training.

        Raises:
            CheckpointError, ConfigError, EnvError: There is no such policy, or it does not fit.
        """
        raise ConfigError(
            f"checkpoint={run.source.path.name}: is a language model; write embodied-ppo export"
            f" checkpoint={run.run_dir} out=DIR, and load DIR with transformers"
        )

    def export(self, run: TrainedRun, out: Path, *, adapter: bool = False) -> dict[str, Any]:
        """Write the model of a checkpoint for other programs, read it back and compare.

        Args:
            run: The checkpoint and its run.
            out: Directory to write.
            adapter: Write the adapters only.

        Returns:
            Paths, size and the largest difference when read back, for the output of the command.

        Raises:
            CheckpointError, ConfigError, EnvError: The model cannot be exported, or not be written.
        """
        self.check_export(run, adapter=adapter)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"out={out}: is not an empty directory; name a new one")
        measurements = self.write_model(run, out, adapter=adapter)
        size = sum(file.stat().st_size for file in out.iterdir())
        return {
            "checkpoint": str(run.source.path),
            "out": str(out),
            "mb": round(size / 1e6, 1),
            **measurements,
        }

    def check_export(self, run: TrainedRun, *, adapter: bool) -> None:
        """Raise ConfigError where the model cannot be exported; see ``export``."""
        if adapter and not run.config.model.lora_rank:
            raise ConfigError(
                f"lora=adapter: {run.source.path.name} has no adapters (model.lora_rank=0); write"
                " lora=merged"
            )

    @abstractmethod
    def write_model(self, run: TrainedRun, out: Path, *, adapter: bool = False) -> dict[str, Any]:
        """Write a model, or its adapters, for ``export`` and read it back.

        Returns:
            ``logit_difference`` or ``action_difference``, the largest one, and further facts.
        """

    # ------------------------------------------------------------------------------------ profiling
    @abstractmethod
    def choices(
        self, config: Config, hardware: placement.Hardware, cores: int
    ) -> list[cost_model.Choice]:
        """Return the placements that ``embodied-ppo tune`` compares on this hardware."""

    @abstractmethod
    def cost_model(
        self, request: RunRequest, update: int, plans: Sequence[placement.Plan | None]
    ) -> cost_model.Machine:
        """Time the roles of a run in this process, in the sizes that the plans need.

        Args:
            update: Update of the run that is timed.
            plans: Placements to predict; None: one process.

        Raises:
            ConfigError, EnvError: An option is refused by what it configures.
        """


# -------------------------------------------------------------------------- checkpoints and reports
@contextmanager
def report_write_errors(out: Path) -> Iterator[None]:
    """Raise ConfigError where a file in ``out`` cannot be written within the block."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"out={out}: cannot be written ({error.strerror}); name another directory"
        ) from error


def check_writable(out: Path) -> None:
    """Raise ConfigError if no file can be written in a folder; nothing is left behind.

    It is called before a computation whose result is written there.
    """
    absent = [path for path in (out, *out.parents) if not path.exists()]
    with report_write_errors(out):
        try:
            out.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=out).close()
        finally:
            for path in absent:
                with suppress(OSError):
                    path.rmdir()


def write_report(
    config: Config,
    results: Sequence[EvaluationResult],
    *,
    source: checkpoint.Checkpoint,
    run_dir: Path,
    out: Path,
    unit: Literal["env_steps", "tokens"],
    options: EvaluationConfig | EvaluateConfig,
    **sections: Any,
) -> ReportFiles:
    """Write report.json and report.html of an evaluation; return their paths.

    Args:
        config: Options of the run.
        results: One result per task.
        source: Checkpoint that was evaluated.
        run_dir: Directory of the run, whose metrics are drawn.
        out: Folder of the report.
        unit: Unit in which experience is counted.
        options: Options of the evaluation.
        sections: Further arguments of ``report.write``.
    """
    files = report.write(
        out,
        results,
        checkpoint=source.path.name,
        update=source.update,
        steps=int(source.manifest[unit]),
        unit=unit,
        config=loader.relevant(config) | {"run_dir": None},
        config_hash=str(source.manifest["config_hash"]),
        versions=versions(),
        curves=report.rows(run_dir),
        options=evaluation_options(options),
        **sections,
    )
    paths: ReportFiles = {"report": str(files.html), "report_json": str(files.json)}
    if files.robustness_json is not None:
        paths["robustness_json"] = str(files.robustness_json)
    return paths


def evaluation_options(options: EvaluationConfig | EvaluateConfig) -> dict[str, Any]:
    """Return the options with which the content of report.json can be computed again."""
    without_effect = ("checkpoint", "out", "num_envs", "video", "robustness")
    return {
        name: value
        for name, value in loader.dump(options).items()
        if not name.startswith(without_effect)
    }


# -------------------------------------------------------------------------------------- compilation
OFFLOADING_OBSTACLE = "processes that time-share a GPU offload their tensors"
"""Why offloaded roles are not compiled: a CUDA graph contains the addresses of its tensors."""


def compile_schedule(
    request: RunRequest, since: int | None, *, start: int = 0
) -> compile.CompileSchedule:
    """Return the schedule that switches to compiled code at update ``since``; None: never.

    The compilation starts at update ``start``. Nothing is compiled where this execution of the run
    ends before ``since``.
    """
    if since is not None and since >= (request.last_update or request.updates):
        since = None
    required = request.config.compile == "always"
    return compile.CompileSchedule(
        since, start_update=start, required=required, notice=request.notice
    )


def check_compile(config: Config, plan: placement.Plan) -> None:
    """Raise ConfigError where compile=always is impossible in a plan."""
    if config.compile != "always":
        return
    residency, learners = Residency(plan), plan.processes("actor")
    reason = f"{learners} processes learn together" if learners > 1 else ""
    if any(
        residency.offloads(plan.group(role))
        for role in ("rollout", "actor", "critic")
        if plan.has(role)
    ):
        reason = OFFLOADING_OBSTACLE
    if reason:
        raise ConfigError(f"compile=always: {reason}; use compile=auto")


# ------------------------------------------------------------------------------------------ machine
def select_device(
    name: str, threads: int, *, notice: Callable[[str], None] = lambda line: None
) -> torch.device:
    """Return the device of the option ``device``, and set the number of torch's threads.

    A CUDA device becomes the current one, and the one that MuJoCo renders on.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".
        threads: CPU threads of tensor operations; 0: torch's default.
        notice: Called with lines for the log.

    Returns:
        The device, CUDA with its index.

    Raises:
        ConfigError: The machine has no such device.
    """
    if threads:
        torch.set_num_threads(threads)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device, count = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"device={name}: torch finds {count} CUDA devices; use device=cpu or auto"
        )
    device = devices.activate(device)
    devices.select_egl_device(device, notice)
    return device


def hardware_of(config: Config, device: torch.device) -> placement.Hardware:
    """Return the devices that a placement can use, as set in section cluster.

    Defaults are those of this machine.

    Raises:
        PlacementError: There are too many, or cluster.node_groups names nodes that do not exist.
    """
    c, kind = config.cluster, device.type
    local_count = torch.cuda.device_count() if kind == "cuda" else os.cpu_count() or 1
    if kind == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory if local_count else None
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if c.device_memory_gb:
        memory = int(c.device_memory_gb * 1e9)
    if (count := (c.devices_per_node or local_count) * c.num_nodes) > placement.MAX_DEVICES:
        raise PlacementError(
            f"cluster.num_nodes x cluster.devices_per_node = {count} devices, more than "
            f"{placement.MAX_DEVICES}; write the numbers of your cluster"
        )
    nodes = tuple(range(c.num_nodes))
    labels = {
        name: placement.ranges(value, nodes, f"cluster.node_groups = {{{name}: {value}}}", "node")
        for name, value in c.node_groups.items()
    }
    return placement.Hardware(
        (c.devices_per_node or local_count,) * c.num_nodes, kind, labels, memory
    )


def config_hash(config: Config) -> str:
    """Return 12 hex digits over every option that can change a result."""
    return options_hash(loader.relevant(config))


def options_hash(options: Mapping[str, Any]) -> str:
    """Return ``config_hash`` of the options in a config.yaml."""
    plain = dict(options)
    unrelated = ("name", "description", "run_dir", "resume", "keep_last", "allow_changed_task")
    for path in (*unrelated, "trackers", "tracker_project", "tracker_run_name"):
        plain.pop(path, None)
    return digest(plain)[:12]


def digest(plain: Mapping[str, Any]) -> str:
    """Return the SHA-256 of plain options, in hex."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()
