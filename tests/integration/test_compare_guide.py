"""Test of docs/compare.md: its commands run in their order, and print what the page describes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from run_helpers import page_commands, run_block

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "compare.md").read_text()


@pytest.mark.slow
def test_blocks_run(tmp_path: Path) -> None:
    env = page_commands(tmp_path, ROOT)
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.M | re.S)
    assert len(blocks) == 2
    output = ""
    for script in blocks:
        script = script.replace("env_steps=16384", "env_steps=2048 evaluation.episodes=2")
        script = script.replace("seed=0,1,2", "seed=0").replace("seed=3,4,5", "seed=3")
        script = script.replace("compare runs/sweeps/rate", "compare runs/sweeps/rate episodes=5")
        output += run_block(script, tmp_path, env)
    for head in re.findall(r"^(?:method|difference) .*$", TEXT, re.M):
        assert re.search(
            r"^" + r" +".join(re.split(r" {2,}", re.escape(head).replace(r"\ ", " "))), output, re.M
        )
    content = json.loads((tmp_path / "lr_1e-3/comparison.json").read_text())
    assert [len(method["runs"]) for method in content["methods"]] == [2, 2]
    assert content["differences"][0]["verdict"] in output
    assert "page: lr_1e-3/comparison.html" in output
