"""`embodied-ppo benchmark`: stages, the table, ranks, the page, and results of other trainers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from embodied_envs import tabletop_bench as protocol
from embodied_envs.base.errors import TrainingError
from embodied_ppo.commands import main
from embodied_ppo.evaluation import benchmark_page
from embodied_ppo.options.schema import BenchmarkConfig, BenchmarkMethod
from embodied_ppo.tools import benchmark_table
from embodied_ppo.training import run_directory
from embodied_ppo.training.progress import Progress


def result(method: str, seed: int, successes: int, episodes: int = 256) -> dict[str, Any]:
    counts = {"episodes": episodes, "successes": successes}
    measured = {name: dict(counts) for name in protocol.MEASUREMENTS}
    curve = [(0, 0.1), (1000, 0.5)]
    return protocol.result(method, measured, seed=seed, env_steps=1000, curve=curve)


def test_every_method_has_its_stages() -> None:
    assert tuple(benchmark_table.METHODS) == get_args(BenchmarkMethod)
    assert benchmark_table.stages_of("grpo") == ["demos", "clone_token", "grpo"]


class Recorded(benchmark_table.Stage):
    """A stage whose process notes when it starts and ends.

    Stage clone_token ends once that of the other seed has started.
    """

    def other(self, name: str) -> Recorded:
        return Recorded(self.out, name, self.seed, trial=self.trial)

    def command(self) -> list[str]:
        code = (
            "import sys, time, pathlib\n"
            "marker, name, other, notes = sys.argv[1:]\n"
            "note = lambda x: open(notes, 'a').write(f'{x} {name}\\n')\n"
            "note('start')\n"
            "if 'flow' in name: sys.exit('error: no flow')\n"
            "end = time.monotonic() + 60\n"
            "while other and time.monotonic() < end:\n"
            "    if f'start {other}\\n' in pathlib.Path(notes).read_text(): break\n"
            "    time.sleep(0.01)\n"
            "note('end')\n"
            "pathlib.Path(marker).write_text('{\"cpu_s\": 0.1}')\n"
        )
        name = f"{self.name}-{self.seed}"
        other = f"{self.name}-{1 - self.seed}" if self.name == "clone_token" else ""
        return [sys.executable, "-c", code, str(self.marker), name, other, str(self.out / "notes")]


@pytest.mark.slow
def test_stages_run_in_order(tmp_path: Path) -> None:
    """Two jobs: no stage starts before those it requires; seeds share the demonstrations."""
    seeds, jobs = 2, 2
    wanted = [
        Recorded(tmp_path, method, seed, trial=True)
        for seed in range(seeds)
        for method in ("clone", "grpo")
    ]
    order = benchmark_table._in_order(wanted)
    assert [s.name for s in order].count("demos") == 1 and len(order) == 1 + 2 * 3
    benchmark_table._run_all(order, jobs, Progress(quiet=True))
    events = [line.split() for line in (tmp_path / "notes").read_text().splitlines()]
    position = {(event, name): i for i, (event, name) in enumerate(events)}
    assert position["end", "demos-0"] < position["start", "clone_token-1"]
    for seed in range(seeds):
        assert position["end", f"clone_token-{seed}"] < position["start", f"grpo-{seed}"]
    running, most = 0, 0
    for event, _ in events:
        running += 1 if event == "start" else -1
        most = max(most, running)
    assert most == jobs
    for stage in wanted:
        protocol.write_result(stage.result, {})
    assert benchmark_table._in_order(wanted) == []  # the same command has nothing left to do
    with pytest.raises(TrainingError, match=r"clone_flow, seed 0 failed \(error: no flow\); see"):
        benchmark_table._run_all(
            benchmark_table._in_order([Recorded(tmp_path, "ppo_flow", 0, trial=True)]),
            jobs,
            Progress(quiet=True),
        )


def test_table_and_page() -> None:
    results = [result(m, s, n) for s in (0, 1) for m, n in (("a", 200), ("b<", 64), ("c", 32))]
    summary = benchmark_page.summarize(results, protocol)
    assert summary["scores"]["b<"] == 0.25
    assert summary["table"][2][:4] == ["b<", "2", ".250 (.250 to .250)", ".250 (.250 to .250)"]
    page = benchmark_page.render(results, summary, protocol, False)
    assert "b&lt;" in page and "<svg" in page and "k3" in page
    assert page.count("<script") == 0 and ".781" in page


@pytest.mark.slow
def test_trial_writes_table_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two methods of our own and the result of another trainer; the second call trains nothing.

    The stages run in this process, which saves the start of four others.
    """
    ran: list[str] = []

    def run_all(stages: list[benchmark_table.Stage], jobs: int, progress: Progress) -> None:
        ran.extend(stage.name for stage in stages)
        for stage in stages:
            stage.marker.parent.mkdir(parents=True, exist_ok=True)
            stage.run()

    monkeypatch.setattr(benchmark_table, "_run_all", run_all)
    other = tmp_path / "other.json"
    protocol.write_result(other, result("other trainer", 0, 1, episodes=2))
    out = tmp_path / "bench"
    arguments = [f"out={out}", "methods=[clone,grpo]", f"results=[{other}]", "trial=true"]
    assert main.main(["benchmark", "--quiet", "--json", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = {row[0]: row for row in summary["table"]}
    assert list(rows) == ["method", "clone", "grpo", "other trainer"]
    assert rows["other trainer"][2] == ".500"
    content = protocol.read_result(out / "results" / "grpo-0.json", episodes=2)
    assert content["env_steps"] > 0 and content["notes"]["trial"] and content["cpu_s"] > 0
    page = Path(summary["page"]).read_text()
    assert "other trainer" in page
    assert main.main(["benchmark", "--quiet", "--json", *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert ran == ["demos", "clone_token", "clone", "grpo"]
    # Without its result a method is measured again; a damaged marker is as none.
    stages = [benchmark_table.Stage(out, name, 0, trial=True) for name in ("clone", "grpo")]
    assert benchmark_table._in_order(stages) == []
    stages[0].result.unlink()
    assert [s.name for s in benchmark_table._in_order(stages)] == ["clone"]
    stages[1].marker.write_text("[]")
    assert [s.name for s in benchmark_table._in_order(stages)] == ["clone", "grpo"]
    with run_directory.locked(out):  # by another process
        assert main.main(["benchmark", *arguments]) == 2
    assert f"out={out}: pid" in capsys.readouterr().err
    # Neither a complete benchmark in this folder nor a result of a trial is accepted.
    assert main.main(["benchmark", f"out={out}", "methods=[clone]"]) == 2
    assert "holds a benchmark with" in capsys.readouterr().err
    assert main.main(["benchmark", f"out={tmp_path}", f"results=[{other}]", "methods=[]"]) == 2
    assert "the protocol needs at least 256" in capsys.readouterr().err


@pytest.mark.slow
def test_options_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for arguments, message in (
        (["methods=[clone]"], "out = '' must name a directory"),
        ([f"out={tmp_path}/file"], "is a file; name a directory"),
        (["out=x", "methods=[ppo]"], "methods"),
        (["out=x", "methods=[clone,clone]"], "must not contain a name twice"),
        (["out=x", "methods=[]"], "nothing would be shown"),
        (["out=x", "jobs=0"], "jobs = 0"),
    ):
        assert main.main(["benchmark", *arguments]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "deep.json").write_text("[" * 100_000)
    protocol.write_result(tmp_path / "mine.json", result("clone", 0, 9))
    protocol.write_result(tmp_path / "same.json", result("clone", 0, 9))
    for results, message in (
        ("methods=[] results=[deep.json]", "cannot be read (no JSON)"),
        ("methods=[] results=[mine.json,same.json]", "'clone' with seed 0, as mine.json has"),
        ("methods=[clone] results=[mine.json]", "'clone' with seed 0, as methods=clone has"),
    ):
        assert main.main(["benchmark", "out=x", *results.split()]) == 2
        assert message in capsys.readouterr().err
    assert main.main(["benchmark", "x"]) == 2
    assert "write out=x" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
    assert BenchmarkConfig().methods == get_args(BenchmarkMethod)


def test_folder_of_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    assert main.main(["benchmark", f"out={tmp_path}", "trial=true", "--quiet"]) == 2
    assert "name a new or empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
