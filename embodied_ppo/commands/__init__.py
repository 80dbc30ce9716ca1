"""The command line.

Belongs here: one module for each command with its arguments, what it runs and what it prints; the
dispatch (``main``); arguments and printing that several commands share (``arguments``, ``output``).
``fit`` and ``tune`` import torch, so their arguments are in ``fit_command`` and ``tune_command``.

Does not belong here: what a command does beyond reading arguments and printing;
``embodied_ppo.run`` does that.

To add a command: write a module with ``add_arguments(parser)`` and ``run(args)``, and add it to
``main.COMMANDS`` and ``main.load``. If it has options of its own, add their dataclass to
``config.schema.OWN_OPTIONS`` and a file to configs/. Import torch and ``embodied_ppo.run`` inside
``run``: --help must be fast.
"""
