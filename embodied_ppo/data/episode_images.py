"""Images of recorded episodes: decoded from disk, resized, and streamed in random order.

Shape letters: L frames of one episode, H x W pixels, B frames of a batch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_ppo.data.frame_table import EpisodeLocation, FrameTable
from embodied_ppo.data.parquet import damaged, reading
from embodied_ppo.data.video_encoder import import_ffmpeg

EPISODES_AHEAD = 4  # episodes that a stream decodes ahead, each in a thread


class Camera(NamedTuple):
    """A camera of a data set.

    Attributes:
        feature: Its name in meta/info.json.
        is_video: Whether its images are in videos, otherwise in the tables.
        stored: (H, W) of the files.
        size: (H, W) of the images that are read.
    """

    feature: str
    is_video: bool
    stored: tuple[int, int]
    size: tuple[int, int]


@dataclass(eq=False)
class EpisodeImages:
    """Images of episodes on disk. Every method raises ConfigError for a damaged file.

    Attributes:
        folder: The data set.
        episodes: Its episodes.
        cameras: Name -> camera.
        fps: Frames per second of the videos.
    """

    folder: Path
    episodes: Sequence[EpisodeLocation]
    cameras: Mapping[str, Camera]
    fps: float

    def __post_init__(self) -> None:
        counts = [episode.count for episode in self.episodes]
        # int64 [E + 1]: number of the first frame of each episode, and of all frames.
        self.starts = torch.tensor([0, *itertools.accumulate(counts)])

    def of_episode(self, i: int) -> dict[str, Tensor]:
        """Return camera -> images of the i-th episode, uint8 [L, H, W, 3]."""
        return {name: torch.from_numpy(next(self.decode(name, [i]))[1]) for name in self.cameras}

    def decode(self, name: str, episodes: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield i and the images [L, H, W, 3] of the i-th episodes, file by file.

        One episode is in memory at a time.
        """
        camera = self.cameras[name]
        feature = camera.feature if camera.is_video else None
        for path, members in self.by_file(episodes, feature).items():
            if camera.is_video:
                yield from self._decode_video(path, members, camera)
                continue
            table = FrameTable(path, [self.episodes[i] for i in members], [])
            images = table.images(camera.feature, camera.stored)
            for i in members:
                count = int(self.starts[i + 1] - self.starts[i])
                parts = [_resize(x, camera.size) for x in itertools.islice(images, count)]
                yield i, np.stack(parts)

    def by_file(self, episodes: Iterable[int], feature: str | None) -> dict[Path, list[int]]:
        """Group the i-th episodes by the file of a feature's video, None: of the numbers."""
        files: dict[Path, list[int]] = defaultdict(list)
        for i in episodes:
            episode = self.episodes[i]
            files[episode.data if feature is None else episode.videos[feature][0]].append(i)
        return files

    def _decode_video(
        self, path: Path, members: Sequence[int], camera: Camera
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield i and the images of the i-th episodes, which are in one video."""
        parts = sorted((self.episodes[i].videos[camera.feature][1], i) for i in members)
        position = parts[0][0]  # index of the next frame
        with reading(path), closing(_frames(path, position / self.fps, self.fps)) as frames:
            width, height = next(frames)["size"]
            if (height, width) != camera.stored:
                raise ConfigError(
                    f"{path}: has {height} x {width} pixels; meta/info.json has"
                    f" {camera.stored[0]} x {camera.stored[1]}"
                )
            for first, i in parts:
                episode, steps = self.episodes[i], self.episodes[i].steps
                if first < position:
                    raise ConfigError(
                        f"{path}: episode {episode.index} starts before the previous one ends"
                    )
                out = np.empty((len(steps), *camera.size, 3), np.uint8)
                for frame in range(position - first, episode.length):
                    if (pixels := next(frames, None)) is None:
                        raise damaged(
                            f"{path}: ends after {first + frame} frames, at episode"
                            f" {episode.index}, frame {max(frame, 0)} of {episode.length}"
                        )
                    if len(places := np.flatnonzero(steps == frame)):
                        image = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
                        out[places] = _resize(image, camera.size)
                position = first + episode.length
                yield i, out


class FrameStream:
    """Frames in random order without end, of which a buffer of a fixed size is in memory.

    Each pass decodes the episodes in a new random order. A frame is drawn from a random place of
    the buffer, which the next decoded frame then takes. The order is a function of the episodes'
    lengths, the size of the buffer and the seed alone.
    """

    def __init__(
        self,
        disk: EpisodeImages,
        episodes: Sequence[int],
        *,
        size: int,
        seed: int,
        on_episode: Callable[[int, dict[str, Tensor]], None] = lambda i, images: None,
    ) -> None:
        """Decode the first frames.

        Args:
            disk: The images.
            episodes: Episodes to draw from.
            size: Frames of the buffer; less if the episodes have less.
            seed: Seed of the order.
            on_episode: Receives i and the images of each decoded episode, in order.

        Raises:
            ConfigError: A file is damaged.
        """
        self._disk, self._episodes, self._on_episode = disk, episodes, on_episode
        self._seed = seed
        self._draws = torch.Generator().manual_seed(seed)
        self._source = self._decoded()
        size = min(size, sum(int(disk.starts[i + 1] - disk.starts[i]) for i in episodes))
        self._frames = torch.zeros(size, dtype=torch.int64)
        self._images = {
            name: torch.zeros(size, *camera.size, 3, dtype=torch.uint8)
            for name, camera in disk.cameras.items()
        }
        for place in range(size):
            self._put(place)

    def take(self, count: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the next frames, int64 [B], and camera -> their images, uint8 [B, H, W, 3].

        Raises:
            ConfigError: A file is damaged.
        """
        frames, images = [], {name: [] for name in self._images}
        for place in torch.randint(len(self._frames), (count,), generator=self._draws).tolist():
            frames.append(self._frames[place].clone())
            for name, x in self._images.items():
                images[name].append(x[place].clone())
            self._put(place)
        return torch.stack(frames), {name: torch.stack(x) for name, x in images.items()}

    def _put(self, place: int) -> None:
        """Put the next decoded frame into the buffer."""
        frame, t, images = next(self._source)
        self._frames[place] = frame
        for name, x in self._images.items():
            x[place] = images[name][t]

    def _decoded(self) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """Yield frame, its place in its episode, and images of the episode, without end."""
        queue: deque[tuple[int, Future[dict[str, Tensor]]]] = deque()
        order = torch.Generator().manual_seed(self._seed)
        pool = ThreadPoolExecutor(EPISODES_AHEAD)
        try:
            while True:
                for k in torch.randperm(len(self._episodes), generator=order).tolist():
                    i = self._episodes[k]
                    queue.append((i, pool.submit(self._disk.of_episode, i)))
                    if len(queue) <= EPISODES_AHEAD:
                        continue
                    i, future = queue.popleft()
                    images = future.result()
                    self._on_episode(i, images)
                    start = int(self._disk.starts[i])
                    for t in range(int(self._disk.starts[i + 1]) - start):
                        yield start + t, t, images
        finally:  # without waiting, because Python may collect the generator in one of the threads
            pool.shutdown(wait=False, cancel_futures=True)


def _resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize uint8 [h, w, 3] to (H, W), linearly and with a wider filter where it shrinks."""
    if image.shape[:2] == size:
        return image
    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))


def _frames(path: Path, start_s: float, fps: float) -> Any:
    """Yield the video's metadata, then the bytes [H, W, 3] of each frame up to a damaged one.

    The first frame is the one at ``start_s``, of a video with ``fps`` frames per second.
    """
    if not path.is_file():
        raise damaged(f"{path} does not exist")
    # Half a frame earlier, because the times in a file are rounded.
    seek = ["-ss", f"{start_s - 0.5 / fps:.6f}"] if start_s else []
    return import_ffmpeg(path).read_frames(
        str(path),
        # Only mp4: ffmpeg also accepts playlists, which could name files outside the folder.
        input_params=[*seek, "-f", "mp4", "-threads", "1", "-xerror", "-err_detect", "explode"],
        output_params=["-fps_mode", "passthrough"],
    )
