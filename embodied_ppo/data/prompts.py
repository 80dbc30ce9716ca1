"""Prompts of data sets, and the order in which they are sampled."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Generator, Tensor

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.random import sampling_key
from embodied_ppo.data.prompt_rows import Paths, Row, brief, read_rows
from embodied_ppo.data.synthetic_tasks import Part, Task, encode
from embodied_ppo.options.schema import DataConfig
from embodied_ppo.policies.checkpoint_files import LOCAL, config_errors, import_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Tokens of a prompt, and of its response including the end token; neither is empty.
Example: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One tokenised prompt.

    Attributes:
        ids: Tokens, with the chat template applied.
        text: Text of the tokens.
        ground_truth: Correct answer, which a grader compares with.
        data_source: Selects the grader and the group of an evaluation.
        extra: verl's ``extra_info``.
        index: Row in the files from 0; omitted rows count.
        messages: The conversation of which ``text`` was made; empty if there is none.
        prefix: Start of the response that the chat template has written (``<think>``).
        templated: Whether a chat template made ``text``.
        response: Demonstrated response, empty without one.
        weight: Weight of the file, see ``Sampler``.
    """

    ids: tuple[int, ...]
    text: str
    ground_truth: str
    data_source: str
    extra: dict[str, Any]
    index: int
    messages: Sequence[dict[str, str]] = ()
    prefix: str = ""
    templated: bool = False
    response: str = ""
    weight: float = 1.0


# ------------------------------------------------------------------------------------------ prompts
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory.

    Raises:
        ConfigError: The directory has none, or it cannot be read.
    """
    option = f"actor.tokenizer={path}"
    if not [*Path(path).glob("tokenizer*"), *Path(path).glob("vocab.*")]:
        raise ConfigError(
            f"{option}: is no directory with a tokenizer (tokenizer.json); name that of a model (hf"
            " download NAME --local-dir DIR)"
        )
    tokenizer = tokenizer_class(path)
    with config_errors(f"{option}: transformers refuses (", "); fix it"):
        return tokenizer.from_pretrained(path, **LOCAL)


def tokenizer_class(path: str) -> Any:
    """Return the class of transformers that loads the tokenizer of a directory exactly.

    Raises:
        ConfigError: transformers is not installed.
    """
    transformers = import_transformers("mode=reasoning", extra="language")
    # AutoTokenizer applies the splitting rules of the model family even if tokenizer.json has
    # others.
    has_rules = Path(path, "tokenizer.json").is_file()
    return transformers.PreTrainedTokenizerFast if has_rules else transformers.AutoTokenizer


def load_prompts(
    paths: Paths,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    prompt_length: int,
    needs_answer: bool = True,
) -> tuple[list[Prompt], int]:
    """Tokenise all rows and drop prompts of more than ``prompt_length`` tokens.

    Args:
        paths: Files and directories, see ``read_rows``.
        tokenizer: The tokenizer.
        data: Section ``data``: keys of the rows and chat template.
        prompt_length: Largest number of tokens.
        needs_answer: See ``read_rows``.

    Returns:
        The prompts, and the number of dropped ones.

    Raises:
        ConfigError: The data or the template cannot be used.
    """
    chat = data.chat_template != "never" and bool(tokenizer.chat_template)
    if data.chat_template == "always" and not chat:
        raise ConfigError(
            "chat_template = always: the tokenizer has none; write chat_template=never, or add a"
            " template to the tokenizer"
        )
    prompts: list[Prompt] = []
    lengths: list[int] = []
    keys = {"prompt_key": data.prompt_key, "answer_key": data.answer_key}
    prefix = _response_prefix(tokenizer) if chat else ""
    for index, row in enumerate(read_rows(paths, **keys, needs_answer=needs_answer)):
        messages = _messages(row)
        text = "\n".join(m["content"] for m in messages)
        source = "the tokenizer or its chat template" if chat else "the tokenizer"
        before = f"{row.location}: {source} refuses {brief(text)} ("
        hint = ", or write chat_template=never" if chat else ""
        with config_errors(before, f"); fix the row or use another tokenizer{hint}", kind=True):
            if chat:
                options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
                text = str(tokenizer.apply_chat_template(messages, **options))
            ids = tuple(tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"])
        if not ids:
            raise ConfigError(f"{row.location}: the prompt {brief(text)} has no tokens; fix it")
        lengths.append(len(ids))
        if len(ids) <= prompt_length:
            answer = row.ground_truth, row.data_source, row.extra
            template = messages, prefix, chat
            prompts.append(Prompt(ids, text, *answer, index, *template, row.response, row.weight))
    if not prompts:
        raise ConfigError(
            f"prompt_length = {prompt_length}: all {len(lengths)} prompts are longer, the shortest"
            f" has {min(lengths)} tokens, the longest {max(lengths)}; write"
            f" prompt_length={max(lengths)}"
        )
    return prompts, len(lengths) - len(prompts)


def _response_prefix(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text with which a chat template begins a response, such as ``<think>``.

    It is what a generation prompt has after the header of an earlier message of the assistant.
    """
    # Templates contain words such as "USER:"; none of them contains these texts.
    roles = [("user", "question-1"), ("assistant", "answer-1"), ("user", "question-2")]
    chat = [{"role": role, "content": content} for role, content in roles]
    render: Any = tokenizer.apply_chat_template
    try:
        earlier = str(render(chat, tokenize=False))
        prompt = str(render(chat[:1], tokenize=False, add_generation_prompt=True))
    except Exception:  # a template can raise anything; it is applied to the prompts below
        return ""
    header = earlier.rpartition("question-1")[2].partition("answer-1")[0]
    opened = prompt.rpartition("question-1")[2]
    return opened[len(os.path.commonprefix([header, opened])) :]  # noqa: RUF071  (texts, not paths)


def _messages(row: Row) -> list[dict[str, str]]:
    """Return the chat of a row, with the suffix of its layout at the end of its last message."""
    chat = row.prompt
    *earlier, last = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    return [*earlier, {**last, "content": last["content"] + row.suffix}]


def demonstrations(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    stops: Sequence[int],
    *,
    response_length: int,
) -> tuple[list[Example], list[float]]:
    """Tokenise the responses of prompts; drop those of more than ``response_length`` tokens.

    A response is what the chat template writes after the prompt, up to its first stop token. Where
    the template writes none, or changes the prompt (it may remove earlier thoughts), the response
    is its own text and a stop token.

    Args:
        prompts: Prompts of ``load_prompts``.
        tokenizer: The tokenizer.
        stops: Tokens that end a response.
        response_length: Largest number of tokens, with the stop token.

    Returns:
        Tokens of prompt and response, and weight, of each row that is not dropped.

    Raises:
        ConfigError: A row has no response, or all are too long.
    """
    examples: list[Example] = []
    weights: list[float] = []
    for p in prompts:
        if not p.response:
            raise ConfigError(
                f"name the column of responses, data.answer_key: row {p.index} of data.train has"
                " none"
            )
        text = p.response
        if p.templated:
            chat = [*p.messages, {"role": "assistant", "content": text}]
            with config_errors(f"the chat template refuses row {p.index} (", "); fix the row"):
                complete = str(tokenizer.apply_chat_template(chat, tokenize=False))
            if complete.startswith(p.text):
                text = complete.removeprefix(p.text)
        ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        ends = [i for i, token in enumerate(ids) if token in stops]
        eos = tokenizer.eos_token_id
        ids = ids[: ends[0] + 1] if ends else [*ids, *([eos] if eos in stops else stops[:1])]
        if len(ids) <= response_length:
            examples.append((p.ids, tuple(ids)))
            weights.append(p.weight)
    if not examples:
        raise ConfigError(
            f"write a larger algorithm.response_length: all {len(prompts)} responses have more than"
            f" {response_length} tokens"
        )
    return examples, weights


def task_prompts(task: Task, part: Part, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the prompts of one part of a synthetic task's problems.

    Raises:
        ConfigError: The tokenizer lacks a character.
    """
    problems = task.problems(part)
    ids = encode([p.prompt for p in problems], tokenizer)
    return [
        Prompt(x, p.prompt, p.answer, task.name, {}, i)
        for i, (x, p) in enumerate(zip(ids, problems, strict=True))
    ]


# ------------------------------------------------------------------------------------------ sampler
class Sampler:
    """Endless batches of row numbers. Every epoch has every row once, in a new order.

    With weights it has row i floor(w_i) times, and once more with the probability of the remainder.
    """

    def __init__(
        self,
        size: int,
        batch: int,
        seed: int,
        shuffle: bool = True,
        *,
        weights: Sequence[float] = (),
        by_success: bool = False,
        checksum: int = 0,
    ) -> None:
        """Start at the first epoch.

        Args:
            size: Number of rows.
            batch: Rows of a batch.
            seed: The order of an epoch depends on (seed, epoch), ``size`` and the weights only.
            shuffle: Whether to shuffle the rows.
            weights: Mean number of times that an epoch has each row; empty: 1.
            by_success: Multiply the weights by the learnability of the rows, see ``record``.
            checksum: Of the rows; only a state with the same one can be continued.
        """
        self.size, self.batch, self.seed, self.shuffle = size, batch, seed, shuffle
        self.checksum = checksum
        weighted = by_success or any(w != 1 for w in weights)
        self._weights = torch.tensor([*weights] or [1.0] * size).double() if weighted else None
        # Wrong and right responses to each row.
        self._results = torch.zeros(2, size, dtype=torch.float64) if by_success else None
        self._epoch, self._position = 0, 0
        self._order = self._draw()

    def _draw(self) -> Tensor:
        """Return the order of the current epoch."""

        def generator(purpose: str) -> Generator:
            return Generator().manual_seed(sampling_key(self.seed, purpose, self._epoch))

        rows = torch.arange(self.size)
        if (weights := self._weights) is not None:
            if self._results is not None:
                weights = weights * learnability(*self._results)
            noise = torch.rand(self.size, generator=generator("weights"), dtype=torch.float64)
            rows = rows.repeat_interleave((weights + noise).long())
        if self.shuffle:
            rows = rows[torch.randperm(len(rows), generator=generator("prompts"))]
        return rows

    def record(self, rows: Sequence[int], correct: Sequence[bool]) -> None:
        """Record responses, which change the weights from the next epoch on (``by_success``).

        Earlier results of the same rows count half, because the policy has changed.

        Args:
            rows: Row of each response.
            correct: Whether each response is right.
        """
        if self._results is None:
            return
        row, right = torch.tensor(rows, dtype=torch.int64), torch.tensor(correct).double()
        counts = torch.stack(
            [torch.bincount(row, weights=x, minlength=self.size) for x in (1 - right, right)]
        )
        self._results = self._results * torch.where(counts.sum(0) > 0, 0.5, 1.0) + counts

    def next(self, count: int | None = None) -> list[int]:
        """Return the next ``count`` rows, which may span the end of an epoch; None: a batch."""
        count = self.batch if count is None else count
        rows: list[int] = []
        while len(rows) < count:
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._draw()
            end = min(len(self._order), self._position + count - len(rows))
            rows += self._order[self._position : end].tolist()
            self._position = end
        return rows

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far."""
        return self._epoch + self._position / max(1, len(self._order))

    def state(self) -> dict[str, Any]:
        """Return the position in the data, and the values that determine the order."""
        state: dict[str, Any] = {"epoch": self._epoch, "position": self._position, **self._kind()}
        if self._weights is not None:
            # The order of this epoch follows from the results at its start, not from those of now.
            state |= {"order": self._order, "results": self._results}
        return state

    def _kind(self) -> dict[str, int]:
        """Return the values that a state to continue must have, too."""
        order = {"size": self.size, "seed": self.seed, "shuffle": int(self.shuffle)}
        return {**order, "weighted": int(self._weights is not None), "checksum": self.checksum}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()``, with any batch size. Other weights count from the next epoch.

        Raises:
            ConfigError: The state belongs to other data or another seed.
        """
        absent = {"weighted": 0, "checksum": self.checksum}  # of states before these existed
        for name, value in self._kind().items():
            if (other := state.get(name, absent.get(name))) != value:
                raise ConfigError(
                    f"sampler: {name} is {value}, the state to continue has {other}: the"
                    " orders of rows differ; use the same data, prompt_length, seed and shuffle,"
                    " or start a new run"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = state["order"] if self._weights is not None else self._draw()
        if self._results is not None and state["results"] is not None:
            self._results = state["results"]


def learnability(wrong: Tensor, right: Tensor) -> Tensor:
    """Return 6 E[p (1 - p)] of the probabilities p of a right response.

    The variance p (1 - p) of the reward is what a prompt can teach (Foster and Foerster 2025, arXiv
    2502.12272). With a uniform prior, p has the distribution Beta(a, b), a = right + 1 and
    b = wrong + 1, so that E[p (1 - p)] = a b / ((a + b) (a + b + 1)). Rows without results have 1.

    Args:
        wrong, right: Numbers of responses, float64 [rows].
    """
    a, b = right + 1, wrong + 1
    return 6 * a * b / ((a + b) * (a + b + 1))
