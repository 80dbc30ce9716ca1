"""Histories of observations and actions, against stacks written out by hand."""

from __future__ import annotations

import pytest
import torch

from embodied_envs.base.errors import EnvError
from embodied_envs.types import ArraySpec, Box, Discrete
from embodied_ppo.core.history import PREVIOUS_ACTIONS, ObservationHistory

BOX = Box((-1.0,) * 2, (1.0,) * 2)


def test_three_steps_of_two_environments() -> None:
    history = ObservationHistory(ArraySpec((1,)), BOX, 3)
    assert history.obs_spec == {"obs": ArraySpec((3, 1)), PREVIOUS_ACTIONS: ArraySpec((2, 2))}
    previous = history.empty(2, torch.device("cpu"))
    observations = [torch.tensor([[10.0 + t], [20.0 + t]]) for t in range(4)]
    actions = [torch.tensor([[t, -t], [t + 0.5, 0.0]]) for t in range(4)]
    for t in range(3):
        previous = history.push(previous, observations[t], actions[t])
        if t == 1:  # the second environment starts an episode after its second step
            previous = history.restart(previous, torch.tensor([False, True]))
    stacked = history.stack(previous, observations[3])
    # o_1, o_2, o_3 = 11, 12, 13; the episode of the second environment began with o_2 = 22.
    assert stacked["obs"].squeeze(-1).tolist() == [[1, 1, 13], [0, 1, 23]]
    assert stacked[PREVIOUS_ACTIONS].tolist() == [[[1, -1], [2, -2]], [[0, 0], [2.5, 0]]]
    with pytest.raises(EnvError, match="rename the observation previous_actions"):
        ObservationHistory({PREVIOUS_ACTIONS: ArraySpec((2,))}, BOX, 3)


def test_first_step_of_an_episode_is_preceded_by_zeros() -> None:
    history = ObservationHistory(ArraySpec(()), Discrete(3), 2)
    stacked = history.stack(history.empty(1, torch.device("cpu")), torch.tensor([7.0]))
    assert stacked["obs"].tolist() == [[0, 7]] and stacked[PREVIOUS_ACTIONS].tolist() == [[[0] * 3]]
    previous = history.push(
        history.empty(1, torch.device("cpu")), torch.tensor([7.0]), torch.tensor([2])
    )
    assert history.stack(previous, torch.tensor([8.0]))[PREVIOUS_ACTIONS].tolist() == [[[0, 0, 1]]]


def test_images_are_joined_along_channels_and_others_pass_unchanged() -> None:
    specs = {
        "chw": ArraySpec((3, 8, 6), torch.uint8),
        "hwc": ArraySpec((8, 6, 3), torch.uint8),
        "goal": ArraySpec((2,)),
    }
    history = ObservationHistory(specs, BOX, 2, ["chw", "hwc"])
    assert history.obs_spec["chw"] == history.obs_spec["hwc"] == ArraySpec((6, 8, 6), torch.uint8)
    image = torch.arange(2 * 3 * 8 * 6, dtype=torch.uint8).view(2, 3, 8, 6)
    obs = {"chw": image, "hwc": image.permute(0, 2, 3, 1), "goal": torch.ones(2, 2)}
    previous = history.push(history.empty(2, torch.device("cpu")), obs, torch.zeros(2, 2))
    stacked = history.stack(previous, obs)
    assert torch.equal(stacked["chw"], torch.cat([image, image], 1))
    assert torch.equal(stacked["hwc"], stacked["chw"])
    assert torch.equal(stacked["goal"], obs["goal"])


def test_actions_of_a_chunk_are_flattened() -> None:
    history = ObservationHistory(ArraySpec((1,)), Box((-1.0,) * 4, (1.0,) * 4), 2)
    action = torch.arange(4.0).view(1, 2, 2)
    previous = history.push(history.empty(1, torch.device("cpu")), torch.zeros(1, 1), action)
    assert previous[PREVIOUS_ACTIONS].tolist() == [[[0, 1, 2, 3]]]
