"""Small environments and a policy whose numbers are known in advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import gymnasium
import mujoco
import numpy as np
import torch
from torch import Tensor, nn

import embodied_envs
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks import State, Task
from embodied_envs.types import ActionSpec, ArraySpec, Box, Obs, ObsSpec, Step, VectorEnv
from embodied_ppo.core.types import Decision, Evaluation


def make_world(id: str, n: int = 2, **options: Any) -> MujocoEnv:
    """Return ``n`` worlds of a task of our own, with the seeds 0 to ``n`` - 1."""
    options = {"seeds": list(range(n)), "num_threads": 1} | options
    env = embodied_envs.make(id, num_envs=n, **options)
    assert isinstance(env, MujocoEnv)
    return env


# ----------------------------------------------------------------------------- scripted environment
class ScriptedEnv(VectorEnv):
    """Environment i has episodes of ``lengths[i]`` steps.

    Episodes of environments with ``clock[i]`` end by truncation, the others by termination.

    obs      (i, episode, step) of the state to act on
    reward   100 i + 10 episode + step (1 for the first step)
    success  True in the last step of odd episodes

    With ``same_step`` the row that ends an episode carries final_obs and the first observation of
    the next episode; otherwise the next row is a dummy (mask False).
    """

    id = "scripted"
    max_episode_steps: int | None = None
    obs_spec: ObsSpec = ArraySpec((3,))
    action_spec: ActionSpec = Box((-1.0,), (1.0,))
    device = torch.device("cpu")

    def __init__(
        self, lengths: list[int], clock: list[bool], *, same_step: bool = False, saves: bool = False
    ) -> None:
        self.lengths, self.clock, self.same_step, self.saves = lengths, clock, same_step, saves
        self.num_envs = len(lengths)
        self.actions: list[Tensor] = []
        self.seeds: list[list[int]] = []
        self.at = [(0, 0, False)] * self.num_envs  # episode, step, ended

    def reset(self) -> Obs:
        self.at = [(0, 0, False)] * self.num_envs
        return self._obs()

    def _obs(self) -> Tensor:
        return torch.tensor(
            [[i, episode, step] for i, (episode, step, _) in enumerate(self.at)],
            dtype=torch.float32,
        )

    def step(self, action: Tensor) -> Step:
        self.actions.append(action.clone())
        reward, terminated, truncated, mask, success = (
            torch.zeros(self.num_envs) for _ in range(5)
        )
        for i, (episode, step, ended) in enumerate(self.at):
            if ended:
                self.at[i] = (episode + 1, 0, False)
                continue
            step += 1
            done = step == self.lengths[i]
            mask[i], reward[i] = 1, 100 * i + 10 * episode + step
            terminated[i], truncated[i] = done and not self.clock[i], done and self.clock[i]
            success[i] = done and episode % 2
            self.at[i] = (episode, step, done)
        flags = {"terminated": terminated, "truncated": truncated, "success": success}
        flags = {name: x.bool() for name, x in flags.items()}
        if not self.same_step:
            return Step(obs=self._obs(), reward=reward, mask=mask.bool(), **flags)
        final = self._obs()
        self.at = [
            (episode + 1, 0, False) if done else (episode, step, done)
            for episode, step, done in self.at
        ]
        return Step(obs=self._obs(), reward=reward, mask=mask.bool(), final_obs=final, **flags)

    def reset_where(self, where: Tensor) -> Obs:
        self.at = [
            (at[0] + 1, 0, False) if cut else at
            for at, cut in zip(self.at, where.tolist(), strict=True)
        ]
        return self._obs()

    def restart(self, seeds: list[int]) -> None:
        self.seeds.append(seeds)

    def state(self) -> dict[str, Any] | None:
        return {"at": list(self.at)} if self.saves else None

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        self.at = [tuple(x) for x in state["at"]]
        return self._obs()

    def render(self) -> Tensor:
        return torch.zeros(4, 4, 3, dtype=torch.uint8)

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------ MuJoCo task
BALANCE = """<mujoco model="balance">
  <option timestep="0.02" integrator="implicitfast"/>
  <worldbody>
    <light pos="0 0 3" dir="0 0 -1" castshadow="false"/>
    <geom name="floor" type="plane" size="3 3 .1" pos="0 0 -1" rgba=".3 .3 .3 1"/>
    <camera name="eye" pos="0 -3 .5" xyaxes="1 0 0 0 0 1"/>
    <camera name="side" pos="3 0 .5" xyaxes="0 1 0 0 0 1"/>
    <body name="cart">
      <joint name="slide" type="slide" axis="1 0 0" range="-2 2" limited="true" damping=".1"/>
      <geom type="box" size=".2 .1 .1" mass="1" rgba=".8 .2 .2 1"/>
      <body name="pole">
        <joint name="hinge" axis="0 1 0" damping=".01"/>
        <geom type="capsule" fromto="0 0 0 0 0 .8" size=".05" mass=".2" rgba=".2 .4 .9 1"/>
      </body>
    </body>
  </worldbody>
  <actuator><motor name="push" joint="slide" gear="1000"/></actuator>
  <sensor><jointpos name="angle" joint="hinge"/></sensor>
</mujoco>"""


class Balance(Task):
    """A pole on a cart. The reward is 1 per step; the pole must not lean by over 0.5 rad.

    Observation [N, 4]: qpos, qvel. Variables: "pushes" [N], control steps of this episode; "gust"
    [N], a number drawn in every step.
    """

    id = "Balance"
    max_episode_steps, reset_noise, step_noise = 200, 2, 1
    ranges: ClassVar = {"mass": (0.5, 1.5)}

    def __init__(self, mjcf: str = BALANCE, sensor: str = "angle", blow_up: float = 2.0) -> None:
        """Store the options; an action above ``blow_up`` makes the simulation unstable."""
        self.mjcf, self.sensor, self.blow_up = mjcf, sensor, blow_up

    def spec(self) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_string(self.mjcf)

    def bind(self, model: mujoco.MjModel, device: torch.device, dtype: torch.dtype) -> None:
        self.angle = int(model.sensor(self.sensor).adr[0])

    fields = ("sensordata",)

    def action_bounds(self, model: mujoco.MjModel) -> tuple[list[float], list[float]]:
        return [-1.0], [1.0]

    def control(self, s: State, action: Tensor) -> Tensor:
        return torch.where(action > self.blow_up, torch.full_like(action, 9e9), 0.01 * action)

    def observe(self, s: State) -> Tensor:
        return torch.cat([s["qpos"], s["qvel"]], 1)

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return torch.ones_like(action[:, 0])

    def terminated(self, s: State) -> Tensor:
        return s["sensordata"][:, self.angle].abs() > 0.5

    def success(self, s: State) -> Tensor:
        return s["pushes"] >= 20

    def advance(self, s: State, action: Tensor, u: Tensor) -> dict[str, Tensor]:
        return {"pushes": s["pushes"] + 1, "gust": u[:, 0]}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros_like(u[:, 0])
        return {"qpos": 0.1 * (2 * u - 1), "pushes": zeros.long(), "gust": zeros}


DRIFTER = """<mujoco>
  <option timestep="0.01" gravity="0 0 0"/>
  <worldbody>
    <body name="block" pos="3 0 0"><freejoint/><geom size=".1"/></body>
    <body name="base">
      <freejoint/><geom type="box" size=".2 .1 .1"/>
      <body pos="0.3 0 0"><joint name="arm" axis="0 1 0"/>
        <geom type="capsule" size=".03" fromto="0 0 0 .3 0 0"/></body>
    </body>
  </worldbody>
  <actuator><motor joint="arm"/></actuator>
</mujoco>"""


class Drifter(Task):
    """A robot with an arm that floats beside a block. Observation: qvel."""

    id = "Drifter"
    max_episode_steps = 40

    def __init__(self, stage: Any = "velocity", decimation: int = 2) -> None:
        self.stage, self.decimation = stage, decimation

    def spec(self) -> mujoco.MjSpec:
        return mujoco.MjSpec.from_string(DRIFTER)

    def observe(self, s: State) -> Tensor:
        return s["qvel"].clone()

    def reward(self, before: State, s: State, action: Tensor) -> Tensor:
        return s["qvel"][:, 0]


class Grouped(Balance):
    """Balance with a randomised mass that only the group "privileged" contains."""

    privileged_fields = ("body_mass",)

    def privileged(self, s: State) -> Tensor:
        return torch.cat([s["body_mass"][:, 1:], s["gust"].unsqueeze(1)], 1)


class Leveled(Balance):
    """Balance with a level, which rises with each episode and is the observation "level"."""

    def groups(self) -> dict[str, Callable[[State], Tensor]]:
        return {"level": lambda s: s["terrain_level"].unsqueeze(1).to(s["qpos"])}

    def reset(self, u: Tensor) -> dict[str, Tensor]:
        return super().reset(u) | {"terrain_level": (4 * u[:, 0]).long()}

    def carry_over(self, s: State, start: State, u: Tensor) -> dict[str, Tensor]:
        level = s["terrain_level"] + 1
        return {"terrain_level": level, "qpos": start["qpos"] + 0.01 * level.unsqueeze(1)}


class Privileged(Balance):
    """Balance with a privileged observation, which exists in simulation only."""

    def observe(self, s: State) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {
            "state": torch.cat([s["qpos"], s["qvel"]], 1),
            "privileged_mass": torch.ones_like(s["qpos"][:, :1]),
        }


def value_of(obs: Tensor) -> Tensor:
    """Return V = 1000 i + 100 episode + step + 1/2 of a scripted observation [.., 3]."""
    return obs @ torch.tensor([1000.0, 100.0, 1.0]) + 0.5


class CountingPolicy(nn.Module):
    """Policy for ``ScriptedEnv``: V is ``value_of`` and actions are noise.

    Log-probabilities are the negative actions; replay repeats the observation.
    """

    def encode(self, obs: Obs) -> Any:
        return obs

    def noise(self, rows: int, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(rows, 1, generator=generator)

    def act(self, inputs: Any, *, noise: Tensor | None = None) -> Decision:
        action = torch.zeros(inputs.shape[0], 1) if noise is None else noise
        return Decision(action, -action.unsqueeze(1), value_of(inputs), {"seen": inputs})

    def evaluate(self, inputs: Any, action: Tensor, replay: dict[str, Tensor]) -> Evaluation:
        return Evaluation(
            -action.unsqueeze(1), torch.zeros_like(action).unsqueeze(1), value_of(inputs)
        )

    def value(self, inputs: Any) -> Tensor:
        return value_of(inputs)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        return {"actor": [], "critic": []}

    def units(self) -> list[nn.Module]:
        return []

    def observe(self, obs: Obs, mask: Tensor, progress: float = 0.0) -> None:
        pass


# ----------------------------------------------------------------------------------- Gymnasium task
class Point(gymnasium.Env):
    """Move a point to the origin of the plane; the info has ``success`` and ``near``.

    An episode ends at success. ``far`` scales the initial position, so that kwargs have an effect.
    ``late``: the info is empty except at success.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012
    observation_space = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-2, 2, (2,), np.float32)

    def __init__(self, far: float = 1.0, late: bool = False, render_mode: Any = None) -> None:
        self.far, self.late = far, late

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.x = self.np_random.uniform(-self.far, self.far, 2).astype(np.float32)
        return self.x.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.x = (self.x + 0.2 * action).clip(-10, 10).astype(np.float32)
        distance = float(np.linalg.norm(self.x))
        info = {"success": distance < 0.3, "near": distance < 0.6}
        info = info if info["success"] or not self.late else {}
        return self.x.copy(), -distance, distance < 0.3, False, info


class Faulty(Point):
    """A point one of whose rewards is wrong: that of call ``step`` of the environment ``seed``."""

    def __init__(self, seed: int = -1, step: int = -1, reward: float = 1e6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fault, self.wrong_reward = (seed, step), reward
        self.seed, self.calls = -1, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        if seed is None:
            self.calls += 1  # the vector environment resets in a call of its own
        else:
            self.seed = seed
        return super().reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if (self.seed, self.calls) == self.fault:
            reward = self.wrong_reward
        self.calls += 1
        return obs, reward, terminated, truncated, info


def named_cart_pole() -> gymnasium.Env:
    """Return CartPole whose observation has the names of an exported policy's outputs."""
    env = gymnasium.make("CartPole-v1")
    space = gymnasium.spaces.Dict(dict.fromkeys(("action", "logits"), env.observation_space))
    return gymnasium.wrappers.TransformObservation(env, lambda x: dict.fromkeys(space, x), space)


if "toy_envs/Point-v0" not in gymnasium.registry:
    gymnasium.register("toy_envs/Point-v0", "toy_envs:Point", max_episode_steps=12)
    gymnasium.register("toy_envs/Faulty-v0", "toy_envs:Faulty", max_episode_steps=12)
