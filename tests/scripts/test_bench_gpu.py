"""Tests of the GPU benchmark without a GPU: time limits, stored figures and small runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import bench_gpu
import bench_gpu_language as language
import bench_gpu_simulation as simulation
import benchmark
import pytest
import torch
from run_helpers import processes_ended

CPU = torch.device("cpu")


class Lines(list[dict[str, Any]]):
    """Lines of a ``benchmark.Report``."""

    @property
    def report(self) -> benchmark.Report:
        return benchmark.Report(self.append)

    @property
    def figures(self) -> dict[str, Any]:
        return {line["figure"]: line["value"] for line in self if "figure" in line}

    @property
    def failures(self) -> dict[str, str]:
        return {line["failure"]: line["message"] for line in self if "failure" in line}


# ------------------------------------------------------------------------------------------- parts
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
    reason = benchmark.run_part([sys.executable, "-c", code], 3.0, lines.append)
    assert reason == "not finished after 3 s"
    (pid,) = map(int, lines)
    assert processes_ended(pid)


def test_failed_part_reports_the_end_of_its_errors() -> None:
    command = [sys.executable, "-c", "raise SystemExit('the cause')"]
    assert benchmark.run_part(command, 60.0, print) == "the cause"
    assert benchmark.run_part([sys.executable, "-c", "pass"], 60.0, print) == ""
    command = [sys.executable, "-c", "import os; os._exit(7)"]
    assert benchmark.run_part(command, 60.0, print) == "exit status 7"


def test_figures_are_stored_before_a_part_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part that fails leaves its figures in the file, and the next part runs."""
    script, out = tmp_path / "part.py", tmp_path / "out.json"
    script.write_text(
        "import sys\n"
        "print('a line of a library')\n"
        """print('{"figure": "decode_ms", "value": 2.5}')\n"""
        """print('{"failure": "step", "message": "no room"}', flush=True)\n"""
        "sys.exit('lost' if 'oft' in sys.argv else 0)\n"
    )
    monkeypatch.setattr(bench_gpu, "__file__", str(script))
    monkeypatch.setattr(bench_gpu, "device_name", lambda: "cpu")
    arguments = ["--tiny", "--json", str(out), "--commit", "abc", "--part", "oft", "language"]
    assert bench_gpu.main(arguments) == 1
    model, oft = json.loads(out.read_text())
    assert oft["part"] == "oft" and oft["figures"] == {"decode_ms": 2.5}
    assert oft["failures"] == {"step": "no room", "oft": "lost"}
    assert model["failures"] == {"step": "no room"} and model["status"] == "failed"
    assert oft["commit"] == "abc" and oft["versions"]["torch"] == torch.__version__
    assert oft["device"] and oft["date"].startswith("20") and oft["tiny"] is True
    printed = capsys.readouterr().out
    assert "| oft | decode_ms | 2.5 |" in printed and "0 of 2 parts complete" in printed
    bench_gpu.main(arguments)
    assert len(json.loads(out.read_text())) == 2, "the same part, device and commit: replaced"


def test_failed_figure_is_named() -> None:
    lines = Lines()
    assert lines.report.attempt("step", lambda: 1 / 0) is None
    assert lines.report.attempt("other", lambda: 7) == 7
    assert lines == [{"failure": "step", "message": "ZeroDivisionError: division by zero"}]


@pytest.mark.slow
def test_options_of_all_parts_are_accepted() -> None:
    """They are read on the GPU only."""
    for placement in bench_gpu.PLACEMENTS.values():
        for experiment in bench_gpu.EXPERIMENTS.values():
            simulation.read_config([*experiment, *placement])
    for options in (*simulation.PICTURES.values(), *bench_gpu.SETTINGS.values()):
        simulation.read_config(options)
    for part in bench_gpu.SIMULATIONS:
        config = simulation.read_config(simulation.EXPERIMENTS[part])
        assert config.env.num_envs >= 4096 and config.env.action_chunk == 1, part


# ---------------------------------------------------------------------------------------- figures
def test_physics_repeats_the_rollout_of_the_policy(tmp_path: Path) -> None:
    """The repeated physics ends in the same state, after the same resets: bit for bit on a CPU."""
    config = simulation.read_config([*simulation.EXPERIMENTS["ant"], *simulation.TINY])
    with ExitStack() as stack:
        system = simulation.build(config, CPU, tmp_path, stack)
        simulation.train(system, 8, simulation.WARM_UP + 1, CPU)
        record, actions = simulation.record_rollout(system, 8, update=4)
        physics = record.env.physics
        end = {name: physics.fields[name].clone() for name in ("qpos", "qvel")}
        assert len(record.controls) == len(actions) == 8
        assert sum(int(x.sum()) for x in record.ended) >= 4, "episodes of at most 5 steps"
        physics.load_state(record.start["physics"])
        assert not torch.equal(physics.fields["qpos"], end["qpos"])
        simulation.PhysicsReplay(record).run()
        for name, x in end.items():
            assert torch.equal(physics.fields[name], x), name
        assert not isinstance(system.rollout.env, simulation.Recorder)  # pyright: ignore


def test_pictures_of_all_worlds_are_measured() -> None:
    lines, options = Lines(), [*simulation.PICTURES["tabletop"], *simulation.TINY]
    env = simulation.read_config([*options, "env.image_size=16"]).env
    simulation.measure_pictures(lines.report, env, CPU)
    assert lines.failures == {} and lines.figures["pictures_per_s"] > 0


def test_language_part_measures_float32_weights() -> None:
    """bfloat16 products; the responses have their full length, which ``ppo_step`` asserts."""
    lines = Lines()
    assert {p.dtype for p in language.TINY.model(CPU).parameters()} == {torch.float32}
    language.measure(lines.report, language.TINY, CPU)
    assert lines.failures == {}
    phases = ("generate_s", "values_log_probs_advantages_s", "critic_s", "actor_s")
    figures = lines.figures
    assert figures["ppo_step_s"] == pytest.approx(sum(figures[name] for name in phases))
    assert {"decode_step_graph_ms", "decode_step_eager_ms", "forward_backward_ms"} <= {*figures}
    # 64 tokens hold three rows of 5 + 12 tokens.
    assert figures["forward_backward_tokens"] == 3 * 17


def test_operations_of_the_language_model() -> None:
    """One layer of hidden size 4: 6 · (weights · 10 + vocabulary · 4 · 6 + (6² + 4²) · 4)."""
    shape = language.Shape(4, 1, 2, 1, 8, 32)
    decoder = language.LanguagePolicy(shape.model(CPU)).decoder.module
    weights = sum(p.numel() for p in decoder.layers.parameters())
    flops = shape.flops(decoder, torch.tensor([6, 4]), torch.tensor([4, 2]))
    assert flops == 6 * (weights * 10 + 32 * 4 * 6 + (36 + 16) * 4)


def test_peaks_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    for name, peak in (
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("Tesla T4", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert benchmark.peak_flops(gpu) == peak
    assert benchmark.peak_flops(CPU) is None


def test_scripts_run_in_a_checkout_without_installation(tmp_path: Path) -> None:
    """-S leaves out site-packages, and with it the installation."""
    scripts = Path(bench_gpu.__file__).parent
    code = (
        f"import sys; sys.path.insert(0, {str(scripts)!r}); import benchmark, importlib.util as u;"
        " print(u.find_spec('embodied_ppo').origin, u.find_spec('embodied_envs').origin)"
    )
    root = scripts.parent
    paths = [root / "embodied_ppo/__init__.py", root / "envs/embodied_envs/__init__.py"]
    for folders in ("", str(root)):
        env = os.environ | {"PYTHONPATH": folders}
        process = subprocess.run(
            [sys.executable, "-S", "-c", code],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert process.stdout.split() == list(map(str, paths)), process.stderr
