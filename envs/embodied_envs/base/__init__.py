"""Functions that the simulators share with the trainer.

Belongs here: functions over nested tensors (``tree``), errors and the format of their messages,
random numbers, images, the record of the simulator call in progress (``watchdog``), compilation of
tensor functions, free memory of the host.

Does not belong here: the data types (``embodied_envs.types``), and what only simulators or only
the trainer needs.
"""
