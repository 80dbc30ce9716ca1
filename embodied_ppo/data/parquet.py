"""Reading of parquet files and other data files, with errors that name the file and a fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import ConfigError, one_line


def damaged(problem: str) -> ConfigError:
    """Return the error of a damaged file."""
    return ConfigError(f"{problem}; write, record or download it again")


@contextmanager
def reading(label: Path | str) -> Iterator[None]:
    """Convert exceptions of a damaged or missing file to ConfigError.

    Malformed rows, pyarrow, Pillow and ffmpeg raise many types, some of which are not documented.
    """
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise ConfigError(
            f"{label} is missing; copy, download or record the folder again"
        ) from error
    # pyarrow raises many types for damaged files (scripts/fuzz.py).
    except Exception as error:
        raise damaged(f"{label} cannot be read ({one_line(error, kind=True)[-200:]})") from error


def check_pyarrow(path: Path) -> None:
    """Check that pyarrow, which reads and writes the file ``path``, is installed.

    Raises:
        ConfigError: It is not.
    """
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{path}: parquet files need pyarrow ({error}); pip install pyarrow"
        ) from error


def read_table(
    path: Path, columns: Sequence[str] | None = None, *, group: int | None = None
) -> Any:
    """Read columns of a parquet file, None: all.

    Args:
        path: The file.
        columns: Names.
        group: Row group to read; None: all.

    Raises:
        ConfigError: The file or a column is missing or damaged.
    """
    check_pyarrow(path)
    import pyarrow.parquet as parquet

    with reading(path), parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if invalid := [name for name in columns or () if names.count(name) != 1]:
            problem = "has several columns" if invalid[0] in names else "has no column"
            raise ConfigError(f"{path}: {problem} {invalid[0]}; it has {', '.join(names)}")
        names = None if columns is None else list(columns)
        table = file.read(names) if group is None else file.read_row_group(group, names)
        return table.combine_chunks()


def row_group_sizes(path: Path) -> list[int]:
    """Return the number of rows of each row group of a readable parquet file."""
    import pyarrow.parquet as parquet

    with reading(path), parquet.ParquetFile(path) as file:
        return [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a parquet file.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    table = read_table(path)
    with reading(path):
        return table.to_pylist()
