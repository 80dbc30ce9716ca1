"""Configurations of other frameworks, converted to ours.

Belongs here: one table for each framework (``rlinf``, ``verl``, ``roll``, ``trl``) and the code
that applies it.

Does not belong here: names that are accepted as aliases everywhere (``config.aliases``).

To add a framework: write a table of rules (see ``rules``) and add it to ``convert.FRAMEWORKS``.
"""
