"""Rows of data files with prompts: layouts of other trainers, checked and converted."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from embodied_envs.base.errors import ConfigError, choose, shorten
from embodied_ppo.data import parquet

# Keys of a row that may hold the prompt, in order of preference.
PROMPT_KEYS = ("messages", "prompt", "question", "problem", "conversations")
PROMPT_KEYS += ("instruction", "input", "query")


# Keys that may hold the answer, in order; ``reward_model`` (verl) has a key ``ground_truth``.
ANSWER_KEYS = ("reward_model", "ground_truth", "answer", "label", "completion")
ANSWER_KEYS += ("output", "response", "solution")


UNREAD_KEYS = ("image", "images", "video", "videos", "audio", "audios")
# Keys of a row whose contents are not read: media, which no language model of this package reads,
# and texts before the prompt, whose layouts differ among trainers.
UNREAD_KEYS += ("system", "history", "tools")


# Role in ShareGPT's layout -> role in a chat template; other roles keep their names.
ROLES = {"human": "user", "gpt": "assistant"}


# Text that verl adds to every question of GSM8K.
GSM8K_SUFFIX = ' Let\'s think step by step and output the final answer after "####".'


# Files and directories; a mapping has the weight of the rows of each.
Paths: TypeAlias = "str | Path | Sequence[str | Path] | Mapping[str, float]"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a data file.

    Attributes:
        prompt: Text, or messages {role, content}.
        ground_truth: Correct answer; empty if the row has none.
        data_source: Name of the data source.
        extra: verl's ``extra_info``.
        suffix: Text that the file's layout adds to the prompt by default.
        location: File and line (from 1) or row (from 0), for messages.
        response: The complete text of which ``ground_truth`` may be a part; empty for verl, whose
            rows have no more than the answer.
        weight: Weight of the file.
    """

    prompt: str | list[dict[str, str]]
    ground_truth: str
    data_source: str
    extra: dict[str, Any]
    suffix: str
    location: str
    response: str
    weight: float = 1.0


def files_of(paths: Paths) -> list[Path]:
    """Return all files, with directories replaced by the data files in them.

    Raises:
        ConfigError: A path does not exist or holds no data.
    """
    files: list[Path] = []
    for path in [Path(paths)] if isinstance(paths, (str, Path)) else [Path(p) for p in paths]:
        path = path.expanduser()
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            inside = sorted(p for pattern in ("*.jsonl", "*.parquet") for p in path.glob(pattern))
            if not inside:
                hint = "name another directory or a file"
                raise ConfigError(f"{path}: a directory without *.jsonl and *.parquet; {hint}")
            files += inside
        else:
            names = sorted(p.name for p in path.parent.glob("*.*"))
            hint = choose(path.name, names[:20], "in its folder: ")
            raise ConfigError(f"{path}: is neither a file nor a directory; {hint}")
    if not files:
        hint = "name .jsonl, .json or .parquet files, or a directory of them"
        raise ConfigError(f"no data file is named; {hint}")
    return files


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and the value of each row.

    A file that is not parquet contains JSON lines or a JSON array, whatever its suffix is.
    """
    if path.suffix == ".parquet":
        yield from ((f"{path} row {i}", row) for i, row in enumerate(parquet.read_rows(path)))
        return
    with parquet.reading(f"{path} (must be UTF-8 text)"):
        text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        with parquet.reading(f"{path} (a JSON array)"):
            items = json.loads(text)
        yield from ((f"{path} row {i}", item) for i, item in enumerate(items))
        return
    # splitlines would also split at U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            with parquet.reading(f"{path}:{number}: {line[:60]!r} is no JSON object in one line;"):
                item = json.loads(line)
            yield f"{path}:{number}", item


def read_rows(
    paths: Paths,
    *,
    prompt_key: str | None = None,
    answer_key: str | None = None,
    needs_answer: bool = True,
) -> list[Row]:
    """Read all rows of JSON lines, JSON arrays and parquet files, in the order of ``paths``.

    The files of a directory are read in sorted order. The keys of a row determine its layout,
    which must be that of all rows of its file:
      plain     {prompt: text or messages, ground_truth or answer}; other keys go to ``extra``
      verl      {data_source, prompt: messages, reward_model: {ground_truth}, extra_info}
      GSM8K     {question, answer}, the correct answer after ``####``, without commas; a file has
                this layout if its first row has it
      ROLL      {messages: messages or their JSON text, ground_truth}
      TRL       {prompt, completion}, both texts or messages; the completion is the answer
      OpenRLHF  {input, label or output}
      Alpaca    {instruction, input, output}; the input follows the instruction
      ShareGPT  {conversations: [{from, value}, ..]}

    Messages are {role, content}, with a text or a list of parts {type: text, text}. If they end
    with the assistant's under ``messages`` or ``conversations``, that message is the response, and
    the answer if the row has no other. The ``data_source`` of rows without one is "openai/gsm8k"
    (GSM8K) or the name of the file.

    Args:
        paths: Files and directories, see ``Paths``.
        prompt_key: Key of the prompt, None: detected.
        answer_key: Key of the correct answer, None: detected.
        needs_answer: Whether a row without an answer is an error; otherwise its answer is empty.

    Raises:
        ConfigError: A file or a row cannot be read.
    """
    rows: list[Row] = []
    parts = paths.items() if isinstance(paths, Mapping) else [(paths, 1.0)]
    for path, weight in [(file, w) for part, w in parts for file in files_of(part)]:
        before, keys, gsm8k = len(rows), (prompt_key, answer_key), False
        for location, item in _items(path):
            if not isinstance(item, dict):
                hint = "write {'prompt': .., 'ground_truth': ..}"
                raise ConfigError(f"{location}: {brief(item)} is no object; {hint}")
            # All rows of a file have the keys of the first one; others could hold something else.
            found = _first_key(item, PROMPT_KEYS), _first_key(item, ANSWER_KEYS)
            keys = (keys[0] or found[0], keys[1] or found[1])
            if len(rows) == before and answer_key is None and keys == ("question", "answer"):
                gsm8k = "####" in str(item["answer"])
            row = _row(item, location, path.stem, keys, gsm8k, needs_answer)
            rows.append(row if weight == 1 else replace(row, weight=weight))
        if len(rows) == before:
            raise ConfigError(f"{path}: holds no rows; remove it, or fill it")
    return rows


def brief(value: Any) -> str:
    """Format a value in at most 60 characters."""
    return shorten(repr(value), 60)


def _first_key(item: Mapping[str, Any], known: Sequence[str]) -> str | None:
    """Return the first known key whose value is not null."""
    return next((k for k in known if item.get(k) is not None), None)


def _value(item: Mapping[str, Any], location: str, option: str, key: str | None) -> Any:
    """Return the value of ``key``, which must not be null."""
    if key is None or item.get(key) is None:
        hint = choose(key or "", [name for name in item if name != key], "its other keys: ")
        problem = f"has no {option} = {key}" if key else f"has no known {option}"
        name = f"name one with {option}=KEY"
        raise ConfigError(f"{location}: {problem} (or it is null); {name}; {hint}")
    return item[key]


def _row(
    item: dict[str, Any],
    location: str,
    name: str,
    keys: tuple[str | None, str | None],
    gsm8k: bool,
    needs_answer: bool,
) -> Row:
    """Convert and check one row of the file ``name``, with prompt and answer under ``keys``."""
    if unread := [key for key in UNREAD_KEYS if item.get(key)]:
        raise ConfigError(
            f"{location}: {unread[0]} = {brief(item[unread[0]])} is not read, and may belong to the"
            " prompt; write it as one of the messages, or rename the column"
        )
    key, answer_key = keys
    prompt: Any = _prompt(_value(item, location, "prompt_key", key), f"{location}: {key}")
    used = {key, answer_key, "data_source", "extra_info"}
    if key == "instruction" and item.get("input"):
        prompt, used = f"{prompt}\n\n{item['input']}", used | {"input"}
    value: Any = item.get(answer_key or "")
    response = ""
    is_chat = key in ("messages", "conversations") and isinstance(prompt, list)
    if is_chat and (last := prompt[-1])["role"] == "assistant":
        # The conversation ends with its answer.
        prompt = _prompt(prompt[:-1], f"{location}: {key} before the answer")
        response = last["content"]
        value = response if value is None else value
    if value is None and needs_answer:
        value = _value(item, location, "answer_key", answer_key)
    truth = _answer(value, f"{location}: {answer_key}", answer_key, needs_answer)
    response = response or ("" if answer_key == "reward_model" else truth)
    if gsm8k:
        _, marker, truth = truth.rpartition("####")
        truth = truth.strip().replace(",", "")
        if not marker or not truth:
            raise ConfigError(
                f"{location}: answer = {brief(value)} has no answer after '####', unlike the first"
                " row; fix it, or use the full text with answer_key=answer"
            )
    extra = item.get("extra_info")
    if extra is None:
        extra = {k: v for k, v in item.items() if k not in used}
    if not isinstance(extra, dict):
        raise ConfigError(f"{location}: extra_info = {brief(extra)} must be an object")
    source = item.get("data_source") or ("openai/gsm8k" if gsm8k else name)
    return Row(prompt, truth, str(source), extra, GSM8K_SUFFIX if gsm8k else "", location, response)


def _answer(truth: Any, label: str, key: str | None, needs_answer: bool) -> str:
    """Check and return the correct answer, the value of ``key``."""
    if key == "reward_model":
        truth = truth.get("ground_truth") if isinstance(truth, dict) else None
        label = f"{label}.ground_truth"
    if key == "completion" and isinstance(truth, list):
        truth = "\n".join(m["content"] for m in _messages_of(truth, label))
    # Tables store a missing number as NaN, and a missing text as an empty one.
    if truth is None or truth != truth or (isinstance(truth, str) and not truth.strip()):
        if needs_answer:
            raise ConfigError(f"{label} = {brief(truth)} is no answer; write one, or remove it")
        return ""
    if not isinstance(truth, (str, int, float)) or isinstance(truth, bool) or truth == math.inf:
        raise ConfigError(f"{label} = {brief(truth)} must be a text or a number")
    if isinstance(truth, float):  # also integers of a column with nulls; without exponent (1e-05)
        truth = format(Decimal(repr(truth)), "f").removesuffix(".0")
    return str(truth)


def _prompt(value: Any, location: str) -> Any:
    """Check and return a text or messages, which may be written as JSON."""
    if isinstance(value, str) and re.match(r"\s*\[\s*\{", value):
        with suppress(ValueError, RecursionError):  # a text that only starts like JSON
            decoded = json.loads(value)
            is_chat = all(isinstance(m, dict) and {"role", "from"} & {*m} for m in decoded)
            value = decoded if is_chat else value
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list) or not value:
        expected = "a text or messages [{'role': .., 'content': ..}]"
        raise ConfigError(f"{location} = {brief(value)} must be {expected}")
    return _messages_of(value, location)


def _messages_of(value: Sequence[Any], location: str) -> list[dict[str, str]]:
    """Check messages and return their roles and texts."""
    messages = []
    for i, message in enumerate(value):
        m: Any = message if isinstance(message, dict) else {}
        role, content = m.get("role", m.get("from")), m.get("content", m.get("value"))
        if isinstance(content, list) and content:
            parts = [x.get("text") if isinstance(x, dict) else x for x in content]
            is_text = all(isinstance(x, str) for x in parts)
            content = "".join(map(str, parts)) if is_text else None
        calls = m.get("tool_calls") or m.get("function_call")
        if calls or not isinstance(role, str) or not isinstance(content, str):
            raise ConfigError(
                f"{location}[{i}] = {brief(message)} must have texts under 'role' and 'content';"
                " other contents, such as images and calls of tools, are not supported"
            )
        messages.append({"role": ROLES.get(role, role), "content": content})
    return messages
