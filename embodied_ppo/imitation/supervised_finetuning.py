"""Supervised fine-tuning of language models before PPO; those of new models are cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied_envs.base.errors import ConfigError, TrainingError, one_line
from embodied_ppo.core.adamw import AdamW
from embodied_ppo.data.prompts import Example
from embodied_ppo.policies import causal_lm, decoder
from embodied_ppo.policies.causal_lm import LanguagePolicy

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
    folder: Path,
    notice: Callable[[str], None],
) -> bool:
    """Train the policy on responses, or load the weights of an equal earlier run.

    Step i uses examples i * batch_size to (i + 1) * batch_size and minimises the mean loss of their
    response tokens with AdamW. The result depends on no random numbers. Its file name in ``folder``
    is a digest of the initial weights, the examples, the hyper-parameters, the code and the version
    of torch.

    Args:
        policy: The policy, trained in place.
        examples: At least steps * batch_size demonstrations.
        steps: Optimiser steps.
        batch_size: Examples of a step.
        lr: Learning rate.
        lr_warmup: Steps over which the rate rises linearly.
        folder: Folder of the cache.
        notice: Receives lines for the log.

    Returns:
        True if the weights were loaded.

    Raises:
        ConfigError: ``folder`` cannot be written.
        TrainingError: The loss is not finite.
    """
    count = steps * batch_size
    examples = examples[:count]
    weights = {name: p.detach() for name, p in policy.named_parameters()}
    hyper = {"steps": steps, "batch_size": batch_size, "lr": lr, "lr_warmup": lr_warmup}
    path = folder / f"{_name(policy, weights, examples, hyper)}.safetensors"

    def train() -> dict[str, float]:
        batches = (examples[i : i + batch_size] for i in range(0, count, batch_size))
        finetune(policy, batches, lr=lr, lr_warmup=lr_warmup, label="warm start")
        return {}

    work = f"{steps} supervised steps"
    return compute_or_load(weights, path, train, label="warm start", work=work, notice=notice)[0]


def finetune(
    policy: LanguagePolicy,
    batches: Iterable[Sequence[Example]],
    *,
    lr: float,
    lr_warmup: int,
    label: str,
    tokens: int | None = None,
    rows: int | None = None,
) -> list[float]:
    """Minimise the mean loss of the response tokens of each batch with AdamW.

    Args:
        policy: The policy, whose parameters with gradient are trained in place.
        batches: Examples of each optimiser step.
        lr: Learning rate.
        lr_warmup: Steps over which the rate rises linearly.
        label: Name of the computation, for messages.
        tokens, rows: Limits of a forward pass. They change results by rounding only.

    Returns:
        The loss of each step.

    Raises:
        TrainingError: The loss is not finite.
    """
    parameters, losses = [p for p in policy.parameters() if p.requires_grad], list[float]()
    optimizer = AdamW(parameters, lr=lr, betas=BETAS, weight_decay=0.0, fused=True)
    for step, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / max(1, lr_warmup))
        count, total = sum(len(response) for _, response in batch), 0.0
        for part in _parts(batch, tokens, rows):
            value = loss(policy, part, count)
            if not torch.isfinite(value):
                raise TrainingError(
                    f"{label}: the loss of step {step} is {value.item():g}; lower its learning rate"
                )
            value.backward()
            total += value.item()
        torch.nn.utils.clip_grad_norm_(parameters, GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def _parts(
    batch: Sequence[Example], tokens: int | None, rows: int | None
) -> Iterator[Sequence[Example]]:
    """Yield a batch in parts of at most ``rows`` of similar length and ``tokens`` with padding."""
    if tokens is None and rows is None:
        yield batch
        return
    part: list[Example] = []
    for example in sorted(batch, key=lambda x: len(x[0]) + len(x[1])):
        # Rows are padded to the length of the last one, which is the longest.
        size = (len(part) + 1) * sum(map(len, example))
        if part and (len(part) == rows or (tokens is not None and size > tokens)):
            yield part
            part = []
        part.append(example)
    yield part


def loss(policy: LanguagePolicy, examples: Sequence[Example], count: int | None = None) -> Tensor:
    """Return the mean of -log π(token) over all response tokens, a scalar with gradient.

    Args:
        policy: The policy.
        examples: Examples that are evaluated together.
        count: Divisor of the sum; None: the number of response tokens of these examples.
    """
    ids, position, mask = (x.to(policy.model.lm_head.weight.device) for x in _batch(examples))
    token = ids.gather(1, position + 1)
    log_prob = policy.view(policy.hidden(ids[:, :-1], position), token).log_prob
    return -(log_prob * mask).sum() / (mask.sum() if count is None else count)


def _batch(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a padded batch.

    Returns:
        Tokens int64 [B, L] padded on the right, positions int64 [B, R] of the tokens before the
        response tokens, and their mask [B, R].
    """
    prompt = torch.tensor([len(p) for p, _ in examples]).unsqueeze(1)
    response = torch.tensor([len(r) for _, r in examples]).unsqueeze(1)
    width, k = int((prompt + response).max()), torch.arange(int(response.max()))
    ids = torch.tensor([[*p, *r, *[0] * (width - len(p) - len(r))] for p, r in examples])
    return ids, (prompt - 1 + k).clamp(max=width - 2), k < response


# -------------------------------------------------------------------------------------------- cache
def compute_or_load(
    weights: Mapping[str, Tensor],
    path: Path,
    compute: Callable[[], dict[str, float]],
    *,
    label: str,
    work: str,
    notice: Callable[[str], None],
) -> tuple[bool, dict[str, float]]:
    """Compute weights, or load them if ``path`` exists.

    Args:
        weights: Tensors that are changed in place.
        path: File of the result.
        compute: Writes the result to ``weights``; returns losses by name.
        label: Name of the computation, for messages.
        work: Amount of the computation, for messages.
        notice: Receives lines for the log.

    Returns:
        Whether the weights were loaded, and the losses.

    Raises:
        ConfigError: The folder cannot be written.
    """
    from safetensors import SafetensorError  # also raised for a full disk

    if path.exists():
        try:
            losses = _load(weights, path)
            notice(f"{label}: taken from {path}")
            return True, losses
        except (SafetensorError, OSError, ValueError) as error:
            notice(f"{label}: {path} is damaged ({one_line(error)}); it is computed again")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{label}: {path.parent} cannot be written ({error.strerror}); name another folder"
        ) from error
    notice(f"{label}: {work}, once; the result stays in {path.parent}")
    losses = compute()
    try:
        _save(weights, losses, path)
    except (SafetensorError, OSError) as error:  # the weights are in memory: training continues
        notice(f"{label}: not kept ({one_line(error)})")
    return False, losses


def _name(
    policy: LanguagePolicy,
    weights: Mapping[str, Tensor],
    examples: Sequence[Example],
    hyper: Mapping[str, Any],
) -> str:
    """Return a digest of everything that the result depends on, 20 hex digits."""
    device = policy.model.lm_head.weight.device.type
    settings = [hyper, policy.temperature, torch.__version__, device, str(policy.compute)]
    settings.append(policy.model.config.to_json_string())  # of equal weights: heads, rotation
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for source in (__file__, causal_lm.__file__, decoder.__file__):
        digest.update(Path(source).read_bytes())
    digest.update(digest_of(weights).encode())
    digest.update(json.dumps(examples).encode())
    return digest.hexdigest()[:20]


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, x in weights.items():
        digest.update(f"{name} {x.dtype} {tuple(x.shape)};".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _save(weights: Mapping[str, Tensor], losses: dict[str, float], path: Path) -> None:
    """Write weights, losses and a digest atomically. Raises OSError or SafetensorError."""
    from safetensors.torch import save_file

    temporary = path.with_name(f"{path.stem}.{os.getpid()}.new")
    tensors = {name: x.cpu().contiguous() for name, x in weights.items()}
    try:
        # One entry: safetensors writes several in random order.
        facts = json.dumps({"sha256": digest_of(tensors), "losses": losses})
        save_file(tensors, temporary, metadata={"facts": facts})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(weights: Mapping[str, Tensor], path: Path) -> dict[str, float]:
    """Load a file of ``_save`` into the weights; return the losses.

    Raises:
        OSError, SafetensorError, ValueError: The file is damaged.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        tensors = {name: file.get_tensor(name) for name in weights}
    if digest_of(tensors) != facts.get("sha256"):
        raise ValueError("its digest is not that of its weights")
    for name, x in weights.items():
        x.copy_(tensors[name])
    return facts["losses"]
