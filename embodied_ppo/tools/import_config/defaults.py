"""Follow Hydra's defaults list: the files beside a config that become its sections."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from embodied_ppo.core import guarded_files
from embodied_ppo.options import loader

# Largest number of values in a file, and of characters of a ``${..}``: a few lines of YAML aliases
# and references can expand to more than fits in memory.
LIMIT = 10_000
# Largest size of a file, bytes; parsing takes about 1 s for 100,000.
LARGEST_FILE = 1 << 17


def with_members(content: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Return the options with those of the files below ``folder`` that Hydra's defaults list names.

    ``env/NAME@env.train`` places the options of env/NAME.yaml in section env.train; the options of
    the file itself win. What cannot be followed stays in the list.
    """
    entries = content.get("defaults")
    if not isinstance(entries, list):
        return content
    merged: dict[str, Any] = {}
    unfollowed: list[Any] = []
    for entry in entries:
        for group, name in entry.items() if isinstance(entry, Mapping) else [(entry, None)]:
            if group == "_self_" or str(group).startswith("override hydra/"):
                continue
            source, _, package = str(group).partition("@")
            source = source if name is None else f"{source}/{name}"
            member = _member(folder, source)
            if member is None:
                unfollowed.append(entry)
                continue
            package = package.strip() or str(Path(source).parent).replace("/", ".")
            for part in reversed([part for part in package.split(".") if part]):
                member = {part: member}
            merged = loader.merged(merged, member)
    rest = {key: value for key, value in content.items() if key != "defaults"}
    return loader.merged(merged, {**({"defaults": unfollowed} if unfollowed else {}), **rest})


def _member(folder: Path, name: str) -> Mapping[str, Any] | None:
    """Return the options of NAME.yaml below the folder; None if it has none."""
    path = folder / f"{name}.yaml"
    if ".." in Path(name).parts or Path(name).is_absolute() or not path.is_file():
        return None
    try:
        content = loader.plain_yaml(guarded_files.read_text(path, LARGEST_FILE), aliases=True)
    except (yaml.YAMLError, ValueError, OSError):
        return None
    return None if not isinstance(content, Mapping) or exceeds_limit(content) else content


def exceeds_limit(content: Any) -> bool:
    """Return whether there are ``LIMIT`` values or more; a cycle of YAML aliases has no end."""
    pending = [content]
    for _ in range(LIMIT):
        if not pending:
            return False
        node = pending.pop()
        if isinstance(node, Mapping):
            pending.extend(node.values())
        elif isinstance(node, (list, tuple)):
            pending.extend(node)
    return True
