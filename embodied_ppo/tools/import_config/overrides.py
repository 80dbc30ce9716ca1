"""Parse dotted command-line overrides (Hydra's ``a.b=value``) in a text or shell script."""

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
CONFIG = re.compile(r"--(config-(?:name|path|dir))(?:=(.*))?", re.DOTALL)
REFERENCE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*)|[(\d@*#?])|`")
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
