"""Caption loss: from an image and an expression, predict where the named object is.

Captions need no goal and no action, so they cover words that no demonstration has in its
instruction. The loss trains the features that the instruction attends to (``Grounding``): the
place of the named object, predicted from them, and for policies with image cells the cell that
contains it. Its heads are dropped after cloning.

Shape letters: B samples, O objects of the captions, M cameras, K cells of all cameras, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_ppo.core.errors import ConfigError
from embodied_ppo.data.lerobot_reader import Demonstrations
from embodied_ppo.models.vla.trunk import Grounding

MIN_STD = 1e-3
"""Lower bound of the standard deviation by which a place is divided."""


class CaptionBatch(NamedTuple):
    """Samples of captions.

    Attributes:
        frames: int64 [B], frames of the demonstrations.
        sentence: int64 [B], index into ``texts``.
        points: [B, M, 2], places of the named objects in the images; -1 where it is not visible.
    """

    frames: Tensor
    sentence: Tensor
    points: Tensor


def texts(demos: Demonstrations) -> tuple[str, ...]:
    """Return all expressions, those of one object after those of another."""
    return tuple(text for expressions in demos.captions.values() for text in expressions)


def check(demos: Demonstrations, cameras: Sequence[str]) -> None:
    """Check that the demonstrations have captions for the policy's cameras.

    Raises:
        ConfigError: They have none.
    """
    if missing := [name for name in cameras if name not in demos.points]:
        raise ConfigError(
            f"cloning.captions: the demonstrations have no captions for camera {missing[0]!r};"
            " record some (embodied-ppo demos captions=true), or write cloning.captions=0"
        )


class CaptionLoss(nn.Module):
    """Prediction heads of the caption loss, and the samples that train them."""

    def __init__(
        self,
        demos: Demonstrations,
        grids: dict[str, tuple[int, int] | None],
        width: int,
        frames: Tensor,
    ) -> None:
        """Build the heads.

        Args:
            demos: Demonstrations with captions.
            grids: Camera -> rows and columns of its cells; None: the policy has no cells.
            width: D.
            frames: int64, the frames to draw from.

        Raises:
            ConfigError: The demonstrations have no captions for a camera.
        """
        super().__init__()
        check(demos, list(grids))
        self.grids = list(grids.values())
        self.points = torch.stack([demos.points[name] for name in grids], dim=2)  # [F, O, M, 2]
        self.visible = (self.points[..., 0] >= 0).any(2)  # [F, O]
        self.frames = frames[self.visible[frames].any(1)]
        if not len(self.frames):
            raise ConfigError(
                "cloning.captions: no image of the demonstrations shows an object of the captions;"
                " record other demonstrations, or write cloning.captions=0"
            )
        counts = torch.tensor([len(x) for x in demos.captions.values()])
        self.counts, self.first = counts, counts.cumsum(0) - counts  # [O]
        shown = self.points[self.frames]
        shown = shown[(shown >= 0).all(-1)]  # [n, 2]
        self.mean, self.std = shown.mean(0), shown.std(0).clamp_min(MIN_STD)
        self.point_head = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2 * len(grids))
        )
        self.cell_head = nn.Linear(width // 2, 1) if all(grids.values()) else None

    def sample(self, count: int, generator: torch.Generator) -> CaptionBatch:
        """Draw ``count`` frames, a visible object of each, and an expression for it."""
        draw = torch.randint(len(self.frames), (count,), generator=generator)
        frames = self.frames[draw]
        named = torch.multinomial(self.visible[frames].float(), 1, generator=generator)[:, 0]
        u = torch.rand(count, generator=generator)
        wording = (u * self.counts[named]).long().minimum(self.counts[named] - 1)
        return CaptionBatch(frames, self.first[named] + wording, self.points[frames, named])

    def forward(self, grounding: Grounding, points: Tensor) -> Tensor:
        """Return the loss of places [B, M, 2], a scalar.

        It is the squared error of the visible places in standard deviations, plus the mean
        cross-entropy of the cell that contains the place, over the cells of its camera.
        """
        shown = (points >= 0).all(-1)  # [B, M]
        predicted = self.point_head(grounding.focus).unflatten(1, (-1, 2))
        target = (points - self.mean.to(points)) / self.std.to(points)
        loss = F.mse_loss(predicted[shown], target[shown])
        if self.cell_head is None or grounding.cells is None:
            return loss
        logits = self.cell_head(grounding.cells)[..., 0]  # [B, K]
        start = 0
        for camera, grid in enumerate(self.grids):
            assert grid is not None
            rows, columns = grid
            x, y = points[:, camera].unbind(-1)
            column = (x * columns).long().clamp(0, columns - 1)
            row = (y * rows).long().clamp(0, rows - 1)
            error = F.cross_entropy(
                logits[:, start : start + rows * columns], row * columns + column, reduction="none"
            )
            loss = loss + (error * shown[:, camera]).sum() / shown.sum().clamp_min(1)
            start += rows * columns
        return loss
