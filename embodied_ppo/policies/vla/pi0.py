"""π0: PaliGemma encodes images and words, a smaller Gemma predicts the flow of actions.

The smaller Gemma is called action expert. B rows, K cameras, P tokens of the prefix (images, then
words), H actions of the model's horizon, N numbers of each and of a state (padded), D width of the
prefix, L layers, G key heads, d size of a head.

Weights and modules are those of transformers (PI0ForConditionalGeneration). The forward pass is
implemented here, because keys and values of the prefix have to be tensors that ``encode`` can store
and minibatches can index, instead of a growing cache. Attention::

    images | words                        attend to each other
                    state                 attends to these and itself
                          H noisy actions attend to everything

``pi0_files`` reads the published files.

Source: Black et al. 2024, arXiv 2410.24164.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError, show
from embodied_envs.types import ActionSpec, Obs, ObsSpec
from embodied_ppo.core.collectives import layers
from embodied_ppo.options.schema import ModelConfig
from embodied_ppo.policies import lora
from embodied_ppo.policies.backbone import VECTOR
from embodied_ppo.policies.decoder import run_layer
from embodied_ppo.policies.fusion import eagerly, normalise
from embodied_ppo.policies.vla import pi0_files, prefix, vla_policy
from embodied_ppo.policies.vla.flow_matching import Field, Flow, learned_log_std
from embodied_ppo.policies.vla.pi0_files import Published, Statistics
from embodied_ppo.policies.vla.prefix import PrefixCache, TimeEncoding, apply_norm, positions
from embodied_ppo.policies.vla.published_weights import PublishedTensor, Rename, save, substitute
from embodied_ppo.policies.vla.trunk import WORDS, ObservationEncoder, pad_rows

PAD = -1  # id of padding words
FROZEN_ROWS = 32  # observations that a frozen trunk processes at a time
MEMORY_SHARE = 0.5  # share of the device's memory that prefixes of a frozen trunk may use
# Beginnings of the names of parameters that the published model has, too.
PUBLISHED_PARTS = ("trunk.vlm.", "expert.", "embed.", "velocity.")
# Names of the inputs that hold a prefix.
KEYS, VALUES, VALID, POOLED = "/keys", "/values", "/valid", "/pooled"
# Name of the input that holds the numbers of the state that actions are relative to.
ORIGIN = "/origin"
# Inputs that depend on observations and a frozen trunk only, and on no normaliser.
KEPT = (KEYS, VALUES, VALID, POOLED)


# ---------------------------------------------------------------------------------------- the trunk
class PI0Trunk(ObservationEncoder):
    """Maps observations to a prefix. ``vlm`` is the part that model.freeze_trunk freezes."""

    def __init__(
        self,
        obs_spec: ObsSpec,
        vlm: Any,
        state_size: int,
        published: Published,
        config: ModelConfig,
    ) -> None:
        """Build the trunk.

        Args:
            obs_spec: Observations of one environment.
            vlm: transformers' PaliGemma.
            state_size: N.
            published: Contents of the checkpoint directory.
            config: Options of the section ``model``.

        Raises:
            ConfigError: The observations do not fit the model.
        """
        super().__init__(obs_spec, config)
        size = self.encoder.vector_size
        if size > state_size:
            raise ConfigError(
                f"model.checkpoint={config.checkpoint}: states have {size} numbers, the model"
                f" reads max_state_dim = {state_size}; use fewer"
            )
        self.state_size, self.tokenize = state_size, published.tokenize
        self.checkpoint = config.checkpoint
        self.statistics: Statistics | None = None
        if published.state is not None and size:
            label = f"model.checkpoint={config.checkpoint}"
            self.statistics = published.state.first(size, "states", label)
            self.encoder.moments = None
        # Dimensions of an action that are relative to the state, bool [A]; None: none.
        self.relative: Tensor | None = None
        self.vlm, self.antialias = vlm, published.antialias
        self.side = int(vlm.config.vision_config.image_size)
        self.checkpointing = config.gradient_checkpointing
        if self.checkpointing:
            self.vlm.vision_tower.activation_checkpointing_enable({"use_reentrant": False})
        self.register_buffer("table", torch.zeros(1, 1, dtype=torch.int64), persistent=False)

    def sentence_table(self, sentences: Sequence[str]) -> Tensor:
        """Return word ids int64 [S, words], padded with PAD.

        Without sentences the result is that of one empty sentence.
        """
        return pad_rows([self.tokenize(sentence) for sentence in sentences or ("",)], PAD)

    def check_words(self) -> None:
        """Check that the ids of the tokenizer have embeddings.

        Raises:
            ConfigError: The tokenizer is another model's.
        """
        # A model of sizes only (meta tensors) has no ids.
        largest = max((int(ids.max()) for ids in self.word_ids() if not ids.is_meta), default=0)
        count = self.vlm.language_model.embed_tokens.num_embeddings
        if largest >= count:
            raise ConfigError(
                f"model.checkpoint={self.checkpoint}: its tokenizer has the id {largest}, but the"
                f" model has embeddings of {count} words; copy the model's tokenizer into it"
            )

    def word_ids(self) -> tuple[Tensor, ...]:
        """Return the tensors of ids that prompts consist of."""
        return (self.table,)

    def encode(self, obs: Obs) -> dict[str, Tensor]:
        """Return images uint8 [B, 3, h, w], VECTOR float32 [B, N] and WORDS int64 [B, words]."""
        inputs = self.encode_observations(obs)
        rows, device = len(inputs[self.names[0]]), self.table.device
        state = inputs.get(VECTOR, torch.zeros(rows, 0, device=device))
        if self.statistics is not None:
            state = self.statistics.normalize(state)
        inputs[VECTOR] = F.pad(state, (0, self.state_size - state.shape[1]))
        if self.relative is not None:
            inputs[ORIGIN] = self.origin(obs)
        inputs[WORDS] = self.table[self.instruction_index(obs, rows, device)]
        return inputs

    def origin(self, obs: Obs) -> Tensor:
        """Return the numbers of the state that relative actions are added to, [B, A]."""
        assert self.relative is not None
        raw = self.raw_vector(obs).float()[:, : len(self.relative)]
        raw = F.pad(raw, (0, len(self.relative) - raw.shape[1]))
        return raw * self.relative.to(raw)

    def pixels(self, image: Tensor) -> Tensor:
        """Resize uint8 [B, 3, h, w] to float32 [B, 3, side, side] in [-1, 1], padded with black to
        a square.
        """
        x, (h, w) = image.float(), image.shape[-2:]
        if max(h, w) != self.side:
            ratio = max(h, w) / self.side  # a divisor, as in openpi: 720 of 1280 rows become 126
            h, w = (max(1, int(n / ratio)) for n in (h, w))
            x = F.interpolate(x, (h, w), mode="bilinear", antialias=self.antialias)
        x = x / 127.5 - 1
        left, top = self.offsets(w, h)
        if (h, w) == (self.side, self.side):
            return x
        return F.pad(x, (left, self.side - w - left, top, self.side - h - top), value=-1.0)

    def offsets(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns on the left and the rows above an image of width x height."""
        return (self.side - width) // 2, (self.side - height) // 2

    def image_tokens(self) -> int:
        """Return the number of tokens of one image."""
        return (self.side // self.vlm.config.vision_config.patch_size) ** 2

    def embed(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return images [B, K tokens, D] and words [B, words, D], and which words are no padding,
        bool [B, words].
        """
        pixels = torch.stack([self.pixels(inputs[name]) for name in self.names], dim=1)
        rows = len(pixels)  # of [B, K, 3, side, side]
        images = self.vlm.vision_tower(pixels.flatten(0, 1)).last_hidden_state
        images = self.vlm.multi_modal_projector(images)
        images = images.reshape(rows, -1, images.shape[-1])
        ids = inputs[WORDS]
        return images, self.vlm.language_model.embed_tokens(ids.clamp_min(0)), ids != PAD

    def forward(self, inputs: dict[str, Tensor]) -> PrefixCache:
        """Return the prefix of encoded observations."""
        images, words, given = self.embed(inputs)
        x = torch.cat((images.to(words.dtype), words), dim=1)
        valid = torch.cat((given.new_ones(images.shape[:2]), given), dim=1)
        rotation = positions(self.vlm.language_model, valid.cumsum(1) - 1)
        return self.run_layers(x, rotation, valid[:, None, None], valid, inputs)

    def run_layers(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        visible: Tensor,
        valid: Tensor,
        inputs: dict[str, Tensor],
    ) -> PrefixCache:
        """Return the prefix of embedded tokens.

        Args:
            x: [B, P, D].
            rotation: See ``block``.
            visible: bool, see ``block``.
            valid: bool [B, P], tokens that are not padding.
            inputs: Encoded observations.
        """
        language = self.vlm.language_model
        keys, values = [], []
        for layer in language.layers:
            x, k, v = run_layer(self.checkpointing, layer, prefix.block, x, rotation, visible)
            keys.append(k)
            values.append(v)
        out = normalise(language.norm, x).float() * valid.unsqueeze(-1)
        pooled = out.sum(1) / valid.sum(1, keepdim=True)
        return PrefixCache(
            tuple(keys), tuple(values), valid, pooled, inputs[VECTOR], inputs.get(ORIGIN)
        )


# --------------------------------------------------------------------------------------- the policy
class PI0(Flow, lora.Adapted):
    """Flow policy on π0; see ``Flow``.

    The value is computed from the pooled prefix and the state, which π0's prefix does not contain.
    With model.freeze_trunk ``encode`` returns keys, values and pooled prefix instead of images if
    they fit into memory (``max_kept_rows``). The epochs of an update then run the action expert
    only.
    """

    # Type of the model in config.json.
    kind = "pi0"
    trunk_class: type[PI0Trunk] = PI0Trunk
    # Function that builds the model of a config.json with new weights.
    build_model = staticmethod(pi0_files.build_model)
    # Function that reads a checkpoint directory.
    read = staticmethod(pi0_files.read)
    # Function that maps the keys of published files to names of parameters.
    rename: Rename = staticmethod(pi0_files.rename)
    # State tokens of the expert, before the noisy actions, to which they do not attend.
    state_tokens = 1
    # Whether the prefix contains the normalised state.
    state_in_prefix = False

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        published: Published | None = None,
        *,
        chunk: int,
        sentences: Sequence[str],
        mapping: str = "none",
        values: int = 1,
    ) -> None:
        """Build the policy from a checkpoint directory.

        Args:
            obs_spec: Observations of one environment.
            action_spec: Actions of one environment.
            config: Options of the section ``model``.
            published: Contents of the directory. None: read ``config.checkpoint``; checkpoints of
                the run then lack the weights that are never trained (``lora.Adapted``).
            chunk: Actions of a chunk.
            sentences: The simulator's instructions.
            mapping: Value of env.action_mapping.
            values: Outputs of the value head, see ``ValueHead``.

        Raises:
            ConfigError: The directory cannot be read, or task, options and checkpoint do not fit
                together.
        """
        super().__init__()
        folder = config.checkpoint if published is None else None
        if published is None:
            assert folder is not None
            published = self.read(folder)
        published = pi0_files.resolve(published, self.kind, config)
        self.set_prompt(bool(published.discrete_state))
        sizes = published.model.config
        self.chunk, self.size = chunk, vla_policy.action_size(action_spec, chunk, config)
        self._check_options(config, sizes)
        self.configure_chain(config, horizon=sizes.chunk_size, padded=sizes.max_action_dim)
        body = published.model
        vlm, state_size = body.model.vlm, sizes.max_state_dim
        self.trunk = self.trunk_class(obs_spec, vlm, state_size, published, config)
        self.embed, self.expert = body.embed_action_time, body.model.dit
        self.published_names = published.modules
        width = sizes.dit_config.hidden_size
        self.embed.sinusoid_embeds = TimeEncoding(width, (sizes.min_period, sizes.max_period))
        self.velocity = body.action_out_proj
        self.expert.embed_tokens = None  # never read, 0.26 G parameters
        self.checkpointing = config.gradient_checkpointing
        self.scale: nn.Module | None = None
        if config.flow_noise == "learned":
            inner = (nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, 64), nn.SiLU())
            self.scale = nn.Sequential(*inner, nn.Linear(64, self.padded))
        self.width = sizes.vlm_config.text_config.hidden_size
        inputs = self.width + state_size
        self.value_head = vla_policy.ValueHead(inputs, config.detach_value, values=values)
        self.statistics: Statistics | None = None
        if published.action is not None:
            label = f"model.checkpoint={config.checkpoint}"
            self.statistics = published.action.first(self.size, "actions", label)
            vla_policy.check_units(action_spec, config, mapping)
        vectors = self.trunk.encoder.vector_size
        if published.relative:
            self.trunk.relative = _relative_dimensions(published.relative, self.size, vectors)
        # Log line about sizes of the task that differ from those of the training, if any.
        task = vectors, self.size
        self.size_notice = pi0_files.size_notice(published, config, self.trunk.names, task)
        generator = torch.Generator().manual_seed(0)
        initial_noise = torch.randn(self.horizon, self.padded, generator=generator)
        self.initial_noise = nn.Buffer(initial_noise, persistent=False)
        self.dtype = getattr(torch, config.dtype)
        self.rank = config.lora_rank
        if self.rank:
            lora.adapt(self.trunk.vlm.language_model, rank=self.rank, alpha=config.lora_alpha)
        for part in self.modules():
            for name in ("dropout", "attention_dropout"):
                if isinstance(getattr(part, name, None), float):
                    setattr(part, name, 0.0)
        self.train()  # in eval mode transformers' layers ignore gradient checkpointing
        self.freeze(config.freeze_trunk)
        self.set_sentences(sentences)
        if folder is not None and (config.freeze_trunk or self.rank):
            self.set_base_weights(folder)

    def set_prompt(self, discrete_state: bool) -> None:
        """Select the prompt with or without the state, of which π0.5 has both."""

    def _check_options(self, config: ModelConfig, sizes: Any) -> None:
        """Raise ConfigError where task, options and the sizes of the checkpoint do not fit."""
        if self.size > sizes.max_action_dim:
            raise ConfigError(
                f"model.checkpoint={config.checkpoint}: the task's actions have {self.size}"
                f" dimensions, the model's max_action_dim = {sizes.max_action_dim}; use a"
                " checkpoint made for more"
            )
        if self.chunk > sizes.chunk_size:
            raise ConfigError(
                f"env.action_chunk={self.chunk}: the model plans chunk_size = {sizes.chunk_size}"
                f" actions; write env.action_chunk={sizes.chunk_size} or less"
            )
        if config.lora_rank and config.freeze_trunk:
            raise ConfigError(
                f"model.lora_rank={config.lora_rank}: adapters are on what model.freeze_trunk=true"
                " freezes; keep one"
            )

    def export(self, source: str | Path, out: str | Path) -> None:
        """Write the trained weights in the layout of ``source``, see ``published_weights.save``.

        Adapters are merged; the value head and the head of model.flow_noise=learned are left out.
        The policy cannot be used afterwards.
        """
        lora.merge(self.trunk.vlm.language_model)
        merged = ("trunk.vlm.language_model.",) if self.rank else ()
        trained = {
            name: PublishedTensor(tuple(p.shape), (p,))
            for name, p in self.named_parameters()
            if name.startswith(PUBLISHED_PARTS) and (p.requires_grad or name.startswith(merged))
        }
        save(trained, source, out, self.rename)

    def published_parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters of the published model by their names there."""
        return {
            substitute(name, self.published_names).replace(".default.", "."): p
            for name, p in self.named_parameters()
            if p.requires_grad and name.startswith(PUBLISHED_PARTS)
        }

    # --------------------------------------------------------------------------- trained parameters
    def freeze(self, frozen: bool) -> None:
        """Exclude PaliGemma from training, or include it; with adapters only these are trained.

        A policy whose base weights are in a directory (``lora.Adapted``) stays frozen, because the
        run's checkpoints do not contain them.
        """
        self.frozen = frozen = frozen or (self.base is not None and not self.rank)
        for name, p in self.trunk.vlm.named_parameters():
            p.requires_grad_(not frozen and (not self.rank or "lora_" in name))
        lora.cast_parameters(self, self.dtype)

    def units(self) -> list[nn.Module]:
        """See ``Policy.units``."""
        vlm = self.trunk.vlm
        return [*layers(vlm), *layers(self.expert), vlm.language_model.embed_tokens]

    def set_sentences(self, sentences: Sequence[str]) -> None:
        """Set the sentences that the instruction observation indexes."""
        self.sentences = tuple(sentences)
        self.trunk.table = self.trunk.sentence_table(self.sentences).to(self.device)
        self.trunk.check_words()

    # --------------------------------------------------------------------------------------- memory
    def prefix_bytes(self) -> int:
        """Return the size of one observation's prefix in bytes.

        It consists of keys and values of L layers, 2·L·P·G·d numbers, and the pooled outputs.
        """
        text = self.trunk.vlm.config.text_config
        tokens = len(self.trunk.names) * self.trunk.image_tokens() + self.prompt_tokens()
        numbers = 2 * text.num_hidden_layers * text.num_key_value_heads * text.head_dim
        each = numbers * self.dtype.itemsize
        return tokens * (each + 1) + 4 * text.hidden_size + 4 * self.trunk.state_size

    def prompt_tokens(self) -> int:
        """Return the number of tokens of the longest prompt, without images."""
        return self.trunk.table.shape[1]

    def max_kept_rows(self) -> int:
        """Return the number of prefixes that fit into their share of the device's memory."""
        return int(MEMORY_SHARE * self.device_memory_gb() * 1e9) // self.prefix_bytes()

    def keeps_features(self, rows: int) -> bool:
        """See ``VLAPolicy.keeps_features``."""
        return self.frozen and rows <= self.max_kept_rows()

    def kept_inputs(self, steps: int, *batches: int | None) -> tuple[str, ...]:
        """Return the inputs that acting keeps for a learner in the same process.

        On a CPU they are kept only where both would compute them in the same batches. Runs are
        then equal bit for bit in all placements. Nothing is kept where the prefix contains the
        state and the normaliser of the state changes during the run.

        Args:
            steps: Steps of a rollout.
            *batches: Environments, and limits of the rows that acting and the learner encode at a
                time; None: no limit.
        """
        encoder = self.trunk.encoder
        if self.state_in_prefix and encoder.vector_size and encoder.moments is not None:
            return ()
        fits = self.keeps_features(steps * (batches[0] or 0))
        even = all(rows is None or rows % FROZEN_ROWS == 0 for rows in batches)
        return KEPT if fits and (even or self.device.type != "cpu") else ()

    def memory_notice(self, rows: int) -> str | None:
        """Return the log line about the prefixes of an update's ``rows`` observations, if any."""
        if not self.frozen:
            return None
        each, limit = self.prefix_bytes(), self.max_kept_rows()
        sizes = f"{rows} prefixes of {each / 1e6:.3g} MB are {rows * each / 1e9:.3g} GB"
        line = f"kept through the epochs of an update (at most {limit} are)"
        if rows > limit:
            line = f"computed anew by every minibatch, because at most {limit} are kept"
        return f"model.freeze_trunk: {sizes}, {line}"

    # ------------------------------------------------------------------------------------- the body
    def encode(self, obs: Obs, kept: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """See ``Policy.encode``.

        Args:
            obs: Observations, [B, ..].
            kept: Inputs ``KEPT`` of an earlier call with the same observations.
        """
        inputs = self.trunk.encode(obs)
        if kept:
            return kept | {name: inputs[name] for name in (VECTOR, ORIGIN) if name in inputs}
        if not self.keeps_features(len(inputs[WORDS])):
            return inputs

        def prefix_of(part: dict[str, Tensor]) -> dict[str, Tensor]:
            result = self.encode_context(part)
            named = {KEYS: torch.stack(result.keys, 1), VALUES: torch.stack(result.values, 1)}
            named |= {VALID: result.valid, POOLED: result.pooled, VECTOR: result.state}
            return named if result.origin is None else named | {ORIGIN: result.origin}

        return vla_policy.encode_in_parts(prefix_of, inputs, FROZEN_ROWS) or {}

    def encode_context(self, inputs: dict[str, Tensor]) -> PrefixCache:
        """See ``VLAPolicy.encode_context``."""
        if KEYS in inputs:
            keys, values = (inputs[name].unbind(1) for name in (KEYS, VALUES))
            fixed = (inputs[VALID], inputs[POOLED], inputs[VECTOR], inputs.get(ORIGIN))
            return PrefixCache(keys, values, *fixed)
        learns = torch.is_grad_enabled() and not self.frozen
        with torch.set_grad_enabled(learns), lora.autocast(self.device, self.dtype):
            return self.trunk(inputs)

    def field(self, context: PrefixCache) -> Field:
        """Return the velocity field; each evaluation runs the expert once."""
        layers: list[Any] = list(self.expert.layers)
        calls = self.expert_calls(context)

        def flow(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor | None]:
            with lora.autocast(self.device, self.dtype):
                h, condition = self.embed_actions(context, x, tau)
                for layer, (function, *args) in zip(layers, calls, strict=True):
                    args = (h, *args, condition)
                    h = run_layer(self.checkpointing, layer, eagerly(function), *args)[0]
                h, _ = eagerly(apply_norm)(self.expert.norm, h[:, self.state_tokens :], condition)
                log_std = None if self.scale is None else learned_log_std(self.scale(h))
                return self.velocity(h).float(), log_std

        return flow

    def expert_calls(self, context: PrefixCache) -> list[tuple[Any, ...]]:
        """Return for each layer of the expert the function that computes it, such as ``block``, and
        its arguments between the tokens and the condition.
        """
        valid, states = context.valid, self.state_tokens
        rows, size, config = len(valid), states + self.horizon, self.expert.config
        place = valid.sum(1, keepdim=True) + torch.arange(size, device=valid.device)
        rotation = positions(self.expert, place)
        own = torch.ones(size, size, dtype=torch.bool, device=place.device)
        own[:states, states:] = False
        keys = valid[:, None].expand(rows, size, -1)
        sharing = config.num_attention_heads // config.num_key_value_heads
        mask = torch.cat((keys, own.expand(rows, -1, -1)), dim=2).repeat(1, sharing, 1).unsqueeze(1)
        pairs = zip(context.keys, context.values, strict=True)
        return [(prefix.block, rotation, mask, prefix.append_room(*kv, size)) for kv in pairs]

    def embed_actions(
        self, context: PrefixCache, x: Tensor, tau: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the inputs of the expert.

        Args:
            context: The prefix.
            x: Latents [B, H, N].
            tau: Times [B].

        Returns:
            Tokens [B, state_tokens + H, D'], and the condition [B, D'] of the norms (None: they
            have no condition).
        """
        return self.embed(context.state, x, tau), None

    def value_of(self, context: PrefixCache) -> Tensor:
        """See ``VLAPolicy.value_of``."""
        pooled = F.layer_norm(context.pooled, context.pooled.shape[-1:])
        return self.value_head(torch.cat((pooled, context.state), dim=1))

    # ---------------------------------------------------------------------------------- the actions
    def start(self, rows: int) -> Tensor:
        """Return the same fixed noise for every row.

        The flow was not trained on x_1 = 0, which has probability zero in so many dimensions.
        """
        return self.initial_noise.expand(rows, -1, -1)

    def denormalize_actions(self, x: Tensor, context: PrefixCache) -> Tensor:
        """Convert latent actions [B, C, A] to the units of the dataset, if the checkpoint has its
        statistics, and add the state to relative actions.
        """
        x = x if self.statistics is None else self.statistics.denormalize(x)
        return x if context.origin is None else x + context.origin.unsqueeze(1)

    def normalize_actions(self, action: Tensor, context: PrefixCache) -> Tensor:
        """See ``Flow.normalize_actions``."""
        if context.origin is not None:
            action = action - context.origin.unsqueeze(1)
        return action if self.statistics is None else self.statistics.normalize(action)

    def scaled_actions(self, action: Tensor, obs: Obs) -> Tensor:
        """See ``VLAPolicy.scaled_actions``."""
        if self.trunk.relative is not None:
            action = action - self.trunk.origin(obs)
        return action if self.statistics is None else self.statistics.normalize(action)


def _relative_dimensions(dimensions: Sequence[int], size: int, numbers: int) -> Tensor:
    """Return which dimensions of an action are relative to the state, bool [A].

    Args:
        dimensions: Their indices.
        size: Dimensions of an action, A.
        numbers: Numbers of a state.

    Raises:
        ConfigError: An index is not one of an action and of a state.
    """
    limit = min(size, numbers)
    if max(dimensions) >= limit:
        raise ConfigError(
            f"model.delta_actions={show(dimensions)}: actions have {size} dimensions and states"
            f" {numbers} numbers, counted from 0; name dimensions below {limit}, or [] if the"
            " actions are absolute"
        )
    return torch.tensor([i in dimensions for i in range(size)])
