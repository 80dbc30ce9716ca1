"""OpenVLA's files: action bins, prompts, statistics, and checkpoints of the published layout.

All weights are random, because published ones were not available. This file has its own list of the
names and shapes of a checkpoint, so that ``entries`` is not compared with itself.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from run_helpers import options
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied_envs.base.errors import ConfigError
from embodied_ppo.policies.checkpoint_files import load_tokenizer
from embodied_ppo.policies.vla import openvla, openvla_files, published_weights
from embodied_ppo.policies.vla.openvla import OpenVLABody
from embodied_ppo.policies.vla.openvla_files import ActionTokens
from tests.policies.vla.test_openvla import CONFIG, STATS, P


# ------------------------------------------------------------------------------------------ actions
def test_bins_by_hand() -> None:
    """The 256 edges are -1 + 2k/255.

    x = 0 lies between e_127 = -1/255 and e_128 = 1/255, in bin 127 with the centre 0; the published
    code has np.digitize = 128 and id 32000 - 128 = 31999 - 127 = 31872. x = -1 has 1 and id 31999
    (bin 0, centre -254/255). x = 1 has 256 and id 31744 (bin 255) with the centre of bin 254.
    """
    tokens = ActionTokens.from_config(CONFIG)
    assert len(tokens.low) == 3
    # The third dimension is not normalised.
    gripper = torch.tensor([[0.0, 0.0, x] for x in (-1.0, 0.0, 0.999, 1.0, 5.0)])
    k = tokens.bins(gripper)[:, 2]
    assert k.tolist() == [0, 127, 254, 255, 255]
    assert (31999 - k).tolist() == [31999, 31872, 31745, 31744, 31744]
    centers = torch.tensor([-254, 0, 254, 254, 254], dtype=torch.float64) / 255
    torch.testing.assert_close(tokens.values(k), centers, rtol=0, atol=1e-12)


def test_unnormalisation_by_hand() -> None:
    """½ (254/255 + 1) (2 - -2) - 2 = 1.9921569 and ½ (-254/255 + 1) (1 - 0) + 0 = 1/510.

    The third dimension is not normalised.
    """
    tokens = ActionTokens.from_config(CONFIG, "bridge_orig")
    action = tokens.unscaled(tokens.values(torch.tensor([254, 0, 254], dtype=torch.uint8)))
    assert action.dtype == torch.float32
    torch.testing.assert_close(
        action, torch.tensor([1.9921569, 0.0019608, 0.9960784]), rtol=0, atol=1e-6
    )
    assert tokens.bins(action).tolist() == [254, 0, 254]
    # 2 (1 - -2) / 4 - 1 = ½, 127.5 · ½ + 127.5 = 191.25; 2 · ¼ - 1 = -½, 127.5 - 63.75 = 63.75;
    # outside: clipped
    assert tokens.bins(torch.tensor([1.0, 0.25, -3.0])).tolist() == [191, 63, 0]


def test_bins_agree_with_the_published_code() -> None:
    """The published code uses numpy's linspace and digitize; only the last bin is not restored."""
    tokens = ActionTokens.from_config(CONFIG)
    edges = np.linspace(-1, 1, 256)
    assert np.array_equal(tokens.edges.numpy(), edges)
    x = np.random.default_rng(0).uniform(-1.1, 1.1, (5000, 3))
    action = torch.from_numpy(x * [2, 0.5, 1] + [0, 0.5, 0])
    assert np.array_equal(
        31999 - tokens.bins(action)[:, 2].numpy(), 32000 - np.digitize(x.clip(-1, 1), edges)[:, 2]
    )
    every = torch.arange(256).unsqueeze(1).expand(-1, 3)
    assert torch.equal(tokens.bins(tokens.unscaled(tokens.values(every))), every.clamp_max(254))


@pytest.mark.parametrize(
    ("stats", "key", "message"),
    [
        ({"a": {"action": STATS}, "b": {"action": STATS}}, None, "unnorm_key.*a, b"),
        ({"bridge_orig": {"action": STATS}}, "bridge_org", "bridge_org.*bridge_orig"),
        ({"a": {"action": {"mean": [0.0]}}}, "a", "q01.*mean"),
        ({"a": {"action": STATS | {"q99": [math.nan, 1.0, 1.0]}}}, "a", "finite"),
    ],
)
def test_invalid_statistics_are_refused(
    stats: dict[str, Any], key: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ActionTokens.from_config(replace(CONFIG, norm_stats=stats), key)


# ------------------------------------------------------------------------------------------- prompt
def test_prompts() -> None:
    texts = []

    def tokenize(text: str) -> list[int]:
        texts.append(text)
        return [
            1,
            *(300 + len(word) for word in text.split()),
            *([29871] if "cube" in text else []),
        ]

    ids, mask = openvla.encode_prompts(tokenize, ["Lift the CUBE", "push"], pad=32000)
    assert texts[0] == "In: What action should the robot take to lift the cube?\nOut:"
    assert ids.shape == mask.shape == (2, 14) and ids.dtype == torch.int64
    assert ids[0].tolist()[0] == 1 and mask[0].all()
    assert (
        ids[1].tolist()[:3] == [32000, 32000, 1] and mask[1].tolist() == [False] * 2 + [True] * 12
    )
    assert ids[:, -1].tolist() == [29871, 29871] and (ids == 29871).sum() == 2  # once per row


# --------------------------------------------------------------------------------------- checkpoint
def with_biases(key: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights and of their biases."""
    weights = {f"{key}.{name}.weight": shape for name, shape in shapes.items()}
    return weights | {f"{key}.{name}.bias": shape[:1] for name, shape in shapes.items()}


def tower_shapes(key: str, size: int, inner: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes that both vision transformers of timm have."""
    shapes: dict[str, tuple[int, ...]] = {f"{key}.pos_embed": (1, P, size)}
    shapes |= with_biases(key, {"patch_embed.proj": (size, 3, 7, 7), "norm": (size,)})
    block = {"attn.qkv": (3 * size, size), "attn.proj": (size, size)}
    block |= {"mlp.fc1": (inner, size), "mlp.fc2": (size, inner)}
    for i in range(layers):
        shapes |= with_biases(f"{key}.blocks.{i}", {**block, "norm1": (size,), "norm2": (size,)})
    return shapes


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of every published key, in the sizes of CONFIG."""
    dino, siglip = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
    shapes = tower_shapes(dino, 16, 64, 3) | tower_shapes(siglip, 24, 40, 4)
    shapes |= {f"{dino}.cls_token": (1, 1, 16), f"{dino}.reg_token": (1, 4, 16)}
    shapes |= {f"{dino}.blocks.{i}.ls{n}.scale_factor": (16,) for i in range(3) for n in (1, 2)}
    shapes |= {f"{siglip}.attn_pool.latent": (1, 1, 24)}
    pool = {"q": (24, 24), "kv": (48, 24), "proj": (24, 24), "norm": (24,)}
    pool |= {"mlp.fc1": (40, 24), "mlp.fc2": (24, 40)}
    shapes |= with_biases(f"{siglip}.attn_pool", pool)
    shapes |= with_biases("projector", {"fc1": (160, 40), "fc2": (32, 160), "fc3": (32, 32)})
    llama = "language_model.model"
    shapes |= {f"{llama}.embed_tokens.weight": (32064, 32), f"{llama}.norm.weight": (32,)}
    shapes |= {"language_model.lm_head.weight": (32064, 32)}
    attention = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    mlp = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    for i in range(3):
        layer = f"{llama}.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}.weight": x for name, x in attention.items()}
        shapes |= {f"{layer}.mlp.{name}.weight": x for name, x in mlp.items()}
        shapes |= {f"{layer}.{x}_layernorm.weight": (32,) for x in ("input", "post_attention")}
    return shapes


def synthetic(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {key: torch.randn(shape, generator=g) * 0.3 for key, shape in published_shapes().items()}


def config_json() -> dict[str, Any]:
    """Return the fields of openvla-7b, with other sizes in our field vision_sizes."""
    return options("""arch_specifier=no-align+fused-gelu-mlp
        architectures=[OpenVLAForActionPrediction] hf_llm_id=meta-llama/Llama-2-7b-hf
        image_resize_strategy=resize-naive image_sizes=[224,224]
        llm_backbone_id=llama2-7b-pure llm_max_length=2048 model_type=openvla
        n_action_bins=256 output_projector_states=false pad_to_multiple_of=64
        pad_token_id=32000
        timm_model_ids=[vit_large_patch14_reg4_dinov2.lvd142m,vit_so400m_patch14_siglip_224]
        torch_dtype=bfloat16 use_fused_vision_backbone=true
        vision_backbone_id=dinosiglip-vit-so-224px""") | {
        "auto_map": {"AutoConfig": "configuration_prismatic.OpenVLAConfig"},
        "norm_stats": {"bridge_orig": {"action": STATS}},
        "text_config": {"model_type": "llama", "torch_dtype": "bfloat16", **CONFIG.text},
        "vision_sizes": {"dino": CONFIG.dino, "siglip": CONFIG.siglip, "image_size": 28},
    }


def checkpoint(folder: Path, tensors: dict[str, Tensor] | None = None, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json() | fields))
    save_file(
        synthetic() if tensors is None else tensors,
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def timm_block(x: Tensor, t: dict[str, Tensor], block: str, heads: int) -> Tensor:
    """Compute timm's layer: x += ls1·attention(norm1 x); x += ls2·mlp(norm2 x)."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, t[f"{block}.{name}.weight"], t[f"{block}.{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(
            x, x.shape[-1:], t[f"{block}.{name}.weight"], t[f"{block}.{name}.bias"], 1e-6
        )

    n, size = x.shape[-2:]
    q, k, v = (
        linear("attn.qkv", norm("norm1", x)).view(len(x), n, 3, heads, -1).permute(2, 0, 3, 1, 4)
    )
    p = (q @ k.transpose(-1, -2) * (size // heads) ** -0.5).softmax(-1)
    h = linear("attn.proj", (p @ v).transpose(1, 2).flatten(2))
    x = x + h * t.get(f"{block}.ls1.scale_factor", 1.0)
    h = linear("mlp.fc2", F.gelu(linear("mlp.fc1", norm("norm2", x))))
    return x + h * t.get(f"{block}.ls2.scale_factor", 1.0)


@torch.no_grad()
def test_loaded_towers_agree_with_timm(tmp_path) -> None:
    """Compute the towers from published tensors, with class and register tokens first."""
    body, t = openvla_files.load(checkpoint(tmp_path)), synthetic()
    pixels = torch.randn(2, 6, 28, 28, generator=torch.Generator().manual_seed(3))
    features = []
    for key, x, heads, blocks in (
        ("featurizer", pixels[:, :3], 2, 3),
        ("fused_featurizer", pixels[:, 3:], 3, 4),
    ):
        key = f"vision_backbone.{key}"
        x = F.conv2d(
            x, t[f"{key}.patch_embed.proj.weight"], t[f"{key}.patch_embed.proj.bias"], stride=7
        )
        x = x.flatten(2).transpose(1, 2) + t[f"{key}.pos_embed"]
        if key.endswith(".featurizer"):
            first = [t[f"{key}.{name}_token"].expand(2, -1, -1) for name in ("cls", "reg")]
            x = torch.cat((*first, x), dim=1)
        for i in range(blocks - 1):
            x = timm_block(x, t, f"{key}.blocks.{i}", heads)
        features.append(x[:, -P:])
    torch.testing.assert_close(
        body.features(pixels), torch.cat(features, dim=-1), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip(tmp_path, dtype: torch.dtype) -> None:
    """Loading and saving keeps keys, bits and the other files."""
    tensors = {key: value.to(dtype) for key, value in synthetic().items()}
    source, written = checkpoint(tmp_path / "a", tensors), tmp_path / "b"
    entries = openvla_files.entries(openvla_files.load(source, dtype=dtype))
    published_weights.save(entries, source, written, openvla_files.rename)
    again = load_file(tmp_path / "b" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(again[k].dtype == dtype and torch.equal(again[k], tensors[k]) for k in tensors)
    assert json.loads((written / "config.json").read_text()) == config_json()
    assert {file.name for file in written.iterdir()} == {"config.json", "model.safetensors"}


def test_published_configuration_and_sizes() -> None:
    """openvla-7b has 256 patches of 14 pixels."""
    raw = config_json() | {
        "text_config": {"model_type": "llama", "pad_token_id": 32000, "vocab_size": 32064}
    }
    del raw["vision_sizes"]
    config = openvla_files.read_config(raw)
    assert config.grid**2 == 256 and config.vocab_size == 32000
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    assert [config.dino[name] for name in names] == [1024, 24, 16]
    assert [config.siglip[name] for name in names] == [1152, 27, 16]
    assert config.siglip["intermediate_size"] == 4304
    with torch.device("meta"):
        body = OpenVLABody(config)
    keys = [key for key in openvla_files.entries(body) if not key.startswith("language_model.")]
    assert len(keys) == 6 + 7 + 24 * 14 + 5 + 27 * 12 + 13
    assert sum(p.numel() for p in body.parameters()) == 7_541_237_184 + 1024


def test_shards_and_timm_names_of_layer_scales(tmp_path) -> None:
    """The index names the files; in timm ``scale_factor`` is called ``gamma``."""
    tensors = {key.replace("scale_factor", "gamma"): value for key, value in synthetic().items()}
    names = sorted(tensors)
    (tmp_path / "config.json").write_text(json.dumps(config_json()))
    file_of_key = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(file_of_key.values()):
        save_file(
            {name: tensors[name] for name in names if file_of_key[name] == file}, tmp_path / file
        )
    index = {"metadata": {}, "weight_map": file_of_key}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = openvla_files.load(tmp_path).state_dict()
    expected = openvla_files.load(checkpoint(tmp_path / "one")).state_dict()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00002"):
        openvla_files.load(tmp_path)


def test_shards_outside_the_folder_are_refused(tmp_path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(synthetic(), tmp_path / "outside.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json()))
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        index = {"metadata": {}, "weight_map": dict.fromkeys(synthetic(), name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ConfigError, match="outside"):
            openvla_files.load(folder)


def test_statistics_and_means_of_own_files_override_those_of_the_config(tmp_path) -> None:
    """White is (1 - mean) / std; openvla-7b's means and deviations are rounded to bfloat16."""
    means, stds = (0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375)
    side = CONFIG.image_size
    fields = {
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, side, side]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": [means, (0.25, 0.5, 0.5)],
        "stds": [stds, (0.5, 0.5, 0.25)],
    }
    file = checkpoint(tmp_path) / "preprocessor_config.json"
    file.write_text(json.dumps(fields))
    statistics = {"bridge_orig": {"action": STATS | {"q99": [9.0, 9.0, 9.0]}}}
    statistics["libero_spatial"] = {"action": STATS}
    (tmp_path / "dataset_statistics.json").write_text(json.dumps(statistics))
    body = openvla_files.load(tmp_path)
    assert body.config.norm_stats == statistics
    white = body.pixels(torch.full((1, 3, side, side), 255, dtype=torch.uint8))[0, :, 0, 0]
    expected = [(1 - m) / s for m, s in zip(means, stds, strict=True)] + [1.5, 1.0, 2.0]
    torch.testing.assert_close(white, torch.tensor(expected))
    file.write_text(json.dumps(fields | {"image_resize_strategy": "letterbox"}))
    with pytest.raises(ConfigError, match=r"image_resize_strategy.*letterbox"):
        openvla_files.load(tmp_path)


@pytest.mark.parametrize("inside", ["", "lora_adapter"])
def test_adapters_are_added_to_the_base(tmp_path, inside: str) -> None:
    """W + alpha / r B A, or alpha / sqrt(r), on towers, projector and Llama; others are refused."""
    base, tensors = checkpoint(tmp_path / "base"), synthetic()
    folder, generator = tmp_path / "tuned", torch.Generator().manual_seed(1)
    directory = folder / inside
    directory.mkdir(parents=True)
    adapter = dict[str, Tensor]()
    keys = (
        "vision_backbone.featurizer.blocks.0.attn.qkv",
        "projector.fc1",
        "language_model.model.layers.2.mlp.down_proj",
    )
    for key in keys:
        out, into = tensors[f"{key}.weight"].shape
        for name, shape in (("A", (4, into)), ("B", (out, 4))):
            x = torch.randn(shape, generator=generator)
            adapter[f"base_model.model.{key}.lora_{name}.weight"] = x
    norm = "language_model.model.norm.weight"
    adapter[f"base_model.model.{norm}"] = torch.randn(32, generator=generator)
    save_file(adapter, directory / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "base_model_name_or_path": str(base)}

    def load(**changes: Any) -> dict[str, published_weights.PublishedTensor]:
        (directory / "adapter_config.json").write_text(json.dumps(fields | changes))
        return openvla_files.entries(openvla_files.load(folder))

    for rslora, scale in ((False, 1.5), (True, 3.0)):
        loaded = load(use_rslora=rslora)
        for key, x in tensors.items():
            module = f"base_model.model.{key.removesuffix('.weight')}"
            expected = x.double()
            if key.removesuffix(".weight") in keys:
                a, b = (adapter[f"{module}.lora_{name}.weight"].double() for name in "AB")
                expected = expected + scale * b @ a
            if key == norm:
                expected = adapter[f"base_model.model.{norm}"].double()
            difference = (loaded[key].write().double() - expected).abs().max()
            assert difference < 1e-5, key
    refused: tuple[dict[str, Any], ...] = (
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"alpha_pattern": {"q_proj": 8}},
        {"r": 8},
        {"r": 0},
        {"base_model_name_or_path": "openvla/openvla-7b"},
    )
    for changes in refused:
        with pytest.raises(ConfigError, match=r"adapter|base_model_name_or_path"):
            load(**changes)
    half = {key: x for key, x in adapter.items() if "fc1.lora_A" not in key}
    save_file(half, directory / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"part of projector\.fc1"):
        load()


# ------------------------------------------------------------------------------------------- errors
def without(*keys: str) -> dict[str, Tensor]:
    return {key: value for key, value in synthetic().items() if key not in keys}


DINO_BLOCK = "vision_backbone.featurizer.blocks.0"


@pytest.mark.parametrize(
    ("tensors", "fields", "message"),
    [
        (without("projector.fc3.bias"), {}, r"missing.*projector\.fc3\.bias"),
        (synthetic() | {"action_head.fc.weight": torch.zeros(2)}, {}, r"action_head\.fc\.weight"),
        (
            synthetic() | {f"{DINO_BLOCK}.attn.qkv.weight": torch.zeros(48, 15)},
            {},
            r"qkv\.weight \[48, 15\].*\[48, 16\]",
        ),
        ({}, {"vision_backbone_id": "siglip-vit-so400m"}, "vision_backbone_id=siglip-vit-so400m"),
        ({}, {"text_config": {"model_type": "mistral"}}, r"text_config\.model_type=mistral.*llama"),
        ({}, {"n_action_bins": "many"}, "many"),
    ],
)
def test_wrong_weights_and_configurations_are_refused(
    tmp_path, tensors: dict[str, Tensor], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"model\.checkpoint=\S+: .*" + message):
        openvla_files.load(checkpoint(tmp_path, tensors, **fields))


def test_invalid_directories_are_refused(tmp_path) -> None:
    def refused(text: str) -> None:
        with pytest.raises(ConfigError, match=rf"model\.checkpoint={tmp_path}.*{text}"):
            openvla_files.load(tmp_path)

    refused(r"config\.json")
    checkpoint(tmp_path)
    (tmp_path / "action_head--150000_checkpoint.pt").touch()
    refused(r"action_head.*model\.policy=gaussian")
    (tmp_path / "action_head--150000_checkpoint.pt").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    refused("SafetensorError")
    (tmp_path / "model.safetensors").unlink()
    refused(r"model\.safetensors")
    (tmp_path / "config.json").write_text("{")
    refused(r"config\.json")


def test_tokenizer_model_replaces_tokenizer_json(tmp_path, monkeypatch) -> None:
    (tmp_path / "tokenizer.model").touch()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "sentencepiece", None)
        with pytest.raises(ConfigError, match=r"pip install 'embodied-ppo\[vla\]'"):
            openvla_files.tokenizer(tmp_path)
    sentencepiece = pytest.importorskip("sentencepiece")
    with pytest.raises(ConfigError, match=r"tokenizer\.model cannot be read"):
        openvla_files.tokenizer(tmp_path)
    with open(tmp_path / "tokenizer.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([openvla.prompt("push the red block"), "lift it"] * 20),
            model_writer=file,
            vocab_size=60,
            bos_id=1,
            unk_id=0,
            hard_vocab_limit=False,
            minloglevel=2,
        )
    ids, _ = openvla.encode_prompts(openvla_files.tokenizer(tmp_path), ["push the red block"])
    words = load_tokenizer(tmp_path, "")
    assert ids[0, 0] == words.bos_token_id == 1 and ids[0, -1] == openvla.EMPTY
    text = words(openvla.prompt("push the red block"), add_special_tokens=False).input_ids
    assert ids[0, 1:-1].tolist() == text
    assert words.model.decode(words("lift it").input_ids) == "lift it"
