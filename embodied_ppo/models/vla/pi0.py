"""π0 (Black et al. 2024, arXiv 2410.24164): PaliGemma sees and reads, a smaller Gemma beside it makes actions flow.

B rows, K cameras, P tokens of the prefix (pictures, then words), H actions of the model's horizon, N numbers of each
and of a state (padded), D width of the prefix, L layers, G heads of keys, d size of a head.

The weights and modules are transformers' (PI0ForConditionalGeneration), the forward pass is ours: keys and values of
the prefix are tensors that ``encode`` can keep and minibatches can cut, not a cache that grows. What sees what::

    pictures | words                       each other
               state                       these, and itself
                       H noisy actions     all of it

``pi0_checkpoint`` reads the published files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodied_ppo.config.schema import ModelConfig
from embodied_ppo.core.collectives import gathered, layers
from embodied_ppo.core.types import ActionSpec, ArraySpec, ConfigError, Obs, ObsSpec
from embodied_ppo.models import lora
from embodied_ppo.models.backbone import VECTOR, Encoder
from embodied_ppo.models.vla.flow_matching import Field, Flow, learned_log_std
from embodied_ppo.models.vla.pi0_files import Published, Statistics, read
from embodied_ppo.models.vla.trunk import INSTRUCTION, WORDS, Found, ValueHead, action_size, check_units

PAD = -1
"""In place of a word's id."""
FROZEN_ROWS = 32
"""Observations that a frozen trunk reads together."""
SHARE = 0.5
"""Of the device's memory: what prefixes of a frozen trunk may take."""
KEYS, VALUES, VALID, POOLED = "/keys", "/values", "/valid", "/pooled"
"""Names of the inputs that hold a prefix."""


class Prefix(NamedTuple):
    """What is seen, once for all steps of a chain.

    keys, values  per layer [B, G, P, d]      valid  bool [B, P], not padding
    pooled        float32 [B, D], mean of the last layer's outputs where valid
    state         float32 [B, N], normalised and padded
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor
    pooled: Tensor
    state: Tensor

    @property
    def found(self) -> Found:
        """See ``Flow.see``."""
        return Found(self.pooled)


# ---------------------------------------------------------------------------------------------------------- the layers
def block(
    layer: Any, x: Tensor, rotation: tuple[Tensor, Tensor], seen: Tensor, past: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One of Gemma's layers: outputs [B, Q, D'], its own keys and values [B, G, Q, d].

    ``seen`` bool [B, 1, 1 or n Q, P + Q], see ``_grouped``; ``past``: keys and values [B, G, P, d] of what came before.
    """
    a = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (p(h).unflatten(-1, (-1, a.head_dim)).transpose(1, 2) for p in (a.q_proj, a.k_proj, a.v_proj))
    q, k = (_rotated(t, rotation).to(v.dtype) for t in (q, k))
    keys, values = (k, v) if past is None else (torch.cat((p.to(v.dtype), n), 2) for p, n in zip(past, (k, v)))
    h = F.scaled_dot_product_attention(_grouped(q, k.shape[1]), keys, values, attn_mask=seen, scale=a.scaling)
    h = h.reshape(q.shape)
    x = x + a.o_proj(h.transpose(1, 2).flatten(2))
    return x + layer.mlp(layer.post_attention_layernorm(x)), k, v


def _grouped(q: Tensor, groups: int) -> Tensor:
    """[B, heads, Q, d] -> [B, G, n Q, d]: the n = heads / G that share keys side by side, so that no key is copied."""
    return q if q.shape[1] == groups else q.reshape(q.shape[0], groups, -1, q.shape[-1])


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions, as transformers pairs them: dimension i with i + d/2."""
    a, b = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat((-b, a), dim=-1) * rotation[1]


def _positions(model: Any, place: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [B, 1, Q, d] of int64 [B, Q]."""
    cos, sin = model.rotary_emb(place.new_zeros((), dtype=torch.float32), place)
    return cos.unsqueeze(1), sin.unsqueeze(1)


# ----------------------------------------------------------------------------------------------------------- the trunk
class Trunk(nn.Module):
    """Observations to a prefix: what freezes with model.freeze_trunk is ``vlm``."""

    def __init__(
        self, obs_spec: ObsSpec, vlm: Any, numbers: int, published: Published, config: ModelConfig, *, what: str
    ) -> None:
        """``numbers`` is N. Raises ConfigError."""
        super().__init__()
        named: dict[str, ArraySpec] = dict(obs_spec) if isinstance(obs_spec, dict) else {"obs": obs_spec}
        self.told = named.pop(INSTRUCTION, None) is not None
        self.encoder = Encoder(named, config)
        if not self.encoder.images:
            raise ConfigError(
                f"{what}: the observation holds no picture; name one with env.cameras=[front], or use "
                "model.policy=actor_critic"
            )
        size = self.encoder.vector_size
        if size > numbers:
            raise ConfigError(
                f"{what}: states have {size} numbers, the model reads max_state_dim = {numbers}; use fewer"
            )
        self.numbers, self.tokenize = numbers, published.tokenize
        self.mean: Tensor | None
        self.deviation: Tensor | None
        known = None if published.state is None or not size else published.state.only(size, "states")
        if known is not None:
            self.encoder.moments = None
        self.register_buffer("mean", None if known is None else known.mean, persistent=False)
        self.register_buffer("deviation", None if known is None else known.std + 1e-8, persistent=False)
        self.vlm = vlm
        self.side = int(vlm.config.vision_config.image_size)
        self.checkpointing = config.gradient_checkpointing
        if self.checkpointing:
            vlm.vision_tower.activation_checkpointing_enable({"use_reentrant": False})
        self.table: Tensor
        """int64 [S, words], the simulator's sentences; not part of a checkpoint."""
        self.register_buffer("table", torch.zeros(1, 1, dtype=torch.int64), persistent=False)

    def words(self, sentences: Sequence[str]) -> Tensor:
        """int64 [S, words], PAD where a sentence is shorter; one empty sentence where there are none."""
        rows = [list(self.tokenize(sentence)) for sentence in sentences or ("",)]
        width = max(map(len, rows))
        return torch.tensor([row + [PAD] * (width - len(row)) for row in rows], dtype=torch.int64)

    def encode(self, obs: Obs) -> dict[str, Tensor]:
        """Pictures uint8 [B, 3, h, w], VECTOR float32 [B, N], WORDS int64 [B, words]."""
        named = obs if isinstance(obs, dict) else {"obs": obs}
        inputs = self.encoder({name: x for name, x in named.items() if name != INSTRUCTION})
        rows = len(inputs[next(iter(self.encoder.images))])
        state = inputs.get(VECTOR)
        if state is None:
            state = torch.zeros(rows, 0, device=self.table.device)
        if self.mean is not None and self.deviation is not None:
            state = (state - self.mean) / self.deviation
        inputs[VECTOR] = F.pad(state, (0, self.numbers - state.shape[1]))
        which = named[INSTRUCTION].long() if self.told else torch.zeros(rows, dtype=torch.int64, device=state.device)
        inputs[WORDS] = self.table[which]
        return inputs

    def pixels(self, image: Tensor) -> Tensor:
        """uint8 [B, 3, h, w] to float32 [B, 3, side, side] in [-1, 1]: resized, black where the shape is another."""
        x, (h, w) = image.float(), image.shape[-2:]
        if max(h, w) != self.side:
            scale = self.side / max(h, w)
            h, w = (max(1, int(n * scale)) for n in (h, w))
            x = F.interpolate(x, (h, w), mode="bilinear", antialias=True)
        x = x / 127.5 - 1
        left, top = (self.side - w) // 2, (self.side - h) // 2
        if (h, w) == (self.side, self.side):
            return x
        return F.pad(x, (left, self.side - w - left, top, self.side - h - top), value=-1.0)

    def forward(self, inputs: dict[str, Tensor]) -> Prefix:
        pictures = torch.stack([self.pixels(inputs[name]) for name in self.encoder.images], dim=1)  # [B, K, 3, s, s]
        rows = len(pictures)
        looks = self.vlm.multi_modal_projector(self.vlm.vision_tower(pictures.flatten(0, 1)).last_hidden_state)
        looks = looks.reshape(rows, -1, looks.shape[-1])  # [B, K tokens, D]
        ids, language = inputs[WORDS], self.vlm.language_model
        said = language.embed_tokens(ids.clamp_min(0))
        x = torch.cat((looks.to(said.dtype), said), dim=1)
        valid = torch.cat((ids.new_ones(looks.shape[:2], dtype=torch.bool), ids != PAD), dim=1)
        rotation, seen = _positions(language, valid.cumsum(1) - 1), valid[:, None, None]
        keys, values = [], []
        for layer in language.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x, k, v = cast(Any, checkpoint(gathered, layer, block, x, rotation, seen, use_reentrant=False))
            else:
                x, k, v = gathered(layer, block, x, rotation, seen)
            keys.append(k)
            values.append(v)
        out = language.norm(x).float() * valid.unsqueeze(-1)
        pooled = out.sum(1) / valid.sum(1, keepdim=True)
        return Prefix(tuple(keys), tuple(values), valid, pooled, inputs[VECTOR])


# ---------------------------------------------------------------------------------------------------------- the policy
class PI0(Flow, lora.Adapted):
    """See ``Flow``; the value is read from the pooled prefix and the state, which π0 does not show its prefix.

    With model.freeze_trunk ``encode`` gives keys, values and pooled prefix in place of pictures, as long as they fit
    into memory (``most_rows``): the epochs of an update then run the expert only.
    """

    def __init__(
        self,
        obs_spec: ObsSpec,
        action_spec: ActionSpec,
        config: ModelConfig,
        published: Published,
        *,
        chunk: int,
        sentences: Sequence[str],
        memory_gb: float | None = None,
        values: int = 1,
    ) -> None:
        """``memory_gb``: for prefixes of a frozen trunk; None: SHARE of the device's. ``values``: see ``ValueHead``.
        Raises ConfigError."""
        super().__init__()
        what = f"model.checkpoint={config.checkpoint}"
        sizes = published.model.config
        self.chunk, self.size = chunk, action_size(action_spec, chunk, config)
        if self.size > sizes.max_action_dim:
            raise ConfigError(
                f"{what}: the task's actions have {self.size} dimensions, the model's max_action_dim = "
                f"{sizes.max_action_dim}; use a checkpoint made for more"
            )
        if chunk > sizes.chunk_size:
            raise ConfigError(
                f"env.action_chunk={chunk}: the model plans chunk_size = {sizes.chunk_size} actions; write "
                f"env.action_chunk={sizes.chunk_size} or less"
            )
        if config.lora_rank and config.freeze_trunk:
            raise ConfigError(
                f"model.lora_rank={config.lora_rank}: adapters are on what model.freeze_trunk=true freezes; keep one"
            )
        _check_sizes(sizes, what)
        self.flow_by(config, horizon=sizes.chunk_size, padded=sizes.max_action_dim)
        body = published.model
        self.trunk = Trunk(obs_spec, body.model.vlm, sizes.max_state_dim, published, config, what=what)
        self.embed, self.expert, self.velocity = body.embed_action_time, body.model.dit, body.action_out_proj
        self.expert.embed_tokens = None  # never read, 0.26 G parameters
        self.checkpointing = config.gradient_checkpointing
        width = sizes.dit_config.hidden_size
        self.scale: nn.Module | None = None
        if config.flow_noise == "learned":
            inner = (nn.Linear(width, 128), nn.SiLU(), nn.Linear(128, 64), nn.SiLU())
            self.scale = nn.Sequential(*inner, nn.Linear(64, self.padded))
        pooled = sizes.vlm_config.text_config.hidden_size + sizes.max_state_dim
        self.value_head = ValueHead(pooled, config.detach_value, values=values)
        aimed: Statistics | None = published.action
        aimed = None if aimed is None else aimed.only(self.size, "actions")
        self.mean: Tensor | None
        self.deviation: Tensor | None
        self.register_buffer("mean", None if aimed is None else aimed.mean, persistent=False)
        self.register_buffer("deviation", None if aimed is None else aimed.std, persistent=False)
        first = torch.randn(self.horizon, self.padded, generator=torch.Generator().manual_seed(0))
        self.first: Tensor
        self.register_buffer("first", first, persistent=False)
        self.dtype = getattr(torch, config.dtype)
        self.frozen, self.rank, self.memory_gb = False, config.lora_rank, memory_gb
        self.sentences: tuple[str, ...] = ()
        if self.rank:
            lora.adapt(self.trunk.vlm.language_model, rank=self.rank, alpha=config.lora_alpha)
        for part in self.modules():
            for name in ("dropout", "attention_dropout"):
                if isinstance(getattr(part, name, None), float):
                    setattr(part, name, 0.0)
        self.train()  # or transformers would keep activations
        self.freeze(config.freeze_trunk)
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
        values: int = 1,
    ) -> PI0:
        """From the directory ``config.checkpoint``; ``mapping``: env.action_mapping. Raises ConfigError."""
        assert config.checkpoint is not None
        published = read(config.checkpoint)
        policy = cls(obs_spec, action_spec, config, published, chunk=chunk, sentences=sentences, values=values)
        if policy.mean is not None:
            check_units(action_spec, config, mapping)
        if config.freeze_trunk or config.lora_rank:
            policy.rests_on(config.checkpoint)
        return policy

    # ----------------------------------------------------------------------------------------------------- what learns
    def freeze(self, frozen: bool) -> None:
        """Whether PaliGemma stays as it is; with adapters only they learn in any case.

        What rests on a directory stays frozen: a run's checkpoints do not hold it."""
        self.frozen = frozen = frozen or (self.base is not None and not self.rank)
        for name, p in self.trunk.vlm.named_parameters():
            p.requires_grad_(not frozen and (not self.rank or "lora_" in name))
        lora.settle(self, self.dtype)

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        critic = list(self.value_head.parameters())
        names = {id(p) for p in critic}
        actor = [p for p in self.parameters() if p.requires_grad and id(p) not in names]
        return {"actor": actor, "critic": critic}

    def units(self) -> list[nn.Module]:
        return [*layers(self.trunk.vlm), *layers(self.expert), self.trunk.vlm.language_model.embed_tokens]

    def tell(self, sentences: Sequence[str]) -> None:
        """The sentences that observations count, from now on."""
        self.sentences = tuple(sentences)
        self.trunk.table = self.trunk.words(self.sentences).to(self.device)

    def observe(self, obs: Obs, mask: Tensor) -> None:
        named = obs if isinstance(obs, dict) else {"obs": obs}
        self.trunk.encoder.observe({name: x for name, x in named.items() if name != INSTRUCTION}, mask)

    @property
    def query(self) -> Tensor:
        """[1, D]: what cloning asks for device and width."""
        return self.trunk.vlm.language_model.norm.weight.unsqueeze(0)

    @property
    def device(self) -> torch.device:
        return self.velocity.weight.device

    # ------------------------------------------------------------------------------------------------------ the memory
    def prefix_bytes(self) -> int:
        """Of one observation's prefix: L layers x keys and values x P x G x d numbers, and what is pooled."""
        text = self.trunk.vlm.config.text_config
        vision = self.trunk.vlm.config.vision_config
        seen = len(self.trunk.encoder.images) * (self.trunk.side // vision.patch_size) ** 2 + self.trunk.table.shape[1]
        each = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * self.dtype.itemsize
        return seen * (each + 1) + 4 * text.hidden_size + 4 * self.trunk.numbers

    def most_rows(self) -> int:
        """Prefixes that fit into what they may take of the device's memory."""
        return int(self._room_gb() * 1e9) // self.prefix_bytes()

    def _room_gb(self) -> float:
        if self.memory_gb is not None:
            return self.memory_gb
        if self.device.type == "cuda":
            return SHARE * torch.cuda.get_device_properties(self.device).total_memory / 1e9
        return SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9

    def memory_notice(self, rows: int) -> str | None:
        """What the log should say of an update over so many observations; None: nothing is kept."""
        if not self.frozen:
            return None
        each, room = self.prefix_bytes(), self._room_gb()
        told = f"model.freeze_trunk: {rows} prefixes of {each / 1e6:.3g} MB are {rows * each / 1e9:.3g} GB"
        if rows <= self.most_rows():
            return f"{told}, kept through the epochs of an update (they may take {room:.3g} GB)"
        return (
            f"{told} and may take {room:.3g} GB: every minibatch computes them anew; at most {self.most_rows()} "
            "(algorithm.horizon x env.num_envs) are kept"
        )

    # -------------------------------------------------------------------------------------------------------- the body
    def encode(self, obs: Obs) -> dict[str, Tensor]:
        inputs = self.trunk.encode(obs)
        rows = len(inputs[WORDS])
        if not self.frozen or rows > self.most_rows():
            return inputs
        kept: dict[str, Tensor] = {}
        for i in range(0, rows, FROZEN_ROWS):
            part = self.see({name: x[i : i + FROZEN_ROWS] for name, x in inputs.items()})
            new = {KEYS: torch.stack(part.keys, 1), VALUES: torch.stack(part.values, 1)}
            new |= {VALID: part.valid, POOLED: part.pooled, VECTOR: part.state}
            for name, x in new.items():
                if name not in kept:
                    kept[name] = x.new_empty(rows, *x.shape[1:])
                kept[name][i : i + FROZEN_ROWS] = x
        return kept

    def see(self, inputs: dict[str, Tensor]) -> Prefix:
        if KEYS in inputs:
            keys, values = (inputs[name].unbind(1) for name in (KEYS, VALUES))
            return Prefix(keys, values, inputs[VALID], inputs[POOLED], inputs[VECTOR])
        learns = torch.is_grad_enabled() and not self.frozen
        with torch.set_grad_enabled(learns), lora.arithmetic(self.device, self.dtype):
            return self.trunk(inputs)

    def field(self, seen: Prefix) -> Field:
        """One run of the expert for each x."""
        horizon, model = self.horizon, self.expert
        rows, length = seen.valid.shape
        place = seen.valid.sum(1, keepdim=True) + torch.arange(1 + horizon, device=seen.valid.device)
        rotation = _positions(model, place)
        own = torch.ones(1 + horizon, 1 + horizon, dtype=torch.bool, device=place.device)
        own[0, 1:] = False  # the state sees no action
        keys = seen.valid[:, None].expand(rows, 1 + horizon, length)
        sharing = cast(Any, model.config).num_attention_heads // cast(Any, model.config).num_key_value_heads
        mask = torch.cat((keys, own.expand(rows, -1, -1)), dim=2).repeat(1, sharing, 1).unsqueeze(1)

        def flow(x: Tensor, tau: Tensor) -> tuple[Tensor, Tensor | None]:
            with lora.arithmetic(self.device, self.dtype):
                h = self.embed(seen.state, x, tau)
                for layer, *past in zip(cast(Any, model.layers), seen.keys, seen.values, strict=True):
                    if self.checkpointing and torch.is_grad_enabled():
                        run = partial(checkpoint, gathered, use_reentrant=False)
                        h = cast(Any, run(layer, block, h, rotation, mask, tuple(past)))[0]
                    else:
                        h = gathered(layer, block, h, rotation, mask, (past[0], past[1]))[0]
                h = cast(Any, model.norm)(h[:, 1:])
                scale = None if self.scale is None else self.scale(h)
                return self.velocity(h).float(), None if scale is None else learned_log_std(scale)

        return flow

    def value_of(self, seen: Prefix) -> Tensor:
        pooled = F.layer_norm(seen.pooled, seen.pooled.shape[-1:])
        return self.value_head(torch.cat((pooled, seen.state), dim=1))

    # ----------------------------------------------------------------------------------------------------- the actions
    def start(self, rows: int) -> Tensor:
        """One noise for all: zero is nothing that a flow in so many dimensions has seen."""
        return self.first.expand(rows, -1, -1)

    def emit(self, x: Tensor) -> Tensor:
        """In the dataset's units where the checkpoint knows them."""
        return x if self.mean is None or self.deviation is None else x * self.deviation + self.mean

    def aim(self, action: Tensor) -> Tensor:
        if self.mean is None or self.deviation is None:
            return action
        return (action - self.mean) / (self.deviation + 1e-8)


def _check_sizes(config: Any, what: str) -> None:
    """The expert reads PaliGemma's keys: their layers and heads must be alike. Raises ConfigError."""
    text, expert = config.vlm_config.text_config, config.dit_config
    if text.model_type != "gemma" or expert.model_type != "gemma":
        raise ConfigError(f"{what}: {text.model_type} with {expert.model_type}; π0 is Gemma with Gemma")
    for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"):
        if getattr(text, name) != getattr(expert, name):
            raise ConfigError(
                f"{what}: vlm_config.text_config.{name}={getattr(text, name)} and dit_config.{name}="
                f"{getattr(expert, name)} must be equal"
            )
