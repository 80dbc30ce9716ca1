"""`embodied-ppo serve`: answer the requests of robots and simulators with a policy's actions.

Example: serve runs/NAME/DATE-SEED --port 8000
"""

from __future__ import annotations

import argparse
import importlib.util
import signal

from embodied_ppo.commands import arguments, output
from embodied_ppo.core.errors import UsageError

PACKAGES = ("msgpack", "websockets")
HOST, PORT = "127.0.0.1", 8000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", metavar="RUN", help="a run or a checkpoint")
    parser.add_argument("--host", default=HOST, help="address to listen on (default: %(default)s)")
    port = "port, 0: a free one (default: %(default)s)"
    parser.add_argument("--port", type=arguments.whole(0, 65535), default=PORT, help=port)
    renamed = "the client sends the policy's INPUT as NAME: --map observation/image=front"
    names = {"action": "append", "default": [], "metavar": "NAME=INPUT"}
    parser.add_argument("--map", **names, help=renamed)
    parser.add_argument("--device", default="cpu", help="auto, cpu, cuda, cuda:N (default: cpu)")
    arguments.add_output_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    arguments.check_run(args.run)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"pip install 'embodied-ppo[serve]': serve needs {' and '.join(missing)}")
    for text in args.map:
        if not all(text.partition("=")):
            raise UsageError(f"--map {text}: write NAME=INPUT")
    names = dict(text.split("=", 1) for text in args.map)
    if len({*names.values()}) < len(args.map):
        raise UsageError(f"write each NAME and each INPUT once: --map {' --map '.join(args.map)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with output.stdout_to_stderr():
        from embodied_envs import env_server
        from embodied_ppo.evaluation.trained_policy import load_policy
        from embodied_ppo.tools.deploy import policy_server
        from embodied_ppo.training.progress import Progress

        say = Progress(args.quiet).say
        policy = policy_server.Served(load_policy(args.run, device=args.device), names)
        server = policy_server.serve(policy, host=args.host, port=args.port, say=say)
        try:
            listening = server.__enter__()
        except OSError as error:
            raise UsageError(
                f"--port {args.port}: {args.host} cannot be listened on ({error.strerror or error})"
            ) from error
    host = f"[{args.host}]" if ":" in args.host else args.host
    address = f"ws://{host}:{listening.socket.getsockname()[1]}"
    details = {"address": address, **policy.metadata}
    print(output.as_json(details) if args.json else address, flush=True)
    for name, spec in policy.metadata["observations"].items():
        say(f"observation {name}: {spec['dtype']} {spec.get('shape', '')}")
    say(f"actions: {policy.metadata['actions']}; Ctrl-C ends it")
    env_server.serve_until_interrupt(listening)
    server.__exit__(None, None, None)
