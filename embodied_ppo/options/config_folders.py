"""The folders of YAML configs, and Hydra, which composes the configs of a command."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embodied_envs.base.errors import ConfigError, choose, one_line
from embodied_ppo.core.errors import UsageError

if TYPE_CHECKING:  # hydra is imported inside the functions: --help answers at once
    from hydra.core.override_parser.types import Override

PACKAGE = "embodied_ppo.configs"
# Commands with a primary config of their name; the others read train's.
PRIMARY = ("train", "demos", "clone", "distill", "evaluate", "export")


@dataclass(frozen=True)
class ConfigFolders:
    """The folders of configs of a command.

    Attributes:
        roots: The user's folder (--config-dir), if any, and that of the shipped configs.
        primary: Name of the config that Hydra starts from.
    """

    roots: Sequence[Path]
    primary: str

    def members(self, group: str) -> list[str]:
        """Return the configs of a group; "" are those directly in the folders."""
        pattern = "**/*.yaml" if group else "*.yaml"
        folders = [root / group for root in self.roots]
        files = {file.relative_to(x).with_suffix("") for x in folders for file in x.glob(pattern)}
        return sorted(file.as_posix() for file in files)

    def selects(self, override: Override) -> bool:
        """Return whether an override selects a member of a group, and not options of a section."""
        if self.primary == "evaluate" and override.key_or_group == "model":
            return False  # an option of its own, the directory of a language model
        exists = any((root / override.key_or_group).is_dir() for root in self.roots)
        return exists and not isinstance(override.value(), dict)

    def label(self, name: str) -> str:
        """Return what messages call a config: its file."""
        root = next((r for r in self.roots if (r / f"{name}.yaml").is_file()), self.roots[-1])
        return f"configs/{name}.yaml" if root == shipped() else f"{root / name}.yaml"

    def compose(self, name: str | None, overrides: Sequence[str]) -> Any:
        """Return what Hydra composes, with its own section ``hydra``.

        Args:
            name: Primary config; None: nothing but what the overrides add.
            overrides: Choices of groups, and options of section hydra.
        """
        from hydra import compose, initialize_config_dir
        from hydra.core.config_store import ConfigStore
        from hydra.core.global_hydra import GlobalHydra
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        searchpath = [f"hydra.searchpath=[pkg://{PACKAGE}]"] if len(self.roots) > 1 else []
        if name is not None and not (self.roots[0] / f"{name}.yaml").is_file():
            # Hydra reads a primary config before it adds the search path.
            ConfigStore.instance().store(name="_primary", node={"defaults": [name]})
            name = "_primary"
        application = GlobalHydra.instance().hydra  # that of a program which calls the Python API
        GlobalHydra.instance().clear()
        try:
            with initialize_config_dir(str(self.roots[0]), version_base="1.3"):
                config = compose(name, [*searchpath, *overrides], return_hydra_config=True)
        except RecursionError:
            raise ConfigError(
                f"--config-name {name}: its defaults lists name each other for ever; in"
                " --config-dir give your own config another name than the one it lists"
            ) from None
        except (HydraException, OmegaConfBaseException, YAMLError) as e:
            raise ConfigError(hydra_message(e)) from e
        except UnicodeDecodeError as e:
            raise ConfigError(
                f"--config-dir {self.roots[0]}: save all files as UTF-8 ({one_line(e)})"
            ) from e
        finally:
            if application is not None:
                GlobalHydra.instance().initialize(application)
        OmegaConf.set_struct(config, False)
        return config

    def files(
        self, name: str, choices: Mapping[str, Any]
    ) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield label and content of a config and of those in its defaults list.

        The order is Hydra's, from weak to strong; Hydra has composed the files before.

        Args:
            name: The config, GROUP/NAME or the name of a primary one.
            choices: Member of each group that Hydra chose.
        """
        from embodied_ppo.options import loader as strict

        root = next((root for root in self.roots if (root / f"{name}.yaml").is_file()), None)
        if root is None:
            return
        text = (root / f"{name}.yaml").read_text(encoding="utf-8")
        content = strict.plain_yaml(text, aliases=True) or {}
        group = name.rpartition("/")[0]
        package = re.search(r"^# *@package +(\S+)", text, re.MULTILINE)
        place = package[1] if package and package[1] != "_group_" else group.replace("/", ".")
        defaults = content.pop("defaults", [])

        def absolute(path: str) -> str:
            """Return a path of the defaults list, which is relative unless it begins with /."""
            return path.lstrip("/") if path.startswith("/") or not group else f"{group}/{path}"

        for entry in defaults if "_self_" in defaults else [*defaults, "_self_"]:
            if entry == "_self_":
                for section in reversed(place.split(".") if place not in ("", "_global_") else []):
                    content = {section: content}
                yield self.label(name), content
            elif isinstance(entry, str):
                yield from self.files(absolute(entry.partition("@")[0]), choices)
            else:
                for key in entry:
                    chosen = absolute(key.removeprefix("optional "))
                    if choices.get(chosen) is not None and not key.startswith("override "):
                        path = f"{chosen.partition('@')[0]}/{choices[chosen]}"
                        yield from self.files(path, choices)


def config_dir(args: argparse.Namespace) -> str | None:
    """Return --config-dir. Raises UsageError where there is no such directory."""
    if args.config_dir and not Path(args.config_dir).is_dir():
        raise UsageError(f"--config-dir {args.config_dir}: no such directory")
    return args.config_dir


def config_folders(args: argparse.Namespace) -> ConfigFolders:
    """Return the folders of configs. Raises UsageError without the primary config."""
    own = [Path(os.path.abspath(args.config_dir))] if config_dir(args) else []
    primary = args.command if args.command in PRIMARY else "train"
    name = (args.config_name or primary).removesuffix(".yaml")
    folders = ConfigFolders((*own, shipped()), name)
    if name not in (names := folders.members("")):
        raise UsageError(
            f"--config-name {name}: no such config; {choose(name, names, 'there are: ')}"
        )
    return folders


def shipped() -> Path:
    """Return the folder of the shipped configs. Raises UsageError without an installation."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"{PACKAGE} is not installed; install embodied-ppo again")
    return Path(next(iter(spec.submodule_search_locations)))


def hydra_message(error: Exception) -> str:
    """Return Hydra's message without references to Hydra's documentation."""
    text = one_line(error)
    for tail in (" Config search path:", " See https://", " full_key:"):
        text = text.partition(tail)[0]
    pattern = r"(.*Could not find '(?:.*/)?(.*?)') Available options in '.*?': (.*)"
    if match := re.fullmatch(pattern, text):
        return f"{match[1]}; {choose(match[2], match[3].split(), 'there are: ')}"
    return text
