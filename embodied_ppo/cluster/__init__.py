"""Several processes: Ray workers, weight transfer, sharding, memory estimates.

Belongs here: what starts, connects and supervises processes. Ray is imported in
``ray_system``, ``ray_processes``, ``ray_worker`` and ``ray_reservation`` only.

Does not belong here: the placement syntax and its plan (``options.placement``), what a worker of a
mode holds (``modes``).

To add a placement preset: add its groups to ``options.placement`` and a file to configs/placement/.
"""
