"""The command line.

Belongs here: one file for each command with more than a few lines, the dispatch (``main``), printing (``output``).

Does not belong here: what a command does beyond reading arguments and printing; ``embodied_ppo.run`` does that.

To add a command: add a function and a row to ``main.COMMANDS``; if it has options of its own, add their dataclass to
``config.schema.OWN_OPTIONS`` and a file to configs/.
"""
