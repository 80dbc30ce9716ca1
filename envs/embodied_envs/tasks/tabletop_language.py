"""Sentences of Tabletop: families of tasks, their wordings and the splits for generalisation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from embodied_envs.base.errors import EnvError, check_choice

Split: TypeAlias = Literal["train", "unseen_combination", "unseen_wording", "unseen_colour"]
SPLITS: tuple[str, ...] = get_args(Split)

# Colours of the four blocks and of the four zones.
COLOURS = ("red", "green", "blue", "yellow")
# Directions in the camera's view; forward is away from the camera.
DIRECTIONS = ("left", "right", "forward", "backward")


@dataclass(frozen=True)
class Family:
    """One kind of task.

    Attributes:
        arguments: Arguments of the sentences: a, b blocks, z a zone, d a direction.
        train: Wordings of the splits train and unseen_combination.
        held_out: Wordings of the split unseen_wording.
        symmetric: Whether a and b are exchangeable; both orders are then held out together.
    """

    arguments: str
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    symmetric: bool = False


# Number of wordings at the end of each family in tabletop_sentences.txt that are held out.
HELD_OUT = 2
SYMMETRIC = ("gather", "sort", "beside", "separate")


def _families() -> dict[str, Family]:
    """Read tabletop_sentences.txt: name and arguments of each family, then its wordings."""
    families: dict[str, Family] = {}
    text = Path(__file__).with_name("tabletop_sentences.txt").read_text(encoding="utf-8")
    for block in re.split(r"\n(?=\w)", text.strip()):
        (name, arguments), *wordings = block.split()[:2], *map(str.strip, block.splitlines()[1:])
        train, held_out = tuple(wordings[:-HELD_OUT]), tuple(wordings[-HELD_OUT:])
        families[name] = Family(arguments, train, held_out, name in SYMMETRIC)
    return families


# Families by name; ``tabletop.RULES`` defines their success.
FAMILIES = _families()


class Combination(NamedTuple):
    """A family and its arguments: indices in COLOURS and DIRECTIONS, -1 for one it lacks."""

    family: str
    a: int
    b: int
    z: int
    d: int

    def words(self) -> dict[str, str]:
        """Return argument -> word."""
        words = {"a": COLOURS, "b": COLOURS, "z": COLOURS, "d": DIRECTIONS}
        return {name: words[name][getattr(self, name)] for name in FAMILIES[self.family].arguments}


def combinations(name: str) -> tuple[Combination, ...]:
    """Return all combinations of family ``name``, over all splits."""
    values = [range(4) if argument in FAMILIES[name].arguments else (-1,) for argument in "abzd"]
    return tuple(Combination(name, *c) for c in product(*values) if c[0] != c[1] or c[0] < 0)


def held_out(c: Combination) -> bool:
    """Return whether a combination belongs to the split unseen_combination.

    It has a quarter to a third of each family. With k the index of the family in FAMILIES, modulo
    4, held out are
    * one argument equal to k,
    * a block and a zone or a direction that differ by k,
    * two blocks that differ by 1 + k mod 3, or by 2 if they are exchangeable,
    * two blocks and a zone whose sum is k.
    Training therefore has every word of a family, in other combinations.
    """
    k, family = list(FAMILIES).index(c.family), FAMILIES[c.family]
    match family.arguments:
        case "ab":
            return (c.b - c.a) % 4 == (2 if family.symmetric else 1 + k % 3)
        case "abz":
            return (c.a + c.b + c.z - k) % 4 == 0
        case "az":
            return (c.z - c.a - k) % 4 == 0
        case "ad":
            return (c.d - c.a - k) % 4 == 0
    return (max(c.a, c.z) - k) % 4 == 0


def episodes(
    families: Sequence[str] | None, split: str, unseen_colour: str | None = None
) -> dict[Combination, tuple[str, ...]]:
    """Return combination -> sentences of a split, family by family.

    Args:
        families: Names of FAMILIES in the order of the result, each once or more often; None: all.
        split: "train": combinations and wordings that are not held out. "unseen_combination":
            held-out combinations in training's wordings. "unseen_wording": training's combinations
            in held-out wordings. "unseen_colour": combinations with ``unseen_colour`` in training's
            wordings.
        unseen_colour: One of COLOURS, which the sentences of the other splits then never name,
            neither as a block nor as a zone. Families with one argument then hold out no other
            combination. None: no colour.

    Raises:
        EnvError: The split, the colour or a family is unknown, or a family has no episode in the
            split.
    """
    prefix = "env.id=Tabletop: "
    check_choice(f"{prefix}split", split, SPLITS)
    check_choice(f"{prefix}unseen_colour", unseen_colour, (None, *COLOURS))
    if split == "unseen_colour" and unseen_colour is None:
        raise EnvError(f"{prefix}split='unseen_colour' needs it; write unseen_colour=yellow")
    if isinstance(families, str) or (families is not None and not families):
        raise EnvError(f"{prefix}families={families!r} must be a list of names, or null for all")
    names = list(FAMILIES if families is None else families)
    for name in names:
        check_choice(f"{prefix}families", name, FAMILIES)
    chosen: dict[Combination, tuple[str, ...]] = {}
    for name in dict.fromkeys(names):
        wordings = FAMILIES[name].held_out if split == "unseen_wording" else FAMILIES[name].train
        held = [c for c in combinations(name) if _group(c, unseen_colour) == _GROUPS[split]]
        if not held:
            raise EnvError(
                f"{prefix}leave {name!r} out of families: its sentences have one argument, so that"
                f" split={split!r} with unseen_colour={unseen_colour!r} has none"
            )
        for c in held:
            chosen[c] = tuple(wording.format(**c.words()) for wording in wordings)
    return chosen


# Split -> the group of its combinations.
_GROUPS = {name: "train" if name == "unseen_wording" else name for name in SPLITS}


def _group(c: Combination, unseen_colour: str | None) -> str:
    """Return the group of a combination: train, unseen_combination or unseen_colour."""
    if unseen_colour is None:
        return "unseen_combination" if held_out(c) else "train"
    if COLOURS.index(unseen_colour) in (c.a, c.b, c.z):
        return "unseen_colour"
    is_pair = len(FAMILIES[c.family].arguments) > 1
    return "unseen_combination" if is_pair and held_out(c) else "train"
