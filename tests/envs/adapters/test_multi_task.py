"""Several tasks as one batch of environments."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import embodied_envs
from embodied_envs.adapters.multi_task import MultiTaskEnv, task_of_rows
from embodied_envs.types import VectorEnv
from embodied_ppo.core.types import EnvError

TASKS = ["WalkerWalk-v1", "CheetahRun-v1"]


def make(id: str, seeds: list[int], **options: Any) -> VectorEnv:
    return embodied_envs.make(id, num_envs=len(seeds), seeds=seeds, num_threads=1, **options)


def steps(env: VectorEnv, n: int, rows: slice | list[int] = slice(None)) -> Any:
    env.reset()
    generator = torch.Generator().manual_seed(0)
    return [env.step(torch.randn(6, 6, generator=generator)[rows]) for _ in range(n)][-1]


def test_tasks_repeat_so_that_equal_parts_have_the_same() -> None:
    assert task_of_rows([2, 1], 6) == task_of_rows([2, 1], 3) * 2 == [0, 0, 1, 0, 0, 1]
    assert task_of_rows([1, 1, 1], 2) == [0, 1]


def test_rows_equal_those_of_each_task_alone() -> None:
    """Names are joined: "velocity" has 9 numbers in both, "position" belongs to one task."""
    env = MultiTaskEnv(TASKS, make, [3, 4, 5, 6, 7, 8], weights=[2, 1])
    step = steps(env, 12)
    walker, cheetah = make(TASKS[0], [3, 4, 6, 7]), make(TASKS[1], [5, 8])
    rows = {TASKS[0]: [0, 1, 3, 4], TASKS[1]: [2, 5]}
    for k, (single, selected) in enumerate(zip((walker, cheetah), rows.values(), strict=True)):
        alone = steps(single, 12, selected)
        assert torch.equal(step.reward[selected], alone.reward)
        assert step.task[selected].tolist() == [k] * len(selected)
        for name, x in step.obs.items():
            if name in alone.obs:
                assert torch.equal(x[selected], alone.obs[name])
            elif name != "task":
                assert not x[selected].any()
        assert torch.equal(step.obs["task"][selected].sum(0), torch.eye(2)[k] * len(selected))
    assert env.task_names == tuple(TASKS) and env.max_episode_steps == 1000
    assert env.step_s is None  # 25 and 10 ms


def test_shorter_arrays_end_with_zeros_and_an_unknown_task_has_no_index() -> None:
    """A single array is "obs": 11 numbers of Reacher, 8 of Swimmer."""
    tasks = ["Swimmer-v4", "Reacher-v4"]
    obs: Any = MultiTaskEnv(tasks, make, [1, 2, 3]).reset()
    assert obs["obs"].shape == (3, 11) and obs["obs"][1, 8:].any()
    assert obs["obs"][[0, 2], :8].any() and not obs["obs"][[0, 2], 8:].any()
    assert obs["task"].tolist() == [[1, 0], [0, 1], [1, 0]]
    # A task that was not trained is shown in the same arrays.
    other: Any = MultiTaskEnv(["PointMassEasy-v1"], make, [1], tasks=["ReacherEasy-v1"])
    assert "position" in other.reset() and other.reset()["task"].tolist() == [[0]]
    known: Any = MultiTaskEnv(["Reacher-v4"], make, [1], tasks=tasks).reset()
    assert known["task"].tolist() == [[0, 1]]


def test_policies_that_read_sentences_get_the_words_of_the_name() -> None:
    env = MultiTaskEnv(["MetaWorld/DoorOpen-v3", "MetaWorld/Reach-v3"], make, [1], sentences=True)
    assert env.instructions == ("door open", "reach")
    obs: Any = env.reset()
    assert obs["instruction"].tolist() == [0] and "task" not in obs


def test_own_simulators_truncate_reset_and_load_their_state() -> None:
    """Walker2d and HalfCheetah of our engine save their state and reset single environments."""
    own = partial(make, simulator="mujoco", max_episode_steps=5)
    env = MultiTaskEnv(["HalfCheetah", "Walker2d"], own, [1, 2, 3, 4])
    steps(env, 3, slice(4))
    state = env.state()
    after = steps_from(env, 4)
    assert state is not None
    env.load_state(state)
    again = steps_from(env, 4)
    for name in ("reward", "mask", "truncated"):
        assert torch.equal(getattr(after, name), getattr(again, name))
    where = torch.tensor([True, False, False, True])
    fresh: Any = env.reset_where(where)
    assert fresh["obs"].shape == (4, 17) and fresh["obs"][where].any()


def steps_from(env: VectorEnv, n: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return [env.step(torch.randn(4, 6, generator=generator)) for _ in range(n)][-1]


REFUSED: list[tuple[list[str], dict[str, Any], str]] = [
    (["WalkerWalk-v1", "HopperStand-v1"], {}, "HopperStand-v1 are 4 numbers.*6 numbers"),
    (["WalkerWalk-v1", "CartPole-v1"], {}, "CartPole-v1 are Discrete"),
    (["WalkerWalk-v1", "CheetahRuns-v1"], {}, "CheetahRuns-v1"),
    (["WalkerWalk-v1", "toy_envs:Balance"], {}, "remove toy_envs:Balance"),
    (TASKS, {"weights": [1]}, "1 numbers for 2 tasks"),
    (
        ["CartpoleTwoPoles-v1"],
        {"tasks": ["CartpoleBalance-v1"]},
        "'position'.*\\[5\\].*cannot read",
    ),
    (["CartpoleBalance-v1"], {"tasks": ["AcrobotSwingup-v1"]}, "'position'.*cannot read"),
]


@pytest.mark.parametrize(("ids", "options", "message"), REFUSED)
def test_tasks_that_cannot_be_combined(ids: list[str], options: Any, message: str) -> None:
    with pytest.raises(EnvError, match=message):
        MultiTaskEnv(ids, make, [1, 2, 3, 4], **options)
