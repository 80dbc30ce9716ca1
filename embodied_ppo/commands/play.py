"""`embodied-ppo play`: show a robot in the browser, drive and push it, and replay episodes."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError
from embodied_ppo.options.compose import FLAGS, override_lines, prepare

if TYPE_CHECKING:
    from embodied_ppo.tools.play_page import Page

AGENTS = ("trained", "zero", "random")
READ = ("seed", "deterministic", "temperature", "allow_changed_task", "threads")
"""Options of an evaluation that a shown run reads, besides those of section env."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "items",
        nargs="*",
        metavar="RUN | option=value",
        help="a run, a checkpoint or the folder of a report; then agent=trained|zero|random,"
        f" episode=N (the first one, default 0), and the options {', '.join(READ)} and env.* of"
        " `embodied-ppo config evaluate`. Without a run: options of train, such as env.id=TASK",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port of the page (default: a free one)"
    )
    parser.add_argument("--config-dir", metavar="DIR", help="folder of your own configs")
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    missing = [name for name in ("viser", "mjviser") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"pip install viser mjviser: play needs {' and '.join(missing)}")
    runs, lines = arguments.split_runs(args.items)
    own = dict(line.split("=", 1) for line in lines if line.startswith(("agent=", "episode=")))
    lines = [line for line in lines if not line.startswith(("agent=", "episode="))]
    if len(runs) > 1 or not (runs or lines):
        raise UsageError(
            f"{len(runs)} runs: write embodied-ppo play RUN, or, without a run, env.id=TASK"
        )
    agent = own.get("agent", "trained" if runs else "zero")
    if agent not in (AGENTS if runs else AGENTS[1:]):
        hint = "use trained, zero or random" if runs else "without a run use zero or random"
        raise UsageError(f"agent={agent}: {hint}")
    episode = arguments.whole_number(own, "episode", "play", "0")
    start = {"agent": agent, "episode": episode}
    page = _of_run(args, runs[0], lines, start) if runs else _of_task(args, lines, start)
    with output.stdout_to_stderr(), page as shown:
        _announce(args, shown.address)
        with contextlib.suppress(KeyboardInterrupt):
            shown.serve()


def _announce(args: argparse.Namespace, address: str) -> None:
    """Print the address of the page, and how to reach it from another machine."""
    text = output.as_json({"address": address}) if args.json else address
    print(text, file=sys.__stdout__, flush=True)
    if not args.quiet:
        port = address.rstrip("/").rpartition(":")[2]
        host = f"{os.environ.get('USER', 'USER')}@{socket.gethostname()}"
        print(
            f"over SSH: run on your machine: ssh -L {port}:127.0.0.1:{port} {host}\nCtrl-C ends it",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def _of_run(
    args: argparse.Namespace, path: str, lines: list[str], start: dict[str, Any]
) -> Iterator[Page]:
    """Yield the page of a run, a checkpoint or a report."""
    arguments.check_run(path)
    for line in lines:
        name = line.partition("=")[0].lstrip("+~")
        if name not in READ and not name.startswith("env."):
            raise UsageError(f"play ignores {name}; remove it: it reads {', '.join(READ)}, env.*")
    report: dict[str, Any] = {}
    if (Path(path) / "report.json").is_file():
        if lines:
            raise UsageError(f"remove {lines[0]}: a report is replayed with its own options")
        from embodied_ppo.tools.play_sources import options_of_report

        options, report = options_of_report(Path(path))
    else:
        given = [*override_lines("evaluate", {"checkpoint": path}), *lines]
        compose = argparse.Namespace(
            command="evaluate", config_name=None, config_dir=args.config_dir
        )
        options = prepare(compose, given, label=FLAGS).config
    from embodied_ppo.tools.play_page import Page
    from embodied_ppo.tools.play_sources import play_run

    with play_run(options, **start) as (player, weights):
        yield Page(
            player,
            title=f"{player.env.id}: {Path(path).name}",
            video_dir=weights.run_dir / "videos",
            port=args.port,
            weights=weights,
            episodes=report.get("episodes", ()),
        )


@contextlib.contextmanager
def _of_task(args: argparse.Namespace, lines: list[str], start: dict[str, Any]) -> Iterator[Page]:
    """Yield the page of a task without a policy."""
    compose = argparse.Namespace(command="train", config_name=None, config_dir=args.config_dir)
    config = prepare(compose, lines, check=False).config
    from embodied_ppo.tools.play_page import Page
    from embodied_ppo.tools.play_sources import play_task

    with play_task(config, **start) as player:
        yield Page(player, title=player.env.id, video_dir=Path(), port=args.port)
