"""Tests of `embodied-ppo demos` and `clone`: recording, interruption, cloning, PPO afterwards."""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch
import yaml

from embodied_envs.tasks import expert_recorder
from embodied_ppo.cluster import run_plan
from embodied_ppo.commands import main
from embodied_ppo.data.lerobot_reader import read
from embodied_ppo.data.lerobot_writer import Writer
from embodied_ppo.training import checkpoint, progress

SMALL = run_helpers.words("""env.num_envs=4 env.image_size=16 env.max_episode_steps=10
    algorithm.horizon=2 algorithm.global_batch_size=8 evaluation.episodes=4
    evaluation.num_envs=4 evaluation.video_episodes=0 model.width=16 cloning.dataset=d
    cloning.steps=3 cloning.foresight_steps=2 cloning.batch_size=4""")


@pytest.fixture(autouse=True)
def own_cache(empty_folder: None, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("EMBODIED_PPO_CACHE", str(tmp_path / "cache"))


def run(
    capsys: pytest.CaptureFixture[str], name: str, *arguments: str, code: int = 0
) -> tuple[dict[str, Any], str]:
    """Run a command with --json; return its summary and stderr."""
    exit_code = main.main([name, "--json", *arguments])
    out = capsys.readouterr()
    assert exit_code == code, out.err
    return json.loads(out.out or "{}"), out.err


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "embodied_ppo.commands.main", *arguments]


def weights(run_dir: str) -> dict[str, torch.Tensor]:
    return checkpoint.open_checkpoint(run_dir).policy()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -------------------------------------------------------------------------------------------- demos
@pytest.mark.slow
def test_demonstrations_are_recorded_and_continued(capsys) -> None:
    summary, err = run(capsys, "demos", "out=d", "episodes=5", "env.image_size=16")
    assert err == "recording 5 demonstrations into d\n"
    demos = read("d")
    assert summary.pop("wall_s") > 0 and 0.5 < summary.pop("expert_success") <= 1
    assert summary == {
        "folder": "d",
        "episodes": 5,
        "frames": len(demos.state),
        "found": 0,
        "recorded": 5,
        "families": {"reach": 5},
    }
    assert demos.images["front"].shape[1:] == (16, 16, 3)
    assert demos.state.shape[1] == 12 and int(demos.episode[-1]) == 4

    summary, err = run(capsys, "demos", "out=d", "episodes=7", "env.image_size=16")
    assert err == "recording 2 demonstrations into d, which holds 5\n"
    counts = {"found": 5, "recorded": 2, "episodes": 7, "families": {"reach": 2}}
    assert {name: summary[name] for name in counts} == counts
    longer = read("d")
    assert torch.equal(longer.state[: len(demos.state)], demos.state)
    assert int(longer.episode[-1]) == 6
    starts = [longer.state[longer.episode == i][0, :3] for i in range(7)]
    assert len({tuple(start.tolist()) for start in starts}) > 1

    summary, err = run(capsys, "demos", "out=d", "episodes=7", "env.image_size=16")
    assert (summary["recorded"], summary["expert_success"]) == (0, None)
    assert err == "d holds 7 demonstrations; nothing is left to record\n"

    assert main.main(["demos", "--quiet", "out=d", "episodes=8", "env.image_size=16"]) == 0
    out = capsys.readouterr()
    assert out.err == "" and re.search(r"^episodes +8$", out.out, re.M)
    assert re.search(r"^families +reach 1$", out.out, re.M)


@pytest.mark.slow
def test_recordings_depend_on_seed_and_noise(capsys) -> None:
    for options in (["out=a"], ["out=b"], ["out=c", "seed=1"], ["out=d", "noise=0.3"]):
        run(capsys, "demos", "episodes=3", "env.image_size=16", *options)
    a, b, c, d = (read(name).state for name in "abcd")
    assert torch.equal(a, b) and not torch.equal(a[:1], c[:1]) and torch.equal(a[:1], d[:1])
    assert a.shape != d.shape or not torch.equal(a, d)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "message"),
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
def test_recording_with_other_options_is_refused(option: str, message: str, capsys) -> None:
    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in Path("d").rglob("*") if path.is_file()}

    run(capsys, "demos", "out=d", "episodes=2", "env.image_size=16")
    before = contents()
    _, err = run(capsys, "demos", "out=d", "episodes=3", "env.image_size=16", option, code=2)
    assert err.startswith("error: d: holds") and err.count("\n") == 1
    assert re.search(message if ".*" in message else re.escape(message), err)
    assert contents() == before


@pytest.mark.slow
def test_invalid_folders_are_refused(capsys) -> None:
    Path("file").touch()
    Path("other").mkdir()
    Path("other/thesis.tex").touch()
    for out, message in (
        ("file", "file: cannot be written (File exists); choose another folder"),
        ("file/below", "file/below: cannot be written (Not a directory); choose another folder"),
        ("other", "other: holds thesis.tex but no meta/info.json; choose an empty folder"),
    ):
        _, err = run(capsys, "demos", f"out={out}", "episodes=2", code=2)
        assert err == f"error: {message}\n"
    assert sorted(str(path) for path in Path().rglob("*")) == ["file", "other", "other/thesis.tex"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_recording_keeps_finished_episodes(number: signal.Signals, capsys) -> None:
    arguments = command("demos", "out=d", "episodes=100000", "env.image_size=16")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while process.poll() is None and not [*Path("d/data").rglob("*.parquet")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and out == "", err
    line = "interrupted; finished demonstrations are safe in d; the same command continues"
    assert err.splitlines()[-1] == line and "Traceback" not in err
    safe = int(read("d").episode[-1]) + 1
    assert safe >= 64
    summary, _ = run(capsys, "demos", "out=d", f"episodes={safe + 1}", "env.image_size=16")
    assert (summary["found"], summary["episodes"]) == (safe, safe + 1)
    assert not [*Path("d").rglob("*.part")]


@pytest.mark.slow
def test_full_disk_keeps_finished_episodes(capsys) -> None:
    """The limit of file size is half of the largest file, so the next file cannot be finished."""
    run(capsys, "demos", "out=d", "episodes=64", "env.image_size=16")
    largest = max(path.stat().st_size for path in Path("d").rglob("*") if path.is_file())

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, largest // 2))

    process = subprocess.run(
        command("demos", "out=d", "episodes=1000", "env.image_size=16"),
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=limit_file_size,
    )
    assert process.returncode == 3, process.stderr
    last = process.stderr.splitlines()[-1]
    assert last.startswith("error: d")
    assert "is the disk full? Complete files are kept" in last
    assert "Traceback" not in process.stderr
    summary, _ = run(capsys, "demos", "out=d", "episodes=65", "env.image_size=16")
    assert summary["found"] == 64 and int(read("d").episode[-1]) == 64


def test_options_of_demos_and_clone(capsys) -> None:
    rows, _ = run(capsys, "config", "demos", "noise=0.1")
    assert (rows["noise"]["value"], rows["noise"]["source"]) == (0.1, "command line")
    task = rows["env.id"]
    assert (task["value"], task["source"]) == ("Tabletop", "configs/experiment/tabletop_token.yaml")
    assert "algorithm.gamma" not in rows
    rows, _ = run(capsys, "config", "clone")
    assert rows["cloning.steps"]["value"] > 0 and rows["name"]["value"] == "tabletop_token"


# -------------------------------------------------------------------------------------------- clone
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["token", "flow", "gaussian"])
def test_ppo_from_a_clone_equals_train_with_cloning(policy: str, capsys, monkeypatch) -> None:
    if policy != "token":  # memory estimates take half of the time of these runs
        monkeypatch.setattr(run_plan, "can_estimate", lambda *_, **__: False)
    run(capsys, "demos", "out=d", "episodes=4", "env.image_size=16")
    options = [f"experiment=tabletop_{policy}", *SMALL]
    video = ["evaluation.video_episodes=1"] if policy == "token" else []
    summary, err = run(capsys, "clone", *options, *video, "run_dir=clone")
    assert "auxiliary loss: step 2 of 2" in err and "cloning: step 3 of 3" in err
    assert summary == json.loads(Path("clone/summary.json").read_text())
    assert summary["updates"] == 0 and not math.isnan(summary["cloning_loss"])
    assert summary["held_out_loss"] is not None and Path(summary["report"]).is_file()
    assert summary["checkpoint"] == "clone/checkpoints/step_000000"
    if video:
        assert Path(summary["video"]).stat().st_size > 0
    else:
        assert summary["video"] is None
    (row,) = map(json.loads, Path("clone/metrics.jsonl").read_text().splitlines())
    assert (row["update"], row["eval/success"]) == (0, summary["final_success"])
    saved = checkpoint.open_checkpoint("clone")
    assert saved.update == 0 and saved.manifest["score"] == summary["final_return"]
    assert Path("clone/checkpoints/best").resolve() == saved.path
    stored = yaml.safe_load(Path("clone/config.yaml").read_text())
    assert (stored["updates"], stored["env_steps"]) == (None, 250000)  # of the experiment, for PPO

    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    evaluation = ["checkpoint=clone", "episodes=4", "num_envs=4", "video=false"]
    measured, err = run(capsys, "evaluate", *evaluation)
    assert [line for line in err.splitlines() if "left" in line][-1] == "episodes 4/4  0 s left"
    assert measured["eval/return"] == summary["final_return"]
    assert Path("clone/reports/step_000000-4x0").is_dir()

    # The losses are cached with the weights.
    cached, err = run(capsys, "clone", *options, "run_dir=cached")
    assert "cloning: taken from" in err and equal(weights("cached"), weights("clone"))
    assert cached["cloning_loss"] == summary["cloning_loss"]
    assert cached["held_out_loss"] == summary["held_out_loss"]

    resume = ["resume=clone", "evaluation.video_episodes=0"]
    _, err = run(capsys, "train", *resume, "run_dir=ppo", "updates=2")
    assert "cloning" not in err and "updates 1 to 2" in err
    trained, _ = run(capsys, "train", *options, "run_dir=train", "updates=2")
    assert trained["held_out_loss"] == summary["held_out_loss"]
    assert equal(weights("ppo"), weights("train")) and not equal(weights("ppo"), weights("clone"))
    _, err = run(capsys, "train", *resume, "updates=1")  # in place
    assert checkpoint.open_checkpoint("clone").update == 1

    _, err = run(capsys, "clone", *options, "run_dir=clone", code=2)
    message = "error: run_dir=clone: already contains a run; name another, or continue with PPO"
    assert err.startswith(message)


@pytest.mark.slow
def test_a_data_set_of_another_rate_is_refused_or_resampled(capsys, monkeypatch) -> None:
    monkeypatch.setattr(run_plan, "can_estimate", lambda *_, **__: False)
    run(capsys, "demos", "out=source", "episodes=4", "env.image_size=16")
    demos = read("source")
    names = {"state": expert_recorder.STATE, "action": expert_recorder.ACTION}
    with Writer("d", fps=10, cameras={"front": (16, 16)}, **names) as writer:
        for i in range(4):
            rows = demos.episode == i
            images = {"front": demos.images["front"][rows].numpy()}
            state, action = demos.state[rows].numpy(), demos.action[rows].numpy()
            writer.add(images, state, action, demos.instructions[int(demos.instruction[rows][0])])
    frames = len(demos.state)
    options = ["experiment=tabletop_token", *SMALL]
    _, err = run(capsys, "clone", *options, code=2)
    assert "cloning.fps_mismatch=resample" in err and "10 actions per second" in err
    for mismatch, count in (("ignore", frames), ("resample", 2 * frames - 4)):
        _, err = run(capsys, "clone", *options, f"cloning.fps_mismatch={mismatch}")
        assert f"cloning: {count} frames of 4 demonstrations" in err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_clone_leaves_no_run(number: signal.Signals, capsys) -> None:
    run(capsys, "demos", "out=d", "episodes=4", "env.image_size=16")
    arguments = command("clone", *SMALL, "cloning.steps=1000000", "run_dir=run")
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("auxiliary loss: step 2"):
            break
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert err.splitlines()[-1] == "error: interrupted"
    assert not Path("run").exists()
