"""Parity with the code of openvla/openvla and moojink/openvla-oft: the same random weights.

Their code needs transformers 4.40.1 and timm 0.9.10 and runs in a process and an environment of its
own; ``make test-openvla`` names it and the clones.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import run_process
from safetensors.torch import load_file, save_file
from tiny_openvla_checkpoint import tiny_config, tokenizer, write_heads, write_openvla
from torch import Tensor

from embodied_envs.types import ArraySpec, Box, ObsSpec
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies.vla import openvla_files
from embodied_ppo.policies.vla.openvla import OpenVLABody
from embodied_ppo.policies.vla.pretrained import CheckpointVLA, RegressionVLA

PYTHON = os.environ.get("OPENVLA_PYTHON", "")
CLONES = {
    "autoregressive": os.environ.get("OPENVLA_CLONE", ""),
    "parallel": os.environ.get("OPENVLA_OFT_CLONE", ""),
}
pytestmark = pytest.mark.skipif(
    not (PYTHON and all(CLONES.values())),
    reason="OPENVLA_PYTHON, OPENVLA_CLONE and OPENVLA_OFT_CLONE are not set: make test-openvla",
)

B, C, A, SIDE, STATE = 3, 8, 7, 32, 8
TASKS = ("push the RED_block", "reach the blue block, please", "Lift it")
STATS = {
    "q01": [0.1 * i - 0.9 for i in range(A)],
    "q99": [0.2 * i + 0.5 for i in range(A)],
    "mask": [True] * (A - 1) + [False],
}
STATS |= {"min": STATS["q01"], "max": STATS["q99"]}
CONFIG = tiny_config(
    (32, 64, 3, 4, 512),
    dino=(32, 3, 2, 2, 8),
    siglip=(24, 4, 3, 40, 8),
    image_size=SIDE,
    norm_stats={"robot": {"action": STATS}},
)
PREPROCESSOR: dict[str, Any] = {
    "use_fused_vision_backbone": True,
    "image_resize_strategy": "resize-naive",
    "input_sizes": [[3, SIDE, SIDE]] * 2,
    "interpolations": ["bicubic"] * 2,
    "means": [[0.4844, 0.4551, 0.4063], [0.5, 0.5, 0.5]],
    "stds": [[0.2285, 0.2236, 0.2246], [0.5, 0.5, 0.5]],
}


def write_policy(folder: Path) -> None:
    """Write random weights. Logits of other words are 0, so that the best word is an action."""
    torch.manual_seed(0)
    body = OpenVLABody(CONFIG)
    with torch.no_grad():
        # Large enough for images and words to change the best words at all placeholders.
        for name, p in body.named_parameters():
            p.add_((0.4 if "model.layers" in name else 0.1) * torch.randn_like(p))
        body.dino.embeddings.position_embeddings[:, 0] = 0  # timm has none there
        head, last = body.language_model.lm_head.weight, CONFIG.vocab_size
        actions = 10 * head[last - CONFIG.action_bins : last]
        head.zero_()
        head[last - CONFIG.action_bins : last] = actions
        body.language_model.model.embed_tokens.weight.mul_(5)
    write_openvla(body, folder)
    tokenizer().backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


@torch.no_grad()
@pytest.mark.parametrize(
    ("decode", "head"),
    [("autoregressive", "tokens"), ("parallel", "tokens"), ("parallel", "regression")],
)
def test_actions(decode: str, head: str, tmp_path: Path) -> None:
    """Sentences, images and states give the actions of the publishers' evaluation on LIBERO."""
    folder = tmp_path / "policy"
    write_policy(folder)
    cameras = ("agentview", "wrist") if head == "regression" else ("agentview",)
    if head == "regression":
        write_heads(folder, state=STATE, width=32, size=A)
    generator = torch.Generator().manual_seed(1)
    shape = (B, len(cameras), 3, SIDE, SIDE)
    images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    other = torch.randint(0, 256, (3, 40, 56), generator=generator, dtype=torch.uint8)
    state = 2 * torch.randn(B, STATE, generator=generator)
    save_file({"images": images, "state": state, "other": other}, tmp_path / "inputs.safetensors")
    (tmp_path / "tasks.json").write_text(json.dumps(TASKS))
    program = Path(__file__).with_name("openvla_actions.py")
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    command = (PYTHON, program, CLONES[decode], tmp_path, decode)
    run_process(*command, env=environment, timeout=None)
    expected = load_file(tmp_path / "actions.safetensors")

    chunk = expected["actions"].shape[1]
    spec: ObsSpec = {name: ArraySpec((3, SIDE, SIDE), torch.uint8) for name in cameras}
    spec |= {"state": ArraySpec((STATE,)), "instruction": ArraySpec((), torch.int64)}
    obs = {name: images[:, i] for i, name in enumerate(cameras)}
    obs |= {"state": state, "instruction": torch.arange(B)}
    options: dict[str, Any] = {"policy": "gaussian" if head == "regression" else "token"}
    options |= {"decode": decode}
    config = ModelConfig(checkpoint=str(folder), **options)
    box = Box((-1.0,) * (chunk * A), (1.0,) * (chunk * A))
    policy_class = RegressionVLA if head == "regression" else CheckpointVLA
    # LIBERO's gripper closes with 1.
    ours = policy_class(spec, box, config, chunk=chunk, sentences=TASKS, mapping="clip", closes=1.0)

    def act(obs: dict[str, Tensor]) -> Tensor:
        return ours.act(ours.encode(obs)).action.view(B, chunk, A)

    largest = expected["actions"].abs().max()
    difference = float((act(obs) - expected["actions"]).abs().max() / largest)
    print(f"OpenVLA, {decode}, {head}: largest difference of actions {difference:.2g}")
    read = [name for name in spec if name != "state" or head == "regression"]
    changed = {name: act(obs | {name: obs[name].roll(1, 0)}) for name in read}
    effects = {
        n: float((x - expected["actions"]).abs().max() / largest) for n, x in changed.items()
    }
    print({name: f"{effect:.2g}" for name, effect in effects.items()})
    assert chunk == (C if decode == "parallel" else 1) and expected["actions"].std() > 0.1
    assert difference < 1e-5 and min(effects.values()) > 1e-3
    # Resized images: within one of the 255 levels of Pillow's integers.
    pixels = openvla_files.load(folder, policy=config.policy).pixels(other[None])
    stds = torch.tensor(PREPROCESSOR["stds"]).flatten()[:, None, None]
    levels = 255 * stds * (pixels - expected["pixels"]).abs()
    share = float((levels > 0.5).float().mean())
    print(f"OpenVLA, {decode}: {share:.2g} of the pixels differ, by at most {levels.max():.2f}")
    assert levels.max() < 1.01 and share < 0.05
