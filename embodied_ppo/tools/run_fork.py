"""Branch a run: continue from any of its updates with changed options."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import ConfigError
from embodied_ppo.api import Run, interruptible, path_text, whole_number
from embodied_ppo.options.batch_sizes import total_updates
from embodied_ppo.options.compose import CALL, FLAGS, GIVEN, override_lines, prepare
from embodied_ppo.programs import runs
from embodied_ppo.tools import reexecution
from embodied_ppo.training import checkpoint
from embodied_ppo.training.progress import Progress
from embodied_ppo.training.run_directory import branch, check_fixed_options


def fork(run: str | Path | Run, *, update: int, progress: bool = True, **options: Any) -> Run:
    """Train a branch of a run that leaves it after an update, with changed options.

    If the run has no checkpoint there, its updates are executed again from the nearest earlier one.
    A branch without changed options equals the run bit for bit.

    Args:
        run: Directory of a run, or a ``Run``; it is only read.
        update: Completed updates at the branch.
        progress: See ``train``.
        options: Changed options, see the module ``api``; ``run_dir`` is the directory of the branch
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
    update, path = whole_number("update", update), path_text(run)
    lines = override_lines("train", options)
    return Run(
        interruptible(lambda: fork_lines(path, update, lines, quiet=not progress, label=CALL))
    )


def fork_lines(
    path: str, update: int, lines: Sequence[str], *, quiet: bool, label: str = FLAGS
) -> dict[str, Any]:
    """Train a branch with lines option=value and return its summary, see ``fork``."""
    bar, source_run = Progress(quiet), reexecution.run_directory(path)
    start, source = reexecution.nearest_start(source_run, update, bar.say)
    for line in lines:
        name = line.partition("=")[0].lstrip("+~")
        if name in ("resume", "experiment", "mode"):
            raise ConfigError(f"remove {name}: a branch has the options of {path}")
    run_config = reexecution.options(source_run, update + 1)
    folder = reexecution.options_folder(source_run, update + 1)
    command = "train" if run_config.teacher is None else "distill"
    args = argparse.Namespace(command=command, config_name=None, config_dir=None)
    loaded = prepare(args, [*override_lines(command, {"resume": str(folder)}), *lines], label=label)
    config, explicit = loaded.config, {*loaded.deliberate(GIVEN)} - {"resume"}
    check_fixed_options(config, run_config)
    updates = total_updates(config)
    if update >= updates:
        raise ConfigError(
            f"update={update}: the branch would have {updates} updates, so none is left to train;"
            f" write updates={update + 100}, or name an earlier update"
        )
    run_dir = Path(config.run_dir) if config.run_dir else _new_run_dir(source_run, update)
    if checkpoint.steps(run_dir / "checkpoints"):
        raise ConfigError(f"run_dir={run_dir}: already contains a run; name a new directory")
    config = replace(config, run_dir=str(run_dir))
    with tempfile.TemporaryDirectory(prefix="embodied-ppo-fork-") as folder:
        if source is None or start != update:
            out = Path(folder) / "run"
            reexecution.repeat(source_run, out, start=start, stop=update, say=bar.say)
            source = checkpoint.find(out)
        parent = branch(source_run, checkpoint.open_checkpoint(source), run_dir, run_config, config)
        config = replace(config, resume=str(source))
        return runs.train(config, explicit=explicit, quiet=quiet, command=None, parent=parent)


def _new_run_dir(source_run: Path, update: int) -> Path:
    """Return RUN-fork-UPDATE, or with a number behind it, that does not exist yet."""
    base = Path(f"{source_run.resolve()}-fork-{update}")
    paths = chain([base], (Path(f"{base}.{number}") for number in count(2)))
    return next(path for path in paths if not path.exists())
