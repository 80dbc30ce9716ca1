"""Runs with a read-only disk, a second process, or a clock that jumps lose nothing.

Kills and damaged checkpoints are in integration/test_resume.py, full disks in
drills/test_long_runs.py, lost processes in drills/test_placement_failures.py.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_helpers import metric_rows, run_process

from embodied_ppo.commands import main
from embodied_ppo.programs import runs
from embodied_ppo.training import checkpoint
from tests.integration.test_resume import OVERRIDES, rows, start, tiny, wait_for


def command(*options: str) -> list[str]:
    """Return a train command."""
    return [sys.executable, "-m", "embodied_ppo.commands.main", "train", *options]


UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")
namespaces = subprocess.run([*UNSHARE, "true"], capture_output=True)
needs_namespaces = pytest.mark.skipif(
    namespaces.returncode != 0,
    reason="a separate file system needs user namespaces (unshare --user --mount)",
)


@pytest.mark.slow
@needs_namespaces
def test_read_only_disk_is_refused_before_training(tmp_path) -> None:
    (tmp_path / "disk").mkdir()
    inside = 'mount -t tmpfs -o ro tmpfs "$1" && shift && exec "$@"'
    train = command(*OVERRIDES, f"run_dir={tmp_path / 'disk' / 'run'}")
    shell = [*UNSHARE, "sh", "-c", inside, "sh", str(tmp_path / "disk")]
    done = subprocess.run([*shell, *train], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert (
        done.stderr.strip().splitlines()[-1].endswith("cannot be written (Read-only file system)")
    )


@pytest.mark.slow
def test_second_process_in_a_run_directory_is_refused(tmp_path, capsys) -> None:
    process = start(tmp_path / "run")
    wait_for(tmp_path / "run" / "checkpoints" / "latest", process)
    train = ["train", *OVERRIDES, f"run_dir={tmp_path / 'run'}", "resume=auto"]
    code = main.main(train)
    process.kill()
    process.communicate()
    assert code == 2
    assert re.search(
        rf"run: pid {process.pid} on \S+ is training in it; wait, or name another",
        capsys.readouterr().err,
    )
    # The lock of a process that has ended is free.
    main.main([*train, "updates=3"])
    assert "is training in it" not in capsys.readouterr().err


JUMPING = """
import itertools, sys, time
real, count = time.time, itertools.count()
time.time = lambda: real() + (3600.0 if next(count) % 2 else -7200.0)
from embodied_ppo.commands import main
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_clock_that_jumps_does_not_change_training(tmp_path) -> None:
    options = [*OVERRIDES, "updates=4", f"run_dir={tmp_path / 'jumping'}"]
    run_process(sys.executable, "-c", JUMPING, "train", *options)
    rows_of_run = metric_rows(tmp_path / "jumping")
    measured: list[Any] = [
        x for row in rows_of_run for tag, x in row.items() if tag.startswith(("time/", "speed/"))
    ]
    assert measured and all(x >= 0 for x in measured)
    assert main.main(["train", *options[:-1], f"run_dir={tmp_path / 'steady'}"]) == 0
    assert rows(tmp_path / "jumping") == rows(tmp_path / "steady")


def test_checkpoint_stays_valid_where_its_score_cannot_be_written(tmp_path, monkeypatch) -> None:
    runs.train(tiny(tmp_path / "run"), quiet=True)
    step = checkpoint.find(tmp_path / "run")
    before = (step / checkpoint.MANIFEST).read_text()

    def full(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(checkpoint.CheckpointError, match=r"the score of .* cannot be written"):
        checkpoint.set_score(step, 1.0)
    assert (step / checkpoint.MANIFEST).read_text() == before
    assert sorted(p.name for p in step.iterdir()) == sorted(
        [checkpoint.MANIFEST, checkpoint.CONFIG, checkpoint.POLICY, checkpoint.TRAINING]
    )
    checkpoint.open_checkpoint(step)


@pytest.mark.slow
def test_moved_run_directory_resumes(tmp_path) -> None:
    runs.train(tiny(tmp_path / "run", updates=4), quiet=True)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere")
    runs.train(
        tiny(tmp_path / "elsewhere", resume=str(tmp_path / "elsewhere"), updates=5), quiet=True
    )
    assert rows(tmp_path / "elsewhere")[-1]["update"] == 5
