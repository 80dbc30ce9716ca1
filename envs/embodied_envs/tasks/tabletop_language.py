"""Sentences of Tabletop: families of tasks, their wordings and the splits for generalisation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, NamedTuple, TypeAlias, get_args

from embodied_envs.base.errors import EnvError, check_choice, check_names

Split: TypeAlias = Literal["train", "unseen_combination", "unseen_wording", "unseen_colour"]
SPLITS: tuple[str, ...] = get_args(Split)

COLOURS = ("red", "green", "blue", "yellow")
"""Colours of the four blocks and of the four zones."""
DIRECTIONS = ("left", "right", "forward", "backward")
"""Directions in the camera's view; forward is away from the camera."""


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


_SENTENCES = """
reach a
    reach the {a} block
    move to the {a} block
    go to the {a} block
    bring the gripper to the {a} block
    approach the {a} cube
    get close to the {a} block
touch z
    touch the {z} zone
    point at the {z} zone
    move down to the {z} zone
    put the gripper on the {z} zone
    reach down to the {z} circle
    tap the {z} zone
push az
    push the {a} block to the {z} zone
    slide the {a} block into the {z} zone
    push the {a} block onto the {z} zone
    shove the {a} block into the {z} zone
    nudge the {a} cube over to the {z} circle
    get the {a} block into the {z} zone by pushing it
slide ad
    push the {a} block {d}
    slide the {a} block {d}
    move the {a} block a little {d}
    shove the {a} block {d}
    nudge the {a} cube {d}
    shift the {a} block {d} a bit
lift a
    lift the {a} block
    pick up the {a} block
    raise the {a} block
    take the {a} block off the table
    hoist the {a} cube
    grab the {a} block and hold it up
carry az
    hold the {a} block over the {z} zone
    carry the {a} block above the {z} zone
    lift the {a} block over the {z} zone
    bring the {a} block up above the {z} zone
    keep the {a} cube in the air over the {z} circle
    let the {a} block hover over the {z} zone
put az
    put the {a} block in the {z} zone
    place the {a} block on the {z} zone
    pick up the {a} block and put it in the {z} zone
    set the {a} block down in the {z} zone
    drop the {a} cube off at the {z} circle
    the {a} block belongs in the {z} zone
clear az
    take the {a} block out of the {z} zone
    remove the {a} block from the {z} zone
    move the {a} block out of the {z} zone
    clear the {a} block from the {z} zone
    free the {z} circle of the {a} cube
    the {a} block should not be in the {z} zone
gather abz
    gather the {a} block and the {b} block in the {z} zone
    put the {a} and the {b} block in the {z} zone
    bring the {a} block and the {b} block to the {z} zone
    collect the {a} and {b} blocks in the {z} zone
    both the {a} cube and the {b} cube go in the {z} circle
    assemble {a} and {b} blocks in the {z} zone
sort ab
    put the {a} block and the {b} block in the zones of their colours
    sort the {a} and the {b} block into the zones of their own colours
    put the {a} block in the {a} zone and the {b} block in the {b} zone
    move the {a} and {b} blocks to the zones of the same colours
    match the {a} cube and the {b} cube with their circles
    the {a} and {b} blocks go where their colours are
stack ab
    stack the {a} block on the {b} block
    put the {a} block on top of the {b} block
    place the {a} block on the {b} block
    pick up the {a} block and set it on the {b} block
    build a tower with the {a} cube above the {b} cube
    the {a} block goes onto the {b} one
unstack ab
    take the {a} block off the {b} block
    unstack the {a} block from the {b} block
    remove the {a} block from the top of the {b} block
    put the {a} block from the {b} block down on the table
    get the {a} cube down from the {b} cube
    the {a} block on the {b} one belongs on the table
beside ab
    put the {a} block next to the {b} block
    place the {a} block beside the {b} block
    move the {a} block close to the {b} block
    bring the {a} block to the side of the {b} block
    make the {a} cube a neighbour of the {b} cube
    the {a} block should stand by the {b} one
separate ab
    separate the {a} block and the {b} block
    move the {a} block away from the {b} block
    pull the {a} and the {b} block apart
    make room between the {a} and {b} blocks
    split up the {a} cube and the {b} cube
    the {a} and the {b} block should not be neighbours
"""
"""The name and the arguments of each family; then its wordings, of which the last HELD_OUT are held
out."""
HELD_OUT = 2
SYMMETRIC = ("gather", "sort", "beside", "separate")


def _families() -> dict[str, Family]:
    """Read _SENTENCES."""
    families: dict[str, Family] = {}
    for block in re.split(r"\n(?=\w)", _SENTENCES.strip()):
        (name, arguments), *wordings = block.split()[:2], *map(str.strip, block.splitlines()[1:])
        train, held_out = tuple(wordings[:-HELD_OUT]), tuple(wordings[-HELD_OUT:])
        families[name] = Family(arguments, train, held_out, name in SYMMETRIC)
    return families


FAMILIES = _families()
"""Families by name; ``tabletop.RULES`` defines their success."""


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
        families: Names of FAMILIES in the order of the result; None: all in their order.
        split: "train": combinations and wordings that are not held out. "unseen_combination":
            held-out combinations in training's wordings. "unseen_wording": training's combinations
            in held-out wordings. "unseen_colour": combinations with ``unseen_colour`` in training's
            wordings.
        unseen_colour: One of COLOURS, which the sentences of the other splits then never name,
            neither as a block nor as a zone. Families with one argument then hold out no other
            combination. None: no colour.

    Raises:
        EnvError: The split, the colour or a family is unknown, a family is named twice, or a family
            has no episode in the split.
    """
    prefix = "env.id=Tabletop: "
    check_choice(f"{prefix}split", split, SPLITS)
    check_choice(f"{prefix}unseen_colour", unseen_colour, (None, *COLOURS))
    if split == "unseen_colour" and unseen_colour is None:
        raise EnvError(f"{prefix}split='unseen_colour' needs it; write unseen_colour=yellow")
    if isinstance(families, str) or (families is not None and not families):
        raise EnvError(f"{prefix}families={families!r} must be a list of names, or null for all")
    names = list(FAMILIES) if families is None else list(families)
    check_names(f"{prefix}families", names, FAMILIES)
    chosen: dict[Combination, tuple[str, ...]] = {}
    for name in names:
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


_GROUPS = {name: "train" if name == "unseen_wording" else name for name in SPLITS}
"""Split -> the group of its combinations."""


def _group(c: Combination, unseen_colour: str | None) -> str:
    """Return the group of a combination: train, unseen_combination or unseen_colour."""
    if unseen_colour is None:
        return "unseen_combination" if held_out(c) else "train"
    if COLOURS.index(unseen_colour) in (c.a, c.b, c.z):
        return "unseen_colour"
    is_pair = len(FAMILIES[c.family].arguments) > 1
    return "unseen_combination" if is_pair and held_out(c) else "train"
