"""Decide once what a run is; everything below receives the ``RunSpec``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from embodied_envs import task_files
from embodied_envs.base.errors import CheckpointError, ConfigError, show
from embodied_envs.task_files import TaskFiles
from embodied_envs.types import Say
from embodied_ppo.cluster import run_plan
from embodied_ppo.core import guarded_files
from embodied_ppo.core.devices import select_device
from embodied_ppo.evaluation.run_report import score_metric
from embodied_ppo.imitation.teacher import check_teacher
from embodied_ppo.options import loader
from embodied_ppo.options.batch_sizes import optimization_config, total_updates, unit
from embodied_ppo.options.placement import Plan
from embodied_ppo.options.schema import Config
from embodied_ppo.policies import own_network
from embodied_ppo.rollout import environments
from embodied_ppo.rollout.rewards import graders
from embodied_ppo.training import checkpoint, run_directory
from embodied_ppo.training.run_files import Parent
from embodied_ppo.training.run_system import Records
from embodied_ppo.training.trained_run import TrainedRun, open_run


@dataclass(frozen=True)
class RunSpec:
    """What a run is, decided before anything is built or written.

    Attributes:
        config: Options that the run executes, with absolute paths.
        device: Device of the policy and the learner in this process.
        run_dir: Directory of the run.
        updates: Updates of the complete run.
        kind: "new", "resumed" (continues its own checkpoint), "branched" (continues that of another
            run) or "initialised" (new, with the weights of another run).
        config_text: Content of ``config.yaml``: the options as the user set them.
        plan: Where the roles run; None: all in this process.
        stop_after: Update after which this execution ends without an evaluation; None: the last.
        checkpoint: Checkpoint that the run continues; None: it starts with update 1.
        initial_policy: Checkpoint with the weights of an initialised run.
        teacher: Teacher of a distillation; None: the run trains by PPO.
        task: Files of the user's task; None for a task of an installed package.
        network: File of ``model.network``.
        parent: Where a branch leaves its run.
        info: Versions, hashes and arithmetic settings, which every checkpoint records.
        reexecuted: Whether updates of another run are executed again.
        summary: Content of summary.json of a run without updates left; None: it trains.
    """

    config: Config
    device: torch.device
    run_dir: Path
    updates: int
    kind: Literal["new", "resumed", "branched", "initialised"] = "new"
    config_text: str = ""
    plan: Plan | None = None
    stop_after: int | None = None
    checkpoint: checkpoint.Checkpoint | None = None
    initial_policy: checkpoint.Checkpoint | None = None
    teacher: TrainedRun | None = None
    task: TaskFiles | None = None
    network: own_network.NetworkFile | None = None
    parent: Parent | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    reexecuted: bool = False
    summary: Mapping[str, Any] | None = None

    @property
    def completed_updates(self) -> int:
        """Updates before this execution."""
        return 0 if self.checkpoint is None else self.checkpoint.update

    @property
    def last_update(self) -> int:
        """Update with which this execution ends."""
        return self.updates if self.stop_after is None else self.stop_after

    @property
    def records(self) -> Records:
        """How checkpoints are written."""
        return Records(
            unit=unit(self.config),
            score=score_metric(self.config),
            checkpoints=self.run_dir / "checkpoints",
            keep_last=self.config.keep_last,
            config_text=self.config_text,
            info=self.info,
        )


def decide(
    config: Config,
    run_dir: Path,
    resumed: str | None,
    say: Say,
    *,
    parent: Parent | None = None,
    stop_after: int | None = None,
    reexecuted: bool = False,
    files_from: checkpoint.Checkpoint | None = None,
) -> RunSpec:
    """Return what a run is.

    Args:
        config: Options, checked.
        run_dir: Directory of the run, locked by this process.
        resumed: Path of the checkpoint to resume, "newest" of ``run_dir``, or None for a new run.
        say: Called with lines for the log.
        parent: Run that this one branches from; None: use the parent of the checkpoint, if any.
        stop_after: Update after which this execution ends without an evaluation; None: the last.
        reexecuted: Whether updates of another run are executed again.
        files_from: Checkpoint that names the versions of the user's own files, where none is
            resumed.

    Raises:
        ConfigError, CheckpointError, EnvError, PlacementError: The run is refused. Nothing was
            written.
    """
    # Everything below depends on the checkpoint, so it is opened and verified first.
    source = _checkpoint_to_resume(config, run_dir, resumed, say)
    updates = total_updates(config)
    device = select_device(
        config.device, config.threads, deterministic=config.deterministic, notice=say
    )
    summary = None
    if source is not None:
        run_directory.check_resume(config, source, updates, device, say)
        summary = _finished(config, run_dir, source, updates)

    # Other runs whose policies this one starts from or imitates.
    teacher = initial_policy = None
    if config.teacher is not None:
        teacher = _teacher(config, say)
    if config.initial_policy is not None and source is None:
        initial_policy = _initial_policy(config)

    # The user's own files: those of the checkpoint decide whether changed ones are refused.
    task = None if config.mode == "reasoning" else _task(config, source or files_from, say)
    network = None if config.model.network is None else _network(config, source or files_from, say)

    # A branch records where it leaves its run. Repeated updates are no branch.
    if parent is None and not reexecuted and source is not None:
        parent = run_directory.parent_of(config, source, run_dir)
    kind: Literal["new", "resumed", "branched", "initialised"] = "new"
    if source is not None:
        # A run continues a checkpoint of its own directory, and branches from any other.
        own = (run_dir / "checkpoints").resolve()
        kind = "resumed" if source.path.parent == own else "branched"
    elif initial_policy is not None:
        kind = "initialised"

    # config.yaml has absolute paths, and not how this execution was started.
    config = run_directory.absolute(config)
    hashes = _grader_hashes(config, source or files_from)
    config = replace(config, run_dir=str(run_dir), resume=None, allow_changed_task=False)
    text = yaml.safe_dump(loader.relevant(config), sort_keys=False)
    # Every checkpoint records what its results depend on besides the options.
    info: dict[str, Any] = {"versions": run_directory.versions(), "grader_hashes": hashes}
    info["config_hash"] = run_directory.config_hash(config)
    info["arithmetic"] = run_directory.arithmetic(config, device)
    if config.mode != "reasoning":
        info["env_id"] = config.env.title
    if task is not None:
        info["task_hash"] = task.hash
    if network is not None:  # all processes execute the copy
        info["network_hash"] = network.hash
        config = replace(config, model=replace(config.model, network=network.spec_in(run_dir)))
    # After the text and the hash, which describe the options as the user set them.
    config = optimization_config(config)
    return RunSpec(
        config,
        device,
        run_dir,
        updates,
        kind,
        text,
        run_plan.plan_run(config, device),
        # A run that ends with its last update is evaluated, unless it is executed again.
        stop_after=stop_after if reexecuted or (stop_after or updates) < updates else None,
        checkpoint=source,
        initial_policy=initial_policy,
        teacher=teacher,
        task=task,
        network=network,
        parent=parent,
        info=info,
        reexecuted=reexecuted,
        summary=summary,
    )


def _checkpoint_to_resume(
    config: Config, run_dir: Path, resumed: str | None, say: Say
) -> checkpoint.Checkpoint | None:
    """Return the checkpoint that ``claimed`` has located; None for a new run."""
    if resumed is None:
        return None
    # A checkpoint that is named must be intact; of a run, the newest intact one is used.
    if resumed != "newest":
        return checkpoint.open_checkpoint(resumed)
    source = checkpoint.newest_valid(run_dir, say)
    if source is None:
        raise CheckpointError(
            f"resume={config.resume}: holds no checkpoint (checkpoints/step_*); start a new run"
        )
    # Damaged checkpoints after it are renamed before the run writes these updates again.
    checkpoint.repair(run_dir, source, say)
    return source


def budget_options(config: Config) -> str:
    """Return the options that set the length of a run, for messages."""
    return "updates=" if config.mode == "reasoning" else "updates= or env_steps="


def _finished(
    config: Config, run_dir: Path, source: checkpoint.Checkpoint, updates: int
) -> Mapping[str, Any] | None:
    """Return the summary of a run without updates left; None if there are some, or no report.

    Raises:
        ConfigError: An option has changed, which nothing would use.
    """
    # Updates are left, or the checkpoint belongs to another run.
    if source.update < updates or source.path.parent != (run_dir / "checkpoints").resolve():
        return None
    # Without a readable report, the run is opened once more to evaluate and report.
    try:
        summary = guarded_files.read_object(run_dir / "summary.json", {"updates": int})
    except (OSError, ValueError):
        return None
    # The report is of a shorter run, which was extended later.
    if summary["updates"] != source.update:
        return None
    stored = run_directory.stored_config(source)
    for path, (_, value) in run_directory.differences(stored, config).items():
        if path not in run_directory.ROUNDING_OPTIONS:
            raise ConfigError(
                f"{path}={show(value)}: {run_dir} has completed its {updates} updates, and nothing"
                f" would use the new value; train further with {budget_options(config)}, or leave"
                " it out"
            )
    return summary


def _teacher(config: Config, say: Say) -> TrainedRun:
    """Return the teacher of a distillation. Raises CheckpointError, ConfigError."""
    assert config.teacher is not None
    # The teacher keeps its own options: it may read other observations than the student.
    teacher = open_run(config.teacher, "teacher", say=say)
    say(f"teacher: {teacher.source.path}, {teacher.source.update} updates")
    check_teacher(teacher, config)
    return teacher


def _initial_policy(config: Config) -> checkpoint.Checkpoint:
    """Return the checkpoint of ``initial_policy``.

    Raises:
        CheckpointError: It is missing or damaged.
        ConfigError: With the options of this run its weights would be another function.
    """
    assert config.initial_policy is not None
    run = open_run(config.initial_policy, "initial_policy")
    run_dir, trained = run.run_dir, run.config
    then, now = loader.flat(loader.relevant(trained)), loader.flat(loader.relevant(config))
    # Weights may start a run with other options, but not with other meanings of the weights.
    for path in run_directory.SAME_FUNCTION:
        if then.get(path) != now.get(path):
            raise ConfigError(
                f"{path} = {show(now.get(path))}: initial_policy={run_dir} has"
                f" {show(then.get(path))}, and with another value its weights are another function;"
                f" write {path}={show(then.get(path))}"
            )
    # The index of a task is its place among the tasks, and names and sizes are theirs.
    before, tasks = (c.env.tasks or c.env.ids for c in (trained, config))
    if before != tasks and len(before) > 1:
        hint = f"write env.tasks=[{','.join(before)}]"
        raise ConfigError(f"{hint}: initial_policy={run_dir} reads their observations and indices")
    run_directory.check_values(config, trained, f"initial_policy={run_dir}")
    return run.source


def _task(config: Config, source: checkpoint.Checkpoint | None, say: Say) -> TaskFiles | None:
    """Return the files of the user's task that a run executes. Raises ConfigError."""
    # A run that continues a checkpoint compares its files with those of the checkpoint.
    stored = None
    if source is not None:
        stored = environments.stored_task(source, source.path.parent.parent)
    env, allow = config.env, config.allow_changed_task
    return task_files.select(env.title, env.kwargs, stored, allow=allow, resumes=True, say=say)


def _network(
    config: Config, source: checkpoint.Checkpoint | None, say: Say
) -> own_network.NetworkFile:
    """Return the file of ``model.network`` that a run executes. Raises ConfigError."""
    assert config.model.network is not None
    # Likewise; the run directory of the checkpoint contains a copy of the file.
    spec, allow = config.model.network, config.allow_changed_task
    if source is None:
        return own_network.read(spec)
    stored, run_dir = source.manifest.get("network_hash"), source.path.parent.parent
    return own_network.select(spec, stored, run_dir, allow=allow, resumes=True, say=say)


def _grader_hashes(config: Config, source: checkpoint.Checkpoint | None) -> dict[str, str]:
    """Return grader -> hash of the user's file, as in the checkpoint. Raises ConfigError."""
    hashes = graders.file_hashes(term.grader for _, term in config.reward.all_terms)
    stored = {} if source is None else source.manifest.get("grader_hashes", {})
    for spec, found in hashes.items():
        if found != stored.get(spec, found) and not config.allow_changed_task:
            hint = "restore it, or write allow_changed_task=true"
            raise ConfigError(f"resume: {hint}: {spec} changed since the checkpoint")
    return hashes
