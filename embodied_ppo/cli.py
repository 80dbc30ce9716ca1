"""The console command: text in, typed configs to ``build``, results to stdout, one line per error; the only hydra."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_ppo import __version__, explain
from embodied_ppo.errors import (
    CheckpointError,
    ConfigError,
    EnvError,
    PlacementError,
    TrainingError,
    choose,
    one_line,
    show,
)
from embodied_ppo.explain import UsageError

if TYPE_CHECKING:  # hydra and torch are imported inside the commands: --help answers at once
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.types import Override

    from embodied_ppo.strict import Loaded

PROGRAM = "embodied-ppo"
FLAGS = "command line"
"""Who set an option that was given as an argument."""
UNWELL, REFUSED, FAILED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes: doctor found what the default recipes miss, nothing started, the run failed, interrupted after saving."""


PRIMARY = ("train", "demos", "clone", "evaluate", "export")
"""Commands with a primary config of their name; the others read train's."""
MY_CONFIGS = "my_configs"
"""Folder for what a command writes to be read as a config, unless --config-dir names one."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        flag = message.rpartition("unrecognized arguments: ")[2].split(" ")[0]
        flags = [s for action in self._actions for s in action.option_strings if s.startswith("--")]
        near = difflib.get_close_matches(flag, flags, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        raise UsageError(f"{message}; {hint}")


# ----------------------------------------------------------------------------------------------------------- commands
def _train(args: argparse.Namespace) -> None:
    if args.multirun:
        return _multirun(args)
    loaded = _prepare(args, args.overrides)
    return _train_one(loaded, args, {})


def _train_one(loaded: Loaded, args: argparse.Namespace, extra: dict[str, Any]) -> None:
    _say_aliases(loaded, args)
    from embodied_ppo import build

    with _aside():
        summary = build.train(loaded.config, explicit=loaded.deliberate({FLAGS}), quiet=args.quiet)
    _print_result({**extra, **summary}, args)


def _evaluate(args: argparse.Namespace) -> None:
    _refuse_words(args)
    loaded = _prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import build

    with _aside():
        found = build.evaluate(loaded.config, explicit=loaded.deliberate({FLAGS}), quiet=args.quiet)
    _print_result(found, args)


def _refuse_words(args: argparse.Namespace) -> None:
    """A word alone is taken for a checkpoint, unless it is an option's name. Raises UsageError."""
    from embodied_ppo import strict
    from embodied_ppo.config import OWN_OPTIONS

    for word in args.overrides:
        if "=" not in word and not word.startswith("~") and word not in strict.describe(OWN_OPTIONS[args.command]):
            raise UsageError(f"{word} is not of the form option=value; write checkpoint={word}")


def _demos(args: argparse.Namespace) -> None:
    loaded = _prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import build

    with _aside():
        told = build.demos(loaded.config, quiet=args.quiet)
    if not args.json:  # there nested entries are shown, too
        told["families"] = ", ".join(f"{name} {count}" for name, count in told["families"].items()) or None
    _print_result(told, args)


def _clone(args: argparse.Namespace) -> None:
    loaded = _prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import build

    with _aside():
        summary = build.clone(loaded.config, explicit=loaded.deliberate({FLAGS}), quiet=args.quiet)
    _print_result(summary, args)


def _export(args: argparse.Namespace) -> None:
    _refuse_words(args)
    loaded = _prepare(args, args.overrides)
    from embodied_ppo import build

    with _aside():
        told = build.export(loaded.config.checkpoint, loaded.config.out)
    _print_result(told, args)


def _plan(args: argparse.Namespace) -> None:
    loaded = _prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import build

    told = build.planned(loaded.config)
    if args.json:
        print(explain.as_json(told))
    else:
        explain.print_plan(told)


def _tune(args: argparse.Namespace) -> None:
    loaded = _prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import tuning

    home = Path(args.config_dir or MY_CONFIGS)
    file = tuning.destination(home, loaded.config.name)
    with _aside():
        found = tuning.search(loaded.config, explicit=loaded.deliberate({FLAGS}), quiet=args.quiet)
    tuning.write(file, found, shlex.join([PROGRAM, "tune", *args.overrides]))
    args.config_dir, args.command = str(home), "train"
    words = [*(line for line in args.overrides if not _of_placement(line)), f"placement={file.stem}"]
    again, asked = _prepare(args, words).config, found.config
    if (again.placement, again.cluster) != (asked.placement, asked.cluster):
        raise ConfigError(
            f"{file}: is written, but another file sets cluster, too, and both together are "
            f"{show(vars(again.cluster))}; take it out there"
        )
    named = ["--config-name", args.config_name] if args.config_name else []
    line = shlex.join([PROGRAM, "train", "--config-dir", str(home), *named, *words])
    told = found.told() | {"file": str(file), "command": line}
    if args.json:
        print(explain.as_json(told))
    else:
        explain.print_tuned(told)


def _of_placement(line: str) -> bool:
    """Whether an override is about what a tuned placement says."""
    from embodied_ppo.config import ALIASES

    key = line.lstrip("+~").partition("=")[0]
    paths = ALIASES[""].get(key, (key,))
    return any(path.partition(".")[0] in ("placement", "cluster") for path in paths)


def _fit(args: argparse.Namespace) -> None:
    loaded = _prepare(args, args.overrides)
    _say_aliases(loaded, args)
    from embodied_ppo import fitting

    where = None if args.out is None else fitting.destination(args.out)
    found = fitting.fit(loaded.config, args.devices)
    named = ["--config-name", args.config_name] if args.config_name else []
    asked = [PROGRAM, "fit", *named, *args.overrides, "--devices", str(args.devices)]
    content = fitting.text(found, shlex.join(asked))
    command = None
    if where is not None:
        file, folder, name = where
        fitting.write(file, content)
        command = shlex.join([PROGRAM, "train", "--config-dir", folder, f"experiment={name}"])
    if args.json:
        changes = [vars(change) for change in found.changes]
        told = {"changes": changes, "notes": found.notes, "memory": found.memory, "file": args.out, "command": command}
        print(explain.as_json(told | {"recipe": fitting.settings(found.config)}))
    elif where is not None:
        explain.print_fitted(found, sys.stdout)
        print(command)
    else:
        if not args.quiet:
            explain.print_fitted(found, sys.stderr)
        print(content, end="")


def _doctor(args: argparse.Namespace) -> None:
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} is not read by doctor; leave it out")
    from embodied_ppo import doctor

    rows = doctor.examine()
    if args.json:
        print(explain.as_json([vars(row) for row in rows]))
    else:
        explain.print_rows(rows)
    if any(row.state == "problem" and row.needed for row in rows):
        raise SystemExit(UNWELL)


def _config(args: argparse.Namespace) -> None:
    if args.overrides and args.overrides[0] in PRIMARY:
        args.command = args.overrides.pop(0)
    elif args.config_name in PRIMARY:
        args.command = args.config_name
    loaded = _prepare(args, args.overrides, check=args.command == "train", partial=True)
    rows = explain.config_rows(loaded, only=args.only)
    if not rows:
        names = sorted({path.rpartition(".")[2] for path in explain.config_rows(loaded)})
        near = difflib.get_close_matches(args.only, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "leave --only out to see all"
        raise UsageError(f"--only {args.only}: no option mentions it; {hint}")
    _say_aliases(loaded, args)
    if loaded.missing and not args.quiet:
        print(
            f"yours to write, and until then nothing is checked: {', '.join(sorted(loaded.missing))}", file=sys.stderr
        )
    if args.json:
        print(explain.as_json(rows))
    else:
        explain.print_config(rows)


def _experiments(args: argparse.Namespace) -> None:
    if args.overrides:
        raise UsageError(f"{args.overrides[0]} is not read by experiments; leave it out")
    _config_dir(args)
    found = explain.experiments(args.config_dir)
    if args.json:
        print(explain.as_json(found))
    else:
        explain.table([[e["name"], e["description"]] for e in found])


def _import_config(args: argparse.Namespace) -> None:
    if len(args.overrides) != 2:
        raise UsageError(
            "import-config needs a framework and a file; write import-config verl FILE.yaml --out NEW.yaml"
        )
    from embodied_ppo import migrate

    peer, file = args.overrides
    told = migrate.migrate(peer, file, args.out)
    if args.json:
        return print(explain.as_json(told))
    if args.out is None:
        print(told["yaml"], end="")
    if not args.quiet:
        with contextlib.redirect_stdout(sys.stdout if args.out else sys.stderr):  # stdout is the experiment's
            explain.print_migration(told)
    return None


def _watch(args: argparse.Namespace) -> None:
    from embodied_ppo import watch

    with watch.listen(args.overrides or ["runs"], port=args.port) as server, contextlib.suppress(KeyboardInterrupt):
        print(explain.as_json({"address": server.address}) if args.json else server.address, flush=True)
        if not args.quiet:
            print("Ctrl-C ends it", file=sys.stderr)
        server.serve_forever()


def _new_task(args: argparse.Namespace) -> None:
    from embodied_ppo import new_task

    made = new_task.write(args.name, Path(args.mjcf), Path(args.out) if args.out else None)
    if args.json:
        told = {"files": list(map(str, made.files)), "assumed": made.assumed, "commands": made.commands}
        print(explain.as_json(told))
    else:
        explain.print_new_task(made.files, made.assumed, made.commands)


def _aside() -> contextlib.AbstractContextManager[object]:
    """Results alone go to stdout: what simulators, graders and Ray print meanwhile goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr)


def _say_aliases(loaded: Loaded, args: argparse.Namespace) -> None:
    for written, read in () if args.quiet else loaded.aliases:
        print(f"{written} is read as {read}", file=sys.stderr)


def _print_result(summary: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(explain.as_json(summary), flush=True)
    else:
        explain.print_summary(summary)


COMMANDS: dict[str, tuple[Callable[[argparse.Namespace], None], str, str]] = {
    # name -> (function, one line, example)
    "train": (
        _train,
        "train a policy or, with mode=reasoning, a language model",
        "train experiment=quickstart seed=1 algorithm.gamma=0.98",
    ),
    "demos": (
        _demos,
        "record demonstrations of a task's scripted expert",
        "demos experiment=tabletop_token out=demos/reach episodes=2000",
    ),
    "clone": (
        _clone,
        "train a policy by cloning demonstrations only",
        "clone experiment=tabletop_token cloning.dataset=demos/reach",
    ),
    "evaluate": (_evaluate, "measure a checkpoint", "evaluate checkpoint=runs/NAME/DATE-SEED episodes=100"),
    "plan": (
        _plan,
        "show where a run's roles go and the memory they need",
        "plan placement=hybrid cluster.num_nodes=2",
    ),
    "tune": (
        _tune,
        "find the fastest placement on the devices there are",
        "tune experiment=tabletop_token cluster.devices_per_node=2",
    ),
    "watch": (_watch, "show runs on a local page, as they grow", "watch runs/NAME --port 8000"),
    "fit": (
        _fit,
        "rewrite a recipe for fewer devices; the same optimiser steps, in smaller parts",
        "fit experiment=tabletop_token --devices 1 --out my_configs/experiment/small.yaml",
    ),
    "doctor": (_doctor, "examine this machine: what works, what does not, the cure", "doctor"),
    "export": (_export, "write a language model for transformers", "export checkpoint=runs/NAME/DATE-SEED out=DIR"),
    "config": (_config, "show every option: value, who set it, meaning", "config experiment=quickstart --only gamma"),
    "experiments": (_experiments, "list the experiments", "experiments --json"),
    "import-config": (
        _import_config,
        "turn PPO options of RLinf, verl, ROLL or TRL into an experiment",
        "import-config verl ppo_trainer.yaml --out my_configs/experiment/mine.yaml",
    ),
    "new-task": (_new_task, "write a task for a robot of your own", "new-task my_robot --mjcf robot.xml"),
}


# ------------------------------------------------------------------------------------------------ text -> typed config
def _prepare(args: argparse.Namespace, lines: Sequence[str], *, check: bool = True, partial: bool = False) -> Loaded:
    """Compose, type and check; with ``partial`` options may be ``???``, and then nothing is compared.

    Raises ConfigError, PlacementError or CheckpointError.
    """
    from embodied_ppo import rules, strict
    from embodied_ppo.config import OWN_OPTIONS, Config, DemosConfig

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
                    f"{path} = {getattr(config, path)} ({FLAGS}) is set but not read by clone, which makes no updates; "
                    f"leave it out, or write it when PPO goes on: train resume=RUN run_dir=NEW {path}=.."
                )
        return loaded  # build.clone compares the rest
    asked = config
    if args.command == "fit":  # whose memory that is does not depend on the recipe's placement
        asked = replace(config, cluster=replace(config.cluster, device_memory_gb=0.0))
    check_it = rules.check_tuning if args.command == "tune" else rules.check
    check_it(asked, explicit=loaded.deliberate({FLAGS}))
    if isinstance(config, Config) and config.updates is not None:
        if origin.get("env_steps") == FLAGS and origin["updates"] != FLAGS:
            raise ConfigError(
                f"env_steps = {config.env_steps} ({FLAGS}) is not read: updates = {config.updates} "
                f"({origin['updates']}) wins; add updates=null"
            )
    return loaded


def _demos_layers(lines: Sequence[str], layers: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """What demos reads of the layers: of files the section env, of the command line everything. Raises ConfigError."""
    from embodied_ppo import strict
    from embodied_ppo.config import Config, DemosConfig

    mode = [node["mode"] for _, node in layers if "mode" in node][-1:]
    if mode and mode != ["embodied"]:
        raise ConfigError(
            f"mode = {mode[0]}: demos records a robot's expert; write experiment=tabletop_token, or another robot's"
        )
    ours = strict.describe(DemosConfig)
    reads = [*(path for path in ours if "." not in path), *(f"env.{name}" for name in DEMOS_ENV)]
    written = [
        f"{key} = .." for key in ("algorithm", "model", "placement") if any(x.startswith(f"{key}=") for x in lines)
    ]
    for who, node in layers:
        if who == FLAGS:
            known = strict.read(Config, [_known(who, node)])
            written += [
                f"{path} = {show(attrgetter(path)(known.config))}" for path in known.origin if path not in reads
            ]
    if written:
        raise ConfigError(
            f"{written[0]} ({FLAGS}) is set but not read by demos; leave it out. Read are {', '.join(reads)}"
        )
    own = {path.partition(".")[0] for path in ours}
    return [(who, node if who == FLAGS else {k: v for k, v in node.items() if k in own}) for who, node in layers]


DEMOS_ENV = ("id", "kwargs", "cameras", "image_size", "randomize", "num_threads")
"""Options of the section env that demos reads."""


def _known(who: str, node: Any) -> tuple[str, Any]:
    """The part of a layer that train would know."""
    from embodied_ppo import strict
    from embodied_ppo.config import Config

    tops = {path.partition(".")[0] for path in strict.describe(Config)}
    return who, {k: v for k, v in node.items() if k in tops}


def _layers(args: argparse.Namespace, lines: Sequence[str], defaults: dict[str, Any]) -> list[tuple[str, Any]]:
    """(who, mapping) from weak to strong: files in the order of the defaults list, groups chosen by flag, flags."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    loader, name = _loader(args)
    overrides = _parse(lines, loader)
    stored = None
    groups = {o.key_or_group: o.value() for o in overrides if _is_group(o, loader)}
    resume = next((o.value() for o in overrides if o.key_or_group == "resume" and not o.is_delete()), None)
    if args.command == "train" and name == "train" and resume not in (None, "auto") and "experiment" not in groups:
        stored = _stored(str(resume))
        lines = [*lines, "~experiment"]
    elif args.command == "train" and groups.get("mode") == "reasoning" and "experiment" not in groups:
        own = any(o.key_or_group.startswith(("actor.", "data.")) for o in overrides)
        lines = [*lines, f"experiment={'null' if own else 'arithmetic'}"]  # the default experiment is a robot's
    try:
        parsed, repo = loader._parse_overrides_and_create_caching_repo(name, _forced(lines, loader))
        chosen = create_defaults_list(
            repo=repo, config_name=name, overrides_list=parsed, prepend_hydra=True, skip_missing=False
        )
        files, flagged, experiment = [], [], chosen.overrides.known_choices.get("experiment")
        for default in chosen.defaults:
            path = default.config_path or ""
            if path.partition("/")[0] == "hydra":
                continue
            node = ConfigLoaderImpl._compose_config_from_defaults_list(loader, [default], repo)
            node.pop("hydra", None)
            source = getattr(repo.load_config(path), "path", "")
            root = "configs" if source == f"pkg://{explain.PACKAGE}" else source.removeprefix("file://")
            # a group chosen by flag beats what an experiment says about the same options
            beats = stored is not None or any(
                g not in ("experiment", "mode") and path.startswith(f"{g}/") for g in groups
            )
            (flagged if beats else files).append((f"{root}/{path}.yaml", node))
            if experiment and path == f"experiment/{experiment}":
                named = OmegaConf.create({"name": str(experiment).replace("/", "-")})
                files.insert(0, (f"{root}/{path}.yaml", named))
        if stored is not None:
            from embodied_ppo.strict import STORED

            files = [(f"{STORED}, {stored[0]}", OmegaConf.create(stored[1]))]
            flagged = [f for f in flagged if any(f"/{g}/" in f[0] for g in groups)]
        flags = _flags(overrides, loader)
        task = OmegaConf.select(flags, "env.id") if stored is None and "experiment" not in groups else None
        if (
            name in ("train", "clone") and task is not None
        ):  # another task than the default experiment's is not called so
            own = {"name": str(task).replace("/", "-").replace(":", "-"), "description": ""}
            flagged.append(("env.id", OmegaConf.create(own)))
        layers = [*files, *flagged, (FLAGS, flags)]
        _delete(overrides, loader, layers)
        merged = OmegaConf.merge(OmegaConf.create(defaults), *(node for _, node in layers))
        resolved = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)
        return [(who, _pick(OmegaConf.to_container(node), resolved)) for who, node in layers]
    except RecursionError:
        raise ConfigError(
            f"--config-name {name}: its defaults lists name each other for ever; in --config-dir give your own config "
            "another name than the one it lists"
        ) from None
    except (HydraException, OmegaConfBaseException, YAMLError) as e:
        raise ConfigError(_hydra_says(e)) from e


def _hydra_says(error: Exception) -> str:
    """Hydra's message without its pointers to Hydra."""
    text = one_line(error)
    for tail in (" Config search path:", " See https://", " full_key:"):
        text = text.partition(tail)[0]
    return text


def _pick(node: Any, resolved: Any) -> Any:
    """``node`` with its interpolations replaced by what they resolved to."""
    if isinstance(node, dict):
        inner = resolved if isinstance(resolved, dict) else {}
        return {str(k): _pick(v, inner.get(k)) for k, v in node.items()}
    return resolved if "${" in repr(node) else node


def _flags(overrides: Sequence[Override], loader: ConfigLoaderImpl) -> Any:
    """The command line's values as one layer."""
    from omegaconf import OmegaConf

    node = OmegaConf.create({})
    for o in overrides:
        if not o.is_delete() and not _is_group(o, loader):
            OmegaConf.update(node, o.key_or_group, o.value(), merge=True, force_add=True)
    return node


def _delete(overrides: Sequence[Override], loader: ConfigLoaderImpl, layers: Sequence[tuple[str, Any]]) -> None:
    """``~option``: as if no file had set it."""
    from omegaconf import OmegaConf

    for o in overrides:
        if not o.is_delete() or loader.repository.group_exists(o.key_or_group):
            continue
        parent, _, leaf = o.key_or_group.rpartition(".")
        homes = [OmegaConf.select(node, parent) if parent else node for _, node in layers]
        owners = [home for home in homes if OmegaConf.is_dict(home) and leaf in home]
        if not owners:
            raise ConfigError(f"{o.input_line}: no file sets {o.key_or_group}, nothing to take away; leave it out")
        for home in owners:
            del home[leaf]


def _stored(resume: str) -> tuple[str, dict[str, Any]]:
    """config.yaml of the run that ``resume`` (a run or a checkpoint of it) names."""
    import yaml

    from embodied_ppo import strict

    folder = Path(resume)
    if not folder.is_dir():
        raise CheckpointError(f"resume = {resume}: no such directory; name a run, or write resume=auto")
    file = _config_of(folder)
    if file is None:
        raise CheckpointError(
            f"resume = {resume}: holds no config.yaml; name a run directory or a checkpoint inside one"
        )
    try:
        content = strict.plain_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise CheckpointError(f"resume = {resume}: {file} is damaged ({one_line(e)}); name another checkpoint") from e
    if not isinstance(content, dict):
        raise CheckpointError(f"resume = {resume}: {file} is damaged (no options in it); name another checkpoint")
    # where the run lay when it was written is not where it lies now; resume says that
    return str(file), {k: v for k, v in content.items() if k not in ("resume", "run_dir")}


def _config_of(folder: Path) -> Path | None:
    """config.yaml of a run, by its directory or a checkpoint's."""
    files = (folder / "config.yaml", folder.resolve().parent.parent / "config.yaml")
    return next((file for file in files if file.is_file()), None)


# -------------------------------------------------------------------------------------------------------------- hydra
def _config_dir(args: argparse.Namespace) -> str | None:
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise UsageError(f"--config-dir {args.config_dir}: no such directory")
    return args.config_dir


def _loader(args: argparse.Namespace) -> tuple[ConfigLoaderImpl, str]:
    """Hydra's loader over the shipped configs and --config-dir (which comes first), and the primary config's name."""
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.core.object_type import ObjectType
    from hydra.core.plugins import Plugins
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf

    from embodied_ppo import strict
    from embodied_ppo.config import Config

    defaults = OmegaConf.create(strict.dump(Config()))  # what a sweep's interpolations may name

    class Loader(ConfigLoaderImpl):
        """Values are set whether or not a YAML names them: ``strict`` says what exists, not the files."""

        def load_configuration(self, config_name: str | None, overrides: list[str], *rest: Any, **more: Any) -> Any:
            return super().load_configuration(config_name, _forced(overrides, self), *rest, **more)

        def _compose_config_from_defaults_list(self, *args: Any, **more: Any) -> Any:
            return OmegaConf.merge(defaults, super()._compose_config_from_defaults_list(*args, **more))

    Plugins.instance()
    setup_globals()
    version.setbase("1.3")
    explain.shipped()
    path = create_config_search_path(f"pkg://{explain.PACKAGE}")
    if _config_dir(args):
        path.prepend(provider="command line", path=f"file://{os.path.abspath(args.config_dir)}")
    loader = Loader(config_search_path=path)
    name = (args.config_name or (args.command if args.command in PRIMARY else "train")).removesuffix(".yaml")
    if not loader.repository.config_exists(name):
        names = sorted({n for n in loader.get_group_options("", ObjectType.CONFIG) if not n.startswith("_")})
        raise UsageError(f"--config-name {name}: no such config; {choose(name, names, 'there are: ')}")
    return loader, name


def _parse(lines: Sequence[str], loader: ConfigLoaderImpl) -> list[Override]:
    """Overrides of one run; refuses what a sweep would need, and options of groups that do not exist."""
    overrides = []
    for line in lines:
        override = _parse_line(line, loader)
        if override.is_sweep_override():
            raise ConfigError(f"{line} names several values; add --multirun, or give one (a list is written [a,b])")
        if override.is_hydra_override():
            raise ConfigError(f"{line} is set but not read; hydra.* is for --multirun")
        group, value = override.key_or_group, override.value()
        if value is not None and _is_group(override, loader):
            options = loader.get_group_options(group)
            for chosen in value if isinstance(value, list) else [value]:
                if str(chosen) not in options:
                    kind = PlacementError if group == "placement" else ConfigError
                    raise kind(f"{group} = {chosen}: no such {group}; {choose(str(chosen), options, 'there are: ')}")
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
        raise ConfigError(f"{line}: {key or 'nothing'} is no option's name; write section.option=value")
    try:
        (override,) = OverridesParser.create(config_loader=loader).parse_overrides([line])
    except (HydraException, ValueError, RecursionError) as e:  # the last two: of very long numbers, very deep lists
        raise ConfigError(f"{line} is not understood ({_hydra_says(e)}); quote the value: \"{key}='{value}'\"") from e
    return override


def _is_group(override: Override, loader: ConfigLoaderImpl) -> bool:
    return loader.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)


def _quoted(line: str) -> str:
    """A dictionary with quoted keys, as YAML and JSON have them and Hydra's grammar has not, as text."""
    key, equals, value = line.partition("=")
    if not (equals and value.startswith("{") and '"' in value):
        return line
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def _forced(lines: Sequence[str], loader: ConfigLoaderImpl) -> list[str]:
    """``a=1`` as ``++a=1``, ``group=null`` as ``~group``; deletions and hydra's own options as they are."""

    def force(line: str, override: Override) -> str:
        if loader.repository.group_exists(override.key_or_group):
            empty = override.value() is None and not override.is_delete()
            return f"~{override.key_or_group}" if empty else line.removeprefix("++")
        return line if override.is_delete() or override.is_hydra_override() else "++" + line.lstrip("+")

    return [force(line, _parse_line(line, loader)) for line in lines]


def _multirun(args: argparse.Namespace) -> None:
    """Hydra's own sweeper and launcher; with the basic sweeper every job is checked before the first starts."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra._internal.hydra import Hydra
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    loader, name = _loader(args)
    lines = ["hydra/job_logging=none", "hydra/hydra_logging=none", *args.overrides]
    GlobalHydra.instance().clear()
    try:
        hydra = Hydra(task_name=PROGRAM, config_loader=loader)
        GlobalHydra.instance().initialize(hydra)
        cfg = hydra.compose_config(name, lines, run_mode=RunMode.MULTIRUN).hydra
        if cfg.sweeper._target_.endswith(".BasicSweeper"):
            params = [f"{k}={v}" for k, v in _plain(cfg.sweeper.params or {}).items()]
            parsed = [_parse_line(line, loader) for line in (*params, *_plain(cfg.overrides.task))]
            _check_jobs([job for batch in BasicSweeper.split_arguments(parsed, None) for job in batch], args)
        hydra.multirun(name, functools.partial(_job, args=args), lines)
    except (HydraException, OmegaConfBaseException) as e:
        raise ConfigError(_hydra_says(e)) from e
    finally:
        GlobalHydra.instance().clear()


def _plain(node: Any) -> Any:
    """Lists and dictionaries of hydra's, with ``${..}`` as written: each job resolves its own."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node


def _check_jobs(jobs: Sequence[Sequence[str]], args: argparse.Namespace) -> None:
    folders: dict[str, int] = {}
    for i, job in enumerate(jobs):
        try:
            folder = _prepare(args, job).config.run_dir
        except ValueError as e:
            raise type(e)(f"job {i} ({' '.join(o.lstrip('+') for o in job)}): {e}") from e
        if folder is not None and folders.setdefault(folder, i) != i:
            raise ConfigError(f"run_dir = {folder} is that of job {folders[folder]} and of job {i}; leave run_dir out")


def _job(_: Any, *, args: argparse.Namespace) -> None:
    """One job of a sweep, in the folder hydra made for it unless run_dir says otherwise."""
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    lines = _plain(job.overrides.task)
    loaded = _prepare(args, lines)
    if loaded.config.run_dir is None:
        loaded = replace(loaded, config=replace(loaded.config, run_dir=job.runtime.output_dir))
    extra = {"job": job.job.num, "overrides": " ".join(line.lstrip("+") for line in lines)}
    try:
        _train_one(loaded, args, extra)
    except Exception as error:  # any: says which job of the sweep it was, which hydra does not; raised on
        print(f"job {extra['job']} ({extra['overrides']}) failed: {error}", file=sys.stderr)
        raise


# -------------------------------------------------------------------------------------------------------------- texts
def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line, _) in COMMANDS.items())
    examples = "\n".join(f"  {PROGRAM} {example}" for _, _, example in COMMANDS.values())
    return (
        f"usage: {PROGRAM} COMMAND [--config-dir DIR] [--config-name NAME] [--quiet] [--json] [option=value ...]\n\n"
        f"PPO for robot policies in vectorised simulators, and for language models.\n\n"
        f"commands:\n{commands}\n\nexamples:\n{examples}\n\n"
        f"exit codes: 0 done, {UNWELL} doctor found a problem, "
        f"{REFUSED} refused (nothing started), {FAILED} the run failed, {INTERRUPTED} interrupted"
    )


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text} is no number >= 1")
    return int(text)


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Raises UsageError; SystemExit for --help."""
    name = argv[0]
    if name not in COMMANDS:
        kind = "flag" if name.startswith("-") else "command"
        raise UsageError(f"{name}: no such {kind}; {choose(name, list(COMMANDS), 'commands: ')}")
    _, line, example = COMMANDS[name]
    own = explain.own_options(name)
    parser = _Parser(
        prog=f"{PROGRAM} {name}",
        description=line,
        epilog="\n\n".join([*([own] if own else []), f"example: {PROGRAM} {example}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if name == "new-task":
        parser.add_argument("name", metavar="NAME", help="of the task's module; its class is in CamelCase")
        parser.add_argument("--mjcf", metavar="FILE", required=True, help="the robot, in MuJoCo's XML")
        parser.add_argument("--out", metavar="DIR", help="where to write (default: ./NAME)")
        parser.add_argument("--json", action="store_true", help="what was written and assumed as JSON")
        return parser.parse_args(list(argv[1:]))
    if name == "import-config":
        parser.add_argument("overrides", nargs="*", metavar="FRAMEWORK FILE", help="rlinf, verl, roll or trl; its YAML")
        parser.add_argument("--out", metavar="FILE", help="the experiment to write, a new file (default: stdout)")
    elif name == "watch":
        parser.add_argument("overrides", nargs="*", metavar="RUN", help="run directories, or folders of runs (runs)")
        parser.add_argument("--port", type=int, default=0, help="of the page (default: a free one)")
    else:
        see = f"see `{PROGRAM} config{f' {name}' if name in PRIMARY else ''}`"
        parser.add_argument("overrides", nargs="*", type=_quoted, metavar="option=value", help=see)
        parser.add_argument("--config-dir", metavar="DIR", help="your own configs; searched before those that ship")
    parser.add_argument("--json", action="store_true", help="results as JSON")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    parser.set_defaults(command="train" if name == "config" else name, config_name=None, multirun=False, only=None)
    if name not in ("experiments", "import-config", "watch", "doctor"):
        parser.add_argument("--config-name", metavar="NAME", help="primary config (default: the command's)")
    if name == "train":
        parser.add_argument("-m", "--multirun", action="store_true", help="one run per combination of a=1,2 b=3,4")
    if name == "fit":
        parser.add_argument("--devices", type=_count, metavar="N", required=True, help="devices of one machine")
        parser.add_argument("--out", metavar="DIR/experiment/NAME.yaml", help="file to write (default: to stdout)")
    if name == "config":
        parser.add_argument("--only", metavar="TEXT", help="options whose name or meaning holds this text")
    return parser.parse_intermixed_args(list(argv[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this (>&-): nobody reads
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        if not argv:
            raise UsageError(f"no command; commands: {', '.join(COMMANDS)}; see {PROGRAM} --help")
        if argv[0] in ("-h", "--help", "help") or argv == ["--version"]:
            print(f"{PROGRAM} {__version__}" if argv == ["--version"] else _help(), flush=True)
            return 0
        args = _parse_arguments(argv)
        sys.path.append(os.getcwd())  # where env.id=my_module:MyTask-v0 looks
        COMMANDS[argv[0]][0](args)
        sys.stdout.flush()
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 0 if e.code is None else FAILED
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError as e:
        if argv[0] in ("train", "demos", "clone", "evaluate", "export"):
            return _report(e)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever reads has read enough: .. | head
        return 0
    except Exception as e:  # the top of the program: whatever came this far becomes its last line and exit code
        return _report(e)
    return 0


def _report(error: Exception) -> int:
    """Print the last line, return the exit code."""
    if isinstance(error, (UsageError, ConfigError, PlacementError, CheckpointError, EnvError)):
        print(f"error: {one_line(error)}", file=sys.stderr)
        return REFUSED
    if isinstance(error, MemoryError):
        error = TrainingError(
            f"out of memory ({one_line(error, kind=True)}); embodied-ppo plan tells what a run needs; lower "
            "env.num_envs or algorithm.horizon"
        )
    if not isinstance(error, TrainingError):
        traceback.print_exception(error)
        error = RuntimeError(one_line(error, kind=True))
    first, _, _ = str(error).partition("\n")  # what follows (stacks of other processes) the log has told
    print(f"error: {first}", file=sys.stderr)
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
