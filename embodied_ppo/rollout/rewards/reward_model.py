"""Reward model: transformers' sequence classification with one label.

B rows, L tokens of a row, padded on the right, D size of a hidden state.

The score is read at the last token of prompt and response, located by the length of the row.
transformers locates it by the id of the padding token, and ignores an end token with the same id.

A conversation is written by the chat template of the reward model's own tokenizer, if it has one,
as its publisher does: the markup of the actor's template would be foreign to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from embodied_envs.base.errors import ConfigError
from embodied_ppo.data.prompts import Prompt, tokenizer_class
from embodied_ppo.policies.checkpoint_files import LOCAL, LOCAL_WEIGHTS, config_errors
from embodied_ppo.rollout.rewards.graders import FAILED, Grade, Sample, first_failure

BATCH_TOKENS = 16384  # tokens that are scored at once, including padding


# ------------------------------------------------------------------------------------------- models
def load(
    path: str, *, option: str = "reward.model.path", device: torch.device | str = "cpu"
) -> tuple[Any, Any]:
    """Load a float32 model and its tokenizer that ``save_pretrained`` wrote to a directory.

    Returns:
        (model, tokenizer).

    Raises:
        ConfigError: A file is missing or damaged, or the model is not a reward model.
    """
    option = f"{option}={path}"
    if not Path(path, "config.json").is_file():
        raise ConfigError(
            f"{option}: holds no config.json; name a directory that transformers wrote "
            "(hf download NAME --local-dir DIR)"
        )
    # Without tokenizer files transformers would create an empty tokenizer.
    if not [*Path(path).glob("tokenizer.*"), *Path(path).glob("vocab.*")]:
        raise ConfigError(f"{option}: holds no tokenizer; save the one of the model's training")
    import transformers

    AutoModel = transformers.AutoModelForSequenceClassification
    transformers.utils.logging.set_verbosity_error()  # missing weights are reported below
    hint = "; name a complete directory of a sequence-classification model"
    with config_errors(f"{option}: transformers refuses: ", hint):
        model, info = AutoModel.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True, **LOCAL_WEIGHTS
        )
        tokenizer = tokenizer_class(path).from_pretrained(path, **LOCAL)
    vocabulary = model.get_input_embeddings().num_embeddings
    needed = max(tokenizer.get_vocab().values()) + 1
    missing, head = ", ".join(sorted(info["missing_keys"])), getattr(model, "score", None)
    problems = (
        (missing, f"{model.config.architectures} has no {missing}"),
        (model.config.num_labels != 1, f"it has {model.config.num_labels} labels"),
        (not isinstance(head, nn.Linear), f"{type(model).__name__} has no head named score"),
        (tokenizer.eos_token_id is None, "its tokenizer has no eos_token"),
        (needed > vocabulary, f"its tokenizer has {needed} tokens, the model {vocabulary}"),
    )
    for is_wrong, problem in problems:
        if is_wrong:
            raise ConfigError(
                f"{option}: {problem}; name a reward model (…ForSequenceClassification of a causal"
                " model, with one label) with the tokenizer of its training"
            )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # Only transformers' own scoring of a saved model reads it.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return model.to(device).eval(), tokenizer


# ------------------------------------------------------------------------------------------- scores
def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise each text, with the tokenizer's first token and one end token at its end."""
    end = [tokenizer.eos_token_id]
    # [N][L]; a text that has the first token already gets no second one.
    rows = tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
    bos = [getattr(tokenizer, "bos_token_id", None)]
    rows = [list(row[1:] if list(row[:2]) == bos * 2 else row) for row in rows]
    return [row if row[-1:] == end else [*row, *end] for row in rows]


def _scores(model: Any, rows: Sequence[list[int]]) -> Tensor:
    """Return the scores at the last token of each row, float32 [B]."""
    # The base model runs in its own type, the head in float32.
    device = model.device
    length = torch.tensor([len(row) for row in rows], device=device)
    # [B, L]; the id of the padding does not matter, because it is masked.
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    mask = torch.arange(ids.shape[1], device=device) < length.unsqueeze(1)
    output = model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    hidden = output.last_hidden_state  # [B, L, D]
    last = hidden[torch.arange(len(rows), device=device), length - 1].float()
    bias = None if model.score.bias is None else model.score.bias.float()
    return F.linear(last, model.score.weight.float(), bias).squeeze(-1)


@torch.no_grad()
def _score_all(model: Any, rows: Sequence[list[int]]) -> Tensor:
    """Return the scores of all rows, float32 [len(rows)] on the CPU.

    A batch has rows of similar lengths and at most ``BATCH_TOKENS`` tokens with padding.
    """
    model.eval()
    # Rows of similar lengths share a batch, so that little is padding.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    scores = torch.empty(len(rows))
    while order:
        # As many rows as fit, the longest of them sets the width.
        count = 1
        while count < len(order) and (count + 1) * len(rows[order[count]]) <= BATCH_TOKENS:
            count += 1
        batch, order = order[:count], order[count:]
        scores[batch] = _scores(model, [rows[i] for i in batch]).cpu()
    return scores


@dataclass
class RewardModel:
    """Graders that score prompt and response together.

    Attributes:
        model: Sequence classification with one label.
        tokenizer: Its tokenizer, with an eos_token_id.
        plain_text: Whether a model without a chat template reads the contents of the messages
            instead of the text that the actor's template made of them.
        foreign_tokens: Special tokens of the actor that this tokenizer lacks; responses are read
            without them.
        failures: Number of samples so far that could not be graded.
        last_failure: Sample and cause of the most recent failure.
    """

    model: Any
    tokenizer: Any
    _: KW_ONLY
    plain_text: bool = False
    foreign_tokens: Sequence[str] = ()
    failures: int = field(default=0, init=False)
    last_failure: str | None = field(default=None, init=False)

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt]) -> list[Grade]:
        """Return one grade per sample, in their order; prompts[i] belongs to samples[i].

        A text that is too long for the model, or whose score is not finite, fails.
        """
        before = f"reward.model.path={self.model.config._name_or_path}: its tokenizer refuses ("
        with config_errors(before, "); change the data or its chat template", kind=True):
            rows = self.encode([s[1] for s in samples], prompts)
        # Score what can be scored; the others fail with their reason.
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or math.inf
        problems: list[str | None] = [
            f"the text has {len(row)} tokens, the model's limit is {limit}"
            if len(row) > limit
            else None
            for row in rows
        ]
        valid = [i for i, problem in enumerate(problems) if problem is None]
        grades = [FAILED] * len(samples)
        for i, score in zip(valid, _score_all(self.model, [rows[i] for i in valid]).tolist()):
            if math.isfinite(score):
                grades[i] = Grade(score)
            else:
                problems[i] = f"the model's score is {score}"
        self.failures += sum(problem is not None for problem in problems)
        self.last_failure = first_failure(samples, problems) or self.last_failure
        return grades

    def encode(self, responses: Sequence[str], prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the tokens that the model reads, of each prompt with its response.

        Without a chat template of its own the model reads the actor's text if it knows the actor's
        tokens (``plain_text`` is False), else the contents of the messages.
        """
        for token in self.foreign_tokens:
            responses = [response.replace(token, "") for response in responses]
        pairs = list(zip(prompts, responses, strict=True))
        if getattr(self.tokenizer, "chat_template", None) and all(p.messages for p in prompts):
            chats = [
                [*p.messages, {"role": "assistant", "content": p.prefix + response}]
                for p, response in pairs
            ]
            # The template writes all special tokens.
            texts = [self.tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
            options: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
            return self.tokenizer(texts, **options)["input_ids"] if texts else []
        if self.plain_text:
            texts = ["\n".join([*(m["content"] for m in p.messages), r]) for p, r in pairs]
        else:
            texts = [p.text + response for p, response in pairs]
        return _encode(self.tokenizer, texts)

    def close(self) -> None:
        """Do nothing: the memory is freed with the object."""
