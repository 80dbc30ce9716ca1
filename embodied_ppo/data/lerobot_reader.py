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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import torch
from PIL import Image
from PIL.Image import DecompressionBombError
from torch import Tensor

from embodied_ppo.core.errors import ConfigError, one_line
from embodied_ppo.core.host_memory import free_memory

VERSION = "v3.0"
"""Version that is written."""
READ = (VERSION, "v2.1", "v2.0")
"""Versions that are read."""
STATE, ACTION, CAMERA = "observation.state", "action", "observation.images."
"""Names of features; CAMERA is followed by the name of a camera."""
FASTEST = 100_000
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
NOWHERE = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""Exceptions that access to a malformed row raises."""
PICTURES = ("PNG", "JPEG", "GIF", "WEBP")
"""Accepted image formats. Pillow supports further ones that execute programs (EPS: Ghostscript)."""


# ------------------------------------------------------------------------------------- what is read
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
        at = frames[:, None] + torch.arange(C, device=frames.device)
        return self.action[at.minimum(end - 1)], at < end

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
        names, of = self.episode.unique(return_inverse=True)
        count = max(round(fraction * len(names)), int(fraction > 0))
        if not 0 <= fraction < 1 or count >= len(names):
            raise ConfigError(
                f"held-out fraction={fraction}: {count} of {len(names)} episodes would be held out;"
                " choose a number in [0, 1) that leaves one to train on, or record more episodes"
            )
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
        held = torch.zeros(len(names), dtype=torch.bool)
        held[order[:count]] = True
        return (~held[of]).nonzero().flatten(), held[of].nonzero().flatten()


# ------------------------------------------------------------------------------------------ reading
@dataclass(frozen=True)
class _Episode:
    """Location of an episode."""

    index: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, int]]
    """Feature -> file and the number of its first frame there."""


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
    names = {name: _named(folder, features, name) for name in (STATE, ACTION)}
    cameras = {
        key: _size(folder, key, f)
        for key, f in features.items()
        if f.get("dtype") in ("video", "image")
    }
    videos = [key for key in cameras if features[key]["dtype"] == "video"]
    episodes = (_episodes_v3 if version == VERSION else _episodes_v2)(folder, info, videos)[:limit]
    frames = sum(episode.length for episode in episodes)
    if not frames:
        raise ConfigError(f"{folder}: has no episodes; record some, or choose another folder")
    _check_memory(
        folder,
        cameras,
        sum(features[key]["shape"][0] for key in names.values()),
        frames,
        len(episodes),
    )
    instructions = read_tasks(folder, version)

    images = {key: np.empty((frames, *size, 3), dtype=np.uint8) for key, size in cameras.items()}
    numbers = {
        name: np.empty((frames, features[key]["shape"][0]), np.float32)
        for name, key in names.items()
    }
    task = np.empty(frames, dtype=np.int64)
    starts = dict(
        zip((e.index for e in episodes), np.cumsum([0] + [e.length for e in episodes]).tolist())
    )
    for path, here in _grouped(episodes, lambda episode: episode.data):
        table = _Table(path, [*names.values(), *(key for key in cameras if key not in videos)])
        for episode in here:
            rows = table.rows(episode)
            span = slice(starts[episode.index], starts[episode.index] + episode.length)
            for name, key in names.items():
                numbers[name][span] = table.floats(key, rows, episode, numbers[name].shape[1])
            for key in cameras.keys() - set(videos):
                images[key][span] = table.pictures(key, rows, episode, cameras[key])
            task[span] = table.tasks(rows, episode, instructions)
    for key in videos:
        for path, here in _grouped(episodes, lambda episode, key=key: episode.videos[key][0]):
            spans = [
                (e, e.videos[key][1], images[key][starts[e.index] : starts[e.index] + e.length])
                for e in here
            ]
            _decode(path, sorted(spans, key=lambda span: span[1]), cameras[key])

    order = sorted(instructions)
    index = np.repeat(
        [episode.index for episode in episodes], [episode.length for episode in episodes]
    )
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
    )


def _grouped(
    episodes: Sequence[_Episode], key: Callable[[_Episode], Path]
) -> list[tuple[Path, list[_Episode]]]:
    """Group episodes by the file that holds them."""
    groups: dict[Path, list[_Episode]] = defaultdict(list)
    for episode in episodes:
        groups[key(episode)].append(episode)
    return list(groups.items())


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
            f"{path} is missing, so this is no folder of demonstrations; name one that has it"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: is no JSON that can be read ({error}); record or download it anew"
        ) from error
    if not isinstance(info, dict) or info.get("codebase_version") not in READ:
        version = info.get("codebase_version") if isinstance(info, dict) else None
        raise ConfigError(
            f"{path}: codebase_version={version!r} is unknown; this reads {', '.join(READ)};"
            " convert it with LeRobot"
        )
    for key, kind in (
        ("features", dict),
        ("fps", (int, float)),
        ("data_path", str),
        ("total_episodes", int),
    ):
        if not isinstance(info.get(key), kind):
            raise ConfigError(
                f"{path}: {key}={info.get(key)!r} is missing or of the wrong type; download it anew"
            )
    if not 0 < info["fps"] <= FASTEST:
        raise ConfigError(
            f"{path}: fps={info['fps']} must be > 0 and <= {FASTEST}; download it anew"
        )
    for key, feature in info["features"].items():
        if not isinstance(feature, dict):
            raise ConfigError(
                f"{path}: features.{key}={feature!r} must say dtype and shape; download it anew"
            )
    return info


def _named(folder: Path, features: Mapping[str, Any], name: str) -> str:
    """Return the feature that holds the state, or the action."""
    for key in (name, "state" if name == STATE else "actions"):
        if key in features:
            shape = features[key].get("shape")
            if not isinstance(shape, list) or len(shape) != 1 or not _whole(shape[0], 1):
                raise ConfigError(
                    f"{folder}/meta/info.json: {key} has shape {shape}; it must be one vector a"
                    " frame"
                )
            return key
    raise ConfigError(
        f"{folder}/meta/info.json: has no feature {name}; it has {', '.join(features) or 'none'}"
    )


def _size(folder: Path, key: str, feature: Mapping[str, Any]) -> tuple[int, int]:
    """Return (H, W) of a camera; shapes are [H, W, 3] or [3, H, W]."""
    shape = feature.get("shape")
    if isinstance(shape, list) and len(shape) == 3 and all(_whole(size, 1) for size in shape):
        if shape[2] == 3:
            return shape[0], shape[1]
        if shape[0] == 3:
            return shape[1], shape[2]
    raise ConfigError(
        f"{folder}/meta/info.json: {key} has shape {shape}; it must be [height, width, 3]"
    )


def _episodes_v3(folder: Path, info: Mapping[str, Any], videos: Sequence[str]) -> list[_Episode]:
    """Return the episodes of version 3.0."""
    rows = read_rows(folder)
    if len(rows) < info["total_episodes"]:
        raise ConfigError(
            f"{folder}/meta/episodes: has {len(rows)} of the {info['total_episodes']} episodes that"
            " meta/info.json counts; copy or download the folder anew"
        )
    episodes = []
    for row in rows:
        try:
            at = {key: row[f"videos/{key}/from_timestamp"] for key in videos}
            videos_at = {
                key: (
                    _place(folder, info["video_path"], row, f"videos/{key}", key),
                    round(at[key] * info["fps"]),
                )
                for key in videos
            }
            data = _place(folder, info["data_path"], row, "data")
            episodes.append(_Episode(row["episode_index"], row["length"], data, videos_at))
        except NOWHERE as error:
            raise ConfigError(
                f"{folder}/meta/episodes: episode {row.get('episode_index')} does not say where it"
                f" is ({type(error).__name__}: {error}); record or download it anew"
            ) from error
    return _checked(folder / "meta/episodes", episodes)


def _episodes_v2(folder: Path, info: Mapping[str, Any], videos: Sequence[str]) -> list[_Episode]:
    """Return the episodes of versions 2.0 and 2.1."""
    episodes = []
    for row in _lines(folder / "meta/episodes.jsonl"):
        try:
            index, length = row["episode_index"], row["length"]
            place = {
                "episode_chunk": index // info.get("chunks_size", CHUNK),
                "episode_index": index,
            }
            videos_at = {
                key: (_inside(folder, info["video_path"], video_key=key, **place), 0)
                for key in videos
            }
            episodes.append(
                _Episode(index, length, _inside(folder, info["data_path"], **place), videos_at)
            )
        except NOWHERE as error:
            raise ConfigError(
                f"{folder}/meta/episodes.jsonl: {row} does not say where it is"
                f" ({type(error).__name__}: {error}); download it anew"
            ) from error
    if len(episodes) < info["total_episodes"]:
        raise ConfigError(
            f"{folder}/meta/episodes.jsonl: has {len(episodes)} of the {info['total_episodes']}"
            " episodes that meta/info.json counts; download it anew"
        )
    return _checked(folder / "meta/episodes.jsonl", episodes)


def _place(folder: Path, template: str, row: Mapping[str, Any], of: str, key: str = "") -> Path:
    """Return the path of a file of version 3.0."""
    places = {name: row[f"{of}/{name}"] for name in ("chunk_index", "file_index")}
    return _inside(folder, template, video_key=key, **places)


def _inside(folder: Path, template: str, **fields: Any) -> Path:
    """Fill in a path template of meta/info.json.

    Raises:
        ValueError: The path is outside ``folder``.
    """
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is not None and (
            not name.isidentifier() or conversion or not re.fullmatch(r"0?\d{0,2}d?", form or "")
        ):
            raise ValueError(f"{{{name}:{form}}} is no place")
    path = Path(template.format(**fields))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{str(path)!r} lies outside the folder")
    return folder / path


def _checked(path: Path, episodes: list[_Episode]) -> list[_Episode]:
    """Sort episodes.

    Raises:
        ConfigError: An episode is duplicated or empty.
    """
    for episode in episodes:
        if not _whole(episode.index, 0):
            raise ConfigError(
                f"{path}: episode_index={episode.index!r} is no number of an episode; download it"
                " anew"
            )
    episodes.sort(key=lambda episode: episode.index)
    for i, episode in enumerate(episodes):
        if i and episode.index == episodes[i - 1].index:
            raise ConfigError(
                f"{path}: episode {episode.index} is there twice; record or download it anew"
            )
        if not _whole(episode.length, 1):
            raise ConfigError(
                f"{path}: episode {episode.index} has length={episode.length}; it must be at"
                " least 1"
            )
    return episodes


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the episode rows of version 3.0, in order."""
    paths = sorted((folder / "meta/episodes").glob("*/*.parquet"))
    rows = [row for path in paths for row in _rows(path)]
    for row in rows:
        if not _whole(index := row.get("episode_index"), 0):
            raise ConfigError(
                f"{folder}/meta/episodes: episode_index={index!r} is no number; download it anew"
            )
    return sorted(rows, key=lambda row: row["episode_index"])


def _whole(x: Any, least: int) -> bool:
    """Return whether ``x`` is an integer of at least ``least`` that fits int64."""
    return isinstance(x, int) and not isinstance(x, bool) and least <= x < 2**63


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; download the folder anew") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: are no JSON lines that can be read ({error}); download it anew"
        ) from error


def read_tasks(folder: Path, version: str) -> dict[int, str]:
    """Return task_index -> sentence.

    In version 3.0 the sentences are the index of a pandas table, which may have no name.
    """
    if version != VERSION:
        path = folder / "meta/tasks.jsonl"
        rows = _lines(path)
    else:
        path = folder / "meta/tasks.parquet"
        if not path.exists() and not any((folder / "meta/episodes").glob("*/*.parquet")):
            return {}
        rows = _rows(path)
    try:
        return {
            int(row["task_index"]): str(row.get("task") or row["__index_level_0__"]) for row in rows
        }
    except NOWHERE as error:
        raise ConfigError(
            f"{path}: has no columns task_index and task ({type(error).__name__}: {error});"
            " download it anew"
        ) from error


def _check_memory(
    folder: Path, cameras: Mapping[str, tuple[int, int]], numbers: int, frames: int, episodes: int
) -> None:
    """Check that images and numbers fit into half of the free memory.

    ``numbers``: dimensions of state and action of a frame.
    """
    free = free_memory()
    need = frames * (sum(3 * height * width for height, width in cameras.values()) + 4 * numbers)
    if free is not None and need > free / 2:
        sizes = " + ".join(
            [*(f"{height} x {width} x 3" for height, width in cameras.values()), f"{numbers} x 4"]
        )
        fits = int(episodes * (free / 2) / need)
        raise ConfigError(
            f"{folder}: {frames} frames x ({sizes}) bytes = {need / 2**30:.2f} GiB of pictures and"
            f" numbers, more than half of the {free / 2**30:.2f} GiB of memory that are free; about"
            f" limit={fits} of its {episodes} episodes would fit; else use smaller pictures, or a"
            " machine with more memory"
        )


# ------------------------------------------------------------------------------------------ parquet
def arrow(path: Path) -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.parquet."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: demonstrations need pyarrow ({error}); pip install pyarrow"
        ) from error
    return pyarrow, parquet


def _load(path: Path, columns: Sequence[str] | None = None) -> Any:
    """Read columns of a parquet file.

    Raises:
        ConfigError: The file or a column is missing or damaged.
    """
    pyarrow, parquet = arrow(path)
    try:
        if not path.exists():
            raise ConfigError(
                f"{path} is missing; copy or download the folder anew, or record it again"
            )
        with parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            if lacks := [name for name in columns or () if there.count(name) != 1]:
                what = (
                    f"has several columns {lacks[0]}"
                    if lacks[0] in there
                    else f"has no column {lacks[0]}"
                )
                raise ConfigError(f"{path}: {what}; it has {', '.join(there)}")
            return file.read(None if columns is None else list(columns)).combine_chunks()
    except (
        pyarrow.ArrowException,
        OSError,
        UnicodeDecodeError,
        OverflowError,
    ) as error:  # also for names of columns
        cause = one_line(error)
        raise ConfigError(
            f"{path}: is no parquet file that can be read ({cause}); record or download it anew"
        ) from error


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a parquet file.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    table = _load(path)
    try:
        return table.to_pylist()
    except (
        arrow(path)[0].ArrowException,
        ValueError,
        OverflowError,
    ) as error:  # invalid text, dates out of range
        raise ConfigError(
            f"{path}: has values that cannot be read ({one_line(error)}); download it anew"
        ) from error


class _Table:
    """Frames of several episodes in one file; messages name file, episode and frame."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self._table = _load(path, [*columns, "episode_index", "frame_index", "task_index"])
        self._cache: dict[str, Any] = {}
        for name in ("episode_index", "frame_index", "task_index"):
            if (
                not str(self._table[name].type).startswith(("int", "uint"))
                or self._table[name].null_count
            ):
                raise ConfigError(
                    f"{path}: {name} is not a whole number in every frame; record or download it"
                    " anew"
                )
        self._episode, self._frame, self._task = (
            self._table[name].to_numpy() for name in ("episode_index", "frame_index", "task_index")
        )

    def _where(self, episode: _Episode) -> str:
        """Return file and episode, for messages."""
        return f"{self.path}: episode {episode.index}"

    def rows(self, episode: _Episode) -> np.ndarray:
        """Return the rows of an episode's frames in order, int64 [L]."""
        rows = np.flatnonzero(self._episode == episode.index)
        rows = rows[np.argsort(self._frame[rows], kind="stable")]
        frame = self._frame[rows]
        if len(frame) != episode.length or (frame != np.arange(len(frame))).any():
            lost = np.setdiff1d(np.arange(episode.length), frame)
            detail = (
                f"frame {lost[0]} is missing" if len(lost) else f"{len(frame)} frames are there"
            )
            raise ConfigError(
                f"{self._where(episode)} should have {episode.length} frames, but {detail}; record"
                " or download it anew"
            )
        return rows

    def tasks(self, rows: np.ndarray, episode: _Episode, known: Mapping[int, str]) -> np.ndarray:
        """Return task_index, int64 [L]."""
        task = self._task[rows]
        for index in np.unique(task).tolist():
            if index not in known:
                raise ConfigError(
                    f"{self._where(episode)} has task_index={index}, which meta/tasks does not"
                    " have; download it anew"
                )
        return task

    def floats(self, name: str, rows: np.ndarray, episode: _Episode, dims: int) -> np.ndarray:
        """Return a feature, float32 [L, dims]."""
        if name not in self._cache:
            self._cache[name] = self._vectors(name, dims)
        x = self._cache[name][rows]
        check_finite(x, f"{self._where(episode)}: {name}")
        return x

    def _vectors(self, name: str, dims: int) -> np.ndarray:
        """Return a feature of all rows of the file, float32 [rows, dims]."""
        import pyarrow
        import pyarrow.compute

        compute: Any = pyarrow.compute

        column = self._table[name].combine_chunks()
        lists = pyarrow.types.is_list(column.type) or pyarrow.types.is_fixed_size_list(column.type)
        lists = lists or pyarrow.types.is_large_list(column.type)
        if lists:
            there = compute.fill_null(compute.list_value_length(column), 0).to_numpy(
                zero_copy_only=False
            )
        else:
            there = np.ones(len(column), dtype=np.int64)
        if len(wrong := np.flatnonzero(there != dims)):
            at = wrong[0]
            raise ConfigError(
                f"{self.path}: episode {self._episode[at]}, frame {self._frame[at]}: {name} has"
                f" {there[at]} numbers; meta/info.json says {dims}; record or download it anew"
            )
        flat = column.flatten() if lists else column
        try:
            return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, dims)
        except (ValueError, TypeError, OverflowError, pyarrow.ArrowException) as error:
            raise ConfigError(
                f"{self.path}: {name} holds {column.type}, not numbers; download it anew"
            ) from error

    def pictures(
        self, name: str, rows: np.ndarray, episode: _Episode, size: tuple[int, int]
    ) -> np.ndarray:
        """Return images that are stored in the table, uint8 [L, H, W, 3]."""
        out = np.empty((len(rows), *size, 3), dtype=np.uint8)
        for i, row in enumerate(rows.tolist()):
            where = f"{self._where(episode)}, frame {i}: {name}"
            try:
                held = self._table[name][row].as_py()
            except ValueError as error:
                raise ConfigError(
                    f"{where} cannot be read ({one_line(error)}); download it anew"
                ) from error
            data = held.get("bytes") if isinstance(held, dict) else held
            if not isinstance(data, bytes):
                raise ConfigError(
                    f"{where} holds no picture; download the dataset with its pictures in the"
                    " tables"
                )
            try:
                with Image.open(io.BytesIO(data), formats=PICTURES) as picture:
                    width, height = picture.size
                    if (height, width) == size:  # check first: a small file may decode to gigabytes
                        out[i] = np.asarray(picture.convert("RGB"))
            except UNREADABLE as error:
                raise ConfigError(
                    f"{where} cannot be decoded ({error}); record or download it anew"
                ) from error
            if (height, width) != size:
                raise ConfigError(
                    f"{where} is {[height, width, 3]}; meta/info.json says {[*size, 3]}"
                )
        return out


def check_finite(x: np.ndarray, where: str) -> None:
    """Check that all numbers of x [L, K] are finite.

    Raises:
        ConfigError: One is not.
    """
    if len(bad := np.argwhere(~np.isfinite(x))):
        frame, i = bad[0].tolist()
        raise ConfigError(
            f"{where} [{i}] is {x[frame, i]} in frame {frame}; it must be finite: leave the"
            " episode out"
        )


# -------------------------------------------------------------------------------------------- video
def _decode(
    path: Path, spans: Sequence[tuple[_Episode, int, np.ndarray]], size: tuple[int, int]
) -> None:
    """Decode a video into uint8 [L, H, W, 3] of each episode; ``spans`` are sorted by first
    frame.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} is missing; copy or download the folder anew, or record it again"
        )
    try:
        with closing(_frames(path)) as frames:
            width, height = next(frames)["size"]
            if (height, width) != size:
                raise ConfigError(
                    f"{path}: shows {height} x {width} pixels; meta/info.json says {size[0]} x"
                    f" {size[1]}"
                )
            at = 0  # index of the next frame
            for episode, first, out in spans:
                if first < at:
                    raise ConfigError(
                        f"{path}: episode {episode.index} begins before the one before it ends"
                    )
                for i in range(first - at + len(out)):
                    picture = next(frames, None)
                    frame = at + i - first
                    if picture is None:
                        raise ConfigError(
                            f"{path}: ends after {at + i} frames, at episode {episode.index}, frame"
                            f" {max(frame, 0)} of {len(out)}; record or download it anew"
                        )
                    if frame >= 0:
                        out[frame] = np.frombuffer(picture, dtype=np.uint8).reshape(*size, 3)
                at = first + len(out)
    except (OSError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        cause = one_line(error)[-200:]
        raise ConfigError(
            f"{path}: is no video that can be read ({cause}); record or download it anew"
        ) from error


def _frames(path: Path) -> Any:
    """Yield the video's metadata, then the bytes [H, W, 3] of each frame; stops at a damaged
    frame.
    """
    read_frames: Any = imageio_ffmpeg.read_frames
    return read_frames(
        str(path),
        # Only mp4: ffmpeg also accepts playlists, which could name files outside the folder.
        input_params=["-f", "mp4", "-threads", "1", "-xerror", "-err_detect", "explode"],
        output_params=["-fps_mode", "passthrough"],
    )
