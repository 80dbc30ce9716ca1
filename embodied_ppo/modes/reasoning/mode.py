"""mode=reasoning: language models, with a separate critic, graded responses and a decode engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.algorithms.separate_critic_learner import full_kl
from embodied_ppo.config import placement, validation
from embodied_ppo.config.batch_sizes import batches
from embodied_ppo.config.schema import Config, EvaluateConfig
from embodied_ppo.core.types import PlacementError
from embodied_ppo.evaluation.prompts import PromptEvaluationResult
from embodied_ppo.modes.base import (
    CostModel,
    Evaluator,
    MemoryEstimator,
    Mode,
    RunComponents,
    RunRequest,
)
from embodied_ppo.modes.reasoning import components, cost_model
from embodied_ppo.modes.reasoning.memory import ReasoningMemoryEstimator
from embodied_ppo.modes.reasoning.profile import profile
from embodied_ppo.modes.reasoning.workers import build_worker
from embodied_ppo.placement.channels import Exchange
from embodied_ppo.placement.cost_model import Choice
from embodied_ppo.placement.worker import Worker, WorkerSpec
from embodied_ppo.training import checkpoint
from embodied_ppo.training.local_system import LocalSystem


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
        prompts = {"algorithm.global_batch_size": a.global_batch_size}
        if plan.has("critic"):
            own = components.critic_config(a, config.critic)
            prompts["critic.global_batch_size"] = own.global_batch_size
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
            "prompts of a rollout process": a.rollout_batch_size // plan.processes("rollout"),
            "responses an update": b.samples,
            "optimiser steps an update": b.actor.steps,
            "responses of an actor process in a step": responses,
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
    def title(self, config: Config) -> str:
        return components.title(config)

    def horizon(self, config: Config) -> int:
        return config.algorithm.response_length

    def samples(self, result: PromptEvaluationResult) -> list[dict[str, Any]]:
        return result.samples()

    def check_files(self, config: Config) -> None:
        components.check_files(config)

    def build_local(self, request: RunRequest, stack: ExitStack) -> RunComponents:
        config = request.config
        m = components.read_inputs(request)
        rule = components.make_graders(config, m.prompts, stack)
        components.warm_start_actor(request, m.policy, m.tokenizer)
        graders = components.make_training_graders(request, m, rule)
        critic = components.make_critic(config, m.policy, request.device)
        engine = components.make_engine(m)
        rollout = components.make_rollout(request, m, engine, graders)
        since = components.compile_from(config)
        values = None
        if critic is not None:
            values = components.make_critic_learner(request, critic, since)
        system = LocalSystem(
            self.records(request),
            policy=m.policy,
            rollout=rollout,
            learner=components.make_learner(request, m.policy, values, since),
            count=components.response_tokens,
            measure=components.held_out_evaluation(m, rollout),
            publish=engine.update_weights,
        )
        title = components.title(config, sum(p.numel() for p in m.policy.parameters()))
        return RunComponents(system, title, components.writer(request))

    def build_worker(
        self, request: RunRequest, spec: WorkerSpec, exchange: Exchange | None
    ) -> tuple[Worker, Mapping[str, Any]]:
        return build_worker(request, spec, exchange)

    # ---------------------------------------------------------------------------------- checkpoints
    def evaluator(
        self,
        config: EvaluateConfig,
        trained: Config,
        source: checkpoint.Checkpoint,
        *,
        run_dir: Path,
        device: torch.device,
        say: Callable[[str], None],
    ) -> Evaluator:
        return components.evaluator(
            config, trained, source, run_dir=run_dir, device=device, say=say
        )

    def export(
        self,
        trained: Config,
        source: checkpoint.Checkpoint,
        out: Path,
        *,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> dict[str, Any]:
        return components.export(trained, source, out)

    # ------------------------------------------------------------------------------------ profiling
    def choices(self, config: Config, hardware: placement.Hardware, cores: int) -> list[Choice]:
        return cost_model.choices(hardware, validation.unused_roles(config))

    def cost_model(
        self, request: RunRequest, update: int, plans: Sequence[placement.Plan | None]
    ) -> CostModel:
        costs = profile(request, update, plans)
        return CostModel(costs, lambda plan, needs: cost_model.predicted(plan, costs, needs))
