"""Configurations of other trainers, converted to ours.

Belongs here: one table for each trainer (``rlinf``, ``verl``, ``roll``, ``trl``) and the code that applies it.

Does not belong here: names that are accepted as aliases everywhere (``config.aliases``).

To add a trainer: write a table of rules (see ``rules``) and list it in ``convert``.
"""
