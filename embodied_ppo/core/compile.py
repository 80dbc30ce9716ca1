"""Ahead-of-time compilation of tensor functions with torch's AOTInductor.

The compiled libraries are cached on disk. On a GPU a function becomes a CUDA graph instead, see
``cuda_graph``.
"""

from __future__ import annotations

import contextlib
import ctypes
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
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from embodied_envs.base.errors import TrainingError, one_line
from embodied_ppo.core.cuda_graph import CudaGraph, Example, trace

# A loaded library: the program's tensors in, its results out.
Function: TypeAlias = "Callable[[list[Tensor]], list[Tensor]]"

COMPILER_VERSION_S = 20.0  # time limit of ``$CXX --version``, seconds
COMPILER_TIME_S = 120.0  # time limit for a small file of C++, seconds
# Time limit of one compilation, seconds; a small network takes 15 to 40 s on one core.
DEADLINE_S = 900.0
PARENT_CHECK_S = 0.5  # interval at which a compiling process checks that its run is alive, seconds


def cache_folder() -> Path:
    """Return $EMBODIED_PPO_CACHE, by default embodied_ppo in the user's cache directory."""
    if folder := os.environ.get("EMBODIED_PPO_CACHE"):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied_ppo"


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _libraries() -> Path:
    """Return the folder of libraries; create it if necessary.

    Raises RuntimeError if other users can write to it, because libraries run as code.
    """
    folder = cache_folder() / "compiled"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RuntimeError(
            f"set EMBODIED_PPO_CACHE to a directory of your own, or run chmod go-w: {folder} holds"
            f" code, and other users can write to it (uid {status.st_uid}, mode"
            f" {status.st_mode & 0o777:o})"
        )
    return folder


def unavailable_reason() -> str:
    """Return the reason why nothing can be compiled on this machine; "" if there is none."""
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler ({_compiler()} is not on the path; Debian: apt-get install g++)"
    try:
        command = [_compiler(), "--version"]
        subprocess.run(command, capture_output=True, check=True, timeout=COMPILER_VERSION_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"the C++ compiler does not run ({one_line(error)}); set CXX to another one"
    try:
        with tempfile.TemporaryFile(dir=_libraries()):
            return ""
    except RuntimeError as error:
        return str(error)
    except OSError as error:
        reason = f"{error.strerror}; set EMBODIED_PPO_CACHE to another directory"
        return f"{cache_folder()} cannot be written ({reason})"


def fingerprint(program: Any, example: Sequence[Tensor]) -> str:
    """Return 20 hex digits that identify a library.

    They depend on the sources, the versions of torch and Python, the processor, the compiler, the
    program with its modules and options, and the shapes, types and strides of its arguments.

    Args:
        program: The program; modules in its attributes count with their options.
        example: Arguments of the program.

    Raises:
        RuntimeError: The class of a module is defined in no file.
    """
    digest = hashlib.sha256()
    sources = {*Path(__file__).parents[1].rglob("*.py")}  # of embodied_ppo
    parts = {name: value for name, value in vars(program).items() if isinstance(value, nn.Module)}
    modules = dict(pair for part, value in parts.items() for pair in _all_modules(part, value))
    for kind in {type(m) for m in modules.values()}:
        if kind.__module__.startswith("torch."):
            continue
        try:
            sources.add(Path(inspect.getfile(kind)))
        except (TypeError, OSError) as error:  # a class of a module without a file
            raise RuntimeError(
                f"{kind.__qualname__} is defined in no file, so that a changed definition could not"
                " be detected; define it in a module"
            ) from error
    for path in sorted(sources):
        digest.update(path.read_bytes())
    entries = [
        *(torch.__version__, torch.backends.cpu.get_cpu_capability(), sys.version),
        *(type(program).__qualname__, _compiler(), repr(OPTIONS)),
        repr({k: v for k, v in vars(program).items() if k not in parts}),
    ]
    for name, m in modules.items():  # not repr(m): it may contain counters of the module
        public = {k: v for k, v in vars(m).items() if not k.startswith("_")}
        # A set has no fixed order.
        options = {k: sorted(v) if isinstance(v, set | frozenset) else v for k, v in public.items()}
        entries.append(f"{name} {type(m).__qualname__} {options}")
    entries += [f"{x.dtype}{tuple(x.shape)}{x.stride()}{x.device}" for x in example]
    digest.update("\n".join(entries).encode())
    return digest.hexdigest()[:20]


def _all_modules(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by name, including those of ``decoder.ModuleReference``."""
    for inner, m in module.named_modules(prefix=name):
        yield inner, m
        for attribute, value in vars(m).items():
            if isinstance(referenced := getattr(value, "module", None), nn.Module):
                yield from _all_modules(f"{inner}.{attribute}", referenced)


# tanh x = 2 / (1 + exp(-2x)) - 1 is four times faster than the default, and within 2e-7 of it.
OPTIONS = {"cpp.use_decompose_tanh": True}


_AOTI: Any = vars(torch._C)["_aoti"]
_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _load(path: Path) -> Function:
    """Load a package of torch's compiler, and return its function.

    The function does not hold Python's global interpreter lock while it runs, so that other threads
    can run. torch's own loader holds it. Only that loader can call operations without a C
    interface, so it is used if there are any.

    Returns:
        The function. It raises RuntimeError if a call fails.

    Raises:
        RuntimeError: The file is no such package.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if "/aotinductor/" in name]
            if any(name.endswith(".json") and "metadata" not in name for name in names):
                # The public aoti_load_package imports all of inductor first: 2.5 s, not 10 ms.
                return _AOTI.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run
            (library,) = (archive.read(name) for name in names if name.endswith(".so"))
        # A file with a new name for each library: the C library would return an earlier library
        # that was loaded from a path of the same name.
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(library)
            file.flush()
            functions = ctypes.CDLL(file.name)
        return CFunction(path, functions)
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        fact = f"{path}: the compiled code cannot be loaded ({error})"
        raise RuntimeError(f"{fact}; delete this file, if it is damaged") from error


class CFunction:
    """The function of a library, called by its C interface, see torch's aoti_runtime/interface.h.

    Attributes:
        run: C function AOTInductorModelContainerRun.
        container: Its first argument.
    """

    def __init__(self, path: Path, functions: ctypes.CDLL) -> None:
        """Create the compiled model. Raises RuntimeError if that fails."""
        self.path = path
        self.run = functions.AOTInductorModelContainerRun
        self.container, outputs = ctypes.c_void_p(), ctypes.c_size_t()
        # Arguments: result, number of copies of the model, device, folder of GPU code.
        if functions.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(self.container), ctypes.c_size_t(1), b"cpu", None
        ) or functions.AOTInductorModelContainerGetNumOutputs(
            self.container, ctypes.byref(outputs)
        ):
            raise RuntimeError(f"{path}: the compiled code cannot be initialised")
        self._results = ctypes.c_void_p * outputs.value

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the results of the program. Raises RuntimeError if it fails."""
        # The library frees the handles of the arguments, and torch those of the results. Its
        # function for a single handle would not free it, which leaks the result.
        arguments, results = handles(tensors), self._results()
        counts = ctypes.c_size_t(len(arguments)), ctypes.c_size_t(len(results))
        # The last arguments are the CUDA stream and the executor of operations without a C
        # interface.
        if self.run(self.container, arguments, counts[0], results, counts[1], None, None):
            raise RuntimeError(f"{self.path}: the compiled code failed; stderr has its message")
        return owned(results)


def handles(tensors: Sequence[Tensor]) -> Any:
    """Return new handles of tensors for C functions, which ``owned`` frees."""
    pointers = [_address(x, None) for x in _AOTI.unsafe_alloc_void_ptrs_from_tensors([*tensors])]
    return (ctypes.c_void_p * len(pointers))(*pointers)


def owned(pointers: Any) -> list[Tensor]:
    """Return the tensors of handles, which are freed."""
    return _AOTI.alloc_tensors_by_stealing_from_void_ptrs(
        [_capsule(x, None, None) for x in pointers]
    )


def native_functions(source: Path) -> ctypes.CDLL:
    """Compile a file of C++ unless the cache holds its library, and load it.

    Raises:
        RuntimeError: The compiler fails, or the cache cannot be used.
    """
    flags = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC"]
    build = torch.backends.cpu.get_cpu_capability(), _compiler(), flags
    key = hashlib.sha256(source.read_bytes() + repr(build).encode()).hexdigest()[:20]
    path = _libraries() / f"{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(prefix="embodied_ppo-native-", dir=path.parent) as folder:
            temporary = Path(folder) / path.name
            command = [_compiler(), *flags, "-std=c++17", str(source), "-o", str(temporary)]
            try:
                subprocess.run(command, capture_output=True, check=True, timeout=COMPILER_TIME_S)
            except (OSError, subprocess.SubprocessError) as error:
                raise RuntimeError(f"{source.name} is not compiled ({one_line(error)})") from error
            temporary.replace(path)
    return ctypes.CDLL(str(path))


class Library:
    """A compiled program.

    The program maps tensors to tensors without reading their values on the host. It may write to
    its arguments. Shapes, types and strides of the arguments must be those of the example.
    """

    def __init__(self, program: Callable[..., Any], example: Sequence[Tensor]) -> None:
        """Start the compilation in another process, unless the cache holds the library.

        Args:
            program: A picklable function.
            example: Arguments, of which shapes, types and strides are read.

        Raises:
            RuntimeError: The program cannot be pickled, the class of one of its modules is defined
                in no file, the cache cannot be used, or its library cannot be loaded.
        """
        self.path = _libraries() / f"{fingerprint(program, example)}.pt2"
        self._child: subprocess.Popen[bytes] | None = None
        self._errors = None
        # Working folder of a compilation in progress.
        self.work: tempfile.TemporaryDirectory[str] | None = None
        self._function: Function | None = None
        if self.path.exists():
            # Load it now, because the cache may be emptied before it is used.
            self._function = _load(self.path)
            return
        example = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in example
        ]
        request = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            request.write(pickle.dumps((program, example, str(self.path))))
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # pickle raises all
            raise RuntimeError(f"the policy cannot be pickled ({error})") from error
        request.seek(0)
        # Each compilation needs its own folder: otherwise torch packs files that another
        # compilation of the same code may be writing.
        self.work = tempfile.TemporaryDirectory(
            prefix="embodied_ppo-inductor-", ignore_cleanup_errors=True
        )
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": self.work.name,
            "CXX": _compiler(),
            "TMPDIR": self.work.name,  # the compiler's temporary files are removed with the folder
        }
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
            # Ctrl-C must reach the parent only, which ends the child and its compiler.
            start_new_session=True,
        )
        request.close()

    def load(self, deadline_s: float = DEADLINE_S) -> Function:
        """Wait for the compiler, load the library and return the function.

        Args:
            deadline_s: Time limit in seconds.

        Raises:
            RuntimeError: The compilation failed or exceeded the limit.
        """
        if self._child is not None:
            try:
                code = self._child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                self.close()
                raise RuntimeError(f"not compiled after {deadline_s:g} s") from None
            self._clean()
            if code:
                reason = self._last_error()
                if code < 0 and not reason.startswith("TimeoutError"):
                    reason = f"signal {-code}"
                raise RuntimeError(
                    f"the compiler failed ({reason}); its folder is {cache_folder()}"
                )
            self._child = None
        if self._function is None:
            self._function = _load(self.path)
        return self._function

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
        """Remove the working folder."""
        if self.work is not None:
            self.work.cleanup()
            self.work = None

    def _last_error(self) -> str:
        """Return the last exception in the output of the compiling process, else its last line."""
        assert self._errors is not None
        self._errors.seek(0)
        output = self._errors.read().decode(errors="replace")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        # Some of torch's exceptions have other names, such as GuardOnDataDependentSymNode.
        exception = r"[\w.]*(Error|Exception)\b|\w+(\.\w+)+: "
        errors = [line for line in lines if re.match(exception, line)]
        return [*lines, *errors][-1] if lines else "without output"


@dataclass(eq=False)
class CompileSchedule:
    """Switches programs to compiled code at a fixed update; on a GPU the code is a CUDA graph.

    The update is fixed, so that results depend neither on the content of the cache nor on the
    duration of the compilation.

    Attributes:
        first_compiled_update: The first update that uses compiled code. None: never.
        start_update: The update in which the compilation starts.
        required: Whether a failure to compile is a TrainingError; otherwise ``notice`` receives the
            reason.
        notice: Called with messages for the user.
        captures: Whether the compiled function is a CUDA graph.
        threads: Threads that run several programs.
    """

    # Number of schedules in this process that are waiting for their compiler.
    waiting = 0
    # Seconds that the schedules of this process have waited for it.
    waited_s = 0.0

    first_compiled_update: int | None
    start_update: int = 0
    required: bool = False
    notice: Callable[[str], None] = lambda text: None
    threads: int = 1
    captures: bool = field(default=False, init=False)
    _libraries: list[Library] = field(default_factory=list, init=False)
    _functions: list[Function] | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def get(self, update: int, make_example: Callable[[], Example]) -> list[Function] | None:
        """Return the compiled functions of the programs for ``update``, None before they are due.

        The first call from ``start_update`` on starts the compilation.

        Args:
            update: Number of the update.
            make_example: Returns the program, or on a CPU several, and their example arguments.

        Raises:
            TrainingError: The compilation failed and is required, or ``close`` ended it.
        """
        if self._functions is not None or self._closed or update < self.start_update:
            return self._functions
        if self.first_compiled_update is None:
            return None
        try:
            if not self._libraries:
                example = make_example()
                if example.arguments[0].is_cuda:
                    if update >= self.first_compiled_update:
                        self._functions, self.captures = [CudaGraph(example)], True
                    return self._functions
                programs, tensors = example.program, [*example.state, *example.arguments]
                for program in programs if isinstance(programs, list) else [programs]:
                    self._libraries.append(Library(program, tensors))
            if update >= self.first_compiled_update:
                # Count before the notice: an interrupt in response to it must end the wait.
                CompileSchedule.waiting += 1
                start = time.perf_counter()
                try:
                    if any(library.is_compiling() for library in self._libraries):
                        kept = f"the result stays in {cache_folder()}"
                        self.notice(f"compile: waiting for the compiler, once; {kept}")
                    self._functions = [library.load() for library in self._libraries]
                finally:
                    CompileSchedule.waiting -= 1
                    CompileSchedule.waited_s += time.perf_counter() - start
        except (RuntimeError, OSError) as error:
            if self._closed:
                raise TrainingError("the compilation was ended") from error
            if self.required:
                raise TrainingError(
                    f"compile=always: {one_line(error)}; repair it, or use compile=auto"
                ) from error
            self.notice(f"compile: {one_line(error)}; training continues without compiled code")
            self.first_compiled_update = None
        return self._functions

    def close(self) -> None:
        """Stop a compilation in progress. Another thread may be waiting for it in ``get``."""
        self._closed = True
        for library in self._libraries:
            library.close()


def build(program: Callable[..., Any], example: Sequence[Tensor], path: Path) -> None:
    """Trace a program and its backward pass, compile it and write the library to ``path``."""
    import torch._inductor

    with open(path.with_suffix(".lock"), "w") as lock:
        # Of two runs that need the same library, the second one loads that of the first.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return
        example = [
            torch.zeros_like(x, device="cpu") if x.device.type == "meta" else x for x in example
        ]
        graph = trace(program, example)
        with torch.no_grad():
            exported = torch.export.export(graph, tuple(example), strict=False)
        temporary = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
        torch._inductor.aoti_compile_and_package(
            exported,
            package_path=str(temporary),
            # Torch would precompile its headers in every work folder: 13 s that one library
            # does not save.
            inductor_configs=OPTIONS | {"aot_inductor.precompile_headers": False},
        )
        _load(temporary)  # a library that does not load is not kept
        temporary.replace(path)


def _end_with(parent: int, work: str) -> None:
    """End this process group after the end of process ``parent``, or after ``DEADLINE_S``.

    Runs in a thread. A signal at the parent's death (PR_SET_PDEATHSIG) would reach this process,
    but not the C++ compiler that it has started.
    """
    deadline = time.monotonic() + DEADLINE_S
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(PARENT_CHECK_S)
    if os.getppid() == parent:
        print(f"TimeoutError: not compiled after {DEADLINE_S:g} s", file=sys.stderr, flush=True)
    else:
        shutil.rmtree(work, ignore_errors=True)  # the parent can no longer do it
    os.killpg(os.getpid(), signal.SIGKILL)


# Argument of a compiling process that lets torch find the instructions that the compiler supports.
TEST_COMPILER = "--test-compiler"


def _build_stdin() -> None:
    """Entry of the compiling process.

    Arguments are the parent's process id, the work folder and optionally ``TEST_COMPILER``.
    """
    threading.Thread(target=_end_with, args=(int(sys.argv[1]), sys.argv[2]), daemon=True).start()
    os.nice(5)  # the parent trains at the same time
    torch.set_num_threads(1)
    program, example, path = pickle.load(sys.stdin.buffer)
    if TEST_COMPILER not in sys.argv:
        # Torch compiles a test program for each kind of vector instructions: 6 s. Assume first that
        # the compiler knows all instructions of the processor.
        from torch._inductor import cpu_vec_isa

        cpu_vec_isa.VecISA.check_build = lambda self, code: True
    try:
        build(program, example, Path(path))
    except Exception as error:
        if TEST_COMPILER in sys.argv or "CppCompileError" not in repr(error):
            raise
        os.lseek(sys.stdin.fileno(), 0, os.SEEK_SET)
        os.execv(sys.executable, [*sys.orig_argv, TEST_COMPILER])
