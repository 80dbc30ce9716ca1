"""MuJoCo's names come from C++ without types; to a type checker each is Any."""

from typing import Any

def __getattr__(name: str) -> Any: ...
