"""Configurations of other frameworks, converted to ours.

Belongs here: a table for each framework (``verl.yaml``), its rules for options that depend on
others (``verl.py``), and the code that applies both (``table``, ``convert``).

Does not belong here: names that are accepted as aliases everywhere (``options.aliases``).

To add an option of a framework: add a line to its table. To add a framework: write a table (see
``table``), a module with its rules, and add it to ``convert.FRAMEWORKS``.
"""
