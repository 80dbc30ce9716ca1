"""Action tokens of a published model: ``vla_token.Tokens`` on OpenVLA, OpenVLA-OFT or a vision-language model.

B rows, K cameras, C actions of a chunk, A dimensions of each, P visual tokens, L tokens of a prompt, D width.

A policy sees pictures and the sentence; other observations (the robot's state) are not read, for the models were not
made to. Pictures stay uint8 until the model resizes them; prompts are made once for each sentence.

What an action is: OpenVLA's are un-normalised by its statistics (q01, q99 of ``model.unnorm_key``) and given to the
simulator as they are, in the units of the dataset that they were taken from: env.action_mapping=clip where the
simulator's bounds are not -1 and 1. What is not normalised is the gripper, which in all of OpenVLA's datasets is 0
closed and 1 open: it is given to a simulator that says what closes its own (``closes``) as that or its negative. Other
models' bins are equal parts of [-1, 1] (``Tokens.parts``).

What is trained: with model.lora_rank adapters on the language model's linear layers, the value head, and of models
whose words mean no actions yet those words' rows; without it everything, but what sees under model.freeze_trunk. That
is kept in float32; model.dtype is what is computed in, and what adapters stand beside is kept in.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.collectives import layers
from embodied_ppo.core.types import ActionSpec, ConfigError, Obs, ObsSpec
from embodied_ppo.models import lora
from embodied_ppo.models.backbone import Encoder, channels_last, is_image
from embodied_ppo.models.checkpoint_files import json_of, share
from embodied_ppo.models.vla import openvla_files
from embodied_ppo.models.vla.action_tokens import Tokens
from embodied_ppo.models.vla.hf_vlm import Prompts, VisionLanguage
from embodied_ppo.models.vla.openvla import Cache, Embedded, OpenVLABody
from embodied_ppo.models.vla.openvla_files import ActionTokens
from embodied_ppo.models.vla.trunk import INSTRUCTION, Found, ValueHead, action_size, check_units

OTHERS = {
    "pi0": "write model.policy=flow",
    "pi05": "π0.5 is not supported",
    "smolvla": "SmolVLA is not supported",
    "act": "it was not made for sentences",
    "diffusion": "it was not made for sentences",
}
"""Kinds of directories that hold policies of another family."""
VALUE_UNITS = 512
"""Most units within the value head, as RLinf's; it reads 4096 numbers of a model of 7 B."""


class Body(Protocol):
    """What a published model has to answer; ``vlm.VisionLanguage`` documents the methods."""

    hidden_size: int

    @property
    def recompute(self) -> bool: ...

    @recompute.setter
    def recompute(self, value: bool) -> None: ...

    @property
    def language(self) -> nn.Module:
        """What gets adapters."""
        ...

    def sight(self) -> list[nn.Parameter]: ...

    def fresh(self) -> list[nn.Parameter]:
        """Parameters that are new, and trained beside adapters."""
        ...

    def prompts(self, sentences: Sequence[str]) -> Prompts: ...

    def look(self, images: Tensor) -> dict[str, Tensor]: ...

    def read(self, looked: dict[str, Tensor], ids: Tensor, mask: Tensor, position: Tensor) -> Any: ...

    def hidden(self, seen: Any, bins: Tensor | None) -> Tensor: ...

    def start(self, seen: Any) -> tuple[Tensor, Any]: ...

    def next(self, bins: Tensor, state: Any) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def write(self, folder: Path) -> None: ...


class OpenVLA(nn.Module):
    """OpenVLA's body behind the same words."""

    def __init__(self, body: OpenVLABody, tokenize: Any, *, actions: int) -> None:
        """``tokenize``: text to ids, see ``openvla_checkpoint.encode_prompts``; ``actions``: C·A."""
        super().__init__()
        self.body, self.tokenize, self.actions = body, tokenize, actions
        self.hidden_size = body.hidden_size

    @property
    def recompute(self) -> bool:
        return self.body.recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        self.body.recompute = value

    @property
    def language(self) -> nn.Module:
        return self.body.language_model.model

    def sight(self) -> list[nn.Parameter]:
        return [p for module in (self.body.dino, self.body.siglip, self.body.projector) for p in module.parameters()]

    def fresh(self) -> list[nn.Parameter]:
        return []

    def prompts(self, sentences: Sequence[str]) -> Prompts:
        config = self.body.config
        ids, mask = openvla_files.encode_prompts(self.tokenize, sentences, pad=config.pad_token_id)
        return Prompts(ids, mask, (mask.cumsum(1) - 1).unsqueeze(1))

    def look(self, images: Tensor) -> dict[str, Tensor]:
        return {"/visual": self.body.vision(images)}

    def read(self, looked: dict[str, Tensor], ids: Tensor, mask: Tensor, position: Tensor) -> Embedded:
        return self.body.read(looked["/visual"], ids, mask)

    def hidden(self, seen: Embedded, bins: Tensor | None) -> Tensor:
        return self.body.predict(seen, bins, placeholders=0 if bins is not None else self.actions)

    def start(self, seen: Embedded) -> tuple[Tensor, Cache]:
        return self.body.begin(seen, room=self.actions - 1)

    def next(self, bins: Tensor, state: Cache) -> Tensor:
        return self.body.step(bins, state)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.body.logits(hidden)

    def write(self, folder: Path) -> None:
        openvla_files.save(self.body, folder)


class Eyes(nn.Module):
    """Which observations are pictures, and the prompts of the sentences that another one counts."""

    table: Prompts

    def __init__(self, obs_spec: ObsSpec, config: ModelConfig) -> None:
        super().__init__()
        named = obs_spec if isinstance(obs_spec, dict) else {"obs": obs_spec}
        self.told = INSTRUCTION in named
        self.encoder = Encoder({name: s for name, s in named.items() if is_image(s)}, config)
        shapes = {name: s.shape for name, s in self.encoder.images.items()}
        if not shapes:
            raise ConfigError(
                f"model.checkpoint={config.checkpoint}: the observation holds no picture; name a camera with "
                "env.cameras=[front]"
            )
        a, b, c = next(iter(shapes.values()))
        last = channels_last(next(iter(self.encoder.images.values())))
        channels, self.picture = (c, (a, b)) if last else (a, (b, c))
        if channels != 3 or len(set(shapes.values())) > 1:
            raise ConfigError(
                f"model.checkpoint={config.checkpoint}: pictures must be RGB and of one size, but are {shapes}; set "
                "env.cameras and env.image_size"
            )

    @torch.no_grad()
    def images(self, named: dict[str, Tensor]) -> Tensor:
        """uint8 [B, K, 3, H, W]."""
        return torch.stack(
            [named[n].movedim(-1, -3) if channels_last(s) else named[n] for n, s in self.encoder.images.items()], dim=1
        )


class CheckpointVLA(Tokens[Any], lora.Adapted):
    """See the module."""

    FROZEN_ROWS = 64
    """Observations that a frozen trunk looks at together."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        *,
        chunk: int,
        sentences: Sequence[str],
        closes: float | None = None,
        values: int = 1,
    ) -> None:
        """From the directory ``config.checkpoint``; ``closes``: the simulator's action that closes the gripper, its
        negative opens it; ``values``: see ``ValueHead``. Raises ConfigError."""
        super().__init__()
        self.closes = closes
        self.chunk, self.size, self.bins = chunk, action_size(action_spec, chunk, config), config.bins
        self.autoregressive, self.temperature = config.decode == "autoregressive", config.temperature
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.rank = config.lora_rank
        self.trunk = Eyes(obs_spec, config)
        self.actions: ActionTokens | None = None
        """OpenVLA's; None: bins are equal parts of [-1, 1]."""
        self.body: Any = self._open(config)
        width = self.body.hidden_size
        self.value_head = ValueHead(width, config.detach_value, min(4 * width, VALUE_UNITS), values=values)
        self.body.recompute = config.gradient_checkpointing
        for module in self.modules():  # some models' own dropout
            module.training = False
        self.still = {name for name, p in self.body.named_parameters() if not p.requires_grad}
        """Parameters that nothing reads."""
        if self.rank:
            lora.adapt(self.body.language, rank=self.rank, alpha=config.lora_alpha)
        self.freeze(config.freeze_trunk)
        if self.rank:
            assert config.checkpoint is not None
            self.rests_on(config.checkpoint)
        self.tell(sentences)

    @classmethod
    def of(
        cls,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        *,
        chunk: int,
        sentences: Sequence[str],
        mapping: str = "none",
        closes: float | None = None,
        values: int = 1,
    ) -> CheckpointVLA:
        """For a task with this env.action_mapping; the other arguments as for the class. Raises ConfigError."""
        policy = cls(obs_spec, action_spec, config, chunk=chunk, sentences=sentences, closes=closes, values=values)
        if policy.actions is not None:
            check_units(action_spec, config, mapping)
        return policy

    def _open(self, config: ModelConfig) -> Body:
        folder, count = str(config.checkpoint), self.chunk * self.size
        kind = _kind(folder)
        # what adapters stand beside need never be float32
        dtype = self.dtype if self.rank else torch.float32
        if kind != "openvla":
            if config.unnorm_key is not None:
                raise ConfigError(
                    f"model.unnorm_key={config.unnorm_key}: {folder} holds a {kind}, which has no statistics of "
                    "actions; leave it null"
                )
            cameras = len(self.trunk.encoder.images)
            parallel = None if self.autoregressive else count
            return VisionLanguage.of(
                folder, cameras=cameras, actions=parallel, bins=self.bins, picture=self.trunk.picture, dtype=dtype
            )
        body = openvla_files.load(folder, dtype=dtype, what="model.checkpoint")
        try:
            self.actions = ActionTokens.of(body.config, config.unnorm_key)
        except ConfigError as error:
            raise ConfigError(f"model.{error}") from error
        if self.actions.dim != self.size:
            raise ConfigError(
                f"model.checkpoint={folder}: its actions have {self.actions.dim} dimensions, the task's {self.size}; "
                "use another model.unnorm_key, or a task of that robot"
            )
        if body.config.action_bins != self.bins:
            raise ConfigError(
                f"model.bins={self.bins}: the checkpoint has {body.config.action_bins} words for actions; write "
                f"model.bins={body.config.action_bins}"
            )
        return OpenVLA(body, openvla_files.tokenizer(folder, what="model.checkpoint"), actions=count)

    # ----------------------------------------------------------------------------------------------------- what learns
    def freeze(self, frozen: bool) -> None:
        """Whether what sees stays as it is; with adapters all but them and what is new does in any case."""
        self.frozen = frozen
        sight, fresh = ({id(p) for p in ps} for ps in (self.body.sight(), self.body.fresh()))
        for name, p in self.body.named_parameters():
            learns = "lora_" in name or id(p) in fresh if self.rank else not (frozen and id(p) in sight)
            p.requires_grad_(learns and name not in self.still)
        lora.settle(self, self.dtype if self.rank else torch.float32)  # cloning trains what is frozen without adapters

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        critic = list(self.value_head.parameters())
        return {"actor": [p for p in self.body.parameters() if p.requires_grad], "critic": critic}

    def units(self) -> list[nn.Module]:
        return [*layers(self.body), self.body.language.get_input_embeddings()]

    def tell(self, sentences: Sequence[str]) -> None:
        """The sentences that observations count, from now on."""
        self.sentences = tuple(sentences)
        self.trunk.table = self.body.prompts(self.sentences or ("do the task",))

    def observe(self, obs: Obs, mask: Tensor) -> None:
        """Pictures need no normaliser."""

    def train(self, mode: bool = True) -> CheckpointVLA:
        """Changes nothing: dropout would make log-probabilities noise."""
        return self

    @property
    def query(self) -> Tensor:
        """[1, D]: what cloning asks for device and width."""
        weight = self.value_head.layers[0].weight
        assert isinstance(weight, Tensor)
        return weight[:1]

    # ----------------------------------------------------------------------------------------------------- what is seen
    @torch.no_grad()
    def encode(self, obs: Obs) -> dict[str, Tensor]:
        """Pictures (or, where what sees is frozen, their visual tokens) and the sentence's prompt."""
        named = obs if isinstance(obs, dict) else {"obs": obs}
        images, table = self.trunk.images(named), self.trunk.table
        rows = named[INSTRUCTION].long() if self.trunk.told else images.new_zeros(len(images), dtype=torch.int64)
        inputs = {f"/{name}": getattr(table, name).to(rows.device)[rows] for name in ("ids", "mask", "position")}
        if not self.frozen:
            return inputs | {"/images": images}
        parts = [self._look(part) for part in images.split(self.FROZEN_ROWS)]
        return inputs | {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _look(self, images: Tensor) -> dict[str, Tensor]:
        learns = torch.is_grad_enabled() and not self.frozen and not self.rank
        with torch.set_grad_enabled(learns), lora.arithmetic(self.device, self.dtype):
            return self.body.look(images)

    def see(self, inputs: dict[str, Tensor]) -> Any:
        looked = inputs if "/images" not in inputs else self._look(inputs["/images"])
        with lora.arithmetic(self.device, self.dtype):
            return self.body.read(looked, inputs["/ids"], inputs["/mask"], inputs["/position"])

    # ---------------------------------------------------------------------------------------------------------- tokens
    def hidden(self, seen: Any, bins: Tensor | None) -> Tensor:
        with lora.arithmetic(self.device, self.dtype):
            return self.body.hidden(seen, bins).float()

    def start(self, seen: Any) -> tuple[Tensor, Any]:
        with lora.arithmetic(self.device, self.dtype):
            hidden, state = self.body.start(seen)
        return hidden.float(), state

    def next(self, bins: Tensor, state: Any) -> Tensor:
        with lora.arithmetic(self.device, self.dtype):
            return self.body.next(bins, state).float()

    def first(self, seen: Any) -> Tensor:
        return self.start(seen)[0] if self.autoregressive else self.hidden(seen, None)[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.body.logits(hidden)

    def found(self, seen: Any, first: Tensor) -> Found:
        return Found(first)

    def centre(self, bins: Tensor) -> Tensor:
        """Actions [B, C, A], see the module."""
        if self.actions is None:
            return super().centre(bins)
        self.actions = self.actions.to(bins.device)
        action = self.actions.actions(bins)
        if self.closes is None:
            return action
        return torch.where(self.actions.mask, action, torch.where(action > 0.5, -self.closes, self.closes))

    def bin_of(self, action: Tensor) -> Tensor:
        if self.actions is None:
            return super().bin_of(action)
        self.actions = self.actions.to(action.device)
        if self.closes is not None:
            action = torch.where(self.actions.mask, action, (1 - action / self.closes) / 2)
        return self.actions.bins(action)


def export(policy: CheckpointVLA, source: str | Path, out: str | Path) -> None:
    """The model as its directory ``source`` held it, with what was learned: adapters are merged, the value head is left
    out. ``policy`` is of no use afterwards. Raises OSError."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    lora.merge(policy.body.language)
    for file in Path(source).iterdir():
        if file.is_file() and "safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)
    policy.body.write(folder)
    share(folder)


def _kind(folder: str) -> str:
    """model_type. Raises ConfigError: what is missing, or what kind of directory it is."""
    where = f"model.checkpoint={folder}"
    if not Path(folder).is_dir():
        raise ConfigError(f"{where}: there is no such directory; download one (hf download NAME --local-dir DIR)")
    raw = json_of(Path(folder) / "config.json", where, openvla_files.ELSE)
    kind = str(raw.get("model_type") or raw.get("type") or "nothing that it says")
    if kind in OTHERS:
        raise ConfigError(f"{where}: holds {kind}, not a model of action tokens: {OTHERS[kind]}")
    if kind == "openvla":
        return kind
    if raw.get("vision_config") is None:
        raise ConfigError(
            f"{where}: holds {kind}, which has no vision_config; model.policy=token reads OpenVLA (model_type openvla) "
            "and vision-language models (PaliGemma, SmolVLM, Idefics 3, LLaVA, Qwen 2 to 3 VL)"
        )
    return kind
