"""Start Ray workers of tests by forking a process that has imported torch and our package.

A Ray worker spends 3 s of CPU time on importing torch, EnvPool and our package, 8 s together with
transformers, and the tests start about 200 workers. After ``install`` the command of a worker is
``ray_fork_client.py``: it sends its arguments, environment, working directory and standard streams
to a server process, which forks. The forked process runs Ray's own worker program. Ray is not
imported before the fork, because its connections do not work after one. Tests in which
``embodied-ppo`` or ``ray start`` is a process of its own start workers without the server, as users
do.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray_fork_client
from ray_fork_client import ADDRESS

# The running server. It ends with its standard input, which a reference keeps open.
_servers = list[subprocess.Popen[bytes]]()
# Environment variable with a number of problems, to which workers reduce the task arithmetic.
PROBLEMS = "TESTS_ARITHMETIC_PROBLEMS"
# Modules that the server imports.
PRELOADED = (
    # What Ray imports, without Ray.
    "google.protobuf.internal.builder",
    "google.protobuf.json_format",
    "google.protobuf.timestamp_pb2",
    "jsonschema",
    "logging.handlers",
    "msgpack",
    "pdb",
    "pydantic.main",
    "requests",
    "yaml",
    "envpool",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.tokenization_utils_tokenizers",
    "embodied_ppo.programs.system",
)


def install() -> None:
    """Let ``ray.init`` start workers through the server, which the first call starts.

    Ray's processes that scale the cluster and forward logs are left out, which no test uses.
    """
    if ADDRESS in os.environ:
        return
    from ray._private.parameter import RayParams

    folder = tempfile.mkdtemp(prefix="ray_fork_server_")
    os.environ[ADDRESS] = f"{folder}/socket"
    server = subprocess.Popen(
        [sys.executable, __file__], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    _servers.append(server)
    assert server.stdout is not None and server.stdout.read(1) == b"."
    update_if_absent = RayParams.update_if_absent

    def with_client(self: Any, **values: Any) -> None:
        update_if_absent(self, **values)
        self.setup_worker_path = ray_fork_client.__file__
        self.no_monitor, self.include_log_monitor = True, False

    RayParams.update_if_absent = with_client


def small_arithmetic(problems: int) -> Any:
    """Return the task arithmetic with fewer problems.

    Its 10,000 prompts take half a second in each process.
    """
    from embodied_ppo.data.synthetic_tasks import TASKS

    return replace(TASKS["arithmetic"], train=problems * 9 // 10, held_out=problems // 10)


def serve() -> None:
    """Import what workers import, then fork a worker for each request until stdin is closed."""
    for module in PRELOADED:
        importlib.import_module(module)
    from embodied_ppo.evaluation import report
    from embodied_ppo.options import loader, schema

    loader.describe(schema.Config)  # the results of both functions are kept
    report.template("report.html.j2")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.environ[ADDRESS])
        server.listen(64)
        os.write(1, b".")
        while True:
            readable, _, _ = select.select([server, 0], [], [])
            if 0 in readable:
                shutil.rmtree(Path(os.environ[ADDRESS]).parent)
                return
            connection, _ = server.accept()
            header, streams, _, _ = socket.recv_fds(connection, 8, 3)
            content, length = b"", int.from_bytes(header, "big")
            while len(content) < length and (part := connection.recv(1 << 16)):
                content += part
            connection.close()
            # A client that was killed may have sent a part only.
            if header and len(content) == length and os.fork() == 0:
                server.close()
                _run_worker(*json.loads(content), streams)
            for stream in streams:
                os.close(stream)


def _reap() -> None:
    """Collect ended workers; tests look for their process ids."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _run_worker(
    arguments: list[str], environment: dict[str, str], folder: str, streams: list[int]
) -> None:
    """Run Ray's worker program in this process, and end it."""
    try:
        for name in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(name, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        if problems := environment.get(PROBLEMS):
            from embodied_ppo.data.synthetic_tasks import TASKS

            TASKS["arithmetic"] = small_arithmetic(int(problems))
        program = arguments[0]
        sys.argv = arguments
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    serve()
