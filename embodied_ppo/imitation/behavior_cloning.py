"""Behaviour cloning of robot policies, with an auxiliary loss.

Trained on actions alone, the small trunk ignores the instruction (success 0.1 after 2,000 steps),
because an action has little information on the object that the instruction names. The auxiliary
loss therefore predicts, from the features that the sentence attends to (``Grounding``), future
states of the robot, and for each image cell the change of its colour until the end of the
demonstration. If it is trained first, the attention finds the named object within a few hundred
steps. Its heads are dropped afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError, TrainingError
from embodied_envs.base.observation_names import INSTRUCTION
from embodied_ppo.core.adamw import AdamW
from embodied_ppo.core.types import ProgressCallback
from embodied_ppo.data.episode_images import FrameStream
from embodied_ppo.data.lerobot_reader import Demonstrations
from embodied_ppo.options.schema import CloningConfig
from embodied_ppo.policies.backbone import channels_first_shape
from embodied_ppo.policies.robot_policy import Family
from embodied_ppo.policies.vla.pretrained import PublishedVLA
from embodied_ppo.policies.vla.trunk import CELL, MASKED_WORD, WORDS, Grounding
from embodied_ppo.policies.vla.vla_policy import VLA

BETAS = (0.9, 0.99)
GRAD_NORM = 1.0
HELD_OUT = 0.05  # share of the episodes that is held out
# Times of the states that every frame predicts, as fractions of the demonstration.
FUTURE = (0.25, 0.5, 0.75, 1.0)
# Share of words masked in the auxiliary loss, as words unseen in training are at test time.
MASKED_WORDS = 0.2
# Name of the phase that minimises the auxiliary loss alone, in the log and in progress bars.
AUXILIARY_PHASE = "auxiliary loss"
# Largest absolute value of a plausible action in the unit of ``VLAPolicy.scaled_actions``.
MAX_SCALED_ACTION = 10.0
MAX_OUTSIDE = 0.01  # largest share of demonstrated actions with a number beyond MAX_SCALED_ACTION
# Episodes on disk whose images give the standard deviation of the change of colours.
SAMPLED_EPISODES = 32
# Frames int64 [B], and camera -> their images, uint8 [B, H, W, 3].
Batch: TypeAlias = "tuple[Tensor, dict[str, Tensor]]"
MIN_STD = 1e-3  # lower bound of the standard deviation by which a target is divided


def clone(
    policy: Family,
    demos: Demonstrations,
    config: CloningConfig,
    *,
    seed: int,
    notice: Callable[[str], None] = lambda text: None,
    advance: ProgressCallback = lambda task, completed, total: None,
) -> dict[str, float]:
    """Train a policy on demonstrations.

    AdamW minimises the auxiliary loss alone for ``config.foresight_steps``, then the sum of cloning
    and auxiliary loss for ``config.steps``; with foresight_steps=0 the cloning loss alone. The
    policy's normaliser is updated with every state once.

    Args:
        policy: The policy, trained in place.
        demos: The demonstrations. Images on disk are read according to config.shuffle_buffer.
        config: Options of the section ``cloning``.
        seed: Seed of the split, the batches and the heads.
        notice: Receives lines for the log.
        advance: Progress callback, called after every step.

    Returns:
        "cloning_loss", the loss per action dimension, mean over the last tenth of the steps, and
        "held_out_loss", that of held-out frames.

    Raises:
        ConfigError: The demonstrations do not fit the policy.
        TrainingError: The norm of the gradient is not finite.
    """
    check(policy, demos)
    if config.shuffle_buffer is None:
        demos = demos.load()
    start = time.process_time()
    device = policy.device
    sentences, frozen = policy.sentences, policy.frozen
    policy.set_sentences(demos.instructions)
    policy.freeze(False)
    try:
        if isinstance(policy, VLA):
            policy.trunk.initialize_words(demos.instructions, torch.Generator().manual_seed(seed))
        if len(vectors := policy.trunk.encoder.vectors) > 1:
            notice(f"cloning: the dataset's observation.state is read as {', then '.join(vectors)}")
        train, held_out = demos.split(HELD_OUT, seed)
        mask = torch.ones(len(demos.state), dtype=torch.bool, device=device)
        policy.observe(_vectors(policy, demos.state.to(device)), mask)
        run = _CloningRun(policy, demos, config, seed, notice, advance)
        if config.foresight_steps:
            run.train(train, config.foresight_steps, AUXILIARY_PHASE, seed)
        loss = run.train(train, config.steps, "cloning", seed + 1)
        held_out_loss = _held_out_loss(policy, demos, held_out)
        notice(
            f"cloning: loss {loss:.3f}, of held-out episodes {held_out_loss:.3f},"
            f" {time.process_time() - start:.0f} CPU seconds"
        )
        return {"cloning_loss": loss, "held_out_loss": held_out_loss}
    finally:
        policy.set_sentences(sentences)
        policy.freeze(frozen)


@dataclass(eq=False)
class _CloningRun:
    """Policy, demonstrations and the heads of the auxiliary loss."""

    policy: Family
    demos: Demonstrations
    config: CloningConfig
    seed: InitVar[int]
    notice: Callable[[str], None]
    advance: ProgressCallback

    def __post_init__(self, seed: int) -> None:
        policy, demos, config = self.policy, self.demos, self.config
        self.device = policy.device
        future = demos.state[_frames_at(demos.episode, FUTURE)].flatten(1)
        # [F, S·len(FUTURE)]
        self.future = (future - future.mean(0)) / future.std(0).clamp_min(MIN_STD)
        width = policy.width
        self.state_head: nn.Module | None = None
        self.cell_head: nn.Module | None = None
        if config.foresight_steps:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                state_head = _head(width, width, self.future.shape[1])
                cell_head = _head(width // 2, width, 3)
            self.state_head = state_head.to(self.device)
            if isinstance(policy, VLA):
                self.cell_head = cell_head.to(self.device)
                self._prepare_cells(seed)

    def _prepare_cells(self, seed: int) -> None:
        """Compute the cells of each episode's last image, and the deviation of their changes."""
        demos = self.demos
        episodes, self.position = demos.episode.unique(return_inverse=True)  # [E], [F]
        last = _frames_at(episodes[self.position], (1.0,))[:, 0]
        if demos.disk is None:
            self.last_cells = self._cells({n: x[last.unique()] for n, x in demos.images.items()})
            sample = torch.randperm(len(last), generator=torch.Generator().manual_seed(seed))[:2048]
        else:  # those of an episode are stored when it is decoded
            shapes = {n: x.new_empty(1, *x.shape[1:]) for n, x in demos.images.items()}
            shape = self._cells(shapes).shape[1:]
            self.last_cells = torch.empty(len(episodes), *shape, dtype=torch.uint8)
            sampled = torch.linspace(0, len(episodes) - 1, SAMPLED_EPISODES).long().unique()
            for i in sampled.tolist():
                self._store_last(i, demos.disk.of_episode(i))
            sample = torch.isin(self.position, sampled).nonzero().flatten()
            sample = sample[:: max(1, len(sample) // 2048)]
        changes = [self._change(*part) for part in demos.in_order(sample, len(sample))]
        self.change_std = torch.cat(changes).std().clamp_min(MIN_STD)

    def _store_last(self, i: int, images: dict[str, Tensor]) -> None:
        """Store the cells of the last image of the i-th episode."""
        if self.cell_head is not None:
            self.last_cells[i] = self._cells({name: x[-1:] for name, x in images.items()})[0]

    def _cells(self, images: Mapping[str, Tensor]) -> Tensor:
        """Return the cells of all cameras, uint8 [B, HW/16, 3]."""
        return torch.cat([_cells(images[name]) for name in self.policy.trunk.names], dim=1)

    def _batches(self, frames: Tensor, seed: int) -> Callable[[], Batch]:
        """Return a function that draws a batch of ``frames``."""
        demos, size, count = self.demos, self.config.shuffle_buffer, self.config.batch_size
        if demos.disk is not None:
            assert size is not None
            episodes = demos.episode.unique(return_inverse=True)[1][frames].unique()
            stream = FrameStream(
                demos.disk, episodes.tolist(), size=size, seed=seed, on_episode=self._store_last
            )
            return lambda: stream.take(count)
        generator = torch.Generator().manual_seed(seed)

        def draw() -> Batch:
            batch = frames[torch.randint(len(frames), (count,), generator=generator)]
            return batch, {name: x[batch] for name, x in demos.images.items()}

        return draw

    def train(self, frames: Tensor, steps: int, phase: str, seed: int) -> float:
        """Run ``steps`` of a phase and return the mean loss of the last tenth of the steps.

        The learning rate rises over 50 steps; a linear decay to a tenth multiplies it.
        """
        lr, draw = self.config.lr, self._batches(frames, seed)
        noise = torch.Generator(self.device).manual_seed(seed)
        modules = (self.policy, self.state_head, self.cell_head)
        parameters = [p for module in modules if module is not None for p in module.parameters()]
        optimizer = AdamW(parameters, lr=lr, betas=BETAS, weight_decay=0.01, fused=True)
        recent: list[float] = []
        for step in range(steps):
            warmup, decay = min(1.0, (step + 1) / 50), 1 - 0.9 * step / steps
            optimizer.param_groups[0]["lr"] = lr * warmup * decay
            reported, loss = self._loss(*draw(), phase, noise)
            recent.append(float(reported.detach()))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, GRAD_NORM)
            if not torch.isfinite(norm):
                raise TrainingError(
                    f"{phase}: gradient norm {float(norm):g} at step {step} (loss"
                    f" {float(loss):g}); lower cloning.lr={lr:g}"
                )
            optimizer.step()
            self.advance(phase, step + 1, steps)
            if (step + 1) % max(1, steps // 10) == 0:
                recent = recent[-max(1, steps // 10) :]
                mean = sum(recent) / len(recent)
                self.notice(f"{phase}: step {step + 1} of {steps}, loss {mean:.3f}")
        optimizer.zero_grad(set_to_none=True)
        return sum(recent) / max(1, len(recent))

    def _loss(
        self, frames: Tensor, images: dict[str, Tensor], phase: str, noise: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return the loss that is reported, and the one that is minimised."""
        inputs = _inputs(self.policy, self.demos, frames, images)
        if phase == AUXILIARY_PHASE:
            if isinstance(self.policy, VLA) and WORDS in inputs:
                inputs[WORDS] = _mask_words(inputs[WORDS], noise)
            loss = self._auxiliary_loss(_grounding(self.policy, inputs), frames, images)
            return loss, loss
        action, executed = (x.to(self.device) for x in self.demos.chunk(frames, self.policy.chunk))
        loss, grounding = self.policy.bc_loss(inputs, action, executed, noise)
        if self.state_head is None:
            return loss, loss
        return loss, loss + self._auxiliary_loss(grounding, frames, images)

    def _auxiliary_loss(
        self, grounding: Grounding | None, frames: Tensor, images: dict[str, Tensor]
    ) -> Tensor:
        """Return the error of the predicted future states and colour changes."""
        assert self.state_head is not None and grounding is not None  # cloning unfreezes the trunk
        loss = F.mse_loss(self.state_head(grounding.focus), self.future[frames].to(self.device))
        if self.cell_head is None or grounding.cells is None:
            return loss
        change = self._change(frames, images).to(self.device) / self.change_std
        return loss + F.mse_loss(self.cell_head(grounding.cells), change)

    def _change(self, frames: Tensor, images: dict[str, Tensor]) -> Tensor:
        """Return the colour change of each cell until the demonstration's end, [B, HW/16, 3]."""
        return self.last_cells[self.position[frames]].float() - self._cells(images).float()


def _head(inputs: int, hidden: int, outputs: int) -> nn.Module:
    """Return a network with one hidden layer."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, outputs))


def _mask_words(words: Tensor, noise: torch.Generator) -> Tensor:
    """Replace a share MASKED_WORDS of the words int64 [B, L] by MASKED_WORD; 0 is padding."""
    masked = torch.rand(words.shape, generator=noise, device=words.device) < MASKED_WORDS
    return words.masked_fill(masked & (words > 0), MASKED_WORD)


def _cells(images: Tensor) -> Tensor:
    """Return the mean colour of each CELL x CELL pixels, uint8 [F, HW/16, 3].

    ``images`` is uint8 [F, H, W, 3].
    """
    parts = (F.avg_pool2d(part.permute(0, 3, 1, 2).float(), CELL) for part in images.split(1024))
    return torch.cat([part.round().byte().flatten(2).transpose(1, 2) for part in parts])


def _grounding(policy: Family, inputs: dict[str, Tensor]) -> Grounding | None:
    """Return the features that the auxiliary loss is computed from."""
    context: Any = policy.encode_context(inputs)
    if not isinstance(policy, PublishedVLA):
        return context.grounding
    return Grounding(policy.first_hidden_of(context))


def check(policy: Family, demos: Demonstrations) -> None:
    """Check that the demonstrations fit the policy.

    Raises:
        ConfigError: Actions, states or camera images differ in shape, or a camera is missing.
    """
    # (height, width, channels) of each camera.
    cameras = {n: channels_first_shape(x) for n, x in policy.trunk.encoder.images.items()}
    expected = {n: (*sides, channels) for n, (channels, *sides) in cameras.items()}
    found = {n: tuple(x.shape[1:]) for n, x in demos.images.items()}
    expected["action"], found["action"] = (policy.size,), tuple(demos.action.shape[1:])
    if policy.trunk.encoder.vectors:
        name = f"observation.state ({', '.join(policy.trunk.encoder.vectors)})"
        expected[name] = (policy.trunk.encoder.vector_size,)
        found[name] = tuple(demos.state.shape[1:])
    for name, shape in expected.items():
        if found.get(name) != shape:
            raise ConfigError(
                f"cloning.dataset: its {name} has shape {found.get(name, 'none')}, the task's has"
                f" {shape}; name demonstrations of this robot (env.cameras=[{','.join(cameras)}]),"
                " or record some (embodied-ppo demos)"
            )
    _check_actions(policy, demos)


def _check_actions(policy: Family, demos: Demonstrations) -> None:
    """Raise ConfigError where actions are far outside the range that the policy predicts."""
    vectors = _vectors(policy, demos.state.to(policy.device))
    scaled = policy.scaled_actions(demos.action.to(policy.device), vectors).abs()
    share = float((scaled > MAX_SCALED_ACTION).any(dim=1).float().mean())
    if share > MAX_OUTSIDE or bool((scaled > 100 * MAX_SCALED_ACTION).any()):
        i = int(scaled.amax(dim=0).argmax())
        row = int(scaled[:, i].argmax())
        raise ConfigError(
            "convert the actions of cloning.dataset to the task's unit, which is that of the"
            " statistics of model.checkpoint, or leave episodes out (cloning.exclude_episodes):"
            f" {share:.1%} of the actions are out of range, for example in episode"
            f" {int(demos.episode[row])} action [{i}] = {float(demos.action[row, i]):g}; scaled to"
            f" [-1, 1] it is {float(scaled[row, i]):.3g}, the limit is {MAX_SCALED_ACTION:g}"
        )


def _vectors(policy: Family, state: Tensor) -> dict[str, Tensor]:
    """Return states [B, S] under the names and in the order of the policy's observations."""
    vectors = policy.trunk.encoder.vectors
    if not vectors:  # a policy with images only
        return {}
    parts = state.split([math.prod(spec.shape) for spec in vectors.values()], dim=1)
    return dict(zip(vectors, parts, strict=True))


def _inputs(
    policy: Family, demos: Demonstrations, frames: Tensor, cameras: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the encoded observations of frames int64 [B], with their images by camera."""
    device = policy.device
    obs = _vectors(policy, demos.state[frames].to(device))
    for name, spec in policy.trunk.encoder.images.items():
        images = cameras[name].to(device)  # [B, H, W, 3]
        assert spec.layout is not None
        obs[name] = spec.layout.restore(images.permute(0, 3, 1, 2), spec.shape)
    return policy.encode(obs | {INSTRUCTION: demos.instruction[frames].to(device)})


def _frames_at(episode: Tensor, fractions: Sequence[float]) -> Tensor:
    """Return the frames at fractions of each frame's episode, int64 [F, len(fractions)].

    ``episode`` [F], the episode of each frame, is ascending.
    """
    first = torch.searchsorted(episode, episode)
    length = torch.searchsorted(episode, episode, right=True) - 1 - first
    return torch.stack([first + (length * x).round().long() for x in fractions], dim=1)


@torch.no_grad()
def _held_out_loss(policy: Family, demos: Demonstrations, frames: Tensor) -> float:
    """Return the mean loss of every k-th frame, at most 4,095 frames; NaN without frames."""
    frames = frames[:: max(1, len(frames) // 2048)]
    if not len(frames):
        return float("nan")
    total, noise = 0.0, torch.Generator(policy.device).manual_seed(0)
    for part, images in demos.in_order(frames, 256):
        action, executed = (x.to(policy.device) for x in demos.chunk(part, policy.chunk))
        loss = policy.bc_loss(_inputs(policy, demos, part, images), action, executed, noise)[0]
        total += float(loss) * len(part)
    return total / len(frames)
