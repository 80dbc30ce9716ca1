"""Tabletop: sentences and splits, initial states, success and reward, and the scripted expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_envs import make_world

from embodied_envs.tasks.tabletop import HALF_EDGE, Tabletop
from embodied_envs.tasks.tabletop_expert import Expert
from embodied_envs.tasks.tabletop_language import (
    COLOURS,
    DIRECTIONS,
    FAMILIES,
    SPLITS,
    combinations,
    episodes,
)

ALL = tuple(FAMILIES)


def bound(dtype: torch.dtype = torch.float64, **kwargs: Any) -> Tabletop:
    task = Tabletop(**kwargs)
    task.bind(task.spec().compile(), torch.device("cpu"), dtype)
    return task


def beginnings(task: Tabletop, n: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The state of n worlds as their episodes begin, by the same random numbers in every dtype."""
    u = torch.rand(n, task.reset_noise, generator=torch.Generator().manual_seed(0))
    return task.reset(u.to(dtype)) | {"qvel": torch.zeros(n, 29, dtype=dtype)}


def blocks(s: Mapping[str, Tensor]) -> Tensor:
    """Return a view of the blocks' positions, [N, 4, 3] by colour."""
    return s["qpos"][:, 5:].unflatten(1, (4, 7))[:, :, :3]


# -------------------------------------------------------------------------------------------- words
def test_splits_share_no_combination_and_no_sentence() -> None:
    train, combination, wording = (episodes(None, split) for split in SPLITS[:3])
    everything = {c for name in ALL for c in combinations(name)}
    assert set(train) | set(combination) == everything and not set(train) & set(combination)
    assert set(wording) == set(train)
    sentences = [[x for xs in s.values() for x in xs] for s in (train, combination, wording)]
    # each sentence occurs once
    assert len({x for xs in sentences for x in xs}) == sum(map(len, sentences))
    assert len(ALL) >= 10


@pytest.mark.parametrize("split", SPLITS[:3])
def test_sentence_names_the_arguments_of_the_combination(split: str) -> None:
    task = bound(split=split)
    s = beginnings(task, 3000)
    for kind, sentence, combination in zip(
        *(s[k].tolist() for k in ("kind", "instruction", "combination"))
    ):
        c, text = task.combinations[combination], task.instructions[sentence]
        assert task.names[kind] == c.family
        arguments = [word for word in text.split() if word in (*COLOURS, *DIRECTIONS)]
        assert set(arguments) == set(c.words().values())
        # in the order a, b, z
        assert arguments == list(c.words().values()) or c.family in ("clear", "sort")
    assert len(s["kind"].unique()) == len(ALL) and len(s["instruction"].unique()) > 0.9 * len(
        task.instructions
    )


# --------------------------------------------------------------------------------------- beginnings
def test_episodes_start_without_overlap_and_without_success() -> None:
    task = bound()
    s = beginnings(task, 20000)
    assert not task.success(s).any()
    distance = torch.cdist(blocks(s), blocks(s)) + torch.eye(4)
    assert distance.min() > 2 * HALF_EDGE - 1e-9  # blocks of a stack; all others:
    stacked = s["kind"] == ALL.index("unstack")
    assert distance[~stacked].min() > 0.0499
    zones = s["mocap_pos"]
    assert (torch.cdist(zones, zones) + torch.eye(4)).min() > 0.1  # two radii of a zone
    over = torch.cdist(blocks(s)[..., :2].contiguous(), zones[..., :2].contiguous())
    cleared = s["kind"] == ALL.index("clear")
    assert over[~cleared].min() > 0.06 and over[cleared].flatten(1).amin(1).max() < 0.03
    assert s["qpos"][:, 2].min() > 0.1  # the hand is above everything


def test_a_family_that_is_written_twice_has_twice_as_many_episodes() -> None:
    once, twice = (bound(families=["reach", "push", *more]) for more in ([], ["push"]))
    kinds = [beginnings(task, 600)["kind"] for task in (once, twice)]
    assert [float(x.double().mean()) for x in kinds] == pytest.approx([1 / 2, 2 / 3], abs=0.06)
    assert once.names == twice.names and once.instructions == twice.instructions


# ------------------------------------------------------------------------------- success and reward
def one(family: str) -> tuple[Tabletop, dict[str, Tensor]]:
    """One world: its block A, and B, can be moved by ``lay``."""
    task = bound(families=[family])
    s = beginnings(task, 1)
    s["qpos"][0, :5] = torch.tensor([0.0, 0.0, 0.15, 0.04, 0.04])
    return task, s


def lay(task: Tabletop, s: dict[str, Tensor], letter: str, xyz: Tensor) -> None:
    blocks(s)[0, getattr(task.combinations[int(s["combination"])], letter)] = xyz


def test_put_requires_the_block_down_at_rest_and_released() -> None:
    task, s = one("put")
    place = s["spot"][0, 0].clone()
    lay(task, s, "a", place)
    assert task.success(s)
    lay(task, s, "a", place + torch.tensor([0.045, 0, 0]))  # beyond 4 cm
    assert not task.success(s)
    lay(task, s, "a", place + torch.tensor([0, 0, 0.02]))  # in the air
    assert not task.success(s)
    lay(task, s, "a", place)
    s["qpos"][0, :5] = torch.tensor([*place, 0.022, 0.022])  # between the fingers
    assert not task.success(s)
    s["qpos"][0, 3:5] = 0.03  # not any more
    assert task.success(s)
    s["qvel"][:] = 0.1
    assert not task.success(s)


def test_reward_is_progress_and_success() -> None:
    task, s = one("reach")
    a = blocks(s)[0, task.combinations[int(s["combination"])].a]

    def at(distance: float) -> dict[str, Tensor]:
        qpos = s["qpos"].clone()
        qpos[0, :3] = a + torch.tensor([0, 0, distance])
        return s | {"qpos": qpos}

    # near(10 cm) = 1/2, near(5 cm) = 2/3, near(3 cm) = 10/13; 3 cm is a success.
    assert float(task.reward(at(0.1), at(0.05), torch.zeros(1, 4))) == pytest.approx(2 / 3 - 1 / 2)
    assert float(task.reward(at(0.05), at(0.1), torch.zeros(1, 4))) == pytest.approx(1 / 2 - 2 / 3)
    assert float(task.reward(at(0.1), at(0.1), torch.zeros(1, 4))) == 0
    assert float(task.reward(at(0.1), at(0.03), torch.zeros(1, 4))) == pytest.approx(
        10 / 13 - 1 / 2 + 1
    )


# ------------------------------------------------------------------------------------ in the engine
@pytest.mark.slow
def test_expert_succeeds_in_every_family() -> None:
    n = 40 * len(ALL)
    env = make_world("Tabletop", n)
    expert, kind = Expert(env.task), env.s["kind"].clone()  # pyright: ignore[reportArgumentType]
    env.reset()
    done, succeeded, earned = (torch.zeros(n) for _ in range(3))
    for _ in range(100):
        step = env.step(expert(env.s).float())
        assert step.success is not None and step.task is not None
        going = 1 - done
        assert ((step.reward >= -1) & (step.reward <= 2)).all()
        assert (step.task == kind)[going.bool()].all()
        earned += going * step.reward
        succeeded += going * step.success
        done = torch.maximum(done, (step.terminated | step.truncated).float())
    rate = {name: float(succeeded[kind == i].mean()) for i, name in enumerate(ALL)}
    assert min(rate.values()) >= 0.95, rate
    assert int(env.unstable) == 0
    # Progress sums to at most 1; success gives 1.
    assert float(earned[succeeded.bool()].min()) > 1 and float(earned.max()) < 2
    env.close()


def test_observations() -> None:
    env = make_world("Tabletop", 3)
    state = env.reset()
    assert isinstance(state, Tensor) and state.shape == (3, 91) and torch.isfinite(state).all()
    few = make_world("Tabletop", 3, kwargs={"families": ["reach", "push"], "obs": "language"})
    language = few.reset()
    assert isinstance(language, dict) and language["state"].shape == (3, 12)
    assert torch.equal(language["instruction"], few.s["instruction"])  # pyright: ignore[reportAttributeAccessIssue]
    goal = make_world("Tabletop", 3, kwargs={"families": ["reach", "push"], "obs": "goal"}).reset()
    assert isinstance(goal, dict) and torch.equal(goal["state"], language["state"])
    assert goal["goal"].shape == (3, 30)  # 14 families; A, B, zone and direction of 4 each
    assert goal["goal"][:, :14].sum(1).tolist() == [1, 1, 1]
    assert goal["goal"][:, 14:18].sum(1).tolist() == [1, 1, 1]
    assert few.task_names == ("reach", "push")
    with pytest.raises(ValueError, match=r"true or false: .*distractors.*no"):
        make_world("Tabletop", 1, kwargs={"distractors": "no"})
    # The last 16 + families entries encode the combination.
    for i in range(3):
        c = env.task.combinations[int(env.s["combination"][i])]  # pyright: ignore[reportAttributeAccessIssue]
        hot = state[i, -16 - len(ALL) :].nonzero().flatten().tolist()
        arguments = [len(ALL) + 4 * at + x for at, x in enumerate((c.a, c.b, c.z, c.d)) if x >= 0]
        assert hot == [ALL.index(c.family), *arguments]
    env.close()
    few.close()
