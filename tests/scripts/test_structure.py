"""The structure of the repository stays within the limits of pyproject.toml."""

from __future__ import annotations

import pytest
import structure

LIMITS: dict[str, float] = structure.SETTINGS["limits"]


def test_every_number_has_a_meaning_and_a_limit():
    assert set(structure.MEANINGS) == set(LIMITS)


@pytest.mark.slow
@pytest.mark.parametrize("measure", [structure.static_numbers, structure.run_numbers])
def test_the_source_and_an_update_of_cartpole_are_within_their_limits(measure):
    above = {name: value for name, value in measure().items() if value > LIMITS[name]}
    assert not above, "simplify, or justify a larger limit in pyproject.toml"


def test_lines_and_comments_are_counted(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        '"""Docstring."""\n\n'
        "# ---------- a rule\n"
        "def function():\n"
        '    """Docstring\n    of two lines."""\n'
        "    # a comment\n    # of two lines\n"
        "    x = [\n        1,  # another\n    ]\n\n"
        "    return x  # type: ignore\n"
    )
    assert structure.code_lines(file) == {4, 9, 10, 11, 13}
    assert structure.count_comments(file) == 2
    assert [structure.function_length(*one) for one in structure.functions(tmp_path)] == [5]


def test_floors_are_the_rooms_on_the_longest_chain():
    order = ["low", "middle", "high"]
    assert structure.floors(order, {("high", "low"), ("middle", "low")}) == 2
    assert structure.floors(order, {("high", "middle"), ("middle", "low"), ("low", "high")}) == 3
