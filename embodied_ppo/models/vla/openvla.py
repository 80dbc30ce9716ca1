"""OpenVLA and OpenVLA-OFT: two vision towers, a projector and Llama.

The last 256 words of Llama's vocabulary are action bins. B rows, K cameras, P visual tokens (of all
cameras), L tokens of a prompt, S = P + L tokens before the actions, A action tokens (C·A of a
chunk), D size of a hidden state.

Weights and modules are those of transformers (Dinov2WithRegistersModel, SiglipVisionModel,
LlamaForCausalLM). The forward pass is implemented here, so that no code of a checkpoint is executed
(trust_remote_code, which also ignores the image under transformers 4.50 and later:
openvla/openvla#346), and neither timm nor torchvision is needed.

Token sequence of a row::

    BOS | P visual tokens | prompt, ends with the empty word 29871 | action tokens     causal
    BOS | P visual tokens | prompt, ends with 29871 | C·A zeros | end of sequence      bidirectional
                                                    (``stop_token``)

The first is OpenVLA (Kim et al. 2024, arXiv 2406.09246), the second the parallel decoding of
OpenVLA-OFT (Kim et al. 2025, arXiv 2502.19645). In both, the hidden state *before* an action token
or its placeholder predicts the token. Left padding of a prompt lies between image and words here.
It is never attended to and has no position, so that results do not change.

``openvla_files`` reads and writes the published files and names the source of these facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.backbone import InferenceModule
from embodied_ppo.models.causal_lm import Attend, Decoder, ModuleReference
from embodied_ppo.models.checkpoint_files import config_errors, import_transformers
from embodied_ppo.models.vla.hf_vlm import resize

BOS, STOP, EMPTY = 1, 2, 29871
"""Llama 2's ids of begin and end of sequence, and of the empty word between "Out:" and the action.
"""
MEANS = (0.485, 0.456, 0.406, 0.5, 0.5, 0.5)
"""Means of the six channels, three for each tower: ImageNet's for DINOv2, then SigLIP's. Pixels are
in [0, 1].
"""
STDS = (0.229, 0.224, 0.225, 0.5, 0.5, 0.5)
CROPPED_AREA = 0.9
"""Share of an image's area that remains after ``center_crop``."""


# ------------------------------------------------------------------------------------ configuration
@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Sizes of a vision transformer."""

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    """Hidden units of a layer's MLP; in DINOv2 a multiple of hidden_size."""
    patch_size: int = 14
    """Side of a patch in pixels."""


DINO = TowerConfig(hidden_size=1024, layers=24, heads=16, intermediate_size=4096)
"""timm's vit_large_patch14_reg4_dinov2."""
SIGLIP = TowerConfig(hidden_size=1152, layers=27, heads=16, intermediate_size=4304)
"""timm's vit_so400m_patch14_siglip_224 and _384."""


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig:
    """Sizes of all parts.

    Raises:
        ConfigError: The sizes are inconsistent.
    """

    text: Mapping[str, Any]
    """Fields of transformers' LlamaConfig; missing ones are those of Llama 2 7B, as in the
    published code.
    """
    dino: TowerConfig = DINO
    siglip: TowerConfig = SIGLIP
    vision_backbone_id: str = "dinosiglip-vit-so-224px"
    image_size: int = 224
    """Side of the square that images are resized to, in pixels."""
    registers: int = 4
    """Number of DINOv2's register tokens."""
    action_bins: int = 256
    """Number of action ids, the last ones of the vocabulary before its padding."""
    pad_to_multiple_of: int = 64
    """Number of ids at the end of text's vocab_size that are padding."""
    pad_token_id: int = 32000
    means: tuple[float, ...] = MEANS
    """Means of the six channels; those of preprocessor_config.json where it exists."""
    stds: tuple[float, ...] = STDS
    """Standard deviations of the six channels, likewise."""
    norm_stats: Mapping[str, Any] = field(default_factory=dict)
    """{dataset: {action: {q01, q99, mask}}}, see ``ActionTokens.of``."""
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    """Unused fields of config.json, which ``save`` writes back."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size without padding: 32000."""
        return int(self.text.get("vocab_size", 32000)) - self.pad_to_multiple_of

    @property
    def grid(self) -> int:
        """Patches along a side of the image."""
        return self.image_size // self.dino.patch_size

    def __post_init__(self) -> None:
        for name, tower in (("dino", self.dino), ("siglip", self.siglip)):
            label = f"vision_sizes.{name}"
            for size, value in vars(tower).items():
                if type(value) is not int or value < 1:
                    raise ConfigError(f"{label}.{size}={value} must be a whole number, at least 1")
            if tower.hidden_size % tower.heads:
                raise ConfigError(
                    f"{label}.heads={tower.heads} must divide"
                    f" {label}.hidden_size={tower.hidden_size}; change either"
                )
            if tower.layers < 2:
                raise ConfigError(
                    f"{label}.layers={tower.layers} must be at least 2: the second-to-last is read"
                )
        if self.dino.intermediate_size % self.dino.hidden_size:
            raise ConfigError(
                f"vision_sizes.dino.intermediate_size={self.dino.intermediate_size} must be a"
                f" multiple of vision_sizes.dino.hidden_size={self.dino.hidden_size}, as"
                " DINOv2's are"
            )
        if self.image_size // self.siglip.patch_size != self.grid or not self.grid:
            raise ConfigError(
                f"image_size={self.image_size}: patches of {self.dino.patch_size} and"
                f" {self.siglip.patch_size} pixels must give both towers the same number, at least"
                " 1; choose equal patch_size"
            )
        lowest = max(EMPTY + 1, self.action_bins + 3)
        if self.vocab_size < lowest:
            raise ConfigError(
                f"text_config.vocab_size={self.text.get('vocab_size', 32000)} less"
                f" pad_to_multiple_of={self.pad_to_multiple_of} leaves {self.vocab_size} words but"
                f" must leave at least {lowest}: prompts hold word {EMPTY}, actions are the last"
                f" {self.action_bins}; Llama 2 has 32000"
            )
        if self.action_bins < 2:
            raise ConfigError(
                f"n_action_bins={self.action_bins} must be at least 2; published models have 256"
            )
        if not 0 <= self.pad_token_id < self.vocab_size + self.pad_to_multiple_of:
            raise ConfigError(
                f"pad_token_id={self.pad_token_id} must be an id of text_config.vocab_size; use"
                " 32000"
            )
        if self.text.get("tie_word_embeddings"):
            raise ConfigError(
                "text_config.tie_word_embeddings=true: Llama 2 has a head of its own; set it to"
                " false"
            )


# --------------------------------------------------------------------------------------------- body
class Projector(nn.Module):
    """Maps the features of both towers to visual tokens."""

    def __init__(
        self, features: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features, dtype=dtype, device=device)
        self.fc2 = nn.Linear(4 * features, hidden_size, dtype=dtype, device=device)
        self.fc3 = nn.Linear(hidden_size, hidden_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Project [.., features] to [.., D]."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class Trunk(Decoder):
    """Llama's layers with an arbitrary attention mask."""

    def masked(self, visible: Tensor, place: Tensor | None) -> Attend:
        """Return attention under a mask.

        Args:
            visible: bool [B, 1, S or 1, S], keys that each query attends to.
            place: int64 [R], queries of the last layer; None: all.
        """
        last_visible = visible if place is None or visible.shape[2] == 1 else visible[:, :, place]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            is_last = i == len(self.attention) - 1
            return self.attention[i](q, k, v, last_visible if is_last else visible)

        return attend


class Embedded(NamedTuple):
    """Embeddings and their padding.

    Attributes:
        x: [B, S, D].
        valid: bool [B, S], not padding.
        position: int64 [B, S], 0, 1, .. of valid tokens, arbitrary elsewhere.
    """

    x: Tensor
    valid: Tensor
    position: Tensor

    def append(self, x: Tensor) -> Embedded:
        """Append [B, n, D] without padding."""
        more = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        valid = torch.cat((self.valid, more), dim=1)
        return Embedded(torch.cat((self.x, x.to(self.x.dtype)), dim=1), valid, valid.cumsum(1) - 1)

    def visible_keys(self, causal: bool) -> Tensor:
        """Return the attention mask, bool [B, 1, S, S], or [B, 1, 1, S] if it is equal for all
        queries.
        """
        keys = self.valid[:, None, None]
        if not causal:
            return keys
        size = self.valid.shape[1]
        return keys & torch.ones(size, size, dtype=torch.bool, device=keys.device).tril()


@dataclass
class Cache:
    """Keys and values of the tokens so far, with capacity for more. ``OpenVLABody.step`` appends to
    it.

    Attributes:
        key: Of each layer [B, heads, S + capacity, d].
        value: Of each layer [B, heads, S + capacity, d].
        valid: bool [B, S + capacity].
        position: int64 [B], of the next token.
        length: Columns in use.
    """

    key: list[Tensor]
    value: list[Tensor]
    valid: Tensor
    position: Tensor
    length: int


def center_crop(images: Tensor, side: int) -> Tensor:
    """Crop the centre of images and resize it, as the publishers' evaluations do.

    Models that were trained with random crops are evaluated with the central one. The sides of the
    crop are those of the image times sqrt(0.9). It is resized by linear interpolation without a
    filter, and its corner pixels become those of the result (TensorFlow's crop_and_resize). A value
    x in [0, 1] becomes the level floor(255.5 x) (TensorFlow's convert_image_dtype).

    Args:
        images: uint8 [N, 3, H, W].
        side: Side of the result in pixels.

    Returns:
        Levels 0 to 255, float32 [N, 3, side, side].
    """
    x = images.float() / 255
    for dim in (-1, -2):
        last = x.shape[dim] - 1
        share = CROPPED_AREA**0.5
        ranks = torch.linspace(0, 1, side, dtype=torch.float64, device=x.device)
        place = last * ((1 - share) / 2 + share * ranks)
        low = place.floor().long().clamp_max(last - 1)
        weight = (place - low).float()
        shape = (side, 1) if dim == -2 else (side,)
        a, b = x.index_select(dim, low), x.index_select(dim, low + 1)
        x = a + (b - a) * weight.view(shape)
    return (x * 255.5).floor().clamp(0, 255)


class OpenVLABody(InferenceModule):
    """Maps images and prompt to hidden states that predict action tokens, and to their logits.

    Attributes:
        center_crop: Whether images are cropped, see the function of this name.
        stop_token: Whether the end of sequence follows the placeholders of parallel decoding. It
            does in OpenVLA-OFT, and does not in RLinf's variant.

    Parameters that the forward pass does not use are frozen but kept, because a checkpoint contains
    them: the towers' last layer and what follows it.
    """

    def __init__(
        self,
        config: OpenVLAConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        """Build the networks with new weights; ``openvla_files.load`` reads those of a checkpoint.

        Raises:
            ConfigError: transformers is missing or refuses the configuration.
        """
        super().__init__()
        self.config = config
        self.center_crop, self.stop_token = False, True
        models = _models(config, dtype, device)
        self.dino: Any = models[0]
        self.siglip: Any = models[1]
        self.language_model: Any = models[2]
        size = self.language_model.config.hidden_size
        features = config.dino.hidden_size + config.siglip.hidden_size
        self.projector = Projector(features, size, dtype=dtype, device=device)
        self.trunk = ModuleReference(Trunk(self.language_model.model))
        # timm's DINOv2 has no mask token and adds no position to its class token.
        self.dino.embeddings.mask_token = None
        with torch.no_grad():
            self.dino.embeddings.position_embeddings[:, 0] = 0
        unread = [self.dino.encoder.layer[-1], self.dino.layernorm]
        unread += [self.siglip.encoder.layers[-1], self.siglip.post_layernorm, self.siglip.head]
        for module in unread:
            module.requires_grad_(False)
        self.eval()

    @property
    def recompute(self) -> bool:
        """Whether activations are recomputed in the backward pass: less memory, a third more
        time.
        """
        return self.trunk.module.recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        self.trunk.module.recompute = value

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state, D."""
        return self.trunk.module.hidden_size

    # --------------------------------------------------------------------------------------- images
    def pixels(self, images: Tensor) -> Tensor:
        """Resize and normalise uint8 [N, 3, H, W] to float32 [N, 6, image_size, image_size].

        The first three channels are normalised for DINOv2, the others for SigLIP. Resizing
        equals Pillow's cubic filter up to one level: first the width, then the height, rounded in
        between.
        """
        side = self.config.image_size
        x = center_crop(images, side) if self.center_crop else images.float()
        for size in ((x.shape[-2], side), (side, side)):
            x = resize(x, size, "bicubic")
        channels = [
            (x[:, c % 3] / 255 - mean) / std
            for c, (mean, std) in enumerate(zip(self.config.means, self.config.stds, strict=True))
        ]
        return torch.stack(channels, dim=1)

    def features(self, pixels: Tensor) -> Tensor:
        """Return the outputs of the second-to-last layers, [N, patches, D of both], not
        normalised.
        """
        return torch.cat((self._dino(pixels[:, :3]), self._siglip(pixels[:, 3:])), dim=-1)

    def _dino(self, pixels: Tensor) -> Tensor:
        e = self.dino.embeddings
        x = e.patch_embeddings(pixels) + e.position_embeddings[:, 1:]
        prefix = torch.cat((e.cls_token, e.register_tokens), dim=1)
        prefix = prefix.expand(len(x), -1, -1).to(x.dtype)
        x = self._layers(self.dino.encoder.layer[:-1], torch.cat((prefix, x), dim=1))
        return x[:, prefix.shape[1] :]

    def _siglip(self, pixels: Tensor) -> Tensor:
        e = self.siglip.embeddings
        x = e.patch_embedding(pixels.to(e.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        # These layers need an attention mask; those of DINOv2 take none before transformers 5.18.
        layers, x = self.siglip.encoder.layers[:-1], x + e.position_embedding.weight
        return self._layers(layers, x, None)

    def _layers(self, layers: Iterable[Any], x: Tensor, *mask: None) -> Tensor:
        for layer in layers:
            again = self.recompute and torch.is_grad_enabled()
            x = checkpoint(layer, x, *mask, use_reentrant=False) if again else layer(x, *mask)
        return x

    def vision(self, images: Tensor) -> Tensor:
        """Return visual tokens [B, P, D] of images uint8 [B, 3, H, W] or [B, K, 3, H, W], camera by
        camera.
        """
        cameras = images.shape[1] if images.ndim == 5 else 1
        x = self.projector(self.features(self.pixels(images.reshape(-1, *images.shape[-3:]))))
        return x.unflatten(0, (-1, cameras)).flatten(1, 2)

    # --------------------------------------------------------------------------------------- hidden
    def embed_prompt(self, visual: Tensor, ids: Tensor, mask: Tensor) -> Embedded:
        """Concatenate BOS, the visual tokens and the other tokens of the prompt; S = P + L.

        Args:
            visual: [B, P, D].
            ids: int64 [B, L] of ``encode_prompts``: the first token of a row is BOS, the last one
                is in the last column.
            mask: bool [B, L], not padding.
        """
        mask = mask.bool()
        words = self._embed(ids)
        bos = self._embed(torch.full_like(ids[:, :1], BOS))
        first = mask & (mask.cumsum(1) == 1)
        valid = torch.ones(len(ids), 1 + visual.shape[1], dtype=torch.bool, device=ids.device)
        valid = torch.cat((valid, (mask & ~first)[:, 1:]), dim=1)
        x = torch.cat((bos, visual.to(words.dtype), words[:, 1:]), dim=1)
        return Embedded(x, valid, valid.cumsum(1) - 1)

    def predict(
        self, before: Embedded, actions: Tensor | None = None, *, placeholders: int = 0
    ) -> Tensor:
        """Return the hidden states [B, A, D] before each action token, with gradient.

        Args:
            before: Image and prompt.
            actions: int [B, A], bins, for teacher forcing: each token attends to those before it.
                The value of the last one is not used; [B, 1] returns the state after the prompt.
            placeholders: C·A for parallel decoding, where every position attends to all. The A
                dimensions of an action are neighbours. Exactly one of both is given.
        """
        rows, device = len(before.x), before.x.device
        if actions is not None:
            assert placeholders == 0
            count = actions.shape[1]
            sequence = before.append(self._embed(self._id(actions[:, :-1])))
        else:
            assert placeholders > 0
            count = placeholders
            stop = self._embed(torch.full((rows, int(self.stop_token)), STOP, device=device))
            sequence = before.append(F.pad(stop, (0, 0, placeholders, 0)))
        place = before.x.shape[1] - 1 + torch.arange(count, device=device)
        attend = self.trunk.module.masked(sequence.visible_keys(causal=actions is not None), place)
        return self.trunk.module.run(sequence.x, sequence.position, attend, place.expand(rows, -1))

    @torch.no_grad()
    def begin(self, sequence: Embedded, *, room: int) -> tuple[Tensor, Cache]:
        """Start decoding token by token.

        Returns:
            Hidden states [B, D] before the first action token, and a cache for ``room`` further
            tokens.
        """
        trunk, size = self.trunk.module, sequence.x.shape[1]
        place = torch.full((1,), size - 1, device=sequence.x.device)
        masked = trunk.masked(sequence.visible_keys(causal=True), place)
        position = sequence.position[:, -1] + 1
        cache = Cache([], [], F.pad(sequence.valid, (0, room), value=True), position, size)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.key.append(F.pad(k, (0, 0, 0, room)))
            cache.value.append(F.pad(v, (0, 0, 0, room)))
            return masked(i, q, k, v)

        places = place.expand(len(sequence.x), -1)
        return trunk.run(sequence.x, sequence.position, attend, places)[:, 0], cache

    @torch.no_grad()
    def step(self, bins: Tensor, cache: Cache) -> Tensor:
        """Append actions int [B] and return the hidden states [B, D] before the next ones."""
        trunk, now, end = self.trunk.module, cache.length, cache.length + 1
        assert end <= cache.valid.shape[1]
        visible = cache.valid[:, None, None, :end]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.key[i][:, :, now:end] = k
            cache.value[i][:, :, now:end] = v
            key, value = cache.key[i][:, :, :end], cache.value[i][:, :, :end]
            return trunk.attention[i](q, key, value, visible)

        x = self._embed(self._id(bins).unsqueeze(1))
        hidden = trunk.run(x, cache.position.unsqueeze(1), attend, None)[:, 0]
        cache.length, cache.position = end, cache.position + 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [.., bins] at temperature 1, column k for bin k.

        They are h·W of the action ids alone, equal to the logits of the whole vocabulary restricted
        to these ids.
        """
        last = self.config.vocab_size
        weight = self.language_model.lm_head.weight[last - self.config.action_bins : last]
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), weight.float()).flip(-1)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(ids)

    def _id(self, bins: Tensor) -> Tensor:
        return self.config.vocab_size - 1 - bins.long()


def _models(
    config: OpenVLAConfig, dtype: torch.dtype, device: torch.device | str
) -> tuple[Any, Any, Any]:
    """Return transformers' DINOv2, SigLIP and Llama."""
    transformers = import_transformers("OpenVLA")
    text = dict(config.text)
    for name in ("model_type", "torch_dtype", "dtype"):
        text.pop(name, None)

    def sizes(tower: TowerConfig) -> dict[str, Any]:
        # timm's SigLIP uses the exact GELU; the default of transformers is the tanh approximation.
        return {
            "hidden_size": tower.hidden_size,
            "num_hidden_layers": tower.layers,
            "num_attention_heads": tower.heads,
            "image_size": config.image_size,
            "patch_size": tower.patch_size,
            "layer_norm_eps": 1e-6,
            "hidden_act": "gelu",
        }

    with config_errors("text_config or vision_sizes: transformers refuses: ", kind=True):
        dino = transformers.Dinov2WithRegistersConfig(
            **sizes(config.dino),
            mlp_ratio=config.dino.intermediate_size // config.dino.hidden_size,
            num_register_tokens=config.registers,
        )
        siglip = transformers.SiglipVisionConfig(
            **sizes(config.siglip), intermediate_size=config.siglip.intermediate_size
        )
        llama = transformers.LlamaConfig(**text)
        options = {"dtype": dtype, "trust_remote_code": False}
        with torch.device(device):
            return (
                transformers.AutoModel.from_config(dino, **options),
                transformers.AutoModel.from_config(siglip, **options),
                transformers.AutoModelForCausalLM.from_config(llama, **options),
            )
