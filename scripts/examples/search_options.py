"""Search for better options with Optuna (``pip install optuna``).

    python scripts/examples/search_options.py hopper runs/searches/hopper eval_every=10

A trial is a run whose options Optuna's TPE sampler draws. Its successive halving stops the runs
that fall behind; a stopped run is saved, and ``train resume=RUN`` continues it exactly. The same
command adds trials to the search; ``study.log`` is Optuna's journal, which its dashboard reads.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage

TRIALS, JOBS = 9, 2


def draw(trial: optuna.Trial) -> dict[str, object]:
    """Return the options of a trial; write your own ranges here."""
    return {
        "algorithm.lr": trial.suggest_float("lr", 1e-4, 3e-3, log=True),
        "algorithm.update_epoch": trial.suggest_int("update_epoch", 4, 20),
        "algorithm.entropy_bonus": trial.suggest_categorical("entropy_bonus", [0.0, 0.003, 0.01]),
    }


def scores(run_dir: Path) -> list[float]:
    """Return the score of each evaluation so far."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]  # the last may be incomplete
    return [row["eval/return"] for row in rows if "eval/return" in row]


def search(experiment: str, folder: Path, trials: int, jobs: int, options: list[str]) -> Path:
    """Train the trials; return the run directory of the best one."""

    def train(trial: optuna.Trial) -> float:
        run_dir = folder / f"trial-{trial.number}"
        drawn = [f"{name}={value}" for name, value in draw(trial).items()]
        arguments = [f"experiment={experiment}", f"run_dir={run_dir}", *options, *drawn]
        program = [sys.executable, "-m", "embodied_ppo.commands.main", "train", "--quiet"]
        process = subprocess.Popen([*program, *arguments], stdout=subprocess.DEVNULL)
        reported = 0
        while process.poll() is None:
            for score in scores(run_dir)[reported:]:
                trial.report(score, reported := reported + 1)
                if trial.should_prune():
                    process.send_signal(signal.SIGTERM)  # the run is saved
                    process.wait()
                    raise optuna.TrialPruned
            time.sleep(0.5)
        if process.returncode:  # options that conflict, or a run that failed
            raise optuna.TrialPruned
        return scores(run_dir)[-1]

    folder.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="search",
        storage=JournalStorage(JournalFileBackend(str(folder / "study.log"))),
        pruner=optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3),
        direction="maximize",
        load_if_exists=True,
    )
    study.optimize(train, n_trials=trials, n_jobs=jobs)
    print(f"best of {len(study.trials)} trials: {study.best_value:.4g} with {study.best_params}")
    return folder / f"trial-{study.best_trial.number}"


if __name__ == "__main__":
    experiment, folder, *options = sys.argv[1:]
    search(experiment, Path(folder), TRIALS, JOBS, options or ["eval_every=10"])
