"""`embodied-ppo export`: write a robot policy for ONNX Runtime, a language model for
transformers.
"""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output
from embodied_ppo.config.compose import prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "export")


def run(args: argparse.Namespace) -> None:
    """Export a checkpoint and print the summary."""
    arguments.reject_paths(args)
    config = prepare(args, args.overrides).config
    arguments.check_checkpoints(config)
    from embodied_ppo import run

    with output.stdout_to_stderr():
        summary = run.export(config.checkpoint, config.out, adapter=config.lora == "adapter")
    output.print_result(summary, args)
