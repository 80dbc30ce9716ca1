"""Slow references of the numerics: float64 loops over Python numbers, from the formulas.

Arguments are nested lists, time first. Masked rows are removed from their column before anything is
computed.
"""

from __future__ import annotations

import math
from statistics import fmean, variance


def columns(x):
    """Transpose [T][N] to [N][T]."""
    return [list(column) for column in zip(*x, strict=True)]


rows = columns


def gae(
    reward,
    value,
    next_value,
    terminated,
    truncated,
    mask,
    *,
    gamma,
    gae_lambda,
    steps=None,
    bootstrap_type="standard",
):
    """Return (advantage, returns), each [T][N], column by column."""
    T, N = len(reward), len(reward[0])
    advantage = [[0.0] * N for _ in range(T)]
    returns = [list(map(float, row)) for row in value]
    for n in range(N):
        real = [t for t in range(T) if mask[t][n]]
        carry = 0.0
        for i in reversed(range(len(real))):
            t = real[i]
            done = terminated[t][n] or truncated[t][n]
            successor = next_value[t][n]
            if not done and t + 1 < T and not mask[t + 1][n] and i + 1 < len(real):
                # A masked row inside an episode: continue with the next unmasked row.
                successor = value[real[i + 1]][n]
            never = done if bootstrap_type == "never" else terminated[t][n]
            if never and bootstrap_type != "always":
                successor = 0.0
            k = 1 if steps is None else steps[t][n]
            delta = reward[t][n] + gamma**k * successor - value[t][n]
            carry = delta + (0.0 if done else (gamma * gae_lambda) ** k * carry)
            advantage[t][n] = carry
            returns[t][n] = carry + value[t][n]
    return advantage, returns


def return_to_go(reward, done, mask, *, gamma):
    """Return the discounted sum of rewards until the end of the episode, [T][N]."""
    T, N = len(reward), len(reward[0])
    returns = [[0.0] * N for _ in range(T)]
    for n in range(N):
        following = 0.0
        for t in reversed(range(T)):
            if mask[t][n]:
                following = reward[t][n] + (0.0 if done[t][n] else gamma * following)
                returns[t][n] = following
    return returns


def discounted_returns(reward, done, mask, *, gamma, start):
    """Return the running return at unmasked rows, and the state after the last row."""
    returns, state = [], list(start)
    for t in range(len(reward)):
        for n in range(len(state)):
            if mask[t][n]:
                state[n] = gamma * state[n] + reward[t][n]
                returns.append(state[n])
                if done[t][n]:
                    state[n] = 0.0
    return returns, state


def grpo(score, group_size, *, normalize_std=True, eps=1e-6):
    """Return (score - mean) / (std + eps) within each group."""
    advantages = []
    for g in range(0, len(score), group_size):
        group = score[g : g + group_size]
        scale = math.sqrt(variance(group)) + eps if normalize_std else 1.0
        advantages += [(s - fmean(group)) / scale for s in group]
    return advantages


def rloo(score, group_size):
    """Return the score minus the mean of the others in its group."""
    advantages = []
    for g in range(0, len(score), group_size):
        group = score[g : g + group_size]
        for i, s in enumerate(group):
            advantages.append(s - fmean(group[:i] + group[i + 1 :]))
    return advantages


def standardise(x, mask):
    """Return (x - mean) / sqrt(variance + 1e-8), unbiased, over unmasked [T][N]; 0 elsewhere."""
    kept = [v for row, m in zip(x, mask, strict=True) for v, k in zip(row, m, strict=True) if k]
    mean, scale = fmean(kept), math.sqrt(variance(kept) + 1e-8)
    return [
        [(v - mean) / scale if k else 0.0 for v, k in zip(row, keep, strict=True)]
        for row, keep in zip(x, mask)
    ]


def policy_loss(lp, old, advantage, mask, *, low, high, c=None):
    """Return the loss of each element, the sums (clipped, dual, k3, count), the largest ratio.

    All lists are flat.
    """
    loss, clipped, dual, k3, count, largest = [], 0, 0, 0.0, 0, 0.0
    for new, before, a, keep in zip(lp, old, advantage, mask, strict=True):
        if not keep:
            loss.append(0.0)
            continue
        log_r = min(max(new - before, -20.0), 20.0)
        r = math.exp(log_r)
        inside = min(max(r, 1 - low), 1 + high)
        l = max(-a * r, -a * inside)
        clipped += -a * inside > -a * r
        if c is not None and a < 0 and l > -a * c:
            l, dual = -a * c, dual + 1
        loss.append(l)
        k3 += r - 1 - log_r
        count += 1
        largest = max(largest, r)
    return loss, (clipped, dual, k3, count), largest


def huber(e, delta):
    """Return the Huber loss of an error, e² / 2 without ``delta``."""
    return 0.5 * e * e if delta is None or abs(e) <= delta else delta * (abs(e) - 0.5 * delta)


def value_loss(value, old, returns, *, clip, delta):
    """Return (loss, whether it is clipped) of each element of flat lists."""
    loss, flags = [], []
    for v, before, r in zip(value, old, returns, strict=True):
        plain = huber(r - v, delta)
        if clip is None:
            loss.append(plain)
            flags.append(False)
        else:
            near = before + min(max(v - before, -clip), clip)
            loss.append(max(plain, huber(r - near, delta)))
            flags.append(abs(v - before) > clip)
    return loss, flags


def aggregate(x, mask, *, aggregation, length=1.0):
    """Return one number from lists of trailing elements [T][B]."""
    per_column = []
    for b in range(len(mask[0])):
        kept = [v for t in range(len(mask)) if mask[t][b] for v in x[t][b]]
        if kept:
            per_column.append(kept)
    if aggregation == "trajectory-mean":  # empty columns count
        return sum(fmean(column) for column in per_column) / len(mask[0])
    if not per_column:
        return 0.0
    if aggregation == "token-mean":
        return fmean([v for column in per_column for v in column])
    if aggregation == "seq-mean-token-sum":
        return fmean([sum(column) for column in per_column])
    if aggregation == "seq-mean-token-mean":
        return fmean([fmean(column) for column in per_column])
    return fmean([sum(column) / length for column in per_column])


def kl(lp, ref, kind):
    """Return the estimator ``kind`` of KL from two log-probabilities."""
    d = lp - ref
    if kind == "k1":
        return d
    if kind == "abs":
        return abs(d)
    if kind == "k2":
        return d * d / 2
    d = min(max(d, -20.0), 20.0)
    return min(max(math.exp(-d) - 1 + d, -10.0), 10.0)


def categorical_kl(p, q):
    """Return KL(p || q) of two categorical distributions."""
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
