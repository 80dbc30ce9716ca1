"""Responses of a language model as JSON lines in the run directory (``rollout.dump``).

Each update and each evaluation has a file, which is renamed when it is complete: a run that is
killed and resumed writes the files of its repeated updates again. Does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from embodied_ppo.core import guarded_files

FOLDER = "generations"  # folder of the files in a run directory
# Number of prompts of an update whose responses are written with rollout.dump=sample.
SAMPLED_PROMPTS = 8
LARGEST_LINE = 1 << 24  # largest size of a line that is read, bytes
Kind: TypeAlias = Literal["train", "eval"]
_NAME = re.compile(r"(train|eval)_(\d{6,15})(?:_\d+)?\.jsonl")


def file_of(run_dir: Path, kind: Kind, update: int, part: int | None = None) -> Path:
    """Return the file of ``update`` completed updates; ``part``: that of one of several ranks."""
    suffix = "" if part is None else f"_{part}"
    return run_dir / FOLDER / f"{kind}_{update:06d}{suffix}.jsonl"


def selected(prompts: Sequence[int], dump: str) -> list[int]:
    """Return which of some responses are written; ``prompts`` are the indices of their prompts.

    A sample has the prompts with the lowest indices, so that several updates have the same ones.
    """
    unique = sorted({*prompts})
    kept = {*(unique if dump == "all" else unique[:SAMPLED_PROMPTS])}
    return [i for i, prompt in enumerate(prompts) if prompt in kept]


def entry(prompt: Any, numbers: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return a line: the prompt (``data.prompts.Prompt``), other values, and numbers, null where
    they are not finite.
    """
    values = {"prompt_index": prompt.index, "data_source": prompt.data_source}
    values |= {"prompt": prompt.text, "ground_truth": prompt.ground_truth}
    return values | others | {name: _rounded(x) for name, x in numbers.items()}


def _rounded(x: Any) -> Any:
    """Return numbers with six digits; None for one that is not finite."""
    if isinstance(x, Mapping):
        return {name: _rounded(value) for name, value in x.items()}
    if isinstance(x, Sequence):
        return [_rounded(value) for value in x]
    return None if x is None or not math.isfinite(x) else float(f"{x:.6g}")


def write(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file under a temporary name, then rename it. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines]
    guarded_files.replace_file(file, "".join(rows).encode(errors="replace"))


def drop(run_dir: Path, completed_updates: int) -> None:
    """Remove what will be written again after ``completed_updates``; 0: everything."""
    for file in (run_dir / FOLDER).glob("*.jsonl*"):
        match = _NAME.fullmatch(file.name)
        if match is None or not completed_updates or int(match[2]) > completed_updates:
            file.unlink(missing_ok=True)


def find(run_dir: Path) -> dict[tuple[str, int], list[Path]]:
    """Return (kind, update) -> files, in this order."""
    files: dict[tuple[str, int], list[Path]] = {}
    folder = run_dir / FOLDER
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if match := _NAME.fullmatch(name):
            files.setdefault((match[1], int(match[2])), []).append(folder / name)
    return dict(sorted(files.items()))


def read(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the lines of files; damaged and overlong ones are left out. Raises OSError."""
    for path in files:
        with guarded_files.open_regular(path, follow_links=False) as file:
            while line := file.readline(LARGEST_LINE):
                try:
                    fields = {"prompt_index": int, "prompt": str, "response": str, "tokens": list}
                    yield guarded_files.check_fields(guarded_files.parse_json(line), fields)
                except ValueError:
                    continue
