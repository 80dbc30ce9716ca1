"""Construct graders and reward models from section ``reward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from embodied_envs.base.errors import ConfigError
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.options.schema import Config
from embodied_ppo.rollout.language_inputs import Inputs
from embodied_ppo.rollout.rewards import graders, reward_model
from embodied_ppo.rollout.rewards.graders import Graders
from embodied_ppo.rollout.rewards.worker_pool import GraderPool


def make_graders(config: Config, prompts: Sequence[Prompt], stack: ExitStack) -> Graders:
    """Return the graders of reward.grader; ``stack`` ends their processes. Raises ConfigError."""
    r = config.reward
    spec, workers = r.grader, r.workers
    # "auto" is the grader of the synthetic task, or the default grader of each data source.
    if r.grader == "auto" and config.data.task is not None:
        # Graders of synthetic tasks are fast and cannot hang, so they need no processes.
        spec, workers = partial(synthetic_tasks.grade, config.data.task), r.workers or 0
    elif r.grader == "auto":
        unknown = sorted({p.data_source for p in prompts} - set(graders.DEFAULTS))
        if unknown and r.model.path is None:
            raise ConfigError(
                f"reward.grader = auto: data_source {unknown[0]!r} has no grader of its own; name"
                f" one of {', '.join(g for g in graders.GRADERS if g != 'auto')}, module:function"
                " or FILE.py:function"
            )
        # Here a reward model gives the scores, and the grader only determines which answers are
        # correct.
        spec = "exact" if unknown else "auto"
    pool = GraderPool(spec, workers=workers, timeout_s=r.timeout_s)
    stack.callback(pool.close)
    return pool


def make_reward(
    inputs: Inputs, rule: Graders, device: torch.device, notice: Callable[[str], None]
) -> Graders:
    """Return the graders or the reward model of responses.

    Args:
        inputs: Prompts and tokenizer.
        rule: The graders; they also decide whether an answer is right.
        device: Device of a reward model.
        notice: Called with a line where no answer can be right.

    Raises:
        ConfigError: The directory holds no reward model.
    """
    path = inputs.config.reward.model.path
    if path is None:
        return rule
    # A published reward model may have another tokenizer than the actor.
    model, tokenizer = reward_model.load(path, device=device)
    known, chat = tokenizer.get_vocab(), any(p.templated for p in inputs.prompts)
    # With another vocabulary, the actor's chat markup is plain text for the reward model.
    foreign = any(known.get(x) != i for x, i in inputs.tokenizer.get_vocab().items())
    # Without answers no rule can determine correctness, which metrics need.
    has_rule = inputs.config.reward.grader != "auto" or any(p.ground_truth for p in inputs.prompts)
    if not has_rule:
        notice("reward: the data has no answers; a score of at least 1 counts as correct")
    # Special tokens that the reward model does not know are removed from responses.
    special = inputs.tokenizer.all_special_tokens if foreign else []
    return reward_model.RewardModel(
        model,
        tokenizer,
        rule=rule if has_rule else None,
        plain_text=chat and foreign,
        foreign_tokens=[token for token in special if token not in known],
    )
