"""Collect experience: the only place where simulation meets policy."""

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
from embodied_ppo.core.tree import in_parts
from embodied_ppo.core.types import Decision, Mean, Metrics, Obs, Policy, Step, TrainingError, Trajectory, VectorEnv

T = TypeVar("T")
WINDOW = 100
"""Finished episodes over which rollout/return, length and success are averaged."""


def _check_finite(values: Obs, id: str, update: int, name: str) -> None:
    """Raise TrainingError where a tensor [T, N, ..] is not finite. One sum each: NaN and infinity survive it.

    ``name`` of the tensors in the message: "observation", "reward".
    """
    for x in tree.leaves(values):
        if not x.is_floating_point() or math.isfinite(float(x.sum())) or bool(x.isfinite().all()):
            continue
        t, i, *where = (~x.isfinite()).nonzero()[0].tolist()
        raise TrainingError(
            f"env.id={id}: {name} {f'{where} ' if where else ''}of environment {i} is {float(x[t, i][tuple(where)])} "
            f"(update {update}, step {t}); nothing was trained on it; mend the simulator, or resume the last checkpoint"
        )


class _Act(nn.Module):
    """Observation to decision as a forward, so that the policy's parameters can be handed in as tensors."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        assert isinstance(policy, nn.Module)
        self.policy = policy

    def forward(self, obs: Obs, noise: Tensor) -> Decision:
        return self.policy.act(self.policy.encode(obs), noise=noise)


class ActProgram:
    """Observation to decision, of tensors only: (weights, noise, observation's leaves) -> the decision's leaves."""

    def __init__(self, policy: Policy, obs: Obs) -> None:
        """``obs``: for its structure."""
        self.module = _Act(policy)
        self.obs = tree.map(lambda x: x.new_empty(0), obs)
        self.names = list(self._weights())

    def _weights(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())

    def weights(self) -> list[Tensor]:
        """Parameters and buffers; they change in place."""
        return [x.detach() for x in self._weights().values()]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        noise, *leaves = tensors[len(self.names) :]
        rest = iter(leaves)
        obs = tree.map(lambda _: next(rest), self.obs)
        weights = dict(zip(self.names, tensors, strict=False))
        return tuple(tree.leaves(torch.func.functional_call(self.module, weights, (obs, noise))))


class Acting:
    """The policy's ``encode`` and ``act``, in time as compiled code."""

    def __init__(self, policy: Policy, later: compile.CompileSchedule, rows: int | None = None) -> None:
        """``rows``: observations in one forward pass of eager code, at most; None: all."""
        self.policy, self.later, self.rows = policy, later, rows
        self.weights: list[Tensor] = []
        self.form: Any = None  # a decision, for its structure

    def __call__(self, obs: Obs, noise: Tensor, update: int) -> list[Tensor]:
        """The leaves of a Decision; the action is the first."""
        run = self.later.get(update, lambda: self._program(obs, noise))
        if run is not None:
            return run([*self.weights, noise, *(x.contiguous() for x in tree.leaves(obs))])
        self.form = in_parts(self._act, self.rows, obs, noise)
        return list(tree.leaves(self.form))

    def _act(self, obs: Obs, noise: Tensor) -> Decision:
        return self.policy.act(self.policy.encode(obs), noise=noise)

    def stack(self, decisions: list[list[Tensor]]) -> Decision:
        """T decisions [N, ..] as one [T, N, ..]."""
        leaves = iter([torch.stack(xs) for xs in zip(*decisions, strict=True)])
        return tree.map(lambda _: next(leaves), self.form)

    def _program(self, obs: Obs, noise: Tensor) -> compile.Example:
        program = ActProgram(self.policy, obs)
        self.weights = program.weights()
        self.form = self._act(obs, noise)
        return compile.Example(program, self.weights, [noise, *(x.contiguous() for x in tree.leaves(obs))])


Collected: TypeAlias = "tuple[Trajectory, Metrics]"


def by_action(
    value: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor, mask: Tensor, executed: Tensor
) -> dict[str, Tensor]:
    """Return the fields of a trajectory with an entry for each action of a chunk, [T, N, C].

    V of the action that follows inside the chunk is the successor's value; the last executed action has the decision's
    successor and its flags.

    Args:
        value: [T, N, C], V of each action, given the observation that the chunk was decided on.
        next_value: [T, N], V of the decision's true successor.
        terminated: [T, N]; ``truncated`` and ``mask`` likewise.
        executed: [T, N, C], the actions before the end of the episode.
    """
    following = torch.cat([executed[..., 1:], torch.zeros_like(executed[..., :1])], dim=-1)
    last = executed & ~following
    inside = torch.cat([value[..., 1:], value[..., :1]], dim=-1)  # the last column is never taken
    return {
        "next_value": torch.where(last, next_value.unsqueeze(-1), inside),
        "terminated": terminated.unsqueeze(-1) & last,
        "truncated": truncated.unsqueeze(-1) & last,
        "mask": mask.unsqueeze(-1) & executed,
    }


def begin(env: VectorEnv, action: Tensor) -> Callable[[], Step]:
    """Hand an action to the simulator; what is returned waits for the step. One elsewhere (it has ``send`` and
    ``receive``) works meanwhile."""
    send = getattr(env, "send", None)
    if send is None:

        def step() -> Step:
            with watchdog.stepping:
                return env.step(action)

        return step
    send(action)
    return env.receive  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def interleaved(runs: Sequence[Steps[None, None, Collected]]) -> list[Collected]:
    """What equally long runs of ``Rollout.collecting`` answer: while one waits for its simulator, the next acts."""
    done: list[Collected] = []
    while len(done) < len(runs):
        for run in runs:
            try:
                next(run)
            except StopIteration as end:
                done.append(end.value)
    return done


class Rollout:
    """One vector environment, and where its episodes stand."""

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
        """``stage``: which of so many equal parts of all environments ``env`` is, here and in other processes.

        ``one_episode``: every collect begins new episodes and only the first of each environment counts.

        ``restart_every``: steps of each environment after which episodes begin anew (0: never), where the simulator
        cannot save itself. Such a simulator is resumed by replaying every action since its last restart.

        ``stagger``: the first episode of environment i is cut after i/N of the clock limit. Tasks without a fall would
        otherwise stay in step for ever: every rollout would hold N times the same phase of an episode.

        ``gamma``: discount of the rewards inside a chunk of actions, where a chunk has one reward.

        ``rows``: observations in one forward pass of the policy, at most; None: all.

        ``later``: from when on the policy acts as compiled code (None: never).
        """
        self.env, self.policy, self.seed, self.gamma = env, policy, seed, gamma
        self.group_size, self.one_episode, self.restart_every = group_size, one_episode, restart_every
        clock = env.max_episode_steps if stagger and group_size == 1 and not one_episode else None
        self.first, self.total = stage * env.num_envs, stages * env.num_envs
        at = (self.first + torch.arange(env.num_envs)) * (clock or 0) // self.total  # [N], 0: not cut
        self.cuts = {int(t): at == t for t in at.unique() if t > 0}
        self.steps = 0  # of each environment, since the last restart
        self.cpu_s = {"simulate": 0.0, "act": 0.0}  # CPU seconds of this process, whole run
        self.simulate_s = 0.0  # by the clock, whole run
        self.device = env.device
        self.rows = rows
        self.acting = Acting(policy, later or compile.CompileSchedule(None), rows)
        self.generator = Generator(device=self.device)
        self.obs: Obs | None = None
        self.saves: bool | None = None  # whether the simulator can save itself; None: not asked yet
        self.running = torch.zeros(3, env.num_envs)  # return, length, success of the episode under way
        self.finished: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self.has_success = False
        self.round = 0  # the update whose seeds the episodes began with
        self.actions: list[Tensor] = []  # [T, N, ..] of every collect since, unless the simulator saves itself

    def restart(self, round_: int) -> None:
        """Begin new episodes everywhere, from seeds derived from (seed, round_). Episodes under way are dropped."""
        seeds = env_seeds(self.seed, round_, self.total, self.group_size)
        with watchdog.resetting:
            self.env.restart(seeds[self.first : self.first + self.env.num_envs])
        self.obs, self.round, self.actions, self.steps = None, round_, [], 0

    def _cut(self, step: Step) -> tuple[Step, Tensor | None]:
        """A step of every environment, and where bool [N] an episode was cut to stagger them (None: nowhere)."""
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

    def collect(self, horizon: int, *, update: int, version: int) -> Collected:
        """``horizon`` steps of every environment -> Trajectory [T, N, ..] and the episodes' metrics."""
        return interleaved([self.collecting(horizon, update=update, version=version)])[0]

    def collecting(self, horizon: int, *, update: int, version: int) -> Steps[None, None, Collected]:
        """As ``collect``, but stops while the simulator is busy with an action: others may act meanwhile."""
        env, policy = self.env, self.policy
        watchdog.describe(env_id=env.id, during=f"update {update}")
        full = self.restart_every and self.saves is False and self.steps + horizon > self.restart_every
        if self.one_episode or (full and self.steps):
            self.restart(update)
        if self.obs is None:
            with watchdog.resetting:
                self.obs = env.reset()
            self.running.zero_()
        if self.saves is None:
            self.saves = env.state() is not None
        decisions: list[list[Tensor]] = []
        observed: list[Obs] = []
        steps: list[Step] = []
        cuts: dict[int, Tensor] = {}
        now = time.process_time()
        keys = [sampling_key(self.seed, update, 0, t) for t in range(horizon)]
        mine = slice(self.first, self.first + env.num_envs)  # drawn for all stages: an environment's noise is its own
        noises = [policy.noise(self.total, self.generator.manual_seed(key))[mine] for key in keys]  # caches are warm
        for t, noise in enumerate(noises):
            decision = self.acting(self.obs, noise, update)
            before, now = now, time.process_time()
            self.cpu_s["act"] += now - before
            begun = begin(env, decision[0])
            yield
            now, begun_at = time.process_time(), time.perf_counter()  # what others did meanwhile is theirs
            step, cut = self._cut(begun())
            before, now = now, time.process_time()
            self.cpu_s["simulate"] += now - before
            self.simulate_s += time.perf_counter() - begun_at
            if cut is not None:
                cuts[t] = cut.cpu()
            observed.append(self.obs)
            decisions.append(decision)
            steps.append(step)
            self.obs = step.obs
        d, seen = self.acting.stack(decisions), tree.stack(observed)
        _check_finite(seen, env.id, update, "observation")
        if not self.saves and not self.one_episode:
            self.actions.append(d.action)
        reward, mask = torch.stack([s.reward for s in steps]), torch.stack([s.mask for s in steps])
        _check_finite(reward, env.id, update, "reward")
        terminated, truncated = torch.stack([s.terminated for s in steps]), torch.stack([s.truncated for s in steps])
        ended = terminated | truncated
        if self.one_episode:
            mask = mask & (ended.cumsum(0) - ended.long() == 0)  # up to the first end, that row included
        lasted = [s.executed for s in steps if s.executed is not None]
        executed = torch.stack(lasted) if lasted else None  # [T, N, C]
        count = None if executed is None else executed.sum(-1)  # [T, N]
        length = mask if count is None else count * mask
        gained = reward if count is None else reward.sum(-1)
        metrics = self._count_episodes(gained, ended & mask, length, [s.success for s in steps], cuts)
        each = d.value.ndim == 3  # each action of a chunk has a value, and so a reward and an advantage
        if count is not None and not each:
            reward = reward @ self.gamma ** torch.arange(reward.shape[-1], dtype=reward.dtype, device=reward.device)
        trajectory = Trajectory(
            obs=seen,
            action=d.action,
            log_prob=d.log_prob,
            value=d.value,
            replay=d.replay,
            next_value=self._next_value(d.value[..., 0] if each else d.value, steps),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            mask=mask,
            version=torch.full_like(mask, version, dtype=torch.int64),
            steps=None if each else count,
        )
        if each:
            assert executed is not None
            fields = by_action(d.value, trajectory.next_value, terminated, truncated, mask, executed)
            trajectory = replace(trajectory, **fields)
        return trajectory, metrics

    def _value(self, obs: Obs) -> Tensor:
        """V [N] of raw observations; of the first action, where each action of a chunk has a value."""
        value = in_parts(lambda part: self.policy.value(self.policy.encode(part)), self.rows, obs)
        return value if value.ndim == 1 else value[:, 0]

    def _next_value(self, value: Tensor, steps: list[Step]) -> Tensor:
        """V of every row's true successor, [T, N].

        Row t+1 acts on it unless the simulator began a new episode in the same step; then it is in ``final_obs``.
        """
        assert self.obs is not None
        next_value = torch.cat([value[1:], self._value(self.obs).unsqueeze(0)])
        ended = torch.stack([s.terminated | s.truncated for s in steps])
        for t, some in enumerate(ended.any(1).tolist()):  # a GPU waits here once
            final_obs = steps[t].final_obs
            if some and final_obs is not None:
                next_value[t] = torch.where(ended[t], self._value(final_obs), next_value[t])
        return next_value

    def _count_episodes(
        self, reward: Tensor, ended: Tensor, length: Tensor, success: list[Tensor | None], cuts: Mapping[int, Tensor]
    ) -> Metrics:
        """Add the episodes that ended in these steps to the window; their number and the window's means.

        ``length`` [T, N]: primitive steps that count. ``cuts``: row -> where an episode was cut to stagger them; such
        an episode says nothing and is not counted.
        """
        reward, ended, counted = reward.cpu(), ended.cpu(), length.cpu().float()
        count = 0
        for t in range(reward.shape[0]):
            self.running[0] += reward[t]
            self.running[1] += counted[t]
            won = success[t]
            if won is not None:
                self.has_success = True
                self.running[2] = torch.maximum(self.running[2], won.cpu().float())
            over = ended[t]
            if t in cuts:
                self.running[:, cuts[t]] = 0.0
                over = over & ~cuts[t]
            for i in over.nonzero().flatten().tolist():
                total, steps, won_once = self.running[:, i].tolist()
                self.finished.append((total, steps, won_once))
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
        self.acting.later.close()
        self.env.close()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs: the simulator's own state, or the actions that lead there from its last restart."""
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

    def load_state(self, state: Mapping[str, Any], *, notice: Callable[[str], None] = lambda text: None) -> None:
        """Continue from ``state``. A simulator that does not repeat itself begins anew, and ``notice`` hears it."""
        self.finished = deque((tuple(e) for e in state["finished"]), maxlen=WINDOW)
        self.has_success = state["has_success"]
        self.saves = state["env"] is not None
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
                self.obs = self._cut(begin(self.env, action)())[0].obs
            self.actions = [actions]
            now, then = (tree.leaves(tree.map(Tensor.cpu, obs)) for obs in (self.obs, state["obs"]))
            if not all(map(torch.equal, now, then)):
                notice("resume: the simulator did not repeat itself; its episodes begin anew")
                return self.restart(state["round"])
        self.running = state["running"].clone()


def added(metrics: Sequence[Metrics]) -> Metrics:
    """Metrics of several rollouts as one: means and numbers are added up."""
    found: Metrics = {}
    for told in metrics:
        for tag, value in told.items():
            before = found.get(tag)
            found[tag] = value if before is None else before + value  # pyright: ignore[reportOperatorIssue]
    return found


class Staged:
    """Several rollouts that take turns: while the simulator of one works, the policy acts for the next."""

    one_state = False

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = list(rollouts)

    @property
    def cpu_s(self) -> dict[str, float]:
        return {phase: sum(r.cpu_s[phase] for r in self.rollouts) for phase in self.rollouts[0].cpu_s}

    def collect(self, horizon: int, *, update: int, version: int) -> Collected:
        """As of ``Rollout``; environments of the stages side by side."""
        done = interleaved([r.collecting(horizon, update=update, version=version) for r in self.rollouts])
        trajectories, metrics = zip(*done, strict=True)
        whole = tree.map(lambda *xs: torch.cat(xs, dim=1), trajectories[0], *trajectories[1:])
        return whole, added(metrics)

    def state(self) -> dict[str, Any]:
        return {"stages": [r.state() for r in self.rollouts]}

    def load_state(self, state: Mapping[str, Any], *, notice: Callable[[str], None] = lambda text: None) -> None:
        """Continue from ``state`` of as many stages."""
        for r, s in zip(self.rollouts, state["stages"], strict=True):
            r.load_state(s, notice=notice)

    def close(self) -> None:
        for r in self.rollouts:
            r.close()
