"""What a file of a task refers to: modules that it imports, and files that it names."""

from __future__ import annotations

import ast
import os
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath


def _parse(path: Path) -> ast.AST:
    """Return the syntax tree of a source; empty if it cannot be parsed."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def imports(path: Path, package: str) -> list[str]:
    """Return dotted names that a source may import; some are names within a module."""
    names: list[str] = []
    for node in ast.walk(_parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            parents = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, parents), *filter(None, [node.module])])
            names += [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
    return [x for x in names if x and x.partition(".")[0] not in sys.stdlib_module_names]


def _strings(nodes: Iterable[ast.AST]) -> list[str]:
    """Return the values of the string constants among ``nodes``."""
    return [x.value for x in nodes if isinstance(x, ast.Constant) and isinstance(x.value, str)]


def files_named_in_source(path: Path) -> list[Path]:
    """Return the files that a Python source names, in its folder or in the parent folder."""
    names: set[str] = set()
    for node in ast.walk(_parse(path)):
        parts = _strings(node.args if isinstance(node, ast.Call) else [node])
        while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            parts = _strings([node.right]) + parts
            node = node.left
        is_short = sum(map(len, parts)) < 300
        if parts and is_short and PurePosixPath(parts[-1]).suffix not in ("", ".py"):
            names.add("/".join(parts))
    folders = (path.parent, path.parent.parent)
    candidates = [folder / name for name in sorted(names) for folder in folders]
    return [candidate for candidate in candidates if os.path.isfile(candidate)]


def files_named_in_xml(
    path: Path, main: Path | None = None, folders: Sequence[str] = (), depth: int = 0
) -> list[Path]:
    """Return the files that an MJCF or URDF refers to: includes, meshes, textures, skins."""
    if depth > 20 or path.suffix.lower() not in (".xml", ".mjcf", ".urdf"):
        return []
    try:
        nodes = list(ElementTree.fromstring(path.read_bytes()).iter())
    except (ElementTree.ParseError, OSError, ValueError, LookupError):
        return []
    main = main or path
    keys = ("meshdir", "texturedir", "assetdir")
    local_folders = [node.attrib[key] for node in nodes for key in keys if key in node.attrib]
    folders = [*folders, *local_folders]
    bases = [main.parent, path.parent, *(main.parent / folder for folder in folders)]
    files: list[Path] = []
    for node in nodes:
        for value in (value for key, value in node.attrib.items() if key.startswith("file")):
            file = next((base / value for base in bases if os.path.isfile(base / value)), None)
            if file is not None:
                files.append(file)
                if node.tag == "include":
                    files += files_named_in_xml(file, main, folders, depth + 1)
    return files
