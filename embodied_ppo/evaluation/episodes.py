"""Evaluation of a policy in simulation: complete episodes from held-out seeds, with intervals."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from embodied_envs.adapters.wrapper import EnvWrapper
from embodied_envs.base import tree, watchdog
from embodied_envs.base.action_mask import check_action_mask
from embodied_envs.base.errors import CheckpointError, EnvError
from embodied_envs.base.intervals import wilson_interval
from embodied_envs.base.observation_names import INSTRUCTION
from embodied_envs.base.random import TRAINING_SEEDS, sampling_key
from embodied_envs.types import Obs, Step, VectorEnv, starts
from embodied_ppo.core.finite import finite_rows, is_finite, wrong_number, zero_rows
from embodied_ppo.core.recurrent_state import EpisodeMemory
from embodied_ppo.core.types import Mean, Metrics, Policy
from embodied_ppo.evaluation.step_numbers import StepNumbers
from embodied_ppo.rollout.divergence import describe

# Simulator seeds of evaluations are in [EVAL_SEED_BASE, 2**31); those of training are smaller.
EVAL_SEED_BASE = TRAINING_SEEDS

# Simulator seeds of one value of option seed; two values share no episode.
EPISODES_PER_SEED = 1 << 16

# Largest value of option seed; simulators take seeds of 31 bits.
LARGEST_SEED = (2**31 - EVAL_SEED_BASE) // EPISODES_PER_SEED - 1

# Rows of one policy call. The last bits of a matrix product depend on the number of rows, and a
# sampled action on the row's index. Therefore episode i is always row i % GROUP of a call with
# GROUP rows, and num_envs changes no result.
GROUP = 16

# Limit of steps for a task without max_episode_steps; a longer episode is an error.
MAX_STEPS = 20_000


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
    # Success in the last step; ``success`` is that of any step.
    success_at_end: bool | None = None
    # Sentence of the first observation; None if the task has none.
    sentence: str | None = None
    # Name -> mean over the steps of a number of the simulator (``Step.info``).
    numbers: Mapping[str, float] = field(default_factory=dict)
    # Command -> each of its values with the mean error and the number of steps.
    tracking: Mapping[str, Sequence[tuple[float, float, int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Episodes of one policy in one task, in order of their index."""

    task: str
    seed: int
    deterministic: bool
    episodes: tuple[Episode, ...]
    # Temperature of sampled actions; None: the policy's default.
    temperature: float | None = None
    # Episodes that are not in ``episodes``, because a number of the simulator was not finite.
    diverged: int = 0

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

    @property
    def has_tasks(self) -> bool:
        """Whether the kinds of episodes are tasks of their own (``MultiTaskEnv``)."""
        return self.task.startswith("[")

    def by_kind(self) -> list[EvaluationResult]:
        """Return one result for each kind of episode, sorted by name; [self] without kinds."""
        results = []
        for kind in sorted({e.kind for e in self.episodes if e.kind is not None}):
            episodes = tuple(e for e in self.episodes if e.kind == kind)
            name = kind if self.has_tasks else f"{self.task}/{kind}"
            results.append(replace(self, task=name, episodes=episodes))
        return results or [self]

    def kinds(self) -> dict[str, EvaluationResult]:
        """Return one result for each kind of episode by its name; {} without kinds."""
        return {part.episodes[0].kind: part for part in self.by_kind() if part.episodes[0].kind}

    def numbers(self) -> dict[str, list[float]]:
        """Return name -> mean of each episode that has this number of the simulator."""
        numbers: dict[str, list[float]] = {}
        for name, x in (item for e in self.episodes for item in e.numbers.items()):
            numbers.setdefault(name, []).append(x)
        return numbers

    def metrics(self) -> Metrics:
        """Return eval/return, eval/length and, if reported, eval/success with its variants, and the
        errors of commands."""
        metrics: Metrics = {
            "eval/return": Mean.of(self.returns),
            "eval/length": Mean.of(self.lengths),
        }
        if self.diverged:
            metrics["eval/diverged"] = float(self.diverged)
        if self.successes is not None:
            metrics["eval/success"] = Mean.of(map(float, self.successes))
            at_end = [e.success_at_end for e in self.episodes]
            if None not in at_end:
                metrics["eval/success_once"] = metrics["eval/success"]
                metrics["eval/success_at_end"] = Mean.of(float(bool(x)) for x in at_end)
        errors = {k: x for k, x in self.numbers().items() if k.startswith("error_")}
        metrics |= {f"eval/{name}": Mean.of(means) for name, means in errors.items()}
        for kind, part in self.kinds().items():
            if part.successes is not None:
                metrics[f"eval/success/{kind}"] = Mean.of(map(float, part.successes))
            if self.has_tasks:
                metrics[f"eval/return/{kind}"] = Mean.of(part.returns)
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
        for kind, part in self.kinds().items():
            if self.has_tasks:
                intervals[f"eval/return/{kind}"] = mean_interval(part.returns)
            if part.successes is not None:
                successes = sum(part.successes), len(part.successes)
                intervals[f"eval/success/{kind}"] = wilson_interval(*successes)
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
            " seed=0)"
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
    skip_diverged: bool = False,
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
        skip_diverged: End an episode with an observation or reward that is not finite; it is
            counted and has no return. False: EnvError.

    Raises:
        CheckpointError: An action is not finite.
        EnvError: An episode does not end; or an observation or reward is not finite, with
            skip_diverged in all episodes.
    """
    seeds = evaluation_seeds(seed, episodes)
    env: VectorEnv | None = None
    results: list[Episode] = []
    diverged: list[str] = []
    watchdog.describe(during="evaluation")
    with evaluation_mode(policy, temperature):
        try:
            for first_episode in range(0, episodes, num_envs):
                block = seeds[first_episode : first_episode + num_envs]
                if env is not None and env.num_envs == len(block):
                    env.restart(block)
                else:
                    if env is not None:
                        env.close()
                    env = make_env(block)
                    set_instructions(policy, env.instructions)
                results += _run_block(
                    env, policy, block, first_episode, seed, deterministic, on_episode, diverged
                )
                if diverged and (not skip_diverged or len(diverged) == episodes):
                    raise EnvError(f"fix env.id={env.id}: {diverged[0]}; no result is written")
        finally:
            if env is not None:
                env.close()
    assert env is not None, "episodes and num_envs are at least 1"
    if any(e.success is not None for e in results):  # some infos have it in successes only
        flags = [(bool(e.success), bool(e.success_at_end)) for e in results]
        results = [replace(e, success=a, success_at_end=b) for e, (a, b) in zip(results, flags)]
    return EvaluationResult(env.id, seed, deterministic, tuple(results), temperature, len(diverged))


def lend(env: VectorEnv, seeds: list[int]) -> VectorEnv:
    """Return ``_LentEnvs``: the first environments of ``env``, restarted with ``seeds``."""
    return _LentEnvs(env, seeds)


class _LentEnvs(EnvWrapper):
    """The first environments of existing simulators, lent to one block of an evaluation.

    The simulators stay open when the block closes them. The environments that the block does not
    need repeat its last seed and its last action.
    """

    def __init__(self, env: VectorEnv, seeds: list[int]) -> None:
        """Start new episodes from ``seeds``, at most as many as ``env`` has environments."""
        super().__init__(env)
        self.num_envs = len(seeds)
        self.restart(seeds)

    def restart(self, seeds: list[int]) -> None:
        """Set the seeds of the next ``reset``."""
        self.env.restart([*seeds, *seeds[-1:] * (self.env.num_envs - len(seeds))])

    def reset(self) -> Obs:
        """Start the episodes."""
        return tree.index(self.env.reset(), slice(self.num_envs))

    def step(self, action: Tensor) -> Step:
        """Advance all environments; return the rows of the block."""
        unused = [action[-1:]] * (self.env.num_envs - self.num_envs)
        return tree.index(self.env.step(torch.cat([action, *unused])), slice(self.num_envs))

    def close(self) -> None:
        """Return the simulators to their owner, who closes them."""


def _run_block(
    env: VectorEnv,
    policy: Policy,
    seeds: list[int],
    first_episode: int,
    seed: int,
    deterministic: bool,
    on_episode: Callable[[Episode], None] | None,
    diverged: list[str],
) -> list[Episode]:
    """Run one episode in each of N environments; the first has number ``first_episode``.

    An episode in which a number is not finite is left out, and described in ``diverged``.
    """
    n = len(seeds)
    with watchdog.resetting:
        obs = env.reset()
    check_action_mask(env.id, env.action_spec, obs)
    states = [fingerprint(tree.index(obs, i)) for i in range(n)]
    sentences = sentences_of(env, obs)
    finished: dict[int, Episode] = {}
    running = torch.ones(n, dtype=torch.bool)  # [N] whether the first episode is running
    total = torch.zeros(n, dtype=torch.float64)  # [N] sum of rewards
    length = torch.zeros(n, dtype=torch.int64)  # [N]
    success = torch.zeros(n, dtype=torch.bool)  # [N]
    # legged_gym's episodes last one step more, except after ``reset``.
    limit = env.max_episode_steps + 1 if env.max_episode_steps else MAX_STEPS
    memory = EpisodeMemory(policy, n, policy_device(policy))
    numbers = StepNumbers(n)
    acting = {"first_episode": first_episode, "seed": seed, "deterministic": deterministic}

    def leave_out(obs: Obs, reward: Tensor, final_obs: Obs | None, ended: Tensor, t: int) -> Obs:
        """End the episodes in which a number is not finite; return finite observations."""
        if is_finite((obs, reward, final_obs)):
            return obs
        for i, number in _wrong_rows(obs, reward, final_obs, ended).items():
            if running[i]:
                diverged.append(f"{number} at step {t} of the episode with seed {seeds[i]}")
                running[i] = False
        return zero_rows(obs, ~finite_rows(obs))

    obs = leave_out(obs, total, None, ~running, 0)
    for t in range(limit):
        action, state = act(policy, obs, memory, t=t, **acting)
        with watchdog.stepping:
            step = env.step(action.to(env.device))
        check_action_mask(env.id, env.action_spec, step.obs, step)
        memory.store(state, starts(step))
        counted = running & step.mask.cpu()
        step_reward = step.reward.double() if step.executed is None else step.reward.double().sum(1)
        reward = step_reward.cpu().where(counted, 0.0)
        terminated = step.terminated.cpu()
        ended = (terminated | step.truncated.cpu()) & counted
        obs = leave_out(step.obs, reward, step.final_obs, ended, t)
        counted, ended = counted & running, ended & running
        primitive_steps = counted if step.executed is None else counted * step.executed.cpu().sum(1)
        total += reward
        length += primitive_steps
        numbers.add(step, counted)
        if step.success is not None:
            success |= step.success.cpu() & counted
        at_end = step.success if step.success_at_end is None else step.success_at_end
        for i in ended.nonzero().flatten().tolist():
            finished[i] = Episode(
                index=first_episode + i,
                seed=seeds[i],
                initial_state=states[i],
                return_=float(total[i]),
                length=int(length[i]),
                success=None if step.success is None else bool(success[i]),
                ended="terminated" if bool(terminated[i]) else "truncated",
                kind=None if step.task is None else env.task_names[int(step.task[i])],
                success_at_end=None if at_end is None else bool(at_end[i]),
                sentence=sentences[i] if sentences else None,
                numbers=numbers.means(i),
                tracking=numbers.tracking(i),
            )
            if on_episode is not None:
                on_episode(finished[i])
        running &= ~ended
        if not bool(running.any()):
            return [finished[i] for i in sorted(finished)]
    i = int(running.nonzero()[0])
    raise EnvError(
        f"env.id={env.id}: the episode with seed {seeds[i]} has not ended after {limit} steps "
        f"(max_episode_steps={env.max_episode_steps}); set env.max_episode_steps"
    )


def _wrong_rows(obs: Obs, reward: Tensor, final_obs: Obs | None, ended: Tensor) -> dict[int, str]:
    """Return the first number that is not finite of each environment that has one.

    The observation of an environment whose episode has ``ended`` belongs to the next episode if
    there is a ``final_obs``.
    """
    wrong = ~finite_rows(obs).cpu()
    if final_obs is not None:
        wrong = torch.where(ended, ~finite_rows(final_obs).cpu(), wrong)
    wrong |= ~finite_rows(reward)
    return {i: describe(reward, obs, final_obs, i) for i in wrong.nonzero().flatten().tolist()}


def act(
    policy: Policy,
    obs: Obs,
    memory: EpisodeMemory,
    *,
    first_episode: int,
    t: int,
    seed: int,
    deterministic: bool,
    size: int = GROUP,
) -> tuple[Tensor, Tensor]:
    """Return actions [N, ..] for observations [N, ..] of N episodes at step t.

    The episodes have the numbers ``first_episode`` to ``first_episode`` + N - 1.

    The policy is called with ``size`` rows on its own device. Rows of episodes outside this block
    repeat the observation of the nearest row, and their actions are dropped. The actions
    are returned on this device.

    The second result is the state of a policy with memory after the step, [N, S], which the caller
    stores in ``memory``; S is 0 without memory.

    Raises:
        CheckpointError: An action is not finite.
        EnvError: An observation is not finite.
    """
    if not is_finite(obs):
        row = int((~finite_rows(obs)).nonzero()[0])
        raise EnvError(
            f"fix the simulator: {wrong_number(obs, 'observation', row)} at step {t} of episode"
            f" {first_episode + row}"
        )
    n = next(tree.leaves(obs)).shape[0]
    own_device = policy_device(policy)
    generator = Generator(device=own_device)
    actions: list[Tensor] = []
    states: list[Tensor] = []
    for group in range(first_episode // size, (first_episode + n - 1) // size + 1):
        start = group * size
        # The episodes of the group that are in this block are low .. high - 1.
        low, high = max(first_episode, start), min(first_episode + n, start + size)
        rows = torch.arange(start, start + size).clamp(low, high - 1) - first_episode
        inputs = tree.map(
            lambda x, rows=rows: x[rows.to(x.device)].to(own_device), memory.attach(obs)
        )
        noise = None
        if not deterministic:
            generator.manual_seed(sampling_key(seed, "evaluate", group, t))
            noise = policy.noise(size, generator)
        decision = policy.act(policy.encode(inputs), noise=noise)
        if not is_finite(decision.action) or bool(decision.log_prob.isnan().any()):
            raise CheckpointError(
                "use an earlier checkpoint: the policy's action is not finite for finite"
                " observations, so its weights are too large"
            )
        own = slice(low - start, high - start)
        actions.append(decision.action[own])
        if decision.memory is not None:
            states.append(decision.memory[own])
    return torch.cat(actions), torch.cat(states) if states else memory.state


@contextmanager
def evaluation_mode(policy: Policy, temperature: float | None = None) -> Iterator[None]:
    """Set ``eval()`` and, if given, ``temperature``; restore them and the sentences at the end."""
    previous, sentences = getattr(policy, "temperature", None), getattr(policy, "sentences", ())
    if temperature is not None:
        setattr(policy, "temperature", temperature)  # noqa: B010
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    training = {m: m.training for m in modules}
    for m in training:
        m.training = False
    try:
        yield
    finally:
        if temperature is not None:
            setattr(policy, "temperature", previous)  # noqa: B010
        set_instructions(policy, sentences)
        for m, flag in training.items():
            m.training = flag


def sentences_of(env: VectorEnv, obs: Obs) -> list[str]:
    """Return the sentence that each environment's observation refers to, [] without any."""
    if not env.instructions:
        return []
    index = obs.get(INSTRUCTION) if isinstance(obs, dict) else None
    return [env.instructions[i] for i in ([0] * env.num_envs if index is None else index.tolist())]


def set_instructions(policy: Policy, sentences: Sequence[str]) -> None:
    """Set the sentences that the observation "instruction" indexes, if the policy reads them."""
    if (
        sentences
        and tuple(sentences) != getattr(policy, "sentences", None)
        and hasattr(policy, "set_sentences")
    ):
        with torch.inference_mode(False):  # training uses these tensors later
            policy.set_sentences(sentences)  # pyright: ignore[reportAttributeAccessIssue]


def policy_device(policy: Policy | None) -> torch.device:
    """Return the device of the policy's first parameter; the CPU if there is none."""
    parameters = policy.parameters() if isinstance(policy, nn.Module) else iter(())
    return next((p.device for p in parameters), torch.device("cpu"))


def fingerprint(obs: Obs) -> str:
    """Return the sha256 (hex) of an observation's bytes; those of a dictionary sorted by key."""
    digest = hashlib.sha256()
    for _, x in sorted(obs.items()) if isinstance(obs, dict) else [("", obs)]:
        x = x.float() if x.dtype == torch.float64 else x  # as other observations
        digest.update(x.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- statistics
def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's 95 % interval of the mean, mean ± t(n-1) s/√n; None for n < 2 values."""
    n = len(values)
    if n < 2:
        return None
    mean = fmean(values)
    half = t_quantile(0.975, n - 1) * deviation(values) / math.sqrt(n)
    return mean - half, mean + half


def deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation (n-1 in the denominator); 0 for a single value."""
    n = len(values)
    if n < 2:
        return 0.0
    mean = fmean(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (n - 1))


@functools.cache
def t_quantile(p: float, freedom: int) -> float:
    """Return the quantile of Student's t for 0.5 <= p < 1 and an integer ν = ``freedom``.

    The exact distribution is inverted by bisection. With θ = atan(t/√ν), P(|T| <= t) is
    (Abramowitz and Stegun 26.7.3, 26.7.4)

        ν = 1   2/π θ
        ν odd   2/π (θ + sin θ (cos θ + 2/3 cos³ θ + 2·4/(3·5) cos⁵ θ + .. up to cos^(ν-2) θ))
        ν even  sin θ (1 + 1/2 cos² θ + 1·3/(2·4) cos⁴ θ + .. up to cos^(ν-2) θ)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        theta = (low + high) / 2
        low, high = (theta, high) if _t_two_sided(theta, freedom) < 2 * p - 1 else (low, theta)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


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
