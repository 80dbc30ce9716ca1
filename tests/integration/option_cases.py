"""What a set of option tests consists of: pairs of values, and how to train with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from embodied_ppo.config.schema import Config, Mode

Rows = list[dict[str, float]]
"""Metrics of each update of a training run."""
Needs = dict[str, Any]
"""Options under which an option is read, set in both runs of a comparison."""


@dataclass(frozen=True)
class OptionCases:
    """The options that one mode reads, each in exactly one of the first four tables.

    Attributes:
        mode: The mode.
        base: Options of every run, dotted paths.
        sections: Prefixes of the options that need a case.
        changes: Option -> (changed value, needs); the trained weights must differ.
        reported: Option -> (changed value, needs, metric that must differ); the weights are equal.
        unchanged: Option -> (changed value, needs, reason why no number differs).
        refused: Option -> (refused value, pattern of the message).
        other_values: Option -> further (value, needs); all of them must have different outcomes.
        same_values: Option -> pairs of ``other_values`` that are equal by definition.
        lag: Option that needs off-policy experience -> rollouts between acting and learning.
        critic_options: Prefixes of the options that change the critic and not the actor.
        config: Return the checked config of some options.
        train: Return the metrics of a run with some options and a lag; runs are cached.
        repeat: As ``train`` without options, not cached.
        learned: Return sums over the weights after training: of the actor, then of the critic.
        outcome: Return what ``other_values`` compares.
    """

    mode: Mode
    base: Mapping[str, Any]
    sections: tuple[str, ...]
    changes: Mapping[str, tuple[Any, Needs]]
    reported: Mapping[str, tuple[Any, Needs, str]]
    unchanged: Mapping[str, tuple[Any, Needs, str]]
    refused: Mapping[str, tuple[Any, str]]
    other_values: Mapping[str, list[tuple[Any, Needs]]]
    config: Callable[[dict[str, Any]], Config]
    train: Callable[[dict[str, Any], int], Rows]
    repeat: Callable[[], Rows]
    learned: Callable[[Rows], tuple[float, ...]]
    outcome: Callable[[Rows], tuple[Any, ...]]
    same_values: Mapping[str, list[tuple[str, str]]] = field(default_factory=dict)
    lag: Mapping[str, int] = field(default_factory=dict)
    critic_options: tuple[str, ...] = ()
