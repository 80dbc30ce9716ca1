"""What depends on the mode alone: the function that checks its options, and required options."""

from __future__ import annotations

from embodied_ppo.core.tables import tables
from embodied_ppo.options import placement
from embodied_ppo.options.rules import embodied, reasoning

# Mode -> function that refuses combinations of options which it cannot run.
CHECKS = {"embodied": embodied.check, "reasoning": reasoning.check}
# Mode -> options without a usable default -> what to write.
REQUIRED_OPTIONS: dict[str, dict[str, str]] = tables(placement.__file__)["required_options"]
