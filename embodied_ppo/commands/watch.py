"""`embodied-ppo watch`: serve a local page that shows runs while they train.

Example: watch runs/NAME --port 8000
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from embodied_ppo.commands import arguments, output
from embodied_ppo.tools.watch_server import listen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    runs = "run directories, or folders of runs (default: runs)"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=runs)
    arguments.add_port(parser)
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
