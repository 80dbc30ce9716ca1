"""mode=embodied: robot policies in vectorised simulators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.config import placement
from embodied_ppo.config.batch_sizes import batches, steps_per_update
from embodied_ppo.config.schema import Config, EvaluateConfig
from embodied_ppo.core import compile
from embodied_ppo.core.random import env_seeds
from embodied_ppo.modes.base import (
    CostModel,
    Evaluator,
    MemoryEstimator,
    Mode,
    RunComponents,
    RunRequest,
    TaskFiles,
)
from embodied_ppo.modes.embodied import components
from embodied_ppo.modes.embodied.memory import EmbodiedMemoryEstimator
from embodied_ppo.modes.embodied.profile import profile
from embodied_ppo.modes.embodied.workers import build_worker
from embodied_ppo.placement import cost_model
from embodied_ppo.placement.channels import Exchange
from embodied_ppo.placement.worker import Worker, WorkerSpec
from embodied_ppo.training import checkpoint
from embodied_ppo.training.local_system import LocalSystem


class EmbodiedMode(Mode):
    """Train a robot policy: roles env, rollout and actor."""

    name = "embodied"
    unit = "env_steps"
    score_metric = "eval/return"
    success_metric = "eval/success"
    budget_options = "updates= or env_steps="
    compiles_complete_minibatches_only = True

    # ------------------------------------------------------------------------------------ placement
    def check_plan(self, config: Config, plan: placement.Plan) -> None:
        a = config.algorithm
        placement.check_numbers(
            plan,
            num_envs=config.env.num_envs,
            group_size=a.group_size,
            global_batch_size=a.global_batch_size,
        )

    def facts(self, config: Config, plan: placement.Plan) -> dict[str, int]:
        b = batches(config)
        return {
            "environments of a rollout process": config.env.num_envs // plan.processes("rollout"),
            "decisions an update": b.samples,
            "optimiser steps an update": b.actor.steps,
            "samples of an actor process in a step": b.actor.size // plan.processes("actor"),
        }

    def max_learners(self, config: Config) -> int:
        return config.env.num_envs

    # --------------------------------------------------------------------------------------- memory
    def can_estimate(self, config: Config, *, in_process: bool = False) -> bool:
        # An estimate would load a checkpoint, and GPU simulators may start only once in a process.
        once = config.env.simulator in ("torch", "mjlab", "libero")
        return config.model.checkpoint is None and not (in_process and once)

    def memory_estimator(self, config: Config) -> MemoryEstimator:
        return EmbodiedMemoryEstimator(config)

    def minibatch_samples(self, config: Config) -> int:
        b = batches(config)
        return max(parts.size for parts in (b.actor, b.critic) if parts is not None)

    def micro_batch_unit(self, config: Config) -> int:
        a = config.algorithm
        return a.horizon if a.minibatch_unit == "column" else 1

    # ---------------------------------------------------------------------------------------- build
    def title(self, config: Config) -> str:
        return config.env.id

    def horizon(self, config: Config) -> int:
        return config.algorithm.horizon

    def checkpoint_info(self, config: Config) -> Mapping[str, Any]:
        return {"env_id": config.env.id}

    def task_for_training(
        self, config: Config, source: checkpoint.Checkpoint | None, say: Callable[[str], None]
    ) -> TaskFiles | None:
        stored = None
        if source is not None:
            stored = components.stored_task(source, source.path.parent.parent)
        return components.task_files().for_training(
            config.env.id, config.env.kwargs, stored, allow=config.allow_changed_task, say=say
        )

    def build_local(self, request: RunRequest, stack: ExitStack) -> RunComponents:
        config, device, task = request.config, request.device, request.task
        seeds = env_seeds(config.seed, 0, config.env.num_envs, config.algorithm.group_size)
        env = components.make_env(seeds, config=config.env, device=device, task=task)
        stack.callback(env.close)
        policy = components.make_policy(config, env)
        components.check_evaluation(config, device)
        facts = components.clone(request, policy)
        compiled_since, reason = components.compile_from(config, device, request.notice)
        components.log_settings(request, env, policy, compiled_since, reason)

        def compile_schedule() -> compile.CompileSchedule:
            required = config.compile == "always"
            return compile.CompileSchedule(compiled_since, required=required, notice=request.notice)

        make_evaluation_env = functools.partial(
            components.make_env,
            config=components.evaluation_env(config),
            device=device,
            task=task,
        )
        system = LocalSystem(
            self.records(request),
            policy=policy,
            rollout=components.make_rollout(config, env, policy, compile_schedule()),
            learner=components.make_learner(request, policy, compile_schedule()),
            count=lambda experience: steps_per_update(config),
            measure=functools.partial(
                components.measure, config.evaluation, policy, make_evaluation_env
            ),
        )
        writer = components.writer(request, policy)
        return RunComponents(system, self.title(config), writer, facts)

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
        return components.export(trained, source, out, run_dir=run_dir, say=say)

    # ------------------------------------------------------------------------------------ profiling
    def choices(
        self, config: Config, hardware: placement.Hardware, cores: int
    ) -> list[cost_model.Choice]:
        return cost_model.choices(hardware, cores)

    def cost_model(
        self, request: RunRequest, update: int, plans: Sequence[placement.Plan | None]
    ) -> CostModel:
        costs = profile(request, update, plans)
        return CostModel(costs, lambda plan, needs: cost_model.predicted(plan, costs, needs))
