"""`embodied-ppo demos` and `clone`: what they write is read back, continued, interrupted and
improved by PPO.
"""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from embodied_ppo.commands import main
from embodied_ppo.data.lerobot_reader import read
from embodied_ppo.training import checkpoint, progress

SMALL = [
    "env.num_envs=4",
    "env.max_episode_steps=10",
    "algorithm.horizon=2",
    "algorithm.global_batch_size=8",
    "evaluation.episodes=4",
    "evaluation.num_envs=4",
    "evaluation.video_episodes=0",
    "model.width=16",
    "model.heads=2",
    *(f"cloning.{x}" for x in ("dataset=d", "steps=3", "foresight_steps=2", "batch_size=4")),
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs in an empty folder and with a cache of its own."""
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def run(
    capsys: pytest.CaptureFixture[str], *words: str, code: int = 0
) -> tuple[dict[str, Any], str]:
    """What a command says with --json, and stderr."""
    found = main.main([words[0], "--json", *words[1:]])
    out = capsys.readouterr()
    assert found == code, out.err
    return json.loads(out.out or "{}"), out.err


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "embodied_ppo.commands.main", *words]


def weights(run_dir: str) -> dict[str, torch.Tensor]:
    return checkpoint.open_checkpoint(run_dir).policy()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -------------------------------------------------------------------------------------------- demos
def test_demonstrations_are_recorded_and_continued(capsys: pytest.CaptureFixture[str]) -> None:
    told, err = run(capsys, "demos", "out=d", "episodes=5", "env.image_size=16")
    assert err == "recording 5 demonstrations into d\n"
    demos = read("d")
    assert told.pop("wall_s") > 0 and 0.5 < told.pop("expert_success") <= 1
    assert told == {
        "folder": "d",
        "episodes": 5,
        "frames": len(demos.state),
        "found": 0,
        "recorded": 5,
        "families": {"reach": 5},
    }
    assert (
        demos.images["front"].shape[1:] == (16, 16, 3)
        and demos.state.shape[1] == 12
        and int(demos.episode[-1]) == 4
    )

    told, err = run(capsys, "demos", "out=d", "episodes=7", "env.image_size=16")
    assert err == "recording 2 demonstrations into d, which holds 5\n"
    assert (told["found"], told["recorded"], told["episodes"], told["families"]) == (
        5,
        2,
        7,
        {"reach": 2},
    )
    longer = read("d")
    assert (
        torch.equal(longer.state[: len(demos.state)], demos.state) and int(longer.episode[-1]) == 6
    )
    starts = [longer.state[longer.episode == i][0, :3] for i in range(7)]
    assert len({tuple(start.tolist()) for start in starts}) > 1

    told, err = run(capsys, "demos", "out=d", "episodes=7", "env.image_size=16")
    assert (told["recorded"], told["expert_success"]) == (0, None)
    assert err == "d holds 7 demonstrations; nothing is left to record\n"

    assert main.main(["demos", "--quiet", "out=d", "episodes=8", "env.image_size=16"]) == 0
    out = capsys.readouterr()
    assert (
        out.err == ""
        and re.search(r"^episodes +8$", out.out, re.M)
        and re.search(r"^families +reach 1$", out.out, re.M)
    )


def test_the_seed_decides_what_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["out=a"], ["out=b"], ["out=c", "seed=1"], ["out=d", "noise=0.3"]):
        run(capsys, "demos", "episodes=3", "env.image_size=16", *words)
    a, b, c, d = (read(name).state for name in "abcd")
    assert torch.equal(a, b) and not torch.equal(a[:1], c[:1]) and torch.equal(a[:1], d[:1])
    assert a.shape != d.shape or not torch.equal(a, d)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("noise=0.1", "d: holds demonstrations with noise=0.05, not 0.1; choose another folder"),
        ("seed=3", "d: holds demonstrations with seed=0, not 3"),
        (
            "env.kwargs.families=[push]",
            "env.kwargs={families: [reach], obs: language}, not {families: [push]",
        ),
        ("env.randomize=true", "env.randomize=false, not true"),
        ("env.image_size=32", "observation.images.front=.*16, 16, 3.* not .*32, 32, 3"),
    ],
)
def test_a_folder_holds_what_was_asked_for_in_one_way(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "demos", "out=d", "episodes=2", "env.image_size=16")
    before = {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()}
    _, err = run(
        capsys, "demos", "out=d", "episodes=3", "env.image_size=16", *words.split(), code=2
    )
    assert err.startswith("error: d: holds") and err.count("\n") == 1
    assert re.search(says if ".*" in says else re.escape(says), err)
    assert {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()} == before


def test_folders_that_cannot_be_recorded_into(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    Path("other").mkdir()
    Path("other/thesis.tex").touch()
    for out, says in (
        ("file", "out = file: is a file; name a folder"),
        ("file/below", "file/below: cannot be written (Not a directory); choose another folder"),
        ("other", "other: holds thesis.tex but no meta/info.json; choose an empty folder"),
    ):
        _, err = run(capsys, "demos", f"out={out}", "episodes=2", code=2)
        assert err == f"error: {says}\n"
    assert sorted(str(path) for path in Path().rglob("*")) == ["file", "other", "other/thesis.tex"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_recording_loses_nothing_that_is_finished(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demos", "out=d", "episodes=100000", "env.image_size=16"]
    process = subprocess.Popen(
        command(*words), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while (
        process.poll() is None
        and time.monotonic() < deadline
        and not [*Path("d/data").rglob("*.parquet")]
    ):
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == "", err
    last = re.fullmatch(
        r"interrupted; (\d+) of 100000 demonstrations are safe in d; the same command continues",
        err.splitlines()[-1],
    )
    assert last is not None and "Traceback" not in err
    safe = int(last[1])
    assert safe >= 64 and int(read("d").episode[-1]) + 1 == safe
    told, _ = run(capsys, "demos", "out=d", f"episodes={safe + 1}", "env.image_size=16")
    assert (told["found"], told["episodes"]) == (safe, safe + 1)
    assert not [*Path("d").rglob("*.part")]


def test_a_full_disk_is_one_line_and_what_is_finished_is_safe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No file may grow beyond half of the largest one so far: the next one cannot be finished."""
    run(capsys, "demos", "out=d", "episodes=64", "env.image_size=16")
    largest = max(path.stat().st_size for path in Path("d").rglob("*") if path.is_file())

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, largest // 2))

    done = subprocess.run(
        command("demos", "out=d", "episodes=1000", "env.image_size=16"),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=full,
    )
    assert done.returncode == 3, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: d") and "is the disk full? Complete files are kept" in last
    assert "Traceback" not in done.stderr
    told, _ = run(capsys, "demos", "out=d", "episodes=65", "env.image_size=16")
    assert told["found"] == 64 and int(read("d").episode[-1]) == 64


def in_a_terminal(*words: str) -> str:
    """What a command shows on stderr."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux: the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert process.wait(60) == 0, shown
    return shown.decode()


def test_a_terminal_shows_bars() -> None:
    shown = in_a_terminal("demos", "out=d", "episodes=3", "env.image_size=16")
    assert "recording 3 demonstrations into d" in shown and re.search(r"recording .*━.*3/3", shown)
    shown = in_a_terminal(
        "train",
        "experiment=tabletop_token",
        *SMALL,
        "env.image_size=16",
        "updates=1",
        "run_dir=run",
    )
    assert re.search(r"foresight .*━.*2/2", shown) and re.search(r"cloning .*━.*3/3", shown)
    shown = in_a_terminal("demos", "out=d", "episodes=4", "env.image_size=16", "--quiet")
    assert shown == ""


def test_the_options_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    rows, _ = run(capsys, "config", "demos", "noise=0.1")
    assert (rows["noise"]["value"], rows["noise"]["source"]) == (0.1, "command line")
    task = rows["env.id"]
    assert (task["value"], task["source"]) == ("Tabletop", "configs/experiment/tabletop_token.yaml")
    assert "algorithm.gamma" not in rows
    rows, _ = run(capsys, "config", "clone")
    assert rows["cloning.steps"]["value"] > 0 and rows["name"]["value"] == "tabletop_token"


# -------------------------------------------------------------------------------------------- clone
@pytest.mark.parametrize("policy", ["token", "flow", "gaussian"])
def test_a_clone_is_measured_and_improved_as_if_train_had_cloned(
    policy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "demos", "out=d", "episodes=4")
    words = [f"experiment=tabletop_{policy}", *SMALL]
    film = ["evaluation.video_episodes=1", "evaluation.video_steps=3"] if policy == "token" else []
    told, err = run(capsys, "clone", *words, *film, "run_dir=clone")
    assert "foresight: step 2 of 2" in err and "cloning: step 3 of 3" in err
    assert told == json.loads(Path("clone/summary.json").read_text())
    assert (
        told["updates"] == 0
        and told["cloning_loss"] == told["cloning_loss"]
        and told["held_out_loss"] is not None
    )
    assert told["checkpoint"] == "clone/checkpoints/step_000000" and Path(told["report"]).is_file()
    assert (told["video"] is not None) == bool(film) and (
        not film or Path(told["video"]).stat().st_size > 0
    )
    (row,) = map(json.loads, Path("clone/metrics.jsonl").read_text().splitlines())
    assert (row["update"], row["eval/success"]) == (0, told["final_success"])
    saved = checkpoint.open_checkpoint("clone")
    assert saved.update == 0 and saved.manifest["score"] == told["final_return"]
    assert Path("clone/checkpoints/best").resolve() == saved.path
    stored = yaml.safe_load(Path("clone/config.yaml").read_text())
    assert (stored["updates"], stored["env_steps"]) == (None, 250000)  # of the experiment, for PPO

    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    measured, err = run(
        capsys, "evaluate", "checkpoint=clone", "episodes=4", "num_envs=4", "video=false"
    )
    assert [line for line in err.splitlines() if "left" in line][-1] == "episodes 4/4  0 s left"
    assert measured["eval/return"] == told["final_return"]
    assert Path("clone/reports/step_000000-4x0").is_dir()

    again, err = run(
        capsys, "clone", *words, "run_dir=again"
    )  # the losses are remembered with the weights
    assert "cloning: taken from" in err and same(weights("again"), weights("clone"))
    assert [again[x] for x in ("cloning_loss", "held_out_loss")] == [
        told[x] for x in ("cloning_loss", "held_out_loss")
    ]

    _, err = run(capsys, "train", "resume=clone", "run_dir=ppo", "updates=2")
    assert "cloning" not in err and "updates 1 to 2" in err
    whole, _ = run(capsys, "train", *words, "run_dir=whole", "updates=2")
    assert whole["held_out_loss"] == told["held_out_loss"]
    assert same(weights("ppo"), weights("whole")) and not same(weights("ppo"), weights("clone"))
    _, err = run(capsys, "train", "resume=clone", "updates=1")  # in place
    assert checkpoint.open_checkpoint("clone").update == 1

    _, err = run(capsys, "clone", *words, "run_dir=clone", code=2)
    assert err.startswith(
        "error: run_dir=clone: holds a run already; name another, or continue with PPO"
    )


def test_another_dataset_of_the_same_name_is_cloned_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(capsys, "demos", "out=d", "episodes=4")
    run(capsys, "clone", *SMALL, "run_dir=a")
    Path("d").rename("old")
    run(capsys, "demos", "out=d", "episodes=4", "seed=1")
    _, err = run(capsys, "clone", *SMALL, "run_dir=b")
    assert "cloning: taken from" not in err and not same(weights("a"), weights("b"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_clone_leaves_no_run(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "demos", "out=d", "episodes=4")
    words = [*SMALL, "cloning.steps=1000000", "run_dir=run"]
    process = subprocess.Popen(command("clone", *words), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("foresight: step 2"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (
        process.returncode == 130
        and err.splitlines()[-1] == "error: interrupted"
        and "Traceback" not in err
    )
    assert not Path("run").exists()
