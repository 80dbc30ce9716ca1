"""Runs with damaged, hostile or foreign files are refused or repaired with one line."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hostile_files import WRITERS, put

from embodied_ppo.commands import main
from embodied_ppo.training import checkpoint

TINY = ("experiment=cartpole", "env.num_envs=2", "compile=never", "algorithm.horizon=16")
TINY += ("algorithm.global_batch_size=16", "env_steps=null", "eval_every=0", "--quiet")
TINY += ("evaluation.episodes=2", "evaluation.num_envs=2", "evaluation.video_episodes=0")
SAVED = (*TINY, "updates=4", "save_every=1", "keep_last=10")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a run with the checkpoints 1 to 4, which must not be changed."""
    run = tmp_path_factory.mktemp("hostile") / "run"
    assert main.main(["train", *SAVED, f"run_dir={run}"]) == 0
    return run


@pytest.fixture
def run(trained: Path, tmp_path) -> Path:
    """Return a copy of the run."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def contents(folder: Path) -> dict[str, str]:
    """Return path -> digest of a regular file, or kind."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else oct(path.lstat().st_mode)
        for path in folder.rglob("*")
    }


def refuse(capsys: pytest.CaptureFixture[str], arguments: Sequence[object]) -> str:
    """Run a command that finds a problem; return its last line."""
    capsys.readouterr()
    code = main.main([*map(str, arguments)])
    captured = capsys.readouterr()
    assert code in (1, 2) and "Traceback" not in captured.err, captured.err
    if code == 1:  # verify prints a table
        return captured.out
    line = captured.err.strip().splitlines()[-1]
    assert line.startswith("error: ") and len(line) <= 300, line
    return line


# ------------------------------------------------------------------------------------ hostile files
TOOLS = {
    "verify": ("verify", "{run}", "--updates", "0", "--quiet", "out={out}"),
    "fork": ("fork", "{run}", "update=2", "run_dir={out}", "--quiet"),
    "replay": ("replay", "{run}", "update=2", "out={out}", "--quiet"),
    "bisect": ("bisect", "{run}", "policy/approx_kl > 1e9", "--quiet"),
    "resume": ("train", "resume={run}", "updates=5", "--quiet"),
    "evaluate": ("evaluate", "checkpoint={run}", "episodes=2", "out={out}", "--quiet"),
}
# File -> tools that refuse it, whatever it contains.
READ = {
    "metrics.jsonl": ("verify", "replay", "bisect"),
    "checkpoints/step_000004/manifest.json": ("verify", "evaluate"),
    "checkpoints/step_000004/config.yaml": ("verify", "evaluate"),
    "checkpoints/step_000004/policy.pt": ("verify", "evaluate"),
    "summary.json": ("verify",),
    "parent.json": ("fork", "replay"),
    "config.yaml": ("verify", "resume"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_hostile_files_get_one_line(run: Path, tmp_path, name: str, capsys) -> None:
    intact = tmp_path / "intact"
    run.rename(intact)
    for kind in WRITERS:
        if kind == "missing" and name in ("summary.json", "parent.json"):
            continue
        if kind == "long name" and name == "parent.json":  # the parent does not exist any more
            continue
        for tool in READ[name]:
            shutil.copytree(intact, run, symlinks=True)
            put(run / name, kind)
            if tool in ("replay", "fork") and name == "metrics.jsonl":
                (run / "parent.json").write_text("{")
            before = contents(run) if kind != "3 GB" else {}
            out = tmp_path / "out"
            refuse(capsys, [x.format(run=run, out=out) for x in TOOLS[tool]])
            assert not before or contents(run) == before, (kind, tool)
            shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(run)


# ------------------------------------------------------------------------------ foreign checkpoints
def test_copies_under_other_numbers_are_skipped_and_kept(run: Path, capsys) -> None:
    folder = run / "checkpoints"
    shutil.copytree(folder / "step_000003", folder / "step_000009")
    copied = contents(folder / "step_000009")
    assert "contains update 3" in refuse(capsys, ["evaluate", f"checkpoint={run}"])
    assert main.main(["train", f"resume={run}", "updates=5", "keep_last=2"]) == 0
    assert "step_000009 contains update 3" in capsys.readouterr().err
    assert contents(folder / "damaged_step_000009") == copied
    assert [*checkpoint.steps(folder)][-2:] == [4, 5]


# ---------------------------------------------------------------------------------- temporary files
def test_temporary_files_of_killed_processes_are_removed(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / ".latest-99999999").symlink_to("step_000004")
    (folder / ".best-99999999").symlink_to("step_000004")
    for link in ("latest", "best"):  # loops of links are replaced, too
        (folder / link).unlink(missing_ok=True)
        (folder / link).symlink_to(link)
    (folder / ".writing-000005-99999999").mkdir()
    (folder / "step_000004" / "manifest.json.new").write_text("{")
    (run / "summary.json.new").write_text("{")
    assert main.main(["train", f"resume={run}", "updates=5", "--quiet"]) == 0
    left = [path for path in run.rglob("*") if path.name.startswith(".") or path.suffix == ".new"]
    assert not left


# ------------------------------------------------------------------------------------- directory
@pytest.mark.slow
def test_run_directory_that_is_removed_ends_the_run(tmp_path) -> None:
    command = [sys.executable, "-m", "embodied_ppo.commands.main", "train", *TINY, "save_every=0"]
    run = tmp_path / "run"
    process = subprocess.Popen(
        [*command, "updates=1000000", f"run_dir={run}"], stderr=subprocess.PIPE, text=True
    )
    try:
        while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
            assert process.poll() is None
        shutil.rmtree(run)
        _, err = process.communicate(timeout=60)
    finally:
        process.send_signal(signal.SIGKILL)
    assert process.returncode == 3 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ")
    assert not run.exists()
