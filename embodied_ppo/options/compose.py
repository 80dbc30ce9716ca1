"""YAML files and overrides -> typed configs; Hydra composes the files."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_envs.base.errors import CheckpointError, ConfigError, choose, shorten, show, show_path
from embodied_ppo.core import guarded_files
from embodied_ppo.core.errors import PlacementError
from embodied_ppo.options.config_folders import ConfigFolders, config_folders, hydra_message

if TYPE_CHECKING:  # hydra and torch are imported inside the functions: --help answers at once
    from hydra.core.override_parser.types import Override

    from embodied_ppo.options.loader import Loaded
    from embodied_ppo.options.schema import EvaluateConfig

PROGRAM = "embodied-ppo"
FLAGS = "command line"  # label of the layer of options that were given as arguments
CALL = "Python call"  # the same of options that were given to a function of the Python API
# Labels of the options that were given to a command or function, and not in a file.
GIVEN = (FLAGS, CALL)
# Commands that continue a run of theirs with the run's options (resume=RUN).
RESUMABLE = ("train", "distill")
# Options of the section env that demos reads.
DEMOS_ENV = ("id", "kwargs", "cameras", "image_size", "randomize", "num_threads")


def prepare(
    args: argparse.Namespace,
    lines: Sequence[str],
    *,
    check: bool = True,
    partial: bool = False,
    label: str = FLAGS,
) -> Loaded:
    """Compose, type and check the options of a command.

    Args:
        args: Arguments of the command line.
        lines: Overrides, ``option=value``.
        check: Compare the options with each other.
        partial: Accept options that are ``???``; the options are then not compared.
        label: What messages call the origin of ``lines``, one of GIVEN.

    Raises:
        ConfigError: An option is refused.
        PlacementError: The placement is refused.
        CheckpointError: The run to resume cannot be read.
        EnvError: The task has no such term or command.
    """
    from embodied_ppo.options import loader as strict
    from embodied_ppo.options import openpi_configs, term_names, validation
    from embodied_ppo.options.schema import OWN_OPTIONS, Config, DemosConfig, EvaluateConfig

    cls = OWN_OPTIONS.get(args.command, Config)
    if cls is DemosConfig:
        return strict.read(DemosConfig, _demos_layers(_layers(args, lines, Config, label), lines))
    loaded = strict.read(cls, _layers(args, lines, cls, label), partial=partial)
    if isinstance(loaded.config, Config) and not loaded.config.resume:
        model = loaded.config.model
        if model.config_name is not None:
            openpi_configs.check(model.config_name, str(model.checkpoint))
        if not loaded.missing:
            term_names.check(loaded.config.env)
    evaluated: Any = loaded.config
    if cls is EvaluateConfig:
        _check_evaluated_terms(evaluated)
    if not check or loaded.missing:
        return loaded
    config, origin = loaded.config, loaded.origin
    if args.command == "clone":
        for path in ("updates", "env_steps", "eval_every", "save_every"):
            if origin.get(path) == label and getattr(config, path) is not None:
                raise ConfigError(
                    f"remove {path}, or write it when PPO goes on (train resume=RUN run_dir=NEW"
                    f" {path}=VALUE): clone makes no updates and ignores {path} ="
                    f" {getattr(config, path)} ({label})"
                )
        return loaded  # build.clone compares the rest
    if isinstance(config, Config):
        arguments = [path for path, label in origin.items() if label in GIVEN]
        validation.check_command(config, args.command, arguments)
    checked = config
    if args.command == "fit":  # fit reads device_memory_gb, which placement=local does not
        checked = replace(config, cluster=replace(config.cluster, device_memory_gb=0.0))
    validation.check(checked, explicit=loaded.deliberate({label}))
    if isinstance(config, Config) and config.updates is not None:
        if origin.get("env_steps") == label and origin["updates"] != label:
            raise ConfigError(
                f"add updates=null: updates = {config.updates} ({origin['updates']}) wins over"
                f" env_steps = {config.env_steps} ({label})"
            )
    return loaded


def override_lines(command: str, options: Mapping[str, Any]) -> list[str]:
    """Return Python values as overrides ``option=value`` of a command.

    Args:
        command: The command that reads the options.
        options: Name -> value. Names have dots or, as keywords do, two underscores
            (``env__num_envs``). A section may be a mapping: {"env": {"num_envs": 8}}. Groups are
            options, too: experiment, placement, mode.
    """
    from embodied_ppo.options import loader as strict
    from embodied_ppo.options.schema import OWN_OPTIONS, Config

    cls = OWN_OPTIONS.get(command, Config)
    known = {*strict.describe(cls), *strict.alias_paths(cls)}
    lines: list[str] = []
    try:
        options = _builtin(options)
    except RecursionError as error:
        raise ConfigError(
            "write a value with fewer levels: an option contains itself, or too many levels"
        ) from error
    for name, value in options.items():
        path = str(name).replace("__", ".")
        if isinstance(value, Mapping) and path not in known:
            inner = {f"{path}.{key}": entry for key, entry in value.items()}
            lines += override_lines(command, inner)
        else:
            lines.append(f"{path}={_hydra_value(value)}")
    return lines


def _hydra_value(value: Any) -> str:
    """Return a value in the grammar of overrides; texts are quoted."""
    from hydra.core.override_parser.types import Quote, QuotedString

    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_value, value))}]"
    if isinstance(value, dict):  # ``loader`` reads such a text; the grammar allows fewer keys
        import yaml

        value = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9).strip()
    return QuotedString(value, Quote.single).with_quotes()


def _builtin(value: Any) -> Any:
    """Return a value as Python's own types; paths and torch's devices and dtypes become texts.

    Raises:
        ConfigError: It is of another type, such as bytes or a function.
    """
    if isinstance(value, Mapping):
        return {str(key): _builtin(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_builtin(entry) for entry in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _builtin(value.tolist())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, os.PathLike) or type(value).__module__ == "torch":
        return str(value)
    kind = type(value).__name__
    raise ConfigError(f"write a number, text, path, list or mapping: an option cannot be a {kind}")


def _demos_layers(
    layers: Sequence[tuple[str, dict[str, Any]]], lines: Sequence[str]
) -> list[tuple[str, dict[str, Any]]]:
    """Return what demos reads of the layers: section env of files, everything of the flags."""
    from embodied_ppo.options.describe import alias_paths, describe
    from embodied_ppo.options.schema import Config, DemosConfig

    modes = [options["mode"] for _, options in layers if "mode" in options]
    if modes and modes[-1] != "embodied":
        example = "write experiment=tabletop_token, or another robot's"
        raise ConfigError(f"mode = {modes[-1]}: demos records a robot's expert; {example}")
    own = {path for path in describe(DemosConfig) if not path.startswith("env.")}
    readable = {*own, *(f"env.{name}" for name in DEMOS_ENV)}
    *files, (label, flags) = layers
    given = {p: v for name, v in flags.items() for p in alias_paths(Config).get(name, (name,))}
    unread = {path: v for path, v in given.items() if path in {*describe(Config)} - readable}
    groups = ("algorithm=", "model=", "placement=")
    unread |= dict(line.split("=", 1) for line in lines if line.startswith(groups))
    for path, value in unread.items():
        fact = f"remove {path}: demos ignores {path} = {show(value)} ({label})"
        raise ConfigError(f"{fact}; it reads {', '.join(sorted(readable))}")
    of_files = [
        (file, {p: v for p, v in options.items() if p in own or p.startswith("env.")})
        for file, options in files
    ]
    return [*of_files, (label, flags)]


# ------------------------------------------------------------------------------------------- layers
def _layers(
    args: argparse.Namespace, lines: Sequence[str], cls: type, label: str
) -> list[tuple[str, dict[str, Any]]]:
    """Return (label, path -> value) from weak to strong.

    The order is: files as in the defaults list, groups that the command line chose, flags.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from embodied_ppo.options import loader as strict

    folders = config_folders(args)
    overrides = parse(lines, folders)
    groups = {o.key_or_group: o for o in overrides if folders.selects(o) and not o.is_delete()}
    resume = _resumed_run(overrides) if folders.primary in RESUMABLE else None
    files: list[tuple[str, Mapping[str, Any]]] = []
    if args.command in RESUMABLE and "experiment" not in groups and resume is not None:
        path, content = _stored(resume)
        nodes = [OmegaConf.create(content)]
        files.append((f"{strict.STORED}, {path}", content))
    else:
        choices = [group_choice(o) for o in overrides if folders.selects(o)]
        if args.command in ("train", "clone") and "experiment" not in groups:
            choices += _default_experiment(groups.get("mode"), overrides)
        composed = folders.compose(folders.primary, choices)
        chosen = composed.pop("hydra").runtime.choices
        nodes = [composed]
        files += folders.files(folders.primary, chosen)
        if experiment := chosen.get("experiment"):
            file = folders.label(f"experiment/{experiment}")
            title = {"name": str(experiment).replace("/", "-")}
            files.insert(0, (file, title))
            nodes.insert(0, OmegaConf.create(title))
    # A group that the command line chose overrides the experiment.
    for group, override in groups.items():
        if group not in ("experiment", "mode") and override.value() is not None:
            node = folders.compose(None, [f"+{group_choice(override).lstrip('+')}"])
            chosen = node.pop("hydra").runtime.choices
            nodes.append(node)
            files += folders.files(f"{group}/{override.value()}", chosen)
    flags = OmegaConf.create({})
    for o in overrides:
        if not o.is_delete() and not folders.selects(o):
            try:
                OmegaConf.update(flags, o.key_or_group, o.value(), force_add=True)
            except (OmegaConfBaseException, TypeError, ValueError) as e:
                fact = f"{o.input_line} is not understood ({hydra_message(e)})"
                raise ConfigError(f"{fact}; correct the value, or remove it") from e
    if resume is None and "experiment" not in groups and folders.primary in (*RESUMABLE, "clone"):
        if title := _task_name(flags):
            nodes.append(OmegaConf.create(title))
            files.append(("env.id", title))
    merged = OmegaConf.merge(*nodes)
    for o in overrides:
        if o.is_delete() and not folders.selects(o):
            _delete(merged, o)
        elif not o.is_delete() and o.value() == {}:  # merged with the content of files
            _refuse_unchanged(merged, o)
    of_files = strict.leaves(cls, plain(merged), files[-1][0] if files else "")
    origin = {path: _origin(path, files) for path in of_files}
    strength = {file: i for i, (file, _) in enumerate(files)}
    layers = [
        (file, {path: value for path, value in of_files.items() if origin[path] == file})
        for file in sorted(strength, key=strength.__getitem__)
    ]
    layers.append((label, strict.leaves(cls, plain(flags), label)))
    return _resolved(layers, [OmegaConf.create(strict.dump(cls())), merged, flags], cls)


def _origin(path: str, files: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return the label of the last file that sets an option."""
    for label, content in reversed(files):
        node: Any = content
        for name in path.split("."):
            node = node.get(name) if isinstance(node, Mapping) and name in node else KeyError
        if node is not KeyError:
            return label
    return files[0][0] if files else ""


def _resumed_run(overrides: Sequence[Override]) -> str | None:
    """Return the run that ``resume=..`` names; None: it names none, or the newest one."""
    values = [o.value() for o in overrides if o.key_or_group == "resume" and not o.is_delete()]
    unnamed = not values or values[0] in (None, "auto", "") or isinstance(values[0], bool)
    return None if unnamed else str(values[0])


def _default_experiment(mode: Override | None, overrides: Sequence[Override]) -> list[str]:
    """Return the override that replaces train.yaml's experiment by that of mode=reasoning."""
    if mode is None or mode.value() != "reasoning":
        return []
    own = any(o.key_or_group.startswith(("actor.", "data.")) for o in overrides)
    return ["~experiment" if own else "experiment=arithmetic"]


def _task_name(flags: Any) -> dict[str, str] | None:
    """Return options that name the run after env.id of the command line."""
    env = plain(flags).get("env")
    task = env.get("id") if isinstance(env, dict) else None
    if not task or "${" in str(task):  # the value of ${..} is in other layers
        return None
    if isinstance(task, list):
        task = f"{task[0]}-and-{len(task) - 1}-more"
    return {"name": re.sub("[/:]", "-", str(task)), "description": ""}


def _delete(merged: Any, override: Override) -> None:
    """Apply ``~option``: remove an option of files."""
    from omegaconf import OmegaConf

    parent, _, leaf = override.key_or_group.rpartition(".")
    section = OmegaConf.select(merged, parent) if parent else merged
    if not OmegaConf.is_dict(section) or leaf not in section:
        raise ConfigError(f"leave out {override.input_line}: no file sets {override.key_or_group}")
    del section[leaf]


def _refuse_unchanged(merged: Any, override: Override) -> None:
    """Refuse ``option={}``, which adds nothing to what a file sets."""
    from omegaconf import OmegaConf

    path = override.key_or_group
    if OmegaConf.select(merged, path):
        raise ConfigError(
            f"write ~{path}, which removes what a file sets; {path}={{}} would add nothing to it"
        )


def _resolved(
    layers: list[tuple[str, dict[str, Any]]], nodes: Sequence[Any], cls: type
) -> list[tuple[str, dict[str, Any]]]:
    """Replace interpolations by the values they name in the merged ``nodes``.

    Raises ConfigError that names the option at fault.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from embodied_ppo.options import loader as strict

    if not any("${" in repr(options) for _, options in layers):
        return layers
    try:
        merged = OmegaConf.merge(*nodes)
    except (OmegaConfBaseException, TypeError, ValueError):
        # A list or number stands where a section belongs: let the loader name it.
        for label, options in layers:
            fixed = {p: v for p, v in options.items() if not str(v).startswith("${")}
            strict.read(cls, [(label, fixed)], partial=True)
        # OmegaConf merges no list with a section; an option can accept both.
        merged = OmegaConf.create(reduce(strict.merged, map(plain, nodes)))

    def resolve(value: Any, path: str, label: str) -> Any:
        # The options of a run are resolved, and "${" in them is text, as in a path.
        if "${" not in repr(value) or label.startswith(strict.STORED):
            return value
        if isinstance(value, dict):
            return {name: resolve(entry, f"{path}.{name}", label) for name, entry in value.items()}
        try:
            selected = OmegaConf.select(merged, path)
            is_config = OmegaConf.is_config(selected)
            return OmegaConf.to_container(selected, resolve=True) if is_config else selected
        except (OmegaConfBaseException, RecursionError) as e:
            fact = f"{path} = {show(value)} ({label}): {hydra_message(e)}"
            raise ConfigError(f"{fact}; write a value, or name an option that has one") from e

    return [
        (label, {path: resolve(value, path, label) for path, value in options.items()})
        for label, options in layers
    ]


def plain(node: Any) -> Any:
    """Return Hydra's containers as lists and dictionaries, with ``${..}`` unresolved."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


def _stored(resume: str) -> tuple[str, dict[str, Any]]:
    """Return path and content of config.yaml of a run, given its directory or a checkpoint's."""
    from embodied_ppo.options import loader as strict

    folder = Path(resume)
    if not os.path.isdir(folder):
        raise CheckpointError(
            f"name a run, or write resume=auto: resume={show_path(resume)} is no directory"
        )
    file = config_file(folder)
    if file is None:
        hint = "name a run directory or a checkpoint inside one"
        raise CheckpointError(f"{hint}: resume={show_path(resume)} holds no config.yaml")
    with guarded_files.refusing_damage(file, "name another run or checkpoint"):
        content = guarded_files.check_fields(strict.read_yaml(file), {})
    # The run may have been moved since: resume has its directory.
    return str(file), {k: v for k, v in content.items() if k not in ("resume", "run_dir")}


def _check_evaluated_terms(config: EvaluateConfig) -> None:
    """Refuse terms and commands that the task of the checkpoint's run lacks, see term_names."""
    from embodied_ppo.options import loader as strict
    from embodied_ppo.options import term_names
    from embodied_ppo.options.schema import EnvConfig

    rewards, commands = (config.env.get(k) or {} for k in ("rewards", "commands"))
    named = isinstance(rewards, dict) and isinstance(commands, dict) and (rewards or commands)
    file = config_file(Path(config.checkpoint)) if named and config.checkpoint else None
    if file is None:
        return
    with guarded_files.refusing_damage(file, "name another run or checkpoint"):
        trained = strict.read_yaml(file).get("env", {})
    run = file.parent.parent.parent if file.parent.parent.name == "checkpoints" else file.parent
    copies = [] if config.allow_changed_task else [*run.glob("task/*/**/*.py")]
    id = config.env.get("id", trained.get("id"))
    term_names.check(EnvConfig(id=id, rewards=rewards, commands=commands), copies)


def config_file(folder: Path) -> Path | None:
    """Return config.yaml of a run, given its directory or that of a checkpoint."""
    files = (folder / "config.yaml", folder.resolve().parent.parent / "config.yaml")
    return next((file for file in files if file.is_file()), None)


# ---------------------------------------------------------------------------------------- overrides
def parse(lines: Sequence[str], folders: ConfigFolders) -> list[Override]:
    """Return the overrides of one run.

    Refuses several values of an option, and unknown members of a group.
    """
    overrides = []
    for line in lines:
        override = parse_line(line, folders)
        if override.is_interval_sweep():
            raise ConfigError(f"write one value: {line} is an interval")
        if override.is_sweep_override():
            raise ConfigError(f"{line} names several values; add --multirun, or write [a,b]")
        if override.is_hydra_override():
            raise ConfigError(f"remove {line}: hydra.* is for --multirun")
        if folders.selects(override) and override.value() is not None:
            _check_group(override.key_or_group, override.value(), folders)
        overrides.append(override)
    return overrides


def _check_group(group: str, value: Any, folders: ConfigFolders) -> None:
    """Check that ``group=value`` selects one member. Raises ConfigError or PlacementError."""
    options = folders.members(group)
    if isinstance(value, list):
        hint = f"write {group}={value[0] if value else 'NAME'}"
        if len(value) > 1:
            hint += f", or --multirun {group}={','.join(map(str, value))}"
        raise ConfigError(f"{group} = {show(value)} must be one name, not a list; {hint}")
    if str(value) not in options:
        kind = PlacementError if group == "placement" else ConfigError
        raise kind(
            f"{group} = {value}: no such {group}; {choose(str(value), options, 'there are: ')}"
        )


def parse_line(line: str, folders: ConfigFolders) -> Override:
    """Parse ``option=value``. Raises ConfigError with the correct form."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = line.partition("=")
    if not equals and not line.startswith("~"):
        hint = f"{line}=VALUE"
        if line in folders.members("experiment"):
            hint = f"experiment={line}"
        elif os.path.isdir(line) and config_file(Path(line)):
            hint = f"resume={line}"
        raise ConfigError(f"{line} is not of the form option=value; write {hint}")
    if not re.fullmatch(r"(\+\+?|~)?[A-Za-z_][\w/@-]*([.:][\w@-]+)*", key):
        raise ConfigError(
            f"{line}: {key or 'nothing'} is no option's name; write section.option=value"
        )
    try:
        (override,) = OverridesParser.create().parse_overrides([line])
    except (HydraException, ValueError, RecursionError) as e:  # very long numbers, deep lists
        quoted_value = shorten(f"{key}='{value}'", 60)
        raise ConfigError(
            f"{shorten(line, 60)} is not understood ({hydra_message(e)}); quote the value:"
            f' "{quoted_value}"'
        ) from e
    return override


def quoted(line: str) -> str:
    """Quote a dictionary with quoted keys, which Hydra's grammar does not allow."""
    key, equals, value = line.partition("=")
    if not (equals and value.startswith("{") and '"' in value):
        return line
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def group_choice(override: Override) -> str:
    """Return the override of a group as Hydra reads it: ``group=null`` is ``~group``."""
    if override.value() is None and not override.is_delete():
        return f"~{override.key_or_group}"
    return str(override.input_line).removeprefix("++")
