"""Numbers of infos of real vectors, and of infos of unequal shape and type."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import run_helpers
import torch
import torch_tasks

import embodied_envs
from embodied_envs.adapters.infos import read_numbers
from embodied_ppo.evaluation.episodes import evaluate
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.rollout.simulation import Rollout


def test_numbers_and_names() -> None:
    info: Any = {
        "log": {"Episode_Reward/track vel": torch.tensor(0.5), "text": "x"},
        "episode": {"rew_x": np.float64(2), "deep": {"er": {"too": {"deep": 1}}}},
        "a": np.array([1, 2]),
        "_a": np.array([True, False]),
        "ended": {"r": np.array([7.0, 0.0])},
        "_ended": np.array([True, False]),
        "list": [3, None],
        "flag": torch.tensor([True, False]),
        "column": torch.tensor([[1.0], [2.0]]),
        "ragged": [[1], [2, 3]],
        "vector": np.zeros((2, 3)),
        "huge": 10**400,
        "complex": 1j,
        "none": None,
        "final_obs": np.zeros(2),
        5: 1.0,
    }
    numbers = {name: x.nan_to_num(-1).tolist() for name, x in read_numbers(info, 2).items()}
    assert numbers == {
        "Episode_Reward/track_vel": [0.5],
        "episode/rew_x": [2.0],
        "a": [1.0, -1.0],
        "ended/r": [7.0, -1.0],
        "list": [3.0, -1.0],
        "flag": [1.0, 0.0],
        "column": [1.0, 2.0],
    }
    assert read_numbers("nothing", 2) == {} and read_numbers(None, 2) == {}


class Telling(gymnasium.Env):
    """Episodes of 3 steps with infos that differ between environments and steps.

    Success holds in step 2 only. "term" is the step number, minus 10 in infos of resets.
    """

    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    number = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.number = 0, self.number if seed is None else seed
        return np.zeros(1, np.float32), {"term": -10.0}

    def step(self, action: Any) -> Any:
        self.t += 1
        odd: Any = ("text", [1, 2], None, np.zeros(self.t), {"a": 1}, 3)
        info = {
            "term": self.t if self.number else float(self.t) + 0.5,
            "odd": odd[self.t + 2 * self.number],
            "success": np.bool_(self.t == 2),
            "nested": {"x": self.t} if self.number else 5,
        }
        return np.zeros(1, np.float32), 0.0, False, self.t == 3, info


gymnasium.register("test/Telling-v0", Telling)


@pytest.mark.parametrize(
    ("autoreset", "mode", "chunk"), [("next_step", "sync", 1), ("same_step", "async", 2)]
)
def test_unequal_infos_become_curves(autoreset: str, mode: str, chunk: int) -> None:
    kwargs = {"autoreset_mode": autoreset, "vectorization_mode": mode}
    env = embodied_envs.make(
        "test/Telling-v0", num_envs=2, seeds=[0, 1], kwargs=kwargs, action_chunk=chunk
    )
    policy = ActorCritic(env.obs_spec, env.action_spec, ModelConfig(hidden=(8,)))
    result: Any = evaluate(policy, lambda seeds: env, episodes=2, num_envs=2, seed=0)
    rates = {name.removeprefix("eval/"): x.value for name, x in result.metrics().items()}
    assert rates["success"] == rates["success_once"] == 1.0 and rates["success_at_end"] == 0.0
    env = embodied_envs.make(
        "test/Telling-v0", num_envs=2, seeds=[0, 1], kwargs=kwargs, action_chunk=chunk
    )
    rollout = Rollout(env, policy, seed=0)
    metrics: Any = rollout.collect(9, update=0, version=0)[1]
    rollout.close()
    # Environment 0: 1.5 + 2.5 + 3.5, environment 1: 1 + 2 + 3
    assert metrics["env/term/episode_sum"].value == pytest.approx(6.75)
    assert metrics["env/success/episode_sum"].value == pytest.approx(1.0)
    assert metrics["rollout/success_once"].value == metrics["rollout/success"].value == 1.0
    assert metrics["rollout/success_at_end"].value == 0.0
    if chunk == 1:
        assert 1.9 < metrics["env/term"].value < 2.4


def test_extras_of_batched_environments_become_curves(tmp_path, monkeypatch) -> None:
    """legged_gym reports means over the episodes that ended; a resumed run continues exactly."""
    original = torch_tasks.Cart.step

    def step(self: Any, actions: Any) -> Any:
        obs, reward, fell, out, info = original(self, actions)
        info["term"] = reward
        if bool((fell | out).any()):
            info["episode"] = {"rew_x": torch.tensor(4.0)}
            info["log"] = {"Curriculum/level": 2}
        return obs, reward, fell, out, info

    monkeypatch.setattr(torch_tasks.Cart, "step", step)
    options = run_helpers.options("""env.id=torch_tasks:cart env.simulator=torch
        env.num_threads=0 evaluation.episodes=2 updates=4 save_every=2""")
    run_helpers.train(tmp_path / "run", options)
    rows = run_helpers.metric_rows(tmp_path / "run")
    for name, expected in (("episode/rew_x", 4.0), ("Curriculum/level", 2.0)):
        assert {row.get(f"env/{name}") for row in rows} - {None} == {expected}
    ended = next(row for row in rows if row.get("rollout/episodes"))
    assert ended["env/term/episode_sum"] == pytest.approx(ended["rollout/return"])
    assert ended["env/is_success"] <= 1.0
    again = tmp_path / "again"
    for updates in (2, 4):
        run_helpers.train(again, {**options, "updates": updates, "resume": "auto"})
    for row, other in zip(rows, run_helpers.metric_rows(again), strict=True):
        curves = {tag: x for tag, x in other.items() if tag.startswith(("env/", "rollout/"))}
        assert curves == {tag: row[tag] for tag in curves}
