"""The table of docs/scaling.md: complete, and equal to what is computed now."""

from __future__ import annotations

import plan_table
import pytest


def test_every_model_is_planned_on_every_machine() -> None:
    rows = plan_table.rows_of_page(plan_table.PAGE.read_text(encoding="utf-8"))
    machines = [f"{devices} x {memory}" for devices, memory in plan_table.MACHINES]
    assert list(rows) == [(m, x) for m in plan_table.MODELS.values() for x in machines]
    width = plan_table.HEADER[0].count("|")
    assert {row.count("|") for row in rows.values()} == {width}


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "devices", "memory"), [("openvla_oft", 1, 80)])
def test_rows_are_current(recipe: str, devices: int, memory: int) -> None:
    pytest.importorskip("transformers")
    rows = plan_table.rows_of_page(plan_table.PAGE.read_text(encoding="utf-8"))
    stored = rows[plan_table.MODELS[recipe], f"{devices} x {memory}"]
    message = f"write the table again: python scripts/plan_table.py {recipe}"
    assert plan_table.row(recipe, devices, memory, {}) == stored, message
