"""The training loop and what it writes.

Belongs here: the loop, the system that it drives, checkpoints, run directories, logs, trackers
(Weights & Biases, MLflow), health checks of metrics.

Does not belong here: losses, simulators, Ray.

To add a metric: return it from the code that measures it under a tag such as ``policy/entropy``, as
``Mean(sum, count)`` for a mean over samples, else as a float. Add a row with its unit and healthy
range to docs/metrics.md; a range that should warn goes into health.yaml too. A statistic of
minibatches is a sum that ``ppo.PPOLoss.forward`` returns: add its name to
``minibatches.PolicyLoss``, and divide it in ``ppo.metrics.with_optimization``.

To add a tracking tool: write a class with the methods of ``trackers.WandbTracker``, add it to
``trackers.TOOLS``, its package to ``trackers.check`` and pyproject.toml, its name to the option
``trackers`` in ``options/schema.py``.
"""
