"""Trackers of a run beside TensorBoard: Weights & Biases and MLflow.

A tracker receives the scalars of TensorBoard under the same tags and steps, the options, samples,
videos and the summary. It is called in a thread of its own, so that training never waits for a
network. The first failure of a tracker switches it off and is reported in one line. The run
directory keeps the ids of the tracked runs in ``trackers.json``, so that a resumed run continues
them; no other file of a run depends on its trackers.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import netrc
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from embodied_envs.base.errors import ConfigError, shorten, show
from embodied_ppo.core.guarded_files import read_object, replace_file
from embodied_ppo.options.schema import Config

FILE = "trackers.json"  # file in the run directory: tracker -> {"id": id of the tracked run}
# Project of W&B and experiment of MLflow where neither an option nor a variable names one.
PROJECT = "embodied_ppo"
CLOSE_S = 60.0  # longest time that the end of a run waits for its trackers, seconds
MAX_PENDING = 10_000  # number of calls that may wait for a tracker before it is switched off
# Guards FILE, which all trackers of a run write.
_FILE_LOCK = threading.Lock()
# How a run has ended.
Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for a tracker.

    Attributes:
        run_dir: Directory of the run.
        group: Name that the runs of one experiment share.
        options: Path -> value of every option.
        id: Id of the tracked run that a resumed run continues; else None.
    """

    run_dir: Path
    group: str
    options: Mapping[str, Any]
    id: str | None

    @property
    def name(self) -> str:
        """Name as that of the directory, NAME/<date>-<seed>."""
        return f"{self.group}/{self.run_dir.name}"


class MetricsRow(NamedTuple):
    """Scalars of one step.

    Attributes:
        steps: Environment steps or tokens, the x axis.
        time_s: Time of the measurement, Unix seconds.
        values: Tag -> finite number.
    """

    steps: int
    time_s: float
    values: Mapping[str, float]


# ---------------------------------------------------------------------------------------- the tools
class WandbTracker:
    """Weights & Biases. WANDB_MODE, WANDB_DIR and the other variables of wandb apply.

    The methods are those of every tracker; each may raise any exception.
    """

    def start(self, run: TrackedRun) -> tuple[str, str]:
        """Create a tracked run, or continue that of ``run.id``; return where it is, and its id."""
        # Imported in the thread of the tracker, because the import takes seconds.
        import wandb  # pyright: ignore[reportMissingImports]

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            group=os.environ.get("WANDB_RUN_GROUP") or run.group,
            id=run.id,
            resume="allow",  # in another project the id is that of a new run
            config=dict(run.options),
            allow_val_change=True,
            reinit="create_new",  # a notebook may have a run of its own
            # The run has its own log and its own output. wandb's limit ends before this process
            # stops waiting for it.
            settings=wandb.Settings(console="off", silent=True, finish_timeout=CLOSE_S - 10),
        )
        place = str(self._run.url or "disabled by WANDB_MODE")
        if self._run.offline:
            folder = Path(self._run.dir).parent
            place = f"offline in {folder}; upload it with: wandb sync {folder}"
        return place, self._run.id

    def rows(self, rows: Sequence[MetricsRow]) -> None:
        """Store scalars."""
        # wandb leaves out the steps that it has from before the run was resumed.
        for row in rows:
            self._run.log(dict(row.values), step=row.steps)

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Store rows with equal keys."""
        data = [list(row.values()) for row in rows]
        table = self._wandb.Table(columns=list(rows[0]), data=data, allow_mixed_types=True)
        self._run.log({tag: table}, step=steps)

    def video(self, tag: str, path: Path, steps: int) -> None:
        """Store an mp4."""
        self._run.log({tag: self._wandb.Video(str(path), format="mp4")}, step=steps)

    def summary(self, values: Mapping[str, float | str], steps: int) -> None:
        """Store the results of the run."""
        self._run.summary.update(dict(values))

    def finish(self, status: Status) -> None:
        """Send everything and end the tracked run; also after another method has failed."""
        self._run.finish(exit_code={"finished": 0, "failed": 1, "interrupted": 130}[status])


class MlflowTracker:
    """MLflow, in the store of MLFLOW_TRACKING_URI. The methods are those of WandbTracker."""

    def start(self, run: TrackedRun) -> tuple[str, str]:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._entities: Any = mlflow.entities
        # They report each table of a new database, and tracebacks of what is one line here.
        for name in ("mlflow.store", "alembic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._client: Any = mlflow.MlflowClient()
        project, self._id = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT, run.id
        if self._id is not None:
            try:
                self._client.update_run(self._id, status="RUNNING")
            except mlflow.MlflowException:  # deleted since, or of another store
                self._id = None
        if self._id is None:
            created = self._client.create_run(
                mlflow.set_experiment(project).experiment_id,
                run_name=run.name,
                tags={"mlflow.source.name": "embodied-ppo", "run_dir": str(run.run_dir)},
            )
            self._id = str(created.info.run_id)
            # MLflow limits the length of a parameter.
            params = [
                self._entities.Param(_mlflow_name(path), shorten(show(value), 6000))
                for path, value in run.options.items()
            ]
            self._client.log_batch(self._id, params=params)
        return f"run {self._id} of experiment {project} in {self._client.tracking_uri}", self._id

    def rows(self, rows: Sequence[MetricsRow]) -> None:
        metrics = [
            self._entities.Metric(_mlflow_name(tag), x, int(row.time_s * 1000), row.steps)
            for row in rows
            for tag, x in row.values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        # MLflow stores tables as files of the run.
        text = json.dumps([dict(row) for row in rows], indent=1, default=str)
        self._client.log_text(self._id, text, f"{tag}/step_{steps:012d}.json")

    def video(self, tag: str, path: Path, steps: int) -> None:
        self._client.log_artifact(self._id, str(path), f"{tag}/step_{steps:012d}")

    def summary(self, values: Mapping[str, float | str], steps: int) -> None:
        # Numbers become metrics, and texts become tags.
        numbers = {name: x for name, x in values.items() if not isinstance(x, str)}
        self.rows([MetricsRow(steps, time.time(), numbers)])
        for name in values.keys() - numbers.keys():
            self._client.set_tag(self._id, name, values[name])

    def finish(self, status: Status) -> None:
        names = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, names[status])


Tracker: TypeAlias = WandbTracker | MlflowTracker
# Values of the option ``trackers`` -> class.
TOOLS: Mapping[str, Callable[[], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
# Module of a tool -> package to install.
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}


# ------------------------------------------------------------------------------------- before a run
def check(config: Config) -> None:
    """Check that the tools of the option ``trackers`` can be used.

    Raises:
        ConfigError: A package or the API key of wandb is missing.
    """
    for tool in config.trackers:
        spec, package = importlib.util.find_spec(tool), PACKAGES[tool]
        # A folder without code, such as the wandb/ of offline runs, has no origin.
        if spec is None or spec.origin is None:
            fact = f"trackers = {show(config.trackers)}: {package} not installed"
            raise ConfigError(f"{fact}; pip install {package}, or leave {tool} out")
    # wandb would ask for the key, and a command without a terminal would fail or wait.
    if "wandb" in config.trackers and not _wandb_can_start():
        raise ConfigError(
            f"trackers = {show(config.trackers)}: wandb has no API key; run `wandb login`, or write"
            " WANDB_MODE=offline before the command, or leave wandb out"
        )


def _wandb_can_start() -> bool:
    """Return whether wandb is offline or has an API key."""
    import wandb  # pyright: ignore[reportMissingImports]

    settings: Any = wandb.setup().settings
    if settings.mode not in ("online", "shared") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    # ``wandb login`` writes the key to .netrc, older versions under the second host.
    urls = (settings.base_url, "https://api.wandb.ai")
    with suppress(OSError, netrc.NetrcParseError):
        stored = netrc.netrc(os.environ.get("NETRC")).hosts
        if any(urlsplit(url).hostname in stored for url in urls):
            return True
    return bool(settings.api_key)


# ------------------------------------------------------------------------------------- during a run
class Trackers:
    """The trackers of one run; without any, the methods do nothing."""

    def __init__(self, workers: Sequence[_TrackerThread] = ()) -> None:
        self._workers = workers

    def metrics(self, values: Mapping[str, float], *, steps: int) -> None:
        """Store the scalars of a step; all of them are finite."""
        # Copy the values, because the threads read them later.
        self._put(MetricsRow(steps, time.time(), dict(values)))

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], *, steps: int) -> None:
        """Store rows with equal keys."""
        self._put(lambda tracker: tracker.table(tag, rows, steps))

    def video(self, tag: str, path: str | Path, *, steps: int) -> None:
        """Store an mp4."""
        self._put(lambda tracker: tracker.video(tag, Path(path), steps))

    def summary(self, summary: Mapping[str, Any], *, steps: int) -> None:
        """Store the numbers and texts of a summary."""
        # In Python a bool is an int, but it is no number of a summary.
        plain = {name: x for name, x in summary.items() if isinstance(x, int | float | str)}
        values = {name: x for name, x in plain.items() if not isinstance(x, bool)}
        self._put(lambda tracker: tracker.summary(values, steps))

    def _put(self, item: _Item) -> None:
        for worker in self._workers:
            worker.put(item)

    def close(self, status: Status) -> None:
        """End the tracked runs; wait until everything is sent, at most CLOSE_S."""
        # End all of them before waiting for the first, so that they finish at the same time.
        deadline = time.monotonic() + CLOSE_S
        self._put(status)
        for worker in self._workers:
            worker.join(deadline)


def start(
    config: Config,
    run_dir: Path,
    options: Mapping[str, Any],
    say: Callable[[str], None],
    *,
    resumed: bool,
) -> Trackers:
    """Start the trackers of a run.

    Args:
        config: Options of the run.
        run_dir: Directory of the run.
        options: Path -> value of every option, for the trackers.
        say: Called with lines for the user, also from other threads.
        resumed: Whether the run continues the one in ``run_dir``, and then its tracked runs.
    """
    stored = _read(run_dir) if resumed else {}
    ids = {tool: stored.get(tool, {}).get("id") for tool in config.trackers}
    runs = {tool: TrackedRun(run_dir, config.name, options, id) for tool, id in ids.items()}
    return Trackers([_TrackerThread(tool, run, say) for tool, run in runs.items()])


# A row, the end of the run, or a call.
_Item = MetricsRow | Status | Callable[[Tracker], None]


class _TrackerThread:
    """Calls a tracker in a thread of its own, in order; its first failure ends the thread."""

    def __init__(self, tool: str, run: TrackedRun, say: Callable[[str], None]) -> None:
        """Start the tracker."""
        self._tool, self._run, self._say = tool, run, say
        self._queue: queue.Queue[_Item] = queue.Queue()
        self._on = True
        # A daemon thread does not keep the process alive when a server does not answer.
        self._thread = threading.Thread(target=self._work, name=f"tracker-{tool}", daemon=True)
        self._thread.start()

    def put(self, item: _Item) -> None:
        """Add a row, a call, or the end of the run."""
        # A server that cannot be reached must not fill the memory of a long run.
        if self._queue.qsize() >= MAX_PENDING:
            self._switch_off(f"does not answer, {MAX_PENDING} updates wait for it")
        if self._on:
            self._queue.put(item)

    def join(self, deadline: float) -> None:
        """Wait for the end of the thread until ``deadline``, in seconds of ``time.monotonic``."""
        if self._on:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._switch_off(f"does not answer for {CLOSE_S:g} s at the end of the run")

    def _switch_off(self, cause: str) -> None:
        """Report the failure of the tracker once; its thread says nothing more."""
        if self._on:
            self._on = False
            line = shorten(f"warning: {self._tool} is off: {cause}", 250)
            self._say(f"{line}; the files of the run are complete")

    def _work(self) -> None:
        """Run the thread."""
        tracker, status = TOOLS[self._tool](), None
        try:
            place, id = tracker.start(self._run)
            _store(self._run.run_dir, self._tool, id)
            if self._on:
                self._say(f"{self._tool}: {place}")
            while self._on and status is None:
                item: _Item | None = self._queue.get()
                # Rows are sent together: several in one request cost little more than one.
                rows: list[MetricsRow] = []
                while isinstance(item, MetricsRow):
                    rows.append(item)
                    item = None if self._queue.empty() else self._queue.get()
                if rows:
                    tracker.rows(rows)
                if callable(item):
                    item(tracker)
                else:
                    status = item
            tracker.finish(status or "failed")
        except Exception as error:  # of any library: training does not depend on it
            self._switch_off(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            with suppress(Exception):
                tracker.finish("failed")


# -------------------------------------------------------------------------------------------- files
def _read(run_dir: Path) -> dict[str, dict[str, str]]:
    """Return the content of FILE; empty where it is missing or damaged."""
    try:
        # Without the file, the tools create new runs.
        content = read_object(run_dir / FILE)
    except (OSError, ValueError):
        return {}
    return {name: entry for name, entry in content.items() if isinstance(entry, dict)}


def _store(run_dir: Path, tool: str, id: str) -> None:
    """Write the id of the run of a tool."""
    with _FILE_LOCK:
        # Read again under the lock, because another tracker may have added its entry.
        content = {**_read(run_dir), tool: {"id": id}}
        replace_file(run_dir / FILE, json.dumps(content, indent=1) + "\n")


def _mlflow_name(name: str) -> str:
    """Replace the characters that MLflow does not allow in names, such as @ and +, by _."""
    return re.sub(r"[^\w./ :-]", "_", name, flags=re.ASCII)[:250]
