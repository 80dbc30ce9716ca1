"""Branch a run: continue from any of its updates with changed options."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from embodied_ppo import run as runs
from embodied_ppo.analysis import reexecution
from embodied_ppo.config import loader
from embodied_ppo.config.batch_sizes import total_updates
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import ConfigError
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.run_directory import branch, check_fixed_options


def fork(
    source_run: Path,
    update: int,
    config: Config,
    *,
    explicit: Collection[str] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Train a branch of a run and return its summary.

    If the run has no checkpoint after ``update``, its updates are executed again from the nearest
    earlier one. A branch without changed options equals the run bit for bit.

    Args:
        source_run: Directory of the run; it is only read.
        update: Completed updates at the branch.
        config: Options of the branch: those of the run at this update, with the changes.
            ``run_dir`` None selects RUN-fork-UPDATE beside the run.
        explicit: Options that the user set, for messages about options without effect.
        quiet: Whether progress is not shown.

    Raises:
        ConfigError, CheckpointError, EnvError, PlacementError: Nothing was written.
        TrainingError: The branch failed.
        SystemExit: 130, after an interrupt has saved a checkpoint.
    """
    bar = Progress(quiet)
    start = reexecution.nearest_start(source_run, update, bar.say)
    old = loader.relevant(reexecution.options(source_run, update + 1))
    check_fixed_options(config, loader.flat(old))
    updates = total_updates(config)
    if update >= updates:
        raise ConfigError(
            f"update={update}: the branch would have {updates} updates, so none is left to train;"
            f" write updates={update + 100}, or name an earlier update"
        )
    run_dir = Path(config.run_dir) if config.run_dir else _new_run_dir(source_run, update)
    if checkpoint.steps(run_dir / "checkpoints"):
        raise ConfigError(f"run_dir={run_dir}: holds a run already; name a new directory")
    config = replace(config, run_dir=str(run_dir))
    with tempfile.TemporaryDirectory(prefix="embodied-ppo-fork-") as folder:
        source = start.checkpoint
        if source is None or start.update != update:
            if start.update != update:
                bar.say(f"executing updates {start.update + 1} to {update} of {source_run} again")
            source = _repeated(source_run, start.update, update, Path(folder) / "run", bar)
        opened = checkpoint.open_checkpoint(source)
        parent = branch(source_run, opened, run_dir, loader.flat(old), config)
        config = replace(config, resume=str(source))
        return runs.train_branch(config, parent, explicit=explicit, quiet=quiet)


def _repeated(source_run: Path, start: int, stop: int, out: Path, bar: Progress) -> Path:
    """Execute updates of a run again; report differences; return the last checkpoint."""
    reexecution.reexecute(source_run, out, start=start, stop=stop, quiet=True)
    if differing := reexecution.differing_metrics(source_run, out):
        for line in reexecution.rounding_notes(out):
            bar.say(line)
        bar.say(
            f"{len(differing)} metrics of these updates differ from those of the run"
            f" ({differing[0]}): the branch starts from a state that is not bit-identical to the"
            " run's"
        )
    return checkpoint.find(out)


def _new_run_dir(source_run: Path, update: int) -> Path:
    """Return RUN-fork-UPDATE, or with a number behind it, that does not exist yet."""
    home = source_run.resolve()
    base = home.with_name(f"{home.name}-fork-{update}")
    paths = [base, *(base.with_name(f"{base.name}.{i}") for i in range(2, 1000))]
    free = next((path for path in paths if not path.exists()), None)
    if free is None:
        raise ConfigError(f"run_dir: {base} and 998 others exist; name one with run_dir=DIR")
    return free
