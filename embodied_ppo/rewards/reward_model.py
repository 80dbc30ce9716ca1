"""A reward model as judge: transformers' sequence classification with one label, by path or trained from preferences.

The score is read at the last token of prompt and response. transformers looks for it by the padding token's id, and so
misses an end token that pads as well; we count. B rows, L tokens of a row, padded on the right, D size of a hidden
state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from embodied_ppo.core.errors import ConfigError, TrainingError, one_line
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.models.checkpoint_files import config_errors
from embodied_ppo.rewards.graders import FAILED, Grade, Graders, Sample

Pair = tuple[str, str, str]
"""(prompt, better response, worse response)."""
BATCH_TOKENS = 16384
"""Tokens that are scored at once, padding included."""


# ------------------------------------------------------------------------------------------------------------- models
def load(path: str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> tuple[Any, Any]:
    """(model, tokenizer) that ``save_pretrained`` wrote to a directory. Raises ConfigError."""
    option = f"reward.model.path={path}"
    if not Path(path, "config.json").is_file():
        raise ConfigError(
            f"{option}: holds no config.json; name a directory that transformers wrote "
            "(hf download NAME --local-dir DIR)"
        )
    if not [*Path(path).glob("tokenizer.*"), *Path(path).glob("vocab.*")]:  # transformers makes up an empty one
        raise ConfigError(f"{option}: holds no tokenizer; save the one that the model was trained with there")
    transformers = _transformers()
    AutoModel = transformers.AutoModelForSequenceClassification
    # AutoTokenizer takes the model family's rules of splitting, even where tokenizer.json holds others
    exact = Path(path, "tokenizer.json").is_file()
    Tokenizer = transformers.PreTrainedTokenizerFast if exact else transformers.AutoTokenizer
    transformers.utils.logging.set_verbosity_error()  # what is missing is told below
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    cure = "; name a complete directory of a sequence-classification model"
    with config_errors(f"{option}: transformers refuses: ", cure):
        model, info = AutoModel.from_pretrained(
            path, dtype=dtype, output_loading_info=True, use_safetensors=True, **local
        )
        tokenizer = Tokenizer.from_pretrained(path, **local)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"{option}: a checkpoint of {', '.join(model.config.architectures or ['?'])} without {missing[0]}, which "
            "would be random; name a reward model (…ForSequenceClassification with one label)"
        )
    if model.config.num_labels != 1:
        raise ConfigError(f"{option}: has {model.config.num_labels} labels; name a model with num_labels=1")
    _check_head(model, option)
    end, known = tokenizer.eos_token_id, model.get_input_embeddings().num_embeddings
    if end is None:
        raise ConfigError(f"{option}: its tokenizer has no end token; set eos_token in tokenizer_config.json")
    if max(tokenizer.get_vocab().values()) >= known:
        raise ConfigError(
            f"{option}: its tokenizer has {len(tokenizer)} tokens, the model {known}; save the one that the model was "
            "trained with there"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id  # for transformers; ours needs none
    return model.to(device).eval(), tokenizer


def new(architecture: Mapping[str, Any], *, device: torch.device | str = "cpu") -> Any:
    """A model from its configuration's fields, as ``models.language.load`` takes them; float32. Raises ConfigError.

    Its head is zero: every text scores 0 until it has learnt, and its loss begins at log 2.
    """
    transformers = _transformers()
    fields = dict(architecture)
    try:
        config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields, num_labels=1)
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ConfigError(
            f"architecture={dict(architecture)}: transformers refuses a reward model: {one_line(error)}; "
            "write the actor's"
        ) from error
    _check_head(model, f"architecture={dict(architecture)}")
    nn.init.zeros_(model.score.weight)
    return model.to(device).eval()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"reward.model needs transformers ({error}): pip install 'embodied-ppo[language]'") from error
    return transformers


def _check_head(model: Any, option: str) -> None:
    if not isinstance(getattr(model, "score", None), nn.Linear):
        raise ConfigError(
            f"{option}: {type(model).__name__} has no linear head named score that every token can be read with; name "
            "a causal model, such as Llama, Mistral, Qwen 2 to 3 or Gemma 1 to 3"
        )


# ------------------------------------------------------------------------------------------------------------- scores
def _encode(tokenizer: Any, texts: Sequence[str], add_eos: bool) -> list[list[int]]:
    """Tokens of each text, with one end token behind it."""
    end = [tokenizer.eos_token_id] if add_eos else []
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    return [list(row) if list(row[-1:]) == end else [*row, *end] for row in rows]


def _problem(model: Any, row: list[int]) -> str | None:
    """Why a row cannot be scored."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not row:
        return "the text has no tokens"
    return f"the text has {len(row)} tokens, the model's limit is {limit}" if limit and len(row) > limit else None


def _scores(model: Any, rows: Sequence[list[int]]) -> Tensor:
    """float32 [B] at the last token of each row, with gradient; the head computes in float32."""
    length = torch.tensor([len(row) for row in rows], device=model.device)
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(model.device)  # [B, L]; any id pads
    seen = torch.arange(ids.shape[1], device=model.device) < length.unsqueeze(1)
    hidden = model.base_model(input_ids=ids, attention_mask=seen.long(), use_cache=False).last_hidden_state  # [B, L, D]
    last = hidden[torch.arange(len(rows), device=model.device), length - 1].float()
    bias = None if model.score.bias is None else model.score.bias.float()
    offset = getattr(model.config, "reward_offset", 0.0)  # in config.json: the heads of transformers have no bias
    return F.linear(last, model.score.weight.float(), bias).squeeze(-1) - offset


@torch.no_grad()
def _score_all(model: Any, rows: Sequence[list[int]], batch_tokens: int) -> Tensor:
    """float32 [len(rows)] on the CPU, in batches of similar lengths."""
    model.eval()
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found = torch.empty(len(rows))
    while order:
        count = 1
        while count < len(order) and (count + 1) * len(rows[order[count]]) <= batch_tokens:
            count += 1
        batch, order = order[:count], order[count:]
        found[batch] = _scores(model, [rows[i] for i in batch]).cpu()
    return found


class RewardModel:
    """Scores prompt and response together; a ``rule`` may say right or wrong, for the metrics only."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        rule: Graders | None = None,
        batch_tokens: int = BATCH_TOKENS,
        add_eos: bool = True,
    ) -> None:
        """``tokenizer``: called with texts and add_special_tokens, it gives "input_ids"; it has an eos_token_id.

        ``batch_tokens``: tokens scored at once, padding included. ``add_eos``: end texts as the model saw them end.
        """
        self.model, self.tokenizer, self.rule = model, tokenizer, rule
        self.batch_tokens, self.add_eos = batch_tokens, add_eos
        self.failures = 0
        self.last_failure: str | None = None

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        """One grade per sample, in their order; prompts[i] belongs to samples[i].

        A text that is too long for the model, or whose score is not finite, fails. Where there is a rule, what it
        says of answer, correct (else: scored at least 1) and format goes into the grade.
        """
        assert len(samples) == len(prompts)
        rows = _encode(self.tokenizer, [p.text + s[1] for p, s in zip(prompts, samples)], self.add_eos)
        problems = [_problem(self.model, row) for row in rows]
        fit = [i for i, problem in enumerate(problems) if problem is None]
        grades = [FAILED] * len(samples)
        for i, score in zip(fit, _score_all(self.model, [rows[i] for i in fit], self.batch_tokens).tolist()):
            if math.isfinite(score):
                grades[i] = Grade(score)
            else:
                problems[i] = f"the model's score is {score}"
        if self.rule is not None:
            grades = self._judged(self.rule, grades, samples, prompts)
        if failed := [i for i, grade in enumerate(grades) if grade.failed]:
            self.failures += len(failed)
            source, response, *_ = samples[failed[0]]
            told = f"data_source = {source}, response = {response[:60]!r}"
            self.last_failure = f"sample {failed[0]} of {len(samples)} ({told}): {problems[failed[0]]}"
        return grades

    def _judged(
        self, rule: Graders, grades: list[Grade], samples: Sequence[Sample], prompts: Sequence[Prompt]
    ) -> list[Grade]:
        before = rule.failures
        words = rule.grade(samples, prompts)
        if rule.failures > before:
            self.failures += rule.failures - before
            self.last_failure = f"only the rule failed, the model's score stands: {rule.last_failure}"
        return [
            replace(
                grade,
                answer=said.answer,
                correct=said.score >= 1 if said.correct is None else said.correct,
                format_ok=said.format_ok,
            )
            for grade, said in zip(grades, words, strict=True)
        ]

    def close(self) -> None:
        if self.rule is not None:
            self.rule.close()


# ----------------------------------------------------------------------------------------------------------- training
def _loss(better: Tensor, worse: Tensor) -> Tensor:
    """−log σ(s_better − s_worse), mean over pairs (Christiano et al. 2017; Ouyang et al. 2022, eq. 1)."""
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
    """Teach a float32 model preferences: AdamW, gradient norm <= 1, no dropout. ``batch_size``: pairs in one step.

    The last tenth of the pairs is held out: returns their "loss" and "accuracy" (better scored above worse). Their mean
    score becomes 0, by ``model.config.reward_offset``, which ``save_pretrained`` keeps. Raises ConfigError and
    TrainingError.
    """
    assert model.dtype == torch.float32, "AdamW's steps are lost in fewer bits"
    if len(pairs) < 2:
        raise ConfigError(f"reward.model.pairs={len(pairs)}: one to learn from and one held out are needed; write 1000")
    better = _encode(tokenizer, [prompt + good for prompt, good, _ in pairs], add_eos)
    worse = _encode(tokenizer, [prompt + bad for prompt, _, bad in pairs], add_eos)
    for i, row in enumerate(row for both in zip(better, worse) for row in both):
        if problem := _problem(model, row):
            raise ConfigError(f"reward.model.pairs: {problem} (pair {i // 2}); leave it out")
    count = len(pairs) - max(1, len(pairs) // 10)
    model.eval()
    model.config.reward_offset = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    for step in range(1, steps + 1):
        while len(order) < batch_size:
            order += torch.randperm(count, generator=generator).tolist()
        batch, order = order[:batch_size], order[batch_size:]
        scores = _scores(model, [better[i] for i in batch] + [worse[i] for i in batch])
        loss = _loss(*scores.split(batch_size))
        if not torch.isfinite(loss):
            raise TrainingError(f"reward model: the loss of step {step} is {loss.item()}; lower reward.model.lr={lr:g}")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 5) == 0:
            notice(f"reward model: step {step} of {steps}, loss {loss.item():.3f}")
    optimizer.zero_grad()
    high, low = _score_all(model, better[count:] + worse[count:], BATCH_TOKENS).split(len(pairs) - count)
    model.config.reward_offset = float(torch.cat((high, low)).mean())
    return {"loss": float(_loss(high, low)), "accuracy": float((high > low).float().mean())}
