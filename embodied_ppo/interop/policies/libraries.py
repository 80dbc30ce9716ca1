"""The libraries whose policies can be imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from embodied_ppo.core.errors import ConfigError, choose
from embodied_ppo.interop.policies import brax, cleanrl, rl_games, rsl_rl, sb3, skrl
from embodied_ppo.interop.policies.imported import ImportedPolicy

Reader = Callable[[Path, Path | None], ImportedPolicy]


@dataclass(frozen=True)
class Library:
    """A library.

    Attributes:
        title: Its name.
        read: Reads a file, with the file of a normaliser.
    """

    title: str
    read: Reader


LIBRARIES = {
    "sb3": Library("Stable-Baselines3", sb3.read),
    "rsl_rl": Library("rsl_rl", rsl_rl.read),
    "cleanrl": Library("CleanRL", cleanrl.read),
    "rl_games": Library("rl_games", rl_games.read),
    "skrl": Library("skrl", skrl.read),
    "brax": Library("Brax", brax.read),
}


def read(library: str, path: Path, normalizer: Path | None, *, critic: bool) -> ImportedPolicy:
    """Read a trained policy of another library.

    Args:
        library: A key of ``LIBRARIES``.
        path: The file.
        normalizer: File of a normaliser that the library keeps beside the policy.
        critic: Whether the value function is imported.

    Raises:
        ConfigError: The library is unknown, or the file is refused.
    """
    if library not in LIBRARIES:
        raise ConfigError(
            f"import-policy {library}: {choose(library, list(LIBRARIES), 'libraries: ')}"
        )
    policy = LIBRARIES[library].read(path, normalizer)
    if not critic:
        policy = replace(policy, critic=None, value_scale=None)
    policy.check()
    return policy
