"""Collection of trajectories: a policy acts in simulated environments."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from embodied_envs.base import tree, watchdog
from embodied_envs.base.action_mask import check_action_mask
from embodied_envs.base.errors import TrainingError
from embodied_envs.base.random import env_seeds, sampling_key
from embodied_envs.base.tree import apply_in_parts
from embodied_envs.types import Obs, Step, VectorEnv, starts
from embodied_ppo.core import compile
from embodied_ppo.core.recurrent_state import EpisodeMemory
from embodied_ppo.core.types import Decision, Mean, Metrics, Policy, Trajectory
from embodied_ppo.options.reward_groups import RewardGroup
from embodied_ppo.rollout.acting import Acting
from embodied_ppo.rollout.bootstrap import next_values, split_by_action
from embodied_ppo.rollout.divergence import DivergenceGuard, DivergenceLog, stack_divergences
from embodied_ppo.rollout.episode_statistics import EpisodeStatistics
from embodied_ppo.rollout.exploration_noise import ExplorationNoise
from embodied_ppo.rollout.group_filter import (
    GroupFilter,
    join_passes,
    mask_groups,
    simulated_success,
)
from embodied_ppo.rollout.group_rewards import GroupRewards
from embodied_ppo.rollout.staggering import Staggering

# Largest number of steps for which a restart waits for episodes of an unknown time limit.
LONGEST = 163_840
Experience: TypeAlias = "tuple[Trajectory, Metrics]"


@torch.no_grad()
def interleave(runs: Sequence[Generator[None, None, Experience]]) -> list[Experience]:
    """Return the results of ``Rollout.collecting`` generators of equal length, run interleaved."""
    results: list[Experience] = []
    # Each generator yields while its simulator works, so that the next one can act.
    while len(results) < len(runs):
        for run in runs:
            try:
                next(run)
            except StopIteration as end:
                results.append(end.value)
    return results


def collect_passes(rollouts: Sequence[Rollout], horizon: int, **index: int) -> list[Experience]:
    """Collect all passes of rollouts that run interleaved; return the experience of each.

    Arguments as of ``Rollout.collect``.
    """
    passes = []
    for i in range(rollouts[0].passes):
        passes.append(interleave([r.collecting(horizon, repeat=i, **index) for r in rollouts]))
    return [join_passes(parts, rollouts[0].group_size) for parts in zip(*passes, strict=True)]


@dataclass(slots=True)
class _Record:
    """What a rollout records step by step.

    Attributes:
        clock: CPU seconds at the end of the last measured phase.
        observed: T observations [N, ..].
        decisions: T decisions.
        steps: T steps.
        kept: Inputs of the policy to keep, [T, N, ..].
        cuts: Row -> bool [N], episodes that were truncated for staggering.
        divergences: Row -> what diverged in it.
    """

    clock: float
    observed: list[Obs] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    kept: dict[str, Tensor] = field(default_factory=dict)
    cuts: dict[int, Tensor] = field(default_factory=dict)
    divergences: dict[int, Any] = field(default_factory=dict)


class Rollout:
    """Collects trajectories from one vector environment and keeps the state of its episodes."""

    # Whether all processes share one rollout state.
    one_state = False

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        seed: int,
        group_size: int = 1,
        filter_rounds: int = 0,
        passes: int = 1,
        one_episode: bool = False,
        restart_every: int = 0,
        restarts: Callable[[int], bool] = lambda update: False,
        stagger: bool = False,
        gamma: float = 1.0,
        reward_groups: Sequence[RewardGroup] = (),
        noise_correlation: float = 0.0,
        rows: int | None = None,
        kept_inputs: Sequence[str] = (),
        schedule: compile.CompileSchedule | None = None,
        notice: Callable[[str], None] = lambda text: None,
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
                groups of unequal success; 0: groups are not filtered; 1: other groups are masked.
                Needs one_episode.
            passes: Episodes of each environment in one ``collect``; more than 1 need one_episode.
            one_episode: Start new episodes in every ``collect`` and mask all but the first of each
                environment.
            restart_every: Steps after which a simulator that cannot save its state starts new
                episodes; 0: never. The restart may wait, see ``_restart_is_due``. Such a simulator
                is resumed by replaying all actions since its last restart.
            restarts: Whether new episodes start before the rollout of an update, because an
                evaluation has used the simulators.
            stagger: Truncate the first episode of environment i after i/N of the time limit, see
                ``Staggering``. Ignored with group_size > 1 or one_episode.
            gamma: Discount of the rewards inside an action chunk, if a chunk has one reward.
            reward_groups: Groups of the reward, with a value and a ``gamma`` each. Empty: none.
            noise_correlation: See ``algorithm.noise_correlation``.
            rows: Largest number of observations in one forward pass of the policy; None: all.
            kept_inputs: Inputs of the policy to keep, see ``Trajectory.kept``.
            schedule: Schedule of the switch to compiled code; None: never.
            notice: Receives lines for the log.
            stage: Index of ``env`` among the equal parts of all environments.
            stages: Number of these parts, in all processes.
        """
        self.env, self.policy, self.seed = env, policy, seed
        self.gammas = [gamma]
        self.group_rewards: GroupRewards | None = None
        if reward_groups:
            self.group_rewards = GroupRewards(reward_groups, f"env.id={env.id}")
            options = [group.options for group in reward_groups]
            self.gammas = [a.gamma if a.reward_type != "chunk_sum" else 1.0 for a in options]
        assert one_episode or (passes == 1 and not filter_rounds)
        self.group_size, self.one_episode, self.passes = group_size, one_episode, passes
        # Group filtering collects whole rounds until the batch is full; one round masks groups.
        self.filter: GroupFilter | None = None
        self.masks_groups = filter_rounds == 1
        if filter_rounds > 1:
            groups = passes * env.num_envs // group_size
            self.filter = GroupFilter(groups, group_size, passes * filter_rounds)
        # Of the newest round of ``filter``: success of each first episode, bool [N], and the number
        # of simulated steps.
        self.outcome = (torch.zeros(env.num_envs, dtype=torch.bool), 0)
        self.restart_every, self.restarts = restart_every, restarts
        limit = env.max_episode_steps if stagger and group_size == 1 and not one_episode else None
        self.env_offset, self.total = stage * env.num_envs, stages * env.num_envs
        self.staggering = Staggering(env, limit, self.env_offset, self.total)
        self.steps = 0  # of each environment, since the last restart
        # Environments that return NaN or infinity are masked, reset and counted.
        self.guard = DivergenceGuard(env)
        self.divergences = DivergenceLog(self.guard, self.env_offset, stages, group_size)
        self.notice = notice
        self.cpu_s = {"simulate": 0.0, "act": 0.0}  # CPU seconds since the start
        self.cpu_clock = time.process_time  # measures them
        self.device = env.device
        self.rows = rows
        # The policy acts eagerly first and as compiled code later.
        self.acting = Acting(policy, schedule or compile.CompileSchedule(None), rows, kept_inputs)
        self._stopped = False
        own = slice(self.env_offset, self.env_offset + env.num_envs)
        self.noise = ExplorationNoise(policy, noise_correlation, self.total, own, self.device)
        self.obs: Obs | None = None
        self.memory = EpisodeMemory(policy, env.num_envs, self.device)
        self.can_save: bool | None = None  # whether the simulator can save its state, once known
        self.episodes = EpisodeStatistics(env, notice, one_episode)
        self.round = 0  # the update whose seeds the simulator was restarted with
        # [T, N, ..] of every collect since the restart, if the simulator cannot save its state.
        self.actions: list[Tensor] = []

    def restart(self, round_: int, repeat: int = 0) -> None:
        """Start new episodes in all environments, from seeds derived from (seed, round_).

        ``repeat`` is the round of a filtered rollout. Each round numbers its environments after
        those of the round before, so that their seeds differ.
        """
        offset = repeat * self.total + self.env_offset
        # Seeds depend on the run, the round and the environment, not on the process that draws
        # them.
        seeds = env_seeds(self.seed, round_, offset + self.env.num_envs, self.group_size)
        with watchdog.resetting:
            self.env.restart(seeds[offset:])
        self.obs, self.round, self.actions, self.steps = None, round_, [], 0
        self.episodes.has_ended[:] = False
        self.memory.reset()

    def _restart_is_due(self, horizon: int) -> bool:
        """Return whether the simulator cannot save its state and has to restart before a rollout.

        The restart waits until each environment has had the time for a whole episode, which is
        twice the time limit if the first episode is truncated; or, without a known limit, until
        each environment has ended one.
        """
        every, limit = self.restart_every, self.env.max_episode_steps
        # Only simulators that cannot save their state are replayed, and only those restart.
        replays = every and self.can_save is False and self.steps
        if not replays or self.steps + horizon <= every:
            return False
        if limit is not None:
            waits = self.steps < limit * (2 if self.staggering.cuts else 1)
        else:
            waits = not self.episodes.has_ended.all() and self.steps + horizon <= LONGEST
        if waits and (limit is not None or self.steps > 2 * every):
            hint = f"env.max_episode_steps={every // 2}"
            length = "unknown" if limit is None else f"{limit} steps"
            self.notice(
                f"Write {hint} for shorter replays: env.restart_every={every} waits for the end of"
                f" episodes of env.id={self.env.id}, whose time limit is {length}"
            )
        elif not waits:
            self.notice(
                "Write env.restart_every=0 to never cut episodes (a resume then replays all steps):"
                f" env.id={self.env.id} cannot save its state, so new episodes start every {every}"
                " steps"
            )
        return not waits

    def _reset(self) -> Obs:
        """Start new episodes in all environments after ``restart``."""
        with watchdog.resetting:
            obs = self.env.reset()
        check_action_mask(self.env.id, self.env.action_spec, obs)
        return self.guard.begin(obs)

    def collect(self, horizon: int, *, update: int, version: int) -> Experience:
        """Take ``horizon`` steps in every environment, repeatedly if groups are filtered.

        Args:
            horizon: Steps, T.
            update: Index of the update, from which random numbers are derived.
            version: Version of the policy's weights.

        Returns:
            Trajectory [T, N, ..], and the metrics of finished episodes.

        Raises:
            RunRefused: Groups are filtered, but the task reports no success; or reward groups do
                not fit its reward terms.
        """
        if self.filter is None and self.passes == 1:
            return interleave([self.collecting(horizon, update=update, version=version)])[0]
        if self.filter is None:
            return collect_passes([self], horizon, update=update, version=version)[0]
        metrics: Metrics = {}
        episodes = 0.0
        # Collect rounds with new seeds until the batch holds enough mixed groups.
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

        ``repeat`` is the pass, or the round of a filtered rollout, from 0.
        """
        watchdog.describe(env_id=self.env.id, during=f"update {update}")
        obs = self._first_observation(horizon, update, repeat)
        record = _Record(self.cpu_clock())
        keys = [sampling_key(self.seed, update, repeat, t) for t in range(horizon)]
        # Noise is drawn before the loop, while the CPU caches are warm.
        for t, noise in enumerate(self.noise.draw(keys)):
            if self._stopped:
                raise TrainingError("the rollout was stopped")
            # Choose actions a_t for the observations s_t.
            observed = self.memory.attach(obs)
            decision = self.acting(observed, noise, update)
            if t == 0:  # they are large, so a stack at the end would not fit into memory
                kept = self.acting.kept.items()
                record.kept = {name: x.new_empty(horizon, *x.shape) for name, x in kept}
            tree.write(record.kept, t, self.acting.kept)
            self._count_cpu_s("act", record)
            self.steps += 1
            wait_for_step = self.staggering.begin_step(decision.action, self.steps)
            yield
            # The time of the other stages, which ran meanwhile, does not count.
            record.clock = self.cpu_clock()
            # Execute them: r_t and s_t+1.
            step, cut = wait_for_step()
            check_action_mask(self.env.id, self.env.action_spec, step.obs, step)
            if self.guard.on_host:
                step, divergence = self.guard.check(step)
                if divergence is not None:
                    record.divergences[t] = divergence
            self._count_cpu_s("simulate", record)
            if cut is not None:
                record.cuts[t] = cut
            record.observed.append(observed)
            record.decisions.append(decision)
            record.steps.append(step)
            # On an accelerator the steps are checked after the loop, without waiting in each step.
            self.obs = obs = step.obs if self.guard.on_host else self.guard.safe(step.obs)
            if decision.memory is not None:
                self.memory.store(decision.memory, starts(step))
        self.acting.kept = {}
        if not self.guard.on_host:
            record.steps, record.divergences = self.guard.check_all(record.steps)
            if record.divergences:
                self.obs, self.memory.start = record.steps[-1].obs, starts(record.steps[-1])
        return self._assemble(record, update, version, repeat)

    def _first_observation(self, horizon: int, update: int, repeat: int) -> Obs:
        """Return the current observation; begin new episodes where they are due."""
        if self.one_episode or self.restarts(update) or self._restart_is_due(horizon):
            self.restart(update, repeat)
        if self.obs is None:
            self.obs = self._reset()
            self.memory.reset()
            self.episodes.reset()
        if self.can_save is None:
            self.can_save = self.env.state() is not None
        self.divergences.newest, self.guard.unreported = 0, self.guard.hidden
        return self.obs

    def _count_cpu_s(self, phase: str, record: _Record) -> None:
        """Add the CPU time since the last call to a phase."""
        before, record.clock = record.clock, self.cpu_clock()
        self.cpu_s[phase] += record.clock - before

    def _assemble(self, record: _Record, update: int, version: int, repeat: int) -> Experience:
        """Return the trajectory of T recorded steps, and the metrics of finished episodes."""
        assert self.obs is not None
        steps, d = record.steps, tree.stack(record.decisions)
        if not self.can_save and not self.one_episode:
            self.actions.append(d.action)
        reward, mask = torch.stack([s.reward for s in steps]), torch.stack([s.mask for s in steps])
        if self.noise.correlation:
            self.noise.observe(reward, update)
        terminated = torch.stack([s.terminated for s in steps])
        truncated = torch.stack([s.truncated for s in steps])
        ended = terminated | truncated
        diverged, lost = stack_divergences(record.divergences, mask)
        if self.one_episode:
            # Mask every row after the first end of an episode.
            ends = (ended | diverged).long()
            diverged &= ends.cumsum(0) - ends == 0  # up to and including the first end
            # The return of an episode that diverged is unknown, so that nothing of it is used.
            mask = mask & (ended.cumsum(0) - ended.long() == 0) & ~(diverged & ~ended).any(0)
        counted, damaged = ended & mask, record.cuts
        if record.divergences:
            line = self.divergences.count(diverged, d.action, update)
            if line:
                self.notice(line)
            if not self.one_episode:
                # The row before a lost one ends its episode. Its true successor is the observation
                # of the lost row.
                truncated[:-1] |= lost[1:] & mask[:-1] & ~ended[:-1]
                # A damaged episode has no return, and the next one begins at 0. In a row that ends
                # an episode, the first observation of the next one has diverged.
                diverged &= ~ended
                counted |= diverged
                damaged |= {t: damaged.get(t, False) | rows for t, rows in enumerate(diverged)}
        # A row of action chunks has C rewards, of which some were not executed.
        flags = [s.executed for s in steps if s.executed is not None]
        executed = torch.stack(flags) if flags else None  # [T, N, C]
        count = None if executed is None else executed.sum(-1)  # [T, N]
        length = mask if count is None else count * mask
        undiscounted = reward if count is None else reward.sum(-1)
        if self.filter is not None or self.masks_groups:
            # As without a filter, steps after the end of an episode count: they are simulated.
            rows, known = mask if executed is None else executed, self.episodes.has_success
            self.outcome = simulated_success(self.env.id, steps, mask, known=known), rows.numel()
        continues = repeat > 0 and self.filter is None
        metrics = self.episodes.add(
            steps, undiscounted, length, counted, damaged, continues=continues
        )
        # Each action of a chunk, or each reward group, has a value and a reward.
        per_action = d.value.ndim == 3 and self.group_rewards is None
        if self.group_rewards is not None:
            reward = self.group_rewards([step.info for step in steps], reward, mask)
        if executed is not None and not per_action:
            # One reward per chunk: sum over c of gamma^c r_c.
            c = torch.arange(executed.shape[-1], dtype=reward.dtype, device=reward.device)
            rewards = reward.unbind(-1) if reward.ndim == 4 else (reward,)
            sums = [x @ gamma**c for x, gamma in zip(rewards, self.gammas, strict=True)]
            reward = torch.stack(sums, -1) if len(sums) > 1 else sums[0]
        trajectory = Trajectory(
            obs=tree.stack(record.observed),
            action=d.action,
            log_prob=d.log_prob,
            value=d.value,
            replay=d.replay,
            next_value=next_values(
                d.value[..., 0] if per_action else d.value,
                steps,
                ended,
                self.memory.attach(self.obs),
                d.memory,
                self._value,
            ),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            mask=mask,
            version=torch.full_like(mask, version, dtype=torch.int64),
            steps=None if per_action else count,
            kept=record.kept or None,
        )
        if per_action:
            assert executed is not None
            fields = split_by_action(
                d.value, trajectory.next_value, terminated, truncated, mask, executed
            )
            trajectory = replace(trajectory, **fields)
        if self.masks_groups:
            trajectory, masked = mask_groups(trajectory, self.outcome[0], self.group_size)
            metrics |= masked
        return trajectory, metrics | self._simulator_metrics()

    def _simulator_metrics(self) -> Metrics:
        """Return counts that only some simulators have."""
        metrics: Metrics = {}
        if self.divergences.total:
            metrics["rollout/diverged"] = float(self.divergences.newest)
        if (unstable := self.env.unstable) is not None:
            metrics["rollout/unstable"] = float(unstable)
        if (level := self.env.terrain_level) is not None:
            metrics["rollout/terrain_level"] = Mean(float(level.sum()), float(level.numel()))
        return metrics

    def _value(self, obs: Obs) -> Tensor:
        """Return V [N] of observations, of the first action if each has one; [N, G] of groups."""
        function = lambda part: self.policy.value(self.policy.encode(part))
        value = apply_in_parts(function, self.rows, obs)
        return value if value.ndim == 1 or self.group_rewards is not None else value[:, 0]

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
        state = {
            "env": self.env.state(),
            "round": self.round,
            "steps": self.steps,
            "actions": torch.cat(self.actions).cpu() if self.actions else None,  # [L, N, ..]
            "obs": self.obs,
            "memory": self.memory.state_dict() if self.memory.size else None,
            "groups": None if self.filter is None else self.filter.state(),
            "unrewarded": self.noise.unrewarded,
            **self.episodes.state(),
        }
        if self.divergences.total:
            state["divergence"] = {
                "total": self.divergences.total,
                "hidden": self.guard.hidden.clone(),
                "lengths": [len(actions) for actions in self.actions],  # of the rollouts
            }
        return state

    def load_state(
        self, state: Mapping[str, Any], *, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        """Continue from ``state``.

        If replaying the actions does not reproduce the last observation, new episodes start.

        Args:
            state: Result of ``state``.
            notice: Receives a line when a replay starts, and one if new episodes start.
        """
        self.episodes.load_finished(state)
        divergence = state.get("divergence")
        self.divergences.total = 0 if divergence is None else divergence["total"]
        if self.filter is not None:
            self.filter.load_state(state.get("groups"), self.device)
        if (unrewarded := state.get("unrewarded")) is not None:
            self.noise.unrewarded = unrewarded.to(self.noise.unrewarded.device)
        self.can_save = state["env"] is not None
        if state["env"] is not None:
            self.obs, self.steps = self.env.load_state(state["env"]), state["steps"]
            if divergence is not None:
                self.obs = self.guard.load(divergence["hidden"], self.obs)
        else:
            self.restart(state["round"])
            if state["actions"] is None:
                return
            actions = state["actions"].to(self.device)
            notice(f"resume: replaying {len(actions)} steps of the simulator")
            watchdog.describe(env_id=self.env.id, during="resume")
            lengths = [len(actions)] if divergence is None else divergence["lengths"]
            self.actions = list(actions.split(lengths))
            self.obs = self._reset()
            for rollout in self.actions:
                self.obs = self._replay(rollout, check=divergence is not None)
            # A checkpoint of an earlier version has float32 where ``keep_float64`` has float64.
            pairs = zip(tree.leaves(state["obs"]), tree.leaves(self.obs), strict=True)
            # A replay is accepted only if it reproduces the last observation exactly.
            if not all(torch.equal(x.cpu().to(own.dtype), own.cpu()) for x, own in pairs):
                notice(
                    "resume: the replayed actions lead to other observations (a changed option of"
                    " env, such as env.realism, or a simulator that is not deterministic); new"
                    " episodes start"
                )
                return self.restart(state["round"])
        self.episodes.load_running(state)
        if self.memory.size:
            self.memory.load_state_dict(state["memory"])

    def _replay(self, actions: Tensor, *, check: bool) -> Obs:
        """Execute the actions of a rollout, [T, N, ..]; return the observations after them.

        ``check``: whether an environment has diverged in the run; only then steps are kept for the
        resets at the end of a rollout.
        """
        assert self.obs is not None
        obs, steps = self.obs, []
        for action in actions:
            # Cuts for staggering happen at the same steps as in the original rollout.
            self.steps += 1
            step = self.staggering.begin_step(action, self.steps)()[0]
            if self.guard.on_host:
                step, _ = self.guard.check(step)
            elif check:
                steps.append(step)
            obs = step.obs
        return self.guard.check_all(steps)[0][-1].obs if steps else obs
