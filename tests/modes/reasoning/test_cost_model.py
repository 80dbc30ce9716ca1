"""Predicted placements of language models: seconds worked out by hand, and what there is to choose
from.
"""

from __future__ import annotations

from typing import Any

import pytest

from embodied_ppo.config.placement import Hardware, check_sequences, plan
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.modes.reasoning.cost_model import PARTITIONS, Measured, choices
from embodied_ppo.placement.cost_model import CALL_S, Choice, Prediction, meaning
from tests.placement.test_cost_model import cost, nothing


def measured(**differs: Any) -> Measured:
    """64 responses, each: generated in 1 ms, graded in 0.1, looked at in 0.2 by reference and
    critic, learnt from in 2 by the actor, in 1 by the critic."""
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
    return Measured(**{**values, **differs})


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


def test_in_one_process_one_thing_follows_the_other() -> None:
    found = measured().predict(None, {})
    assert found.collect_s == pytest.approx(64 * 1.1e-3) and found.publish_s == 0
    assert found.update_s == pytest.approx(64 * (0.2 + 0.2 + 2 + 1) * 1e-3)
    assert found.whole_s == pytest.approx(found.collect_s + found.update_s)


def test_two_threads_learn_at_once_as_far_as_there_are_cores() -> None:
    assert measured(concurrent=True).predict(None, {}).update_s == pytest.approx(
        64 * (0.4 + 2) * 1e-3
    )
    # values 64 x 0.2 and both learning 64 x 3 ms of CPU on one core, after what the reference and
    # the critic say
    alone = measured(concurrent=True, cores=1.0).predict(None, {})
    assert alone.update_s == pytest.approx(64 * (0.4 + 3) * 1e-3)


def test_without_critic_and_reference_nobody_is_asked() -> None:
    m = measured(**WITHOUT)
    assert m.predict(None, {}).update_s == pytest.approx(64 * 2e-3)
    found = seconds({"rollout,actor,reward": 0}, m, without=("critic", "reference"))
    assert found.update_s == pytest.approx(64 * 2e-3 + CALL_S)


def test_a_critic_that_is_apart_learns_while_the_actor_does() -> None:
    apart = seconds({"rollout,actor,reference,reward": 0, "critic": 1}, measured())
    assert apart.update_s == pytest.approx(64 * (0.4 + 2) * 1e-3 + CALL_S)
    assert apart.collect_s == pytest.approx(64 * 1.1e-3 + CALL_S)
    # asked for values, told to learn: two messages, and the rows
    told = seconds(
        {"rollout,actor,reference,reward": 0, "critic": 1}, measured(message_s=1e-3, byte_s=1e-9)
    )
    assert told.update_s == pytest.approx(apart.update_s + 2e-3 + 1e5 * 1e-9)
    # one core does what two would have done at once
    one = seconds({"rollout,actor,reference,reward": 0, "critic": 1}, measured(cores=1.0))
    assert one.update_s == pytest.approx(64 * (0.4 + 3) * 1e-3 + CALL_S)


def test_processes_share_the_work() -> None:
    m = measured()
    one, two = seconds({ALL: 0}, m), seconds({ALL: "0-1"}, m)
    assert two.collect_s - CALL_S == pytest.approx((one.collect_s - CALL_S) / 2)
    assert two.update_s - CALL_S == pytest.approx((one.update_s - CALL_S) / 2)
    # gradients of 4 + 2 steps: 2 messages there and 2 back, and a whole model's bytes
    sums = seconds({ALL: "0-1"}, measured(message_s=1e-4, byte_s=1e-9))
    assert sums.update_s == pytest.approx(two.update_s + 6 * (4 * 1e-4 + 1e6 * 1e-9))
    # one grader for two rollouts grades all
    graded = seconds({"rollout,actor,critic,reference": "0-1", "reward": 0}, m)
    assert graded.collect_s == pytest.approx(32 * 1e-3 + 64 * 1e-4 + CALL_S)


def test_rollouts_apart_are_handed_over_and_may_run_ahead() -> None:
    placement = {"rollout,reward": 0, "actor,critic,reference": 1}
    m = measured(copy_byte_s=1e-9)
    found = seconds(placement, m)
    assert found.collect_s == pytest.approx(64 * 1.1e-3 + 1e5 * 1e-9 + CALL_S)
    assert found.update_s == pytest.approx(64 * 3.4e-3 + 2e5 * 1e-9 + CALL_S)
    assert found.publish_s == pytest.approx(2 * 1e6 * 1e-9 + CALL_S)
    ahead = seconds(placement, m, max_lag=1)
    assert ahead.whole_s == pytest.approx(found.update_s + ahead.publish_s)


def legal(devices: int, without: tuple[str, ...] = ()) -> dict[Any, Choice]:
    """Meaning -> the choice, of 64 prompts in minibatches of 32."""
    found: dict[Any, Choice] = {}
    hardware = Hardware((devices,), "cuda")
    for choice in choices(hardware, without):
        if choice == Choice():
            continue
        try:
            where = choice.component_placement or choice.placement
            p = plan(where, hardware, mode="reasoning", without=without)
            check_sequences(
                p, prompts=64, group_size=1, batches={"algorithm.global_batch_size": 32}
            )
        except PlacementError:
            continue
        found.setdefault(meaning(p), choice)
    return found


def test_what_there_is_to_choose_from() -> None:
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
