"""Server of a local page that shows runs. It writes no files."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO
from urllib.parse import parse_qs, urlsplit

from embodied_envs.base.errors import one_line, show, show_path
from embodied_ppo.core import guarded_files
from embodied_ppo.core.errors import CheckpointError, UsageError
from embodied_ppo.core.tables import tables
from embodied_ppo.options import loader
from embodied_ppo.tools import generations_page
from embodied_ppo.training import generations, health, run_files
from embodied_ppo.training.run_files import MESSAGE, METRICS, find_runs

HOST = "127.0.0.1"
BLOCK_SIZE = 4 << 20  # bytes of metrics.jsonl in one response; a longer line is skipped

# Largest size of a config.yaml or summary.json that is read, bytes; usual are a few thousand.
MAX_FILE_SIZE = 1 << 18

NOTE_LENGTH = 600  # characters of a message from log.txt that the page shows

MARK_SIZE = 1024  # bytes before a position whose digest identifies the file that was read

# Bytes at the end of metrics.jsonl and log.txt from which the state of a run is derived.
TAIL_SIZE = 1 << 18

# A run that has written nothing for this long, and for three updates, is silent; seconds.
SILENT_S = 60.0

RUN_OPTIONS = ("run_dir", "resume")  # options that differ between any two runs

CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json"}
CONTENT_TYPES |= {".mp4": "video/mp4", ".txt": "text/plain; charset=utf-8"}
# Files of a run that the server sends.
SERVED = re.compile(r"(videos|reports/[^/.][^/\0]*)/[^/.][^/\0]*\.(html|json|mp4)")

# Content-Security-Policy of a report, which is one file without scripts.
REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; sandbox"
)


# Headers of every response.
HEADERS: dict[str, Any] = tables(__file__)["headers"]


# ----------------------------------------------------------------------------------------- runs
def labels(runs: Sequence[str]) -> dict[str, str]:
    """Return run -> label: its path without the common parent folders."""
    common = os.path.commonpath([str(Path(run).parent.parent) for run in runs]) if runs else ""
    return {run: os.path.relpath(run, common) for run in runs}


def status(run: Path) -> dict[str, Any]:
    """Return the state of a run.

    Returns:
        state: running, silent, finished, interrupted, failed or unreadable; ``note`` has details.
        update: Number of the newest row, of ``updates``; None if unknown.
        age_s: Seconds since the run wrote a file.
        health: Verdicts of ``health.judge``.
        video, report: Newest video and report, as arguments of /file.
        generations: Whether /generations has responses.
        rows, config: Time of change and size of metrics.jsonl and config.yaml.
    """
    names = (METRICS, "log.txt", "summary.json", "config.yaml")
    try:
        stamps = {name: _changed(run / name) for name in names}
        state = dict(_state(run, tuple(stamps.values())))
        age = time.time() - max(changed for changed, _ in stamps.values()) / 1e9
        if state["state"] == "running" and age > max(SILENT_S, 3 * state["update_s"]):
            state["state"] = "silent"
        return state | {
            "age_s": age,
            "video": _newest(run, "videos/*.mp4"),
            "report": _newest(run, "reports/*/report.html"),
            "generations": any((run / generations.FOLDER).glob("*.jsonl")),
            "rows": stamps[METRICS],
            "config": stamps["config.yaml"],
        }
    except Exception as error:  # a file is deleted or damaged, which must not hide other runs
        return {"state": "unreadable", "note": one_line(error)[:NOTE_LENGTH], "health": []}


def branches(runs: Mapping[str, Path]) -> dict[str, dict[str, Any] | None]:
    """Return run -> where it branches from another run; None for one that began by itself.

    Args:
        runs: Run, as the page names it -> directory.

    Returns:
        run: The other run, as the page names it; None if it is not watched.
        name: Name of its directory.
        update: Completed updates at the branch.
        options: [option, value in the other run, value in the branch], changed ones.
    """
    names = {folder.resolve(): run for run, folder in runs.items()}
    found: dict[str, dict[str, Any] | None] = {}
    for run, folder in runs.items():
        found[run] = None
        with contextlib.suppress(CheckpointError):  # damaged
            if parent := run_files.read_parent(folder, follow_links=False):
                path, options = parent.path(folder), parent.options.items()
                place = {"run": path and names.get(path), "name": Path(parent.run).name}
                changed = [[name, show(a), show(b)] for name, (a, b) in options]
                found[run] = {**place, "update": parent.update, "options": changed}
    return found


def _changed(file: Path) -> tuple[int, int]:
    """Return (time of change in ns, size in bytes) of a file or link; zeros without one."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _open(file: Path) -> BinaryIO:
    """Open a regular file. A link could lead out of the run. Raises OSError."""
    return guarded_files.open_regular(file, follow_links=False)


@lru_cache(maxsize=1000)
def _state(run: Path, stamps: tuple[tuple[int, int], ...]) -> Mapping[str, Any]:
    """Derive the state of a run from its files; cached until one of ``stamps`` changes."""
    rows = _rows(_tail(run / METRICS))[0]
    lines = MESSAGE.findall(_tail(run / "log.txt").decode(errors="replace"))
    totals = [int(x) for line in lines for x in re.findall(r", updates \d+ to (\d+), in ", line)]
    completed = None
    summary = run / "summary.json"
    limits, absent = {"limit": MAX_FILE_SIZE, "follow_links": False}, FileNotFoundError
    with guarded_files.refusing_damage(summary, "remove it"), contextlib.suppress(absent):
        completed = guarded_files.read_object(summary, {"updates": int}, **limits)["updates"]
    updates = [int(update) for row in rows if (update := row.get("update")) is not None]
    update = max(updates, default=None)
    total = totals[-1] if totals else None
    # time/swap_s is part of the other phases.
    phases = [
        sum(x for tag, x in row.items() if tag.startswith("time/") and tag != "time/swap_s" and x)
        for row in rows
    ]
    state, note = "running", ""
    for word in ("failed", "interrupted"):
        if lines and lines[-1].startswith(word):
            state, note = word, lines[-1].removeprefix(word)[:NOTE_LENGTH].lstrip(":; ")
    if total is None and (run / "import.json").exists():  # a policy that is not trained yet
        completed = completed or 0
    if state == "running" and completed is not None and (update or 0) >= completed >= (total or 0):
        state = "finished"
    return {
        "state": state,
        "note": note,
        "update": update,
        "updates": completed if total is None else total,
        "update_s": median([x for x in phases if x] or [0.0]),
        "health": [asdict(verdict) for verdict in health.judge(rows)],
    }


def _tail(file: Path) -> bytes:
    """Return the last complete lines of a file, about TAIL_SIZE bytes; empty without a file."""
    try:
        with _open(file) as f:
            start = max(0, os.fstat(f.fileno()).st_size - TAIL_SIZE)
            f.seek(start)
            block = f.read(TAIL_SIZE)
    except FileNotFoundError:
        return b""
    return block.partition(b"\n")[2] if start else block


def _newest(run: Path, pattern: str) -> dict[str, Any] | None:
    """Return name and time of change of the newest file that matches a pattern."""
    files = [(file.stat().st_mtime_ns, file) for file in run.glob(pattern) if file.is_file()]
    changed, file = max(files, default=(0, None))
    return file and {"name": file.relative_to(run).as_posix(), "changed": changed}


def read_rows(file: Path, start: int, mark: str) -> dict[str, Any]:
    """Read the rows of a growing metrics.jsonl.

    Args:
        file: The metrics.jsonl of a run.
        start: First byte, the ``next`` of the previous response.
        mark: The ``mark`` of the previous response, a digest of the bytes before ``start``. If
            they have changed because a resumed run dropped rows or the run started again, reading
            restarts at 0.

    Returns:
        from, next: The bytes [from, next) were read; they end with a complete line.
        mark: Digest of the bytes before ``next``.
        rows: The rows.
        broken: Number of lines that are not rows.
        more: Whether more can be read immediately.
    """
    with _open(file) as f:
        if start and (start > os.fstat(f.fileno()).st_size or _mark(f, start) != mark):
            start = 0
        f.seek(start)
        block = f.read(BLOCK_SIZE)
        more = len(block) == BLOCK_SIZE
        # A block without a line break is part of a line that is too long to be a row.
        size = block.rfind(b"\n") + 1 or (BLOCK_SIZE if more else 0)
        rows, broken = _rows(block[:size])
        position = {"from": start, "next": start + size, "mark": _mark(f, start + size)}
        return position | {"more": more, "rows": rows, "broken": broken}


def _mark(f: BinaryIO, end: int) -> str:
    """Return a digest of the bytes before ``end``; it differs if the file is shorter."""
    start = max(0, end - MARK_SIZE)
    f.seek(start)
    return hashlib.sha256(f.read(end - start)).hexdigest()[:16]


def _rows(block: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the rows (null: not finite), and the number of lines that are not rows."""
    rows, broken = [], 0
    for line in filter(None, block.split(b"\n")):
        try:
            rows.append(guarded_files.parse_row(line))
        except ValueError:
            broken += 1
    return rows, broken


def differences(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return every option that differs between runs, with its values in the order of the runs.

    A value is null if the run does not read the option. A damaged config.yaml is not compared.
    """
    options: list[dict[str, str]] = []
    for run in runs:
        content: Any = None
        with contextlib.suppress(OSError, ValueError):
            content = loader.read_yaml(run / "config.yaml", limit=MAX_FILE_SIZE, follow_links=False)
        flat = loader.flat(content if isinstance(content, dict) else {})
        options.append({name: show(x) for name, x in flat.items() if name not in RUN_OPTIONS})
    return run_files.differing_options(options)


# --------------------------------------------------------------------------------------- server
class WatchServer(ThreadingHTTPServer):
    """Server of the page of the runs below ``roots``, for this machine only."""

    daemon_threads = True

    def __init__(self, roots: Sequence[Path], port: int = 0) -> None:
        """Bind the port; 0 selects a free one. Raises OSError."""
        self.roots = tuple(roots)
        self.page = (Path(__file__).parent / "templates" / "watch.html").read_bytes()
        # Only the page's own script runs: names from files cannot become code.
        script, style = (_digest(self.page, kind) for kind in (b"script", b"style"))
        self.policy = (
            f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self';"
            " media-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
            " frame-ancestors 'none'"
        )
        super().__init__((HOST, port), Handler)

    @property
    def address(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"


def _digest(page: bytes, kind: bytes) -> str:
    """Return the digests of the page's scripts or styles for its Content-Security-Policy."""
    texts = re.findall(rb"<%b>(.*?)</%b>" % (kind, kind), page, re.S)
    digests = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


class Refused(Exception):
    """A response with a status other than 200; the arguments are the status and a line."""


class Handler(BaseHTTPRequestHandler):
    """Handle requests: /, /runs, /data?run&from&mark, /diff?run&run..., /file?run&name,
    /generations?run&at&other&show&q&page.
    """

    protocol_version = "HTTP/1.1"
    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Respond to a request; errors are responses with one line of text."""
        try:
            self._respond()
        except Refused as refused:
            self._error(*refused.args)
        except ConnectionError:  # the browser has closed the connection, or seeks in a video
            self.close_connection = True
        except Exception as error:  # a file is deleted or damaged
            self._error(HTTPStatus.INTERNAL_SERVER_ERROR, one_line(error)[:NOTE_LENGTH])

    def _respond(self) -> None:
        """Send the response to a request. Raises Refused, OSError, ValueError."""
        header = self.headers.get("Host", "")
        # Another host name may resolve to this machine (DNS rebinding).
        if (header.rpartition(":")[0] or header) not in (HOST, "localhost"):
            raise Refused(HTTPStatus.FORBIDDEN, f"this page is {self.server.address}")
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        match url.path:
            case "/":
                self._send(self.server.page, ".html", self.server.policy)
            case "/runs":
                runs = find_runs(self.server.roots)
                parents = branches(runs)
                rows = [
                    {"run": run, "label": label, "parent": parents[run], **status(runs[run])}
                    for run, label in labels(list(runs)).items()
                ]
                self._json({"runs": rows, "ranges": [asdict(r) for r in health.RANGES]})
            case "/data":
                run = self._runs(query)[0]
                start, mark = query.get("from", ["0"])[0], query.get("mark", [""])[0]
                if not re.fullmatch(r"\d{1,18}", start, re.ASCII):
                    message = f"from={show_path(start)}: write a whole number of bytes"
                    raise Refused(HTTPStatus.BAD_REQUEST, message)
                self._json(read_rows(run / METRICS, int(start), mark))
            case "/diff":
                self._json(differences(self._runs(query)))
            case "/generations":
                run = self._runs(query)[0]
                page = generations_page.render(query["run"][0], run.name, run, query).encode()
                policy = f"default-src 'none'; style-src {_digest(page, b'style')}; img-src data:;"
                policy += " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
                self._send(page, ".html", policy)
            case "/file":
                self._file(self._runs(query)[0], query.get("name", [""])[0])
            case _:
                raise Refused(HTTPStatus.NOT_FOUND, f"{url.path}: no such page")

    def _runs(self, query: Mapping[str, list[str]]) -> list[Path]:
        """Return the directories of the requested runs, each once, at least one."""
        runs, names = find_runs(self.server.roots), dict.fromkeys(query.get("run", ["(none)"]))
        if unknown := [name for name in names if name not in runs]:
            raise Refused(HTTPStatus.NOT_FOUND, f"run={show_path(unknown[0])}: is not watched here")
        return [runs[name] for name in names]

    def _file(self, run: Path, name: str) -> None:
        """Send a video or a report of a run, or the requested range of it."""
        file = None
        with contextlib.suppress(OSError, RuntimeError):  # missing, too long, or a loop of links
            file = (run / name).resolve(strict=True) if SERVED.fullmatch(name) else None
        # Links must not lead out of the run.
        if file is None or not file.is_relative_to(run.resolve()) or not file.is_file():
            message = f"name={show_path(name)}: is not a video or report of the run"
            raise Refused(HTTPStatus.NOT_FOUND, message)
        with _open(file) as f:
            size = os.fstat(f.fileno()).st_size
            # A browser seeks in a video by requesting a part of the file.
            part = _parse_range(self.headers.get("Range", ""), size)
            status, headers = HTTPStatus.OK, {"Accept-Ranges": "bytes"}
            if part:
                status = HTTPStatus.PARTIAL_CONTENT
                headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
            part = part or range(size)
            self._head(status, len(part), CONTENT_TYPES[file.suffix], REPORT_POLICY, **headers)
            sent = self.connection.sendfile(f, part.start, len(part)) if part else 0
            if sent != len(part):  # the file was shortened after its size was sent
                self.close_connection = True

    def _error(self, status: HTTPStatus, message: str) -> None:
        """Send a line of text."""
        self._send(message.encode(errors="replace"), ".txt", status=status)

    def _json(self, value: Any) -> None:
        """Send a value as JSON."""
        self._send(guarded_files.as_json(value).encode(), ".json")

    def _send(
        self, body: bytes, suffix: str, policy: str = "default-src 'none'", status: int = 200
    ) -> None:
        """Send a complete response."""
        self._head(status, len(body), CONTENT_TYPES[suffix], policy)
        self.wfile.write(body)

    def _head(self, status: int, size: int, kind: str, policy: str, **more: str) -> None:
        """Send the headers of a response of ``size`` bytes."""
        self.send_response(status)
        own = {"Content-Type": kind, "Content-Length": str(size), "Content-Security-Policy": policy}
        for name, value in {**own, **HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def _parse_range(header: str, size: int) -> range | None:
    """Return the bytes of a header "bytes=FIRST-[LAST]"; None for others, which may be ignored."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", header.strip())
    if match is None:
        return None
    return range(int(match[1]), min(int(match[2]) + 1, size) if match[2] else size)


def listen(paths: Sequence[str], *, port: int = 0) -> WatchServer:
    """Return a listening server for runs or folders of runs. Raises UsageError."""
    for path in paths:
        if not find_runs([Path(path)]):
            raise UsageError(
                f"{path}: is not a run and contains none (no {METRICS}); name a run directory, or"
                " a folder of runs (runs by default)"
            )
    try:
        return WatchServer([Path(path) for path in paths], port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--port {port}: cannot be used ({one_line(error)}); name another port, or remove it"
            " for a free one"
        ) from error
