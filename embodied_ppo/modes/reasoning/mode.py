"""mode=reasoning: language models, with a separate critic, graded responses and a decode engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.algorithms.separate_critic_learner import full_kl
from embodied_ppo.config import placement, validation
from embodied_ppo.config.batch_sizes import batches
from embodied_ppo.config.schema import Config, EvaluateConfig
from embodied_ppo.core.types import CheckpointError, PlacementError, ProgressCallback
from embodied_ppo.evaluation.prompts import PromptEvaluationResult, evaluate_prompts
from embodied_ppo.models import causal_lm
from embodied_ppo.models.causal_lm import LanguagePolicy
from embodied_ppo.models.checkpoint_files import copy_permissions
from embodied_ppo.modes.base import (
    Evaluator,
    MemoryEstimator,
    Mode,
    RunRequest,
    TrainedRun,
    report_write_errors,
)
from embodied_ppo.modes.reasoning import components, cost_model
from embodied_ppo.modes.reasoning.memory import ReasoningMemoryEstimator
from embodied_ppo.modes.reasoning.profile import profile
from embodied_ppo.modes.reasoning.workers import build_worker
from embodied_ppo.placement.channels import Exchange
from embodied_ppo.placement.cost_model import Choice, Machine
from embodied_ppo.placement.worker import Worker, WorkerSpec
from embodied_ppo.rollout.generation.engine import Engine
from embodied_ppo.rollout.language import response_decoder
from embodied_ppo.training.logging import numbers


class ReasoningMode(Mode):
    """Train a language model: roles rollout, actor, critic, reference and reward."""

    name = "reasoning"
    unit = "tokens"
    score_metric = "eval/accuracy"
    success_metric = "eval/accuracy"
    budget_options = "updates="
    cloning_error = (
        "mode = reasoning: clone is for robot policies; a language model is warmed up by train, see"
        " warm_start.steps"
    )
    profiles_trained_policy = True  # it has learned when to end a response

    # ------------------------------------------------------------------------------------ placement
    def check_plan(self, config: Config, plan: placement.Plan) -> None:
        a = config.algorithm
        placement.check_group_filter(plan, a.group_filter)
        prompts = {"algorithm.global_batch_size": a.global_batch_size}
        if plan.has("critic"):
            critic_options = components.critic_config(a, config.critic)
            prompts["critic.global_batch_size"] = critic_options.global_batch_size
        placement.check_sequences(
            plan,
            prompts=a.rollout_batch_size,
            group_size=a.group_size,
            batches={option: count * a.group_size for option, count in prompts.items()},
        )
        if full_kl(a) and plan.has("reference") and not plan.fused("actor", "reference"):
            raise PlacementError(
                "cluster.component_placement: the full KL divergence needs the reference's logits,"
                " which are not sent between processes; join them, as 'actor,reference', or write"
                " algorithm.kl_loss_type=k3 and algorithm.kl_penalty=k1"
            )
        if (
            config.rollout.engine == "vllm"
            and plan.group("rollout").processes > plan.hardware.total
        ):
            raise PlacementError(
                "rollout.engine = vllm: one process on a device; leave out processes"
            )

    def shard_obstacle(self, config: Config, plan: placement.Plan) -> str:
        if reason := super().shard_obstacle(config, plan):
            return reason
        for role in ("critic", "reference"):
            if plan.has(role) and not plan.fused("actor", role):
                return (
                    f"{role} is in processes of its own; join them, as 'actor,{role}', or write"
                    " cluster.shard=false"
                )
        if config.critic.concurrent:
            return (
                "actor and critic gather their layers one after another; write"
                " critic.concurrent=false"
            )
        if full_kl(config.algorithm):
            return (
                "the full KL divergence reads policy and reference at once; use k3"
                " (algorithm.kl_loss_type, kl_penalty)"
            )
        if config.rollout.engine == "vllm" and plan.fused("rollout", "actor"):
            return (
                "vLLM has weights of its own; give rollout its own processes"
                " (placement=disaggregated)"
            )
        return ""

    def facts(self, config: Config, plan: placement.Plan) -> dict[str, int]:
        a, b = config.algorithm, batches(config)
        responses = b.actor.size * a.group_size // plan.processes("actor")
        return {
            "prompts per rollout process": a.rollout_batch_size // plan.processes("rollout"),
            "responses per update": b.samples,
            "optimiser steps per update": b.actor.steps,
            "responses per optimiser step and actor process": responses,
        }

    def max_learners(self, config: Config) -> int:
        return config.algorithm.rollout_batch_size

    # --------------------------------------------------------------------------------------- memory
    def can_estimate(self, config: Config, *, in_process: bool = False) -> bool:
        return config.actor.model.path is None  # an estimate would load its weights

    def memory_estimator(self, config: Config) -> MemoryEstimator:
        return ReasoningMemoryEstimator(config)

    def minibatch_samples(self, config: Config) -> int:
        b = batches(config)
        prompts = max(parts.size for parts in (b.actor, b.critic) if parts is not None)
        return prompts * config.algorithm.group_size

    # ---------------------------------------------------------------------------------------- build
    def title(self, config: Config, size: int | None = None) -> str:
        name = config.data.task or Path(config.actor.model.path or "a new model").name
        return name if size is None else f"{name}, {size / 1e6:.1f} M parameters"

    def horizon(self, config: Config) -> int:
        return config.algorithm.response_length

    def samples(self, result: PromptEvaluationResult) -> list[dict[str, Any]]:
        return result.samples()

    def check_files(self, config: Config) -> None:
        components.check_files(config)

    def build_worker(
        self, request: RunRequest, spec: WorkerSpec, exchange: Exchange | None, stack: ExitStack
    ) -> tuple[Worker, Mapping[str, Any]]:
        return build_worker(request, spec, exchange, stack)

    # ---------------------------------------------------------------------------------- checkpoints
    def evaluator(
        self, run: TrainedRun, options: EvaluateConfig, device: torch.device
    ) -> Evaluator:
        config = run.config
        policy, tokenizer = self._restore(run, device)
        if options.data:
            prompts = components.read_files(
                config, options.data, tokenizer, lambda line: None, "data"
            )
        else:
            prompts = components.read_prompts(config, tokenizer, lambda line: None)[1]
        sampling = components.evaluation_sampling(
            options, config, components.stop_ids(config, policy, tokenizer)
        )
        selected = prompts[: options.episodes]
        longest = components.check_length(policy, selected, sampling.max_tokens)
        m = components.Inputs(config, tokenizer, [], prompts, policy, sampling.stop_ids, longest)

        def evaluate(out: Path, advance: ProgressCallback) -> dict[str, Any]:
            with ExitStack() as stack:
                rule = components.make_graders(config, prompts, stack)
                engine = Engine(
                    policy,
                    slots=components.slots(config),
                    pad_id=m.padding,
                    decode=m.decode,
                    progress=functools.partial(advance, "responses"),
                )
                result = evaluate_prompts(
                    selected,
                    engine,
                    components.make_reward(config, rule, None, device, run.say),
                    response_decoder(m.decode, sampling.stop),
                    sampling,
                    n=options.n,
                    seed=options.seed,
                )
            files = components.write_report(
                config,
                result,
                source=run.source,
                run_dir=run.run_dir,
                out=out,
                options=options,
            )
            return {**numbers(result.metrics()), **files}

        return evaluate

    def write_model(self, run: TrainedRun, out: Path, *, adapter: bool = False) -> dict[str, Any]:
        policy, tokenizer = self._restore(run, torch.device("cpu"))
        with report_write_errors(out):
            policy.model.save_pretrained(out)
            tokenizer.save_pretrained(out)
            copy_permissions(out)
        exported = causal_lm.load(str(out), {}, section="out")
        ids = torch.arange(8).unsqueeze(0) % policy.model.get_input_embeddings().num_embeddings
        with torch.no_grad():
            logits = exported(input_ids=ids).logits
            difference = float((logits - policy.model(input_ids=ids).logits).abs().max())
        if difference:
            raise CheckpointError(
                f"out={out}: read back, logits differ by {difference:g}; report this"
            )
        return {"logit_difference": difference}

    @staticmethod
    def _restore(run: TrainedRun, device: torch.device) -> tuple[LanguagePolicy, Any]:
        """Return the policy of a checkpoint and its tokenizer."""
        tokenizer = components.make_tokenizer(run.config)
        policy = components.make_policy(run.config, tokenizer, device)
        run.load_weights(policy)
        return policy, tokenizer

    # ------------------------------------------------------------------------------------ profiling
    def choices(self, config: Config, hardware: placement.Hardware, cores: int) -> list[Choice]:
        return cost_model.choices(hardware, validation.unused_roles(config))

    def cost_model(
        self, request: RunRequest, update: int, plans: Sequence[placement.Plan | None]
    ) -> Machine:
        return profile(request, update, plans)
