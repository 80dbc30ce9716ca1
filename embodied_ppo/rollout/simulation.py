"""Collection of trajectories: a policy acts in simulated environments."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from embodied_ppo.core import compile, tree, watchdog
from embodied_ppo.core.random import env_seeds, sampling_key
from embodied_ppo.core.recurrent_state import EpisodeMemory, starts, with_memory
from embodied_ppo.core.tree import apply_in_parts
from embodied_ppo.core.types import (
    ConfigError,
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
from embodied_ppo.rollout.group_filter import GroupFilter

WINDOW = 100
"""Smallest number of episodes over which rollout/return, length and success are averaged, once so
many have finished."""
Experience: TypeAlias = "tuple[Trajectory, Metrics]"


def _check_finite(values: Obs, id: str, update: int, name: str) -> None:
    """Raise TrainingError if a tensor [T, N, ..] is not finite."""
    numbers = [x for x in tree.leaves(values) if x.is_floating_point()]
    # A sum keeps NaN and infinity and is cheaper than isfinite() on every element. Finite elements
    # may overflow it, so a sum that is not finite needs the second test.
    if not numbers or math.isfinite(float(sum(x.sum() for x in numbers))):
        return
    for x in numbers:
        if bool(x.isfinite().all()):
            continue
        t, i, *index = (~x.isfinite()).nonzero()[0].tolist()
        raise TrainingError(
            f"env.id={id}: {name} {f'{index} ' if index else ''}of environment {i} is"
            f" {float(x[t, i][tuple(index)])} (update {update}, step {t}); nothing was trained on"
            " it; fix the simulator, or resume the last checkpoint"
        )


class _Act(nn.Module):
    """``policy.act`` as a forward method, which ``functional_call`` needs."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        assert isinstance(policy, nn.Module)
        self.policy = policy

    def forward(self, obs: Obs, noise: Tensor) -> Decision:
        return self.policy.act(self.policy.encode(obs), noise=noise)


class ActProgram:
    """``policy.act`` as a function of tensors.

    Inputs are the weights, the noise and the observation's leaves; outputs are the leaves of the
    decision.
    """

    def __init__(self, policy: Policy, obs: Obs) -> None:
        """Create the program for observations with the structure of ``obs``."""
        self.module = _Act(policy)
        self.obs = tree.map(lambda x: x.new_empty(0), obs)
        self.names = list(self._weights())

    def _weights(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name."""
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def weights(self) -> list[Tensor]:
        """Return parameters and buffers. The optimizer changes them in place."""
        return [x.detach() for x in self._weights().values()]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        noise, *obs_leaves = tensors[len(self.names) :]
        leaves = iter(obs_leaves)
        obs = tree.map(lambda _: next(leaves), self.obs)
        weights = dict(zip(self.names, tensors, strict=False))
        return tuple(tree.leaves(torch.func.functional_call(self.module, weights, (obs, noise))))


class Acting:
    """The policy's ``encode`` and ``act``, as eager code first and later as compiled code."""

    def __init__(
        self,
        policy: Policy,
        schedule: compile.CompileSchedule,
        rows: int | None = None,
        kept_inputs: Sequence[str] = (),
    ) -> None:
        """Run at most ``rows`` observations in one forward pass of eager code; None: all."""
        self.policy, self.schedule, self.rows = policy, schedule, rows
        self.kept_inputs = kept_inputs
        self.kept: dict[str, Tensor] = {}
        """Inputs ``kept_inputs`` of the last call, which was eager."""
        self.weights: list[Tensor] = []
        self.structure: Any = None  # a Decision, whose leaves ``stack`` replaces

    def __call__(self, obs: Obs, noise: Tensor, update: int) -> list[Tensor]:
        """Return the leaves of a Decision; the action is the first."""
        compiled = self.schedule.get(update, lambda: self._program(obs, noise))
        if compiled is not None:
            return compiled([*self.weights, noise, *(x.contiguous() for x in tree.leaves(obs))])
        self.structure, self.kept = apply_in_parts(self._act, self.rows, obs, noise)
        return list(tree.leaves(self.structure))

    def _act(self, obs: Obs, noise: Tensor) -> tuple[Decision, dict[str, Tensor]]:
        """Run the policy eagerly; return the decision, and the inputs to keep."""
        inputs = self.policy.encode(obs)
        kept = {name: inputs[name] for name in self.kept_inputs}
        return self.policy.act(inputs, noise=noise), kept

    def stack(self, decisions: list[list[Tensor]]) -> Decision:
        """Stack T decisions [N, ..] to one [T, N, ..]."""
        leaves = iter([torch.stack(xs) for xs in zip(*decisions, strict=True)])
        return tree.map(lambda _: next(leaves), self.structure)

    def _program(self, obs: Obs, noise: Tensor) -> compile.Example:
        """Return the program to compile with example inputs."""
        program = ActProgram(self.policy, obs)
        self.weights = program.weights()
        self.structure, _ = self._act(obs, noise)
        inputs = [noise, *(x.contiguous() for x in tree.leaves(obs))]
        return compile.Example(program, self.weights, inputs)


def split_by_action(
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor,
    executed: Tensor,
) -> dict[str, Tensor]:
    """Return the fields of a trajectory with one entry for each action of a chunk, [T, N, C].

    The next value of an action is the value of the next action of the chunk. The last executed
    action has the decision's next value and flags.

    Args:
        value: [T, N, C], V of each action, given the observation of the chunk's decision.
        next_value: [T, N], V of the decision's true successor.
        terminated: [T, N].
        truncated: [T, N].
        mask: [T, N].
        executed: [T, N, C], the actions before the end of the episode.
    """
    following = torch.cat([executed[..., 1:], torch.zeros_like(executed[..., :1])], dim=-1)
    last = executed & ~following
    shifted = value.roll(-1, dims=-1)  # ``where`` never selects the last column
    return {
        "next_value": torch.where(last, next_value.unsqueeze(-1), shifted),
        "terminated": terminated.unsqueeze(-1) & last,
        "truncated": truncated.unsqueeze(-1) & last,
        "mask": mask.unsqueeze(-1) & executed,
    }


def begin_step(env: VectorEnv, action: Tensor) -> Callable[[], Step]:
    """Pass an action to the simulator and return a function that waits for the step.

    A simulator with ``send`` and ``receive`` runs in the meantime, in another process or in threads
    of its own. Others run in the returned function.
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
def interleave(runs: Sequence[Generator[None, None, Experience]]) -> list[Experience]:
    """Return the results of ``Rollout.collecting`` generators of equal length, run interleaved."""
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
    """Whether all processes share one rollout state."""

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        seed: int,
        group_size: int = 1,
        filter_rounds: int = 0,
        one_episode: bool = False,
        restart_every: int = 0,
        stagger: bool = False,
        gamma: float = 1.0,
        rows: int | None = None,
        kept_inputs: Sequence[str] = (),
        schedule: compile.CompileSchedule | None = None,
        stage: int = 0,
        stages: int = 1,
    ) -> None:
        """Create a rollout of ``policy`` in ``env``.

        Args:
            env: N environments, which this object closes.
            policy: The policy that acts.
            seed: Seed of the run.
            group_size: Environments that share a seed.
            filter_rounds: Rounds in which ``collect`` may run all environments to fill a batch with
                groups of unequal success; 0: groups are not filtered. Needs one_episode, and all
                environments in this rollout.
            one_episode: Start new episodes in every ``collect`` and mask all but the first of each
                environment.
            restart_every: Steps after which a simulator that cannot save its state starts new
                episodes; 0: never. Such a simulator is resumed by replaying all actions since its
                last restart.
            stagger: Truncate the first episode of environment i after i/N of the time limit.
                Otherwise, in tasks whose episodes always last until the time limit, all N
                environments would stay in the same phase. Ignored with group_size > 1 or
                one_episode.
            gamma: Discount of the rewards inside an action chunk, if a chunk has one reward.
            rows: Largest number of observations in one forward pass of the policy; None: all.
            kept_inputs: Inputs of the policy to keep, see ``Trajectory.kept``.
            schedule: Schedule of the switch to compiled code; None: never.
            stage: Index of ``env`` among the equal parts of all environments.
            stages: Number of these parts, in all processes.
        """
        self.env, self.policy, self.seed, self.gamma = env, policy, seed, gamma
        self.group_size, self.one_episode = group_size, one_episode
        self.filter: GroupFilter | None = None
        if filter_rounds:
            assert one_episode and stages == 1
            self.filter = GroupFilter(env.num_envs // group_size, group_size, filter_rounds)
        # Of the newest round of ``filter``: success of each first episode, bool [N], and the number
        # of simulated steps.
        self.outcome = (torch.zeros(env.num_envs, dtype=torch.bool), 0)
        self.restart_every = restart_every
        limit = env.max_episode_steps if stagger and group_size == 1 and not one_episode else None
        self.first, self.total = stage * env.num_envs, stages * env.num_envs
        # [N], the step that ends each environment's first episode; 0: none
        cut_step = (self.first + torch.arange(env.num_envs)) * (limit or 0) // self.total
        self.cut_step = cut_step.to(env.device)
        self.cuts = {t for t in cut_step.tolist() if t > 0}
        self.steps = 0  # of each environment, since the last restart
        self.cpu_s = {"simulate": 0.0, "act": 0.0}  # CPU seconds since the start
        self.cpu_clock = time.process_time  # measures them
        self.simulate_s = 0.0  # wall time since the start
        self.device = env.device
        self.rows = rows
        schedule = schedule or compile.CompileSchedule(None)
        self.acting = Acting(policy, schedule, rows, kept_inputs)
        self._stopped = False
        self.generator = torch.Generator(device=self.device)
        self.obs: Obs | None = None
        self.memory = EpisodeMemory(policy, env.num_envs, self.device)
        self.can_save: bool | None = None  # whether the simulator can save its state, once known
        # Return, length and success of the current episodes.
        self.running = torch.zeros(3, env.num_envs)
        # Return, length and success so far after every row, [T, 3, N], see ``_count_episodes``.
        # Kept between calls, because the allocation of pinned memory is slow.
        self.totals = torch.empty(0)
        self.finished: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self.has_success = False
        self.round = 0  # the update whose seeds the simulator was restarted with
        # [T, N, ..] of every collect since the restart, if the simulator cannot save its state.
        self.actions: list[Tensor] = []

    def restart(self, round_: int, repeat: int = 0) -> None:
        """Start new episodes in all environments, from seeds derived from (seed, round_).

        ``repeat`` is the round of a filtered rollout. Each round numbers its environments after
        those of the round before, so that their seeds differ.
        """
        first = repeat * self.total + self.first
        seeds = env_seeds(self.seed, round_, first + self.env.num_envs, self.group_size)
        with watchdog.resetting:
            self.env.restart(seeds[first:])
        self.obs, self.round, self.actions, self.steps = None, round_, [], 0
        self.memory.reset()

    def _begin_truncated_step(self, action: Tensor) -> Callable[[], tuple[Step, Tensor | None]]:
        """Pass an action to the simulator, and truncate episodes that are staggered to end now.

        Returns:
            A function that waits for the step. It returns the step and the mask of truncated
            environments, bool [N], or None. With ``truncate_next`` an episode that is due and
            diverges in this step is among them.
        """
        self.steps += 1
        due = self.cut_step == self.steps if self.steps in self.cuts else None
        truncate_next = getattr(self.env, "truncate_next", None)
        if due is not None and truncate_next is not None:
            truncate_next(due)
        wait_for_step = begin_step(self.env, action)

        def finish() -> tuple[Step, Tensor | None]:
            step = wait_for_step()
            if due is None:
                return step, None
            if truncate_next is not None:
                return step, due & step.mask & step.truncated
            return self._truncate(step, due)

        return finish

    def _truncate(self, step: Step, due: Tensor) -> tuple[Step, Tensor | None]:
        """Truncate episodes after a step, where bool [N], unless they ended in it.

        Return the step and the mask of truncated environments, bool [N], or None.
        """
        cut = due & step.mask & ~(step.terminated | step.truncated)
        # On a GPU the check would synchronise, which takes longer than a reset of no environment.
        needed = cut.device.type != "cpu" or bool(cut.any())
        with watchdog.resetting:
            fresh = self.env.reset_where(cut) if needed else None
        if fresh is None:
            return step, None

        def choose(yes: Tensor, no: Tensor) -> Tensor:
            return torch.where(cut.view(-1, *[1] * (no.ndim - 1)), yes, no)

        final = step.obs if step.final_obs is None else tree.map(choose, step.obs, step.final_obs)
        obs, truncated = tree.map(choose, fresh, step.obs), step.truncated | cut
        return replace(step, obs=obs, truncated=truncated, final_obs=final), cut

    def collect(self, horizon: int, *, update: int, version: int) -> Experience:
        """Take ``horizon`` steps in every environment, repeatedly if groups are filtered.

        Args:
            horizon: Steps, T.
            update: Index of the update, from which random numbers are derived.
            version: Version of the policy's weights.

        Returns:
            Trajectory [T, N, ..], and the metrics of finished episodes.

        Raises:
            ConfigError: Groups are filtered, but the task reports no success.
        """
        if self.filter is None:
            return interleave([self.collecting(horizon, update=update, version=version)])[0]
        metrics: Metrics = {}
        episodes = 0.0
        while self.filter.missing:
            run = self.collecting(horizon, update=update, version=version, repeat=self.filter.round)
            trajectory, metrics = interleave([run])[0]
            episodes += float(metrics["rollout/episodes"])  # pyright: ignore[reportArgumentType]
            self.filter.add(trajectory, *self.outcome)
        trajectory, filter_metrics = self.filter.take()
        return trajectory, metrics | {"rollout/episodes": episodes} | filter_metrics

    def collecting(
        self, horizon: int, *, update: int, version: int, repeat: int = 0
    ) -> Generator[None, None, Experience]:
        """Collect as ``collect`` does, but yield while the simulator runs.

        ``repeat`` is the round of a filtered rollout, from 0.
        """
        env, policy = self.env, self.policy
        watchdog.describe(env_id=env.id, during=f"update {update}")
        restarts = self.restart_every and self.can_save is False and self.steps
        if self.one_episode or (restarts and self.steps + horizon > self.restart_every):
            self.restart(update, repeat)
        if self.obs is None:
            with watchdog.resetting:
                self.obs = env.reset()
            self.memory.reset()
            self.running.zero_()
        if self.can_save is None:
            self.can_save = env.state() is not None
        decisions: list[list[Tensor]] = []
        observed: list[Obs] = []
        steps: list[Step] = []
        kept: dict[str, Tensor] = {}
        cuts: dict[int, Tensor] = {}
        now = self.cpu_clock()
        keys = [sampling_key(self.seed, update, repeat, t) for t in range(horizon)]
        # Noise is drawn for the environments of all stages and then sliced, so that the noise of an
        # environment does not depend on the number of stages. It is drawn before the loop, while
        # the CPU caches are warm.
        own = slice(self.first, self.first + env.num_envs)
        noises = [policy.noise(self.total, self.generator.manual_seed(key))[own] for key in keys]
        for t, noise in enumerate(noises):
            if self._stopped:
                raise TrainingError("the rollout was stopped")
            obs = self.memory.attach(self.obs)
            decision = self.acting(obs, noise, update)
            if t == 0:  # they are large, so a stack at the end would not fit into memory
                kept = {
                    name: x.new_empty(horizon, *x.shape) for name, x in self.acting.kept.items()
                }
            tree.write(kept, t, self.acting.kept)
            before, now = now, self.cpu_clock()
            self.cpu_s["act"] += now - before
            wait_for_step = self._begin_truncated_step(decision[0])
            yield
            # The time of the other stages, which ran meanwhile, does not count.
            now, wait_start = self.cpu_clock(), time.perf_counter()
            step, cut = wait_for_step()
            before, now = now, self.cpu_clock()
            self.cpu_s["simulate"] += now - before
            self.simulate_s += time.perf_counter() - wait_start
            if cut is not None:
                cuts[t] = cut
            observed.append(obs)
            decisions.append(decision)
            steps.append(step)
            self.obs = step.obs
            if self.acting.structure.memory is not None:
                self.memory.store(decision[-1], starts(step))
        self.acting.kept = {}
        d, obs = self.acting.stack(decisions), tree.stack(observed)
        _check_finite(obs, env.id, update, "observation")
        if not self.can_save and not self.one_episode:
            self.actions.append(d.action)
        reward, mask = torch.stack([s.reward for s in steps]), torch.stack([s.mask for s in steps])
        _check_finite(reward, env.id, update, "reward")
        terminated = torch.stack([s.terminated for s in steps])
        truncated = torch.stack([s.truncated for s in steps])
        ended = terminated | truncated
        if self.one_episode:
            mask = mask & (ended.cumsum(0) - ended.long() == 0)  # up to and including the first end
        flags = [s.executed for s in steps if s.executed is not None]
        executed = torch.stack(flags) if flags else None  # [T, N, C]
        count = None if executed is None else executed.sum(-1)  # [T, N]
        length = mask if count is None else count * mask
        undiscounted = reward if count is None else reward.sum(-1)
        success = [s.success for s in steps]
        if self.filter is not None:
            # As without a filter, steps after the end of an episode count: they are simulated.
            simulated = mask.numel() if executed is None else executed.numel()
            self.outcome = self._episode_success(success, mask), simulated
        metrics = self._count_episodes(undiscounted, ended & mask, length, success, cuts)
        per_action = d.value.ndim == 3  # each action of a chunk has a value and a reward
        if count is not None and not per_action:
            # One reward per chunk: sum over c of gamma^c r_c.
            c = torch.arange(reward.shape[-1], dtype=reward.dtype, device=reward.device)
            reward = reward @ self.gamma**c
        trajectory = Trajectory(
            obs=obs,
            action=d.action,
            log_prob=d.log_prob,
            value=d.value,
            replay=d.replay,
            next_value=self._next_value(
                d.value[..., 0] if per_action else d.value, steps, ended, d.memory
            ),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            mask=mask,
            version=torch.full_like(mask, version, dtype=torch.int64),
            steps=None if per_action else count,
            kept=kept or None,
        )
        if per_action:
            assert executed is not None
            fields = split_by_action(
                d.value, trajectory.next_value, terminated, truncated, mask, executed
            )
            trajectory = replace(trajectory, **fields)
        return trajectory, metrics

    def _episode_success(self, success: list[Tensor | None], mask: Tensor) -> Tensor:
        """Return whether the first episode of each environment succeeded, bool [N]."""
        if all(x is None for x in success):
            raise ConfigError(
                f"algorithm.group_filter = success: env.id={self.env.id} reports no success; write"
                " algorithm.group_filter=null, or name its flag in env.success_key"
            )
        succeeded = [torch.zeros_like(mask[0]) if x is None else x.bool() for x in success]
        return (torch.stack(succeeded) & mask).any(0)

    def _value(self, obs: Obs) -> Tensor:
        """Return V [N] of observations, that of the first action if each action has one."""
        value = apply_in_parts(
            lambda part: self.policy.value(self.policy.encode(part)), self.rows, obs
        )
        return value if value.ndim == 1 else value[:, 0]

    def _next_value(
        self, value: Tensor, steps: list[Step], ended: Tensor, memory: Tensor | None
    ) -> Tensor:
        """Return V of every row's true successor, [T, N].

        The successor is the observation of row t+1, or ``final_obs`` where row t+1 holds the next
        episode. Pass p of the policy computes V of the p-th ``final_obs`` of every environment, so
        there are as many passes as ends of episodes in one environment, at most. A row stays in the
        column of its environment: the last bits of a matrix product depend on the number of rows
        and on the column.

        Args:
            value: V of every row, [T, N].
            steps: T steps.
            ended: Whether an episode ended in a row, bool [T, N].
            memory: State of a policy with memory after every row, [T, N, S].
        """
        assert self.obs is not None
        last = self.memory.attach(self.obs)
        next_value = torch.cat([value[1:], self._value(last).unsqueeze(0)])
        ended = ended.cpu()
        if not_given := [t for t, step in enumerate(steps) if step.final_obs is None]:
            ended = ended.clone()
            ended[not_given] = False
        if not bool(ended.any()):
            return next_value
        t, i = ended.nonzero().unbind(1)  # [K] each, ordered by t
        # Number of earlier ends of the same environment, without a temporary tensor of [T, N].
        order = i.argsort(stable=True)
        p = torch.empty_like(i)
        p[order] = torch.arange(len(i)) - torch.searchsorted(i[order], i[order])
        passes, counts = int(p.max()) + 1, ended.sum(1).tolist()
        t, i, p = torch.stack([t, i, p]).to(value.device).unbind()
        final: list[Obs] = []
        for row, (step, environments) in enumerate(zip(steps, i.split(counts), strict=True)):
            if step.final_obs is not None:
                obs = step.final_obs
                if memory is not None:
                    obs = with_memory(obs, memory[row], torch.zeros_like(step.mask))
                final.append(tree.index(obs, environments))

        def pack(current: Tensor, *parts: Tensor) -> Tensor:
            """Return [passes, N, ..], with ``current`` where an environment has no p-th end."""
            packed = current.repeat(passes, *[1] * current.ndim)
            packed[p, i] = torch.cat(parts)
            return packed

        packed = tree.map(pack, last, *final)
        values = torch.stack([self._value(tree.index(packed, k)) for k in range(passes)])
        next_value[t, i] = values[p, i]
        return next_value

    def _count_episodes(
        self,
        reward: Tensor,
        ended: Tensor,
        length: Tensor,
        success: list[Tensor | None],
        cuts: Mapping[int, Tensor],
    ) -> Metrics:
        """Count the episodes that ended; return their number, and means of the newest episodes.

        These are all that ended in this rollout, and at least the newest WINDOW.

        ``length`` [T, N] counts simulator steps. ``cuts`` maps a row to the environments whose
        episode was truncated for staggering; these episodes do not count.
        """
        self.has_success |= any(x is not None for x in success)
        succeeded = torch.stack([torch.zeros_like(ended[0]) if x is None else x for x in success])
        rows = torch.stack([reward.float(), length.float(), succeeded.float()], 1)
        ended_rows = ended.cpu().numpy()
        counted = ended_rows.copy()
        if cuts:
            counted[list(cuts)] &= ~torch.stack(list(cuts.values())).cpu().numpy()
        if self.totals.shape != rows.shape:
            self.totals = torch.empty(rows.shape, pin_memory=rows.is_cuda)
        self.totals.copy_(rows)
        totals, running = self.totals.numpy(), self.running.numpy()
        # A call of NumPy takes less time than one of torch.
        for row, ends in zip(totals, ended_rows, strict=True):
            row[:2] += running[:2]
            np.maximum(row[2], running[2], out=row[2])
            np.copyto(running, row)
            running[:, np.flatnonzero(ends)] = 0.0
        new = [tuple(e) for e in totals.transpose(0, 2, 1)[counted].tolist()]
        self.finished.extend(new)
        # In the order of ending, failures that last until the time limit come last: a part of a
        # rollout would contain mostly these.
        window = new if len(new) > WINDOW else self.finished
        metrics: Metrics = {"rollout/episodes": float(len(new))}
        unstable = getattr(self.env, "unstable", None)
        if unstable is not None:
            metrics["rollout/unstable"] = float(unstable)
        level = getattr(self.env, "terrain_level", None)
        if level is not None:
            metrics["rollout/terrain_level"] = Mean(float(level.sum()), float(level.numel()))
        if window:
            metrics["rollout/return"] = Mean.of(e[0] for e in window)
            metrics["rollout/length"] = Mean.of(e[1] for e in window)
            if self.has_success:
                metrics["rollout/success"] = Mean.of(e[2] for e in window)
        return metrics

    def stop(self) -> None:
        """Let a ``collect`` that runs in another thread raise TrainingError at its next step."""
        self._stopped = True
        self.acting.schedule.close()  # it may be waiting for a compilation

    def close(self) -> None:
        """End compilation and close the simulator."""
        self.stop()
        self.env.close()

    def state(self) -> dict[str, Any]:
        """Return the state of the simulator and of the running episodes.

        If the simulator cannot save its state, all actions since its restart are stored instead.
        """
        return {
            "env": self.env.state(),
            "round": self.round,
            "steps": self.steps,
            "actions": torch.cat(self.actions).cpu() if self.actions else None,  # [L, N, ..]
            "obs": self.obs,
            "memory": self.memory.state_dict() if self.memory.size else None,
            "running": self.running.clone(),
            "finished": list(self.finished),
            "has_success": self.has_success,
            "groups": None if self.filter is None else self.filter.state(),
        }

    def load_state(
        self, state: Mapping[str, Any], *, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        """Continue from ``state``.

        If replaying the actions does not reproduce the last observation, new episodes start.

        Args:
            state: Result of ``state``.
            notice: Receives a line when a replay starts, and one if new episodes start.
        """
        self.finished = deque((tuple(e) for e in state["finished"]), maxlen=WINDOW)
        self.has_success = state["has_success"]
        if self.filter is not None:
            self.filter.load_state(state.get("groups"), self.device)
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
                self.obs = self._begin_truncated_step(action)()[0].obs
            self.actions = [actions]
            observations = (tree.map(Tensor.cpu, obs) for obs in (self.obs, state["obs"]))
            if not all(map(torch.equal, *map(tree.leaves, observations))):
                notice(
                    "resume: the replayed actions lead to other observations (a changed option of"
                    " env, such as env.realism, or a simulator that is not deterministic); new"
                    " episodes start"
                )
                return self.restart(state["round"])
        self.running = state["running"].clone()
        if self.memory.size:
            self.memory.load_state_dict(state["memory"])


def add_metrics(metrics: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of several rollouts: add ``Mean`` objects (sums and counts) and numbers."""
    merged: Metrics = {}
    for part in metrics:
        for tag, value in part.items():
            before = merged.get(tag)
            merged[tag] = value if before is None else before + value  # pyright: ignore[reportOperatorIssue]
    return merged


class Staged:
    """Several interleaved rollouts: the policy acts for one while the simulator of another runs."""

    one_state = False
    """Whether all processes share one rollout state."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        """Combine rollouts.

        Args:
            rollouts: One rollout per stage, in the order of their environments, with the same
                policy.
        """
        self.rollouts = list(rollouts)
        self.policy = self.rollouts[0].policy

    @property
    def cpu_clock(self) -> Callable[[], float]:
        """Clock of ``cpu_s``."""
        return self.rollouts[0].cpu_clock

    @cpu_clock.setter
    def cpu_clock(self, clock: Callable[[], float]) -> None:
        for rollout in self.rollouts:
            rollout.cpu_clock = clock

    @property
    def cpu_s(self) -> dict[str, float]:
        """CPU seconds since the start, by phase."""
        phases = self.rollouts[0].cpu_s
        return {phase: sum(r.cpu_s[phase] for r in self.rollouts) for phase in phases}

    def collect(self, horizon: int, *, update: int, version: int) -> Experience:
        """Collect as ``Rollout.collect`` does; the environments of the stages are concatenated."""
        runs = [r.collecting(horizon, update=update, version=version) for r in self.rollouts]
        trajectories, metrics = zip(*interleave(runs), strict=True)
        trajectory = tree.map(lambda *xs: torch.cat(xs, dim=1), trajectories[0], *trajectories[1:])
        return trajectory, add_metrics(metrics)

    def state(self) -> dict[str, Any]:
        """Return the state of every stage."""
        return {"stages": [r.state() for r in self.rollouts]}

    def load_state(
        self, state: Mapping[str, Any], *, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        """Continue from ``state`` of as many stages."""
        for r, s in zip(self.rollouts, state["stages"], strict=True):
            r.load_state(s, notice=notice)

    def stop(self) -> None:
        """Stop every stage, see ``Rollout.stop``."""
        for r in self.rollouts:
            r.stop()

    def close(self) -> None:
        """Close every stage."""
        for r in self.rollouts:
            r.close()
