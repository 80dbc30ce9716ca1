"""Whether a folder is a dataset in LeRobot's layout. Loads neither torch nor the dataset."""

from __future__ import annotations

from pathlib import Path

from embodied_ppo.core.errors import ConfigError

CAPTIONS = "meta/captions.json"
"""File of the captions: object -> expressions that refer to it. LeRobot does not read it."""


def check(folder: str | Path, captions: int = 0) -> None:
    """Check the folder of ``cloning.dataset``.

    Args:
        folder: The folder.
        captions: Value of ``cloning.captions``.

    Raises:
        ConfigError: It holds no dataset, or none with the captions that the option needs.
    """
    name, folder = folder, Path(folder).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"cloning.dataset={folder}: does not exist; record it (embodied-ppo demos), or name"
            " another"
        )
    if not (folder / "meta" / "info.json").is_file():
        raise ConfigError(
            f"cloning.dataset={folder}: holds no meta/info.json; name a dataset in LeRobot's layout"
        )
    if captions and not (folder / CAPTIONS).is_file():
        raise ConfigError(
            f"cloning.captions={captions}: {name} holds no captions; record some (embodied-ppo"
            " demos captions=true), or write cloning.captions=0"
        )
