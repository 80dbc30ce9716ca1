"""Options: from YAML files and the command line to typed, checked values.

Belongs here: what an option means and what reads it (``schema``, ``describe``, ``readers``), how
text becomes values (``compose``, ``config_folders``, ``loader``), many runs (``sweeps``), which
options go together (``validation``, and ``rules`` for each mode), names of other trainers
(``aliases``), sizes of batches, the placement syntax and its memory.

Does not belong here: code that acts on an option. Hydra is imported in this folder only.

To add an option:
    1. Add a field with type, bounds, default and meaning to the dataclass of its section in
       ``schema``.
    2. Read it where it acts.
    3. If one mode alone reads it, or other options decide whether it is read, declare that on the
       field: ``option(default, mode=.., read_if=..)``. A rule that relates several options belongs
       in ``validation``.
"""
