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
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlparse

from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import ConfigError, shorten, show

FILE = "trackers.json"
"""File in the run directory: tracker -> what identifies the tracked run."""
PROJECT = "embodied_ppo"
"""Project of W&B and experiment of MLflow where neither an option nor a variable names one."""
START_S = 10.0
"""Longest time that the beginning of a run waits for its trackers, seconds."""
BATCH_S = 1.0
"""Longest time that rows wait to be sent together, seconds."""
CLOSE_S = 60.0
"""Longest time that the end of a run waits for its trackers, seconds; START_S for one that has not
started by then."""
MAX_PENDING = 10_000
"""Number of calls that may wait for a tracker before it is switched off."""
Status = Literal["finished", "failed", "interrupted"]
"""How a run has ended."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run.

    Attributes:
        run_dir: Directory of the run.
        project: Value of ``tracker_project``.
        run_name: Name of the tracked run; None: the tool's environment variable, else ``name``.
        group: Name that the runs of one experiment share.
        options: Path -> value of every option.
        stored: What ``store`` has written for this tracker, if the run is resumed; else empty.
    """

    run_dir: Path
    project: str | None
    run_name: str | None
    group: str
    options: Mapping[str, Any]
    stored: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name as that of the directory, NAME/<date>-<seed>."""
        return self.run_name or f"{self.group}/{self.run_dir.name}"


@dataclass(frozen=True)
class Row:
    """Scalars of one step.

    Attributes:
        steps: Environment steps or tokens, the x axis.
        time_s: Time of the measurement, Unix seconds.
        values: Tag -> finite number.
    """

    steps: int
    time_s: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """Client of one tracking tool. Every method may raise any exception."""

    title: str
    """Name of the tool in messages."""
    next_step: int
    """Rows of smaller steps are left out: the tool has them from before the run was resumed."""
    identity: Mapping[str, str]
    """What identifies the tracked run; ``TrackedRun.stored`` of a resumed run."""

    def start(self, run: TrackedRun) -> str:
        """Create a tracked run, or continue that of ``run.stored``; return where it is, as text."""
        ...

    def rows(self, rows: Sequence[Row]) -> None:
        """Store scalars."""
        ...

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        """Store rows with equal keys."""
        ...

    def video(self, tag: str, path: Path, steps: int) -> None:
        """Store an mp4."""
        ...

    def summary(self, values: Mapping[str, float | str], steps: int) -> None:
        """Store the results of the run."""
        ...

    def finish(self, status: Status) -> None:
        """Send everything and end the tracked run."""
        ...

    def abandon(self) -> None:
        """Release what is open after another method has failed."""
        ...


# ---------------------------------------------------------------------------------------- the tools
class WandbTracker:
    """Weights & Biases. WANDB_MODE, WANDB_DIR and the other variables of wandb apply."""

    title = "wandb"

    def __init__(self) -> None:
        self.next_step = 0
        self.identity: Mapping[str, str] = {}
        self._wandb: Any = None
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        import wandb  # pyright: ignore[reportMissingImports]

        self._wandb = wandb
        project = run.project or os.environ.get("WANDB_PROJECT") or PROJECT
        continues = run.stored.get("project") == project
        id = run.stored["id"] if continues else secrets.token_hex(4)
        # The run has its own log and its own output.
        settings: dict[str, Any] = {"console": "off", "silent": True}
        settings["finish_timeout"] = CLOSE_S - 10
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = CLOSE_S / 2
        self._run = wandb.init(
            project=project,
            name=run.run_name or os.environ.get("WANDB_NAME") or run.name,
            group=os.environ.get("WANDB_RUN_GROUP") or run.group,
            id=id,
            resume="allow" if continues else None,
            config=dict(run.options),
            allow_val_change=True,
            reinit="create_new",  # a notebook may have a run of its own
            settings=wandb.Settings(**settings),
        )
        if continues and not self._run.offline:
            self.next_step = self._run.step
        self.identity = {"id": id, "project": project}
        if self._run.disabled:
            return "disabled by WANDB_MODE"
        if self._run.offline:
            folder = Path(self._run.dir).parent
            return f"offline in {folder}; upload it with: wandb sync {folder}"
        return str(self._run.url)

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(dict(row.values), step=row.steps)

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        data = [[_plain(value) for value in row.values()] for row in rows]
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log({tag: table}, step=steps)

    def video(self, tag: str, path: Path, steps: int) -> None:
        self._run.log({tag: self._wandb.Video(str(path), format="mp4")}, step=steps)

    def summary(self, values: Mapping[str, float | str], steps: int) -> None:
        self._run.summary.update(dict(values))

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code={"finished": 0, "failed": 1, "interrupted": 130}[status])

    def abandon(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish(exit_code=1)
        except Exception:  # its process has ended: without this the exit prints a traceback
            self._wandb.teardown(exit_code=1)


class MlflowTracker:
    """MLflow, in the store of MLFLOW_TRACKING_URI."""

    title = "mlflow"

    def __init__(self) -> None:
        self.next_step = 0
        self.identity: Mapping[str, str] = {}
        self._mlflow: Any = None
        self._client: Any = None
        self._id = ""

    def start(self, run: TrackedRun) -> str:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow = mlflow
        # They report each table of a new database, and tracebacks of what is one line here.
        for name in ("mlflow.store", "alembic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._client = mlflow.MlflowClient()
        uri = str(self._client.tracking_uri)
        params = {_mlflow_name(path): show(value) for path, value in run.options.items()}
        params = {path: shorten(value, 6000) for path, value in params.items()}
        known: Mapping[str, str] = {}
        if run.stored.get("uri") == uri:
            with suppress(mlflow.MlflowException):  # deleted since: a new run is created
                stored = self._client.get_run(run.stored["id"])
                self._client.update_run(stored.info.run_id, status="RUNNING")
                self._id, known = stored.info.run_id, stored.data.params
                self.next_step = self._last_step(stored.data.metrics) + 1
        project = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        if not self._id:
            created = self._client.create_run(
                self._experiment(project),
                run_name=run.name,
                tags={"mlflow.source.name": "embodied-ppo", "run_dir": str(run.run_dir)},
            )
            self._id = created.info.run_id
        self.identity = {"id": self._id, "uri": uri}
        param = mlflow.entities.Param
        fresh = [param(path, value) for path, value in params.items() if path not in known]
        for i in range(0, len(fresh), 100):  # the limit of a request
            self._client.log_batch(self._id, params=fresh[i : i + 100])
        for path, value in params.items():
            if known.get(path, value) != value:  # a parameter cannot change, a tag can
                self._client.set_tag(self._id, path, value)
        return f"run {self._id} of experiment {project} in {uri}"

    def rows(self, rows: Sequence[Row]) -> None:
        points = [
            (tag, value, row.time_s, row.steps) for row in rows for tag, value in row.values.items()
        ]
        self._log(points)

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], steps: int) -> None:
        text = json.dumps([{k: _plain(v) for k, v in row.items()} for row in rows], indent=1)
        self._client.log_text(self._id, text, f"{tag}/step_{steps:012d}.json")

    def video(self, tag: str, path: Path, steps: int) -> None:
        self._client.log_artifact(self._id, str(path), f"{tag}/step_{steps:012d}")

    def summary(self, values: Mapping[str, float | str], steps: int) -> None:
        now = time.time()
        self._log([(k, v, now, steps) for k, v in values.items() if not isinstance(v, str)])
        for name, value in values.items():
            if isinstance(value, str):
                self._client.set_tag(self._id, name, value)

    def finish(self, status: Status) -> None:
        names = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, names[status])

    def abandon(self) -> None:
        return

    def _log(self, points: Sequence[tuple[str, float, float, int]]) -> None:
        """Store points (tag, value, Unix seconds, step)."""
        metric = self._mlflow.entities.Metric
        metrics = [
            metric(_mlflow_name(tag), value, int(seconds * 1000), step)
            for tag, value, seconds, step in points
        ]
        for i in range(0, len(metrics), 1000):  # the limit of a request
            self._client.log_batch(self._id, metrics=metrics[i : i + 1000])

    def _experiment(self, name: str) -> str:
        """Return the id of an experiment, which is created where it does not exist."""
        if (experiment := self._client.get_experiment_by_name(name)) is None:
            try:
                return self._client.create_experiment(name)
            except self._mlflow.MlflowException:  # another run has just created it
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return experiment.experiment_id

    def _last_step(self, metrics: Mapping[str, float]) -> int:
        """Return the last step of a run that has these metrics; -1 without any."""
        # Every row has one of these tags.
        tags = ("speed/env_steps_per_s", "speed/tokens_per_s", "eval/return")
        history = [
            point
            for tag in tags
            if tag in metrics
            for point in self._client.get_metric_history(self._id, tag)
        ]
        return max((point.step for point in history), default=-1)


TOOLS: Mapping[str, Callable[[], Tracker]] = {"wandb": WandbTracker, "mlflow": MlflowTracker}
"""Values of the option ``trackers`` -> class."""


# ------------------------------------------------------------------------------------- before a run
def check(config: Config) -> None:
    """Check that the tools of the option ``trackers`` can be used. Loads neither them nor torch.

    Raises:
        ConfigError: A package or an API key is missing, or a store is not supported.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    for tool in config.trackers:
        modules = {"wandb": "wandb"} if tool == "wandb" else {"mlflow": "mlflow-skinny"}
        if tool == "mlflow" and urlparse(uri).scheme not in ("http", "https", "databricks"):
            modules |= {"sqlalchemy": "sqlalchemy", "alembic": "alembic"}
        missing = [package for module, package in modules.items() if not _is_installed(module)]
        if missing:
            raise ConfigError(
                f"trackers = {show(config.trackers)}: {' and '.join(missing)} not installed; pip"
                f" install {' '.join(missing)}, or leave {tool} out"
            )
    if "mlflow" in config.trackers and uri and urlparse(uri).scheme in ("", "file"):
        if os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
            raise ConfigError(
                f"MLFLOW_TRACKING_URI = {uri}: MLflow writes no runs into folders any more; write"
                " MLFLOW_TRACKING_URI=sqlite:///mlflow.db, or set MLFLOW_ALLOW_FILE_STORE=true"
            )
    if "wandb" in config.trackers and not _wandb_can_start():
        raise ConfigError(
            f"trackers = {show(config.trackers)}: wandb has no API key; run `wandb login`, or write"
            " WANDB_MODE=offline before the command, or leave wandb out"
        )


def _is_installed(module: str) -> bool:
    """Return whether a module can be imported. A folder of that name, wandb/, is no module."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None


def _wandb_can_start() -> bool:
    """Return whether wandb is offline or has an API key. Without one it would ask for it."""
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    default = Path.home() / ".netrc"
    files = [Path(os.environ.get("NETRC", default)), default.with_name("_netrc")]
    server = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    for file in files:
        with suppress(OSError, netrc.NetrcParseError):
            hosts = netrc.netrc(file).hosts
            if server in hosts or any("wandb" in host for host in hosts):
                return True
    # Few users have the key or the mode in a settings file: wandb has to read it.
    import wandb  # pyright: ignore[reportMissingImports]

    try:
        settings = wandb.setup().settings
        return settings.mode not in ("online", "shared") or bool(settings.api_key)
    finally:
        wandb.teardown()


# ------------------------------------------------------------------------------------- during a run
class Trackers:
    """The trackers of one run; without any, the methods do nothing."""

    def __init__(self, workers: Sequence[_Worker] = ()) -> None:
        self._workers = workers

    def metrics(self, values: Mapping[str, float], *, steps: int) -> None:
        """Store the scalars of a step; all of them are finite."""
        row = Row(steps, time.time(), dict(values))
        for worker in self._workers:
            worker.put(row)

    def table(self, tag: str, rows: Sequence[Mapping[str, Any]], *, steps: int) -> None:
        """Store rows with equal keys."""
        for worker in self._workers:
            worker.put(lambda tracker: tracker.table(tag, rows, steps))

    def video(self, tag: str, path: str | Path, *, steps: int) -> None:
        """Store an mp4."""
        for worker in self._workers:
            worker.put(lambda tracker: tracker.video(tag, Path(path), steps))

    def summary(self, summary: Mapping[str, Any], *, steps: int) -> None:
        """Store the numbers and texts of a summary."""
        values = {
            name: value
            for name, value in summary.items()
            if isinstance(value, int | float | str) and not isinstance(value, bool)
        }
        for worker in self._workers:
            worker.put(lambda tracker: tracker.summary(values, steps))

    def close(self, status: Status) -> None:
        """End the tracked runs; wait until everything is sent, at most CLOSE_S."""
        began = time.monotonic()
        for worker in self._workers:
            worker.put(status)
        for worker in self._workers:
            worker.join(began)


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
        resumed: Whether the run continues the one in ``run_dir``; its tracked runs then go on, too.
    """
    stored = _read(run_dir) if resumed else {}
    lock = threading.Lock()
    workers = [
        _Worker(
            TOOLS[tool](),
            TrackedRun(
                run_dir,
                config.tracker_project,
                config.tracker_run_name,
                config.name,
                options,
                stored.get(tool, {}),
            ),
            say,
            lock,
        )
        for tool in config.trackers
    ]
    deadline = time.monotonic() + START_S
    for worker in workers:
        worker.started.wait(max(0.0, deadline - time.monotonic()))
    return Trackers(workers)


class _Worker:
    """Calls a tracker in a thread of its own, in order; its first failure ends the thread."""

    def __init__(
        self, tracker: Tracker, run: TrackedRun, say: Callable[[str], None], lock: threading.Lock
    ) -> None:
        """Start the tracker; ``lock`` guards the file of the ids."""
        self._tracker, self._run, self._lock = tracker, run, lock
        self._say: Callable[[str], None] | None = say
        self._queue: queue.Queue[Row | Status | Callable[[Tracker], None]] = queue.Queue()
        self.started = threading.Event()
        """Set when the tracker has started or failed."""
        self._on = True
        name = f"tracker-{tracker.title}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Row | Status | Callable[[Tracker], None]) -> None:
        """Add a row, a call, or the end of the run."""
        if self._queue.qsize() >= MAX_PENDING and self._on:
            self._switch_off(f"does not answer, {MAX_PENDING} updates wait for it")
        if self._on:
            self._queue.put(item)

    def join(self, began: float) -> None:
        """Wait for the end of the thread; ``began``: when the run ended, ``time.monotonic``."""
        if not self._on:
            return
        self.started.wait(max(0.0, began + START_S - time.monotonic()))
        limit_s = CLOSE_S if self.started.is_set() else START_S
        self._thread.join(max(0.0, began + limit_s - time.monotonic()))
        if self._thread.is_alive() and self._on:
            self._switch_off(f"does not answer for {limit_s:g} s at the end of the run")
        self._say = None

    def _switch_off(self, cause: str) -> None:
        self._on = False
        self._report(
            shorten(f"warning: {self._tracker.title} is off: {cause}", 250)
            + "; the files of the run are complete"
        )

    def _report(self, line: str) -> None:
        if (say := self._say) is not None:
            say(line)

    def _work(self) -> None:
        """Run the thread."""
        try:
            place = self._tracker.start(self._run)
            _store(self._run.run_dir, self._tracker, self._lock)
            if self._on:
                self._report(f"{self._tracker.title}: {place}")
            self.started.set()
            # Rows are sent together: several in one request cost little more than one.
            rows: list[Row] = []
            due = 0.0
            while self._on:
                item = self._next(due - time.monotonic() if rows else None)
                if isinstance(item, Row):
                    due = due if rows else time.monotonic() + BATCH_S
                    rows.append(item)
                    continue
                self._send(rows)
                rows = []
                if callable(item):
                    item(self._tracker)
                elif item is not None:
                    return self._tracker.finish(item)
        except Exception as error:  # of any library: training does not depend on it
            if self._on:
                cause = str(error).strip().partition("\n")[0]
                self._switch_off(f"{type(error).__name__}: {cause}")
            with suppress(Exception):
                self._tracker.abandon()
        finally:
            self.started.set()

    def _next(self, timeout_s: float | None) -> Row | Status | Callable[[Tracker], None] | None:
        """Return the next item; None: the time has passed. Without a time, wait for an item."""
        if timeout_s is not None and timeout_s <= 0:
            return None
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _send(self, rows: Sequence[Row]) -> None:
        """Send rows except those that the tool has from before a resume or a rebuild."""
        fresh = []
        for row in rows:
            if row.steps >= self._tracker.next_step:
                self._tracker.next_step = row.steps + 1
                fresh.append(row)
        if fresh:
            self._tracker.rows(fresh)


# -------------------------------------------------------------------------------------------- files
def _read(run_dir: Path) -> dict[str, dict[str, str]]:
    """Return tracker -> what identifies its run; empty where the file is missing or damaged."""
    try:
        content = json.loads((run_dir / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _store(run_dir: Path, tracker: Tracker, lock: threading.Lock) -> None:
    """Write what identifies the run of ``tracker``."""
    with lock:
        content = {**_read(run_dir), tracker.title: dict(tracker.identity)}
        temporary = run_dir / f"{FILE}.new"
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(run_dir / FILE)


def _plain(value: Any) -> Any:
    """Return numbers and texts unchanged, others as text."""
    return value if value is None or isinstance(value, int | float | str) else str(value)


def _mlflow_name(name: str) -> str:
    """Replace the characters that MLflow does not allow in names, such as @ and +, by _."""
    return re.sub(r"[^\w./ :-]", "_", name, flags=re.ASCII)[:250]
