"""Rules of mode=embodied: batches of environment steps, policies of robots."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

from embodied_ppo.config.rules.base import (
    LARGEST_ROLLOUT,
    Batches,
    ModeRules,
    Passes,
    check_controller,
    divisors,
    group_comparison,
    nearest_multiples,
    nearest_values,
)
from embodied_ppo.config.schema import Config
from embodied_ppo.core.errors import ConfigError, PlacementError
from embodied_ppo.core.observation_names import names_observation


def optimization_config(config: Config) -> Config:
    """Return the options with those of distillation in place of PPO's where a teacher is set.

    The optimiser, minibatches and the schedule of compiled code read section algorithm.
    """
    if config.teacher is None:
        return config
    d, a = config.distillation, config.algorithm
    micro = a.micro_batch_size
    algorithm = replace(
        a,
        update_epoch=d.update_epoch,
        global_batch_size=d.global_batch_size,
        micro_batch_size=None if micro is None else min(micro, d.global_batch_size),
        minibatch_unit="step" if config.model.recurrent is None else "column",
        loss_agg_func="token-mean",
        target_kl_stop=None,
        lr=d.lr,
        lr_schedule=d.lr_schedule,
        lr_end=0.0,
        lr_warmup=0,
    )
    return replace(config, algorithm=algorithm)


class EmbodiedRules(ModeRules):
    """A simulator and one model with a value head."""

    mode = "embodied"
    policy_name = "robot policy"
    loss_type = "actor_critic"
    loss_type_mismatch = (
        "is the loss of a policy without a value head, but mode=embodied trains one model with a"
        " value head"
    )
    group_members = "environments"
    batch_unit = ""
    required_options: ClassVar = {"env.id": "the task: docs/tasks.md"}

    def check(self, config: Config) -> None:
        if config.teacher is not None:
            _check_distillation(config)
        _check_sizes(optimization_config(config))
        _check_levels(config)
        if config.updates is None and config.env_steps is None:
            raise ConfigError(
                "updates = null and env_steps = null: the length of training is not set; write"
                " updates=100"
            )
        _check_model(optimization_config(config))
        _check_observations(config)
        if config.pipeline:
            _check_pipeline(config)
        if config.learner_threads > 1:
            _check_learner_threads(config)
        local = config.placement == "local" and not config.cluster.component_placement
        if config.cluster.stages > 1 and local:
            _check_stages(config)

    def check_algorithm(self, config: Config) -> None:
        a, comparison = config.algorithm, group_comparison(config)
        if comparison is not None and not config.env.restart_each_rollout:
            raise ConfigError(
                f"{comparison} needs groups that start together, but env.restart_each_rollout ="
                " false; write env.restart_each_rollout=true"
            )
        if a.loss_agg_func != "token-mean" and a.minibatch_unit != "column":
            raise ConfigError(
                f"algorithm.loss_agg_func = {a.loss_agg_func} averages over sequences, but"
                f" algorithm.minibatch_unit = {a.minibatch_unit} cuts them; write"
                " algorithm.minibatch_unit=column (or loss_agg_func=token-mean)"
            )
        _check_ratio(config)
        if a.group_filter is not None and config.updates is None and config.teacher is None:
            raise ConfigError(
                f"updates = null: with algorithm.group_filter = {a.group_filter} an update takes a"
                " varying number of environment steps, so that env_steps sets no number of updates;"
                " write updates=100"
            )

    def batches(self, config: Config) -> Batches:
        a = optimization_config(config).algorithm
        samples = a.horizon * config.env.num_envs
        size = a.global_batch_size
        return Batches(samples, Passes(a.update_epoch, samples // size, size))

    def _micro_batches(self, config: Config) -> list[str]:
        size = config.algorithm.micro_batch_size
        return [] if size is None else [f"{size:,} samples"]

    def _rollout_line(self, config: Config, b: Batches) -> str:
        steps = "steps" if config.env.action_chunk == 1 else "decisions"
        horizon = config.algorithm.horizon
        return (
            f"{config.env.num_envs:,} environments x {horizon:,} {steps} = {b.samples:,} samples"
            " per update"
        )

    def _run_line(self, config: Config, b: Batches, updates: int) -> str:
        steps = b.samples * config.env.action_chunk
        # The end of an episode cuts a chunk short.
        limit = "" if config.env.action_chunk == 1 else "at most "
        return f"{updates:,} updates x {steps:,} = {limit}{updates * steps:,} environment steps"


def _check_ratio(config: Config) -> None:
    """Refuse probability ratios of sequences or chunks that do not exist. Raises ConfigError."""
    a = config.algorithm
    if a.ratio_level == "sequence" and a.minibatch_unit != "column":
        raise ConfigError(
            "algorithm.ratio_level = sequence is a mean over an episode, but"
            f" algorithm.minibatch_unit = {a.minibatch_unit} cuts it; write"
            " algorithm.minibatch_unit=column (or ratio_level=chunk)"
        )
    if a.ratio_level == "sequence" and not config.env.restart_each_rollout:
        raise ConfigError(
            "algorithm.ratio_level = sequence is a mean over an episode, but with"
            " env.restart_each_rollout = false a column holds parts of several; write"
            " env.restart_each_rollout=true (or ratio_level=chunk)"
        )
    if a.ratio_level == "chunk" and a.logprob_type == "chunk_level":
        raise ConfigError(
            "algorithm.ratio_level = chunk is a mean over a chunk, but algorithm.logprob_type ="
            " chunk_level has one ratio for it; write algorithm.logprob_type=action_level"
        )
    one_action = config.env.action_chunk == 1 and a.logprob_type == "action_level"
    if a.ratio_level == "chunk" and one_action:
        raise ConfigError(
            "algorithm.ratio_level = chunk is a mean over a chunk, but with env.action_chunk = 1"
            " and algorithm.logprob_type = action_level it has one entry; write"
            " algorithm.logprob_type=token_level (or ratio_level=token)"
        )


def _check_distillation(config: Config) -> None:
    """Refuse options with which nothing can be distilled. Raises ConfigError, PlacementError."""
    if config.model.policy != "actor_critic":
        raise ConfigError(
            f"model.policy = {config.model.policy}: distill trains model.policy=actor_critic, which"
            " may have cameras (model=cnn); write that, or clone demonstrations (embodied-ppo"
            " clone)"
        )
    if config.placement != "local" or config.cluster.component_placement:
        raise PlacementError(
            f"placement = {config.placement}: distill runs in one process; write placement=local,"
            " and place the PPO run that starts from the student (initial_policy)"
        )


def _check_learner_threads(config: Config) -> None:
    """Refuse minibatches that cannot be divided among the threads. Raises ConfigError."""
    a, threads = optimization_config(config).algorithm, config.learner_threads
    if config.placement != "local" or config.cluster.component_placement:
        raise ConfigError(
            f"learner_threads = {threads} and placement = {config.placement}: only a run in one"
            " process divides minibatches among threads; leave learner_threads out, and place actor"
            " on several devices instead"
        )
    if config.compile == "never":
        raise ConfigError(
            f"learner_threads = {threads} and compile = never: only compiled minibatches are"
            " divided among threads; write learner_threads=1 or compile=auto"
        )
    unit = threads * (a.horizon if a.minibatch_unit == "column" else 1)
    if a.global_batch_size % unit:
        columns = "" if unit == threads else f" x algorithm.horizon = {a.horizon}"
        total = a.horizon * config.env.num_envs
        if total % unit:
            others = nearest_values(divisors(total * threads // unit), threads)
            cure = f"and no minibatch of these {total} samples is; learner_threads may be {others}"
        else:
            sizes = [unit * d for d in divisors(total // unit)]
            cure = f"nearest: {nearest_values(sizes, a.global_batch_size)}"
        raise ConfigError(
            f"algorithm.global_batch_size = {a.global_batch_size} is not a multiple of"
            f" learner_threads = {threads}{columns}; {cure}"
        )


def _check_stages(config: Config) -> None:
    """Refuse environments that cannot be divided in this process. Raises ConfigError."""
    stages, group_size = config.cluster.stages, config.algorithm.group_size
    written = f"cluster.stages = {stages}"
    if config.env.num_envs % (stages * group_size):
        groups = "" if group_size == 1 else f" x algorithm.group_size = {group_size}"
        multiples = nearest_multiples(stages * group_size, config.env.num_envs)
        raise ConfigError(
            f"env.num_envs = {config.env.num_envs} is not a multiple of {written}{groups}; nearest:"
            f" {multiples}"
        )
    if config.algorithm.group_filter is not None or config.teacher is not None:
        name = "distill" if config.teacher is not None else "algorithm.group_filter"
        raise ConfigError(f"{written}: {name} needs all environments in one stage; leave it out")


def _check_pipeline(config: Config) -> None:
    """Refuse runs that cannot collect in a second thread. Raises ConfigError."""
    if config.placement != "local" or config.cluster.component_placement:
        raise ConfigError(
            f"pipeline = true and placement = {config.placement}: pipeline overlaps collecting and"
            " learning in one process; write placement=local, or pipeline=false and"
            " placement=disaggregated cluster.max_lag=1"
        )
    if config.teacher is not None:
        raise ConfigError(
            "pipeline = true: distill labels each rollout by the teacher while it is collected;"
            " leave it out"
        )
    if config.algorithm.off_policy_correction is None:
        raise ConfigError(
            "pipeline = true and algorithm.off_policy_correction = null: rollouts are one update"
            " old, and without weights for that the policy learns much less; write"
            " algorithm.off_policy_correction=token"
        )
    if config.env.cameras:
        raise ConfigError(
            f"pipeline = true and env.cameras = [{','.join(config.env.cameras)}]: images can be"
            " rendered only in the thread that created the simulators; write pipeline=false"
        )
    if config.model.checkpoint is not None:
        raise ConfigError(
            "pipeline = true: would keep two copies of the model of model.checkpoint; leave it out"
        )


def _check_model(config: Config) -> None:
    """Refuse options of section model that exclude each other. Raises ConfigError."""
    model = config.model
    if model.policy != "actor_critic" and not model.shared_backbone:
        raise ConfigError(
            f"model.shared_backbone = false: model.policy={model.policy} has one trunk; leave"
            " it out"
        )
    if model.policy == "flow" and model.flow_noise == "learned" and model.flow_chain == "one":
        raise ConfigError(
            "model.flow_chain = one: with model.flow_noise=learned every step is stochastic; write"
            " model.flow_chain=sum"
        )
    unit = 2 * model.heads
    if model.width % unit:
        raise ConfigError(
            f"model.width = {model.width}: must be a multiple of 2 x model.heads = {unit}; write"
            f" {max(1, round(model.width / unit)) * unit}"
        )
    if model.policy == "actor_critic" and model.recurrent is not None:
        _check_recurrent(config)
    if not model.min_log_std < model.max_log_std:
        raise ConfigError(
            f"model.min_log_std = {model.min_log_std:g} must be < model.max_log_std ="
            f" {model.max_log_std:g}; the defaults are -5 and 2"
        )
    if not model.min_log_std <= model.init_log_std <= model.max_log_std:
        raise ConfigError(
            f"model.init_log_std = {model.init_log_std:g} must be >= model.min_log_std ="
            f" {model.min_log_std:g} and <= model.max_log_std = {model.max_log_std:g}; move it"
            " inside"
        )


def _check_recurrent(config: Config) -> None:
    """Refuse minibatches that cut the sequences of a recurrent policy. Raises ConfigError."""
    a, kind = config.algorithm, config.model.recurrent
    if a.minibatch_unit != "column":
        raise ConfigError(
            f"model.recurrent = {kind}: gradients pass through time, so minibatches consist of"
            f" whole columns, but algorithm.minibatch_unit = {a.minibatch_unit}; write"
            " algorithm.minibatch_unit=column"
        )
    if a.bptt_length is not None and a.horizon % a.bptt_length:
        cure = nearest_values(divisors(a.horizon), a.bptt_length)
        raise ConfigError(
            f"algorithm.bptt_length = {a.bptt_length} does not divide algorithm.horizon ="
            f" {a.horizon}; nearest: {cure}"
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
        if not keys:
            raise ConfigError(f"model.{name} = []: names no observation; list at least one")
    missing = [key for key in actor if not any(names_observation(k, key) for k in critic)]
    if model.shared_backbone and missing:
        raise ConfigError(
            f"{written}: model.critic_obs lacks {missing[0]}, but with model.shared_backbone=true"
            " the critic reads the features of the actor's trunk; add it, or write"
            " model.shared_backbone=false"
        )
    for key in config.env.realism.obs_keys or ():
        if not any(names_observation(k, key) for k in actor):
            raise ConfigError(
                f"env.realism.obs_keys: {written} does not contain {key}; only what the actor reads"
                " is changed, remove it"
            )
    for camera in config.env.cameras:
        if not any(names_observation(key, camera) for key in (*actor, *critic)):
            raise ConfigError(
                f"env.cameras = [{','.join(config.env.cameras)}]: no network reads {camera}; add it"
                " to model.actor_obs or model.critic_obs, or remove it here"
            )


def _check_levels(config: Config) -> None:
    """Refuse options without a definition where each action of a chunk has an advantage.

    Raises ConfigError.
    """
    a = config.algorithm
    if config.env.action_chunk == 1 or a.reward_type == "chunk_level":
        return
    levels = (
        f"algorithm.reward_type = action_level and env.action_chunk = {config.env.action_chunk}"
    )
    if a.loss_agg_func != "token-mean":
        raise ConfigError(
            f"algorithm.loss_agg_func = {a.loss_agg_func}: sequences of actions are not aggregated"
            f" with {levels}; write algorithm.loss_agg_func=token-mean, or"
            " algorithm.reward_type=chunk_level"
        )
    if a.off_policy_correction == "sequence":
        raise ConfigError(
            "algorithm.off_policy_correction = sequence: sequences of actions have no weight with"
            f" {levels}; write algorithm.off_policy_correction=token, or"
            " algorithm.reward_type=chunk_level"
        )


def _check_sizes(config: Config) -> None:
    """Check that minibatches divide the rollout, and groups the environments.

    Raises ConfigError.
    """
    a, num_envs = config.algorithm, config.env.num_envs
    section = "algorithm" if config.teacher is None else "distillation"
    total, batch, micro = a.horizon * num_envs, a.global_batch_size, a.micro_batch_size
    rollout = f"algorithm.horizon x env.num_envs = {a.horizon} x {num_envs} = {total}"
    if total > LARGEST_ROLLOUT:
        raise ConfigError(f"{rollout} steps must be <= {LARGEST_ROLLOUT:,}; lower one of them")
    unit = a.horizon if a.minibatch_unit == "column" else 1
    columns = f"algorithm.horizon = {a.horizon} (algorithm.minibatch_unit = column)"
    if batch % unit:
        cure = nearest_values([unit * d for d in divisors(num_envs)], batch)
        raise ConfigError(
            f"algorithm.global_batch_size = {batch} is not a multiple of {columns}; nearest: {cure}"
        )
    if total % batch:
        cure = nearest_values([unit * d for d in divisors(total // unit)], batch)
        # num_envs must be a multiple of batch / gcd(batch, horizon) and of group_size.
        env_unit = math.lcm(batch // math.gcd(batch, a.horizon), a.group_size)
        envs = nearest_multiples(env_unit, num_envs)
        raise ConfigError(
            f"{rollout} is not a multiple of {section}.global_batch_size = {batch}; nearest:"
            f" {cure}; or with this batch, nearest env.num_envs: {envs}"
        )
    if micro is not None and micro > batch:
        raise ConfigError(
            f"algorithm.micro_batch_size = {micro} must be <= algorithm.global_batch_size ="
            f" {batch}; write algorithm.micro_batch_size={batch}"
        )
    if micro is not None and micro % unit:
        cure = nearest_multiples(unit, micro)
        raise ConfigError(
            f"algorithm.micro_batch_size = {micro} is not a multiple of {columns}; nearest: {cure}"
        )
    check_controller(config, num_envs, "env.num_envs")
    if num_envs % a.group_size:
        cure = nearest_values(divisors(num_envs), a.group_size)
        raise ConfigError(
            f"env.num_envs = {num_envs} is not a multiple of algorithm.group_size = {a.group_size};"
            f" nearest: {cure}"
        )
