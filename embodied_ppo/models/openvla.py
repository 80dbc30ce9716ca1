"""OpenVLA and OpenVLA-OFT: two vision towers, a projector and Llama, whose last 256 words are bins of an action.

B rows, K cameras, P visual tokens (of all cameras), L tokens of a prompt, S = P + L all that comes before an action,
A action tokens (C·A of a chunk), D size of a hidden state. The weights and modules are transformers'
(Dinov2WithRegistersModel, SiglipVisionModel, LlamaForCausalLM), the forward pass is ours: no code of a checkpoint is
run (trust_remote_code, which ignores the picture under transformers 4.50 and later: openvla/openvla#346), no timm, no
torchvision.

What a row is (Kim et al. 2024, "OpenVLA"; arXiv 2406.09246), each line's tokens side by side::

    BOS | P visual tokens | prompt, ends with the empty word 29871 | action tokens                  causal
    BOS | P visual tokens | prompt, ends with the empty word 29871 | C·A zeros | end of sequence    sees everything

The second one is OpenVLA-OFT's parallel decoding (Kim et al. 2025; arXiv 2502.19645). In both, the hidden state
*before* an action token (or its placeholder) predicts it. Padding on the left of a prompt lies between picture and
words here: it is never seen and takes no position, so that this changes nothing.

Facts about the published layout are from openvla/openvla at c8f03f4 and moojink/openvla-oft at 213c5ff. No published
weights were at hand: everything is proven on synthetic checkpoints of the published layout, not on the published ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodied_ppo.errors import choose
from embodied_ppo.models.language import Aside, Attend, Decoder
from embodied_ppo.types import ConfigError

BOS, STOP, EMPTY = 1, 2, 29871
"""Llama 2's words: begin and end of sequence, and the empty one between "Out:" and the action."""
MEANS = (0.485, 0.456, 0.406, 0.5, 0.5, 0.5)
"""Of the six channels, three for each tower: ImageNet's for DINOv2, then SigLIP's; pixels lie in [0, 1]."""
DEVIATIONS = (0.229, 0.224, 0.225, 0.5, 0.5, 0.5)


# ------------------------------------------------------------------------------------------------------- configuration
@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """Sizes of a vision transformer."""

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    """Of the perceptron in a layer; DINOv2: a multiple of hidden_size."""
    patch_size: int = 14
    """Pixels."""


DINO = TowerConfig(hidden_size=1024, layers=24, heads=16, intermediate_size=4096)
"""timm's vit_large_patch14_reg4_dinov2."""
SIGLIP = TowerConfig(hidden_size=1152, layers=27, heads=16, intermediate_size=4304)
"""timm's vit_so400m_patch14_siglip_224 and _384."""
BACKBONES = {"dinosiglip-vit-so-224px": 224, "dinosiglip-vit-so-384px": 384}
"""vision_backbone_id -> side of the square image, pixels."""


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig:
    """Sizes of everything. Raises ConfigError where they do not fit."""

    text: Mapping[str, Any]
    """transformers' LlamaConfig's fields; what is missing is Llama 2 7B's, as for the published code."""
    dino: TowerConfig = DINO
    siglip: TowerConfig = SIGLIP
    vision_backbone_id: str = "dinosiglip-vit-so-224px"
    image_size: int = 224
    """Side of the square that images are resized to, pixels."""
    registers: int = 4
    """DINOv2's register tokens."""
    action_bins: int = 256
    """Ids of actions, the last ones of the vocabulary before its padding."""
    pad_to_multiple_of: int = 64
    """Ids at the end of text's vocab_size that are no words."""
    pad_token_id: int = 32000
    norm_stats: Mapping[str, Any] = field(default_factory=dict)
    """{dataset: {action: {q01, q99, mask}}}, see ``ActionTokens.of``."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that nothing here reads; ``save`` writes them back."""

    @property
    def vocab_size(self) -> int:
        """Without padding: 32000."""
        return int(self.text.get("vocab_size", 32000)) - self.pad_to_multiple_of

    @property
    def grid(self) -> int:
        """Patches along a side."""
        return self.image_size // self.dino.patch_size

    def __post_init__(self) -> None:
        for name, tower in (("dino", self.dino), ("siglip", self.siglip)):
            where = f"vision_sizes.{name}"
            for size, value in vars(tower).items():
                if type(value) is not int or value < 1:
                    raise ConfigError(f"{where}.{size}={value} must be a whole number, at least 1")
            if tower.hidden_size % tower.heads:
                raise ConfigError(
                    f"{where}.heads={tower.heads} must divide {where}.hidden_size={tower.hidden_size}; change either"
                )
            if tower.layers < 2:
                raise ConfigError(f"{where}.layers={tower.layers} must be at least 2: the second-to-last is read")
        if self.dino.intermediate_size % self.dino.hidden_size:
            raise ConfigError(
                f"vision_sizes.dino.intermediate_size={self.dino.intermediate_size} must be a multiple of "
                f"vision_sizes.dino.hidden_size={self.dino.hidden_size}, as DINOv2's are"
            )
        if self.image_size // self.siglip.patch_size != self.grid or not self.grid:
            raise ConfigError(
                f"image_size={self.image_size}: patches of {self.dino.patch_size} and {self.siglip.patch_size} pixels "
                "must give both towers the same number, at least 1; choose equal patch_size"
            )
        lowest = max(EMPTY + 1, self.action_bins + 3)
        if self.vocab_size < lowest:
            raise ConfigError(
                f"text_config.vocab_size={self.text.get('vocab_size', 32000)} less pad_to_multiple_of="
                f"{self.pad_to_multiple_of} leaves {self.vocab_size} words but must leave at least {lowest}: prompts "
                f"hold word {EMPTY}, actions are the last {self.action_bins}; Llama 2 has 32000"
            )
        if self.action_bins < 2:
            raise ConfigError(f"n_action_bins={self.action_bins} must be at least 2; published models have 256")
        if not 0 <= self.pad_token_id < self.vocab_size + self.pad_to_multiple_of:
            raise ConfigError(f"pad_token_id={self.pad_token_id} must be an id of text_config.vocab_size; use 32000")
        if self.text.get("tie_word_embeddings"):
            raise ConfigError("text_config.tie_word_embeddings=true: Llama 2 has a head of its own; set it to false")


def read_config(raw: Mapping[str, Any]) -> OpenVLAConfig:
    """From what is in a published config.json. Sizes other than the published ones are in our field ``vision_sizes``.

    Raises ConfigError.
    """
    left = dict(raw)
    backbone = left.pop("vision_backbone_id", None)
    if backbone not in BACKBONES:
        raise ConfigError(
            f"vision_backbone_id={backbone}: " + choose(str(backbone), list(BACKBONES), "read are DINOv2 with SigLIP: ")
        )
    if left.pop("use_fused_vision_backbone", True) is False:
        raise ConfigError("use_fused_vision_backbone=false: models of two towers are read; name one of OpenVLA's")
    strategy = left.pop("image_resize_strategy", "resize-naive")
    if strategy != "resize-naive":
        raise ConfigError(f"image_resize_strategy={strategy}: only resize-naive, OpenVLA's, is computed")
    text = dict(left.pop("text_config", None) or {})
    if text.get("model_type", "llama") != "llama":
        raise ConfigError(f"text_config.model_type={text['model_type']}: the language model must be llama")
    sizes = dict(left.pop("vision_sizes", None) or {})
    try:
        return OpenVLAConfig(
            vision_backbone_id=backbone,
            text=text,
            dino=TowerConfig(**sizes["dino"]) if "dino" in sizes else DINO,
            siglip=TowerConfig(**sizes["siglip"]) if "siglip" in sizes else SIGLIP,
            image_size=int(sizes.get("image_size", BACKBONES[backbone])),
            registers=int(sizes.get("registers", 4)),
            action_bins=int(left.pop("n_action_bins", 256)),
            pad_to_multiple_of=int(left.pop("pad_to_multiple_of", 64)),
            pad_token_id=int(left.pop("pad_token_id", 32000)),
            norm_stats=left.pop("norm_stats", None) or {},
            others=left,
        )
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a field has the wrong type or name ({error}); compare with openvla-7b's") from error


def write_config(config: OpenVLAConfig) -> dict[str, Any]:
    """config.json, as published."""
    written: dict[str, Any] = {"model_type": "openvla", "arch_specifier": "no-align+fused-gelu-mlp"}
    written |= dict(config.others) | {
        "vision_backbone_id": config.vision_backbone_id,
        "use_fused_vision_backbone": True,
        "image_resize_strategy": "resize-naive",
        "text_config": {"model_type": "llama"} | dict(config.text),
        "n_action_bins": config.action_bins,
        "pad_to_multiple_of": config.pad_to_multiple_of,
        "pad_token_id": config.pad_token_id,
        "norm_stats": config.norm_stats,
    }
    published = (DINO, SIGLIP, BACKBONES[config.vision_backbone_id], 4)
    if (config.dino, config.siglip, config.image_size, config.registers) != published:
        written["vision_sizes"] = {
            "dino": vars(config.dino),
            "siglip": vars(config.siglip),
            "image_size": config.image_size,
            "registers": config.registers,
        }
    return written


# ---------------------------------------------------------------------------------------------------- prompt and action
def prompt(instruction: str) -> str:
    """What the published models were trained with (lower case, too)."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


def encode_prompts(
    tokenize: Callable[[str], Sequence[int]],
    instructions: Iterable[str],
    *,
    pad: int = 32000,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor]:
    """int64 ids [B, L] and bool mask [B, L] of prompts, padded on the left: BOS, words, the empty word.

    ``tokenize``: Llama's, text -> ids beginning with BOS (``lambda text: tokenizer(text).input_ids``). Raises
    ConfigError where it gives no BOS.
    """
    rows = []
    for instruction in instructions:
        ids = list(tokenize(prompt(instruction)))
        if not ids or ids[0] != BOS or BOS in ids[1:]:
            raise ConfigError(
                f"tokenizer: {prompt(instruction)!r} gives {ids[:3]}.. but must begin with BOS = {BOS}, once; use the "
                "checkpoint's tokenizer.json, with special tokens"
            )
        rows.append(ids if ids[-1] == EMPTY else [*ids, EMPTY])
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows], device=device)
    return ids, mask


@dataclass(frozen=True)
class ActionTokens:
    """Actions, their bins and their ids, as OpenVLA counts them.

    n edges -1 = e_0 < .. < e_{n-1} = 1, evenly spaced, enclose n-1 intervals. Bin k in 0..n-1 holds e_k <= x < e_{k+1};
    its id is vocab_size - 1 - k (published: vocab_size less the number of edges not above x). Bin n-1 holds x = 1 alone
    and means the last interval's centre, as bin n-2 does. A bin's value is (e_k + e_{k+1}) / 2.

    Units: x in [-1, 1] is mask ? 2 (a - q01) / (q99 - q01 + 1e-8) - 1 : a of the environment's action a, each dimension
    by itself; back it is a = ½ (x + 1) (q99 - q01) + q01.
    """

    vocab_size: int
    """Without padding."""
    edges: Tensor
    """float64 [n]"""
    low: Tensor
    """float64 [A], q01 in the environment's units"""
    high: Tensor
    """float64 [A], q99"""
    mask: Tensor
    """bool [A]: dimensions that are normalised; the gripper's is usually not"""

    @classmethod
    def of(cls, config: OpenVLAConfig, unnorm_key: str | None = None) -> ActionTokens:
        """By the statistics of one of the datasets in ``norm_stats``; None: of the only one. Raises ConfigError."""
        names = sorted(config.norm_stats)
        if unnorm_key is None and len(names) == 1:
            unnorm_key = names[0]
        if unnorm_key is None or unnorm_key not in config.norm_stats:
            raise ConfigError(f"unnorm_key={unnorm_key}: " + choose(str(unnorm_key), names, "norm_stats has: "))
        where, stats = f"norm_stats.{unnorm_key}.action", config.norm_stats[unnorm_key].get("action", {})
        for name in ("q01", "q99"):
            if name not in stats:
                raise ConfigError(f"{where}: has no {name} but {sorted(stats)}; actions are scaled by q01 and q99")
        low, high = (torch.tensor(stats[name], dtype=torch.float64) for name in ("q01", "q99"))
        mask = torch.tensor(stats.get("mask", [True] * len(low)), dtype=torch.bool)
        if not low.shape == high.shape == mask.shape or low.ndim != 1:
            sizes = f"{tuple(low.shape)}, {tuple(high.shape)}, {tuple(mask.shape)}"
            raise ConfigError(f"{where}: q01, q99 and mask have shapes {sizes} but must be one list each, equally long")
        if bool((low > high).any()):
            raise ConfigError(
                f"{where}: q01 must not exceed q99 but does in dimension {int((low > high).int().argmax())}"
            )
        edges = torch.arange(config.action_bins, dtype=torch.float64) * (2 / (config.action_bins - 1)) - 1
        edges[-1] = 1.0
        return cls(config.vocab_size, edges, low, high, mask)

    def to(self, device: torch.device | str) -> ActionTokens:
        moved = {name: getattr(self, name).to(device) for name in ("edges", "low", "high", "mask")}
        return replace(self, **moved)

    @property
    def dim(self) -> int:
        """A."""
        return self.low.shape[0]

    def ids(self, bins: Tensor) -> Tensor:
        """int64 vocabulary ids of bins, any shape; and back."""
        return self.vocab_size - 1 - bins.long()

    def bins(self, action: Tensor) -> Tensor:
        """int64 [.., A] of the environment's actions [.., A]; what lies outside [q01, q99] (or [-1, 1]) is clipped."""
        a = action.double()
        x = torch.where(self.mask, 2 * (a - self.low) / (self.high - self.low + 1e-8) - 1, a)
        return torch.bucketize(x.clamp(-1, 1).contiguous(), self.edges, right=True) - 1

    def values(self, bins: Tensor) -> Tensor:
        """float64 in (-1, 1) of bins, any shape."""
        centers = (self.edges[:-1] + self.edges[1:]) / 2
        return centers[bins.long().clamp_max(len(centers) - 1)]

    def actions(self, bins: Tensor) -> Tensor:
        """float32 [.., A] in the environment's units of bins [.., A]."""
        x = self.values(bins)
        return torch.where(self.mask, 0.5 * (x + 1) * (self.high - self.low) + self.low, x).float()


# ---------------------------------------------------------------------------------------------------------------- body
class Projector(nn.Module):
    """Features of both towers -> visual tokens."""

    def __init__(self, features: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features, dtype=dtype, device=device)
        self.fc2 = nn.Linear(4 * features, hidden_size, dtype=dtype, device=device)
        self.fc3 = nn.Linear(hidden_size, hidden_size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[.., features] -> [.., D]."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class Trunk(Decoder):
    """Llama's layers on embeddings instead of ids."""

    def run(self, x: Tensor, position: Tensor, attend: Attend, place: Tensor | None) -> Tensor:
        """[B, S, D] at int64 positions [B, S] -> [B, R, D], normalised; ``place`` int64 [B, R], None: everywhere."""
        kinds = {kind: self._rotation(x, position, kind) for kind in dict.fromkeys(self.types)}
        last = len(self.layers) - 1
        for i, kind in enumerate(self.types):
            at = place if i == last else None
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(self._layer, i, x, *kinds[kind], attend, at, use_reentrant=False)
            else:
                x = self._layer(i, x, *kinds[kind], attend, at)
        return self.base.norm(x)

    def masked(self, seen: Tensor, place: Tensor | None) -> Attend:
        """``seen`` bool [B, 1, S or 1, S]: the keys each query sees; ``place`` int64 [R]: the last layer's queries."""
        few = seen if place is None or seen.shape[2] == 1 else seen[:, :, place]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.attention[i](q, k, v, few if i == len(self.attention) - 1 else seen)

        return attend


class Embedded(NamedTuple):
    """Embeddings and what is padding among them.

    x         [B, S, D]
    valid     bool [B, S]
    position  int64 [B, S]  0, 1, .. of what is valid, arbitrary elsewhere
    """

    x: Tensor
    valid: Tensor
    position: Tensor

    def plus(self, x: Tensor) -> Embedded:
        """Followed by [B, n, D] without padding."""
        more = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        valid = torch.cat((self.valid, more), dim=1)
        return Embedded(torch.cat((self.x, x.to(self.x.dtype)), dim=1), valid, valid.cumsum(1) - 1)

    def seen(self, causal: bool) -> Tensor:
        """bool [B, 1, S, S] or, where every query sees the same, [B, 1, 1, S]."""
        keys = self.valid[:, None, None]
        if not causal:
            return keys
        size = self.valid.shape[1]
        return keys & torch.ones(size, size, dtype=torch.bool, device=keys.device).tril()


@dataclass
class Cache:
    """Keys and values of what was read, with room for more. ``OpenVLABody.step`` writes into it.

    key, value  per layer [B, heads, S + room, d]
    valid       bool [B, S + room]
    position    int64 [B]  of the next token
    length      columns in use
    """

    key: list[Tensor]
    value: list[Tensor]
    valid: Tensor
    position: Tensor
    length: int


class OpenVLABody(nn.Module):
    """Pictures and prompt -> hidden states that predict action tokens, and their logits.

    Parameters that nothing reads are frozen but kept, as a checkpoint holds them: the towers' last layer and what
    follows it. ``train`` changes nothing: dropout would make log-probabilities noise.
    """

    def __init__(
        self, config: OpenVLAConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        """New weights; ``load`` reads a checkpoint's. Raises ConfigError where transformers is missing or refuses."""
        super().__init__()
        self.config = config
        models = _models(config, dtype, device)
        self.dino: Any = models[0]
        self.siglip: Any = models[1]
        self.language_model: Any = models[2]
        size = self.language_model.config.hidden_size
        features = config.dino.hidden_size + config.siglip.hidden_size
        self.projector = Projector(features, size, dtype=dtype, device=device)
        self.trunk = Aside(Trunk(self.language_model.model))
        # timm's DINOv2 masks nothing and adds no position to its class token
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
        """Keep no layer's inside for the backward pass but compute it again: less memory, a third more time."""
        return self.trunk.module.recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        self.trunk.module.recompute = value

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.trunk.module.hidden_size

    def train(self, mode: bool = True) -> OpenVLABody:
        """See the class."""
        return super().train(False)

    # -------------------------------------------------------------------------------------------------------- picture
    def pixels(self, images: Tensor) -> Tensor:
        """uint8 [N, 3, H, W] -> float32 [N, 6, image_size, image_size]: normalised for DINOv2, then for SigLIP.

        Resized as Pillow's cubic filter does, to a level: first the width, then the height, whole numbers between.
        """
        side, x = self.config.image_size, images.float()
        for size in ((x.shape[-2], side), (side, side)):
            if x.shape[-2:] != size:
                x = F.interpolate(x, size, mode="bicubic", antialias=True, align_corners=False).round().clamp(0, 255)
        channels = [(x[:, c % 3] / 255 - MEANS[c]) / DEVIATIONS[c] for c in range(6)]
        return torch.stack(channels, dim=1)

    def features(self, pixels: Tensor) -> Tensor:
        """float32 [N, 6, ..] -> [N, patches, D of both]: out of the second-to-last layers, not normalised."""
        return torch.cat((self._dino(pixels[:, :3]), self._siglip(pixels[:, 3:])), dim=-1)

    def _dino(self, pixels: Tensor) -> Tensor:
        e = self.dino.embeddings
        x = e.patch_embeddings(pixels) + e.position_embeddings[:, 1:]
        prefix = torch.cat((e.cls_token, e.register_tokens), dim=1).expand(len(x), -1, -1).to(x.dtype)
        x = self._layers(self.dino.encoder.layer[:-1], torch.cat((prefix, x), dim=1))
        return x[:, prefix.shape[1] :]

    def _siglip(self, pixels: Tensor) -> Tensor:
        e = self.siglip.embeddings
        x = e.patch_embedding(pixels.to(e.patch_embedding.weight.dtype)).flatten(2).transpose(1, 2)
        return self._layers(self.siglip.encoder.layers[:-1], x + e.position_embedding.weight)

    def _layers(self, layers: Iterable[Any], x: Tensor) -> Tensor:
        for layer in layers:
            again = self.recompute and torch.is_grad_enabled()
            x = checkpoint(layer, x, None, use_reentrant=False) if again else layer(x, None)
        return x

    def vision(self, images: Tensor) -> Tensor:
        """uint8 [B, 3, H, W], or [B, K, 3, H, W] of several cameras -> visual tokens [B, P, D], a camera's together."""
        cameras = images.shape[1] if images.ndim == 5 else 1
        x = self.projector(self.features(self.pixels(images.reshape(-1, *images.shape[-3:]))))
        return x.unflatten(0, (-1, cameras)).flatten(1, 2)

    # --------------------------------------------------------------------------------------------------------- hidden
    def inputs_embeds(self, images: Tensor, ids: Tensor, mask: Tensor) -> Embedded:
        """BOS, the visual tokens, the prompt's other tokens; S = P + L.

        ``images`` as for ``vision``; int64 ids [B, L] and bool mask [B, L] of ``encode_prompts``: each row's first
        token is BOS, its last one is in the last column.
        """
        mask = mask.bool()
        words = self._embed(ids)
        visual = self.vision(images).to(words.dtype)
        bos = self._embed(torch.full_like(ids[:, :1], BOS))
        first = mask & (mask.cumsum(1) == 1)
        valid = torch.ones(len(ids), 1 + visual.shape[1], dtype=torch.bool, device=ids.device)
        valid = torch.cat((valid, (mask & ~first)[:, 1:]), dim=1)
        return Embedded(torch.cat((bos, visual, words[:, 1:]), dim=1), valid, valid.cumsum(1) - 1)

    def hidden(
        self, images: Tensor, ids: Tensor, mask: Tensor, actions: Tensor | None = None, *, placeholders: int = 0
    ) -> Tensor:
        """Hidden states [B, A, D] before each action token; with gradient. One of these:

        ``actions`` int [B, A], bins: teacher forcing, each token sees what came before. (The last one's value is not
        read: [B, 1] gives what predicts the first one, of the prompt alone.)
        ``placeholders`` C·A: parallel decoding, every position sees all. One chunk's rows of A dimensions follow each
        other.
        """
        before = self.inputs_embeds(images, ids, mask)
        if actions is not None:
            assert placeholders == 0
            count = actions.shape[1]
            whole = before.plus(self._embed(self._id(actions[:, :-1])))
        else:
            assert placeholders > 0
            count = placeholders
            stop = self._embed(torch.full_like(ids[:, :1], STOP))
            whole = before.plus(F.pad(stop, (0, 0, placeholders, 0)))
        place = before.x.shape[1] - 1 + torch.arange(count, device=ids.device)
        attend = self.trunk.module.masked(whole.seen(causal=actions is not None), place)
        return self.trunk.module.run(whole.x, whole.position, attend, place.expand(len(ids), -1))

    @torch.no_grad()
    def prefill(self, images: Tensor, ids: Tensor, mask: Tensor, *, room: int) -> tuple[Tensor, Cache]:
        """Hidden states [B, D] before the first action token, and a cache for ``room`` tokens that may follow."""
        trunk, whole = self.trunk.module, self.inputs_embeds(images, ids, mask)
        size = whole.x.shape[1]
        place = torch.tensor([size - 1], device=ids.device)
        masked = trunk.masked(whole.seen(causal=True), place)
        position = whole.position[:, -1] + 1
        cache = Cache([], [], F.pad(whole.valid, (0, room), value=True), position, size)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.key.append(F.pad(k, (0, 0, 0, room)))
            cache.value.append(F.pad(v, (0, 0, 0, room)))
            return masked(i, q, k, v)

        return trunk.run(whole.x, whole.position, attend, place.expand(len(ids), -1))[:, 0], cache

    @torch.no_grad()
    def step(self, bins: Tensor, cache: Cache) -> Tensor:
        """After actions int [B]: hidden states [B, D] before the next ones."""
        trunk, now, end = self.trunk.module, cache.length, cache.length + 1
        assert end <= cache.valid.shape[1]
        seen = cache.valid[:, None, None, :end]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache.key[i][:, :, now:end] = k
            cache.value[i][:, :, now:end] = v
            return trunk.attention[i](q, cache.key[i][:, :, :end], cache.value[i][:, :, :end], seen)

        x = self._embed(self._id(bins).unsqueeze(1))
        hidden = trunk.run(x, cache.position.unsqueeze(1), attend, None)[:, 0]
        cache.length, cache.position = end, cache.position + 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[.., D] -> float32 [.., bins] at temperature 1, column k for bin k: h·W of the action ids alone.

        Equals the logits of the whole vocabulary with all but the actions' left out.
        """
        last = self.config.vocab_size
        weight = self.language_model.lm_head.weight[last - self.config.action_bins : last]
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), weight.float()).flip(-1)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.language_model.model.embed_tokens(ids)

    def _id(self, bins: Tensor) -> Tensor:
        return self.config.vocab_size - 1 - bins.long()


def _models(config: OpenVLAConfig, dtype: torch.dtype, device: torch.device | str) -> tuple[Any, Any, Any]:
    """transformers' DINOv2, SigLIP and Llama."""
    try:
        from transformers import (
            AutoModel,
            AutoModelForCausalLM,
            Dinov2WithRegistersConfig,
            LlamaConfig,
            SiglipVisionConfig,
        )
    except ImportError as error:
        raise ConfigError(f"OpenVLA needs transformers ({error}): pip install 'embodied-ppo[vla]'") from error
    dino, siglip = config.dino, config.siglip
    text = {name: value for name, value in config.text.items() if name not in ("model_type", "torch_dtype", "dtype")}
    try:
        configs: list[Any] = [
            Dinov2WithRegistersConfig(
                hidden_size=dino.hidden_size,
                num_hidden_layers=dino.layers,
                num_attention_heads=dino.heads,
                mlp_ratio=dino.intermediate_size // dino.hidden_size,
                image_size=config.image_size,
                patch_size=dino.patch_size,
                num_register_tokens=config.registers,
                layer_norm_eps=1e-6,
                hidden_act="gelu",
            ),
            # timm's SigLIP has the exact GELU, transformers' its approximation by tanh
            SiglipVisionConfig(
                hidden_size=siglip.hidden_size,
                num_hidden_layers=siglip.layers,
                num_attention_heads=siglip.heads,
                intermediate_size=siglip.intermediate_size,
                image_size=config.image_size,
                patch_size=siglip.patch_size,
                layer_norm_eps=1e-6,
                hidden_act="gelu",
            ),
            LlamaConfig(**text),
        ]
        with torch.device(device):
            towers = [AutoModel.from_config(c, dtype=dtype, trust_remote_code=False) for c in configs[:2]]
            llama = AutoModelForCausalLM.from_config(configs[2], dtype=dtype, trust_remote_code=False)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a configuration's nonsense surfaces as anything
        raise ConfigError(f"text_config or vision_sizes: transformers refuses: {_line(error)}") from error
    return towers[0], towers[1], llama


# ---------------------------------------------------------------------------------------------------------- checkpoint
class Part(NamedTuple):
    """A region of one of our parameters: ``length`` from ``start`` along ``dim``; length -1: to its end."""

    name: str
    dim: int = 0
    start: int = 0
    length: int = -1

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        whole = parameters[self.name]
        length = whole.shape[self.dim] - self.start if self.length < 0 else self.length
        return whole.detach().narrow(self.dim, self.start, length)


def layout(config: OpenVLAConfig) -> dict[str, tuple[Part, ...]]:
    """Published key -> parts of our parameters, which follow each other along dimension 0.

    The language model's keys are not among them: they are ours.
    """
    found: dict[str, tuple[Part, ...]] = {}

    def both(key: str, *names: str) -> None:
        """Weight and bias."""
        for end in ("weight", "bias"):
            found[f"{key}.{end}"] = tuple(Part(f"{name}.{end}") for name in names)

    for i in (1, 2, 3):
        both(f"projector.fc{i}", f"projector.fc{i}")

    key, ours = "vision_backbone.featurizer", "dino"
    found[f"{key}.cls_token"] = (Part(f"{ours}.embeddings.cls_token"),)
    found[f"{key}.reg_token"] = (Part(f"{ours}.embeddings.register_tokens"),)
    found[f"{key}.pos_embed"] = (Part(f"{ours}.embeddings.position_embeddings", 1, 1),)
    both(f"{key}.patch_embed.proj", f"{ours}.embeddings.patch_embeddings.projection")
    both(f"{key}.norm", f"{ours}.layernorm")
    for i in range(config.dino.layers):
        block, layer = f"{key}.blocks.{i}", f"{ours}.encoder.layer.{i}"
        for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
            both(f"{block}.{name}", f"{layer}.{name}")
        both(f"{block}.attn.qkv", *(f"{layer}.attention.{x}_proj" for x in "qkv"))
        both(f"{block}.attn.proj", f"{layer}.attention.o_proj")
        for j in (1, 2):
            found[f"{block}.ls{j}.scale_factor"] = (Part(f"{layer}.layer_scale{j}.lambda1"),)

    key, ours = "vision_backbone.fused_featurizer", "siglip"
    found[f"{key}.pos_embed"] = (Part(f"{ours}.embeddings.position_embedding.weight"),)
    both(f"{key}.patch_embed.proj", f"{ours}.embeddings.patch_embedding")
    both(f"{key}.norm", f"{ours}.post_layernorm")
    for i in range(config.siglip.layers):
        block, layer = f"{key}.blocks.{i}", f"{ours}.encoder.layers.{i}"
        for j in (1, 2):
            both(f"{block}.norm{j}", f"{layer}.layer_norm{j}")
            both(f"{block}.mlp.fc{j}", f"{layer}.mlp.fc{j}")
        both(f"{block}.attn.qkv", *(f"{layer}.self_attn.{x}_proj" for x in "qkv"))
        both(f"{block}.attn.proj", f"{layer}.self_attn.out_proj")
    pool, head, size = f"{key}.attn_pool", f"{ours}.head", config.siglip.hidden_size
    found[f"{pool}.latent"] = (Part(f"{head}.probe"),)
    for end in ("weight", "bias"):
        found[f"{pool}.q.{end}"] = (Part(f"{head}.attention.in_proj_{end}", 0, 0, size),)
        found[f"{pool}.kv.{end}"] = (Part(f"{head}.attention.in_proj_{end}", 0, size),)
    both(f"{pool}.proj", f"{head}.attention.out_proj")
    both(f"{pool}.norm", f"{head}.layernorm")
    for j in (1, 2):
        both(f"{pool}.mlp.fc{j}", f"{head}.mlp.fc{j}")
    return found


@dataclass(frozen=True)
class Entry:
    """A published tensor: its shape, and what it is made of here (memory shared with our parameters)."""

    shape: tuple[int, ...]
    parts: tuple[Tensor, ...]

    def read(self, tensor: Tensor) -> None:
        """Copy into our parameters; type and device become theirs."""
        rows = tensor.reshape(-1, *self.parts[0].shape[1:]).split([len(part) for part in self.parts])
        for part, row in zip(self.parts, rows):
            part.copy_(row)

    def write(self) -> Tensor:
        """As published; shares memory with a parameter where it is one."""
        whole = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
        return whole.reshape(self.shape)


def entries(body: OpenVLABody) -> dict[str, Entry]:
    """Published key -> what is behind it, for every parameter of ``body`` once."""
    parameters = dict(body.named_parameters())
    named = layout(body.config)
    named |= {name: (Part(name),) for name in parameters if name.startswith("language_model.")}
    missing = set(parameters) - {part.name for parts in named.values() for part in parts}
    assert not missing, f"transformers has parameters that no published key fills: {sorted(missing)}"
    found = {}
    for key, parts in named.items():
        tensors = tuple(part.of(parameters) for part in parts)
        shape = (sum(len(x) for x in tensors), *tensors[0].shape[1:])
        if key.endswith("fused_featurizer.pos_embed"):
            shape = (1, *shape)
        found[key] = Entry(shape, tensors)
    return found


def load(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    what: str = "model",
) -> OpenVLABody:
    """From a directory of the published layout: config.json, and model.safetensors or its shards with their index.

    Every key is used exactly once. Where dataset_statistics.json is there (fine-tuned models), its statistics go before
    config.json's. ``what``: the options' section, for messages. Raises ConfigError.
    """
    folder, where = Path(path), f"{what}.path={path}"
    try:
        from safetensors import SafetensorError
        from transformers.initialization import no_init_weights
    except ImportError as error:
        raise ConfigError(f"OpenVLA needs transformers ({error}): pip install 'embodied-ppo[vla]'") from error
    raw = _json(folder / "config.json", where)
    statistics = folder / "dataset_statistics.json"
    if statistics.is_file():
        raw["norm_stats"] = (raw.get("norm_stats") or {}) | _json(statistics, where)
    heads = sorted(file.name for file in folder.glob("*--*checkpoint.pt"))
    if heads:
        raise ConfigError(
            f"{where}: holds {heads[0]}: a head or projector beside the model (regression, diffusion, proprioception, "
            "FiLM) that is not computed; name a checkpoint with action tokens alone"
        )
    files = _weights(folder, where)
    try:
        config = read_config(raw)
        with no_init_weights():
            body = OpenVLABody(config, dtype=dtype, device=device)
        expected = entries(body)
        found = _check(files, expected)
        _copy(found, expected)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{where}: weights cannot be read ({_line(error)}); download them again") from error
    return body


def save(body: OpenVLABody, path: str | Path) -> None:
    """The published layout, which ``load`` reads: config.json and model.safetensors, in the body's type.

    Each is written to another name first. The tokenizer's files are the checkpoint's and are not written.
    """
    from safetensors.torch import save_file

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, entry in entries(body).items():
        tensor = entry.write()
        alone = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        tensors[key] = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
    part = folder / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    part = folder / "config.json.part"
    part.write_text(json.dumps(write_config(body.config), indent=2) + "\n")
    os.replace(part, folder / "config.json")


def _json(file: Path, where: str) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(
            f"{where}: holds no {file.name}; name the directory of an OpenVLA checkpoint "
            "(hf download openvla/openvla-7b --local-dir DIR)"
        )
    try:
        value = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise ConfigError(f"{where}: {file.name} cannot be read ({_line(error)}); download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {file.name} must hold one JSON object; download it again")
    return value


def _weights(folder: Path, where: str) -> list[Path]:
    """The files that hold weights."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / "model.safetensors.index.json").is_file():
        raise ConfigError(
            f"{where}: holds neither model.safetensors nor model.safetensors.index.json; other formats (.bin, .pt) "
            "can run code when they are read: convert them to safetensors first"
        )
    names = _json(folder / "model.safetensors.index.json", where).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{where}: model.safetensors.index.json has no weight_map; download it again")
    files = [folder / str(name) for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{where}: {file.name} is in model.safetensors.index.json but missing; download it")
    return files


def _check(files: Sequence[Path], expected: Mapping[str, Entry]) -> dict[str, tuple[Path, str]]:
    """Key -> file and its name there, if the files hold exactly what is expected. Raises ConfigError."""
    from safetensors import safe_open

    found: dict[str, tuple[Path, str]] = {}
    wrong, twice, quantised = [], [], []
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
                key = name[: -len("gamma")] + "scale_factor" if name.endswith((".ls1.gamma", ".ls2.gamma")) else name
                if key in found:
                    twice.append(name)
                found[key] = file, name
                view = tensors.get_slice(name)
                shape = tuple(view.get_shape())
                if key in expected and shape != expected[key].shape:
                    wrong.append(f"{name} {list(shape)} instead of {list(expected[key].shape)}")
                if key in expected and view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                    quantised.append(f"{name} {view.get_dtype()}")
    problems = {
        "missing": [key for key in expected if key not in found],
        "unexpected": [found[key][1] for key in found if key not in expected],
        "of another shape": wrong,
        "twice": twice,
        "not of a floating type (quantised?)": quantised,
    }
    text = "; ".join(f"{len(keys)} {how}: {_some(keys)}" for how, keys in problems.items() if keys)
    if text:
        raise ConfigError(
            f"the weights are not those of the model that config.json describes: {text}. Are vision_backbone_id and "
            "text_config those that the weights were written with? (LoRA adapters must be merged first)"
        )
    return found


@torch.no_grad()
def _copy(found: Mapping[str, tuple[Path, str]], expected: Mapping[str, Entry]) -> None:
    from safetensors import safe_open

    for file in dict.fromkeys(file for file, _ in found.values()):
        with safe_open(file, framework="pt") as tensors:
            for key, (holder, name) in found.items():
                if holder == file:
                    expected[key].read(tensors.get_tensor(name))


def _some(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (", .." if len(keys) > 3 else "")


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
