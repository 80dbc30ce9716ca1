"""Tests of sweeps: folders, several runs at the same time, resuming, comparison of the methods."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from run_helpers import assert_refused

from embodied_ppo.commands import main, sweep
from embodied_ppo.options import compose, config_folders, sweeps
from embodied_ppo.options.schema import Config
from tests.commands.test_main import TINY as ONE_UPDATE

TINY = [*ONE_UPDATE, "updates=2", "save_every=1", "evaluation.episodes=2", "evaluation.num_envs=2"]
TINY.append("evaluation.video_episodes=0")
pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.mark.slow
def test_sweep_resumes_and_compares(capsys) -> None:
    options = [*TINY, "algorithm.lr=1e-2,1e-3", "name=mine"]
    assert main.main(["train", "--multirun", "--json", "--quiet", "--no-compare", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    jobs = sorted((json.loads(line) for line in lines), key=lambda job: job["job"])
    assert [job["options"] for job in jobs] == [{"algorithm.lr": v} for v in ("0.01", "0.001")]
    (folder,) = Path("runs/sweeps/mine").iterdir()
    names = ["lr-0.001", "lr-0.01"]
    assert sorted(p.name for p in folder.iterdir()) == [*names, "sweep.json"]
    for name in names:
        stored = yaml.safe_load((folder / name / "config.yaml").read_text())
        assert stored["algorithm"]["lr"] == float(name.removeprefix("lr-"))
    assert [p.name for p in Path.cwd().iterdir()] == ["runs"]

    # The first run is finished; the second was interrupted after its first update.
    last = folder / "lr-0.001" / "checkpoints" / "step_000002"
    weights = torch.load(last / "policy.pt")
    shutil.rmtree(last)
    (folder / "lr-0.001" / "summary.json").unlink()
    finished = (folder / "lr-0.01" / "summary.json").stat()
    moved = folder.rename("moved").absolute()
    assert main.main(["train", "--multirun", f"resume={moved}"]) == 0
    out = capsys.readouterr()
    assert f"{moved}: 1 of 2 runs, 1 at a time" in out.err
    assert re.search(r"steps_per_s .* \(2 of 2 runs\)", out.err)
    assert (moved / "lr-0.01" / "summary.json").stat() == finished
    again = torch.load(moved / "lr-0.001" / "checkpoints" / "step_000002" / "policy.pt")
    torch.testing.assert_close(again, weights, rtol=0, atol=0)
    columns = " +".join(f"final_return {name}" for name in ("mean", "std", "min", "max"))
    assert re.match(rf"method +runs +{columns}$", out.out.splitlines()[0])
    content = json.loads((moved / "comparison" / "comparison.json").read_text())
    # The first value that the user wrote is the baseline.
    assert [method["label"] for method in content["methods"]] == [
        f"algorithm.lr={value}" for value in ("0.01", "0.001")
    ]
    assert content["differences"][0]["verdict"] in out.out
    assert str(moved / "comparison" / "comparison.html") in out.out


def test_methods_of_a_sweep(capsys) -> None:
    def result(value: float | None, **options: str) -> dict[str, Any]:
        return {"options": options, "final_return": value, "final_success": None}

    sweep.print_methods(
        [result(1.0, lr="0.1", seed="0"), result(3.0, lr="0.1", seed="1"), result(None, lr="0.2")]
    )
    assert [line.split() for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["lr=0.1", "2", "2", "1.414", "1", "3"],  # the standard deviation of 1 and 3 is sqrt(2)
        ["lr=0.2", "1", "nan", "-", "nan", "nan"],
    ]
    loaded: Any = None
    job = sweeps.SweepJob(0, [], {}, Path("all/failed"), loaded)
    job.folder.mkdir(parents=True)
    (job.folder / "metrics.jsonl").touch()
    args = argparse.Namespace(quiet=False)
    sweep._compare(sweep.Sweep(Path("all").absolute(), Path(), [], [job]), args)
    assert "use compare: failed has not finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "3"),
        ({"algorithm.lr": "1e-3", "seed": "0"}, "lr-1e-3_seed-0"),
        ({"actor.lr": "0.1", "critic.lr": "0.2"}, "actor.lr-0.1_critic.lr-0.2"),
        (
            {"model.hidden": "[64,64]", "env.id": "my_module:MyTask-v0"},
            "hidden-64-64_id-my_module-MyTask-v0",
        ),
        ({"experiment": "../x/y"}, "experiment-..-x-y"),
        ({"description": "a b, 'c' $HOME é"}, "description-a-b-c-HOME"),
        ({"taken": "1"}, "taken-1-3"),
        ({"description": "x" * 500}, f"description-{'x' * 108}-3"),
    ],
)
def test_folder_of_a_job_is_named_after_the_options_that_differ(
    options: dict[str, str], name: str
) -> None:
    folder = sweeps.job_folder(Path("sweep"), options, 3, {Path("sweep/taken-1")})
    assert folder == Path("sweep") / name
    folders = config_folders.config_folders(
        argparse.Namespace(config_dir=None, config_name=None, command="train")
    )
    (override,) = compose.parse([f"resume={folder}"], folders)
    assert override.value() == str(folder), "a command line needs no quotes"


def test_jobs_without_an_experiment() -> None:
    """Hydra itself refuses experiment=null."""
    args = argparse.Namespace(config_dir=None, config_name=None, command="train")
    args.overrides = ["experiment=null", "env.id=CartPole-v1", "algorithm.lr=1e-2,1e-3"]
    _, jobs = sweeps.sweep_jobs(args)
    assert [job.loaded.config.env.id for job in jobs] == ["CartPole-v1"] * 2


@pytest.mark.slow
def test_sweep_continues_after_a_failed_job(capsys) -> None:
    flags = ["env.id=Nowhere-v1,CartPole-v1", "run_dir=runs/${env.id}"]
    assert main.main(["train", "-m", "--json", "--quiet", *TINY, *flags]) == 2
    out = capsys.readouterr()
    failure = r"^error: job 0 \(.*env.id=Nowhere-v1.*\) failed: .*Nowhere-v1 is unknown"
    assert re.search(failure, out.err, re.MULTILINE)
    assert json.loads(out.out)["job"] == 1
    assert Path("runs/CartPole-v1/summary.json").is_file() and not Path("runs/Nowhere-v1").exists()


@pytest.mark.slow
def test_interrupted_sweep_saves_its_runs() -> None:
    flags = [*TINY, "updates=100000", "save_every=0", "seed=0,1", "hydra.sweep.dir=sweep"]
    arguments = [sys.executable, "-m", "embodied_ppo.commands.main", "train", "-m", *flags]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, start_new_session=True)
    rows = [Path(f"sweep/seed-{seed}/metrics.jsonl") for seed in (0, 1)]
    rows = rows[: sweep._most_jobs(Config(device="cpu"))]  # those that run at the same time
    deadline = time.monotonic() + 240
    while not all(file.exists() and file.stat().st_size for file in rows):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
    _, err = process.communicate(timeout=240)
    assert process.returncode == 130
    hint = f"continue with embodied-ppo train --multirun resume={Path('sweep').absolute()}"
    assert err.splitlines()[-1] == f"interrupted; {hint}"
    for file in rows:
        update = json.loads(file.read_text().splitlines()[-1])["update"]
        assert (file.parent / "checkpoints" / f"step_{update:06d}").is_dir()


def test_number_of_runs_at_the_same_time(monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    config = Config(device="cpu")
    most = [
        sweep._most_jobs(replace(config, threads=threads, placement=placement))
        for threads, placement in ((1, "local"), (3, "local"), (16, "local"), (1, "fused"))
    ]
    assert most == [8, 2, 1, 1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices = ("auto", "cuda", "cuda:2", "cpu")
    assert [sweep._most_jobs(Config(device=name)) for name in devices] == [4, 4, 1, 8]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert sweep._cuda_devices(Config()) == ["3", "5"]
    seen: list[str | None] = []

    def ends(program: list[str], *, env: dict[str, str], **_: Any) -> argparse.Namespace:
        seen.append(env.get("CUDA_VISIBLE_DEVICES"))
        return argparse.Namespace(poll=lambda: 3)

    monkeypatch.setattr(subprocess, "Popen", ends)
    placements = [*TINY, "device=auto", "placement=local,fused", "hydra.sweep.dir=sweep"]
    assert main.main(["train", "-m", *placements]) == 3
    assert seen == ["3", "3,5"] and "2 of 2 runs, 1 at a time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "old/sweep.json is missing"),
        ("{", "sweep.json"),
        ('{"format": 1, "working_directory": ".", "flags": [], "runs": []}', "lists no run"),
    ],
)
def test_sweep_that_cannot_be_resumed(text: str | None, message: str, capsys) -> None:
    Path("old").mkdir()
    if text is not None:
        Path("old/sweep.json").write_text(text)
    assert_refused(capsys, ["train", "-m", "resume=old"], message)
    for folder, option in ("1", "run_dir=old/${seed}"), ("seed-1", "hydra.sweep.dir=old"):
        Path("old", folder).mkdir()
        Path("old", folder, "summary.json").write_text("{}")
        again = ["train", "-m", *TINY, "seed=0,1", option]
        assert_refused(capsys, again, f"old/{folder} already contains a run")
