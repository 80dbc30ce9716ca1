"""Every option of training changes a number, or a stated reason explains why not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import run_helpers

from embodied_envs.base.errors import ConfigError
from embodied_ppo.options import loader, readers
from embodied_ppo.options.schema import Config
from tests.integration import language_option_cases, option_cases, robot_option_cases
from tests.integration.option_cases import OptionCases

CASES = (robot_option_cases.CASES, language_option_cases.CASES)
BOTH_MODES = pytest.mark.parametrize("cases", CASES, ids=[cases.mode for cases in CASES])


@pytest.fixture(scope="module", autouse=True)
def files() -> Iterator[None]:
    """Write the models, prompts and graders that options name."""
    robot_option_cases.write_models()
    with language_option_cases.small_tasks_and_files():
        yield


def entries(table: str) -> pytest.MarkDecorator:
    """Parametrise a test by the cases of both modes and the options of one of their tables."""
    return pytest.mark.parametrize(
        ("cases", "path"),
        [
            pytest.param(cases, path, id=f"{cases.mode}-{path}")
            for cases in CASES
            for path in getattr(cases, table)
        ],
    )


@BOTH_MODES
def test_every_option_has_a_case(cases: OptionCases) -> None:
    options = {
        path
        for path in loader.describe(Config)
        if path.startswith(cases.sections) and readers.mode_of(path) in (None, cases.mode)
    }
    tables = [*cases.changes, *cases.reported, *cases.unchanged, *cases.refused]
    assert sorted(tables) == sorted(options)


@BOTH_MODES
def test_training_is_deterministic(cases: OptionCases) -> None:
    """A difference between two runs of the following tests is the effect of the option."""
    assert repr(cases.train({}, 0)) == repr(cases.repeat())  # NaN is equal to NaN
    assert cases.learned(cases.train({}, 0))


def test_language_model_learns() -> None:
    rows = language_option_cases.CASES.train({}, 0)
    assert 0 < rows[-1]["rollout/truncated"] < 1 and rows[-1]["rollout/length"] > 2
    assert rows[-1]["advantage/std"] > 0.1 and rows[0]["weights"] != rows[-1]["weights"]
    assert rows[-1]["policy/clip_fraction"] > 0


@pytest.mark.slow
@entries("changes")
def test_option_changes_weights(cases: OptionCases, path: str) -> None:
    value, needs = cases.changes[path]
    assert loader.describe(Config)[path].default != value
    lag = cases.lag.get(path, 0)
    base = cases.learned(cases.train(needs, lag))
    changed = cases.learned(cases.train({**needs, path: value}, lag))
    network = 1 if path.startswith(cases.critic_options) else 0
    assert changed[network] != base[network]


@entries("reported")
def test_option_changes_metric_only(cases: OptionCases, path: str) -> None:
    value, needs, tag = cases.reported[path]
    base, changed = cases.train(needs, 0), cases.train({**needs, path: value}, 0)
    assert changed[-1][tag] != base[-1][tag]
    assert cases.learned(changed) == cases.learned(base)


@entries("unchanged")
def test_option_changes_nothing(cases: OptionCases, path: str) -> None:
    """Compare up to rounding; the tests of the learners have narrower tolerances."""
    value, needs, _ = cases.unchanged[path]
    base_rows, changed_rows = cases.train(needs, 0), cases.train({**needs, path: value}, 0)
    for base, changed in zip(base_rows, changed_rows, strict=True):
        assert base.keys() == changed.keys()
        for tag in base:
            expected = pytest.approx(base[tag], rel=1e-3, abs=1e-3, nan_ok=True)
            assert changed[tag] == expected, tag


@entries("refused")
def test_option_is_refused(cases: OptionCases, path: str) -> None:
    value, pattern = cases.refused[path]
    with pytest.raises(ConfigError, match=pattern):
        cases.config({path: value})


@BOTH_MODES
def test_off_policy_weights_are_one_without_lag(cases: OptionCases) -> None:
    """With placement=local the acting and the learning weights are equal."""
    options = {"algorithm.off_policy_correction": "token"}
    for row in cases.train(options, 0):
        assert row["policy/off_policy_weight"] == pytest.approx(1.0, abs=1e-5)
    lagging = cases.train(options, 1)
    assert abs(lagging[-1]["policy/off_policy_weight"] - 1.0) > 1e-4


@pytest.mark.slow
@entries("other_values")
def test_values_differ_from_each_other(cases: OptionCases, path: str) -> None:
    outcomes = {
        value: cases.outcome(cases.train({**needs, path: value}, cases.lag.get(path, 0)))
        for value, needs in cases.other_values[path]
    }
    pairs = [(a, b) for a in outcomes for b in outcomes if str(a) < str(b)]
    equal = [(a, b) for a, b in pairs if outcomes[a] == outcomes[b]]
    assert equal == cases.same_values.get(path, [])


@pytest.mark.parametrize("kind", ["full", "k3"])
def test_full_kl_needs_logits(kind: str) -> None:
    penalties = {**option_cases.IN_LOSS, **option_cases.IN_REWARD}
    paths: dict[str, Any] = {"algorithm.kl_loss_type": kind, "algorithm.kl_penalty": kind}
    rows = robot_option_cases.train({"env.id": "CartPole-v1", **penalties, **paths}, 0)
    assert rows[-1]["kl/to_reference"] != 0
    if kind == "full":
        for path in paths:
            config = run_helpers.tiny_config({**penalties, path: "full"})
            with pytest.raises(
                ConfigError, match=f"{path}.*needs the logits of a categorical policy"
            ):
                run_helpers.tiny_training(config)
