"""A placement of your own: which role runs on which devices, and what memory that needs.

    python scripts/examples/own_placement.py

Roles joined by a comma share a process and one copy of the weights; entries with common devices
time-share them; the others run concurrently. On the command line:

    embodied-ppo plan experiment=NAME cluster.devices_per_node=4 \\
        'cluster.component_placement={env: 0-1, "rollout,actor": 2-3}'

With `train` instead of `plan` the command starts these processes on a Ray cluster.
"""

from __future__ import annotations

from typing import Any

from embodied_ppo.cluster.run_plan import describe_plan
from embodied_ppo.options.loader import load
from embodied_ppo.options.schema import Config


def main() -> dict[str, Any]:
    """Return the device of each role; nothing is started."""
    config = load(
        Config,
        {
            "env": {"id": "CartPole-v1", "num_envs": 16},
            "algorithm": {"horizon": 32, "global_batch_size": 128},
            "device": "cpu",
            "cluster": {
                "devices_per_node": 4,
                "component_placement": {"env": "0-1", "rollout,actor": "2-3"},
            },
        },
    )
    plan = describe_plan(config)
    for row in plan["devices"]:
        print(*row)
    for row in plan["memory"]:
        print(*row)
    return plan


if __name__ == "__main__":
    main()
