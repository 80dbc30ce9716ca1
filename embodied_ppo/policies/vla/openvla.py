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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodied_envs.base.errors import ConfigError
from embodied_ppo.policies.backbone import InferenceModule
from embodied_ppo.policies.checkpoint_files import config_errors, import_transformers, pad_left
from embodied_ppo.policies.decoder import Attend, Decoder, ModuleReference
from embodied_ppo.policies.vla.published_weights import TABLES

# Llama 2's ids of begin and end of sequence, and of the empty word before the action.
BOS, STOP, EMPTY = 1, 2, 29871
# Means of six channels in [0, 1]: ImageNet's for DINOv2, then SigLIP's.
MEANS = (0.485, 0.456, 0.406, 0.5, 0.5, 0.5)
STDS = (0.229, 0.224, 0.225, 0.5, 0.5, 0.5)
CROPPED_AREA = 0.9  # share of an image's area that remains after ``center_crop``


# ------------------------------------------------------------------------------------ configuration
# Fields of transformers' Dinov2WithRegistersConfig for timm's vit_large_patch14_reg4_dinov2.
DINO: dict[str, Any] = TABLES["openvla"]["dino"]
# Fields of SiglipVisionConfig for timm's vit_so400m_patch14_siglip_224 and _384.
SIGLIP: dict[str, Any] = TABLES["openvla"]["siglip"]


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig:
    """Sizes of all parts.

    Raises:
        ConfigError: The sizes are not those of OpenVLA.
    """

    # Fields of LlamaConfig; missing ones are those of Llama 2 7B, as in the published code.
    text: Mapping[str, Any]
    # Fields of Dinov2WithRegistersConfig.
    dino: Mapping[str, Any] = field(default_factory=lambda: DINO)
    # Fields of SiglipVisionConfig.
    siglip: Mapping[str, Any] = field(default_factory=lambda: SIGLIP)
    # Side of the square that images are resized to, in pixels.
    image_size: int = 224
    # Number of action ids, the last ones of the vocabulary before its padding.
    action_bins: int = 256
    # Number of ids at the end of text's vocab_size that are padding.
    pad_to_multiple_of: int = 64
    pad_token_id: int = 32000
    # Means of the six channels; those of preprocessor_config.json where it exists.
    means: tuple[float, ...] = MEANS
    # Standard deviations of the six channels, likewise.
    stds: tuple[float, ...] = STDS
    # {dataset: {action: {q01, q99, mask}}}, see ``ActionTokens.from_config``.
    norm_stats: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Vocabulary size without padding: 32000."""
        return int(self.text.get("vocab_size", 32000)) - self.pad_to_multiple_of

    @property
    def grid(self) -> int:
        """Patches along a side of the image."""
        return self.image_size // self.dino["patch_size"]

    def __post_init__(self) -> None:
        lowest = max(EMPTY + 1, self.action_bins + 3)
        if self.vocab_size < lowest or self.action_bins < 2:
            raise ConfigError(
                f"text_config.vocab_size={self.text.get('vocab_size', 32000)} less"
                f" pad_to_multiple_of={self.pad_to_multiple_of} leaves {self.vocab_size} words for"
                f" n_action_bins={self.action_bins}, but must leave at least {lowest}, and the bins"
                f" must be at least 2; Llama 2 has 32000, and published models 256 bins"
            )


# --------------------------------------------------------------------------------------------- body
def resize(images: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Resize float32 [N, 3, H, W] to ``size`` (height, width), rounded to whole levels 0 to 255."""
    if images.shape[-2:] == size:
        return images
    x = F.interpolate(images, size, mode=mode, antialias=True, align_corners=False)
    return x.round().clamp(0, 255)


class Projector(nn.Module):
    """Maps the features of both towers to visual tokens."""

    def __init__(self, features: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features, dtype=dtype)
        self.fc2 = nn.Linear(4 * features, hidden_size, dtype=dtype)
        self.fc3 = nn.Linear(hidden_size, hidden_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Project [.., features] to [.., D]."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class LlamaTrunk(Decoder):
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
        valid = F.pad(self.valid, (0, x.shape[1]), value=True)
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
    """Towers, projector and Llama.

    Attributes:
        center_crop: Whether images are cropped, see the function of this name.

    Parameters that the forward pass does not use are frozen but kept, because a checkpoint contains
    them: the towers' last layer and what follows it.
    """

    def __init__(self, config: OpenVLAConfig, *, dtype: torch.dtype = torch.float32) -> None:
        """Build the networks with new weights; ``openvla_files.load`` reads those of a checkpoint.

        Raises:
            ConfigError: transformers is missing or refuses the configuration.
        """
        super().__init__()
        self.config = config
        self.center_crop = self.recompute = False
        self.dino, self.siglip, self.language_model = _models(config, dtype)
        size = self.language_model.config.hidden_size
        features = config.dino["hidden_size"] + config.siglip["hidden_size"]
        self.projector = Projector(features, size, dtype=dtype)
        # timm's DINOv2 has no mask token and adds no position to its class token.
        self.dino.embeddings.mask_token = None
        with torch.no_grad():
            self.dino.embeddings.position_embeddings[:, 0] = 0
        unread = [self.dino.encoder.layer[-1], self.dino.layernorm]
        unread += [self.siglip.encoder.layers[-1], self.siglip.post_layernorm, self.siglip.head]
        for module in unread:
            module.requires_grad_(False)
        self.eval()

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
        moments = enumerate(zip(self.config.means, self.config.stds, strict=True))
        channels = [(x[:, c % 3] / 255 - mean) / std for c, (mean, std) in moments]
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


class Prompts(nn.Module):
    """Tokenised prompts of S sentences, padded on the left.

    The tensors are buffers, which move with the policy, but are not part of a checkpoint.

    Attributes:
        ids: int64 [S, L].
        mask: bool [S, L], not padding.
    """

    def __init__(self, ids: Tensor, mask: Tensor) -> None:
        super().__init__()
        self.ids = nn.Buffer(ids, persistent=False)
        self.mask = nn.Buffer(mask, persistent=False)


class OpenVLA(InferenceModule):
    """Maps images and prompts to hidden states that predict action tokens, and to their logits."""

    def __init__(
        self, body: OpenVLABody, tokenize: Any, *, actions: int, stop_token: bool = True
    ) -> None:
        """Wrap the networks.

        Args:
            body: OpenVLA's networks.
            tokenize: Text to ids, see ``encode_prompts``.
            actions: Number of action tokens, C·A.
            stop_token: Whether the end of sequence follows the placeholders of parallel decoding.
                It does in OpenVLA-OFT, and does not in RLinf's variant.
        """
        super().__init__()
        self.body, self.tokenize, self.actions = body, tokenize, actions
        self.stop_token = stop_token
        self.trunk = ModuleReference(LlamaTrunk(body.language_model.model))
        self.hidden_size = int(body.language_model.config.hidden_size)

    @property
    def language(self) -> Any:
        """Language model, whose linear layers get adapters."""
        return self.body.language_model.model

    def vision_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of both towers and the projector."""
        parts = nn.ModuleList((self.body.dino, self.body.siglip, self.body.projector))
        return [*parts.parameters()]

    def prompts(self, sentences: Sequence[str]) -> Prompts:
        """Return the tokenised prompts of sentences."""
        ids, mask = encode_prompts(self.tokenize, sentences, pad=self.body.config.pad_token_id)
        return Prompts(ids, mask)

    def encode_images(self, images: Tensor) -> dict[str, Tensor]:
        """Return the visual tokens of images uint8 [B, K, 3, H, W]."""
        return {"/visual": self.body.vision(images)}

    def embed_prompt(
        self, image_features: dict[str, Tensor], ids: Tensor, mask: Tensor
    ) -> Embedded:
        """Concatenate BOS, the visual tokens and the other tokens of the prompt; S = P + L.

        Args:
            image_features: Result of ``encode_images``.
            ids: int64 [B, L] of ``encode_prompts``: the first token of a row is BOS, the last one
                is in the last column.
            mask: bool [B, L], not padding.
        """
        visual, words = image_features["/visual"], self._embed(ids)
        bos = self._embed(torch.full_like(ids[:, :1], BOS))
        first = mask & (mask.cumsum(1) == 1)
        valid = F.pad((mask & ~first)[:, 1:], (1 + visual.shape[1], 0), value=True)
        x = torch.cat((bos, visual.to(words.dtype), words[:, 1:]), dim=1)
        return Embedded(x, valid, valid.cumsum(1) - 1)

    def hidden(self, context: Embedded, bins: Tensor | None) -> Tensor:
        """Return the hidden states [B, A, D] before each action token, with gradient.

        Args:
            context: Image and prompt.
            bins: int [B, A], for teacher forcing: each token attends to those before it. The value
                of the last one is not used. None: parallel decoding, where every position attends
                to all. The dimensions of an action are neighbours.
        """
        rows, device = len(context.x), context.x.device
        if bins is not None:
            count = bins.shape[1]
            sequence = context.append(self._embed(self._id(bins[:, :-1])))
        else:
            count = self.actions
            stop = self._embed(torch.full((rows, int(self.stop_token)), STOP, device=device))
            sequence = context.append(F.pad(stop, (0, 0, count, 0)))
        place = context.x.shape[1] - 1 + torch.arange(count, device=device)
        attend = self.trunk.module.masked(sequence.visible_keys(causal=bins is not None), place)
        return self.trunk.module.run(sequence.x, sequence.position, attend, place.expand(rows, -1))

    @torch.no_grad()
    def start(self, context: Embedded) -> tuple[Tensor, Cache]:
        """Return the hidden states [B, D] before the first action token, and the state of
        ``next``.
        """
        trunk, size, room = self.trunk.module, context.x.shape[1], self.actions - 1
        place = torch.full((1,), size - 1, device=context.x.device)
        masked = trunk.masked(context.visible_keys(causal=True), place)
        position = context.position[:, -1] + 1
        cache = Cache([], [], F.pad(context.valid, (0, room), value=True), position, size)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.key.append(F.pad(k, (0, 0, 0, room)))
            cache.value.append(F.pad(v, (0, 0, 0, room)))
            return masked(i, q, k, v)

        places = place.expand(len(context.x), -1)
        return trunk.run(context.x, context.position, attend, places)[:, 0], cache

    @torch.no_grad()
    def next(self, bins: Tensor, state: Cache) -> Tensor:
        """Append ``bins`` int [B] and return the hidden states [B, D] before the next token."""
        trunk, now, end = self.trunk.module, state.length, state.length + 1
        assert end <= state.valid.shape[1]
        visible = state.valid[:, None, None, :end]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            state.key[i][:, :, now:end] = k
            state.value[i][:, :, now:end] = v
            key, value = state.key[i][:, :, :end], state.value[i][:, :, :end]
            return trunk.attention[i](q, key, value, visible)

        x = self._embed(self._id(bins).unsqueeze(1))
        hidden = trunk.run(x, state.position.unsqueeze(1), attend, None)[:, 0]
        state.length, state.position = end, state.position + 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [.., bins] at temperature 1, column k for bin k.

        They are h·W of the action ids alone, equal to the logits of the whole vocabulary restricted
        to these ids.
        """
        config, head = self.body.config, self.body.language_model.lm_head
        weight = head.weight[config.vocab_size - config.action_bins : config.vocab_size]
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), weight.float()).flip(-1)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.body.language_model.model.embed_tokens(ids)

    def _id(self, bins: Tensor) -> Tensor:
        return self.body.config.vocab_size - 1 - bins.long()


# ------------------------------------------------------------------------------------------- prompt
def prompt(instruction: str) -> str:
    """Return the prompt that the published models were trained with, in lower case."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def encode_prompts(
    tokenize: Callable[[str], Sequence[int]], instructions: Iterable[str], *, pad: int = 32000
) -> tuple[Tensor, Tensor]:
    """Tokenise prompts, padded on the left: BOS, words, the empty word.

    Args:
        tokenize: Llama's tokenizer, text -> ids that begin with BOS (``lambda text:
            tokenizer(text).input_ids``).
        instructions: Sentences.
        pad: Id of padding.

    Returns:
        int64 ids [B, L] and bool mask [B, L].

    Raises:
        ConfigError: The tokenizer adds no BOS.
    """
    rows = []
    for instruction in instructions:
        ids = list(tokenize(prompt(instruction)))
        if not ids or ids[0] != BOS or BOS in ids[1:]:
            raise ConfigError(
                f"tokenizer: {prompt(instruction)!r} gives {ids[:3]}.. but must begin with BOS ="
                f" {BOS}, once; use the checkpoint's tokenizer.json, with special tokens"
            )
        rows.append(ids if ids[-1] == EMPTY else [*ids, EMPTY])
    return pad_left(rows, pad)


def _models(config: OpenVLAConfig, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Return transformers' DINOv2, SigLIP and Llama."""
    transformers = import_transformers("OpenVLA")
    text = dict(config.text)
    for name in ("model_type", "torch_dtype", "dtype"):
        text.pop(name, None)

    # timm's SigLIP uses the exact GELU; the default of transformers is the tanh approximation.
    tower = {"image_size": config.image_size, "layer_norm_eps": 1e-6, "hidden_act": "gelu"}
    with config_errors("text_config or vision_sizes: transformers refuses: ", kind=True):
        dino = transformers.Dinov2WithRegistersConfig(**tower | dict(config.dino))
        siglip = transformers.SiglipVisionConfig(**tower | dict(config.siglip))
        llama = transformers.LlamaConfig(**text)
        options = {"dtype": dtype, "trust_remote_code": False}
        towers = [transformers.AutoModel.from_config(x, **options) for x in (dino, siglip)]
        return *towers, transformers.AutoModelForCausalLM.from_config(llama, **options)
