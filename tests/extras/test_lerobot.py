"""Parity with lerobot: the same random weights, written by lerobot, and the same observations.

lerobot needs Python 3.12 and other versions of transformers and torch. It therefore runs in a
process and an environment of its own: ``make test-lerobot``.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from run_helpers import perturb, run_process
from safetensors.torch import load_file, save_file
from tiny_openvla_checkpoint import write_checkpoint as write_openvla
from tiny_pi0_checkpoint import write_tokenizer
from torch import Tensor
from vla_policy_checks import random_observations

from embodied_envs.types import ArraySpec, Box, ObsSpec
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import peft_files
from embodied_ppo.policies.vla import openvla_files, pi0_files, smolvla
from embodied_ppo.policies.vla.pi0 import PI0
from embodied_ppo.policies.vla.pretrained import CheckpointVLA
from embodied_ppo.policies.vla.published import FLOW_FAMILIES

PYTHON = os.environ.get("LEROBOT_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="LEROBOT_PYTHON names no Python with lerobot: make test-lerobot"
)

Lerobot: TypeAlias = "Callable[[str, Path], Tensor]"
# Rows, actions of the model's horizon, its padded dimensions, action dimensions, numbers of a
# state.
B, H, N, A, STATE = 3, 6, 8, 4, 5
SPEC: ObsSpec = {
    "state": ArraySpec((STATE,)),
    "front": ArraySpec((3, 24, 32), torch.uint8),
    "wrist": ArraySpec((3, 16, 16), torch.uint8),
    "instruction": ArraySpec((), torch.int64),
}
TASKS = ("push the red_block", "reach the blue block, please", "lift it " + 9 * "very very ")


def write_inputs(folder: Path, **options: Any) -> dict[str, Tensor]:
    """Write observations of the tasks and return them in our layout.

    Args:
        folder: Created.
        **options: Fields of lerobot's configuration.
    """
    obs = random_observations(SPEC, B, seed=0) | {"instruction": torch.arange(B)}
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(H, N, generator=generator).expand(B, H, N)
    statistics = {
        f"{name}.{kind}": torch.rand(size, generator=generator) + (0.2 if kind == "std" else -0.5)
        for name, size in (("state", STATE), ("action", A))
        for kind in ("mean", "std")
    }
    for name, size in (("state", STATE), ("action", A)):
        statistics[f"{name}.q01"] = torch.rand(size, generator=generator) - 1
        statistics[f"{name}.q99"] = torch.rand(size, generator=generator) + 0.5
    observed = {name: x for name, x in obs.items() if name != "instruction"}
    folder.mkdir(parents=True)
    save_file(observed | statistics | {"noise": noise.contiguous()}, folder / "inputs.safetensors")
    (folder / "tasks.json").write_text(json.dumps(TASKS))
    (folder / "options.json").write_text(json.dumps(options))
    write_tokenizer(folder / "tokenizer")
    return obs | {"noise": noise}


def environment() -> dict[str, str]:
    """Return the variables of programs in lerobot's environment."""
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    variables.pop("PYTHONPATH", None)
    return variables


@pytest.fixture(scope="module")
def lerobot() -> Iterator[Lerobot]:
    """Let lerobot write or read the policy of a folder and return its actions [B, H, A]."""
    command = [PYTHON, str(Path(__file__).with_name("lerobot_policies.py"))]
    process = None

    def run(family: str, folder: Path) -> Tensor:
        nonlocal process
        if process is None or process.poll() is not None:  # an error ended it
            process = subprocess.Popen(
                command, env=environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{family} {folder}\n")
        process.stdin.flush()
        assert "done\n" in iter(process.stdout.readline, ""), "see the standard error"
        return load_file(folder / "actions.safetensors")["action"]

    yield run
    if process is not None:
        process.communicate()


def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the named variants the sizes that ``lerobot_policies`` gives them."""
    gemma: dict[str, Any] = {"model_type": "gemma", "num_hidden_layers": 2}
    gemma |= {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300}
    text, expert = (gemma | {"hidden_size": n, "intermediate_size": 2 * n} for n in (64, 32))
    vision = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2}
    siglip = vision | {"model_type": "siglip_vision_model", "vision_use_head": False}
    vlm = {"model_type": "paligemma", "text_config": text, "projection_dim": 64}
    read_config = pi0_files.read_config

    def read_small(raw: dict[str, Any], folder: Path) -> Any:
        tower = siglip | {"image_size": raw["image_resolution"][0], "projection_dim": 64}
        sizes = vlm | {"image_token_id": 300, "vision_config": tower}
        return read_config(raw | {"vlm_config": sizes, "dit_config": expert}, folder)

    monkeypatch.setattr(pi0_files, "read_config", read_small)
    text = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 6}
    text |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "rms_norm_eps": 1e-5}
    vision |= {"image_size": 16, "patch_size": 4}
    for name in smolvla.VLM_SIZES:
        sizes = {"text": text, "vision": vision, "scale_factor": 2}
        monkeypatch.setitem(smolvla.VLM_SIZES, name, sizes)


def our_policy(
    folder: Path, obs: dict[str, Tensor], policy_class: type[PI0], **options: Any
) -> PI0:
    """Return our policy of a directory, with the noise of ``obs``."""
    config = ModelConfig(policy="flow", checkpoint=str(folder), flow_steps=10, **options)
    box = Box((-1.0,) * (H * A), (1.0,) * (H * A))
    policy = policy_class(SPEC, box, config, chunk=H, sentences=TASKS, mapping="clip")
    policy.initial_noise.copy_(obs["noise"][0])
    return policy


def act(policy: PI0, obs: dict[str, Tensor]) -> Tensor:
    """Return actions [B, H, A]."""
    inputs = policy.encode({name: x for name, x in obs.items() if name != "noise"})
    return policy.act(inputs).action.view(B, H, A)


def largest_difference(actions: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected action."""
    return float((actions - expected).abs().max() / expected.abs().max())


MEAN_STD = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
# Options of lerobot, options of ours, and tolerance relative to the largest action.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "both embed_tokens and lm_head": ({}, {}, 1e-5),
    "lm_head only": ({"unused": "paligemma.model.language_model.embed_tokens"}, {}, 1e-5),
    "relative actions": (
        {"use_relative_actions": True, "action_feature_names": ["x", "y", "z", "gripper"]},
        {},
        1e-5,
    ),
    "adapter of lerobot and peft": ({"peft": {"r": 4, "lora_alpha": 6}}, {}, 1e-5),
    "bfloat16": ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}, 1e-2),
}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *((family, case) for family in ("pi0", "pi05") for case in CASES),
        *(("smolvla", case) for case in ("float32", "adapter of lerobot and peft")),
    ],
)
def test_flow_policy(
    family: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lerobot: Lerobot
) -> None:
    theirs, ours, tolerance = CASES.get(case, ({}, {}, 1e-5))
    sizes = {"chunk_size": H, "n_action_steps": H, "max_state_dim": N, "max_action_dim": N}
    obs = write_inputs(tmp_path / "run", **sizes, **theirs)
    expected = lerobot(family, tmp_path / "run")
    small_sizes(monkeypatch)
    folder = tmp_path / "run" / ("adapter" if "peft" in theirs else "policy")
    policy = our_policy(folder, obs, FLOW_FAMILIES[family], **ours)
    difference = largest_difference(act(policy, obs), expected)
    print(f"{family}, {case}: largest difference {difference:.2g}")
    assert expected.std() > 0.1 and difference < tolerance
    if "peft" in theirs:
        base = act(our_policy(tmp_path / "run" / "policy", obs, FLOW_FAMILIES[family]), obs)
        effects = {"adapter": largest_difference(base, expected)}
    else:  # each input has an effect, so that an error in its processing is a difference
        effects = {
            name: largest_difference(act(policy, obs | {name: obs[name].roll(1, 0)}), expected)
            for name in SPEC
        }
    print({name: f"{effect:.2g}" for name, effect in effects.items()})
    assert min(effects.values()) > 1e-3


@pytest.mark.parametrize("family", FLOW_FAMILIES)
@pytest.mark.parametrize("options", [{}, {"lora_rank": 4, "lora_alpha": 6.0}], ids=str)
def test_lerobot_reads_what_was_exported(
    family: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lerobot: Lerobot,
) -> None:
    """A policy with trained weights, or with the adapter that peft reads, acts there as here."""
    run = tmp_path / "run"
    sizes = {"chunk_size": H, "n_action_steps": H, "max_state_dim": N, "max_action_dim": N}
    obs = write_inputs(run, **sizes)
    before = lerobot(family, run)
    small_sizes(monkeypatch)
    policy = our_policy(run / "policy", obs, FLOW_FAMILIES[family], **options)
    perturb(policy, 0.05 if options else 0.02, frozen=not options)
    expected = act(policy, obs)
    parameters = policy.published_parameters()
    if options:
        peft_files.save(parameters, run / "policy", run / "adapter", rank=4, alpha=6.0)
    else:
        policy.export(run / "policy", run / "exported")
    difference = largest_difference(lerobot(family, run), expected)
    print(f"{family}, exported with {options}: largest difference {difference:.2g}")
    assert (before - expected).abs().max() > 0.01 and difference < 1e-5
    if options:
        with torch.no_grad():  # the adapters have an effect of their own
            for name in (name for name in parameters if ".lora_B." in name):
                parameters[name].zero_()
        assert (act(policy, obs) - expected).abs().max() > 0.001


@pytest.mark.parametrize("decode", ["autoregressive", "parallel"])
def test_peft_merges_an_exported_adapter_of_openvla(decode: str, tmp_path: Path) -> None:
    """peft's ``merge_and_unload`` gives the weights that our export with lora=merged writes."""
    base = write_openvla(tmp_path / "openvla")
    config = ModelConfig(
        policy="token",
        checkpoint=str(base),
        bins=16,
        unnorm_key="bridge_orig",
        lora_rank=4,
        lora_alpha=6.0,
        **{"decode": decode},
    )
    spec: ObsSpec = {"front": ArraySpec((3, 32, 32), torch.uint8)}
    box = Box((-1.0,) * 4, (1.0,) * 4)
    policy = CheckpointVLA(spec, box, config, chunk=2, sentences=TASKS)
    perturb(policy, 0.05)
    trained = policy.published_parameters()
    peft_files.save(trained, base, tmp_path / "adapter", rank=4, alpha=6.0)
    policy.export(base, tmp_path / "merged")
    program = Path(__file__).with_name("peft_merge.py")
    command = (PYTHON, program, tmp_path / "adapter", tmp_path / "theirs.safetensors")
    run_process(*command, env=environment(), timeout=None)
    theirs = load_file(tmp_path / "theirs.safetensors")
    ours = load_file(tmp_path / "merged/model.safetensors")
    before = load_file(base / "model.safetensors")
    assert theirs.keys() == {name for name in ours if name.startswith("language_model.")}
    difference = max(float((x - ours[name]).abs().max()) for name, x in theirs.items())
    print(f"openvla, {decode}, adapter: largest difference of a weight {difference:.2g}")
    assert max(float((x - before[name]).abs().max()) for name, x in theirs.items()) > 0.01
    assert difference < 1e-6
    # Adapters of peft on any linear layer, here scaled by alpha / sqrt(r), are added as peft does.
    fields = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    text = json.dumps(fields | {"use_rslora": True, "init_lora_weights": "gaussian"})
    (tmp_path / "adapter/adapter_config.json").write_text(text)
    run_process(*command, env=environment(), timeout=None)
    theirs = load_file(tmp_path / "theirs.safetensors")
    body = openvla_files.load(tmp_path / "adapter")
    loaded = openvla_files.entries(body)
    assert max(float((x - loaded[name].write()).abs().max()) for name, x in theirs.items()) < 1e-6
