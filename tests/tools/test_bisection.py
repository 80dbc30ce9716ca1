"""``embodied-ppo bisect``: a planted fault is found with its minibatch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_refused, metric_rows, run_command

import embodied_ppo as ep
from embodied_envs.base.errors import ConfigError
from embodied_envs.base.random import env_seeds
from embodied_ppo.commands import main
from embodied_ppo.tools import bisection

# Where the reward of 1e6 is planted.
UPDATE, STEP, ENVIRONMENT, HORIZON = 37, 5, 3, 16


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Return a run of 40 updates, one of whose 2560 rewards is 1e6."""
    # The cut of the first episode makes one more call of the environment than there are rows.
    call = (UPDATE - 1) * HORIZON + STEP + 1
    fault = {"seed": env_seeds(0, 0, 4)[ENVIRONMENT], "step": call}
    env = {"id": "toy_envs:toy_envs/Faulty-v0", "num_envs": 4, "num_threads": 0, "kwargs": fault}
    algorithm = {"horizon": HORIZON, "global_batch_size": 32, "update_epoch": 2}
    algorithm |= {"reward_norm": None, "reward_clip": None}
    evaluation = {"episodes": 2, "num_envs": 2, "video_episodes": 0}
    options = {"updates": 40, "save_every": 10, "compile": "never", "progress": False}
    sections = {"env": env, "algorithm": algorithm, "evaluation": evaluation}
    folder = tmp_path_factory.mktemp("bisect") / "run"
    return ep.train(run_dir=folder, model__hidden=[16], **sections, **options).run_dir


@pytest.mark.slow
def test_planted_fault_is_found(run_dir, capsys):
    result = run_command(capsys, "bisect", "--quiet", run_dir, "value/loss > 100")
    assert result["held"] and result["update"] == UPDATE and result["value"] > 1e9
    assert result["minibatch"]["count"] == 4 and result["minibatch"]["value"] > 100
    assert result["minibatch"]["epoch"] == 1 and result["notes"] == []
    replay = ep.replay(run_dir, update=UPDATE, progress=False)
    assert replay.position(int(replay.rollout["reward"].argmax())) == (STEP, ENVIRONMENT)


def test_printed_answer_and_a_condition_on_the_rollout(run_dir, capsys):
    assert main.main(["bisect", str(run_dir), "value/loss", ">", "100"]) == 0
    out, err = capsys.readouterr()
    assert "value/loss > 100: first held in update 37" in out and "first minibatch: " in out
    assert "the nearest earlier one is used (30)" in err
    assert main.main(["bisect", str(run_dir), "rollout/return", ">", "10"]) == 0
    out, err = capsys.readouterr()
    assert "rollout/return > 10: first held in update 37" in out and "first minibatch" not in out
    assert "note: rollout/return is not computed per minibatch" in out


def test_conditions_that_need_no_repetition(run_dir, capsys):
    result = run_command(capsys, "bisect", run_dir, "policy/approx_kl > 100")
    values = [row.get("policy/approx_kl", -math.inf) for row in metric_rows(run_dir)]
    largest = max(range(41), key=lambda i: values[i])
    assert not result["held"] and result["extreme"] == "largest"
    assert (result["update"], result["value"]) == (largest, values[largest])
    assert main.main(["bisect", str(run_dir), "policy/loss nonfinite"]) == 0
    assert "policy/loss nonfinite: never held" in capsys.readouterr().out
    result = run_command(capsys, "bisect", run_dir, "eval/return > -1000")
    assert (result["update"], result["minibatch"]) == (0, None)
    assert "is not computed per minibatch" in result["notes"][0]


def test_conditions():
    c = bisection.parse_condition("policy/approx_kl>=1e-1")
    assert (c.metric, c.operator, c.number) == ("policy/approx_kl", ">=", 0.1)
    assert c.holds(0.1) and not c.holds(0.09) and not c.holds(math.nan)
    assert bisection.parse_condition("a < inf").holds(1.0)
    nonfinite = bisection.parse_condition("policy/loss nonfinite")
    assert nonfinite.holds(math.nan) and nonfinite.holds(math.inf) and not nonfinite.holds(0.0)
    assert str(nonfinite) == "policy/loss nonfinite" and str(c) == "policy/approx_kl >= 0.1"
    for text in ("policy/loss", "policy/loss >", "> 3", "a > b", "a > nan", "a => 1", ""):
        with pytest.raises(ConfigError, match="is not NAME OPERATOR NUMBER"):
            bisection.parse_condition(text)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "bisect RUN"),
        (["{run}"], "bisect RUN"),
        (["{run}", "value/los > 1"], "did you mean value/loss?"),
        (["{run}", "value/loss about 1"], "NAME OPERATOR NUMBER"),
        (["{run}-no", "value/loss > 1"], "does not exist"),
    ],
)
def test_bad_input_is_refused(run_dir, capsys, arguments, named):
    arguments = [x.replace("{run}", str(run_dir)) for x in arguments]
    assert_refused(capsys, ["bisect", *arguments], named)


def test_failed_update_is_reported(tmp_path, capsys):
    """The update in which a loss is not finite has no row, so the condition never holds."""
    (tmp_path / "config.yaml").write_text("name: x\n")
    (tmp_path / "metrics.jsonl").write_text('{"update": 1, "policy/loss": 0.5}\n')
    (tmp_path / "log.txt").write_text("2026-11-25 03:40:51 failed: update 2: loss nan\ncause\n")
    assert main.main(["bisect", str(tmp_path), "policy/loss nonfinite"]) == 0
    out = capsys.readouterr().out
    assert "never held" in out and "note: the run failed" in out and "update 2: loss nan" in out


@pytest.mark.parametrize("value", ["2", 1.5, None, True])
def test_numbers_of_the_wrong_type_are_refused(tmp_path, value):
    calls: list[Any] = [
        lambda: ep.fork(tmp_path, update=value),
        lambda: ep.replay(tmp_path, update=value),
        lambda: ep.verify(tmp_path, updates=value),
        lambda: ep.verify(tmp_path, seed=value),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="is not a whole number"):
            call()
    with pytest.raises(ConfigError, match="condition"):
        ep.bisect(tmp_path, 3)  # pyright: ignore[reportArgumentType]
