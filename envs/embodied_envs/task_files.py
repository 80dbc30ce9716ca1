"""The files of a user's task: their hashes, their copies in a run, and which are executed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

from embodied_envs import tasks
from embodied_envs.base.errors import CheckpointError, ConfigError, EnvError, join_names
from embodied_envs.file_references import files_named_in_source, files_named_in_xml, imports
from embodied_envs.types import Say

# Limit of all copies in a run directory, bytes. Sources and XML are copied first; the files beyond
# it only have a hash.
MAX_COPIED_BYTES = 64 << 20
# A larger file is compared by its size, not by its contents.
MAX_HASHED_BYTES = 256 << 20
# Limit of the number of files of one task.
MAX_FILES = 2000
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class File:
    """One file of a task.

    Attributes:
        name: Path relative to ``TaskFiles.root``, and to the folder of the copies.
        digest: SHA-256 of the contents; the size of a file above ``MAX_HASHED_BYTES``.
        module: Dotted name of a Python source.
        data: Contents of a file that is copied.
    """

    name: str
    digest: str
    module: str | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class TaskFiles:
    """The files of one task at the start of a run.

    Attributes:
        id: Value of ``env.id``.
        root: Folder of the originals. All names are relative to it.
        files: The files; the module that ``id`` names is the first.
        cwd: Folder below ``root`` to which the task's relative paths refer; None without any.
        store: Folder of the copies; None before ``save``.
    """

    id: str
    root: Path
    files: tuple[File, ...]
    cwd: str | None = None
    store: Path | None = None

    @property
    def hash(self) -> str:
        """12 hex digits of the SHA-256 of names and contents."""
        lines = sorted(f"{file.name} {file.digest}" for file in self.files)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]

    @property
    def complete(self) -> bool:
        """Whether every file is copied, so that the task can run without its originals."""
        return all(file.data is not None for file in self.files)

    def save(self, run_dir: Path) -> TaskFiles:
        """Write copies and manifest into run_dir/task/HASH unless they exist."""
        store = run_dir.absolute() / "task" / self.hash
        task = replace(self, store=store)
        if (store / MANIFEST).exists():
            return task
        (store / "files" / (self.cwd or ".")).mkdir(parents=True, exist_ok=True)
        rows = []
        for f in self.files:
            if f.data is not None:
                path = store / "files" / f.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(f.data)
            row = {"name": f.name, "digest": f.digest, "module": f.module}
            rows.append(row | {"kept": f.data is not None})
        task_fields = {"id": self.id, "root": str(self.root), "cwd": self.cwd, "files": rows}
        temporary = store / f"{MANIFEST}.new"
        temporary.write_text(json.dumps({"format": 1, **task_fields}, indent=1) + "\n")
        temporary.replace(store / MANIFEST)
        return task

    def without_data(self, run_dir: Path) -> TaskFiles:
        """Return a value for other processes, which read the copies from ``run_dir``."""
        files = tuple(replace(file, data=None) for file in self.files)
        return replace(self, store=run_dir.absolute() / "task" / self.hash, files=files)

    def changed_originals(self) -> list[Path] | None:
        """Return the originals that differ or are missing; None if the task is not importable.

        An original is the file that this process would read.
        """
        folder, above = "", str(self.root)
        module = self.id.rpartition(":")[0]
        main = next((file for file in self.files if module and file.module == module), None)
        if main is not None:
            path = _locate(module)
            if path is None:
                return None
            folder, above = os.path.dirname(main.name), os.path.dirname(os.path.realpath(path))
        changed = []
        for file in self.files:
            relative = os.path.relpath(file.name, folder or ".")
            original = Path(os.path.normpath(os.path.join(above, relative)))
            if _digest(original) != file.digest:
                changed.append(original)
        return changed

    def use_copies(self) -> None:
        """Execute the run's copies in this process from now on.

        Raises:
            EnvError: Not every file is copied.
        """
        if not self.complete:
            raise EnvError(
                f"set PYTHONPATH: env.id={self.id} cannot be imported here, and the run keeps no"
                " complete copy"
            )
        assert self.store is not None
        _install(self, self.store / "files")

    def activate(self, say: Say = lambda line: None) -> None:
        """Execute the files of the run's start: the originals if unchanged, else the copies.

        Raises:
            EnvError: The originals differ and the copies cannot be read.
            CheckpointError: The copies are damaged.
        """
        if _active is not None and _active.task.hash == self.hash:
            return
        changed = self.changed_originals()
        if changed == []:
            return _install(self, None)
        stored = None if self.store is None else read(self.store)
        if stored is None or not stored.complete:
            path = changed[0] if changed else self.files[0].name
            raise EnvError(
                f"env.id={self.id}: {path} is not the file that the run began with (task"
                f" {self.hash}), and the run's copy is not readable here; put the same file there"
            )
        say(f"task: executing the run's copies in {stored.store}: originals changed or missing")
        return stored.use_copies()


# ---------------------------------------------------------------------------------------- decisions
def select(
    id: str,
    kwargs: Mapping[str, Any],
    stored: TaskFiles | None,
    *,
    allow: bool,
    resumes: bool,
    say: Say,
) -> TaskFiles | None:
    """Select and report the files of a task that this process executes.

    Args:
        id: Value of ``env.id``.
        kwargs: Value of ``env.kwargs``.
        stored: Files that the run stored, of its checkpoint; None without any.
        allow: Execute files that have changed since (``allow_changed_task``).
        resumes: Whether the training continues. Changed files are then refused. An evaluation
            executes the run's copies instead.
        say: Reports the decision.

    Raises:
        ConfigError: The task of a resumed training has changed and ``allow`` is False.
        EnvError: Neither the originals nor complete copies are available.
    """
    if stored is None or stored.id != id:
        task = collect(id, kwargs)
        if task is not None and stored is None and not resumes:
            say(f"task: the run keeps no copy; executing {task.root / task.files[0].name}")
        return task
    changed = stored.changed_originals()
    if changed == []:
        _install(stored, None)
        return stored
    names = join_names([str(path) for path in changed or ()])
    if changed and resumes and not allow:
        raise ConfigError(
            f"resume: the task changed since the checkpoint: {names}; restore it (the run's copy:"
            f" {stored.store}), or write allow_changed_task=true"
        )
    if changed and (allow or not stored.complete):
        reason = "allow_changed_task=true" if allow else "the run keeps no complete copy"
        say(f"task: {names} changed since training; executing the changed files ({reason})")
        _install(stored, None, reload=True)
        return collect(id, kwargs)
    stored.use_copies()
    cause = f"{names} changed since training" if changed else f"{id} cannot be imported from here"
    hint = "; allow_changed_task=true executes the changed files" if changed else ""
    say(f"task: {cause}; executing the run's copies in {stored.store}{hint}")
    return stored


def read(store: Path) -> TaskFiles | None:
    """Read and verify the files in run_dir/task/HASH; return None if there are none.

    Raises:
        CheckpointError: The manifest or a copy is damaged.
    """
    manifest = store / MANIFEST
    try:
        content = json.loads(manifest.read_text())
        rows = [
            (str(row["name"]), str(row["digest"]), row["module"], bool(row["kept"]))
            for row in content["files"]
        ]
        root, id, cwd = Path(content["root"]), str(content["id"]), content["cwd"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"remove {store}: {MANIFEST} is not a manifest ({error!r})"
        ) from error
    for name in (*(name for name, *_ in rows), cwd or "."):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"remove {store}: {name!r} lies outside of the folder")
    files = []
    for name, digest, module, is_copied in rows:
        path = store / "files" / name
        if is_copied and _digest(path) != digest:
            raise CheckpointError(f"remove {store}: {path} is not what the run wrote (sha256)")
        files.append(File(name, digest, module, path.read_bytes() if is_copied else None))
    return TaskFiles(id, root, tuple(files), cwd, store)


# --------------------------------------------------------------------------------------- collection
def collect(id: str, kwargs: Mapping[str, Any]) -> TaskFiles | None:
    """Return the current files of a task; None for a task of an installed package.

    They are: the module before the colon of ``env.id``; the modules it imports that are neither
    installed nor part of Python; files that its sources name (a string, or strings joined by ``/``
    or in one call); the MJCF that a ``Task`` loads; files that ``env.kwargs`` names; and files that
    one of these XML files includes or refers to.
    """
    module = id.rpartition(":")[0]
    sources = _sources(module) if module else {}
    _forget_changed_modules(sources)
    queue, relative = _loaded_models(id, kwargs) if sources else ([], False)
    for value in kwargs.values():
        if isinstance(value, str) and (path := Path(value)).suffix and os.path.isfile(path):
            queue.append(path.absolute())
            relative |= not path.is_absolute()
    # Path -> dotted name of a Python source.
    modules: dict[Path, Any] = {Path(os.path.realpath(x)): name for name, x in sources.items()}
    for path in sources.values():
        queue += files_named_in_source(path)
    while queue and len(modules) < MAX_FILES:
        path = Path(os.path.realpath(queue.pop()))
        if path not in modules and not _is_installed(path):
            modules[path] = None
            queue += files_named_in_xml(path)
    if not modules:
        return None
    cwd = Path.cwd()
    folders = [*(path.parent for path in modules), *([cwd] if relative else [])]
    root = Path(os.path.commonpath(folders))
    main = next(iter(modules)) if sources else None
    files, size = [], 0
    for path in sorted(modules, key=lambda x: (x != main, x.suffix not in (".py", ".xml"), str(x))):
        fits = size + path.stat().st_size <= MAX_COPIED_BYTES
        data = path.read_bytes() if fits else None
        size += len(data or b"")
        digest = _digest(path) if data is None else hashlib.sha256(data).hexdigest()
        files.append(File(path.relative_to(root).as_posix(), str(digest), modules[path], data))
    task = TaskFiles(id, root, tuple(files), cwd.relative_to(root).as_posix() if relative else None)
    _install(task, None)
    return task


def _digest(path: Path) -> str | None:
    """Return the hash of the contents, the size of a large file, or None without a file."""
    try:
        if (size := path.stat().st_size) > MAX_HASHED_BYTES:
            return f"{size} bytes"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _is_installed(path: Path) -> bool:
    """Return whether a file belongs to Python, an installed package or this project."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    homes = {Path(sysconfig.get_path(kind)).resolve() for kind in kinds}
    homes |= {Path(os.path.realpath(sys.prefix)) / "lib", Path(__file__).resolve().parent}
    if (trainer := sys.modules.get("embodied_ppo")) is not None:
        homes.add(Path(str(trainer.__file__)).resolve().parent)
    return "site-packages" in path.parts or any(path.is_relative_to(home) for home in homes)


def _locate(module: str) -> Path | None:
    """Return the file that ``import module`` would execute, without importing it.

    Copies in a run directory are ignored.
    """
    paths: list[str] | None = None
    spec = None
    finders: list[Any] = [
        x for x in sys.meta_path if hasattr(x, "find_spec") and not isinstance(x, _CopyFinder)
    ]
    for name in _with_parents(module):
        try:
            spec = next((s for x in finders if (s := x.find_spec(name, paths)) is not None), None)
        except (ImportError, ValueError):
            return None
        except KeyError:
            # A folder without __init__.py in a package that was not imported: Python would read
            # its paths from the imported package.
            folders = [Path(path, name.rpartition(".")[2]) for path in paths or ()]
            paths, spec = [str(folder) for folder in folders if folder.is_dir()], None
            continue
        if spec is None:
            return None
        paths = list(spec.submodule_search_locations or ())
    if spec is None or not spec.has_location or not spec.origin:
        return None
    return Path(spec.origin).absolute()


def _with_parents(module: str) -> list[str]:
    """Return ["a", "a.b", "a.b.c"] for "a.b.c"."""
    return list(itertools.accumulate(module.split("."), "{}.{}".format))


def _sources(module: str) -> dict[str, Path]:
    """Return the user's modules that ``module`` imports, itself first: dotted name -> file."""
    sources: dict[str, Path] = {}
    queue, visited = [module], set[str]()
    is_installed = {module.partition(".")[0]: False}  # by the first part of the dotted name
    while queue and len(sources) < MAX_FILES:
        name = queue.pop()
        if name in visited:
            continue
        visited.add(name)
        package = name.partition(".")[0]
        if package not in is_installed:
            path = _locate(package)
            is_installed[package] = path is not None and _is_installed(path)
        path = None if is_installed[package] else _locate(name)
        if path is not None and path.suffix == ".py":
            sources[name] = path
            parents = _with_parents(name)[:-1]
            is_package = path.name == "__init__.py"
            queue += parents + imports(path, name if is_package else name.rpartition(".")[0])
        elif name == module:
            return {}
    return sources


def _loaded_models(id: str, kwargs: Mapping[str, Any]) -> tuple[list[Path], bool]:
    """Return the XML files that a ``Task`` loads, and whether one has a relative path."""
    task_class = tasks.find(id)
    if task_class is None:
        return [], False
    import mujoco  # takes half a second; the engine imports it anyway

    options = {k: v for k, v in kwargs.items() if k not in ("nconmax", "njmax")}
    spec, model = mujoco.MjSpec, mujoco.MjModel
    with (
        mock.patch.object(spec, "from_file", wraps=spec.from_file) as spec_file,
        mock.patch.object(model, "from_xml_path", wraps=model.from_xml_path) as model_file,
        # The user's code may raise anything. The engine reports it when it creates the task.
        contextlib.suppress(Exception),
    ):
        tasks.make(id, task_class, options).spec()
    calls = spec_file.call_args_list + model_file.call_args_list
    names = [str(x) for call in calls for x in call.args[:1] or [call.kwargs.get("filename")]]
    paths = [Path(name).absolute() for name in names if os.path.isfile(name)]
    return paths, any(not os.path.isabs(name) for name in names)


# ---------------------------------------------------------------------------------------- execution
@dataclass(frozen=True)
class _Active:
    """The task that this process executes, and the folder of its copies; None: the originals."""

    task: TaskFiles
    copies: Path | None

    @property
    def modules(self) -> dict[str, File]:
        """Sources of the task by dotted name."""
        return {file.module: file for file in self.task.files if file.module}


_active: _Active | None = None


class _CopyFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of the active task among the run's copies."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if _active is None or _active.copies is None:
            return None
        modules = _active.modules
        if name in modules:
            file = _active.copies / modules[name].name
            within = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(
                name, file, loader=_SourceLoader(name, str(file)), submodule_search_locations=within
            )
        if any(module.startswith(f"{name}.") for module in modules):  # no __init__.py
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        return None


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Executes the source itself: it reads no bytecode and writes none into the run directory."""

    def path_stats(self, path: Any) -> Any:
        raise OSError


def _forget_changed_modules(sources: Mapping[str, Path]) -> None:
    """Unload modules of ``sources`` that came from a run's copies or from another file."""
    global _active
    if _active is None:
        return
    modules = _active.modules
    if _active.copies is not None or any(
        name in modules and modules[name].digest != _digest(path) for name, path in sources.items()
    ):
        _active = None
        _unload([*modules, *sources])


def _install(task: TaskFiles, copies: Path | None, *, reload: bool = False) -> None:
    """Execute ``task`` from now on: the originals, or its copies in a folder.

    ``reload``: import its modules again in any case.
    """
    global _active
    before = None if _active is None else _active.copies
    _active = _Active(task, copies)
    if not any(isinstance(finder, _CopyFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _CopyFinder())
    if reload or before != copies:
        _unload(_active.modules)


def _unload(modules: Iterable[str]) -> None:
    """Remove modules from ``sys.modules``, so that the next import executes their source."""
    for name in modules:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@contextlib.contextmanager
def working_folder() -> Iterator[None]:
    """Change to the copy of the folder to which the task's relative paths refer.

    Used while an environment is created. No effect unless copies are executed.
    """
    if _active is None or _active.copies is None or _active.task.cwd is None:
        yield
        return
    with contextlib.chdir(_active.copies / _active.task.cwd):
        yield
