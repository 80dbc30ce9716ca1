"""Whether a folder is a dataset in LeRobot's layout. Loads neither torch nor the dataset."""

from __future__ import annotations

from pathlib import Path

from embodied_envs.base.errors import ConfigError


def check(folder: str | Path) -> None:
    """Check the folder of ``cloning.dataset``.

    Raises:
        ConfigError: It holds no dataset.
    """
    folder = Path(folder).expanduser().absolute()
    if not folder.is_dir():
        raise ConfigError(
            f"cloning.dataset={folder}: does not exist; record it (embodied-ppo demos), or name"
            " another"
        )
    if not (folder / "meta" / "info.json").is_file():
        raise ConfigError(
            f"cloning.dataset={folder}: holds no meta/info.json; name a dataset in LeRobot's layout"
        )
