"""Python API, on which commands (train, distill, evaluate, compare, fork, config, ..) are built.

Nothing here loads torch before the options are checked.

Options are keywords. A section is a mapping, ``env={"num_envs": 8}``, or a keyword with two
underscores in place of the dot, ``env__num_envs=8``. Experiments, groups and aliases have the names
of the command line: ``train("halfcheetah", seed=3, placement="fused")`` is ``embodied-ppo train
experiment=halfcheetah seed=3 placement=fused``, and its result is the same bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import operator
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from embodied_ppo.config.compose import CALL, GIVEN, override_lines, prepare, search_ranges
from embodied_ppo.core.errors import ConfigError

if TYPE_CHECKING:  # both load torch
    from embodied_ppo.analysis.replay import Replay
    from embodied_ppo.config.loader import Loaded
    from embodied_ppo.config.schema import Config
    from embodied_ppo.modes.embodied.trained_policy import TrainedPolicy


UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
"""Seconds of each unit of the budget of a search."""
SET_BY_SEARCH = ("seed", "run_dir", "resume", "eval_every", "save_every")
"""Options that a search sets for each run."""


@dataclass(frozen=True)
class Run:
    """A finished run of ``train``.

    Attributes:
        summary: Content of ``summary.json``: ``final_return``, ``env_steps``, ``wall_s``, ..
    """

    summary: Mapping[str, Any]

    @property
    def run_dir(self) -> Path:
        """Directory of the run; every function and command takes it as the checkpoint."""
        return Path(self.summary["run_dir"])

    @property
    def checkpoint(self) -> Path:
        """Directory of the last checkpoint."""
        return Path(self.summary["checkpoint"])

    @property
    def final_return(self) -> float:
        """Mean return of the last evaluation."""
        return float(self.summary["final_return"])

    @property
    def report(self) -> Path:
        """Report of the last evaluation, an HTML page."""
        return Path(self.summary["report"])

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each update (docs/metrics.md), with "update" and the steps so far."""
        text = (self.run_dir / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    @functools.cached_property
    def policy(self) -> TrainedPolicy:
        """The trained policy, see ``load``."""
        return load(self.run_dir)

    def evaluate(self, *, progress: bool = True, **options: Any) -> dict[str, Any]:
        """Measure the trained policy, see ``evaluate``."""
        return evaluate(self.run_dir, progress=progress, **options)


def config(
    experiment: str | None = None, *, config_dir: str | Path | None = None, **options: Any
) -> Config:
    """Return all options of a run, checked; nothing is started.

    Args:
        experiment: A shipped experiment (``embodied-ppo experiments``), or one in ``config_dir``;
            None: that of the command line.
        config_dir: Folder of your own configs, as ``--config-dir``.
        options: Options, see the module.

    Raises:
        ConfigError, PlacementError: An option is unknown or out of bounds, or options conflict.
        CheckpointError: The run to resume cannot be read.
    """
    return _resolve("train", experiment, config_dir, options).config


def train(
    experiment: str | Config | None = None,
    *,
    config_dir: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Run:
    """Train a robot policy, or with ``mode="reasoning"`` a language model.

    Args:
        experiment: See ``config``; or its result.
        config_dir: See ``config``.
        progress: Show a progress bar and messages on stderr, also in a notebook.
        options: Options, see the module.

    Returns:
        The finished run: directory, metrics, report, policy.

    Raises:
        ConfigError, PlacementError, EnvError, CheckpointError: The input is refused; nothing was
            written.
        TrainingError: The run failed.
        KeyboardInterrupt: After an interrupt; the run is saved, and ``train(resume=run_dir)``
            continues it.
    """
    if not isinstance(experiment, str | None):
        if options or config_dir is not None:
            raise ConfigError(
                f"{', '.join(options) or 'config_dir'}: is not read beside a Config; give it to"
                " config(..), or use dataclasses.replace"
            )
        from embodied_ppo import run

        return Run(_interruptible(lambda: run.train(experiment, quiet=not progress)))
    loaded = _resolve("train", experiment, config_dir, options)
    return Run(_interruptible(lambda: train_loaded(loaded, quiet=not progress)))


def distill(
    teacher: str | Path | Run,
    experiment: str | None = None,
    *,
    config_dir: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> Run:
    """Train a student to act as a trained teacher, from other observations.

    Args:
        teacher: Directory of a run (its newest checkpoint) or of a checkpoint, or a ``Run``.
        experiment: Task and network of the student, see ``config``.
        config_dir: See ``config``.
        progress: See ``train``.
        options: Options, see the module.

    Returns:
        The finished run of the student.

    Raises:
        ConfigError, EnvError, CheckpointError: The input is refused; nothing was written.
        TrainingError: The run failed.
        KeyboardInterrupt: After an interrupt; the run is saved.
    """
    options = {"teacher": _path(teacher), **options}
    loaded = _resolve("distill", experiment, config_dir, options)
    return Run(_interruptible(lambda: distill_loaded(loaded, quiet=not progress)))


def evaluate(
    checkpoint: str | Path | Run, *, progress: bool = True, **options: Any
) -> dict[str, Any]:
    """Measure a checkpoint on episodes that training never uses, and write a report.

    Args:
        checkpoint: Directory of a run (its newest checkpoint) or of a checkpoint, or a ``Run``.
        progress: Show progress on stderr.
        options: Options of ``embodied-ppo evaluate``: episodes, seed, video, ..

    Returns:
        "eval/return" and the other metrics, their 95 % confidence intervals as "ci95", and the
        paths of "report" and "video".

    Raises:
        ConfigError, EnvError, CheckpointError: The input is refused; nothing was written.
    """
    options = {"checkpoint": _path(checkpoint), **options}
    loaded = _resolve("evaluate", None, None, options)
    return evaluate_loaded(loaded, quiet=not progress)


def load(
    checkpoint: str | Path | Run,
    *,
    device: str = "cpu",
    seed: int = 0,
    allow_changed_task: bool = False,
) -> TrainedPolicy:
    """Load a trained robot policy.

    Args:
        checkpoint: Directory of a run (its newest checkpoint) or of a checkpoint, or a ``Run``.
        device: Device of the policy: cpu, cuda, cuda:N, auto.
        seed: Seed of sampled actions.
        allow_changed_task: Execute files of the user's task that have changed since training, not
            the run's copies of them.

    Returns:
        A policy whose method ``act`` maps an observation to an action.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: It is a language model, or its options cannot be used here.
        EnvError: The task, which defines the sizes, cannot be created here.
    """
    from embodied_ppo import run

    return run.load_policy(
        _path(checkpoint), device=device, seed=seed, allow_changed_task=allow_changed_task
    )


def compare(
    *runs: str | Path | Run, metric: str = "auto", progress: bool = True, **options: Any
) -> dict[str, Any]:
    """Compare trained policies on the same initial states.

    Args:
        runs: At least two: runs, checkpoints, or folders of runs that differ in their seed.
        metric: Score of an episode: "return", "success", or "auto".
        progress: Show progress on stderr.
        options: Options of ``embodied-ppo evaluate``: episodes, seed, env, ..; ``out`` is the
            directory of the comparison.

    Returns:
        "methods", "differences" (mean, 95 % interval, probability, verdict), "options"
        that differ, and the paths of "page" and "json", see ``analysis.compare``.

    Raises:
        ConfigError, EnvError, CheckpointError: The runs cannot be compared; nothing was written.
    """
    paths = [_path(trained_run) for trained_run in runs]
    return compare_paths(
        paths, metric, override_lines("evaluate", options), label=CALL, quiet=not progress
    )


def fork(run: str | Path | Run, *, update: int, progress: bool = True, **options: Any) -> Run:
    """Train a branch of a run that leaves it after an update, with changed options.

    Without changed options the branch equals the run bit for bit.

    Args:
        run: Directory of a run, or a ``Run``.
        update: Completed updates at the branch. Without a checkpoint there, the updates from the
            nearest earlier one are executed again.
        progress: See ``train``.
        options: Changed options, see the module; ``run_dir`` is the directory of the branch
            (default: RUN-fork-UPDATE).

    Returns:
        The finished branch; ``parent.json`` in its directory names the run, update and options.

    Raises:
        ConfigError, PlacementError, EnvError, CheckpointError: The input is refused; nothing was
            written.
        TrainingError: The branch failed.
        KeyboardInterrupt: After an interrupt; the branch is saved, and ``train(resume=run_dir)``
            continues it.
    """
    update = _whole_number("update", update)
    lines = override_lines("train", options)
    return Run(
        _interruptible(lambda: fork_path(_path(run), update, lines, quiet=not progress, label=CALL))
    )


def replay(
    run: str | Path | Run, *, update: int, out: str | Path | None = None, progress: bool = True
) -> Replay:
    """Recreate the rollout and the minibatches of an update, for a notebook.

    Args:
        run: Directory of a run, or a ``Run``.
        update: The update, from 1, as in ``metrics.jsonl``.
        out: Directory for the result as a file; None: it is not written.
        progress: Show messages on stderr.

    Returns:
        Tensors of the rollout and each minibatch, see ``analysis.replay.Replay``.

    Raises:
        ConfigError, EnvError, CheckpointError: The update cannot be executed again.
        TrainingError: The update failed.
    """
    update = _whole_number("update", update)
    from embodied_ppo.analysis import replay

    folder = None if out is None else Path(out)
    return replay.replay(Path(_path(run)), update, out=folder, quiet=not progress)


def bisect(run: str | Path | Run, condition: str, *, progress: bool = True) -> dict[str, Any]:
    """Find the update, minibatch and samples in which a condition on a metric first held.

    Args:
        run: Directory of a run, or a ``Run``.
        condition: A metric, one of > >= < <= == !=, and a number: ``"policy/approx_kl > 0.1"``; or
            ``"policy/loss nonfinite"``.
        progress: Show messages on stderr.

    Returns:
        "held", "update", "value", "minibatch", "samples", "rewards", ..; see ``analysis.bisect``.

    Raises:
        ConfigError, EnvError, CheckpointError: The condition or the run cannot be used.
        TrainingError: The update failed.
    """
    if not isinstance(condition, str):
        raise ConfigError(
            f'condition={condition!r}: is not text; write for example "policy/approx_kl > 0.1"'
        )
    from embodied_ppo.analysis import bisect

    return bisect.bisect(Path(_path(run)), condition, quiet=not progress)


def verify(
    run: str | Path | Run,
    *,
    updates: int | Literal["all"] = 5,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Re-execute updates and check a run against its recorded metrics and digests.

    Args:
        run: Directory of a run, or a ``Run``.
        updates: Number of updates to execute again, or "all"; 0: files and reports only.
        seed: Seed of the choice of updates.
        out: Directory of certificate.json; None: that of the run.
        progress: Show progress on stderr.

    Returns:
        Content of certificate.json: "verdict" ("verified" or "different"), "first_difference",
        "cause", ..; and its path "certificate", see ``analysis.verification``.

    Raises:
        ConfigError, CheckpointError, EnvError: The run cannot be verified; nothing was written.
    """
    number = None if updates == "all" else _whole_number("updates", updates)
    seed = _whole_number("seed", seed)
    from embodied_ppo.analysis import verification

    return verification.verify(_path(run), updates=number, seed=seed, out=out, quiet=not progress)


def search(
    experiment: str | None = None,
    *,
    ranges: Mapping[str, str] | None = None,
    trials: int = 9,
    seeds: int = 1,
    budget: str | None = None,
    jobs: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Search for better options: train trials and continue only the best third at each stage.

    Args:
        experiment: See ``config``.
        ranges: Option -> range in the syntax of the command, for example ``{"algorithm.lr":
            "tag(log,interval(1e-4,3e-3))", "algorithm.horizon": "16,32"}``; None: those of the
            experiment, or the default ranges.
        trials: Number of sets of options.
        seeds: Number of runs of each trial, with the seeds ``seed`` to ``seed + seeds - 1``.
        budget: Wall time for training all runs, such as "90s", "30min" or "2h", from which their
            length follows; None: that of the options.
        jobs: Number of runs at the same time; None: one per core.
        seed: Seed of the draws and first seed of the runs.
        out: Folder of all runs, which continues what it holds; None:
            runs/searches/NAME/DATE.
        config_dir: See ``config``.
        progress: Show progress on stderr.
        options: Options of all runs, see the module.

    Returns:
        "trials", best first, "best_trial", its "options", "command" and "run_dirs", ..; see
        ``analysis.search.Search.result``.

    Raises:
        ConfigError, PlacementError, EnvError: The input is refused; the line names the flag of the
            command.
        TrainingError: All trials failed.
        KeyboardInterrupt: After an interrupt; the same call with ``out`` continues.
    """
    groups = {} if experiment is None else {"experiment": experiment}
    lines = override_lines("train", {**groups, **options})
    lines += [f"{name.replace('__', '.')}={values}" for name, values in (ranges or {}).items()]
    return search_lines(
        lines,
        trials=trials,
        seeds=seeds,
        budget=budget,
        jobs=jobs,
        seed=seed,
        out=out,
        config_dir=None if config_dir is None else os.fspath(config_dir),
        quiet=not progress,
    )


def _whole_number(name: str, value: Any) -> int:
    """Return an argument as an int; numbers of numpy are accepted. Raises ConfigError."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise ConfigError(f"{name}={value!r}: is not a whole number; write {name}=N")


# --------------------------------------------------------------------- shared with the command line
def search_lines(
    lines: Sequence[str],
    *,
    trials: int,
    seeds: int,
    budget: str | None,
    jobs: int | None,
    seed: int,
    out: str | Path | None,
    config_dir: str | None,
    config_name: str | None = None,
    quiet: bool,
) -> dict[str, Any]:
    """Search with lines option=value and option=range; see ``search``."""
    limits = {
        "trials": (trials, 2, 729),
        "seeds": (seeds, 1, 64),
        "jobs": (jobs, 1, 1024),
        "seed": (seed, 0, 2**31),
    }
    for name, (value, low, high) in limits.items():
        if value is not None and not low <= value <= high:
            raise ConfigError(f"--{name} {value}: must be {low} to {high}")
    budget_s = None if budget is None else _seconds(budget)
    for line in lines:
        name = line.partition("=")[0].lstrip("+~")
        if name in SET_BY_SEARCH or (budget_s and name in ("updates", "env_steps")):
            cure = "use --seed or --seeds" if name == "seed" else "leave it out"
            raise ConfigError(f"{line}: is set by the search for each run; {cure}")
    args = argparse.Namespace(
        command="train", config_dir=config_dir, config_name=config_name, overrides=[*lines]
    )
    common, ranges = search_ranges(args)
    config = prepare(args, common).config
    if config.placement != "local":
        raise ConfigError(
            f"placement = {config.placement}: a search starts several runs at the same time, and"
            " one with this placement uses all devices; write placement=local"
        )
    from embodied_ppo.analysis import search

    flags = [] if config_dir is None else ["--config-dir", config_dir]
    flags += [] if config_name is None else ["--config-name", config_name]
    cores = max(1, len(os.sched_getaffinity(0)) // max(1, config.threads))
    settings = search.Settings(
        common,
        ranges or search.default_ranges(config),
        change_probability=1.0 if ranges else search.CHANGE_PROBABILITY,
        trials=trials,
        seeds=seeds,
        jobs=min(jobs or cores, trials * seeds),
        budget_s=budget_s,
        seed=seed,
        flags=flags,
    )
    date = f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = Path(out or Path("runs") / "searches" / config.name / date).absolute()
    try:
        return search.search(settings, folder, quiet=quiet)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the same command with --out {folder} continues"
        ) from None


def _seconds(text: str) -> float:
    """Return a duration such as ``30min`` in seconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    if match is None or not 1 <= (value := float(match[1]) * UNITS[match[2]]) <= 3e7:
        raise ConfigError(f"--budget {text}: is no duration of at least 1s; write 90s, 30min or 2h")
    return value


def fork_path(
    path: str, update: int, lines: Sequence[str], *, quiet: bool, label: str | None = None
) -> dict[str, Any]:
    """Train a branch of a run, with lines option=value; see ``analysis.fork``."""
    from embodied_ppo.analysis import fork, reexecution

    source = reexecution.run_directory(path)
    reexecution.nearest_start(source, update)
    for line in lines:
        name = line.partition("=")[0].lstrip("+~")
        if name in ("resume", "experiment", "mode"):
            raise ConfigError(
                f"{name}: is not read by fork, whose options are those of {path}; leave it out"
            )
    folder = reexecution.options_folder(source, update + 1)
    command = "train" if reexecution.options(source, update + 1).teacher is None else "distill"
    args = argparse.Namespace(command=command, config_name=None, config_dir=None)
    given = [*override_lines(command, {"resume": str(folder)}), *lines]
    loaded = prepare(args, given) if label is None else prepare(args, given, label=label)
    explicit = {*_explicit(loaded)} - {"resume"}
    return fork.fork(source, update, loaded.config, explicit=explicit, quiet=quiet)


def compare_paths(
    paths: Sequence[str],
    metric: Any,
    lines: Sequence[str],
    *,
    quiet: bool,
    label: str | None = None,
) -> dict[str, Any]:
    """Compare runs, with lines option=value; see ``analysis.compare``."""
    if not paths:
        raise ConfigError("no runs; name at least two runs, or a folder of runs")
    for line in lines:
        if line.partition("=")[0].lstrip("+~") == "checkpoint":
            raise ConfigError("checkpoint: is not read by compare; write the run without it")
    args = argparse.Namespace(command="evaluate", config_name=None, config_dir=None)
    given = [*override_lines("evaluate", {"checkpoint": paths[0]}), *lines]
    loaded = prepare(args, given) if label is None else prepare(args, given, label=label)
    from embodied_ppo.analysis import compare

    explicit = {*_explicit(loaded)} - {"checkpoint"}
    return compare.compare(paths, loaded.config, metric=metric, explicit=explicit, quiet=quiet)


def train_loaded(loaded: Loaded, *, quiet: bool) -> dict[str, Any]:
    """Train with resolved options; return the summary. See ``run.train``."""
    from embodied_ppo.config import readers
    from embodied_ppo.data import dataset_folder
    from embodied_ppo.rewards import graders
    from embodied_ppo.training import trackers

    config = loaded.config
    # Before torch is loaded:
    trackers.check(config)
    cloning = config.cloning
    clones = config.mode == readers.mode_of("cloning") and (cloning.steps or cloning.coef)
    if clones and cloning.dataset is not None and config.resume is None:
        dataset_folder.check(cloning.dataset, cloning.captions)
    if readers.mode_of("reward.grader") == config.mode and config.reward.path is None:
        graders.check_exists(config.reward.grader)
    from embodied_ppo import run

    return run.train(config, explicit=_explicit(loaded), quiet=quiet)


def distill_loaded(loaded: Loaded, *, quiet: bool) -> dict[str, Any]:
    """Distil with resolved options; return the summary. See ``run.distill``."""
    from embodied_ppo import run

    return run.distill(loaded.config, explicit=_explicit(loaded), quiet=quiet)


def evaluate_loaded(loaded: Loaded, *, quiet: bool) -> dict[str, Any]:
    """Evaluate with resolved options; return the summary. See ``run.evaluate``."""
    from embodied_ppo import run

    return run.evaluate(loaded.config, explicit=_explicit(loaded), quiet=quiet)


def _explicit(loaded: Loaded) -> Collection[str]:
    return loaded.deliberate(GIVEN)


def _resolve(
    command: str,
    experiment: str | None,
    config_dir: str | Path | None,
    options: Mapping[str, Any],
) -> Loaded:
    """Return the options of a command, as its command line resolves them."""
    folder = None if config_dir is None else os.fspath(config_dir)
    args = argparse.Namespace(command=command, config_name=None, config_dir=folder)
    groups = {} if experiment is None else {"experiment": experiment}
    return prepare(args, override_lines(command, {**groups, **options}), label=CALL)


def _path(checkpoint: str | Path | Run) -> str:
    return str(checkpoint.run_dir if isinstance(checkpoint, Run) else checkpoint)


def _interruptible(train: Any) -> dict[str, Any]:
    """Call ``train``; raise KeyboardInterrupt where the command line would exit."""
    try:
        return train()
    except SystemExit as error:
        raise KeyboardInterrupt("interrupted; train(resume=..) continues what was saved") from error
