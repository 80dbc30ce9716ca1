"""Prompts of data sets, and the order in which they are sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Generator, Tensor

from embodied_ppo.core.errors import ConfigError, choose
from embodied_ppo.core.random import sampling_key
from embodied_ppo.data import parquet
from embodied_ppo.data.synthetic_tasks import Part, Task, encode
from embodied_ppo.models.checkpoint_files import LOCAL, config_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_KEYS = ("prompt", "question")
"""Keys of a row that may hold the prompt, in order of preference."""
ANSWER_KEYS = ("reward_model", "ground_truth", "answer")
"""Keys of a row that may hold the correct answer, in order of preference.

The value of ``reward_model`` (verl) has a key ``ground_truth``.
"""
GSM8K_SUFFIX = ' Let\'s think step by step and output the final answer after "####".'
"""Text that verl adds to every question of GSM8K."""

Paths: TypeAlias = "str | Path | Sequence[str | Path]"
ChatTemplate: TypeAlias = Literal["auto", "always", "never"]


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
    """

    ids: tuple[int, ...]
    text: str
    ground_truth: str
    data_source: str
    extra: dict[str, Any]
    index: int


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file.

    Attributes:
        prompt: Text, or messages {role, content}.
        ground_truth: Correct answer.
        data_source: Name of the data source.
        extra: verl's ``extra_info``.
        suffix: Text that the file's layout adds to the prompt by default.
        location: File and line (from 1) or row (from 0), for messages.
    """

    prompt: str | list[dict[str, str]]
    ground_truth: str
    data_source: str
    extra: dict[str, Any]
    suffix: str
    location: str


# -------------------------------------------------------------------------------------------- files
def files_of(paths: Paths) -> list[Path]:
    """Return all files, with directories replaced by the data files in them.

    Raises:
        ConfigError: A path does not exist or holds no data.
    """
    files: list[Path] = []
    for path in [Path(paths)] if isinstance(paths, (str, Path)) else [Path(p) for p in paths]:
        path = path.expanduser()
        if path.is_dir():
            inside = sorted(p for pattern in ("*.jsonl", "*.parquet") for p in path.glob(pattern))
            if not inside:
                raise ConfigError(
                    f"{path}: a directory without *.jsonl and *.parquet; name another directory or"
                    " a file"
                )
            files += inside
        elif path.is_file():
            files.append(path)
        elif path.exists():
            raise ConfigError(
                f"{path}: is neither a file nor a directory; name a .jsonl, .json or .parquet file"
            )
        else:
            names = sorted(p.name for p in path.parent.glob("*.*")) if path.parent.is_dir() else []
            hint = choose(path.name, names[:20], "in its folder: ")
            raise ConfigError(f"{path}: does not exist; {hint}")
    if not files:
        raise ConfigError(
            "no data file is named; name .jsonl, .json or .parquet files, or a directory of them"
        )
    return files


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of each row.

    A file that is not parquet contains JSON lines or a JSON array, whatever its suffix is.
    """
    if path.suffix == ".parquet":
        yield from ((f"{path} row {i}", row) for i, row in enumerate(parquet.read_rows(path)))
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is no UTF-8 text (byte {error.start}: {error.reason}); convert it"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); fix the cause") from error
    if text.lstrip().startswith("["):
        try:
            items = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: starts like a JSON array but is none ({error}); fix it"
            ) from error
        yield from ((f"{path} row {i}", item) for i, item in enumerate(items))
        return
    # splitlines would also split at U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield f"{path}:{number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{path}:{number}: {line[:60]!r} is no JSON ({error}); write one object per"
                    " line"
                ) from error


def read_rows(
    paths: Paths, *, prompt_key: str | None = None, answer_key: str | None = None
) -> list[Row]:
    """Read all rows of JSON lines, JSON arrays and parquet files, in the order of ``paths``.

    The files of a directory are read in sorted order. The first row of a file determines its
    layout, unless the keys are given:
      verl    {data_source, prompt: [{role, content}, ..], reward_model: {ground_truth}, extra_info}
      plain   {prompt: text or messages, ground_truth or answer}; other keys go to ``extra``
      GSM8K   {question, answer}, the correct answer after ``####``, without commas

    The ``data_source`` of rows without one is "openai/gsm8k" (GSM8K) or the name of the file.

    Args:
        paths: Files and directories.
        prompt_key: Key of the prompt, None: detected.
        answer_key: Key of the correct answer, None: detected.

    Raises:
        ConfigError: A file or a row cannot be read.
    """
    rows: list[Row] = []
    for path in files_of(paths):
        before, gsm8k = len(rows), False
        for location, item in _items(path):
            if not isinstance(item, dict):
                raise ConfigError(
                    f"{location}: {_show(item)} is no object; write {{'prompt': .., 'ground_truth':"
                    " ..}"
                )
            if len(rows) == before:
                gsm8k = prompt_key in (None, "question") and answer_key is None and _is_gsm8k(item)
            rows.append(_row(item, location, path.stem, gsm8k, prompt_key, answer_key))
        if len(rows) == before:
            raise ConfigError(f"{path}: holds no rows; leave it out, or fill it")
    return rows


# --------------------------------------------------------------------------------------------- rows
def _show(value: Any) -> str:
    """Format a value in at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _key(
    item: Mapping[str, Any], location: str, option: str, key: str | None, known: Sequence[str]
) -> str:
    """Return the key to read: ``key``, or the first known one of the row."""
    if key is None:
        if present := _first_key(item, known):
            return present
        raise ConfigError(
            f"{location}: has none of {', '.join(known)}; its keys: {', '.join(item) or 'none'};"
            f" name the right one with {option}=KEY"
        )
    if item.get(key) is None:
        problem = "is null" if key in item else "does not exist"
        raise ConfigError(
            f"{location}: {option} = {key} {problem}; {choose(key, list(item), 'its keys: ')}"
        )
    return key


def _first_key(item: Mapping[str, Any], known: Sequence[str]) -> str | None:
    """Return the first known key whose value is not null."""
    return next((k for k in known if item.get(k) is not None), None)


def _is_gsm8k(item: Mapping[str, Any]) -> bool:
    """Return whether a row has the layout of GSM8K."""
    keys = [_first_key(item, known) for known in (PROMPT_KEYS, ANSWER_KEYS)]
    return keys == ["question", "answer"] and "####" in str(item["answer"])


def _row(
    item: dict[str, Any],
    location: str,
    name: str,
    gsm8k: bool,
    prompt_key: str | None,
    answer_key: str | None,
) -> Row:
    """Convert and check one row."""
    key = _key(item, location, "prompt_key", prompt_key, PROMPT_KEYS)
    prompt = _prompt(item[key], f"{location}: {key}")
    truth_key = _key(item, location, "answer_key", answer_key, ANSWER_KEYS)
    truth, label = item[truth_key], truth_key
    if truth_key == "reward_model":
        truth = truth.get("ground_truth") if isinstance(truth, dict) else None
        label = "reward_model.ground_truth"
    if not isinstance(truth, (str, int, float)) or isinstance(truth, bool):
        raise ConfigError(f"{location}: {label} = {_show(truth)} must be a text or a number")
    # Integers in a column with nulls may be stored as floats.
    truth = str(int(truth) if isinstance(truth, float) and truth.is_integer() else truth)
    if gsm8k:
        _, marker, truth = truth.rpartition("####")
        truth = truth.strip().replace(",", "")
        if not marker or not truth:
            raise ConfigError(
                f"{location}: {label} = {_show(item[truth_key])} has no answer after '####', unlike"
                f" the first row; fix it, or use the full text with answer_key={truth_key}"
            )
    source, extra = item.get("data_source"), item.get("extra_info")
    if not isinstance(source, (str, type(None))):
        raise ConfigError(
            f"{location}: data_source = {_show(source)} must be a text, such as 'openai/gsm8k'"
        )
    if not isinstance(extra, (dict, type(None))):
        raise ConfigError(
            f"{location}: extra_info = {_show(extra)} must be an object; write it as a value of one"
        )
    if extra is None:
        used = (key, truth_key, "data_source", "extra_info")
        extra = {k: v for k, v in item.items() if k not in used}
    source = source or ("openai/gsm8k" if gsm8k else name)
    contents = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt]
    for text in (truth, source, *contents):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{location}: {_show(text)} is no Unicode text ({error.reason}); fix it"
            ) from error
    return Row(prompt, truth, source, extra, GSM8K_SUFFIX if gsm8k else "", location)


def _prompt(value: Any, location: str) -> str | list[dict[str, str]]:
    """Check and return a text or messages."""
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{location} = {_show(value)} must be a text or messages"
            " [{'role': .., 'content': ..}]"
        )
    for i, message in enumerate(value):
        for key in ("role", "content"):
            text = message.get(key) if isinstance(message, dict) else None
            if not isinstance(text, str):
                raise ConfigError(
                    f"{location}[{i}] = {_show(message)} must have a text under '{key}'; other"
                    " contents are not supported"
                )
    return [{"role": m["role"], "content": m["content"]} for m in value]


# ------------------------------------------------------------------------------------------ prompts
def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a directory.

    Raises:
        ConfigError: The directory has none, or it cannot be read.
    """
    option = f"actor.tokenizer={path}"
    if not Path(path).is_dir():
        raise ConfigError(
            f"{option}: is no directory; name that of a model (hf download NAME --local-dir DIR)"
        )
    if not [*Path(path).glob("tokenizer*"), *Path(path).glob("vocab.*")]:
        raise ConfigError(
            f"{option}: holds no tokenizer (tokenizer.json); name the directory of the model's"
        )
    tokenizer = tokenizer_class(path)
    with config_errors(f"{option}: transformers refuses (", "); fix it"):
        return tokenizer.from_pretrained(path, **LOCAL)


def tokenizer_class(path: str) -> Any:
    """Return the class of transformers that loads the tokenizer of a directory exactly.

    Raises:
        ConfigError: transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise ConfigError(
            f"mode=reasoning needs transformers ({error}): pip install 'embodied-ppo[language]'"
        ) from error
    # AutoTokenizer applies the splitting rules of the model family even if tokenizer.json has
    # others.
    has_rules = Path(path, "tokenizer.json").is_file()
    return PreTrainedTokenizerFast if has_rules else AutoTokenizer


def load_prompts(
    paths: Paths,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_length: int,
    chat_template: ChatTemplate,
    system: str | None,
    prompt_key: str | None = None,
    answer_key: str | None = None,
    suffix: str | None = None,
) -> tuple[list[Prompt], int]:
    """Tokenise all rows and drop prompts of more than ``prompt_length`` tokens.

    Args:
        paths: Files and directories, see ``read_rows``.
        tokenizer: The tokenizer.
        prompt_length: Largest number of tokens.
        chat_template: "auto" uses the tokenizer's template if it has one, "always" requires one,
            "never" joins the contents of the messages with line breaks.
        system: First message of the chat.
        prompt_key: See ``read_rows``.
        answer_key: See ``read_rows``.
        suffix: Text added to a prompt or to the last message of the user. None: that of the layout
            (``GSM8K_SUFFIX`` for GSM8K, else nothing).

    Returns:
        The prompts, and the number of dropped ones.

    Raises:
        ConfigError: The data or the template cannot be used.
    """
    chat = chat_template != "never" and bool(tokenizer.chat_template)
    if chat_template == "always" and not chat:
        raise ConfigError(
            "chat_template = always: the tokenizer has none; write chat_template=never, or add a"
            " template to the tokenizer"
        )
    if system is not None and not chat:
        raise ConfigError(
            f"system = {_show(system)} is set but not read; use a tokenizer with a chat template"
            " and chat_template=auto, or leave system out"
        )
    prompts: list[Prompt] = []
    lengths: list[int] = []
    for index, row in enumerate(read_rows(paths, prompt_key=prompt_key, answer_key=answer_key)):
        messages = _messages(row, row.suffix if suffix is None else suffix, system)
        text = "\n".join(m["content"] for m in messages)
        source, cure = "the tokenizer", "the row, or use another tokenizer"
        if chat:
            source, cure = (
                f"{source} or its chat template",
                "the row or the template, or write chat_template=never",
            )
        before = f"{row.location}: {source} refuses {_show(text)} ("
        with config_errors(before, f"); fix {cure}", kind=True):
            if chat:
                options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
                text = str(tokenizer.apply_chat_template(messages, **options))
            ids = tuple(tokenizer(text, add_special_tokens=not chat, verbose=False)["input_ids"])
        if not ids:
            raise ConfigError(f"{row.location}: the prompt {_show(text)} has no tokens; fix it")
        lengths.append(len(ids))
        if len(ids) <= prompt_length:
            prompts.append(Prompt(ids, text, row.ground_truth, row.data_source, row.extra, index))
    if not prompts:
        raise ConfigError(
            f"prompt_length = {prompt_length}: all {len(lengths)} prompts are longer, the shortest"
            f" has {min(lengths)} tokens, the longest {max(lengths)}; write"
            f" prompt_length={max(lengths)}"
        )
    return prompts, len(lengths) - len(prompts)


def _messages(row: Row, suffix: str, system: str | None) -> list[dict[str, str]]:
    """Return the chat of a row, with ``suffix`` at the end of the user's last message."""
    if isinstance(row.prompt, str):
        messages = [{"role": "user", "content": row.prompt}]
    else:
        messages = list(row.prompt)
    if suffix:
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        if not users:
            raise ConfigError(
                f"{row.location}: no message has the role 'user', which suffix = {_show(suffix)}"
                " needs"
            )
        last = messages[users[-1]]
        messages[users[-1]] = {**last, "content": last["content"] + suffix}
    if system is not None:
        if messages[0]["role"] == "system":
            raise ConfigError(
                f"{row.location}: starts with a system message already; leave system out"
            )
        messages.insert(0, {"role": "system", "content": system})
    return messages


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
    """Endless batches of row numbers. Every epoch has every row once, in a new order."""

    def __init__(self, size: int, batch: int, seed: int, shuffle: bool = True) -> None:
        """Start at the first epoch.

        Args:
            size: Number of rows.
            batch: Rows of a batch.
            seed: The order of an epoch depends on (seed, epoch) and ``size`` only.
            shuffle: Whether to shuffle the rows.

        Raises:
            ConfigError: ``size`` or ``batch`` is below 1.
        """
        for name, value in (("size", size), ("batch", batch)):
            if value < 1:
                raise ConfigError(f"sampler: {name} = {value} must be >= 1")
        self.size, self.batch, self.seed, self.shuffle = size, batch, seed, shuffle
        self._epoch, self._position = 0, 0
        self._order = self._draw()

    def _draw(self) -> Tensor:
        """Return the order of the current epoch."""
        if not self.shuffle:
            return torch.arange(self.size)
        generator = Generator().manual_seed(sampling_key(self.seed, "prompts", self._epoch))
        return torch.randperm(self.size, generator=generator)

    def next(self, count: int | None = None) -> list[int]:
        """Return the next ``count`` rows, which may span the end of an epoch; None: a batch."""
        count = self.batch if count is None else count
        rows: list[int] = []
        while len(rows) < count:
            if self._position == self.size:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._draw()
            end = min(self.size, self._position + count - len(rows))
            rows += self._order[self._position : end].tolist()
            self._position = end
        return rows

    @property
    def epoch(self) -> float:
        """Number of passes over the data so far."""
        return self._epoch + self._position / self.size

    def state(self) -> dict[str, int]:
        """Return the position in the data, and the values that determine the order."""
        return {"epoch": self._epoch, "position": self._position, **self._order_values()}

    def _order_values(self) -> dict[str, int]:
        """Return the values that determine the order of rows."""
        return {"size": self.size, "seed": self.seed, "shuffle": int(self.shuffle)}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from ``state()``, with any batch size.

        Raises:
            ConfigError: The state belongs to other data or another seed.
        """
        for name, value in self._order_values().items():
            if state[name] != value:
                raise ConfigError(
                    f"sampler: {name} is {value}, the state to continue has {state[name]}: the"
                    " orders of rows differ; use the same data, prompt_length, seed and shuffle,"
                    " or start a new run"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._draw()
