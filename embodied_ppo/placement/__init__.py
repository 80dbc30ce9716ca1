"""Several processes: Ray workers, weight transfer, sharding, memory and time estimates.

Belongs here: what starts, connects and supervises processes. Ray is imported in ``ray_system`` and
``ray_worker`` only.

Does not belong here: the placement syntax and its plan (``config.placement``), what a worker of a
mode holds (``modes``).

To add a placement preset: add its groups to ``config.placement`` and a file to configs/placement/.
"""
