"""Recording of demonstrations in LeRobot's layout, file by file.

Shape letters: F frames of all episodes, L frames of one, H x W pixels, D state and A action
dimensions.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from embodied_envs.base.errors import ConfigError
from embodied_ppo.data import lerobot_reader, video_encoder
from embodied_ppo.data.frame_table import check_finite
from embodied_ppo.data.lerobot_reader import ACTION, CAMERA, CHUNK, STATE, VERSION
from embodied_ppo.data.parquet import check_pyarrow, reading

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
KEYFRAMES = 10  # distance of key frames in a video; reading one frame decodes at most this many
# Options of ffmpeg.
LOSSLESS = ("-crf", "0", "-preset", "veryfast", "-g", str(KEYFRAMES), "-bf", "0", "-f", "mp4")
SAFE = "Complete files are kept: record again into the same folder to continue"
INDICES = ("frame_index", "episode_index", "index", "task_index")

# LeRobot's min, max, mean, std of a feature: float64 [D], of images [3, 1, 1]; count [1].
Stats: TypeAlias = "dict[str, np.ndarray]"


class _Episode(NamedTuple):
    """An episode of the incomplete file; fields as the arguments of ``Writer.add``."""

    images: Mapping[str, np.ndarray]
    numbers: Mapping[str, np.ndarray]
    instruction: str
    length: int


class Writer(AbstractContextManager["Writer"]):
    """Recorder of episodes in LeRobot v3.0, for a ``with`` statement; otherwise call ``close``.

    After every ``episodes_per_file`` episodes a file is written: one parquet of numbers, one mp4
    per camera and one parquet of episodes. The latter is renamed into place last, and makes the
    episodes valid. Until then they are in memory, and a process that is killed loses them. If the
    folder is opened again, recording continues after the last complete file (``episodes``,
    ``frames``).

    Images are stored without loss (H.264 of RGB: libx264rgb, crf 0). torchcodec and PyAV can decode
    them; most browsers do not show them.
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
        self._fps, self._cameras, self._per_file = fps, dict(cameras), episodes_per_file
        self._features = _features(fps, {STATE: list(state), ACTION: list(action)}, self._cameras)
        check_pyarrow(self.folder)
        self._tasks: dict[str, int] = {}
        self._file = 0
        self._rows: list[dict[str, Any]] = []  # rows of meta/episodes of all complete files
        self._pending: list[_Episode] = []  # episodes of the incomplete file
        self._lock = self._locked()
        try:
            self._open()
        except BaseException:
            os.close(self._lock)
            raise

    @property
    def episodes(self) -> int:
        """Number of episodes, including those of the incomplete file."""
        return len(self._rows) + len(self._pending)

    @property
    def frames(self) -> int:
        """Number of frames, including those of the incomplete file."""
        return sum(row["length"] for row in self._rows) + sum(e.length for e in self._pending)

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
            OSError: The file cannot be written.
        """
        numbers = {STATE: state.astype(np.float32), ACTION: action.astype(np.float32)}
        for name, x in numbers.items():
            place = f"{self.folder}: episode {self.episodes}, frame"
            check_finite(x, name, lambda row, place=place: f"{place} {row}")
        self._pending.append(_Episode(images, numbers, instruction, len(action)))
        if len(self._pending) == self._per_file:
            self._finish()

    def close(self) -> None:
        """Write the incomplete file with the episodes that it has."""
        try:
            if self._pending:
                self._finish()
        finally:
            os.close(self._lock)

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
        info = lerobot_reader.read_info(self.folder)
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
        tasks = lerobot_reader.read_tasks(self.folder, VERSION)
        self._tasks = {text: index for index, text in tasks.items()}
        self._rows = lerobot_reader.episode_rows(self.folder)
        with reading(f"{self.folder}/meta/episodes (written by other software?)"):
            # LeRobot's tools number the files of data, videos and episodes independently.
            kinds = ("meta/episodes", "data", *(f"videos/{CAMERA}{x}" for x in self._cameras))
            for row, kind in itertools.product(self._rows, kinds):
                chunk, file = (row[f"{kind}/{name}"] for name in self._file_indices())
                self._file = max(self._file, chunk * CHUNK + file + 1)
            # Remove the incomplete files of an interrupted recording.
            videos = [self._path(VIDEO_PATH, name) for name in self._cameras]
            for path in [*self.folder.rglob("*.part"), self._path(DATA_PATH), *videos]:
                path.unlink(missing_ok=True)
            self._publish()

    # ------------------------------------------------------------------------------------ finishing
    def _file_indices(self) -> dict[str, int]:
        """Return the numbers in the path of the current file."""
        return {"chunk_index": self._file // CHUNK, "file_index": self._file % CHUNK}

    def _path(self, template: str, camera: str = "") -> Path:
        """Return the path of the current file."""
        return self.folder / template.format(video_key=CAMERA + camera, **self._file_indices())

    def _finish(self) -> None:
        """Write the episodes of the incomplete file; they become valid, or are discarded."""
        import pyarrow
        import pyarrow.parquet as parquet

        episodes, self._pending = self._pending, []
        rows: list[dict[str, Any]] = []
        start = 0  # frame of this file
        for episode in episodes:
            self._tasks.setdefault(episode.instruction, len(self._tasks))
            rows.append(self._episode_row(episode, len(self._rows) + len(rows), start))
            start += episode.length
        for name, size in self._cameras.items():
            with _replacing(self._path(VIDEO_PATH, name)) as part:
                _encode(part, [episode.images[name] for episode in episodes], size, self._fps)
        lengths = [row["length"] for row in rows]
        frame = np.concatenate([np.arange(length) for length in lengths])
        numbers = [episode.numbers for episode in episodes]
        columns = {
            **{name: np.concatenate([x[name] for x in numbers]) for name in (STATE, ACTION)},
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.repeat([row["episode_index"] for row in rows], lengths),
            "index": rows[0]["dataset_from_index"] + np.arange(len(frame)),
            "task_index": np.repeat([self._tasks[row["tasks"][0]] for row in rows], lengths),
        }
        # The episodes are written last, because they make the other files valid.
        for path, table in (
            (self._path(DATA_PATH), pyarrow.table({x: _column(y) for x, y in columns.items()})),
            (self.folder / "meta/tasks.parquet", _tasks_table(self._tasks)),
            (self._path(EPISODES_PATH), pyarrow.Table.from_pylist(rows)),
        ):
            with _replacing(path) as part:
                parquet.write_table(table, part)
        self._rows += rows
        self._file += 1
        self._publish()

    def _episode_row(self, episode: _Episode, number: int, start: int) -> dict[str, Any]:
        """Return the row of an episode in meta/episodes.

        Args:
            episode: The episode.
            number: Its index in the data set.
            start: Its first frame in the file.
        """
        indices, length, first = self._file_indices(), episode.length, self.frames + start
        times = {"from_timestamp": start / self._fps, "to_timestamp": (start + length) / self._fps}
        row: dict[str, Any] = {"episode_index": number, "tasks": [episode.instruction]}
        row |= {"length": length, **{f"data/{key}": x for key, x in indices.items()}}
        row |= {"dataset_from_index": first, "dataset_to_index": first + length}
        stats = {name: _stats(x) for name, x in episode.numbers.items()}
        for name in self._cameras:
            row |= {f"videos/{CAMERA}{name}/{key}": x for key, x in (indices | times).items()}
            stats[CAMERA + name] = _image_stats(episode.images[name])
        for key, values in stats.items():
            row |= {f"stats/{key}/{x}": array.tolist() for x, array in values.items()}
        return row | {f"meta/episodes/{key}": x for key, x in indices.items()}

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
        keys = (STATE, ACTION, *(CAMERA + name for name in self._cameras)) if self._rows else ()
        stats = {key: _union(self._rows, key) for key in keys}
        # info.json is written last, because it makes the folder a data set.
        for name, value in {"stats": stats, "info": info}.items():
            with _replacing(self.folder / f"meta/{name}.json") as part:
                part.write_text(json.dumps(value, indent=4, ensure_ascii=False))


def _encode(path: Path, parts: Sequence[np.ndarray], size: tuple[int, int], fps: int) -> None:
    """Write images uint8 [L, H, W, 3] of several episodes as one video."""
    encoder = video_encoder.encoder(
        path, size, fps, codec="libx264rgb", pix_fmt="rgb24", options=LOSSLESS
    )
    for frames in parts:
        encoder.send(np.ascontiguousarray(frames))
    encoder.close()
    with reading(f"{path} (is the disk full? {SAFE})"):
        ffmpeg, expected = video_encoder.import_ffmpeg(path), sum(map(len, parts))
        if (count := ffmpeg.count_frames_and_secs(str(path))[0]) != expected:
            raise OSError(f"ffmpeg wrote {count} of {expected} frames")


def _features(
    fps: int, vectors: Mapping[str, Sequence[str]], cameras: Mapping[str, tuple[int, int]]
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

    index = pyarrow.array(list(tasks.values()), pyarrow.int64())
    sentences = pyarrow.array(list(tasks), pyarrow.string())
    table = pyarrow.table({"task_index": index, "task": sentences})
    metadata = {"index_columns": ["task"], "column_indexes": [], "pandas_version": "2.2.0"}
    metadata["columns"] = [
        {"name": name, "field_name": name, "pandas_type": pandas, "numpy_type": numpy}
        | {"metadata": None}
        for name, pandas, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    return table.replace_schema_metadata({"pandas": json.dumps(metadata)})


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name; flush the file that was written there to disk and rename it.

    The name contains the process id, because ffmpeg of a killed process may still write to its own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    yield part
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


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


def _union(rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Return the statistics of the feature ``key`` over all episodes, as lists."""
    low, high, mean, std, count = (
        np.array([row[f"stats/{key}/{name}"] for row in rows]) for name in _STATS
    )
    share = (count / count.sum()).reshape(-1, *[1] * (mean.ndim - 1))
    total = (share * mean).sum(0)
    # Variance of the union: E[var_k + (mean_k - mean)^2].
    variance = (share * (std**2 + (mean - total) ** 2)).sum(0)
    union = (low.min(0), high.max(0), total, np.sqrt(variance), count.sum(0))
    return {name: x.tolist() for name, x in zip(_STATS, union, strict=True)}
