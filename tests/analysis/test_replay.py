"""``embodied-ppo replay``: the tensors of an update, checked against the metrics of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from run_helpers import run_command

import embodied_ppo as ep
from embodied_ppo.commands import main
from tests.analysis.test_reexecution import TINY, files, rows


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 3 updates with the checkpoints 2 and 3."""
    folder = tmp_path_factory.mktemp("replay") / "run"
    return ep.train("cartpole", run_dir=folder, **{**TINY, "updates": 3}).run_dir


def test_tensors_explain_the_metrics(run_dir, tmp_path, capsys):
    before = files(run_dir)
    content = run_command(
        capsys, "replay", "--quiet", run_dir, "update=2", f"out={tmp_path / 'out'}"
    )
    assert files(run_dir) == before, "the run is only read"
    assert content["exact"] and content["differences"] == [] and content["minibatches"] == 4
    stored = torch.load(content["file"], weights_only=True)
    row, rollout = rows(run_dir)[2], stored["rollout"]
    assert {name: list(x.shape) for name, x in rollout.items()} == content["rollout"]
    assert rollout["obs"].shape == (16, 8, 4) and rollout["action"].shape[:2] == (16, 8)
    assert stored["metrics"]["value/loss"] == row["value/loss"]
    # The statistics of the minibatches are the metrics of the row.
    statistics = [m["statistics"] for m in stored["minibatches"]]
    kl = sum(s["approx_kl"] for s in statistics) / sum(s["count"] for s in statistics)
    assert kl == pytest.approx(row["policy/approx_kl"])
    assert max(s["ratio_max"] for s in statistics) == pytest.approx(row["policy/ratio_max"])
    # Before the first step the policy is the one that acted; later it is not.
    first, last = stored["minibatches"][0], stored["minibatches"][-1]
    assert first["log_ratio"].abs().max() < 1e-5 < last["log_ratio"].abs().max()
    assert last["log_ratio"].exp().max() == pytest.approx(last["statistics"]["ratio_max"])
    index = first["index"]
    torch.testing.assert_close(first["value"], rollout["value"].flatten()[index])
    assert [m["epoch"] for m in stored["minibatches"]] == [0, 0, 1, 1]
    # Advantages are normalised; returns are the advantages before it plus the values.
    advantage = rollout["advantage"][rollout["mask"]]
    assert abs(float(advantage.mean())) < 1e-6 and float(advantage.std()) == pytest.approx(1, 0.01)
    description = json.loads(Path(content["file"]).with_suffix(".json").read_text())
    assert description["rollout"]["obs"] == "float32 [16, 8, 4]"


def test_printed_table(run_dir, tmp_path, capsys):
    assert main.main(["replay", str(run_dir), "update=3", f"out={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    assert "advantage   [16, 8]\n" in out and "metrics are equal to the run" in out
    assert "executing updates 3 to 3" in err


def test_changed_run_is_reported(run_dir, tmp_path, capsys):
    import shutil

    shutil.copytree(run_dir, tmp_path / "run", symlinks=True)
    file = tmp_path / "run/metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[3]["value/loss"] += 1e-6
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    replay = ep.replay(tmp_path / "run", update=3)
    assert replay.differences == ["update 3: value/loss"]
    assert (
        "1 metrics differ from those of the run (update 3: value/loss)" in capsys.readouterr().err
    )
    assert replay.position(9) == (1, 1) and replay.num_envs == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["{run}", "update=0", "out=x"],
            "update=0: {run} has completed 3 updates; name one from 1",
        ),
        (
            ["{run}", "update=4", "out=x"],
            "update=4: {run} has completed 3 updates; name one from 1",
        ),
        (["{run}", "out=x"], "no update; write embodied-ppo replay RUN update=N"),
        (["{run}", "update=1"], "no out; write out=DIR"),
        (["{run}", "update=-1", "out=x"], "update=-1: is not a whole number from 0"),
        (["{run}", "update=1", "out={file}"], "is a file; name a directory"),
        (["{run}", "update=1", "out=/proc/x/y"], "cannot be written (No such file or directory)"),
        (["{run}", "update=1", "out=x", "seed=1"], "seed=1: is not read by replay"),
    ],
)
def test_bad_input_is_refused(run_dir, tmp_path, capsys, arguments, message):
    def fill(text: str) -> str:
        return text.replace("{run}", str(run_dir)).replace("{file}", str(tmp_path / "file"))

    (tmp_path / "file").write_text("")
    assert main.main(["replay", *map(fill, arguments)]) == 2
    err = capsys.readouterr().err
    assert fill(message) in err and "executing" not in err
