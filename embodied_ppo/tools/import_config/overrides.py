"""Parse dotted overrides (Hydra's ``a.b=value``) or flags (``--name value``) in a text or shell
script.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

import yaml

from embodied_ppo.options.loader import plain_yaml

COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
CONTINUED = re.compile(r"\\[ \t]*\r?\n")
OPTION = re.compile(r"(?:\+{0,2})([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
DELETED = re.compile(r"~([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=.*)?", re.DOTALL)
VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
ARRAY = re.compile(r"(?m)^[ \t]*(\w+)=\(([^()]*)\)")
ARRAY_USE = re.compile(r"\"?\$\{(\w+)\[[@*]\]\}\"?")
PROGRAM = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|deepspeed|accelerate)")
END_OF_COMMAND = ("|", "&", "&&", ";", ">", "2>&1", "--")
CONFIG = re.compile(r"--(config-(?:name|path|dir))(?:=(.*))?", re.DOTALL)
REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^{}]*))?\}|([A-Za-z_]\w*)|[(\d@*#?])|`")
"""A shell variable, or an expression that only a shell can evaluate."""


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
    try:
        tokens = shlex.split(CONTINUED.sub(" ", COMMENT.sub("", text)))
    except ValueError:  # a quote without its end
        return {}
    for token in (_expanded(token, variables) for token in tokens):
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
    """Return the flags of the Python command of a text that has the most of them, name -> value.

    A flag without a value is true, one with several is a list. Arrays of the shell are expanded
    where the command uses them; arrays that the text does not define are dropped. Quotes, variables
    and comments are those of ``parse``. A text without such a command consists of flags.

    Returns:
        The options; empty if the text has no flag.
    """
    script = CONTINUED.sub(" ", COMMENT.sub("", text))
    arrays = {match[1]: " ".join(match[2].split("\n")) for match in ARRAY.finditer(script)}
    script = ARRAY_USE.sub(lambda match: arrays.get(match[1], ""), ARRAY.sub("", script))
    lexer = shlex.shlex(script.replace("\n", " \n "), posix=True)  # a line's end is a token
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    variables: dict[str, str] = {}
    tokens: list[str] = []
    try:
        for token in (_expanded(token, variables) for token in lexer):
            tokens.append(token)
            if match := VARIABLE.fullmatch(token):
                variables[match[1]] = match[2]
    except ValueError:  # a quote without its end
        return {}
    starts = [i for i, token in enumerate(tokens) if PROGRAM.fullmatch(token)]
    ends = [tokens.index("\n", i) if "\n" in tokens[i:] else len(tokens) for i in starts]
    commands = [tokens[i:end] for i, end in zip(starts, ends, strict=True)]
    options: dict[str, list[Any]] = {}
    values: list[Any] = []
    commands = commands or [[token for token in tokens if token != "\n"]]
    for token in max(commands, key=lambda command: sum(map(bool, map(FLAG.fullmatch, command)))):
        if match := FLAG.fullmatch(token):
            options[match[1]] = values = [] if match[2] is None else [_value(match[2])]
        elif token in END_OF_COMMAND:
            values = []
        else:
            values.append(_value(token))
    return {name: x[0] if len(x) == 1 else x or True for name, x in options.items()}


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Return the text with the values of the known shell variables."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3] or "shell"
        return variables.get(name, match[2] or f"${{{name}}}")

    return REFERENCE.sub(value, text)


def _value(text: str) -> Any:
    """Return the YAML value of a text, or the text itself."""
    try:
        return plain_yaml(text) if text else ""
    except yaml.YAMLError:
        return text
