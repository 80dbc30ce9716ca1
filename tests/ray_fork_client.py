"""Command of a Ray worker of tests: ask the server of ``ray_fork_server.py`` for a process.

It imports little, because it runs once for each worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys

# Environment variable with the server's Unix socket.
ADDRESS = "TESTS_RAY_FORK_SERVER"
# Options of Ray's start command that its worker program does not know.
OWN_OPTIONS = ("--serialized-runtime-env-context", "--language")


def request(arguments: list[str]) -> None:
    """Ask the server for a worker with these arguments."""
    arguments = [x for x in arguments if not x.startswith(OWN_OPTIONS)]
    content = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[ADDRESS])
        socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(content)


if __name__ == "__main__":
    request(sys.argv[1:])
