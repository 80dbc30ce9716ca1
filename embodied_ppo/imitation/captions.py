"""Caption loss: predict the location of the named object from an image and an expression.

Captions have no goal and no action, so they can contain words that no instruction of a
demonstration contains. The loss trains the features that result from the attention of the
expression to the image (``Grounding``). From these features it predicts the location of the object
and, for policies with image cells, the cell that contains it. The prediction heads are removed
after cloning.

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
"""Lower bound of the standard deviation by which locations are divided."""


class CaptionBatch(NamedTuple):
    """A batch of captions.

    Attributes:
        frames: int64 [B], indices of frames of the demonstrations.
        sentence: int64 [B], index of the expression in ``texts``.
        points: [B, M, 2], locations (x, y) of the named objects as fractions of the image size; -1
            in images in which the object is not visible.
    """

    frames: Tensor
    sentence: Tensor
    points: Tensor


def texts(demos: Demonstrations) -> tuple[str, ...]:
    """Return the expressions of all objects, in the order of the objects."""
    return tuple(text for expressions in demos.captions.values() for text in expressions)


def check(demos: Demonstrations, cameras: Sequence[str]) -> None:
    """Check that the demonstrations have captions for the policy's cameras.

    Raises:
        ConfigError: There are no captions for a camera.
    """
    if missing := [name for name in cameras if name not in demos.points]:
        raise ConfigError(
            f"cloning.captions: the demonstrations have no captions for camera {missing[0]!r};"
            " record some (embodied-ppo demos captions=true), or write cloning.captions=0"
        )


class CaptionLoss(nn.Module):
    """Prediction heads of the caption loss, and the sampling of captions for their training."""

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
            grids: Camera -> (rows, columns) of its image cells; None: the policy has no cells.
            width: Width of the features, D.
            frames: int64, indices of the frames from which samples are drawn.

        Raises:
            ConfigError: The demonstrations have no captions for a camera, or show no object.
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
        points = self.points[self.frames]
        points = points[(points >= 0).all(-1)]  # visible ones, [n, 2]
        self.mean, self.std = points.mean(0), points.std(0).clamp_min(MIN_STD)
        self.point_head = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2 * len(grids))
        )
        self.cell_head = nn.Linear(width // 2, 1) if all(grids.values()) else None

    def sample(self, count: int, generator: torch.Generator) -> CaptionBatch:
        """Draw ``count`` frames, one visible object for each frame, and an expression for it."""
        draw = torch.randint(len(self.frames), (count,), generator=generator)
        frames = self.frames[draw]
        objects = torch.multinomial(self.visible[frames].float(), 1, generator=generator)[:, 0]
        u = torch.rand(count, generator=generator)
        wording = (u * self.counts[objects]).long().minimum(self.counts[objects] - 1)
        return CaptionBatch(frames, self.first[objects] + wording, self.points[frames, objects])

    def forward(self, grounding: Grounding, points: Tensor) -> Tensor:
        """Return the loss of predicted locations, a scalar.

        It is the squared error of the visible locations in units of their standard deviation, plus
        the mean cross-entropy of the cell that contains the location, over the cells of its camera.

        Args:
            grounding: Features of B images and expressions.
            points: Locations of the named objects, [B, M, 2]; see ``CaptionBatch``.
        """
        visible = (points >= 0).all(-1)  # [B, M]
        predicted = self.point_head(grounding.focus).unflatten(1, (-1, 2))
        target = (points - self.mean.to(points)) / self.std.to(points)
        loss = F.mse_loss(predicted[visible], target[visible])
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
            loss = loss + (error * visible[:, camera]).sum() / visible.sum().clamp_min(1)
            start += rows * columns
        return loss
