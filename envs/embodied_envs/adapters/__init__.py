"""Simulators of other packages behind ``embodied_envs.types.VectorEnv``.

Belongs here: one module for each simulator family, and what they share (the base class, spaces,
actions, action chunks, delays and sensor errors).

Does not belong here: our own physics (``physics``) and tasks (``tasks``).

To add a simulator:
    1. Write a module with ``has_task(id)`` and a subclass of ``base.Adapter``.
    2. In ``factory``, add its name to ``SIMULATORS`` and a case to ``_make_env``. The constructor
       refuses an unknown id. For ``simulator="auto"`` add ``has_task`` to ``engines.simulator_of``,
       before EnvPool and Gymnasium.
    3. Add the same name to the trainer's option ``env.simulator``.
    4. Run ``embodied_envs.check_env`` on it in a test.
"""
