"""Ranges of healthy metrics: values, messages and agreement with docs/metrics.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodied_ppo.training import health
from embodied_ppo.training.health import RANGES, WINDOW, Verdict, judge

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()


def rows(tag: str, *values: float | None) -> list[dict[str, float | None]]:
    return [{"update": float(i), tag: x} for i, x in enumerate(values)]


def test_median_of_newest_values_is_judged() -> None:
    # The median of (0.01, 0.02, 9, 0.02, 0.01) is 0.02. One outlier and older values do not count.
    (healthy,) = judge(rows("policy/approx_kl", 5.0, 5.0, 5.0, 0.01, 0.02, 9.0, 0.02, 0.01))
    assert healthy == Verdict("policy/approx_kl", 0.02, False, "")
    (unhealthy,) = judge(rows("policy/approx_kl", 0.01, 0.01, 0.2, 0.4, 0.8))
    assert unhealthy.value == 0.2 and unhealthy.warning
    assert unhealthy.text.startswith(
        "policy/approx_kl is 0.2, above 0.03: updates move the policy too far: lower lr"
    )


def test_slow_training_is_no_warning() -> None:
    (slow,) = judge(rows("policy/approx_kl", *[1e-5] * WINDOW))
    assert slow.text.startswith("policy/approx_kl is 1e-05, below 0.002: ") and not slow.warning
    (bad,) = judge(rows("value/explained_variance", *[-0.5] * WINDOW))
    assert bad.text.startswith("value/explained_variance is -0.5, below -0.1: ") and bad.warning


@pytest.mark.parametrize("edge", [0.002, 0.03])
def test_limits_belong_to_range(edge: float) -> None:
    assert judge(rows("policy/approx_kl", *[edge] * WINDOW))[0].text == ""


def test_too_few_values_are_not_judged() -> None:
    assert judge([]) == []
    assert judge(rows("policy/approx_kl", *[9.0] * (WINDOW - 1), None, float("nan"))) == []
    assert judge(rows("policy/loss", *[9.0] * WINDOW)) == []


@pytest.mark.parametrize("entry", RANGES, ids=lambda r: r.tag)
def test_ranges_equal_documentation(entry: health.Range) -> None:
    line = next(line for line in DOCS.splitlines() if line.startswith(f"| `{entry.tag}`"))
    healthy = line.split(" | ")[-1]
    for limit, text in zip(entry.limits, (entry.below, entry.above), strict=True):
        assert (limit is None) == (not text)
        assert limit is None or f"{limit:g}" in healthy, healthy
