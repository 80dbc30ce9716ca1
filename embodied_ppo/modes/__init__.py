"""What ``mode=`` selects.

Belongs here: the parts that a mode is made of, and the code that differs between the modes. Shared parts are in
``base``.

Does not belong here: anything that both modes do alike.
"""
