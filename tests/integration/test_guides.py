"""Commands and scripts of pages of the documentation run in their order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_helpers import page_commands, run_process, tables

ROOT = Path(__file__).resolve().parents[2]
# Page -> text of a command -> options that are added behind it, to make it short.
SHORT: dict[str, dict[str, str]] = tables(__file__)["short"]


@pytest.mark.slow
@pytest.mark.parametrize("page", SHORT)
def test_blocks_run(page: str, tmp_path) -> None:
    """Run ``sh`` with the commands of this checkout, and save ``python FILE``."""
    env = page_commands(tmp_path, ROOT)
    text = (ROOT / "docs" / page).read_text()
    text = text.partition("### Example: from the file")[2] or text
    blocks = re.findall(r"^```(sh|python)(?: (\S+))?\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) >= 4
    for language, name, block in blocks:
        if language == "sh":
            for command, options in SHORT[page].items():
                block = block.replace(command, f"{command} {options}")
            run_process("bash", "-ec", block, cwd=tmp_path, env=env)
        elif name:
            (tmp_path / name).write_text(block)
