"""The table of modes: the name that option mode selects -> the mode's rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from embodied_ppo.options.rules import embodied, reasoning
from embodied_ppo.options.schema import Config


@dataclass(frozen=True)
class ModeRules:
    """What a mode decides about options.

    Attributes:
        check: Refuses combinations of options that the mode cannot run.
        policy_name: What the mode trains, in messages.
        required_options: Options without a usable default -> what to write.
        default_experiment: Experiment of ``train mode=MODE``; None: use configs/train.yaml.
        experiment_sections: Prefixes of options that, given on the command line, replace the
            default experiment.
        group_overrides: Config group -> member that an experiment of the mode selects in its
            defaults list.
    """

    check: Callable[[Config], None]
    policy_name: str
    required_options: Mapping[str, str]
    default_experiment: str | None = None
    experiment_sections: tuple[str, ...] = ()
    group_overrides: Mapping[str, str | None] = field(default_factory=dict)


RULES: dict[str, ModeRules] = {
    "embodied": ModeRules(embodied.check, "robot policy", {"env.id": "the task: docs/tasks.md"}),
    "reasoning": ModeRules(
        reasoning.check,
        "language model",
        {
            "actor.model.path": "a directory that transformers wrote",
            "data.train": "[FILE.jsonl] with prompts and answers",
            "data.eval": "[FILE.jsonl] with held-out prompts",
            "updates": "how long to train",
        },
        default_experiment="arithmetic",
        experiment_sections=("actor.", "data."),
        group_overrides={"mode": "reasoning", "model": None},
    ),
}


def rules_of(mode: str) -> ModeRules:
    """Return the rules of a mode, one of ``schema.Mode``."""
    return RULES[mode]
