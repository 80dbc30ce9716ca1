"""What depends on the mode alone: the function that checks its options, and required options."""

from __future__ import annotations

from embodied_ppo.options.rules import embodied, reasoning

# Mode -> function that refuses combinations of options which it cannot run.
CHECKS = {"embodied": embodied.check, "reasoning": reasoning.check}
# Mode -> options without a usable default -> what to write.
REQUIRED_OPTIONS = {
    "embodied": {"env.id": "the task: docs/tasks.md"},
    "reasoning": {
        "actor.model.path": "a directory that transformers wrote",
        "data.train": "[FILE.jsonl] with prompts and answers",
        "data.eval": "[FILE.jsonl] with held-out prompts",
        "updates": "how long to train",
    },
}
