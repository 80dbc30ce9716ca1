"""mode=embodied: robot policies in vectorised simulators."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from embodied_ppo.config import loader, placement, validation
from embodied_ppo.config.batch_sizes import batches
from embodied_ppo.config.schema import Config, EnvConfig, EvaluateConfig, RealismConfig
from embodied_ppo.core.random import env_seeds
from embodied_ppo.core.types import ConfigError, ProgressCallback, VectorEnv
from embodied_ppo.evaluation import robustness as evaluation_robustness
from embodied_ppo.evaluation.episodes import evaluation_seeds
from embodied_ppo.models import peft_files
from embodied_ppo.models.vla import pretrained
from embodied_ppo.models.vla.pi0 import PI0
from embodied_ppo.models.vla.pretrained import CheckpointVLA
from embodied_ppo.modes.base import (
    Evaluator,
    MemoryEstimator,
    Mode,
    RunRequest,
    TaskFiles,
    TrainedRun,
    report_write_errors,
    select_device,
)
from embodied_ppo.modes.embodied import bundle, components, robustness
from embodied_ppo.modes.embodied.memory import EmbodiedMemoryEstimator
from embodied_ppo.modes.embodied.profile import profile
from embodied_ppo.modes.embodied.trained_policy import TrainedPolicy
from embodied_ppo.modes.embodied.workers import build_worker
from embodied_ppo.placement import cost_model
from embodied_ppo.placement.channels import Exchange
from embodied_ppo.placement.worker import Worker, WorkerSpec
from embodied_ppo.training import checkpoint
from embodied_ppo.training.logging import numbers


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
        placement.check_group_filter(plan, a.group_filter)
        placement.check_numbers(
            plan,
            num_envs=config.env.num_envs,
            group_size=a.group_size,
            global_batch_size=a.global_batch_size,
        )

    def facts(self, config: Config, plan: placement.Plan) -> dict[str, int]:
        b = batches(config)
        return {
            "environments per rollout process": config.env.num_envs // plan.processes("rollout"),
            "samples per update": b.samples,
            "optimiser steps per update": b.actor.steps,
            "samples per optimiser step and actor process": b.actor.size // plan.processes("actor"),
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
    def title(self, config: Config, size: int | None = None) -> str:
        return config.env.id

    def horizon(self, config: Config) -> int:
        return config.algorithm.horizon

    def checkpoint_info(self, config: Config) -> Mapping[str, Any]:
        return {"env_id": config.env.id}

    def compiled_since(self, config: Config) -> int | None:
        device = select_device(config.device, threads=0)
        if self.plan(config, device) is not None:
            return None
        return components.compile_from(config, device, lambda text: None)[0]

    def task_for_training(
        self, config: Config, source: checkpoint.Checkpoint | None, say: Callable[[str], None]
    ) -> TaskFiles | None:
        stored = None
        if source is not None:
            stored = components.stored_task(source, source.path.parent.parent)
        return components.task_files().for_training(
            config.env.id, config.env.kwargs, stored, allow=config.allow_changed_task, say=say
        )

    def build_worker(
        self, request: RunRequest, spec: WorkerSpec, exchange: Exchange | None, stack: ExitStack
    ) -> tuple[Worker, Mapping[str, Any]]:
        return build_worker(request, spec, exchange, stack)

    # ---------------------------------------------------------------------------------- checkpoints
    def evaluator(
        self, run: TrainedRun, options: EvaluateConfig, device: torch.device
    ) -> Evaluator:
        evaluation_seeds(options.seed, options.episodes)  # raises before anything is built
        base = loader.dump(components.evaluation_env(run.config))
        kwargs = {**base["kwargs"], **dict(options.env.get("kwargs") or {})}
        env_config = loader.load(EnvConfig, {**base, **options.env, "kwargs": kwargs}, source="env")
        config = replace(run.config, env=env_config)
        validation.check_changed_env(config, options.env)
        task = components.evaluated_task(run, env_config, allow=options.allow_changed_task)
        factory = functools.partial(
            components.make_env, config=env_config, device=device, task=task, model=config.model
        )
        policy, env = _restore(run, config, factory, allow=options.allow_changed_task)
        sweep = None
        if options.robustness:
            trained = components.training_env(run.config)
            sweep = robustness.plan(options, trained, factory, env)
            for line in sweep.lines:
                run.say(line)
        if not options.deterministic:
            components.sampling_temperature(policy, options.temperature)

        def evaluate(out: Path, advance: ProgressCallback) -> dict[str, Any]:
            finished = itertools.count(1)
            advance("episodes", 0, options.episodes)
            result = components.measure(
                options,
                policy,
                factory,
                lambda _: advance("episodes", next(finished), options.episodes),
            )
            card = None
            if sweep is not None:
                allow = options.allow_changed_task
                card = sweep.measure(
                    options,
                    policy,
                    result,
                    lambda: _untrained(run, config, factory, allow=allow)[0],
                    advance,
                )
            files = components.write_report(
                config,
                result,
                policy=policy,
                source=run.source,
                run_dir=run.run_dir,
                out=out,
                options=options,
                task=task,
                video_episodes=options.video_episodes if options.video else 0,
                video_steps=options.video_steps,
                video_size=options.video_size,
                robustness=None if card is None else evaluation_robustness.section(card),
            )
            results = {**numbers(result.metrics()), "ci95": result.intervals(), **files}
            if card is not None:
                results |= {"robustness_score": card["score"], "robustness": card}
            return results

        return evaluate

    def load_policy(
        self, run: TrainedRun, device: torch.device, *, seed: int, allow_changed_task: bool
    ) -> TrainedPolicy:
        env_config = replace(components.evaluation_env(run.config), realism=RealismConfig())
        config = replace(run.config, env=env_config)
        task = components.evaluated_task(run, config.env, allow=allow_changed_task)
        factory = functools.partial(
            components.make_env, config=config.env, device=device, task=task, model=config.model
        )
        policy, env = _restore(run, config, factory, allow=allow_changed_task)
        history = getattr(env, "history", None)
        return TrainedPolicy(
            policy.eval(),
            config=run.config,
            checkpoint=run.source.path,
            update=run.source.update,
            action_spec=env.action_spec,
            obs_spec=env.obs_spec if history is None else history.raw_spec,
            history=history,
            read=components.observation_reader(env),
            to_simulator=getattr(env, "to_simulator"),  # noqa: B009
            seed=seed,
        )

    def check_export(self, run: TrainedRun, *, adapter: bool) -> None:
        super().check_export(run, adapter=adapter)
        model, path = run.config.model, run.source.path
        if model.policy == "actor_critic":
            bundle.check_packages()
        elif model.checkpoint is None:
            raise ConfigError(
                f"checkpoint={path.name}: model.policy={model.policy} cannot be exported; export"
                " writes language models, model.policy=actor_critic, and policies with"
                " model.checkpoint"
            )
        elif adapter and model.policy == "token":
            pretrained.check_adapter_export(model.checkpoint)

    def write_model(self, run: TrainedRun, out: Path, *, adapter: bool = False) -> dict[str, Any]:
        if run.config.model.policy == "actor_critic":
            return bundle.write(run, out)
        assert run.config.model.checkpoint is not None
        source = Path(run.config.model.checkpoint).resolve()
        if out.resolve().is_relative_to(source):
            raise ConfigError(
                f"out={out}: is inside model.checkpoint={source}, which stays as it is; name a"
                " directory outside of it"
            )
        config = replace(run.config, env=replace(run.config.env, num_envs=2))
        task = components.evaluated_task(run, config.env, allow=False)
        env = components.make_env(
            env_seeds(0, 0, 2), config=config.env, device=torch.device("cpu"), task=task
        )
        try:
            policy = components.make_policy(config, env)
            assert isinstance(policy, CheckpointVLA | PI0) and config.model.checkpoint is not None
            run.load_weights(policy)
            obs = env.reset()
            before = policy.act(policy.encode(obs))
            # Acting with a cache of keys rounds differently than ``evaluate``, so that log-
            # probabilities are compared between two calls of ``evaluate``.
            expected = policy.evaluate(policy.encode(obs), before.action, before.replay)
            with report_write_errors(out):
                if adapter:
                    trained = policy.published_parameters(source)
                    rank, alpha = config.model.lora_rank, config.model.lora_alpha
                    peft_files.save(peft_files.Adapter(rank, alpha, trained), source, out)
                elif isinstance(policy, PI0):
                    policy.export(config.model.checkpoint, out)
                else:
                    pretrained.export(policy, config.model.checkpoint, out)
            exported = _read_exported(config, env, out, adapter=adapter)
            if isinstance(policy, PI0):
                assert isinstance(exported, PI0)
                # The directory has no normaliser of states where the run computed its own.
                exported.trunk.encoder.load_state_dict(policy.trunk.encoder.state_dict())
                action = exported.act(exported.encode(obs)).action
                return {"action_difference": float((action - before.action).abs().max())}
            assert isinstance(exported, CheckpointVLA)
            after = exported.evaluate(exported.encode(obs), before.action, before.replay)
        finally:
            env.close()
        difference = (after.log_prob - expected.log_prob).detach().abs().max()
        return {"logit_difference": float(difference)}

    # ------------------------------------------------------------------------------------ profiling
    def choices(
        self, config: Config, hardware: placement.Hardware, cores: int
    ) -> list[cost_model.Choice]:
        return cost_model.choices(hardware, cores)

    def cost_model(
        self, request: RunRequest, update: int, plans: Sequence[placement.Plan | None]
    ) -> cost_model.Machine:
        return profile(request, update, plans)


def _read_exported(
    config: Config, env: VectorEnv, out: Path, *, adapter: bool
) -> components.AnyPolicy:
    """Return the policy that ``write_model`` has written.

    Args:
        config: Options of the run.
        env: The run's environment.
        out: The written directory.
        adapter: Whether it holds adapters only.
    """
    model = replace(config.model, checkpoint=str(out), lora_rank=0)
    if not adapter:
        return components.make_policy(replace(config, model=model), env)
    adapters = peft_files.load(out)
    model = replace(config.model, lora_rank=adapters.rank, lora_alpha=adapters.alpha)
    policy = components.make_policy(replace(config, model=model), env)
    assert isinstance(policy, CheckpointVLA | PI0)
    peft_files.apply(adapters, policy.published_parameters(str(model.checkpoint)))
    return policy


def _restore(
    run: TrainedRun,
    config: Config,
    factory: Callable[[list[int]], VectorEnv],
    *,
    allow: bool,
) -> tuple[components.AnyPolicy, VectorEnv]:
    """Return the policy with the weights of a checkpoint, and a closed environment of its task.

    Args:
        allow: Whether the file of ``model.network`` may differ from that of the training.
    """
    policy, env = _untrained(run, config, factory, allow=allow)
    run.load_weights(policy)
    return policy, env


def _untrained(
    run: TrainedRun,
    config: Config,
    factory: Callable[[list[int]], VectorEnv],
    *,
    allow: bool,
) -> tuple[components.AnyPolicy, VectorEnv]:
    """Return the policy as it was before the training; otherwise as ``_restore``."""
    config = replace(config, model=components.trained_model(run, allow=allow))
    env = factory(env_seeds(0, 0, 1))
    try:
        policy = components.make_policy(config, env)
    finally:
        env.close()
    return policy, env
