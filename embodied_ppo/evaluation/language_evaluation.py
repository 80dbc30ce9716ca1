"""Evaluate a language model on held-out prompts, and write the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from embodied_ppo.evaluation import run_report
from embodied_ppo.evaluation.prompt_evaluation import PromptEvaluationResult, evaluate_prompts
from embodied_ppo.evaluation.run_report import ReportFiles, ReportTarget
from embodied_ppo.options.schema import Config, EvaluateConfig, EvaluationConfig
from embodied_ppo.policies import language_models
from embodied_ppo.policies.causal_lm import LanguagePolicy
from embodied_ppo.rollout.generation.sampling import Sampling
from embodied_ppo.rollout.language_inputs import Inputs
from embodied_ppo.rollout.language_rollout import ReasoningRollout
from embodied_ppo.training.logging import numbers
from embodied_ppo.training.trained_run import TrainedRun


def evaluation_sampling(
    e: EvaluationConfig | EvaluateConfig, config: Config, stops: tuple[int, ...]
) -> Sampling:
    """Return how the responses of an evaluation are sampled."""
    sampling = Sampling(
        max_tokens=config.algorithm.response_length,
        temperature=0.0 if e.deterministic else e.temperature,
        stop_ids=stops,
        stop=config.rollout.stop,
    )
    if isinstance(e, EvaluationConfig):
        return sampling
    length = e.response_length or sampling.max_tokens
    return replace(sampling, max_tokens=length, top_k=e.top_k, top_p=e.top_p)


def write_report(target: ReportTarget, result: PromptEvaluationResult) -> ReportFiles:
    """Write report.json and report.html of a prompt evaluation; return their paths."""
    shown = {"eval/return", "eval/length", "eval/truncated"}
    metrics = numbers(result.metrics())
    extra = {tag.removeprefix("eval/"): x for tag, x in metrics.items() if tag not in shown}
    samples = result.samples()
    return run_report.write_report(target, result.results(), "tokens", samples=samples, extra=extra)


def measure(m: Inputs, rollout: ReasoningRollout) -> PromptEvaluationResult:
    """Evaluate the policy of ``rollout`` on held-out prompts."""
    e = m.config.evaluation
    return evaluate_prompts(
        m.held_out[: e.episodes],
        rollout.generator,
        rollout.graders,
        rollout.text,
        evaluation_sampling(e, m.config, m.stops),
        n=e.n,
        seed=0,
    )


def restore(run: TrainedRun, tokenizer: Any, device: torch.device) -> LanguagePolicy:
    """Return the policy of a checkpoint, or of the directory of a model."""
    policy = language_models.make_policy(run.config, tokenizer, device)
    if str(run.source.path) != run.config.actor.model.path:  # else ``make_policy`` has read them
        run.load_weights(policy)
    return policy
