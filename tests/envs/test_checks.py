"""check_env on a correct environment, on one environment per fault, and on the adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import embodied_envs
from embodied_envs.base.errors import EnvError
from embodied_envs.checks import check_env
from embodied_envs.types import ActionSpec, ArraySpec, Box, Obs, ObsSpec, Step, VectorEnv

LIMIT = 7


class Walk(VectorEnv):
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
        self._buffer = torch.zeros(len(seeds), 2)
        self._closed = False
        self.restart(seeds)

    def reset_where(self, where: Tensor) -> Any:
        if self.fault == "no reset_where":
            return None
        if self.fault == "reset_where others":
            where = torch.ones_like(where)
        for i in where.nonzero().flatten().tolist():
            self._reset(i)
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
        return float(torch.randn((), generator=self.random[i]) * scale)

    def _reset(self, i: int) -> None:
        self.position[i], self.clock[i] = self._draw(i, 0.1), 0.0

    def _obs(self) -> Any:
        if self.fault == "aliasing":
            self._buffer[:, 0], self._buffer[:, 1] = self.position, self.clock
            return self._buffer
        obs = torch.stack([self.position, self.clock], 1)
        if self.fault == "obs dtype":
            obs = obs.double()
        if self.fault == "obs shape":
            obs = obs.T.contiguous()
        if self.fault == "obs dict":
            return {"state": obs}
        if self.fault == "nan" and bool((self.clock == 5).any()):
            obs[0, 0] = torch.nan
        return obs

    def reset(self) -> Obs:
        for i in range(self.num_envs):
            self._reset(i)
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
        return self._obs()

    def render(self) -> Tensor:
        raise EnvError("rendering is disabled")

    def close(self) -> None:
        self._closed = True


RESTART_DIFFERS = (
    r"with the same seeds and actions after restart\(seeds\), observation differs in reset"
)
FAULTS = {
    # fault: (pattern of the message, same_step)
    "device": (r"observation of reset\(\) is on cpu; it must be on env.device, meta", False),
    "obs dtype": (r"observation of reset\(\) is torch.float64; it must be torch.float32", False),
    "obs shape": (r"shape \[2, 4\]; it must be \[4, 2\]", False),
    "obs dict": (r"is a dict with \[.*'state'.*; obs_spec declares", False),
    "nan": ("observation of step 4 is not finite", False),
    "both flags": ("terminated and truncated are both True", False),
    "dummy reward": ("a masked row has a reward", False),
    "masks nothing": (r"masks the environments \[\]; .* at step .* are \[.", False),
    "no final": (r"masks the environments \[\]; .* at step .* are \[.", True),
    "final is reset": ("off by one.*taken before the reset", True),
    "off by one": ("off by one", False),
    "clock short": (
        r"\[7\] steps at step .*, is truncated too early.*max_episode_steps is 8",
        False,
    ),
    "changes action": (r"step\(\) modified its argument at step 0", False),
    "aliasing": ("overwrote observation of the previous result", False),
    "global random": (RESTART_DIFFERS, False),
    "restart": (RESTART_DIFFERS, False),
    "reset_where others": (r"reset_where\(\) of environment 0 changes observation", False),
    "state without random": (r"1 steps after load_state\(\), observation differs", False),
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
    expected = ["no episode ended", "state() is None"]
    assert [note.split(":")[0].split(" in ")[0] for note in report.notes] == expected
    report = check_env(lambda seeds: Walk(seeds, fault="no reset_where"), steps=60)
    assert report.notes == ("reset_where() is None: episodes cannot be staggered",)


@pytest.mark.parametrize("realism", [{}, {"action_delay": 1}])
def test_diverging_worlds_of_a_task_are_named(realism: dict[str, Any]) -> None:
    def make(seeds: list[int]) -> VectorEnv:
        return embodied_envs.make(
            "toy_envs:Balance",
            num_envs=len(seeds),
            seeds=seeds,
            kwargs={"blow_up": 0.5},
            max_episode_steps=LIMIT,
            realism=realism,
        )

    message = r"timestep \(0\.02 s\).* of 4 worlds diverged at step \d+ .* was (slide|hinge), at"
    with pytest.raises(EnvError, match=message) as error:
        check_env(make, steps=30)
    assert len(str(error.value)) < 290
