"""The files that a user's task consists of: their hashes, copies of them in the run, and which of
both are executed.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import sysconfig
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from embodied_envs import tasks
from embodied_ppo.core.errors import CheckpointError, ConfigError, EnvError

KEPT_BYTES = 64 << 20
"""Largest sum of the copies in a run, bytes.

Sources and XML are copied first; files beyond it have a hash only.
"""
HASHED_BYTES = 256 << 20
"""A larger file is compared by its size, not by its contents."""
MOST_FILES = 2000
"""Files of one task that are looked at."""
MANIFEST = "manifest.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class File:
    """One file of a task.

    name    path below ``TaskFiles.root`` and below the folder of the copies
    digest  sha256 of its contents (``HASHED_BYTES``: its size)
    module  dotted name, of Python sources
    data    its contents, where it is copied
    """

    name: str
    digest: str
    module: str | None = None
    data: bytes | None = None


@dataclass(frozen=True)
class TaskFiles:
    """The files of one task, as they were when a run began.

    root    folder of the originals that all names are relative to
    cwd     the folder below ``root`` that the task's relative paths start from; None: it has none
    store   folder of the copies; None until ``saved``
    """

    id: str
    root: Path
    files: tuple[File, ...]
    cwd: str | None = None
    store: Path | None = None

    @property
    def hash(self) -> str:
        """12 hex digits over names and contents."""
        lines = sorted(f"{file.name} {file.digest}" for file in self.files)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]

    @property
    def complete(self) -> bool:
        """Whether every file is copied, so that the task can run without its originals."""
        return all(file.data is not None for file in self.files)

    # --------------------------------------------------------------------------------------- copies
    def saved(self, run_dir: Path) -> TaskFiles:
        """Write copies and manifest into run_dir/task/HASH unless they are there; returns this with
        ``store``.
        """
        store = run_dir.absolute() / "task" / self.hash
        if not (store / MANIFEST).exists():
            for file in self.files:
                if file.data is not None:
                    path = store / "files" / file.name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(file.data)
            (store / "files" / (self.cwd or ".")).mkdir(parents=True, exist_ok=True)
            rows = [
                {"name": f.name, "digest": f.digest, "module": f.module, "kept": f.data is not None}
                for f in self.files
            ]
            content = {
                "format": 1,
                "id": self.id,
                "root": str(self.root),
                "cwd": self.cwd,
                "files": rows,
            }
            temporary = store / f"{MANIFEST}.new"
            store.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            temporary.replace(store / MANIFEST)
        return replace(self, store=store)

    def without_data(self, run_dir: Path) -> TaskFiles:
        """What travels to other processes; they read copies from the run's folder."""
        files = tuple(replace(file, data=None) for file in self.files)
        return replace(self, files=files, store=run_dir.absolute() / "task" / self.hash)

    # ------------------------------------------------------------------------------------ originals
    def originals(self) -> dict[str, Path] | None:
        """Return where each file would be read from in this process, by name; None: the task is not
        importable here.
        """
        module = self.id.rpartition(":")[0]
        own = next((file for file in self.files if module and file.module == module), None)
        if own is None:
            return {file.name: self.root / file.name for file in self.files}
        place = _located(module)
        if place is None:
            return None
        above, folder = os.path.dirname(os.path.realpath(place)), os.path.dirname(own.name) or "."
        paths = {
            file.name: os.path.join(above, os.path.relpath(file.name, folder))
            for file in self.files
        }
        return {name: Path(os.path.normpath(path)) for name, path in paths.items()}

    def changes(self, places: Mapping[str, Path]) -> list[Path]:
        """Return the originals that differ from this, or are missing."""
        return [
            places[file.name] for file in self.files if _digest(places[file.name]) != file.digest
        ]

    # ------------------------------------------------------------------------------------ execution
    def use_copies(self) -> None:
        """Execute the run's copies in this process from now on, wherever the originals are."""
        assert self.store is not None
        _install(self, self.store / "files")

    def use_originals(self, *, changed: bool = False) -> None:
        """Execute the originals in this process from now on; ``changed``: they are not those of
        before.
        """
        _install(self, None, again=changed)

    def activate(self, say: Say = lambda line: None) -> None:
        """Execute what the run began with, in this process: the originals if they are the same,
        else the copies.

        Raises EnvError where neither is here, CheckpointError for damaged copies.
        """
        if _active is not None and _active.task.hash == self.hash:
            return
        places = self.originals()
        if places is not None and not self.changes(places):
            return self.use_originals()
        kept = None if self.store is None else read(self.store)
        if kept is None or not kept.complete:
            changed = self.changes(places)[0] if places else self.files[0].name
            raise EnvError(
                f"env.id={self.id}: {changed} is not the file that the run began with (task"
                f" {self.hash}), and the run's copy is not readable here; put the same file there"
            )
        say(
            f"task: executing the run's copies in {kept.store}: the originals are changed or"
            " missing here"
        )
        return kept.use_copies()


# ---------------------------------------------------------------------------------------- decisions
def for_evaluation(
    id: str, kwargs: Mapping[str, Any], kept: TaskFiles | None, *, allow: bool, say: Say
) -> TaskFiles | None:
    """Decide which files of a trained task are executed, and report it: the run's copies where the
    task has changed.

    Args:
        kept: What the run kept; None: nothing.
        allow: Execute the changed files instead (``allow_changed_task``).

    Raises:
        EnvError: Neither the originals nor complete copies are here.
    """
    if kept is None:
        found = collect(id, kwargs)
        if found is not None:
            say(
                "task: the run keeps no copy of its files; executing"
                f" {_shown(found.root / found.files[0].name)}"
            )
        return found
    places = kept.originals()
    changed = [] if places is None else kept.changes(places)
    if places is not None and not changed:
        kept.use_originals()
        return kept
    if places is None and not kept.complete:
        raise EnvError(
            f"env.id={id}: cannot be imported here, and the run keeps no complete copy; set"
            " PYTHONPATH"
        )
    if changed and (allow or not kept.complete):
        why = "allow_changed_task=true" if allow else "the run keeps no complete copy"
        say(f"task: {_listed(changed)} changed since training; executing the changed files ({why})")
        kept.use_originals(changed=True)
        return collect(id, kwargs) or kept
    kept.use_copies()
    if places is None:
        say(
            f"task: {id} cannot be imported from here; executing the run's copies in"
            f" {_shown(kept.store)}"
        )
    else:
        say(
            f"task: {_listed(changed)} changed since training; executing the run's copies in"
            f" {_shown(kept.store)}; allow_changed_task=true executes the changed files"
        )
    return kept


def for_training(
    id: str, kwargs: Mapping[str, Any], kept: TaskFiles | None, *, allow: bool, say: Say
) -> TaskFiles | None:
    """Decide which files a run executes; ``kept``: those of the checkpoint that it continues from.

    Raises:
        ConfigError: The task has changed and ``allow`` is false.
    """
    if kept is None or kept.id != id:
        return collect(id, kwargs)
    places = kept.originals()
    changed = [] if places is None else kept.changes(places)
    if changed and not allow:
        raise ConfigError(
            f"resume: the task changed since the checkpoint: {_listed(changed)}; restore it (the"
            f" run's copy: {_shown(kept.store)}), or write allow_changed_task=true"
        )
    if changed:
        say(
            f"resume: {_listed(changed)} changed since the checkpoint; training goes on with the"
            " changed task"
        )
        kept.use_originals(changed=True)
        return collect(id, kwargs)
    if places is None:
        if not kept.complete:
            raise EnvError(
                f"env.id={id}: cannot be imported here, and the run keeps no complete copy; set"
                " PYTHONPATH"
            )
        kept.use_copies()
        say(
            f"resume: {id} cannot be imported from here; executing the run's copies in"
            f" {_shown(kept.store)}"
        )
    else:
        kept.use_originals()
    return kept


def _listed(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths[1:3])
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return f"{_shown(paths[0])}{', ' if names else ''}{names}{more}"


def _shown(path: Path | None) -> str:
    """Relative to the current folder where it lies below it."""
    assert path is not None
    here = Path.cwd()
    return (
        str(path.relative_to(here))
        if here != here.parent and path.is_relative_to(here)
        else str(path)
    )


def read(store: Path) -> TaskFiles | None:
    """Return what a run keeps in run_dir/task/HASH, checked; None: nothing is there. Raises
    CheckpointError.
    """
    try:
        content = json.loads((store / MANIFEST).read_text())
        rows = [
            (str(row["name"]), str(row["digest"]), row["module"], bool(row["kept"]))
            for row in content["files"]
        ]
        root, id, cwd = Path(content["root"]), str(content["id"]), content["cwd"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{store / MANIFEST}: is not a manifest ({error!r}); remove {store}"
        ) from error
    files = []
    for name in (*(name for name, *_ in rows), cwd or "."):
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(
                f"{store / MANIFEST}: {name!r} lies outside of the folder; remove {store}"
            )
    for name, digest, module, kept in rows:
        path = store / "files" / name
        if kept and _digest(path) != digest:
            raise CheckpointError(
                f"{path}: is not the file that the run wrote (sha256); remove {store}"
            )
        files.append(File(name, digest, module, path.read_bytes() if kept else None))
    return TaskFiles(id, root, tuple(files), cwd, store)


# --------------------------------------------------------------------------------------- collection
def collect(id: str, kwargs: Mapping[str, Any]) -> TaskFiles | None:
    """Return the files of a task as they are now; None for a task of an installed package, whose
    version says it.

    These are: the module before the colon of ``env.id``, what it imports that is neither installed
    nor Python's own, files that its sources name (a string, or strings joined by ``/`` or in one
    call), the MJCF that a ``Task`` loads, files that ``env.kwargs`` names, and what an XML file
    among them includes or refers to.
    """
    module = id.rpartition(":")[0]
    sources = _sources(module) if module else {}
    _forget_others(sources)
    named, relative = _models(id, kwargs) if sources else ([], False)
    for value in kwargs.values():
        if isinstance(value, str) and (path := Path(value)).suffix and _is_file(path):
            named.append(path.absolute())
            relative |= not path.is_absolute()
    found: dict[Path, str | None] = {
        Path(os.path.realpath(path)): name for name, path in sources.items()
    }
    for path in sources.values():
        named += _named(path)
    while named and len(found) < MOST_FILES:
        path = Path(os.path.realpath(named.pop()))
        if path not in found and not _installed(path):
            found[path] = None
            named += _referred(path)
    if not found:
        return None
    here = Path.cwd()
    root = Path(
        os.path.commonpath([*(path.parent for path in found), *([here] if relative else [])])
    )
    first = next(iter(found)) if sources else None
    ordered = sorted(
        found, key=lambda path: (path != first, path.suffix not in (".py", ".xml"), str(path))
    )
    files, size = [], 0
    for path in ordered:
        bytes_ = path.stat().st_size
        keeps = size + bytes_ <= KEPT_BYTES
        data = path.read_bytes() if keeps else None
        size += bytes_ if keeps else 0
        digest = _digest(path) if data is None else hashlib.sha256(data).hexdigest()
        files.append(File(path.relative_to(root).as_posix(), str(digest), found[path], data))
    task = TaskFiles(
        id, root, tuple(files), here.relative_to(root).as_posix() if relative else None
    )
    _install(task, None, again=False)
    return task


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _digest(path: Path) -> str | None:
    """Of the contents, of a large file of its size; None: there is no such file."""
    try:
        if (size := path.stat().st_size) > HASHED_BYTES:
            return f"{size} bytes"
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _installed(path: Path) -> bool:
    """Whether a file is Python's, an installed package's or ours."""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    homes = {Path(sysconfig.get_path(kind)).resolve() for kind in kinds}
    homes |= {Path(os.path.realpath(sys.prefix)) / "lib", Path(__file__).resolve().parent}
    homes.add(Path(str(importlib.util.find_spec("embodied_ppo").origin)).resolve().parent)  # pyright: ignore[reportOptionalMemberAccess]
    return "site-packages" in path.parts or any(path.is_relative_to(home) for home in homes)


def _located(module: str) -> Path | None:
    """The file that ``import module`` would execute, without importing it; copies of a run do not
    count.
    """
    paths: list[str] | None = None
    spec = None
    parts = module.split(".")
    finders: list[Any] = [
        x for x in sys.meta_path if hasattr(x, "find_spec") and not isinstance(x, _Copies)
    ]
    for i in range(len(parts)):
        name = ".".join(parts[: i + 1])
        try:
            spec = next((s for x in finders if (s := x.find_spec(name, paths)) is not None), None)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        paths = list(spec.submodule_search_locations or ())
    return (
        Path(spec.origin).absolute()
        if spec is not None and spec.has_location and spec.origin
        else None
    )


def _sources(module: str) -> dict[str, Path]:
    """Dotted name -> file, of a module and what it imports of the user's; {} where it is not
    there.
    """
    first = _located(module)
    if first is None or first.suffix != ".py":
        return {}
    found: dict[str, Path] = {}
    queue, seen, top = [module], set[str](), module.partition(".")[0]
    installed: dict[str, bool] = {top: False}  # packages, by their first names
    while queue and len(found) < MOST_FILES:
        name = queue.pop()
        package = name.partition(".")[0]
        if name in seen or installed.get(package):
            continue
        seen.add(name)
        if package not in installed:
            place = _located(package)
            installed[package] = place is not None and _installed(place)
        path = None if installed[package] else _located(name)
        if path is None or path.suffix != ".py":
            continue
        found[name] = path
        queue += [".".join(name.split(".")[:i]) for i in range(1, name.count(".") + 1)]
        queue += _imports(path, name if path.name == "__init__.py" else name.rpartition(".")[0])
    return {module: found.pop(module), **found}


def _tree(path: Path) -> ast.AST:
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _imports(path: Path, package: str) -> list[str]:
    """Dotted names that a source may import; some are names within a module."""
    names: list[str] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            base = ".".join([*filter(None, above), *filter(None, [node.module])])
            names += [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
    return [
        name for name in names if name and name.partition(".")[0] not in sys.stdlib_module_names
    ]


def _named(path: Path) -> list[Path]:
    """Files that a Python source names, beside it or in the folder above."""
    texts: set[str] = set()
    for node in ast.walk(_tree(path)):
        parts: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = [node.value]
        elif isinstance(node, ast.Call):
            parts = [
                x.value
                for x in node.args
                if isinstance(x, ast.Constant) and isinstance(x.value, str)
            ]
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if isinstance(node.right, ast.Constant) and isinstance(node.right.value, str):
                parts.insert(0, node.right.value)
            node = node.left
        if (
            parts
            and sum(map(len, parts)) < 300
            and PurePosixPath(parts[-1]).suffix not in ("", ".py")
        ):
            texts.add("/".join(parts))
    folders = (path.parent, path.parent.parent)
    return [
        folder / text for text in sorted(texts) for folder in folders if _is_file(folder / text)
    ]


def _models(id: str, kwargs: Mapping[str, Any]) -> tuple[list[Path], bool]:
    """XML files that a ``Task`` loads, and whether one has a path relative to the current
    folder.
    """
    kind = tasks.find(id)
    if kind is None:
        return [], False
    import mujoco  # half a second, which the engine takes anyway

    loaded: list[str] = []
    own: dict[str, Any] = {k: v for k, v in kwargs.items() if k not in ("nconmax", "njmax")}
    with contextlib.ExitStack() as stack:
        for cls, name in ((mujoco.MjSpec, "from_file"), (mujoco.MjModel, "from_xml_path")):
            stack.enter_context(_recorded(cls, name, loaded))
        with contextlib.suppress(
            Exception
        ):  # any: the user's code; the engine reports it when it makes the task
            tasks.make(id, kind, own).spec()
    return [Path(path).absolute() for path in loaded if _is_file(Path(path))], any(
        not os.path.isabs(path) for path in loaded
    )


@contextlib.contextmanager
def _recorded(cls: Any, name: str, into: list[str]) -> Iterator[None]:
    """Note the file names with which the static method ``cls.name`` is called inside."""
    own = cls.__dict__[name]
    call = getattr(cls, name)

    def noted(*args: Any, **options: Any) -> Any:
        into.extend(
            str(x) for x in (*args[:1], options.get("filename")) if isinstance(x, str | Path)
        )
        return call(*args, **options)

    setattr(cls, name, staticmethod(noted))
    try:
        yield
    finally:
        setattr(cls, name, own)


def _referred(
    path: Path, main: Path | None = None, folders: Sequence[str] = (), depth: int = 0
) -> list[Path]:
    """Files that an MJCF or URDF refers to: includes, meshes, textures, height fields, skins."""
    if depth > 20 or path.suffix.lower() not in (".xml", ".mjcf", ".urdf"):
        return []
    try:
        nodes = list(ElementTree.fromstring(path.read_bytes()).iter())
    except (ElementTree.ParseError, OSError, ValueError, LookupError):
        return []
    main = main or path
    keys = ("meshdir", "texturedir", "assetdir")
    folders = [
        *folders,
        *(node.attrib[key] for node in nodes for key in keys if key in node.attrib),
    ]
    bases = [main.parent, path.parent, *(main.parent / folder for folder in folders)]
    found: list[Path] = []
    for node in nodes:
        for key, value in node.attrib.items():
            if key.startswith("file"):
                there = [base / value for base in bases if _is_file(base / value)][:1]
                found += there
                if node.tag == "include":
                    found += [
                        x for file in there for x in _referred(file, main, folders, depth + 1)
                    ]
    return found


# ---------------------------------------------------------------------------------------- execution
@dataclass(frozen=True)
class _Active:
    """The task that this process executes, and the folder of its copies; None: the originals."""

    task: TaskFiles
    copies: Path | None


_active: _Active | None = None


class _Copies(importlib.abc.MetaPathFinder):
    """Finds the modules of the active task among the run's copies, and nothing else there."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if _active is None or _active.copies is None:
            return None
        own = {file.module: file.name for file in _active.task.files if file.module}
        if name in own:
            file = _active.copies / own[name]
            within = [str(file.parent)] if file.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(
                name, file, loader=_Source(name, str(file)), submodule_search_locations=within
            )
        if any(module.startswith(f"{name}.") for module in own):  # a folder without __init__.py
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = []
            return spec
        return None


class _Source(importlib.machinery.SourceFileLoader):
    """Executes the source itself: no bytecode is read, and none is written into the run."""

    def path_stats(self, path: Any) -> Any:
        raise OSError


def _forget_others(sources: Mapping[str, Path]) -> None:
    """Drop modules of ``sources`` that were imported from a run's copies, or whose file was another
    then.
    """
    global _active
    if _active is None:
        return
    digests = {file.module: file.digest for file in _active.task.files if file.module}
    if _active.copies is not None or any(
        digests.get(m) != _digest(path) for m, path in sources.items() if m in digests
    ):
        for name in (*digests, *sources):
            sys.modules.pop(str(name), None)
        _active = None
        importlib.invalidate_caches()


def _install(task: TaskFiles, copies: Path | None, *, again: bool = False) -> None:
    """Execute ``task`` from now on; ``again``: import its modules anew even if they are the same
    files.
    """
    global _active
    before, _active = _active, _Active(task, copies)
    if not any(isinstance(finder, _Copies) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Copies())
    if again or (None if before is None else before.copies) != copies:
        for file in task.files:
            if file.module:
                sys.modules.pop(file.module, None)
        importlib.invalidate_caches()


@contextlib.contextmanager
def working_folder() -> Iterator[None]:
    """While an environment is made: the copy of the folder that the task's relative paths start
    from, if copies run.
    """
    if _active is None or _active.copies is None or _active.task.cwd is None:
        yield
        return
    with contextlib.chdir(_active.copies / _active.task.cwd):
        yield
