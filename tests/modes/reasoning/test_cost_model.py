"""Cost model of language models: hand-computed seconds and candidate placements."""

from __future__ import annotations

from typing import Any

import pytest

from embodied_ppo.config.placement import Hardware, check_sequences, plan
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.modes.reasoning.cost_model import PARTITIONS, Measured, choices
from embodied_ppo.placement.cost_model import CALL_S, Choice, Prediction, meaning
from tests.placement.test_cost_model import cost, nothing


def measured(**overrides: Any) -> Measured:
    """Return measurements of 64 responses, with ``overrides``.

    Milliseconds of each: generation 1, grading 0.1, reference 0.2, values 0.2, update of the actor
    2, of the critic 1.
    """
    values: dict[str, Any] = {
        "compiled": False,
        "responses": 64,
        "steps": 4,
        "critic_steps": 2,
        "generate": cost(1e-3),
        "grade": cost(1e-4),
        "view": cost(2e-4),
        "values": cost(2e-4),
        "learn": cost(2e-3),
        "teach": cost(1e-3),
        "concurrent": False,
        "cores": 8.0,
        "weights_bytes": 1e6,
        "experience_bytes": 1e5,
        "gradient_bytes": 1e6,
        "critic_gradient_bytes": 1e6,
        "message_s": 0.0,
        "byte_s": 0.0,
        "copy_byte_s": 0.0,
    }
    return Measured(**{**values, **overrides})


ALL = "rollout,actor,critic,reference,reward"
WITHOUT: dict[str, Any] = {
    "view": None,
    "values": None,
    "teach": None,
    "critic_steps": 0,
    "critic_gradient_bytes": 0,
}


def seconds(placement: Any, m: Measured, devices: int = 2, **options: Any) -> Prediction:
    p = plan(placement, Hardware((devices,)), mode="reasoning", **options)
    return m.predict(p, nothing(p))


def test_one_process_takes_the_sum_of_all_phases() -> None:
    prediction = measured().predict(None, {})
    assert prediction.collect_s == pytest.approx(64 * 1.1e-3) and prediction.publish_s == 0
    assert prediction.update_s == pytest.approx(64 * (0.2 + 0.2 + 2 + 1) * 1e-3)
    assert prediction.whole_s == pytest.approx(prediction.collect_s + prediction.update_s)


def test_concurrent_critic_is_limited_by_cores() -> None:
    assert measured(concurrent=True).predict(None, {}).update_s == pytest.approx(
        64 * (0.4 + 2) * 1e-3
    )
    # log-probabilities and values 64 x 0.4 ms, then both updates 64 x 3 ms of CPU on one core
    local = measured(concurrent=True, cores=1.0).predict(None, {})
    assert local.update_s == pytest.approx(64 * (0.4 + 3) * 1e-3)


def test_run_without_critic_and_reference() -> None:
    m = measured(**WITHOUT)
    assert m.predict(None, {}).update_s == pytest.approx(64 * 2e-3)
    prediction = seconds({"rollout,actor,reward": 0}, m, without=("critic", "reference"))
    assert prediction.update_s == pytest.approx(64 * 2e-3 + CALL_S)


def test_critic_in_another_process_learns_concurrently() -> None:
    separate = seconds({"rollout,actor,reference,reward": 0, "critic": 1}, measured())
    assert separate.update_s == pytest.approx(64 * (0.4 + 2) * 1e-3 + CALL_S)
    assert separate.collect_s == pytest.approx(64 * 1.1e-3 + CALL_S)
    # two messages (values, learn) and their rows
    with_messages = seconds(
        {"rollout,actor,reference,reward": 0, "critic": 1}, measured(message_s=1e-3, byte_s=1e-9)
    )
    assert with_messages.update_s == pytest.approx(separate.update_s + 2e-3 + 1e5 * 1e-9)
    # one core does the work of two processes
    one = seconds({"rollout,actor,reference,reward": 0, "critic": 1}, measured(cores=1.0))
    assert one.update_s == pytest.approx(64 * (0.4 + 3) * 1e-3 + CALL_S)


def test_two_processes_take_half_the_time() -> None:
    m = measured()
    one, two = seconds({ALL: 0}, m), seconds({ALL: "0-1"}, m)
    assert two.collect_s - CALL_S == pytest.approx((one.collect_s - CALL_S) / 2)
    assert two.update_s - CALL_S == pytest.approx((one.update_s - CALL_S) / 2)
    # gradients of 4 + 2 steps: 4 messages and the bytes of a model
    sums = seconds({ALL: "0-1"}, measured(message_s=1e-4, byte_s=1e-9))
    assert sums.update_s == pytest.approx(two.update_s + 6 * (4 * 1e-4 + 1e6 * 1e-9))
    # one grader grades the responses of two rollouts
    graded = seconds({"rollout,actor,critic,reference": "0-1", "reward": 0}, m)
    assert graded.collect_s == pytest.approx(32 * 1e-3 + 64 * 1e-4 + CALL_S)


def test_separate_rollouts_send_experience_and_can_overlap() -> None:
    placement = {"rollout,reward": 0, "actor,critic,reference": 1}
    m = measured(copy_byte_s=1e-9)
    prediction = seconds(placement, m)
    assert prediction.collect_s == pytest.approx(64 * 1.1e-3 + 1e5 * 1e-9 + CALL_S)
    assert prediction.update_s == pytest.approx(64 * 3.4e-3 + 2e5 * 1e-9 + CALL_S)
    assert prediction.publish_s == pytest.approx(2 * 1e6 * 1e-9 + CALL_S)
    ahead = seconds(placement, m, max_lag=1)
    assert ahead.whole_s == pytest.approx(prediction.update_s + ahead.publish_s)


def legal(devices: int, without: tuple[str, ...] = ()) -> dict[Any, Choice]:
    """Return meaning -> choice of the valid placements of 64 prompts, minibatches of 32."""
    valid: dict[Any, Choice] = {}
    hardware = Hardware((devices,), "cuda")
    for choice in choices(hardware, without):
        if choice == Choice():
            continue
        try:
            roles = choice.component_placement or choice.placement
            p = plan(roles, hardware, mode="reasoning", without=without)
            check_sequences(
                p, prompts=64, group_size=1, batches={"algorithm.global_batch_size": 32}
            )
        except PlacementError:
            continue
        valid.setdefault(meaning(p), choice)
    return valid


def test_choices() -> None:
    names = {c.name for c in legal(1).values()}
    assert {"fused", "colocated", "rollout,actor,reference,reward: 0 | critic: 0"} <= names
    assert len(names) == len(PARTITIONS)  # fused and colocated are among them
    few = {c.name for c in legal(1, ("critic", "reference")).values()}
    assert few == {"fused", "colocated", "rollout,actor: 0 | reward: 0"}
    many = {c.name for c in legal(8).values()}
    assert {
        "disaggregated",
        f"{ALL}: 0-3",
        "rollout,actor,reference,reward: 0-3 | critic: 4-7",
        "rollout,reward: 0-3 | actor,reference: 4-5 | critic: 6-7",
        "rollout,reward: 0-7 | actor: 0-3 | critic,reference: 4-7",
    } <= many
    assert not any("stages" in name or "env" in name for name in many)
