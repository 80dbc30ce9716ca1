"""Vision-language models of transformers that decide: the last K words of their vocabulary are bins of an action.

B rows, N pictures of all rows, K bins, P visual tokens of a row (of all cameras), L tokens of a prompt, its P image
tokens among them, A action tokens (C·A of a chunk), D size of a hidden state, M axes that positions are counted along
(3 for Qwen's pictures, else 1).

The weights and modules are transformers'. What a prompt is, is the model's own: its chat template, with the instruction
as what the user asks, and as many image tokens as its vision tower gives visual tokens. Between the modules the forward
pass is ours, so that tokens can be decoded in parallel and logits computed of K words only; where a directory is opened
it is compared with the model's own (``VisionLanguage.of``). Pictures are resized and normalised here, by the numbers of
preprocessor_config.json: transformers' processors need torchvision, and one picture at a time. A picture is resized
whole: models that cut large pictures into parts (SmolVLM) see it as one part.

No dataset says how such a model's words mean actions: bin k of K equal parts of [-1, 1] is the k-th word from the end
that no prompt uses (OpenVLA's order). Its row of the embedding and of the head is copied from the vocabulary at the
start and then a parameter of its own, so that adapters can be trained beside a vocabulary that stays.
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

from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.causal_lm import OTHERWISE, Aside
from embodied_ppo.models.checkpoint_files import json_of, refusing

ELSE = "name one that transformers wrote (hf download HuggingFaceTB/SmolVLM-256M-Instruct --local-dir DIR)"
REQUEST = "What action should the robot take to {}?"
"""What the user asks, OpenVLA's words."""
SAME = 1e-4
"""Largest difference between our logits and transformers', relative to the largest logit."""
AROUND = {
    "idefics3": ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
    "smolvlm": ("<fake_token_around_image><global-img>", "<fake_token_around_image>"),
}
"""model_type -> words before and after the image tokens of a picture that is not cut."""
PREFIX = ("paligemma",)
"""Models whose prompts see themselves whole, not only what came before."""
FLAT = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Models that want patches instead of pictures."""


@dataclass(frozen=True)
class Lens:
    """How a picture becomes what a vision tower wants.

    height, width   pixels that it is resized to
    mean, std       of pixels in [0, 1], by channel
    mode            of the interpolation
    """

    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mode: str = "bicubic"

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [N, 3, H, W] -> float32 [N, 3, height, width]."""
        x, size = images.float(), (self.height, self.width)
        if x.shape[-2:] != size:
            x = F.interpolate(x, size, mode=self.mode, antialias=True, align_corners=False).round().clamp(0, 255)
        mean, std = (torch.tensor(v, device=x.device).view(3, 1, 1) for v in (self.mean, self.std))
        return (x / 255 - mean) / std


@dataclass(frozen=True)
class Prompts:
    """Of S sentences, padded on the left.

    ids  int64 [S, L]     mask  bool [S, L]     position  int64 [S, M, L], arbitrary where padded
    """

    ids: Tensor
    mask: Tensor
    position: Tensor


@dataclass(frozen=True)
class Seen:
    """What comes before the actions.

    x         [B, L, D] embeddings, visual tokens in their places
    valid     bool [B, L]          position  int64 [B, M, L]
    visual    bool [B, L]          deep      of some layers: what is added at visual tokens [B·P, D]
    """

    x: Tensor
    valid: Tensor
    position: Tensor
    visual: Tensor
    deep: list[Tensor]


@dataclass
class Streamed:
    """Tokens that come one by one: transformers' cache, which keys are no padding [B, L + i], the next position
    [B, M]."""

    cache: Any
    valid: Tensor
    position: Tensor


class VisionLanguage(nn.Module):
    """Pictures and prompts -> hidden states that predict action tokens, and their logits.

    ``train`` changes nothing: dropout would make log-probabilities noise.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        lens: Lens,
        *,
        cameras: int,
        actions: int | None,
        bins: int,
        template: str | None,
    ) -> None:
        """``actions``: C·A that are decoded in parallel; None: one by one. Raises ConfigError where the model is built
        otherwise than those that are known."""
        super().__init__()
        self.model: Any = model
        self.tokenizer, self.lens, self.cameras, self.template = tokenizer, lens, cameras, template
        self.bins = bins
        self.kind = str(self.model.config.model_type)
        self.image_id: int = getattr(self.model.config, "image_token_id", None) or -1
        if self.image_id < 0 or not hasattr(self.core, "get_image_features"):
            raise ConfigError(f"model_type={self.kind}: it has no image tokens; name a vision-language model")
        embed = self.language.get_input_embeddings()
        self.hidden_size = int(embed.weight.shape[1])
        self.recompute = False
        """Keep no layer's inside for the backward pass but compute it again."""
        whole = self.tokens()
        head: Any = self.model.lm_head
        vocabulary = min(len(embed.weight), len(head.weight))
        words = [i for i in range(vocabulary - 1, -1, -1) if i not in whole][:bins]
        if len(words) < bins:
            raise ConfigError(f"model.bins={bins}: the vocabulary has only {len(words)} words that no prompt uses")
        self.words: Tensor
        """int64 [K], of bin k."""
        self.register_buffer("words", torch.tensor(words), persistent=False)
        self.tied = embed.weight is head.weight
        self.head = nn.Parameter(head.weight.detach()[words].clone())
        self.embed = self.query = None
        if actions is not None:
            self.query = nn.Parameter(torch.zeros(actions, self.hidden_size, dtype=embed.weight.dtype))
            """In place of tokens that are decoded in parallel; 0 at the start, as OpenVLA-OFT's."""
        elif not self.tied:
            self.embed = nn.Parameter(embed.weight.detach()[words].clone())
        self.bias: Tensor | None
        bias = getattr(head, "bias", None)
        self.register_buffer("bias", None if bias is None else bias.detach()[words].float(), persistent=False)
        self.vocabulary = Aside(head)
        """The whole head, of which nothing more is read."""
        for layer in self.language.layers:
            layer.gradient_checkpointing = False
        self.eval()
        self.grid: Tensor | None = None
        """int64 [1, 3]: a picture's patches in time, height and width."""
        if self.kind in FLAT:
            patch = self.model.config.vision_config.patch_size
            self.grid = torch.tensor([[1, lens.height // patch, lens.width // patch]])
        with torch.no_grad():
            one = torch.zeros(1, 3, lens.height, lens.width, dtype=torch.uint8, device=self.device)
            self.visual_tokens = self.look(one.unsqueeze(1))["/visual"].shape[1]
            """Of one picture."""

    @property
    def core(self) -> Any:
        """The model without its head."""
        return self.model.model

    @property
    def language(self) -> Any:
        return self.core.text_model if hasattr(self.core, "text_model") else self.core.language_model

    @property
    def device(self) -> torch.device:
        return self.words.device

    def sight(self) -> list[nn.Parameter]:
        """Parameters that turn pictures into visual tokens."""
        words = {id(p) for p in self.language.parameters()}
        return [p for p in self.core.parameters() if id(p) not in words]

    def fresh(self) -> list[nn.Parameter]:
        """Parameters that the directory's model has not."""
        return [p for p in (self.head, self.query, self.embed) if p is not None]

    def train(self, mode: bool = True) -> VisionLanguage:
        """See the class."""
        return super().train(False)

    # --------------------------------------------------------------------------------------------------------- prompts
    def tokens(self) -> set[int]:
        """Ids with a meaning of their own, which no action has."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        named = {i for i, token in added.items() if token.special}
        return named | {self.image_id} | set(self.tokenizer.all_special_ids)

    def prompt(self, sentence: str) -> list[int]:
        """Ids with the image tokens of every camera in their places. Raises ConfigError."""
        request = REQUEST.format(sentence.lower())
        image, t = self.tokenizer.convert_ids_to_tokens(self.image_id), self.tokenizer
        if self.template is not None:
            content = [*({"type": "image"} for _ in range(self.cameras)), {"type": "text", "text": request}]
            messages = [{"role": "user", "content": content}]
            with refusing(f"its chat template refuses {request!r}: ", kind=True):
                text = t.apply_chat_template(
                    messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
                )
            begun = t.bos_token is not None and text.startswith(t.bos_token)
            ids = t(text, add_special_tokens=not begun).input_ids
        elif self.kind in PREFIX:
            ids = t(f"{image * self.cameras}{t.bos_token}{request}\n", add_special_tokens=False).input_ids
        else:
            ids = t(f"{image * self.cameras}{request}").input_ids
        if ids.count(self.image_id) != self.cameras:
            raise ConfigError(
                f"model_type={self.kind}: its prompt has {ids.count(self.image_id)} places for {self.cameras} pictures;"
                " the tokenizer or the chat template is another model's"
            )
        before, after = (t(text, add_special_tokens=False).input_ids for text in AROUND.get(self.kind, ("", "")))
        picture = [*before, *[self.image_id] * self.visual_tokens, *after]
        return [x for i in ids for x in (picture if i == self.image_id else [i])]

    def prompts(self, sentences: Sequence[str]) -> Prompts:
        """Raises ConfigError."""
        rows = [self.prompt(sentence) for sentence in sentences]
        width, device = max(map(len, rows)), self.device
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device).bool()
        if self.grid is None:
            return Prompts(ids, mask, (mask.cumsum(1) - 1).clamp_min(0).unsqueeze(1))
        kinds = (ids == self.image_id).int()
        grid = self.grid.repeat(len(rows) * self.cameras, 1).to(device)
        position, _ = self.core.get_rope_index(ids, kinds, image_grid_thw=grid, attention_mask=mask.long())
        return Prompts(ids, mask, position[-3:].transpose(0, 1))

    # -------------------------------------------------------------------------------------------------------- pictures
    def pixels(self, images: Tensor) -> dict[str, Tensor]:
        """uint8 [N, 3, H, W] -> what the vision tower is called with."""
        x = self.lens(images)
        if self.grid is None:
            return {"pixel_values": x.unsqueeze(1) if self.kind in AROUND else x}
        v = self.model.config.vision_config
        merge, patch, (_, height, width) = v.spatial_merge_size, v.patch_size, self.grid[0].tolist()
        x = x.view(len(x), 3, height // merge, merge, patch, width // merge, merge, patch)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)  # [N, rows, columns, merge, merge, 3, 1, patch, patch]
        x = x.expand(*[-1] * 6, v.temporal_patch_size, -1, -1).reshape(len(x) * height * width, -1)
        return {"pixel_values": x, "image_grid_thw": self.grid.to(x.device).expand(len(images), -1)}

    def look(self, images: Tensor) -> dict[str, Tensor]:
        """uint8 [B, cameras, 3, H, W] -> visual tokens [B, P, D] and, for models that have them, those of deeper layers
        [B, layers, P, D]."""
        rows, told = len(images), self.core.get_image_features(**self.pixels(images.flatten(0, 1)), return_dict=True)

        def whole(x: Any) -> Tensor:
            x = torch.cat([*x]) if isinstance(x, (list, tuple)) else x
            return x.reshape(rows, -1, x.shape[-1])

        found = {"/visual": whole(told.pooler_output)}
        if deep := getattr(told, "deepstack_features", None):
            found["/deep"] = torch.stack([whole(x) for x in deep], dim=1)
        return found

    def read(self, looked: dict[str, Tensor], ids: Tensor, mask: Tensor, position: Tensor) -> Seen:
        """Of what ``look`` gave, and rows of ``prompts``."""
        visual = (ids == self.image_id) & mask
        x = self.language.get_input_embeddings()(ids.masked_fill(visual, 0))
        x = x.masked_scatter(visual.unsqueeze(-1), looked["/visual"].to(x.dtype))
        deep = looked["/deep"].unbind(1) if "/deep" in looked else ()
        return Seen(x, mask, position, visual, [d.flatten(0, 1) for d in deep])

    # ---------------------------------------------------------------------------------------------------------- hidden
    def hidden(self, seen: Seen, bins: Tensor | None) -> Tensor:
        """[B, C·A, D] before each action token, with gradient; ``bins`` int64 [B, n]: teacher forcing of n tokens."""
        if bins is None:
            assert self.query is not None
            more, count = self.query.expand(len(seen.x), -1, -1), len(self.query)
        else:
            more, count = self.words_of(bins[:, :-1]), bins.shape[1]
        begin = seen.x.shape[1]
        valid = F.pad(seen.valid, (0, more.shape[1]), value=True)
        position = self._after(seen.position, seen.valid, more.shape[1])
        x = torch.cat((seen.x, more.to(seen.x.dtype)), dim=1)
        rest: dict[str, Any] = {}
        if seen.deep:
            rest = {"visual_pos_masks": F.pad(seen.visual, (0, more.shape[1])), "deepstack_visual_embeds": seen.deep}
        mask = self._mask(valid, begin, causal=bins is not None)
        return self._run(x, mask, position, None, rest)[:, begin - 1 : begin - 1 + count]

    @torch.no_grad()
    def start(self, seen: Seen) -> tuple[Tensor, Streamed]:
        """Hidden states [B, D] before the first action token."""
        from transformers import DynamicCache

        rest: dict[str, Any] = {}
        if seen.deep:
            rest = {"visual_pos_masks": seen.visual, "deepstack_visual_embeds": seen.deep}
        state = Streamed(DynamicCache(), seen.valid, self._after(seen.position, seen.valid, 1)[..., -1])
        mask = self._mask(seen.valid, seen.x.shape[1], causal=True)
        return self._run(seen.x, mask, seen.position, state.cache, rest)[:, -1], state

    @torch.no_grad()
    def next(self, bins: Tensor, state: Streamed) -> Tensor:
        """[B, D] after int64 [B]."""
        state.valid = F.pad(state.valid, (0, 1), value=True)
        mask, x = state.valid[:, None, None], self.words_of(bins.unsqueeze(1))
        hidden = self._run(x, mask, state.position.unsqueeze(-1), state.cache, {})[:, 0]
        state.position = state.position + 1
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [.., K]: of the action words alone."""
        with torch.autocast(hidden.device.type, enabled=False):
            logits = F.linear(hidden.float(), self.head.float(), self.bias)
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def words_of(self, bins: Tensor) -> Tensor:
        """Embeddings [.., D] of bins."""
        words = self.language.get_input_embeddings()
        x = F.embedding(bins.long(), self.head if self.embed is None else self.embed).to(words.weight.dtype)
        scale = getattr(words, "embed_scale", None)  # Gemma's
        return x if scale is None else x * scale.to(x.dtype)

    def _run(self, x: Tensor, mask: Tensor, position: Tensor, cache: Any, rest: dict[str, Any]) -> Tensor:
        """The language model on [B, n, D]; ``mask`` bool [B, 1, n, keys], ``position`` [B, M, n]."""
        again = self.recompute and torch.is_grad_enabled() and cache is None
        for layer in self.language.layers:  # with a cache a layer cannot be computed twice
            layer.training = layer.gradient_checkpointing = again
            if again:
                layer._gradient_checkpointing_func = _again
        position = position[:, 0] if position.shape[1] == 1 else position.transpose(0, 1)
        return self.language(
            inputs_embeds=x,
            attention_mask=mask.expand(-1, -1, x.shape[1], -1),
            position_ids=position,
            past_key_values=cache,
            use_cache=cache is not None,
            **rest,
        ).last_hidden_state

    def _mask(self, valid: Tensor, begin: int, *, causal: bool) -> Tensor:
        """bool [B, 1, n, n], of ``begin`` tokens of a prompt and what follows; padding sees itself, for want of
        others."""
        size = valid.shape[1]
        seen = torch.ones(size, size, dtype=torch.bool, device=valid.device)
        if causal:
            seen = seen.tril()
            if self.kind in PREFIX:
                seen[:begin, :begin] = True
        itself = torch.eye(size, dtype=torch.bool, device=valid.device)
        return (valid[:, None, None] & seen) | itself

    @staticmethod
    def _after(position: Tensor, valid: Tensor, count: int) -> Tensor:
        """[B, M, L + count]: the largest of all axes goes on along each."""
        last = position.masked_fill(~valid.unsqueeze(1), -1).amax((1, 2))  # [B]
        more = last[:, None] + 1 + torch.arange(count, device=position.device)
        return torch.cat((position, more.unsqueeze(1).expand(-1, position.shape[1], -1)), dim=2)

    # --------------------------------------------------------------------------------------------------------- opening
    @classmethod
    def of(
        cls,
        folder: str,
        *,
        cameras: int,
        actions: int | None,
        bins: int,
        picture: tuple[int, int],
        dtype: torch.dtype = torch.float32,
    ) -> VisionLanguage:
        """From a directory that transformers wrote; ``picture``: height and width of what cameras show.

        Our forward pass is compared with the model's own before it is trusted. Raises ConfigError.
        """
        try:
            from transformers import AutoModelForImageTextToText, AutoTokenizer
            from transformers.utils import logging
        except ImportError as error:
            raise ConfigError(
                f"model.checkpoint={folder} needs transformers ({error}): pip install 'embodied-ppo[vla]'"
            ) from error
        logging.disable_progress_bar()
        where = f"model.checkpoint={folder}"
        raw = json_of(Path(folder) / "config.json", where, ELSE)
        known = raw.get("model_type")
        try:
            lens = lens_of(Path(folder), raw, picture)
            with refusing(f"holds a {known}, which transformers refuses: ", kind=True):
                read: Any = AutoModelForImageTextToText.from_pretrained  # with loading_info it gives two
                model, told = read(
                    folder,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    output_loading_info=True,
                )
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            if lacking := sorted(map(str, told["missing_keys"])):  # transformers would draw them at random
                raise ConfigError(f"the weights lack {lacking[0]}, {len(lacking)} in all; download them again")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        try:
            apart = Path(folder) / "chat_template.json"
            template = tokenizer.chat_template
            if template is None and apart.is_file():
                template = json_of(apart, "", ELSE).get("chat_template")
            body = cls(model.eval(), tokenizer, lens, cameras=cameras, actions=actions, bins=bins, template=template)
            error = body.difference()
            body.model.lm_head = nn.Identity()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        except torch.OutOfMemoryError:
            raise
        except OTHERWISE as missing:
            error = f"it is built otherwise: {one_line(missing, kind=True)}"
        else:
            if error <= (SAME if dtype == torch.float32 else 0.05):
                return body
            error = f"logits differ by {error:.2g} of the largest"
        raise ConfigError(
            f"{where}: holds a {known}, whose forward pass is not the one computed here ({error}); PaliGemma, SmolVLM, "
            "Idefics 3, LLaVA, Qwen 2 to 3 VL are supported"
        )

    @torch.no_grad()
    def difference(self) -> float:
        """Between transformers' logits and ours after two prompts with random pictures, relative to the largest."""
        p = self.prompts(("push the block", "lift"))
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.cameras, 3, self.lens.height, self.lens.width)
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(self.device)
        options = self.pixels(images.flatten(0, 1))
        if self.kind in AROUND:
            options["pixel_values"] = options["pixel_values"].view(shape)
        if self.grid is not None:
            options["mm_token_type_ids"] = (p.ids == self.image_id).int()
        if self.kind in PREFIX:
            options["token_type_ids"] = torch.zeros_like(p.ids)
        told = self.model(input_ids=p.ids, attention_mask=p.mask.long(), use_cache=False, logits_to_keep=1, **options)
        theirs = told.logits[:, -1, self.words].float()
        hidden, _ = self.start(self.read(self.look(images), p.ids, p.mask, p.position))
        return float((self.logits(hidden) - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))

    @torch.no_grad()
    def write(self, folder: Path) -> None:
        """As transformers does, actions' rows back in the vocabulary. Adapters must be merged before."""
        embed, head = self.language.get_input_embeddings().weight, self.vocabulary.module
        head.weight[self.words.to(head.weight.device)] = self.head.to(head.weight)
        if self.embed is not None:
            embed[self.words] = self.embed.to(embed)
        self.model.lm_head = head
        try:
            self.model.save_pretrained(folder)
        finally:
            self.model.lm_head = nn.Identity()


def _again(function: Any, *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=False)


# ------------------------------------------------------------------------------------------------------- directory
def lens_of(folder: Path, raw: dict[str, Any], picture: tuple[int, int]) -> Lens:
    """By preprocessor_config.json (or processor_config.json's image_processor). Raises ConfigError."""
    told, processor = None, folder / "processor_config.json"
    if (own := folder / "preprocessor_config.json").is_file():
        told = json_of(own, "", ELSE)
    elif processor.is_file():
        told = json_of(processor, "", ELSE).get("image_processor")
    if told is None:
        raise ConfigError("holds no preprocessor_config.json, which says how pictures are normalised; download it")
    vision = raw.get("vision_config") or {}
    mean, std = (tuple(float(x) for x in told.get(name) or (0.5,) * 3) for name in ("image_mean", "image_std"))
    mode = "bilinear" if told.get("resample") == 2 else "bicubic"
    if raw.get("model_type") in FLAT:
        factor = vision.get("patch_size", 14) * vision.get("spatial_merge_size", 2)
        size = told.get("size") or {}
        fewest = told.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = told.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        return Lens(*_fitted(*picture, factor=factor, fewest=fewest, most=most), mean, std, mode)
    side = vision.get("image_size")
    if side is None:
        size = told.get("crop_size") or told.get("size") or {}
        side = size.get("height") if isinstance(size, dict) else size
    if side is None:
        raise ConfigError("vision_config.image_size: neither config.json nor preprocessor_config.json says it")
    return Lens(int(side), int(side), mean, std, mode)


def _fitted(height: int, width: int, *, factor: int, fewest: int, most: int) -> tuple[int, int]:
    """Multiples of ``factor`` near height and width with a number of pixels in between (Qwen's smart_resize)."""
    h, w = (max(factor, round(x / factor) * factor) for x in (height, width))
    scale, how = 1.0, None
    if h * w > most:
        scale, how = math.sqrt(most / (height * width)), math.floor
    elif h * w < fewest:
        scale, how = math.sqrt(fewest / (height * width)), math.ceil
    if how is not None:
        h, w = (max(factor, how(x * scale / factor) * factor) for x in (height, width))
    return h, w
