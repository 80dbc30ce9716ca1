"""Policies over action tokens on tiny directories of the published layout, with random weights."""

from __future__ import annotations

import copy
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import run_command
from safetensors.torch import load_file, save_file
from tiny_vlm_checkpoints import KINDS, SIDE, write_checkpoint
from torch import Tensor
from vla_policy_checks import check_evaluate_reproduces_act, random_observations

from embodied_ppo.commands import main
from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core import tree
from embodied_ppo.core.types import ArraySpec, Box, CheckpointError, ConfigError, Discrete
from embodied_ppo.models import lora
from embodied_ppo.models.vla import hf_vlm, pretrained
from embodied_ppo.models.vla.hf_vlm import VisionLanguage
from embodied_ppo.models.vla.pretrained import CheckpointVLA
from embodied_ppo.training import checkpoint

C, A, B, K = 2, 2, 5, 16
IMAGE = ArraySpec((3, SIDE, SIDE), torch.uint8)
SPEC = {"state": ArraySpec((5,)), "front": IMAGE, "instruction": ArraySpec((), torch.int64)}
SENTENCES = ("push the red block", "lift it", "reach the blue block, please")
DECODE = ("parallel", "autoregressive")
ADAPTED = {"lora_rank": 4}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a kind to its directory, which is written once."""
    root = tmp_path_factory.mktemp("published")
    return cache(lambda kind: write_checkpoint(kind, root / kind))


def policy_of(
    folder: Path, *, perturbed: bool = True, spec: Any = SPEC, **options: Any
) -> CheckpointVLA:
    unnorm = {"unnorm_key": "bridge_orig"} if folder.name == "openvla" else {}
    config = ModelConfig(
        **{"policy": "token", "checkpoint": str(folder), "bins": K, **unnorm, **options}
    )
    torch.manual_seed(0)
    box = Box((-1.0,) * (C * A), (1.0,) * (C * A))
    policy = CheckpointVLA(spec, box, config, chunk=C, sentences=SENTENCES)
    with torch.no_grad():  # new adapters and heads are zero
        for p in policy.parameters() if perturbed else ():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    return policy


def observations(rows: int = B, seed: int = 0) -> dict[str, Tensor]:
    return random_observations(SPEC, rows, seed)


def sample(policy: CheckpointVLA, inputs: dict[str, Tensor], seed: int = 1) -> Any:
    return policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(seed)))


# ----------------------------------------------------------------------------- act and evaluate
@pytest.mark.parametrize("decode", DECODE)
@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_reproduces_act_for_any_micro_batch(folders: Any, kind: str, decode: str) -> None:
    """Compare decoding with a cache and teacher forcing, for prompts of several lengths."""
    options = {"temperature": 1.5} if kind == "llava" else {}
    policy = policy_of(folders(kind), decode=decode, **options)
    inputs = policy.encode(observations())
    for d in (sample(policy, inputs), policy.act(inputs)):
        check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 2, 1))
    assert d.value.abs().max() > 0


@pytest.mark.parametrize("kind", ["paligemma", "qwen3_vl", "openvla"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("decode", DECODE)
def test_evaluate_reproduces_act_with_adapters_and_frozen_towers(
    folders: Any, kind: str, frozen: bool, decode: str
) -> None:
    policy = policy_of(folders(kind), freeze_trunk=frozen, decode=decode, **ADAPTED)
    policy.FROZEN_ROWS = 2
    inputs = policy.encode(observations())
    assert "/visual" in inputs and "/images" not in inputs
    d = sample(policy, inputs)
    for i in range(B):
        cut = slice(i, i + 1)
        out = policy.evaluate(tree.index(inputs, cut), d.action[cut], tree.index(d.replay, cut))
        assert (out.log_prob - d.log_prob[cut]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_vl", "openvla"])
def test_features_of_untrained_towers_serve_all_epochs(
    folders: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters leave the towers as they are: images are encoded once, and nothing changes."""
    policy = policy_of(folders(kind), **ADAPTED)
    kept = policy.encode(observations())
    monkeypatch.setattr(policy, "FEATURE_SHARE", 0.0)
    images = policy.encode(observations())
    assert "/images" in images and "/images" not in kept
    monkeypatch.setattr(policy, "FEATURE_SHARE", 0.25)
    monkeypatch.setattr(policy, "FROZEN_ROWS", 2)
    cut = policy.encode(observations())
    assert cut.keys() == kept.keys()
    for name, x in cut.items():
        torch.testing.assert_close(x, kept[name])
    d = sample(policy, images)
    gradients, outputs = [], []
    for inputs in (kept, images):
        policy.zero_grad()
        outputs.append(policy.evaluate(inputs, d.action, d.replay))
        (outputs[-1].log_prob.sum() + outputs[-1].value.sum()).backward()
        gradients.append([p.grad for p in policy.parameters() if p.requires_grad])
    assert torch.equal(outputs[0].log_prob, outputs[1].log_prob)
    assert torch.equal(outputs[0].value, outputs[1].value)
    for g, h in zip(*gradients, strict=True):
        assert g is not None and h is not None and torch.equal(g, h)
    monkeypatch.setattr(policy.body, "encode_images", None)  # it is not called again
    policy.evaluate(kept, d.action, d.replay)


@pytest.mark.parametrize("kind", ["qwen3_vl", "openvla"])
def test_prompts_move_with_the_policy(folders: Any, kind: str) -> None:
    """An ``encode`` on a GPU then copies no prompt to it. Checkpoints contain no prompts."""
    policy = policy_of(folders(kind), **ADAPTED)
    names = {name for name, _ in policy.trunk.named_buffers()}
    assert {"table.ids", "table.mask", "table.position"} <= names
    assert not any("table" in name for name in policy.state_dict())
    moved = policy.to("meta").trunk.table
    assert moved.ids.device.type == moved.position.device.type == "meta"


@pytest.mark.parametrize("kind", ["smolvlm", "paligemma", "qwen2_5_vl", "qwen3_vl"])
def test_teacher_forcing_agrees_with_transformers(folders: Any, kind: str) -> None:
    """Compare the hidden states with those of transformers for prompt and action words."""
    policy = policy_of(folders(kind), decode="autoregressive", perturbed=False)
    body: VisionLanguage = policy.body
    inputs, bins = (
        policy.encode(observations()),
        torch.randint(0, K, (B, C * A), generator=torch.Generator()),
    )
    ids, mask = inputs["/ids"], inputs["/mask"]
    options: dict[str, Any] = body.pixels(inputs["/images"].flatten(0, 1))
    n = C * A - 1
    if body.grid is not None:
        options["mm_token_type_ids"] = torch.nn.functional.pad((ids == body.image_id).int(), (0, n))
    if kind == "paligemma":
        options["token_type_ids"] = torch.nn.functional.pad(torch.zeros_like(ids), (0, n), value=1)
    with torch.no_grad():
        expected = body.core(
            input_ids=torch.cat((ids, body.word_ids[bins[:, :-1]]), dim=1),
            attention_mask=torch.nn.functional.pad(mask.long(), (0, n), value=1),
            **options,
        ).last_hidden_state[:, -n - 1 :]
        actual = policy.hidden(policy.encode_context(inputs), bins)
    assert (actual - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["smolvlm", "openvla"])
@pytest.mark.parametrize("decode", DECODE)
def test_actions_depend_on_images_instruction_and_earlier_tokens(
    folders: Any, kind: str, decode: str
) -> None:
    """The state is not an input; earlier tokens are one in autoregressive decoding only."""
    policy, obs = policy_of(folders(kind), decode=decode), observations()
    d = sample(policy, policy.encode(obs))
    base = policy.evaluate(policy.encode(obs), d.action, d.replay).log_prob
    for name in obs:
        other = obs | {name: (obs[name] + 1) % 3 if name == "instruction" else obs[name].flip(-1)}
        changed = policy.evaluate(policy.encode(other), d.action, d.replay).log_prob - base
        assert (changed.abs().max() > 1e-4) == (name != "state"), name
    bins = d.replay["bins"].clone()
    bins[:, 0, 1] = (bins[:, 0, 1] + 1) % K
    changed = policy.evaluate(policy.encode(obs), d.action, {"bins": bins}).log_prob - base
    assert changed[:, 0, 0].abs().max() < 1e-6
    assert (changed[:, 1].abs().max() > 1e-5) == (decode == "autoregressive")


# ------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("kind", ["smolvlm", "paligemma", "openvla"])
@pytest.mark.parametrize(
    "options", [{}, {"freeze_trunk": True}, ADAPTED, ADAPTED | {"dtype": "bfloat16"}], ids=str
)
def test_parameter_groups_are_disjoint_and_complete(
    folders: Any, kind: str, options: dict[str, Any]
) -> None:
    policy = policy_of(folders(kind), **options)
    groups = policy.parameter_groups()
    ids = [id(p) for group in groups.values() for p in group]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in policy.parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for group in groups.values() for p in group)
    frozen = [p for p in policy.parameters() if not p.requires_grad and p.is_floating_point()]
    assert all(p.dtype == getattr(torch, options.get("dtype", "float32")) for p in frozen)
    names = {
        name
        for name, p in policy.named_parameters()
        if p.requires_grad and not name.startswith("value_head")
    }
    if "lora_rank" in options:
        assert all("lora_" in name or name in ("body.head", "body.query") for name in names)
        assert (
            len([name for name in names if "lora_" in name]) == 2 * 2 * 7
        )  # layers x (A, B) x linear layers
    vision = {id(p) for p in policy.body.vision_parameters()}
    assert bool(vision & set(ids)) == (not options)
    inputs = policy.encode(observations())
    d = sample(policy, inputs)
    out = policy.evaluate(inputs, d.action, d.replay)
    (out.log_prob.sum() + out.value.sum()).backward()
    without_gradient = {name for name in names if policy.get_parameter(name).grad is None}
    assert all(
        ".vision_tower." in name for name in without_gradient
    )  # SigLIP's pooling, which PaliGemma does not read


def test_bfloat16_log_probabilities_are_float32_and_close(folders: Any) -> None:
    exact, rounded = policy_of(folders("smolvlm")), policy_of(folders("smolvlm"), dtype="bfloat16")
    inputs = exact.encode(observations())
    d = sample(exact, inputs)
    out = rounded.evaluate(inputs, d.action, d.replay)
    assert out.log_prob.dtype == out.value.dtype == torch.float32
    assert 0 < (out.log_prob - d.log_prob).abs().max() < 0.2
    out.log_prob.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in rounded.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smolvlm", "openvla"])
@pytest.mark.parametrize("options", [{}, ADAPTED], ids=str)
def test_recomputed_layers_give_equal_gradients_and_store_less(
    folders: Any, kind: str, options: dict[str, Any]
) -> None:
    grads, stored = [], []
    for recompute in (False, True):
        policy = policy_of(folders(kind), gradient_checkpointing=recompute, **options)
        inputs = policy.encode(observations())
        d = sample(policy, inputs)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, s=saved: s.append(x.numel()) or x, lambda x: x
        ):
            out = policy.evaluate(inputs, d.action, d.replay)
        stored.append(sum(saved))
        out.log_prob.sum().backward()
        grads.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
        assert not any(
            module.training for module in policy.modules() if isinstance(module, torch.nn.Dropout)
        )
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad)
    assert stored[1] < 0.7 * stored[0]


def test_copies_share_frozen_parameters(folders: Any) -> None:
    policy = policy_of(folders("smolvlm"), **ADAPTED)
    other = copy.deepcopy(policy)
    for (name, p), q in zip(policy.named_parameters(), other.parameters(), strict=True):
        assert (p is q) != p.requires_grad, name
    inputs = policy.encode(observations())
    before = other.act(inputs).log_prob
    with torch.no_grad():
        policy.body.head.add_(1.0 * torch.randn_like(policy.body.head))
    assert torch.equal(other.act(inputs).log_prob, before) and not torch.equal(
        policy.act(inputs).log_prob, before
    )


@pytest.mark.parametrize("options", [{}, ADAPTED], ids=str)
def test_cloning_approaches_the_demonstrations(folders: Any, options: dict[str, Any]) -> None:
    policy = policy_of(folders("smolvlm"), perturbed=False, decode="autoregressive", **options)
    inputs = policy.encode(observations())
    action, executed = torch.rand(B, C, A) * 2 - 1, torch.ones(B, C, dtype=torch.bool)
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss, grounding = policy.bc_loss(inputs, action, executed)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert (
        grounding is not None and grounding.focus.shape == (B, 32) and losses[-1] < 0.3 * losses[0]
    )
    assert (policy.act(inputs).action.view(B, C, A) - action).abs().mean() < 0.2


# ----------------------------------------------------------------------------------- checkpoints
@pytest.mark.parametrize("kind", ["smolvlm", "paligemma", "openvla"])
@pytest.mark.parametrize("options", [{}, ADAPTED], ids=str)
def test_checkpoint_holds_trained_parameters(
    folders: Any, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    policy, other = (
        policy_of(folders(kind), **options),
        policy_of(folders(kind), perturbed=False, **options),
    )
    state = policy.state_dict()
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    if options:
        assert set(state) == names | {lora.BASE}
    else:
        assert set(state) >= names and lora.BASE not in state
    torch.save(state, tmp_path / "policy.pt")
    checkpoint.load_weights(
        other, torch.load(tmp_path / "policy.pt", weights_only=True), "policy.pt"
    )
    inputs = policy.encode(observations())
    assert torch.equal(sample(policy, inputs).log_prob, sample(other, inputs).log_prob)


def test_adapters_of_other_base_weights_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint("smolvlm", tmp_path / "smolvlm")
    policy = policy_of(folder, **ADAPTED)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"note": "another"}))
    other = policy_of(folder, **ADAPTED)
    with pytest.raises(
        CheckpointError,
        match=r"model.checkpoint=\S+smolvlm: its digest is [0-9a-f]{12}\.\., the one",
    ):
        checkpoint.load_weights(other, policy.state_dict(), "policy.pt")
    with pytest.raises(CheckpointError, match=r"lora_A.*this model needs \(2, 32\)"):
        checkpoint.load_weights(policy_of(folder, lora_rank=2), policy.state_dict(), "policy.pt")
    with pytest.raises(CheckpointError, match=r"has no tensor '\S+lora_A.default.weight'"):
        checkpoint.load_weights(other, policy_of(folder).state_dict(), "policy.pt")


@pytest.mark.parametrize("kind", ["smolvlm", "paligemma", "qwen3_vl", "openvla"])
@pytest.mark.parametrize("options", [{}, ADAPTED], ids=str)
def test_exported_directory_gives_equal_log_probabilities(
    folders: Any, kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Export merges adapters and writes the action words into the vocabulary."""
    policy = policy_of(folders(kind), decode="autoregressive", **options)
    inputs = policy.encode(observations())
    d = sample(policy, inputs)
    pretrained.export(policy, folders(kind), tmp_path / kind)
    again = policy_of(tmp_path / kind, decode="autoregressive", perturbed=False)
    out = again.evaluate(again.encode(observations()), d.action, d.replay)
    # PaliGemma's embedding is its head, so its rows are those of the head.
    assert (out.log_prob - d.log_prob).abs().max() < 1e-4


@pytest.mark.parametrize("decode", DECODE)
@pytest.mark.parametrize("options", [{}, {"freeze_trunk": True}, ADAPTED], ids=str)
def test_openvla_is_written_in_its_own_layout(
    folders: Any, decode: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """OpenVLA (autoregressive) and OFT (parallel): the same keys, shapes and log-probabilities."""
    source = folders("openvla")
    policy = policy_of(source, decode=decode, **options)
    inputs = policy.encode(observations())
    d = sample(policy, inputs)
    expected = policy.evaluate(inputs, d.action, d.replay).log_prob
    pretrained.export(policy, source, tmp_path / "openvla")
    again = policy_of(tmp_path / "openvla", decode=decode, perturbed=False)
    out = again.evaluate(again.encode(observations()), d.action, d.replay).log_prob
    assert (out - expected).abs().max() < 1e-4 if options == ADAPTED else torch.equal(out, expected)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "openvla"))
    assert {n: x.shape for n, x in before.items()} == {n: x.shape for n, x in after.items()}
    configs = [json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "openvla")]
    assert configs[0] == configs[1]
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    vision = {name for name in before if name.startswith(("vision", "projector"))}
    assert changed and not (vision & changed if options else set())


@pytest.mark.parametrize("kind", ["smolvlm", "openvla"])
def test_weights_that_are_not_finite_are_refused(folders: Any, kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders(kind), tmp_path / kind))
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if n.endswith("layers.1.mlp.up_proj.weight"))
    weights[name][3, 4] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight contains NaN or inf"):
        policy_of(folder)


def test_merged_weights_by_hand(folders: Any) -> None:
    """The merged weight is W + (alpha / rank) B A."""
    policy = policy_of(folders("smolvlm"), lora_rank=4, lora_alpha=6.0)
    layer = policy.body.language.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = (layer.base_layer.weight + 6.0 / 4 * b @ a).detach().clone()
    lora.merge(policy.body.language)
    assert type(policy.body.language.layers[0].self_attn.q_proj) is torch.nn.Linear
    torch.testing.assert_close(policy.body.language.layers[0].self_attn.q_proj.weight, expected)


# ---------------------------------------------------------------------------- images, prompts, bins
def test_patches_agree_with_transformers(folders: Any) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
        smart_resize,
    )

    body = policy_of(folders("qwen2_5_vl")).body
    processor = Qwen2VLImageProcessorPil.from_pretrained(
        folders("qwen2_5_vl"), patch_size=4, merge_size=2
    )
    images = observations()["front"]
    expected = processor(
        [x.permute(1, 2, 0).numpy() for x in images], return_tensors="pt", do_resize=False
    )
    actual = body.pixels(images)
    assert torch.equal(actual["image_grid_thw"], expected["image_grid_thw"])
    torch.testing.assert_close(
        actual["pixel_values"], expected["pixel_values"].float(), rtol=1e-5, atol=1e-5
    )
    for size in ((64, 64), (480, 640), (30, 100), (2000, 1000)):
        limits = {"factor": 28, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
        assert hf_vlm.smart_resize(*size, **limits) == smart_resize(*size, **limits)


def test_pixels_by_hand(folders: Any) -> None:
    """White: (1 - .5) / .5 = 1, (1 - .4) / .4 = 1.5, (1 - .3) / .6 = 1.1667; black -1, -1, -.5."""
    image_processor = policy_of(folders("paligemma")).body.image_processor
    white = image_processor(torch.full((1, 3, 50, 40), 255, dtype=torch.uint8))
    assert white.shape == (1, 3, SIDE, SIDE)
    torch.testing.assert_close(white[0, :, 3, 9], torch.tensor([1.0, 1.5, 1.1666667]))
    black = image_processor(torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8))
    torch.testing.assert_close(black[0, :, 3, 9], torch.tensor([-1.0, -1.0, -0.5]))


def test_prompts(folders: Any) -> None:
    text = "What action should the robot take to lift it?"
    for kind, before, after in (
        (
            "smolvlm",
            "<s><|im_start|><fake_token_around_image><global-img>",
            f"<fake_token_around_image>{text}Assistant:",
        ),
        ("paligemma", "", f"<s>{text}\n"),
        ("llava", "<s>", text),
        ("qwen3_vl", "<s><|im_start|><|vision_start|>", f"<|vision_end|>{text}Assistant:"),
    ):
        body: VisionLanguage = policy_of(folders(kind)).body
        image = body.tokenizer.convert_ids_to_tokens(body.image_id)
        assert (
            body.tokenizer.decode(body.prompt("Lift it"))
            == before + image * body.visual_tokens + after
        ), kind
    assert body.visual_tokens == (SIDE // 4 // 2) ** 2


def test_action_words_are_the_last_unused_words(folders: Any) -> None:
    body: VisionLanguage = policy_of(folders("smolvlm"), perturbed=False).body
    assert body.word_ids.tolist() == list(range(399, 399 - K, -1))
    body.tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    assert len(body.tokenizer) - 1 in body.reserved_ids()
    head = body.vocabulary.module.weight
    assert torch.equal(body.head, head[body.word_ids])


def test_actions_depend_on_every_camera(folders: Any) -> None:
    spec = SPEC | {"wrist": IMAGE}
    for kind in ("smolvlm", "qwen2_5_vl", "openvla"):
        policy = policy_of(folders(kind), spec=spec)
        obs = observations() | {"wrist": observations(seed=1)["front"]}
        inputs = policy.encode(obs)
        d = sample(policy, inputs)
        assert (
            policy.evaluate(inputs, d.action, d.replay).log_prob - d.log_prob
        ).abs().max() < 1e-5
        other = policy.encode(obs | {"wrist": 255 - obs["wrist"]})
        assert (
            policy.evaluate(other, d.action, d.replay).log_prob - d.log_prob
        ).abs().max() > 1e-4, kind


def test_openvla_actions_are_unnormalised(folders: Any) -> None:
    """Bin 0 of 16 edges has the centre x = -1 + 1/15.

    q01 = -2 and q99 = 2 give 2 x; q01 = 0 and q99 = 1 give (x + 1) / 2.
    """
    policy = policy_of(folders("openvla"))
    action = policy.actions_of(torch.zeros(1, C, A, dtype=torch.int64))
    x = -1 + 1 / 15
    torch.testing.assert_close(action, torch.tensor([2 * x, (x + 1) / 2]).expand(1, C, A))
    bins = torch.randint(0, K - 1, (B, C, A), generator=torch.Generator())
    assert torch.equal(policy.bins_of(policy.actions_of(bins)), bins)
    other = policy_of(folders("openvla"), unnorm_key="tabletop")
    assert not torch.equal(other.actions_of(bins), policy.actions_of(bins))


# ------------------------------------------------------------------------------------------- errors
@pytest.mark.slow
def test_unsupported_directories_are_refused(folders: Any, tmp_path: Path) -> None:
    cases: dict[str, tuple[dict[str, Any] | None, str]] = {
        "empty": (None, r"model.checkpoint=\S+empty: holds no config.json; name the directory"),
        "pi0": (
            {"type": "pi0"},
            r"holds pi0, not a model of action tokens: write model.policy=flow",
        ),
        "llama": (
            {"model_type": "llama"},
            r"holds llama, which has no vision_config; model.policy=token reads OpenVLA",
        ),
        "clip": ({"model_type": "clip", "vision_config": {}}, r"holds no preprocessor_config.json"),
    }
    for name, (raw, message) in cases.items():
        (tmp_path / name).mkdir()
        if raw is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(raw))
        with pytest.raises(ConfigError, match=message):
            policy_of(tmp_path / name)
    (tmp_path / "clip" / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": 32}})
    )
    with pytest.raises(ConfigError, match=r"holds a clip, which transformers refuses: ValueError"):
        policy_of(tmp_path / "clip")
    with pytest.raises(
        ConfigError, match=r"model.checkpoint=\S+nowhere: there is no such directory; download one"
    ):
        policy_of(tmp_path / "nowhere")


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint("smolvlm", tmp_path / "smolvlm")
    weights = load_file(folder / "model.safetensors")
    missing = next(name for name in weights if "q_proj" in name and "text_model" in name)
    del weights[missing]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError,
        match=r"model.checkpoint=\S+: the weights lack \S*q_proj.weight, 1 in all; download",
    ):
        policy_of(folder)


def test_options_that_do_not_fit_the_checkpoint_are_refused(folders: Any) -> None:
    vlm, openvla = folders("smolvlm"), folders("openvla")
    for folder, options, message in (
        (
            vlm,
            {"unnorm_key": "x"},
            r"model.unnorm_key=x: \S+ holds a smolvlm, which has no statistics",
        ),
        (vlm, {"center_crop": True}, r"model.center_crop=true: \S+ holds a smolvlm; only OpenVLA"),
        (
            vlm,
            {"omit_stop_token": True},
            r"model.omit_stop_token=true: \S+ holds a smolvlm; only OpenVLA",
        ),
        (
            vlm,
            {"bins": 1000},
            r"model.bins=1000: the vocabulary has only \d+ words that no prompt uses",
        ),
        (
            openvla,
            {"unnorm_key": "bridge"},
            r"model.unnorm_key=bridge: did you mean bridge_orig\? .*, tabletop",
        ),
        (openvla, {"unnorm_key": None}, r"model.unnorm_key=null: .*bridge_orig, tabletop"),
        (
            openvla,
            {"bins": 256},
            r"model.bins=256: the checkpoint has 16 words for actions; write model.bins=16",
        ),
        (
            vlm,
            {"spec": {"state": ArraySpec((5,))}},
            r"the observation holds no image; name a camera with env.cameras",
        ),
        (
            vlm,
            {"spec": {"a": IMAGE, "b": ArraySpec((3, 16, 16), torch.uint8)}},
            r"must be RGB and of one size",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            policy_of(folder, **options)
    config = ModelConfig(policy="token", checkpoint=str(openvla), bins=K, unnorm_key="tabletop")
    with pytest.raises(
        ConfigError,
        match=r"its actions have 2 dimensions, the task's 3; use another model.unnorm_key",
    ):
        CheckpointVLA(SPEC, Box((-1.0,) * 6, (1.0,) * 6), config, chunk=2, sentences=SENTENCES)
    with pytest.raises(
        ConfigError, match=r"env.action_mapping=rescale: .* write env.action_mapping=clip"
    ):
        CheckpointVLA(
            SPEC,
            Box((-2.0,) * 4, (1.0,) * 4),
            config,
            chunk=2,
            sentences=SENTENCES,
            mapping="rescale",
        )
    with pytest.raises(
        ConfigError, match=r"the task's actions are discrete; use model.policy=actor_critic"
    ):
        CheckpointVLA(SPEC, Discrete(3), config, chunk=1, sentences=SENTENCES)


def test_missing_transformers_is_refused(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders("smolvlm")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"needs transformers .*: pip install 'embodied-ppo\[vla\]'"
    ):
        policy_of(folder)


# ------------------------------------------------------------------------------------- commands
TINY = [
    "experiment=tabletop_token",
    f"model.bins={K}",
    "cloning.steps=0",
    "env.num_envs=4",
    "env.max_episode_steps=8",
    "env_steps=null",
    "updates=2",
    "algorithm.horizon=4",
    "algorithm.global_batch_size=8",
    "algorithm.micro_batch_size=4",
    "eval_every=2",
    "save_every=1",
    "evaluation.episodes=2",
    "evaluation.num_envs=2",
    "evaluation.video_episodes=0",
    "device=cpu",
]


def add_tabletop_statistics(folder: Path) -> Path:
    """Write statistics of a dataset with four dimensions, as a fine-tuned model has them."""
    stats = {"four": {"action": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}}
    (folder / "dataset_statistics.json").write_text(json.dumps(stats))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smolvlm", "openvla"])
def test_train_evaluate_and_export(
    folders: Any,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [
        f"model.checkpoint={folders(kind)}",
        "model.lora_rank=2",
        "run_dir=run",
        "algorithm.use_kl_loss=true",
    ]
    if kind == "openvla":
        options += ["model.unnorm_key=four", "model.decode=autoregressive"]
        add_tabletop_statistics(folders(kind))
    summary = run_command(capsys, "train", *TINY, *options)
    assert summary["updates"] == 2 and summary["env_steps"] == 2 * 4 * 4 * 4
    size = (Path(summary["checkpoint"]) / "policy.pt").stat().st_size
    assert size < 300_000  # adapters and heads
    evaluation = run_command(
        capsys, "evaluate", "checkpoint=run", "episodes=2", "num_envs=2", "video=false"
    )
    assert evaluation["eval/return"] == pytest.approx(summary["final_return"])
    written = run_command(capsys, "export", "checkpoint=run", "out=exported")
    assert written["logit_difference"] < 1e-4
    adapter = ("export", "checkpoint=run", "lora=adapter", "out=adapter")
    if kind == "openvla":
        assert run_command(capsys, *adapter)["logit_difference"] == 0
        written = load_file("adapter/adapter_model.safetensors")
        assert len(written) == 2 * 2 * 7  # A and B of two layers
        layer = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight"
        assert written[layer].shape == (2, 16)
        assert not Path("adapter/model.safetensors").exists()
    else:
        assert main.main(list(adapter)) == 2
        assert "lora=adapter: model.checkpoint=" in capsys.readouterr().err
    Path("new").touch()
    assert {file.stat().st_mode for file in Path("exported").iterdir()} == {
        Path("new").stat().st_mode
    }, "permissions follow the umask"
    again = run_command(
        capsys,
        "train",
        *TINY,
        *options[1:],
        "model.checkpoint=exported",
        "run_dir=second",
        "updates=1",
    )
    assert again["updates"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["openvla_7b", "openvla_oft"])
def test_openvla_experiments_on_another_simulator(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another simulator replaces LIBERO, whose meshes are not part of this repository."""
    monkeypatch.chdir(tmp_path)
    options = [
        "env.id=Tabletop",
        "env.cameras=[front]",
        "env.image_size=32",
        "env.kwargs.obs=language",
    ]
    folder = add_tabletop_statistics(write_checkpoint("openvla", tmp_path / "tiny"))
    options += [f"model.checkpoint={folder}", "model.unnorm_key=four"]
    done = run_command(capsys, "train", f"experiment={name}", *TINY[1:], *options)
    assert done["updates"] == 2 and done["final_success"] is not None
    weights = torch.load(Path(done["checkpoint"]) / "policy.pt", weights_only=True)
    assert all("lora_" in name or name.startswith(("value_head", lora.BASE)) for name in weights)
    assert {x.dtype for x in weights.values()} == {torch.float32, torch.uint8}


@pytest.mark.slow
def test_cloning_before_training(
    folders: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Demonstrations train the adapters before PPO; the second run reuses the cloned weights."""
    monkeypatch.chdir(tmp_path)
    options = [
        f"model.checkpoint={folders('paligemma')}",
        "model.lora_rank=2",
        "model.freeze_trunk=true",
    ]
    options += [
        "cloning.steps=3",
        "cloning.foresight_steps=2",
        "cloning.episodes=8",
        "cloning.batch_size=4",
    ]
    tiny = [option for option in TINY if not option.startswith("cloning")]
    first, again = (
        run_command(capsys, "train", *tiny, *options, f"run_dir={name}") for name in "ab"
    )
    assert first["cloning_loss"] > 0 and first["cloning_loss"] == again["cloning_loss"]
    assert first["final_return"] == again["final_return"]


def test_gripper_uses_the_sign_of_the_simulator(folders: Any, tmp_path: Path) -> None:
    """0 is closed and 1 open in OpenVLA's datasets; 1 closes and -1 opens in LIBERO."""
    folder = write_checkpoint("openvla", tmp_path / "openvla")
    stats = {"action": {"q01": [-1.0, 0.0], "q99": [1.0, 1.0], "mask": [True, False]}}
    (folder / "dataset_statistics.json").write_text(json.dumps({"gripper": stats}))
    config = ModelConfig(policy="token", checkpoint=str(folder), bins=K, unnorm_key="gripper")
    box = Box((-1.0,) * 4, (1.0,) * 4)
    policy = CheckpointVLA(SPEC, box, config, chunk=C, sentences=SENTENCES, closes=1.0)
    bins = torch.arange(K).view(K, 1, 1).expand(K, C, A)
    assert policy.actions is not None
    raw, action = policy.actions.actions(bins), policy.actions_of(bins)
    assert torch.equal(action[..., 0], raw[..., 0])
    assert torch.equal(action[..., 1], torch.where(raw[..., 1] > 0.5, -1.0, 1.0))
    bins = policy.bins_of(torch.tensor([[[0.0, 1.0], [0.0, -1.0]]]))  # closed is 0, open is 1
    assert torch.equal(policy.actions_of(bins)[..., 1], torch.tensor([[1.0, -1.0]]))
