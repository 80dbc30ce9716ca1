"""check_env on a correct environment, on one environment per fault, and on the adapters."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import embodied_envs
from embodied_envs.checks import Report, check_env
from embodied_ppo.core.types import (
    ActionSpec,
    ArraySpec,
    Box,
    EnvError,
    Obs,
    ObsSpec,
    Step,
    VectorEnv,
)

LIMIT = 7


class Walk:
    """A correct VectorEnv: a random walk [position, steps since reset] that ends outside [-3, 3].

    ``same_step``: reset in the step that ends an episode and return ``final_obs``; else reset in
    the next one, which is masked. ``fault``: name of one violation of the contract.
    """

    id = "Walk"
    max_episode_steps: int | None = LIMIT
    obs_spec: ObsSpec = ArraySpec((2,))
    action_spec: ActionSpec = Box((-1.0,), (1.0,))

    def __init__(self, seeds: list[int], *, same_step: bool = False, fault: str = "") -> None:
        self.num_envs = len(seeds)
        self.device = torch.device("meta" if fault == "device" else "cpu")
        self.same_step, self.fault = same_step, fault
        if fault == "clock short":
            self.max_episode_steps = LIMIT + 1
        if fault == "clock long":
            self.max_episode_steps = LIMIT - 1
        if fault == "num_envs":
            self.num_envs = 0
        if fault == "bounds":
            self.action_spec = Box((1.0,), (-1.0,))
        self._buffer = torch.zeros(len(seeds), 2)
        self._closed = False
        self.restart(seeds)

    def reset_where(self, where: Tensor) -> Any:
        if self.fault == "no reset_where":
            return None
        if self.fault == "reset_where others":
            where = torch.ones_like(where)
        if self.fault == "reset_where none" and not where.any():
            where = ~where
        for i in where.nonzero().flatten().tolist():
            self._reset(i)
        if self.fault == "reset_where masked":
            self.ended |= where
        return self._obs()

    def restart(self, seeds: list[int]) -> None:
        if self.fault == "restart" and hasattr(self, "random"):
            return
        self.random = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.position, self.clock = torch.zeros(len(seeds)), torch.zeros(len(seeds))
        self.ended = torch.zeros(len(seeds), dtype=torch.bool)

    def _draw(self, i: int, scale: float) -> float:
        if self.fault == "global random":
            return float(torch.randn(()) * scale)
        if self.fault == "time":
            return time.perf_counter() % 1.0
        return float(torch.randn((), generator=self.random[i]) * scale)

    def _reset(self, i: int) -> None:
        self.position[i], self.clock[i] = self._draw(i, 0.1), 0.0

    def _obs(self) -> Any:
        if self.fault == "aliasing":
            self._buffer[:, 0], self._buffer[:, 1] = self.position, self.clock
            return self._buffer
        obs = torch.stack([self.position, self.clock], 1)
        if self.fault == "shared state":
            self.position = obs[:, 0]
        if self.fault == "obs dtype":
            obs = obs.double()
        if self.fault == "obs shape":
            obs = obs.T.contiguous()
        if self.fault == "obs numpy":
            return obs.numpy()
        if self.fault == "obs dict":
            return {"state": obs}
        if self.fault == "nan" and bool((self.clock == 5).any()):
            obs[0, 0] = torch.nan
        return obs

    def reset(self) -> Obs:
        for i in range(self.num_envs):
            self._reset(i)
        if self.fault != "reset mid-episode":
            self.ended = torch.zeros(self.num_envs, dtype=torch.bool)
        return self._obs()

    def step(self, action: Tensor) -> Step:
        if self._closed and self.fault != "open":
            raise EnvError("closed")
        if self.fault == "changes action":
            action.clamp_(-0.5, 0.5)
        mask = ~self.ended
        for i in range(self.num_envs):
            if self.ended[i]:
                if self.fault != "off by one":
                    self._reset(i)
                if self.fault == "dummy row moves":
                    self.position[i] += 0.1 * action[i, 0]
            else:
                self.position[i] += action[i, 0] + self._draw(i, 0.5)
                self.clock[i] += 1
        terminated = mask & (self.position.abs() > 3)
        truncated = mask & (self.clock >= LIMIT)
        truncated &= ~terminated
        if self.fault == "both flags":
            truncated |= terminated
        ended = terminated | truncated
        reward = torch.where(mask, self.position, 0.0)
        success = mask & (self.position > 1)
        if self.fault == "dummy reward":
            reward = self.position.clone()
        if self.fault == "dummy success":
            success |= ~mask
        if self.fault == "dummy ends":
            terminated |= ~mask
        if self.fault == "reward dtype":
            reward = reward.double()
        if self.fault == "flag dtype":
            truncated = truncated.float()
        if self.fault == "masks all":
            mask = mask & ~ended
        if self.fault == "masks nothing":
            mask = torch.ones_like(mask)
        return self._result(reward, terminated, truncated, mask, ended, success)

    def _result(
        self, reward: Any, terminated: Any, truncated: Any, mask: Any, ended: Tensor, success: Any
    ) -> Step:
        final_obs = None
        if self.same_step:
            final_obs = self._obs()
            for i in ended.nonzero().flatten().tolist():
                self._reset(i)
            if self.fault == "final is reset":
                final_obs = self._obs()
            if self.fault == "final shape":
                final_obs = final_obs[:, :1]
            if self.fault == "no final":
                final_obs = None
        elif self.fault == "off by one":
            for i in ended.nonzero().flatten().tolist():
                self._reset(i)
        self.ended = torch.zeros_like(ended) if self.same_step else ended
        return Step(self._obs(), reward, terminated, truncated, mask, final_obs, success)

    def state(self) -> dict[str, Any] | None:
        if self.fault == "no state":
            return None
        fields = {"position": self.position, "clock": self.clock, "ended": self.ended}
        if self.fault == "state without random":
            return fields | {"random": []}
        return fields | {"random": [r.get_state() for r in self.random]}

    def load_state(self, state: Mapping[str, Any]) -> Obs:
        self.position, self.clock, self.ended = (
            state[k].clone() for k in ("position", "clock", "ended")
        )
        for generator, saved in zip(self.random, state["random"], strict=False):
            generator.set_state(saved)
        if self.fault == "load_state returns reset":
            return torch.zeros(self.num_envs, 2)
        return self._obs()

    def render(self) -> Tensor:
        raise EnvError("rendering is disabled")

    def close(self) -> None:
        if self._closed and self.fault == "close twice":
            raise RuntimeError("already closed")
        self._closed = True


RESTART_DIFFERS = (
    r"with the same seeds and actions after restart\(seeds\), observation differs in reset"
)
FAULTS = {
    # fault: (pattern of the message, same_step)
    "num_envs": ("num_envs is 0", False),
    "bounds": ("not in order", False),
    "device": (r"observation of reset\(\) is on cpu; it must be on env.device, meta", False),
    "obs dtype": (r"observation of reset\(\) is torch.float64; it must be torch.float32", False),
    "obs shape": (r"shape \[2, 4\]; it must be \[4, 2\]", False),
    "obs numpy": ("is a ndarray; it must be a torch.Tensor", False),
    "obs dict": ("is a dict; obs_spec declares one tensor", False),
    "nan": ("observation of step 4 is not finite", False),
    "reward dtype": ("reward of step 0 is torch.float64", False),
    "flag dtype": ("truncated of step 0 is torch.float32", False),
    "final shape": (r"\(final_obs\) has shape \[4, 1\]", True),
    "both flags": ("terminated and truncated are both True", False),
    "dummy reward": ("a masked row has a reward", False),
    "dummy success": ("a masked row is a success", False),
    "dummy ends": ("a masked row ends an episode", False),
    "dummy row moves": ("another action on a masked row changes observation", False),
    "masks all": ("a masked row", False),
    "masks nothing": ("ended at step .* with final_obs None, and step .* is not masked", False),
    "no final": ("ended at step .* with final_obs None, and step .* is not masked", True),
    "final is reset": ("final_obs is equal to the next episode's first observation", True),
    "off by one": (r"off by one", False),
    "clock short": ("truncated after 7 steps at step .*, and max_episode_steps is 8", False),
    "clock long": ("an episode continues after 6 steps", False),
    "changes action": (r"step\(\) modified its argument at step 0", False),
    "aliasing": ("overwrote observation of the previous result", False),
    "shared state": ("overwrote observation|overwriting earlier results", False),
    "global random": (RESTART_DIFFERS, False),
    "time": (RESTART_DIFFERS, False),
    "restart": (RESTART_DIFFERS, False),
    "reset mid-episode": ("the first step after reset.. is masked", False),
    "reset_where masked": (r"first step after reset_where\(\) is masked", False),
    "reset_where none": (r"reset_where\(\) of no environment changes observation", False),
    "reset_where others": (r"reset_where\(\) of environment 0 changes observation", False),
    "state without random": (r"1 steps after load_state\(\), observation differs", False),
    "load_state returns reset": (r"load_state\(\) returned another observation", False),
    "close twice": (r"a second close\(\) raises", False),
    "open": (r"step\(\) works after close\(\)", False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_env_reports_each_fault(fault: str) -> None:
    message, same_step = FAULTS[fault]
    with pytest.raises(EnvError, match=message):
        check_env(lambda seeds: Walk(seeds, same_step=same_step, fault=fault), steps=60)


@pytest.mark.parametrize("same_step", [False, True])
def test_correct_environment_passes(same_step: bool) -> None:
    report = check_env(lambda seeds: Walk(seeds, same_step=same_step), steps=60)
    assert isinstance(Walk([0]), VectorEnv)
    # 4 environments x 60 steps. With same_step all of these rows count; else resets take some.
    assert report.rows == 240 if same_step else 180 < report.rows < 240
    assert report.episodes > 20 and report.longest == LIMIT
    assert report.seeded and report.notes == ()


def test_check_of_an_instance_leaves_it_usable() -> None:
    env = Walk([5, 6])
    report = check_env(env, steps=40)
    assert report.num_envs == 2 and report.steps == 40
    env.reset()
    env.step(torch.zeros(2, 1))


def test_report_notes_unchecked_properties() -> None:
    report = check_env(lambda seeds: Walk(seeds, fault="no state"), steps=2)
    assert [note.split(":")[0].split(" in ")[0] for note in report.notes] == [
        "no episode ended",
        "state() is None",
    ]
    report = check_env(lambda seeds: Walk(seeds, fault="no reset_where"), steps=60)
    assert report.notes == ("reset_where() is None: episodes cannot be staggered",)


@pytest.mark.parametrize("candidate", [object(), 3, lambda seeds: object()])
def test_objects_without_the_interface_are_rejected(candidate: Any) -> None:
    with pytest.raises(EnvError, match="is not a VectorEnv: it lacks id, num_envs"):
        check_env(candidate)


GYMNASIUM: dict[str, Any] = {"simulator": "gymnasium", "max_episode_steps": 12}
TASKS = [
    ("CartPole-v1", {"max_episode_steps": 12}),
    ("InvertedPendulum-v4", {"max_episode_steps": 5}),
    ("HalfCheetah-v4", {"max_episode_steps": 8}),
    ("FetchReach-v4", {"max_episode_steps": 8}),
    ("Pong-v5", {"max_episode_steps": 8}),
    ("FrozenLake-v1", {"simulator": "gymnasium"}),
    ("FrozenLake-v1", {"max_episode_steps": 8}),
    ("MetaWorld/Reach-v3", {"max_episode_steps": 8}),
    ("CheetahRun-v1", {"max_episode_steps": 8}),
    ("FingerSpin-v1", {"max_episode_steps": 8}),
    ("CartPole-v1", GYMNASIUM),
    ("CartPole-v1", GYMNASIUM | {"kwargs": {"autoreset_mode": "same_step"}}),
    ("CartPole-v1", GYMNASIUM | {"kwargs": {"vectorization_mode": "async"}}),
    (
        "CartPole-v1",
        {"simulator": "gymnasium", "kwargs": {"vectorization_mode": "vector_entry_point"}},
    ),
    ("InvertedPendulum-v5", {"simulator": "gymnasium", "max_episode_steps": 5}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "options"), TASKS, ids=[f"{id}-{i}" for i, (id, _) in enumerate(TASKS)]
)
def test_adapters_satisfy_the_contract(id: str, options: dict[str, Any]) -> None:
    def make(seeds: list[int]) -> VectorEnv:
        return embodied_envs.make(id, num_envs=2, seeds=seeds[:2], **options)

    report: Report = check_env(make, steps=30)
    assert report.episodes > 0 and report.seeded
    if "max_episode_steps" in options:
        assert report.longest <= options["max_episode_steps"]
