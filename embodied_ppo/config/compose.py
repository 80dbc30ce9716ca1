"""YAML files and overrides -> typed configs, composed by Hydra, which no other module imports."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_ppo.core.errors import (
    CheckpointError,
    ConfigError,
    PlacementError,
    UsageError,
    choose,
    one_line,
    shorten,
    show,
)

if TYPE_CHECKING:  # hydra and torch are imported inside the functions: --help answers at once
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.types import Override

    from embodied_ppo.config.loader import Loaded

PROGRAM = "embodied-ppo"
FLAGS = "command line"
"""Label of the layer of options that were given as arguments."""
CALL = "Python call"
"""The same of options that were given to a function of the Python API."""
GIVEN = (FLAGS, CALL)
"""Labels of the options that were given to a command or function, and not in a file."""
PRIMARY = ("train", "demos", "clone", "distill", "evaluate", "export", "benchmark")
"""Commands with a primary config of their name; the others read train's."""
RESUMABLE = ("train", "distill")
"""Commands that continue a run of theirs with the run's options (resume=RUN)."""
SWEEPS = "runs/sweeps/"
"""Folder of the sweeps; a sweep whose jobs have the same name is in SWEEPS/NAME."""
MAX_FOLDER_NAME = 120
"""Maximum length of the name of a job's folder, characters."""
PACKAGE = "embodied_ppo.configs"
DEMOS_ENV = ("id", "kwargs", "cameras", "image_size", "randomize", "num_threads")
"""Options of the section env that demos reads."""


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
    """
    from embodied_ppo.config import loader as strict
    from embodied_ppo.config import validation
    from embodied_ppo.config.schema import OWN_OPTIONS, Config, DemosConfig

    cls = OWN_OPTIONS.get(args.command, Config)
    if cls is DemosConfig:
        defaults = strict.dump(Config()) | strict.dump(DemosConfig())
        return strict.read(DemosConfig, _demos_layers(lines, _layers(args, lines, defaults, label)))
    loaded = strict.read(cls, _layers(args, lines, strict.dump(cls()), label), partial=partial)
    if not check or loaded.missing:
        return loaded
    config, origin = loaded.config, loaded.origin
    if args.command == "clone":
        for path in ("updates", "env_steps", "eval_every", "save_every"):
            if origin.get(path) == label and getattr(config, path) is not None:
                raise ConfigError(
                    f"{path} = {getattr(config, path)} ({label}) is set but not read by clone,"
                    " which makes no updates; leave it out, or write it when PPO goes on: train"
                    f" resume=RUN run_dir=NEW {path}=.."
                )
        return loaded  # build.clone compares the rest
    if isinstance(config, Config):
        arguments = [path for path, label in origin.items() if label in GIVEN]
        validation.check_command(config, args.command, arguments)
    checked = config
    if args.command == "fit":  # fit reads device_memory_gb, which placement=local does not
        checked = replace(config, cluster=replace(config.cluster, device_memory_gb=0.0))
    compare = validation.check_tuning if args.command == "tune" else validation.check
    compare(checked, explicit=loaded.deliberate({label}))
    if isinstance(config, Config) and config.updates is not None:
        if origin.get("env_steps") == label and origin["updates"] != label:
            raise ConfigError(
                f"env_steps = {config.env_steps} ({label}) is not read: updates = {config.updates} "
                f"({origin['updates']}) wins; add updates=null"
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
    from embodied_ppo.config import loader as strict
    from embodied_ppo.config.schema import OWN_OPTIONS, Config

    cls = OWN_OPTIONS.get(command, Config)
    known = {*strict.describe(cls), *strict.alias_paths(cls)}
    lines: list[str] = []
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

    value = _builtin(value)
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
    """Return a value as Python's own types: paths and unknown objects become texts."""
    if isinstance(value, Mapping):
        return {str(key): _builtin(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_builtin(entry) for entry in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return _builtin(value.tolist())
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _demos_layers(lines: Sequence[str], layers: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return what demos reads of the layers: section env of files, everything of the flags."""
    from embodied_ppo.config import loader as strict
    from embodied_ppo.config.readers import mode_of
    from embodied_ppo.config.schema import Config, DemosConfig

    modes = [node["mode"] for _, node in layers if "mode" in node]
    if modes and modes[-1] != mode_of("env"):
        raise ConfigError(
            f"mode = {modes[-1]}: demos records a robot's expert; write experiment=tabletop_token,"
            " or another robot's"
        )
    options = strict.describe(DemosConfig)
    readable = [*(path for path in options if "." not in path), *(f"env.{n}" for n in DEMOS_ENV)]
    groups = ("algorithm", "model", "placement")
    unread = [f"{g} = .." for g in groups if any(line.startswith(f"{g}=") for line in lines)]
    train_sections = {path.partition(".")[0] for path in strict.describe(Config)}
    for label, node in layers:
        if label in GIVEN:
            known = {k: v for k, v in node.items() if k in train_sections}
            loaded = strict.read(Config, [(label, known)])
            unread += [
                f"{path} = {show(attrgetter(path)(loaded.config))}"
                for path in loaded.origin
                if path not in readable
            ]
    if unread:
        raise ConfigError(
            f"{unread[0]} ({layers[-1][0]}) is set but not read by demos; leave it out. Read are"
            f" {', '.join(readable)}"
        )
    sections = {path.partition(".")[0] for path in options}
    return [
        (label, node if label in GIVEN else {k: v for k, v in node.items() if k in sections})
        for label, node in layers
    ]


def _layers(
    args: argparse.Namespace, lines: Sequence[str], defaults: dict[str, Any], label: str
) -> list[tuple[str, Any]]:
    """Return (label, mapping) from weak to strong.

    The order is: files as in the defaults list, groups that the command line chose, flags.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from embodied_ppo.config.loader import STORED
    from embodied_ppo.config.schema import OWN_OPTIONS, Config

    loader, name = loader_of(args)
    overrides = parse(lines, loader)
    groups = {o.key_or_group: o.value() for o in overrides if _is_group(o, loader)}
    stored = None
    if args.command in RESUMABLE and "experiment" not in groups:
        resume = _resumed_run(overrides) if name in RESUMABLE else None
        if resume is not None:
            stored = _stored(resume)
            lines = [*lines, "~experiment"]
        elif args.command == "train":
            lines = [*lines, *_default_experiment(str(groups.get("mode")), overrides)]
    try:
        parsed, repo = loader._parse_overrides_and_create_caching_repo(name, _forced(lines, loader))
        chosen = create_defaults_list(
            repo=repo,
            config_name=name,
            overrides_list=parsed,
            prepend_hydra=True,
            skip_missing=False,
        )
        files, flagged, experiment = [], [], chosen.overrides.known_choices.get("experiment")
        for default in chosen.defaults:
            path = default.config_path or ""
            if path.partition("/")[0] == "hydra":
                continue
            node = ConfigLoaderImpl._compose_config_from_defaults_list(loader, [default], repo)
            node.pop("hydra", None)
            source = getattr(repo.load_config(path), "path", "")
            root = "configs" if source == f"pkg://{PACKAGE}" else source.removeprefix("file://")
            # A group that the command line chose overrides the experiment.
            overrides_files = stored is not None or any(
                g not in ("experiment", "mode") and path.startswith(f"{g}/") for g in groups
            )
            (flagged if overrides_files else files).append((f"{root}/{path}.yaml", node))
            if experiment and path == f"experiment/{experiment}":
                title = OmegaConf.create({"name": str(experiment).replace("/", "-")})
                files.insert(0, (f"{root}/{path}.yaml", title))
        if stored is not None:
            files = [(f"{STORED}, {stored[0]}", OmegaConf.create(stored[1]))]
            flagged = [f for f in flagged if any(f"/{g}/" in f[0] for g in groups)]
        flags = _flags(overrides, loader)
        if stored is None and "experiment" not in groups and name in (*RESUMABLE, "clone"):
            flagged += _task_name(flags)
        layers = [*files, *flagged, (label, flags)]
        _delete(overrides, loader, layers)
    except RecursionError:
        raise ConfigError(
            f"--config-name {name}: its defaults lists name each other for ever; in --config-dir"
            " give your own config another name than the one it lists"
        ) from None
    except (HydraException, OmegaConfBaseException, YAMLError) as e:
        raise ConfigError(_hydra_message(e)) from e
    except UnicodeDecodeError as e:
        raise ConfigError(_not_utf8(args.config_dir)) from e
    return _resolved(layers, defaults, OWN_OPTIONS.get(args.command, Config))


def _resumed_run(overrides: Sequence[Override]) -> str | None:
    """Return the run that ``resume=..`` names; None: it names none, or the newest one."""
    values = [o.value() for o in overrides if o.key_or_group == "resume" and not o.is_delete()]
    unnamed = not values or values[0] in (None, "auto", "") or isinstance(values[0], bool)
    return None if unnamed else str(values[0])


def _default_experiment(mode: str, overrides: Sequence[Override]) -> list[str]:
    """Return the override that replaces train.yaml's experiment by that of another mode."""
    from embodied_ppo.config.rules.select import RULES

    rules = RULES.get(mode)
    if rules is None or rules.default_experiment is None:
        return []
    own = any(o.key_or_group.startswith(rules.experiment_sections) for o in overrides)
    return [f"experiment={'null' if own else rules.default_experiment}"]


def _task_name(flags: Any) -> list[tuple[str, Any]]:
    """Return a layer that names the run after env.id of the command line."""
    from omegaconf import OmegaConf

    task = _plain(flags.env).get("id") if OmegaConf.is_dict(flags.get("env")) else None
    if task is None or "${" in str(task):  # the value of ${..} is in other layers
        return []
    name = str(task).replace("/", "-").replace(":", "-")
    return [("env.id", OmegaConf.create({"name": name, "description": ""}))]


def _not_utf8(folder: str | None) -> str:
    """Name the config that Hydra cannot decode; its error does not."""
    for file in sorted(Path(folder or ".").rglob("*.y*ml")):
        try:
            file.read_bytes().decode()
        except UnicodeDecodeError as e:
            return (
                f"{file}: byte {e.start} (0x{e.object[e.start]:02x}) is not UTF-8; save the file as"
                " UTF-8"
            )
        except OSError:
            continue
    return f"--config-dir {folder}: a file is not UTF-8; save it as UTF-8"


def _resolved(
    layers: Sequence[tuple[str, Any]], defaults: dict[str, Any], cls: type
) -> list[tuple[str, Any]]:
    """Replace interpolations by the values they name.

    Raises ConfigError that names the option at fault.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from embodied_ppo.config import loader as strict

    written = [(label, _plain(node)) for label, node in layers]
    try:
        merged = OmegaConf.merge(OmegaConf.create(defaults), *(node for _, node in layers))
    except (OmegaConfBaseException, TypeError, ValueError) as e:
        # A list or number stands where a section belongs: let the loader name it.
        known = {path.partition(".")[0] for path in strict.describe(cls)}
        for label, node in written:
            values = {name: value for name, value in node.items() if name in known}
            strict.read(cls, [(label, _without_interpolations(values))], partial=True)
        raise ConfigError(_hydra_message(e)) from e
    try:
        resolved = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)
    except (OmegaConfBaseException, RecursionError) as error:
        for label, node in reversed(written):
            for path, value in strict.flat(node).items():
                if "${" not in repr(value):
                    continue
                try:
                    inner = OmegaConf.select(merged, path)
                    if OmegaConf.is_config(inner):
                        OmegaConf.to_container(inner, resolve=True)
                except (OmegaConfBaseException, RecursionError) as e:
                    raise ConfigError(
                        f"{path} = {show(value)} ({label}): {_hydra_message(e)}; write a value, or"
                        " name an option that has one"
                    ) from e
        raise ConfigError(_hydra_message(error)) from error
    return [(label, _pick(node, resolved)) for label, node in written]


def _without_interpolations(node: Any) -> Any:
    """Return nested dictionaries without the entries that are an interpolation."""
    if not isinstance(node, dict):
        return node
    return {
        str(name): _without_interpolations(value)
        for name, value in node.items()
        if not (isinstance(value, str) and "${" in value)
    }


def _hydra_message(error: Exception) -> str:
    """Return Hydra's message without references to Hydra's documentation."""
    text = one_line(error)
    for tail in (" Config search path:", " See https://", " full_key:"):
        text = text.partition(tail)[0]
    pattern = r"(.*Could not find '(?:.*/)?(.*?)') Available options in '.*?': (.*)"
    if match := re.fullmatch(pattern, text):
        return f"{match[1]}; {choose(match[2], match[3].split(), 'there are: ')}"
    return text


def _pick(node: Any, resolved: Any) -> Any:
    """Return ``node`` with its interpolations replaced by their values."""
    if isinstance(node, dict):
        inner = resolved if isinstance(resolved, dict) else {}
        return {str(k): _pick(v, inner.get(k)) for k, v in node.items()}
    return resolved if "${" in repr(node) else node


def _flags(overrides: Sequence[Override], loader: ConfigLoaderImpl) -> Any:
    """Return the values of the command line as one layer."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    node = OmegaConf.create({})
    for o in overrides:
        if not o.is_delete() and not _is_group(o, loader):
            try:
                OmegaConf.update(node, o.key_or_group, o.value(), merge=True, force_add=True)
            except (OmegaConfBaseException, TypeError, ValueError) as e:
                raise ConfigError(
                    f"{o.input_line} is not understood ({_hydra_message(e)}); correct the value, or"
                    " leave it out"
                ) from e
    return node


def _delete(
    overrides: Sequence[Override], loader: ConfigLoaderImpl, layers: Sequence[tuple[str, Any]]
) -> None:
    """Apply ``~option``: remove the option from all layers."""
    from omegaconf import OmegaConf

    for o in overrides:
        if not o.is_delete() or loader.repository.group_exists(o.key_or_group):
            continue
        parent, _, leaf = o.key_or_group.rpartition(".")
        parents = [OmegaConf.select(node, parent) if parent else node for _, node in layers]
        owners = [node for node in parents if OmegaConf.is_dict(node) and leaf in node]
        if not owners:
            raise ConfigError(
                f"{o.input_line}: no file sets {o.key_or_group}, so it cannot be removed; leave"
                " it out"
            )
        for owner in owners:
            del owner[leaf]


def _stored(resume: str) -> tuple[str, dict[str, Any]]:
    """Return path and content of config.yaml of a run, given its directory or a checkpoint's."""
    import yaml

    from embodied_ppo.config import loader as strict

    folder = Path(resume)
    if not folder.is_dir():
        raise CheckpointError(
            f"resume = {resume}: no such directory; name a run, or write resume=auto"
        )
    file = _config_of(folder)
    if file is None:
        raise CheckpointError(
            f"resume = {resume}: holds no config.yaml; name a run directory or a checkpoint"
            " inside one"
        )
    try:
        content = strict.plain_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise CheckpointError(
            f"resume = {resume}: {file} is damaged ({one_line(e)}); name another checkpoint"
        ) from e
    if not isinstance(content, dict):
        raise CheckpointError(
            f"resume = {resume}: {file} is damaged (no options in it); name another checkpoint"
        )
    # The run may have been moved since: resume has its directory.
    return str(file), {k: v for k, v in content.items() if k not in ("resume", "run_dir")}


def _config_of(folder: Path) -> Path | None:
    """Return config.yaml of a run, given its directory or that of a checkpoint."""
    files = (folder / "config.yaml", folder.resolve().parent.parent / "config.yaml")
    return next((file for file in files if file.is_file()), None)


# -------------------------------------------------------------------------------------------- hydra
def config_dir(args: argparse.Namespace) -> str | None:
    """Return --config-dir. Raises UsageError where there is no such directory."""
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise UsageError(f"--config-dir {args.config_dir}: no such directory")
    return args.config_dir


def loader_of(args: argparse.Namespace) -> tuple[ConfigLoaderImpl, str]:
    """Return Hydra's loader of --config-dir and the shipped configs, and the primary config."""
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.object_type import ObjectType
    from hydra.core.plugins import Plugins
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf

    from embodied_ppo.config import loader as strict
    from embodied_ppo.config.schema import Config

    defaults = OmegaConf.create(strict.dump(Config()))  # for interpolations of a sweep

    class Loader(ConfigLoaderImpl):
        """Accept options that no YAML file has: ``loader`` decides which options exist."""

        def load_configuration(
            self, config_name: str | None, overrides: list[str], *args: Any, **kwargs: Any
        ) -> Any:
            forced = _forced(overrides, self)
            return super().load_configuration(config_name, forced, *args, **kwargs)

        def _compose_config_from_defaults_list(self, *args: Any, **kwargs: Any) -> Any:
            composed = super()._compose_config_from_defaults_list(*args, **kwargs)
            return OmegaConf.merge(defaults, composed)

    Plugins.instance()
    setup_globals()
    version.setbase("1.3")
    shipped()
    path = create_config_search_path(f"pkg://{PACKAGE}")
    if config_dir(args):
        path.prepend(provider="command line", path=f"file://{os.path.abspath(args.config_dir)}")
    loader = Loader(config_search_path=path)
    primary = args.command if args.command in PRIMARY else "train"
    name = (args.config_name or primary).removesuffix(".yaml")
    if not loader.repository.config_exists(name):
        configs = loader.get_group_options("", ObjectType.CONFIG)
        names = sorted({n for n in configs if not n.startswith("_")})
        raise UsageError(
            f"--config-name {name}: no such config; {choose(name, names, 'there are: ')}"
        )
    return loader, name


def parse(lines: Sequence[str], loader: ConfigLoaderImpl) -> list[Override]:
    """Return the overrides of one run.

    Refuses several values of an option, and unknown members of a group.
    """
    overrides = []
    for line in lines:
        override = _parse_line(line, loader)
        if override.is_interval_sweep():
            raise ConfigError(
                f"{line}: is an interval, which only {PROGRAM} search reads; write one value"
            )
        if override.is_sweep_override():
            raise ConfigError(
                f"{line} names several values; add --multirun, or give one (a list is written"
                " [a,b])"
            )
        if override.is_hydra_override():
            raise ConfigError(f"{line} is set but not read; hydra.* is for --multirun")
        if override.value() is not None and _is_group(override, loader):
            _check_group(override.key_or_group, override.value(), loader)
        overrides.append(override)
    return overrides


def _check_group(group: str, value: Any, loader: ConfigLoaderImpl) -> None:
    """Check that ``group=value`` selects one member. Raises ConfigError or PlacementError."""
    options = loader.get_group_options(group)
    for member in value if isinstance(value, list) else [value]:
        if str(member) not in options:
            kind = PlacementError if group == "placement" else ConfigError
            raise kind(
                f"{group} = {member}: no such {group};"
                f" {choose(str(member), options, 'there are: ')}"
            )
    if isinstance(value, list):
        cure = f"write {group}={value[0] if value else 'NAME'}"
        if len(value) > 1:
            cure += f", or --multirun {group}={','.join(map(str, value))}"
        raise ConfigError(f"{group} = {show(value)} must be one name, not a list; {cure}")


def _parse_line(line: str, loader: ConfigLoaderImpl) -> Override:
    """Parse ``option=value``. Raises ConfigError with the correct form."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = line.partition("=")
    if not equals and not line.startswith("~"):
        cure = f"{line}=VALUE"
        if line in loader.get_group_options("experiment"):
            cure = f"experiment={line}"
        elif os.path.isdir(line) and _config_of(Path(line)):
            cure = f"resume={line}"
        raise ConfigError(f"{line} is not of the form option=value; write {cure}")
    if not re.fullmatch(r"(\+\+?|~)?[A-Za-z_][\w/@-]*([.:][\w@-]+)*", key):
        raise ConfigError(
            f"{line}: {key or 'nothing'} is no option's name; write section.option=value"
        )
    try:
        (override,) = OverridesParser.create(config_loader=loader).parse_overrides([line])
    except (HydraException, ValueError, RecursionError) as e:  # very long numbers, deep lists
        quoted_value = shorten(f"{key}='{value}'", 60)
        raise ConfigError(
            f"{shorten(line, 60)} is not understood ({_hydra_message(e)}); quote the value:"
            f' "{quoted_value}"'
        ) from e
    return override


def _is_group(override: Override, loader: ConfigLoaderImpl) -> bool:
    """Return whether an override selects a member of a group, and not options of a section."""
    exists = loader.repository.group_exists(override.key_or_group)
    return exists and not isinstance(override.value(), dict)


def quoted(line: str) -> str:
    """Quote a dictionary with quoted keys, which Hydra's grammar does not allow."""
    key, equals, value = line.partition("=")
    if not (equals and value.startswith("{") and '"' in value):
        return line
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def _forced(lines: Sequence[str], loader: ConfigLoaderImpl) -> list[str]:
    """Write ``a=1`` as ``++a=1`` and ``group=null`` as ``~group``; keep what only Hydra reads."""

    def force(line: str) -> str:
        override = _parse_line(line, loader)
        if loader.repository.group_exists(override.key_or_group):
            empty = override.value() is None and not override.is_delete()
            return f"~{override.key_or_group}" if empty else line.removeprefix("++")
        unchanged = override.is_delete() or override.is_hydra_override()
        return line if unchanged else "++" + line.lstrip("+")

    return list(map(force, lines))


# ------------------------------------------------------------------------------------------- sweeps
@dataclass(frozen=True)
class SweepJob:
    """One run of a sweep.

    Attributes:
        number: Position in the sweep, from 0.
        lines: Overrides of the run, ``option=value``.
        options: Option -> value of those that differ between the runs; the seed is last.
        folder: Run directory.
        loaded: Options of the run.
    """

    number: int
    lines: Sequence[str]
    options: Mapping[str, str]
    folder: Path
    loaded: Loaded


def sweep_jobs(args: argparse.Namespace) -> tuple[Path, list[SweepJob]]:
    """Return the folder and the runs of a sweep, which Hydra's basic sweeper lists.

    Raises:
        ConfigError: A run is refused, or another sweeper or launcher is chosen.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    loader, name = loader_of(args)
    given = [_parse_line(line, loader) for line in args.overrides]
    lines = ["hydra/job_logging=none", "hydra/hydra_logging=none", *args.overrides]
    jobs: list[SweepJob] = []
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra(task_name=PROGRAM, config_loader=loader)
        GlobalHydra.instance().initialize(hydra)
        cfg = hydra.compose_config(name, lines, run_mode=RunMode.MULTIRUN).hydra
        for part, target in ("sweeper", "BasicSweeper"), ("launcher", "BasicLauncher"):
            if not cfg[part]._target_.endswith(f".{target}"):
                raise ConfigError(
                    f"hydra/{part} = {cfg[part]._target_}: is not used; --multirun starts the runs"
                    " itself, several at the same time (--jobs N); leave it out"
                )
        params = [f"{k}={v}" for k, v in _plain(cfg.sweeper.params or {}).items()]
        parsed = [_parse_line(line, loader) for line in (*params, *_plain(cfg.overrides.task))]
        for override in parsed:
            if override.is_interval_sweep():
                raise ConfigError(
                    f"{override.input_line}: is an interval, which only {PROGRAM} search reads;"
                    " with --multirun write a list of values"
                )
        batches = BasicSweeper.split_arguments(parsed, None)
        names = _check_jobs([job for batch in batches for job in batch], args)
        folder = str(_plain(cfg.sweep)["dir"])
        if len(names) == 1 and folder.startswith(f"{SWEEPS}${{"):
            below = f"{names.pop()}/{folder.removeprefix(SWEEPS)}".replace("'", "\\'")
            lines.append(f"hydra.sweep.dir='{SWEEPS}{below}'")
        fixed = {o.key_or_group for o in given if not o.is_sweep_override()}
        folders: list[Path] = []
        hydra.multirun(
            name,
            functools.partial(_add_job, args=args, fixed=fixed, jobs=jobs, folders=folders),
            lines,
        )
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(_hydra_message(e)) from e
    except UnicodeDecodeError as e:
        raise ConfigError(_not_utf8(args.config_dir)) from e
    finally:
        GlobalHydra.instance().clear()
    return folders[0], jobs


def _plain(node: Any) -> Any:
    """Return Hydra's containers as lists and dictionaries, with ``${..}`` unresolved."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


def _check_jobs(jobs: Sequence[Sequence[str]], args: argparse.Namespace) -> set[str]:
    """Check every job of a sweep and return the names of their runs. Raises ConfigError."""
    folders: dict[str, int] = {}
    names: set[str] = set()
    for i, job in enumerate(jobs):
        try:
            config = prepare(args, job).config
        except ValueError as e:
            raise type(e)(f"job {i} ({' '.join(o.lstrip('+') for o in job)}): {e}") from e
        folder = config.run_dir
        names.add(config.name)
        if folder is not None and folders.setdefault(folder, i) != i:
            raise ConfigError(
                f"run_dir = {folder} is that of job {folders[folder]} and of job {i}; leave"
                " run_dir out"
            )
    return names


def _add_job(
    _: Any,
    *,
    args: argparse.Namespace,
    fixed: Collection[str],
    jobs: list[SweepJob],
    folders: list[Path],
) -> None:
    """Append one job of a sweep, in a folder of its own unless run_dir names one.

    Args:
        args: Arguments of the command.
        fixed: Options that are the same in all jobs.
        jobs: The jobs before this one.
        folders: Folder of the sweep, appended for each job.
    """
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    lines = _plain(job.overrides.task)
    loaded = prepare(args, lines)
    pairs = [line.lstrip("+~").partition("=") for line in lines]
    differing = [(key, value) for key, _, value in pairs if key not in fixed]
    # With the seed last, the folders of runs that differ in the seed only are next to each other.
    options = dict(sorted(differing, key=lambda pair: pair[0] == "seed"))
    sweep = Path(job.sweep.dir)
    folders.append(sweep)
    if loaded.config.run_dir is not None:
        folder = Path(loaded.config.run_dir)
    elif _plain(job.sweep)["subdir"] == ".":
        folder = job_folder(sweep, options, job.job.num, {other.folder for other in jobs})
    else:
        folder = Path(job.runtime.output_dir)
    loaded = replace(loaded, config=replace(loaded.config, run_dir=str(folder)))
    jobs.append(SweepJob(job.job.num, lines, options, folder, loaded))


def job_folder(
    sweep: Path, options: Mapping[str, str], number: int, taken: Collection[Path] = ()
) -> Path:
    """Return the folder of a job, such as ``lr-0.001_seed-0``.

    It is named after the options that differ between jobs. An option is named without its section
    where that is unambiguous. Characters that a command line would have to quote become ``-``. The
    job's number is appended to a name that is too long, exists or is ``taken``, and is the name
    where no option differs.
    """
    leaves = [key.rpartition(".")[2] for key in options]
    parts = [
        f"{leaf if leaves.count(leaf) == 1 else key}-{value.strip(chr(39) + chr(34) + '[]{}()')}"
        for (key, value), leaf in zip(options.items(), leaves, strict=True)
    ]
    name = re.sub(r"[^\w.-]+", "-", "_".join(parts).replace("+", ""), flags=re.ASCII).strip(".-")
    if len(name) > MAX_FOLDER_NAME or (sweep / name).exists() or sweep / name in taken:
        name = f"{name[:MAX_FOLDER_NAME]}-{number}".lstrip("-")
    return sweep / (name or str(number))


@dataclass(frozen=True)
class Choice:
    """A range of an option: a list of values.

    Attributes:
        values: The values, as on the command line.
    """

    values: tuple[str, ...]

    def draw(self, uniform: float) -> str:
        """Return the value for a number in [0, 1)."""
        return self.values[int(uniform * len(self.values))]


@dataclass(frozen=True)
class Interval:
    """A range of an option: all numbers between two limits.

    Attributes:
        low, high: The limits.
        log: Whether the logarithm of the value is distributed uniformly, instead of the value.
        integer: Whether values are rounded to integers.
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def draw(self, uniform: float) -> str:
        """Return the value for a number in [0, 1), with four significant digits."""
        if self.log:
            value = self.low * (self.high / self.low) ** uniform
        else:
            value = self.low + (self.high - self.low) * uniform
        return str(round(value)) if self.integer else f"{value:.4g}"


def search_ranges(
    args: argparse.Namespace,
) -> tuple[list[str], dict[str, Choice | Interval]]:
    """Divide the overrides of a search into those of all runs, and ranges.

    Ranges have the syntax of Hydra's sweeps: ``algorithm.lr=interval(1e-4,1e-2)``, with
    ``tag(log,interval(..))`` for a uniform logarithm, ``algorithm.horizon=16,32`` or
    ``range(1,9)``. A config file gives them in ``hydra.sweeper.params``.

    Raises:
        ConfigError: An override or a range is refused.
    """
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.override_parser.types import IntervalSweep
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from embodied_ppo.config import loader as strict
    from embodied_ppo.config.schema import Config

    loader, name = loader_of(args)
    parsed = [(line, _parse_line(line, loader)) for line in args.overrides]
    common = [line for line, override in parsed if not override.is_sweep_override()]
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra(task_name=PROGRAM, config_loader=loader)
        cfg = hydra.compose_config(name, common, run_mode=RunMode.MULTIRUN).hydra
        params = [f"{k}={v}" for k, v in _plain(cfg.sweeper.params or {}).items()]
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(_hydra_message(e)) from e
    finally:
        GlobalHydra.instance().clear()
    given = {override.key_or_group for _, override in parsed}
    described = strict.describe(Config)
    ranges: dict[str, Choice | Interval] = {}
    for line in (*params, *args.overrides):
        override = _parse_line(line, loader)
        option = override.key_or_group
        if not override.is_sweep_override() or (line in params and option in given):
            continue
        value = override.value()
        if isinstance(value, IntervalSweep):
            low, high, log = value.start, value.end, "log" in value.tags
            if low is None or high is None or not low < high or (log and low <= 0):
                raise ConfigError(
                    f"{line}: the limits must increase{', and be above 0' if log else ''}; write"
                    f" {option}=interval(LOW,HIGH)"
                )
            entry = described.get(option)
            integer = entry is not None and isinstance(entry.default, int)
            ranges[option] = Interval(float(low), float(high), log, integer)
        else:
            ranges[option] = Choice(tuple(override.sweep_string_iterator()))
    return common, ranges


def shipped() -> Path:
    """Return the folder of the shipped configs. Raises UsageError without an installation."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{PACKAGE} is not installed; install embodied-ppo again")
    return Path(next(iter(spec.submodule_search_locations)))
