"""Tables of the frames of recorded episodes, and where each episode is stored.

Shape letters: L frames of one or several episodes, H x W pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from embodied_envs.base.errors import ConfigError
from embodied_ppo.data.parquet import damaged, read_table, reading, row_group_sizes

# Accepted image formats. Pillow supports further ones that execute programs (EPS: Ghostscript).
IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")


@dataclass(frozen=True)
class EpisodeLocation:
    """Location of an episode.

    Attributes:
        index: Its index in the data set.
        length: Its recorded frames.
        data: File of its numbers.
        videos: Feature -> file, and the index of the episode's first frame in it.
        stride: Recorded frames between two frames that are used, at least one of them; 1: all are
            used. Below 1, frames are repeated.
    """

    index: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, int]]
    stride: float = 1.0

    @property
    def count(self) -> int:
        """Number of frames that are used, L."""
        return int((self.length - 1) / self.stride + 1e-6) + 1

    @property
    def steps(self) -> np.ndarray:
        """The frames that are used: at each time i * stride the newest one, int64 [L]."""
        return (np.arange(self.count) * self.stride + 1e-6).astype(np.int64)


class FrameTable:
    """Frames of several episodes in one file, episode by episode; L of all of them."""

    def __init__(
        self, path: Path, episodes: Sequence[EpisodeLocation], columns: Sequence[str]
    ) -> None:
        """Read the columns.

        Args:
            path: The file.
            episodes: Episodes that it holds.
            columns: Names of the columns that are read below.

        Raises:
            ConfigError: The file is damaged, or lacks a frame.
        """
        self.path = path
        indices = ("episode_index", "frame_index", "task_index")
        self._table = read_table(path, [*columns, *indices])
        for name in indices:
            column = self._table[name]
            if not str(column.type).startswith(("int", "uint")) or column.null_count:
                raise damaged(f"{path}: {name} is not an integer in every frame")
        self._episode, self._frame, self._task = (self._table[x].to_numpy() for x in indices)
        self._rows = np.concatenate([self._rows_of(episode) for episode in episodes])

    def _rows_of(self, episode: EpisodeLocation) -> np.ndarray:
        """Return the rows of an episode's frames in order, int64."""
        rows = np.flatnonzero(self._episode == episode.index)
        rows = rows[np.argsort(self._frame[rows], kind="stable")]
        frame = self._frame[rows]
        if len(frame) != episode.length or (frame != np.arange(len(frame))).any():
            missing = np.setdiff1d(np.arange(episode.length), frame)
            problem = f"frame {missing[0]} is missing" if len(missing) else f"it has {len(frame)}"
            raise damaged(
                f"{self.path}: episode {episode.index} should have {episode.length} frames, but"
                f" {problem}"
            )
        return rows[episode.steps]

    def _label(self, i: int) -> str:
        """Return file, episode and frame of row ``i`` of the results, for messages."""
        row = self._rows[i]
        return f"{self.path}: episode {self._episode[row]}, frame {self._frame[row]}"

    def tasks(self, names: Mapping[int, str]) -> np.ndarray:
        """Return task_index, int64 [L]. Raises ConfigError where ``names`` does not have one."""
        task = self._task[self._rows]
        if unknown := set(task.tolist()) - names.keys():
            label = self._label(int(np.argmax(task == min(unknown))))
            raise damaged(f"{label} has task_index={min(unknown)}, which meta/tasks does not have")
        return task

    def floats(self, name: str, dims: int) -> np.ndarray:
        """Return a feature, float32 [L, dims]. Raises ConfigError."""
        import pyarrow.compute

        compute: Any = pyarrow.compute
        column = self._table[name].combine_chunks().take(self._rows)
        counts = np.ones(len(column), dtype=np.int64)
        with reading(f"{self.path}: {name} ({column.type})"):
            if "list" in str(column.type):
                counts = compute.fill_null(compute.list_value_length(column), 0)
                counts, column = counts.to_numpy(zero_copy_only=False), column.flatten()
            x = column.to_numpy(zero_copy_only=False).astype(np.float32)
        if len(wrong := np.flatnonzero(counts != dims)):
            i = int(wrong[0])
            raise damaged(
                f"{self._label(i)}: {name} has {counts[i]} numbers; meta/info.json has {dims}"
            )
        x = x.reshape(-1, dims)
        check_finite(x, name, self._label)
        return x

    def images(self, name: str, size: tuple[int, int]) -> Iterator[np.ndarray]:
        """Yield images that are stored in the table, uint8 [H, W, 3]. Raises ConfigError.

        One row group of the file is in memory at a time.
        """
        sizes = row_group_sizes(self.path)
        ends = np.cumsum(sizes)
        loaded, column = -1, None
        for i, row in enumerate(self._rows.tolist()):
            label = f"{self._label(i)}: {name}"
            if (group := int(np.searchsorted(ends, row, side="right"))) != loaded:
                loaded, column = group, read_table(self.path, [name], group=group)[name]
            with reading(label):
                assert column is not None
                value = column[row - int(ends[group]) + sizes[group]].as_py()
                data: Any = value.get("bytes") if isinstance(value, dict) else value
                with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                    width, height = image.size
                    if (height, width) != size:  # before a small file decodes to gigabytes
                        raise ConfigError(
                            f"{label} is {[height, width, 3]}; meta/info.json has {[*size, 3]}"
                        )
                    if image.mode[0] in "IF":  # ``convert`` would clip its numbers to 0..255
                        raise ConfigError(f"write images of 8 bits: {label} has mode {image.mode}")
                    yield np.asarray(image.convert("RGB"))


def check_finite(x: np.ndarray, name: str, label: Callable[[int], str]) -> None:
    """Check that all numbers of the feature ``name`` [L, K] are finite; ``label`` names a row.

    Raises:
        ConfigError: One is not.
    """
    if len(bad := np.argwhere(~np.isfinite(x))):
        row, i = bad[0].tolist()
        raise ConfigError(
            f"{label(row)}: {name} [{i}] is {x[row, i]}; it must be finite: leave the episode out"
            " (cloning.exclude_episodes)"
        )
