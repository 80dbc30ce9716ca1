"""One simulated robot under interactive control: agents, commands, pushes, replays. No viewer."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mujoco
import numpy as np
import torch
from torch import Generator, Tensor

from embodied_envs.adapters import gymnasium_env
from embodied_envs.adapters.multi_task import MultiTaskEnv
from embodied_envs.base.errors import EnvError
from embodied_envs.physics.cameras import POSE_FIELDS, travelling_body
from embodied_envs.types import Discrete, VectorEnv, starts
from embodied_ppo.core.recurrent_state import EpisodeMemory
from embodied_ppo.core.types import Policy
from embodied_ppo.evaluation import episodes as evaluation
from embodied_ppo.evaluation.episodes import MAX_STEPS, fingerprint

AGENTS = ("trained", "zero", "random")

HISTORY_S = 60.0  # seconds of simulation that are kept for videos

# Largest number of control steps that are made up for when the machine is too slow.
MAX_LATE_STEPS = 10

# Force of a pull per distance and mass of the robot, 1/s²: 0.5 m pull with its weight.
PULL_RATE = 20.0
PULL_LIMIT = 20.0  # largest force of a pull per mass of the robot, m/s²


@dataclass(frozen=True)
class Frame:
    """What is shown of one control step.

    Attributes:
        pose: POSE_FIELDS of MjData after the step.
        reward: Reward of the step.
        terms: Numbers of the step by name, such as the terms of the reward.
        command: The command after the step, [C]; empty without one.
        velocity: Linear and angular velocity of the base after the step, world and base frame, [6];
            empty without a root free joint.
    """

    pose: Mapping[str, np.ndarray]
    reward: float
    terms: Mapping[str, float]
    command: np.ndarray
    velocity: np.ndarray


@dataclass
class Pull:
    """A pull on a body by a spring.

    Attributes:
        body: Body of the model.
        point: Point of the body that is pulled, in its frame, m [3].
        target: Position to which it is pulled, m [3].
    """

    body: int
    point: np.ndarray
    target: np.ndarray


class ReplayedEpisode(NamedTuple):
    """A replayed episode: hash of the first observation, return, and number of steps."""

    initial_state: str
    return_: float
    steps: int


class Player:
    """A world with one robot that acts as in an evaluation, unless the user intervenes.

    Each episode is an episode of the evaluation with the same seed, and ``reset`` starts the next
    one. Without a held command, a push or a pull, its actions and states are those of
    ``embodied-ppo evaluate``.

    Attributes:
        agent: One of AGENTS.
        pull: Pull that acts during the steps; None: none.
        speed: Simulated seconds per second.
        paused: Whether no step is due.
        episode: Number of the current episode of the evaluation.
        steps: Number of its steps so far.
        frames: The last steps (live), or all steps of the replayed episode.
        cursor: Index of the shown frame in a replay; None: live.
        ended: How the last episode ended, or "".
        commands: Name of each command -> its range; empty: the task has none.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy | None = None,
        *,
        seed: int = 0,
        episode: int = 0,
        deterministic: bool = True,
        agent: str = "trained",
    ) -> None:
        """Start an episode.

        Args:
            env: One environment of a MuJoCo task, with all wrappers.
            policy: The trained policy in evaluation mode; None: there is none.
            seed: Seed of the evaluation.
            episode: Number of its first episode.
            deterministic: Whether the trained policy acts with the mode of its distribution.
            agent: The first agent, one of AGENTS.

        Raises:
            EnvError: The simulator does not give access to its state.
        """
        self.env, self.policy, self.seed, self.deterministic = env, policy, seed, deterministic
        self.model, self._fields = _world(env)
        self.data = mujoco.MjData(self.model)  # computes positions for pictures and pushes
        self.step_s = env.step_s or 0.02
        self.agent = "zero" if policy is None and agent == "trained" else agent
        self.pull: Pull | None = None
        self.speed, self.paused, self.cursor, self.ended = 1.0, False, None, ""
        self.base = travelling_body(self.model)
        simulator = _simulator(env)
        self._state: Mapping[str, Tensor] = getattr(simulator, "s", {})
        self.commands: Mapping[str, tuple[float, float]] = {}
        if "command" in self._state:
            self.commands = dict(simulator.task.commands)
        self._checked, self._credit, self._held = 0.0, 0.0, None
        self.reset(episode)

    # ------------------------------------------------------------------------------------- the loop
    def due(self, now: float) -> int:
        """Return how many steps are due at a time of a monotonic clock, s.

        The speed changes only this number. Steps that a slow machine has missed are dropped.
        """
        elapsed, self._checked = now - self._checked, now
        if self.paused:
            self._credit = 0.0
            return 0
        self._credit = min(self._credit + elapsed * self.speed / self.step_s, MAX_LATE_STEPS)
        steps = int(self._credit)
        self._credit -= steps
        return steps

    def advance(self) -> None:
        """Simulate one control step, or show the next frame of the replay, which pauses at its end.

        Raises:
            CheckpointError: The policy's action is not finite.
            EnvError: An observation is not finite.
        """
        if self.cursor is None:
            self.step()
        elif self.cursor < len(self.frames) - 1:
            self.cursor += 1
        else:
            self.paused = True

    @torch.no_grad()
    def step(self) -> bool:
        """Simulate one control step and return whether the episode has ended; see ``advance``."""
        if self.pull is not None:
            self._apply_pull(self.pull)
        action, state = self._act()
        step = self.env.step(action.to(self.env.device))
        self._memory.store(state, starts(step))
        self._obs, self.steps = step.obs, self.steps + 1
        info = {k: x for k, x in (step.info or {}).items() if not k.startswith("command_")}
        terms = {name: float(x.flatten()[0]) for name, x in info.items()}
        reward = float(step.reward.double().sum())
        terminated = bool(step.terminated[0])
        self._return += reward
        if not terminated and not bool(step.truncated[0]):
            self.frames.append(self._frame(reward, terms))
            return False
        if self.cursor is None:
            how = "the task ended it" if terminated else "time limit"
            self.ended = f"episode {self.episode}: {how} after {self.steps} steps"
            self.ended += f", return {self._return:.4g}"
            self.reset(self.episode + 1)
        return True

    def _act(self) -> tuple[Tensor, Tensor]:
        """Return the action [1, ..] of the agent, and the policy's state after it."""
        if self.agent == "trained" and self.policy is not None:
            acting = {"seed": self.seed, "deterministic": self.deterministic, "t": self.steps}
            inputs = self.policy, self._obs, self._memory
            return evaluation.act(*inputs, first_episode=self.episode, **acting)
        spec = self.env.action_spec
        if isinstance(spec, Discrete):
            high = spec.n if self.agent == "random" else 1
            action = torch.randint(high, (1,), generator=self._generator)
        else:
            action = torch.zeros(1, spec.size)
            if self.agent == "random":
                action.uniform_(-1.0, 1.0, generator=self._generator)
        return action, self._memory.state

    def reset(self, episode: int | None = None) -> None:
        """Start an episode of the evaluation; None: the next one. A replay ends."""
        self.episode = self.episode + 1 if episode is None else episode
        self._episode_seed = evaluation.evaluation_seeds(self.seed, self.episode + 1)[-1]
        self._generator = Generator().manual_seed(self._episode_seed)
        self.env.restart([self._episode_seed])
        self._obs, self.steps, self._return = self.env.reset(), 0, 0.0
        self._memory = EpisodeMemory(self.policy, 1, evaluation.policy_device(self.policy))
        if self.cursor is not None or not hasattr(self, "frames"):
            self.frames: deque[Frame] = deque(maxlen=round(HISTORY_S / self.step_s))
        self.cursor, self.pull = None, None
        self.frames.append(self._frame(0.0, {}))

    def replay(self, number: int) -> ReplayedEpisode:
        """Simulate a complete episode of the evaluation with the trained policy, and show it.

        Commands, pushes and pulls do not act in it.

        Raises:
            CheckpointError, EnvError: See ``advance``.
        """
        held, agent = self.held, self.agent
        self.held, self.agent = None, "zero" if self.policy is None else "trained"
        try:
            self.reset(number)
            first = fingerprint(self._obs)
            self.frames, self.cursor = deque([self.frames[-1]]), 0
            # legged_gym's episodes last one step more than their limit.
            limit = (self.env.max_episode_steps or MAX_STEPS) + 1
            while self.steps < limit and not self.step():
                pass
        finally:
            self.held, self.agent = held, agent
        return ReplayedEpisode(first, self._return, self.steps)

    # -------------------------------------------------------------------------------- what is shown
    @property
    def shown(self) -> int:
        """Index of the shown frame."""
        return len(self.frames) - 1 if self.cursor is None else self.cursor

    def mean_terms(self, seconds: float) -> dict[str, float]:
        """Return the means of the reward and its terms over the last shown seconds.

        Of a Gymnasium task's numbers these are the ones named reward, if there are some.
        """
        first = max(0, self.shown + 1 - max(1, round(seconds / self.step_s)))
        shown = list(itertools.islice(self.frames, first, self.shown + 1))
        names = list(shown[-1].terms)
        names = [name for name in names if "reward" in name] or names
        means = {n: float(np.mean([f.terms.get(n, 0.0) for f in shown])) for n in names}
        return {"reward": float(np.mean([f.reward for f in shown])), **means}

    def positions(self, frame: Frame) -> mujoco.MjData:
        """Return data with the positions of all bodies in a frame; valid until the next call."""
        for name, x in frame.pose.items():
            getattr(self.data, name)[...] = x
        mujoco.mj_kinematics(self.model, self.data)
        return self.data

    def _frame(self, reward: float, terms: Mapping[str, float]) -> Frame:
        """Return the current state."""
        command = self._state["command"][0].cpu().numpy() if self.commands else np.zeros(0)
        dof = self._base_dofs()
        velocity = self._fields["qvel"][dof].copy() if len(dof) == 6 else np.zeros(0)
        pose = {name: self._fields[name].copy() for name in POSE_FIELDS}
        return Frame(pose, reward, terms, command.copy(), velocity)

    # ------------------------------------------------------------------------ what the user changes
    @property
    def held(self) -> list[float] | None:
        """Command that replaces that of the task from the next step on; None: the task's."""
        return self._held

    @held.setter
    def held(self, command: list[float] | None) -> None:
        self._held, simulator = command, _simulator(self.env)
        if self.commands:
            values = {} if command is None else {"command": torch.tensor([command])}
            simulator.hold_variables(values)

    def _base_dofs(self) -> np.ndarray:
        """Return the degrees of freedom of the root body of a robot that travels, else none."""
        if self.base is None:
            return np.zeros(0, dtype=int)
        start = int(self.model.body_dofadr[self.base])
        return np.arange(start, start + int(self.model.body_dofnum[self.base]))

    def push(self, change: Sequence[float]) -> None:
        """Add a velocity, m/s [3] in the world's frame, to a robot that travels.

        A planar robot receives the part that its joints allow.
        """
        data, jacobian = self.positions(self._frame(0.0, {})), np.zeros((3, self.model.nv))
        mujoco.mj_comPos(self.model, data)
        mujoco.mj_jacBody(self.model, data, jacobian, None, self.base)
        dofs = self._base_dofs()
        self._fields["qvel"][dofs] += np.linalg.pinv(jacobian[:, dofs]) @ change

    def _apply_pull(self, pull: Pull) -> None:
        """Add the velocities that the force F of the pull causes in one control step Δt.

        Δq̇ = M⁻¹ Jᵀ F Δt. The force is proportional to the distance and to the robot's mass. It is
        limited so that a light link does not overshoot its target: e = nᵀ J M⁻¹ Jᵀ n, the inverse
        mass of the point in the direction n of the force, bounds the change of its velocity.
        """
        model, data = self.model, self.data
        self.positions(self._frame(0.0, {}))
        data.qvel[:] = self._fields["qvel"]
        mujoco.mj_forward(model, data)
        point = data.xpos[pull.body] + data.xmat[pull.body].reshape(3, 3) @ pull.point
        vector = pull.target - point
        distance = float(np.linalg.norm(vector))
        if distance < 1e-6:
            return
        direction = vector / distance
        jacobian = np.zeros((3, model.nv))
        mujoco.mj_jac(model, data, jacobian, None, point, pull.body)
        row = direction @ jacobian
        change = np.zeros((1, model.nv))
        mujoco.mj_solveM(model, data, change, row[None])
        inverse_mass = float(row @ change[0])
        mass = float(model.body_subtreemass[model.body_rootid[pull.body]])
        impulse = mass * min(PULL_RATE * distance, PULL_LIMIT) * self.step_s
        largest = 0.5 * distance / self.step_s - float(row @ data.qvel)
        if inverse_mass > 0:
            qvel = self._fields["qvel"]
            qvel += change[0] * min(impulse, max(0.0, largest / inverse_mass))


def _simulator(env: VectorEnv) -> Any:
    """Return the simulator inside all wrappers; that of the task where a policy learned several."""
    simulator = env.simulator
    return simulator.parts[0][0].simulator if isinstance(simulator, MultiTaskEnv) else simulator


def _world(env: VectorEnv) -> tuple[mujoco.MjModel, Mapping[str, np.ndarray]]:
    """Return the model and views of the fields of MjData of the first world.

    Raises:
        EnvError: The simulator does not give access to them.
    """
    simulator = _simulator(env)
    names = (*POSE_FIELDS, "qvel")
    if hasattr(simulator, "physics"):  # our own tasks
        fields = simulator.physics.fields
        return simulator.physics.model, {name: fields[name][0].numpy() for name in names}
    hint = "play shows our own tasks and Gymnasium's MuJoCo tasks"
    if isinstance(simulator, gymnasium_env.GymnasiumEnv):
        first: Any = simulator.first_environment().unwrapped
        model, data = getattr(first, "model", None), getattr(first, "data", None)
        if isinstance(model, mujoco.MjModel) and isinstance(data, mujoco.MjData):
            return model, {name: getattr(data, name) for name in names}
    elif gymnasium_env.has_task(simulator.id):
        hint = "write env.simulator=gymnasium, which has this task, too"
    raise EnvError(
        f"{hint}: env.id={simulator.id}: {type(simulator).__name__} does not give access to its"
        " MuJoCo state"
    )
