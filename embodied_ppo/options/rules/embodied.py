"""Rules of mode=embodied: batches of environment steps, policies of robots."""

from __future__ import annotations

import math

from embodied_envs.base.errors import ConfigError, show
from embodied_envs.base.observation_names import names_observation
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.batch_sizes import episodes, optimization_config
from embodied_ppo.options.rules import base
from embodied_ppo.options.rules.base import one_process, refuse, refuse_any
from embodied_ppo.options.schema import Config, EnvConfig

WIDTH_UNIT = 8  # twice the number of attention heads of a small vision-language-action model


def check(config: Config) -> None:
    """Refuse combinations of options that no robot policy can be trained with.

    Raises ConfigError, PlacementError.
    """
    a = config.algorithm
    refuse(
        a.loss_type != "actor_critic",
        f"write algorithm.loss_type=actor_critic: {a.loss_type} has no value head, a robot has one",
    )
    refuse(
        config.updates is None and config.env_steps is None,
        "write updates=100: updates = null and env_steps = null set no length of the training",
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
    a = config.algorithm
    chunk = config.env.action_chunk
    continues = not config.env.restart_each_rollout
    steps, comparison = a.minibatch_unit == "step", base.group_comparison(config)
    by_sequence, by_chunk = a.ratio_level == "sequence", a.ratio_level == "chunk"
    one_entry = a.logprob_type == "chunk_level" or (chunk == 1 and a.logprob_type == "action_level")
    filtered = a.group_filter is not None and config.teacher is None
    refusals: dict[str, object] = {
        f"write env.restart_each_rollout=true: {comparison} needs groups that start"
        " together": comparison is not None and continues,
        "write env.restart_each_rollout=true (or loss_agg_func=token-mean): else a column holds"
        " parts of several episodes, and algorithm.loss_agg_func = trajectory-mean weighs each"
        " one": a.loss_agg_func == "trajectory-mean" and continues,
        "write algorithm.minibatch_unit=column (or loss_agg_func=token-mean): minibatches of steps"
        " cut the sequences of algorithm.loss_agg_func ="
        f" {a.loss_agg_func}": a.loss_agg_func.startswith("seq-") and steps,
        "write algorithm.minibatch_unit=column (or ratio_level=chunk): minibatches of steps cut the"
        " episodes of algorithm.ratio_level = sequence": by_sequence and steps,
        "write env.restart_each_rollout=true (or ratio_level=chunk): else a column holds parts of"
        " several episodes, and algorithm.ratio_level = sequence is a mean over"
        " one": by_sequence and continues,
        "write algorithm.logprob_type=token_level (or ratio_level=token): algorithm.ratio_level ="
        f" chunk is a mean, and env.action_chunk = {chunk} with {a.logprob_type} has one"
        " entry": by_chunk and one_entry,
        "write updates=100: updates = null, and env_steps sets no number of updates where"
        f" algorithm.group_filter = {a.group_filter} collects a varying number of"
        " steps": filtered and config.updates is None,
    }
    refuse_any(refusals)


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
        f"env.num_envs = {env.num_envs} is not a multiple of {tasks}, the tasks of env.id with"
        f" env.task_weights; nearest: {base.nearest_multiples(tasks, env.num_envs)}",
    )
    refuse(
        tasks > 1 and config.algorithm.group_size > 1,
        f"write algorithm.group_size=1: neighbours have different tasks, env.id = {env.title}",
    )


def _check_distillation(config: Config) -> None:
    """Refuse options with which nothing can be distilled. Raises ConfigError, PlacementError."""
    refuse(
        config.model.policy != "actor_critic",
        "write model.policy=actor_critic (model=cnn for cameras), or clone demonstrations"
        f" (embodied-ppo clone): distill does not train model.policy = {config.model.policy}",
    )
    refuse(
        not one_process(config),
        f"write placement=local: distill runs in one process, placement = {config.placement}",
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
            f" {stages}{groups}; nearest: {base.nearest_multiples(unit, config.env.num_envs)}",
        )
    refills = a.group_filter is not None and a.group_filter_rounds > 1
    name = "distill" if config.teacher is not None else "algorithm.group_filter_rounds > 1"
    refuse(
        stages > 1 and (refills or config.teacher is not None),
        f"remove cluster.stages = {stages}: {name} needs all environments in one stage",
    )
    cameras = f"env.cameras = {show(config.env.cameras)} are rendered in the thread of simulators"
    obstacles = {
        f"placement = {config.placement} overlaps by cluster.max_lag=1": not one_process(config),
        "distill labels each rollout while it is collected": config.teacher is not None,
        cameras: config.env.cameras,
        "there would be two copies of model.checkpoint": config.model.checkpoint is not None,
    }
    refuse_any({f"write pipeline=false: {k}": pipeline and x for k, x in obstacles.items()})
    refuse(
        pipeline and a.off_policy_correction is None,
        "write algorithm.off_policy_correction=token: with pipeline = true rollouts are one update"
        " old, and without weights for that the policy learns much less",
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
    model, a, env, eps = config.model, config.algorithm, config.env, config.model.obs_eps
    low, initial, high = model.min_log_std, model.init_log_std, model.max_log_std
    small, learned = model.policy == "actor_critic", model.flow_noise == "learned"
    one_step = model.policy == "flow" and model.flow_chain == "one"
    recurrent = small and model.recurrent is not None
    width = max(1, round(model.width / WIDTH_UNIT)) * WIDTH_UNIT
    refusals: dict[str, object] = {
        f"remove model.shared_backbone = false: model.policy={model.policy} has one"
        " trunk": not small and not model.shared_backbone,
        "write model.flow_chain=sum: with model.flow_noise=learned every step is"
        " stochastic": learned and one_step,
        f"write model.width={width}: model.width = {model.width} must be a multiple of"
        f" {WIDTH_UNIT}": model.width % WIDTH_UNIT,
        f"model.obs_eps = {show(eps)} must be a number, or two of which one is > 0; write"
        " model.obs_eps=1e-8": isinstance(eps, tuple) and (len(eps) != 2 or not any(eps)),
        "write algorithm.use_kl_in_reward=true and algorithm.use_kl_loss=false: algorithm.rpo_alpha"
        f" = {a.rpo_alpha} shifts the means of the"
        " loss": a.rpo_alpha is not None and a.use_kl_loss,
        f"write algorithm.minibatch_unit=column: gradients of model.recurrent = {model.recurrent}"
        " pass through whole columns": recurrent and a.minibatch_unit != "column",
        f"model.min_log_std = {low:g} must be < model.max_log_std = {high:g}; defaults: -5 and"
        " 2": not low < high,
        f"model.init_log_std = {initial:g} must be >= model.min_log_std = {low:g} and <="
        f" model.max_log_std = {high:g}; move it inside": not low <= initial <= high,
    }
    obstacles = {
        f"model.policy = {model.policy} has no mirror image": not small,
        "distill imitates its teacher": config.teacher is not None,
        f"env.cameras = {show(env.cameras)} are not mirrored": env.cameras,
        f"env.id = {env.title} is more than one task": len(env.ids) > 1,
    }
    symmetric = a.symmetry is not None
    refuse_any(
        {f"write algorithm.symmetry=null: {k}": symmetric and x for k, x in obstacles.items()}
    )
    refuse_any(refusals)


def _check_observations(config: Config) -> None:
    """Refuse lists of observations that are incomplete or contradictory. Raises ConfigError."""
    model = config.model
    actor, critic = model.actor_obs, model.critic_obs
    if actor is None or model.policy != "actor_critic":
        return  # the option that is set is not read, which is refused elsewhere
    written = f"model.actor_obs = [{','.join(actor)}]"
    if critic is None:
        hint = f"write model.critic_obs=[{','.join((*actor, 'NAME'))}]"
        raise ConfigError(f"{hint}: model.critic_obs is null, but {written}")
    for name, keys in (("actor_obs", actor), ("critic_obs", critic)):
        refuse(not keys, f"model.{name} = []: names no observation; list at least one")

    def without(keys: tuple[str, ...], names: tuple[str, ...]) -> str | None:
        return next((x for x in names if not any(names_observation(k, x) for k in keys)), None)

    missing = without(critic, actor)
    refuse(
        model.shared_backbone and missing is not None,
        f"write model.shared_backbone=false, or add {missing}: model.critic_obs lacks {missing},"
        f" but the critic reads the features of the trunk of {written}",
    )
    camera = without((*actor, *critic), config.env.cameras)
    refuse(
        camera is not None,
        f"env.cameras = {show(config.env.cameras)}: no network reads {camera}; add it to"
        " model.actor_obs or model.critic_obs, or remove it here",
    )


def _check_levels(config: Config) -> None:
    """Refuse options without a definition where each action of a chunk has an advantage.

    Raises ConfigError.
    """
    a = config.algorithm
    if config.env.action_chunk == 1 or a.reward_type != "action_level":
        return
    for path, value, allowed, others in (
        ("loss_agg_func", a.loss_agg_func, "token-mean", ("trajectory-mean",)),
        ("off_policy_correction", a.off_policy_correction, "token", ()),
    ):
        refuse(
            value not in (None, allowed, *others),
            f"write algorithm.{path}={allowed}, or algorithm.reward_type=chunk_level: algorithm."
            f"{path} = {value} has no meaning for actions of a chunk",
        )


def _check_sizes(config: Config) -> None:
    """Check that minibatches divide the rollout, and groups the environments.

    Raises ConfigError.
    """
    a, num_envs, columns = config.algorithm, config.env.num_envs, episodes(config)
    total, batch, micro = a.horizon * columns, a.global_batch_size, a.micro_batch_size
    names, factors = "algorithm.horizon x env.num_envs", f"{a.horizon} x {num_envs}"
    if a.rollout_epoch > 1:
        names, factors = f"{names} x algorithm.rollout_epoch", f"{factors} x {a.rollout_epoch}"
    rollout = f"{names} = {factors} = {total}"
    refuse(
        total > base.LARGEST_ROLLOUT,
        f"{rollout} steps must be <= {base.LARGEST_ROLLOUT:,}; lower one of them",
    )
    unit = a.horizon if a.minibatch_unit == "column" else 1
    length = f"algorithm.horizon = {a.horizon} (algorithm.minibatch_unit = column)"
    if batch % unit:
        hint = base.nearest_values([unit * d for d in base.divisors(columns)], batch)
        raise ConfigError(
            f"algorithm.global_batch_size = {batch} is not a multiple of {length}; nearest: {hint}"
        )
    if total % batch:
        hint = base.nearest_values([unit * d for d in base.divisors(total // unit)], batch)
        # num_envs must be a multiple of batch / gcd(batch, horizon) and of group_size.
        env_unit = math.lcm(batch // math.gcd(batch, a.horizon * a.rollout_epoch), a.group_size)
        raise ConfigError(
            f"{rollout} is not a multiple of algorithm.global_batch_size = {batch}; nearest:"
            f" {hint}; or with this batch, nearest env.num_envs:"
            f" {base.nearest_multiples(env_unit, num_envs)}"
        )
    if micro is not None:
        refuse(
            micro > batch,
            f"algorithm.micro_batch_size = {micro} must be <= algorithm.global_batch_size ="
            f" {batch}; write algorithm.micro_batch_size={batch}",
        )
        refuse(
            micro % unit,
            f"algorithm.micro_batch_size = {micro} is not a multiple of {length}; nearest:"
            f" {base.nearest_multiples(unit, micro)}",
        )
    base.check_controller(config, columns, "env.num_envs")
    if num_envs % a.group_size:
        raise ConfigError(
            f"env.num_envs = {num_envs} is not a multiple of algorithm.group_size = {a.group_size};"
            f" nearest: {base.nearest_values(base.divisors(num_envs), a.group_size)}"
        )
