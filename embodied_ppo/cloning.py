"""Behaviour cloning: a policy learns to act as demonstrations do, and to foresee where they lead.

What an action says about the place that a sentence names is little more than a sign: with it alone the small trunk
learns the motion and ignores the words (success 0.1 after 2,000 steps). The state in which a demonstration ends says
it in numbers. Predicting that first, from what the sentence finds in the pictures, grounds the same features within a
few hundred steps; the head that does it is dropped afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_ppo.demonstrations import Demonstrations
from embodied_ppo.errors import ConfigError, TrainingError
from embodied_ppo.models.vla import INSTRUCTION, TokenVLA

BETAS = (0.9, 0.99)
GRAD_NORM = 1.0
HELD_OUT = 0.05
"""Share of the episodes that is not learned from."""
NARROWEST = 1e-3
"""Least deviation of a state's number that a difference is measured in."""


@dataclass(frozen=True)
class Cloned:
    """Steps, cross-entropy per action dimension (nats) of the last tenth of the steps and of held-out frames, CPU
    seconds."""

    steps: int
    loss: float
    held_out_loss: float
    cpu_s: float


def clone(
    policy: TokenVLA,
    demos: Demonstrations,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    foresight_steps: int,
    seed: int,
    notice: Callable[[str], None] = lambda text: None,
) -> Cloned:
    """First ``foresight_steps`` that foresee, then ``steps`` that also imitate; AdamW.

    The policy's normaliser sees every state once. Raises ConfigError, TrainingError.
    """
    check(policy, demos)
    start = time.process_time()
    device = policy.query.device
    kept = policy.trunk.table
    policy.tell(demos.instructions)
    try:
        train, held_out = demos.split(HELD_OUT, seed)
        policy.observe({"state": demos.state.to(device)}, torch.ones(len(demos.state), dtype=torch.bool, device=device))
        lesson = _Lesson(policy, demos, foreseen=foresight_steps > 0)
        rest: dict[str, Any] = {"batch_size": batch_size, "lr": lr, "notice": notice}
        if foresight_steps:
            lesson.learn(train, foresight_steps, "foresight", seed=seed, **rest)
        loss = lesson.learn(train, steps, "cloning", seed=seed + 1, **rest)
        return Cloned(steps, loss, _measured(policy, demos, held_out), time.process_time() - start)
    finally:
        policy.trunk.table = kept


class _Lesson:
    """A policy, what it learns from, and the head that foresees."""

    def __init__(self, policy: TokenVLA, demos: Demonstrations, *, foreseen: bool) -> None:
        self.policy, self.demos, self.device = policy, demos, policy.query.device
        self.last = demos.state[_ends(demos.episode)]
        self.last = (self.last - self.last.mean(0)) / self.last.std(0).clamp_min(NARROWEST)  # [F, S]
        width = policy.query.shape[1]
        self.head: nn.Module | None = None
        if foreseen:
            head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, self.last.shape[1]))
            self.head = head.to(self.device)

    def learn(
        self,
        frames: Tensor,
        steps: int,
        what: str,
        *,
        seed: int,
        batch_size: int,
        lr: float,
        notice: Callable[[str], None],
    ) -> float:
        """Mean loss of the last tenth of the steps. The rate rises over 50 steps and falls linearly to a tenth."""
        generator = torch.Generator().manual_seed(seed)
        parameters = [*self.policy.parameters(), *([] if self.head is None else self.head.parameters())]
        optimizer = torch.optim.AdamW(
            parameters, lr=lr, betas=BETAS, weight_decay=0.01, fused=self.device.type != "mps"
        )
        recent: list[float] = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
            some = frames[torch.randint(len(frames), (batch_size,), generator=generator)]
            told, loss = self._loss(some, what)
            recent.append(float(told.detach()))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, GRAD_NORM)
            if not torch.isfinite(norm):
                raise TrainingError(f"{what}: the loss of step {step} is {float(loss):g}; lower cloning.lr={lr:g}")
            optimizer.step()
            if (step + 1) % max(1, steps // 10) == 0:
                recent = recent[-max(1, steps // 10) :]
                notice(f"{what}: step {step + 1} of {steps}, loss {sum(recent) / len(recent):.3f}")
        optimizer.zero_grad(set_to_none=True)
        return sum(recent) / max(1, len(recent))

    def _loss(self, frames: Tensor, what: str) -> tuple[Tensor, Tensor]:
        """What is told, and what is learned."""
        inputs = _inputs(self.policy, self.demos, frames)
        if what == "foresight":
            loss = self._foresight(self.policy.trunk(inputs).focus, frames)
            return loss, loss
        action, executed = (x.to(self.device) for x in self.demos.chunk(frames, self.policy.chunk))
        loss, focus = self.policy.bc_loss(inputs, action, executed)
        return loss, loss if self.head is None else loss + self._foresight(focus, frames)

    def _foresight(self, focus: Tensor, frames: Tensor) -> Tensor:
        assert self.head is not None
        return F.mse_loss(self.head(focus), self.last[frames].to(self.device))


def check(policy: TokenVLA, demos: Demonstrations) -> None:
    """Raises ConfigError where the demonstrations are of another robot or other cameras."""
    size = demos.action.shape[1]
    if size != policy.size:
        raise ConfigError(f"cloning.dataset: its actions have {size} dimensions, the task's {policy.size}; record anew")
    cameras = policy.trunk.encoder.images
    if missing := [name for name in cameras if name not in demos.images]:
        raise ConfigError(
            f"cloning.dataset: holds no camera {missing[0]!r}, only {', '.join(demos.images)}; set env.cameras"
        )
    for name, spec in cameras.items():
        height, width = demos.images[name].shape[1:3]
        if (3, height, width) != tuple(spec.shape):
            raise ConfigError(
                f"cloning.dataset: camera {name!r} shows {height} x {width} pixels, env.image_size asks for "
                f"{' x '.join(map(str, spec.shape[1:]))}; use the same"
            )
    if demos.state.shape[1] != policy.trunk.encoder.vector_size:
        raise ConfigError(
            f"cloning.dataset: its states have {demos.state.shape[1]} numbers, the task's "
            f"{policy.trunk.encoder.vector_size}; record anew"
        )


def _inputs(policy: TokenVLA, demos: Demonstrations, frames: Tensor) -> dict[str, Tensor]:
    device = policy.query.device
    obs = {name: images[frames].permute(0, 3, 1, 2).to(device) for name, images in demos.images.items()}
    obs |= {"state": demos.state[frames].to(device), INSTRUCTION: demos.instruction[frames].to(device)}
    return policy.encode(obs)


def _ends(episode: Tensor) -> Tensor:
    """Last frame of each frame's episode, int64 [F]; ``episode`` is ascending."""
    return torch.searchsorted(episode, episode, right=True) - 1


@torch.no_grad()
def _measured(policy: TokenVLA, demos: Demonstrations, frames: Tensor) -> float:
    """Mean loss of up to 2,048 frames."""
    frames = frames[:: max(1, len(frames) // 2048)]
    if not len(frames):
        return float("nan")
    total = 0.0
    for part in frames.split(256):
        action, executed = (x.to(policy.query.device) for x in demos.chunk(part, policy.chunk))
        total += float(policy.bc_loss(_inputs(policy, demos, part), action, executed)[0]) * len(part)
    return total / len(frames)
