"""Which options go together: what one mode alone reads, what is read under a condition, what excludes or needs what.

``strict`` reads the options; ``check`` compares them with each other, one line per refusal.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from operator import attrgetter

from embodied_ppo.config import placement
from embodied_ppo.config.readers import mode_of, unread
from embodied_ppo.config.schema import ClusterConfig, Config, EvaluateConfig, ExportConfig, Mode
from embodied_ppo.core.errors import ConfigError, PlacementError, show

UNSET = (None, False)
"""Values by which a user switches an option off: they are never refused as not read."""
LARGEST_ROLLOUT = 10**10
"""Steps of one update; more fit no machine, and their divisors take seconds to find."""
LEVELS = ("token_level", "action_level", "chunk_level")
"""Fine to coarse."""
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def check(config: Config | EvaluateConfig | ExportConfig, explicit: Collection[str] = ()) -> None:
    """Options against each other; ``explicit`` options must be read. Raises ConfigError with the numbers in it."""
    if isinstance(config, ExportConfig):
        for path, example in (("checkpoint", "runs/NAME/DATE-SEED"), ("out", "my-model")):
            if not getattr(config, path):
                raise ConfigError(f"{path} = '' must name a directory; write {path}={example}")
        return None
    if not DEVICE.fullmatch(config.device):
        raise ConfigError(
            f"device = {show(config.device)} must be auto, cpu, cuda or cuda:N; the safe one is device=cpu"
        )
    if isinstance(config, EvaluateConfig):
        return _check_evaluation(config, explicit)
    if not re.fullmatch(r"[^/\\\0]+", config.name) or config.name.startswith("."):
        raise ConfigError(
            f"name = {show(config.name)} must be one folder name without / and leading dot; try name=custom"
        )
    for path in sorted(explicit):
        mode, value = mode_of(path), attrgetter(path)(config)
        if mode not in (None, config.mode) and value not in UNSET:
            raise ConfigError(f"{path} = {show(value)} is set but not read; it needs mode={mode}, or leave it out")
    if config.model.checkpoint == "":
        raise ConfigError("model.checkpoint = '': is empty; name a directory, or write model.checkpoint=null")
    _check_placement(config)
    _check_algorithm(config)
    if config.mode == "embodied":
        _check_robot(config)
    else:
        _check_language(config)
    _check_unread(config, explicit, config.mode)


def _check_unread(config: Config | EvaluateConfig, explicit: Collection[str], mode: Mode | None = None) -> None:
    """Refuse options that are set, but whose condition does not hold. Raises ConfigError."""
    for path, condition in unread(config, mode):
        value = attrgetter(path)(config)
        if path in explicit and value not in UNSET:
            raise ConfigError(f"{path} = {show(value)} is set but not read; it needs {condition}, or leave it out")


def _check_robot(config: Config) -> None:
    """What mode=embodied needs."""
    _check_sizes(config)
    _check_levels(config)
    if config.updates is None and config.env_steps is None:
        raise ConfigError("updates = null and env_steps = null: nothing says how long to train; write updates=100")
    model = config.model
    if model.policy != "actor_critic" and not model.shared_backbone:
        raise ConfigError(f"model.shared_backbone = false: model.policy={model.policy} has one trunk; leave it out")
    if model.policy == "flow" and model.flow_noise == "learned" and model.flow_chain == "one":
        raise ConfigError(
            "model.flow_chain = one: with model.flow_noise=learned every step is stochastic; write model.flow_chain=sum"
        )
    if model.width % (2 * model.heads):
        raise ConfigError(
            f"model.width = {model.width}: must be a multiple of 2 x model.heads = {2 * model.heads}; write "
            f"{max(1, round(model.width / (2 * model.heads))) * 2 * model.heads}"
        )
    if not model.min_log_std < model.max_log_std:
        raise ConfigError(
            f"model.min_log_std = {model.min_log_std:g} must be < model.max_log_std = {model.max_log_std:g}; "
            "the defaults are -5 and 2"
        )
    if not model.min_log_std <= model.init_log_std <= model.max_log_std:
        raise ConfigError(
            f"model.init_log_std = {model.init_log_std:g} must be >= model.min_log_std = {model.min_log_std:g} and "
            f"<= model.max_log_std = {model.max_log_std:g}; move it inside"
        )


def _check_language(config: Config) -> None:
    """What mode=reasoning needs."""
    a, d, e, r = config.algorithm, config.data, config.evaluation, config.rollout
    _check_format(config.reward.format)
    rules = (
        (config.updates is None, "updates = null: nothing says how long to train; write updates=100"),
        (
            d.task is None and not d.train,
            "data.train = [] and data.task = null: there are no prompts; write data.train=[FILE.jsonl] or "
            "data.task=arithmetic",
        ),
        (
            d.task is None and not d.eval,
            "data.eval = []: there is nothing to evaluate on; write data.eval=[FILE.jsonl] with held-out prompts",
        ),
        (
            config.actor.model.path is None and not config.actor.model.architecture,
            "actor.model.path = null: there is no model; name a directory that transformers wrote, or give "
            "actor.model.architecture (experiment=arithmetic has one)",
        ),
        (
            d.task is None and config.actor.model.path is None and config.actor.tokenizer is None,
            "actor.tokenizer = null: a new model for files of prompts needs one; write actor.tokenizer=DIRECTORY",
        ),
        (
            a.adv_type == "gae" and not config.critic.use_critic_model,
            "critic.use_critic_model = false, but algorithm.adv_type = gae needs a critic; write "
            "critic.use_critic_model=true, or algorithm.adv_type=grpo with algorithm.group_size=8",
        ),
        (
            r.overlong_buffer >= a.response_length,
            f"rollout.overlong_buffer = {r.overlong_buffer} must be < algorithm.response_length = {a.response_length}; "
            "lower it",
        ),
        (
            e.n > 1 and e.deterministic,
            f"evaluation.n = {e.n}, but evaluation.deterministic = true: all {e.n} responses would be the same; write "
            "evaluation.deterministic=false",
        ),
        (
            config.compile == "always" and (a.micro_batch_tokens is not None or a.micro_batch_size is not None),
            "compile = always: compiled minibatches have one shape; leave algorithm.micro_batch_tokens and "
            "algorithm.micro_batch_size null, or write compile=never",
        ),
        (
            config.critic.model.path is not None and bool(config.critic.model.architecture),
            "critic.model.path and critic.model.architecture exclude each other; keep one of them",
        ),
        (
            (r.engine == "vllm" or config.actor.model.path is not None) and config.warm_start.steps > 0,
            f"warm_start.steps = {config.warm_start.steps} is for a new model (actor.model.path=null) and "
            "rollout.engine=builtin; write warm_start.steps=0",
        ),
        (
            r.engine == "vllm" and config.actor.model.path is None,
            "rollout.engine = vllm needs a directory; write actor.model.path=DIRECTORY, or rollout.engine=builtin",
        ),
    )
    for broken, line in rules:
        if broken:
            raise ConfigError(line)
    total, responses = a.rollout_batch_size, a.rollout_batch_size * a.group_size
    if responses * a.response_length > LARGEST_ROLLOUT:
        raise ConfigError(
            f"algorithm.rollout_batch_size x group_size x response_length = {total} x {a.group_size} x "
            f"{a.response_length} tokens must be <= {LARGEST_ROLLOUT:,}; lower one of them"
        )
    batches = {
        "algorithm.global_batch_size": a.global_batch_size,
        "critic.global_batch_size": config.critic.global_batch_size or a.global_batch_size,
    }
    whole = math.lcm(*batches.values())
    for path, batch in batches.items():
        if total % batch:
            near = _nearest_multiples(whole, total)
            raise ConfigError(
                f"algorithm.rollout_batch_size = {total} is not a multiple of {path} = {batch} (prompts); nearest: "
                f"{_nearest(_divisors(total), batch)}; or nearest algorithm.rollout_batch_size: {near}"
            )
    if a.micro_batch_size is not None and a.micro_batch_size > a.global_batch_size * a.group_size:
        raise ConfigError(
            f"algorithm.micro_batch_size = {a.micro_batch_size} (responses) must be <= algorithm.global_batch_size x "
            f"group_size = {a.global_batch_size * a.group_size}; leave it null"
        )
    _check_controller(config, responses, "algorithm.rollout_batch_size x group_size")


def _check_format(pattern: str | None) -> None:
    """reward.format must be a regular expression. Raises ConfigError."""
    try:
        re.compile(pattern or "", re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"reward.format = {show(pattern)} is no regular expression ({error}); correct it, or write "
            "reward.format=null"
        ) from error


def _check_placement(config: Config) -> None:
    """What can be said before anybody knows what devices there are. Raises PlacementError."""
    cluster, asked = config.cluster, config.placement
    if cluster.component_placement:
        if asked != "local":
            raise PlacementError(
                f"placement = {asked}: cluster.component_placement says where the roles run, too; leave one of them out"
            )
        placement.check_roles(cluster.component_placement, config.mode, without=unused_roles(config))
    if config.mode == "reasoning" and cluster.stages > 1:
        raise PlacementError(
            f"cluster.stages = {cluster.stages}: is for simulators, and mode=reasoning has none; write cluster.stages=1"
        )
    _check_lag(cluster)
    if asked == "local" and not cluster.component_placement:
        default = ClusterConfig()
        for field in dataclasses.fields(cluster):
            value = getattr(cluster, field.name)
            if value != getattr(default, field.name):
                raise PlacementError(
                    f"cluster.{field.name} = {show(value)}: is not read with placement=local, which is this process "
                    f"alone; choose a placement ({', '.join(placement.PRESETS)}), or leave it out"
                )


def _check_lag(cluster: ClusterConfig) -> None:
    if cluster.max_lag and cluster.weights not in ("auto", "store"):
        raise PlacementError(
            f"cluster.weights = {cluster.weights}: rollouts that run ahead take weights when they are ready, which "
            "only cluster.weights=store keeps for them; write that, or cluster.max_lag=0"
        )


def check_tuning(config: Config, explicit: Collection[str] = ()) -> None:
    """As ``check``, for a run whose placement is yet to be found. Raises ConfigError, PlacementError."""
    if config.mode == "reasoning" and config.compile == "always":
        raise ConfigError(
            "compile = always: tune times language models without the compiler; leave it out, and write it to train "
            "with what tune has found"
        )
    if config.mode == "reasoning" and config.rollout.engine != "builtin":
        raise ConfigError(
            f"rollout.engine = {config.rollout.engine}: tune times the built-in engine, not this one; leave it out"
        )
    if config.resume is not None:
        raise ConfigError(
            f"resume = {config.resume}: is not read by tune, which continues nothing; leave it out, and write "
            "it to train with what tune has found"
        )
    if config.cluster.shard:
        raise PlacementError(
            "cluster.shard = true: tune does not know what it costs to gather a model's parts; leave it out, and write "
            "it to train with what tune has found"
        )
    default = ClusterConfig()
    given = [("placement", config.placement, "local"), ("cluster.stages", config.cluster.stages, default.stages)]
    given.append(("cluster.component_placement", config.cluster.component_placement, default.component_placement))
    for path, value, free in given:
        if value != free:
            raise PlacementError(f"{path} = {show(value)}: is what tune looks for; leave it out, or try it with train")
    check(replace(config, cluster=default), explicit)
    _check_lag(config.cluster)


def unused_roles(config: Config) -> list[str]:
    """Roles of the mode that this run does not have."""
    if config.mode == "embodied":
        return []
    a, unused = config.algorithm, list[str]()
    if a.adv_type != "gae":  # the others read no value
        unused.append("critic")
    if not (a.use_kl_loss or a.use_kl_in_reward):
        unused.append("reference")
    return unused


def _check_evaluation(config: EvaluateConfig, explicit: Collection[str]) -> None:
    """What can be said before the checkpoint is opened."""
    if not config.checkpoint:
        raise ConfigError(
            "checkpoint = '' must name a checkpoint or run directory; write checkpoint=runs/NAME/DATE-SEED"
        )
    _check_unread(config, explicit)
    if config.n > 1 and config.deterministic:
        raise ConfigError(
            f"n = {config.n}, but deterministic = true: all {config.n} responses would be the same; write "
            "deterministic=false"
        )


def check_evaluation(config: EvaluateConfig, mode: str, explicit: Collection[str]) -> None:
    """Refuse options that the checkpoint's mode does not read. Raises ConfigError."""
    for path in sorted({path.partition(".")[0] for path in explicit}):
        value = getattr(config, path)
        if mode_of(path, EvaluateConfig) not in (None, mode) and value not in (*UNSET, ()):
            raise ConfigError(
                f"{path} = {show(value)} is set but not read: {config.checkpoint} is a "
                f"{'robot policy' if mode == 'embodied' else 'language model'}; leave it out"
            )


def _check_algorithm(config: Config) -> None:
    """Options of the algorithm that exclude or need each other."""
    a, robot = config.algorithm, config.mode == "embodied"
    grouped = a.adv_type in ("grpo", "rloo", "reinforce_plus_plus_baseline")
    compares = grouped or a.reward_norm == "group"
    who = f"algorithm.adv_type = {a.adv_type}" if grouped else f"algorithm.reward_norm = {a.reward_norm}"
    needed = "actor_critic" if robot else "actor"
    rules = (
        (
            a.loss_type != needed,
            f"algorithm.loss_type = {a.loss_type} is that of {'two models' if robot else 'one model'}, but mode = "
            f"{config.mode} has {'one' if robot else 'two'}; write algorithm.loss_type={needed}",
        ),
        (
            a.clip_ratio_low >= 1,
            f"algorithm.clip_ratio_low = {a.clip_ratio_low:g} must be < 1 (the ratio is clipped at 1 - this, which "
            "must stay positive); the default is algorithm.clip_ratio_low=0.2",
        ),
        (
            a.use_kl_loss and a.kl_loss_type == "k1",
            "algorithm.kl_loss_type = k1 has a gradient of expectation zero and cannot be a loss; write "
            "algorithm.kl_loss_type=k2, k3 or k1+",
        ),
        (
            compares and a.group_size < 2,
            f"{who} compares {'environments' if robot else 'responses'} of a group, but algorithm.group_size = "
            f"{a.group_size}; it must be >= 2: write algorithm.group_size=4",
        ),
        (
            robot and compares and not config.env.restart_each_rollout,
            f"{who} needs groups that start together, but env.restart_each_rollout = false; write "
            "env.restart_each_rollout=true",
        ),
        (
            robot and a.loss_agg_func != "token-mean" and a.minibatch_unit != "column",
            f"algorithm.loss_agg_func = {a.loss_agg_func} averages over sequences, but algorithm.minibatch_unit = "
            f"{a.minibatch_unit} cuts them; write algorithm.minibatch_unit=column (or loss_agg_func=token-mean)",
        ),
        (
            a.reward_shift and a.reward_scale,
            "algorithm.reward_shift = true (only subtract) and algorithm.reward_scale = true (only divide) exclude "
            "each other; for both steps leave both false",
        ),
        (
            a.reward_shift and a.reward_norm == "running",
            "algorithm.reward_shift = true subtracts a mean, but algorithm.reward_norm = running only divides; write "
            "algorithm.reward_norm=batch",
        ),
    )
    for broken, line in rules:
        if broken:
            raise ConfigError(line)
    for name in ("logprob_type", "entropy_type"):
        if LEVELS.index(a.reward_type) < LEVELS.index(getattr(a, name)):
            raise ConfigError(
                f"algorithm.reward_type = {a.reward_type} is finer than algorithm.{name} = {getattr(a, name)}; an "
                f"advantage can be spread over finer entries only: write algorithm.reward_type={getattr(a, name)}"
            )


def _check_levels(config: Config) -> None:
    """Refuse options that have no definition where each action of a chunk has an advantage. Raises ConfigError."""
    a = config.algorithm
    if config.env.action_chunk == 1 or a.reward_type == "chunk_level":
        return
    if a.loss_agg_func != "token-mean":
        raise ConfigError(
            f"algorithm.loss_agg_func = {a.loss_agg_func}: sequences of actions are not aggregated with "
            f"algorithm.reward_type = action_level and env.action_chunk = {config.env.action_chunk}; write "
            "algorithm.loss_agg_func=token-mean, or algorithm.reward_type=chunk_level"
        )
    if a.off_policy_correction == "sequence":
        raise ConfigError(
            "algorithm.off_policy_correction = sequence: sequences of actions have no weight with "
            f"algorithm.reward_type = action_level and env.action_chunk = {config.env.action_chunk}; write "
            "algorithm.off_policy_correction=token, or algorithm.reward_type=chunk_level"
        )


def _check_sizes(config: Config) -> None:
    """Batches must tile the rollout, groups the environments."""
    a, num_envs = config.algorithm, config.env.num_envs
    total, batch, micro = a.horizon * num_envs, a.global_batch_size, a.micro_batch_size
    rollout = f"algorithm.horizon x env.num_envs = {a.horizon} x {num_envs} = {total}"
    if total > LARGEST_ROLLOUT:
        raise ConfigError(f"{rollout} steps must be <= {LARGEST_ROLLOUT:,}; lower one of them")
    unit = a.horizon if a.minibatch_unit == "column" else 1
    columns = f"algorithm.horizon = {a.horizon} (algorithm.minibatch_unit = column)"
    if batch % unit:
        cure = _nearest([unit * d for d in _divisors(num_envs)], batch)
        raise ConfigError(f"algorithm.global_batch_size = {batch} is not a multiple of {columns}; nearest: {cure}")
    if total % batch:
        cure = _nearest([unit * d for d in _divisors(total // unit)], batch)
        whole = math.lcm(batch // math.gcd(batch, a.horizon), a.group_size)  # environments that tile
        near = _nearest_multiples(whole, num_envs)
        raise ConfigError(
            f"{rollout} is not a multiple of algorithm.global_batch_size = {batch}; nearest: {cure}; or with this "
            f"batch, nearest env.num_envs: {near}"
        )
    if micro is not None and micro > batch:
        raise ConfigError(
            f"algorithm.micro_batch_size = {micro} must be <= algorithm.global_batch_size = {batch}; "
            f"write algorithm.micro_batch_size={batch}"
        )
    if micro is not None and micro % unit:
        cure = _nearest_multiples(unit, micro)
        raise ConfigError(f"algorithm.micro_batch_size = {micro} is not a multiple of {columns}; nearest: {cure}")
    _check_controller(config, num_envs, "env.num_envs")
    if num_envs % a.group_size:
        cure = _nearest(_divisors(num_envs), a.group_size)
        raise ConfigError(
            f"env.num_envs = {num_envs} is not a multiple of algorithm.group_size = {a.group_size}; nearest: {cure}"
        )


def _check_controller(config: Config, sequences: int, what: str) -> None:
    """kl_ctrl=adaptive with ``sequences`` in a rollout."""
    a = config.algorithm
    if a.use_kl_in_reward and a.kl_ctrl.type == "adaptive" and a.kl_ctrl.horizon <= 0.2 * sequences:
        raise ConfigError(
            f"algorithm.kl_ctrl.horizon = {a.kl_ctrl.horizon:g} must be > 0.2 x {what} = {0.2 * sequences:g}, or "
            f"the coefficient could turn negative; write algorithm.kl_ctrl.horizon={10 * sequences}"
        )


def _divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def _nearest_multiples(unit: int, value: int) -> str:
    """The closest positive multiples of ``unit`` below and above."""
    below = value // unit * unit
    return ", ".join(str(x) for x in (below, below + unit) if x)


def _nearest(allowed: Sequence[int], value: int) -> str:
    """The closest allowed numbers below and above."""
    below, above = [x for x in allowed if x <= value][-1:], [x for x in allowed if x > value][:1]
    return ", ".join(map(str, below + above))
