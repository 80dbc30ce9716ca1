"""`embodied-ppo new-task`: write a task for a robot from its MJCF.

Example: new-task my_robot --mjcf robot.xml
"""

from __future__ import annotations

import argparse
from pathlib import Path

from embodied_ppo.commands import output
from embodied_ppo.core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "name", metavar="NAME", help="name of the task's module; the class is named in CamelCase"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--mjcf", metavar="FILE", help="MuJoCo XML of the robot")
    source.add_argument("--robot", metavar="ROBOT", help="robot of EnvPool's assets: unitree_go1")
    source.add_argument("--urdf", metavar="FILE", help="URDF, which is converted to NAME.xml")
    template = "what the robot does: keep its posture, follow commands, hover at or reach a target,"
    template += " or lift a cube to it"
    choices = ("home", "velocity", "hover", "reach", "pick")
    parser.add_argument("--template", choices=choices, default="home", help=template)
    parser.add_argument("--floating", action="store_true", help="the base of the URDF can move")
    parser.add_argument("--floor", action="store_true", help="add a floor, which the file lacks")
    parser.add_argument("--kp", type=float, metavar="X", help="stiffness of all joints, N m/rad")
    parser.add_argument("--kd", type=float, metavar="X", help="damping of all joints, N m s/rad")
    gains = "YAML of 'JOINT: [kp, kd]' (JOINT may have *), or inertia: gains that suit the robot"
    parser.add_argument("--gains", metavar="FILE", help=gains)
    parser.add_argument("--out", metavar="DIR", help="folder to write to (default: ./NAME)")
    parser.add_argument("--json", action="store_true", help="print files and assumptions as JSON")


def run(args: argparse.Namespace) -> None:
    """Write the task and print the files, the assumptions and the next commands."""
    from embodied_envs.base.errors import check_choice
    from embodied_envs.robots.preparation import Preparation
    from embodied_envs.tasks.panda import asset_robots
    from embodied_ppo.tools import task_generator

    if args.robot is not None:
        check_choice("--robot", args.robot, robots := asset_robots())
        args.mjcf = robots[args.robot]
    if args.floating and args.urdf is None:
        raise UsageError("remove --floating: write <freejoint/> in the base of the MJCF instead")
    gains = task_generator.read_gains(args.kp, args.kd, args.gains)
    task = task_generator.write(
        args.name,
        Path(args.mjcf or args.urdf),
        Path(args.out) if args.out else None,
        urdf=args.urdf is not None,
        floating=args.floating,
        preparation=Preparation(gains=gains, floor=args.floor),
        template=args.template,
    )
    if args.json:
        print(output.as_json(vars(task)))
        return
    titles = ("written", "assumed, change it there", "next")
    for title, lines in zip(titles, (task.files, task.assumed, task.commands), strict=True):
        print("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
