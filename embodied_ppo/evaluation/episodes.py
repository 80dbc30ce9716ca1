"""Evaluation of a policy in simulation: complete episodes from held-out seeds, with intervals."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from embodied_ppo.core import tree, watchdog
from embodied_ppo.core.intervals import wilson_interval
from embodied_ppo.core.random import TRAINING_SEEDS, sampling_key
from embodied_ppo.core.recurrent_state import EpisodeMemory, starts
from embodied_ppo.core.types import EnvError, Mean, Metrics, Obs, Policy, VectorEnv

EVAL_SEED_BASE = TRAINING_SEEDS
"""Simulator seeds of evaluations are in [EVAL_SEED_BASE, 2**31); those of training are smaller."""

EPISODES_PER_SEED = 1 << 16
"""Simulator seeds of one value of evaluation.seed; two values share no episode."""

LARGEST_SEED = (2**31 - EVAL_SEED_BASE) // EPISODES_PER_SEED - 1
"""Largest value of evaluation.seed; simulators take seeds of 31 bits."""

GROUP = 16
"""Rows of one policy call. The last bits of a matrix product depend on the number of rows, and a
sampled action on the row's index. Therefore episode i is always row i % GROUP of a call with GROUP
rows, and num_envs changes no result.
"""

MAX_STEPS = 20_000
"""Limit of steps for a task without max_episode_steps; a longer episode is an error."""


# ------------------------------------------------------------------------------------------- result
@dataclass(frozen=True, slots=True)
class Episode:
    """One evaluated episode.

    Attributes:
        index: Number of the episode, from 0.
        seed: Seed of the simulator.
        initial_state: sha256 of the first observation.
        return_: Undiscounted sum of rewards.
        length: Primitive steps.
        success: Whether any step reported success; None if the task does not report it.
        ended: Whether the task (terminated) or the time limit (truncated) ended the episode.
        kind: Entry of the simulator's ``task_names``; None if there is one kind of episode.
    """

    index: int
    seed: int
    initial_state: str
    return_: float
    length: int
    success: bool | None
    ended: Literal["terminated", "truncated"]
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Episodes of one policy in one task, in order of their index."""

    task: str
    seed: int
    deterministic: bool
    episodes: tuple[Episode, ...]
    temperature: float | None = None
    """Temperature of sampled actions; None: the policy's default."""

    @property
    def returns(self) -> list[float]:
        """Return of each episode."""
        return [e.return_ for e in self.episodes]

    @property
    def lengths(self) -> list[float]:
        """Length of each episode, in primitive steps."""
        return [float(e.length) for e in self.episodes]

    @property
    def successes(self) -> list[bool] | None:
        """Success of each episode; None if the task does not report it."""
        successes = [e.success for e in self.episodes if e.success is not None]
        return successes if len(successes) == len(self.episodes) else None

    @property
    def distinct_initial_states(self) -> int:
        """Number of different initial states, by the hash of the first observation."""
        return len({e.initial_state for e in self.episodes})

    def by_kind(self) -> list[EvaluationResult]:
        """Return one result for each kind of episode, sorted by name; [self] without kinds."""
        results = []
        for kind in sorted({e.kind for e in self.episodes if e.kind is not None}):
            episodes = tuple(e for e in self.episodes if e.kind == kind)
            results.append(replace(self, task=f"{self.task}/{kind}", episodes=episodes))
        return results or [self]

    def metrics(self) -> Metrics:
        """Return eval/return, eval/length and, if reported, eval/success and eval/success/KIND."""
        metrics: Metrics = {
            "eval/return": Mean.of(self.returns),
            "eval/length": Mean.of(self.lengths),
        }
        if self.successes is not None:
            metrics["eval/success"] = Mean.of(map(float, self.successes))
            for part in self.by_kind() if self.episodes[0].kind is not None else ():
                successes = map(float, part.successes or ())
                metrics[f"eval/success/{part.episodes[0].kind}"] = Mean.of(successes)
        return metrics

    def intervals(self) -> dict[str, list[float]]:
        """Return 95 % confidence intervals [low, high].

        The intervals are Student's for means and Wilson's for the success rate.
        """
        intervals = {
            "eval/return": mean_interval(self.returns),
            "eval/length": mean_interval(self.lengths),
        }
        if self.successes is not None:
            intervals["eval/success"] = wilson_interval(sum(self.successes), len(self.successes))
        return {tag: list(interval) for tag, interval in intervals.items() if interval is not None}


# -------------------------------------------------------------------------------------- measurement
def evaluation_seeds(seed: int, episodes: int) -> list[int]:
    """Return the simulator seeds of episodes 0 to ``episodes - 1``.

    Episode i of evaluation seed s has the simulator seed EVAL_SEED_BASE + s * EPISODES_PER_SEED +
    i. The blocks of different seeds are disjoint, so evaluations with different seeds are
    independent samples.

    Raises:
        EnvError: ``seed`` or ``episodes`` is out of range.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise EnvError(
            f"evaluation seed {seed}: must be from 0 to {LARGEST_SEED}; write seed=0 (train:"
            " evaluation.seed=0)"
        )
    if episodes > EPISODES_PER_SEED:
        raise EnvError(
            f"{episodes} evaluation episodes: one evaluation seed has {EPISODES_PER_SEED}; measure"
            " at most that many, and the others with another seed"
        )
    first = EVAL_SEED_BASE + seed * EPISODES_PER_SEED
    return list(range(first, first + episodes))


@torch.inference_mode()
def evaluate(
    policy: Policy,
    make_env: Callable[[list[int]], VectorEnv],
    *,
    episodes: int,
    num_envs: int,
    seed: int,
    deterministic: bool = True,
    temperature: float | None = None,
    on_episode: Callable[[Episode], None] | None = None,
) -> EvaluationResult:
    """Evaluate ``policy``; the same policy and seed give the same result bit for bit.

    Episode i is the first episode of an environment with seed ``evaluation_seeds(seed, ..)[i]``, so
    it depends neither on ``num_envs`` nor on ``episodes``. The environments run in blocks of
    ``num_envs``. A block runs until each of its environments has finished its first episode; later
    episodes are ignored. The observation normaliser is not updated.

    Args:
        policy: The policy; it is in evaluation mode during the call.
        make_env: Creates environments from seeds; they are closed here.
        episodes: Number of episodes.
        num_envs: Environments in one block.
        seed: Seed of the evaluation.
        deterministic: Act with the distribution's mode; False: sample, keyed by (seed, i // GROUP,
            step).
        temperature: Temperature of sampled actions, for policies that have one; None: the policy's.
        on_episode: Called when an episode ends.

    Raises:
        EnvError: An episode does not end, or a reward is not finite.
    """
    seeds = evaluation_seeds(seed, episodes)
    env: VectorEnv | None = None
    results: list[Episode] = []
    watchdog.describe(during="evaluation")
    with evaluation_mode(policy, temperature):
        try:
            for first in range(0, episodes, num_envs):
                block = seeds[first : first + num_envs]
                if env is not None and env.num_envs == len(block):
                    env.restart(block)
                else:
                    if env is not None:
                        env.close()
                    env = make_env(block)
                    set_instructions(policy, getattr(env, "instructions", ()))
                results += _run_block(env, policy, block, first, seed, deterministic, on_episode)
        finally:
            if env is not None:
                env.close()
    assert env is not None, "episodes and num_envs are at least 1"
    return EvaluationResult(env.id, seed, deterministic, tuple(results), temperature)


def _run_block(
    env: VectorEnv,
    policy: Policy,
    seeds: list[int],
    first: int,
    seed: int,
    deterministic: bool,
    on_episode: Callable[[Episode], None] | None,
) -> list[Episode]:
    """Run the first episode of each of N environments: episodes ``first`` .. ``first + N - 1``."""
    n = len(seeds)
    with watchdog.resetting:
        obs = env.reset()
    states = [fingerprint(tree.index(obs, i)) for i in range(n)]
    finished: dict[int, Episode] = {}
    running = torch.ones(n, dtype=torch.bool)  # [N] whether the first episode is running
    total = torch.zeros(n, dtype=torch.float64)  # [N] sum of rewards
    length = torch.zeros(n, dtype=torch.int64)  # [N]
    success = torch.zeros(n, dtype=torch.bool)  # [N]
    limit = env.max_episode_steps or MAX_STEPS
    names: tuple[str, ...] = getattr(env, "task_names", ())
    memory = EpisodeMemory(policy, n, policy_device(policy))
    for t in range(limit):
        action, state = act(
            policy,
            obs,
            memory,
            first=first,
            t=t,
            seed=seed,
            deterministic=deterministic,
            device=env.device,
        )
        with watchdog.stepping:
            step = env.step(action)
        obs = step.obs
        memory.store(state, starts(step))
        counted = running & step.mask.cpu()
        primitive_steps = counted if step.executed is None else counted * step.executed.cpu().sum(1)
        step_reward = step.reward.double() if step.executed is None else step.reward.double().sum(1)
        reward = step_reward.cpu().where(counted, torch.zeros((), dtype=torch.float64))
        if not bool(reward.isfinite().all()):
            i = int((~reward.isfinite()).nonzero()[0])
            raise EnvError(
                f"env.id={env.id}: reward {reward[i]:g} at step {t} of the episode with seed"
                f" {seeds[i]}"
            )
        total += reward
        length += primitive_steps
        if step.success is not None:
            success |= step.success.cpu() & counted
        terminated = step.terminated.cpu()
        ended = (terminated | step.truncated.cpu()) & counted
        for i in ended.nonzero().flatten().tolist():
            finished[i] = Episode(
                index=first + i,
                seed=seeds[i],
                initial_state=states[i],
                return_=float(total[i]),
                length=int(length[i]),
                success=None if step.success is None else bool(success[i]),
                ended="terminated" if bool(terminated[i]) else "truncated",
                kind=None if step.task is None else names[int(step.task[i])],
            )
            if on_episode is not None:
                on_episode(finished[i])
        running &= ~ended
        if not bool(running.any()):
            return [finished[i] for i in range(n)]
    i = int(running.nonzero()[0])
    raise EnvError(
        f"env.id={env.id}: the episode with seed {seeds[i]} has not ended after {limit} steps "
        f"(max_episode_steps={env.max_episode_steps}); set env.max_episode_steps"
    )


def act(
    policy: Policy,
    obs: Obs,
    memory: EpisodeMemory,
    *,
    first: int,
    t: int,
    seed: int,
    deterministic: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Return actions [N, ..] for observations [N, ..] of episodes first .. first+N-1 at step t.

    The policy is called with GROUP rows on its own device. Rows of episodes outside this block
    repeat the observation of the nearest row, and their actions are dropped. The actions are
    returned on ``device``.

    The second result is the state of a policy with memory after the step, [N, S], which the caller
    stores in ``memory``; S is 0 without memory.
    """
    n = next(tree.leaves(obs)).shape[0]
    own_device = policy_device(policy)
    generator = Generator(device=own_device)
    actions: list[Tensor] = []
    states: list[Tensor] = []
    for group in range(first // GROUP, (first + n - 1) // GROUP + 1):
        start = group * GROUP
        # The episodes of the group that are in this block are low .. high - 1.
        low, high = max(first, start), min(first + n, start + GROUP)
        rows = torch.arange(start, start + GROUP).clamp(low, high - 1) - first
        inputs = tree.map(
            lambda x, rows=rows: x[rows.to(x.device)].to(own_device), memory.attach(obs)
        )
        noise = None
        if not deterministic:
            generator.manual_seed(sampling_key(seed, "evaluate", group, t))
            noise = policy.noise(GROUP, generator)
        decision = policy.act(policy.encode(inputs), noise=noise)
        own = slice(low - start, high - start)
        actions.append(decision.action[own])
        if decision.memory is not None:
            states.append(decision.memory[own])
    return torch.cat(actions).to(device), torch.cat(states) if states else memory.state


@contextmanager
def evaluation_mode(policy: Policy, temperature: float | None = None) -> Iterator[None]:
    """Set ``eval()`` and, if given, ``temperature``; restore them and the sentences at the end."""
    previous, sentences = getattr(policy, "temperature", None), getattr(policy, "sentences", ())
    if temperature is not None:
        setattr(policy, "temperature", temperature)  # noqa: B010
    modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
    training = [m.training for m in modules]
    for m in modules:
        m.training = False
    try:
        yield
    finally:
        if temperature is not None:
            setattr(policy, "temperature", previous)  # noqa: B010
        set_instructions(policy, sentences)
        for m, flag in zip(modules, training, strict=True):
            m.training = flag


def set_instructions(policy: Policy, sentences: Sequence[str]) -> None:
    """Set the sentences that the observation "instruction" indexes, if the policy reads them."""
    if (
        sentences
        and tuple(sentences) != getattr(policy, "sentences", None)
        and hasattr(policy, "set_sentences")
    ):
        with torch.inference_mode(False):  # training uses these tensors later
            policy.set_sentences(sentences)  # pyright: ignore[reportAttributeAccessIssue]


def policy_device(policy: Policy) -> torch.device:
    """Return the device of the policy's first parameter; the CPU if it has none."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))


def fingerprint(obs: Obs) -> str:
    """Return the sha256 (hex) of an observation's bytes; those of a dictionary sorted by key."""
    digest = hashlib.sha256()
    for _, x in sorted(obs.items()) if isinstance(obs, dict) else [("", obs)]:
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- statistics
def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Return Student's interval of the mean, mean ± t(n-1) s/√n; None for n < 2 values."""
    n = len(values)
    if n < 2:
        return None
    mean = fmean(values)
    half = t_quantile(0.5 + confidence / 2, n - 1) * deviation(values) / math.sqrt(n)
    return mean - half, mean + half


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n-1 in the denominator); 0 for a single value."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = fmean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1))


def t_quantile(p: float, freedom: int) -> float:
    """Return the quantile of Student's t for 0.5 <= p < 1 and an integer ν = ``freedom``.

    The exact distribution is inverted by bisection. With θ = atan(t/√ν), P(|T| <= t) is
    (Abramowitz and Stegun 26.7.3, 26.7.4)

        ν = 1   2/π θ
        ν odd   2/π (θ + sin θ (cos θ + 2/3 cos³ θ + 2·4/(3·5) cos⁵ θ + .. up to cos^(ν-2) θ))
        ν even  sin θ (1 + 1/2 cos² θ + 1·3/(2·4) cos⁴ θ + .. up to cos^(ν-2) θ)
    """
    if not 0.5 <= p < 1 or freedom < 1:
        raise ValueError(f"quantile {p} of Student's t with {freedom} degrees of freedom")
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        low, high = (theta, high) if _t_two_sided(theta, freedom) < 2 * p - 1 else (low, theta)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def t_within(t: float, freedom: int) -> float:
    """Return P(|T| <= t) of Student's t for t >= 0 and an integer ν = ``freedom``."""
    return _t_two_sided(math.atan(t / math.sqrt(freedom)), freedom)


def _t_two_sided(theta: float, freedom: int) -> float:
    """Return P(|T| <= √ν tan θ), see ``t_quantile``."""
    sin, cos = math.sin(theta), math.cos(theta)
    odd = freedom % 2
    term, terms = (cos if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):  # the factor of the next term is (k-1)/k cos²
        terms += term
        term *= cos * cos * (k - 1) / k
        if term < 1e-18:
            break
    return 2 / math.pi * (theta + sin * terms) if odd else sin * terms
