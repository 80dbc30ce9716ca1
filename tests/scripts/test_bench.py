"""Tests of the benchmark: time limits, stored figures, and parts with small sizes on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench
import bench_learning
import bench_models
import pytest
import torch
from run_helpers import processes_ended

CPU = torch.device("cpu")


class Lines(list[dict[str, Any]]):
    """Lines of a part."""

    @property
    def part(self) -> bench.Part:
        return bench.Part(self.append, tiny=True)

    @property
    def figures(self) -> dict[str, Any]:
        return {line["figure"]: line["value"] for line in self if "figure" in line}

    @property
    def failures(self) -> dict[str, str]:
        return {line["failure"]: line["message"] for line in self if "failure" in line}


@pytest.mark.slow
def test_time_limit_ends_a_part_with_its_children() -> None:
    """The grandchild is in a session of its own; lines before the limit arrive."""
    code = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    lines: list[str] = []
    reason = bench.run_part([sys.executable, "-c", code], 3.0, lines.append)
    assert reason == "not finished after 3 s"
    (pid,) = map(int, lines)
    assert processes_ended(pid)


def test_failed_part_reports_the_end_of_its_errors() -> None:
    command = [sys.executable, "-c", "raise SystemExit('the cause')"]
    assert bench.run_part(command, 60.0, print) == "the cause"
    assert bench.run_part([sys.executable, "-c", "pass"], 60.0, print) == ""


def test_figures_are_stored_before_a_part_fails(tmp_path, monkeypatch, capsys) -> None:
    """A part that fails leaves its figures in the file, and the next part runs."""
    script, out = tmp_path / "part.py", tmp_path / "out.json"
    script.write_text(
        "import sys\n"
        "print('a line of a library')\n"
        """print('{"figure": "decode_ms", "value": 2.5}')\n"""
        """print('{"failure": "step", "message": "no room"}', flush=True)\n"""
        "sys.exit('lost' if 'oft' in sys.argv else 0)\n"
    )
    monkeypatch.setattr(bench, "__file__", str(script))
    arguments = ["oft", "qwen", "--tiny", "--json", str(out)]
    assert bench.main(arguments) == 1
    oft, model = json.loads(out.read_text())
    assert oft["part"] == "oft" and oft["figures"] == {"decode_ms": 2.5}
    assert oft["failures"] == {"step": "no room", "oft": "lost"}
    assert model["failures"] == {"step": "no room"}
    assert oft["versions"]["torch"] == torch.__version__ and oft["tiny"] is True
    assert "| oft | decode_ms | 2.5 |" in capsys.readouterr().out
    bench.main(arguments)
    assert len(json.loads(out.read_text())) == 2, "the same part, device and commit: replaced"


def test_unknown_parts_are_refused(capsys) -> None:
    with pytest.raises(SystemExit):
        bench.main(["trian"])
    assert "trian" in capsys.readouterr().err


def test_failed_figure_is_named() -> None:
    lines = Lines()
    assert lines.part.attempt("step", lambda: 1 / 0) is None
    assert lines.part.attempt("other", lambda: 7) == 7
    assert lines == [{"failure": "step", "message": "ZeroDivisionError: division by zero"}]


@pytest.mark.slow
def test_options_of_the_gpu_parts_are_accepted() -> None:
    """They are used on a GPU only."""
    experiments = [bench.ROBOT, bench.LARGE_LANGUAGE]
    experiments += [[f"experiment={name}_gpu"] for name in bench.SIMULATIONS]
    for options in experiments:
        assert bench.run_command("config", *options, "updates=1")
    for placement in bench.PLACEMENTS.values():
        assert bench.run_command("config", *bench.ROBOT, *placement, "updates=1")


@pytest.mark.slow
def test_training_and_its_lower_bounds_are_measured() -> None:
    lines = Lines()
    bench.measure_train(lines.part)
    figures = lines.figures
    assert figures["bench_fast/total_us"] > figures["bench_fast/simulator_alone_us"] > 0
    assert figures["bench_fast/products_alone_us"] > 0
    bench.measure_simulation(lines.part, "ant")
    assert not lines.failures and lines.figures["environment_steps_per_s"] > 0


@pytest.mark.slow
def test_learning_protocol_is_resumable(tmp_path, monkeypatch, capsys) -> None:
    file, runs = tmp_path / "results.json", tmp_path / "runs"
    command = ["learning", "--tiny", "--results", str(file), "--runs", str(runs)]
    command += ["--tasks", "HalfCheetah-v4", "--steps", "128"]
    assert bench.main([*command, "--seeds", "1", "--set", "algorithm.lr=1e-3"]) == 0
    (row,) = json.loads(file.read_text())
    assert bench_learning.key_of(row) == ("default", "HalfCheetah-v4", 128, 0)
    assert row["env_steps"] == 128 and row["options"]["algorithm.lr"] == "1e-3"
    assert {"commit", "versions", "curve", "cpu_s"} <= row.keys()
    # It is not run again. One that was interrupted continues from its checkpoint.
    trained: list[tuple[str, ...]] = []
    original = bench.run_command

    def record(command: str, *options: str) -> dict[str, Any]:
        trained.append(options)
        return original(command, *options)

    monkeypatch.setattr(bench, "run_command", record)
    assert bench.main([*command, "--seeds", "1", "--set", "algorithm.lr=1e-3"]) == 0
    assert not trained
    file.unlink()
    assert bench.main([*command, "--seeds", "1", "--set", "algorithm.lr=1e-3"]) == 0
    run_dir = runs / "default" / "HalfCheetah-v4_128" / "0"
    assert len(trained) == 1 and {f"run_dir={run_dir}", "resume=auto"} <= {*trained[0]}
    assert len([*(run_dir / "checkpoints").glob("step_*")]) == 1
    assert json.loads(file.read_text())[0]["final_return"] == row["final_return"]
    # Another recipe needs another label; a failed run is reported, and the exit code is 1.
    with pytest.raises(SystemExit, match="choose another label"):
        bench.main([*command, "--seeds", "1"])
    wrong = ["--seeds", "1", "--label", "wrong", "--set", "algorithm.lr=-1"]
    assert bench.main([*command, *wrong]) == 1
    assert "algorithm.lr" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="choose of mujoco"):
        bench.main(["learning", "--tasks", "Cheetah"])


def test_tables_of_the_learning_protocol(capsys) -> None:
    tasks = {task.id: task for task in bench_learning.selected(["Hopper-v4", "playground"])}
    row = {"task": "Hopper-v4", "steps": 1000, "label": "a"}
    rows = [row | {"seed": i, "final_return": 2741.0 * x} for i, x in enumerate((0.5, 0.7, 1.2))]
    rows += [x | {"label": "b", "final_return": x["final_return"] + 2741.0} for x in rows]
    # A task without a reference has a row, and no score.
    rows.append(row | {"task": "Go1JoystickFlatTerrain-v1", "seed": 0, "final_return": 9.0})
    bench_learning.print_tables(rows, tasks)
    out = capsys.readouterr().out
    assert "| Hopper-v4 | 2741.0 | 1919 (1370 to 3289), 3 | 4660 (4112 to 6030), 3 |" in out
    assert "| Go1JoystickFlatTerrain-v1 | - | 9 (9 to 9), 1 | - |" in out
    # (.25·.5 + .7 + .25·1.2) / 1.5 = .75
    assert "| a | 1 | 0.750 | 0.500 to 1.200 |" in out and "| b | 1 | 1.750 |" in out
    assert "| 1.000 |" in out
    assert [len(bench_learning.GROUPS[x]) for x in bench_learning.GROUPS] == [6, 12, 3]


@pytest.mark.slow
def test_generation_and_small_models_are_measured() -> None:
    lines = Lines()
    bench_models.measure_generation(lines.part, rounds=1)
    bench_models.measure_small_vla(lines.part, rounds=1)
    assert len(lines.figures) == 2 + 2 * 4 and min(lines.figures.values()) > 0


def test_peaks_are_those_of_the_gpu(monkeypatch) -> None:
    gpu = torch.device("cuda", 0)
    for name, peak in (("NVIDIA H200", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Tesla T4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert bench.peak_flops(gpu) == peak
    assert bench.peak_flops(CPU) is None


def test_scripts_run_in_a_checkout_without_installation(tmp_path) -> None:
    """-S leaves out site-packages, and with it the installation."""
    scripts = Path(bench.__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(scripts)!r}); import bench, importlib.util as u;"
        " print(u.find_spec('embodied_ppo').origin, u.find_spec('embodied_envs').origin)"
    )
    root = scripts.parent
    paths = [root / "embodied_ppo/__init__.py", root / "envs/embodied_envs/__init__.py"]
    for folders in ("", str(root)):
        env = os.environ | {"PYTHONPATH": folders}
        command = [sys.executable, "-S", "-c", code]
        process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert process.stdout.split() == list(map(str, paths)), process.stderr
