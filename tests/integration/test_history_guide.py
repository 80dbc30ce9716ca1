"""Test of docs/history.md: its commands and its Python run in their order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from embodied_ppo.analysis.replay import Minibatch, Replay
from embodied_ppo.commands import main

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "history.md").read_text()


@pytest.mark.slow
def test_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(sh|python)\n(.*?)^```$", TEXT, re.M | re.S)
    assert [kind for kind, _ in blocks] == ["sh", "sh", "sh", "python"]
    small = ["evaluation.video_episodes=0", "evaluation.episodes=2", "compile=never"]
    more = {
        "train": [*small],
        "fork": ["updates=16"],
        "bisect": [],
    }
    for _, line in blocks[:3]:
        # Processors round differently: on another one the metric may stay below 1.65.
        command, *arguments = shlex.split(line.replace("> 1.65", "> 1.01"))[1:]
        assert main.main([command, *arguments, *more[command]]) == 0
    out, err = capsys.readouterr()
    progress = TEXT.partition("run_dir=runs/pole_low_lr\n```\n\n```\n")[2].partition("```")[0]
    assert len(progress.splitlines()) == 4
    for line in progress.splitlines():
        assert line.replace("to 24", "to 16") in err
    answer = TEXT.partition('"policy/ratio_max > 1.65"\n```\n\n```\n')[2].partition("```")[0]
    assert "first held in update" in out and "first minibatch: " in out
    for line in answer.splitlines()[3:5]:
        assert re.search(re.sub(r"(\\ )+", " +", re.escape(line)), out)

    code = compile(blocks[3][1], "docs/history.md", "exec")
    variables: dict[str, object] = {}
    exec(code, variables)
    printed = capsys.readouterr().out
    assert re.match(r"\d+ \d+ tensor\(", printed) and printed.endswith(" []\n")

    replay, minibatch = variables["replay"], variables["minibatch"]
    assert isinstance(replay, Replay) and isinstance(minibatch, Minibatch)
    listed = set(re.findall(r'\["(\w+)"\]', TEXT.partition("| entry |")[2].partition("\n\n")[0]))
    listed -= {"epoch", "index", "statistics", "log_ratio"}
    assert listed - {"obs", "weight", "ref_log_prob"} == {*replay.rollout} - {"obs"}
    path = replay.save(tmp_path / "replays")
    content = torch.load(path, weights_only=True)
    torch.testing.assert_close(content["minibatches"][11]["log_ratio"], minibatch.log_ratio)
