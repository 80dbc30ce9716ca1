"""``embodied-ppo replay``: the tensors of an update, checked against the metrics of the run."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from run_helpers import assert_refused, run_command

import embodied_ppo as ep
from embodied_ppo.commands import main
from tests.tools.test_reexecution import files, rows


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


def test_printed_table(run_dir, tmp_path, capsys):
    assert main.main(["replay", str(run_dir), "update=3", f"out={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    assert "advantage   [16, 8]\n" in out and "metrics are equal to the run" in out
    assert "executing updates 3 to 3" in err


def test_changed_run_is_reported(run_dir, tmp_path, capsys):
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
    (tmp_path / "update_000003.pt.new").symlink_to("/dev/full")
    with pytest.raises(ep.ConfigError, match="No space left"):
        replay.save(tmp_path)


def test_changed_options_of_a_checkpoint_are_refused(run_dir, tmp_path, capsys):
    copy, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run_dir, copy, symlinks=True)
    file = copy / "checkpoints/step_000004/config.yaml"
    file.write_text(file.read_text().replace("gamma: 0.98", "gamma: 0.5"))
    command = f"replay --quiet {copy} update=3 out={out}"
    assert_refused(capsys, command, "step_000004/config.yaml")
    assert not any(out.glob("*"))
    with pytest.raises(ep.CheckpointError):
        ep.fork(copy, update=2, progress=False)
    assert ep.replay(copy, update=2, progress=False).differences == []


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["update=0", "out=x"], "from 1 to 5"),
        (["update=6", "out=x"], "from 1 to 5"),
        (["out=x"], "update=N"),
        (["update=1"], "out=DIR"),
        (["update=-1", "out=x"], "update=-1"),
        (["update=1", "out={file}"], "out="),
        (["update=1", "out=/proc/x/y"], "out=/proc/x/y"),
        (["update=1", "out=x", "seed=1"], "seed=1"),
    ],
)
def test_bad_input_is_refused(run_dir, tmp_path, capsys, arguments, named):
    (tmp_path / "file").write_text("")
    arguments = [x.replace("{file}", str(tmp_path / "file")) for x in arguments]
    err = assert_refused(capsys, ["replay", str(run_dir), *arguments], named)
    assert "executing" not in err
