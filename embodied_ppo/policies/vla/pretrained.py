"""Policies on published models: OpenVLA and OpenVLA-OFT, with action tokens or a regression head.

B rows, K cameras, C actions of a chunk, A dimensions of each, P visual tokens, L tokens of a
prompt, D width.

Inputs: images, the instruction and, where the directory has a projector for it (``openvla_heads``),
the robot's state: all vector observations. Images stay uint8 until the model resizes them; a prompt
is tokenised once per sentence.

Actions: those of OpenVLA are un-normalised by its statistics (q01, q99 of ``model.unnorm_key``) and
are in the units of the dataset. Use env.action_mapping=clip where the simulator's bounds are not -1
and 1. The gripper is not normalised: in all datasets of OpenVLA 0 is closed and 1 is open. It is
mapped to the closing value of the simulator or its negative (``closes``).

Training: with model.lora_rank the adapters of the language model's linear layers and the value
head; without it all parameters, apart from the vision encoder under model.freeze_trunk. If the
vision encoder is not trained, ``encode`` returns its features instead of images. Trained parameters
are float32.
model.dtype is the type of the arithmetic, and of the frozen weights under adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor, nn

from embodied_envs.base import tree
from embodied_envs.base.errors import ConfigError
from embodied_envs.base.observation_names import INSTRUCTION, SINGLE
from embodied_envs.types import ActionSpec, Obs, ObsSpec
from embodied_ppo.core.collectives import layers
from embodied_ppo.core.types import Decision, Evaluation
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import lora
from embodied_ppo.policies.backbone import InferenceModule, channels_first_shape
from embodied_ppo.policies.vla import openvla_files, openvla_heads, published_weights, vla_policy
from embodied_ppo.policies.vla.action_tokens import Tokens
from embodied_ppo.policies.vla.gaussian import Gaussian
from embodied_ppo.policies.vla.openvla import OpenVLA, OpenVLABody
from embodied_ppo.policies.vla.openvla_files import ActionTokens
from embodied_ppo.policies.vla.trunk import Grounding, ObservationEncoder

VALUE_UNITS = 512  # largest hidden layer of the value head, as in RLinf

# Text -> ids, see ``openvla.encode_prompts``.
Tokenize: TypeAlias = "Callable[[str], Sequence[int]]"


class VisionEncoder(ObservationEncoder):
    """Selects images and, with ``state``, vectors; holds the tokenised prompts of the sentences."""

    def __init__(self, obs_spec: ObsSpec, config: ModelConfig, *, state: bool) -> None:
        named = tree.named(obs_spec, SINGLE).items()
        read = {n: s for n, s in named if state or s.layout is not None or n == INSTRUCTION}
        super().__init__(read, replace(config, normalize_obs=False))
        shapes = {name: channels_first_shape(s) for name, s in self.encoder.images.items()}
        channels, height, width = next(iter(shapes.values()))
        self.image_size = height, width
        if channels != 3 or len(set(shapes.values())) > 1:
            raise ConfigError(
                f"model.checkpoint={config.checkpoint}: images must be RGB and of one size, but"
                f" have the shapes {shapes}; set env.cameras and env.image_size"
            )

    def images(self, obs: Obs) -> Tensor:
        """Return the images of all cameras, uint8 [B, K, 3, H, W]."""
        inputs = self.encode_observations(obs)
        return torch.stack([inputs[name] for name in self.names], dim=1)


class PublishedVLA(InferenceModule, vla_policy.VLAPolicy, lora.Adapted):
    """Policy on a published model, see the module's description; subclasses add the action head."""

    # Observations that a frozen vision encoder processes at a time.
    FROZEN_ROWS = 64
    # Share of the device's memory that features may use without model.freeze_trunk.
    FEATURE_SHARE = 0.25

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        *,
        chunk: int,
        sentences: Sequence[str],
        mapping: str = "none",
        closes: float | None = None,
        values: int = 1,
    ) -> None:
        """Build the policy from the directory ``config.checkpoint``.

        Args:
            obs_spec: Observations of one environment.
            action_spec: Actions of one environment.
            config: Options of the section ``model``.
            chunk: Actions of a chunk.
            sentences: The simulator's instructions.
            mapping: Value of env.action_mapping.
            closes: Value of the last action dimension that closes the simulator's gripper; its
                negative opens it. None: the simulator does not report it.
            values: Outputs of the value head, see ``ValueHead``.

        Raises:
            ConfigError: Task, options and checkpoint do not fit together.
        """
        super().__init__()
        self.actions: ActionTokens  # action tokens and their statistics
        # Statistics of the robot's state, None: it is not used.
        self.state: ActionTokens | None = None
        self.closes = closes
        self.chunk, self.size = chunk, vla_policy.action_size(action_spec, chunk, config)
        self.temperature = config.temperature
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.rank = config.lora_rank
        folder = Path(str(config.checkpoint))
        has_state = any(folder.glob("proprio_projector--*"))
        self.trunk = VisionEncoder(obs_spec, config, state=has_state)
        self.body = self._open(config)
        # Modules of the directory's other files, see ``openvla_heads.KINDS``.
        self.heads = nn.ModuleDict(self._load_heads(folder, self.trunk.encoder.vector_size))
        if has_state:
            model = self.body.body.config
            self.state = ActionTokens.from_config(model, config.unnorm_key, "proprio")
        vla_policy.check_units(action_spec, config, mapping)
        self.width = width = self.body.hidden_size
        self.build_head(config)
        hidden = min(4 * width, VALUE_UNITS)
        self.value_head = vla_policy.ValueHead(width, config.detach_value, hidden, values=values)
        self.eval()  # switches off the dropout that some models have
        # Names of parameters that the forward pass does not use.
        self.unread = {name for name, p in self.body.named_parameters() if not p.requires_grad}
        if self.rank:
            lora.adapt(self.body.language, rank=self.rank, alpha=config.lora_alpha)
        self.freeze(config.freeze_trunk)
        if self.rank:
            assert config.checkpoint is not None
            self.set_base_weights(config.checkpoint)
        self.set_sentences(sentences)

    def _load(self, config: ModelConfig, dtype: torch.dtype) -> tuple[OpenVLABody, Tokenize]:
        """Return the networks of the directory, and its tokeniser."""
        folder = str(config.checkpoint)
        body = openvla_files.load(folder, dtype=dtype, policy=config.policy)
        return body, openvla_files.tokenizer(folder)

    def _load_heads(self, folder: Path, vectors: int) -> dict[str, nn.Module]:
        """Return the modules of the directory's other files; the state has ``vectors`` numbers."""
        sizes = {"action_head": self.size, "proprio_projector": vectors}
        return openvla_heads.load(folder, self.body.hidden_size, sizes)

    def build_head(self, config: ModelConfig) -> None:
        """Prepare the action head; the model is loaded."""
        raise NotImplementedError

    def first_hidden_of(self, context: Any) -> Tensor:
        """Return hidden states [B, D] that predict the first number of an action, with gradient."""
        raise NotImplementedError

    def _open(self, config: ModelConfig) -> OpenVLA:
        """Load the model of the directory and its statistics.

        Raises:
            ConfigError: Options, task and directory do not fit together.
        """
        # Frozen weights under adapters are never updated, so they need no float32 copy.
        dtype = self.dtype if self.rank else torch.float32
        body, tokenize = self._load(config, dtype)
        try:
            self.actions = ActionTokens.from_config(body.config, config.unnorm_key)
        except ConfigError as error:
            raise ConfigError(f"model.{error}") from error
        if len(self.actions.low) != self.size:
            raise ConfigError(
                f"model.checkpoint={config.checkpoint}: its actions have {len(self.actions.low)}"
                f" dimensions, the task's {self.size}; use another model.unnorm_key, or a task of"
                " that robot"
            )
        body.center_crop = config.center_crop
        stop = not config.omit_stop_token
        model = OpenVLA(body, tokenize, actions=self.chunk * self.size, stop_token=stop)
        body.recompute = model.trunk.module.recompute = config.gradient_checkpointing
        return model

    # --------------------------------------------------------------------------- trained parameters
    def freeze(self, frozen: bool) -> None:
        """Exclude the vision encoder from training, or include it.

        With adapters only these are trained in either case.
        """
        self.frozen = frozen
        vision = {id(p) for p in self.body.vision_parameters()}
        for name, p in self.body.named_parameters():
            trained = "lora_" in name if self.rank else not (frozen and id(p) in vision)
            p.requires_grad_(trained and name not in self.unread)
        # Without adapters keep float32: cloning trains the vision encoder, too, before it is
        # frozen.
        lora.cast_parameters(self, self.dtype if self.rank else torch.float32)

    def units(self) -> list[nn.Module]:
        """See ``Policy.units``."""
        return [*layers(self.body), self.body.language.get_input_embeddings()]

    def set_sentences(self, sentences: Sequence[str]) -> None:
        """Set the sentences that the instruction observation indexes."""
        self.sentences = tuple(sentences)
        self.trunk.table = self.body.prompts(self.sentences or ("do the task",)).to(self.device)

    def published_parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters of OpenVLA by their names there."""
        named = self.body.body.named_parameters()
        return {name.replace(".default.", "."): p for name, p in named if p.requires_grad}

    def export(self, source: str | Path, out: str | Path) -> None:
        """Write the model in the layout of ``source``, see ``published_weights.save``.

        Adapters are merged; the value head is left out. The policy cannot be used afterwards.
        """
        lora.merge(self.body.language)
        targets = openvla_files.entries(self.body.body)
        published_weights.save(targets, source, out, openvla_files.rename)
        openvla_heads.save(out, dict(self.heads))

    # ------------------------------------------------------------------------------------- encoding
    @property
    def vision_learns(self) -> bool:
        """Whether the vision encoder is trained."""
        return not self.frozen and not self.rank

    @torch.no_grad()
    def encode(self, obs: Obs) -> dict[str, Tensor]:
        """Return the prompts, and images or, unless the vision encoder is trained, visual tokens.

        All epochs of an update use the same visual tokens. Without model.freeze_trunk, images are
        returned instead if the tokens exceed ``FEATURE_SHARE``.
        """
        images, table = self.trunk.images(obs), self.trunk.table
        rows = self.trunk.instruction_index(obs, len(images), images.device)
        inputs = {f"/{name}": getattr(table, name)[rows] for name in ("ids", "mask")}
        if self.state is not None:
            self.state = self.state.to(images.device)
            scaled = self.state.scaled(self.trunk.raw_vector(obs)).clamp(-1, 1)
            inputs["/state"] = scaled.float()
        if self.vision_learns:
            return inputs | {"/images": images}
        encode = lambda part: self._encode_images(part["/images"])
        parts, limit = {"/images": images}, self._feature_limit()
        features = vla_policy.encode_in_parts(encode, parts, self.FROZEN_ROWS, limit)
        return inputs | (parts if features is None else features)

    def _feature_limit(self) -> float:
        """Return the bytes that features may take."""
        return float("inf") if self.frozen else self.FEATURE_SHARE * self.device_memory_gb() * 1e9

    def keeps_features(self, rows: int) -> bool:
        """See ``VLAPolicy.keeps_features``."""
        if self.vision_learns:
            return False
        height, width = self.trunk.image_size
        shape = (1, len(self.trunk.names), 3, height, width)
        one = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        with torch.no_grad():
            size = sum(x.nbytes for x in self._encode_images(one).values())
        return size * rows <= self._feature_limit()

    def _encode_images(self, images: Tensor) -> dict[str, Tensor]:
        learns = torch.is_grad_enabled() and self.vision_learns
        with torch.set_grad_enabled(learns), lora.autocast(self.device, self.dtype):
            return self.body.encode_images(images)

    def encode_context(self, inputs: dict[str, Tensor]) -> Any:
        """See ``VLAPolicy.encode_context``."""
        images = inputs.get("/images")
        image_features = inputs if images is None else self._encode_images(images)
        with lora.autocast(self.device, self.dtype):
            if "/state" in inputs:  # one token after those of the images
                token = self.heads["proprio_projector"](inputs["/state"]).unsqueeze(1)
                visual = image_features["/visual"]
                image_features = {"/visual": torch.cat((visual, token.to(visual.dtype)), dim=1)}
            return self.body.embed_prompt(image_features, inputs["/ids"], inputs["/mask"])

    # -------------------------------------------------------------------------------------- actions
    def task_actions(self, x: Tensor) -> Tensor:
        """Return actions [B, C, A] of x as in ``ActionTokens``; units as in the module."""
        action = self.actions.unscaled(x)
        if self.closes is None:
            return action
        gripper = torch.where(action > 0.5, -self.closes, self.closes)
        return torch.where(self.actions.mask, action, gripper)

    def dataset_actions(self, action: Tensor) -> Tensor:
        """Return actions [.., A] of the task in the units of the dataset."""
        self.actions = self.actions.to(action.device)
        if self.closes is None:
            return action
        return torch.where(self.actions.mask, action, (1 - action / self.closes) / 2)

    def scaled_actions(self, action: Tensor, obs: Obs) -> Tensor:
        """See ``VLAPolicy.scaled_actions``."""
        self.actions = self.actions.to(action.device)
        return self.actions.scaled(action)


class CheckpointVLA(PublishedVLA, Tokens[Any]):
    """Policy over action tokens on a published model; see the module's description."""

    def build_head(self, config: ModelConfig) -> None:
        """See ``PublishedVLA.build_head``."""
        self.bins, self.autoregressive = config.bins, config.decode == "autoregressive"
        bins = self.body.body.config.action_bins
        if bins != self.bins:
            raise ConfigError(
                f"model.bins={self.bins}: the checkpoint has {bins} words for actions; write"
                f" model.bins={bins}"
            )

    def first_hidden_of(self, context: Any) -> Tensor:
        """See ``PublishedVLA.first_hidden_of``."""
        first = context.x.new_zeros(len(context.x), 1).long() if self.autoregressive else None
        return self.hidden(context, first)[:, 0]

    def hidden(self, context: Any, bins: Tensor | None) -> Tensor:
        """See ``Tokens.hidden``."""
        with lora.autocast(self.device, self.dtype):
            return self.body.hidden(context, bins).float()

    def start(self, context: Any) -> tuple[Tensor, Any]:
        """See ``Tokens.start``."""
        with lora.autocast(self.device, self.dtype):
            hidden, state = self.body.start(context)
        return hidden.float(), state

    def next(self, bins: Tensor, state: Any) -> Tensor:
        """See ``Tokens.next``."""
        with lora.autocast(self.device, self.dtype):
            return self.body.next(bins, state).float()

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``Tokens.logits``."""
        return self.body.logits(hidden)

    def actions_of(self, bins: Tensor) -> Tensor:
        """Return actions [B, C, A] of bins; units as described in the module."""
        self.actions = self.actions.to(bins.device)
        return self.task_actions(self.actions.values(bins))

    def bins_of(self, action: Tensor) -> Tensor:
        """See ``Tokens.bins_of``."""
        return self.actions.bins(self.dataset_actions(action))


class RegressionVLA(PublishedVLA, Gaussian[Any]):
    """Policy on the regression head of OpenVLA-OFT, which is the mean of a Gaussian.

    Deterministic actions are those of the published model. The head has no distribution: PPO
    explores with one learned standard deviation for each number, in the unit of x in
    ``ActionTokens``. Cloning minimises |x - mean| as the publishers do (L1), without the deviation.
    """

    def build_head(self, config: ModelConfig) -> None:
        """See ``PublishedVLA.build_head``."""
        self.build_scale(config)

    def read(self, context: Any) -> tuple[Tensor, Tensor]:
        """See ``Gaussian.read``."""
        with lora.autocast(self.device, self.dtype):
            hidden = self.body.hidden(context, None).float()
        parts = hidden.view(len(hidden), self.chunk, -1)
        return self.heads["action_head"](parts).float(), hidden[:, 0]

    def first_hidden_of(self, context: Any) -> Tensor:
        """See ``PublishedVLA.first_hidden_of``."""
        return self.read(context)[1]

    def act(self, inputs: dict[str, Tensor], *, noise: Tensor | None = None) -> Decision:
        """See ``Policy.act``."""
        decision = super().act(inputs, noise=noise)
        x = decision.action.unflatten(1, (self.chunk, self.size))
        self.actions = self.actions.to(x.device)
        return replace(decision, action=self.task_actions(x).flatten(1), replay={"scaled": x})

    def evaluate(
        self, inputs: dict[str, Tensor], action: Tensor, replay: dict[str, Tensor]
    ) -> Evaluation:
        """See ``Policy.evaluate``."""
        return super().evaluate(inputs, replay["scaled"], replay)

    def action_loss(
        self, context: Any, action: Tensor, generator: Generator | None
    ) -> tuple[Tensor, Grounding | None]:
        """Return the absolute error of x; see ``VLAPolicy.action_loss``."""
        mean, first = self.read(context)
        x = self.actions.scaled(self.dataset_actions(action))
        return (mean - x.float()).abs(), Grounding(first)
