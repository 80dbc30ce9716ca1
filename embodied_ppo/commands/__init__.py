"""The command line.

Belongs here: one module for each command with its arguments, what it runs and what it prints; the
dispatch (``main``); arguments and printing that several commands share (``arguments``, ``output``).

Does not belong here: what a command computes. That is in ``embodied_ppo.run``, and for ``fit`` and
``tune`` in ``modes.memory_fit`` and ``modes.placement_search``.

To add a command: write a module with ``add_arguments(parser)`` and ``run(args)``, and add an entry
to ``main.COMMANDS`` (``supervised=True`` if it runs a simulator) and a case to ``main.load``.
Import torch and ``embodied_ppo.run`` inside ``run``: --help must be fast. If it has options of its
own, add their dataclass to ``config.schema.OWN_OPTIONS``, its name to ``config.compose.PRIMARY``, a
file configs/NAME.yaml, and a branch to ``config.validation.check``.
"""
