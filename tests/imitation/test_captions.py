"""Caption loss: its samples, its formula, and words that only captions have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from embodied_ppo.config.schema import CloningConfig
from embodied_ppo.core.types import ConfigError
from embodied_ppo.data.lerobot_reader import Demonstrations
from embodied_ppo.imitation import behavior_cloning, captions
from embodied_ppo.models.vla.trunk import Grounding
from tests.imitation.test_behavior_cloning import demonstrations
from tests.models.vla.test_trunk import make

STEPS = CloningConfig(steps=2, batch_size=16, lr=3e-3, foresight_steps=2)
CAPTIONS = {"dark patch": ("shade",), "bright patch": ("a lamp", "the lamp")}


def captioned(hidden: tuple[int, ...] = ()) -> Demonstrations:
    """Two patches, one bright and one grey, left and right; the captions name both."""
    demos = demonstrations()
    images = demos.images["front"].clone()
    right = images[:, 5, 17, 0] == 255  # [F]
    grey = torch.where(right, 4, 16)
    for i, x in enumerate(grey.tolist()):
        images[i, 4:8, x : x + 4] = 90
    # Centres as fractions: x (4 + 2) / 24 or (16 + 2) / 24, y (4 + 2) / 16.
    left_x, right_x, y = 6 / 24, 18 / 24, torch.full((len(right),), 6 / 16)
    bright = torch.stack((torch.where(right, right_x, left_x), y), dim=1)
    dark = torch.stack((torch.where(right, left_x, right_x), y), dim=1)
    points = torch.stack((dark, bright), dim=1)
    points[list(hidden)] = -1.0
    return replace(demos, images={"front": images}, captions=CAPTIONS, points={"front": points})


def caption_loss(demos: Demonstrations) -> captions.CaptionLoss:
    torch.manual_seed(0)
    return captions.CaptionLoss(demos, {"front": (4, 6)}, 8, torch.arange(len(demos.state)))


def test_samples_name_visible_objects_in_all_their_expressions() -> None:
    demos = captioned(hidden=(0, 1, 2))
    demos.points["front"][3:100, 0] = -1.0  # the dark patch is not visible
    loss, generator = caption_loss(demos), torch.Generator().manual_seed(0)
    batch = loss.sample(4000, generator)
    assert captions.texts(demos) == ("shade", "a lamp", "the lamp")
    assert batch.frames.min() == 3 and (batch.points >= 0).all()
    named = (batch.sentence > 0).long()
    assert (named[batch.frames < 100] == 1).all()
    later = batch.frames >= 100
    # Objects are drawn with probability 1/2, then each of their expressions equally.
    shares = [float((batch.sentence[later] == i).float().mean()) for i in range(3)]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.04)
    assert torch.equal(batch.points[:, 0], demos.points["front"][batch.frames, named])


def test_loss_equals_the_formula_by_hand() -> None:
    loss = caption_loss(captioned())
    assert loss.cell_head is not None
    with torch.no_grad():
        for p in loss.parameters():
            p.zero_()
        loss.cell_head.weight[0, 0] = 1.0
    loss.mean, loss.std = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.5])
    cells = torch.zeros(2, 24, 4)
    # The place (0.75, 0.4) of 4 x 6 cells is in row 1 (1.6), column 4 (4.5): cell 10.
    cells[0, 10, 0] = 2.0
    points = torch.tensor([[[0.75, 0.4]], [[-1.0, -1.0]]])
    # The prediction 0 is (0.25 / 0.25, -0.1 / 0.5) from the place: (1 + 0.04) / 2 = 0.52.
    # Cell: log(e^2 + 23) - 2. The second sample shows no object.
    expected = 0.52 + math.log(math.exp(2.0) + 23) - 2
    value = loss(Grounding(torch.zeros(2, 8), cells), points).item()
    assert value == pytest.approx(expected, abs=1e-5)
    assert loss(Grounding(torch.zeros(2, 8)), points).item() == pytest.approx(0.52, abs=1e-5)


@pytest.mark.slow
def test_captions_ground_words_that_no_instruction_has() -> None:
    demos, policy = captioned(), make()
    config = replace(STEPS, captions=150, steps=2, foresight_steps=0)
    lines: list[str] = []
    behavior_cloning.clone(policy, demos, config, seed=0, notice=lines.append)
    losses = [float(line.split()[-1]) for line in lines if line.startswith("captions: step")]
    assert len(losses) == 10 and losses[-1] < 0.1 * losses[0]


def test_cloning_depends_on_captions_and_their_coefficient() -> None:
    def weights(**options: float) -> float:
        policy = make()
        config = replace(STEPS, **{"captions": 2, **options})
        behavior_cloning.clone(policy, captioned(), config, seed=0)
        return sum(float(p.detach().double().abs().sum()) for p in policy.parameters())

    values = [weights(), weights(captions=0), weights(captions=3), weights(caption_coef=0.0)]
    assert len(set(values)) == 4 and weights() == values[0]


def test_demonstrations_without_captions_are_refused() -> None:
    for demos, message in (
        (demonstrations(), "have no captions for camera 'front'; record some"),
        (captioned(tuple(range(240))), "no image of the demonstrations shows an object"),
    ):
        with pytest.raises(ConfigError, match=f"cloning.captions: .*{message}"):
            behavior_cloning.clone(make(), demos, replace(STEPS, captions=2), seed=0)
