"""What ``mode=`` selects: the kind of training.

Belongs here: the interface ``Mode`` (``base``), one folder for each implementation, the mapping
from the option's value to the implementation (``registry``), and what all implementations share:
worker processes (``workers``), timing (``profile``), and the search for micro-batches
(``memory_fit``) and placements (``placement_search``).

Does not belong here: the components themselves (policies, learners, rollouts, placements).

To add a mode: implement ``base.Mode`` in a folder of its own, and add it to ``registry.MODES``, to
``Config.mode`` in ``config.schema`` and to ``config.placement.ROLES``.
"""
