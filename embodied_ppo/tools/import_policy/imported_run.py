"""Write a run whose first checkpoint is a trained policy of another library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from embodied_envs.base.errors import ConfigError, shorten, show
from embodied_ppo.cluster.robot_memory import describe_spaces
from embodied_ppo.core.guarded_files import replace_file
from embodied_ppo.options import loader, validation
from embodied_ppo.options.compose import GIVEN
from embodied_ppo.options.schema import Config
from embodied_ppo.policies.actor_critic import ActorCritic
from embodied_ppo.policies.robot_policy import make_policy
from embodied_ppo.ppo.ppo import PPO
from embodied_ppo.programs import runs
from embodied_ppo.tools.import_policy import libraries
from embodied_ppo.tools.import_policy.imported import ImportedPolicy
from embodied_ppo.training.local_system import LocalSystem

IMPORT = "import.json"  # file of a run directory that names the origin of an imported policy


def import_policy(
    loaded: loader.Loaded[Config],
    library: str,
    path: Path,
    *,
    normalizer: Path | None = None,
    critic: bool = True,
    quiet: bool = False,
) -> dict[str, Any]:
    """Write a run whose first checkpoint is a trained policy of another library.

    Args:
        loaded: Options of the run. Those that follow from the file are set here.
        library: A key of ``tools.import_policy.libraries.LIBRARIES``.
        path: File of that library.
        normalizer: File of a normaliser of observations that the library keeps beside the policy.
        critic: Whether the value function is imported; False: a new one.
        quiet: Whether progress is not shown.

    Returns:
        Directory, checkpoint, options that follow from the file, and notes.

    Raises:
        ConfigError, EnvError: The file, or an option, is refused; nothing was written.
    """
    if (mode := loaded.config.mode) != "embodied":
        raise ConfigError(f"remove mode = {mode}: import-policy reads policies of robots")
    policy = libraries.read(library, path, normalizer, critic=critic)
    config, derived = _with_imported_options(loaded, policy)
    explicit = loaded.deliberate(GIVEN)
    validation.check(config, explicit)
    for option in ("resume", "initial_policy", "teacher"):
        if (value := getattr(config, option)) is not None:
            reason = "import-policy writes a new run and does not read it"
            raise ConfigError(f"remove {option} = {shorten(str(value), 60)}: {reason}")
    if config.placement != "local" or config.cluster.component_placement:
        raise ConfigError(
            "write placement=local, and the placement when training goes on: train resume=RUN"
            f" placement={config.placement}: import-policy runs in one process"
        )
    probe = make_policy(config, describe_spaces(config))
    assert isinstance(probe, ActorCritic)
    policy.check_sizes(probe, config.env.title)
    origin = {
        "library": library,
        "file": str(path.absolute()),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "normalizer": None if normalizer is None else str(normalizer.absolute()),
        "options": derived,
        "notes": [*policy.notes, *_import_notes(policy, config, explicit)],
    }

    def initialize(system: LocalSystem, run_dir: Path, say: Callable[[str], None]) -> None:
        assert isinstance(system.module, ActorCritic)
        say(f"{config.name}: {path} of {libraries.LIBRARIES[library][0]}")
        scaled = config.algorithm.reward_norm == "running"
        policy.load_into(system.module, normalized_rewards=scaled)
        if scaled and policy.value_scale is not None and isinstance(system.learner, PPO):
            moments = system.learner.returns[0].moments
            moments.var.fill_(policy.value_scale.std**2)
            moments.count.fill_(max(policy.value_scale.count, 1.0))
        replace_file(run_dir / IMPORT, json.dumps(origin, indent=1) + "\n")
        for note in origin["notes"]:
            say(f"note: {note}")

    run_dir, saved = runs.write_initial_policy(config, initialize, explicit=explicit, quiet=quiet)
    return {"run_dir": str(run_dir), "checkpoint": str(saved), **origin}


def _with_imported_options(
    loaded: loader.Loaded[Config], policy: ImportedPolicy
) -> tuple[Config, dict[str, Any]]:
    """Return the options of a run with those of an imported policy, and the latter by path.

    Raises:
        ConfigError: The user has given an option another value than the file needs.
    """
    options: Any = loader.dump(loaded.config)
    given = {path: reduce(getitem, path.split("."), options) for path in loaded.deliberate(GIVEN)}
    if policy.is_beta and given.get("model.distribution") != "beta":
        # A file of a Gaussian whose network returns the deviation has the same layout.
        raise ConfigError(
            f"write model.distribution=beta if {policy.label} is of BetaDistribution with"
            " action_range (-1, 1): it has no standard deviation, and policies whose network"
            " returns it cannot be imported"
        )
    fixed = policy.fixed_options()
    fixed["model.activation"] = policy.checked_activation(given.get("model.activation"))
    for option, value in fixed.items():
        if option in given and given[option] != value:
            written, stored = (shorten(show(x), 60) for x in (given[option], value))
            raise ConfigError(f"remove {option} = {written}: {policy.label} has {stored}")
    derived = fixed | {p: x for p, x in policy.suggested_options().items() if p not in given}
    for option, value in derived.items():
        section, name = option.split(".")
        options[section][name] = value
    return loader.read(Config, [("", options)]).config, derived


def _import_notes(policy: ImportedPolicy, config: Config, explicit: Any) -> list[str]:
    """Return what the user should know about an imported policy."""
    notes = ["the state of the optimiser is not imported; training starts with a new one"]
    if policy.activation is None and "model.activation" not in explicit:
        default = f"model.activation={config.model.activation} is the library's default"
        notes.append(f"{default}; the file does not contain it")
    if policy.normalizer is None:
        notes.append("the file has no normaliser: the policy reads observations as they are")
    gamma = config.algorithm.gamma
    if policy.critic is None:
        notes.append("the value function is new; train it first with algorithm.critic_warmup=10")
    elif policy.gamma not in (None, gamma):
        trained = f"the value function was trained with gamma={policy.gamma:g}"
        notes.append(f"{trained}, and algorithm.gamma = {gamma:g}")
    return notes
