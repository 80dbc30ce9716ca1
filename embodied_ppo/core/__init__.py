"""Types and helpers that every part of the package uses.

Belongs here: the data types and protocols that other folders exchange (``types``), functions over
nested tensors (``tree``), errors, random numbers, running statistics, collectives, compilation of
tensor functions, free memory of the host.

Does not belong here: anything that reads an option, loads a simulator or a model, or imports Ray or
Hydra.

To add a data type: define a frozen dataclass or a protocol in ``types`` and give shapes and units
in its docstring.
"""
