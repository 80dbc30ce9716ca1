"""Search for better options of a run with Optuna.

A trial is a set of options that Optuna's TPE sampler draws from ranges (Bergstra et al., 2011);
trial 0 has the options without the search. It trains one run for each seed and is evaluated nine
times. After each evaluation the pruner (successive halving, Li et al., 2020) decides whether the
trial continues: about a third of the trials pass a ninth of the run, and a third of these pass a
third of it.

Each run is a process of ``embodied-ppo train``. A pruned run is saved as by Ctrl-C, so ``train
resume=RUN`` continues it exactly. An interrupted search continues in the same way.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError, TrainingError, show
from embodied_ppo.api import config_folder, path_text, short_text, whole_number
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.batch_sizes import total_updates
from embodied_ppo.options.compose import override_lines, prepare
from embodied_ppo.options.schema import Config
from embodied_ppo.options.sweeps import Choice, Interval, search_ranges
from embodied_ppo.tools.process_pool import ONE_THREAD, ProcessPool, last_line, train_command
from embodied_ppo.training.progress import Interrupts, Progress
from embodied_ppo.training.run_directory import locked
from embodied_ppo.training.run_files import metric_rows

if TYPE_CHECKING:
    import optuna

FILE = "study.log"
"""Journal of Optuna in the folder of a search, from which the search continues."""
EVALUATIONS = 9
"""Evaluations of each run: the pruner compares trials after 1, 3 and 9 of them."""
FACTOR = 3
"""The pruner lets about one of FACTOR trials pass."""
MOST_DRAWS = 50
"""Draws in a row that give no new valid trial, after which no more trials are drawn."""
SAVE_AT_THE_END = "save_every=0"
SCORES = ("eval/success", "eval/accuracy", "eval/return")
"""Metrics by which trials are compared: the first that the task reports."""
SET_BY_SEARCH = ("seed", "run_dir", "resume", "eval_every", "save_every")
"""Options that a search sets for each run."""
UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
"""Seconds of each unit of a budget."""
CHECK_S = 0.5
"""Seconds between two readings of the metrics of running runs."""


@dataclass(frozen=True)
class Settings:
    """Settings of a search.

    Attributes:
        lines: Overrides of all runs.
        ranges: Option -> values to choose from.
        trials: Number of trials; None: as many as the budget permits.
        seeds: Number of runs of each trial.
        jobs: Number of runs at the same time.
        budget_s: Seconds after which the search ends; None: when all trials have ended.
        seed: Seed S of the draws. The runs of a trial have the seeds S, S + 1, ...
        config_dir: Folder of the user's configs.
        config_name: Primary config.
    """

    lines: Sequence[str]
    ranges: Mapping[str, Choice | Interval]
    trials: int | None
    seeds: int
    jobs: int
    budget_s: float | None = None
    seed: int = 0
    config_dir: str | None = None
    config_name: str | None = None

    @property
    def flags(self) -> list[str]:
        """Flags of the command line that choose the configs."""
        flags = {"--config-dir": self.config_dir, "--config-name": self.config_name}
        return [text for name, value in flags.items() if value for text in (name, value)]


# ---------------------------------------------------------------------------------- Python API
def search(
    experiment: str | None = None,
    *,
    ranges: Mapping[str, str] | None = None,
    trials: int | None = None,
    seeds: int = 1,
    budget: str | None = None,
    jobs: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    config_dir: str | Path | None = None,
    config_name: str | None = None,
    overrides: Sequence[str] = (),
    progress: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Search for better options: train sets of options, and stop those that fall behind.

    Args:
        experiment: See ``config``.
        ranges: Option -> range in the syntax of the command, for example ``{"algorithm.lr":
            "tag(log,interval(1e-4,3e-3))", "algorithm.horizon": "16,32"}``; None: use those of
            the experiment, or the default ranges.
        trials: Number of sets of options; None: 9, or with a budget as many as it permits.
        seeds: Number of runs of each trial, with the seeds ``seed`` to ``seed + seeds - 1``.
        budget: Time after which the search ends, such as "90s", "30min" or "2h".
        jobs: Number of runs at the same time; None: one per core.
        seed: Seed of the draws and first seed of the runs.
        out: Folder of all runs. A search that it contains is continued. None: use
            runs/searches/NAME/DATE.
        config_dir: See ``config``.
        config_name: Primary config, as ``--config-name``.
        overrides: Options and ranges in the syntax of the command line.
        progress: Show progress on stderr.
        options: Options of all runs, see the module ``api``.

    Returns:
        See ``Search.result``.

    Raises:
        ConfigError, PlacementError, EnvError: The input is refused; the line names the flag of the
            command.
        TrainingError: All trials failed.
        KeyboardInterrupt: After an interrupt; the same call with ``out`` continues.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("pip install 'embodied-ppo[search]': search needs the package optuna")
    groups = {} if experiment is None else {"experiment": short_text("experiment", experiment)}
    lines = [*overrides, *override_lines("train", {**groups, **options})]
    for name, values in (ranges or {}).items():
        path = short_text("the name of a range", name).replace("__", ".")
        lines.append(f"{path}={short_text(f'the range of {name}', values)}")
    limits = {
        "trials": (trials, 2, 10_000),
        "seeds": (seeds, 1, 64),
        "jobs": (jobs, 1, 1024),
        "seed": (seed, 0, 2**31),
    }
    for name, (value, low, high) in limits.items():
        if value is not None and not low <= whole_number(name, value) <= high:
            raise ConfigError(f"--{name} {value}: must be {low} to {high}")
    budget_s = None if budget is None else _seconds(short_text("budget", budget))
    config_dir = config_folder(config_dir)
    for line in lines:
        name = line.partition("=")[0].lstrip("+~")
        if name in SET_BY_SEARCH:
            raise ConfigError(
                f"remove {line}: search sets {name} for each run (--seed and --seeds choose seeds)"
            )
    args = argparse.Namespace(
        command="train", config_dir=config_dir, config_name=config_name, overrides=[*lines]
    )
    common, parsed_ranges = search_ranges(args)
    config = prepare(args, common).config
    if config.placement != "local":
        raise ConfigError(
            f"write placement=local: placement = {config.placement}, which uses all devices for"
            " one run, and a search starts several runs"
        )
    if not config.evaluation.episodes:
        raise ConfigError(
            "write evaluation.episodes=10: search compares the scores of evaluations, and"
            " evaluation.episodes = 0"
        )
    cores = max(1, len(os.sched_getaffinity(0)) // max(1, config.threads))
    settings = Settings(
        common,
        parsed_ranges or default_ranges(config),
        trials=9 if trials is None and budget is None else trials,
        seeds=seeds,
        jobs=jobs or cores,
        budget_s=budget_s,
        seed=seed,
        config_dir=config_dir,
        config_name=config_name,
    )
    dated = f"runs/searches/{config.name}/{datetime.now():%Y-%m-%d_%H-%M-%S}"
    folder = Path(path_text(out, "out") if out else dated).absolute()
    try:
        with Interrupts(), Progress(not progress) as bar:
            return Search(settings, folder, bar).run()
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"interrupted; the same command with --out {folder} continues"
        ) from None


def _seconds(text: str) -> float:
    """Return a duration such as ``30min`` in seconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", text)
    if match is None or not 1 <= (value := float(match[1]) * UNITS[match[2]]) <= 3e7:
        raise ConfigError(f"write --budget 90s, 30min or 2h, at least 1s: --budget {text}")
    return value


# --------------------------------------------------------------------------------------- ranges
def default_ranges(config: Config) -> dict[str, Choice | Interval]:
    """Return ranges around the options of a robot policy.

    They are the learning rate, the horizon, the epochs of an update, the entropy bonus and both
    normalisations.

    Raises:
        ConfigError: The run trains a language model.
    """
    if config.mode != "embodied":
        raise ConfigError(
            "write ranges, for example 'actor.lr=tag(log,interval(1e-6,1e-4))': mode ="
            f" {config.mode} has no default ranges"
        )
    a = config.algorithm
    epochs = a.update_epoch
    ranges: dict[str, Choice | Interval] = {
        "algorithm.horizon": _choice(a.horizon, max(1, a.horizon // 2), 2 * a.horizon),
        "algorithm.update_epoch": _choice(epochs, max(1, epochs // 2), 2 * epochs),
        "algorithm.entropy_bonus": _choice(a.entropy_bonus, 0.0, 0.003, 0.01),
        "algorithm.normalize_advantages": _choice(True, False),
    }
    if a.lr:
        ranges["algorithm.lr"] = Interval(a.lr / 4, a.lr * 4, log=True)
    if config.model.policy == "actor_critic":
        ranges["model.normalize_obs"] = _choice(True, False)
    return ranges


def _choice(*values: float) -> Choice:
    """Return the distinct values as a range."""
    return Choice(tuple(dict.fromkeys(show(value) for value in values)))


def distribution(values: Choice | Interval) -> optuna.distributions.BaseDistribution:
    """Return a range in Optuna's terms."""
    from optuna import distributions

    if isinstance(values, Choice):
        return distributions.CategoricalDistribution(values.values)
    if values.integer:
        return distributions.IntDistribution(round(values.low), round(values.high), log=values.log)
    return distributions.FloatDistribution(values.low, values.high, log=values.log)


# --------------------------------------------------------------------------------------- search
class Search:
    """A search: its folder, Optuna's study, and the trials that are training."""

    def __init__(self, settings: Settings, out: Path, progress: Progress) -> None:
        """Open the study in the folder, or create one.

        Raises:
            ConfigError: The folder cannot be used, or contains a search with other settings.
        """
        import optuna
        from optuna.storages.journal import JournalFileBackend

        self.settings, self.out, self.progress = settings, out, progress
        self.is_new = not (out / FILE).exists()
        if self.is_new and out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ConfigError(f"name another folder: --out {out} is a file, or not empty")
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        out.mkdir(parents=True, exist_ok=True)
        try:
            self.study = optuna.create_study(
                study_name="search",
                storage=optuna.storages.JournalStorage(JournalFileBackend(str(out / FILE))),
                sampler=optuna.samplers.TPESampler(seed=settings.seed),
                pruner=optuna.pruners.SuccessiveHalvingPruner(
                    min_resource=1, reduction_factor=FACTOR
                ),
                direction="maximize",
                load_if_exists=True,
            )
            stored = self.study.user_attrs.get("settings")
        except Exception as error:  # Optuna raises errors of several modules for a damaged journal
            raise ConfigError(f"name another folder: {out / FILE} is damaged") from error
        # The length of a search and the number of processes may change.
        identity = json.loads(json.dumps(asdict(settings)))
        for key in ("trials", "jobs", "budget_s"):
            del identity[key]
        if stored is None:
            self.study.set_user_attr("settings", identity)
        elif stored != identity:
            different = next(key for key in identity if stored.get(key) != identity[key])
            raise ConfigError(
                f"name another folder, or repeat its command: --out {out} contains a search with"
                f" other {different}"
            )

    def run(self) -> dict[str, Any]:
        """Train the trials; return ``result``."""
        with locked(self.out, "--out"):
            try:
                self._run()
            except ConfigError:
                if self.is_new and not any(self.out.glob("*/checkpoints")):
                    shutil.rmtree(self.out)  # nothing was trained
                raise
        return self.result()

    def _run(self) -> None:
        from optuna.trial import Trial, TrialState

        settings = self.settings
        self.end_s = time.monotonic() + (settings.budget_s or math.inf)
        interrupted = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        waiting = [Trial(self.study, trial._trial_id) for trial in interrupted]
        running: list[Iterator[None]] = []
        drawn_all = False
        # All seeds of a trial train at the same time, because the pruner compares their mean.
        most = max(1, settings.jobs // settings.seeds)
        with ProcessPool(most * settings.seeds) as pool:
            while True:
                expired = time.monotonic() > self.end_s
                # Two draws before the first process starts, so that wrong ranges are refused.
                while not (drawn_all or expired) and len(running) + len(waiting) < max(most, 2):
                    trial = self._draw()
                    drawn_all = trial is None
                    waiting += [] if trial is None else [trial]
                while waiting and len(running) < most and not expired:
                    running.append(self._train(waiting.pop(0), pool))
                running = [runs for runs in running if next(runs, "ended") is None]
                if not running and (expired or (drawn_all and not waiting)):
                    break
                time.sleep(CHECK_S)
        for trial in waiting:
            self.study.tell(trial, state=TrialState.PRUNED)
        rows = self.result()["trials"]
        if not any(row["scores"] for row in rows):
            errors = [row["error"] for row in rows if row["error"]]
            raise TrainingError(
                f"all trials failed; the first: {errors[0]}"
                if errors
                else f"--budget {settings.budget_s:g}s ended before the first evaluation"
            )

    def _train(self, trial: optuna.Trial, pool: ProcessPool) -> Iterator[None]:
        """Train the runs of a trial, or continue them; yield while they run.

        Raises:
            ConfigError: Trial 0, which has the options of the user, is refused.
        """
        from optuna.trial import TrialState

        number, lines = trial.user_attrs["number"], trial.user_attrs["lines"]
        run_dirs = self.run_dirs(number)
        names = [run_dir.name for run_dir in run_dirs]
        for seed, run_dir in enumerate(run_dirs):
            if not (run_dir / "summary.json").exists():
                command = train_command(
                    run_dir, self.settings.flags, self.config_lines(lines, seed)
                )
                pool.start(run_dir.name, command, self._log(run_dir.name), environment=ONE_THREAD)
        reported = list(self.study.trials[trial.number].intermediate_values.values())
        state = None
        while state is None:
            yield
            codes = pool.ended(names)
            ended = not any(name in pool.running for name in names)
            # The mean over the seeds of every new evaluation is reported.
            for scores in list(zip(*map(_scores, run_dirs), strict=False))[len(reported) :]:
                reported.append(float(np.mean(scores)))
                trial.report(reported[-1], step=len(reported))
                self.progress.say(
                    f"trial {number}, evaluation {len(reported)} of {EVALUATIONS}:"
                    f" {reported[-1]:.4g} ({' '.join(lines) or 'the options without search'})"
                )
                if not ended and trial.should_prune():
                    state = TrialState.PRUNED
                    break
            if failed := next((name for name, code in codes.items() if code), None):
                error = last_line(self._log(failed), codes[failed]).removeprefix("error: ")
                if codes[failed] == 2 and number == 0:
                    raise ConfigError(error)
                trial.set_user_attr("error", error)
                self.progress.say(f"trial {number} failed: {error}")
                state = TrialState.FAIL
            elif ended:
                state = TrialState.COMPLETE
            elif time.monotonic() > self.end_s:
                state = TrialState.PRUNED
        self.study.tell(trial, reported[-1] if state == TrialState.COMPLETE else None, state)
        if state == TrialState.PRUNED:
            self.progress.say(f"trial {number} is pruned")
        # At the signal a run saves a checkpoint and ends.
        for name in names:
            if name in pool.running:
                pool.running[name].send_signal(signal.SIGTERM)
        while any(name in pool.running for name in names):
            yield
            pool.ended(names)

    def _draw(self) -> optuna.Trial | None:
        """Return the next trial; None: there are enough, or no other valid options are left.

        Raises:
            ConfigError: The ranges have no valid combination.
        """
        from optuna.trial import TrialState

        known = [t.user_attrs["lines"] for t in self._trials()]
        if self.settings.trials is not None and len(known) >= self.settings.trials:
            return None
        ranges = {name: distribution(values) for name, values in self.settings.ranges.items()}
        reason = ""
        for _ in range(MOST_DRAWS):
            # Trial 0 has the options without the search.
            trial = self.study.ask(ranges if known else {})
            lines = [
                f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                for name, value in trial.params.items()
            ]
            if lines not in known:
                try:
                    self.config_lines(lines, 0)
                    trial.set_user_attr("number", len(known))
                    trial.set_user_attr("lines", lines)
                    return trial
                except (ConfigError, EnvError, CheckpointError, PlacementError) as error:
                    reason = f"; the last that was refused: {error}"
            self.study.tell(trial, state=TrialState.FAIL)
        if len(known) == 1:
            raise ConfigError(f"write wider ranges: no other combination is valid{reason}")
        self.progress.say(f"the ranges have {len(known)} different valid combinations{reason}")
        return None

    def _trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials whose options are valid, in the order of their numbers."""
        trials = self.study.get_trials(deepcopy=False)
        return [trial for trial in trials if "lines" in trial.user_attrs]

    def run_dirs(self, number: int) -> list[Path]:
        """Return the directories of the runs of a trial."""
        seeds = range(self.settings.seed, self.settings.seed + self.settings.seeds)
        return [self.out / f"trial-{number}_seed-{seed}" for seed in seeds]

    def _log(self, name: str) -> Path:
        return self.out / f"{name}.log"

    def config_lines(self, lines: Sequence[str], seed: int) -> list[str]:
        """Return the overrides of a run besides its directory. Raises ConfigError, EnvError."""
        lines = [*self.settings.lines, *lines, f"seed={self.settings.seed + seed}"]
        args = argparse.Namespace(
            command="train",
            config_dir=self.settings.config_dir,
            config_name=self.settings.config_name,
        )
        updates = total_updates(prepare(args, lines).config)
        return [*lines, f"eval_every={max(1, -(-updates // EVALUATIONS))}", SAVE_AT_THE_END]

    def result(self) -> dict[str, Any]:
        """Return the trials, best first, and the runs of the best trial.

        Returns:
            "trials" with "number", "lines" (their options), "scores" after each evaluation,
            "state" (complete, pruned, failed) and "error"; "best_trial" (its number), its
            "options" and "run_dirs", and "command", the arguments of ``train`` that train the
            first of these runs again, bit for bit; "out".
        """
        rows = [
            {
                **{key: trial.user_attrs.get(key) for key in ("number", "lines", "error")},
                "scores": [x for _, x in sorted(trial.intermediate_values.items())],
                "state": trial.state.name.lower().replace("fail", "failed"),
            }
            for trial in self._trials()
        ]
        # A failed trial is never the best one; a longer one is better than a shorter one.
        rows.sort(key=lambda x: (not x["error"], len(x["scores"]), x["scores"][-1:]), reverse=True)
        best = rows[0]
        # How often checkpoints are saved does not change a run.
        lines = [x for x in self.config_lines(best["lines"], 0) if x != SAVE_AT_THE_END]
        return {
            "out": str(self.out),
            "best_trial": best["number"],
            "options": best["lines"],
            "command": [*self.settings.flags, *lines],
            "run_dirs": [str(run_dir) for run_dir in self.run_dirs(best["number"])],
            "trials": rows,
        }


def _scores(run_dir: Path) -> list[float]:
    """Return the score of each evaluation of a run after the first update, in order."""
    if not (run_dir / "metrics.jsonl").exists():
        return []
    rows = [row for _, row in metric_rows(run_dir) if row is not None and row["update"]]
    scores = ([x for row in rows if (x := row.get(name)) is not None] for name in SCORES)
    return next(filter(None, scores), [])
