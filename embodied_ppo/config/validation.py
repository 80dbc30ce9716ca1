"""Which options go together: an option that is set must be read, and options must not exclude each
other.

``loader`` checks types and bounds. ``check`` compares the options with each other, and checks
values whose bound is a pattern or depends on the meaning (device, name, model.checkpoint,
clip_ratio_low).
Each refusal is one line with the path, the value, the limit and the cure. Rules of one mode are in
``rules``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import get_args

from embodied_ppo.config import placement
from embodied_ppo.config.readers import mode_of, unread
from embodied_ppo.config.rules.base import GROUP_ESTIMATORS, group_comparison
from embodied_ppo.config.rules.select import rules_of
from embodied_ppo.config.schema import (
    BenchmarkConfig,
    ClusterConfig,
    Config,
    EvaluateConfig,
    ExportConfig,
    Mode,
    RobustnessFactor,
)
from embodied_ppo.core.errors import ConfigError, PlacementError, choose, show

UNSET = (None, False)
"""Values that switch an option off (0 counts as False). Setting an unread option to one of them is
accepted.
"""
LEVELS = ("token_level", "action_level", "chunk_level")
"""Granularities, from fine to coarse."""
READ_BY_DISTILL = ("horizon", "micro_batch_size", "rollout_micro_batch_size", "max_grad_norm")
READ_BY_DISTILL += ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "group_size")
READ_BY_DISTILL += ("reward_type", "bptt_length")
"""Options of section algorithm that ``distill`` reads; ``reward_type`` sets the size of the value
head.
"""
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
"""Values of option device."""


def check(
    config: Config | EvaluateConfig | ExportConfig | BenchmarkConfig,
    explicit: Collection[str] = (),
) -> None:
    """Compare the options with each other.

    Args:
        config: Options whose types and bounds are checked.
        explicit: Paths of options that the user set; each of them must be read.

    Raises:
        ConfigError: Options exclude each other, or a set option is not read.
        PlacementError: The same, of placement or section cluster.
    """
    if isinstance(config, BenchmarkConfig):
        return _check_benchmark(config)
    if isinstance(config, ExportConfig):
        for path, example in (("checkpoint", "runs/NAME/DATE-SEED"), ("out", "my-model")):
            if not getattr(config, path):
                raise ConfigError(f"{path} = '' must name a directory; write {path}={example}")
        return None
    if not DEVICE.fullmatch(config.device):
        raise ConfigError(
            f"device = {show(config.device)} must be auto, cpu, cuda or cuda:N; device=cpu works"
            " on every machine"
        )
    if isinstance(config, EvaluateConfig):
        return _check_evaluation(config, explicit)
    if not re.fullmatch(r"[^/\\\0]+", config.name) or config.name.startswith("."):
        raise ConfigError(
            f"name = {show(config.name)} must be a folder name: not empty, no / or \\, and no"
            " dot at the beginning; try name=custom"
        )
    if len({*config.trackers}) < len(config.trackers):
        raise ConfigError(
            f"trackers = {show(config.trackers)} must not name a tool twice; write"
            f" trackers={show(list(dict.fromkeys(config.trackers))).replace(' ', '')}"
        )
    for path in sorted(explicit):
        mode, value = mode_of(path), attrgetter(path)(config)
        if mode not in (None, config.mode) and value not in UNSET:
            raise ConfigError(
                f"{path} = {show(value)} is set but not read: only mode={mode} reads it; remove it,"
                f" or set mode={mode}"
            )
    if config.model.checkpoint == "":
        raise ConfigError(
            "model.checkpoint = '' is not a directory; name one, or write model.checkpoint=null"
        )
    _check_placement(config)
    _check_algorithm(config)
    rules_of(config.mode).check(config)
    _check_unread(config, explicit, config.mode)


def _check_benchmark(config: BenchmarkConfig) -> None:
    """Refuse a benchmark without a folder, or without anything to show. Raises ConfigError."""
    if not config.out:
        raise ConfigError("out = '' must name a directory; write out=runs/benchmark")
    if Path(config.out).exists() and not Path(config.out).is_dir():
        raise ConfigError(f"out = {config.out}: is a file; name a directory")
    if len({*config.methods}) < len(config.methods):
        raise ConfigError(
            f"methods = {show(config.methods)} must not name a method twice; write"
            f" methods={show(list(dict.fromkeys(config.methods))).replace(' ', '')}"
        )
    if not config.methods and not config.results:
        raise ConfigError(
            "methods = []: nothing would be shown; write methods=[clone], or results=[FILE]"
        )


def check_command(config: Config, command: str, arguments: Collection[str] = ()) -> None:
    """Check that a teacher is set for ``distill`` and for no other command.

    An experiment may contain options of PPO for the run that starts from the student. ``distill``
    refuses them as arguments only.

    Args:
        config: The options.
        command: Name of the command.
        arguments: Paths of options that were given as arguments.

    Raises:
        ConfigError: A teacher is missing or not read, or an argument is not read by ``distill``.
    """
    if command == "distill" and config.teacher is None:
        raise ConfigError(
            "teacher = null: distill needs the run of a trained policy; write"
            " teacher=runs/NAME/DATE-SEED"
        )
    if command != "distill" and config.teacher is not None:
        cure = "leave it out, or write embodied-ppo distill"
        if config.resume is not None:
            cure = (
                f"continue with embodied-ppo distill resume={config.resume}, or train the student"
                f" by PPO in a new run: experiment=NAME initial_policy={config.resume}"
            )
        raise ConfigError(f"teacher = {config.teacher}: is read by distill only; {cure}")
    for path in sorted(arguments):
        section, _, name = path.partition(".")
        if command != "distill" or section != "algorithm" or name in READ_BY_DISTILL:
            continue
        value = attrgetter(path)(config)
        if value in UNSET:
            continue
        own = {field.name for field in dataclasses.fields(config.distillation)}
        cure = f"write distillation.{name}" if name in own else "leave it out"
        raise ConfigError(
            f"{path} = {show(value)} is set but not read: it is an option of PPO, and distill"
            f" trains by regression; {cure}"
        )


def _check_unread(
    config: Config | EvaluateConfig, explicit: Collection[str], mode: Mode | None = None
) -> None:
    """Refuse options that are set, but whose condition does not hold. Raises ConfigError."""
    for path, condition in unread(config, mode):
        value = attrgetter(path)(config)
        if path in explicit and value not in UNSET:
            raise ConfigError(
                f"{path} = {show(value)} is set but not read; it needs {condition}; otherwise"
                " remove this option"
            )


def _check_placement(config: Config) -> None:
    """Check what does not depend on the devices of this machine. Raises PlacementError."""
    cluster, preset = config.cluster, config.placement
    if cluster.component_placement:
        if preset != "local":
            raise PlacementError(
                f"placement = {preset}: cluster.component_placement places the roles too; leave one"
                " of them out"
            )
        placement.check_roles(
            cluster.component_placement, config.mode, without=unused_roles(config)
        )
    rules_of(config.mode).check_placement(config)
    _check_lag(cluster)
    if preset == "local" and not cluster.component_placement:
        default = ClusterConfig()
        for field in dataclasses.fields(cluster):
            value = getattr(cluster, field.name)
            if field.name != "stages" and value != getattr(default, field.name):
                raise PlacementError(
                    f"cluster.{field.name} = {show(value)}: is not read with placement=local, which"
                    f" runs one process; choose a placement ({', '.join(placement.PRESETS)}), or"
                    " remove this option"
                )


def _check_lag(cluster: ClusterConfig) -> None:
    """Refuse a transport that does not keep weights for cluster.max_lag. Raises PlacementError."""
    if cluster.max_lag and cluster.weights not in ("auto", "store"):
        raise PlacementError(
            f"cluster.weights = {cluster.weights} and cluster.max_lag = {cluster.max_lag}: rollout"
            " processes fetch the weights later, and only cluster.weights=store keeps them; write"
            " cluster.weights=store or cluster.max_lag=0"
        )


def check_tuning(config: Config, explicit: Collection[str] = ()) -> None:
    """Check the options of ``tune``: refuse those that it searches, then call ``check``."""
    rules_of(config.mode).check_tuning(config)
    if config.resume is not None:
        raise ConfigError(
            f"resume = {config.resume}: is not read by tune, which does not continue a run; leave"
            " it out, and write it to train with the placement that tune recommends"
        )
    if config.cluster.shard:
        raise PlacementError(
            "cluster.shard = true: tune cannot predict the cost of gathering a sharded model; leave"
            " it out, and write it to train with the placement that tune recommends"
        )
    default = ClusterConfig()
    searched = (
        ("placement", config.placement, "local"),
        ("cluster.stages", config.cluster.stages, default.stages),
        (
            "cluster.component_placement",
            config.cluster.component_placement,
            default.component_placement,
        ),
    )
    for path, value, unset in searched:
        if value != unset:
            raise PlacementError(
                f"{path} = {show(value)}: tune chooses this option; remove it, or use it with train"
            )
    check(replace(config, cluster=default), explicit)
    _check_lag(config.cluster)


def unused_roles(config: Config) -> list[str]:
    """Return the roles of the mode that this run does not have."""
    return rules_of(config.mode).unused_roles(config)


def _check_evaluation(config: EvaluateConfig, explicit: Collection[str]) -> None:
    """Check what does not depend on the checkpoint. Raises ConfigError."""
    if not config.checkpoint:
        raise ConfigError(
            "checkpoint = '' must name a checkpoint or run directory; write"
            " checkpoint=runs/NAME/DATE-SEED"
        )
    _check_unread(config, explicit)
    _check_robustness(config)
    if config.n > 1 and config.deterministic:
        raise ConfigError(
            f"n = {config.n}, but deterministic = true: all {config.n} responses would be the same;"
            " write deterministic=false"
        )


def _check_robustness(config: EvaluateConfig) -> None:
    """Check the values of robustness_values. Raises ConfigError."""
    factors = [f for f in get_args(RobustnessFactor) if f != "engine"]
    for name, values in config.robustness_values.items():
        if name not in factors:
            raise ConfigError(
                f"robustness_values.{name} is unknown; {choose(name, factors, 'there are ')}"
            )
        if config.robustness_factors and name not in config.robustness_factors:
            raise ConfigError(
                f"robustness_values.{name} is set but not read: robustness_factors ="
                f" {show(config.robustness_factors)}; add {name}, or remove it"
            )
        is_list = isinstance(values, list) and len(values) > 0
        numbers = values if is_list else ()
        if not is_list or not all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1e6
            for x in numbers
        ):
            raise ConfigError(
                f"robustness_values.{name} = {show(values)} must be a list of numbers >= 0; write"
                f" robustness_values.{name}=[0,1,2]"
            )


def check_evaluation(config: EvaluateConfig, mode: str, explicit: Collection[str]) -> None:
    """Refuse options that the checkpoint's mode does not read. Raises ConfigError."""
    for path in sorted({path.partition(".")[0] for path in explicit}):
        value = getattr(config, path)
        if mode_of(path, EvaluateConfig) not in (None, mode) and value not in (*UNSET, ()):
            raise ConfigError(
                f"{path} = {show(value)} is set but not read: {config.checkpoint} is a"
                f" {rules_of(mode).policy_name}; leave it out"
            )


def check_changed_env(config: Config, changes: Collection[str]) -> None:
    """Refuse changed options of an evaluation's environment that are not read, as ``train`` does.

    Args:
        config: The run's options with the changed section env.
        changes: Names of the changed options below env.

    Raises:
        ConfigError: A changed option is not read.
    """
    _check_unread(config, {f"env.{name}" for name in changes}, config.mode)


def _check_algorithm(config: Config) -> None:
    """Refuse options of section algorithm that exclude or need each other. Raises ConfigError."""
    a, mode_rules = config.algorithm, rules_of(config.mode)
    comparison = group_comparison(config)
    if a.loss_type != mode_rules.loss_type:
        raise ConfigError(
            f"algorithm.loss_type = {a.loss_type} {mode_rules.loss_type_mismatch}; write "
            f"algorithm.loss_type={mode_rules.loss_type}"
        )
    if a.clip_ratio_low >= 1 and a.policy_loss == "clip":
        raise ConfigError(
            f"algorithm.clip_ratio_low = {a.clip_ratio_low:g} must be < 1 (the lower bound of"
            " the ratio, 1 - clip_ratio_low, must be positive); the default is"
            " algorithm.clip_ratio_low=0.2"
        )
    if a.use_kl_loss and a.kl_loss_type == "k1":
        raise ConfigError(
            "algorithm.kl_loss_type = k1 has an expected gradient of zero and cannot be a"
            " loss; write algorithm.kl_loss_type=k2, k3 or k1+"
        )
    if comparison is not None and a.group_size < 2:
        raise ConfigError(
            f"{comparison} compares {mode_rules.group_members} of a group, but"
            f" algorithm.group_size = {a.group_size}; it must be >= 2: write"
            " algorithm.group_size=4"
        )
    if a.adv_type == "dr_grpo":
        _check_dr_grpo(config)
    if a.group_filter is not None and a.adv_type not in GROUP_ESTIMATORS:
        raise ConfigError(
            f"algorithm.group_filter = {a.group_filter} drops groups without a difference, but"
            f" algorithm.adv_type = {a.adv_type} compares no groups and would learn from a biased"
            " choice of episodes; write algorithm.adv_type=grpo, or algorithm.group_filter=null"
        )
    mode_rules.check_algorithm(config)
    if a.reward_shift and a.reward_scale:
        raise ConfigError(
            "algorithm.reward_shift = true (only subtract) and algorithm.reward_scale = true"
            " (only divide) exclude each other; for both steps leave both false"
        )
    if a.reward_shift and a.reward_norm == "running":
        raise ConfigError(
            "algorithm.reward_shift = true subtracts a mean, but algorithm.reward_norm ="
            " running only divides; write algorithm.reward_norm=batch"
        )
    for name in ("logprob_type", "entropy_type"):
        if LEVELS.index(a.reward_type) < LEVELS.index(getattr(a, name)):
            raise ConfigError(
                f"algorithm.reward_type = {a.reward_type} is finer than algorithm.{name} ="
                f" {getattr(a, name)}; an advantage applies to entries of its own or a finer level:"
                f" write algorithm.reward_type={getattr(a, name)}"
            )


def _check_dr_grpo(config: Config) -> None:
    """Refuse the divisions of GRPO that Dr. GRPO omits. Raises ConfigError."""
    a = config.algorithm
    if a.normalize_advantages:
        raise ConfigError(
            "algorithm.adv_type = dr_grpo divides by no standard deviation, but"
            " algorithm.normalize_advantages = true does; write"
            " algorithm.normalize_advantages=false, or algorithm.adv_type=grpo"
        )
    if a.loss_agg_func == "seq-mean-token-mean":
        raise ConfigError(
            "algorithm.adv_type = dr_grpo divides no loss by the length of its sequence, but"
            " algorithm.loss_agg_func = seq-mean-token-mean does; write"
            " algorithm.loss_agg_func=seq-mean-token-sum-norm"
        )
