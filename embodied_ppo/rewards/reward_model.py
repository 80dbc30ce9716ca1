"""Reward model: transformers' sequence classification with one label.

It is loaded from a path or trained on preferences. B rows, L tokens of a row, padded on the right,
D size of a hidden state.

The score is read at the last token of prompt and response, located by the length of the row.
transformers locates it by the id of the padding token, and ignores an end token with the same id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from embodied_ppo.core.adamw import AdamW
from embodied_ppo.core.errors import ConfigError, TrainingError, one_line
from embodied_ppo.data.prompts import Prompt, tokenizer_class
from embodied_ppo.models.checkpoint_files import LOCAL, LOCAL_WEIGHTS, config_errors
from embodied_ppo.rewards.graders import FAILED, Grade, Graders, Sample

Pair = tuple[str, str, str]
"""(prompt, better response, worse response)."""
BATCH_TOKENS = 16384
"""Tokens that are scored at once, including padding."""


# ------------------------------------------------------------------------------------------- models
def load(
    path: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """Load model and tokenizer that ``save_pretrained`` wrote to a directory.

    Args:
        path: The directory.
        dtype: Type of the weights.
        device: Device of the weights.

    Returns:
        (model, tokenizer).

    Raises:
        ConfigError: A file is missing or damaged, or the model is not a reward model.
    """
    option = f"reward.model.path={path}"
    if not Path(path, "config.json").is_file():
        raise ConfigError(
            f"{option}: holds no config.json; name a directory that transformers wrote "
            "(hf download NAME --local-dir DIR)"
        )
    tokenizer_cure = "save the one of the model's training there"
    # Without tokenizer files transformers would create an empty tokenizer.
    if not [*Path(path).glob("tokenizer.*"), *Path(path).glob("vocab.*")]:
        raise ConfigError(f"{option}: holds no tokenizer; {tokenizer_cure}")
    transformers = _transformers()
    AutoModel = transformers.AutoModelForSequenceClassification
    transformers.utils.logging.set_verbosity_error()  # missing weights are reported below
    cure = "; name a complete directory of a sequence-classification model"
    with config_errors(f"{option}: transformers refuses: ", cure):
        model, info = AutoModel.from_pretrained(
            path, dtype=dtype, output_loading_info=True, **LOCAL_WEIGHTS
        )
        tokenizer = tokenizer_class(path).from_pretrained(path, **LOCAL)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{option}: a checkpoint of {', '.join(model.config.architectures or ['?'])} without"
            f" {missing[0]}, which would be random; name a reward model (…ForSequenceClassification"
            " with one label)"
        )
    if model.config.num_labels != 1:
        raise ConfigError(
            f"{option}: has {model.config.num_labels} labels; name a model with num_labels=1"
        )
    _check_head(model, option)
    end, vocabulary = tokenizer.eos_token_id, model.get_input_embeddings().num_embeddings
    if end is None:
        raise ConfigError(
            f"{option}: its tokenizer has no end token; set eos_token in tokenizer_config.json"
        )
    if max(tokenizer.get_vocab().values()) >= vocabulary:
        raise ConfigError(
            f"{option}: its tokenizer has {len(tokenizer)} tokens, the model {vocabulary};"
            f" {tokenizer_cure}"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # Only transformers' own scoring of a saved model reads it.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval(), tokenizer


def new(architecture: Mapping[str, Any], *, device: torch.device | str = "cpu") -> Any:
    """Build a float32 model from the fields of its configuration, as in ``causal_lm.load``.

    The head is zero: every text scores 0 before training, and the loss starts at log 2.

    Raises:
        ConfigError: transformers refuses the configuration.
    """
    transformers = _transformers()
    fields = dict(architecture)
    try:
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields, num_labels=1)
        model = transformers.AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32
        )
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"architecture={dict(architecture)}: transformers refuses a reward model:"
            f" {one_line(error)}; write the actor's architecture"
        ) from error
    _check_head(model, f"architecture={dict(architecture)}")
    nn.init.zeros_(model.score.weight)
    return model.to(device).eval()


def _transformers() -> Any:
    """Import transformers."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"reward.model needs transformers ({error}): pip install 'embodied-ppo[language]'"
        ) from error
    return transformers


def _check_head(model: Any, option: str) -> None:
    """Check that the model has a linear head."""
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ConfigError(
            f"{option}: {type(model).__name__} has no linear head named score; name a causal model,"
            " such as Llama, Mistral, Qwen 2 to 3 or Gemma 1 to 3"
        )


# ------------------------------------------------------------------------------------------- scores
def _encode(tokenizer: Any, texts: Sequence[str], add_eos: bool) -> list[list[int]]:
    """Tokenise each text, with one end token at its end."""
    end = [tokenizer.eos_token_id] if add_eos else []
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    return [list(row) if list(row[-1:]) == end else [*row, *end] for row in rows]


def _problem(model: Any, row: list[int]) -> str | None:
    """Return the reason that a row cannot be scored, None if it can."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not row:
        return "the text has no tokens"
    if limit and len(row) > limit:
        return f"the text has {len(row)} tokens, the model's limit is {limit}"
    return None


def _scores(model: Any, rows: Sequence[list[int]]) -> Tensor:
    """Return the scores at the last token of each row, float32 [B], with gradient.

    The head computes in float32.
    """
    device = model.device
    length = torch.tensor([len(row) for row in rows], device=device)
    # [B, L]; the id of the padding does not matter, because it is masked.
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    mask = torch.arange(ids.shape[1], device=device) < length.unsqueeze(1)
    output = model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    hidden = output.last_hidden_state  # [B, L, D]
    last = hidden[torch.arange(len(rows), device=device), length - 1].float()
    bias = None if model.score.bias is None else model.score.bias.float()
    # The offset is stored in config.json, because heads of transformers have no bias.
    offset = getattr(model.config, "reward_offset", 0.0)
    return F.linear(last, model.score.weight.float(), bias).squeeze(-1) - offset


@torch.no_grad()
def _score_all(model: Any, rows: Sequence[list[int]], batch_tokens: int) -> Tensor:
    """Return the scores of all rows, float32 [len(rows)] on the CPU.

    A batch has rows of similar lengths and at most ``batch_tokens`` tokens with padding.
    """
    model.eval()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    scores = torch.empty(len(rows))
    while order:
        count = 1
        while count < len(order) and (count + 1) * len(rows[order[count]]) <= batch_tokens:
            count += 1
        batch, order = order[:count], order[count:]
        scores[batch] = _scores(model, [rows[i] for i in batch]).cpu()
    return scores


@dataclass
class RewardModel:
    """Graders that score prompt and response together.

    Attributes:
        model: Sequence classification with one label.
        tokenizer: Called with texts and add_special_tokens, returns "input_ids"; has an
            eos_token_id.
        rule: Additional grader that determines correctness, for metrics only.
        batch_tokens: Tokens that are scored at once, including padding.
        add_eos: Whether to append the end token, as in the model's training.
        failures: Number of samples so far that could not be graded.
        last_failure: Sample and cause of the most recent failure.
    """

    model: Any
    tokenizer: Any
    _: KW_ONLY
    rule: Graders | None = None
    batch_tokens: int = BATCH_TOKENS
    add_eos: bool = True
    failures: int = field(default=0, init=False)
    last_failure: str | None = field(default=None, init=False)

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        """Return one grade per sample, in their order; prompts[i] belongs to samples[i].

        A text that is too long for the model, or whose score is not finite, fails. With a rule, the
        grade has the rule's answer, correctness (score at least 1 if the rule returns none) and
        format.
        """
        assert len(samples) == len(prompts)
        texts = [p.text + s[1] for p, s in zip(prompts, samples)]
        rows = _encode(self.tokenizer, texts, self.add_eos)
        problems = [_problem(self.model, row) for row in rows]
        valid = [i for i, problem in enumerate(problems) if problem is None]
        scores = _score_all(self.model, [rows[i] for i in valid], self.batch_tokens)
        grades = [FAILED] * len(samples)
        for i, score in zip(valid, scores.tolist()):
            if math.isfinite(score):
                grades[i] = Grade(score)
            else:
                problems[i] = f"the model's score is {score}"
        if self.rule is not None:
            grades = self._add_rule(self.rule, grades, samples, prompts)
        if failed := [i for i, grade in enumerate(grades) if grade.failed]:
            self.failures += len(failed)
            i = failed[0]
            source, response, *_ = samples[i]
            sample = f"data_source = {source}, response = {response[:60]!r}"
            self.last_failure = f"sample {i} of {len(samples)} ({sample}): {problems[i]}"
        return grades

    def _add_rule(
        self,
        rule: Graders,
        grades: list[Grade],
        samples: Sequence[Sample],
        prompts: Sequence[Prompt],
    ) -> list[Grade]:
        """Add the results of the rule to the grades."""
        before = rule.failures
        rule_grades = rule.grade(samples, prompts)
        if rule.failures > before:
            self.failures += rule.failures - before
            self.last_failure = f"only the rule failed, the score is valid: {rule.last_failure}"
        return [
            replace(
                grade,
                answer=by_rule.answer,
                correct=by_rule.score >= 1 if by_rule.correct is None else by_rule.correct,
                format_ok=by_rule.format_ok,
            )
            for grade, by_rule in zip(grades, rule_grades, strict=True)
        ]

    def close(self) -> None:
        """Close the rule grader."""
        if self.rule is not None:
            self.rule.close()


# ----------------------------------------------------------------------------------------- training
def _loss(better: Tensor, worse: Tensor) -> Tensor:
    """Return −log σ(s_better − s_worse), mean over pairs.

    Source: Christiano et al. 2017; Ouyang et al. 2022, eq. 1.
    """
    return -F.logsigmoid(better - worse).mean()


def train(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[Pair],
    *,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    notice: Callable[[str], None] = lambda text: None,
    add_eos: bool = True,
) -> dict[str, float]:
    """Train a float32 model on preferences: AdamW, gradient norm <= 1, no dropout.

    The last tenth of the pairs is held out. ``model.config.reward_offset``, which
    ``save_pretrained`` stores, is set so that the mean score of held-out responses is 0.

    Args:
        model: Sequence classification with one label, trained in place.
        tokenizer: Its tokenizer.
        pairs: Preferences.
        steps: Optimiser steps.
        batch_size: Pairs of a step.
        lr: Learning rate.
        seed: Seed of the order of the pairs.
        notice: Function that shows a message to the user.
        add_eos: See ``RewardModel``.

    Returns:
        "loss" and "accuracy" (better response scored higher) of the held-out pairs.

    Raises:
        ConfigError: There are too few pairs, or one cannot be scored.
        TrainingError: The loss is not finite.
    """
    assert model.dtype == torch.float32, "AdamW's steps are below the resolution of shorter types"
    if len(pairs) < 2:
        raise ConfigError(
            f"reward.model.pairs={len(pairs)}: needs one training pair and one held-out pair at"
            " least; write 1000"
        )
    better = _encode(tokenizer, [prompt + good for prompt, good, _ in pairs], add_eos)
    worse = _encode(tokenizer, [prompt + bad for prompt, _, bad in pairs], add_eos)
    for i, row in enumerate(row for both in zip(better, worse) for row in both):
        if problem := _problem(model, row):
            raise ConfigError(f"reward.model.pairs: {problem} (pair {i // 2}); leave it out")
    count = len(pairs) - max(1, len(pairs) // 10)
    model.eval()
    model.config.reward_offset = 0.0
    optimizer = AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(1, steps + 1):
        while len(order) < batch_size:
            order += torch.randperm(count, generator=generator).tolist()
        batch, order = order[:batch_size], order[batch_size:]
        scores = _scores(model, [better[i] for i in batch] + [worse[i] for i in batch])
        loss = _loss(*scores.split(batch_size))
        if not torch.isfinite(loss):
            raise TrainingError(
                f"reward model: the loss of step {step} is {loss.item()}; lower"
                f" reward.model.lr={lr:g}"
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 5) == 0:
            notice(f"reward model: step {step} of {steps}, loss {loss.item():.3f}")
    optimizer.zero_grad()
    held_out = _score_all(model, better[count:] + worse[count:], BATCH_TOKENS)
    high, low = held_out.chunk(2)
    model.config.reward_offset = float(held_out.mean())
    return {"loss": float(_loss(high, low)), "accuracy": float((high > low).float().mean())}
