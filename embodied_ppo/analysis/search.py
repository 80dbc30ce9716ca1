"""Search for the options of a run by successive halving (Jamieson and Talwalkar, 2016).

A trial is a set of options; it trains one run for each seed. All trials train to a first rung, the
best third continues to the next one, which is three times as far, and so on. The best trial trains
from a ninth of the run to its end, so that most of the computation is that of the resulting run. A
run that continues does so from its checkpoint, bit for bit, so the run of the best trial equals
the one that the command in the result (``Search.result``) trains.

Runs are executed by ``python -m embodied_ppo.analysis.search``, several at the same time.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodied_ppo import run
from embodied_ppo.config.batch_sizes import steps_per_update, total_updates
from embodied_ppo.config.compose import Choice, Interval, override_lines, prepare
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    PlacementError,
    TrainingError,
    show,
)
from embodied_ppo.modes.registry import mode
from embodied_ppo.training import checkpoint
from embodied_ppo.training.health import PHASES
from embodied_ppo.training.process_pool import ONE_THREAD, POLL_S, ProcessPool, last_line
from embodied_ppo.training.progress import Interrupts, Progress
from embodied_ppo.training.run_directory import locked, replace_text
from embodied_ppo.training.run_files import METRICS

FORMAT = 1
"""Version of search.json. Increase it when the meaning of a field changes."""
FILE = "search.json"
SETTINGS = ("change_probability", "trials", "seeds", "seed", "budget_s")
"""Settings that must be equal when a search is continued, besides options and ranges."""
CHANGE_PROBABILITY = 0.5
"""Probability with which a trial changes an option of the default ranges."""
FACTOR = 3
"""Ratio of the lengths at two successive rungs, and of the numbers of trials that reach them. The
last rung, the complete run, is FACTOR^2 times as far as the one before."""
MOST_DRAWS = 1000
"""Largest number of draws for one trial whose options are new."""
MOST_REFUSED = 50
"""Largest number of different draws of a search that are refused."""
SAVE_AT_THE_END = "save_every=0"
ROLLOUT_RETURN = "rollout/return"
SCORES = ("success", "return", "rollout_return")
"""Scores by which trials are ranked, the most important first."""
PILOT_UPDATES = 4
"""Updates of the run that measures the speed; the first is not counted."""
REFUSED = (ConfigError, EnvError, CheckpointError, PlacementError)


@dataclass(frozen=True)
class Settings:
    """Settings of a search.

    Attributes:
        lines: Overrides of all runs.
        ranges: Option -> values to choose from.
        change_probability: Probability with which a trial changes an option; otherwise the
            option keeps its value.
        trials: Number of trials; the first has the values without the search.
        seeds: Number of runs of each trial.
        jobs: Number of runs at the same time.
        budget_s: Wall time for training all runs in seconds, from which their length follows;
            None: the length is that of the options.
        seed: Seed S of the draws. The runs of a trial have the seeds S, S + 1, ..
        flags: Flags of the command line that choose the configs.
    """

    lines: Sequence[str]
    ranges: Mapping[str, Choice | Interval]
    change_probability: float
    trials: int
    seeds: int
    jobs: int
    budget_s: float | None = None
    seed: int = 0
    flags: Sequence[str] = ()


@dataclass
class Trial:
    """A set of options.

    Attributes:
        number: Position, from 0.
        lines: Overrides that distinguish it.
        scores: Scores at the rungs that it has reached, means over its seeds: "return" and
            "success" of an evaluation and "rollout_return", the mean return of training episodes.
        cpu_s: CPU seconds of all its runs and of their compiler.
        error: Why it failed; None if it did not.
    """

    number: int
    lines: Sequence[str]
    scores: list[dict[str, float]] = field(default_factory=list)
    cpu_s: float = 0.0
    error: str | None = None

    def key(self) -> tuple[int, list[float]]:
        """Return the key by which trials are ranked, the best first.

        The rung counts first, then the entries of ``SCORES`` that the task reports. Training
        episodes decide where evaluations are equal: the mean action of a policy that has begun to
        learn may still score 0.
        """
        last = self.scores[-1] if self.scores else {}
        return -len(self.scores), [-last.get(name, -math.inf) for name in SCORES]


# ------------------------------------------------------------------------------------------ ranges
def default_ranges(config: Config) -> dict[str, Choice | Interval]:
    """Return ranges around the options of a robot policy.

    They are the learning rate, the horizon, the passes over a rollout, the entropy bonus and both
    normalisations. The values of the run itself are left out, except in the interval of the
    learning rate: a trial that does not change an option has it.

    Raises:
        ConfigError: The run trains a language model.
    """
    if config.mode != "embodied":
        raise ConfigError(
            f"mode = {config.mode}: has no default ranges; write them, for example"
            " 'actor.lr=tag(log,interval(1e-6,1e-4))'"
        )
    algorithm = config.algorithm
    ranges: dict[str, Choice | Interval] = {
        "algorithm.lr": Interval(algorithm.lr / 4, algorithm.lr * 4, log=True),
        "algorithm.horizon": _others(algorithm.horizon, _half_and_twice(algorithm.horizon)),
        "algorithm.update_epoch": _others(
            algorithm.update_epoch, _half_and_twice(algorithm.update_epoch)
        ),
        "algorithm.entropy_bonus": _others(algorithm.entropy_bonus, (0.0, 0.003, 0.01)),
        "algorithm.normalize_advantages": _others(algorithm.normalize_advantages, (True, False)),
    }
    if config.model.policy == "actor_critic":
        ranges["model.normalize_obs"] = _others(config.model.normalize_obs, (True, False))
    return ranges


def _half_and_twice(value: int) -> tuple[int, int]:
    return max(1, value // 2), 2 * value


def _others(value: float, values: Sequence[float]) -> Choice:
    """Return the ``values`` that differ from the value of the run."""
    return Choice(tuple(show(other) for other in values if other != value))


# ------------------------------------------------------------------------------------------ search
def rungs(trials: int) -> list[float]:
    """Return the rungs of a search: fractions of the complete run, in increasing order.

    3^k trials have k + 1 rungs. Subtracting 0.2 before rounding places the limit at 3^(k - 0.3):
    7 trials have as many rungs as 9, and 6 as many as 3. Two trials have one rung, the complete
    run, so none of them is stopped.
    """
    halvings = max(0, round(math.log(max(trials, 1), FACTOR) - 0.2))
    return [*(FACTOR ** -float(halvings - i + 1) for i in range(halvings)), 1.0]


def survivors(trials: int, rung: int) -> int:
    """Return the number of trials that train to a rung, which is an index of ``rungs``."""
    if 0 < rung == len(rungs(trials)) - 1:
        return 1
    return math.ceil(trials / FACTOR**rung)


def work(trials: int) -> float:
    """Return the training of a search with one seed, in lengths of the complete run."""
    ends = rungs(trials)
    lengths = [end - start for start, end in zip([0.0, *ends], ends, strict=False)]
    return sum(survivors(trials, i) * length for i, length in enumerate(lengths))


class Search:
    """A search: its folder, its trials and their results so far."""

    def __init__(self, settings: Settings, out: Path, progress: Progress) -> None:
        """Draw the trials, or read those of an interrupted search with the same settings.

        Args:
            settings: Settings of the search.
            out: Folder of the search.
            progress: Progress to show.

        Raises:
            ConfigError: A trial is refused, or the folder holds another search.
        """
        self.settings, self.out, self.progress = settings, out, progress
        self.file = out / FILE
        self.identity = {
            "format": FORMAT,
            "flags": list(settings.flags),
            "lines": list(settings.lines),
            "ranges": {name: repr(values) for name, values in settings.ranges.items()},
            **{name: getattr(settings, name) for name in SETTINGS},
        }
        stored = self._read()
        rows: list[dict[str, Any]] = (
            stored["results"] if stored else [{"lines": lines} for lines in draw(settings)]
        )
        self.trials = [Trial(number, **row) for number, row in enumerate(rows)]
        self.env_steps: int | None = stored["env_steps"] if stored else None
        """Length of the runs; None: that of their options, or not known yet."""

    def _read(self) -> dict[str, Any] | None:
        """Return the content of search.json, None if there is none."""
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"--out {self.out}: is a file; name a folder")
        if not self.file.exists():
            if self.out.exists() and any(self.out.iterdir()):
                raise ConfigError(f"--out {self.out}: is not empty; name another folder")
            return None
        try:
            content = json.loads(self.file.read_text())
            identity = {name: content[name] for name in self.identity}
            rows = [Trial(0, **row) for row in content["results"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.file}: is damaged; name another folder") from error
        different = [name for name in self.identity if identity[name] != self.identity[name]]
        if different or not rows:
            raise ConfigError(
                f"--out {self.out}: holds a search with other {(*different, 'trials')[0]}; name"
                " another folder, or repeat its command"
            )
        return dict(content)

    def write(self) -> None:
        """Write search.json."""
        rows = [
            {"lines": list(t.lines), "scores": t.scores, "cpu_s": t.cpu_s, "error": t.error}
            for t in self.trials
        ]
        content = {**self.identity, "env_steps": self.env_steps, "results": rows}
        replace_text(self.file, json.dumps(content, indent=1) + "\n")

    # ------------------------------------------------------------------------------------ the runs
    def run_dir(self, trial: Trial, seed: int) -> Path:
        """Return the directory of a run."""
        return self.out / f"trial-{trial.number}_seed-{self.settings.seed + seed}"

    def config_lines(self, trial: Trial, seed: int) -> list[str]:
        """Return the overrides of a run besides its directory."""
        lines = [*self.settings.lines, *trial.lines]
        if self.env_steps is not None:
            lines += ["updates=null", f"env_steps={self.env_steps}"]
        lines += [f"seed={self.settings.seed + seed}"]
        ends = self.ends(_config(self.settings.flags, lines))
        if self._compiles_at_once():
            lines += ["compile=always"]
        return [*lines, f"eval_every={ends[0]}", SAVE_AT_THE_END]

    def _compiles_at_once(self) -> bool:
        """Return whether the runs use compiled code from their first update on.

        They do where compile=auto would compile each run that reaches the second rung. Runs share
        the compiled code, so that all of them together compile little more than those alone.
        """
        lines = list(self.settings.lines)
        if any(line.startswith("compile=") for line in lines):
            return False
        if self.env_steps is not None:
            lines += ["updates=null", f"env_steps={self.env_steps}"]
        config = _config(self.settings.flags, lines)
        if config.compile != "auto":
            return False
        since = mode(config).compiled_since(config)
        return since is not None and 0 < since < self.ends(config)[:2][-1]

    def ends(self, config: Config) -> list[int]:
        """Return the updates at the rungs of a run with these options."""
        updates, fractions = total_updates(config), rungs(self.settings.trials)
        first = max(1, int(updates * fractions[0]))
        return [min(updates, first * FACTOR**i) for i in range(len(fractions) - 1)] + [updates]

    def measure_length(self) -> None:
        """Set the length of the runs, so that their training takes the time of the budget."""
        settings = self.settings
        if settings.budget_s is None or self.env_steps is not None:
            return
        self.progress.say("measuring the speed")
        folder = self.out / "speed"
        with ProcessPool(settings.jobs) as pool:
            for i in range(settings.jobs):  # as many processes as later, which slow each other down
                (run_dir,) = override_lines("train", {"run_dir": str(folder / str(i))})
                lines = [*settings.lines, run_dir, "eval_every=0", "save_every=0"]
                self._start(pool, str(i), folder / f"{i}.log", lines, PILOT_UPDATES)
            self._wait(pool, folder)
        rows = [
            json.loads(line)
            for i in range(settings.jobs)
            for line in (folder / str(i) / METRICS).read_text().splitlines()
        ]
        config = _config(settings.flags, settings.lines)
        steps = steps_per_update(config)
        seconds = [
            sum(row[tag] for tag in PHASES if tag in row) for row in rows if row["update"] > 1
        ]
        per_step = float(np.mean(seconds)) / steps
        total = settings.budget_s * settings.jobs / per_step
        length = int(total / (work(settings.trials) * settings.seeds)) // steps * steps
        most = round(1 / rungs(settings.trials)[0]) * steps
        if length < most:
            raise ConfigError(
                f"--budget {settings.budget_s:g}s: allows {length} steps per run, and a run with"
                f" {len(rungs(settings.trials))} rungs needs {most}; a budget of"
                f" {math.ceil(settings.budget_s * most / max(length, 1))}s is enough, or fewer"
                " --trials or --seeds"
            )
        self.env_steps = length
        self.progress.say(f"{1 / per_step:.0f} steps/s in each process: {length} steps per run")

    def _start(
        self, pool: ProcessPool, name: str, log: Path, lines: Sequence[str], stop: int
    ) -> None:
        """Start the process of a run that trains to update ``stop``."""
        arguments = json.dumps({"flags": list(self.settings.flags), "lines": list(lines)})
        command = [sys.executable, "-m", "embodied_ppo.analysis.search", arguments, str(stop)]
        pool.start(name, command, log, environment=ONE_THREAD)

    def _wait(self, pool: ProcessPool, folder: Path) -> None:
        """Wait until all processes of a pool have ended; raise TrainingError if one failed."""
        while pool.running:
            for name, code in pool.ended().items():
                if code:
                    raise TrainingError(last_line(folder / f"{name}.log", code))
            time.sleep(POLL_S)

    # ------------------------------------------------------------------------------------- halving
    def run(self) -> None:
        """Train all trials to their rungs. An interrupt is raised as KeyboardInterrupt."""
        self.measure_length()
        self.write()
        for rung in range(len(rungs(self.settings.trials))):
            ranked = sorted((t for t in self.trials if t.error is None), key=Trial.key)
            chosen = ranked[: survivors(self.settings.trials, rung)]
            if not chosen:
                raise TrainingError(f"all trials failed; the first: {self.trials[0].error}")
            waiting = [trial for trial in chosen if len(trial.scores) <= rung]
            if waiting:
                self._train(waiting, rung)

    def _train(self, trials: Sequence[Trial], rung: int) -> None:
        """Train trials to a rung and evaluate them there."""
        jobs = [(trial, seed) for trial in trials for seed in range(self.settings.seeds)]
        rows: dict[int, list[dict[str, Any]]] = {trial.number: [] for trial in trials}
        running: dict[str, tuple[Trial, int, int]] = {}
        done, total = 0, len(jobs)
        with ProcessPool(self.settings.jobs) as pool:
            while jobs or running:
                for name, code in pool.ended().items():
                    trial, seed, stop = running.pop(name)
                    log = self.out / f"{name}.log"
                    row = self._row(trial, seed, stop)
                    if code == 2 and trial.number == 0:
                        raise ConfigError(last_line(log, code).removeprefix("error: "))
                    if code or row is None:
                        trial.error = last_line(log, code).removeprefix("error: ")
                        self.progress.say(f"trial {trial.number} failed: {trial.error}")
                    else:
                        rows[trial.number].append(row)
                    done += 1
                    self.progress.advance(f"to rung {rung + 1}", done, total)
                    if len(rows[trial.number]) == self.settings.seeds:
                        self._finish(trial, rows[trial.number])
                while jobs and pool.free:
                    trial, seed = jobs.pop(0)
                    if trial.error is not None:
                        done += 1
                        continue
                    name, run_dir = self.run_dir(trial, seed).name, self.run_dir(trial, seed)
                    lines = self.config_lines(trial, seed)
                    stop = self.ends(_config(self.settings.flags, lines))[rung]
                    lines += override_lines("train", {"run_dir": str(run_dir.absolute())})
                    running[name] = trial, seed, stop
                    self._start(pool, name, self.out / f"{name}.log", lines, stop)
                time.sleep(POLL_S)

    def _row(self, trial: Trial, seed: int, stop: int) -> dict[str, Any] | None:
        """Return the row of metrics at an update of a run, with its CPU seconds so far."""
        run_dir, evaluated = self.run_dir(trial, seed), None
        rollout: dict[str, Any] = {}
        try:
            for line in (run_dir / METRICS).read_text().splitlines():
                row = json.loads(line)
                if ROLLOUT_RETURN in row:
                    rollout = {ROLLOUT_RETURN: row[ROLLOUT_RETURN]}
                if row["update"] == stop and "eval/return" in row:
                    evaluated = rollout | row
            usage = json.loads((self.out / f"{run_dir.name}.json").read_text())
        except (OSError, ValueError, KeyError):
            return None
        return None if evaluated is None else {**evaluated, "cpu_s": usage["cpu_s"]}

    def _finish(self, trial: Trial, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record the score of a trial at a rung."""
        config = _config(self.settings.flags, self.config_lines(trial, 0))
        names = {"success": mode(config).success_metric, "return": "eval/return"}
        names["rollout_return"] = ROLLOUT_RETURN
        score = {
            name: float(np.mean([row[key] for row in rows]))
            for name, key in names.items()
            if all(row.get(key) is not None for row in rows)
        }
        trial.scores.append(score)
        trial.cpu_s = round(sum(float(row["cpu_s"]) for row in rows), 1)
        self.write()
        shown = ", ".join(f"{name} {value:.4g}" for name, value in score.items())
        options = " ".join(trial.lines) or "the options without search"
        self.progress.say(f"trial {trial.number} at rung {len(trial.scores)}: {shown} ({options})")

    def result(self) -> dict[str, Any]:
        """Return the trials, best first, and the runs of the best trial.

        Returns:
            "trials" with "number", "lines" (their options), "scores" at each rung, "cpu_s" and
            "error"; "best_trial" (its number), its "options" and "run_dirs", and "command", the
            arguments of ``train`` that train the first of these runs again, bit for bit; "out",
            "env_steps" and "cpu_s" of the search.
        """
        ranked = sorted(self.trials, key=Trial.key)
        best = ranked[0]
        # How often checkpoints are saved does not change a run.
        lines = [x for x in self.config_lines(best, 0) if x != SAVE_AT_THE_END]
        return {
            "out": str(self.out),
            "env_steps": self.env_steps,
            "cpu_s": round(sum(trial.cpu_s for trial in self.trials), 1),
            "best_trial": best.number,
            "options": list(best.lines),
            "command": [*self.settings.flags, *lines],
            "run_dirs": [str(self.run_dir(best, seed)) for seed in range(self.settings.seeds)],
            "trials": [vars(trial) for trial in ranked],
        }


def draw(settings: Settings) -> list[list[str]]:
    """Return the overrides of each trial; the first has none: it has the user's options.

    Raises:
        ConfigError: The options are refused, or the ranges have too few valid combinations.
    """
    config = _config(settings.flags, settings.lines)
    if mode(config).can_estimate(config, in_process=True):
        mode(config).memory_estimator(config)  # refuses a task that does not exist
    generator = np.random.default_rng(settings.seed)
    trials: list[list[str]] = [[]]
    refused: list[list[str]] = []
    reason = ""
    while len(trials) < settings.trials:
        for _ in range(MOST_DRAWS):
            numbers = generator.random((len(settings.ranges), 2))
            lines = [
                f"{name}={values.draw(value)}"
                for (name, values), (change, value) in zip(
                    settings.ranges.items(), numbers.tolist(), strict=True
                )
                if change < settings.change_probability
            ]
            if lines in trials or lines in refused or len(refused) == MOST_REFUSED:
                continue
            try:
                _config(settings.flags, [*settings.lines, *lines])
            except REFUSED as error:
                if "no such option" in str(error):  # refused with every value
                    raise
                refused.append(lines)
                reason = f"; the last that was refused: {error}"
                continue
            trials.append(lines)
            break
        else:
            raise ConfigError(
                f"--trials {settings.trials}: the ranges have {len(trials)} valid combinations"
                f" only; lower it, or write wider ranges{reason}"
            )
    return trials


def search(settings: Settings, out: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Train the trials of a search; return the best one.

    Args:
        settings: Settings of the search.
        out: Folder of the search; it gets search.json and the directory of every run. The search
            that it holds is continued.
        quiet: Whether progress is hidden.

    Returns:
        See ``Search.result``.

    Raises:
        ConfigError: An option or the folder is refused.
        TrainingError: All trials failed.
        KeyboardInterrupt: The search was interrupted; the same call continues it.
    """
    with Interrupts(), Progress(quiet) as progress:
        state = Search(settings, out, progress)
        with locked(out, "--out"):
            state.run()
    return state.result()


def _config(flags: Sequence[str], lines: Sequence[str]) -> Config:
    """Return the checked options of ``train`` with these flags and overrides.

    Raises ConfigError, EnvError.
    """
    return _cached_config(tuple(flags), tuple(lines))


@functools.cache
def _cached_config(flags: tuple[str, ...], lines: tuple[str, ...]) -> Config:
    return prepare(_arguments(flags), lines).config


def _arguments(flags: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of ``train`` with these flags."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config-dir")
    parser.add_argument("--config-name")
    return argparse.Namespace(command="train", **vars(parser.parse_args(list(flags))))


# ------------------------------------------------------------------------------- process of a run
def main(argv: Sequence[str]) -> None:
    """Train or continue one run; ``argv`` is a JSON text with its options, and the last update."""
    content, stop = json.loads(argv[0]), int(argv[1])
    sys.path.append(os.getcwd())  # modules of the user, as for the command line
    args = _arguments(content["flags"])
    loaded = prepare(args, content["lines"])
    assert loaded.config.run_dir is not None
    run_dir = Path(loaded.config.run_dir)
    if checkpoint.steps(run_dir / "checkpoints"):
        loaded = prepare(args, override_lines("train", {"resume": str(run_dir)}))
    usage = run_dir.with_name(f"{run_dir.name}.json")
    before = json.loads(usage.read_text())["cpu_s"] if usage.exists() else 0.0
    updates = total_updates(loaded.config)
    try:
        run.train(loaded.config, quiet=True, stop_after=stop if stop < updates else None)
    finally:
        if run_dir.exists():
            cpu_s = before + sum(os.times()[:4])  # with its compiler
            replace_text(usage, json.dumps({"cpu_s": cpu_s}) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except REFUSED as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(3)
