"""Demonstrations on disk, in LeRobot's layout: recorded file by file, read whole into memory.

Shape letters: F frames of all episodes, L frames of one, H x W pixels, D state and A action dimensions, C actions of a
chunk, B samples.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import imageio.v3 as imageio
import imageio_ffmpeg
import numpy as np
import torch
from torch import Tensor

from embodied_ppo.errors import ConfigError

VERSION = "v3.0"
"""What is written."""
READ = (VERSION, "v2.1", "v2.0")
"""What is read."""
STATE, ACTION, CAMERA = "observation.state", "action", "observation.images."
"""Names of features; CAMERA is followed by the camera's."""
CHUNK = 1000
"""Files of a folder chunk-000."""
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
KEYFRAMES = 10
"""A frame of the video that stands by itself every so many: who reads one frame decodes at most as many."""
SAFE = "What was finished before is safe: record again into the same folder to go on"
INDICES = ("frame_index", "episode_index", "index", "task_index")

Stats: TypeAlias = "dict[str, np.ndarray]"
"""min, max, mean, std and count of one feature, as LeRobot has them: float64 [D] or, for images, [3, 1, 1]; [1]."""


# ------------------------------------------------------------------------------------------------------ what is read
@dataclass(frozen=True)
class Demonstrations:
    """Episodes one after another.

    images       camera -> uint8 [F, H, W, 3], seen before ``action`` was taken
    state        float32 [F, D]
    action       float32 [F, A]
    episode      int64 [F], ascending
    instruction  int64 [F], index into ``instructions``
    fps          frames, so actions, per second
    """

    images: dict[str, Tensor]
    state: Tensor
    action: Tensor
    episode: Tensor
    instruction: Tensor
    instructions: tuple[str, ...]
    fps: float

    def chunk(self, frames: Tensor, C: int) -> tuple[Tensor, Tensor]:
        """The actions of ``frames`` int64 [B] and of the C - 1 after them: action [B, C, A], executed bool [B, C].

        Beyond the end of its episode executed is False, and the action is the episode's last.
        """
        end = torch.searchsorted(self.episode, self.episode[frames], right=True)[:, None]
        at = frames[:, None] + torch.arange(C, device=frames.device)
        return self.action[at.minimum(end - 1)], at < end

    def split(self, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
        """Frames to train on and frames held out, int64 each: whole episodes, ``fraction`` of them held out.

        At least one episode is held out unless ``fraction`` is 0. Raises ConfigError where none is left to train on.
        """
        names, of = self.episode.unique(return_inverse=True)
        count = max(round(fraction * len(names)), int(fraction > 0))
        if not 0 <= fraction < 1 or count >= len(names):
            raise ConfigError(
                f"held-out fraction={fraction}: {count} of {len(names)} episodes would be held out; choose a number "
                "in [0, 1) that leaves one to train on, or record more episodes"
            )
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed))
        held = torch.zeros(len(names), dtype=torch.bool)
        held[order[:count]] = True
        return (~held[of]).nonzero().flatten(), held[of].nonzero().flatten()


# -------------------------------------------------------------------------------------------------------- recording
class Writer:
    """Records episodes into ``folder``, LeRobot v3.0. Use it in a ``with`` statement, or ``close`` it.

    Every ``episodes_per_file`` episodes a file is finished: one parquet of numbers, one mp4 per camera and one parquet
    of episodes, which is renamed into place last and counts. Whoever is killed loses the episodes of the file that was
    not finished; opened again, the folder is continued after the last finished one (``episodes``, ``frames``).

    Pictures come back bit for bit: H.264 of RGB without loss (libx264rgb, crf 0; largest and mean error 0). ffmpeg,
    so torchcodec and PyAV, decode it; most browsers do not show it. One ffmpeg process per camera and file encodes.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        fps: int,
        state: Sequence[str],
        action: Sequence[str],
        cameras: Mapping[str, tuple[int, int]],
        episodes_per_file: int = 64,
        robot_type: str | None = None,
    ) -> None:
        """``state`` and ``action`` name the D and A dimensions; ``cameras``: name -> (H, W) in pixels.

        Raises ConfigError where ``folder`` holds something else, or is being recorded into by another process.
        """
        self.folder = Path(folder)
        self.episodes = self.frames = 0
        """There are so many, in finished files and in the one that is being written."""
        self._fps, self._cameras, self._per_file = fps, dict(cameras), episodes_per_file
        self._dims = {STATE: len(state), ACTION: len(action)}
        self._robot_type = robot_type
        self._features = _features(fps, state, action, self._cameras)
        for name, number in (("fps", fps), ("episodes_per_file", episodes_per_file), *self._dims.items()):
            if number < 1:
                raise ConfigError(f"{self.folder}: {name}={number} must be at least 1")
        if bad := [name for name in cameras if "/" in name or not name]:
            raise ConfigError(f"{self.folder}: camera {bad[0]!r} cannot be a folder; give it a name without slashes")
        _arrow(self.folder)
        self._tasks: dict[str, int] = {}
        self._stats: dict[str, Stats] = {}
        self._file = 0
        self._episode_rows: list[dict[str, Any]] = []
        self._columns: dict[str, list[np.ndarray]] = defaultdict(list)
        self._encoders: dict[str, Any] = {}
        self._lock = self._locked()
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    def add(self, images: Mapping[str, np.ndarray], state: np.ndarray, action: np.ndarray, instruction: str) -> None:
        """One whole episode: camera -> uint8 [L, H, W, 3], float32 [L, D], float32 [L, A] and its sentence.

        Raises ConfigError for wrong shapes or types, and for numbers that are not finite.
        """
        if self._lock < 0:
            raise ConfigError(f"{self.folder}: was closed; make a new Writer to go on")
        length = self._check(images, state, action, instruction)
        try:
            self._encode(images)
            self._note(images, length, state, action, instruction)
        except BaseException as error:  # a video with half an episode is of no use
            self._abandon()
            if isinstance(error, OSError):
                cause = " ".join(str(error).split())[:200]
                raise ConfigError(
                    f"{self.folder}: episode {self.episodes} could not be encoded ({cause}); is the disk full? {SAFE}"
                ) from error
            raise
        if len(self._episode_rows) == self._per_file:
            self._finish()

    def close(self) -> None:
        """Finish the file that is being written, with the episodes it has. May be called twice."""
        if self._episode_rows:
            self._finish()
        self._release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- beginning
    def _locked(self) -> int:
        """The folder's file descriptor: who has it locked records."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"{self.folder}: another process records into it; wait for it, or choose another folder"
            ) from error
        return lock

    def _open(self) -> None:
        """Begin a dataset, or continue the one that is there."""
        if not (self.folder / "meta/info.json").exists():
            if there := sorted(path.name for path in self.folder.iterdir() if path.name != "meta"):
                raise ConfigError(f"{self.folder}: holds {there[0]} but no meta/info.json; choose an empty folder")
            self._publish()
            return
        info = _info(self.folder)
        there = {"codebase_version": info["codebase_version"], "fps": info["fps"], **_plain(info["features"])}
        wanted = {"codebase_version": VERSION, "fps": self._fps, **_plain(self._features)}
        for key in wanted | there:
            if wanted.get(key) != there.get(key):
                raise ConfigError(
                    f"{self.folder}: holds demonstrations with {key}={there.get(key)}, not {wanted.get(key)}; choose "
                    "another folder, or the options it was begun with"
                )
        rows = _rows(self.folder)
        self._tasks = {text: index for index, text in _tasks(self.folder, VERSION).items()}
        self.episodes, self.frames = len(rows), sum(row["length"] for row in rows)
        for row in rows:
            self._file = max(self._file, *_files_of(row, int(info.get("chunks_size", CHUNK))))
            try:
                found = {key: {x: np.array(row[f"stats/{key}/{x}"]) for x in _STATS} for key in self._keys()}
            except KeyError as error:
                raise ConfigError(
                    f"{self.folder}: episode {row['episode_index']} has no column {error.args[0]}, so it was recorded "
                    "by something else; choose another folder"
                ) from error
            self._stats = {key: _merged(self._stats.get(key), new) for key, new in found.items()}
        self._file += bool(rows)
        # What an interrupted recording has left behind.
        for path in [*self.folder.rglob("*.part"), *(path for path in self._paths())]:
            path.unlink(missing_ok=True)
        self._publish()

    def _keys(self) -> list[str]:
        """Features with statistics."""
        return [STATE, ACTION, *(CAMERA + name for name in self._cameras)]

    # ------------------------------------------------------------------------------------------------------ adding
    def _check(self, images: Mapping[str, np.ndarray], state: np.ndarray, action: np.ndarray, instruction: str) -> int:
        """L. Raises ConfigError."""
        where = f"{self.folder}: episode {self.episodes}"
        if set(images) != set(self._cameras):
            raise ConfigError(f"{where} has pictures of {sorted(images)}; they must be of {sorted(self._cameras)}")
        length = len(state)
        if length == 0 or not instruction:
            raise ConfigError(f"{where} has {length} frames and instruction={instruction!r}; leave it out")
        for name, size in self._cameras.items():
            x = images[name]
            if x.shape != (length, *size, 3) or x.dtype != np.uint8:
                raise ConfigError(
                    f"{where}: camera {name} shows {x.dtype} {list(x.shape)}; it must be uint8 {[length, *size, 3]}"
                )
        for name, x in ((STATE, state), (ACTION, action)):
            if x.shape != (length, self._dims[name]):
                raise ConfigError(f"{where}: {name} is {list(x.shape)}; it must be {[length, self._dims[name]]}")
            _check_finite(x, f"{where}: {name}")
        return length

    def _encode(self, images: Mapping[str, np.ndarray]) -> None:
        """The pictures go to ffmpeg."""
        for name, pictures in images.items():
            if name not in self._encoders:
                self._encoders[name] = _encoder(_part(self._path(VIDEO_PATH, name)), self._cameras[name], self._fps)
            self._encoders[name].send(np.ascontiguousarray(pictures))

    def _note(
        self, images: Mapping[str, np.ndarray], length: int, state: np.ndarray, action: np.ndarray, instruction: str
    ) -> None:
        """The numbers wait for the end of the file."""
        task = self._tasks.setdefault(instruction, len(self._tasks))
        frame = np.arange(length)
        columns = {
            STATE: np.asarray(state, dtype=np.float32),
            ACTION: np.asarray(action, dtype=np.float32),
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(length, self.episodes),
            "index": self.frames + frame,
            "task_index": np.full(length, task),
        }
        for name, column in columns.items():
            self._columns[name].append(column)
        stats = {STATE: _stats(columns[STATE]), ACTION: _stats(columns[ACTION])}
        stats |= {CAMERA + name: _image_stats(pictures) for name, pictures in images.items()}
        self._stats = {key: _merged(self._stats.get(key), new) for key, new in stats.items()}
        self._episode_rows.append(self._episode_row(length, instruction, stats))
        self.episodes += 1
        self.frames += length

    def _abandon(self) -> None:
        """Leave what is not finished, and be closed."""
        self.episodes -= len(self._episode_rows)
        self.frames -= sum(row["length"] for row in self._episode_rows)
        self._episode_rows = []
        self._release()

    def _release(self) -> None:
        for encoder in self._encoders.values():
            encoder.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._encoders, self._lock = {}, -1

    def _episode_row(self, length: int, instruction: str, stats: Mapping[str, Stats]) -> dict[str, Any]:
        """What meta/episodes says of the next episode."""
        place = {"chunk_index": self._file // CHUNK, "file_index": self._file % CHUNK}
        begun = sum(row["length"] for row in self._episode_rows)  # frames of this file
        row: dict[str, Any] = {"episode_index": self.episodes, "tasks": [instruction], "length": length}
        row |= {f"data/{key}": x for key, x in place.items()}
        row |= {"dataset_from_index": self.frames, "dataset_to_index": self.frames + length}
        for name in self._cameras:
            row |= {f"videos/{CAMERA}{name}/{key}": x for key, x in place.items()}
            times = {"from_timestamp": begun / self._fps, "to_timestamp": (begun + length) / self._fps}
            row |= {f"videos/{CAMERA}{name}/{key}": x for key, x in times.items()}
        row |= {f"stats/{key}/{x}": array.tolist() for key, of in stats.items() for x, array in of.items()}
        return row | {f"meta/episodes/{key}": x for key, x in place.items()}

    # --------------------------------------------------------------------------------------------------- finishing
    def _path(self, template: str, camera: str = "") -> Path:
        key = CAMERA + camera
        return self.folder / template.format(
            video_key=key, chunk_index=self._file // CHUNK, file_index=self._file % CHUNK
        )

    def _paths(self) -> Iterator[Path]:
        """What is written before the file counts."""
        yield self._path(DATA_PATH)
        yield from (self._path(VIDEO_PATH, name) for name in self._cameras)

    def _finish(self) -> None:
        """Everything added since the last file, on disk; then it counts."""
        try:
            self._write_file()
        except BaseException:
            self._abandon()
            raise
        self._file += 1
        self._publish()

    def _write_file(self) -> None:
        pyarrow, parquet = _arrow(self.folder)
        frames = sum(row["length"] for row in self._episode_rows)
        for name, encoder in self._encoders.items():
            encoder.close()
            path = self._path(VIDEO_PATH, name)
            if (there := _count(_part(path))) != frames:
                raise ConfigError(f"{path}: ffmpeg wrote {there} of {frames} frames; is the disk full? {SAFE}")
            _move(_part(path), path)
        joined = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        data = pyarrow.table({name: _column(x) for name, x in joined.items()})
        _write(self._path(DATA_PATH), lambda part: parquet.write_table(data, part))
        tasks = _tasks_table(self._tasks)
        _write(self.folder / "meta/tasks.parquet", lambda part: parquet.write_table(tasks, part))
        episodes = pyarrow.Table.from_pylist(self._episode_rows)
        _write(self._path(EPISODES_PATH), lambda part: parquet.write_table(episodes, part))
        self._episode_rows, self._columns, self._encoders = [], defaultdict(list), {}

    def _publish(self) -> None:
        """meta/stats.json and meta/info.json, which follow from the finished files."""
        info = {
            "codebase_version": VERSION,
            "robot_type": self._robot_type,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": len(self._tasks),
            "chunks_size": CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 500,
            "fps": self._fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if self._cameras else None,
            "features": self._features,
        }
        stats = {key: {x: array.tolist() for x, array in of.items()} for key, of in self._stats.items()}
        for name, value in (("stats", stats), ("info", info)):
            text = json.dumps(value, indent=4, ensure_ascii=False)
            _write(self.folder / f"meta/{name}.json", lambda part, text=text: part.write_text(text))


def _features(
    fps: int, state: Sequence[str], action: Sequence[str], cameras: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """What meta/info.json says of the columns and the videos."""
    features: dict[str, Any] = {}
    for name, (height, width) in cameras.items():
        video = {
            "video.height": height,
            "video.width": width,
            "video.codec": "h264",
            "video.pix_fmt": "gbrp",
            "video.is_depth_map": False,
            "video.fps": fps,
            "video.channels": 3,
            "has_audio": False,
        }
        names = ["height", "width", "channels"]
        features[CAMERA + name] = {"dtype": "video", "shape": [height, width, 3], "names": names, "info": video}
    for name, dims in ((STATE, state), (ACTION, action)):
        features[name] = {"dtype": "float32", "shape": [len(dims)], "names": list(dims)}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    return features | {name: {"dtype": "int64", "shape": [1], "names": None} for name in INDICES}


def _plain(features: Mapping[str, Any]) -> dict[str, Any]:
    """What two recordings into one folder must have in common."""
    return {key: [feature.get(x) for x in ("dtype", "shape", "names")] for key, feature in features.items()}


def _encoder(path: Path, size: tuple[int, int], fps: int) -> Any:
    """Takes uint8 [.., H, W, 3] by ``send``. Equal pictures give equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_frames: Any = imageio_ffmpeg.write_frames  # its annotations forbid what its documentation allows
    writer = write_frames(
        str(path),
        (size[1], size[0]),
        fps=fps,
        codec="libx264rgb",
        pix_fmt_out="rgb24",
        quality=None,
        macro_block_size=1,
        output_params=[
            *("-crf", "0", "-preset", "veryfast", "-g", str(KEYFRAMES), "-bf", "0", "-threads", "1", "-f", "mp4"),
            *("-fflags", "+bitexact", "-flags:v", "+bitexact", "-map_metadata", "-1"),
        ],
    )
    writer.send(None)
    return writer


def _count(path: Path) -> int:
    """Frames of a video; 0 where it cannot be read."""
    try:
        return imageio_ffmpeg.count_frames_and_secs(str(path))[0] or 0
    except (OSError, RuntimeError):
        return 0


def _column(x: np.ndarray) -> Any:
    """[F] or [F, 1] as numbers, [F, D] as lists of D."""
    import pyarrow

    flat = pyarrow.array(x.reshape(-1))
    return flat if x.ndim == 1 or x.shape[1] == 1 else pyarrow.FixedSizeListArray.from_arrays(flat, x.shape[1])


def _tasks_table(tasks: Mapping[str, int]) -> Any:
    """A table that pandas reads with the sentences as its index, as LeRobot expects."""
    import pyarrow

    table = pyarrow.table(
        {
            "task_index": pyarrow.array(list(tasks.values()), pyarrow.int64()),
            "task": pyarrow.array(list(tasks), pyarrow.string()),
        }
    )
    columns = [
        {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.2.0"}
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def _part(path: Path) -> Path:
    """Where a file is written before it is moved into place; not shared with the ffmpeg of somebody who was killed."""
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def _move(part: Path, path: Path) -> None:
    """Into place, once it is on the disk."""
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write(_part(path))
    _move(_part(path), path)


# -------------------------------------------------------------------------------------------------------- statistics
_STATS = ("min", "max", "mean", "std", "count")


def _stats(x: np.ndarray) -> Stats:
    """Of [L, D] over L."""
    wide = x.astype(np.float64)
    low, high, mean, std = wide.min(0), wide.max(0), wide.mean(0), wide.std(0)
    return {"min": low, "max": high, "mean": mean, "std": std, "count": np.array([len(x)])}


def _image_stats(x: np.ndarray) -> Stats:
    """Of uint8 [L, H, W, 3] over all pixels, as numbers in [0, 1]; counted in pictures."""
    counts = np.stack([np.bincount(x[..., c].reshape(-1), minlength=256) for c in range(3)])
    value, share = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    seen = np.where(counts > 0, value, np.nan)
    mean = share @ value
    std = np.sqrt(np.maximum((share * np.square(value - mean[:, None])).sum(1), 0.0))
    named = {"min": np.nanmin(seen, axis=1), "max": np.nanmax(seen, axis=1), "mean": mean, "std": std}
    return {key: v.reshape(3, 1, 1) for key, v in named.items()} | {"count": np.array([len(x)])}


def _merged(a: Stats | None, b: Stats) -> Stats:
    """Of both together."""
    if a is None:
        return b
    count = a["count"] + b["count"]
    wa, wb = a["count"] / count, b["count"] / count
    mean = wa * a["mean"] + wb * b["mean"]
    variance = wa * (a["std"] ** 2 + (a["mean"] - mean) ** 2) + wb * (b["std"] ** 2 + (b["mean"] - mean) ** 2)
    low, high = np.minimum(a["min"], b["min"]), np.maximum(a["max"], b["max"])
    return {"min": low, "max": high, "mean": mean, "std": np.sqrt(variance), "count": count}


# ----------------------------------------------------------------------------------------------------------- reading
@dataclass(frozen=True)
class _Episode:
    """Where an episode is."""

    index: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, int]]
    """Feature -> file and the number of its first frame there."""


def read(folder: Path | str, *, limit: int | None = None) -> Demonstrations:
    """The demonstrations in ``folder``, or the first ``limit`` episodes of them: LeRobot v3.0, v2.1 or v2.0.

    Cameras are called what follows "observation.images." (or "observation.") in their features' names; a state or an
    action may also be called "state" or "actions". Pickles are never read.

    Raises ConfigError naming file, episode and frame of what is missing, of the wrong shape, not finite or unreadable,
    and where the pictures need more than half of the memory that is free.
    """
    folder = Path(folder)
    if limit is not None and limit < 1:
        raise ConfigError(f"{folder}: limit={limit} must be at least 1 episode")
    info = _info(folder)
    version, features = info["codebase_version"], info["features"]
    names = {name: _named(folder, features, name) for name in (STATE, ACTION)}
    cameras = {key: _size(folder, key, f) for key, f in features.items() if f.get("dtype") in ("video", "image")}
    videos = [key for key in cameras if features[key]["dtype"] == "video"]
    episodes = (_episodes_v3 if version == VERSION else _episodes_v2)(folder, info, videos)[:limit]
    frames = sum(episode.length for episode in episodes)
    if not frames:
        raise ConfigError(f"{folder}: has no episodes; record some, or choose another folder")
    _check_memory(folder, cameras, frames, len(episodes))
    instructions = _tasks(folder, version)

    images = {key: np.empty((frames, *size, 3), dtype=np.uint8) for key, size in cameras.items()}
    numbers = {name: np.empty((frames, features[key]["shape"][0]), np.float32) for name, key in names.items()}
    task = np.empty(frames, dtype=np.int64)
    starts = dict(zip((e.index for e in episodes), np.cumsum([0] + [e.length for e in episodes]).tolist()))
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
            spans = [(e, e.videos[key][1], images[key][starts[e.index] : starts[e.index] + e.length]) for e in here]
            _decode(path, sorted(spans, key=lambda span: span[1]), cameras[key])

    order = sorted(instructions)
    index = np.repeat([episode.index for episode in episodes], [episode.length for episode in episodes])
    return Demonstrations(
        images={
            key.removeprefix(CAMERA).removeprefix("observation."): torch.from_numpy(x) for key, x in images.items()
        },
        state=torch.from_numpy(numbers[STATE]),
        action=torch.from_numpy(numbers[ACTION]),
        episode=torch.from_numpy(index.astype(np.int64)),
        instruction=torch.from_numpy(np.searchsorted(order, task)),
        instructions=tuple(instructions[i] for i in order),
        fps=float(info["fps"]),
    )


def _grouped(episodes: Sequence[_Episode], key: Callable[[_Episode], Path]) -> list[tuple[Path, list[_Episode]]]:
    groups: dict[Path, list[_Episode]] = defaultdict(list)
    for episode in episodes:
        groups[key(episode)].append(episode)
    return list(groups.items())


def _info(folder: Path) -> dict[str, Any]:
    """meta/info.json, with what every version has."""
    path = folder / "meta/info.json"
    try:
        info = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing, so this is no folder of demonstrations; name one that has it") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: is no JSON that can be read ({error}); record or download it anew") from error
    if not isinstance(info, dict) or info.get("codebase_version") not in READ:
        version = info.get("codebase_version") if isinstance(info, dict) else None
        raise ConfigError(
            f"{path}: codebase_version={version!r} is unknown; this reads {', '.join(READ)}; convert it with LeRobot"
        )
    for key, kind in (("features", dict), ("fps", (int, float)), ("data_path", str), ("total_episodes", int)):
        if not isinstance(info.get(key), kind):
            raise ConfigError(f"{path}: {key}={info.get(key)!r} is missing or of the wrong type; download it anew")
    return info


def _named(folder: Path, features: Mapping[str, Any], name: str) -> str:
    """The feature that is the state, or the action."""
    for key in (name, "state" if name == STATE else "actions"):
        if key in features:
            shape = features[key].get("shape")
            if not isinstance(shape, list) or len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 1:
                raise ConfigError(f"{folder}/meta/info.json: {key} has shape {shape}; it must be one vector a frame")
            return key
    raise ConfigError(f"{folder}/meta/info.json: has no feature {name}; it has {', '.join(features) or 'none'}")


def _size(folder: Path, key: str, feature: Mapping[str, Any]) -> tuple[int, int]:
    """(H, W) of a camera; shapes are [H, W, 3] or [3, H, W]."""
    shape = feature.get("shape") or []
    if len(shape) == 3 and shape[2] == 3:
        return int(shape[0]), int(shape[1])
    if len(shape) == 3 and shape[0] == 3:
        return int(shape[1]), int(shape[2])
    raise ConfigError(f"{folder}/meta/info.json: {key} has shape {shape}; it must be [height, width, 3]")


def _episodes_v3(folder: Path, info: Mapping[str, Any], videos: Sequence[str]) -> list[_Episode]:
    rows = _rows(folder)
    if len(rows) < info["total_episodes"]:
        raise ConfigError(
            f"{folder}/meta/episodes: has {len(rows)} of the {info['total_episodes']} episodes that meta/info.json "
            "counts; copy or download the folder anew"
        )
    episodes = []
    for row in rows:
        try:
            at = {key: row[f"videos/{key}/from_timestamp"] for key in videos}
            found = {
                key: (_place(folder, info["video_path"], row, f"videos/{key}", key), round(at[key] * info["fps"]))
                for key in videos
            }
            data = _place(folder, info["data_path"], row, "data")
            episodes.append(_Episode(row["episode_index"], row["length"], data, found))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{folder}/meta/episodes: episode {row.get('episode_index')} does not say where it is "
                f"({type(error).__name__}: {error}); record or download it anew"
            ) from error
    return _checked(folder / "meta/episodes", episodes)


def _episodes_v2(folder: Path, info: Mapping[str, Any], videos: Sequence[str]) -> list[_Episode]:
    episodes = []
    for row in _lines(folder / "meta/episodes.jsonl"):
        try:
            index, length = row["episode_index"], row["length"]
            place = {"episode_chunk": index // info.get("chunks_size", CHUNK), "episode_index": index}
            found = {key: (folder / info["video_path"].format(video_key=key, **place), 0) for key in videos}
            episodes.append(_Episode(index, length, folder / info["data_path"].format(**place), found))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{folder}/meta/episodes.jsonl: {row} does not say where it is ({type(error).__name__}: {error}); "
                "download it anew"
            ) from error
    if len(episodes) < info["total_episodes"]:
        raise ConfigError(
            f"{folder}/meta/episodes.jsonl: has {len(episodes)} of the {info['total_episodes']} episodes that "
            "meta/info.json counts; download it anew"
        )
    return _checked(folder / "meta/episodes.jsonl", episodes)


def _place(folder: Path, template: str, row: Mapping[str, Any], of: str, key: str = "") -> Path:
    return folder / template.format(
        video_key=key, chunk_index=row[f"{of}/chunk_index"], file_index=row[f"{of}/file_index"]
    )


def _checked(path: Path, episodes: list[_Episode]) -> list[_Episode]:
    """In order. Raises ConfigError for an episode that is there twice, or empty."""
    episodes.sort(key=lambda episode: episode.index)
    for i, episode in enumerate(episodes):
        if i and episode.index == episodes[i - 1].index:
            raise ConfigError(f"{path}: episode {episode.index} is there twice; record or download it anew")
        if not isinstance(episode.length, int) or episode.length < 1:
            raise ConfigError(f"{path}: episode {episode.index} has length={episode.length}; it must be at least 1")
    return episodes


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Episodes of v3.0, in order."""
    paths = sorted((folder / "meta/episodes").glob("*/*.parquet"))
    return sorted((row for path in paths for row in _load(path).to_pylist()), key=lambda row: row["episode_index"])


def _files_of(row: Mapping[str, Any], chunk: int) -> list[int]:
    """Numbers of the files that an episode of v3.0 is in."""
    keys = [key.removesuffix("chunk_index") for key in row if key.endswith("/chunk_index")]
    return [row[f"{key}chunk_index"] * chunk + row[f"{key}file_index"] for key in keys]


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; download the folder anew") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: are no JSON lines that can be read ({error}); download it anew") from error


def _tasks(folder: Path, version: str) -> dict[int, str]:
    """task_index -> sentence. The sentences of v3.0 are pandas' index, which may have no name."""
    if version != VERSION:
        path = folder / "meta/tasks.jsonl"
        rows = _lines(path)
    else:
        path = folder / "meta/tasks.parquet"
        if not path.exists() and not any((folder / "meta/episodes").glob("*/*.parquet")):
            return {}
        rows = _load(path).to_pylist()
    try:
        return {int(row["task_index"]): str(row.get("task") or row["__index_level_0__"]) for row in rows}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: has no columns task_index and task ({type(error).__name__}: {error}); download it anew"
        ) from error


def _check_memory(folder: Path, cameras: Mapping[str, tuple[int, int]], frames: int, episodes: int) -> None:
    free = _free_bytes()
    need = frames * sum(3 * height * width for height, width in cameras.values())
    if free is not None and need > free / 2:
        sizes = " + ".join(f"{height} x {width} x 3" for height, width in cameras.values())
        fits = int(episodes * (free / 2) / need)
        raise ConfigError(
            f"{folder}: {frames} frames x ({sizes}) bytes = {need / 2**30:.2f} GiB of pictures, more than half of the "
            f"{free / 2**30:.2f} GiB of memory that are free; about limit={fits} of its {episodes} episodes would fit; "
            "else use smaller pictures, or a machine with more memory"
        )


def _free_bytes() -> float | None:
    """Memory that this process may still take; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        limit, used = (Path(f"/sys/fs/cgroup/memory.{x}") for x in ("max", "current"))
        if limit.exists() and (most := limit.read_text().strip()) != "max":
            free = min(free, float(most) - float(used.read_text()))
    except (OSError, StopIteration, ValueError):
        return None
    return max(free, 0.0)


# ----------------------------------------------------------------------------------------------------------- parquet
def _arrow(path: Path) -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(f"{path}: demonstrations need pyarrow ({error}); pip install pyarrow") from error
    return pyarrow, parquet


def _load(path: Path, columns: Sequence[str] | None = None) -> Any:
    """A pyarrow table. Raises ConfigError."""
    pyarrow, parquet = _arrow(path)
    if not path.exists():
        raise ConfigError(f"{path} is missing; copy or download the folder anew, or record it again")
    try:
        with parquet.ParquetFile(path) as file:
            there = file.schema_arrow.names
            if lacks := [name for name in columns or () if name not in there]:
                raise ConfigError(f"{path}: has no column {lacks[0]}; it has {', '.join(there)}")
            return file.read(None if columns is None else list(columns)).combine_chunks()
    except (pyarrow.ArrowException, OSError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: is no parquet file that can be read ({cause}); record or download it anew"
        ) from error


class _Table:
    """Frames of several episodes; messages name file, episode and frame."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self.path = path
        self._table = _load(path, [*columns, "episode_index", "frame_index", "task_index"])
        self._cache: dict[str, Any] = {}
        self._episode, self._frame, self._task = (
            self._table[name].to_numpy() for name in ("episode_index", "frame_index", "task_index")
        )

    def _where(self, episode: _Episode) -> str:
        return f"{self.path}: episode {episode.index}"

    def rows(self, episode: _Episode) -> np.ndarray:
        """Of its frames, in order, int64 [L]."""
        rows = np.flatnonzero(self._episode == episode.index)
        rows = rows[np.argsort(self._frame[rows], kind="stable")]
        frame = self._frame[rows]
        if len(frame) != episode.length or (frame != np.arange(len(frame))).any():
            lost = np.setdiff1d(np.arange(episode.length), frame)
            detail = f"frame {lost[0]} is missing" if len(lost) else f"{len(frame)} frames are there"
            raise ConfigError(
                f"{self._where(episode)} should have {episode.length} frames, but {detail}; record or download it anew"
            )
        return rows

    def tasks(self, rows: np.ndarray, episode: _Episode, known: Mapping[int, str]) -> np.ndarray:
        """task_index, int64 [L]."""
        task = self._task[rows]
        for index in np.unique(task).tolist():
            if index not in known:
                raise ConfigError(
                    f"{self._where(episode)} has task_index={index}, which meta/tasks does not have; download it anew"
                )
        return task

    def floats(self, name: str, rows: np.ndarray, episode: _Episode, dims: int) -> np.ndarray:
        """float32 [L, dims]."""
        if name not in self._cache:
            self._cache[name] = self._vectors(name, dims)
        x = self._cache[name][rows]
        _check_finite(x, f"{self._where(episode)}: {name}")
        return x

    def _vectors(self, name: str, dims: int) -> np.ndarray:
        """float32 [rows, dims] of the whole file."""
        import pyarrow
        import pyarrow.compute

        compute: Any = pyarrow.compute

        column = self._table[name].combine_chunks()
        lists = pyarrow.types.is_list(column.type) or pyarrow.types.is_fixed_size_list(column.type)
        lists = lists or pyarrow.types.is_large_list(column.type)
        if lists:
            there = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        else:
            there = np.ones(len(column), dtype=np.int64)
        if len(wrong := np.flatnonzero(there != dims)):
            at = wrong[0]
            raise ConfigError(
                f"{self.path}: episode {self._episode[at]}, frame {self._frame[at]}: {name} has {there[at]} numbers; "
                f"meta/info.json says {dims}; record or download it anew"
            )
        flat = column.flatten() if lists else column
        try:
            return flat.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, dims)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{self.path}: {name} holds {column.type}, not numbers; download it anew") from error

    def pictures(self, name: str, rows: np.ndarray, episode: _Episode, size: tuple[int, int]) -> np.ndarray:
        """uint8 [L, H, W, 3] of pictures that are files within the file."""
        out = np.empty((len(rows), *size, 3), dtype=np.uint8)
        for i, row in enumerate(rows.tolist()):
            where = f"{self._where(episode)}, frame {i}: {name}"
            held = self._table[name][row].as_py()
            data = held.get("bytes") if isinstance(held, dict) else held
            if not isinstance(data, bytes):
                raise ConfigError(f"{where} holds no picture; download the dataset with its pictures in the tables")
            try:
                picture = np.asarray(imageio.imread(io.BytesIO(data), mode="RGB"))
            except Exception as error:  # whatever a reader of pictures raises
                raise ConfigError(f"{where} cannot be decoded ({error}); record or download it anew") from error
            if picture.shape != (*size, 3):
                raise ConfigError(f"{where} is {list(picture.shape)}; meta/info.json says {[*size, 3]}")
            out[i] = picture
        return out


def _check_finite(x: np.ndarray, where: str) -> None:
    """Of [L, K]."""
    if len(bad := np.argwhere(~np.isfinite(x))):
        frame, i = bad[0].tolist()
        raise ConfigError(f"{where} [{i}] is {x[frame, i]} in frame {frame}; it must be finite: leave the episode out")


# ------------------------------------------------------------------------------------------------------------- video
def _decode(path: Path, spans: Sequence[tuple[_Episode, int, np.ndarray]], size: tuple[int, int]) -> None:
    """Fill uint8 [L, H, W, 3] of each episode, from its first frame in the video on; spans in that order."""
    if not path.exists():
        raise ConfigError(f"{path} is missing; copy or download the folder anew, or record it again")
    try:
        with closing(_frames(path)) as frames:
            width, height = next(frames)["size"]
            if (height, width) != size:
                raise ConfigError(f"{path}: shows {height} x {width} pixels; meta/info.json says {size[0]} x {size[1]}")
            at = 0  # the number of the next frame
            for episode, first, out in spans:
                if first < at:
                    raise ConfigError(f"{path}: episode {episode.index} begins before the one before it ends")
                for i in range(first - at + len(out)):
                    picture = next(frames, None)
                    frame = at + i - first
                    if picture is None:
                        raise ConfigError(
                            f"{path}: ends after {at + i} frames, at episode {episode.index}, frame {max(frame, 0)} of "
                            f"{len(out)}; record or download it anew"
                        )
                    if frame >= 0:
                        out[frame] = np.frombuffer(picture, dtype=np.uint8).reshape(*size, 3)
                at = first + len(out)
    except (OSError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        cause = " ".join(str(error).split())[-200:]
        raise ConfigError(f"{path}: is no video that can be read ({cause}); record or download it anew") from error


def _frames(path: Path) -> Any:
    """Facts, then bytes [H, W, 3] of every frame that is there, each once; a damaged one ends it."""
    read_frames: Any = imageio_ffmpeg.read_frames
    return read_frames(
        str(path),
        input_params=["-threads", "1", "-xerror", "-err_detect", "explode"],
        output_params=["-fps_mode", "passthrough"],
    )
