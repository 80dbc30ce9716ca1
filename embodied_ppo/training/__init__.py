"""The training loop and what it writes.

Belongs here: the loop, the system that it drives, checkpoints, run directories, logs, health checks
of metrics.

Does not belong here: losses, simulators, Ray.

To add a metric: return it from the code that measures it under a tag such as ``policy/entropy``,
and add a row with its unit and healthy range to docs/metrics.md.
"""
