"""`embodied-ppo doctor`: check this machine and print a fix for every problem.

Example: doctor
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from embodied_ppo.commands import arguments, output
from embodied_ppo.commands.exit_codes import PROBLEM_FOUND
from embodied_ppo.tools.machine_checks import Check, run_checks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    arguments.add_override_arguments(parser, "doctor")


def run(args: argparse.Namespace) -> int:
    """Run all checks, print the results, and return the exit code."""
    arguments.refuse_lines(args.overrides, args.command)
    checks = run_checks()
    output.print_result([vars(check) for check in checks], args, lambda _: print_checks(checks))
    return PROBLEM_FOUND if any(check.breaks_default_recipes for check in checks) else 0


def print_checks(checks: Sequence[Check]) -> None:
    """Print one line for each check, followed by the fix of a problem."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        state = check.state.upper() if check.state == "ok" else check.state
        print(f"{state:<7}  {check.name:<{width}}  {check.found}")
        if check.fix:
            print(f"{'':<7}  {'':<{width}}  fix: {check.fix}")
    if broken := [check.name for check in checks if check.breaks_default_recipes]:
        print(f"broken, and the default recipes need it: {', '.join(broken)}")
    else:
        print("all that the default recipes need works")
