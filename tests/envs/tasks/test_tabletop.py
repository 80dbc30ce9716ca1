"""Tabletop: sentences and splits, initial states, success and reward, and the scripted expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import embodied_envs
from embodied_envs.physics.mujoco_env import MujocoEnv
from embodied_envs.tasks.tabletop import (
    DIRECTION_VECTORS,
    FINGER_OPEN,
    HALF_EDGE,
    MAX_LEAD,
    PUSH_RANGE,
    RULES,
    SLIDE_DISTANCE,
    STEP,
    Tabletop,
)
from embodied_envs.tasks.tabletop_expert import Expert
from embodied_envs.tasks.tabletop_language import (
    COLOURS,
    DIRECTIONS,
    FAMILIES,
    SPLITS,
    combinations,
    episodes,
    held_out,
)
from embodied_ppo.core.types import EnvError

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


def make(num_envs: int, **options: Any) -> MujocoEnv:
    env = embodied_envs.make(
        "Tabletop", num_envs=num_envs, seeds=list(range(num_envs)), num_threads=1, **options
    )
    assert isinstance(env, MujocoEnv)
    return env


# -------------------------------------------------------------------------------------------- words
def test_splits_share_no_combination_and_no_sentence() -> None:
    train, combination, wording = (episodes(None, split) for split in SPLITS[:3])
    everything = {c for name in ALL for c in combinations(name)}
    assert set(train) | set(combination) == everything and not set(train) & set(combination)
    assert set(wording) == set(train)
    sentences = [
        [x for xs in split.values() for x in xs] for split in (train, combination, wording)
    ]
    assert len({x for xs in sentences for x in xs}) == sum(
        map(len, sentences)
    )  # each sentence occurs once
    assert len(ALL) >= 10


@pytest.mark.parametrize("name", ALL)
def test_every_word_of_a_family_is_trained(name: str) -> None:
    every, kept = combinations(name), [c for c in combinations(name) if held_out(c)]
    assert 0.2 < len(kept) / len(every) < 0.4
    trained = [c for c in every if not held_out(c)]
    for argument in FAMILIES[name].arguments:
        trained_values = {getattr(c, argument) for c in trained}
        # With one argument, other families train the held-out word.
        assert len(trained_values) == (3 if len(FAMILIES[name].arguments) == 1 else 4)
    if FAMILIES[name].symmetric:
        assert all(held_out(c._replace(a=c.b, b=c.a)) for c in kept)


def test_every_colour_zone_and_direction_is_trained() -> None:
    trained = list(episodes(None, "train"))
    assert (
        {c.a for c in trained}
        == {c.b for c in trained}
        == {c.z for c in trained}
        == {-1, 0, 1, 2, 3}
    )
    assert {c.d for c in trained} == {-1, 0, 1, 2, 3}
    assert {c.family for c in trained} == set(ALL)


def test_only_one_split_names_the_unseen_colour() -> None:
    seen, unseen = (episodes(None, split, "yellow") for split in ("train", "unseen_colour"))
    pairs = [name for name in ALL if len(FAMILIES[name].arguments) > 1]
    combination = episodes(pairs, "unseen_combination", "yellow")
    wording = episodes(None, "unseen_wording", "yellow")
    everything = {c for name in ALL for c in combinations(name)}
    parts = [set(seen), set(combination), set(unseen)]
    assert set.union(*parts) == everything and sum(map(len, parts)) == len(everything)
    for split in (seen, combination, wording):
        assert not any("yellow" in text for texts in split.values() for text in texts)
    assert all("yellow" in text for texts in unseen.values() for text in texts)
    # The other colours are trained in every family, also in those with one argument.
    assert {c.a for c in seen if c.family == "reach"} == {0, 1, 2}
    assert {c.family for c in seen} == set(ALL)


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
        assert arguments == list(c.words().values()) or c.family in (
            "clear",
            "sort",
        )  # in the order a, b, z
    assert len(s["kind"].unique()) == len(ALL) and len(s["instruction"].unique()) > 0.9 * len(
        task.instructions
    )


def test_invalid_arguments_name_the_choices() -> None:
    with pytest.raises(EnvError, match="'stak', which is unknown; did you mean stack"):
        Tabletop(families=["reach", "stak"])
    with pytest.raises(EnvError, match="'reach' more than once"):
        Tabletop(families=["reach", "push", "reach"])
    with pytest.raises(EnvError, match="families='reach' must be a list"):
        Tabletop(families="reach")
    with pytest.raises(EnvError, match=r"families=\[\] must be a list"):
        Tabletop(families=[])
    with pytest.raises(
        EnvError,
        match="split='test' is unknown; there are train, unseen_combination, unseen_wording",
    ):
        Tabletop(split="test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(EnvError, match="unseen_colour='yelow' is unknown; did you mean yellow"):
        Tabletop(unseen_colour="yelow")
    with pytest.raises(EnvError, match="needs the colour; write unseen_colour=yellow"):
        Tabletop(split="unseen_colour")
    with pytest.raises(EnvError, match="family 'reach' has no episode of split='unseen_comb"):
        Tabletop(["push", "reach"], "unseen_combination", unseen_colour="yellow")
    with pytest.raises(EnvError, match="obs='stat' is unknown; did you mean state"):
        Tabletop(obs="stat")  # pyright: ignore[reportArgumentType]


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


def test_stacks_and_neighbours_start_as_their_family_demands() -> None:
    task = bound(families=["unstack", "separate"])
    s = beginnings(task, 500)
    rows = torch.arange(500)
    a, b = (
        torch.tensor([getattr(c, x) for c in task.combinations])[s["combination"]] for x in "ab"
    )
    step = blocks(s)[rows, a] - blocks(s)[rows, b]
    stacked = s["kind"] == 0
    torch.testing.assert_close(
        step[stacked],
        torch.tensor([0, 0, 2 * HALF_EDGE], dtype=torch.float64).expand_as(step[stacked]),
    )
    torch.testing.assert_close(
        step[~stacked], torch.tensor([0.05, 0, 0], dtype=torch.float64).expand_as(step[~stacked])
    )


def test_goals_are_at_the_positions_in_the_sentences() -> None:
    task = bound()
    s = beginnings(task, 3000)
    goal = s["spot"][:, 0]  # the goal of A, unless it is relative to B
    for i, name in enumerate(ALL):
        mask = s["kind"] == i
        cs = [task.combinations[k] for k in s["combination"][mask].tolist()]
        if RULES[name].goal == "zone":
            colour = torch.tensor([c.z if c.z >= 0 else c.a for c in cs])
            zone = s["mocap_pos"][mask][torch.arange(len(cs)), colour]
            torch.testing.assert_close(goal[mask][:, :2], zone[:, :2])
        if name == "slide":
            a = blocks(s)[mask][torch.arange(len(cs)), torch.tensor([c.a for c in cs])]
            way = torch.tensor([DIRECTION_VECTORS[c.d] for c in cs], dtype=torch.float64)
            torch.testing.assert_close(goal[mask][:, :2], a[:, :2] + SLIDE_DISTANCE * way)


def test_float32_initial_states_equal_float64() -> None:
    one, two = (beginnings(bound(dtype), 500, dtype) for dtype in (torch.float32, torch.float64))
    for key, x in one.items():
        assert x.dtype == (
            torch.int64 if key in ("kind", "instruction", "combination") else torch.float32
        )
        torch.testing.assert_close(x.double(), two[key].double(), atol=1e-5, rtol=0)


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


def test_stack_requires_the_block_on_the_other() -> None:
    task, s = one("stack")
    b = blocks(s)[0, task.combinations[int(s["combination"])].b].clone()
    lay(task, s, "a", b + torch.tensor([0, 0.01, 2 * HALF_EDGE]))
    assert task.success(s)
    lay(task, s, "a", b + torch.tensor([0, 0.025, 2 * HALF_EDGE]))  # beyond 2 cm
    assert not task.success(s)
    lay(task, s, "a", b + torch.tensor([0, 0, 2 * HALF_EDGE + 0.02]))  # above
    assert not task.success(s)


def test_slide_counts_the_displacement_along_its_direction() -> None:
    task, s = one("slide")
    c = task.combinations[int(s["combination"])]
    a, way = blocks(s)[0, c.a].clone(), torch.tensor([*DIRECTION_VECTORS[c.d], 0.0])
    for distance, done in ((0.07, False), (0.085, True), (0.3, True), (-0.1, False)):
        lay(task, s, "a", a + distance * way)
        assert bool(task.success(s)) == done


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


def test_success_reward_does_not_depend_on_progress() -> None:
    with pytest.raises(EnvError, match="reward='sparse' is unknown; there are shaped, success"):
        Tabletop(reward="sparse")  # pyright: ignore[reportArgumentType]
    task, s = one("reach")
    success = bound(families=["reach"], reward="success")
    a = blocks(s)[0, task.combinations[int(s["combination"])].a]
    rewards = []
    for distance in (0.1, 0.05, 0.03):  # metres from the block; success is below 4 cm
        qpos = s["qpos"].clone()
        qpos[0, :3] = a + torch.tensor([0, 0, distance])
        rewards.append(float(success.reward(s, s | {"qpos": qpos}, torch.zeros(1, 4))))
    assert rewards == [0, 0, 1]


def test_push_reward_is_largest_behind_the_block() -> None:
    """By hand: near(gap, lateral, height) with the gap counted from the band PUSH_RANGE."""
    task, s = one("push")
    way = task.displacements(s["qpos"], s["combination"], s["spot"])
    block, goal = s["qpos"][0, :3] + way[0, 3], way[0, 0]
    ahead = goal * torch.tensor([1.0, 1.0, 0.0]) / goal[:2].norm()
    aside = torch.stack((-ahead[1], ahead[0], ahead[2]))

    def near(along: float, lateral: float = 0.0) -> float:
        """phi's part for the gripper, from -along behind the block."""
        qpos = s["qpos"].clone()
        qpos[0, :3] = block + along * ahead + lateral * aside
        phi = task._potential(qpos, s["combination"], s["spot"])
        return (float(phi) - 0.7 * 0.1 / (0.1 + float(goal.norm()))) / 0.3

    assert [near(-PUSH_RANGE[0]), near(-0.04), near(-PUSH_RANGE[1])] == pytest.approx([1, 1, 1])
    assert [
        near(-PUSH_RANGE[1] - 0.1),
        near(0.1 - PUSH_RANGE[0]),
        near(-0.04, 0.1),
    ] == pytest.approx([1 / 2] * 3)
    assert near(-PUSH_RANGE[1] - 0.03, 0.04) == pytest.approx(0.1 / 0.15)


def test_targets_follow_the_gripper_within_the_workspace() -> None:
    task, s = one("reach")
    s["ctrl"] = torch.tensor([[0.0, 0.0, 0.15, 0.03, 0.03]], dtype=torch.float64)
    up = torch.tensor([[1.0, -0.5, 1.0, 1.0]], dtype=torch.float64)
    expected = torch.tensor(
        [[STEP, -STEP / 2, 0.17, FINGER_OPEN, FINGER_OPEN]], dtype=torch.float64
    )  # 0.17 is the largest height
    torch.testing.assert_close(task.control(s, up), expected)
    s["ctrl"][0, 0] = 0.05
    assert float(task.control(s, up)[0, 0]) == pytest.approx(MAX_LEAD)  # ahead of x = 0


# ------------------------------------------------------------------------------------ in the engine
@pytest.mark.slow
def test_expert_succeeds_in_every_family() -> None:
    n = 40 * len(ALL)
    env = make(n)
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


@pytest.mark.slow
def test_random_actions_rarely_succeed() -> None:
    env = make(64)
    env.reset()
    generator = torch.Generator().manual_seed(0)
    ended = succeeded = 0
    for _ in range(100):
        step = env.step(2 * torch.rand(64, 4, generator=generator) - 1)
        assert step.success is not None and torch.isfinite(step.reward).all()
        ended += int((step.terminated | step.truncated).sum())
        succeeded += int(step.success.sum())
    assert ended >= 64 and succeeded < 0.15 * ended
    assert int(env.unstable) == 0
    env.close()


def test_observations() -> None:
    env = make(3)
    state = env.reset()
    assert isinstance(state, Tensor) and state.shape == (3, 91) and torch.isfinite(state).all()
    few = make(3, kwargs={"families": ["reach", "push"], "obs": "language"})
    language = few.reset()
    assert isinstance(language, dict) and language["state"].shape == (3, 12)
    assert torch.equal(language["instruction"], few.s["instruction"])  # pyright: ignore[reportAttributeAccessIssue]
    goal = make(3, kwargs={"families": ["reach", "push"], "obs": "goal"}).reset()
    assert isinstance(goal, dict) and torch.equal(goal["state"], language["state"])
    assert goal["goal"].shape == (3, 30)  # 14 families; A, B, zone and direction of 4 each
    assert goal["goal"][:, :14].sum(1).tolist() == [1, 1, 1]
    assert goal["goal"][:, 14:18].sum(1).tolist() == [1, 1, 1]
    assert few.task_names == ("reach", "push")
    # The last 16 + families entries encode the combination.
    for i in range(3):
        c = env.task.combinations[int(env.s["combination"][i])]  # pyright: ignore[reportAttributeAccessIssue]
        hot = state[i, -16 - len(ALL) :].nonzero().flatten().tolist()
        arguments = [len(ALL) + 4 * at + x for at, x in enumerate((c.a, c.b, c.z, c.d)) if x >= 0]
        assert hot == [ALL.index(c.family), *arguments]
    env.close()
    # The entry of a family does not depend on the selection and its order.
    some = make(8, kwargs={"families": ["put", "reach"]})
    state = some.reset()
    assert isinstance(state, Tensor) and state.shape == (8, 91)
    hot = state[:, -16 - len(ALL) : -16].argmax(1).tolist()
    assert (
        hot == [ALL.index(some.task_names[k]) for k in some.s["kind"].tolist()]
        and len(set(hot)) == 2
    )
    some.close()
    few.close()


def test_every_block_and_zone_is_visible() -> None:
    env = make(6, kwargs={"obs": "language"}, cameras=["front"], image_size=(64, 64))
    obs = env.reset()
    assert isinstance(obs, dict) and obs["front"].shape == (6, 3, 64, 64)
    red, green, blue = obs["front"].to(torch.int64).unbind(1)
    pixels_of = {
        "red": (red > 2 * green) & (red > 2 * blue),
        "green": (green > 2 * red) & (green > 2 * blue),
        "blue": (blue > 2 * red) & (blue > 2 * green),
        "yellow": (red > 3 * blue) & (green > 2 * blue),
    }
    for colour, pixels in pixels_of.items():
        # A zone is about 60 pixels, a block 25; the gripper hides some.
        assert float(pixels.flatten(1).sum(1).float().mean()) > 60, colour
        assert int(pixels.flatten(1).sum(1).min()) > 25, colour
    env.close()


def test_randomised_worlds_are_stable() -> None:
    env = make(16, randomize=True)
    env.reset()
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        assert torch.isfinite(env.step(2 * torch.rand(16, 4, generator=generator) - 1).reward).all()
    assert int(env.unstable) == 0
    env.close()
