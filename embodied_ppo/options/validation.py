"""Which options go together: an option that is set must be read, and options must not exclude each
other.

``loader`` checks types and bounds. ``check`` compares the options with each other, and checks
values whose bound is a pattern or depends on the meaning (device, name, clip_ratio_low).
Each refusal is one line with the path, the value, the limit and the hint. Rules of one mode are in
``rules``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from operator import attrgetter
from typing import get_args

from embodied_envs.base.errors import ConfigError, choose, show
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options import placement, schema
from embodied_ppo.options.readers import mode_of, unread
from embodied_ppo.options.reward_groups import CURIOSITY, reward_groups
from embodied_ppo.options.rules import base
from embodied_ppo.options.rules.base import refuse, refuse_any
from embodied_ppo.options.rules.embodied import check_task_names
from embodied_ppo.options.rules.select import CHECKS

# Values that switch an option off (0 is False); options that are not read may have them.
UNSET = (None, False)
READ_BY_DISTILL = ("horizon", "micro_batch_size", "rollout_micro_batch_size", "max_grad_norm")
# Options of section algorithm that ``distill`` reads; reward_type sets the value head's size.
READ_BY_DISTILL += ("adam_betas", "adam_eps", "weight_decay", "group_size", "reward_type")
# Values of option device.
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
# Options of commands that must name a folder -> an example.
FOLDERS = {"checkpoint": "runs/NAME/DATE-SEED", "out": "my-folder"}


def check(
    config: schema.Config | schema.EvaluateConfig | schema.ExportConfig,
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
    model = config.model if isinstance(config, schema.EvaluateConfig) else None
    for path, example in FOLDERS.items():
        refuse(
            getattr(config, path, None) == "" and model is None,
            f"{path} = '' must name a directory; write {path}={example}",
        )
    names = getattr(config, "trackers", ())
    refuse(len({*names}) < len(names), f"write each name once: trackers = {show(names)}")
    if isinstance(config, schema.ExportConfig):
        return
    refuse(
        not DEVICE.fullmatch(config.device),
        f"write device=cpu, which works everywhere: device = {show(config.device)} must be auto,"
        " cpu, cuda or cuda:N",
    )
    if isinstance(config, schema.EvaluateConfig):
        _check_unread(config, explicit)
        _check_robustness(config)
        refuse(
            model is not None and config.checkpoint,
            f"remove checkpoint = {config.checkpoint}, or model = {model}: one of them is measured",
        )
        refuse(
            config.n > 1 and config.deterministic,
            f"write deterministic=false: else all n = {config.n} responses are equal",
        )
        return
    refuse(
        not re.fullmatch(r"[^/\\\0]+", config.name) or config.name.startswith("."),
        "write name=custom, or another folder: not empty, no / or \\, and no dot at the beginning:"
        f" name = {show(config.name)}",
    )
    for path in sorted(explicit):
        mode, value = mode_of(path), attrgetter(path)(config)
        refuse(
            mode not in (None, config.mode) and value not in UNSET,
            f"remove {path}, or set mode={mode}: mode={config.mode} ignores {path} = {show(value)}",
        )
    refuse(
        config.model.checkpoint == "",
        "write model.checkpoint=null, or name a directory: model.checkpoint = ''",
    )
    _check_placement(config)
    _check_algorithm(config)
    CHECKS[config.mode](config)
    _check_unread(config, explicit, config.mode)


def check_command(config: schema.Config, command: str, arguments: Collection[str] = ()) -> None:
    """Check that a teacher is set for ``distill`` and for no other command.

    An experiment may contain options of PPO for the run that starts from the student. ``distill``
    refuses them as arguments only.

    Args:
        config: The options.
        command: Name of the command.
        arguments: Paths of options that were given as arguments.

    Raises:
        ConfigError: A teacher is missing or ignored, or ``distill`` ignores an argument.
    """
    if command != "distill":
        hint = "remove it, or write embodied-ppo distill"
        if config.resume is not None:
            hint = (
                f"continue with embodied-ppo distill resume={config.resume}, or train the student"
                f" by PPO in a new run: experiment=NAME initial_policy={config.resume}"
            )
        refuse(config.teacher is not None, f"{hint}: only distill reads teacher = {config.teacher}")
        return
    refuse(
        config.teacher is None,
        "teacher = null: distill needs the run of a trained policy; write"
        " teacher=runs/NAME/DATE-SEED",
    )
    for path in sorted(arguments):
        section, _, name = path.partition(".")
        value = attrgetter(path)(config)
        hint = f"write distillation.{name}"
        if not hasattr(config.distillation, name):
            hint = f"remove {path}"
        refuse(
            section == "algorithm" and name not in READ_BY_DISTILL and value not in UNSET,
            f"{hint}: distill trains by regression and ignores {path} = {show(value)}, an option of"
            " PPO",
        )


def _check_unread(
    config: schema.Config | schema.EvaluateConfig,
    explicit: Collection[str],
    mode: schema.Mode | None = None,
) -> None:
    """Refuse options that are set, but whose condition does not hold. Raises ConfigError."""
    for path, condition in unread(config, mode):
        value = attrgetter(path)(config)
        refuse(
            path in explicit and value not in UNSET,
            f"remove {path}, or write {condition}: otherwise {path} = {show(value)} is ignored",
        )


def _check_placement(config: schema.Config) -> None:
    """Check what does not depend on the devices of this machine. Raises PlacementError."""
    cluster, preset = config.cluster, config.placement
    if cluster.component_placement:
        refuse(
            preset != "local",
            f"remove placement = {preset}, or cluster.component_placement: both place the roles",
            PlacementError,
        )
        placement.check_roles(cluster.component_placement, roles(config))
    if base.one_process(config):
        for name, value in vars(cluster).items():
            refuse(
                name != "stages" and value != getattr(schema.ClusterConfig(), name),
                f"remove cluster.{name} = {show(value)}, or choose a placement"
                f" ({', '.join(placement.PRESETS)}): placement=local is one process",
                PlacementError,
            )


def roles(config: schema.Config) -> list[str]:
    """Return the roles of a run."""
    a = config.algorithm
    if config.mode == "embodied":
        return list(placement.ROLES[config.mode])
    unused = [] if a.adv_type == "gae" else ["critic"]  # the other estimators use no values
    if not (a.use_kl_loss or a.use_kl_in_reward):
        unused.append("reference")
    return [role for role in placement.ROLES[config.mode] if role not in unused]


def _check_robustness(config: schema.EvaluateConfig) -> None:
    """Check the values of robustness_values. Raises ConfigError."""
    factors = get_args(schema.RobustnessFactor)
    for name, values in config.robustness_values.items():
        path = f"robustness_values.{name}"
        if name not in factors:
            raise ConfigError(f"{path} is unknown; {choose(name, factors, 'there are ')}")
        chosen = config.robustness_factors
        refuse(
            chosen and name not in chosen,
            f"add {name} to robustness_factors = {show(chosen)}, or remove {path}",
        )
        numbers = values if isinstance(values, list) else []
        refuse(
            not numbers or not all(type(x) in (int, float) and 0 <= x <= 1e6 for x in numbers),
            f"{path} = {show(values)} must be a list of numbers >= 0; write {path}=[0,1,2]",
        )


def check_evaluation(config: schema.EvaluateConfig, mode: str, explicit: Collection[str]) -> None:
    """Refuse options that the checkpoint's mode does not read. Raises ConfigError."""
    policy = "robot policy" if mode == "embodied" else "language model"
    for path in sorted({path.partition(".")[0] for path in explicit}):
        value = getattr(config, path)
        refuse(
            mode_of(path, schema.EvaluateConfig) not in (None, mode) and value not in (*UNSET, ()),
            f"remove {path}: {config.checkpoint} is a {policy}, which ignores {path} ="
            f" {show(value)}",
        )


def check_changed_env(config: schema.Config, changes: Collection[str]) -> None:
    """Refuse changed options of an evaluation's environment that are not read, as ``train`` does.

    Args:
        config: The run's options with the changed section env.
        changes: Names of the changed options below env.

    Raises:
        ConfigError: A changed option is not read.
    """
    if config.mode == "embodied":
        check_task_names(config.env)
    refuse(
        "tasks" in changes,
        "remove env.tasks: the policy reads the observations and indices of its own tasks",
    )
    _check_unread(config, {f"env.{name}" for name in changes}, config.mode)


def _check_algorithm(config: schema.Config) -> None:
    """Refuse options of section algorithm that exclude or need each other. Raises ConfigError."""
    a, comparison = config.algorithm, base.group_comparison(config)
    members = "environments" if config.mode == "embodied" else "responses"
    dr_grpo, by_length = a.adv_type == "dr_grpo", a.loss_agg_func == "seq-mean-token-mean"
    targets = a.gae_lambda if a.gae_lambda_value is None else a.gae_lambda_value
    refusals: dict[str, object] = {
        f"algorithm.clip_ratio_low = {a.clip_ratio_low:g} must be < 1, so that the bound of the"
        " ratio 1 - clip_ratio_low is > 0; the default is"
        " algorithm.clip_ratio_low=0.2": a.clip_ratio_low >= 1 and a.policy_loss == "clip",
        "write algorithm.kl_loss_type=k2, k3 or k1+: the expected gradient of k1 is"
        " zero": a.use_kl_loss and a.kl_loss_type == "k1",
        f"{comparison} compares {members}: write algorithm.group_size=4, or another number >= 2;"
        f" algorithm.group_size = {a.group_size}": comparison is not None and a.group_size < 2,
        "write algorithm.normalize_advantages=false, or algorithm.adv_type=grpo: algorithm.adv_type"
        " = dr_grpo divides by no standard deviation": dr_grpo and a.normalize_advantages,
        "write algorithm.loss_agg_func=seq-mean-token-sum-norm: algorithm.adv_type = dr_grpo"
        " divides by no length, seq-mean-token-mean does": dr_grpo and by_length,
        "write algorithm.adv_type=grpo, or algorithm.group_filter=null: algorithm.adv_type ="
        f" {a.adv_type} compares no groups and would learn from a biased choice of"
        " episodes": a.group_filter is not None and a.adv_type not in base.GROUP_ESTIMATORS,
        f"write algorithm.gae_lambda_value=1: with {targets:g} the targets contain the critic's own"
        f" values, and algorithm.critic_warmup_variance = {a.critic_warmup_variance} measures"
        " returns": a.critic_warmup_variance is not None and a.adv_type == "gae" and targets < 1,
        f"algorithm.adam_betas = {show(a.adam_betas)} must be two numbers; write"
        " algorithm.adam_betas=[0.9,0.999]": len(a.adam_betas) != 2,
    }
    refuse_any(refusals)
    _check_reward_groups(config)
    _check_popart(config)
    for name, level in (("logprob_type", a.logprob_type), ("entropy_type", a.entropy_type)):
        refuse(
            a.reward_type == "action_level" and level == "chunk_level",
            f"write algorithm.reward_type={level}: {a.reward_type} is finer than algorithm.{name} ="
            f" {level}",
        )


def _check_popart(config: schema.Config) -> None:
    """Refuse options that need several values, or parts of one. Raises ConfigError."""
    a, tasks = config.algorithm, config.env.tasks
    action_level = a.reward_type == "action_level" and config.env.action_chunk > 1
    unknown = [] if tasks is None else sorted(set(config.env.ids) - set(tasks))
    for fix, excluded in (
        ("write algorithm.reward_type=chunk_level", action_level),
        ("write algorithm.curiosity.weight=0", a.curiosity.weight > 0),
        ("remove algorithm.reward_groups", len(reward_groups(a)) > 1),
        ("write cluster.shard=false", config.cluster.shard),
        (f"write env.tasks=[..,{','.join(unknown)}]", bool(unknown)),
    ):
        refuse(
            a.popart is not None and excluded,
            f"{fix}: algorithm.popart = {a.popart} has one value per trained task, in one process",
        )


def _check_reward_groups(config: schema.Config) -> None:
    """Refuse reward groups that overlap, or that other options exclude. Raises ConfigError."""
    a, groups = config.algorithm, config.algorithm.reward_groups
    owner: dict[str, str] = {}
    for name, group in groups.items():
        path = f"algorithm.reward_groups.{name}"
        refuse(
            not re.fullmatch(r"[\w.-]+", name),
            f"{path}: the name is part of a metric's name; use letters, digits, _, - and .",
        )
        refuse(not group.terms, f"{path}.terms = []: name a reward term, or write terms: rest")
        for term in ("terms: rest",) if group.terms == "rest" else group.terms:
            refuse(
                term in owner,
                f"remove {term} from {path} or from {owner.get(term)}: a term belongs to one group",
            )
            owner[term] = name
        if group.gae_lambda is not None and a.adv_type != "gae":
            hint = f"remove {path}.gae_lambda, or write algorithm.adv_type=gae"
            raise ConfigError(f"{hint}: otherwise gae_lambda = {group.gae_lambda:g} is ignored")
    refuse(
        groups and not any(group.weight for group in reward_groups(a)),
        f"write algorithm.reward_groups.{next(iter(groups), '')}.weight=1: the weight of every"
        " group is 0, so that the policy does not learn",
    )
    chunked, count = config.env.action_chunk > 1, len(reward_groups(a))
    for option, fix, excluded in (
        ("adv_type", "grpo", config.mode == "reasoning" and a.adv_type == "gae"),
        ("reward_type", "chunk_level", a.reward_type == "action_level" and chunked),
        ("use_kl_in_reward", "false", count > 1 and a.use_kl_in_reward),
    ):
        refuse(
            (groups or count > 1) and excluded,
            f"write algorithm.{option}={fix}: with {show(getattr(a, option))} there is no value for"
            " each of algorithm.reward_groups and algorithm.curiosity",
        )
    refuse(
        a.curiosity.weight and CURIOSITY in groups,
        f"rename algorithm.reward_groups.{CURIOSITY}: algorithm.curiosity.weight ="
        f" {a.curiosity.weight:g} has a group of this name",
    )
