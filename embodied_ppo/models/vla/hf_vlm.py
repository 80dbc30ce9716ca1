"""Vision-language models of transformers as policies over action tokens.

The last K words of their vocabulary are bins of an action. B rows, N images of all rows, K bins, P
visual tokens of a row (of all cameras), L tokens of a prompt including its P image tokens, A action
tokens (C·A of a chunk), D size of a hidden state, M axes of a position (3 in Qwen's models, else
1).

Weights and modules are those of transformers. The prompt follows the model's own chat template,
with the instruction as the user's message and as many image tokens as the vision tower returns
visual tokens. The forward pass between the modules is implemented here, so that tokens can be
decoded in parallel and only K logits are computed; ``VisionLanguage.from_directory`` compares it
with that of transformers. Images are resized and normalised here by the numbers of
preprocessor_config.json, because the processors of transformers need torchvision and process one
image at a time. An image is never cut: models that cut large images into tiles (SmolVLM) get a
single tile.

These models have no action tokens. Bin k of K equal intervals of [-1, 1] is the k-th word from the
end of the vocabulary that no prompt uses (the order of OpenVLA). Its rows of the embedding and of
the head are copied at the start and become parameters of their own, so that adapters can be trained
while the vocabulary stays frozen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.backbone import InferenceModule
from embodied_ppo.models.causal_lm import ModuleReference
from embodied_ppo.models.checkpoint_files import (
    LOCAL,
    LOCAL_WEIGHTS,
    check_finite,
    config_errors,
    forward_mismatch,
    import_transformers,
    pad_left,
    read_json,
    relative_difference,
)

CURE = (
    "name one that transformers wrote (hf download HuggingFaceTB/SmolVLM-256M-Instruct --local-dir"
    " DIR)"
)
REQUEST = "What action should the robot take to {}?"
"""Message of the user, in the words of OpenVLA."""
IMAGE_DELIMITERS = {
    "idefics3": ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
    "smolvlm": ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
}
"""model_type -> words before and after the image tokens of an image that is not tiled."""
PREFIX_LM = ("paligemma",)
"""Models whose prompt tokens attend to the complete prompt."""
PATCH_INPUT = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Models whose input is patches instead of images."""


@dataclass(frozen=True)
class ImageProcessor:
    """Resizes and normalises images for a vision tower.

    Attributes:
        height: Target height in pixels.
        width: Target width in pixels.
        mean: Mean of each channel; pixels are in [0, 1].
        std: Standard deviation of each channel.
        mode: Interpolation.
    """

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mode: str = "bicubic"

    def __call__(self, images: Tensor) -> Tensor:
        """Process uint8 [N, 3, H, W] to float32 [N, 3, height, width]."""
        x = resize(images.float(), (self.height, self.width), self.mode) / 255
        channels = zip(x.unbind(1), self.mean, self.std, strict=True)
        return torch.stack([(c - mean) / std for c, mean, std in channels], dim=1)


def resize(images: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """Resize float32 [N, 3, H, W] to ``size`` (height, width), rounded to whole levels 0 to 255."""
    if images.shape[-2:] == size:
        return images
    x = F.interpolate(images, size, mode=mode, antialias=True, align_corners=False)
    return x.round().clamp(0, 255)


class Prompts(nn.Module):
    """Tokenised prompts of S sentences, padded on the left.

    The tensors are buffers, which move with the policy, but are not part of a checkpoint.

    Attributes:
        ids: int64 [S, L].
        mask: bool [S, L], not padding.
        position: int64 [S, M, L], arbitrary in padding.
    """

    ids: Tensor
    mask: Tensor
    position: Tensor

    def __init__(self, ids: Tensor, mask: Tensor, position: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("mask", mask, persistent=False)
        self.register_buffer("position", position, persistent=False)


@dataclass(frozen=True)
class Prefix:
    """Embeddings of everything before the actions.

    Attributes:
        x: [B, L, D], visual tokens included.
        valid: bool [B, L], not padding.
        position: int64 [B, M, L].
        visual: bool [B, L], places of the visual tokens.
        deep: [B·P, D] for some layers, added to the visual tokens there.
    """

    x: Tensor
    valid: Tensor
    position: Tensor
    visual: Tensor
    deep: list[Tensor]


@dataclass
class DecodingState:
    """State of decoding one token after another.

    Attributes:
        cache: Cache of transformers.
        valid: bool [B, L + i], keys that are not padding.
        position: [B, M], of the next token.
    """

    cache: Any
    valid: Tensor
    position: Tensor


class VisionLanguage(InferenceModule):
    """Maps images and prompts to hidden states that predict action tokens, and to their logits."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        image_processor: ImageProcessor,
        *,
        cameras: int,
        actions: int | None,
        bins: int,
    ) -> None:
        """Wrap a model of transformers.

        Args:
            model: The model with its head.
            tokenizer: Its tokenizer, with a chat template if the model has one.
            image_processor: Resizes and normalises images.
            cameras: Images of an observation.
            actions: Number of tokens decoded in parallel, C·A. None: one after another.
            bins: K.

        Raises:
            ConfigError: The model's structure is not supported.
        """
        super().__init__()
        self.model: Any = model
        self.tokenizer, self.image_processor = tokenizer, image_processor
        self.cameras, self.bins = cameras, bins
        self.kind = str(self.model.config.model_type)
        self.image_id: int = getattr(self.model.config, "image_token_id", None) or -1
        if self.image_id < 0 or not hasattr(self.core, "get_image_features"):
            raise ConfigError(
                f"model_type={self.kind}: it has no image tokens; name a vision-language model"
            )
        embed = self.language.get_input_embeddings()
        self.hidden_size = int(embed.weight.shape[1])
        self.recompute = False
        """Whether activations are recomputed in the backward pass."""
        reserved = self.reserved_ids()
        head: Any = self.model.lm_head
        vocabulary = min(len(embed.weight), len(head.weight))
        words = [i for i in range(vocabulary - 1, -1, -1) if i not in reserved][:bins]
        if len(words) < bins:
            raise ConfigError(
                f"model.bins={bins}: the vocabulary has only {len(words)} words that no prompt uses"
            )
        self.word_ids: Tensor
        """int64 [K], id of the word of each bin."""
        self.register_buffer("word_ids", torch.tensor(words), persistent=False)
        self.tied = embed.weight is head.weight
        self.head = nn.Parameter(head.weight.detach()[words].clone())
        self.embed = self.query = None
        if actions is not None:
            query = torch.zeros(actions, self.hidden_size, dtype=embed.weight.dtype)
            self.query = nn.Parameter(query)
            """Inputs of the tokens that are decoded in parallel; 0 at the start, as in OpenVLA-OFT.
            """
        elif not self.tied:
            self.embed = nn.Parameter(embed.weight.detach()[words].clone())
        self.bias: Tensor | None
        bias = getattr(head, "bias", None)
        self.register_buffer(
            "bias", None if bias is None else bias.detach()[words].float(), persistent=False
        )
        self.vocabulary = ModuleReference(head)
        """Head of the complete vocabulary, used by ``write`` only."""
        for layer in self.language.layers:
            layer.gradient_checkpointing = False
        self.eval()
        self.patches: tuple[int, int] | None = None
        """Patches of an image along height and width, in models whose input is patches."""
        self.grid: Tensor | None
        """int64 [1, 3]: patches of an image along time, height and width."""
        grid = None
        if self.kind in PATCH_INPUT:
            patch = self.model.config.vision_config.patch_size
            self.patches = (image_processor.height // patch, image_processor.width // patch)
            grid = torch.tensor([[1, *self.patches]])
        self.register_buffer("grid", grid, persistent=False)
        with torch.no_grad():
            shape = (1, 1, 3, image_processor.height, image_processor.width)
            image = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            self.visual_tokens = self.encode_images(image)["/visual"].shape[1]
            """Visual tokens of one image."""

    @property
    def core(self) -> Any:
        """The model without its head."""
        return self.model.model

    @property
    def language(self) -> Any:
        """The language model, which gets adapters."""
        return (
            self.core.text_model if hasattr(self.core, "text_model") else self.core.language_model
        )

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.word_ids.device

    def vision_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that turn images into visual tokens."""
        words = {id(p) for p in self.language.parameters()}
        return [p for p in self.core.parameters() if id(p) not in words]

    def new_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the published model does not have."""
        return [p for p in (self.head, self.query, self.embed) if p is not None]

    # -------------------------------------------------------------------------------------- prompts
    def reserved_ids(self) -> set[int]:
        """Return ids with a special meaning, which cannot become actions."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        named = {i for i, token in added.items() if token.special}
        return named | {self.image_id} | set(self.tokenizer.all_special_ids)

    def prompt(self, sentence: str) -> list[int]:
        """Return the ids of a prompt, with the image tokens of every camera.

        Raises:
            ConfigError: Tokenizer or chat template do not fit the model.
        """
        request = REQUEST.format(sentence.lower())
        image, t = self.tokenizer.convert_ids_to_tokens(self.image_id), self.tokenizer
        if t.chat_template is not None:
            content: list[dict[str, str]] = [{"type": "image"}] * self.cameras
            content += [{"type": "text", "text": request}]
            messages = [{"role": "user", "content": content}]
            with config_errors(f"its chat template refuses {request!r}: ", kind=True):
                options = {"tokenize": False, "add_generation_prompt": True}
                text = t.apply_chat_template(messages, **options)
            has_bos = t.bos_token is not None and text.startswith(t.bos_token)
            ids = t(text, add_special_tokens=not has_bos).input_ids
        elif self.kind in PREFIX_LM:
            ids = t(
                f"{image * self.cameras}{t.bos_token}{request}\n", add_special_tokens=False
            ).input_ids
        else:
            ids = t(f"{image * self.cameras}{request}").input_ids
        if ids.count(self.image_id) != self.cameras:
            raise ConfigError(
                f"model_type={self.kind}: its prompt has {ids.count(self.image_id)} places for"
                f" {self.cameras} images; the tokenizer or the chat template is another model's"
            )
        delimiters = IMAGE_DELIMITERS.get(self.kind, ("", ""))
        before, after = (t(text, add_special_tokens=False).input_ids for text in delimiters)
        image_ids = [*before, *[self.image_id] * self.visual_tokens, *after]
        return [x for i in ids for x in (image_ids if i == self.image_id else [i])]

    def prompts(self, sentences: Sequence[str]) -> Prompts:
        """Tokenise one prompt per sentence.

        Raises:
            ConfigError: As ``prompt``.
        """
        rows = [self.prompt(sentence) for sentence in sentences]
        ids, mask = (x.to(self.device) for x in pad_left(rows, 0))
        if self.grid is None:
            return Prompts(ids, mask, (mask.cumsum(1) - 1).clamp_min(0).unsqueeze(1))
        kinds = (ids == self.image_id).int()
        grid = self.grid.repeat(len(rows) * self.cameras, 1)
        position, _ = self.core.get_rope_index(
            ids, kinds, image_grid_thw=grid, attention_mask=mask.long()
        )
        return Prompts(ids, mask, position[-3:].transpose(0, 1))

    # ------------------------------------------------------------------------------------- images
    def pixels(self, images: Tensor) -> dict[str, Tensor]:
        """Return the vision tower's arguments for images uint8 [N, 3, H, W]."""
        x = self.image_processor(images)
        if self.grid is None or self.patches is None:
            return {"pixel_values": x.unsqueeze(1) if self.kind in IMAGE_DELIMITERS else x}
        v = self.model.config.vision_config
        merge, patch, (height, width) = v.spatial_merge_size, v.patch_size, self.patches
        x = x.view(len(x), 3, height // merge, merge, patch, width // merge, merge, patch)
        # [N, rows, columns, merge, merge, 3, 1, patch, patch]
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
        x = x.expand(*[-1] * 6, v.temporal_patch_size, -1, -1).reshape(len(x) * height * width, -1)
        return {"pixel_values": x, "image_grid_thw": self.grid.expand(len(images), -1)}

    def encode_images(self, images: Tensor) -> dict[str, Tensor]:
        """Return the visual tokens of images uint8 [B, cameras, 3, H, W].

        Returns:
            "/visual" [B, P, D] and, for models that have them, the features of deeper layers as
            "/deep" [B, layers, P, D].
        """
        rows = len(images)
        output = self.core.get_image_features(**self.pixels(images.flatten(0, 1)), return_dict=True)

        def by_row(x: Any) -> Tensor:
            x = torch.cat([*x]) if isinstance(x, (list, tuple)) else x
            return x.reshape(rows, -1, x.shape[-1])

        features = {"/visual": by_row(output.pooler_output)}
        if deep := getattr(output, "deepstack_features", None):
            features["/deep"] = torch.stack([by_row(x) for x in deep], dim=1)
        return features

    def embed_prompt(
        self, image_features: dict[str, Tensor], ids: Tensor, mask: Tensor, position: Tensor
    ) -> Prefix:
        """Embed a prompt, with the result of ``encode_images`` in place of its image tokens.

        Args:
            image_features: Result of ``encode_images``.
            ids: int64 [B, L], rows of ``prompts``, as are the following.
            mask: bool [B, L].
            position: int64 [B, M, L].
        """
        visual = (ids == self.image_id) & mask
        x = self.language.get_input_embeddings()(ids.masked_fill(visual, 0))
        x = x.masked_scatter(visual.unsqueeze(-1), image_features["/visual"].to(x.dtype))
        deep = image_features["/deep"].unbind(1) if "/deep" in image_features else ()
        return Prefix(x, mask, position, visual, [d.flatten(0, 1) for d in deep])

    # --------------------------------------------------------------------------------------- hidden
    def hidden(self, prefix: Prefix, bins: Tensor | None) -> Tensor:
        """Return the hidden states [B, C·A, D] before each action token, with gradient.

        ``bins`` int64 [B, n]: teacher forcing of n tokens. None: parallel decoding.
        """
        if bins is None:
            assert self.query is not None
            more, count = self.query.expand(len(prefix.x), -1, -1), len(self.query)
        else:
            more, count = self.embed_bins(bins[:, :-1]), bins.shape[1]
        begin = prefix.x.shape[1]
        valid = F.pad(prefix.valid, (0, more.shape[1]), value=True)
        position = self._append_positions(prefix.position, prefix.valid, more.shape[1])
        x = torch.cat((prefix.x, more.to(prefix.x.dtype)), dim=1)
        mask = self._mask(valid, begin, causal=bins is not None)
        options = self._deep_features(prefix, more.shape[1])
        return self._run(x, mask, position, None, options)[:, begin - 1 : begin - 1 + count]

    @torch.no_grad()
    def start(self, prefix: Prefix) -> tuple[Tensor, DecodingState]:
        """Return the hidden states [B, D] before the first action token, and the state of
        ``next``.
        """
        from transformers import DynamicCache

        options = self._deep_features(prefix, 0)
        position = self._append_positions(prefix.position, prefix.valid, 1)[..., -1]
        state = DecodingState(DynamicCache(), prefix.valid, position)
        mask = self._mask(prefix.valid, prefix.x.shape[1], causal=True)
        return self._run(prefix.x, mask, prefix.position, state.cache, options)[:, -1], state

    @torch.no_grad()
    def next(self, bins: Tensor, state: DecodingState) -> Tensor:
        """Append ``bins`` int64 [B] and return the hidden states [B, D] before the next token."""
        state.valid = F.pad(state.valid, (0, 1), value=True)
        mask, x = state.valid[:, None, None], self.embed_bins(bins.unsqueeze(1))
        hidden = self._run(x, mask, state.position.unsqueeze(-1), state.cache, {})[:, 0]
        state.position = state.position + 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the action words alone, float32 [.., K]."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.float(), self.head.float(), self.bias)
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def embed_bins(self, bins: Tensor) -> Tensor:
        """Return the embeddings [.., D] of bins."""
        words = self.language.get_input_embeddings()
        table = self.head if self.embed is None else self.embed
        x = F.embedding(bins.long(), table).to(words.weight.dtype)
        scale = getattr(words, "embed_scale", None)  # Gemma's
        return x if scale is None else x * scale.to(x.dtype)

    def _run(
        self, x: Tensor, mask: Tensor, position: Tensor, cache: Any, options: dict[str, Any]
    ) -> Tensor:
        """Run the language model on x [B, n, D].

        ``mask`` bool [B, 1, n, keys], ``position`` [B, M, n]; ``options`` are further arguments of
        the model.
        """
        # With a cache a layer cannot be computed twice: it would append its keys again.
        recompute = self.recompute and torch.is_grad_enabled() and cache is None
        for layer in self.language.layers:
            layer.training = layer.gradient_checkpointing = recompute
            if recompute:
                layer._gradient_checkpointing_func = _recompute
        position = position[:, 0] if position.shape[1] == 1 else position.transpose(0, 1)
        return self.language(
            inputs_embeds=x,
            attention_mask=mask.expand(-1, -1, x.shape[1], -1),
            position_ids=position,
            past_key_values=cache,
            use_cache=cache is not None,
            **options,
        ).last_hidden_state

    @staticmethod
    def _deep_features(prefix: Prefix, count: int) -> dict[str, Any]:
        """Return the model's arguments for deep features, with ``count`` more tokens."""
        if not prefix.deep:
            return {}
        visual = F.pad(prefix.visual, (0, count))
        return {"visual_pos_masks": visual, "deepstack_visual_embeds": prefix.deep}

    def _mask(self, valid: Tensor, begin: int, *, causal: bool) -> Tensor:
        """Return the attention mask bool [B, 1, n, n] of a prompt of ``begin`` tokens and what
        follows.

        Padding attends to itself, because a softmax over no key is NaN.
        """
        size = valid.shape[1]
        visible = torch.ones(size, size, dtype=torch.bool, device=valid.device)
        if causal:
            visible = visible.tril()
            if self.kind in PREFIX_LM:
                visible[:begin, :begin] = True
        diagonal = torch.eye(size, dtype=torch.bool, device=valid.device)
        return (valid[:, None, None] & visible) | diagonal

    @staticmethod
    def _append_positions(position: Tensor, valid: Tensor, count: int) -> Tensor:
        """Append ``count`` positions: [B, M, L] -> [B, M, L + count].

        All axes continue from the largest position of any axis.
        """
        last = position.masked_fill(~valid.unsqueeze(1), -1).amax((1, 2))  # [B]
        more = last[:, None] + 1 + torch.arange(count, device=position.device)
        return torch.cat((position, more.unsqueeze(1).expand(-1, position.shape[1], -1)), dim=2)

    # -------------------------------------------------------------------------------------- opening
    @classmethod
    def from_directory(
        cls,
        folder: str,
        *,
        cameras: int,
        actions: int | None,
        bins: int,
        image_size: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> VisionLanguage:
        """Load a directory that transformers wrote.

        Our forward pass is compared with that of transformers before the model is used.

        Args:
            folder: The directory.
            cameras: Images of an observation.
            actions: Number of tokens decoded in parallel, None: one after another.
            bins: K.
            image_size: Height and width of the cameras' images.
            dtype: Type of the weights.

        Raises:
            ConfigError: The directory cannot be read, or its model is not supported.
        """
        option = f"model.checkpoint={folder}"
        transformers = import_transformers(option)
        raw = read_json(Path(folder) / "config.json", option, CURE)
        kind = raw.get("model_type")
        bodies: list[VisionLanguage] = []

        def difference() -> float:
            bodies.append(
                cls(model.eval(), tokenizer, processor, cameras=cameras, actions=actions, bins=bins)
            )
            return bodies[0].difference()

        try:
            processor = read_image_processor(Path(folder), raw, image_size)
            with config_errors(f"holds a {kind}, which transformers refuses: ", kind=True):
                model, loading_info = transformers.AutoModelForImageTextToText.from_pretrained(
                    folder, dtype=dtype, output_loading_info=True, **LOCAL_WEIGHTS
                )
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
            # transformers initialises missing weights randomly.
            if missing := sorted(map(str, loading_info["missing_keys"])):
                raise ConfigError(
                    f"the weights lack {missing[0]}, {len(missing)} in all; download them again"
                )
            check_finite(model.named_parameters(), "")
            template_file = Path(folder) / "chat_template.json"
            if tokenizer.chat_template is None and template_file.is_file():
                template = read_json(template_file, "", CURE).get("chat_template")
                tokenizer.chat_template = template
            mismatch = forward_mismatch(difference, dtype)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error
        if mismatch is None:
            bodies[0].model.lm_head = nn.Identity()
            return bodies[0]
        raise ConfigError(
            f"{option}: holds a {kind}, whose forward pass is not the one computed here"
            f" ({mismatch}); PaliGemma, SmolVLM, Idefics 3, LLaVA, Qwen 2 to 3 VL are supported"
        )

    @torch.no_grad()
    def difference(self) -> float:
        """Return the ``relative_difference`` between our logits and those of transformers.

        It is computed for two prompts with random images.
        """
        p = self.prompts(("push the block", "lift"))
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.cameras, 3, self.image_processor.height, self.image_processor.width)
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        images = images.to(self.device)
        options = self.pixels(images.flatten(0, 1))
        if self.kind in IMAGE_DELIMITERS:
            options["pixel_values"] = options["pixel_values"].view(shape)
        if self.grid is not None:
            options["mm_token_type_ids"] = (p.ids == self.image_id).int()
        if self.kind in PREFIX_LM:
            options["token_type_ids"] = torch.zeros_like(p.ids)
        mask = p.mask.long()
        output = self.model(
            input_ids=p.ids, attention_mask=mask, use_cache=False, logits_to_keep=1, **options
        )
        expected = output.logits[:, -1, self.word_ids].float()
        prefix = self.embed_prompt(self.encode_images(images), p.ids, p.mask, p.position)
        hidden, _ = self.start(prefix)
        return relative_difference(self.logits(hidden), expected)

    @torch.no_grad()
    def write(self, folder: Path) -> None:
        """Write the model as transformers does, with the actions' rows in the vocabulary.

        Adapters must be merged before.
        """
        embed, head = self.language.get_input_embeddings().weight, self.vocabulary.module
        head.weight[self.word_ids.to(head.weight.device)] = self.head.to(head.weight)
        if self.embed is not None:
            embed[self.word_ids] = self.embed.to(embed)
        self.model.lm_head = head
        try:
            self.model.save_pretrained(folder)
        finally:
            self.model.lm_head = nn.Identity()


def _recompute(function: Any, *args: Any) -> Any:
    """Run a layer under activation checkpointing."""
    return checkpoint(function, *args, use_reentrant=False)


# ---------------------------------------------------------------------------------------- directory
def read_image_processor(
    folder: Path, raw: dict[str, Any], image_size: tuple[int, int]
) -> ImageProcessor:
    """Read preprocessor_config.json (or the image_processor of processor_config.json).

    Raises:
        ConfigError: Neither describes how images are normalised, or the size is missing.
    """
    options, processor = None, folder / "processor_config.json"
    if (preprocessor := folder / "preprocessor_config.json").is_file():
        options = read_json(preprocessor, "", CURE)
    elif processor.is_file():
        options = read_json(processor, "", CURE).get("image_processor")
    if options is None:
        raise ConfigError(
            "holds no preprocessor_config.json, which defines the image normalisation; download it"
        )
    vision = raw.get("vision_config") or {}
    mean, std = (
        tuple(float(x) for x in options.get(name) or (0.5,) * 3)
        for name in ("image_mean", "image_std")
    )
    mode = "bilinear" if options.get("resample") == 2 else "bicubic"
    if raw.get("model_type") in PATCH_INPUT:
        factor = vision.get("patch_size", 14) * vision.get("spatial_merge_size", 2)
        size = options.get("size") or {}
        min_pixels = options.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        max_pixels = options.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        limits = {"factor": factor, "min_pixels": min_pixels, "max_pixels": max_pixels}
        return ImageProcessor(*smart_resize(*image_size, **limits), mean, std, mode)
    side = vision.get("image_size")
    if side is None:
        size = options.get("crop_size") or options.get("size") or {}
        side = size.get("height") if isinstance(size, dict) else size
    if side is None:
        raise ConfigError(
            "vision_config.image_size: is in neither config.json nor preprocessor_config.json"
        )
    return ImageProcessor(int(side), int(side), mean, std, mode)


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return multiples of ``factor`` near height and width, within limits of their product.

    Source: smart_resize of Qwen2-VL.
    """
    h, w = (max(factor, round(x / factor) * factor) for x in (height, width))
    scale, rounding = 1.0, None
    if h * w > max_pixels:
        scale, rounding = math.sqrt(max_pixels / (height * width)), math.floor
    elif h * w < min_pixels:
        scale, rounding = math.sqrt(min_pixels / (height * width)), math.ceil
    if rounding is not None:
        h, w = (max(factor, rounding(x * scale / factor) * factor) for x in (height, width))
    return h, w
