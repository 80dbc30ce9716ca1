"""`embodied-ppo clone`: train a policy by cloning demonstrations only."""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import FLAGS, prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "clone")


def run(args: argparse.Namespace) -> None:
    """Clone demonstrations and print the summary."""
    loaded = prepare(args, args.overrides)
    output.print_aliases(loaded, args)
    arguments.check_checkpoints(loaded.config)
    from embodied_ppo.data import dataset_folder
    from embodied_ppo.training import trackers

    # Before torch is loaded:
    trackers.check(loaded.config)
    if loaded.config.cloning.dataset is not None:
        dataset_folder.check(loaded.config.cloning.dataset, loaded.config.cloning.captions)
    from embodied_ppo import run

    explicit = loaded.deliberate({FLAGS})
    with output.stdout_to_stderr():
        summary = run.clone(loaded.config, explicit=explicit, quiet=args.quiet)
    output.print_result(summary, args)
