"""Dictionaries become frozen dataclasses here, strictly: one line per refusal, with path, value, limit and cure.

``read`` merges layers (file, file, command line) into a typed config and says who set what; ``check`` compares options
with each other; ``load`` does both for one mapping; ``dump`` is the way back; ``describe`` is the documentation.
"""

from __future__ import annotations

import ast
import copy
import difflib
import inspect
import math
import re
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from embodied_ppo.config import ALIASES, REFUSED, VALUE_ALIASES, Config, EvaluateConfig, ExportConfig, Limit
from embodied_ppo.errors import ConfigError, PlacementError

C = TypeVar("C")
Path = tuple[str, ...]
SHIPPED, STORED = "configs/", "the run's config.yaml"
"""How the labels of layers begin that are not the user's."""
DUAL_CLIP = "algorithm.dual_clip_loss"
"""ROLL's switch: true means clip_ratio_c = 1 + 2 x clip_ratio_high, false means null."""


class _DualClip:
    """Stands for 1 + 2 x clip_ratio_high until that is known."""

    def __repr__(self) -> str:
        return "1 + 2 x clip_ratio_high"


_DUAL_CLIP = _DualClip()


@dataclass(frozen=True)
class Option:
    """One option as people read it."""

    path: str
    meaning: str
    type: str
    limit: str
    default: Any
    hint: Any
    """The field's annotation, resolved."""

    @property
    def allowed(self) -> str:
        return f"{self.type} {self.limit}".strip()


@dataclass(frozen=True)
class Loaded(Generic[C]):
    """A config and where it came from."""

    config: C
    origin: dict[str, str]
    """Canonical path of every option that was set -> the layer that set it."""
    aliases: tuple[tuple[str, str], ...]
    """(as written, as read), each once."""

    def deliberate(self, always: Collection[str] = ()) -> frozenset[str]:
        """Options set to something other than their default, or set at all by a layer named in ``always``.

        What a file that ships or a stored run sets is a mistake only where the other mode would read it: after
        adv_type=grpo an experiment's critic.lr may go unread.
        """
        options = describe(type(self.config))
        mode = getattr(self.config, "mode", None)

        def counts(path: str, label: str) -> bool:
            if label in always:
                return True
            ours = label.startswith((SHIPPED, STORED)) and mode_of(path) in (None, mode)
            return not ours and _get(self.config, path) != options[path].default

        return frozenset(path for path, label in self.origin.items() if counts(path, label))


# ------------------------------------------------------------------------------------------------------------- reading
def load(cls: type[C], mapping: Mapping[str, Any], *, source: str | None = None) -> C:
    """One mapping -> ``cls``, checked. Raises ConfigError (PlacementError for a placement)."""
    loaded = read(cls, [(source or "", mapping)])
    if isinstance(loaded.config, (Config, EvaluateConfig, ExportConfig)):
        check(loaded.config, explicit=loaded.deliberate())
    return loaded.config


def read(cls: type[C], layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Loaded[C]:
    """Merge (label, mapping) layers, the last wins; types and limits are checked, options are not yet compared."""
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for label, mapping in layers:
        written: dict[str, tuple[str, Any]] = {}  # canonical -> (as written, value), in this layer
        for raw, value in _leaves(cls, mapping, label):
            targets, value = _canonical(cls, raw, value, label, aliases)
            for target in targets:
                before, other = written.get(target, (raw, value))
                if before != raw and not _same(other, value):
                    raise ConfigError(
                        f"{before} = {show(other)} and {raw} = {show(value)}{_at(label)} are the same option "
                        f"({target}) with different values; keep one of them"
                    )
                written[target] = (raw, value)
        for target, (_, value) in written.items():
            values[target] = _merged(values.get(target), value)
            origin[target] = label
    if values.get("algorithm.clip_ratio_c") is _DUAL_CLIP:
        values["algorithm.clip_ratio_c"] = _dual_clip(values, origin)
    config = _build(cls, (), values, origin)
    if isinstance(config, EvaluateConfig):
        config = replace(config, env=_read_env(config.env, origin.get("env", ""), aliases))
    return Loaded(config, origin, tuple(aliases.items()))


def _leaves(cls: type, mapping: Any, label: str) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything written; goes no deeper than an option."""

    def walk(node: Any, path: Path) -> Iterator[tuple[str, Any]]:
        dotted = ".".join(path)
        if dotted in describe(cls) or dotted in alias_paths(cls):
            yield dotted, node
        elif isinstance(node, Mapping) and (node or not path):
            for key, child in node.items():
                yield from walk(child, (*path, str(key)))
        elif dotted in sections(cls) and (node is None or node == {}):
            return  # a heading without options under it
        elif not path or dotted in sections(cls):
            raise ConfigError(
                f"{dotted or 'the configuration'} = {show(node)}{_at(label)} is a section, not a value; write options "
                f"under it: {', '.join(_members(cls, dotted))}"
            )
        else:
            yield dotted, node

    yield from walk(mapping, ())


def _canonical(cls: type, raw: str, value: Any, label: str, aliases: dict[str, str]) -> tuple[tuple[str, ...], Any]:
    """Canonical paths that ``raw`` stands for, and the value in canonical words. Notes aliases; refuses the unknown."""
    if raw in describe(cls):
        targets: tuple[str, ...] = (raw,)
    elif raw in alias_paths(cls):
        targets = alias_paths(cls)[raw]
        aliases[raw] = ", ".join(targets)
        if raw == DUAL_CLIP:
            if not isinstance(value, bool):
                raise ConfigError(f"{raw} = {show(value)}{_at(label)} must be true or false; or set {targets[0]}=3.0")
            value = _DUAL_CLIP if value else None
    elif reason := next((why for path, why in REFUSED.items() if raw == path or raw.startswith(path + ".")), None):
        raise ConfigError(f"{raw} = {show(value)}{_at(label)} is refused: {reason}")
    else:
        raise ConfigError(f"{raw} = {show(value)}{_at(label)}: no such option; {_suggest(cls, raw)}")
    words = VALUE_ALIASES.get(targets[0], {})
    if isinstance(value, str) and value in words:
        aliases[f"{raw}={value}"] = f"{targets[0]}={words[value]}"
        value = words[value]
    return targets, value


def _dual_clip(values: dict[str, Any], origin: dict[str, str]) -> float:
    """1 + 2 x clip_ratio_high."""
    path = "algorithm.clip_ratio_high"
    option = describe(Config)[path]
    return 1.0 + 2.0 * _coerce(option.hint, values.get(path, option.default), path, origin.get(path, ""))


def _build(cls: type[C], prefix: Path, values: Mapping[str, Any], origin: Mapping[str, str]) -> C:
    """The dataclass from canonical values; what is not there keeps its default."""
    arguments: dict[str, Any] = {}
    for name, hint in _hints(cls).items():
        path = ".".join((*prefix, name))
        if is_dataclass(hint) and isinstance(hint, type):
            arguments[name] = _build(hint, (*prefix, name), values, origin)
        elif path in values:
            arguments[name] = _coerce(hint, values[path], path, origin[path])
    return cls(**arguments)


def _read_env(mapping: Mapping[str, Any], label: str, aliases: dict[str, str]) -> dict[str, Any]:
    """Some options of the section env, typed, for ``evaluate``."""
    part = read(Config, [(label, {"env": mapping})])
    if "env.num_envs" in part.origin:
        raise ConfigError(f"env.num_envs = {show(part.config.env.num_envs)}{_at(label)} is not read here; set num_envs")
    aliases.update(part.aliases)
    return {path.removeprefix("env."): _plain(_get(part.config, path)) for path in part.origin}


# --------------------------------------------------------------------------------------------------------------- types
def _coerce(hint: Any, value: Any, path: str, label: str) -> Any:
    """``value`` as ``hint`` wants it, or one line saying why not."""
    if isinstance(value, str) and value == "???":
        raise _wrong(hint, value, path, label, "has no value yet")
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        inner = _coerce_plain(arguments[0], value, path, label, hint)
        limits = [limit for limit in arguments[1:] if isinstance(limit, Limit)]
        if not all(limit.allows(inner) for limit in limits):
            raise _wrong(hint, value, path, label)
        return inner
    return _coerce_plain(hint, value, path, label, hint)


def _coerce_plain(hint: Any, value: Any, path: str, label: str, shown: Any) -> Any:
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (a for a in arguments if a is not type(None))
        try:
            return _coerce(inner, value, path, label)
        except ConfigError:
            raise _wrong(hint, value, path, label) from None
    if kind is Literal:
        if any(value == a and type(value) is type(a) for a in arguments):
            return value
    elif kind is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_coerce(arguments[0], v, f"{path}[{i}]", label) for i, v in enumerate(value))
    elif kind is dict:
        if isinstance(value, str) and value.lstrip().startswith("{"):  # the command line has no keys with commas
            with suppress(yaml.YAMLError):
                value = yaml.safe_load(value)
        if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
            return _plain(value)
    elif hint is float:
        if (number := _number(value)) is not None:
            return number
    elif hint is int and isinstance(value, float) and value.is_integer():  # env_steps=1e6
        return int(value)
    elif isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    raise _wrong(shown, value, path, label)


def _number(value: Any) -> float | None:
    """A finite float from a number, or from text YAML 1.1 does not take for one (3e-4)."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value.strip()):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _wrong(hint: Any, value: Any, path: str, label: str, verb: str = "") -> ConfigError | PlacementError:
    allowed = _allowed(hint)
    line = f"{path} = {show(value)}{_at(label)} {verb or 'must be ' + allowed}"
    if path == "placement":
        return PlacementError(f"{line}: this version runs everything in one process; write placement=local")
    return ConfigError(f"{line}; {_cure(hint, value, path, allowed if verb else '')}")


def _cure(hint: Any, value: Any, path: str, allowed: str) -> str:
    """What to write instead."""
    if allowed:
        return f"give it {allowed}"
    plain = _members_of_union(hint)
    choices = [str(c) for h in plain for c in (get_args(h) if get_origin(h) is Literal else ())]
    near = difflib.get_close_matches(str(value), choices, n=1)
    if near:
        return f"did you mean {path}={near[0]}?"
    base = {get_args(h)[0] if get_origin(h) is Annotated else h for h in plain}
    if bool in base and str(value).lower() in ("true", "yes", "on", "1", "false", "no", "off", "0"):
        return f"write {path}={str(str(value).lower() in ('true', 'yes', 'on', '1')).lower()}"
    if str in base and isinstance(value, (int, float, bool)):
        return f"quote it: {path}=\"'{show(value)}'\" (in YAML: '{show(value)}')"
    if any(get_origin(h) is tuple for h in plain) and isinstance(value, (int, str)) and not isinstance(value, bool):
        return f"write {path}=[{value}]"
    option = next((d[path] for d in (describe(Config), describe(EvaluateConfig)) if path in d), None)
    if option is None or option.default == value:
        return f"give {path} such a value"
    return f"the default is {path}={show(option.default)}"


def _members_of_union(hint: Any) -> list[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        return [a for a in get_args(hint) if a is not type(None)]
    return [hint]


def _allowed(hint: Any) -> str:
    """``a number >= 0 and <= 1, or null``."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return f"{_allowed(_members_of_union(hint)[0])}, or null"
    if kind is Annotated:
        return f"{_allowed(arguments[0])} {' and '.join(str(a) for a in arguments[1:])}"
    if kind is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if kind is tuple:
        return f"a list, each {_allowed(arguments[0])}"
    if kind is dict:
        return "a section of names and values"
    return {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}.get(hint, str(hint))


# --------------------------------------------------------------------------------------------------- options compared
MODES: dict[str, str] = {
    # option or section -> the one mode that reads it
    **dict.fromkeys(("env", "model", "cloning", "env_steps"), "embodied"),
    **dict.fromkeys(
        (f"algorithm.{x}" for x in ("horizon", "minibatch_unit", "bootstrap_type", "value_lr")), "embodied"
    ),
    **dict.fromkeys((f"algorithm.{x}_type" for x in ("logprob", "entropy", "reward")), "embodied"),
    "algorithm.value_loss_coef": "embodied",
    **dict.fromkeys((f"evaluation.{x}" for x in ("num_envs", "env_kwargs", "randomize")), "embodied"),
    **dict.fromkeys((f"evaluation.video_{x}" for x in ("episodes", "steps", "size")), "embodied"),
    **dict.fromkeys(("actor", "critic", "rollout", "data", "reward", "warm_start"), "reasoning"),
    **dict.fromkeys((f"algorithm.{x}_length" for x in ("prompt", "response")), "reasoning"),
    **dict.fromkeys(("algorithm.rollout_batch_size", "algorithm.micro_batch_tokens"), "reasoning"),
    **dict.fromkeys(("algorithm.recompute_log_probs", "algorithm.missing_eos_penalty"), "reasoning"),
    **dict.fromkeys((f"evaluation.{x}" for x in ("n", "response_length", "temperature", "top_k")), "reasoning"),
    **dict.fromkeys((f"evaluation.{x}" for x in ("top_p", "min_p", "repetition_penalty")), "reasoning"),
}


def mode_of(path: str) -> str | None:
    """The one mode that reads an option; None where both do."""
    parts = path.split(".")
    heads = (".".join(parts[:i]) for i in range(len(parts), 0, -1))
    return next((MODES[head] for head in heads if head in MODES), None)


UNREAD: dict[str, tuple[str, Callable[[Config], bool]]] = {
    # options -> (where they are read, is that so); commas join options with one rule
    "algorithm.desired_kl": (
        "algorithm.lr_schedule=adaptive",
        lambda c: c.algorithm.lr_schedule == "adaptive",
    ),
    "algorithm.lr_end": (
        "algorithm.lr_schedule=linear or cosine",
        lambda c: c.algorithm.lr_schedule in ("linear", "cosine"),
    ),
    "algorithm.reward_shift,algorithm.reward_scale": (
        "algorithm.reward_norm=batch, group or running",
        lambda c: c.algorithm.reward_norm is not None,
    ),
    "algorithm.kl_loss_coef,algorithm.kl_loss_type": (
        "algorithm.use_kl_loss=true",
        lambda c: c.algorithm.use_kl_loss,
    ),
    "algorithm.kl_penalty,algorithm.kl_ctrl.type,algorithm.kl_ctrl.kl_coef": (
        "algorithm.use_kl_in_reward=true",
        lambda c: c.algorithm.use_kl_in_reward,
    ),
    "algorithm.kl_ctrl.horizon,algorithm.kl_ctrl.target_kl": (
        "algorithm.use_kl_in_reward=true and algorithm.kl_ctrl.type=adaptive",
        lambda c: c.algorithm.use_kl_in_reward and c.algorithm.kl_ctrl.type == "adaptive",
    ),
    "algorithm.off_policy_cap": (
        "algorithm.off_policy_correction=token or sequence",
        lambda c: c.algorithm.off_policy_correction is not None,
    ),
    "algorithm.gae_lambda": ("algorithm.adv_type=gae", lambda c: c.algorithm.adv_type == "gae"),
    "model.hidden_gain,model.policy_gain,model.value_gain": (
        "model.policy=actor_critic and model.orthogonal_init=true",
        lambda c: c.model.policy == "actor_critic" and c.model.orthogonal_init,
    ),
    "model.obs_clip": ("model.normalize_obs=true", lambda c: c.model.normalize_obs),
    "model.backbone,model.hidden,model.activation,model.layer_norm,model.distribution": (
        "model.policy=actor_critic",
        lambda c: c.model.policy == "actor_critic",
    ),
    "model.width,model.depth,model.heads,model.bins,model.decode,model.temperature,model.word_buckets": (
        "model.policy=token",
        lambda c: c.model.policy == "token",
    ),
    "cloning.steps": ("model.policy=token", lambda c: c.model.policy == "token"),
    "cloning.dataset,cloning.episodes,cloning.foresight_steps,cloning.batch_size,cloning.lr": (
        "cloning.steps >= 1",
        lambda c: c.cloning.steps > 0,
    ),
    "model.state_dependent_std,model.init_log_std,model.min_log_std,model.max_log_std": (
        "model.policy=actor_critic and model.distribution=gaussian or squashed_gaussian",
        lambda c: c.model.policy == "actor_critic" and c.model.distribution != "categorical",
    ),
    "evaluation.randomize": ("env.randomize=true", lambda c: c.env.randomize),
    "evaluation.temperature,evaluation.top_k,evaluation.top_p,evaluation.min_p": (
        "evaluation.deterministic=false",
        lambda c: not c.evaluation.deterministic,
    ),
    "critic.use_critic_model,critic.concurrent,critic.model.path,critic.model.architecture,critic.model.dtype,"
    "critic.model.gradient_checkpointing,critic.update_epoch,critic.global_batch_size,critic.lr,critic.lr_schedule,"
    "critic.lr_warmup,critic.max_grad_norm,critic.weight_decay,algorithm.critic_warmup,algorithm.value_clip,"
    "algorithm.huber_delta": (
        "algorithm.adv_type=gae",
        lambda c: c.mode == "embodied" or c.algorithm.adv_type == "gae",
    ),
    "critic.lr_end": (
        "critic.lr_schedule=linear or cosine",
        lambda c: (c.critic.lr_schedule or c.algorithm.lr_schedule) in ("linear", "cosine"),
    ),
    "rollout.overlong_penalty": ("rollout.overlong_buffer >= 1", lambda c: c.rollout.overlong_buffer > 0),
    "algorithm.missing_eos_penalty": ("rollout.truncation=terminal", lambda c: c.rollout.truncation == "terminal"),
    "algorithm.prompt_length,data.train,data.eval,data.prompt_key,data.answer_key,data.suffix,data.system,"
    "data.chat_template": (
        "data.task=null",
        lambda c: c.data.task is None,
    ),
    "actor.tokenizer": ("data.task=null", lambda c: c.data.task is None),
    "actor.model.architecture": ("actor.model.path=null", lambda c: c.actor.model.path is None),
    "warm_start.steps": ("data.task", lambda c: c.data.task is not None),
    "warm_start.batch_size,warm_start.lr,warm_start.forget": (
        "warm_start.steps >= 1",
        lambda c: c.warm_start.steps > 0,
    ),
    "reward.path": ("reward.grader=auto", lambda c: c.reward.grader == "auto"),
    "reward.name": ("reward.path", lambda c: c.reward.path is not None),
    "reward.timeout_s": ("reward.workers >= 1, or null", lambda c: c.reward.workers != 0),
    "reward.format_weight": ("reward.format", lambda c: c.reward.format is not None),
    "reward.model.pairs": (
        "data.task, and reward.model.path=null",
        lambda c: c.data.task is not None and c.reward.model.path is None,
    ),
    "reward.model.steps,reward.model.batch_size,reward.model.lr": (
        "reward.model.pairs >= 1",
        lambda c: c.reward.model.pairs > 0,
    ),
    "evaluation.video_steps,evaluation.video_size": (
        "evaluation.video_episodes >= 1",
        lambda c: c.evaluation.video_episodes > 0,
    ),
}
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
        if mode_of(path) not in (None, config.mode) and _get(config, path) not in (None, False):
            told = f"{path} = {show(_get(config, path))} is set but not read"
            raise ConfigError(f"{told}; it needs mode={mode_of(path)}, or leave it out")
    _check_placement(config)
    _check_algorithm(config)
    if config.mode == "embodied":
        _check_robot(config)
    else:
        _check_language(config)
    for paths, (cure, is_read) in UNREAD.items():
        for path in paths.split(","):
            # null and false are how one says "not this"
            if path in explicit and _get(config, path) not in (None, False) and not is_read(config):
                raise ConfigError(
                    f"{path} = {show(_get(config, path))} is set but not read; it needs {cure}, or leave it out"
                )


def _check_robot(config: Config) -> None:
    """What mode=embodied needs."""
    _check_sizes(config)
    if config.updates is None and config.env_steps is None:
        raise ConfigError("updates = null and env_steps = null: nothing says how long to train; write updates=100")
    model = config.model
    if model.policy == "token" and not model.shared_backbone:
        raise ConfigError("model.shared_backbone = false: model.policy=token has one trunk; leave it out")
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
    for path, batch in (
        ("algorithm.global_batch_size", a.global_batch_size),
        ("critic.global_batch_size", config.critic.global_batch_size or a.global_batch_size),
    ):
        if total % batch:
            raise ConfigError(
                f"algorithm.rollout_batch_size = {total} is not a multiple of {path} = {batch} (prompts); nearest: "
                f"{_nearest(_divisors(total), batch)}"
            )
    if a.micro_batch_size is not None and a.micro_batch_size > a.global_batch_size * a.group_size:
        raise ConfigError(
            f"algorithm.micro_batch_size = {a.micro_batch_size} (responses) must be <= algorithm.global_batch_size x "
            f"group_size = {a.global_batch_size * a.group_size}; leave it null"
        )
    _check_controller(config, responses, "algorithm.rollout_batch_size x group_size")


def _check_placement(config: Config) -> None:
    """cluster.*: what this version runs is one process on one device. Raises PlacementError."""
    roles = ("env", "rollout", "actor") if config.mode == "embodied" else LANGUAGE_ROLES
    cluster = config.cluster
    if cluster.num_nodes > 1:
        raise PlacementError(
            f"cluster.num_nodes = {cluster.num_nodes}: this version runs everything in one process (placement=local); "
            "write cluster.num_nodes=1"
        )
    for entry, devices in cluster.component_placement.items():
        label = f"cluster.component_placement = {{{entry}: {show(devices)}}}"
        for role in (word.strip() for word in entry.split(",")):
            if role not in roles:
                near = difflib.get_close_matches(role, roles, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise PlacementError(
                    f"{label}: {role} is no role of mode={config.mode}; {hint}roles: {', '.join(roles)}"
                )
        if str(devices) not in ("all", "0", "0-0"):
            raise PlacementError(f"{label}: this version uses one device; write {{{entry}: all}}")
    if len(cluster.component_placement) > 1:
        joined = ",".join(cluster.component_placement)
        raise PlacementError(
            f"cluster.component_placement = {show(cluster.component_placement)}: entries are processes, and this "
            f'version has one; join the roles: {{"{joined}": all}}'
        )


LANGUAGE_ROLES = ("rollout", "actor", "critic", "reference", "reward")
"""Parts of a system of mode=reasoning."""


def _check_evaluation(config: EvaluateConfig, explicit: Collection[str]) -> None:
    """What can be said before the checkpoint is opened."""
    if not config.checkpoint:
        raise ConfigError(
            "checkpoint = '' must name a checkpoint or run directory; write checkpoint=runs/NAME/DATE-SEED"
        )
    for path in ("video_episodes", "video_steps", "video_size"):
        if path in explicit and not config.video:
            raise ConfigError(
                f"{path} = {getattr(config, path)} is set but not read; it needs video=true, or leave it out"
            )
    for path in ("temperature", "top_k", "top_p", "min_p"):
        if path in explicit and config.deterministic:
            raise ConfigError(
                f"{path} = {getattr(config, path)} is set but not read; it needs deterministic=false, or leave it out"
            )
    if config.n > 1 and config.deterministic:
        raise ConfigError(
            f"n = {config.n}, but deterministic = true: all {config.n} responses would be the same; write "
            "deterministic=false"
        )


def check_evaluation(config: EvaluateConfig, mode: str, explicit: Collection[str]) -> None:
    """Options that the checkpoint's mode does not read. Raises ConfigError."""
    other = EVALUATE_MODES["reasoning" if mode == "embodied" else "embodied"]
    for path in sorted({path.partition(".")[0] for path in explicit} & set(other)):
        if getattr(config, path) not in (None, False, ()):
            raise ConfigError(
                f"{path} = {show(getattr(config, path))} is set but not read: {config.checkpoint} is a "
                f"{'robot policy' if mode == 'embodied' else 'language model'}; leave it out"
            )


EVALUATE_MODES = {
    "embodied": ("env", "num_envs", "video", "video_episodes", "video_steps", "video_size"),
    "reasoning": ("data", "n", "response_length", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
}
"""Options of ``embodied-ppo evaluate`` that one mode reads."""


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


def _check_sizes(config: Config) -> None:
    """Batches must tile the rollout, groups the environments."""
    a, num_envs = config.algorithm, config.env.num_envs
    total, batch, micro = a.horizon * num_envs, a.global_batch_size, a.micro_batch_size
    rollout = f"algorithm.horizon x env.num_envs = {a.horizon} x {num_envs} = {total}"
    unit = a.horizon if a.minibatch_unit == "column" else 1
    columns = f"algorithm.horizon = {a.horizon} (algorithm.minibatch_unit = column)"
    if batch % unit:
        cure = _nearest([unit * d for d in _divisors(num_envs)], batch)
        raise ConfigError(f"algorithm.global_batch_size = {batch} is not a multiple of {columns}; nearest: {cure}")
    if total % batch:
        cure = _nearest([unit * d for d in _divisors(total // unit)], batch)
        raise ConfigError(f"{rollout} is not a multiple of algorithm.global_batch_size = {batch}; nearest: {cure}")
    if micro is not None and micro > batch:
        raise ConfigError(
            f"algorithm.micro_batch_size = {micro} must be <= algorithm.global_batch_size = {batch}; "
            f"write algorithm.micro_batch_size={batch}"
        )
    if micro is not None and micro % unit:
        cure = _nearest([unit * k for k in range(1, batch // unit + 1)], micro)
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


def _nearest(allowed: Sequence[int], value: int) -> str:
    """The closest allowed numbers below and above."""
    below, above = [x for x in allowed if x <= value][-1:], [x for x in allowed if x > value][:1]
    return ", ".join(map(str, below + above))


# ---------------------------------------------------------------------------------------------------------- suggestion
def _suggest(cls: type, raw: str) -> str:
    """Nearest valid name (same section, then the same name elsewhere, then anything alike) and what it allows."""
    options = describe(cls)
    known = {**{p: (p,) for p in options}, **alias_paths(cls)}
    section, _, leaf = raw.rpartition(".")
    homes = [p for p in known if p.rpartition(".")[2] == leaf]
    if homes:
        where = " or ".join(f"{p}{_reads(p, known)}" for p in homes[:2])
        return f"{leaf} belongs to {where}" + _may(options, known[homes[0]])
    mates = {p.rpartition(".")[2]: p for p in known if p.rpartition(".")[0] == section}
    everyone = {p.rpartition(".")[2]: p for p in known}
    whole = {} if section in sections(cls) else known  # a known section would make its shortest name look alike
    for names, text, cutoff in ((mates, leaf, 0.6), (whole, raw, 0.75), (everyone, leaf, 0.75)):
        near = difflib.get_close_matches(text, list(names), n=1, cutoff=cutoff)
        if near:
            path = near[0] if names is whole else str(names[near[0]])
            return f"did you mean {path}{_reads(path, known)}?" + _may(options, known[path])
    home = section if section in sections(cls) else ""
    return f"{home or 'the top level'} has: {', '.join(_members(cls, home))}"


def _reads(path: str, known: Mapping[str, tuple[str, ...]]) -> str:
    return "" if known[path] == (path,) else f" (= {', '.join(known[path])})"


def _may(options: Mapping[str, Option], targets: Sequence[str]) -> str:
    return f" ({options[targets[0]].allowed}; default {show(options[targets[0]].default)})"


def _members(cls: type, section: str) -> list[str]:
    """Names directly under a section."""
    names = (
        p[len(section) + 1 if section else 0 :] for p in describe(cls) if not section or p.startswith(section + ".")
    )
    return list(dict.fromkeys(n.partition(".")[0] for n in names))


# ------------------------------------------------------------------------------------------------------------- schema
@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def describe(cls: type, prefix: str = "") -> dict[str, Option]:
    """Path -> Option for every option, in the order of the source; the meaning is the string under the field."""
    meanings = _meanings(cls)
    result: dict[str, Option] = {}
    for f in fields(cls):
        hint, path = _hints(cls)[f.name], prefix + f.name
        if is_dataclass(hint) and isinstance(hint, type):
            result |= describe(hint, f"{path}.")
            continue
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        plain = _members_of_union(hint)[0]
        limit = " and ".join(str(a) for a in get_args(plain)[1:]) if get_origin(plain) is Annotated else ""
        if hint is not plain:
            limit = f"{limit} or null".strip()
        kind = _allowed(get_args(plain)[0] if get_origin(plain) is Annotated else plain)
        result[path] = Option(path, meanings.get(f.name, ""), kind, limit, default, hint)
    return result


def _meanings(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                found[node.target.id] = after.value.value
    return found


@cache
def sections(cls: type) -> frozenset[str]:
    """Paths that hold options: env, algorithm, algorithm.kl_ctrl, ..."""
    parents = (p.split(".")[:-1] for p in describe(cls))
    return frozenset(".".join(parts[: i + 1]) for parts in parents for i in range(len(parts)))


@cache
def alias_paths(cls: type) -> dict[str, tuple[str, ...]]:
    """Every alias of ``cls`` as a full path -> the canonical paths it sets."""
    options = describe(cls)
    found: dict[str, tuple[str, ...]] = {}
    for section, table in ALIASES.items():
        dot = f"{section}." if section else ""
        for alias, names in table.items():
            if all(dot + name in options for name in names):
                found[dot + alias] = tuple(dot + name for name in names)
    if cls is Config:
        found[DUAL_CLIP] = ("algorithm.clip_ratio_c",)
    return found


def relevant(config: Config) -> dict[str, Any]:
    """``dump`` without the options that only the other mode reads."""

    def walk(node: dict[str, Any], prefix: str) -> dict[str, Any]:
        kept = {name: value for name, value in node.items() if mode_of(prefix + name) in (None, config.mode)}
        nested = {name for name in kept if prefix + name in sections(Config)}
        return {name: walk(value, f"{prefix}{name}.") if name in nested else value for name, value in kept.items()}

    return walk(dump(config), "")


def dump(config: Any) -> dict[str, Any]:
    """The config as plain dictionaries, lists, numbers and text; ``load(type(config), dump(config)) == config``."""
    return _plain(asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else copy.deepcopy(value)


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return {**old, **{k: _merged(old.get(k), v) for k, v in new.items()}}
    return new


def _same(a: Any, b: Any) -> bool:
    numbers = _number(a), _number(b)
    return a == b if None in numbers else numbers[0] == numbers[1]


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def show(value: Any) -> str:
    """A value as the command line would take it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value if value and value.isprintable() else repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(show, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {show(v)}" for k, v in value.items()) + "}"
    return repr(value)


def _at(label: str) -> str:
    return f" ({label})" if label else ""
