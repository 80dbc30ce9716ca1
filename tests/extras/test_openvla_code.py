"""Parity with the code of openvla/openvla and moojink/openvla-oft: the same random weights.

Their code needs transformers 4.40.1 and timm 0.9.10 and runs in a process and an environment of its
own; ``make test-openvla`` names it and the clones.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_openvla_checkpoint import tiny_config, write_openvla
from torch import Tensor

from embodied_ppo.policies.checkpoint_files import pad_left
from embodied_ppo.policies.vla import openvla_files
from embodied_ppo.policies.vla.openvla import EMPTY, Embedded, OpenVLA, OpenVLABody

PYTHON = os.environ.get("OPENVLA_PYTHON", "")
CLONES = {
    "autoregressive": os.environ.get("OPENVLA_CLONE", ""),
    "parallel": os.environ.get("OPENVLA_OFT_CLONE", ""),
}
pytestmark = pytest.mark.skipif(
    not (PYTHON and all(CLONES.values())),
    reason="OPENVLA_PYTHON, OPENVLA_CLONE and OPENVLA_OFT_CLONE are not set: make test-openvla",
)

B, C, A, SIDE = 3, 8, 7, 32
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


def write_policy(folder: Path) -> OpenVLABody:
    """Write random weights. Logits of other words are 0, so that the best word is an action."""
    torch.manual_seed(0)
    body = OpenVLABody(CONFIG)
    with torch.no_grad():
        for p in body.parameters():
            p.add_(0.1 * torch.randn_like(p))
        body.dino.embeddings.position_embeddings[:, 0] = 0  # timm has none there
        head, last = body.language_model.lm_head.weight, CONFIG.vocab_size
        actions = 10 * head[last - CONFIG.action_bins : last]
        head.zero_()
        head[last - CONFIG.action_bins : last] = actions
        body.language_model.model.embed_tokens.weight.mul_(5)
    write_openvla(body, folder)
    return body


def our_bins(model: OpenVLA, context: Embedded, decode: str) -> Tensor:
    """Return the most likely bins [B, C A] or [B, A]."""
    if decode == "parallel":
        return model.logits(model.hidden(context, None)).argmax(-1)
    hidden, cache = model.start(context)
    bins = [model.logits(hidden).argmax(-1)]
    while len(bins) < A:
        bins.append(model.logits(model.next(bins[-1], cache)).argmax(-1))
    return torch.stack(bins, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("decode", CLONES)
def test_actions(decode: str, tmp_path: Path) -> None:
    body = write_policy(tmp_path / "policy")
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (B, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    words = [torch.randint(3, 31000, (5 + 4 * i,), generator=generator) for i in range(B)]
    prompts = [[1, *x.tolist(), EMPTY] for x in words]
    inputs = {f"ids{i}": torch.tensor([x]) for i, x in enumerate(prompts)}
    save_file(inputs | {"pixels": body.pixels(images)}, tmp_path / "inputs.safetensors")
    program = Path(__file__).with_name("openvla_actions.py")
    command = [PYTHON, str(program), CLONES[decode], str(tmp_path), decode]
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = load_file(tmp_path / "actions.safetensors")

    ids, mask = pad_left(prompts, CONFIG.pad_token_id)
    model = OpenVLA(body, None, actions=C * A)
    context = model.embed_prompt(model.encode_images(images), ids, mask)
    bins = our_bins(model, context, decode)
    actions = openvla_files.ActionTokens.from_config(CONFIG).actions(bins.view(B, -1, A))
    theirs = torch.stack([expected[f"actions{i}"] for i in range(B)]).view_as(actions)
    difference = float((actions - theirs).abs().max() / theirs.abs().max())
    print(f"OpenVLA, {decode}: largest difference of actions {difference:.2g}")
    assert theirs.std() > 0.1 and difference < 1e-5
    if decode == "parallel":
        hidden = model.hidden(context, None)
        states = torch.stack([expected[f"hidden{i}"] for i in range(B)])
        difference = float((hidden - states).abs().max() / states.abs().max())
        print(f"OpenVLA, {decode}: largest difference of hidden states {difference:.2g}")
        assert difference < 1e-5
