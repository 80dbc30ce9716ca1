"""Construct graders and reward models from section ``reward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from embodied_envs.base.errors import ConfigError
from embodied_envs.base.random import sampling_key
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.data.prompts import Prompt
from embodied_ppo.options.schema import Config
from embodied_ppo.rollout.language_inputs import Inputs
from embodied_ppo.rollout.rewards import graders, reward_model
from embodied_ppo.rollout.rewards.graders import Graders, WithFormat
from embodied_ppo.rollout.rewards.worker_pool import GraderPool

FORMAT_WEIGHT = 0.1
"""Bonus added to the score of a response that matches reward.format."""
REWARD_MODEL_LR = 5e-4
"""Learning rate of a reward model that is trained on preferences before PPO."""


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
    return _pool(config, spec, workers, stack)


def _pool(config: Config, spec: Any, workers: int | None, stack: ExitStack) -> GraderPool:
    """Return a pool with the limits of ``reward``, which ``stack`` closes."""
    pool = GraderPool(spec, workers=workers, timeout_s=config.reward.timeout_s)
    stack.callback(pool.close)
    return pool


def make_reward(
    m: Inputs,
    rule: Graders,
    device: torch.device,
    notice: Callable[[str], None],
    stack: ExitStack,
    *,
    train_model: bool = True,
) -> Graders:
    """Return the graders or the reward model of responses, with the reward for their format.

    Args:
        m: Prompts and tokenizer; the policy initialises a reward model that is trained here.
        rule: The graders; they also decide whether an answer is right.
        notice: Called with a line about the training of a reward model.
        stack: Ends the process that checks the format.
        train_model: Whether a reward model is trained here if the options ask for one, instead of
            using ``rule``.

    Raises:
        ConfigError: The directory holds no reward model.
    """
    r = m.config.reward
    scores = _scores(m, rule, device, notice, train_model)
    if r.format is None:
        return scores
    # A regular expression of the user may take exponential time, so it runs in its own process.
    has_format = _pool(m.config, partial(graders.has_format, pattern=r.format), 1, stack)
    return WithFormat(scores, has_format, FORMAT_WEIGHT)


def _scores(
    inputs: Inputs,
    rule: Graders,
    device: torch.device,
    notice: Callable[[str], None],
    train_model: bool,
) -> Graders:
    """Return the graders or the reward model of responses; see ``make_reward``."""
    config, policy = inputs.config, inputs.policy
    m = config.reward.model
    if m.path is not None:
        # A published reward model may have another tokenizer than the actor.
        model, tokenizer = reward_model.load(m.path, device=device)
        known, chat = tokenizer.get_vocab(), any(p.templated for p in inputs.prompts)
        # With another vocabulary, the actor's chat markup is plain text for the reward model.
        foreign = any(known.get(x) != i for x, i in inputs.tokenizer.get_vocab().items())
        # Without answers no rule can determine correctness, which metrics need.
        has_rule = config.reward.grader != "auto" or any(p.ground_truth for p in inputs.prompts)
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
    # Checkpoints do not contain the reward model that a run trains for itself.
    if not m.pairs or not train_model:
        if m.pairs:
            notice("reward: the run's own reward model is not kept; scores are the rule's")
        return rule
    # Train a reward model on preferences of the synthetic task, from the actor's weights.
    assert config.data.task is not None
    task, tokenizer = synthetic_tasks.TASKS[config.data.task], synthetic_tasks.tokenizer()
    model = reward_model.new(policy.model.config.to_diff_dict(), device=device)
    model.base_model.load_state_dict(policy.model.base_model.state_dict())
    pairs = synthetic_tasks.preferences(
        task, task.problems("train"), m.pairs, seed=sampling_key(config.seed, "preferences") % 2**32
    )
    notice(f"reward model: learns from {m.pairs:,} preferences of task {task.name}")
    metrics = reward_model.train(
        model,
        tokenizer,
        pairs,
        steps=m.steps,
        batch_size=m.batch_size,
        lr=REWARD_MODEL_LR,
        seed=sampling_key(config.seed, "reward model"),
    )
    accuracy, loss = 100 * metrics["accuracy"], metrics["loss"]
    notice(f"reward model: {accuracy:.1f} % of held-out preferences right, loss {loss:.3f}")
    return reward_model.RewardModel(model, tokenizer, rule=rule)
