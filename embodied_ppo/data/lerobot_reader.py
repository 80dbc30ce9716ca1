"""Reading of demonstrations in LeRobot's layout into memory; ``lerobot_writer`` writes them.

Shape letters: F frames of all episodes, L frames of one, H x W pixels, D state and A action
dimensions, C actions of a chunk, B samples.
"""

from __future__ import annotations

import io
import json
import re
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.host_memory import free_memory
from embodied_ppo.core import guarded_files
from embodied_ppo.data.parquet import damaged, read_rows, read_table, reading
from embodied_ppo.data.video_encoder import import_ffmpeg

VERSION = "v3.0"
"""Version that is written."""
READABLE = (VERSION, "v2.1", "v2.0")
"""Versions that are read."""
STATE, ACTION, CAMERA = "observation.state", "action", "observation.images."
"""Names of features; CAMERA is followed by the name of a camera."""
INFO = {
    "codebase_version": str,
    "features": dict,
    "fps": float,
    "data_path": str,
    "total_episodes": int,
}
"""Fields of meta/info.json of all versions, and their types."""
MAX_FPS = 100_000
"""Largest accepted number of frames per second."""
CHUNK = 1000
"""Number of files in a folder chunk-000."""
IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""Accepted image formats. Pillow supports further ones that execute programs (EPS: Ghostscript)."""


# ------------------------------------------------------------------------------------------- frames
@dataclass(frozen=True)
class Demonstrations:
    """Frames of all episodes, one episode after another.

    Attributes:
        images: Camera -> uint8 [F, H, W, 3], observed before ``action``.
        state: float32 [F, D].
        action: float32 [F, A].
        episode: int64 [F], ascending.
        instruction: int64 [F], index into ``instructions``.
        instructions: Sentences.
        fps: Frames, and therefore actions, per second.
    """

    images: dict[str, Tensor]
    state: Tensor
    action: Tensor
    episode: Tensor
    instruction: Tensor
    instructions: tuple[str, ...]
    fps: float

    def chunk(self, frames: Tensor, C: int) -> tuple[Tensor, Tensor]:
        """Return the actions of ``frames`` and of the C - 1 frames after each of them.

        Args:
            frames: int64 [B].
            C: Actions of a chunk.

        Returns:
            Actions [B, C, A], and bool [B, C], False beyond the end of the episode, where the
            episode's last action is repeated.
        """
        end = torch.searchsorted(self.episode, self.episode[frames], right=True)[:, None]
        index = frames[:, None] + torch.arange(C, device=frames.device)
        return self.action[index.minimum(end - 1)], index < end

    def split(self, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
        """Split the episodes into training and held-out ones.

        Args:
            fraction: Share of held-out episodes; at least one episode unless it is 0.
            seed: Seed of the selection.

        Returns:
            Training frames and held-out frames, int64.

        Raises:
            ConfigError: No episode is left to train on.
        """
        episodes, index = self.episode.unique(return_inverse=True)  # index: [F]
        total = len(episodes)
        count = max(round(fraction * total), int(fraction > 0))
        if not 0 <= fraction < 1 or count >= total:
            raise ConfigError(
                f"held-out fraction={fraction}: {count} of {total} episodes would be held out;"
                " choose a number in [0, 1) that leaves one to train on, or record more episodes"
            )
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        is_held_out = torch.zeros(total, dtype=torch.bool)
        is_held_out[order[:count]] = True
        frames = is_held_out[index]
        return (~frames).nonzero().flatten(), frames.nonzero().flatten()


# ------------------------------------------------------------------------------------------- tables
@dataclass(frozen=True)
class EpisodeLocation:
    """Location of an episode."""

    index: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, int]]
    """Feature -> file, and the index of the episode's first frame in it."""


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
        return rows

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
        """Yield images that are stored in the table, uint8 [H, W, 3]. Raises ConfigError."""
        for i, row in enumerate(self._rows.tolist()):
            label = f"{self._label(i)}: {name}"
            with reading(label):
                value = self._table[name][row].as_py()
                data: Any = value.get("bytes") if isinstance(value, dict) else value
                with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                    width, height = image.size
                    if (height, width) != size:  # before a small file decodes to gigabytes
                        raise ConfigError(
                            f"{label} is {[height, width, 3]}; meta/info.json has {[*size, 3]}"
                        )
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
        )


# ------------------------------------------------------------------------------------------ reading


def read(folder: Path | str, *, limit: int | None = None) -> Demonstrations:
    """Read demonstrations in LeRobot v3.0, v2.1 or v2.0.

    A camera's name is what follows "observation.images." (or "observation.") in its feature's name.
    State and action may also be called "state" and "actions". Pickles are never read.

    Args:
        folder: The data set.
        limit: Number of episodes to read, None: all.

    Raises:
        ConfigError: A value is missing, malformed, not finite or unreadable (the message names
            file, episode and frame), or the images need more than half of the free memory.
    """
    folder = Path(folder)
    info = read_info(folder)
    features = info["features"]
    with reading(folder / "meta/info.json"):
        keys = {name: _vector_key(features, name) for name in (STATE, ACTION)}
        dims = {name: _size(features, key) for name, key in keys.items()}
        cameras = {
            key: _image_size(key, feature)
            for key, feature in features.items()
            if feature.get("dtype") in ("video", "image")
        }
    videos = [key for key in cameras if features[key]["dtype"] == "video"]
    episodes = _episodes(folder, info, videos)[:limit]
    lengths = [episode.length for episode in episodes]
    frames = sum(lengths)
    if not frames:
        raise ConfigError(f"{folder}: has no episodes; record some, or choose another folder")
    _check_memory(folder, list(cameras.values()), sum(dims.values()), frames, len(episodes))
    instructions = read_tasks(folder, info["codebase_version"])

    images = {key: np.empty((frames, *size, 3), dtype=np.uint8) for key, size in cameras.items()}
    numbers = {name: np.empty((frames, size), np.float32) for name, size in dims.items()}
    task = np.empty(frames, dtype=np.int64)
    ends = np.cumsum(lengths).tolist()
    spans = {e.index: slice(end - e.length, end) for e, end in zip(episodes, ends)}
    in_tables = [key for key in cameras if key not in videos]
    for path, members in _grouped(episodes, lambda episode: episode.data):
        table = FrameTable(path, members, [*keys.values(), *in_tables])
        place = np.concatenate([np.r_[spans[episode.index]] for episode in members])
        for name, key in keys.items():
            numbers[name][place] = table.floats(key, dims[name])
        for key in in_tables:
            for i, image in zip(place, table.images(key, cameras[key]), strict=True):
                images[key][i] = image
        task[place] = table.tasks(instructions)
    for key in videos:
        for path, members in _grouped(episodes, lambda episode, key=key: episode.videos[key][0]):
            parts = [(e, e.videos[key][1], images[key][spans[e.index]]) for e in members]
            _decode(path, sorted(parts, key=lambda part: part[1]), cameras[key])

    order = sorted(instructions)
    index = np.repeat([episode.index for episode in episodes], lengths)
    tensors = {name: torch.from_numpy(x) for name, x in numbers.items()}
    return Demonstrations(
        images={
            key.removeprefix(CAMERA).removeprefix("observation."): torch.from_numpy(x)
            for key, x in images.items()
        },
        state=tensors[STATE],
        action=tensors[ACTION],
        episode=torch.from_numpy(index.astype(np.int64)),
        instruction=torch.from_numpy(np.searchsorted(order, task)),
        instructions=tuple(instructions[i] for i in order),
        fps=float(info["fps"]),
    )


def _grouped(
    episodes: Sequence[EpisodeLocation], key: Callable[[EpisodeLocation], Path]
) -> list[tuple[Path, list[EpisodeLocation]]]:
    """Group episodes by the file that holds them."""
    groups: dict[Path, list[EpisodeLocation]] = defaultdict(list)
    for episode in episodes:
        groups[key(episode)].append(episode)
    return list(groups.items())


# ------------------------------------------------------------------------------------- descriptions
def read_info(folder: Path) -> dict[str, Any]:
    """Read meta/info.json and check the fields that all versions have.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    path = folder / "meta/info.json"
    with reading(path):
        info = guarded_files.read_object(path, INFO)
        for feature in info["features"].values():
            guarded_files.check_fields(feature, {})
    if (version := info["codebase_version"]) not in READABLE:
        raise ConfigError(
            f"{path}: codebase_version={version!r} is unknown; this reads {', '.join(READABLE)};"
            " convert it with LeRobot"
        )
    if not 0 < info["fps"] <= MAX_FPS:
        raise damaged(f"{path}: fps={info['fps']} must be > 0 and <= {MAX_FPS}")
    return info


def _vector_key(features: Mapping[str, Any], name: str) -> str:
    """Return the feature that holds the state, or the action. Raises ValueError without one."""
    for key in (name, "state" if name == STATE else "actions"):
        if key in features:
            return key
    raise ValueError(f"it has no feature {name}, but {', '.join(features) or 'none'}")


def _size(features: Mapping[str, Any], key: str) -> int:
    """Return the numbers of a feature. Raises ValueError if it is no vector."""
    shape = features[key].get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or not _is_integer(shape[0], 1):
        raise ValueError(f"{key} has shape {shape}; it must be one vector per frame")
    return shape[0]


def _image_size(key: str, feature: Mapping[str, Any]) -> tuple[int, int]:
    """Return (H, W) of a camera; shapes are [H, W, 3] or [3, H, W]. Raises ValueError."""
    shape = feature.get("shape")
    if isinstance(shape, list) and len(shape) == 3 and all(_is_integer(size, 1) for size in shape):
        if shape[2] == 3:
            return shape[0], shape[1]
        if shape[0] == 3:
            return shape[1], shape[2]
    raise ValueError(f"{key} has shape {shape}; it must be [height, width, 3]")


def _is_integer(x: Any, minimum: int) -> bool:
    """Return whether ``x`` is an integer of at least ``minimum`` that fits int64."""
    return isinstance(x, int) and not isinstance(x, bool) and minimum <= x < 2**63


def _episodes(
    folder: Path, info: Mapping[str, Any], videos: Sequence[str]
) -> list[EpisodeLocation]:
    """Return the episodes in the order of their indices.

    Raises:
        ConfigError: A value is missing or malformed, or an episode is duplicated or empty.
    """
    is_v3 = info["codebase_version"] == VERSION
    path = folder / ("meta/episodes" if is_v3 else "meta/episodes.jsonl")
    rows = episode_rows(folder) if is_v3 else _json_lines(path)
    if len(rows) < info["total_episodes"]:
        raise ConfigError(
            f"{path}: has {len(rows)} of the {info['total_episodes']} episodes that meta/info.json"
            " counts; copy or download the folder again"
        )
    locate = _locate_v3 if is_v3 else _locate_v2
    episodes: dict[int, EpisodeLocation] = {}
    for row in rows:
        with reading(f"{path}: the location of an episode"):
            episode = locate(folder, info, videos, row)
            if not _is_integer(episode.index, 0) or episode.index in episodes:
                raise ValueError(f"episode {episode.index!r} is duplicated, or no number")
            if not _is_integer(episode.length, 1):
                raise ValueError(f"episode {episode.index} has length={episode.length}, below 1")
            episodes[episode.index] = episode
    return [episodes[index] for index in sorted(episodes)]


def _locate_v3(
    folder: Path, info: Mapping[str, Any], videos: Sequence[str], row: Mapping[str, Any]
) -> EpisodeLocation:
    """Return an episode of version 3.0."""

    def path(template: str, prefix: str, key: str = "") -> Path:
        fields = {name: row[f"{prefix}/{name}"] for name in ("chunk_index", "file_index")}
        return _path(folder, template, video_key=key, **fields)

    starts = {key: row[f"videos/{key}/from_timestamp"] for key in videos}
    videos_at = {
        key: (path(info["video_path"], f"videos/{key}", key), round(starts[key] * info["fps"]))
        for key in videos
    }
    data = path(info["data_path"], "data")
    return EpisodeLocation(row["episode_index"], row["length"], data, videos_at)


def _locate_v2(
    folder: Path, info: Mapping[str, Any], videos: Sequence[str], row: Mapping[str, Any]
) -> EpisodeLocation:
    """Return an episode of version 2.0 or 2.1."""
    index, length = row["episode_index"], row["length"]
    fields = {"episode_chunk": index // info.get("chunks_size", CHUNK), "episode_index": index}
    videos_at = {
        key: (_path(folder, info["video_path"], video_key=key, **fields), 0) for key in videos
    }
    return EpisodeLocation(index, length, _path(folder, info["data_path"], **fields), videos_at)


def _path(folder: Path, template: str, **fields: Any) -> Path:
    """Return the path of a file from a template of meta/info.json.

    Raises:
        ValueError: The path is outside ``folder``.
    """
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is not None and (
            not name.isidentifier() or conversion or not re.fullmatch(r"0?\d{0,2}d?", form or "")
        ):
            raise ValueError(f"{{{name}:{form}}} is not a valid field")
    path = Path(template.format(**fields))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{str(path)!r} is outside the folder")
    return folder / path


def episode_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the episode rows of version 3.0, in order."""
    paths = sorted((folder / "meta/episodes").glob("*/*.parquet"))
    rows = [row for path in paths for row in read_rows(path)]
    with reading(folder / "meta/episodes"):
        return sorted(rows, key=lambda row: int(row["episode_index"]))


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    with reading(path):
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def read_tasks(folder: Path, version: str) -> dict[int, str]:
    """Return task_index -> sentence; the sentences of version 3.0 are the index of a table."""
    if version != VERSION:
        path = folder / "meta/tasks.jsonl"
        rows = _json_lines(path)
    else:
        path = folder / "meta/tasks.parquet"
        if not path.exists() and not any((folder / "meta/episodes").glob("*/*.parquet")):
            return {}
        rows = read_rows(path)
    with reading(path):
        # A pandas index without a name has the default name of pandas.
        return {
            int(row["task_index"]): str(row.get("task") or row["__index_level_0__"]) for row in rows
        }


def _check_memory(
    folder: Path, sizes: Sequence[tuple[int, int]], numbers: int, frames: int, episodes: int
) -> None:
    """Check that images and numbers fit into half of the free memory.

    ``sizes``: (H, W) of the cameras; ``numbers``: dimensions of state and action of a frame.
    """
    free = free_memory()
    need = frames * (sum(3 * height * width for height, width in sizes) + 4 * numbers)
    if free is not None and need > free / 2:
        terms = [f"{height} x {width} x 3" for height, width in sizes] + [f"{numbers} x 4"]
        raise ConfigError(
            f"{folder}: {frames} frames x ({' + '.join(terms)}) bytes = {need / 2**30:.2f} GiB of"
            f" images and numbers, more than half of the {free / 2**30:.2f} GiB of free memory;"
            f" about limit={int(episodes * (free / 2) / need)} of its {episodes} episodes would"
            " fit; otherwise use smaller images, or a machine with more memory"
        )


# -------------------------------------------------------------------------------------------- video
def _decode(
    path: Path, parts: Sequence[tuple[EpisodeLocation, int, np.ndarray]], size: tuple[int, int]
) -> None:
    """Decode a video into uint8 [L, H, W, 3] of each part; parts are sorted by first frame."""
    with reading(path), closing(_frames(path)) as frames:
        width, height = next(frames)["size"]
        if (height, width) != size:
            raise ConfigError(
                f"{path}: has {height} x {width} pixels; meta/info.json has {size[0]} x {size[1]}"
            )
        position = 0  # index of the next frame
        for episode, first, out in parts:
            if first < position:
                raise ConfigError(
                    f"{path}: episode {episode.index} starts before the previous one ends"
                )
            for i in range(position, first + len(out)):
                pixels, frame = next(frames, None), i - first
                if pixels is None:
                    raise damaged(
                        f"{path}: ends after {i} frames, at episode {episode.index}, frame"
                        f" {max(frame, 0)} of {len(out)}"
                    )
                if frame >= 0:
                    out[frame] = np.frombuffer(pixels, dtype=np.uint8).reshape(*size, 3)
            position = first + len(out)


def _frames(path: Path) -> Any:
    """Yield the video's metadata, then the bytes [H, W, 3] of each frame up to a damaged one."""
    return import_ffmpeg(path).read_frames(
        str(path),
        # Only mp4: ffmpeg also accepts playlists, which could name files outside the folder.
        input_params=["-f", "mp4", "-threads", "1", "-xerror", "-err_detect", "explode"],
        output_params=["-fps_mode", "passthrough"],
    )
