"""Supervised steps on demonstrations before PPO, kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import ConfigError, TrainingError
from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import LanguagePolicy

Example: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"
"""Tokens of a prompt and of the response to it, the end included; neither is empty."""
BETAS = (0.9, 0.99)
GRAD_NORM = 1.0


def warm_start(
    policy: LanguagePolicy,
    examples: Sequence[Example],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    lr_warmup: int = 50,
    key: Mapping[str, Any],
    folder: Path,
    notice: Callable[[str], None],
) -> bool:
    """Raise the log-probability of responses, or take the weights that an earlier run got by it; True: those.

    Step i learns from examples i * batch_size to (i + 1) * batch_size, mean over their response tokens, with AdamW
    whose rate rises linearly to ``lr`` over ``lr_warmup`` steps. Nothing is random. Kept in ``folder`` under a name
    that stands for the initial weights, the examples, these numbers, the code, torch and ``key`` (of JSON: whatever
    else should tell results apart). Raises ConfigError where examples are too few or ``folder`` cannot be written,
    TrainingError for a loss that is not finite.
    """
    count = steps * batch_size
    if count > len(examples):
        raise ConfigError(
            f"warm start: steps * batch_size = {steps} * {batch_size} = {count} must be <= {len(examples)} examples; "
            "make more of them, or take fewer steps"
        )
    examples = examples[:count]
    weights = {name: p.detach() for name, p in policy.named_parameters()}
    numbers = {"steps": steps, "batch_size": batch_size, "lr": lr, "lr_warmup": lr_warmup}
    path = folder / f"{_name(policy, weights, examples, {**numbers, 'key': dict(key)})}.safetensors"
    return once(
        weights,
        path,
        lambda: _train(policy, examples, steps=steps, batch_size=batch_size, lr=lr, lr_warmup=lr_warmup),
        what="warm start",
        saying=f"{steps} supervised steps",
        notice=notice,
    )


# ------------------------------------------------------------------------------------------------------------ training
def _train(
    policy: LanguagePolicy, examples: Sequence[Example], *, steps: int, batch_size: int, lr: float, lr_warmup: int
) -> None:
    parameters = list(policy.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / max(1, lr_warmup))
        value = loss(policy, examples[step * batch_size : (step + 1) * batch_size])
        if not torch.isfinite(value):
            raise TrainingError(f"warm start: the loss of step {step} is {value.item():g}; lower its learning rate")
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()


def loss(policy: LanguagePolicy, examples: Sequence[Example]) -> Tensor:
    """-Σ log π(token) / number of tokens, over all response tokens; a scalar with gradient."""
    ids, place, mask = (x.to(policy.model.lm_head.weight.device) for x in _batch(examples))
    token = ids.gather(1, place + 1)
    log_prob = policy.view(policy.hidden(ids[:, :-1], place), token).log_prob
    return -(log_prob * mask).sum() / mask.sum()


def _batch(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int64 [B, L], right-padded; places int64 [B, R] of the tokens before the response's, and their mask."""
    prompt = torch.tensor([len(p) for p, _ in examples]).unsqueeze(1)
    response = torch.tensor([len(r) for _, r in examples]).unsqueeze(1)
    width, k = int((prompt + response).max()), torch.arange(int(response.max()))
    ids = torch.tensor([[*p, *r, *[0] * (width - len(p) - len(r))] for p, r in examples])
    return ids, (prompt - 1 + k).clamp(max=width - 2), k < response


# ------------------------------------------------------------------------------------------------------------- on disk
def once(
    weights: Mapping[str, Tensor],
    path: Path,
    make: Callable[[], object],
    *,
    what: str,
    saying: str,
    notice: Callable[[str], None],
) -> bool:
    """``weights`` as ``make`` leaves them, or, True, as it left them when ``path`` was written.

    Raises ConfigError where the folder cannot be written.
    """
    if path.exists():
        damage = take(weights, path)
        if damage is None:
            notice(f"{what}: taken from {path}")
            return True
        notice(f"{what}: {path} is damaged ({damage}); it is made anew")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{what}: {path.parent} cannot be written ({error.strerror}); name another folder") from error
    notice(f"{what}: {saying}, once; the result stays in {path.parent}")
    make()
    try:
        keep(weights, path)
    except OSError as error:  # a full disk: the weights are there, training goes on
        notice(f"{what}: not kept ({one_line(error)})")
    return False


def _name(
    policy: LanguagePolicy, weights: Mapping[str, Tensor], examples: Sequence[Example], numbers: Mapping[str, Any]
) -> str:
    """20 hex digits for everything that the result depends on."""
    where = policy.model.lm_head.weight.device.type
    around = [numbers, policy.temperature, torch.__version__, where]
    digest = hashlib.sha256(json.dumps(around, sort_keys=True).encode())
    for source in (__file__, causal_lm.__file__):
        digest.update(Path(source).read_bytes())
    digest.update(digest_of(weights).encode())
    digest.update(json.dumps(examples).encode())
    return digest.hexdigest()[:20]


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """sha256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, x in weights.items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)};".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def keep(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write under a temporary name, with a digest, and rename. Raises OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(f"{path.stem}.{os.getpid()}.new")
    kept = {name: x.cpu().contiguous() for name, x in weights.items()}
    try:
        save_file(kept, temporary, metadata={"sha256": digest_of(kept)})
        temporary.replace(path)
    except SafetensorError as error:  # its word for a disk that refuses
        raise OSError(str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)


def take(weights: Mapping[str, Tensor], path: Path) -> str | None:
    """What ``keep`` wrote into the weights, or why not."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            wanted = (file.metadata() or {}).get("sha256")
            kept = {name: file.get_tensor(name) for name in weights}
    except (SafetensorError, OSError) as error:
        return one_line(error)
    if digest_of(kept) != wanted:
        return "its digest is not that of its weights"
    for name, x in weights.items():
        x.copy_(kept[name])
    return None
