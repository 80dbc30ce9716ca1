"""Python API of training: train, distill, evaluate, load, config.

The commands call the same training programs. Nothing here loads torch before the options are
checked.

Options are keywords. A section is a mapping, ``env={"num_envs": 8}``, or a keyword with two
underscores in place of the dot, ``env__num_envs=8``. Experiments, groups and aliases have the names
of the command line: ``train("halfcheetah", seed=3, placement="fused")`` is ``embodied-ppo train
experiment=halfcheetah seed=3 placement=fused``, and its result is the same bit for bit.
"""

from __future__ import annotations

import argparse
import functools
import math
import operator
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_envs.base.errors import ConfigError, show_path
from embodied_ppo.core.guarded_files import MAX_PATH
from embodied_ppo.options.compose import CALL, GIVEN, override_lines, prepare

if TYPE_CHECKING:  # both load torch
    from embodied_ppo.evaluation.trained_policy import TrainedPolicy
    from embodied_ppo.options.loader import Loaded
    from embodied_ppo.options.schema import Config


@dataclass(frozen=True)
class Run:
    """A finished run of ``train``.

    Attributes:
        summary: Content of ``summary.json``: for example ``final_return`` and ``env_steps``.
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
        """Mean return of the last evaluation; NaN with ``evaluation.episodes=0``."""
        return float(self.summary.get("final_return", math.nan))

    @property
    def report(self) -> Path:
        """Report of the last evaluation, an HTML page; there is none with
        ``evaluation.episodes=0`` (KeyError)."""
        return Path(self.summary["report"])

    @functools.cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of each update (docs/metrics.md), with "update" and the steps so far."""
        from embodied_ppo.training.run_files import metric_rows

        return [row for _, row in metric_rows(self.run_dir) if row is not None]

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
            None: use the value of the command line.
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
    explicit: Collection[str] = ()
    if not isinstance(experiment, str | None):
        from embodied_ppo.options.schema import Config

        if not isinstance(experiment, Config):
            short_text("experiment", experiment)
        if options or config_dir is not None:
            raise ConfigError(
                f"{', '.join(options) or 'config_dir'}: is not read beside a Config; give it to"
                " config(..), or use dataclasses.replace"
            )
        config = experiment
    else:
        loaded = _resolve("train", experiment, config_dir, options)
        config, explicit = loaded.config, loaded.deliberate(GIVEN)
        check_files(config)
    from embodied_ppo.programs import runs

    return Run(interruptible(lambda: runs.train(config, explicit=explicit, quiet=not progress)))


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
    options = {"teacher": path_text(teacher), **options}
    loaded = _resolve("distill", experiment, config_dir, options)
    from embodied_ppo.programs import runs

    explicit, quiet = loaded.deliberate(GIVEN), not progress
    return Run(interruptible(lambda: runs.distill(loaded.config, explicit=explicit, quiet=quiet)))


def evaluate(
    checkpoint: str | Path | Run, *, progress: bool = True, **options: Any
) -> dict[str, Any]:
    """Measure a checkpoint on episodes that training never uses, and write a report.

    Args:
        checkpoint: Directory of a run (its newest checkpoint) or of a checkpoint, or a ``Run``.
        progress: Show progress on stderr.
        options: Options of ``embodied-ppo evaluate``, for example episodes, seed, video.

    Returns:
        "eval/return" and the other metrics, their 95 % confidence intervals as "ci95", and the
        paths of "report" and "video".

    Raises:
        ConfigError, EnvError, CheckpointError: The input is refused; nothing was written.
    """
    options = {"checkpoint": path_text(checkpoint), **options}
    loaded = _resolve("evaluate", None, None, options)
    from embodied_ppo.evaluation import checkpoint_evaluation

    return checkpoint_evaluation.evaluate(
        loaded.config, explicit=loaded.deliberate(GIVEN), quiet=not progress
    )


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
    path, seed = path_text(checkpoint), whole_number("seed", seed)
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", short_text("device", device)):
        raise ConfigError(f"write device=cpu, cuda, cuda:N or auto: device={device[:60]!r}")
    from embodied_ppo.evaluation.trained_policy import load_policy

    return load_policy(path, device=device, seed=seed, allow_changed_task=allow_changed_task)


def short_text(name: str, value: Any) -> str:
    """Return an argument that must be a text. Raises ConfigError."""
    if not isinstance(value, str):
        raise ConfigError(f"write a text: {name} is of type {type(value).__name__}")
    if len(value) > 1000:
        raise ConfigError(f"write at most 1000 characters: {name} has {len(value)}")
    return value


def config_folder(value: Any) -> str | None:
    """Return the folder of the user's configs. Raises ConfigError without such a folder."""
    folder = None if value is None else path_text(value, "config_dir")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"write an existing folder: config_dir={show_path(folder)} is none")
    return folder


def whole_number(name: str, value: Any) -> int:
    """Return an argument as an int; numbers of numpy are accepted. Raises ConfigError."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    shown = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
    raise ConfigError(f"write {name}=N: {name}={shown[:60]} is not a whole number")


# --------------------------------------------------------------------- shared with the command line
def check_files(config: Config) -> None:
    """Check what a training needs besides its options, before torch is loaded.

    Raises:
        ConfigError: The package of a tracker, a data set or a grader is missing or unusable.
    """
    from embodied_ppo.data import dataset_folder
    from embodied_ppo.options import readers
    from embodied_ppo.rollout.rewards import graders
    from embodied_ppo.training import trackers

    trackers.check(config)
    cloning = config.cloning
    clones = config.mode == readers.mode_of("cloning.dataset") and cloning.steps
    if clones and cloning.dataset is not None and config.resume is None:
        dataset_folder.check(cloning.dataset)
    if readers.mode_of("reward.grader") == config.mode:
        for name, term in config.reward.all_terms:
            if term.grader is not None:
                option = f"reward.terms.{name}.grader" if name else "reward.grader"
                graders.check_exists(term.grader, option)


def _resolve(
    command: str, experiment: str | None, config_dir: str | Path | None, options: Mapping[str, Any]
) -> Loaded:
    """Return the options of a command, as its command line resolves them."""
    folder = config_folder(config_dir)
    args = argparse.Namespace(command=command, config_name=None, config_dir=folder)
    groups = {} if experiment is None else {"experiment": short_text("experiment", experiment)}
    return prepare(args, override_lines(command, {**groups, **options}), label=CALL)


def path_text(value: str | Path | Run, name: str = "the run or checkpoint") -> str:
    """Return an argument that names a file as text. Raises ConfigError where it is no path."""
    path = value.run_dir if isinstance(value, Run) else value
    if not isinstance(path, str | Path) or not str(path):
        kind = "empty" if path == "" else type(path).__name__
        raise ConfigError(f"write a path: {name} is {kind}")
    sizes = [len(os.fsencode(part)) for part in str(path).split("/")]
    if "\0" in str(path) or max(sizes) > 255 or sum(sizes) + len(sizes) > MAX_PATH:
        raise ConfigError(f"write a path that can exist: {name}={show_path(path)}")
    return str(path)


def interruptible(train: Any) -> dict[str, Any]:
    """Call ``train``; raise KeyboardInterrupt where the command line would exit."""
    try:
        return train()
    except SystemExit as error:
        raise KeyboardInterrupt("interrupted; train(resume=..) continues what was saved") from error
