"""Supervised fine-tuning: the loss by hand, its decrease, and the cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import run_helpers
import torch

from embodied_envs.base.errors import ConfigError, TrainingError
from embodied_ppo.data.prompts import Example
from embodied_ppo.imitation.supervised_finetuning import finetune, loss, warm_start
from embodied_ppo.policies.causal_lm import LanguagePolicy
from tests.policies.test_causal_lm import make

EXAMPLES: list[Example] = [
    ((5, 6, 7), (8, 2)),
    ((9, 3), (4, 4, 2)),
    ((3,), (2,)),
    ((5, 8), (6, 7, 5, 2)),
] * 10
OPTIONS: dict[str, Any] = run_helpers.options("steps=10 batch_size=4 lr=0.003 lr_warmup=3")


def start(
    policy: LanguagePolicy, folder: Path, examples: Any = EXAMPLES, **more: Any
) -> tuple[bool, list[str]]:
    lines: list[str] = []
    return warm_start(
        policy, examples, **{**OPTIONS, **more}, folder=folder, notice=lines.append
    ), lines


def same(a: LanguagePolicy, b: LanguagePolicy) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


# --------------------------------------------------------------------------------------------- loss
def test_loss_is_the_mean_over_response_tokens() -> None:
    """The reference evaluates each row alone with transformers, without padding."""
    policy, total, count = make(), 0.0, 0
    for prompt, response in EXAMPLES[:4]:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
        # token k of the response is predicted at the position before it
        for k, token in enumerate(response):
            total -= float(logits[len(prompt) + k - 1].log_softmax(-1)[token])
            count += 1
    assert count == 2 + 3 + 1 + 4
    assert float(loss(policy, EXAMPLES[:4]).detach()) == pytest.approx(total / count, rel=1e-5)


def test_parts_of_a_batch_do_not_change_the_step() -> None:
    batches = [EXAMPLES[:4], EXAMPLES[4:8]]
    options: dict[str, Any] = {"lr": 1e-3, "lr_warmup": 1, "label": "test"}
    limits: list[dict[str, Any]] = [{}, {"tokens": 8}, {"rows": 3}, {"tokens": 30, "rows": 1}]
    whole, *parts = (finetune(make(), batches, **options, **limit) for limit in limits)
    assert all(x == pytest.approx(whole, rel=1e-5) for x in parts) and whole[1] < whole[0]


def test_one_step_equals_adamw_by_hand(tmp_path) -> None:
    """Adam's first step is lr * sign(gradient) where the gradient is not tiny.

    The learning rate is lr / 4 because of the warm-up over 4 steps.
    """
    policy, before = make(), make()
    loss(before, EXAMPLES[:4]).backward()
    start(policy, tmp_path, steps=1, lr=4e-3, lr_warmup=4)
    for new, old in zip(policy.parameters(), before.parameters(), strict=True):
        assert old.grad is not None
        large = old.grad.abs() > 1e-3  # also after clipping to norm 1 much larger than eps = 1e-8
        assert large.any()
        wanted = -1e-3 * old.grad.sign()
        assert torch.allclose((new - old)[large], wanted[large], rtol=1e-3, atol=1e-6)


# ------------------------------------------------------------------------------------------ on disk
@pytest.mark.slow
def test_cached_weights_are_equal_bit_for_bit(tmp_path) -> None:
    first, second, third = (make(tie_word_embeddings=True) for _ in range(3))
    start(first, tmp_path)
    (file,) = tmp_path.iterdir()
    assert len(file.stem) == 20
    assert set(file.stem) <= set("0123456789abcdef")
    assert file.suffix == ".safetensors"
    reused, lines = start(second, tmp_path)
    assert reused and lines == [f"warm start: taken from {file}"] and same(first, second)
    reused, _ = start(third, tmp_path / "elsewhere")
    assert not reused and same(first, third), "training again gives the same, too"
    assert not start(make(tie_word_embeddings=True, rope_theta=100.0), tmp_path)[0]
    assert not same(first, make(tie_word_embeddings=True))


@pytest.mark.parametrize("damage", ["cut", "one bit"])
def test_damaged_cache_file_is_recomputed(tmp_path, damage: str) -> None:
    first, second = make(), make()
    start(first, tmp_path)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    flipped = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    file.write_bytes({"cut": content[:-100], "one bit": flipped}[damage])
    reused, lines = start(second, tmp_path)
    assert not reused and str(file) in lines[0] and len(lines) == 2
    assert same(first, second)
    assert file.read_bytes() == content
    assert len(list(tmp_path.iterdir())) == 1


# ----------------------------------------------------------------------------------------- refusals
def test_refusals(tmp_path) -> None:
    broken = make()
    with torch.no_grad():
        broken.model.lm_head.weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match="the loss of step 0 is nan"):
        start(broken, tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        start(make(), tmp_path / "file")
