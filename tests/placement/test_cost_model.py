"""Cost model of embodied runs: hand-computed seconds, candidate placements, best placements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from embodied_ppo.config.placement import Hardware, Need, Plan, check_numbers, plan
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.placement.cost_model import (
    CALL_S,
    Choice,
    Cost,
    Line,
    Measured,
    Prediction,
    choices,
    code,
    fit_line,
    meaning,
)

TWO = Hardware((2,))


def line(each: float, fixed: float = 0.0) -> Line:
    return Line(fixed, each)


def cost(each: float, fixed: float = 0.0, *, threads: int = 1) -> Cost:
    """Return a cost that occupies ``threads`` cores."""
    return Cost(line(each, fixed), line(each * threads, fixed * threads))


def measured(**overrides: Any) -> Measured:
    """Return measurements of 64 environments, with ``overrides``.

    Seconds of n: simulating 10 us x n, acting 100 us + 5 us x n, learning 20 ms + 1 ms x n.
    """
    free = {
        "message_s": 0.0,
        "byte_s": 0.0,
        "copy_byte_s": 0.0,
        "step_bytes": 100.0,
        "experience_bytes": 1e6,
    }
    values: dict[str, Any] = {
        "num_envs": 64,
        "horizon": 100,
        "steps": 10,
        "compiled": False,
        "simulate": cost(10e-6),
        "act": {False: cost(5e-6, 100e-6)},
        "learn": {False: cost(1e-3, 20e-3)},
        "cores": 8.0,
        "weights_bytes": 1e5,
        "gradient_bytes": 1e5,
    }
    return Measured(**{**values, **free, **overrides})


def nothing(p: Plan) -> dict[str, Need]:
    """Return memory needs of zero for all groups."""
    return {group.name: {} for group in p.groups}


def seconds(
    placement: Any, m: Measured, hardware: Hardware = TWO, *, stages: int = 1, max_lag: int = 0
) -> Prediction:
    p = plan(placement, hardware, stages=stages, max_lag=max_lag)
    return m.predict(p, nothing(p))


# -------------------------------------------------------------------------------------------- lines
def test_fit_of_points_on_a_line() -> None:
    fit = fit_line([(1, 3.0), (2, 5.0), (4, 9.0)])
    assert (fit.fixed, fit.each) == pytest.approx((1.0, 2.0))
    assert fit(8) == pytest.approx(17.0)


def test_fit_minimizes_relative_error() -> None:
    # (1, 1), (2, 2), (3, 6): w = 1/y^2 = 1, 1/4, 1/36
    # w1 = 46/36, wn = 1 + 1/2 + 1/12 = 19/12, wnn = 1 + 1 + 1/4 = 9/4
    # wy = 1 + 1/2 + 1/6 = 5/3, wny = 1 + 1 + 1/2 = 5/2
    # determinant = 46/36 x 9/4 - (19/12)^2 = 414/144 - 361/144 = 53/144
    # fixed = (5/3 x 9/4 - 5/2 x 19/12) / that = (15/4 - 95/24) x 144/53 = -30/53 < 0: through the
    # origin, wny / wnn
    assert fit_line([(1, 1.0), (2, 2.0), (3, 6.0)]) == Line(0.0, pytest.approx(10 / 9))
    # (1, 2), (2, 2), (4, 4): w = 1/4, 1/4, 1/16; w1 = 9/16, wn = 1, wnn = 1/4 + 1 + 1 = 9/4, wy =
    # 5/4, wny = 5/2 determinant = 81/64 - 1 = 17/64
    # fixed = (5/4 x 9/4 - 5/2) x 64/17 = 20/17, each = (9/16 x 5/2 - 5/4) x 64/17 = 10/17
    fit = fit_line([(1, 2.0), (2, 2.0), (4, 4.0)])
    assert (fit.fixed, fit.each) == pytest.approx((20 / 17, 10 / 17))


def test_fitted_slope_is_not_negative() -> None:
    # w = 1/16, 1/9: (1/4 + 1/3) / (1/16 + 1/9) = (7/12) / (25/144) = 3.36
    fit = fit_line([(1, 4.0), (2, 3.0)])
    assert fit.each == 0 and fit.fixed == pytest.approx(3.36)
    assert fit_line([(4, 2.0), (4, 2.0)]) == Line(0.0, pytest.approx(0.5))


# ------------------------------------------------------------------------------------------ choices
def legal(devices: int, *, kind: str = "cpu", max_lag: int = 0) -> dict[Any, Choice]:
    """Return meaning -> choice of the valid placements of 64 environments, minibatches of 256."""
    valid: dict[Any, Choice] = {}
    hardware = Hardware((devices,), kind)
    for choice in choices(hardware, devices):
        if choice == Choice():
            continue
        try:
            roles = choice.component_placement or choice.placement
            p = plan(roles, hardware, stages=choice.stages, max_lag=max_lag)
            check_numbers(p, num_envs=64, group_size=1, global_batch_size=256)
        except PlacementError:
            continue
        valid.setdefault(meaning(p), choice)
    return valid


def test_choices_on_one_device() -> None:
    assert {c.name for c in legal(1, kind="cuda").values()} == {
        "fused",
        "colocated",
        "colocated, 2 stages",
        "env,rollout: 0 | actor: 0",
        "env: 0 | rollout,actor: 0",
        "env: 0 | rollout,actor: 0, 2 stages",
        "env,actor: 0 | rollout: 0",
        "env,actor: 0 | rollout: 0, 2 stages",
    }
    on_cuda, on_cpu = ({c.name for c in legal(1, kind=kind).values()} for kind in ("cuda", "cpu"))
    assert on_cuda == on_cpu


def test_choices_on_several_devices_include_every_partition() -> None:
    names = {c.name for c in legal(4, kind="cuda").values()}
    assert {
        "fused",
        "env,rollout,actor: 0-1",
        "hybrid",
        "hybrid, 2 stages",
        "pipelined",
        "pipelined, 2 stages",
    } <= names
    assert {
        "env: 0-1 x 4 | rollout,actor: 2-3",
        "env: 0-1 | rollout: 2 | actor: 3",
        "env: 0 | rollout,actor: 0-3",
    } <= names
    assert "env: 0-1 | rollout,actor: 2-3" not in names  # the same as hybrid
    assert "env: 0-2 | rollout,actor: 3, 2 stages" not in names  # 64 is not divisible by 3 x 2
    assert {len(c.component_placement) for c in legal(4).values()} == {0, 1, 2, 3}


def test_cpu_slots_of_one_machine_are_equivalent() -> None:
    assert len(legal(2)) < len(legal(2, kind="cuda"))
    one, other = (plan({"env": a, "rollout,actor": b}, TWO) for a, b in ((0, 1), (1, 1)))
    assert meaning(one) == meaning(other) != meaning(replace(one, stages=2))
    one, other = (replace(p, hardware=Hardware((2,), "cuda")) for p in (one, other))
    assert meaning(one) != meaning(other)
    separate, shared = (plan({"env,rollout": 0, "actor": d}, TWO) for d in (1, 0))
    assert meaning(separate) != meaning(shared)  # another transport of weights


def test_max_lag_requires_separate_devices() -> None:
    for choice in legal(2, max_lag=1).values():
        assert choice.placement == "disaggregated" or "actor" in choice.component_placement, choice


def test_number_of_choices_is_limited_on_many_devices() -> None:
    assert len(choices(Hardware((64,)), 64)) < 3000


# -------------------------------------------------------------------------------------- predictions
def test_one_process_takes_the_sum_of_all_phases() -> None:
    # a step: 64 x 10 us + 100 us + 64 x 5 us = 1.06 ms, 100 of them; learning 20 + 64 ms
    assert measured().predict(None, {}) == Prediction(
        pytest.approx(0.106), pytest.approx(0.084), 0.0, pytest.approx(0.190)
    )


HAND_COMPUTED: list[tuple[str, Any, dict[str, Any], dict[str, Any], tuple[float, float, float]]] = [
    # name, placement, plan, measurements -> collect, update, publish without the calls' overhead
    ("each process has half of the columns", "fused", {}, {},
     # 32 x 10 + 100 + 32 x 5 us = 580 us; 20 + 32 ms
     (0.058, 0.052, 0.0)),
    ("gradients are summed", "fused", {}, {"message_s": 1e-4, "byte_s": 1e-8},
     # 10 steps x (2 x 2 x 0.1 ms + 2/2 x 1e5 x 10 ns) = 10 x 1.4 ms
     (0.058, 0.052 + 0.014, 0.0)),
    ("two processes on one core", "fused", {}, {"cores": 1.0},
     # 2 x 58 ms, 2 x 52 ms of CPU
     (0.116, 0.104, 0.0)),
    ("remote simulators without overlap", "hybrid", {}, {"message_s": 1e-4, "byte_s": 1e-8},
     # 640 us + 420 us + round trip 0.2 ms + 64 x 100 bytes x 10 ns = 64 us
     (0.1324, 0.084, 0.0)),
    ("two stages", "hybrid", {"stages": 2}, {},
     # halves: acting 100 + 160 = 260 us, simulating 320 us: 2 x 320
     (0.064, 0.084, 0.0)),
    ("two stages on one core", "hybrid", {"stages": 2}, {"cores": 1.0},
     # 2 x (260 + 320) us of CPU a step; learning 84 ms
     (0.116, 0.084, 0.0)),
    ("two processes of simulators", {"env": "0-1", "rollout,actor": 0}, {}, {},
     # 420 + 320 us
     (0.074, 0.084, 0.0)),
    ("simulators of two rollouts", {"env": 0, "rollout,actor": "0-1"}, {}, {},
     # acting 260 us, one request 320 us: each rollout waits for the other's, 2 x 320
     (0.064, 0.052, 0.0)),
    ("simulators with four threads", {"env": "0-1", "rollout,actor": 0}, {},
     {"simulate": cost(10e-6, threads=4), "cores": 4.0},
     # wall time: 740 us; CPU: (420 + 4 x 640) / 4 = 745 us
     (0.0745, 0.084, 0.0)),
    ("experience and weights are sent", "disaggregated", {},
     {"copy_byte_s": 1e-9, "byte_s": 1e-8, "message_s": 1e-4},
     # 106 ms + 1e6 bytes x 1 ns; 84 + 2 x 1 ms; 2 x 1e5 x 1 ns + 0.1 ms + 1e5 x 10 ns
     (0.107, 0.086, 0.0013)),
    ("weights on one device", {"env,rollout": 0, "actor": 0}, {},
     {"copy_byte_s": 1e-9, "message_s": 1e-4},
     (0.107, 0.086, 0.0003)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("placement", "plan_options", "overrides", "expected"),
    [x[1:] for x in HAND_COMPUTED],
    ids=[x[0] for x in HAND_COMPUTED],
)
def test_predictions_equal_hand_computed_seconds(
    placement: Any, plan_options: Any, overrides: Any, expected: tuple[float, float, float]
) -> None:
    prediction = seconds(placement, measured(**overrides), **plan_options)
    with_calls = [x + CALL_S for x in expected]
    assert (prediction.collect_s, prediction.update_s, prediction.publish_s) == pytest.approx(
        tuple(with_calls)
    )
    assert prediction.whole_s == pytest.approx(sum(with_calls))


def test_overlapped_update_takes_as_long_as_its_slower_phase() -> None:
    prediction = seconds("disaggregated", measured(), max_lag=1)
    assert (
        prediction.whole_s == pytest.approx(prediction.collect_s) == pytest.approx(0.106 + CALL_S)
    )
    assert prediction.update_s == pytest.approx(0.084 + CALL_S)
    one = seconds("disaggregated", measured(cores=1.0), max_lag=1)
    assert one.whole_s == pytest.approx(0.190)  # CPU seconds of both


def test_each_machine_has_its_own_cores() -> None:
    hardware = Hardware((1, 1))
    fused = seconds("fused", measured(cores=1.0), hardware)
    assert (fused.collect_s, fused.update_s) == pytest.approx((0.058 + CALL_S, 0.052 + CALL_S))


def test_offloaded_roles_and_several_learners_are_not_compiled() -> None:
    gpu = Hardware((2,), "cuda")
    assert code(None, True) == (True, True) and code(None, False) == (False, False)
    assert code(plan("fused", gpu), True) == (True, False)  # two learners
    assert code(plan("colocated", gpu), True) == (False, False)  # roles are offloaded
    assert code(plan("disaggregated", gpu), True) == (True, True)
    on_cpu = plan({"env,rollout": 0, "actor": 0}, TWO)  # on CPU, offloading is a no-op
    assert code(on_cpu, True) == (True, True)
    m = measured(
        compiled=True,
        act={True: cost(1e-6), False: cost(5e-6, 100e-6)},
        learn={True: cost(1e-4), False: cost(1e-3, 20e-3)},
    )
    assert m.predict(None, {}).whole_s == pytest.approx(100 * 64 * 11e-6 + 64e-4)
    assert seconds("fused", m).update_s == pytest.approx(0.052 + CALL_S)


def test_offloading_adds_copy_time() -> None:
    """``collect`` offloads the actor, ``update`` the rollout; ``publish`` loads weights only."""
    p = plan({"env,rollout": 0, "actor": 0}, Hardware((1,), "cuda"))
    needs: dict[str, Need] = {
        "env,rollout": {"weights": 2_000_000, "activations": 9_000_000},
        "actor": {
            "weights": 2_000_000,
            "gradients": 2_000_000,
            "optimiser": 4_000_000,
            "activations": 9_000_000,
        },
    }
    m = measured(copy_byte_s=1e-9, experience_bytes=0.0, weights_bytes=0.0)
    still = measured(experience_bytes=0.0, weights_bytes=0.0).predict(p, needs)
    # collect: 2 MB, the actor's weights (the others left before publishing); update: 2 + 8 MB;
    # publish: 6 + 2 MB
    assert m.predict(p, needs).update_s - still.update_s == pytest.approx(0.020)


# ---------------------------------------------------------------------------------- best placements
def best(m: Measured, devices: int) -> str:
    hardware = Hardware((devices,))
    seconds_of: list[tuple[float, str]] = [(m.predict(None, {}).whole_s, "local")]
    for choice in legal(devices).values():
        p = plan(choice.component_placement or choice.placement, hardware, stages=choice.stages)
        seconds_of.append((m.predict(p, nothing(p)).whole_s, choice.name))
    return min(seconds_of)[1]


def test_light_work_is_fastest_in_one_process() -> None:
    light = measured(
        simulate=cost(1e-7), act={False: cost(1e-7)}, learn={False: cost(1e-6)}, message_s=1e-4
    )
    assert best(light, 2) == "local"


def test_fused_is_fastest_with_enough_cores() -> None:
    assert best(measured(message_s=1e-5, cores=2.0), 2) == "fused"


def test_two_stages_are_faster_with_heavy_simulators_and_policies() -> None:
    """Policy and simulator take long, and the learner's time does not depend on its share."""
    heavy = measured(
        simulate=cost(10e-6),
        act={False: cost(10e-6)},
        learn={False: cost(0.0, 50e-3)},
        message_s=1e-4,
    )
    one = plan({"env": 0, "rollout,actor": 1}, TWO)
    two = replace(one, stages=2)
    assert heavy.predict(two, nothing(two)).collect_s == pytest.approx(
        # halves of 320 us and half a message each, 2 x (0.32 + 0.1) ms a step
        0.084 + CALL_S
    )
    assert heavy.predict(one, nothing(one)).collect_s == pytest.approx(0.148 + CALL_S)


def test_simulators_with_fixed_cost_are_not_divided() -> None:
    """Such a cost, for example of a GPU simulator, is the same for half of the environments."""
    fixed = measured(
        simulate=cost(0.0, 1e-3), act={False: cost(0.0, 1e-4)}, learn={False: cost(0.0, 5e-3)}
    )
    assert best(fixed, 2) == "local"


def test_one_core_is_fastest_with_one_process() -> None:
    assert best(measured(cores=1.0, message_s=1e-5), 4) == "local"


def test_prediction_on_gpus() -> None:
    p = plan("hybrid", Hardware((4,), "cuda"), stages=2)
    prediction = measured().predict(p, nothing(p))
    # quarters of 64: acting 100 + 80 us, simulating 160 us: twice the busier; learning 20 + 32 ms
    assert (prediction.collect_s, prediction.update_s) == pytest.approx(
        (0.036 + CALL_S, 0.052 + CALL_S)
    )
