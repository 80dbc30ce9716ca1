"""Simulators of other packages behind ``embodied_ppo.core.types.VectorEnv``.

Belongs here: one module for each simulator family, and what they share (the base class, spaces,
actions, action chunks, delays and sensor errors).

Does not belong here: our own physics (``physics``) and tasks (``tasks``).

To add a simulator:
    1. Write a module with ``has_task(id)`` and a subclass of ``base.Adapter``.
    2. In ``embodied_envs``, add its name to ``SIMULATORS`` and a branch to ``_make_env``:
       ``if simulator == "x" or (simulator == "auto" and x.has_task(id))``, before those of EnvPool
       and Gymnasium. The constructor refuses an unknown id.
    3. Add the same name to ``EnvConfig.simulator`` in ``embodied_ppo.config.schema``.
    4. If it may start only once in a process, add it to ``EmbodiedMode.can_estimate``.
    5. Run ``embodied_envs.check_env`` on it in a test.
"""
