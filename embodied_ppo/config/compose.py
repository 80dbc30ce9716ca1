"""YAML files and overrides -> typed configs, composed by Hydra, which no other module imports."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

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
PRIMARY = ("train", "demos", "clone", "evaluate", "export")
"""Commands with a primary config of their name; the others read train's."""
RunJob: TypeAlias = "Callable[[Loaded, argparse.Namespace, dict[str, Any]], object]"
"""Function that runs one job of a sweep and prints its number, overrides and differing options with
the results.
"""
SWEEPS = "runs/sweeps/"
"""Folder of the sweeps; a sweep whose jobs have the same name is in SWEEPS/NAME."""
LONGEST = 120
"""Maximum length of the name of a job's folder, characters."""


def prepare(
    args: argparse.Namespace, lines: Sequence[str], *, check: bool = True, partial: bool = False
) -> Loaded:
    """Compose, type and check the options of a command.

    Args:
        args: Arguments of the command line.
        lines: Overrides, ``option=value``.
        check: Compare the options with each other.
        partial: Accept options that are ``???``; the options are then not compared.

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
        return strict.read(DemosConfig, _demos_layers(lines, _layers(args, lines, defaults)))
    loaded = strict.read(cls, _layers(args, lines, strict.dump(cls())), partial=partial)
    if not check or loaded.missing:
        return loaded
    config, origin = loaded.config, loaded.origin
    if args.command == "clone":
        for path in ("updates", "env_steps", "eval_every", "save_every"):
            if origin.get(path) == FLAGS and getattr(config, path) is not None:
                raise ConfigError(
                    f"{path} = {getattr(config, path)} ({FLAGS}) is set but not read by clone,"
                    " which makes no updates; leave it out, or write it when PPO goes on: train"
                    f" resume=RUN run_dir=NEW {path}=.."
                )
        return loaded  # build.clone compares the rest
    checked = config
    if args.command == "fit":  # which memory this is does not depend on the recipe's placement
        checked = replace(config, cluster=replace(config.cluster, device_memory_gb=0.0))
    compare = validation.check_tuning if args.command == "tune" else validation.check
    compare(checked, explicit=loaded.deliberate({FLAGS}))
    if isinstance(config, Config) and config.updates is not None:
        if origin.get("env_steps") == FLAGS and origin["updates"] != FLAGS:
            raise ConfigError(
                f"env_steps = {config.env_steps} ({FLAGS}) is not read: updates = {config.updates} "
                f"({origin['updates']}) wins; add updates=null"
            )
    return loaded


def _demos_layers(lines: Sequence[str], layers: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the part of the layers that demos reads: of files section env, of the command line
    everything.
    """
    from embodied_ppo.config import loader as strict
    from embodied_ppo.config.readers import mode_of
    from embodied_ppo.config.schema import Config, DemosConfig

    mode = [node["mode"] for _, node in layers if "mode" in node][-1:]
    if mode and mode[0] != mode_of("env"):
        raise ConfigError(
            f"mode = {mode[0]}: demos records a robot's expert; write experiment=tabletop_token, or"
            " another robot's"
        )
    ours = strict.describe(DemosConfig)
    reads = [*(path for path in ours if "." not in path), *(f"env.{name}" for name in DEMOS_ENV)]
    written = [
        f"{key} = .."
        for key in ("algorithm", "model", "placement")
        if any(x.startswith(f"{key}=") for x in lines)
    ]
    for label, node in layers:
        if label == FLAGS:
            known = strict.read(Config, [_known(label, node)])
            written += [
                f"{path} = {show(attrgetter(path)(known.config))}"
                for path in known.origin
                if path not in reads
            ]
    if written:
        raise ConfigError(
            f"{written[0]} ({FLAGS}) is set but not read by demos; leave it out. Read are"
            f" {', '.join(reads)}"
        )
    own = {path.partition(".")[0] for path in ours}
    return [
        (label, node if label == FLAGS else {k: v for k, v in node.items() if k in own})
        for label, node in layers
    ]


DEMOS_ENV = ("id", "kwargs", "cameras", "image_size", "randomize", "num_threads")
"""Options of the section env that demos reads."""


def _known(label: str, node: Any) -> tuple[str, Any]:
    """Return the part of a layer that consists of options of train."""
    from embodied_ppo.config import loader as strict
    from embodied_ppo.config.schema import Config

    tops = {path.partition(".")[0] for path in strict.describe(Config)}
    return label, {k: v for k, v in node.items() if k in tops}


def _layers(
    args: argparse.Namespace, lines: Sequence[str], defaults: dict[str, Any]
) -> list[tuple[str, Any]]:
    """Return (label, mapping) from weak to strong: files in the order of the defaults list, chosen
    groups, flags.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from embodied_ppo.config.rules.select import RULES
    from embodied_ppo.config.schema import OWN_OPTIONS, Config

    loader, name = loader_of(args)
    overrides = parse(lines, loader)
    stored = None
    groups = {o.key_or_group: o.value() for o in overrides if _is_group(o, loader)}
    resume = next(
        (o.value() for o in overrides if o.key_or_group == "resume" and not o.is_delete()), None
    )
    named = resume not in (None, "auto", "") and not isinstance(resume, bool)
    if args.command == "train" and name == "train" and named and "experiment" not in groups:
        stored = _stored(str(resume))
        lines = [*lines, "~experiment"]
    elif args.command == "train" and "experiment" not in groups:
        rules = RULES.get(str(groups.get("mode")))
        if (
            rules is not None and rules.default_experiment is not None
        ):  # train.yaml has that of another mode
            own = any(o.key_or_group.startswith(rules.experiment_sections) for o in overrides)
            lines = [*lines, f"experiment={'null' if own else rules.default_experiment}"]
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
            # a group chosen by flag beats what an experiment says about the same options
            beats = stored is not None or any(
                g not in ("experiment", "mode") and path.startswith(f"{g}/") for g in groups
            )
            (flagged if beats else files).append((f"{root}/{path}.yaml", node))
            if experiment and path == f"experiment/{experiment}":
                title = OmegaConf.create({"name": str(experiment).replace("/", "-")})
                files.insert(0, (f"{root}/{path}.yaml", title))
        if stored is not None:
            from embodied_ppo.config.loader import STORED

            files = [(f"{STORED}, {stored[0]}", OmegaConf.create(stored[1]))]
            flagged = [f for f in flagged if any(f"/{g}/" in f[0] for g in groups)]
        flags = _flags(overrides, loader)
        task = None
        if stored is None and "experiment" not in groups and OmegaConf.is_dict(flags.get("env")):
            task = _plain(flags.env).get("id")
            task = None if "${" in str(task) else task  # the value it names is in other layers
        if (
            name in ("train", "clone") and task is not None
        ):  # another task than the default experiment's is not called so
            own = {"name": str(task).replace("/", "-").replace(":", "-"), "description": ""}
            flagged.append(("env.id", OmegaConf.create(own)))
        layers = [*files, *flagged, (FLAGS, flags)]
        _delete(overrides, loader, layers)
    except RecursionError:
        raise ConfigError(
            f"--config-name {name}: its defaults lists name each other for ever; in --config-dir"
            " give your own config another name than the one it lists"
        ) from None
    except (HydraException, OmegaConfBaseException, YAMLError) as e:
        raise ConfigError(_hydra_says(e)) from e
    except UnicodeDecodeError as e:
        raise ConfigError(_not_utf8(args.config_dir)) from e
    return _resolved(layers, defaults, OWN_OPTIONS.get(args.command, Config))


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
    except (
        OmegaConfBaseException,
        TypeError,
        ValueError,
    ) as e:  # a list or number where a section belongs
        known = {path.partition(".")[0] for path in strict.describe(cls)}
        for label, node in written:
            values = {name: value for name, value in node.items() if name in known}
            strict.read(cls, [(label, _without_interpolations(values))], partial=True)
        raise ConfigError(_hydra_says(e)) from e
    try:
        resolved = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)
    except (OmegaConfBaseException, RecursionError) as error:
        for label, node in reversed(written):
            for path, value in strict.flat(node).items():
                try:
                    if "${" in repr(value) and OmegaConf.is_config(
                        inner := OmegaConf.select(merged, path)
                    ):
                        OmegaConf.to_container(inner, resolve=True)
                except (OmegaConfBaseException, RecursionError) as e:
                    raise ConfigError(
                        f"{path} = {show(value)} ({label}): {_hydra_says(e)}; write a value, or"
                        " name an option that has one"
                    ) from e
        raise ConfigError(_hydra_says(error)) from error
    return [(label, _pick(node, resolved)) for label, node in written]


def _without_interpolations(node: Any) -> Any:
    """Nested dictionaries without the entries that are an interpolation."""
    if not isinstance(node, dict):
        return node
    return {
        str(name): _without_interpolations(value)
        for name, value in node.items()
        if not (isinstance(value, str) and "${" in value)
    }


def _hydra_says(error: Exception) -> str:
    """Return Hydra's message without references to Hydra's documentation."""
    text = one_line(error)
    for tail in (" Config search path:", " See https://", " full_key:"):
        text = text.partition(tail)[0]
    missing = re.fullmatch(
        r"(.*Could not find '(?:.*/)?(.*?)') Available options in '.*?': (.*)", text
    )
    if missing:
        return f"{missing[1]}; {choose(missing[2], missing[3].split(), 'there are: ')}"
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
                    f"{o.input_line} is not understood ({_hydra_says(e)}); correct the value, or"
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
    """Return path and content of config.yaml of the run that ``resume`` (a run or its checkpoint)
    names.
    """
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
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise UsageError(f"--config-dir {args.config_dir}: no such directory")
    return args.config_dir


def loader_of(args: argparse.Namespace) -> tuple[ConfigLoaderImpl, str]:
    """Return Hydra's loader over --config-dir and the shipped configs, and the name of the primary
    config.
    """
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
            self, config_name: str | None, overrides: list[str], *rest: Any, **more: Any
        ) -> Any:
            return super().load_configuration(config_name, _forced(overrides, self), *rest, **more)

        def _compose_config_from_defaults_list(self, *args: Any, **more: Any) -> Any:
            return OmegaConf.merge(
                defaults, super()._compose_config_from_defaults_list(*args, **more)
            )

    Plugins.instance()
    setup_globals()
    version.setbase("1.3")
    shipped()
    path = create_config_search_path(f"pkg://{PACKAGE}")
    if config_dir(args):
        path.prepend(provider="command line", path=f"file://{os.path.abspath(args.config_dir)}")
    loader = Loader(config_search_path=path)
    name = (
        args.config_name or (args.command if args.command in PRIMARY else "train")
    ).removesuffix(".yaml")
    if not loader.repository.config_exists(name):
        names = sorted(
            {n for n in loader.get_group_options("", ObjectType.CONFIG) if not n.startswith("_")}
        )
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
        if override.is_sweep_override():
            raise ConfigError(
                f"{line} names several values; add --multirun, or give one (a list is written"
                " [a,b])"
            )
        if override.is_hydra_override():
            raise ConfigError(f"{line} is set but not read; hydra.* is for --multirun")
        group, value = override.key_or_group, override.value()
        if value is not None and _is_group(override, loader):
            options = loader.get_group_options(group)
            for chosen in value if isinstance(value, list) else [value]:
                if str(chosen) not in options:
                    kind = PlacementError if group == "placement" else ConfigError
                    raise kind(
                        f"{group} = {chosen}: no such {group};"
                        f" {choose(str(chosen), options, 'there are: ')}"
                    )
            if isinstance(value, list):
                one = f"write {group}={value[0] if value else 'NAME'}"
                several = (
                    f", or --multirun {group}={','.join(map(str, value))}" if len(value) > 1 else ""
                )
                raise ConfigError(
                    f"{group} = {show(value)} must be one name, not a list; {one}{several}"
                )
        overrides.append(override)
    return overrides


def _parse_line(line: str, loader: ConfigLoaderImpl) -> Override:
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
    except (
        HydraException,
        ValueError,
        RecursionError,
    ) as e:  # the last two: of very long numbers, very deep lists
        quoted_value = shorten(f"{key}='{value}'", 60)
        raise ConfigError(
            f"{shorten(line, 60)} is not understood ({_hydra_says(e)}); quote the value:"
            f' "{quoted_value}"'
        ) from e
    return override


def _is_group(override: Override, loader: ConfigLoaderImpl) -> bool:
    return loader.repository.group_exists(override.key_or_group) and not isinstance(
        override.value(), dict
    )


def quoted(line: str) -> str:
    """Quote a dictionary with quoted keys, which YAML and JSON allow and Hydra's grammar does
    not.
    """
    key, equals, value = line.partition("=")
    if not (equals and value.startswith("{") and '"' in value):
        return line
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def _forced(lines: Sequence[str], loader: ConfigLoaderImpl) -> list[str]:
    """Write ``a=1`` as ``++a=1`` and ``group=null`` as ``~group``; keep deletions and Hydra's own
    options.
    """

    def force(line: str, override: Override) -> str:
        if loader.repository.group_exists(override.key_or_group):
            empty = override.value() is None and not override.is_delete()
            return f"~{override.key_or_group}" if empty else line.removeprefix("++")
        return (
            line
            if override.is_delete() or override.is_hydra_override()
            else "++" + line.lstrip("+")
        )

    return [force(line, _parse_line(line, loader)) for line in lines]


# ------------------------------------------------------------------------------------------- sweeps
def multirun(args: argparse.Namespace, run: RunJob) -> None:
    """Run a sweep with Hydra's sweeper and launcher.

    The basic sweeper checks every job before the first starts.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    loader, name = loader_of(args)
    lines = ["hydra/job_logging=none", "hydra/hydra_logging=none", *args.overrides]
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra(task_name=PROGRAM, config_loader=loader)
        GlobalHydra.instance().initialize(hydra)
        cfg = hydra.compose_config(name, lines, run_mode=RunMode.MULTIRUN).hydra
        if cfg.sweeper._target_.endswith(".BasicSweeper"):
            params = [f"{k}={v}" for k, v in _plain(cfg.sweeper.params or {}).items()]
            parsed = [_parse_line(line, loader) for line in (*params, *_plain(cfg.overrides.task))]
            batches = BasicSweeper.split_arguments(parsed, None)
            names = _check_jobs([job for batch in batches for job in batch], args)
            folder = str(_plain(cfg.sweep)["dir"])
            if len(names) == 1 and folder.startswith(f"{SWEEPS}${{"):
                below = f"{names.pop()}/{folder.removeprefix(SWEEPS)}".replace("'", "\\'")
                lines.append(f"hydra.sweep.dir='{SWEEPS}{below}'")
        given = [_parse_line(line, loader) for line in args.overrides]
        fixed = {o.key_or_group for o in given if not o.is_sweep_override()}
        hydra.multirun(name, functools.partial(_job, args=args, run=run, fixed=fixed), lines)
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(_hydra_says(e)) from e
    except UnicodeDecodeError as e:
        raise ConfigError(_not_utf8(args.config_dir)) from e
    finally:
        GlobalHydra.instance().clear()


def _plain(node: Any) -> Any:
    """Return Hydra's containers as lists and dictionaries, with ``${..}`` unresolved: each job
    resolves its own.
    """
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


def _job(_: Any, *, args: argparse.Namespace, run: RunJob, fixed: Collection[str]) -> None:
    """Run one job of a sweep, in a folder of its own unless run_dir names one.

    Args:
        fixed: Options that are the same in all jobs.
    """
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    lines = _plain(job.overrides.task)
    loaded = prepare(args, lines)
    pairs = [line.lstrip("+~").partition("=") for line in lines]
    differing = [(key, value) for key, _, value in pairs if key not in fixed]
    options = dict(
        sorted(differing, key=lambda pair: pair[0] == "seed")
    )  # the folders of an arm stay together
    if loaded.config.run_dir is None:
        folder = Path(job.runtime.output_dir)
        if _plain(job.sweep)["subdir"] == ".":
            folder = job_folder(folder, options, job.job.num)
        loaded = replace(loaded, config=replace(loaded.config, run_dir=str(folder)))
    overrides = " ".join(line.lstrip("+") for line in lines)
    extra = {"job": job.job.num, "overrides": overrides, "options": options}
    try:
        run(loaded, args, extra)
    except Exception as error:  # any error: name the job, which Hydra does not do
        print(f"job {extra['job']} ({extra['overrides']}) failed: {error}", file=sys.stderr)
        raise


def job_folder(sweep: Path, options: Mapping[str, str], number: int) -> Path:
    """Return the folder of a job, named after the options that differ between jobs:
    ``lr-0.001_seed-0``.

    An option has its last name alone where that is unambiguous. What command lines would have to
    quote becomes ``-``. The job's number is appended to a name that is too long or taken, and is
    the name where no option differs.
    """
    leaves = [key.rpartition(".")[2] for key in options]
    parts = [
        f"{leaf if leaves.count(leaf) == 1 else key}-{value.strip(chr(39) + chr(34) + '[]{}()')}"
        for (key, value), leaf in zip(options.items(), leaves, strict=True)
    ]
    name = re.sub(r"[^\w.-]+", "-", "_".join(parts).replace("+", ""), flags=re.ASCII).strip(".-")
    if len(name) > LONGEST or (sweep / name).exists():
        name = f"{name[:LONGEST]}-{number}".lstrip("-")
    return sweep / (name or str(number))


PACKAGE = "embodied_ppo.configs"


def shipped() -> Path:
    """Return the folder of the shipped configurations.

    Raises UsageError where the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{PACKAGE} is not installed; in a checkout run: pip install -e .")
    return Path(next(iter(spec.submodule_search_locations)))
