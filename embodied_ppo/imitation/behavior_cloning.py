"""Behaviour cloning: a policy learns to act as demonstrations do, and to foresee where they lead.

What an action says about the place that a sentence names is little more than a sign: with it alone the small trunk
learns the motion and ignores the words (success 0.1 after 2,000 steps). The states that a demonstration goes through
say it in numbers, and so does, for every place at once, how its picture ends: what the sentence speaks of leaves, and
arrives. Predicting those first, from what the sentence finds in the pictures, grounds the same features within a few
hundred steps; the heads that do it are dropped afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_ppo.config.schema import CloningConfig
from embodied_ppo.core.errors import ConfigError, TrainingError
from embodied_ppo.core.types import Advance
from embodied_ppo.data.lerobot_reader import Demonstrations
from embodied_ppo.models.backbone import channels_last
from embodied_ppo.models.vla.action_tokens import TokenVLA
from embodied_ppo.models.vla.flow_matching import FlowVLA
from embodied_ppo.models.vla.gaussian import GaussianVLA
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pretrained import CheckpointVLA
from embodied_ppo.models.vla.trunk import CELL, INSTRUCTION, UNHEARD, VLA, WORDS, Found

Family: TypeAlias = "TokenVLA | FlowVLA | GaussianVLA | PI0 | CheckpointVLA"
BETAS = (0.9, 0.99)
GRAD_NORM = 1.0
HELD_OUT = 0.05
"""Share of the episodes that is not learned from."""
FORESEEN = (0.25, 0.5, 0.75, 1.0)
"""How far along its demonstration the states are that a frame foresees."""
UNHEARD_WORDS = 0.2
"""Share of the words that a small model misses while it learns to foresee: what is said in words that it has never
heard is told by those around them."""
NARROWEST = 1e-3
"""Least deviation of a state's number that a difference is measured in."""


@dataclass(frozen=True)
class Cloned:
    """Steps, ``bc_loss`` (per action dimension) of the last tenth of the steps and of held-out frames, CPU seconds."""

    steps: int
    loss: float
    held_out_loss: float
    cpu_s: float


def clone(
    policy: Family,
    demos: Demonstrations,
    config: CloningConfig,
    *,
    seed: int,
    notice: Callable[[str], None] = lambda text: None,
    advance: Advance = lambda what, done, total: None,
) -> Cloned:
    """First ``config.foresight_steps`` that foresee, then ``config.steps`` that also imitate; AdamW.

    The policy's normaliser sees every state once. ``advance`` hears of every step. Raises ConfigError, TrainingError.
    """
    check(policy, demos)
    start = time.process_time()
    device = policy.query.device
    told, frozen = policy.sentences, policy.frozen
    policy.tell(demos.instructions)
    policy.freeze(False)
    try:
        if isinstance(policy, VLA):
            policy.trunk.hear(demos.instructions, torch.Generator().manual_seed(seed))
        if len(vectors := policy.trunk.encoder.vectors) > 1:
            notice(f"cloning: the dataset's observation.state is read as {', then '.join(vectors)}")
        train, held_out = demos.split(HELD_OUT, seed)
        seen = torch.ones(len(demos.state), dtype=torch.bool, device=device)
        policy.observe(_vectors(policy, demos.state.to(device)), seen)
        lesson = _Lesson(policy, demos, config, seed, notice, advance)
        if config.foresight_steps:
            lesson.learn(train, config.foresight_steps, "foresight", seed)
        loss = lesson.learn(train, config.steps, "cloning", seed + 1)
        return Cloned(config.steps, loss, _measured(policy, demos, held_out), time.process_time() - start)
    finally:
        policy.tell(told)
        policy.freeze(frozen)


class _Lesson:
    """A policy, what it learns from, and the heads that foresee."""

    def __init__(
        self,
        policy: Family,
        demos: Demonstrations,
        config: CloningConfig,
        seed: int,
        notice: Callable[[str], None],
        advance: Advance,
    ) -> None:
        self.policy, self.demos, self.config, self.notice, self.advance = policy, demos, config, notice, advance
        self.device = policy.query.device
        ahead = demos.state[_along(demos.episode, FORESEEN)].flatten(1)
        self.ahead = (ahead - ahead.mean(0)) / ahead.std(0).clamp_min(NARROWEST)  # [F, S·len(FORESEEN)]
        width = policy.query.shape[1]
        self.head: nn.Module | None = None
        self.picture: nn.Module | None = None
        if config.foresight_steps:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, self.ahead.shape[1]))
                picture = nn.Sequential(nn.Linear(width // 2, width), nn.SiLU(), nn.Linear(width, 3))
            self.head = head.to(self.device)
            if isinstance(policy, VLA):
                self.picture = picture.to(self.device)
                self.cells = torch.cat([_cells(demos.images[name]) for name in policy.trunk.names], dim=1)
                self.last = _along(demos.episode, (1.0,))[:, 0]
                some = torch.randperm(len(self.last), generator=torch.Generator().manual_seed(seed))[:2048]
                self.spread = self._change(some).std().clamp_min(NARROWEST)

    def learn(self, frames: Tensor, steps: int, what: str, seed: int) -> float:
        """Mean loss of the last tenth of the steps. The rate rises over 50 steps and falls linearly to a tenth."""
        lr, batch_size = self.config.lr, self.config.batch_size
        generator = torch.Generator().manual_seed(seed)
        noise = torch.Generator(self.device).manual_seed(seed)
        modules = (self.policy, self.head, self.picture)
        parameters = [p for module in modules if module is not None for p in module.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=0.01, fused=True)
        recent: list[float] = []
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / steps)
            some = frames[torch.randint(len(frames), (batch_size,), generator=generator)]
            told, loss = self._loss(some, what, noise)
            recent.append(float(told.detach()))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, GRAD_NORM)
            if not torch.isfinite(norm):
                raise TrainingError(f"{what}: the loss of step {step} is {float(loss):g}; lower cloning.lr={lr:g}")
            optimizer.step()
            self.advance(what, step + 1, steps)
            if (step + 1) % max(1, steps // 10) == 0:
                recent = recent[-max(1, steps // 10) :]
                self.notice(f"{what}: step {step + 1} of {steps}, loss {sum(recent) / len(recent):.3f}")
        optimizer.zero_grad(set_to_none=True)
        return sum(recent) / max(1, len(recent))

    def _loss(self, frames: Tensor, what: str, noise: torch.Generator) -> tuple[Tensor, Tensor]:
        """What is told, and what is learned."""
        inputs = _inputs(self.policy, self.demos, frames)
        if what == "foresight":
            if isinstance(self.policy, VLA) and WORDS in inputs:
                inputs[WORDS] = _heard(inputs[WORDS], noise)
            loss = self._foresight(_found(self.policy, inputs), frames)
            return loss, loss
        action, executed = (x.to(self.device) for x in self.demos.chunk(frames, self.policy.chunk))
        loss, found = self.policy.bc_loss(inputs, action, executed, noise)
        return loss, loss if self.head is None else loss + self._foresight(found, frames)

    def _foresight(self, found: Found | None, frames: Tensor) -> Tensor:
        assert self.head is not None and found is not None  # the trunk is not frozen while it learns
        loss = F.mse_loss(self.head(found.focus), self.ahead[frames].to(self.device))
        if self.picture is None or found.cells is None:
            return loss
        change = self._change(frames).to(self.device) / self.spread
        return loss + F.mse_loss(self.picture(found.cells), change)

    def _change(self, frames: Tensor) -> Tensor:
        """[B, HW/16, 3], how the colours of each cell of ``found`` differ when the demonstration ends."""
        return self.cells[self.last[frames]].float() - self.cells[frames].float()


def _heard(words: Tensor, noise: torch.Generator) -> Tensor:
    """int64 [B, L], UNHEARD_WORDS of them missed; 0 pads."""
    missed = torch.rand(words.shape, generator=noise, device=words.device) < UNHEARD_WORDS
    return words.masked_fill(missed & (words > 0), UNHEARD)


def _cells(images: Tensor) -> Tensor:
    """uint8 [F, H, W, 3] -> uint8 [F, HW/16, 3], the mean colour of every CELL x CELL pixels."""
    parts = (F.avg_pool2d(part.permute(0, 3, 1, 2).float(), CELL) for part in images.split(1024))
    return torch.cat([part.round().byte().flatten(2).transpose(1, 2) for part in parts])


def _found(policy: Family, inputs: dict[str, Tensor]) -> Found | None:
    """What the sentence finds in the pictures."""
    seen: Any = policy.see(inputs)
    if not isinstance(policy, CheckpointVLA):
        return seen.found
    begun = None if not policy.autoregressive else seen.x.new_zeros(len(seen.x), 1).long()
    return policy.found(seen, policy.hidden(seen, begun)[:, 0])


def check(policy: Family, demos: Demonstrations) -> None:
    """Raises ConfigError where the demonstrations are of another robot or other cameras."""
    size = demos.action.shape[1]
    if size != policy.size:
        raise ConfigError(
            f"cloning.dataset: its actions have {size} dimensions, the task's {policy.size}; name demonstrations of "
            "this robot, or record some (embodied-ppo demos)"
        )
    cameras = policy.trunk.encoder.images
    if missing := [name for name in cameras if name not in demos.images]:
        raise ConfigError(
            f"cloning.dataset: holds no camera {missing[0]!r}, only {', '.join(demos.images) or 'none'}; set "
            f"env.cameras to what it holds, or record with env.cameras=[{','.join(cameras)}]"
        )
    for name, spec in cameras.items():
        height, width = demos.images[name].shape[1:3]
        shape = spec.shape if channels_last(spec) else (*spec.shape[1:], spec.shape[0])  # (H, W, channels)
        if shape[2] != 3:
            raise ConfigError(
                f"cloning.dataset: camera {name!r} shows 3 channels (RGB), the task's {shape[2]}; use a task whose "
                "pictures are RGB"
            )
        if (height, width) != shape[:2]:
            raise ConfigError(
                f"cloning.dataset: camera {name!r} shows {height} x {width} pixels, the task's {shape[0]} x {shape[1]};"
                " set env.image_size to what the dataset has, or record with the task's"
            )
    numbers, vectors = demos.state.shape[1], policy.trunk.encoder.vectors
    if vectors and numbers != policy.trunk.encoder.vector_size:
        named = " + ".join(f"{name} ({math.prod(spec.shape)})" for name, spec in vectors.items())
        raise ConfigError(
            f"cloning.dataset: its observation.state has {numbers} numbers, the task's {named} "
            f"{policy.trunk.encoder.vector_size}; name demonstrations with the same, or record some "
            "(embodied-ppo demos)"
        )


def _vectors(policy: Family, state: Tensor) -> dict[str, Tensor]:
    """States [B, S] as the observations that the policy knows, whatever they are called there, in their order."""
    vectors = policy.trunk.encoder.vectors
    if not vectors:  # it has pictures only
        return {}
    parts = state.split([math.prod(spec.shape) for spec in vectors.values()], dim=1)
    return dict(zip(vectors, parts, strict=True))


def _inputs(policy: Family, demos: Demonstrations, frames: Tensor) -> dict[str, Tensor]:
    device = policy.query.device
    obs = _vectors(policy, demos.state[frames].to(device))
    for name, spec in policy.trunk.encoder.images.items():
        images = demos.images[name][frames].to(device)  # [B, H, W, 3]
        obs[name] = images if channels_last(spec) else images.permute(0, 3, 1, 2)
    return policy.encode(obs | {INSTRUCTION: demos.instruction[frames].to(device)})


def _along(episode: Tensor, fractions: Sequence[float]) -> Tensor:
    """Frames so far along each frame's episode, int64 [F, len(fractions)]; ``episode`` [F] is ascending."""
    first = torch.searchsorted(episode, episode)
    length = torch.searchsorted(episode, episode, right=True) - 1 - first
    return torch.stack([first + (length * fraction).round().long() for fraction in fractions], dim=1)


@torch.no_grad()
def _measured(policy: Family, demos: Demonstrations, frames: Tensor) -> float:
    """Mean loss of up to 2,048 frames."""
    frames = frames[:: max(1, len(frames) // 2048)]
    if not len(frames):
        return float("nan")
    total, noise = 0.0, torch.Generator(policy.query.device).manual_seed(0)
    for part in frames.split(256):
        action, executed = (x.to(policy.query.device) for x in demos.chunk(part, policy.chunk))
        total += float(policy.bc_loss(_inputs(policy, demos, part), action, executed, noise)[0]) * len(part)
    return total / len(frames)


class Beside:
    """``config.coef`` times the cloning loss of frames that are drawn anew each time: what PPO should not unlearn."""

    def __init__(self, policy: Family, demos: Demonstrations, config: CloningConfig) -> None:
        check(policy, demos)
        self.policy, self.demos, self.config = policy, demos, config

    def __call__(self, generator: torch.Generator) -> Tensor:
        """A scalar with gradient; the generator is a CPU's. Uses the policy's normaliser as it is."""
        policy, demos, device = self.policy, self.demos, self.policy.query.device
        frames = torch.randint(len(demos.state), (self.config.batch_size,), generator=generator)
        seed = int(torch.randint(2**62, (), generator=generator))
        told = policy.sentences
        policy.tell(demos.instructions)
        try:
            inputs = _inputs(policy, demos, frames)
        finally:
            policy.tell(told)
        action, executed = (x.to(device) for x in demos.chunk(frames, policy.chunk))
        noise = torch.Generator(device).manual_seed(seed)
        return self.config.coef * policy.bc_loss(inputs, action, executed, noise)[0]
