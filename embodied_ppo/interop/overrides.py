"""Parse dotted command-line overrides (Hydra's ``a.b=value``) in a text or shell script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from embodied_ppo.config.loader import plain_yaml

SPACE = re.compile(r"(?:\s|\\[ \t]*\r?\n|#[^\n]*)+")
"""Separator of tokens: blanks, continued lines and comments. A comment is not continued."""
PIECE = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)|([^\s'\"\\]+)|(['\"\\])", re.DOTALL)
"""A part of a token: single-quoted, double-quoted, escaped character, bare, or unpaired quote."""
OPTION = re.compile(r"(?:\+{0,2})([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
DELETED = re.compile(r"~([A-Za-z_][\w-]*(?:\.[\w-]+)+)(?:=.*)?", re.DOTALL)
VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
CONFIG = re.compile(r"--(config-(?:name|path|dir))(?:=(.*))?", re.DOTALL)
REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*)|[(\d@*#?])|`")
"""A shell variable, or an expression that only a shell can evaluate."""


def parse(text: str) -> dict[str, Any]:
    """Return every override of a text, path -> value; the last one of a path applies.

    Quotes follow the shell, values are plain YAML. ``NAME=value`` before the first override sets
    ``$NAME``. A variable that the text does not set becomes ``${NAME}``, and ``$(..)`` starts with
    ``${shell}``; the importer reports both as unresolved. After the first override an option
    without a dot (``actor=megatron``) is kept under its name. ``+`` and ``++`` before a path are
    dropped, ``~path`` is null. Nothing is run.

    Returns:
        The options; empty if the text has no override.
    """
    options: dict[str, Any] = {}
    variables: dict[str, str] = {}
    for token in _tokens(text, variables):
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


def _tokens(text: str, variables: dict[str, str]) -> Iterator[str]:
    """Yield the tokens of a shell script; ``variables`` may grow between two tokens."""
    position = 0
    while position < len(text):
        if blank := SPACE.match(text, position):
            position = blank.end()
            continue
        token = ""
        while position < len(text) and (piece := PIECE.match(text, position)):
            if piece[3] == "\n":  # a continued line ends the token, too
                break
            single, double, escaped, bare, lone = piece.groups()
            if single is not None:
                token += single
            elif double is not None:
                token += _expanded(re.sub(r'\\(["\\$`])', r"\1", double), variables)
            elif bare is not None:
                token += _expanded(bare, variables)
            else:
                token += escaped or lone
            position = piece.end()
        yield token


def _expanded(text: str, variables: dict[str, str]) -> str:
    """Return the text with the values of the known shell variables."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2] or "shell"
        return variables.get(name, f"${{{name}}}")

    return REFERENCE.sub(value, text)


def _value(text: str) -> Any:
    """Return the YAML value of a text, or the text itself."""
    try:
        return plain_yaml(text) if text else ""
    except yaml.YAMLError:
        return text
