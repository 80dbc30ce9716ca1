"""π0: ``evaluate`` recomputes ``act``, agreement with transformers, layouts of files."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import assert_refused, run_command
from safetensors.torch import load_file, save_file
from tiny_pi0_checkpoint import tiny_model, write_checkpoint
from torch import Tensor
from vla_policy_checks import check_evaluate_reproduces_act, flow_policy, random_observations

from embodied_envs.base import tree
from embodied_envs.base.errors import ConfigError
from embodied_envs.types import ArraySpec, ObsSpec
from embodied_ppo.policies.vla import pi0_files
from embodied_ppo.policies.vla.pi0 import KEYS, PI0
from embodied_ppo.policies.vla.prefix import TimeEncoding
from embodied_ppo.policies.vla.published_weights import read_kind

C, A, B, H, N = 3, 2, 5, 6, 8
SPEC: ObsSpec = {
    "state": ArraySpec((5,)),
    "front": ArraySpec((3, 16, 24), torch.uint8),
    "wrist": ArraySpec((16, 16, 3), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
SENTENCES = ("push the red block", "reach the blue block, please", "lift it")
CHAINS: dict[str, dict[str, Any]] = {
    "one": {},
    "sum": {"flow_chain": "sum"},
    "mean": {"flow_chain": "mean", "flow_steps": 3},
    "sum, learned": {"flow_chain": "sum", "flow_noise": "learned"},
    "mean, learned": {"flow_chain": "mean", "flow_noise": "learned", "temperature": 0.7},
}
TRUNKS: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"freeze_trunk": True},
    "adapters": {"lora_rank": 4},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("pi0") / "tiny")


def make(
    folder: Path, seed: int = 0, spec: ObsSpec = SPEC, size: int = A, chunk: int = C, **options: Any
) -> PI0:
    sizes = {"chunk": chunk, "size": size, "seed": seed}
    return flow_policy(PI0, folder, spec, SENTENCES, **sizes, **options)


def observations(rows: int = B, seed: int = 0) -> dict[str, Tensor]:
    return random_observations(SPEC, rows, seed)


# ----------------------------------------------------------------------------- act and evaluate
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chain", "trunk"), [("one", "frozen"), ("sum", "adapters"), ("mean, learned", "trained")]
)
def test_evaluate_reproduces_act_for_any_micro_batch(folder: Path, chain: str, trunk: str) -> None:
    policy = make(folder, **CHAINS[chain], **TRUNKS[trunk])
    inputs = policy.encode(observations())
    assert (KEYS in inputs) == (trunk == "frozen")
    for noise in (policy.noise(B, torch.Generator().manual_seed(1)), None):
        d = policy.act(inputs, noise=noise)
        assert d.replay["latents"].shape == (B, policy.stochastic + 1, H, N)
        check_evaluate_reproduces_act(policy, inputs, d, shape=(B, C, A), sizes=(B, 2, 1))
    assert d.value.abs().max() > 0 and torch.equal(d.action, policy.act(inputs).action)


@pytest.mark.parametrize("chain", ["one", "sum, learned"])
def test_kept_and_recomputed_prefixes_agree(folder: Path, chain: str) -> None:
    policy = make(folder, **CHAINS[chain], freeze_trunk=True)
    obs, noise = observations(), policy.noise(B, torch.Generator().manual_seed(1))
    kept = policy.encode(obs)
    policy.planned_memory_gb = 0.0
    recomputed = policy.encode(obs)
    assert KEYS in kept and KEYS not in recomputed
    d, e = policy.act(kept, noise=noise), policy.act(recomputed, noise=noise)
    assert all((x - y).abs().max() < 1e-5 for x, y in zip(tree.leaves(d), tree.leaves(e)))
    gradients = []
    for inputs in (kept, recomputed):
        policy.zero_grad()
        out = policy.evaluate(inputs, d.action, d.replay)
        assert (out.log_prob - d.log_prob).abs().max() < 1e-5
        (out.log_prob.sum() + out.value.sum()).backward()
        gradients.append(
            {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert all(
        (g - gradients[1][n]).abs().max() < 1e-3 * (1 + g.abs().max())
        for n, g in gradients[0].items()
    )


# ----------------------------------------------------------------------------- against transformers
@pytest.mark.parametrize("key_heads", [1, 2])
def test_flow_agrees_with_transformers(key_heads: int, tmp_path) -> None:
    """Compare a complete chain, and a single velocity with its gradient."""
    policy = make(write_checkpoint(tmp_path, key_heads=key_heads), flow_steps=5)
    reference = tiny_model(key_heads=key_heads)
    # transformers encodes the time in float32, openpi in float64.
    reference.embed_action_time.sinusoid_embeds = policy.embed.sinusoid_embeds
    obs, K = observations(), 2
    inputs = policy.encode(obs)
    pixels = torch.stack([policy.trunk.pixels(inputs[name]) for name in ("front", "wrist")], dim=1)
    ids = inputs["/words"]
    image = torch.full((B, K * 4), 300)
    arguments: dict[str, Any] = {
        "state": inputs["/vector"],
        "input_ids": torch.cat((image, ids.clamp_min(0)), dim=1),
        "attention_mask": torch.cat((torch.ones_like(image), (ids >= 0).long()), dim=1),
        "pixel_values": pixels,
        "pixel_attention_mask": torch.ones(B, K, dtype=torch.bool),
    }
    end = reference.sample_actions(**arguments, noise=policy.start(B), num_steps=5)
    action = policy.act(inputs).action.view(B, C, A)
    assert (action - end[:, :C, :A]).abs().max() < 1e-5 and action.abs().max() > 0.01
    x, tau = torch.randn(B, H, N), torch.rand(B)
    v = reference(**arguments, noise=x, timestep=tau).logits
    w, _ = policy.field(policy.encode_context(inputs))(x, tau)
    assert (v - w).abs().max() < 1e-5 * (1 + v.abs().max())
    v.square().sum().backward()
    w.square().sum().backward()
    q = "language_model.layers.0.self_attn.q_proj.weight"
    for a, b in (
        (reference.model.vlm.get_parameter(q), policy.trunk.vlm.get_parameter(q)),
        (reference.action_out_proj.weight, policy.velocity.weight),
    ):
        assert a.grad is not None and b.grad is not None
        assert (a.grad - b.grad).abs().max() < 1e-4 * (1 + a.grad.abs().max())


def test_pixel_preprocessing(folder: Path) -> None:
    pixels = make(folder).trunk.pixels
    levels = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 16, 16)
    assert torch.equal(pixels(levels).unique(), torch.tensor([-1.0, 1.0]))
    # A wide white image becomes 4 x 16 pixels of white with black above and below.
    wide = pixels(torch.full((1, 3, 8, 32), 255, dtype=torch.uint8))
    assert wide.shape == (1, 3, 16, 16)
    assert bool((wide[..., 6:10, :] > 0.9999).all()) and bool((wide[..., :6, :] == -1).all())
    assert bool((wide[..., 10:, :] == -1).all())
    # 49 pixels become 16: 49 times the rounded 16 / 49 is below 16.
    assert bool((pixels(torch.full((1, 3, 49, 49), 255, dtype=torch.uint8)) > 0.9999).all())


# ------------------------------------------------------------------------------------- training
@pytest.mark.parametrize(
    ("trunk", "checkpointing"), [("trained", False), ("frozen", True), ("adapters", True)]
)
def test_gradients_reach_trained_parameters_only(
    folder: Path, trunk: str, checkpointing: bool
) -> None:
    policy = make(folder, **TRUNKS[trunk], gradient_checkpointing=checkpointing, flow_chain="sum")
    policy.train()
    inputs = policy.encode(observations())
    d = policy.act(inputs, noise=policy.noise(B, torch.Generator().manual_seed(1)))
    for _ in range(2):  # the second backward pass needs nothing of the first graph
        policy.zero_grad()
        policy.evaluate(inputs, d.action, d.replay).log_prob.sum().backward()
    reached = {
        name
        for name, p in policy.named_parameters()
        if p.grad is not None and p.grad.abs().sum() > 0
    }
    groups = policy.parameter_groups()
    assert {id(p) for g in groups.values() for p in g} == {
        id(p) for p in policy.parameters() if p.requires_grad
    }
    assert {"expert.layers.0.self_attn.q_proj.weight", "embed.state_proj.weight"} <= reached
    vlm = {name for name in reached if name.startswith("trunk.vlm")}
    if trunk == "frozen":
        assert not vlm
    elif trunk == "adapters":
        assert vlm and all("lora_" in name for name in vlm)
    else:
        assert "trunk.vlm.vision_tower.embeddings.patch_embedding.weight" in vlm
        assert "trunk.vlm.language_model.layers.0.mlp.up_proj.weight" in vlm


@pytest.mark.parametrize("detach", [True, False])
def test_detach_value_stops_the_value_gradient(folder: Path, detach: bool) -> None:
    policy = make(folder, detach_value=detach)
    inputs = policy.encode(observations())
    d = policy.act(inputs)
    policy.evaluate(inputs, d.action, d.replay).value.sum().backward()
    groups = policy.parameter_groups()
    assert all(p.grad is not None for p in groups["critic"])
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in groups["actor"]) != detach


# -------------------------------------------------------------------------------------- weights
@pytest.mark.parametrize("layout", ["lerobot", "lerobot before 0.4", "transformers"])
def test_layouts_are_read_completely(layout: str, folder: Path, tmp_path) -> None:
    other, expected = write_checkpoint(tmp_path / "tiny", seed=1), tiny_model()
    tensors = load_file(folder / "model.safetensors")
    if layout == "transformers":
        expected.save_pretrained(other)
    elif layout == "lerobot":
        other, vlm = folder, "model.paligemma_with_expert.paligemma"
        vision = f"{vlm}.model.vision_tower.vision_model.encoder.layers.0.layer_norm1.bias"
        assert {vision, f"{vlm}.lm_head.weight", "model.action_in_proj.weight"} <= tensors.keys()
        assert len(tensors) == len(expected.state_dict())
    else:
        renamed = {}
        for key, x in tensors.items():
            key = key.replace("paligemma.lm_head", "paligemma.language_model.lm_head")
            key = key.replace("paligemma.model.language_model.", "paligemma.language_model.model.")
            renamed[key.replace("paligemma.model.", "paligemma.")] = x
        assert renamed.keys() != tensors.keys()
        save_file(renamed, other / "model.safetensors")
    state = pi0_files.read(other).model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(x, expected.state_dict()[name]) for name, x in state.items())


def test_prompts_of_the_layouts(folder: Path, tmp_path) -> None:
    """openpi replaces underscores, lerobot does not; both end with one end of line, at most 48."""
    tokenizer = pi0_files.read(folder).tokenize.tokenizer
    for clean, text in ((True, "take it a b"), (False, " take_it\na_b")):
        tokenize = pi0_files.PromptTokenizer(tokenizer, 48, clean=clean)
        ids = tokenize(" take_it\na_b\n")
        assert tokenizer.decode(ids) == f"<bos>{text}\n" and tokenize("x\n") == tokenize("x")
        assert len(tokenize(99 * "x")) == 48 and tokenize(99 * "x")[0] == ids[0]


def test_lerobot_directories_are_read_as_lerobot_does(folder: Path, tmp_path) -> None:
    """Larger images are sampled without a filter; prompts keep their underscores."""
    sizes = pi0_files.read_config(json.loads((folder / "config.json").read_text()), folder)
    other = write_checkpoint(tmp_path / "tiny")
    (other / "config.json").write_text(json.dumps({"type": "pi0", "tokenizer_max_length": 9}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pi0_files, "read_config", lambda *_: sizes)
        policy, filtered = make(other), make(folder)
        published = pi0_files.read(other)
    assert not published.antialias and len(published.tokenize(99 * "x")) == 9
    stripes = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    stripes[..., ::2] = 255
    assert not torch.equal(policy.trunk.pixels(stripes), filtered.trunk.pixels(stripes))
    # With a factor of two, the sample lies between two columns.
    assert policy.trunk.pixels(stripes).abs().max() < 1e-6


def test_times_are_encoded_in_float64() -> None:
    """At τ = 0.7 the fastest angle is 2 π 0.7 / 0.004 = 350 π: sin 0, cos 1."""
    tau = torch.tensor([0.7], dtype=torch.float64).float()
    code = TimeEncoding(4, (4e-3, 4.0))(tau)
    exact = 2 * math.pi * float(tau) / torch.tensor([4e-3, 4.0], dtype=torch.float64)
    assert code.dtype == torch.float32
    assert (code - torch.cat((exact.sin(), exact.cos())).float()).abs().max() < 1e-6


def test_openpi_layout(folder: Path, tmp_path) -> None:
    """config.json has no type, keys have no "model.", and 1e-6 is added to deviations."""
    expected = tiny_model()
    sizes = expected.config
    other = write_checkpoint(tmp_path / "tiny", seed=1)
    tensors = load_file(folder / "model.safetensors")
    renamed = {key.removeprefix("model."): x for key, x in tensors.items()}
    del renamed["paligemma_with_expert.gemma_expert.lm_head.weight"]  # never used
    save_file(renamed, other / "model.safetensors")
    raw = {"action_dim": 8, "action_horizon": 6, "paligemma_variant": "gemma_2b"}
    (other / "config.json").write_text(json.dumps(raw))
    (other / "assets" / "robot").mkdir(parents=True)
    statistics = {"mean": [1.0] * 8, "std": [0.0] * 8}
    (other / "assets" / "robot" / "norm_stats.json").write_text(
        json.dumps({"norm_stats": {"state": statistics, "actions": statistics}})
    )
    config = pi0_files.read_config(raw, other)
    assert (config.chunk_size, config.max_state_dim, config.max_action_dim) == (6, 8, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pi0_files, "read_config", lambda *_: sizes)
        published = pi0_files.read(other)
    state = expected.state_dict()
    del state["model.dit.embed_tokens.weight"]
    loaded = published.model.state_dict()
    assert all(torch.equal(x, loaded[name]) for name, x in state.items())
    assert published.antialias and published.action is not None and not published.relative
    x = published.action.denormalize(torch.full((1, 8), 2.0))
    assert (x - 1 - 2e-6).abs().max() < 1e-6 and float(published.action.std[0]) == pytest.approx(
        1e-6
    )
    (other / "assets" / "other").mkdir()
    (other / "assets" / "other" / "norm_stats.json").write_text("{}")
    with pytest.raises(ConfigError, match="other, robot"):
        pi0_files.statistics(other, raw, "MEAN_STD")
    renamed |= {"time_mlp_in.weight": torch.zeros(1)}
    save_file(renamed, other / "model.safetensors")
    assert read_kind(other, "flow")[0] == "pi05"


@pytest.mark.parametrize("trunk", ["trained", "frozen"])
def test_relative_actions_become_absolute(folder: Path, trunk: str) -> None:
    relative = make(folder, delta_actions=(1,), normalize_obs=False, **TRUNKS[trunk])
    plain = make(folder, normalize_obs=False, **TRUNKS[trunk])
    obs = observations()
    noise = plain.noise(B, torch.Generator().manual_seed(1))
    inputs, context = relative.encode(obs), relative.encode_context(relative.encode(obs))
    d, e = relative.act(inputs, noise=noise), plain.act(plain.encode(obs), noise=noise)
    difference = (d.action - e.action).view(B, C, A)
    assert not difference[..., 0].any() and torch.equal(d.log_prob, e.log_prob)
    assert (difference[..., 1] - obs["state"][:, 1:2]).abs().max() < 1e-6
    latent = relative.normalize_actions(d.action.view(B, C, A), context)
    assert (latent - e.action.view(B, C, A)).abs().max() < 1e-6
    check_evaluate_reproduces_act(relative, inputs, d, shape=(B, C, A), sizes=(B, 2))
    with pytest.raises(ConfigError, match=r"model\.delta_actions=\[2\]"):
        make(folder, delta_actions=(2,))


MEANS = {"observation.state": [1.0, 2, 3, 4, 5], "action": [0.5, -0.5]}
DEVIATIONS = {"observation.state": [2.0] * 5, "action": [2.0, 4.0]}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["lerobot", "lerobot before", "openpi"])
def test_statistics(layout: str, folder: Path, tmp_path) -> None:
    """States are (s - mean) / std and actions x std + mean, in each layout of a directory."""
    other = write_checkpoint(tmp_path / "tiny")
    named = {f"{n}.mean": torch.tensor(x) for n, x in MEANS.items()}
    named |= {f"{n}.std": torch.tensor(x) for n, x in DEVIATIONS.items()}
    if layout == "lerobot":
        save_file(named, other / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    elif layout == "lerobot before":
        tensors = load_file(other / "model.safetensors")
        buffers = {
            f"normalize_targets.buffer_action.{x}": torch.full((2,), torch.inf)
            for x in ("mean", "std")
        }
        for name, x in named.items():
            feature, _, moment = name.rpartition(".")
            step = "unnormalize_outputs" if feature == "action" else "normalize_inputs"
            buffers[f"{step}.buffer_{feature.replace('.', '_')}.{moment}"] = x
        save_file(tensors | buffers, other / "model.safetensors")
    else:
        stats = {"state": "observation.state", "actions": "action"}
        statistics = {
            k: {"mean": MEANS[n] + [0.0] * 3, "std": DEVIATIONS[n] + [0.0] * 3}
            for k, n in stats.items()
        }
        (other / "assets" / "robot").mkdir(parents=True)
        (other / "assets" / "robot" / "norm_stats.json").write_text(
            json.dumps({"norm_stats": statistics})
        )
    policy, plain, obs = make(other), make(folder, normalize_obs=False), observations()
    inputs = policy.encode(obs)
    expected = (obs["state"] - named["observation.state.mean"]) / (2 + 1e-6 * (layout == "openpi"))
    assert (inputs["/vector"][:, :5] - expected).abs().max() < 1e-6 and not inputs["/vector"][
        :, 5:
    ].any()
    same = {**obs, "state": expected}
    noise = policy.noise(B, torch.Generator().manual_seed(1))
    d, e = policy.act(inputs, noise=noise), plain.act(plain.encode(same), noise=noise)
    scaled = e.action.view(B, C, A) * named["action.std"] + named["action.mean"]
    assert (d.action.view(B, C, A) - scaled).abs().max() < 1e-4
    assert (
        policy.normalize_actions(d.action.view(B, C, A), policy.encode_context(inputs))
        - e.action.view(B, C, A)
    ).abs().max() < 1e-4
    assert (d.log_prob - e.log_prob).abs().max() < 1e-4  # of the latents, which have no units
    policy.observe(obs, torch.ones(B, dtype=torch.bool))
    assert torch.equal(policy.encode(obs)["/vector"], inputs["/vector"])


# ------------------------------------------------------------------------------------- commands
SMALL = [
    *(f"env.{x}" for x in ("num_envs=4", "image_size=16", "max_episode_steps=8")),
    *(f"algorithm.{x}" for x in ("horizon=4", "global_batch_size=8", "update_epoch=2")),
    *(f"evaluation.{x}" for x in ("episodes=2", "num_envs=2", "video_episodes=0")),
]


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["frozen", "adapters"])
def test_train_and_evaluate(trunk: str, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / "tiny", max_state_dim=32)
    options = [
        f"model.{name}={str(value).lower()}"
        for name, value in {"freeze_trunk": False, **TRUNKS[trunk]}.items()
    ]
    options += ["algorithm.micro_batch_size=4"]
    options += ["model.dtype=float32", "updates=2", "save_every=1", f"model.checkpoint={folder}"]
    summary = run_command(capsys, "train", "experiment=pi0_tabletop", *SMALL, *options)
    assert summary["updates"] == 2 and summary["final_return"] is not None
    evaluation = run_command(
        capsys, "evaluate", f"checkpoint={summary['checkpoint']}", "episodes=2", "video=false"
    )
    assert evaluation["eval/return"] == summary["final_return"]
    weights = torch.load(Path(summary["checkpoint"]) / "policy.pt", weights_only=True)
    assert any(n.startswith("trunk.vlm.vision_tower") for n in weights) == (trunk == "trained")
    if "lora_rank" in TRUNKS[trunk]:
        export = ("export", f"checkpoint={summary['checkpoint']}", "lora=adapter", "out=adapter")
        assert run_command(capsys, *export)["action_difference"] == 0
        export = ("export", f"checkpoint={summary['checkpoint']}", "out=merged")
        run_command(capsys, *export)
        states = [PI0.read(x).model.state_dict() for x in ("adapter", "merged")]
        for name, x in states[0].items():
            torch.testing.assert_close(x, states[1][name], rtol=0, atol=1e-6)
    else:
        export = ("export", f"checkpoint={summary['checkpoint']}", "out=merged")
        assert run_command(capsys, *export)["action_difference"] == 0
        assert_refused(capsys, [*export[:-1], "lora=adapter", "out=adapter"], "lora_rank=0")
    log = next(tmp_path.rglob("log.txt")).read_text()
    assert ("kept through the epochs of an update" in log) == (trunk == "frozen")


# --------------------------------------------------------------------------------------- errors
def test_missing_transformers_is_refused(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ConfigError, match=r"needs transformers .*pip install 'embodied-ppo\[vla\]'"
    ):
        make(folder)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"size": 9}, "9.*max_action_dim.*8"),
        ({"chunk": 7}, r"env\.action_chunk=7.*chunk_size.*6"),
        ({"spec": {**dict(SPEC), "state": ArraySpec((9,))}}, "9.*max_state_dim.*8"),
        ({"spec": {"state": ArraySpec((5,))}}, "image"),
        ({"lora_rank": 4, "freeze_trunk": True}, r"model\.freeze_trunk"),
    ],
)
def test_options_that_do_not_fit_the_checkpoint_are_refused(
    folder: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make(folder, **options)


def test_refused_checkpoints(folder: Path, tmp_path) -> None:
    def refused(path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            make(path)

    refused(tmp_path / "nowhere", "nowhere")
    refused(tmp_path, r"config\.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "openvla"}))
    refused(tmp_path, r"model\.policy=token")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    kept = {k: x for k, x in tensors.items() if "state_proj" not in k}
    save_file(kept, other / "model.safetensors")
    refused(other, "state_proj")
    raw = json.loads((folder / "config.json").read_text())
    for key, value in (("chunk_size", -1), ("min_period", "a"), ("dit_config", [])):
        (other / "config.json").write_text(json.dumps(raw | {key: value}))
        refused(other, re.escape(f"{key}={value}"))
    name = "model.paligemma_with_expert.gemma_expert.model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = math.inf
    save_file(tensors, other / "model.safetensors")
    shutil.copy(folder / "config.json", other)
    refused(other, re.escape(name))
