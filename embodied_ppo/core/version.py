"""Version of this package; the build reads it, too (pyproject.toml)."""

__version__ = "0.1.0"
