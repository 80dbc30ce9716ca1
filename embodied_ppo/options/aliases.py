"""Names of options in other trainers: accepted as aliases, or refused with a hint.

Aliases are the names in the documented PPO options of RLinf, verl and ROLL. ``import-config``
translates whole files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_suffix(".yaml")
_TABLES: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
# Section -> alias -> canonical names. An alias is accepted wherever its canonical name is.
ALIASES: dict[str, dict[str, tuple[str, ...]]] = {
    section: {alias: tuple(names.split()) for alias, names in table.items()}
    for section, table in _TABLES["aliases"].items()
}
VALUE_ALIASES: dict[str, dict[str, str]] = _TABLES["values"]
# Options of other trainers that have no meaning here: path -> reason and hint.
REFUSED: dict[str, str] = dict.fromkeys(
    (f"rollout.{name}" for name in ("top_k", "top_p", "min_p", "repetition_penalty")),
    "training on filtered samples would learn from another distribution than the one sampled; for"
    " evaluation, embodied-ppo evaluate has top_k and top_p",
)
# Names of CleanRL, rsl_rl and TRL, in any section -> the option that messages name.
SIMILAR: dict[str, str] = _TABLES["similar"]
