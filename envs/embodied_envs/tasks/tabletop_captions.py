"""Captions of Tabletop: expressions that refer to a block or a zone, without a goal or action."""

from __future__ import annotations

from embodied_envs.tasks.tabletop_language import COLOURS

WORDINGS = (
    "the {object}",
    "a {object}",
    "here is the {object}",
    "this is a {object}",
    "find the {object}",
    "the {object} is here",
    "show me the {object}",
    "there is a {object} on the table",
)
"""Expressions for every object. They have no word that occurs only in the held-out wordings of
``tabletop_language.FAMILIES``, so the split unseen_wording stays unseen."""


def captions() -> dict[str, tuple[str, ...]]:
    """Return the expressions of the four blocks and the four zones: body -> texts."""
    names = [f"{colour} {kind}" for kind in ("block", "zone") for colour in COLOURS]
    return {name: tuple(wording.format(object=name) for wording in WORDINGS) for name in names}
