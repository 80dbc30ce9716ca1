"""Robustness: values around the training, collapse and score by hand, the command, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_helpers

from embodied_ppo import run
from embodied_ppo.commands import main
from embodied_ppo.config import loader
from embodied_ppo.config.schema import EnvConfig
from embodied_ppo.core.types import EnvError
from embodied_ppo.evaluation import robustness
from embodied_ppo.evaluation.episodes import Episode, EvaluationResult


def env(**options: Any) -> EnvConfig:
    return loader.load(EnvConfig, options)


def result(*returns: float, success: list[bool] | None = None) -> EvaluationResult:
    episodes = tuple(
        Episode(i, i, "", r, 10, None if success is None else success[i], "truncated")
        for i, r in enumerate(returns)
    )
    return EvaluationResult("task", 0, True, episodes)


# ------------------------------------------------------------------------------------------- values
def test_standard_values_where_nothing_was_changed_in_training() -> None:
    f = robustness.factor("action_delay", env(), env())
    assert [s.value for s in f.settings] == [0, 1, 2, 3, 4, 6] == list(f.scored)
    assert f.nominal == f.trained == (0, 0)
    assert [dict(s.changes) for s in f.settings[:2]] == [{}, {"realism.action_delay": 1}]


def test_values_around_those_of_the_training() -> None:
    """Trained with 1 to 5 steps: 1, 5, ceil(7.5) = 8 and 10 join the standard values."""
    trained = env(realism={"action_delay": [1, 5]})
    f = robustness.factor("action_delay", trained, trained)
    assert [s.value for s in f.settings] == [0, 1, 2, 3, 4, 5, 6, 8, 10]
    assert list(f.scored) == [0, 1, 2, 3, 4, 6]  # equal for all policies of the task
    assert all(s.changes for s in f.settings), "no single value is that of the training"
    below = robustness.factor("action_delay", trained, trained, below=6)
    assert [s.value for s in below.settings] == [0, 1, 2, 3, 4, 5]


def test_range_is_fixed_and_others_are_kept() -> None:
    trained = env(randomize=True, ranges={"mass": [0.8, 1.2], "friction": [0.5, 1.5]})
    f = robustness.factor("mass", trained, trained, values=[0.5])
    assert dict(f.settings[0].changes) == {
        "randomize": True,
        "ranges": {"mass": [0.5, 0.5], "friction": [0.5, 1.5]},
    }
    plain = robustness.factor("mass", env(), env(), values=[1, 2], neutral={"friction": (1, 1)})
    assert dict(plain.settings[0].changes) == {}
    assert dict(plain.settings[1].changes)["ranges"] == {"friction": (1, 1), "mass": [2, 2]}


# --------------------------------------------------------------------------------- collapse, score
def card(at_2: tuple[float, ...] = (39, 41)) -> dict[str, Any]:
    """Return the card of a policy with p_n = 100 and p_0 = 20, so half is 60.

    Delay:      0    1    2    3
    return:   100   80   40  100
    retained:   1 0.75 0.25    1

    The interval of two returns that differ by 2 is mean +- 12.7.
    """
    f = robustness.factor("action_delay", env(), env(), values=[0, 1, 2, 3])
    nominal = result(99, 101)
    returns = iter([result(79, 81), result(*at_2), result(100, 100)])
    measured = robustness.measure([f], nominal, lambda changes: next(returns))
    return robustness.card([f], measured, nominal=nominal, untrained=result(10, 30))


def test_collapse_and_score_by_hand() -> None:
    content = card()
    assert content["threshold"] == 60
    (f,) = content["factors"]
    assert [p["retained"] for p in f["points"]] == pytest.approx([1, 0.75, 0.25, 1])
    # 80 at 1 and 40 at 2: the line between them is 60 at 1.5. The recovery at 3 does not count.
    assert f["collapse"] == {
        "below": None,
        "above": {"value": pytest.approx(1.5), "holds": 1, "fails": 2},
    }
    assert f["score"] == content["score"] == pytest.approx(0.75)
    assert f["mean"] == pytest.approx(80)


def test_collapse_is_not_determined_where_the_interval_contains_the_nominal_value() -> None:
    """40 +- 127 contains 100, and one episode has no interval."""
    for returns in ((30, 50), (40,)):
        (f,) = card(returns)["factors"]
        assert f["collapse"]["above"] == {"value": None, "holds": 1, "fails": 2}
        assert robustness.collapse_text(f) == "> not determined"
        assert f["score"] == pytest.approx(0.75)
    (f,) = card()["factors"]
    f["collapse"]["above"]["value"] = 1.23456
    assert robustness.collapse_text(f) == "> 1.23"
    page = robustness.charts(card((30, 50)))
    assert [c.verticals for c in page] == [[]] and robustness.charts(card())[0].verticals


def test_engine_fails_only_where_its_interval_excludes_the_nominal_value() -> None:
    f = robustness.engine_factor("mujoco", {"envpool": {"simulator": "e"}, "gym": {"id": "g"}})
    returns = iter([result(30, 50), result(39, 41)])
    measured = robustness.measure([f], result(99, 101), lambda changes: next(returns))
    content = robustness.card([f], measured, nominal=result(99, 101), untrained=result(20, 20))
    assert content["factors"][0]["collapse"] == {"fails": ["gym"]}


def test_return_that_does_not_differ_from_the_untrained_one_has_no_score() -> None:
    """100 +- 127 contains 20: neither half of the performance nor a share of it has a meaning."""
    f = robustness.factor("action_delay", env(), env(), values=[0, 1])
    nominal = result(90, 110)
    measured = robustness.measure([f], nominal, lambda changes: result(10, 10))
    content = robustness.card([f], measured, nominal=nominal, untrained=result(20, 20))
    assert content["score"] is None and content["threshold"] is None


def test_success_rate_has_a_floor_of_0() -> None:
    f = robustness.factor("obs_noise", env(), env(), values=[0, 1])
    nominal = result(*[1] * 8, success=[True] * 8)
    half = result(*[0] * 8, success=[True, False, False, False] * 2)
    content = robustness.card(
        [f],
        robustness.measure([f], nominal, lambda changes: half),
        nominal=nominal,
        untrained=None,
    )
    assert content["metric"] == "success" and content["threshold"] == 0.5
    points = content["factors"][0]["points"]
    assert [p["retained"] for p in points] == [1, 0.25]
    # 1 at 0 and 0.25 at 1: 0.5 at 2/3.
    assert content["factors"][0]["collapse"]["above"]["value"] == pytest.approx(2 / 3, abs=1e-6)


def test_untrained_policy_has_no_score() -> None:
    f = robustness.factor("action_delay", env(), env(), values=[0, 1])
    measured = robustness.measure([f], result(20, 20), lambda changes: result(10, 10))
    content = robustness.card([f], measured, nominal=result(20, 20), untrained=result(30, 30))
    assert content["score"] is None and content["threshold"] is None


def test_value_that_cannot_be_simulated_has_a_reason() -> None:
    f = robustness.factor("action_delay", env(), env(), values=[0, 1])

    def refuse(changes: Any) -> EvaluationResult:
        raise EnvError("too late")

    measured = robustness.measure([f], result(20, 20), refuse)
    content = robustness.card([f], measured, nominal=result(20, 20), untrained=result(0, 0))
    assert content["factors"][0]["points"][1]["error"] == "too late"
    assert robustness.rows(content)[1][-1] == "0:20 1:!"


# ------------------------------------------------------------------------------------------ command
@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("robustness") / "run"
    options = {
        "env.id": "HalfCheetah",
        "env.max_episode_steps": 10,
        "model.history": 2,
        "evaluation.video_episodes": 0,
        "evaluation.episodes": 2,
        "updates": 2,
        "run_dir": str(run_dir),
    }
    run.train(run_helpers.tiny_config(options), quiet=True)
    return run_dir


@pytest.mark.slow
def test_evaluate_writes_card_picture_and_table(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["episodes=3", "robustness_episodes=2", "video=false", f"out={tmp_path}"]
    factors = "robustness_factors=[mass,motor_strength,action_delay,engine]"
    values = "robustness_values={mass:[1,2]}"
    command = ["evaluate", f"checkpoint={trained}", "robustness=true", factors, values, *options]
    assert main.main(command) == 0
    output = capsys.readouterr()
    assert "motor_strength" in output.out and "2 episodes at each value" in output.out
    content = json.loads((tmp_path / "robustness.json").read_text())
    assert content["metric"] == "return" and content["episodes"] == 2
    by_name = {f["name"]: f for f in content["factors"]}
    assert set(by_name) >= {"mass", "motor_strength", "action_delay", "engine"}
    assert [p["value"] for p in by_name["mass"]["points"]] == [1, 2]
    engines = {p["value"]: p for p in by_name["engine"]["points"]}
    # The same task in another simulator, with the same policy.
    assert engines["envpool"]["mean"] is not None or engines["gymnasium"]["mean"] is not None
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Robustness</h2>" in page and page.count("<svg") >= 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["robustness_factors=[wind]"], "robustness_factors"),
        (["robustness_values={mass:[-1]}"], "must be a list of numbers >= 0"),
        (["robustness_values={wind:[1]}"], "robustness_values.wind is unknown"),
        (["robustness_episodes=200"], "robustness_episodes = 200: at most episodes = 100"),
        (["robustness_factors=[push_velocity]"], "push_velocity"),
    ],
)
def test_refusals(
    options: list[str], message: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", f"checkpoint={trained}", "robustness=true", *options]
    assert main.main(command) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error


def test_options_need_robustness(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["evaluate", f"checkpoint={trained}", "robustness_episodes=2"]) == 2
    assert "robustness_episodes = 2" in capsys.readouterr().err


def test_change_of_the_environment_that_is_not_read_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``train`` refuses it; with push_velocity it is read."""
    command = ["evaluate", f"checkpoint={trained}", "env.realism.push_interval_s=[1,2]"]
    assert main.main(command) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == (
        "error: env.realism.push_interval_s = [1.0, 2.0] is set but not read; it needs"
        " env.realism.push_velocity; otherwise remove this option"
    )
    assert main.main([*command, "env.realism.push_velocity=1"]) == 2
    assert "push_interval_s = [1, 2]: an episode ends after 0.5 s" in capsys.readouterr().err


def test_page_without_delays_or_pushes_names_none(trained: Path, tmp_path: Path) -> None:
    options = ["episodes=1", "video=false", f"out={tmp_path}"]
    assert main.main(["evaluate", "--quiet", f"checkpoint={trained}", *options]) == 0
    assert "<th>Realism" not in (tmp_path / "report.html").read_text()
