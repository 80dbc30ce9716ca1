"""Rules of mode=embodied: batches of environment steps, policies of robots."""

from __future__ import annotations

import math

from embodied_envs.base.errors import ConfigError, show
from embodied_envs.base.observation_names import names_observation
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.batch_sizes import optimization_config
from embodied_ppo.options.rules.base import (
    LARGEST_ROLLOUT,
    check_controller,
    divisors,
    group_comparison,
    nearest_multiples,
    nearest_values,
    one_process,
    refuse,
)
from embodied_ppo.options.schema import Config, EnvConfig

WIDTH_UNIT = 8
"""Twice the number of attention heads of a small vision-language-action model."""


def check(config: Config) -> None:
    """Refuse combinations of options that no robot policy can be trained with.

    Raises ConfigError, PlacementError.
    """
    a = config.algorithm
    refuse(
        a.loss_type != "actor_critic",
        f"algorithm.loss_type = {a.loss_type} is the loss of a policy without a value head, but"
        " mode=embodied trains one model with a value head; write algorithm.loss_type=actor_critic",
    )
    refuse(
        config.updates is None and config.env_steps is None,
        "updates = null and env_steps = null: the length of training is not set; write updates=100",
    )
    _check_sequences(config)
    if config.teacher is not None:
        _check_distillation(config)
    _check_tasks(config)
    _check_sizes(optimization_config(config))
    _check_levels(config)
    _check_model(optimization_config(config))
    _check_observations(config)
    _check_process(config)
    if config.evaluation.env == "training" and config.evaluation.episodes:
        _check_evaluation_env(config)


def _check_sequences(config: Config) -> None:
    """Refuse groups, losses and ratios of sequences that do not exist. Raises ConfigError."""
    a, restarts = config.algorithm, config.env.restart_each_rollout
    columns, comparison = a.minibatch_unit == "column", group_comparison(config)
    refuse(
        comparison is not None and not restarts,
        f"{comparison} needs groups that start together, but env.restart_each_rollout ="
        " false; write env.restart_each_rollout=true",
    )
    refuse(
        a.loss_agg_func != "token-mean" and not columns,
        f"algorithm.loss_agg_func = {a.loss_agg_func} averages over sequences, but"
        f" algorithm.minibatch_unit = {a.minibatch_unit} cuts them; write"
        " algorithm.minibatch_unit=column (or loss_agg_func=token-mean)",
    )
    refuse(
        a.ratio_level == "sequence" and not columns,
        "algorithm.ratio_level = sequence is a mean over an episode, but algorithm.minibatch_unit ="
        f" {a.minibatch_unit} cuts it; write algorithm.minibatch_unit=column (or"
        " ratio_level=chunk)",
    )
    refuse(
        a.ratio_level == "sequence" and not restarts,
        "algorithm.ratio_level = sequence is a mean over an episode, but with"
        " env.restart_each_rollout = false a column holds parts of several; write"
        " env.restart_each_rollout=true (or ratio_level=chunk)",
    )
    refuse(
        a.ratio_level == "chunk" and a.logprob_type == "chunk_level",
        "algorithm.ratio_level = chunk is a mean over a chunk, but algorithm.logprob_type ="
        " chunk_level has one ratio for it; write algorithm.logprob_type=action_level",
    )
    one_action = config.env.action_chunk == 1 and a.logprob_type == "action_level"
    refuse(
        a.ratio_level == "chunk" and one_action,
        "algorithm.ratio_level = chunk is a mean over a chunk, but with env.action_chunk = 1 and"
        " algorithm.logprob_type = action_level it has one entry; write"
        " algorithm.logprob_type=token_level (or ratio_level=token)",
    )
    refuse(
        a.group_filter is not None and config.updates is None and config.teacher is None,
        f"updates = null: with algorithm.group_filter = {a.group_filter} an update takes a varying"
        " number of environment steps, so that env_steps sets no number of updates; write"
        " updates=100",
    )


def check_task_names(env: EnvConfig) -> None:
    """Refuse lists of tasks that are empty or name a task twice. Raises ConfigError."""
    for path, names in (("env.id", env.ids), ("env.tasks", env.tasks)):
        refuse(
            names is not None and not 0 < len(names) == len(set(names)),
            f"{path} = {show(names)}: list one or more tasks, each of them once; env.task_weights"
            " gives a task more environments",
        )


def _check_tasks(config: Config) -> None:
    """Refuse numbers of environments that several tasks cannot share. Raises ConfigError."""
    check_task_names(config.env)
    env, tasks = config.env, config.env.period
    refuse(
        env.num_envs % tasks,
        f"env.num_envs = {env.num_envs} is not a multiple of {tasks}, the tasks of env.id (or the"
        f" sum of env.task_weights); nearest: {nearest_multiples(tasks, env.num_envs)}",
    )
    refuse(
        tasks > 1 and config.algorithm.group_size > 1,
        f"write algorithm.group_size=1: neighbouring environments have different tasks of env.id ="
        f" {env.title}, so that no group starts together",
    )


def _check_distillation(config: Config) -> None:
    """Refuse options with which nothing can be distilled. Raises ConfigError, PlacementError."""
    refuse(
        config.model.policy != "actor_critic",
        f"model.policy = {config.model.policy}: distill trains model.policy=actor_critic, which may"
        " have cameras (model=cnn); write that, or clone demonstrations (embodied-ppo clone)",
    )
    refuse(
        not one_process(config),
        f"placement = {config.placement}: distill runs in one process; write placement=local, and"
        " place the PPO run that starts from the student (initial_policy)",
        PlacementError,
    )


def _check_process(config: Config) -> None:
    """Refuse stages and pipelines that this process cannot run. Raises ConfigError."""
    a, stages, pipeline = config.algorithm, config.cluster.stages, config.pipeline
    if stages > 1 and one_process(config):
        unit = stages * a.group_size * config.env.period
        groups = "" if a.group_size == 1 else f" x algorithm.group_size = {a.group_size}"
        refuse(
            config.env.num_envs % unit,
            f"env.num_envs = {config.env.num_envs} is not a multiple of cluster.stages ="
            f" {stages}{groups}; nearest: {nearest_multiples(unit, config.env.num_envs)}",
        )
        name = "distill" if config.teacher is not None else "algorithm.group_filter"
        refuse(
            a.group_filter is not None or config.teacher is not None,
            f"cluster.stages = {stages}: {name} needs all environments in one stage; remove it",
        )
    refuse(
        pipeline and not one_process(config),
        f"pipeline = true and placement = {config.placement}: pipeline overlaps collecting and"
        " learning in one process; write placement=local, or pipeline=false and"
        " placement=disaggregated cluster.max_lag=1",
    )
    refuse(
        pipeline and config.teacher is not None,
        "pipeline = true: distill labels each rollout by the teacher while it is collected; remove"
        " it",
    )
    refuse(
        pipeline and a.off_policy_correction is None,
        "pipeline = true and algorithm.off_policy_correction = null: rollouts are one update old,"
        " and without weights for that the policy learns much less; write"
        " algorithm.off_policy_correction=token",
    )
    refuse(
        pipeline and config.env.cameras,
        f"pipeline = true and env.cameras = [{','.join(config.env.cameras)}]: images can be"
        " rendered only in the thread that created the simulators; write pipeline=false",
    )
    refuse(
        pipeline and config.model.checkpoint is not None,
        "pipeline = true: would keep two copies of the model of model.checkpoint; remove it",
    )


def _check_evaluation_env(config: Config) -> None:
    """Refuse evaluations that the simulators of the training cannot run. Raises ConfigError."""
    e, c = config.evaluation, config.cluster
    for unsupported, hint, reason in (
        (not one_process(config), "placement=local", f"placement = {config.placement}"),
        (c.stages > 1, "cluster.stages=1", f"cluster.stages = {c.stages}"),
        (config.teacher is not None, "evaluation.env=own", "distill changes its simulators"),
        (bool(e.env_kwargs), "evaluation.env_kwargs={}", "evaluation.env_kwargs changes them"),
        (
            config.env.randomize and not e.randomize,
            "evaluation.randomize=true",
            "evaluation.randomize = false changes them",
        ),
    ):
        refuse(
            unsupported,
            f"write {hint}, or evaluation.env=own: evaluation.env = training evaluates in the"
            f" simulators of one training process as they are; {reason}",
        )


def _check_model(config: Config) -> None:
    """Refuse options of section model that exclude each other. Raises ConfigError."""
    model, a = config.model, config.algorithm
    small = model.policy == "actor_critic"
    refuse(
        not small and not model.shared_backbone,
        f"model.shared_backbone = false: model.policy={model.policy} has one trunk; leave it out",
    )
    refuse(
        model.policy == "flow" and model.flow_noise == "learned" and model.flow_chain == "one",
        "model.flow_chain = one: with model.flow_noise=learned every step is stochastic; write"
        " model.flow_chain=sum",
    )
    refuse(
        model.width % WIDTH_UNIT,
        f"write model.width={max(1, round(model.width / WIDTH_UNIT)) * WIDTH_UNIT}:"
        f" model.width = {model.width} must be a multiple of {WIDTH_UNIT}",
    )
    eps = model.obs_eps
    refuse(
        isinstance(eps, tuple) and (len(eps) != 2 or not any(eps)),
        f"model.obs_eps = {show(eps)} must be a number, or two of which one is > 0; write"
        " model.obs_eps=1e-8",
    )
    recurrent = small and model.recurrent is not None
    refuse(
        a.rpo_alpha is not None and a.use_kl_loss,
        f"write algorithm.use_kl_loss=false: algorithm.rpo_alpha = {a.rpo_alpha} shifts the means"
        " of which the loss would take the KL; algorithm.use_kl_in_reward=true takes it before",
    )
    refuse(
        recurrent and a.minibatch_unit != "column",
        f"model.recurrent = {model.recurrent}: gradients pass through time, so minibatches consist"
        f" of whole columns, but algorithm.minibatch_unit = {a.minibatch_unit}; write"
        " algorithm.minibatch_unit=column",
    )
    low, initial, high = model.min_log_std, model.init_log_std, model.max_log_std
    refuse(
        not low < high,
        f"model.min_log_std = {low:g} must be < model.max_log_std = {high:g}; the defaults are -5"
        " and 2",
    )
    refuse(
        not low <= initial <= high,
        f"model.init_log_std = {initial:g} must be >= model.min_log_std = {low:g} and <="
        f" model.max_log_std = {high:g}; move it inside",
    )


def _check_observations(config: Config) -> None:
    """Refuse lists of observations that are incomplete or contradictory. Raises ConfigError."""
    model = config.model
    actor, critic = model.actor_obs, model.critic_obs
    if actor is None or model.policy != "actor_critic":
        return  # the option that is set is not read, which is refused elsewhere
    written = f"model.actor_obs = [{','.join(actor)}]"
    if critic is None:
        raise ConfigError(
            f"{written}: model.critic_obs is null, so that the critic's observations are not set;"
            f" write model.critic_obs=[{','.join((*actor, 'NAME'))}]"
        )
    for name, keys in (("actor_obs", actor), ("critic_obs", critic)):
        refuse(not keys, f"model.{name} = []: names no observation; list at least one")

    def without(keys: tuple[str, ...], names: tuple[str, ...]) -> str | None:
        return next((x for x in names if not any(names_observation(k, x) for k in keys)), None)

    missing = without(critic, actor)
    refuse(
        model.shared_backbone and missing is not None,
        f"{written}: model.critic_obs lacks {missing}, but with model.shared_backbone=true the"
        " critic reads the features of the actor's trunk; add it, or write"
        " model.shared_backbone=false",
    )
    camera = without((*actor, *critic), config.env.cameras)
    refuse(
        camera is not None,
        f"env.cameras = [{','.join(config.env.cameras)}]: no network reads {camera}; add it to"
        " model.actor_obs or model.critic_obs, or remove it here",
    )


def _check_levels(config: Config) -> None:
    """Refuse options without a definition where each action of a chunk has an advantage.

    Raises ConfigError.
    """
    a = config.algorithm
    if config.env.action_chunk == 1 or a.reward_type != "action_level":
        return
    for path, value, allowed in (
        ("loss_agg_func", a.loss_agg_func, "token-mean"),
        ("off_policy_correction", a.off_policy_correction, "token"),
    ):
        refuse(
            value not in (None, allowed),
            f"algorithm.{path} = {value}: sequences of actions have none with algorithm.reward_type"
            f" = action_level and env.action_chunk = {config.env.action_chunk}; write"
            f" algorithm.{path}={allowed}, or algorithm.reward_type=chunk_level",
        )


def _check_sizes(config: Config) -> None:
    """Check that minibatches divide the rollout, and groups the environments.

    Raises ConfigError.
    """
    a, num_envs = config.algorithm, config.env.num_envs
    total, batch, micro = a.horizon * num_envs, a.global_batch_size, a.micro_batch_size
    rollout = f"algorithm.horizon x env.num_envs = {a.horizon} x {num_envs} = {total}"
    refuse(
        total > LARGEST_ROLLOUT,
        f"{rollout} steps must be <= {LARGEST_ROLLOUT:,}; lower one of them",
    )
    unit = a.horizon if a.minibatch_unit == "column" else 1
    columns = f"algorithm.horizon = {a.horizon} (algorithm.minibatch_unit = column)"
    if batch % unit:
        hint = nearest_values([unit * d for d in divisors(num_envs)], batch)
        raise ConfigError(
            f"algorithm.global_batch_size = {batch} is not a multiple of {columns}; nearest: {hint}"
        )
    if total % batch:
        hint = nearest_values([unit * d for d in divisors(total // unit)], batch)
        # num_envs must be a multiple of batch / gcd(batch, horizon) and of group_size.
        env_unit = math.lcm(batch // math.gcd(batch, a.horizon), a.group_size)
        raise ConfigError(
            f"{rollout} is not a multiple of algorithm.global_batch_size = {batch}; nearest:"
            f" {hint}; or with this batch, nearest env.num_envs:"
            f" {nearest_multiples(env_unit, num_envs)}"
        )
    if micro is not None:
        refuse(
            micro > batch,
            f"algorithm.micro_batch_size = {micro} must be <= algorithm.global_batch_size ="
            f" {batch}; write algorithm.micro_batch_size={batch}",
        )
        refuse(
            micro % unit,
            f"algorithm.micro_batch_size = {micro} is not a multiple of {columns}; nearest:"
            f" {nearest_multiples(unit, micro)}",
        )
    check_controller(config, num_envs, "env.num_envs")
    if num_envs % a.group_size:
        raise ConfigError(
            f"env.num_envs = {num_envs} is not a multiple of algorithm.group_size = {a.group_size};"
            f" nearest: {nearest_values(divisors(num_envs), a.group_size)}"
        )
