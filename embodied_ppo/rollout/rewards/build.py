"""Construct the terms of the reward from section ``reward``."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from embodied_envs.base.errors import ConfigError
from embodied_envs.types import Say
from embodied_ppo.data import synthetic_tasks
from embodied_ppo.options.schema import RewardTermConfig
from embodied_ppo.rollout.language_inputs import Inputs
from embodied_ppo.rollout.rewards import graders, reward_model
from embodied_ppo.rollout.rewards.graders import Limits
from embodied_ppo.rollout.rewards.reward_model import RewardModel
from embodied_ppo.rollout.rewards.reward_terms import RewardTerm, RewardTerms
from embodied_ppo.rollout.rewards.worker_pool import GraderPool


def make_reward(inputs: Inputs, device: torch.device, stack: ExitStack, notice: Say) -> RewardTerms:
    """Return the terms of the reward of responses.

    Args:
        inputs: Prompts and tokenizer.
        device: Device of reward models.
        stack: Ends the processes of graders.
        notice: Called with a line where no answer can be right.

    Raises:
        ConfigError: A grader cannot be loaded, or a directory holds no reward model.
    """
    r = inputs.config.reward
    terms = r.all_terms
    # Without answers no rule can determine correctness, which metrics need.
    if r.model.path is not None and r.grader == "auto":
        if not any(p.ground_truth for p in inputs.prompts):
            notice("reward: the data has no answers; a score of at least 1 counts as correct")
            terms = terms[1:]
    reward: list[RewardTerm] = []
    for name, term in terms:
        if term.model is not None:
            option = f"reward.terms.{name}.model" if name else "reward.model.path"
            graders = _load_model(inputs, term.model, option, device)
        else:
            graders = _start_graders(inputs, name, term)
        stack.callback(graders.close)
        reward.append(RewardTerm(name, graders, term.weight))
    return RewardTerms(reward)


def _start_graders(inputs: Inputs, name: str, term: RewardTermConfig) -> GraderPool:
    """Return the grader of a term."""
    config, r = inputs.config, inputs.config.reward
    option = f"reward.terms.{name}.grader" if name else "reward.grader"
    assert term.grader is not None
    spec, workers = term.grader, r.workers
    # "auto" is the grader of the synthetic task, or the default grader of each data source.
    if spec == "auto" and config.data.task is not None:
        # Graders of synthetic tasks are fast and cannot hang, so they need no processes.
        spec, workers = partial(synthetic_tasks.grade, config.data.task), r.workers or 0
    elif spec == "auto":
        unknown = sorted({p.data_source for p in inputs.prompts} - set(graders.DEFAULTS))
        if unknown and r.model.path is None:
            raise ConfigError(
                f"{option} = auto: data_source {unknown[0]!r} has no grader of its own; name"
                f" one of {', '.join(g for g in graders.GRADERS if g != 'auto')}, module:function"
                " or FILE.py:function"
            )
        # Here a reward model gives the scores, and the grader only determines which answers are
        # correct.
        spec = "exact" if unknown else "auto"
    limits = Limits(term.timeout_s or r.timeout_s, term.retries, term.concurrency)
    return GraderPool(spec, workers=workers, limits=limits, option=option)


def _load_model(inputs: Inputs, path: str, option: str, device: torch.device) -> RewardModel:
    """Return the reward model of a term."""
    # A published reward model may have another tokenizer than the actor.
    model, tokenizer = reward_model.load(path, option=option, device=device)
    known, chat = tokenizer.get_vocab(), any(p.templated for p in inputs.prompts)
    # With another vocabulary, the actor's chat markup is plain text for the reward model.
    foreign = any(known.get(x) != i for x, i in inputs.tokenizer.get_vocab().items())
    # Special tokens that the reward model does not know are removed from responses.
    special = inputs.tokenizer.all_special_tokens if foreign else []
    unknown = [token for token in special if token not in known]
    return RewardModel(model, tokenizer, plain_text=chat and foreign, foreign_tokens=unknown)
