"""What each mode decides about options, before any model or simulator is loaded.

Belongs here: for each mode a function that refuses combinations of options, and the tables that
map a mode's name to what it needs (``select``).

Does not belong here: which mode reads an option, which is declared in ``schema``; rules that both
modes have, which are in ``validation``; the construction of environments, models and workers, which
is in ``modes``. The rules are not in ``modes`` because ``loader``, ``tools`` and the checkpoint
reader need them, and must refuse an option within 2 seconds, before torch is loaded.

To add a mode:
    1. Add its name to ``schema.Mode`` and its roles to ``placement.ROLES``.
    2. Write its ``check`` in a file here and add it to the tables in ``select``.
"""
