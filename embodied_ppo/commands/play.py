"""`embodied-ppo play`: show a robot in the browser, drive and push it, and replay episodes.

Example: play runs/NAME/DATE-SEED agent=trained
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError
from embodied_ppo.options.compose import FLAGS, override_lines, prepare

if TYPE_CHECKING:
    from embodied_ppo.options.schema import EvaluateConfig
    from embodied_ppo.tools.play_sources import Player, Weights

AGENTS = ("trained", "zero", "random")
# Options of an evaluation that a shown run reads, besides those of section env.
READ = ("seed", "deterministic", "temperature", "allow_changed_task", "threads")


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
    arguments.add_port(parser)
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
        hint = "write embodied-ppo play RUN, or, without a run, env.id=TASK"
        raise UsageError(f"{len(runs)} runs: {hint}")
    agent = own.get("agent", "trained" if runs else "zero")
    if agent not in (AGENTS if runs else AGENTS[1:]):
        hint = "use trained, zero or random" if runs else "without a run use zero or random"
        raise UsageError(f"agent={agent}: {hint}")
    episode = arguments.whole_number(own, "episode", "play", "0")
    report: dict[str, Any] = {}
    opened: contextlib.AbstractContextManager[tuple[Player, Weights | None]]
    if runs:
        options, report = _evaluation(args, runs[0], lines)
        from embodied_ppo.tools.play_sources import play_run

        opened = play_run(options, agent, episode)
    else:
        compose = argparse.Namespace(command="train", config_name=None, config_dir=args.config_dir)
        config = prepare(compose, lines, check=False).config
        from embodied_ppo.tools.play_sources import play_task

        opened = play_task(config, agent, episode)
    with output.stdout_to_stderr(), opened as (player, weights):
        from embodied_ppo.tools.play_page import Page

        page = Page(
            player,
            title=": ".join([player.env.id, *(Path(run).name for run in runs)]),
            video_dir=Path() if weights is None else weights.run_dir / "videos",
            port=args.port,
            weights=weights,
            episodes=report.get("episodes", ()),
        )
        _announce(args, page.address)
        with contextlib.suppress(KeyboardInterrupt):
            page.serve()


def _announce(args: argparse.Namespace, address: str) -> None:
    """Print the address of the page, and how to reach it from another machine."""
    text = output.as_json({"address": address}) if args.json else address
    print(text, file=sys.__stdout__, flush=True)
    if not args.quiet:
        port = address.rstrip("/").rpartition(":")[2]
        host = f"{os.environ.get('USER', 'USER')}@{socket.gethostname()}"
        tunnel = f"ssh -L {port}:127.0.0.1:{port} {host}"
        hint = f"over SSH: run on your machine: {tunnel}\nCtrl-C ends it"
        print(hint, file=sys.stderr, flush=True)


def _evaluation(
    args: argparse.Namespace, path: str, lines: list[str]
) -> tuple[EvaluateConfig, dict[str, Any]]:
    """Return the options of the evaluation of a run, a checkpoint or a report; its report.json."""
    arguments.check_run(path)
    for line in lines:
        name = line.partition("=")[0].lstrip("+~")
        if name not in READ and not name.startswith("env."):
            raise UsageError(f"play ignores {name}; remove it: it reads {', '.join(READ)}, env.*")
    if (Path(path) / "report.json").is_file():
        if lines:
            raise UsageError(f"remove {lines[0]}: a report is replayed with its own options")
        from embodied_ppo.tools.play_sources import read_report

        return read_report(Path(path))
    given = [*override_lines("evaluate", {"checkpoint": path}), *lines]
    compose = argparse.Namespace(command="evaluate", config_name=None, config_dir=args.config_dir)
    return prepare(compose, given, label=FLAGS).config, {}
