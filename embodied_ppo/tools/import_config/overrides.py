"""Parse dotted overrides (Hydra's ``a.b=value``) or flags (``--name value``) in a text or shell
script.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import yaml

from embodied_ppo.options.loader import plain_yaml

COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
CONTINUED = re.compile(r"\\[ \t]*\r?\n")
OPTION = re.compile(r"(?:\+{0,2})([A-Za-z_][\w-]*(?:[./@][\w-]+)+)=(.*)", re.DOTALL)
DELETED = re.compile(r"~([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=.*)?", re.DOTALL)
VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
ARRAY = re.compile(r"(?m)^[ \t]*(\w+)(\+?)=\(([^()]*)\)")
ARRAY_USE = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
# A token that begins a command or ends one.
PROGRAM = re.compile(
    r"(?:.*/)?(?:python[\d.]*|torchrun|deepspeed|accelerate|ray|pkill)|[|&;>]+|2>&1|--"
)
CONFIG = re.compile(r"--(config-(?:name|path|dir))(?:=(.*))?", re.DOTALL)
# A shell variable, or an expression that only a shell can evaluate.
REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^{}]*))?\}|([A-Za-z_]\w*)|[(\d@*#?])|`")


def parse(text: str) -> dict[str, Any]:
    """Return every override of a text, path -> value; the last one of a path applies.

    Quotes follow the shell, values are plain YAML, and a comment is not continued. ``NAME=value``
    before the first override sets ``$NAME``. A variable that the text does not set becomes
    ``${NAME}``, and ``$(..)`` starts with ``${shell}``; the importer reports both as unresolved.
    After the first override an option without a dot (``actor=megatron``) is kept under its name.
    ``+`` and ``++`` before a path are dropped, ``~path`` is null. Nothing is run.

    Returns:
        The options; empty if the text has no override.
    """
    options: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for token in _tokens(CONTINUED.sub(" ", COMMENT.sub("", text)), variables):
        if match := CONFIG.fullmatch(token):
            options[f"hydra.{match[1]}"] = match[2]
        elif match := OPTION.fullmatch(token):
            options[match[1]] = _value(match[2])
        elif match := DELETED.fullmatch(token):
            options[match[1]] = None
        elif match := VARIABLE.fullmatch(token):
            if any("hydra." not in path for path in options):
                options[match[1]] = _value(match[2])
            else:
                variables[match[1]] = match[2]
    return options if any("." in path and not path.startswith("hydra.") for path in options) else {}


def parse_flags(text: str) -> dict[str, Any]:
    """Return the flags of the command with most of them, or of a text without a known program.

    A flag without a value is true, one with several is a list. Arrays of the shell are expanded
    where they are used; arrays that the text does not define are dropped. Quotes, variables and
    comments are those of ``parse``.

    Returns:
        Name -> value; empty if the text has no flag.
    """
    script = CONTINUED.sub(" ", COMMENT.sub("", text))
    arrays: dict[str, str] = {}
    for name, appends, words in ARRAY.findall(script):
        arrays[name] = f"{arrays.get(name, '')}\n{words}" if appends else words
    script = ARRAY_USE.sub(lambda match: arrays.get(match[1], ""), ARRAY.sub("", script))
    variables: dict[str, str] = {}
    commands: list[dict[str, list[Any]]] = [{}]  # the first one: before any program
    values: list[Any] = []
    for token in _tokens(script, variables):
        if match := VARIABLE.fullmatch(token):
            variables[match[1]] = match[2]
        elif PROGRAM.fullmatch(token):
            commands.append({})
            values = []
        elif match := FLAG.fullmatch(token):
            commands[-1][match[1]] = values = [] if match[2] is None else [_value(match[2])]
        else:
            values.append(_value(token))
    options = max(commands[1:] or commands, key=len)
    return {name: x[0] if len(x) == 1 else x or True for name, x in options.items()}


def _tokens(script: str, variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the words of a script with the values of the shell variables that are known by then.

    There are none if a quote has no end.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3] or "shell"
        return variables.get(name, match[2] or f"${{{name}}}")

    with suppress(ValueError):  # of ``split``
        for token in shlex.split(script):
            text = REFERENCE.sub(value, token)
            yield text.removesuffix(";") or text
            if text != ";" and text.endswith(";"):  # the end of a command
                yield ";"


def _value(text: str) -> Any:
    """Return the YAML value of a text, or the text itself."""
    try:
        return plain_yaml(text) if text else ""
    except yaml.YAMLError:
        return text
