"""Collection of trajectories: a policy acts in simulated environments."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Generator as Steps
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Generator, Tensor, nn

from embodied_ppo.core import compile, tree, watchdog
from embodied_ppo.core.random import env_seeds, sampling_key
from embodied_ppo.core.tree import apply_in_parts
from embodied_ppo.core.types import (
    Decision,
    Mean,
    Metrics,
    Obs,
    Policy,
    Step,
    TrainingError,
    Trajectory,
    VectorEnv,
)

T = TypeVar("T")
WINDOW = 100
"""Finished episodes over which rollout/return, length and success are averaged."""


def _check_finite(values: Obs, id: str, update: int, name: str) -> None:
    """Raise TrainingError if a tensor [T, N, ..] is not finite; ``name`` is "observation" or
    "reward".
    """
    for x in tree.leaves(values):
        # A sum keeps NaN and infinity and is cheaper than isfinite() on every element. It may
        # overflow.
        if not x.is_floating_point() or math.isfinite(float(x.sum())) or bool(x.isfinite().all()):
            continue
        t, i, *index = (~x.isfinite()).nonzero()[0].tolist()
        raise TrainingError(
            f"env.id={id}: {name} {f'{index} ' if index else ''}of environment {i} is"
            f" {float(x[t, i][tuple(index)])} (update {update}, step {t}); nothing was trained on"
            " it; fix the simulator, or resume the last checkpoint"
        )


class _Act(nn.Module):
    """``policy.act`` as a forward method, so that ``functional_call`` can pass the parameters as
    tensors.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        assert isinstance(policy, nn.Module)
        self.policy = policy

    def forward(self, obs: Obs, noise: Tensor) -> Decision:
        return self.policy.act(self.policy.encode(obs), noise=noise)


class ActProgram:
    """``policy.act`` as a function of tensors: (weights, noise, observation's leaves) -> the
    decision's leaves.
    """

    def __init__(self, policy: Policy, obs: Obs) -> None:
        """Create the program for observations with the structure of ``obs``."""
        self.module = _Act(policy)
        self.obs = tree.map(lambda x: x.new_empty(0), obs)
        self.names = list(self._weights())

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def weights(self) -> list[Tensor]:
        """Return parameters and buffers. The optimizer changes them in place."""
        return [x.detach() for x in self._weights().values()]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        noise, *leaves = tensors[len(self.names) :]
        rest = iter(leaves)
        obs = tree.map(lambda _: next(rest), self.obs)
        weights = dict(zip(self.names, tensors, strict=False))
        return tuple(tree.leaves(torch.func.functional_call(self.module, weights, (obs, noise))))


class Acting:
    """The policy's ``encode`` and ``act``, as eager code first and later as compiled code."""

    def __init__(
        self, policy: Policy, later: compile.CompileSchedule, rows: int | None = None
    ) -> None:
        """Run at most ``rows`` observations in one forward pass of eager code; None: all."""
        self.policy, self.later, self.rows = policy, later, rows
        self.weights: list[Tensor] = []
        self.structure: Any = None  # a Decision, whose leaves ``stack`` replaces

    def __call__(self, obs: Obs, noise: Tensor, update: int) -> list[Tensor]:
        """Return the leaves of a Decision; the action is the first."""
        run = self.later.get(update, lambda: self._program(obs, noise))
        if run is not None:
            return run([*self.weights, noise, *(x.contiguous() for x in tree.leaves(obs))])
        self.structure = apply_in_parts(self._act, self.rows, obs, noise)
        return list(tree.leaves(self.structure))

    def _act(self, obs: Obs, noise: Tensor) -> Decision:
        return self.policy.act(self.policy.encode(obs), noise=noise)

    def stack(self, decisions: list[list[Tensor]]) -> Decision:
        """Stack T decisions [N, ..] to one [T, N, ..]."""
        leaves = iter([torch.stack(xs) for xs in zip(*decisions, strict=True)])
        return tree.map(lambda _: next(leaves), self.structure)

    def _program(self, obs: Obs, noise: Tensor) -> compile.Example:
        """Return the program to compile with example inputs."""
        program = ActProgram(self.policy, obs)
        self.weights = program.weights()
        self.structure = self._act(obs, noise)
        return compile.Example(
            program, self.weights, [noise, *(x.contiguous() for x in tree.leaves(obs))]
        )


Experience: TypeAlias = "tuple[Trajectory, Metrics]"


def split_by_action(
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    executed: Tensor,
) -> dict[str, Tensor]:
    """Return the fields of a trajectory with an entry for each action of a chunk, [T, N, C].

    V of the action that follows inside the chunk is the successor's value; the last executed action
    has the decision's successor and its flags.

    Args:
        value: [T, N, C], V of each action, given the observation that the chunk was decided on.
        next_value: [T, N], V of the decision's true successor.
        terminated: [T, N]; ``truncated`` and ``mask`` likewise.
        executed: [T, N, C], the actions before the end of the episode.
    """
    following = torch.cat([executed[..., 1:], torch.zeros_like(executed[..., :1])], dim=-1)
    last = executed & ~following
    inside = torch.cat(
        [value[..., 1:], value[..., :1]], dim=-1
    )  # the last column is never selected
    return {
        "next_value": torch.where(last, next_value.unsqueeze(-1), inside),
        "terminated": terminated.unsqueeze(-1) & last,
        "truncated": truncated.unsqueeze(-1) & last,
        "mask": mask.unsqueeze(-1) & executed,
    }


def begin_step(env: VectorEnv, action: Tensor) -> Callable[[], Step]:
    """Pass an action to the simulator and return a function that waits for the step.

    A simulator in another process (it has ``send`` and ``receive``) runs until then; a local one
    runs in that function.
    """
    send = getattr(env, "send", None)
    if send is None:

        def step() -> Step:
            with watchdog.stepping:
                return env.step(action)

        return step
    send(action)
    return env.receive  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def interleave(runs: Sequence[Steps[None, None, Experience]]) -> list[Experience]:
    """Return the results of ``Rollout.collecting`` generators of equal length.

    They take turns: while the simulator of one runs, the policy acts for the next.
    """
    results: list[Experience] = []
    while len(results) < len(runs):
        for run in runs:
            try:
                next(run)
            except StopIteration as end:
                results.append(end.value)
    return results


class Rollout:
    """Collects trajectories from one vector environment and keeps the state of its episodes."""

    one_state = False

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        seed: int,
        group_size: int = 1,
        one_episode: bool = False,
        restart_every: int = 0,
        stagger: bool = False,
        gamma: float = 1.0,
        rows: int | None = None,
        later: compile.CompileSchedule | None = None,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        """Create a rollout of ``policy`` in ``env``.

        Args:
            env: N environments, which this object closes.
            policy: The policy that acts.
            seed: Seed of the run.
            group_size: Environments that share a seed.
            one_episode: Start new episodes in every ``collect``; only the first of each environment
                counts.
            restart_every: Steps after which a simulator that cannot save its state starts new
                episodes (0: never). Such a simulator is resumed by replaying all actions since its
                last restart.
            stagger: Truncate the first episode of environment i after i/N of the time limit.
                Otherwise, in tasks whose episodes always last until the time limit, all N
                environments would stay in the same phase.
            gamma: Discount of the rewards inside an action chunk, if a chunk has one reward.
            rows: Maximum of observations in one forward pass of the policy; None: all.
            later: Schedule of the switch to compiled code; None: never.
            stage: Index of the part of all environments that ``env`` is.
            stages: Number of such parts, in all processes.
        """
        self.env, self.policy, self.seed, self.gamma = env, policy, seed, gamma
        self.group_size, self.one_episode, self.restart_every = (
            group_size,
            one_episode,
            restart_every,
        )
        limit = env.max_episode_steps if stagger and group_size == 1 and not one_episode else None
        self.first, self.total = stage * env.num_envs, stages * env.num_envs
        cut_step = (
            (self.first + torch.arange(env.num_envs)) * (limit or 0) // self.total
        )  # [N], 0: not cut
        self.cuts = {int(t): cut_step == t for t in cut_step.unique() if t > 0}
        self.steps = 0  # of each environment, since the last restart
        self.cpu_s = {"simulate": 0.0, "act": 0.0}  # CPU seconds of this process since its start
        self.simulate_s = 0.0  # wall time since the start
        self.device = env.device
        self.rows = rows
        self.acting = Acting(policy, later or compile.CompileSchedule(None), rows)
        self.generator = Generator(device=self.device)
        self.obs: Obs | None = None
        self.can_save: bool | None = (
            None  # whether the simulator can save its state; None: unknown yet
        )
        self.running = torch.zeros(
            3, env.num_envs
        )  # return, length, success of the current episodes
        self.finished: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self.has_success = False
        self.round = 0  # the update whose seeds the simulator was restarted with
        # [T, N, ..] of every collect since the restart, for replay, unless the simulator can save
        # its state.
        self.actions: list[Tensor] = []

    def restart(self, round_: int) -> None:
        """Start new episodes everywhere, from seeds derived from (seed, round_).

        Current episodes are dropped.
        """
        seeds = env_seeds(self.seed, round_, self.total, self.group_size)
        with watchdog.resetting:
            self.env.restart(seeds[self.first : self.first + self.env.num_envs])
        self.obs, self.round, self.actions, self.steps = None, round_, [], 0

    def _cut(self, step: Step) -> tuple[Step, Tensor | None]:
        """Truncate episodes that are staggered to end at this step; return the step and bool [N] of
        those.
        """
        self.steps += 1
        cut = self.cuts.get(self.steps)
        if cut is None:
            return step, None
        cut = cut.to(self.device) & step.mask & ~(step.terminated | step.truncated)
        with watchdog.resetting:
            fresh = self.env.reset_where(cut) if bool(cut.any()) else None
        if fresh is None:
            return step, None

        def choose(yes: Tensor, no: Tensor) -> Tensor:
            return torch.where(cut.view(-1, *[1] * (no.ndim - 1)), yes, no)

        final = step.obs if step.final_obs is None else tree.map(choose, step.obs, step.final_obs)
        obs, truncated = tree.map(choose, fresh, step.obs), step.truncated | cut
        return replace(step, obs=obs, truncated=truncated, final_obs=final), cut

    def collect(self, horizon: int, *, update: int, version: int) -> Experience:
        """Take ``horizon`` steps in every environment.

        Args:
            horizon: Steps, T.
            update: Index of the update, from which random numbers are derived.
            version: Version of the policy's weights.

        Returns:
            Trajectory [T, N, ..], and the metrics of finished episodes.
        """
        return interleave([self.collecting(horizon, update=update, version=version)])[0]

    def collecting(
        self, horizon: int, *, update: int, version: int
    ) -> Steps[None, None, Experience]:
        """As ``collect``, but as a generator that yields while the simulator runs."""
        env, policy = self.env, self.policy
        watchdog.describe(env_id=env.id, during=f"update {update}")
        is_due = (
            self.restart_every
            and self.can_save is False
            and self.steps + horizon > self.restart_every
        )
        if self.one_episode or (is_due and self.steps):
            self.restart(update)
        if self.obs is None:
            with watchdog.resetting:
                self.obs = env.reset()
            self.running.zero_()
        if self.can_save is None:
            self.can_save = env.state() is not None
        decisions: list[list[Tensor]] = []
        observed: list[Obs] = []
        steps: list[Step] = []
        cuts: dict[int, Tensor] = {}
        now = time.process_time()
        keys = [sampling_key(self.seed, update, 0, t) for t in range(horizon)]
        # Noise is drawn for the environments of all stages and then sliced, so that the noise of an
        # environment does not depend on the number of stages. It is drawn before the loop, while
        # the CPU caches are warm.
        own = slice(self.first, self.first + env.num_envs)
        noises = [policy.noise(self.total, self.generator.manual_seed(key))[own] for key in keys]
        for t, noise in enumerate(noises):
            decision = self.acting(self.obs, noise, update)
            before, now = now, time.process_time()
            self.cpu_s["act"] += now - before
            wait_for_step = begin_step(env, decision[0])
            yield
            now, wait_start = (
                time.process_time(),
                time.perf_counter(),
            )  # excludes the other stages' time
            step, cut = self._cut(wait_for_step())
            before, now = now, time.process_time()
            self.cpu_s["simulate"] += now - before
            self.simulate_s += time.perf_counter() - wait_start
            if cut is not None:
                cuts[t] = cut.cpu()
            observed.append(self.obs)
            decisions.append(decision)
            steps.append(step)
            self.obs = step.obs
        d, obs = self.acting.stack(decisions), tree.stack(observed)
        _check_finite(obs, env.id, update, "observation")
        if not self.can_save and not self.one_episode:
            self.actions.append(d.action)
        reward, mask = torch.stack([s.reward for s in steps]), torch.stack([s.mask for s in steps])
        _check_finite(reward, env.id, update, "reward")
        terminated, truncated = (
            torch.stack([s.terminated for s in steps]),
            torch.stack([s.truncated for s in steps]),
        )
        ended = terminated | truncated
        if self.one_episode:
            mask = mask & (ended.cumsum(0) - ended.long() == 0)  # up to and including the first end
        flags = [s.executed for s in steps if s.executed is not None]
        executed = torch.stack(flags) if flags else None  # [T, N, C]
        count = None if executed is None else executed.sum(-1)  # [T, N]
        length = mask if count is None else count * mask
        undiscounted = reward if count is None else reward.sum(-1)
        metrics = self._count_episodes(
            undiscounted, ended & mask, length, [s.success for s in steps], cuts
        )
        per_action = (
            d.value.ndim == 3
        )  # each action of a chunk has a value, and so a reward and an advantage
        if count is not None and not per_action:
            # One reward per chunk: sum over c of gamma^c r_c.
            reward = reward @ self.gamma ** torch.arange(
                reward.shape[-1], dtype=reward.dtype, device=reward.device
            )
        trajectory = Trajectory(
            obs=obs,
            action=d.action,
            log_prob=d.log_prob,
            value=d.value,
            replay=d.replay,
            next_value=self._next_value(d.value[..., 0] if per_action else d.value, steps),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            mask=mask,
            version=torch.full_like(mask, version, dtype=torch.int64),
            steps=None if per_action else count,
        )
        if per_action:
            assert executed is not None
            fields = split_by_action(
                d.value, trajectory.next_value, terminated, truncated, mask, executed
            )
            trajectory = replace(trajectory, **fields)
        return trajectory, metrics

    def _value(self, obs: Obs) -> Tensor:
        """Return V [N] of raw observations; V of the first action if each action of a chunk has a
        value.
        """
        value = apply_in_parts(
            lambda part: self.policy.value(self.policy.encode(part)), self.rows, obs
        )
        return value if value.ndim == 1 else value[:, 0]

    def _next_value(self, value: Tensor, steps: list[Step]) -> Tensor:
        """Return V of every row's true successor, [T, N].

        The successor is the observation of row t+1, or ``final_obs`` if the simulator started a new
        episode in the same step.
        """
        assert self.obs is not None
        next_value = torch.cat([value[1:], self._value(self.obs).unsqueeze(0)])
        ended = torch.stack([s.terminated | s.truncated for s in steps])
        for t, any_ended in enumerate(ended.any(1).tolist()):  # one synchronisation with a GPU
            final_obs = steps[t].final_obs
            if any_ended and final_obs is not None:
                next_value[t] = torch.where(ended[t], self._value(final_obs), next_value[t])
        return next_value

    def _count_episodes(
        self,
        reward: Tensor,
        ended: Tensor,
        length: Tensor,
        success: list[Tensor | None],
        cuts: Mapping[int, Tensor],
    ) -> Metrics:
        """Add the episodes that ended in these steps to the window; return their number and the
        window's means.

        ``length`` [T, N] counts primitive steps. ``cuts`` maps a row to the environments whose
        episode was cut for staggering; these episodes are not counted.
        """
        reward, ended, length = reward.cpu(), ended.cpu(), length.cpu().float()
        count = 0
        for t in range(reward.shape[0]):
            self.running[0] += reward[t]
            self.running[1] += length[t]
            step_success = success[t]
            if step_success is not None:
                self.has_success = True
                self.running[2] = torch.maximum(self.running[2], step_success.cpu().float())
            finished = ended[t]
            if t in cuts:
                self.running[:, cuts[t]] = 0.0
                finished = finished & ~cuts[t]
            for i in finished.nonzero().flatten().tolist():
                episode_return, steps, episode_success = self.running[:, i].tolist()
                self.finished.append((episode_return, steps, episode_success))
                self.running[:, i] = 0.0
                count += 1
        metrics: Metrics = {"rollout/episodes": float(count)}
        unstable = getattr(self.env, "unstable", None)
        if unstable is not None:
            metrics["rollout/unstable"] = float(unstable)
        if self.finished:
            metrics["rollout/return"] = Mean.of(e[0] for e in self.finished)
            metrics["rollout/length"] = Mean.of(e[1] for e in self.finished)
            if self.has_success:
                metrics["rollout/success"] = Mean.of(e[2] for e in self.finished)
        return metrics

    def close(self) -> None:
        """End compilation and close the simulator."""
        self.acting.later.close()
        self.env.close()

    def state(self) -> dict[str, Any]:
        """Return the state for resuming: that of the simulator, or all actions since its last
        restart.
        """
        return {
            "env": self.env.state(),
            "round": self.round,
            "steps": self.steps,
            "actions": torch.cat(self.actions).cpu() if self.actions else None,  # [L, N, ..]
            "obs": self.obs,
            "running": self.running.clone(),
            "finished": list(self.finished),
            "has_success": self.has_success,
        }

    def load_state(
        self, state: Mapping[str, Any], *, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        """Continue from ``state``.

        If replaying the actions does not reproduce the last observation, new episodes start and
        ``notice`` is called.
        """
        self.finished = deque((tuple(e) for e in state["finished"]), maxlen=WINDOW)
        self.has_success = state["has_success"]
        self.can_save = state["env"] is not None
        if state["env"] is not None:
            self.obs, self.steps = self.env.load_state(state["env"]), state["steps"]
        else:
            self.restart(state["round"])
            if state["actions"] is None:
                return
            actions = state["actions"].to(self.device)
            notice(f"resume: replaying {len(actions)} steps of the simulator")
            watchdog.describe(env_id=self.env.id, during="resume")
            with watchdog.resetting:
                self.obs = self.env.reset()
            for action in actions:
                self.obs = self._cut(begin_step(self.env, action)())[0].obs
            self.actions = [actions]
            replayed, saved = (
                tree.leaves(tree.map(Tensor.cpu, obs)) for obs in (self.obs, state["obs"])
            )
            if not all(map(torch.equal, replayed, saved)):
                notice("resume: the simulator did not repeat itself; its episodes begin anew")
                return self.restart(state["round"])
        self.running = state["running"].clone()


def add_metrics(metrics: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of several rollouts: add ``Mean`` objects (sums and counts) and numbers."""
    merged: Metrics = {}
    for part in metrics:
        for tag, value in part.items():
            before = merged.get(tag)
            merged[tag] = value if before is None else before + value  # pyright: ignore[reportOperatorIssue]
    return merged


class Staged:
    """Several rollouts that take turns: while the simulator of one runs, the policy acts for the
    next.
    """

    one_state = False

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = list(rollouts)

    @property
    def cpu_s(self) -> dict[str, float]:
        return {
            phase: sum(r.cpu_s[phase] for r in self.rollouts) for phase in self.rollouts[0].cpu_s
        }

    def collect(self, horizon: int, *, update: int, version: int) -> Experience:
        """As ``Rollout.collect``; the environments of the stages are concatenated."""
        results = interleave(
            [r.collecting(horizon, update=update, version=version) for r in self.rollouts]
        )
        trajectories, metrics = zip(*results, strict=True)
        trajectory = tree.map(lambda *xs: torch.cat(xs, dim=1), trajectories[0], *trajectories[1:])
        return trajectory, add_metrics(metrics)

    def state(self) -> dict[str, Any]:
        return {"stages": [r.state() for r in self.rollouts]}

    def load_state(
        self, state: Mapping[str, Any], *, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        """Continue from ``state`` of as many stages."""
        for r, s in zip(self.rollouts, state["stages"], strict=True):
            r.load_state(s, notice=notice)

    def close(self) -> None:
        for r in self.rollouts:
            r.close()
