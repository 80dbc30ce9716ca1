"""Distributions: torch as reference, values by hand, extreme values, gradients, samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Beta, Categorical, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import TanhTransform

from embodied_envs.base.random import sampling_key
from embodied_ppo.policies import distributions as dist


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def keyed(*parts: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(sampling_key(*parts))


# ------------------------------------------------------------------------------------------ by hand
def test_gaussian_by_hand():
    # x = 3, mean 1, std 2: z = 1, log p = -1/2 - log 2 - log(2 pi)/2 = -0.5 - 0.693147 - 0.918939
    x, mean, log_std = torch.tensor([[3.0]]), torch.tensor([[1.0]]), torch.tensor([math.log(2.0)])
    assert dist.gaussian_log_prob(x, mean, log_std).item() == pytest.approx(-2.1120857)
    # H = log 2 + log(2 pi e)/2 = 0.693147 + 1.418939
    assert dist.gaussian_entropy(mean, log_std).item() == pytest.approx(2.1120857)


def test_squashed_by_hand():
    # u = 0: tanh' = 1, so log p is the Gaussian's; u = 1: log(1 - tanh(1)^2) = log(0.419974) =
    # -0.867562
    assert dist.log_tanh_slope(torch.tensor(0.0)).item() == pytest.approx(0.0, abs=1e-7)
    assert dist.log_tanh_slope(torch.tensor(1.0)).item() == pytest.approx(-0.8675616)
    zero = torch.zeros(1, 1)
    log_prob = dist.squashed_log_prob(torch.ones(1, 1), zero, zero)
    assert log_prob.item() == pytest.approx(-0.5 - 0.9189385 + 0.8675616)


def test_beta_by_hand():
    # Beta(2, 2): density 6 x (1 - x), 3/2 at x = 1/2, divided by 2 on [-1, 1].
    two = torch.full((1, 1), 2.0)
    assert dist.beta_log_prob(torch.zeros(1, 1), two, two).item() == pytest.approx(math.log(0.75))
    # log B = log(1/6), psi(2) = 0.422784, psi(4) = 1.256118:
    # H = -1.791759 - 2 * 0.422784 + 2 * 1.256118 + 0.693147
    assert dist.beta_entropy(two, two).item() == pytest.approx(0.5680544)
    # KL to the uniform distribution on [-1, 1], log 2 - H
    one = torch.ones(1, 1)
    assert dist.beta_kl(two, two, one, one).item() == pytest.approx(math.log(2) - 0.5680544)
    assert dist.beta_kl(two, two, two, two).item() == 0
    assert dist.beta_mean(3 * one, one).item() == 0.5


def test_categorical_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)]])  # p = 1/4, 3/4
    log_prob = dist.categorical_log_prob(torch.tensor([1]), logits)
    assert log_prob.item() == pytest.approx(math.log(0.75))
    # H = 1/4 log 4 + 3/4 log 4/3 = 0.346574 + 0.215762
    assert dist.categorical_entropy(logits).item() == pytest.approx(0.5623351)


# --------------------------------------------------------------------------------------- references
@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(-4, 2), st.integers(1, 5), st.integers(1, 4))
def test_gaussian_agrees_with_torch(seed, level, rows, size):
    x, mean = numbers(seed, rows, size) * 3, numbers(seed + 1, rows, size)
    log_std = numbers(seed + 2, size) + level
    reference = Normal(mean, log_std.exp().expand_as(mean))
    close(dist.gaussian_log_prob(x, mean, log_std), reference.log_prob(x))
    close(dist.gaussian_entropy(mean, log_std), reference.entropy())
    single = dist.gaussian_log_prob(x.float(), mean.float(), log_std.float())
    close(single.double(), reference.log_prob(x), 2e-5)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(-2, 0.5), st.integers(1, 4))
def test_squashed_gaussian_agrees_with_torch(seed, level, size):
    mean, log_std = numbers(seed, 3, size), numbers(seed + 1, 3, size) * 0.3 + level
    u = mean + log_std.exp() * numbers(seed + 2, 3, size)
    reference = TransformedDistribution(Normal(mean, log_std.exp()), TanhTransform(cache_size=1))
    reference.transforms[0]._cached_x_y = u, u.tanh()  # the inverse of tanh loses digits near 1
    close(dist.squashed_log_prob(u, mean, log_std), reference.log_prob(u.tanh()), 1e-6)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(0, 9), st.integers(1, 4))
def test_beta_agrees_with_torch(seed, level, size):
    """Up to alpha, beta = e^9, where float32 terms of log B would be wrong by more than 0.01."""
    alpha, beta, *other = (
        1 + (0.3 * numbers(seed + i, 3, size) + (level if i < 2 else level / 2)).exp()
        for i in range(4)
    )
    reference = Beta(alpha, beta)
    x = (alpha / (alpha + beta) + 0.1 * reference.stddev * numbers(seed + 5, 3, size)).clamp(
        0.1, 0.9
    )
    log_prob = reference.log_prob(x) - math.log(2)
    entropy = reference.entropy() + math.log(2)
    divergence = kl_divergence(reference, Beta(*other))
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        a, b, c, d = (p.to(dtype) for p in (alpha, beta, *other))
        for actual, expected in (
            (dist.beta_log_prob((2 * x - 1).to(dtype), a, b), log_prob),
            (dist.beta_entropy(a, b), entropy),
            (dist.beta_kl(a, b, c, d), divergence),
        ):
            assert actual.dtype == dtype
            torch.testing.assert_close(
                actual.double(), expected, rtol=tolerance, atol=10 * tolerance
            )


@pytest.mark.parametrize("shape", [(1.0, 1.0), (1.69, 1.69), (1.2, 30.0), (900.0, 400.0)])
def test_beta_samples_have_its_distribution_function(shape):
    """Kolmogorov-Smirnov distance of 40,000 samples; 1.95 / sqrt(n) is exceeded with p = 0.001."""
    alpha, beta = (torch.full((20_000, 2), x) for x in shape)
    samples = dist.beta_sample(alpha, beta, dist.beta_noise((20_000, 2), keyed("beta", 0)))
    assert samples.dtype == torch.float32 and samples.abs().max() < 1
    grid = torch.linspace(-1, 1, 200_001, dtype=torch.float64)
    parameters = (torch.tensor(x, dtype=torch.float64) for x in shape)
    density = dist.beta_log_prob(grid, *parameters).exp()
    cumulative = torch.cumulative_trapezoid(density, grid)
    assert cumulative[-1].item() == pytest.approx(1, abs=1e-4)  # it integrates to one
    ordered = samples.flatten().double().sort().values
    expected = cumulative[((ordered + 1) * 100_000).long().clamp(max=199_999)]
    rank = torch.arange(1, 40_001, dtype=torch.float64) / 40_000
    assert (rank - expected).abs().max() < 1.95 / 200 + 1e-3
    assert not torch.equal(samples[:, 0], samples[:, 1])


def test_beta_gradients_are_those_of_finite_differences():
    alpha, beta, c, d = (1 + numbers(i, 4, 2).exp() for i in range(4))
    action = 0.9 * numbers(4, 4, 2).tanh()
    inputs = alpha.requires_grad_(), beta.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: dist.beta_log_prob(action, a, b), inputs)
    assert torch.autograd.gradcheck(dist.beta_entropy, inputs)
    assert torch.autograd.gradcheck(lambda a, b: dist.beta_kl(c, d, a, b), inputs)


def test_beta_stays_finite_at_its_bounds():
    action = torch.tensor([-1.0, 1.0, -2.0, 0.0]).unsqueeze(1)
    for low, high in ((1.0, 1.0), (1.0, 1e6), (1e6, 1.0)):
        alpha, beta = (torch.full((4, 1), x, requires_grad=True) for x in (low, high))
        value = dist.beta_log_prob(action, alpha, beta).sum() + dist.beta_entropy(alpha, beta).sum()
        value.backward()
        for x in (value, alpha.grad, beta.grad):
            assert x is not None and x.isfinite().all()


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.floats(0.1, 30), st.integers(2, 6))
def test_categorical_agrees_with_torch(seed, scale, size):
    logits = numbers(seed, 4, size) * scale
    action = torch.arange(4) % size
    reference = Categorical(logits=logits)
    close(dist.categorical_log_prob(action, logits), reference.log_prob(action))
    close(dist.categorical_entropy(logits), reference.entropy())


def test_probabilities_integrate_to_one():
    mean, log_std = (torch.tensor(x, dtype=torch.float64) for x in ([[0.4]], [-0.3]))
    u = torch.linspace(-9, 9, 20_001, dtype=torch.float64).unsqueeze(1)
    for log_p, x in (
        (dist.gaussian_log_prob(u, mean, log_std), u),
        (dist.squashed_log_prob(u, mean, log_std), u.tanh()),
    ):
        total = torch.trapezoid(log_p.exp().flatten(), x.flatten())
        assert total.item() == pytest.approx(1.0, abs=1e-5)


# -------------------------------------------------------------------------------- entropy, gradient
def test_squashed_entropy_estimates_the_entropy():
    mean, log_std = (torch.tensor(x, dtype=torch.float64) for x in ([[0.7]], [0.2]))
    grid = torch.linspace(-12, 12, 40_001, dtype=torch.float64).unsqueeze(1)
    log_p = dist.squashed_log_prob(grid, mean, log_std)
    exact = torch.trapezoid((-log_p.exp() * log_p).flatten(), grid.tanh().flatten()).item()
    u = mean + log_std.exp() * numbers(0, 200_000, 1)
    estimate = dist.squashed_entropy(u, mean, log_std)
    error = 4 * estimate.std().item() / math.sqrt(200_000)
    assert estimate.mean().item() == pytest.approx(exact, abs=error)


@pytest.mark.parametrize("which", [0, 1])
def test_squashed_entropy_has_the_pathwise_gradient(which):
    """Compare autograd with a finite difference of the estimate at constant noise."""
    noise, values = numbers(3, 64, 2), [0.8, -0.4]

    def entropy(mean: float, log_std: float) -> float:
        u = mean + math.exp(log_std) * noise
        entropy = log_std + 0.5 * math.log(2 * math.pi * math.e) + torch.log1p(-u.tanh().square())
        return entropy.mean().item()

    parameters = [torch.full((2,), v, dtype=torch.float64, requires_grad=True) for v in values]
    mean, log_std = parameters[0].expand(64, 2), parameters[1]
    u = (mean + log_std.exp() * noise).detach()
    dist.squashed_entropy(u, mean, log_std).mean().backward()
    step = 1e-5
    low, high = list(values), list(values)
    low[which], high[which] = values[which] - step, values[which] + step
    numeric = (entropy(*high) - entropy(*low)) / (2 * step)
    grad = parameters[which].grad
    assert grad is not None and grad.sum().item() == pytest.approx(numeric, rel=1e-6)
    # The gradient of -log p of a constant sample would have expectation zero.
    assert abs(numeric) > 0.05


# ----------------------------------------------------------------------------------- extreme values
@pytest.mark.parametrize("u", [-1e4, -80.0, -20.0, 20.0, 80.0, 1e4])
@pytest.mark.parametrize("log_std", [-5.0, 2.0])
def test_extreme_actions_give_finite_results(u, log_std):
    x = torch.tensor([[u]])
    mean = torch.zeros(1, 1, requires_grad=True)
    scale = torch.full((1,), log_std, requires_grad=True)
    for log_p in (dist.gaussian_log_prob(x, mean, scale), dist.squashed_log_prob(x, mean, scale)):
        assert math.isfinite(log_p.item())
    entropy = dist.squashed_entropy(x, mean, scale)
    entropy.sum().backward()
    assert math.isfinite(entropy.item())
    assert mean.grad is not None and scale.grad is not None
    assert math.isfinite(mean.grad.item()) and math.isfinite(scale.grad.item())
    # log(1 - tanh(u)^2) -> 2 log 2 - 2|u|: linear where 1 - tanh^2 is 0 in float32
    if abs(u) >= 20:
        limit = 2 * math.log(2) - 2 * abs(u)
        assert dist.log_tanh_slope(x).item() == pytest.approx(limit, rel=1e-6)


# ----------------------------------------------------------------------------------------- sampling
def test_gaussian_samples_have_the_right_moments():
    n = 100_000
    mean, log_std = torch.tensor([[1.0, -2.0]]).expand(n, 2), torch.tensor([0.5, -1.0])
    x = dist.gaussian_sample(mean, log_std, dist.gaussian_noise((n, 2), keyed(0, 5, 0, 3)))
    std = log_std.exp()
    assert ((x.mean(0) - mean[0]).abs() < 4 * std / math.sqrt(n)).all()
    assert ((x.std(0) / std - 1).abs() < 4 / math.sqrt(2 * n)).all()
    assert abs(torch.corrcoef(x.T)[0, 1].item()) < 4 / math.sqrt(n)
    # the Kolmogorov-Smirnov distance to the normal distribution, at the level of one in a thousand
    rank = torch.arange(1, n + 1) / n
    cumulative = Normal(0.0, 1.0).cdf(((x[:, 0] - 1.0) / std[0]).sort().values)
    assert (cumulative - rank).abs().max() < 1.95 / math.sqrt(n)


def test_categorical_samples_have_the_right_frequencies():
    n, p = 100_000, torch.tensor([0.1, 0.2, 0.7])
    action = dist.categorical_sample(
        p.log().expand(n, 3) + 5.0, dist.categorical_noise((n, 3), keyed(0, "categorical"))
    )
    assert action.dtype == torch.int64 and action.shape == (n,)
    frequency = action.bincount(minlength=3) / n
    assert ((frequency - p).abs() < 4 * (p * (1 - p) / n).sqrt()).all()
