"""``embodied-ppo fork``: branches equal the run bit for bit, or train with changed options."""

from __future__ import annotations

import json
import shutil

import pytest
from run_helpers import run_command

import embodied_ppo as ep
from embodied_ppo.commands import main
from embodied_ppo.options.schema import Config
from embodied_ppo.training.run_directory import locate
from embodied_ppo.training.run_files import read_parent
from tests.integration.test_resume import assert_same, contents, rows
from tests.programs.test_language import TINY as LANGUAGE
from tests.programs.test_language import few_problems  # noqa: F401
from tests.tools.test_reexecution import files


@pytest.mark.slow
@pytest.mark.parametrize("update", [2, 3])
def test_branch_without_a_change_equals_the_run(run_dir, tmp_path, capsys, update):
    before = files(run_dir)
    branch = tmp_path / "branch"
    summary = run_command(capsys, "fork", run_dir, f"update={update}", f"run_dir={branch}")
    assert files(run_dir) == before, "the run is only read"
    assert summary["updates"] == 5 and summary["run_dir"] == str(branch)
    assert_same(contents(branch, 5), contents(run_dir, 5))
    assert rows(branch) == rows(run_dir)[update + 1 :]
    parent = read_parent(branch)
    assert parent is not None and parent.path(branch) == run_dir
    assert parent.update == update and parent.options == {}


def test_branch_at_update_0_equals_the_run_and_has_the_default_name(run_dir, tmp_path, monkeypatch):
    shutil.copytree(run_dir, tmp_path / "run", symlinks=True)
    branch = ep.fork(tmp_path / "run", update=0, progress=False)
    assert branch.run_dir == tmp_path / "run-fork-0"
    assert_same(contents(branch.run_dir, 5), contents(run_dir, 5))
    assert rows(branch.run_dir) == rows(run_dir)
    # The link survives when both folders are moved together.
    (tmp_path / "moved").mkdir()
    for name in ("run", "run-fork-0"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    parent = read_parent(tmp_path / "moved/run-fork-0")
    assert parent is not None
    assert parent.path(tmp_path / "moved/run-fork-0") == tmp_path / "moved/run"
    # resume=auto with seed 3 takes no branch at update 3 for a run.
    for name in ("0_0.000-3", "0_0.001-0-fork-3"):
        (tmp_path / "runs/custom" / name / "checkpoints/step_000001").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate(Config(resume="auto", seed=3), print)[0].name == "0_0.000-3"


@pytest.mark.slow
def test_changed_options_and_their_record(run_dir, tmp_path, capsys):
    branch = tmp_path / "branch"
    options = ["update=4", "algorithm.lr=1e-2", f"run_dir={branch}"]
    assert main.main(["fork", str(run_dir), *options]) == 0
    assert "resume: algorithm.lr was 0.001, is 0.01" in capsys.readouterr().err
    parent = json.loads((branch / "parent.json").read_text())
    assert parent["options"] == {"algorithm.lr": [0.001, 0.01]} and parent["run"] == str(run_dir)
    assert rows(branch)[0]["policy/lr"] == pytest.approx(10 * rows(run_dir)[5]["policy/lr"])
    again = ep.train(resume=branch, updates=6, progress=False)
    assert again.summary["updates"] == 6 and read_parent(branch) is not None


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "fork RUN"),
        (["{run}"], "update=N"),
        (["{run}", "{run}", "update=1"], "2 runs"),
        (["{run}", "update=two"], "update=two"),
        (["{run}", "update=-1"], "update=-1"),
        (["{run}", "update=6"], "from 0 to 5"),
        (["{run}", "update=5"], "updates=105"),
        (["{run}", "update=2", "algoritm.lr=1"], "algoritm.lr"),
        (["{run}", "update=2", "seed=3"], "seed=3"),
        (["{run}", "update=3", "env.num_envs=16"], "env.num_envs=16"),
        (["{run}", "update=2", "resume=x"], "resume"),
        (["{run}", "update=2", "experiment=hopper"], "experiment"),
        (["{run}", "update=2", "run_dir={run}"], "run_dir"),
        (["{run}-no", "update=2"], "does not exist"),
        (["{run}/checkpoints/step_000002", "update=2"], "name its run, "),
    ],
)
def test_bad_input_is_refused(run_dir, capsys, arguments, named):
    before = files(run_dir)
    assert main.main(["fork", *(x.replace("{run}", str(run_dir)) for x in arguments)]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ") and named in last
    assert files(run_dir) == before and not list(run_dir.parent.glob("run-fork-*"))


@pytest.mark.slow
def test_branch_of_a_language_model_equals_its_run(tmp_path, capsys):
    options = [*(x for x in LANGUAGE if not x.startswith("updates")), "updates=3", "save_every=2"]
    run_command(capsys, "train", *options, f"run_dir={tmp_path / 'run'}")
    branch = tmp_path / "branch"
    run_command(capsys, "fork", tmp_path / "run", "update=1", f"run_dir={branch}")
    assert_same(contents(branch, 3), contents(tmp_path / "run", 3))
    assert rows(branch) == rows(tmp_path / "run")[2:]
    replay = ep.replay(tmp_path / "run", update=2, progress=False)
    assert replay.differences == [] and replay.minibatch_unit == "column"
    tokens, columns = replay.rollout["reward"].shape
    assert columns == 8 and replay.minibatches[0].log_ratio is not None
    assert replay.minibatches[0].log_ratio.shape == (tokens, len(replay.minibatches[0].index))
