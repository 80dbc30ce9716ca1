"""Losses: hand-computed cases, float64 references, gradients, invariance to splits and padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference_numerics
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied_envs.base.errors import ConfigError
from embodied_ppo.ppo import losses

CLIP: dict[str, Any] = {"low": 0.2, "high": 0.2}
WIDE = {"low": 0.1, "high": 0.4}
ALL = torch.ones(1, dtype=torch.bool)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0)


AGGREGATIONS = (
    *("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "trajectory-mean",
)


def policy_loss(
    log_prob: torch.Tensor,
    old: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    ratio_level: str = "token",
    batch_dims: int = 1,
    **options: Any,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the surrogate of each element and the statistics, as ``PPOLoss`` computes them."""
    ratio, log_ratio = losses.probability_ratio(
        log_prob, old, mask, level=ratio_level, batch_dims=batch_dims
    )
    loss, clipped, dual = losses.clipped_surrogate(ratio, log_prob, advantage, mask, **options)
    flags = {"clip_fraction": clipped.sum(), "dual_clip_fraction": dual.sum()}
    return loss, flags | losses.ratio_statistics(ratio, log_ratio, mask)


def counts_of(mask: torch.Tensor, aggregation: str) -> dict[str, torch.Tensor | None]:
    """Return the arguments rows and columns of ``aggregate``."""
    counts = losses.minibatch_counts(mask, "column", aggregation)
    return dict(zip(("rows", "columns"), counts, strict=True))


def share_of(mask: torch.Tensor, aggregation: str) -> torch.Tensor | None:
    """Return the argument share of ``aggregate``."""
    return losses.column_shares(mask) if aggregation == "trajectory-mean" else None


def loss_of(
    ratio: float, advantage: float, **options: Any
) -> tuple[float, dict[str, float], float]:
    """Loss, statistics and d loss / d log-prob of one element whose probability ratio is
    ``ratio``.
    """
    lp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, a = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss, stats = policy_loss(lp, old, a, ALL, **{**CLIP, **options})
    loss.sum().backward()
    assert lp.grad is not None
    return loss.item(), {name: s.item() for name, s in stats.items()}, lp.grad.item()


# ------------------------------------------------------------------------------------------- policy
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "options"),
    [
        (1.1, 2.0, -2.2, -2.2, 0, CLIP),  # inside: -A·r, and d/dlp = -A·r
        (1.5, 2.0, -2.4, 0.0, 1, CLIP),  # max(-3, -2·1.2): clipped, no gradient
        (0.5, 2.0, -1.0, -1.0, 0, CLIP),  # max(-1, -1.6): worse than clipped, so it may recover
        (0.5, -2.0, 1.6, 0.0, 1, CLIP),  # max(1, 2·0.8)
        (1.5, -2.0, 3.0, 3.0, 0, CLIP),  # max(3, 2.4)
        (1.5, 0.0, 0.0, 0.0, 0, CLIP),
        (1.3, 1.0, -1.3, -1.3, 0, WIDE),  # 1.3 < 1 + 0.4
        (1.5, 1.0, -1.4, 0.0, 1, WIDE),
        (0.85, -1.0, 0.9, 0.0, 1, WIDE),  # max(0.85, 1 - 0.1)
    ],
)
def test_policy_loss_by_hand(ratio, advantage, loss, gradient, clipped, options):
    value, stats, grad = loss_of(ratio, advantage, **options)
    assert value == pytest.approx(loss)
    assert grad == pytest.approx(gradient)
    assert stats["clip_fraction"] == clipped
    assert stats["ratio_max"] == pytest.approx(ratio)
    assert stats["approx_kl"] == pytest.approx(ratio - 1 - math.log(ratio))  # k3: 1.5 -> 0.0945
    assert stats["count"] == 1


def mean_ratio_loss(
    rows: list[list[float]], advantage: list[list[float]], mask: torch.Tensor, level: str, dims: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Losses, gradients and statistics of log-ratios ``rows`` [T, B]."""
    lp = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    a = torch.tensor(advantage, dtype=torch.float64)
    loss, stats = policy_loss(
        lp, torch.zeros_like(lp), a, mask, **CLIP, ratio_level=level, batch_dims=dims
    )
    loss.sum().backward()
    assert lp.grad is not None
    return loss.detach(), lp.grad, stats


def test_sequence_ratio_by_hand():
    """GSPO: s is the geometric mean of the ratios of a column."""
    # Column 0: ratios 1.21 and 1, s = sqrt(1.21) = 1.1, inside the range: each loss is -A·s = -2.2.
    # Column 1: ratio 2 and a masked 9, s = 2, clipped at 1.2 with A = 1: the loss is -1.2.
    # Column 2: without a response.
    rows = [[math.log(1.21), math.log(2.0), math.nan], [0.0, math.log(9.0), math.inf]]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    loss, gradient, stats = mean_ratio_loss(rows, [[2.0, 1.0, 1.0]] * 2, mask, "sequence", 2)
    close(loss, torch.tensor([[-2.2, -1.2, 0.0], [-2.2, 0.0, 0.0]]).double())
    # d loss_t / d lp_t = -A·s where it is not clipped.
    close(gradient, torch.tensor([[-2.2, 0.0, 0.0], [-2.2, 0.0, 0.0]]).double())
    assert stats["clip_fraction"] == 1 and stats["count"] == 3
    assert stats["ratio_max"].item() == pytest.approx(2.0)


def test_chunk_ratio_by_hand():
    """The ratio of a decision is the geometric mean over its actions, [B, C]."""
    rows = [[math.log(1.21), 0.0], [math.log(0.5), math.log(2.0)]]
    loss, gradient, _ = mean_ratio_loss(
        rows, [[2.0, 2.0], [3.0, 3.0]], torch.ones(2, 2).bool(), "chunk", 1
    )
    close(loss, torch.tensor([[-2.2, -2.2], [-3.0, -3.0]]).double())  # s = 1.1 and 1
    close(gradient, torch.tensor([[-2.2, -2.2], [-3.0, -3.0]]).double())


@pytest.mark.parametrize("seed", range(4))
def test_sequence_ratio_has_the_gradient_of_gspo(seed):
    """Mean over the tokens of a response = the loss of the response, by autograd in float64."""
    g = generator(seed)
    lp, old = (torch.randn(5, 6, generator=g, dtype=torch.float64) * 0.3 for _ in range(2))
    mask = torch.arange(5).unsqueeze(1) < torch.randint(1, 6, (6,), generator=g)
    advantage = torch.randn(6, generator=g, dtype=torch.float64)
    x, y = lp.clone().requires_grad_(), lp.clone().requires_grad_()
    elements, _ = policy_loss(
        x, old, advantage.expand(5, 6), mask, **CLIP, ratio_level="sequence", batch_dims=2
    )
    loss = losses.aggregate(elements, mask, aggregation="seq-mean-token-mean")
    loss.backward()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(6):  # GSPO, eq. 5: min(s·A, clip(s)·A), one term of each response
        own = mask[:, i]
        s = ((y[own, i] - old[own, i]).sum() / own.sum()).exp()
        total = total - torch.minimum(s * advantage[i], s.clamp(0.8, 1.2) * advantage[i])
    (total / 6).backward()
    assert x.grad is not None and y.grad is not None
    close(x.grad, y.grad, 1e-12)
    close(loss.detach(), (total / 6).detach(), 1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [
        (1.1, 2.0, 1.1, 0),
        (1.5, 2.0, 1.2, 1),  # PPO's gradient would be 0
        (0.5, -2.0, 0.8, 1),
        (1.5, -2.0, 1.2, 1),  # PPO would not clip it
    ],
)
def test_cispo_by_hand(ratio, advantage, weight, clipped):
    """The loss is -A·w·lp with w = clip(r, 0.8, 1.2), and its gradient -A·w."""
    loss, stats, gradient = loss_of(ratio, advantage, kind="cispo", dual=1.01)
    assert loss == pytest.approx(-advantage * weight * math.log(ratio))
    assert gradient == pytest.approx(-advantage * weight)
    assert stats["clip_fraction"] == clipped and stats["dual_clip_fraction"] == 0


def test_dual_clip_applies_to_negative_advantages_only():
    # A = -2, r = 5: max(10, 2.4) = 10, bounded by 2·3 = 6, without gradient
    loss, stats, grad = loss_of(5.0, -2.0, dual=3.0)
    assert (loss, stats["dual_clip_fraction"], grad) == (pytest.approx(6.0), 1, 0.0)
    assert loss_of(5.0, -2.0)[0] == pytest.approx(10.0)  # off
    assert loss_of(2.0, -2.0, dual=3.0)[:2][0] == pytest.approx(4.0)  # below the bound
    for c in (None, 3.0):  # A > 0: r = 5 is clipped as ever, and -A·c is no bound
        loss, stats, _ = loss_of(5.0, 2.0, dual=c)
        assert (loss, stats["dual_clip_fraction"]) == (pytest.approx(-2.4), 0)


def test_log_ratio_is_clamped():
    new, old = torch.tensor([500.0, -500.0, 3.0]), torch.zeros(3)
    log_ratio = losses.probability_ratio(new, old, torch.ones(3).bool(), batch_dims=1)[1]
    assert log_ratio.tolist() == [20.0, -20.0, 3.0]
    loss, stats = policy_loss(new, old, -torch.ones(3), torch.ones(3, dtype=torch.bool), **CLIP)
    assert loss.isfinite().all()
    assert stats["ratio_max"].item() == pytest.approx(math.exp(20), rel=1e-6)


element = st.tuples(*(st.floats(-x, x, width=32) for x in (30, 5, 4)), st.booleans())


@settings(max_examples=80)
@given(
    st.lists(element, min_size=1, max_size=12),
    st.floats(0.01, 0.9),
    st.floats(0.01, 0.9),
    st.none() | st.floats(1.5, 5),
)
def test_policy_loss_equals_reference(elements, low, high, c):
    lp, old, advantage, mask = (list(x) for x in zip(*elements, strict=True))
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (lp, old, advantage))
    loss, stats = policy_loss(*tensors, mask=torch.tensor(mask), low=low, high=high, dual=c)
    expected, (clipped, dual, k3, count), largest = reference_numerics.policy_loss(
        lp, old, advantage, mask, low=low, high=high, c=c
    )
    assert loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert stats["clip_fraction"].item() == clipped
    assert stats["dual_clip_fraction"].item() == dual
    assert stats["approx_kl"].item() == pytest.approx(k3, rel=1e-6, abs=1e-9)
    assert stats["ratio_max"].item() == pytest.approx(largest, rel=1e-9)
    assert stats["count"].item() == count


def test_masked_elements_have_no_loss_and_no_gradient():
    lp = torch.tensor([0.1, float("nan"), float("-inf"), 9.0], requires_grad=True)
    mask = torch.tensor([True, False, False, False])
    advantage = torch.tensor([1.0, float("nan"), 2.0, -3.0])
    loss, stats = policy_loss(
        lp, torch.zeros(4), advantage, mask, **CLIP, weight=torch.full((4,), 0.5)
    )
    losses.aggregate(loss, mask).backward()
    assert lp.grad is not None
    assert lp.grad.tolist() == pytest.approx([-0.5 * math.exp(0.1), 0.0, 0.0, 0.0])
    assert loss.tolist() == pytest.approx([-0.5 * math.exp(0.1), 0.0, 0.0, 0.0])
    assert (stats["count"].item(), stats["ratio_max"].item()) == (1, pytest.approx(math.exp(0.1)))


def test_policy_loss_of_fully_masked_batch():
    lp = torch.randn(3, requires_grad=True)
    none = torch.zeros(3, dtype=torch.bool)
    loss, stats = policy_loss(lp, torch.zeros(3), torch.ones(3), none, **CLIP)
    total = losses.aggregate(loss, none)
    total.backward()
    assert lp.grad is not None
    assert total.item() == 0.0 and lp.grad.abs().sum().item() == 0.0
    assert {name: s.item() for name, s in stats.items()} == dict.fromkeys(stats, 0.0)


def test_advantages_broadcast_over_finer_log_probabilities():
    g = generator()
    lp, old = torch.randn(5, 3, 2, generator=g) * 0.3, torch.randn(5, 3, 2, generator=g) * 0.3
    advantage, mask = torch.randn(5, generator=g), torch.tensor([True, True, False, True, True])
    loss, stats = policy_loss(lp, old, advantage, mask, **CLIP)
    for c in range(3):
        for a in range(2):
            one, _ = policy_loss(lp[:, c, a], old[:, c, a], advantage, mask, **CLIP)
            torch.testing.assert_close(loss[:, c, a], one)
    assert stats["count"].item() == 4 * 3 * 2
    per_action, _ = policy_loss(
        lp, old, advantage[:, None].expand(5, 3), mask[:, None].expand(5, 3), **CLIP
    )
    torch.testing.assert_close(per_action, loss)


# ------------------------------------------------------------------------------------------- levels
def test_reduce_log_prob():
    x = torch.arange(12.0).reshape(2, 3, 2)  # [B, C, A]
    assert losses.reduce_log_prob(x, "token_level", batch_dims=1) is x
    expected = [[1, 5, 9], [13, 17, 21]]
    assert losses.reduce_log_prob(x, "action_level", batch_dims=1).tolist() == expected
    assert losses.reduce_log_prob(x, "chunk_level", batch_dims=1).tolist() == [15, 51]
    actions = x.sum(-1)  # [B, C]
    assert losses.reduce_log_prob(actions, "action_level", batch_dims=1) is actions
    assert losses.reduce_log_prob(actions, "chunk_level", batch_dims=1).tolist() == [15, 51]
    for level in ("token_level", "action_level", "chunk_level"):  # [T, B] is as coarse as it gets
        assert losses.reduce_log_prob(actions, level, batch_dims=2) is actions
    with pytest.raises(ConfigError, match=r"token_level: cannot be computed from .*\(2, 3\)"):
        losses.reduce_log_prob(actions, "token_level", batch_dims=1)


# -------------------------------------------------------------------------------------------- value
def test_value_loss_by_hand():
    value, old = torch.tensor([1.0, 1.0, 0.1, 1.0]), torch.zeros(4)
    returns = torch.tensor([2.0, 0.0, 1.0, -12.0])
    loss, flags = losses.value_loss(value, old, returns, value_clip=0.2, huber_delta=10.0)
    # V_c = 0.2: max(½·1², ½·1.8²) = 1.62 ; max(½·1², ½·0.2²) = 0.5 ; V_c = V = 0.1: ½·0.9² = 0.405
    # e = -13: 10·(13 − 5) = 80 against e_c = -12.2: 10·(12.2 − 5) = 72
    assert loss.tolist() == pytest.approx([1.62, 0.5, 0.405, 80.0])
    assert flags.tolist() == [True, True, False, True]
    loss, flags = losses.value_loss(value, old, returns, value_clip=None, huber_delta=None)
    assert loss.tolist() == pytest.approx([0.5, 0.5, 0.405, 84.5]) and not flags.any()


def test_value_loss_gradient():
    value = torch.tensor([0.1, 1.0, 1.0, 1.0], requires_grad=True)
    returns = torch.tensor([1.0, 2.0, 0.0, -20.0])
    loss, _ = losses.value_loss(value, torch.zeros(4), returns, value_clip=0.2, huber_delta=10.0)
    loss.sum().backward()
    assert value.grad is not None
    # unclipped: V − R = -0.9 ; the clipped branch is larger: 0 ; plain is larger: V − R = 1 ;
    # linear part: δ = 10
    assert value.grad.tolist() == pytest.approx([-0.9, 0.0, 1.0, 10.0])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(*[st.floats(-40, 40, width=32)] * 3), min_size=1, max_size=12),
    st.none() | st.floats(0.05, 2),
    st.none() | st.floats(0.1, 20),
)
def test_value_loss_equals_reference(elements, clip, delta):
    value, old, returns = (list(x) for x in zip(*elements, strict=True))
    loss, flags = losses.value_loss(
        *(torch.tensor(x, dtype=torch.float64) for x in (value, old, returns)),
        value_clip=clip,
        huber_delta=delta,
    )
    expected, clipped = reference_numerics.value_loss(value, old, returns, clip=clip, delta=delta)
    assert loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert flags.tolist() == clipped


# -------------------------------------------------------------------------------------- aggregation
def test_aggregate_by_hand():
    x = torch.tensor([[1.0, 10.0, 7.0], [2.0, 99.0, 7.0], [3.0, 99.0, 7.0]])
    # 3 tokens, 1 token, an empty sequence
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    by_hand = {
        "token-mean": 16 / 4,  # (1 + 2 + 3 + 10)/4
        "seq-mean-token-sum": (6 + 10) / 2,  # the empty sequence does not count
        "seq-mean-token-mean": (2 + 10) / 2,
        "seq-mean-token-sum-norm": (6 / 8 + 10 / 8) / 2,
        # shares 3/3 and 3/1 of 9 rows: (1·1 + 1·2 + 1·3 + 3·10)/9 = (2 + 10 + 0)/3
        "trajectory-mean": 4.0,
    }
    for aggregation, expected in by_hand.items():
        share = share_of(mask, aggregation)
        loss = losses.aggregate(x, mask, aggregation=aggregation, length=8, share=share)
        assert loss.item() == pytest.approx(expected), aggregation
    # Minibatches of steps: (1·1 + 3·10 + 0)/3, (1·2 + 1·3 + 0)/3 and 0. Their mean is 4, too.
    share = losses.column_shares(mask)
    steps = [((0, 0), (0, 1), (0, 2)), ((1, 0), (2, 0), (1, 1)), ((1, 2), (2, 1), (2, 2))]
    parts = []
    for index in steps:
        take = tuple(torch.tensor(index).T)
        kind = {"aggregation": "trajectory-mean", "share": share[take]}
        parts.append(losses.aggregate(x[take], mask[take], **kind).item())
    assert parts == pytest.approx([31 / 3, 5 / 3, 0.0])
    assert [float(x) for x in losses.minibatch_counts(mask, "column")] == [4, 2]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 2)])
def test_aggregate_equals_reference(aggregation, trailing):
    g = generator(1)
    x = torch.randn(6, 5, *trailing, generator=g)
    mask = torch.rand(6, 5, generator=g) < 0.6
    mask[:, 2] = False
    expected = reference_numerics.aggregate(
        x.reshape(6, 5, -1).tolist(), mask.tolist(), aggregation=aggregation, length=6
    )
    share = share_of(mask, aggregation)
    loss = losses.aggregate(x, mask, aggregation=aggregation, length=6, share=share)
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("trailing", [(), (2, 3)])
@pytest.mark.parametrize("micro", [1, 2, 3, 5, 8])
def test_micro_batch_size_does_not_change_result(aggregation, trailing, micro):
    g = generator(2)
    x = torch.randn(7, 8, *trailing, generator=g)
    mask = torch.rand(7, 8, generator=g) < torch.linspace(0, 1, 8)  # ragged, column 0 empty
    assert not mask[:, 0].any()
    unsplit = x.clone().requires_grad_()
    parts = x.clone().requires_grad_()
    share = share_of(mask, aggregation)
    losses.aggregate(unsplit, mask, aggregation=aggregation, length=7, share=share).backward()
    counts = counts_of(mask, aggregation)
    total = 0.0
    for columns in torch.arange(8).split(micro):
        options = counts | {"share": None if share is None else share[:, columns]}
        elements = parts[:, columns], mask[:, columns]
        part = losses.aggregate(*elements, aggregation=aggregation, length=7, **options)
        part.backward()
        total += part.item()
    unsplit_loss = losses.aggregate(x, mask, aggregation=aggregation, length=7, share=share)
    assert total == pytest.approx(unsplit_loss.item(), abs=1e-6)
    assert unsplit.grad is not None
    torch.testing.assert_close(parts.grad, unsplit.grad, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_number_of_ranks_does_not_change_loss(aggregation):
    """The denominators of two ranks, one of them fully masked, add up to that of all columns."""
    g = generator(3)
    x, mask = torch.randn(5, 6, generator=g), torch.rand(5, 6, generator=g) < 0.5
    mask[:, 4:] = False
    cuts = [slice(0, 4), slice(4, 6)]
    counts = [losses.minibatch_counts(mask[:, c], "column", aggregation) for c in cuts]
    share = losses.column_shares(mask) if aggregation == "trajectory-mean" else torch.ones(5, 6)
    rows, columns = (torch.stack(x).sum() for x in zip(*counts, strict=True))  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {"aggregation": aggregation, "length": 5}
    full = losses.aggregate(x, mask, share=share, **options).item()
    options |= {"rows": rows, "columns": columns}
    parts = [losses.aggregate(x[:, c], mask[:, c], share=share[:, c], **options) for c in cuts]
    assert sum(part.item() for part in parts) == pytest.approx(full, abs=1e-6)


# --------------------------------------------------------------------------------------- off policy
def test_off_policy_weight_by_hand():
    trainer = torch.tensor([[0.5, 0.0], [-0.2, 1.0], [9.0, 9.0]]).log1p()  # only differences matter
    rollout = torch.tensor([[0.5, 0.0], [-0.2, 1.0], [0.0, 0.0]]).log1p() - torch.tensor(
        [[0.3, 0.1], [-0.5, 5.0], [0, 0]]
    )
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]], dtype=torch.bool)
    token = losses.off_policy_weight(trainer, rollout, mask, kind="token")
    # e^5 is capped at 2
    expected = [[math.exp(0.3), math.exp(0.1)], [math.exp(-0.5), 2.0], [1.0, 1.0]]
    torch.testing.assert_close(token, torch.tensor(expected))
    # columns: 0.3 − 0.5 = −0.2 and 0.1 + 5 = 5.1, capped
    sequence = losses.off_policy_weight(trainer, rollout, mask, kind="sequence", cap=3.0)
    torch.testing.assert_close(
        sequence, torch.tensor([[math.exp(-0.2), 3.0], [math.exp(-0.2), 3.0], [1.0, 1.0]])
    )


def test_off_policy_weight_of_finer_log_probs():
    g = generator()
    trainer = torch.randn(3, 2, 2, generator=g, requires_grad=True)
    rollout = torch.randn(3, 2, 2, generator=g)
    mask = torch.ones(3, 2, dtype=torch.bool)
    weight = losses.off_policy_weight(trainer, rollout, mask, kind="sequence", cap=1e9)
    assert weight.shape == (3, 2, 2) and not weight.requires_grad
    torch.testing.assert_close(weight[1, :, 0], (trainer - rollout).detach().sum((0, 2)).exp())
