"""`embodied-ppo export`: write a robot policy for ONNX Runtime, a model for transformers.

Example: export checkpoint=runs/NAME/DATE-SEED out=DIR
"""

from __future__ import annotations

import argparse

from embodied_ppo.commands import arguments, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_config_arguments(parser, "export")


def run(args: argparse.Namespace) -> None:
    """Export a checkpoint and print the summary."""
    config = arguments.resolve(args).config
    from embodied_ppo.tools.deploy.policy_export import export

    with output.stdout_to_stderr():
        summary = export(config.checkpoint, config.out, adapter=config.lora == "adapter")
    output.print_result(summary, args)
