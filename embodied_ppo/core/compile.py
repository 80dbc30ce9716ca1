"""Tensor functions compiled ahead of time into a shared library (torch's AOTInductor), kept on disk
between runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import embodied_ppo
from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import TrainingError

Function: TypeAlias = "Callable[[list[Tensor]], list[Tensor]]"
"""A loaded library: the program's tensors in, its results out."""

DEADLINE_S = 900.0
"""Time limit of one compilation, seconds; a small network takes 15 to 40 s on one core."""
PARENT_CHECK_S = 0.5
"""Interval at which a compiling process checks that its run is alive, seconds."""
LEFTOVER_S = 4 * DEADLINE_S
"""Age after which files of an unfinished compilation belong to no process, seconds."""


def cache_folder() -> Path:
    """Return the folder of libraries: $EMBODIED_PPO_CACHE, else embodied_ppo in the user's cache
    directory.
    """
    if named := os.environ.get("EMBODIED_PPO_CACHE"):
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied_ppo"


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _libraries() -> Path:
    """Return the folder of libraries; create it if necessary.

    Raises RuntimeError where other users can write to it, because libraries run as code.
    """
    folder = cache_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid():
        raise RuntimeError(
            f"{folder} is another user's (uid {status.st_uid}); EMBODIED_PPO_CACHE names another"
            " directory"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"others can write in {folder} (mode {status.st_mode & 0o777:o}), and what is there"
            " runs: chmod go-w"
        )
    return folder


def unavailable_reason() -> str:
    """Return the reason why nothing can be compiled on this machine; "" if there is none."""
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler ({_compiler()} is not on the path; Debian: apt-get install g++)"
    try:
        with tempfile.TemporaryFile(dir=_libraries()):
            return ""
    except RuntimeError as error:
        return str(error)
    except OSError as error:
        return (
            f"{cache_folder()} cannot be written ({error.strerror}; EMBODIED_PPO_CACHE names"
            " another directory)"
        )


def fingerprint(program: Any, example: Sequence[Tensor]) -> str:
    """Return 20 hex digits of everything a library depends on: sources, torch, processor, model,
    options, shapes.
    """
    digest = hashlib.sha256()
    package = Path(embodied_ppo.__file__).parent
    sources = {*package.rglob("*.py")}
    parts = {name: value for name, value in vars(program).items() if isinstance(value, nn.Module)}
    modules = dict(pair for part, value in parts.items() for pair in _all_modules(part, value))
    for kind in {type(m) for m in modules.values()}:
        if not kind.__module__.startswith("torch."):
            sources.add(Path(inspect.getsourcefile(kind) or package / "types.py"))
    for path in sorted(sources):
        digest.update(path.read_bytes())
    words = [
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
        sys.version,
        type(program).__qualname__,
    ]
    words += [
        _compiler(),
        repr(OPTIONS),
        repr({k: v for k, v in vars(program).items() if k not in parts}),
    ]
    for name, m in modules.items():  # not repr(m): it may contain counters of the module
        words.append(
            f"{name} {type(m).__qualname__}"
            f" { {k: v for k, v in vars(m).items() if not k.startswith('_')} }"
        )
    words += [f"{x.dtype}{tuple(x.shape)}{x.stride()}{x.device}" for x in example]
    digest.update("\n".join(words).encode())
    return digest.hexdigest()[:20]


def _all_modules(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by name, those held outside the module tree (``causal_lm.ModuleReference``)
    included.
    """
    for inner, m in module.named_modules(prefix=name):
        yield inner, m
        for attribute, value in vars(m).items():
            if isinstance(aside := getattr(value, "module", None), nn.Module):
                yield from _all_modules(f"{inner}.{attribute}", aside)


OPTIONS = {"cpp.use_decompose_tanh": True}
"""Of torch's compiler. tanh x = 2 / (1 + exp(-2x)) - 1 is four times faster and within 2e-7 of it.
"""


def _checksum_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _intact(path: Path) -> bool:
    """Return whether a library exists and is what its compilation wrote."""
    try:
        return _checksum_file(path).read_text() == _checksum(path)
    except (OSError, UnicodeDecodeError):
        return False


def _remove_leftovers(*patterns: tuple[Path, str]) -> None:
    """Remove files and folders of compilations that were killed: those older than any compilation
    may last.
    """
    for folder, pattern in patterns:
        for path in folder.glob(pattern):
            with contextlib.suppress(
                OSError
            ):  # another process removes it, or it is another user's
                if time.time() - path.lstat().st_mtime < LEFTOVER_S:
                    continue
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()


def _load(path: Path) -> Function:
    # The public aoti_load_package imports all of inductor first: 2.5 s instead of 10 ms.
    return vars(torch._C)["_aoti"].AOTIModelPackageLoader(str(path), "model", False, 1, -1).run


class Library:
    """A compiled program; construction starts its compilation in another process unless the cache
    holds it.

    The program maps tensors to tensors without reading their values on the host; it may write into
    its arguments. Shapes, types and strides of the arguments must be those of the example.
    """

    def __init__(self, program: Callable[..., Any], example: Sequence[Tensor]) -> None:
        """Start the compilation.

        ``program`` must be picklable; ``example`` is read for shapes, types and strides.
        """
        self.path = _libraries() / f"{fingerprint(program, example)}.pt2"
        self._child: subprocess.Popen[bytes] | None = None
        self._errors = None
        self.work: tempfile.TemporaryDirectory[str] | None = None
        """Where it is compiled, while it is."""
        if _intact(self.path):
            return
        example = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in example
        ]
        request = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            request.write(pickle.dumps((program, example, str(self.path))))
        except (
            pickle.PicklingError,
            AttributeError,
            TypeError,
        ) as error:  # all three are pickle's way of refusing
            raise RuntimeError(f"pickle refuses the policy ({error})") from error
        request.seek(0)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path)
        }
        prefix, folder = "inductor-", cache_folder()
        if re.search(r"\s", str(folder)):  # torch hands it to the compiler without quotes
            prefix, folder = "embodied_ppo-inductor-", Path(tempfile.gettempdir())
        _remove_leftovers((folder, f"{prefix}*"), (self.path.parent, "*.*.pt2"))
        # of its own: torch packs what another compilation of the same code may be writing at that
        # moment
        self.work = tempfile.TemporaryDirectory(
            prefix=prefix, dir=folder, ignore_cleanup_errors=True
        )
        environment |= {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": self.work.name,
            "CXX": _compiler(),
        }
        environment["TMPDIR"] = (
            self.work.name
        )  # of the compiler, so that its files are removed, too
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            [
                *(sys.executable, "-c", f"import {__name__} as compiled; compiled._build_stdin()"),
                *(str(os.getpid()), self.work.name),
            ],
            stdin=request,
            stdout=self._errors,
            stderr=self._errors,
            env=environment,
            # a Ctrl-C is for the parent, which ends the child and its compiler
            start_new_session=True,
        )
        request.close()

    def load(self, deadline_s: float = DEADLINE_S) -> Function:
        """Wait, load and return the function.

        Raises RuntimeError with the reason where there is none.
        """
        if self._child is not None:
            try:
                code = self._child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                self.close()
                raise RuntimeError(f"not compiled after {deadline_s:g} s") from None
            self._clean()
            if code:
                why = self._last_words()
                if code < 0 and not why.startswith("TimeoutError"):
                    why = f"signal {-code}"
                raise RuntimeError(f"the compiler failed ({why})")
            self._child = None
        return _load(self.path)

    def is_compiling(self) -> bool:
        """Return whether the compilation is in progress."""
        return self._child is not None and self._child.poll() is None

    def close(self) -> None:
        """Stop a compilation in progress."""
        if self._child is not None and self.is_compiling():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        self._clean()

    def _clean(self) -> None:
        if self.work is not None:
            self.work.cleanup()
            self.work = None

    def _last_words(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = [
            line.strip()
            for line in self._errors.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return [*lines, *errors][-1] if lines else "without a word"


@dataclass(frozen=True)
class Example:
    """A program, the tensors it owns or changes (``state``: the same storage in every call), and
    other arguments.
    """

    program: Callable[..., Any]
    state: Sequence[Tensor]
    arguments: Sequence[Tensor]


class CudaGraph:
    """A program captured as one CUDA graph: a call is one launch, without Python or the host in
    between.
    """

    def __init__(self, example: Example) -> None:
        """Runs the program a few times to warm up; its state is as before afterwards."""
        kept = [x.clone() for x in example.state]
        self.arguments = [x.clone() for x in example.arguments]
        self.last: list[Tensor | None] = [None] * len(self.arguments)
        tensors = [*example.state, *self.arguments]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                example.program(*tensors)
            for x, old in zip(example.state, kept, strict=True):
                x.copy_(old)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            out = example.program(*tensors)
        self.results = [out] if isinstance(out, Tensor) else list(out)

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the results in new memory.

        An argument that is the same object as in the last call is not copied.
        """
        for i, x in enumerate(tensors[len(tensors) - len(self.arguments) :]):
            if x is not self.last[i]:
                self.arguments[i].copy_(x)
                self.last[i] = x
        self.graph.replay()
        return [x.clone() for x in self.results]


class CompileSchedule:
    """Switch a program to compiled code at a fixed update; on a GPU the code is a CUDA graph.

    The update is fixed so that no result depends on what the cache holds or how long the compiler
    takes.
    """

    waiting = 0
    """Number of schedules in this process that are waiting for their compiler."""

    def __init__(
        self,
        since: int | None,
        *,
        required: bool = False,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Create a schedule.

        Args:
            since: the first update that uses compiled code. None: never.
            required: whether a failure to compile is a TrainingError; otherwise ``notice`` receives
                the reason.
        """
        self.since, self.required, self.notice = since, required, notice
        self.captures = False
        """Whether the compiled function is a CUDA graph."""
        self._library: Library | None = None
        self._function: Function | None = None

    def get(self, update: int, make: Callable[[], Example]) -> Function | None:
        """Return the compiled function for ``update``, None before it is due.

        The first call starts the compilation of the example that ``make`` returns.
        """
        if self.since is None or self._function is not None:
            return self._function
        try:
            if self._library is None:
                example = make()
                if example.arguments[0].is_cuda:
                    if update >= self.since:
                        self._function, self.captures = CudaGraph(example), True
                    return self._function
                self._library = Library(example.program, [*example.state, *example.arguments])
            if update >= self.since:
                CompileSchedule.waiting += (
                    1  # before the notice: an interrupt in response to it must end the wait
                )
                try:
                    if self._library.is_compiling():
                        self.notice(
                            "compile: waiting for the compiler, once; the result stays in"
                            f" {cache_folder()}"
                        )
                    self._function = self._library.load()
                finally:
                    CompileSchedule.waiting -= 1
        except (RuntimeError, OSError) as error:
            if self.required:
                raise TrainingError(
                    f"compile=always: {one_line(error)}; mend it, or use compile=auto"
                ) from error
            self.notice(f"compile: {error}; training goes on without")
            self.since = None
        return self._function

    def close(self) -> None:
        if self._library is not None:
            self._library.close()


class _Program(nn.Module):
    """A graph as the module that torch.export needs."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, *tensors: Tensor) -> Any:
        return self.graph(*tensors)


def build(program: Callable[..., Any], example: Sequence[Tensor], path: Path) -> None:
    """Trace ``program`` (its backward pass included), compile it and write the library to
    ``path``.
    """
    import torch._inductor
    from torch.fx.experimental.proxy_tensor import make_fx

    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(
            lock, fcntl.LOCK_EX
        )  # of two runs that need the same library, the second loads it
        if _intact(path):
            return
        example = [
            torch.zeros_like(x, device="cpu") if x.device.type == "meta" else x for x in example
        ]
        graph = make_fx(program, tracing_mode="fake")(*example)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        with torch.no_grad():
            exported = torch.export.export(_Program(graph), tuple(example), strict=False)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(temporary), inductor_configs=OPTIONS
        )
        _load(temporary)  # a library that does not load is not kept
        # The checksum first: between the two lines the library counts as damaged, never the other
        # way round.
        _checksum_file(path).write_text(_checksum(temporary))
        temporary.replace(path)


def _end_with(parent: int, work: str) -> None:
    """End this process group when process ``parent`` is gone, or after ``DEADLINE_S``; runs in a
    thread.

    A signal at the parent's death would reach this process, but not the C++ compiler that it
    started.
    """
    deadline = time.monotonic() + DEADLINE_S
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(PARENT_CHECK_S)
    if os.getppid() == parent:
        print(f"TimeoutError: not compiled after {DEADLINE_S:g} s", file=sys.stderr, flush=True)
    else:
        shutil.rmtree(work, ignore_errors=True)  # the parent can no longer do it
    os.killpg(os.getpid(), signal.SIGKILL)


def _build_stdin() -> None:
    """Entry of the compiling process: arguments are the parent's process id and the work folder."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]), sys.argv[2]), daemon=True).start()
    os.nice(5)  # the parent trains meanwhile
    torch.set_num_threads(1)
    program, example, path = pickle.load(sys.stdin.buffer)
    build(program, example, Path(path))
