"""The command line.

Belongs here: one module for each command with its arguments, what it runs and what it prints; the
dispatch (``main``); arguments and printing that several commands share (``arguments``, ``output``).

Does not belong here: what a command computes. That is in ``programs``, ``evaluation`` and
``tools``.

To add a command: write a module with ``add_arguments(parser)`` and ``run(args)``, whose docstring
has a summary and an example, and add it to ``main.COMMANDS`` (and to ``UNSUPERVISED`` if it runs no
simulator). Import torch and other folders of the package inside ``run``: --help must be fast. If it
has options of its own, add their dataclass to ``options.schema.OWN_OPTIONS``, its name to
``options.config_folders.PRIMARY``, a file configs/NAME.yaml, and a branch to
``options.validation.check``.
"""
