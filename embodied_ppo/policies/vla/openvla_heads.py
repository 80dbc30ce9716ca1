"""OpenVLA-OFT's files beside the model: a regression head for actions, a projector of the state.

``action_head--STEP_checkpoint.pt`` and ``proprio_projector--STEP_checkpoint.pt`` hold state_dicts
whose names begin with ``module.``. With LN for a layer norm, and h the hidden states [A D] that
predict the A numbers of one action:

    x = relu(W1 LN(h) + b1);  twice: x = x + relu(W LN(x) + b);  action = W2 LN(x) + b2
    token of the state = V2 gelu(V1 p + c1) + c2,  p in [-1, 1], after the visual tokens

Source: moojink/openvla-oft at 213c5ff (prismatic/models/action_heads.py, projectors.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError
from embodied_ppo.policies.checkpoint_files import check_finite, config_errors

PATTERN, PREFIX = "*--*checkpoint.pt", "module."
BLOCKS = 2  # residual layers of the regression head


class ActionHead(nn.Module):
    """Maps the hidden states of C actions, [B, C, A D], to actions [B, C, A] in the unit of x of
    ``openvla_files.ActionTokens``.
    """

    def __init__(self, width: int, size: int) -> None:
        """Build the head for hidden states of D = ``width`` and actions of A = ``size`` numbers."""
        super().__init__()
        blocks = [
            nn.ModuleDict({"ffn": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))})
            for _ in range(BLOCKS)
        ]
        self.model: Any = nn.ModuleDict(
            {
                "layer_norm1": nn.LayerNorm(size * width),
                "fc1": nn.Linear(size * width, width),
                "mlp_resnet_blocks": nn.ModuleList(blocks),
                "layer_norm2": nn.LayerNorm(width),
                "fc2": nn.Linear(width, size),
            }
        )

    def forward(self, hidden: Tensor) -> Tensor:
        layers = self.model
        x = layers["fc1"](layers["layer_norm1"](hidden)).relu()
        for block in layers["mlp_resnet_blocks"]:
            x = x + block["ffn"](x).relu()
        return layers["fc2"](layers["layer_norm2"](x))


class StateProjector(nn.Module):
    """Maps the robot's state [B, n] to a token [B, D]."""

    def __init__(self, width: int, size: int) -> None:
        """Build the projector of n = ``size`` numbers to D = ``width``."""
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size, width), nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(state)))


# Beginning of a file's name -> class of its contents.
KINDS = {"action_head": ActionHead, "proprio_projector": StateProjector}


def load(folder: str | Path, width: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the modules of a directory by their kind, see KINDS.

    Args:
        folder: The directory.
        width: Size of a hidden state.
        sizes: Numbers of an action and of the task's state, by kind.

    Raises:
        ConfigError: A file is damaged, of another kind (diffusion, FiLM), or of another robot.
    """
    label, modules = f"model.checkpoint={folder}", dict[str, Any]()
    for file in sorted(Path(folder).glob(PATTERN)):
        kind = file.name.partition("--")[0]
        if kind not in KINDS or kind in modules:
            raise ConfigError(
                f"{label}: holds {file.name}, which is not computed; read are one action_head"
                " (regression) and one proprio_projector"
            )
        with config_errors(f"{label}: {file.name} cannot be read (", "); download it again"):
            stored = torch.load(file, map_location="cpu", weights_only=True)
            weights = {key.removeprefix(PREFIX): x.float() for key, x in stored.items()}
        check_finite(weights.items(), label)
        expected = KINDS[kind](width, sizes[kind])
        for key, x in expected.state_dict().items():
            shape = tuple(weights[key].shape) if key in weights else "missing"
            if shape != tuple(x.shape):
                raise ConfigError(
                    f"{label}: {file.name} is of another model or robot: {key} is {shape}, and this"
                    f" task's is {tuple(x.shape)} ({kind} of {sizes[kind]} numbers)"
                )
        with config_errors(f"{label}: {file.name} is no {expected._get_name()}: "):
            expected.load_state_dict(weights)
        modules[kind] = expected
    return modules


def save(folder: str | Path, modules: dict[str, Any]) -> None:
    """Write trained modules into the files of a directory that have their kind."""
    for kind, module in modules.items():
        for file in Path(folder).glob(f"{kind}{PATTERN}"):
            torch.save({PREFIX + key: x for key, x in module.state_dict().items()}, file)
