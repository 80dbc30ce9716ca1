"""Reading of demonstrations in LeRobot's layout; ``lerobot_writer`` writes them.

Shape letters: F frames of all episodes, L frames of one, H x W pixels, D state and A action
dimensions, C actions of a chunk, B samples.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.host_memory import free_memory
from embodied_ppo.core import guarded_files
from embodied_ppo.data.episode_images import Camera, EpisodeImages
from embodied_ppo.data.frame_table import EpisodeLocation, FrameTable
from embodied_ppo.data.parquet import damaged, read_rows, reading

VERSION = "v3.0"  # version that is written
READABLE = (VERSION, "v2.1", "v2.0")  # versions that are read
# Names of features; CAMERA is followed by the name of a camera.
STATE, ACTION, CAMERA = "observation.state", "action", "observation.images."
INFO = {"codebase_version": str, "features": dict, "fps": float, "data_path": str}
# Fields of meta/info.json of all versions, and their types.
INFO |= {"total_episodes": int}
MAX_FPS = 100_000  # largest accepted number of frames per second
CHUNK = 1000  # number of files in a folder chunk-000


# ------------------------------------------------------------------------------------------ frames
@dataclass(frozen=True)
class Demonstrations:
    """Frames of all episodes, one episode after another.

    Attributes:
        images: Camera -> uint8 [F, H, W, 3], observed before ``action``; [0, H, W, 3] if they are
            on disk.
        state: float32 [F, D].
        action: float32 [F, A].
        episode: int64 [F], ascending.
        instruction: int64 [F], index into ``instructions``.
        instructions: Sentences.
        fps: Frames, and therefore actions, per second.
        disk: Where the images are if they are not in memory.
    """

    images: dict[str, Tensor]
    state: Tensor
    action: Tensor
    episode: Tensor
    instruction: Tensor
    instructions: tuple[str, ...]
    fps: float
    disk: EpisodeImages | None = None

    def load(self) -> Demonstrations:
        """Return the demonstrations with all images in memory.

        Raises:
            ConfigError: A file is damaged, or the images need more than half of the free memory.
        """
        if (disk := self.disk) is None:
            return self
        sizes = [camera.size for camera in disk.cameras.values()]
        numbers, episodes = self.state.shape[1] + self.action.shape[1], disk.episodes
        _check_memory(disk.folder, sizes, numbers, len(self.state), len(episodes))
        images = {n: x.new_empty(len(self.state), *x.shape[1:]) for n, x in self.images.items()}
        for name, x in images.items():
            for i, part in disk.decode(name, range(len(episodes))):
                x[disk.starts[i] : disk.starts[i + 1]] = torch.from_numpy(part)
        return replace(self, images=images, disk=None)

    def in_order(self, frames: Tensor, rows: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield ascending ``frames`` int64 [B] and their images by camera, at most ``rows`` each.

        Images on disk are decoded episode by episode.
        """
        if (disk := self.disk) is None:
            for part in frames.split(rows):
                yield part, {name: x[part] for name, x in self.images.items()}
            return
        episodes = torch.searchsorted(disk.starts, frames, right=True) - 1
        for i in episodes.unique().tolist():
            images = disk.of_episode(i)
            for part in frames[episodes == i].split(rows):
                yield part, {name: x[part - disk.starts[i]] for name, x in images.items()}

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


def read(folder: Path | str, *, limit: int | None = None) -> Demonstrations:
    """Read demonstrations with all of their images, see ``open_folder``."""
    return open_folder(folder, limit=limit).load()


def open_folder(
    folder: Path | str,
    *,
    limit: int | None = None,
    cameras: Mapping[str, tuple[int, int]] | None = None,
    exclude: Sequence[int] = (),
    rate: float | None = None,
) -> Demonstrations:
    """Read demonstrations in LeRobot v3.0, v2.1 or v2.0; their images stay on disk.

    A camera's name is what follows "observation.images." (or "observation.") in its feature's name.
    State and action may also be called "state" and "actions". Pickles are never read.

    Args:
        folder: The data set.
        limit: Number of episodes to read, None: all.
        cameras: Name -> (H, W) of the cameras that are read; images of the same proportions are
            resized. None: all of them as they are.
        exclude: Indices of episodes that are not read.
        rate: Frames per second to resample to: of each time the newest frame, with its action.
            None: those of the data set.

    Raises:
        ConfigError: A value is missing, malformed, not finite or unreadable (the message names
            file, episode and frame), or the numbers need more than half of the free memory.
    """
    folder = Path(folder)
    info = read_info(folder)
    features = info["features"]
    with reading(folder / "meta/info.json"):
        keys = {name: _vector_key(features, name) for name in (STATE, ACTION)}
        dims = {name: _size(features, key) for name, key in keys.items()}
        selected = _cameras(features, cameras)
    videos = [camera.feature for camera in selected.values() if camera.is_video]
    episodes = _episodes(folder, info, videos)
    for i in sorted(set(exclude) - {episode.index for episode in episodes}):
        raise ConfigError(f"remove {i} from cloning.exclude_episodes: {folder} has no episode {i}")
    episodes = [episode for episode in episodes if episode.index not in exclude][:limit]
    fps = float(info["fps"])
    if rate is not None:
        episodes, fps = [replace(e, stride=info["fps"] / rate) for e in episodes], rate
    disk = EpisodeImages(folder, episodes, selected, float(info["fps"]))
    if not (frames := int(disk.starts[-1])) and exclude:
        raise ConfigError(f"shorten cloning.exclude_episodes: it leaves no episode of {folder}")
    if not frames:
        raise ConfigError(f"{folder}: has no episodes; record some, or choose another folder")
    _check_memory(folder, [], sum(dims.values()), frames, len(episodes))
    instructions = read_tasks(folder, info["codebase_version"])

    numbers = {name: np.empty((frames, size), np.float32) for name, size in dims.items()}
    task = np.empty(frames, dtype=np.int64)
    for path, members in disk.by_file(range(len(episodes)), None).items():
        table = FrameTable(path, [episodes[i] for i in members], list(keys.values()))
        place = np.concatenate([np.r_[disk.starts[i] : disk.starts[i + 1]] for i in members])
        for name, key in keys.items():
            numbers[name][place] = table.floats(key, dims[name])
        task[place] = table.tasks(instructions)

    order = sorted(instructions)
    index = torch.tensor([episode.index for episode in episodes])
    return Demonstrations(
        images={n: torch.empty(0, *c.size, 3, dtype=torch.uint8) for n, c in selected.items()},
        state=torch.from_numpy(numbers[STATE]),
        action=torch.from_numpy(numbers[ACTION]),
        episode=index.repeat_interleave(disk.starts.diff()),
        instruction=torch.from_numpy(np.searchsorted(order, task)),
        instructions=tuple(instructions[i] for i in order),
        fps=fps,
        disk=disk,
    )


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


def _cameras(
    features: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]] | None
) -> dict[str, Camera]:
    """Return the cameras among ``sizes``, None: all; the others need not be valid.

    Raises:
        ValueError: The shape of one is none of images, or two have the same name.
    """
    cameras: dict[str, Camera] = {}
    for key, feature in features.items():
        name = key.removeprefix(CAMERA).removeprefix("observation.")
        if feature.get("dtype") in ("video", "image") and (sizes is None or name in sizes):
            if name in cameras:
                raise ValueError(f"{cameras[name].feature} and {key} are both called {name}")
            stored = height, width = _image_size(key, feature)
            size = stored if sizes is None else sizes[name]
            # Other proportions stay as they are, and the comparison with the task refuses them.
            size = size if height * size[1] == width * size[0] else stored
            cameras[name] = Camera(key, feature["dtype"] == "video", stored, size)
    return cameras


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
    paths = {key: _path(folder, info["video_path"], video_key=key, **fields) for key in videos}
    videos_at = {key: (path, 0) for key, path in paths.items()}
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
        # Not ``splitlines``: a sentence may contain U+2028.
        return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]


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
        texts = [row["__index_level_0__"] if (x := row.get("task")) is None else x for row in rows]
        tasks: dict[int, str] = {}
        for row, text in zip(rows, texts, strict=True):
            if tasks.setdefault(int(row["task_index"]), str(text)) != str(text):
                raise ValueError(f"task_index {row['task_index']} has two tasks")
        return tasks


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
        hint = "; otherwise write cloning.shuffle_buffer=20000, which keeps so many in memory"
        raise ConfigError(
            f"{folder}: {frames} frames x ({' + '.join(terms)}) bytes = {need / 2**30:.2f} GiB of"
            f" images and numbers, more than half of the {free / 2**30:.2f} GiB of free memory;"
            f" cloning.episodes={int(episodes * (free / 2) / need)} of its {episodes} episodes"
            f" would fit{hint if sizes else ''}"
        )
