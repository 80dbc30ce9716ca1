"""Reading of demonstrations in LeRobot's layout into memory; ``lerobot_writer`` writes them.

Shape letters: F frames of all episodes, L frames of one, H x W pixels, D state and A action
dimensions, C actions of a chunk, B samples.
"""

from __future__ import annotations

import io
import json
import re
import string
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.Image import DecompressionBombError
from torch import Tensor

from embodied_ppo.core.errors import ConfigError, one_line
from embodied_ppo.core.host_memory import free_memory
from embodied_ppo.data.dataset_folder import CAPTIONS
from embodied_ppo.data.parquet import read_rows, read_table
from embodied_ppo.data.video_encoder import import_ffmpeg

VERSION = "v3.0"
"""Version that is written."""
READABLE = (VERSION, "v2.1", "v2.0")
"""Versions that are read."""
STATE, ACTION, CAMERA = "observation.state", "action", "observation.images."
"""Names of features; CAMERA is followed by the name of a camera."""
POINTS = "points."
"""With the name of a camera: feature of the places of the captions' objects in its images, x and y
of each in the order of CAPTIONS."""
MAX_FPS = 100_000
"""Largest accepted number of frames per second."""
CHUNK = 1000
"""Number of files in a folder chunk-000."""
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    IndexError,
    AttributeError,
    struct.error,
    DecompressionBombError,
)
"""Exceptions that Pillow raises for damaged PNG, JPEG, GIF and WebP images."""
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions that access to a malformed row raises."""
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
        captions: Object -> expressions that refer to it; empty without captions.
        points: Camera -> float32 [F, O, 2], the places of the captions' objects in the images: x to
            the right and y down, as fractions of the image; -1 where it does not show the object.
    """

    images: dict[str, Tensor]
    state: Tensor
    action: Tensor
    episode: Tensor
    instruction: Tensor
    instructions: tuple[str, ...]
    fps: float
    captions: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    points: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])

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


# ------------------------------------------------------------------------------------------ reading
@dataclass(frozen=True)
class _Episode:
    """Location of an episode."""

    index: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, int]]
    """Feature -> file, and the index of the episode's first frame in it."""


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
    if limit is not None and limit < 1:
        raise ConfigError(f"{folder}: limit={limit} must be at least 1 episode")
    info = read_info(folder)
    version, features = info["codebase_version"], info["features"]
    keys = {name: _vector_key(folder, features, name) for name in (STATE, ACTION)}
    dims = {name: features[key]["shape"][0] for name, key in keys.items()}
    captions = _read_captions(folder)
    keys |= {key: key for key in features if captions and key.startswith(POINTS)}
    dims |= {key: _point_count(folder, features, key, captions) for key in keys if key not in dims}
    cameras = {
        key: _image_size(folder, key, f)
        for key, f in features.items()
        if f.get("dtype") in ("video", "image")
    }
    videos = [key for key in cameras if features[key]["dtype"] == "video"]
    in_tables = [key for key in cameras if key not in videos]
    episodes = _episodes(folder, info, videos)[:limit]
    lengths = [episode.length for episode in episodes]
    frames = sum(lengths)
    if not frames:
        raise ConfigError(f"{folder}: has no episodes; record some, or choose another folder")
    _check_memory(folder, list(cameras.values()), sum(dims.values()), frames, len(episodes))
    instructions = read_tasks(folder, version)

    images = {key: np.empty((frames, *size, 3), dtype=np.uint8) for key, size in cameras.items()}
    numbers = {name: np.empty((frames, size), np.float32) for name, size in dims.items()}
    task = np.empty(frames, dtype=np.int64)
    ends = np.cumsum(lengths).tolist()
    spans = {e.index: slice(end - e.length, end) for e, end in zip(episodes, ends)}
    for path, members in _grouped(episodes, lambda episode: episode.data):
        table = _Table(path, [*keys.values(), *in_tables])
        for episode in members:
            rows, span = table.rows(episode), spans[episode.index]
            for name, key in keys.items():
                numbers[name][span] = table.floats(key, rows, episode, dims[name])
            for key in in_tables:
                images[key][span] = table.images(key, rows, episode, cameras[key])
            task[span] = table.tasks(rows, episode, instructions)
    for key in videos:
        for path, members in _grouped(episodes, lambda episode, key=key: episode.videos[key][0]):
            parts = [(e, e.videos[key][1], images[key][spans[e.index]]) for e in members]
            _decode(path, sorted(parts, key=lambda part: part[1]), cameras[key])

    order = sorted(instructions)
    index = np.repeat([episode.index for episode in episodes], lengths)
    return Demonstrations(
        images={
            key.removeprefix(CAMERA).removeprefix("observation."): torch.from_numpy(x)
            for key, x in images.items()
        },
        state=torch.from_numpy(numbers[STATE]),
        action=torch.from_numpy(numbers[ACTION]),
        episode=torch.from_numpy(index.astype(np.int64)),
        instruction=torch.from_numpy(np.searchsorted(order, task)),
        instructions=tuple(instructions[i] for i in order),
        fps=float(info["fps"]),
        captions=captions,
        points={
            key.removeprefix(POINTS): torch.from_numpy(x).unflatten(1, (-1, 2))
            for key, x in numbers.items()
            if key.startswith(POINTS)
        },
    )


def _read_captions(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return object -> expressions of CAPTIONS, empty without the file.

    Raises:
        ConfigError: The file is malformed.
    """
    path = folder / CAPTIONS
    if not path.exists():
        return {}
    try:
        captions = {name: tuple(texts) for name, texts in json.loads(path.read_text()).items()}
    except (OSError, *MALFORMED, RecursionError) as error:
        raise _damaged(f"{path}: is no JSON that can be read ({one_line(error)})") from error
    if not all(texts and all(isinstance(x, str) for x in texts) for texts in captions.values()):
        raise _damaged(f"{path}: must map each object to its expressions, a list of texts")
    return captions


def _point_count(
    folder: Path, features: Mapping[str, Any], key: str, captions: Mapping[str, Any]
) -> int:
    """Return the numbers of a feature of points, 2 for each object.

    Raises:
        ConfigError: The feature has another shape.
    """
    if features[key].get("shape") != [2 * len(captions)]:
        raise _damaged(
            f"{folder}/meta/info.json: {key} has shape {features[key].get('shape')}; it must be"
            f" [{2 * len(captions)}], x and y of each object of {CAPTIONS}"
        )
    return 2 * len(captions)


def _grouped(
    episodes: Sequence[_Episode], key: Callable[[_Episode], Path]
) -> list[tuple[Path, list[_Episode]]]:
    """Group episodes by the file that holds them."""
    groups: dict[Path, list[_Episode]] = defaultdict(list)
    for episode in episodes:
        groups[key(episode)].append(episode)
    return list(groups.items())


def _damaged(problem: str) -> ConfigError:
    """Return the error of a damaged data set."""
    return ConfigError(f"{problem}; record or download it again")


def read_info(folder: Path) -> dict[str, Any]:
    """Read meta/info.json and check the fields that all versions have.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    path = folder / "meta/info.json"
    try:
        info = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} is missing, so the folder has no demonstrations; name another folder"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(f"{path}: is no JSON that can be read ({error})") from error
    if not isinstance(info, dict) or info.get("codebase_version") not in READABLE:
        version = info.get("codebase_version") if isinstance(info, dict) else None
        raise ConfigError(
            f"{path}: codebase_version={version!r} is unknown; this reads {', '.join(READABLE)};"
            " convert it with LeRobot"
        )
    for key, kind in (
        ("features", dict),
        ("fps", (int, float)),
        ("data_path", str),
        ("total_episodes", int),
    ):
        if not isinstance(info.get(key), kind):
            raise _damaged(f"{path}: {key}={info.get(key)!r} is missing or has the wrong type")
    if not 0 < info["fps"] <= MAX_FPS:
        raise _damaged(f"{path}: fps={info['fps']} must be > 0 and <= {MAX_FPS}")
    for key, feature in info["features"].items():
        if not isinstance(feature, dict):
            raise _damaged(f"{path}: features.{key}={feature!r} must have dtype and shape")
    return info


def _vector_key(folder: Path, features: Mapping[str, Any], name: str) -> str:
    """Return the feature that holds the state, or the action."""
    for key in (name, "state" if name == STATE else "actions"):
        if key in features:
            shape = features[key].get("shape")
            if not isinstance(shape, list) or len(shape) != 1 or not _is_integer(shape[0], 1):
                raise ConfigError(
                    f"{folder}/meta/info.json: {key} has shape {shape}; it must be one vector per"
                    " frame"
                )
            return key
    raise ConfigError(
        f"{folder}/meta/info.json: has no feature {name}; it has {', '.join(features) or 'none'}"
    )


def _image_size(folder: Path, key: str, feature: Mapping[str, Any]) -> tuple[int, int]:
    """Return (H, W) of a camera; shapes are [H, W, 3] or [3, H, W]."""
    shape = feature.get("shape")
    if isinstance(shape, list) and len(shape) == 3 and all(_is_integer(size, 1) for size in shape):
        if shape[2] == 3:
            return shape[0], shape[1]
        if shape[0] == 3:
            return shape[1], shape[2]
    raise ConfigError(
        f"{folder}/meta/info.json: {key} has shape {shape}; it must be [height, width, 3]"
    )


def _episodes(folder: Path, info: Mapping[str, Any], videos: Sequence[str]) -> list[_Episode]:
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
    episodes: list[_Episode] = []
    for row in rows:
        try:
            episodes.append(locate(folder, info, videos, row))
        except MALFORMED as error:
            index = row.get("episode_index") if isinstance(row, dict) else row
            raise _damaged(
                f"{path}: the location of episode {index} cannot be read"
                f" ({one_line(error, kind=True)})"
            ) from error
    for episode in episodes:
        if not _is_integer(episode.index, 0):
            raise _damaged(f"{path}: episode_index={episode.index!r} is no number of an episode")
    episodes.sort(key=lambda episode: episode.index)
    for before, episode in zip([None, *episodes], episodes):
        if before is not None and episode.index == before.index:
            raise _damaged(f"{path}: episode {episode.index} is duplicated")
        if not _is_integer(episode.length, 1):
            raise ConfigError(
                f"{path}: episode {episode.index} has length={episode.length}; it must be at"
                " least 1"
            )
    return episodes


def _locate_v3(
    folder: Path, info: Mapping[str, Any], videos: Sequence[str], row: Mapping[str, Any]
) -> _Episode:
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
    return _Episode(row["episode_index"], row["length"], data, videos_at)


def _locate_v2(
    folder: Path, info: Mapping[str, Any], videos: Sequence[str], row: Mapping[str, Any]
) -> _Episode:
    """Return an episode of version 2.0 or 2.1."""
    index, length = row["episode_index"], row["length"]
    fields = {"episode_chunk": index // info.get("chunks_size", CHUNK), "episode_index": index}
    videos_at = {
        key: (_path(folder, info["video_path"], video_key=key, **fields), 0) for key in videos
    }
    return _Episode(index, length, _path(folder, info["data_path"], **fields), videos_at)


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
    for row in rows:
        if not _is_integer(index := row.get("episode_index"), 0):
            raise _damaged(f"{folder}/meta/episodes: episode_index={index!r} is no number")
    return sorted(rows, key=lambda row: row["episode_index"])


def _is_integer(x: Any, minimum: int) -> bool:
    """Return whether ``x`` is an integer of at least ``minimum`` that fits int64."""
    return isinstance(x, int) and not isinstance(x, bool) and minimum <= x < 2**63


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; download the folder again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(f"{path}: is no file of JSON lines that can be read ({error})") from error


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
    # A pandas index without a name has the default name of pandas.
    sentence = lambda row: str(row.get("task") or row["__index_level_0__"])
    try:
        return {int(row["task_index"]): sentence(row) for row in rows}
    except MALFORMED as error:
        raise _damaged(
            f"{path}: has no columns task_index and task ({one_line(error, kind=True)})"
        ) from error


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


# ------------------------------------------------------------------------------------------- tables
class _Table:
    """Frames of several episodes in one file; messages name file, episode and frame."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        indices = ("episode_index", "frame_index", "task_index")
        self._table = read_table(path, [*columns, *indices])
        self._cache: dict[str, Any] = {}
        for name in indices:
            column = self._table[name]
            if not str(column.type).startswith(("int", "uint")) or column.null_count:
                raise _damaged(f"{path}: {name} is not an integer in every frame")
        self._episode, self._frame, self._task = (self._table[x].to_numpy() for x in indices)

    def _label(self, episode: _Episode) -> str:
        """Return file and episode, for messages."""
        return f"{self.path}: episode {episode.index}"

    def rows(self, episode: _Episode) -> np.ndarray:
        """Return the rows of an episode's frames in order, int64 [L]."""
        rows = np.flatnonzero(self._episode == episode.index)
        rows = rows[np.argsort(self._frame[rows], kind="stable")]
        frame = self._frame[rows]
        if len(frame) != episode.length or (frame != np.arange(len(frame))).any():
            missing = np.setdiff1d(np.arange(episode.length), frame)
            problem = f"frame {missing[0]} is missing" if len(missing) else f"it has {len(frame)}"
            raise _damaged(
                f"{self._label(episode)} should have {episode.length} frames, but {problem}"
            )
        return rows

    def tasks(self, rows: np.ndarray, episode: _Episode, names: Mapping[int, str]) -> np.ndarray:
        """Return task_index, int64 [L]."""
        task = self._task[rows]
        for index in np.unique(task).tolist():
            if index not in names:
                raise _damaged(
                    f"{self._label(episode)} has task_index={index}, which meta/tasks does not have"
                )
        return task

    def floats(self, name: str, rows: np.ndarray, episode: _Episode, dims: int) -> np.ndarray:
        """Return a feature, float32 [L, dims]."""
        if name not in self._cache:
            self._cache[name] = self._vectors(name, dims)
        x = self._cache[name][rows]
        check_finite(x, f"{self._label(episode)}: {name}")
        return x

    def _vectors(self, name: str, dims: int) -> np.ndarray:
        """Return a feature of all rows of the file, float32 [rows, dims]."""
        import pyarrow
        import pyarrow.compute

        compute: Any = pyarrow.compute
        types = pyarrow.types
        column = self._table[name].combine_chunks()
        list_types = (types.is_list, types.is_fixed_size_list, types.is_large_list)
        is_list = any(is_type(column.type) for is_type in list_types)
        if is_list:
            counts = compute.fill_null(compute.list_value_length(column), 0)
            counts = counts.to_numpy(zero_copy_only=False)
        else:
            counts = np.ones(len(column), dtype=np.int64)
        if len(wrong := np.flatnonzero(counts != dims)):
            i = wrong[0]
            raise _damaged(
                f"{self.path}: episode {self._episode[i]}, frame {self._frame[i]}: {name}"
                f" has {counts[i]} numbers; meta/info.json has {dims}"
            )
        flat = column.flatten() if is_list else column
        try:
            return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, dims)
        except (ValueError, TypeError, OverflowError, pyarrow.ArrowException) as error:
            raise _damaged(f"{self.path}: {name} holds {column.type}, not numbers") from error

    def images(
        self, name: str, rows: np.ndarray, episode: _Episode, size: tuple[int, int]
    ) -> np.ndarray:
        """Return images that are stored in the table, uint8 [L, H, W, 3]."""
        out = np.empty((len(rows), *size, 3), dtype=np.uint8)
        for i, row in enumerate(rows.tolist()):
            label = f"{self._label(episode)}, frame {i}: {name}"
            try:
                value = self._table[name][row].as_py()
            except ValueError as error:
                raise _damaged(f"{label} cannot be read ({one_line(error)})") from error
            data = value.get("bytes") if isinstance(value, dict) else value
            if not isinstance(data, bytes):
                raise ConfigError(
                    f"{label} holds no image; download the data set with its images in the tables"
                )
            try:
                with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                    width, height = image.size
                    if (height, width) == size:  # check first: a small file may decode to gigabytes
                        out[i] = np.asarray(image.convert("RGB"))
            except UNREADABLE as error:
                raise _damaged(f"{label} cannot be decoded ({error})") from error
            if (height, width) != size:
                raise ConfigError(
                    f"{label} is {[height, width, 3]}; meta/info.json has {[*size, 3]}"
                )
        return out


def check_finite(x: np.ndarray, label: str) -> None:
    """Check that all numbers of x [L, K] are finite.

    Raises:
        ConfigError: One is not.
    """
    if len(bad := np.argwhere(~np.isfinite(x))):
        frame, i = bad[0].tolist()
        raise ConfigError(
            f"{label} [{i}] is {x[frame, i]} in frame {frame}; it must be finite: leave the"
            " episode out"
        )


# -------------------------------------------------------------------------------------------- video
def _decode(
    path: Path, parts: Sequence[tuple[_Episode, int, np.ndarray]], size: tuple[int, int]
) -> None:
    """Decode a video into uint8 [L, H, W, 3] of each part; parts are sorted by first frame."""
    if not path.exists():
        raise ConfigError(f"{path} is missing; copy, download or record the folder again")
    try:
        with closing(_frames(path)) as frames:
            width, height = next(frames)["size"]
            if (height, width) != size:
                raise ConfigError(
                    f"{path}: has {height} x {width} pixels; meta/info.json has {size[0]} x"
                    f" {size[1]}"
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
                        raise _damaged(
                            f"{path}: ends after {i} frames, at episode {episode.index}, frame"
                            f" {max(frame, 0)} of {len(out)}"
                        )
                    if frame >= 0:
                        out[frame] = np.frombuffer(pixels, dtype=np.uint8).reshape(*size, 3)
                position = first + len(out)
    except (OSError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        cause = one_line(error)[-200:]
        raise _damaged(f"{path}: is no video that can be read ({cause})") from error


def _frames(path: Path) -> Any:
    """Yield the video's metadata, then the bytes [H, W, 3] of each frame up to a damaged one."""
    return import_ffmpeg(path).read_frames(
        str(path),
        # Only mp4: ffmpeg also accepts playlists, which could name files outside the folder.
        input_params=["-f", "mp4", "-threads", "1", "-xerror", "-err_detect", "explode"],
        output_params=["-fps_mode", "passthrough"],
    )
