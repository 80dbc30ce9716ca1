"""Demonstrations: recording, reading and resuming with real ffmpeg and parquet files."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from embodied_envs.base.errors import ConfigError
from embodied_ppo.data import lerobot_reader
from embodied_ppo.data.episode_images import FrameStream
from embodied_ppo.data.lerobot_reader import Demonstrations, open_folder, read
from embodied_ppo.data.lerobot_writer import Writer

H, W = 16, 24
OPTIONS: dict[str, Any] = {
    "fps": 20,
    "state": ("x", "y", "z"),
    "action": ("u", "v"),
    "cameras": {"front": (H, W)},
}
LENGTHS = (4, 7, 5, 3, 6)
FRAMES = sum(LENGTHS)


def episode(i: int) -> dict[str, Any]:
    """Return an episode with identifiable numbers.

    state = 100 i + t, t, -t; action = i + t / 100 and its negative; the images are noise.
    """
    length, rng = LENGTHS[i % len(LENGTHS)], np.random.default_rng(i)
    t = np.arange(length, dtype=np.float32)
    return {
        "images": {"front": rng.integers(0, 256, (length, H, W, 3), dtype=np.uint8)},
        "state": np.stack((100 * i + t, t, -t), axis=1),
        "action": np.stack((i + t / 100, -i - t / 100), axis=1),
        "instruction": ("lift it", "put it down")[i % 2],
    }


def record(folder: Path, episodes: int = 5, per_file: int = 2, **changes: Any) -> Path:
    with Writer(folder, **{**OPTIONS, **changes}, episodes_per_file=per_file) as writer:
        for i in range(writer.episodes, episodes):
            writer.add(**episode(i))
    return folder


def check(data: Demonstrations, episodes: int = 5) -> None:
    """Check that the data are the first episodes, bit for bit."""
    assert data.episode.unique().tolist() == list(range(episodes))
    for i in range(episodes):
        frames, expected = data.episode == i, episode(i)
        images = torch.from_numpy(expected["images"]["front"])
        assert torch.equal(data.images["front"][frames], images)
        assert torch.equal(data.state[frames], torch.from_numpy(expected["state"]))
        assert torch.equal(data.action[frames], torch.from_numpy(expected["action"]))
        instructions = {data.instructions[k] for k in data.instruction[frames].tolist()}
        assert instructions == {expected["instruction"]}


# --------------------------------------------------------------------------------------- round trip
@pytest.mark.slow
def test_recorded_episodes_are_read(tmp_path) -> None:
    folder = record(tmp_path)
    data = read(folder)
    check(data)
    images = data.images["front"]
    assert images.shape == (FRAMES, H, W, 3) and images.dtype == torch.uint8
    assert data.state.dtype == data.action.dtype == torch.float32 and data.fps == 20
    assert data.instructions == ("lift it", "put it down")
    assert not list(tmp_path.rglob("*.part"))
    check(read(folder, limit=3), 3)


def test_the_layout_follows_lerobot(tmp_path) -> None:
    """Files and fields according to LeRobot's documentation of v3.0."""
    record(tmp_path)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"]) == ("v3.0", 20)
    assert info["splits"] == {"train": "0:5"}
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (5, FRAMES, 2)
    assert info["features"]["observation.images.front"]["shape"] == [H, W, 3]
    for i in range(3):
        for name in ("data", "meta/episodes", "videos/observation.images.front"):
            suffix = "mp4" if name[0] == "v" else "parquet"
            assert (tmp_path / f"{name}/chunk-000/file-00{i}.{suffix}").is_file()
    table = pq.read_table(tmp_path / "data/chunk-000/file-001.parquet")  # episodes 2 and 3
    assert set(table.column_names) | {"observation.images.front"} == set(info["features"])
    assert table["index"].to_pylist() == list(range(11, 19))
    assert table["frame_index"].to_pylist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert table["timestamp"].to_numpy()[:3] == pytest.approx([0, 0.05, 0.1])
    assert table.schema.field("action").type == pa.list_(pa.float32(), 2)
    rows = pq.read_table(tmp_path / "meta/episodes/chunk-000/file-001.parquet").to_pylist()
    row = rows[1]  # episode 3 has 3 frames, after the 5 of episode 2
    assert (row["episode_index"], row["length"], row["tasks"]) == (3, 3, ["put it down"])
    assert (row["dataset_from_index"], row["dataset_to_index"]) == (16, 19)
    assert (row["data/chunk_index"], row["data/file_index"]) == (0, 1)
    assert row["meta/episodes/file_index"] == 1
    prefix = "videos/observation.images.front/"
    video = {k.removeprefix(prefix): x for k, x in row.items() if k.startswith(prefix)}
    assert video == {"chunk_index": 0, "file_index": 1, "from_timestamp": 0.25, "to_timestamp": 0.4}
    tasks = pq.read_table(tmp_path / "meta/tasks.parquet")
    expected = [{"task_index": 0, "task": "lift it"}, {"task_index": 1, "task": "put it down"}]
    assert tasks.to_pylist() == expected
    assert tasks.schema.pandas_metadata["index_columns"] == ["task"]


def test_statistics_of_all_frames(tmp_path) -> None:
    record(tmp_path)
    stats = json.loads((tmp_path / "meta/stats.json").read_text())
    state = np.concatenate([episode(i)["state"] for i in range(5)]).astype(np.float64)
    pixels = np.concatenate([episode(i)["images"]["front"] for i in range(5)]) / 255
    for key, x, axes in (
        ("observation.state", state, 0),
        ("observation.images.front", pixels, (0, 1, 2)),
    ):
        for name in ("min", "max", "mean", "std"):
            value = np.array(stats[key][name])
            assert value.shape == ((3, 1, 1) if x.ndim == 4 else (3,))
            np.testing.assert_allclose(value.reshape(-1), getattr(x, name)(axes), rtol=1e-9)
        assert stats[key]["count"] == [FRAMES]


# ------------------------------------------------------------------------------------------- resume
@pytest.mark.slow
def test_recording_continues_in_an_existing_folder(tmp_path) -> None:
    record(tmp_path / "once")
    for episodes in (0, 2, 3, 5):  # a file with one episode in the middle
        record(tmp_path / "parts", episodes)
        with Writer(tmp_path / "parts", **OPTIONS) as writer:
            assert writer.episodes == episodes and writer.frames == sum(LENGTHS[:episodes])
    check(read(tmp_path / "parts"))
    meta = lambda folder, name: json.loads((tmp_path / folder / "meta" / name).read_text())
    assert meta("once", "info.json") == meta("parts", "info.json")
    one, two = (meta(folder, "stats.json")["action"]["std"] for folder in ("once", "parts"))
    np.testing.assert_allclose(one, two, rtol=1e-12)
    # LeRobot's tools write the rows of all files to one; none is incomplete.
    first, *files = sorted((tmp_path / "once").glob("meta/episodes/*/*"))
    rows = [row for path in (first, *files) for row in pq.read_table(path).to_pylist()]
    pq.write_table(pa.Table.from_pylist([r | {"meta/episodes/file_index": 0} for r in rows]), first)
    for path in files:
        path.unlink()
    check(read(record(tmp_path / "once", 6)), 6)


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from tests.data.test_lerobot_reader import OPTIONS, Writer, episode
writer = Writer({folder!r}, **OPTIONS, episodes_per_file=2)
for i in range(3):
    writer.add(**episode(i))
print("recorded", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_killed_recording_loses_the_incomplete_file_only(tmp_path) -> None:
    code = KILLED.format(tests=str(Path(__file__).parents[2]), folder=str(tmp_path))
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "recorded\n"
        with pytest.raises(ConfigError, match="another process records into it"):
            Writer(tmp_path, **OPTIONS)
        os.kill(process.pid, signal.SIGKILL)
    check(read(tmp_path), 2)
    # A process that was killed while it wrote has written a file, but not the episodes.
    (tmp_path / "data/chunk-000/file-001.parquet").write_bytes(b"half")
    (tmp_path / "data/chunk-000/file-001.parquet.1.part").write_bytes(b"half")
    with Writer(tmp_path, **OPTIONS) as writer:
        assert writer.episodes == 2
    assert not list(tmp_path.rglob("*.part"))
    assert not (tmp_path / "data/chunk-000/file-001.parquet").exists()
    check(read(record(tmp_path)))


def test_other_options_are_refused(tmp_path) -> None:
    record(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"fps.*20.*10"):
        Writer(tmp_path, **{**OPTIONS, "fps": 10})
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        Writer(other, **OPTIONS)


def test_invalid_episodes_are_refused(tmp_path) -> None:
    action = np.array([[0, 0], [0, 0], [0, np.nan], [0, 0]])
    with Writer(tmp_path, **OPTIONS) as writer:
        with pytest.raises(ConfigError, match=r"frame 2: action \[1\]"):
            writer.add(**{**episode(0), "action": action})
        assert writer.episodes == 0
        writer.add(**episode(0))
    check(read(tmp_path), 1)


# ---------------------------------------------------------------------------------- chunk and split
def numbers() -> Demonstrations:
    state = torch.from_numpy(np.concatenate([episode(i)["state"] for i in range(5)]))
    action = torch.from_numpy(np.concatenate([episode(i)["action"] for i in range(5)]))
    index = torch.tensor([0, 1, 4, 6, 7]).repeat_interleave(torch.tensor(LENGTHS))
    return Demonstrations({}, state, action, index, torch.zeros_like(index), ("go",), 20.0)


@pytest.mark.parametrize("C", [1, 3, 8])
def test_chunks_equal_those_of_a_plain_loop(C: int) -> None:
    data = numbers()
    frames = torch.randperm(FRAMES)
    action, executed = data.chunk(frames, C)
    assert action.shape == (FRAMES, C, 2)
    assert executed.shape == (FRAMES, C) and executed.dtype == torch.bool
    for b, f in enumerate(frames.tolist()):
        last = f
        for c in range(C):
            is_inside = f + c < FRAMES and bool(data.episode[f + c] == data.episode[f])
            last = f + c if is_inside else last
            assert bool(executed[b, c]) == is_inside
            assert torch.equal(action[b, c], data.action[last])


def test_split_holds_out_complete_episodes() -> None:
    data = numbers()
    train, held = data.split(0.4, seed=0)
    assert sorted(train.tolist() + held.tolist()) == list(range(FRAMES))
    assert len(data.episode[held].unique()) == 2
    assert not set(data.episode[train].tolist()) & set(data.episode[held].tolist())
    assert torch.equal(held, data.split(0.4, seed=0)[1])
    assert any(not torch.equal(held, data.split(0.4, seed=i)[1]) for i in range(1, 9))
    assert len(data.split(0.0, seed=0)[1]) == 0
    assert len(data.episode[data.split(0.01, seed=0)[1]].unique()) == 1
    with pytest.raises(ConfigError, match=r"0\.95"):
        data.split(0.95, seed=0)


# -------------------------------------------------------------------------------- invalid data sets
def info(folder: Path, **changes: Any) -> None:
    path = folder / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite_table(
    folder: Path, name: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> None:
    path = folder / name
    pq.write_table(pa.Table.from_pylist(change(pq.read_table(path).to_pylist())), path)


DATA, EPISODES = "data/chunk-000/file-001.parquet", "meta/episodes/chunk-000/file-001.parquet"
VIDEO, SHORT = (f"videos/observation.images.front/chunk-000/file-00{i}.mp4" for i in (1, 0))


def without(i: int) -> Callable[[list[Any]], list[Any]]:
    return lambda rows: rows[:i] + rows[i + 1 :]


def setting(i: int, **values: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda rows: rows[:i] + [rows[i] | values] + rows[i + 1 :]


def damaged(folder: Path) -> None:
    data = bytearray((folder / VIDEO).read_bytes())
    middle = data.index(b"mdat") + 3000
    data[middle : middle + 400] = bytes(range(200)) * 2
    (folder / VIDEO).write_bytes(bytes(data))


def playlist(folder: Path) -> None:
    """Write a list of other files, which ffmpeg would follow whatever the name is."""
    other = folder / SHORT
    (folder / VIDEO).write_text(
        f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{other}\n#EXT-X-ENDLIST\n"
    )


# Name -> function that damages a folder, and what the message must name.
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no info": (lambda f: (f / "meta/info.json").unlink(), r"info\.json"),
    "version": (lambda f: info(f, codebase_version="v1.6"), r"codebase_version.*v1\.6.*v3\.0"),
    "features": (lambda f: info(f, features={}), r"observation\.state"),
    "data": (lambda f: (f / DATA).write_bytes(b"PAR1 or not"), DATA),
    "no video": (lambda f: (f / VIDEO).unlink(), VIDEO),
    "damaged video": (damaged, VIDEO),
    "playlist": (playlist, VIDEO),
    "lost frame": (lambda f: rewrite_table(f, DATA, without(6)), DATA + ".*episode 3.*frame 1"),
    "nan": (
        lambda f: rewrite_table(f, DATA, setting(3, action=[0.0, float("inf")])),
        DATA + r".*episode 2, frame 3: action \[1\] is inf",
    ),
    "shape": (
        lambda f: rewrite_table(f, DATA, setting(6, action=[1.0])),
        DATA + r".*episode 3, frame 1: action.*1.*2",
    ),
    "twice": (lambda f: rewrite_table(f, EPISODES, setting(1, episode_index=2)), "episode 2"),
    "two tasks": (
        lambda f: rewrite_table(f, "meta/tasks.parquet", lambda x: [*x, x[1] | {"task_index": 0}]),
        r"tasks\.parquet.*task_index 0 has two tasks",
    ),
    "outside": (lambda f: info(f, video_path="/etc/passwd"), "/etc/passwd"),
    "a deep template": (lambda f: info(f, data_path="{chunk_index.__class__}"), "__class__"),
    "endless": (lambda f: rewrite_table(f, EPISODES, setting(0, length=2**50)), "GiB"),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("name", BAD)
def test_invalid_data_sets_are_refused(good: Path, tmp_path, name: str) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "bad"))
    spoil, message = BAD[name]
    spoil(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        read(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_data_sets_larger_than_the_memory_are_refused(good: Path, monkeypatch) -> None:
    # 25 frames of 1172 bytes are 29300 bytes.
    monkeypatch.setattr(lerobot_reader, "free_memory", lambda: 20000.0)
    message = (
        r"25 frames x \(16 x 24 x 3 \+ 5 x 4\) bytes = .* cloning.episodes=1 of its 5 episodes"
    )
    with pytest.raises(ConfigError, match=message):
        read(good)
    check(read(good, limit=1), 1)


# ----------------------------------------------------------------------------------- images on disk
@pytest.mark.parametrize("size", [1, 6, 1000])
def test_a_stream_returns_each_frame_in_a_random_order(good: Path, size: int) -> None:
    """The order depends on seed and buffer alone; each pass has all frames of the episodes."""
    data, episodes = open_folder(good), [0, 2, 3]
    disk, expected, decoded = data.disk, read(good), []
    assert disk is not None

    def stream(seed: int) -> FrameStream:
        return FrameStream(disk, episodes, size=size, seed=seed)

    one = FrameStream(
        disk, episodes, size=size, seed=0, on_episode=lambda i, images: decoded.append(i)
    )
    frames, images = one.take(24)
    assert torch.equal(images["front"], expected.images["front"][frames])
    assert sorted(decoded[:3]) == episodes and len(decoded) > 5
    two = stream(0)
    parts = [two.take(count)[0] for count in (5, 19)]
    assert torch.equal(torch.cat(parts), frames)
    assert not torch.equal(stream(1).take(24)[0], frames)
    # 22 draws of each of the 12 frames, but for those in the buffer and those drawn twice instead.
    counts = (frames.bincount() + one.take(12 * 20)[0].bincount())[:19]
    assert counts[torch.isin(expected.episode[:19], torch.tensor([1]))].sum() == 0
    assert counts[counts > 0].shape == (12,) and counts[counts > 0].min() > 10


def test_cameras_episodes_and_rate_of_a_folder(good: Path, tmp_path) -> None:
    folder = Path(shutil.copytree(good, tmp_path / "depth"))
    features = json.loads((folder / "meta/info.json").read_text())["features"]
    info(folder, features=features | {"observation.front": features[KEY]})
    with pytest.raises(ConfigError, match=r"and observation\.front are both called front"):
        open_folder(folder)
    depth = {"dtype": "video", "shape": [480, 640, 1]}  # without files
    info(folder, features=features | {"observation.images.depth": depth})
    with pytest.raises(ConfigError, match=r"depth has shape \[480, 640, 1\]"):
        open_folder(folder)
    expected = read(good)
    # Every second frame of a video with 20 frames per second, and the images at half the size.
    halved = {"front": (H // 2, W // 2)}
    data = open_folder(folder, cameras=halved, exclude=[0, 3], rate=10)
    assert data.fps == 10 and data.episode.unique().tolist() == [1, 2, 4]
    assert data.episode.bincount().tolist() == [0, 4, 3, 0, 3]
    rows = [f for i in (1, 2, 4) for f in (expected.episode == i).nonzero().flatten()[::2].tolist()]
    assert torch.equal(data.state, expected.state[rows])
    assert torch.equal(data.action, expected.action[rows])
    image = Image.fromarray(expected.images["front"][rows[5]].numpy())
    resized = np.asarray(image.resize((W // 2, H // 2), Image.Resampling.BILINEAR))
    assert np.array_equal(data.load().images["front"][5].numpy(), resized)
    parts = list(data.in_order(torch.tensor([3, 5, 9]), 2))
    assert torch.equal(torch.cat([frames for frames, _ in parts]), torch.tensor([3, 5, 9]))
    assert torch.equal(torch.cat([x["front"] for _, x in parts])[1], torch.tensor(resized))
    # Twice the rate repeats frames; other proportions are not resized.
    double = open_folder(folder, cameras={"front": (H, H)}, rate=40, limit=1).load()
    assert double.images["front"].shape == (2 * LENGTHS[0] - 1, H, W, 3)
    assert double.state[:, 1].tolist() == [0, 0, 1, 1, 2, 2, 3]
    with pytest.raises(ConfigError, match=r"remove 7 from cloning\.exclude_episodes"):
        open_folder(folder, cameras={}, exclude=[7])
    with pytest.raises(ConfigError, match=r"^shorten cloning\.exclude_episodes"):
        open_folder(folder, cameras={}, exclude=range(len(LENGTHS)))


# --------------------------------------------------------------------------------------------- v2.1
KEY = "observation.images.front"
TASKS = [{"task_index": 4, "task": "lift it"}, {"task_index": 9, "task": "put it down"}]


def version_2(
    folder: Path, size: list[int], lengths: list[int], encoded: list[list[bytes]] | None = None
) -> Path:
    """Write a data set as LeRobot did until 2025, with two episodes in a folder.

    Args:
        folder: Created.
        size: Shape of the images, [H, W, 3] or [3, H, W].
        lengths: Frames of each episode.
        encoded: Image files by episode and frame, in the tables; None: in videos, which the caller
            writes.
    """
    (folder / "meta").mkdir(parents=True)
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "total_episodes": len(lengths),
        "chunks_size": 2,
        "features": {
            KEY: {"dtype": "image" if encoded else "video", "shape": size},
            "observation.state": {"dtype": "float32", "shape": [3]},
            "action": {"dtype": "float32", "shape": [2]},
        },
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": (
            "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        ),
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/tasks.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    rows = [{"episode_index": i, "length": length} for i, length in enumerate(lengths)]
    (folder / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for i, length in enumerate(lengths):
        columns: dict[str, Any] = {
            "observation.state": episode(i)["state"][:length].tolist(),
            "action": episode(i)["action"][:length].tolist(),
            "frame_index": list(range(length)),
            "episode_index": [i] * length,
            "task_index": [TASKS[i % 2]["task_index"]] * length,
        }
        if encoded:
            columns[KEY] = [{"bytes": x, "path": None} for x in encoded[i]]
        path = folder / f"data/chunk-00{i // 2}/episode_00000{i}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)
    return folder


def test_images_execute_no_programs_and_are_not_decompressed(tmp_path) -> None:
    """Covers PostScript, for which Pillow starts Ghostscript, and a small file of many pixels."""
    eps = (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 16\n%%EndComments\n(x)"
        b" run\nshowpage\n%%EOF\n"
    )
    with pytest.raises(ConfigError, match=r"frame 0"):
        read(version_2(tmp_path / "eps", [H, W, 3], [1], [[eps]]))
    file = io.BytesIO()
    Image.new("1", (10_000, 8_000)).save(file, "PNG")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    message = r"\[8000, 10000, 3\].*\[16, 24, 3\]"
    with pytest.raises(ConfigError, match=message):
        read(version_2(tmp_path / "bomb", [H, W, 3], [1], [[file.getvalue()]]))
    depth = imageio.imwrite("<bytes>", np.full((H, W), 900, np.uint16), extension=".png")
    with pytest.raises(ConfigError, match=r"^write images of 8 bits: .*frame 0.*I;16"):
        read(version_2(tmp_path / "depth", [H, W, 3], [1], [[depth]]))
    # In KiB; the pixels would need 240 MB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("kind", ["video", "image"])
def test_v2_1_is_read(tmp_path, kind: str) -> None:
    """Data as LeRobot wrote them until 2025: images in lossy videos, or in the tables."""
    lengths, colour = list(LENGTHS[:3]), lambda i: (40 * i + 10, 100, 200 - 30 * i)
    pictures = [
        np.broadcast_to(np.array(colour(i), np.uint8), (length, H, 32, 3))
        for i, length in enumerate(lengths)
    ]
    encoded = [[imageio.imwrite("<bytes>", x, extension=".png") for x in p] for p in pictures]
    folder = version_2(tmp_path / "d", [3, H, 32], lengths, encoded if kind == "image" else None)
    for i, images in enumerate(pictures if kind == "video" else ()):
        path = folder / f"videos/chunk-00{i // 2}/{KEY}/episode_00000{i}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        imageio.imwrite(path, images, fps=10)
    data = read(folder)
    assert data.instructions == ("lift it", "put it down") and data.fps == 10
    for i in range(3):
        frames = data.episode == i
        assert torch.equal(data.state[frames], torch.from_numpy(episode(i)["state"]))
        assert torch.equal(data.action[frames], torch.from_numpy(episode(i)["action"]))
        assert set(data.instruction[frames].tolist()) == {i % 2}
        images = data.images["front"][frames]
        assert images.shape == (LENGTHS[i], H, 32, 3)
        error = (images.int() - torch.tensor(colour(i))).abs().max()
        assert error <= (0 if kind == "image" else 4)
    rows = (TASKS[0] | {"task": ""}, TASKS[1] | {"task": "lift\u2028it"})
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "meta/tasks.jsonl").write_text("\r\n".join(lines), "utf-8")
    assert lerobot_reader.read_tasks(folder, "v2.1") == {4: "", 9: "lift\u2028it"}
    (folder / "meta/episodes.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"episodes.jsonl is missing"):
        read(folder)
