"""Reading of parquet files, with errors that name the file and a cure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodied_ppo.core.errors import ConfigError, one_line


def import_pyarrow(path: Path) -> tuple[Any, Any]:
    """Import pyarrow and pyarrow.parquet, for the file ``path``.

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: parquet files need pyarrow ({error}); pip install pyarrow"
        ) from error
    return pyarrow, parquet


def read_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    """Read columns of a parquet file, None: all.

    Raises:
        ConfigError: The file or a column is missing or damaged.
    """
    pyarrow, parquet = import_pyarrow(path)
    if not path.exists():
        raise ConfigError(f"{path} is missing; copy, download or record the folder again")
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if invalid := [name for name in columns or () if names.count(name) != 1]:
                problem = "has several columns" if invalid[0] in names else "has no column"
                raise ConfigError(f"{path}: {problem} {invalid[0]}; it has {', '.join(names)}")
            return file.read(None if columns is None else list(columns)).combine_chunks()
    # Invalid names of columns raise the last two.
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        raise ConfigError(
            f"{path}: is no parquet file that can be read ({one_line(error)}); write or download it"
            " again"
        ) from error


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a parquet file.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    table = read_table(path)
    try:
        return table.to_pylist()
    # Invalid text, and dates out of range.
    except (import_pyarrow(path)[0].ArrowException, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path}: has values that cannot be read ({one_line(error)}); write or download it"
            " again"
        ) from error
