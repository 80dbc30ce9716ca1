"""Robustness: values of the factors, the card by hand, the command, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import run_helpers

from embodied_envs.base.errors import EnvError
from embodied_ppo.commands import main
from embodied_ppo.evaluation import robustness
from embodied_ppo.evaluation.episodes import Episode, EvaluationResult
from embodied_ppo.options import loader
from embodied_ppo.options.schema import EnvConfig


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
    assert list(f.settings) == [0, 1, 2, 3, 4, 6] == list(f.scored)
    assert f.trained == (0, 0)
    assert f.settings[0] == {} and f.settings[1] == {"realism.action_delay": 1}


def test_bounds_of_the_training_join_the_standard_values() -> None:
    trained = env(realism={"action_delay": [1, 5]})
    f = robustness.factor("action_delay", trained, trained)
    assert list(f.settings) == [0, 1, 2, 3, 4, 5, 6]
    assert list(f.scored) == [0, 1, 2, 3, 4, 6]  # equal for all policies of the task
    assert all(f.settings.values()), "no single value is that of the training"
    below = robustness.factor("action_delay", trained, trained, below=4)
    assert list(below.settings) == [0, 1, 2, 3]


def test_range_is_fixed_and_others_are_kept() -> None:
    trained = env(randomize=True, ranges={"mass": [0.8, 1.2], "friction": [0.5, 1.5]})
    expected = {"randomize": True, "ranges": {"mass": [0.5, 0.5], "friction": [0.5, 1.5]}}
    assert robustness.factor("mass", trained, trained, values=[0.5]).settings[0.5] == expected
    plain = robustness.factor("mass", env(), env(), values=[1, 2], neutral={"friction": (1, 1)})
    assert plain.settings[1] == {}
    assert plain.settings[2]["ranges"] == {"friction": (1, 1), "mass": [2, 2]}


# --------------------------------------------------------------------------------------- the card
def card() -> dict[str, Any]:
    """Return the card of a policy with p_n = 100 and p_0 = 20, so half is 60.

    Delay:      0    1    2    3
    return:   100   80   40  100
    retained:   1 0.75 0.25    1
    """
    f = robustness.factor("action_delay", env(), env(), values=[0, 1, 2, 3])
    nominal = result(99, 101)
    returns = iter([result(79, 81), result(39, 41), result(100, 100)])
    return robustness.card([f], nominal, lambda changes: next(returns), untrained=result(10, 30))


def test_score_by_hand() -> None:
    content = card()
    assert content["threshold"] == 60
    (f,) = content["factors"]
    assert [p["retained"] for p in f["points"]] == pytest.approx([1, 0.75, 0.25, 1])
    assert f["below_half"] == [2] and content["no_score"] is None
    assert f["score"] == content["score"] == pytest.approx(0.75)
    assert f["mean"] == pytest.approx(80)
    assert robustness.rows(content)[1] == [
        "action_delay", "0", "2", "0.75", "80", "0:100 1:80 2:40 3:100"
    ]  # fmt: skip
    assert len(robustness.charts(content)) == 1


def test_a_policy_that_has_learned_nothing_has_no_score() -> None:
    f = robustness.factor("obs_noise", env(), env(), values=[0])
    for returns, untrained in (((10, 30), (20, 20)), ((19, 21), (30, 30))):
        content = robustness.card([f], result(*returns), result, untrained=result(*untrained))
        assert "its return 20 is not above" in content["no_score"] and content["score"] is None
    failing = result(1, 1, 1, success=[True, False, False])
    content = robustness.card([f], failing, result, untrained=None)
    assert content["no_score"] == "its success rate is 33.3%, below 50%"


def test_success_rate_has_a_floor_of_0() -> None:
    f = robustness.factor("obs_noise", env(), env(), values=[0, 1])
    nominal = result(*[1] * 8, success=[True] * 8)
    half = result(*[0] * 8, success=[True, False, False, False] * 2)
    content = robustness.card([f], nominal, lambda changes: half, untrained=None)
    assert content["metric"] == "success" and content["threshold"] == 0.5
    assert [p["retained"] for p in content["factors"][0]["points"]] == [1, 0.25]
    assert content["factors"][0]["below_half"] == [1]
    # Some infos have the entry in successes only, and none here.
    none = robustness.card([f], nominal, lambda changes: result(*[0] * 8), untrained=None)
    assert none["factors"][0]["points"][1]["mean"] == 0


def test_value_that_cannot_be_simulated_has_a_reason() -> None:
    f = robustness.factor("action_delay", env(), env(), values=[0, 1])

    def refuse(changes: Any) -> EvaluationResult:
        raise EnvError("too late")

    content = robustness.card([f], result(20, 20), refuse, untrained=result(0, 0))
    assert content["factors"][0]["points"][1]["error"] == "too late"
    assert robustness.rows(content)[1][-1] == "0:20 1:!"


# ------------------------------------------------------------------------------------------ command
@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("robustness") / "run"
    options = run_helpers.options("""env.id=HalfCheetah env.max_episode_steps=10
        model.history=2 evaluation.video_episodes=0 evaluation.episodes=2 updates=2""")
    run_helpers.train(run_dir, options)
    return run_dir


@pytest.mark.slow
def test_evaluate_writes_card_picture_and_table(trained: Path, tmp_path, capsys) -> None:
    options = ["episodes=3", "robustness_episodes=2", "video=false", f"out={tmp_path}"]
    factors = "robustness_factors=[mass,motor_strength,action_delay]"
    values = "robustness_values={mass:[1,2]}"
    command = ["evaluate", f"checkpoint={trained}", "robustness=true", factors, values, *options]
    assert main.main(command) == 0
    output = capsys.readouterr()
    assert "motor_strength" in output.out and "2 episodes at each value" in output.out
    content = json.loads((tmp_path / "robustness.json").read_text())
    assert content["metric"] == "return" and content["episodes"] == 2
    by_name = {f["name"]: f for f in content["factors"]}
    assert set(by_name) >= {"mass", "motor_strength", "action_delay"}
    assert [p["value"] for p in by_name["mass"]["points"]] == [1, 2]
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Robustness</h2>" in page and page.count("<svg") >= 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["robustness_factors=[wind]"], "robustness_factors"),
        (["robustness_values={mass:[-1]}"], "robustness_values.mass"),
        (["robustness_episodes=200"], "robustness_episodes = 200"),
    ],
)
def test_refusals(options: list[str], message: str, trained: Path, capsys) -> None:
    command = ["evaluate", f"checkpoint={trained}", "robustness=true", *options]
    run_helpers.assert_refused(capsys, command, message)
