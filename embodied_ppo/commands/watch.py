"""`embodied-ppo watch`: serve a local page that shows runs. The server writes no files."""

from __future__ import annotations

import argparse
import base64
import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import sys
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

import yaml

from embodied_ppo.commands import arguments, output
from embodied_ppo.config import loader
from embodied_ppo.core.errors import UsageError, one_line, show
from embodied_ppo.training import health
from embodied_ppo.training.run_files import METRICS, PARENT, find_runs, parse_parent

HOST = "127.0.0.1"
BLOCK_SIZE = 4 << 20
"""Bytes of metrics.jsonl in one response; a longer line is skipped."""

MAX_FILE_SIZE = 1 << 18
"""Largest size of a config.yaml or summary.json that is read, bytes; usual are a few thousand."""

NOTE_LENGTH = 600
"""Characters of a message from log.txt that the page shows."""

MARK_SIZE = 1024
"""Bytes before a position whose digest identifies the file that was read."""

TAIL_SIZE = 1 << 18
"""Bytes at the end of metrics.jsonl and log.txt from which the state of a run is derived."""

SILENT_S = 60.0
"""A run that has written nothing for this long, and for three updates, is silent; seconds."""

RUN_OPTIONS = ("run_dir", "resume")
"""Options that differ between any two runs."""

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".json": "application/json",
    ".mp4": "video/mp4",
}
SERVED = re.compile(r"(videos|reports/[^/.][^/\0]*)/[^/.][^/\0]*\.(html|json|mp4)")
"""Files of a run that the server sends."""

REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:; sandbox"
)
"""Content-Security-Policy of a report, which is one file without scripts."""


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
            "rows": stamps[METRICS],
            "config": stamps["config.yaml"],
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        # A file is deleted or damaged.
        return {"state": "unreadable", "note": one_line(error, kind=True), "health": []}


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
        try:
            text = _text(folder / PARENT)
            parent = None if text is None else parse_parent(text)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged
            parent = None
        path = None if parent is None else parent.path(folder)
        found[run] = parent and {
            "run": None if path is None else names.get(path),
            "name": Path(parent.run).name,
            "update": parent.update,
            "options": [[name, show(a), show(b)] for name, (a, b) in parent.options.items()],
        }
    return found


def _changed(file: Path) -> tuple[int, int]:
    """Return (time of change in ns, size in bytes) of a file or link; zeros without one."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _open(file: Path) -> BinaryIO:
    """Open a regular file.

    Raises:
        OSError: For a missing file, a link, which could lead out of the run, a pipe or a device.
    """
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for a writer.
        f = os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "is a link, which is not followed"
        raise
    if not stat.S_ISREG(os.fstat(f.fileno()).st_mode):
        f.close()
        raise OSError(errno.EINVAL, "is not a regular file", str(file))
    return f


def _text(file: Path) -> str | None:
    """Return the text of a small file, None without one.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has more than MAX_FILE_SIZE bytes.
    """
    try:
        with _open(file) as f:
            text, file_size = f.read(MAX_FILE_SIZE + 1), os.fstat(f.fileno()).st_size
    except FileNotFoundError:
        return None
    if len(text) > MAX_FILE_SIZE:
        raise ValueError(
            f"{file}: has {file_size} bytes, more than {MAX_FILE_SIZE}, and is not read"
        )
    return text.decode("utf-8")


@lru_cache(maxsize=1000)
def _state(run: Path, stamps: tuple[tuple[int, int], ...]) -> Mapping[str, Any]:
    """Derive the state of a run from its files; cached until one of ``stamps`` changes."""
    rows = _rows(_tail(run / METRICS))[0]
    updates = [int(row["update"]) for row in rows if row.get("update") is not None]
    stamped = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (.*)$", re.M)
    lines = stamped.findall(_tail(run / "log.txt").decode(errors="replace"))
    totals = [int(x) for line in lines for x in re.findall(r", updates \d+ to (\d+), in ", line)]
    last = lines[-1] if lines else ""
    summary = _text(run / "summary.json")
    completed = None if summary is None else json.loads(summary)["updates"]
    update = max(updates, default=None)
    total = totals[-1] if totals else None
    durations = [sum(phases.values()) for row in rows if (phases := _phases(row))]
    if last.startswith("failed: "):
        state, note = "failed", last.removeprefix("failed: ")[:NOTE_LENGTH]
    elif last.startswith("interrupted"):
        state, note = "interrupted", last[:NOTE_LENGTH]
    elif completed is not None and (update or 0) >= completed >= (total or 0):
        state, note = "finished", ""
    else:
        state, note = "running", ""
    return {
        "state": state,
        "note": note,
        "update": update,
        "updates": completed if total is None else total,
        "update_s": median(durations or [0.0]),
        "health": [asdict(verdict) for verdict in health.judge(rows)],
    }


def _phases(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the phases of a row; time/swap_s is part of the others."""
    return {
        tag: x
        for tag, x in row.items()
        if tag.startswith("time/") and tag != "time/swap_s" and x is not None
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
    if not files:
        return None
    changed, file = max(files)
    return {"name": file.relative_to(run).as_posix(), "changed": changed}


def read_rows(file: Path, start: int, mark: str) -> dict[str, Any]:
    """Read the rows of a growing metrics.jsonl.

    A line of more than BLOCK_SIZE bytes is skipped, BLOCK_SIZE bytes at a time.

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
        broken: Number of lines that are not JSON, or skipped.
        more: Whether more can be read immediately.
    """
    with _open(file) as f:
        if start and _mark(f, start) != mark:
            start = 0
        f.seek(max(0, start - 1))
        # The previous response may have ended inside a long line.
        skipping = start > 0 and f.read(1) != b"\n"
        block = f.read(BLOCK_SIZE)
        more = len(block) == BLOCK_SIZE
        if more and b"\n" not in block:
            size, rows, broken = BLOCK_SIZE, [], 0 if skipping else 1
        else:
            size = block.rfind(b"\n") + 1
            begin = block.find(b"\n") + 1 if skipping else 0
            rows, broken = _rows(block[begin:size])
        end = start + size
        position = {"from": start, "next": end, "mark": _mark(f, end), "more": more}
        return position | {"rows": rows, "broken": broken}


def _mark(f: BinaryIO, end: int) -> str:
    """Return a digest of the bytes before ``end``; it differs if the file is shorter."""
    start = max(0, end - MARK_SIZE)
    f.seek(start)
    return hashlib.sha256(f.read(end - start)).hexdigest()[:16]


def _rows(block: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the rows (null: not finite), and the number of lines that are not rows."""
    rows, broken = [], 0
    for line in block.split(b"\n"):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            numbers = {tag: x for tag, x in row.items() if x is None or isinstance(x, (int, float))}
            rows.append({tag: _finite(x) for tag, x in numbers.items()})
        else:
            broken += 1
    return rows, broken


def _finite(x: float | None) -> float | None:
    """Return None for a number that is not finite; JSON allows 1e999 and integers of any size."""
    return x if x is None or abs(x) <= sys.float_info.max else None


def differences(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Return every option that differs between runs, with its values in the order of the runs.

    A value is null if the run does not read the option. A config.yaml that is not YAML gets one row
    and is left out of the comparison.
    """
    options: list[dict[str, str]] = []
    broken: dict[int, str] = {}
    for n, run in enumerate(runs):
        try:
            options.append(_options(run / "config.yaml"))
        except ValueError as error:
            options.append({})
            broken[n] = str(error)
    valid = [values for n, values in enumerate(options) if n not in broken]
    names = dict.fromkeys(name for values in options for name in values)
    rows = [
        {"option": name, "values": [values.get(name) for values in options]}
        for name in names
        if name not in RUN_OPTIONS and len({values.get(name) for values in valid}) > 1
    ]
    if broken:
        messages = [broken.get(n) for n in range(len(runs))]
        rows.append({"option": "config.yaml", "values": messages})
    return rows


def _options(file: Path) -> dict[str, str]:
    """Return dotted path -> value in the syntax of the command line; empty without a file.

    Raises:
        ValueError: The file cannot be read, or is not YAML.
    """
    try:
        text = _text(file)
        content = None if text is None else loader.plain_yaml(text)
    except OSError as error:
        raise ValueError(str(error.strerror)) from error
    except yaml.YAMLError as error:
        raise ValueError(f"is not YAML ({one_line(error)})") from error
    options = loader.flat(content if isinstance(content, dict) else {})
    return {name: show(value) for name, value in options.items()}


# --------------------------------------------------------------------------------------- server
class Server(ThreadingHTTPServer):
    """Server of the page of the runs below ``roots``, for this machine only."""

    daemon_threads = True

    def __init__(self, roots: Sequence[Path], port: int = 0) -> None:
        """Bind the port; 0 selects a free one. Raises OSError."""
        self.roots = tuple(roots)
        self.page = (Path(__file__).parent / "templates" / "watch.html").read_bytes()
        self.policy = (
            f"default-src 'none'; script-src {_digests(self.page, b'script')}; "
            f"style-src {_digests(self.page, b'style')}; connect-src 'self'; media-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        super().__init__((HOST, port), Handler)

    @property
    def address(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"


def _digests(page: bytes, kind: bytes) -> str:
    """Return the digests of the page's scripts or styles for its Content-Security-Policy."""
    texts = re.findall(rb"<%b>(.*?)</%b>" % (kind, kind), page, re.S)
    digests = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


class Refused(Exception):
    """A response with a status other than 200."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """Handle requests: /, /runs, /data?run&from&mark, /diff?run&run.., /file?run&name."""

    protocol_version = "HTTP/1.1"
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Respond to a request; errors are responses with one line of text."""
        try:
            self._respond()
        except Refused as refused:
            self._error(refused.status, str(refused))
        except ConnectionError:  # the browser has closed the connection, or seeks in a video
            self.close_connection = True
        except (OSError, ValueError) as error:  # a file is deleted or damaged
            self._error(HTTPStatus.INTERNAL_SERVER_ERROR, one_line(error))

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
                page, policy = self.server.page, self.server.policy
                self._send(HTTPStatus.OK, page, CONTENT_TYPES[".html"], policy=policy)
            case "/runs":
                runs = find_runs(self.server.roots)
                parents = branches(runs)
                rows = [
                    {"run": run, "label": label, "parent": parents[run], **status(runs[run])}
                    for run, label in labels(list(runs)).items()
                ]
                self._json({"runs": rows, "ranges": [asdict(r) for r in health.RANGES]})
            case "/data":
                (run,) = self._runs(query, 1)
                start, mark = query.get("from", ["0"])[0], query.get("mark", [""])[0]
                if not re.fullmatch(r"[0-9]{1,18}", start):
                    message = f"from={start[:30]}: is not a number of bytes"
                    raise Refused(HTTPStatus.BAD_REQUEST, message)
                self._json(read_rows(run / METRICS, int(start), mark))
            case "/diff":
                self._json(differences(self._runs(query)))
            case "/file":
                (run,) = self._runs(query, 1)
                self._file(run, query.get("name", [""])[0])
            case _:
                raise Refused(HTTPStatus.NOT_FOUND, f"{url.path}: no such page")

    def _runs(self, query: Mapping[str, list[str]], count: int | None = None) -> list[Path]:
        """Return the directories of the requested runs; ``count`` is their required number."""
        runs, names = find_runs(self.server.roots), query.get("run", [])
        if unknown := [name for name in names if name not in runs]:
            raise Refused(HTTPStatus.NOT_FOUND, f"run={unknown[0]}: is not watched here")
        if count is not None and len(names) != count:
            raise Refused(HTTPStatus.BAD_REQUEST, f"run is given {len(names)} times; give {count}")
        return [runs[name] for name in names]

    def _file(self, run: Path, name: str) -> None:
        """Send a video or a report of a run, or the requested range of it."""
        file = (run / name).resolve() if SERVED.fullmatch(name) else None
        # Links must not lead out of the run.
        if file is None or not file.is_relative_to(run.resolve()) or not file.is_file():
            raise Refused(HTTPStatus.NOT_FOUND, f"name={name}: is not a video or report of the run")
        with _open(file) as f:
            size = os.fstat(f.fileno()).st_size
            part = _parse_range(self.headers.get("Range", ""), size)
            status, headers = HTTPStatus.OK, {"Accept-Ranges": "bytes"}
            if part is not None:
                status = HTTPStatus.PARTIAL_CONTENT
                headers["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{size}"
            else:
                part = range(size)
            self._head(
                status, len(part), CONTENT_TYPES[file.suffix], policy=REPORT_POLICY, headers=headers
            )
            try:
                sent = self.connection.sendfile(f, part.start, len(part)) if part else 0
            except OSError:  # the headers have been sent, so the status cannot change
                sent = -1
            if sent != len(part):
                self.close_connection = True

    def _error(self, status: HTTPStatus, message: str) -> None:
        """Send a line of text."""
        self._send(status, message.encode(errors="replace"), "text/plain; charset=utf-8")

    def _json(self, value: Any) -> None:
        """Send a value as JSON."""
        self._send(HTTPStatus.OK, output.as_json(value).encode(), CONTENT_TYPES[".json"])

    def _send(
        self, status: HTTPStatus, body: bytes, kind: str, *, policy: str = "default-src 'none'"
    ) -> None:
        """Send a complete response."""
        self._head(status, len(body), kind, policy=policy)
        self.wfile.write(body)

    def _head(
        self, status: HTTPStatus, size: int, kind: str, *, policy: str, headers: Any = None
    ) -> None:
        """Send the headers of a response of ``size`` bytes."""
        self.send_response(status)
        common = {
            "Content-Type": kind,
            "Content-Length": str(size),
            "Content-Security-Policy": policy,
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in {**common, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


def _parse_range(header: str, size: int) -> range | None:
    """Parse a Range header (RFC 9110, section 14); None without one, or for several ranges."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header.strip())
    if not match or not (match[1] or match[2]):
        return None
    first, last = match.groups()
    if first:
        part = range(int(first), min(int(last) + 1, size) if last else size)
    else:
        part = range(max(0, size - int(last)), size)
    if not part:
        raise Refused(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"{header}: the file has {size} bytes"
        )
    return part


# -------------------------------------------------------------------------------------- the command
def listen(paths: Sequence[str], *, port: int = 0) -> Server:
    """Return a listening server for runs or folders of runs. Raises UsageError."""
    for path in paths:
        if not Path(path).is_dir():
            raise UsageError(
                f"{path}: no such directory; name a run, or a folder of runs (runs by default)"
            )
        if not find_runs([Path(path)]):
            raise UsageError(
                f"{path}: is not a run and contains none ({METRICS} is missing); name a run"
                " directory, or a folder of runs"
            )
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: is not from 0 to 65535; leave it out for a free port")
    try:
        return Server([Path(path) for path in paths], port)
    except OSError as error:
        occupied = error.errno == errno.EADDRINUSE
        reason = "is in use" if occupied else f"cannot be used ({error.strerror})"
        raise UsageError(
            f"--port {port}: {reason}; name another port, or leave it out for a free one"
        ) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="run directories, or folders of runs (default: runs)"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port of the page (default: a free one)"
    )
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    with (
        listen(args.runs or ["runs"], port=args.port) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        address = server.address
        print(output.as_json({"address": address}) if args.json else address, flush=True)
        if not args.quiet:
            print("Ctrl-C ends it", file=sys.stderr)
        server.serve_forever()
