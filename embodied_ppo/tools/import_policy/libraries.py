"""The libraries whose policies can be imported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from embodied_envs.base.errors import ConfigError
from embodied_ppo.tools.import_policy import cleanrl, rsl_rl, sb3
from embodied_ppo.tools.import_policy.imported import ImportedPolicy
from embodied_ppo.tools.import_policy.untrusted_files import label_of, refusing_damage

# Key -> name of the library, and the reader of its files.
LIBRARIES = {
    "sb3": ("Stable-Baselines3", sb3.read),
    "rsl_rl": ("rsl_rl", rsl_rl.read),
    "cleanrl": ("CleanRL", cleanrl.read),
}
# Libraries whose checkpoints do not contain the normaliser of observations.
KEEP_NORMALIZER_APART = ("sb3", "cleanrl")


def read(library: str, path: Path, normalizer: Path | None, *, critic: bool) -> ImportedPolicy:
    """Read a trained policy of another library.

    Args:
        library: A key of ``LIBRARIES``.
        path: The file.
        normalizer: File of a normaliser that the library keeps beside the policy.
        critic: Whether the value function is imported.

    Raises:
        ConfigError: The file is refused.
    """
    if normalizer is not None and library not in KEEP_NORMALIZER_APART:
        raise ConfigError(
            f"remove normalizer={label_of(normalizer)}: a file of {library} contains its normaliser"
        )
    with refusing_damage(label_of(path)):
        policy = LIBRARIES[library][1](path, normalizer)
        if not critic:
            policy = replace(policy, critic=None, value_scale=None)
        policy.check()
    return policy
