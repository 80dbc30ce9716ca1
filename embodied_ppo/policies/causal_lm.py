"""Causal language models as policy and critic.

B rows, L tokens of a row (prompt and response without a gap, padded on the right), R response
tokens, D size of a hidden state, V size of the vocabulary. Weights and modules are those of
transformers; ``decoder`` computes the forward pass.

``place`` [B, R] holds the index of the token *before* each response token. log π and V are read
there: the hidden state of a token predicts the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_envs.base.errors import ConfigError
from embodied_ppo.policies import checkpoint_files
from embodied_ppo.policies.backbone import InferenceModule
from embodied_ppo.policies.decoder import Decoder, ModuleReference
from embodied_ppo.policies.initialization import replace_meta_tensors
from embodied_ppo.policies.lora import Adapted
from embodied_ppo.policies.token_statistics import Head, TokenStatistics

# Largest float32 logits computed at once; larger ones in chunks, see ``token_statistics``.
LOGIT_BYTES = 64 << 20
CUDA_LOGIT_BYTES = 1 << 30  # largest size of the float32 logits of a chunk on a GPU
# Largest difference from transformers' logits, as a share of the largest: float32, half precision.
TOLERANCE, HALF_TOLERANCE = 1e-4, 0.05

# Hint of a refused model.
SUPPORTED = (
    "take Llama, SmolLM, Mistral, Qwen 2 or 3 (also with experts), Gemma 1 to 3, Phi 3 or 4,"
    " Granite, OLMo 2 or 3, or GLM 4"
)


# ------------------------------------------------------------------------------------------- policy
def precision(
    weight: Tensor, compute: torch.dtype, *, cache_weights: bool = True
) -> AbstractContextManager[Any]:
    """Return the context in which float32 weights like ``weight`` are multiplied in ``compute``.

    Inside such a context, or where no conversion is needed, it does nothing.

    Args:
        weight: A weight of the model.
        compute: Type of the arithmetic.
        cache_weights: Keep converted weights until the context ends. A CUDA graph must convert
            them each time.
    """
    kind = weight.device.type
    if (
        weight.dtype != torch.float32
        or compute == torch.float32
        or (cache_weights and torch.is_autocast_enabled(kind))
    ):
        return nullcontext()
    return torch.autocast(kind, compute, cache_enabled=cache_weights)


@dataclass(frozen=True, slots=True)
class TokenView:
    """Evaluation of response tokens, float32.

    Attributes:
        log_prob: [..], of the token.
        entropy: [..], of the distribution, nats; None if not requested.
        distance: [..], exact KL from the reference, Σ_v π·(log π − log π_ref).
    """

    log_prob: Tensor
    entropy: Tensor | None = None
    distance: Tensor | None = None


def logit_bytes(kind: str, memory: int | None) -> int:
    """Return the size of the float32 logits of a chunk.

    On a GPU it is a 64th of the memory of the device, at most ``CUDA_LOGIT_BYTES``: a chunk needs
    about three times this size, and each chunk reads the weight of the head and adds to its
    gradient. It does not depend on the free memory, so that runs can be repeated.

    Args:
        kind: Type of the device.
        memory: Bytes of the device; None: unknown.
    """
    if kind != "cuda" or memory is None:
        return LOGIT_BYTES
    return max(LOGIT_BYTES, min(CUDA_LOGIT_BYTES, memory // 64))


class LanguagePolicy(InferenceModule, Adapted):
    """π(token | all tokens before it), at the temperature of the rollouts."""

    def __init__(
        self, model: nn.Module, *, temperature: float = 1.0, compute: torch.dtype = torch.float32
    ) -> None:
        """Wrap a causal language model of transformers.

        Args:
            model: The model with its head.
            temperature: Sampling temperature of the rollouts.
            compute: Type of matrix multiplications.
        """
        super().__init__()
        self.model: Any = model
        self.temperature, self.compute = temperature, compute
        self.decoder = ModuleReference(Decoder(self.model.model))
        self.softcap: float | None = getattr(self.model.config, "final_logit_softcapping", None)
        # Divisor of the head's logits (Granite).
        self.divisor = float(getattr(self.model.config, "logits_scaling", 1.0))
        # Size of the float32 logits of a chunk; None: use ``logit_bytes`` of the device.
        self.logit_bytes: int | None = None

    def units(self) -> list[nn.Module]:
        """Return the layers, see ``Policy.units``."""
        return [*self.decoder.module.layers]

    def hidden(self, ids: Tensor, place: Tensor) -> Tensor:
        """Return the hidden states [B, R, D] of tokens [B, L] at places [B, R]."""
        with precision(self.model.lm_head.weight, self.compute):
            return self.decoder.module(ids, place=place)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits at temperature 1: [.., D] -> float32 [.., V]."""
        with precision(self.model.lm_head.weight, self.compute):
            logits = self.model.lm_head(hidden).float()
        if self.divisor != 1:
            logits = logits / self.divisor
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def view(
        self,
        hidden: Tensor,
        action: Tensor,
        *,
        reference: LanguagePolicy | None = None,
        ref_hidden: Tensor | None = None,
        entropy: bool = True,
    ) -> TokenView:
        """Evaluate tokens given the hidden states that predict them, with gradient.

        Logits larger than LOGIT_BYTES are computed in chunks.

        Args:
            hidden: [.., D].
            action: int64 [..], the tokens.
            reference: Reference policy; the result then has the exact KL divergence from it (kl
                type full).
            ref_hidden: [.., D], hidden states of the reference.
            entropy: Whether to compute the entropy.
        """
        shape, rows = action.shape, action.numel()
        hidden, action = hidden.reshape(rows, -1), action.reshape(rows)
        ref_weight = None
        if reference is not None:
            assert ref_hidden is not None
            ref_hidden, ref_weight = ref_hidden.reshape(rows, -1), reference.model.lm_head.weight
        weight = self.model.lm_head.weight
        columns: Any
        if 4 * rows * weight.shape[0] <= LOGIT_BYTES:
            columns = self._view_at_once(reference, hidden, action, ref_hidden, entropy=entropy)
        else:
            head = Head(
                rows=max(1, self._logit_bytes() // (4 * weight.shape[0])),
                dtype=self.compute if weight.dtype == torch.float32 else weight.dtype,
                temperature=self.temperature * self.divisor,  # no model has softcap and divisor
                softcap=self.softcap,
                entropy=entropy,
            )
            columns = TokenStatistics.apply(hidden, weight, action, ref_hidden, ref_weight, head)
        columns = (None if x is None else x.view(shape) for x in columns)
        return TokenView(*columns)

    def _logit_bytes(self) -> int:
        """Return the size of the float32 logits of a chunk."""
        if self.logit_bytes is not None:
            return self.logit_bytes
        device, memory = self.model.lm_head.weight.device, None
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
        return logit_bytes(device.type, memory)

    def view_where(
        self,
        mask: Tensor,
        hidden: Tensor,
        action: Tensor,
        *,
        reference: LanguagePolicy | None = None,
        ref: Tensor | None = None,
        entropy: bool = True,
    ) -> TokenView:
        """Evaluate the tokens where ``mask`` is True; results are [R, B], arbitrary elsewhere.

        With a large vocabulary nothing is computed where ``mask`` is False.

        Args:
            mask: bool [R, B].
            hidden: [B, R, D].
            action: int64 [R, B].
            reference: As in ``view``.
            ref: [R, B, D], hidden states of the reference.
            entropy: As in ``view``.
        """
        hidden, options = hidden.transpose(0, 1), {"reference": reference, "entropy": entropy}
        if 4 * mask.numel() * self.model.lm_head.weight.shape[0] <= LOGIT_BYTES:
            return self.view(hidden, action, ref_hidden=ref, **options)
        ref_hidden = None if ref is None else ref[mask]
        selected = self.view(hidden[mask], action[mask], ref_hidden=ref_hidden, **options)

        zeros = torch.zeros(mask.shape, device=hidden.device)
        columns: Any = (selected.log_prob, selected.entropy, selected.distance)
        columns = (None if x is None else zeros.index_put((mask,), x) for x in columns)
        return TokenView(*columns)

    def _view_at_once(
        self,
        reference: LanguagePolicy | None,
        hidden: Tensor,
        action: Tensor,
        ref_hidden: Tensor | None,
        *,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the columns of ``TokenView`` from the logits of all tokens."""
        log_p = (self.logits(hidden) / self.temperature).log_softmax(-1)  # [M, V]
        p = log_p.exp()
        entropies = -torch.where(p > 0, p * log_p, 0.0).sum(-1) if entropy else None
        distance = None
        if reference is not None:
            with torch.no_grad():
                assert ref_hidden is not None
                log_q = (reference.logits(ref_hidden) / self.temperature).log_softmax(-1)
            distance = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
        return log_p.gather(-1, action.unsqueeze(-1)).squeeze(-1), entropies, distance


class LanguageCritic(InferenceModule, Adapted):
    """V(all tokens so far): a complete model with one output per token.

    The head is zero at the start, so that V is 0 everywhere. With a random head the value loss
    started at 14 and the first 20 updates were lost.
    """

    def __init__(self, model: nn.Module, *, compute: torch.dtype = torch.float32) -> None:
        """Wrap a causal language model of transformers and drop its head.

        Args:
            model: The model.
            compute: Type of matrix multiplications.
        """
        super().__init__()
        self.compute = compute
        causal_lm: Any = model
        self.decoder = Decoder(causal_lm.model)
        device = self.decoder.base.embed_tokens.weight.device
        self.value_head = nn.Linear(self.decoder.hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def copy_body(self, policy: Mapping[str, Tensor]) -> None:
        """Copy all weights except the head from the state_dict of a ``LanguagePolicy``."""
        prefix = "model.model."
        body = {k.removeprefix(prefix): x for k, x in policy.items() if k.startswith(prefix)}
        self.decoder.base.load_state_dict(body)

    def units(self) -> list[nn.Module]:
        """Return the layers, see ``Policy.units``."""
        return [*self.decoder.layers]

    def value(self, ids: Tensor, place: Tensor) -> Tensor:
        """Return V, float32 [B, R], of tokens [B, L] at places [B, R]."""
        with precision(self.decoder.base.embed_tokens.weight, self.compute):
            hidden = self.decoder(ids, place=place)
        return self.value_head(hidden.float()).squeeze(-1)


# ------------------------------------------------------------------------------------------ loading
def load(
    path: str | None,
    architecture: Mapping[str, Any],
    *,
    section: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    weights: bool = True,
) -> Any:
    """Load transformers' causal language model from a directory, or build a new one.

    Our forward pass is compared with that of transformers before the model is used.

    Args:
        path: Directory, None: a new model.
        architecture: Fields of the new model's configuration.
        section: Section of the options, for messages.
        dtype: Type of the weights.
        device: Device of the weights.
        weights: False: read config.json only; parameters are tensors without memory.

    Raises:
        ConfigError: The directory cannot be read, or the architecture is not supported.
    """
    transformers = checkpoint_files.import_transformers("mode=reasoning", extra="language")
    model: Any
    option = f"path={path}" if path else "architecture"
    hint = "; name a complete directory, .bin files with tensors alone" if path else ""
    with checkpoint_files.config_errors(f"{section}.{option}: transformers refuses: ", hint):
        if path is not None:
            if not Path(path, "config.json").is_file():
                raise ConfigError(
                    f"{section}.path={path}: holds no config.json; name a directory that"
                    " transformers wrote (hf download NAME --local-dir DIR), or leave path null for"
                    " a new, small model"
                )
            config = transformers.AutoConfig.from_pretrained(path, **checkpoint_files.LOCAL)
        else:
            fields = dict(architecture)
            config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
        if path is not None and weights:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, output_loading_info=True, **checkpoint_files.LOCAL_WEIGHTS
            )
            # Missing weights are random. A critic has a head of its own in the place of lm_head.
            unread = {"lm_head.weight"} if section == "critic.model" else set[str]()
            if missing := sorted({*info["missing_keys"]} - unread):
                raise ValueError(f"its files lack {len(missing)} weights, such as {missing[0]}")
            checkpoint_files.check_finite(model.named_parameters(), f"{section}.path={path}")
        else:
            with nullcontext() if weights else torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=dtype, trust_remote_code=False
                )
    if not weights:
        replace_meta_tensors(model)
    model = (model.to(device) if weights else model).eval()
    # A model of another architecture raises errors in our forward pass, or gives other logits.
    problem = f"{section}: {type(model).__name__} differs from the supported models ("
    with checkpoint_files.config_errors(problem, f"); {SUPPORTED}"):
        LanguagePolicy(model)
        tolerance = TOLERANCE if model.dtype == torch.float32 else HALF_TOLERANCE
        if weights and (difference := _difference(model)) > tolerance:
            raise ValueError(f"logits differ by {difference:.2g} of the largest")
    return model


@torch.no_grad()
def _difference(model: Any) -> float:
    """Return the largest difference of our logits from those of transformers, as a share of the
    largest.
    """
    policy = LanguagePolicy(model)
    vocabulary = model.lm_head.weight.shape[0]
    ids = (torch.arange(2 * 12, device=model.lm_head.weight.device).view(2, 12) * 7919) % vocabulary
    expected = model(input_ids=ids, use_cache=False).logits.float()
    difference = policy.logits(policy.decoder.module(ids)) - expected
    return float(difference.abs().max() / expected.abs().max().clamp_min(1e-6))
