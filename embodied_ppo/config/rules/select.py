"""The table of modes: the name that option mode selects -> the mode's rules."""

from __future__ import annotations

from embodied_ppo.config.rules.base import ModeRules
from embodied_ppo.config.rules.embodied import EmbodiedRules
from embodied_ppo.config.rules.reasoning import ReasoningRules

RULES: dict[str, ModeRules] = {rules.mode: rules for rules in (EmbodiedRules(), ReasoningRules())}


def rules_of(mode: str) -> ModeRules:
    """Return the rules of a mode, one of ``schema.Mode``."""
    return RULES[mode]
