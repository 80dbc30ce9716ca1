"""X-VLA: Florence-2 encodes images and words, and an action transformer predicts the actions.

Shape letters: B rows, K views (images), T tokens of a view, W words, H actions of the model's
horizon, N numbers of an action and of a state (padded), P tokens of the prefix, D width of
Florence-2. All tokens of the action transformer attend to each other::

    H noisy actions | first view and words, encoded by Florence-2 | other views | soft prompts

The state and the flow time are part of the input of each noisy action. Each domain (a robot) has
its own soft prompts and its own layers that read and write actions. lerobot's preprocessor stores
the index of the domain.

The model predicts the action a, not a velocity. A latent is x_τ = τ e + (1 - τ) a with the initial
noise e. In each step of the chain, lerobot computes the next latent from the predicted a and the
same e. A stored latent therefore contains x_τ and e, [B, H, 2 N]; e is constant along the chain.
The stochastic step is that of ``distributions.flow_step``, which gets e instead of an estimate of
the noise. The probability of a step is therefore exact.

Sources: Zheng et al. 2025, arXiv 2510.10274; details from lerobot's implementation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.collectives import layers
from embodied_ppo.core.types import ConfigError, Decision, ObsSpec
from embodied_ppo.models import distributions as dist
from embodied_ppo.models import lora
from embodied_ppo.models.backbone import VECTOR
from embodied_ppo.models.vla import xvla_files
from embodied_ppo.models.vla.flow_matching import Field, learned_log_std
from embodied_ppo.models.vla.pi0 import ORIGIN, PI0, Prefix, Trunk, run_layer
from embodied_ppo.models.vla.pi0_files import Published
from embodied_ppo.models.vla.trunk import WORDS, Grounding

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation by which the channels of an image are normalised."""
LONGEST_PERIOD = 100.0
"""Parameter of the encoding of the flow time, see ``XVLA.encode_time``."""


class FlorenceTrunk(Trunk):
    """Trunk with Florence-2. The prefix contains the features of views and words."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        vlm: Any,
        state_size: int,
        published: Published,
        config: ModelConfig,
    ) -> None:
        """See ``Trunk``.

        Raises:
            ConfigError: The images do not fit the model.
        """
        super().__init__(obs_spec, vlm, state_size, published, config)
        sizes = published.model.config
        self.size: tuple[int, int] | None = sizes.side
        self.views = max(sizes.views, len(self.names))
        shapes = {tuple(spec.shape) for spec in self.encoder.images.values()}
        if self.size is None and len(shapes) > 1:
            raise ConfigError(
                f"model.checkpoint={config.checkpoint}: has resize_imgs_with_padding=null, so that"
                f" images must have one size, but they have {sorted(shapes)}; set env.image_size"
            )
        for name, x in zip(("mean", "std"), IMAGENET, strict=True):
            self.register_buffer(name, torch.tensor(x).view(3, 1, 1), persistent=False)

    mean: Tensor
    std: Tensor

    def pixels(self, image: Tensor) -> Tensor:
        """Normalise and resize uint8 [B, 3, h, w], and pad with 0 on the left and at the top."""
        x = (image.float() / 255 - self.mean) / self.std
        if self.size is None or tuple(x.shape[-2:]) == self.size:
            return x
        (height, width), (h, w) = self.size, x.shape[-2:]
        scale = max(h / height, w / width)
        h, w = int(h / scale), int(w / scale)
        x = F.interpolate(x, (h, w), mode="bilinear")
        return F.pad(x, (width - w, 0, height - h, 0))

    def checkpointed_module(self) -> Any:
        """See ``Trunk.checkpointed_module``; transformers' vision encoder has no checkpointing."""
        return self.vlm.language_model

    def encode_images(self, x: Tensor) -> Tensor:
        """Run the vision encoder on pixels [n, 3, h, w]; the result is [n, width, h', w']."""
        tower = self.vlm.vision_tower
        x = x.to(tower.convs[0].conv.weight.dtype)
        for convolution, blocks in zip(tower.convs, tower.blocks, strict=True):
            for layer in (convolution, *blocks):
                x = run_layer(self.checkpointing, layer, _run_block, x)
        return x

    def image_tokens(self) -> int:
        """See ``Trunk.image_tokens``."""
        if self.size is None:
            height, width = next(iter(self.encoder.images.values())).shape[-2:]
        else:
            height, width = self.size
        config = self.vlm.vision_tower.config
        sizes = zip(config.patch_size, config.patch_stride, config.patch_padding, strict=True)
        for patch, stride, padding in sizes:
            height, width = ((n + 2 * padding - patch) // stride + 1 for n in (height, width))
        return height * width + 1

    def forward(self, inputs: dict[str, Tensor]) -> Prefix:
        """See ``Trunk.forward``; keys and values are halves of the features, [B, 1, P, D / 2]."""
        vlm, ids = self.vlm, inputs[WORDS]
        language = vlm.language_model
        pixels = torch.stack([self.pixels(inputs[name]) for name in self.names], dim=1)
        rows = len(pixels)  # of [B, K, 3, h, w]
        images = vlm.multi_modal_projector(self.encode_images(pixels.flatten(0, 1)))
        images = images.unflatten(0, (rows, -1))  # [B, K, T, D]
        x = torch.cat((images[:, 0], language.embed_tokens(ids).to(images.dtype)), dim=1)
        encoded = language(inputs_embeds=x).last_hidden_state  # [B, T + W, D]
        # Missing views are zeros.
        missing = (0, 0, 0, 0, 0, self.views - images.shape[1])
        others = F.pad(images[:, 1:], missing).flatten(1, 2)
        features = torch.cat((encoded, others.to(encoded.dtype)), dim=1)
        halves = (half.unsqueeze(1) for half in features.chunk(2, dim=-1))
        valid = torch.ones(features.shape[:2], dtype=torch.bool, device=features.device)
        pooled = encoded.float().mean(1)
        keys, values = halves
        return Prefix((keys,), (values,), valid, pooled, inputs[VECTOR], inputs.get(ORIGIN))


class XVLA(PI0):
    """Flow policy with X-VLA; see ``PI0``."""

    trunk: FlorenceTrunk
    trunk_class = FlorenceTrunk
    state_tokens = 0
    read = staticmethod(xvla_files.read)
    weight_patterns = xvla_files.PARAMETERS
    is_transposed = staticmethod(xvla_files.is_transposed)
    module_names = staticmethod(lambda folder: xvla_files.MODULES)
    grippers: tuple[int, ...]
    """Indices of the numbers of an action that are logits of a gripper."""

    def check_sizes(self, config: Any, label: str) -> None:
        """Store the fields of ``config`` that ``PI0`` does not read."""
        self.grippers, self.dim_time = config.grippers, config.dim_time
        self.words, self.numbers = config.words, config.max_action_dim
        domain = torch.tensor(config.domain)
        masked = torch.ones(config.max_action_dim)
        masked[list(self.grippers)] = 0
        for name, x in (("domain", domain), ("read_numbers", masked)):
            self.register_buffer(name, x, persistent=False)

    domain: Tensor
    """Index of the domain, int64 []."""
    read_numbers: Tensor
    """1 for numbers of an action that are inputs of the model, 0 for grippers, float32 [N]."""

    def configure_chain(self, config: ModelConfig, *, horizon: int, padded: int) -> None:
        """See ``Flow.configure_chain``; a stored latent also contains the initial noise."""
        super().configure_chain(config, horizon=horizon, padded=2 * padded)

    def freeze(self, frozen: bool) -> None:
        """See ``PI0.freeze``; with adapters, the position embeddings are not trained either.

        They are a parameter of the transformer itself, not of a submodule, so an adapter in peft's
        layout cannot contain them.
        """
        super().freeze(frozen)
        if self.rank:
            self.expert.pos_emb.requires_grad_(False)
            lora.cast_parameters(self, self.dtype)

    def units(self) -> list[nn.Module]:
        """See ``Policy.units``."""
        vlm = self.trunk.vlm
        stages: Sequence[Any] = layers(vlm.vision_tower)
        vision = [part for x in stages for part in (x if isinstance(x, nn.ModuleList) else (x,))]
        language = vlm.language_model
        return [*vision, *layers(language), *layers(self.expert), language.embed_tokens]

    def prefix_bytes(self) -> int:
        """See ``PI0.prefix_bytes``; the prefix has one layer of features."""
        tokens = self.trunk.views * self.trunk.image_tokens() + self.words
        feature_bytes = self.width * self.dtype.itemsize
        return tokens * (feature_bytes + 1) + 4 * self.width + 4 * self.trunk.state_size

    # ------------------------------------------------------------------------------------ the chain
    def field(self, context: Prefix) -> Field:
        """Return a function from x_τ [B, H, N] and τ to the predicted action; see ``Field``."""
        model: Any = self.expert
        rows, dtype = len(context.valid), self.embed.fc.weight.dtype
        split = self.trunk.image_tokens() + self.words
        state = context.state.clone()
        state[:, list(self.grippers)] = 0
        with lora.autocast(self.device, self.dtype):
            features = torch.cat((context.keys[0], context.values[0]), dim=-1).squeeze(1)
            encoded, others = features.to(dtype).tensor_split((split,), dim=1)
            tokens = torch.cat((model.vlm_proj(encoded), model.aux_visual_proj(others)), dim=1)
            length = self.horizon + tokens.shape[1]
            if length > model.pos_emb.shape[1]:
                raise ConfigError(
                    f"model.checkpoint: {self.trunk.views} views, words and actions are {length}"
                    f" tokens, the model has max_len_seq = {model.pos_emb.shape[1]}; use smaller"
                    " images or fewer cameras"
                )
            tokens = tokens + model.pos_emb[:, self.horizon : length]
            if model.soft_prompt_hub is not None:
                prompts = model.soft_prompt_hub(self.domain).view(1, -1, tokens.shape[-1])
                prompts = prompts.expand(rows, -1, -1).to(tokens.dtype)
                tokens = torch.cat((tokens, prompts), dim=1)

        def flow(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor | None]:
            with lora.autocast(self.device, self.dtype):
                inputs = (
                    x * self.read_numbers,
                    *(
                        part.unsqueeze(1).expand(-1, self.horizon, -1)
                        for part in (state, self.encode_time(tau))
                    ),
                )
                h = self.embed(torch.cat(inputs, dim=-1).to(dtype), self.domain)
                h = torch.cat((h + model.pos_emb[:, : self.horizon], tokens), dim=1)
                for block in model.blocks:
                    h = run_layer(self.checkpointing, block, _run_block, h)
                h = model.norm(h[:, : self.horizon])
                log_std = None
                if self.scale is not None:
                    log_std = learned_log_std(self.scale(h))[..., : self.numbers]
                return self.velocity(h, self.domain).float(), log_std

        return flow

    def encode_time(self, tau: Tensor) -> Tensor:
        """Return cosines and sines of the flow times [B], float32 [B, dim_time]."""
        half = self.dim_time // 2
        ranks = torch.arange(half, dtype=torch.float32, device=tau.device)
        angle = tau.unsqueeze(1) * torch.exp(-math.log(LONGEST_PERIOD) * ranks / half)
        encoded = torch.cat((angle.cos(), angle.sin()), dim=1)
        return F.pad(encoded, (0, self.dim_time - 2 * half))

    def _step(self, field: Field, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``Flow._step``; the second half of a latent is the initial noise."""
        delta = 1 / self.steps
        tau = (1 - k.double() * delta).float()
        x, noise = x.chunk(2, dim=-1)
        action, log_std = field(x, tau)
        tau = tau.view(-1, 1, 1)
        # Latent and velocity that follow from the predicted action and the initial noise.
        x, v = tau * noise + (1 - tau) * action, noise - action
        ahead = x - delta * v
        if log_std is not None:
            mean, log_std = ahead, log_std + math.log(self.temperature)
        else:
            mean, std = dist.flow_step(x, v, tau, delta, self.eta * self.temperature)
            log_std = std.log().expand_as(mean)
        constant = torch.full_like(noise, -torch.inf)
        parts = ((ahead, noise), (mean, noise), (log_std, constant))
        ahead, mean, log_std = (torch.cat(pair, dim=-1) for pair in parts)
        return ahead, mean, log_std

    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        """See ``Policy.act``; both halves of the first latent are the initial noise."""
        if noise is not None:
            noise = noise.clone()
            noise[:, 0, :, self.numbers :] = noise[:, 0, :, : self.numbers]
        return super().act(inputs, noise=noise)

    def start(self, rows: int) -> Tensor:
        """See ``PI0.start``."""
        noise = self.initial_noise[:, : self.numbers]
        return torch.cat((noise, noise), dim=-1).expand(rows, -1, -1)

    # ---------------------------------------------------------------------------------- the actions
    def _executed_grippers(self) -> list[int]:
        """Return the indices of grippers that the environment's actions have."""
        return [i for i in self.grippers if i < self.size]

    def denormalize_actions(self, x: Tensor, context: Prefix) -> Tensor:
        """See ``PI0.denormalize_actions``; grippers are probabilities."""
        if grippers := self._executed_grippers():
            x = x.clone()
            x[..., grippers] = x[..., grippers].sigmoid()
        return super().denormalize_actions(x, context)

    def action_loss(
        self, context: Prefix, action: Tensor, generator: Generator | None
    ) -> tuple[Tensor, Grounding | None]:
        """Return the error of the action that is predicted at a uniformly random flow time.

        It is the squared error, and for grippers the binary cross-entropy of their logits.
        """
        target = self.normalize_actions(action, context)
        a = F.pad(target, (0, self.numbers - self.size, 0, self.horizon - self.chunk))
        tau = torch.rand(len(a), 1, 1, generator=generator, device=a.device)
        noise = dist.gaussian_noise(a.shape, generator, a.device)
        predicted, _ = self.field(context)(tau * noise + (1 - tau) * a, tau.flatten())
        predicted = self._executed(predicted)
        loss = (predicted - target).square()
        if grippers := self._executed_grippers():
            logits, closed = predicted[..., grippers], target[..., grippers].clamp(0, 1)
            loss = loss.clone()
            loss[..., grippers] = F.binary_cross_entropy_with_logits(
                logits, closed, reduction="none"
            )
        return loss, context.grounding


def _run_block(block: Any, x: Tensor) -> Tensor:
    """Run a block on tokens or features ``x``; see ``run_layer``."""
    return block(x)
