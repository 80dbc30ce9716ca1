"""Test of docs/verify.md: its commands run in their order, and print what the page describes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from embodied_ppo.commands import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "verify.md").read_text()


def run_commands(block: str) -> int:
    """Run the commands of a block in this process; return the last exit code."""
    program = re.search(r"^python - <<'END'\n(.*?)^END\n", block, re.M | re.S)
    if program is not None:
        exec(program[1], {})
        block = block.replace(program[0], "")
    code = 0
    for line in block.replace("\\\n", "").splitlines():
        name, *arguments = shlex.split(line.partition("||")[0])
        assert name == "embodied-ppo"
        code = main.main([*arguments, "--quiet"])
    return code


@pytest.mark.slow
def test_blocks_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.M | re.S)
    printed = re.findall(r"^```\n(check .*?)^```$", TEXT, re.M | re.S)
    assert len(blocks) == len(printed) == 2
    for block, text in zip(blocks, printed, strict=True):
        capsys.readouterr()
        code = run_commands(block)
        actual = capsys.readouterr().out + f"exit code {code}\n"
        for line in text.splitlines():
            pattern = re.escape(line).replace(r"\.\.", r"\S+").replace(r"\ ", " ")
            assert re.search(rf"^{pattern}$", actual, re.M), f"{line}\n{actual}"
    certificate = json.loads(Path("runs/proof/certificate.json").read_text())
    assert certificate["verdict"] == "different"
