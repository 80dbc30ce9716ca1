"""X-VLA's published files: lerobot's config.json, weights, statistics, tokenizer.

The first checkpoints have the names of the weights of Microsoft's Florence-2, later ones those of
transformers; both are read. Published weights were not available: everything is tested with
synthetic directories, and against lerobot with random weights (``make test-lerobot``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_ppo.core.errors import one_line, show
from embodied_ppo.core.types import ConfigError
from embodied_ppo.models.checkpoint_files import (
    LOCAL,
    check_finite,
    config_errors,
    import_transformers,
    read_json,
)
from embodied_ppo.models.vla.pi0_files import (
    Published,
    Statistics,
    check_numbers,
    check_shapes,
    parameter_name,
    statistics,
)

CURE = "name one of X-VLA (hf download lerobot/xvla-base --local-dir DIR)"
TYPE = "xvla"
"""Type in lerobot's config.json."""
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_proprio": (True,),
    "pad_language_to": ("max_length",),
    "tokenizer_padding_side": ("right", "left"),
    "use_hetero_proj": (False,),
}
"""Values of lerobot's options that are read here; the first one is its default."""
SIZES = {"chunk_size": 32, "max_state_dim": 32, "max_action_dim": 20, "tokenizer_max_length": 64}
SIZES |= {"hidden_size": 1024, "depth": 24, "num_heads": 16, "num_domains": 30}
SIZES |= {"len_soft_prompts": 32, "dim_time": 32, "max_len_seq": 512}
"""lerobot's defaults of the fields of config.json that are whole numbers."""
SMALLEST = {"len_soft_prompts": 0}
LARGEST_SIZE = 10**6
DOMAIN_STEP = "xvla_add_domain_id"
"""Step of policy_preprocessor.json that sets the domain; without one it is 0."""
TRANSPOSED = "image_projection"
"""Weight that Microsoft's Florence-2 stores transposed, at the end of its name."""


class ActionSpace(NamedTuple):
    """Meaning of the numbers of a predicted action.

    Attributes:
        size: Numbers, N; None: max_action_dim of config.json.
        grippers: Numbers that are logits of an open or closed gripper. The model does not read
            them, in noisy actions or in the state.
    """

    size: int | None
    grippers: tuple[int, ...] = ()


ACTION_SPACES = {
    "ee6d": ActionSpace(20, (9, 19)),
    "joint": ActionSpace(14, (6, 13)),
    "agibot_ee6d": ActionSpace(20),
    "franka_joint7": ActionSpace(20),
    "auto": ActionSpace(None),
}
"""Values of lerobot's ``action_mode`` that are read here; the first one is its default."""

_BLOCK = r"^(model\.vlm\.vision_tower\.blocks\.\d+\.\d+\.\w+_block\.)"
PARAMETERS = (
    (r"^(model\.vlm\.vision_tower\.convs\.\d+\.)proj\.", r"\1conv."),
    (_BLOCK + r"(conv[12])\.fn\.dw\.", r"\1\2."),
    (_BLOCK + r"(window|channel)_attn\.norm\.", r"\1norm1."),
    (_BLOCK + r"(window|channel)_attn\.fn\.", r"\1\2_attn."),
    (_BLOCK + r"ffn\.norm\.", r"\1norm2."),
    (_BLOCK + r"ffn\.fn\.net\.", r"\1ffn."),
    (r"^model\.vlm\.image_proj_norm\.", "trunk.vlm.multi_modal_projector.image_proj_norm."),
    (r"^model\.vlm\.image_pos_embed\.", "trunk.vlm.multi_modal_projector.image_position_embed."),
    (r"^model\.vlm\.image_projection$", "trunk.vlm.multi_modal_projector.image_projection.weight"),
    (r"^model\.vlm\.language_model\.(model\.)?encoder\.", "trunk.vlm.language_model."),
    (r"^model\.vlm\.language_model\.(model\.)?shared\.", "trunk.vlm.language_model.embed_tokens."),
    (r"^model\.vlm\.", "trunk.vlm."),
    (r"^model\.transformer\.action_encoder\.", "embed."),
    (r"^model\.transformer\.action_decoder\.", "velocity."),
    (r"^model\.transformer\.", "expert."),
)
"""Substitutions, in order, that map lerobot's name of a weight to that of the parameter of
``xvla.XVLA``; those above ``trunk`` rename Microsoft's Florence-2.
"""
MODULES = (
    (r"^trunk\.vlm\.language_model\.", "model.vlm.language_model.encoder."),
    (r"^expert\.", "model.transformer."),
    (r"^embed\.", "model.transformer.action_encoder."),
    (r"^velocity\.", "model.transformer.action_decoder."),
)
"""Substitutions that map names of ``xvla.XVLA`` to those of lerobot's modules."""
UNUSED = ("final_logits_bias", "lm_head", ".decoder.", "visual_temporal_embed", "normalize_")
"""Parts of the names of weights that are not read: constants, and parts that no layer uses."""


# ---------------------------------------------------------------------------------------- the model
class Florence(nn.Module):
    """The parts of Florence-2 that X-VLA uses; attributes have the names that ``pi0`` reads."""

    def __init__(self, config: Any, side: tuple[int, int] | None) -> None:
        """Build the parts with random weights.

        Args:
            config: transformers' Florence2Config.
            side: Height and width of the model's images; None: those of the cameras.
        """
        from transformers.models.bart.modeling_bart import BartEncoder
        from transformers.models.florence2 import modeling_florence2

        super().__init__()
        self.config = SimpleNamespace(
            text_config=SimpleNamespace(hidden_size=config.text_config.d_model),
            vision_config=SimpleNamespace(image_size=max(side or (1, 1))),
        )
        self.vision_tower = modeling_florence2.Florence2VisionBackbone(config.vision_config)
        self.multi_modal_projector = modeling_florence2.Florence2MultiModalProjector(config)
        self.language_model = BartEncoder(config.text_config)


class DomainLinear(nn.Module):
    """Linear layers of all domains; one is used. The names are keys of checkpoints."""

    def __init__(self, inputs: int, outputs: int, domains: int) -> None:
        """Build the layers from ``inputs`` to ``outputs`` numbers."""
        super().__init__()
        self.fc = nn.Embedding(domains, outputs * inputs)
        self.bias = nn.Embedding(domains, outputs)

    def forward(self, x: Tensor, domain: Tensor) -> Tensor:
        """Map x [B, Q, I] to [B, Q, O] with the layer of ``domain``, int64 []."""
        bias = self.bias(domain)
        return x @ self.fc(domain).view(x.shape[-1], len(bias)) + bias


class Block(nn.Module):
    """Transformer block with layer norms before attention and MLP."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        """Build the layers; their names are keys of checkpoints."""
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn: Any = nn.Module()
        self.mlp: Any = nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block; all tokens of x [B, Q, D] attend to each other."""
        attention, mlp = self.attn, self.mlp
        q, k, v = attention.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        h = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + attention.proj(h.transpose(1, 2).flatten(2))
        return x + mlp.fc2(F.gelu(mlp.fc1(self.norm2(x)), approximate="tanh"))


class ActionTransformer(nn.Module):
    """X-VLA's transformer over noisy actions, visual tokens, words and soft prompts."""

    def __init__(self, raw: Mapping[str, Any], features: int) -> None:
        """Build the layers; their names are keys of checkpoints.

        Args:
            raw: config.json with all fields of SIZES.
            features: Width of Florence-2's outputs.
        """
        super().__init__()
        width, inner = raw["hidden_size"], int(raw["hidden_size"] * raw.get("mlp_ratio", 4.0))
        self.blocks = nn.ModuleList(
            Block(width, raw["num_heads"], inner) for _ in range(raw["depth"])
        )
        self.vlm_proj = nn.Linear(features, width)
        self.aux_visual_proj = nn.Linear(features, width)
        self.pos_emb = nn.Parameter(torch.zeros(1, raw["max_len_seq"], width))
        self.norm = nn.LayerNorm(width)
        self.soft_prompt_hub: nn.Embedding | None = None
        if raw["len_soft_prompts"]:
            self.soft_prompt_hub = nn.Embedding(raw["num_domains"], raw["len_soft_prompts"] * width)


class Model(nn.Module):
    """All weights, with the attributes that ``pi0.PI0`` reads from transformers' model."""

    def __init__(self, raw: Mapping[str, Any], domain: int) -> None:
        """Build the model with random weights.

        Args:
            raw: lerobot's config.json.
            domain: Index of the domain.
        """
        super().__init__()
        raw = {**SIZES, **raw}
        config, space = florence_config(raw), ACTION_SPACES[raw.get("action_mode", "ee6d")]
        size = space.size or raw["max_action_dim"]
        side = raw.get("resize_imgs_with_padding")
        cameras = [name for name, x in _inputs(raw).items() if x.get("type") == "VISUAL"]
        features, width = config.vision_config.projection_dim, raw["hidden_size"]
        self.config = SimpleNamespace(
            chunk_size=raw["chunk_size"],
            max_state_dim=raw["max_state_dim"],
            max_action_dim=size,
            min_period=1.0,
            max_period=1.0,
            vlm_config=SimpleNamespace(text_config=SimpleNamespace(hidden_size=features)),
            dit_config=SimpleNamespace(hidden_size=width),
            grippers=space.grippers,
            domain=domain,
            dim_time=raw["dim_time"],
            side=None if side is None else tuple(side),
            views=max(raw.get("num_image_views") or 0, len(cameras) + raw.get("empty_cameras", 0)),
            words=raw["tokenizer_max_length"],
        )
        self.model = nn.Module()
        self.model.vlm = Florence(config, self.config.side)
        self.model.dit = ActionTransformer(raw, features)
        domains = raw["num_domains"]
        self.embed_action_time = DomainLinear(
            size + raw["dim_time"] + raw["max_state_dim"], width, domains
        )
        self.action_out_proj = DomainLinear(width, size, domains)


def policy_name(name: str) -> str:
    """Return the name in ``xvla.XVLA`` for that of a weight of ``Model``."""
    for ours, theirs in (
        ("model.vlm.", "trunk.vlm."),
        ("model.dit.", "expert."),
        ("embed_action_time.", "embed."),
        ("action_out_proj.", "velocity."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


# ------------------------------------------------------------------------------------ configuration
def florence_config(raw: Mapping[str, Any]) -> Any:
    """Return transformers' Florence2Config without dropout.

    Args:
        raw: lerobot's config.json; its ``florence_config`` has the fields of transformers or those
            of Microsoft's code.
    """
    transformers = import_transformers("model.checkpoint", "Florence2Config", version="5.23")
    florence = dict(raw.get("florence_config") or {})
    vision, text = dict(florence.get("vision_config") or {}), dict(florence["text_config"])
    for ours, theirs in (
        ("max_position_embeddings", ("image_pos_embed", "max_pos_embeddings")),
        ("max_temporal_embeddings", ("visual_temporal_embedding", "max_temporal_embeddings")),
    ):
        section = vision.pop(theirs[0], None)
        if section is not None:
            vision[ours] = section[theirs[1]]
    if "dim_embed" in vision:
        vision["embed_dim"] = vision.pop("dim_embed")
    for name in ("model_type", "enable_checkpoint", "image_feature_source"):
        vision.pop(name, None)
    # PPO needs equal log-probabilities whenever they are computed.
    vision["drop_path_rate"] = 0.0
    rates = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop")
    text |= dict.fromkeys(rates, 0.0) | {"model_type": "bart"}
    return transformers.Florence2Config(vision_config=vision, text_config=text)


def check_config(raw: Mapping[str, Any], label: str) -> None:
    """Check the fields of config.json.

    Args:
        raw: lerobot's config.json.
        label: Option and value, for messages.

    Raises:
        ConfigError: A field is damaged or not supported.
    """
    supported = SUPPORTED | {"action_mode": tuple(ACTION_SPACES)}
    for name, values in supported.items():
        if raw.get(name, values[0]) not in values:
            choices = " or ".join(f"{name}={show(value)}" for value in values)
            raise ConfigError(
                f"{label}: config.json has {name}={show(raw[name])}; supported is {choices}"
            )
    check_numbers(raw, label)
    for name, default in SIZES.items():
        x, smallest = raw.get(name, default), SMALLEST.get(name, 1)
        if type(x) is not int or not smallest <= x <= LARGEST_SIZE:
            raise ConfigError(
                f"{label}: config.json has {name}={show(x)}; it must be a whole number >="
                f" {smallest} and <= {LARGEST_SIZE}, download it again"
            )
    mode, states = raw.get("action_mode", "ee6d"), raw.get("max_state_dim", SIZES["max_state_dim"])
    if (last := max(ACTION_SPACES[mode].grippers, default=-1)) >= states:
        raise ConfigError(
            f"{label}: config.json has action_mode={mode} and max_state_dim={states};"
            f" action_mode={mode} needs states of {last + 1} numbers or more"
        )


def _inputs(raw: Mapping[str, Any]) -> dict[str, Any]:
    return raw.get("input_features") or {}


def read_domain(folder: Path, domains: int) -> int:
    """Return the domain that lerobot's preprocessor sets.

    Raises:
        ConfigError: The file is damaged, or the model has fewer domains.
    """
    file = folder / "policy_preprocessor.json"
    if not file.is_file():
        return 0
    label = f"model.checkpoint={folder}"
    steps = read_json(file, label, CURE).get("steps") or []
    with config_errors(f"{label}: {file.name} cannot be read: ", "; download it again", kind=True):
        domain = next(
            (
                int((step.get("config") or {}).get("domain_id", 0))
                for step in steps
                if step.get("registry_name") == DOMAIN_STEP
            ),
            0,
        )
    if not 0 <= domain < domains:
        raise ConfigError(
            f"{label}: {file.name} has domain_id={domain}, the model num_domains = {domains}; use"
            " the files of one model"
        )
    return domain


# --------------------------------------------------------------------------------------- directory
def read(folder: str | Path) -> Published:
    """Read a checkpoint directory.

    Raises:
        ConfigError: A file is missing or damaged, or an option of the model is not supported.
    """
    folder = Path(folder)
    label = f"model.checkpoint={folder}"
    raw = read_json(folder / "config.json", label, CURE)
    check_config(raw, label)
    domain = read_domain(folder, raw.get("num_domains", SIZES["num_domains"]))
    with config_errors(f"{label}: config.json is refused: ", kind=True):
        with torch.device("meta"):
            empty = Model(raw, domain)
        sizes = {policy_name(name): tuple(x.shape) for name, x in empty.state_dict().items()}
        check_shapes(folder, sizes, lambda key: _name(key) if not is_transposed(key) else None)
        model = Model(raw, domain)
    _load(model, folder, label)
    mapping = {"STATE": "IDENTITY", "ACTION": "IDENTITY"} | (raw.get("normalization_mapping") or {})
    state, action = statistics(folder, {**raw, "normalization_mapping": mapping})
    if mapping["STATE"] == "IDENTITY":  # the model reads the robot's units
        state = Statistics(
            *(fill(model.config.max_state_dim) for fill in (torch.zeros, torch.ones))
        )
    return Published(model, _tokenizer(folder, raw), state, action, antialias=False)


def _name(key: str) -> str:
    return parameter_name(key, PARAMETERS)


def is_transposed(key: str) -> bool:
    """Return whether a weight of a file is the transpose of ours."""
    return key.endswith(f".{TRANSPOSED}")


def _load(model: Model, folder: Path, label: str) -> None:
    """Copy the weights of a directory into the model."""
    from safetensors import SafetensorError, safe_open

    state = {policy_name(name): x for name, x in model.state_dict().items()}
    files = [f for f in sorted(folder.glob("*.safetensors")) if "processor" not in f.name]
    if not files:
        raise ConfigError(f"{label}: holds no weights (model.safetensors); download it completely")
    published, unknown = dict[str, str](), []
    try:
        for file in files:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    if (name := _name(key)) in state:
                        x = tensors.get_tensor(key)
                        state[name].copy_(x.T if is_transposed(key) else x)
                        published[name] = key
                    elif not any(part in key for part in UNUSED):
                        unknown.append(key)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"{label}: the weights cannot be read: {one_line(error)}; download them again"
        ) from error
    missing = [name for name in state if name not in published and not _is_constant(name)]
    for problem, keys in (("lack", missing), ("have an unknown", unknown)):
        if keys:
            raise ConfigError(
                f"{label}: the weights {problem} {min(keys)} ({len(keys)} in all); they are of"
                " another model, or incomplete"
            )
    check_finite(((key, state[name]) for name, key in published.items()), label)


def _is_constant(name: str) -> bool:
    return re.search(r"visual_temporal_embed\.", name) is not None


def _tokenizer(folder: Path, raw: Mapping[str, Any]) -> Callable[[str], Sequence[int]]:
    """Return the tokenizer of a directory: sentence -> ids, padded to tokenizer_max_length.

    X-VLA attends to the padding.
    """
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.checkpoint={folder}: holds no tokenizer; copy tokenizer.json and"
            " tokenizer_config.json of facebook/bart-large into it"
        )
    transformers = import_transformers("model.checkpoint", "AutoTokenizer", version="5.23")
    with config_errors(f"model.checkpoint={folder}: its tokenizer cannot be read: "):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    options = {
        "max_length": raw.get("tokenizer_max_length", SIZES["tokenizer_max_length"]),
        "padding_side": raw.get("tokenizer_padding_side", "right"),
        "padding": "max_length",
        "truncation": True,
    }
    return lambda sentence: tokenizer(sentence, **options).input_ids
