"""SmolVLA: layers of SmolVLM2 encode images, words and state, a smaller Llama predicts the flow.

Sizes are named as in ``pi0``. Attention::

    images | words                       attend to each other
                    state                attends to these and itself
                          H noisy actions, in every second layer of the expert: attend to the
                                         prefix, to themselves and to earlier actions;
                                         in the other layers: to the prefix only

``read`` reads lerobot's config.json, weights, statistics and tokenizer. Published weights were not
available: everything is tested with synthetic directories, and against lerobot with random weights
(``make test-lerobot``).

Source: Shukor et al. 2025, arXiv 2506.01844; lerobot for the details.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError, show
from embodied_ppo.core.collectives import gathered
from embodied_ppo.policies import checkpoint_files as files
from embodied_ppo.policies import lora, peft_files
from embodied_ppo.policies.backbone import VECTOR
from embodied_ppo.policies.decoder import gated_mlp
from embodied_ppo.policies.fusion import normalise, rotate
from embodied_ppo.policies.vla import pi0_files, published_weights
from embodied_ppo.policies.vla.pi0 import PI0, PI0Trunk
from embodied_ppo.policies.vla.pi0_files import Published
from embodied_ppo.policies.vla.prefix import PrefixCache, append_room, block, grouped

# Layer i of the expert has self-attention if i is a multiple of it, else cross-attention.
SELF_ATTENTION_EVERY = 2

# Sizes of the models that ``vlm_model_name`` names; lerobot's directories lack them.
VLM_SIZES: dict[str, Any] = published_weights.TABLES["smolvla"]["vlm_sizes"]
# Values of lerobot's options that are read here; the first one is its default.
SUPPORTED: dict[str, list[Any]] = published_weights.TABLES["smolvla"]["supported"]

# Substitutions: a weight's name in lerobot's files or ``SmolVLAModel`` -> that in ``SmolVLA``.
PARAMETERS = published_weights.patterns("smolvla", "parameters")
# Substitutions that map names of ``SmolVLA`` to those of lerobot's modules.
MODULES = published_weights.patterns("smolvla", "modules")
WAVELENGTH = 10_000.0  # largest wavelength of the rotary positions, in place of SmolVLM2's 100,000


# ------------------------------------------------------------------------------------------- files
class SmolVLM(nn.Module):
    """The parts of SmolVLM2 that SmolVLA uses, and the layer that embeds the state.

    The names of the attributes are those of PaliGemma, which ``pi0.PI0Trunk`` reads.
    """

    def __init__(self, config: Any, state_size: int) -> None:
        """Build the parts with random weights.

        Args:
            config: transformers' SmolVLMConfig.
            state_size: N, numbers of a padded state.
        """
        from transformers import LlamaModel
        from transformers.models.smolvlm import modeling_smolvlm

        super().__init__()
        self.config = config
        self.vision_tower = modeling_smolvlm.SmolVLMVisionTransformer(config.vision_config)
        self.multi_modal_projector = modeling_smolvlm.SmolVLMConnector(config)
        self.language_model = LlamaModel(config.text_config)
        self.state_proj = nn.Linear(state_size, config.text_config.hidden_size)


class ActionTime(nn.Module):
    """Embeds noisy actions and the time of the flow, as π0.

    Attributes:
        sinusoid_embeds: Maps times [B] to [B, D]; ``pi0.PI0`` sets it.
    """

    def __init__(self, actions: int, width: int) -> None:
        """Build the layers.

        Args:
            actions: N, numbers of a padded action.
            width: D of the action expert.
        """
        super().__init__()
        self.sinusoid_embeds: nn.Module = nn.Identity()
        self.action_in_proj = nn.Linear(actions, width)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)

    def forward(self, x: Tensor, tau: Tensor) -> Tensor:
        """Return tokens [B, H, D] of latents x [B, H, N] at times tau [B]."""
        h = self.action_in_proj(x)
        time = self.sinusoid_embeds(tau).to(h.dtype).unsqueeze(1).expand_as(h)
        h = self.action_time_mlp_in(torch.cat((h, time), dim=2))
        return self.action_time_mlp_out(nn.functional.silu(h))


class SmolVLAModel(nn.Module):
    """All weights, with the attributes that ``pi0.PI0`` reads from transformers' model."""

    def __init__(self, raw: Mapping[str, Any], config: Any) -> None:
        """Build the model with random weights.

        Args:
            raw: lerobot's config.json.
            config: transformers' SmolVLMConfig.
        """
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        text = config.text_config
        width = int(text.hidden_size * raw.get("expert_width_multiplier", 0.75))
        expert = LlamaConfig(**text.to_dict() | expert_sizes(width))
        states, actions = (raw.get(f"max_{x}_dim", 32) for x in ("state", "action"))
        self.config = SimpleNamespace(
            chunk_size=raw.get("chunk_size", 50),
            max_state_dim=states,
            max_action_dim=actions,
            min_period=raw.get("min_period", 4e-3),
            max_period=raw.get("max_period", 4.0),
            vlm_config=config,
            dit_config=expert,
        )
        self.model = nn.Module()
        self.model.vlm = SmolVLM(config, states)
        body: Any = LlamaModel(expert)
        self.model.dit = body
        keys = text.num_key_value_heads * text.head_dim
        for i, layer in enumerate(body.layers):
            if is_cross_layer(i):
                layer.self_attn.k_proj = nn.Linear(keys, keys, bias=False)
                layer.self_attn.v_proj = nn.Linear(keys, keys, bias=False)
        body.embed_tokens = None
        self.embed_action_time = ActionTime(actions, width)
        self.action_out_proj = nn.Linear(width, actions)


def expert_sizes(width: int) -> dict[str, int]:
    """Return the sizes of the expert that differ from the language model's, as in lerobot.

    The inner width is 8/3 of ``width``, rounded up to a multiple of 256.
    """
    inner = int(4 * int(2 * width / 3))
    return {"hidden_size": width, "intermediate_size": 256 * math.ceil(inner / 256)}


def is_cross_layer(i: int) -> bool:
    """Return whether layer i of the expert attends to the prefix only."""
    return i % SELF_ATTENTION_EVERY != 0


def read(folder: str | Path) -> Published:
    """Read a checkpoint directory.

    Raises:
        ConfigError: A file is missing or damaged, or an option of the model is not supported.
    """
    folder, label = Path(folder), f"model.checkpoint={folder}"
    _, raw = published_weights.read_kind(folder, "flow")
    for name, values in SUPPORTED.items():
        files.check_supported(f"{label}: config.json has ", name, raw.get(name, values[0]), *values)
    pi0_files.check_numbers(raw, label)

    def build() -> tuple[SmolVLAModel, published_weights.Targets]:
        model = build_model(raw, folder)
        return model, pi0_files.targets_of(model, PARAMETERS)

    model = published_weights.load(folder, build, rename)
    words = raw.get("tokenizer_max_length") or pi0_files.MAX_WORDS["pi0"]
    tokenizer = peft_files.locate(folder, "tokenizer.json").parent
    encode = files.load_tokenizer(tokenizer, *VLM_SIZES)
    # At most ``words`` ids, including end of line.
    tokenize = lambda sentence: encode(sentence.removesuffix("\n") + "\n").input_ids[:words]
    stats = pi0_files.statistics(folder, raw, "MEAN_STD")
    cameras = pi0_files.camera_names(raw)
    return Published(model, tokenize, *stats, antialias=False, cameras=cameras, modules=MODULES)


def build_model(raw: Mapping[str, Any], folder: str | Path) -> SmolVLAModel:
    """Return the model of lerobot's config.json with new weights. Raises ConfigError."""
    label = f"model.checkpoint={folder}"
    with files.config_errors(f"{label}: config.json is refused: "):
        config = vlm_config(raw, label)
        name, sides = "resize_imgs_with_padding", [config.vision_config.image_size] * 2
        files.check_supported(f"{label}: config.json has ", name, raw.get(name, sides), sides)
        return SmolVLAModel(raw, config)


def rename(keys: Iterable[str]) -> dict[str, str]:
    """Return key of a file -> name of the parameter of ``SmolVLA``.

    No layer reads the head of SmolVLM2; statistics are no weights.
    """
    read_keys = (key for key in keys if "lm_head" not in key and "normalize" not in key)
    return {key: published_weights.substitute(key, PARAMETERS) for key in read_keys}


def vlm_config(raw: Mapping[str, Any], label: str) -> Any:
    """Return transformers' SmolVLMConfig.

    Args:
        raw: lerobot's config.json.
        label: Beginning of the message.

    Raises:
        ConfigError: The sizes of ``vlm_model_name`` are not known.
    """
    transformers = files.import_transformers("model.checkpoint")
    name = raw.get("vlm_model_name")
    sizes = raw.get("vlm_config") or VLM_SIZES.get(str(name))
    if sizes is None:
        raise ConfigError(
            f"{label}: vlm_model_name={name} is not known; supported is {', '.join(VLM_SIZES)}"
        )
    text = {"model_type": "llama", "attention_bias": False, "num_hidden_layers": 32} | sizes["text"]
    layers = raw.get("num_vlm_layers", 16)
    if type(layers) is not int or layers > pi0_files.LARGEST["num_hidden_layers"]:
        raise ConfigError(
            f"{label}: config.json has num_vlm_layers={show(layers)}; it must be a whole number <="
            f" {pi0_files.LARGEST['num_hidden_layers']}, download it again"
        )
    if layers > 0:  # otherwise lerobot uses all layers of the vision-language model
        text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
    return transformers.SmolVLMConfig(
        text_config=text, vision_config=sizes["vision"], scale_factor=sizes["scale_factor"]
    )


# ------------------------------------------------------------------------------------------ policy
def rotation(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin float32 [B, Q, d] of positions int64 [B, Q] for heads of d = ``size``."""
    exponent = torch.arange(size // 2, device=place.device, dtype=torch.float32) * (2.0 / size)
    angle = place.unsqueeze(-1).float() / WAVELENGTH**exponent
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


class SmolTrunk(PI0Trunk):
    """Trunk on SmolVLM2. The prefix ends with the state."""

    def offsets(self, width: int, height: int) -> tuple[int, int]:
        """See ``PI0Trunk.offsets``: padding is left of the image and above it."""
        return self.side - width, self.side - height

    def image_tokens(self) -> int:
        """See ``PI0Trunk.image_tokens``."""
        return super().image_tokens() // self.vlm.config.scale_factor**2

    def forward(self, inputs: dict[str, Tensor]) -> PrefixCache:
        """See ``PI0Trunk.forward``."""
        vlm = self.vlm
        images, words, given = self.embed(inputs)
        scale = math.sqrt(words.shape[-1])
        state = vlm.state_proj(inputs[VECTOR].to(vlm.state_proj.weight.dtype)).unsqueeze(1)
        x = torch.cat((images.to(words.dtype) * scale, words * scale, state.to(words.dtype)), dim=1)
        valid = F.pad(given, (images.shape[1], 1), value=True)
        attention = vlm.language_model.layers[0].self_attn
        rotary = rotation(valid.cumsum(1) - 1, attention.head_dim)
        # The state is the last token: it attends to all, and only itself attends to it.
        last = torch.zeros_like(valid)
        last[:, -1] = True
        visible = valid.unsqueeze(1) & (last.unsqueeze(2) | ~last.unsqueeze(1))
        return self.run_layers(x, rotary, _repeat_mask(visible, attention), valid, inputs)


class SmolVLA(PI0):
    """Flow policy on SmolVLA; see ``PI0``."""

    kind = "smolvla"
    trunk: SmolTrunk
    trunk_class = SmolTrunk
    state_tokens = 0
    state_in_prefix = True
    build_model = staticmethod(build_model)
    read = staticmethod(read)
    rename = staticmethod(rename)

    def prompt_tokens(self) -> int:
        """See ``PI0.prompt_tokens``; the state is one of them."""
        return super().prompt_tokens() + 1

    def embed_actions(
        self, context: PrefixCache, x: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See ``PI0.embed_actions``."""
        return self.embed(x, tau), None

    def expert_calls(self, context: PrefixCache) -> list[tuple[Any, ...]]:
        """See ``PI0.expert_calls``."""
        layers: list[Any] = list(self.expert.layers)
        valid, size = context.valid, self.horizon
        rows, attention = len(valid), layers[0].self_attn
        order = torch.arange(size, device=valid.device)
        self_rotation = rotation(valid.sum(1, keepdim=True) + order, attention.head_dim)
        cross_rotation = rotation(order.expand(rows, -1), attention.head_dim)
        prefix = valid[:, None].expand(rows, size, -1)
        causal = (order[:, None] >= order).expand(rows, -1, -1)
        mask = _repeat_mask(torch.cat((prefix, causal), dim=2), attention)
        cross_mask = _repeat_mask(prefix, attention)
        calls: list[tuple[Any, ...]] = []
        with lora.autocast(self.device, self.dtype):
            for i, kv in enumerate(zip(context.keys, context.values, strict=True)):
                if is_cross_layer(i):
                    kv = gathered(layers[i], _cross_keys, *kv)
                    calls.append((_cross_attention, cross_rotation, cross_mask, kv))
                else:
                    calls.append((block, self_rotation, mask, append_room(*kv, size)))
        return calls


def _repeat_mask(visible: Tensor, attention: Any) -> Tensor:
    """Repeat a mask bool [B, Q, P] for the queries that share keys, [B, 1, n Q, P]."""
    return visible.repeat(1, attention.num_key_value_groups, 1).unsqueeze(1)


def _cross_keys(layer: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Map keys and values of the prefix, [B, G, P, d] each, to those of a layer of the expert."""

    def project(linear: Any, x: Tensor) -> Tensor:
        y = linear(x.transpose(1, 2).flatten(2).to(linear.weight.dtype))
        return y.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)

    return project(layer.self_attn.k_proj, keys), project(layer.self_attn.v_proj, values)


def _cross_attention(
    layer: Any,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    visible: Tensor,
    kv: tuple[Tensor, Tensor],
    condition: None,
) -> tuple[Tensor]:
    """Run a layer of the expert whose queries attend to the prefix only.

    Args:
        layer: Layer of transformers' Llama.
        x: [B, H, D].
        rotary: cos and sin of the rotary positions of the actions, counted from 0.
        visible: bool [B, 1, n H, P], see ``pi0.block``.
        kv: Results of ``_cross_keys``, [B, G, P, d] each.
        condition: Unused.

    Returns:
        Outputs [B, H, D].
    """
    a = layer.self_attn
    q = a.q_proj(normalise(layer.input_layernorm, x))
    q = q.unflatten(-1, (-1, a.head_dim)).transpose(1, 2)
    keys, values = kv
    q = rotate(q, *rotary, values.dtype)
    query = grouped(q, keys.shape[1])
    h = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=a.scaling)
    x = x + a.o_proj(h.reshape(q.shape).transpose(1, 2).flatten(2))
    return (x + gated_mlp(layer.mlp, normalise(layer.post_attention_layernorm, x)),)
