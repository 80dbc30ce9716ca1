"""Recording of demonstrations in LeRobot's layout, file by file.

Shape letters: F frames of all episodes, L frames of one, H x W pixels, D state and A action
dimensions.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from embodied_envs.base.errors import ConfigError, one_line
from embodied_ppo.data import video_encoder
from embodied_ppo.data.lerobot_reader import (
    ACTION,
    CAMERA,
    CHUNK,
    STATE,
    VERSION,
    episode_rows,
    read_info,
    read_tasks,
)
from embodied_ppo.data.lerobot_tables import check_finite
from embodied_ppo.data.parquet import check_pyarrow, reading

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
KEYFRAMES = 10
"""Distance of key frames in a video; reading one frame decodes at most this many."""
LOSSLESS = ("-crf", "0", "-preset", "veryfast", "-g", str(KEYFRAMES), "-bf", "0", "-f", "mp4")
"""Options of ffmpeg."""
SAFE = "Complete files are kept: record again into the same folder to continue"
INDICES = ("frame_index", "episode_index", "index", "task_index")

Stats: TypeAlias = "dict[str, np.ndarray]"
"""min, max, mean, std and count of one feature as in LeRobot: float64 [D], for images [3, 1, 1];
count [1].
"""


class Writer:
    """Recorder of episodes in LeRobot v3.0, for a ``with`` statement; otherwise call ``close``.

    After every ``episodes_per_file`` episodes a file is complete: one parquet of numbers, one mp4
    per camera and one parquet of episodes. The latter is renamed into place last, and makes the
    episodes valid. A process that is killed loses the episodes of the incomplete file. If the
    folder is opened again, recording continues after the last complete file (``episodes``,
    ``frames``).

    Images are stored without loss (H.264 of RGB: libx264rgb, crf 0). torchcodec and PyAV can decode
    them; most browsers do not show them. One ffmpeg process per camera and file encodes.
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
    ) -> None:
        """Open or create the data set.

        Args:
            folder: The data set.
            fps: Frames per second.
            state: Names of the D state dimensions.
            action: Names of the A action dimensions.
            cameras: Name -> (H, W) in pixels.
            episodes_per_file: Episodes of a file.

        Raises:
            ConfigError: ``folder`` holds other data, or another process is recording into it.
        """
        self.folder = Path(folder)
        self.episodes = self.frames = 0
        """Number of episodes and frames, including those of the incomplete file."""
        self._fps, self._cameras, self._per_file = fps, dict(cameras), episodes_per_file
        self._vectors = {STATE: list(state), ACTION: list(action)}
        self._features = _features(fps, self._vectors, self._cameras)
        check_pyarrow(self.folder)
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

    def add(
        self,
        images: Mapping[str, np.ndarray],
        state: np.ndarray,
        action: np.ndarray,
        instruction: str,
    ) -> None:
        """Add one complete episode.

        Args:
            images: Camera -> uint8 [L, H, W, 3].
            state: float32 [L, D].
            action: float32 [L, A].
            instruction: Sentence.

        Raises:
            ConfigError: A number is not finite, or encoding failed.
        """
        if self._lock < 0:
            raise ConfigError(f"{self.folder}: was closed; create a new Writer to continue")
        numbers = {STATE: state, ACTION: action}
        for name, x in numbers.items():
            check_finite(
                x, name, lambda row: f"{self.folder}: episode {self.episodes}, frame {row}"
            )
        try:
            self._encode(images)
            self._append(images, len(state), numbers, instruction)
        except BaseException as error:
            # The video now holds a part of an episode and cannot be completed.
            self._discard()
            if isinstance(error, OSError):
                cause = one_line(error)[:200]
                raise ConfigError(
                    f"{self.folder}: episode {self.episodes} could not be encoded ({cause}); is the"
                    f" disk full? {SAFE}"
                ) from error
            raise
        if len(self._episode_rows) == self._per_file:
            self._finish()

    def close(self) -> None:
        """Complete the current file with the episodes that it has. May be called twice."""
        if self._episode_rows:
            self._finish()
        self._release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------- opening
    def _locked(self) -> int:
        """Lock the folder for this process and return its file descriptor."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            raise ConfigError(
                f"{self.folder}: another process records into it; wait until it ends, or choose"
                " another folder"
            ) from error
        return lock

    def _open(self) -> None:
        """Create a data set, or continue the existing one."""
        if not (self.folder / "meta/info.json").exists():
            if names := sorted(path.name for path in self.folder.iterdir() if path.name != "meta"):
                raise ConfigError(
                    f"{self.folder}: holds {names[0]} but no meta/info.json; choose an empty folder"
                )
            self._publish()
            return
        info = read_info(self.folder)
        expected = {"codebase_version": VERSION, "fps": self._fps, **_essential(self._features)}
        present = {key: info[key] for key in ("codebase_version", "fps")}
        present |= _essential(info["features"])
        for key in expected | present:
            if expected.get(key) != present.get(key):
                raise ConfigError(
                    f"{self.folder}: holds demonstrations with {key}={present.get(key)}, not"
                    f" {expected.get(key)}; choose another folder, or the options of the first"
                    " recording"
                )
        rows = episode_rows(self.folder)
        self._tasks = {text: index for index, text in read_tasks(self.folder, VERSION).items()}
        self.episodes, self.frames = len(rows), sum(row["length"] for row in rows)
        keys = (*self._vectors, *(CAMERA + name for name in self._cameras))
        with reading(f"{self.folder}/meta/episodes (written by other software?)"):
            for row in rows:
                index = {name: row[f"meta/episodes/{name}"] for name in self._file_indices()}
                self._file = index["chunk_index"] * CHUNK + index["file_index"] + 1
                for key in keys:
                    stats = {x: np.array(row[f"stats/{key}/{x}"]) for x in _STATS}
                    self._stats[key] = _merged(self._stats.get(key), stats)
        # Remove the incomplete files of an interrupted recording.
        videos = [self._path(VIDEO_PATH, name) for name in self._cameras]
        for path in [*self.folder.rglob("*.part"), self._path(DATA_PATH), *videos]:
            path.unlink(missing_ok=True)
        self._publish()

    # --------------------------------------------------------------------------------------- adding
    def _encode(self, images: Mapping[str, np.ndarray]) -> None:
        """Send the images to ffmpeg."""
        for name, frames in images.items():
            if name not in self._encoders:
                part = _part(self._path(VIDEO_PATH, name))
                part.parent.mkdir(parents=True, exist_ok=True)
                self._encoders[name] = video_encoder.encoder(
                    part,
                    self._cameras[name],
                    self._fps,
                    codec="libx264rgb",
                    pix_fmt="rgb24",
                    options=LOSSLESS,
                )
            self._encoders[name].send(np.ascontiguousarray(frames))

    def _append(
        self,
        images: Mapping[str, np.ndarray],
        length: int,
        numbers: Mapping[str, np.ndarray],
        instruction: str,
    ) -> None:
        """Keep the numbers of an episode until the file is complete."""
        self._tasks.setdefault(instruction, len(self._tasks))
        stats: dict[str, Stats] = {}
        for name, x in numbers.items():
            self._columns[name].append(np.asarray(x, dtype=np.float32))
            stats[name] = _stats(self._columns[name][-1])
        stats |= {CAMERA + name: _image_stats(frames) for name, frames in images.items()}
        self._stats = {key: _merged(self._stats.get(key), new) for key, new in stats.items()}
        self._episode_rows.append(self._episode_row(length, instruction, stats))
        self.episodes += 1
        self.frames += length

    def _discard(self) -> None:
        """Discard incomplete episodes and close."""
        self.episodes -= len(self._episode_rows)
        self.frames -= sum(row["length"] for row in self._episode_rows)
        self._episode_rows = []
        self._release()

    def _release(self) -> None:
        """Close encoders and release the lock."""
        for encoder in self._encoders.values():
            encoder.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._encoders, self._lock = {}, -1

    def _episode_row(
        self, length: int, instruction: str, stats: Mapping[str, Stats]
    ) -> dict[str, Any]:
        """Return the row of the next episode in meta/episodes."""
        indices = self._file_indices()
        start = sum(row["length"] for row in self._episode_rows)  # frame of this file
        times = {"from_timestamp": start / self._fps, "to_timestamp": (start + length) / self._fps}
        row: dict[str, Any] = {"episode_index": self.episodes, "tasks": [instruction]}
        row["length"] = length
        row |= {f"data/{key}": x for key, x in indices.items()}
        row |= {"dataset_from_index": self.frames, "dataset_to_index": self.frames + length}
        for name in self._cameras:
            row |= {f"videos/{CAMERA}{name}/{key}": x for key, x in (indices | times).items()}
        for key, values in stats.items():
            row |= {f"stats/{key}/{x}": array.tolist() for x, array in values.items()}
        return row | {f"meta/episodes/{key}": x for key, x in indices.items()}

    # ------------------------------------------------------------------------------------ finishing
    def _file_indices(self) -> dict[str, int]:
        """Return the numbers in the path of the current file."""
        return {"chunk_index": self._file // CHUNK, "file_index": self._file % CHUNK}

    def _path(self, template: str, camera: str = "") -> Path:
        """Return the path of the current file."""
        return self.folder / template.format(video_key=CAMERA + camera, **self._file_indices())

    def _finish(self) -> None:
        """Write everything added since the last file; the episodes become valid."""
        try:
            self._write_file()
        except BaseException:
            self._discard()
            raise
        self._file += 1
        self._publish()

    def _write_file(self) -> None:
        """Write the current file."""
        import pyarrow
        import pyarrow.parquet as parquet

        rows = self._episode_rows
        lengths = [row["length"] for row in rows]
        frame = np.concatenate([np.arange(length) for length in lengths])
        for name, encoder in self._encoders.items():
            encoder.close()
            path = self._path(VIDEO_PATH, name)
            with reading(f"{path} (is the disk full? {SAFE})"):
                ffmpeg = video_encoder.import_ffmpeg(path)
                if (count := ffmpeg.count_frames_and_secs(str(_part(path)))[0]) != len(frame):
                    raise OSError(f"ffmpeg wrote {count} of {len(frame)} frames")
            _move(_part(path), path)
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        columns |= {
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.repeat([row["episode_index"] for row in rows], lengths),
            "index": rows[0]["dataset_from_index"] + np.arange(len(frame)),
            "task_index": np.repeat([self._tasks[row["tasks"][0]] for row in rows], lengths),
        }
        data = pyarrow.table({name: _column(x) for name, x in columns.items()})
        # The episodes are written last, because they make the other files valid.
        for path, table in (
            (self._path(DATA_PATH), data),
            (self.folder / "meta/tasks.parquet", _tasks_table(self._tasks)),
            (self._path(EPISODES_PATH), pyarrow.Table.from_pylist(rows)),
        ):
            _write(path, lambda part, table=table: parquet.write_table(table, part))
        self._episode_rows, self._columns, self._encoders = [], defaultdict(list), {}

    def _publish(self) -> None:
        """Write meta/stats.json and meta/info.json, which describe the complete files."""
        info = {
            "codebase_version": VERSION,
            "robot_type": None,
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
        stats = {
            key: {x: array.tolist() for x, array in values.items()}
            for key, values in self._stats.items()
        }
        # info.json is written last, because it makes the folder a data set.
        for name, value in {"stats": stats, "info": info}.items():
            text = json.dumps(value, indent=4, ensure_ascii=False)
            _write(self.folder / f"meta/{name}.json", lambda part, text=text: part.write_text(text))


def _features(
    fps: int,
    vectors: Mapping[str, Sequence[str]],
    cameras: Mapping[str, tuple[int, int]],
) -> dict[str, Any]:
    """Return the description of columns and videos for meta/info.json.

    Args:
        fps: Frames per second.
        vectors: Feature -> names of its dimensions.
        cameras: Name -> (H, W) in pixels.
    """
    features: dict[str, Any] = {}
    for name, (height, width) in cameras.items():
        features[CAMERA + name] = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.height": height,
                "video.width": width,
                "video.codec": "h264",
                "video.pix_fmt": "gbrp",
                "video.is_depth_map": False,
                "video.fps": fps,
                "video.channels": 3,
                "has_audio": False,
            },
        }
    for name, dims in vectors.items():
        features[name] = {"dtype": "float32", "shape": [len(dims)], "names": list(dims)}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    return features | {name: {"dtype": "int64", "shape": [1], "names": None} for name in INDICES}


def _essential(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all recordings into a folder must have in common of their features."""
    fields = ("dtype", "shape", "names")
    return {key: [feature.get(x) for x in fields] for key, feature in features.items()}


def _column(x: np.ndarray) -> Any:
    """Convert [F] or [F, 1] to a column of numbers, [F, D] to a column of lists."""
    import pyarrow

    flat = pyarrow.array(x.reshape(-1))
    if x.ndim == 1 or x.shape[1] == 1:
        return flat
    return pyarrow.FixedSizeListArray.from_arrays(flat, x.shape[1])


def _tasks_table(tasks: Mapping[str, int]) -> Any:
    """Return a table that pandas reads with the sentences as its index, as LeRobot expects."""
    import pyarrow

    task_index = pyarrow.array(list(tasks.values()), pyarrow.int64())
    table = pyarrow.table(
        {"task_index": task_index, "task": pyarrow.array(list(tasks), pyarrow.string())}
    )
    columns = [
        {"name": name, "field_name": name, "pandas_type": pandas, "numpy_type": numpy}
        | {"metadata": None}
        for name, pandas, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    metadata = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": columns,
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(metadata)})


def _part(path: Path) -> Path:
    """Return the temporary name of a file.

    It contains the process id, because ffmpeg of a killed process may still write to its own.
    """
    return path.with_name(f"{path.name}.{os.getpid()}.part")


def _move(part: Path, path: Path) -> None:
    """Flush a file to disk and rename it."""
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file under a temporary name and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(_part(path))
    _move(_part(path), path)


# --------------------------------------------------------------------------------------- statistics
_STATS = ("min", "max", "mean", "std", "count")


def _stats(x: np.ndarray) -> Stats:
    """Return the statistics of [L, D] over L."""
    wide = x.astype(np.float64)
    low, high, mean, std = wide.min(0), wide.max(0), wide.mean(0), wide.std(0)
    return {"min": low, "max": high, "mean": mean, "std": std, "count": np.array([len(x)])}


def _image_stats(x: np.ndarray) -> Stats:
    """Return the statistics of uint8 [L, H, W, 3] over all pixels, scaled to [0, 1]; count is L."""
    counts = np.stack([np.bincount(x[..., c].reshape(-1), minlength=256) for c in range(3)])
    value, share = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    present = np.where(counts > 0, value, np.nan)
    mean = share @ value
    std = np.sqrt(np.maximum((share * np.square(value - mean[:, None])).sum(1), 0.0))
    low, high = np.nanmin(present, axis=1), np.nanmax(present, axis=1)
    stats = {"min": low, "max": high, "mean": mean, "std": std}
    return {key: v.reshape(3, 1, 1) for key, v in stats.items()} | {"count": np.array([len(x)])}


def _merged(a: Stats | None, b: Stats) -> Stats:
    """Return the statistics of the union of two sets of frames."""
    if a is None:
        return b
    count = a["count"] + b["count"]
    wa, wb = a["count"] / count, b["count"] / count
    mean = wa * a["mean"] + wb * b["mean"]
    # Variance of the union: E[var_k + (mean_k - mean)^2].
    spread_a = a["std"] ** 2 + (a["mean"] - mean) ** 2
    spread_b = b["std"] ** 2 + (b["mean"] - mean) ** 2
    variance = wa * spread_a + wb * spread_b
    low, high = np.minimum(a["min"], b["min"]), np.maximum(a["max"], b["max"])
    return {"min": low, "max": high, "mean": mean, "std": np.sqrt(variance), "count": count}
