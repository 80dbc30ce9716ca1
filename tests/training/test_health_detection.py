"""Warnings about problems in training: synthetic rows and real runs."""

from __future__ import annotations

import pytest
import run_helpers

from embodied_ppo.programs import runs
from embodied_ppo.training.health import WINDOW, HealthMonitor


def warnings_of(*values: float) -> list[str]:
    monitor = HealthMonitor()
    return [text for x in values for text in monitor.add({"policy/approx_kl": x})]


def test_a_problem_is_reported_once_and_not_in_the_first_updates() -> None:
    assert warnings_of(*[0.01] * 60) == [] == warnings_of(*[0.4] * (4 * WINDOW - 1))
    (warning,) = warnings_of(*[0.01] * 60, *[0.4] * 60)
    assert warning.startswith("policy/approx_kl is 0.4, above 0.03: ")


SMALL = run_helpers.options("""env.id=CartPole-v1 env.num_envs=8 algorithm.horizon=16
    algorithm.global_batch_size=32 evaluation.episodes=2 evaluation.video_episodes=0 compile=never
    updates=30""")


@pytest.mark.slow
def test_warning_is_in_log_and_tensorboard(tmp_path) -> None:
    """A learning rate 100 times too large: the KL diverges and the entropy collapses."""
    runs.train(
        run_helpers.tiny_config({**SMALL, "run_dir": str(tmp_path / "run"), "algorithm.lr": 0.1})
    )
    log = (tmp_path / "run" / "log.txt").read_text()
    warnings = [line for line in log.splitlines() if "warning, update" in line]
    assert any("policy/approx_kl is" in line and "lower lr" in line for line in warnings), log
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert "warnings/text_summary" in board.Tags()["tensors"]
